"""An operator of torch.library in one call: schema, implementation, shapes, derivative.

Where the schema has `PLAN_SCHEMA`, the functions given here get a `PlanTensors` in its place, and what `register`
returns takes one.
"""

from collections.abc import Callable, Sequence
from typing import Any

from moeroute.ops.differentiation import differentiable
from moeroute.ops.registration import LIBRARY, implement, operator
from moeroute.plan import PlanTensors

PLAN_SCHEMA = "Tensor row_of_slot, Tensor slot_of_row, Tensor? slot_offsets, Tensor? expert_of_slot, SymInt num_tokens"
_FIELDS = len(PlanTensors._fields)


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    derivative: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
    linear_in: Sequence[int] = (),
    tangent: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register `moeroute::<name>`; returns what verbs and derivatives are to call.

    Args:
        schema: as torch.library takes it, with the name first.
        implementation: computes the result; gets all arguments.
        fake: gives results of the right shapes and dtypes, for torch.compile.
        derivative: `derivative(ctx, *grads)`, one gradient or None for each argument; it calls registered operators
            only, so that it can be differentiated itself. None: the operator has no derivative.
        setup: `setup(ctx, inputs, output)`, what is kept for the derivative.
        linear_in: positions of the arguments in each of which the operator is linear; forward mode follows.
        tangent: `tangent(ctx, inputs, outputs, tangents)` where it is not linear.
    """
    name = schema.split("(")[0]
    at = _plan_position(schema)
    LIBRARY.define(schema)
    implement(name, _packing(implementation, at), _packing(fake, at))
    if derivative is None or setup is None:
        call = operator(name)
    else:
        call = differentiable(
            name, _expanding(derivative, at), _packing_inputs(setup, at), linear_in=linear_in, tangent=tangent
        )
    if at is None:
        return call
    return lambda *arguments: call(*arguments[:at], *arguments[at], *arguments[at + 1 :])


def _plan_position(schema: str) -> int | None:
    before, found, _ = schema.partition(PLAN_SCHEMA)
    return before.count(",") if found else None


def _packing(function: Callable[..., Any], at: int | None) -> Callable[..., Any]:
    """The function, called with the plan's tensors one by one."""
    if at is None:
        return function
    return lambda *a: function(*a[:at], PlanTensors(*a[at : at + _FIELDS]), *a[at + _FIELDS :])


def _packing_inputs(setup: Callable[..., None], at: int | None) -> Callable[..., None]:
    if at is None:
        return setup

    def packed(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plan = PlanTensors(*inputs[at : at + _FIELDS])
        setup(ctx, (*inputs[:at], plan, *inputs[at + _FIELDS :]), output)

    return packed


def _expanding(derivative: Callable[..., Any], at: int | None) -> Callable[..., Any]:
    """A gradient of None for each of the plan's tensors."""
    if at is None:
        return derivative

    def expanded(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = derivative(ctx, *grads)
        return (*found[:at], *(None,) * _FIELDS, *found[at + 1 :])

    return expanded
