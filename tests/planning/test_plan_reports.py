"""Plans for inputs that broke other people's routing, by number."""

import os
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch

from moeroute.dispatch import Backend
from moeroute.ops.indices.op import plan_from_row_of_slot, plan_from_segments, plan_from_token_ids
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.planning.op import capacity_from_factor, plan_from_expert_ids
from plans_by_hand import expected_from_ids, fields_of
from small_cases import present

INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def test_b02_minus_one_is_no_slot(backend: Backend) -> None:
    plan = plan_from_expert_ids(torch.tensor([[2, -1], [-1, 0], [3, 2]]), 4, backend=backend)
    assert plan.token_of_row.tolist() == [1, 0, 2, 2]
    assert present(plan.tokens_per_expert).tolist() == [1, 0, 2, 1]
    assert plan.row_of_slot.tolist() == [1, -1, -1, 0, 3, 2]


def test_b04_tokens_with_different_numbers_of_experts(backend: Backend) -> None:
    routing_map = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.bool)
    plan = plan_from_routing_map(routing_map, backend=backend)
    assert plan.token_of_row.tolist() == [0, 0, 1]
    assert present(plan.tokens_per_expert).tolist() == [1, 1, 1]
    assert present(plan.slot_offsets).tolist() == [0, 2, 3, 3]


def test_b22_capacity_above_the_number_of_tokens(subtests: pytest.Subtests, backend: Backend) -> None:
    ids, weights = torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 2)
    capacity = capacity_from_factor(2, 2, 2, 4)
    assert capacity == 8
    free = plan_from_expert_ids(ids, 2, backend=backend)
    for drop in ("position", "weight"):
        with subtests.test(drop=drop):
            options: dict[str, Any] = {"capacity": capacity, "drop": drop, "weights": weights, "backend": backend}
            assert fields_of(plan_from_expert_ids(ids, 2, **options)) == fields_of(free)
            padded = plan_from_expert_ids(ids, 2, pad_to_capacity=True, **options)
            assert padded.slot_of_row.tolist() == [0, 3, *[-1] * 6, 1, 2, *[-1] * 6]


@pytest.mark.parametrize(
    ("counts", "align", "padded"),
    [
        pytest.param([0, 1, 8, 9], 8, [0, 8, 8, 16], id="B28"),
        pytest.param([3, 2, 4], 1, [3, 2, 4], id="B53-1"),
        pytest.param([3, 2, 4], 4, [4, 4, 4], id="B53-4"),
        pytest.param([3, 2, 4], 16, [16, 16, 16], id="B53-16"),
        pytest.param([65, 64], 128, [128, 128], id="B116"),
        pytest.param([5, 0, 3], 16, [16, 0, 16], id="B127"),
    ],
)
def test_alignment(backend: Backend, counts: list[int], align: int, padded: list[int]) -> None:
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    plan = plan_from_expert_ids(ids, len(counts), align=align, backend=backend)
    assert present(plan.tokens_per_expert).tolist() == counts
    assert present(plan.rows_per_expert).tolist() == padded
    assert plan.num_rows == sum(padded)
    assert sorted(s for s in plan.slot_of_row.tolist() if s >= 0) == list(range(len(ids)))
    assert int((plan.slot_of_row < 0).sum()) == sum(padded) - len(ids)
    starts = [sum(padded[:e]) for e in range(len(padded))]
    assert all(ids[plan.slot_of_row[start]] == e for e, start in enumerate(starts) if counts[e])


@pytest.mark.parametrize("topk", range(1, 10))
def test_b29_any_number_of_experts_per_token(subtests: pytest.Subtests, backend: Backend, topk: int) -> None:
    for num_experts in (1, 3, 5, 6, 7, 12, 33):
        with subtests.test(num_experts=num_experts):
            ids = (torch.arange(4 * topk).reshape(4, topk) * 7 + 3) % (num_experts + 1) - 1
            expected = expected_from_ids(ids.tolist(), num_experts)
            assert fields_of(plan_from_expert_ids(ids, num_experts, backend=backend)) == expected


