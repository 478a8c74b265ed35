"""permute and unpermute, their weights and their gradients: compositions of the operators under `ops`."""

from torch import Tensor

from moeroute import check, dispatch
from moeroute.dispatch import Backend
from moeroute.ops import layout
from moeroute.ops.rows.op import combine_checked, spread_checked, spread_dots
from moeroute.ops.weights.op import slots_of_weights, take, weights_of_slots, weights_shape
from moeroute.plan import RoutingPlan, expect_plan


def permute(
    tokens: Tensor, plan: RoutingPlan, weights: Tensor | None = None, *, backend: Backend | None = None
) -> Tensor:
    """Token copies in expert order, [R, H]: expert by expert, inside an expert in the order of the slots.

    Differentiable to any order in the tokens and the weights.

    Args:
        tokens: [T, H], any dtype, any strides.
        plan: the row of every slot.
        weights: multiply each copy; one for each slot: [T, E] where the plan has `expert_of_slot`, else [T, K].
            float16, bfloat16 or float32; float64 with float64, and beside narrower tokens rounded to float32, once
            (the gradient is float64). None: copies keep their bits.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The rows [R, H] in the dtype of the tokens. Padding rows are 0.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``tokens[torch.argsort(expert_ids.flatten(), stable=True) // K]``.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> moeroute.permute(torch.tensor([[1.0, 10.0], [2.0, 20.0]]), plan)
    tensor([[ 1., 10.],
            [ 1., 10.],
            [ 2., 20.],
            [ 2., 20.]])
    """
    expect_plan("permute", plan)
    check.matrix("permute", "tokens", tokens, "T", plan.num_tokens, plan)
    if weights is not None:
        weights = _verb_weights("permute", "tokens", tokens, weights, plan, backend)
    elif tokens.is_quantized:
        raise check.quantized("permute", "tokens", tokens)
    return spread_checked("permute", tokens, plan, weights, None, backend)


def unpermute(
    rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None, *, backend: Backend | None = None
) -> Tensor:
    """Sum the experts' rows of each token, [T, H]: the weighted sum, or the plain one without weights.

    The sum is computed in float32 in slot order and rounded once. A slot without a row and a slot of weight 0 add
    nothing. Differentiable to any order in the rows and the weights. The rows are kept for backward only where the
    weights need a gradient.

    Args:
        rows: [R, H], float16, bfloat16, float32 or float64, in the order that `permute` gave.
        plan: the plan that `permute` got.
        weights: one for each slot: [T, E] where the plan has `expert_of_slot`, else [T, K]. float16, bfloat16 or
            float32; float64 with float64, and beside narrower rows rounded to float32, once (the gradient is
            float64).
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The tokens [T, H] in the dtype of the rows. A token without a row is 0.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``(rows[plan.row_of_slot].reshape(T, K, H) * weights[..., None]).sum(1)``.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    >>> moeroute.unpermute(rows, plan, torch.tensor([[0.5, 0.5], [1.0, 0.25]])).flatten()
    tensor([1.5000, 6.0000])
    """
    expect_plan("unpermute", plan)
    check.matrix("unpermute", "rows", rows, "R", plan.num_rows, plan)
    check.floating("unpermute", "rows", rows)
    if weights is not None:
        weights = _verb_weights("unpermute", "rows", rows, weights, plan, backend)
    return combine_checked("unpermute", rows, plan, weights, None, backend)


def _verb_weights(
    operator: str, name: str, rows: Tensor, weights: Tensor, plan: RoutingPlan, backend: Backend | None
) -> Tensor:
    """Checked and one a slot; [T, K] is that already, whatever its shape."""
    weights = layout.weights_beside(rows, weights)
    check.weights_kind(operator, weights, name, rows, plan.row_of_slot)
    check.weights_of_plan(operator, "weights", weights, plan)
    return weights if plan.expert_of_slot is None else slots_of_weights(operator, weights, plan, None, backend)


