"""Plans by counting, in Numba: kernels, then launchers.

Counting sort in three steps: count the slots of each expert (per chunk of slots, chunks side by
side), add up, deal the rows out (chunks side by side again). A chunk knows how many slots of each
expert the chunks before it have, so the number of chunks changes nothing in the result.
"""

import numpy as np
import torch
from numba import int64, prange
from torch import Tensor

from moeroute import check, memory
from moeroute.ops.launch import SERIAL_WORK, Kernel, kernel, parallel_kernel, thread_count
from moeroute.ops.simd import POINTER, float32_ptr, int32_ptr, int64_ptr, is_null, uint8_ptr

LARGEST = 2**31 - 1
SLOT_WORK = 2  # a slot costs as much as moving two bytes: threads pay from 65,536 slots on
NONE = np.int32(-1)
empty, INT32, INT64 = torch.empty, torch.int32, torch.int64
CPU = torch.device("cpu")  # said every time: torch.set_default_device must not move our tables

# ---------------------------------------------------------------------------- kernels: counting sort
#
# `counts` is int64 [chunks + 1, E]. First row c holds how many slots of each expert chunk c has, then
# the next row that chunk deals out, for each expert; the last row the end of each expert's live rows.


@kernel
def count_body(counts, ids, first_expert, last_expert, num_slots, chunks, lo, hi):
    experts = last_expert - first_expert
    for c in range(lo, hi):
        base = c * experts
        for e in range(experts):
            counts[base + e] = int64(0)
        for s in range(c * num_slots // chunks, (c + 1) * num_slots // chunks):
            i = int64(ids[s])
            if first_expert <= i < last_expert:
                counts[base + i - first_expert] = counts[base + i - first_expert] + 1


@parallel_kernel
def count_parallel(counts, ids, first_expert, last_expert, num_slots, chunks, n, threads):
    for c in prange(threads):
        count_body(
            counts, ids, first_expert, last_expert, num_slots, chunks, c * n // threads, (c + 1) * n // threads
        )  # fmt: skip


@kernel
def add_up_body(counts, tokens, rows, chunks, capacity, segment, align, num_rows, lo, hi):
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


@kernel
def deal_body(
    row_of_slot, slot_of_row, counts, tokens, rows, ids, first_expert, last_expert, num_slots, num_rows, chunks, lo, hi
):
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


@parallel_kernel
def deal_parallel(
    row_of_slot, slot_of_row, counts, tokens, rows, ids, first_expert, last_expert, num_slots, num_rows, chunks, n,
    threads,
):  # fmt: skip
    for c in prange(threads):
        deal_body(
            row_of_slot, slot_of_row, counts, tokens, rows, ids, first_expert, last_expert, num_slots, num_rows, chunks,
            c * n // threads, (c + 1) * n // threads,
        )  # fmt: skip


@kernel
def plan_serial_body(
    row_of_slot, slot_of_row, tokens, rows, ids, first_expert, last_expert, capacity, segment, align, num_rows, lo, hi
):
    """The three steps at once; returns the number of rows that all experts need."""
    experts = last_expert - first_expert
    counts = np.empty(2 * experts, np.int64)
    count_body(counts, ids, first_expert, last_expert, hi, 1, 0, 1)
    total = add_up_body(counts, tokens, rows, 1, capacity, segment, align, num_rows, 0, experts)
    deal_body(
        row_of_slot, slot_of_row, counts, tokens, rows, ids, first_expert, last_expert, hi, num_rows, 1, 0, 1
    )  # fmt: skip
    return total


# ---------------------------------------------------------------------------- kernels: drop by weight


@kernel
def weight_key(weights, bits, s):
    """An integer in [0, 2^32) in the order of the weights: NaN above all, -0 as +0."""
    if weights[s] != weights[s]:
        return int64(0xFFFFFFFF)
    pattern = int64(bits[s]) & int64(0xFFFFFFFF)
    if pattern == 0x80000000:
        pattern = int64(0)
    return pattern ^ (int64(0xFFFFFFFF) if pattern & 0x80000000 else int64(0x80000000))


@kernel
def keep_heaviest_body(kept_ids, weights, bits, slot_of_row, ends, tokens, first_expert, capacity, lo, hi):
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


@parallel_kernel
def keep_heaviest_parallel(kept_ids, weights, bits, slot_of_row, ends, tokens, first_expert, capacity, n, threads):
    for c in prange(threads):
        keep_heaviest_body(
            kept_ids, weights, bits, slot_of_row, ends, tokens, first_expert, capacity,
            c * n // threads, (c + 1) * n // threads,
        )  # fmt: skip


# ---------------------------------------------------------------------------- kernels: any id


@kernel
def sort_ids_body(slot_of_row, row_of_slot, ids, num_rows, lo, hi):
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


# ---------------------------------------------------------------------------- kernels: routing map


@kernel
def count_true_body(slot_offsets, routing_map, num_experts, lo, hi):
    for t in range(lo, hi):
        count = np.int32(0)
        for e in range(num_experts):
            count += np.int32(routing_map[t * num_experts + e] != 0)
        slot_offsets[t + 1] = count


@parallel_kernel
def count_true_parallel(slot_offsets, routing_map, num_experts, n, threads):
    for c in prange(threads):
        count_true_body(slot_offsets, routing_map, num_experts, c * n // threads, (c + 1) * n // threads)


@kernel
def offsets_body(slot_offsets, lo, hi):
    """Counts in 1..T to offsets; returns the number of slots."""
    total = int64(0)
    slot_offsets[0] = np.int32(0)
    for t in range(lo, hi):
        total += slot_offsets[t + 1]
        slot_offsets[t + 1] = np.int32(total)
    return total


@kernel
def true_entries_body(expert_of_slot, slot_weights, slot_offsets, routing_map, words, weights, num_experts, lo, hi):
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


@parallel_kernel
def true_entries_parallel(
    expert_of_slot, slot_weights, slot_offsets, routing_map, words, weights, num_experts, n, threads
):
    for c in prange(threads):
        true_entries_body(
            expert_of_slot, slot_weights, slot_offsets, routing_map, words, weights, num_experts,
            c * n // threads, (c + 1) * n // threads,
        )  # fmt: skip


@kernel
def table_body(table_row, table_expert, slot_of_row, row_of_slot, expert_of_slot, slot_offsets, topk, lo, hi):
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


@parallel_kernel
def table_parallel(table_row, table_expert, slot_of_row, row_of_slot, expert_of_slot, slot_offsets, topk, n, threads):
    for c in prange(threads):
        table_body(
            table_row, table_expert, slot_of_row, row_of_slot, expert_of_slot, slot_offsets, topk,
            c * n // threads, (c + 1) * n // threads,
        )  # fmt: skip


# ---------------------------------------------------------------------------- kernels: fill
#
# `trues` is int64 [chunks + 1, E]: first how many true entries of each expert chunk c of the tokens
# has, then how many the chunks before it have; the last row the number of all. `first_slots` int64
# [chunks]: the first slot of each chunk.


@kernel
def count_fill_body(trues, true_offsets, true_ids, first_expert, last_expert, num_tokens, chunks, lo, hi):
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


@parallel_kernel
def count_fill_parallel(trues, true_offsets, true_ids, first_expert, last_expert, num_tokens, chunks, n, threads):
    for c in prange(threads):
        count_fill_body(
            trues, true_offsets, true_ids, first_expert, last_expert, num_tokens, chunks,
            c * n // threads, (c + 1) * n // threads,
        )  # fmt: skip


@kernel
def add_up_fill_body(trues, first_slots, tokens, rows, experts, taken, segment, num_tokens, num_rows, lo, hi):
    """items: the chunks."""
    for e in range(experts):
        total = int64(0)
        for c in range(hi):
            count = trues[c * experts + e]
            trues[c * experts + e] = total
            total += count
        trues[hi * experts + e] = total
        start = min(e * segment, num_rows)
        tokens[e] = min(taken, num_rows - start)
        rows[e] = min(segment, num_rows - start)
    for c in range(hi):
        before = c * num_tokens // hi  # tokens in front of the chunk
        slots = int64(0)
        for e in range(experts):
            kept = min(trues[hi * experts + e], taken)
            true = trues[c * experts + e]
            slots += min(true, kept) + min(before - true, taken - kept)
        first_slots[c] = slots


@kernel
def fill_body(
    row_of_slot, slot_of_row, slot_offsets, expert_of_slot, trues, first_slots, true_offsets, true_experts, true_ids,
    first_expert, last_expert, taken, segment, num_tokens, num_rows, chunks, lo, hi,
):  # fmt: skip
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
                kept = min(trues[chunks * experts + e], taken)
                place = int64(-1)
                if chosen:
                    trues[c * experts + e] = true + 1
                    if true < kept:
                        place = true
                elif t - true < taken - kept:
                    place = kept + t - true
                if place >= 0:
                    row = e * segment + place
                    row_of_slot[slot] = np.int32(row) if row < num_rows else NONE
                    expert_of_slot[slot] = np.int32(expert)
                    if row < num_rows:
                        slot_of_row[row] = np.int32(slot)
                    slot += 1
        if c == chunks - 1:
            slot_offsets[num_tokens] = np.int32(slot)
        for e in range(c * experts // chunks, (c + 1) * experts // chunks):
            for row in range(min(e * segment + taken, num_rows), min((e + 1) * segment, num_rows)):
                slot_of_row[row] = NONE
    if hi == chunks:
        for row in range(min(experts * segment, num_rows), num_rows):
            slot_of_row[row] = NONE


@parallel_kernel
def fill_parallel(
    row_of_slot, slot_of_row, slot_offsets, expert_of_slot, trues, first_slots, true_offsets, true_experts, true_ids,
    first_expert, last_expert, taken, segment, num_tokens, num_rows, chunks, n, threads,
):  # fmt: skip
    for c in prange(threads):
        fill_body(
            row_of_slot, slot_of_row, slot_offsets, expert_of_slot, trues, first_slots, true_offsets, true_experts,
            true_ids, first_expert, last_expert, taken, segment, num_tokens, num_rows, chunks,
            c * n // threads, (c + 1) * n // threads,
        )  # fmt: skip


# ---------------------------------------------------------------------------- kernels: given indices


@kernel
def narrow_body(out, index, first, count, lo, hi):
    """index - first in int32; -1 where it is not in [0, count)."""
    for i in range(lo, hi):
        value = int64(index[i])
        out[i] = np.int32(value - first) if first <= value < first + count else NONE


@parallel_kernel
def narrow_parallel(out, index, first, count, n, threads):
    for c in prange(threads):
        narrow_body(out, index, first, count, c * n // threads, (c + 1) * n // threads)


@kernel
def invert_body(slot_of_row, row_of_slot, num_slots, lo, hi):
    """slot_of_row of the rows [lo, hi): every thread reads all slots, so that the last one wins."""
    for r in range(lo, hi):
        slot_of_row[r] = NONE
    for s in range(num_slots):
        r = int64(row_of_slot[s])
        if lo <= r < hi:
            slot_of_row[r] = np.int32(s)


@parallel_kernel
def invert_parallel(slot_of_row, row_of_slot, num_slots, n, threads):
    for c in prange(threads):
        invert_body(slot_of_row, row_of_slot, num_slots, c * n // threads, (c + 1) * n // threads)


@kernel
def entry_rows_body(row_of_slot, entry_of_slot, rows, expert_of_slot, num_rows, rows_per_expert, lo, hi):
    """The row of each slot's entry, and its expert; without `rows` entry i has row i."""
    for s in range(lo, hi):
        entry = int64(entry_of_slot[s])
        row = int64(-1)
        if entry >= 0:
            row = entry if is_null(rows) else int64(rows[entry])
            if not 0 <= row < num_rows:
                row = int64(-1)
        row_of_slot[s] = np.int32(row)
        if not is_null(expert_of_slot):
            expert_of_slot[s] = np.int32(row // rows_per_expert) if row >= 0 else NONE


@parallel_kernel
def entry_rows_parallel(row_of_slot, entry_of_slot, rows, expert_of_slot, num_rows, rows_per_expert, n, threads):
    for c in prange(threads):
        entry_rows_body(
            row_of_slot, entry_of_slot, rows, expert_of_slot, num_rows, rows_per_expert,
            c * n // threads, (c + 1) * n // threads,
        )  # fmt: skip


@kernel
def live_rows_body(tokens, slot_of_row, rows_per_expert, lo, hi):
    for e in range(lo, hi):
        count = int64(0)
        for r in range(e * rows_per_expert, (e + 1) * rows_per_expert):
            count += int64(slot_of_row[r] >= 0)
        tokens[e] = count


@parallel_kernel
def live_rows_parallel(tokens, slot_of_row, rows_per_expert, n, threads):
    for c in prange(threads):
        live_rows_body(tokens, slot_of_row, rows_per_expert, c * n // threads, (c + 1) * n // threads)


@kernel
def segment_starts_body(starts, tokens, lengths, ranks, num_tokens, lo, hi):
    """starts int64 [3, ranks, E]: first token, first row and length of each chunk, cut at the last token."""
    chunks = ranks * hi
    token = int64(0)
    for c in range(chunks):
        length = min(max(int64(lengths[c]), int64(0)), num_tokens)
        starts[c] = token
        starts[2 * chunks + c] = length
        token = min(token + length, num_tokens)
    row = int64(0)
    for e in range(hi):
        first = row
        for rank in range(ranks):
            starts[chunks + rank * hi + e] = row
            row = min(row + starts[2 * chunks + rank * hi + e], num_tokens)
        tokens[e] = row - first


@kernel
def segments_body(row_of_slot, slot_of_row, starts, chunks, num_tokens, lo, hi):
    """Rows of the tokens [lo, hi), and slots of the rows [lo, hi)."""
    for i in range(lo, hi):
        row_of_slot[i] = NONE
        slot_of_row[i] = NONE
    for c in range(chunks):
        token, row, length = starts[c], starts[chunks + c], starts[2 * chunks + c]
        length = min(length, num_tokens - token, num_tokens - row)
        for i in range(max(lo - token, int64(0)), min(hi - token, length)):
            row_of_slot[token + i] = np.int32(row + i)
        for i in range(max(lo - row, int64(0)), min(hi - row, length)):
            slot_of_row[row + i] = np.int32(token + i)


@parallel_kernel
def segments_parallel(row_of_slot, slot_of_row, starts, chunks, num_tokens, n, threads):
    for c in prange(threads):
        segments_body(
            row_of_slot, slot_of_row, starts, chunks, num_tokens, c * n // threads, (c + 1) * n // threads
        )  # fmt: skip


_I, _L, _B, _F, _n = int32_ptr, int64_ptr, uint8_ptr, float32_ptr, int64
_INDEX = (torch.int32, torch.int64)
_ONE = (None,)

_count = Kernel(count_body, count_parallel, lambda index: (_L, POINTER[index], _n, _n, _n, _n), _INDEX)
_add_up = Kernel(add_up_body, None, lambda _: (_L, _L, _L, _n, _n, _n, _n, _n), _ONE)
_plan_serial = Kernel(plan_serial_body, None, lambda index: (_I, _I, _L, _L, POINTER[index], *[_n] * 6), _INDEX)
_deal = Kernel(deal_body, deal_parallel, lambda index: (_I, _I, _L, _L, _L, POINTER[index], *[_n] * 5), _INDEX)
_keep_heaviest = Kernel(keep_heaviest_body, keep_heaviest_parallel, lambda _: (_I, _F, _I, _I, _L, _L, _n, _n), _ONE)
_sort_ids = Kernel(sort_ids_body, None, lambda index: (_I, _I, POINTER[index], _n), _INDEX)
_count_true = Kernel(count_true_body, count_true_parallel, lambda _: (_I, _B, _n), _ONE)
_offsets = Kernel(offsets_body, None, lambda _: (_I,), _ONE)
_true_entries = Kernel(true_entries_body, true_entries_parallel, lambda _: (_I, _F, _I, _B, _L, _F, _n), _ONE)
_table = Kernel(table_body, table_parallel, lambda _: (_I, _I, _I, _I, _I, _I, _n), _ONE)
_count_fill = Kernel(count_fill_body, count_fill_parallel, lambda _: (_L, _I, _I, _n, _n, _n, _n), _ONE)
_add_up_fill = Kernel(add_up_fill_body, None, lambda _: (_L, _L, _L, _L, *[_n] * 5), _ONE)
_fill = Kernel(fill_body, fill_parallel, lambda _: (_I, _I, _I, _I, _L, _L, _I, _I, _I, *[_n] * 7), _ONE)
_narrow = Kernel(narrow_body, narrow_parallel, lambda index: (_I, POINTER[index], _n, _n), _INDEX)
_invert = Kernel(invert_body, invert_parallel, lambda _: (_I, _I, _n), _ONE)
_entry_rows = Kernel(entry_rows_body, entry_rows_parallel, lambda index: (_I, _I, POINTER[index], _I, _n, _n), _INDEX)
_live_rows = Kernel(live_rows_body, live_rows_parallel, lambda _: (_L, _I, _n), _ONE)
_segment_starts = Kernel(segment_starts_body, None, lambda index: (_L, _L, POINTER[index], _n, _n), _INDEX)
_segments = Kernel(segments_body, segments_parallel, lambda _: (_I, _I, _L, _n, _n), _ONE)

# ---------------------------------------------------------------------------- launchers


def _given(option: int | None) -> int:
    return -1 if option is None else option


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _slots(out: Tensor | None, num_slots: int) -> Tensor:
    """Where row_of_slot is written: the caller's contiguous int32 tensor, or a fresh one."""
    return memory.empty((num_slots,), torch.int32) if out is None else out


def _chunks(work: int, bins: int) -> int:
    """1 where the work is small, or smaller than the tables of several chunks."""
    return 1 if work < SERIAL_WORK else max(min(thread_count(), work // (2 * bins + 1)), 1)


def _rows_within_int32(total: int) -> None:
    if total > LARGEST:
        raise check.wrong_value("plan", "align", f"such that there are at most {LARGEST} rows", f"{total} rows")


def _count_up(
    ids: Tensor,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The plan of these ids in three steps; last the end of each expert's live rows."""
    num_slots, experts, dtype = ids.numel(), last_expert - first_expert, ids.dtype
    work = SLOT_WORK * num_slots
    chunks = _chunks(work, experts)
    counts = torch.empty((chunks + 1, experts), dtype=torch.int64, device=CPU)
    tokens = torch.empty(experts, dtype=torch.int64, device=CPU)
    rows = torch.empty(experts, dtype=torch.int64, device=CPU) if segment is not None or align > 1 else None
    row_of_slot = _slots(out, num_slots)
    counts_at, tokens_at, rows_at, ids_at = counts.data_ptr(), tokens.data_ptr(), _address(rows), ids.data_ptr()
    _count(dtype, chunks, work, counts_at, ids_at, first_expert, last_expert, num_slots, chunks)
    total = _add_up(
        None, experts, 0, counts_at, tokens_at, rows_at, chunks, _given(capacity), _given(segment), align,
        _given(num_rows),
    )  # fmt: skip
    if num_rows is None:
        _rows_within_int32(total)
        num_rows = total
    slot_of_row = memory.empty((num_rows,), torch.int32)
    _deal(
        dtype, chunks, work, row_of_slot.data_ptr(), slot_of_row.data_ptr(), counts_at, tokens_at, rows_at, ids_at,
        first_expert, last_expert, num_slots, num_rows, chunks,
    )  # fmt: skip
    return row_of_slot, slot_of_row, tokens, rows, counts[chunks]


def _assign_rows(
    ids: Tensor,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    num_slots, padded = ids.numel(), segment is not None or align > 1
    limit = num_slots if num_rows is None else num_rows
    if SLOT_WORK * (num_slots + limit) >= SERIAL_WORK or (padded and num_rows is None):
        return _count_up(ids, first_expert, last_expert, capacity, segment, align, num_rows, out)[:4]
    experts = last_expert - first_expert
    row_of_slot = empty(num_slots, dtype=INT32, device=CPU) if out is None else out
    slot_of_row = empty(limit, dtype=INT32, device=CPU)
    tokens = empty(experts, dtype=INT64, device=CPU)
    rows = empty(experts, dtype=INT64, device=CPU) if padded else None
    total = _plan_serial.run(ids.dtype, 0, (
        row_of_slot.data_ptr(), slot_of_row.data_ptr(), tokens.data_ptr(),
        0 if rows is None else rows.data_ptr(), ids.data_ptr(), first_expert, last_expert,
        -1 if capacity is None else capacity, -1 if segment is None else segment, align, limit,
        0, num_slots,
    ))  # fmt: skip
    if num_rows is None and total < num_slots:
        slot_of_row = slot_of_row[:total].clone()
    return row_of_slot, slot_of_row, tokens, rows


def _keep_heavy(ids: Tensor, weights: Tensor, first_expert: int, last_expert: int, capacity: int) -> Tensor:
    """The ids in int32, -1 for slots without an expert in the range and for those over the capacity."""
    _, slot_of_row, tokens, _, ends = _count_up(ids, first_expert, last_expert, None, None, 1, ids.numel())
    weights = weights.float()
    kept_ids = memory.empty((ids.numel(),), torch.int32).fill_(-1)
    _keep_heaviest(
        None, last_expert - first_expert, SLOT_WORK * ids.numel(), kept_ids.data_ptr(), weights.data_ptr(),
        weights.data_ptr(), slot_of_row.data_ptr(), ends.data_ptr(), tokens.data_ptr(), first_expert, capacity,
    )  # fmt: skip
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
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if weights is not None and capacity is not None:
        expert_ids = _keep_heavy(expert_ids, weights, first_expert, last_expert, capacity)
    return _assign_rows(expert_ids, first_expert, last_expert, capacity, segment, align, num_rows, out)


def plan_any_ids(expert_ids: Tensor, num_rows: int | None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    num_slots = expert_ids.numel()
    row_of_slot = _slots(out, num_slots)
    slot_of_row = memory.empty((num_slots,), torch.int32)
    limit = num_slots if num_rows is None else num_rows
    live = _sort_ids(
        expert_ids.dtype, num_slots, 0, slot_of_row.data_ptr(), row_of_slot.data_ptr(), expert_ids.data_ptr(), limit
    )
    size = live if num_rows is None else num_rows
    if size != num_slots:
        sorted_slots, slot_of_row = slot_of_row, memory.empty((size,), torch.int32)
        slot_of_row[num_slots:] = -1
        slot_of_row[:num_slots] = sorted_slots[:size]
    return row_of_slot, slot_of_row


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
    num_tokens, num_experts = routing_map.shape
    work = num_tokens * num_experts
    slot_offsets = torch.empty(num_tokens + 1, dtype=torch.int32, device=CPU)
    offsets_at, map_at = slot_offsets.data_ptr(), routing_map.data_ptr()
    _count_true(None, num_tokens, work, offsets_at, map_at, num_experts)
    num_slots = _offsets(None, num_tokens, 0, offsets_at)
    if num_slots > LARGEST:
        wanted = f"one with at most {LARGEST} true entries"
        raise check.wrong_value("plan_from_routing_map", "routing_map", wanted, num_slots)
    expert_of_slot = memory.empty((num_slots,), torch.int32)
    slot_weights = None
    if weights is not None:
        weights = weights.float()
        slot_weights = memory.empty((num_slots,), torch.float32)
    words = map_at if num_experts % 8 == 0 and map_at % 8 == 0 else 0
    _true_entries(
        None, num_tokens, work, expert_of_slot.data_ptr(), _address(slot_weights), offsets_at, map_at, words,
        _address(weights), num_experts,
    )  # fmt: skip
    ids = expert_of_slot
    if slot_weights is not None and capacity is not None:
        ids = _keep_heavy(ids, slot_weights, first_expert, last_expert, capacity)
    if fill:
        return _fill_experts(
            slot_offsets, expert_of_slot, ids, first_expert, last_expert, capacity, segment, num_rows, out
        )
    ragged = out if topk is None else None
    if ragged is not None and ragged.numel() != num_slots:
        wanted = f"of S = {num_slots} elements, one for each true entry"
        raise check.wrong_shape("plan_from_routing_map", "out", wanted, ragged)
    row_of_slot, slot_of_row, tokens, rows = _assign_rows(
        ids, first_expert, last_expert, capacity, segment, align, num_rows, ragged
    )
    if topk is None:
        return row_of_slot, slot_of_row, slot_offsets, expert_of_slot, tokens, rows
    table_row = _slots(out, num_tokens * topk)
    table_expert = memory.empty((num_tokens * topk,), torch.int32)
    _table(
        None, num_tokens, SLOT_WORK * num_tokens * topk, table_row.data_ptr(), table_expert.data_ptr(),
        slot_of_row.data_ptr(), row_of_slot.data_ptr(), expert_of_slot.data_ptr(), offsets_at, topk,
    )  # fmt: skip
    return table_row, slot_of_row, None, table_expert, tokens, rows


def _fill_experts(
    true_offsets: Tensor,
    true_experts: Tensor,
    true_ids: Tensor,
    first_expert: int,
    last_expert: int,
    capacity: int,
    segment: int,
    num_rows: int,
    out: Tensor | None,
) -> tuple[Tensor, ...]:
    num_tokens, experts = true_offsets.shape[0] - 1, last_expert - first_expert
    taken = min(capacity, num_tokens)
    num_slots = experts * taken
    work = num_tokens * experts
    chunks = _chunks(work, experts)
    trues = torch.empty((chunks + 1, experts), dtype=torch.int64, device=CPU)
    first_slots = torch.empty(chunks, dtype=torch.int64, device=CPU)
    tokens = torch.empty(experts, dtype=torch.int64, device=CPU)
    rows = torch.empty(experts, dtype=torch.int64, device=CPU)
    row_of_slot = _slots(out, num_slots)
    expert_of_slot = memory.empty((num_slots,), torch.int32)
    slot_of_row = memory.empty((num_rows,), torch.int32)
    slot_offsets = torch.empty(num_tokens + 1, dtype=torch.int32, device=CPU)
    _count_fill(
        None, chunks, work, trues.data_ptr(), true_offsets.data_ptr(), true_ids.data_ptr(), first_expert, last_expert,
        num_tokens, chunks,
    )  # fmt: skip
    _add_up_fill(
        None, chunks, 0, trues.data_ptr(), first_slots.data_ptr(), tokens.data_ptr(), rows.data_ptr(), experts, taken,
        segment, num_tokens, num_rows,
    )  # fmt: skip
    _fill(
        None, chunks, work, row_of_slot.data_ptr(), slot_of_row.data_ptr(), slot_offsets.data_ptr(),
        expert_of_slot.data_ptr(), trues.data_ptr(), first_slots.data_ptr(), true_offsets.data_ptr(),
        true_experts.data_ptr(), true_ids.data_ptr(), first_expert, last_expert, taken, segment, num_tokens, num_rows,
        chunks,
    )  # fmt: skip
    return row_of_slot, slot_of_row, slot_offsets, expert_of_slot, tokens, rows


def _narrowed(index: Tensor, first: int, count: int, out: Tensor | None = None) -> Tensor:
    out = _slots(out, index.numel())
    _narrow(index.dtype, index.numel(), SLOT_WORK * index.numel(), out.data_ptr(), index.data_ptr(), first, count)
    return out


def _inverse(row_of_slot: Tensor, num_rows: int) -> Tensor:
    num_slots = row_of_slot.shape[0]
    slot_of_row = memory.empty((num_rows,), torch.int32)
    work = SLOT_WORK * num_slots
    _invert(None, num_rows, work, slot_of_row.data_ptr(), row_of_slot.data_ptr(), num_slots)
    return slot_of_row


def plan_row_of_slot(
    row_of_slot: Tensor,
    expert_of_slot: Tensor | None,
    num_rows: int,
    first_row: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    row_of_slot = _narrowed(row_of_slot, first_row, num_rows, out)
    experts = None if expert_of_slot is None else _narrowed(expert_of_slot, 0, LARGEST + 1)
    return row_of_slot, _inverse(row_of_slot, num_rows), experts


def plan_token_ids(
    token_ids: Tensor,
    rows: Tensor | None,
    num_tokens: int,
    num_rows: int,
    num_experts: int | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    num_slots = token_ids.shape[0]
    # The counting sort again, with tokens for experts and entries for slots.
    _, entry_of_slot, _, _, ends = _count_up(token_ids, 0, num_tokens, None, None, 1, num_slots)
    slot_offsets = torch.empty(num_tokens + 1, dtype=torch.int32, device=CPU)
    slot_offsets[0] = 0
    slot_offsets[1:] = ends
    row_of_slot = _slots(out, num_slots)
    experts = None if num_experts is None else memory.empty((num_slots,), torch.int32)
    rows_per_expert = 1 if num_experts is None else max(num_rows // num_experts, 1)
    _entry_rows(
        torch.int32 if rows is None else rows.dtype, num_slots, SLOT_WORK * num_slots, row_of_slot.data_ptr(),
        entry_of_slot.data_ptr(), _address(rows), _address(experts), num_rows, rows_per_expert,
    )  # fmt: skip
    slot_of_row = _inverse(row_of_slot, num_rows)
    tokens = None
    if num_experts is not None:
        tokens = torch.empty(num_experts, dtype=torch.int64, device=CPU)
        each = num_rows // num_experts
        _live_rows(None, num_experts, num_rows, tokens.data_ptr(), slot_of_row.data_ptr(), each)
    return row_of_slot, slot_of_row, slot_offsets, experts, tokens


def plan_segments(lengths: Tensor, num_tokens: int, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    ranks, experts = lengths.shape
    starts = torch.empty((3, ranks, experts), dtype=torch.int64, device=CPU)
    tokens = torch.empty(experts, dtype=torch.int64, device=CPU)
    _segment_starts(
        lengths.dtype, experts, 0, starts.data_ptr(), tokens.data_ptr(), lengths.data_ptr(), ranks, num_tokens
    )
    row_of_slot = _slots(out, num_tokens)
    slot_of_row = memory.empty((num_tokens,), torch.int32)
    work = num_tokens
    _segments(
        None, num_tokens, work, row_of_slot.data_ptr(), slot_of_row.data_ptr(), starts.data_ptr(), ranks * experts,
        num_tokens,
    )  # fmt: skip
    return row_of_slot, slot_of_row, tokens
