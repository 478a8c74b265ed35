"""Plans: the specification's worked numbers."""

import pytest
import torch

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
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.permutation import permute, unpermute
from small_cases import present


def test_token_permute_example(subtests: pytest.Subtests, backend: Backend) -> None:
    """Section 5: sortedIndices is row_of_slot."""
    ids = torch.tensor([[1, 2], [0, 1], [0, 2]], dtype=torch.int32)
    for num_experts in (3, None):
        with subtests.test(num_experts=num_experts):
            plan = plan_from_expert_ids(ids, num_experts, backend=backend)
            assert plan.row_of_slot.tolist() == [2, 4, 0, 3, 1, 5]
            assert plan.token_of_row.tolist() == [1, 2, 0, 1, 0, 2]
    first_three = plan_from_expert_ids(ids, None, num_rows=3, backend=backend)  # numOutTokens
    assert first_three.row_of_slot.tolist() == [2, -1, 0, -1, 1, -1]


def test_permute_with_ep_example(backend: Backend) -> None:
    """Section 12: rows [1, 5) of the sorted ones, for ids and for given indices."""
    plan = plan_from_expert_ids(torch.tensor([[1, 2], [3, 1], [2, 3]]), None, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 2, 4, 1, 3, 5]
    plan = plan_from_row_of_slot(torch.tensor([2, 0, 4, 1, 5, 3]), 3, 4, first_row=1, backend=backend)
    assert plan.row_of_slot.tolist() == [1, -1, 3, 0, -1, 2]
    assert plan.slot_of_row.tolist() == [3, 0, 5, 2]


def test_init_routing_example(backend: Backend) -> None:
    """Section 13: MoeInitRoutingV2, C = 2, drop and pad."""
    ids = torch.tensor([[1, 2], [0, 1], [0, 2]])
    plan = plan_from_expert_ids(ids, 3, capacity=2, pad_to_capacity=True, backend=backend)
    assert plan.row_of_slot.tolist() == [2, 4, 0, 3, 1, 5]
    assert plan.num_rows == 6
    assert present(plan_from_expert_ids(ids, 3, backend=backend).tokens_per_expert).tolist() == [2, 2, 2]


def test_compute_expert_tokens_example(backend: Backend) -> None:
    plan = plan_from_expert_ids(torch.tensor([0, 0, 1, 1, 2, 2]), 3, backend=backend)
    assert present(plan.tokens_per_expert).cumsum(0).tolist() == [2, 4, 6]


def test_permute_with_routing_map_example(backend: Backend) -> None:
    """Section 8, not padded: the slot table, and -1 where a token has fewer experts."""
    plan = plan_from_routing_map(torch.ones(3, 2, dtype=torch.int8), topk=2, num_rows=6, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 3, 1, 4, 2, 5]
    assert plan.slot_offsets is None
    fewer = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.int8)
    plan = plan_from_routing_map(fewer, topk=2, num_rows=6, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 2, -1, -1, 1, 3]
    assert plan.slot_of_row.tolist() == [0, 4, 1, 5, -1, -1]


@pytest.mark.parametrize("capacity", [1, 3, 7])
def test_drop_and_pad_is_a_stable_descending_sort(backend: Backend, capacity: int) -> None:
    """Section 8, padded: true tokens of each expert in order, then false ones, in order."""
    routing_map = torch.rand(7, 5, generator=torch.Generator().manual_seed(2)) < 0.4
    plan = plan_from_routing_map(routing_map, fill=True, capacity=capacity, backend=backend)
    golden = routing_map.t().to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :capacity]
    assert plan.token_of_row.tolist() == golden.reshape(-1).tolist()


def test_unpermute_with_routing_map_examples(backend: Backend) -> None:
    """Section 9: (a) padded, where sortedIndices holds token ids; (c) not padded, with an empty slot."""
    plan = plan_from_token_ids(torch.tensor([1, 1], dtype=torch.int32), 2, num_experts=2, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 1]  # outIndex
    assert plan.token_of_slot.tolist() == [1, 1]  # permuteTokenId
    assert present(plan.expert_of_slot).tolist() == [0, 1]
    plan = plan_from_row_of_slot(torch.tensor([0, -1, 1, 2], dtype=torch.int32), 2, 4, backend=backend)
    assert plan.row_of_slot.tolist() == [0, -1, 1, 2]
    assert plan.slot_of_row.tolist() == [0, 2, 3, -1]


