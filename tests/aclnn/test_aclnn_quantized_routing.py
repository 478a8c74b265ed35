"""MoeInitRoutingV3, MoeInitRoutingQuant and MoeInitRoutingQuantV2."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aclnn_calls import (
    FLOATS,
    GOOD,
    INVALID,
    NULL,
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
from aclnn_drawn import SEEDS, SIZES, generator_of, integers, normal, placed, rows_by_expert, seed_bit

# ---------------------------------------------------------------------------- worked numbers

X, IDS = [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]], [[1, 2, 0, 3], [0, 2, 1, 3], [0, 1, 3, 2]]


def v3(
    x: Tensor,
    ids: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    num_experts: int,
    active: int = 0,
    capacity: int = 0,
    drop: int = 0,
    kind: int = 1,
    flag: bool = True,
    quant: int = -1,
    held: tuple[int, int] | None = None,
    scatter: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MoeInitRoutingV3 into poisoned outputs: rows [M, H], indices, counts, scales."""
    slots = ids.numel()
    rows = num_experts * capacity if drop else min(active, slots) if active > 0 else slots
    shape = (num_experts, capacity) if drop else (rows,)
    expanded = poison(*shape, x.shape[1], dtype=x.dtype if quant < 0 else torch.int8)
    first, last = held or (0, num_experts)
    counts = poison(*((num_experts, 2) if kind == 2 else (last - first,)), dtype=torch.int64)
    indices, scales = empty_ids(slots), poison(rows)
    options = active, capacity, num_experts, drop, kind, flag, quant, held, scatter
    run("MoeInitRoutingV3", x, ids, scale, offset, *options, expanded, indices, counts, scales)
    return expanded.reshape(rows, x.shape[1]), indices, counts, scales


@pytest.mark.parametrize("active", (0, -1))
@on_every_backend
def test_v3_of_a_range_of_experts(active: int) -> None:
    """Rows of the experts 1 and 2 only; the scale of a token goes with its rows."""
    scale = f32([0.25, 0.5, 0.75])
    found = v3(f32(X), i32(IDS), scale, num_experts=4, held=(1, 3), active=active)
    rows, indices, counts, scales = found
    same(rows, [X[t] for t in (0, 1, 2, 0, 1, 2)] + [[0.0, 0.0]] * 6)
    same(indices, [0, 3, -1, -1, -1, 4, 1, -1, -1, 2, -1, 5])
    same(counts, [3, 3])
    same(scales, [0.25, 0.5, 0.75] * 2 + [0.0] * 6)


@on_every_backend
def test_v3_counts_cumulatively() -> None:
    same(v3(f32(X), i32(IDS), num_experts=4, held=(1, 3), kind=0)[2], [3, 6])


@on_every_backend
def test_v3_by_row_with_pairs_of_counts() -> None:
    scale = f32([0.25, 0.5, 0.75])
    found = v3(f32(X), i32(IDS), scale, num_experts=4, held=(1, 3), active=4, kind=2, scatter=1)
    rows, indices, counts, scales = found
    same(rows, [X[t] for t in (0, 1, 2, 0)])
    same(indices, [0, 6, 9, 1, 5, 11, 3, 7, 10, 2, 4, 8])  # behind the range the experts above it, then those below
    same(counts, [[1, 3], [2, 3], [0, 0], [0, 0]])
    same(scales, [0.25, 0.5, 0.75, 0.25])


@on_every_backend
def test_v3_pairs_leave_out_experts_without_slots() -> None:
    same(v3(f32(X), i32([[3], [0], [3]]), num_experts=4, kind=2)[2], [[0, 1], [3, 2], [0, 0], [0, 0]])


XD, IDS_D = [[0.5, 1.5, 2.5, -127.0], [0.0] * 4, [1.0, -2.0, 4.0, 3.0]], [[1, 0], [0, 2], [1, 2]]
SMALL = 4 / 127  # the scale of the third token


@pytest.mark.parametrize("smooth", (None, [[1.0] * 4]), ids=("without", "ones"))
@on_every_backend
def test_v3_dynamic(smooth: Any) -> None:
    scale = None if smooth is None else f32(smooth)
    rows, indices, counts, scales = v3(f32(XD), i32(IDS_D), scale, num_experts=3, quant=1)
    first, zero, third = [0, 2, 2, -127], [0] * 4, [32, -64, 127, 95]
    same(rows, [first, zero, first, third, zero, third])
    same(indices, [2, 0, 1, 4, 3, 5])
    same(counts, [2, 2, 2])
    same(scales, f32([1.0, 0.0, 1.0, SMALL, 0.0, SMALL]))


