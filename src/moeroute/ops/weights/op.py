"""The weights of slots and of rows: gathers, and their gradients."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeroute import check, dispatch
from moeroute.dtypes import LARGEST
from moeroute.ops import layout
from moeroute.ops.register import PLAN_SCHEMA, register
from moeroute.plan import PlanTensors, RoutingPlan, expect_plan, given_plan, index_vector

_module = partial(dispatch.implementation, "weights")


def slot_weights(
    weights: Tensor, plan: RoutingPlan, *, out: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """The weight of every slot, [S].

    weights: [T, E] where the plan has expert_of_slot (routing maps), else [T, K], else, where tokens own
    different numbers of slots, [S]: the plan decides. A slot without an expert, and one that no token owns, has
    weight 0. Differentiable as often as you like. For [T, K] it is a view.

    Equivalent torch: ``weights[plan.token_of_slot, plan.expert_of_slot]``, or ``weights.flatten()``.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_routing_map(torch.tensor([[True, False, True], [False, True, False]]))
    >>> moeroute.slot_weights(torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]), plan)
    tensor([0.1000, 0.3000, 0.5000])

    Raises ValueError for a shape or device that does not fit the plan, TypeError for dtypes.
    """
    operator = "slot_weights"
    expect_plan(operator, plan)
    check.weights_kind(operator, weights, "", None, plan.row_of_slot)
    check.weights_of_plan(operator, "weights", weights, plan)
    if out is not None:
        layout.check_out(operator, out, (plan.num_slots,), weights.dtype, weights, *plan.tensors[:4])
        weights = layout.resolved(weights)
    return slots_of_weights(operator, weights, plan, out, backend)


def slots_of_weights(
    operator: str, weights: Tensor, plan: RoutingPlan, out: Tensor | None, backend: str | None
) -> Tensor:
    """Checked weights, one a slot."""
    if plan.expert_of_slot is None:
        if backend is not None:
            _module(operator, backend, weights)  # nothing for it to do, but a wrong name is an error
        flat = _owned(weights.reshape(-1), plan)
        return flat if out is None else out.copy_(flat)
    if out is not None or dispatch.plain(weights):
        return _module(operator, backend, weights).slot_weights(weights, plan.tensors, out=out)
    return _slot_weights(weights, plan.tensors, backend)


def _owned(values: Tensor, plan: RoutingPlan) -> Tensor:
    """What the slots have, 0 for a slot that no token owns."""
    if plan.slot_offsets is None:
        return values
    return torch.where(plan.token_of_slot >= 0, values, 0)


def weights_shape(operator: str, plan: RoutingPlan, num_experts: int | None) -> tuple[int, ...]:
    """The shape of the weights that fit the plan."""
    if num_experts is not None:
        check.integer(operator, "num_experts", num_experts, minimum=0, maximum=LARGEST)
        if plan.num_experts not in (None, num_experts):
            raise check.wrong_value(operator, "num_experts", f"{plan.num_experts}, as the plan, or None", num_experts)
    if plan.expert_of_slot is None:
        return (plan.num_slots,) if plan.topk is None else (plan.num_tokens, plan.topk)
    if num_experts is None:
        if plan.num_experts is None:
            raise check.wrong_value(operator, "num_experts", "given, as the plan does not know it", None)
        num_experts = plan.num_experts
    return plan.num_tokens, num_experts


def weights_of_slots(
    operator: str,
    grad: Tensor,
    plan: RoutingPlan,
    shape: tuple[int, ...],
    accumulate: bool,
    out: Tensor | None,
    backend: str | None,
) -> Tensor:
    """Values of the slots in the shape of the weights."""
    if plan.expert_of_slot is None:
        if backend is not None:
            _module(operator, backend, grad)
        grad = _owned(grad, plan).reshape(shape)
        return grad if out is None else out.copy_(grad)
    if out is not None or dispatch.plain(grad):
        return _module(operator, backend, grad).slot_weights_backward(grad, plan.tensors, shape[1], accumulate, out=out)
    return _slot_weights_backward(grad, plan.tensors, shape[1], accumulate, backend)


# ---------------------------------------------------------------------------- derivatives


def _take_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, inverse, ctx.backend = inputs
    ctx.save_for_backward(index, inverse)


def _take_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    index, inverse = ctx.saved_tensors
    return take(grad, inverse, index, ctx.backend), None, None, None


def _slot_weights_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, plan, ctx.backend = inputs
    ctx.save_for_backward(*plan[:-1])
    ctx.num_tokens, ctx.num_experts = weights.shape


def _slot_weights_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    plan = PlanTensors._make((*ctx.saved_tensors, ctx.num_tokens))
    return _slot_weights_backward(grad, plan, ctx.num_experts, True, ctx.backend), None, None


def _slot_weights_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, plan, _, ctx.accumulate, ctx.backend = inputs
    ctx.save_for_backward(*plan[:-1])
    ctx.num_tokens = plan.num_tokens


def _slot_weights_backward_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    plan = PlanTensors._make((*ctx.saved_tensors, ctx.num_tokens))
    slots = _slot_weights(grad, plan, ctx.backend)
    if not ctx.accumulate:  # only the last slot of a token and expert was stored; float64 counts slots exactly
        number = torch.arange(slots.shape[0], dtype=torch.float64, device=grad.device)
        stored = _slot_weights_backward(number, plan, grad.shape[1], False, None)
        slots = torch.where(_slot_weights(stored, plan, None) == number, slots, 0)
    return slots, None, None, None, None


# ---------------------------------------------------------------------------- registration

# A registered operator looks at all that a kernel indexes with: anybody may call it.


def _take_operator(values: Tensor, index: Tensor, inverse: Tensor, backend: str | None) -> Tensor:
    operator = "take"
    check.shaped(operator, "values", values, (None,))
    check.floating(operator, "values", values)
    index_vector(operator, "inverse", inverse, values.shape[0], values)
    index = index_vector(operator, "index", index, None, values)
    return _module(operator, backend, values).take(values, index)


def _with_experts(operator: str, plan: PlanTensors, like: Tensor) -> PlanTensors:
    plan = given_plan(operator, plan, None, like)
    if plan.expert_of_slot is None:
        raise check.wrong_value(operator, "expert_of_slot", "given", None)
    return plan


def _slot_weights_operator(weights: Tensor, plan: PlanTensors, backend: str | None) -> Tensor:
    operator = "slot_weights"
    check.shaped(operator, "weights", weights, (plan.num_tokens, None))
    check.floating(operator, "weights", weights)
    plan = _with_experts(operator, plan, weights)
    return _module(operator, backend, weights).slot_weights(weights, plan)


def _slot_weights_backward_operator(
    grad: Tensor, plan: PlanTensors, num_experts: int, accumulate: bool, backend: str | None
) -> Tensor:
    operator = "slot_weights_backward"
    plan = _with_experts(operator, plan, grad)
    check.shaped(operator, "grad", grad, (plan.row_of_slot.shape[0],))
    check.floating(operator, "grad", grad)
    check.integer(operator, "num_experts", num_experts, 0, LARGEST)
    return _module(operator, backend, grad).slot_weights_backward(grad, plan, num_experts, accumulate)


take = register(
    "take(Tensor values, Tensor index, Tensor inverse, str? backend) -> Tensor",
    _take_operator,
    lambda values, index, inverse, backend: values.new_empty(index.shape[0]),
    derivative=_take_derivative,
    setup=_take_setup,
    linear_in=(0,),
)
_slot_weights = register(
    f"slot_weights(Tensor weights, {PLAN_SCHEMA}, str? backend) -> Tensor",
    _slot_weights_operator,
    lambda weights, plan, backend: weights.new_empty(plan.row_of_slot.shape[0]),
    derivative=_slot_weights_derivative,
    setup=_slot_weights_setup,
    linear_in=(0,),
)
_slot_weights_backward = register(
    f"slot_weights_backward(Tensor grad, {PLAN_SCHEMA}, SymInt num_experts, bool accumulate, str? backend) -> Tensor",
    _slot_weights_backward_operator,
    lambda grad, plan, num_experts, accumulate, backend: grad.new_empty(plan.num_tokens, num_experts),
    derivative=_slot_weights_backward_derivative,
    setup=_slot_weights_backward_setup,
    linear_in=(0,),
)
