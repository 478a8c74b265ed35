"""The permute half: tokens to expert order, and its gradients.

Every operator has the same rungs: nulls, dtypes, shapes and limits, outputs, work. Where upstream's code
tests in another order the operator has that order, and says so.
"""

import math

import torch
from torch import Tensor

from moeroute.aclnn.core import (
    FLOATS,
    INNER_NULLPTR,
    MAPS,
    MAX_INT8_SLOTS,
    MAX_SLOTS,
    MAX_TOPK,
    PARAM_NULLPTR,
    TILING,
    WORKSPACE,
    Refusal,
    Work,
    absent,
    apart,
    between,
    deliver,
    divides,
    phases,
    probs_typed,
    ranked,
    required,
    row_range,
    shaped,
    target_of,
    typed,
    unpadded,
    wrong,
    wrong_shape,
    zero_filled,
)
from moeroute.ops.indices.op import plan_from_row_of_slot, plan_from_token_ids
from moeroute.ops.init_routing import first_rows
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.rows.op import combine, spread
from moeroute.permutation import permute_weights, permute_weights_backward

# ---------------------------------------------------------------------------- MoeTokenPermute


def _permute_checked(
    tokens: Tensor, indices: Tensor, paddedMode: bool, permuteTokensOut: Tensor, sortedIndicesOut: Tensor
) -> tuple[int, int, int]:
    """T, K and the elements of a token; nulls are checked before."""
    typed("tokens", tokens, *FLOATS, torch.int8)
    typed("indices", indices, torch.int32, torch.int64)
    typed("permuteTokensOut", permuteTokensOut, tokens.dtype)
    typed("sortedIndicesOut", sortedIndicesOut, torch.int32)
    unpadded("paddedMode", paddedMode, TILING)
    if tokens.ndim < 2:
        raise wrong_shape("tokens", "at least 2-dimensional", tokens, TILING)
    ranked("indices", indices, 1, 2, status=TILING)
    num_tokens, topk = indices.shape[0], indices.shape[1] if indices.ndim == 2 else 1
    if tokens.shape[0] != num_tokens:
        raise wrong_shape("indices", f"[T, K] or [T] with T = {tokens.shape[0]}, as tokens", indices, TILING)
    between("K of indices", topk, 0, MAX_TOPK, TILING)
    between("T * K", num_tokens * topk, 0, MAX_INT8_SLOTS if tokens.dtype is torch.int8 else MAX_SLOTS - 1, TILING)
    if permuteTokensOut.ndim < 2:
        raise wrong_shape("permuteTokensOut", "at least 2-dimensional", permuteTokensOut, TILING)
    shaped("sortedIndicesOut", sortedIndicesOut, (num_tokens * topk,), "[T * K]", TILING)
    columns = math.prod(tokens.shape[1:])
    if math.prod(permuteTokensOut.shape[1:]) != columns:
        raise wrong_shape("permuteTokensOut", f"[M, ...] with {columns} elements a row", permuteTokensOut, TILING)
    return num_tokens, topk, columns


def _moe_token_permute(
    tokens: Tensor,
    indices: Tensor,
    numOutTokens: int,
    paddedMode: bool,
    permuteTokensOut: Tensor,
    sortedIndicesOut: Tensor,
) -> tuple[int, Work]:
    """Token copies in the stable order of their expert ids; sortedIndices is the row of each slot.

    numOutTokens > 0 keeps the first rows, 0 all, below 0 leaves out as many at the end. Tokens may be int8, at
    most 10,240 slots of them.
    """
    required(tokens=tokens, indices=indices, permuteTokensOut=permuteTokensOut, sortedIndicesOut=sortedIndicesOut)
    num_tokens, topk, columns = _permute_checked(tokens, indices, paddedMode, permuteTokensOut, sortedIndicesOut)
    slots = num_tokens * topk
    if tokens.dtype is torch.int8 and numOutTokens > MAX_INT8_SLOTS:
        raise wrong("numOutTokens", f"at most {MAX_INT8_SLOTS} with int8 tokens", numOutTokens, TILING)
    rows = min(numOutTokens, slots) if numOutTokens > 0 else max(numOutTokens + slots, 0)
    if permuteTokensOut.shape[0] != rows:
        raise wrong_shape("permuteTokensOut", f"[M, ...] with M = {rows}", permuteTokensOut, TILING)
    apart({"permuteTokensOut": permuteTokensOut, "sortedIndicesOut": sortedIndicesOut}, tokens, indices)
    if tokens.numel() == 0 or indices.numel() == 0:
        return zero_filled(permuteTokensOut, sortedIndicesOut)

    def work() -> None:
        plan = plan_from_expert_ids(indices, None, num_rows=slots, out=sortedIndicesOut)
        target = target_of(permuteTokensOut, rows, columns)
        spread(tokens.reshape(num_tokens, columns), first_rows(plan, rows), out=target)
        deliver(target, permuteTokensOut)

    return 0, work


