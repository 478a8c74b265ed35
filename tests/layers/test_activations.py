"""The activations of experts against formulas in float64, and against what the layers they come from compute."""

import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moeroute.dispatch import Backend
from moeroute.nn import activate
from moeroute.ops.activations.op import ACTIVATIONS, Activation, activate_backward
from moeroute.testing import assert_same_bits


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """As gpt-oss."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


FORMULAS: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swiglu_clamped": clamped,
}


def exact(x: Tensor, activation: Activation, interleaved: bool) -> Tensor:
    """In float64, by torch's own functions."""
    x = x.double()
    if activation == "relu2":
        return F.relu(x).square()
    parts = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return FORMULAS[activation](*parts)


CASES = [(a, i) for a, i in itertools.product(ACTIVATIONS, (False, True)) if a != "relu2" or not i]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("activation", "interleaved"), CASES)
def test_values_and_gradients(backend: Backend, activation: Activation, interleaved: bool, dtype: torch.dtype) -> None:
    if dtype is torch.float64 and backend != "reference":
        pytest.skip("float64 is the reference's")
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 150), (2, 3, 128), (1, 2), (0, 6), (4,)):
        x = (torch.randn(shape, generator=generator) * 5).to(dtype).requires_grad_()
        wide = x.detach().double().requires_grad_()
        output, expected = (
            activate(x, activation, interleaved=interleaved, backend=backend),
            exact(wide, activation, interleaved),
        )
        assert output.shape == expected.shape
        assert output.dtype is dtype
        grad = torch.randn(output.shape, generator=generator).to(dtype)
        found, wanted = torch.autograd.grad(output, x, grad)[0], torch.autograd.grad(expected, wide, grad.double())[0]
        assert found.dtype is dtype
        for actual, right in ((output, expected), (found, wanted)):
            limit = TOLERANCES[dtype]
            torch.testing.assert_close(actual.double(), right, rtol=limit, atol=limit)


@pytest.mark.parametrize(("activation", "interleaved"), CASES)
def test_every_order_of_derivative(activation: Activation, interleaved: bool) -> None:
    x = (torch.randn(3, 6, dtype=torch.float64) * 3).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return activate(x, activation, interleaved=interleaved)

    torch.autograd.gradcheck(function, (x,), check_forward_ad=True)
    torch.autograd.gradgradcheck(function, (x,), check_fwd_over_rev=True)


@pytest.mark.parametrize(("activation", "interleaved"), CASES)
def test_the_result_is_made_again(backend: Backend, activation: Activation, interleaved: bool) -> None:
    x = torch.randn(5, 140, dtype=torch.float32)
    y = activate(x, activation, interleaved=interleaved, backend=backend)
    grad = torch.randn(y.shape)
    once, nothing = activate_backward(grad, x, activation, interleaved, False, backend)
    again, result = activate_backward(grad, x, activation, interleaved, True, backend)
    assert_same_bits(again, once, "gradient")
    assert_same_bits(result, y, "result")
    assert nothing.numel() == 0


def test_the_gradient_with_the_result_is_differentiable() -> None:
    grad = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)

    def both(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return activate_backward(grad, x, "geglu", False, True, None)

    torch.autograd.gradcheck(both, (grad, x), check_forward_ad=True)


def test_far_from_zero() -> None:
    """Where the sigmoid is 0 or 1, no product of a zero and an infinity comes up."""
    for activation in ("swiglu", "geglu", "swiglu_clamped"):
        x = torch.tensor([[-1e30, -1e4, -200.0, 200.0, 1e4, 1e30] + [1.0] * 6], requires_grad=True)
        output = activate(x, activation)
        (grad,) = torch.autograd.grad(output.sum(), x)
        assert output.isfinite().all()
        assert grad.isfinite().all()


def test_compiled() -> None:
    x = torch.randn(4, 12, requires_grad=True)
    step = torch.compile(lambda x: activate(x, "geglu").square(), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (x, x[:3]):
        found, wanted = step(rows), activate(rows, "geglu").square()
        assert_same_bits(found, wanted, "output")
        assert_same_bits(torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), x), "gradient")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: activate([1.0]), TypeError, "nn.activate: x must be a torch.Tensor; got list"),  # type: ignore[arg-type]
        (lambda: activate(torch.zeros(2, 4).int()), TypeError, "x must be float16, bfloat16, float32 or float64; got torch.int32"),
        (lambda: activate(torch.zeros(2, 3)), ValueError, r"x must be [..., 2I], gate and up; got shape [2, 3]"),
        (lambda: activate(torch.tensor(1.0)), ValueError, r"x must be [..., 2I], gate and up; got shape []"),
        (lambda: activate(torch.zeros(2, 4), "tanh"), ValueError, "activation must be one of 'swiglu', 'geglu', 'swiglu_clamped', 'relu2'; got 'tanh'"),  # type: ignore[arg-type]
        (lambda: activate(torch.zeros(2, 4), interleaved=1), TypeError, "interleaved must be a bool; got int"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_bad_input(call: Callable[[], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
