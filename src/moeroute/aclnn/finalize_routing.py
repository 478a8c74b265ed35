"""MoeFinalizeRouting and its gradient: rows back to tokens, with shared experts and biases.

Every operator has the same rungs: nulls, dtypes, shapes and limits, outputs, work.
"""

import torch
from torch import Tensor

from moeroute.aclnn.core import (
    FLOATS,
    INNER_NULLPTR,
    TILING,
    Work,
    apart,
    at_least,
    between,
    deliver,
    divides,
    phases,
    ranked,
    required,
    shaped,
    target_of,
    typed,
    wrong,
    wrong_shape,
    zero_filled,
)
from moeroute.dtypes import LARGEST
from moeroute.ops.indices.op import plan_from_row_of_slot
from moeroute.ops.rows.op import combine, row_dots, spread
from moeroute.ops.special_experts import NONE, combine_special
from moeroute.permutation import unpermute_backward

# ---------------------------------------------------------------------------- MoeFinalizeRouting


def _slots(expandedRowIdx: Tensor, num_tokens: int, topk: int, by_row: bool) -> Tensor:
    """The rows of the slots as [T, K], from token after token or from column after column."""
    return expandedRowIdx.reshape(num_tokens, topk) if by_row else expandedRowIdx.reshape(topk, num_tokens).t()


def _added_up(
    expandedX: Tensor,
    row_of_slot: Tensor,
    x1: Tensor | None,
    x2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    experts: Tensor | None,
    out: Tensor,
) -> tuple[int, Work]:
    def work() -> None:
        rows, ids = expandedX.reshape(-1, out.shape[1]), None if bias is None else experts
        plan = plan_from_row_of_slot(row_of_slot, len(out), len(rows), expert_of_slot=ids)
        start = x1 if x1 is None or x2 is None else (x1, x2)
        combine(rows, plan, None if scales is None else scales.reshape(-1), init=start, bias=bias, out=out)

    return zero_filled() if out.numel() == 0 else (0, work)


def _moe_finalize_routing(
    expandedX: Tensor,
    x1: Tensor,
    x2Optional: Tensor | None,
    bias: Tensor,
    scales: Tensor,
    expandedRowIdx: Tensor,
    expandedExpertIdx: Tensor,
    out: Tensor,
) -> tuple[int, Work]:
    """out[t] = x1[t] + x2[t] + the sum over k of scales[t, k] * (expandedX[row] + bias[expandedExpertIdx[t, k]]).

    The row of (t, k) is expandedRowIdx[t + k * T]; an index outside adds nothing. All floats have one dtype.
    """
    required(
        expandedX=expandedX,
        x1=x1,
        bias=bias,
        scales=scales,
        expandedRowIdx=expandedRowIdx,
        expandedExpertIdx=expandedExpertIdx,
        out=out,
    )
    typed("expandedX", expandedX, *FLOATS)
    floats = {"x1": x1, "x2Optional": x2Optional, "bias": bias, "scales": scales}
    for name, tensor in floats.items():
        typed(name, tensor, expandedX.dtype)
    typed("expandedRowIdx", expandedRowIdx, torch.int32)
    typed("expandedExpertIdx", expandedExpertIdx, torch.int32)
    typed("out", out, expandedX.dtype)
    ranked("expandedX", expandedX, 2)
    for name, tensor in floats.items():
        ranked(name, tensor, 2)
    ranked("expandedRowIdx", expandedRowIdx, 1)
    ranked("expandedExpertIdx", expandedExpertIdx, 2)
    (num_tokens, topk), (rows, hidden) = scales.shape, expandedX.shape
    for name, tensor in (("x1", x1), ("x2Optional", x2Optional), ("out", out)):
        shaped(name, tensor, (num_tokens, hidden), "[T, H]")
    shaped("expandedExpertIdx", expandedExpertIdx, (num_tokens, topk), "[T, K], as scales,")
    at_least("K of scales", topk, 1)
    at_least("E of bias", bias.shape[0], 1)
    shaped("bias", bias, (bias.shape[0], hidden), "[E, H]")
    shaped("expandedX", expandedX, (num_tokens * topk, hidden), "[T * K, H]")
    shaped("expandedRowIdx", expandedRowIdx, (rows,), "[T * K]")
    apart({"out": out}, expandedX, x1, x2Optional, bias, scales, expandedRowIdx, expandedExpertIdx)
    return _added_up(
        expandedX, _slots(expandedRowIdx, num_tokens, topk, False), x1, x2Optional, bias, scales, expandedExpertIdx, out
    )


