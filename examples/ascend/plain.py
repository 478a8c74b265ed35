"""The model of `qwen3_moe` in plain torch, for the comparison: the same parameters, a loop over experts."""

from typing import Any

import torch
import torch.nn.functional as F
from qwen3_moe import Attention, Qwen3MoE, RMSNorm, SparseMoE
from torch import Tensor


def norm(self: RMSNorm, x: Tensor) -> Tensor:
    """Root mean square norm."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def attention(self: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Grouped-query attention with rotary positions."""
    batch, length, _ = x.shape
    width = self.config.head_dim

    def heads(rows: Tensor) -> Tensor:
        return rows.view(batch, length, -1, width).transpose(1, 2)

    def rotated(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, -1)
        return rows * cos + torch.cat((-second, first), -1) * sin

    q = rotated(norm(self.q_norm, heads(self.q_proj(x))))
    k = rotated(norm(self.k_norm, heads(self.k_proj(x))))
    out = F.scaled_dot_product_attention(q, k, heads(self.v_proj(x)), is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def experts(self: SparseMoE, x: Tensor) -> Tensor:
    """Every expert on its tokens in turn."""
    tokens = x.reshape(-1, self.config.hidden)
    scores, ids = self.gate(tokens).softmax(-1).topk(self.config.topk)
    weights = scores / scores.sum(-1, keepdim=True)
    out = torch.zeros_like(tokens)
    for expert in range(self.config.experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (tokens[token] @ self.gate_up_proj[expert]).chunk(2, -1)
        rows = (F.silu(gate) * up) @ self.down_proj[expert]
        out = out.index_add(0, token, rows * weights[token, choice, None])
    return out.view_as(x)


FORWARDS: dict[type, Any] = {RMSNorm: norm, Attention: attention, SparseMoE: experts}


def in_plain_torch(model: Qwen3MoE) -> Qwen3MoE:
    """The model with every layer's forward in plain torch."""
    for module in model.modules():
        if type(module) in FORWARDS:
            module.forward = FORWARDS[type(module)].__get__(module)
    return model
