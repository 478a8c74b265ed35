"""Kernel helpers that several rooms use: part of a row as a block, and the dot product of two rows."""

from moeroute.ops.numba_kit.blocks import load, load_tail, pairwise, store, store_tail, stream, zeros
from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.pointers import LANES


@helper
def load_part(pointer, offset, count):
    """A block, or its first `count` elements."""
    if count == LANES:
        return load(pointer, offset)
    return load_tail(pointer, offset, count)


@helper
def store_block(out, offset, block, streaming):
    """Store a block; a streaming store goes past the cache."""
    if streaming:
        stream(out, offset, block)
    else:
        store(out, offset, block)


@helper
def store_part(pointer, offset, block, count):
    """A block, or its first `count` elements, into memory."""
    if count == LANES:
        store(pointer, offset, block)
    else:
        store_tail(pointer, offset, block, count)


@helper
def biased_product(y, y_offset, x, x_offset, bias, bias_offset, count):
    """A block of (y + bias) * x; a bias_offset below 0 means no bias."""
    left = load_part(y, y_offset, count)
    if bias_offset >= 0:
        left = left + load_part(bias, bias_offset, count)
    return left * load_part(x, x_offset, count)


@helper
def dot_row(y, y_offset, x, x_offset, bias, bias_offset, size):
    """256 partial sums of the products, then neighbours. A bias (offset >= 0) is added to y first."""
    p0, p1, p2, p3 = zeros(), zeros(), zeros(), zeros()
    whole = size - size % (4 * LANES)
    biased = bias_offset >= 0
    for h in range(0, whole, 4 * LANES):
        b = bias_offset + h if biased else bias_offset
        step = LANES if biased else 0
        p0 = p0 + biased_product(y, y_offset + h, x, x_offset + h, bias, b, LANES)
        p1 = p1 + biased_product(y, y_offset + h + LANES, x, x_offset + h + LANES, bias, b + step, LANES)
        p2 = p2 + biased_product(y, y_offset + h + 2 * LANES, x, x_offset + h + 2 * LANES, bias, b + 2 * step, LANES)
        p3 = p3 + biased_product(y, y_offset + h + 3 * LANES, x, x_offset + h + 3 * LANES, bias, b + 3 * step, LANES)
    for h in range(whole, size, LANES):
        b = bias_offset + h if biased else bias_offset
        term = biased_product(y, y_offset + h, x, x_offset + h, bias, b, min(LANES, size - h))
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
