"""The activations of experts in float64."""

import torch
from torch import Tensor

from moeroute.conformance.truth import Truth, rounded

TINY = 4e-39  # a float32 sigmoid may lose so much next to the smallest normal number
LIMIT = 7.0
LOWEST = -88.72  # where a float32 sigmoid is 0: docs/arithmetic.md, section 4


def truths(x: Tensor, activation: str, interleaved: bool, grad: Tensor | None = None) -> dict[str, Truth]:
    """The activation and, with `grad`, the gradient of x."""
    values = x.double()
    if activation == "relu2":
        positive = values.clamp(min=0.0)
        found = {"activated": rounded(positive * positive, x.dtype, positive * positive)}
        if grad is not None:
            exact = grad.double() * 2 * positive
            found["grad_x"] = rounded(exact, x.dtype, 2 * exact.abs())
        return found
    half = values.shape[1] // 2
    gate, up = (values[:, ::2], values[:, 1::2]) if interleaved else (values[:, :half], values[:, half:])
    cut_gate, cut_up = torch.zeros_like(gate, dtype=torch.bool), torch.zeros_like(gate, dtype=torch.bool)
    if activation == "swiglu_clamped":
        cut_gate, cut_up = gate > LIMIT, up.abs() > LIMIT
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1.0
        inner, steepness = 1.702 * gate, torch.full_like(gate, 1.702)
    elif activation == "geglu":
        root = (2.0 / torch.pi) ** 0.5
        inner = 2.0 * root * (gate + 0.044715 * gate**3)
        steepness = 2.0 * root * (1.0 + 3 * 0.044715 * gate**2)
    else:
        inner, steepness = gate, torch.ones_like(gate)
    sigmoid = torch.where(inner < LOWEST, 0.0, torch.sigmoid(inner))
    loose = 40 + 6 * torch.nan_to_num(inner.abs()).clamp(max=104.0)
    exact = gate * sigmoid * up
    found = {"activated": _loosened(exact, x.dtype, loose * exact.abs(), gate * up)}
    if grad is not None:
        d, bend = grad.double(), sigmoid * (1.0 - sigmoid)
        steep = torch.where(bend > 0, bend * steepness * gate, bend)
        to_gate, to_up = d * up * (sigmoid + steep), d * gate * sigmoid
        size = (d * up).abs() * (sigmoid + (1.0 + inner.abs().clamp(max=104.0)) * steep.abs())
        to_gate, to_up = to_gate.masked_fill(cut_gate, 0.0), to_up.masked_fill(cut_up, 0.0)

        def woven(first: Tensor, second: Tensor) -> Tensor:
            return torch.stack((first, second), 2).flatten(1) if interleaved else torch.cat((first, second), 1)

        losses = woven(loose * size, loose * to_up.abs())
        found["grad_x"] = _loosened(
            woven(to_gate, to_up), x.dtype, losses, woven(d * up * (1 + (steepness * gate).abs()), d * gate)
        )
    return found


def _loosened(exact: Tensor, dtype: torch.dtype, half_units: Tensor, factors: Tensor) -> Truth:
    truth = rounded(exact, dtype, torch.nan_to_num(half_units))
    return Truth(exact, truth.bound + TINY * (1.0 + torch.nan_to_num(factors.abs(), posinf=0.0)), dtype)
