"""`moeroute info | verify | cases | bench | plan | aclnn`."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import moeroute
from moeroute import dispatch, memory, scale_report

SIGNATURES = ("moeroute", "megatron", "transformer_engine", "torch_npu")
ARITHMETIC = ("bits", "tolerance")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `moeroute`; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="moeroute", description="Mixture-of-Experts routing for PyTorch: the same bits on every device."
    )
    parser.add_argument("--version", action="version", version=f"moeroute {moeroute.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    info = commands.add_parser("info", help="versions, devices, backends, threads, cache folder")
    info.add_argument("--warm", action="store_true", help="compile every CPU kernel now, into the cache folder")
    info.set_defaults(run=_info)

    _verify_options(commands)
    _cases_options(commands)

    bench = commands.add_parser("bench", help="measure against the memory's roof and the torch composition")
    bench.add_argument("--only", default="", help="cases whose name contains this")
    bench.add_argument("--seconds", type=float, default=2.0, help="for each case and way to measure (default: 2)")
    bench.add_argument("--threads", type=_positive, help="default: torch's")
    bench.add_argument("--out", type=Path, default=Path("out"), help="folder for JSON and chart (default: out)")
    bench.add_argument("--peers", action="store_true", help="against the libraries whose names moeroute.interop has")
    bench.add_argument("--npu", action="store_true", help="torch_npu's routing functions against the core verbs")
    bench.add_argument("--check", action="store_true", help="exit with 1 where a promised bound does not hold")
    bench.set_defaults(run=_bench)

    plan = commands.add_parser("plan", help="expert parallelism on paper: memory, traffic, imbalance of any ranks")
    scale_report.arguments(plan)
    plan.set_defaults(run=_plan)

    aclnn = commands.add_parser("aclnn", help="the aclnn interface as a C library")
    aclnn_commands = aclnn.add_subparsers(dest="aclnn_command", required=True, metavar="command")
    build = aclnn_commands.add_parser("build", help="write headers and shared libraries for C and C++ programs")
    build.add_argument("--prefix", type=Path, default=Path("build/aclnn"), help="folder (default: build/aclnn)")
    build.add_argument(
        "--warm", action="store_true", help="compile the operators' CPU kernels too, into the cache folder"
    )
    build.set_defaults(run=_aclnn_build)

    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stderr.close()
        return 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def _device(text: str) -> torch.device:
    try:
        return torch.empty(1, device=text).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if reason.startswith("Expected one of"):
            reason = "this torch knows no such device (npu needs torch_npu)"
        wanted = "must be a device that is there, as cpu or cuda:0"
        raise argparse.ArgumentTypeError(f"{wanted}; got {text}: {reason}") from None


def _need(command: str, *packages: str) -> None:
    """Say which package is missing, and how to get it, before anything starts."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"moeroute {command} needs {' and '.join(missing)}: pip install '.[{command}]' in a clone")


