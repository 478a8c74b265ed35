"""Products over expert segments that keep less for their backward pass, as what they multiply can be made again.

    y = activated_linear(x, w, c)     grouped_linear(activate(x), w, c); keeps x and not the activation
    y = spread_linear(x, w, c)        grouped_linear(spread(x), w, c); keeps the tokens and not their copies

The results and the gradients have the bits of the two steps they stand for. What is made again costs one more pass, and
is gone before the gradient of the rows is there. Differentiable to any order.
"""

from typing import Any

import torch
from torch import Tensor

from moeroute.dispatch import Backend
from moeroute.ops.activations.op import Activation, activate, activate_backward, tangent_of
from moeroute.ops.experts import grad_of_bias, grad_of_weight, in_autocast, linear_of_segments
from moeroute.ops.register import PLAN_SCHEMA, register
from moeroute.ops.rows.op import combine_slots, row_dots_slots, spread_slots
from moeroute.plan import PlanTensors, RoutingPlan

# ---------------------------------------------------------------------------- verbs


def activated_linear(
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """``grouped_linear(activate(x), weight, sizes, bias)`` with its bits; the arguments are theirs."""
    x, weight, bias = in_autocast(x, weight, bias)
    result: Tensor = _activated_linear(x, weight, sizes, bias, activation, interleaved, backend)
    return result


def spread_linear(
    x: Tensor,
    slot_weights: Tensor | None,
    plan: RoutingPlan,
    weight: Tensor,
    sizes: Tensor,
    bias: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """``grouped_linear(spread(x, plan, slot_weights), weight, sizes, bias)`` with its bits."""
    x, weight, bias = in_autocast(x, weight, bias)
    result: Tensor = _spread_linear(x, slot_weights, plan.tensors, weight, sizes, bias, backend)
    return result


# ---------------------------------------------------------------------------- derivatives


def _activated_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, sizes, _, *options, ctx.backend = inputs
    ctx.options = tuple(options)
    ctx.save_for_backward(x, weight, sizes)


def _activated_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, sizes = ctx.saved_tensors
    needs_x, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
    grad_x = grad_weight = None
    if needs_weight:  # first: what is made again is gone before the gradients of the rows come
        rows = activate(x, ctx.options[0], interleaved=ctx.options[1], backend=ctx.backend)
        grad_weight = grad_of_weight(weight, grad, rows, sizes)
        del rows
    if needs_x:
        grad_rows = linear_of_segments(grad, weight.transpose(1, 2), sizes)
        grad_x, _ = activate_backward(grad_rows, x, *ctx.options, False, ctx.backend)
    return grad_x, grad_weight, None, grad_of_bias(grad, sizes) if needs_bias else None, None, None, None


def _activated_tangent(ctx: Any, inputs: list[Any], outputs: Any, tangents: tuple[Any, ...]) -> Tensor | None:
    x, weight, sizes, _, activation, interleaved, backend = inputs
    move_x, move_weight, _, move_bias, *_ = tangents
    terms = []
    if move_x is not None:
        terms.append(linear_of_segments(tangent_of(x, move_x, activation, interleaved), weight, sizes))
    if move_weight is not None:
        rows = activate(x, activation, interleaved=interleaved, backend=backend)
        terms.append(linear_of_segments(rows, move_weight, sizes))
    if move_bias is not None:
        terms.append(linear_of_segments(x.new_ones(x.shape[0], 1), move_bias[..., None], sizes))
    return sum(terms[1:], terms[0]) if terms else None


def _spread_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, slot_weights, plan, weight, sizes, _, ctx.backend = inputs
    *indices, ctx.num_tokens = plan
    ctx.save_for_backward(*indices, x, slot_weights, weight, sizes)


def _spread_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *indices, x, slot_weights, weight, sizes = ctx.saved_tensors
    plan = PlanTensors._make((*indices, ctx.num_tokens))
    needs_x, needs_slots = ctx.needs_input_grad[:2]
    needs_weight, _, needs_bias, _ = ctx.needs_input_grad[-4:]
    grad_x = grad_slots = grad_weight = None
    if needs_weight:  # first: what is made again is gone before the gradients of the rows come
        rows = spread_slots(x, slot_weights, plan, ctx.backend)
        grad_weight = grad_of_weight(weight, grad, rows, sizes)
        del rows
    if needs_x or needs_slots:
        grad_rows = linear_of_segments(grad, weight.transpose(1, 2), sizes)
        if needs_x:
            grad_x = combine_slots(grad_rows, slot_weights, plan, ctx.backend)
        if needs_slots:
            grad_slots = row_dots_slots(grad_rows, x, plan, slot_weights.dtype, ctx.backend)
    grad_bias = grad_of_bias(grad, sizes) if needs_bias else None
    return grad_x, grad_slots, None, grad_weight, None, grad_bias, None


def _spread_tangent(ctx: Any, inputs: list[Any], outputs: Any, tangents: tuple[Any, ...]) -> Tensor | None:
    x, slot_weights, *_, weight, sizes, _, backend = inputs
    move_x, move_slots, *_, move_weight, _, move_bias, _ = tangents
    plan = PlanTensors._make(inputs[2:-4])
    terms = []
    if move_x is not None:
        terms.append(linear_of_segments(spread_slots(move_x, slot_weights, plan, backend), weight, sizes))
    if move_slots is not None:
        terms.append(linear_of_segments(spread_slots(x, move_slots, plan, backend), weight, sizes))
    if move_weight is not None:
        terms.append(linear_of_segments(spread_slots(x, slot_weights, plan, backend), move_weight, sizes))
    if move_bias is not None:
        ones = x.new_ones(plan.slot_of_row.shape[0], 1)
        terms.append(linear_of_segments(ones, move_bias[..., None], sizes))
    return sum(terms[1:], terms[0]) if terms else None


# ---------------------------------------------------------------------------- registration


def _activated_operator(
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    interleaved: bool,
    backend: Backend | None,
) -> Tensor:
    rows = torch.ops.moeroute.activate(x, activation, interleaved, backend)
    result: Tensor = torch.ops.moeroute.grouped_linear(rows, weight, sizes, bias)
    return result


def _spread_operator(
    x: Tensor,
    slot_weights: Tensor | None,
    plan: PlanTensors,
    weight: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    backend: Backend | None,
) -> Tensor:
    rows = torch.ops.moeroute.spread(x, slot_weights, *plan, backend)
    result: Tensor = torch.ops.moeroute.grouped_linear(rows, weight, sizes, bias)
    return result


def _activated_shape(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


_activated_linear = register(
    "activated_linear(Tensor x, Tensor weight, Tensor sizes, Tensor? bias, str activation, bool interleaved, "
    "str? backend) -> Tensor",
    _activated_operator,
    _activated_shape,
    derivative=_activated_derivative,
    setup=_activated_setup,
    tangent=_activated_tangent,
)
_spread_linear = register(
    f"spread_linear(Tensor x, Tensor? slot_weights, {PLAN_SCHEMA}, Tensor weight, Tensor sizes, Tensor? bias, "
    "str? backend) -> Tensor",
    _spread_operator,
    lambda x, slot_weights, plan, weight, sizes, bias, backend: x.new_empty(plan.slot_of_row.shape[0], weight.shape[1]),
    derivative=_spread_derivative,
    setup=_spread_setup,
    tangent=_spread_tangent,
)
