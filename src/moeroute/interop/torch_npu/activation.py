"""SwiGLU, RMS normalisation and rotary embedding.

The arithmetic is in float32 (float64 for float64), with one rounding to the type of the result. What has a gradient
calls its `_backward` function. The backward functions are differentiable themselves, so gradients of any order are
right.
"""

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeroute import check
from moeroute.dtypes import wide
from moeroute.interop.torch_npu.arguments import npu_function, refused, without_autocast
from moeroute.interop.torch_npu.groups import SIZES, segments

# ---------------------------------------------------------------------------- SwiGLU


@npu_function
def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """silu(A) · B for the halves A, B of `self` along `dim`; differentiable."""
    _halved_axis("npu_swiglu", "self", self, dim)
    result: Tensor = _SwiGLU.apply(self, dim)
    return result


@npu_function
def npu_swiglu_backward(grad_output: Tensor, self: Tensor, dim: int = -1) -> Tensor:
    """The gradient of `npu_swiglu` with respect to `self`, in the type of `self`."""
    axis = _halved_axis("npu_swiglu_backward", "self", self, dim)
    half = list(self.shape)
    half[axis] //= 2
    check.shaped("npu_swiglu_backward", "grad_output", grad_output, tuple(half))
    left, right = self.to(wide(self)).chunk(2, axis)
    grad = grad_output.to(left.dtype)
    gate = torch.sigmoid(left)
    slope = gate * (1 + left * (1 - gate))
    return torch.cat([grad * right * slope, grad * F.silu(left)], axis).to(self.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return swiglu(*x.to(wide(x)).chunk(2, dim)).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.dim = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return npu_swiglu_backward(grad, x, ctx.dim), None


def swiglu(gate: Tensor, linear: Tensor) -> Tensor:
    """silu(gate) · linear, in the type of both."""
    return F.silu(gate).mul_(linear)


@npu_function
@torch.no_grad()
def npu_clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """A · sigmoid(alpha · A) · (B + bias), with A cut at `limit` and B at ±`limit`; no gradient.

    Args:
        x: float. It is taken as [P, R]: P for the axes before `dim`, R for `dim` and all behind it.
        group_index: [G] counts of rows. Rows beyond their sum are zero, and it may be more than there are; None: all
            rows count.
        dim: the axis that is halved.
        alpha: the slope inside the sigmoid.
        limit: where A and B are cut.
        bias: added to B.
        interleaved: A and B are the even and odd columns of [P, R], else its halves.

    Returns:
        x's shape with `dim` halved, in x's type.
    """
    function = "npu_clipped_swiglu"
    axis = _halved_axis(function, "x", x, dim)
    num_rows = math.prod(x.shape[:axis])
    width = math.prod(x.shape[axis:])
    shape = list(x.shape)
    shape[axis] //= 2
    used = num_rows
    if group_index is not None:
        counted = segments(function, "group_index", group_index, SIZES, sys.maxsize)
        used = min(num_rows, max((segment.stop for segment in counted), default=0))
    rows = x.reshape(num_rows, width)[:used].to(wide(x))
    first, second = (rows[:, 0::2], rows[:, 1::2]) if interleaved else rows.chunk(2, 1)
    out = x.new_zeros(num_rows, width // 2)
    out[:used] = clipped_swiglu(first, second, alpha, limit, bias)
    return out.view(shape)


def clipped_swiglu(gate: Tensor, linear: Tensor, alpha: float, limit: float, bias: float) -> Tensor:
    """gate · sigmoid(alpha · gate) · (linear + bias), with the gate cut at `limit`, linear at ±`limit`."""
    gate = gate.clamp(max=limit)
    slope = (alpha * gate).sigmoid_()
    return gate.mul_(slope).mul_(linear.clamp(-limit, limit).add_(bias))


def _halved_axis(function: str, argument: str, x: Tensor, dim: int) -> int:
    """The axis `dim`, counted from the front, of a float tensor that is even there."""
    check.tensor(function, argument, x)
    check.floating(function, argument, x)
    if x.ndim == 0:
        raise check.wrong_shape(function, argument, "of at least one axis", x)
    axis = check.integer(function, "dim", dim, -x.ndim, x.ndim - 1) % x.ndim
    if x.shape[axis] % 2:
        raise check.wrong_shape(function, argument, f"even along dim = {dim}", x)
    return axis


# ---------------------------------------------------------------------------- RMS normalisation


@npu_function
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Divide by the root of the mean square over the axes of gamma, then multiply by gamma; differentiable.

    Args:
        self: [..., *D] float.
        gamma: [*D], of the type of `self` or float32.
        epsilon: added to the mean square.

    Returns:
        y, as `self`, and 1 / root, float32 with `self`'s leading axes and 1 for each axis of gamma. Only y has a
        gradient.
    """
    _check_gamma("npu_rms_norm", self, gamma)
    y, rstd = _RMSNorm.apply(self, gamma, epsilon)
    return y, rstd


@npu_function
def npu_rms_norm_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `npu_rms_norm`: of `self` in its type, of gamma in float32 (float64 for float64)."""
    function = "npu_rms_norm_backward"
    axes = _check_gamma(function, self, gamma)
    check.shaped(function, "dy", dy, tuple(self.shape))
    leading = self.shape[: self.ndim - gamma.ndim]
    check.shaped(function, "rstd", rstd, (*leading, *(1 for _ in axes)))
    dtype = wide(self)
    rstd, grad = rstd.to(dtype), dy.to(dtype)
    normal = self.to(dtype) * rstd
    scaled = grad * gamma.to(dtype)
    mean = _mean(scaled * normal, axes)
    d_gamma = (grad * normal).sum_to_size(gamma.shape)
    return (rstd * (scaled - normal * mean)).to(self.dtype), d_gamma


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        rstd = _reciprocal_root(x, gamma, epsilon)
        return (x.to(rstd.dtype) * rstd).mul_(gamma).to(x.dtype), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        x, gamma, ctx.epsilon = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, gamma, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gamma, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a second derivative rstd is a part, and the saved one is a constant
            rstd = _reciprocal_root(x, gamma, ctx.epsilon)
        return *npu_rms_norm_backward(grad, x, gamma, rstd), None


def _reciprocal_root(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    axes = range(x.ndim - gamma.ndim, x.ndim)
    return torch.rsqrt(_mean(x.to(wide(x)).square(), axes) + epsilon)


def _mean(values: Tensor, axes: range) -> Tensor:
    """The mean over some axes, which stay with size 1; that of nothing is 0."""
    count = math.prod([values.shape[axis] for axis in axes])  # torch.compile knows no generators here
    return values.sum(tuple(axes), keepdim=True) / max(count, 1)


def _check_gamma(function: str, x: Tensor, gamma: Tensor) -> range:
    """The axes of x that gamma has."""
    check.tensor(function, "self", x)
    check.floating(function, "self", x)
    check.tensor(function, "gamma", gamma)
    if gamma.ndim == 0 or gamma.ndim > x.ndim or gamma.shape != x.shape[x.ndim - gamma.ndim :]:
        raise check.wrong_shape(function, "gamma", f"of self's last axes, of {list(x.shape)}", gamma)
    if gamma.dtype not in (x.dtype, torch.float32):
        raise check.wrong_dtype(function, "gamma", f"{x.dtype}, as self, or torch.float32", gamma)
    return range(x.ndim - gamma.ndim, x.ndim)


# ---------------------------------------------------------------------------- rotary embedding


@npu_function
def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """self · r1 + rot(self) · r2; differentiable in `self`, r1 and r2.

    Args:
        self: [..., D] float.
        r1: cosines that broadcast to `self`; rounded to its type first.
        r2: sines, likewise.
        rotary_mode: "half": rot(x) = (−x2, x1) for the halves x1, x2 of the last axis. "interleave": the same with its
            even and odd elements, in place.
        rotate: [D, D]: rot(x) = x @ rotate instead.
    """
    _check_rotary("npu_rotary_mul", self, r1, r2, rotary_mode, rotate)
    result: Tensor = _RotaryMul.apply(self, r1, r2, rotary_mode, rotate)
    return result


@npu_function
def npu_rotary_mul_backward(
    grad: Tensor, self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `npu_rotary_mul` with respect to `self`, r1 and r2, each in its type."""
    function = "npu_rotary_mul_backward"
    _check_rotary(function, self, r1, r2, rotary_mode, None)
    check.shaped(function, "grad", grad, tuple(self.shape))
    arguments = (grad, self, r1, r2, rotary_mode, None)
    return _rotary_dx(*arguments), _rotary_dr1(*arguments), _rotary_dr2(*arguments)


class _RotaryMul(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, r1: Tensor, r2: Tensor, mode: str, rotate: Tensor | None) -> Tensor:
        values = x.to(wide(x))
        return (values * _as(r1, x)).add_(_rotated(values, mode, rotate).mul_(_as(r2, x))).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.mode, rotate = inputs
        ctx.save_for_backward(*tensors, rotate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, r1, r2, rotate = ctx.saved_tensors
        arguments = (grad, x, r1, r2, ctx.mode, rotate)
        gradients = (_rotary_dx, _rotary_dr1, _rotary_dr2)
        needed = zip(gradients, ctx.needs_input_grad[:3], strict=True)
        return *(gradient(*arguments) if needs else None for gradient, needs in needed), None, None


def _rotary_dx(grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, mode: str, rotate: Tensor | None) -> Tensor:
    grad = grad.to(wide(x))
    back = _rotated(grad * _as(r2, x), mode, None if rotate is None else rotate.t())
    # Half and interleave are rotations by a right angle, whose transpose is their negative.
    return (grad * _as(r1, x) + (back if rotate is not None else -back)).to(x.dtype)


def _rotary_dr1(grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, mode: str, rotate: Tensor | None) -> Tensor:
    dtype = wide(x)
    return (grad.to(dtype) * x.to(dtype)).sum_to_size(r1.shape).to(r1.dtype)


def _rotary_dr2(grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, mode: str, rotate: Tensor | None) -> Tensor:
    dtype = wide(x)
    return (grad.to(dtype) * _rotated(x.to(dtype), mode, rotate)).sum_to_size(r2.shape).to(r2.dtype)


def _as(factor: Tensor, x: Tensor) -> Tensor:
    """Rounded to x's type, then widened."""
    return factor.to(x.dtype).to(wide(x))


def _rotated(x: Tensor, mode: str, rotate: Tensor | None) -> Tensor:
    if rotate is not None:
        with without_autocast(x.device):
            return x @ rotate.to(x.dtype)
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)


def _check_rotary(function: str, x: Tensor, r1: Tensor, r2: Tensor, mode: str, rotate: Tensor | None) -> None:
    check.tensor(function, "self", x)
    check.floating(function, "self", x)
    if mode not in ("half", "interleave"):
        phrase = f"The rotary_mode of npu_rotary_mul should be half or interleave, but got {mode}"
        raise refused(function, "rotary_mode", "'half' or 'interleave'", repr(mode), phrase)
    if x.ndim == 0 or (rotate is None and x.shape[-1] % 2):
        raise check.wrong_shape(function, "self", "[..., D] with D even", x)
    for name, factor in (("r1", r1), ("r2", r2)):
        check.tensor(function, name, factor)
        check.floating(function, name, factor)
        if factor.ndim > x.ndim or any(
            size not in (1, full) for size, full in zip(factor.shape[::-1], x.shape[::-1], strict=False)
        ):
            raise check.wrong_shape(function, name, f"one that broadcasts to self, {list(x.shape)}", factor)
    if rotate is not None:
        check.shaped(function, "rotate", rotate, (x.shape[-1], x.shape[-1]))
        check.floating(function, "rotate", rotate)
