"""Rows as 8-bit and 4-bit numbers, alone and behind a SwiGLU.

In float32: value / scale to the nearest number of the type, ties to even, saturated. No result has a gradient.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moeroute import check, memory
from moeroute.dtypes import FLOATS
from moeroute.interop.torch_npu.activation import clipped_swiglu, swiglu
from moeroute.interop.torch_npu.arguments import dtype_of, npu_function, refused, unavailable
from moeroute.interop.torch_npu.groups import ENDS, SIZES, Segment, group_of_row, segments
from moeroute.ops.quantization.op import dynamic_quantize

LARGEST = {torch.int8: 127.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fn: 448.0, torch.quint4x2: 7.0}
"""What the largest magnitude of a row becomes."""
_INTEGERS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.quint4x2: (-8, 7)}
_NIBBLES = 8  # in an int32
_CHUNK = 1 << 16  # elements; the float32 numbers of a step, and its intermediate ones, stay in a cache

# ---------------------------------------------------------------------------- numbers


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest number of a type, ties to even; saturated in integers and where the type is of 8 bits.

    A NaN is 0 as an integer. quint4x2 is eight two's-complement nibbles in an int32, the first in the lowest bits.
    """
    if dtype is torch.int32:
        low, high = -(2.0**31), 2.0**31 - 1
        return values.double().nan_to_num(0.0, high, low).round_().clamp_(low, high).to(dtype)
    if dtype in _INTEGERS:
        low, high = _INTEGERS[dtype]
        whole = values.nan_to_num(0.0, math.inf, -math.inf).round_().clamp_(low, high)
        return packed(whole.to(torch.int32)) if dtype is torch.quint4x2 else whole.to(dtype)
    if dtype in LARGEST:
        values = torch.where(values.isfinite(), values.clamp(-LARGEST[dtype], LARGEST[dtype]), values)
    return values.to(dtype)


