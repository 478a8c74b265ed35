"""Every list of dtypes, every limit, and the dtype of sums."""

import torch

LARGEST = 2**31 - 1  # slots, rows and experts are numbered in int32

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
MAPS = (torch.bool, torch.int8, torch.uint8, torch.int32)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size: what copies without looking


def wide(tensor: torch.Tensor) -> torch.dtype:
    """What sums over a tensor are computed in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
