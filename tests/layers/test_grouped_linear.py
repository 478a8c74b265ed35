"""The product of segments of rows with a weight each: derivatives, strides, dtypes."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moeroute.nn import Experts, grouped_linear
from moeroute.ops import experts
from small_layers import Watch

SIZES = [[3], [2, 1], [0, 3], [1, 0, 4], [0, 0], [5]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_linear_derivatives(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(sizes), 4, 3, generator=generator, dtype=torch.float64, requires_grad=True)

    def function(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_linear(rows, weight, sizes)

    expected = torch.zeros(5, 4, dtype=torch.float64)
    expert_of_row = [e for e, size in enumerate(sizes) for _ in range(size)]
    for row, expert in enumerate(expert_of_row):
        expected[row] = weight[expert] @ rows[row]
    torch.testing.assert_close(function(rows, weight), expected)
    torch.autograd.gradcheck(function, (rows, weight))
    torch.autograd.gradgradcheck(function, (rows, weight))

    bias = torch.randn(len(sizes), 4, generator=generator, dtype=torch.float64, requires_grad=True)
    for row, expert in enumerate(expert_of_row):
        expected[row] += bias[expert]

    def of_stored(rows: Tensor, stored: Tensor, bias: Tensor) -> Tensor:
        return grouped_linear(rows, stored.transpose(1, 2), sizes, bias)

    stored = weight.detach().transpose(1, 2).contiguous().requires_grad_()  # [E, I, O]
    torch.testing.assert_close(of_stored(rows, stored, bias), expected)
    torch.autograd.gradcheck(of_stored, (rows, stored, bias))
    torch.autograd.gradgradcheck(of_stored, (rows, stored, bias))


@pytest.mark.parametrize("sizes", [[3], [2, 1], [0, 3], [0, 0]], ids=str)
def test_rows_beyond_the_segments_are_never_read(sizes: list[int]) -> None:
    # B164: with one group of three in a buffer of five, the two spare rows got into the weight's gradient.
    live = sum(sizes)
    rows, grad = torch.randn(5, 3), torch.randn(5, 4)
    weight, bias = torch.randn(len(sizes), 4, 3), torch.randn(len(sizes), 4)
    results = []
    for poison in (float("nan"), 7.0):
        rows[live:], grad[live:] = poison, poison
        leaves = tuple(t.clone().requires_grad_() for t in (rows, weight, bias))
        output = grouped_linear(leaves[0], leaves[1], sizes, leaves[2])
        grad_rows, grad_weight, grad_bias = torch.autograd.grad(output, leaves, grad)
        torch.testing.assert_close(output[live:], torch.zeros(5 - live, 4), rtol=0, atol=0)
        torch.testing.assert_close(grad_rows[live:], torch.zeros(5 - live, 3), rtol=0, atol=0)
        results.append((output, grad_rows, grad_weight, grad_bias))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    start = 0
    for expert, size in enumerate(sizes):
        stop = start + size
        expected = grad[start:stop].T @ rows[start:stop]
        torch.testing.assert_close(results[0][2][expert], expected, rtol=0, atol=0)
        torch.testing.assert_close(results[0][3][expert], grad[start:stop].sum(0))
        start = stop


@pytest.mark.parametrize("transform", ("grad", "jacrev", "jacfwd", "hessian"))
def test_grouped_linear_under_torch_func(transform: str) -> None:
    torch.manual_seed(0)
    tensors = torch.randn(6, 4).double(), torch.randn(3, 5, 4).double(), torch.randn(3, 5).double()
    change = getattr(torch.func, transform)

    def plain(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([rows[:2] @ weight[0].T + bias[0], rows[2:5] @ weight[2].T + bias[2]]).sin().sum()

    def ours(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return grouped_linear(rows, weight, [2, 0, 3], bias).sin().sum()

    torch.testing.assert_close(change(ours, (0, 1, 2))(*tensors), change(plain, (0, 1, 2))(*tensors))
    if transform == "grad":
        several = torch.randn(2, 6, 4).double()
        per_sample = [
            torch.func.vmap(change(f, (0, 1, 2)), in_dims=(0, None, None))(several, *tensors[1:]) for f in (ours, plain)
        ]
        torch.testing.assert_close(*per_sample)
        pulled = torch.func.vjp(ours, *tensors)[1](torch.ones(()).double())
        torch.testing.assert_close(pulled, change(plain, (0, 1, 2))(*tensors))


def test_grouped_operators_pass_opcheck() -> None:
    rows = torch.randn(5, 3, requires_grad=True)
    sizes = torch.tensor([2, 0, 3])
    weight, bias = torch.randn(3, 4, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.moeroute.grouped_linear.default, (rows, weight, sizes, None))
    swapped = torch.randn(3, 3, 4).mT.requires_grad_()
    torch.library.opcheck(torch.ops.moeroute.grouped_linear.default, (rows, swapped, sizes, bias))
    torch.library.opcheck(
        torch.ops.moeroute.grouped_outer.default, (rows, torch.randn(5, 2, requires_grad=True), sizes)
    )


def test_grouped_linear_takes_any_strides() -> None:
    rows, weight, sizes = torch.randn(4, 5), torch.randn(3, 6, 4), [2, 1, 1]
    expected = grouped_linear(rows.T[:4].contiguous(), weight.contiguous(), sizes)
    torch.testing.assert_close(grouped_linear(rows.T[:4], weight, sizes), expected)
    swapped = weight.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(grouped_linear(rows.T[:4], swapped, sizes), expected)
    parameter = weight.clone().requires_grad_()
    (got,) = torch.autograd.grad(grouped_linear(rows.T[:4], parameter, sizes).sum(), parameter)  # expanded gradient
    torch.testing.assert_close(got[0], rows.T[:2].sum(0).expand(6, 4))


def test_forward_mode_has_the_right_tangents() -> None:
    # A registered operator without a formula for them would say zero.
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    bias = torch.zeros(2, 4, dtype=torch.float64)

    def function(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_linear(rows, weight, [3, 1], bias).sin()

    primals, tangents = (rows, weight), (rows.cos(), weight.cos())
    got = torch.func.jvp(function, primals, tangents)[1]
    expected = torch.cat((rows[:3] @ weight[0].T, rows[3:4] @ weight[1].T, torch.zeros(1, 4, dtype=torch.float64)))
    change = torch.cat((
        rows[:3].cos() @ weight[0].T + rows[:3] @ weight[0].cos().T,
        rows[3:4].cos() @ weight[1].T + rows[3:4] @ weight[1].cos().T,
        torch.zeros(1, 4, dtype=torch.float64),
    ))  # fmt: skip
    torch.testing.assert_close(got, expected.cos() * change)
    # Forward over reverse, and forward over a backward pass that was recorded before.
    hessian = torch.func.jacfwd(torch.func.jacrev(lambda r: function(r, weight).sum()))(rows)
    leaf = rows.clone().requires_grad_()
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(lambda r: function(r, weight).sum(), leaf))
    parameter = weight.clone().requires_grad_()
    output = grouped_linear(leaf, parameter, [3, 1])
    with torch.autograd.forward_ad.dual_level():
        grad = torch.autograd.forward_ad.make_dual(torch.ones(5, 4).double(), expected)
        for found, like in zip(
            torch.autograd.grad(output, (leaf, parameter), grad, retain_graph=True),
            torch.autograd.grad(output, (leaf, parameter), expected, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(found).tangent, like)


def test_vmap_works_slowly() -> None:
    rows, weight = torch.randn(2, 5, 3), torch.randn(2, 4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loops
        got = torch.func.vmap(lambda r: grouped_linear(r, weight, [3, 1]))(rows)
    torch.testing.assert_close(got, torch.stack([grouped_linear(r, weight, [3, 1]) for r in rows]))


def test_weights_are_not_copied_and_have_one_gradient() -> None:
    # 64 experts, 8 rows. weight[e] in a loop would make a zero gradient of all experts for each of them.
    rows = torch.randn(8, 16, requires_grad=True)
    weight = torch.randn(64, 16, 16, requires_grad=True)
    sizes = [1] * 8 + [0] * 56
    nbytes = weight.untyped_storage().nbytes()
    with Watch() as forward:
        output = grouped_linear(rows, weight, sizes)
    assert max(forward.fresh) < nbytes / 8
    with Watch() as backward:
        output.backward(torch.ones_like(output))
    assert sum(size >= nbytes / 8 for size in backward.fresh) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_transposed_weight_lies_as_the_weight_does(dtype: torch.dtype) -> None:
    # A gradient of other strides than its parameter's is copied when autograd keeps it: one more of that size.
    rows = torch.randn(8, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(64, 16, 32, dtype=dtype, requires_grad=True)  # [E, I, O]
    with Watch() as watch:
        grouped_linear(rows, weight.transpose(1, 2), [1] * 8 + [0] * 56).sum().backward()
    assert sum(size >= weight.untyped_storage().nbytes() for size in watch.fresh) == 1
    assert weight.grad is not None
    assert weight.grad.is_contiguous()
    for expert in range(9):
        expected = rows[expert, :, None].expand(16, 32) if expert < 8 else torch.zeros(16, 32, dtype=dtype)
        torch.testing.assert_close(weight.grad[expert], expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_is_rounded_with_the_product(dtype: torch.dtype) -> None:
    """As by `torch.nn.functional.linear`; its gradient adds up without the half type's rounding of each term."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randn(300, 24, generator=generator).to(dtype),
        torch.randn(2, 5, 24, generator=generator).to(dtype),
    )
    bias = (8 * torch.randn(2, 5, generator=generator)).to(dtype).requires_grad_()
    output = grouped_linear(rows, weight, [100, 200], bias)
    exact = torch.cat([
        rows[:100].double() @ weight[0].double().T + bias[0].double(),
        rows[100:].double() @ weight[1].double().T + bias[1].double(),
    ])  # fmt: skip
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), exact, rtol=eps / 2 * 1.01, atol=50 * 2**-24)
    grad = torch.randn(300, 5, generator=generator).to(dtype)
    (got,) = torch.autograd.grad(output, bias, grad)
    expected = torch.stack([grad[:100].double().sum(0), grad[100:].double().sum(0)])
    torch.testing.assert_close(got.double(), expected, rtol=eps / 2 * 1.01, atol=1e-4)


