"""MoeTokenPermute, MoeTokenUnpermute, their gradients and their With-Ep twins."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moeroute
from aclnn_calls import (
    FLOATS,
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
    prepare,
    run,
    same,
    spoken,
    zeros_where_nothing_is_to_do,
)
from aclnn_drawn import (
    BF16,
    MIXTURES,
    SEEDS,
    SIZES,
    gathered,
    generator_of,
    integers,
    normal,
    placed,
    rows_by_expert,
    skip_large,
    within,
)
from moeroute.testing import assert_same_bits

# ---------------------------------------------------------------------------- worked numbers


@on_every_backend
def test_token_permute_grad_of_the_document() -> None:
    out = poison(1, 2, dtype=torch.bfloat16)
    grad = f32([[1, 2], [3, 4]]).bfloat16()
    run("MoeTokenPermuteGrad", grad, i32([0, 1]), 2, False, out)
    same(out, [[4.0, 6.0]])


@on_every_backend
def test_token_permute_of_the_document() -> None:
    rows, indices = poison(6, 4), poison(6, dtype=torch.int32)
    run("MoeTokenPermute", f32(X34), i32([[1, 2], [0, 1], [0, 2]]), 0, False, rows, indices)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(rows, [X34[t] for t in (1, 2, 0, 1, 0, 2)])


@pytest.mark.parametrize("ids_dtype", (torch.int32, torch.int64), ids=spoken)
@on_every_backend
def test_token_permute_of_int8_tokens(ids_dtype: torch.dtype) -> None:
    tokens = torch.tensor([[1, -2], [3, 4], [5, -128]], dtype=torch.int8)
    rows, indices = poison(4, 2, dtype=torch.int8), poison(6, dtype=torch.int32)
    run("MoeTokenPermute", tokens, torch.tensor([[1, 2], [0, 1], [0, 2]], dtype=ids_dtype), 4, False, rows, indices)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(rows, [[3, 4], [5, -128], [1, -2], [3, 4]])


@pytest.mark.parametrize("slots, num_out, code", ((10_240, 10_240, 0), (10_241, 0, TILING), (4, 10_241, TILING)))
def test_int8_tokens_have_a_limit_of_their_own(slots: int, num_out: int, code: int) -> None:
    tokens, rows = torch.ones(slots, 1, dtype=torch.int8), torch.empty(slots, 1, dtype=torch.int8)
    ids = torch.arange(slots)
    assert prepare("MoeTokenPermute", tokens, ids, num_out, False, rows, empty_ids(slots))[0] == code
    run("MoeTokenPermute", tokens.half(), ids, num_out, False, rows.half(), empty_ids(slots))


@pytest.mark.parametrize("num_out, kept", ((0, 6), (4, 4), (6, 6), (9, 6), (-2, 4), (-6, 0), (-9, 0)))
@on_every_backend
def test_token_permute_keeps_the_first_rows_and_all_indices(num_out: int, kept: int) -> None:
    rows, indices = poison(kept, 4), poison(6, dtype=torch.int32)
    run("MoeTokenPermute", f32(X34), torch.tensor([[1, 2], [0, 1], [0, 2]]), num_out, False, rows, indices)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(rows, f32([X34[t] for t in (1, 2, 0, 1, 0, 2)[:kept]]).reshape(kept, 4))


@on_every_backend
def test_token_unpermute_of_the_document() -> None:
    out = poison(1, 2, dtype=torch.bfloat16)
    rows = f32([[1, 2], [3, 4]]).bfloat16()
    run("MoeTokenUnpermute", rows, i32([0, 1]), torch.ones(1, 2, dtype=torch.bfloat16), False, None, out)
    same(out, [[4.0, 6.0]])


@on_every_backend
def test_token_unpermute_without_probs_has_one_row_a_token() -> None:
    out = poison(2, 2, dtype=torch.bfloat16)
    run("MoeTokenUnpermute", f32([[1, 2], [3, 4]]).bfloat16(), i32([1, 0]), None, False, None, out)
    same(out, [[3.0, 4.0], [1.0, 2.0]])


@on_every_backend
def test_token_unpermute_grad_of_the_document() -> None:
    rows_out, probs_out = poison(3, 2), poison(1, 3)
    ones = torch.ones(3, 2), torch.ones(1, 2), i32([0, 1, 2]), torch.ones(1, 3)
    run("MoeTokenUnpermuteGrad", *ones, False, None, rows_out, probs_out)
    same(rows_out, torch.ones(3, 2))
    same(probs_out, [[2.0, 2.0, 2.0]])


EP_ROWS = [[2.0, 2.0], [1.0, 1.0], [3.0, 3.0], [2.0, 2.0]]


EP_INDICES = [2, 0, 4, 1, 5, 3]


@on_every_backend
def test_permute_with_ep_of_the_document() -> None:
    x = f32(X34).bfloat16()
    ids = i32([[1, 2], [3, 1], [2, 3]])
    probs = f32([[0.5, 0.3], [0.4, 0.2], [0.5, 0.4]]).bfloat16()
    rows, indices = poison(4, 4, dtype=torch.bfloat16), poison(6, dtype=torch.int32)
    row_probs = poison(4, dtype=torch.bfloat16)
    run("MoeTokenPermuteWithEp", x, ids, probs, [1, 5], 6, False, rows, indices, row_probs)
    same(indices, [0, 2, 4, 1, 3, 5])
    same(rows, x[[1, 0, 2, 1]])
    same(row_probs, probs.flatten()[[3, 1, 4, 2]])


@on_every_backend
def test_unpermute_with_ep_of_the_document() -> None:
    out = poison(3, 2)
    run("MoeTokenUnpermuteWithEp", f32(EP_ROWS), i32(EP_INDICES), torch.ones(3, 2), 2, [1, 5], False, None, out)
    same(out, [[1.0, 1.0], [4.0, 4.0], [3.0, 3.0]])


@pytest.mark.parametrize("shape", ((3, 2), (6,)), ids=("T_K", "flat"))
@on_every_backend
def test_permute_with_ep_grad_of_the_document(shape: tuple[int, ...]) -> None:
    """The gradient of the probs comes as [T, K] or as [T * K], here with every second element of a buffer."""
    tokens, grads = poison(3, 2), poison(*shape[:-1], 2 * shape[-1])[..., ::2]
    probs_grad = f32([0.2, 0.5, 0.4, 0.4])
    arguments = f32(EP_ROWS), i32(EP_INDICES), probs_grad, 2, [1, 5], False, tokens, grads
    run("MoeTokenPermuteWithEpGrad", *arguments)
    same(tokens, [[1.0, 1.0], [4.0, 4.0], [3.0, 3.0]])
    same(grads.reshape(3, 2), [[0.5, 0.0], [0.4, 0.2], [0.0, 0.4]])


@pytest.mark.parametrize("no_range", (None, (-1, -1)))
@on_every_backend
def test_unpermute_with_ep_grad_of_the_document(no_range: tuple[int, int] | None) -> None:
    rows_out, probs_out = poison(3, 2), poison(1, 3)
    ones = torch.ones(1, 2), i32([0, 1, 2]), torch.ones(3, 2), torch.ones(1, 3)
    run("MoeTokenUnpermuteWithEpGrad", *ones, False, None, no_range, 3, rows_out, probs_out)
    same(rows_out, torch.ones(3, 2))
    same(probs_out, [[2.0, 2.0, 2.0]])


@on_every_backend
def test_with_ep_without_a_range_is_the_plain_operator() -> None:
    rows, indices, untouched = poison(6, 4), poison(6, dtype=torch.int32), poison(6)
    ids = i32([[1, 2], [0, 1], [0, 2]])
    run("MoeTokenPermuteWithEp", f32(X34), ids, torch.ones(3, 2), None, 0, False, rows, indices, untouched)
    same(indices, [2, 4, 0, 3, 1, 5])
    assert untouched.isnan().all()
    tokens, untouched = poison(3, 4), poison(3, 2)
    run("MoeTokenPermuteWithEpGrad", rows, indices, torch.ones(6), 2, None, False, tokens, untouched)
    close(tokens, f32(X34).double() * 2)
    assert untouched.isnan().all()


@on_every_backend
def test_with_ep_unpermute_grad_in_a_range() -> None:
    grad = f32([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    probs = f32([[0.5, 0.25], [2.0, 4.0], [8.0, 1.0]])
    rows_out, probs_out = poison(4, 2), poison(3, 2)
    arguments = grad, i32(EP_INDICES), f32(EP_ROWS), probs, False, None, [1, 5], 2, rows_out, probs_out
    run("MoeTokenUnpermuteWithEpGrad", *arguments)
    same(rows_out, [[12.0, 16.0], [0.5, 1.0], [5.0, 6.0], [6.0, 8.0]])
    same(probs_out, [[3.0, 0.0], [14.0, 14.0], [0.0, 33.0]])


# ---------------------------------------------------------------------------- refusals


REFUSED: list[tuple[str, dict[str, Any], int]] = [
    ("MoeTokenPermuteGrad", {"paddedMode": True}, INVALID),
    ("MoeTokenPermuteGrad", {"permutedOutputGrad": torch.tensor(1.0)}, INVALID),
    ("MoeTokenPermuteGrad", {"permutedOutputGrad": ones(6)}, INVALID),
    ("MoeTokenPermuteGrad", {"sortedIndices": i32([[0, 1, 2, 3, 4, 5]])}, INVALID),
    ("MoeTokenPermuteGrad", {"numTopk": 0}, INVALID),
    ("MoeTokenPermuteGrad", {"numTopk": -1}, INVALID),
    ("MoeTokenPermuteGrad", {"numTopk": 513}, INVALID),
    ("MoeTokenPermuteGrad", {"numTopk": 4}, INVALID),
    ("MoeTokenPermuteGrad", {"permutedOutputGrad": ones(7, 2)}, INVALID),
    ("MoeTokenPermuteGrad", {"out": poison(3, 2, dtype=torch.float16)}, INVALID),
    ("MoeTokenPermuteGrad", {"out": poison(6)}, INVALID),
    ("MoeTokenPermute", {"paddedMode": True}, TILING),
    ("MoeTokenPermute", {"tokens": ones(3, 2).to(torch.int8)}, INVALID),
    ("MoeTokenPermute", {"permuteTokensOut": poison(6, 2, dtype=torch.int8)}, INVALID),
    ("MoeTokenPermuteWithEp", {"tokens": ones(3, 2).to(torch.int8), "permuteTokensOut": poison(4, 2, dtype=torch.int8)}, INVALID),
    ("MoeTokenPermuteWithEp", {"tokens": ones(3, 2).to(torch.int8), "permuteTokensOut": poison(6, 2, dtype=torch.int8), "rangeOptional": None}, INVALID),
    ("MoeTokenPermute", {"tokens": ones(3)}, TILING),
    ("MoeTokenPermute", {"indices": torch.zeros(3, 2, 1, dtype=torch.int32)}, TILING),
    ("MoeTokenPermute", {"indices": i32([[0, 1]])}, TILING),
    ("MoeTokenPermute", {"indices": torch.zeros(3, 513, dtype=torch.int32)}, TILING),
    ("MoeTokenPermute", {"indices": torch.zeros(1, dtype=torch.int32).expand(16_777_215), "tokens": ones(1, 1).expand(16_777_215, 1)}, TILING),
    ("MoeTokenPermute", {"numOutTokens": 5}, TILING),
    ("MoeTokenPermute", {"numOutTokens": -1}, TILING),
    ("MoeTokenPermute", {"permuteTokensOut": poison(6)}, TILING),
    ("MoeTokenPermute", {"permuteTokensOut": poison(6, 2).half()}, INVALID),
    ("MoeTokenUnpermute", {"paddedMode": True}, INVALID),
    ("MoeTokenUnpermute", {"permutedTokens": ones(12)}, TILING),
    ("MoeTokenUnpermute", {"permutedTokens": ones(7, 2)}, TILING),
    ("MoeTokenUnpermute", {"sortedIndices": i32([0, 1, 2])}, TILING),
    ("MoeTokenUnpermute", {"sortedIndices": i32([[2, 4], [0, 3], [1, 5]])}, TILING),
    ("MoeTokenUnpermute", {"probsOptional": ones(6)}, TILING),
    ("MoeTokenUnpermute", {"probsOptional": ones(3, 513), "sortedIndices": torch.zeros(1539, dtype=torch.int32)}, TILING),
    ("MoeTokenUnpermuteGrad", {"paddedMode": True}, INVALID),
    ("MoeTokenUnpermuteGrad", {"unpermutedTokensGrad": torch.empty(0, 2)}, TILING),
    ("MoeTokenUnpermuteGrad", {"unpermutedTokensGrad": torch.empty(3, 0)}, TILING),
    ("MoeTokenUnpermuteGrad", {"sortedIndices": i32([])}, TILING),
    ("MoeTokenUnpermuteGrad", {"probsOptional": torch.empty(3, 0)}, TILING),
    ("MoeTokenUnpermuteGrad", {"probsOptional": ones(3, 513)}, TILING),
    ("MoeTokenUnpermuteGrad", {"unpermutedTokensGrad": ones(6)}, TILING),
    ("MoeTokenUnpermuteGrad", {"probsOptional": ones(2, 2)}, INVALID),
    ("MoeTokenUnpermuteGrad", {"sortedIndices": i32([0, 1, 2])}, INVALID),
    ("MoeTokenUnpermuteGrad", {"permutedTokensOptional": ones(5, 2)}, INVALID),
    *(
        (name, {"rangeOptional": bounds}, TILING)
        for name in ("MoeTokenPermuteWithEp", "MoeTokenPermuteWithEpGrad", "MoeTokenUnpermuteWithEp", "MoeTokenUnpermuteWithEpGrad")
        for bounds in ([5, 1], [3, 3], [-1, 3], [1], [1, 2, 3], [])
    ),
    ("MoeTokenPermuteWithEp", {"paddedMode": True}, TILING),
    ("MoeTokenPermuteWithEp", {"probsOptional": ones(6)}, TILING),
    ("MoeTokenPermuteWithEp", {"rangeOptional": [1, 4]}, TILING),
    ("MoeTokenPermuteWithEp", {"rangeOptional": None}, TILING),
    ("MoeTokenPermuteWithEpGrad", {"paddedMode": True}, INVALID),
    *(("MoeTokenPermuteWithEpGrad", {"probsGradOut": poison(*shape)}, INVALID) for shape in ((5,), (2, 3), (3, 2, 1))),
    *(
        (name, {"rangeOptional": (-1, -1)}, TILING)
        for name in ("MoeTokenPermuteWithEp", "MoeTokenPermuteWithEpGrad", "MoeTokenUnpermuteWithEp")
    ),
    ("MoeTokenUnpermuteWithEpGrad", {"rangeOptional": (-1, 0)}, TILING),
    ("MoeTokenPermuteWithEpGrad", {"numTopk": 0}, INVALID),
    ("MoeTokenPermuteWithEpGrad", {"numTopk": 4}, INVALID),
    ("MoeTokenPermuteWithEpGrad", {"rangeOptional": [1, 4]}, INVALID),
    ("MoeTokenPermuteWithEpGrad", {"permutedTokensOutputGrad": ones(7, 2), "rangeOptional": None}, INVALID),
    ("MoeTokenPermuteWithEpGrad", {"permutedProbsOutputGradOptional": ones(6)}, INVALID),
    ("MoeTokenUnpermuteWithEp", {"paddedMode": True}, INVALID),
    ("MoeTokenUnpermuteWithEp", {"numTopk": 3}, TILING),
    ("MoeTokenUnpermuteWithEp", {"probsOptional": None, "numTopk": 4}, INVALID),
    *(("MoeTokenUnpermuteWithEp", {"numTopk": k, **probs}, INVALID) for k in (-1, 0, 4, 513) for probs in ({}, {"probsOptional": None})),
    ("MoeTokenUnpermuteWithEpGrad", {"rangeOptional": None, "permutedTokensOptional": ones(6, 2), "permutedTokensGradOut": poison(5, 2)}, INVALID),
    ("MoeTokenUnpermuteWithEpGrad", {"rangeOptional": None, "permutedTokensOptional": ones(7, 2)}, TILING),
    ("MoeTokenUnpermuteWithEpGrad", {"probsOptional": None, "permutedTokensGradOut": torch.tensor(1.0)}, INVALID),
    ("MoeTokenUnpermuteWithEp", {"rangeOptional": [1, 4]}, TILING),
    ("MoeTokenUnpermuteWithEpGrad", {"paddedMode": True}, INVALID),
    ("MoeTokenUnpermuteWithEpGrad", {"topkNum": 3}, TILING),
    ("MoeTokenUnpermuteWithEpGrad", {"topkNum": 513, "probsOptional": None}, TILING),
    ("MoeTokenUnpermuteWithEpGrad", {"rangeOptional": [1, 4]}, TILING),
]  # fmt: skip


@cases("name, changes, code", REFUSED)
def test_refused(name: str, changes: dict[str, Any], code: int) -> None:
    call_refused(name, changes, code)


ORDER: list[tuple[str, dict[str, Any], int, str]] = [
    # operator 1: paddedMode, nulls, dtypes, shapes
    ("MoeTokenPermuteGrad", {"paddedMode": True, "out": None}, INVALID, "paddedMode"),
    ("MoeTokenPermuteGrad", {"permutedOutputGrad": ones(6, 2).to(torch.int8), "out": None}, NULL, "out"),
    ("MoeTokenPermuteGrad", {"permutedOutputGrad": ones(6).to(torch.int8)}, INVALID, "int8"),
    # 5: the documents' 561002 for paddedMode, behind nulls and dtypes
    ("MoeTokenPermute", {"paddedMode": True, "tokens": None}, NULL, "tokens"),
    ("MoeTokenPermute", {"paddedMode": True, "tokens": ones(3, 2).double()}, INVALID, "tokens"),
    # 6 and 7: paddedMode first
    ("MoeTokenUnpermute", {"paddedMode": True, "out": None}, INVALID, "paddedMode"),
    ("MoeTokenUnpermuteGrad", {"paddedMode": True, "sortedIndices": None}, INVALID, "paddedMode"),
]  # fmt: skip


@cases("name, changes, code, what", ORDER)
def test_order_of_checks(name: str, changes: dict[str, Any], code: int, what: str) -> None:
    assert what in call_refused(name, changes, code)


# ---------------------------------------------------------------------------- drawn inputs


@settings(max_examples=40)
@given(SIZES, SEEDS, st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.integers(-3, 9), st.booleans())
def test_permute_family(
    sizes: tuple[int, int, int, int], seed: int, dtype: torch.dtype, probs_dtype: torch.dtype, cut: int, ranged: bool
) -> None:
    """MoeTokenPermute, its gradient, MoeTokenUnpermute and its gradient, with and without a range of rows."""
    num_tokens, topk, num_experts, hidden = sizes
    generator = generator_of(seed)
    ids = integers(generator, -1, num_experts, num_tokens, topk)
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, topk, dtype=probs_dtype)
    slots = num_tokens * topk
    expected = rows_by_expert(ids.flatten().tolist())
    kept = min(cut, slots) if cut > 0 else max(cut + slots, 0)
    first, last = 0, kept
    if ranged:
        first, last = sorted(integers(generator, 0, slots + 1, 2).tolist())
        last += first == last
    row_of_slot, count = within(expected, first, last), last - first

    rows, indices, row_probs = poison(count, hidden, dtype=dtype), empty_ids(slots), poison(count, dtype=probs_dtype)
    if ranged:
        run("MoeTokenPermuteWithEp", x, ids, probs, [first, last], cut, False, rows, indices, row_probs)
        same(row_probs, placed(probs.flatten(), row_of_slot, count))
    else:
        run("MoeTokenPermute", x, ids, cut, False, rows, indices)
    same(indices, expected)
    same(rows, placed(x.repeat_interleave(topk, 0), row_of_slot, count))

    y, y_grad = normal(generator, count, hidden, dtype=dtype), normal(generator, num_tokens, hidden, dtype=dtype)
    slot_rows = gathered(y, row_of_slot)
    out, probs_out = poison(num_tokens, hidden, dtype=dtype), poison(num_tokens, topk, dtype=probs_dtype)
    if ranged:
        grad = normal(generator, count, dtype=probs_dtype)
        run("MoeTokenPermuteWithEpGrad", y, indices, grad, topk, [first, last], False, out, probs_out)
        same(probs_out, gathered(grad, row_of_slot).reshape(num_tokens, topk))
    else:
        run("MoeTokenPermuteGrad", y, indices, topk, False, out)
    close(out, slot_rows.reshape(num_tokens, topk, hidden).sum(1))

    out = poison(num_tokens, hidden, dtype=dtype)
    weighted = slot_rows.reshape(num_tokens, topk, hidden) * probs.double()[..., None]
    if ranged:
        run("MoeTokenUnpermuteWithEp", y, indices, probs, topk, [first, last], False, None, out)
    else:
        run("MoeTokenUnpermute", y, indices, probs, False, [1], out)
    close(out, weighted.sum(1))

    rows_out = poison(count, hidden, dtype=dtype)
    if ranged:
        bounds = [first, last]
        run("MoeTokenUnpermuteWithEpGrad", y_grad, indices, y, probs, False, None, bounds, topk, rows_out, probs_out)
    else:
        run("MoeTokenUnpermuteGrad", y, y_grad, indices, probs, False, None, rows_out, probs_out)
    spread_grad = y_grad.double().repeat_interleave(topk, 0)
    close(rows_out, placed(spread_grad * probs.double().flatten()[:, None], row_of_slot, count))
    close(probs_out, (slot_rows * spread_grad).sum(1).reshape(num_tokens, topk))


@settings(max_examples=30)
@given(SIZES, SEEDS, st.sampled_from(FLOATS))
def test_unpermute_without_probs(sizes: tuple[int, int, int, int], seed: int, dtype: torch.dtype) -> None:
    num_tokens, _, _, hidden = sizes
    generator = generator_of(seed)
    rows = normal(generator, num_tokens, hidden, dtype=dtype)
    indices = integers(generator, -2, num_tokens + 2, num_tokens)
    out, grad_out, untouched = (
        poison(num_tokens, hidden, dtype=dtype),
        poison(num_tokens, hidden, dtype=dtype),
        poison(1),
    )
    run("MoeTokenUnpermute", rows, indices, None, False, None, out)
    same(out, gathered(rows, indices.tolist()))
    run("MoeTokenUnpermuteGrad", None, rows, indices, None, False, None, grad_out, untouched)
    same(grad_out, placed(rows, indices.tolist(), num_tokens))
    assert untouched.isnan().all()


@on_every_backend
def test_a_weight_of_zero_does_not_read_its_row() -> None:
    out = poison(1, 2)
    rows = f32([[math.inf, math.nan], [1.0, 2.0]])
    run("MoeTokenUnpermute", rows, i32([0, 1]), f32([[0.0, 2.0]]), False, None, out)
    same(out, [[2.0, 4.0]])


@pytest.mark.parametrize("dtype", FLOATS, ids=spoken)
@on_every_backend
def test_gathers_copy_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0, math.inf, -math.inf, math.nan, 1e-7]]).to(dtype)
    rows, indices = poison(2, 6, dtype=dtype), empty_ids(2)
    run("MoeTokenPermute", x, i32([[1, 0]]), 0, False, rows, indices)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    torch.testing.assert_close(rows.view(bits), x.view(bits).expand(2, 6), rtol=0, atol=0)


ENDS = (2**31 - 1, -(2**31), 1065353216, -1, 6, 0)  # the last one is a row


@on_every_backend
def test_permute_grad_of_indices_beyond_every_range() -> None:
    """No index value reads or writes outside: the ends of int32 name nothing."""
    out = poison(3, 2)
    run("MoeTokenPermuteGrad", ones(6, 2), i32(ENDS), 2, False, out)
    same(out, [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])


@on_every_backend
def test_unpermute_grad_of_indices_beyond_every_range() -> None:
    rows_out = poison(6, 2)
    run("MoeTokenUnpermuteGrad", None, ones(6, 2), i32(ENDS), None, False, None, rows_out, None)
    same(rows_out, [[1.0, 1.0]] + [[0.0, 0.0]] * 5)


@on_every_backend
def test_permute_of_ids_beyond_every_range() -> None:
    rows, indices = poison(6, 2), empty_ids(6)
    ids = torch.tensor([[2**62, -(2**62)], [2**32, 0], [-1, 2**31]])
    run("MoeTokenPermute", ones(3, 2), ids, 0, False, rows, indices)
    same(indices, [3, -1, 2, 0, -1, 1])
    same(rows, [[1.0, 1.0]] * 4 + [[0.0, 0.0]] * 2)


# ---------------------------------------------------------------------------- empty tensors


EMPTY: list[tuple[str, dict[str, Any]]] = [
    ("MoeTokenPermuteGrad", {"permutedOutputGrad": torch.empty(0, 2), "sortedIndices": i32([]), "out": torch.empty(0, 2)}),
    ("MoeTokenPermuteGrad", {"permutedOutputGrad": torch.empty(6, 0), "out": torch.empty(3, 0)}),
    ("MoeTokenPermuteGrad", {"permutedOutputGrad": torch.empty(0, 2)}),
    ("MoeTokenPermute", {"tokens": torch.empty(0, 2), "indices": torch.empty(0, 2, dtype=torch.int32), "permuteTokensOut": torch.empty(0, 2), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenPermute", {"tokens": torch.empty(3, 0), "permuteTokensOut": torch.empty(6, 0)}),
    ("MoeTokenPermute", {"indices": torch.empty(3, 0, dtype=torch.int32), "permuteTokensOut": torch.empty(0, 2), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenPermuteWithEp", {"tokens": torch.empty(3, 0), "permuteTokensOut": torch.empty(4, 0)}),
    ("MoeTokenUnpermute", {"permutedTokens": torch.empty(0, 2)}),
    ("MoeTokenUnpermute", {"permutedTokens": torch.empty(0, 2), "sortedIndices": i32([]), "probsOptional": torch.empty(0, 2), "out": torch.empty(0, 2)}),
    ("MoeTokenUnpermute", {"permutedTokens": torch.empty(0, 2), "sortedIndices": i32([]), "probsOptional": torch.empty(3, 0)}),
]  # fmt: skip


@cases("name, changes", EMPTY)
@on_every_backend
def test_empty_tensors(subtests: pytest.Subtests, name: str, changes: dict[str, Any]) -> None:
    zeros_where_nothing_is_to_do(subtests, name, changes)


# ---------------------------------------------------------------------------- the core's bits


@settings(max_examples=25)
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(4, 9),
    st.sampled_from((1, 64, 131, 300)),
    SEEDS,
    st.sampled_from(MIXTURES),
)
def test_the_bits_are_those_of_the_core(
    num_tokens: int, topk: int, num_experts: int, hidden: int, seed: int, mixture: tuple[torch.dtype, torch.dtype]
) -> None:
    """The same call through the core's reference backend, with no `out=`."""
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    with_reference: dict[str, Any] = {"backend": "reference"}
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :topk].int()
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, topk, dtype=probs_dtype)
    slots = num_tokens * topk
    plan = moeroute.plan_from_expert_ids(ids, num_experts, **with_reference)
    y = normal(generator, slots, hidden, dtype=dtype)
    rows, indices = poison(slots, hidden, dtype=dtype), empty_ids(slots)
    run("MoeTokenPermute", x, ids, 0, False, rows, indices)
    assert_same_bits((rows, indices), (moeroute.permute(x, plan, **with_reference), plan.row_of_slot))
    out = poison(num_tokens, hidden, dtype=dtype)
    run("MoeTokenPermuteGrad", y, indices, topk, False, out)
    assert_same_bits(out, moeroute.permute_backward(y, plan, **with_reference))
    run("MoeTokenUnpermute", y, indices, probs, False, None, out)
    assert_same_bits(out, moeroute.unpermute(y, plan, probs, **with_reference))
    rows_out, probs_out = poison(slots, hidden, dtype=dtype), poison(num_tokens, topk, dtype=probs_dtype)
    run("MoeTokenUnpermuteGrad", y, x, indices, probs, False, None, rows_out, probs_out)
    assert_same_bits((rows_out, probs_out), moeroute.unpermute_backward(x, y, plan, probs, **with_reference))


