"""Gating in float64, and its choice of experts by Python's own sort of float32 scores."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeroute.conformance.truth import Truth, copied, rounded

ON_LOGITS = ("topk_softmax", "topk_sigmoid", "none")
TINY = 4e-39  # what the float32 exp may lose next to the smallest normal number


def truths(operator: str, arguments: Mapping[str, Any], results: Mapping[str, Tensor]) -> dict[str, Truth]:
    """The truth of `gating_topk`, `gating_topk_backward` (plain, or through autograd) or `normalize_scores`."""
    if operator == "normalize_scores":
        return _normalized(**arguments)
    if operator == "gating_topk":
        return _gating(results, **arguments)
    if "logits" in arguments:
        return {"grad_logits": _through(**arguments)}
    return {"grad_logits": _backward(**arguments)}


def scores_of(logits: Tensor, score: str) -> tuple[Tensor, Tensor]:
    """float64 scores [T, E], and how many half units in the last place a float32 computation may be off."""
    x = logits.double()
    if score == "softmax":
        away = (x.amax(1, keepdim=True) - x).clamp(max=104.0) if x.numel() else x
        return torch.softmax(x, 1), 40 + 3 * torch.nan_to_num(away)
    if score == "sigmoid":
        return torch.sigmoid(x), 12 + 2 * torch.nan_to_num(x.abs().clamp(max=104.0))
    if score == "sqrtsoftplus":
        return torch.nn.functional.softplus(x, threshold=1000.0).sqrt(), 12 + 2 * x.abs().clamp(max=104.0)
    return x, torch.zeros_like(x)


def best_first(values: list[float]) -> list[int]:
    """Places by value: NaN first, then the largest, of equal ones the smaller place."""
    return sorted(range(len(values)), key=lambda i: (not math.isnan(values[i]), -values[i], i))


def choose(
    scores: Tensor, k: int, bias: Tensor | None, num_groups: int, topk_groups: int | None, group_score: str | int
) -> Tensor:
    """int32 [T, k] from float32 scores."""
    best = group_score if isinstance(group_score, int) else {"max": 1, "top2_sum": 2}[group_score]
    compared = (scores if bias is None else scores + bias.float()).numpy().astype(np.float32)
    size = compared.shape[1] // num_groups
    found = []
    for values in compared:
        line = values.tolist()
        if num_groups > 1:
            worth = []
            for g in range(num_groups):
                members = values[g * size : (g + 1) * size]
                total, *others = (members[i] for i in best_first(members.tolist())[:best])
                with np.errstate(invalid="ignore"):
                    for other in others:
                        total = np.float32(total + other)
                worth.append(float(total))
            kept = set(best_first(worth)[:topk_groups])
            line = [value if e // size in kept else -math.inf for e, value in enumerate(line)]
        found.append(best_first(line)[:k])
    return torch.tensor(found, dtype=torch.int32).reshape(len(found), k)


def _weights(
    logits: Tensor, exact: Tensor, loose: Tensor, ids: Tensor, score: str, renormalize: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weights before and after they are divided, the divisor, and their looseness in half units."""
    none = (ids < 0) | (ids >= exact.shape[1])
    at = torch.where(none, 0, ids).long()
    chosen, slack = exact.gather(1, at), loose.gather(1, at)
    if score == "topk_softmax":
        largest = chosen.masked_fill(none, -math.inf).amax(1, keepdim=True) if chosen.numel() else chosen
        slack = 40 + 3 * torch.nan_to_num((largest - chosen).clamp(0, 104.0))
        chosen = torch.softmax(chosen.masked_fill(none, -math.inf), 1)
    elif score == "topk_sigmoid":
        slack, chosen = 12 + 2 * torch.nan_to_num(chosen.abs().clamp(max=104.0)), chosen.sigmoid()
    chosen = chosen.masked_fill(none, 0.0)
    divisor = chosen.sum(1, keepdim=True) + eps
    if not renormalize:
        return chosen, chosen, divisor, slack
    cancelled = chosen.abs().sum(1, keepdim=True) / divisor.abs()
    worst = slack.amax(1, keepdim=True) if slack.numel() else slack
    return chosen, (chosen / divisor).masked_fill(none, 0.0), divisor, slack + (chosen.shape[1] + 8 + worst) * cancelled


