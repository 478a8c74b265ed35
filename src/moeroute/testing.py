"""The comparisons that tests and benchmarks use.

`assert_same_bits` compares backends with each other, `assert_close_to_exact` a result with float64
mathematics. Both raise; neither returns a verdict that could be dropped.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

# Largest error of one element and root mean square of all, relative to the largest exact value's
# magnitude: a few units in the last place of the result's dtype.
TOLERANCES = {
    torch.float64: (1e-12, 1e-13),
    torch.float32: (2e-6, 4e-7),
    torch.float16: (1.5e-3, 4e-4),
    torch.bfloat16: (1.2e-2, 3e-3),
}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers; every NaN has the same ones."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view(_BITS[tensor.element_size()])


def assert_same_bits(actual: Any, expected: Any, where: str = "result") -> None:
    """Equal shapes, dtypes and bits (NaN equals NaN, +0 differs from -0), through tuples and plans."""
    if isinstance(expected, Tensor):
        if not isinstance(actual, Tensor):
            raise AssertionError(f"{where}: {type(actual).__name__} where a tensor was expected")
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            raise AssertionError(
                f"{where}: {actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"
            )
        different = (_bits(actual) != _bits(expected.to(actual.device))).nonzero()
        if different.numel():
            places = [tuple(place.tolist()) for place in different[:4]]
            values = ", ".join(f"{p}: {actual[p].item()!r} not {expected[p].item()!r}" for p in places)
            raise AssertionError(f"{where}: {len(different)} of {actual.numel()} elements differ; {values}")
    elif type(actual) is not type(expected) and not isinstance(actual, tuple | list):
        raise AssertionError(f"{where}: {actual!r}, expected {expected!r}")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            name = field.name
            assert_same_bits(getattr(actual, name), getattr(expected, name), f"{where}.{name}")
    elif isinstance(expected, tuple | list):
        if len(actual) != len(expected):
            raise AssertionError(f"{where}: {len(actual)} parts, expected {len(expected)}")
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(a, e, f"{where}[{i}]")
    elif actual != expected:
        raise AssertionError(f"{where}: {actual!r}, expected {expected!r}")


def assert_close_to_exact(actual: Tensor, exact: Tensor, where: str = "result") -> None:
    """Within TOLERANCES[actual.dtype] of a float64 expectation, worst element and root mean square."""
    if actual.shape != exact.shape:
        raise AssertionError(f"{where}: shape {list(actual.shape)}, expected {list(exact.shape)}")
    if exact.numel() == 0:
        return
    worst, rms = TOLERANCES[actual.dtype]
    error = (actual.detach().double() - exact.detach().double()).abs()
    scale = max(exact.detach().double().abs().max().item(), 1e-30)
    if not bool(error.isfinite().all()):
        raise AssertionError(f"{where}: {int((~error.isfinite()).sum())} elements are not finite")
    if error.max().item() > worst * scale or error.square().mean().sqrt().item() > rms * scale:
        place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{where}: worst error {error.max().item() / scale:.2e} (allowed {worst:.1e}) at {place}: "
            f"{actual[place].item()} not {exact[place].item()}; "
            f"rms {error.square().mean().sqrt().item() / scale:.2e} (allowed {rms:.1e})"
        )
