"""The row operators in Triton: kernels, then launchers.

`spread` and `combine` take a tile of tokens and a block of the hidden axis; the dot products take a
tile of slots and walk the hidden axis, 256 elements at a time, one warp a slot. An index is
range-checked before it is used, whatever the plan says; the numbers of slots and rows themselves too, since those
of a tile's end may pass 2^31 and be negative. Offsets are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.triton_kit import (
    PARTIAL_SUMS,
    launch,
    narrow,
    power_of_two,
    programs,
    sum_of_partials,
    tile_rows,
    widen,
)
from moeroute.plan import PlanTensors

# The launch table. An H200 keeps its memory busy with bandwidth × latency = 4.8 TB/s × 0.7 µs = 3.4 MB in flight,
# 26 KB for each of 132 multiprocessors. A thread of `spread` or `combine` reads 16 bytes of a row at a time and has two
# or three rows on the way, however many slots a token has; a program has ROW_BYTES of a row, and 12 to 16 programs
# share a multiprocessor: 70 KB and more. A program of the dot products has a warp for each of its slots, which asks
# for 512 elements of two rows at a time: 16 KB, and five programs share a multiprocessor (docs/kernels.md).
ROW_BYTES = 2048
SLOTS_AT_ONCE = 8
DOT_SLOTS = 8
ZERO_ROWS, ZERO_BLOCK = 16, 32  # rows that one program looks through for unused ones; a small tile: few registers
LANE_BYTES = 512  # a warp's 16-byte accesses
SMALL_TILE = 1024  # elements a program of what moves weights and indices


# ---------------------------------------------------------------------------- kernels: slots of a token


@triton.jit
def slots_of(slot_offsets, topk, num_slots, token, valid):
    """Where the slots of each token begin and end; always inside 0..num_slots."""
    if slot_offsets is None:
        first = token * topk
        return tl.where(valid, first, 0), tl.where(valid, first + topk, 0)
    else:
        first = tl.load(slot_offsets + token, mask=valid, other=0)
        last = tl.load(slot_offsets + token + 1, mask=valid, other=0)
        return tl.minimum(tl.maximum(first, 0), num_slots), tl.minimum(tl.maximum(last, 0), num_slots)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "steps"])
def token_of_slot_kernel(token_of_slot, slot_offsets, num_tokens, num_slots, steps, SLOTS: tl.constexpr):
    """The token that owns each slot, -1 where none does: by bisection, `steps` of which suffice."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    low = tl.zeros((SLOTS,), tl.int32)
    high = low + num_tokens
    for _ in range(steps):
        middle = low + (high - low) // 2  # their sum may pass 2^31
        end = tl.load(slot_offsets + middle + 1, mask=middle < num_tokens, other=2147483647)
        after = end <= slot
        low = tl.where(after & (low < high), middle + 1, low)
        high = tl.where(after, high, middle)
    owned = (low < num_tokens) & (tl.load(slot_offsets) <= slot)
    tl.store(token_of_slot + slot, tl.where(owned, low, -1), mask=(slot >= 0) & (slot < num_slots))


