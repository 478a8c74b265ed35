"""Gating on the CPU: launchers. The kernels are in numba_forward.py and numba_backward.py."""

import torch
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.gating.numba_backward import gating_backward
from moeroute.ops.gating.numba_forward import (
    FLOAT32,
    FLOATS,
    NONE,
    SIGMOID,
    SOFTMAX,
    SQRTSOFTPLUS,
    TOPK_SIGMOID,
    TOPK_SOFTMAX,
    gating_forward,
)

SCORES = {
    "softmax": SOFTMAX,
    "sigmoid": SIGMOID,
    "sqrtsoftplus": SQRTSOFTPLUS,
    "topk_softmax": TOPK_SOFTMAX,
    "topk_sigmoid": TOPK_SIGMOID,
    "none": NONE,
}

# What one expert of one row costs, in the bytes of `launch.SERIAL_WORK`: 1.6 ns and 0.1 ns measured.
FORWARD_BYTES, BACKWARD_BYTES = 16, 4


# Records are plain tuples in the order of their class: making a NamedTuple takes 0.35 µs, and one token needs six.


def _float_rows(x: Tensor | None) -> tuple[int, int, int]:
    """A `FloatRows` record."""
    return (0, 0, FLOAT32) if x is None else (x.data_ptr(), x.stride(0), FLOATS[x.dtype])


def _id_rows(ids: Tensor | None) -> tuple[int, int]:
    """An `IdRows` record."""
    return (0, 0) if ids is None else (ids.data_ptr(), ids.stride(0))


def _int32_ids(expert_ids: Tensor, num_experts: int) -> Tensor:
    if expert_ids.dtype == torch.int32:
        return layout.rows(expert_ids)
    ids = expert_ids.to(torch.int64)  # looked at before it is narrowed
    return layout.rows(torch.where((ids >= 0) & (ids < num_experts), ids, -1).to(torch.int32))


def gating_topk(
    logits: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor | None,
    k: int,
    score: str,
    num_groups: int,
    topk_groups: int,
    group_best: int,
    renormalize: bool,
    scaling_factor: float,
    eps: float,
    weights_dtype: torch.dtype,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates weights, expert_ids and scores, or writes `out`, three tensors whose rows may be strided."""
    tokens, num_experts = logits.shape
    if out is None:
        weights, ids = layout.new_matrix(tokens, k, weights_dtype), layout.new_matrix(tokens, k, torch.int32)
        scores = layout.new_matrix(tokens, num_experts, torch.float32)
        weights_stride, ids_stride, scores_stride = k, k, num_experts
    else:
        weights, ids, scores = out
        weights_stride, ids_stride, scores_stride = weights.stride(0), ids.stride(0), scores.stride(0)
    logits, logits_stride = layout.matrix(logits)
    if bias is not None and not (bias.dtype is torch.float32 and bias.is_contiguous()):
        bias = bias.to(torch.float32).contiguous()
    if expert_ids is not None:
        expert_ids = _int32_ids(expert_ids, num_experts)
    gating_forward(
        None,
        items=tokens,
        work=tokens * num_experts * FORWARD_BYTES,
        weights=(weights.data_ptr(), weights_stride, FLOATS[weights_dtype]),
        expert_ids=(ids.data_ptr(), ids_stride),
        scores=(scores.data_ptr(), scores_stride, FLOAT32),
        logits=(logits.data_ptr(), logits_stride, FLOATS[logits.dtype]),
        bias=0 if bias is None else bias.data_ptr(),
        given_ids=(0, 0) if expert_ids is None else _id_rows(expert_ids),
        num_experts=num_experts,
        k=k,
        options=(SCORES[score], num_groups, topk_groups, group_best, renormalize, scaling_factor, eps),
    )
    return weights, ids, scores


def gating_topk_backward(
    scores: Tensor,
    grad_weights: Tensor,
    expert_ids: Tensor,
    grad_scores: Tensor | None,
    score: str,
    renormalize: bool,
    scaling_factor: float,
    eps: float,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Allocates the [T, E] result, or writes `out`, whose rows may be strided."""
    tokens, num_experts = scores.shape
    k = expert_ids.shape[1]
    if out is None:
        out = layout.new_matrix(tokens, num_experts, out_dtype)
    scores, grad_weights, expert_ids = (
        layout.rows(scores),
        layout.rows(grad_weights),
        _int32_ids(expert_ids, num_experts),
    )
    if grad_scores is not None:
        grad_scores = layout.rows(grad_scores)
    gating_backward(
        None,
        items=tokens,
        work=tokens * num_experts * BACKWARD_BYTES,
        out=_float_rows(out),
        scores=_float_rows(scores),
        grad_weights=_float_rows(grad_weights),
        expert_ids=_id_rows(expert_ids),
        grad_scores=_float_rows(grad_scores),
        num_experts=num_experts,
        k=k,
        options=(SCORES[score], 1, 1, 1, renormalize, scaling_factor, eps),
    )
    return out
