"""Plans of expert ids by counting, in Triton: kernels, then launchers.

Counting sort: count the slots of each expert block by block, add up over the blocks and over the
experts, then every block deals its slots out. A slot's rank inside its block is found by comparing it
with the block's others: without atomics, hence always in slot order. What has too many bins for a table of
counts (more than 8,192 experts, tokens, any 64-bit id, weights) is sorted instead (triton_sort.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeroute import check
from moeroute.ops.planning.triton_sort import (
    BINS,
    PIECE,
    RAW,
    WARPS,
    bin_bounds,
    bin_of,
    block_of,
    chunk_of,
    empty_like,
    heaviest,
    sort_slots,
    weight_order,
)
from moeroute.ops.triton_kit import INTERPRETED, launch, power_of_two, programs, tile_rows

TABLE_EXPERTS = 8192  # up to here the table has at most 32 entries a slot, 128 bytes, and a sort takes more launches
HISTOGRAMS = (64, 256, 1024, 8192)  # bins
SCAN_BLOCKS, SCAN_EXPERTS = 256, 8  # a tile of the table: whole sectors of 32 bytes, many programs
SMALL_SLOTS = (32, 64)  # up to so many slots (tokens of a decoding step) one program compares all with all
SMALL = 1024  # with at most so many experts and rows
SIDE = 32  # experts or rows that it handles at once

# ---------------------------------------------------------------------------- kernels: counting sort
#
# `counts` is int32 [blocks, experts]: the slots that each block has of each expert; `before` of the same
# shape: those that the blocks before it have. `starts` int64 [experts]: the first row of each expert.


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
    counts,
    slot_of_row,
    ids,
    first,
    last,
    num_slots,
    num_rows,
    BLOCK: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Count the program's ids by expert; also clear `slot_of_row`, which a later kernel fills."""
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
    """Sums over the earlier programs of each expert, and the totals, in order."""
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


