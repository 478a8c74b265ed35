"""Moving rows: spread, combine and row_dots over one plan, and permute and unpermute on them.

The set is closed under differentiation, so every derivative of every order is one of the three:

    spread(x, w)       y[r] = w[s] * x[token(s)]                dx = combine(dy, w)   dw = row_dots(dy, x)
    combine(y, w)      x[t] = sum over its slots w[s] * y[r]    dy = spread(dx, w)    dw = row_dots(y, dx)
    row_dots(y, x)     d[s] = <y[r], x[token(s)]>               dy = spread(x, dd)    dx = combine(y, dd)

Rungs, as in every room: registration and derivatives, checks, verbs.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeroute import backend as backends
from moeroute import check
from moeroute.ops.differentiation import differentiable, transformed
from moeroute.ops.planning.op import LARGEST, RoutingPlan
from moeroute.ops.registration import LIBRARY, implement

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STRIDED = check.STRIDED

# ---------------------------------------------------------------------------- registration


_PLAN = "Tensor row_of_slot, Tensor slot_of_row, Tensor? slot_offsets"
_EXPERTS = "Tensor expert_of_slot, Tensor? slot_offsets"
LIBRARY.define(f"spread(Tensor x, Tensor? weights, {_PLAN}, str? backend) -> Tensor")
LIBRARY.define(f"combine(Tensor rows, Tensor? weights, {_PLAN}, SymInt num_tokens, str? backend) -> Tensor")
LIBRARY.define(f"row_dots(Tensor rows, Tensor x, {_PLAN}, ScalarType dtype, str? backend) -> Tensor")
LIBRARY.define(f"spread_dots(Tensor x, Tensor rows, Tensor weights, {_PLAN}, str? backend) -> (Tensor, Tensor)")
LIBRARY.define("take(Tensor values, Tensor index, Tensor inverse, str? backend) -> Tensor")
LIBRARY.define(f"slot_weights(Tensor weights, {_EXPERTS}, str? backend) -> Tensor")
LIBRARY.define(
    f"slot_weights_backward(Tensor grad, {_EXPERTS}, SymInt num_tokens, SymInt num_experts, bool accumulate, "
    "str? backend) -> Tensor"
)


_module = partial(backends.implementation, "permutation")


# A registered operator may be called by anybody, and stands in exported graphs: it looks at all that a kernel indexes
# with. A verb has looked already, and calls the kernel itself where it may.


def _index(operator: str, argument: str, index: Tensor, size: int | None, like: Tensor) -> Tensor:
    """int32 and contiguous: kernels walk it by address."""
    check.shaped(operator, argument, index, (size,), like)
    if index.dtype is not torch.int32:
        raise check.wrong_dtype(operator, argument, "torch.int32", index)
    return index.contiguous()


def _owners(
    operator: str, argument: str, index: Tensor, slot_offsets: Tensor | None, num_tokens: int, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """An index of the slots, and whose they are."""
    check.integer(operator, "num_tokens", num_tokens, 0, LARGEST)
    index = _index(operator, argument, index, None, like)
    if slot_offsets is not None:
        return index, _index(operator, "slot_offsets", slot_offsets, num_tokens + 1, like)
    if index.shape[0] % num_tokens if num_tokens else index.shape[0]:
        raise check.wrong_shape(operator, argument, f"[T * K] with T = {num_tokens}", index)
    return index, None


def _indices(
    operator: str,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    slot_offsets: Tensor | None,
    num_tokens: int,
    num_rows: int | None,
    like: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    row_of_slot, slot_offsets = _owners(operator, "row_of_slot", row_of_slot, slot_offsets, num_tokens, like)
    return row_of_slot, _index(operator, "slot_of_row", slot_of_row, num_rows, like), slot_offsets


def _spread_operator(
    x: Tensor,
    weights: Tensor | None,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    slot_offsets: Tensor | None,
    backend: str | None,
) -> Tensor:
    operator = "spread"
    check.shaped(operator, "x", x, (None, None))
    plan = _indices(operator, row_of_slot, slot_of_row, slot_offsets, x.shape[0], None, x)
    if weights is not None:
        _check_slot_weights(operator, weights, "x", x, plan[0])
    elif x.is_quantized:
        raise _quantized(operator, "x", x)
    return _module(operator, backend, x).spread(x, weights, *plan)


def _combine_operator(
    rows: Tensor,
    weights: Tensor | None,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    slot_offsets: Tensor | None,
    num_tokens: int,
    backend: str | None,
) -> Tensor:
    operator = "combine"
    check.shaped(operator, "rows", rows, (None, None))
    _check_float(operator, "rows", rows)
    plan = _indices(operator, row_of_slot, slot_of_row, slot_offsets, num_tokens, rows.shape[0], rows)
    if weights is not None:
        _check_slot_weights(operator, weights, "rows", rows, plan[0])
    return _module(operator, backend, rows).combine(rows, weights, plan[0], plan[2], num_tokens)


def _row_dots_operator(
    rows: Tensor,
    x: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    slot_offsets: Tensor | None,
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    operator = "row_dots"
    check.shaped(operator, "rows", rows, (None, None))
    _check_float(operator, "rows", rows)
    check.shaped(operator, "x", x, (None, None), rows)
    _check_partner(operator, "x", x, "rows", rows)
    check.float_dtype(operator, "dtype", dtype, FLOATS)
    plan = _indices(operator, row_of_slot, slot_of_row, slot_offsets, x.shape[0], rows.shape[0], rows)
    return _module(operator, backend, rows).row_dots(rows, x, plan[0], plan[2], dtype)


def _spread_dots_operator(
    x: Tensor,
    rows: Tensor,
    weights: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    slot_offsets: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    operator = "spread_dots"
    check.shaped(operator, "x", x, (None, None))
    check.shaped(operator, "rows", rows, (None, None), x)
    _check_partner(operator, "rows", rows, "x", x)
    plan = _indices(operator, row_of_slot, slot_of_row, slot_offsets, x.shape[0], rows.shape[0], x)
    _check_slot_weights(operator, weights, "x", x, plan[0])
    return _module(operator, backend, x).spread_dots(x, rows, weights, *plan)


def _take_operator(values: Tensor, index: Tensor, inverse: Tensor, backend: str | None) -> Tensor:
    operator = "take"
    check.shaped(operator, "values", values, (None,))
    _check_float(operator, "values", values)
    _index(operator, "inverse", inverse, values.shape[0], values)
    index = _index(operator, "index", index, None, values)
    return _module(operator, backend, values).take(values, index)


def _slot_weights_operator(
    weights: Tensor, expert_of_slot: Tensor, slot_offsets: Tensor | None, backend: str | None
) -> Tensor:
    operator = "slot_weights"
    check.shaped(operator, "weights", weights, (None, None))
    _check_float(operator, "weights", weights)
    owners = _owners(operator, "expert_of_slot", expert_of_slot, slot_offsets, weights.shape[0], weights)
    return _module(operator, backend, weights).slot_weights(weights, *owners)


def _slot_weights_backward_operator(
    grad: Tensor,
    expert_of_slot: Tensor,
    slot_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    accumulate: bool,
    backend: str | None,
) -> Tensor:
    operator = "slot_weights_backward"
    owners = _owners(operator, "expert_of_slot", expert_of_slot, slot_offsets, num_tokens, grad)
    check.shaped(operator, "grad", grad, (owners[0].shape[0],))
    _check_float(operator, "grad", grad)
    check.integer(operator, "num_experts", num_experts, 0, LARGEST)
    return _module(operator, backend, grad).slot_weights_backward(grad, *owners, num_tokens, num_experts, accumulate)


implement(
    "spread",
    _spread_operator,
    lambda x, weights, row_of_slot, slot_of_row, slot_offsets, backend: x.new_empty(slot_of_row.shape[0], x.shape[1]),
)
implement(
    "combine",
    _combine_operator,
    lambda rows, weights, row_of_slot, slot_of_row, slot_offsets, num_tokens, backend: rows.new_empty(
        num_tokens, rows.shape[1]
    ),
)
implement(
    "row_dots",
    _row_dots_operator,
    lambda rows, x, row_of_slot, slot_of_row, slot_offsets, dtype, backend: rows.new_empty(
        row_of_slot.shape[0], dtype=dtype
    ),
)
implement(
    "spread_dots",
    _spread_dots_operator,
    lambda x, rows, weights, row_of_slot, slot_of_row, slot_offsets, backend: (
        x.new_empty(slot_of_row.shape[0], x.shape[1]),
        weights.new_empty(row_of_slot.shape[0]),
    ),
)
implement("take", _take_operator, lambda values, index, inverse, backend: values.new_empty(index.shape[0]))
implement(
    "slot_weights",
    _slot_weights_operator,
    lambda weights, expert_of_slot, slot_offsets, backend: weights.new_empty(expert_of_slot.shape[0]),
)
implement(
    "slot_weights_backward",
    _slot_weights_backward_operator,
    lambda grad, expert_of_slot, slot_offsets, num_tokens, num_experts, accumulate, backend: grad.new_empty(
        num_tokens, num_experts
    ),
)


# ---------------------------------------------------------------------------- derivatives


def _save_plan(ctx: Any, plan: tuple[Tensor, Tensor, Tensor | None], backend: str | None, *others: Any) -> None:
    ctx.save_for_backward(*plan, *others)
    ctx.backend = backend


def _spread_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, row_of_slot, slot_of_row, slot_offsets, backend = inputs
    keep_x = weights is not None and ctx.needs_input_grad[1]
    _save_plan(ctx, (row_of_slot, slot_of_row, slot_offsets), backend, x if keep_x else None, weights)
    ctx.num_tokens = x.shape[0]


def _spread_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *plan, x, weights = ctx.saved_tensors
    grad_x = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_x = _combine(grad, weights, *plan, ctx.num_tokens, ctx.backend)
    if x is not None:
        grad_weights = _row_dots(grad, x, *plan, weights.dtype, ctx.backend)
    return grad_x, grad_weights, None, None, None, None


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, row_of_slot, slot_of_row, slot_offsets, _, backend = inputs
    keep_rows = weights is not None and ctx.needs_input_grad[1]
    _save_plan(ctx, (row_of_slot, slot_of_row, slot_offsets), backend, rows if keep_rows else None, weights)


def _combine_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *plan, rows, weights = ctx.saved_tensors
    grad_rows = grad_weights = None
    if rows is None:
        grad_rows = _spread(grad, weights, *plan, ctx.backend)
    elif ctx.needs_input_grad[0]:
        grad_rows, grad_weights = _spread_dots(grad, rows, weights, *plan, ctx.backend)
    else:
        grad_weights = _row_dots(rows, grad, *plan, weights.dtype, ctx.backend)
    return grad_rows, grad_weights, None, None, None, None, None


def _row_dots_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, x, row_of_slot, slot_of_row, slot_offsets, _, backend = inputs
    _save_plan(
        ctx,
        (row_of_slot, slot_of_row, slot_offsets),
        backend,
        rows if ctx.needs_input_grad[1] else None,
        x if ctx.needs_input_grad[0] else None,
    )
    ctx.num_tokens = x.shape[0]


def _row_dots_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *plan, rows, x = ctx.saved_tensors
    grad_rows = None if x is None else _spread(x, grad, *plan, ctx.backend)
    grad_x = None if rows is None else _combine(rows, grad, *plan, ctx.num_tokens, ctx.backend)
    return grad_rows, grad_x, None, None, None, None, None


def _spread_dots_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, rows, weights, row_of_slot, slot_of_row, slot_offsets, backend = inputs
    _save_plan(ctx, (row_of_slot, slot_of_row, slot_offsets), backend, x, rows, weights)
    ctx.set_materialize_grads(False)


def _spread_dots_derivative(ctx: Any, grad_spread: Tensor | None, grad_dots: Tensor | None) -> tuple[Any, ...]:
    *plan, x, rows, weights = ctx.saved_tensors
    grad_x = grad_rows = grad_weights = None
    if grad_spread is not None:
        if ctx.needs_input_grad[0]:
            grad_x = _combine(grad_spread, weights, *plan, x.shape[0], ctx.backend)
        if ctx.needs_input_grad[2]:
            grad_weights = _row_dots(grad_spread, x, *plan, weights.dtype, ctx.backend)
    if grad_dots is not None:
        if ctx.needs_input_grad[0]:
            through_dots = _combine(rows, grad_dots, *plan, x.shape[0], ctx.backend)
            grad_x = through_dots if grad_x is None else grad_x + through_dots
        if ctx.needs_input_grad[1]:
            grad_rows = _spread(x, grad_dots, *plan, ctx.backend)
    return grad_x, grad_rows, grad_weights, None, None, None, None


def _take_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, inverse, ctx.backend = inputs
    ctx.save_for_backward(index, inverse)


def _take_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    index, inverse = ctx.saved_tensors
    return _take(grad, inverse, index, ctx.backend), None, None, None


def _slot_weights_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, expert_of_slot, slot_offsets, ctx.backend = inputs
    ctx.save_for_backward(expert_of_slot, slot_offsets)
    ctx.shape = weights.shape


def _slot_weights_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _slot_weights_backward(grad, *ctx.saved_tensors, *ctx.shape, True, ctx.backend), None, None, None


def _slot_weights_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, expert_of_slot, slot_offsets, _, _, accumulate, ctx.backend = inputs
    ctx.save_for_backward(expert_of_slot, slot_offsets)
    ctx.accumulate = accumulate


def _slot_weights_backward_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    experts, slot_offsets = ctx.saved_tensors
    slots = _slot_weights(grad, experts, slot_offsets, ctx.backend)
    if not ctx.accumulate:  # only the last slot of a token and expert was stored; float64 counts slots exactly
        number = torch.arange(experts.shape[0], dtype=torch.float64, device=grad.device)
        stored = _slot_weights_backward(number, experts, slot_offsets, *grad.shape, False, None)
        slots = torch.where(_slot_weights(stored, experts, slot_offsets, None) == number, slots, 0)
    return slots, None, None, None, None, None, None


_spread = differentiable("spread", _spread_derivative, _spread_setup, linear_in=(0, 1))
_combine = differentiable("combine", _combine_derivative, _combine_setup, linear_in=(0, 1))
_row_dots = differentiable("row_dots", _row_dots_derivative, _row_dots_setup, linear_in=(0, 1))
_fused_spread_dots = differentiable("spread_dots", _spread_dots_derivative, _spread_dots_setup)
_take = differentiable("take", _take_derivative, _take_setup, linear_in=(0,))
_slot_weights = differentiable("slot_weights", _slot_weights_derivative, _slot_weights_setup, linear_in=(0,))
_slot_weights_backward = differentiable(
    "slot_weights_backward", _slot_weights_backward_derivative, _slot_weights_backward_setup, linear_in=(0,)
)


def _spread_dots(x: Tensor, rows: Tensor, weights: Tensor, *plan_and_backend: Any) -> tuple[Tensor, Tensor]:
    """spread and row_dots in one pass; in two under forward mode and torch.func, which knows each of them."""
    if transformed():
        *plan, backend = plan_and_backend
        return _spread(x, weights, *plan, backend), _row_dots(rows, x, *plan, weights.dtype, backend)
    result: tuple[Tensor, Tensor] = _fused_spread_dots(x, rows, weights, *plan_and_backend)
    return result


# ---------------------------------------------------------------------------- checks


def _check_plan(operator: str, plan: Any) -> None:
    """A plan whose index tensors have their sizes still: somebody may have resized one since it was checked."""
    if not isinstance(plan, RoutingPlan):
        raise check.wrong_type(operator, "plan", "a moeroute.RoutingPlan", plan)
    slots, offsets, experts = plan.row_of_slot.numel(), plan.slot_offsets, plan.expert_of_slot
    if (
        plan.slot_of_row.numel() != plan.num_rows
        or (slots != plan.num_tokens * (plan.topk or 0) if offsets is None else offsets.numel() != plan.num_tokens + 1)
        or (experts is not None and experts.numel() != slots)
    ):
        plan.__post_init__()


def _check_matrix(operator: str, argument: str, tensor: Any, letter: str, size: int, plan: RoutingPlan) -> None:
    """Dense [`size`, H] on the plan's device."""
    if type(tensor) is not Tensor:
        check.tensor(operator, argument, tensor)
    try:
        shape = tensor.shape
    except RuntimeError:  # a nested tensor has none
        raise check.not_dense(operator, argument, tensor) from None
    if len(shape) != 2 or shape[0] != size or tensor.layout is not STRIDED:
        raise check.wrong_shape(operator, argument, f"[{letter}, H] with {letter} = {size}, as the plan", tensor)
    if not (tensor.is_cpu and plan.row_of_slot.is_cpu):  # half the time of comparing devices
        _check_device(operator, argument, tensor, plan.row_of_slot)


