"""What the Triton kernels share: how values are stored, the ordered sum, the launch.

Tiles are [rows, elements]. All arithmetic is float32, one rounded operation each; `launch` keeps the
compiler from fusing a multiplication with an addition.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTIAL_SUMS = tl.constexpr(256)

# The interpreter reads the same variable when a kernel is decorated.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

# NumPy knows no bfloat16: the interpreter cuts the lower bits off instead of rounding.
_ROUND_BY_BITS = tl.constexpr(INTERPRETED)

# Programs of a launch in the interpreter, where each costs some 10 ms.
_INTERPRETED_PROGRAMS = 4


# ---------------------------------------------------------------------------- kernels


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 as `dtype`, rounded to nearest even."""
    if dtype == tl.bfloat16 and _ROUND_BY_BITS:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def sum_of_partials(x):
    """[rows, 256] -> [rows]: neighbours first. Each step adds two numbers, so it has only one order."""
    rows: tl.constexpr = x.shape[0]
    x = tl.sum(tl.reshape(x, (rows, 128, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (rows, 64, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (rows, 32, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (rows, 16, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (rows, 8, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (rows, 4, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (rows, 2, 2)), axis=2)
    return tl.sum(x, axis=1)


# ---------------------------------------------------------------------------- launchers


def power_of_two(size: int) -> int:
    """The smallest power of two from `size` on."""
    return 1 << max(size - 1, 0).bit_length()


def tile_rows(items: int, on_device: int) -> int:
    """How many rows a tile has: the table's choice, or in the interpreter what leaves few programs."""
    if not INTERPRETED:
        return on_device
    return max(on_device, power_of_two(-(-items // _INTERPRETED_PROGRAMS)))


def launch(kernel: Any, programs: int, *arguments: Any, warps: int, **constants: Any) -> None:
    """Run the kernel on the device of its first tensor, with one rounding for every operation."""
    if programs == 0:
        return
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)
    else:
        kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)
