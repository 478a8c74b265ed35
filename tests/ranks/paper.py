"""What `moeroute plan` prints, beside the bytes of real runs."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moeroute import memory, scale
from moeroute.nn import MoE
from moeroute.nn.experts import RECOMPUTE
from moeroute.ops import exchange
from ranks.exact import parallel

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 96, 64, 48, 7, 3


def local_of(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def bytes_of(tensor: Any) -> int:
    return local_of(tensor).numel() * local_of(tensor).element_size()


class Sent:
    """A process group that counts the bytes that are sent through it."""

    def __init__(self, group: Any) -> None:
        self.group, self.bytes = group, 0

    def send(self, tensors: list[Tensor], *where: int) -> Any:
        self.bytes += sum(map(bytes_of, tensors))
        return self.group.send(tensors, *where)

    def recv(self, *arguments: Any) -> Any:
        return self.group.recv(*arguments)


def layer_of(world: int, hidden: int, intermediate: int, experts: int, topk: int, recompute: str = "") -> MoE:
    """The layer, its experts shared out among the ranks; that of one rank is left alone."""
    layer = MoE(hidden, intermediate, experts, topk, recompute=recompute or None)  # type: ignore[arg-type]
    return layer if world == 1 else parallel(layer, init_device_mesh("cpu", (world,)))


def counts_of(ids: Tensor, tokens: int, experts: int) -> np.ndarray[Any, Any]:
    return np.stack([np.bincount(part.flatten().numpy(), minlength=experts) for part in ids.split(tokens)])


def on_paper(world: int, rank: int) -> None:
    torch.manual_seed(0)
    memory.set_memory_pool(False)
    chances = torch.tensor([1.0, 4.0, 1.0, 2.0, 1.0, 1.0, 3.0]).expand(world * TOKENS, -1)
    ids = torch.multinomial(chances, TOPK)
    layout = scale.Layout(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, world, dtype="float32")
    plan = scale.plan(layout, counts_of(ids, TOKENS, EXPERTS))
    ours = layer_of(world, HIDDEN, INTERMEDIATE, EXPERTS, TOPK)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    mine = ids.split(TOKENS)[rank]
    ours(x, expert_ids=mine).sum().backward()  # the comparison of the ranks, once
    ours.zero_grad()

    # Exactly: weights, gradients, what is sent.
    wires: list[Sent] = []
    real = exchange._send_and_receive

    def counting(wire: exchange.Wire, *arguments: Any) -> Any:
        wires.append(Sent(wire.group))
        return real(exchange.Wire(wires[-1], *list(vars(wire).values())[1:]), *arguments)

    exchange._send_and_receive = counting  # type: ignore[assignment]
    ours(x, expert_ids=mine).sum().backward()
    exchange._send_and_receive = real
    assert sum(wire.bytes for wire in wires) == plan.traffic[rank]
    weights = list(ours.experts.parameters())
    assert sum(map(bytes_of, weights)) == plan.weights[rank]
    assert sum(bytes_of(weight.grad) for weight in weights) == plan.weights[rank]

    # What is saved: rows wide, and beside them what has one number for each expert or choice.
    small = TOKENS * (2 * EXPERTS + 4 * TOPK) * 4
    for recompute in ("", *RECOMPUTE):
        planned = scale.plan(replace(layout, recompute=recompute), counts_of(ids, TOKENS, EXPERTS)).saved[rank]
        found = saved_bytes(layer_of(world, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, recompute), x, mine)
        assert 0 <= found - planned <= small, (recompute, found, planned)


def saved_bytes(layer: MoE, x: Tensor, ids: Tensor) -> int:
    """Of the floats that autograd keeps, but for weights and tokens."""
    layer(x, expert_ids=ids).sum().backward()
    known = {local_of(parameter).untyped_storage().data_ptr() for parameter in (*layer.parameters(), x)}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(x, expert_ids=ids)
    output.sum().backward()
    return sum(saved.values())


def peak(world: int, rank: int) -> None:
    """The peak of a step that adds to gradients, on every rank: within 10 %. Buffers inside an operator are not seen."""
    torch.manual_seed(0)
    memory.set_memory_pool(False)
    tokens, experts, topk = 512, 6, 4
    ids = torch.multinomial(torch.tensor([1.0, 4.0, 1.0, 2.0, 1.0, 1.0]).expand(world * tokens, -1), topk)
    mine = ids.split(tokens)[rank]
    for hidden, intermediate in ((256, 64), (256, 128), (128, 128), (64, 128)):
        for recompute in ("", *RECOMPUTE):
            options: dict[str, Any] = {"dtype": "float32", "recompute": recompute}
            layout = scale.Layout(tokens, hidden, intermediate, experts, topk, world, **options)
            plan = scale.plan(layout, counts_of(ids, tokens, experts))
            ours = layer_of(world, hidden, intermediate, experts, topk, recompute)
            x = torch.randn(tokens, hidden, requires_grad=True)
            ours(x, expert_ids=mine).sum().backward()
            x.grad = None
            live = Live()
            with live:
                ours(x, expert_ids=mine).sum().backward()
            measured = live.peak + 2 * plan.weights[rank]
            assert abs(measured - plan.memory[rank]) <= 0.1 * plan.memory[rank], (layout, measured, plan.memory[rank])


class Live(TorchDispatchMode):
    """The bytes of what operators return, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs | self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def gone(self, storage: int, size: int) -> None:
        self.known.discard(storage)
        self.now -= size


def cases(world: int) -> list[Callable[[int, int], None]]:
    found: list[Callable[[int, int], None]] = [on_paper] if world in (1, 2, 4) else []
    return [*found, peak] if world in (1, 2) else found
