"""Plans in plain torch: sorts, cumulative sums, scatters. Clear rather than fast.

Every function takes the checked arguments of the same function in `numba_cpu.py` and runs on any
device; sizes are read back from it only where the result's size depends on the data.
"""

import torch
from torch import Tensor

from moeroute import check

LARGEST = 2**31 - 1


def _count(bins: Tensor, num_bins: int) -> Tensor:
    """How often each of 0..num_bins-1 occurs, int64; other values are not counted."""
    valid = (bins >= 0) & (bins < num_bins)
    counts = torch.zeros(num_bins + 1, dtype=torch.int64, device=bins.device)
    counts.scatter_add_(0, torch.where(valid, bins, num_bins), torch.ones_like(bins))
    return counts[:num_bins].clone()


def _before(lengths: Tensor) -> Tensor:
    """Exclusive cumulative sum: where each of the consecutive segments begins."""
    return lengths.cumsum(0) - lengths


def _rank(groups: Tensor) -> Tensor:
    """For each entry: how many earlier entries are of the same group."""
    order = torch.argsort(groups, stable=True)
    in_order = groups[order]
    first = torch.searchsorted(in_order, in_order)  # where the entry's group begins
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first
    return rank


def _inverse(row_of_slot: Tensor, num_rows: int) -> Tensor:
    """slot_of_row; where several slots name one row it is the last of them."""
    slots = torch.arange(len(row_of_slot), device=row_of_slot.device)
    slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=row_of_slot.device)
    slot_of_row.scatter_reduce_(0, torch.where(row_of_slot >= 0, row_of_slot, num_rows), slots, "amax")
    return slot_of_row[:num_rows].to(torch.int32)


def _cut(lengths: Tensor, start: Tensor, num_rows: int) -> Tensor:
    """The part of each segment that lies in front of row `num_rows`."""
    return (num_rows - start).clamp(min=0).minimum(lengths)


