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
