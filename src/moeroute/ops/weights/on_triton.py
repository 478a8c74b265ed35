"""The weights of slots and rows in Triton: kernels, then launchers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.rows.on_triton import SMALL_TILE, owner_of_slot, slots_of, token_of, topk_of
from moeroute.ops.triton_kit import launch, narrow, power_of_two, programs, tile_rows, widen
from moeroute.plan import PlanTensors

# ---------------------------------------------------------------------------- kernels: weights


@triton.jit(do_not_specialize=["num_values", "size"])
def take_kernel(out, values, index, num_values, size, BLOCK: tl.constexpr):
    """`out[i] = values[index[i]]`; 0 where the index is out of range."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (i >= 0) & (i < size)
    at = tl.load(index + i, mask=inside, other=-1)
    value = tl.load(values + at, mask=(at >= 0) & (at < num_values), other=0)
    tl.store(out + i, value, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "topk", "num_slots", "num_experts", "weights_stride"])
def slot_weights_kernel(
    out,
    weights,
    expert_of_slot,
    token_of_slot,
    num_tokens,
    topk,
    num_slots,
    num_experts,
    weights_stride,
    SLOTS: tl.constexpr,
):
    """The weight of each slot's token and expert; 0 for a slot without an expert."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    valid = (slot >= 0) & (slot < num_slots)
    token = token_of(token_of_slot, topk, slot, valid)
    expert = tl.load(expert_of_slot + slot, mask=valid, other=-1)
    used = (token >= 0) & (token < num_tokens) & (expert >= 0) & (expert < num_experts)
    value = tl.load(weights + token.to(tl.int64) * weights_stride + expert, mask=used, other=0)
    tl.store(out + slot, value, mask=valid)


@triton.jit(do_not_specialize=["num_tokens", "topk", "num_slots", "num_experts", "out_stride"])
def slot_weights_backward_kernel(
    out,
    grad,
    expert_of_slot,
    slot_offsets,
    num_tokens,
    topk,
    num_slots,
    num_experts,
    out_stride,
    ACCUMULATE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A line [E] of each token from its slots; equal experts are added up, or the last one stays."""
    blocks = tl.cdiv(num_experts, BLOCK)
    token = tl.program_id(0) // blocks * TOKENS + tl.arange(0, TOKENS)
    column = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    valid = token < num_tokens
    first, last = slots_of(slot_offsets, topk, num_slots, token, valid)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for k in range(0, tl.max(last - first, axis=0)):
        slot = first + k
        live = (slot >= 0) & (slot < last)
        expert = tl.load(expert_of_slot + slot, mask=live, other=-1)
        value = widen(tl.load(grad + slot, mask=live, other=0))[:, None]
        if ACCUMULATE:
            value = total + value
        total = tl.where((expert[:, None] == column) & live[:, None], value, total)
    narrowed = narrow(total, out.dtype.element_ty)
    at = out + token.to(tl.int64)[:, None] * out_stride
    tl.store(at + column, narrowed, mask=valid[:, None] & (column < num_experts))


