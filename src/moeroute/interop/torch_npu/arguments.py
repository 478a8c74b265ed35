"""What all functions of this folder share: their list, their errors, and types that are given as numbers.

A wrong argument is a RuntimeError, as torch_npu's own checks raise, in the form of this package:

    npu_grouped_matmul: The group type must be -1, 0 or 2: group_type must be -1, 0 or 2; got 1

What is legal there and not built here is a NotImplementedError, never an approximation.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from moeroute.ops.experts import autocast_is_on

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

FUNCTIONS: dict[str, Callable[..., object]] = {}
"""Every function of torch_npu that is built, by its name: filled by `npu_function`, read by `install`."""

# torch_npu's own type numbers; below 256 they are those of torch.
INT4, HIFLOAT8, FLOAT8_E5M2, FLOAT8_E4M3FN, FLOAT8_E8M0FNU = 285, 290, 291, 292, 293
FLOAT4_E2M1FN_X2, FLOAT4_E1M2FN_X2 = 296, 297
_DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    12: torch.qint8,
    13: torch.quint8,
    14: torch.qint32,
    15: torch.bfloat16,
    16: torch.quint4x2,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    44: torch.float8_e8m0fnu,
    FLOAT8_E5M2: torch.float8_e5m2,
    FLOAT8_E4M3FN: torch.float8_e4m3fn,
    FLOAT8_E8M0FNU: torch.float8_e8m0fnu,
}
_UNAVAILABLE = {
    INT4: "int4",
    HIFLOAT8: "HiFloat8",
    FLOAT4_E2M1FN_X2: "float4_e2m1fn_x2",
    FLOAT4_E1M2FN_X2: "float4_e1m2fn_x2",
}


def npu_function(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of torch_npu: it is listed, and what this package refuses in it is a RuntimeError.

    Function modes see the call of an operator and nothing inside it: devices named "npu" and default devices are such.
    """
    name = function.__name__

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            if not torch.compiler.is_compiling() and torch._C._len_torch_function_stack():
                with _no_function_modes():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        except (ValueError, TypeError) as error:
            if not str(error).startswith("moeroute."):
                raise
            raise RuntimeError(f"{name}: {str(error).partition(': ')[2]}") from error

    FUNCTIONS[name] = call
    return call


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """Outside of every function mode."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def refused(function: str, argument: str, wanted: str, got: object, phrase: str = "") -> RuntimeError:
    """The error for a wrong argument; `phrase` is what callers of torch_npu match on."""
    return RuntimeError(f"{function}: {phrase}{': ' if phrase else ''}{argument} must be {wanted}; got {got}")


def unavailable(function: str, argument: str, value: object, what: str = "") -> NotImplementedError:
    """The error for a value that is legal in torch_npu and not built here."""
    meaning = f" ({what})" if what else ""
    return NotImplementedError(f"{function}: {argument}={value}{meaning} is not available on a CPU")


def or_default(value: _T | None, default: _T) -> _T:
    """The value of an optional argument: a None that is passed means the default, as one that is left out does."""
    return default if value is None else value


def dtype_of(function: str, argument: str, value: torch.dtype | int) -> torch.dtype:
    """A type that is given as itself or as torch_npu's number for it."""
    if isinstance(value, torch.dtype):
        return value
    if value in _UNAVAILABLE:
        raise unavailable(function, argument, value, _UNAVAILABLE[value])
    if value not in _DTYPES:
        raise refused(function, argument, "a torch.dtype or the number of one", value)
    return _DTYPES[value]


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Matrix products in the dtypes that are given, under autocast too: torch_npu's own do not follow it."""
    if autocast_is_on(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield
