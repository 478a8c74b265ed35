"""The row operators on the CPU: kernels, then launchers.

All walk token by token. A slot's row index is range-checked before it is used, whatever the plan
says. Offsets are int64: an int32 row index times an int64 stride is one.
"""

import numpy as np
import torch
from numba import int64
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.numba_kit.blocks import (
    COPY_BYTES,
    copy,
    copy_stream,
    copy_tail,
    fence,
    load,
    load_tail,
    pairwise,
    prefetch,
    splat,
    store_tail,
    zeros,
)
from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.launch import FLOATS, SERIAL_WORK, element_ptr, kernel
from moeroute.ops.numba_kit.pointers import ALIGNMENT, LANES, float32_ptr, is_null, uint8_ptr
from moeroute.ops.numba_kit.row_sums import dot_row, load_part, store_block, store_part
from moeroute.ops.numba_kit.slots import ZERO, Rows, Slots, first_slot, plan_slots, zero_unowned_slots
from moeroute.plan import PlanTensors

# Outputs from here on go past the caches. Below it the next operator finds them in the cache.
STREAM_BYTES = 4 << 20

AHEAD_BYTES = 8192


# ---------------------------------------------------------------------------- kernels: combine


@helper
def prefetch_ahead(rows, slots, slot, next_slot, at, ahead, hidden):
    """Prefetch the two blocks that the sum over this slot needs `ahead` elements later.

    They are in its row, or behind the row's end in that of the next token: so every line is asked for,
    the first ones of a row too, which no hardware guesses.
    """
    if ahead > 0:
        if at + ahead < hidden:
            asked = slots.row_of_slot[slot] * rows.stride + at + ahead
        else:
            asked = slots.row_of_slot[min(next_slot, slots.num_slots - 1)] * rows.stride + at + ahead - hidden
        prefetch(rows.data, asked)
        prefetch(rows.data, asked + LANES)


@kernel(keys=FLOATS)
def combine_plain(
    out: Rows, rows: Rows, slots: Slots, hidden: int64, ahead: int64, streaming: int64, lo: int64, hi: int64
):
    """Sum of each token's rows, in the order of its slots."""
    whole = hidden - hidden % (2 * LANES)
    for t in range(lo, hi):
        first, last = first_slot(slots, t), first_slot(slots, t + 1)
        # Two blocks at a time: longer pieces of each row, 83 GB/s instead of 70 for 8 rows of 14 KiB.
        for h in range(0, whole, 2 * LANES):
            left, right = zeros(), zeros()
            for s in range(first, last):
                r = slots.row_of_slot[s]
                if 0 <= r < slots.num_rows:
                    prefetch_ahead(rows, slots, s, s + last - first, h, ahead, hidden)
                    left = left + load(rows.data, r * rows.stride + h)
                    right = right + load(rows.data, r * rows.stride + h + LANES)
            store_block(out.data, t * out.stride + h, left, streaming)
            store_block(out.data, t * out.stride + h + LANES, right, streaming)
        for h in range(whole, hidden, LANES):
            count = min(LANES, hidden - h)
            left = zeros()
            for s in range(first, last):
                r = slots.row_of_slot[s]
                if 0 <= r < slots.num_rows:
                    left = left + load_part(rows.data, r * rows.stride + h, count)
            store_part(out.data, t * out.stride + h, left, count)
    fence()


