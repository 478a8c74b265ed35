"""MoeComputeExpertTokens, MoeUpdateExpert and MoeReRouting."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aclnn_calls import (
    FLOATS,
    INVALID,
    TILING,
    call_refused,
    cases,
    empty_ids,
    f32,
    i32,
    on_every_backend,
    ones,
    poison,
    run,
    same,
    spoken,
    zeros_where_nothing_is_to_do,
)
from aclnn_drawn import (
    SEEDS,
    generator_of,
    integers,
    normal,
    seed_bit,
)

# ---------------------------------------------------------------------------- worked numbers


@on_every_backend
def test_compute_expert_tokens_of_the_document() -> None:
    out = poison(3, dtype=torch.int32)
    run("MoeComputeExpertTokens", i32([0, 0, 1, 1, 2, 2]), 3, out)
    same(out, [2, 4, 6])


@pytest.mark.parametrize("idx_type, numbers", ((0, [0, 3, 4, 5, 1, 2]), (1, [0, 4, 5, 1, 2, 3])))
@pytest.mark.parametrize("dtype", (*FLOATS, torch.int8), ids=spoken)
@on_every_backend
def test_re_routing(dtype: torch.dtype, idx_type: int, numbers: list[int]) -> None:
    tokens = torch.arange(12).reshape(6, 2).to(dtype)
    scales = torch.arange(6.0)
    rows, row_scales = poison(6, 2, dtype=dtype), poison(6)
    indices, counts = poison(6, dtype=torch.int32), poison(2, dtype=torch.int64)
    lengths = torch.tensor([[1, 2], [3, 0]])
    run("MoeReRouting", tokens, lengths, scales, 1, idx_type, rows, row_scales, indices, counts)
    same(indices, numbers)
    same(rows, tokens[[0, 3, 4, 5, 1, 2]])
    same(row_scales, [0.0, 3.0, 4.0, 5.0, 1.0, 2.0])
    same(counts, [4, 2])


TABLE = [[1, 0, -1], [2, 1, 4], [2, 2, 5], [1, 3, -1]]


UPDATED = ((0, 0, [[0, 1], [1, 2], [2, 3]]), (0, 2, [[0, 4], [4, 5], [5, 3]]), (1, -1, [[0, 1], [4, 5], [2, 3]]))


@pytest.mark.parametrize("mode, rank, expected", UPDATED, ids=("rank 0", "rank 2", "in turn"))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=spoken)
@on_every_backend
def test_update_expert(dtype: torch.dtype, mode: int, rank: int, expected: list[list[int]]) -> None:
    ids = torch.tensor([[0, 1], [1, 2], [2, 3]], dtype=dtype)
    scales, threshold = f32([[0.6, 0.4], [0.9, 0.1], [0.75, 0.25]]), f32([0.0, 0.25])
    active = torch.tensor([True, True, False])
    balanced, kept = poison(3, 2, dtype=dtype), torch.zeros(3, 2, dtype=torch.bool)
    world = -1 if mode else 4
    run("MoeUpdateExpert", ids, i32(TABLE), scales, threshold, active, rank, world, mode, balanced, kept)
    same(balanced, expected)
    assert kept.tolist() == [[True, True], [True, False], [False, False]]
    run("MoeUpdateExpert", ids, i32(TABLE), scales, threshold[None], None, rank, world, mode, balanced, kept)
    assert kept.tolist() == [[True, True], [True, False], [True, True]]


@on_every_backend
def test_update_expert_without_scales_writes_no_mask() -> None:
    balanced, kept = empty_ids(1, 2), torch.tensor([[True, False]])
    run("MoeUpdateExpert", i32([[3, 1]]), i32(TABLE), None, None, None, 1, 2, 0, balanced, kept)
    same(balanced, [[3, 4]])
    assert kept.tolist() == [[True, False]]


@pytest.mark.parametrize("mode, instances", ((0, (9, 9)), (1, (8, 9))), ids=("by rank", "in turn"))
@on_every_backend
def test_update_expert_of_what_the_table_does_not_have(mode: int, instances: tuple[int, int]) -> None:
    """Ids outside it, counts outside its columns: -1."""
    table = i32([[0, 7, 7], [3, 7, 7], [-(2**31), 7, 7], [2**31 - 1, 7, 7], [2, 8, 9]])
    ids = torch.tensor([[0, 1, 2, 3, 4], [-1, 5, 2**62, -(2**62), 4]])
    balanced, kept = poison(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.bool)
    run("MoeUpdateExpert", ids, table, None, None, None, 1, 2, mode, balanced, kept)
    same(balanced, [[-1] * 4 + [instance] for instance in instances])


@on_every_backend
def test_update_expert_keeps_no_nan() -> None:
    scales = f32([[math.nan, 1.0], [1.0, 1.0], [math.inf, 0.5]])
    kept = torch.ones(3, 2, dtype=torch.bool)
    threshold = f32([0.5, math.nan])
    run("MoeUpdateExpert", i32([[0, 1]] * 3), i32(TABLE), scales, threshold, None, 0, 2, 0, empty_ids(3, 2), kept)
    assert kept.tolist() == [[False, False], [True, False], [True, False]]


# ---------------------------------------------------------------------------- refusals

REFUSED: list[tuple[str, dict[str, Any], int]] = [
    *(("MoeComputeExpertTokens", {"numExperts": n}, TILING) for n in (0, -1, 2049)),
    ("MoeComputeExpertTokens", {"numExperts": 3}, INVALID),
    ("MoeComputeExpertTokens", {"sortedExperts": i32([[0, 0, 1]])}, TILING),
    *(
        ("MoeUpdateExpert", changes, TILING)
        for changes in (
            {"balanceMode": 2}, {"balanceMode": -1}, {"worldSize": 1}, {"worldSize": 769}, {"localRankId": -1},
            {"localRankId": 4}, {"expertIds": i32([0, 1])}, {"expertIds": empty_ids(0, 2)}, {"expertIds": empty_ids(3, 0)},
            {"expertIds": empty_ids(513, 2)}, {"expertIds": empty_ids(3, 17)}, {"eplbTable": i32([1, 0])},
            {"eplbTable": i32([[1, 0]])}, {"eplbTable": ones(1025, 2, dtype=torch.int32)}, {"eplbTable": ones(4, 1, dtype=torch.int32)},
            {"eplbTable": ones(4, 6, dtype=torch.int32)}, {"eplbTable": ones(4, 770, dtype=torch.int32), "balanceMode": 1},
            {"expertScalesOptional": ones(3, 3)}, {"pruningThresholdOptional": ones(3)}, {"pruningThresholdOptional": ones(2, 1)},
            {"pruningThresholdOptional": ones(1, 1, 2)}, {"activeMaskOptional": torch.ones(2, dtype=torch.bool)},
            {"expertScalesOptional": None, "pruningThresholdOptional": None}, {"balancedExpertIds": empty_ids(2, 2)},
        )
    ),
    ("MoeUpdateExpert", {"expertIds": torch.zeros(3, 2, dtype=torch.int64)}, INVALID),
    ("MoeReRouting", {"expertTokenNumType": 0}, TILING),
    ("MoeReRouting", {"idxType": 2}, TILING),
    ("MoeReRouting", {"tokens": torch.empty(3, 0)}, TILING),
    ("MoeReRouting", {"tokens": ones(1, 1).expand(3, 16_384)}, TILING),
    ("MoeReRouting", {"tokens": ones(6)}, TILING),
    ("MoeReRouting", {"expertTokenNumPerRank": i32([1, 2])}, TILING),
    ("MoeReRouting", {"perTokenScalesOptional": ones(2)}, TILING),
    ("MoeReRouting", {"expertTokenNumOut": poison(2, dtype=torch.int64)}, INVALID),
]  # fmt: skip


@cases("name, changes, code", REFUSED)
def test_refused(name: str, changes: dict[str, Any], code: int) -> None:
    call_refused(name, changes, code)


# ---------------------------------------------------------------------------- drawn inputs


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 7))
def test_compute_expert_tokens(experts: list[int], num_experts: int) -> None:
    experts = sorted(experts)
    out = empty_ids(num_experts)
    run("MoeComputeExpertTokens", i32(experts), num_experts, out)
    same(out, [sum(e <= expert for e in experts) for expert in range(num_experts)])


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(2, 9), SEEDS, st.sampled_from(FLOATS))
def test_update_expert_of_any_table(
    num_tokens: int, topk: int, more: int, world: int, seed: int, dtype: torch.dtype
) -> None:
    generator = generator_of(seed)
    num_experts = topk + more
    columns = int(integers(generator, 2, world + 2))
    ids = integers(generator, -1, num_experts + 1, num_tokens, topk)
    table = integers(generator, 0, 50, num_experts, columns)
    table[:, 0] = integers(generator, 0, columns + 1, num_experts)
    rank, mode = int(integers(generator, 0, world)), int(seed_bit(generator))
    scales, threshold = normal(generator, num_tokens, topk, dtype=dtype), normal(generator, topk)
    active = torch.rand(num_tokens, generator=generator) < 0.7
    balanced, kept = empty_ids(num_tokens, topk), torch.zeros(num_tokens, topk, dtype=torch.bool)
    run("MoeUpdateExpert", ids, table, scales, threshold, active, rank, world, mode, balanced, kept)
    for t in range(num_tokens):
        total = float(scales[t].double().sum())
        for k in range(topk):
            expert, expected = int(ids[t, k]), -1
            if 0 <= expert < num_experts and 1 <= table[expert, 0] < columns:
                count = int(table[expert, 0])
                turn = t % count if mode else rank // math.ceil(world / count)
                expected = int(table[expert, 1 + turn])
            assert balanced[t, k] == expected
            distance = float(scales[t, k]) - total * float(threshold[k])
            if abs(distance) > 1e-5:  # closer, float32 may say the other
                assert bool(kept[t, k]) is (distance > 0 and bool(active[t]))


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), SEEDS, st.booleans())
def test_re_routing_of_any_lengths(ranks: int, num_experts: int, seed: int, wide: bool) -> None:
    generator = generator_of(seed)
    lengths = integers(generator, 0, 4, ranks, num_experts)
    lengths = lengths.long() if wide else lengths
    count = int(lengths.sum())
    tokens, scales = normal(generator, count, 5, dtype=torch.bfloat16), normal(generator, count)
    chunks = list(torch.arange(count).split(lengths.flatten().tolist()))
    order = torch.cat([chunks[r * num_experts + e] for e in range(num_experts) for r in range(ranks)])
    rows, row_scales = poison(count, 5, dtype=torch.bfloat16), poison(count)
    indices, counts = empty_ids(count), poison(num_experts, dtype=lengths.dtype)
    run("MoeReRouting", tokens, lengths, scales, 1, 0, rows, row_scales, indices, counts)
    same(indices, order)
    same(rows, tokens[order])
    same(row_scales, scales[order])
    same(counts, lengths.sum(0))


@on_every_backend
def test_re_routing_where_the_lengths_do_not_add_up() -> None:
    """Tokens behind the last chunk have no row: zero rows, index -1."""
    tokens, rows = ones(4, 2), poison(4, 2)
    indices, counts = empty_ids(4), empty_ids(1)
    run("MoeReRouting", tokens, i32([[1], [2]]), None, 1, 0, rows, None, indices, counts)
    same(indices, [0, 1, 2, -1])
    same(rows, [[1.0, 1.0]] * 3 + [[0.0, 0.0]])


# ---------------------------------------------------------------------------- empty tensors

EMPTY: list[tuple[str, dict[str, Any]]] = [
    ("MoeComputeExpertTokens", {"sortedExperts": i32([])}),
    ("MoeReRouting", {"tokens": torch.empty(0, 2), "perTokenScalesOptional": torch.empty(0), "expertTokenNumPerRank": torch.zeros(2, 2, dtype=torch.int32), "permuteTokensOut": torch.empty(0, 2), "permutePerTokenScalesOut": torch.empty(0), "permuteTokenIdxOut": empty_ids(0)}),
]  # fmt: skip


@cases("name, changes", EMPTY)
@on_every_backend
def test_empty_tensors(subtests: pytest.Subtests, name: str, changes: dict[str, Any]) -> None:
    zeros_where_nothing_is_to_do(subtests, name, changes)
