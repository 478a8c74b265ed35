"""Permute and unpermute by expert index and by routing map, with the gradients that torch_npu has as functions.

Letters: N tokens, H hidden size, K experts of a token, E experts, M rows of a permuted matrix. `sorted_indices` is
`row_of_slot` of a plan, and with `drop_and_pad` its `token_of_row`.
"""

import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import LARGEST
from moeroute.interop.torch_npu.arguments import dtype_of, npu_function, refused
from moeroute.ops.indices.op import plan_from_row_of_slot, plan_from_token_ids
from moeroute.ops.init_routing import first_rows, sorted_plan
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.rows.op import combine
from moeroute.ops.weights.op import slot_weights
from moeroute.permutation import (
    permute,
    permute_weights,
    permute_weights_backward,
    unpermute,
    unpermute_backward,
)
from moeroute.plan import RoutingPlan

# ---------------------------------------------------------------------------- by expert index


@npu_function
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Token copies in the stable order of their expert ids.

    Args:
        tokens: [N, H], of any dtype.
        indices: [N, K] or [N] expert ids of any integer dtype.
        num_out_tokens: None or 0: all N * K rows; above 0 the first so many; below 0 as many fewer at the end.
        padded_mode: must be False.

    Returns:
        (rows [M, H], sorted_indices int32 [N * K]): the row of each slot, M and more for one that was cut. The rows
        are differentiable in the tokens.
    """
    name = "npu_moe_token_permute"
    _unpadded(name, padded_mode)
    _matrix(name, "tokens", tokens)
    num_tokens = tokens.shape[0]
    check.tensor(name, "indices", indices)
    if indices.ndim not in (1, 2) or indices.shape[0] != num_tokens:
        raise refused(name, "indices", f"[N, K] or [N] with N = {num_tokens}, as tokens", list(indices.shape))
    plan = sorted_plan(indices)
    slots = indices.numel()
    given = num_out_tokens or 0
    num_rows = min(given, slots) if given > 0 else max(slots + given, 0)
    return permute(tokens, first_rows(plan, num_rows)), plan.row_of_slot


@npu_function
def npu_moe_token_permute_grad(
    tokens: Tensor,
    grad_permuted_tokens: Tensor,
    indices: Tensor,
    sorted_indices: Tensor,
    padded_mode: bool = False,
) -> Tensor:
    """The gradient [N, H] of `npu_moe_token_permute`: the sum of the rows of each token, in the dtype of the tokens."""
    name = "npu_moe_token_permute_grad"
    _unpadded(name, padded_mode)
    _matrix(name, "tokens", tokens)
    return _permute_grad(name, grad_permuted_tokens, sorted_indices, tokens.shape[0]).to(tokens.dtype)


@npu_function
def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: int | torch.dtype,
    num_topK: int,
    padded_mode: bool = False,
) -> Tensor:
    """As `npu_moe_token_permute_grad`, from the number, dtype and K of the tokens instead of the tensors."""
    name = "npu_moe_token_permute_grad_v2"
    _unpadded(name, padded_mode)
    if sorted_indices.numel() != tokens_size_0 * num_topK:
        wanted = f"[N * K] with N * K = {tokens_size_0} * {num_topK}"
        raise refused(name, "sorted_indices", wanted, list(sorted_indices.shape))
    grad = _permute_grad(name, grad_permuted_tokens, sorted_indices, tokens_size_0)
    return grad.to(dtype_of(name, "tokens_dtype", tokens_dtype))


@npu_function
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """The rows back at their tokens: out[t] = sum over k of probs[t, k] * permuted_tokens[sorted_indices[t * K + k]].

    Args:
        permuted_tokens: [M, H] float.
        sorted_indices: [N * K] int32 or int64; a row outside [0, M) adds nothing.
        probs: [N, K] of any float dtype. None: K = 1, every slot comes back alone.
        padded_mode: must be False.
        restore_shape: not needed.

    Returns:
        [N, H] in the dtype of permuted_tokens: a sum in float32, rounded once. Differentiable in both.
    """
    return _unpermute("npu_moe_token_unpermute", permuted_tokens, sorted_indices, probs, padded_mode)


@npu_function
def _npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`npu_moe_token_unpermute`, and the rows that its gradient needs: None without probs."""
    tokens = _unpermute("_npu_moe_token_unpermute", permuted_tokens, sorted_indices, probs, padded_mode)
    return tokens, None if probs is None else permuted_tokens


