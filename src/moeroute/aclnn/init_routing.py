"""MoeInitRouting and its gradient: tokens to expert order, the documents' other way.

Every operator has the same rungs: nulls, dtypes, shapes and limits, outputs, work.
"""

from collections.abc import Callable

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
    counts_of,
    deliver,
    divides,
    phases,
    ranked,
    required,
    shaped,
    target_of,
    typed,
    wrong_shape,
)
from moeroute.dtypes import LARGEST
from moeroute.ops.indices.op import plan_from_row_of_slot
from moeroute.ops.init_routing import column_routing, first_rows
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.rows.op import combine, spread

# ---------------------------------------------------------------------------- MoeInitRouting


def by_column(
    x: Tensor,
    rowIdx: Tensor,
    expertIdx: Tensor,
    activeNum: int,
    expandedXOut: Tensor,
    expandedRowIdxOut: Tensor,
    expandedExpertIdxOut: Tensor,
    quantized: Callable[[Tensor], Tensor] | None = None,
) -> tuple[int, Work]:
    """MoeInitRouting, and with `quantized` what copies int8 rows."""
    required(
        x=x,
        rowIdx=rowIdx,
        expertIdx=expertIdx,
        expandedXOut=expandedXOut,
        expandedRowIdxOut=expandedRowIdxOut,
        expandedExpertIdxOut=expandedExpertIdxOut,
    )
    typed("x", x, *FLOATS)
    typed("rowIdx", rowIdx, torch.int32)
    typed("expertIdx", expertIdx, torch.int32)
    typed("expandedXOut", expandedXOut, x.dtype if quantized is None else torch.int8)
    typed("expandedRowIdxOut", expandedRowIdxOut, torch.int32)
    typed("expandedExpertIdxOut", expandedExpertIdxOut, torch.int32)
    ranked("x", x, 2, status=TILING)
    ranked("rowIdx", rowIdx, 2, status=TILING)
    shaped("expertIdx", expertIdx, tuple(rowIdx.shape), "[T, K], as rowIdx,", TILING)
    num_tokens, topk = rowIdx.shape
    hidden, slots = x.shape[1], num_tokens * topk
    shaped("x", x, (num_tokens, hidden), "[T, H] with T as rowIdx,", TILING)
    at_least("activeNum", activeNum, 0, TILING)
    rows = min(num_tokens, activeNum) * topk
    ranked("expandedXOut", expandedXOut, 2, status=TILING)
    ranked("expandedRowIdxOut", expandedRowIdxOut, 1, status=TILING)
    index_shape = tuple(expandedRowIdxOut.shape)
    shaped("expandedExpertIdxOut", expandedExpertIdxOut, index_shape, "[T * K], as expandedRowIdxOut,", TILING)
    shaped("expandedXOut", expandedXOut, (rows, hidden), "[min(T, activeNum) * K, H]", TILING)
    shaped("expandedRowIdxOut", expandedRowIdxOut, (slots,), "[T * K]", TILING)
    outputs = {
        "expandedXOut": expandedXOut,
        "expandedRowIdxOut": expandedRowIdxOut,
        "expandedExpertIdxOut": expandedExpertIdxOut,
    }
    apart(outputs, x, rowIdx, expertIdx)

    def work() -> None:
        plan, numbers, ids = column_routing(rowIdx, expertIdx, rows)
        expandedExpertIdxOut.copy_(ids)
        expandedRowIdxOut.copy_(numbers)
        spread(x if quantized is None else quantized(x), plan, out=expandedXOut)

    return 0, work


def _moe_init_routing(
    x: Tensor,
    rowIdx: Tensor,
    expertIdx: Tensor,
    activeNum: int,
    expandedXOut: Tensor,
    expandedRowIdxOut: Tensor,
    expandedExpertIdxOut: Tensor,
) -> tuple[int, Work]:
    """Token copies in the stable order of their expert ids, which come sorted too, for slots numbered by column.

    rowIdx [T, K] is the number of each slot, k * T + t; expandedRowIdx is the row of each number. activeNum counts
    tokens: expandedX has min(activeNum, T) * K rows.
    """
    return by_column(x, rowIdx, expertIdx, activeNum, expandedXOut, expandedRowIdxOut, expandedExpertIdxOut)


