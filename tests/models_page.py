"""The blocks of docs/models.md, run with the names that the page explains."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moeroute

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


class Block(NamedTuple):
    """Lines of Python and the gates that they express; the title is the text before them."""

    gates: tuple[str, ...]
    code: str
    title: str


def blocks() -> list[Block]:
    found = []
    before = 0
    text = PAGE.read_text()
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        lead = text[before : match.start()]
        before = match.end()
        line = re.search(r"^Gates: (.*?)\n\n", lead, re.DOTALL | re.MULTILINE)
        gates = tuple(re.findall(r"`(\w+)`", line[1])) if line else ()
        title = lead[: line.start()] if line else lead
        found.append(Block(gates, match[1], " ".join(title.split())))
    return found


def run(code: str, **names: Any) -> dict[str, Any]:
    """The names after the block; weights and expert_ids too where it leaves a gating."""
    public = {name: getattr(moeroute, name) for name in moeroute.__all__}
    space: dict[str, Any] = {"torch": torch} | public | names
    exec(code, space)
    if "gating" in space:
        space.setdefault("weights", space["gating"].weights)
        space.setdefault("expert_ids", space["gating"].expert_ids)
    return space


def of_gate(gate: str, **names: Any) -> list[dict[str, Any]]:
    """Every block of a gate, run."""
    return [run(block.code, **names) for block in blocks() if gate in block.gates]


def dense(weights: Tensor, expert_ids: Tensor, num_experts: int) -> Tensor:
    """[T, E], by plain torch; ids outside are left out."""
    ids = expert_ids.long()
    inside = (ids >= 0) & (ids < num_experts)
    zeros = weights.new_zeros(len(ids), num_experts)
    return zeros.scatter_add(1, ids.where(inside, 0), weights.where(inside, 0.0))
