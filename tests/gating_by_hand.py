"""Gating as the tests expect it: the choice by Python's own sort, the weights in float64."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeroute.ops.gating.op import Score

SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax", "topk_sigmoid", "none")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
NAN, INF = math.nan, math.inf
GROUPED: dict[str, Any] = {"num_groups": 8, "topk_groups": 4, "group_score": "top2_sum"}


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 2.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def by_hand(
    scores: Tensor,
    k: int,
    bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    group_score: str | int = "max",
) -> Tensor:
    """The expert ids of every row from its float32 scores, with Python's own sort."""

    best = group_score if isinstance(group_score, int) else {"max": 1, "top2_sum": 2}[group_score]

    def best_first(values: list[float]) -> list[int]:
        return sorted(range(len(values)), key=lambda i: (0 if math.isnan(values[i]) else 1, -values[i], i))

    rows = []
    for row in scores:
        values = (row if bias is None else row + bias.float()).tolist()
        size = len(values) // num_groups
        groups = []
        for g in range(num_groups):
            members = values[g * size : (g + 1) * size]
            total, *rest = (np.float32(members[i]) for i in best_first(members))
            for value in rest[: best - 1]:
                with np.errstate(invalid="ignore"):  # inf - inf
                    total = total + value
            groups.append(float(total))
        kept = best_first(groups)[: topk_groups or num_groups]
        rows.append(best_first([v if e // size in kept else -INF for e, v in enumerate(values)])[:k])
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), k)


def exact(
    logits: Tensor, ids: Tensor, score: str, renormalize: bool, scaling_factor: float = 1.0, eps: float = 1e-20
) -> tuple[Tensor, Tensor]:
    """Weights and scores in float64 for given ids, -1 for none: plain torch, differentiable by torch."""
    x = logits.double()
    if score == "softmax":
        scores = torch.softmax(x, 1)
    elif score == "sigmoid":
        scores = torch.sigmoid(x)
    elif score == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(x, threshold=1000.0).sqrt()
    else:
        scores = x
    none = ids < 0
    weights = scores.gather(1, ids.long().clamp(min=0))
    if score == "topk_softmax":
        weights = torch.softmax(weights.masked_fill(none, -INF), 1)
    elif score == "topk_sigmoid":
        weights = weights.sigmoid()
    weights = weights.masked_fill(none, 0.0)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + eps)
    return weights * scaling_factor, scores