def _segments(
    kept: Tensor, segment: int | None, align: int, num_rows: int | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    """First row, live rows and rows of each expert, and R, from the number of kept slots."""
    rows = torch.full_like(kept, segment) if segment is not None else (kept + align - 1) // align * align
    start = _before(rows)
    if num_rows is None:
        num_rows = int(rows.sum())
        if num_rows > LARGEST:
            raise check.wrong_value("plan", "align", f"such that there are at most {LARGEST} rows", f"{num_rows} rows")
    return start, _cut(kept, start, num_rows), _cut(rows, start, num_rows), num_rows


def _heaviest_first(experts: Tensor, weights: Tensor) -> Tensor:
    """For each entry: how many of its expert's entries are heavier, or as heavy and earlier."""
    by_weight = torch.argsort(weights + 0.0, descending=True, stable=True)  # NaN first, -0 is +0
    rank = torch.empty_like(by_weight)
    rank[by_weight] = _rank(experts[by_weight])
    return rank


def _assign_rows(
    ids: Tensor,
    weights: Tensor | None,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Row of each entry (int64, -1 none), tokens and rows per expert, and R."""
    num_experts = last_expert - first_expert
    ids = ids.to(torch.int64)
    experts = torch.where((ids >= first_expert) & (ids < last_expert), ids - first_expert, num_experts)
    if capacity is not None:
        over = (_rank(experts) if weights is None else _heaviest_first(experts, weights)) >= capacity
        experts = torch.where(over, num_experts, experts)
    start, tokens, rows, num_rows = _segments(_count(experts, num_experts), segment, align, num_rows)
    row = torch.cat([start, start.new_zeros(1)])[experts] + _rank(experts)
    row = torch.where((experts < num_experts) & (row < num_rows), row, -1)
    return row, tokens, rows, num_rows


def _deliver(row_of_slot: Tensor, out: Tensor | None) -> Tensor:
    row_of_slot = row_of_slot.to(torch.int32)
    if out is None:
        return row_of_slot
    if out.numel() != row_of_slot.numel():
        wanted = f"of S = {row_of_slot.numel()} elements, one for each true entry"
        raise check.wrong_shape("plan_from_routing_map", "out", wanted, out)
    return out.copy_(row_of_slot)


def plan_expert_ids(
    expert_ids: Tensor,
    weights: Tensor | None,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """row_of_slot, slot_of_row, tokens_per_expert, and rows_per_expert where it differs."""
    weights = None if weights is None else weights.reshape(-1)
    row, tokens, rows, num_rows = _assign_rows(
        expert_ids.reshape(-1), weights, first_expert, last_expert, capacity, segment, align, num_rows
    )
    padded = segment is not None or align > 1
    return _deliver(row, out), _inverse(row, num_rows), tokens, rows if padded else None


def plan_any_ids(expert_ids: Tensor, num_rows: int | None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """row_of_slot and slot_of_row, rows in the stable order of the ids, whatever the largest is."""
    ids = expert_ids.reshape(-1).to(torch.int64)
    order = torch.argsort(ids, stable=True)
    order = order[torch.argsort(ids[order] < 0, stable=True)]  # empty slots behind the live ones
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=order.device)
    if num_rows is None:
        num_rows = int((ids >= 0).sum())
    row = torch.where((ids >= 0) & (row < num_rows), row, -1)
    return _deliver(row, out), _inverse(row, num_rows)


def plan_routing_map(
    routing_map: Tensor,
    weights: Tensor | None,
    first_expert: int,
    last_expert: int,
    topk: int | None,
    fill: bool,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """row_of_slot, slot_of_row, slot_offsets (None with topk), expert_of_slot, tokens, rows."""
    chosen = routing_map != 0
    num_tokens, num_experts = chosen.shape
    slot_offsets = None
    if topk is None and not fill:
        token, expert = chosen.nonzero(as_tuple=True)  # token by token, experts ascending
        if len(token) > LARGEST:
            raise check.wrong_value(
                "plan_from_routing_map", "routing_map", f"one with at most {LARGEST} true entries", len(token)
            )
        counts = chosen.sum(dim=1)
        slot_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        weight = None if weights is None else weights[token, expert]
    else:  # every entry of the map, -1 where it is false: nothing to read back
        columns = torch.arange(num_experts, device=chosen.device).expand(num_tokens, -1)
        expert = torch.where(chosen, columns, -1).reshape(-1)
        weight = None if weights is None else weights.reshape(-1)
    if fill and capacity is not None and num_rows is not None:
        if weight is not None:
            # A column with a light entry has C heavy ones, so that no false entry is taken there.
            chosen = chosen & (_heaviest_first(expert, weight) < capacity).reshape(chosen.shape)
        return _fill(chosen, first_expert, last_expert, capacity, segment, num_rows, out)
    row, tokens, rows, num_rows = _assign_rows(
        expert, weight, first_expert, last_expert, capacity, segment, align, num_rows
    )
    if topk is not None:
        place = chosen.cumsum(dim=1) - 1
        first_slot = torch.arange(num_tokens, device=place.device)[:, None] * topk
        slot = torch.where(chosen & (place < topk), first_slot + place, num_tokens * topk).reshape(-1)
        row, expert = _into(slot, row, num_tokens * topk), _into(slot, expert, num_tokens * topk)
    padded = segment is not None or align > 1
    return (
        _deliver(row, out),
        _inverse(row, num_rows),
        slot_offsets,
        expert.to(torch.int32),
        tokens,
        rows if padded else None,
    )


def _into(slot: Tensor, values: Tensor, num_slots: int) -> Tensor:
    """values at their slots, -1 in the others; slot == num_slots is thrown away."""
    return values.new_full((num_slots + 1,), -1).scatter_(0, slot, values)[:num_slots]


def _fill(
    chosen: Tensor,
    first_expert: int,
    last_expert: int,
    capacity: int,
    segment: int | None,
    num_rows: int,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every expert takes min(C, T) tokens: its true ones, then its false ones, each in token order."""
    chosen = chosen[:, first_expert:last_expert]
    num_tokens, num_experts = chosen.shape
    taken = min(capacity, num_tokens)
    rank_true, rank_false = chosen.cumsum(dim=0) - 1, (~chosen).cumsum(dim=0) - 1
    place = torch.where(chosen, rank_true, chosen.sum(dim=0) + rank_false)
    selected = place < taken
    start, tokens, rows, num_rows = _segments(rank_true.new_full((num_experts,), taken), segment, 1, num_rows)
    row = start + place
    row = torch.where(row < num_rows, row, -1)
    num_slots = taken * num_experts
    slot = torch.where(selected.reshape(-1), selected.reshape(-1).cumsum(0) - 1, num_slots)
    columns = torch.arange(first_expert, last_expert, device=row.device).expand(num_tokens, -1)
    row, expert = _into(slot, row.reshape(-1), num_slots), _into(slot, columns.reshape(-1), num_slots)
    counts = selected.sum(dim=1)
    slot_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return (
        _deliver(row, out),
        _inverse(row, num_rows),
        slot_offsets.to(torch.int32),
        expert.to(torch.int32),
        tokens,
        rows,
    )


def _inside(index: Tensor, first: int, count: int) -> Tensor:
    """index - first as int64, -1 where that is not in [0, count)."""
    index = index.to(torch.int64)
    return torch.where((index >= first) & (index < first + count), index - first, -1)


def plan_row_of_slot(
    row_of_slot: Tensor,
    expert_of_slot: Tensor | None,
    num_rows: int,
    first_row: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """row_of_slot, slot_of_row and expert_of_slot, checked before they are narrowed."""
    row = _inside(row_of_slot.reshape(-1), first_row, num_rows)
    if expert_of_slot is not None:
        expert_of_slot = _inside(expert_of_slot.reshape(-1), 0, LARGEST + 1).to(torch.int32)
    return _deliver(row, out), _inverse(row, num_rows), expert_of_slot


def plan_token_ids(
    token_ids: Tensor,
    rows: Tensor | None,
    num_tokens: int,
    num_rows: int,
    num_experts: int | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """row_of_slot, slot_of_row, slot_offsets, expert_of_slot and tokens_per_expert (None without experts)."""
    token = _inside(token_ids, 0, num_tokens)
    token = torch.where(token < 0, num_tokens, token)
    order = torch.argsort(token, stable=True)
    entry_rows = torch.arange(len(token), device=token.device) if rows is None else rows
    row = torch.where(token[order] < num_tokens, _inside(entry_rows, 0, num_rows)[order], -1)
    slot_offsets = torch.searchsorted(token[order], torch.arange(num_tokens + 1, device=token.device))
    slot_of_row = _inverse(row, num_rows)
    expert_of_slot = tokens_per_expert = None
    if num_experts is not None:
        block = max(num_rows // num_experts, 1)
        expert_of_slot = torch.where(row >= 0, row // block, -1).to(torch.int32)
        tokens_per_expert = (slot_of_row.reshape(num_experts, -1) >= 0).sum(dim=1)
    return _deliver(row, out), slot_of_row, slot_offsets.to(torch.int32), expert_of_slot, tokens_per_expert


def plan_segments(lengths: Tensor, num_tokens: int, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """row_of_slot, slot_of_row and tokens_per_expert."""
    lengths = lengths.to(torch.int64).clamp(min=0, max=num_tokens)  # longer ones end at the last token anyway
    by_rank = lengths.reshape(-1)  # chunks in the order in which the tokens lie
    by_expert = lengths.t().reshape(-1)  # and in the order of the rows
    row_start = _before(by_expert).reshape(lengths.t().shape).t().reshape(-1)
    token = torch.arange(num_tokens, device=lengths.device)
    chunk = torch.searchsorted(by_rank.cumsum(0), token, right=True)
    shift = torch.cat([row_start - _before(by_rank), row_start.new_full((1,), num_tokens)])
    row = _inside(token + shift[chunk], 0, num_tokens)
    start = _before(lengths.sum(dim=0))
    return _deliver(row, out), _inverse(row, num_tokens), _cut(lengths.sum(dim=0), start, num_tokens)
