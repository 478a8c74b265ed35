"""A small Qwen3-MoE as it is written for Ascend: torch, and torch_npu for all that a Mixture-of-Experts layer needs."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the vocabulary is bytes."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    topk: int = 2
    intermediate: int = 48
    vocabulary: int = 256
    theta: float = 10_000.0


class GroupedMatmul(torch.autograd.Function):
    """Rows of each expert times its weight [E, in, out]; torch_npu's product has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """rows [M, in], counts int64 [E] -> [M, out]."""
        ctx.save_for_backward(rows, weight, counts)
        return torch_npu.npu_grouped_matmul(
            [rows], [weight], bias=None, group_list=counts, split_item=2, group_type=0, group_list_type=1
        )[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Of the rows by the transposed weight, of the weight by a product over the rows of each expert."""
        rows, weight, counts = ctx.saved_tensors
        (grad_rows,) = torch_npu.npu_grouped_matmul(
            [grad], [weight.transpose(1, 2)], group_list=counts, split_item=2, group_type=0, group_list_type=1
        )
        (grad_weight,) = torch_npu.npu_grouped_matmul(
            [rows.t()], [grad], group_list=counts, split_item=3, group_type=2, group_list_type=1
        )
        return grad_rows, grad_weight, None


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight."""
        return torch_npu.npu_rms_norm(x, self.weight, epsilon=1e-6)[0]


class Attention(nn.Module):
    """Grouped-query attention with norms of queries and keys, and rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.heads * width, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.heads * width, config.hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, H]; cos and sin [1, 1, S, head_dim]."""
        batch, length, _ = x.shape
        width = self.config.head_dim
        q = self.q_norm(self.q_proj(x).view(batch, length, -1, width)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, -1, width)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, width).transpose(1, 2)
        q, k = torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class SparseMoE(nn.Module):
    """Softmax router, `topk` experts a token, SwiGLU experts."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, config.hidden, 2 * config.intermediate))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.intermediate, config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H]."""
        tokens = x.reshape(-1, self.config.hidden)
        weights, ids, _ = torch_npu.npu_moe_gating_top_k(
            self.gate(tokens), self.config.topk, renorm=1, norm_type=0, out_flag=True
        )
        counts = torch.histc(ids, bins=self.config.experts, min=0, max=self.config.experts).to(torch.int64)
        rows, row_map = torch_npu.npu_moe_token_permute(tokens, ids)
        rows = torch_npu.npu_swiglu(GroupedMatmul.apply(rows, self.gate_up_proj, counts), dim=-1)
        rows = GroupedMatmul.apply(rows, self.down_proj, counts)
        return torch_npu.npu_moe_token_unpermute(rows, row_map, probs=weights).view_as(x)


class Layer(nn.Module):
    """Attention and experts, each behind a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(config.hidden), RMSNorm(config.hidden)
        self.self_attn, self.mlp = Attention(config), SparseMoE(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3MoE(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> [B, S, vocabulary]."""
        cos, sin = rotary_tables(ids.shape[1], self.config, ids.device)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def rotary_tables(length: int, config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [1, 1, S, head_dim], the two halves of a head alike."""
    exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    angles = torch.outer(torch.arange(length, device=device), config.theta**-exponents)
    angles = torch.cat((angles, angles), -1)[None, None]
    return angles.cos(), angles.sin()
