"""What `moeroute plan` prints, beside the bytes of real runs."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moeroute import memory, scale
from moeroute.expert_parallel import expert_parameters
from moeroute.nn import MoE
from moeroute.ops import exchange
from ranks.exact import parallel

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 96, 64, 48, 7, 3


def bytes_of(tensor: Any) -> int:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


class Sent:
    """A process group that counts the bytes that are sent through it."""

    def __init__(self, group: Any) -> None:
        self.group, self.bytes = group, 0

    def send(self, tensors: list[Tensor], *where: int) -> Any:
        self.bytes += sum(map(bytes_of, tensors))
        return self.group.send(tensors, *where)

    def recv(self, *arguments: Any) -> Any:
        return self.group.recv(*arguments)


def on_paper(world: int, rank: int) -> None:
    torch.manual_seed(0)
    memory.set_memory_pool(False)
    chances = torch.tensor([1.0, 4.0, 1.0, 2.0, 1.0, 1.0, 3.0]).expand(world * TOKENS, -1)
    ids = torch.multinomial(chances, TOPK)
    counts = np.stack([np.bincount(part.flatten().numpy(), minlength=EXPERTS) for part in ids.split(TOKENS)])
    layout = scale.Layout(TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, world, dtype="float32")
    plan = scale.plan(layout, counts)
    ours = parallel(MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOPK), init_device_mesh("cpu", (world,)))
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
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in ours.parameters() if not hasattr(p, "to_local")}
    own |= {p.to_local().untyped_storage().data_ptr() for p in expert_parameters(ours).values()}  # type: ignore[attr-defined]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in own | {x.untyped_storage().data_ptr()}:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = ours(x, expert_ids=mine)
    output.sum().backward()
    exchange._send_and_receive = real
    assert sum(wire.bytes for wire in wires) == plan.traffic[rank]
    weights = expert_parameters(ours).values()
    assert sum(map(bytes_of, weights)) == plan.weights[rank]
    assert sum(bytes_of(weight.grad) for weight in weights) == plan.weights[rank]

    # What is saved: rows wide, and beside them what has one number for each expert or choice.
    small = TOKENS * (2 * EXPERTS + 4 * TOPK) * 4
    assert abs(sum(saved.values()) - plan.saved[rank]) <= 0.1 * plan.saved[rank] + small, (saved, plan.saved[rank])
    del output


def peak(world: int, rank: int) -> None:
    """The peak of a step, weights and all, on every rank: within 10 %. Buffers inside an operator are not seen."""
    torch.manual_seed(0)
    memory.set_memory_pool(False)
    tokens, hidden, intermediate, experts, topk = 512, 256, 128, 6, 4
    ids = torch.multinomial(torch.tensor([1.0, 4.0, 1.0, 2.0, 1.0, 1.0]).expand(world * tokens, -1), topk)
    counts = np.stack([np.bincount(part.flatten().numpy(), minlength=experts) for part in ids.split(tokens)])
    plan = scale.plan(scale.Layout(tokens, hidden, intermediate, experts, topk, world, dtype="float32"), counts)
    ours = parallel(MoE(hidden, intermediate, experts, topk), init_device_mesh("cpu", (world,)))
    x = torch.randn(tokens, hidden, requires_grad=True)
    mine = ids.split(tokens)[rank]
    ours(x, expert_ids=mine).sum().backward()
    ours.zero_grad()
    x.grad = None
    live = Live()
    with live:
        ours(x, expert_ids=mine).sum().backward()
    measured = live.peak + plan.weights[rank]
    assert abs(measured - plan.memory[rank]) <= 0.1 * plan.memory[rank], (measured, plan.memory[rank])


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
    found: list[Callable[[int, int], None]] = [on_paper] if world in (2, 4) else []
    return [*found, peak] if world == 2 else found
