"""The weights of a layer under the names of Hugging Face's models, there and back.

A block has one tensor for all experts (transformers 5) or one for each (checkpoints):

    experts.gate_up_proj [E, 2I, H], experts.down_proj [E, H, I]                       all but gpt-oss
    experts.3.gate_proj.weight, experts.3.up_proj.weight, experts.3.down_proj.weight   Qwen, DeepSeek
    experts.3.w1.weight, experts.3.w3.weight, experts.3.w2.weight                      Mixtral
    experts.gate_up_proj [E, H, 2I], experts.down_proj [E, I, H], with biases          gpt-oss; gate and up interleaved
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moeroute import check
from moeroute.ops.activations.op import Activation

Family = Literal["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]
FAMILIES: tuple[Family, ...] = get_args(Family)

# A weight of `moeroute.nn.MoE`, and what Transformers calls it inside a model's MoE block: the first name that it has.
# Two names are the upper and the lower half of ours. For blocks of gated experts, gate before up, weights [E, out, in].
MOE_WEIGHTS: dict[str, tuple[str | tuple[str, str], ...]] = {
    "router.weight": ("gate.weight", "gate.wg.weight", "router.weight", "router.gate.weight"),
    "router.expert_bias": (
        "gate.e_score_correction_bias",
        "gate.moe_statics.e_score_correction_bias",
        "e_score_correction_bias",
        "expert_bias",
    ),
    "experts.gate_up_proj": ("experts.gate_up_proj",),
    "experts.down_proj": ("experts.down_proj",),
    "shared_expert.gate_up_proj.weight": (
        ("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"),
        ("shared_expert.gate_proj.weight", "shared_expert.up_proj.weight"),
        ("shared_mlp.gate_proj.weight", "shared_mlp.up_proj.weight"),
    ),
    "shared_expert.down_proj.weight": (
        "shared_experts.down_proj.weight",
        "shared_expert.down_proj.weight",
        "shared_mlp.down_proj.weight",
    ),
}
_MORE = {
    "router.bias": ("router.bias",),
    "router.hash_table": ("gate.tid2eid",),
    "experts.gate_up_proj_bias": ("experts.gate_up_proj_bias",),
    "experts.down_proj_bias": ("experts.down_proj_bias",),
    "shared_expert_gate.weight": ("shared_expert_gate.weight",),
}
# Gate, up and down of one expert.
_EACH = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def weights_of_layer(layer: Any, state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The layer's state dict, made of a block's."""
    operator = "nn.MoE.load_huggingface"
    if not isinstance(state_dict, Mapping):
        raise check.wrong_type(operator, "state_dict", "a mapping of names to tensors", state_dict)
    if not isinstance(prefix, str):
        raise check.wrong_type(operator, "prefix", "a str", prefix)
    block = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    wanted = layer.state_dict()
    found = _found(operator, block, wanted, layer.num_experts)
    _in_the_layers_order(found, layer.experts.interleaved, layer.experts.activation)
    for name, value in found.items():
        if name == "router.expert_bias":
            value = found[name] = value.reshape(-1)
        if value.shape != wanted[name].shape:
            raise check.wrong_shape(operator, name, f"{list(wanted[name].shape)}, as the layer", value)
    return found


def _found(
    operator: str, block: dict[str, Tensor], wanted: Mapping[str, Tensor], num_experts: int
) -> dict[str, Tensor]:
    """By the layer's names; nothing may be missing or left."""
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for name in wanted:
        for theirs in (*MOE_WEIGHTS.get(name, ()), *_MORE.get(name, ()), *_by_expert(name, num_experts)):
            parts = (theirs,) if isinstance(theirs, str) else theirs
            if all(part in block for part in parts):
                tensors = [block[part] for part in parts]
                if len(parts) == 1:
                    found[name] = tensors[0]
                elif parts[0].startswith("experts."):
                    rows = len(parts) // num_experts
                    found[name] = torch.stack(
                        [torch.cat(tensors[e * rows : (e + 1) * rows]) for e in range(num_experts)]
                    )
                else:
                    found[name] = torch.cat(tensors)
                used |= set(parts)
                break
        else:
            raise check.wrong_value(operator, "state_dict", f"one with a weight for {name}", _some(block))
    if left := sorted(block.keys() - used):
        wanted_text = "one whose block has no weights that the layer lacks"
        raise check.wrong_value(operator, "state_dict", wanted_text, ", ".join(left[:4]))
    return found


