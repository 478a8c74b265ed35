"""What tests for torch_npu import from `torch_npu.testing`: they run on this machine, whatever device they are for.

`install` makes the modules `torch_npu.testing.testcase`, `.common_utils`, `.common_distributed` and `.decorator` of it.
"""

import functools
import inspect
import itertools
import os
import random
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# ---------------------------------------------------------------------------- devices and data


def get_npu_device() -> str:
    """The name of the device for tests: "npu:0", or the number in SET_NPU_DEVICE."""
    return f"npu:{os.environ.get('SET_NPU_DEVICE', '0')}"


def create_common_tensor(
    item: Sequence[Any], minValue: float, maxValue: float, device: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform values for the type, format and shape in `item`, twice: for the reference and for the device.

    >>> one, other = create_common_tensor(["float16", 2, (2, 3)], 0, 1)
    >>> one.dtype, one.shape, torch.equal(one, other), one is other
    (torch.float16, torch.Size([2, 3]), True, False)
    """
    dtype, _, shape = item
    return _twice(np.random.uniform(minValue, maxValue, shape).astype(dtype), device)


def create_dtype_tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    npu_format: int = -1,
    min_value: float = -5,
    max_value: float = 5,
    no_zero: bool = False,
    device: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of a type of torch, twice; integers are int32, and no_zero has ones for zeros."""
    if dtype in (torch.float16, torch.float32):
        values = np.random.uniform(min_value, max_value, shape).astype(str(dtype).removeprefix("torch."))
    elif dtype is torch.bool:
        values = np.random.randint(0, 2, shape).astype(bool)
    else:
        values = np.random.randint(int(min_value), int(max_value) + 1, shape).astype(np.int32)
    if no_zero:
        values[values == 0] = 1
    return _twice(values, device)


def _twice(values: np.ndarray, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    reference = torch.from_numpy(values)
    other = reference.clone()
    return reference, other if device is None else other.to(device)


@contextmanager
def freeze_rng_state() -> Iterator[None]:
    """Put torch's generator back where it was, whatever happens inside."""
    with torch.random.fork_rng(devices=[]):
        yield


def iter_indices(tensor: torch.Tensor) -> Any:
    """Every index of a tensor: numbers for one axis, tuples for more, none for a scalar."""
    if tensor.dim() < 2:
        return range(tensor.numel() if tensor.dim() else 0)
    return itertools.product(*map(range, tensor.shape))


def is_iterable(obj: Any) -> bool:
    """Whether a loop can run over it."""
    try:
        iter(obj)
    except TypeError:
        return False
    return True


# ---------------------------------------------------------------------------- decorators


class _Everywhere:
    """A test for some devices or versions: it runs here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take the names of what the test is for."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The test itself."""
        return function


class SupportedDevices(_Everywhere):
    """A test for some chips: it runs here."""


class SkipIfNotGteCANNVersion(_Everywhere):
    """A test for a version of CANN and later ones: it runs here."""


def skipIfUnsupportMultiNPU(npu_number_needed: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A test for several devices: it runs here, where every process has the same one."""
    return lambda function: function


class Dtypes:
    """The types that `instantiate_tests` makes a test of each for."""

    def __init__(self, *args: torch.dtype) -> None:
        self.args = args

    def __call__(self, function: Any) -> Any:
        """Note them on the test."""
        function.dtypes = self.args
        return function


class Formats:
    """The formats that `instantiate_tests` makes a test of each for."""

    def __init__(self, *args: int) -> None:
        self.args = args

    def __call__(self, function: Any) -> Any:
        """Note them on the test."""
        function.formats = self.args
        return function


def instantiate_tests(cls: Any) -> Any:
    """In place of a test with `Dtypes` or `Formats`, one for each combination of them, named by it."""
    for name, function in list(vars(cls).items()):
        noted = {key: getattr(function, f"{key}s") for key in ("dtype", "format") if hasattr(function, f"{key}s")}
        if not noted:
            continue
        arguments = inspect.getfullargspec(function).args
        for values in itertools.product(*noted.values()):
            given = {"device": "npu"} if "device" in arguments else {}
            for key, value in zip(noted, values, strict=True):
                given |= {argument: value for argument in arguments if key in argument}
            ending = "_".join(str(value).removeprefix("torch.") for value in values)
            setattr(cls, f"{name}_{ending}", functools.partialmethod(function, **given))
        delattr(cls, name)
    return cls


# ---------------------------------------------------------------------------- comparisons


def run_tests() -> None:
    """Run the tests of the file that calls it."""
    unittest.main()


class TestCase(unittest.TestCase):
    """A test case with torch_npu's comparisons of tensors; torch and random are seeded before every test."""

    __test__ = False  # its subclasses are collected
    precision = 1e-5
    exact_dtype = False
    maxDiff = None
    npu_device = "npu:0"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A class of tests."""
        super().__init_subclass__(**kwargs)
        cls.__test__ = vars(cls).get("__test__", True)

    def setUp(self) -> None:
        """Seed what tests draw from; SEED in the environment names another seed."""
        seed = int(os.environ.get("SEED", "666"))
        torch.manual_seed(seed)
        random.seed(seed)

    def assertRtolEqual(
        self,
        x: Any,
        y: Any,
        prec: float = 1e-4,
        prec16: float = 1e-3,
        auto_trans_dtype: bool = False,
        message: Any = None,
    ) -> None:
        """Fail unless two results have one type and shape and agree.

        An element agrees whose difference is within the precision, or within it relative to the larger of the two; a
        share of the elements as large as the precision may be off. 16-bit types have their own precision, bfloat16 none
        may be off. NaNs must be in the same places.
        """
        if isinstance(x, list | tuple) and isinstance(y, list | tuple):
            for one, other in zip(x, y, strict=True):
                self.assertRtolEqual(one, other, prec, prec16, auto_trans_dtype, message)
            return
        one, other = _tensor(x, y), _tensor(y, x)
        if auto_trans_dtype:
            one = one.to(other.dtype)
        self._same(one.shape, other.shape, "shape", message)
        self._same(one.dtype, other.dtype, "dtype", message)
        if one.dtype is torch.bfloat16:
            agree = torch.isclose(one.double(), other.double(), rtol=prec16, atol=prec16)
            self._all_but(0, ~agree, one, other, message)
            return
        if not one.is_floating_point() and not one.is_complex():
            prec = prec if one.dtype is not torch.bool else 0
        elif one.dtype is torch.float16:
            prec = prec16
        one, other = one.double(), other.double()
        if not torch.equal(one.isnan(), other.isnan()):
            self.fail(self._formatMessage(message, "NaNs must be in the same places"))
        away = (one - other).abs()
        away = torch.where(one.isnan() | (one == other), 0.0, away)
        largest = torch.maximum(one.abs(), other.abs())
        relatively = torch.where(away > 0, away / largest, 0.0)
        off = (away > prec) & ~(relatively <= prec)
        self._all_but(prec * one.numel(), off, one, other, message)

    def assertEqual(
        self,
        x: Any,
        y: Any,
        prec: Any = None,
        message: Any = "",
        allow_inf: bool = False,
        exact_dtype: bool | None = None,
    ) -> None:
        """unittest's, for numbers and tensors within `prec` (1e-5), and inside lists and dicts."""
        if isinstance(prec, str):
            prec, message = None, prec
        tolerance = self.precision if prec is None else prec
        self._agree(x, y, tolerance, message, self.exact_dtype if exact_dtype is None else exact_dtype)

    def assertTensorsSlowEqual(self, x: torch.Tensor, y: torch.Tensor, prec: Any = None, message: Any = "") -> None:
        """Fail unless two tensors have one type and shape and agree within `prec`."""
        self._agree(x, y, self.precision if prec is None else prec, message, True)

    def assertNotWarn(self, call_fn: Callable[[], Any], msg: str = "") -> None:
        """Fail if a call warns."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            call_fn()
        if found:
            self.fail(msg or str(found[0].message))

    def _agree(self, x: Any, y: Any, tolerance: float, message: Any, exact: bool) -> None:
        if _is_array(x) or _is_array(y):
            one, other = _tensor(x, y), _tensor(y, x)
            if not (_is_array(x) and _is_array(y)):
                one, other = torch.broadcast_tensors(one, other)
            self._same(one.shape, other.shape, "shape", message)
            if exact:
                self._same(one.dtype, other.dtype, "dtype", message)
            away = ~torch.isclose(one.double(), other.double(), rtol=0, atol=tolerance, equal_nan=True)
            self._all_but(0, away, one, other, message)
        elif isinstance(x, Mapping) and isinstance(y, Mapping):
            self._same(set(x), set(y), "keys", message)
            for key in x:
                self._agree(x[key], y[key], tolerance, message, exact)
        elif isinstance(x, list | tuple) and isinstance(y, list | tuple):
            self._same(len(x), len(y), "length", message)
            for one, other in zip(x, y, strict=True):
                self._agree(one, other, tolerance, message, exact)
        elif x != y and not (isinstance(x, int | float) and isinstance(y, int | float) and abs(x - y) <= tolerance):
            self.fail(self._formatMessage(message, f"{x!r} and {y!r} differ"))

    def _same(self, one: Any, other: Any, what: str, message: Any) -> None:
        if one != other:
            self.fail(self._formatMessage(message, f"{what} must be the same; got {one} and {other}"))

    def _all_but(self, allowed: float, off: torch.Tensor, one: torch.Tensor, other: torch.Tensor, message: Any) -> None:
        count = int(off.sum())
        if count > allowed:
            place = tuple(off.nonzero()[0].tolist())
            values = f"{one[place].item()} and {other[place].item()}"
            text = f"{count} of {off.numel()} differ, the first at {place}: {values}"
            self.fail(self._formatMessage(message, text))


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _tensor(value: Any, other: Any) -> torch.Tensor:
    """A tensor on the CPU; what is no array takes the type of the other."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
    return torch.as_tensor(value, dtype=_tensor(other, other).dtype if _is_array(other) else None)


NAMES: dict[str, tuple[Any, ...]] = {
    "testcase": (TestCase, run_tests),
    "common_utils": (
        *(SupportedDevices, SkipIfNotGteCANNVersion, create_common_tensor, create_dtype_tensor),
        *(get_npu_device, freeze_rng_state, iter_indices, is_iterable),
    ),
    "common_distributed": (skipIfUnsupportMultiNPU,),
    "decorator": (Dtypes, Formats, instantiate_tests),
}