def _quantized(operator: str, argument: str, tensor: Tensor) -> TypeError:
    """Its bits mean nothing without its scale."""
    return check.wrong_dtype(operator, argument, "of a dtype that is not quantized", tensor)


def _check_device(operator: str, argument: str, tensor: Tensor, slots: Tensor) -> None:
    if tensor.device != slots.device:
        raise check.wrong_value(operator, argument, f"on {slots.device}, as the plan", tensor.device)


def _check_float(operator: str, argument: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise check.wrong_dtype(operator, argument, "float16, bfloat16, float32 or float64", tensor)


def _check_partner(operator: str, argument: str, tensor: Any, name: str, other: Tensor) -> None:
    """A second matrix: hidden size and dtype as the first."""
    if tensor.shape[-1] != other.shape[-1]:
        wanted = f"as wide as {name}, with H = {other.shape[-1]}"
        raise check.wrong_shape(operator, argument, wanted, tensor)
    if tensor.dtype is not other.dtype:
        raise check.wrong_dtype(operator, argument, f"{other.dtype}, as {name}", tensor)


def _check_weights_kind(operator: str, weights: Any, rows_name: str, rows: Tensor | None, slots: Tensor) -> None:
    """slots: row_of_slot."""
    if type(weights) is not Tensor:
        check.tensor(operator, "weights", weights)
    if weights.layout is not STRIDED or weights.is_nested:
        raise check.not_dense(operator, "weights", weights)
    dtype = weights.dtype
    if dtype not in FLOATS:
        raise check.wrong_dtype(operator, "weights", "float16, bfloat16, float32 or float64", weights)
    if rows is not None:
        other = rows.dtype
        if other not in FLOATS:
            raise check.wrong_dtype(operator, rows_name, "floating with weights", rows)
        if dtype is not other and (dtype is torch.float64 or other is torch.float64):
            raise check.wrong_dtype(operator, "weights", f"float64 with float64 {rows_name} and only then", weights)
    if not (weights.is_cpu and slots.is_cpu):
        _check_device(operator, "weights", weights, slots)


def _check_slot_weights(operator: str, weights: Any, rows_name: str, rows: Tensor, slots: Tensor) -> None:
    _check_weights_kind(operator, weights, rows_name, rows, slots)
    if weights.ndim != 1 or weights.shape[0] != slots.shape[0]:
        raise check.wrong_shape(operator, "weights", f"[S] with S = {slots.shape[0]}, as the plan", weights)


def _check_plan_weights(operator: str, argument: str, weights: Tensor, plan: RoutingPlan) -> None:
    """[T, E] where the plan has expert_of_slot, else [T, K], else (tokens with different numbers) [S]."""
    shape = weights.shape
    if plan.expert_of_slot is None and shape == (plan.num_tokens, plan.topk):
        return
    if plan.expert_of_slot is not None:
        if weights.ndim != 2 or shape[0] != plan.num_tokens or plan.num_experts not in (None, shape[1]):
            experts = "" if plan.num_experts is None else f" and E = {plan.num_experts}"
            wanted = f"[T, E] with T = {plan.num_tokens}{experts}, as the plan"
            raise check.wrong_shape(operator, argument, wanted, weights)
    elif plan.topk is not None:
        if weights.ndim != 2 or shape[0] != plan.num_tokens or shape[1] != plan.topk:
            wanted = f"[T, K] with T = {plan.num_tokens} and K = {plan.topk}, as the plan"
            raise check.wrong_shape(operator, argument, wanted, weights)
    elif weights.ndim != 1 or shape[0] != plan.num_slots:
        raise check.wrong_shape(operator, argument, f"[S] with S = {plan.num_slots}, as the plan", weights)


def _check_out(operator: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor | None) -> None:
    """A buffer of the caller's, outside autograd: shape, dtype, device, no memory shared inside it or with an input."""
    check.buffer(operator, "out", out, shape, dtype)
    backends.direct(operator, "out", out, *inputs)
    check.writable(operator, "out", out, *inputs)


def _resolved(tensor: Tensor) -> Tensor:
    """Without torch's lazy negation and conjugation, which a launcher would not see."""
    return tensor.resolve_conj().resolve_neg()


def _plan_tensors(plan: RoutingPlan) -> tuple[Tensor | None, ...]:
    return plan.row_of_slot, plan.slot_of_row, plan.slot_offsets, plan.expert_of_slot


# ---------------------------------------------------------------------------- row operators


def spread(
    x: Tensor,
    plan: RoutingPlan,
    weights: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Copy every token to the rows of its slots: ``y[r] = weights[s] * x[token(s)]`` with s = slot_of_row[r].

    x: [T, H]; without weights of any dtype, and the bits are copied. weights: [S], one a slot, any of
    float16, bfloat16 and float32 (float64 with float64). Returns [R, H] in x's dtype; padding rows are 0.
    Where several slots name one row the last one's copy is in it. Differentiable in x and weights as
    often as you like. `out`: write there instead, outside autograd.

    Equivalent torch: ``x[plan.token_of_row] * weights[plan.slot_of_row, None]`` where there is no padding.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> moeroute.spread(torch.tensor([[1.0], [2.0]]), plan).flatten()
    tensor([1., 1., 2., 2.])
    >>> moeroute.spread(torch.tensor([[1.0], [2.0]]), plan, torch.tensor([0.5, 1.0, 2.0, 4.0])).flatten()
    tensor([1.0000, 0.5000, 4.0000, 8.0000])

    Raises ValueError for shapes or devices that do not fit the plan, TypeError for dtypes.
    """
    _check_plan("spread", plan)
    _check_matrix("spread", "x", x, "T", plan.num_tokens, plan)
    if weights is not None:
        _check_slot_weights("spread", weights, "x", x, plan.row_of_slot)
    elif x.is_quantized:
        raise _quantized("spread", "x", x)
    return _spread_checked("spread", x, plan, weights, out, backend)


def _spread_checked(
    operator: str, x: Tensor, plan: RoutingPlan, weights: Tensor | None, out: Tensor | None, backend: str | None
) -> Tensor:
    """weights: one a slot, of any shape."""
    if out is not None:
        _check_out(operator, out, (plan.num_rows, x.shape[1]), x.dtype, x, weights, *_plan_tensors(plan))
        x, weights = _resolved(x), None if weights is None else _resolved(weights)
    if out is not None or (backends.plain(x, weights) and not x.is_conj()):
        return _module(operator, backend, x).spread(
            x, weights, plan.row_of_slot, plan.slot_of_row, plan.slot_offsets, out=out
        )
    if weights is not None:
        weights = weights.reshape(-1)
    return _spread(x, weights, plan.row_of_slot, plan.slot_of_row, plan.slot_offsets, backend)


def combine(
    rows: Tensor,
    plan: RoutingPlan,
    weights: Tensor | None = None,
    *,
    init: Tensor | tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Add up the rows of every token's slots: ``x[t] = sum of weights[s] * rows[row_of_slot[s]]``.

    rows: [R, H], float16, bfloat16, float32 or float64. weights: [S], one a slot, any of the first three
    (float64 with float64). Returns [T, H] in the dtype of rows; a token without a row gets +0. The sum is
    float32, from +0, in slot order, one rounding for each product and sum and one at the store. A slot
    without a row is skipped; so is one whose weight is +0 or -0, and its row is not read. Differentiable in
    rows and weights as often as you like.

    For MoeFinalizeRouting, outside autograd: `init` [T, H] is where the sum starts, or a pair of them, added up
    first; with `bias` [E, H] a slot adds ``weights[s] * (row + bias[expert_of_slot[s]])``, and no bias where its
    expert is none. `out`: write there instead, outside autograd.

    Equivalent torch: ``(rows[plan.row_of_slot] * weights[:, None]).reshape(T, K, H).sum(1)``, in float32,
    where every slot has a row.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])     # expert 0: t0; 1: t0, t1; 2: t1
    >>> moeroute.combine(rows, plan).flatten()
    tensor([ 3., 12.])

    Raises ValueError for shapes or devices that do not fit the plan, TypeError for dtypes.
    """
    operator = "combine"
    _check_plan(operator, plan)
    _check_matrix(operator, "rows", rows, "R", plan.num_rows, plan)
    _check_float(operator, "rows", rows)
    if weights is not None:
        _check_slot_weights(operator, weights, "rows", rows, plan.row_of_slot)
    if init is None and bias is None:
        return _combine_checked(operator, rows, plan, weights, out, backend)
    if isinstance(init, tuple) and len(init) != 2:
        raise check.wrong_value(operator, "init", "a tensor or a pair of them", f"a tuple of {len(init)}")
    starts = init if isinstance(init, tuple) else () if init is None else (init,)
    for start in starts:
        _check_matrix(operator, "init", start, "T", plan.num_tokens, plan)
        _check_partner(operator, "init", start, "rows", rows)
    if bias is not None:
        _check_bias(operator, bias, "rows", rows, plan)
    argument = "bias" if init is None else "init"
    backends.direct(operator, argument, rows, weights, *starts, bias)
    if out is not None:
        inputs = (rows, weights, *starts, bias, *_plan_tensors(plan))
        _check_out(operator, out, (plan.num_tokens, rows.shape[1]), rows.dtype, *inputs)
    rows = _resolved(rows)
    first, second = (*map(_resolved, starts), None, None)[:2]
    weights, bias = (None if tensor is None else _resolved(tensor) for tensor in (weights, bias))
    return _module(operator, backend, rows).combine(
        rows,
        weights,
        plan.row_of_slot,
        plan.slot_offsets,
        plan.num_tokens,
        init=first,
        init_more=second,
        bias=bias,
        expert_of_slot=plan.expert_of_slot,
        out=out,
    )


def _combine_checked(
    operator: str, rows: Tensor, plan: RoutingPlan, weights: Tensor | None, out: Tensor | None, backend: str | None
) -> Tensor:
    """weights: one a slot, of any shape."""
    if out is not None:
        _check_out(operator, out, (plan.num_tokens, rows.shape[1]), rows.dtype, rows, weights, *_plan_tensors(plan))
        rows, weights = _resolved(rows), None if weights is None else _resolved(weights)
    if out is not None or backends.plain(rows, weights):
        return _module(operator, backend, rows).combine(
            rows, weights, plan.row_of_slot, plan.slot_offsets, plan.num_tokens, out=out
        )
    if weights is not None:
        weights = weights.reshape(-1)
    return _combine(rows, weights, plan.row_of_slot, plan.slot_of_row, plan.slot_offsets, plan.num_tokens, backend)


def _check_bias(operator: str, bias: Any, name: str, rows: Tensor, plan: RoutingPlan) -> None:
    check.tensor(operator, "bias", bias)
    if plan.expert_of_slot is None:
        raise check.wrong_value(operator, "bias", "None, as the plan has no expert_of_slot", f"{list(bias.shape)}")
    if bias.ndim != 2 or plan.num_experts not in (None, bias.shape[0]):
        experts = "" if plan.num_experts is None else f" with E = {plan.num_experts}, as the plan"
        raise check.wrong_shape(operator, "bias", f"[E, H]{experts}", bias)
    _check_partner(operator, "bias", bias, name, rows)
    if bias.device != rows.device:
        raise check.wrong_value(operator, "bias", f"on {rows.device}, as {name}", bias.device)


def row_dots(
    rows: Tensor,
    x: Tensor,
    plan: RoutingPlan,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The dot product of every slot's row with its token: ``d[s] = <rows[row_of_slot[s]], x[token(s)]>``.

    rows: [R, H] and x: [T, H] of one floating dtype. Returns [S] in `dtype` (float64 for float64 rows); 0
    for a slot without a row. Products and sums are float32: 256 partial sums over the hidden size, then
    neighbours (docs/arithmetic.md). Differentiable in rows and x as often as you like. `bias` [E, H], outside
    autograd: uses ``rows + bias[expert_of_slot[s]]``. `out`: write there instead, outside autograd.

    Equivalent torch: ``(rows[plan.row_of_slot] * x[plan.token_of_slot]).sum(1)`` where every slot has a row.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0]]), 2)
    >>> moeroute.row_dots(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 10.0]]), plan)
    tensor([43., 21.])

    Raises ValueError for shapes or devices that do not fit the plan, TypeError for dtypes.
    """
    operator = "row_dots"
    _check_plan(operator, plan)
    _check_matrix(operator, "rows", rows, "R", plan.num_rows, plan)
    _check_float(operator, "rows", rows)
    _check_matrix(operator, "x", x, "T", plan.num_tokens, plan)
    _check_partner(operator, "x", x, "rows", rows)
    check.float_dtype(operator, "dtype", dtype, FLOATS)
    if rows.dtype is torch.float64:
        dtype = torch.float64
    direct = bias is not None or out is not None
    if direct:
        if bias is not None:
            _check_bias(operator, bias, "rows", rows, plan)
            backends.direct(operator, "bias", rows, x, bias)
        if out is not None:
            _check_out(operator, out, (plan.num_slots,), dtype, rows, x, bias, *_plan_tensors(plan))
        rows, x, bias = _resolved(rows), _resolved(x), None if bias is None else _resolved(bias)
    if direct or backends.plain(rows, x):
        return _module(operator, backend, rows).row_dots(
            rows,
            x,
            plan.row_of_slot,
            plan.slot_offsets,
            dtype,
            bias=bias,
            expert_of_slot=plan.expert_of_slot,
            out=out,
        )
    return _row_dots(rows, x, plan.row_of_slot, plan.slot_of_row, plan.slot_offsets, dtype, backend)


# ---------------------------------------------------------------------------- weights


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
    _check_plan(operator, plan)
    _check_weights_kind(operator, weights, "", None, plan.row_of_slot)
    _check_plan_weights(operator, "weights", weights, plan)
    if out is not None:
        _check_out(operator, out, (plan.num_slots,), weights.dtype, weights, *_plan_tensors(plan))
        weights = _resolved(weights)
    return _slot_weights_verb(operator, weights, plan, out, backend)


def _slot_weights_verb(
    operator: str, weights: Tensor, plan: RoutingPlan, out: Tensor | None, backend: str | None
) -> Tensor:
    if plan.expert_of_slot is None:
        if backend is not None:
            _module(operator, backend, weights)  # nothing for it to do, but a wrong name is an error
        flat = _owned(weights.reshape(-1), plan)
        return flat if out is None else out.copy_(flat)
    if out is not None or backends.plain(weights):
        return _module(operator, backend, weights).slot_weights(
            weights, plan.expert_of_slot, plan.slot_offsets, out=out
        )
    return _slot_weights(weights, plan.expert_of_slot, plan.slot_offsets, backend)


def _owned(values: Tensor, plan: RoutingPlan) -> Tensor:
    """What the slots have, 0 for a slot that no token owns."""
    if plan.slot_offsets is None:
        return values
    return torch.where(plan.token_of_slot >= 0, values, 0)


def permute_weights(
    weights: Tensor, plan: RoutingPlan, *, out: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """The weight of every row, [R]: the weights in the order of the permuted rows; padding rows have 0.

    weights: as for `slot_weights`; differentiable as often as you like. Multiplying the experts' outputs by
    them and calling `unpermute` without weights is the same as `unpermute` with weights.

    Equivalent torch: ``weights.flatten()[plan.slot_of_row]`` where there is no padding.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> moeroute.permute_weights(torch.tensor([[0.1, 0.2], [0.3, 0.4]]), plan)
    tensor([0.2000, 0.1000, 0.3000, 0.4000])

    Raises ValueError for a shape or device that does not fit the plan, TypeError for dtypes.
    """
    operator = "permute_weights"
    _check_plan(operator, plan)
    _check_weights_kind(operator, weights, "", None, plan.row_of_slot)
    _check_plan_weights(operator, "weights", weights, plan)
    if out is not None:
        _check_out(operator, out, (plan.num_rows,), weights.dtype, weights, *_plan_tensors(plan))
        weights = _resolved(weights)
    slots = _slot_weights_verb(operator, weights, plan, None, backend)
    if out is not None or backends.plain(slots):
        return _module(operator, backend, slots).take(slots, plan.slot_of_row, out=out)
    return _take(slots, plan.slot_of_row, plan.row_of_slot, backend)


def permute_weights_backward(
    grad: Tensor,
    plan: RoutingPlan,
    *,
    num_experts: int | None = None,
    accumulate: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The gradient of `permute_weights`: [R] back to the weights' own shape; 0 where nothing has a row.

    grad: [R]. Returns [T, E] where the plan has expert_of_slot (`num_experts` gives E where the plan does not
    know it), else [T, K], else [S]. Several slots of one token with one expert add up in slot order, or, with
    `accumulate=False` (the aclnn operators), the last one is stored. Differentiable as often as you like.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> moeroute.permute_weights_backward(torch.tensor([1.0, 2.0, 3.0, 4.0]), plan)
    tensor([[2., 1.],
            [3., 4.]])

    Raises ValueError for a shape or device that does not fit the plan, TypeError for dtypes.
    """
    operator = "permute_weights_backward"
    _check_plan(operator, plan)
    check.tensor(operator, "grad", grad)
    _check_float(operator, "grad", grad)
    if grad.ndim != 1 or grad.shape[0] != plan.num_rows:
        raise check.wrong_shape(operator, "grad", f"[R] with R = {plan.num_rows}, as the plan", grad)
    if grad.device != plan.row_of_slot.device:
        raise check.wrong_value(operator, "grad", f"on {plan.row_of_slot.device}, as the plan", grad.device)
    check.flag(operator, "accumulate", accumulate)
    shape = _weights_shape(operator, plan, num_experts)
    if out is not None:
        _check_out(operator, out, shape, grad.dtype, grad, *_plan_tensors(plan))
        grad = _resolved(grad)
    if out is not None or backends.plain(grad):
        slots = _module(operator, backend, grad).take(grad, plan.row_of_slot)
    else:
        slots = _take(grad, plan.row_of_slot, plan.slot_of_row, backend)
    return _slot_weights_backward_verb(operator, slots, plan, shape, accumulate, out, backend)


