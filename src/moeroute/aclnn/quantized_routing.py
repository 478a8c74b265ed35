"""MoeInitRouting with int8 rows: MoeInitRoutingV3, which also routes without, and the two of MoeInitRoutingQuant.

Every operator has the same rungs: nulls, dtypes, shapes and limits, outputs, work.
"""

import torch
from torch import Tensor

from moeroute.aclnn.core import (
    FLOATS,
    TILING,
    Work,
    apart,
    at_least,
    between,
    counts_of,
    phases,
    ranked,
    required,
    shaped,
    typed,
    wrong,
    wrong_shape,
)
from moeroute.aclnn.init_routing import by_column
from moeroute.dtypes import LARGEST
from moeroute.ops.half_quantization import quantize_half
from moeroute.ops.init_routing import first_rows, slots_by_expert, spread_int8, used_pairs
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.quantization.op import quantize
from moeroute.ops.rows.op import spread

_NONE, _STATIC, _DYNAMIC = -1, 0, 1
_CUMULATIVE, _COUNTS, _PAIRS = 0, 1, 2
_MAX_EXPERTS, _MAX_PAIRED = 10_240, 5_120


def _static_factors(**factors: Tensor | None) -> None:
    """Refuse what is no scale and offset of quantMode 0."""
    for name, tensor in factors.items():
        if tensor is None:
            raise wrong(name, "given with quantMode 0", "null", TILING)
        shaped(name, tensor, (1,), "[1]", TILING)


# ---------------------------------------------------------------------------- MoeInitRoutingV3


def _active_range(given: tuple[int, ...] | None, num_experts: int, drop: bool, paired: bool) -> tuple[int, int]:
    first, last = given or (0, num_experts)
    if drop and (first, last) != (0, num_experts):
        raise wrong("activeExpertRangeOptional", f"[0, E) = {[0, num_experts]} with dropPadMode 1", given, TILING)
    if not 0 <= first < last <= num_experts:
        raise wrong("activeExpertRangeOptional", f"[s, e) with 0 <= s < e <= {num_experts}", [first, last], TILING)
    between("e of activeExpertRangeOptional", last, 1, _MAX_PAIRED if paired else _MAX_EXPERTS, TILING)
    return first, last


