"""docs/models.md: every gate's lines against the module of Transformers that they stand for."""

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models_page
from hosts import architectures, models
from hosts.test_huggingface_gates import class_of, gates_of, others
from models_page import dense

T, H = 48, 32


def hidden(seed: int = 3) -> Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed))


def module(architecture: str, name: str, **config: Any) -> Any:
    found = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    return models.fill(getattr(found, name)(SimpleNamespace(**config))).eval()


# ---------------------------------------------------------------------------- gates with a module in the tiny models

# Of gates that several architectures share, or that no tiny model has: where they are.
ELSEWHERE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dots3_note_v": ("dots3_note", "Dots3NoteVisionTopKRouter", {"router_scaling_factor": 1.5}),
    "qwen3_omni_moe": ("qwen3_omni_moe", "Qwen3OmniMoeTextTopKRouter", {}),
    "qwen3_omni_moe_talker": ("qwen3_omni_moe", "Qwen3OmniMoeTalkerTextTopKRouter", {"norm_topk_prob": True}),
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextTopKRouter", {"norm_topk_prob": False}),
    "deepseek_v4": (
        "deepseek_v4",
        "DeepseekV4TopKRouter",
        {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
    ),
    "deepseek_v4_hash": (
        "deepseek_v4",
        "DeepseekV4HashRouter",
        {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "vocab_size": 64},
    ),
}
# Compared below, each in its own way.
OWN_TESTS = {
    "dbrx",
    "doge",
    "inkling",
    "jetmoe",
    "llama4",
    "longcat_flash",
    "nllb_moe",
    "step3p7",
    "switch_transformers",
}
GATES = sorted({gate for block in models_page.blocks() for gate in block.gates} - OWN_TESTS)
SETTINGS: dict[str, dict[str, Any]] = {
    "axk2": {"num_group": 4, "topk_group": 2},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "num_group": 4, "topk_group": 2},
    "laguna": {"router_logit_softcapping": 5.0},
    "muse_spark": {"output_multiplier": 0.5},
}


def gate_module(gate: str) -> Any:
    if gate in ELSEWHERE:
        architecture, name, config = ELSEWHERE[gate]
        return class_of(architecture, name, **config)
    found = copy.deepcopy(next(iter(gates_of(architectures.build(gate)[0]).values())))
    vars(found).update(SETTINGS.get(gate, {}))
    return found


def first_of(thing: Any, *names: str, default: Any = None) -> Any:
    """The value under the first of these names that the module has."""
    for name in names:
        found = thing
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    return default


def settings(gate: str, its: Any, more: dict[str, Tensor]) -> dict[str, Any]:
    """The page's names from the module's attributes."""
    bias = first_of(its, "e_score_correction_bias", "moe_statics.e_score_correction_bias", "balancing_biases")
    for name in ("expert_bias", "e_score_correction_bias"):
        bias = more.get(name, bias)
    return {
        "norm_topk_prob": False if gate == "jamba" else first_of(its, "norm_topk_prob", default=True),
        "n_group": first_of(its, "num_group", default=None if gate == "axk2" else 1),
        "topk_group": first_of(its, "topk_group", default=1),
        "scaling_factor": first_of(its, "routed_scaling_factor", "router_scaling_factor", "route_scale", default=1.0),
        "bias": None if bias is None else bias.flatten().detach(),
        "per_expert_scale": first_of(its, "per_expert_scale"),
        "softcap": first_of(its, "router_logit_softcapping"),
        "output_multiplier": first_of(its, "output_multiplier"),
        "jitter": first_of(its, "router_jitter_noise"),
        "training": its.training,
        "table": first_of(its, "tid2eid"),
        "input_ids": more.get("input_ids"),
    }


def logits_of(its: Any, x: Tensor, theirs: Tensor) -> Tensor:
    """Before the gate: the linear map, where the module returns something else."""
    if hasattr(its, "per_expert_scale"):  # it returns the probabilities
        return torch.nn.functional.linear(its.norm(x) * its.scale * its.scalar_root_size, its.proj.weight)
    if hasattr(its, "output_multiplier") or hasattr(its, "router_logit_softcapping"):  # it returns them changed
        return torch.nn.functional.linear(x, its.weight)
    return theirs


