"""Expert parallelism in one to four processes; what they run is in the other files here. One test for each number."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(module: str, world: int, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(HERE / "forked.py"), module, str(world), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exact(world: int, tmp_path: Path) -> None:
    """Outputs and gradients, bit for bit."""
    run("exact", world, tmp_path)