# ---------------------------------------------------------------------------- info


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _info(chosen: argparse.Namespace) -> int:
    rows: list[tuple[str, str]] = [
        ("moeroute", moeroute.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *((package, _version(package)) for package in ("torch", "numpy", "numba", "triton")),
        ("devices", ", ".join(_devices())),
    ]
    for backend in dispatch.NAMES:
        reason = dispatch.unavailable(backend)
        rows.append((f"backend {backend}", "available" if reason is None else f"not available: {reason}"))
    rows.append(("threads", f"{torch.get_num_threads()} (torch.set_num_threads changes them)"))
    if dispatch.unavailable("cpu") is None:
        rows += _numba_rows(chosen.warm)
    stats = memory.memory_stats()
    pool = "on" if stats["enabled"] else "off (MOEROUTE_MEMORY_POOL or set_memory_pool)"
    rows.append(("memory pool", f"{pool}, {stats['idle_bytes'] / 2**20:.0f} MiB idle"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _devices() -> list[str]:
    found = ["cpu"]
    for kind in ("cuda", "xpu", "npu", "mps"):
        device = getattr(torch, kind, None)
        if device is not None and device.is_available():
            count = device.device_count() if hasattr(device, "device_count") else 1
            found += [f"{kind}:{i}" for i in range(count)]
    return found


def _numba_rows(warm: bool) -> list[tuple[str, str]]:
    from moeroute.ops.numba_kit import launch

    rows = [("warm", _warm(dispatch.ROOMS))] if warm else []
    _start_threads()
    refusal = launch.threads_refusal()
    layer = launch.threading_layer() or "not started (one thread)" if refusal is None else f"none: {refusal}"
    return [*rows, ("threading layer", layer), ("kernel cache", _kept())]


def _warm(rooms: Sequence[str]) -> str:
    """Compile the kernels of these rooms, or load them from the cache folder, and say so."""
    from moeroute.ops.numba_kit import launch

    os.environ.setdefault("MOEROUTE_QUIET", "1")  # there is no need to announce each
    for room in rooms:
        dispatch.module(room, "cpu")
    kernels = [kernel for kernel in launch.Kernel.every if kernel.room in rooms]
    start = time.perf_counter()
    for done, kernel in enumerate(kernels):
        _progress(f"compiling kernels: {done} of {len(kernels)} done, {time.perf_counter() - start:.0f} s")
        kernel.warm()
    _start_threads()
    _progress("")
    return f"{len(kernels)} kernels compiled or loaded in {time.perf_counter() - start:.1f} s"


def _progress(line: str) -> None:
    """The line in place of the one before, where a person looks on."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _start_threads() -> None:
    """A call large enough for several threads: the threading layer shows, and what divides the work is compiled."""
    plan = moeroute.plan_from_row_of_slot(torch.arange(2048, dtype=torch.int32), 2048, 2048)
    moeroute.permute(torch.zeros(2048, 256), plan)


def _kept() -> str:
    """Where compiled kernels are kept; why nowhere."""
    from moeroute.ops.numba_kit import cache, launch

    folder = launch.cache_folder()
    return f"none: {launch.cache_refusal}" if folder is None else folder + cache.remarks()


# ---------------------------------------------------------------------------- verify, cases


def _verify_options(commands: Any) -> None:
    verify = commands.add_parser("verify", help="the bits of every backend, or somebody else's functions, case by case")
    verify.add_argument("--backend", choices=dispatch.NAMES, help="only this one (default: all)")
    verify.add_argument("--device", type=_device, help="only this one (default: the CPU and every accelerator)")
    verify.add_argument("--only", default="", help="checks whose name contains this")
    verify.add_argument("--seed", type=int, default=0, help="of the inputs; others than 0 need a run of the reference")
    verify.add_argument("--target", metavar="PACKAGE.MODULE", help="judge the functions of this module instead")
    verify.add_argument("--signature", choices=SIGNATURES, help="whose parameters they have (default: seen from names)")
    verify.add_argument("--arithmetic", choices=ARITHMETIC, default="bits", help="with --target (default: bits)")
    verify.add_argument("--autograd", action="store_true", help="with --target: torch's gradients of its functions too")
    verify.add_argument("--large", action="store_true", help="with --target: tensors of more than 2^31 elements")
    verify.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    verify.add_argument("--junit", type=Path, metavar="FILE", help="write what was found as JUnit's XML")
    verify.add_argument("--html", type=Path, metavar="FILE", help="with --target: write a report")
    verify.set_defaults(run=_verify)


def _cases_options(commands: Any) -> None:
    cases = commands.add_parser("cases", help="the cases as files, for C++, CUDA and other languages")
    cases_commands = cases.add_subparsers(dest="cases_command", required=True, metavar="command")
    export = cases_commands.add_parser("export", help="write inputs, expected results and manifest.json")
    export.add_argument("folder", type=Path)
    export.add_argument("--format", choices=("npz", "safetensors", "bin"), default="npz", help="default: npz")
    export.add_argument("--only", default="", help="cases whose name contains this")
    compare = cases_commands.add_parser("compare", help="judge the results that were written beside the cases")
    compare.add_argument("folder", type=Path)
    compare.add_argument("--arithmetic", choices=ARITHMETIC, default="bits", help="default: bits")
    compare.add_argument("--only", default="", help="cases whose name contains this")
    compare.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write a report")
    cases.set_defaults(run=_cases)


def _verify(chosen: argparse.Namespace) -> int:
    from moeroute.conformance import command

    return command.verify(chosen, [torch.device(name) for name in _devices()])


def _cases(chosen: argparse.Namespace) -> int:
    from moeroute.conformance import command

    return command.cases(chosen)


# ---------------------------------------------------------------------------- bench


def _bench(chosen: argparse.Namespace) -> int:
    _need("bench", "rich", "matplotlib")
    from moeroute import bench, report
    from moeroute.conformance import measured

    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.peers:
        return _bench_peers(chosen)
    if chosen.npu:
        return _bench_npu(chosen)
    names = [case.name for case in measured.CASES if chosen.only in case.name]
    if chosen.only in "memory":
        names.append("memory")
    if not names:
        raise SystemExit(f"moeroute bench: no case's name contains {chosen.only!r}")
    lines = report.progress(len(names), bench.MODES, lambda tell: bench.run(names, chosen.seconds, tell))
    summaries = bench.summarise(lines)
    about: dict[str, Any] = bench.about()
    report.print_bench(summaries, lines, about)
    chosen.out.mkdir(parents=True, exist_ok=True)
    report.write(chosen.out / "bench.json", json.dumps({"about": about, "lines": lines}, indent=1).encode())
    report.bench_chart(chosen.out / "bench.png", summaries, about)
    print(f"written: {chosen.out / 'bench.json'}, {chosen.out / 'bench.png'}")
    return _missed(summaries, chosen.check)


def _missed(results: Iterable[Any], check: bool) -> int:
    """Name the bounds that do not hold; the exit status."""
    missed = [f"{result.case.name}: {miss}" for result in results for miss in result.missed]
    for miss in missed:
        print(f"below its bound: {miss}")
    return 1 if missed and check else 0


def _bench_peers(chosen: argparse.Namespace) -> int:
    from moeroute import bench, peers, report

    cases = [case for case in peers.CASES if chosen.only in case.name]
    if not cases:
        raise SystemExit(f"moeroute bench: no case's name contains {chosen.only!r}")
    if absent := peers.missing(cases):
        raise SystemExit(f"moeroute bench --peers needs {' and '.join(absent)}: pip install '.[hosts]' in a clone")
    results = peers.run(cases, chosen.seconds)
    report.print_peers(results, bench.about())
    return _missed(results, chosen.check)


def _bench_npu(chosen: argparse.Namespace) -> int:
    from moeroute import bench, npu, report

    cases = [case for case in npu.CASES if chosen.only in case.name]
    if not cases:
        raise SystemExit(f"moeroute bench: no case's name contains {chosen.only!r}")
    results = npu.run(cases, chosen.seconds)
    report.print_npu(results, bench.about())
    return _missed(results, chosen.check)


# ---------------------------------------------------------------------------- plan


def _plan(chosen: argparse.Namespace) -> int:
    _need("bench", "rich", "matplotlib")
    status = scale_report.run(chosen)
    print(f"written: {chosen.out / 'plan.json'}, {chosen.out / 'plan.png'}")
    return status


# ---------------------------------------------------------------------------- aclnn


def _aclnn_build(chosen: argparse.Namespace) -> int:
    from moeroute.aclnn.library import build

    files = build.build(chosen.prefix)
    where = chosen.prefix.resolve()
    print(f"written: {len(files)} files under {where}")
    print(f"use: g++ PROGRAM.cpp -I{where}/include -L{where}/lib -Wl,-rpath,{where}/lib -lascendcl -lnnopbase -lopapi")
    if chosen.warm:
        if (reason := dispatch.unavailable("cpu")) is not None:
            raise SystemExit(f"moeroute aclnn build --warm: there are no CPU kernels ({reason})")
        # Of the rooms of kernels, the layer's experts are the only one that no aclnn operator enters.
        print(f"warm: {_warm([room for room in dispatch.ROOMS if room != 'activations'])}")
        print(f"kernel cache: {_kept()}")
    return 0
