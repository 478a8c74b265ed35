"""The aclnn calls against the documents: worked numbers, every error row, and plain Python on drawn inputs.

Expectations are written here, in float64 and Python lists; none comes from the package.
"""

import inspect
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moeroute
from moeroute import aclnn, check
from moeroute.aclnn import core
from moeroute.aclnn.signatures import SIGNATURES
from moeroute.testing import assert_same_bits

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NULL, INVALID, INNER, TILING, INNER_NULL = 161001, 161002, 561000, 561002, 561103


def prepare(name: str, *arguments: Any) -> tuple[int, int, Any]:
    return getattr(aclnn, f"aclnn{name}GetWorkspaceSize")(*arguments)


def run(name: str, *arguments: Any, workspace: int = 0) -> None:
    """Both phases; both must succeed."""
    status, size, executor = prepare(name, *arguments)
    assert status == 0, aclnn.aclGetRecentErrMsg()
    assert size == workspace
    status = getattr(aclnn, f"aclnn{name}")(None, 0, executor, None)
    assert status == 0, aclnn.aclGetRecentErrMsg()


def same(actual: Tensor, expected: Any) -> None:
    expected = torch.as_tensor(expected).to(actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# Half a unit in the last place: there is one rounding to the dtype, at the store. Sums are float32 before.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def close(actual: Tensor, expected: Any) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=1.01 * ROUNDING[actual.dtype], atol=2e-5)


def f32(values: Any, *shape: int) -> Tensor:
    made = torch.tensor(values, dtype=torch.float32)
    return made.reshape(shape) if shape else made


def i32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What nobody writes by accident."""
    if dtype.is_floating_point:
        return torch.full(shape, math.nan, dtype=dtype)
    return torch.full(shape, -77, dtype=dtype)


# ---------------------------------------------------------------------------- prototypes


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_order_follow_the_prototypes(name: str) -> None:
    first = getattr(aclnn, f"aclnn{name}GetWorkspaceSize")
    second = getattr(aclnn, f"aclnn{name}")
    assert tuple(inspect.signature(first).parameters) == SIGNATURES[name].names
    assert tuple(inspect.signature(second).parameters) == ("workspace", "workspace_size", "executor", "stream")
    assert first.__name__ == f"aclnn{name}GetWorkspaceSize"
    assert first.__doc__


def test_nothing_else_is_exported() -> None:
    calls = {f"aclnn{name}{end}" for name in SIGNATURES for end in ("", "GetWorkspaceSize")}
    public = {name for name in vars(aclnn) if name.startswith("acl")}
    assert public - calls == {"aclGetRecentErrMsg"}
    assert calls <= public


def test_declarations() -> None:
    signature = SIGNATURES["MoeTokenPermuteWithRoutingMapGrad"]
    assert signature.header == "aclnn_moe_token_permute_with_routing_map_grad.h"
    assert [p.declaration for p in signature.parameters] == [
        "const aclTensor *permutedTokensOutputGrad",
        "const aclTensor *permutedProbsOutputGradOptional",
        "const aclTensor *sortedIndices",
        "const aclTensor *routingMapOptional",
        "int64_t experts_num",
        "int64_t tokens_num",
        "bool dropAndPad",
        "aclTensor *tokenGradOut",
        "aclTensor *probsGradOutOptional",
    ]


# ---------------------------------------------------------------------------- worked numbers


def test_token_permute_grad_of_the_document() -> None:
    out = poison(1, 2, dtype=torch.bfloat16)
    grad = f32([[1, 2], [3, 4]]).bfloat16()
    run("MoeTokenPermuteGrad", grad, i32([0, 1]), 2, False, out)
    same(out, [[4.0, 6.0]])


XNORM = [
    [0.5, 0.7, 0.3, 0.8, 0.2, 0.6, 0.9, 0.4],
    [0.6, 0.4, 0.8, 0.1, 0.7, 0.5, 0.3, 0.9],
    [0.2, 0.9, 0.5, 0.6, 0.8, 0.3, 0.7, 0.4],
    [0.8, 0.3, 0.6, 0.5, 0.4, 0.7, 0.2, 0.9],
]


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


def test_unpermute_with_routing_map_grad_of_the_document() -> None:
    rows_out, probs_out = poison(2, 2), poison(1, 2)
    run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        torch.ones(1, 2), i32([0, 1]), i32([0, 0]), torch.ones(1, 2, dtype=torch.bool), torch.ones(2, 2),
        torch.ones(1, 2), False, None, rows_out, probs_out,
    )  # fmt: skip
    same(rows_out, torch.ones(2, 2))
    same(probs_out, [[2.0, 2.0]])


@pytest.mark.parametrize("generated", (False, True))
def test_permute_with_routing_map_grad_in_the_shape_of_the_document(generated: bool) -> None:
    """The shipped example at a tenth of its hidden size: 4096 tokens, 256 experts, capacity 16."""
    tokens_num, hidden, experts_num, capacity = 4096, 64, 256, 16
    rows = experts_num * capacity
    indices = torch.zeros(rows, dtype=torch.int32)
    if generated:
        indices = torch.arange(rows, dtype=torch.int32) * 7 % tokens_num
    token_out, probs_out = poison(tokens_num, hidden), poison(tokens_num, experts_num)
    run(
        "MoeTokenPermuteWithRoutingMapGrad",
        torch.zeros(rows, hidden), torch.full((rows,), 0.1), indices,
        torch.ones(tokens_num, experts_num, dtype=torch.int8), experts_num, tokens_num, True, token_out, probs_out,
        workspace=16 * 2**20,
    )  # fmt: skip
    same(token_out, torch.zeros(tokens_num, hidden))
    expected = torch.zeros(tokens_num, experts_num)
    expected[indices.long(), torch.arange(rows) // capacity] = 0.1
    same(probs_out, expected)
    if not generated:
        same(probs_out[0], torch.full((experts_num,), 0.1))


X34 = [[0.1] * 4, [0.2] * 4, [0.3] * 4]


def test_token_permute_of_the_document() -> None:
    rows, indices = poison(6, 4), poison(6, dtype=torch.int32)
    run("MoeTokenPermute", f32(X34), i32([[1, 2], [0, 1], [0, 2]]), 0, False, rows, indices)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(rows, [X34[t] for t in (1, 2, 0, 1, 0, 2)])


@pytest.mark.parametrize("ids_dtype", (torch.int32, torch.int64))
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
def test_token_permute_keeps_the_first_rows_and_all_indices(num_out: int, kept: int) -> None:
    rows, indices = poison(kept, 4), poison(6, dtype=torch.int32)
    run("MoeTokenPermute", f32(X34), torch.tensor([[1, 2], [0, 1], [0, 2]]), num_out, False, rows, indices)
    same(indices, [2, 4, 0, 3, 1, 5])
    same(rows, f32([X34[t] for t in (1, 2, 0, 1, 0, 2)[:kept]]).reshape(kept, 4))


def test_token_unpermute_of_the_document() -> None:
    out = poison(1, 2, dtype=torch.bfloat16)
    rows = f32([[1, 2], [3, 4]]).bfloat16()
    run("MoeTokenUnpermute", rows, i32([0, 1]), torch.ones(1, 2, dtype=torch.bfloat16), False, None, out)
    same(out, [[4.0, 6.0]])
    out = poison(2, 2, dtype=torch.bfloat16)
    run("MoeTokenUnpermute", rows, i32([1, 0]), None, False, None, out)
    same(out, [[3.0, 4.0], [1.0, 2.0]])


def test_token_unpermute_grad_of_the_document() -> None:
    rows_out, probs_out = poison(3, 2), poison(1, 3)
    ones = torch.ones(3, 2), torch.ones(1, 2), i32([0, 1, 2]), torch.ones(1, 3)
    run("MoeTokenUnpermuteGrad", *ones, False, None, rows_out, probs_out)
    same(rows_out, torch.ones(3, 2))
    same(probs_out, [[2.0, 2.0, 2.0]])


def test_permute_with_routing_map_of_the_document() -> None:
    rows, indices = poison(6, 4), poison(6, dtype=torch.int32)
    routing_map = torch.ones(3, 2, dtype=torch.int8)
    run("MoeTokenPermuteWithRoutingMap", f32(X34), routing_map, None, 6, False, rows, None, indices)
    same(indices, [0, 3, 1, 4, 2, 5])
    same(rows, [X34[t] for t in (0, 1, 2, 0, 1, 2)])


def test_unpermute_with_routing_map_of_the_document() -> None:
    name = "MoeTokenUnpermuteWithRoutingMap"
    ones, indices = torch.ones(2, 2), [poison(2, dtype=torch.int32) for _ in range(2)]
    out, probs = poison(2, 2), poison(2)
    run(name, ones, i32([1, 1]), ones.to(torch.int8), ones, True, [2, 2], out, *indices, probs)
    same(out, [[0.0, 0.0], [2.0, 2.0]])
    same(indices[0], [0, 1])
    same(indices[1], [1, 1])
    same(probs, [1.0, 1.0])

    rows = f32([[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400], [1000, 2000, 3000, 4000]])
    out, indices = poison(2, 4), [poison(4, dtype=torch.int32) for _ in range(2)]
    run(name, rows, i32([0, 1, 2, 3]), None, None, False, [2, 4], out, *indices, torch.empty(0))
    same(out, [[11.0, 22.0, 33.0, 44.0], [1100.0, 2200.0, 3300.0, 4400.0]])
    same(indices[0], [0, 1, 2, 3])
    same(indices[1], [0, 0, 1, 1])

    rows = f32([[2, 4, 6, 8], [4, 8, 12, 16], [8, 16, 24, 32], [100, 200, 300, 400]])
    out, indices, probs = poison(2, 4), [poison(4, dtype=torch.int32) for _ in range(2)], poison(4)
    ones = torch.ones(2, 2, dtype=torch.int8)
    run(name, rows, i32([0, -1, 1, 2]), ones, f32([[0.5, 0.0], [0.25, 0.75]]), False, [2, 4], out, *indices, probs)
    same(out, [[1.0, 2.0, 3.0, 4.0], [7.0, 14.0, 21.0, 28.0]])
    same(probs, [0.5, 0.0, 0.25, 0.75])
    same(indices[0], [0, -1, 1, 2])


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


@pytest.mark.parametrize("ids_dtype", (torch.int32, torch.int64))
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


def test_gating_softmax_of_the_document() -> None:
    y, ids, numbers = poison(3, 2), poison(3, 2, dtype=torch.int32), poison(3, 2, dtype=torch.int32)
    run("MoeGatingTopKSoftmax", f32(X_SOFTMAX), None, 2, y, ids, numbers)
    torch.testing.assert_close(y, f32([[0.643914, 0.236883]] * 3), rtol=0, atol=1e-6)
    same(ids, [[3, 2]] * 3)
    same(numbers, [[0, 3], [1, 4], [2, 5]])


def test_gating_softmax_of_finished_rows() -> None:
    y, ids, numbers = poison(3, 2), poison(3, 2, dtype=torch.int32), poison(3, 2, dtype=torch.int32)
    finished = torch.tensor([False, True, False])
    run("MoeGatingTopKSoftmax", f32(X_SOFTMAX), finished, 2, y, ids, numbers)
    same(ids, [[3, 2], [4, 4], [3, 2]])
    torch.testing.assert_close(y, f32([[0.643914, 0.236883]] * 3), rtol=0, atol=1e-6)


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


EP_ROWS = [[2.0, 2.0], [1.0, 1.0], [3.0, 3.0], [2.0, 2.0]]
EP_INDICES = [2, 0, 4, 1, 5, 3]


def test_with_ep_of_the_documents() -> None:
    x = f32(X34).bfloat16()
    ids = i32([[1, 2], [3, 1], [2, 3]])
    probs = f32([[0.5, 0.3], [0.4, 0.2], [0.5, 0.4]]).bfloat16()
    rows, indices = poison(4, 4, dtype=torch.bfloat16), poison(6, dtype=torch.int32)
    row_probs = poison(4, dtype=torch.bfloat16)
    run("MoeTokenPermuteWithEp", x, ids, probs, [1, 5], 6, False, rows, indices, row_probs)
    same(indices, [0, 2, 4, 1, 3, 5])
    same(rows, x[[1, 0, 2, 1]])
    same(row_probs, probs.flatten()[[3, 1, 4, 2]])

    out = poison(3, 2)
    run("MoeTokenUnpermuteWithEp", f32(EP_ROWS), i32(EP_INDICES), torch.ones(3, 2), 2, [1, 5], False, None, out)
    same(out, [[1.0, 1.0], [4.0, 4.0], [3.0, 3.0]])

    tokens, grads = poison(3, 2), poison(3, 2)
    probs_grad = f32([0.2, 0.5, 0.4, 0.4])
    arguments = f32(EP_ROWS), i32(EP_INDICES), probs_grad, 2, [1, 5], False, tokens, grads
    run("MoeTokenPermuteWithEpGrad", *arguments)
    same(tokens, [[1.0, 1.0], [4.0, 4.0], [3.0, 3.0]])
    same(grads, [[0.5, 0.0], [0.4, 0.2], [0.0, 0.4]])
    flat = poison(12)[::2]
    run("MoeTokenPermuteWithEpGrad", *arguments[:-1], flat)
    same(flat, [0.5, 0.0, 0.4, 0.2, 0.0, 0.4])

    rows_out, probs_out = poison(3, 2), poison(1, 3)
    ones = torch.ones(1, 2), i32([0, 1, 2]), torch.ones(3, 2), torch.ones(1, 3)
    for no_range in (None, (-1, -1)):
        run("MoeTokenUnpermuteWithEpGrad", *ones, False, None, no_range, 3, rows_out.fill_(-7), probs_out.fill_(-7))
        same(rows_out, torch.ones(3, 2))
        same(probs_out, [[2.0, 2.0, 2.0]])


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


def test_with_ep_unpermute_grad_in_a_range() -> None:
    grad = f32([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    probs = f32([[0.5, 0.25], [2.0, 4.0], [8.0, 1.0]])
    rows_out, probs_out = poison(4, 2), poison(3, 2)
    arguments = grad, i32(EP_INDICES), f32(EP_ROWS), probs, False, None, [1, 5], 2, rows_out, probs_out
    run("MoeTokenUnpermuteWithEpGrad", *arguments)
    same(rows_out, [[12.0, 16.0], [0.5, 1.0], [5.0, 6.0], [6.0, 8.0]])
    same(probs_out, [[3.0, 0.0], [14.0, 14.0], [0.0, 33.0]])


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


def test_init_routing_grad_of_the_document() -> None:
    out = poison(2, 2)
    run("MoeInitRoutingV2Grad", f32([[0.1, 0.1], [0.3, 0.3], [0.2, 0.2], [0.4, 0.4]]), i32([2, 0, 1, 3]), 2, 0, 0, out)
    close(out, [[0.3, 0.3], [0.7, 0.7]])
    run("MoeInitRoutingV2Grad", f32([[0.1, 0.1], [0.3, 0.3]]), i32([2, 0, 1, 3]), 2, 0, 2, out)
    close(out, [[0.1, 0.1], [0.3, 0.3]])
    grad = f32([[[0.1, 0.1], [0.3, 0.3]], [[0.2, 0.2], [0.4, 0.4]]])
    run("MoeInitRoutingV2Grad", grad, i32([2, -1, 1, 3]), 2, 1, 0, out)
    close(out, [[0.2, 0.2], [0.7, 0.7]])


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


def test_compute_expert_tokens_of_the_document() -> None:
    out = poison(3, dtype=torch.int32)
    run("MoeComputeExpertTokens", i32([0, 0, 1, 1, 2, 2]), 3, out)
    same(out, [2, 4, 6])


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int8))
def test_re_routing(dtype: torch.dtype) -> None:
    tokens = torch.arange(12).reshape(6, 2).to(dtype)
    scales = torch.arange(6.0)
    rows, row_scales = poison(6, 2, dtype=dtype), poison(6)
    indices, counts = poison(6, dtype=torch.int32), poison(2, dtype=torch.int64)
    lengths = torch.tensor([[1, 2], [3, 0]])
    for idx_type, expected in ((0, [0, 3, 4, 5, 1, 2]), (1, [0, 4, 5, 1, 2, 3])):
        run("MoeReRouting", tokens, lengths, scales, 1, idx_type, rows, row_scales, indices, counts)
        same(indices, expected)
        same(rows, tokens[[0, 3, 4, 5, 1, 2]])
        same(row_scales, [0.0, 3.0, 4.0, 5.0, 1.0, 2.0])
        same(counts, [4, 2])


# ---------------------------------------------------------------------------- refusals

# A valid call of every operator, small; T = 3, K = 2, E = 4, H = 2 where it has them.


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def empty_ids(*shape: int) -> Tensor:
    return poison(*shape, dtype=torch.int32)


MAP = [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]]


def routing_map() -> Tensor:
    return torch.tensor(MAP, dtype=torch.int8)


GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "MoeTokenPermuteGrad": lambda: {
        "permutedOutputGrad": ones(6, 2), "sortedIndices": i32([0, 1, 2, 3, 4, 5]), "numTopk": 2, "paddedMode": False,
        "out": poison(3, 2),
    },
    "MoeGatingTopKBackward": lambda: {
        "xNorm": ones(3, 4) / 2, "gradY": ones(3, 2), "expertIdx": i32([[0, 1], [1, 2], [3, 0]]), "renorm": 0,
        "normType": 1, "routedScalingFactor": 1.0, "eps": 1e-20, "out": poison(3, 4),
    },
    "MoeTokenUnpermuteWithRoutingMapGrad": lambda: {
        "unpermutedTokensGrad": ones(3, 2), "outIndex": i32([0, 3, 2, 4, 1, 5]), "permuteTokenId": i32([0, 0, 1, 1, 2, 2]),
        "routingMapOptional": routing_map(), "permutedTokensOptional": ones(6, 2), "probsOptional": ones(3, 4),
        "dropAndPad": False, "restoreShapeOptional": None, "permutedTokensGradOut": poison(6, 2),
        "probsGradOutOptional": poison(3, 4),
    },
    "MoeTokenPermuteWithRoutingMapGrad": lambda: {
        "permutedTokensOutputGrad": ones(6, 2), "permutedProbsOutputGradOptional": ones(6),
        "sortedIndices": i32([0, 3, 2, 4, 1, 5]), "routingMapOptional": routing_map(), "experts_num": 4, "tokens_num": 3,
        "dropAndPad": False, "tokenGradOut": poison(3, 2), "probsGradOutOptional": poison(3, 4),
    },
    "MoeTokenPermute": lambda: {
        "tokens": ones(3, 2), "indices": i32([[1, 2], [0, 1], [0, 2]]), "numOutTokens": 0, "paddedMode": False,
        "permuteTokensOut": poison(6, 2), "sortedIndicesOut": empty_ids(6),
    },
    "MoeTokenUnpermute": lambda: {
        "permutedTokens": ones(6, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]), "probsOptional": ones(3, 2),
        "paddedMode": False, "restoreShapeOptional": None, "out": poison(3, 2),
    },
    "MoeTokenUnpermuteGrad": lambda: {
        "permutedTokensOptional": ones(6, 2), "unpermutedTokensGrad": ones(3, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]),
        "probsOptional": ones(3, 2), "paddedMode": False, "restoreShapeOptional": None,
        "permutedTokensGradOut": poison(6, 2), "probsGradOut": poison(3, 2),
    },
    "MoeTokenPermuteWithRoutingMap": lambda: {
        "tokens": ones(3, 2), "routingMap": routing_map(), "probsOptional": ones(3, 4), "numOutTokens": 6,
        "dropAndPad": False, "permuteTokensOut": poison(6, 2), "permuteProbsOutOptional": poison(6),
        "sortedIndicesOut": empty_ids(6),
    },
    "MoeTokenUnpermuteWithRoutingMap": lambda: {
        "permutedTokens": ones(6, 2), "sortedIndices": i32([0, 3, 2, 4, 1, 5]), "routingMapOptional": routing_map(),
        "probsOptional": ones(3, 4), "paddedMode": False, "restoreShapeOptional": [3, 2], "unpermutedTokens": poison(3, 2),
        "outIndex": empty_ids(6), "permuteTokenId": empty_ids(6), "permuteProbs": poison(6),
    },
    "MoeGatingTopK": lambda: {
        "x": ones(3, 4), "biasOptional": ones(4), "k": 2, "kGroup": 1, "groupCount": 2, "groupSelectMode": 0, "renorm": 0,
        "normType": 1, "outFlag": True, "routedScalingFactor": 1.0, "eps": 1e-20, "yOut": poison(3, 2),
        "expertIdxOut": empty_ids(3, 2), "outOut": poison(3, 4),
    },
    "MoeGatingTopKV2": lambda: {
        "x": ones(3, 4), "biasOptional": ones(4), "inputIdsOptional": i32([0, 1, 0]),
        "tid2eidOptional": i32([[0, 1], [2, 3]]), "k": 2, "kGroup": 2, "groupCount": 2, "groupSelectMode": 0, "renorm": 0,
        "normType": 1, "outFlag": True, "routedScalingFactor": 1.0, "eps": 1e-20, "yOut": poison(3, 2),
        "expertIdxOut": empty_ids(3, 2), "outOut": poison(3, 4),
    },
    "MoeGatingTopKSoftmax": lambda: {
        "x": ones(3, 4), "finishedOptional": torch.zeros(3, dtype=torch.bool), "k": 2, "yOut": poison(3, 2),
        "expertIdxOut": empty_ids(3, 2), "rowIdxOut": empty_ids(3, 2),
    },
    "MoeGatingTopKSoftmaxV2": lambda: {
        "x": ones(3, 4), "finishedOptional": torch.zeros(3, dtype=torch.bool), "k": 2, "renorm": 0,
        "outputSoftmaxResultFlag": True, "yOut": poison(3, 2), "expertIdxOut": empty_ids(3, 2),
        "softmaxResultOutOptional": poison(3, 4),
    },
    "MoeTokenPermuteWithEp": lambda: {
        "tokens": ones(3, 2), "indices": i32([[1, 2], [0, 1], [0, 2]]), "probsOptional": ones(3, 2),
        "rangeOptional": [1, 5], "numOutTokens": 0, "paddedMode": False, "permuteTokensOut": poison(4, 2),
        "sortedIndicesOut": empty_ids(6), "permuteProbsOut": poison(4),
    },
    "MoeTokenPermuteWithEpGrad": lambda: {
        "permutedTokensOutputGrad": ones(4, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]),
        "permutedProbsOutputGradOptional": ones(4), "numTopk": 2, "rangeOptional": [1, 5], "paddedMode": False,
        "tokenGradOut": poison(3, 2), "probsGradOut": poison(3, 2),
    },
    "MoeTokenUnpermuteWithEp": lambda: {
        "permutedTokens": ones(4, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]), "probsOptional": ones(3, 2), "numTopk": 2,
        "rangeOptional": [1, 5], "paddedMode": False, "restoreShapeOptional": None, "out": poison(3, 2),
    },
    "MoeTokenUnpermuteWithEpGrad": lambda: {
        "unpermutedTokensGrad": ones(3, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]), "permutedTokensOptional": ones(4, 2),
        "probsOptional": ones(3, 2), "paddedMode": False, "restoreShapeOptional": None, "rangeOptional": [1, 5],
        "topkNum": 2, "permutedTokensGradOut": poison(4, 2), "probsGradOut": poison(3, 2),
    },
    "MoeInitRoutingV2": lambda: {
        "x": ones(3, 2), "expertIdx": i32([[1, 2], [0, 1], [0, 2]]), "activeNum": 0, "expertCapacity": 2, "expertNum": 3,
        "dropPadMode": 0, "expertTokensCountOrCumsumFlag": 1, "expertTokensBeforeCapacityFlag": False,
        "expandedXOut": poison(6, 2), "expandedRowIdxOut": empty_ids(6), "expertTokensCountOrCumsumOut": empty_ids(3),
        "expertTokensBeforeCapacityOut": None,
    },
    "MoeInitRoutingV2Grad": lambda: {
        "gradExpandedX": ones(6, 2), "expandedRowIdx": i32([2, 4, 0, 3, 1, 5]), "topK": 2, "dropPadMode": 0,
        "activeNum": 0, "out": poison(3, 2),
    },
    "MoeFinalizeRoutingV2": lambda: {
        "expandedX": ones(6, 2), "expandedRowIdx": i32([2, 4, 0, 3, 1, 5]), "x1Optional": ones(3, 2),
        "x2Optional": ones(3, 2), "biasOptional": ones(4, 2), "scalesOptional": ones(3, 2),
        "expertIdxOptional": i32([[1, 2], [0, 1], [0, 2]]), "dropPadMode": 2, "out": poison(3, 2),
    },
    "MoeFinalizeRoutingV2Grad": lambda: {
        "gradY": ones(3, 2), "expandedRowIdx": i32([2, 4, 0, 3, 1, 5]), "expandedXOptional": ones(6, 2),
        "scalesOptional": ones(3, 2), "expertIdxOptional": i32([[1, 2], [0, 1], [0, 2]]), "biasOptional": ones(4, 2),
        "dropPadMode": 0, "activeNum": 0, "expertNum": 0, "expertCapacity": 0, "gradExpandedXOut": poison(6, 2),
        "gradScalesOut": poison(3, 2),
    },
    "MoeComputeExpertTokens": lambda: {"sortedExperts": i32([0, 0, 1]), "numExperts": 2, "out": empty_ids(2)},
    "MoeReRouting": lambda: {
        "tokens": ones(3, 2), "expertTokenNumPerRank": i32([[1, 1], [1, 0]]), "perTokenScalesOptional": ones(3),
        "expertTokenNumType": 1, "idxType": 0, "permuteTokensOut": poison(3, 2), "permutePerTokenScalesOut": poison(3),
        "permuteTokenIdxOut": empty_ids(3), "expertTokenNumOut": empty_ids(2),
    },
}  # fmt: skip


def call_refused(name: str, changes: dict[str, Any], code: int) -> str:
    """The call with changes gives this code and a message, and writes nothing. Returns the message."""
    arguments = GOOD[name]() | changes
    assert list(arguments) == list(SIGNATURES[name].names)
    outputs = [
        value for p, value in zip(SIGNATURES[name].parameters, arguments.values(), strict=True) if "out" in p.kind
    ]
    before = [None if out is None else out.clone() for out in outputs]
    aclnn.aclGetRecentErrMsg()
    status, size, executor = prepare(name, *arguments.values())
    message = aclnn.aclGetRecentErrMsg()
    assert (status, size, executor) == (code, 0, None), message
    assert message.startswith(f"aclnn{name}: ")
    assert aclnn.aclGetRecentErrMsg() == "", "a message is read once"
    for out, was in zip(outputs, before, strict=True):
        if out is not None:
            torch.testing.assert_close(out, was, rtol=0, atol=0, equal_nan=True)
    return message


def test_every_operator_has_a_valid_call() -> None:
    assert list(GOOD) == list(SIGNATURES)


@pytest.mark.parametrize("name", GOOD)
def test_valid_call_writes_every_output(name: str) -> None:
    arguments = GOOD[name]()
    run(name, *arguments.values(), workspace=16 * 2**20 if name in SIXTEEN_MIB else 0)
    for parameter, value in zip(SIGNATURES[name].parameters, arguments.values(), strict=True):
        if "out" in parameter.kind and value is not None:
            unwritten = value.isnan() | (value == -77)
            assert not unwritten.any(), f"{parameter.name} has unwritten elements"


SIXTEEN_MIB = ("MoeGatingTopKBackward", "MoeTokenPermuteWithRoutingMapGrad")

# Optional ones that the valid call makes necessary, with the code for their absence.
NEEDED = {
    ("MoeTokenUnpermuteWithRoutingMapGrad", "routingMapOptional"): TILING,
    ("MoeTokenUnpermuteWithRoutingMapGrad", "permutedTokensOptional"): TILING,
    ("MoeTokenUnpermuteWithRoutingMapGrad", "probsGradOutOptional"): NULL,
    ("MoeTokenPermuteWithRoutingMapGrad", "routingMapOptional"): NULL,
    ("MoeTokenUnpermuteGrad", "permutedTokensOptional"): NULL,
    ("MoeTokenUnpermuteGrad", "probsGradOut"): NULL,
    ("MoeTokenPermuteWithRoutingMap", "permuteProbsOutOptional"): NULL,
    ("MoeTokenUnpermuteWithRoutingMap", "permuteProbs"): NULL,
    ("MoeTokenUnpermuteWithRoutingMap", "routingMapOptional"): NULL,
    ("MoeGatingTopKV2", "inputIdsOptional"): TILING,
    ("MoeGatingTopKV2", "tid2eidOptional"): TILING,
    ("MoeGatingTopKSoftmaxV2", "softmaxResultOutOptional"): NULL,
    ("MoeTokenPermuteWithEp", "permuteProbsOut"): NULL,
    ("MoeTokenPermuteWithEpGrad", "probsGradOut"): NULL,
    ("MoeTokenUnpermuteWithEpGrad", "permutedTokensOptional"): NULL,
    ("MoeTokenUnpermuteWithEpGrad", "probsGradOut"): NULL,
    ("MoeInitRoutingV2", "expertTokensCountOrCumsumOut"): NULL,
    ("MoeFinalizeRoutingV2", "x1Optional"): INNER_NULL,
    ("MoeFinalizeRoutingV2", "expertIdxOptional"): INNER_NULL,
    ("MoeFinalizeRoutingV2Grad", "expandedXOptional"): INNER_NULL,
    ("MoeFinalizeRoutingV2Grad", "expertIdxOptional"): INNER_NULL,
    ("MoeReRouting", "permutePerTokenScalesOut"): NULL,
}
TENSORS = [
    (name, parameter.name, parameter.kind)
    for name, signature in SIGNATURES.items()
    for parameter in signature.parameters
    if parameter.kind in ("tensor", "optional_tensor", "out", "optional_out")
]


@pytest.mark.parametrize("name, argument, kind", TENSORS)
def test_nulls(name: str, argument: str, kind: str) -> None:
    code = NULL if kind in ("tensor", "out") else NEEDED.get((name, argument))
    if code is not None:
        assert argument in call_refused(name, {argument: None}, code)


@pytest.mark.parametrize("name, argument, kind", TENSORS)
def test_dtypes_and_formats(name: str, argument: str, kind: str) -> None:
    good = GOOD[name]()[argument]
    if good is None:
        return
    for dtype in (torch.float64, torch.int16):
        code = TILING if argument == "softmaxResultOutOptional" else INVALID
        assert argument in call_refused(name, {argument: good.to(dtype)}, code)
    good.acl_format = 29
    if name == "MoeTokenPermuteWithRoutingMapGrad" or argument == "softmaxResultOutOptional":
        assert prepare(name, *(GOOD[name]() | {argument: good}).values())[0] == 0
    else:
        assert "aclFormat 29" in call_refused(name, {argument: good}, INVALID)
    for plain in (0, 2):
        good.acl_format = plain
        assert prepare(name, *(GOOD[name]() | {argument: good}).values())[0] == 0


@pytest.mark.parametrize("name, argument, kind", [t for t in TENSORS if "out" in t[2]])
def test_wrong_output_shapes_and_memory(name: str, argument: str, kind: str) -> None:
    arguments = GOOD[name]()
    good = arguments[argument]
    if good is None:
        return
    larger = poison(*(size + 1 for size in good.shape), dtype=good.dtype)
    code = TILING if name in OUTPUT_SHAPES_561002 else INVALID
    if name == "MoeInitRoutingV2Grad":
        code = INNER_NULL
    call_refused(name, {argument: larger}, code)
    overlapping = poison(1, dtype=good.dtype).expand(good.shape)
    call_refused(name, {argument: overlapping}, INVALID)
    for other, value in arguments.items():
        if isinstance(value, Tensor) and value.dtype is good.dtype and value.shape == good.shape and other != argument:
            memory = value.clone()
            assert "memory of its own" in call_refused(name, {argument: memory, other: memory}, INVALID)


OUTPUT_SHAPES_561002 = (
    "MoeTokenUnpermuteWithRoutingMapGrad",
    "MoeTokenPermute",
    "MoeTokenPermuteWithEp",
    "MoeGatingTopKSoftmax",
    "MoeGatingTopKSoftmaxV2",
)

P = "MoeTokenPermuteGrad"
B = "MoeGatingTopKBackward"
U = "MoeTokenUnpermuteWithRoutingMapGrad"
R = "MoeTokenPermuteWithRoutingMapGrad"
REFUSED: list[tuple[str, dict[str, Any], int]] = [
    (P, {"paddedMode": True}, INVALID),
    (P, {"permutedOutputGrad": torch.tensor(1.0)}, INVALID),
    (P, {"permutedOutputGrad": ones(6)}, INVALID),
    (P, {"sortedIndices": i32([[0, 1, 2, 3, 4, 5]])}, INVALID),
    (P, {"numTopk": 0}, INVALID),
    (P, {"numTopk": -1}, INVALID),
    (P, {"numTopk": 513}, INVALID),
    (P, {"numTopk": 4}, INVALID),
    (P, {"permutedOutputGrad": ones(7, 2)}, INVALID),
    (P, {"out": poison(3, 2, dtype=torch.float16)}, INVALID),
    (P, {"out": poison(6)}, INVALID),
    (B, {"xNorm": torch.empty(0, 4)}, INVALID),
    (B, {"xNorm": ones(12)}, INVALID),
    (B, {"xNorm": ones(3, 1)}, INVALID),
    (B, {"xNorm": ones(3, 2049)}, INVALID),
    (B, {"xNorm": ones(3, 4).half()}, INVALID),
    (B, {"gradY": ones(6)}, INVALID),
    (B, {"gradY": ones(2, 2)}, INVALID),
    (B, {"gradY": torch.empty(3, 0)}, INVALID),
    (B, {"gradY": ones(3, 5)}, INVALID),
    (B, {"expertIdx": i32([[0], [1], [2]])}, INVALID),
    (B, {"expertIdx": i32([0, 1, 2, 3, 0, 1])}, INVALID),
    (B, {"expertIdx": i32([[0, 1]])}, INVALID),
    (B, {"out": poison(3, 4, dtype=torch.float16)}, INVALID),
    (B, {"out": poison(3, 3)}, INVALID),
    (B, {"normType": 0}, TILING),
    (B, {"normType": 2}, TILING),
    (B, {"routedScalingFactor": math.nan}, INVALID),
    (B, {"eps": 1e300}, INVALID),
    (U, {"unpermutedTokensGrad": ones(6)}, TILING),
    (U, {"outIndex": i32([[0, 1, 2, 3, 4, 5]])}, TILING),
    (U, {"permuteTokenId": i32([0, 1])}, TILING),
    (U, {"routingMapOptional": torch.ones(12, dtype=torch.bool)}, TILING),
    (U, {"routingMapOptional": torch.ones(3, 5, dtype=torch.bool)}, TILING),
    (U, {"routingMapOptional": torch.ones(3, 4, dtype=torch.uint8)}, INVALID),
    (U, {"permutedTokensOptional": ones(12)}, TILING),
    (U, {"permutedTokensOptional": ones(5, 2)}, TILING),
    (U, {"permutedTokensOptional": ones(6, 2).half()}, INVALID),
    (U, {"probsOptional": ones(12)}, TILING),
    (U, {"probsOptional": ones(2, 4)}, TILING),
    (U, {"probsOptional": ones(3, 4).half(), "probsGradOutOptional": poison(3, 4).half()}, TILING),
    (U, {"probsGradOutOptional": poison(3, 4).half()}, INVALID),
    (U, {"permutedTokensGradOut": poison(5, 2)}, TILING),
    (U, {"permutedTokensGradOut": poison(7, 2), "permutedTokensOptional": ones(7, 2)}, TILING),
    (U, {"permutedTokensGradOut": poison(7, 2), "probsOptional": None}, TILING),
    (U, {"permutedTokensGradOut": poison(3, 2), "probsOptional": None, "dropAndPad": True}, TILING),
    (U, {"permutedTokensGradOut": poison(6), "probsOptional": None}, TILING),
    (U, {"outIndex": i32([0] * 7), "permuteTokenId": i32([0] * 7)}, TILING),
    (U, {"permutedTokensGradOut": poison(6, 3)}, TILING),
    (R, {"experts_num": 0}, INVALID),
    (R, {"experts_num": -4}, INVALID),
    (R, {"tokens_num": 0}, INVALID),
    (R, {"permutedTokensOutputGrad": ones(12)}, INVALID),
    (R, {"routingMapOptional": torch.ones(12, dtype=torch.bool)}, INVALID),
    (R, {"routingMapOptional": torch.ones(4, 3, dtype=torch.bool)}, INVALID),
    (R, {"permutedProbsOutputGradOptional": ones(6, 1)}, INVALID),
    (R, {"permutedProbsOutputGradOptional": ones(5)}, INVALID),
    (R, {"sortedIndices": i32([0, 1])}, INVALID),
    (R, {"tokens_num": 4}, INVALID),
    (R, {"dropAndPad": True}, INVALID),
    (R, {"tokenGradOut": poison(3, 2).half()}, INVALID),
    (R, {"probsGradOutOptional": poison(3, 4).half()}, INVALID),
    (R, {"permutedProbsOutputGradOptional": ones(6).half(), "probsGradOutOptional": poison(3, 4).half()}, INVALID),
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
    ("MoeTokenPermuteWithRoutingMap", {"routingMap": torch.ones(3, 4, 1, dtype=torch.bool)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"probsOptional": ones(3, 4, 1)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"probsOptional": ones(3, 5)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"probsOptional": ones(3, 4).half(), "permuteProbsOutOptional": poison(6).half()}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": ones(3, 2).half(), "permuteTokensOut": poison(6, 2).half()}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": ones(6)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": ones(4, 2)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": -1}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": 13}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": 9}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"probsOptional": None}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": 2, "permuteTokensOut": torch.empty(0, 2), "permuteProbsOutOptional": torch.empty(0), "sortedIndicesOut": empty_ids(0)}, INNER_NULL),
    ("MoeTokenPermuteWithRoutingMap", {"routingMap": torch.ones(3, 600, dtype=torch.bool), "probsOptional": ones(3, 600), "numOutTokens": 3 * 513, "permuteTokensOut": poison(1539, 2), "permuteProbsOutOptional": poison(1539), "sortedIndicesOut": empty_ids(1539)}, INNER_NULL),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "restoreShapeOptional": None}, NULL),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "routingMapOptional": None, "restoreShapeOptional": [3]}, INNER_NULL),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "routingMapOptional": None, "restoreShapeOptional": [3, 4]}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "routingMapOptional": None, "restoreShapeOptional": [2, 2]}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": ones(12)}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": ones(5, 2)}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"sortedIndices": i32([[0, 1, 2, 3, 4, 5]])}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"routingMapOptional": torch.ones(3, 5, dtype=torch.bool)}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": ones(12)}, INNER_NULL),
    ("MoeTokenUnpermuteWithRoutingMap", {"permuteProbs": poison(6).half()}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"unpermutedTokens": poison(3, 2).half()}, INVALID),
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
    ("MoeGatingTopKSoftmaxV2", {"renorm": 2}, TILING),
    ("MoeGatingTopKSoftmaxV2", {"renorm": -1}, TILING),
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
    *(("MoeComputeExpertTokens", {"numExperts": n}, TILING) for n in (0, -1, 2049)),
    ("MoeComputeExpertTokens", {"numExperts": 3}, INVALID),
    ("MoeComputeExpertTokens", {"sortedExperts": i32([[0, 0, 1]])}, TILING),
    ("MoeReRouting", {"expertTokenNumType": 0}, TILING),
    ("MoeReRouting", {"idxType": 2}, TILING),
    ("MoeReRouting", {"tokens": torch.empty(3, 0)}, TILING),
    ("MoeReRouting", {"tokens": ones(1, 1).expand(3, 16_384)}, TILING),
    ("MoeReRouting", {"tokens": ones(6)}, TILING),
    ("MoeReRouting", {"expertTokenNumPerRank": i32([1, 2])}, TILING),
    ("MoeReRouting", {"perTokenScalesOptional": ones(2)}, TILING),
    ("MoeReRouting", {"expertTokenNumOut": poison(2, dtype=torch.int64)}, INVALID),
]  # fmt: skip


@pytest.mark.parametrize("name, changes, code", REFUSED)
def test_refused(name: str, changes: dict[str, Any], code: int) -> None:
    call_refused(name, changes, code)


# What is not read without probs, as callers pass it, and what nobody could read.
UNREAD: dict[str, dict[str, tuple[Tensor, ...]]] = {
    "MoeTokenUnpermuteWithRoutingMap": {
        "routingMapOptional": (routing_map(), ones(1, dtype=torch.float64)),
        "permuteProbs": (poison(6), poison(2, dtype=torch.int64)),
    },
    "MoeTokenUnpermuteWithRoutingMapGrad": {
        "routingMapOptional": (routing_map(), ones(1, dtype=torch.float64)),
        "permutedTokensOptional": (ones(6, 2), ones(3, 3, 3).half()),
        "probsGradOutOptional": (poison(3, 4), poison(2, dtype=torch.int64)),
    },
}


@pytest.mark.parametrize("padded", (False, True), ids=("ragged", "padded"))
@pytest.mark.parametrize("name", UNREAD)
def test_without_probs_their_partners_are_not_read(name: str, padded: bool) -> None:
    """The result is that of nulls, and what comes with them stays as it is."""
    mode = {"paddedMode" if "paddedMode" in SIGNATURES[name].names else "dropAndPad": padded, "probsOptional": None}
    if padded:
        mode |= {key: i32([0, 2, 2, 1, 1, 0]) for key in ("sortedIndices", "permuteTokenId") if key in GOOD[name]()}
    tokens = {
        key: torch.arange(value.numel(), dtype=torch.float32).reshape(value.shape) + 1
        for key, value in GOOD[name]().items()
        if key in ("permutedTokens", "unpermutedTokensGrad")
    }
    nulls = GOOD[name]() | mode | tokens | dict.fromkeys(UNREAD[name])
    run(name, *nulls.values())
    for choice in (0, 1):
        unread = {key: values[choice].clone() for key, values in UNREAD[name].items()}
        before = {key: value.clone() for key, value in unread.items()}
        arguments = GOOD[name]() | mode | tokens | unread
        run(name, *arguments.values())
        for key, value in before.items():
            assert_same_bits(unread[key], value)
        for parameter in SIGNATURES[name].parameters:
            if "out" in parameter.kind and nulls[parameter.name] is not None:
                assert not nulls[parameter.name].isnan().any()
                assert_same_bits(arguments[parameter.name], nulls[parameter.name])


ORDER: list[tuple[str, dict[str, Any], int, str]] = [
    # operator 1: paddedMode, nulls, dtypes, shapes
    (P, {"paddedMode": True, "out": None}, INVALID, "paddedMode"),
    (P, {"permutedOutputGrad": ones(6, 2).to(torch.int8), "out": None}, NULL, "out"),
    (P, {"permutedOutputGrad": ones(6).to(torch.int8)}, INVALID, "int8"),
    # 2: nulls, dtypes, xNorm, gradY, expertIdx, out, normType
    (B, {"xNorm": ones(3, 4).half(), "out": None}, NULL, "out"),
    (B, {"xNorm": ones(3), "expertIdx": torch.zeros(3, 2)}, INVALID, "expertIdx"),
    (B, {"xNorm": ones(3, 1), "gradY": ones(6)}, INVALID, "xNorm"),
    (B, {"gradY": ones(6), "normType": 0}, INVALID, "gradY"),
    # 3: nulls and dtypes before what tiling finds
    (U, {"outIndex": None, "routingMapOptional": None}, NULL, "outIndex"),
    (U, {"outIndex": torch.zeros(6), "routingMapOptional": None}, INVALID, "outIndex"),
    (U, {"routingMapOptional": None, "unpermutedTokensGrad": ones(6)}, TILING, "routingMapOptional"),
    # 4: attributes, nulls, dtypes, ranks
    (R, {"experts_num": 0, "permutedTokensOutputGrad": None}, INVALID, "experts_num"),
    (R, {"experts_num": 0, "tokens_num": 0}, INVALID, "experts_num"),
    (R, {"tokens_num": 0, "sortedIndices": None}, INVALID, "tokens_num"),
    (R, {"sortedIndices": torch.zeros(6), "tokenGradOut": None}, NULL, "tokenGradOut"),
    (R, {"sortedIndices": torch.zeros(6), "routingMapOptional": None}, NULL, "routingMapOptional"),
    (R, {"sortedIndices": torch.zeros(6), "permutedTokensOutputGrad": ones(12)}, INVALID, "sortedIndices"),
    # 5: the documents' 561002 for paddedMode, behind nulls and dtypes
    ("MoeTokenPermute", {"paddedMode": True, "tokens": None}, NULL, "tokens"),
    ("MoeTokenPermute", {"paddedMode": True, "tokens": ones(3, 2).double()}, INVALID, "tokens"),
    # 6 and 7: paddedMode first
    ("MoeTokenUnpermute", {"paddedMode": True, "out": None}, INVALID, "paddedMode"),
    ("MoeTokenUnpermuteGrad", {"paddedMode": True, "sortedIndices": None}, INVALID, "paddedMode"),
    # 8: nulls, dtypes, ranks, numOutTokens, output rows
    ("MoeTokenPermuteWithRoutingMap", {"permuteProbsOutOptional": None, "tokens": torch.ones(3, 2).double()}, NULL, "permuteProbsOut"),
    ("MoeTokenPermuteWithRoutingMap", {"routingMap": torch.ones(12, dtype=torch.bool), "numOutTokens": -1}, INVALID, "routingMap"),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": ones(6), "numOutTokens": -1}, INVALID, "tokens"),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": -1, "permuteTokensOut": poison(5, 2)}, INVALID, "numOutTokens"),
    # 9: both null before dtypes; dtypes before ranks
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "restoreShapeOptional": None, "sortedIndices": torch.zeros(6)}, NULL, "restoreShapeOptional"),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": ones(12), "outIndex": poison(6)}, INVALID, "outIndex"),
    # 10: nulls, dtypes, then the rest
    ("MoeGatingTopK", {"k": 0, "x": ones(3, 4).double()}, INVALID, "x must"),
    ("MoeGatingTopK", {"x": ones(3, 4).double(), "outOut": None}, NULL, "outOut"),
]  # fmt: skip


@pytest.mark.parametrize("name, changes, code, what", ORDER)
def test_order_of_checks(name: str, changes: dict[str, Any], code: int, what: str) -> None:
    assert what in call_refused(name, changes, code)


def test_limits_of_the_unified_buffer() -> None:
    """Both formulas of operator 3 at the documents' 196,608 bytes and at another size."""

    def ragged(num_experts: int, dtype: torch.dtype, probs_dtype: torch.dtype) -> int:
        arguments = GOOD[U]() | {
            "unpermutedTokensGrad": ones(3, 2, dtype=dtype), "permutedTokensOptional": ones(6, 2, dtype=dtype),
            "permutedTokensGradOut": poison(6, 2, dtype=dtype),
            "routingMapOptional": torch.zeros(3, num_experts, dtype=torch.bool),
            "probsOptional": ones(3, num_experts, dtype=probs_dtype),
            "probsGradOutOptional": poison(3, num_experts, dtype=probs_dtype),
        }  # fmt: skip
        return prepare(U, *arguments.values())[0]

    # (196608 - 5 * E32 - 12 * 256) / 36 >= 1  <=>  E32 <= 38700.8
    assert ragged(38_688, torch.float32, torch.float32) == 0
    assert ragged(38_689, torch.float32, torch.float32) == TILING
    # (196608 - 3 * E32 - 10 * 256) / 24 >= 1  <=>  E32 <= 64674.7
    assert ragged(64_672, torch.bfloat16, torch.bfloat16) == 0
    assert ragged(64_673, torch.bfloat16, torch.bfloat16) == TILING

    def padded(hidden: int, dtype: torch.dtype) -> int:
        arguments = GOOD[U]() | {
            "unpermutedTokensGrad": ones(1, 1, dtype=dtype).expand(1, hidden), "outIndex": i32([0]),
            "permuteTokenId": i32([0]), "permutedTokensOptional": ones(1, 1, dtype=dtype).expand(1, hidden),
            "permutedTokensGradOut": torch.empty(1, hidden, dtype=dtype), "routingMapOptional": torch.ones(1, 1, dtype=torch.bool),
            "probsOptional": ones(1, 1, dtype=dtype), "probsGradOutOptional": poison(1, 1, dtype=dtype), "dropAndPad": True,
        }  # fmt: skip
        return prepare(U, *arguments.values())[0]

    for dtype, size in ((torch.float32, 4), (torch.float16, 2)):
        bound = 256 * (196_608 - 2080) // (8 + size)
        assert padded(bound, dtype) == 0
        assert padded(bound + 1, dtype) == TILING
    former = core.set_ub_bytes(4096)
    try:
        assert padded(256 * 2016 // 12, torch.float32) == 0
        assert padded(256 * 2016 // 12 + 1, torch.float32) == TILING
    finally:
        assert core.set_ub_bytes(former) == 4096


def test_topk_of_512_is_the_last() -> None:
    for topk, code in ((512, 0), (513, INNER_NULL)):
        rows = 2 * topk
        arguments = GOOD[R]() | {
            "permutedTokensOutputGrad": ones(rows, 1), "permutedProbsOutputGradOptional": None,
            "sortedIndices": torch.zeros(rows, dtype=torch.int32), "routingMapOptional": None, "tokens_num": 2,
            "tokenGradOut": poison(2, 1),
        }  # fmt: skip
        assert prepare(R, *arguments.values())[0] == code
        probs_code = 0 if topk == 512 else TILING
        arguments = GOOD[U]() | {
            "unpermutedTokensGrad": ones(2, 1), "outIndex": torch.zeros(rows, dtype=torch.int32),
            "permuteTokenId": torch.zeros(rows, dtype=torch.int32), "permutedTokensOptional": ones(rows, 1),
            "permutedTokensGradOut": poison(rows, 1), "routingMapOptional": torch.ones(2, 600, dtype=torch.bool),
            "probsOptional": ones(2, 600), "probsGradOutOptional": poison(2, 600),
        }  # fmt: skip
        assert prepare(U, *arguments.values())[0] == probs_code
        if topk == 513:  # K is bounded with probs only
            without = {
                name: None
                for name in ("routingMapOptional", "permutedTokensOptional", "probsOptional", "probsGradOutOptional")
            }
            assert prepare(U, *(arguments | without).values())[0] == 0


def test_capacity_over_tokens_is_refused() -> None:
    arguments = GOOD[U]() | {
        "outIndex": i32(range(16)), "permuteTokenId": i32([0] * 16), "permutedTokensOptional": ones(16, 2),
        "permutedTokensGradOut": poison(16, 2), "dropAndPad": True,
    }  # fmt: skip
    assert prepare(U, *arguments.values())[0] == TILING
    assert "C, the length of outIndex / E" in aclnn.aclGetRecentErrMsg()


# ---------------------------------------------------------------------------- phases, executors, arguments


def test_an_executor_runs_once() -> None:
    arguments = GOOD[P]()
    status, size, executor = prepare(P, *arguments.values())
    assert (status, size) == (0, 0)
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == 0
    arguments["out"].fill_(math.nan)
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INVALID
    assert "executor" in aclnn.aclGetRecentErrMsg()
    assert arguments["out"].isnan().all()


def test_a_repeatable_executor_runs_again_on_new_data() -> None:
    arguments = GOOD[P]()
    executor = prepare(P, *arguments.values())[2]
    executor.repeatable = True
    for value in (1.0, 3.0):
        arguments["permutedOutputGrad"].fill_(value)
        assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == 0
        same(arguments["out"], torch.full((3, 2), 2 * value))


def test_the_second_phase_refuses_what_is_not_its_own() -> None:
    executor = prepare(B, *GOOD[B]().values())[2]
    for workspace, size, given_executor, code in (
        (None, 0, None, NULL),
        (None, 16 * 2**20, executor, NULL),
        (1234, 16 * 2**20 - 1, executor, INVALID),
        (1234, -1, executor, INVALID),
    ):
        assert aclnn.aclnnMoeGatingTopKBackward(workspace, size, given_executor, None) == code
        assert aclnn.aclGetRecentErrMsg().startswith("aclnnMoeGatingTopKBackward: ")
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INVALID
    assert aclnn.aclnnMoeGatingTopKBackward(1234, 16 * 2**20, executor, None) == 0


def test_what_fails_later_is_a_status_too() -> None:
    arguments = GOOD[P]()
    executor = prepare(P, *arguments.values())[2]
    arguments["out"].resize_(1, 2)
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INNER
    assert "out" in aclnn.aclGetRecentErrMsg()


@pytest.mark.parametrize("name, argument, kind", TENSORS)
def test_a_resized_tensor_is_refused_before_anything_is_written(name: str, argument: str, kind: str) -> None:
    arguments = GOOD[name]()
    if arguments[argument] is None:
        return
    executor = prepare(name, *arguments.values())[2]
    arguments[argument].resize_([size + 1 for size in arguments[argument].shape])
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, Tensor)}
    assert getattr(aclnn, f"aclnn{name}")(None, 0, executor, None) == INNER
    assert f"{argument} must be what the first phase saw" in aclnn.aclGetRecentErrMsg()
    for key, value in before.items():
        assert_same_bits(arguments[key], value)


def test_a_resized_parameter_is_refused() -> None:
    arguments = GOOD[P]() | {"permutedOutputGrad": torch.nn.Parameter(ones(6, 2), requires_grad=False)}
    executor = prepare(P, *arguments.values())[2]
    arguments["permutedOutputGrad"].resize_(3, 2)
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INNER
    assert arguments["out"].isnan().all()


@pytest.mark.parametrize("error", (IndexError("index 7"), OverflowError("too large"), KeyError("x"), MemoryError()))
def test_every_failure_of_the_work_is_a_status(error: Exception) -> None:
    def fail() -> None:
        raise error

    executor = core.Executor(P, 0, fail, {})
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INNER
    assert aclnn.aclGetRecentErrMsg() == f"aclnn{P}: {str(error) or type(error).__name__}"


@pytest.mark.parametrize("size", (None, "0", 1.0))
def test_a_workspace_size_that_is_no_int(size: Any) -> None:
    arguments = GOOD[P]()
    executor = prepare(P, *arguments.values())[2]
    assert aclnn.aclnnMoeTokenPermuteGrad(None, size, executor, None) == INVALID
    assert "workspaceSize must be an int" in aclnn.aclGetRecentErrMsg()
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == 0


@pytest.mark.parametrize("digits", (400, 5000))
def test_numbers_beyond_every_type(digits: int) -> None:
    assert "eps" in call_refused(B, {"eps": 10**digits}, INVALID)
    assert "numTopk" in call_refused(P, {"numTopk": 10**digits}, INVALID)


def test_columns_of_one_buffer_are_apart() -> None:
    """Inputs and outputs may interleave in one allocation; where columns meet they may not."""
    table = torch.zeros(6, 8)
    table[:, :2] = 1
    run(P, table[:, :2], i32(range(6)), 2, False, table[:3, 2:4])
    same(table[:3, 2:4], torch.full((3, 2), 2.0))
    same(table[:, :2], ones(6, 2))
    numbers = i32([0, -77, 0, -77, 1, -77])
    run("MoeComputeExpertTokens", numbers[::2], 3, numbers[1::2])
    same(numbers, [0, 2, 0, 3, 1, 3])
    assert prepare(P, table[:, :2], i32(range(6)), 2, False, table[:3, 1:3])[0] == INVALID
    for a, b, shared in (
        (table[:, :2], table[:, 2:8], False),
        (table[:, 3], table[:, :3], False),
        (table[:, 3:4], table[:, 4:].view(torch.int32), False),
        (table[:, 3:], table[:, :3], False),
        (table[:3], table[3:], False),
        (table[:, :3], table[:, 2:], True),
        (table[:, 6], table[:, 4:], True),
        (table[1:, :3], table[:, 2:], True),
        (table[:, :4], table.view(12, 4), True),
        (table[:1].expand(6, 8), table[0], True),
        (table, table[2:2], False),
    ):
        assert check.overlap(a, b) is check.overlap(b, a) is shared


def test_the_format_of_a_parameter_is_read() -> None:
    grad = torch.nn.Parameter(ones(6, 2))
    grad.acl_format = 29  # type: ignore[attr-defined]
    assert "aclFormat 29" in call_refused(P, {"permutedOutputGrad": grad}, INVALID)
    grad.acl_format = 2  # type: ignore[attr-defined]
    run(P, *(GOOD[P]() | {"permutedOutputGrad": grad}).values())


def test_messages_belong_to_their_thread() -> None:
    call_refused(P, {"numTopk": 0}, INVALID)
    assert prepare(P, *(GOOD[P]() | {"numTopk": 0}).values())[0] == INVALID
    found = []

    def other() -> None:
        found.append(aclnn.aclGetRecentErrMsg())
        prepare(P, *(GOOD[P]() | {"numTopk": 600}).values())
        found.append(aclnn.aclGetRecentErrMsg())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == ["", "aclnnMoeTokenPermuteGrad: numTopk must be in 1..512; got 600"]
    assert aclnn.aclGetRecentErrMsg() == "aclnnMoeTokenPermuteGrad: numTopk must be in 1..512; got 0"


@pytest.mark.parametrize("changes", (
    {"numTopk": 2.0}, {"numTopk": "2"}, {"numTopk": 2**63}, {"paddedMode": 2}, {"paddedMode": None},
    {"permutedOutputGrad": [[1.0, 2.0]]}, {"sortedIndices": np.arange(6)[::-1]}, {"sortedIndices": np.arange(6).astype(">i4")},
    {"permutedOutputGrad": ones(6, 2).to_sparse()}, {"permutedOutputGrad": np.array(["a"])},
))  # fmt: skip
def test_arguments_that_no_c_program_can_give(changes: dict[str, Any]) -> None:
    arguments = GOOD[P]() | changes
    assert prepare(P, *arguments.values())[0] == INVALID
    assert next(iter(changes)) in aclnn.aclGetRecentErrMsg()


def test_arguments_by_name_and_missing_ones() -> None:
    arguments = GOOD[P]()
    status, _, executor = aclnn.aclnnMoeTokenPermuteGradGetWorkspaceSize(**arguments)
    assert status == 0
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor) == 0
    with pytest.raises(TypeError):
        aclnn.aclnnMoeTokenPermuteGradGetWorkspaceSize(arguments["out"])


