"""Blocks of Hugging Face's models as layers of this package: the same outputs and gradients, weights there and back."""

from typing import Any

import pytest
import torch
from torch import nn

from hosts import models
from moeroute.nn import MoE, SwiGLU
from moeroute.nn.huggingface import FAMILIES, Family
from moeroute.testing import assert_same_bits

# The options of the layer for the settings in `models`; docs/layer.md has them for the models themselves.
OPTIONS: dict[Family, dict[str, Any]] = {
    "mixtral": {"score": "softmax", "renormalize": True},
    "qwen3_moe": {"score": "softmax", "renormalize": True},
    "deepseek_v3": {
        "score": "sigmoid", "expert_bias": True, "num_groups": 4, "topk_groups": 2, "group_score": "top2_sum",
        "scaling_factor": 2.5,
    },
    "gpt_oss": {"score": "topk_softmax", "activation": "swiglu_clamped", "interleaved": True, "bias": True},
}  # fmt: skip


def pair(family: Family) -> tuple[Any, str, MoE]:
    """The model, the prefix of its last MoE block, and that block as a layer."""
    model = models.tiny(family).eval()
    name = [n for n, m in model.named_modules() if isinstance(getattr(m, "experts", None), nn.Module)][-1]
    block = model.get_submodule(name)
    down = block.experts.down_proj
    num_experts, intermediate = down.shape[0], down.shape[1 if family == "gpt_oss" else 2]
    k = models.MODELS[family][1]["num_experts_per_tok"]
    shared = SwiGLU(32, intermediate) if family == "deepseek_v3" else None
    layer = MoE(32, intermediate, num_experts, k, shared_expert=shared, **OPTIONS[family])
    layer.load_huggingface(model.state_dict(), f"{name}.")
    return block, f"{name}.", layer


def output_of(block: Any, x: torch.Tensor) -> torch.Tensor:
    found = block(x)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients(family: Family) -> None:
    block, _, layer = pair(family)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(6), requires_grad=True)
    theirs, ours = output_of(block, x), layer(x)
    torch.testing.assert_close(ours, theirs.reshape(x.shape), rtol=1e-4, atol=1e-5)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(
        torch.autograd.grad(ours, x, grad), torch.autograd.grad(theirs, x, grad.reshape(theirs.shape)),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_back(family: Family) -> None:
    """Every name of the block, no other, the same bits; the model loads them."""
    block, prefix, layer = pair(family)
    theirs = {f"{prefix}{name}": value for name, value in block.state_dict().items()}
    ours = layer.huggingface_state_dict(family, prefix)
    assert ours.keys() == theirs.keys()
    assert_same_bits([ours[name] for name in theirs], list(theirs.values()), "weights")
    block.load_state_dict({name.removeprefix(prefix): value for name, value in ours.items()})


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_saved_checkpoint(family: Family, tmp_path: Any) -> None:
    """What `save_pretrained` writes has a tensor for each expert, under the names of the checkpoints of the model."""
    from safetensors.torch import load_file

    model = models.tiny(family)
    model.save_pretrained(tmp_path)
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        saved |= load_file(file)
    _, _, layer = pair(family)
    (prefix,) = {name.partition("experts.0.")[0] for name in saved if "layers.1." in name and ".experts.0." in name}
    expected = [value.clone() for value in layer.state_dict().values()]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    layer.load_huggingface(saved, prefix)
    assert_same_bits(list(layer.state_dict().values()), expected, "from the checkpoint")
    again = layer.huggingface_state_dict(family, prefix, each_expert=True)
    assert again.keys() == {name for name in saved if name.startswith(prefix)}
