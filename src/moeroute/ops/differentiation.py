"""The derivative of an operator, told once, for every way in which PyTorch differentiates.

`torch.library` serves autograd, torch.compile and opcheck, but knows nothing of forward mode (it would
drop tangents without a word) and refuses torch.func. There an autograd Function of the same
derivative answers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_transforms_active = torch._C._are_functorch_transforms_active


def transformed() -> bool:
    """Whether forward mode or a transform of torch.func is at work, outside torch.compile."""
    return not torch.compiler.is_compiling() and (forward_ad._current_level >= 0 or _transforms_active())


def differentiable(
    name: str,
    derivative: Callable[..., Any],
    setup: Callable[..., None],
    linear_in: Sequence[int] = (),
) -> Callable[..., Any]:
    """Register the derivative of `moeroute::<name>`; returns what verbs and derivatives are to call.

    `linear_in`: the positions of the arguments in each of which the operator is linear. From them
    follows the forward mode; without them it raises.
    """
    overload = getattr(torch.ops.moeroute, name).default
    torch.library.register_autograd(f"moeroute::{name}", derivative, setup_context=setup)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup(ctx, inputs, output)
        ctx.save_for_forward(*(i if isinstance(i, Tensor) else None for i in inputs))
        ctx.others = [None if isinstance(i, Tensor) else i for i in inputs]

    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        primals = [o if t is None else t for t, o in zip(ctx.saved_tensors, ctx.others, strict=True)]
        total: Tensor | None = None
        for position in linear_in:
            tangent = tangents[position]
            if tangent is not None:
                term = call(*primals[:position], tangent, *primals[position + 1 :])
                total = term if total is None else total + term
        return total

    members: dict[str, Any] = {
        "forward": staticmethod(lambda *arguments: overload(*arguments)),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(derivative),
        "generate_vmap_rule": True,
    }
    if linear_in:
        members["jvp"] = staticmethod(jvp)
    function = type(name, (torch.autograd.Function,), members)

    def call(*arguments: Any) -> Any:
        return function.apply(*arguments) if transformed() else overload(*arguments)  # type: ignore[attr-defined]

    return call
