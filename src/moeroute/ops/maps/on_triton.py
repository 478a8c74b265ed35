"""Plans of routing maps in Triton: kernels, then launchers. A map is counted by its columns, as ids are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeroute import check
from moeroute.ops.planning.on_triton import add_up_blocks, add_up_experts, clear, given, nothing
from moeroute.ops.planning.triton_sort import PIECE, WARPS, empty_like, heaviest
from moeroute.ops.triton_kit import INTERPRETED, launch, power_of_two, programs, tile_rows

MAP_TOKENS, MAP_EXPERTS = 32, 64  # a tile of a routing map
MAP_WARPS = 8

# ---------------------------------------------------------------------------- kernels
#
# `counts` and `before` have a line for each block of tokens: first the true entries of every expert, then,
# where weights have decided who stays, those that stay.


@triton.jit
def true_entries(routing_map, t, e, num_tokens, num_experts):
    """1 and 0 in int32."""
    inside = (t[:, None] < num_tokens) & (e[None, :] < num_experts)
    return (tl.load(routing_map + t[:, None] * num_experts + e[None, :], mask=inside, other=0) != 0).to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_rows"])
def count_map(
    counts,
    slot_of_row,
    routing_map,
    stays_map,
    num_tokens,
    num_experts,
    num_rows,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    STAYS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Count the true entries of each expert in the program's tokens; also clear `slot_of_row`."""
    block = tl.program_id(0).to(tl.int64)
    t = block * TOKENS + tl.arange(0, TOKENS)
    width = num_experts
    if STAYS:
        width = 2 * num_experts
    for first in range(0, num_experts, EXPERTS):
        e = first + tl.arange(0, EXPERTS)
        true = true_entries(routing_map, t, e, num_tokens, num_experts)
        tl.store(counts + block * width + e, tl.sum(true, axis=0), mask=e < num_experts)
        if STAYS:
            stays = true_entries(stays_map, t, e, num_tokens, num_experts)
            tl.store(counts + block * width + num_experts + e, tl.sum(stays, axis=0), mask=e < num_experts)
    clear(slot_of_row, num_rows, PIECE)


@triton.jit
def column_places(true, before, totals, at, e, t, num_experts, FILL: tl.constexpr):
    """Where each entry comes among those of its expert; with FILL true entries first, then the others."""
    inside = e < num_experts
    place = tl.load(before + at + e, mask=inside, other=0)[None, :] + tl.cumsum(true, axis=0) - true
    if FILL:
        total = tl.load(totals + e, mask=inside, other=0)
        place = tl.where(true != 0, place, total[None, :] + t[:, None].to(tl.int32) - place)
    return place