def test_finalize_routing_column_layout(backend: Backend) -> None:
    """Section 13: expandedRowIdx[i + k * T] is token i's k-th row."""
    index = torch.tensor([2, 1, 4, 3, 0, 5], dtype=torch.int32)
    experts = torch.tensor([[0, 1], [0, 1], [0, 1]], dtype=torch.int32)
    plan = plan_from_row_of_slot(index.view(2, 3).t(), 3, 6, expert_of_slot=experts, backend=backend)
    assert plan.row_of_slot.tolist() == [2, 3, 1, 0, 4, 5]
    assert present(plan.expert_of_slot).tolist() == [0, 1, 0, 1, 0, 1]


def test_re_routing(backend: Backend) -> None:
    """Two ranks send [2, 1] and [1, 2] tokens for two experts."""
    plan = plan_from_segments(torch.tensor([[2, 1], [1, 2]], dtype=torch.int32), 6, backend=backend)
    assert plan.slot_of_row.tolist() == [0, 1, 3, 2, 4, 5]
    assert present(plan.tokens_per_expert).tolist() == [3, 3]
    longer = plan_from_segments(torch.tensor([[2, 1], [1, 2]]), 8, backend=backend)
    assert longer.row_of_slot.tolist() == [0, 1, 3, 2, 4, 5, -1, -1]


def test_chunks_in_another_order(subtests: pytest.Subtests, backend: Backend) -> None:
    """What sort_chunks does: split, reorder, concatenate."""
    lengths, order = torch.tensor([3, 0, 2, 1, 4]), torch.tensor([4, 2, 1, 0, 3])
    rows = torch.arange(10.0)[:, None]
    chunks = rows.split(lengths.tolist())
    expected = torch.cat([chunks[c] for c in order.tolist()])
    for dtype in (torch.int64, torch.int32, torch.uint8):
        with subtests.test(dtype=str(dtype)):
            plan = plan_from_chunks(lengths.to(dtype), order.to(dtype), 10, backend=backend)
            assert permute(rows, plan, backend=backend).tolist() == expected.tolist()
            assert unpermute(expected, plan, backend=backend).tolist() == rows.tolist()
    ranks, experts = 3, 4
    table = torch.arange(12).reshape(ranks, experts) % 5
    by_expert = torch.arange(12).reshape(ranks, experts).t().reshape(-1)
    total = int(table.sum())
    chunked = plan_from_chunks(table.reshape(-1), by_expert, total, backend=backend)
    segments = plan_from_segments(table, total, backend=backend)
    assert chunked.slot_of_row.tolist() == segments.slot_of_row.tolist()
    nothing = plan_from_chunks(lengths[:0], order[:0], 0, backend=backend)
    assert (nothing.num_slots, nothing.num_rows) == (0, 0)


def test_fill_to_a_multiple(backend: Backend) -> None:
    """Megatron's pad_routing_map: the first false tokens of an expert become true up to a multiple of `align`."""
    routing_map = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.int32)
    plan = plan_from_routing_map(routing_map, fill=True, align=4, backend=backend)
    assert plan.token_of_row.reshape(2, 4).tolist() == [[0, 2, 3, 1], [1, 0, 2, 3]]
    assert present(plan.rows_per_expert).tolist() == [4, 4, 0]
    ones = routing_map.clone()
    for expert in range(3):
        missing = -int(ones[:, expert].sum()) % 4
        ones[(ones[:, expert] == 0).nonzero()[:missing, 0], expert] = 1
    assert present(plan.slot_offsets).tolist() == [0, *ones.sum(dim=1).cumsum(0).tolist()]
    assert present(plan.expert_of_slot).tolist() == ones.nonzero()[:, 1].tolist()
    short = plan_from_routing_map(routing_map[:3], fill=True, align=4, backend=backend)
    assert short.token_of_row.reshape(2, 4).tolist() == [[0, 2, 1, -1], [1, 0, 2, -1]]
    assert present(short.tokens_per_expert).tolist() == [3, 3, 0]


def test_the_caller_knows_the_number_of_slots(backend: Backend) -> None:
    routing_map = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.uint8)
    more = plan_from_routing_map(routing_map, num_slots=8, backend=backend)
    assert more.row_of_slot.tolist() == [0, 2, 4, 1, 3, 5, -1, -1]
    assert more.token_of_slot.tolist() == [0, 0, 1, 3, 3, 3, -1, -1]
    fewer = plan_from_routing_map(routing_map, num_slots=4, backend=backend)
    assert fewer.row_of_slot.tolist() == [0, 2, 4, 1]
    assert fewer.slot_of_row.tolist() == [0, 3, 1, -1, 2, -1]
    assert present(fewer.slot_offsets).tolist() == [0, 2, 3, 3, 4]
    known = plan_from_routing_map(routing_map.to("meta"), num_slots=8, num_rows=6, backend="reference")
    assert (known.num_slots, known.num_rows) == (8, 6)


