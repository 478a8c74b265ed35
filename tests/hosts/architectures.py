"""A tiny model of every architecture whose experts take an implementation, from the host's own default settings."""

import importlib
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hosts import models

ROOT = Path(transformers.__file__).parent / "models"
# The host asks the same question of the same text.
DECORATED = sorted(
    file.parent.name for file in ROOT.glob("*/modeling_*.py") if "\n@use_experts_implementation" in file.read_text()
)

# The first pattern that a setting's name matches makes it small.
SMALL = [
    (r"vocab_size$", models.VOCABULARY),
    (r"(^|_)hidden_size$|^d_model$|^embedding_size$|^embed_dim$|hidden_dim$", 32),
    (r"intermediate_(size|dim)|ffn_", 16),
    (r"^num_(hidden_)?layers$|^depth$|^n_layers$", 2),
    (r"(num_attention|^num|^n|encoder_attention)_heads$", 4),
    (r"num_key_value_heads$|num_kv_heads$", 2),
    (r"head_dim$|^qk_", 8),
    (r"_rank$|lora_dim$", 16),
    (r"^num_(local_)?experts$|^n_routed_experts$|^moe_num_experts$", 8),
    (r"^num_experts_per_tok(en)?$|^moe_topk$|^moe_k$|^top_k_experts$", 2),
    (r"^n_group$|^num_expert_group$", 4),
    (r"^topk_group$", 2),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 0),
    (r"max_position_embeddings", 128),
    (r"sliding_window$|window_size$|attention_chunk_size", 8),
]
# What stays as it is, or depends on the others in a way of its own.
LATENT = {"num_key_value_heads": 4}  # latent attention has as many
ROPE = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "bailing_hybrid",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "kimi_linear",
        ),
        LATENT,
    ),
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["sparse"] * 2, "num_experts_per_tok": 2}},
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2},
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
    "dots3_note": LATENT | {"head_dim": 16, "layer_types": ["indexed_attention"] * 2},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 16], "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "vocab_size_per_layer_input": models.VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4v_moe": {
        "text_config": {
            "first_k_dense_replace": 0,
            "rope_parameters": ROPE | {"mrope_section": [1, 2, 1], "partial_rotary_factor": 1.0},
        }
    },
    "glm5_next": {"text_config": LATENT | {"qk_rope_head_dim": 0}},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
        "layer_types": ["mamba", "attention"],
    },
    "hunyuan_v1_moe": {"head_dim": 8},
    "hy_v4_vl": {
        "text_config": LATENT
        | {"mlp_layer_types": ["sparse"] * 2, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": LATENT | {"head_dim": 16},
    "mistral_large4": {"text_config": LATENT},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def shrink(settings: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if name.endswith(("token_id", "token_index")):
            small[name] = None if name in ("eos_token_id", "pad_token_id", "bos_token_id") else models.VOCABULARY - 1
        elif isinstance(value, dict) and name.endswith("_config"):
            small[name] = shrink(value)
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):  # two layers, of two kinds if any
            small[name] = [value[0], next((kind for kind in value if kind != value[0]), value[0])]
        elif name == "layers_block_type":
            small[name] = value[:4]
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SMALL if re.search(pattern, name)), value)
            small |= {} if size == value else {name: size}
    return small


def merge(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    nested = {k: merge(settings.get(k) or {}, v) for k, v in own.items() if k.endswith("_config")}
    return settings | own | nested


def classes(architecture: str) -> list[type[PreTrainedModel]]:
    """The smallest first: of text alone, then with other inputs."""
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    found = [
        thing
        for name, thing in vars(module).items()
        if isinstance(thing, type) and issubclass(thing, PreTrainedModel) and thing.__module__ == module.__name__
    ]
    ends = ("ForCausalLM", "ForConditionalGeneration", "TextModel", "Model")
    return [c for end in ends for c in found if c.__name__.endswith(end) and "PreTrained" not in c.__name__]


def build(architecture: str) -> tuple[Any, Tensor]:
    """A model that has experts and runs on token ids, and the ids."""
    from moeroute.interop import huggingface

    ids = torch.randint(3, models.VOCABULARY - 3, (2, 11), generator=torch.Generator().manual_seed(5))
    reasons = []
    for kind in classes(architecture):
        try:
            settings = merge(shrink(kind.config_class().to_dict()), OWN.get(architecture, {}))
            config = kind.config_class(**settings)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(config).parameters())
            assert size < 3e7, f"{size} parameters"
            torch.manual_seed(0)
            model: Any = models.fill(kind(config)).eval()
            assert huggingface.check(model), "no experts"
            model.set_experts_implementation("eager")
            model(input_ids=ids)
            return model, ids
        except Exception as error:  # another class of this architecture may do
            reasons.append(f"{kind.__name__}: {error!r}"[:300])
    raise AssertionError("\n".join(reasons))