aclnnMoeTokenPermuteGetWorkspaceSize, aclnnMoeTokenPermute = phases("MoeTokenPermute", _moe_token_permute)


def _moe_token_permute_with_ep(
    tokens: Tensor,
    indices: Tensor,
    probsOptional: Tensor | None,
    rangeOptional: tuple[int, ...] | None,
    numOutTokens: int,
    paddedMode: bool,
    permuteTokensOut: Tensor,
    sortedIndicesOut: Tensor,
    permuteProbsOut: Tensor | None,
) -> tuple[int, Work]:
    """MoeTokenPermute that keeps rows [s, e) of rangeOptional = [s, e); without a range MoeTokenPermute itself."""
    required(tokens=tokens, indices=indices, permuteTokensOut=permuteTokensOut, sortedIndicesOut=sortedIndicesOut)
    if rangeOptional is None:
        probsOptional = None
    if probsOptional is not None:
        required(permuteProbsOut=permuteProbsOut)
        typed("probsOptional", probsOptional, *FLOATS)
        typed("permuteProbsOut", permuteProbsOut, probsOptional.dtype)
    typed("tokens", tokens, *FLOATS)
    if rangeOptional is None:
        return _moe_token_permute(tokens, indices, numOutTokens, paddedMode, permuteTokensOut, sortedIndicesOut)
    num_tokens, topk, columns = _permute_checked(tokens, indices, paddedMode, permuteTokensOut, sortedIndicesOut)
    first, last = row_range("rangeOptional", rangeOptional)
    rows = last - first
    if permuteTokensOut.shape[0] != rows:
        raise wrong_shape("permuteTokensOut", f"[e - s, ...] with e - s = {rows}", permuteTokensOut, TILING)
    if probsOptional is not None:
        shaped("probsOptional", probsOptional, (num_tokens, topk), "[T, K]", TILING)
        shaped("permuteProbsOut", permuteProbsOut, (rows,), "[e - s]", TILING)
    probs_out = None if probsOptional is None else permuteProbsOut
    outputs = {
        "permuteTokensOut": permuteTokensOut,
        "sortedIndicesOut": sortedIndicesOut,
        "permuteProbsOut": probs_out,
    }
    apart(outputs, tokens, indices, probsOptional)
    if tokens.numel() == 0 or indices.numel() == 0:
        return zero_filled(permuteTokensOut, sortedIndicesOut, probs_out)

    def work() -> None:
        plan = plan_from_expert_ids(indices, None, num_rows=num_tokens * topk, out=sortedIndicesOut)
        plan = first_rows(plan, rows, first)
        target = target_of(permuteTokensOut, rows, columns)
        spread(tokens.reshape(num_tokens, columns), plan, out=target)
        deliver(target, permuteTokensOut)
        if probsOptional is not None:
            permute_weights(probsOptional, plan, out=probs_out)

    return 0, work


aclnnMoeTokenPermuteWithEpGetWorkspaceSize, aclnnMoeTokenPermuteWithEp = phases(
    "MoeTokenPermuteWithEp", _moe_token_permute_with_ep
)

# ---------------------------------------------------------------------------- MoeTokenPermuteGrad


def _permute_grad_checked(
    grad_name: str, grad: Tensor, sortedIndices: Tensor, numTopk: int, out_name: str, out: Tensor
) -> int:
    """T."""
    typed(grad_name, grad, *FLOATS)
    typed("sortedIndices", sortedIndices, torch.int32)
    typed(out_name, out, grad.dtype)
    ranked(grad_name, grad, 2)
    ranked("sortedIndices", sortedIndices, 1)
    between("numTopk", numTopk, 1, MAX_TOPK)
    slots = sortedIndices.shape[0]
    num_tokens = divides("the length of sortedIndices", slots, "numTopk", numTopk)
    shaped(out_name, out, (num_tokens, grad.shape[1]), "[T, H]")
    return num_tokens


