"""Rows as int8: with a scale found for each row, with one given for all, and while rows are spread.

None has a derivative: no result requires a gradient, whatever its inputs do; forward mode sees constants. The verbs
come first, then the checks, then what torch.library knows of the operators.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeroute import check, dispatch
from moeroute.dispatch import Backend
from moeroute.dtypes import FLOATS
from moeroute.ops import layout
from moeroute.ops.register import PLAN_SCHEMA, register
from moeroute.plan import PlanTensors, RoutingPlan, expect_plan, given_plan, index_vector

_module = partial(dispatch.implementation, "quantization")
_QUANTISED = FLOATS[:3]


def dynamic_quantize(
    rows: Tensor,
    *,
    smooth: Tensor | None = None,
    expert_of_row: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows as int8 with one float32 scale a row: the largest magnitude of a row becomes 127.

    In float32: y = row * smooth, scale = max |y| / 127, then y / scale to the nearest integer, ties to even. A row of
    zeros has scale 0 and stays 0. A row with an infinity has that scale and becomes 0; one with a NaN likewise. No
    gradient goes through.

    Args:
        rows: [R, H], float16, bfloat16 or float32.
        smooth: float32, a factor for each element [H], or for each expert [E, H].
        expert_of_row: int32 [R], as a plan has it: the expert of each row, for `smooth` [E, H]; a row of no expert has
            no factors.
        out: the two tensors to write into.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        int8 [R, H] and the scales, float32 [R].

    Raises:
        ValueError: a shape or device that does not fit.
        TypeError: a wrong type or dtype.

    Equivalent torch, where no row is zero: ``scale = rows.float().abs().amax(1) / 127;
    (rows / scale[:, None]).round().to(torch.int8)``.

    >>> import torch, moeroute
    >>> moeroute.dynamic_quantize(torch.tensor([[0.5, 1.5, 2.5, -127.0], [0.0, 0.0, 0.0, 0.0]]))
    (tensor([[   0,    2,    2, -127],
            [   0,    0,    0,    0]], dtype=torch.int8), tensor([1., 0.]))
    """
    operator = "dynamic_quantize"
    _check_rows(operator, "rows", rows)
    smooth, expert_of_row = _factors(operator, smooth, expert_of_row, rows, rows.shape[0], None)
    if out is not None:
        out = _check_pair(operator, out, tuple(rows.shape), rows, smooth, expert_of_row)
        rows, smooth = layout.resolved(rows), layout.resolved(smooth)
    if out is not None or dispatch.plain(rows, smooth, expert_of_row):
        found: tuple[Tensor, Tensor] = _module(operator, backend, rows).dynamic_quantize(
            rows, smooth, expert_of_row, out=out or (None, None)
        )
    else:
        found = _dynamic_quantize(rows, smooth, expert_of_row, backend)
    return found


