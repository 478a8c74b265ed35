"""Moving rows: spread, combine and row_dots over one plan.

The set is closed under differentiation, so every derivative of every order is one of the three:

    spread(x, w)       y[r] = w[s] * x[token(s)]                dx = combine(dy, w)   dw = row_dots(dy, x)
    combine(y, w)      x[t] = sum over its slots w[s] * y[r]    dy = spread(dx, w)    dw = row_dots(y, dx)
    row_dots(y, x)     d[s] = <y[r], x[token(s)]>               dy = spread(x, dd)    dx = combine(y, dd)

The verbs come first, then the checks, then what torch.library knows of the operators.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeroute import check, dispatch, dtypes
from moeroute.dispatch import Backend
from moeroute.ops import layout
from moeroute.ops.register import PLAN_SCHEMA, register, transformed
from moeroute.plan import PlanTensors, RoutingPlan, expect_plan, given_plan

_module = partial(dispatch.implementation, "rows")


def spread(
    x: Tensor,
    plan: RoutingPlan,
    weights: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Copy every token to the rows of its slots: ``y[r] = weights[s] * x[token(s)]`` with s = slot_of_row[r].

    Where several slots name one row, the row has the copy of the last one. Differentiable to any order in x and
    weights.

    Args:
        x: [T, H], any dtype; without weights the bits are copied.
        plan: the row of every slot.
        weights: [S], one for each slot: float16, bfloat16 or float32; float64 with float64, and
            beside a narrower dtype rounded to float32, once.
        out: [R, H], the dtype of x; the result is written into it, outside autograd.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The rows [R, H] in the dtype of x. Padding rows are 0.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``x[plan.token_of_row] * weights[plan.slot_of_row, None]`` where there is no padding.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> moeroute.spread(torch.tensor([[1.0], [2.0]]), plan).flatten()
    tensor([1., 1., 2., 2.])
    >>> moeroute.spread(torch.tensor([[1.0], [2.0]]), plan, torch.tensor([0.5, 1.0, 2.0, 4.0])).flatten()
    tensor([1.0000, 0.5000, 4.0000, 8.0000])
    """
    expect_plan("spread", plan)
    check.matrix("spread", "x", x, "T", plan.num_tokens, plan)
    if weights is not None:
        weights = layout.weights_beside(x, weights)
        check.weight_per_slot("spread", weights, "x", x, plan.row_of_slot)
    elif x.is_quantized:
        raise check.quantized("spread", "x", x)
    return spread_checked("spread", x, plan, weights, out, backend)


def spread_checked(
    operator: str, x: Tensor, plan: RoutingPlan, weights: Tensor | None, out: Tensor | None, backend: Backend | None
) -> Tensor:
    """weights: one a slot, of any shape."""
    if out is not None:
        layout.check_out(operator, out, (plan.num_rows, x.shape[1]), x.dtype, x, weights, *plan.tensors[:4])
        x, weights = layout.resolved(x), layout.resolved(weights)
    if out is not None or (dispatch.plain(x, weights) and not x.is_conj()):
        return _module(operator, backend, x).spread(x, weights, plan.tensors, out=out)
    if weights is not None:
        weights = weights.reshape(-1)
    return spread_slots(x, weights, plan.tensors, backend)