@triton.jit
def tokens_taken(totals, e, inside, taken, align, num_tokens):
    """How many tokens each expert takes: `taken`, or where that is -1 its true ones, up to a multiple of `align`."""
    total = tl.load(totals + e, mask=inside, other=0).to(tl.int64)
    aligned = tl.minimum((total + align - 1) // align * align, num_tokens.to(tl.int64))
    return tl.where(taken >= 0, taken.to(tl.int64), aligned)


@triton.jit(do_not_specialize=["first", "last", "num_tokens", "num_experts", "taken", "align", "topk", "num_slots"])
def deal_map(
    row_of_slot, expert_of_slot, slot_of_row, slot_offsets, routing_map, stays_map, before, totals, starts, tokens,
    first, last, num_tokens, num_experts, taken, align, topk, num_slots,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, STAYS: tl.constexpr, FILL: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Number the slots of the program's tokens (first pass), then give each its row (second pass)."""
    block = tl.program_id(0).to(tl.int64)
    t = block * TOKENS + tl.arange(0, TOKENS)
    line = block * num_experts
    if STAYS:
        line = block * num_experts * 2
    if TABLE:
        offset = (t * topk).to(tl.int32)
    else:
        # The first pass numbers the slots: how many the blocks before have, then each token of this one.
        slots_before = tl.zeros((EXPERTS,), tl.int64)
        slots = tl.zeros((TOKENS,), tl.int32)
        for tile in range(0, num_experts, EXPERTS):
            e = tile + tl.arange(0, EXPERTS)
            true = true_entries(routing_map, t, e, num_tokens, num_experts)
            if FILL:
                inside = (e >= first) & (e < last)
                place = column_places(true, before, totals, line, e, t, num_experts, FILL)
                take = tokens_taken(totals, e, inside, taken, align, num_tokens)
                selected = (place < take[None, :]) & inside[None, :] & (t[:, None] < num_tokens)
                slots += tl.sum(selected.to(tl.int32), axis=1)
                true_before = tl.load(before + line + e, mask=inside, other=0).to(tl.int64)
                true_taken = tl.minimum(tl.load(totals + e, mask=inside, other=0), take)
                taken_before = tl.minimum(true_before, true_taken)
                taken_before += tl.minimum(block * TOKENS - true_before, take - true_taken)
                slots_before += tl.where(inside, taken_before, 0)
            else:
                slots += tl.sum(true, axis=1)
                slots_before += tl.load(before + line + e, mask=e < num_experts, other=0)
        end = tl.sum(slots_before, axis=0) + tl.cumsum(slots, axis=0)
        offset = tl.minimum(end - slots, num_slots).to(tl.int32)
        if block == 0:
            tl.store(slot_offsets, 0)
        tl.store(slot_offsets + 1 + t, tl.minimum(end, num_slots).to(tl.int32), mask=t < num_tokens)
    number = tl.zeros((TOKENS,), tl.int32)
    for tile in range(0, num_experts, EXPERTS):
        e = tile + tl.arange(0, EXPERTS)
        inside = (e >= first) & (e < last)
        true = true_entries(routing_map, t, e, num_tokens, num_experts)
        stays = true
        kept_at = line
        if STAYS:
            stays = true_entries(stays_map, t, e, num_tokens, num_experts)
            kept_at = line + num_experts
        place = column_places(stays, before, totals, kept_at, e, t, num_experts, FILL)
        if FILL:
            take = tokens_taken(totals, e, inside, taken, align, num_tokens)
            true = ((place < take[None, :]) & inside[None, :] & (t[:, None] < num_tokens)).to(tl.int32)
            stays = true
        room = tl.load(tokens + e - first, mask=inside, other=0).to(tl.int32)
        live = (stays != 0) & (place < room[None, :])
        row = tl.load(starts + e - first, mask=inside, other=0).to(tl.int32)[None, :] + place
        ordinal = number[:, None] + tl.cumsum(true, axis=1) - true
        slot = offset[:, None] + ordinal
        owned = true != 0
        if TABLE:
            owned = owned & (ordinal < topk)
        else:
            owned = owned & (ordinal < num_slots - offset[:, None])
        tl.store(row_of_slot + slot, tl.where(live, row, -1), mask=owned)
        tl.store(expert_of_slot + slot, tl.broadcast_to(e[None, :], (TOKENS, EXPERTS)), mask=owned)
        tl.store(slot_of_row + row, slot, mask=owned & live)
        number += tl.sum(true, axis=1)
    if TABLE:
        for tile in range(0, topk, EXPERTS):
            k = tile + tl.arange(0, EXPERTS)
            unused = (k[None, :] >= number[:, None]) & (k[None, :] < topk) & (t[:, None] < num_tokens)
            slot = offset[:, None] + k[None, :]
            tl.store(row_of_slot + slot, tl.full((TOKENS, EXPERTS), -1, tl.int32), mask=unused)
            tl.store(expert_of_slot + slot, tl.full((TOKENS, EXPERTS), -1, tl.int32), mask=unused)


# ---------------------------------------------------------------------------- launchers


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
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    num_tokens, num_experts = routing_map.shape
    experts, padded = last_expert - first_expert, segment is not None or align > 1
    chosen = stays = routing_map.view(torch.uint8)
    if weights is not None and capacity is not None and num_experts > 0:
        stays = heaviest(chosen, weights, 0, num_experts, capacity, num_experts)
        if fill:  # one that was dropped counts as false; its expert takes no false ones
            chosen = stays
    both = stays is not chosen
    tokens_at_once = tile_rows(num_tokens, MAP_TOKENS)
    tile = {
        "TOKENS": tokens_at_once,
        "EXPERTS": min(power_of_two(max(num_experts, MAP_EXPERTS)), 1024) if INTERPRETED else MAP_EXPERTS,
        "STAYS": both,
    }
    blocks = max(programs(num_tokens, tokens_at_once), 1)
    width = 2 * num_experts if both else num_experts
    counts = empty_like(chosen, blocks, width)
    slot_of_row = empty_like(chosen, num_rows or 0)
    launch(
        count_map,
        blocks,
        counts=counts,
        slot_of_row=slot_of_row,
        routing_map=chosen,
        stays_map=stays,
        num_tokens=num_tokens,
        num_experts=num_experts,
        num_rows=num_rows or 0,
        warps=WARPS,
        PIECE=PIECE,
        **tile,
    )
    before, totals = add_up_blocks(counts)
    taken = min(capacity, num_tokens) if fill and capacity is not None else None
    aligned = fill and taken is None
    starts, tokens, rows, sizes = add_up_experts(
        totals,
        width - num_experts + first_expert,
        experts,
        num_experts,
        taken,
        capacity,
        segment,
        align,
        num_rows,
        most=num_tokens if aligned else None,
    )
    sized = num_slots is not None
    if topk is not None:
        num_slots = num_tokens * topk
    elif taken is not None:
        num_slots = experts * taken
    needed_rows = num_rows
    if num_rows is None or num_slots is None:
        needed_rows, true_entries_found, filled_up = sizes.tolist()
        if num_slots is None:
            num_slots = filled_up if aligned else true_entries_found
    check.at_most_slots(num_slots)
    if out is not None:
        check.one_slot_each(out, num_slots)
    if num_rows is None:
        num_rows = needed_rows
        check.at_most_rows("plan_from_routing_map", num_rows)
        slot_of_row = nothing(chosen, num_rows) if padded or sized or topk is not None else empty_like(chosen, num_rows)
    row_of_slot = empty_like(chosen, num_slots) if out is None else out
    expert_of_slot = empty_like(chosen, num_slots)
    if sized:
        row_of_slot.fill_(-1)
        expert_of_slot.fill_(-1)
    slot_offsets = empty_like(chosen, num_tokens + 1) if topk is None else None
    launch(
        deal_map,
        blocks,
        row_of_slot=row_of_slot,
        expert_of_slot=expert_of_slot,
        slot_of_row=slot_of_row,
        slot_offsets=row_of_slot if topk is not None else slot_offsets,
        routing_map=chosen,
        stays_map=stays,
        before=before,
        totals=totals,
        starts=starts,
        tokens=tokens,
        first=first_expert,
        last=last_expert,
        num_tokens=num_tokens,
        num_experts=num_experts,
        taken=given(taken),
        align=align,
        topk=topk or 0,
        num_slots=num_slots,
        warps=MAP_WARPS,
        spare=True,
        FILL=fill,
        TABLE=topk is not None,
        **tile,
    )
    return row_of_slot, slot_of_row, slot_offsets, expert_of_slot, tokens, rows if padded else None
