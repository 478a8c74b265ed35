"""The layer against a loop over single tokens in float64, every gradient by name."""

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moeroute.nn import Experts, MoE, Router, Routing, SwiGLU, grouped_linear
from moeroute.ops.balance import load_balancing_loss, router_z_loss, update_expert_bias
from moeroute.ops.router_product import router_product

SIZES = [[3], [2, 1], [0, 3], [1, 0, 4], [0, 0], [5]]
HIDDEN, INTERMEDIATE, EXPERTS, K = 6, 5, 4, 2
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors, and a machine that may be busy."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


def make_layer(dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> MoE:
    """A small layer whose weights are large enough to matter."""
    torch.manual_seed(seed)
    layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, **{"k": K, **options}).to(torch.float64)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.7)
    return layer.to(dtype)


def make_input(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def naive_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (gate * torch.sigmoid(gate) * up)


def naive_layer(
    weights: dict[str, Tensor],
    x: Tensor,
    expert_ids: Tensor,
    score: str,
    renormalize: bool,
    scaling_factor: float = 1.0,
) -> Tensor:
    """One token after the other, in the dtype of the weights; expert_ids [T, K] from elsewhere, -1 skipped."""
    outputs = []
    for t in range(x.shape[0]):
        logits = weights["router.weight"] @ x[t]
        chosen = [int(e) for e in expert_ids[t] if e >= 0]
        if score == "softmax":
            scores = logits.exp() / logits.exp().sum()
        elif score == "topk_softmax":
            scores = logits.exp() / sum(logits[e].exp() for e in chosen)
        elif score == "sigmoid":
            scores = 1 / (1 + (-logits).exp())
        else:
            scores = (1 + logits.exp()).log().sqrt()
        total = sum(scores[e] for e in chosen) if renormalize else 1.0
        output = torch.zeros_like(x[t])
        for e in chosen:
            row = naive_mlp(x[t], weights["experts.gate_up_proj"][e], weights["experts.down_proj"][e])
            output = output + scaling_factor * scores[e] / total * row
        if "shared_expert.gate_up_proj.weight" in weights:
            shared = weights["shared_expert.gate_up_proj.weight"], weights["shared_expert.down_proj.weight"]
            output = output + naive_mlp(x[t], *shared)
        outputs.append(output)
    return torch.stack(outputs)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Relative to the largest expected value; small ones beside it are differences of large ones."""
    scale = float(expected.detach().abs().max())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.double() / scale, expected / scale, rtol=0, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


class Watch(TorchDispatchMode):
    """Storage sizes of what operators return, in bytes; views and in-place results are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            a.untyped_storage().data_ptr()
            for a in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(a, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.fresh.append(tensor.untyped_storage().nbytes())
        return result


# ---------------------------------------------------------------------------- grouped_linear


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


def test_a_dtype_that_is_not_the_layers_is_named() -> None:
    """The layer and what it was given, and not the weight of some product inside."""
    x = torch.zeros(4, 8)
    for module, argument, arguments in (
        (MoE(8, 16, 4, 2, dtype=torch.float32), "x", ()),
        (Experts(4, 8, 16, dtype=torch.float32), "rows", ([1, 1, 1, 1],)),
        (SwiGLU(8, 16, dtype=torch.float32), "x", ()),
    ):
        name = f"nn.{type(module).__name__}"
        for dtype in (torch.bfloat16, torch.float64):
            wanted = f"moeroute.{name}: {argument} must be torch.float32, as the layer's weights; got {dtype}"
            with pytest.raises(TypeError, match=f"^{re.escape(wanted)}$"):
                module(x.to(dtype), *arguments)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert module(x.bfloat16(), *arguments).dtype is torch.bfloat16
            with pytest.raises(TypeError, match=r"got torch\.float64"):
                module(x.double(), *arguments)
    layer = MoE(8, 16, 4, 2, dtype=torch.bfloat16)
    layer.router.float()  # a router of its own dtype is nobody's mistake
    assert layer(x.bfloat16()).dtype is torch.bfloat16


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


@pytest.mark.filterwarnings("ignore:.*compiled|.*vmap:UserWarning")
def test_layer_under_torch_func() -> None:
    """Gradients of functional_call, for the batch and for each sample: those of autograd."""
    torch.manual_seed(0)
    layer = MoE(8, 16, 4, 2, shared_expert=SwiGLU(8, 16)).double()
    parameters = dict(layer.named_parameters())
    samples = torch.randn(3, 5, 8).double()

    def loss(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(parameters), (x,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, samples)
    for i, x in enumerate(samples):
        loss(parameters, x).backward()
        gradient = torch.func.grad(loss)(parameters, x)
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(gradient[name], parameter.grad)
            torch.testing.assert_close(per_sample[name][i], parameter.grad)
        layer.zero_grad()


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


# ---------------------------------------------------------------------------- the layer


SCORES = [
    ("softmax", False),
    ("softmax", True),
    ("topk_softmax", False),
    ("sigmoid", False),
    ("sigmoid", True),
    ("sqrtsoftplus", True),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("score", "renormalize"), SCORES)
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_against_a_loop_over_tokens(score: str, renormalize: bool, shared: bool, dtype: torch.dtype) -> None:
    layer = make_layer(
        dtype,
        score=score,
        renormalize=renormalize,
        scaling_factor=1.5,
        shared_expert=SwiGLU(HIDDEN, 3) if shared else None,
    )
    x = make_input(3, 4, dtype=dtype).requires_grad_()
    output, routing = layer(x, return_routing=True)
    assert output.shape == x.shape
    assert output.dtype == dtype
    assert routing.logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)

    wide = {name: weight.detach().double().requires_grad_() for name, weight in layer.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    tokens = wide_x.reshape(-1, HIDDEN)
    ids = routing.gating.expert_ids
    logits = tokens @ wide["router.weight"].T
    torch.testing.assert_close(ids.long().sort().values, logits.topk(K).indices.sort().values)  # scores are monotone
    expected = naive_layer(wide, tokens, ids, score, renormalize, 1.5).reshape(x.shape)
    assert_near(output, expected, dtype, "output")

    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype)
    names = ["x", *wide]
    got = torch.autograd.grad(output, [x, *layer.parameters()], grad)
    exact = torch.autograd.grad(expected, [wide_x, *wide.values()], grad.double())
    for name, actual, wanted in zip(names, got, exact, strict=True):
        assert_near(actual, wanted, dtype, f"gradient of {name}")


def test_losses_of_the_routing() -> None:
    for score in ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"):
        layer = make_layer(torch.float64, score=score)
        x = make_input(9, dtype=torch.float64)
        mask = torch.arange(9) >= 7
        _, routing = layer(x, padding_mask=mask, return_routing=True)
        logits = x @ layer.router.weight.T
        if score == "sigmoid":
            probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        elif score == "sqrtsoftplus":
            root = logits.exp().log1p().sqrt()
            probabilities = root / root.sum(-1, keepdim=True)
        else:
            probabilities = logits.softmax(-1)
        ids = logits.topk(K).indices
        torch.testing.assert_close(
            routing.statistics().loss(),
            load_balancing_loss(probabilities[:7], ids[:7]),
            msg=partial("{}: {}".format, score),
        )
        torch.testing.assert_close(routing.z_loss(), router_z_loss(logits[:7]))
        got = torch.autograd.grad(routing.statistics().loss() + routing.z_loss(), layer.router.weight)
        wanted = torch.autograd.grad(
            load_balancing_loss(probabilities[:7], ids[:7]) + router_z_loss(logits[:7]), layer.router.weight
        )
        torch.testing.assert_close(got, wanted, msg=partial("{}: {}".format, score))


def test_second_derivatives_of_the_layer() -> None:
    layer = make_layer(torch.float64)
    x = make_input(5, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(layer, (x,))
    torch.autograd.gradgradcheck(layer, (x,))


def test_forward_mode_of_the_layer() -> None:
    layer = make_layer(torch.float64)
    x, direction = make_input(5, dtype=torch.float64), make_input(5, dtype=torch.float64, seed=9)
    tangent = torch.func.jvp(layer, (x,), (direction,))[1]
    jacobian = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(tangent, torch.einsum("thuk,uk->th", jacobian, direction))


def test_input_is_unchanged() -> None:
    # B118: noise or scaling written into the hidden states.
    layer = make_layer().train()
    x = make_input(7)
    before = x.clone()
    layer(x)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_identical_experts_equal_a_dense_mlp() -> None:
    # B38: eight equal experts, weights 1/8 each. The sum of eight exact eighths rounds once: the same bits.
    torch.manual_seed(0)
    layer = MoE(64, 32, num_experts=8, k=8).bfloat16()
    dense = SwiGLU(64, 32).bfloat16()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.experts.gate_up_proj.copy_(dense.gate_up_proj.weight.expand(8, -1, -1))
        layer.experts.down_proj.copy_(dense.down_proj.weight.expand(8, -1, -1))
        x = torch.randn(16, 64, dtype=torch.bfloat16)
        torch.testing.assert_close(layer(x), dense(x), rtol=0, atol=0)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    # B166, for the part that is routing: experts that are no matrix product, 64-aligned segments.
    layer = make_layer(align=64, k=3)
    layer.experts.forward = lambda rows, rows_per_expert: rows * 3  # type: ignore[method-assign]
    shared = make_input(1)
    first = layer(torch.cat((shared, make_input(3, seed=2))))
    second = layer(torch.cat((make_input(70, seed=3), shared)))
    alone, routing = layer(shared, return_routing=True)
    torch.testing.assert_close(first[0], alone[0], rtol=0, atol=0)
    torch.testing.assert_close(second[-1], alone[0], rtol=0, atol=0)
    assert all(rows in (0, 64) for rows in routing.plan.rows_per_expert.tolist())


def test_aligned_segments_train_alike() -> None:
    x = make_input(9, dtype=torch.float64)
    results = []
    for align in (1, 4):
        layer = make_layer(torch.float64, align=align)
        output = layer(x)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (2, 3, 4)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    layer = make_layer()
    x = make_input(*shape).requires_grad_()
    output = layer(x)
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_padding_takes_no_rows_and_no_capacity() -> None:
    # B100: four tokens to one expert with capacity 1; tokens 0 and 2 are padding. B82: the loss counts before drops.
    layer = MoE(HIDDEN, INTERMEDIATE, num_experts=2, k=1, capacity_factor=0.5)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, HIDDEN))
    x = torch.ones(4, HIDDEN)
    mask = torch.tensor([True, False, True, False])
    output, routing = layer(x, padding_mask=mask, return_routing=True)
    torch.testing.assert_close(routing.plan.tokens_per_expert, torch.tensor([1, 0]))
    torch.testing.assert_close(routing.plan.row_of_slot, torch.tensor([-1, 0, -1, -1], dtype=torch.int32))
    assert routing.plan.num_rows == 1
    torch.testing.assert_close(routing.statistics().tokens_per_expert, torch.tensor([2, 0]))
    assert [bool(row.any()) for row in output] == [False, True, False, False]


def test_padding_mask_of_a_batch() -> None:
    layer = make_layer(shared_expert=SwiGLU(HIDDEN, 3))
    x = make_input(2, 3)
    mask = torch.tensor([[False, False, True], [False, True, True]])
    output = layer(x, padding_mask=mask)
    torch.testing.assert_close(output[~mask], layer(x[~mask]))
    torch.testing.assert_close(output[mask], torch.zeros(3, HIDDEN))  # the shared expert's share is cut too


def test_capacity_factor_is_exact() -> None:
    # B98: 100 * 1.1 / 10 is 11 rows, not 12.
    layer = MoE(HIDDEN, INTERMEDIATE, num_experts=10, k=1, capacity_factor=1.1)
    with torch.no_grad():
        layer.router.weight.zero_()  # a tie: all to expert 0
    for drop in ("position", "weight"):
        layer.drop = drop
        _, routing = layer(make_input(100), return_routing=True)
        torch.testing.assert_close(routing.plan.tokens_per_expert[:2], torch.tensor([11, 0]))


def test_replay() -> None:
    layer = make_layer(torch.float64, renormalize=True)
    x = make_input(2, 3, dtype=torch.float64)
    expert_ids = torch.tensor([[[0, 1, 3], [2, -1, 0], [1, 2, 4]], [[3, 2, 1], [0, 3, -1], [1, 0, 2]]])
    output, routing = layer(x, expert_ids=expert_ids, return_routing=True)
    ids = torch.where(expert_ids < EXPERTS, expert_ids, -1).reshape(-1, 3)
    torch.testing.assert_close(routing.gating.expert_ids, ids.int())
    wide = {name: weight.detach().double().requires_grad_() for name, weight in layer.named_parameters()}
    expected = naive_layer(wide, x.reshape(-1, HIDDEN), ids, "softmax", True).reshape(x.shape)
    torch.testing.assert_close(output, expected)
    got = torch.autograd.grad(output.sum(), [*layer.parameters()])
    exact = torch.autograd.grad(expected.sum(), [*wide.values()])
    for name, actual, wanted in zip(wide, got, exact, strict=True):
        torch.testing.assert_close(actual, wanted, msg=partial("{}: {}".format, name))


# ---------------------------------------------------------------------------- a citizen of PyTorch


def test_checkpointing_counts_once() -> None:
    # B41: six tokens, two experts each: twelve slots, recomputed or not.
    layer = make_layer()
    x = make_input(6).requires_grad_()

    def losses(call: Callable[..., Any]) -> tuple[Routing, list[Tensor]]:
        output, routing = call(lambda x: layer(x, return_routing=True))
        loss = output.square().sum() + routing.statistics().loss() + routing.z_loss()
        return routing, list(torch.autograd.grad(loss, [x, *layer.parameters()]))

    routing, gradients = losses(lambda f: f(x))
    again, recomputed = losses(lambda f: checkpoint(f, x, use_reentrant=False))
    assert again.statistics().tokens_per_expert.sum() == 12
    torch.testing.assert_close(again.plan.row_of_slot, routing.plan.row_of_slot, rtol=0, atol=0)
    torch.testing.assert_close(recomputed, gradients, rtol=0, atol=0)
    assert set(layer.state_dict()) == {"router.weight", "experts.gate_up_proj", "experts.down_proj"}


def test_reentrant_checkpointing() -> None:
    layer = make_layer()
    gradients = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=True)):
        x = make_input(6).requires_grad_()
        layer.zero_grad()
        call(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_expert_bias_stays_float32() -> None:
    # B77: rounded to bfloat16, ten steps of 1e-3 from 1.0 stay at 1.0.
    values = torch.tensor([1.001, 0.0, -0.003, 0.5])
    for cast in (
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double().bfloat16(),
        lambda m: copy.deepcopy(m.half()),
        lambda m: nn.Sequential(m).bfloat16()[0],
    ):
        layer = make_layer(expert_bias=True, score="sigmoid")
        bias = layer.router.expert_bias
        assert bias is not None
        bias.copy_(values)
        layer = cast(layer)  # type: ignore[assignment]
        bias = layer.router.expert_bias
        assert bias is not None
        assert layer.router.weight.dtype in (torch.bfloat16, torch.float16)
        if bias.dtype == torch.float64:  # asked for by .double()
            bias = bias.float()
        torch.testing.assert_close(bias, values, rtol=0, atol=0)
        for _ in range(10):
            bias = update_expert_bias(bias, torch.tensor([0, 1, 1, 2]))
        torch.testing.assert_close(bias[0], torch.tensor(1.011))
        x = make_input(8, dtype=layer.router.weight.dtype)
        assert layer(x).dtype == x.dtype
    built = MoE(HIDDEN, INTERMEDIATE, EXPERTS, K, expert_bias=True, dtype=torch.bfloat16)
    assert built.router.expert_bias is not None
    assert built.router.expert_bias.dtype == torch.float32


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_expert_bias_stays_float32_whoever_changes_it(dtype: torch.dtype) -> None:
    values = torch.tensor([1.001, -0.3, 0.7, 0.0])
    rounded = {name: t.to(dtype) for name, t in make_layer(expert_bias=True, score="sigmoid").state_dict().items()}
    for given in (values, values.to(dtype)):
        for assign in (False, True):
            with torch.device("meta" if assign else "cpu"):
                layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, K, expert_bias=True, score="sigmoid")
            layer.load_state_dict({**rounded, "router.expert_bias": given.clone()}, assign=assign)
            bias = layer.router.expert_bias
            assert bias is not None
            assert bias.dtype is torch.float32
            torch.testing.assert_close(bias, given.float(), rtol=0, atol=0)
    layer = make_layer(expert_bias=True, score="sigmoid")
    for buffer in layer.buffers():  # FSDP1 with a buffer_dtype
        buffer.data = buffer.data.to(dtype)
    layer(make_input(5)).sum().backward()
    bias = layer.router.expert_bias
    assert bias is not None
    assert bias.dtype is torch.float32
    for _ in range(10):
        bias.copy_(update_expert_bias(bias, torch.tensor([0, 1, 1, 2])))
    torch.testing.assert_close(bias[0], torch.tensor(0.01))


