"""Rows as int8 in Triton: kernels, then launchers.

A program has whole rows, up to BLOCK elements at a time: it looks for the largest magnitude, then divides and rounds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.rows.on_triton import ZERO_BLOCK, ZERO_ROWS, slots_of, topk_of, zero_unused_rows
from moeroute.ops.triton_kit import launch, power_of_two, programs, tile_rows, widen
from moeroute.plan import PlanTensors

LARGEST_BLOCK = 4096  # elements of a row at a time

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23: in a sum with it the last bit is 1
_ROUNDS_BITS = tl.constexpr(0x4B400000)

# ---------------------------------------------------------------------------- kernels: a tile of rows


@triton.jit
def nearest_int8(values):
    """To nearest, ties to even, saturated; 0 for NaN."""
    values = tl.where(values > 127.0, 127.0, values)
    values = tl.where(values < -128.0, -128.0, values)
    integers = (values + _ROUNDS).to(tl.int32, bitcast=True) - _ROUNDS_BITS
    return tl.where(values == values, integers, 0).to(tl.int8)


@triton.jit
def smoothed(x_at, smooth, smooth_at, expert_of_row, hidden, column, inside, known):
    """Elements times their factors; rows without a `known` expert have none."""
    values = widen(tl.load(x_at + column, mask=inside, other=0))
    if smooth is not None:
        if expert_of_row is None:  # one row of factors, read once: Ascend's compiler takes no stride of 0
            values = values * tl.load(smooth + column, mask=column < hidden, other=1.0)
        else:
            values = values * tl.load(smooth_at + column, mask=inside & known, other=1.0)
    return values


@triton.jit
def scale_of(x_at, smooth, smooth_at, expert_of_row, live, known, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest magnitude / 127. As integers magnitudes have the same order, and a NaN is above all of them."""
    top = tl.zeros((ROWS,), tl.int32)
    for h in range(0, hidden, BLOCK):
        column = (h + tl.arange(0, BLOCK))[None, :]
        values = smoothed(x_at, smooth, smooth_at, expert_of_row, hidden, column, live & (column < hidden), known)
        top = tl.maximum(top, tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1))
    top = top.to(tl.float32, bitcast=True)
    return tl.math.div_rn(top, tl.full(top.shape, 127.0, tl.float32))


@triton.jit
def quotients(x_at, smooth, smooth_at, expert_of_row, hidden, column, inside, known, scale):
    """`x * smooth / scale` as int8; the division is exact (`div_rn`)."""
    values = smoothed(x_at, smooth, smooth_at, expert_of_row, hidden, column, inside, known)
    return nearest_int8(tl.math.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)))


@triton.jit
def factors_of(smooth, expert_of_row, row, used, num_experts, hidden):
    """Where the factors of each row are, and whether it has any; without factors the first is not read."""
    if smooth is None:
        return used[:, None], used[:, None]  # Ascend's compiler takes no None out of a function
    else:
        if expert_of_row is None:
            return used[:, None], used[:, None]
        else:
            expert = tl.load(expert_of_row + row, mask=used, other=-1)
            known = (expert >= 0) & (expert < num_experts)
            return smooth + expert.to(tl.int64)[:, None] * hidden, known[:, None]


# ---------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def dynamic_kernel(
    out, scales, rows, smooth, expert_of_row, num_rows, num_experts, hidden, out_stride, rows_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise each row by its own largest magnitude; the row is read twice."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (row >= 0) & (row < num_rows)
    x_at = rows + row.to(tl.int64)[:, None] * rows_stride
    out_at = out + row.to(tl.int64)[:, None] * out_stride
    live = valid[:, None]
    smooth_at, known = factors_of(smooth, expert_of_row, row, valid, num_experts, hidden)
    scale = scale_of(x_at, smooth, smooth_at, expert_of_row, live, known, hidden, ROWS, BLOCK)
    tl.store(scales + row, scale, mask=valid)
    for h in range(0, hidden, BLOCK):
        column = (h + tl.arange(0, BLOCK))[None, :]
        inside = live & (column < hidden)
        tl.store(
            out_at + column,
            quotients(x_at, smooth, smooth_at, expert_of_row, hidden, column, inside, known, scale),
            mask=inside,
        )


@triton.jit(do_not_specialize=["num_rows"])
def static_kernel(
    out, rows, scale, offset, num_rows, hidden, out_stride, rows_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """`round(x * scale + offset)` with one scale and one offset for all rows."""
    blocks = tl.cdiv(hidden, BLOCK)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = ((row >= 0) & (row < num_rows))[:, None] & (column < hidden)
    at = row.to(tl.int64)[:, None]
    product = widen(tl.load(rows + at * rows_stride + column, mask=inside, other=0)) * tl.load(scale)
    tl.store(out + at * out_stride + column, nearest_int8(product + tl.load(offset)), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "topk", "num_slots", "num_rows", "programs"])