@on_every_backend
def test_v3_dynamic_with_a_factor_for_each_expert() -> None:
    smooth = f32([[1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 0.5], [1.0, 1.0, 0.5, 1.0]])
    rows, _, _, scales = v3(f32(XD), i32(IDS_D), smooth, num_experts=3, quant=1)
    same(rows, [[0, 2, 2, -127], [0] * 4, [2, 3, 5, -127], [64, -64, 127, 48], [0] * 4, [42, -85, 85, 127]])
    torch.testing.assert_close(scales, f32([1.0, 0.0, 0.5, 0.031496063, 0.0, 0.023622047]), rtol=1e-7, atol=0)


@on_every_backend
def test_v3_dynamic_with_a_capacity() -> None:
    rows, indices, counts, scales = v3(f32(XD), i32(IDS_D), num_experts=3, quant=1, drop=1, capacity=1)
    same(rows, [[0, 2, 2, -127], [0, 2, 2, -127], [0] * 4])
    same(indices, [1, 0, -1, 2, -1, -1])
    same(counts, [2, 2, 2])
    same(scales, [1.0, 1.0, 0.0])


STATIC = [[2, 4, 127, -128], [1, -1, 2, 4], [0, 1, 1, 1]]


@on_every_backend
def test_v3_static() -> None:
    x = f32([[0.5, 1.5, 100.0, -100.0], [0.25, -0.75, 1.0, 2.0], [0.0, 0.1, 0.2, 0.3]])
    rows, _, _, scales = v3(x, i32(IDS_D), f32([2.0]), f32([0.5]), num_experts=3, quant=0)
    same(rows, [STATIC[t] for t in (0, 1, 0, 2, 1, 2)])
    assert scales.isnan().all(), "quantMode 0 has no scales to give"


@on_every_backend
def test_v3_static_leaves_rows_without_a_token_zero() -> None:
    """Not the offset."""
    rows, _, _, _ = v3(ones(1, 2), i32([[1]]), f32([2.0]), f32([5.0]), num_experts=2, quant=0, drop=1, capacity=1)
    same(rows, [[0, 0], [7, 7]])


@on_every_backend
def test_v3_without_the_flag_writes_no_counts() -> None:
    assert (v3(f32(X), i32(IDS), num_experts=4, flag=False)[2] == -77).all()


@on_every_backend
def test_v3_without_scales_writes_none() -> None:
    assert v3(f32(X), i32(IDS), num_experts=4)[3].isnan().all()


@pytest.mark.parametrize("shape", ((6,), (6, 1)), ids=spoken)
@on_every_backend
def test_v3_scales_may_be_a_column(shape: tuple[int, ...]) -> None:
    arguments = GOOD["MoeInitRoutingV3"]() | {"expandedScaleOut": poison(*shape)}
    run("MoeInitRoutingV3", *arguments.values())
    same(arguments["expandedScaleOut"].reshape(-1), f32([1 / 127] * 4 + [0.0] * 2))


@on_every_backend
def test_v3_copies_int8_tokens() -> None:
    x = torch.tensor([[1, -128], [3, 127]], dtype=torch.int8)
    same(v3(x, i32([[1], [0]]), num_experts=2)[0], [[3, 127], [1, -128]])


COLUMNS, BY_COLUMN = [[0, 3], [1, 4], [2, 5]], [[1, 2], [0, 1], [0, 2]]


def test_v3_without_quantisation_into_int8() -> None:
    """The shipped example: float32 tokens and a result of int8, of which a device prints the rows' first bytes."""
    x = f32([[0.1, 0.1], [0.2, 0.2], [0.3, 0.3]])
    ids = i32([[1, 2, 0, 3], [0, 2, 1, 3], [0, 1, 3, 2]])
    rows, indices, scales = poison(12, 2, dtype=torch.int8), empty_ids(12), poison(12)
    counts = torch.zeros(4, dtype=torch.int64)
    scale, offset = f32([0.3423, 0.1652, 0.2652]), f32([1.8369, 0.0, 0.0])
    options = 12, 4, 256, 0, 1, True, -1, (0, 4), 1
    run("MoeInitRoutingV3", x, ids, scale, offset, *options, rows, indices, counts, scales)
    assert indices.tolist() == [2, 4, 8, 0, 6, 9, 1, 5, 11, 3, 7, 10]
    assert counts.tolist() == [3, 3, 3, 3]
    torch.testing.assert_close(rows.flatten(), x.flatten().view(torch.int8))  # expert 0 has the tokens 0, 1 and 2
    torch.testing.assert_close(scales, scale.repeat(4))


