"""Small CPU kernels, for the tests of how a kernel is declared and launched."""

from typing import NamedTuple

import numpy as np
from numba import float32, float64, int64

from moeroute.ops.numba_kit.launch import FLOATS, Kernel, element_ptr, kernel
from moeroute.ops.numba_kit.pointers import int32_ptr

SHIPPED = len(Kernel.every)


class Line(NamedTuple):
    """Elements that lie `stride` apart."""

    data: element_ptr
    stride: int64


@kernel(keys=FLOATS)
def scale(out: Line, x: Line, seen: int32_ptr, factor: float32, shift: int64, lo: int64, hi: int64):
    for i in range(lo, hi):
        out.data[i * out.stride] = factor * x.data[i * x.stride] + np.float32(shift)
        seen[i] += 1


@kernel()
def needs_memory(sizes: int32_ptr, unit: int64, lo: int64, hi: int64):
    for i in range(lo, hi):
        space = np.empty(1 + sizes[i] * unit, np.float32)
        space[0] = 1
        sizes[i] = int64(space[0])


@kernel(parallel=False)
def first_negative(values: int32_ptr, lo: int64, hi: int64) -> int64:
    for i in range(lo, hi):
        if values[i] < 0:
            return i
    return -1


def items_not_last(x: int64, hi: int64, lo: int64):
    pass


def unknown_type(x: float64, lo: int64, hi: int64):
    pass


del Kernel.every[SHIPPED:]  # the package compiles ahead, and lists, its own only
