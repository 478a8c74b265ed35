"""The activations of experts on the CPU: kernels, then launchers.

A row is read where the first product left it, its two halves or its pairs side by side, and the gradient is written
in the same order.
"""

import numpy as np
from llvmlite import ir
from numba import int64
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.numba_kit.blocks import fence, splat, zeros
from moeroute.ops.numba_kit.elementary import ONE, sigmoid
from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.lanes import choose
from moeroute.ops.numba_kit.launch import FLOATS, kernel
from moeroute.ops.numba_kit.pointers import (
    I16,
    I32,
    LANES,
    STORAGE,
    block_type,
    first_lanes,
    masked_load,
    masked_store,
    narrowed_to,
    vector_address,
    widened,
)
from moeroute.ops.numba_kit.row_sums import load_part, store_block, store_part
from moeroute.ops.numba_kit.slots import Rows, matrix
from moeroute.ops.rows.on_numba import past_caches

KINDS = {"swiglu": 0, "geglu": 1, "swiglu_clamped": 2, "relu2": 3}
_, GEGLU, CLAMPED, RELU2 = KINDS.values()
CUBIC, STEEPNESS, TRIPLE = map(np.float32, (0.044715, 1.5957691216057308, 0.134145))
ALPHA, LIMIT, LOWEST = map(np.float32, (1.702, 7, -7))

# ---------------------------------------------------------------------------- kernels: pairs

