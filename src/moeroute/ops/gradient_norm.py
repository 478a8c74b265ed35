"""The norm of gradients that are sharded over different meshes, and its bound, in plain torch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moeroute import check
from moeroute.ops.exchange import wire_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for DTensors of several meshes beside plain tensors.

    The norm is that of the whole model: a sharded gradient counts with all its shards, one that every rank has counts
    once. Plain gradients must be the same on every rank by now, as after DDP or an all-reduce. All ranks call it
    together, with the same parameters in the same order; a rank may lack gradients. The norm is added up in float64,
    in the order of the ranks, and so has the same bits on all of them.

    Args:
        parameters: whose gradients are scaled in place.
        max_norm: the largest norm that is left as it is; ``inf`` only measures.
        norm_type: the p of the norm, ``inf`` for the largest magnitude.
        error_if_nonfinite: raise RuntimeError instead of scaling by a norm that is no number.

    Returns:
        The norm before, a float32 scalar on the gradients' device.

    Raises:
        ValueError: a gradient that is a partial sum, or a wrong number.
        RuntimeError: see `error_if_nonfinite`.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([weight], 1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    operator = "expert_parallel.clip_grad_norm_"
    if max_norm != float("inf"):
        check.number(operator, "max_norm", max_norm)
    power = norm_type if norm_type == float("inf") else check.number(operator, "norm_type", norm_type)
    if not power > 0:
        raise check.wrong_value(operator, "norm_type", "above 0", norm_type)
    largest = power == float("inf")
    shards: dict[Any, float] = {}
    grads = []
    for parameter in [parameters] if isinstance(parameters, Tensor) else list(parameters):
        key = None
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            split = tuple(i for i, placement in enumerate(parameter.placements) if not placement.is_replicate())
            key = (mesh, split) if split else None
        shards.setdefault(key, 0.0)
        grad = parameter.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            if any(placement.is_partial() for placement in grad.placements):
                raise check.wrong_value(operator, "parameters", "with whole gradients", "one that is a partial sum")
            grad = grad.to_local()
        grads.append(grad)
        if grad.numel():
            size = torch.linalg.vector_norm(grad.double(), power).item()
            shards[key] = max(shards[key], size) if largest else shards[key] + size**power
    total = 0.0
    for key, size in shards.items():
        for dimension in key[1] if key else ():
            size = _over_ranks(key[0].get_group(dimension), size, largest)
        total = max(total, size) if largest else total + size
    norm = total if largest else total ** (1 / power)
    if error_if_nonfinite and not -float("inf") < norm < float("inf"):
        raise RuntimeError(f"moeroute.{operator}: the norm of the gradients is {norm}")
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # a NaN shows in every gradient
        for grad in grads:
            grad.mul_(factor)
    return torch.tensor(norm, dtype=torch.float32, device=grads[0].device if grads else None)


def _over_ranks(group: Any, size: float, largest: bool) -> float:
    import torch.distributed as dist

    wire = wire_of(group)
    mine = torch.tensor([size], dtype=torch.float64, device=wire.device)
    everyone = [torch.empty_like(mine) for _ in range(wire.size)]
    dist.all_gather(everyone, mine, group=group)
    sizes = torch.cat(everyone).tolist()
    return max(sizes) if largest else sum(sizes)
