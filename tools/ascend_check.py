"""Lower every kernel for Ascend, as far as that goes without the vendor's compiler and an NPU: to Linalg.

    make ascend-check

triton-ascend is a fork that takes the place of the package triton, hence an environment of its own, build/ascend,
which sees torch and the rest in the project's. This file runs in both: in the project's environment it
records what the launchers launch (specialisations.py) and hands it over as JSON; in the other one it lowers.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import platform
import re
import signal
import subprocess
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / "build" / "ascend"
PACKAGES = ("triton-ascend", "pybind11")  # constraints.txt has their versions
# Of damaged memory: an assertion on its own types notices some of it. What fails for good does so in each try.
DIES_NOW_AND_THEN = (-signal.SIGSEGV, -signal.SIGABRT)
TRIES = 5  # triton-adapter-opt 3.2.0 dies of a segmentation fault now and then, and lowers the same text the next time
TARGET = ("npu", "Ascend910B3", 0)

Lowered = dict[str, Any]

# ---------------------------------------------------------------------------- in the project's environment


def environment() -> tuple[Path | None, str]:
    """Its Python, or None and why there is none. Made on first use."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None, f"triton-ascend's wheel is for Linux on x86-64, not {sys.platform} on {platform.machine()}"
    constraints = ROOT / "constraints.txt"
    python, ready = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "ready"
    wanted = "\n".join(line for line in constraints.read_text().split() if line.startswith(PACKAGES))
    if ready.is_file() and ready.read_text() == wanted:
        return python, ""
    commands: tuple[list[str | Path], ...] = (
        [sys.executable, "-m", "venv", "--clear", ENVIRONMENT],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--constraint", constraints, *PACKAGES],
    )  # fmt: skip
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return (
                None,
                f"{ENVIRONMENT.name} cannot be made: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}",
            )
    # Behind its own packages, so that `import triton` finds the fork and `import torch` the project's.
    (packages,) = ENVIRONMENT.glob("lib/python*/site-packages")
    (packages / "project.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n")
    ready.write_text(wanted)
    return python, ""


def lower(python: Path, specialisations: list[Any]) -> list[Lowered]:
    """What became of each."""
    work = [
        {
            "kernel": one.kernel,
            "signature": one.signature,
            "constants": one.named_constants,
            "divisible": sorted(one.divisible),
            "words": str(one),
        }
        for one in specialisations
    ]
    done = subprocess.run(
        [python, __file__, "--lower"], input=json.dumps(work), stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[Lowered] = json.loads(done.stdout)
    return found


def recorded(few: bool) -> list[Any]:
    """One of each kernel, types of arguments, absence of tensors and constants; or so that each occurs."""
    import launch_cases
    import specialisations
    from moeroute.ops import triton_kit

    triton_kit.ASCEND = True
    launches = specialisations.record("sm_90", launch_cases.cases())
    if few:
        return specialisations.cover(launches)
    return list({(one.kernel, one.signature, one.constants): one for one in launches}.values())


def check(as_json: bool, few: bool) -> int:
    """Record, lower and report; returns the exit status."""
    python, reason = environment()
    if python is None:
        print(json.dumps(reason) if as_json else reason)
        return 0 if as_json else 1
    found = lower(python, recorded(few))
    if as_json:
        print(json.dumps(found))
        return 0
    wide = max(len(one["kernel"]) for one in found)
    for one in found:
        print(f"{one['kernel']:{wide}}  {one['words']}  {one['error'] or 'ok'}")
    failed = sum(bool(one["error"]) for one in found)
    kernels = {one["kernel"] for one in found}
    print(
        f"{TARGET[1]}: {len(kernels)} kernels, {len(found) - failed} of {len(found)} specialisations lowered to Linalg"
    )
    return 1 if failed else 0


# ---------------------------------------------------------------------------- in the environment of triton-ascend


def lower_one(work: dict[str, Any]) -> Lowered:
    """What became of one specialisation: its kernel, its words, and the error or ""."""
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendAttrsDescriptor, make_ttir, ttir_to_linalg
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    module, _, name = work["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), name)
    names = [name for name, _ in work["signature"]]
    attributes = AscendAttrsDescriptor.from_dict(
        {
            "cls": "AscendAttrsDescriptor",
            "arg_properties": {"tt.divisibility": [names.index(name) for name in work["divisible"]]},
        }
    )
    signature = {name: kind for name, kind in work["signature"] if kind != "constexpr"}
    source = ASTSource(kernel, signature, constants=work["constants"], attrs=attributes)
    backend = make_backend(GPUTarget(*TARGET))
    options = backend.parse_options({"enable_fp_fusion": False})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    error = ""
    try:
        functions, modules = backend.get_codegen_implementation(), backend.get_module_map()
        metadata = {**options.__dict__, "target": backend.target}
        ir_of_triton = make_ttir(source.make_ir(options, functions, modules, context), metadata, options)
        for further in reversed(range(TRIES)):
            try:
                text = ttir_to_linalg(ir_of_triton, metadata, options, named_ops=True)
                break
            except subprocess.CalledProcessError as failure:
                if failure.returncode not in DIES_NOW_AND_THEN or not further:
                    raise
        if "linalg." not in text and "memref." not in text:
            error = "no Linalg came out"
        elif loose := re.search(r"\bmath\.fma\b|fastmath<(?!none)\S*", text):
            error = f"operations may be fused or reordered: {loose[0]}"
    except subprocess.CalledProcessError as failure:
        lines = failure.stderr.decode(errors="replace").splitlines()
        reasons = [line for line in lines if "error:" in line or "Assertion" in line]
        error = reasons[0] if reasons else f"triton-adapter-opt exits with {failure.returncode}"
    except Exception as failure:  # whatever the compiler raises is the finding
        error = re.sub(r"\s+", " ", f"{type(failure).__name__}: {failure}")[-400:]
    return {"kernel": name, "words": work["words"], "error": error}


def lower_all() -> None:
    """Read specialisations from standard input as JSON, and write what became of them."""
    work = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr), ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        found = list(pool.map(lower_one, work, chunksize=4))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lower", action="store_true", help="read specialisations, write what became of them")
    options.add_argument("--json", action="store_true", help="print what became of them, or why there is no such thing")
    options.add_argument("--few", action="store_true", help="not every combination of what a launcher can choose")
    chosen = options.parse_args()
    if chosen.lower:
        lower_all()
    else:
        sys.exit(check(chosen.json, chosen.few))