def spread_static_kernel(
    out, x, scale, offset, row_of_slot, slot_of_row, slot_offsets, num_tokens, topk, num_slots, num_rows, hidden,
    out_stride, x_stride, programs, TOKENS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ZERO_BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `programs` programs quantise, the others look for rows to fill with zeros."""
    blocks = tl.cdiv(hidden, BLOCK)
    tile = tl.program_id(0)
    if tile < programs:
        token = tile // blocks * TOKENS + tl.arange(0, TOKENS)
        column = (tile % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
        valid = (token >= 0) & (token < num_tokens)
        first, last = slots_of(slot_offsets, topk, num_slots, token, valid)
        x_at = x + token.to(tl.int64)[:, None] * x_stride
        values = widen(tl.load(x_at + column, mask=valid[:, None] & (column < hidden), other=0))
        made = nearest_int8(values * tl.load(scale) + tl.load(offset))
        for k in range(0, tl.max(last - first, axis=0)):
            row, used = row_of(row_of_slot, slot_of_row, first + k, last, num_rows)
            out_at = out + row.to(tl.int64)[:, None] * out_stride
            tl.store(out_at + column, made, mask=used[:, None] & (column < hidden))
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


@triton.jit(do_not_specialize=["num_tokens", "topk", "num_slots", "num_rows", "num_experts", "programs"])
def spread_quantized_kernel(
    out, scales, x, smooth, expert_of_row, row_of_slot, slot_of_row, slot_offsets, num_tokens, topk, num_slots,
    num_rows, num_experts, hidden, out_stride, x_stride, programs, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ZERO_BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `programs` programs quantise, the others look for rows to fill with zeros."""
    tile = tl.program_id(0)
    if tile < programs:
        token = tile * TOKENS + tl.arange(0, TOKENS)
        valid = (token >= 0) & (token < num_tokens)
        live = valid[:, None]
        first, last = slots_of(slot_offsets, topk, num_slots, token, valid)
        most = tl.max(last - first, axis=0)
        x_at = x + token.to(tl.int64)[:, None] * x_stride
        if expert_of_row is None:
            # One scale for all of a token's rows: each element is divided once.
            smooth_at, known = factors_of(smooth, None, token, valid, num_experts, hidden)
            scale = scale_of(x_at, smooth, smooth_at, expert_of_row, live, known, hidden, TOKENS, BLOCK)
            for h in range(0, hidden, BLOCK):
                column = (h + tl.arange(0, BLOCK))[None, :]
                inside = live & (column < hidden)
                made = quotients(x_at, smooth, smooth_at, expert_of_row, hidden, column, inside, known, scale)
                for k in range(0, most):
                    row, used = row_of(row_of_slot, slot_of_row, first + k, last, num_rows)
                    out_at = out + row.to(tl.int64)[:, None] * out_stride
                    tl.store(out_at + column, made, mask=used[:, None] & (column < hidden))
            for k in range(0, most):
                row, used = row_of(row_of_slot, slot_of_row, first + k, last, num_rows)
                tl.store(scales + row, scale, mask=used)
        else:
            for k in range(0, most):
                row, used = row_of(row_of_slot, slot_of_row, first + k, last, num_rows)
                smooth_at, known = factors_of(smooth, expert_of_row, row, used, num_experts, hidden)
                scale = scale_of(x_at, smooth, smooth_at, expert_of_row, live, known, hidden, TOKENS, BLOCK)
                tl.store(scales + row, scale, mask=used)
                out_at = out + row.to(tl.int64)[:, None] * out_stride
                for h in range(0, hidden, BLOCK):
                    column = (h + tl.arange(0, BLOCK))[None, :]
                    inside = used[:, None] & (column < hidden)
                    tl.store(
                        out_at + column,
                        quotients(x_at, smooth, smooth_at, expert_of_row, hidden, column, inside, known, scale),
                        mask=inside,
                    )
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
        zero_unused_rows(
            scales,
            row_of_slot,
            slot_of_row,
            slot_offsets,
            topk,
            num_slots,
            num_rows,
            num_tokens,
            1,
            1,
            tile - programs,
            ROWS,
            ZERO_BLOCK,
        )


@triton.jit
def row_of(row_of_slot, slot_of_row, slot, last, num_rows):
    """The row of each slot, and whether it is the slot's own."""
    live = (slot >= 0) & (slot < last)
    row = tl.load(row_of_slot + slot, mask=live, other=-1)
    named = (row >= 0) & (row < num_rows)
    return row, named & (tl.load(slot_of_row + row, mask=named, other=-1) == slot)


# ---------------------------------------------------------------------------- launchers


def _block(hidden: int) -> int:
    return min(power_of_two(max(hidden, 128)), LARGEST_BLOCK)


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 8)


