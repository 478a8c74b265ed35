"""Memory that is hardly there, and memory that ends where nobody may read."""

import ctypes
import mmap

import pytest
import torch
from torch import Tensor


def mapped(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros whose pages cost memory only once they are written."""
    try:
        return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)
    except OSError as error:
        pytest.skip(f"no address space: {error}")


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends where a page begins that nobody may touch."""
    size = -(-max(tensor.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    block = mmap.mmap(-1, size + mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(block)) + size
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(behind), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = torch.frombuffer(block, dtype=tensor.dtype, offset=size - tensor.nbytes, count=tensor.numel())
    return copy.view(tensor.shape).copy_(tensor)