def _weights_shape(operator: str, plan: RoutingPlan, num_experts: int | None) -> tuple[int, ...]:
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


def _slot_weights_backward_verb(
    operator: str,
    grad: Tensor,
    plan: RoutingPlan,
    shape: tuple[int, ...],
    accumulate: bool,
    out: Tensor | None,
    backend: str | None,
) -> Tensor:
    if plan.expert_of_slot is None:
        if backend is not None:
            _module(operator, backend, grad)
        grad = _owned(grad, plan).reshape(shape)
        return grad if out is None else out.copy_(grad)
    if out is not None or backends.plain(grad):
        return _module(operator, backend, grad).slot_weights_backward(
            grad, plan.expert_of_slot, plan.slot_offsets, *shape, accumulate, out=out
        )
    return _slot_weights_backward(grad, plan.expert_of_slot, plan.slot_offsets, *shape, accumulate, backend)


# ---------------------------------------------------------------------------- permute, unpermute


def permute(tokens: Tensor, plan: RoutingPlan, weights: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Token copies in expert order, [R, H]: expert by expert, inside an expert in the order of the slots.

    tokens: [T, H], any dtype; strides do not matter. Padding rows are 0. With `weights` (any float dtype;
    [T, E] where the plan has expert_of_slot, else [T, K]) every copy is multiplied by its slot's weight.
    Differentiable in both, as often as you like.

    Equivalent torch: ``tokens[torch.argsort(expert_ids.flatten(), stable=True) // K]``.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> moeroute.permute(torch.tensor([[1.0, 10.0], [2.0, 20.0]]), plan)
    tensor([[ 1., 10.],
            [ 1., 10.],
            [ 2., 20.],
            [ 2., 20.]])

    Raises ValueError for shapes or devices that do not fit the plan, TypeError for dtypes.
    """
    _check_plan("permute", plan)
    _check_matrix("permute", "tokens", tokens, "T", plan.num_tokens, plan)
    if weights is not None:
        weights = _verb_weights("permute", "tokens", tokens, weights, plan, backend)
    elif tokens.is_quantized:
        raise _quantized("permute", "tokens", tokens)
    return _spread_checked("permute", tokens, plan, weights, None, backend)


def _verb_weights(
    operator: str, name: str, rows: Tensor, weights: Tensor, plan: RoutingPlan, backend: str | None
) -> Tensor:
    """Checked and one a slot; [T, K] is that already, whatever its shape."""
    _check_weights_kind(operator, weights, name, rows, plan.row_of_slot)
    _check_plan_weights(operator, "weights", weights, plan)
    return weights if plan.expert_of_slot is None else _slot_weights_verb(operator, weights, plan, None, backend)


def unpermute(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Bring the experts' rows back and add up each token's, [T, H]: the weighted sum, or the plain one.

    rows: [R, H], float16, bfloat16, float32 or float64, in the order that `permute` gave. weights: any of
    the first three (float64 with float64), [T, E] where the plan has expert_of_slot, else [T, K]. The
    sum is float32 in slot order, rounded once. A slot without a row and one of weight 0 add nothing.
    Differentiable in both, as often as you like; the rows are kept for backward only where the weights
    need a gradient.

    Equivalent torch: ``(rows[plan.row_of_slot].reshape(T, K, H) * weights[..., None]).sum(1)``.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    >>> moeroute.unpermute(rows, plan, torch.tensor([[0.5, 0.5], [1.0, 0.25]])).flatten()
    tensor([1.5000, 6.0000])

    Raises ValueError for shapes or devices that do not fit the plan, TypeError for dtypes.
    """
    _check_plan("unpermute", plan)
    _check_matrix("unpermute", "rows", rows, "R", plan.num_rows, plan)
    _check_float("unpermute", "rows", rows)
    if weights is not None:
        weights = _verb_weights("unpermute", "rows", rows, weights, plan, backend)
    return _combine_checked("unpermute", rows, plan, weights, None, backend)


def permute_backward(
    grad_rows: Tensor,
    plan: RoutingPlan,
    weights: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The gradient of `permute` in the tokens, [T, H], for those who bring their own autograd.

    grad_rows: [R, H]; weights as `permute` got them. This is aclnnMoeTokenPermuteGrad. Differentiable.

    Equivalent torch: ``grad_rows[plan.row_of_slot].reshape(T, K, H).sum(1)``, in float32.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_row_of_slot(torch.tensor([0, 1], dtype=torch.int32), 1, 2)
    >>> moeroute.permute_backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), plan)
    tensor([[4., 6.]])
    """
    operator = "permute_backward"
    _check_plan(operator, plan)
    _check_matrix(operator, "grad_rows", grad_rows, "R", plan.num_rows, plan)
    _check_float(operator, "grad_rows", grad_rows)
    if weights is not None:
        weights = _verb_weights(operator, "grad_rows", grad_rows, weights, plan, backend)
    return _combine_checked(operator, grad_rows, plan, weights, out, backend)


def unpermute_backward(
    grad_tokens: Tensor,
    rows: Tensor | None,
    plan: RoutingPlan,
    weights: Tensor | None = None,
    *,
    accumulate: bool = True,
    out: tuple[Tensor, Tensor | None] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `unpermute` in the rows, [R, H], and in the weights (None without), in one pass.

    grad_tokens: [T, H]; rows and weights as `unpermute` got them (rows may be None without weights). This is
    aclnnMoeTokenUnpermuteGrad and aclnnMoeTokenUnpermuteWithRoutingMapGrad. `accumulate`: as in
    `permute_weights_backward`. `out`: the two tensors to write into, outside autograd. Differentiable.

    Equivalent torch: ``(grad_tokens[plan.token_of_row] * w_row[:, None], (rows[plan.row_of_slot] *
    grad_tokens[plan.token_of_slot]).sum(1).reshape(T, K))``.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_row_of_slot(torch.tensor([0, 1, 2], dtype=torch.int32), 1, 3)
    >>> moeroute.unpermute_backward(torch.ones(1, 2), torch.ones(3, 2), plan, torch.ones(1, 3))
    (tensor([[1., 1.],
            [1., 1.],
            [1., 1.]]), tensor([[2., 2., 2.]]))
    """
    operator = "unpermute_backward"
    if out is not None and (not isinstance(out, tuple | list) or len(out) != 2):
        raise check.wrong_type(operator, "out", "a pair of tensors or None", out)
    out_rows, out_weights = (None, None) if out is None else out
    if out_rows is None and out_weights is None:
        out = None
    check.flag(operator, "accumulate", accumulate)
    _check_plan(operator, plan)
    _check_matrix(operator, "grad_tokens", grad_tokens, "T", plan.num_tokens, plan)
    if rows is not None or weights is not None:
        _check_matrix(operator, "rows", rows, "R", plan.num_rows, plan)
    if weights is None:
        if out_weights is not None:
            raise check.wrong_value(operator, "out", "(tensor, None) without weights", "a second tensor")
        if grad_tokens.is_quantized:
            raise _quantized(operator, "grad_tokens", grad_tokens)
        return _spread_checked(operator, grad_tokens, plan, None, out_rows, backend), None
    assert rows is not None  # noqa: S101 - for the type checker; the lines above raise otherwise
    slots = _verb_weights(operator, "grad_tokens", grad_tokens, weights, plan, backend)
    _check_partner(operator, "rows", rows, "grad_tokens", grad_tokens)
    shape = tuple(weights.shape)
    if out is not None:
        inputs = (grad_tokens, rows, weights, *_plan_tensors(plan))
        if out_rows is not None:
            _check_out(operator, out_rows, tuple(rows.shape), rows.dtype, *inputs)
        if out_weights is not None:
            _check_out(operator, out_weights, shape, weights.dtype, *inputs, out_rows)
        grad_tokens, rows, slots = _resolved(grad_tokens), _resolved(rows), _resolved(slots)
    # Where the weights are slot by slot the kernel writes straight into the caller's tensor.
    straight = out_weights is not None and plan.expert_of_slot is None and out_weights.is_contiguous()
    if out is not None or backends.plain(grad_tokens, rows, slots):
        out_dots = out_weights.view(-1) if straight and out_weights is not None else None
        grad_rows, dots = _module(operator, backend, rows).spread_dots(
            grad_tokens,
            rows,
            slots,
            plan.row_of_slot,
            plan.slot_of_row,
            plan.slot_offsets,
            out=(out_rows, out_dots),
        )
    else:
        grad_rows, dots = _spread_dots(
            grad_tokens, rows, slots.reshape(-1), plan.row_of_slot, plan.slot_of_row, plan.slot_offsets, backend
        )
    if straight:
        return grad_rows, out_weights
    return grad_rows, _slot_weights_backward_verb(operator, dots, plan, shape, accumulate, out_weights, backend)