def _moe_token_permute_grad(
    permutedOutputGrad: Tensor, sortedIndices: Tensor, numTopk: int, paddedMode: bool, out: Tensor
) -> tuple[int, Work]:
    """The gradient of MoeTokenPermute: out[t] is the sum of the rows of token t's numTopk slots.

    Fewer rows than slots (numOutTokens in the forward): a slot whose row is cut off adds nothing. As in
    upstream's code paddedMode is looked at before nulls.
    """
    unpadded("paddedMode", paddedMode)
    required(permutedOutputGrad=permutedOutputGrad, sortedIndices=sortedIndices, out=out)
    num_tokens = _permute_grad_checked("permutedOutputGrad", permutedOutputGrad, sortedIndices, numTopk, "out", out)
    rows = permutedOutputGrad.shape[0]
    if rows > sortedIndices.shape[0]:
        raise wrong_shape("permutedOutputGrad", f"[T * K, H] with T * K = {sortedIndices.shape[0]}", permutedOutputGrad)
    apart({"out": out}, permutedOutputGrad, sortedIndices)

    def work() -> None:
        combine(permutedOutputGrad, plan_from_row_of_slot(sortedIndices, num_tokens, rows), out=out)

    return 0, work


aclnnMoeTokenPermuteGradGetWorkspaceSize, aclnnMoeTokenPermuteGrad = phases(
    "MoeTokenPermuteGrad", _moe_token_permute_grad
)


def _moe_token_permute_with_ep_grad(
    permutedTokensOutputGrad: Tensor,
    sortedIndices: Tensor,
    permutedProbsOutputGradOptional: Tensor | None,
    numTopk: int,
    rangeOptional: tuple[int, ...] | None,
    paddedMode: bool,
    tokenGradOut: Tensor,
    probsGradOut: Tensor | None,
) -> tuple[int, Work]:
    """The gradient of MoeTokenPermuteWithEp; without a range that of MoeTokenPermute, probs untouched.

    probsGradOut is [T, K] or the same numbers as [T * K].
    """
    unpadded("paddedMode", paddedMode)
    required(permutedTokensOutputGrad=permutedTokensOutputGrad, sortedIndices=sortedIndices, tokenGradOut=tokenGradOut)
    probs_grad = None if rangeOptional is None else permutedProbsOutputGradOptional
    if probs_grad is not None:
        required(probsGradOut=probsGradOut)
        typed("permutedProbsOutputGradOptional", probs_grad, *FLOATS)
        typed("probsGradOut", probsGradOut, probs_grad.dtype)
    num_tokens = _permute_grad_checked(
        "permutedTokensOutputGrad", permutedTokensOutputGrad, sortedIndices, numTopk, "tokenGradOut", tokenGradOut
    )
    rows, first = permutedTokensOutputGrad.shape[0], 0
    if rangeOptional is None:
        slots = sortedIndices.shape[0]
        if rows > slots:
            raise wrong_shape("permutedTokensOutputGrad", f"[T * K, H] with T * K = {slots}", permutedTokensOutputGrad)
    else:
        first, last = row_range("rangeOptional", rangeOptional)
        if rows != last - first:
            wanted = f"[e - s, H] with e - s = {last - first}"
            raise wrong_shape("permutedTokensOutputGrad", wanted, permutedTokensOutputGrad)
    if probs_grad is not None:
        shaped("permutedProbsOutputGradOptional", probs_grad, (rows,), "[e - s]")
        shapes = (num_tokens, numTopk), sortedIndices.shape
        if probsGradOut is not None and probsGradOut.shape not in shapes:
            raise wrong_shape("probsGradOut", f"[T, K] = {list(shapes[0])} or [T * K]", probsGradOut)
    probs_out = None if probs_grad is None else probsGradOut
    outputs = {"tokenGradOut": tokenGradOut, "probsGradOut": probs_out}
    apart(outputs, permutedTokensOutputGrad, sortedIndices, probs_grad)

    def work() -> None:
        plan = plan_from_row_of_slot(sortedIndices, num_tokens, rows, first_row=first)
        combine(permutedTokensOutputGrad, plan, out=tokenGradOut)
        if probs_grad is not None and probs_out is not None and num_tokens:
            permute_weights_backward(probs_grad, plan, out=probs_out.view(num_tokens, numTopk))

    return 0, work