aclnnMoeInitRoutingGetWorkspaceSize, aclnnMoeInitRouting = phases("MoeInitRouting", _moe_init_routing)

# ---------------------------------------------------------------------------- MoeInitRoutingV2


def _moe_init_routing_v2(
    x: Tensor,
    expertIdx: Tensor,
    activeNum: int,
    expertCapacity: int,
    expertNum: int,
    dropPadMode: int,
    expertTokensCountOrCumsumFlag: int,
    expertTokensBeforeCapacityFlag: bool,
    expandedXOut: Tensor,
    expandedRowIdxOut: Tensor,
    expertTokensCountOrCumsumOut: Tensor | None,
    expertTokensBeforeCapacityOut: Tensor | None,
) -> tuple[int, Work]:
    """Token copies in expert order and the row of each slot.

    dropPadMode 0: rows without gaps, the first activeNum of them where that is above 0; flag 1 asks for the
    cumulative counts of the experts, 2 for the counts. 1: expertCapacity rows for each of expertNum experts,
    zeros where tokens are missing, row -1 for a slot over the capacity; the other flag asks for the counts
    before the capacity.
    """
    count_or_cumsum, drop = expertTokensCountOrCumsumFlag, dropPadMode == 1
    counts_out = expertTokensCountOrCumsumOut if count_or_cumsum > 0 and not drop else None
    before_out = expertTokensBeforeCapacityOut if expertTokensBeforeCapacityFlag and drop else None
    required(x=x, expertIdx=expertIdx, expandedXOut=expandedXOut, expandedRowIdxOut=expandedRowIdxOut)
    if count_or_cumsum > 0 and not drop:
        required(expertTokensCountOrCumsumOut=counts_out)
    if expertTokensBeforeCapacityFlag and drop:
        required(expertTokensBeforeCapacityOut=before_out)
    typed("x", x, *FLOATS)
    typed("expertIdx", expertIdx, torch.int32, torch.int64)
    typed("expandedXOut", expandedXOut, x.dtype)
    typed("expandedRowIdxOut", expandedRowIdxOut, torch.int32)
    typed("expertTokensCountOrCumsumOut", counts_out, torch.int32)
    typed("expertTokensBeforeCapacityOut", before_out, torch.int32)
    ranked("x", x, 2, status=INNER_NULLPTR)
    ranked("expertIdx", expertIdx, 1, 2, status=INNER_NULLPTR)
    num_tokens, hidden = x.shape
    topk = expertIdx.shape[1] if expertIdx.ndim == 2 else 1
    if expertIdx.shape[0] != num_tokens:
        raise wrong_shape("expertIdx", f"[T, K] with T = {num_tokens}, as x,", expertIdx, INNER_NULLPTR)
    at_least("activeNum", activeNum, -1, INNER_NULLPTR)
    at_least("expertCapacity", expertCapacity, 0, INNER_NULLPTR)
    at_least("expertNum", expertNum, 0, INNER_NULLPTR)
    between("dropPadMode", dropPadMode, 0, 1, INNER_NULLPTR)
    between("expertTokensCountOrCumsumFlag", count_or_cumsum, 0, 2, INNER_NULLPTR)
    slots = num_tokens * topk
    if drop:
        between("expertCapacity", expertCapacity, 1, num_tokens, INNER_NULLPTR)
        between("expertNum", expertNum, 1, LARGEST // expertCapacity, INNER_NULLPTR)
        rows = expertNum * expertCapacity
        shaped("expandedXOut", expandedXOut, (expertNum, expertCapacity, hidden), "[E, C, H]")
    else:
        if count_or_cumsum > 0:
            between("expertNum", expertNum, 1, LARGEST, INNER_NULLPTR)
        rows = min(activeNum, slots) if activeNum > 0 else slots
        shaped("expandedXOut", expandedXOut, (rows, hidden), "[R, H]")
    shaped("expandedRowIdxOut", expandedRowIdxOut, (slots,), "[T * K]")
    shaped("expertTokensCountOrCumsumOut", counts_out, (expertNum,), "[E]")
    shaped("expertTokensBeforeCapacityOut", before_out, (expertNum,), "[E]")
    outputs = {
        "expandedXOut": expandedXOut,
        "expandedRowIdxOut": expandedRowIdxOut,
        "expertTokensCountOrCumsumOut": counts_out,
        "expertTokensBeforeCapacityOut": before_out,
    }
    apart(outputs, x, expertIdx)

    def work() -> None:
        index = expandedRowIdxOut
        if drop:
            plan = plan_from_expert_ids(expertIdx, expertNum, capacity=expertCapacity, pad_to_capacity=True, out=index)
        else:
            plan = plan_from_expert_ids(expertIdx, None if counts_out is None else expertNum, num_rows=slots, out=index)
        if before_out is not None:
            before_out.copy_(counts_of(plan_from_expert_ids(expertIdx, expertNum, num_rows=slots)))
        if counts_out is not None:
            counts_out.copy_(counts_of(plan, cumulative=count_or_cumsum == 1))
        plan = first_rows(plan, rows)
        target = target_of(expandedXOut, rows, hidden)
        spread(x, plan, out=target)
        deliver(target, expandedXOut)

    return 0, work


aclnnMoeInitRoutingV2GetWorkspaceSize, aclnnMoeInitRoutingV2 = phases("MoeInitRoutingV2", _moe_init_routing_v2)


def _moe_init_routing_v2_grad(
    gradExpandedX: Tensor,
    expandedRowIdx: Tensor,
    topK: int,
    dropPadMode: int,
    activeNum: int,
    out: Tensor,
) -> tuple[int, Work]:
    """The gradient of MoeInitRoutingV2: out[t] is the sum of the rows of token t's topK slots that have one."""
    required(gradExpandedX=gradExpandedX, expandedRowIdx=expandedRowIdx, out=out)
    typed("gradExpandedX", gradExpandedX, *FLOATS)
    typed("expandedRowIdx", expandedRowIdx, torch.int32)
    typed("out", out, gradExpandedX.dtype)
    between("dropPadMode", dropPadMode, 0, 1, INNER_NULLPTR)
    at_least("topK", topK, 1, INNER_NULLPTR)
    at_least("activeNum", activeNum, 0, INNER_NULLPTR)
    ranked("expandedRowIdx", expandedRowIdx, 1, status=INNER_NULLPTR)
    slots = expandedRowIdx.shape[0]
    num_tokens = divides("the length of expandedRowIdx", slots, "topK", topK, INNER_NULLPTR)
    ranked("gradExpandedX", gradExpandedX, 3 if dropPadMode else 2, status=INNER_NULLPTR)
    hidden = gradExpandedX.shape[-1]
    if dropPadMode:
        rows = gradExpandedX.shape[0] * gradExpandedX.shape[1]
    else:
        rows = activeNum or slots
        shaped("gradExpandedX", gradExpandedX, (rows, hidden), "[R, H]", INNER_NULLPTR)
    shaped("out", out, (num_tokens, hidden), "[T, H]", INNER_NULLPTR)
    apart({"out": out}, gradExpandedX, expandedRowIdx)

    def work() -> None:
        plan = plan_from_row_of_slot(expandedRowIdx, num_tokens, rows)
        combine(gradExpandedX.reshape(rows, hidden), plan, out=out)

    return 0, work


aclnnMoeInitRoutingV2GradGetWorkspaceSize, aclnnMoeInitRoutingV2Grad = phases(
    "MoeInitRoutingV2Grad", _moe_init_routing_v2_grad
)
