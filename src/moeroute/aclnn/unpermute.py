"""The unpermute half: the experts' rows back to the tokens, and its gradients.

Every operator has the same rungs: nulls, dtypes, shapes and limits, outputs, work. Where upstream's code
tests in another order the operator has that order, and says so.
"""

import torch
from torch import Tensor

from moeroute.aclnn.core import (
    FLOATS,
    INNER_NULLPTR,
    MAPS,
    MAX_TOPK,
    PARAM_INVALID,
    PARAM_NULLPTR,
    TILING,
    Refusal,
    Work,
    apart,
    between,
    divides,
    phases,
    probs_typed,
    ranked,
    required,
    row_range,
    shaped,
    typed,
    ub_bytes,
    unpadded,
    wrong,
    wrong_shape,
    zero_filled,
)
from moeroute.ops.indices.op import plan_from_row_of_slot, plan_from_token_ids
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.rows.op import combine, spread
from moeroute.ops.weights.op import slot_weights
from moeroute.permutation import permute_weights, unpermute_backward
from moeroute.plan import RoutingPlan

# ---------------------------------------------------------------------------- MoeTokenUnpermute


def _unpermute(
    permutedTokens: Tensor,
    sortedIndices: Tensor,
    probsOptional: Tensor | None,
    topk: int | None,
    rangeOptional: tuple[int, ...] | None,
    paddedMode: bool,
    out: Tensor,
) -> tuple[int, Work]:
    """`topk`: what the caller says K is; None: K is that of probs, 1 without."""
    unpadded("paddedMode", paddedMode)
    required(permutedTokens=permutedTokens, sortedIndices=sortedIndices, out=out)
    typed("permutedTokens", permutedTokens, *FLOATS)
    typed("sortedIndices", sortedIndices, torch.int32)
    typed("probsOptional", probsOptional, *FLOATS)
    typed("out", out, permutedTokens.dtype)
    ranked("permutedTokens", permutedTokens, 2, status=TILING)
    ranked("sortedIndices", sortedIndices, 1, status=TILING)
    ranked("probsOptional", probsOptional, 2, status=TILING)
    rows, hidden = permutedTokens.shape
    slots = sortedIndices.shape[0]
    if topk is not None:
        between("numTopk", topk, 1, MAX_TOPK)
        divides("the length of sortedIndices", slots, "numTopk", topk)
    if probsOptional is not None:
        num_tokens, columns = probsOptional.shape
        if topk not in (None, columns):
            raise wrong_shape("probsOptional", f"[T, K] with K = {topk}, as numTopk,", probsOptional, TILING)
        topk = columns
        if num_tokens * topk != slots:
            raise wrong_shape("sortedIndices", f"[T * K] = [{num_tokens * topk}]", sortedIndices, TILING)
    else:
        topk = 1 if topk is None else topk
        num_tokens = slots // topk
    between("K", topk, 0, MAX_TOPK, TILING)
    first = 0
    if rangeOptional is not None:
        first, last = row_range("rangeOptional", rangeOptional)
        shaped("permutedTokens", permutedTokens, (last - first, hidden), "[e - s, H]", TILING)
    elif rows > slots:
        raise wrong_shape("permutedTokens", f"[T * K, H] with T * K = {slots}", permutedTokens, TILING)
    shaped("out", out, (num_tokens, hidden), "[T, H]")
    apart({"out": out}, permutedTokens, sortedIndices, probsOptional)

    def work() -> None:
        if topk == 0:
            out.zero_()
            return
        plan = plan_from_row_of_slot(sortedIndices, num_tokens, rows, first_row=first)
        weights = None if probsOptional is None else probsOptional.reshape(-1)
        combine(permutedTokens, plan, weights, out=out)

    return 0, work


