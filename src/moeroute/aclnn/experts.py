"""Expert counts, the instances of experts, and rows regrouped across ranks.

Every operator has the same rungs: nulls, dtypes, shapes and limits, outputs, work.
"""

import torch
from torch import Tensor

from moeroute.aclnn.core import (
    FLOATS,
    MAX_EXPERTS,
    TILING,
    Work,
    apart,
    between,
    counts_of,
    phases,
    ranked,
    required,
    shaped,
    typed,
    wrong,
)
from moeroute.ops.indices.op import plan_from_segments
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.replicas import instances_of_slots, slots_above
from moeroute.ops.rows.op import spread

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
        out.copy_(counts_of(plan, cumulative=True))

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
        expertTokenNumOut.copy_(counts_of(plan))

    return 0, work


aclnnMoeReRoutingGetWorkspaceSize, aclnnMoeReRouting = phases("MoeReRouting", _moe_re_routing)

# ---------------------------------------------------------------------------- MoeUpdateExpert

_MAX_BATCH, _MAX_SLOTS, _MAX_TABLE, _MAX_RANKS = 512, 16, 1024, 768


def _moe_update_expert(
    expertIds: Tensor,
    eplbTable: Tensor,
    expertScalesOptional: Tensor | None,
    pruningThresholdOptional: Tensor | None,
    activeMaskOptional: Tensor | None,
    localRankId: int,
    worldSize: int,
    balanceMode: int,
    balancedExpertIds: Tensor,
    balancedActiveMask: Tensor,
) -> tuple[int, Work]:
    """The instance of each expert id, from eplbTable [E, F]: a count, then so many instances.

    balanceMode 0 chooses by localRankId of worldSize, 1 by the number of the token. With scales [BS, K] and a
    threshold [K], balancedActiveMask is true for the slots of active tokens whose scale is at least threshold[k] of
    the token's sum; without it is not written.
    """
    scales, threshold, mask = expertScalesOptional, pruningThresholdOptional, activeMaskOptional
    required(
        expertIds=expertIds,
        eplbTable=eplbTable,
        balancedExpertIds=balancedExpertIds,
        balancedActiveMask=balancedActiveMask,
    )
    typed("expertIds", expertIds, torch.int32, torch.int64)
    typed("eplbTable", eplbTable, torch.int32)
    typed("expertScalesOptional", scales, *FLOATS)
    typed("pruningThresholdOptional", threshold, torch.float32)
    typed("activeMaskOptional", mask, torch.bool)
    typed("balancedExpertIds", balancedExpertIds, expertIds.dtype)
    typed("balancedActiveMask", balancedActiveMask, torch.bool)
    between("balanceMode", balanceMode, 0, 1, TILING)
    by_rank = balanceMode == 0
    if by_rank:
        between("worldSize", worldSize, 2, _MAX_RANKS, TILING)
        between("localRankId", localRankId, 0, worldSize - 1, TILING)
    ranked("expertIds", expertIds, 2, status=TILING)
    num_tokens, topk = expertIds.shape
    between("BS of expertIds", num_tokens, 1, _MAX_BATCH, TILING)
    between("K of expertIds", topk, 1, _MAX_SLOTS, TILING)
    ranked("eplbTable", eplbTable, 2, status=TILING)
    between("E of eplbTable", eplbTable.shape[0], topk, _MAX_TABLE, TILING)
    between("F of eplbTable", eplbTable.shape[1], 2, (worldSize if by_rank else _MAX_RANKS) + 1, TILING)
    shaped("expertScalesOptional", scales, (num_tokens, topk), "[BS, K]", TILING)
    ranked("pruningThresholdOptional", threshold, 1, 2, status=TILING)
    if threshold is not None:
        shaped("pruningThresholdOptional", threshold, (1, topk)[2 - threshold.ndim :], "[K] or [1, K]", TILING)
    shaped("activeMaskOptional", mask, (num_tokens,), "[BS]", TILING)
    if (scales is None) != (threshold is None):
        missing, there = ("expertScalesOptional", "pruningThresholdOptional")[:: 1 if scales is None else -1]
        raise wrong(missing, f"given with {there}", "null", TILING)
    if mask is not None and scales is None:
        raise wrong("expertScalesOptional", "given with activeMaskOptional", "null", TILING)
    shaped("balancedExpertIds", balancedExpertIds, (num_tokens, topk), "[BS, K]", TILING)
    shaped("balancedActiveMask", balancedActiveMask, (num_tokens, topk), "[BS, K]", TILING)
    outputs = {"balancedExpertIds": balancedExpertIds, "balancedActiveMask": balancedActiveMask}
    apart(outputs, expertIds, eplbTable, scales, threshold, mask)

    def work() -> None:
        rank = localRankId if by_rank else None
        balancedExpertIds.copy_(instances_of_slots(expertIds, eplbTable, rank=rank, num_ranks=worldSize))
        if scales is not None and threshold is not None:
            balancedActiveMask.copy_(slots_above(scales, threshold.reshape(-1), mask))

    return 0, work


aclnnMoeUpdateExpertGetWorkspaceSize, aclnnMoeUpdateExpert = phases("MoeUpdateExpert", _moe_update_expert)
