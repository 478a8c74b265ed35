"""The gates of Transformers' models in the options of `gating_topk`, each with the settings of its own module."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeroute import check
from moeroute.interop import hosts
from moeroute.nn import grouped_linear
from moeroute.ops.gating.op import gating_topk
from moeroute.ops.hash_routing import look_up_expert_ids

SERIES = ("5.24",)  # of transformers

# ---------------------------------------------------------------------------- the families

# What a gate's module and the other arguments of its forward give: options of `gating_topk`, or what is missing there.
Options = dict[str, Any] | str


class Family(NamedTuple):
    """Gates that differ in settings only.

    options: from the module and the other arguments of its forward.
    products: the dtype of the linear map; None is the weight's own.
    logits: the dtype in which they go on and are returned; None is that of the products.
    weights: the dtype of the weights: torch.float32, "tokens" or "logits".
    without_autocast: the host switches it off for the whole gate.
    linear: the name of the linear module, where the gate is not it.
    """

    gates: tuple[str, ...]
    options: Callable[..., Options]
    products: torch.dtype | None = None
    logits: torch.dtype | None = None
    weights: torch.dtype | str = torch.float32
    without_autocast: bool = False
    linear: str | None = None


def _softmax(gate: Any) -> Options:
    return {"renormalize": getattr(gate, "norm_topk_prob", True), "eps": 0.0}


def _grouped(gate: Any) -> dict[str, Any]:
    return {"num_groups": gate.num_group, "topk_groups": gate.topk_group, "group_score": "top2_sum"}


def _grouped_softmax(gate: Any) -> Options:
    renormalize = getattr(gate, "norm_topk_prob", True)
    return {"renormalize": renormalize, "scaling_factor": gate.routed_scaling_factor} | _grouped(gate)


def _best_groups(gate: Any) -> Options:
    options = {"scaling_factor": gate.routed_scaling_factor}
    if gate.topk_method == "group_limited_greedy":
        return options | {"num_groups": gate.num_group, "topk_groups": gate.topk_group}
    return options if gate.topk_method == "greedy" else f"the selection {gate.topk_method!r}"


def _sigmoid(gate: Any, bias: Tensor | None, eps: float = 1e-20, scaling_factor: float = 1.0) -> dict[str, Any]:
    renormalize = getattr(gate, "norm_topk_prob", True)
    return {"score": "sigmoid", "bias": bias, "renormalize": renormalize, "eps": eps, "scaling_factor": scaling_factor}


def _grouped_sigmoid(gate: Any) -> Options:
    scaling_factor = getattr(gate, "routed_scaling_factor", 1.0)
    return _sigmoid(gate, gate.e_score_correction_bias, scaling_factor=scaling_factor) | _grouped(gate)


def _light_grouped_sigmoid(gate: Any) -> Options:
    if gate.num_group is not None:
        return "groups that count as 0, not as -inf, when they are out of the choice"
    return _sigmoid(gate, gate.e_score_correction_bias, scaling_factor=gate.routed_scaling_factor)


def _muse_spark(gate: Any) -> Options:
    if gate.output_multiplier != 1:
        return "a factor on the logits"
    return _sigmoid(gate, gate.e_score_correction_bias, gate.norm_topk_prob_eps, gate.routed_scaling_factor)


def _laguna(gate: Any) -> Options:
    if gate.router_logit_softcapping > 0:
        return "a soft cap on the logits"
    return _sigmoid(gate, gate.e_score_correction_bias, eps=0.0)


def _lfm2(gate: Any, expert_bias: Tensor | None = None) -> Options:
    return _sigmoid(gate, expert_bias if gate.use_expert_bias else None, 1e-6, gate.routed_scaling_factor)


def _by_name(gate: Any, **more: Any) -> Options:
    name = type(gate.score_fn).__name__
    score = {"Sigmoid": "sigmoid", "SqrtSoftplusActivation": "sqrtsoftplus"}.get(name)
    if score is None:
        return f"the score {name}"
    return {"score": score, "renormalize": True, "scaling_factor": gate.routed_scaling_factor} | more


def _hash(gate: Any, input_ids: Tensor) -> Options:
    return _by_name(gate, expert_ids=look_up_expert_ids(input_ids.reshape(-1), gate.tid2eid))


def _ernie(gate: Any) -> Options:
    # The host clamps the sum from below by it; a sum of some of the probabilities is far above.
    return {"bias": gate.moe_statics.e_score_correction_bias[0], "renormalize": True, "eps": gate.norm_min}


def _cohere(gate: Any) -> Options:
    if gate.expert_selection_fn == "softmax":
        return {"score": "topk_softmax"}
    return _sigmoid(gate, None, eps=0.0) | {"score": "topk_sigmoid"}


FAMILIES = (
    Family(
        (
            "FlexOlmoTopKRouter", "MellumTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter",
            "Qwen3NextTopKRouter", "Qwen3OmniMoeThinkerTextTopKRouter", "Qwen3OmniMoeTalkerTextTopKRouter",
            "Qwen3OmniMoeTextTopKRouter", "Qwen3VLMoeTextTopKRouter", "Qwen3_5MoeTopKRouter", "Qwen4ExpTextTopKRouter",
        ),
        _softmax,
        weights="logits",
    ),
    Family(("MixtralTopKRouter", "MiniMaxTopKRouter"), _softmax),
    Family(("HunYuanMoEV1Gate",), _softmax, weights="logits", linear="wg"),
    Family(("LaraMiniTopKRouter",), _softmax, products=torch.float32, weights="tokens"),
    Family(("JambaTopKRouter",), lambda gate: {}, weights="tokens"),
    Family(("Mistral4TopkRouter",), _grouped_softmax, weights="logits"),
    Family(("MistralLarge4TextTopkRouter",), _grouped_softmax, products=torch.float32, weights="logits"),
    Family(
        ("DeepseekV2TopkRouter", "DeepseekOcr2TextTopkRouter", "UnlimitedOcrTextTopkRouter"),
        _best_groups,
        products=torch.float32,
    ),
    Family(
        ("Ernie4_5_MoeTopKRouter", "Ernie4_5_VLMoeMoeTopKRouter"),
        _ernie,
        products=torch.float32,
        weights="tokens",
        without_autocast=True,
    ),
    Family(
        (
            "AXK1TopkRouter", "BailingHybridTopkRouter", "BeamTopKRouter", "DeepseekV3TopkRouter",
            "DeepseekV32TopkRouter", "Dots1TopkRouter", "Dots3NoteTextTopkRouter", "ExaoneMoeTopkRouter",
            "Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter", "Glm4vMoeTextTopkRouter", "Glm5NextTextTopkRouter",
            "GlmMoeDsaTopkRouter", "HYV4TopkRouter", "HYV4VLTopkRouter", "KimiLinearTopkRouter",
            "MiMoV2FlashTopkRouter", "NemotronHTopkRouter", "SolarOpenTopkRouter",
        ),
        _grouped_sigmoid,
        products=torch.float32,
        weights="logits",
    ),
    Family(("AXK2TopkRouter",), _light_grouped_sigmoid, products=torch.float32, weights="logits"),
    Family(("MuseSparkTopkRouter",), _muse_spark, products=torch.float32, weights="logits"),
    Family(("LagunaTopKRouter",), _laguna, logits=torch.float32, weights="tokens"),
    Family(("Lfm2MoeTopKRouter",), _lfm2, weights="logits"),
    Family(
        ("AfmoeTokenChoiceRouter",),
        lambda gate, expert_bias: _sigmoid(gate, expert_bias, scaling_factor=gate.route_scale),
        logits=torch.float32,
        linear="gate",
    ),
    Family(
        ("HYV3TopKRouter", "Dots3NoteVisionTopKRouter"),
        lambda gate, e_score_correction_bias: _sigmoid(
            gate, e_score_correction_bias, scaling_factor=gate.router_scaling_factor
        ),
        products=torch.float32,
        weights="logits",
    ),
    Family(
        ("MiniMaxM2TopKRouter",),
        lambda gate, e_score_correction_bias: _sigmoid(gate, e_score_correction_bias, eps=0.0),
    ),
    Family(("MiniMaxM3VLTopKRouter",), lambda gate: _sigmoid(gate, gate.e_score_correction_bias, eps=0.0)),
    Family(
        ("FlintTopKRouter",), lambda gate: _sigmoid(gate, None, eps=0.0), products=torch.float32, without_autocast=True
    ),
    Family(("DeepseekV4TopKRouter",), lambda gate: _by_name(gate, bias=gate.e_score_correction_bias), weights="logits"),
    Family(("DeepseekV4HashRouter",), _hash, weights="logits"),
    Family(
        ("Inkling2TopKRouter", "Inkling2LoopTopKRouter"),
        lambda gate: _by_name(gate, bias=gate.e_score_correction_bias),
        products=torch.float32,
        weights="logits",
    ),
    Family(("AriaTextTopKRouter", "GptOssTopKRouter"), lambda gate: {"score": "topk_softmax"}, weights="logits"),
    Family(
        ("GraniteMoeTopKRouter", "GraniteMoeSWATopKRouter", "GraniteMoeHybridTopKRouter", "GraniteMoeSharedTopKRouter"),
        lambda gate: {"score": "topk_softmax"},
        logits=torch.float32,
        weights="tokens",
    ),
    Family(
        ("OpenAIPrivacyFilterTopKRouter",),
        lambda gate: {"score": "topk_softmax", "scaling_factor": 1 / gate.top_k},
        products=torch.float32,
        weights="logits",
    ),
    Family(("Cohere2MoeTopKRouter",), _cohere, weights="tokens"),
    Family(
        ("Kolibri1TopKRouter",),
        lambda gate: _sigmoid(gate, gate.e_score_correction_bias, eps=0.0) | {"score": "topk_sigmoid"},
        products=torch.float32,
        weights="logits",
    ),
)  # fmt: skip

MISSING = {
    "DiffusionGemmaTextRouter": "a learned factor on each expert's weights",
    "Gemma4TextRouter": "a learned factor on each expert's weights",
    "InklingTopkRouter": "shared experts in the sum of the weights, and a learned factor on them",
    "PhimoeTopKRouter": "sparsemixer, a choice expert by expert with masked softmax",
    "ZayaRouter": "a network of its own for the logits, and an expert that skips",
}
_FAMILY_OF = {gate: family for family in FAMILIES for gate in family.gates}

# ---------------------------------------------------------------------------- the verb


def router(gate: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A gate of Transformers, computed by `gating_topk` with the settings, the weights and the dtypes of its module.

    In the place of the gate's forward: the arguments and the results are its own.

        gate.forward = functools.partial(huggingface.router, gate)

    Args:
        gate: the gate's module, such as a `Qwen3MoeTopKRouter`: where it keeps number, groups and factors.
        hidden_states: [..., H].
        *args: other arguments of the gate's forward: a bias, or the token ids.
        **kwargs: the same by name.

    Returns the logits [T, E], the weights [T, K] and the expert ids int64 [T, K], best first (the host's order is
    unspecified in many gates). Equal scores: the smaller expert first.

    Raises ImportError as `register`, NotImplementedError with the gate's name and what `gating_topk` lacks for it.
    """
    operator = "interop.huggingface.router"
    hosts.require(operator, "transformers", SERIES)
    check.tensor(operator, "hidden_states", hidden_states)
    name = type(gate).__name__
    family = _FAMILY_OF.get(name)
    options = MISSING.get(name, "to be known") if family is None else family.options(gate, *args, **kwargs)
    if family is None or isinstance(options, str):
        raise check.missing(operator, name, str(options))
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    with _autocast(tokens, family):
        logits = _logits(gate, tokens, family)
    gating = gating_topk(logits, gate.top_k, **options)
    if isinstance(family.weights, torch.dtype):
        dtype = family.weights
    else:
        dtype = logits.dtype if family.weights == "logits" else tokens.dtype
    return logits, gating.weights.to(dtype), gating.expert_ids.to(torch.int64)


def _autocast(tokens: Tensor, family: Family) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(tokens.device.type, enabled=False) if family.without_autocast else contextlib.nullcontext()


def _logits(gate: Any, tokens: Tensor, family: Family) -> Tensor:
    linear = gate if family.linear is None else getattr(gate, family.linear)
    bias = getattr(linear, "bias", None)
    dtype = family.products or linear.weight.dtype
    bias = None if bias is None else bias.to(dtype)[None]
    logits = grouped_linear(tokens.to(dtype), linear.weight.to(dtype)[None], [tokens.shape[0]], bias)  # one group
    return logits if family.logits is None else logits.to(family.logits)
