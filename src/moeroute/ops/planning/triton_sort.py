"""Slots in the order of a 64-bit key, in Triton: for what has too many bins for a table of counts.

Blocks are sorted, then eight runs at a time are merged by binary search.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeroute.ops.triton_kit import INTERPRETED, launch, programs, tile_rows, widen

# Slots of a block. Each is compared with all of them and each block has a line in the table of counts: with 256
# both cost about as much for 256 experts, and 65,536 slots give every multiprocessor two blocks.
BLOCK = 256
WAYS = 8  # runs merged at once: three rounds for 131,072 slots
MERGED = 128  # entries of a program: eight of their searches a thread
PIECE = 1024  # elements of the kernels that go over slots, rows, experts or tokens one by one
WARPS = 4

# What a sort key is made of.
RAW = tl.constexpr(0)  # the id; negative ones behind all others
BINS = tl.constexpr(1)  # id - first, or `last - first` outside of [first, last)
WEIGHTED = tl.constexpr(2)  # the same, then the weight, heaviest first

# ---------------------------------------------------------------------------- kernels


@triton.jit
def weight_order(weights, at, inside):
    """An integer in [0, 2^32) in the order of the weights: NaN above all, -0 as +0."""
    w = widen(tl.load(weights + at, mask=inside, other=0))
    bits = w.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    bits = tl.where(bits == 0x80000000, 0, bits)
    order = tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    return tl.where(w == w, order, 0xFFFFFFFF)


@triton.jit
def bin_of(ids, at, inside, first, last):
    """id - first in int32; last - first for an id outside of [first, last)."""
    i = tl.load(ids + at, mask=inside, other=-1).to(tl.int64)
    return tl.where((i >= first) & (i < last), i - first, last - first).to(tl.int32)


@triton.jit
def sort_key(ids, weights, at, inside, first, last, columns, KIND: tl.constexpr, MAP: tl.constexpr):
    """The integer to sort by: the expert, experts out of range last; below it, where weights decide, their order."""
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
    keys,
    slots,
    ids,
    weights,
    first,
    last,
    columns,
    num_slots,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    MAP: tl.constexpr,
):
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


# ---------------------------------------------------------------------------- launchers


def empty_like(like: Tensor, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Uninitialised memory on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def block_of(num_slots: int) -> int:
    """Slots of a block; in the interpreter at most 1024, since a block costs their square."""
    return min(tile_rows(num_slots, BLOCK), 1024)


def chunk_of(block: int, on_device: int) -> int:
    """How many others a slot is compared with at once: few registers; in the interpreter, few steps."""
    return block if INTERPRETED else on_device


def sort_slots(
    ids: Tensor, weights: Tensor | None, first: int, last: int, kind: tl.constexpr, columns: int = 0
) -> tuple[Tensor, Tensor]:
    """The keys in ascending order, int64, and the slots that they come from; `columns` for a map."""
    num_slots = ids.numel()
    block = block_of(num_slots)
    keys, slots = empty_like(ids, num_slots, dtype=torch.int64), empty_like(ids, num_slots)
    launch(
        sort_block,
        programs(num_slots, block),
        keys=keys,
        slots=slots,
        ids=ids,
        weights=ids if weights is None else weights,
        first=first,
        last=last,
        columns=columns,
        num_slots=num_slots,
        warps=WARPS,
        spare=True,
        BLOCK=block,
        CHUNK=chunk_of(block, 8),
        KIND=kind.value,
        MAP=columns > 0,
    )
    run, piece = block, tile_rows(num_slots, MERGED)
    while run < num_slots:
        merged_keys, merged_slots = torch.empty_like(keys), torch.empty_like(slots)
        launch(
            merge,
            programs(num_slots, piece),
            merged_keys=merged_keys,
            merged_slots=merged_slots,
            keys=keys,
            slots=slots,
            run=run,
            steps=run.bit_length(),
            num_slots=num_slots,
            warps=WARPS,
            PIECE=piece,
            WAYS=WAYS,
        )
        keys, slots, run = merged_keys, merged_slots, run * WAYS
    return keys, slots


def bin_bounds(keys: Tensor, shift: int, count: int) -> Tensor:
    """Where each of the bins 0..count begins, int32 [count + 1]."""
    first, num_slots = empty_like(keys, count + 1), keys.shape[0]
    piece = tile_rows(count + 1, PIECE)
    launch(
        bounds,
        programs(count + 1, piece),
        first=first,
        keys=keys,
        shift=shift,
        count=count,
        steps=num_slots.bit_length(),
        num_slots=num_slots,
        warps=WARPS,
        PIECE=piece,
    )
    return first


def heaviest(
    ids: Tensor, weights: Tensor, first_expert: int, last_expert: int, capacity: int, columns: int = 0
) -> Tensor:
    """The ids of the slots that stay, -1 for the others; with `columns` the map of the entries that stay."""
    num_slots = ids.numel()
    keys, slots = sort_slots(ids, weights, first_expert, last_expert, WEIGHTED, columns)
    experts = last_expert - first_expert
    first = bin_bounds(keys, 32, experts)
    kept = torch.empty_like(ids, dtype=torch.uint8 if columns else torch.int32)
    piece = tile_rows(num_slots, PIECE)
    launch(
        keep_heaviest,
        programs(num_slots, piece),
        kept=kept,
        keys=keys,
        slots=slots,
        first=first,
        first_expert=first_expert,
        experts=experts,
        capacity=capacity,
        num_slots=num_slots,
        warps=WARPS,
        MAP=columns > 0,
        PIECE=piece,
    )
    return kept