aclnnMoeFinalizeRoutingGetWorkspaceSize, aclnnMoeFinalizeRouting = phases("MoeFinalizeRouting", _moe_finalize_routing)

# ---------------------------------------------------------------------------- MoeFinalizeRoutingV2


def _moe_finalize_routing_v2(
    expandedX: Tensor,
    expandedRowIdx: Tensor,
    x1Optional: Tensor | None,
    x2Optional: Tensor | None,
    biasOptional: Tensor | None,
    scalesOptional: Tensor | None,
    expertIdxOptional: Tensor | None,
    dropPadMode: int,
    out: Tensor,
) -> tuple[int, Work]:
    """out[t] = x1[t] + x2[t] + the sum over k of scales[t, k] * (expandedX[row] + bias[expertIdx[t, k]]).

    The row of (t, k) is expandedRowIdx[t + k * T] in dropPadMode 0 and 1, expandedRowIdx[t * K + k] in 2 and
    3; in 1 and 3 expandedX is [E, C, H]. A slot without a row adds nothing, not even its bias.
    """
    required(expandedX=expandedX, expandedRowIdx=expandedRowIdx, out=out)
    typed("expandedX", expandedX, *FLOATS)
    typed("expandedRowIdx", expandedRowIdx, torch.int32)
    typed("x1Optional", x1Optional, expandedX.dtype)
    typed("x2Optional", x2Optional, expandedX.dtype)
    typed("biasOptional", biasOptional, expandedX.dtype)
    typed("scalesOptional", scalesOptional, *FLOATS)
    typed("expertIdxOptional", expertIdxOptional, torch.int32)
    typed("out", out, expandedX.dtype)
    between("dropPadMode", dropPadMode, 0, 3, INNER_NULLPTR)
    if x2Optional is not None and x1Optional is None:
        raise wrong("x1Optional", "given with x2Optional", "null", INNER_NULLPTR)
    if biasOptional is not None and expertIdxOptional is None:
        raise wrong("expertIdxOptional", "given with biasOptional", "null", INNER_NULLPTR)
    padded, by_row = dropPadMode in (1, 3), dropPadMode in (2, 3)
    ranked("expandedX", expandedX, 3 if padded else 2, status=INNER_NULLPTR)
    ranked("expandedRowIdx", expandedRowIdx, 1, status=INNER_NULLPTR)
    ranked("scalesOptional", scalesOptional, 2, status=INNER_NULLPTR)
    hidden, slots = expandedX.shape[-1], expandedRowIdx.shape[0]
    num_tokens, topk = (slots, 1) if scalesOptional is None else tuple(scalesOptional.shape)
    shaped("expandedRowIdx", expandedRowIdx, (num_tokens * topk,), "[T * K]", INNER_NULLPTR)
    rows = expandedX.shape[0] * (expandedX.shape[1] if padded else 1)
    if not padded and rows > slots:
        raise wrong_shape("expandedX", f"[T * K, H] with T * K = {slots}", expandedX, INNER_NULLPTR)
    shaped("x1Optional", x1Optional, (num_tokens, hidden), "[T, H]", INNER_NULLPTR)
    shaped("x2Optional", x2Optional, (num_tokens, hidden), "[T, H]", INNER_NULLPTR)
    shaped("expertIdxOptional", expertIdxOptional, (num_tokens, topk), "[T, K]", INNER_NULLPTR)
    if biasOptional is not None and (biasOptional.ndim != 2 or biasOptional.shape[1] != hidden):
        raise wrong_shape("biasOptional", f"[E, H] with H = {hidden}", biasOptional, INNER_NULLPTR)
    shaped("out", out, (num_tokens, hidden), "[T, H]")
    apart(
        {"out": out},
        *(expandedX, expandedRowIdx, x1Optional, x2Optional, biasOptional, scalesOptional, expertIdxOptional),
    )

    return _added_up(
        expandedX,
        _slots(expandedRowIdx, num_tokens, topk, by_row),
        x1Optional,
        x2Optional,
        biasOptional,
        scalesOptional,
        expertIdxOptional,
        out,
    )


aclnnMoeFinalizeRoutingV2GetWorkspaceSize, aclnnMoeFinalizeRoutingV2 = phases(
    "MoeFinalizeRoutingV2", _moe_finalize_routing_v2
)