def _moe_token_unpermute(
    permutedTokens: Tensor,
    sortedIndices: Tensor,
    probsOptional: Tensor | None,
    paddedMode: bool,
    restoreShapeOptional: tuple[int, ...] | None,
    out: Tensor,
) -> tuple[int, Work]:
    """out[t] is the sum over token t's K slots of probs[t, k] * permutedTokens[sortedIndices[t * K + k]].

    Without probs K is 1. restoreShapeOptional belongs to the padded mode, which nobody supports.
    """
    return _unpermute(permutedTokens, sortedIndices, probsOptional, None, None, paddedMode, out)


aclnnMoeTokenUnpermuteGetWorkspaceSize, aclnnMoeTokenUnpermute = phases("MoeTokenUnpermute", _moe_token_unpermute)


def _moe_token_unpermute_with_ep(
    permutedTokens: Tensor,
    sortedIndices: Tensor,
    probsOptional: Tensor | None,
    numTopk: int,
    rangeOptional: tuple[int, ...] | None,
    paddedMode: bool,
    restoreShapeOptional: tuple[int, ...] | None,
    out: Tensor,
) -> tuple[int, Work]:
    """MoeTokenUnpermute over rows [s, e) of rangeOptional; without a range MoeTokenUnpermute itself."""
    topk = None if rangeOptional is None else numTopk
    return _unpermute(permutedTokens, sortedIndices, probsOptional, topk, rangeOptional, paddedMode, out)


aclnnMoeTokenUnpermuteWithEpGetWorkspaceSize, aclnnMoeTokenUnpermuteWithEp = phases(
    "MoeTokenUnpermuteWithEp", _moe_token_unpermute_with_ep
)

# ---------------------------------------------------------------------------- MoeTokenUnpermuteGrad


def _unpermute_grad(
    permutedTokensOptional: Tensor | None,
    unpermutedTokensGrad: Tensor,
    sortedIndices: Tensor,
    probsOptional: Tensor | None,
    topk: int | None,
    rangeOptional: tuple[int, ...] | None,
    paddedMode: bool,
    permutedTokensGradOut: Tensor,
    probsGradOut: Tensor | None,
    shape_status: int,
) -> tuple[int, Work]:
    """`topk` as in `_unpermute`."""
    rows_in, grad, grad_out = permutedTokensOptional, unpermutedTokensGrad, permutedTokensGradOut
    unpadded("paddedMode", paddedMode)
    required(unpermutedTokensGrad=grad, sortedIndices=sortedIndices, permutedTokensGradOut=grad_out)
    if probsOptional is not None:
        required(permutedTokensOptional=rows_in, probsGradOut=probsGradOut)
    typed("unpermutedTokensGrad", grad, *FLOATS)
    typed("permutedTokensOptional", rows_in, grad.dtype)
    typed("sortedIndices", sortedIndices, torch.int32)
    typed("permutedTokensGradOut", grad_out, grad.dtype)
    if probsOptional is not None:
        typed("probsOptional", probsOptional, *FLOATS)
        typed("probsGradOut", probsGradOut, probsOptional.dtype)
    ranked("permutedTokensOptional", rows_in, 2, status=TILING)
    ranked("unpermutedTokensGrad", grad, 2, status=TILING)
    ranked("sortedIndices", sortedIndices, 1, status=TILING)
    ranked("probsOptional", probsOptional, 2, status=TILING)
    for name, tensor in (
        ("unpermutedTokensGrad", grad),
        ("sortedIndices", sortedIndices),
        ("probsOptional", probsOptional),
    ):
        if tensor is not None and tensor.numel() == 0:
            raise wrong_shape(name, "not empty", tensor, TILING)
    num_tokens, hidden = grad.shape
    slots = sortedIndices.shape[0]
    if probsOptional is not None:
        if topk not in (None, probsOptional.shape[1]):
            raise wrong_shape("probsOptional", f"[T, K] with K = {topk}, as topkNum,", probsOptional, TILING)
        topk = probsOptional.shape[1]
        shaped("probsOptional", probsOptional, (num_tokens, topk), "[T, K]", shape_status)
    else:
        topk = 1 if topk is None else topk
    between("K", topk, 1, MAX_TOPK, TILING)
    shaped("sortedIndices", sortedIndices, (num_tokens * topk,), "[T * K]", shape_status)
    ranked("permutedTokensGradOut", grad_out, 2)
    first = 0
    if rangeOptional is not None:
        first, last = row_range("rangeOptional", rangeOptional)
        rows = last - first
    elif probsOptional is not None and rows_in is not None:
        rows = rows_in.shape[0]
        if rows > slots:
            raise wrong_shape("permutedTokensOptional", f"[T * K, H] with T * K = {slots}", rows_in, shape_status)
    else:
        rows = grad_out.shape[0]
        if rows > slots:
            raise wrong_shape("permutedTokensGradOut", f"[T * K, H] with T * K = {slots}", grad_out)
    if probsOptional is not None:
        shaped("permutedTokensOptional", rows_in, (rows, hidden), "[R, H]", shape_status)
        shaped("probsGradOut", probsGradOut, (num_tokens, topk), "[T, K]")
    shaped("permutedTokensGradOut", grad_out, (rows, hidden), "[R, H]")
    probs_out = None if probsOptional is None else probsGradOut
    outputs = {"permutedTokensGradOut": grad_out, "probsGradOut": probs_out}
    apart(outputs, rows_in, grad, sortedIndices, probsOptional)

    def work() -> None:
        plan = plan_from_row_of_slot(sortedIndices, num_tokens, rows, first_row=first)
        if probsOptional is None:
            spread(grad, plan, out=grad_out)
        else:
            unpermute_backward(grad, rows_in, plan, probsOptional, out=(grad_out, probs_out))

    return 0, work


