"""What the judge says of Megatron-Core's and Transformers' own functions, as docs/judge.md has it."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from hosts import megatron_host
from moeroute.conformance import Judgement, judge, targets
from moeroute.conformance.case import Case
from moeroute.conformance.generator import Stream
from moeroute.conformance.words import explain

PAGE = (Path(__file__).parents[2] / "docs" / "judge.md").read_text()


def verdicts(judgement: Judgement) -> dict[str, tuple[int, int, int]]:
    """Cases, passed, and the worst ulps of each operator."""
    found: dict[str, tuple[int, int, int]] = {}
    for verdict in judgement.verdicts:
        count, passed, worst = found.get(verdict.operator, (0, 0, 0))
        found[verdict.operator] = (count + 1, passed + verdict.passed, max(worst, verdict.worst_ulps))
    return found


def test_megatron() -> None:
    functions, signature = targets.load(megatron_host.moe_utils.__name__)
    assert signature == "megatron"
    options: dict[str, Any] = {"signature": signature, **functions}
    found = verdicts(judge(**options))
    assert found["megatron.permute"] == (9, 9, 0)
    assert found["megatron.unpermute"][:2] == (6, 6)
    assert found["megatron.sort_chunks_by_idxs"] == (3, 3, 0)
    count, passed, worst = found["megatron.topk_routing_with_score_function"]
    assert count == 9
    assert passed < 9
    assert 1 <= worst <= 3
    tolerant = judge(arithmetic="tolerance", **options)
    assert [verdict.case for verdict in tolerant.failed] == [
        "megatron.topk_routing_with_score_function bfloat16 sigmoid"
    ]
    assert "| Megatron-Core 0.16.1 |" in PAGE


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Qwen3-MoE's router on given logits: its product with the router's weight is left out."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    monkeypatch.setattr(qwen, "F", SimpleNamespace(linear=lambda logits, weight: logits))

    def gating_topk(logits: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
        router = SimpleNamespace(top_k=k, hidden_dim=logits.shape[1], norm_topk_prob=renormalize, weight=None)
        forward: Any = qwen.Qwen3MoeTopKRouter.forward
        _, weights, ids = forward(router, logits)
        return weights, ids

    return gating_topk


def test_the_router_of_transformers(gate: Callable[..., Any]) -> None:
    logits = Stream("logits without ties").normal("logits", 64, 128)
    weights, ids = gate(logits, 8)
    ours = moeroute.gating_topk(logits, 8)
    assert torch.equal(ids.int(), ours.expert_ids)
    torch.testing.assert_close(weights, ours.weights)
    judgement = judge(gating_topk=gate, arithmetic="tolerance", only="gating_topk edge softmax")
    said = "\n".join(f"{verdict.case}: {sentence}" for verdict in judgement.failed for sentence in verdict.words)
    assert len(judgement.failed) == 5
    assert re.search(
        r"expert_ids: token \d+, choice \d+: expert \d+ instead of \d+: a tie .* goes to the smaller id", said
    )


def test_the_order_of_rows_in_transformers() -> None:
    """Its sort of expert ids is not stable: the copies of one expert are in no particular order."""

    def sorted_as_there(expert_ids: Tensor, num_experts: int) -> dict[str, Tensor]:
        order = torch.sort(expert_ids.reshape(-1)).indices
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order))
        return {"row_of_slot": rows, "slot_of_row": order}

    judgement = judge(plan_from_expert_ids=sorted_as_there, only="edge: all to one expert")
    (verdict,) = judgement.failed
    assert verdict.words[0].startswith("row_of_slot: rows of a tie exchanged: slot ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sums_of_transformers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped path with the rows given: its products with experts' weights are left out."""
    from transformers.integrations import moe

    draw = Stream("transformers")
    ids = draw.distinct("ids", 23, 12, 6)
    plan = moeroute.plan_from_expert_ids(ids, 12)
    rows = draw.normal("rows", plan.num_rows, 331).to(dtype)
    weights = draw.uniform("weights", 23, 6).to(dtype)
    order = torch.sort(ids.reshape(-1)).indices  # the host's call
    monkeypatch.setattr(moe, "_grouped_linear", lambda *a, **o: rows[plan.row_of_slot.long()][order])
    module = SimpleNamespace(
        num_experts=12, has_gate=False, has_bias=False, is_transposed=False, has_post_expert_norm=False,
        _is_expert_parallel=False, up_proj=None, down_proj=None, act_fn=lambda x: x,
    )  # fmt: skip
    forward: Any = moe.grouped_mm_experts_forward
    found = forward(module, rows[:23], ids, weights)
    right = moeroute.unpermute(rows, plan, weights, backend="reference")
    case = Case("transformers", "unpermute", lambda draw: {})
    words = explain(case, {"rows": rows, "plan": plan, "weights": weights}, {"tokens": found}, {"tokens": right})
    if dtype is torch.bfloat16:
        assert words[0].startswith("tokens: products rounded to bfloat16, then summed")
    else:
        assert re.match(r"tokens: only the columns from 320 on, the last 11 of 331, are rounded otherwise", words[0])
