"""An exact result, and how far from it a result may be that was computed as docs/arithmetic.md says."""

import dataclasses

import torch
from torch import Tensor

# Half a unit in the last place, relative to the value, and the smallest positive number.
_PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_SMALLEST = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}


def half_ulp(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return float(2.0 ** -_PRECISION[dtype])


@dataclasses.dataclass(frozen=True)
class Truth:
    """value: float64 (or bits to be equal to, where bound is 0); bound: the largest right error of each element.

    dtype is the result's; `rounded_in` the dtype that it was rounded to before, where that is a narrower one.
    """

    value: Tensor
    bound: Tensor
    dtype: torch.dtype
    rounded_in: torch.dtype | None = None

    def wrong(self, result: Tensor) -> Tensor | str:
        """Which elements are too far from the truth; a sentence where shape or dtype is another one."""
        result = result.detach().cpu()
        if result.shape != self.value.shape:
            return f"shape {list(result.shape)} instead of {list(self.value.shape)}"
        if result.dtype is not self.dtype:
            return f"dtype {result.dtype} instead of {self.dtype}"
        if not self.dtype.is_floating_point and not self.value.dtype.is_floating_point:
            return result != self.value
        actual, exact = result.double(), self.value.double()
        off = (actual - exact).abs() > self.bound
        off = torch.where(exact.isnan(), ~actual.isnan(), torch.where(exact.isinf(), actual != exact, off))
        off |= actual.isnan() & ~exact.isnan()
        if self.dtype.is_floating_point:
            largest = torch.finfo(self.rounded_in or self.dtype).max
            overflow = actual.isinf() & (actual.sign() == exact.sign()) & (exact.abs() + self.bound >= largest)
            off &= ~overflow
        return off


def copied(value: Tensor) -> Truth:
    """A result that is copied or counted: the same numbers, no error at all."""
    return Truth(value, torch.zeros(value.shape, dtype=torch.float64), value.dtype)


def rounded(exact: Tensor, dtype: torch.dtype, magnitude: Tensor | float = 0.0) -> Truth:
    """A result of float32 operations: magnitude counts roundings times the size of what was rounded."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    errors = torch.as_tensor(magnitude, dtype=torch.float64) * half_ulp(wide)
    bound = exact.abs() * (half_ulp(dtype) + 2 * half_ulp(wide)) + errors + _SMALLEST[dtype] + 16 * _SMALLEST[wide]
    return Truth(exact, torch.nan_to_num(bound, nan=0.0, posinf=0.0), dtype)