def _moe_finalize_routing_v2_grad(
    gradY: Tensor,
    expandedRowIdx: Tensor,
    expandedXOptional: Tensor | None,
    scalesOptional: Tensor | None,
    expertIdxOptional: Tensor | None,
    biasOptional: Tensor | None,
    dropPadMode: int,
    activeNum: int,
    expertNum: int,
    expertCapacity: int,
    gradExpandedXOut: Tensor,
    gradScalesOut: Tensor,
) -> tuple[int, Work]:
    """The gradients of MoeFinalizeRoutingV2 in expandedX and, with scales, in the scales; rows by row.

    A slot without a row has scales gradient 0. gradScalesOut must be there without scales too, and is then not
    written.
    """
    scales, rows_in = scalesOptional, expandedXOptional
    required(gradY=gradY, expandedRowIdx=expandedRowIdx, gradExpandedXOut=gradExpandedXOut, gradScalesOut=gradScalesOut)
    typed("gradY", gradY, *FLOATS)
    typed("expandedRowIdx", expandedRowIdx, torch.int32)
    typed("expandedXOptional", rows_in, gradY.dtype)
    typed("scalesOptional", scales, *FLOATS)
    typed("expertIdxOptional", expertIdxOptional, torch.int32)
    typed("biasOptional", biasOptional, gradY.dtype)
    typed("gradExpandedXOut", gradExpandedXOut, gradY.dtype)
    if scales is not None:
        typed("gradScalesOut", gradScalesOut, scales.dtype)
    between("dropPadMode", dropPadMode, 0, 1, INNER_NULLPTR)
    if scales is not None and rows_in is None:
        raise wrong("expandedXOptional", "given with scalesOptional", "null", INNER_NULLPTR)
    if biasOptional is not None and expertIdxOptional is None:
        raise wrong("expertIdxOptional", "given with biasOptional", "null", INNER_NULLPTR)
    ranked("gradY", gradY, 2, status=INNER_NULLPTR)
    ranked("expandedRowIdx", expandedRowIdx, 1, status=INNER_NULLPTR)
    ranked("scalesOptional", scales, 2, status=INNER_NULLPTR)
    num_tokens, hidden = gradY.shape
    topk = 1 if scales is None else scales.shape[1]
    slots = num_tokens * topk
    shaped("scalesOptional", scales, (num_tokens, topk), "[R, K]", INNER_NULLPTR)
    shaped("expandedRowIdx", expandedRowIdx, (slots,), "[R * K]", INNER_NULLPTR)
    shaped("expertIdxOptional", expertIdxOptional, (num_tokens, topk), "[R, K]", INNER_NULLPTR)
    if biasOptional is not None and (
        biasOptional.ndim != 2 or biasOptional.shape[0] < 1 or biasOptional.shape[1] != hidden
    ):
        raise wrong_shape("biasOptional", f"[E, H] with E >= 1 and H = {hidden}", biasOptional, INNER_NULLPTR)
    if dropPadMode:
        at_least("expertCapacity", expertCapacity, 1, INNER_NULLPTR)
        between("expertNum", expertNum, 1, LARGEST // expertCapacity, INNER_NULLPTR)
        if biasOptional is not None and expertNum != biasOptional.shape[0]:
            raise wrong("expertNum", f"{biasOptional.shape[0]}, as biasOptional", expertNum, INNER_NULLPTR)
        rows = expertNum * expertCapacity
        shape: tuple[int, ...] = (expertNum, expertCapacity, hidden)
        letters = "[E, C, H]"
    else:
        rows = activeNum if 0 < activeNum < slots else slots
        shape, letters = (rows, hidden), "[R * K or activeNum, H]"
    shaped("expandedXOptional", rows_in, shape, letters, INNER_NULLPTR)
    shaped("gradExpandedXOut", gradExpandedXOut, shape, letters)
    scales_out = None if scales is None else gradScalesOut
    shaped("gradScalesOut", scales_out, (num_tokens, topk), "[R, K]")
    outputs = {"gradExpandedXOut": gradExpandedXOut, "gradScalesOut": scales_out}
    apart(outputs, gradY, expandedRowIdx, rows_in, scales, expertIdxOptional, biasOptional)

    def work() -> None:
        target = target_of(gradExpandedXOut, rows, hidden)
        experts = None if biasOptional is None else expertIdxOptional
        plan = plan_from_row_of_slot(expandedRowIdx, num_tokens, rows, expert_of_slot=experts)
        if scales is None or rows_in is None or scales_out is None:
            spread(gradY, plan, out=target)
        elif biasOptional is None:
            unpermute_backward(gradY, rows_in.reshape(rows, hidden), plan, scales, out=(target, scales_out))
        else:
            spread(gradY, plan, scales.reshape(-1), out=target)
            dots = target_of(scales_out, slots)
            row_dots(rows_in.reshape(rows, hidden), gradY, plan, bias=biasOptional, dtype=scales.dtype, out=dots)
            deliver(dots, scales_out)
        deliver(target, gradExpandedXOut)

    return (0, work) if slots else zero_filled(gradExpandedXOut)


aclnnMoeFinalizeRoutingV2GradGetWorkspaceSize, aclnnMoeFinalizeRoutingV2Grad = phases(
    "MoeFinalizeRoutingV2Grad", _moe_finalize_routing_v2_grad
)

# ---------------------------------------------------------------------------- MoeFinalizeRoutingV3 and V4


def _expert_ranges(num_experts: int | None, **bounds: tuple[int, ...] | None) -> tuple[range, ...]:
    """The ranges of the special experts; null, empty and (-1, -1) are none."""
    ranges: dict[str, range] = {}
    for name, given in bounds.items():
        ranges[name] = NONE
        if not given or given == (-1, -1):
            continue
        last = "" if num_experts is None else f" <= {num_experts}"
        if len(given) != 2 or not 0 <= given[0] < given[1] or (num_experts is not None and given[1] > num_experts):
            raise wrong(name, f"[s, e) with 0 <= s < e{last}, or null", list(given), TILING)
        ranges[name] = range(*given)
        for other, taken in ranges.items():
            if other != name and max(taken.start, given[0]) < min(taken.stop, given[1]):
                raise wrong(name, f"apart from {other} = {[taken.start, taken.stop]}", list(given), TILING)
    return tuple(ranges.values())


def _moe_finalize_routing_v4(
    expandedX: Tensor,
    expandedRowIdx: Tensor,
    x1Optional: Tensor | None,
    x2Optional: Tensor | None,
    biasOptional: Tensor | None,
    scalesOptional: Tensor | None,
    expertIdxOptional: Tensor | None,
    xOptional: Tensor | None,
    alpha1Optional: Tensor | None,
    alpha2Optional: Tensor | None,
    vOptional: Tensor | None,
    dropPadMode: int,
    zeroExpertRange: tuple[int, ...] | None,
    copyExpertRange: tuple[int, ...] | None,
    constantExpertRange: tuple[int, ...] | None,
    k: int,
    out: Tensor,
) -> tuple[int, Work]:
    """MoeFinalizeRoutingV2 with experts that compute nothing, and K from k where there are no scales.

    With x and expertIdx, an expert of zeroExpertRange [s, e) adds nothing, one of copyExpertRange adds x[t] in place
    of its row, one of constantExpertRange x[t] * alpha1 + v * alpha2, each [e - s, H]; the bias and the scale are as
    for the others. A slot without a row adds nothing, of whatever expert.
    """
    required(expandedX=expandedX, expandedRowIdx=expandedRowIdx, out=out)
    typed("expandedX", expandedX, *FLOATS)
    typed("expandedRowIdx", expandedRowIdx, torch.int32)
    constants = {"alpha1Optional": alpha1Optional, "alpha2Optional": alpha2Optional, "vOptional": vOptional}
    tokens = {"x1Optional": x1Optional, "x2Optional": x2Optional, "xOptional": xOptional}
    for name, tensor in (tokens | {"biasOptional": biasOptional} | constants).items():
        typed(name, tensor, expandedX.dtype)
    typed("scalesOptional", scalesOptional, *FLOATS)
    typed("expertIdxOptional", expertIdxOptional, torch.int32)
    typed("out", out, expandedX.dtype)
    between("dropPadMode", dropPadMode, 0, 3, TILING)
    padded, by_row = dropPadMode in (1, 3), dropPadMode in (2, 3)
    ranked("expandedRowIdx", expandedRowIdx, 1, status=TILING)
    ranked("scalesOptional", scalesOptional, 2, status=TILING)
    topk = k
    if scalesOptional is not None:
        topk = scalesOptional.shape[1]
        if k > 1 and topk != k:
            raise wrong_shape("scalesOptional", f"[T, K] with K = {k}, as k,", scalesOptional, TILING)
    at_least("K", topk, 1, TILING)
    num_tokens = divides("the length of expandedRowIdx", expandedRowIdx.shape[0], "K", topk, TILING)
    shaped("scalesOptional", scalesOptional, (num_tokens, topk), "[T, K]", TILING)
    ranked("expandedX", expandedX, 3 if padded else 2, status=TILING)
    hidden, num_experts = expandedX.shape[-1], expandedX.shape[0] if padded else None
    shaped("x1Optional", x1Optional, (num_tokens, hidden), "[T, H]", TILING)
    shaped("x2Optional", x2Optional, (num_tokens, hidden), "[T, H]", TILING)
    if x2Optional is not None and x1Optional is None:
        raise wrong("x1Optional", "given with x2Optional", "null", TILING)
    if biasOptional is not None:
        if expertIdxOptional is None:
            raise wrong("expertIdxOptional", "given with biasOptional", "null", TILING)
        ranked("biasOptional", biasOptional, 2, status=TILING)
        num_experts = biasOptional.shape[0] if num_experts is None else num_experts
        shaped("biasOptional", biasOptional, (num_experts, hidden), "[E, H]", TILING)
        at_least("E of biasOptional", num_experts, max(topk, 1), TILING)
    shaped("expertIdxOptional", expertIdxOptional, (num_tokens, topk), "[T, K]", TILING)
    shaped("xOptional", xOptional, (num_tokens, hidden), "[T, H]", TILING)
    zero, copy, constant = _expert_ranges(
        num_experts,
        zeroExpertRange=zeroExpertRange,
        copyExpertRange=copyExpertRange,
        constantExpertRange=constantExpertRange,
    )
    for name, tensor in constants.items():
        ranked(name, tensor, 2, status=TILING)
        if tensor is not None:
            length = len(constant) or tensor.shape[0]
            shaped(name, tensor, (length, hidden), "[e - s, H] of constantExpertRange", TILING)
    shaped("out", out, (num_tokens, hidden), "[T, H]", TILING)
    apart(
        {"out": out},
        *(expandedX, expandedRowIdx, biasOptional, scalesOptional, expertIdxOptional),
        *tokens.values(),
        *constants.values(),
    )
    row_of_slot = _slots(expandedRowIdx, num_tokens, topk, by_row)
    x, ids = xOptional, expertIdxOptional
    if x is None or ids is None or not (zero or copy or constant) or out.numel() == 0:
        return _added_up(expandedX, row_of_slot, x1Optional, x2Optional, biasOptional, scalesOptional, ids, out)
    shared = tuple(start for start in (x1Optional, x2Optional) if start is not None)
    given = None
    if alpha1Optional is not None and alpha2Optional is not None and vOptional is not None:
        given = alpha1Optional, alpha2Optional, vOptional

    def work() -> None:
        result = combine_special(
            expandedX.reshape(-1, hidden),
            row_of_slot,
            ids,
            x,
            scalesOptional,
            init=shared,
            bias=biasOptional,
            zero=zero,
            copy=copy,
            constant=constant,
            constants=given,
        )
        out.copy_(result)

    return 0, work


aclnnMoeFinalizeRoutingV4GetWorkspaceSize, aclnnMoeFinalizeRoutingV4 = phases(
    "MoeFinalizeRoutingV4", _moe_finalize_routing_v4
)


def _moe_finalize_routing_v3(
    expandedX: Tensor,
    expandedRowIdx: Tensor,
    x1Optional: Tensor | None,
    x2Optional: Tensor | None,
    biasOptional: Tensor | None,
    scalesOptional: Tensor | None,
    expertIdxOptional: Tensor | None,
    xOptional: Tensor | None,
    alpha1Optional: Tensor | None,
    alpha2Optional: Tensor | None,
    vOptional: Tensor | None,
    dropPadMode: int,
    zeroExpertRange: tuple[int, ...] | None,
    copyExpertRange: tuple[int, ...] | None,
    constantExpertRange: tuple[int, ...] | None,
    out: Tensor,
) -> tuple[int, Work]:
    """MoeFinalizeRoutingV4 with K = 1 where there are no scales."""
    return _moe_finalize_routing_v4(
        expandedX,
        expandedRowIdx,
        x1Optional,
        x2Optional,
        biasOptional,
        scalesOptional,
        expertIdxOptional,
        xOptional,
        alpha1Optional,
        alpha2Optional,
        vOptional,
        dropPadMode,
        zeroExpertRange,
        copyExpertRange,
        constantExpertRange,
        1,
        out,
    )


aclnnMoeFinalizeRoutingV3GetWorkspaceSize, aclnnMoeFinalizeRoutingV3 = phases(
    "MoeFinalizeRoutingV3", _moe_finalize_routing_v3
)
