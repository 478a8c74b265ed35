"""Expert parallelism in one to four processes; what they run is in the other files here."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeroute.expert_parallel import ExpertExchange
from moeroute.ops.exchange import exchange

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


# ---------------------------------------------------------------------------- one process

ALONE: dict[str, Any] = {"group": "", "layer": "mine", "call": 1}


def test_the_operator_has_every_derivative() -> None:
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def twice(rows: Tensor) -> Tensor:
        there = exchange(rows, [3], [3], 3, phase="dispatch", lengths=[1, 2], **ALONE)
        return exchange(there.square(), [3], [3], 4, phase="combine", lengths=[1, 2], **ALONE)

    torch.testing.assert_close(twice(rows), torch.cat([rows[:3].square(), torch.zeros(1, 3).double()]))
    assert torch.autograd.gradcheck(twice, rows, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(twice, rows)
    arguments = rows, None, [3], [3], [1, 2], 5, "", "mine", "dispatch", 0, 1
    torch.library.opcheck(torch.ops.moeroute.exchange, arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sends": [5]}, r"sends must be 1 numbers of at least 0, one for each rank, and no more than the 4 rows"),
        ({"sends": [1, 1]}, r"sends must be 1 numbers .*; got \[1, 1\]"),
        ({"receives": [-1]}, r"receives must be 1 numbers"),
        ({"receives": [2]}, r"receives must be \[3\], as sends: one rank; got \[2\]"),
        ({"room": -1}, r"room must be at least 0; got -1"),
        ({"lengths": [1, 1]}, r"lengths must be \[ranks, experts\] numbers of at least 0, \[3\] for each rank in all"),
        ({"group": "nobody"}, r"group must be the name of a process group; got 'nobody'"),
    ],
)
def test_the_operator_checks_what_it_relies_on(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"sends": [3], "receives": [3], "room": 4, "lengths": [], "phase": "dispatch", **ALONE}
    with pytest.raises(ValueError, match=rf"moeroute\.exchange: {message}"):
        exchange(torch.ones(4, 2), **(given | options))


def test_one_process_needs_no_group() -> None:
    """Padding rows come back as 0; a copy has calls of its own."""
    rows = torch.randn(6, 3, requires_grad=True)
    mine = ExpertExchange(None, 4)
    received, numbers, handle = mine.dispatch(rows, torch.tensor([1, 0, 3, 0]))
    assert numbers.tolist() == [1, 0, 3, 0]
    assert handle.sends == handle.receives == (4,)
    result = mine.combine(received, handle)
    torch.testing.assert_close(result, torch.cat([rows[:4], torch.zeros(2, 3)]))
    result.sum().backward()
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [1, 1, 1, 1, 0, 0]
    again = copy.deepcopy(mine)
    assert again.dispatch(rows, [1, 0, 3, 0])[2].call == 1 == handle.call


def test_the_page_s_example() -> None:
    page = (HERE.parents[1] / "docs" / "expert_parallel.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    former = torch.get_num_threads()
    names: dict[str, Any] = {}
    exec(block, names)
    torch.set_num_threads(former)
    assert names["loss"] > 0
