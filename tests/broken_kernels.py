"""Routing in plain torch as somebody may write it, right and with twelve mistakes; for the tests of the judge."""

from typing import Any

import torch
from torch import Tensor

from moeroute.plan import RoutingPlan

# ---------------------------------------------------------------------------- right


def permute(tokens: Tensor, token_of_row: Tensor) -> Tensor:
    rows = tokens[token_of_row.long().clamp(min=0)]
    rows[token_of_row < 0] = 0
    return rows


def unpermute(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> Tensor:
    """Slot by slot in float32."""
    return summed(rows, plan, weights)


def summed(
    rows: Tensor,
    plan: RoutingPlan,
    weights: Tensor | None = None,
    inner: torch.dtype = torch.float32,
    backwards: bool = False,
    padding: bool = False,
    by_row: bool = False,
) -> Tensor:
    """The sums of `unpermute`: kept in `inner`, slots from the last on, -1 as the last row, weights by row."""
    out = torch.zeros(plan.num_tokens, rows.shape[1], dtype=inner)
    of_slot = plan.row_of_slot.tolist()
    order = range(len(of_slot))
    flat = None if weights is None else slots_of(weights, plan).float()
    tokens = plan.token_of_slot.tolist()
    for slot in reversed(order) if backwards else order:
        row, token = of_slot[slot], tokens[slot]
        if token < 0 or (row < 0 and not padding):
            continue
        term = rows[row].float()
        if flat is not None:
            weight = flat[row % len(flat)] if by_row else flat[slot]
            if weight == 0:
                continue
            term = weight * term
        out[token] = (out[token] + term).to(inner)
    return out.to(rows.dtype)


def slots_of(weights: Tensor, plan: RoutingPlan) -> Tensor:
    if plan.expert_of_slot is None:
        return weights.reshape(-1)
    tokens, experts = plan.token_of_slot.long(), plan.expert_of_slot.long()
    inside = (tokens >= 0) & (experts >= 0)
    return torch.where(inside, weights[tokens.clamp(min=0), experts.clamp(min=0)], 0)


def plan_from_expert_ids(expert_ids: Tensor, num_experts: int, capacity: int | None = None) -> dict[str, Any]:
    """By a stable sort; an id of no expert has no row."""
    ids = expert_ids.flatten().to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    one_hot = torch.nn.functional.one_hot(ids, num_experts + 1)
    rank = (one_hot.cumsum(0) - 1).gather(1, ids[:, None])[:, 0]
    if capacity is not None:
        ids = torch.where(rank < capacity, ids, num_experts)
    counts = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
    live = torch.argsort(ids, stable=True)[: int(counts.sum())]
    row_of_slot = torch.full_like(ids, -1)
    row_of_slot[live] = torch.arange(len(live))
    return {"row_of_slot": row_of_slot, "slot_of_row": live, "tokens_per_expert": counts, "rows_per_expert": counts}


def softmax_gate(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """float64 inside, so near ties fall as they do; for arithmetic="tolerance"."""
    scores = torch.softmax(logits.double(), 1)
    keys = torch.where(scores.isnan(), torch.inf, scores).float()
    ids = torch.argsort(keys, dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, ids).float(), ids


# ---------------------------------------------------------------------------- wrong


def off_by_one_row(tokens: Tensor, token_of_row: Tensor) -> Tensor:
    return permute(tokens, token_of_row.roll(1))


def wrong_tie(expert_ids: Tensor, num_experts: int) -> dict[str, Any]:
    """Slots of an expert from the last on, as an unstable sort may leave them."""
    turned = plan_from_expert_ids(expert_ids.flatten().flip(0)[:, None], num_experts)
    rows = turned["row_of_slot"].flip(0)
    live = turned["slot_of_row"]
    return {**turned, "row_of_slot": rows, "slot_of_row": len(rows) - 1 - live}


def wrong_tie_of_scores(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of equal scores the larger id."""
    scores = torch.softmax(logits.double(), 1)
    keys = torch.where(scores.isnan(), torch.inf, scores).float()
    ids = keys.shape[1] - 1 - torch.argsort(keys.flip(1), dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, ids).float(), ids


def bfloat16_sum(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> Tensor:
    return summed(rows, plan, weights, inner=rows.dtype)


def bfloat16_gradient_of_a_weight(
    grad_tokens: Tensor, rows: Tensor, plan: RoutingPlan, weights: Tensor
) -> tuple[Tensor, Tensor]:
    grad_rows, _ = unpermute_backward(grad_tokens, rows, plan, weights)
    row, tokens = plan.row_of_slot.long(), plan.token_of_slot.long()
    products = rows[row.clamp(min=0)] * grad_tokens[tokens.clamp(min=0)]
    total = torch.zeros(len(row), dtype=rows.dtype)
    for column in range(products.shape[1]):
        total = total + products[:, column]
    return grad_rows, torch.where(row >= 0, total, 0).to(weights.dtype).reshape(weights.shape)


def unpermute_backward(
    grad_tokens: Tensor, rows: Tensor, plan: RoutingPlan, weights: Tensor, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """Right in the rows; the gradient of the weights is a sum in torch's order."""
    slots, flat = plan.slot_of_row.long(), weights.reshape(-1).float()
    grads = grad_tokens[plan.token_of_row.long().clamp(min=0)].float()
    grads = torch.where((slots >= 0)[:, None], grads * flat[slots.clamp(min=0), None] if scaled else grads, 0)
    row, tokens = plan.row_of_slot.long(), plan.token_of_slot.long()
    dots = (rows[row.clamp(min=0)].float() * grad_tokens[tokens.clamp(min=0)].float()).sum(1)
    return grads.to(rows.dtype), torch.where(row >= 0, dots, 0).to(weights.dtype).reshape(weights.shape)


def gradient_not_scaled(grad_tokens: Tensor, rows: Tensor, plan: RoutingPlan, weights: Tensor) -> tuple[Tensor, Tensor]:
    return unpermute_backward(grad_tokens, rows, plan, weights, scaled=False)


def ignored_minus_one(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> Tensor:
    return summed(rows, plan, weights, padding=True)


def order_of_atomics(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> Tensor:
    """In slot order, or in the other one, as threads happen to come."""
    order_of_atomics.calls += 1  # type: ignore[attr-defined]
    return summed(rows, plan, weights, backwards=order_of_atomics.calls % 2 == 0)  # type: ignore[attr-defined]


order_of_atomics.calls = 0  # type: ignore[attr-defined]


def uninitialised_padding(tokens: Tensor, token_of_row: Tensor) -> Tensor:
    rows = torch.empty(len(token_of_row), tokens.shape[1], dtype=tokens.dtype)
    live = token_of_row >= 0
    rows[live] = tokens[token_of_row[live].long()]
    return rows


def int32_offsets(tokens: Tensor, token_of_row: Tensor) -> Tensor:
    """Addresses in 32 bits: what overflows is read from somewhere else."""
    width, stride = tokens.shape[1], tokens.stride(0)
    flat = tokens.as_strided(((tokens.shape[0] - 1) * stride + width,), (1,)) if tokens.numel() else tokens.flatten()
    offsets = (token_of_row.clamp(min=0)[:, None] * stride + torch.arange(width)) % 2**32
    offsets = torch.where(offsets >= 2**31, offsets - 2**32, offsets) % max(len(flat), 1)
    return torch.where((token_of_row >= 0)[:, None], flat[offsets], 0)


def last_tile_unmasked(tokens: Tensor, token_of_row: Tensor) -> Tensor:
    """The last tile of 64 columns is left out where it is not full."""
    rows = permute(tokens, token_of_row)
    rows[:, tokens.shape[1] // 64 * 64 :] = 0
    return rows


def weights_of_the_wrong_slot(rows: Tensor, plan: RoutingPlan, weights: Tensor) -> Tensor:
    return summed(rows, plan, weights, by_row=True)


def counts_before_capacity(expert_ids: Tensor, num_experts: int, capacity: int | None = None) -> dict[str, Any]:
    found = plan_from_expert_ids(expert_ids, num_experts, capacity)
    return {**found, "tokens_per_expert": plan_from_expert_ids(expert_ids, num_experts)["tokens_per_expert"]}


def in_place(rows: Tensor, plan: RoutingPlan, weights: Tensor) -> Tensor:
    """Scales the rows where they are."""
    flat = slots_of(weights, plan).float()
    found = summed(rows, plan, weights)
    live = plan.slot_of_row >= 0
    rows[live] = (rows[live].float() * flat[plan.slot_of_row[live].long(), None]).to(rows.dtype)
    return found


def writes_behind(tokens: Tensor, token_of_row: Tensor, out: Tensor) -> Tensor:
    """One element too many."""
    out.copy_(permute(tokens, token_of_row))
    if out.numel():
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
    return out


def reads_behind(tokens: Tensor, token_of_row: Tensor) -> Tensor:
    """Zeros, or what lies behind the tokens, in padding rows."""
    rows = permute(tokens, token_of_row)
    if tokens.numel():
        rows[token_of_row < 0] = tokens.as_strided((1,), (1,), tokens.storage_offset() + tokens.numel())
    return rows
