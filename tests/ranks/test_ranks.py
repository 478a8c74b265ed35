"""Expert parallelism in one to four processes; what they run is in the other files here."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
WORLDS = (2, 1, 3, 4)  # what two ranks save is loaded by one and by three


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One process imports torch and loads the kernels, and forks W ranks for each W."""
    done = subprocess.run(
        [sys.executable, str(HERE / "forked.py"), str(tmp_path_factory.mktemp("ranks")), ",".join(map(str, WORLDS))],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    sys.stderr.write(done.stderr)  # pytest shows it where a test fails
    return done.stdout.splitlines()


@pytest.mark.parametrize("world", WORLDS)
def test_ranks(world: int, lines: list[str]) -> None:
    mine = [line for line in lines if re.match(rf"(right|wrong): W={world},", line)]
    assert mine
    assert [line for line in mine if line.startswith("wrong")] == [], "\n".join(lines)


def test_the_page_s_example() -> None:
    page = (HERE.parents[1] / "docs" / "expert_parallel.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    former = torch.get_num_threads()
    names: dict[str, Any] = {}
    exec(block, names)
    torch.set_num_threads(former)
    assert names["loss"] > 0
