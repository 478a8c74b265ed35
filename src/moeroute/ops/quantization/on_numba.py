"""Rows as int8 on the CPU: kernels, then launchers.

256 elements at a time are quantised into a work space, from which they are copied: to each of a token's rows, and past
the caches where the result is large. Memory takes one piece while the next one is divided: up to 15 % less time than
whole rows. Each piece has a place of its own in the work space: in one place for all it took 1.3 to 1.7 times as long.
An int8 is the low byte of an integer, so its rows are written as bytes.
"""

import numpy as np
import torch
from numba import int64
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.numba_kit.blocks import COPY_BYTES, fence, load, prefetch, splat
from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.lanes import bits, choose, floats, ints, largest, store_low_bytes
from moeroute.ops.numba_kit.launch import FLOATS, kernel
from moeroute.ops.numba_kit.pointers import (
    LANES,
    float32_ptr,
    int32_ptr,
    is_null,
    pointer_to,
    retyped,
    uint8_ptr,
)
from moeroute.ops.numba_kit.row_sums import load_part
from moeroute.ops.numba_kit.slots import ZERO, Rows, Slots, first_slot, matrix, plan_slots
from moeroute.ops.rows.on_numba import copy_row, past_caches, zero_unused_rows
from moeroute.plan import PlanTensors

MAGNITUDE = np.int32(0x7FFFFFFF)
PLACES = 64  # rows of a token that are written at once
LARGEST, SMALLEST, BELOW = np.float32(127), np.float32(-128), np.float32(-129)
ROUNDS = np.float32(12582912)  # 1.5 · 2^23: in a sum with it the last bit is 1, and the low byte is that of the integer

NORMAL, INFINITY = np.float32(2.0**-126), np.float32(np.inf)

# ---------------------------------------------------------------------------- kernels: one row


@helper
def store_int8(out, offset, values):
    """The nearest integers, ties to even, saturated; 0 for NaN. All 64 are written."""
    values = choose(values > splat(LARGEST), splat(LARGEST), values)
    values = choose(splat(SMALLEST) > values, splat(SMALLEST), values)
    integers = bits(values + splat(ROUNDS))
    store_low_bytes(out, offset, choose(values > splat(BELOW), integers, ints(np.int32(0))))


@helper
def smoothed(x, x_offset, smooth, smooth_offset, count):
    """A block of x, times its factors; a smooth_offset below 0 means none."""
    if smooth_offset >= 0:
        return load_part(x, x_offset, count) * load_part(smooth, smooth_offset, count)
    return load_part(x, x_offset, count)


@helper
def scale_of(x, x_offset, smooth, smooth_offset, hidden):
    """The largest magnitude / 127. As integers magnitudes have the same order, and a NaN is above all of them."""
    top = ints(np.int32(0))
    for h in range(0, hidden, LANES):
        at = smooth_offset + h if smooth_offset >= 0 else smooth_offset
        found = bits(smoothed(x, x_offset + h, smooth, at, min(LANES, hidden - h))) & ints(MAGNITUDE)
        top = choose(found > top, found, top)
    return floats(largest(top)) / LARGEST


@helper
def quotients(made, offset, x, x_offset, next_offset, smooth, smooth_offset, scale, count):
    """`count` elements over their scale into `made`, in whole blocks.

    The elements at next_offset are asked for meanwhile: memory has nothing else to do while these are divided.
    """
    # Then no element is infinite or NaN, and no quotient beyond 127: nothing to saturate.
    usual = NORMAL <= scale < INFINITY
    if usual and smooth_offset < 0 and count == COPY_BYTES:
        for h in range(0, COPY_BYTES, LANES):
            prefetch(x, next_offset + h)
            store_low_bytes(made, offset + h, bits(load(x, x_offset + h) / splat(scale) + splat(ROUNDS)))
        return
    for h in range(0, count, LANES):
        at = smooth_offset + h if smooth_offset >= 0 else smooth_offset
        prefetch(x, next_offset + h)
        store_int8(made, offset + h, smoothed(x, x_offset + h, smooth, at, min(LANES, count - h)) / splat(scale))


@helper
def quantize_row(
    out, out_stride, places, num_places, made, x, x_offset, next_offset, smooth, smooth_offset, hidden, streaming
):
    """A row of x to each of the rows in `places`; returns its scale. `next_offset`: as in `quotients`."""
    scale = scale_of(x, x_offset, smooth, smooth_offset, hidden)
    for b in range(0, hidden, COPY_BYTES):
        count = min(COPY_BYTES, hidden - b)
        at = smooth_offset + b if smooth_offset >= 0 else smooth_offset
        quotients(made, b, x, x_offset + b, next_offset + b, smooth, at, scale, count)
        for i in range(num_places):
            copy_row(out, places[i] * out_stride + b, made, b, count, streaming)
    return scale