def test_numpy_arrays() -> None:
    grad = np.arange(24, dtype=np.float16).reshape(6, 4)[:, ::2]
    grad.flags.writeable = False
    indices = np.array([5, 4, 3, 2, 1, 0], dtype=np.int32)
    out = np.full((3, 4), np.nan, dtype=np.float16)[:, ::2]
    run(P, grad, indices, np.int64(2), np.bool_(False), out)
    np.testing.assert_array_equal(out, grad[::-1].reshape(3, 2, 2).sum(1))
    out.flags.writeable = False
    assert prepare(P, grad, indices, 2, False, out)[0] == INVALID
    assert "writable" in aclnn.aclGetRecentErrMsg()


def test_tensors_that_record_gradients() -> None:
    grad = torch.ones(6, 2, requires_grad=True)
    out = torch.zeros(3, 2, requires_grad=True)
    run(P, grad, i32(range(6)), 2, False, out)
    same(out.detach(), torch.full((3, 2), 2.0))
    run(P, torch.nn.Parameter(torch.ones(6, 2)), i32(range(6)), 2, False, out)


@pytest.mark.parametrize("name", GOOD)
def test_strided_outputs_and_inputs(name: str) -> None:
    """Every second element of a wider buffer, and transposed ones: same result, nothing beside it touched."""
    plain = GOOD[name]()
    run(name, *plain.values(), workspace=16 * 2**20 if name in SIXTEEN_MIB else 0)
    for layout in ("rows", "columns", "transposed"):
        strided, buffers = {}, []
        for parameter, value in zip(SIGNATURES[name].parameters, GOOD[name]().values(), strict=True):
            if isinstance(value, Tensor) and value.ndim:
                value, buffer = lay_out(value, layout)
                if "out" in parameter.kind:
                    buffers.append((buffer, value))
            strided[parameter.name] = value
        run(name, *strided.values(), workspace=16 * 2**20 if name in SIXTEEN_MIB else 0)
        for parameter in SIGNATURES[name].parameters:
            if "out" in parameter.kind and plain[parameter.name] is not None:
                same(strided[parameter.name], plain[parameter.name])
        for buffer, view in buffers:
            view.fill_(0)
            left = torch.isnan(buffer) if buffer.dtype.is_floating_point else buffer == -77
            assert int(left.sum()) == buffer.numel() - view.numel(), f"{name}: written beside the output"


