"""The MoeInitRouting and MoeFinalizeRouting operators and their gradients."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aclnn_calls import (
    FLOATS,
    INNER_NULL,
    INVALID,
    NULL,
    TILING,
    X34,
    call_refused,
    cases,
    close,
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
    MIXTURES,
    SEEDS,
    SIZES,
    gathered,
    generator_of,
    integers,
    normal,
    placed,
    rows_by_expert,
    seed_bit,
)
from moeroute.testing import assert_same_bits

# ---------------------------------------------------------------------------- worked numbers


COLUMNS = [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("active", range(5))
@on_every_backend
def test_init_routing_by_column(active: int) -> None:
    """activeNum counts tokens, not rows; the index outputs are never cut."""
    kept = 2 * min(active, 3)
    expanded, indices, experts = poison(kept, 4), empty_ids(6), empty_ids(6)
    ids = i32([[1, 2], [0, 1], [0, 2]])
    run("MoeInitRouting", f32(X34), i32(COLUMNS), ids, active, expanded, indices, experts)
    same(indices, [2, 0, 1, 4, 3, 5])
    same(experts, [0, 0, 1, 1, 2, 2])
    same(expanded, f32([X34[t] for t in (1, 2, 0, 1, 0, 2)][:kept]).reshape(kept, 4))


@on_every_backend
def test_init_routing_by_column_of_wild_numbers() -> None:
    """Row numbers outside 0..T * K - 1 write nowhere; a number that nobody has is row -1."""
    expanded, indices, experts = poison(6, 4), empty_ids(6), empty_ids(6)
    numbers = i32([[2**31 - 1, 3], [-(2**31), 4], [6, -1]])
    run("MoeInitRouting", f32(X34), numbers, i32([[1, 2], [0, 1], [0, -5]]), 3, expanded, indices, experts)
    same(experts, [-5, 0, 0, 1, 1, 2])
    same(indices, [-1, -1, -1, 5, 4, -1])
    zero = [0.0] * 4
    same(expanded, [zero, zero, zero, zero, X34[1], X34[0]])


@on_every_backend
def test_init_routing_of_the_document() -> None:
    expanded, indices, before = poison(3, 2, 4), poison(6, dtype=torch.int32), poison(3, dtype=torch.int32)
    ids = i32([[1, 2], [0, 1], [0, 2]])
    run("MoeInitRoutingV2", f32(X34), ids, 0, 2, 3, 1, 0, True, expanded, indices, None, before)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(before, [2, 2, 2])
    same(expanded, f32([X34[t] for t in (1, 2, 0, 1, 0, 2)]).reshape(3, 2, 4))


@pytest.mark.parametrize("active", (0, -1, 6, 9))
@on_every_backend
def test_init_routing_of_all_rows(active: int) -> None:
    expanded, indices = poison(6, 4), poison(6, dtype=torch.int32)
    ids = i32([[1, 2], [0, 1], [0, 2]])
    run("MoeInitRoutingV2", f32(X34), ids, active, 0, 3, 0, 0, False, expanded, indices, None, None)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(expanded, [X34[t] for t in (1, 2, 0, 1, 0, 2)])


@pytest.mark.parametrize("flag, counts", ((1, [2, 4, 6]), (2, [2, 2, 2]), (0, None)))
@on_every_backend
def test_init_routing_counts_and_active_rows(flag: int, counts: list[int] | None) -> None:
    expanded, indices, counts_out = poison(4, 4), poison(6, dtype=torch.int32), poison(3, dtype=torch.int32)
    ids = i32([[1, 2], [0, 1], [0, 2]])
    run("MoeInitRoutingV2", f32(X34), ids, 4, 0, 3, 0, flag, True, expanded, indices, counts_out, None)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(expanded, [X34[t] for t in (1, 2, 0, 1)])
    same(counts_out, [-77] * 3 if counts is None else counts)


@on_every_backend
def test_init_routing_drops_and_pads() -> None:
    expanded, indices, before = poison(3, 2, 4), poison(6, dtype=torch.int32), poison(3, dtype=torch.int32)
    run(
        "MoeInitRoutingV2",
        f32(X34),
        i32([[1, 1], [2, 1], [1, -1]]),
        0,
        2,
        3,
        1,
        0,
        True,
        expanded,
        indices,
        None,
        before,
    )
    same(indices, [2, 3, 4, -1, -1, -1])
    same(before, [0, 4, 1])
    zero = [0.0] * 4
    same(expanded, [[zero, zero], [X34[0], X34[0]], [X34[1], zero]])


@pytest.mark.parametrize("grad, indices, drop, active, expected", (
    ([[0.1, 0.1], [0.3, 0.3], [0.2, 0.2], [0.4, 0.4]], [2, 0, 1, 3], 0, 0, [[0.3, 0.3], [0.7, 0.7]]),
    ([[0.1, 0.1], [0.3, 0.3]], [2, 0, 1, 3], 0, 2, [[0.1, 0.1], [0.3, 0.3]]),
    ([[[0.1, 0.1], [0.3, 0.3]], [[0.2, 0.2], [0.4, 0.4]]], [2, -1, 1, 3], 1, 0, [[0.2, 0.2], [0.7, 0.7]]),
), ids=("of the document", "two active rows", "dropping"))  # fmt: skip
@on_every_backend
def test_init_routing_grad(grad: Any, indices: list[int], drop: int, active: int, expected: Any) -> None:
    out = poison(2, 2)
    run("MoeInitRoutingV2Grad", f32(grad), i32(indices), 2, drop, active, out)
    close(out, expected)


@on_every_backend
def test_finalize_routing_of_the_document() -> None:
    pattern = [[0.1, 1.1, 2.1, 3.1], [4.1, 5.1, 6.1, 7.1], [8.1, 9.1, 10.1, 11.1]]
    rows = f32(pattern * 2)
    shared = f32(pattern) + 0.1
    bias = f32([[0.2, 0.4, 0.2, 0.4]] * 2)
    scales = f32([[1.3, 1.6], [1.2, 1.8], [1.2, 2.3]])
    out = poison(3, 4)
    by_column = [2, 1, 4, 3, 0, 5]
    run("MoeFinalizeRoutingV2", rows, i32(by_column), shared, shared, bias, scales, i32([[0, 1]] * 3), 0, out)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for t in range(3):
        expected[t] = 2 * shared[t].double()
        for k in range(2):
            expected[t] += scales[t, k].double() * (rows[by_column[t + k * 3]].double() + bias[0].double())
    close(out, expected)
    by_row = i32(by_column).reshape(2, 3).t().reshape(-1)
    again = poison(3, 4)
    run("MoeFinalizeRoutingV2", rows, by_row, shared, shared, bias, scales, i32([[0, 1]] * 3), 2, again)
    same(again, out)


ROWS = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]
SHARED = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
SCALES = [[1.0, 0.5], [2.0, 0.25], [0.0, 1.0]]


@pytest.mark.parametrize(
    "second, more", ((None, 0.0), ([[10.0] * 2, [20.0] * 2, [30.0] * 2], 10.0)), ids=("x1", "x1, x2")
)
@pytest.mark.parametrize("dtype", FLOATS, ids=spoken)
@on_every_backend
def test_finalize_routing_by_column(dtype: torch.dtype, second: Any, more: float) -> None:
    out = poison(3, 2, dtype=dtype)
    bias, ids = f32([[0.5, 1.0], [-0.5, 2.0]]).to(dtype), i32([[0, 1], [1, 0], [0, 1]])
    x2 = None if second is None else f32(second).to(dtype)
    arguments = f32(ROWS).to(dtype), f32(SHARED).to(dtype), x2, bias, f32(SCALES).to(dtype)
    run("MoeFinalizeRouting", *arguments, i32([2, 1, 4, 3, 0, 5]), ids, out)
    same(out, f32([[8.25, 11.5], [5.125, 12.5], [12.5, 16.0]]) + more * f32(SHARED))


@on_every_backend
def test_finalize_routing_by_column_of_wild_indices() -> None:
    """An index outside adds nothing, not even its bias; an expert outside has no bias."""
    out, bias = poison(2, 2), f32([[1.0, 2.0]])
    arguments = f32(ROWS[:4]), f32(SHARED[:2]), None, bias, ones(2, 2), i32([-1, 3, 4, 0]), i32([[0, 0], [0, 1]])
    run("MoeFinalizeRouting", *arguments, out)
    same(out, [[1.0, 1.0], [9.0, 12.0]])


SPECIAL: dict[str, Any] = {
    "expandedX": f32(ROWS), "expandedRowIdx": i32(range(6)), "x1Optional": f32(SHARED), "x2Optional": None,
    "biasOptional": f32([[0.0] * 2, [0.0] * 2, [7.0] * 2, [1.0] * 2, [0.0] * 2]), "scalesOptional": f32(SCALES),
    "expertIdxOptional": i32([[0, 2], [1, 3], [0, 4]]), "xOptional": f32([[100.0, 200.0], [300.0, 400.0], [500.0, 600.0]]),
    "alpha1Optional": f32([[0.5, 0.5]]), "alpha2Optional": f32([[2.0, 2.0]]), "vOptional": f32([[10.0, 20.0]]),
    "dropPadMode": 2, "zeroExpertRange": [2, 3], "copyExpertRange": [3, 4], "constantExpertRange": [4, 5],
}  # fmt: skip


@pytest.mark.parametrize("changes, expected", (
    ({}, [[1.0, 2.0], [85.25, 112.25], [273.0, 343.0]]),
    ({"expandedRowIdx": i32([0, 1, 2, -1, 4, 5])}, [[1.0, 2.0], [10.0, 12.0], [273.0, 343.0]]),
    ({"expandedRowIdx": i32([0, 1, 2, 3, 4, 6])}, [[1.0, 2.0], [85.25, 112.25], [3.0, 3.0]]),
    ({"scalesOptional": f32([[1.0, 0.5], [2.0, -0.0], [0.0, 1.0]])}, [[1.0, 2.0], [10.0, 12.0], [273.0, 343.0]]),
    ({"vOptional": None}, [[1.0, 2.0], [85.25, 112.25], [13.0, 14.0]]),
    ({"copyExpertRange": (-1, -1)}, [[1.0, 2.0], [11.75, 14.0], [273.0, 343.0]]),
    ({"zeroExpertRange": []}, [[5.5, 7.0], [85.25, 112.25], [273.0, 343.0]]),
    ({"xOptional": None}, [[5.5, 7.0], [11.75, 14.0], [13.0, 14.0]]),
    ({"zeroExpertRange": None, "copyExpertRange": None, "constantExpertRange": None}, [[5.5, 7.0], [11.75, 14.0], [13.0, 14.0]]),
), ids=(
    "of the document", "a copy without a row", "a constant without a row", "a copy of weight 0", "no v", "no copies", "no zeros",
    "no x", "no ranges",
))  # fmt: skip
@pytest.mark.parametrize("name", ("MoeFinalizeRoutingV3", "MoeFinalizeRoutingV4"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=spoken)
@on_every_backend
def test_finalize_routing_with_special_experts(
    dtype: torch.dtype, name: str, changes: dict[str, Any], expected: list[list[float]]
) -> None:
    """Zero, copied and constant experts; without x the ranges mean nothing."""
    arguments = SPECIAL | changes
    if name.endswith("4"):
        arguments["k"] = 2
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            arguments[key] = value.to(dtype)
    out = poison(3, 2, dtype=dtype)
    run(name, *arguments.values(), out)
    close(out, expected)


@pytest.mark.parametrize("mode, expected", (
    (2, [[6.0, 8.0], [14.0, 16.0], [10.0, 12.0]]), (0, [[10.0, 12.0], [2.0, 4.0], [18.0, 20.0]]),
), ids=("by row", "by column"))  # fmt: skip
@on_every_backend
def test_finalize_routing_v4_without_scales(mode: int, expected: list[list[float]]) -> None:
    out = poison(3, 2)
    nulls = [None] * 9
    run("MoeFinalizeRoutingV4", f32(ROWS), i32([2, 1, 4, 3, 0, 5]), *nulls, mode, None, None, None, 2, out)
    same(out, expected)


@on_every_backend
def test_finalize_routing_v3_without_scales_has_one_row_a_token() -> None:
    out = poison(6, 2)
    indices, nulls = [2, 1, 4, 3, 0, 5], [None] * 9
    run("MoeFinalizeRoutingV3", f32(ROWS), i32(indices), *nulls, 0, None, None, None, out)
    same(out, f32(ROWS)[indices])


@pytest.mark.parametrize("mode", range(4))
@on_every_backend
def test_finalize_routing_without_a_row_adds_not_even_the_bias(mode: int) -> None:
    rows = torch.full((2, 1, 2) if mode in (1, 3) else (2, 2), 10.0)
    out = poison(2, 2)
    scales, experts = f32([[2.0], [3.0]]), i32([[1], [9]])
    bias = f32([[100.0, 200.0], [1.0, 2.0]])
    run("MoeFinalizeRoutingV2", rows, i32([-1, 0]), None, None, bias, scales, experts, mode, out)
    same(out, [[0.0, 0.0], [30.0, 30.0]])  # expert 9 has no bias


@on_every_backend
def test_finalize_routing_grad_of_the_document() -> None:
    grad = [[0.3816, 0.3939], [0.8474, 0.1652]]
    rows = [[0.6049, 0.3315], [0.4954, 0.3284], [0.7060, 0.4359], [0.6514, 0.9476]]
    scales = [[0.4708, 0.0656], [0.9652, 0.9512]]
    bias = [[0.6452, 0.1981], [0.4159, 0.9575]]
    indices = [1, 3, 0, 2]
    rows_out, scales_out = poison(4, 2), poison(2, 2)
    run(
        "MoeFinalizeRoutingV2Grad",
        f32(grad), i32(indices), f32(rows), f32(scales), i32([[0, 1], [0, 1]]), f32(bias), 0, 0, 0, 0, rows_out,
        scales_out,
    )  # fmt: skip
    expected_rows, expected_scales = torch.zeros(4, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    for i, row in enumerate(indices):
        t, k = divmod(i, 2)
        expected_rows[row] = torch.tensor(grad[t], dtype=torch.float64) * scales[t][k]
        expected_scales[t, k] = sum((rows[row][h] + bias[k][h]) * grad[t][h] for h in range(2))
    close(rows_out, expected_rows)
    close(scales_out, expected_scales)


@on_every_backend
def test_finalize_routing_grad_gives_a_dropped_slot_nothing() -> None:
    rows_out, scales_out = poison(2, 1, 2), poison(2, 1)
    run(
        "MoeFinalizeRoutingV2Grad",
        torch.ones(2, 2), i32([-1, 1]), torch.ones(2, 1, 2), torch.full((2, 1), 3.0), i32([[0], [1]]),
        torch.ones(2, 2), 1, 0, 2, 1, rows_out, scales_out,
    )  # fmt: skip
    same(rows_out, [[[0.0, 0.0]], [[3.0, 3.0]]])
    same(scales_out, [[0.0], [4.0]])


# ---------------------------------------------------------------------------- refusals


REFUSED: list[tuple[str, dict[str, Any], int]] = [
    *(
        ("MoeInitRouting", changes, TILING)
        for changes in (
            {"x": ones(6)}, {"rowIdx": i32([0, 1, 2])}, {"rowIdx": i32([[0, 1]])}, {"expertIdx": i32([0, 1, 2, 3, 4, 5])},
            {"x": ones(2, 2)}, {"activeNum": -1}, {"expandedXOut": poison(8)}, {"expandedRowIdxOut": empty_ids(6, 1)},
            {"expandedExpertIdxOut": empty_ids(5)}, {"expandedXOut": poison(6, 2)}, {"expandedXOut": poison(4, 3)},
            {"expandedRowIdxOut": empty_ids(5), "expandedExpertIdxOut": empty_ids(5)},
        )
    ),
    ("MoeInitRouting", {"expertIdx": torch.zeros(3, 2, dtype=torch.int64)}, INVALID),
    *(
        ("MoeInitRoutingV2", changes, INNER_NULL)
        for changes in (
            {"x": ones(6)}, {"expertIdx": torch.zeros(3, 2, 1, dtype=torch.int32)}, {"expertIdx": i32([[0, 1]])},
            {"activeNum": -2}, {"expertCapacity": -1}, {"expertNum": -1}, {"expertNum": 0}, {"dropPadMode": 2},
            {"dropPadMode": -1}, {"expertTokensCountOrCumsumFlag": 3}, {"dropPadMode": 1, "expertCapacity": 0},
            {"dropPadMode": 1, "expertCapacity": 4}, {"dropPadMode": 1, "expertNum": 0},
        )
    ),
    ("MoeInitRoutingV2", {"expertTokensCountOrCumsumFlag": -1, "expertNum": 0}, INNER_NULL),
    ("MoeInitRoutingV2", {"activeNum": 4}, INVALID),
    ("MoeInitRoutingV2", {"dropPadMode": 1}, INVALID),
    ("MoeInitRoutingV2", {"dropPadMode": 1, "expertTokensBeforeCapacityFlag": True}, NULL),
    *(
        ("MoeInitRoutingV2Grad", changes, INNER_NULL)
        for changes in (
            {"dropPadMode": 2}, {"topK": 0}, {"topK": 4}, {"activeNum": -1}, {"activeNum": 4}, {"dropPadMode": 1},
            {"gradExpandedX": ones(12)}, {"gradExpandedX": ones(6, 1, 2)}, {"gradExpandedX": ones(5, 2)},
            {"gradExpandedX": ones(6, 3)},
        )
    ),
    *(
        ("MoeFinalizeRouting", changes, INVALID)
        for changes in (
            {"expandedX": ones(12)}, {"x1": ones(6)}, {"x2Optional": ones(6)}, {"bias": ones(8)}, {"scales": ones(6)},
            {"expandedRowIdx": i32([[2, 4, 0, 3, 1, 5]])}, {"expandedExpertIdx": i32([0, 1])}, {"x1": ones(2, 2)},
            {"x2Optional": ones(3, 3)}, {"scales": ones(2, 2)}, {"scales": ones(3, 3)}, {"expandedExpertIdx": i32([[0, 1]])},
            {"bias": ones(4, 3)}, {"bias": torch.empty(0, 2)}, {"expandedX": ones(5, 2)}, {"expandedX": ones(6, 3)},
            {"expandedRowIdx": i32([0, 1])}, {"out": poison(2, 2)}, {"scales": ones(3, 2).bfloat16()},
            {"scales": torch.empty(3, 0), "expandedExpertIdx": empty_ids(3, 0), "expandedX": torch.empty(0, 2), "expandedRowIdx": empty_ids(0)},
        )
    ),
    *(
        (name, changes, TILING)
        for name in ("MoeFinalizeRoutingV3", "MoeFinalizeRoutingV4")
        for changes in (
            {"dropPadMode": 4}, {"dropPadMode": -1}, {"dropPadMode": 1}, {"expandedRowIdx": i32([[0, 1]])},
            {"expandedRowIdx": i32([0, 1])}, {"expandedRowIdx": empty_ids(7)}, {"scalesOptional": ones(6)},
            {"scalesOptional": ones(2, 2)}, {"expandedX": ones(6, 1, 2)}, {"expandedX": ones(12)}, {"x1Optional": ones(2, 2)},
            {"x2Optional": ones(3, 3)}, {"biasOptional": ones(6, 3)}, {"biasOptional": ones(12)}, {"biasOptional": ones(0, 2)},
            {"biasOptional": ones(1, 2), "zeroExpertRange": None, "copyExpertRange": None, "constantExpertRange": None},
            {"dropPadMode": 3, "expandedX": ones(5, 1, 2)}, {"expertIdxOptional": i32([[0, 1]])}, {"xOptional": ones(3, 3)},
            {"alpha1Optional": ones(2, 2)}, {"alpha2Optional": ones(1, 3)}, {"vOptional": ones(2)}, {"vOptional": ones(2, 2)},
            {"zeroExpertRange": [3]}, {"zeroExpertRange": [3, 3]}, {"zeroExpertRange": [-2, 3]}, {"zeroExpertRange": [3, 2]},
            {"copyExpertRange": [4, 7]}, {"copyExpertRange": [3, 5]}, {"constantExpertRange": [0, 6]}, {"zeroExpertRange": [-1, 3]},
        )
    ),
    *(("MoeFinalizeRoutingV4", changes, TILING) for changes in ({"k": 3}, {"k": 0, "scalesOptional": None}, {"k": 4, "scalesOptional": None})),
    *(
        ("MoeFinalizeRoutingV2", changes, INNER_NULL)
        for changes in (
            {"dropPadMode": 4}, {"dropPadMode": -1}, {"dropPadMode": 1}, {"expandedX": ones(6, 1, 2)},
            {"expandedX": ones(7, 2)}, {"expandedRowIdx": i32([0, 1])}, {"scalesOptional": ones(6)},
            {"x1Optional": ones(2, 2)}, {"x2Optional": ones(3, 3)}, {"biasOptional": ones(4, 3)},
            {"biasOptional": ones(8)}, {"expertIdxOptional": i32([[0, 1]])},
        )
    ),
    *(
        ("MoeFinalizeRoutingV2Grad", changes, INNER_NULL)
        for changes in (
            {"dropPadMode": 2}, {"dropPadMode": 1}, {"gradY": ones(6)}, {"expandedRowIdx": i32([0, 1])},
            {"scalesOptional": ones(6)}, {"scalesOptional": ones(2, 2)}, {"expandedXOptional": ones(5, 2)},
            {"biasOptional": torch.empty(0, 2)}, {"expertIdxOptional": i32([[0, 1]])}, {"activeNum": 4},
            {"dropPadMode": 1, "expertCapacity": 2, "expertNum": 0}, {"dropPadMode": 1, "expertCapacity": 2, "expertNum": 3},
        )
    ),
]  # fmt: skip


@cases("name, changes, code", REFUSED)
def test_refused(name: str, changes: dict[str, Any], code: int) -> None:
    call_refused(name, changes, code)


# ---------------------------------------------------------------------------- drawn inputs


@settings(max_examples=40)
@given(SIZES, SEEDS, st.sampled_from(FLOATS), st.booleans())
def test_init_routing_by_column_of_any_numbers(
    sizes: tuple[int, int, int, int], seed: int, dtype: torch.dtype, shuffled: bool
) -> None:
    """Slots numbered by column, or by any permutation, which then says the tokens too."""
    num_tokens, topk, num_experts, hidden = sizes
    generator, slots = generator_of(seed), num_tokens * topk
    ids = integers(generator, -2, num_experts, num_tokens, topk)
    numbers = torch.arange(slots, dtype=torch.int32).reshape(topk, num_tokens).t()
    if shuffled:
        numbers = torch.randperm(slots, generator=generator).int().reshape(num_tokens, topk)
    active = int(integers(generator, 0, num_tokens + 2))
    kept = min(active, num_tokens) * topk
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    expanded, indices, experts = poison(kept, hidden, dtype=dtype), empty_ids(slots), empty_ids(slots)
    run("MoeInitRouting", x, numbers, ids, active, expanded, indices, experts)
    flat = ids.flatten().tolist()
    order = sorted(range(slots), key=lambda slot: flat[slot])
    given_numbers = [int(numbers.flatten()[slot]) for slot in order]
    same(experts, sorted(flat))
    same(indices, [given_numbers.index(number) for number in range(slots)])
    same(expanded, x[[number % num_tokens for number in given_numbers[:kept]]])


@settings(max_examples=60)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.integers(0, 3), st.booleans())
def test_init_and_finalize_routing(
    sizes: tuple[int, int, int, int], seed: int, mixture: tuple[torch.dtype, torch.dtype], mode: int, biased: bool
) -> None:
    """InitRouting, its gradient, FinalizeRouting in its four layouts and its gradient, on one drawn routing."""
    num_tokens, topk, num_experts, hidden = sizes
    (dtype, scales_dtype), generator = mixture, generator_of(seed)
    drop = mode in (1, 3)
    slots = num_tokens * topk
    capacity = int(integers(generator, 1, num_tokens + 1))
    active = int(integers(generator, 0, slots + 2))
    ids = integers(generator, -1, num_experts, num_tokens, topk)
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    flat = ids.flatten().tolist()
    if drop:
        row_of_slot, used = [], [0] * num_experts
        for expert in flat:
            fits = expert >= 0 and used[expert] < capacity
            row_of_slot.append(expert * capacity + used[expert] if fits else -1)
            if expert >= 0:
                used[expert] += 1
        count = num_experts * capacity
        shape: tuple[int, ...] = num_experts, capacity, hidden
    else:
        row_of_slot = rows_by_expert(flat)
        count = min(active, slots) if active else slots
        shape = count, hidden
    counts = [flat.count(expert) for expert in range(num_experts)]
    flag = int(integers(generator, 0, 3))

    expanded, indices = poison(*shape, dtype=dtype), empty_ids(slots)
    counts_out, before = empty_ids(num_experts), empty_ids(num_experts)
    arguments = x, ids, active, capacity, num_experts, int(drop), flag, True, expanded, indices, counts_out, before
    run("MoeInitRoutingV2", *arguments)
    same(indices, row_of_slot)
    same(expanded.reshape(count, hidden), placed(x.repeat_interleave(topk, 0), row_of_slot, count))
    same(before, counts if drop else [-77] * num_experts)
    cumulative = [sum(counts[: e + 1]) for e in range(num_experts)]
    same(counts_out, [-77] * num_experts if drop or flag == 0 else cumulative if flag == 1 else counts)

    y = normal(generator, *shape, dtype=dtype)
    slot_rows = gathered(y.reshape(count, hidden), row_of_slot)
    out = poison(num_tokens, hidden, dtype=dtype)
    if drop or active == 0 or active == count:
        run("MoeInitRoutingV2Grad", y, indices, topk, int(drop), active, out)
        close(out, slot_rows.reshape(num_tokens, topk, hidden).sum(1))

    scales = normal(generator, num_tokens, topk, dtype=scales_dtype)
    bias = normal(generator, num_experts, hidden, dtype=dtype) if biased else None
    shared = normal(generator, 2, num_tokens, hidden, dtype=dtype)
    first = shared[0] if seed_bit(generator) else None
    second = shared[1] if first is not None and seed_bit(generator) else None
    layout = indices if mode in (2, 3) else indices.reshape(num_tokens, topk).t().reshape(-1)
    run("MoeFinalizeRoutingV2", y, layout, first, second, bias, scales, ids if biased else None, mode, out)
    bias_rows = torch.zeros(slots, hidden, dtype=torch.float64) if bias is None else gathered(bias, flat)
    live = torch.tensor([0 <= row < count for row in row_of_slot])
    terms = torch.where(live[:, None], slot_rows + bias_rows, 0.0) * scales.double().reshape(-1, 1)
    expected = terms.reshape(num_tokens, topk, hidden).sum(1)
    for extra in (first, second):
        expected = expected if extra is None else expected + extra.double()
    close(out, expected)

    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    spread_grad = grad.double().repeat_interleave(topk, 0)
    rows_out, scales_out = poison(*shape, dtype=dtype), poison(num_tokens, topk, dtype=scales_dtype)
    finalize = grad, indices, y, scales, ids, bias, int(drop), active, num_experts, capacity, rows_out, scales_out
    run("MoeFinalizeRoutingV2Grad", *finalize)
    close(
        rows_out.reshape(count, hidden),
        placed(spread_grad * scales.double().reshape(-1, 1), row_of_slot, count),
    )
    dots = ((slot_rows + bias_rows) * spread_grad).sum(1)
    close(scales_out, torch.where(live, dots, 0.0).reshape(num_tokens, topk))


@settings(max_examples=60)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.integers(0, 3), st.booleans(), st.booleans())
def test_finalize_routing_of_any_experts(
    sizes: tuple[int, int, int, int],
    seed: int,
    mixture: tuple[torch.dtype, torch.dtype],
    mode: int,
    special: bool,
    scaled: bool,
) -> None:
    """V4 in its four layouts, with experts of every kind, ids and rows out of range, biases and weights of 0."""
    num_tokens, topk, num_experts, hidden = sizes
    (dtype, scales_dtype), generator = mixture, generator_of(seed)
    num_experts += topk  # the bias has one row an expert, and K at least
    bounds = sorted({0, num_experts, *integers(generator, 0, num_experts + 1, 3).tolist()})
    ranges = [list(pair) for pair in itertools.pairwise(bounds)] + [None] * 3
    order = torch.randperm(len(ranges), generator=generator).tolist()
    zero, copy, constant = (ranges[place] if special else None for place in order[:3])
    capacity = int(integers(generator, 1, 4))
    shape = (num_experts, capacity, hidden) if mode in (1, 3) else (num_tokens * topk, hidden)
    count = math.prod(shape[:-1])
    y = normal(generator, *shape, dtype=dtype)
    table = integers(generator, -1, count + 1, num_tokens, topk)
    ids = integers(generator, -1, num_experts + 1, num_tokens, topk)
    scales = normal(generator, num_tokens, topk, dtype=scales_dtype) if scaled else None
    if scales is not None:
        scales[torch.rand(num_tokens, topk, generator=generator) < 0.2] = 0
    bias = normal(generator, num_experts, hidden, dtype=dtype) if seed_bit(generator) else None
    shared = normal(generator, 2, num_tokens, hidden, dtype=dtype)
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    length = constant[1] - constant[0] if constant else 1
    a, b, v = normal(generator, 3, length, hidden, dtype=dtype)
    out = poison(num_tokens, hidden, dtype=dtype)
    layout = table if mode in (2, 3) else table.t()
    arguments = y, layout.reshape(-1), *shared, bias, scales, ids, x, a, b, v, mode, zero, copy, constant, topk, out
    run("MoeFinalizeRoutingV4", *arguments)
    expected = shared.double().sum(0)
    for t in range(num_tokens):
        for k in range(topk):
            row, expert = int(table[t, k]), int(ids[t, k])
            if not 0 <= row < count or (zero and zero[0] <= expert < zero[1]):
                continue
            term = y.reshape(count, hidden)[row].double()
            if copy and copy[0] <= expert < copy[1]:
                term = x[t].double()
            if constant and constant[0] <= expert < constant[1]:
                place = expert - constant[0]
                term = x[t].double() * a[place].double() + v[place].double() * b[place].double()
            if bias is not None and 0 <= expert < num_experts:
                term = term + bias[expert].double()
            expected[t] += term if scales is None else float(scales[t, k]) * term
    close(out, expected)


@on_every_backend
def test_special_experts_have_the_bits_of_combine() -> None:
    """A range that no id is in changes no bit."""
    generator = generator_of(0)
    y, bias = normal(generator, 35, 130, dtype=torch.bfloat16), normal(generator, 9, 130, dtype=torch.bfloat16)
    shared, x = normal(generator, 2, 7, 130, dtype=torch.bfloat16), normal(generator, 7, 130, dtype=torch.bfloat16)
    table, ids = integers(generator, -1, 36, 35), integers(generator, -1, 7, 7, 5)
    scales = normal(generator, 7, 5)
    found = []
    for zero in (None, [7, 9]):
        out = poison(7, 130, dtype=torch.bfloat16)
        nulls = [None] * 3
        run("MoeFinalizeRoutingV3", y, table, *shared, bias, scales, ids, x, *nulls, 2, zero, None, None, out)
        found.append(out)
    assert_same_bits(found[0], found[1])


@on_every_backend
def test_finalize_routing_without_scales() -> None:
    rows, out = f32([[1.0, 2.0], [3.0, 4.0]]), poison(2, 2)
    run("MoeFinalizeRoutingV2", rows, i32([1, 0]), None, None, None, None, None, 0, out)
    same(out, [[3.0, 4.0], [1.0, 2.0]])
    untouched = poison(3)
    run("MoeFinalizeRoutingV2Grad", rows, i32([1, -1]), None, None, None, None, 0, 0, 0, 0, out, untouched)
    same(out, [[0.0, 0.0], [1.0, 2.0]])
    assert untouched.isnan().all()
    name = "MoeFinalizeRoutingV2Grad"
    without = dict.fromkeys(("scalesOptional", "gradScalesOut")) | {"expandedRowIdx": i32([0, 1, 2])}
    assert "gradScalesOut" in call_refused(name, without, NULL)


@on_every_backend
def test_shared_experts_are_added_before_the_first_rounding() -> None:
    """x1 + x2 in bfloat16 would lose the small part that the routed row brings back."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    tiny = one * 2.0**-9
    out = poison(1, 1, dtype=torch.bfloat16)
    run("MoeFinalizeRoutingV2", -one, i32([0]), one, tiny, None, None, None, 0, out)
    same(out, [[2.0**-9]])