@triton.jit(
    do_not_specialize=["offset", "experts", "slot_bins", "taken", "most", "capacity", "segment", "align", "num_rows"]
)
def scan_experts(
    starts, tokens, rows, sizes, totals, offset, experts, slot_bins, taken, most, capacity, segment, align,
    num_rows, DIFFERENCES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One program. The experts' totals begin at `offset`; `taken` >= 0: each has as many, whatever the total;
    `most` >= 0: the total is rounded up to `align`, to at most that.

    sizes: the rows of all experts, the sum of the first `slot_bins` totals, and of the experts' rounded ones.
    """
    start = tl.program_id(0).to(tl.int64)  # 0, of the type that the loop carries on
    filled = start
    for first in range(0, experts, PIECE):
        e = first + tl.arange(0, PIECE)
        inside = e < experts
        total = tl.load(totals + offset + e, mask=inside, other=0).to(tl.int64)
        if DIFFERENCES:
            total = tl.load(totals + offset + e + 1, mask=inside, other=0).to(tl.int64) - total
        total = tl.where(taken >= 0, taken.to(tl.int64), total)
        total = tl.where(most >= 0, tl.minimum((total + align - 1) // align * align, most.to(tl.int64)), total)
        filled += tl.sum(tl.where(inside, total, 0), axis=0)
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
    tl.store(sizes + 2, filled)


@triton.jit(do_not_specialize=["first", "last", "num_slots"])
def deal(
    row_of_slot, slot_of_row, ids, before, starts, tokens, first, last, num_slots,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Give every slot of the program its row: earlier programs, then earlier slots of this one."""
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


# ---------------------------------------------------------------------------- kernels: sorted slots


@triton.jit(do_not_specialize=["experts", "num_slots"])
def deal_sorted(row_of_slot, slot_of_row, keys, slots, first, starts, tokens, experts, num_slots, PIECE: tl.constexpr):
    """`deal` for slots sorted by expert: the rank is the distance from the expert's first slot."""
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


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def deal_any(row_of_slot, slot_of_row, keys, slots, num_slots, num_rows, PIECE: tl.constexpr):
    """Rows of slots sorted by key, where the number of experts is unknown: row i is the i-th live slot."""
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = at < num_slots
    live = tl.load(keys + at, mask=inside, other=0) < 0
    slot = tl.load(slots + at, mask=inside, other=0)
    tl.store(row_of_slot + slot, tl.where(live & (at < num_rows), at, -1).to(tl.int32), mask=inside)
    tl.store(slot_of_row + at, tl.where(live, slot, -1), mask=at < num_rows)


# ---------------------------------------------------------------------------- launchers


def given(option: int | None) -> int:
    """The option as kernels take it: -1 for None."""
    return -1 if option is None else option


def nothing(like: Tensor, size: int) -> Tensor:
    """A new int32 tensor of -1."""
    return torch.full((size,), -1, dtype=torch.int32, device=like.device)


def add_up_blocks(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the earlier programs, and totals, of counts [programs, E]; both are allocated here."""
    blocks, width = counts.shape
    before, totals = torch.empty_like(counts), empty_like(counts, width)
    lines = min(power_of_two(blocks), SCAN_BLOCKS) if INTERPRETED else SCAN_BLOCKS
    columns = tile_rows(width, SCAN_EXPERTS)
    launch(
        scan_blocks,
        programs(width, columns),
        before=before,
        totals=totals,
        counts=counts,
        blocks=blocks,
        width=width,
        warps=WARPS,
        SCAN_BLOCKS=lines,
        SCAN_EXPERTS=columns,
    )
    return before, totals


def add_up_experts(
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
    most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First row, live rows and rows of each expert; the numbers of rows, of slots, and of slots that are filled up."""
    starts = empty_like(totals, experts, dtype=torch.int64)
    tokens, rows = torch.empty_like(starts), torch.empty_like(starts)
    sizes = empty_like(totals, 3, dtype=torch.int64)
    launch(
        scan_experts,
        1,
        starts=starts,
        tokens=tokens,
        rows=rows,
        sizes=sizes,
        totals=totals,
        offset=offset,
        experts=experts,
        slot_bins=slot_bins,
        taken=given(taken),
        most=given(most),
        capacity=given(capacity),
        segment=given(segment),
        align=align,
        num_rows=given(num_rows),
        warps=WARPS,
        DIFFERENCES=differences,
        PIECE=PIECE,
    )
    return starts, tokens, rows, sizes


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
    slot_of_row = empty_like(ids, limit)
    tokens, rows = empty_like(ids, experts, dtype=torch.int64), empty_like(ids, experts, dtype=torch.int64)
    slots = next(size for size in SMALL_SLOTS if num_slots <= size)
    launch(
        plan_small,
        1,
        row_of_slot=row_of_slot,
        slot_of_row=slot_of_row,
        tokens=tokens,
        rows=rows,
        ids=ids,
        weights=ids if weights is None else weights,
        first=first_expert,
        last=last_expert,
        capacity=given(capacity),
        segment=min(given(segment), limit),
        align=min(align, max(limit, 1)),
        num_rows=limit,
        num_slots=num_slots,
        warps=slots // 4,
        SLOTS=slots,
        SIDE=SMALL if INTERPRETED else SIDE,
        WEIGHTS=weights is not None,
    )
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
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    ids, num_slots, experts = expert_ids, expert_ids.numel(), last_expert - first_expert
    if capacity is None:
        weights = None
    row_of_slot = empty_like(ids, num_slots) if out is None else out
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
        ids = heaviest(ids, weights, first_expert, last_expert, capacity)
    slot_of_row = empty_like(ids, num_rows or 0)
    if experts <= TABLE_EXPERTS:
        block = block_of(num_slots)
        blocks = max(programs(num_slots, block), 1)
        counts = empty_like(ids, blocks, experts)
        launch(
            count,
            blocks,
            counts=counts,
            slot_of_row=slot_of_row,
            ids=ids,
            first=first_expert,
            last=last_expert,
            num_slots=num_slots,
            num_rows=num_rows or 0,
            warps=WARPS if experts <= HISTOGRAMS[-2] else 8,
            BLOCK=block,
            HISTOGRAM=next(size for size in HISTOGRAMS if experts <= size),
            PIECE=PIECE,
        )
        before, totals = add_up_blocks(counts)
    else:
        keys, slots = sort_slots(ids, None, first_expert, last_expert, BINS)
        totals = bin_bounds(keys, 0, experts)
        slot_of_row.fill_(-1)
    starts, tokens, rows, sizes = add_up_experts(
        totals, 0, experts, 0, None, capacity, segment, align, num_rows, experts > TABLE_EXPERTS
    )
    if num_rows is None:
        num_rows = int(sizes[0])
        check.at_most_rows("plan_from_expert_ids", num_rows)
        slot_of_row = nothing(ids, num_rows) if padded else empty_like(ids, num_rows)
    if experts <= TABLE_EXPERTS:
        launch(
            deal,
            blocks,
            row_of_slot=row_of_slot,
            slot_of_row=slot_of_row,
            ids=ids,
            before=before,
            starts=starts,
            tokens=tokens,
            first=first_expert,
            last=last_expert,
            num_slots=num_slots,
            warps=WARPS,
            BLOCK=block,
            CHUNK=chunk_of(block, 16),
        )
    else:
        piece = tile_rows(num_slots, PIECE)
        launch(
            deal_sorted,
            programs(num_slots, piece),
            row_of_slot=row_of_slot,
            slot_of_row=slot_of_row,
            keys=keys,
            slots=slots,
            first=totals,
            starts=starts,
            tokens=tokens,
            experts=experts,
            num_slots=num_slots,
            warps=WARPS,
            PIECE=piece,
        )
    return row_of_slot, slot_of_row, tokens, rows if padded else None


def plan_any_ids(expert_ids: Tensor, num_rows: int | None, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    num_slots = expert_ids.numel()
    keys, slots = sort_slots(expert_ids, None, 0, 0, RAW)
    if num_rows is None:
        num_rows = int(bin_bounds(keys, 0, 0))  # keys of live slots are negative
    row_of_slot = empty_like(expert_ids, num_slots) if out is None else out
    slot_of_row = empty_like(expert_ids, num_rows)
    piece = tile_rows(max(num_slots, num_rows), PIECE)
    launch(
        deal_any,
        programs(max(num_slots, num_rows), piece),
        row_of_slot=row_of_slot,
        slot_of_row=slot_of_row,
        keys=keys,
        slots=slots,
        num_slots=num_slots,
        num_rows=num_rows,
        warps=WARPS,
        PIECE=piece,
    )
    return row_of_slot, slot_of_row