def _moe_init_routing_v3(
    x: Tensor,
    expertIdx: Tensor,
    scaleOptional: Tensor | None,
    offsetOptional: Tensor | None,
    activeNum: int,
    expertCapacity: int,
    expertNum: int,
    dropPadMode: int,
    expertTokensNumType: int,
    expertTokensNumFlag: bool,
    quantMode: int,
    activeExpertRangeOptional: tuple[int, ...] | None,
    rowIdxType: int,
    expandedXOut: Tensor,
    expandedRowIdxOut: Tensor,
    expertTokensCountOrCumsumOut: Tensor,
    expandedScaleOut: Tensor,
) -> tuple[int, Work]:
    """Token copies in the order of the experts of a range [s, e), as they are or as int8; their numbers and counts.

    dropPadMode 0: rows without gaps, at most activeNum where that is above 0. 1: expertCapacity rows an expert, zeros
    where tokens are missing. quantMode -1 copies rows, and scale [T] with them; 0 is row * scale + offset; 1 gives each
    row its own scale, after a factor of scale [1, H] or [e - s, H]. rowIdxType 0: the row of each slot, 1: the slots in
    sorted order, those out of the range last. expertTokensNumType 0: cumulative counts, 1: counts, 2: pairs of expert
    and count.
    """
    required(
        x=x,
        expertIdx=expertIdx,
        expandedXOut=expandedXOut,
        expandedRowIdxOut=expandedRowIdxOut,
        expertTokensCountOrCumsumOut=expertTokensCountOrCumsumOut,
        expandedScaleOut=expandedScaleOut,
    )
    scale, scale_out = scaleOptional, expandedScaleOut
    offset = offsetOptional if quantMode == _STATIC else None
    counts_out = expertTokensCountOrCumsumOut if expertTokensNumFlag else None
    drop, paired = dropPadMode == 1, expertTokensNumType == _PAIRS
    known = quantMode in (_NONE, _STATIC, _DYNAMIC)
    typed("x", x, *FLOATS, torch.int8)
    if known and quantMode != _NONE:
        typed("x", x, *FLOATS)
    typed("expertIdx", expertIdx, torch.int32)
    typed("scaleOptional", scale, torch.float32)
    typed("offsetOptional", offset, torch.float32)
    if known:
        typed("expandedXOut", expandedXOut, *((x.dtype,) if quantMode == _NONE else ()), torch.int8)
    typed("expandedRowIdxOut", expandedRowIdxOut, torch.int32)
    typed("expertTokensCountOrCumsumOut", expertTokensCountOrCumsumOut, torch.int64)
    typed("expandedScaleOut", scale_out, torch.float32)
    between("dropPadMode", dropPadMode, 0, 1, TILING)
    if not drop:
        at_least("activeNum", activeNum, -1, TILING)
    at_least("expertNum", expertNum, 1, TILING)
    if len(activeExpertRangeOptional or ()) not in (0, 2):
        raise wrong("activeExpertRangeOptional", "of size 0 or 2", activeExpertRangeOptional, TILING)
    if drop:
        between("expertCapacity", expertCapacity, 1, LARGEST // expertNum, TILING)
        between("rowIdxType", rowIdxType, 0, 0, TILING)
    between("expertTokensNumType", expertTokensNumType, _CUMULATIVE, _PAIRS, TILING)
    if drop and counts_out is not None:
        between("expertTokensNumType with dropPadMode 1", expertTokensNumType, _COUNTS, _COUNTS, TILING)
    first, last = _active_range(activeExpertRangeOptional, expertNum, drop, paired)
    between("quantMode", quantMode, _NONE, _DYNAMIC, TILING)
    between("rowIdxType", rowIdxType, 0, 1, TILING)
    ranked("x", x, 2, status=TILING)
    ranked("expertIdx", expertIdx, 2, status=TILING)
    (num_tokens, hidden), topk = x.shape, expertIdx.shape[1]
    shaped("expertIdx", expertIdx, (num_tokens, topk), "[T, K] with T as x,", TILING)
    slots, held = num_tokens * topk, last - first
    if drop:
        between("expertCapacity", expertCapacity, 1, num_tokens, TILING)
    if quantMode == _NONE:
        shaped("scaleOptional", scale, (num_tokens,), "[T]", TILING)
    elif quantMode == _STATIC:
        _static_factors(scaleOptional=scale, offsetOptional=offset)
    elif scale is not None and tuple(scale.shape) not in ((1, hidden), (held, hidden)):
        raise wrong_shape("scaleOptional", f"[1, H] or [e - s, H] = {[held, hidden]}", scale, TILING)
    if drop:
        rows = expertNum * expertCapacity
        shaped("expandedXOut", expandedXOut, (expertNum, expertCapacity, hidden), "[E, C, H]", TILING)
    else:
        rows = min(activeNum, slots) if activeNum > 0 else slots
        shaped("expandedXOut", expandedXOut, (rows, hidden), "[M, H]", TILING)
    shaped("expandedRowIdxOut", expandedRowIdxOut, (slots,), "[T * K]", TILING)
    shaped(
        "expertTokensCountOrCumsumOut", counts_out, (expertNum, 2) if paired else (held,), "[e - s] or [E, 2]", TILING
    )
    scaled = quantMode == _DYNAMIC or (quantMode == _NONE and scale is not None)
    if scaled and tuple(scale_out.shape) not in ((rows,), (rows, 1)):
        raise wrong_shape("expandedScaleOut", f"[M] = {[rows]}", scale_out, TILING)
    outputs = {
        "expandedXOut": expandedXOut,
        "expandedRowIdxOut": expandedRowIdxOut,
        "expertTokensCountOrCumsumOut": counts_out,
        "expandedScaleOut": scale_out if scaled else None,
    }
    apart(outputs, x, expertIdx, scale, offset)

    def work() -> None:
        uncut = plan_from_expert_ids(expertIdx, expertNum, expert_range=(first, last), num_rows=slots)
        plan = uncut
        if drop:
            plan = plan_from_expert_ids(expertIdx, expertNum, capacity=expertCapacity, pad_to_capacity=True)
        expandedRowIdxOut.copy_(slots_by_expert(expertIdx, first) if rowIdxType else plan.row_of_slot)
        if counts_out is not None:
            counts = counts_of(uncut, expertTokensNumType == _CUMULATIVE).long()
            counts_out.copy_(used_pairs(counts, first, expertNum) if paired else counts)
        plan = first_rows(plan, rows)
        if quantMode == _DYNAMIC:
            result, scales = spread_int8(x, plan, expertIdx, first, scale)
            scale_out.copy_(scales.view(scale_out.shape))
        elif quantMode == _STATIC and scale is not None and offset is not None:
            result = quantize(x, scale, offset, plan=plan)
        else:
            result = spread(x, plan)
            if scale is not None:
                scale_out.copy_(spread(scale[:, None], plan).view(scale_out.shape))
            if expandedXOut.dtype is not x.dtype:  # the shipped example: the rows' memory, as much as int8 has room for
                result = result.reshape(-1).view(torch.int8)[: expandedXOut.numel()]
        expandedXOut.copy_(result.view(expandedXOut.shape))

    return 0, work


aclnnMoeInitRoutingV3GetWorkspaceSize, aclnnMoeInitRoutingV3 = phases("MoeInitRoutingV3", _moe_init_routing_v3)

# ---------------------------------------------------------------------------- MoeInitRoutingQuant


def _moe_init_routing_quant(
    x: Tensor,
    rowIdx: Tensor,
    expertIdx: Tensor,
    activeNum: int,
    scale: float,
    offset: float,
    expandedXOut: Tensor,
    expandedRowIdxOut: Tensor,
    expandedExpertIdxOut: Tensor,
) -> tuple[int, Work]:
    """MoeInitRouting with rows as int8: x * scale + offset in half precision."""

    def quantized(tokens: Tensor) -> Tensor:
        factors = (torch.tensor(value, dtype=torch.float32, device=tokens.device) for value in (scale, offset))
        return quantize_half(tokens, *factors)

    return by_column(x, rowIdx, expertIdx, activeNum, expandedXOut, expandedRowIdxOut, expandedExpertIdxOut, quantized)


aclnnMoeInitRoutingQuantGetWorkspaceSize, aclnnMoeInitRoutingQuant = phases(
    "MoeInitRoutingQuant", _moe_init_routing_quant
)

# ---------------------------------------------------------------------------- MoeInitRoutingQuantV2


def _moe_init_routing_quant_v2(
    x: Tensor,
    expertIdx: Tensor,
    scaleOptional: Tensor | None,
    offsetOptional: Tensor | None,
    activeNum: int,
    expertCapacity: int,
    expertNum: int,
    dropPadMode: int,
    expertTokensCountOrCumsumFlag: int,
    expertTokensBeforeCapacityFlag: bool,
    quantMode: int,
    expandedXOut: Tensor,
    expandedRowIdxOut: Tensor,
    expertTokensCountOrCumsumOutOptional: Tensor | None,
    expertTokensBeforeCapacityOutOptional: Tensor | None,
    dynamicQuantScaleOutOptional: Tensor | None,
) -> tuple[int, Work]:
    """MoeInitRoutingV2 with rows as int8.

    quantMode 0: x * scale + offset in half precision. 1: each row has its own scale, after a factor of scale [1, H]
    or [E, H]. An output that is not asked for may be null and is not written.
    """
    required(x=x, expertIdx=expertIdx, expandedXOut=expandedXOut, expandedRowIdxOut=expandedRowIdxOut)
    drop, flag = dropPadMode == 1, expertTokensCountOrCumsumFlag
    counted, before, dynamic = flag > 0 and not drop, expertTokensBeforeCapacityFlag and drop, quantMode == _DYNAMIC
    counts_out = expertTokensCountOrCumsumOutOptional if counted else None
    before_out = expertTokensBeforeCapacityOutOptional if before else None
    scale_out = dynamicQuantScaleOutOptional if dynamic else None
    scale, offset = scaleOptional, None if dynamic else offsetOptional
    typed("x", x, *FLOATS)
    typed("expertIdx", expertIdx, torch.int32)
    typed("scaleOptional", scale, torch.float32)
    typed("offsetOptional", offset, torch.float32)
    typed("expandedXOut", expandedXOut, torch.int8)
    typed("expandedRowIdxOut", expandedRowIdxOut, torch.int32)
    typed("expertTokensCountOrCumsumOutOptional", counts_out, torch.int32)
    typed("expertTokensBeforeCapacityOutOptional", before_out, torch.int32)
    typed("dynamicQuantScaleOutOptional", scale_out, torch.float32)
    between("quantMode", quantMode, _STATIC, _DYNAMIC, TILING)
    ranked("x", x, 2, status=TILING)
    ranked("expertIdx", expertIdx, 2, status=TILING)
    (num_tokens, hidden), topk = x.shape, expertIdx.shape[1]
    shaped("expertIdx", expertIdx, (num_tokens, topk), "[T, K] with T as x,", TILING)
    for name, value in (("activeNum", activeNum), ("expertCapacity", expertCapacity), ("expertNum", expertNum)):
        at_least(name, value, 0, TILING)
    between("dropPadMode", dropPadMode, 0, 1, TILING)
    if drop:
        at_least("expertCapacity", expertCapacity, 1, TILING)
        between("expertNum", expertNum, 1, LARGEST // expertCapacity, TILING)
    between("expertTokensCountOrCumsumFlag", flag, 0, 2, TILING)
    if counted:
        between("expertNum", expertNum, 1, LARGEST, TILING)
    slots = num_tokens * topk
    if drop:
        between("expertCapacity", expertCapacity, 1, num_tokens, TILING)
        rows = expertNum * expertCapacity
        shaped("expandedXOut", expandedXOut, (expertNum, expertCapacity, hidden), "[E, C, H]", TILING)
    else:
        rows = min(activeNum, slots) if activeNum > 0 else slots
        shaped("expandedXOut", expandedXOut, (rows, hidden), "[M, H]", TILING)
    shaped("expandedRowIdxOut", expandedRowIdxOut, (slots,), "[T * K]", TILING)
    for name, tensor, wanted, length, letters in (
        ("expertTokensCountOrCumsumOutOptional", counts_out, counted, expertNum, "[E]"),
        ("expertTokensBeforeCapacityOutOptional", before_out, before, expertNum, "[E]"),
    ):
        if wanted and tensor is None:
            raise wrong(name, "given where it is asked for", "null", TILING)
        shaped(name, tensor, (length,), letters, TILING)
    if not dynamic:
        _static_factors(scaleOptional=scale, offsetOptional=offset)
    elif scale is not None and tuple(scale.shape) not in ((1, hidden), (expertNum, hidden)):
        raise wrong_shape("scaleOptional", f"[1, H] or [E, H] = {[expertNum, hidden]}", scale, TILING)
    if dynamic and scale_out is None:
        raise wrong("dynamicQuantScaleOutOptional", "given with quantMode 1", "null", TILING)
    shaped("dynamicQuantScaleOutOptional", scale_out, (rows,), "[M]", TILING)
    outputs = {
        "expandedXOut": expandedXOut,
        "expandedRowIdxOut": expandedRowIdxOut,
        "expertTokensCountOrCumsumOutOptional": counts_out,
        "expertTokensBeforeCapacityOutOptional": before_out,
        "dynamicQuantScaleOutOptional": scale_out,
    }
    apart(outputs, x, expertIdx, scale, offset)

    def work() -> None:
        plan = (
            plan_from_expert_ids(expertIdx, expertNum, capacity=expertCapacity, pad_to_capacity=True)
            if drop
            else plan_from_expert_ids(expertIdx, None if counts_out is None else expertNum, num_rows=slots)
        )
        expandedRowIdxOut.copy_(plan.row_of_slot)
        if counts_out is not None:
            counts_out.copy_(counts_of(plan, cumulative=flag == 1))
        if before_out is not None:
            before_out.copy_(counts_of(plan_from_expert_ids(expertIdx, expertNum, num_rows=slots)))
        plan = first_rows(plan, rows)
        if scale_out is not None:
            result, scales = spread_int8(x, plan, expertIdx, 0, scale)
            scale_out.copy_(scales)
        elif scale is not None and offset is not None:
            result = spread(quantize_half(x, scale, offset), plan)
        expandedXOut.copy_(result.view(expandedXOut.shape))

    return 0, work


aclnnMoeInitRoutingQuantV2GetWorkspaceSize, aclnnMoeInitRoutingQuantV2 = phases(
    "MoeInitRoutingQuantV2", _moe_init_routing_quant_v2
)