def dynamic_quantize(
    rows: Tensor,
    smooth: Tensor | None,
    expert_of_row: Tensor | None,
    *,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Allocates the [R, H] and [R] results, or writes what `out` has of them, of any strides."""
    rows = layout.rows(rows)
    num_rows, hidden = rows.shape
    target = layout.target(out[0], (num_rows, hidden), torch.int8, rows.device)
    scales = layout.target(out[1], (num_rows,), torch.float32, rows.device)
    block = _block(hidden)
    tile = tile_rows(num_rows, 1, block)
    launch(
        dynamic_kernel,
        programs(num_rows, tile),
        out=target,
        scales=scales,
        rows=rows,
        smooth=layout.contiguous(smooth),
        expert_of_row=None if smooth is None else expert_of_row,
        num_rows=num_rows,
        num_experts=0 if smooth is None else smooth.shape[0],
        hidden=hidden,
        out_stride=target.stride(0),
        rows_stride=rows.stride(0),
        warps=_warps(block),
        ROWS=tile,
        BLOCK=block,
    )
    return layout.finish(target, out[0]), layout.finish(scales, out[1])


def quantize(rows: Tensor, scale: Tensor, offset: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [R, H] result, or writes `out`, of any strides."""
    rows = layout.rows(rows)
    num_rows, hidden = rows.shape
    target = layout.target(out, (num_rows, hidden), torch.int8, rows.device)
    block = _block(hidden)
    tile = tile_rows(num_rows, 1, block)
    launch(
        static_kernel,
        programs(num_rows, tile) * programs(hidden, block),
        out=target,
        rows=rows,
        scale=scale,
        offset=offset,
        num_rows=num_rows,
        hidden=hidden,
        out_stride=target.stride(0),
        rows_stride=rows.stride(0),
        warps=_warps(block),
        ROWS=tile,
        BLOCK=block,
    )
    return layout.finish(target, out)


def spread_static(x: Tensor, scale: Tensor, offset: Tensor, plan: PlanTensors, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [R, H] result, or writes `out`, of any strides."""
    x = layout.rows(x)
    (num_tokens, hidden), num_rows = x.shape, plan.slot_of_row.shape[0]
    target = layout.target(out, (num_rows, hidden), torch.int8, x.device)
    block, zero_block = _block(hidden), tile_rows(4 * hidden, ZERO_BLOCK)
    tokens, zero_rows = tile_rows(num_tokens, 1, block), tile_rows(num_rows, ZERO_ROWS, zero_block)
    quantised = programs(num_tokens, tokens) * programs(hidden, block)
    launch(
        spread_static_kernel,
        quantised + programs(num_rows, zero_rows),
        out=target,
        x=x,
        scale=scale,
        offset=offset,
        row_of_slot=plan.row_of_slot,
        slot_of_row=plan.slot_of_row,
        slot_offsets=plan.slot_offsets,
        num_tokens=num_tokens,
        topk=topk_of(plan),
        num_slots=plan.row_of_slot.shape[0],
        num_rows=num_rows,
        hidden=hidden,
        out_stride=target.stride(0),
        x_stride=x.stride(0),
        programs=quantised,
        warps=_warps(block),
        spare=True,
        TOKENS=tokens,
        BLOCK=block,
        ROWS=zero_rows,
        ZERO_BLOCK=zero_block,
    )
    return layout.finish(target, out)


def spread_quantized(
    x: Tensor,
    smooth: Tensor | None,
    expert_of_row: Tensor | None,
    plan: PlanTensors,
    *,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Allocates the [R, H] and [R] results, or writes what `out` has of them, of any strides."""
    x = layout.rows(x)
    (num_tokens, hidden), num_rows = x.shape, plan.slot_of_row.shape[0]
    target = layout.target(out[0], (num_rows, hidden), torch.int8, x.device)
    scales = layout.target(out[1], (num_rows,), torch.float32, x.device)
    block, zero_block = _block(hidden), tile_rows(4 * hidden, ZERO_BLOCK)
    tokens, zero_rows = tile_rows(num_tokens, 1, block), tile_rows(num_rows, ZERO_ROWS, zero_block)
    quantised = programs(num_tokens, tokens)
    launch(
        spread_quantized_kernel,
        quantised + programs(num_rows, zero_rows),
        out=target,
        scales=scales,
        x=x,
        smooth=layout.contiguous(smooth),
        expert_of_row=None if smooth is None else expert_of_row,
        row_of_slot=plan.row_of_slot,
        slot_of_row=plan.slot_of_row,
        slot_offsets=plan.slot_offsets,
        num_tokens=num_tokens,
        topk=topk_of(plan),
        num_slots=plan.row_of_slot.shape[0],
        num_rows=num_rows,
        num_experts=0 if smooth is None else smooth.shape[0],
        hidden=hidden,
        out_stride=target.stride(0),
        x_stride=x.stride(0),
        programs=quantised,
        warps=_warps(block),
        spare=True,
        TOKENS=tokens,
        BLOCK=block,
        ROWS=zero_rows,
        ZERO_BLOCK=zero_block,
    )
    return layout.finish(target, out[0]), layout.finish(scales, out[1])
