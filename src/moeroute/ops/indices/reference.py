"""Plans of given index tensors in plain torch."""

import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import LARGEST
from moeroute.ops.planning.reference import before, cut, deliver, inverse
from moeroute.plan import PlanTensors


def plan_row_of_slot(
    row_of_slot: Tensor,
    expert_of_slot: Tensor | None,
    num_rows: int,
    first_row: int,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """row_of_slot, slot_of_row and expert_of_slot, checked before they are narrowed."""
    row = inside(row_of_slot.reshape(-1), first_row, num_rows)
    if expert_of_slot is not None:
        expert_of_slot = inside(expert_of_slot.reshape(-1), 0, LARGEST + 1).to(torch.int32)
    return deliver(row, out), inverse(row, num_rows), expert_of_slot


def plan_token_ids(
    token_ids: Tensor,
    rows: Tensor | None,
    num_tokens: int,
    num_rows: int,
    num_experts: int | None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """row_of_slot, slot_of_row, slot_offsets, expert_of_slot and tokens_per_expert (None without experts)."""
    token = inside(token_ids, 0, num_tokens)
    token = torch.where(token < 0, num_tokens, token)
    order = torch.argsort(token, stable=True)
    entry_rows = torch.arange(len(token), device=token.device) if rows is None else rows
    row = torch.where(token[order] < num_tokens, inside(entry_rows, 0, num_rows)[order], -1)
    slot_offsets = torch.searchsorted(token[order], torch.arange(num_tokens + 1, device=token.device))
    slot_of_row = inverse(row, num_rows)
    expert_of_slot = tokens_per_expert = None
    if num_experts is not None:
        block = max(num_rows // num_experts, 1)
        expert_of_slot = torch.where(row >= 0, row // block, -1).to(torch.int32)
        tokens_per_expert = (slot_of_row.reshape(num_experts, -1) >= 0).sum(dim=1)
    return deliver(row, out), slot_of_row, slot_offsets.to(torch.int32), expert_of_slot, tokens_per_expert


def plan_chunks(
    lengths: Tensor, order: Tensor | None, num_tokens: int, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """row_of_slot, slot_of_row and tokens_per_expert. Without `order`: expert by expert, and inside rank by rank."""
    ranks, experts = lengths.shape
    num_chunks, device = ranks * experts, lengths.device
    lengths = lengths.to(torch.int64).clamp(min=0, max=num_tokens)  # longer ones end at the last token anyway
    by_rank = lengths.reshape(-1)  # chunks in the order in which the tokens lie
    if order is None:
        order = torch.arange(num_chunks, device=device).reshape(ranks, experts).t().reshape(-1)
    # The last place that names a chunk counts; a chunk that none names goes behind all others.
    place = inverse(inside(order, 0, num_chunks), num_chunks).to(torch.int64)
    by_place = by_rank.new_zeros(num_chunks + 1).scatter_(0, torch.where(place >= 0, place, num_chunks), by_rank)
    row_start = torch.where(place >= 0, before(by_place)[place], num_tokens)
    token = torch.arange(num_tokens, device=device)
    chunk = torch.searchsorted(by_rank.cumsum(0), token, right=True)
    shift = torch.cat([row_start - before(by_rank), row_start.new_full((1,), num_tokens)])
    row = inside(token + shift[chunk], 0, num_tokens)
    per_expert = by_place[:num_chunks].reshape(experts, ranks).sum(dim=1)
    return deliver(row, out), inverse(row, num_tokens), cut(per_expert, before(per_expert), num_tokens)


def plan_row_id_map(
    row_id_map: Tensor, pad_offsets: Tensor | None, num_rows: int, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """row_of_slot, slot_of_row, slot_offsets and expert_of_slot."""
    num_experts, device = row_id_map.shape[1] // 2, row_id_map.device
    counts = row_id_map[:, -1].to(torch.int64).clamp(min=0, max=num_experts)
    slot_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    place = torch.arange(num_experts, device=device)
    slot = torch.where(place < counts[:, None], slot_offsets[:-1, None] + place, num_rows).clamp(max=num_rows)
    row = inside(row_id_map[:, :num_experts], 0, num_rows)
    expert = inside(row_id_map[:, num_experts:-1], 0, num_experts)
    live = (row >= 0) & (expert >= 0)
    if pad_offsets is not None:
        pad = inside(torch.cat([pad_offsets, pad_offsets.new_zeros(1)]), 0, num_rows)[expert]
        live &= (pad >= 0) & (row + pad < num_rows)
        row = row + pad
    row_of_slot, expert_of_slot = (
        torch.where(live, values, -1)
        .new_full((num_rows + 1,), -1)
        .scatter_(0, slot.reshape(-1), torch.where(live, values, -1).reshape(-1))[:num_rows]
        for values in (row, expert)
    )
    return (
        deliver(row_of_slot, out),
        inverse(row_of_slot, num_rows),
        slot_offsets.clamp(max=num_rows).to(torch.int32),
        expert_of_slot.to(torch.int32),
    )


def row_id_map(plan: PlanTensors, num_experts: int, *, out: Tensor | None = None) -> Tensor:
    """Rows, expert ids and number of the slots of each token that have a row, int32 [T, 2E + 1]."""
    slots, num_tokens = torch.arange(len(plan.row_of_slot), device=plan.row_of_slot.device), plan.num_tokens
    if plan.slot_offsets is None:
        first = torch.arange(num_tokens + 1, device=slots.device) * (len(slots) // max(num_tokens, 1))
    else:
        first = plan.slot_offsets.to(torch.int64)
    token = torch.searchsorted(first[1:].contiguous(), slots, right=True)
    if plan.expert_of_slot is None:
        raise check.wrong_value("row_id_map", "expert_of_slot", "given", None)
    row, expert = plan.row_of_slot.to(torch.int64), plan.expert_of_slot.to(torch.int64)
    used = (row >= 0) & (row < len(plan.slot_of_row)) & (expert >= 0) & (expert < num_experts)
    used &= (slots >= first[0]) & (token < num_tokens)
    running = torch.cat([slots.new_zeros(1), used.cumsum(0)])
    place = running[:-1] - running[first.clamp(0, len(slots))][token]
    used &= place < num_experts
    width = 2 * num_experts + 1
    found = torch.full((num_tokens * width + 1,), -1, dtype=torch.int64, device=slots.device)
    at = torch.where(used, token * width + place, num_tokens * width)
    found.scatter_(0, at, row)
    found.scatter_(0, torch.where(used, at + num_experts, num_tokens * width), expert)
    found = found[:-1].reshape(num_tokens, width).to(torch.int32)
    found[:, -1] = (found[:, :num_experts] >= 0).sum(dim=1)
    return found if out is None else out.copy_(found)


def inside(index: Tensor, first: int, count: int) -> Tensor:
    """index - first as int64, -1 where that is not in [0, count)."""
    index = index.to(torch.int64)
    return torch.where((index >= first) & (index < first + count), index - first, -1)