@triton.jit(do_not_specialize=["num_tokens", "topk", "num_slots", "num_experts", "width"])
def routing_map_kernel(
    out, expert_of_slot, slot_offsets, num_tokens, topk, num_slots, num_experts, width,
    PACKED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The map's line of each token: a byte for each expert, or one bit, the lowest first."""
    blocks = tl.cdiv(width, BLOCK)
    token = tl.program_id(0) // blocks * TOKENS + tl.arange(0, TOKENS)
    column = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    valid = token < num_tokens
    first, last = slots_of(slot_offsets, topk, num_slots, token, valid)
    found = tl.zeros((TOKENS, BLOCK), tl.int32)
    for k in range(0, tl.max(last - first, axis=0)):
        slot = first + k
        live = (slot >= 0) & (slot < last)
        expert = tl.load(expert_of_slot + slot, mask=live, other=-1)
        live = (expert >= 0) & (expert < num_experts)
        place, value = expert, tl.where(live, 1, 0)
        if PACKED:
            place, value = expert >> 3, value << (expert & 7)
        found = found | tl.where(place[:, None] == column, value[:, None], 0)
    at = out + token.to(tl.int64)[:, None] * width
    tl.store(at + column, found.to(tl.uint8), mask=valid[:, None] & (column < width))


# ---------------------------------------------------------------------------- launchers


def take(values: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Allocates the result, of the index's size, or writes `out`, of any stride."""
    values, size = values.contiguous(), index.shape[0]
    target = layout.target(out, (size,), values.dtype, values.device)
    tile = tile_rows(size, SMALL_TILE)
    launch(
        take_kernel,
        programs(size, tile),
        out=layout.bits(target),
        values=layout.bits(values),
        index=index,
        num_values=values.shape[0],
        size=size,
        warps=4,
        BLOCK=tile,
    )
    return layout.finish(target, out)


def slot_weights(weights: Tensor, plan: PlanTensors, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [S] result, or writes `out`, of any stride."""
    weights = layout.rows(weights)
    (num_tokens, num_experts), num_slots = weights.shape, plan.row_of_slot.shape[0]
    target = layout.target(out, (num_slots,), weights.dtype, weights.device)
    slots = tile_rows(num_slots, SMALL_TILE)
    launch(
        slot_weights_kernel,
        programs(num_slots, slots),
        out=target,
        weights=weights,
        expert_of_slot=plan.expert_of_slot,
        token_of_slot=owner_of_slot(plan),
        num_tokens=num_tokens,
        topk=topk_of(plan),
        num_slots=num_slots,
        num_experts=num_experts,
        weights_stride=weights.stride(0),
        warps=4,
        SLOTS=slots,
    )
    return layout.finish(target, out)


def slot_weights_backward(
    grad: Tensor, plan: PlanTensors, num_experts: int, accumulate: bool, *, out: Tensor | None = None
) -> Tensor:
    """Allocates the [T, E] result, or writes `out`, of any strides."""
    num_tokens, num_slots = plan.num_tokens, plan.row_of_slot.shape[0]
    target = layout.target(out, (num_tokens, num_experts), grad.dtype, grad.device)
    block = tile_rows(4 * num_experts, min(power_of_two(num_experts), SMALL_TILE))
    tokens = tile_rows(num_tokens, SMALL_TILE // block, block)
    launch(
        slot_weights_backward_kernel,
        programs(num_tokens, tokens) * programs(num_experts, block),
        out=target,
        grad=grad.contiguous(),
        expert_of_slot=plan.expert_of_slot,
        slot_offsets=plan.slot_offsets,
        num_tokens=num_tokens,
        topk=topk_of(plan),
        num_slots=num_slots,
        num_experts=num_experts,
        out_stride=target.stride(0),
        warps=4,
        ACCUMULATE=accumulate,
        TOKENS=tokens,
        BLOCK=block,
    )
    return layout.finish(target, out)


def routing_map(plan: PlanTensors, num_experts: int, bits: bool) -> Tensor:
    """Allocates the [T, E] map, or its [T, ceil(E / 8)] bytes of bits."""
    num_tokens, num_slots = plan.num_tokens, plan.row_of_slot.shape[0]
    width = (num_experts + 7) // 8 if bits else num_experts
    found = layout.new((num_tokens, width), torch.uint8 if bits else torch.bool, plan.row_of_slot.device)
    block = tile_rows(4 * width, min(power_of_two(width), SMALL_TILE))
    tokens = tile_rows(num_tokens, SMALL_TILE // block, block)
    launch(
        routing_map_kernel,
        programs(num_tokens, tokens) * programs(width, block),
        out=found.view(torch.uint8),
        expert_of_slot=plan.expert_of_slot,
        slot_offsets=plan.slot_offsets,
        num_tokens=num_tokens,
        topk=topk_of(plan),
        num_slots=num_slots,
        num_experts=num_experts,
        width=width,
        warps=4,
        PACKED=bits,
        TOKENS=tokens,
        BLOCK=block,
    )
    return found
