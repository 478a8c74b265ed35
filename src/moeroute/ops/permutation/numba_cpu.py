"""The row operators on the CPU: kernels, then launchers.

All walk token by token. A slot's row index is range-checked before it is used, whatever the plan
says. Offsets are int64: an int32 row index times an int64 stride is one.
"""

import numpy as np
import torch
from numba import int64, prange
from torch import Tensor
from torch.autograd.graph import increment_version

from moeroute import memory
from moeroute.ops.launch import FLOATS, SERIAL_WORK, Kernel, kernel, parallel_kernel
from moeroute.ops.rows import dot_row, put, some
from moeroute.ops.simd import (
    ALIGNMENT,
    COPY_BYTES,
    LANES,
    POINTER,
    copy,
    copy_stream,
    copy_tail,
    exact_floats,
    fence,
    float32_ptr,
    int32_ptr,
    is_null,
    load,
    load_tail,
    pairwise,
    prefetch,
    restore_floats,
    splat,
    store,
    store_tail,
    stream,
    uint8_ptr,
    zeros,
)

ZERO = np.float32(0)

# Outputs from here on go past the caches. Below it the next operator finds them in the cache.
STREAM_BYTES = 4 << 20

AHEAD_BYTES = 8192

CPU = torch.device("cpu")
SMALL = memory.SMALLEST // 8  # elements that the pool does not care for, whatever their dtype
empty = torch.empty


# ---------------------------------------------------------------------------- kernels: slots of a token


@kernel
def first_slot(slot_offsets, topk, num_slots, token):
    """Where the slots of a token begin; `token + 1` gives their end. Always inside 0..num_slots."""
    if is_null(slot_offsets):
        return token * topk
    return min(max(int64(slot_offsets[token]), 0), num_slots)


@kernel
def ask_ahead(rows, row_of_slot, slot, next_slot, num_slots, at, ahead, hidden, rows_stride):
    """Prefetch the two blocks that the sum over this slot needs `ahead` elements later.

    They are in its row, or behind the row's end in that of the next token: so every line is asked for,
    the first ones of a row too, which no hardware guesses.
    """
    if ahead > 0:
        if at + ahead < hidden:
            asked = row_of_slot[slot] * rows_stride + at + ahead
        else:
            asked = row_of_slot[min(next_slot, num_slots - 1)] * rows_stride + at + ahead - hidden
        prefetch(rows, asked)
        prefetch(rows, asked + LANES)


@kernel
def put_block(out, offset, block, streaming):
    if streaming:
        stream(out, offset, block)
    else:
        store(out, offset, block)


# ---------------------------------------------------------------------------- kernels: combine


@kernel
def combine_body(
    out, rows, row_of_slot, slot_offsets, topk, num_slots, num_rows, hidden, out_stride, rows_stride, ahead, streaming,
    lo, hi,
):  # fmt: skip
    mode = exact_floats()
    whole = hidden - hidden % (2 * LANES)
    for t in range(lo, hi):
        first = first_slot(slot_offsets, topk, num_slots, t)
        last = first_slot(slot_offsets, topk, num_slots, t + 1)
        # Two blocks at a time: longer pieces of each row, 83 GB/s instead of 70 for 8 rows of 14 KiB.
        for h in range(0, whole, 2 * LANES):
            left, right = zeros(), zeros()
            for s in range(first, last):
                r = row_of_slot[s]
                if 0 <= r < num_rows:
                    ask_ahead(rows, row_of_slot, s, s + last - first, num_slots, h, ahead, hidden, rows_stride)
                    left = left + load(rows, r * rows_stride + h)
                    right = right + load(rows, r * rows_stride + h + LANES)
            put_block(out, t * out_stride + h, left, streaming)
            put_block(out, t * out_stride + h + LANES, right, streaming)
        for h in range(whole, hidden, LANES):
            count = min(LANES, hidden - h)
            left = zeros()
            for s in range(first, last):
                r = row_of_slot[s]
                if 0 <= r < num_rows:
                    left = left + some(rows, r * rows_stride + h, count)
            put(out, t * out_stride + h, left, count)
    fence()
    restore_floats(mode)


