"""Plans from expert ids by counting, in Numba: kernels, then launchers.

Counting sort in three steps: count the slots of each expert (per chunk of slots, chunks side by
side), add up, deal the rows out (chunks side by side again). A chunk knows how many slots of each
expert the chunks before it have, so the number of chunks changes nothing in the result.
"""

import numpy as np
import torch
from numba import int64
from torch import Tensor

from moeroute import check, memory
from moeroute.ops import layout
from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.launch import SERIAL_WORK, element_ptr, kernel, thread_count
from moeroute.ops.numba_kit.pointers import float32_ptr, int32_ptr, int64_ptr, is_null

SLOT_WORK = 2  # a slot costs as much as moving two bytes: threads pay from 65,536 slots on
NONE = np.int32(-1)
INDEX_DTYPES = (torch.int32, torch.int64)
empty, INT32, INT64 = torch.empty, torch.int32, torch.int64
CPU = torch.device("cpu")  # said every time: torch.set_default_device must not move our tables

# ---------------------------------------------------------------------------- kernels: counting sort
#
# `counts` is int64 [chunks + 1, E]. First row c holds how many slots of each expert chunk c has, then
# the next row that chunk deals out, for each expert; the last row the end of each expert's live rows.


@kernel(keys=INDEX_DTYPES)
def count(
    counts: int64_ptr,
    ids: element_ptr,
    first_expert: int64,
    last_expert: int64,
    num_slots: int64,
    chunks: int64,
    lo: int64,
    hi: int64,
):
    """Count the ids of each expert in each chunk of the slots; ids out of range count nowhere."""
    experts = last_expert - first_expert
    for c in range(lo, hi):
        base = c * experts
        for e in range(experts):
            counts[base + e] = int64(0)
        for s in range(c * num_slots // chunks, (c + 1) * num_slots // chunks):
            i = int64(ids[s])
            if first_expert <= i < last_expert:
                counts[base + i - first_expert] = counts[base + i - first_expert] + 1


@kernel(parallel=False)
def add_up(
    counts: int64_ptr,
    tokens: int64_ptr,
    rows: int64_ptr,
    chunks: int64,
    capacity: int64,
    segment: int64,
    align: int64,
    num_rows: int64,
    lo: int64,
    hi: int64,
) -> int64:
    """Counts to rows; returns how many rows all experts need. -1 for an option: it is not given."""
    start = int64(0)
    for e in range(lo, hi):
        total = int64(0)
        for c in range(chunks):
            count = counts[c * hi + e]
            counts[c * hi + e] = start + total
            total += count
        kept = total if capacity < 0 else min(total, capacity)
        length = segment
        if segment < 0:
            length = kept if align == 1 else (kept + align - 1) // align * align  # a division takes 4 ns
        end = start + length
        if num_rows >= 0:
            kept = max(min(kept, num_rows - start), int64(0))
            end = min(end, num_rows)
        counts[chunks * hi + e] = start + kept
        tokens[e] = kept
        if not is_null(rows):
            rows[e] = end - start
        start = end
    return start


@kernel(keys=INDEX_DTYPES)
def deal(
    row_of_slot: int32_ptr,
    slot_of_row: int32_ptr,
    counts: int64_ptr,
    tokens: int64_ptr,
    rows: int64_ptr,
    ids: element_ptr,
    first_expert: int64,
    last_expert: int64,
    num_slots: int64,
    num_rows: int64,
    chunks: int64,
    lo: int64,
    hi: int64,
):
    """Give every slot of the chunk its row. `counts` holds the next free row of each expert and is advanced."""
    experts = last_expert - first_expert
    ends = chunks * experts
    for c in range(lo, hi):
        base = c * experts
        for s in range(c * num_slots // chunks, (c + 1) * num_slots // chunks):
            i = int64(ids[s])
            row = NONE
            if first_expert <= i < last_expert:
                e = i - first_expert
                r = counts[base + e]
                counts[base + e] = r + 1
                if r < counts[ends + e]:
                    row = np.int32(r)
                    slot_of_row[r] = np.int32(s)
            row_of_slot[s] = row
        for e in range(c * experts // chunks, (c + 1) * experts // chunks):
            end = counts[ends + e]
            spare = int64(0) if is_null(rows) else rows[e] - tokens[e]
            for r in range(end, end + spare):
                slot_of_row[r] = NONE
    if hi == chunks:
        used = int64(0)
        if experts > 0:
            used = counts[ends + experts - 1]
            if not is_null(rows):
                used += rows[experts - 1] - tokens[experts - 1]
        for r in range(used, num_rows):
            slot_of_row[r] = NONE


count_inline, add_up_inline, deal_inline = count.inline, add_up.inline, deal.inline


@kernel(keys=INDEX_DTYPES, parallel=False)
def plan_serial(
    row_of_slot: int32_ptr,
    slot_of_row: int32_ptr,
    tokens: int64_ptr,
    rows: int64_ptr,
    ids: element_ptr,
    first_expert: int64,
    last_expert: int64,
    capacity: int64,
    segment: int64,
    align: int64,
    num_rows: int64,
    lo: int64,
    hi: int64,
) -> int64:
    """The three steps at once; returns the number of rows that all experts need."""
    experts = last_expert - first_expert
    counts = np.empty(2 * experts, np.int64)
    count_inline(counts, ids, first_expert, last_expert, hi, 1, 0, 1)
    total = add_up_inline(counts, tokens, rows, 1, capacity, segment, align, num_rows, 0, experts)
    deal_inline(row_of_slot, slot_of_row, counts, tokens, rows, ids, first_expert, last_expert, hi, num_rows, 1, 0, 1)
    return total


# ---------------------------------------------------------------------------- kernels: drop by weight


@helper
def weight_key(weights, bits, s):
    """An integer in [0, 2^32) in the order of the weights: NaN above all, -0 as +0."""
    if weights[s] != weights[s]:
        return int64(0xFFFFFFFF)
    pattern = int64(bits[s]) & int64(0xFFFFFFFF)
    if pattern == 0x80000000:
        pattern = int64(0)
    return pattern ^ (int64(0xFFFFFFFF) if pattern & 0x80000000 else int64(0x80000000))


@kernel()
def keep_heaviest(
    kept_ids: int32_ptr,
    weights: float32_ptr,
    bits: int32_ptr,
    slot_of_row: int32_ptr,
    ends: int64_ptr,
    tokens: int64_ptr,
    first_expert: int64,
    capacity: int64,
    lo: int64,
    hi: int64,
):
    """Of each expert's slots (grouped in slot_of_row) the heaviest `capacity` get their id back.

    The key of the lightest one that stays is found digit by digit, 8 bits at a time from above.
    """
    histogram = np.empty(256, np.int64)
    for e in range(lo, hi):
        count = tokens[e]
        start = ends[e] - count
        if count <= capacity:
            for r in range(start, start + count):
                kept_ids[slot_of_row[r]] = np.int32(first_expert + e)
        elif capacity > 0:
            keys = np.empty(count, np.int64)
            for i in range(count):
                keys[i] = weight_key(weights, bits, slot_of_row[start + i])
            wanted = capacity  # still to be found among the keys that begin with `lightest`
            lightest = int64(0)
            for shift in range(24, -1, -8):
                histogram[:] = 0
                for i in range(count):
                    if (keys[i] >> (shift + 8)) == lightest:
                        histogram[(keys[i] >> shift) & 0xFF] += 1
                digit = int64(255)
                while histogram[digit] < wanted:
                    wanted -= histogram[digit]
                    digit -= 1
                lightest = lightest << 8 | digit
            for i in range(count):
                stays = keys[i] > lightest
                if keys[i] == lightest and wanted > 0:
                    stays = True
                    wanted -= 1
                if stays:
                    kept_ids[slot_of_row[start + i]] = np.int32(first_expert + e)


# ---------------------------------------------------------------------------- kernels: any id


@kernel(keys=INDEX_DTYPES, parallel=False)
def sort_ids(
    slot_of_row: int32_ptr,
    row_of_slot: int32_ptr,
    ids: element_ptr,
    num_rows: int64,
    lo: int64,
    hi: int64,
) -> int64:
    """The live slots in the stable order of their ids (radix sort, digits of 8 bits); returns how many.

    Digits that all ids share cost nothing. slot_of_row and row_of_slot have room for every slot.
    """
    keys, slots = np.empty(hi, np.int64), np.empty(hi, np.int32)
    live = 0
    differing = int64(0)
    for s in range(hi):
        i = int64(ids[s])
        row_of_slot[s] = NONE
        if i >= 0:
            keys[live], slots[live] = i, s
            differing |= i ^ keys[0]
            live += 1
    other_keys, other_slots = np.empty(live, np.int64), np.empty(live, np.int32)
    place = np.empty(256, np.int64)
    for shift in range(0, 64, 8):
        if (differing >> shift) & 0xFF == 0:
            continue
        place[:] = 0
        for j in range(live):
            place[(keys[j] >> shift) & 0xFF] += 1
        total = int64(0)
        for digit in range(256):
            total, place[digit] = total + place[digit], total
        for j in range(live):
            digit = (keys[j] >> shift) & 0xFF
            other_keys[place[digit]], other_slots[place[digit]] = keys[j], slots[j]
            place[digit] += 1
        keys, other_keys = other_keys, keys
        slots, other_slots = other_slots, slots
    for r in range(live):
        slot_of_row[r] = slots[r]
        if r < num_rows:
            row_of_slot[slots[r]] = np.int32(r)
    for r in range(live, hi):
        slot_of_row[r] = NONE
    return int64(live)


# ---------------------------------------------------------------------------- launchers


def given(option: int | None) -> int:
    """The option as kernels take it: -1 for None."""
    return -1 if option is None else option


def row_of_slot_target(out: Tensor | None, num_slots: int) -> Tensor:
    """Where row_of_slot is written: the caller's contiguous int32 tensor, or a fresh one."""
    return memory.empty((num_slots,), torch.int32) if out is None else out


def chunks_for(work: int, bins: int) -> int:
    """1 where the work is small, or smaller than the tables of several chunks."""
    return 1 if work < SERIAL_WORK else max(min(thread_count(), work // (2 * bins + 1)), 1)


def count_up(
    ids: Tensor,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    out: Tensor | None = None,
    operator: str = "plan_from_expert_ids",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The plan of these ids in three steps; last the end of each expert's live rows."""
    num_slots, experts, dtype = ids.numel(), last_expert - first_expert, ids.dtype
    work = SLOT_WORK * num_slots
    chunks = chunks_for(work, experts)
    counts = torch.empty((chunks + 1, experts), dtype=torch.int64, device=CPU)
    tokens = torch.empty(experts, dtype=torch.int64, device=CPU)
    rows = torch.empty(experts, dtype=torch.int64, device=CPU) if segment is not None or align > 1 else None
    row_of_slot = row_of_slot_target(out, num_slots)
    counts_at, tokens_at, rows_at, ids_at = counts.data_ptr(), tokens.data_ptr(), layout.address(rows), ids.data_ptr()
    count(
        dtype,
        items=chunks,
        work=work,
        counts=counts_at,
        ids=ids_at,
        first_expert=first_expert,
        last_expert=last_expert,
        num_slots=num_slots,
        chunks=chunks,
    )
    total = add_up(
        None,
        items=experts,
        work=0,
        counts=counts_at,
        tokens=tokens_at,
        rows=rows_at,
        chunks=chunks,
        capacity=given(capacity),
        segment=given(segment),
        align=align,
        num_rows=given(num_rows),
    )
    if num_rows is None:
        check.at_most_rows(operator, total)
        num_rows = total
    slot_of_row = memory.empty((num_rows,), torch.int32)
    deal(
        dtype,
        items=chunks,
        work=work,
        row_of_slot=row_of_slot.data_ptr(),
        slot_of_row=slot_of_row.data_ptr(),
        counts=counts_at,
        tokens=tokens_at,
        rows=rows_at,
        ids=ids_at,
        first_expert=first_expert,
        last_expert=last_expert,
        num_slots=num_slots,
        num_rows=num_rows,
        chunks=chunks,
    )
    return row_of_slot, slot_of_row, tokens, rows, counts[chunks]


def assign_rows(
    ids: Tensor,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    out: Tensor | None = None,
    operator: str = "plan_from_expert_ids",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """row_of_slot, slot_of_row, tokens and rows per expert; small plans in one pass, others by `count_up`."""
    num_slots, padded = ids.numel(), segment is not None or align > 1
    limit = num_slots if num_rows is None else num_rows
    if SLOT_WORK * (num_slots + limit) >= SERIAL_WORK or (padded and num_rows is None):
        return count_up(ids, first_expert, last_expert, capacity, segment, align, num_rows, out, operator)[:4]
    experts = last_expert - first_expert
    row_of_slot = empty(num_slots, dtype=INT32, device=CPU) if out is None else out
    slot_of_row = empty(limit, dtype=INT32, device=CPU)
    tokens = empty(experts, dtype=INT64, device=CPU)
    rows = empty(experts, dtype=INT64, device=CPU) if padded else None
    total = plan_serial(
        ids.dtype,
        items=num_slots,
        work=0,
        row_of_slot=row_of_slot.data_ptr(),
        slot_of_row=slot_of_row.data_ptr(),
        tokens=tokens.data_ptr(),
        rows=0 if rows is None else rows.data_ptr(),
        ids=ids.data_ptr(),
        first_expert=first_expert,
        last_expert=last_expert,
        capacity=-1 if capacity is None else capacity,
        segment=-1 if segment is None else segment,
        align=align,
        num_rows=limit,
    )
    if num_rows is None and total < num_slots:
        slot_of_row = slot_of_row[:total].clone()
    return row_of_slot, slot_of_row, tokens, rows


def keep_heavy(ids: Tensor, weights: Tensor, first_expert: int, last_expert: int, capacity: int) -> Tensor:
    """The ids in int32, -1 for slots without an expert in the range and for those over the capacity."""
    _, slot_of_row, tokens, _, ends = count_up(ids, first_expert, last_expert, None, None, 1, ids.numel())
    weights = weights.float()
    kept_ids = memory.empty((ids.numel(),), torch.int32).fill_(-1)
    keep_heaviest(
        None,
        items=last_expert - first_expert,
        work=SLOT_WORK * ids.numel(),
        kept_ids=kept_ids.data_ptr(),
        weights=weights.data_ptr(),
        bits=weights.data_ptr(),
        slot_of_row=slot_of_row.data_ptr(),
        ends=ends.data_ptr(),
        tokens=tokens.data_ptr(),
        first_expert=first_expert,
        capacity=capacity,
    )
    return kept_ids


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
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    if weights is not None and capacity is not None:
        expert_ids = keep_heavy(expert_ids, weights, first_expert, last_expert, capacity)
    return assign_rows(expert_ids, first_expert, last_expert, capacity, segment, align, num_rows, out)


def plan_any_ids(expert_ids: Tensor, num_rows: int | None, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    num_slots = expert_ids.numel()
    row_of_slot = row_of_slot_target(out, num_slots)
    slot_of_row = memory.empty((num_slots,), torch.int32)
    limit = num_slots if num_rows is None else num_rows
    live = sort_ids(
        expert_ids.dtype,
        items=num_slots,
        work=0,
        slot_of_row=slot_of_row.data_ptr(),
        row_of_slot=row_of_slot.data_ptr(),
        ids=expert_ids.data_ptr(),
        num_rows=limit,
    )
    size = live if num_rows is None else num_rows
    if size != num_slots:
        sorted_slots, slot_of_row = slot_of_row, memory.empty((size,), torch.int32)
        slot_of_row[num_slots:] = -1
        slot_of_row[:num_slots] = sorted_slots[:size]
    return row_of_slot, slot_of_row
