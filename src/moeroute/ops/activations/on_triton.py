"""The activations of experts in Triton: kernels, then launchers.

A program has a tile of rows and columns of the result. The two numbers that one is made of lie half a row apart or
side by side, and so do their gradients.
"""

import triton
import triton.language as tl
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.gating.triton_kernels import exp
from moeroute.ops.triton_kit import launch, narrow, power_of_two, programs, tile_rows, widen

KINDS = {"swiglu": 0, "geglu": 1, "swiglu_clamped": 2, "relu2": 3}
_GEGLU, _CLAMPED, _RELU2 = map(tl.constexpr, (1, 2, 3))
_CUBIC, _STEEPNESS, _TRIPLE = map(tl.constexpr, (0.044715, 1.5957691216057308, 0.134145))
_ALPHA, _LIMIT = map(tl.constexpr, (1.702, 7.0))

TILE = 1024  # elements of the result

# ---------------------------------------------------------------------------- kernels


@triton.jit
def place(num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows [ROWS, 1] and columns [1, BLOCK] of this program, and which there are."""
    blocks = tl.cdiv(width, BLOCK)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = ((row >= 0) & (row < num_rows))[:, None] & (column < width)
    return row.to(tl.int64)[:, None], column, inside


@triton.jit
def factors(gate, up, KIND: tl.constexpr):
    """Both as they are used, and the sigmoid: the cut of a clamped one, the bend of GELU."""
    if KIND == _CLAMPED:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, up)
        up = tl.where(up < -_LIMIT, -_LIMIT, up) + 1.0
        inner = gate * _ALPHA
    elif KIND == _GEGLU:
        inner = (gate + ((gate * gate) * _CUBIC) * gate) * _STEEPNESS
    else:
        inner = gate
    e = exp(0.0 - inner)
    return gate, up, tl.math.div_rn(tl.full(e.shape, 1.0, tl.float32), e + 1.0)


@triton.jit
def slope_of(gate, s, KIND: tl.constexpr):
    """Of gate * sigmoid; where the sigmoid is flat, the other factors may be infinite."""
    bend = s * (1.0 - s)
    term = bend
    if KIND == _GEGLU:
        term = bend * (((gate * gate) * _TRIPLE + 1.0) * _STEEPNESS)
    elif KIND == _CLAMPED:
        term = bend * _ALPHA
    return s + tl.where(bend > 0.0, term * gate, bend)


@triton.jit(do_not_specialize=["num_rows"])
def activate_kernel(
    out, x, num_rows, width, x_stride, KIND: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One pass over the rows: gate and up are read where they lie."""
    row, column, inside = place(num_rows, width, ROWS, BLOCK)
    at = x + row * x_stride + column * (1 if APART else 2)
    first = widen(tl.load(at, mask=inside, other=0))
    if KIND == _RELU2:
        positive = tl.where(first < 0.0, 0.0, first)
        found = positive * positive
    else:
        gate, up, s = factors(first, widen(tl.load(at + (width if APART else 1), mask=inside, other=0)), KIND)
        found = (gate * s) * up
    tl.store(out + row * width + column, narrow(found, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def activate_backward_kernel(
    out,
    result,
    grad,
    x,
    num_rows,
    width,
    grad_stride,
    x_stride,
    KIND: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One pass over gradient and rows."""
    row, column, inside = place(num_rows, width, ROWS, BLOCK)
    at = x + row * x_stride + column * (1 if APART else 2)
    first = widen(tl.load(at, mask=inside, other=0))
    dy = widen(tl.load(grad + row * grad_stride + column, mask=inside, other=0))
    if KIND == _RELU2:
        positive = tl.where(first < 0.0, 0.0, first)
        made = positive * positive
        tl.store(out + row * width + column, narrow(dy * (positive + positive), out.dtype.element_ty), mask=inside)
    else:
        second = widen(tl.load(at + (width if APART else 1), mask=inside, other=0))
        gate, up, s = factors(first, second, KIND)
        gated = gate * s
        made = gated * up
        to_gate, to_up = (dy * up) * slope_of(gate, s, KIND), dy * gated
        if KIND == _CLAMPED:
            to_gate = tl.where(first > _LIMIT, 0.0, to_gate)
            to_up = tl.where((second > _LIMIT) | (second < -_LIMIT), 0.0, to_up)
        to = out + row * (2 * width) + column * (1 if APART else 2)
        tl.store(to, narrow(to_gate, out.dtype.element_ty), mask=inside)
        tl.store(to + (width if APART else 1), narrow(to_up, out.dtype.element_ty), mask=inside)
    if result is not None:
        tl.store(result + row * width + column, narrow(made, result.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------- launchers


def activate(x: Tensor, activation: str, interleaved: bool) -> Tensor:
    """Allocates the [M, I] result."""
    x = layout.rows(x)
    num_rows, width = x.shape[0], _width(x, activation)
    out = layout.new((num_rows, width), x.dtype, x.device)
    rows, block = _tile(num_rows, width)
    launch(
        activate_kernel,
        programs(num_rows, rows) * programs(width, block),
        out=out,
        x=x,
        num_rows=num_rows,
        width=width,
        x_stride=x.stride(0),
        warps=4,
        KIND=KINDS[activation],
        APART=not interleaved or activation == "relu2",
        ROWS=rows,
        BLOCK=block,
    )
    return out


def activate_backward(
    grad: Tensor, x: Tensor, activation: str, interleaved: bool, again: bool
) -> tuple[Tensor, Tensor | None]:
    """Allocates the gradient of x, and the [M, I] result of `activate` if it is wanted again."""
    grad, x = layout.rows(grad), layout.rows(x)
    num_rows, width = x.shape[0], _width(x, activation)
    out = layout.new(tuple(x.shape), x.dtype, x.device)
    result = layout.new((num_rows, width), x.dtype, x.device) if again else None
    rows, block = _tile(num_rows, width)
    launch(
        activate_backward_kernel,
        programs(num_rows, rows) * programs(width, block),
        out=out,
        result=result,
        grad=grad,
        x=x,
        num_rows=num_rows,
        width=width,
        grad_stride=grad.stride(0),
        x_stride=x.stride(0),
        warps=4,
        KIND=KINDS[activation],
        APART=not interleaved or activation == "relu2",
        ROWS=rows,
        BLOCK=block,
    )
    return out, result


def _width(x: Tensor, activation: str) -> int:
    return x.shape[1] if activation == "relu2" else x.shape[1] // 2


def _tile(num_rows: int, width: int) -> tuple[int, int]:
    block = tile_rows(4 * width, min(power_of_two(width), TILE))
    return tile_rows(num_rows, TILE // block, block), block
