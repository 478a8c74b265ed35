"""MoeGatingTopK, its second version, its gradient, the two of MoeGatingTopKSoftmax, and MoeFusedTopk."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moeroute
from aclnn_calls import (
    FLOATS,
    GOOD,
    INVALID,
    NULL,
    TILING,
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
)
from aclnn_drawn import BF16, F16, F32, SEEDS, generator_of, integers, normal
from moeroute.testing import assert_same_bits

# ---------------------------------------------------------------------------- worked numbers


XNORM = [
    [0.5, 0.7, 0.3, 0.8, 0.2, 0.6, 0.9, 0.4],
    [0.6, 0.4, 0.8, 0.1, 0.7, 0.5, 0.3, 0.9],
    [0.2, 0.9, 0.5, 0.6, 0.8, 0.3, 0.7, 0.4],
    [0.8, 0.3, 0.6, 0.5, 0.4, 0.7, 0.2, 0.9],
]


@on_every_backend
def test_gating_backward_of_the_document() -> None:
    grad = f32([[1.0, 0.5], [0.8, 0.3], [0.6, 0.9], [0.4, 0.7]])
    ids = i32([[3, 6], [2, 7], [1, 4], [0, 7]])
    out = poison(4, 8)
    run("MoeGatingTopKBackward", f32(XNORM), grad, ids, 0, 1, 2.5, 1e-20, out, workspace=16 * 2**20)
    expected = torch.zeros(4, 8)
    for row, column, value in (
        (0, 3, 0.06228372), (0, 6, -0.03114188), (1, 2, 0.06228374), (1, 7, -0.03114187),
        (2, 1, -0.01868512), (2, 4, 0.03737024), (3, 0, -0.03737023), (3, 7, 0.01868513),
    ):  # fmt: skip
        expected[row, column] = value
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-9)


@on_every_backend
def test_gating_v2_of_the_document() -> None:
    x, bias = torch.rand(3, 256) * 10, torch.rand(256) * 10
    table = torch.tensor([[10, 42], [33, 127], [5, 88]])
    y, ids, scores = poison(3, 2), poison(3, 2, dtype=torch.int32), poison(3, 256)
    arguments = (x, bias, i32([0, 2, 1]), table, 2, 1, 1, 1, 0, 1, False, 1.0, 1e-20, y, ids, scores)
    run("MoeGatingTopKV2", *arguments)
    same(ids, [[10, 42], [5, 88], [33, 127]])
    chosen = x.double().sigmoid().gather(1, ids.long())
    close(y, chosen / chosen.sum(1, keepdim=True))
    assert scores.isnan().all(), "outFlag is false"


@pytest.mark.parametrize("ids_dtype", (torch.int32, torch.int64), ids=spoken)
@on_every_backend
def test_gating_v2_with_an_unknown_id_chooses_nothing(ids_dtype: torch.dtype) -> None:
    ids = torch.tensor([1, -1, 7], dtype=ids_dtype)
    table = torch.tensor([[1, 2], [3, 0]], dtype=ids_dtype)
    y, chosen, scores = poison(3, 2), poison(3, 2, dtype=torch.int32), poison(3, 4)
    x = torch.randn(3, 4)
    run("MoeGatingTopKV2", x, None, ids, table, 2, 1, 1, 0, 0, 0, True, 1.0, 1e-20, y, chosen, scores)
    same(chosen, [[3, 0], [-1, -1], [-1, -1]])
    same(y[1:], torch.zeros(2, 2))
    close(y[0], x.double().softmax(1)[0, [3, 0]])
    close(scores, x.double().softmax(1))


X_SOFTMAX = [[0.1, 1.1, 2.1, 3.1], [4.1, 5.1, 6.1, 7.1], [8.1, 9.1, 10.1, 11.1]]


@on_every_backend
def test_gating_softmax_of_the_document() -> None:
    y, ids, numbers = poison(3, 2), poison(3, 2, dtype=torch.int32), poison(3, 2, dtype=torch.int32)
    run("MoeGatingTopKSoftmax", f32(X_SOFTMAX), None, 2, y, ids, numbers)
    torch.testing.assert_close(y, f32([[0.643914, 0.236883]] * 3), rtol=0, atol=1e-6)
    same(ids, [[3, 2]] * 3)
    same(numbers, [[0, 3], [1, 4], [2, 5]])


@on_every_backend
def test_gating_softmax_of_finished_rows() -> None:
    y, ids, numbers = poison(3, 2), poison(3, 2, dtype=torch.int32), poison(3, 2, dtype=torch.int32)
    finished = torch.tensor([False, True, False])
    run("MoeGatingTopKSoftmax", f32(X_SOFTMAX), finished, 2, y, ids, numbers)
    same(ids, [[3, 2], [4, 4], [3, 2]])
    torch.testing.assert_close(y, f32([[0.643914, 0.236883]] * 3), rtol=0, atol=1e-6)


@on_every_backend
def test_gating_softmax_v2() -> None:
    x = f32([[0.0, -200.0, -150.0], [3.0, 3.0, 1.0]])
    y, ids, soft = poison(2, 2), poison(2, 2, dtype=torch.int32), poison(2, 3)
    run("MoeGatingTopKSoftmaxV2", x, None, 2, 1, True, y, ids, soft)
    same(ids, [[0, 2], [0, 1]])  # on the logits: the softmax of -150 and -200 is 0, and equal
    same(y[1], [0.5, 0.5])
    assert soft.isnan().all(), "renorm 1 has no softmax of all"
    run("MoeGatingTopKSoftmaxV2", x, None, 2, 0, True, y, ids, soft)
    close(soft, x.double().softmax(1))
    same(ids, [[0, 1], [0, 1]])
    run("MoeGatingTopKSoftmaxV2", x, None, 2, 0, False, y, ids, None)


FUSED_X, FUSED_ADD = [[0, 1, -1, 2, 0, 0], [-4, -3, -2, -1, -2, -2]], [0, 0, 0.5, 0, 0.25, 0.25]
NO_MAPPING = (None, None)


@on_every_backend
def test_fused_topk() -> None:
    """Two groups of three stay; of equal values the smaller id comes first."""
    y, ids = poison(2, 3), empty_ids(2, 3)
    run("MoeFusedTopk", f32(FUSED_X), f32(FUSED_ADD), *NO_MAPPING, 3, 2, 2, 3, 0, False, 7.0, False, y, ids)
    same(ids, [[3, 2, 4], [2, 4, 5]])
    torch.testing.assert_close(y, f32([[0.8807971, 0.26894143, 0.5], [0.11920292] * 3]), rtol=1e-6, atol=0)


@on_every_backend
def test_fused_topk_normalised_and_mapped() -> None:
    y, ids = poison(2, 3), empty_ids(2, 3)
    numbers = i32([1, 2, 2, 0, 1, 3])
    table = i32([[10, 0, 0], [11, 21, 0], [12, 22, 0], [13, 0, 0], [14, 0, 0], [15, 25, 35]])
    run("MoeFusedTopk", f32(FUSED_X), f32(FUSED_ADD), numbers, table, 3, 2, 2, 3, 0, True, 2.5, True, y, ids)
    same(ids, [[13, 12, 14], [22, 14, 25]])
    expected = f32([[1.3347526, 0.40755159, 0.75769579], [0.83333325] * 3])
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)


@on_every_backend
def test_fused_topk_where_losing_groups_count_as_zero() -> None:
    """All values are negative, so the zeros of the groups that are out win."""
    y, ids = poison(2, 3), empty_ids(2, 3)
    run("MoeFusedTopk", f32(FUSED_X), f32(FUSED_ADD) - 2, *NO_MAPPING, 3, 1, 1, 3, 0, False, 0.0, False, y, ids)
    same(ids, [[0, 1, 4], [0, 1, 4]])
    expected = f32([[0.5, 0.7310586, 0.5], [0.01798621, 0.04742587, 0.11920292]])
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)


@on_every_backend
def test_fused_topk_with_a_mapping_of_what_is_not_there() -> None:
    """Column 0 for a count of 0, -1 for a count that the table has no columns for."""
    y, ids = poison(1, 4), empty_ids(1, 4)
    x, numbers = f32([[4.0, 3.0, 2.0, 1.0]]), i32([0, 3, -1, 2])
    table = i32([[10, 20], [11, 21], [12, 22], [13, 23]])
    run("MoeFusedTopk", x, torch.zeros(4), numbers, table, 1, 1, 1, 4, 0, False, 1.0, True, y, ids)
    same(ids, [[10, -1, -1, 13]])


@on_every_backend
def test_fused_topk_puts_nan_first() -> None:
    y, ids = poison(1, 3), empty_ids(1, 3)
    x, add = f32([[math.nan, 5.0, 0.0, 0.0]]), f32([0.0, 0.0, -math.nan, 0.0])
    run("MoeFusedTopk", x, add, *NO_MAPPING, 2, 2, 1, 3, 0, False, 1.0, False, y, ids)
    same(ids, [[0, 2, 1]])
    assert y[0, 0].isnan()
    close(y[0, 1:], f32([0.0, 5.0]).double().sigmoid())


# ---------------------------------------------------------------------------- refusals


REFUSED: list[tuple[str, dict[str, Any], int]] = [
    ("MoeGatingTopKBackward", {"xNorm": torch.empty(0, 4)}, INVALID),
    ("MoeGatingTopKBackward", {"xNorm": ones(12)}, INVALID),
    ("MoeGatingTopKBackward", {"xNorm": ones(3, 1)}, INVALID),
    ("MoeGatingTopKBackward", {"xNorm": ones(3, 2049)}, INVALID),
    ("MoeGatingTopKBackward", {"xNorm": ones(3, 4).half()}, INVALID),
    ("MoeGatingTopKBackward", {"gradY": ones(6)}, INVALID),
    ("MoeGatingTopKBackward", {"gradY": ones(2, 2)}, INVALID),
    ("MoeGatingTopKBackward", {"gradY": torch.empty(3, 0)}, INVALID),
    ("MoeGatingTopKBackward", {"gradY": ones(3, 5)}, INVALID),
    ("MoeGatingTopKBackward", {"expertIdx": i32([[0], [1], [2]])}, INVALID),
    ("MoeGatingTopKBackward", {"expertIdx": i32([0, 1, 2, 3, 0, 1])}, INVALID),
    ("MoeGatingTopKBackward", {"expertIdx": i32([[0, 1]])}, INVALID),
    ("MoeGatingTopKBackward", {"out": poison(3, 4, dtype=torch.float16)}, INVALID),
    ("MoeGatingTopKBackward", {"out": poison(3, 3)}, INVALID),
    ("MoeGatingTopKBackward", {"normType": 0}, TILING),
    ("MoeGatingTopKBackward", {"normType": 2}, TILING),
    ("MoeGatingTopKBackward", {"routedScalingFactor": math.nan}, INVALID),
    ("MoeGatingTopKBackward", {"eps": 1e300}, INVALID),
    *(
        (name, {"x": x}, TILING)
        for name in ("MoeGatingTopK", "MoeGatingTopKV2")
        for x in (ones(12), torch.empty(0, 4), torch.empty(3, 0), ones(3, 2049), ones(3, 4, 1))
    ),
    ("MoeGatingTopK", {"biasOptional": ones(3)}, TILING),
    ("MoeGatingTopK", {"biasOptional": ones(4).half()}, INVALID),
    ("MoeGatingTopK", {"outOut": poison(3, 4).half()}, INVALID),
    *(("MoeGatingTopK", {"k": k}, TILING) for k in (0, -1, 3)),
    *(("MoeGatingTopK", {"kGroup": kGroup}, TILING) for kGroup in (0, 3)),
    *(("MoeGatingTopK", {"groupCount": groups}, TILING) for groups in (0, -2, 3)),
    *(("MoeGatingTopK", {"groupSelectMode": mode}, TILING) for mode in (-1, 2)),
    ("MoeGatingTopK", {"groupSelectMode": 1, "groupCount": 4, "kGroup": 2}, TILING),
    ("MoeGatingTopK", {"renorm": 2}, TILING),
    ("MoeGatingTopK", {"normType": 3}, TILING),
    ("MoeGatingTopK", {"normType": -1}, TILING),
    ("MoeGatingTopK", {"eps": math.inf}, TILING),
    ("MoeGatingTopK", {"x": ones(3, 1040), "biasOptional": None, "groupCount": 65, "kGroup": 2, "outOut": poison(3, 1040)}, TILING),
    ("MoeGatingTopKV2", {"inputIdsOptional": i32([0, 1])}, TILING),
    ("MoeGatingTopKV2", {"tid2eidOptional": i32([0, 1])}, TILING),
    ("MoeGatingTopKV2", {"tid2eidOptional": i32([[0, 1, 2]])}, TILING),
    ("MoeGatingTopKV2", {"tid2eidOptional": torch.empty(0, 2, dtype=torch.int32)}, TILING),
    ("MoeGatingTopKV2", {"kGroup": 1}, TILING),
    ("MoeGatingTopKV2", {"x": ones(3, 128), "biasOptional": None, "k": 65, "tid2eidOptional": torch.zeros(2, 65, dtype=torch.int32), "yOut": poison(3, 65), "expertIdxOut": empty_ids(3, 65), "outOut": poison(3, 128)}, TILING),
    *(
        (name, changes, TILING)
        for name in ("MoeGatingTopKSoftmax", "MoeGatingTopKSoftmaxV2")
        for changes in (
            {"x": ones(12)}, {"x": ones(3, 1, 1, 4)}, {"x": torch.empty(0, 4)}, {"k": 0}, {"k": -1}, {"k": 5},
            {"x": ones(1, 2000), "finishedOptional": None, "k": 1025}, {"finishedOptional": torch.zeros(2, dtype=torch.bool)},
            {"finishedOptional": torch.zeros(3, 1, dtype=torch.bool)},
        )
    ),
    *(
        ("MoeFusedTopk", changes, INVALID)
        for changes in (
            {"groupNum": 0}, {"groupNum": 257}, {"groupNum": 3}, {"groupNum": -1}, {"groupNum": 2**32}, {"groupTopk": 0}, {"groupTopk": 3},
            {"topN": 0}, {"topN": 3}, {"topK": 0}, {"topK": 5}, {"activateType": 1}, {"x": ones(12)}, {"addNum": ones(4, 1)},
            {"addNum": ones(3)}, {"y": poison(6)}, {"y": poison(3, 3), "indices": empty_ids(3, 3)}, {"indices": empty_ids(2, 2)},
            {"mappingNum": i32([1, 2])}, {"mappingNum": i32([[1, 2, 2, 1]])}, {"mappingTable": i32([0, 1, 2, 3])},
            {"mappingTable": empty_ids(4, 0)}, {"mappingTable": empty_ids(4, 129)}, {"mappingTable": empty_ids(3, 2)},
            {"scale": math.nan}, {"scale": 1e39}, {"addNum": ones(4).half()}, {"y": poison(3, 2).half()},
            {"x": ones(3, 1026), "addNum": ones(1026)},
        )
    ),
    ("MoeGatingTopKSoftmaxV2", {"renorm": 2}, TILING),
    ("MoeGatingTopKSoftmaxV2", {"renorm": -1}, TILING),
]  # fmt: skip


@cases("name, changes, code", REFUSED)
def test_refused(name: str, changes: dict[str, Any], code: int) -> None:
    call_refused(name, changes, code)


ORDER: list[tuple[str, dict[str, Any], int, str]] = [
    # 2: nulls, dtypes, xNorm, gradY, expertIdx, out, normType
    ("MoeGatingTopKBackward", {"xNorm": ones(3, 4).half(), "out": None}, NULL, "out"),
    ("MoeGatingTopKBackward", {"xNorm": ones(3), "expertIdx": torch.zeros(3, 2)}, INVALID, "expertIdx"),
    ("MoeGatingTopKBackward", {"xNorm": ones(3, 1), "gradY": ones(6)}, INVALID, "xNorm"),
    ("MoeGatingTopKBackward", {"gradY": ones(6), "normType": 0}, INVALID, "gradY"),
    # 10: nulls, dtypes, then the rest
    ("MoeGatingTopK", {"k": 0, "x": ones(3, 4).double()}, INVALID, "x must"),
    ("MoeGatingTopK", {"x": ones(3, 4).double(), "outOut": None}, NULL, "outOut"),
]  # fmt: skip


@cases("name, changes, code, what", ORDER)
def test_order_of_checks(name: str, changes: dict[str, Any], code: int, what: str) -> None:
    assert what in call_refused(name, changes, code)


# ---------------------------------------------------------------------------- drawn inputs


@settings(max_examples=40)
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(2, 70),
    SEEDS,
    st.sampled_from(FLOATS),
    st.sampled_from((1.0, 2.5, 0.1)),
)
def test_gating_backward(
    num_tokens: int, topk: int, num_experts: int, seed: int, dtype: torch.dtype, scale: float
) -> None:
    """Repeated experts add up; an expert out of range is no expert."""
    topk, generator = min(topk, num_experts), generator_of(seed)
    x = torch.rand(num_tokens, num_experts, generator=generator) * 0.98 + 0.01
    grad = normal(generator, num_tokens, topk, dtype=dtype)
    ids = integers(generator, -1, num_experts + 1, num_tokens, topk)
    out = poison(num_tokens, num_experts, dtype=dtype)
    run("MoeGatingTopKBackward", x, grad, ids, 1, 1, scale, 1e-3, out, workspace=16 * 2**20)
    expected = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    for i in range(num_tokens):
        own = [(p, int(e)) for p, e in enumerate(ids[i]) if 0 <= e < num_experts]
        total = sum(float(x[i, e]) for _, e in own) + 1e-3
        inner = sum(float(x[i, e]) / total * scale * float(grad[i, p]) for p, e in own)
        for p, e in own:
            expected[i, e] += (scale * float(grad[i, p]) - inner) / total
        expected[i] *= x[i].double() * (1 - x[i].double())
    close(out, expected)


@settings(max_examples=60)
@given(
    st.integers(1, 4), st.sampled_from((1, 2, 3, 4)), st.integers(1, 9), SEEDS, st.sampled_from(FLOATS),
    st.integers(0, 2), st.integers(0, 1), st.integers(0, 1), st.booleans(),
)  # fmt: skip
def test_gating_topk(
    num_tokens: int,
    groups: int,
    members: int,
    seed: int,
    dtype: torch.dtype,
    norm: int,
    renorm: int,
    mode: int,
    biased: bool,
) -> None:
    generator = generator_of(seed)
    members += members <= mode
    num_experts = groups * members
    kept = int(integers(generator, 1, groups + 1))
    k = int(integers(generator, 1, members * kept + 1))
    x = (normal(generator, num_tokens, num_experts) * 2).to(dtype)
    bias = normal(generator, num_experts, dtype=dtype) if biased else None
    y, ids, scores = poison(num_tokens, k, dtype=dtype), empty_ids(num_tokens, k), poison(num_tokens, num_experts)
    run("MoeGatingTopK", x, bias, k, kept, groups, mode, renorm, norm, True, 1.5, 1e-20, y, ids, scores)
    wide = x.double()
    s = (wide.softmax(1), wide.sigmoid(), torch.nn.functional.softplus(wide).sqrt())[norm]
    close(scores, s)
    v = s if bias is None else s + bias.double()
    grouped = v.reshape(num_tokens, groups, members)
    best = grouped.topk(mode + 1, 2).values.sum(2)
    limit = best.topk(kept, 1).values[:, -1:]
    candidates = torch.where((best >= limit)[..., None], grouped, -torch.inf).flatten(1)
    # Equal or nearly equal values may be chosen either way: the values are compared, not the ids.
    chosen = candidates.gather(1, ids.long())
    torch.testing.assert_close(chosen, candidates.topk(k, 1).values, rtol=0, atol=1e-6)
    assert all(len(set(row.tolist())) == k for row in ids)
    weights = s.gather(1, ids.long())
    if norm or renorm:
        weights = weights / weights.sum(1, keepdim=True)
    close(y, weights * 1.5)


@on_every_backend
def test_gating_topk_takes_the_smaller_expert_of_equal_ones() -> None:
    x = torch.zeros(2, 8)
    y, ids, scores = poison(2, 3), empty_ids(2, 3), poison(2, 8)
    run("MoeGatingTopK", x, None, 3, 2, 4, 0, 0, 1, False, 1.0, 1e-20, y, ids, scores)
    same(ids, [[0, 1, 2]] * 2)


@settings(max_examples=60)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), SEEDS, st.sampled_from(FLOATS), st.booleans(), st.booleans()
)  # fmt: skip
def test_fused_topk_of_any_groups(
    num_tokens: int, groups: int, members: int, seed: int, dtype: torch.dtype, norm: bool, mapped: bool
) -> None:
    """Values on a coarse grid, so that float32 sums are exact and ties are common."""
    generator = generator_of(seed)
    num_experts = groups * members
    kept, best = int(integers(generator, 1, groups + 1)), int(integers(generator, 1, members + 1))
    k = int(integers(generator, 1, num_experts + 1))
    x = integers(generator, -1, 2, num_tokens, num_experts).to(dtype) * 1000  # sigmoids of 0, 0.5 and 1
    add = (integers(generator, -4, 3, num_experts) / 4).to(dtype)
    numbers = integers(generator, 0, 4, num_experts)
    table = integers(generator, 0, 99, num_experts, 3)
    y, ids = poison(num_tokens, k), empty_ids(num_tokens, k)
    mapping = (numbers, table) if mapped else NO_MAPPING
    run("MoeFusedTopk", x, add, *mapping, groups, kept, best, k, 0, norm, 1.5, mapped, y, ids)
    scores = x.double().sigmoid()
    for t in range(num_tokens):
        value = [float(v) for v in scores[t] + add.double()]
        worth = [sum(sorted(value[g * members : (g + 1) * members])[-best:]) for g in range(groups)]
        stay = sorted(range(groups), key=lambda g: -worth[g])[:kept]
        value = [v if e // members in stay else 0.0 for e, v in enumerate(value)]
        chosen = sorted(range(num_experts), key=lambda e: -value[e])[:k]
        expected = [float(scores[t, e]) for e in chosen]
        if mapped:
            chosen = [int(table[e, t % int(numbers[e]) if numbers[e] else 0]) for e in chosen]
        same(ids[t], chosen)
        if norm and sum(expected) == 0:
            assert y[t].isnan().all()
        else:
            close(y[t], [w / sum(expected) * 1.5 for w in expected] if norm else expected)


@settings(max_examples=30)
@given(st.sampled_from(((3,), (2, 3), (1, 1))), st.integers(1, 9), SEEDS, st.sampled_from(FLOATS), st.integers(0, 1))
def test_gating_softmax(outer: tuple[int, ...], num_experts: int, seed: int, dtype: torch.dtype, renorm: int) -> None:
    generator = generator_of(seed)
    k = int(integers(generator, 1, num_experts + 1))
    x = normal(generator, *outer, num_experts, dtype=dtype)
    finished = torch.rand(outer, generator=generator) < 0.5
    y, ids, numbers = poison(*outer, k, dtype=dtype), empty_ids(*outer, k), empty_ids(*outer, k)
    run("MoeGatingTopKSoftmax", x, finished, k, y, ids, numbers)
    count = math.prod(outer)
    same(numbers.reshape(count, k), [[j * count + n for j in range(k)] for n in range(count)])
    soft = x.double().softmax(-1)
    close(y, soft.topk(k, -1).values)
    assert (ids[finished] == num_experts).all()
    close(y[~finished], soft[~finished].gather(-1, ids[~finished].long()))
    y2, ids2, all_soft = poison(*outer, k, dtype=dtype), empty_ids(*outer, k), poison(*outer, num_experts)
    run("MoeGatingTopKSoftmaxV2", x, finished, k, renorm, True, y2, ids2, all_soft)
    if renorm:
        close(y2, x.double().topk(k, -1).values.softmax(-1))
        assert all_soft.isnan().all()
    else:
        same(y2, y)
        same(ids2, ids)
        close(all_soft, soft)


# ---------------------------------------------------------------------------- empty tensors


@pytest.mark.parametrize("shape", ((0, 4), (3, 0)))
def test_fused_topk_of_nothing_writes_nothing(shape: tuple[int, int]) -> None:
    """Whatever else is wrong."""
    arguments = GOOD["MoeFusedTopk"]() | {"x": torch.empty(shape), "groupNum": 0, "activateType": 3}
    run("MoeFusedTopk", *arguments.values())
    assert arguments["y"].isnan().all()
    assert (arguments["indices"] == -77).all()


def test_fused_topk_without_mapping_does_not_look_at_it() -> None:
    arguments = GOOD["MoeFusedTopk"]() | {"enableExpertMapping": False}
    arguments |= {"mappingNum": ones(1), "mappingTable": ones(1)}
    run("MoeFusedTopk", *arguments.values())
    same(arguments["indices"], [[0, 1]] * 3)


# ---------------------------------------------------------------------------- the core's bits


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 9), SEEDS, st.sampled_from(FLOATS))
def test_the_bits_are_those_of_the_core(
    num_tokens: int, topk: int, num_experts: int, seed: int, dtype: torch.dtype
) -> None:
    """The same call through the core's reference backend, with no `out=`."""
    generator = generator_of(seed)
    with_reference: dict[str, Any] = {"backend": "reference"}
    x = normal(generator, num_tokens, num_experts, dtype=dtype)
    grad = normal(generator, num_tokens, topk, dtype=dtype)
    gating = moeroute.gating_topk(x, topk, score="sigmoid", scaling_factor=2.5, weights_dtype=dtype, **with_reference)
    weights, chosen = poison(num_tokens, topk, dtype=dtype), empty_ids(num_tokens, topk)
    scores = poison(num_tokens, num_experts)
    run("MoeGatingTopK", x, None, topk, 1, 1, 0, 0, 1, True, 2.5, 1e-20, weights, chosen, scores)
    assert_same_bits((weights, chosen, scores), tuple(gating))
    logits_grad = poison(num_tokens, num_experts, dtype=dtype)
    run("MoeGatingTopKBackward", scores, grad, chosen, 0, 1, 2.5, 1e-20, logits_grad, workspace=16 * 2**20)
    expected = moeroute.gating_topk_backward(
        gating.scores, grad, gating.expert_ids, score="sigmoid", renormalize=True, scaling_factor=2.5, **with_reference
    )
    assert_same_bits(logits_grad, expected)


