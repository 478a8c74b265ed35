"""Plans from routing maps, in Numba: kernels, then launchers.

The true entries are found, then planned as expert ids are.
"""

import numpy as np
import torch
from numba import int64
from torch import Tensor

from moeroute import check, memory
from moeroute.ops import layout
from moeroute.ops.numba_kit.launch import kernel
from moeroute.ops.numba_kit.pointers import float32_ptr, int32_ptr, int64_ptr, is_null, uint8_ptr
from moeroute.ops.planning.on_numba import (
    CPU,
    NONE,
    SLOT_WORK,
    assign_rows,
    chunks_for,
    given,
    keep_heavy,
    row_of_slot_target,
)

# ---------------------------------------------------------------------------- kernels: true entries


@kernel()
def count_true(
    slot_offsets: int32_ptr,
    routing_map: uint8_ptr,
    num_experts: int64,
    lo: int64,
    hi: int64,
):
    """Count the true entries of each token, into `slot_offsets[t + 1]`."""
    for t in range(lo, hi):
        count = np.int32(0)
        for e in range(num_experts):
            count += np.int32(routing_map[t * num_experts + e] != 0)
        slot_offsets[t + 1] = count


@kernel(parallel=False)
def offsets(
    slot_offsets: int32_ptr,
    lo: int64,
    hi: int64,
) -> int64:
    """Counts in 1..T to offsets; returns the number of slots."""
    total = int64(0)
    slot_offsets[0] = np.int32(0)
    for t in range(lo, hi):
        total += slot_offsets[t + 1]
        slot_offsets[t + 1] = np.int32(total)
    return total


@kernel()
def true_entries(
    expert_of_slot: int32_ptr,
    slot_weights: float32_ptr,
    slot_offsets: int32_ptr,
    routing_map: uint8_ptr,
    words: int64_ptr,
    weights: float32_ptr,
    num_experts: int64,
    lo: int64,
    hi: int64,
):
    """The experts (and weights) of the true entries. `words`: the map in 8-byte words, where rows are whole words."""
    for t in range(lo, hi):
        s = int64(slot_offsets[t])
        for first in range(0, num_experts, 8):
            if not is_null(words) and words[(t * num_experts + first) >> 3] == 0:
                continue
            for e in range(first, min(first + 8, num_experts)):
                if routing_map[t * num_experts + e] != 0:
                    expert_of_slot[s] = np.int32(e)
                    if not is_null(weights):
                        slot_weights[s] = weights[t * num_experts + e]
                    s += 1


@kernel()
def table(
    table_row: int32_ptr,
    table_expert: int32_ptr,
    slot_of_row: int32_ptr,
    row_of_slot: int32_ptr,
    expert_of_slot: int32_ptr,
    slot_offsets: int32_ptr,
    topk: int64,
    lo: int64,
    hi: int64,
):
    """The first topk slots of each token, -1 where it has fewer; rows of the later ones become padding."""
    for t in range(lo, hi):
        first, last = int64(slot_offsets[t]), int64(slot_offsets[t + 1])
        for k in range(topk):
            s = first + k
            row, expert = NONE, NONE
            if s < last:
                row, expert = row_of_slot[s], expert_of_slot[s]
                if row >= 0:
                    slot_of_row[row] = np.int32(t * topk + k)
            table_row[t * topk + k] = row
            table_expert[t * topk + k] = expert
        for s in range(first + topk, last):
            if row_of_slot[s] >= 0:
                slot_of_row[row_of_slot[s]] = NONE


# ---------------------------------------------------------------------------- kernels: fill
#
# `trues` is int64 [chunks + 1, E]: first how many true entries of each expert chunk c of the tokens
# has, then how many the chunks before it have; the last row the number of all. `first_slots` int64
# [chunks]: the first slot of each chunk. `takes` int64 [E]: how many tokens each expert takes;
# `starts` int64 [E + 1]: its first row.