@on_every_backend
def test_quant_rounds_to_half() -> None:
    """In float32 4.952 would become 53."""
    x, expanded = f32([[4.952, 10.0], [0.37, -300.0], [1.001, 5.0]]), poison(6, 2, dtype=torch.int8)
    indices, experts = empty_ids(6), empty_ids(6)
    run("MoeInitRoutingQuant", x, i32(COLUMNS), i32(BY_COLUMN), 9, 10.3, 1.5, expanded, indices, experts)
    same(expanded, [[5, -128], [12, 53], [52, 104], [5, -128], [52, 104], [12, 53]])
    same(indices, [2, 0, 1, 4, 3, 5])
    same(experts, [0, 0, 1, 1, 2, 2])


@on_every_backend
def test_quant_v2_dynamic() -> None:
    rows, indices, counts, scales = poison(4, 4, dtype=torch.int8), empty_ids(6), empty_ids(3), poison(4)
    options = 4, 0, 3, 0, 1, True, 1
    run("MoeInitRoutingQuantV2", f32(XD), i32(IDS_D), None, None, *options, rows, indices, counts, None, scales)
    same(rows, [[0, 2, 2, -127], [0] * 4, [0, 2, 2, -127], [32, -64, 127, 95]])
    same(indices, [2, 0, 1, 4, 3, 5])
    same(counts, [2, 4, 6])
    same(scales, f32([1.0, 0.0, 1.0, SMALL]))


@on_every_backend
def test_quant_v2_static_with_a_capacity() -> None:
    x = f32([[0.1, 0.1], [0.2, 0.2], [0.3, 30.0]])
    rows, indices, before = poison(3, 1, 2, dtype=torch.int8), empty_ids(6), empty_ids(3)
    options = 0, 1, 3, 1, 1, True, 0
    scale, offset = f32([10.3]), f32([1.5])
    run("MoeInitRoutingQuantV2", x, i32(BY_COLUMN), scale, offset, *options, rows, indices, None, before, None)
    same(rows, [[[4, 4]], [[3, 3]], [[3, 3]]])
    same(indices, [1, 2, 0, -1, -1, -1])
    same(before, [2, 2, 2])


# ---------------------------------------------------------------------------- refusals

