"""Gating in plain torch, one rounding per operation, as docs/arithmetic.md says.

In float32 this is the definition of the bits; float64 runs through the same lines with torch's own
exp, log1p and square root, and is differentiable there, which the second derivatives use.
Letters: T tokens, E experts, K slots of a token, G groups.
"""

import torch
from torch import Tensor

PARTIAL_SUMS = 256


# ---------------------------------------------------------------------------- elementary functions


def exp(x: Tensor) -> Tensor:
    """The exp of docs/arithmetic.md: in float32 the same bits on every device."""
    if x.dtype == torch.float64:
        return torch.exp(x)
    x = x.clamp(-104.0, 89.0)  # keeps NaN
    shifted = x * 1.44269504 + 12582912.0  # 1.5 * 2^23: the integer lands in the lowest bits
    n = shifted - 12582912.0
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    y = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + c
    y = (y * r) * r + r
    y = y + 1.0
    exponent = shifted.view(torch.int32) - 0x4B400000
    half = exponent >> 1
    for part in (half, exponent - half):  # two factors: one alone may be outside the exponent range
        y = y * ((part + 127) << 23).view(torch.float32)
    return y


def log1p(u: Tensor) -> Tensor:
    """log(1 + u) for u in [0, 1]: 2 artanh(q) with q = u / (2 + u), written as u minus a correction."""
    if u.dtype == torch.float64:
        return torch.log1p(u)
    q = u / (2.0 + u)
    z = q * q
    p = torch.full_like(u, 1.0 / 15.0)
    for n in (13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        p = p * z + 1.0 / n
    p = p * z
    return u - q * (u - (p + p))


def square_root(x: Tensor) -> Tensor:
    """The square root, correctly rounded."""
    return x.double().sqrt().to(x.dtype)  # torch.sqrt of float32 is not correctly rounded everywhere


def largest(x: Tensor) -> Tensor:
    """[T, 1]: the largest number of each row; NaN is passed over, an empty row gives -inf."""
    x = torch.where(x.isnan(), -torch.inf, x).detach()  # a softmax does not depend on its shift
    padding = x.new_full((x.shape[0], 1), -torch.inf)
    return torch.cat((x, padding), dim=1).amax(dim=1, keepdim=True)


def sum_over_experts(x: Tensor) -> Tensor:
    """[T, 1]: 256 partial sums, then neighbours are added to each other."""
    total = x.new_zeros(x.shape[0], PARTIAL_SUMS)
    if x.shape[1]:
        for part in torch.nn.functional.pad(x, (0, -x.shape[1] % PARTIAL_SUMS)).split(PARTIAL_SUMS, dim=1):
            total = total + part
    while total.shape[1] > 1:
        left, right = total.reshape(len(total), total.shape[1] // 2, 2).unbind(2)  # vmap has no rule for slices
        total = left + right
    return total


def sum_over_slots(x: Tensor, valid: Tensor) -> Tensor:
    """[T, 1]: from +0 in ascending slot order; slots without an expert are skipped."""
    total = torch.zeros_like(x[:, :1])
    for p in range(x.shape[1]):
        total = torch.where(valid[:, p : p + 1], total + x[:, p : p + 1], total)
    return total


# ---------------------------------------------------------------------------- scores


def scores_of_logits(x: Tensor, score: str) -> Tensor:
    """The scores [T, E] of the logits, in their dtype."""
    if score == "softmax":
        e = exp(x - largest(x))
        return e / sum_over_experts(e)
    if score == "sigmoid":
        return 1.0 / (1.0 + exp(-x))
    if score == "sqrtsoftplus":
        return square_root(torch.where(x > 0, x, 0.0) + log1p(exp(-x.abs())))
    return x.clone()  # topk_softmax, topk_sigmoid, none: the logits themselves


def sqrtsoftplus_slope(s: Tensor) -> Tensor:
    """d sqrt(softplus(x)) / dx = (1 - exp(-s^2)) / 2s, from s alone."""
    z = s * s
    if s.dtype == torch.float64:
        small = z < 1e-3
        safe = torch.where(small, 1.0, s)
        series = 1.0 - z / 2 * (1.0 - z / 3 * (1.0 - z / 4 * (1.0 - z / 5)))
        return torch.where(small, s * 0.5 * series, -torch.expm1(-safe * safe) / (safe + safe))
    p = torch.full_like(s, -1.0 / 40320.0)
    for c in (1.0 / 5040.0, -1.0 / 720.0, 1.0 / 120.0, -1.0 / 24.0, 1.0 / 6.0, -0.5, 1.0):
        p = p * z + c
    return torch.where(z < 0.5, (s * 0.5) * p, (1.0 - exp(-z)) / (s + s))


def divisor(total: Tensor, valid: Tensor) -> Tensor:
    """1 for a token without any expert: its quotients are dropped, but 0/0 would reach second derivatives."""
    return torch.where(valid.any(dim=1, keepdim=True), total, 1.0)


def softmax_over_slots(x: Tensor, valid: Tensor) -> Tensor:
    """Softmax over the valid slots of each token."""
    e = exp(torch.where(valid, x - largest(torch.where(valid, x, -torch.inf)), 0.0))
    return e / divisor(sum_over_slots(e, valid), valid)


def weights_before_scaling(scores: Tensor, columns: Tensor, valid: Tensor, score: str) -> Tensor:
    """[T, K]: what is renormalised and scaled; anything at a slot without an expert."""
    chosen = scores.gather(1, columns)
    if score == "topk_softmax":
        return softmax_over_slots(chosen, valid)
    return scores_of_logits(chosen, "sigmoid") if score == "topk_sigmoid" else chosen


def columns_of(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Expert ids as int64, 0 where there is none, and where there is one."""
    ids = expert_ids.to(torch.int64)
    valid = (ids >= 0) & (ids < num_experts)
    return torch.where(valid, ids, 0), valid


# ---------------------------------------------------------------------------- selection


def order_key(value: Tensor) -> Tensor:
    """Integers in the order of the values: -0 equals +0, every NaN is the largest."""
    integer, sign = (torch.int64, 63) if value.dtype == torch.float64 else (torch.int32, 31)
    bits = (value + 0.0).view(integer)
    top = torch.iinfo(integer).max
    return torch.where(value.isnan(), top, bits ^ ((bits >> sign) & top))


def descending(key: Tensor) -> Tensor:
    """The columns of each row, largest key first, equal keys by smaller column."""
    return torch.sort(key, dim=1, descending=True, stable=True).indices


def select_experts(value: Tensor, k: int, num_groups: int, topk_groups: int, group_best: int) -> Tensor:
    """[T, K] int64: the chosen experts, best first."""
    tokens, num_experts = value.shape
    if topk_groups < num_groups:
        members = value.reshape(tokens * num_groups, num_experts // num_groups)
        best = members.gather(1, descending(order_key(members))[:, :group_best])
        group_value = best[:, 0]
        for place in range(1, group_best):
            group_value = group_value + best[:, place]
        ranked = descending(order_key(group_value.reshape(tokens, num_groups)))
        kept = torch.zeros(tokens, num_groups, dtype=torch.bool, device=value.device)
        kept = kept.scatter(1, ranked[:, :topk_groups], True)
        value = torch.where(kept.repeat_interleave(num_experts // num_groups, dim=1), value, -torch.inf)
    return descending(order_key(value))[:, :k]


# ---------------------------------------------------------------------------- forward, backward


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
    x = logits if logits.dtype == torch.float64 else logits.float()
    scores = scores_of_logits(x, score)
    if expert_ids is None:
        value = scores if bias is None else scores + bias.to(x.dtype)
        expert_ids = select_experts(value, k, num_groups, topk_groups, group_best)
    columns, valid = columns_of(expert_ids, logits.shape[1])
    weights = weights_before_scaling(scores, columns, valid, score)
    if renormalize:
        weights = weights / divisor(sum_over_slots(weights, valid) + eps, valid)
    weights = torch.where(valid, weights * scaling_factor, 0.0)
    results = weights.to(weights_dtype), torch.where(valid, columns, -1).to(torch.int32), scores
    if out is None:
        return results
    for target, result in zip(out, results, strict=True):
        target.copy_(result)
    return out


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
    columns, valid = columns_of(expert_ids, scores.shape[1])
    weights = weights_before_scaling(scores, columns, valid, score)
    grad = grad_weights.to(scores.dtype) * scaling_factor
    if renormalize:
        denominator = divisor(sum_over_slots(weights, valid) + eps, valid)
        beta = sum_over_slots((weights / denominator) * grad, valid)
        grad = (grad - beta) / denominator
    if score == "topk_softmax":
        grad = weights * (grad - sum_over_slots(weights * grad, valid))
    elif score == "topk_sigmoid":
        grad = (weights * (1.0 - weights)) * grad
    experts = torch.arange(scores.shape[1], device=scores.device)
    total = torch.zeros_like(scores)
    for p in range(columns.shape[1]):
        here = (columns[:, p : p + 1] == experts) & valid[:, p : p + 1]
        total = torch.where(here, total + grad[:, p : p + 1], total)
    if grad_scores is not None:
        total = total + grad_scores
    if score == "softmax":
        gamma = sum_over_slots(weights * grad, valid)
        if grad_scores is not None:
            gamma = gamma + sum_over_experts(scores * grad_scores)
        total = scores * (total - gamma)
    elif score == "sigmoid":
        total = (scores * (1.0 - scores)) * total
    elif score == "sqrtsoftplus":
        total = sqrtsoftplus_slope(scores) * total
    result = total.to(out_dtype)
    return result if out is None else out.copy_(result)
