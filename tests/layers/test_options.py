"""Every option of the layer against a loop over single tokens in float64, gradients of all parameters by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute.nn import Experts, MoE, SwiGLU
from moeroute.testing import assert_same_bits
from small_layers import EXPERTS, HIDDEN, INTERMEDIATE, K, assert_near, make_input, make_layer

TABLE = torch.tensor([[2, 0], [1, 3], [3, 2], [0, -1]])
KEYS = torch.tensor([[0, 3, 1, 2], [2, 9, 0, 1], [1, 1, 3, 0]])  # 9: of no row
EVERYTHING: dict[str, dict[str, Any]] = {
    "geglu": {"activation": "geglu"},
    "relu2": {"activation": "relu2"},
    "clamped": {"activation": "swiglu_clamped"},
    "interleaved": {"interleaved": True},
    "bias": {"bias": True},
    "gpt-oss": {"activation": "swiglu_clamped", "interleaved": True, "bias": True, "score": "topk_softmax"},
    "weights on the input": {"weights_on": "input", "score": "sigmoid", "renormalize": False},
    "gate of the shared expert": {"shared_expert_gate": True},
    "hash table": {"hash_table": TABLE, "score": "sigmoid"},
    "float64 logits": {"router_dtype": torch.float64, "bias": True},
    "recompute activation": {"recompute": "activation", "bias": True},
    "recompute permute": {"recompute": "permute", "weights_on": "input"},
    "recompute both": {"recompute": "both", "activation": "geglu", "interleaved": True, "align": 4, "bias": True},
}


def layer_of(name: str, dtype: torch.dtype) -> MoE:
    options = dict(EVERYTHING[name])
    if options.get("shared_expert_gate"):
        options["shared_expert"] = SwiGLU(HIDDEN, 3)
    return make_layer(dtype, **options)


def mlp(x: Tensor, up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor] | None, options: dict[str, Any]) -> Tensor:
    """One expert of one token, written out."""
    hidden = up @ x
    if biases is not None:
        hidden = hidden + biases[0]
    kind = options.get("activation", "swiglu")
    if kind == "relu2":
        made = torch.where(hidden > 0, hidden, 0.0) ** 2
    else:
        half = len(hidden) // 2
        gate, other = (hidden[0::2], hidden[1::2]) if options.get("interleaved") else (hidden[:half], hidden[half:])
        if kind == "swiglu":
            made = gate / (1 + (-gate).exp()) * other
        elif kind == "geglu":
            made = gate * 0.5 * (1 + (0.7978845608028654 * (gate + 0.044715 * gate**3)).tanh()) * other
        else:
            gate, other = gate.clamp(max=7), other.clamp(-7, 7)
            made = gate / (1 + (-1.702 * gate).exp()) * (other + 1)
    made = down @ made
    return made if biases is None else made + biases[1]


def by_hand(weights: dict[str, Tensor], x: Tensor, expert_ids: Tensor, options: dict[str, Any]) -> Tensor:
    """One token after the other; `expert_ids` from the layer, -1 skipped."""
    outputs = []
    for token, ids in zip(x, expert_ids.tolist(), strict=True):
        logits = weights["router.weight"] @ token
        if "router.bias" in weights:
            logits = logits + weights["router.bias"]
        chosen = [e for e in ids if e >= 0]
        score = options.get("score", "softmax")
        scores = logits.softmax(0) if score == "softmax" else logits.sigmoid()
        if score == "topk_softmax":
            scores = logits.exp() / sum(logits[e].exp() for e in chosen)
        total = sum(scores[e] for e in chosen) if score == "sigmoid" and options.get("renormalize", True) else 1.0
        output = torch.zeros_like(token)
        for e in chosen:
            biases = None
            if "experts.down_proj_bias" in weights:
                biases = weights["experts.gate_up_proj_bias"][e], weights["experts.down_proj_bias"][e]
            matrices = weights["experts.gate_up_proj"][e], weights["experts.down_proj"][e]
            weight = scores[e] / total
            if options.get("weights_on") == "input":
                output = output + mlp(weight * token, *matrices, biases, options)
            else:
                output = output + weight * mlp(token, *matrices, biases, options)
        if "shared_expert_gate.weight" in weights:
            names = ("shared_expert.gate_up_proj.weight", "shared_expert.down_proj.weight")
            shared = mlp(token, weights[names[0]], weights[names[1]], None, {})
            output = output + torch.sigmoid(weights["shared_expert_gate.weight"][0] @ token) * shared
        outputs.append(output)
    return torch.stack(outputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EVERYTHING)
def test_against_a_loop_over_tokens(name: str, dtype: torch.dtype) -> None:
    layer, options = layer_of(name, dtype), EVERYTHING[name]
    x = make_input(3, 4, dtype=dtype).requires_grad_()
    keys = KEYS if "hash_table" in options else None
    output, routing = layer(x, keys=keys, return_routing=True)
    ids = routing.gating.expert_ids
    if keys is not None:
        looked_up = [TABLE[key].tolist() if key < len(TABLE) else [-1, -1] for key in KEYS.reshape(-1).tolist()]
        assert ids.tolist() == looked_up
    wide = {n: weight.detach().double().requires_grad_() for n, weight in layer.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    expected = by_hand(wide, wide_x.reshape(-1, HIDDEN), ids, options).reshape(x.shape)
    assert_near(output, expected, dtype, "output")
    grad = make_input(3, 4, dtype=dtype, seed=5)
    got = torch.autograd.grad(output, [x, *layer.parameters()], grad)
    exact = torch.autograd.grad(expected, [wide_x, *wide.values()], grad.double())
    for parameter, actual, wanted in zip(["x", *wide], got, exact, strict=True):
        assert_near(actual, wanted, dtype, f"gradient of {parameter}")


@pytest.mark.parametrize("name", EVERYTHING)
def test_first_and_second_derivatives(name: str) -> None:
    layer = layer_of(name, torch.float64)
    x = make_input(3, dtype=torch.float64).requires_grad_()
    keys = KEYS[0, :3] if "hash_table" in EVERYTHING[name] else None
    routing = layer(x, keys=keys, return_routing=True)[1]

    def function(x: Tensor) -> Tensor:
        return layer(x, expert_ids=routing.gating.expert_ids)

    torch.autograd.gradcheck(function, (x,))
    torch.autograd.gradgradcheck(function, (x,))


@pytest.mark.parametrize("name", EVERYTHING)
def test_compiled_checkpointed_and_in_autocast(name: str) -> None:
    layer = layer_of(name, torch.float32)
    x = make_input(5).requires_grad_()
    keys = KEYS.reshape(-1)[:5] if "hash_table" in EVERYTHING[name] else None

    def results(function: Callable[..., Tensor]) -> list[Tensor]:
        layer.zero_grad()
        output = function(x, keys=keys)
        return [output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])]

    def checkpointed(x: Tensor, keys: Tensor | None) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(layer, x, keys=keys, use_reentrant=False)
        return found

    expected = results(layer)
    torch.testing.assert_close(results(checkpointed), expected, rtol=0, atol=0)
    torch._dynamo.reset()
    torch.testing.assert_close(results(torch.compile(layer, fullgraph=True, backend="aot_eager")), expected)
    with torch.autocast("cpu", torch.bfloat16):
        for actual, wanted in zip(results(layer), expected, strict=True):
            assert_near(actual, wanted.double(), torch.bfloat16, "autocast")


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recomputation_changes_no_bit(dtype: torch.dtype, autocast: bool) -> None:
    x = make_input(9, dtype=dtype).requires_grad_()
    mask = torch.arange(9) == 4
    for options in ({}, {"weights_on": "input", "bias": True, "align": 4}, {"activation": "relu2"}):
        found = []
        for recompute in (None, "activation", "permute", "both"):
            layer = make_layer(dtype, recompute=recompute, **options)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = layer(x, padding_mask=mask)
            found.append((output, *torch.autograd.grad(output.float().square().sum(), [x, *layer.parameters()])))
        for other in found[1:]:
            assert_same_bits(other, found[0], "recomputation")


def test_recomputation_of_rows_is_only_for_experts_that_are_ours() -> None:
    """A hook, or a forward put in the place of theirs, sees rows."""
    layer, x = make_layer(recompute="both"), make_input(5)
    expected = layer(x)
    seen = []
    handle = layer.experts.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape))
    assert_same_bits(layer(x), expected, "with a hook")
    handle.remove()
    assert seen == [(5 * K, HIDDEN)]
    forward = layer.experts.forward
    layer.experts.forward = lambda rows, rows_per_expert: forward(rows, rows_per_expert) * 2  # type: ignore[method-assign]
    torch.testing.assert_close(layer(x), expected * 2)


def test_no_gradient_through_padding_rows() -> None:
    """With a bias a padding row is not zero behind the experts, and nobody reads it."""
    x = make_input(9, dtype=torch.float64)
    results = []
    for align in (1, 8):
        layer = make_layer(torch.float64, bias=True, align=align)
        mask = torch.arange(9) >= 7
        output, routing = layer(x, padding_mask=mask, return_routing=True)
        (output.square().sum() + routing.statistics().loss() + routing.z_loss()).backward()
        results.append({name: p.grad for name, p in layer.named_parameters()} | {"output": output})
    torch.testing.assert_close(results[1], results[0])
    short = make_layer(torch.float64, bias=True)
    output, routing = short(x[:7], return_routing=True)
    (output.square().sum() + routing.statistics().loss() + routing.z_loss()).backward()
    found = {n: p.grad for n, p in short.named_parameters()} | {"output": output}
    whole = results[0]["output"]
    assert whole is not None
    torch.testing.assert_close(found, results[0] | {"output": whole[:7]})


def test_jitter() -> None:
    layer = make_layer(torch.float64, jitter=0.2)
    plain = make_layer(torch.float64)
    x = make_input(64, dtype=torch.float64)
    layer.eval()
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)
    layer.train()
    torch.manual_seed(3)
    _, routing = layer(x, return_routing=True)
    torch.manual_seed(3)
    factors = torch.empty_like(x).uniform_(0.8, 1.2)
    torch.testing.assert_close(routing.logits, (x * factors) @ layer.router.weight.T)
    assert 0.8 <= float(factors.min()) < 0.85
    assert 1.15 < float(factors.max()) <= 1.2
    # The experts get the tokens as they are, and a checkpoint draws the same numbers again.
    gradients = []
    for call in (layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(3)
        gradients.append(torch.autograd.grad(call(x).square().sum(), [*layer.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    replayed = plain(x, expert_ids=routing.gating.expert_ids, return_routing=True)[1]
    assert replayed.gating.expert_ids.equal(routing.gating.expert_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtype_of_the_router(dtype: torch.dtype) -> None:
    """In a half type the logits are those of torch's product in it; in float64 they are the nearest float32 numbers."""
    x = make_input(40, dtype=dtype)
    half = make_layer(dtype, router_dtype=dtype, bias=True)
    _, routing = half(x, return_routing=True)
    wanted = torch.nn.functional.linear(x, half.router.weight, half.router.bias)
    assert routing.logits.dtype is torch.float32
    assert_same_bits(routing.logits, routing.logits.to(dtype).float(), "rounded")
    torch.testing.assert_close(routing.logits, wanted.float(), rtol=2**-7, atol=2**-7)
    wide = make_layer(dtype, router_dtype=torch.float64)
    exact = x.double() @ wide.router.weight.double().T
    torch.testing.assert_close(wide(x, return_routing=True)[1].logits, exact.float(), rtol=2e-7, atol=1e-7)


