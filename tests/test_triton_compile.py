"""The Triton kernels compiled for devices that are not there: NVIDIA and AMD to machine code, Ascend to Linalg.

The compilers run in processes of their own: this one has Triton's interpreter.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")
if sys.platform != "linux":
    pytest.skip("Triton's compilers are for Linux", allow_module_level=True)

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")


def run(*command: str | Path, cache: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def kernels_of_the_tree() -> set[str]:
    """The first argument of every `launch`."""
    found = set()
    for file in (ROOT / "src" / "moeroute" / "ops").glob("*/*triton*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch":
                found.add(ast.unparse(node.args[0]))
    return found


KERNELS = kernels_of_the_tree()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compiled")
    more = ["--all"] if os.environ.get("MOEROUTE_LARGE") else []
    run(TOOLS / "kernels.py", "--check", folder / "found.json", *more, cache=folder / "cache")
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_was_compiled(compiled: list[dict[str, Any]], target: str) -> None:
    assert len(KERNELS) > 20
    assert {one["kernel"] for one in compiled if one["target"] == target} == KERNELS


@pytest.mark.parametrize("target", TARGETS)
def test_machine_code(compiled: list[dict[str, Any]], target: str) -> None:
    """Wide accesses of rows; no fused, approximate or flushing operation; no spill, no local memory."""
    faults = [
        f"{one['kernel']} {one['words']}: {', '.join(one['faults'])}"
        for one in compiled
        if one["target"] == target and one["faults"]
    ]
    assert not faults, "\n".join(faults)


# What each kernel of wrong_kernels.py is caught with; AMD divides exactly whatever it is asked for.
CAUGHT = {
    "right": None,
    "fuses": "a fused multiply-add",
    "may_fuse": "a fused multiply-add",
    "approximates": "an approximation",
    "takes_a_rough_root": "an approximation",
    "divides_roughly": "an approximation",
    "doubles": "double precision",
    "adds_in_any_order": "an atomic operation on floats",
    "spills": "spilled",
    "does_not_compile": "does not compile",
    "spread_kernel": "0 loads of 16 bytes",
}


def test_what_is_wrong_is_caught(subtests: pytest.Subtests, tmp_path: Path) -> None:
    found = json.loads(run(ROOT / "tests" / "wrong_kernels.py", cache=tmp_path))
    assert {(target, kernel) for target, kernel, _ in found} == {(t, k) for t in TARGETS for k in CAUGHT}
    for target, kernel, faults in found:
        with subtests.test(target=target, kernel=kernel):
            wanted = CAUGHT[kernel]
            if wanted is None or (kernel == "divides_roughly" and target.startswith("gfx")):
                assert not faults, (target, kernel, faults)
            else:
                assert any(wanted in fault for fault in faults), (target, kernel, faults)
    may_fuse = [faults for _, kernel, faults in found if kernel == "may_fuse"]
    assert all("launched with fused multiply-add allowed" in faults for faults in may_fuse)


def test_the_page_of_kernels_names_all(subtests: pytest.Subtests) -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    for kernel in KERNELS:
        with subtests.test(kernel=kernel):
            for target in TARGETS:
                assert f"`{kernel}` | {target} |" in page, (
                    f"make kernels: {kernel} for {target} is not in docs/kernels.md"
                )


def test_ascend(tmp_path: Path) -> None:
    """Every kernel is lowered to Linalg by triton-ascend, where its package can be had."""
    found = json.loads(
        run(
            TOOLS / "ascend_check.py",
            "--json",
            *([] if os.environ.get("MOEROUTE_LARGE") else ["--few"]),
            cache=tmp_path,
        )
    )
    if isinstance(found, str):
        pytest.skip(found)
    assert {one["kernel"] for one in found} == KERNELS
    failed = [f"{one['kernel']} {one['words']}: {one['error']}" for one in found if one["error"]]
    assert not failed, "\n".join(failed)