def combine(
    rows: Tensor,
    plan: RoutingPlan,
    weights: Tensor | None = None,
    *,
    init: Tensor | tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Add up the rows of every token's slots: ``x[t] = sum of weights[s] * rows[row_of_slot[s]]``.

    The sum is computed in float32, from +0, in slot order, with one rounding for each product and sum and one at the
    store. A slot without a row is skipped; so is a slot whose weight is +0 or -0, and its row is not read.
    Differentiable to any order in rows and weights.

    Args:
        rows: [R, H], float16, bfloat16, float32 or float64.
        plan: the row of every slot.
        weights: [S], one for each slot: float16, bfloat16 or float32; float64 with float64, and
            beside a narrower dtype rounded to float32, once.
        init: [T, H], where the sum starts, or a pair of such tensors, which are added up first. Outside autograd.
        bias: [E, H]: a slot adds ``weights[s] * (row + bias[expert_of_slot[s]])``, without the bias where its expert is
            none. Outside autograd.
        out: [T, H], the dtype of rows; the result is written into it, outside autograd.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The tokens [T, H] in the dtype of rows. A token without a row is +0.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``(rows[plan.row_of_slot] * weights[:, None]).reshape(T, K, H).sum(1)``, in float32,
    where every slot has a row.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])     # expert 0: t0; 1: t0, t1; 2: t1
    >>> moeroute.combine(rows, plan).flatten()
    tensor([ 3., 12.])
    """
    operator = "combine"
    expect_plan(operator, plan)
    check.matrix(operator, "rows", rows, "R", plan.num_rows, plan)
    check.floating(operator, "rows", rows)
    if weights is not None:
        weights = layout.weights_beside(rows, weights)
        check.weight_per_slot(operator, weights, "rows", rows, plan.row_of_slot)
    if init is None and bias is None:
        return combine_checked(operator, rows, plan, weights, out, backend)
    if isinstance(init, tuple) and len(init) != 2:
        raise check.wrong_value(operator, "init", "a tensor or a pair of them", f"a tuple of {len(init)}")
    starts = init if isinstance(init, tuple) else () if init is None else (init,)
    for start in starts:
        check.matrix(operator, "init", start, "T", plan.num_tokens, plan)
        check.partner(operator, "init", start, "rows", rows)
    if bias is not None:
        _check_bias(operator, bias, "rows", rows, plan)
    argument = "bias" if init is None else "init"
    dispatch.direct(operator, argument, rows, weights, *starts, bias)
    if out is not None:
        inputs = (rows, weights, *starts, bias, *plan.tensors[:4])
        layout.check_out(operator, out, (plan.num_tokens, rows.shape[1]), rows.dtype, *inputs)
    rows = layout.resolved(rows)
    first, second = (*map(layout.resolved, starts), None, None)[:2]
    weights, bias = layout.resolved(weights), layout.resolved(bias)
    return _module(operator, backend, rows).combine(
        rows, weights, plan.tensors, init=first, init_more=second, bias=bias, out=out
    )


def combine_checked(
    operator: str, rows: Tensor, plan: RoutingPlan, weights: Tensor | None, out: Tensor | None, backend: Backend | None
) -> Tensor:
    """weights: one a slot, of any shape."""
    if out is not None:
        layout.check_out(operator, out, (plan.num_tokens, rows.shape[1]), rows.dtype, rows, weights, *plan.tensors[:4])
        rows, weights = layout.resolved(rows), layout.resolved(weights)
    if out is not None or dispatch.plain(rows, weights):
        return _module(operator, backend, rows).combine(rows, weights, plan.tensors, out=out)
    if weights is not None:
        weights = weights.reshape(-1)
    return combine_slots(rows, weights, plan.tensors, backend)


def row_dots(
    rows: Tensor,
    x: Tensor,
    plan: RoutingPlan,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """The dot product of every slot's row with its token: ``d[s] = <rows[row_of_slot[s]], x[token(s)]>``.

    Products and sums are float32: 256 partial sums over the hidden size, then neighbours (docs/arithmetic.md).
    Differentiable to any order in rows and x.

    Args:
        rows: [R, H], float16, bfloat16, float32 or float64.
        x: [T, H], the dtype of rows.
        plan: the row of every slot.
        bias: [E, H]: uses ``rows + bias[expert_of_slot[s]]``. Outside autograd.
        dtype: of the result; always float64 for float64 rows.
        out: [S], the dtype of the result, which is written into it, outside autograd.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The products [S]; 0 for a slot without a row.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``(rows[plan.row_of_slot] * x[plan.token_of_slot]).sum(1)`` where every slot has a row.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0]]), 2)
    >>> moeroute.row_dots(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 10.0]]), plan)
    tensor([43., 21.])
    """
    operator = "row_dots"
    expect_plan(operator, plan)
    check.matrix(operator, "rows", rows, "R", plan.num_rows, plan)
    check.floating(operator, "rows", rows)
    check.matrix(operator, "x", x, "T", plan.num_tokens, plan)
    check.partner(operator, "x", x, "rows", rows)
    check.float_dtype(operator, "dtype", dtype, dtypes.FLOATS)
    if rows.dtype is torch.float64:
        dtype = torch.float64
    direct = bias is not None or out is not None
    if direct:
        if bias is not None:
            _check_bias(operator, bias, "rows", rows, plan)
            dispatch.direct(operator, "bias", rows, x, bias)
        if out is not None:
            layout.check_out(operator, out, (plan.num_slots,), dtype, rows, x, bias, *plan.tensors[:4])
        rows, x, bias = layout.resolved(rows), layout.resolved(x), layout.resolved(bias)
    if direct or dispatch.plain(rows, x):
        return _module(operator, backend, rows).row_dots(rows, x, plan.tensors, dtype, bias=bias, out=out)
    return row_dots_slots(rows, x, plan.tensors, dtype, backend)


# ---------------------------------------------------------------------------- checks


def _check_bias(operator: str, bias: Any, name: str, rows: Tensor, plan: RoutingPlan) -> None:
    check.tensor(operator, "bias", bias)
    if plan.expert_of_slot is None:
        raise check.wrong_value(operator, "bias", "None, as the plan has no expert_of_slot", f"{list(bias.shape)}")
    if bias.ndim != 2 or plan.num_experts not in (None, bias.shape[0]):
        experts = "" if plan.num_experts is None else f" with E = {plan.num_experts}, as the plan"
        raise check.wrong_shape(operator, "bias", f"[E, H]{experts}", bias)
    check.partner(operator, "bias", bias, name, rows)
    if bias.device != rows.device:
        raise check.wrong_value(operator, "bias", f"on {rows.device}, as {name}", bias.device)


# ---------------------------------------------------------------------------- derivatives


def _spread_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, plan, backend = inputs
    keep_x = weights is not None and ctx.needs_input_grad[1]
    _save(ctx, plan, backend, x if keep_x else None, weights)


def _spread_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    plan, (x, weights) = _saved(ctx)
    grad_x = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_x = combine_slots(grad, weights, plan, ctx.backend)
    if x is not None:
        grad_weights = row_dots_slots(grad, x, plan, weights.dtype, ctx.backend)
    return grad_x, grad_weights, None, None


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, plan, backend = inputs
    keep_rows = weights is not None and ctx.needs_input_grad[1]
    _save(ctx, plan, backend, rows if keep_rows else None, weights)


def _combine_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    plan, (rows, weights) = _saved(ctx)
    grad_rows = grad_weights = None
    if rows is None:
        grad_rows = spread_slots(grad, weights, plan, ctx.backend)
    elif ctx.needs_input_grad[0]:
        grad_rows, grad_weights = spread_dots(grad, rows, weights, plan, ctx.backend)
    else:
        grad_weights = row_dots_slots(rows, grad, plan, weights.dtype, ctx.backend)
    return grad_rows, grad_weights, None, None


def _row_dots_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, x, plan, _, backend = inputs
    _save(ctx, plan, backend, rows if ctx.needs_input_grad[1] else None, x if ctx.needs_input_grad[0] else None)


def _row_dots_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    plan, (rows, x) = _saved(ctx)
    grad_rows = None if x is None else spread_slots(x, grad, plan, ctx.backend)
    grad_x = None if rows is None else combine_slots(rows, grad, plan, ctx.backend)
    return grad_rows, grad_x, None, None, None


def _spread_dots_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, rows, weights, plan, backend = inputs
    _save(ctx, plan, backend, x, rows, weights)
    ctx.set_materialize_grads(False)


def _spread_dots_derivative(ctx: Any, grad_spread: Tensor | None, grad_dots: Tensor | None) -> tuple[Any, ...]:
    plan, (x, rows, weights) = _saved(ctx)
    grad_x = grad_rows = grad_weights = None
    if grad_spread is not None:
        if ctx.needs_input_grad[0]:
            grad_x = combine_slots(grad_spread, weights, plan, ctx.backend)
        if ctx.needs_input_grad[2]:
            grad_weights = row_dots_slots(grad_spread, x, plan, weights.dtype, ctx.backend)
    if grad_dots is not None:
        if ctx.needs_input_grad[0]:
            through_dots = combine_slots(rows, grad_dots, plan, ctx.backend)
            grad_x = through_dots if grad_x is None else grad_x + through_dots
        if ctx.needs_input_grad[1]:
            grad_rows = spread_slots(x, grad_dots, plan, ctx.backend)
    return grad_x, grad_rows, grad_weights, None, None


def _save(ctx: Any, plan: PlanTensors, backend: Backend | None, *others: Tensor | None) -> None:
    *indices, ctx.num_tokens = plan
    ctx.save_for_backward(*indices, *others)
    ctx.backend = backend


def _saved(ctx: Any) -> tuple[PlanTensors, tuple[Any, ...]]:
    """The plan's tensors, and the others that `_save` got."""
    tensors = ctx.saved_tensors
    return PlanTensors._make((*tensors[:4], ctx.num_tokens)), tensors[4:]


