"""Process groups by name, and exchanges of rows in which no rank waits for one that gave up.

A rank that is sent more bytes than it expects aborts its process, and one that is sent fewer waits for ever. So the
ranks first `agree`: each tells the others the numbers that must be the same everywhere, or that it refuses its
arguments, and then all go on or all raise. Only then rows move.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeroute import check
from moeroute.interop.torch_npu.arguments import refused

_GROUPS: dict[str, Any] = {}
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBERS, _TEXT = 16, 512  # of a header; bytes of a refusal
_FINE, _REFUSED, _MISSING = range(3)


def register_group(name: str, group: Any) -> None:
    """Let a group's name (the HCCL name that a caller passes on) stand for a process group.

    A name that is not registered is looked up among torch's own names of groups, and else means the world group.

    Args:
        name: what the functions get as `group_ep` or `hcom`.
        group: a torch.distributed.ProcessGroup, or None to forget the name.
    """
    operator = "interop.torch_npu.register_group"
    if not isinstance(name, str):
        raise check.wrong_type(operator, "name", "a str", name)
    if group is None:
        _GROUPS.pop(name, None)
        return
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise check.wrong_type(operator, "group", "a torch.distributed.ProcessGroup or None", group)
    _GROUPS[name] = group


def ranks_of(function: str, rows: str, tensor: Tensor, argument: str, name: str, world_size: int) -> "Ranks":
    """The ranks of a group's name. A world of 1 needs no group, unless one is registered under the name.

    Args:
        function: whose arguments these are.
        rows: the name of the tensor that is exchanged.
        tensor: that one.
        argument: the name of the argument that names the group.
        name: of the group.
        world_size: how many ranks the caller expects.
    """
    check.tensor(function, rows, tensor)
    if not isinstance(name, str):
        raise refused(function, argument, "a str", type(name).__name__)
    group = _GROUPS.get(name)
    if group is None and world_size != 1 and dist.is_available() and dist.is_initialized():
        group = _torch_group(name)
    if group is None:
        return Ranks(function, None, 1, 0, tensor.device)
    if (rank := dist.get_rank(group)) < 0:
        raise refused(function, argument, "the name of a group that this process is in", name)
    wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else tensor.device
    return Ranks(function, group, dist.get_world_size(group), rank, wire)


def _torch_group(name: str) -> Any:
    resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group", None)
    try:
        return dist.group.WORLD if resolve is None else resolve(name)
    except (LookupError, RuntimeError, ValueError):
        return dist.group.WORLD


def dtype_number(dtype: torch.dtype) -> int:
    """The number of a dtype in a header: the same in every process of one torch."""
    return _DTYPES.index(dtype)


@dataclass(frozen=True)
class Ranks:
    """The processes that call one function together; `group` is None for one that is alone.

    `device` is where tensors are that the group can move.
    """

    function: str
    group: Any
    size: int
    rank: int
    device: torch.device

    def expect(self, world_size: int, rank: int | None = None) -> None:
        """Refuse what the caller believes of the group and is not so."""
        if world_size != self.size:
            where = "" if self.group is not None else " (torch.distributed has no process group for it)"
            raise refused(self.function, "ep_world_size", f"{self.size}, the size of the group{where}", world_size)
        if rank is not None and rank != self.rank:
            raise refused(self.function, "ep_rank_id", f"{self.rank}, the rank of this process", rank)

    def agree(self, numbers: Callable[[], dict[str, int]], own: Sequence[str] = ()) -> dict[str, list[int]]:
        """What `numbers` finds on every rank, by name.

        It also checks the arguments: what it raises on one rank is raised on all of them. So is an error where a
        number differs that is not in `own`; one whose name starts with "dtype" is that of a dtype.
        """
        found: dict[str, int] = {}
        problem: Exception | None = None
        status = _FINE
        try:
            found = numbers()
        except Exception as error:
            if self.group is None:
                raise
            problem, status = error, _MISSING if isinstance(error, NotImplementedError) else _REFUSED
        header = [zlib.crc32(self.function.encode()), status, *found.values()]
        headers = self.gather(header + [0] * (_NUMBERS - len(header)))
        functions, statuses = headers[:, 0].tolist(), headers[:, 1].tolist()
        if len(set(functions)) > 1:
            others = [rank for rank in range(self.size) if functions[rank] != functions[self.rank]]
            raise RuntimeError(f"{self.function}: every rank must call the same function; ranks {others} call another")
        if any(statuses):
            self._refuse(statuses, problem)
        for place, name in enumerate(found, 2):
            values = headers[:, place].tolist()
            if name not in own and len(set(values)) > 1:
                got = [_DTYPES[value] for value in values] if name.startswith("dtype") else values
                raise refused(self.function, name, "the same on every rank", got)
        return {name: headers[:, place].tolist() for place, name in enumerate(found, 2)}

    def _refuse(self, statuses: list[int], problem: Exception | None) -> None:
        text = "" if problem is None else str(problem)
        if text.startswith("moeroute."):
            text = f"{self.function}: {text.partition(': ')[2]}"
        letters = text.encode()[:_TEXT]
        texts = self.gather(list(letters) + [0] * (_TEXT - len(letters)))
        if problem is not None:
            raise problem
        rank = next(rank for rank, status in enumerate(statuses) if status != _FINE)
        text = bytes(texts[rank].tolist()).rstrip(b"\0").decode(errors="ignore")
        kind = NotImplementedError if statuses[rank] == _MISSING else RuntimeError
        raise kind(f"{text} (on rank {rank})")

    def gather(self, numbers: Sequence[int] | Tensor) -> Tensor:
        """int64 [size, n] on the CPU: the n numbers of every rank; all must give as many."""
        mine = torch.as_tensor(numbers, dtype=torch.int64, device=self.device).contiguous()
        if self.group is None:
            return mine[None].cpu()
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone).cpu()

    def exchange(self, rows: Tensor, sends: list[int], receives: list[int], room: int | None = None) -> Tensor:
        """Send `sends[r]` of the rows [R, C], in order, to rank r; what comes lies by rank, `receives[r]` of each.

        The result has `room` rows; those behind the last that came are not written.
        """
        total = sum(receives)
        room = total if room is None else room
        if self.group is None and room == total:
            return rows
        found = rows.new_empty(room, rows.shape[1])
        if self.group is None:
            found[:total] = rows
        elif rows.shape[1]:
            # As bytes: gloo does not know every dtype.
            sent = rows.to(self.device).contiguous().view(torch.uint8)
            came = torch.empty(total, sent.shape[1], dtype=torch.uint8, device=self.device)
            if found.device == self.device:
                came = found[:total].view(torch.uint8)
            dist.all_to_all_single(came, sent, receives, sends, group=self.group)
            if found.device != self.device:
                found[:total] = came.view(rows.dtype).to(rows.device)
        return found
