"""How far results are apart: bits, units in the last place and a histogram of them, errors against float64."""

import dataclasses
import math

import torch
from torch import Tensor

from moeroute.conformance.case import canonical

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BUCKETS = (0, 1, 2, 4, 8, 16, 64, 256, 4096)
NOT_A_DISTANCE = 2**62  # NaN beside a number


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers; every NaN is the same one."""
    tensor = canonical(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.element_size() > 1 else tensor.to(torch.int16)


def different(actual: Tensor, expected: Tensor) -> Tensor:
    """Which elements have other bits; +0 differs from -0, NaN does not from NaN."""
    if not expected.dtype.is_floating_point:
        return actual.cpu().to(torch.int64) != expected.cpu().to(torch.int64)
    return bits(actual) != bits(expected)


def ulps(actual: Tensor, expected: Tensor) -> Tensor:
    """int64: how many numbers of the dtype lie between the two, +0 and -0 being one; 2^62 where only one is NaN.

    >>> ulps(torch.tensor([1.0, 0.0, torch.nan]), torch.tensor([1.0000001, -0.0, torch.nan])).tolist()
    [1, 0, 0]
    """
    actual, expected = actual.detach().cpu(), expected.detach().cpu()

    def place(tensor: Tensor) -> Tensor:
        integer = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).to(torch.int64)
        size = 1 << (8 * tensor.element_size() - 1)
        return torch.where(integer < 0, -(integer + size) if size < 2**63 else -(integer ^ (-(2**63))), integer)

    apart = (place(actual) - place(expected)).abs()
    nan = actual.isnan() != expected.isnan()
    return torch.where(nan, NOT_A_DISTANCE, torch.where(actual.isnan() & expected.isnan(), 0, apart))


def histogram(apart: Tensor) -> dict[str, int]:
    """How many elements are so many ulps off: "0", "1", "2", "3-4", ..., "more", "NaN".

    >>> histogram(torch.tensor([0, 0, 1, 3, 9999]))
    {'0': 2, '1': 1, '3-4': 1, 'more': 1}
    """
    found: dict[str, int] = {}
    low = -1
    for high in BUCKETS:
        count = int(((apart > low) & (apart <= high)).sum())
        if count:
            found[str(high) if high - low == 1 else f"{low + 1}-{high}"] = count
        low = high
    if count := int(((apart > low) & (apart < NOT_A_DISTANCE)).sum()):
        found["more"] = count
    if count := int((apart == NOT_A_DISTANCE).sum()):
        found["NaN"] = count
    return found


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative errors against float64: |result - exact| / (|exact| + 1e-7), and the root mean square of the errors."""

    largest: float
    mean: float
    rms: float

    @staticmethod
    def of(result: Tensor, exact: Tensor) -> "Errors":
        """The errors where both are finite."""
        error = (result.detach().cpu().double() - exact).abs()
        finite = error.isfinite()
        error, size = error[finite], exact.abs()[finite]
        if not error.numel():
            return Errors(0.0, 0.0, 0.0)
        relative = error / (size + 1e-7)
        return Errors(relative.max().item(), relative.mean().item(), error.square().mean().sqrt().item())


@dataclasses.dataclass(frozen=True)
class Ratios:
    """A candidate's errors beside those of this package: what a test with two references divides.

    Ascend's system tests call the quotients max_re_ratio, avg_re_ratio and root_mean_squared_ratio.
    """

    candidate: Errors
    ours: Errors

    def quotients(self) -> tuple[float, float, float]:
        """Largest, mean and root mean square: the candidate's divided by ours; 1 where both are 0."""
        pairs = zip(dataclasses.astuple(self.candidate), dataclasses.astuple(self.ours), strict=True)
        largest, mean, rms = (1.0 if a == b else a / b if b else math.inf for a, b in pairs)
        return largest, mean, rms
