"""Weights under the names of Hugging Face's blocks, there and back, without the host; tests/hosts compares outputs."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeroute.nn import MoE, SwiGLU
from moeroute.nn.huggingface import Family
from moeroute.testing import assert_same_bits
from small_layers import make_layer

OPTIONS: dict[Family, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {"score": "sigmoid", "expert_bias": True},
    "gpt_oss": {"score": "topk_softmax", "activation": "swiglu_clamped", "bias": True},
}


def layer_of(family: Family, seed: int = 0, **more: Any) -> MoE:
    shared = SwiGLU(6, 3) if family == "deepseek_v3" else None
    return make_layer(seed=seed, shared_expert=shared, **OPTIONS[family], **more)


FORMS = [
    (family, each) for family, each in itertools.product(OPTIONS, (False, True)) if not (each and family == "gpt_oss")
]


@pytest.mark.parametrize(("family", "each_expert"), FORMS)
@pytest.mark.parametrize("interleaved", [(False, False), (True, False), (False, True)], ids=str)
def test_there_and_back(family: Family, each_expert: bool, interleaved: tuple[bool, bool]) -> None:
    source = layer_of(family, interleaved=interleaved[0])
    target = layer_of(family, seed=1, interleaved=interleaved[1])
    block = source.huggingface_state_dict(family, "model.layers.3.mlp.", each_expert=each_expert)
    assert all(name.startswith("model.layers.3.mlp.") for name in block)
    others = {
        "model.layers.3.self_attn.q_proj.weight": torch.zeros(1),
        "model.layers.31.mlp.gate.weight": torch.ones(1),
    }
    target.load_huggingface(block | others, "model.layers.3.mlp.")
    x = torch.randn(5, 6)
    torch.testing.assert_close(target(x), source(x))
    again = target.huggingface_state_dict(family, "model.layers.3.mlp.", each_expert=each_expert)
    assert again.keys() == block.keys()
    assert_same_bits(list(again.values()), list(block.values()), "back")
    own = source.state_dict()
    if interleaved == (False, False):
        assert_same_bits(list(target.state_dict().values()), list(own.values()), "the layer's own")


def test_names_and_shapes() -> None:
    shapes = {family: _shapes(layer_of(family).huggingface_state_dict(family)) for family in OPTIONS}
    fused = {"gate.weight": (4, 6), "experts.gate_up_proj": (4, 10, 6), "experts.down_proj": (4, 6, 5)}
    assert shapes["mixtral"] == shapes["qwen3_moe"] == fused
    assert shapes["deepseek_v3"] == fused | {
        "gate.e_score_correction_bias": (4,),
        "shared_experts.gate_proj.weight": (3, 6),
        "shared_experts.up_proj.weight": (3, 6),
        "shared_experts.down_proj.weight": (6, 3),
    }
    assert shapes["gpt_oss"] == {
        "router.weight": (4, 6), "router.bias": (4,), "experts.gate_up_proj": (4, 6, 10),
        "experts.gate_up_proj_bias": (4, 10), "experts.down_proj": (4, 5, 6), "experts.down_proj_bias": (4, 6),
    }  # fmt: skip
    each = _shapes(layer_of("mixtral").huggingface_state_dict("mixtral", each_expert=True))
    assert {name: each[f"experts.3.{name}.weight"] for name in ("w1", "w2", "w3")} == {
        "w1": (5, 6), "w2": (6, 5), "w3": (5, 6),
    }  # fmt: skip
    assert "experts.0.up_proj.weight" in layer_of("qwen3_moe").huggingface_state_dict("qwen3_moe", each_expert=True)


def _shapes(block: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in block.items()}


def test_a_shared_expert_with_a_gate() -> None:
    layer = make_layer(shared_expert=SwiGLU(6, 3), shared_expert_gate=True)
    own = layer.state_dict()
    block = {
        "gate.weight": own["router.weight"],
        "experts.gate_up_proj": own["experts.gate_up_proj"],
        "experts.down_proj": own["experts.down_proj"],
        "shared_expert.gate_proj.weight": own["shared_expert.gate_up_proj.weight"][:3],
        "shared_expert.up_proj.weight": own["shared_expert.gate_up_proj.weight"][3:],
        "shared_expert.down_proj.weight": own["shared_expert.down_proj.weight"],
        "shared_expert_gate.weight": own["shared_expert_gate.weight"],
    }
    other = make_layer(seed=1, shared_expert=SwiGLU(6, 3), shared_expert_gate=True)
    other.load_huggingface(block)
    assert_same_bits(list(other.state_dict().values()), list(own.values()), "state")


BLOCK = layer_of("qwen3_moe").huggingface_state_dict("qwen3_moe")


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in BLOCK.items() if key != name}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_layer().load_huggingface(3), TypeError, "nn.MoE.load_huggingface: state_dict must be a mapping of names to tensors; got int"),  # type: ignore[arg-type]
        (lambda: make_layer().load_huggingface(BLOCK, 3), TypeError, "prefix must be a str; got int"),  # type: ignore[arg-type]
        (lambda: make_layer().load_huggingface(BLOCK, "mlp."), ValueError, "state_dict must be one with a weight for router.weight; got none of this prefix"),
        (lambda: make_layer().load_huggingface(without("experts.down_proj")), ValueError, "state_dict must be one with a weight for experts.down_proj; got experts.gate_up_proj, gate.weight"),
        (lambda: make_layer(bias=True).load_huggingface(BLOCK), ValueError, "one with a weight for router.bias"),
        (lambda: make_layer().load_huggingface(BLOCK | {"gate.bias": torch.zeros(4)}), ValueError, "one whose block has no weights that the layer lacks; got gate.bias"),
        (lambda: make_layer().load_huggingface(BLOCK | {"gate.weight": torch.zeros(5, 6)}), ValueError, "router.weight must be [4, 6], as the layer; got shape [5, 6]"),
        (lambda: make_layer().huggingface_state_dict("llama"), ValueError, "family must be one of 'mixtral', 'qwen3_moe', 'deepseek_v3', 'gpt_oss'; got 'llama'"),  # type: ignore[arg-type]
        (lambda: make_layer(expert_bias=True).huggingface_state_dict("mixtral"), ValueError, "family must be one that has a place for router.expert_bias; got 'mixtral'"),
        (lambda: layer_of("gpt_oss").huggingface_state_dict("gpt_oss", each_expert=True), ValueError, "each_expert must be False for gpt_oss; got True"),
    ],
)  # fmt: skip
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_refused_block_changes_nothing() -> None:
    layer = make_layer()
    before = [value.clone() for value in layer.state_dict().values()]
    with pytest.raises(ValueError, match=r"router\.weight must be"):
        layer.load_huggingface(BLOCK | {"gate.weight": torch.zeros(5, 6)})
    assert_same_bits(list(layer.state_dict().values()), before, "state")