aclnnMoeTokenPermuteWithEpGradGetWorkspaceSize, aclnnMoeTokenPermuteWithEpGrad = phases(
    "MoeTokenPermuteWithEpGrad", _moe_token_permute_with_ep_grad
)

# ---------------------------------------------------------------------------- MoeTokenPermuteWithRoutingMap


def _moe_token_permute_with_routing_map(
    tokens: Tensor,
    routingMap: Tensor,
    probsOptional: Tensor | None,
    numOutTokens: int,
    dropAndPad: bool,
    permuteTokensOut: Tensor,
    permuteProbsOutOptional: Tensor | None,
    sortedIndicesOut: Tensor,
) -> tuple[int, Work]:
    """Token copies in expert order, from a map of ones.

    Ragged, K = numOutTokens // T: sortedIndices is the padded table [T * K] of the row of each slot, -1 in
    the unused ones. Padded, C = numOutTokens // E: every expert takes C tokens, its false ones after its
    true ones, and sortedIndices is the token of each row.
    """
    required(tokens=tokens, routingMap=routingMap, permuteTokensOut=permuteTokensOut, sortedIndicesOut=sortedIndicesOut)
    if probsOptional is not None:
        required(permuteProbsOutOptional=permuteProbsOutOptional)
    typed("tokens", tokens, *FLOATS)
    typed("routingMap", routingMap, *MAPS)
    typed("permuteTokensOut", permuteTokensOut, tokens.dtype)
    typed("sortedIndicesOut", sortedIndicesOut, torch.int32)
    probs_typed("probsOptional", probsOptional, "tokens", tokens)
    if probsOptional is None:
        absent("permuteProbsOutOptional", permuteProbsOutOptional, "without probsOptional")
    else:
        typed("permuteProbsOutOptional", permuteProbsOutOptional, probsOptional.dtype)
    ranked("routingMap", routingMap, 2)
    num_tokens, num_experts = routingMap.shape
    shaped("probsOptional", probsOptional, (num_tokens, num_experts), "[T, E], as routingMap,")
    ranked("tokens", tokens, 2)
    between("numOutTokens", numOutTokens, 0, num_tokens * num_experts)
    between("T", num_tokens, 0, MAX_SLOTS - 1)
    between("E", num_experts, 0, MAX_SLOTS - 1)
    each = numOutTokens // max(num_experts if dropAndPad else num_tokens, 1)  # C or K
    rows = each * (num_experts if dropAndPad else num_tokens)
    hidden = tokens.shape[1]
    shaped("permuteTokensOut", permuteTokensOut, (rows, hidden), "[R, H]")
    shaped("permuteProbsOutOptional", permuteProbsOutOptional, (rows,), "[R]")
    shaped("sortedIndicesOut", sortedIndicesOut, (rows,), "[R]")
    shaped("tokens", tokens, (num_tokens, hidden), "[T, H] with routingMap's T")
    outputs = {
        "permuteTokensOut": permuteTokensOut,
        "permuteProbsOutOptional": permuteProbsOutOptional,
        "sortedIndicesOut": sortedIndicesOut,
    }
    apart(outputs, tokens, routingMap, probsOptional)
    if routingMap.numel() == 0:
        return zero_filled(*outputs.values())
    if not dropAndPad:
        between("numOutTokens // T", each, 1, MAX_TOPK, INNER_NULLPTR)
        between("T * K", rows, 1, MAX_SLOTS - 1, INNER_NULLPTR)

    def work() -> None:
        if dropAndPad:
            plan = plan_from_routing_map(routingMap, fill=True, capacity=each)
            sortedIndicesOut.copy_(plan.token_of_row)
        else:
            plan = plan_from_routing_map(routingMap, topk=each, out=sortedIndicesOut)
            plan = first_rows(plan, rows)
        spread(tokens, plan, out=permuteTokensOut)
        if probsOptional is not None:
            permute_weights(probsOptional, plan, out=permuteProbsOutOptional)

    return 0, work


aclnnMoeTokenPermuteWithRoutingMapGetWorkspaceSize, aclnnMoeTokenPermuteWithRoutingMap = phases(
    "MoeTokenPermuteWithRoutingMap", _moe_token_permute_with_routing_map
)