@pytest.mark.parametrize("gate", GATES)
def test_lines_are_the_module(gate: str) -> None:
    its = gate_module(gate)
    linear = next(p for p in its.parameters() if p.ndim == 2)
    x = hidden()[:, : linear.shape[1]]
    num_experts = int(first_of(its, "num_router_classes", "num_experts", "n_routed_experts", default=linear.shape[0]))
    more = others(its, T, num_experts) if gate != "zaya" else {}
    given = x[None] if gate in ("afmoe", "zaya") else x
    with torch.no_grad():
        their_logits, their_weights, their_ids, *_ = its(given, **more)
    names = settings(gate, its, more)
    names |= {"logits": logits_of(its, x, their_logits).detach(), "T": T, "E": num_experts, "k": their_ids.shape[-1]}
    if gate == "zaya":
        names |= {"E": num_experts - 1, "x": x, "experts": lambda rows, rows_per_expert: rows}
    forms = models_page.of_gate(gate, **names)
    expected = dense(their_weights.float(), their_ids, num_experts)
    results = [dense(found["weights"].detach().float(), found["expert_ids"], names["E"]) for found in forms]
    if gate == "zaya":
        expected = expected[:, :-1]
    if gate == "cohere2_moe":  # two forms, of which this model has one
        results = results[:1] if its.expert_selection_fn == "softmax" else results[1:]
    (actual,) = results
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


def test_gates_of_both_forms_and_in_training() -> None:
    its = gate_module("cohere2_moe")
    vars(its).update(expert_selection_fn="sigmoid", norm_topk_prob=False)
    logits, weights, ids = its(hidden())
    found = models_page.of_gate("cohere2_moe", logits=logits, k=its.top_k, norm_topk_prob=False)[1]
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], 8), dense(weights, ids, 8))

    its = gate_module("phimoe").train()
    its.input_jitter_noise = 0.0
    results = []
    for ours in (False, True):
        x = hidden().requires_grad_()
        torch.manual_seed(7)
        if ours:
            names = settings("phimoe", its, {}) | {"T": T, "logits": nn.functional.linear(x, its.weight)}
            (found,) = models_page.of_gate("phimoe", **names)
            weights, ids = found["weights"], found["expert_ids"]
        else:
            _, weights, ids = its(x * 1.0)  # it changes its input in place
        weights.backward(torch.randn(T, 2, generator=torch.Generator().manual_seed(8)))
        results.append((weights.detach(), ids.long(), x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------------------- gates inside a layer


def test_selection_on_logits() -> None:
    gate = module("llama4", "Llama4Router", hidden_size=H, num_local_experts=8, num_experts_per_tok=2)
    scores, logits = gate(hidden() * 8)
    assert (scores == 1).any()  # beyond the reach of a choice by sigmoid
    (found,) = models_page.of_gate("llama4", logits=logits, k=2, norm_topk_prob=False)
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], 8), scores)


def test_jetmoe() -> None:
    gate = models.fill(importlib.import_module("transformers.models.jetmoe.modeling_jetmoe").JetMoeTopKGating(H, 8, 2))
    _, tokens, weights, sizes, logits = gate(hidden())
    (found,) = models_page.of_gate("jetmoe", logits=logits, k=2)
    experts = torch.repeat_interleave(torch.arange(8), torch.tensor(sizes))
    expected = torch.zeros(T, 8).index_put((tokens, experts), weights)
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], 8), expected)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_dbrx(p: float) -> None:
    ffn = importlib.import_module("transformers.models.dbrx.modeling_dbrx").DbrxFFN
    logits = torch.randn(T, 8, generator=torch.Generator().manual_seed(1))
    weights, ids = ffn.route_tokens_to_experts(SimpleNamespace(top_k=3, moe_normalize_expert_weights=p), logits)
    (found,) = models_page.of_gate("dbrx", logits=logits, k=3, p=p)
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], 8), dense(weights, ids, 8))


def test_step3p7() -> None:
    gate = module("step3p7", "Step3p7TopKRouter", hidden_size=H, num_local_experts=8, num_experts_per_tok=2)
    logits, weights, ids = gate(hidden())
    (found,) = models_page.of_gate("step3p7", logits=logits, k=2, bias=gate.e_score_correction_bias)
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], 8), dense(weights, ids, 8))


def test_inkling() -> None:
    gate: Any = next(iter(gates_of(architectures.build("inkling")[0]).values()))
    x = hidden()[:, : gate.weight.shape[1]]
    _, weights, ids, shared = gate(x)
    found = models_page.of_gate(
        "inkling",
        logits=nn.functional.linear(x, gate.weight),
        k=gate.top_k,
        bias=gate.e_score_correction_bias,
        E=gate.num_experts,
        T=T,
        num_shared=gate.n_shared_experts,
        scaling_factor=gate.route_scale,
        global_scale=gate.global_scale,
    )[0]
    expected = torch.cat([dense(weights, ids, gate.num_experts), shared], dim=1)
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], gate.n_total_experts), expected)


