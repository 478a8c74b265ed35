"""Kernels that do what ours must not, for tests/test_triton_compile.py: each must be caught. Run without TRITON_INTERPRET."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import machine_code
from specialisations import TARGETS, Case, record


@triton.jit
def right(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.math.div_rn(a * b + a, tl.math.sqrt_rn(b)))


@triton.jit
def fuses(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.fma(a, b, a))


@triton.jit
def may_fuse(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a * b + a)


@triton.jit
def approximates(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.exp(tl.load(x + i)))


@triton.jit
def divides_roughly(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) / tl.load(y + i))


@triton.jit
def takes_a_rough_root(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.sqrt(tl.load(x + i)))


@triton.jit
def doubles(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i).to(tl.float64), tl.load(y + i).to(tl.float64)
    tl.store(out + i, (a * b + a).to(tl.float32))


@triton.jit
def adds_in_any_order(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i, tl.load(x + i))


@triton.jit
def spills(out, x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i)
    tl.store(out + i, a - tl.max(a, axis=0))


@triton.jit
def does_not_compile(out, x, y, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, 2 * BLOCK), tl.load(x + tl.arange(0, BLOCK)))


# A name whose rows are looked at.
@triton.jit
def spread_kernel(out, x, hidden, out_stride, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :] ^ 1
    at = tl.arange(0, 1)[:, None]
    value = tl.load(x + (at + row) * x_stride + column, mask=column < hidden, other=0)
    tl.store(out + (at + row) * out_stride + column, value, mask=column < hidden)


def cases() -> Iterator[Case]:
    tensors = [torch.zeros(1 << 15) for _ in range(3)]
    for kernel in (
        right, fuses, approximates, divides_roughly, takes_a_rough_root, doubles, adds_in_any_order, does_not_compile
    ):  # fmt: skip
        yield (
            "",
            lambda kernel=kernel: kernel[(1,)](*tensors, BLOCK=1024, num_warps=4, enable_fp_fusion=False),
        )
    yield "", lambda: may_fuse[(1,)](*tensors, BLOCK=1024, num_warps=4)
    yield "", lambda: spills[(1,)](*tensors, BLOCK=1 << 15, num_warps=1, enable_fp_fusion=False)
    wide = (*tensors[:2], 4096, 4096, 4096)
    yield "", lambda: spread_kernel[(1,)](*wide, BLOCK=1024, num_warps=4, enable_fp_fusion=False)


if __name__ == "__main__":
    work = [(target, one) for target in TARGETS for one in record(target, cases())]
    done = machine_code.compile_all(work)
    json.dump([[one.target, one.specialisation.name, one.faults] for one in done], sys.stdout)