def test_grouped_linear_in_autocast() -> None:
    rows, weight = torch.randn(4, 6), torch.randn(2, 5, 6, requires_grad=True)
    bias = torch.randn(2, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = grouped_linear(rows, weight, [1, 3], bias)
        like = nn.functional.linear(rows[1:], weight[1], bias[1])
    assert output.dtype == like.dtype == torch.bfloat16
    torch.testing.assert_close(output[1:], like)
    output.float().sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert weight.grad.dtype == bias.grad.dtype == torch.float32
    torch.testing.assert_close(bias.grad, torch.tensor([[1.0], [3.0]]).expand(2, 5))


# ---------------------------------------------------------------------------- by torch's grouped_mm, as on a GPU


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that bfloat16 takes on a CUDA device, for tensors of the CPU, on which torch has that product too."""
    if not hasattr(nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    monkeypatch.setattr(experts, "by_ends", lambda sizes, rows, *widths: all(width % 8 == 0 for width in widths))
    monkeypatch.setattr(experts, "_has_grouped_mm", lambda device: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [[3, 0, 9, 4], [0, 0, 0, 0], [16, 0, 0, 0], [0, 5, 5, 0], [20, 0, 0, 0]], ids=str)
def test_grouped_mm_gives_the_loop_s_results(sizes: list[int], transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, grad = (torch.randn(20, 16, generator=generator).bfloat16() for _ in range(2))
    weight, bias = (
        torch.randn(4, 16, 16, generator=generator).bfloat16(),
        torch.randn(4, 16, generator=generator).bfloat16(),
    )
    live = sum(sizes)
    rows[live:], grad[live:] = torch.nan, torch.nan
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = tuple(
            t.to(dtype).requires_grad_() for t in (rows, weight.mT.contiguous() if transposed else weight, bias)
        )
        stored = leaves[1].mT if transposed else leaves[1]
        if dtype == torch.bfloat16:
            output = grouped_linear(leaves[0], stored, torch.tensor(sizes), leaves[2])
        else:
            expert = [e for e, size in enumerate(sizes) for _ in range(size)]
            output = torch.zeros(20, 16, dtype=dtype)
            output[:live] = (stored[expert] @ leaves[0][:live, :, None]).squeeze(-1) + leaves[2][expert]
        results.append((output, *torch.autograd.grad(output[:live], leaves, grad[:live].to(dtype))))
    for got, expected in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=5e-2)
    assert results[0][2].stride() == weight.stride()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_grouped_mm_of_sizes_that_nobody_looked_at() -> None:
    """Negative ones count as 0, and segments end at the last row."""
    rows, weight = torch.randn(8, 8).bfloat16(), torch.randn(3, 8, 8).bfloat16()
    got = grouped_linear(rows, weight, torch.tensor([3, -2, 2**40]))
    torch.testing.assert_close(got, grouped_linear(rows, weight, torch.tensor([3, 0, 5])), rtol=0, atol=0)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_grouped_mm_takes_any_strides() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(16, 40, generator=generator).bfloat16()
    stack = torch.randn(3, 8, 2, 16, generator=generator).bfloat16()
    sizes = torch.tensor([5, 2, 6])
    for rows in (wide[:, :16], wide[:, 3:19], wide[:, ::2][:, :16], wide[:, :1].expand(16, 16), wide[:16, :16].t()):
        for weight in (
            stack[:, :, 0],
            stack[..., 0, :].contiguous().mT.contiguous().mT,
            stack[:, :, 1].expand(3, 8, 16),
        ):
            got = grouped_linear(rows, weight, sizes)
            expected = grouped_linear(rows.contiguous(), weight.contiguous(), sizes)
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            assert got.isfinite().all()


class Questions(TorchDispatchMode):
    """Operators that wait for the device, or bring something to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "_local_scalar_dense" in str(func) or getattr(result, "device", torch.device("cuda")).type == "cpu":
            self.found.append(str(func))
        return result


def test_nothing_waits_for_a_gpu_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data, which cannot be read; the derivatives are the same two operators."""
    monkeypatch.setattr(experts, "_has_grouped_mm", lambda device: True)
    with FakeTensorMode(), torch.no_grad():  # autograd would ask for the device's streams
        rows = torch.empty(20, 16, device="cuda", dtype=torch.bfloat16)
        weight, bias = torch.empty(4, 24, 16, device="cuda", dtype=torch.bfloat16), rows.new_empty(4, 24)
        sizes = torch.empty(4, device="cuda", dtype=torch.int64)
        with Questions() as questions:
            output = experts._grouped_linear_kernel(rows, weight, sizes, bias)
            grad = experts._grouped_outer_kernel(output, rows, sizes)
            layer = Experts(4, 16, 24, device="cuda", dtype=torch.bfloat16)
            layer(rows, sizes)
    assert questions.found == []
    assert output.shape == (20, 24)
    assert grad.shape == (4, 24, 16)
    with (
        FakeTensorMode(),
        torch.no_grad(),
        Questions() as questions,
    ):  # the question is a good one: float32 goes by the loop
        Experts(4, 16, 24, device="cuda")(
            torch.empty(20, 16, device="cuda"), torch.empty(4, device="cuda", dtype=torch.int64)
        )
    assert questions.found