def quantize(
    rows: Tensor,
    scale: Tensor,
    offset: Tensor,
    *,
    plan: RoutingPlan | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Rows as int8: row * scale + offset in float32, two roundings, then the nearest integer, ties to even, saturated.

    An infinity becomes the largest or smallest integer, a NaN 0. No gradient goes through.

    Args:
        rows: [R, H], float16, bfloat16 or float32; with a plan [T, H].
        scale: float32, one element.
        offset: float32, one element.
        plan: `spread` in the same pass: each row is quantised once and copied to its rows [R, H] of the plan, whose
            padding rows are 0.
        out: int8 [R, H]; the result is written into it.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        int8 [R, H].

    Raises:
        ValueError: a shape or device that does not fit, or does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``(rows.float() * scale + offset).round().clamp(-128, 127).to(torch.int8)`` without NaN.

    >>> import torch, moeroute
    >>> moeroute.quantize(torch.tensor([[0.5, 1.5, 100.0, -100.0]]), torch.tensor(2.0), torch.tensor(0.5))
    tensor([[   2,    4,  127, -128]], dtype=torch.int8)
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1], [0]]), 2, align=2)
    >>> moeroute.quantize(torch.tensor([[1.0], [2.0]]), torch.tensor(2.0), torch.tensor(0.0), plan=plan).flatten()
    tensor([4, 0, 2, 0], dtype=torch.int8)
    """
    operator = "quantize"
    if plan is not None:
        expect_plan(operator, plan)
        check.matrix(operator, "rows", rows, "T", plan.num_tokens, plan)
    _check_rows(operator, "rows", rows)
    _check_single(operator, "scale", scale, rows)
    _check_single(operator, "offset", offset, rows)
    if out is not None:
        shape = tuple(rows.shape) if plan is None else (plan.num_rows, rows.shape[1])
        others = () if plan is None else plan.tensors[:4]
        layout.check_out(operator, out, shape, torch.int8, rows, scale, offset, *others)
        rows, scale, offset = layout.resolved(rows), layout.resolved(scale), layout.resolved(offset)
    direct = out is not None or dispatch.plain(rows, scale, offset)
    found: Tensor
    if plan is not None and direct:
        found = _module(operator, backend, rows).spread_static(rows, scale, offset, plan.tensors, out=out)
    elif plan is not None:
        found = _spread_static(rows, scale, offset, plan.tensors, backend)
    elif direct:
        found = _module(operator, backend, rows).quantize(rows, scale, offset, out=out)
    else:
        found = _quantize(rows, scale, offset, backend)
    return found


def spread_quantized(
    x: Tensor,
    plan: RoutingPlan,
    *,
    smooth: Tensor | None = None,
    expert_of_row: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """`spread` and `dynamic_quantize` in one pass.

    Args:
        x: [T, H], float16, bfloat16 or float32.
        plan: the row of every slot.
        smooth: float32, a factor for each element [H], or for each expert [E, H].
        expert_of_row: int32 [R], for `smooth` [E, H]. None: the plan's (E as its rows_per_expert).
        out: the two tensors to write into.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        int8 [R, H] and the scales, float32 [R]. Padding rows and their scales are 0.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``dynamic_quantize(x[plan.token_of_row])`` where there is no padding.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1], [0]]), 2, align=2)
    >>> moeroute.spread_quantized(torch.tensor([[127.0, 63.0], [1.0, -4.0]]), plan)
    (tensor([[  32, -127],
            [   0,    0],
            [ 127,   63],
            [   0,    0]], dtype=torch.int8), tensor([0.0315, 0.0000, 1.0000, 0.0000]))
    """
    operator = "spread_quantized"
    expect_plan(operator, plan)
    check.matrix(operator, "x", x, "T", plan.num_tokens, plan)
    _check_rows(operator, "x", x)
    smooth, expert_of_row = _factors(operator, smooth, expert_of_row, x, plan.num_rows, plan)
    if out is not None:
        out = _check_pair(operator, out, (plan.num_rows, x.shape[1]), x, smooth, expert_of_row, *plan.tensors[:4])
        x, smooth = layout.resolved(x), layout.resolved(smooth)
    if out is not None or dispatch.plain(x, smooth, expert_of_row):
        found: tuple[Tensor, Tensor] = _module(operator, backend, x).spread_quantized(
            x, smooth, expert_of_row, plan.tensors, out=out or (None, None)
        )
    else:
        found = _spread_quantized(x, smooth, expert_of_row, plan.tensors, backend)
    return found


# ---------------------------------------------------------------------------- checks


def _check_rows(operator: str, argument: str, rows: Any) -> None:
    check.shaped(operator, argument, rows, (None, None))
    if rows.dtype not in _QUANTISED:
        raise check.wrong_dtype(operator, argument, "float16, bfloat16 or float32", rows)


def _check_single(operator: str, argument: str, value: Any, rows: Tensor) -> None:
    check.tensor(operator, argument, value)
    if value.numel() != 1:
        raise check.wrong_shape(operator, argument, "of one element", value)
    _check_float32(operator, argument, value, rows)


def _check_float32(operator: str, argument: str, value: Tensor, rows: Tensor) -> None:
    if value.dtype is not torch.float32:
        raise check.wrong_dtype(operator, argument, "torch.float32", value)
    if value.device != rows.device:
        raise check.wrong_value(operator, argument, f"on {rows.device}, as the others", value.device)


def _factors(
    operator: str, smooth: Any, expert_of_row: Any, rows: Tensor, num_rows: int, plan: RoutingPlan | None
) -> tuple[Tensor | None, Tensor | None]:
    """smooth as [E, H], and the expert of each row where there is more than one set of factors."""
    by_expert = False
    if smooth is not None:
        check.tensor(operator, "smooth", smooth)
        by_expert = smooth.ndim == 2
        if smooth.ndim not in (1, 2) or smooth.shape[-1] != rows.shape[1]:
            raise check.wrong_shape(operator, "smooth", f"[H] or [E, H] with H = {rows.shape[1]}", smooth)
        _check_float32(operator, "smooth", smooth, rows)
        smooth = smooth if by_expert else smooth[None]
    if not by_expert:
        if expert_of_row is not None:
            raise check.wrong_value(operator, "expert_of_row", "None without smooth [E, H]", "another value")
        return smooth, None
    if expert_of_row is None and plan is not None and plan.rows_per_expert is not None:
        if smooth.shape[0] != plan.rows_per_expert.shape[0]:
            wanted = f"[H] or [E, H] with E = {plan.rows_per_expert.shape[0]}, as the plan"
            raise check.wrong_shape(operator, "smooth", wanted, smooth)
        return smooth, plan.expert_of_row
    if expert_of_row is None:
        raise check.wrong_value(operator, "expert_of_row", "given with smooth [E, H]", None)
    return smooth, index_vector(operator, "expert_of_row", expert_of_row, num_rows, rows)


def _check_pair(operator: str, out: Any, shape: tuple[int, ...], *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise check.wrong_type(operator, "out", "a pair of tensors or None", out)
    rows, scales = out
    layout.check_out(operator, rows, shape, torch.int8, *inputs)
    layout.check_out(operator, scales, shape[:1], torch.float32, *inputs, rows)
    return rows, scales


# ---------------------------------------------------------------------------- derivatives


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))
    ctx.count = len(inputs)
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    return (None,) * ctx.count


def _tangent(ctx: Any, inputs: Any, outputs: tuple[Any, ...], tangents: Any) -> Any:
    return (None, torch.zeros_like(outputs[1])) if len(outputs) > 1 else None


_NO_DERIVATIVE: dict[str, Any] = {"derivative": _derivative, "setup": _setup, "tangent": _tangent}

# ---------------------------------------------------------------------------- registration

# A registered operator looks at all that a kernel indexes with: anybody may call it.


def _given_factors(
    operator: str, smooth: Tensor | None, expert_of_row: Tensor | None, rows: Tensor, num_rows: int
) -> Tensor | None:
    """Checks smooth, [E, H] here; returns expert_of_row as kernels take it."""
    if smooth is not None:
        check.shaped(operator, "smooth", smooth, (None if expert_of_row is not None else 1, rows.shape[1]))
        _check_float32(operator, "smooth", smooth, rows)
    if expert_of_row is None:
        return None
    return index_vector(operator, "expert_of_row", expert_of_row, num_rows, rows)


def _dynamic_quantize_operator(
    rows: Tensor, smooth: Tensor | None, expert_of_row: Tensor | None, backend: Backend | None
) -> tuple[Tensor, Tensor]:
    operator = "dynamic_quantize"
    _check_rows(operator, "rows", rows)
    expert_of_row = _given_factors(operator, smooth, expert_of_row, rows, rows.shape[0])
    found: tuple[Tensor, Tensor] = _module(operator, backend, rows).dynamic_quantize(rows, smooth, expert_of_row)
    return found


def _quantize_operator(rows: Tensor, scale: Tensor, offset: Tensor, backend: Backend | None) -> Tensor:
    operator = "quantize"
    _check_rows(operator, "rows", rows)
    _check_single(operator, "scale", scale, rows)
    _check_single(operator, "offset", offset, rows)
    found: Tensor = _module(operator, backend, rows).quantize(rows, scale, offset)
    return found


def _spread_static_operator(x: Tensor, scale: Tensor, offset: Tensor, plan: PlanTensors, backend: str | None) -> Tensor:
    operator = "quantize"
    _check_rows(operator, "x", x)
    check.shaped(operator, "x", x, (plan.num_tokens, None))
    _check_single(operator, "scale", scale, x)
    _check_single(operator, "offset", offset, x)
    plan = given_plan(operator, plan, None, x)
    found: Tensor = _module(operator, backend, x).spread_static(x, scale, offset, plan)
    return found


def _spread_quantized_operator(
    x: Tensor, smooth: Tensor | None, expert_of_row: Tensor | None, plan: PlanTensors, backend: Backend | None
) -> tuple[Tensor, Tensor]:
    operator = "spread_quantized"
    _check_rows(operator, "x", x)
    check.shaped(operator, "x", x, (plan.num_tokens, None))
    plan = given_plan(operator, plan, None, x)
    expert_of_row = _given_factors(operator, smooth, expert_of_row, x, plan.slot_of_row.shape[0])
    found: tuple[Tensor, Tensor] = _module(operator, backend, x).spread_quantized(x, smooth, expert_of_row, plan)
    return found


def _new_pair(like: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    rows = like.new_empty(num_rows, like.shape[1], dtype=torch.int8)
    return rows, like.new_empty(num_rows, dtype=torch.float32)


_dynamic_quantize = register(
    "dynamic_quantize(Tensor rows, Tensor? smooth, Tensor? expert_of_row, str? backend) -> (Tensor, Tensor)",
    _dynamic_quantize_operator,
    lambda rows, smooth, expert_of_row, backend: _new_pair(rows, rows.shape[0]),
    **_NO_DERIVATIVE,
)
_quantize = register(
    "quantize(Tensor rows, Tensor scale, Tensor offset, str? backend) -> Tensor",
    _quantize_operator,
    lambda rows, scale, offset, backend: torch.empty_like(rows, dtype=torch.int8),
    **_NO_DERIVATIVE,
)
_spread_static = register(
    f"spread_static(Tensor x, Tensor scale, Tensor offset, {PLAN_SCHEMA}, str? backend) -> Tensor",
    _spread_static_operator,
    lambda x, scale, offset, plan, backend: x.new_empty(plan.slot_of_row.shape[0], x.shape[1], dtype=torch.int8),
    **_NO_DERIVATIVE,
)
_spread_quantized = register(
    f"spread_quantized(Tensor x, Tensor? smooth, Tensor? expert_of_row, {PLAN_SCHEMA}, str? backend)"
    " -> (Tensor, Tensor)",
    _spread_quantized_operator,
    lambda x, smooth, expert_of_row, plan, backend: _new_pair(x, plan.slot_of_row.shape[0]),
    **_NO_DERIVATIVE,
)
