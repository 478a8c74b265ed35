"""What a call through the C library costs beside the Python operator on the same tensors: at most 60 µs more.

.venv/bin/python benchmarks/aclnn_call.py
"""

import subprocess
import tempfile
import time
from pathlib import Path

import torch

from moeroute import aclnn
from moeroute.aclnn.library import build

BOUND = 60.0  # µs
HERE = Path(__file__).parent


def through_c() -> float:
    """Microseconds of both phases, by a C++ program."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder)
        build.build(prefix)
        program = prefix / "aclnn_call"
        flags = [
            f"-I{prefix}/include",
            f"-I{HERE.parent}/examples/aclnn",
            f"-L{prefix}/lib",
            f"-Wl,-rpath,{prefix}/lib",
        ]
        libraries = ["-lascendcl", "-lnnopbase", "-lopapi"]
        subprocess.run(["g++", "-O1", str(HERE / "aclnn_call.cpp"), "-o", str(program), *flags, *libraries], check=True)
        readings = [
            float(subprocess.run([program], capture_output=True, text=True, check=True).stdout) for _ in range(3)
        ]
    return min(readings)


def in_python() -> float:
    """Microseconds of both phases, by the Python functions."""
    grad, indices = torch.ones(4, 2), torch.tensor([2, 0, 1, 3], dtype=torch.int32)
    out = torch.empty(2, 2)
    readings = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            status, size, executor = aclnn.aclnnMoeTokenPermuteGradGetWorkspaceSize(grad, indices, 2, False, out)
            assert status == 0
            assert aclnn.aclnnMoeTokenPermuteGrad(None, size, executor) == 0
        readings.append((time.perf_counter() - start) / 200 * 1e6)
    assert out.flatten().tolist() == [2.0] * 4
    return min(readings)


def main() -> None:
    """Measure both and compare their difference with the bound."""
    c, python = through_c(), in_python()
    print(f"both phases through C {c:.1f} µs, in Python {python:.1f} µs: {c - python:.1f} µs more (bound {BOUND:.0f})")
    assert c - python <= BOUND


if __name__ == "__main__":
    main()
