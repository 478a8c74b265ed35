"""Kernel helpers that several rooms use: part of a row as a block, and the dot product of two rows."""

from moeroute.ops.launch import kernel
from moeroute.ops.simd import LANES, load, load_tail, pairwise, store, store_tail, zeros


@kernel
def some(pointer, offset, count):
    """A block, or its first `count` elements."""
    if count == LANES:
        return load(pointer, offset)
    return load_tail(pointer, offset, count)


@kernel
def put(pointer, offset, block, count):
    """A block, or its first `count` elements, into memory."""
    if count == LANES:
        store(pointer, offset, block)
    else:
        store_tail(pointer, offset, block, count)


@kernel
def dot_row(y, y_offset, x, x_offset, bias, bias_offset, size):
    """256 partial sums of the products, then neighbours. A bias (offset >= 0) is added to y first."""
    p0, p1, p2, p3 = zeros(), zeros(), zeros(), zeros()
    for h in range(0, size, LANES):
        count = min(LANES, size - h)
        left = some(y, y_offset + h, count)
        if bias_offset >= 0:
            left = left + some(bias, bias_offset + h, count)
        product = left * some(x, x_offset + h, count)
        part = (h // LANES) % 4
        if part == 0:
            p0 = p0 + product
        elif part == 1:
            p1 = p1 + product
        elif part == 2:
            p2 = p2 + product
        else:
            p3 = p3 + product
    return (pairwise(p0) + pairwise(p1)) + (pairwise(p2) + pairwise(p3))
