"""Rows from every rank to every rank over torch.distributed: `exchange`, an operator that is its own derivative.

Over gloo every message has a tag, made of what it belongs to: layer, phase, direction, call, width and dtype. gloo's
own collectives have none. There a rank that is in another collective than its peers, or in the same one with other
sizes, aborts its process, or leaves old memory in the result. With tags messages that do not belong together never
meet, and both sides end with `ExpertParallelError` after the group's timeout. Other backends (NCCL) get an
`all_to_all_single`.

exchange → `_start` (the transfers) → `_reported` (what an error says)
"""

import contextlib
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeroute import check, memory
from moeroute.ops.register import register

OPERATOR = "exchange"


class ExpertParallelError(RuntimeError):
    """A collective of an expert-parallel layer failed. The process group cannot be used any more.

    Attributes:
        layer: the name of the layer.
        phase: "dispatch" or "combine".
        direction: "forward" or "backward".
        rank: of this process in the group.
        call: the number of the layer's call, from 1; 0 where the layer has a capacity.
        seconds: how long the collective ran before it failed.
        timeout: of the group, in seconds; None where the backend does not tell.
    """

    def __init__(
        self,
        layer: str,
        phase: str,
        direction: str,
        rank: int,
        call: int,
        seconds: float,
        timeout: float | None,
        reason: str,
    ) -> None:
        limit = "unknown" if timeout is None else f"{timeout:g} s"
        super().__init__(
            f"moeroute.expert_parallel: {phase} of layer {layer!r} failed on rank {rank} in {direction}, call {call},"
            f" after {seconds:.1f} s (timeout of the group: {limit}): {reason}"
        )
        self.layer, self.phase, self.direction, self.rank = layer, phase, direction, rank
        self.call, self.seconds, self.timeout = call, seconds, timeout


@dataclass(frozen=True)
class Wire:
    """A process group as it is used here; `group` is None for a process that is alone."""

    group: Any
    size: int
    rank: int
    device: torch.device  # of the tensors that the group moves; a device without an index is that of the rows
    tagged: bool
    timeout: float | None


@dataclass(frozen=True)
class Place:
    """What a message belongs to."""

    layer: str
    phase: str
    order: int  # 0: forward, 1: its derivative, 2: the derivative of that
    call: int

    def tag(self, *more: object) -> int:
        return zlib.crc32(repr((self, *more)).encode()) & 0x7FFFFFFF


ALONE = Wire(None, 1, 0, torch.device("cpu"), False, None)


def wire_of(group: Any) -> Wire:
    """The wire of a torch.distributed.ProcessGroup that this process is in; of None, a process alone."""
    if group is None:
        return ALONE
    import torch.distributed as dist

    backend = dist.get_backend(group)
    gloo = backend == "gloo"
    device = torch.device("cpu" if gloo else {"nccl": "cuda", "hccl": "npu", "xccl": "xpu"}.get(backend, "cpu"))
    options = getattr(group._get_backend(device), "options", None) if hasattr(group, "_get_backend") else None
    timeout = getattr(options, "_timeout", None)
    seconds = None if timeout is None else timeout.total_seconds()
    return Wire(group, dist.get_world_size(group), dist.get_rank(group), device, gloo, seconds)


def name_of(group: Any) -> str:
    """What the operator knows a group by; empty for a process alone."""
    return "" if group is None else str(group.group_name)


def _wire_named(name: str) -> Wire:
    if not name:
        return ALONE
    from torch.distributed import distributed_c10d

    resolve: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009
    try:
        return wire_of(resolve(name))
    except (LookupError, RuntimeError, ValueError) as error:
        raise check.wrong_value(OPERATOR, "group", "the name of a process group", repr(name)) from error


def exchange(
    rows: Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    room: int,
    *,
    group: str,
    layer: str,
    phase: str,
    call: int,
    lengths: Sequence[int] = (),
    anchor: Tensor | None = None,
) -> Tensor:
    """Send `sends[r]` of the rows, in order, to rank r, and get `receives[r]` from it. Differentiable to any order.

    The derivative sends the gradients back the way that the rows came, without looking at a size.

    Args:
        rows: [R, H]; rows behind the last that is sent stay here.
        sends: rows to each rank.
        receives: rows from each rank.
        room: rows of the result; those behind the last that came are 0.
        group: the name of the process group, or an empty string for a process that is alone.
        layer: for messages, and for errors.
        phase: "dispatch" or "combine".
        call: of the layer, the same number on every rank; 0: calls are counted here.
        lengths: [ranks, experts], row by row: the rows of each expert here. Where it is given, the result of a dispatch
            and the rows of a combine lie expert by expert, inside an expert rank by rank.
        anchor: a tensor that requires a gradient and gets none. The ranks of a group must all run the derivative or
            none may, and a rank whose rows need no gradient runs it for the anchor's sake.

    Returns:
        [room, H], by source rank, or see `lengths`.

    Raises:
        ExpertParallelError: a peer is gone, or does something else.
    """
    result: Tensor = _exchange(
        rows, anchor, list(sends), list(receives), list(lengths), room, group, layer, phase, 0, call
    )
    return result


