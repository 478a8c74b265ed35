"""MoeInitRouting and MoeFinalizeRouting with their gradients, expert counts, and regrouping across ranks.

Every operator has the same rungs: nulls, dtypes, shapes and limits, outputs, work.
"""

import torch
from torch import Tensor

from moeroute.aclnn.core import (
    FLOATS,
    INNER_NULLPTR,
    MAX_EXPERTS,
    TILING,
    Work,
    apart,
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
from moeroute.ops.permutation.op import combine, row_dots, spread, unpermute_backward
from moeroute.ops.planning.op import (
    RoutingPlan,
    plan_from_expert_ids,
    plan_from_row_of_slot,
    plan_from_segments,
)

_LARGEST = 2**31 - 1


def _counts(plan: RoutingPlan, cumulative: bool = False) -> Tensor:
    counts = plan.tokens_up_to_expert if cumulative else plan.tokens_per_expert
    assert counts is not None  # noqa: S101 - for the type checker: a plan with experts has them
    return counts


# ---------------------------------------------------------------------------- MoeInitRoutingV2


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise wrong(name, f"at least {least}", value, INNER_NULLPTR)


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
    _at_least("activeNum", activeNum, -1)
    _at_least("expertCapacity", expertCapacity, 0)
    _at_least("expertNum", expertNum, 0)
    between("dropPadMode", dropPadMode, 0, 1, INNER_NULLPTR)
    between("expertTokensCountOrCumsumFlag", count_or_cumsum, 0, 2, INNER_NULLPTR)
    slots = num_tokens * topk
    if drop:
        between("expertCapacity", expertCapacity, 1, num_tokens, INNER_NULLPTR)
        between("expertNum", expertNum, 1, _LARGEST // expertCapacity, INNER_NULLPTR)
        rows = expertNum * expertCapacity
        shaped("expandedXOut", expandedXOut, (expertNum, expertCapacity, hidden), "[E, C, H]")
    else:
        if count_or_cumsum > 0:
            between("expertNum", expertNum, 1, _LARGEST, INNER_NULLPTR)
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
            before_out.copy_(_counts(plan_from_expert_ids(expertIdx, expertNum, num_rows=slots)))
        if counts_out is not None:
            counts_out.copy_(_counts(plan, cumulative=count_or_cumsum == 1))
        if rows < plan.num_rows:
            plan = plan_from_row_of_slot(plan.row_of_slot, num_tokens, rows)
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
    _at_least("topK", topK, 1)
    _at_least("activeNum", activeNum, 0)
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
        _at_least("expertCapacity", expertCapacity, 1)
        between("expertNum", expertNum, 1, _LARGEST // expertCapacity, INNER_NULLPTR)
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

# ---------------------------------------------------------------------------- MoeComputeExpertTokens


def _moe_compute_expert_tokens(sortedExperts: Tensor, numExperts: int, out: Tensor) -> tuple[int, Work]:
    """out[e] is the number of elements of sortedExperts in 0..e: where expert e's rows end."""
    required(sortedExperts=sortedExperts, out=out)
    typed("sortedExperts", sortedExperts, torch.int32)
    typed("out", out, torch.int32)
    ranked("sortedExperts", sortedExperts, 1, status=TILING)
    between("numExperts", numExperts, 1, MAX_EXPERTS, TILING)
    shaped("out", out, (numExperts,), "[numExperts]")
    apart({"out": out}, sortedExperts)

    def work() -> None:
        plan = plan_from_expert_ids(sortedExperts, numExperts, num_rows=sortedExperts.shape[0])
        out.copy_(_counts(plan, cumulative=True))

    return 0, work


aclnnMoeComputeExpertTokensGetWorkspaceSize, aclnnMoeComputeExpertTokens = phases(
    "MoeComputeExpertTokens", _moe_compute_expert_tokens
)

# ---------------------------------------------------------------------------- MoeReRouting

_MAX_HIDDEN = 16_384


def _moe_re_routing(
    tokens: Tensor,
    expertTokenNumPerRank: Tensor,
    perTokenScalesOptional: Tensor | None,
    expertTokenNumType: int,
    idxType: int,
    permuteTokensOut: Tensor,
    permutePerTokenScalesOut: Tensor | None,
    permuteTokenIdxOut: Tensor,
    expertTokenNumOut: Tensor,
) -> tuple[int, Work]:
    """Chunks that lie rank by rank, and in a rank expert by expert, to expert by expert, and there rank by rank.

    expertTokenNumPerRank [ranks, E] are the chunks' lengths. permuteTokenIdx is the token of each row
    (idxType 0) or the row of each token (1).
    """
    required(
        tokens=tokens,
        expertTokenNumPerRank=expertTokenNumPerRank,
        permuteTokensOut=permuteTokensOut,
        permuteTokenIdxOut=permuteTokenIdxOut,
        expertTokenNumOut=expertTokenNumOut,
    )
    if perTokenScalesOptional is not None:
        required(permutePerTokenScalesOut=permutePerTokenScalesOut)
    typed("tokens", tokens, *FLOATS, torch.int8)
    typed("expertTokenNumPerRank", expertTokenNumPerRank, torch.int32, torch.int64)
    typed("perTokenScalesOptional", perTokenScalesOptional, torch.float32)
    typed("permuteTokensOut", permuteTokensOut, tokens.dtype)
    scales_out = None if perTokenScalesOptional is None else permutePerTokenScalesOut
    typed("permutePerTokenScalesOut", scales_out, torch.float32)
    typed("permuteTokenIdxOut", permuteTokenIdxOut, torch.int32)
    typed("expertTokenNumOut", expertTokenNumOut, expertTokenNumPerRank.dtype)
    if expertTokenNumType != 1:
        raise wrong("expertTokenNumType", "1, counts", expertTokenNumType, TILING)
    between("idxType", idxType, 0, 1, TILING)
    ranked("tokens", tokens, 2, status=TILING)
    ranked("expertTokenNumPerRank", expertTokenNumPerRank, 2, status=TILING)
    num_tokens, hidden = tokens.shape
    between("H of tokens", hidden, 1, _MAX_HIDDEN - 1, TILING)
    num_experts = expertTokenNumPerRank.shape[1]
    shaped("perTokenScalesOptional", perTokenScalesOptional, (num_tokens,), "[A]", TILING)
    shaped("permuteTokensOut", permuteTokensOut, (num_tokens, hidden), "[A, H]")
    shaped("permutePerTokenScalesOut", scales_out, (num_tokens,), "[A]")
    shaped("permuteTokenIdxOut", permuteTokenIdxOut, (num_tokens,), "[A]")
    shaped("expertTokenNumOut", expertTokenNumOut, (num_experts,), "[E]")
    outputs = {
        "permuteTokensOut": permuteTokensOut,
        "permutePerTokenScalesOut": scales_out,
        "permuteTokenIdxOut": permuteTokenIdxOut,
        "expertTokenNumOut": expertTokenNumOut,
    }
    apart(outputs, tokens, expertTokenNumPerRank, perTokenScalesOptional)

    def work() -> None:
        plan = plan_from_segments(expertTokenNumPerRank, num_tokens)
        spread(tokens, plan, out=permuteTokensOut)
        if perTokenScalesOptional is not None and scales_out is not None:
            spread(perTokenScalesOptional[:, None], plan, out=scales_out[:, None])
        permuteTokenIdxOut.copy_(plan.row_of_slot if idxType else plan.slot_of_row)
        expertTokenNumOut.copy_(_counts(plan))

    return 0, work


aclnnMoeReRoutingGetWorkspaceSize, aclnnMoeReRouting = phases("MoeReRouting", _moe_re_routing)
