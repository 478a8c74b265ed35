"""Sinkhorn's balanced assignment, in plain torch."""

import math

import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import wide
from moeroute.ops.register import register

_MOST_ROUNDS = 1000


def sinkhorn(scores: Tensor, *, tolerance: float = 1e-4) -> Tensor:
    """exp(scores) with rows and columns scaled so that each token has 1/T of the whole and each expert 1/E.

    For a choice in which all experts get about as many tokens; its result is compared, not weighed, so there is no
    gradient. Computed in the log domain, so that no exponential overflows, in float64, and rounded once: its last
    bits are those of the device's own exp and log. Rounds end when the logarithms of the columns' scales move by no
    more than `tolerance` on average, after 1,000 rounds at the latest. Each round reads one number back, a
    synchronisation on a GPU.

    Args:
        scores: [T, E], float16, bfloat16, float32 or float64; logits. -inf excludes an expert from a token. NaN and
            +inf make everything NaN.
        tolerance: at least 0.

    Returns:
        float32 [T, E] (float64 for float64 scores), which sums to 1.

    Raises:
        ValueError: a wrong shape or number.
        TypeError: a wrong type or dtype.

    Choice and weights, as in Megatron-Core's router, whose weights in training are those of the logits:

    >>> import torch, moeroute
    >>> logits = torch.tensor([[100.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
    >>> moeroute.gating_topk(logits, 1).expert_ids.flatten().tolist()
    [0, 0, 0, 0]
    >>> ids = moeroute.gating_topk(moeroute.sinkhorn(logits), 1, score="none").expert_ids
    >>> ids.flatten().tolist()
    [0, 0, 1, 1]
    >>> moeroute.gating_topk(logits, 1, score="sigmoid", renormalize=False, expert_ids=ids).weights.shape
    torch.Size([4, 1])
    """
    operator = "sinkhorn"
    _check(operator, scores)
    tolerance = check.number(operator, "tolerance", tolerance)
    if tolerance < 0:
        raise check.wrong_value(operator, "tolerance", "at least 0", tolerance)
    found: Tensor = _sinkhorn(scores.detach(), float(tolerance))
    return found


def _check(operator: str, scores: Tensor) -> None:
    check.shaped(operator, "scores", scores, (None, None))
    check.floating(operator, "scores", scores)


def _log_scale(x: Tensor, axis: int) -> Tensor:
    """Minus the logarithm of what the exponentials add up to and of how many rows or columns there are."""
    total = x.logsumexp(axis, keepdim=True)
    scale = -total - math.log(x.shape[1 - axis])
    return torch.where(total == -torch.inf, 0.0, scale)  # nothing to scale


def _operator(scores: Tensor, tolerance: float) -> Tensor:
    _check("sinkhorn", scores)
    if scores.numel() == 0:
        return scores.new_empty(scores.shape, dtype=wide(scores))
    x = scores.double()
    columns = x.new_zeros(1, x.shape[1])
    for _ in range(_MOST_ROUNDS):
        rows = _log_scale(x + columns, 1)
        before, columns = columns, _log_scale(x + rows, 0)
        if not bool((columns - before).abs().mean() > tolerance):  # NaN ends it too
            break
    return (x + rows + columns).exp().to(wide(scores)).contiguous()


_sinkhorn = register(
    "sinkhorn(Tensor scores, float tolerance) -> Tensor",
    _operator,
    lambda scores, tolerance: scores.new_empty(scores.shape, dtype=wide(scores)),
)