def _some(block: dict[str, Tensor]) -> str:
    names = sorted(block)
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "none of this prefix"


def _by_expert(name: str, num_experts: int) -> list[tuple[str, ...]]:
    """The names of all experts' tensors, one after the other."""
    kinds = {"experts.gate_up_proj": (0, 1), "experts.down_proj": (2,)}.get(name)
    if kinds is None:
        return []
    return [tuple(f"experts.{e}.{names[kind]}.weight" for e in range(num_experts) for kind in kinds) for names in _EACH]


def _in_the_layers_order(found: dict[str, Tensor], interleaved: bool, activation: Activation) -> None:
    """gpt-oss, the one with biases of experts, has [E, in, out] and pairs of gate and up."""
    theirs = "experts.gate_up_proj_bias" in found
    if theirs:
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            found[name] = found[name].transpose(1, 2)
    if theirs != interleaved and activation != "relu2":
        for name in ("experts.gate_up_proj", "experts.gate_up_proj_bias"):
            if name in found:
                found[name] = _halves(found[name]) if theirs else _pairs(found[name])


def _halves(pairs: Tensor) -> Tensor:
    """Gate, up, gate, up, ... to gates, then ups, along dimension 1."""
    return torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)


def _pairs(halves: Tensor) -> Tensor:
    return torch.stack(halves.chunk(2, dim=1), dim=2).flatten(1, 2)


def weights_of_block(layer: Any, family: Family, prefix: str, each_expert: bool) -> dict[str, Tensor]:
    """A block's state dict, made of the layer's."""
    operator = "nn.MoE.huggingface_state_dict"
    check.one_of(operator, "family", family, FAMILIES)
    check.flag(operator, "each_expert", each_expert)
    own = {name: value.detach() for name, value in layer.state_dict().items()}
    oss = family == "gpt_oss"
    if oss and each_expert:
        raise check.wrong_value(operator, "each_expert", "False for gpt_oss", True)
    if layer.experts.interleaved != oss:
        for name in ("experts.gate_up_proj", "experts.gate_up_proj_bias"):
            if name in own:
                own[name] = _pairs(own[name]) if oss else _halves(own[name])
    made: dict[str, Tensor] = {}
    for name, value in own.items():
        made |= _named(operator, name, value, family, each_expert)
    return {f"{prefix}{name}": value for name, value in made.items()}


def _named(operator: str, name: str, value: Tensor, family: Family, each_expert: bool) -> dict[str, Tensor]:
    oss, deepseek = family == "gpt_oss", family == "deepseek_v3"
    if name == "router.weight":
        return {"router.weight" if oss else "gate.weight": value}
    if name == "router.expert_bias" and deepseek:
        return {"gate.e_score_correction_bias": value}
    if name in ("experts.gate_up_proj", "experts.down_proj"):
        if each_expert:
            return _of_each(name, value, _EACH[family == "mixtral"])
        return {name: value.transpose(1, 2).contiguous() if oss else value}
    if name in ("router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias") and oss:
        return {name: value}
    if name == "shared_expert.gate_up_proj.weight" and deepseek:
        gate, up = value.chunk(2)
        return {"shared_experts.gate_proj.weight": gate, "shared_experts.up_proj.weight": up}
    if name == "shared_expert.down_proj.weight" and deepseek:
        return {"shared_experts.down_proj.weight": value}
    raise check.wrong_value(operator, "family", f"one that has a place for {name}", repr(family))


def _of_each(name: str, value: Tensor, names: tuple[str, str, str]) -> dict[str, Tensor]:
    gate, up, down = names
    found = {}
    for e, matrix in enumerate(value):
        if name == "experts.down_proj":
            found[f"experts.{e}.{down}.weight"] = matrix
        else:
            found[f"experts.{e}.{gate}.weight"], found[f"experts.{e}.{up}.weight"] = matrix.chunk(2)
    return found