def _moe_token_unpermute_grad(
    permutedTokensOptional: Tensor | None,
    unpermutedTokensGrad: Tensor,
    sortedIndices: Tensor,
    probsOptional: Tensor | None,
    paddedMode: bool,
    restoreShapeOptional: tuple[int, ...] | None,
    permutedTokensGradOut: Tensor,
    probsGradOut: Tensor | None,
) -> tuple[int, Work]:
    """The gradients of MoeTokenUnpermute in the rows and, with probs, in the probs. Empty tensors are refused."""
    return _unpermute_grad(
        permutedTokensOptional,
        unpermutedTokensGrad,
        sortedIndices,
        probsOptional,
        None,
        None,
        paddedMode,
        permutedTokensGradOut,
        probsGradOut,
        PARAM_INVALID,
    )


aclnnMoeTokenUnpermuteGradGetWorkspaceSize, aclnnMoeTokenUnpermuteGrad = phases(
    "MoeTokenUnpermuteGrad", _moe_token_unpermute_grad
)


def _moe_token_unpermute_with_ep_grad(
    unpermutedTokensGrad: Tensor,
    sortedIndices: Tensor,
    permutedTokensOptional: Tensor | None,
    probsOptional: Tensor | None,
    paddedMode: bool,
    restoreShapeOptional: tuple[int, ...] | None,
    rangeOptional: tuple[int, ...] | None,
    topkNum: int,
    permutedTokensGradOut: Tensor,
    probsGradOut: Tensor | None,
) -> tuple[int, Work]:
    """The gradients of MoeTokenUnpermuteWithEp; without a range, or with (-1, -1), MoeTokenUnpermuteGrad itself."""
    if rangeOptional == (-1, -1):
        rangeOptional = None
    return _unpermute_grad(
        permutedTokensOptional,
        unpermutedTokensGrad,
        sortedIndices,
        probsOptional,
        None if rangeOptional is None else topkNum,
        rangeOptional,
        paddedMode,
        permutedTokensGradOut,
        probsGradOut,
        TILING,
    )


aclnnMoeTokenUnpermuteWithEpGradGetWorkspaceSize, aclnnMoeTokenUnpermuteWithEpGrad = phases(
    "MoeTokenUnpermuteWithEpGrad", _moe_token_unpermute_with_ep_grad
)