def test_experts_that_return_the_token() -> None:
    moe = module(
        "longcat_flash",
        "LongcatFlashMoE",
        num_experts_per_tok=3,
        num_local_experts=8,
        n_routed_experts=8,
        zero_expert_num=3,
        routed_scaling_factor=1.5,
        hidden_size=H,
        expert_ffn_hidden_size=16,
        hidden_act="silu",
    )
    x = hidden()

    def experts(rows: Tensor, rows_per_expert: Tensor) -> Tensor:
        outputs = []
        for e, part in enumerate(rows.split(rows_per_expert.tolist())):
            gate, up = (part @ moe.experts.gate_up_proj[e].t()).chunk(2, dim=1)
            outputs.append((nn.functional.silu(gate) * up) @ moe.experts.down_proj[e].t())
        return torch.cat(outputs)

    bias = moe.router.e_score_correction_bias
    logits, weights, ids = moe.router(x)
    assert (ids >= 8).any()
    names = {"logits": logits, "k": 3, "bias": bias, "scaling_factor": 1.5, "E": 8, "x": x, "experts": experts}
    (found,) = models_page.of_gate("longcat_flash", **names)
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], 11), dense(weights, ids, 11))
    torch.testing.assert_close(found["output"], moe(x))


def test_product_keys() -> None:
    config = {
        "hidden_size": H,
        "intermediate_size": 16,
        "hidden_act": "silu",
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_bias": False,
    }
    moe = module("doge", "DogeCDMoE", **config)
    x = hidden()
    output, keys = moe(x[None])
    (found,) = models_page.of_gate("doge", keys=keys, k=3)
    by_expert = nn.functional.silu(x @ moe.down_embed.weight.t()) * dense(found["weights"], found["expert_ids"], 16)
    shared = moe.down_proj(moe.act_fn(moe.gate_proj(x)) * moe.up_proj(x))
    torch.testing.assert_close(output[0], shared + by_expert @ moe.up_embed.weight)


def dense_experts(experts: Any) -> Any:
    """The host's experts on the rows that a plan gives them."""

    def run(rows: Tensor, rows_per_expert: Tensor) -> Tensor:
        parts = rows.split(rows_per_expert.tolist())
        return torch.cat([experts[f"expert_{e}"](part) for e, part in enumerate(parts)])

    return run


def test_capacity_per_sequence() -> None:
    config = {
        "num_experts": 4,
        "expert_capacity": 2,
        "hidden_size": H,
        "router_bias": False,
        "router_jitter_noise": 0.0,
        "router_ignore_padding_tokens": False,
        "router_dtype": "float32",
        "d_model": H,
        "d_ff": 16,
        "dropout_rate": 0.0,
        "dense_act_fn": "relu",
    }
    mlp = module("switch_transformers", "SwitchTransformersSparseMLP", **config)
    x = hidden()
    (found,) = models_page.of_gate(
        "switch_transformers",
        logits=x @ mlp.router.classifier.weight.t(),
        T=T,
        E=4,
        B=6,
        x=x,
        capacity=2,
        experts=dense_experts(mlp.experts),
    )
    assert (found["plan"].row_of_slot < 0).any()
    torch.testing.assert_close(found["output"], mlp(x.view(6, -1, H)).reshape(T, H))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("prioritized", [False, True])
def test_first_choices_first(prioritized: bool, before: bool) -> None:
    config = {
        "num_experts": 4,
        "expert_capacity": 16,
        "hidden_size": H,
        "router_bias": False,
        "router_ignore_padding_tokens": False,
        "router_dtype": "float32",
        "second_expert_policy": "all",
        "normalize_router_prob_before_dropping": before,
        "batch_prioritized_routing": prioritized,
        "moe_eval_capacity_token_fraction": -1,
    }
    gate = module("nllb_moe", "NllbMoeTop2Router", **config)
    _, expected, logits = gate(hidden())
    (found,) = models_page.of_gate(
        "nllb_moe",
        logits=logits,
        T=T,
        E=4,
        x=hidden(),
        capacity=16,
        experts=lambda rows, rows_per_expert: rows,
        batch_prioritized_routing=prioritized,
        normalize_router_prob_before_dropping=before,
    )
    kept = found["plan"].row_of_slot.view(T, 2) >= 0
    assert not kept.all()
    torch.testing.assert_close(dense(found["weights"] * kept, found["expert_ids"], 4), expected)


# ---------------------------------------------------------------------------- losses


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_of_the_host(masked: bool) -> None:
    loss = importlib.import_module("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    layers = tuple(torch.randn(T, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3))
    mask = (torch.arange(T) % 5 > 0).long().view(4, -1) if masked else None
    (code,) = (b.code for b in models_page.blocks() if "load_balancing_loss_func" in b.title)
    padding_mask = None if mask is None else mask.flatten() == 0
    found = models_page.run(code, all_logits=layers, k=2, padding_mask=padding_mask)
    torch.testing.assert_close(found["loss"], loss(layers, 8, 2, mask))


def test_every_gate_of_the_host_is_on_the_page() -> None:
    """By architecture: each that decorates its experts."""
    gates = {gate for block in models_page.blocks() for gate in block.gates}
    assert set(architectures.DECORATED) <= gates