REFUSED: list[tuple[str, dict[str, Any], int]] = [
    *(
        ("MoeInitRoutingV3", changes, TILING)
        for changes in (
            {"dropPadMode": 2}, {"dropPadMode": -1}, {"activeNum": -2}, {"expertNum": 0}, {"activeExpertRangeOptional": [1]},
            {"activeExpertRangeOptional": [1, 2, 3]}, {"dropPadMode": 1, "expertCapacity": 2},
            {"dropPadMode": 1, "expertCapacity": 0, "activeExpertRangeOptional": None},
            {"dropPadMode": 1, "expertCapacity": 4, "activeExpertRangeOptional": [0, 3]},
            {"dropPadMode": 1, "expertCapacity": 2, "activeExpertRangeOptional": None, "rowIdxType": 1},
            {"dropPadMode": 1, "expertCapacity": 2, "activeExpertRangeOptional": None, "expertTokensNumType": 0},
            {"dropPadMode": 1, "expertCapacity": 2, "activeExpertRangeOptional": None, "expertTokensNumType": 2},
            {"expertTokensNumType": 3}, {"expertTokensNumType": -1, "expertTokensNumFlag": False},
            {"activeExpertRangeOptional": [-1, 2]}, {"activeExpertRangeOptional": [2, 2]}, {"activeExpertRangeOptional": [1, 4]},
            {"expertNum": 10_241, "activeExpertRangeOptional": None}, {"expertNum": 5_121, "activeExpertRangeOptional": None, "expertTokensNumType": 2},
            {"rowIdxType": 2}, {"rowIdxType": -1}, {"x": ones(6)},
            {"expertIdx": i32([1, 2, 0, 1, 0, 2])}, {"expertIdx": i32([[1, 2]])}, {"scaleOptional": ones(3, 2)}, {"scaleOptional": ones(2)},
            {"scaleOptional": ones(2, 3)}, {"expandedXOut": poison(5, 2, dtype=torch.int8)}, {"expandedRowIdxOut": empty_ids(5)},
            {"expertTokensCountOrCumsumOut": poison(3, dtype=torch.int64)}, {"expandedScaleOut": poison(5)}, {"expandedScaleOut": poison(1, 6)},
            {"quantMode": 0}, {"quantMode": 0, "scaleOptional": ones(1)}, {"quantMode": 0, "scaleOptional": ones(2), "offsetOptional": ones(1)},
            {"quantMode": 0, "scaleOptional": ones(1), "offsetOptional": ones(1, 1)},
            {"quantMode": -1, "expandedXOut": poison(6, 2), "scaleOptional": ones(2)},
        )
    ),
    *(("MoeInitRoutingV3", {"quantMode": mode}, TILING) for mode in (-2, *range(2, 18))),
    ("MoeInitRoutingV3", {"x": torch.ones(3, 2, dtype=torch.int8)}, INVALID),
    ("MoeInitRoutingV3", {"expandedXOut": poison(6, 2)}, INVALID),
    ("MoeInitRoutingV3", {"quantMode": -1, "expandedXOut": poison(6, 2, dtype=torch.float16)}, INVALID),
    ("MoeInitRoutingV3", {"expertIdx": torch.zeros(3, 2, dtype=torch.int64)}, INVALID),
    ("MoeInitRoutingV3", {"quantMode": 0, "scaleOptional": ones(1), "offsetOptional": ones(1).half()}, INVALID),
    ("MoeInitRoutingV3", {"expertTokensCountOrCumsumOut": None, "expertTokensNumFlag": False}, NULL),
    ("MoeInitRoutingV3", {"expandedScaleOut": None, "quantMode": -1, "expandedXOut": poison(6, 2)}, NULL),
    ("MoeInitRoutingQuant", {"x": ones(3, 2).to(torch.int8)}, INVALID),
    ("MoeInitRoutingQuant", {"expandedXOut": poison(4, 2)}, INVALID),
    ("MoeInitRoutingQuant", {"activeNum": -1}, TILING),
    ("MoeInitRoutingQuant", {"activeNum": 1}, TILING),
    *(
        ("MoeInitRoutingQuantV2", changes, TILING)
        for changes in (
            {"quantMode": -1}, {"quantMode": 2}, {"x": ones(6)}, {"expertIdx": i32([1, 2, 0, 1, 0, 2])}, {"expertIdx": i32([[1, 2]])},
            {"activeNum": -1}, {"expertCapacity": -1}, {"expertNum": -1}, {"expertNum": 0}, {"dropPadMode": 2},
            {"dropPadMode": 1, "expertCapacity": 0}, {"dropPadMode": 1, "expertNum": 0}, {"dropPadMode": 1, "expertCapacity": 4},
            {"dropPadMode": 1}, {"expertTokensCountOrCumsumFlag": 3}, {"expertTokensCountOrCumsumFlag": -1},
            {"expandedXOut": poison(5, 2, dtype=torch.int8)}, {"expandedRowIdxOut": empty_ids(5)}, {"scaleOptional": ones(2, 2)},
            {"scaleOptional": ones(2)}, {"scaleOptional": ones(3, 3)}, {"dynamicQuantScaleOutOptional": poison(6, 1)},
            {"quantMode": 0}, {"quantMode": 0, "scaleOptional": ones(1)}, {"quantMode": 0, "scaleOptional": ones(1, 1), "offsetOptional": ones(1)},
            {"dropPadMode": 1, "expandedXOut": poison(3, 2, 2, dtype=torch.int8), "expertTokensBeforeCapacityFlag": True},
        )
    ),
    ("MoeInitRoutingQuantV2", {"expandedXOut": poison(6, 2)}, INVALID),
    ("MoeInitRoutingQuantV2", {"expertIdx": torch.zeros(3, 2, dtype=torch.int64)}, INVALID),
]  # fmt: skip


@cases("name, changes, code", REFUSED)
def test_refused(name: str, changes: dict[str, Any], code: int) -> None:
    call_refused(name, changes, code)


# ---------------------------------------------------------------------------- drawn inputs


def nearest(values: Any) -> Any:
    return np.clip(np.rint(np.nan_to_num(values, nan=0.0)), -128, 127).astype(np.int8)


def dynamic(row: Tensor, factor: Any) -> tuple[Any, float]:
    """A row as int8 and its scale, in NumPy's float32."""
    y = row.float().numpy() * (np.float32(1) if factor is None else factor)
    scale = np.float32(np.abs(y).max() / np.float32(127))
    return nearest(y / scale) if scale else np.zeros(len(y), np.int8), float(scale)