def test_row_id_map_of_a_map(backend: Backend) -> None:
    """By the layout's definition: rows of the token's experts, from column E on the experts, last how many."""
    routing_map = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    plan = plan_from_routing_map(routing_map, backend=backend)
    x = -1
    lines = [[0, 2, x, 0, 1, x, 2], [4, x, x, 2, x, x, 1], [x, x, x, x, x, x, 0], [1, 3, 5, 0, 1, 2, 3]]
    assert row_id_map(plan, backend=backend).tolist() == lines
    dropped = plan_from_routing_map(routing_map, capacity=1, backend=backend)
    assert row_id_map(dropped, backend=backend).tolist() == [
        [0, 1, x, 0, 1, x, 2], [2, x, x, 2, x, x, 1], [x, x, x, x, x, x, 0], [x, x, x, x, x, x, 0]
    ]  # fmt: skip
    again = plan_from_row_id_map(torch.tensor(lines), 6, backend=backend)
    for field in ("row_of_slot", "slot_of_row", "slot_offsets", "expert_of_slot"):
        assert present(getattr(again, field)).tolist() == present(getattr(plan, field)).tolist()
    # Undefined entries are not read, and the order inside a line is free.
    other = torch.tensor([[2, 0, 77, 1, 0, -9, 2], [4, 3, 3, 2, 3, 3, 1], [9, 9, 9, 9, 9, 9, 0], [5, 3, 1, 2, 1, 0, 3]])
    again = plan_from_row_id_map(other.int(), 6, backend=backend)
    assert again.token_of_row.tolist() == plan.token_of_row.tolist()
    weights = torch.arange(1.0, 13).reshape(4, 3)
    rows = torch.tensor([[1.0], [10], [100], [1000], [10000], [100000]])
    expected = [[1 * 1 + 2 * 100.0], [6 * 10000], [0], [10 * 10 + 11 * 1000 + 12 * 100000]]
    assert unpermute(rows, again, weights, backend=backend).tolist() == expected


def test_row_id_map_with_padding(backend: Backend) -> None:
    """Rows of an expert lie behind the padding of those before it."""
    routing_map = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    dense = row_id_map(plan_from_routing_map(routing_map, backend=backend), backend=backend)
    padded = plan_from_routing_map(routing_map, align=4, backend=backend)
    found = plan_from_row_id_map(dense, 12, pad_offsets=torch.tensor([0, 2, 4]), backend=backend)
    assert found.slot_of_row.tolist() == padded.slot_of_row.tolist()
    assert found.row_of_slot.tolist() == [*padded.row_of_slot.tolist(), *[-1] * 6]
    direct = plan_from_row_id_map(row_id_map(padded, backend=backend), 12, backend=backend)
    assert direct.slot_of_row.tolist() == padded.slot_of_row.tolist()


def test_row_id_map_of_ids(backend: Backend) -> None:
    """Slots in the order of the ids; local experts where there is a range."""
    ids = torch.tensor([[2, 0], [-1, 2], [0, 2]])
    plan = plan_from_expert_ids(ids, 3, align=4, backend=backend)
    x = -1
    assert row_id_map(plan, backend=backend).tolist() == [
        [4, 0, x, 2, 0, x, 2], [5, x, x, 2, x, x, 1], [1, 6, x, 0, 2, x, 2]
    ]  # fmt: skip
    local = plan_from_expert_ids(ids, 3, expert_range=(1, 3), backend=backend)
    assert row_id_map(local, backend=backend).tolist() == [[0, x, 1, x, 1], [1, x, 1, x, 1], [2, x, 1, x, 1]]
    twice = plan_from_expert_ids(torch.tensor([[0, 0]]), 1, backend=backend)
    assert row_id_map(twice, backend=backend).tolist() == [[0, 0, 1]]
    assert row_id_map(plan_from_expert_ids(ids[:0], 3, backend=backend), backend=backend).shape == (0, 7)
    empty = plan_from_row_id_map(torch.zeros(2, 1, dtype=torch.int32), 3, backend=backend)
    assert (empty.row_of_slot.tolist(), present(empty.slot_offsets).tolist()) == ([-1] * 3, [0, 0, 0])
