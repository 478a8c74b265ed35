"""The layer as a citizen of PyTorch: transforms, checkpoints, dtypes, state, compilation."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moeroute.nn import MoE, Router, Routing, SwiGLU
from moeroute.ops.balance import update_expert_bias
from moeroute.ops.router_product import router_product
from small_layers import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    K,
    assert_near,
    make_input,
    make_layer,
)


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


@pytest.mark.parametrize(("hidden", "experts"), [(96, 24), (33, 7), (64, 5), (130, 9), (1001, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logits_and_gradients_do_not_depend_on_the_batch(dtype: torch.dtype, hidden: int, experts: int) -> None:
    """Of one token, in a batch of any size and at any place in it; a plain product differs in about a quarter."""
    torch.manual_seed(0)
    tokens, weight, upstream = torch.randn(150, hidden), torch.randn(experts, hidden), torch.randn(150, experts)
    tokens, weight = tokens.to(dtype), weight.to(dtype).requires_grad_()
    upstream = upstream.to(torch.float64 if dtype is torch.float64 else torch.float32)

    def run(first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = tokens[first:stop].clone().requires_grad_()
        logits = router_product(mine, weight)
        (grad,) = torch.autograd.grad(logits, mine, upstream[first:stop])
        return logits, grad

    logits, grad = run(0, 150)
    for first, stop in [(0, 1), (0, 2), (2, 5), (7, 40), (60, 70), (64, 128), (3, 67), (20, 150), (149, 150)]:
        for got, whole in zip(run(first, stop), (logits, grad), strict=True):
            torch.testing.assert_close(got, whole[first:stop], rtol=0, atol=0)
    assert run(5, 5)[0].shape == (0, experts)


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
@pytest.mark.parametrize(("capacity_factor", "drop"), [(None, "position"), (1.25, "position"), (0.75, "choice")])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool, capacity_factor: float | None, drop: str) -> None:
    torch.compiler.reset()  # the limit of recompilations counts over all layers
    layer = make_layer(shared_expert=SwiGLU(HIDDEN, 3), capacity_factor=capacity_factor, drop=drop)
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