class _Overlap(threading.local):
    pending: list[Callable[[], None]] | None = None


_overlap = _Overlap()


@contextlib.contextmanager
def started() -> Iterator[list[Callable[[], None]]]:
    """Inside, `exchange` returns before its rows are there; each function of the list waits for one.

    Until then nothing may look at the rows.
    """
    before, _overlap.pending = _overlap.pending, []
    try:
        yield _overlap.pending
    finally:
        _overlap.pending = before


# ---------------------------------------------------------------------------- numbers


def process_group(operator: str, group: Any) -> Any:
    """The process group of a group or of a mesh of one dimension; None without torch.distributed.

    None stands for the default group.
    """
    import torch.distributed as dist

    if not dist.is_available():
        if group is None:
            return None
        raise check.wrong_value(operator, "group", "None: this torch has no torch.distributed", type(group).__name__)
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            wanted = "a DeviceMesh of one dimension, as mesh['ep']"
            raise check.wrong_value(operator, "group", wanted, f"one of {group.ndim} dimensions")
        group = group.get_group()
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise check.wrong_value(operator, "group", "one that this process is in", "another")
    if not isinstance(group, dist.ProcessGroup):
        raise check.wrong_type(operator, "group", "a ProcessGroup, a DeviceMesh or None", group)
    if dist.get_rank(group) < 0:
        raise check.wrong_value(operator, "group", "one that this process is in", "another")
    return group


def sum_over_ranks(operator: str, counts: Tensor, group: Any) -> Tensor:
    """int64 counts, added over the ranks of a group or of a mesh of one dimension."""
    import torch.distributed as dist

    wire = wire_of(process_group(operator, group))
    total = counts.to(wire.device if wire.tagged else counts.device, copy=True)
    if wire.group is not None:
        dist.all_reduce(total, group=wire.group)
    return total.to(counts.device)