@settings(max_examples=80)
@given(SIZES, SEEDS, st.sampled_from(FLOATS), st.integers(-1, 1), st.booleans())
def test_v3_of_any_routing(
    sizes: tuple[int, int, int, int], seed: int, dtype: torch.dtype, quant: int, drop: bool
) -> None:
    """Every mode of counts, indices and quantisation, with a range, a capacity or a limit of rows."""
    num_tokens, topk, num_experts, hidden = sizes
    generator, slots = generator_of(seed), num_tokens * topk
    ids = integers(generator, -2, num_experts + 2, num_tokens, topk)
    first, last = 0, num_experts
    if not drop:
        first, last = sorted(integers(generator, 0, num_experts + 1, 2).tolist())
        first, last = (first, last) if first < last else (0, num_experts)
    capacity, active = int(integers(generator, 1, num_tokens + 1)), int(integers(generator, -1, slots + 2))
    kind = 1 if drop else int(integers(generator, 0, 3))
    scatter = 0 if drop else int(seed_bit(generator))
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    scale = offset = None
    if quant == -1 and seed_bit(generator):
        scale = normal(generator, num_tokens)
    if quant == 0:
        scale, offset = normal(generator, 1) * 40, normal(generator, 1) * 10
    if quant == 1 and seed_bit(generator):
        scale = normal(generator, last - first if seed_bit(generator) else 1, hidden)
    found = v3(
        x, ids, scale, offset, num_experts=num_experts, active=active, capacity=capacity, drop=int(drop), kind=kind,
        quant=quant, held=(first, last), scatter=scatter,
    )  # fmt: skip
    rows, indices, counts, scales = found

    flat = [e if first <= e < last else -1 for e in ids.flatten().tolist()]
    row_of_slot = rows_by_expert(flat)
    if drop:
        seen = [flat[:slot].count(expert) for slot, expert in enumerate(flat)]
        row_of_slot = [e * capacity + q if e >= 0 and q < capacity else -1 for e, q in zip(flat, seen, strict=True)]
    if scatter:
        given_ids = ids.flatten().tolist()
        same(indices, sorted(range(slots), key=lambda slot: given_ids[slot] if given_ids[slot] >= first else 2**31))
    else:
        same(indices, row_of_slot)
    number = [flat.count(expert) for expert in range(first, last)]
    pairs = [[first + e, n] for e, n in enumerate(number) if n]
    same(counts, (np.cumsum(number), number, pairs + [[0, 0]] * (num_experts - len(pairs)))[kind])

    copies = x.repeat_interleave(topk, 0)
    if quant == -1:
        same(rows, placed(copies, row_of_slot, len(rows)))
        if scale is not None:
            same(scales, placed(scale.repeat_interleave(topk), row_of_slot, len(rows)))
        return
    values, factors = [], []
    for slot, expert in enumerate(flat):
        if quant == 0:
            assert scale is not None
            assert offset is not None
            values.append(nearest(copies[slot].float().numpy() * scale.numpy() + offset.numpy()))
            continue
        factor = None if scale is None else scale[max(expert - first, 0) if len(scale) > 1 else 0].numpy()
        value, found_scale = dynamic(copies[slot], factor)
        values.append(value)
        factors.append(found_scale)
    same(rows, placed(torch.from_numpy(np.stack(values)), row_of_slot, len(rows)))
    if quant == 1:
        same(scales, placed(f32(factors), row_of_slot, len(rows)))
    else:
        assert scales.isnan().all()