@kernel(keys=FLOATS)
def combine_weighted(
    out: Rows,
    rows: Rows,
    weights: float32_ptr,
    slots: Slots,
    hidden: int64,
    ahead: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """Weighted sum of each token's rows; a row of weight 0 is not read."""
    whole = hidden - hidden % (2 * LANES)
    for t in range(lo, hi):
        first, last = first_slot(slots, t), first_slot(slots, t + 1)
        for h in range(0, whole, 2 * LANES):
            left, right = zeros(), zeros()
            for s in range(first, last):
                r = slots.row_of_slot[s]
                w = weights[s]
                if 0 <= r < slots.num_rows and w != ZERO:
                    prefetch_ahead(rows, slots, s, s + last - first, h, ahead, hidden)
                    left = left + splat(w) * load(rows.data, r * rows.stride + h)
                    right = right + splat(w) * load(rows.data, r * rows.stride + h + LANES)
            store_block(out.data, t * out.stride + h, left, streaming)
            store_block(out.data, t * out.stride + h + LANES, right, streaming)
        for h in range(whole, hidden, LANES):
            count = min(LANES, hidden - h)
            left = zeros()
            for s in range(first, last):
                r = slots.row_of_slot[s]
                w = weights[s]
                if 0 <= r < slots.num_rows and w != ZERO:
                    left = left + splat(w) * load_part(rows.data, r * rows.stride + h, count)
            store_part(out.data, t * out.stride + h, left, count)
    fence()


@kernel(keys=FLOATS)
def combine_biased(
    out: Rows,
    rows: Rows,
    weights: float32_ptr,
    init: Rows,
    init_more: Rows,
    bias: element_ptr,
    slots: Slots,
    num_experts: int64,
    hidden: int64,
    lo: int64,
    hi: int64,
):
    """The general sum: initial rows, a bias for each expert, weights; each may be absent."""
    for t in range(lo, hi):
        first, last = first_slot(slots, t), first_slot(slots, t + 1)
        for h in range(0, hidden, LANES):
            count = min(LANES, hidden - h)
            total = zeros()
            if not is_null(init.data):
                total = load_part(init.data, t * init.stride + h, count)
            if not is_null(init_more.data):
                total = total + load_part(init_more.data, t * init_more.stride + h, count)
            for s in range(first, last):
                r = int64(slots.row_of_slot[s])
                w = np.float32(1)
                if not is_null(weights):
                    w = weights[s]
                if 0 <= r < slots.num_rows and w != ZERO:
                    term = load_part(rows.data, r * rows.stride + h, count)
                    if not is_null(bias):
                        e = int64(slots.expert_of_slot[s])
                        if 0 <= e < num_experts:
                            term = term + load_part(bias, e * hidden + h, count)
                    if not is_null(weights):
                        term = splat(w) * term
                    total = total + term
            store_part(out.data, t * out.stride + h, total, count)


# ---------------------------------------------------------------------------- kernels: spread


@helper
def copy_row(out, out_offset, source, source_offset, count, streaming):
    """`count` bytes as they are."""
    whole = count - count % COPY_BYTES
    if streaming:
        for b in range(0, whole, COPY_BYTES):
            copy_stream(out, out_offset + b, source, source_offset + b)
    else:
        for b in range(0, whole, COPY_BYTES):
            copy(out, out_offset + b, source, source_offset + b)
    for b in range(whole, count, 64):
        copy_tail(out, out_offset + b, source, source_offset + b, min(64, count - b))


@helper
def zero_unused_rows(out, slots, row_bytes, stride_bytes, lo, hi):
    """Zeros in the rows that no token's slot fills; the chunk [lo, hi) of the tokens takes its share of the rows."""
    first, last = first_slot(slots, 0), first_slot(slots, slots.num_tokens)
    items = max(slots.num_tokens, 1)
    for r in range(lo * slots.num_rows // items, hi * slots.num_rows // items):
        s = slots.slot_of_row[r]
        if not (first <= s < last and slots.row_of_slot[s] == r):
            for b in range(row_bytes):
                out[r * stride_bytes + b] = np.uint8(0)


@kernel(keys=("bytes",))
def spread_bytes(
    out: uint8_ptr,
    x: uint8_ptr,
    slots: Slots,
    row_bytes: int64,
    out_stride: int64,
    x_stride: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """Strides in bytes."""
    for t in range(lo, min(hi, slots.num_tokens)):
        for s in range(first_slot(slots, t), first_slot(slots, t + 1)):
            r = slots.row_of_slot[s]
            if 0 <= r < slots.num_rows and slots.slot_of_row[r] == s:
                copy_row(out, r * out_stride, x, t * x_stride, row_bytes, streaming)
    fence()
    zero_unused_rows(out, slots, row_bytes, out_stride, lo, hi)


@helper
def scale_row(out, out_offset, x, x_offset, weight, hidden, streaming):
    """`weight * x`, rounded to the dtype of `out`."""
    whole = hidden - hidden % LANES
    for h in range(0, whole, LANES):
        store_block(out, out_offset + h, splat(weight) * load(x, x_offset + h), streaming)
    if whole < hidden:
        scaled = splat(weight) * load_tail(x, x_offset + whole, hidden - whole)
        store_tail(out, out_offset + whole, scaled, hidden - whole)


@kernel(keys=FLOATS)
def spread_weighted(
    out: Rows,
    out_bytes: uint8_ptr,
    x: Rows,
    weights: float32_ptr,
    slots: Slots,
    hidden: int64,
    element_bytes: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """Each token times a slot's weight, into that slot's row; zeros into rows that no slot fills."""
    for t in range(lo, min(hi, slots.num_tokens)):
        for s in range(first_slot(slots, t), first_slot(slots, t + 1)):
            r = slots.row_of_slot[s]
            if 0 <= r < slots.num_rows and slots.slot_of_row[r] == s:
                scale_row(out.data, r * out.stride, x.data, t * x.stride, weights[s], hidden, streaming)
    fence()
    zero_unused_rows(out_bytes, slots, hidden * element_bytes, out.stride * element_bytes, lo, hi)


# ---------------------------------------------------------------------------- kernels: row_dots


@kernel(keys=FLOATS)
def row_dots_kernel(
    dots: float32_ptr,
    rows: Rows,
    x: Rows,
    bias: element_ptr,
    slots: Slots,
    num_experts: int64,
    hidden: int64,
    lo: int64,
    hi: int64,
):
    """Dot product of each slot's row (plus its expert's bias) with its token; 0 for a slot without a row."""
    for t in range(lo, min(hi, slots.num_tokens)):
        for s in range(first_slot(slots, t), first_slot(slots, t + 1)):
            r = slots.row_of_slot[s]
            dot = ZERO
            if 0 <= r < slots.num_rows:
                bias_offset = int64(-1)
                if not is_null(bias):
                    e = int64(slots.expert_of_slot[s])
                    if 0 <= e < num_experts:
                        bias_offset = e * hidden
                dot = dot_row(rows.data, r * rows.stride, x.data, t * x.stride, bias, bias_offset, hidden)
            dots[s] = dot
    zero_unowned_slots(dots, slots, lo)


# ---------------------------------------------------------------------------- kernels: spread and row_dots at once


@helper
def scale_dot_row(out, out_offset, x, x_offset, y, y_offset, next_y_offset, ahead, weight, hidden, streaming):
    """out = weight * x, and the dot product of y and x, in one pass.

    y is asked for `ahead` elements before it is used, behind the row's end in the next slot's row.
    """
    w = splat(weight)
    p0, p1, p2, p3 = zeros(), zeros(), zeros(), zeros()
    whole = hidden - hidden % (4 * LANES)
    for h in range(0, whole, 4 * LANES):
        if ahead > 0:
            asked = y_offset + h + ahead if h + ahead < hidden else next_y_offset + h + ahead - hidden
            for part in range(4):
                prefetch(y, asked + part * LANES)
        x0 = load(x, x_offset + h)
        p0 = p0 + load(y, y_offset + h) * x0
        store_block(out, out_offset + h, w * x0, streaming)
        x1 = load(x, x_offset + h + LANES)
        p1 = p1 + load(y, y_offset + h + LANES) * x1
        store_block(out, out_offset + h + LANES, w * x1, streaming)
        x2 = load(x, x_offset + h + 2 * LANES)
        p2 = p2 + load(y, y_offset + h + 2 * LANES) * x2
        store_block(out, out_offset + h + 2 * LANES, w * x2, streaming)
        x3 = load(x, x_offset + h + 3 * LANES)
        p3 = p3 + load(y, y_offset + h + 3 * LANES) * x3
        store_block(out, out_offset + h + 3 * LANES, w * x3, streaming)
    for h in range(whole, hidden, LANES):
        count = min(LANES, hidden - h)
        xh = load_part(x, x_offset + h, count)
        term = load_part(y, y_offset + h, count) * xh
        store_part(out, out_offset + h, w * xh, count)
        part = (h - whole) // LANES
        if part == 0:
            p0 = p0 + term
        elif part == 1:
            p1 = p1 + term
        elif part == 2:
            p2 = p2 + term
        else:
            p3 = p3 + term
    return (pairwise(p0) + pairwise(p1)) + (pairwise(p2) + pairwise(p3))


@kernel(keys=FLOATS)
def spread_dots_kernel(
    out: Rows,
    out_bytes: uint8_ptr,
    dots: float32_ptr,
    x: Rows,
    rows: Rows,
    weights: float32_ptr,
    slots: Slots,
    hidden: int64,
    element_bytes: int64,
    ahead: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """`spread_weighted` and `row_dots` in one pass over x."""
    for t in range(lo, min(hi, slots.num_tokens)):
        for s in range(first_slot(slots, t), first_slot(slots, t + 1)):
            r = slots.row_of_slot[s]
            if 0 <= r < slots.num_rows:
                if slots.slot_of_row[r] == s:
                    # Without the prefetch every row begins at the latency of memory: 27 GB/s, not 70, for
                    # rows of 4 KiB.
                    next_row = slots.row_of_slot[min(s + 1, slots.num_slots - 1)] * rows.stride
                    dots[s] = scale_dot_row(
                        out.data,
                        r * out.stride,
                        x.data,
                        t * x.stride,
                        rows.data,
                        r * rows.stride,
                        next_row,
                        ahead,
                        weights[s],
                        hidden,
                        streaming,
                    )
                else:
                    dots[s] = dot_row(rows.data, r * rows.stride, x.data, t * x.stride, rows.data, int64(-1), hidden)
            else:
                dots[s] = ZERO
    fence()
    zero_unowned_slots(dots, slots, lo)
    zero_unused_rows(out_bytes, slots, hidden * element_bytes, out.stride * element_bytes, lo, hi)


# ---------------------------------------------------------------------------- launchers


def past_caches(address: int, stride_bytes: int, result_bytes: int) -> bool:
    """Whether stores go past the caches: a large result, each row of which begins at a cache line."""
    return result_bytes >= STREAM_BYTES and address % ALIGNMENT == 0 and stride_bytes % ALIGNMENT == 0


def _ahead(work: int, rows: int, hidden: int, size: int) -> int:
    """How many elements ahead a kernel prefetches that reads so many rows at a time; 0 where caches hold it all.

    8 KiB shared by the rows, at most one row. Measured at 79 GB/s of copy_, bfloat16, `combine` of 8 rows: no
    prefetch 42 GB/s, 512 bytes for each row 69, 1024 78, 4096 62. Of 2 rows, and in `spread_dots`, 4096 is best.
    """
    return 0 if work < SERIAL_WORK else min(AHEAD_BYTES // (max(rows, 1) * size), hidden)


def _float_weights(weights: Tensor) -> Tensor:
    """Slot by slot, in float32: an exact widening of a small tensor spares a kernel for each mixture of dtypes."""
    if weights.dtype is torch.float32 and weights.is_contiguous():
        return weights
    return weights.float().contiguous()


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
    rows, rows_stride = layout.matrix(rows)
    (num_rows, hidden), num_tokens, size = rows.shape, plan.num_tokens, rows.element_size()
    num_slots = plan.row_of_slot.numel()
    target, stride = layout.matrix_target(out, num_tokens, hidden, rows.dtype)
    address = target.data_ptr()
    work = (num_slots + num_tokens) * hidden * size
    ahead, streaming = 0, False
    if work >= SERIAL_WORK:
        ahead = _ahead(work, num_slots // max(num_tokens, 1), hidden, size)
        streaming = past_caches(address, stride * size, num_tokens * hidden * size)
    if init is not None or bias is not None:
        weights = None if weights is None else _float_weights(weights)
        init, init_stride = (None, 0) if init is None else layout.matrix(init)
        init_more, init_more_stride = (None, 0) if init_more is None else layout.matrix(init_more)
        bias = layout.contiguous(bias)
        combine_biased(
            rows.dtype,
            items=num_tokens,
            work=work,
            out=(address, stride),
            rows=(rows.data_ptr(), rows_stride),
            weights=layout.address(weights),
            init=(layout.address(init), init_stride),
            init_more=(layout.address(init_more), init_more_stride),
            bias=layout.address(bias),
            slots=plan_slots(plan, num_rows),
            num_experts=0 if bias is None else bias.shape[0],
            hidden=hidden,
        )
    elif weights is None:
        combine_plain(
            rows.dtype,
            items=num_tokens,
            work=work,
            out=(address, stride),
            rows=(rows.data_ptr(), rows_stride),
            slots=plan_slots(plan, num_rows),
            hidden=hidden,
            ahead=ahead,
            streaming=streaming,
        )
    else:
        weights = _float_weights(weights)
        combine_weighted(
            rows.dtype,
            items=num_tokens,
            work=work,
            out=(address, stride),
            rows=(rows.data_ptr(), rows_stride),
            weights=weights.data_ptr(),
            slots=plan_slots(plan, num_rows),
            hidden=hidden,
            ahead=ahead,
            streaming=streaming,
        )
    return target if out is None else layout.finish(target, out)


def spread(x: Tensor, weights: Tensor | None, plan: PlanTensors, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [R, H] result, or writes `out`, of any strides."""
    x, x_stride = layout.matrix(x)
    (num_tokens, hidden), num_rows, size = x.shape, plan.slot_of_row.numel(), x.element_size()
    target, stride = layout.matrix_target(out, num_rows, hidden, x.dtype)
    address = target.data_ptr()
    work = (num_rows + num_tokens) * hidden * size
    streaming = work >= STREAM_BYTES and past_caches(address, stride * size, num_rows * hidden * size)
    if weights is None:
        spread_bytes(
            "bytes",
            items=num_tokens or 1,
            work=work,
            out=address,
            x=x.data_ptr(),
            slots=plan_slots(plan, num_rows),
            row_bytes=hidden * size,
            out_stride=stride * size,
            x_stride=x_stride * size,
            streaming=streaming,
        )
    else:
        weights = _float_weights(weights)
        spread_weighted(
            x.dtype,
            items=num_tokens or 1,
            work=work,
            out=(address, stride),
            out_bytes=address,
            x=(x.data_ptr(), x_stride),
            weights=weights.data_ptr(),
            slots=plan_slots(plan, num_rows),
            hidden=hidden,
            element_bytes=size,
            streaming=streaming,
        )
    return target if out is None else layout.finish(target, out)


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
    (rows, rows_stride), (x, x_stride) = layout.matrix(rows), layout.matrix(x)
    (num_tokens, hidden), num_slots = x.shape, plan.row_of_slot.shape[0]
    bias = layout.contiguous(bias)
    dots = layout.target(out, (num_slots,), torch.float32)
    row_dots_kernel(
        rows.dtype,
        items=num_tokens or 1,
        work=(num_slots + num_tokens) * hidden * rows.element_size(),
        dots=dots.data_ptr(),
        rows=(rows.data_ptr(), rows_stride),
        x=(x.data_ptr(), x_stride),
        bias=layout.address(bias),
        slots=plan_slots(plan, rows.shape[0]),
        num_experts=0 if bias is None else bias.shape[0],
        hidden=hidden,
    )
    return layout.finish(dots.to(dtype), out)


def spread_dots(
    x: Tensor,
    rows: Tensor,
    weights: Tensor,
    plan: PlanTensors,
    *,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Allocates the [R, H] and [S] results, or writes what `out` has of them, of any strides."""
    (x, x_stride), (rows, rows_stride) = layout.matrix(x), layout.matrix(rows)
    (num_tokens, hidden), num_rows, size = x.shape, plan.slot_of_row.shape[0], x.element_size()
    target, stride = layout.matrix_target(out[0], num_rows, hidden, x.dtype)
    address = target.data_ptr()
    dots = layout.target(out[1], (plan.row_of_slot.shape[0],), torch.float32)
    dtype, weights = weights.dtype, _float_weights(weights)
    work = (2 * num_rows + num_tokens) * hidden * size
    spread_dots_kernel(
        x.dtype,
        items=num_tokens or 1,
        work=work,
        out=(address, stride),
        out_bytes=address,
        dots=dots.data_ptr(),
        x=(x.data_ptr(), x_stride),
        rows=(rows.data_ptr(), rows_stride),
        weights=weights.data_ptr(),
        slots=plan_slots(plan, num_rows),
        hidden=hidden,
        element_bytes=size,
        ahead=_ahead(work, 2, hidden, size),
        streaming=past_caches(address, stride * size, num_rows * hidden * size),
    )
    return layout.finish(target, out[0]), layout.finish(dots.to(dtype), out[1])