def packed(nibbles: Tensor) -> Tensor:
    """int32 [..., N] of 4-bit numbers as int32 [..., N / 8]."""
    eights = nibbles.unflatten(-1, (nibbles.shape[-1] // _NIBBLES, _NIBBLES)) & 15
    places = torch.arange(0, 4 * _NIBBLES, 4, dtype=torch.int32, device=nibbles.device)
    return (eights << places).sum(-1, dtype=torch.int32)


def unpacked(words: Tensor) -> Tensor:
    """int32 [..., N / 8] as the int8 [..., N] that `packed` made it of."""
    places = torch.arange(28, -1, -4, dtype=torch.int32, device=words.device)
    return ((words[..., None] << places) >> 28).flatten(-2).to(torch.int8)


def dynamic_rows(
    rows: Tensor,
    dtype: torch.dtype,
    *,
    smooth: Tensor | None = None,
    group_of_row: Tensor | None = None,
    largest: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Rows in `dtype` with one float32 scale each, max |row · smooth| / largest; a row of zeros has scale 0.

    Args:
        rows: [R, H] float.
        dtype: a key of `LARGEST`.
        smooth: float32 [H], or [G, H] with `group_of_row`.
        group_of_row: int32 [R]; a row of group -1 has no factors.
        largest: what the largest magnitude becomes; 0: the type's own.
    """
    if dtype is torch.int8 and largest in (0.0, LARGEST[torch.int8]):
        return dynamic_quantize(rows, smooth=smooth, expert_of_row=group_of_row)
    values = rows.float()
    if smooth is not None:
        if group_of_row is not None:
            ones = smooth.new_ones(1, smooth.shape[1])
            smooth = torch.cat([smooth, ones])[group_of_row.long()]  # -1 is the last
        values = values * smooth
    return _scaled(values, 1, dtype, largest)


def _scaled(values: Tensor, axis: int | tuple[int, ...], dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    """One scale over an axis or several; of nothing it is 0."""
    if values.numel() == 0:
        scale = values.sum(axis, keepdim=True)
    else:
        scale = values.abs().amax(axis, keepdim=True) / (largest or LARGEST[dtype])
    quotient = torch.where(scale == 0, 0.0, values / scale)
    return rounded(quotient, dtype), scale.squeeze(axis)


def _target(
    function: str, argument: str, value: torch.dtype | int | None, allowed: tuple[torch.dtype, ...]
) -> torch.dtype:
    if value is None:
        return torch.int8
    dtype = dtype_of(function, argument, value)
    dtype = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}.get(dtype, dtype)
    if dtype not in allowed:
        raise refused(function, argument, f"one of {', '.join(map(str, allowed))}", value)
    return dtype


def _check_nibbles(function: str, argument: str, x: Tensor, dtype: torch.dtype) -> None:
    if dtype is torch.quint4x2 and x.shape[-1] % _NIBBLES:
        raise check.wrong_shape(function, argument, "of a multiple of 8 columns for quint4x2", x)


def _float_input(function: str, argument: str, x: Tensor, least: int) -> None:
    check.tensor(function, argument, x)
    if x.dtype not in FLOATS[:3]:
        raise check.wrong_dtype(function, argument, "float16, bfloat16 or float32", x)
    if x.ndim < least:
        raise check.wrong_shape(function, argument, f"of at least {least} axes", x)


# ---------------------------------------------------------------------------- quantisation alone


@npu_function
@torch.no_grad()
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | torch.dtype | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantise with scales that are found: scale = max |input · smooth| / D, then input · smooth / scale.

    Args:
        input: [..., H], of two axes or more.
        smooth_scales: [H]; [G, H] with `group_index`; for "perchannel" one factor for each row of the last two axes.
        group_index: [G] ends of the groups among the rows of [R, H]. The rows behind the last are not smoothed.
        dst_type: int8 (None), float8_e5m2, float8_e4m3fn or quint4x2, of which int32 holds eight.
        quant_mode: what has one scale: "pertoken" a row, "pertensor" all, "perchannel" a column of the last two axes.
        dst_type_max: D; 0: 127, 57344, 448 or 7 for these types.

    Returns:
        The numbers, and the scales in float32: [...], [1], or [..., H] without axis −2.
    """
    function = "npu_dynamic_quant"
    _float_input(function, "input", input, 2)
    dtype = _target(function, "dst_type", dst_type, tuple(LARGEST))
    _check_nibbles(function, "input", input, dtype)
    check.one_of(function, "quant_mode", quant_mode, ("pertoken", "pertensor", "perchannel"))
    largest = check.number(function, "dst_type_max", dst_type_max)
    width = input.shape[-1]
    smooth, groups = None, None
    if group_index is not None and (smooth_scales is None or quant_mode == "perchannel"):
        raise refused(function, "group_index", "None without smooth_scales for the columns", "a tensor")
    if smooth_scales is not None:
        by_group = group_index is not None
        factors = input.shape[-2] if quant_mode == "perchannel" else width
        check.shaped(function, "smooth_scales", smooth_scales, (None, factors) if by_group else (factors,))
        check.floating(function, "smooth_scales", smooth_scales)
        smooth = smooth_scales.float()
    if group_index is not None and smooth is not None:
        num_rows = math.prod(input.shape[:-1])
        found = segments(function, "group_index", group_index, ENDS, num_rows, smooth.shape[0])
        groups = group_of_row(found, num_rows, input.device)
    if quant_mode == "pertoken":
        rows = input.reshape(math.prod(input.shape[:-1]), width)
        values, scale = dynamic_rows(rows, dtype, smooth=smooth, group_of_row=groups, largest=largest)
        return values.view(*input.shape[:-1], values.shape[1]), scale.view(input.shape[:-1])
    product = input.float()
    if groups is not None and smooth is not None:
        smooth = torch.cat([smooth, smooth.new_ones(1, width)])[groups.long()].view(input.shape)
    if smooth is not None:
        product = product * (smooth[:, None] if quant_mode == "perchannel" else smooth)
    if quant_mode == "perchannel":
        return _scaled(product, -2, dtype, largest)
    values, scale = _scaled(product, tuple(range(input.ndim)), dtype, largest)
    return values, scale.view(1)


@npu_function
@torch.no_grad()
def npu_quantize(
    self: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int | torch.dtype,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """Quantise with given scales: self / scales + zero_points, or self · scales + zero_points.

    Args:
        self: float.
        scales: one number, [C] for the C elements along `axis`, or of a shape that broadcasts to `self`.
        zero_points: as `scales`; None: 0.
        dtype: int8, uint8 or int32 (or qint8, quint8, qint32), float8_e5m2, float8_e4m3fn, or quint4x2, of which int32
            holds eight.
        axis: the axis of `scales` [C].
        div_mode: divide by the scales, else multiply.
    """
    function = "npu_quantize"
    _float_input(function, "self", self, 1)
    target = _target(function, "dtype", dtype, (*LARGEST, torch.uint8, torch.int32))
    _check_nibbles(function, "self", self, target)
    axis = check.integer(function, "axis", axis, -self.ndim, max(self.ndim - 1, 1))
    scale = _along(function, "scales", scales, self, axis)
    values = self.float() / scale if check.flag(function, "div_mode", div_mode) else self.float() * scale
    if zero_points is not None:
        values = values + _along(function, "zero_points", zero_points, self, axis)
    return rounded(values, target)


def _along(function: str, argument: str, factor: Tensor, x: Tensor, axis: int) -> Tensor:
    """Float32, of a shape that broadcasts to x's."""
    check.tensor(function, argument, factor)
    shape = list(factor.shape)
    axis = min(axis, x.ndim - 1)
    if factor.numel() == 1:
        shape = [1] * x.ndim
    elif factor.ndim == 1:
        shape = [1] * x.ndim
        shape[axis] = factor.shape[0]
    if len(shape) > x.ndim or any(
        size not in (1, full) for size, full in zip(shape[::-1], x.shape[::-1], strict=False)
    ):
        raise check.wrong_shape(function, argument, f"[C] along axis {axis} of {list(x.shape)}, or like it", factor)
    return factor.float().reshape(shape)


# ---------------------------------------------------------------------------- behind SwiGLU


@npu_function
@torch.no_grad()
def npu_swiglu_quant(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    offsets: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    group_list_type: int = 0,
    dst_type: int | torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """SwiGLU, smoothing and quantisation.

    Args:
        x: [..., 2 n].
        smooth_scales: [G, n] or [G]; of one group [n] too.
        offsets: as `smooth_scales`, for mode 0; without meaning in mode 1.
        group_index: [G] ends (`group_list_type` 0) or sizes (1) of the groups of rows; None: one group of all. Rows of
            no group are zero, and their scales.
        activate_left: silu of the left half, else of the right one.
        quant_mode: 0: y · smooth + offset as it is. 1: with a scale for each row.
        group_list_type: 0 or 1.
        dst_type: int8 (None), float8_e5m2 or float8_e4m3fn.

    Returns:
        [..., n], and float32 [...]: zero in mode 0, and in mode 1 the factor that each row was multiplied by, which is
        the largest number of the type over the largest magnitude of the row, and so the reciprocal of the scales of
        all other functions; zero for a row of zeros.
    """
    function = "npu_swiglu_quant"
    _float_input(function, "x", x, 2)
    _check_mode(function, "quant_mode", quant_mode)
    _check_mode(function, "group_list_type", group_list_type)
    dtype = _target(function, "dst_type", dst_type, tuple(LARGEST)[:3])
    rows, width = _rows_of_halves(function, x)
    found = _groups(function, group_index, group_list_type, rows.shape[0])
    left_first = check.flag(function, "activate_left", activate_left)
    smooth = factors_of(function, "smooth_scales", smooth_scales, len(found), width)
    offset = None if quant_mode == 1 else factors_of(function, "offsets", offsets, len(found), width)

    def activation(start: int, stop: int) -> Tensor:
        left, right = rows[start:stop].float().chunk(2, 1)
        return swiglu(left, right) if left_first else swiglu(right, left)

    values, scale = quantised(activation, rows, found, smooth, offset, quant_mode, dtype)
    scale = torch.where(scale == 0, 0.0, scale.reciprocal())
    return values.view(*x.shape[:-1], width), scale.view(x.shape[:-1])


@npu_function
@torch.no_grad()
def npu_dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | torch.dtype | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Scale the integers of a product, SwiGLU, smoothing and quantisation.

    Args:
        x: int32 or float [..., 2 n].
        weight_scale: [G, 2 n] factors of the columns; of one group [2 n] too. Needed for int32.
        activation_scale: one factor for each row.
        bias: int32 [G, 2 n] (of one group [2 n] too), added before the factors.
        quant_scale: [G, n] or [G] (of one group [n] too) factors of the activation; in mode 1.
        quant_offset: as `quant_scale`, in mode 0.
        group_index: [G] sizes of the groups of rows; None: one group of all. Rows of no group are zero, and their
            scales.
        activate_left: the left half is the gate, else the right one; without meaning for swiglu_mode 1.
        quant_mode: 0: y + offset as it is. 1: with a scale for each row.
        dst_type: int8 (None), float8_e5m2 or float8_e4m3fn.
        round_mode: 0 or None, to nearest.
        activate_dim: the last axis or None.
        swiglu_mode: 0: silu(gate) · linear. 1: as `npu_clipped_swiglu` of even and odd columns. 2: the same of halves.
        clamp_limit: limit of the clipped forms.
        glu_alpha: alpha of the clipped forms.
        glu_bias: bias of the clipped forms.

    Returns:
        [..., n], and the scales, float32 [...], zero in mode 0.
    """
    function = "npu_dequant_swiglu_quant"
    check.tensor(function, "x", x)
    if x.dtype is not torch.int32:
        _float_input(function, "x", x, 2)
    _check_mode(function, "quant_mode", quant_mode)
    dtype = _target(function, "dst_type", dst_type, tuple(LARGEST)[:3])
    if check.integer(function, "swiglu_mode", swiglu_mode, 0, 3) == 3:
        raise unavailable(function, "swiglu_mode", swiglu_mode)
    if round_mode is not None and check.integer(function, "round_mode", round_mode, 0, 4) != 0:
        raise unavailable(function, "round_mode", round_mode)
    if activate_dim is not None and check.integer(function, "activate_dim", activate_dim, -x.ndim, x.ndim - 1) not in (
        -1,
        x.ndim - 1,
    ):
        raise unavailable(function, "activate_dim", activate_dim)
    if quant_mode == 0 and quant_scale is not None:
        raise unavailable(function, "quant_mode", 0, "static, with quant_scale")
    if quant_mode == 1 and quant_offset is not None:
        raise refused(function, "quant_offset", "None with quant_mode 1", "a tensor")
    rows, width = _rows_of_halves(function, x)
    found = _groups(function, group_index, SIZES, rows.shape[0])
    dequantised = _dequantised(function, rows, found, weight_scale, activation_scale, bias)
    smooth = factors_of(function, "quant_scale", quant_scale, len(found), width)
    offset = factors_of(function, "quant_offset", quant_offset, len(found), width)

    def activation(start: int, stop: int) -> Tensor:
        values = dequantised(start, stop)
        left, right = (values[:, 0::2], values[:, 1::2]) if swiglu_mode == 1 else values.chunk(2, 1)
        gate, linear = (left, right) if activate_left or swiglu_mode == 1 else (right, left)
        if swiglu_mode == 0:
            return swiglu(gate, linear)
        return clipped_swiglu(gate, linear, glu_alpha, clamp_limit, glu_bias)

    result, scale = quantised(activation, rows, found, smooth, offset, quant_mode, dtype)
    return result.view(*x.shape[:-1], width), scale.view(x.shape[:-1])


def _dequantised(
    function: str,
    rows: Tensor,
    found: list[Segment],
    weight_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
) -> Callable[[int, int], Tensor]:
    """(rows + bias) · weight_scale · activation_scale, float32, of some rows; those of no group have only the last."""
    num_rows, width = rows.shape
    if weight_scale is None and rows.dtype is torch.int32:
        raise refused(function, "weight_scale", "given for an int32 x", None)
    scale = factors_of(function, "weight_scale", weight_scale, len(found), width)
    added = None
    if bias is not None:
        if bias.dtype is not torch.int32 or rows.dtype is not torch.int32:
            raise unavailable(function, "bias", f"{bias.dtype} for x of {rows.dtype}")
        added = bias if bias.ndim == 2 else bias[None]
        check.shaped(function, "bias", added, (len(found), width))
    of_row = None
    if activation_scale is not None:
        check.tensor(function, "activation_scale", activation_scale)
        if activation_scale.numel() != num_rows:
            raise check.wrong_shape(function, "activation_scale", f"[R] with R = {num_rows}, as x", activation_scale)
        of_row = activation_scale.float().reshape(num_rows, 1)

    def values_of(start: int, stop: int) -> Tensor:
        part = rows[start:stop]
        if added is not None:
            part = part.clone()
            for group, first, last in _within(found, start, stop):
                part[first:last] += added[group]
        values = part.to(torch.float32, copy=True)
        if scale is not None:
            for group, first, last in _within(found, start, stop):
                values[first:last] *= scale[group]
        return values if of_row is None else values.mul_(of_row[start:stop])

    return values_of


def quantised(
    activation: Callable[[int, int], Tensor],
    x: Tensor,
    found: list[Segment],
    smooth: Tensor | None,
    offset: Tensor | None,
    mode: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Rows of groups, quantised in mode 0 (static) or 1 (dynamic); those of none are 0, and their scales.

    Args:
        activation: float32 [stop - start, n] of the rows [start, stop) of x. It is asked for as many rows as caches
            hold, since what follows goes over them several times.
        x: [R, 2 n].
        found: the groups of rows.
        smooth: float32 [G, n].
        offset: float32 [G, n], for mode 0.
        mode: 0 or 1.
        dtype: int8, float8_e5m2 or float8_e4m3fn.
    """
    num_rows, width = x.shape[0], x.shape[1] // 2
    used = max((segment.stop for segment in found), default=0)
    groups = group_of_row(found, num_rows, x.device) if mode == 1 and smooth is not None else None
    result = memory.empty((num_rows, width), dtype, x.device)
    scales = torch.zeros(num_rows, dtype=torch.float32, device=x.device)
    step = max(_CHUNK // max(width, 1), 1)
    for start in range(0, used, step):
        stop = min(start + step, used)
        values = activation(start, stop)
        if mode == 1:
            of_rows = None if groups is None else groups[start:stop]
            result[start:stop], scales[start:stop] = dynamic_rows(values, dtype, smooth=smooth, group_of_row=of_rows)
            continue
        for group, first, last in _within(found, start, stop):
            if smooth is not None:
                values[first:last] *= smooth[group]
            if offset is not None:
                values[first:last] += offset[group]
        result[start:stop] = rounded(values, dtype)
    result[used:] = 0
    return result, scales


def _within(found: list[Segment], start: int, stop: int) -> Iterator[Segment]:
    """The parts of the groups among the rows [start, stop), counted from `start`."""
    for group, first, last in found:
        if first < stop and last > start:
            yield Segment(group, max(first - start, 0), min(last, stop) - start)


def _check_mode(function: str, argument: str, value: int) -> None:
    if value not in (0, 1):
        raise refused(function, argument, "0 or 1", value)


def _rows_of_halves(function: str, x: Tensor) -> tuple[Tensor, int]:
    """x as [R, 2 n], and n."""
    if x.ndim < 2 or x.shape[-1] % 2:
        raise check.wrong_shape(function, "x", "[..., 2 n]", x)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), x.shape[-1] // 2


def _groups(function: str, group_index: Tensor | None, list_type: int, num_rows: int) -> list[Segment]:
    if group_index is None:
        return [Segment(0, 0, num_rows)]
    return segments(function, "group_index", group_index, list_type, num_rows)


def factors_of(function: str, argument: str, factors: Tensor | None, num_groups: int, width: int) -> Tensor | None:
    """Float32 [G, n]."""
    if factors is None:
        return None
    check.tensor(function, argument, factors)
    check.floating(function, argument, factors)
    if factors.shape == (num_groups,):
        factors = factors[:, None].expand(num_groups, width)
    elif num_groups == 1 and factors.shape == (width,):
        factors = factors[None]
    check.shaped(function, argument, factors, (num_groups, width))
    return factors.float()
