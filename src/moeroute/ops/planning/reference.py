"""Plans of expert ids in plain torch: sorts, cumulative sums, scatters. Clear rather than fast.

Sizes are read back from the device only where the result's size depends on the data.
"""

import torch
from torch import Tensor

from moeroute import check


def plan_expert_ids(
    expert_ids: Tensor,
    weights: Tensor | None,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """row_of_slot, slot_of_row, tokens_per_expert, and rows_per_expert where it differs."""
    weights = None if weights is None else weights.reshape(-1)
    row, tokens, rows, num_rows = assign_rows(
        expert_ids.reshape(-1), weights, first_expert, last_expert, capacity, segment, align, num_rows
    )
    padded = segment is not None or align > 1
    return deliver(row, out), inverse(row, num_rows), tokens, rows if padded else None


def plan_any_ids(expert_ids: Tensor, num_rows: int | None, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """row_of_slot and slot_of_row, rows in the stable order of the ids, whatever the largest is."""
    ids = expert_ids.reshape(-1).to(torch.int64)
    order = torch.argsort(ids, stable=True)
    order = order[torch.argsort(ids[order] < 0, stable=True)]  # empty slots behind the live ones
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=order.device)
    if num_rows is None:
        num_rows = int((ids >= 0).sum())
    row = torch.where((ids >= 0) & (row < num_rows), row, -1)
    return deliver(row, out), inverse(row, num_rows)


def count(bins: Tensor, num_bins: int) -> Tensor:
    """How often each of 0..num_bins-1 occurs, int64; other values are not counted."""
    valid = (bins >= 0) & (bins < num_bins)
    counts = torch.zeros(num_bins + 1, dtype=torch.int64, device=bins.device)
    counts.scatter_add_(0, torch.where(valid, bins, num_bins), torch.ones_like(bins))
    return counts[:num_bins].clone()


def before(lengths: Tensor) -> Tensor:
    """Exclusive cumulative sum: where each of the consecutive segments begins."""
    return lengths.cumsum(0) - lengths


def rank_in_group(groups: Tensor) -> Tensor:
    """For each entry: how many earlier entries are of the same group."""
    order = torch.argsort(groups, stable=True)
    in_order = groups[order]
    first = torch.searchsorted(in_order, in_order)  # where the entry's group begins
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first
    return rank


def inverse(row_of_slot: Tensor, num_rows: int) -> Tensor:
    """slot_of_row; where several slots name one row it is the last of them."""
    slots = torch.arange(len(row_of_slot), device=row_of_slot.device)
    slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=row_of_slot.device)
    slot_of_row.scatter_reduce_(0, torch.where(row_of_slot >= 0, row_of_slot, num_rows), slots, "amax")
    return slot_of_row[:num_rows].to(torch.int32)


def cut(lengths: Tensor, start: Tensor, num_rows: int) -> Tensor:
    """The part of each segment that lies in front of row `num_rows`."""
    return (num_rows - start).clamp(min=0).minimum(lengths)


def segments(
    kept: Tensor, segment: int | None, align: int, num_rows: int | None, operator: str = "plan_from_expert_ids"
) -> tuple[Tensor, Tensor, Tensor, int]:
    """First row, live rows and rows of each expert, and R, from the number of kept slots."""
    rows = torch.full_like(kept, segment) if segment is not None else (kept + align - 1) // align * align
    start = before(rows)
    if num_rows is None:
        num_rows = int(rows.sum())
        check.at_most_rows(operator, num_rows)
    return start, cut(kept, start, num_rows), cut(rows, start, num_rows), num_rows


def heaviest_first(experts: Tensor, weights: Tensor) -> Tensor:
    """For each entry: how many of its expert's entries are heavier, or as heavy and earlier."""
    by_weight = torch.argsort(weights + 0.0, descending=True, stable=True)  # NaN first, -0 is +0
    rank = torch.empty_like(by_weight)
    rank[by_weight] = rank_in_group(experts[by_weight])
    return rank


def assign_rows(
    ids: Tensor,
    weights: Tensor | None,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    operator: str = "plan_from_expert_ids",
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Row of each entry (int64, -1 none), tokens and rows per expert, and R."""
    num_experts = last_expert - first_expert
    ids = ids.to(torch.int64)
    experts = torch.where((ids >= first_expert) & (ids < last_expert), ids - first_expert, num_experts)
    if capacity is not None:
        over = (rank_in_group(experts) if weights is None else heaviest_first(experts, weights)) >= capacity
        experts = torch.where(over, num_experts, experts)
    start, tokens, rows, num_rows = segments(count(experts, num_experts), segment, align, num_rows, operator)
    row = torch.cat([start, start.new_zeros(1)])[experts] + rank_in_group(experts)
    row = torch.where((experts < num_experts) & (row < num_rows), row, -1)
    return row, tokens, rows, num_rows


def deliver(row_of_slot: Tensor, out: Tensor | None) -> Tensor:
    """row_of_slot as int32, in `out` if that is given."""
    row_of_slot = row_of_slot.to(torch.int32)
    if out is None:
        return row_of_slot
    check.one_slot_each(out, row_of_slot.numel())
    return out.copy_(row_of_slot)
