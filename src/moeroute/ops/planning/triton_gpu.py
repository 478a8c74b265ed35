"""Plans by counting, in Triton: kernels, then launchers.

Counting sort: count the slots of each expert block by block, add up over the blocks and over the
experts, then every block deals its slots out. A slot's rank inside its block is found by comparing it
with the block's others: without atomics, hence always in slot order. A map is counted by its columns
in the same way. What has too many bins for a table of counts (more than 8,192 experts, tokens, any
64-bit id, weights) is sorted instead: blocks, then eight runs at a time are merged by binary search.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeroute import check
from moeroute.ops.tiles import INTERPRETED, launch, power_of_two, tile_rows, widen

LARGEST = 2**31 - 1

# Slots of a block. Each is compared with all of them and each block has a line in the table of counts: with 256
# both cost about as much for 256 experts, and 65,536 slots give every multiprocessor two blocks.
BLOCK = 256
TABLE_EXPERTS = 8192  # up to here the table has at most 32 entries a slot, 128 bytes, and a sort takes more launches
HISTOGRAMS = (64, 256, 1024, 8192)  # bins
SCAN_BLOCKS, SCAN_EXPERTS = 256, 8  # a tile of the table: whole sectors of 32 bytes, many programs
WAYS = 8  # runs merged at once: three rounds for 131,072 slots
MERGED = 128  # entries of a program: eight of their searches a thread
MAP_TOKENS, MAP_EXPERTS = 32, 64  # a tile of a routing map
SMALL_SLOTS = (32, 64)  # up to so many slots (tokens of a decoding step) one program compares all with all
SMALL = 1024  # with at most so many experts and rows
SIDE = 32  # experts or rows that it handles at once
PIECE = 1024  # elements of the kernels that go over slots, rows, experts or tokens one by one
WARPS, MAP_WARPS = 4, 8

# What a sort key is made of.
RAW = tl.constexpr(0)  # the id; negative ones behind all others
BINS = tl.constexpr(1)  # id - first, or `last - first` outside of [first, last)
WEIGHTED = tl.constexpr(2)  # the same, then the weight, heaviest first

# ---------------------------------------------------------------------------- kernels: counting sort
#
# `counts` is int32 [blocks, experts]: the slots that each block has of each expert; `before` of the same
# shape: those that the blocks before it have. `starts` int64 [experts]: the first row of each expert.


@triton.jit
def bin_of(ids, at, inside, first, last):
    """id - first in int32; last - first for an id outside of [first, last)."""
    i = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
    return tl.where((i >= first) & (i < last), i - first, last - first).to(tl.int32)


@triton.jit
def clear(rows, num_rows, PIECE: tl.constexpr):
    """-1 into all rows, this program's share of them."""
    share = tl.program_id(0).to(tl.int64) * PIECE
    step = tl.num_programs(0).to(tl.int64) * PIECE
    for r in range(share, num_rows.to(tl.int64), step):
        at = r + tl.arange(0, PIECE)
        tl.store(rows + at, tl.full((PIECE,), -1, tl.int32), mask=at < num_rows)