# ---------------------------------------------------------------------------- empty tensors


EMPTY: list[tuple[str, dict[str, Any]]] = [
    ("MoeInitRouting", {"x": torch.empty(0, 2), "rowIdx": empty_ids(0, 2), "expertIdx": empty_ids(0, 2), "expandedXOut": torch.empty(0, 2), "expandedRowIdxOut": empty_ids(0), "expandedExpertIdxOut": empty_ids(0)}),
    ("MoeInitRouting", {"rowIdx": empty_ids(3, 0), "expertIdx": empty_ids(3, 0), "expandedXOut": torch.empty(0, 2), "expandedRowIdxOut": empty_ids(0), "expandedExpertIdxOut": empty_ids(0)}),
    ("MoeInitRoutingV2", {"x": torch.empty(0, 2), "expertIdx": torch.empty(0, 2, dtype=torch.int32), "expandedXOut": torch.empty(0, 2), "expandedRowIdxOut": empty_ids(0)}),
    ("MoeInitRoutingV2Grad", {"gradExpandedX": torch.empty(0, 2), "expandedRowIdx": i32([]), "out": torch.empty(0, 2)}),
    ("MoeFinalizeRoutingV2", {"expandedX": torch.empty(6, 0), "x1Optional": torch.empty(3, 0), "x2Optional": torch.empty(3, 0), "biasOptional": torch.empty(4, 0), "out": torch.empty(3, 0)}),
    ("MoeFinalizeRouting", {"expandedX": torch.empty(6, 0), "x1": torch.empty(3, 0), "x2Optional": None, "bias": torch.empty(4, 0), "out": torch.empty(3, 0)}),
    *(
        (name, {"expandedX": torch.empty(6, 0), **{key: torch.empty(3, 0) for key in ("x1Optional", "x2Optional", "xOptional", "out")}, "biasOptional": torch.empty(6, 0), **{key: torch.empty(1, 0) for key in ("alpha1Optional", "alpha2Optional", "vOptional")}})
        for name in ("MoeFinalizeRoutingV3", "MoeFinalizeRoutingV4")
    ),
    ("MoeFinalizeRoutingV2Grad", {"gradY": torch.empty(0, 2), "expandedRowIdx": i32([]), "expandedXOptional": torch.empty(0, 2), "scalesOptional": torch.empty(0, 2), "expertIdxOptional": torch.empty(0, 2, dtype=torch.int32), "gradExpandedXOut": torch.empty(0, 2), "gradScalesOut": torch.empty(0, 2)}),
]  # fmt: skip


@cases("name, changes", EMPTY)
@on_every_backend
def test_empty_tensors(subtests: pytest.Subtests, name: str, changes: dict[str, Any]) -> None:
    zeros_where_nothing_is_to_do(subtests, name, changes)