# ---------------------------------------------------------------------------- MoeTokenUnpermuteWithRoutingMap


def _experts_of_table(routingMap: Tensor, topk: int) -> Tensor | None:
    """The expert of every slot of the padded table: token t's j-th true entry has slot t * K + j."""
    return plan_from_routing_map(routingMap, topk=topk, num_rows=0).expert_of_slot


def _moe_token_unpermute_with_routing_map(
    permutedTokens: Tensor,
    sortedIndices: Tensor,
    routingMapOptional: Tensor | None,
    probsOptional: Tensor | None,
    paddedMode: bool,
    restoreShapeOptional: tuple[int, ...] | None,
    unpermutedTokens: Tensor,
    outIndex: Tensor,
    permuteTokenId: Tensor,
    permuteProbs: Tensor | None,
) -> tuple[int, Work]:
    """The rows of MoeTokenPermuteWithRoutingMap back to their tokens, added up, with probs [T, E] weighted.

    outIndex, permuteTokenId and permuteProbs are what the gradient operator wants. Ragged: the row, the
    token and the weight of each slot. Padded: rows and tokens in the stable order of the tokens, and the
    weight of each row. Without probs the routing map is not read and permuteProbs not written.
    """
    if probsOptional is None:
        routingMapOptional = None
    required(permutedTokens=permutedTokens, sortedIndices=sortedIndices)
    if probsOptional is None and restoreShapeOptional is None:
        raise Refusal(PARAM_NULLPTR, "restoreShapeOptional must not be null without probsOptional")
    required(unpermutedTokens=unpermutedTokens, outIndex=outIndex, permuteTokenId=permuteTokenId)
    if probsOptional is not None:
        required(permuteProbs=permuteProbs)
        if not paddedMode:
            required(routingMapOptional=routingMapOptional)
    typed("permutedTokens", permutedTokens, *FLOATS)
    typed("sortedIndices", sortedIndices, torch.int32)
    typed("routingMapOptional", routingMapOptional, *MAPS, torch.uint8)
    probs_typed("probsOptional", probsOptional, "permutedTokens", permutedTokens)
    if probsOptional is not None:
        typed("permuteProbs", permuteProbs, probsOptional.dtype)
    typed("unpermutedTokens", unpermutedTokens, permutedTokens.dtype)
    typed("outIndex", outIndex, torch.int32)
    typed("permuteTokenId", permuteTokenId, torch.int32)
    ranked("permutedTokens", permutedTokens, 2)
    ranked("sortedIndices", sortedIndices, 1)
    ranked("unpermutedTokens", unpermutedTokens, 2)
    rows, hidden = permutedTokens.shape
    slots = sortedIndices.shape[0]
    num_experts = None
    if probsOptional is not None:
        ranked("probsOptional", probsOptional, 2, status=INNER_NULLPTR)
        num_tokens, num_experts = probsOptional.shape
        shaped("routingMapOptional", routingMapOptional, (num_tokens, num_experts), "[T, E], as probsOptional,")
    else:
        restore = restoreShapeOptional or ()
        if len(restore) != 2:
            raise wrong("restoreShapeOptional", "(T, H)", list(restore), INNER_NULLPTR)
        num_tokens = restore[0]
        if restore[1] != hidden:
            raise wrong("restoreShapeOptional", f"(T, H) with H = {hidden}, as permutedTokens", list(restore))
    shaped("unpermutedTokens", unpermutedTokens, (num_tokens, hidden), "[T, H]")
    shaped("outIndex", outIndex, (slots,), "[S], as sortedIndices,")
    shaped("permuteTokenId", permuteTokenId, (slots,), "[S], as sortedIndices,")
    probs_out = None if probsOptional is None else permuteProbs
    shaped("permuteProbs", probs_out, (slots,), "[S], as sortedIndices,")
    empty = slots == 0 or (not paddedMode and permutedTokens.numel() == 0)
    outputs = {
        "unpermutedTokens": unpermutedTokens,
        "outIndex": outIndex,
        "permuteTokenId": permuteTokenId,
        "permuteProbs": permuteProbs if empty else probs_out,
    }
    apart(outputs, permutedTokens, sortedIndices, routingMapOptional, probsOptional)
    if empty:
        return zero_filled(*outputs.values())
    shaped("permutedTokens", permutedTokens, (slots, hidden), "[S, H], with S as sortedIndices,")
    topk = 0
    if not paddedMode:
        topk = divides("the number of rows", rows, "T", num_tokens)
        between("K, the number of rows / T,", topk, 1, MAX_TOPK, INNER_NULLPTR)
    elif num_experts is not None:
        divides("the number of rows", rows, "E", num_experts)

    def work() -> None:
        experts = None
        if paddedMode:
            plan = plan_from_token_ids(sortedIndices, num_tokens, num_experts=num_experts, out=outIndex)
        else:
            if routingMapOptional is not None:
                experts = _experts_of_table(routingMapOptional, topk)
            plan = plan_from_row_of_slot(sortedIndices, num_tokens, rows, expert_of_slot=experts)
            outIndex.copy_(sortedIndices)
        permuteTokenId.copy_(plan.token_of_slot)
        weights = None
        if probsOptional is not None:
            weights = slot_weights(probsOptional, plan, out=None if paddedMode else probs_out)
            if paddedMode:
                permute_weights(probsOptional, plan, out=probs_out)
        combine(permutedTokens, plan, weights, out=unpermutedTokens)

    return 0, work