def _gating(
    results: Mapping[str, Tensor],
    logits: Tensor,
    k: int,
    score: str,
    bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    group_score: str | int = "max",
    renormalize: bool | None = None,
    scaling_factor: float = 1.0,
    eps: float = 1e-20,
    expert_ids: Tensor | None = None,
    weights_dtype: torch.dtype | None = None,
) -> dict[str, Truth]:
    exact, loose = scores_of(logits, score)
    if expert_ids is None:
        ids = choose(results["scores"].cpu(), k, bias, num_groups, topk_groups or num_groups, group_score)
    else:
        ids = torch.where((expert_ids >= 0) & (expert_ids < logits.shape[1]), expert_ids, -1).int()
    divided = score in ("sigmoid", "sqrtsoftplus") if renormalize is None else renormalize
    _, weights, _, slack = _weights(logits, exact, loose, ids, score, divided, eps)
    weights = weights * float(np.float32(scaling_factor))
    scores = copied(logits.float()) if score in ON_LOGITS else _loosened(exact, torch.float32, loose)
    return {
        "weights": _loosened(weights, weights_dtype or torch.float32, slack + 4),
        "expert_ids": copied(ids),
        "scores": scores,
    }


def _loosened(exact: Tensor, dtype: torch.dtype, half_units: Tensor) -> Truth:
    truth = rounded(exact, dtype, half_units * exact.abs())
    return Truth(truth.value, truth.bound + TINY, dtype)


def _through(
    logits: Tensor,
    k: int,
    expert_ids: Tensor,
    grad_weights: Tensor,
    grad_scores: Tensor,
    score: str,
    renormalize: bool | None = None,
    scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Truth:
    exact, _ = scores_of(logits, score)
    divided = score in ("sigmoid", "sqrtsoftplus") if renormalize is None else renormalize
    return _backward(
        exact, grad_weights, expert_ids, score, divided, scaling_factor, eps, grad_scores, logits.dtype, 800.0
    )


def _backward(
    scores: Tensor,
    grad_weights: Tensor,
    expert_ids: Tensor,
    score: str,
    renormalize: bool,
    scaling_factor: float = 1.0,
    eps: float = 1e-20,
    grad_scores: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    half_units: float = 100.0,
) -> Truth:
    """The formulas of docs/arithmetic.md, section 6, beside them the same with every term's magnitude."""
    s = scores.double()
    none = (expert_ids < 0) | (expert_ids >= s.shape[1])
    w, _, divisor, _ = _weights(s, s, torch.zeros_like(s), expert_ids, score, renormalize, eps)
    g = (grad_weights.double() * scaling_factor).masked_fill(none, 0.0)
    size, spoilt = g.abs(), torch.ones_like(divisor)
    if renormalize:
        spoilt = (w.abs().sum(1, keepdim=True) / divisor.abs()).square().clamp(min=1.0)
        beta, beta_size = (w / divisor * g).sum(1, keepdim=True), (w / divisor * g).abs().sum(1, keepdim=True)
        g, size = (g - beta) / divisor, (size + beta_size) / divisor.abs()
    gamma = gamma_size = torch.zeros_like(divisor)
    if score in ("topk_softmax", "softmax"):
        gamma, gamma_size = (w * g).masked_fill(none, 0.0).sum(1, keepdim=True), (w.abs() * size).sum(1, keepdim=True)
    if score == "topk_softmax":
        g, size = w * (g - gamma), w.abs() * (size + gamma_size)
    elif score == "topk_sigmoid":
        g, size = w * (1 - w) * g, w.abs() * size
    at = torch.where(none, 0, expert_ids).long()
    total = torch.zeros_like(s).scatter_add(1, at, g.masked_fill(none, 0.0))
    total_size = torch.zeros_like(s).scatter_add(1, at, size.masked_fill(none, 0.0))
    if grad_scores is not None:
        d = grad_scores.double()
        total, total_size = total + d, total_size + d.abs()
        if score == "softmax":
            gamma, gamma_size = gamma + (s * d).sum(1, keepdim=True), gamma_size + (s * d).abs().sum(1, keepdim=True)
    if score == "softmax":
        total, total_size = s * (total - gamma), s.abs() * (total_size + gamma_size)
    elif score == "sigmoid":
        total, total_size = s * (1 - s) * total, s.abs() * total_size
    elif score == "sqrtsoftplus":
        slope = torch.where((s == 0) | s.isinf(), 0.0, -torch.expm1(-s * s) / (2 * s))
        total, total_size = slope * total, (slope.abs() + 1e-30) * total_size
    truth = rounded(total, out_dtype or grad_weights.dtype, half_units * torch.nan_to_num(total_size * spoilt))
    return Truth(truth.value, truth.bound + TINY, truth.dtype)


def _normalized(scores: Tensor, eps: float = 1e-20, padding_mask: Tensor | None = None) -> dict[str, Truth]:
    x = scores.double()
    if padding_mask is not None:
        x = x.masked_fill(padding_mask[:, None], 0.0)
    exact = x / (x.sum(1, keepdim=True) + eps)
    return {"normalized": rounded(exact, scores.dtype, (scores.shape[1] / 256 + 16) * exact.abs())}