_EVEN_AND_ODD = [ir.Constant(ir.VectorType(I32, LANES), list(range(first, 2 * LANES, 2))) for first in (0, 1)]
_ALTERNATING = ir.Constant(ir.VectorType(I32, 2 * LANES), [i // 2 + i % 2 * LANES for i in range(2 * LANES)])


def _integer(kind):
    """A type as wide as a stored element, of which there is a masked load everywhere."""
    return I16 if kind in ("bfloat16", "float16") else STORAGE[kind]


@intrinsic
def load_pairs(typingctx, pointer, offset, count):
    """The even and the odd ones of 2 * count elements; the other lanes are +0 and their memory is not read."""

    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        element = _integer(kind)
        address = vector_address(builder, args[0], args[1], element, 2 * LANES)
        mask = first_lanes(builder, builder.add(args[2], args[2]), 2 * LANES)
        value = masked_load(builder, address, mask, ir.VectorType(element, 2 * LANES))
        undefined = ir.Constant(value.type, ir.Undefined)
        parts = [builder.shuffle_vector(value, undefined, lanes) for lanes in _EVEN_AND_ODD]
        stored = ir.VectorType(STORAGE[kind], LANES)
        blocks = [widened(builder, kind, builder.bitcast(part, stored)) for part in parts]
        return context.make_tuple(builder, sig.return_type, blocks)

    return types.UniTuple(block_type, 2)(pointer, types.int64, types.int64), codegen


@intrinsic
def store_pairs(typingctx, pointer, offset, even, odd, count):
    """The inverse of `load_pairs`."""

    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        element = _integer(kind)
        block = ir.VectorType(element, LANES)
        parts = [builder.bitcast(narrowed_to(builder, kind, value), block) for value in args[2:4]]
        address = vector_address(builder, args[0], args[1], element, 2 * LANES)
        mask = first_lanes(builder, builder.add(args[4], args[4]), 2 * LANES)
        masked_store(builder, address, mask, builder.shuffle_vector(*parts, _ALTERNATING))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, block_type, block_type, types.int64), codegen


# ---------------------------------------------------------------------------- kernels: a block


@helper
def not_above(x, limit):
    """x, cut at the limit from above; a NaN stays."""
    return choose(x > splat(limit), splat(limit), x)


@helper
def not_below(x, limit):
    """x, cut at the limit from below; a NaN stays."""
    return choose(splat(limit) > x, splat(limit), x)


@helper
def inside(gate, up, kind):
    """The two factors before the sigmoid: cut and raised where the activation does that."""
    if kind == CLAMPED:
        return not_above(gate, LIMIT), not_below(not_above(up, LIMIT), LOWEST) + splat(ONE)
    return gate, up


@helper
def sigmoid_of(gate, kind):
    """The sigmoid of what the activation puts into it."""
    if kind == GEGLU:
        return sigmoid((gate + ((gate * gate) * splat(CUBIC)) * gate) * splat(STEEPNESS))
    if kind == CLAMPED:
        return sigmoid(gate * splat(ALPHA))
    return sigmoid(gate)


@helper
def slope_of(gate, s, kind):
    """Of gate * sigmoid; where the sigmoid is flat, the other factors may be infinite."""
    bend = s * (splat(ONE) - s)
    term = bend
    if kind == GEGLU:
        term = bend * (((gate * gate) * splat(TRIPLE) + splat(ONE)) * splat(STEEPNESS))
    elif kind == CLAMPED:
        term = bend * splat(ALPHA)
    return s + choose(bend > zeros(), term * gate, bend)


# ---------------------------------------------------------------------------- kernels


@kernel(keys=FLOATS)
def activate_kernel(
    out: Rows,
    x: Rows,
    kind: int64,
    interleaved: int64,
    width: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """One pass over the rows: gate and up are read where they lie."""
    for r in range(lo, hi):
        at, to = r * x.stride, r * out.stride
        for h in range(0, width, LANES):
            count = min(LANES, width - h)
            if kind == RELU2:
                found = not_below(load_part(x.data, at + h, count), np.float32(0))
                found = found * found
            else:
                if interleaved:
                    gate, up = load_pairs(x.data, at + 2 * h, count)
                else:
                    gate, up = load_part(x.data, at + h, count), load_part(x.data, at + width + h, count)
                gate, up = inside(gate, up, kind)
                found = (gate * sigmoid_of(gate, kind)) * up
            if count == LANES:
                store_block(out.data, to + h, found, streaming)
            else:
                store_part(out.data, to + h, found, count)
    fence()


@kernel(keys=FLOATS)
def activate_backward_kernel(
    out: Rows,
    result: Rows,
    grad: Rows,
    x: Rows,
    kind: int64,
    interleaved: int64,
    again: int64,
    width: int64,
    streaming: int64,
    lo: int64,
    hi: int64,
):
    """One pass over gradient and rows; with `again` the activation is made once more beside it."""
    for r in range(lo, hi):
        at, to = r * x.stride, r * out.stride
        for h in range(0, width, LANES):
            count = min(LANES, width - h)
            dy = load_part(grad.data, r * grad.stride + h, count)
            if kind == RELU2:
                positive = not_below(load_part(x.data, at + h, count), np.float32(0))
                made = positive * positive
                store_part(out.data, to + h, dy * (positive + positive), count)
            else:
                if interleaved:
                    first, second = load_pairs(x.data, at + 2 * h, count)
                else:
                    first, second = load_part(x.data, at + h, count), load_part(x.data, at + width + h, count)
                gate, up = inside(first, second, kind)
                s = sigmoid_of(gate, kind)
                gated = gate * s
                made = gated * up
                to_gate, to_up = (dy * up) * slope_of(gate, s, kind), dy * gated
                if kind == CLAMPED:
                    to_gate = choose(first > splat(LIMIT), zeros(), to_gate)
                    to_up = choose(second > splat(LIMIT), zeros(), choose(splat(LOWEST) > second, zeros(), to_up))
                if interleaved:
                    store_pairs(out.data, to + 2 * h, to_gate, to_up, count)
                elif count == LANES:
                    store_block(out.data, to + h, to_gate, streaming)
                    store_block(out.data, to + width + h, to_up, streaming)
                else:
                    store_part(out.data, to + h, to_gate, count)
                    store_part(out.data, to + width + h, to_up, count)
            if again:
                store_part(result.data, r * result.stride + h, made, count)
    fence()


# ---------------------------------------------------------------------------- launchers


def activate(x: Tensor, activation: str, interleaved: bool) -> Tensor:
    """Allocates the [M, I] result."""
    x = layout.rows(x)
    width, size = _width(x, activation), x.element_size()
    out = layout.new_matrix(x.shape[0], width, x.dtype)
    activate_kernel(
        x.dtype,
        items=x.shape[0],
        work=(x.numel() + out.numel()) * size,
        out=matrix(out),
        x=matrix(x),
        kind=KINDS[activation],
        interleaved=interleaved,
        width=width,
        streaming=past_caches(out.data_ptr(), width * size, out.numel() * size),
    )
    return out


def activate_backward(
    grad: Tensor, x: Tensor, activation: str, interleaved: bool, again: bool
) -> tuple[Tensor, Tensor | None]:
    """Allocates the gradient of x, and the [M, I] result of `activate` if it is wanted again."""
    grad, x = layout.rows(grad), layout.rows(x)
    width, size = _width(x, activation), x.element_size()
    out = layout.new_matrix(x.shape[0], x.shape[1], x.dtype)
    result = layout.new_matrix(x.shape[0], width, x.dtype) if again else None
    activate_backward_kernel(
        x.dtype,
        items=x.shape[0],
        work=(2 * x.numel() + grad.numel()) * size,
        out=matrix(out),
        result=matrix(result),
        grad=matrix(grad),
        x=matrix(x),
        kind=KINDS[activation],
        interleaved=interleaved,
        again=again,
        width=width,
        streaming=past_caches(out.data_ptr(), width * size, out.numel() * size),
    )
    return out, result


def _width(x: Tensor, activation: str) -> int:
    return x.shape[1] if activation == "relu2" else x.shape[1] // 2
