"""The activations of experts: what stands between their two products, gate and up read in place.

    y = activate(x)                     [M, 2I] to [M, I] in one pass
    dx, y = activate_backward(dy, x)    in one pass too; y once more for the gradient of the next product's weight

The verb comes first, then the checks, the derivatives, and what torch.library knows of the operators. Second
derivatives, and forward mode, come from the float64 reference.
"""

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moeroute import check, dispatch
from moeroute.dispatch import Backend
from moeroute.dtypes import FLOATS
from moeroute.ops.register import register

Activation = Literal["swiglu", "geglu", "swiglu_clamped", "relu2"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

_module = partial(dispatch.implementation, "activations")


def activate(
    x: Tensor, activation: Activation = "swiglu", *, interleaved: bool = False, backend: Backend | None = None
) -> Tensor:
    """The activation of experts: ``f(gate) * up`` of the two halves of each row, in one pass.

    In float32 (float64 for float64), rounded once; the gradient too is one pass, and differentiable to any order.

    Args:
        x: [..., 2I], float: gate, then up. For "relu2", which has no gate, [..., I].
        activation: "swiglu" is ``silu(gate) * up``; "geglu" is ``gelu(gate) * up``, GELU by its tanh formula;
            "swiglu_clamped" is ``g * sigmoid(1.702 g) * (u + 1)`` with g = min(gate, 7) and u = up cut at -7 and 7, as
            in gpt-oss; "relu2" is ``relu(x) ** 2``.
        interleaved: gate and up are the even and the odd columns.
        backend: "reference", "cpu" or "triton"; None chooses by the device of x.

    Returns:
        [..., I] in the dtype of x.

    Raises:
        ValueError: an odd number of columns, an unknown activation.
        TypeError: a wrong type or dtype.

    >>> import torch
    >>> from moeroute.nn import activate
    >>> activate(torch.tensor([[1.0, -1.0, 10.0, 10.0]]))
    tensor([[ 7.3106, -2.6894]])
    >>> activate(torch.tensor([[1.0, 10.0, -1.0, 10.0]]), interleaved=True)
    tensor([[ 7.3106, -2.6894]])
    >>> activate(torch.tensor([[3.0, -3.0]]), "relu2")
    tensor([[9., 0.]])
    """
    operator = "nn.activate"
    check.tensor(operator, "x", x)
    if x.dtype not in FLOATS:
        raise check.wrong_dtype(operator, "x", "float16, bfloat16, float32 or float64", x)
    check.one_of(operator, "activation", activation, ACTIVATIONS)
    check.flag(operator, "interleaved", interleaved)
    if x.ndim == 0 or (activation != "relu2" and x.shape[-1] % 2):
        wanted = "[..., I]" if activation == "relu2" else "[..., 2I], gate and up"
        raise check.wrong_shape(operator, "x", wanted, x)
    matrix = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    found: Tensor
    if dispatch.plain(matrix):
        found = _module(operator, backend, matrix).activate(matrix, activation, interleaved)
    else:
        found = _activate(matrix, activation, interleaved, backend)
    return found if x.ndim == 2 else found.reshape(*x.shape[:-1], found.shape[1])


# ---------------------------------------------------------------------------- derivatives


def _float64_backward(options: tuple[Any, ...]) -> Any:
    """The backward as a function of grad and x: in float64 the reference is differentiable torch."""
    reference = dispatch.module("activations", "reference")

    def backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = reference.activate_backward(grad.double(), x.double(), *options, True)
        return found

    return backward


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *options, ctx.backend = inputs
    ctx.options = tuple(options)
    ctx.save_for_backward(x)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    return activate_backward(grad, x, *ctx.options, False, ctx.backend)[0], None, None, None


def tangent_of(x: Tensor, move: Tensor, activation: str, interleaved: bool) -> Tensor:
    """How the result moves with x."""
    ones = x.new_ones(_result_shape(x, activation))
    slopes = _float64_backward((activation, interleaved))(ones, x)[0] * move.double()
    if activation != "relu2":
        half = slopes.shape[1] // 2
        first, second = slopes.reshape(-1, half, 2).unbind(2) if interleaved else slopes.reshape(-1, 2, half).unbind(1)
        slopes = first + second
    return slopes.to(x.dtype)


def _tangent(ctx: Any, inputs: list[Any], outputs: Any, tangents: tuple[Any, ...]) -> Tensor | None:
    x, activation, interleaved, _ = inputs
    return None if tangents[0] is None else tangent_of(x, tangents[0], activation, interleaved)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad, x, *options, again, _ = inputs
    ctx.options, ctx.again = tuple(options), again
    ctx.save_for_backward(grad, x)


def _backward_derivative(ctx: Any, grad: Tensor, grad_result: Tensor) -> tuple[Any, ...]:
    pullback = torch.func.vjp(_float64_backward(ctx.options), *ctx.saved_tensors)[1]
    if not ctx.again:
        grad_result = torch.zeros_like(ctx.saved_tensors[0])
    return (*pullback((grad.double(), grad_result.double())), None, None, None, None)


def _backward_tangent(ctx: Any, inputs: list[Any], outputs: Any, tangents: tuple[Any, ...]) -> Any:
    pairs = list(zip(inputs[:2], tangents[:2], strict=True))
    primals = tuple(x for x, _ in pairs)
    moves = tuple(torch.zeros_like(x) if move is None else move for x, move in pairs)
    backward = _float64_backward(tuple(inputs[2:4]))
    # Dual levels do not nest, so no torch.func.jvp here: the transpose of the transpose.
    zeros = tuple(torch.zeros_like(x, dtype=torch.float64) for x in (inputs[1], inputs[0]))
    pushforward = torch.func.vjp(lambda *grads: torch.func.vjp(backward, *primals)[1](grads), *zeros)[1]
    found, result = pushforward(moves)
    return found.to(inputs[1].dtype), result.to(inputs[1].dtype) if inputs[4] else torch.zeros_like(outputs[1])


# ---------------------------------------------------------------------------- registration
#
# A registered operator may be called by anybody, and stands in exported graphs: it looks at all that a kernel indexes
# with. A verb has looked already, and calls the kernel itself where it may.


def _check(operator: str, x: Tensor, activation: str) -> tuple[int, int]:
    """Checks the options; the shape of the result."""
    check.shaped(operator, "x", x, (None, None))
    check.float_dtype(operator, "the dtype of x", x.dtype, FLOATS)
    check.one_of(operator, "activation", activation, ACTIVATIONS)
    if activation != "relu2" and x.shape[1] % 2:
        raise check.wrong_shape(operator, "x", "[M, 2I], gate and up", x)
    return _result_shape(x, activation)


def _result_shape(x: Tensor, activation: str) -> tuple[int, int]:
    return x.shape[0], x.shape[1] if activation == "relu2" else x.shape[1] // 2


def _activate_operator(x: Tensor, activation: str, interleaved: bool, backend: Backend | None) -> Tensor:
    _check("nn.activate", x, activation)
    found: Tensor = _module("nn.activate", backend, x).activate(x, activation, interleaved)
    return found


def _activate_backward_operator(
    grad: Tensor, x: Tensor, activation: str, interleaved: bool, again: bool, backend: Backend | None
) -> tuple[Tensor, Tensor]:
    operator = "activate_backward"
    shape = _check(operator, x, activation)
    check.shaped(operator, "grad", grad, shape, x)
    if grad.dtype is not x.dtype:
        raise check.wrong_dtype(operator, "grad", f"{x.dtype}, as x", grad)
    module = _module(operator, backend, x)
    found, result = module.activate_backward(grad, x, activation, interleaved, again)
    return found, x.new_empty(0, shape[1]) if result is None else result


_activate = register(
    "activate(Tensor x, str activation, bool interleaved, str? backend) -> Tensor",
    _activate_operator,
    lambda x, activation, interleaved, backend: x.new_empty(_result_shape(x, activation)),
    derivative=_derivative,
    setup=_setup,
    tangent=_tangent,
)
activate_backward = register(
    "activate_backward(Tensor grad, Tensor x, str activation, bool interleaved, bool again, str? backend) "
    "-> (Tensor, Tensor)",
    _activate_backward_operator,
    lambda grad, x, activation, interleaved, again, backend: (
        x.new_empty(x.shape),
        x.new_empty(_result_shape(x, activation)) if again else x.new_empty(0, _result_shape(x, activation)[1]),
    ),
    derivative=_backward_derivative,
    setup=_backward_setup,
    tangent=_backward_tangent,
)