aclnnMoeTokenUnpermuteWithRoutingMapGetWorkspaceSize, aclnnMoeTokenUnpermuteWithRoutingMap = phases(
    "MoeTokenUnpermuteWithRoutingMap", _moe_token_unpermute_with_routing_map
)


def _moe_token_unpermute_with_routing_map_grad(
    unpermutedTokensGrad: Tensor,
    outIndex: Tensor,
    permuteTokenId: Tensor,
    routingMapOptional: Tensor | None,
    permutedTokensOptional: Tensor | None,
    probsOptional: Tensor | None,
    dropAndPad: bool,
    restoreShapeOptional: tuple[int, ...] | None,
    permutedTokensGradOut: Tensor,
    probsGradOutOptional: Tensor | None,
) -> tuple[int, Work]:
    """The gradients of MoeTokenUnpermuteWithRoutingMap in the rows and, with probs, in the probs [T, E].

    Ragged, outIndex is the row of each slot of the table [T * K]; there may be fewer rows than slots, and a
    slot whose row is cut adds nothing. Padded, entry i puts row outIndex[i] under token permuteTokenId[i]. Rows
    that nothing names become 0. Without probs the routing map and permutedTokens are not read and probsGradOut
    not written.
    """
    grad, grad_out, probs = unpermutedTokensGrad, permutedTokensGradOut, probsOptional
    required(
        unpermutedTokensGrad=grad, outIndex=outIndex, permuteTokenId=permuteTokenId, permutedTokensGradOut=grad_out
    )
    routing_map, rows_in, probs_out = routingMapOptional, permutedTokensOptional, probsGradOutOptional
    if probs is None:
        routing_map = rows_in = probs_out = None
    else:
        required(probsGradOutOptional=probs_out)
    typed("unpermutedTokensGrad", grad, *FLOATS)
    typed("outIndex", outIndex, torch.int32)
    typed("permuteTokenId", permuteTokenId, torch.int32)
    typed("routingMapOptional", routing_map, *MAPS)
    typed("permutedTokensOptional", rows_in, grad.dtype)
    probs_typed("probsOptional", probs, "unpermutedTokensGrad", grad, TILING)
    typed("permutedTokensGradOut", grad_out, grad.dtype)
    if probs is not None:
        typed("probsGradOutOptional", probs_out, probs.dtype)
        for name, tensor in (("routingMapOptional", routing_map), ("permutedTokensOptional", rows_in)):
            if tensor is None:
                raise wrong(name, "given with probsOptional", "null", TILING)
    ranked("unpermutedTokensGrad", grad, 2, status=TILING)
    ranked("outIndex", outIndex, 1, status=TILING)
    slots = outIndex.shape[0]
    shaped("permuteTokenId", permuteTokenId, (slots,), "[S], as outIndex,", TILING)
    num_tokens, hidden = grad.shape
    num_experts = topk = None
    if probs is not None:
        ranked("routingMapOptional", routing_map, 2, status=TILING)
        ranked("permutedTokensOptional", rows_in, 2, status=TILING)
        ranked("probsOptional", probs, 2, status=TILING)
        num_experts = probs.shape[1]
        shaped("probsOptional", probs, (num_tokens, num_experts), "[T, E]", TILING)
        shaped("routingMapOptional", routing_map, (num_tokens, num_experts), "[T, E], as probsOptional,", TILING)
        shaped("probsGradOutOptional", probs_out, (num_tokens, num_experts), "[T, E]", TILING)
    ranked("permutedTokensGradOut", grad_out, 2, status=TILING)
    rows = slots if dropAndPad else grad_out.shape[0]
    if rows > slots:
        raise wrong_shape("permutedTokensGradOut", f"[R, H] with R <= {slots}, as outIndex,", grad_out, TILING)
    shaped("permutedTokensGradOut", grad_out, (rows, hidden), "[R, H]", TILING)
    shaped("permutedTokensOptional", rows_in, (rows, hidden), "[R, H], as permutedTokensGradOut,", TILING)
    if probs is None:
        if not dropAndPad and slots:
            divides("the length of outIndex", slots, "T", num_tokens, TILING)
    elif dropAndPad:
        assert num_experts is not None  # noqa: S101 - for the type checker: probs give it
        capacity = divides("the length of outIndex", slots, "E", num_experts, TILING)
        between("C, the length of outIndex / E,", capacity, 0, num_tokens, TILING)
        between("H", hidden, 0, 256 * (ub_bytes() - 2080) // (8 + grad.element_size()), TILING)
    else:
        assert num_experts is not None  # noqa: S101 - for the type checker: probs give it
        topk = divides("the length of outIndex", slots, "T", num_tokens, TILING)
        between("K, the length of outIndex / T,", topk, 0, min(MAX_TOPK, num_experts), TILING)
        token_bytes, probs_bytes = grad.element_size(), probs.element_size()
        aligned = -(-num_experts // 32) * 32
        room = ub_bytes() - (probs_bytes + 1) * aligned - (token_bytes + 8) * 256
        if room < 6 * token_bytes + 12:
            raise wrong("E", f"such that it fits into a unified buffer of {ub_bytes()} bytes", num_experts, TILING)
    outputs = {"permutedTokensGradOut": grad_out, "probsGradOutOptional": probs_out}
    apart(outputs, grad, outIndex, permuteTokenId, routing_map, rows_in, probs)

    def plan() -> RoutingPlan:
        if dropAndPad:
            return plan_from_token_ids(
                permuteTokenId, num_tokens, rows=outIndex, num_rows=rows, num_experts=num_experts
            )
        experts = None
        if routing_map is not None and topk is not None:
            experts = _experts_of_table(routing_map, topk)
        return plan_from_row_of_slot(outIndex, num_tokens, rows, expert_of_slot=experts)

    def work() -> None:
        if probs is None:
            spread(grad, plan(), out=grad_out)
        else:
            unpermute_backward(grad, rows_in, plan(), probs, accumulate=False, out=(grad_out, probs_out))

    return 0, work


aclnnMoeTokenUnpermuteWithRoutingMapGradGetWorkspaceSize, aclnnMoeTokenUnpermuteWithRoutingMapGrad = phases(
    "MoeTokenUnpermuteWithRoutingMapGrad", _moe_token_unpermute_with_routing_map_grad
)
