"""Tiny random models of the host, one an architecture, and the comparison of two of its implementations."""

from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

# Class and settings; every expert is small and there are more of them than a token takes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            **MLA,
            **GROUPS,
        },
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            **GROUPS,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "moe_latent_size": 24,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
        },
    ),
    "aria": ("AriaText", {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "muse_spark": (
        "MuseSpark",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_hidden_size": 24,
        },
    ),
}


ONE_LAYER: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["full_attention"]},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "glm4_moe": {"first_k_dense_replace": 0},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
}


def tiny(architecture: str, dtype: torch.dtype = torch.float32, one_layer: bool = False) -> Any:
    """The model in training mode, its weights large enough that every expert matters."""
    name, own = MODELS[architecture]
    settings = SIZES | own
    if one_layer:  # so that a rounding in one experts layer does not change the choice of the next
        settings |= {"num_hidden_layers": 1} | ONE_LAYER.get(architecture, {})
    if architecture == "nemotron_h":
        settings.pop("num_hidden_layers")
    if architecture == "muse_spark":
        config = transformers.MuseSparkConfig(
            text_config=settings,
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            audio_config={
                "patch_sizes": [4],
                "hidden_sizes": [8],
                "depths": [1],
                "num_hidden_layers": 1,
                "out_hidden_size": settings["hidden_size"],
            },
            out_hidden_size=16,
            projector_hidden_size=16,
        )
        model = transformers.MuseSparkForConditionalGeneration(config)
    else:
        config = getattr(transformers, f"{name}Config")(**settings)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return fill(model.to(dtype)).train()


def fill(model: nn.Module) -> nn.Module:
    """Normal weights, the larger the fewer a sum has; biases too, also those that count for a choice only."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):  # experts by token: any, but each once
                choices = torch.rand(len(parameter), 8, generator=generator).argsort(dim=-1)
                parameter.copy_(choices[:, : parameter.shape[1]])
            if not parameter.is_floating_point() or "inv_freq" in name:
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            if parameter.ndim > 1:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            elif "bias" in name:
                parameter.copy_(noise * 0.1)
            else:
                parameter.add_(noise * 0.1)
    return model