@pytest.fixture(params=("high", "medium", "tf32", "bf16"))
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """How torch multiplies float32, by its older setting and its newer one."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    if request.param in ("high", "medium"):
        torch.set_float32_matmul_precision(request.param)
    else:
        matmul.fp32_precision = request.param
    yield request.param
    matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def test_no_precision_of_products_changes_the_experts(precision: str) -> None:
    """Logits so close that TF32 and bfloat16 cannot tell them apart: exact, rounded once."""
    torch.manual_seed(0)
    router = Router(256, 64, 8)
    tokens = torch.randn(512, 256)
    with torch.no_grad():
        router.weight[1::2] = router.weight[::2] * (1 + 2e-5)
    exact = tokens.double() @ router.weight.detach().double().T
    scores, order = exact.softmax(1).sort(dim=1, descending=True)
    clear = (scores[:, :8] / scores[:, 1:9]).amin(1) > 1 + 3e-6  # beyond what float32 scores are rounded by
    assert clear.sum() > 100
    for route in (router, torch.compile(router, backend="aot_eager", fullgraph=True)):
        gating, logits = route(tokens)
        torch.testing.assert_close(logits, exact.float(), rtol=0, atol=0)
        torch.testing.assert_close(gating.expert_ids[clear], order[clear, :8].int())
    half, tokens = Router(256, 64, 8).bfloat16(), tokens.bfloat16()  # there is nothing to cut
    torch.testing.assert_close(half(tokens)[1], (tokens.double() @ half.weight.double().T).float())


def test_router_product_has_every_derivative() -> None:
    torch.manual_seed(0)
    tokens, weight = torch.randn(4, 3).double().requires_grad_(), torch.randn(5, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(router_product, (tokens, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(router_product, (tokens, weight))
    torch.library.opcheck(torch.ops.moeroute.router_product, (tokens, weight))
    for dtype in (torch.bfloat16, torch.float16):
        mine = tokens.detach().to(dtype).requires_grad_(), weight.detach().float().requires_grad_()
        others = tuple(t.detach().clone().requires_grad_() for t in mine)
        router_product(*mine).square().sum().backward()
        (others[0].float() @ others[1].T).square().sum().backward()
        torch.testing.assert_close([t.grad for t in mine], [t.grad for t in others])


def test_expert_bias_counts_for_the_selection_only() -> None:
    layer = make_layer(expert_bias=True, score="sigmoid", renormalize=False)
    assert layer.router.expert_bias is not None
    layer.router.expert_bias.copy_(torch.tensor([-9.0, 9.0, -9.0, 9.0]))
    x = make_input(5)
    _, routing = layer(x, return_routing=True)
    chosen = routing.gating.expert_ids.long()
    torch.testing.assert_close(chosen.sort().values, torch.tensor([[1, 3]]).expand(5, 2))
    torch.testing.assert_close(routing.gating.weights, (x @ layer.router.weight.T).sigmoid().gather(1, chosen))


def test_top_1_with_constant_weights_warns() -> None:
    # B16: the softmax over one chosen expert is 1 whatever the logits; the router would never learn.
    for options in ({"score": "topk_softmax"}, {"score": "softmax", "renormalize": True}, {"score": "sigmoid"}):
        with pytest.warns(UserWarning, match="k=1 .* the weight is the constant 1"):
            layer = make_layer(k=1, **options)
        layer(make_input(5)).sum().backward()
        torch.testing.assert_close(layer.router.weight.grad, torch.zeros(EXPERTS, HIDDEN))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = make_layer(k=1)
        make_layer(k=1, score="sigmoid", renormalize=False)
        make_layer(k=2, score="topk_softmax")
    layer(make_input(5)).sum().backward()
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.abs().max() > 0


def test_autocast() -> None:
    layer = make_layer(shared_expert=SwiGLU(HIDDEN, 3))
    x = make_input(20)
    plain, expected = layer(x, return_routing=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, routing = layer(x, return_routing=True)
    assert output.dtype == torch.bfloat16
    assert_near(output, plain.detach().double(), torch.bfloat16, "output")
    # The router keeps out of it: the same bits as without autocast.
    torch.testing.assert_close(routing.logits, expected.logits, rtol=0, atol=0)
    torch.testing.assert_close(routing.gating.expert_ids, expected.gating.expert_ids)
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_state_dict_and_deferred_weights() -> None:
    layer = make_layer(expert_bias=True, shared_expert=SwiGLU(HIDDEN, 3))
    names = {
        "router.weight": (EXPERTS, HIDDEN),
        "router.expert_bias": (EXPERTS,),
        "experts.gate_up_proj": (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        "experts.down_proj": (EXPERTS, HIDDEN, INTERMEDIATE),
        "shared_expert.gate_up_proj.weight": (6, HIDDEN),
        "shared_expert.down_proj.weight": (HIDDEN, 3),
    }
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == names
    with torch.device("meta"):
        deferred = MoE(HIDDEN, INTERMEDIATE, EXPERTS, K, expert_bias=True, shared_expert=SwiGLU(HIDDEN, 3))
    assert deferred.router.weight.is_meta
    loaded = deferred.to_empty(device="cpu")
    loaded.load_state_dict(layer.state_dict())
    x = make_input(4)
    torch.testing.assert_close(loaded(x), layer(x), rtol=0, atol=0)


def test_first_weights() -> None:
    torch.manual_seed(0)
    layer = MoE(64, 96, num_experts=8, k=2, expert_bias=True, shared_expert=SwiGLU(64, 96))
    for name, weight in layer.named_parameters():
        assert 0.018 < weight.std().item() < 0.022, name
    assert layer.router.expert_bias is not None
    assert not layer.router.expert_bias.any()
    torch.manual_seed(0)
    same = MoE(64, 96, num_experts=8, k=2, expert_bias=True, shared_expert=SwiGLU(64, 96))
    torch.testing.assert_close(list(same.parameters()), list(layer.parameters()), rtol=0, atol=0)


def test_deterministic_algorithms_and_inference_mode() -> None:
    layer = make_layer()
    x = make_input(6)
    expected = layer(x)
    torch.use_deterministic_algorithms(True)
    try:
        output = layer(x)
        output.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)


def test_output_may_be_changed_in_place() -> None:
    layer = make_layer()
    gradients = []
    for change in (lambda y: y * 2, lambda y: y.mul_(2)):
        layer.zero_grad()
        change(layer(make_input(2, 3))).square().sum().backward()
        gradients.append([p.grad for p in layer.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compile stack
@pytest.mark.parametrize("capacity_factor", [None, 1.25])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool, capacity_factor: float | None) -> None:
    layer = make_layer(shared_expert=SwiGLU(HIDDEN, 3), capacity_factor=capacity_factor)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for num_tokens in (6, 9):
        x = make_input(num_tokens)
        output, expected = compiled(x), layer(x)
        torch.testing.assert_close(output, expected)
        got = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
        wanted = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
        torch.testing.assert_close(got, wanted)


def test_it_learns() -> None:
    torch.manual_seed(0)
    layer = MoE(8, 16, num_experts=4, k=2, renormalize=True)
    x = torch.randn(64, 8)
    target = torch.where(x[:, :1] > 0, x, -2 * x)
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-2)
    losses = []
    for _ in range(60):
        output, routing = layer(x, return_routing=True)
        loss = (output - target).square().mean()
        optimizer.zero_grad()
        (loss + 1e-2 * routing.statistics().loss()).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.25 * losses[0]


# ---------------------------------------------------------------------------- bad input


ROWS, WEIGHT = torch.randn(4, 3), torch.randn(2, 5, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grouped_linear([1.0], WEIGHT, [1, 1]), TypeError, "grouped_linear: rows must be a torch.Tensor; got list"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS, 3, [1, 1]), TypeError, "weight must be a torch.Tensor; got int"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS.int(), WEIGHT, [1, 1]), TypeError, "rows must be float16, bfloat16, float32 or float64; got torch.int32"),
        (lambda: grouped_linear(ROWS[0], WEIGHT, [1, 1]), ValueError, r"rows must be \[R, I\]; got shape \[3\]"),
        (lambda: grouped_linear(ROWS, WEIGHT[0], [1, 1]), ValueError, r"weight must be \[E, O, I\] with I = 3, as rows; got shape \[5, 3\]"),
        (lambda: grouped_linear(ROWS, WEIGHT[..., :2], [1, 1]), ValueError, "weight must be .* I = 3"),
        (lambda: grouped_linear(ROWS, WEIGHT.double(), [1, 1]), TypeError, "weight must be torch.float32, as rows; got torch.float64"),
        (lambda: grouped_linear(ROWS, WEIGHT.to("meta"), [1, 1]), ValueError, "weight must be on cpu, as rows; got meta"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1, 1], 3), TypeError, "bias must be a torch.Tensor; got int"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS, WEIGHT, [1, 1], torch.zeros(5)), ValueError, r"bias must be \[E, O\] = \[2, 5\], as weight; got shape \[5\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1, 1], torch.zeros(2, 5).half()), TypeError, "bias must be torch.float32, as rows; got torch.float16"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1, 1], torch.zeros(2, 5, device="meta")), ValueError, "bias must be on cpu, as rows; got meta"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1]), ValueError, r"sizes must be \[E\] with E = 2, as weight; got shape \[1\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1.0, 2.0]), TypeError, "sizes must be an int; got float"),  # type: ignore[list-item]
        (lambda: grouped_linear(ROWS, WEIGHT, torch.tensor([1.0, 2.0])), TypeError, "sizes must be torch.int64"),
        (lambda: grouped_linear(ROWS, WEIGHT, [-1, 2]), ValueError, r"sizes must be at least 0 each and no more than the 4 rows in all; got \[-1, 2\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, [3, 2]), ValueError, r"sizes must be .*; got \[3, 2\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, None), TypeError, "nn.grouped_linear: sizes must be an int64 tensor or a sequence of ints; got NoneType"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS, WEIGHT, 3), TypeError, "sizes must be an int64 tensor or a sequence of ints; got int"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS, WEIGHT, [10**30, 0]), ValueError, "sizes must be .* no more than the 4 rows"),
        (lambda: grouped_linear(ROWS, WEIGHT, torch.tensor([3, 2])), ValueError, r"sizes must be .*; got \[3, 2\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, torch.tensor([-1, 2])), ValueError, r"sizes must be .*; got \[-1, 2\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, torch.tensor([1, 2]).to("meta")), ValueError, "sizes must be on cpu or the CPU; got meta"),
        (lambda: MoE(8, 8, 4, 2, backend="nope"), ValueError, "nn.MoE: backend must be one of 'reference', 'cpu', .*; got 'nope'"),
        (lambda: Router(8, 4, 2, backend="nope"), ValueError, "nn.Router: backend must be one of"),
        (lambda: MoE(8, 8, 4, 2, shared_expert=3), TypeError, "shared_expert must be a torch.nn.Module or None; got int"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, dtype=torch.int32), TypeError, "nn.MoE: dtype must be one of .*; got torch.int32"),
        (lambda: MoE(8, 8, 4, 2, device="nowhere"), ValueError, "nn.MoE: device must be one that torch knows; got 'nowhere'"),
        (lambda: MoE(8, 8, 10**30, 2), ValueError, "num_experts must be at most 2147483647"),
        (lambda: MoE(0, 8, 4, 2), ValueError, "hidden_size must be at least 1; got 0"),
        (lambda: MoE(8, 0, 4, 2), ValueError, "intermediate_size must be at least 1; got 0"),
        (lambda: MoE(8, 8, 0, 2), ValueError, "num_experts must be at least 1; got 0"),
        (lambda: MoE(8, 8, 4, 5), ValueError, "k must be"),
        (lambda: MoE(8, 8, 4, 2, score="tanh"), ValueError, "score must be"),
        (lambda: MoE(8, 8, 4, 2, num_groups=3), ValueError, "num_groups must"),
        (lambda: MoE(8, 8, 4, 2, eps=float("nan")), ValueError, "eps must be"),
        (lambda: MoE(8, 8, 4, 2, drop="last"), ValueError, "nn.MoE: drop must be one of 'position', 'weight'; got 'last'"),
        (lambda: MoE(8, 8, 4, 2, align=0), ValueError, "align must be at least 1; got 0"),
        (lambda: MoE(8, 8, 4, 2, capacity_factor=-1.0), ValueError, "capacity_factor must be at least 0; got -1.0"),
        (lambda: MoE(8, 8, 4, 2, capacity_factor="1"), TypeError, "capacity_factor must be a float; got str"),  # type: ignore[arg-type]
        (lambda: Router(0, 4, 2), ValueError, "nn.Router: hidden_size must be at least 1"),
        (lambda: Experts(0, 4, 2), ValueError, "nn.Experts: num_experts must be at least 1"),
        (lambda: LAYER(3), TypeError, "nn.MoE: x must be a torch.Tensor; got int"),
        (lambda: LAYER(X.int()), TypeError, "x must be float16, bfloat16, float32 or float64; got torch.int32"),
        (lambda: LAYER(X[..., :2]), ValueError, r"x must be \[..., H\] with H = 6; got shape \[2, 3, 2\]"),
        (lambda: LAYER(torch.tensor(1.0)), ValueError, r"x must be \[..., H\] with H = 6; got shape \[\]"),
        (lambda: LAYER(X.to("meta")), ValueError, "x must be on cpu"),
        (lambda: LAYER(X, padding_mask=[True]), TypeError, "padding_mask must be a torch.Tensor"),
        (lambda: LAYER(X, padding_mask=torch.zeros(2, 3)), TypeError, "padding_mask must be torch.bool, True = padding; got torch.float32"),
        (lambda: LAYER(X, padding_mask=torch.zeros(6, dtype=torch.bool)), ValueError, r"padding_mask must be \[2, 3\], as x without H; got shape \[6\]"),
        (lambda: LAYER(X, expert_ids=[0]), TypeError, "expert_ids must be a torch.Tensor"),
        (lambda: LAYER(X, expert_ids=torch.zeros(6, 2, dtype=torch.int32)), ValueError, r"expert_ids must be \[2, 3, K\] with K >= 1, as x; got shape \[6, 2\]"),
        (lambda: LAYER(X, expert_ids=torch.zeros(2, 3, 2)), TypeError, "expert_ids must be"),
        (lambda: LAYER(X, expert_ids=torch.zeros(2, 3, 0, dtype=torch.int32)), ValueError, r"expert_ids must be \[2, 3, K\] with K >= 1, as x; got shape \[2, 3, 0\]"),
        (lambda: LAYER(X, expert_ids=torch.zeros(2, 3, 2, dtype=torch.int32, device="meta")), ValueError, "expert_ids must be on cpu, as x; got meta"),
        (lambda: LAYER(X, return_routing=1), TypeError, "return_routing must be a bool; got int"),
        (lambda: LAYER.router(X), ValueError, r"nn.Router: tokens must be \[T, H\] with H = 6; got shape \[2, 3, 6\]"),
        (lambda: LAYER.router(X[0], torch.zeros(2, 2, dtype=torch.int32)), ValueError, r"nn.Router: expert_ids must be \[T, K\] with T = 3"),
        (lambda: SwiGLU(6, 3)(X.double()), TypeError, "nn.SwiGLU: x must be torch.float32, as the layer's weights; got torch.float64"),
        (lambda: LAYER(X.bfloat16()), TypeError, "nn.MoE: x must be torch.float32, as the layer's weights; got torch.bfloat16"),
    ],
)  # fmt: skip
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


LAYER: MoE = make_layer()
X: Tensor = make_input(2, 3)


def test_repr() -> None:
    text = repr(make_layer(score="sigmoid", expert_bias=True))
    for part in ("Router(6, 4, k=2, score='sigmoid', expert_bias=True)", "Experts(4, 6, 5)"):
        assert part in text, text
    assert next(iter(itertools.islice(make_layer().named_children(), 1)))[0] == "router"


@pytest.mark.parametrize("score", ("softmax", "sigmoid", "topk_softmax"))
@pytest.mark.parametrize("value", (float("nan"), float("inf"), 3.0))
def test_padding_reaches_no_gradient(score: str, value: float) -> None:
    """Whatever a padding token holds, and whatever comes back at its place: every gradient is as without it."""
    layer = make_layer(score=score, shared_expert=SwiGLU(HIDDEN, 3), expert_bias=True)
    x, mask = make_input(5), torch.tensor([False, True, False, False, True])
    live = x[~mask].clone().requires_grad_()
    x[mask] = value
    x.requires_grad_()
    upstream = make_input(5, seed=2)

    def loss_of(output: Tensor, routing: Routing, upstream: Tensor) -> Tensor:
        return (output * upstream).sum() + routing.statistics().loss() + routing.z_loss()

    output, routing = layer(live, return_routing=True)
    loss_of(output, routing, upstream[~mask]).backward()
    expected = {name: weight.grad for name, weight in layer.named_parameters()}
    layer.zero_grad()
    output, routing = layer(x, padding_mask=mask, return_routing=True)
    assert output[mask].tolist() == torch.zeros(2, HIDDEN).tolist()
    loss_of(output, routing, upstream).backward()
    for name, weight in layer.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], msg=partial("{}: {}".format, name))
    assert x.grad is not None
    assert live.grad is not None
    torch.testing.assert_close(x.grad[~mask], live.grad)
    assert not bool(x.grad[mask].any())


def test_a_large_capacity_factor_is_no_limit() -> None:
    x = make_input(7)
    for factor in (float(EXPERTS), 1e30, 10**30):
        output, routing = make_layer(capacity_factor=factor)(x, return_routing=True)
        torch.testing.assert_close(output, make_layer()(x))
        assert routing.plan.num_rows == 7 * K


def test_shapes_on_meta() -> None:
    layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, K, capacity_factor=1.0, align=4, device="meta")
    x = torch.empty(2, 3, HIDDEN, device="meta")
    output, routing = layer(x, padding_mask=torch.empty(2, 3, dtype=torch.bool, device="meta"), return_routing=True)
    assert output.shape == x.shape
    assert output.is_meta
    assert routing.gating.weights.shape == (6, K)
    output.sum().backward()
