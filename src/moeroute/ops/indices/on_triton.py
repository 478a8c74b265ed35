"""Plans of given index tensors in Triton: kernels, then launchers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.planning.on_triton import cut, nothing
from moeroute.ops.planning.triton_sort import BINS, PIECE, WARPS, bin_bounds, empty_like, first_at_least, sort_slots
from moeroute.ops.triton_kit import launch, programs, tile_rows
from moeroute.plan import PlanTensors

MAP_TOKENS = 128

# ---------------------------------------------------------------------------- kernels


@triton.jit
def inside_or_none(index, first, count):
    """index - first in int64, -1 where that is not in [0, count)."""
    first = first.to(tl.int64)
    return tl.where((index >= first) & (index < first + count), index - first, -1)


@triton.jit(do_not_specialize=["first_row", "num_slots", "num_rows"])
def narrow_rows(
    row_of_slot,
    slot_of_row,
    expert_of_slot,
    rows,
    experts,
    first_row,
    num_slots,
    num_rows,
    EXPERTS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Rows and experts as int32, out of range as -1; of slots with the same row the last one owns it."""
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


@triton.jit
def chunk_at(i, order, place, ranks, experts, inside, ORDER: tl.constexpr):
    """The chunk whose rows come i-th, -1 none; without `order` expert by expert, in an expert rank by rank."""
    if ORDER:
        c = tl.load(order + i, mask=inside, other=-1).to(tl.int64)
        last = tl.load(place + c, mask=inside & (c >= 0), other=-1)
        return tl.where(last == i, c, -1)
    else:
        return (i % tl.maximum(ranks, 1)) * experts + i // tl.maximum(ranks, 1)