@helper
def quantize_row_by(out, out_stride, places, num_places, made, x, x_offset, factor, summand, hidden, streaming):
    """A row of x, by the scale and the offset of all rows, to each of the rows in `places`."""
    for b in range(0, hidden, COPY_BYTES):
        count = min(COPY_BYTES, hidden - b)
        for h in range(0, count, LANES):
            product = load_part(x, x_offset + b + h, min(LANES, count - h)) * factor
            store_int8(made, b + h, product + summand)
        for i in range(num_places):
            copy_row(out, places[i] * out_stride + b, made, b, count, streaming)


@helper
def factors_of(row, smooth, expert_of_row, num_experts):
    """Which row of `smooth` has the factors of this row; -1: none."""
    if is_null(smooth):
        return int64(-1)
    if is_null(expert_of_row):
        return int64(0)
    expert = int64(expert_of_row[row])
    return expert if 0 <= expert < num_experts else int64(-1)


# ---------------------------------------------------------------------------- kernels


@kernel(keys=FLOATS)
def dynamic_kernel(
    out: uint8_ptr,
    scales: float32_ptr,
    rows: Rows,
    smooth: float32_ptr,
    expert_of_row: int32_ptr,
    num_experts: int64,
    hidden: int64,
    out_stride: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """Quantise each row by its own largest magnitude."""
    work, places = np.empty(hidden // 4 + LANES, np.float32), np.empty(PLACES, np.int64)
    made = retyped(pointer_to(work), "uint8")
    for r in range(lo, hi):
        factors = factors_of(r, smooth, expert_of_row, num_experts)
        here, after = r * rows.stride, min(r + 1, hi - 1) * rows.stride
        places[0], at = r, factors * hidden
        scales[r] = quantize_row(
            out, out_stride, places, 1, made, rows.data, here, after, smooth, at, hidden, streaming
        )
    fence()
    work[0] = ZERO  # an array is freed after its last use, whoever has its address


@kernel(keys=FLOATS)
def static_kernel(
    out: uint8_ptr,
    rows: Rows,
    scale: float32_ptr,
    offset: float32_ptr,
    hidden: int64,
    out_stride: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """`round(x * scale + offset)` with one scale and one offset for all rows."""
    work, places = np.empty(hidden // 4 + LANES, np.float32), np.empty(PLACES, np.int64)
    made = retyped(pointer_to(work), "uint8")
    factor, summand = splat(scale[0]), splat(offset[0])
    for r in range(lo, hi):
        places[0] = r
        quantize_row_by(
            out, out_stride, places, 1, made, rows.data, r * rows.stride, factor, summand, hidden, streaming
        )
    fence()
    work[0] = ZERO


@kernel(keys=FLOATS)
def spread_static_kernel(
    out: uint8_ptr,
    x: Rows,
    scale: float32_ptr,
    offset: float32_ptr,
    slots: Slots,
    hidden: int64,
    out_stride: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """Quantise a token once, by one scale and one offset, and copy it to each of its rows."""
    work, places = np.empty(hidden // 4 + LANES, np.float32), np.empty(PLACES, np.int64)
    made = retyped(pointer_to(work), "uint8")
    factor, summand = splat(scale[0]), splat(offset[0])
    for t in range(lo, min(hi, slots.num_tokens)):
        s, last = first_slot(slots, t), first_slot(slots, t + 1)
        while s < last:
            found = 0
            while s < last and found < PLACES:
                r = int64(slots.row_of_slot[s])
                if 0 <= r < slots.num_rows and slots.slot_of_row[r] == s:
                    places[found] = r
                    found += 1
                s += 1
            if found > 0:
                quantize_row_by(
                    out, out_stride, places, found, made, x.data, t * x.stride, factor, summand, hidden, streaming
                )
    fence()
    zero_unused_rows(out, slots, hidden, out_stride, lo, hi)
    work[0] = ZERO


@kernel(keys=FLOATS)
def spread_quantized_kernel(
    out: uint8_ptr,
    scales: float32_ptr,
    scale_bytes: uint8_ptr,
    x: Rows,
    smooth: float32_ptr,
    expert_of_row: int32_ptr,
    slots: Slots,
    num_experts: int64,
    hidden: int64,
    out_stride: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """Quantise a token once and copy it to each of its rows; again only where the factors change."""
    work, places = np.empty(hidden // 4 + LANES, np.float32), np.empty(PLACES, np.int64)
    made = retyped(pointer_to(work), "uint8")
    for t in range(lo, min(hi, slots.num_tokens)):
        here, after = t * x.stride, min(t + 1, hi - 1) * x.stride
        s, last = first_slot(slots, t), first_slot(slots, t + 1)
        while s < last:
            found, factors = 0, int64(-1)
            while s < last and found < PLACES:
                r = int64(slots.row_of_slot[s])
                if 0 <= r < slots.num_rows and slots.slot_of_row[r] == s:
                    wanted = factors_of(r, smooth, expert_of_row, num_experts)
                    if found > 0 and wanted != factors:
                        break
                    places[found], factors = r, wanted
                    found += 1
                s += 1
            if found > 0:
                at = factors * hidden
                scale = quantize_row(
                    out, out_stride, places, found, made, x.data, here, after, smooth, at, hidden, streaming
                )
                for i in range(found):
                    scales[places[i]] = scale
    fence()
    zero_unused_rows(out, slots, hidden, out_stride, lo, hi)
    zero_unused_rows(scale_bytes, slots, int64(4), int64(4), lo, hi)
    work[0] = ZERO


# ---------------------------------------------------------------------------- launchers


def dynamic_quantize(
    rows: Tensor,
    smooth: Tensor | None,
    expert_of_row: Tensor | None,
    *,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Allocates the [R, H] and [R] results, or writes what `out` has of them, of any strides."""
    rows, smooth = layout.rows(rows), layout.contiguous(smooth)
    (num_rows, hidden), size = rows.shape, rows.element_size()
    target = layout.target(out[0], (num_rows, hidden), torch.int8)
    scales = layout.target(out[1], (num_rows,), torch.float32)
    dynamic_kernel(
        rows.dtype,
        items=num_rows,
        work=num_rows * hidden * (size + 1),
        out=target.data_ptr(),
        scales=scales.data_ptr(),
        rows=matrix(rows),
        smooth=layout.address(smooth),
        expert_of_row=layout.address(expert_of_row),
        num_experts=0 if smooth is None else smooth.shape[0],
        hidden=hidden,
        out_stride=target.stride(0),
        streaming=past_caches(target.data_ptr(), target.stride(0), target.numel()),
    )
    return layout.finish(target, out[0]), layout.finish(scales, out[1])


def quantize(rows: Tensor, scale: Tensor, offset: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [R, H] result, or writes `out`, of any strides."""
    rows = layout.rows(rows)
    (num_rows, hidden), size = rows.shape, rows.element_size()
    target = layout.target(out, (num_rows, hidden), torch.int8)
    static_kernel(
        rows.dtype,
        items=num_rows,
        work=num_rows * hidden * (size + 1),
        out=target.data_ptr(),
        rows=matrix(rows),
        scale=scale.data_ptr(),
        offset=offset.data_ptr(),
        hidden=hidden,
        out_stride=target.stride(0),
        streaming=past_caches(target.data_ptr(), target.stride(0), target.numel()),
    )
    return layout.finish(target, out)


def spread_static(x: Tensor, scale: Tensor, offset: Tensor, plan: PlanTensors, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [R, H] result, or writes `out`, of any strides."""
    x = layout.rows(x)
    (num_tokens, hidden), num_rows, size = x.shape, plan.slot_of_row.numel(), x.element_size()
    target = layout.target(out, (num_rows, hidden), torch.int8)
    spread_static_kernel(
        x.dtype,
        items=num_tokens or 1,
        work=(num_rows + num_tokens * size) * hidden,
        out=target.data_ptr(),
        x=matrix(x),
        scale=scale.data_ptr(),
        offset=offset.data_ptr(),
        slots=plan_slots(plan, num_rows),
        hidden=hidden,
        out_stride=target.stride(0),
        streaming=past_caches(target.data_ptr(), target.stride(0), target.numel()),
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
    x, smooth = layout.rows(x), layout.contiguous(smooth)
    (num_tokens, hidden), num_rows, size = x.shape, plan.slot_of_row.numel(), x.element_size()
    target = layout.target(out[0], (num_rows, hidden), torch.int8)
    scales = layout.target(out[1], (num_rows,), torch.float32)
    spread_quantized_kernel(
        x.dtype,
        items=num_tokens or 1,
        work=(num_rows + num_tokens * size) * hidden,
        out=target.data_ptr(),
        scales=scales.data_ptr(),
        scale_bytes=scales.data_ptr(),
        x=matrix(x),
        smooth=layout.address(smooth),
        expert_of_row=layout.address(expert_of_row),
        slots=plan_slots(plan, num_rows),
        num_experts=0 if smooth is None else smooth.shape[0],
        hidden=hidden,
        out_stride=target.stride(0),
        streaming=past_caches(target.data_ptr(), target.stride(0), target.numel()),
    )
    return layout.finish(target, out[0]), layout.finish(scales, out[1])
