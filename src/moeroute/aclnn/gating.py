"""Choosing experts, and the way back.

Every operator has the same rungs: nulls, dtypes, shapes and limits, outputs, work.
"""

import math

import torch
from torch import Tensor

from moeroute.aclnn.core import (
    FLOATS,
    MAX_EXPERTS,
    PARAM_INVALID,
    TILING,
    WORKSPACE,
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
from moeroute.ops.gating.op import GroupScore, Score, gating_topk, gating_topk_backward
from moeroute.ops.group_topk import topk_in_groups
from moeroute.ops.hash_routing import look_up_expert_ids
from moeroute.ops.replicas import instances_of_slots

_FLOAT32_MAX = torch.finfo(torch.float32).max


def _finite(name: str, value: float, status: int) -> None:
    """The attribute is a float32 on the device."""
    if not abs(value) <= _FLOAT32_MAX:
        raise wrong(name, "finite in float32", value, status)


# ---------------------------------------------------------------------------- MoeGatingTopKBackward


def _moe_gating_top_k_backward(
    xNorm: Tensor,
    gradY: Tensor,
    expertIdx: Tensor,
    renorm: int,
    normType: int,
    routedScalingFactor: float,
    eps: float,
    out: Tensor,
) -> tuple[int, Work]:
    """The gradient of MoeGatingTopK with sigmoid in x. Repeated experts of a row add up; renorm is reserved."""
    required(xNorm=xNorm, gradY=gradY, expertIdx=expertIdx, out=out)
    typed("xNorm", xNorm, torch.float32)
    typed("gradY", gradY, *FLOATS)
    typed("expertIdx", expertIdx, torch.int32)
    typed("out", out, gradY.dtype)
    ranked("xNorm", xNorm, 2)
    num_tokens, num_experts = xNorm.shape
    if num_tokens < 1:
        raise wrong_shape("xNorm", "not empty", xNorm)
    between("N of xNorm", num_experts, 2, MAX_EXPERTS)
    ranked("gradY", gradY, 2)
    if gradY.shape[0] != num_tokens:
        raise wrong_shape("gradY", f"[M, K] with M = {num_tokens}, as xNorm,", gradY)
    between("K of gradY", gradY.shape[1], 1, num_experts)
    shaped("expertIdx", expertIdx, tuple(gradY.shape), "[M, K], as gradY,")
    shaped("out", out, (num_tokens, num_experts), "[M, N], as xNorm,")
    if normType != 1:
        raise wrong("normType", "1, sigmoid", normType, TILING)
    _finite("routedScalingFactor", routedScalingFactor, PARAM_INVALID)
    _finite("eps", eps, PARAM_INVALID)
    apart({"out": out}, xNorm, gradY, expertIdx)

    def work() -> None:
        target = target_of(out, num_tokens, num_experts)
        gating_topk_backward(
            xNorm,
            gradY,
            expertIdx,
            score="sigmoid",
            renormalize=True,
            scaling_factor=routedScalingFactor,
            eps=eps,
            out=target,
        )
        deliver(target, out)

    return WORKSPACE, work


aclnnMoeGatingTopKBackwardGetWorkspaceSize, aclnnMoeGatingTopKBackward = phases(
    "MoeGatingTopKBackward", _moe_gating_top_k_backward
)

# ---------------------------------------------------------------------------- MoeGatingTopK

_SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
_GROUP_SCORES: tuple[GroupScore, ...] = ("max", "top2_sum")
_MAX_HASHED = 64


def _moe_gating_top_k_v2(
    x: Tensor,
    biasOptional: Tensor | None,
    inputIdsOptional: Tensor | None,
    tid2eidOptional: Tensor | None,
    k: int,
    kGroup: int,
    groupCount: int,
    groupSelectMode: int,
    renorm: int,
    normType: int,
    outFlag: bool,
    routedScalingFactor: float,
    eps: float,
    yOut: Tensor,
    expertIdxOut: Tensor,
    outOut: Tensor,
) -> tuple[int, Work]:
    """MoeGatingTopK, or, with inputIds [B] and tid2eid [keys, k], the experts that the table names for each id.

    An id outside the table has no experts: its row of expertIdxOut is -1.
    """
    required(x=x, yOut=yOut, expertIdxOut=expertIdxOut, outOut=outOut)
    typed("x", x, *FLOATS)
    typed("biasOptional", biasOptional, x.dtype)
    typed("inputIdsOptional", inputIdsOptional, torch.int32, torch.int64)
    typed("tid2eidOptional", tid2eidOptional, torch.int32, torch.int64)
    typed("yOut", yOut, x.dtype)
    typed("expertIdxOut", expertIdxOut, torch.int32)
    typed("outOut", outOut, torch.float32)
    ranked("x", x, 2, status=TILING)
    if x.numel() == 0:
        raise wrong_shape("x", "not empty", x, TILING)
    num_tokens, num_experts = x.shape
    between("E of x", num_experts, 1, MAX_EXPERTS, TILING)
    shaped("biasOptional", biasOptional, (num_experts,), "[E]", TILING)
    if groupCount < 1 or num_experts % groupCount:
        raise wrong("groupCount", f"a divisor of E = {num_experts}", groupCount, TILING)
    between("kGroup", kGroup, 1, groupCount, TILING)
    members = num_experts // groupCount
    between("k", k, 1, members * kGroup, TILING)
    between("groupSelectMode", groupSelectMode, 0, 1, TILING)
    if members <= groupSelectMode:
        raise wrong("E / groupCount", f"more than groupSelectMode = {groupSelectMode}", members, TILING)
    if groupCount not in (1, num_experts) and kGroup != groupCount:
        aligned = groupCount * (-(-members // 32) * 32)
        if aligned > MAX_EXPERTS:
            raise wrong("groupCount * (E / groupCount rounded up to 32)", f"at most {MAX_EXPERTS}", aligned, TILING)
    between("renorm", renorm, 0, 1, TILING)
    between("normType", normType, 0, 2, TILING)
    _finite("routedScalingFactor", routedScalingFactor, TILING)
    _finite("eps", eps, TILING)
    if (inputIdsOptional is None) != (tid2eidOptional is None):
        missing = "inputIdsOptional" if inputIdsOptional is None else "tid2eidOptional"
        raise wrong(missing, "given where the other one is", "null", TILING)
    if inputIdsOptional is not None and tid2eidOptional is not None:
        shaped("inputIdsOptional", inputIdsOptional, (num_tokens,), "[B]", TILING)
        ranked("tid2eidOptional", tid2eidOptional, 2, status=TILING)
        if tid2eidOptional.shape[0] < 1 or tid2eidOptional.shape[1] != k:
            raise wrong_shape("tid2eidOptional", f"[keys, k] with keys >= 1 and k = {k}", tid2eidOptional, TILING)
        if kGroup != groupCount and groupCount != num_experts:
            raise wrong("kGroup", f"groupCount = {groupCount} with inputIdsOptional", kGroup, TILING)
        between("k", k, 1, _MAX_HASHED, TILING)
    shaped("yOut", yOut, (num_tokens, k), "[B, k]")
    shaped("expertIdxOut", expertIdxOut, (num_tokens, k), "[B, k]")
    scores_out = outOut if outFlag else None
    shaped("outOut", scores_out, (num_tokens, num_experts), "[B, E]")
    outputs = {"yOut": yOut, "expertIdxOut": expertIdxOut, "outOut": scores_out}
    apart(outputs, x, biasOptional, inputIdsOptional, tid2eidOptional)

    def work() -> None:
        chosen = None
        if inputIdsOptional is not None and tid2eidOptional is not None:
            chosen = look_up_expert_ids(inputIdsOptional, tid2eidOptional)
        y, ids = target_of(yOut, num_tokens, k), target_of(expertIdxOut, num_tokens, k)
        scores = target_of(outOut, num_tokens, num_experts) if outFlag else torch.empty_like(x, dtype=torch.float32)
        gating_topk(
            x,
            k,
            score=_SCORES[normType],
            bias=biasOptional,
            num_groups=groupCount,
            topk_groups=kGroup,
            group_score=_GROUP_SCORES[groupSelectMode],
            renormalize=normType != 0 or renorm == 1,
            scaling_factor=routedScalingFactor,
            eps=eps,
            expert_ids=chosen,
            out=(y, ids, scores),
        )
        deliver(y, yOut)
        deliver(ids, expertIdxOut)
        if outFlag:
            deliver(scores, outOut)

    return 0, work


def _moe_gating_top_k(
    x: Tensor,
    biasOptional: Tensor | None,
    k: int,
    kGroup: int,
    groupCount: int,
    groupSelectMode: int,
    renorm: int,
    normType: int,
    outFlag: bool,
    routedScalingFactor: float,
    eps: float,
    yOut: Tensor,
    expertIdxOut: Tensor,
    outOut: Tensor,
) -> tuple[int, Work]:
    """Scores of x (normType 0 softmax, 1 sigmoid, 2 sqrtsoftplus), the k best with bias, their weights without.

    outOut gets the scores, unrounded, where outFlag is set; it must not be null in any case.
    """
    return _moe_gating_top_k_v2(
        x,
        biasOptional,
        None,
        None,
        k,
        kGroup,
        groupCount,
        groupSelectMode,
        renorm,
        normType,
        outFlag,
        routedScalingFactor,
        eps,
        yOut,
        expertIdxOut,
        outOut,
    )


aclnnMoeGatingTopKGetWorkspaceSize, aclnnMoeGatingTopK = phases("MoeGatingTopK", _moe_gating_top_k)
aclnnMoeGatingTopKV2GetWorkspaceSize, aclnnMoeGatingTopKV2 = phases("MoeGatingTopKV2", _moe_gating_top_k_v2)

# ---------------------------------------------------------------------------- MoeGatingTopKSoftmax

_MAX_SOFTMAX_K = 1024


def _softmax(
    x: Tensor,
    finishedOptional: Tensor | None,
    k: int,
    renorm: int,
    yOut: Tensor,
    expertIdxOut: Tensor,
    rowIdxOut: Tensor | None,
    softmax_out: Tensor | None,
) -> tuple[int, Work]:
    """Both versions; nulls are checked before. `softmax_out` is None where nobody wants it."""
    typed("x", x, *FLOATS)
    typed("finishedOptional", finishedOptional, torch.bool)
    typed("yOut", yOut, x.dtype)
    typed("expertIdxOut", expertIdxOut, torch.int32)
    typed("rowIdxOut", rowIdxOut, torch.int32)
    ranked("x", x, 2, 3, status=TILING)
    if x.numel() == 0:
        raise wrong_shape("x", "not empty", x, TILING)
    outer, num_experts = tuple(x.shape[:-1]), x.shape[-1]
    shaped("finishedOptional", finishedOptional, outer, "x's shape without the last axis", TILING)
    between("k", k, 1, min(num_experts, _MAX_SOFTMAX_K), TILING)
    between("renorm", renorm, 0, 1, TILING)
    if softmax_out is not None and softmax_out.dtype is not torch.float32:
        raise wrong("softmaxResultOutOptional", "float32", softmax_out.dtype, TILING)
    shaped("yOut", yOut, (*outer, k), "x's shape with k last", TILING)
    shaped("expertIdxOut", expertIdxOut, (*outer, k), "x's shape with k last", TILING)
    shaped("rowIdxOut", rowIdxOut, (*outer, k), "x's shape with k last", TILING)
    shaped("softmaxResultOutOptional", softmax_out, tuple(x.shape), "x's shape", TILING)
    apart(
        {
            "yOut": yOut,
            "expertIdxOut": expertIdxOut,
            "rowIdxOut": rowIdxOut,
            "softmaxResultOutOptional": softmax_out,
        },
        *(x, finishedOptional),
    )
    num_rows = math.prod(outer)

    def work() -> None:
        y, ids = target_of(yOut, num_rows, k), target_of(expertIdxOut, num_rows, k)
        if softmax_out is None:
            scores = torch.empty((num_rows, num_experts), dtype=torch.float32, device=x.device)
        else:
            scores = target_of(softmax_out, num_rows, num_experts)
        gating_topk(
            x.reshape(num_rows, num_experts),
            k,
            score="topk_softmax" if renorm else "softmax",
            renormalize=False,
            out=(y, ids, scores),
        )
        if finishedOptional is not None:
            ids.masked_fill_(finishedOptional.reshape(num_rows, 1), num_experts)
        deliver(y, yOut)
        deliver(ids, expertIdxOut)
        if softmax_out is not None:
            deliver(scores, softmax_out)
        if rowIdxOut is not None:  # column by column
            numbers = torch.arange(num_rows * k, dtype=torch.int32, device=x.device)
            rowIdxOut.copy_(numbers.view(k, num_rows).t().reshape(rowIdxOut.shape))

    return 0, work


def _moe_gating_top_k_softmax(
    x: Tensor,
    finishedOptional: Tensor | None,
    k: int,
    yOut: Tensor,
    expertIdxOut: Tensor,
    rowIdxOut: Tensor,
) -> tuple[int, Work]:
    """The k largest of softmax(x); a finished row's ids are E, its weights stay. rowIdx[n, j] = j * N + n."""
    required(x=x, yOut=yOut, expertIdxOut=expertIdxOut, rowIdxOut=rowIdxOut)
    return _softmax(x, finishedOptional, k, 0, yOut, expertIdxOut, rowIdxOut, None)


aclnnMoeGatingTopKSoftmaxGetWorkspaceSize, aclnnMoeGatingTopKSoftmax = phases(
    "MoeGatingTopKSoftmax", _moe_gating_top_k_softmax
)


def _moe_gating_top_k_softmax_v2(
    x: Tensor,
    finishedOptional: Tensor | None,
    k: int,
    renorm: int,
    outputSoftmaxResultFlag: bool,
    yOut: Tensor,
    expertIdxOut: Tensor,
    softmaxResultOutOptional: Tensor | None,
) -> tuple[int, Work]:
    """renorm 0: the k largest of softmax(x); 1: the softmax of the k largest of x, selected on x itself.

    softmax(x) is written where the flag is set and renorm is 0.
    """
    required(x=x, yOut=yOut, expertIdxOut=expertIdxOut)
    wanted = outputSoftmaxResultFlag and renorm == 0
    if wanted:
        required(softmaxResultOutOptional=softmaxResultOutOptional)
    softmax_out = softmaxResultOutOptional if wanted else None
    return _softmax(x, finishedOptional, k, renorm, yOut, expertIdxOut, None, softmax_out)


aclnnMoeGatingTopKSoftmaxV2GetWorkspaceSize, aclnnMoeGatingTopKSoftmaxV2 = phases(
    "MoeGatingTopKSoftmaxV2", _moe_gating_top_k_softmax_v2
)

# ---------------------------------------------------------------------------- MoeFusedTopk

_MAX_FUSED, _MAX_GROUPS, _MAX_INSTANCES = 1024, 256, 128


def _moe_fused_topk(
    x: Tensor,
    addNum: Tensor,
    mappingNum: Tensor | None,
    mappingTable: Tensor | None,
    groupNum: int,
    groupTopk: int,
    topN: int,
    topK: int,
    activateType: int,
    isNorm: bool,
    scale: float,
    enableExpertMapping: bool,
    y: Tensor,
    indices: Tensor,
) -> tuple[int, Work]:
    """The topK experts of sigmoid(x) + addNum in the groupTopk best groups, and the sigmoids at them.

    A group is worth the sum of its topN largest values; the experts of the others count as 0. isNorm divides by
    the sum over the chosen ones and multiplies with scale. With enableExpertMapping expert e becomes
    mappingTable[e, t % mappingNum[e]] for token t, column 0 where mappingNum is 0.
    """
    required(x=x, addNum=addNum)
    if enableExpertMapping:
        required(mappingNum=mappingNum, mappingTable=mappingTable)
    else:
        mappingNum = mappingTable = None
    required(y=y, indices=indices)
    typed("x", x, *FLOATS)
    typed("addNum", addNum, x.dtype)
    typed("mappingNum", mappingNum, torch.int32)
    typed("mappingTable", mappingTable, torch.int32)
    typed("indices", indices, torch.int32)
    typed("y", y, torch.float32)
    if x.numel() == 0:
        return zero_filled()
    between("groupNum", groupNum, 1, _MAX_GROUPS)
    for name, value in (("groupTopk", groupTopk), ("topN", topN), ("topK", topK)):
        at_least(name, value, 1)
    ranked("x", x, 2)
    ranked("addNum", addNum, 1)
    ranked("y", y, 2)
    num_tokens, num_experts = x.shape
    shaped("indices", indices, tuple(y.shape), "[T, topK], as y,")
    shaped("y", y, (num_tokens, topK), "[T, topK]")
    shaped("addNum", addNum, (num_experts,), "[E]")
    members = divides("E of x", num_experts, "groupNum", groupNum)
    between("groupTopk", groupTopk, 1, groupNum)
    between("topK", topK, 1, num_experts)
    between("topN", topN, 1, members)
    between("E of x", num_experts, 1, _MAX_FUSED)
    if mappingTable is not None:
        ranked("mappingTable", mappingTable, 2)
        shaped("mappingNum", mappingNum, (num_experts,), "[E]")
        between("m of mappingTable", mappingTable.shape[1], 1, _MAX_INSTANCES)
        shaped("mappingTable", mappingTable, (num_experts, mappingTable.shape[1]), "[E, m]")
    between("activateType", activateType, 0, 0)
    if isNorm:
        _finite("scale", scale, PARAM_INVALID)
    apart({"y": y, "indices": indices}, x, addNum, mappingNum, mappingTable)

    def work() -> None:
        scores = gating_topk(x, 1, score="sigmoid").scores
        ids = topk_in_groups(scores + addNum.float(), topK, num_groups=groupNum, topk_groups=groupTopk, best=topN)
        scaling = scale if isNorm else 1.0
        chosen = gating_topk(
            x, topK, score="sigmoid", expert_ids=ids, renormalize=isNorm, eps=0.0, scaling_factor=scaling
        )
        y.copy_(chosen.weights)
        if mappingNum is not None and mappingTable is not None:
            count = torch.where(mappingNum == 0, 1, mappingNum)
            ids = instances_of_slots(ids, torch.cat((count[:, None], mappingTable), 1))
        indices.copy_(ids)

    return 0, work


aclnnMoeFusedTopkGetWorkspaceSize, aclnnMoeFusedTopk = phases("MoeFusedTopk", _moe_fused_topk)
