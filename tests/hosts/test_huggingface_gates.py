"""The gates of Transformers by `gating_topk`, against the gates themselves."""

import copy
import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hosts import architectures, models
from moeroute.interop import huggingface
from moeroute.interop.huggingface_gates import FAMILIES, MISSING
from moeroute.nn import MoE, SwiGLU

huggingface.register()
SUPPORTED = {name for family in FAMILIES for name in family.gates}


@cache
def built(architecture: str) -> tuple[Any, Tensor]:
    return architectures.build(architecture)


def gates_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if type(m).__name__ in SUPPORTED | set(MISSING)}


def others(gate: Any, num_tokens: int, num_experts: int) -> dict[str, Tensor]:
    """What the gate's forward takes besides the hidden states."""
    generator = torch.Generator().manual_seed(4)
    bias = torch.randn(num_experts, generator=generator) / 10
    ids = torch.randint(3, 60, (1, num_tokens), generator=generator)
    known = {"expert_bias": bias, "e_score_correction_bias": bias, "input_ids": ids}
    return {name: known[name] for name in inspect.signature(gate.forward).parameters if name != "hidden_states"}


def by_expert(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(dim=-1)
    return ids.gather(1, order), weights.gather(1, order)


def compare(gate: Any, num_tokens: int = 301) -> None:
    """In float32: logits, experts, weights and every gradient; in bfloat16 where the choice is the same."""
    linear = next(p for p in gate.parameters() if p.ndim == 2)
    hidden = torch.randn(num_tokens, linear.shape[1], generator=torch.Generator().manual_seed(3))
    if type(gate).__name__ == "AfmoeTokenChoiceRouter":  # [B, S, H] only
        hidden = hidden[None]
    more = others(gate, num_tokens, linear.shape[0])
    results = []
    for function in (gate, partial(huggingface.router, gate)):
        gate.zero_grad()
        leaf = hidden.clone().requires_grad_()
        logits, weights, ids = function(leaf, **more)
        assert ids.dtype == torch.int64
        sorted_ids, sorted_weights = by_expert(ids, weights)
        sorted_weights.backward(torch.randn(sorted_weights.shape, generator=torch.Generator().manual_seed(5)))
        gradients = [p.grad for p in gate.parameters() if p.grad is not None]
        results.append((logits.detach(), sorted_ids, sorted_weights.detach(), leaf.grad, *gradients))
    assert [t.dtype for t in results[1] if t is not None] == [t.dtype for t in results[0] if t is not None]
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-6)

    gate = copy.deepcopy(gate)
    if "Inkling2" not in type(gate).__name__:  # they stay in float32 in the host
        gate = gate.bfloat16()
    theirs, ours = gate(hidden.bfloat16(), **more), huggingface.router(gate, hidden.bfloat16(), **more)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    (their_ids, their_weights), (our_ids, our_weights) = (by_expert(ids, weights) for _, weights, ids in (theirs, ours))
    same = (their_ids == our_ids).all(dim=-1)
    assert same.float().mean() > 0.9  # the others are ties of bfloat16 logits
    torch.testing.assert_close(our_weights[same], their_weights[same], rtol=2e-2, atol=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, ours = gate.float()(hidden, **more), huggingface.router(gate, hidden, **more)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    torch.testing.assert_close(ours[0], theirs[0])


def expressible(gate: Any, hidden_size: int = 32) -> bool:
    """Whether `router` takes it; one that it does not take is named with the reason."""
    try:
        more = {} if type(gate).__name__ in MISSING else others(gate, 1, 8)
        huggingface.router(gate, torch.zeros(1, 1, hidden_size), **more)
    except NotImplementedError as error:
        assert str(error).startswith(f"moeroute.interop.huggingface.router: {type(gate).__name__} needs ")
        return False
    return True


@pytest.mark.parametrize("architecture", architectures.DECORATED)
def test_gates_of_every_architecture(architecture: str) -> None:
    """Each alone, and the whole model with them."""
    model, ids = built(architecture)
    model = copy.deepcopy(model)
    expected = model(input_ids=ids)[0].detach()
    gates = gates_of(model)
    assert gates
    for gate in gates.values():
        if not expressible(gate):
            assert type(gate).__name__ in {*MISSING, "AXK2TopkRouter", "MuseSparkTopkRouter", "LagunaTopKRouter"}
            continue
        compare(copy.deepcopy(gate))
        gate.forward = partial(huggingface.router, gate)
    torch.testing.assert_close(model(input_ids=ids)[0].detach(), expected, rtol=1e-4, atol=1e-4)


def gate_of(architecture: str, **settings: Any) -> Any:
    """The first gate of a model with other settings."""
    gate = copy.deepcopy(next(iter(gates_of(built(architecture)[0]).values())))
    vars(gate).update(settings)
    return gate


def class_of(architecture: str, name: str, **settings: Any) -> Any:
    """A gate that no tiny model has."""
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    config = {"num_experts_per_tok": 2, "num_experts": 8, "num_local_experts": 8, "hidden_size": 32} | settings
    return models.fill(getattr(module, name)(SimpleNamespace(**config)))


VARIANTS: dict[str, Callable[[], Any]] = {
    "without renormalisation": lambda: gate_of("qwen3_moe", norm_topk_prob=False),
    "groups by their best": lambda: gate_of(
        "deepseek_v2", topk_method="group_limited_greedy", num_group=4, topk_group=2, routed_scaling_factor=2.5
    ),
    "no groups": lambda: gate_of("axk2", num_group=None),
    "no factor on the logits": lambda: gate_of("muse_spark", output_multiplier=1.0),
    "no soft cap": lambda: gate_of("laguna", router_logit_softcapping=0.0),
    "no bias": lambda: gate_of("lfm2_moe", use_expert_bias=False),
    "sigmoid of the chosen": lambda: gate_of("cohere2_moe", expert_selection_fn="sigmoid"),
    "the same, renormalised": lambda: gate_of("cohere2_moe", expert_selection_fn="sigmoid", norm_topk_prob=True),
    "sigmoid by name": lambda: gate_of("deepseek_v4", score_fn=nn.Sigmoid()),
    "vision": lambda: class_of("dots3_note", "Dots3NoteVisionTopKRouter", router_scaling_factor=1.5),
    "talker": lambda: class_of("qwen3_omni_moe", "Qwen3OmniMoeTalkerTextTopKRouter", norm_topk_prob=True),
    "thinker": lambda: class_of("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextTopKRouter", norm_topk_prob=False),
    "omni": lambda: class_of("qwen3_omni_moe", "Qwen3OmniMoeTextTopKRouter"),
    "chosen by logit and bias": lambda: gate_of("kolibri1", norm_topk_prob=True),
    "by token": lambda: class_of(
        "deepseek_v4", "DeepseekV4HashRouter", scoring_func="sqrtsoftplus", routed_scaling_factor=1.5, vocab_size=64
    ),
    "by score": lambda: class_of(
        "deepseek_v4", "DeepseekV4TopKRouter", scoring_func="sqrtsoftplus", routed_scaling_factor=1.5
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_of_a_gate(variant: str) -> None:
    gate = VARIANTS[variant]()
    assert expressible(gate)
    compare(gate)


def test_every_gate_that_is_named_was_met() -> None:
    met = {type(g).__name__ for a in architectures.DECORATED for g in gates_of(built(a)[0]).values()}
    assert met | {type(make()).__name__ for make in VARIANTS.values()} == SUPPORTED | set(MISSING)


@pytest.mark.parametrize(
    "architecture, settings, what",
    [
        ("axk2", {"num_group": 4}, "groups that count as 0"),
        ("muse_spark", {"output_multiplier": 0.5}, "a factor on the logits"),
        ("laguna", {"router_logit_softcapping": 5.0}, "a soft cap on the logits"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "the selection 'noaux_tc'"),
        ("deepseek_v4", {"score_fn": nn.Tanh()}, "the score Tanh"),
        ("gemma4", {}, "a learned factor on each expert's weights"),
        ("phimoe", {}, "sparsemixer"),
    ],
)
def test_what_is_missing_is_said(architecture: str, settings: dict[str, Any], what: str) -> None:
    gate = gate_of(architecture, **settings)
    with pytest.raises(
        NotImplementedError, match=f"router: {type(gate).__name__} needs {what}.*, which this package lacks"
    ):
        huggingface.router(gate, torch.zeros(3, 32), **({} if settings == {} else others(gate, 3, 8)))


def test_an_unknown_gate() -> None:
    with pytest.raises(NotImplementedError, match="router: Linear needs to be known"):
        huggingface.router(nn.Linear(4, 4), torch.zeros(3, 4))
    with pytest.raises(TypeError, match=r"router: hidden_states must be a torch.Tensor; got list"):
        huggingface.router(gate_of("mixtral"), [[1.0]])  # type: ignore[arg-type]


def test_ties_go_to_the_smaller_expert() -> None:
    gate = gate_of("mixtral")
    nn.init.zeros_(gate.weight)
    _, weights, ids = huggingface.router(gate, torch.randn(5, 32))
    torch.testing.assert_close(ids, torch.tensor([[0, 1]]).expand(5, 2))
    torch.testing.assert_close(weights, torch.full((5, 2), 0.5))


def moe_of(block: Any) -> MoE:
    """The block as a layer of this package: options of its gate, weights by the table of names."""
    own = block.state_dict()
    weights: dict[str, Tensor] = {}
    for name, candidates in huggingface.MOE_WEIGHTS.items():
        for theirs in candidates:
            halves = (theirs,) if isinstance(theirs, str) else theirs
            if all(half in own for half in halves):
                weights[name] = torch.cat([own[half] for half in halves])
                break
    if "router.expert_bias" in weights:
        weights["router.expert_bias"] = weights["router.expert_bias"].reshape(-1)
    gate = block.gate if hasattr(block, "gate") else block.router
    family = next(f for f in FAMILIES if type(gate).__name__ in f.gates)
    extra = others(gate, 1, len(weights["router.weight"]))
    options = family.options(gate, **extra)
    assert isinstance(options, dict)
    options["expert_bias"] = options.pop("bias", None) is not None
    experts, hidden_size, intermediate_size = weights["experts.down_proj"].shape
    shared = None
    if "shared_expert.down_proj.weight" in weights:
        shared = SwiGLU(hidden_size, weights["shared_expert.down_proj.weight"].shape[1])
    layer = MoE(hidden_size, intermediate_size, experts, gate.top_k, shared_expert=shared, **options)
    layer.load_state_dict(weights)  # strict: every name of ours, and no other
    return layer


@pytest.mark.parametrize(
    "architecture",
    [
        "afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flint", "glm4_moe", "granitemoe",
        "hunyuan_v1_moe", "jamba", "lfm2_moe", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "solar_open",
    ],
)  # fmt: skip
def test_weights_by_name_into_our_layer(architecture: str) -> None:
    model = built(architecture)[0]
    block = next(m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module))
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(6))
    expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(moe_of(block)(x), expected.reshape(x.shape), rtol=1e-4, atol=1e-5)