def test_b29_multihot_map_is_the_same_plan(backend: Backend) -> None:
    ids = torch.tensor([[0, 4, -1], [2, 1, 3], [-1, -1, -1]])
    routing_map = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.int8)
    by_ids = plan_from_expert_ids(ids, 5, backend=backend)
    by_map = plan_from_routing_map(routing_map, backend=backend)
    assert by_ids.token_of_row.tolist() == by_map.token_of_row.tolist() == [0, 1, 1, 1, 0]
    assert present(by_ids.tokens_per_expert).tolist() == present(by_map.tokens_per_expert).tolist() == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("num_experts", [255, 256, 257, 1025, 4096])
def test_b32_b146_many_experts(backend: Backend, num_experts: int) -> None:
    ids = torch.randint(0, num_experts, (64, 4), generator=torch.Generator().manual_seed(0))
    ids[7, 2] = num_experts - 1
    plan = plan_from_expert_ids(ids, num_experts, backend=backend)
    assert plan.slot_of_row.tolist() == sorted(range(256), key=ids.reshape(-1).tolist().__getitem__)
    assert present(plan.tokens_per_expert).tolist() == torch.bincount(ids.reshape(-1), minlength=num_experts).tolist()


def test_b34_experts_no_multiple_of_anything(backend: Backend) -> None:
    plan = plan_from_expert_ids(torch.tensor([[4], [0], [1], [0]]), 5, backend=backend)
    assert present(plan.tokens_per_expert).tolist() == [2, 1, 0, 0, 1]
    assert plan.token_of_row.tolist() == [1, 3, 2, 0]


def test_b35_b133_experts_of_this_rank_only(subtests: pytest.Subtests, backend: Backend) -> None:
    plan = plan_from_expert_ids(torch.tensor([[0, 2], [3, 1], [0, 1]]), 4, expert_range=(2, 4), backend=backend)
    assert present(plan.tokens_per_expert).tolist() == [1, 1]
    assert plan.row_of_slot.tolist() == [-1, 0, 1, -1, -1, -1]
    assert plan.num_experts == 4
    # The same as local ids with a sentinel in either manner.
    local = torch.tensor([[-1, 0], [1, -1], [-1, -1]])
    for sentinel in (-1, 2):
        with subtests.test(sentinel=sentinel):
            ids = torch.where(local < 0, sentinel, local)
            assert plan_from_expert_ids(ids, 2, backend=backend).row_of_slot.tolist() == plan.row_of_slot.tolist()
    routing_map = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
    by_map = plan_from_routing_map(routing_map, expert_range=(2, 4), backend=backend)
    assert by_map.row_of_slot.tolist() == [-1, 0, -1, 1, -1, -1]
    assert present(by_map.expert_of_slot).tolist() == [0, 2, 1, 3, 0, 1]


@pytest.mark.skipif(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 2**32, reason="needs 4 GiB of memory")
def test_b52_map_with_more_entries_than_int32_counts() -> None:
    num_tokens = 2**23 + 1
    routing_map = torch.zeros(num_tokens, 256, dtype=torch.bool)
    for token, expert in ((0, 3), (2**22, 7), (num_tokens - 1, 255)):
        routing_map[token, expert] = True
    plan = plan_from_routing_map(routing_map, backend="cpu")
    assert present(plan.tokens_per_expert).nonzero().reshape(-1).tolist() == [3, 7, 255]
    assert plan.token_of_row.tolist() == [0, 2**22, num_tokens - 1]


def test_b53_a_plan_keeps_its_own_alignment(subtests: pytest.Subtests, backend: Backend) -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    for align in (1, 4, 16):
        with subtests.test(align=align):
            plan = plan_from_expert_ids(ids, 3, align=align, backend=backend)
            assert plan.token_of_row[plan.row_of_slot.long()].tolist() == list(range(9))


def test_b68_counts_have_every_expert(backend: Backend) -> None:
    plan = plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 5, backend=backend)
    assert present(plan.tokens_per_expert).tolist() == [2, 2, 0, 0, 0]


