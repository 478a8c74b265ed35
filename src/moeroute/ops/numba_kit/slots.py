"""A plan and rows as kernels read them, what launchers make of tensors for that, and the slots of a token."""

from typing import NamedTuple

import numpy as np
from numba import int64
from torch import Tensor

from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.launch import element_ptr
from moeroute.ops.numba_kit.pointers import int32_ptr, is_null
from moeroute.plan import PlanTensors

ZERO = np.float32(0)


class Slots(NamedTuple):
    """The addresses and sizes of a plan. A kernel checks every index that it reads from them."""

    row_of_slot: int32_ptr
    slot_of_row: int32_ptr
    slot_offsets: int32_ptr
    expert_of_slot: int32_ptr
    topk: int64
    num_slots: int64
    num_rows: int64
    num_tokens: int64


class Rows(NamedTuple):
    """A matrix whose rows lie `stride` elements apart, the elements of a row side by side."""

    data: element_ptr
    stride: int64


@helper
def first_slot(slots, token):
    """Where the slots of a token begin; `token + 1` gives their end. Always inside 0..num_slots."""
    if is_null(slots.slot_offsets):
        return token * slots.topk
    return min(max(int64(slots.slot_offsets[token]), 0), slots.num_slots)


@helper
def zero_unowned_slots(values, slots, lo):
    """Zeros in the slots that no token owns; the chunk that has token 0 does it."""
    if lo == 0:
        for s in range(first_slot(slots, 0)):
            values[s] = ZERO
        for s in range(first_slot(slots, slots.num_tokens), slots.num_slots):
            values[s] = ZERO


# Records are plain tuples in the order of their class: making a NamedTuple takes 0.35 µs, and one token needs six.


def plan_slots(plan: PlanTensors, num_rows: int | None = None) -> tuple[int, ...]:
    """A `Slots` record: the plan as kernels read it. Rows from `num_rows` on count as none; None: the plan's own R."""
    row_of_slot, slot_of_row, slot_offsets, expert_of_slot, num_tokens = plan
    num_slots = row_of_slot.numel()
    return (
        row_of_slot.data_ptr(),
        slot_of_row.data_ptr(),
        0 if slot_offsets is None else slot_offsets.data_ptr(),
        0 if expert_of_slot is None else expert_of_slot.data_ptr(),
        num_slots // num_tokens if num_tokens else 0,
        num_slots,
        slot_of_row.numel() if num_rows is None else num_rows,
        num_tokens,
    )


def matrix(tensor: Tensor | None) -> tuple[int, int]:
    """A `Rows` record."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))
