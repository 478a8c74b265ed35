"""Tensors with guard zones around them, poisoned fresh memory, and rows that lie more than 2^31 elements apart."""

import contextlib
import dataclasses
import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance.case import PLAN_FIELDS
from moeroute.plan import RoutingPlan

ZONE = 512  # bytes in front of and behind every tensor
NANS, OTHER = 0xFF, 0x3C  # what is in them: NaN and -1; small numbers and large indices


@dataclasses.dataclass
class _Block:
    name: str
    memory: Tensor
    before: Tensor
    tensor: Tensor
    written: bool


class Guards:
    """Copies of arguments with zones around them; `complaints` says what was written that must not be."""

    def __init__(self, fill: int, device: torch.device) -> None:
        self.fill, self.device = fill, device
        self.blocks: list[_Block] = []

    def tensor(self, name: str, tensor: Tensor, output: bool = False) -> Tensor:
        """A contiguous copy on the device; an output may be written."""
        size = tensor.numel() * tensor.element_size()
        memory = torch.full((size + 2 * ZONE,), self.fill, dtype=torch.uint8)
        memory[ZONE : ZONE + size] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        memory = memory.to(self.device)
        copy = memory[ZONE : ZONE + size].view(tensor.dtype).view(tensor.shape)
        self.blocks.append(_Block(name, memory, memory.clone(), copy, output))
        return copy

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """All tensors of the arguments, those of plans too."""
        return {name: self._guarded(name, value) for name, value in arguments.items()}

    def _guarded(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(name, value)
        if isinstance(value, RoutingPlan):
            fields = {field: self._guarded(f"{name}.{field}", getattr(value, field)) for field in PLAN_FIELDS}
            return RoutingPlan(**fields)
        if isinstance(value, tuple | list) and any(isinstance(part, Tensor) for part in value):
            return tuple(self._guarded(f"{name}[{i}]", part) for i, part in enumerate(value))
        return value

    def complaints(self) -> Iterator[tuple[str, str]]:
        """("guards" or "inputs", what happened)."""
        for block in self.blocks:
            changed = (block.memory != block.before).cpu()
            if not bool(changed.any()):
                continue
            size = len(changed) - 2 * ZONE
            unit = max(block.tensor.element_size(), 1)
            front, behind = changed[:ZONE].nonzero(), changed[ZONE + size :].nonzero()
            if len(front):
                away = -(-(ZONE - int(front[0])) // unit)
                yield "guards", f"writes in front of `{block.name}`: up to {away} elements before its first"
            if len(behind):
                away = int(behind[-1]) // unit + 1
                yield "guards", f"writes behind the end of `{block.name}`: up to {away} elements"
            inside = changed[ZONE : ZONE + size].nonzero().flatten()
            if len(inside) and not block.written:
                yield "inputs", self._changed(block, sorted({int(i) // unit for i in inside}))

    def _changed(self, block: _Block, places: list[int]) -> str:
        size = len(block.before) - 2 * ZONE
        former = block.before[ZONE : ZONE + size].view(block.tensor.dtype).cpu()
        shape, place = block.tensor.shape, places[0]
        at = [int(i) for i in torch.unravel_index(torch.tensor(place), shape)] if shape else []
        now = block.tensor.reshape(-1)[place].item()
        return (
            f"changes its input `{block.name}`: {len(places)} of {block.tensor.numel()} elements, the first at {at}: "
            f"{now!r} where {former[place].item()!r} was given"
        )


@contextlib.contextmanager
def fresh_memory_poisoned() -> Iterator[None]:
    """`torch.empty` gives NaN, or the largest integer; nothing is refused."""
    algorithms, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def poison(like: Tensor) -> Tensor:
    """NaN, or the largest integer, for an output to be written."""
    if like.dtype.is_floating_point:
        return torch.full_like(like, torch.nan)
    return torch.ones_like(like) if like.dtype is torch.bool else torch.full_like(like, torch.iinfo(like.dtype).max)


def far_rows(values: Tensor, stride: int) -> Tensor | None:
    """The rows, `stride` elements apart in memory that exists only where it is written; None where that fails."""
    count, width = values.shape
    size = ((count - 1) * stride + width) * values.element_size()
    try:
        reserve = getattr(mmap, "MAP_NORESERVE", 0)
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve)
        flat = torch.frombuffer(block, dtype=values.dtype)
    except (OSError, AttributeError, ValueError):
        return None
    rows = flat.as_strided((count, width), (stride, 1))
    return rows.copy_(values)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


Call = Callable[[], Any]