def test_b76_repeated_expert(backend: Backend) -> None:
    plan = plan_from_expert_ids(torch.tensor([[1, 1]]), 3, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 1]
    assert present(plan.tokens_per_expert).tolist() == [0, 2, 0]


def test_b82_padding_does_not_count(backend: Backend) -> None:
    ids = torch.tensor([[0], [0], [0], [0]])
    plan = plan_from_expert_ids(ids, 2, capacity=2, pad_to_capacity=True, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 1, -1, -1]
    assert present(plan.tokens_per_expert).tolist() == [2, 0]
    assert present(plan.rows_per_expert).tolist() == [2, 2]
    assert present(plan_from_expert_ids(ids, 2, backend=backend).tokens_per_expert).tolist() == [4, 0]  # for the loss


def test_b88_the_same_stable_bijection_every_time(threads: int) -> None:
    ids = torch.randint(0, 8, (65536, 2), generator=torch.Generator().manual_seed(0))
    golden = torch.argsort(ids.reshape(-1), stable=True).to(torch.int32)
    for _ in range(50):
        plan = plan_from_expert_ids(ids, 8, backend="cpu")
        assert torch.equal(plan.slot_of_row, golden)
        assert torch.equal(plan.row_of_slot[golden.long()], torch.arange(131072, dtype=torch.int32))


def test_b98_capacity_is_exact() -> None:
    assert capacity_from_factor(5, 2, 3, 1.0) == 4
    assert capacity_from_factor(5, 2, 3, 1.25) == 5
    assert capacity_from_factor(5, 2, 3, 1.25, align=4) == 8
    assert capacity_from_factor(5, 2, 3, 1.0, minimum=8) == 8
    assert capacity_from_factor(6, 1, 3, 1.1) == 3
    assert capacity_from_factor(100, 1, 10, 1.1) == 11
    assert capacity_from_factor(10, 1, 10, 3.0) == 3
    assert capacity_from_factor(0, 2, 3, 1.5) == 0
    assert capacity_from_factor(3, 1, 1, Fraction(1, 3)) == 1
    assert capacity_from_factor(100, 1, 10, Decimal("1.1")) == 11
    assert capacity_from_factor(3, 1, 2, 1e-5) == 1


def test_b100_padding_tokens_take_no_capacity(backend: Backend) -> None:
    valid = torch.tensor([False, True, False, True])
    ids = torch.where(valid, 0, -1)
    plan = plan_from_expert_ids(ids, 2, capacity=1, backend=backend)
    assert plan.row_of_slot.tolist() == [-1, 0, -1, -1]
    assert present(plan.tokens_per_expert).tolist() == [1, 0]
    assert plan.num_rows == 1


def test_b107_ids_above_256_do_not_collide(subtests: pytest.Subtests, backend: Backend) -> None:
    ids = torch.tensor([[259, 257], [258, 599], [257, 256]])
    for num_experts in (600, None):
        with subtests.test(num_experts=num_experts):
            plan = plan_from_expert_ids(ids, num_experts, backend=backend)
            assert plan.token_of_row.tolist() == [2, 0, 2, 1, 0, 1]
            assert plan.slot_of_row.tolist() == [5, 1, 4, 2, 0, 3]


def test_b109_out_of_range_id(backend: Backend) -> None:
    ids = torch.tensor([[0, 7]])
    assert plan_from_expert_ids(ids, 4, backend=backend).row_of_slot.tolist() == [0, -1]
    with pytest.raises(ValueError, match="got 7 in slot 1"):
        plan_from_expert_ids(ids, 4, check=True, backend=backend)


