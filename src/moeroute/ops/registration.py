"""What every operator of torch.library gets besides its schema."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moeroute import check

LIBRARY = torch.library.Library("moeroute", "FRAGMENT")


def implement(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Give `moeroute::<name>`, which is defined already, its implementation and its fake kernel.

    torch.jit.trace records an integer argument as a constant, so that a traced layer would keep the number of
    tokens that it was traced with. So an operator with such arguments has a twin, `<name>_traced`, whose integers
    are tensors.
    """
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moeroute::{name}", partial(_shapes, name, fake), lib=LIBRARY)
    overload = getattr(torch.ops.moeroute, name).default
    sizes = _sizes(overload)
    if sizes:
        parameters = str(overload._schema).removeprefix(f"moeroute::{name}").replace("SymInt", "Tensor")
        LIBRARY.define(f"{name}_traced{parameters}")
        LIBRARY.impl(
            f"{name}_traced",
            lambda *arguments: overload(
                *(int(a) if i in sizes and a is not None else a for i, a in enumerate(arguments))
            ),
            "CompositeImplicitAutograd",
        )


def _shapes(name: str, fake: Callable[..., Any], *arguments: Any) -> Any:
    """What the fake kernel gives. One tensor on meta among others brings a call here: no fresh memory for a result."""
    found = fake(*arguments)
    results = found if isinstance(found, tuple) else (found,)
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    if any(t.device.type == "meta" for t in tensors) and any(r.device.type != "meta" for r in results):
        raise check.wrong_value(name, "every tensor", "on one device", "some on meta")
    return found


def operator(name: str) -> Callable[..., Any]:
    """What is to be called for `moeroute::<name>`: inside torch.jit.trace its twin, where a size is a tensor."""
    overload = getattr(torch.ops.moeroute, name).default
    sizes = _sizes(overload)
    twin = getattr(torch.ops.moeroute, f"{name}_traced").default if sizes else None

    def call(*arguments: Any) -> Any:
        if twin is None or torch.compiler.is_compiling() or not torch._C._is_tracing():
            return overload(*arguments)
        return twin(*(torch.tensor(a) if i in sizes and isinstance(a, int) else a for i, a in enumerate(arguments)))

    return call


def _sizes(overload: Any) -> set[int]:
    """The positions of the arguments that are integers."""
    return {i for i, argument in enumerate(str(overload._schema).split("->")[0].split(",")) if "SymInt" in argument}