def permute_backward(
    grad_rows: Tensor,
    plan: RoutingPlan,
    weights: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """The gradient of `permute` in the tokens, [T, H], for callers with an autograd of their own.

    It has the meaning of aclnnMoeTokenPermuteGrad. Differentiable.

    Args:
        grad_rows: [R, H], float16, bfloat16, float32 or float64.
        plan: the plan that `permute` got.
        weights: the weights that `permute` got.
        out: [T, H], the dtype of `grad_rows`; the result is written into it, outside autograd.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The gradient [T, H] in the dtype of `grad_rows`; `out` if it was given.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``grad_rows[plan.row_of_slot].reshape(T, K, H).sum(1)``, in float32.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_row_of_slot(torch.tensor([0, 1], dtype=torch.int32), 1, 2)
    >>> moeroute.permute_backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), plan)
    tensor([[4., 6.]])
    """
    operator = "permute_backward"
    expect_plan(operator, plan)
    check.matrix(operator, "grad_rows", grad_rows, "R", plan.num_rows, plan)
    check.floating(operator, "grad_rows", grad_rows)
    if weights is not None:
        weights = _verb_weights(operator, "grad_rows", grad_rows, weights, plan, backend)
    return combine_checked(operator, grad_rows, plan, weights, out, backend)


def unpermute_backward(
    grad_tokens: Tensor,
    rows: Tensor | None,
    plan: RoutingPlan,
    weights: Tensor | None = None,
    *,
    accumulate: bool = True,
    out: tuple[Tensor, Tensor | None] | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `unpermute` in the rows, [R, H], and in the weights (None without), in one pass.

    It has the meaning of aclnnMoeTokenUnpermuteGrad and aclnnMoeTokenUnpermuteWithRoutingMapGrad. Differentiable.

    Args:
        grad_tokens: [T, H].
        rows: [R, H], the rows that `unpermute` got; may be None without weights.
        plan: the plan that `unpermute` got.
        weights: the weights that `unpermute` got.
        accumulate: as in `permute_weights_backward`.
        out: two tensors to write the gradients into, outside autograd; either may be None.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The gradient of the rows [R, H], and that of the weights in their shape and dtype.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

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
    expect_plan(operator, plan)
    check.matrix(operator, "grad_tokens", grad_tokens, "T", plan.num_tokens, plan)
    if rows is not None or weights is not None:
        check.matrix(operator, "rows", rows, "R", plan.num_rows, plan)
    if weights is None:
        if out_weights is not None:
            raise check.wrong_value(operator, "out", "(tensor, None) without weights", "a second tensor")
        if grad_tokens.is_quantized:
            raise check.quantized(operator, "grad_tokens", grad_tokens)
        return spread_checked(operator, grad_tokens, plan, None, out_rows, backend), None
    assert rows is not None  # noqa: S101 - for the type checker; the lines above raise otherwise
    slots = _verb_weights(operator, "grad_tokens", grad_tokens, weights, plan, backend)
    check.partner(operator, "rows", rows, "grad_tokens", grad_tokens)
    shape = tuple(weights.shape)
    if out is not None:
        inputs = (grad_tokens, rows, weights, *plan.tensors[:4])
        if out_rows is not None:
            layout.check_out(operator, out_rows, tuple(rows.shape), rows.dtype, *inputs)
        if out_weights is not None:
            layout.check_out(operator, out_weights, shape, weights.dtype, *inputs, out_rows)
        grad_tokens, rows, slots = layout.resolved(grad_tokens), layout.resolved(rows), layout.resolved(slots)
    # Where the weights are slot by slot the kernel writes straight into the caller's tensor.
    straight = out_weights is not None and plan.expert_of_slot is None and out_weights.is_contiguous()
    if out is not None or dispatch.plain(grad_tokens, rows, slots):
        out_dots = out_weights.view(-1) if straight and out_weights is not None else None
        grad_rows, dots = dispatch.implementation("rows", operator, backend, rows).spread_dots(
            grad_tokens, rows, slots, plan.tensors, out=(out_rows, out_dots)
        )
    else:
        grad_rows, dots = spread_dots(grad_tokens, rows, slots.reshape(-1), plan.tensors, backend)
    if straight:
        return grad_rows, out_weights
    grad_weights = weights_of_slots(operator, dots, plan, shape, accumulate, out_weights, backend)
    return grad_rows, grad_weights.to(weights.dtype)


def permute_weights(
    weights: Tensor, plan: RoutingPlan, *, out: Tensor | None = None, backend: Backend | None = None
) -> Tensor:
    """The weight of every row, [R]: the weights in the order of the permuted rows.

    Multiplying the experts' outputs by them and calling `unpermute` without weights is the same as `unpermute` with
    weights. Differentiable to any order.

    Args:
        weights: as for `slot_weights`.
        plan: the row of every slot.
        out: [R], the dtype of the weights; the result is written into it, outside autograd.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The weights [R] in their dtype. Padding rows have 0.

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``weights.flatten()[plan.slot_of_row]`` where there is no padding.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> moeroute.permute_weights(torch.tensor([[0.1, 0.2], [0.3, 0.4]]), plan)
    tensor([0.2000, 0.1000, 0.3000, 0.4000])
    """
    operator = "permute_weights"
    expect_plan(operator, plan)
    check.weights_kind(operator, weights, "", None, plan.row_of_slot)
    check.weights_of_plan(operator, "weights", weights, plan)
    if out is not None:
        layout.check_out(operator, out, (plan.num_rows,), weights.dtype, weights, *plan.tensors[:4])
        weights = layout.resolved(weights)
    slots = slots_of_weights(operator, weights, plan, None, backend)
    if out is not None or dispatch.plain(slots):
        return dispatch.implementation("weights", operator, backend, slots).take(slots, plan.slot_of_row, out=out)
    return take(slots, plan.slot_of_row, plan.row_of_slot, backend)


def permute_weights_backward(
    grad: Tensor,
    plan: RoutingPlan,
    *,
    num_experts: int | None = None,
    accumulate: bool = True,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """The gradient of `permute_weights`: [R] back to the shape of the weights; 0 for a slot without a row.

    Differentiable to any order.

    Args:
        grad: [R], float16, bfloat16, float32 or float64.
        plan: the plan that `permute_weights` got.
        num_experts: E, where the plan has `expert_of_slot` but does not know E.
        accumulate: several slots of one token with one expert are added up in slot order. False: the last one is
            stored, as the aclnn operators do.
        out: the shape of the weights, the dtype of `grad`; the result is written into it, outside autograd.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        [T, E] where the plan has `expert_of_slot`, else [T, K], else (different numbers of slots) [S].

    Raises:
        ValueError: a shape or device that does not fit the plan.
        TypeError: a wrong type or dtype.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> moeroute.permute_weights_backward(torch.tensor([1.0, 2.0, 3.0, 4.0]), plan)
    tensor([[2., 1.],
            [3., 4.]])
    """
    operator = "permute_weights_backward"
    expect_plan(operator, plan)
    check.tensor(operator, "grad", grad)
    check.floating(operator, "grad", grad)
    if grad.ndim != 1 or grad.shape[0] != plan.num_rows:
        raise check.wrong_shape(operator, "grad", f"[R] with R = {plan.num_rows}, as the plan", grad)
    if grad.device != plan.row_of_slot.device:
        raise check.wrong_value(operator, "grad", f"on {plan.row_of_slot.device}, as the plan", grad.device)
    check.flag(operator, "accumulate", accumulate)
    shape = weights_shape(operator, plan, num_experts)
    if out is not None:
        layout.check_out(operator, out, shape, grad.dtype, grad, *plan.tensors[:4])
        grad = layout.resolved(grad)
    if out is not None or dispatch.plain(grad):
        slots = dispatch.implementation("weights", operator, backend, grad).take(grad, plan.row_of_slot)
    else:
        slots = take(grad, plan.row_of_slot, plan.slot_of_row, backend)
    return weights_of_slots(operator, slots, plan, shape, accumulate, out, backend)
