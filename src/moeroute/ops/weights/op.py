"""The weights of slots and of rows, and tables [T, E] of slots: gathers, scatters, and their gradients."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeroute import check, dispatch
from moeroute.dispatch import Backend
from moeroute.dtypes import LARGEST
from moeroute.ops import layout
from moeroute.ops.planning.common import index_tensor
from moeroute.ops.register import PLAN_SCHEMA, register
from moeroute.plan import PlanTensors, RoutingPlan, expect_plan, given_plan, index_vector, values_at

_module = partial(dispatch.implementation, "weights")


def slot_weights(
    weights: Tensor, plan: RoutingPlan, *, out: Tensor | None = None, backend: Backend | None = None
) -> Tensor:
    """The weight of every slot, [S].

    Differentiable to any order. For weights [T, K] the result is a view.

    Args:
        weights: [T, E] where the plan has `expert_of_slot` (routing maps), else [T, K], else (tokens own different
            numbers of slots) [S]. float16, bfloat16, float32 or float64.
        plan: the slots of every token.
        out: [S], the dtype of the weights; the result is written into it, outside autograd.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The weights [S] in their dtype; 0 for a slot without an expert, and for one that no token owns.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``weights[plan.token_of_slot, plan.expert_of_slot]``, or ``weights.flatten()``.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_routing_map(torch.tensor([[True, False, True], [False, True, False]]))
    >>> moeroute.slot_weights(torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]), plan)
    tensor([0.1000, 0.3000, 0.5000])
    """
    operator = "slot_weights"
    expect_plan(operator, plan)
    check.weights_kind(operator, weights, "", None, plan.row_of_slot)
    check.weights_of_plan(operator, "weights", weights, plan)
    if out is not None:
        layout.check_out(operator, out, (plan.num_slots,), weights.dtype, weights, *plan.tensors[:4])
        weights = layout.resolved(weights)
    return slots_of_weights(operator, weights, plan, out, backend)


def dense_weights(weights: Tensor, expert_ids: Tensor, num_experts: int, *, backend: Backend | None = None) -> Tensor:
    """The weights [T, K] of the chosen experts as a matrix [T, E], 0 for all others.

    Where an expert has several slots of a token, their weights are added up in slot order, in float32. Differentiable
    to any order in the weights.

    Args:
        weights: [T, K], a float dtype.
        expert_ids: [T, K], any integer dtype; an id outside [0, E) sets nothing.
        num_experts: E.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The matrix [T, E] in the dtype of the weights.

    Raises:
        ValueError: a wrong shape, size or device.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``torch.zeros(T, E).scatter_add(1, expert_ids, weights)``.

    >>> import torch, moeroute
    >>> ids = torch.tensor([[2, 0], [-1, 1]])
    >>> moeroute.dense_weights(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), ids, num_experts=3)
    tensor([[0.2500, 0.0000, 0.7500],
            [0.0000, 0.5000, 0.0000]])
    """
    operator = "dense_weights"
    slots = _slots_of_ids(operator, expert_ids, num_experts)
    check.tensor(operator, "weights", weights)
    check.shaped(operator, "weights", weights, tuple(expert_ids.shape), expert_ids)
    check.floating(operator, "weights", weights)
    weights = weights.reshape(-1)
    if dispatch.plain(weights, slots.expert_of_slot):
        found: Tensor = _module(operator, backend, weights).slot_weights_backward(weights, slots, num_experts, True)
        return found
    found = _slot_weights_backward(weights, slots, num_experts, True, backend)
    return found


def routing_map_from_ids(
    expert_ids: Tensor, num_experts: int, *, bits: bool = False, backend: Backend | None = None
) -> Tensor:
    """The routing map of expert ids [T, K]: bool [T, E], True where a token chose an expert.

    Args:
        expert_ids: [T, K], any integer dtype; an id outside [0, E) sets nothing, a repeated one sets what is set.
        num_experts: E.
        bits: uint8 [T, ceil(E / 8)] instead: expert e is bit e % 8, the lowest first, of byte e // 8.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The map, bool [T, E]; with `bits` uint8.

    Raises:
        ValueError: a wrong shape or size.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``torch.zeros(T, E, dtype=torch.bool).scatter(1, expert_ids, True)``.

    >>> import torch, moeroute
    >>> ids = torch.tensor([[2, 0], [-1, 1]])
    >>> moeroute.routing_map_from_ids(ids, num_experts=3)
    tensor([[ True, False,  True],
            [False,  True, False]])
    >>> moeroute.routing_map_from_ids(ids, num_experts=3, bits=True)
    tensor([[5],
            [2]], dtype=torch.uint8)
    """
    operator = "routing_map_from_ids"
    slots = _slots_of_ids(operator, expert_ids, num_experts)
    return _map_of_slots(operator, slots, num_experts, check.flag(operator, "bits", bits), backend)


def routing_map_of(plan: RoutingPlan, *, backend: Backend | None = None) -> Tensor:
    """The routing map of a plan: True where a slot of that token and expert has a row.

    So dropped slots and those of other ranks are False. The experts are those of `expert_of_slot` where the plan has
    it (routing maps), else the entries of `rows_per_expert`, which with an `expert_range` are that range's.

    Args:
        plan: a plan that knows its experts.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The map, bool [T, E].

    Raises:
        ValueError: the plan knows no experts.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[2, 0], [-1, 2], [0, 2]]), 3, capacity=2)
    >>> moeroute.routing_map_of(plan)
    tensor([[ True, False,  True],
            [False, False,  True],
            [ True, False, False]])
    """
    operator = "routing_map_of"
    expect_plan(operator, plan)
    row_of_slot, slot_of_row, slot_offsets, experts, num_tokens = plan.tensors
    if experts is not None:
        experts = torch.where((row_of_slot >= 0) & (row_of_slot < slot_of_row.shape[0]), experts, -1)
        num_experts = plan.num_experts
    else:
        num_experts = None if plan.rows_per_expert is None else plan.rows_per_expert.shape[0]
        experts = None if plan.expert_of_row is None else values_at(plan.expert_of_row, row_of_slot)
    if num_experts is None or experts is None:
        raise check.wrong_value(operator, "plan", "one that knows its experts", "num_experts = None")
    slots = PlanTensors(row_of_slot, slot_of_row, slot_offsets, experts, num_tokens)
    return _map_of_slots(operator, slots, num_experts, False, backend)


def _slots_of_ids(operator: str, expert_ids: Tensor, num_experts: int) -> PlanTensors:
    """Slots with their experts and nothing else: the rows that are named are nobody's."""
    ids = index_tensor(operator, "expert_ids", expert_ids, "[T, K]", (2,))
    check.integer(operator, "num_experts", num_experts, 0, LARGEST)
    if ids.dtype is not torch.int32:  # looked at before they are narrowed
        ids = torch.where((ids >= 0) & (ids < num_experts), ids, -1).to(torch.int32)
    flat = ids.reshape(-1)
    return PlanTensors(flat, flat, None, flat, ids.shape[0])


