"""npu_swiglu, npu_clipped_swiglu, npu_rms_norm and npu_rotary_mul against NumPy in float64 and autograd's own gradients."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moeroute.interop.torch_npu.activation import (
    npu_clipped_swiglu,
    npu_rms_norm,
    npu_rms_norm_backward,
    npu_rotary_mul,
    npu_rotary_mul_backward,
    npu_swiglu,
    npu_swiglu_backward,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# One rounding of the result, and that of float32 on the way.
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 3e-6, torch.float64: 1e-12}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, layout: str = "plain") -> Tensor:
    """Normal numbers; "strided": every second column of a wider tensor, "turned": a transposed view."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "strided":
        return torch.randn(*shape[:-1], 2 * shape[-1] + 1, generator=generator).to(dtype)[..., 1::2]
    if layout == "turned":
        return torch.randn(*shape[::-1], generator=generator).to(dtype).permute(*reversed(range(len(shape))))
    return torch.randn(*shape, generator=generator).to(dtype)


def doubles(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def expect(found: Tensor, wanted: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> None:
    assert found.dtype == dtype
    assert tuple(found.shape) == (wanted.shape if shape is None else shape)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        found.double(), torch.from_numpy(wanted.reshape(found.shape)), rtol=tolerance, atol=tolerance
    )


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


# ---------------------------------------------------------------------------- swiglu


def swiglu_by_hand(x: np.ndarray, axis: int) -> np.ndarray:
    left, right = np.split(x, 2, axis)
    return left * sigmoid(left) * right


@pytest.mark.parametrize("layout", ("plain", "strided", "turned"))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", (-1, 0, 1, -2))
def test_swiglu(dim: int, dtype: torch.dtype, layout: str) -> None:
    x = numbers(4, 6, 8, dtype=dtype, layout=layout)
    expect(npu_swiglu(x, dim), swiglu_by_hand(doubles(x), dim), dtype)


def test_swiglu_of_known_numbers() -> None:
    found = npu_swiglu(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.0, 2 / (1 + math.exp(-1.0))]]))