# ---------------------------------------------------------------------------- shapes of upstream's system tests


@pytest.mark.parametrize("num_tokens, num_experts, topk, dtype, scale", (
    (2048, 192, 10, BF16, 1.0), (4096, 192, 10, BF16, 1.0), (2048, 256, 8, BF16, 1.0), (4096, 256, 8, BF16, 1.0),
    (4096, 384, 8, BF16, 1.0), (2048, 384, 8, F32, 1.0), (8192, 192, 10, BF16, 1.0), (8192, 192, 10, F32, 1.0),
    (2048, 193, 10, F16, 1.0), (1023, 191, 9, F16, 0.1), (8193, 383, 9, BF16, 2.5), (1023, 2000, 9, F32, 0.1),
    (8193, 191, 9, F16, 2.5), (1023, 383, 9, BF16, 2.5), (8193, 191, 9, F32, 0.1), (512_000, 2, 1, BF16, 1.0),
    (1, 2048, 2048, BF16, 1.0),
), ids=spoken)  # fmt: skip
def test_system_shapes_of_gating_backward(
    num_tokens: int, num_experts: int, topk: int, dtype: torch.dtype, scale: float
) -> None:
    """Forward with outFlag, then backward, against float64 autograd over the same choice."""
    generator = generator_of(num_experts)
    x, bias = normal(generator, num_tokens, num_experts, dtype=dtype), normal(generator, num_experts, dtype=dtype)
    y, ids = poison(num_tokens, topk, dtype=dtype), empty_ids(num_tokens, topk)
    scores, out = poison(num_tokens, num_experts), poison(num_tokens, num_experts, dtype=dtype)
    run("MoeGatingTopK", x, bias, topk, 1, 1, 0, 0, 1, True, scale, 1e-20, y, ids, scores)
    grad = normal(generator, num_tokens, topk, dtype=dtype)
    run("MoeGatingTopKBackward", scores, grad, ids, 0, 1, scale, 1e-20, out, workspace=16 * 2**20)
    exact = x.double().requires_grad_()
    chosen = exact.sigmoid().gather(1, ids.long())
    weights = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale
    (expected,) = torch.autograd.grad(weights, exact, grad.double())
    close(y, weights.detach())
    close(out, expected)
