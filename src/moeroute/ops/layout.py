"""A caller's tensor in, a caller's tensor out: what kernels that work by address need of both."""

from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from moeroute import check, dispatch, memory
from moeroute.dtypes import BITS

SMALL = memory.SMALLEST // 8  # elements that the pool does not care for, whatever their dtype
NARROWER = (torch.float16, torch.bfloat16, torch.float32)
CPU = torch.device("cpu")
empty = torch.empty


def new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """A fresh tensor for results, uninitialised; large ones on the CPU come from recycled memory."""
    return memory.empty(shape, dtype) if device is CPU else torch.empty(shape, dtype=dtype, device=device)


def rows(matrix: Tensor) -> Tensor:
    """The matrix, or a copy where the elements of a row are not side by side. The rows may lie anywhere."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] <= 1 else matrix.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """None stays None."""
    return None if tensor is None else tensor.contiguous()


def target(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Where a kernel writes: `out`, or a fresh tensor where there is none or its dtype or strides do not serve."""
    if out is None or out.dtype is not dtype or (out.stride(-1) != 1 and shape[-1] > 1):
        return new(shape, dtype, device)
    return out


# One token is decided by the calls of torch that a launch needs: these ask a tensor for its strides once.


def matrix(tensor: Tensor) -> tuple[Tensor, int]:
    """The matrix as `rows` gives it, and the distance of its rows."""
    stride, inner = tensor.stride()
    if inner == 1 or tensor.shape[1] <= 1:
        return tensor, stride
    return tensor.contiguous(), tensor.shape[1]


def new_matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """`new` of two dimensions on the CPU; a small one costs 0.9 µs less this way."""
    if rows * columns <= SMALL:
        return empty(rows, columns, dtype=dtype, device=CPU)
    return memory.empty((rows, columns), dtype)


def matrix_target(out: Tensor | None, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """`target` of two dimensions on the CPU, and the distance of its rows."""
    if out is None or out.dtype is not dtype or (out.stride(1) != 1 and columns > 1):
        return new_matrix(rows, columns, dtype), columns
    return out, out.stride(0)


def finish(written: Tensor, out: Tensor | None) -> Tensor:
    """Hand a result over: into `out` where a kernel could not write it there itself."""
    if out is None:
        return written
    if out is not written:
        return out.copy_(written)
    increment_version(out)  # it was written by address, of which autograd knows nothing
    return out


def address(tensor: Tensor | None) -> int:
    """0 stands for None."""
    return 0 if tensor is None else tensor.data_ptr()


def bits(tensor: Tensor) -> Tensor:
    """The same memory with integers of the same size: what is copied without being looked at."""
    if tensor.is_complex():
        parts = torch.view_as_real(tensor)
        tensor = parts.flatten(1) if tensor.dim() == 2 else parts.flatten()
    return tensor.view(BITS[tensor.element_size()])


def weights_beside(rows: Tensor, weights: Any) -> Any:
    """The weights; float64 ones beside narrower rows rounded to float32, once. Autograd widens their gradient again."""
    if isinstance(weights, Tensor) and weights.dtype is torch.float64 and rows.dtype in NARROWER:
        return weights.float()
    return weights


def check_out(operator: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor | None) -> None:
    """A buffer of the caller's, outside autograd: shape, dtype, device, no memory shared inside it or with an input."""
    check.buffer(operator, "out", out, shape, dtype)
    dispatch.direct(operator, "out", out, *inputs)
    check.writable(operator, "out", out, *inputs)


@overload
def resolved(tensor: Tensor) -> Tensor: ...
@overload
def resolved(tensor: None) -> None: ...
def resolved(tensor: Tensor | None) -> Tensor | None:
    """Without torch's lazy negation and conjugation, which a launcher would not see; None stays None."""
    return None if tensor is None else tensor.resolve_conj().resolve_neg()