@pytest.mark.parametrize("shape", ((0, 4), (3, 0), (0,)))
def test_swiglu_of_nothing(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, requires_grad=True)
    out = npu_swiglu(x)
    assert out.shape == (*shape[:-1], shape[-1] // 2)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dim", (-1, 0))
def test_gradients_of_swiglu(dim: int) -> None:
    x = numbers(4, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: npu_swiglu(x, dim), (x,))
    assert torch.autograd.gradgradcheck(lambda x: npu_swiglu(x, dim), (x,))


def against_float64(function: Callable[..., Tensor], by_torch: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The gradients of float inputs by `function`, compared with those of float64 by plain torch."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    grad = numbers(*out.shape, dtype=out.dtype, seed=9)
    found = torch.autograd.grad(out, leaves, grad)
    wanted = torch.autograd.grad(by_torch(*exact), exact, grad.double())
    for one, other, leaf in zip(found, wanted, leaves, strict=True):
        assert one.dtype == leaf.dtype
        tolerance = 4 * TOLERANCES[leaf.dtype]
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    return list(found)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_swiglu_in_narrow_types(dtype: torch.dtype) -> None:
    x = numbers(5, 8, dtype=dtype)

    def by_torch(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return left * torch.sigmoid(left) * right

    (found,) = against_float64(npu_swiglu, by_torch, x)
    assert torch.equal(found, npu_swiglu_backward(numbers(5, 4, dtype=dtype, seed=9), x))


@pytest.mark.parametrize("x, dim", [(torch.ones(2, 3), -1), (torch.ones(2, 4, dtype=torch.int32), -1), (torch.ones(2, 4), 2), (torch.tensor(1.0), -1)])  # fmt: skip
def test_swiglu_refuses(x: Tensor, dim: int) -> None:
    with pytest.raises(RuntimeError, match="npu_swiglu: "):
        npu_swiglu(x, dim)


# ---------------------------------------------------------------------------- clipped swiglu


def clipped_by_hand(x: np.ndarray, dim: int, used: int, interleaved: bool, alpha: float, limit: float, bias: float) -> np.ndarray:  # fmt: skip
    axis = dim % x.ndim
    rows = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    half = rows.shape[1] // 2
    out = np.zeros((rows.shape[0], half))
    for row in range(used):
        for column in range(half):
            first = rows[row, 2 * column] if interleaved else rows[row, column]
            second = rows[row, 2 * column + 1] if interleaved else rows[row, half + column]
            first, second = min(first, limit), min(max(second, -limit), limit)
            out[row, column] = first * sigmoid(alpha * first) * (second + bias)
    shape = list(x.shape)
    shape[axis] //= 2
    return out.reshape(shape)


@given(
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(["plain", "strided", "turned"]),
    dim=st.sampled_from([-1, 1, 2, -2]),
    interleaved=st.booleans(),
    groups=st.sampled_from([None, [0, 0], [1, 2], [0, 3, 0], [2, 90]]),
    index=st.sampled_from([torch.int32, torch.int64]),
    limit=st.sampled_from([0.5, 7.0]),
)
def test_clipped_swiglu(
    dtype: torch.dtype, layout: str, dim: int, interleaved: bool, groups: list[int] | None, index: torch.dtype, limit: float
) -> None:  # fmt: skip
    x = numbers(4, 4, 6, dtype=dtype, layout=layout) * 3
    rows = math.prod(x.shape[: dim % 3])
    counts = None if groups is None else torch.tensor(groups, dtype=index)
    used = rows if groups is None else min(rows, sum(groups))
    found = npu_clipped_swiglu(
        x, group_index=counts, dim=dim, alpha=1.3, limit=limit, bias=0.5, interleaved=interleaved
    )
    expect(found, clipped_by_hand(doubles(x), dim, used, interleaved, 1.3, limit, 0.5), dtype)


def test_clipped_swiglu_has_the_constants_of_gpt_oss_and_no_gradient() -> None:
    x = torch.tensor([[9.0, 9.0, -9.0, -9.0]], requires_grad=True)
    found = npu_clipped_swiglu(x)
    assert not found.requires_grad
    wanted = [7 / (1 + math.exp(-1.702 * 7)) * 8, -9 / (1 + math.exp(1.702 * 9)) * -6]
    torch.testing.assert_close(found, torch.tensor([wanted]))


@pytest.mark.parametrize("counts", ([-1, 2], [[1]]))
def test_clipped_swiglu_refuses_counts(counts: list[int]) -> None:
    with pytest.raises(RuntimeError, match="npu_clipped_swiglu: group_index"):
        npu_clipped_swiglu(torch.ones(2, 4), group_index=torch.tensor(counts))


# ---------------------------------------------------------------------------- RMS norm


@pytest.mark.parametrize("axes", (1, 2))
@pytest.mark.parametrize("layout", ("plain", "strided", "turned"))
@pytest.mark.parametrize("gamma_type", ("own", "float32"))
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(dtype: torch.dtype, gamma_type: str, layout: str, axes: int) -> None:
    x = numbers(3, 4, 6, dtype=dtype, layout=layout)
    gamma = numbers(*x.shape[3 - axes :], dtype=dtype if gamma_type == "own" else torch.float32, seed=1)
    y, rstd = npu_rms_norm(x, gamma, 1e-3)
    over = tuple(range(3 - axes, 3))
    wanted = 1 / np.sqrt((doubles(x) ** 2).mean(over, keepdims=True) + 1e-3)
    expect(rstd, wanted, torch.float32, (*x.shape[: 3 - axes], *(1,) * axes))
    expect(y, doubles(x) * wanted * doubles(gamma), dtype)


def test_rms_norm_of_known_numbers() -> None:
    y, rstd = npu_rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 0.0)
    root = math.sqrt(12.5)
    torch.testing.assert_close(y, torch.tensor([[3 / root, 40 / root]]))
    torch.testing.assert_close(rstd, torch.tensor([[1 / root]]))


def test_rms_norm_of_nothing() -> None:
    y, rstd = npu_rms_norm(torch.ones(0, 4), torch.ones(4))
    assert y.shape == (0, 4)
    assert rstd.shape == (0, 1)
    dx, dgamma = npu_rms_norm_backward(y, y, torch.ones(4), rstd)
    assert dx.shape == (0, 4)
    assert torch.equal(dgamma, torch.zeros(4))


def test_gradients_of_rms_norm() -> None:
    x = numbers(3, 5, dtype=torch.float64).requires_grad_()
    gamma = numbers(5, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, gamma: npu_rms_norm(x, gamma)[0], (x, gamma))
    assert torch.autograd.gradgradcheck(lambda x, gamma: npu_rms_norm(x, gamma)[0], (x, gamma))
    assert not npu_rms_norm(x, gamma)[1].requires_grad


@pytest.mark.parametrize("gamma_type", ("own", "float32"))
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_rms_norm_in_narrow_types(dtype: torch.dtype, gamma_type: str) -> None:
    x = numbers(3, 6, dtype=dtype)
    gamma = numbers(6, dtype=dtype if gamma_type == "own" else torch.float32, seed=1)

    def by_torch(x: Tensor, gamma: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma

    dx, dgamma = against_float64(lambda x, gamma: npu_rms_norm(x, gamma)[0], by_torch, x, gamma)
    direct = npu_rms_norm_backward(numbers(3, 6, dtype=dtype, seed=9), x, gamma, npu_rms_norm(x, gamma)[1])
    assert torch.equal(direct[0], dx)
    assert direct[1].dtype == torch.float32
    assert torch.equal(direct[1].to(gamma.dtype), dgamma)


def test_rms_norm_refuses() -> None:
    with pytest.raises(RuntimeError, match="npu_rms_norm: gamma must be"):
        npu_rms_norm(torch.ones(2, 4), torch.ones(3))
    with pytest.raises(RuntimeError, match="npu_rms_norm: gamma must be"):
        npu_rms_norm(torch.ones(2, 4), torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="npu_rms_norm_backward: rstd"):
        npu_rms_norm_backward(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), torch.ones(2))


# ---------------------------------------------------------------------------- rotary embedding


def rotated_by_hand(x: np.ndarray, mode: str, rotate: np.ndarray | None = None) -> np.ndarray:
    if rotate is not None:
        return x @ rotate
    out, half = np.empty_like(x), x.shape[-1] // 2
    for column in range(half):
        first, second = (column, half + column) if mode == "half" else (2 * column, 2 * column + 1)
        out[..., first] = -x[..., second]
        out[..., second] = x[..., first]
    return out


@given(
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(["plain", "strided", "turned"]),
    mode=st.sampled_from(["half", "interleave"]),
    factor_shape=st.sampled_from([(2, 3, 4, 6), (1, 3, 1, 6), (4, 6), (6,), (2, 1, 1, 1)]),
    factor_dtype=st.sampled_from(FLOATS),
    by_matrix=st.booleans(),
)
def test_rotary_mul(
    dtype: torch.dtype, layout: str, mode: str, factor_shape: tuple[int, ...], factor_dtype: torch.dtype, by_matrix: bool
) -> None:  # fmt: skip
    x = numbers(2, 3, 4, 6, dtype=dtype, layout=layout)
    cos, sin = (numbers(*factor_shape, dtype=factor_dtype, seed=seed) for seed in (1, 2))
    rotate = numbers(6, 6, dtype=dtype, seed=3) if by_matrix else None
    found = npu_rotary_mul(x, cos, sin, mode, rotate)
    turned = rotated_by_hand(doubles(x), mode, None if rotate is None else doubles(rotate))
    wanted = doubles(x) * doubles(cos.to(dtype)) + turned * doubles(sin.to(dtype))
    expect(found, wanted, dtype)


def test_rotary_mul_of_known_numbers() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    cos, sin = torch.full((1, 4), 10.0), torch.ones(1, 4)
    assert npu_rotary_mul(x, cos, sin).tolist() == [[7.0, 16.0, 31.0, 42.0]]
    assert npu_rotary_mul(x, cos, sin, "interleave").tolist() == [[8.0, 21.0, 26.0, 43.0]]


@pytest.mark.parametrize("mode", ("half", "interleave", "matrix"))
def test_gradients_of_rotary_mul(mode: str) -> None:
    x = numbers(2, 3, 4, dtype=torch.float64).requires_grad_()
    cos = numbers(1, 3, 4, dtype=torch.float64, seed=1).requires_grad_()
    sin = numbers(3, 1, dtype=torch.float64, seed=2).requires_grad_()
    rotate = numbers(4, 4, dtype=torch.float64, seed=3) if mode == "matrix" else None

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return npu_rotary_mul(x, cos, sin, "half" if rotate is not None else mode, rotate)

    assert torch.autograd.gradcheck(turn, (x, cos, sin))
    assert torch.autograd.gradgradcheck(turn, (x, cos, sin))


@pytest.mark.parametrize("mode", ("half", "interleave"))
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_rotary_mul_in_narrow_types(dtype: torch.dtype, mode: str) -> None:
    x, cos, sin = numbers(2, 3, 4, dtype=dtype), numbers(3, 4, dtype=dtype, seed=1), numbers(1, 4, dtype=dtype, seed=2)

    def by_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if mode == "half":
            turned = torch.cat([-x[..., 2:], x[..., :2]], -1)
        else:
            turned = torch.stack([-x[..., 1], x[..., 0], -x[..., 3], x[..., 2]], -1)
        return x * cos + turned * sin

    found = against_float64(lambda x, cos, sin: npu_rotary_mul(x, cos, sin, mode), by_torch, x, cos, sin)
    direct = npu_rotary_mul_backward(numbers(2, 3, 4, dtype=dtype, seed=9), x, cos, sin, mode)
    assert all(torch.equal(one, other) for one, other in zip(found, direct, strict=True))


def test_rotary_mul_refuses() -> None:
    x, factor = torch.ones(2, 4), torch.ones(1, 4)
    phrase = "The rotary_mode of npu_rotary_mul should be half or interleave, but got quarter"
    with pytest.raises(RuntimeError, match=phrase):
        npu_rotary_mul(x, factor, factor, "quarter")
    with pytest.raises(RuntimeError, match="npu_rotary_mul: r2 must be"):
        npu_rotary_mul(x, factor, torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="npu_rotary_mul: self must be"):
        npu_rotary_mul(torch.ones(2, 3), torch.ones(3), torch.ones(3))
    with pytest.raises(RuntimeError, match="npu_rotary_mul: rotate must be"):
        npu_rotary_mul(x, factor, factor, rotate=torch.ones(3, 3))


# ---------------------------------------------------------------------------- modes of torch


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_without_gradients(mode: Callable[[], torch.no_grad]) -> None:
    x, gamma = numbers(3, 4), numbers(4, seed=1)
    with mode():
        found = (npu_swiglu(x), npu_rms_norm(x, gamma)[0], npu_rotary_mul(x, gamma, gamma), npu_clipped_swiglu(x))
    wanted = (npu_swiglu(x), npu_rms_norm(x, gamma)[0], npu_rotary_mul(x, gamma, gamma), npu_clipped_swiglu(x))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_autocast_changes_nothing() -> None:
    x, rotate = numbers(3, 4), numbers(4, 4, seed=1)
    wanted = npu_rotary_mul(x, x, x, rotate=rotate)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(npu_rotary_mul(x, x, x, rotate=rotate), wanted)
