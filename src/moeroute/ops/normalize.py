"""Scores divided by the sum of their row, in plain torch; the sums have the order of docs/arithmetic.md."""

from typing import Any

import torch
from torch import Tensor

from moeroute import check, dispatch
from moeroute.dtypes import wide
from moeroute.ops.register import register


def normalize_scores(scores: Tensor, *, eps: float = 1e-20, padding_mask: Tensor | None = None) -> Tensor:
    """Each row of scores divided by (its sum + eps): what an auxiliary loss takes of sigmoid scores.

    Computed in float32 (float64 for float64) and rounded once. Differentiable to any order.

    Args:
        scores: [T, E], a float dtype.
        eps: added to the sum. With eps = 0 a row whose sum is 0 is NaN.
        padding_mask: [T] bool, True = padding; such a row is 0 and gets no gradient, whatever it holds.

    Returns:
        [T, E] in the dtype of the scores.

    Raises:
        ValueError: a wrong shape or number.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``scores / (scores.sum(1, keepdim=True) + eps)``.

    >>> import torch, moeroute
    >>> moeroute.normalize_scores(torch.tensor([[0.25, 0.75, 1.0], [0.0, 0.0, 0.0]]))
    tensor([[0.1250, 0.3750, 0.5000],
            [0.0000, 0.0000, 0.0000]])
    """
    operator = "normalize_scores"
    _check(operator, scores, padding_mask)
    eps = check.finite_in(operator, "eps", eps, wide(scores))
    found: Tensor = _normalize_scores(scores, eps, padding_mask)
    return found


def _check(operator: str, scores: Tensor, padding_mask: Tensor | None) -> None:
    check.shaped(operator, "scores", scores, (None, None))
    check.floating(operator, "scores", scores)
    if padding_mask is not None:
        check.shaped(operator, "padding_mask", padding_mask, (scores.shape[0],), scores)
        if padding_mask.dtype is not torch.bool:
            raise check.wrong_dtype(operator, "padding_mask", "torch.bool, True = padding", padding_mask)


def _row_sums(x: Tensor) -> Tensor:
    """[T, 1], in the order of gating's own sums."""
    total: Tensor = dispatch.module("gating", "reference").sum_over_experts(x)
    return total


def _cleared(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    return x if padding_mask is None else x.masked_fill(padding_mask[:, None], 0.0)


def _divided(scores: Tensor, eps: float, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The quotients, and what they were divided by."""
    x = _cleared(scores.to(wide(scores)), padding_mask)
    divisor = _row_sums(x) + eps
    return _cleared(x / divisor, padding_mask), divisor


def _operator(scores: Tensor, eps: float, padding_mask: Tensor | None) -> Tensor:
    _check("normalize_scores", scores, padding_mask)
    return _divided(scores, eps, padding_mask)[0].to(scores.dtype).contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    scores, ctx.eps, padding_mask = inputs
    ctx.save_for_backward(scores, padding_mask)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    scores, padding_mask = ctx.saved_tensors
    quotients, divisor = _divided(scores, ctx.eps, padding_mask)
    grad = _cleared(grad.to(quotients.dtype), padding_mask)
    found = (grad - _row_sums(quotients * grad)) / divisor
    return _cleared(found, padding_mask).to(scores.dtype), None, None


def _tangent(ctx: Any, inputs: list[Any], output: Tensor, tangents: tuple[Any, ...]) -> Tensor | None:
    scores, eps, padding_mask = inputs
    if tangents[0] is None:
        return None
    quotients, divisor = _divided(scores, eps, padding_mask)
    moves = _cleared(tangents[0].to(quotients.dtype), padding_mask)
    found = (moves - quotients * _row_sums(moves)) / divisor
    return _cleared(found, padding_mask).to(scores.dtype)


_normalize_scores = register(
    "normalize_scores(Tensor scores, float eps, Tensor? padding_mask) -> Tensor",
    _operator,
    lambda scores, eps, padding_mask: scores.new_empty(scores.shape),
    derivative=_derivative,
    setup=_setup,
    tangent=_tangent,
)