def _map_of_slots(operator: str, slots: PlanTensors, num_experts: int, bits: bool, backend: Backend | None) -> Tensor:
    if dispatch.plain(slots.expert_of_slot):
        found: Tensor = _module(operator, backend, slots.row_of_slot).routing_map(slots, num_experts, bits)
        return found
    found = _routing_map(slots, num_experts, bits, backend)
    return found


def slots_of_weights(
    operator: str, weights: Tensor, plan: RoutingPlan, out: Tensor | None, backend: Backend | None
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
    backend: Backend | None,
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


def _take_operator(values: Tensor, index: Tensor, inverse: Tensor, backend: Backend | None) -> Tensor:
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


def _slot_weights_operator(weights: Tensor, plan: PlanTensors, backend: Backend | None) -> Tensor:
    operator = "slot_weights"
    check.shaped(operator, "weights", weights, (plan.num_tokens, None))
    check.floating(operator, "weights", weights)
    plan = _with_experts(operator, plan, weights)
    return _module(operator, backend, weights).slot_weights(weights, plan)


def _slot_weights_backward_operator(
    grad: Tensor, plan: PlanTensors, num_experts: int, accumulate: bool, backend: Backend | None
) -> Tensor:
    operator = "slot_weights_backward"
    plan = _with_experts(operator, plan, grad)
    check.shaped(operator, "grad", grad, (plan.row_of_slot.shape[0],))
    check.floating(operator, "grad", grad)
    check.integer(operator, "num_experts", num_experts, 0, LARGEST)
    return _module(operator, backend, grad).slot_weights_backward(grad, plan, num_experts, accumulate)


def _routing_map_operator(plan: PlanTensors, num_experts: int, bits: bool, backend: Backend | None) -> Tensor:
    operator = "routing_map"
    plan = _with_experts(operator, plan, plan.row_of_slot)
    check.integer(operator, "num_experts", num_experts, 0, LARGEST)
    found: Tensor = _module(operator, backend, plan.row_of_slot).routing_map(plan, num_experts, bits)
    return found


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
_routing_map = register(
    f"routing_map({PLAN_SCHEMA}, SymInt num_experts, bool bits, str? backend) -> Tensor",
    _routing_map_operator,
    lambda plan, num_experts, bits, backend: plan.row_of_slot.new_empty(
        (plan.num_tokens, (num_experts + 7) // 8 if bits else num_experts), dtype=torch.uint8 if bits else torch.bool
    ),
)
