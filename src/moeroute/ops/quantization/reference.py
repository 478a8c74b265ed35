"""Rows as int8 in plain torch, one arithmetic operation at a time."""

import torch
from torch import Tensor

from moeroute.ops.rows.reference import deliver, valid
from moeroute.ops.rows.reference import spread as spread_rows
from moeroute.plan import PlanTensors

Pair = tuple[Tensor | None, Tensor | None]


def dynamic_quantize(
    rows: Tensor, smooth: Tensor | None, expert_of_row: Tensor | None, *, out: Pair = (None, None)
) -> tuple[Tensor, Tensor]:
    """Allocates the [R, H] and [R] results; copies them into what `out` has of them, of any strides."""
    values = _smoothed(rows.float(), smooth, expert_of_row)
    if rows.shape[1] == 0:
        scales = values.new_zeros(rows.shape[0])
    else:
        scales = values.abs().amax(1) / 127.0
    return deliver(_saturated(values / scales[:, None]), out[0]), deliver(scales, out[1])


def quantize(rows: Tensor, scale: Tensor, offset: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [R, H] result; copies it into `out`, of any strides, if that is given."""
    return deliver(_saturated(rows.float() * scale + offset), out)


def spread_static(x: Tensor, scale: Tensor, offset: Tensor, plan: PlanTensors, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [R, H] result; copies it into `out`, of any strides, if that is given."""
    return deliver(spread_rows(quantize(x, scale, offset), None, plan), out)


def spread_quantized(
    x: Tensor, smooth: Tensor | None, expert_of_row: Tensor | None, plan: PlanTensors, *, out: Pair = (None, None)
) -> tuple[Tensor, Tensor]:
    """Allocates the [R, H] and [R] results; copies them into what `out` has of them, of any strides."""
    used = spread_rows(x.new_ones(x.shape[0], 1), None, plan) != 0
    rows, scales = dynamic_quantize(spread_rows(x, None, plan), smooth, expert_of_row)
    # A factor may be an infinity or NaN: what it makes of the zeros of a padding row is not wanted.
    return deliver(torch.where(used, rows, 0), out[0]), deliver(torch.where(used[:, 0], scales, 0), out[1])


def _smoothed(values: Tensor, smooth: Tensor | None, expert_of_row: Tensor | None) -> Tensor:
    if smooth is None:
        return values
    if expert_of_row is None:
        return values * smooth[0]
    experts = valid(expert_of_row, smooth.shape[0])
    factors = torch.cat([smooth, smooth.new_ones(1, smooth.shape[1])])  # the last row for a row of no expert
    return values * factors[experts]


def _saturated(values: Tensor) -> Tensor:
    """The nearest integer, ties to even, from -128 to 127; NaN is 0."""
    return torch.where(values.isnan(), 0.0, values).round().clamp(-128, 127).to(torch.int8)
