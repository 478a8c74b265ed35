"""MoeFinalizeRouting and its gradient: rows back to tokens, with shared experts and biases.

Every operator has the same rungs: nulls, dtypes, shapes and limits, outputs, work.
"""

import torch
from torch import Tensor

from moeroute.aclnn.core import (
    FLOATS,
    INNER_NULLPTR,
    LARGEST,
    Work,
    apart,
    at_least,
    between,
    deliver,
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
from moeroute.ops.permutation.op import combine, row_dots, spread, unpermute_backward
from moeroute.ops.planning.op import (
    plan_from_row_of_slot,
)

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

    def work() -> None:
        row_of_slot = (
            expandedRowIdx.reshape(num_tokens, topk) if by_row else expandedRowIdx.reshape(topk, num_tokens).t()
        )
        experts = None if biasOptional is None else expertIdxOptional
        plan = plan_from_row_of_slot(row_of_slot, num_tokens, rows, expert_of_slot=experts)
        start = x1Optional if x1Optional is None or x2Optional is None else (x1Optional, x2Optional)
        weights = None if scalesOptional is None else scalesOptional.reshape(-1)
        combine(expandedX.reshape(rows, hidden), plan, weights, init=start, bias=biasOptional, out=out)

    return zero_filled() if out.numel() == 0 else (0, work)


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
