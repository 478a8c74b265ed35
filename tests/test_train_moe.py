"""examples/train_moe.py, small: one process and two, interrupted and not, a loss that is no number."""

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import train_moe

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_moe.py"
SMALL = [
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--experts",
    "5",
    "--k",
    "2",
    "--intermediate",
    "16",
    "--context",
    "12",
    "--batch",
    "5",
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The example sets the number of threads; uninitialised memory may be read by torch's own saving."""
    former = torch.get_num_threads()
    yield
    torch.set_num_threads(former)


def losses(out: Path) -> list[float]:
    rows = list(csv.reader((out / "loss.csv").read_text().splitlines()))
    assert rows[0] == ["step", "loss"]
    assert [int(step) for step, _ in rows[1:]] == list(range(1, len(rows)))
    return [float(loss) for _, loss in rows[1:]]


def train(out: Path, *more: object) -> int:
    return train_moe.main([*SMALL, "--out", str(out), *map(str, more)])


def weights(out: Path, steps: int) -> dict[str, object]:
    files = sorted((out / f"step-{steps:06}").iterdir())
    return {file.name: file.read_bytes() for file in files if file.suffix == ".distcp"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interrupted_and_resumed_has_the_same_bits(dtype: str, tmp_path: Path) -> None:
    assert train(tmp_path / "one", "--steps", 4, "--dtype", dtype) == 0
    assert train(tmp_path / "two", "--steps", 2, "--dtype", dtype) == 0
    # As if it had been killed while it wrote the next checkpoint, two steps later.
    (tmp_path / "two" / "step-000004.partial").mkdir()
    with (tmp_path / "two" / "loss.csv").open("a") as file:
        file.write("3,0.5\n")
    assert train(tmp_path / "two", "--steps", 4, "--dtype", dtype) == 0
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert weights(tmp_path / "two", 4) == weights(tmp_path / "one", 4) != {}


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """The command of one process under torchrun; then one process goes on from what two saved."""
    assert train(tmp_path / "one", "--steps", 5) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(EXAMPLE), *SMALL, "--out", str(tmp_path / "two"), "--steps", "4"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert train(tmp_path / "two", "--steps", 5) == 0
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert abs(ours - theirs) <= 1e-5 * theirs


def test_a_loss_that_is_no_number_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "--steps", 1) == 0
    assert train(tmp_path, "--steps", 9, "--learning-rate", "1e30", "--save-every", 1) == 1
    stopped = capsys.readouterr().err
    steps = len(losses(tmp_path))
    assert f"the loss of step {steps + 1} is nan: stopped; the last good checkpoint is step-{steps:06}" in stopped
    assert weights(tmp_path, steps)


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "--steps", 1) == 0
    with pytest.raises(SystemExit, match=r"another configuration: .*experts\.(down|gate_up)_proj|another.*router"):
        train(tmp_path, "--steps", 2, "--experts", 6)
    with pytest.raises(SystemExit, match="was trained with --seed 0; got 1"):
        train(tmp_path, "--steps", 2, "--seed", 1)
    assert train(tmp_path, "--steps", 2, "--threads", 2) == 0
    assert "was trained with --threads 1, now 2" in capsys.readouterr().err
