"""An operator of torch.library in one call: schema, implementation, shapes, derivative.

Where the schema has `PLAN_SCHEMA`, the functions given here get a `PlanTensors` in its place, and what `register`
returns takes one.

The derivative is written once and serves every way in which PyTorch differentiates. `torch.library` covers autograd,
torch.compile and opcheck, but it drops the tangents of forward mode without a warning and refuses torch.func. For these
two an autograd Function with the same derivative is called.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable it does not load the compiler
from torch.autograd import forward_ad

from moeroute import check
from moeroute.plan import PlanTensors

LIBRARY = torch.library.Library("moeroute", "FRAGMENT")

PLAN_SCHEMA = "Tensor row_of_slot, Tensor slot_of_row, Tensor? slot_offsets, Tensor? expert_of_slot, SymInt num_tokens"
_FIELDS = len(PlanTensors._fields)
_transforms_active = torch._C._are_functorch_transforms_active


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
    _implement(name, _packing(implementation, at), _packing(fake, at))
    if derivative is None or setup is None:
        call = _traceable(name)
    else:
        call = _differentiable(
            name, _expanding(derivative, at), _packing_inputs(setup, at), linear_in=linear_in, tangent=tangent
        )
    if at is None:
        return call
    return lambda *arguments: call(*arguments[:at], *arguments[at], *arguments[at + 1 :])


_published: dict[str, tuple[torch.library.Library, set[str]]] = {}


def publish(namespace: str, schema: str, function: Callable[..., Any]) -> None:
    """Define an operator of another library's namespace that is a composition of ours; a second time changes nothing.

    What the function calls is what autograd, torch.compile and transforms see.
    """
    if namespace not in _published:
        _published[namespace] = torch.library.Library(namespace, "FRAGMENT"), set()
    library, names = _published[namespace]
    name = schema.split("(")[0]
    if name not in names:
        library.define(schema)
        library.impl(name, function, "CompositeImplicitAutograd")
        names.add(name)


def transformed() -> bool:
    """Whether forward mode or a transform of torch.func is at work, outside torch.compile."""
    return not torch.compiler.is_compiling() and (forward_ad._current_level >= 0 or _transforms_active())


# ---------------------------------------------------------------------------- the plan in a schema


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


# ---------------------------------------------------------------------------- implementation and shapes


def _implement(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
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


def _traceable(name: str) -> Callable[..., Any]:
    """What is to be called for `moeroute::<name>`: inside torch.jit.trace its twin, where a size is a tensor."""
    overload = getattr(torch.ops.moeroute, name).default
    sizes = _sizes(overload)
    twin = getattr(torch.ops.moeroute, f"{name}_traced").default if sizes else None
    checked = _backend_check(name, overload)

    def call(*arguments: Any) -> Any:
        checked(arguments)
        if twin is None or torch.compiler.is_compiling() or not torch._C._is_tracing():
            return overload(*arguments)
        return twin(*(torch.tensor(a) if i in sizes and isinstance(a, int) else a for i, a in enumerate(arguments)))

    return call


def _backend_check(name: str, overload: Any) -> Callable[[tuple[Any, ...]], None]:
    """Refuses a backend that is no str, which torch would refuse in words of its own."""
    parameters = [argument.name for argument in overload._schema.arguments]
    at = parameters.index("backend") if "backend" in parameters else None

    def checked(arguments: tuple[Any, ...]) -> None:
        if at is not None and at < len(arguments) and not (arguments[at] is None or isinstance(arguments[at], str)):
            raise check.wrong_type(name, "backend", "a str or None", arguments[at])

    return checked


def _sizes(overload: Any) -> set[int]:
    """The positions of the arguments that are integers."""
    return {i for i, argument in enumerate(str(overload._schema).split("->")[0].split(",")) if "SymInt" in argument}


# ---------------------------------------------------------------------------- derivative


def _differentiable(
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
    recorded, checked = _traceable(name), _backend_check(name, overload)
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
        if not transformed():
            return recorded(*arguments)
        checked(arguments)
        return function.apply(*arguments)  # type: ignore[attr-defined]

    return call