@settings(max_examples=60)
@given(SIZES, SEEDS, st.sampled_from(FLOATS), st.integers(0, 1), st.booleans())
def test_quant_v2_of_any_routing(
    sizes: tuple[int, int, int, int], seed: int, dtype: torch.dtype, quant: int, drop: bool
) -> None:
    num_tokens, topk, num_experts, hidden = sizes
    generator, slots = generator_of(seed), num_tokens * topk
    ids = integers(generator, 0, num_experts, num_tokens, topk)
    capacity, active = int(integers(generator, 1, num_tokens + 1)), int(integers(generator, 0, slots + 2))
    flag = int(integers(generator, 0, 3))
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    scale = offset = None
    if quant == 0:
        scale, offset = normal(generator, 1) * 40, normal(generator, 1) * 10
    elif seed_bit(generator):
        scale = normal(generator, num_experts if seed_bit(generator) else 1, hidden)
    count = num_experts * capacity if drop else min(active, slots) if active else slots
    rows = poison(*((num_experts, capacity) if drop else (count,)), hidden, dtype=torch.int8)
    indices, counts, before, scales = empty_ids(slots), empty_ids(num_experts), empty_ids(num_experts), poison(count)
    options = active, capacity, num_experts, int(drop), flag, True, quant
    run("MoeInitRoutingQuantV2", x, ids, scale, offset, *options, rows, indices, counts, before, scales)
    flat = ids.flatten().tolist()
    row_of_slot = rows_by_expert(flat)
    if drop:
        seen = [flat[:slot].count(expert) for slot, expert in enumerate(flat)]
        row_of_slot = [e * capacity + q if q < capacity else -1 for e, q in zip(flat, seen, strict=True)]
    same(indices, row_of_slot)
    number = [flat.count(expert) for expert in range(num_experts)]
    same(before, number if drop else [-77] * num_experts)
    same(counts, [-77] * num_experts if drop or not flag else np.cumsum(number) if flag == 1 else number)
    values, factors = [], []
    for slot, expert in enumerate(flat):
        row = x[slot // topk]
        if quant == 0:
            assert scale is not None
            assert offset is not None
            half = row.half().numpy() * scale.half().numpy() + offset.half().numpy()
            values.append(nearest(half.astype(np.float32)))
            continue
        factor = None if scale is None else scale[expert if len(scale) > 1 else 0].numpy()
        value, found_scale = dynamic(row, factor)
        values.append(value)
        factors.append(found_scale)
    same(rows.reshape(count, hidden), placed(torch.from_numpy(np.stack(values)), row_of_slot, count))
    if quant == 1:
        same(scales, placed(f32(factors), row_of_slot, count))
    else:
        assert scales.isnan().all()


@pytest.mark.parametrize("value, expected", ((torch.inf, 127), (-torch.inf, -128), (torch.nan, 0)), ids=str)
@on_every_backend
def test_static_rows_of_what_is_not_finite(value: float, expected: int) -> None:
    rows, _, _, _ = v3(f32([[value, 1.0]]), i32([[0]]), f32([2.0]), f32([0.5]), num_experts=1, quant=0)
    same(rows, [[expected, 2]])


# ---------------------------------------------------------------------------- empty tensors

NO_IDS, NO_BYTES = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2, dtype=torch.int8)
EMPTY: list[tuple[str, dict[str, Any]]] = [
    ("MoeInitRoutingV3", {"x": torch.empty(0, 2), "expertIdx": NO_IDS, "expandedXOut": NO_BYTES, "expandedRowIdxOut": empty_ids(0), "expandedScaleOut": torch.empty(0)}),
    ("MoeInitRoutingV3", {"expertIdx": torch.empty(3, 0, dtype=torch.int32), "expandedXOut": NO_BYTES, "expandedRowIdxOut": empty_ids(0), "expandedScaleOut": torch.empty(0)}),
    ("MoeInitRoutingQuant", {"x": torch.empty(0, 2), "rowIdx": NO_IDS, "expertIdx": NO_IDS, "expandedXOut": NO_BYTES, "expandedRowIdxOut": empty_ids(0), "expandedExpertIdxOut": empty_ids(0)}),
    ("MoeInitRoutingQuantV2", {"x": torch.empty(0, 2), "expertIdx": NO_IDS, "expandedXOut": NO_BYTES, "expandedRowIdxOut": empty_ids(0), "dynamicQuantScaleOutOptional": torch.empty(0)}),
]  # fmt: skip


@cases("name, changes", EMPTY)
@on_every_backend
def test_empty_tensors(subtests: pytest.Subtests, name: str, changes: dict[str, Any]) -> None:
    zeros_where_nothing_is_to_do(subtests, name, changes)


@on_every_backend
def test_v3_of_rows_without_columns() -> None:
    rows, indices, counts, scales = v3(torch.empty(2, 0), i32([[1], [0]]), num_experts=2, quant=1)
    assert rows.shape == (2, 0)
    same(indices, [1, 0])
    same(counts, [1, 1])
    same(scales, [0.0, 0.0])


@on_every_backend
def test_v3_dynamic_of_tokens_that_choose_nobody() -> None:
    """No slots, but rows for each expert, and a factor for each: zeros."""
    rows, _, counts, scales = v3(
        f32(XD), torch.zeros(3, 0, dtype=torch.int32), ones(2, 4), num_experts=2, quant=1, drop=1, capacity=1
    )
    same(rows, [[0] * 4] * 2)
    same(counts, [0, 0])
    same(scales, [0.0, 0.0])
