"""A plan and rows as kernels read them, and the slots of a token."""

from typing import NamedTuple

import numpy as np
from numba import int64

from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.launch import element_ptr
from moeroute.ops.numba_kit.pointers import int32_ptr, is_null

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
