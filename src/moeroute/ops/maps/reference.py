"""Plans of routing maps in plain torch."""

import torch
from torch import Tensor

from moeroute import check
from moeroute.ops.planning.reference import assign_rows, deliver, heaviest_first, inverse, segments


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
    num_slots: int | None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """row_of_slot, slot_of_row, slot_offsets (None with topk), expert_of_slot, tokens, rows."""
    chosen = routing_map != 0
    num_tokens, num_experts = chosen.shape
    slot_offsets = None
    if topk is None and not fill and num_slots is None:
        token, expert = chosen.nonzero(as_tuple=True)  # token by token, experts ascending
        check.at_most_slots(len(token))
        counts = chosen.sum(dim=1)
        slot_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        weight = None if weights is None else weights[token, expert]
    else:  # every entry of the map, -1 where it is false: nothing to read back
        columns = torch.arange(num_experts, device=chosen.device).expand(num_tokens, -1)
        expert = torch.where(chosen, columns, -1).reshape(-1)
        weight = None if weights is None else weights.reshape(-1)
    if fill:
        if weight is not None and capacity is not None:
            # A column with a light entry has C heavy ones, so that no false entry is taken there.
            chosen = chosen & (heaviest_first(expert, weight) < capacity).reshape(chosen.shape)
        return _fill(chosen, first_expert, last_expert, capacity, segment, align, num_rows, num_slots, out)
    row, tokens, rows, num_rows = assign_rows(
        expert, weight, first_expert, last_expert, capacity, segment, align, num_rows, "plan_from_routing_map"
    )
    if topk is not None:
        place = chosen.cumsum(dim=1) - 1
        first_slot = torch.arange(num_tokens, device=place.device)[:, None] * topk
        slot = torch.where(chosen & (place < topk), first_slot + place, num_tokens * topk).reshape(-1)
        row, expert = _into(slot, row, num_tokens * topk), _into(slot, expert, num_tokens * topk)
    elif num_slots is not None:
        counts = chosen.sum(dim=1)
        slot_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).clamp(max=num_slots).to(torch.int32)
        slot = torch.where(chosen.reshape(-1), chosen.reshape(-1).cumsum(0) - 1, num_slots).clamp(max=num_slots)
        row, expert = _into(slot, row, num_slots), _into(slot, expert, num_slots)
    padded = segment is not None or align > 1
    return (
        deliver(row, out),
        inverse(row, num_rows),
        slot_offsets,
        expert.to(torch.int32),
        tokens,
        rows if padded else None,
    )


def _fill(
    chosen: Tensor,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    num_slots: int | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every expert takes as many tokens as it has rows, or all: its true ones, then its false ones, in token order.

    It has `capacity` rows, or what `align` makes of the number of its true tokens.
    """
    chosen = chosen[:, first_expert:last_expert]
    num_tokens, num_experts = chosen.shape
    rank_true, rank_false = chosen.cumsum(dim=0) - 1, (~chosen).cumsum(dim=0) - 1
    place = torch.where(chosen, rank_true, chosen.sum(dim=0) + rank_false)
    trues = chosen.sum(dim=0)
    wanted = (trues + align - 1) // align * align if capacity is None else torch.full_like(trues, capacity)
    taken = wanted.clamp(max=num_tokens)
    selected = place < taken
    start, tokens, rows, num_rows = segments(taken, segment, align, num_rows, "plan_from_routing_map")
    row = start + place
    row = torch.where(row < num_rows, row, -1)
    if num_slots is None:
        num_slots = int(taken.sum()) if capacity is None else min(capacity, num_tokens) * num_experts
        check.at_most_slots(num_slots)
    slot = torch.where(selected.reshape(-1), selected.reshape(-1).cumsum(0) - 1, num_slots).clamp(max=num_slots)
    columns = torch.arange(first_expert, last_expert, device=row.device).expand(num_tokens, -1)
    row, expert = _into(slot, row.reshape(-1), num_slots), _into(slot, columns.reshape(-1), num_slots)
    counts = selected.sum(dim=1)
    slot_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).clamp(max=num_slots)
    return (
        deliver(row, out),
        inverse(row, num_rows),
        slot_offsets.to(torch.int32),
        expert.to(torch.int32),
        tokens,
        rows,
    )


def _into(slot: Tensor, values: Tensor, num_slots: int) -> Tensor:
    """values at their slots, -1 in the others; slot == num_slots is thrown away."""
    return values.new_full((num_slots + 1,), -1).scatter_(0, slot, values)[:num_slots]
