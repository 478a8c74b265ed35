"""What the Triton kernels share: how values are stored, the ordered sum, the launch.

Tiles are [rows, elements]. All arithmetic is float32, one rounded operation each; `launch` keeps the
compiler from fusing a multiplication with an addition.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch
import triton
import triton.backends
import triton.language as tl
from torch import Tensor

PARTIAL_SUMS = tl.constexpr(256)

# Triton asks the same when a kernel is decorated.
INTERPRETED: bool = triton.knobs.runtime.interpret if hasattr(triton, "knobs") else os.getenv("TRITON_INTERPRET") == "1"

# triton-ascend takes the place of the package triton. Its compiler knows no tile of one row.
ASCEND = "ascend" in triton.backends.backends

# NumPy knows no bfloat16: the interpreter cuts the lower bits off instead of rounding.
_NARROW_BY_BITS = tl.constexpr(INTERPRETED)

# The interpreter widens denormal bfloat16 numbers wrongly. And where LLVM sees two of them widened, multiplied and
# narrowed, it multiplies in bfloat16: one rounding where a denormal product has two.
_WIDEN_BY_BITS = tl.constexpr(INTERPRETED or not ASCEND)

# Programs of a launch in the interpreter, where each costs some 10 ms.
_INTERPRETED_PROGRAMS = 4


# ---------------------------------------------------------------------------- kernels


@triton.jit
def widen(x):
    """Any floating dtype as float32."""
    if _WIDEN_BY_BITS and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 as `dtype`, rounded to nearest even."""
    if dtype == tl.bfloat16 and _NARROW_BY_BITS:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _neighbours(x):
    rows: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    return tl.sum(tl.reshape(x, (rows, half, 2)), axis=2)


@triton.jit
def sum_of_partials(x):
    """[rows, 256] -> [rows]: neighbours first. Each step adds two numbers, so it has only one order.

    64 or 128 partial sums are as good: the others would be +0.
    """
    if x.shape[1] == 256:
        x = _neighbours(x)
    if x.shape[1] == 128:
        x = _neighbours(x)
    x = _neighbours(x)
    x = _neighbours(x)
    x = _neighbours(x)
    x = _neighbours(x)
    x = _neighbours(x)
    return tl.sum(x, axis=1)


# ---------------------------------------------------------------------------- launchers


def power_of_two(size: int) -> int:
    """The smallest power of two from `size` on."""
    return 1 << max(size - 1, 0).bit_length()


def tile_rows(items: int, on_device: int, width: int = 1) -> int:
    """Rows per tile: `on_device` on an accelerator; in the interpreter, enough rows to leave about four programs.

    A row has `width` elements.
    """
    if not INTERPRETED:
        return max(on_device, 2) if ASCEND else on_device
    wanted = power_of_two(-(-items // _INTERPRETED_PROGRAMS))
    return max(on_device, min(wanted, tl.TRITON_MAX_TENSOR_NUMEL // width))


def programs(items: int, tile: int) -> int:
    """How many programs a launch needs, each of which takes a tile of the items."""
    return -(-items // tile)


def launch(kernel: Any, programs: int, /, *, warps: int, spare: bool = False, **arguments: Any) -> None:
    """Run the kernel on the device of its first tensor, with one rounding for every operation.

    warps: of 32 threads, whatever the device's own have. spare: a thread may have all the registers that it wants;
    else ptxas keeps to a step of occupancy, for some kernels at the price of a few bytes spilled. Up to 8 warps.
    """
    if programs == 0:
        return
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if not (INTERPRETED or ASCEND):
        kind, lanes = _target()
        # AMD's warps have 64 threads: with as many of them each thread would have 8 bytes of a row instead of 16.
        options["num_warps"] = max(warps * 32 // lanes, 1)
        if spare and kind == "cuda":
            options["maxnreg"] = 255
    with _surroundings(next(a.device for a in arguments.values() if isinstance(a, Tensor))):
        kernel[(programs,)](**arguments, **options)


def _surroundings(device: torch.device) -> AbstractContextManager[Any]:
    if INTERPRETED:
        return numpy.errstate(all="ignore")  # it warns where a NaN or an infinity comes up
    if device.type == "cpu":  # a rehearsal of the launch, for the compilers
        return nullcontext()
    module = torch.cuda if device.type == "cuda" else torch.get_device_module(device)
    return nullcontext() if device.index == module.current_device() else module.device(device)


_targets: dict[Any, tuple[str, int]] = {}


def _target() -> tuple[str, int]:
    """ "cuda" or "hip", and the threads of a warp."""
    driver = triton.runtime.driver.active
    if driver not in _targets:
        target = driver.get_current_target()
        _targets[driver] = target.backend, target.warp_size or 32
    return _targets[driver]