def test_a_minimum_of_the_capacity() -> None:
    x = make_input(8)
    for minimum, rows in ((0, 1), (2, 2), (5, 5)):
        layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, 1, capacity_factor=0.25, capacity_minimum=minimum)
        with torch.no_grad():
            layer.router.weight.zero_()  # a tie: all to expert 0
        _, routing = layer(x, return_routing=True)
        assert routing.plan.tokens_per_expert is not None
        assert routing.plan.tokens_per_expert.tolist() == [rows, 0, 0, 0]


def test_a_hash_table() -> None:
    layer = make_layer(hash_table=TABLE, score="sigmoid")
    x = make_input(3, 4)
    output, routing = layer(x, keys=KEYS, return_routing=True)
    assert "router.hash_table" in layer.state_dict()
    torch.testing.assert_close(layer(x, expert_ids=routing.gating.expert_ids.reshape(3, 4, K)), output)
    other = make_layer(hash_table=torch.zeros_like(TABLE), score="sigmoid")
    other.load_state_dict(layer.state_dict())
    assert_same_bits(other(x, keys=KEYS), output, "loaded")
    assert layer.bfloat16().router.hash_table.dtype is torch.int64  # type: ignore[union-attr]


def test_names_and_shapes_of_parameters() -> None:
    experts = Experts(3, 4, 5, activation="relu2", bias=True)
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    assert shapes == {
        "gate_up_proj": (3, 5, 4), "down_proj": (3, 4, 5), "gate_up_proj_bias": (3, 5), "down_proj_bias": (3, 4),
    }  # fmt: skip
    assert not any(bias.any() for name, bias in experts.named_parameters() if name.endswith("bias"))
    text = repr(Experts(3, 4, 5, activation="geglu", interleaved=True, bias=True, recompute="activation"))
    assert text == "Experts(3, 4, 5, activation='geglu', interleaved=True, bias=True, recompute='activation')"