def gather(wire: Wire, place: Place, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of every rank; all give as many."""
    if wire.group is None:
        return [list(numbers)]
    import torch.distributed as dist

    mine = torch.tensor(numbers, dtype=torch.int64, device=wire.device)
    everyone = [torch.empty_like(mine) for _ in range(wire.size)]
    with _reported(wire, place):
        dist.all_gather(everyone, mine, group=wire.group)
        found: list[list[int]] = torch.stack(everyone).tolist()
    return found


def swap(wire: Wire, place: Place, numbers: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """One int64 all-to-all: `numbers[r]` go to rank r, and `length` numbers come from each rank."""
    if wire.group is None:
        return [list(numbers[0])]
    mine = torch.tensor([n for to in numbers for n in to], dtype=torch.int64, device=wire.device)
    came = torch.empty(wire.size * length, dtype=torch.int64, device=wire.device)
    with _reported(wire, place):
        # Without the call: a rank that is in another call of this layer is told so.
        tag = Place(place.layer, "sizes", 0, 0).tag()
        _start(wire, came, mine, [len(to) for to in numbers], [length] * wire.size, tag)()
        found: list[list[int]] = came.view(wire.size, length).tolist()
    return found


@contextlib.contextmanager
def _reported(wire: Wire, place: Place) -> Iterator[None]:
    """Say which collective of which layer failed: torch's messages do not."""
    begun = time.monotonic()
    try:
        yield
    except ExpertParallelError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ExpertParallelError(
            place.layer,
            place.phase,
            "backward" if place.order else "forward",
            wire.rank,
            place.call,
            time.monotonic() - begun,
            wire.timeout,
            reason,
        ) from error


# ---------------------------------------------------------------------------- transfers

Pieces = list[tuple[int, int]]  # first row and number of rows of each
SMALL = 1 << 14  # bytes: pieces below that are copied by an index, larger ones one by one


def _start(
    wire: Wire,
    out: Tensor,
    source: Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    tag: int,
    takes: list[Pieces] | None = None,
    puts: list[Pieces] | None = None,
) -> Callable[[], None]:
    """Start the transfers; what is returned waits for them.

    `takes[r]` are the pieces of the source that go to rank r, and `puts[r]` those of the result that come from there;
    None: one after the other, rank by rank.
    """
    if wire.tagged and source.device != wire.device:  # gloo moves memory of the CPU
        staged = torch.empty(out.shape, dtype=out.dtype, device=wire.device)
        wait = _start(wire, staged, source.to(wire.device), sends, receives, tag, takes, puts)

        def finish() -> None:
            wait()
            out[: sum(receives)] = staged[: sum(receives)].to(out.device)

        return finish
    source = source.contiguous()
    if wire.tagged:
        return _send_and_receive(wire, out, source, sends, receives, tag, takes, puts)
    import torch.distributed as dist

    sent = source[: sum(sends)] if takes is None else _taken(source, [piece for part in takes for piece in part])
    came = out[: sum(receives)] if puts is None else out.new_empty(sum(receives), *out.shape[1:])
    work = dist.all_to_all_single(came, sent, list(receives), list(sends), group=wire.group, async_op=True)

    def arrived() -> None:
        work.wait()
        if puts is not None:
            _put(out, [piece for part in puts for piece in part], came)

    return arrived


def _send_and_receive(
    wire: Wire,
    out: Tensor,
    source: Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    tag: int,
    takes: list[Pieces] | None,
    puts: list[Pieces] | None,
) -> Callable[[], None]:
    """Own rows are copied once, from where they are to where they belong, while the others travel."""
    others = [(wire.rank + step) % wire.size for step in range(1, wire.size)]
    to, where = _parts(source, sends, takes), _parts(out, receives, puts)
    coming = []
    for peer in others:
        if receives[peer]:
            part = where[peer]
            if part is None:
                part = memory.empty((receives[peer], *out.shape[1:]), out.dtype, out.device)
            coming.append((peer, part, wire.group.recv([part], peer, tag)))
    going = []
    for peer in others:
        if sends[peer]:
            part = to[peer]
            if part is None:
                part = _taken(source, takes[peer] if takes else [])
            going.append(wire.group.send([part], peer, tag))
    if sends[wire.rank]:
        mine = wire.rank
        own_puts, own_takes = puts[mine] if puts else [], takes[mine] if takes else []
        _copy(out, where[mine], own_puts, source, to[mine], own_takes)

    def finish() -> None:
        for peer, part, work in coming:
            work.wait()
            if where[peer] is None and puts:
                _put(out, puts[peer], part)
        for work in going:
            work.wait()

    return finish


def _parts(rows: Tensor, sizes: Sequence[int], pieces: list[Pieces] | None) -> Sequence[Tensor | None]:
    """The rows of each rank, where they are next to each other."""
    if pieces is None:
        return rows[: sum(sizes)].split(list(sizes))
    return [rows[part[0][0] : part[0][0] + part[0][1]] if len(part) == 1 else None for part in pieces]


def _copy(out: Tensor, where: Tensor | None, puts: Pieces, source: Tensor, part: Tensor | None, takes: Pieces) -> None:
    if part is None and where is not None:
        _taken(source, takes, where)
    elif part is not None and where is not None:
        where.copy_(part)
    else:
        _put(out, puts, _taken(source, takes) if part is None else part)


def _small(rows: Tensor, pieces: Pieces) -> bool:
    width = rows.stride(0) * rows.element_size()
    return sum(length for _, length in pieces) * width < SMALL * len(pieces) or rows.device.type != "cpu"


def _index(rows: Tensor, pieces: Pieces) -> Tensor:
    return torch.cat([torch.arange(first, first + length) for first, length in pieces]).to(rows.device)


def _taken(source: Tensor, pieces: Pieces, out: Tensor | None = None) -> Tensor:
    """The pieces, one after the other."""
    if out is None:
        total = sum(length for _, length in pieces)
        out = memory.empty((total, *source.shape[1:]), source.dtype, source.device)
    if not pieces:
        return out
    if _small(source, pieces):
        return torch.index_select(source, 0, _index(source, pieces), out=out)
    return torch.cat([source[first : first + length] for first, length in pieces], out=out)


def _put(out: Tensor, pieces: Pieces, rows: Tensor) -> None:
    if not pieces:
        return
    if _small(out, pieces):
        out.index_copy_(0, _index(out, pieces), rows)
        return
    for (first, length), piece in zip(pieces, rows.split([length for _, length in pieces]), strict=True):
        out[first : first + length] = piece


def _pieces(lengths: Sequence[int], ranks: int) -> list[Pieces]:
    """Of each rank, in rows that lie expert by expert and inside an expert rank by rank: the order of
    `moeroute.plan_from_segments`. `lengths` is [ranks, E], row by row."""
    experts = len(lengths) // ranks
    found: list[Pieces] = [[] for _ in range(ranks)]
    first = 0
    for expert in range(experts):
        for rank in range(ranks):
            if length := lengths[rank * experts + expert]:
                found[rank].append((first, length))
                first += length
    return found


# ---------------------------------------------------------------------------- the operator

_runs: Counter[tuple[str, Place]] = Counter()


def _check_sizes(argument: str, sizes: Sequence[int], size: int, name: str, rows: int) -> None:
    if len(sizes) != size or any(n < 0 for n in sizes) or sum(sizes) > rows:
        wanted = f"{size} numbers of at least 0, one for each rank, and no more than the {rows} rows of {name} in all"
        raise check.wrong_value(OPERATOR, argument, wanted, list(sizes))


def _check_lengths(lengths: Sequence[int], sizes: Sequence[int]) -> None:
    experts = len(lengths) // len(sizes)
    sums = [sum(lengths[rank * experts : (rank + 1) * experts]) for rank in range(len(sizes))]
    if len(lengths) % len(sizes) or min(lengths) < 0 or sums != list(sizes):
        wanted = f"[ranks, experts] numbers of at least 0, {list(sizes)} for each rank in all"
        raise check.wrong_value(OPERATOR, "lengths", wanted, list(lengths))


def _exchange_kernel(
    rows: Tensor,
    anchor: Tensor | None,
    sends: Sequence[int],
    receives: Sequence[int],
    lengths: Sequence[int],
    room: int,
    group: str,
    layer: str,
    phase: str,
    order: int,
    call: int,
) -> Tensor:
    check.shaped(OPERATOR, "rows", rows, (None, None))
    check.integer(OPERATOR, "room", room, 0)
    wire = _wire_named(group)
    _check_sizes("sends", sends, wire.size, "rows", rows.shape[0])
    _check_sizes("receives", receives, wire.size, "the result", room)
    result_is_grouped = (phase == "dispatch") == (order % 2 == 0)
    if lengths:
        grouped = receives if result_is_grouped else sends
        _check_lengths(lengths, grouped)
    if wire.group is None and sends[0] != receives[0]:
        raise check.wrong_value(OPERATOR, "receives", f"{list(sends)}, as sends: one rank", list(receives))
    place = Place(layer, phase, order, call)
    if call == 0:
        _runs[group, place] += 1
    tag = place.tag(_runs[group, place] if call == 0 else 0, rows.shape[1], str(rows.dtype))
    out = memory.empty((room, rows.shape[1]), rows.dtype, rows.device)
    out[sum(receives) :].zero_()
    if wire.group is None:
        out[: sends[0]] = rows[: sends[0]]
        return out
    with _reported(wire, place):
        pieces = _pieces(lengths, wire.size) if lengths else None
        takes, puts = (None, pieces) if result_is_grouped else (pieces, None)
        # Detached: what waits may write after autograd has made `out` a result.
        finish = _start(wire, out.detach(), rows.detach(), sends, receives, tag, takes, puts)
        if _overlap.pending is None:
            finish()
    if _overlap.pending is not None:

        def reported() -> None:
            with _reported(wire, place):
                finish()

        _overlap.pending.append(reported)
    return out


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_rows, ctx.others = inputs[0].shape[0], inputs[2:]


def _derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    sends, receives, lengths, _, group, layer, phase, order, call = ctx.others
    arguments = receives, sends, lengths, ctx.num_rows, group, layer, phase, order + 1, call
    return _exchange(grad, None, *arguments), *(None,) * 10


_exchange = register(
    "exchange(Tensor rows, Tensor? anchor, int[] sends, int[] receives, int[] lengths, int room, str group, str layer, "
    "str phase, int order, int call) -> Tensor",
    _exchange_kernel,
    lambda rows, anchor, sends, receives, lengths, room, *others: rows.new_empty(room, rows.shape[1]),
    derivative=_derivative,
    setup=_setup,
    linear_in=(0,),
)
