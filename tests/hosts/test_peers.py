"""`moeroute bench --peers`: what it compares before it reports a figure, and what it says."""

import json
from functools import partial
from typing import Any

import pytest
import torch

from moeroute import cli, peers
from moeroute.interop import huggingface

SMALL = {"tokens": 40, "hidden": 32, "intermediate": 16, "experts": 8, "k": 2}


def small(dtype: torch.dtype, **bounds: float) -> peers.Case:
    return peers.Case(f"small {dtype}", "transformers", partial(peers._qwen3_moe_block, dtype, **SMALL), bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_side_is_measured_after_it_was_compared(dtype: torch.dtype) -> None:
    case = small(dtype)
    found = json.loads(json.dumps(peers.measure(case, 0.0)))
    assert list(found["seconds"]) == ["moeroute", "grouped_mm", "eager", "batched_mm"]
    assert set(found["not_run"]) == {"deepgemm, sonicmoe"}
    assert peers.peak(case, "moeroute")["side"] == "moeroute"


def test_a_wrong_result_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    right = huggingface.experts_forward

    def wrong(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return right(self, hidden_states, top_k_index, top_k_weights * 1.02)

    monkeypatch.setattr(huggingface, "experts_forward", wrong)
    with pytest.raises(AssertionError, match=r"off by .* from float64; the host's by"):
        peers.measure(small(torch.bfloat16), 0.0)
    monkeypatch.undo()
    huggingface.register()


@pytest.mark.parametrize("probs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [peers._rows_of_megatron, peers._rows_of_transformer_engine])
def test_rows_are_compared(make: Any, probs: torch.dtype) -> None:
    sides = make(40, 3, 16, 8, probs)
    assert all(len(step()) == 3 for step in sides.sides.values())
    peers.compare(sides)
    wrong = {name: lambda step=step: (step()[0], step()[1] * 1.02, step()[2]) for name, step in sides.sides.items()}
    with pytest.raises(AssertionError, match="gradient 1 is off"):
        peers.compare(
            peers.Sides(
                {"moeroute": wrong["moeroute"], "other": list(sides.sides.values())[1]}, sides.expected, sides.clear
            )
        )


@pytest.mark.parametrize("backward", [False, True])
def test_the_router_is_compared(backward: bool) -> None:
    sides = peers._router_of_megatron(backward, tokens=30, experts=32, k=4)
    assert all(len(step()) == 1 + backward for step in sides.sides.values())
    peers.compare(sides)


def test_the_cases_cover_the_table() -> None:
    names = [case.name for case in peers.CASES]
    assert len(set(names)) == len(names) == 12
    assert [sum(case.bounds.get(kind, 0) > 0 for case in peers.CASES) for kind in ("fastest", "core", "memory")] == [
        8, 4, 2,
    ]  # fmt: skip


def test_the_verdict() -> None:
    case = small(torch.float32, fastest=1.8, eager=8, memory=1)
    seconds = {"moeroute": 1.0, "grouped_mm": 1.7, "eager": 8.5}
    result = peers.Result(case, seconds, {"moeroute": 90, "grouped_mm": 100, "eager": 50}, {})
    assert result.fastest == "grouped_mm"
    assert result.ratios == {"fastest": 1.7, "grouped_mm": 1.7, "eager": 8.5, "memory": 100 / 90}
    assert result.missed == ["fastest 1.70 < 1.8"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = small(torch.float32, fastest=1e9)

    def ask(what: str, name: str, argument: str) -> dict[str, Any]:
        assert name == case.name
        return peers.measure(case, 0.0) if what == "time" else peers.peak(case, argument)

    monkeypatch.setattr(peers, "CASES", (case,))
    monkeypatch.setattr(peers, "_ask", ask)
    assert cli.main(["bench", "--peers"]) == 0
    assert cli.main(["bench", "--peers", "--check"]) == 1
    printed = capsys.readouterr().out
    assert "below its bound: small torch.float32: fastest" in printed
    assert "need a GPU of their own kind" in printed
    assert "(at least 1e+09)" in printed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["bench", "--peers"])
