"""Checks that the layers share; the texts of errors are those of `check`."""

from typing import Any

import torch
from torch import Tensor

from moeroute import check, dispatch
from moeroute.dtypes import FLOATS, LARGEST
from moeroute.ops.experts import autocast_is_on

INITIAL_STD = 0.02
HALVES = (torch.float16, torch.bfloat16)


def check_positive(operator: str, **sizes: Any) -> None:
    """At least 1 each."""
    for name, size in sizes.items():
        check.integer(operator, name, size, minimum=1)
        check.integer(operator, name, size, maximum=LARGEST)


def check_factory(operator: str, device: Any, dtype: Any) -> None:
    """Where parameters are to live, and their dtype."""
    if dtype is not None:
        check.float_dtype(operator, "dtype", dtype, FLOATS)
    if device is None:
        return
    if not isinstance(device, torch.device | str | int) or isinstance(device, bool):
        raise check.wrong_type(operator, "device", "a torch.device, a str, an int or None", device)
    try:
        torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise check.wrong_value(operator, "device", "one that torch knows", repr(device)) from error


def check_backend(operator: str, backend: Any) -> None:
    """A name, and only that: the layer may yet move to another device."""
    if backend is not None:
        check.one_of(operator, "backend", backend, dispatch.NAMES)


def check_dtype(operator: str, argument: str, tokens: Tensor, weight: Tensor) -> None:
    """That of the weight, where autocast does not bring them together."""
    if tokens.dtype is not weight.dtype and (
        torch.float64 in (tokens.dtype, weight.dtype) or not autocast_is_on(tokens.device.type)
    ):
        raise check.wrong_dtype(operator, argument, f"{weight.dtype}, as the layer's weights", tokens)


def check_tokens(operator: str, argument: str, tokens: Any, wanted: str, weight: Tensor) -> None:
    """A dense floating tensor on the weight's device, as wide as the weight [.., H]."""
    check.tensor(operator, argument, tokens)
    if tokens.dtype not in FLOATS:
        raise check.wrong_dtype(operator, argument, "float16, bfloat16, float32 or float64", tokens)
    if tokens.ndim == 0 or tokens.shape[-1] != weight.shape[1]:
        raise check.wrong_shape(operator, argument, f"{wanted} with H = {weight.shape[1]}", tokens)
    check.same_device(operator, "the layer's weights", weight, argument, tokens)
