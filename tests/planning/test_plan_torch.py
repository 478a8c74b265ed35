"""Plans under torch.library and torch.compile."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moeroute.dispatch import Backend
from moeroute.ops.indices.op import (
    plan_from_chunks,
    plan_from_row_id_map,
    plan_from_row_of_slot,
    plan_from_segments,
    plan_from_token_ids,
    row_id_map,
)
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.planning.op import capacity_from_factor, plan_from_expert_ids
from moeroute.plan import RoutingPlan
from plans_by_hand import fields_of

IDS = torch.tensor([[0, 1], [2, 1]])
MAP = torch.tensor([[True, False, True], [True, True, True]])


@pytest.mark.parametrize("empty", [False, True], ids=["some tokens", "no token"])
def test_opcheck(backend: Backend, empty: bool) -> None:
    ops = torch.ops.moeroute
    ids, routing_map = IDS, MAP
    if empty:
        ids, routing_map = ids[:0], routing_map[:0]
    weights, map_weights = torch.rand(ids.shape), torch.rand(routing_map.shape)
    flat, num_tokens = ids.reshape(-1), ids.shape[0]
    lines = row_id_map(plan_from_routing_map(routing_map, backend="reference"), backend="reference")
    cases = [
        (ops.plan_expert_ids, (ids, None, 3, 0, 3, None, None, 1, None, False, False, backend)),
        (ops.plan_expert_ids, (ids.int(), weights, 3, 1, 3, 1, 2, 2, 5, False, True, backend)),
        (ops.plan_expert_ids, (ids, weights, 3, 0, 3, 1, None, 1, None, True, False, backend)),
        (ops.plan_any_ids, (ids, None, False, backend)),
        (ops.plan_routing_map, (routing_map, None, 0, 3, None, False, None, None, 1, None, None, False, backend)),
        (ops.plan_routing_map, (routing_map, map_weights, 0, 3, 2, False, 1, None, 4, None, None, False, backend)),
        (ops.plan_routing_map, (routing_map, map_weights, 0, 3, None, True, 2, 2, 1, 6, None, True, backend)),
        (ops.plan_routing_map, (routing_map.int(), None, 0, 3, None, True, None, None, 4, None, None, True, backend)),
        (ops.plan_routing_map, (routing_map, None, 0, 3, None, False, None, None, 1, 4, 7, False, backend)),
        (ops.plan_row_of_slot, (flat, flat, 4, 1, backend)),
        (ops.plan_token_ids, (flat, flat, num_tokens, 6, 2, backend)),
        (ops.plan_chunks, (ids, None, 4, backend)),
        (ops.plan_row_id_map, (lines, torch.tensor([0, 1, 2]), 7, backend)),
        (ops.plan_row_id_map, (lines.long(), None, 4, backend)),
        (ops.row_id_map, (*plan_from_routing_map(routing_map, backend="reference").tensors, 3, backend)),
        (ops.row_id_map, (flat.int(), flat.int(), None, flat.int(), num_tokens, 3, backend)),
        (ops.plan_chunks, (flat[:, None], flat, 4, backend)),
    ]
    for operator, arguments in cases:
        torch.library.opcheck(operator.default, arguments)


def every_constructor(ids: Tensor, routing_map: Tensor, backend: Backend | None) -> Iterator[RoutingPlan]:
    num_tokens = ids.shape[0]
    plan = plan_from_expert_ids(ids, 4, align=2, check=True, backend=backend)
    yield plan
    yield plan_from_expert_ids(ids, 4, capacity=num_tokens, pad_to_capacity=True, backend=backend)
    yield plan_from_expert_ids(ids, 4, num_rows=ids.numel(), backend=backend)
    capacity = capacity_from_factor(num_tokens, 2, 4, 1.1)
    weights = ids * 0.5
    yield plan_from_expert_ids(
        ids, 4, expert_range=(1, 3), capacity=capacity, drop="weight", weights=weights, backend=backend
    )
    yield plan_from_expert_ids(ids, 4, capacity=1, drop="choice", check=True, backend=backend)
    yield plan_from_expert_ids(ids, 4, capacity=capacity, drop="choice", weights=weights, align=2, backend=backend)
    yield plan_from_expert_ids(ids, None, backend=backend)
    yield plan_from_row_of_slot(plan.row_of_slot, num_tokens, plan.num_rows, backend=backend)
    yield plan_from_token_ids(plan.token_of_row, num_tokens, num_rows=plan.num_rows, backend=backend)
    yield plan_from_routing_map(routing_map, backend=backend)
    yield plan_from_routing_map(routing_map, topk=2, backend=backend)
    yield plan_from_routing_map(routing_map, fill=True, capacity=3, backend=backend)
    yield plan_from_routing_map(routing_map.int(), fill=True, align=3, backend=backend)
    yield plan_from_routing_map(routing_map, fill=True, align=3, num_slots=7, num_rows=11, backend=backend)
    yield plan_from_routing_map(routing_map, num_slots=2 * num_tokens, backend=backend)
    lines = row_id_map(plan, backend=backend)
    yield plan_from_row_id_map(lines, 3 * num_tokens, pad_offsets=ids[0, :1].clamp(min=0).expand(4), backend=backend)
    yield plan_from_segments(ids, 3 * num_tokens, backend=backend)
    yield plan_from_chunks(ids[:, 0], ids[:, 1], 3 * num_tokens, backend=backend)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_without_a_break(dynamic: bool) -> None:
    """B134: the second call has other sizes; row counts come from the data."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *arguments: list(every_constructor(*arguments)), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for num_tokens in (5, 8, 3):
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(-1, 5, (num_tokens, 2), generator=generator)
        routing_map = torch.rand(num_tokens, 4, generator=generator) < 0.5
        plans = compiled(ids, routing_map, None)
        expected = list(every_constructor(ids, routing_map, None))
        assert [fields_of(plan) for plan in plans] == [fields_of(plan) for plan in expected]


def test_compile_with_inductor_and_checks_inside() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: plan_from_expert_ids(ids, 4, check=True), fullgraph=True)
    assert compiled(IDS).row_of_slot.tolist() == [0, 1, 3, 2]
    with pytest.raises(ValueError, match="got 9 in slot 1"):
        compiled(torch.tensor([[0, 9], [0, 0]]))


def test_a_plan_goes_into_a_compiled_function() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda plan: plan.token_of_row * plan.num_tokens, fullgraph=True, backend="aot_eager")
    for ids in (IDS, torch.cat([IDS, IDS])):
        plan = plan_from_expert_ids(ids, 3)
        assert torch.equal(compiled(plan), plan.token_of_row * len(ids))
