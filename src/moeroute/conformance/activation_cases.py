"""Cases of the activations of experts, and of their gradients."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from moeroute.conformance.case import Case
from moeroute.conformance.gating_cases import DTYPES, short
from moeroute.conformance.generator import Stream
from moeroute.ops.activations.op import ACTIVATIONS, Activation


def activation_cases(num_rows: int, width: int) -> Iterator[Case]:
    """Every activation and dtype, gate and up in halves and in pairs."""
    for dtype, activation, interleaved in itertools.product(DTYPES, ACTIVATIONS, (False, True)):
        if activation == "relu2" and interleaved:
            continue
        name = f"{activation} rows={num_rows} width={width} {short(dtype)}{' in pairs' if interleaved else ''}"
        for operator in ("activate", "activate_backward"):
            make = partial(_made, num_rows, width, dtype, activation, interleaved, operator != "activate")
            yield Case(f"{operator} {name}", operator, make, frozenset({"nan", "inf"}), "calls", name)


def _made(
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    activation: Activation,
    interleaved: bool,
    backward: bool,
    draw: Stream,
) -> dict[str, Any]:
    x = draw.odd("x", draw.normal("x", num_rows, 2 * width) * 6).to(dtype)
    grad = draw.odd("grad", draw.normal("grad", num_rows, width * (2 if activation == "relu2" else 1))).to(dtype)
    first = {"grad": grad} if backward else {}
    return {**first, "x": x, "activation": activation, "interleaved": interleaved}
