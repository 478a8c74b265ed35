"""The language model, with the routing of moeroute or of plain PyTorch; both start from the same weights."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moeroute
from moeroute.nn import Experts, MoE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the language model and its batches."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    experts: int = 16
    k: int = 4
    intermediate: int = 128
    context: int = 128
    batch: int = 12
    learning_rate: float = 3e-3
    balance: float = 2e-2  # coefficients of the two auxiliary losses
    z: float = 1e-3

    @property
    def tokens(self) -> int:
        return self.batch * self.context


class PlainRouting(NamedTuple):
    expert_ids: Tensor
    scores: Tensor
    logits: Tensor

    def statistics(self) -> moeroute.BalanceStatistics:
        return moeroute.balance_statistics(self.scores, self.expert_ids)

    def z_loss(self) -> Tensor:
        return moeroute.router_z_loss(self.logits)


class PlainRouter(nn.Module):
    """softmax, topk, renormalise; the parameter of `moeroute.nn.Router`."""

    def __init__(self, hidden_size: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, tokens: Tensor) -> tuple[Tensor, PlainRouting]:
        logits = F.linear(tokens.float(), self.weight.float())
        scores = logits.softmax(dim=-1)
        weights, expert_ids = scores.topk(self.k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, PlainRouting(expert_ids, scores, logits)


class PlainMoE(nn.Module):
    """`moeroute.nn.MoE` with the routing as one writes it in PyTorch; same parameters, same experts."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.router = PlainRouter(hidden_size, num_experts, k)
        self.experts = Experts(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor, *, return_routing: bool = True) -> tuple[Tensor, PlainRouting]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, routing = self.router(tokens)
        slots = routing.expert_ids.reshape(-1)
        order = slots.argsort(stable=True)
        token_of_row = order // weights.shape[1]
        rows = self.experts(tokens[token_of_row], slots.bincount(minlength=self.num_experts))
        rows = rows * weights.flatten()[order, None]
        output = torch.zeros(tokens.shape, dtype=rows.dtype).index_add(0, token_of_row, rows)
        return output.to(x.dtype).reshape(x.shape), routing


class Block(nn.Module):
    def __init__(self, model: Model, plain: bool) -> None:
        super().__init__()
        self.heads = model.heads
        self.attention_norm = nn.RMSNorm(model.width)
        self.qkv = nn.Linear(model.width, 3 * model.width, bias=False)
        self.project = nn.Linear(model.width, model.width, bias=False)
        self.moe_norm = nn.RMSNorm(model.width)
        sizes = model.width, model.intermediate, model.experts, model.k
        self.moe = PlainMoE(*sizes) if plain else MoE(*sizes, score="softmax", renormalize=True)
        # A model this narrow learns faster from unit variance than from the layer's normal(0, 0.02).
        experts, depth = self.moe.experts, 2 * model.layers
        for weight, variance in (
            (self.qkv.weight, 1 / model.width),
            (experts.gate_up_proj, 1 / model.width),
            (self.project.weight, 1 / (model.width * depth)),
            (experts.down_proj, 1 / (model.intermediate * depth)),
        ):
            nn.init.normal_(weight, std=variance**0.5)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        batch, context, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = (_rotate(part, *rotation).to(v.dtype) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, context, width))
        output, routing = self.moe(self.moe_norm(x), return_routing=True)
        return x + output, routing


def _rotation(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Sines and cosines of rotary position embedding, [context, size / 2]."""
    frequencies = 1000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(context)[:, None] * frequencies
    return angles.sin(), angles.cos()


def _rotate(x: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


class LanguageModel(nn.Module):
    def __init__(self, model: Model, plain: bool = False) -> None:
        super().__init__()
        self.head_size = model.width // model.heads
        self.embed = nn.Embedding(256, model.width)  # normal(0, 1)
        self.blocks = nn.ModuleList([Block(model, plain) for _ in range(model.layers)])
        self.norm = nn.RMSNorm(model.width)
        self.head = nn.Linear(model.width, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, text: Tensor) -> tuple[Tensor, list[Any]]:
        """[batch, n] bytes to next-byte logits [batch, n, 256], and the routing of each layer."""
        x = self.embed(text)
        rotation = _rotation(text.shape[1], self.head_size)
        routings = []
        for block in self.blocks:
            x, routing = block(x, rotation)
            routings.append(routing)
        return self.head(self.norm(x)), routings


def build_model(model: Model, run: str, dtype: torch.dtype, seed: int) -> LanguageModel:
    """Both runs start from the weights of the moeroute model."""
    torch.manual_seed(seed)
    ours = LanguageModel(model)
    if run == "moeroute":
        return ours.to(dtype)
    plain = LanguageModel(model, plain=True)
    plain.load_state_dict(ours.state_dict())
    return plain.to(dtype)


def fingerprint(network: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(network.state_dict().items()):
        digest.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
