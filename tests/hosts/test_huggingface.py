"""Tiny random models of Hugging Face Transformers with our experts, against its own loop over the experts."""

import copy
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hosts import models
from moeroute.interop import huggingface
from moeroute.nn import activate as activate_rows
from small_cases import present

huggingface.register()

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}
ARCHITECTURES = list(models.MODELS)
ALWAYS_FLOAT32 = {"nemotron_h", "muse_spark"}  # the scan of the one, the norm behind the experts of the other


def set_experts(model: Any, implementation: str) -> Any:
    model.set_experts_implementation(implementation)
    return model


def pair(architecture: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """One model twice: with the host's loop, and with ours."""
    model = models.tiny(architecture, dtype, **options)
    return set_experts(model, "eager"), set_experts(copy.deepcopy(model), "moeroute")


def tokens(batch: int = 3, length: int = 11) -> Tensor:
    return torch.randint(3, models.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=ids).logits
    return logits, nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Relative to the largest expected value."""
    scale = max(float(expected.detach().abs().max()), 1e-30)
    torch.testing.assert_close(
        actual.double() / scale, expected.double() / scale, rtol=0, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def experts_of(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_gradients_and_an_optimiser_step(architecture: str, dtype: torch.dtype) -> None:
    theirs, ours = pair(architecture, dtype)
    tolerance = 2e-6 if dtype == torch.float64 and architecture in ALWAYS_FLOAT32 else TOLERANCE[dtype]
    assert set(huggingface.check(ours).values()) == {"moeroute"}
    assert list(huggingface.check(ours)) == list(experts_of(ours))
    for model in (theirs, ours):
        model.logits, model.loss = loss_of(model, tokens())
        model.loss.backward()
    assert_near(ours.logits, theirs.logits, tolerance, "logits")
    moved = 0
    for (name, expected), actual in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (expected.grad is None) == (actual.grad is None), name
        if expected.grad is not None and actual.grad is not None:
            assert actual.grad.dtype == actual.dtype
            assert_near(actual.grad, expected.grad, 5 * tolerance, name)
            moved += "experts." in name and float(expected.grad.abs().max()) > 0
    assert moved >= 2 * len(experts_of(ours))
    for model in (theirs, ours):
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
        model.logits, model.loss = loss_of(model, tokens())
    assert_near(ours.logits, theirs.logits, 10 * tolerance, "logits after a step")
    assert_near(ours.loss, theirs.loss, 10 * tolerance, "loss after a step")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_twenty_generated_tokens(architecture: str) -> None:
    theirs, ours = (model.eval() for model in pair(architecture))
    ids = tokens(2, 5)
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = theirs.generate(ids, **options)
    actual = ours.generate(ids, **options)
    assert expected.shape == (2, 25)
    assert len(expected[:, 5:].unique()) > 4  # it says something
    torch.testing.assert_close(actual, expected)
    assert set(huggingface.check(ours).values()) == {"moeroute"}  # nothing was swapped for decoding


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_autocast(architecture: str) -> None:
    """float32 weights, bfloat16 products: nearly as near to the float64 model as the host's loop, which sums in float32."""
    theirs, ours = pair(architecture, one_layer=True)
    exact = set_experts(copy.deepcopy(theirs).double(), "eager")
    loss_of(exact, tokens())[1].backward()
    for model in (theirs, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.logits, loss = loss_of(model, tokens())
        loss.backward()
    assert ours.logits.dtype == theirs.logits.dtype
    assert_near(ours.logits, theirs.logits, 0.05, "logits")
    for name, experts in experts_of(ours).items():
        for key, parameter in experts.named_parameters():
            reference, other = exact.get_parameter(f"{name}.{key}"), theirs.get_parameter(f"{name}.{key}")
            assert parameter.grad is not None
            assert other.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert_near(parameter.grad, other.grad, 0.1, key)
            scale = reference.grad.norm()
            assert (parameter.grad - reference.grad).norm() / scale <= 1.1 * (
                other.grad - reference.grad
            ).norm() / scale + 1e-3


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpointing(architecture: str, reentrant: bool) -> None:
    """What is recomputed has the same bits."""
    plain = set_experts(models.tiny(architecture), "moeroute")
    recomputed = copy.deepcopy(plain)
    recomputed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for model in (plain, recomputed):
        loss_of(model, tokens())[1].backward()
    for (name, expected), actual in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=0, atol=0, msg=partial("{}: {}".format, name))


# ---------------------------------------------------------------------------- the experts module alone


def experts_pair(architecture: str, dtype: torch.dtype) -> tuple[Any, Any]:
    theirs, ours = pair(architecture, dtype)
    name = next(iter(experts_of(ours)))
    return theirs.get_submodule(name), ours.get_submodule(name)


def routing(experts: Any, num_tokens: int, k: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(num_tokens, experts.down_proj.shape[2 if experts.is_transposed else 1], generator=generator)
    choice = torch.rand(num_tokens, experts.num_experts, generator=generator, dtype=torch.float64)
    weights, ids = choice.topk(k)
    return hidden.to(dtype), ids, weights.to(dtype)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sentinels_of_expert_parallelism(architecture: str) -> None:
    """An id of num_experts is nobody's: no row, no sum, no gradient, whatever weight and hidden state it comes with."""
    theirs, ours = experts_pair(architecture, torch.float64)
    ours._is_expert_parallel = True
    hidden, ids, weights = routing(ours, 40)
    away = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    away[7] = True  # a token that is wholly on other ranks
    leaves = tuple(t.clone().requires_grad_() for t in (hidden, weights))
    expected = theirs(leaves[0], ids, leaves[1] * ~away)
    expected.square().sum().backward()

    hidden[7] = torch.nan
    inputs = tuple(t.clone().requires_grad_() for t in (hidden, weights))
    actual = ours(inputs[0], ids.masked_fill(away, ours.num_experts), inputs[1])
    actual.square().sum().backward()
    assert_near(actual, expected, 1e-11, "output")
    assert_near(present(inputs[0].grad), present(leaves[0].grad), 1e-11, "hidden states")
    assert_near(present(inputs[1].grad), present(leaves[1].grad), 1e-11, "weights")
    assert present(inputs[1].grad)[away].eq(0).all()
    for (name, expected), parameter in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert_near(parameter.grad, expected.grad, 2e-6 if architecture in ALWAYS_FLOAT32 else 1e-11, name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_tokens_and_one(architecture: str) -> None:
    theirs, ours = experts_pair(architecture, torch.float64)
    hidden, ids, weights = (t.requires_grad_(t.is_floating_point()) for t in routing(ours, 0))
    output = ours(hidden, ids, weights)
    assert output.shape == hidden.shape
    output.sum().backward()
    assert present(hidden.grad).shape == hidden.shape
    assert all(not p.grad.any() for p in ours.parameters())
    hidden, ids, weights = routing(ours, 1, k=1)
    assert_near(ours(hidden, ids, weights), theirs(hidden, ids, weights), 1e-12, "output")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_types(architecture: str) -> None:
    """As near to the exact result as the host's loop, for bfloat16 experts, and for float32 ones beside bfloat16 tokens."""
    theirs, ours = experts_pair(architecture, torch.bfloat16)
    exact = copy.deepcopy(theirs).double()
    hidden, ids, weights = routing(ours, 200, dtype=torch.bfloat16)
    for weights_dtype in (torch.bfloat16, torch.float32):
        expected = exact(hidden.double(), ids, weights.double())
        output = ours(hidden, ids, weights.to(weights_dtype))
        assert output.dtype == torch.bfloat16
        bound = (theirs(hidden, ids, weights.to(weights_dtype)) - expected).norm()
        assert (output - expected).norm() <= 1.02 * bound
    output = ours.float()(hidden, ids, weights.float())
    assert output.dtype == torch.bfloat16
    assert_near(output, exact(hidden.double(), ids, weights.double()), 2**-8, "float32 experts")


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark"])
def test_compile(architecture: str) -> None:
    _, ours = experts_pair(architecture, torch.float32)
    compiled = copy.deepcopy(ours)
    compiled.forward = torch.compile(compiled.forward, fullgraph=True, backend="aot_eager")
    results = []
    for experts in (ours, compiled):
        hidden, ids, weights = routing(ours, 20, dtype=torch.float32)
        hidden.requires_grad_()
        output = experts(hidden, ids, weights)
        output.square().sum().backward()
        results.append((output, hidden.grad, experts.down_proj.grad))
    torch.testing.assert_close(results[1], results[0])


# ---------------------------------------------------------------------------- what the model is told


def test_saved_and_loaded_with_our_experts(tmp_path: Any) -> None:
    model = set_experts(models.tiny("qwen3_moe"), "moeroute").eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moeroute").eval()
    assert set(huggingface.check(loaded).values()) == {"moeroute"}
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)
    assert set(huggingface.check(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)).values()) != {"moeroute"}


@pytest.mark.parametrize(
    "name, settings",
    [
        ("JetMoe", {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Llama4Text", {"num_local_experts": 4, "intermediate_size_mlp": 32, "layer_types": ["full_attention"] * 2}),
        ("LongcatFlash", {"num_layers": 1, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 32, "moe_topk": 2} | models.MLA),
    ],
)  # fmt: skip
def test_models_that_ignore_the_setting_are_found(name: str, settings: dict[str, Any]) -> None:
    sizes = {key: value for key, value in models.SIZES.items() if key not in settings}
    config = getattr(transformers, f"{name}Config")(**sizes, **settings)
    with torch.device("meta"):
        model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    model.set_experts_implementation("moeroute")  # no error
    assert huggingface.check(model)
    assert set(huggingface.check(model).values()) == {"its own forward"}


def test_check_tells_the_implementation_that_is_set() -> None:
    model = models.tiny("qwen3_moe")
    for name in ("eager", "grouped_mm", "batched_mm", "moeroute"):
        assert list(huggingface.check(set_experts(model, name)).values()) == [name] * 2
    assert huggingface.check(nn.Linear(2, 2)) == {}
    with pytest.raises(TypeError, match=r"interop.huggingface.check: model must be a torch.nn.Module; got str"):
        huggingface.check("qwen3_moe")  # type: ignore[arg-type]


def test_a_subclass_with_a_forward_of_its_own_is_found() -> None:
    model = set_experts(models.tiny("mixtral"), "moeroute")
    experts = model.model.layers[1].mlp.experts
    experts.__class__ = type("Other", (type(experts),), {"forward": lambda self, hidden_states, *_: hidden_states})
    assert list(huggingface.check(model).values()) == ["moeroute", "its own forward"]


def test_experts_of_another_register_are_found() -> None:
    """The host's FP8 experts, where the setting is an error in the forward pass."""
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import use_experts_implementation

    model = set_experts(models.tiny("mixtral"), "moeroute")
    experts = model.model.layers[1].mlp.experts
    own = type(
        "Other", (nn.Module,), {"__init__": lambda self, config: nn.Module.__init__(self), "forward": lambda *_: 1}
    )
    other = use_experts_implementation(own, experts_interface=FP8ExpertsInterface())
    model.model.layers[1].mlp.experts = other(experts.config)
    assert list(huggingface.check(model).values()) == ["moeroute", "another register"]
    with pytest.raises(KeyError, match="moeroute"):
        model(tokens())


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.25.1")  # a lazy module, made anew now and then
    for call in (huggingface.register, lambda: huggingface.check(nn.Linear(2, 2))):
        with pytest.raises(ImportError, match=r"transformers must be 5\.24\.x; got 5\.25\.1"):
            call()


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "interop.md").read_text()
    code, printed = present(re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)).groups()
    assert len([line for line in code.splitlines() if line]) <= 10
    exec(code, {})
    assert capsys.readouterr().out == printed


def test_the_hosts_activation_is_one_pass_and_a_models_own_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def activate(rows: Tensor, name: Any) -> Tensor:
        calls.append(name)
        return real(rows, name)

    real = activate_rows
    monkeypatch.setattr(huggingface, "activate", activate)

    def run(model: Any) -> list[str]:
        calls.clear()
        with torch.no_grad():
            model(tokens())
        return calls

    class Tripled(nn.SiLU):
        def forward(self, gate: Tensor) -> Tensor:
            return 3 * super().forward(gate)

    model = set_experts(models.tiny("qwen3_moe"), "moeroute")
    experts = [module for module in model.modules() if hasattr(module, "is_concatenated")]
    assert run(model) == ["swiglu"] * len(experts)
    seen: list[int] = []
    for layer in experts:
        layer.act_fn.register_forward_hook(lambda *_: seen.append(1))
    assert run(model) == []
    assert len(seen) == len(experts)
    for layer in experts:
        layer.act_fn = Tripled()
    assert run(model) == []
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, set_experts(model, "eager")(tokens()).logits)
    assert run(set_experts(models.tiny("gpt_oss"), "moeroute")) == []
