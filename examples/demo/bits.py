"""One layer, computed in several ways, its output and its gradient hashed: moeroute beside plain PyTorch.

The layer has a sigmoid router and experts of one linear map and a SiLU. Both are applied token by token, on both sides:
the bits of a matrix product of torch may depend on its number of rows, and only routing is compared here.
Run as `python -m demo.bits SETTING`, in a process with Triton's interpreter on; prints a JSON object a line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import moeroute
from demo.data import load_corpus
from moeroute import dispatch
from moeroute.dispatch import Backend

MOEROUTE, PLAIN = "moeroute", "plain PyTorch"


class Layer(NamedTuple):
    """Weights of the layer; the number of experts is no multiple of a vector register's length, as in real models."""

    router: Tensor  # [E, H]
    experts: Tensor  # [E, H, H]
    k: int

    @classmethod
    def make(cls, width: int, experts: int, k: int, generator: torch.Generator) -> Layer:
        router = torch.randn(experts, width, generator=generator) / width**0.5
        return cls(router, torch.randn(experts, width, width, generator=generator) / width**0.5, k)

    def logits(self, tokens: Tensor) -> Tensor:
        return torch.cat([F.linear(token, self.router) for token in tokens.split(1)])

    def rows(self, rows: Tensor, expert_of_row: Tensor) -> Tensor:
        parts = zip(rows.split(1), expert_of_row.tolist(), strict=True)
        return torch.cat([F.silu(F.linear(row, self.experts[expert])) for row, expert in parts])


def with_moeroute(layer: Layer, tokens: Tensor, backend: Backend | None = None) -> Tensor:
    gating = moeroute.gating_topk(layer.logits(tokens), layer.k, score="sigmoid", backend=backend)
    plan = moeroute.plan_from_expert_ids(gating.expert_ids, len(layer.experts), backend=backend)
    rows = moeroute.permute(tokens, plan, backend=backend)
    expert_of_row = plan.expert_of_row
    assert expert_of_row is not None  # a plan of expert ids has it
    return moeroute.unpermute(layer.rows(rows, expert_of_row), plan, gating.weights, backend=backend)


def with_index_add(layer: Layer, tokens: Tensor) -> Tensor:
    """As one writes it in PyTorch: sort, index, `index_add`."""
    weights, expert_ids = layer.logits(tokens).sigmoid().topk(layer.k)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    experts, order = expert_ids.flatten().sort(stable=True)
    token_of_row = order // layer.k
    rows = layer.rows(tokens[token_of_row], experts) * weights.flatten()[order, None]
    return torch.zeros_like(tokens).index_add(0, token_of_row, rows)


def with_sum(layer: Layer, tokens: Tensor) -> Tensor:
    """The same function, the rows brought back into the order of the slots and summed."""
    weights, expert_ids = layer.logits(tokens).sigmoid().topk(layer.k)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    experts, order = expert_ids.flatten().sort(stable=True)
    rows = layer.rows(tokens[order // layer.k], experts)
    rows = rows[order.argsort()].view(*weights.shape, -1)
    return (rows * weights[..., None]).sum(dim=1)


class Line(NamedTuple):
    """One way to compute the layer, and the hashes of what came out; without hashes, the reason."""

    side: str
    way: str
    output: str | None
    gradient: str | None
    reason: str = ""


def short_hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(former)


def compute(function: Callable[[Tensor], Tensor], tokens: Tensor, count: int, alone: bool = False) -> tuple[str, str]:
    """Hashes of the layer's output and of its gradient by the tokens, with so many threads."""
    outputs, gradients = [], []
    with threads(count):
        for part in tokens.split(1 if alone else len(tokens)):
            leaf = part.clone().requires_grad_()
            output = function(leaf)
            outputs.append(output.detach())
            # The gradient of half the output's square is the output itself: no constant hides a lost bit.
            gradients += torch.autograd.grad(output, leaf, output.detach())
    return short_hash(torch.cat(outputs)), short_hash(torch.cat(gradients))


def lines(tokens: int, width: int, experts: int, k: int, seed: int) -> Iterator[Line]:
    """Every way in turn. The tokens are bytes of real text, embedded."""
    generator = torch.Generator().manual_seed(seed)
    layer = Layer.make(width, experts, k, generator)
    text = load_corpus().train[:tokens].long()
    x = torch.randn(256, width, generator=generator)[text] + 0.1 * torch.randn(tokens, width, generator=generator)

    names: dict[Backend, str] = {"cpu": "Numba", "reference": "reference", "triton": "Triton's interpreter"}
    for name, what in names.items():
        reason = dispatch.unavailable(name)
        if reason is not None:
            yield Line(MOEROUTE, what, None, None, reason)
            continue

        def ours(part: Tensor, name: Backend = name) -> Tensor:
            return with_moeroute(layer, part, name)

        yield Line(MOEROUTE, f"{what}, one thread", *compute(ours, x, 1))
        if name == "cpu":
            yield Line(MOEROUTE, f"{what}, two threads", *compute(ours, x, 2))
            yield Line(MOEROUTE, f"{what}, two threads again", *compute(ours, x, 2))
            yield Line(MOEROUTE, f"{what}, each token alone", *compute(ours, x, 1, alone=True))
    for what, function in (("index_add", with_index_add), ("sum over choices", with_sum)):

        def theirs(part: Tensor, function: Callable[[Layer, Tensor], Tensor] = function) -> Tensor:
            return function(layer, part)

        yield Line(PLAIN, f"{what}, one thread", *compute(theirs, x, 1))
        if function is with_index_add:
            yield Line(PLAIN, f"{what}, two threads", *compute(theirs, x, 2))
            yield Line(PLAIN, f"{what}, two threads again", *compute(theirs, x, 2))
            yield Line(PLAIN, f"{what}, each token alone", *compute(theirs, x, 1, alone=True))


if __name__ == "__main__":
    for line in lines(**json.loads(sys.argv[1])):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
