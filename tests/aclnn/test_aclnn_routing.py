"""The MoeInitRouting and MoeFinalizeRouting operators and their gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aclnn_calls import (
    FLOATS,
    GOOD,
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
    ones,
    outputs_of,
    poison,
    run,
    same,
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

# ---------------------------------------------------------------------------- worked numbers


COLUMNS = [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("active", range(5))
def test_init_routing_by_column(active: int) -> None:
    """activeNum counts tokens, not rows; the index outputs are never cut."""
    kept = 2 * min(active, 3)
    expanded, indices, experts = poison(kept, 4), empty_ids(6), empty_ids(6)
    ids = i32([[1, 2], [0, 1], [0, 2]])
    run("MoeInitRouting", f32(X34), i32(COLUMNS), ids, active, expanded, indices, experts)
    same(indices, [2, 0, 1, 4, 3, 5])
    same(experts, [0, 0, 1, 1, 2, 2])
    same(expanded, f32([X34[t] for t in (1, 2, 0, 1, 0, 2)][:kept]).reshape(kept, 4))


def test_init_routing_by_column_of_wild_numbers() -> None:
    """Row numbers outside 0..T * K - 1 write nowhere; a number that nobody has is row -1."""
    expanded, indices, experts = poison(6, 4), empty_ids(6), empty_ids(6)
    numbers = i32([[2**31 - 1, 3], [-(2**31), 4], [6, -1]])
    run("MoeInitRouting", f32(X34), numbers, i32([[1, 2], [0, 1], [0, -5]]), 3, expanded, indices, experts)
    same(experts, [-5, 0, 0, 1, 1, 2])
    same(indices, [-1, -1, -1, 5, 4, -1])
    zero = [0.0] * 4
    same(expanded, [zero, zero, zero, zero, X34[1], X34[0]])


def test_init_routing_of_the_document() -> None:
    expanded, indices, before = poison(3, 2, 4), poison(6, dtype=torch.int32), poison(3, dtype=torch.int32)
    ids = i32([[1, 2], [0, 1], [0, 2]])
    run("MoeInitRoutingV2", f32(X34), ids, 0, 2, 3, 1, 0, True, expanded, indices, None, before)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(before, [2, 2, 2])
    same(expanded, f32([X34[t] for t in (1, 2, 0, 1, 0, 2)]).reshape(3, 2, 4))


@pytest.mark.parametrize("active", (0, -1, 6, 9))
def test_init_routing_of_all_rows(active: int) -> None:
    expanded, indices = poison(6, 4), poison(6, dtype=torch.int32)
    ids = i32([[1, 2], [0, 1], [0, 2]])
    run("MoeInitRoutingV2", f32(X34), ids, active, 0, 3, 0, 0, False, expanded, indices, None, None)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(expanded, [X34[t] for t in (1, 2, 0, 1, 0, 2)])


@pytest.mark.parametrize("flag, counts", ((1, [2, 4, 6]), (2, [2, 2, 2]), (0, None)))
def test_init_routing_counts_and_active_rows(flag: int, counts: list[int] | None) -> None:
    expanded, indices, counts_out = poison(4, 4), poison(6, dtype=torch.int32), poison(3, dtype=torch.int32)
    ids = i32([[1, 2], [0, 1], [0, 2]])
    run("MoeInitRoutingV2", f32(X34), ids, 4, 0, 3, 0, flag, True, expanded, indices, counts_out, None)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(expanded, [X34[t] for t in (1, 2, 0, 1)])
    same(counts_out, [-77] * 3 if counts is None else counts)


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
def test_init_routing_grad(grad: Any, indices: list[int], drop: int, active: int, expected: Any) -> None:
    out = poison(2, 2)
    run("MoeInitRoutingV2Grad", f32(grad), i32(indices), 2, drop, active, out)
    close(out, expected)


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


@pytest.mark.parametrize("mode", range(4))
def test_finalize_routing_without_a_row_adds_not_even_the_bias(mode: int) -> None:
    rows = torch.full((2, 1, 2) if mode in (1, 3) else (2, 2), 10.0)
    out = poison(2, 2)
    scales, experts = f32([[2.0], [3.0]]), i32([[1], [9]])
    bias = f32([[100.0, 200.0], [1.0, 2.0]])
    run("MoeFinalizeRoutingV2", rows, i32([-1, 0]), None, None, bias, scales, experts, mode, out)
    same(out, [[0.0, 0.0], [30.0, 30.0]])  # expert 9 has no bias


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
    ("MoeFinalizeRoutingV2Grad", {"gradY": torch.empty(0, 2), "expandedRowIdx": i32([]), "expandedXOptional": torch.empty(0, 2), "scalesOptional": torch.empty(0, 2), "expertIdxOptional": torch.empty(0, 2, dtype=torch.int32), "gradExpandedXOut": torch.empty(0, 2), "gradScalesOut": torch.empty(0, 2)}),
]  # fmt: skip


@cases("name, changes", EMPTY)
def test_empty_tensors(subtests: pytest.Subtests, name: str, changes: dict[str, Any]) -> None:
    """Workspace 0 and zeros in what still has elements."""
    arguments = GOOD[name]() | changes
    run(name, *arguments.values())
    for output in outputs_of(name, arguments):
        with subtests.test(output):
            same(arguments[output], torch.zeros_like(arguments[output]))