@parallel_kernel
def combine_parallel(
    out,
    rows,
    row_of_slot,
    slot_offsets,
    topk,
    num_slots,
    num_rows,
    hidden,
    out_stride,
    rows_stride,
    ahead,
    streaming,
    n,
    chunks,
):
    for c in prange(chunks):
        combine_body(
            out, rows, row_of_slot, slot_offsets, topk, num_slots, num_rows, hidden, out_stride, rows_stride, ahead,
            streaming, c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


@kernel
def combine_weighted_body(
    out, rows, weights, row_of_slot, slot_offsets, topk, num_slots, num_rows, hidden, out_stride, rows_stride, ahead,
    streaming, lo, hi,
):  # fmt: skip
    mode = exact_floats()
    whole = hidden - hidden % (2 * LANES)
    for t in range(lo, hi):
        first = first_slot(slot_offsets, topk, num_slots, t)
        last = first_slot(slot_offsets, topk, num_slots, t + 1)
        for h in range(0, whole, 2 * LANES):
            left, right = zeros(), zeros()
            for s in range(first, last):
                r = row_of_slot[s]
                w = weights[s]
                if 0 <= r < num_rows and w != ZERO:
                    ask_ahead(rows, row_of_slot, s, s + last - first, num_slots, h, ahead, hidden, rows_stride)
                    left = left + splat(w) * load(rows, r * rows_stride + h)
                    right = right + splat(w) * load(rows, r * rows_stride + h + LANES)
            put_block(out, t * out_stride + h, left, streaming)
            put_block(out, t * out_stride + h + LANES, right, streaming)
        for h in range(whole, hidden, LANES):
            count = min(LANES, hidden - h)
            left = zeros()
            for s in range(first, last):
                r = row_of_slot[s]
                w = weights[s]
                if 0 <= r < num_rows and w != ZERO:
                    left = left + splat(w) * some(rows, r * rows_stride + h, count)
            put(out, t * out_stride + h, left, count)
    fence()
    restore_floats(mode)


@parallel_kernel
def combine_weighted_parallel(
    out, rows, weights, row_of_slot, slot_offsets, topk, num_slots, num_rows, hidden, out_stride, rows_stride,
    ahead, streaming, n, chunks,
):  # fmt: skip
    for c in prange(chunks):
        combine_weighted_body(
            out, rows, weights, row_of_slot, slot_offsets, topk, num_slots, num_rows, hidden, out_stride, rows_stride,
            ahead, streaming, c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


@kernel
def combine_biased_body(
    out, rows, weights, init, init_more, bias, row_of_slot, expert_of_slot, slot_offsets, topk, num_slots, num_rows,
    num_experts, hidden, out_stride, rows_stride, init_stride, init_more_stride, lo, hi,
):  # fmt: skip
    mode = exact_floats()
    for t in range(lo, hi):
        first = first_slot(slot_offsets, topk, num_slots, t)
        last = first_slot(slot_offsets, topk, num_slots, t + 1)
        for h in range(0, hidden, LANES):
            count = min(LANES, hidden - h)
            total = zeros()
            if not is_null(init):
                total = some(init, t * init_stride + h, count)
            if not is_null(init_more):
                total = total + some(init_more, t * init_more_stride + h, count)
            for s in range(first, last):
                r = int64(row_of_slot[s])
                w = np.float32(1)
                if not is_null(weights):
                    w = weights[s]
                if 0 <= r < num_rows and w != ZERO:
                    term = some(rows, r * rows_stride + h, count)
                    if not is_null(bias):
                        e = int64(expert_of_slot[s])
                        if 0 <= e < num_experts:
                            term = term + some(bias, e * hidden + h, count)
                    if not is_null(weights):
                        term = splat(w) * term
                    total = total + term
            put(out, t * out_stride + h, total, count)
    restore_floats(mode)


@parallel_kernel
def combine_biased_parallel(
    out, rows, weights, init, init_more, bias, row_of_slot, expert_of_slot, slot_offsets, topk, num_slots, num_rows,
    num_experts, hidden, out_stride, rows_stride, init_stride, init_more_stride, n, chunks,
):  # fmt: skip
    for c in prange(chunks):
        combine_biased_body(
            out, rows, weights, init, init_more, bias, row_of_slot, expert_of_slot, slot_offsets, topk, num_slots,
            num_rows, num_experts, hidden, out_stride, rows_stride, init_stride, init_more_stride, c * n // chunks,
            (c + 1) * n // chunks,
        )  # fmt: skip


# ---------------------------------------------------------------------------- kernels: spread


@kernel
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


@kernel
def zero_unused_rows(
    out, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens, row_bytes, stride_bytes, lo, hi
):
    """Zeros in the rows that no token's slot fills; the chunk [lo, hi) of the tokens takes its share of the rows."""
    first = first_slot(slot_offsets, topk, num_slots, 0)
    last = first_slot(slot_offsets, topk, num_slots, num_tokens)
    items = max(num_tokens, 1)
    for r in range(lo * num_rows // items, hi * num_rows // items):
        s = slot_of_row[r]
        if not (first <= s < last and row_of_slot[s] == r):
            for b in range(row_bytes):
                out[r * stride_bytes + b] = np.uint8(0)


@kernel
def spread_body(
    out, x, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens, row_bytes, out_stride,
    x_stride, streaming, lo, hi,
):  # fmt: skip
    for t in range(lo, min(hi, num_tokens)):
        first = first_slot(slot_offsets, topk, num_slots, t)
        last = first_slot(slot_offsets, topk, num_slots, t + 1)
        for s in range(first, last):
            r = row_of_slot[s]
            if 0 <= r < num_rows and slot_of_row[r] == s:
                copy_row(out, r * out_stride, x, t * x_stride, row_bytes, streaming)
    fence()
    zero_unused_rows(
        out,
        row_of_slot,
        slot_of_row,
        slot_offsets,
        topk,
        num_slots,
        num_rows,
        num_tokens,
        row_bytes,
        out_stride,
        lo,
        hi,
    )


@parallel_kernel
def spread_parallel(
    out, x, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens, row_bytes, out_stride,
    x_stride, streaming, n, chunks,
):  # fmt: skip
    for c in prange(chunks):
        spread_body(
            out, x, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens, row_bytes,
            out_stride, x_stride, streaming, c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


@kernel
def scale_row(out, out_offset, x, x_offset, weight, hidden, streaming):
    whole = hidden - hidden % LANES
    for h in range(0, whole, LANES):
        put_block(out, out_offset + h, splat(weight) * load(x, x_offset + h), streaming)
    if whole < hidden:
        scaled = splat(weight) * load_tail(x, x_offset + whole, hidden - whole)
        store_tail(out, out_offset + whole, scaled, hidden - whole)


@kernel
def spread_weighted_body(
    out, out_bytes, x, weights, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens, hidden,
    element_bytes, out_stride, x_stride, streaming, lo, hi,
):  # fmt: skip
    mode = exact_floats()
    for t in range(lo, min(hi, num_tokens)):
        first = first_slot(slot_offsets, topk, num_slots, t)
        last = first_slot(slot_offsets, topk, num_slots, t + 1)
        for s in range(first, last):
            r = row_of_slot[s]
            if 0 <= r < num_rows and slot_of_row[r] == s:
                scale_row(out, r * out_stride, x, t * x_stride, weights[s], hidden, streaming)
    fence()
    zero_unused_rows(
        out_bytes, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens,
        hidden * element_bytes, out_stride * element_bytes, lo, hi,
    )  # fmt: skip
    restore_floats(mode)


@parallel_kernel
def spread_weighted_parallel(
    out, out_bytes, x, weights, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens, hidden,
    element_bytes, out_stride, x_stride, streaming, n, chunks,
):  # fmt: skip
    for c in prange(chunks):
        spread_weighted_body(
            out, out_bytes, x, weights, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens,
            hidden, element_bytes, out_stride, x_stride, streaming, c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


# ---------------------------------------------------------------------------- kernels: row_dots


@kernel
def zero_unused_slots(dots, slot_offsets, topk, num_slots, num_tokens, lo):
    """Zeros in the slots that no token owns; the chunk that has token 0 does it."""
    if lo == 0:
        for s in range(first_slot(slot_offsets, topk, num_slots, 0)):
            dots[s] = ZERO
        for s in range(first_slot(slot_offsets, topk, num_slots, num_tokens), num_slots):
            dots[s] = ZERO


@kernel
def row_dots_body(
    dots, y, x, bias, row_of_slot, expert_of_slot, slot_offsets, topk, num_slots, num_rows, num_tokens, num_experts,
    hidden, y_stride, x_stride, lo, hi,
):  # fmt: skip
    mode = exact_floats()
    for t in range(lo, min(hi, num_tokens)):
        first = first_slot(slot_offsets, topk, num_slots, t)
        last = first_slot(slot_offsets, topk, num_slots, t + 1)
        for s in range(first, last):
            r = row_of_slot[s]
            dot = ZERO
            if 0 <= r < num_rows:
                bias_offset = int64(-1)
                if not is_null(bias):
                    e = int64(expert_of_slot[s])
                    if 0 <= e < num_experts:
                        bias_offset = e * hidden
                dot = dot_row(y, r * y_stride, x, t * x_stride, bias, bias_offset, hidden)
            dots[s] = dot
    zero_unused_slots(dots, slot_offsets, topk, num_slots, num_tokens, lo)
    restore_floats(mode)


@parallel_kernel
def row_dots_parallel(
    dots, y, x, bias, row_of_slot, expert_of_slot, slot_offsets, topk, num_slots, num_rows, num_tokens, num_experts,
    hidden, y_stride, x_stride, n, chunks,
):  # fmt: skip
    for c in prange(chunks):
        row_dots_body(
            dots, y, x, bias, row_of_slot, expert_of_slot, slot_offsets, topk, num_slots, num_rows, num_tokens,
            num_experts, hidden, y_stride, x_stride, c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


# ---------------------------------------------------------------------------- kernels: spread and row_dots at once


@kernel
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
        put_block(out, out_offset + h, w * x0, streaming)
        x1 = load(x, x_offset + h + LANES)
        p1 = p1 + load(y, y_offset + h + LANES) * x1
        put_block(out, out_offset + h + LANES, w * x1, streaming)
        x2 = load(x, x_offset + h + 2 * LANES)
        p2 = p2 + load(y, y_offset + h + 2 * LANES) * x2
        put_block(out, out_offset + h + 2 * LANES, w * x2, streaming)
        x3 = load(x, x_offset + h + 3 * LANES)
        p3 = p3 + load(y, y_offset + h + 3 * LANES) * x3
        put_block(out, out_offset + h + 3 * LANES, w * x3, streaming)
    for h in range(whole, hidden, LANES):
        count = min(LANES, hidden - h)
        xh = some(x, x_offset + h, count)
        term = some(y, y_offset + h, count) * xh
        put(out, out_offset + h, w * xh, count)
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


@kernel
def spread_dots_body(
    out, out_bytes, dots, x, y, weights, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens,
    hidden, element_bytes, out_stride, x_stride, y_stride, ahead, streaming, lo, hi,
):  # fmt: skip
    mode = exact_floats()
    for t in range(lo, min(hi, num_tokens)):
        first = first_slot(slot_offsets, topk, num_slots, t)
        last = first_slot(slot_offsets, topk, num_slots, t + 1)
        for s in range(first, last):
            r = row_of_slot[s]
            if 0 <= r < num_rows:
                if slot_of_row[r] == s:
                    # Without the prefetch every row begins at the latency of memory: 27 GB/s, not 70, for
                    # rows of 4 KiB.
                    next_row = row_of_slot[min(s + 1, num_slots - 1)] * y_stride
                    dots[s] = scale_dot_row(
                        out, r * out_stride, x, t * x_stride, y, r * y_stride, next_row, ahead, weights[s], hidden,
                        streaming,
                    )  # fmt: skip
                else:
                    dots[s] = dot_row(y, r * y_stride, x, t * x_stride, y, int64(-1), hidden)
            else:
                dots[s] = ZERO
    fence()
    zero_unused_slots(dots, slot_offsets, topk, num_slots, num_tokens, lo)
    zero_unused_rows(
        out_bytes, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens,
        hidden * element_bytes, out_stride * element_bytes, lo, hi,
    )  # fmt: skip
    restore_floats(mode)


@parallel_kernel
def spread_dots_parallel(
    out, out_bytes, dots, x, y, weights, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows, num_tokens,
    hidden, element_bytes, out_stride, x_stride, y_stride, ahead, streaming, n, chunks,
):  # fmt: skip
    for c in prange(chunks):
        spread_dots_body(
            out, out_bytes, dots, x, y, weights, row_of_slot, slot_of_row, slot_offsets, topk, num_slots, num_rows,
            num_tokens, hidden, element_bytes, out_stride, x_stride, y_stride, ahead, streaming,
            c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


# ---------------------------------------------------------------------------- kernels: weights


@kernel
def take_body(out, values, index, num_values, lo, hi):
    for i in range(lo, hi):
        j = index[i]
        if 0 <= j < num_values:
            out[i] = values[j]
        else:
            out[i] = 0


@parallel_kernel
def take_parallel(out, values, index, num_values, n, chunks):
    for c in prange(chunks):
        take_body(out, values, index, num_values, c * n // chunks, (c + 1) * n // chunks)


@kernel
def slot_weights_body(
    out, weights, expert_of_slot, slot_offsets, topk, num_slots, num_experts, num_tokens, weights_stride, lo, hi
):
    for t in range(lo, min(hi, num_tokens)):
        first = first_slot(slot_offsets, topk, num_slots, t)
        last = first_slot(slot_offsets, topk, num_slots, t + 1)
        for s in range(first, last):
            e = expert_of_slot[s]
            if 0 <= e < num_experts:
                out[s] = weights[t * weights_stride + e]
            else:
                out[s] = ZERO
    zero_unused_slots(out, slot_offsets, topk, num_slots, num_tokens, lo)


@parallel_kernel
def slot_weights_parallel(
    out, weights, expert_of_slot, slot_offsets, topk, num_slots, num_experts, num_tokens, weights_stride, n, chunks
):
    for c in prange(chunks):
        slot_weights_body(
            out, weights, expert_of_slot, slot_offsets, topk, num_slots, num_experts, num_tokens, weights_stride,
            c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


@kernel
def slot_weights_backward_body(
    out, grad, expert_of_slot, slot_offsets, topk, num_slots, num_experts, out_stride, accumulate, lo, hi
):
    mode = exact_floats()
    for t in range(lo, hi):
        for e in range(num_experts):
            out[t * out_stride + e] = ZERO
        first = first_slot(slot_offsets, topk, num_slots, t)
        last = first_slot(slot_offsets, topk, num_slots, t + 1)
        for s in range(first, last):
            e = expert_of_slot[s]
            if 0 <= e < num_experts:
                value = grad[s]
                if accumulate:
                    value = out[t * out_stride + e] + value
                out[t * out_stride + e] = value
    restore_floats(mode)


@parallel_kernel
def slot_weights_backward_parallel(
    out, grad, expert_of_slot, slot_offsets, topk, num_slots, num_experts, out_stride, accumulate, n, chunks
):
    for c in prange(chunks):
        slot_weights_backward_body(
            out, grad, expert_of_slot, slot_offsets, topk, num_slots, num_experts, out_stride, accumulate,
            c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


# ---------------------------------------------------------------------------- launchers

_I = int32_ptr
_F = float32_ptr
_B = uint8_ptr
_n = int64

_combine = Kernel(
    combine_body,
    combine_parallel,
    lambda dtype: (POINTER[dtype], POINTER[dtype], _I, _I, *[_n] * 8),
    FLOATS,
)
_combine_weighted = Kernel(
    combine_weighted_body,
    combine_weighted_parallel,
    lambda dtype: (POINTER[dtype], POINTER[dtype], _F, _I, _I, *[_n] * 8),
    FLOATS,
)
_combine_biased = Kernel(
    combine_biased_body,
    combine_biased_parallel,
    lambda dtype: (POINTER[dtype], POINTER[dtype], _F, *[POINTER[dtype]] * 3, _I, _I, _I, *[_n] * 9),
    FLOATS,
)
_spread = Kernel(spread_body, spread_parallel, lambda _: (_B, _B, _I, _I, _I, *[_n] * 8), ("bytes",))
_spread_weighted = Kernel(
    spread_weighted_body,
    spread_weighted_parallel,
    lambda dtype: (POINTER[dtype], _B, POINTER[dtype], _F, _I, _I, _I, *[_n] * 9),
    FLOATS,
)
_row_dots = Kernel(
    row_dots_body,
    row_dots_parallel,
    lambda dtype: (_F, POINTER[dtype], POINTER[dtype], POINTER[dtype], _I, _I, _I, *[_n] * 8),
    FLOATS,
)
_spread_dots = Kernel(
    spread_dots_body,
    spread_dots_parallel,
    lambda dtype: (POINTER[dtype], _B, _F, POINTER[dtype], POINTER[dtype], _F, _I, _I, _I, *[_n] * 11),
    FLOATS,
)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_take = Kernel(
    take_body, take_parallel, lambda size: (POINTER[_BITS[size]], POINTER[_BITS[size]], _I, _n), tuple(_BITS)
)
_slot_weights = Kernel(
    slot_weights_body,
    slot_weights_parallel,
    lambda dtype: (POINTER[dtype], POINTER[dtype], _I, _I, *[_n] * 5),
    FLOATS,
)
_slot_weights_backward = Kernel(
    slot_weights_backward_body,
    slot_weights_backward_parallel,
    lambda dtype: (_F, POINTER[dtype], _I, _I, *[_n] * 5),
    FLOATS,
)


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor, or a copy where the elements of a row are not side by side, and the distance of its rows."""
    stride, inner = tensor.stride()
    if inner == 1 or tensor.shape[1] <= 1:
        return tensor, stride
    return tensor.contiguous(), tensor.shape[1]


def _target(out: Tensor | None, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Where a kernel writes, and the distance of its rows: `out`, or a fresh tensor where its strides do not serve."""
    if out is None or (out.stride(1) != 1 and columns > 1):
        if rows * columns <= SMALL:
            return empty(rows, columns, dtype=dtype, device=CPU), columns  # 0.4 µs less than the pool's way here
        return memory.empty((rows, columns), dtype), columns
    return out, out.stride(0)


def _vector(out: Tensor | None, size: int, dtype: torch.dtype) -> Tensor:
    """`_target` for one dimension."""
    if out is not None and out.dtype is dtype and (out.stride(0) == 1 or size <= 1):
        return out
    return memory.empty((size,), dtype)


def _finish(target: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return target
    if out is not target:
        return out.copy_(target)
    increment_version(out)  # it was written by address, of which autograd knows nothing
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _aligned(address: int, stride_bytes: int) -> bool:
    """Whether each row begins at a cache line, as streaming stores need it."""
    return address % ALIGNMENT == 0 and stride_bytes % ALIGNMENT == 0


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
    row_of_slot: Tensor,
    slot_offsets: Tensor | None,
    num_tokens: int,
    *,
    init: Tensor | None = None,
    init_more: Tensor | None = None,
    bias: Tensor | None = None,
    expert_of_slot: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    dtype, size = rows.dtype, rows.element_size()
    rows, rows_stride = _rows(rows)
    num_rows, hidden = rows.shape
    num_slots = row_of_slot.numel()
    topk = num_slots // num_tokens if num_tokens else 0
    offsets = 0 if slot_offsets is None else slot_offsets.data_ptr()
    target, stride = _target(out, num_tokens, hidden, dtype)
    address = target.data_ptr()
    streaming = num_tokens * hidden * size >= STREAM_BYTES and _aligned(address, stride * size)
    work = (num_slots + num_tokens) * hidden * size
    ahead = 0 if work < SERIAL_WORK else _ahead(work, num_slots // num_tokens, hidden, size)
    if init is not None or bias is not None:
        weights = None if weights is None else _float_weights(weights)
        init, init_stride = (None, 0) if init is None else _rows(init)
        init_more, init_more_stride = (None, 0) if init_more is None else _rows(init_more)
        bias = None if bias is None else bias.contiguous()
        _combine_biased(
            dtype, num_tokens, work,
            address, rows.data_ptr(), _address(weights), _address(init), _address(init_more), _address(bias),
            row_of_slot.data_ptr(), _address(expert_of_slot), offsets, topk, num_slots, num_rows,
            0 if bias is None else bias.shape[0], hidden, stride, rows_stride, init_stride, init_more_stride,
        )  # fmt: skip
    elif weights is None:
        _combine.run(dtype, work, (
            address, rows.data_ptr(), row_of_slot.data_ptr(), offsets, topk, num_slots, num_rows, hidden, stride,
            rows_stride, ahead, streaming, 0, num_tokens,
        ))  # fmt: skip
    else:
        weights = _float_weights(weights)
        _combine_weighted.run(dtype, work, (
            address, rows.data_ptr(), weights.data_ptr(), row_of_slot.data_ptr(), offsets, topk, num_slots, num_rows,
            hidden, stride, rows_stride, ahead, streaming,
            0, num_tokens,
        ))  # fmt: skip
    return target if out is None else _finish(target, out)


def spread(
    x: Tensor,
    weights: Tensor | None,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    slot_offsets: Tensor | None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    dtype, size = x.dtype, x.element_size()
    x, x_stride = _rows(x)
    num_tokens, hidden = x.shape
    num_rows, num_slots = slot_of_row.numel(), row_of_slot.numel()
    topk = num_slots // num_tokens if num_tokens else 0
    offsets = 0 if slot_offsets is None else slot_offsets.data_ptr()
    target, stride = _target(out, num_rows, hidden, dtype)
    address = target.data_ptr()
    streaming = num_rows * hidden * size >= STREAM_BYTES and _aligned(address, stride * size)
    work = (num_rows + num_tokens) * hidden * size
    if weights is None:
        _spread.run("bytes", work, (
            address, x.data_ptr(), row_of_slot.data_ptr(), slot_of_row.data_ptr(), offsets, topk, num_slots, num_rows,
            num_tokens, hidden * size, stride * size, x_stride * size, streaming, 0, num_tokens or 1,
        ))  # fmt: skip
    else:
        weights = _float_weights(weights)
        _spread_weighted.run(dtype, work, (
            address, address, x.data_ptr(), weights.data_ptr(), row_of_slot.data_ptr(), slot_of_row.data_ptr(), offsets,
            topk, num_slots, num_rows, num_tokens, hidden, size, stride, x_stride, streaming, 0, num_tokens or 1,
        ))  # fmt: skip
    return target if out is None else _finish(target, out)


def row_dots(
    y: Tensor,
    x: Tensor,
    row_of_slot: Tensor,
    slot_offsets: Tensor | None,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    expert_of_slot: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    (y, y_stride), (x, x_stride) = _rows(y), _rows(x)
    num_rows, hidden = y.shape
    num_tokens, num_slots = x.shape[0], row_of_slot.shape[0]
    bias = None if bias is None else bias.contiguous()
    dots = _vector(out, num_slots, torch.float32)
    _row_dots(
        y.dtype, num_tokens or 1, (num_slots + num_tokens) * hidden * y.element_size(),
        dots.data_ptr(), y.data_ptr(), x.data_ptr(), _address(bias), row_of_slot.data_ptr(), _address(expert_of_slot),
        _address(slot_offsets), num_slots // num_tokens if num_tokens else 0, num_slots, num_rows, num_tokens,
        0 if bias is None else bias.shape[0], hidden, y_stride, x_stride,
    )  # fmt: skip
    return _finish(dots.to(dtype), out)


def spread_dots(
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    slot_offsets: Tensor | None,
    *,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    size, dtype = x.element_size(), weights.dtype
    (x, x_stride), (y, y_stride) = _rows(x), _rows(y)
    num_tokens, hidden = x.shape
    num_rows, num_slots = slot_of_row.shape[0], row_of_slot.shape[0]
    out_rows, out_dots = out
    target, stride = _target(out_rows, num_rows, hidden, x.dtype)
    dots = _vector(out_dots, num_slots, torch.float32)
    weights = _float_weights(weights)
    address = target.data_ptr()
    streaming = num_rows * hidden * size >= STREAM_BYTES and _aligned(address, stride * size)
    work = (2 * num_rows + num_tokens) * hidden * size
    _spread_dots(
        x.dtype, num_tokens or 1, work,
        address, address, dots.data_ptr(), x.data_ptr(), y.data_ptr(), weights.data_ptr(),
        row_of_slot.data_ptr(), slot_of_row.data_ptr(), _address(slot_offsets),
        num_slots // num_tokens if num_tokens else 0, num_slots, num_rows, num_tokens, hidden, size,
        stride, x_stride, y_stride, _ahead(work, 2, hidden, size), streaming,
    )  # fmt: skip
    return _finish(target, out_rows), _finish(dots.to(dtype), out_dots)


def take(values: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    values = values.contiguous()
    target = _vector(out, index.shape[0], values.dtype)
    size = values.element_size()
    _take(
        size, index.shape[0], index.shape[0] * 2 * size,
        target.data_ptr(), values.data_ptr(), index.data_ptr(), values.shape[0],
    )  # fmt: skip
    return target if out is None else _finish(target, out)


def slot_weights(
    weights: Tensor, expert_of_slot: Tensor, slot_offsets: Tensor | None, *, out: Tensor | None = None
) -> Tensor:
    weights, stride = _rows(weights)
    num_tokens, num_experts = weights.shape
    num_slots = expert_of_slot.shape[0]
    target = _vector(out, num_slots, weights.dtype)
    _slot_weights(
        weights.dtype, max(num_tokens, 1), num_slots * 16,
        target.data_ptr(), weights.data_ptr(), expert_of_slot.data_ptr(), _address(slot_offsets),
        num_slots // num_tokens if num_tokens else 0, num_slots, num_experts, num_tokens, stride,
    )  # fmt: skip
    return target if out is None else _finish(target, out)


def slot_weights_backward(
    grad: Tensor,
    expert_of_slot: Tensor,
    slot_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    accumulate: bool,
    *,
    out: Tensor | None = None,
) -> Tensor:
    grad = grad.contiguous()
    dtype = grad.dtype
    straight = out if dtype is torch.float32 else None
    target, stride = _target(straight, num_tokens, num_experts, torch.float32)
    _slot_weights_backward(
        dtype, num_tokens, num_tokens * num_experts * 4,
        target.data_ptr(), grad.data_ptr(), expert_of_slot.data_ptr(), _address(slot_offsets),
        expert_of_slot.shape[0] // num_tokens if num_tokens else 0, expert_of_slot.shape[0], num_experts,
        stride, accumulate,
    )  # fmt: skip
    return _finish(target.to(dtype), out)