@npu_function
def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `npu_moe_token_unpermute`: (rows [M, H], 0 where nobody reads one; probs [N, K] or None)."""
    name = "npu_moe_token_unpermute_grad"
    _unpadded(name, padded_mode)
    _matrix(name, "permuted_tokens", permuted_tokens)
    rows = None if probs is None else permuted_tokens
    return _unpermute_grad(name, grad_unpermuted_tokens, sorted_indices, permuted_tokens.shape[0], rows, probs)


@npu_function
def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: int | torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `npu_moe_token_unpermute_grad`; permuted_tokens is needed with probs only."""
    name = "npu_moe_token_unpermute_grad_v2"
    _unpadded(name, padded_mode)
    dtype = dtype_of(name, "permuted_tokens_dtype", permuted_tokens_dtype)
    if probs is not None and permuted_tokens is None:
        raise refused(name, "permuted_tokens", "given with probs", None)
    rows = None if probs is None else permuted_tokens
    grad, grad_probs = _unpermute_grad(
        name, grad_unpermuted_tokens, sorted_indices, permuted_tokens_size_0, rows, probs
    )
    return grad.to(dtype), grad_probs


# ---------------------------------------------------------------------------- by routing map


@npu_function
def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Token copies in expert order, from a map of the chosen pairs.

    Args:
        tokens: [N, H], of any dtype.
        routing_map: [N, E] bool or int8.
        probs: [N, E] of any float dtype, or None.
        num_out_tokens: None is N. Without `drop_and_pad` there are M = num_out_tokens // N * N rows, the first so many
            of the map; with it C = num_out_tokens // E rows an expert: its tokens, then other tokens in order.
        drop_and_pad: see above.

    Returns:
        (rows [M, H], their probs [M] or None, sorted_indices int32 [M]): the row of each pair, token by token; with
        `drop_and_pad` the token of each row. The first two are differentiable.
    """
    name = "npu_moe_token_permute_with_routing_map"
    _matrix(name, "tokens", tokens)
    num_tokens, num_experts = _map(name, routing_map)
    if tokens.shape[0] != num_tokens:
        raise refused(name, "tokens", f"[N, H] with N = {num_tokens}, as routing_map", list(tokens.shape))
    if probs is not None:
        check.shaped(name, "probs", probs, (num_tokens, num_experts))
    wanted = num_tokens if num_out_tokens is None else num_out_tokens
    if wanted < 0:
        raise refused(name, "num_out_tokens", "at least 0", wanted)
    if drop_and_pad:
        capacity = wanted // max(num_experts, 1)
        if capacity > num_tokens:
            raise refused(name, "num_out_tokens", f"at most N * E = {num_tokens * num_experts}", wanted)
        plan = plan_from_routing_map(routing_map, fill=True, capacity=capacity)
        sorted_indices = plan.token_of_row
    else:
        plan, sorted_indices = _ragged(name, routing_map, wanted // max(num_tokens, 1) * num_tokens)
    row_probs = None if probs is None else permute_weights(probs, plan)
    return permute(tokens, plan), row_probs, sorted_indices


@npu_function
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `npu_moe_token_permute_with_routing_map`: (tokens [N, H], probs [N, E] or None)."""
    name = "npu_moe_token_permute_with_routing_map_grad"
    _matrix(name, "permuted_token_out_grad", permuted_token_out_grad)
    check.shaped(name, "routing_map", routing_map, (tokens_num, experts_num))
    num_rows = permuted_token_out_grad.shape[0]
    if drop_and_pad:
        plan = plan_from_token_ids(sorted_indices, tokens_num, num_rows=num_rows, num_experts=max(experts_num, 1))
    else:
        plan = plan_from_routing_map(routing_map, num_rows=num_rows)
    grad = combine(permuted_token_out_grad, plan)
    if probs_grad is None:
        return grad, None
    return grad, permute_weights_backward(probs_grad.reshape(-1), plan, num_experts=experts_num)


@npu_function
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """The rows back at their tokens, added up and with probs weighted.

    Args:
        permuted_tokens: [M, H] float.
        sorted_indices: as `npu_moe_token_permute_with_routing_map` returned it; without `drop_and_pad` K = M // N of
            each token, where -1 is a slot without a row.
        restore_shape: (N, H).
        probs: [N, E] of any float dtype, or None.
        routing_map: [N, E]; needed with probs, except with `drop_and_pad`. One without K experts for each token needs
            -1 in sorted_indices.
        drop_and_pad: see `npu_moe_token_permute_with_routing_map`.

    Returns:
        [N, H] in the dtype of permuted_tokens. Differentiable in rows and probs.
    """
    name = "npu_moe_token_unpermute_with_routing_map"
    return _unpermute_map(name, permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)[0]