@triton.jit(do_not_specialize=["first", "last", "num_slots", "num_rows"])
def count(
    counts, slot_of_row, ids, first, last, num_slots, num_rows,
    BLOCK: tl.constexpr, HISTOGRAM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    experts = last - first
    e = bin_of(ids, at, at < num_slots, first, last)
    outside = e >= experts
    bins = tl.arange(0, HISTOGRAM)
    found = tl.histogram(tl.where(outside, 0, e), HISTOGRAM)
    found -= tl.where(bins == 0, tl.sum(outside.to(tl.int32), axis=0), 0)
    tl.store(counts + block * experts + bins, found, mask=bins < experts)
    clear(slot_of_row, num_rows, PIECE)


@triton.jit(do_not_specialize=["blocks", "width"])
def scan_blocks(before, totals, counts, blocks, width, SCAN_BLOCKS: tl.constexpr, SCAN_EXPERTS: tl.constexpr):
    e = tl.program_id(0) * SCAN_EXPERTS + tl.arange(0, SCAN_EXPERTS)
    running = tl.zeros((SCAN_EXPERTS,), tl.int32)
    for first in range(0, blocks, SCAN_BLOCKS):
        b = first + tl.arange(0, SCAN_BLOCKS)
        at = b[:, None].to(tl.int64) * width + e[None, :]
        inside = (b[:, None] < blocks) & (e[None, :] < width)
        here = tl.load(counts + at, mask=inside, other=0)
        tl.store(before + at, running[None, :] + tl.cumsum(here, axis=0) - here, mask=inside)
        running += tl.sum(here, axis=0)
    tl.store(totals + e, running, mask=e < width)


@triton.jit
def lengths_of(total, capacity, segment, align):
    """Live rows and rows of experts with so many slots; -1 for an option: it is not given."""
    kept = tl.where((capacity >= 0) & (total > capacity), capacity.to(total.dtype), total)
    padded = (kept + align - 1) // align * align
    return kept, tl.where(segment >= 0, segment.to(total.dtype), padded)


@triton.jit
def cut(length, start, num_rows):
    """The part of a segment that lies in front of row `num_rows` (-1: it is not given)."""
    room = tl.maximum(num_rows - start, 0)
    return tl.where(num_rows >= 0, tl.minimum(length, room), length)


@triton.jit(do_not_specialize=["offset", "experts", "slot_bins", "taken", "capacity", "segment", "align", "num_rows"])
def scan_experts(
    starts, tokens, rows, sizes, totals, offset, experts, slot_bins, taken, capacity, segment, align, num_rows,
    DIFFERENCES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One program. The experts' totals begin at `offset`; `taken` >= 0: each has as many, whatever the total.

    sizes: the rows of all experts, and the sum of the first `slot_bins` totals.
    """
    start = tl.program_id(0).to(tl.int64)  # 0, of the type that the loop carries on
    for first in range(0, experts, PIECE):
        e = first + tl.arange(0, PIECE)
        inside = e < experts
        total = tl.load(totals + offset + e, mask=inside, other=0).to(tl.int64)
        if DIFFERENCES:
            total = tl.load(totals + offset + e + 1, mask=inside, other=0).to(tl.int64) - total
        total = tl.where(taken >= 0, taken.to(tl.int64), total)
        kept, length = lengths_of(total, capacity, segment, align)
        length = tl.where(inside, length, 0)
        begin = start + tl.cumsum(length, axis=0) - length
        tl.store(starts + e, begin, mask=inside)
        tl.store(tokens + e, cut(kept, begin, num_rows), mask=inside)
        tl.store(rows + e, cut(length, begin, num_rows), mask=inside)
        start += tl.sum(length, axis=0)
    slots = tl.program_id(0).to(tl.int64)
    for first in range(0, slot_bins, PIECE):
        e = first + tl.arange(0, PIECE)
        slots += tl.sum(tl.load(totals + e, mask=e < slot_bins, other=0).to(tl.int64), axis=0)
    tl.store(sizes, start)
    tl.store(sizes + 1, slots)


@triton.jit(do_not_specialize=["first", "last", "num_slots"])
def deal(
    row_of_slot, slot_of_row, ids, before, starts, tokens, first, last, num_slots,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    at = block * BLOCK + place
    experts = last - first
    e = bin_of(ids, at, at < num_slots, first, last)
    earlier = tl.zeros((BLOCK, CHUNK), tl.int32)
    for chunk in range(0, BLOCK, CHUNK):
        other_place = chunk + tl.arange(0, CHUNK)
        other_at = block * BLOCK + other_place
        other = bin_of(ids, other_at, other_at < num_slots, first, last)
        earlier += ((other[None, :] == e[:, None]) & (other_place[None, :] < place[:, None])).to(tl.int32)
    live = e < experts
    rank = tl.sum(earlier, axis=1) + tl.load(before + block * experts + e, mask=live, other=0)
    live = live & (rank < tl.load(tokens + e, mask=live, other=0))
    row = tl.load(starts + e, mask=live, other=0).to(tl.int32) + rank
    tl.store(row_of_slot + at, tl.where(live, row, -1), mask=at < num_slots)
    tl.store(slot_of_row + row, at.to(tl.int32), mask=live)


# ---------------------------------------------------------------------------- kernels: few slots


@triton.jit
def weight_order(weights, at, inside):
    """An integer in [0, 2^32) in the order of the weights: NaN above all, -0 as +0."""
    w = widen(tl.load(weights + at, mask=inside, other=0))
    bits = w.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    bits = tl.where(bits == 0x80000000, 0, bits)
    order = tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    return tl.where(w == w, order, 0xFFFFFFFF)


@triton.jit(do_not_specialize=["first", "last", "capacity", "segment", "align", "num_rows", "num_slots"])
def plan_small(
    row_of_slot, slot_of_row, tokens, rows, ids, weights, first, last, capacity, segment, align, num_rows, num_slots,
    SLOTS: tl.constexpr, SIDE: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """All steps in one program: every slot (lines) against every slot (columns).

    `segment` and `align` are at most `num_rows` here, so that int32 holds every sum.
    """
    i = tl.arange(0, SLOTS)
    experts = last - first
    e = bin_of(ids, i, i < num_slots, first, last)
    line, column = e[:, None], e[None, :]
    earlier = i[None, :] < i[:, None]  # the column's slot than the line's
    later = i[None, :] > i[:, None]
    if WEIGHTS:
        w = (weight_order(weights, i, i < num_slots) - 0x80000000).to(tl.int32)
        tie = w[None, :] == w[:, None]
        heavier = (line == column) & ((w[None, :] > w[:, None]) | (tie & earlier))
        lighter = (line == column) & ((w[None, :] < w[:, None]) | (tie & later))
        stays = tl.sum(heavier.to(tl.int32), axis=1) < capacity
        line = tl.where(stays, e, experts)[:, None]
        column = tl.where(tl.sum(lighter.to(tl.int32), axis=0) < capacity, e, experts)[None, :]
        e = tl.where(stays, e, experts)
    same = line == column
    rank = tl.sum((same & earlier).to(tl.int32), axis=1)
    # For the columns, which costs less than a transposition: the expert's slots, and above bit 16 the earlier ones.
    counts = tl.sum(tl.where(same, tl.where(later, 0x10001, 1), 0), axis=0)
    _, length = lengths_of(counts & 0xFFFF, capacity, segment, align)
    length = tl.where((counts < 0x10000)[None, :] & (column < experts), length[None, :], 0)  # at its first slot
    start = tl.sum(tl.where(column < line, length, 0), axis=1)
    row = tl.where(segment >= 0, e * segment, start) + rank
    live = (e < experts) & ((capacity < 0) | (rank < capacity)) & (row < num_rows)
    row = tl.where(live, row, -1)
    tl.store(row_of_slot + i, row, mask=i < num_slots)
    for side in range(0, experts, SIDE):
        x = side + tl.arange(0, SIDE)
        # The expert's slots, and above bit 10 the rows of the experts before it.
        found = tl.sum(tl.where(column < x[:, None], length * 1024, (column == x[:, None]).to(tl.int32)), axis=1)
        kept, padded = lengths_of(found & 1023, capacity, segment, align)
        room = tl.maximum(num_rows - tl.where(segment >= 0, x * segment, found // 1024), 0)
        tl.store(tokens + x, tl.minimum(kept, room).to(tl.int64), mask=x < experts)
        tl.store(rows + x, tl.minimum(padded, room).to(tl.int64), mask=x < experts)
    for side in range(0, num_rows, SIDE):
        r = side + tl.arange(0, SIDE)
        slot = tl.max(tl.where(row[:, None] == r[None, :], i[:, None], -1), axis=0)
        tl.store(slot_of_row + r, slot, mask=r < num_rows)


# ---------------------------------------------------------------------------- kernels: sort


@triton.jit
def sort_key(ids, weights, at, inside, first, last, columns, KIND: tl.constexpr, MAP: tl.constexpr):
    i = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
    if MAP:
        i = tl.where(i != 0, at % columns, -1)
    if KIND == RAW:
        return tl.where(i < 0, 0, i - 0x7FFFFFFFFFFFFFFF - 1)
    else:
        key = tl.where((i >= first) & (i < last), i - first, (last - first).to(tl.int64))
        if KIND == WEIGHTED:
            key = key * 0x100000000 + (0xFFFFFFFF - weight_order(weights, at, inside))
        return key


@triton.jit(do_not_specialize=["first", "last", "columns", "num_slots"])
def sort_block(
    keys, slots, ids, weights, first, last, columns, num_slots,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, KIND: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Stable, by counting for each slot the others of the block that come before it."""
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    at = block * BLOCK + place
    key = sort_key(ids, weights, at, at < num_slots, first, last, columns, KIND, MAP)
    earlier = tl.zeros((BLOCK, CHUNK), tl.int32)
    for chunk in range(0, BLOCK, CHUNK):
        other_place = chunk + tl.arange(0, CHUNK)
        other_at = block * BLOCK + other_place
        other = sort_key(ids, weights, other_at, other_at < num_slots, first, last, columns, KIND, MAP)
        tie = (other[None, :] == key[:, None]) & (other_place[None, :] < place[:, None])
        comes_before = (other[None, :] < key[:, None]) | tie
        earlier += (comes_before & (other_at < num_slots)[None, :]).to(tl.int32)
    to = block * BLOCK + tl.sum(earlier, axis=1)
    tl.store(keys + to, key, mask=at < num_slots)
    tl.store(slots + to, at.to(tl.int32), mask=at < num_slots)


@triton.jit
def first_at_least(keys, key, low, high, steps):
    """The first place in [low, high) with such a key, `high` if there is none; 2^steps > high - low."""
    for _ in range(0, steps):
        middle = (low + high) // 2
        open = low < high
        right = open & (tl.load(keys + middle, mask=open, other=0) < key)
        high = tl.where(open & (right == 0), middle, high)
        low = tl.where(right, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["run", "steps", "num_slots"])
def merge(merged_keys, merged_slots, keys, slots, run, steps, num_slots, PIECE: tl.constexpr, WAYS: tl.constexpr):
    """Groups of WAYS sorted runs to one run each. An entry's place is the sum of its places in all of them."""
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    key = tl.load(keys + at, mask=at < num_slots, other=0)
    run = run.to(tl.int64)
    group = at // (run * WAYS) * (run * WAYS)
    begin = group[:, None] + tl.arange(0, WAYS)[None, :] * run
    end = tl.minimum(begin + run, num_slots)
    mine = (begin <= at[:, None]) & (at[:, None] < begin + run)
    # Of equal keys those of earlier runs come first.
    wanted = key[:, None] + (begin < at[:, None]).to(tl.int64)
    begin = tl.minimum(begin, end)
    low = tl.where(mine, at[:, None], begin)
    high = tl.where(mine, at[:, None], end)
    found = first_at_least(keys, wanted, low, tl.where(at[:, None] < num_slots, high, low), steps) - begin
    to = group + tl.sum(found, axis=1)
    slot = tl.load(slots + at, mask=at < num_slots, other=0)
    tl.store(merged_keys + to, key, mask=at < num_slots)
    tl.store(merged_slots + to, slot, mask=at < num_slots)


@triton.jit(do_not_specialize=["shift", "count", "steps", "num_slots"])
def bounds(first, keys, shift, count, steps, num_slots, PIECE: tl.constexpr):
    """Where each of the bins 0..count begins in the sorted keys."""
    x = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    low = tl.minimum(x, 0)  # zeros; triton-ascend 3.2.0 crashes over a constant that a loop carries on
    found = first_at_least(keys, x << shift.to(tl.int64), low, low + tl.where(x <= count, num_slots, 0), steps)
    tl.store(first + x, found.to(tl.int32), mask=x <= count)


@triton.jit(do_not_specialize=["experts", "num_slots"])
def deal_sorted(
    row_of_slot, slot_of_row, keys, slots, first, starts, tokens, experts, num_slots, PIECE: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = at < num_slots
    e = tl.load(keys + at, mask=inside, other=0)
    slot = tl.load(slots + at, mask=inside, other=0)
    live = inside & (e < experts)
    rank = at - tl.load(first + e, mask=live, other=0)
    live = live & (rank < tl.load(tokens + e, mask=live, other=0))
    row = tl.load(starts + e, mask=live, other=0) + rank
    tl.store(row_of_slot + slot, tl.where(live, row, -1).to(tl.int32), mask=inside)
    tl.store(slot_of_row + row, slot, mask=live)


@triton.jit(do_not_specialize=["first_expert", "experts", "capacity", "num_slots"])
def keep_heaviest(
    kept, keys, slots, first, first_expert, experts, capacity, num_slots, MAP: tl.constexpr, PIECE: tl.constexpr
):
    """The ids of the slots that stay, -1 for the others; of a map 1 and 0."""
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = at < num_slots
    e = tl.load(keys + at, mask=inside, other=0) >> 32
    slot = tl.load(slots + at, mask=inside, other=0)
    live = inside & (e < experts)
    live = live & (at - tl.load(first + e, mask=live, other=0) < capacity)
    if MAP:
        tl.store(kept + slot, live.to(tl.uint8), mask=inside)
    else:
        tl.store(kept + slot, tl.where(live, e + first_expert, -1).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def deal_any(row_of_slot, slot_of_row, keys, slots, num_slots, num_rows, PIECE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = at < num_slots
    live = tl.load(keys + at, mask=inside, other=0) < 0
    slot = tl.load(slots + at, mask=inside, other=0)
    tl.store(row_of_slot + slot, tl.where(live & (at < num_rows), at, -1).to(tl.int32), mask=inside)
    tl.store(slot_of_row + at, tl.where(live, slot, -1), mask=at < num_rows)


# ---------------------------------------------------------------------------- kernels: routing map
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
    counts, slot_of_row, routing_map, stays_map, num_tokens, num_experts, num_rows,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, STAYS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["first", "last", "num_tokens", "num_experts", "taken", "topk"])
def deal_map(
    row_of_slot, expert_of_slot, slot_of_row, slot_offsets, routing_map, stays_map, before, totals, starts, tokens,
    first, last, num_tokens, num_experts, taken, topk,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, STAYS: tl.constexpr, FILL: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
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
                selected = (place < taken) & inside[None, :] & (t[:, None] < num_tokens)
                slots += tl.sum(selected.to(tl.int32), axis=1)
                true_before = tl.load(before + line + e, mask=inside, other=0).to(tl.int64)
                true_taken = tl.minimum(tl.load(totals + e, mask=inside, other=0), taken)
                taken_before = tl.minimum(true_before, true_taken)
                taken_before += tl.minimum(block * TOKENS - true_before, taken - true_taken)
                slots_before += tl.where(inside, taken_before, 0)
            else:
                slots += tl.sum(true, axis=1)
                slots_before += tl.load(before + line + e, mask=e < num_experts, other=0)
        offset = tl.sum(slots_before, axis=0).to(tl.int32) + tl.cumsum(slots, axis=0)
        if block == 0:
            tl.store(slot_offsets, 0)
        tl.store(slot_offsets + 1 + t, offset, mask=t < num_tokens)
        offset -= slots
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
            true = ((place < taken) & inside[None, :] & (t[:, None] < num_tokens)).to(tl.int32)
            stays = true
        room = tl.load(tokens + e - first, mask=inside, other=0).to(tl.int32)
        live = (stays != 0) & (place < room[None, :])
        row = tl.load(starts + e - first, mask=inside, other=0).to(tl.int32)[None, :] + place
        ordinal = number[:, None] + tl.cumsum(true, axis=1) - true
        slot = offset[:, None] + ordinal
        owned = true != 0
        if TABLE:
            owned = owned & (ordinal < topk)
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


# ---------------------------------------------------------------------------- kernels: given indices


@triton.jit
def inside_or_none(index, first, count):
    """index - first in int64, -1 where that is not in [0, count)."""
    first = first.to(tl.int64)
    return tl.where((index >= first) & (index < first + count), index - first, -1)


@triton.jit(do_not_specialize=["first_row", "num_slots", "num_rows"])
def narrow_rows(
    row_of_slot, slot_of_row, expert_of_slot, rows, experts, first_row, num_slots, num_rows,
    EXPERTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = at < num_slots
    row = inside_or_none(tl.load(rows + at, mask=inside, other=-1).to(tl.int64), first_row, num_rows)
    tl.store(row_of_slot + at, row.to(tl.int32), mask=inside)
    tl.atomic_max(slot_of_row + row, at.to(tl.int32), mask=inside & (row >= 0))
    if EXPERTS:
        e = tl.load(experts + at, mask=inside, other=-1).to(tl.int64)
        tl.store(expert_of_slot + at, tl.where((e >= 0) & (e <= 0x7FFFFFFF), e, -1).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_slots", "num_tokens", "num_rows", "rows_per_expert"])
def entry_rows(
    row_of_slot, slot_of_row, expert_of_slot, keys, slots, rows, num_slots, num_tokens, num_rows, rows_per_expert,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The row of each slot's entry, and its expert; without `rows` entry i has row i."""
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = at < num_slots
    live = inside & (tl.load(keys + at, mask=inside, other=0) < num_tokens)
    row = tl.load(slots + at, mask=inside, other=0).to(tl.int64)
    if ROWS:
        row = tl.load(rows + row, mask=live, other=-1).to(tl.int64)
    live = live & (row >= 0) & (row < num_rows)
    row = tl.where(live, row, -1)
    tl.store(row_of_slot + at, row.to(tl.int32), mask=inside)
    tl.atomic_max(slot_of_row + row, at.to(tl.int32), mask=live)
    if EXPERTS:
        tl.store(expert_of_slot + at, tl.where(live, row // rows_per_expert, -1).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["ranks", "experts", "num_tokens"])
def segment_starts(
    token_starts, row_starts, tokens, lengths, ranks, experts, num_tokens, PIECE: tl.constexpr
):  # fmt: skip
    """One program. First token of each chunk, rank by rank; first row of each chunk, expert by expert."""
    chunks = ranks * experts
    limit = num_tokens.to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    row = token
    for first in range(0, chunks, PIECE):
        c = first + tl.arange(0, PIECE)
        inside = c < chunks
        by_rank = tl.load(lengths + c, mask=inside, other=0).to(tl.int64)
        by_expert = tl.load(
            lengths + (c % tl.maximum(ranks, 1)) * experts + c // tl.maximum(ranks, 1), mask=inside, other=0
        ).to(tl.int64)
        by_rank = tl.minimum(tl.maximum(by_rank, 0), limit)
        by_expert = tl.minimum(tl.maximum(by_expert, 0), limit)
        tl.store(token_starts + c, token + tl.cumsum(by_rank, axis=0) - by_rank, mask=inside)
        tl.store(row_starts + c, row + tl.cumsum(by_expert, axis=0) - by_expert, mask=inside)
        token += tl.sum(by_rank, axis=0)
        row += tl.sum(by_expert, axis=0)
    tl.store(token_starts + chunks, token)
    tl.store(row_starts + chunks, row)


@triton.jit(do_not_specialize=["ranks", "experts", "steps", "num_tokens"])
def segments(
    row_of_slot, slot_of_row, tokens, token_starts, row_starts, ranks, experts, steps, num_tokens, PIECE: tl.constexpr
):
    """Row of each token and token of each row, by the same search; counts of the experts."""
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    chunks = ranks * experts
    inside = at < num_tokens
    low = tl.minimum(at, 0)  # as in `bounds`
    high = low + tl.where(inside, chunks + 1, 0)
    # The last chunk that begins at or before the token; the end of all chunks counts as one.
    c = first_at_least(token_starts, at + 1, low, high, steps) - 1
    live = inside & (c >= 0) & (c < chunks)
    other = (c % tl.maximum(experts, 1)) * ranks + c // tl.maximum(experts, 1)
    row = at - tl.load(token_starts + c, mask=live, other=0) + tl.load(row_starts + other, mask=live, other=0)
    tl.store(row_of_slot + at, tl.where(live & (row < num_tokens), row, -1).to(tl.int32), mask=inside)
    c = first_at_least(row_starts, at + 1, low, high, steps) - 1
    live = inside & (c >= 0) & (c < chunks)
    other = (c % tl.maximum(ranks, 1)) * experts + c // tl.maximum(ranks, 1)
    token = at - tl.load(row_starts + c, mask=live, other=0) + tl.load(token_starts + other, mask=live, other=0)
    tl.store(slot_of_row + at, tl.where(live & (token < num_tokens), token, -1).to(tl.int32), mask=inside)
    mine = at < experts
    begin = tl.load(row_starts + at * ranks, mask=mine, other=0)
    end = tl.load(row_starts + (at + 1) * ranks, mask=mine, other=0)
    tl.store(tokens + at, cut(end - begin, begin, num_tokens), mask=mine)


# ---------------------------------------------------------------------------- launchers


def _given(option: int | None) -> int:
    return -1 if option is None else option


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _nothing(like: Tensor, size: int) -> Tensor:
    return torch.full((size,), -1, dtype=torch.int32, device=like.device)


def _programs(items: int, tile: int) -> int:
    return -(-items // tile)


def _rows_within_int32(total: int) -> None:
    if total > LARGEST:
        raise check.wrong_value("plan", "align", f"such that there are at most {LARGEST} rows", f"{total} rows")


def _block(num_slots: int) -> int:
    """Slots of a block; in the interpreter at most 1024, since a block costs their square."""
    return min(tile_rows(num_slots, BLOCK), 1024)


def _chunk(block: int, on_device: int) -> int:
    """How many others a slot is compared with at once: few registers; in the interpreter, few steps."""
    return block if INTERPRETED else on_device


def _scan_blocks(counts: Tensor) -> tuple[Tensor, Tensor]:
    blocks, width = counts.shape
    before, totals = torch.empty_like(counts), _empty(counts, width)
    lines = min(power_of_two(blocks), SCAN_BLOCKS) if INTERPRETED else SCAN_BLOCKS
    columns = tile_rows(width, SCAN_EXPERTS)
    launch(
        scan_blocks, _programs(width, columns), before, totals, counts, blocks, width,
        warps=WARPS, SCAN_BLOCKS=lines, SCAN_EXPERTS=columns,
    )  # fmt: skip
    return before, totals


def _scan_experts(
    totals: Tensor,
    offset: int,
    experts: int,
    slot_bins: int,
    taken: int | None,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    differences: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First row, live rows and rows of each expert; the numbers of rows and of slots."""
    starts = _empty(totals, experts, dtype=torch.int64)
    tokens, rows = torch.empty_like(starts), torch.empty_like(starts)
    sizes = _empty(totals, 2, dtype=torch.int64)
    launch(
        scan_experts, 1, starts, tokens, rows, sizes, totals, offset, experts, slot_bins, _given(taken),
        _given(capacity), _given(segment), align, _given(num_rows),
        warps=WARPS, DIFFERENCES=differences, PIECE=PIECE,
    )  # fmt: skip
    return starts, tokens, rows, sizes


def _sort(
    ids: Tensor, weights: Tensor | None, first: int, last: int, kind: tl.constexpr, columns: int = 0
) -> tuple[Tensor, Tensor]:
    """The keys in ascending order, int64, and the slots that they come from; `columns` for a map."""
    num_slots = ids.numel()
    block = _block(num_slots)
    keys, slots = _empty(ids, num_slots, dtype=torch.int64), _empty(ids, num_slots)
    launch(
        sort_block, _programs(num_slots, block), keys, slots, ids, ids if weights is None else weights, first, last,
        columns, num_slots,
        warps=WARPS, spare=True, BLOCK=block, CHUNK=_chunk(block, 8), KIND=kind.value, MAP=columns > 0,
    )  # fmt: skip
    run, piece = block, tile_rows(num_slots, MERGED)
    while run < num_slots:
        merged_keys, merged_slots = torch.empty_like(keys), torch.empty_like(slots)
        launch(
            merge, _programs(num_slots, piece), merged_keys, merged_slots, keys, slots, run, run.bit_length(),
            num_slots, warps=WARPS, PIECE=piece, WAYS=WAYS,
        )  # fmt: skip
        keys, slots, run = merged_keys, merged_slots, run * WAYS
    return keys, slots


def _bounds(keys: Tensor, shift: int, count: int) -> Tensor:
    """Where each of the bins 0..count begins, int32 [count + 1]."""
    first, num_slots = _empty(keys, count + 1), keys.shape[0]
    piece = tile_rows(count + 1, PIECE)
    launch(
        bounds, _programs(count + 1, piece), first, keys, shift, count, num_slots.bit_length(), num_slots,
        warps=WARPS, PIECE=piece,
    )  # fmt: skip
    return first


def _heaviest(
    ids: Tensor, weights: Tensor, first_expert: int, last_expert: int, capacity: int, columns: int = 0
) -> Tensor:
    """The ids of the slots that stay, -1 for the others; with `columns` the map of the entries that stay."""
    num_slots = ids.numel()
    keys, slots = _sort(ids, weights, first_expert, last_expert, WEIGHTED, columns)
    experts = last_expert - first_expert
    first = _bounds(keys, 32, experts)
    kept = torch.empty_like(ids, dtype=torch.uint8 if columns else torch.int32)
    piece = tile_rows(num_slots, PIECE)
    launch(
        keep_heaviest, _programs(num_slots, piece), kept, keys, slots, first, first_expert, experts, capacity,
        num_slots, warps=WARPS, MAP=columns > 0, PIECE=piece,
    )  # fmt: skip
    return kept


def _plan_few(
    ids: Tensor,
    weights: Tensor | None,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    limit: int,
    row_of_slot: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_slots, experts = ids.numel(), last_expert - first_expert
    slot_of_row = _empty(ids, limit)
    tokens, rows = _empty(ids, experts, dtype=torch.int64), _empty(ids, experts, dtype=torch.int64)
    slots = next(size for size in SMALL_SLOTS if num_slots <= size)
    launch(
        plan_small, 1, row_of_slot, slot_of_row, tokens, rows, ids, ids if weights is None else weights, first_expert,
        last_expert, _given(capacity), min(_given(segment), limit), min(align, max(limit, 1)), limit, num_slots,
        warps=slots // 4, SLOTS=slots, SIDE=SMALL if INTERPRETED else SIDE, WEIGHTS=weights is not None,
    )  # fmt: skip
    if num_rows is None:
        size = int(rows.sum())
        if size < limit:
            slot_of_row = slot_of_row[:size].clone()
    return row_of_slot, slot_of_row, tokens, rows


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
    ids, num_slots, experts = expert_ids, expert_ids.numel(), last_expert - first_expert
    if capacity is None:
        weights = None
    row_of_slot = _empty(ids, num_slots) if out is None else out
    padded = segment is not None or align > 1
    limit = num_rows
    if limit is None:  # the most rows that there can be
        limit = experts * segment if segment is not None else num_slots * align
    if num_slots <= SMALL_SLOTS[-1] and experts <= SMALL and limit <= SMALL:
        row_of_slot, slot_of_row, tokens, rows = _plan_few(
            ids, weights, first_expert, last_expert, capacity, segment, align, num_rows, limit, row_of_slot
        )
        return row_of_slot, slot_of_row, tokens, rows if padded else None
    if weights is not None:
        ids = _heaviest(ids, weights, first_expert, last_expert, capacity)
    slot_of_row = _empty(ids, num_rows or 0)
    if experts <= TABLE_EXPERTS:
        block = _block(num_slots)
        blocks = max(_programs(num_slots, block), 1)
        counts = _empty(ids, blocks, experts)
        launch(
            count, blocks, counts, slot_of_row, ids, first_expert, last_expert, num_slots, num_rows or 0,
            warps=WARPS if experts <= HISTOGRAMS[-2] else 8, BLOCK=block,
            HISTOGRAM=next(size for size in HISTOGRAMS if experts <= size), PIECE=PIECE,
        )  # fmt: skip
        before, totals = _scan_blocks(counts)
    else:
        keys, slots = _sort(ids, None, first_expert, last_expert, BINS)
        totals = _bounds(keys, 0, experts)
        slot_of_row.fill_(-1)
    starts, tokens, rows, sizes = _scan_experts(
        totals, 0, experts, 0, None, capacity, segment, align, num_rows, experts > TABLE_EXPERTS
    )
    if num_rows is None:
        num_rows = int(sizes[0])
        _rows_within_int32(num_rows)
        slot_of_row = _nothing(ids, num_rows) if padded else _empty(ids, num_rows)
    if experts <= TABLE_EXPERTS:
        launch(
            deal, blocks, row_of_slot, slot_of_row, ids, before, starts, tokens, first_expert, last_expert, num_slots,
            warps=WARPS, BLOCK=block, CHUNK=_chunk(block, 16),
        )  # fmt: skip
    else:
        piece = tile_rows(num_slots, PIECE)
        launch(
            deal_sorted, _programs(num_slots, piece), row_of_slot, slot_of_row, keys, slots, totals, starts, tokens,
            experts, num_slots, warps=WARPS, PIECE=piece,
        )  # fmt: skip
    return row_of_slot, slot_of_row, tokens, rows if padded else None


def plan_any_ids(expert_ids: Tensor, num_rows: int | None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    num_slots = expert_ids.numel()
    keys, slots = _sort(expert_ids, None, 0, 0, RAW)
    if num_rows is None:
        num_rows = int(_bounds(keys, 0, 0))  # keys of live slots are negative
    row_of_slot = _empty(expert_ids, num_slots) if out is None else out
    slot_of_row = _empty(expert_ids, num_rows)
    piece = tile_rows(max(num_slots, num_rows), PIECE)
    launch(
        deal_any, _programs(max(num_slots, num_rows), piece), row_of_slot, slot_of_row, keys, slots, num_slots,
        num_rows, warps=WARPS, PIECE=piece,
    )  # fmt: skip
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
    experts, padded = last_expert - first_expert, segment is not None or align > 1
    chosen = stays = routing_map.view(torch.uint8)
    if weights is not None and capacity is not None and num_experts > 0:
        stays = _heaviest(chosen, weights, 0, num_experts, capacity, num_experts)
        if fill:  # one that was dropped counts as false; its expert takes no false ones
            chosen = stays
    both = stays is not chosen
    tokens_at_once = tile_rows(num_tokens, MAP_TOKENS)
    tile = {
        "TOKENS": tokens_at_once,
        "EXPERTS": min(power_of_two(max(num_experts, MAP_EXPERTS)), 1024) if INTERPRETED else MAP_EXPERTS,
        "STAYS": both,
    }
    blocks = max(_programs(num_tokens, tokens_at_once), 1)
    width = 2 * num_experts if both else num_experts
    counts = _empty(chosen, blocks, width)
    slot_of_row = _empty(chosen, num_rows or 0)
    launch(
        count_map, blocks, counts, slot_of_row, chosen, stays, num_tokens, num_experts, num_rows or 0,
        warps=WARPS, PIECE=PIECE, **tile,
    )  # fmt: skip
    before, totals = _scan_blocks(counts)
    taken = min(capacity or 0, num_tokens) if fill else None
    starts, tokens, rows, sizes = _scan_experts(
        totals, width - num_experts + first_expert, experts, num_experts, taken, capacity, segment, align, num_rows
    )
    if topk is not None:
        num_slots = num_tokens * topk
    elif taken is not None:
        num_slots = experts * taken
    needed_rows = num_rows
    if num_rows is None or (topk is None and not fill):
        needed_rows, true_entries_found = sizes.tolist()
        if topk is None and not fill:
            num_slots = true_entries_found
    if num_slots > LARGEST:
        wanted = f"one with at most {LARGEST} true entries"
        raise check.wrong_value("plan_from_routing_map", "routing_map", wanted, num_slots)
    if out is not None and out.numel() != num_slots:
        wanted = f"of S = {num_slots} elements, one for each true entry"
        raise check.wrong_shape("plan_from_routing_map", "out", wanted, out)
    if num_rows is None:
        num_rows = needed_rows
        _rows_within_int32(num_rows)
        slot_of_row = _nothing(chosen, num_rows) if padded or topk is not None else _empty(chosen, num_rows)
    row_of_slot = _empty(chosen, num_slots) if out is None else out
    expert_of_slot = _empty(chosen, num_slots)
    slot_offsets = _empty(chosen, num_tokens + 1) if topk is None else None
    launch(
        deal_map, blocks, row_of_slot, expert_of_slot, slot_of_row, row_of_slot if topk is not None else slot_offsets,
        chosen, stays, before, totals, starts, tokens, first_expert, last_expert, num_tokens, num_experts,
        taken or 0, topk or 0, warps=MAP_WARPS, spare=True, FILL=fill, TABLE=topk is not None, **tile,
    )  # fmt: skip
    return row_of_slot, slot_of_row, slot_offsets, expert_of_slot, tokens, rows if padded else None


def plan_row_of_slot(
    row_of_slot: Tensor,
    expert_of_slot: Tensor | None,
    num_rows: int,
    first_row: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    num_slots = row_of_slot.numel()
    narrowed = _empty(row_of_slot, num_slots) if out is None else out
    experts = None if expert_of_slot is None else _empty(row_of_slot, num_slots)
    slot_of_row = _nothing(row_of_slot, num_rows)
    piece = tile_rows(num_slots, PIECE)
    launch(
        narrow_rows, _programs(num_slots, piece), narrowed, slot_of_row, narrowed if experts is None else experts,
        row_of_slot, row_of_slot if expert_of_slot is None else expert_of_slot, first_row, num_slots, num_rows,
        warps=WARPS, spare=True, EXPERTS=experts is not None, PIECE=piece,
    )  # fmt: skip
    return narrowed, slot_of_row, experts


def plan_token_ids(
    token_ids: Tensor,
    rows: Tensor | None,
    num_tokens: int,
    num_rows: int,
    num_experts: int | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    num_slots = token_ids.shape[0]
    keys, slots = _sort(token_ids, None, 0, num_tokens, BINS)
    slot_offsets = _bounds(keys, 0, num_tokens)
    row_of_slot = _empty(token_ids, num_slots) if out is None else out
    slot_of_row = _nothing(token_ids, num_rows)
    experts = None if num_experts is None else _empty(token_ids, num_slots)
    each = 1 if num_experts is None else num_rows // num_experts
    piece = tile_rows(num_slots, PIECE)
    launch(
        entry_rows, _programs(num_slots, piece), row_of_slot, slot_of_row, row_of_slot if experts is None else experts,
        keys, slots, slots if rows is None else rows, num_slots, num_tokens, num_rows, max(each, 1),
        warps=WARPS, ROWS=rows is not None, EXPERTS=experts is not None, PIECE=piece,
    )  # fmt: skip
    tokens = None
    if num_experts is not None:
        tokens = (slot_of_row.view(num_experts, each) >= 0).sum(dim=1)
    return row_of_slot, slot_of_row, slot_offsets, experts, tokens


def plan_segments(lengths: Tensor, num_tokens: int, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    ranks, experts = lengths.shape
    starts = _empty(lengths, 2, ranks * experts + 1, dtype=torch.int64)
    tokens = _empty(lengths, experts, dtype=torch.int64)
    launch(
        segment_starts, 1, starts[0], starts[1], tokens, lengths, ranks, experts, num_tokens, warps=WARPS, PIECE=PIECE
    )
    row_of_slot = _empty(lengths, num_tokens) if out is None else out
    slot_of_row = _empty(lengths, num_tokens)
    items = max(num_tokens, experts)
    piece = tile_rows(items, PIECE)
    launch(
        segments, _programs(items, piece), row_of_slot, slot_of_row, tokens, starts[0], starts[1], ranks, experts,
        (ranks * experts + 1).bit_length(), num_tokens, warps=WARPS, PIECE=piece,
    )  # fmt: skip
    return row_of_slot, slot_of_row, tokens
