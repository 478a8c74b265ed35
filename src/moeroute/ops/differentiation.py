"""The derivative of an operator, told once, for every way in which PyTorch differentiates.

`torch.library` serves autograd, torch.compile and opcheck, but knows nothing of forward mode (it would
drop tangents without a word) and refuses torch.func. There an autograd Function of the same
derivative answers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable it does not load the compiler
from torch.autograd import forward_ad

from moeroute.ops.registration import operator

_transforms_active = torch._C._are_functorch_transforms_active


def transformed() -> bool:
    """Whether forward mode or a transform of torch.func is at work, outside torch.compile."""
    return not torch.compiler.is_compiling() and (forward_ad._current_level >= 0 or _transforms_active())


def differentiable(
    name: str,
    derivative: Callable[..., Any],
    setup: Callable[..., None],
    *,
    linear_in: Sequence[int] = (),
    tangent: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register the derivative of `moeroute::<name>`; returns what verbs and derivatives are to call.

    Forward mode follows from `linear_in`, the positions of the arguments in each of which the operator is
    linear, or is `tangent(ctx, inputs, outputs, tangents)`; with neither it raises. vmap loops.
    """
    overload = getattr(torch.ops.moeroute, name).default
    recorded = operator(name)
    torch.library.register_autograd(f"moeroute::{name}", derivative, setup_context=setup)

    def one_by_one(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        runs = [
            overload(*(x if d is None else x.select(d, i) for x, d in zip(inputs, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(runs[0], tuple):
            return tuple(torch.stack(parts) for parts in zip(*runs, strict=True)), (0,) * len(runs[0])
        return torch.stack(runs), 0

    torch.library.register_vmap(f"moeroute::{name}", one_by_one)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup(ctx, inputs, output)
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        ctx.save_for_forward(*(i if isinstance(i, Tensor) else None for i in inputs), *outputs)
        ctx.others = [None if isinstance(i, Tensor) else i for i in inputs]

    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        count = len(ctx.others)
        tensors, outputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        inputs = [other if t is None else t for t, other in zip(tensors, ctx.others, strict=True)]
        if tangent is not None:
            return tangent(ctx, inputs, outputs, tangents)
        total: Tensor | None = None
        for position in linear_in:
            move = tangents[position]
            if move is not None:
                term = call(*inputs[:position], move, *inputs[position + 1 :])
                total = term if total is None else total + term
        return total

    members: dict[str, Any] = {
        "forward": staticmethod(overload),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(derivative),
        "generate_vmap_rule": True,
    }
    if linear_in or tangent is not None:
        members["jvp"] = staticmethod(jvp)
    function = type(name, (torch.autograd.Function,), members)

    @_disable_dynamo
    def uncompiled_under_torch_func(*arguments: Any) -> Any:
        """torch.compile cannot trace such a Function: the frame that transforms runs uncompiled."""
        return function.apply(*arguments)  # type: ignore[attr-defined]

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return uncompiled_under_torch_func(*arguments) if _transforms_active() else recorded(*arguments)
        return function.apply(*arguments) if transformed() else recorded(*arguments)  # type: ignore[attr-defined]

    return call
