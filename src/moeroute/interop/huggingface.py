"""Hugging Face Transformers: its models with the routing of this package.

    moeroute.interop.huggingface.register()
    model.set_experts_implementation("moeroute")    # or from_pretrained(..., experts_implementation="moeroute")
    moeroute.interop.huggingface.check(model)       # {"model.layers.0.mlp.experts": "moeroute", ...}

For training and inference, on any device. What an expert computes is the model's affair: the order of gate and
up, the activation, biases, a norm behind the expert. Bringing the tokens to the experts and summing up what comes
back are ours: the sum over a token's experts has one order and one rounding, on every device. So are SwiGLU and GEGLU
where a model has the host's own: one pass over the rows, where the host's takes three to five.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from moeroute import check as checks
from moeroute.interop import hosts
from moeroute.interop.huggingface_gates import SERIES
from moeroute.interop.huggingface_gates import router as router
from moeroute.nn import activate, grouped_linear
from moeroute.nn.huggingface import MOE_WEIGHTS as MOE_WEIGHTS
from moeroute.ops.activations.op import Activation
from moeroute.ops.experts import autocast_is_on
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.permutation import permute, unpermute

NAME = "moeroute"

# The question of `check` and the answer that only our function knows.
_PROBE: Any = object()
_ANSWER: Any = object()

# What the host has of its own, read when we are registered, since a compiler follows no import: the gate of models
# without one, and the classes that stand for SiLU and for GELU by its tanh formula.
_gates: list[Any] = []
_activations: dict[type, Activation] = {nn.SiLU: "swiglu"}


def register() -> None:
    """Add "moeroute" to the experts implementations of Transformers. A second call changes nothing.

    Then `model.set_experts_implementation("moeroute")` and `from_pretrained(..., experts_implementation="moeroute")`
    work for every model whose experts class has the host's decorator `use_experts_implementation`. Other models
    take the setting and ignore it without a word, and so do FP8 experts, which have a register of their own: ask
    `check`.

    Raises ImportError where transformers is not installed or is of an unknown version.
    """
    hosts.require("interop.huggingface.register", "transformers", SERIES)
    host = importlib.import_module("transformers.integrations.moe")
    host.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    _gates[:] = [host._default_apply_gate]
    theirs = importlib.import_module("transformers.activations")
    _activations.update({theirs.SiLUActivation: "swiglu", theirs.GELUTanh: "geglu"})


def check(model: nn.Module) -> dict[str, str]:
    """Which experts layers of a model call us: the name of each and what runs there.

    "moeroute" where it is ours; else the name of the host's implementation that is set ("eager", "grouped_mm", ...),
    or "its own forward" for a layer that ignores the setting, or "another register" for one that asks where
    "moeroute" is unknown (FP8 experts; there its forward is a KeyError). Nothing is computed.

    Raises ImportError as `register`, TypeError for what is no module.
    """
    operator = "interop.huggingface.check"
    hosts.require(operator, "transformers", SERIES)
    if not isinstance(model, nn.Module):
        raise checks.wrong_type(operator, "model", "a torch.nn.Module", model)
    return {name: _runs(module) for name, module in model.named_modules() if _is_experts(name, module)}


def _is_experts(name: str, module: nn.Module) -> bool:
    decorated = hasattr(module, "is_concatenated") and hasattr(module, "has_post_expert_norm")
    kind = type(module).__name__
    called_so = name.split(".")[-1] == "experts" or kind.endswith(("Experts", "CDMoE"))
    return decorated or (called_so and "Shared" not in kind)  # shared experts are routed nowhere


def _runs(module: Any) -> str:
    try:
        ours = type(module).forward(module, _PROBE, None, None) is _ANSWER
    except KeyError:
        return "another register"
    except Exception:  # a foreign forward may raise anything for an object() as hidden states
        ours = False
    if ours:
        return NAME
    found = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not hasattr(module, "is_concatenated") or found in (None, NAME):
        return "its own forward"
    return str(found)


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module of Transformers; what `register` hands over.

    Args:
        self: the experts module, with the flags that the host's decorator sets.
        hidden_states: [T, H]; H is the experts' own width, not always the model's.
        top_k_index: [T, K], of any integer dtype. An id outside [0, num_experts) is an empty slot: it takes no row,
            adds nothing and gives its weight the gradient 0. Expert parallelism marks the experts of other ranks so.
        top_k_weights: [T, K].

    Returns [T, H] in the dtype of hidden_states. The products are in the weights' dtype, or in autocast's.
    """
    if hidden_states is _PROBE:
        return _ANSWER
    experts: Any = self
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    dtype = _products_dtype(getattr(experts, first))
    plan = plan_from_expert_ids(top_k_index, experts.num_experts, num_rows=top_k_index.numel())
    rows = _linear(experts, first, permute(hidden_states.to(dtype), plan), plan.rows_per_expert)
    rows = _activated(experts, rows)
    rows = _linear(experts, "down_proj", rows.to(dtype), plan.rows_per_expert)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    if (rows.dtype is torch.float64) != (top_k_weights.dtype is torch.float64):
        top_k_weights = top_k_weights.to(rows.dtype)  # a float64 model may choose in float32
    return unpermute(rows, plan, top_k_weights).to(hidden_states.dtype)


def _activated(experts: Any, rows: Tensor) -> Tensor:
    """The model's own activation; where it is the host's gate around SiLU or GELU, in one pass and rounded once."""
    result: Tensor
    if not experts.has_gate:
        result = experts.act_fn(rows)
    elif (name := _known_activation(experts)) is not None:
        result = activate(rows, name)
    else:
        result = experts._apply_gate(rows)
    return result


def _known_activation(experts: Any) -> Activation | None:
    act = getattr(experts, "act_fn", None)
    if type(experts)._apply_gate not in _gates or not isinstance(act, nn.Module):
        return None
    if act._forward_hooks or act._forward_pre_hooks or act._backward_hooks:
        return None
    return _activations.get(type(act))


def _products_dtype(weight: Tensor) -> torch.dtype:
    """Of the weights, since they may be float32 beside bfloat16 tokens; under autocast its own."""
    device = weight.device.type
    widened = autocast_is_on(device) and weight.dtype is not torch.float64
    return torch.get_autocast_dtype(device) if widened else weight.dtype


def _linear(experts: Any, name: str, rows: Tensor, sizes: Any) -> Tensor:
    weight = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return grouped_linear(rows, weight.transpose(1, 2) if experts.is_transposed else weight, sizes, bias)