def test_b125_padded_token(backend: Backend) -> None:
    plan = plan_from_expert_ids(torch.tensor([[-1, -1], [1, 0]]), 2, backend=backend)
    assert present(plan.tokens_per_expert).tolist() == [1, 1]
    assert plan.token_of_row.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_b131_every_integer_dtype(subtests: pytest.Subtests, backend: Backend, dtype: torch.dtype) -> None:
    ids = torch.tensor([[100, 5], [5, 127]]).to(dtype)
    for num_experts in (128, None):
        with subtests.test(num_experts=num_experts):
            plan = plan_from_expert_ids(ids, num_experts, backend=backend)
            assert plan.row_of_slot.tolist() == [2, 0, 1, 3]
    if not dtype.is_signed:
        plan = plan_from_expert_ids(torch.tensor([[130], [5]]).to(dtype), 200, backend=backend)
        assert present(plan.tokens_per_expert)[130] == 1
        assert plan.row_of_slot.tolist() == [1, 0]
    assert plan_from_token_ids(ids.reshape(-1), 128, backend=backend).token_of_slot.tolist() == [5, 5, 100, 127]
    rows = torch.tensor([0, 1], dtype=torch.int32)
    plan = plan_from_row_of_slot(rows, 1, 2, expert_of_slot=ids[:1], backend=backend)
    assert present(plan.expert_of_slot).tolist() == [100, 5]
    assert present(plan_from_segments(ids[:, :1], 105, backend=backend).tokens_per_expert).tolist() == [105]


def test_b131_bytes_of_a_map(backend: Backend) -> None:
    routing_map = torch.tensor([[1, 0, 255, 128]], dtype=torch.uint8)
    assert present(plan_from_routing_map(routing_map, backend=backend).expert_of_slot).tolist() == [0, 2, 3]
    assert present(plan_from_routing_map(routing_map.view(torch.int8), backend=backend).expert_of_slot).tolist() == [
        0,
        2,
        3,
    ]


def test_b137_rows_beyond_the_given_number_are_cut(backend: Backend) -> None:
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    plan = plan_from_expert_ids(ids, 2, align=4, num_rows=8, backend=backend)
    assert plan.slot_of_row.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert plan.row_of_slot.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert present(plan.tokens_per_expert).tolist() == [5, 0]
    assert present(plan.rows_per_expert).tolist() == [8, 0]


def test_b139_more_slots_than_a_float_counts() -> None:
    num_tokens = 2**21 + 1
    ids = (torch.arange(num_tokens * 8, dtype=torch.int32) % 13).reshape(num_tokens, 8)
    plan = plan_from_expert_ids(ids, 13, num_rows=num_tokens * 8, backend="cpu")
    count = num_tokens * 8
    counts = present(plan.tokens_per_expert)
    assert counts.tolist() == [(count - e + 12) // 13 for e in range(13)]
    # Slot s is the (s // 13)-th of expert s % 13.
    starts = counts.cumsum(0) - counts
    last = torch.arange(count - 40, count)
    assert plan.row_of_slot[-40:].tolist() == (starts[last % 13] + last // 13).tolist()
    assert int(plan.slot_of_row.min()) == 0
    assert int(plan.slot_of_row.max()) == count - 1


def test_b139_k_above_512(backend: Backend) -> None:
    ids = torch.arange(2 * 513).reshape(2, 513) % 600
    plan = plan_from_expert_ids(ids, 600, backend=backend)
    assert fields_of(plan) == expected_from_ids(ids.tolist(), 600)


def test_b143_mask_of_tokens(backend: Backend) -> None:
    padded = torch.tensor([False, True, False])
    routing_map = torch.ones(3, 3, dtype=torch.bool) & ~padded[:, None]
    plan = plan_from_routing_map(routing_map, backend=backend)
    assert present(plan.tokens_per_expert).tolist() == [2, 2, 2]
    assert present(plan.slot_offsets).tolist() == [0, 3, 3, 6]


def test_b59_no_token_and_nothing_but_empty_slots(backend: Backend) -> None:
    dummy = plan_from_expert_ids(torch.tensor([[-1, -1]]), 4, backend=backend)
    assert dummy.row_of_slot.tolist() == [-1, -1]
    none = plan_from_expert_ids(torch.empty(0, 2, dtype=torch.int64), 4, backend=backend)
    for plan in (dummy, none):
        assert present(plan.tokens_per_expert).tolist() == [0, 0, 0, 0]
        assert plan.num_rows == 0
        assert plan.slot_of_row.dtype is torch.int32