@kernel()
def count_fill(
    trues: int64_ptr,
    true_offsets: int32_ptr,
    true_ids: int32_ptr,
    first_expert: int64,
    last_expert: int64,
    num_tokens: int64,
    chunks: int64,
    lo: int64,
    hi: int64,
):
    """Count, in each chunk of tokens, the true entries of each expert that are left."""
    experts = last_expert - first_expert
    for c in range(lo, hi):
        base = c * experts
        for e in range(experts):
            trues[base + e] = int64(0)
        begin = true_offsets[c * num_tokens // chunks]
        for s in range(begin, true_offsets[(c + 1) * num_tokens // chunks]):
            i = int64(true_ids[s])
            if first_expert <= i < last_expert:
                trues[base + i - first_expert] = trues[base + i - first_expert] + 1


@kernel(parallel=False)
def add_up_fill(
    trues: int64_ptr,
    first_slots: int64_ptr,
    takes: int64_ptr,
    starts: int64_ptr,
    tokens: int64_ptr,
    rows: int64_ptr,
    experts: int64,
    capacity: int64,
    segment: int64,
    align: int64,
    num_tokens: int64,
    num_rows: int64,
    lo: int64,
    hi: int64,
) -> int64:
    """items: the chunks. Returns the number of slots. -1 for an option: it is not given."""
    start, all_slots = int64(0), int64(0)
    for e in range(experts):
        total = int64(0)
        for c in range(hi):
            count = trues[c * experts + e]
            trues[c * experts + e] = total
            total += count
        trues[hi * experts + e] = total
        length = segment if segment >= 0 else (total + align - 1) // align * align
        taken = min(length if capacity < 0 else capacity, num_tokens)
        takes[e], starts[e] = taken, start
        room = max(num_rows - start, int64(0)) if num_rows >= 0 else length
        tokens[e], rows[e] = min(taken, room), min(length, room)
        start += length
        all_slots += taken
    starts[experts] = start
    for c in range(hi):
        before = c * num_tokens // hi  # tokens in front of the chunk
        slots = int64(0)
        for e in range(experts):
            kept = min(trues[hi * experts + e], takes[e])
            true = trues[c * experts + e]
            slots += min(true, kept) + min(before - true, takes[e] - kept)
        first_slots[c] = slots
    return all_slots


@kernel()
def fill(
    row_of_slot: int32_ptr,
    slot_of_row: int32_ptr,
    slot_offsets: int32_ptr,
    expert_of_slot: int32_ptr,
    trues: int64_ptr,
    first_slots: int64_ptr,
    takes: int64_ptr,
    starts: int64_ptr,
    true_offsets: int32_ptr,
    true_experts: int32_ptr,
    true_ids: int32_ptr,
    first_expert: int64,
    last_expert: int64,
    num_tokens: int64,
    num_rows: int64,
    chunks: int64,
    lo: int64,
    hi: int64,
):
    """Number slots and rows where each expert takes its true tokens first, then its first false ones."""
    experts = last_expert - first_expert
    for c in range(lo, hi):
        slot = first_slots[c]
        for t in range(c * num_tokens // chunks, (c + 1) * num_tokens // chunks):
            slot_offsets[t] = np.int32(slot)
            s, end = int64(true_offsets[t]), int64(true_offsets[t + 1])
            for e in range(experts):
                expert = first_expert + e
                while s < end and true_experts[s] < expert:
                    s += 1
                # One that was dropped for its weight counts as false here; its expert takes no false one.
                chosen = s < end and true_experts[s] == expert and true_ids[s] == expert
                true = trues[c * experts + e]
                taken = takes[e]
                kept = min(trues[chunks * experts + e], taken)
                place = int64(-1)
                if chosen:
                    trues[c * experts + e] = true + 1
                    if true < kept:
                        place = true
                elif t - true < taken - kept:
                    place = kept + t - true
                if place >= 0:
                    row = starts[e] + place
                    row_of_slot[slot] = np.int32(row) if row < num_rows else NONE
                    expert_of_slot[slot] = np.int32(expert)
                    if row < num_rows:
                        slot_of_row[row] = np.int32(slot)
                    slot += 1
        if c == chunks - 1:
            slot_offsets[num_tokens] = np.int32(slot)
        for e in range(c * experts // chunks, (c + 1) * experts // chunks):
            for row in range(min(starts[e] + takes[e], num_rows), min(starts[e + 1], num_rows)):
                slot_of_row[row] = NONE
    if hi == chunks:
        for row in range(min(starts[experts], num_rows), num_rows):
            slot_of_row[row] = NONE


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
    work = num_tokens * num_experts
    slot_offsets = torch.empty(num_tokens + 1, dtype=torch.int32, device=CPU)
    offsets_at, map_at = slot_offsets.data_ptr(), routing_map.data_ptr()
    count_true(
        None,
        items=num_tokens,
        work=work,
        slot_offsets=offsets_at,
        routing_map=map_at,
        num_experts=num_experts,
    )
    num_true = offsets(
        None,
        items=num_tokens,
        work=0,
        slot_offsets=offsets_at,
    )
    check.at_most_slots(num_true)
    expert_of_slot = memory.empty((num_true,), torch.int32)
    slot_weights = None
    if weights is not None:
        weights = weights.float()
        slot_weights = memory.empty((num_true,), torch.float32)
    words = map_at if num_experts % 8 == 0 and map_at % 8 == 0 else 0
    true_entries(
        None,
        items=num_tokens,
        work=work,
        expert_of_slot=expert_of_slot.data_ptr(),
        slot_weights=layout.address(slot_weights),
        slot_offsets=offsets_at,
        routing_map=map_at,
        words=words,
        weights=layout.address(weights),
        num_experts=num_experts,
    )
    ids = expert_of_slot
    if slot_weights is not None and capacity is not None:
        ids = keep_heavy(ids, slot_weights, first_expert, last_expert, capacity)
    if fill:
        found = _fill_experts(
            slot_offsets,
            expert_of_slot,
            ids,
            first_expert,
            last_expert,
            capacity,
            segment,
            align,
            num_rows,
            out if num_slots is None else None,
        )
        return found if num_slots is None else _resized(*found, num_slots, out)
    ragged = out if topk is None and num_slots is None else None
    if ragged is not None:
        check.one_slot_each(ragged, num_true)
    row_of_slot, slot_of_row, tokens, rows = assign_rows(
        ids, first_expert, last_expert, capacity, segment, align, num_rows, ragged, "plan_from_routing_map"
    )
    if num_slots is not None:
        return _resized(row_of_slot, slot_of_row, slot_offsets, expert_of_slot, tokens, rows, num_slots, out)
    if topk is None:
        return row_of_slot, slot_of_row, slot_offsets, expert_of_slot, tokens, rows
    table_row = row_of_slot_target(out, num_tokens * topk)
    table_expert = memory.empty((num_tokens * topk,), torch.int32)
    table(
        None,
        items=num_tokens,
        work=SLOT_WORK * num_tokens * topk,
        table_row=table_row.data_ptr(),
        table_expert=table_expert.data_ptr(),
        slot_of_row=slot_of_row.data_ptr(),
        row_of_slot=row_of_slot.data_ptr(),
        expert_of_slot=expert_of_slot.data_ptr(),
        slot_offsets=offsets_at,
        topk=topk,
    )
    return table_row, slot_of_row, None, table_expert, tokens, rows


def _resized(
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    slot_offsets: Tensor,
    expert_of_slot: Tensor,
    tokens: Tensor,
    rows: Tensor | None,
    num_slots: int,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """So many slots: -1 behind the last one, and rows of those that are cut off become padding."""
    cut = row_of_slot[num_slots:]
    slot_of_row[cut[cut >= 0]] = -1
    sized = row_of_slot_target(out, num_slots), memory.empty((num_slots,), torch.int32)
    for new, old in zip(sized, (row_of_slot, expert_of_slot), strict=True):
        new[: old.shape[0]] = old[:num_slots]
        new[old.shape[0] :] = -1
    return sized[0], slot_of_row, slot_offsets.clamp_(max=num_slots), sized[1], tokens, rows


def _fill_experts(
    true_offsets: Tensor,
    true_experts: Tensor,
    true_ids: Tensor,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, experts = true_offsets.shape[0] - 1, last_expert - first_expert
    work = num_tokens * experts
    chunks = chunks_for(work, experts)
    trues = torch.empty((chunks + 1, experts), dtype=torch.int64, device=CPU)
    first_slots = torch.empty(chunks, dtype=torch.int64, device=CPU)
    tokens, rows, takes = (torch.empty(experts, dtype=torch.int64, device=CPU) for _ in range(3))
    starts = torch.empty(experts + 1, dtype=torch.int64, device=CPU)
    slot_offsets = torch.empty(num_tokens + 1, dtype=torch.int32, device=CPU)
    count_fill(
        None,
        items=chunks,
        work=work,
        trues=trues.data_ptr(),
        true_offsets=true_offsets.data_ptr(),
        true_ids=true_ids.data_ptr(),
        first_expert=first_expert,
        last_expert=last_expert,
        num_tokens=num_tokens,
        chunks=chunks,
    )
    num_slots = add_up_fill(
        None,
        items=chunks,
        work=0,
        trues=trues.data_ptr(),
        first_slots=first_slots.data_ptr(),
        takes=takes.data_ptr(),
        starts=starts.data_ptr(),
        tokens=tokens.data_ptr(),
        rows=rows.data_ptr(),
        experts=experts,
        capacity=given(capacity),
        segment=given(segment),
        align=align,
        num_tokens=num_tokens,
        num_rows=given(num_rows),
    )
    check.at_most_slots(num_slots)
    if num_rows is None:
        num_rows = int(starts[-1])
        check.at_most_rows("plan_from_routing_map", num_rows)
    if out is not None:
        check.one_slot_each(out, num_slots)
    row_of_slot = row_of_slot_target(out, num_slots)
    expert_of_slot = memory.empty((num_slots,), torch.int32)
    slot_of_row = memory.empty((num_rows,), torch.int32)
    fill(
        None,
        items=chunks,
        work=work,
        row_of_slot=row_of_slot.data_ptr(),
        slot_of_row=slot_of_row.data_ptr(),
        slot_offsets=slot_offsets.data_ptr(),
        expert_of_slot=expert_of_slot.data_ptr(),
        trues=trues.data_ptr(),
        first_slots=first_slots.data_ptr(),
        takes=takes.data_ptr(),
        starts=starts.data_ptr(),
        true_offsets=true_offsets.data_ptr(),
        true_experts=true_experts.data_ptr(),
        true_ids=true_ids.data_ptr(),
        first_expert=first_expert,
        last_expert=last_expert,
        num_tokens=num_tokens,
        num_rows=num_rows,
        chunks=chunks,
    )
    return row_of_slot, slot_of_row, slot_offsets, expert_of_slot, tokens, rows
