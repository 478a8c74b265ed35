"""Gating: the experts of every token and their weights, and the gradient.

Letters: N tokens, E experts, k experts of a token.
"""

from typing import TypeVar

import torch
from torch import Tensor

from moeroute import check
from moeroute.interop.torch_npu.arguments import npu_function, or_default, refused
from moeroute.ops.gating.op import GroupScore, Score, gating_topk, gating_topk_backward
from moeroute.ops.hash_routing import look_up_expert_ids

_T = TypeVar("_T")

_SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrtsoftplus")  # by norm_type
_GROUP_SCORES: tuple[GroupScore, ...] = ("max", "top2_sum")  # by group_select_mode


@npu_function
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, the k best of them with the bias, and their weights without it.

    Args:
        x: [N, E] router logits.
        k: experts of a token.
        bias: [E] in the dtype of x, for the choice only.
        input_ids: [N]; with tid2eid the experts are ``tid2eid[input_ids]``, and nothing is chosen.
        tid2eid: [V, k].
        k_group: so many of the groups stay in.
        group_count: equal groups of neighbours.
        group_select_mode: a group is worth its best score (0), or the sum of its two best (1).
        renorm: 1 divides the weights by (their sum + eps); norm_type 1 and 2 always do.
        norm_type: 0 softmax, 1 sigmoid, 2 the square root of softplus.
        out_flag: whether the scores are returned.
        routed_scaling_factor: multiplies the weights.
        eps: see renorm.

    Returns:
        (weights [N, k] in the dtype of x, expert ids int32 [N, k], scores float32 [N, E]; zeros without out_flag).
        The weights are differentiable in x.
    """
    name = "npu_moe_gating_top_k"
    check.shaped(name, "x", x, (None, None))
    num_tokens = x.shape[0]
    if bias is not None:
        check.shaped(name, "bias", bias, (x.shape[1],))
        if bias.dtype is not x.dtype:
            raise refused(name, "bias", f"{x.dtype}, as x", bias.dtype)
    if (input_ids is None) != (tid2eid is None):
        missing = "input_ids" if input_ids is None else "tid2eid"
        raise refused(name, missing, "given where the other one is", None, "must be both provided or both omitted")
    chosen = None
    if input_ids is not None and tid2eid is not None:
        check.shaped(name, "input_ids", input_ids, (num_tokens,))
        check.shaped(name, "tid2eid", tid2eid, (None, k))
        chosen = look_up_expert_ids(input_ids, tid2eid)
    gating = gating_topk(
        x,
        k,
        score=_option(name, "norm_type", norm_type, _SCORES),
        bias=bias,
        num_groups=group_count,
        topk_groups=k_group,
        group_score=_option(name, "group_select_mode", group_select_mode, _GROUP_SCORES),
        renormalize=bool(_option(name, "renorm", renorm, (False, True)) or norm_type),
        scaling_factor=routed_scaling_factor,
        eps=eps,
        expert_ids=chosen,
        weights_dtype=x.dtype,
    )
    scores = gating.scores.detach()
    if not out_flag:
        scores = torch.zeros_like(scores)
    return gating.weights, gating.expert_ids, scores


@npu_function
def npu_moe_gating_top_k_backward(
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,
    *,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Tensor:
    """The gradient of `npu_moe_gating_top_k` in x: [N, E] in the dtype of grad_y.

    Args:
        x_norm: [N, E] float32, the scores.
        grad_y: [N, k], of the weights.
        expertIdx: [N, k] of any integer dtype.
        renorm: as in the forward, like the others.
        norm_type: 0 softmax, 1 sigmoid, 2 the square root of softplus.
        routed_scaling_factor: as in the forward.
        eps: as in the forward.
    """
    name = "npu_moe_gating_top_k_backward"
    return gating_topk_backward(
        x_norm,
        grad_y,
        expertIdx,
        score=_option(name, "norm_type", norm_type, _SCORES),
        renormalize=bool(_option(name, "renorm", renorm, (False, True)) or norm_type),
        scaling_factor=routed_scaling_factor,
        eps=eps,
    )


@npu_function
@torch.no_grad()
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest values of the softmax, which is rounded to the dtype of x before it is compared.

    Args:
        x: [..., E] of two or three dimensions.
        finished: bool [...]: the expert ids of these tokens are E.
        k: experts of a token.

    Returns:
        (values [..., k] in the dtype of x, expert ids int32 [..., k], row numbers int32 [..., k]: j * N + i for choice
        j of token i). No gradient.
    """
    name = "npu_moe_gating_top_k_softmax"
    tokens = _tokens(name, x, finished)
    if x.dtype is torch.float32:
        found = gating_topk(tokens, k, renormalize=False)
    else:
        rounded = gating_topk(tokens, 1).scores.to(x.dtype)
        found = gating_topk(rounded, k, score="none", weights_dtype=x.dtype)
    shape = (*x.shape[:-1], k)
    numbers = torch.arange(found.weights.numel(), dtype=torch.int32, device=x.device)
    numbers = numbers.view(k, -1).t().reshape(shape)
    return found.weights.view(shape), _finished(found.expert_ids.view(shape), finished, x.shape[-1]), numbers


@npu_function
@torch.no_grad()
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest values of the float32 softmax, or with renorm 1 the softmax over the k largest values of x.

    Args:
        x: [..., E] of two or three dimensions.
        k: experts of a token.
        finished: bool [...]: the expert ids of these tokens are E.
        renorm: 0 or 1.
        output_softmax: whether the softmax is returned; with renorm 1 it never is.

    Returns:
        (values [..., k] in the dtype of x, expert ids int32 [..., k], softmax float32 [..., E] or [0]). No gradient.
    """
    name = "npu_moe_gating_top_k_softmax_v2"
    tokens = _tokens(name, x, finished)
    renorm = or_default(renorm, 0)
    if renorm not in (0, 1):
        raise refused(name, "renorm", "0 or 1", renorm, "renorm must be 0 or 1")
    score: Score = "topk_softmax" if renorm else "softmax"
    found = gating_topk(tokens, k, score=score, renormalize=False, weights_dtype=x.dtype)
    shape = (*x.shape[:-1], k)
    softmax = found.scores.view(x.shape) if output_softmax and not renorm else x.new_empty(0, dtype=torch.float32)
    return found.weights.view(shape), _finished(found.expert_ids.view(shape), finished, x.shape[-1]), softmax


# ---------------------------------------------------------------------------- steps


def _option(name: str, argument: str, value: int, members: tuple[_T, ...]) -> _T:
    if value not in range(len(members)):
        raise refused(name, argument, f"in 0..{len(members) - 1}", value)
    return members[value]


def _tokens(name: str, x: Tensor, finished: Tensor | None) -> Tensor:
    """x as [N, E]."""
    check.tensor(name, "x", x)
    if x.ndim not in (2, 3):
        raise refused(name, "x", "[..., E] of two or three dimensions", list(x.shape))
    if finished is not None:
        check.shaped(name, "finished", finished, tuple(x.shape[:-1]))
        if finished.dtype is not torch.bool:
            raise refused(name, "finished", "torch.bool", finished.dtype)
    return x.reshape(-1, x.shape[-1])


def _finished(expert_ids: Tensor, finished: Tensor | None, num_experts: int) -> Tensor:
    return expert_ids if finished is None else expert_ids.masked_fill(finished.unsqueeze(-1), num_experts)
