"""`moeroute plan`: counts by hand, the command, thousands of ranks. ranks/paper.py compares it with real runs."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeroute import cli, scale

SIZES: dict[str, Any] = {"tokens": 8, "hidden": 16, "intermediate": 12, "experts": 5, "topk": 2, "ranks": 3}
ARGUMENTS = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def test_by_hand() -> None:
    """Three ranks with 2, 2 and 1 experts."""
    layout = scale.Layout(**SIZES, dtype="float32", layers=2)
    counts = np.array([[9, 3, 1, 2, 1], [0, 0, 0, 0, 16], [4, 4, 4, 4, 0]])
    found = scale.plan(layout, counts)
    assert found.received.tolist() == [9 + 3 + 4 + 4, 1 + 2 + 4 + 4, 1 + 16]
    assert found.sent.tolist() == [16, 16, 16]
    assert found.leaving.tolist() == [4, 16, 16]
    assert found.arriving.tolist() == [8, 11, 17]
    assert found.loads.tolist() == [13, 7, 5, 6, 17]
    assert found.weights.tolist() == [2 * 3 * 16 * 12 * 4 * n for n in (2, 2, 1)]
    assert found.saved.tolist() == [2 * (r * (16 + 3 * 12) + 16 * 16) * 4 for r in (20, 11, 17)]
    assert found.transient.tolist() == [(r + 16) * 16 * 4 for r in (20, 11, 17)]
    rows = [2 * (4 + 8), 2 * (16 + 11), 2 * (16 + 17)]
    sizes = [(10 + 9) * 8, (10 + 9) * 8, (10 + 10) * 8]
    assert found.traffic.tolist() == [2 * (r * 16 * 4 + s) for r, s in zip(rows, sizes, strict=True)]
    less = scale.plan(scale.Layout(**SIZES, dtype="float32", layers=2, recompute="activation"), counts)
    assert (found.saved - less.saved).tolist() == [2 * r * 12 * 4 for r in (20, 11, 17)]
    assert less.transient.tolist() == [max((r + 16) * 16, r * (16 + 3 * 12) - 16 * 16) * 4 for r in (20, 11, 17)]
    few = scale.plan(scale.Layout(**SIZES, dtype="float32", capacity=3), counts)
    assert few.received.tolist() == [18, 18, 9]
    assert few.dropped == 6 + 13 + 4
    assert few.loads.tolist() == [6, 6, 4, 5, 4]
    assert few.traffic.tolist() == [2 * (leaving + arriving) * 64 for leaving, arriving in ((9, 12), (9, 12), (12, 6))]


@pytest.mark.parametrize(
    "recompute, alone, apart",
    [("", 8 + 9, 8 + 9), ("activation", 8 + 6, 8 + 6), ("permute", 9, 8 + 9), ("both", 6, 8 + 6)],
)
def test_recompute(recompute: str, alone: int, apart: int) -> None:
    """H = 8, I = 3, 10 rows: what is kept of each in the experts. Rows from other ranks, or with a capacity, stay."""
    sizes: dict[str, Any] = {"tokens": 10, "hidden": 8, "intermediate": 3, "experts": 2, "topk": 1, "dtype": "float64"}

    def saved(counts: list[list[int]], **more: Any) -> list[int]:
        layout = scale.Layout(**sizes, ranks=len(counts), recompute=recompute, **more)
        found: list[int] = scale.plan(layout, np.array(counts)).saved.tolist()
        return found

    assert saved([[4, 6]]) == [10 * (alone + 8) * 8]
    assert saved([[4, 6], [4, 6]]) == [(8 * apart + 10 * 8) * 8, (12 * apart + 10 * 8) * 8]
    assert saved([[4, 6]], capacity=5) == [10 * (apart + 8) * 8]


def test_thousands_of_ranks() -> None:
    begun = time.perf_counter()
    layout = scale.Layout(tokens=4096, hidden=7168, intermediate=2048, experts=256, topk=8, ranks=4096, layers=58)
    summary = scale.plan(layout, skew=0.5).summary()
    assert time.perf_counter() - begun < 20
    assert summary["ranks_without_experts"] == 4096 - 256
    assert summary["imbalance_of_ranks"] > 16
    assert scale.plan(layout, skew=0.5, seed=0).summary() == summary
    even = scale.plan(layout).summary()
    assert even["imbalance_of_experts"] < 1.01 < summary["imbalance_of_experts"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.randint(-1, 5, (24, 2), generator=torch.Generator().manual_seed(0))
    torch.save(ids, tmp_path / "ids.pt")
    counts = np.stack([np.bincount(part[part >= 0], minlength=5) for part in ids.view(3, 16).numpy()])
    np.save(tmp_path / "counts.npy", counts)
    told = []
    for file in ("ids.pt", "counts.npy"):
        assert cli.main(["plan", *ARGUMENTS, "--routing", str(tmp_path / file), "--out", str(tmp_path)]) == 0
        told.append(json.loads((tmp_path / "plan.json").read_text()))
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
        assert "memory of the fullest rank" in capsys.readouterr().out
    first, second = ({key: value for key, value in t.items() if key != "routing"} for t in told)
    assert first == second
    assert first == {
        k: v for k, v in json.loads(json.dumps(scale.plan(scale.Layout(**SIZES), counts).summary())).items()
    }


@pytest.mark.parametrize(
    "more, message",
    [
        (["--ranks", "0"], "ranks must be in 1"),
        (["--topk", "6"], "topk must be at most 5, as experts; got 6"),
        (["--skew", "nan"], "skew must be finite; got nan"),
        (["--routing", "no_such_file.npy"], "No such file"),
    ],
)
def test_bad_input(more: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"moeroute plan: .*{message}"):
        cli.main(["plan", *ARGUMENTS, *more, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_routing_of_another_shape(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.zeros((23, 2), dtype=np.int32))
    with pytest.raises(
        SystemExit, match=r"routing must be \[W, E\] = \[3, 5\] or \[W \* tokens, K\] with 24 rows; got shape"
    ):
        cli.main(["plan", *ARGUMENTS, "--routing", str(tmp_path / "ids.npy"), "--out", str(tmp_path)])
