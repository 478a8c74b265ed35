"""Expert counts, and rows regrouped across ranks.

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
from moeroute.ops.permutation.op import spread
from moeroute.ops.planning.op import (
    plan_from_expert_ids,
    plan_from_segments,
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