@npu_function
def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`npu_moe_token_unpermute_with_routing_map` with what its gradient takes: (tokens, out_index, token ids, probs).

    With `drop_and_pad` the token ids are sorted_indices in stable order and out_index is that order; else both are
    sorted_indices. The probs are those of the slots, or of the rows with `drop_and_pad`. Only the tokens are
    differentiable.
    """
    name = "_npu_moe_token_unpermute_with_routing_map"
    tokens, plan, weights = _unpermute_map(
        name, permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad
    )
    with torch.no_grad():
        if drop_and_pad:
            if probs is not None and plan.num_rows:
                weights = permute_weights(probs, plan)
            return tokens, plan.row_of_slot, plan.token_of_slot, weights
        order = sorted_indices.to(torch.int32, copy=True)
        return tokens, order, order.clone(), None if weights is None else weights.detach().clone()


@npu_function
def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `npu_moe_token_unpermute_with_routing_map`: (rows [M, H], probs [N, E] or None), of one type.

    With `drop_and_pad` row out_index[i] belongs to token permuted_token_id[i]; else out_index is sorted_indices.
    """
    name = "npu_moe_token_unpermute_with_routing_map_grad"
    _matrix(name, "unpermuted_tokens_grad", unpermuted_tokens_grad)
    check.shaped(name, "out_index", out_index, (None,))
    if probs is not None:
        _matrix(name, "probs", probs)
    num_tokens, num_rows = unpermuted_tokens_grad.shape[0], out_index.shape[0]
    num_experts = None if probs is None else probs.shape[-1]
    if probs is not None and permuted_tokens is None:
        raise refused(name, "permuted_tokens", "given with probs", None)
    if drop_and_pad:
        plan = plan_from_token_ids(
            permuted_token_id, num_tokens, rows=out_index, num_rows=num_rows, num_experts=num_experts or None
        )
    else:
        plan = _table(name, out_index, num_tokens, num_rows, routing_map, probs)
    if probs is None:
        return permute(unpermuted_tokens_grad, plan), None
    return _weighted_grads(unpermuted_tokens_grad, permuted_tokens, plan, probs, unpermuted_tokens_grad.dtype)


# ---------------------------------------------------------------------------- plans


def _ragged(name: str, routing_map: Tensor, num_rows: int) -> tuple[RoutingPlan, Tensor]:
    """The first rows of a map, and the row of each of their pairs, token by token."""
    plan = plan_from_routing_map(routing_map)
    if plan.num_rows < num_rows:
        wanted = f"at least M = {num_rows} marks, num_out_tokens rounded down to a multiple of N,"
        raise refused(name, "routing_map", f"a map of {wanted}", f"{plan.num_rows} marks")
    if plan.num_rows == num_rows:
        return plan, plan.row_of_slot
    plan = plan_from_routing_map(routing_map, num_rows=num_rows)
    return plan, plan.row_of_slot[plan.row_of_slot >= 0]


def _table(
    name: str, rows: Tensor, num_tokens: int, num_rows: int, routing_map: Tensor | None, probs: Tensor | None
) -> RoutingPlan:
    """The plan of a table [N * K] of rows, with the experts of its slots where there are probs to weigh them."""
    if num_tokens and rows.numel() % num_tokens:
        raise refused(name, "sorted_indices", f"[N * K] with N = {num_tokens}", list(rows.shape))
    experts = None
    if routing_map is not None and num_tokens:
        topk = rows.numel() // num_tokens
        marks = plan_from_routing_map(routing_map, topk=topk)
        experts = marks.expert_of_slot
        assert experts is not None  # noqa: S101 - for the type checker: the plan of a map has them
        # A token with fewer than K marks has none in its last slot; where no token has, the number tells of more.
        short = topk > 0 and int(experts[topk - 1 :: topk].min()) < 0
        if (short or marks.num_rows != rows.numel()) and not bool((rows < 0).any()):
            raise refused(name, "routing_map", f"of K = {topk} experts for each token", "another number for some")
        experts = None if probs is None else experts
    elif probs is not None and num_tokens:
        raise refused(name, "routing_map", "given with probs", None)
    return plan_from_row_of_slot(rows, num_tokens, num_rows, expert_of_slot=experts)


# ---------------------------------------------------------------------------- steps


