"""Weights in the order of slots and of rows, on the CPU: kernels, then launchers."""

import numpy as np
import torch
from numba import int64
from torch import Tensor

from moeroute.dtypes import BITS
from moeroute.ops import layout
from moeroute.ops.numba_kit.launch import FLOATS, Keyed, element_ptr, kernel
from moeroute.ops.numba_kit.pointers import POINTER, advance, float32_ptr, int32_ptr, uint8_ptr
from moeroute.ops.numba_kit.slots import ZERO, Rows, Slots, first_slot, plan_slots, zero_unowned_slots
from moeroute.plan import PlanTensors

bits_ptr = Keyed(lambda size: POINTER[BITS[size]])

# ---------------------------------------------------------------------------- kernels


@kernel(keys=BITS)
def take_elements(out: bits_ptr, values: bits_ptr, index: int32_ptr, num_values: int64, lo: int64, hi: int64):
    """`out[i] = values[index[i]]`; 0 where the index is out of range."""
    for i in range(lo, hi):
        j = index[i]
        if 0 <= j < num_values:
            out[i] = values[j]
        else:
            out[i] = 0


@kernel(keys=FLOATS)
def take_slot_weights(out: element_ptr, weights: Rows, slots: Slots, num_experts: int64, lo: int64, hi: int64):
    """The weight of each slot's token and expert; 0 for a slot without an expert."""
    for t in range(lo, min(hi, slots.num_tokens)):
        for s in range(first_slot(slots, t), first_slot(slots, t + 1)):
            e = slots.expert_of_slot[s]
            if 0 <= e < num_experts:
                out[s] = weights.data[t * weights.stride + e]
            else:
                out[s] = ZERO
    zero_unowned_slots(out, slots, lo)


@kernel(keys=FLOATS)
def put_slot_weights(
    out: float32_ptr,
    out_stride: int64,
    grad: element_ptr,
    slots: Slots,
    num_experts: int64,
    accumulate: int64,
    lo: int64,
    hi: int64,
):
    """A line [E] of each token from its slots; equal experts are added up, or the last one stays."""
    for t in range(lo, hi):
        for e in range(num_experts):
            out[t * out_stride + e] = ZERO
        for s in range(first_slot(slots, t), first_slot(slots, t + 1)):
            e = slots.expert_of_slot[s]
            if 0 <= e < num_experts:
                value = grad[s]
                if accumulate:
                    value = out[t * out_stride + e] + value
                out[t * out_stride + e] = value


@kernel()
def put_routing_map(out: uint8_ptr, width: int64, slots: Slots, num_experts: int64, bits: int64, lo: int64, hi: int64):
    """The map's line of each token: a byte for each expert, or one bit, the lowest first."""
    for t in range(lo, hi):
        row = advance(out, t * width)
        for i in range(width):
            row[i] = np.uint8(0)
        for s in range(first_slot(slots, t), first_slot(slots, t + 1)):
            e = slots.expert_of_slot[s]
            if 0 <= e < num_experts:
                if bits:
                    row[e >> 3] = np.uint8(row[e >> 3] | (1 << (e & 7)))
                else:
                    row[e] = np.uint8(1)


# ---------------------------------------------------------------------------- launchers


def take(values: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Allocates the result, of the index's size, or writes `out`, of any stride."""
    values = values.contiguous()
    size, count = values.element_size(), index.shape[0]
    target = layout.target(out, (count,), values.dtype)
    take_elements(
        size,
        items=count,
        work=count * 2 * size,
        out=target.data_ptr(),
        values=values.data_ptr(),
        index=index.data_ptr(),
        num_values=values.shape[0],
    )
    return layout.finish(target, out)


def slot_weights(weights: Tensor, plan: PlanTensors, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [S] result, or writes `out`, of any stride."""
    weights, num_slots = layout.rows(weights), plan.row_of_slot.shape[0]
    target = layout.target(out, (num_slots,), weights.dtype)
    take_slot_weights(
        weights.dtype,
        items=max(plan.num_tokens, 1),
        work=num_slots * 16,
        out=target.data_ptr(),
        weights=(weights.data_ptr(), weights.stride(0)),
        slots=plan_slots(plan),
        num_experts=weights.shape[1],
    )
    return layout.finish(target, out)


def slot_weights_backward(
    grad: Tensor, plan: PlanTensors, num_experts: int, accumulate: bool, *, out: Tensor | None = None
) -> Tensor:
    """Allocates the [T, E] result, or writes `out`, of any strides."""
    grad = grad.contiguous()
    target = layout.target(out, (plan.num_tokens, num_experts), torch.float32)
    put_slot_weights(
        grad.dtype,
        items=plan.num_tokens,
        work=plan.num_tokens * num_experts * 4,
        out=target.data_ptr(),
        out_stride=target.stride(0),
        grad=grad.data_ptr(),
        slots=plan_slots(plan),
        num_experts=num_experts,
        accumulate=accumulate,
    )
    return layout.finish(target.to(grad.dtype), out)


def routing_map(plan: PlanTensors, num_experts: int, bits: bool) -> Tensor:
    """Allocates the [T, E] map, or its [T, ceil(E / 8)] bytes of bits."""
    width = (num_experts + 7) // 8 if bits else num_experts
    found = layout.new((plan.num_tokens, width), torch.uint8 if bits else torch.bool)
    put_routing_map(
        None,
        items=plan.num_tokens,
        work=plan.num_tokens * width + plan.row_of_slot.shape[0] * 4,
        out=found.data_ptr(),
        width=width,
        slots=plan_slots(plan),
        num_experts=num_experts,
        bits=bits,
    )
    return found