@triton.jit(do_not_specialize=["ranks", "experts", "num_tokens"])
def chunk_starts(
    token_starts,
    row_starts,
    lengths,
    order,
    place,
    ranks,
    experts,
    num_tokens,
    ORDER: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One program. First token of each chunk as they lie; first row of each chunk as the rows lie."""
    chunks = ranks * experts
    limit = num_tokens.to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    row = token
    for first in range(0, chunks, PIECE):
        i = first + tl.arange(0, PIECE)
        inside = i < chunks
        c = chunk_at(i, order, place, ranks, experts, inside, ORDER)
        here = tl.load(lengths + i, mask=inside, other=0).to(tl.int64)
        there = tl.load(lengths + c, mask=inside & (c >= 0), other=0).to(tl.int64)
        here = tl.minimum(tl.maximum(here, 0), limit)
        there = tl.minimum(tl.maximum(there, 0), limit)
        tl.store(token_starts + i, token + tl.cumsum(here, axis=0) - here, mask=inside)
        tl.store(row_starts + i, row + tl.cumsum(there, axis=0) - there, mask=inside)
        token += tl.sum(here, axis=0)
        row += tl.sum(there, axis=0)
    tl.store(token_starts + chunks, token)
    tl.store(row_starts + chunks, row)


@triton.jit(do_not_specialize=["ranks", "experts", "steps", "num_tokens"])
def deal_chunks(
    row_of_slot,
    slot_of_row,
    tokens,
    token_starts,
    row_starts,
    order,
    place,
    ranks,
    experts,
    steps,
    num_tokens,
    ORDER: tl.constexpr,
    PIECE: tl.constexpr,
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
    if ORDER:
        i = tl.load(place + c, mask=live, other=-1).to(tl.int64)
        live = live & (i >= 0)
    else:
        i = (c % tl.maximum(experts, 1)) * ranks + c // tl.maximum(experts, 1)
    row = at - tl.load(token_starts + c, mask=live, other=0) + tl.load(row_starts + i, mask=live, other=0)
    tl.store(row_of_slot + at, tl.where(live & (row < num_tokens), row, -1).to(tl.int32), mask=inside)
    i = first_at_least(row_starts, at + 1, low, high, steps) - 1
    live = inside & (i >= 0) & (i < chunks)
    c = chunk_at(i, order, place, ranks, experts, live, ORDER)
    live = live & (c >= 0)
    token = at - tl.load(row_starts + i, mask=live, other=0) + tl.load(token_starts + c, mask=live, other=0)
    tl.store(slot_of_row + at, tl.where(live & (token < num_tokens), token, -1).to(tl.int32), mask=inside)
    mine = at < experts
    begin = tl.load(row_starts + at * ranks, mask=mine, other=0)
    end = tl.load(row_starts + (at + 1) * ranks, mask=mine, other=0)
    tl.store(tokens + at, cut(end - begin, begin, num_tokens), mask=mine)


# A row id map is [T, 2E + 1]: the rows of a token's n experts, from column E on their ids, n last.


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_rows"])
def read_map(
    row_of_slot,
    slot_of_row,
    expert_of_slot,
    slot_offsets,
    row_id_map,
    pad_offsets,
    num_tokens,
    num_experts,
    num_rows,
    PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Rows and experts of each token's slots; of slots with the same row the last one owns it."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    valid = token < num_tokens
    first = tl.load(slot_offsets + token, mask=valid, other=0)
    count = tl.load(slot_offsets + token + 1, mask=valid, other=0) - first
    line = token * (2 * num_experts + 1)
    for k in range(0, tl.max(count, axis=0)):
        owned = k < count
        row = tl.load(row_id_map + line + k, mask=owned, other=-1).to(tl.int64)
        expert = tl.load(row_id_map + line + num_experts + k, mask=owned, other=-1).to(tl.int64)
        live = owned & (row >= 0) & (row < num_rows) & (expert >= 0) & (expert < num_experts)
        if PAD:
            pad = tl.load(pad_offsets + expert, mask=live, other=0)
            live = live & (pad >= 0) & (pad < num_rows)
            row = tl.where(live, row + pad, -1)
            live = live & (row < num_rows)
        slot = first + k
        tl.store(row_of_slot + slot, tl.where(live, row, -1).to(tl.int32), mask=owned)
        tl.store(expert_of_slot + slot, tl.where(live, expert, -1).to(tl.int32), mask=owned)
        tl.atomic_max(slot_of_row + row, slot, mask=live)


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_slots", "num_rows"])
def write_map(
    out,
    row_of_slot,
    expert_of_slot,
    slot_offsets,
    num_tokens,
    num_experts,
    num_slots,
    num_rows,
    TOKENS: tl.constexpr,
):
    """Each token's line of the map. The launcher has filled `out` with -1."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    valid = token < num_tokens
    first = tl.maximum(tl.load(slot_offsets + token, mask=valid, other=0), 0)
    last = tl.minimum(tl.load(slot_offsets + token + 1, mask=valid, other=0), num_slots)
    line = token * (2 * num_experts + 1)
    count = tl.zeros((TOKENS,), tl.int32)
    for k in range(0, tl.max(last - first, axis=0)):
        slot = first + k
        owned = valid & (slot < last)
        row = tl.load(row_of_slot + slot, mask=owned, other=-1)
        expert = tl.load(expert_of_slot + slot, mask=owned, other=-1)
        used = (row >= 0) & (row < num_rows) & (expert >= 0) & (expert < num_experts) & (count < num_experts)
        tl.store(out + line + count, row, mask=used)
        tl.store(out + line + num_experts + count, expert, mask=used)
        count += used.to(tl.int32)
    tl.store(out + line + 2 * num_experts, count, mask=valid)


# ---------------------------------------------------------------------------- launchers


def plan_row_of_slot(
    row_of_slot: Tensor,
    expert_of_slot: Tensor | None,
    num_rows: int,
    first_row: int,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    num_slots = row_of_slot.numel()
    narrowed = empty_like(row_of_slot, num_slots) if out is None else out
    experts = None if expert_of_slot is None else empty_like(row_of_slot, num_slots)
    slot_of_row = nothing(row_of_slot, num_rows)
    piece = tile_rows(num_slots, PIECE)
    launch(
        narrow_rows,
        programs(num_slots, piece),
        row_of_slot=narrowed,
        slot_of_row=slot_of_row,
        expert_of_slot=narrowed if experts is None else experts,
        rows=row_of_slot,
        experts=row_of_slot if expert_of_slot is None else expert_of_slot,
        first_row=first_row,
        num_slots=num_slots,
        num_rows=num_rows,
        warps=WARPS,
        spare=True,
        EXPERTS=experts is not None,
        PIECE=piece,
    )
    return narrowed, slot_of_row, experts


def plan_token_ids(
    token_ids: Tensor,
    rows: Tensor | None,
    num_tokens: int,
    num_rows: int,
    num_experts: int | None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    num_slots = token_ids.shape[0]
    keys, slots = sort_slots(token_ids, None, 0, num_tokens, BINS)
    slot_offsets = bin_bounds(keys, 0, num_tokens)
    row_of_slot = empty_like(token_ids, num_slots) if out is None else out
    slot_of_row = nothing(token_ids, num_rows)
    experts = None if num_experts is None else empty_like(token_ids, num_slots)
    each = 1 if num_experts is None else num_rows // num_experts
    piece = tile_rows(num_slots, PIECE)
    launch(
        entry_rows,
        programs(num_slots, piece),
        row_of_slot=row_of_slot,
        slot_of_row=slot_of_row,
        expert_of_slot=row_of_slot if experts is None else experts,
        keys=keys,
        slots=slots,
        rows=slots if rows is None else rows,
        num_slots=num_slots,
        num_tokens=num_tokens,
        num_rows=num_rows,
        rows_per_expert=max(each, 1),
        warps=WARPS,
        ROWS=rows is not None,
        EXPERTS=experts is not None,
        PIECE=piece,
    )
    tokens = None
    if num_experts is not None:
        tokens = (slot_of_row.view(num_experts, each) >= 0).sum(dim=1)
    return row_of_slot, slot_of_row, slot_offsets, experts, tokens


def plan_chunks(
    lengths: Tensor, order: Tensor | None, num_tokens: int, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    ranks, experts = lengths.shape
    starts = empty_like(lengths, 2, ranks * experts + 1, dtype=torch.int64)
    tokens = empty_like(lengths, experts, dtype=torch.int64)
    ordered, place = order is not None, None
    if order is not None:
        order, place, _ = plan_row_of_slot(order, None, ranks * experts, 0)
    launch(
        chunk_starts,
        1,
        token_starts=starts[0],
        row_starts=starts[1],
        lengths=lengths,
        order=lengths if order is None else order,
        place=lengths if place is None else place,
        ranks=ranks,
        experts=experts,
        num_tokens=num_tokens,
        warps=WARPS,
        spare=True,
        ORDER=ordered,
        PIECE=PIECE,
    )
    row_of_slot = empty_like(lengths, num_tokens) if out is None else out
    slot_of_row = empty_like(lengths, num_tokens)
    items = max(num_tokens, experts)
    piece = tile_rows(items, PIECE)
    launch(
        deal_chunks,
        programs(items, piece),
        row_of_slot=row_of_slot,
        slot_of_row=slot_of_row,
        tokens=tokens,
        token_starts=starts[0],
        row_starts=starts[1],
        order=starts if order is None else order,
        place=starts if place is None else place,
        ranks=ranks,
        experts=experts,
        steps=(ranks * experts + 1).bit_length(),
        num_tokens=num_tokens,
        warps=WARPS,
        spare=True,
        ORDER=ordered,
        PIECE=piece,
    )
    return row_of_slot, slot_of_row, tokens


def plan_row_id_map(
    row_id_map: Tensor, pad_offsets: Tensor | None, num_rows: int, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    num_tokens, num_experts = row_id_map.shape[0], row_id_map.shape[1] // 2
    slot_offsets = empty_like(row_id_map, num_tokens + 1)
    slot_offsets[0] = 0
    slot_offsets[1:] = row_id_map[:, -1].clamp(min=0, max=num_experts).cumsum(0).clamp(max=num_rows)
    row_of_slot = nothing(row_id_map, num_rows) if out is None else out.fill_(-1)
    expert_of_slot, slot_of_row = nothing(row_id_map, num_rows), nothing(row_id_map, num_rows)
    tokens = tile_rows(num_tokens, MAP_TOKENS)
    launch(
        read_map,
        programs(num_tokens, tokens),
        row_of_slot=row_of_slot,
        slot_of_row=slot_of_row,
        expert_of_slot=expert_of_slot,
        slot_offsets=slot_offsets,
        row_id_map=row_id_map,
        pad_offsets=row_id_map if pad_offsets is None else pad_offsets,
        num_tokens=num_tokens,
        num_experts=num_experts,
        num_rows=num_rows,
        warps=WARPS,
        spare=True,
        PAD=pad_offsets is not None,
        TOKENS=tokens,
    )
    return row_of_slot, slot_of_row, slot_offsets, expert_of_slot


def row_id_map(plan: PlanTensors, num_experts: int, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [T, 2E + 1] result, or writes `out`."""
    num_slots, num_tokens, device = plan.row_of_slot.shape[0], plan.num_tokens, plan.row_of_slot.device
    offsets = plan.slot_offsets
    if offsets is None:
        offsets = torch.arange(num_tokens + 1, dtype=torch.int32, device=device) * (num_slots // max(num_tokens, 1))
    into = out if out is not None and out.is_contiguous() else empty_like(offsets, num_tokens, 2 * num_experts + 1)
    into.fill_(-1)
    tokens = tile_rows(num_tokens, MAP_TOKENS)
    launch(
        write_map,
        programs(num_tokens, tokens),
        out=into,
        row_of_slot=plan.row_of_slot,
        expert_of_slot=plan.expert_of_slot,
        slot_offsets=offsets,
        num_tokens=num_tokens,
        num_experts=num_experts,
        num_slots=num_slots,
        num_rows=plan.slot_of_row.shape[0],
        warps=WARPS,
        TOKENS=tokens,
    )
    return layout.finish(into, out)
