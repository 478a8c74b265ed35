"""Words for the values in the ids of tests."""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor


def spelled(value: Any) -> str:
    """A few words, the same in every process; for a lambda the first function that it calls."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        return f"{spelled(value.dtype)} {list(value.shape)}"
    if isinstance(value, dict):
        return ", ".join(f"{name}={spelled(item)}" for name, item in value.items()) or "nothing"
    if isinstance(value, set | frozenset):
        return " ".join(sorted(map(spelled, value)))
    if isinstance(value, tuple | list):
        return f"({', '.join(map(spelled, value))})"
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        return next((name for name in value.__code__.co_names if name not in ("moeroute", "torch")), "lambda")
    if isinstance(value, str | int | float | complex | None):
        return str(value)
    return str(getattr(value, "__name__", type(value).__name__))