def _permute_grad(name: str, grad: Tensor, sorted_indices: Tensor, num_tokens: int) -> Tensor:
    _matrix(name, "grad_permuted_tokens", grad)
    return unpermute(grad, plan_from_row_of_slot(sorted_indices, num_tokens, grad.shape[0]))


def _unpermute(name: str, rows: Tensor, sorted_indices: Tensor, probs: Tensor | None, padded: bool) -> Tensor:
    _unpadded(name, padded)
    _matrix(name, "permuted_tokens", rows)
    plan = _slots(name, sorted_indices, rows.shape[0], probs)
    return unpermute(rows, plan, _beside(rows, probs))


def _unpermute_grad(
    name: str, grad: Tensor, sorted_indices: Tensor, num_rows: int, rows: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    _matrix(name, "grad_unpermuted_tokens", grad)
    plan = _slots(name, sorted_indices, num_rows, probs)
    if probs is None:
        return permute(grad, plan), None
    return _weighted_grads(grad, rows, plan, probs, probs.dtype)


def _beside(rows: Tensor, probs: Tensor | None) -> Tensor | None:
    """The probs as the core takes them: float64 rows have float64 weights."""
    return probs.to(torch.float64) if probs is not None and rows.dtype is torch.float64 else probs


def _weighted_grads(
    grad: Tensor, rows: Tensor | None, plan: RoutingPlan, probs: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    rows = None if rows is None else rows.to(grad.dtype)
    grad_rows, grad_probs = unpermute_backward(grad, rows, plan, _beside(grad, probs))
    return grad_rows, None if grad_probs is None else grad_probs.to(dtype)


def _slots(name: str, sorted_indices: Tensor, num_rows: int, probs: Tensor | None) -> RoutingPlan:
    """The plan of [N * K] rows with N and K as the probs have them, K = 1 without."""
    check.tensor(name, "sorted_indices", sorted_indices)
    slots = sorted_indices.numel()
    if probs is None:
        return plan_from_row_of_slot(sorted_indices.reshape(-1), slots, num_rows)
    _matrix(name, "probs", probs)
    if slots != probs.numel():
        raise refused(name, "sorted_indices", f"[N * K] with N * K = {probs.numel()}, as probs", slots)
    return plan_from_row_of_slot(sorted_indices.reshape(probs.shape), probs.shape[0], num_rows)


def _unpermute_map(
    name: str,
    rows: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> tuple[Tensor, RoutingPlan, Tensor | None]:
    """The tokens, the plan and the weights of its slots."""
    _matrix(name, "permuted_tokens", rows)
    if len(restore_shape) != 2 or restore_shape[1] != rows.shape[1]:
        raise refused(name, "restore_shape", f"(N, H) with H = {rows.shape[1]}", list(restore_shape))
    num_tokens, num_rows = restore_shape[0], rows.shape[0]
    if probs is not None:
        check.shaped(name, "probs", probs, (num_tokens, None))
    if routing_map is not None:
        check.shaped(name, "routing_map", routing_map, (num_tokens, None if probs is None else probs.shape[1]))
    if drop_and_pad:
        num_experts = None if probs is None or not num_rows else probs.shape[1]
        if num_experts is not None and num_rows % num_experts:
            raise refused(name, "permuted_tokens", f"[E * C, H] with E = {num_experts}, as probs", list(rows.shape))
        check.shaped(name, "sorted_indices", sorted_indices, (num_rows,))
        plan = plan_from_token_ids(sorted_indices, num_tokens, num_rows=num_rows, num_experts=num_experts)
    else:
        plan = _table(name, sorted_indices, num_tokens, num_rows, routing_map, probs)
    if probs is None or not plan.num_slots:
        return combine(rows, plan), plan, None if probs is None else probs.new_zeros(0)
    weights = slot_weights(probs, plan)
    return combine(rows, plan, _beside(rows, weights)), plan, weights


# ---------------------------------------------------------------------------- checks


def _unpadded(name: str, padded_mode: bool) -> None:
    if padded_mode:
        raise refused(name, "padded_mode", "False", padded_mode)


def _matrix(name: str, argument: str, tensor: Tensor) -> None:
    check.shaped(name, argument, tensor, (None, None))


def _map(name: str, routing_map: Tensor) -> tuple[int, int]:
    """N and E of a map."""
    check.shaped(name, "routing_map", routing_map, (None, None))
    num_tokens, num_experts = routing_map.shape
    if num_tokens * num_experts > LARGEST:
        raise refused(name, "routing_map", f"of at most {LARGEST} entries", [num_tokens, num_experts])
    return num_tokens, num_experts