# ---------------------------------------------------------------------------- registration

# A registered operator may be called by anybody, and stands in exported graphs: it looks at all that a kernel indexes
# with. A verb has looked already, and calls the kernel itself where it may.


def _spread_operator(x: Tensor, weights: Tensor | None, plan: PlanTensors, backend: Backend | None) -> Tensor:
    operator = "spread"
    check.shaped(operator, "x", x, (plan.num_tokens, None))
    plan = given_plan(operator, plan, None, x)
    if weights is not None:
        check.weight_per_slot(operator, weights, "x", x, plan.row_of_slot)
    elif x.is_quantized:
        raise check.quantized(operator, "x", x)
    return _module(operator, backend, x).spread(x, weights, plan)


def _combine_operator(rows: Tensor, weights: Tensor | None, plan: PlanTensors, backend: Backend | None) -> Tensor:
    operator = "combine"
    check.shaped(operator, "rows", rows, (None, None))
    check.floating(operator, "rows", rows)
    plan = given_plan(operator, plan, rows.shape[0], rows)
    if weights is not None:
        check.weight_per_slot(operator, weights, "rows", rows, plan.row_of_slot)
    return _module(operator, backend, rows).combine(rows, weights, plan)


def _row_dots_operator(
    rows: Tensor, x: Tensor, plan: PlanTensors, dtype: torch.dtype, backend: Backend | None
) -> Tensor:
    operator = "row_dots"
    check.shaped(operator, "rows", rows, (None, None))
    check.floating(operator, "rows", rows)
    check.shaped(operator, "x", x, (plan.num_tokens, None), rows)
    check.partner(operator, "x", x, "rows", rows)
    check.float_dtype(operator, "dtype", dtype, dtypes.FLOATS)
    plan = given_plan(operator, plan, rows.shape[0], rows)
    return _module(operator, backend, rows).row_dots(rows, x, plan, dtype)


