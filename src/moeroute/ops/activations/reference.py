"""The activations of experts in plain torch, one rounding per operation, as docs/arithmetic.md says.

float64 runs through the same lines with torch's own exp and is differentiable there, which the second derivatives use.
"""

import torch
from torch import Tensor

from moeroute.dtypes import wide
from moeroute.ops.gating.reference import exp

CUBIC, STEEPNESS = 0.044715, 1.5957691216057308  # 2 * sqrt(2 / pi)
TRIPLE = 0.134145  # 3 * CUBIC
ALPHA, LIMIT = 1.702, 7.0


def activate(x: Tensor, activation: str, interleaved: bool) -> Tensor:
    """Allocates the [M, I] result."""
    values = x.to(wide(x))
    if activation == "relu2":
        positive = torch.where(values < 0, 0.0, values)
        return (positive * positive).to(x.dtype)
    gate, up = _parts(values, interleaved)
    gated, _, up = _gated(gate, up, activation)
    return (gated * up).to(x.dtype)


def activate_backward(
    grad: Tensor, x: Tensor, activation: str, interleaved: bool, again: bool
) -> tuple[Tensor, Tensor | None]:
    """Allocates the gradient of x, and the [M, I] result of `activate` if it is wanted again."""
    values, dy = x.to(wide(x)), grad.to(wide(x))
    if activation == "relu2":
        positive = torch.where(values < 0, 0.0, values)
        found = dy * (positive + positive)
    else:
        gate, up = _parts(values, interleaved)
        gated, slope, raised = _gated(gate, up, activation)
        to_gate, to_up = (dy * raised) * slope, dy * gated
        if activation == "swiglu_clamped":
            to_gate = torch.where(gate > LIMIT, 0.0, to_gate)
            to_up = torch.where(up.abs() > LIMIT, 0.0, to_up)
        found = torch.stack((to_gate, to_up), 2).flatten(1) if interleaved else torch.cat((to_gate, to_up), 1)
    return found.to(x.dtype), activate(x, activation, interleaved) if again else None


def _parts(values: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The gate and what it multiplies."""
    half = values.shape[1] // 2
    gate, up = values.reshape(-1, half, 2).unbind(2) if interleaved else values.reshape(-1, 2, half).unbind(1)
    return gate, up


def _gated(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """gate * sigmoid(...), the slope of that, and the other factor."""
    if activation == "swiglu_clamped":
        gate = torch.where(gate > LIMIT, LIMIT, gate)
        up = torch.where(up > LIMIT, LIMIT, torch.where(up < -LIMIT, -LIMIT, up)) + 1.0
        inner, steepness = gate * ALPHA, torch.full_like(gate, ALPHA)
    elif activation == "geglu":
        square = gate * gate
        inner = (gate + (square * CUBIC) * gate) * STEEPNESS
        steepness = (square * TRIPLE + 1.0) * STEEPNESS
    else:
        inner, steepness = gate, torch.ones_like(gate)
    sigmoid = 1.0 / (1.0 + exp(-inner))
    bend = sigmoid * (1.0 - sigmoid)
    # Where the sigmoid is flat, the other factors may be infinite.
    slope = sigmoid + torch.where(bend > 0, (bend * steepness) * gate, bend)
    return gate * sigmoid, slope, up
