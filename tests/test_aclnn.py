"""The aclnn calls against the documents: worked numbers, every error row, and plain Python on drawn inputs.

Expectations are written here, in float64 and Python lists; none comes from the package.
"""

import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeroute import aclnn
from moeroute.aclnn import core
from moeroute.aclnn.signatures import SIGNATURES
from moeroute.testing import assert_close_to_exact

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


def close(actual: Tensor, expected: Any) -> None:
    assert_close_to_exact(actual, torch.as_tensor(expected, dtype=torch.float64))


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

    rows_out, probs_out = poison(3, 2), poison(1, 3)
    ones = torch.ones(1, 2), i32([0, 1, 2]), torch.ones(3, 2), torch.ones(1, 3)
    run("MoeTokenUnpermuteWithEpGrad", *ones, False, None, None, 3, rows_out, probs_out)
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
    run("MoeInitRoutingV2", f32(X34), i32([[1, 1], [2, 1], [1, -1]]), 0, 2, 3, 1, 0, True, expanded, indices, None, before)
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
def test_finalize_routing_without_a_row_still_adds_the_bias(mode: int) -> None:
    rows = torch.full((2, 1, 2) if mode in (1, 3) else (2, 2), 10.0)
    out = poison(2, 2)
    scales, experts = f32([[2.0], [3.0]]), i32([[1], [9]])
    bias = f32([[100.0, 200.0], [1.0, 2.0]])
    run("MoeFinalizeRoutingV2", rows, i32([-1, 0]), None, None, bias, scales, experts, mode, out)
    same(out, [[2.0, 4.0], [30.0, 30.0]])  # expert 9 has no bias


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
    outputs = [value for p, value in zip(SIGNATURES[name].parameters, arguments.values(), strict=True) if "out" in p.kind]
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
            assert not value.isnan().any() and not (value == -77).any(), f"{parameter.name} has unwritten elements"


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
    ("MoeFinalizeRoutingV2Grad", "gradScalesOut"): NULL,
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
    "MoeTokenUnpermute",
    "MoeTokenUnpermuteWithEp",
    "MoeTokenUnpermuteWithEpGrad",
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
    (U, {"probsOptional": None}, INVALID),
    (U, {"probsOptional": None, "routingMapOptional": None}, INVALID),
    (U, {"probsOptional": None, "routingMapOptional": None, "permutedTokensOptional": None}, INVALID),
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
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None}, INVALID),
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
    ("MoeTokenPermuteWithEpGrad", {"numTopk": 0}, INVALID),
    ("MoeTokenPermuteWithEpGrad", {"numTopk": 4}, INVALID),
    ("MoeTokenPermuteWithEpGrad", {"rangeOptional": [1, 4]}, INVALID),
    ("MoeTokenPermuteWithEpGrad", {"permutedTokensOutputGrad": ones(7, 2), "rangeOptional": None}, INVALID),
    ("MoeTokenPermuteWithEpGrad", {"permutedProbsOutputGradOptional": ones(6)}, INVALID),
    ("MoeTokenUnpermuteWithEp", {"paddedMode": True}, INVALID),
    ("MoeTokenUnpermuteWithEp", {"numTopk": 3}, TILING),
    ("MoeTokenUnpermuteWithEp", {"probsOptional": None, "numTopk": 4}, TILING),
    ("MoeTokenUnpermuteWithEp", {"probsOptional": None, "numTopk": 513}, TILING),
    ("MoeTokenUnpermuteWithEp", {"rangeOptional": [1, 4]}, TILING),
    ("MoeTokenUnpermuteWithEpGrad", {"paddedMode": True}, INVALID),
    ("MoeTokenUnpermuteWithEpGrad", {"topkNum": 3}, TILING),
    ("MoeTokenUnpermuteWithEpGrad", {"topkNum": 513, "probsOptional": None}, TILING),
    ("MoeTokenUnpermuteWithEpGrad", {"rangeOptional": [1, 4]}, TILING),
    *(
        ("MoeInitRoutingV2", changes, INNER_NULL)
        for changes in (
            {"x": ones(6)}, {"expertIdx": torch.zeros(3, 2, 1, dtype=torch.int32)}, {"expertIdx": i32([[0, 1]])},
            {"activeNum": -1}, {"expertCapacity": -1}, {"expertNum": -1}, {"expertNum": 0}, {"dropPadMode": 2},
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
    ("MoeTokenPermute", {"paddedMode": True, "tokens": ones(3, 2).to(torch.int8)}, INVALID, "tokens"),
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
            without = {name: None for name in ("routingMapOptional", "permutedTokensOptional", "probsOptional", "probsGradOutOptional")}
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