def lay_out(value: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The same values, spread over a larger poisoned buffer."""
    fill = torch.nan if value.dtype.is_floating_point else -77
    shape = list(value.shape)
    if value.dtype is torch.bool:
        return value, value
    if layout == "rows" or value.ndim == 1:
        buffer = torch.full([shape[0] * 2 + 1, *(size + 3 for size in shape[1:])], fill, dtype=value.dtype)
        view = buffer[1::2][tuple(slice(0, size) for size in shape)]
    elif layout == "columns":
        buffer = torch.full([*shape[:-1], 2 * shape[-1] + 1], fill, dtype=value.dtype)
        view = buffer[..., 1::2][..., : shape[-1]]
    else:
        buffer = torch.full([shape[-1] + 1, *shape[1:-1], shape[0] + 2], fill, dtype=value.dtype)
        view = buffer.transpose(0, -1)[tuple(slice(0, size) for size in shape)]
    view.copy_(value)
    return view, buffer


# ---------------------------------------------------------------------------- drawn inputs, plain Python

MIXTURES = (*((dtype, dtype) for dtype in FLOATS), (torch.bfloat16, torch.float32))
SEEDS = st.integers(0, 2**31 - 1)
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.sampled_from((1, 3, 8, 70)))  # T, K, E, H


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def rows_by_expert(ids: list[int]) -> list[int]:
    """Row of each slot in the stable order of the ids; -1 for a negative id."""
    order = sorted((s for s in range(len(ids)) if ids[s] >= 0), key=lambda s: ids[s])
    rows = [-1] * len(ids)
    for row, slot in enumerate(order):
        rows[slot] = row
    return rows


def gathered(rows: Tensor, row_of_slot: list[int]) -> Tensor:
    """float64 [S, H]: each slot's row, zeros where it has none."""
    result = torch.zeros(len(row_of_slot), *rows.shape[1:], dtype=torch.float64)
    for slot, row in enumerate(row_of_slot):
        if 0 <= row < len(rows):
            result[slot] = rows[row].double()
    return result


def placed(values: Tensor, row_of_slot: list[int], num_rows: int) -> Tensor:
    """float64 [R, ...]: each slot's value at its row, a later slot over an earlier one, zeros elsewhere."""
    result = torch.zeros(num_rows, *values.shape[1:], dtype=torch.float64)
    for slot, row in enumerate(row_of_slot):
        if 0 <= row < num_rows:
            result[row] = values[slot].double()
    return result


def within(rows: list[int], first: int, last: int) -> list[int]:
    return [row - first if first <= row < last else -1 for row in rows]


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


def draw_map(generator: torch.Generator, num_tokens: int, num_experts: int) -> Tensor:
    dense = torch.rand(1, generator=generator)
    chosen = torch.rand(num_tokens, num_experts, generator=generator) < dense
    return (
        chosen
        if seed_bit(generator)
        else chosen.to(torch.int8) * integers(generator, 1, 4, 1, num_experts).to(torch.int8)
    )


def seed_bit(generator: torch.Generator) -> bool:
    return bool(torch.randint(0, 2, (), generator=generator))


def table_of(routing_map: Tensor, topk: int) -> tuple[list[int], list[int]]:
    """Row and expert of every slot of the padded table."""
    chosen = (routing_map != 0).tolist()
    num_tokens, num_experts = routing_map.shape
    row, number = 0, {}
    for expert in range(num_experts):
        for token in range(num_tokens):
            if chosen[token][expert]:
                number[token, expert] = row
                row += 1
    rows, experts = [], []
    for token in range(num_tokens):
        own = [expert for expert in range(num_experts) if chosen[token][expert]][:topk]
        own += [-1] * (topk - len(own))
        experts += own
        rows += [number.get((token, expert), -1) for expert in own]
    return rows, experts


def probs_of_slots(probs: Tensor, experts: list[int], topk: int) -> Tensor:
    values = [float(probs[s // topk, e]) if e >= 0 else 0.0 for s, e in enumerate(experts)]
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=60)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.booleans())
def test_routing_map_family_ragged(
    sizes: tuple[int, int, int, int], seed: int, mixture: tuple[torch.dtype, torch.dtype], with_probs: bool
) -> None:
    """Operators 8, 9, 3 and 4 fed by each other, tokens with fewer and with more than K experts."""
    num_tokens, topk, num_experts, hidden = sizes
    topk = min(topk, num_experts)
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    routing_map = draw_map(generator, num_tokens, num_experts)
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    given_probs, given_map = (probs, routing_map) if with_probs else (None, None)
    table, experts = table_of(routing_map, topk)
    slots = num_tokens * topk
    count = slots
    weights = probs_of_slots(probs, experts, topk) if with_probs else torch.ones(slots, dtype=torch.float64)

    # 8
    rows, indices = poison(count, hidden, dtype=dtype), empty_ids(slots)
    row_probs = poison(count, dtype=probs_dtype) if with_probs else None
    num_out = slots + int(integers(generator, 0, num_tokens))  # what does not divide is cut
    num_out = min(num_out, num_tokens * num_experts)
    run("MoeTokenPermuteWithRoutingMap", x, routing_map, given_probs, num_out, False, rows, row_probs, indices)
    same(indices, table)
    same(rows, placed(x.repeat_interleave(topk, 0), table, count))
    if row_probs is not None:
        same(row_probs, placed(weights, table, count))

    # 9
    y = normal(generator, count, hidden, dtype=dtype)
    out, out_index, token_ids = poison(num_tokens, hidden, dtype=dtype), empty_ids(slots), empty_ids(slots)
    slot_probs = poison(slots, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenUnpermuteWithRoutingMap",
        y, indices, given_map, given_probs, False, [num_tokens, hidden], out, out_index, token_ids, slot_probs,
    )  # fmt: skip
    slot_rows = gathered(y, table)
    close(out, (slot_rows * weights[:, None]).reshape(num_tokens, topk, hidden).sum(1))
    same(out_index, table)
    same(token_ids, [s // topk for s in range(slots)])
    if slot_probs is not None:
        same(slot_probs, weights)

    # 3
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    spread_grad = grad.double().repeat_interleave(topk, 0)
    rows_out = poison(count, hidden, dtype=dtype)
    probs_out = poison(num_tokens, num_experts, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        grad, out_index, token_ids, given_map, y if with_probs else None, given_probs, False, None, rows_out, probs_out,
    )  # fmt: skip
    close(rows_out, placed(spread_grad * weights[:, None], table, count))
    if probs_out is not None:
        dots = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
        for slot, expert in enumerate(experts):
            if expert >= 0:
                dots[slot // topk, expert] = (slot_rows[slot] * spread_grad[slot]).sum()
        close(probs_out, dots)

    # 4
    tokens_out = poison(num_tokens, hidden, dtype=dtype)
    probs_out = poison(num_tokens, num_experts, dtype=probs_dtype)
    row_grad = normal(generator, count, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenPermuteWithRoutingMapGrad",
        y, row_grad, indices, routing_map, num_experts, num_tokens, False, tokens_out, probs_out, workspace=16 * 2**20,
    )  # fmt: skip
    close(tokens_out, slot_rows.reshape(num_tokens, topk, hidden).sum(1))
    if row_grad is None:
        assert probs_out.isnan().all()
        return
    expected = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    used = 0
    for expert in range(num_experts):
        for token in range(num_tokens):
            if routing_map[token, expert]:
                if used < count:
                    expected[token, expert] = float(row_grad[used])
                used += 1
    same(probs_out, expected)


@settings(max_examples=60)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.booleans(), st.booleans())
def test_routing_map_family_padded(
    sizes: tuple[int, int, int, int], seed: int, mixture: tuple[torch.dtype, torch.dtype], with_probs: bool, wild: bool
) -> None:
    """The same four with a capacity; `wild` feeds token ids that are out of range and repeated."""
    num_tokens, capacity, num_experts, hidden = sizes
    capacity = min(capacity, num_tokens)
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    routing_map = draw_map(generator, num_tokens, num_experts)
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    given_probs = probs if with_probs else None
    count = num_experts * capacity

    # 8
    tokens = []
    for expert in range(num_experts):
        column = [bool(one) for one in routing_map[:, expert]]
        tokens += sorted(range(num_tokens), key=lambda t: not column[t])[:capacity]
    rows, indices = poison(count, hidden, dtype=dtype), empty_ids(count)
    row_probs = poison(count, dtype=probs_dtype) if with_probs else None
    num_out = min(count + int(integers(generator, 0, num_experts)), num_tokens * num_experts)
    run("MoeTokenPermuteWithRoutingMap", x, routing_map, given_probs, num_out, True, rows, row_probs, indices)
    same(indices, tokens)
    same(rows, x[tokens])
    if row_probs is not None:
        same(row_probs, [probs[t, i // capacity] for i, t in enumerate(tokens)])

    if wild:
        indices = integers(generator, -1, num_tokens + 1, count)
        tokens = indices.tolist()
    known = [(i, t) for i, t in enumerate(tokens) if 0 <= t < num_tokens]
    weight = [
        float(probs[t, i // capacity]) if with_probs and 0 <= t < num_tokens else 1.0 for i, t in enumerate(tokens)
    ]

    # 9
    y = normal(generator, count, hidden, dtype=dtype)
    out, out_index, token_ids = poison(num_tokens, hidden, dtype=dtype), empty_ids(count), empty_ids(count)
    row_probs = poison(count, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenUnpermuteWithRoutingMap",
        y, indices, routing_map if with_probs else None, given_probs, True, [num_tokens, hidden], out, out_index,
        token_ids, row_probs,
    )  # fmt: skip
    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    for i, t in known:
        expected[t] += weight[i] * y[i].double()
    close(out, expected)
    ordered = sorted(known, key=lambda pair: pair[1])
    empty = [-1] * (count - len(ordered))
    same(out_index, [i for i, _ in ordered] + empty)
    same(token_ids, [t for _, t in ordered] + empty)
    if row_probs is not None:
        same(row_probs, [weight[i] if 0 <= t < num_tokens else 0.0 for i, t in enumerate(tokens)])

    # 3
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    rows_out = poison(count, hidden, dtype=dtype)
    probs_out = poison(num_tokens, num_experts, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        grad, out_index, token_ids, routing_map if with_probs else None, y if with_probs else None, given_probs, True,
        [num_tokens, hidden], rows_out, probs_out,
    )  # fmt: skip
    expected = torch.zeros(count, hidden, dtype=torch.float64)
    dots = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    for i, t in known:
        expected[i] = weight[i] * grad[t].double()
        dots[t, i // capacity] = (y[i].double() * grad[t].double()).sum()  # the last row of a pair stays
    close(rows_out, expected)
    if probs_out is not None:
        close(probs_out, dots)

    # 4
    tokens_out = poison(num_tokens, hidden, dtype=dtype)
    probs_out = poison(num_tokens, num_experts, dtype=probs_dtype)
    row_grad = normal(generator, count, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenPermuteWithRoutingMapGrad",
        y, row_grad, indices, routing_map, num_experts, num_tokens, True, tokens_out, probs_out, workspace=16 * 2**20,
    )  # fmt: skip
    expected, stored = torch.zeros(num_tokens, hidden, dtype=torch.float64), torch.zeros(num_tokens, num_experts)
    for i, t in known:
        expected[t] += y[i].double()
        if row_grad is not None:
            stored[t, i // capacity] = row_grad[i].float()
    close(tokens_out, expected)
    if row_grad is not None:
        same(probs_out, stored)


@settings(max_examples=40)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.booleans())
def test_unpermute_with_routing_map_grad_of_any_indices(
    sizes: tuple[int, int, int, int], seed: int, mixture: tuple[torch.dtype, torch.dtype], padded: bool
) -> None:
    """Indices that name rows twice, not at all, or out of range."""
    num_tokens, topk, num_experts, hidden = sizes
    topk = min(topk, num_tokens if padded else num_experts)
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    slots = topk * (num_experts if padded else num_tokens)
    routing_map = draw_map(generator, num_tokens, num_experts)
    out_index = integers(generator, -3, slots + 3, slots)
    token_ids = integers(generator, -1, num_tokens + 1, slots)
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    rows = normal(generator, slots, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    rows_out, probs_out = poison(slots, hidden, dtype=dtype), poison(num_tokens, num_experts, dtype=probs_dtype)
    run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        grad, out_index, token_ids, routing_map, rows, probs, padded, None, rows_out, probs_out,
    )  # fmt: skip
    expected = torch.zeros(slots, hidden, dtype=torch.float64)
    dots = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    _, experts = table_of(routing_map, topk)
    entries = list(enumerate(out_index.tolist()))
    if padded:  # slots are the entries grouped by token
        entries = [(i, r) for i, r in entries if 0 <= token_ids[i] < num_tokens]
        entries.sort(key=lambda entry: int(token_ids[entry[0]]))
    for i, row in entries:
        token = int(token_ids[i]) if padded else i // topk
        valid = 0 <= row < slots
        expert = (row // topk if valid else -1) if padded else experts[i]
        if valid:
            expected[row] = (float(probs[token, expert]) if expert >= 0 else 0.0) * grad[token].double()
        if expert >= 0:
            dots[token, expert] = (rows[row].double() * grad[token].double()).sum() if valid else 0.0
    close(rows_out, expected)
    close(probs_out, dots)


@settings(max_examples=40)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.booleans(), st.booleans())
def test_unpermute_with_routing_map_grad_of_fewer_rows_than_slots(
    sizes: tuple[int, int, int, int],
    seed: int,
    mixture: tuple[torch.dtype, torch.dtype],
    with_probs: bool,
    cut: bool,
) -> None:
    """As many rows as the table names; with `cut` one less, and the slot whose row is gone adds nothing."""
    num_tokens, topk, num_experts, hidden = sizes
    topk = min(topk, num_experts)
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    routing_map = torch.rand(num_tokens, num_experts, generator=generator).argsort(1) < topk
    routing_map &= torch.rand(num_tokens, num_experts, generator=generator) < 0.7
    table, experts = table_of(routing_map, topk)
    count = max(sum(row >= 0 for row in table) - cut, 0)
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    rows = normal(generator, count, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    rows_out, probs_out = poison(count, hidden, dtype=dtype), poison(num_tokens, num_experts, dtype=probs_dtype)
    given_probs = probs if with_probs else None
    run(U, grad, i32(table), i32(table), routing_map, rows, given_probs, False, [1], rows_out, probs_out)
    expected = torch.zeros(count, hidden, dtype=torch.float64)
    dots = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    for slot, row in enumerate(table):
        token = slot // topk
        if 0 <= row < count:
            weight = float(probs[token, experts[slot]]) if with_probs else 1.0
            expected[row] = weight * grad[token].double()
            dots[token, experts[slot]] = (rows[row].double() * grad[token].double()).sum()
    close(rows_out, expected)
    if with_probs:
        close(probs_out, dots)
    else:
        assert probs_out.isnan().all()


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
    run(B, x, grad, ids, 1, 1, scale, 1e-3, out, workspace=16 * 2**20)
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


def test_gating_topk_takes_the_smaller_expert_of_equal_ones() -> None:
    x = torch.zeros(2, 8)
    y, ids, scores = poison(2, 3), empty_ids(2, 3), poison(2, 8)
    run("MoeGatingTopK", x, None, 3, 2, 4, 0, 0, 1, False, 1.0, 1e-20, y, ids, scores)
    same(ids, [[0, 1, 2]] * 2)


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
        count, shape = num_experts * capacity, (num_experts, capacity, hidden)
    else:
        row_of_slot = rows_by_expert(flat)
        count = min(active, slots) if active else slots
        shape = (count, hidden)
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
    arguments = grad, indices, y, scales, ids, bias, int(drop), active, num_experts, capacity, rows_out, scales_out
    run("MoeFinalizeRoutingV2Grad", *arguments)
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


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 7))
def test_compute_expert_tokens(experts: list[int], num_experts: int) -> None:
    experts = sorted(experts)
    out = empty_ids(num_experts)
    run("MoeComputeExpertTokens", i32(experts), num_experts, out)
    same(out, [sum(e <= expert for e in experts) for expert in range(num_experts)])


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


def test_re_routing_where_the_lengths_do_not_add_up() -> None:
    """Tokens behind the last chunk have no row: zero rows, index -1."""
    tokens, rows = ones(4, 2), poison(4, 2)
    indices, counts = empty_ids(4), empty_ids(1)
    run("MoeReRouting", tokens, i32([[1], [2]]), None, 1, 0, rows, None, indices, counts)
    same(indices, [0, 1, 2, -1])
    same(rows, [[1.0, 1.0]] * 3 + [[0.0, 0.0]])


# ---------------------------------------------------------------------------- empty tensors

EMPTY: list[tuple[str, dict[str, Any]]] = [
    (P, {"permutedOutputGrad": torch.empty(0, 2), "sortedIndices": i32([]), "out": torch.empty(0, 2)}),
    (P, {"permutedOutputGrad": torch.empty(6, 0), "out": torch.empty(3, 0)}),
    (P, {"permutedOutputGrad": torch.empty(0, 2)}),
    (R, {"permutedTokensOutputGrad": torch.empty(6, 0), "tokenGradOut": torch.empty(3, 0)}),
    (R, {"permutedTokensOutputGrad": torch.empty(0, 2), "sortedIndices": i32([]), "permutedProbsOutputGradOptional": torch.empty(0)}),
    (R, {"permutedTokensOutputGrad": torch.empty(0, 2), "sortedIndices": i32([]), "permutedProbsOutputGradOptional": torch.empty(0), "dropAndPad": True}),
    (U, {"unpermutedTokensGrad": torch.empty(3, 0), "permutedTokensOptional": torch.empty(6, 0), "permutedTokensGradOut": torch.empty(6, 0)}),
    (U, {"outIndex": i32([]), "permuteTokenId": i32([]), "permutedTokensOptional": torch.empty(0, 2), "permutedTokensGradOut": torch.empty(0, 2)}),
    ("MoeTokenPermute", {"tokens": torch.empty(0, 2), "indices": torch.empty(0, 2, dtype=torch.int32), "permuteTokensOut": torch.empty(0, 2), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenPermute", {"tokens": torch.empty(3, 0), "permuteTokensOut": torch.empty(6, 0)}),
    ("MoeTokenPermute", {"indices": torch.empty(3, 0, dtype=torch.int32), "permuteTokensOut": torch.empty(0, 2), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenPermuteWithEp", {"tokens": torch.empty(3, 0), "permuteTokensOut": torch.empty(4, 0)}),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": torch.empty(0, 2), "routingMap": torch.empty(0, 4, dtype=torch.bool), "probsOptional": torch.empty(0, 4), "numOutTokens": 0, "permuteTokensOut": torch.empty(0, 2), "permuteProbsOutOptional": torch.empty(0), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenPermuteWithRoutingMap", {"routingMap": torch.empty(3, 0, dtype=torch.bool), "probsOptional": torch.empty(3, 0), "numOutTokens": 0, "dropAndPad": True, "permuteTokensOut": torch.empty(0, 2), "permuteProbsOutOptional": torch.empty(0), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": 3, "dropAndPad": True, "permuteTokensOut": torch.empty(0, 2), "permuteProbsOutOptional": torch.empty(0), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenUnpermuteWithRoutingMap", {"sortedIndices": i32([]), "permutedTokens": torch.empty(0, 2), "outIndex": empty_ids(0), "permuteTokenId": empty_ids(0), "permuteProbs": torch.empty(0)}),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": torch.empty(6, 0), "unpermutedTokens": torch.empty(3, 0)}),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": torch.empty(0, 2)}),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": torch.empty(0, 2), "probsOptional": None, "routingMapOptional": None}),
    ("MoeTokenUnpermute", {"permutedTokens": torch.empty(0, 2)}),
    ("MoeTokenUnpermute", {"permutedTokens": torch.empty(0, 2), "sortedIndices": i32([]), "probsOptional": torch.empty(0, 2), "out": torch.empty(0, 2)}),
    ("MoeTokenUnpermute", {"permutedTokens": torch.empty(0, 2), "sortedIndices": i32([]), "probsOptional": torch.empty(3, 0)}),
    ("MoeInitRoutingV2", {"x": torch.empty(0, 2), "expertIdx": torch.empty(0, 2, dtype=torch.int32), "expandedXOut": torch.empty(0, 2), "expandedRowIdxOut": empty_ids(0)}),
    ("MoeInitRoutingV2Grad", {"gradExpandedX": torch.empty(0, 2), "expandedRowIdx": i32([]), "out": torch.empty(0, 2)}),
    ("MoeFinalizeRoutingV2", {"expandedX": torch.empty(6, 0), "x1Optional": torch.empty(3, 0), "x2Optional": torch.empty(3, 0), "biasOptional": torch.empty(4, 0), "out": torch.empty(3, 0)}),
    ("MoeFinalizeRoutingV2Grad", {"gradY": torch.empty(0, 2), "expandedRowIdx": i32([]), "expandedXOptional": torch.empty(0, 2), "scalesOptional": torch.empty(0, 2), "expertIdxOptional": torch.empty(0, 2, dtype=torch.int32), "gradExpandedXOut": torch.empty(0, 2), "gradScalesOut": torch.empty(0, 2)}),
    ("MoeComputeExpertTokens", {"sortedExperts": i32([])}),
    ("MoeReRouting", {"tokens": torch.empty(0, 2), "perTokenScalesOptional": torch.empty(0), "expertTokenNumPerRank": torch.zeros(2, 2, dtype=torch.int32), "permuteTokensOut": torch.empty(0, 2), "permutePerTokenScalesOut": torch.empty(0), "permuteTokenIdxOut": empty_ids(0)}),
]  # fmt: skip


@pytest.mark.parametrize("name, changes", EMPTY)
def test_empty_tensors(name: str, changes: dict[str, Any]) -> None:
    """Workspace 0 and zeros in what still has elements; operator 3 has no H to sum over and gives zeros too."""
    arguments = GOOD[name]() | changes
    run(name, *arguments.values())
    for parameter, value in zip(SIGNATURES[name].parameters, arguments.values(), strict=True):
        if "out" in parameter.kind and value is not None:
            same(value, torch.zeros_like(value))


def test_padded_unpermute_without_a_hidden_size_still_gives_the_indices() -> None:
    out_index, token_ids, probs = empty_ids(4), empty_ids(4), poison(4)
    run(
        "MoeTokenUnpermuteWithRoutingMap",
        torch.empty(4, 0), i32([2, 0, 1, 0]), routing_map(), ones(3, 4) * 0.5, True, None, torch.empty(3, 0), out_index,
        token_ids, probs,
    )  # fmt: skip
    same(out_index, [1, 3, 2, 0])
    same(token_ids, [0, 0, 1, 2])
    same(probs, [0.5] * 4)


# ---------------------------------------------------------------------------- decided contradictions


def test_a_weight_of_zero_does_not_read_its_row() -> None:
    out = poison(1, 2)
    rows = f32([[math.inf, math.nan], [1.0, 2.0]])
    run("MoeTokenUnpermute", rows, i32([0, 1]), f32([[0.0, 2.0]]), False, None, out)
    same(out, [[2.0, 4.0]])


@pytest.mark.parametrize("dtype", FLOATS)
def test_gathers_copy_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0, math.inf, -math.inf, math.nan, 1e-7]]).to(dtype)
    rows, indices = poison(2, 6, dtype=dtype), empty_ids(2)
    run("MoeTokenPermute", x, i32([[1, 0]]), 0, False, rows, indices)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    torch.testing.assert_close(rows.view(bits), x.view(bits).expand(2, 6), rtol=0, atol=0)


def test_indices_beyond_every_range() -> None:
    """No index value reads or writes outside: the ends of int32 name nothing."""
    ends = [2**31 - 1, -(2**31), 1065353216, -1, 6, 0]
    out = poison(3, 2)
    run(P, ones(6, 2), i32(ends), 2, False, out)
    same(out, [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    rows_out = poison(6, 2)
    run("MoeTokenUnpermuteGrad", None, ones(6, 2), i32(ends), None, False, None, rows_out, None)
    same(rows_out, [[1.0, 1.0]] + [[0.0, 0.0]] * 5)
    rows, indices = poison(6, 2), empty_ids(6)
    run(
        "MoeTokenPermute",
        ones(3, 2),
        torch.tensor([[2**62, -(2**62)], [2**32, 0], [-1, 2**31]]),
        0,
        False,
        rows,
        indices,
    )
    same(indices, [3, -1, 2, 0, -1, 1])
    same(rows, [[1.0, 1.0]] * 4 + [[0.0, 0.0]] * 2)


def test_the_deterministic_answer_is_the_only_one() -> None:
    """A thousand rows for one token, several times: the same bits."""
    rows, indices = torch.randn(4096, 33, generator=generator_of(0)), torch.zeros(4096, dtype=torch.int32)
    rows = (rows * 64).round() / 64  # exact in any order, but for a sum that loses a row
    found = []
    for _ in range(3):
        out = poison(4, 33)
        run(R, rows, None, indices, None, 1, 4, True, out, None, workspace=16 * 2**20)
        found.append(out)
    same(found[1], found[0])
    same(found[2], found[0])
    close(found[0][:1], rows.double().sum(0, keepdim=True))


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

    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, ids.long(), True)
    dense = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    plan = moeroute.plan_from_routing_map(routing_map, topk=topk, num_rows=slots, **with_reference)
    row_probs = poison(slots, dtype=probs_dtype)
    run("MoeTokenPermuteWithRoutingMap", x, routing_map, dense, slots, False, rows, row_probs, indices)
    expected = moeroute.permute(x, plan, **with_reference), moeroute.permute_weights(dense, plan, **with_reference)
    assert_same_bits((rows, row_probs, indices), (*expected, plan.row_of_slot))
    token_ids, slot_probs = empty_ids(slots), poison(slots, dtype=probs_dtype)
    arguments = y, indices, routing_map, dense, False, None, out, empty_ids(slots), token_ids, slot_probs
    run("MoeTokenUnpermuteWithRoutingMap", *arguments)
    assert_same_bits(out, moeroute.unpermute(y, plan, dense, **with_reference))
    probs_out = poison(num_tokens, num_experts, dtype=probs_dtype)
    arguments = x, indices, token_ids, routing_map, y, dense, False, None, rows_out, probs_out
    run("MoeTokenUnpermuteWithRoutingMapGrad", *arguments)
    expected = moeroute.unpermute_backward(x, y, plan, dense, accumulate=False, **with_reference)
    assert_same_bits((rows_out, probs_out), expected)
    arguments = y, row_probs, indices, routing_map, num_experts, num_tokens, False, out, probs_out
    run(R, *arguments, workspace=16 * 2**20)
    assert_same_bits(out, moeroute.permute_backward(y, plan, **with_reference))
    assert_same_bits(probs_out, moeroute.permute_weights_backward(row_probs, plan, **with_reference))

    gating = moeroute.gating_topk(
        dense, topk, score="sigmoid", scaling_factor=2.5, weights_dtype=probs_dtype, **with_reference
    )
    weights, chosen, scores = (
        poison(num_tokens, topk, dtype=probs_dtype),
        empty_ids(num_tokens, topk),
        poison(num_tokens, num_experts),
    )
    run("MoeGatingTopK", dense, None, topk, 1, 1, 0, 0, 1, True, 2.5, 1e-20, weights, chosen, scores)
    assert_same_bits((weights, chosen, scores), tuple(gating))
    logits_grad = poison(num_tokens, num_experts, dtype=probs_dtype)
    run(B, scores, probs, chosen, 0, 1, 2.5, 1e-20, logits_grad, workspace=16 * 2**20)
    expected = moeroute.gating_topk_backward(
        gating.scores, probs, gating.expert_ids, score="sigmoid", renormalize=True, scaling_factor=2.5, **with_reference
    )
    assert_same_bits(logits_grad, expected)


# ---------------------------------------------------------------------------- shapes of upstream's system tests

FEW = 64 * 2**20
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def skip_large(size: int) -> None:
    """More than 64 MiB of tensors are for those who ask for them."""
    if size > FEW and not os.environ.get("MOEROUTE_LARGE"):
        pytest.skip(f"{size >> 20} MiB of tensors: MOEROUTE_LARGE=1 runs it")


@pytest.mark.parametrize("num_tokens, hidden, topk", (
    (1, 7, 1), (1, 17, 1), (15, 1, 1), (1, 9, 39), (8, 7, 1), (9, 9, 1), (256, 20, 1), (19, 8, 275), (17, 19, 306),
    (21, 1, 264), (13107, 991, 209), (13107, 827, 419), (13107, 879, 428), (13107, 957, 383),
))  # fmt: skip
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


@pytest.mark.parametrize("num_tokens, num_experts, topk, dtype, scale", (
    (2048, 192, 10, BF16, 1.0), (4096, 192, 10, BF16, 1.0), (2048, 256, 8, BF16, 1.0), (4096, 256, 8, BF16, 1.0),
    (4096, 384, 8, BF16, 1.0), (2048, 384, 8, F32, 1.0), (8192, 192, 10, BF16, 1.0), (8192, 192, 10, F32, 1.0),
    (2048, 193, 10, F16, 1.0), (1023, 191, 9, F16, 0.1), (8193, 383, 9, BF16, 2.5), (1023, 2000, 9, F32, 0.1),
    (8193, 191, 9, F16, 2.5), (1023, 383, 9, BF16, 2.5), (8193, 191, 9, F32, 0.1), (512_000, 2, 1, BF16, 1.0),
    (1, 2048, 2048, BF16, 1.0),
))  # fmt: skip
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
    run(B, scores, grad, ids, 0, 1, scale, 1e-20, out, workspace=16 * 2**20)
    exact = x.double().requires_grad_()
    chosen = exact.sigmoid().gather(1, ids.long())
    weights = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale
    (expected,) = torch.autograd.grad(weights, exact, grad.double())
    close(y, weights.detach())
    close(out, expected)


def draw_ragged(
    generator: torch.Generator, num_tokens: int, num_experts: int, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A map with 1..K ones in each row, and the padded tables [T, K] of rows and experts, -1 where unused."""
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
    counts = integers(generator, 1, topk + 1, num_tokens).long()[:, None]
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(num_experts).expand_as(order))
    routing_map = ranks < counts
    experts = torch.argsort(~routing_map, dim=1, stable=True)[:, :topk]
    number = (routing_map.t().reshape(-1).cumsum(0) - 1).reshape(num_experts, num_tokens).t()
    used = torch.arange(topk) < counts
    return routing_map, torch.where(used, number.gather(1, experts), -1), torch.where(used, experts, -1)


@pytest.mark.parametrize("num_tokens, hidden, slots, num_experts, padded, dtype, probs_dtype", (
    (44, 3020, 264, 141, False, F32, F32), (34, 4248, 204, 40, False, F32, F32), (94, 3618, 282, 55, False, BF16, BF16),
    (99, 1373, 1089, 100, False, F32, F32), (756, 1534, 360, 60, True, F16, F16), (120, 4482, 372, 31, True, F32, F32),
    (1904, 5716, 1904, 204, False, BF16, F32), (2625, 6869, 612, 102, True, BF16, F32), (2617, 7153, 539, 49, True, F16, F16),
    (1262, 5912, 2524, 214, False, F32, F32), (2712, 6528, 40_680, 37, False, BF16, F32), (3566, 6880, 42_792, 93, False, F32, F32),
    (3313, 6456, 49_695, 182, False, F32, F32), (3959, 6128, 55_426, 123, False, BF16, BF16),
))  # fmt: skip
@pytest.mark.parametrize("with_probs", (True, False))
def test_system_shapes_of_unpermute_with_routing_map_grad(
    num_tokens: int, hidden: int, slots: int, num_experts: int, padded: bool, dtype: torch.dtype, probs_dtype: torch.dtype,
    with_probs: bool,
) -> None:  # fmt: skip
    skip_large((num_tokens + 2 * slots) * hidden * (4 if dtype is F32 else 2))
    generator = generator_of(slots)
    if padded:
        capacity = slots // num_experts
        tokens = torch.rand(num_experts, num_tokens, generator=generator).argsort(1)[:, :capacity].sort(1).values
        routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.int8).t().scatter(1, tokens, 1).t()
        token_ids, row_of_slot = tokens.reshape(-1).sort(stable=True)
        experts = row_of_slot // capacity
    else:
        topk = slots // num_tokens
        routing_map, table, experts = draw_ragged(generator, num_tokens, num_experts, topk)
        row_of_slot, experts = table.reshape(-1), experts.reshape(-1)
        token_ids = torch.arange(slots) // topk
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    rows, probs = (
        normal(generator, slots, hidden, dtype=dtype),
        normal(generator, num_tokens, num_experts, dtype=probs_dtype),
    )
    rows_out, probs_out = poison(slots, hidden, dtype=dtype), poison(num_tokens, num_experts, dtype=probs_dtype)
    optional = (routing_map, rows, probs) if with_probs else (None, None, None)
    arguments = (
        grad,
        row_of_slot.int(),
        token_ids.int(),
        *optional,
        padded,
        [1],
        rows_out,
        probs_out if with_probs else None,
    )
    run(U, *arguments)

    live = (row_of_slot >= 0).nonzero().flatten()
    unnamed = torch.ones(slots, dtype=torch.bool).index_fill_(0, row_of_slot[live], False)
    same(rows_out[unnamed], torch.zeros(int(unnamed.sum()), hidden))
    for some in live[:: max(len(live) // 500, 1)].split(100):
        left, token = row_of_slot[some], token_ids[some]
        weight = probs[token, experts[some]].double()[:, None] if with_probs else 1.0
        close(rows_out[left], weight * grad[token].double())
        if with_probs:
            dots = (rows[left].double() * grad[token].double()).sum(1)
            torch.testing.assert_close(
                probs_out[token, experts[some]].double(), dots, rtol=1.01 * ROUNDING[probs_dtype], atol=1e-3
            )
    if with_probs:
        same(probs_out[routing_map == 0], torch.zeros(int((routing_map == 0).sum())))


@pytest.mark.parametrize("rows, hidden, num_tokens, num_experts, padded, dtype, probs_dtype", (
    (23, 24, 81, 23, True, BF16, F32), (198, 14, 18, 20, False, F32, F32), (234, 16, 78, 39, True, F16, F16),
    (36, 204, 36, 19, False, F32, F32), (28, 237, 28, 97, False, F32, F32), (325, 33, 65, 52, False, F32, F32),
    (672, 357, 42, 65, False, F16, F16), (620, 397, 124, 24, False, BF16, BF16), (484, 497, 121, 88, False, F32, F32),
    (296, 820, 74, 125, False, F16, F16), (1328, 984, 43, 83, True, F32, F32), (1440, 967, 106, 90, True, F16, F16),
    (2048, 746, 128, 25, False, BF16, F32), (1695, 959, 113, 99, False, F16, F16),
))  # fmt: skip
def test_system_shapes_of_permute_with_routing_map_grad(
    rows: int,
    hidden: int,
    num_tokens: int,
    num_experts: int,
    padded: bool,
    dtype: torch.dtype,
    probs_dtype: torch.dtype,
) -> None:
    generator = generator_of(rows)
    grad, probs_grad = normal(generator, rows, hidden, dtype=dtype), normal(generator, rows, dtype=probs_dtype)
    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    probs_expected = torch.zeros(num_tokens, num_experts, dtype=probs_dtype)
    if padded:
        capacity = rows // num_experts
        indices = torch.rand(num_experts, num_tokens, generator=generator).argsort(1)[:, :capacity].reshape(-1)
        routing_map = torch.ones(num_tokens, num_experts, dtype=torch.int8)
        expected.index_add_(0, indices, grad.double())
        probs_expected[indices, torch.arange(rows) // capacity] = probs_grad
    else:
        topk = rows // num_tokens
        routing_map, table, experts = draw_ragged(generator, num_tokens, num_experts, topk)
        indices = table.reshape(-1)
        live = indices >= 0
        expected.index_add_(0, (torch.arange(rows) // topk)[live], grad[indices[live]].double())
        probs_expected[(torch.arange(rows) // topk)[live], experts.reshape(-1)[live]] = probs_grad[indices[live]]
    out, probs_out = poison(num_tokens, hidden, dtype=dtype), poison(num_tokens, num_experts, dtype=probs_dtype)
    arguments = grad, probs_grad, indices.int(), routing_map, num_experts, num_tokens, padded, out, probs_out
    run(R, *arguments, workspace=16 * 2**20)
    close(out, expected)
    same(probs_out, probs_expected)
