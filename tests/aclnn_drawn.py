"""Drawn sizes and tensors for the aclnn tests, and the plain Python that says where rows go."""

import os

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from aclnn_calls import FLOATS

MIXTURES = (*((dtype, dtype) for dtype in FLOATS), (torch.bfloat16, torch.float32))


SEEDS = st.integers(0, 2**31 - 1)


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.sampled_from((1, 3, 8, 70)))  # T, K, E, H


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def seed_bit(generator: torch.Generator) -> bool:
    return bool(torch.randint(0, 2, (), generator=generator))


def rows_by_expert(ids: list[int]) -> list[int]:
    """Row of each slot in the stable order of the ids; -1 for a negative id."""
    order = sorted((s for s in range(len(ids)) if ids[s] >= 0), key=lambda s: ids[s])
    rows = [-1] * len(ids)
    for row, slot in enumerate(order):
        rows[slot] = row
    return rows


def gathered(rows: Tensor, row_of_slot: list[int]) -> Tensor:
    """float64 [S, H]: each slot's row, zeros where it has none."""
    result = torch.zeros(len(row_of_slot), *rows.shape[1:], dtype=torch.float64)
    for slot, row in enumerate(row_of_slot):
        if 0 <= row < len(rows):
            result[slot] = rows[row].double()
    return result


def placed(values: Tensor, row_of_slot: list[int], num_rows: int) -> Tensor:
    """float64 [R, ...]: each slot's value at its row, a later slot over an earlier one, zeros elsewhere."""
    result = torch.zeros(num_rows, *values.shape[1:], dtype=torch.float64)
    for slot, row in enumerate(row_of_slot):
        if 0 <= row < num_rows:
            result[row] = values[slot].double()
    return result


def within(rows: list[int], first: int, last: int) -> list[int]:
    return [row - first if first <= row < last else -1 for row in rows]


# ---------------------------------------------------------------------------- shapes of upstream's system tests


FEW = 64 * 2**20


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def skip_large(size: int) -> None:
    """More than 64 MiB of tensors are for those who ask for them."""
    if size > FEW and not os.environ.get("MOEROUTE_LARGE"):
        pytest.skip(f"{size >> 20} MiB of tensors: MOEROUTE_LARGE=1 runs it")
