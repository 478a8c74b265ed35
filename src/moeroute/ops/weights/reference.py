"""The weights of slots and rows in plain torch: gathers and scatters, sums in slot order."""

import torch
from torch import Tensor

from moeroute.ops.rows.reference import deliver, slot_table, token_of_slot, valid, wide, with_zero_row
from moeroute.plan import PlanTensors


def take(values: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Allocates the result; copies it into `out`, of any strides, if that is given."""
    return deliver(with_zero_row(values)[valid(index, values.shape[0])], out)


def slot_weights(weights: Tensor, plan: PlanTensors, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [S] result; copies it into `out`, of any strides, if that is given."""
    expert_of_slot, (num_tokens, num_experts) = expert_of_slot_in(plan), weights.shape
    tokens = token_of_slot(expert_of_slot.shape[0], plan.slot_offsets, num_tokens, weights.device)
    experts = valid(expert_of_slot, num_experts)
    padded = torch.nn.functional.pad(weights, (0, 1, 0, 1))  # a zero column and a zero row
    return deliver(padded[tokens, experts], out)


def slot_weights_backward(
    grad: Tensor,
    plan: PlanTensors,
    num_experts: int,
    accumulate: bool,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Allocates the [T, E] result; copies it into `out`, of any strides, if that is given."""
    expert_of_slot, num_tokens = expert_of_slot_in(plan), plan.num_tokens
    num_slots = expert_of_slot.shape[0]
    values = wide(with_zero_row(grad))
    experts = torch.cat([valid(expert_of_slot, num_experts), expert_of_slot.new_full((1,), num_experts).long()])
    result = values.new_zeros(num_tokens, num_experts + 1)  # the last column takes what has no expert
    tokens = torch.arange(num_tokens, device=grad.device)
    for slots in slot_table(num_slots, plan.slot_offsets, num_tokens, grad.device).unbind(1):
        at = experts[slots]
        value = values[slots]
        result[tokens, at] = result[tokens, at] + value if accumulate else value
    return deliver(result[:, :num_experts].to(grad.dtype), out)


def routing_map(plan: PlanTensors, num_experts: int, bits: bool) -> Tensor:
    """Allocates the [T, E] map, or its bits."""
    expert_of_slot, num_tokens = expert_of_slot_in(plan), plan.num_tokens
    num_slots, device = expert_of_slot.shape[0], expert_of_slot.device
    experts = torch.cat([valid(expert_of_slot, num_experts), expert_of_slot.new_full((1,), num_experts).long()])
    result = torch.zeros(num_tokens, num_experts + 1, dtype=torch.bool, device=device)  # the last: of no expert
    tokens = torch.arange(num_tokens, device=device)
    for slots in slot_table(num_slots, plan.slot_offsets, num_tokens, device).unbind(1):
        result[tokens, experts[slots]] = True
    result = result[:, :num_experts]
    if not bits:
        return result.contiguous()
    padded = torch.nn.functional.pad(result, (0, -num_experts % 8)).reshape(num_tokens, (num_experts + 7) // 8, 8)
    return (padded.to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=device)).sum(2, dtype=torch.uint8)


def expert_of_slot_in(plan: PlanTensors) -> Tensor:
    """The plan's, which has it where weights are [T, E]."""
    assert plan.expert_of_slot is not None  # noqa: S101 - for the type checker
    return plan.expert_of_slot