def _spread_dots_operator(
    x: Tensor, rows: Tensor, weights: Tensor, plan: PlanTensors, backend: Backend | None
) -> tuple[Tensor, Tensor]:
    operator = "spread_dots"
    check.shaped(operator, "x", x, (plan.num_tokens, None))
    check.shaped(operator, "rows", rows, (None, None), x)
    check.partner(operator, "rows", rows, "x", x)
    plan = given_plan(operator, plan, rows.shape[0], x)
    check.weight_per_slot(operator, weights, "x", x, plan.row_of_slot)
    found: tuple[Tensor, Tensor] = _module(operator, backend, x).spread_dots(x, rows, weights, plan)
    return found


spread_slots = register(
    f"spread(Tensor x, Tensor? weights, {PLAN_SCHEMA}, str? backend) -> Tensor",
    _spread_operator,
    lambda x, weights, plan, backend: x.new_empty(plan.slot_of_row.shape[0], x.shape[1]),
    derivative=_spread_derivative,
    setup=_spread_setup,
    linear_in=(0, 1),
)
combine_slots = register(
    f"combine(Tensor rows, Tensor? weights, {PLAN_SCHEMA}, str? backend) -> Tensor",
    _combine_operator,
    lambda rows, weights, plan, backend: rows.new_empty(plan.num_tokens, rows.shape[1]),
    derivative=_combine_derivative,
    setup=_combine_setup,
    linear_in=(0, 1),
)
row_dots_slots = register(
    f"row_dots(Tensor rows, Tensor x, {PLAN_SCHEMA}, ScalarType dtype, str? backend) -> Tensor",
    _row_dots_operator,
    lambda rows, x, plan, dtype, backend: rows.new_empty(plan.row_of_slot.shape[0], dtype=dtype),
    derivative=_row_dots_derivative,
    setup=_row_dots_setup,
    linear_in=(0, 1),
)
_fused_spread_dots = register(
    f"spread_dots(Tensor x, Tensor rows, Tensor weights, {PLAN_SCHEMA}, str? backend) -> (Tensor, Tensor)",
    _spread_dots_operator,
    lambda x, rows, weights, plan, backend: (
        x.new_empty(plan.slot_of_row.shape[0], x.shape[1]),
        weights.new_empty(plan.row_of_slot.shape[0]),
    ),
    derivative=_spread_dots_derivative,
    setup=_spread_dots_setup,
)


def spread_dots(
    x: Tensor, rows: Tensor, weights: Tensor, plan: PlanTensors, backend: Backend | None
) -> tuple[Tensor, Tensor]:
    """spread and row_dots in one pass; in two under forward mode and torch.func, which knows each of them."""
    if transformed():
        return spread_slots(x, weights, plan, backend), row_dots_slots(rows, x, plan, weights.dtype, backend)
    result: tuple[Tensor, Tensor] = _fused_spread_dots(x, rows, weights, plan, backend)
    return result