@triton.jit
def token_of(token_of_slot, topk, slot, valid):
    """The token of each slot: computed where all tokens have `topk` slots, else read."""
    if token_of_slot is None:
        return tl.where(valid, slot // tl.maximum(topk, 1), -1)
    else:
        return tl.load(token_of_slot + slot, mask=valid, other=-1)


# ---------------------------------------------------------------------------- kernels: combine


@triton.jit(do_not_specialize=["num_tokens", "topk", "num_slots", "num_rows", "num_experts"])
def combine_kernel(
    out, rows, weights, init, init_more, bias, row_of_slot, expert_of_slot, slot_offsets, num_tokens, topk, num_slots,
    num_rows, num_experts, hidden, out_stride, rows_stride, init_stride, init_more_stride,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sums of each token's rows in the order of its slots; absent tensors are None and cost nothing."""
    blocks = tl.cdiv(hidden, BLOCK)
    token = tl.program_id(0) // blocks * TOKENS + tl.arange(0, TOKENS)
    column = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    valid = token < num_tokens
    inside = column < hidden
    at = token.to(tl.int64)[:, None]
    first, last = slots_of(slot_offsets, topk, num_slots, token, valid)

    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    if init is not None:
        total = widen(tl.load(init + at * init_stride + column, mask=valid[:, None] & inside, other=0))
    if init_more is not None:
        second = tl.load(init_more + at * init_more_stride + column, mask=valid[:, None] & inside, other=0)
        total = total + widen(second)

    for base in range(0, tl.max(last - first, axis=0), SLOTS):
        for k in tl.static_range(SLOTS):
            slot = first + base + k
            live = (slot >= 0) & (slot < last)
            row = tl.load(row_of_slot + slot, mask=live, other=-1)
            used = (row >= 0) & (row < num_rows)
            if weights is not None:
                weight = widen(tl.load(weights + slot, mask=live, other=0))
                used = used & (weight != 0)
            term = widen(
                tl.load(rows + row.to(tl.int64)[:, None] * rows_stride + column, mask=used[:, None] & inside, other=0)
            )
            if bias is not None:
                expert = tl.load(expert_of_slot + slot, mask=used, other=-1)
                has_bias = ((expert >= 0) & (expert < num_experts))[:, None]
                more = widen(
                    tl.load(bias + expert.to(tl.int64)[:, None] * hidden + column, mask=has_bias & inside, other=0)
                )
                term = tl.where(has_bias, term + more, term)
            if weights is not None:
                term = weight[:, None] * term
            total = tl.where(used[:, None], total + term, total)

    narrowed = narrow(total, out.dtype.element_ty)
    tl.store(out + at * out_stride + column, narrowed, mask=valid[:, None] & inside)


# ---------------------------------------------------------------------------- kernels: spread


@triton.jit
def zero_unused_rows(
    out,
    row_of_slot,
    slot_of_row,
    slot_offsets,
    topk,
    num_slots,
    num_rows,
    num_tokens,
    hidden,
    out_stride,
    tile,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zeros in the rows of a tile that no token's slot fills."""
    row = tile * ROWS + tl.arange(0, ROWS)
    valid = (row >= 0) & (row < num_rows)
    first = 0
    last = num_tokens * topk
    if slot_offsets is not None:
        first = tl.maximum(tl.load(slot_offsets), 0)
        last = tl.minimum(tl.load(slot_offsets + num_tokens), num_slots)
    slot = tl.load(slot_of_row + row, mask=valid, other=-1)
    named = (slot >= first) & (slot < last)
    back = tl.load(row_of_slot + slot, mask=named, other=-1)
    unused = valid & ((back != row) | (named == 0))
    if tl.max(unused.to(tl.int32), axis=0) > 0:
        at = out + row.to(tl.int64)[:, None] * out_stride
        for h in range(0, hidden, BLOCK):
            column = (h + tl.arange(0, BLOCK))[None, :]
            zeros = tl.zeros((ROWS, BLOCK), out.dtype.element_ty)
            tl.store(at + column, zeros, mask=unused[:, None] & (column < hidden))


@triton.jit(do_not_specialize=["num_tokens", "topk", "num_slots", "num_rows", "programs"])
def spread_kernel(
    out, x, weights, row_of_slot, slot_of_row, slot_offsets, num_tokens, topk, num_slots, num_rows, hidden, out_stride,
    x_stride, programs, TOKENS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    ZERO_BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `programs` programs copy, the others look for rows to fill with zeros."""
    tile = tl.program_id(0)
    if tile < programs:
        blocks = tl.cdiv(hidden, BLOCK)
        token = tile // blocks * TOKENS + tl.arange(0, TOKENS)
        column = (tile % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
        valid = token < num_tokens
        inside = column < hidden
        first, last = slots_of(slot_offsets, topk, num_slots, token, valid)
        at = x + token.to(tl.int64)[:, None] * x_stride
        value = tl.load(at + column, mask=valid[:, None] & inside, other=0)
        for base in range(0, tl.max(last - first, axis=0), SLOTS):
            # All indices at once: no load may pass a store.
            slot = (first + base)[:, None] + tl.arange(0, SLOTS)[None, :]
            row = tl.load(row_of_slot + slot, mask=(slot >= 0) & (slot < last[:, None]), other=-1)
            named = (row >= 0) & (row < num_rows)
            used = named & (tl.load(slot_of_row + row, mask=named, other=-1) == slot)
            copy = value[:, None, :]
            if weights is not None:
                weight = widen(tl.load(weights + slot, mask=used, other=0))[:, :, None]
                copy = narrow(weight * widen(copy), out.dtype.element_ty)
            target = out + row.to(tl.int64)[:, :, None] * out_stride + column[:, None, :]
            copy = tl.broadcast_to(copy, (TOKENS, SLOTS, BLOCK))
            tl.store(target, copy, mask=used[:, :, None] & inside[:, None, :])
    else:
        zero_unused_rows(
            out,
            row_of_slot,
            slot_of_row,
            slot_offsets,
            topk,
            num_slots,
            num_rows,
            num_tokens,
            hidden,
            out_stride,
            tile - programs,
            ROWS,
            ZERO_BLOCK,
        )


# ---------------------------------------------------------------------------- kernels: row_dots, spread_dots


@triton.jit(do_not_specialize=["num_tokens", "topk", "num_slots", "num_rows", "num_experts", "programs"])
def dots_kernel(
    dots, out, y, x, weights, bias, row_of_slot, slot_of_row, expert_of_slot, token_of_slot, slot_offsets, num_tokens,
    topk, num_slots, num_rows, num_experts, hidden, out_stride, y_stride, x_stride, programs,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, ZERO_BLOCK: tl.constexpr,
):  # fmt: skip
    """<y[row], x[token]> of each slot; with `out`, out[row] = weight * x[token] in the same pass."""
    tile = tl.program_id(0)
    if tile < programs:
        slot = tile * SLOTS + tl.arange(0, SLOTS)
        valid = (slot >= 0) & (slot < num_slots)
        token = token_of(token_of_slot, topk, slot, valid)
        row = tl.load(row_of_slot + slot, mask=valid, other=-1)
        used = (row >= 0) & (row < num_rows) & (token >= 0) & (token < num_tokens)
        y_at = y + row.to(tl.int64)[:, None] * y_stride
        x_at = x + token.to(tl.int64)[:, None] * x_stride
        if bias is not None:
            expert = tl.load(expert_of_slot + slot, mask=used, other=-1)
            has_bias = ((expert >= 0) & (expert < num_experts))[:, None]
            bias_at = bias + expert.to(tl.int64)[:, None] * hidden
        if out is not None:
            out_at = out + row.to(tl.int64)[:, None] * out_stride
            weight = widen(tl.load(weights + slot, mask=used, other=0))[:, None]
            written = (used & (tl.load(slot_of_row + row, mask=used, other=-1) == slot))[:, None]

        partial = tl.zeros((SLOTS, PARTIAL_SUMS), tl.float32)
        for h in range(0, hidden, 2 * PARTIAL_SUMS):
            # Two pieces, all loads first: none may pass a store.
            column = (tl.arange(0, PARTIAL_SUMS) + h)[None, :]
            further = column + PARTIAL_SUMS
            inside = used[:, None] & (column < hidden)
            inside_further = used[:, None] & (further < hidden)
            y_near = widen(tl.load(y_at + column, mask=inside, other=0))
            x_near = widen(tl.load(x_at + column, mask=inside, other=0))
            y_far = widen(tl.load(y_at + further, mask=inside_further, other=0))
            x_far = widen(tl.load(x_at + further, mask=inside_further, other=0))
            if bias is not None:
                more = widen(tl.load(bias_at + column, mask=inside & has_bias, other=0))
                y_near = tl.where(has_bias, y_near + more, y_near)
                more = widen(tl.load(bias_at + further, mask=inside_further & has_bias, other=0))
                y_far = tl.where(has_bias, y_far + more, y_far)
            if out is not None:
                tl.store(out_at + column, narrow(weight * x_near, out.dtype.element_ty), mask=inside & written)
                tl.store(out_at + further, narrow(weight * x_far, out.dtype.element_ty), mask=inside_further & written)
            partial = partial + y_near * x_near
            partial = partial + y_far * x_far
        dot = tl.where(used, sum_of_partials(partial), 0.0)
        tl.store(dots + slot, narrow(dot, dots.dtype.element_ty), mask=valid)
    else:
        if out is not None:
            zero_unused_rows(
                out,
                row_of_slot,
                slot_of_row,
                slot_offsets,
                topk,
                num_slots,
                num_rows,
                num_tokens,
                hidden,
                out_stride,
                tile - programs,
                ROWS,
                ZERO_BLOCK,
            )


# ---------------------------------------------------------------------------- launchers


def _block(hidden: int, size: int) -> int:
    """Elements of a row that a program takes."""
    return tile_rows(4 * hidden, min(ROW_BYTES // size, max(power_of_two(hidden), 128)))


def _warps(block: int, size: int) -> int:
    return min(max(block * size // LANE_BYTES, 1), 8)


def _slots_at_once(plan: PlanTensors) -> int:
    return min(SLOTS_AT_ONCE, power_of_two(-(-plan.row_of_slot.shape[0] // max(plan.num_tokens, 1))))


def topk_of(plan: PlanTensors) -> int:
    """Slots of a token where every token owns as many."""
    return plan.row_of_slot.shape[0] // plan.num_tokens if plan.num_tokens else 0


def owner_of_slot(plan: PlanTensors) -> Tensor | None:
    """The token of every slot; None where every token owns as many slots."""
    if plan.slot_offsets is None:
        return None
    num_tokens, num_slots = plan.num_tokens, plan.row_of_slot.shape[0]
    found = torch.empty(num_slots, dtype=torch.int32, device=plan.slot_offsets.device)
    slots = tile_rows(num_slots, SMALL_TILE)
    launch(
        token_of_slot_kernel,
        programs(num_slots, slots),
        token_of_slot=found,
        slot_offsets=plan.slot_offsets,
        num_tokens=num_tokens,
        num_slots=num_slots,
        steps=num_tokens.bit_length(),
        warps=4,
        SLOTS=slots,
    )
    return found


def _aligned(*tensors: Tensor | None) -> bool:
    """Whether the compiler knows that each row, and its end, lies at a multiple of 16 bytes."""
    return all(t is None or not (t.data_ptr() % 16 or t.stride(0) % 16 or t.shape[1] % 16) for t in tensors)


def combine(
    rows: Tensor,
    weights: Tensor | None,
    plan: PlanTensors,
    *,
    init: Tensor | None = None,
    init_more: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Allocates the [T, H] result, or writes `out`, of any strides."""
    rows = layout.rows(rows)
    init, init_more = (None if start is None else layout.rows(start) for start in (init, init_more))
    (num_rows, hidden), size = rows.shape, rows.element_size()
    target = layout.target(out, (plan.num_tokens, hidden), rows.dtype, rows.device)
    block = _block(hidden, size)
    tokens = tile_rows(plan.num_tokens, 1, block)
    launch(
        combine_kernel,
        programs(plan.num_tokens, tokens) * programs(hidden, block),
        out=target,
        rows=rows,
        weights=layout.contiguous(weights),
        init=init,
        init_more=init_more,
        bias=layout.contiguous(bias),
        row_of_slot=plan.row_of_slot,
        expert_of_slot=None if bias is None else plan.expert_of_slot,
        slot_offsets=plan.slot_offsets,
        num_tokens=plan.num_tokens,
        topk=topk_of(plan),
        num_slots=plan.row_of_slot.shape[0],
        num_rows=num_rows,
        num_experts=0 if bias is None else bias.shape[0],
        hidden=hidden,
        out_stride=target.stride(0),
        rows_stride=rows.stride(0),
        init_stride=0 if init is None else init.stride(0),
        init_more_stride=0 if init_more is None else init_more.stride(0),
        warps=_warps(block, size),
        TOKENS=tokens,
        BLOCK=block,
        SLOTS=_slots_at_once(plan),
    )
    return layout.finish(target, out)


def spread(x: Tensor, weights: Tensor | None, plan: PlanTensors, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [R, H] result, or writes `out`, of any strides."""
    num_rows = plan.slot_of_row.shape[0]
    target = layout.target(out, (num_rows, x.shape[1]), x.dtype, x.device)
    written = target
    if weights is None:
        x, written = layout.bits(x), layout.bits(target)
    x = layout.rows(x)
    (num_tokens, hidden), size = x.shape, x.element_size()
    block, zero_block = _block(hidden, size), tile_rows(4 * hidden, ZERO_BLOCK)
    slots = _slots_at_once(plan)
    tokens, zero_rows = tile_rows(num_tokens, 1, slots * block), tile_rows(num_rows, ZERO_ROWS, zero_block)
    copies = programs(num_tokens, tokens) * programs(hidden, block)
    launch(
        spread_kernel,
        copies + programs(num_rows, zero_rows),
        out=written,
        x=x,
        weights=layout.contiguous(weights),
        row_of_slot=plan.row_of_slot,
        slot_of_row=plan.slot_of_row,
        slot_offsets=plan.slot_offsets,
        num_tokens=num_tokens,
        topk=topk_of(plan),
        num_slots=plan.row_of_slot.shape[0],
        num_rows=num_rows,
        hidden=hidden,
        out_stride=written.stride(0),
        x_stride=x.stride(0),
        programs=copies,
        warps=_warps(block, size),
        TOKENS=tokens,
        BLOCK=block,
        SLOTS=slots,
        ROWS=zero_rows,
        ZERO_BLOCK=zero_block,
    )
    return layout.finish(target, out)


def _dots(
    dots: Tensor,
    out: Tensor | None,
    rows: Tensor,
    x: Tensor,
    weights: Tensor | None,
    bias: Tensor | None,
    plan: PlanTensors,
) -> None:
    """The dot products into `dots`; with `out` the spread rows too."""
    rows, x = layout.rows(rows), layout.rows(x)
    (num_rows, hidden), num_slots = rows.shape, plan.row_of_slot.shape[0]
    zero_block = tile_rows(4 * hidden, ZERO_BLOCK)
    slots, zero_rows = tile_rows(num_slots, DOT_SLOTS, 256), tile_rows(num_rows, ZERO_ROWS, zero_block)
    products = programs(num_slots, slots)
    launch(
        dots_kernel,
        products + (0 if out is None else programs(num_rows, zero_rows)),
        dots=dots,
        out=out,
        y=rows,
        x=x,
        weights=weights,
        bias=bias,
        row_of_slot=plan.row_of_slot,
        slot_of_row=None if out is None else plan.slot_of_row,
        expert_of_slot=None if bias is None else plan.expert_of_slot,
        token_of_slot=owner_of_slot(plan),
        slot_offsets=plan.slot_offsets,
        num_tokens=plan.num_tokens,
        topk=topk_of(plan),
        num_slots=num_slots,
        num_rows=num_rows,
        num_experts=0 if bias is None else bias.shape[0],
        hidden=hidden,
        out_stride=0 if out is None else out.stride(0),
        y_stride=rows.stride(0),
        x_stride=x.stride(0),
        programs=products,
        warps=DOT_SLOTS,
        spare=out is None or not _aligned(rows, x, out),
        SLOTS=slots,
        ROWS=zero_rows,
        ZERO_BLOCK=zero_block,
    )


def row_dots(
    rows: Tensor,
    x: Tensor,
    plan: PlanTensors,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Allocates the [S] result, or writes `out`, of any stride."""
    dots = layout.target(out, (plan.row_of_slot.shape[0],), dtype, rows.device)
    _dots(dots, None, rows, x, None, layout.contiguous(bias), plan)
    return layout.finish(dots, out)


def spread_dots(
    x: Tensor,
    rows: Tensor,
    weights: Tensor,
    plan: PlanTensors,
    *,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Allocates the [R, H] and [S] results, or writes what `out` has of them, of any strides."""
    target = layout.target(out[0], (plan.slot_of_row.shape[0], x.shape[1]), x.dtype, x.device)
    dots = layout.target(out[1], (plan.row_of_slot.shape[0],), weights.dtype, x.device)
    _dots(dots, target, rows, x, weights.contiguous(), None, plan)
    return layout.finish(target, out[0]), layout.finish(dots, out[1])