LAYER, X = make_layer(), make_input(2, 3)
HASHED = make_layer(hash_table=TABLE)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MoE(8, 8, 4, 2, activation="tanh"), ValueError, "nn.MoE: activation must be one of 'swiglu', .*; got 'tanh'"),  # type: ignore[arg-type]
        (lambda: Experts(4, 8, 8, activation=3), ValueError, "nn.Experts: activation must be one of"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, activation="relu2", interleaved=True), ValueError, "interleaved must be False with activation='relu2', which has no gate; got True"),
        (lambda: MoE(8, 8, 4, 2, interleaved=1), TypeError, "interleaved must be a bool; got int"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, bias="yes"), TypeError, "bias must be a bool; got str"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, recompute="all"), ValueError, "recompute must be one of 'activation', 'permute', 'both'; got 'all'"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, weights_on="both"), ValueError, "weights_on must be one of 'output', 'input'; got 'both'"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, shared_expert_gate=True), ValueError, "shared_expert_gate must be False without a shared_expert; got True"),
        (lambda: MoE(8, 8, 4, 2, jitter=1.0), ValueError, "jitter must be at least 0 and below 1; got 1.0"),
        (lambda: MoE(8, 8, 4, 2, jitter=float("nan")), ValueError, "jitter must be"),
        (lambda: MoE(8, 8, 4, 2, router_dtype=torch.int8), TypeError, "router_dtype must be"),
        (lambda: MoE(8, 8, 4, 2, capacity_minimum=-1), ValueError, "capacity_minimum must be at least 0; got -1"),
        (lambda: MoE(8, 8, 4, 2, capacity_minimum=1.5), TypeError, "capacity_minimum must be an int; got float"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 3, hash_table=TABLE), ValueError, r"hash_table must be \[N, k\] with k = 3; got shape \[4, 2\]"),
        (lambda: MoE(8, 8, 4, 2, hash_table=TABLE.float()), TypeError, "hash_table must be of an integer dtype; got torch.float32"),
        (lambda: MoE(8, 8, 4, 2, hash_table=[[0, 1]]), TypeError, "hash_table must be a torch.Tensor; got list"),  # type: ignore[arg-type]
        (lambda: LAYER(X, keys=KEYS[:2, :3]), ValueError, "nn.Router: keys must be None, as the router has no hash_table"),
        (lambda: HASHED(X), ValueError, "nn.Router: keys must be given, or expert_ids, as the router has a hash_table; got None"),
        (lambda: HASHED(X, keys=KEYS), ValueError, r"nn.MoE: keys must be \[2, 3\], as x without H; got shape \[3, 4\]"),
        (lambda: HASHED(X, keys=KEYS[:2, :3].float()), TypeError, "keys must be of an integer dtype; got torch.float32"),
        (lambda: HASHED.router(X[0], keys=KEYS[0]), ValueError, r"nn.Router: keys must be \[T\] with T = 3, as tokens; got shape \[4\]"),
    ],
)  # fmt: skip
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_plan_of_a_hash_table_is_that_of_its_ids() -> None:
    _, routing = HASHED(make_input(3, 4), keys=KEYS, return_routing=True)
    ids = moeroute.look_up_expert_ids(KEYS.reshape(-1), TABLE)
    assert routing.plan.row_of_slot.equal(moeroute.plan_from_expert_ids(ids, EXPERTS, num_rows=24).row_of_slot)
