"""drop="choice": capacity goes to all first choices before any second one."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeroute.dispatch import Backend
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.planning.op import plan_from_expert_ids
from plans_by_hand import WEIGHT_DTYPES, check_plan, expected_from_ids
from strategies import BACKENDS

WEIGHTS = st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan])


def kept(ids: list[list[int]], lo: int, hi: int, capacity: int, weights: list[list[float]] | None) -> list[list[int]]:
    """The ids of the slots that stay, -1 for the others: counters, choice by choice, token by token."""

    def importance(token: int) -> float:
        row = [] if weights is None else weights[token]
        return math.inf if any(math.isnan(w) for w in row) else max(row, default=0.0)

    def is_nan(token: int) -> bool:
        return weights is not None and any(math.isnan(w) for w in weights[token])

    order = list(range(len(ids)))
    if weights is not None:
        order.sort(key=lambda t: (not is_nan(t), -importance(t)))
    used = dict.fromkeys(range(lo, hi), 0)
    found = [[-1] * len(row) for row in ids]
    for k in range(len(ids[0]) if ids else 0):
        for t in order:
            e = ids[t][k]
            if lo <= e < hi and used[e] < capacity:
                used[e] += 1
                found[t][k] = e
    return found


@given(st.data(), st.sampled_from([torch.int8, torch.int32, torch.int64]), st.sampled_from(WEIGHT_DTYPES), BACKENDS)
@settings(max_examples=100)
def test_drawn(data: st.DataObject, dtype: torch.dtype, weight_dtype: torch.dtype, names: tuple[Backend, ...]) -> None:
    num_experts, num_tokens, topk = (data.draw(st.integers(low, 6)) for low in (0, 0, 1))
    ids = [[data.draw(st.integers(-1, num_experts)) for _ in range(topk)] for _ in range(num_tokens)]
    weights = (
        [[data.draw(WEIGHTS) for _ in range(topk)] for _ in range(num_tokens)] if data.draw(st.booleans()) else None
    )
    capacity = data.draw(st.integers(0, 4))
    lo = data.draw(st.integers(0, num_experts))
    hi = data.draw(st.integers(lo, num_experts))
    options: dict[str, Any] = {
        "align": data.draw(st.sampled_from([1, 2, 3])),
        "num_rows": data.draw(st.none() | st.integers(0, 20)),
        "expert_range": (lo, hi),
        "capacity": capacity,
    }
    pad = data.draw(st.booleans())
    stay = kept(ids, lo, hi, capacity, weights)
    expected = expected_from_ids(stay, num_experts, pad=pad, **options) | {"topk": topk}
    tensor = torch.tensor(ids, dtype=dtype).reshape(num_tokens, topk)
    wide = None if weights is None else torch.tensor(weights, dtype=weight_dtype).reshape(num_tokens, topk)
    for name in names:
        check_plan(
            plan_from_expert_ids(
                tensor, num_experts, drop="choice", weights=wide, pad_to_capacity=pad, backend=name, **options
            ),
            expected,
        )


def test_top_2_of_gshard(backend: Backend) -> None:
    """Positions of second choices begin behind all first ones, as in GShard's and DeepSpeed's top-2 gate."""
    ids = torch.tensor([[0, 1], [1, 0], [0, 2], [0, 1], [2, 0]])
    for capacity in (1, 2, 3, 4):
        first, second = torch.nn.functional.one_hot(ids, 3).unbind(1)
        place_1 = (first.cumsum(0) - 1) * first
        place_2 = (second.cumsum(0) - 1 + first.sum(0)) * second
        stays = torch.stack([(first * (place_1 < capacity)).sum(1), (second * (place_2 < capacity)).sum(1)], dim=1)
        plan = plan_from_expert_ids(ids, 3, capacity=capacity, drop="choice", backend=backend)
        assert (plan.row_of_slot.reshape(5, 2) >= 0).tolist() == (stays > 0).tolist()


def test_batch_prioritised(backend: Backend) -> None:
    """The token with the largest weight goes first, with every one of its choices in its turn."""
    ids = torch.tensor([[0, 1], [0, 1], [1, 0]])
    weights = torch.tensor([[0.5, 0.1], [0.9, 0.0], [0.6, 0.4]])
    plan = plan_from_expert_ids(ids, 2, capacity=2, drop="choice", weights=weights, backend=backend)
    # Expert 0: tokens 1 and 0 first. Expert 1: token 2 first, then the second choice of token 1.
    assert (plan.row_of_slot.reshape(3, 2) >= 0).tolist() == [[True, False], [True, True], [True, False]]
    by_position = plan_from_expert_ids(ids, 2, capacity=2, drop="choice", backend=backend)
    assert (by_position.row_of_slot.reshape(3, 2) >= 0).tolist() == [[True, True], [True, False], [True, False]]


def test_more_tokens_than_float32_counts() -> None:
    """No order is encoded in a float: 2^24 + 3 tokens, of which the last ones choose expert 0 first."""
    num_tokens = 2**24 + 3
    ids = torch.full((num_tokens, 2), -1, dtype=torch.int8)
    ids[-3:, 0] = 0
    ids[:2, 1] = 0
    plan = plan_from_expert_ids(ids, 1, capacity=4, drop="choice")
    live = (plan.row_of_slot >= 0).nonzero().flatten().tolist()
    assert live == [1, *range(2 * num_tokens - 6, 2 * num_tokens, 2)]


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="drop must be one of 'position', 'weight'; got 'choice'"):
        plan_from_routing_map(torch.ones(2, 2, dtype=torch.bool), capacity=1, drop="choice")  # type: ignore[arg-type]
    ids = torch.tensor([[0, 1], [7, 0]])
    with pytest.raises(ValueError, match="got 7 in slot 2"):
        plan_from_expert_ids(ids, 2, capacity=1, drop="choice", check=True)
    without_capacity = plan_from_expert_ids(ids, 2, drop="choice")
    assert without_capacity.row_of_slot.tolist() == plan_from_expert_ids(ids, 2).row_of_slot.tolist()