def _moe_token_permute_with_routing_map_grad(
    permutedTokensOutputGrad: Tensor,
    permutedProbsOutputGradOptional: Tensor | None,
    sortedIndices: Tensor,
    routingMapOptional: Tensor | None,
    experts_num: int,
    tokens_num: int,
    dropAndPad: bool,
    tokenGradOut: Tensor,
    probsGradOutOptional: Tensor | None,
) -> tuple[int, Work]:
    """The gradients of MoeTokenPermuteWithRoutingMap in the tokens and, where both tensors are there, the probs.

    As in upstream's code the numbers are looked at before nulls.
    """
    if experts_num <= 0:
        raise wrong("experts_num", "at least 1", experts_num)
    if tokens_num <= 0:
        raise wrong("tokens_num", "at least 1", tokens_num)
    grad, probs_grad = permutedTokensOutputGrad, permutedProbsOutputGradOptional
    required(permutedTokensOutputGrad=grad, sortedIndices=sortedIndices, tokenGradOut=tokenGradOut)
    if routingMapOptional is None and probs_grad is not None:
        raise Refusal(PARAM_NULLPTR, "routingMapOptional must not be null with permutedProbsOutputGradOptional")
    # Private formats only warn upstream.
    typed("permutedTokensOutputGrad", grad, *FLOATS, any_format=True)
    typed("tokenGradOut", tokenGradOut, grad.dtype, any_format=True)
    if probs_grad is not None:
        typed("permutedProbsOutputGradOptional", probs_grad, *FLOATS, any_format=True)
        typed("probsGradOutOptional", probsGradOutOptional, probs_grad.dtype, any_format=True)
        probs_typed("permutedProbsOutputGradOptional", probs_grad, "permutedTokensOutputGrad", grad, any_format=True)
    typed("routingMapOptional", routingMapOptional, *MAPS, any_format=True)
    typed("sortedIndices", sortedIndices, torch.int32, any_format=True)
    ranked("permutedTokensOutputGrad", grad, 2)
    ranked("routingMapOptional", routingMapOptional, 2)
    ranked("permutedProbsOutputGradOptional", probs_grad, 1)
    ranked("sortedIndices", sortedIndices, 1)
    rows, hidden = grad.shape
    by_name, by = ("experts_num", experts_num) if dropAndPad else ("tokens_num", tokens_num)
    each = divides("the number of rows", rows, by_name, by)  # C or K
    shaped("sortedIndices", sortedIndices, (rows,), "[R], as permutedTokensOutputGrad,")
    shaped("permutedProbsOutputGradOptional", probs_grad, (rows,), "[R], as permutedTokensOutputGrad,")
    shaped("routingMapOptional", routingMapOptional, (tokens_num, experts_num), "[T, E]")
    shaped("tokenGradOut", tokenGradOut, (tokens_num, hidden), "[T, H]")
    probs_out = None if probs_grad is None else probsGradOutOptional
    shaped("probsGradOutOptional", probs_out, (tokens_num, experts_num), "[T, E]")
    apart(
        {"tokenGradOut": tokenGradOut, "probsGradOutOptional": probs_out},
        *(grad, probs_grad, sortedIndices, routingMapOptional),
    )
    if grad.numel() == 0 or tokenGradOut.numel() == 0:
        return zero_filled(tokenGradOut, probs_out)
    if not dropAndPad:
        between("K, the number of rows / tokens_num,", each, 1, MAX_TOPK, INNER_NULLPTR)

    def work() -> None:
        if dropAndPad:
            plan = plan_from_token_ids(sortedIndices, tokens_num, num_experts=experts_num)
        else:
            plan = plan_from_row_of_slot(sortedIndices, tokens_num, rows)
        combine(grad, plan, out=tokenGradOut)
        if probs_grad is not None and routingMapOptional is not None and probs_out is not None:
            if not dropAndPad:
                plan = plan_from_routing_map(routingMapOptional, num_rows=rows)
            permute_weights_backward(probs_grad, plan, accumulate=False, out=probs_out)

    return WORKSPACE, work


aclnnMoeTokenPermuteWithRoutingMapGradGetWorkspaceSize, aclnnMoeTokenPermuteWithRoutingMapGrad = phases(
    "MoeTokenPermuteWithRoutingMapGrad", _moe_token_permute_with_routing_map_grad
)