# ---------------------------------------------------------------------------- shapes of upstream's system tests


@pytest.mark.parametrize("num_tokens, hidden, topk", (
    (1, 7, 1), (1, 17, 1), (15, 1, 1), (1, 9, 39), (8, 7, 1), (9, 9, 1), (256, 20, 1), (19, 8, 275), (17, 19, 306),
    (21, 1, 264), (13107, 991, 209), (13107, 827, 419), (13107, 879, 428), (13107, 957, 383),
), ids=spoken)  # fmt: skip
def test_system_shapes_of_permute_grad(num_tokens: int, hidden: int, topk: int) -> None:
    """Forward, then the gradient of ones: K everywhere."""
    slots = num_tokens * topk
    skip_large(2 * slots * hidden * 2)
    generator = generator_of(num_tokens + topk)
    ids = integers(generator, 0, 512, num_tokens, topk)
    x = normal(generator, num_tokens, hidden, dtype=BF16)
    rows, indices = torch.empty(slots, hidden, dtype=BF16), empty_ids(slots)
    run("MoeTokenPermute", x, ids, 1_548_263_338, False, rows, indices)
    order = torch.argsort(ids.flatten(), stable=True)
    some = order[:: max(slots // 1000, 1)]
    same(rows[:: max(slots // 1000, 1)], x[some // topk])
    out = poison(num_tokens, hidden, dtype=BF16)
    run("MoeTokenPermuteGrad", rows.fill_(1), indices, topk, False, out)
    same(out, torch.full_like(out, topk))
