"""Expert parallelism: each rank of a process group owns some experts, and rows travel to them and back.

    parallelize_module(model, mesh["ep"], {"blocks.*.moe.experts": ExpertParallel(model)})

`ExpertParallel` shards the experts of `moeroute.nn.MoE`; `ExpertExchange` is what it is made of, for layers of your
own. docs/expert_parallel.md has the conventions of losses and gradients, the wrappers that go with it, and the faults.

dispatch: check → `_bind` (first call) → sizes and header → rows, into their places by expert.  combine: the way back.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from moeroute import check
from moeroute.dtypes import FLOATS, LARGEST
from moeroute.ops.exchange import (
    ExpertParallelError as ExpertParallelError,
)
from moeroute.ops.exchange import Place, Wire, exchange, gather, name_of, process_group, started, swap, wire_of
from moeroute.ops.gradient_norm import clip_grad_norm_ as clip_grad_norm_
from moeroute.ops.indices.op import plan_from_row_of_slot
from moeroute.permutation import permute, unpermute
from moeroute.plan import RoutingPlan

FORMAT = 1
_OPERATOR = "expert_parallel.ExpertExchange"
# What must be the same on every rank: found when the layer is first called, and in every call.
_RECORD = ("format", "layer", "ranks", "num_experts", "H", "dtype", "K", "capacity", "align", "torch")
_HEADER = ("layer", "call", "H", "dtype", "gradients are recorded", "rows need a gradient", "experts do", "refused")
_DTYPES = (None, *FLOATS)


def owned_experts(num_experts: int, ranks: int, rank: int) -> range:
    """The experts of a rank: chunks of ceil(E / W), as those of a DTensor `Shard(0)`.

    Args:
        num_experts: E.
        ranks: W.
        rank: of the one that is asked about.

    Returns:
        A range of expert numbers; empty where earlier ranks own all.

    >>> [list(owned_experts(4, 3, rank)) for rank in range(3)]
    [[0, 1], [2, 3], []]
    """
    operator = "expert_parallel.owned_experts"
    check.integer(operator, "num_experts", num_experts, 1, LARGEST)
    check.integer(operator, "ranks", ranks, 1)
    check.integer(operator, "rank", rank, 0, ranks - 1)
    chunk = -(-num_experts // ranks)
    return range(min(chunk * rank, num_experts), min(chunk * (rank + 1), num_experts))


@dataclass(frozen=True)
class Dispatched:
    """How the rows of one `ExpertExchange.dispatch` travelled; what `combine` needs. A plain value.

    - ``sends``, ``receives``: rows to and from each rank
    - ``lengths``: rows from each rank for each of this rank's experts, [W * local experts]
    - ``num_rows``: rows that `dispatch` got
    - ``slots``: with a capacity, plan from the rows to their places in the buffer; else None
    - ``call``: the number of the call, the same on every rank; 0 with a capacity
    - ``needs_gradient``: whether any rank's rows or experts need a gradient
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    lengths: tuple[int, ...]
    num_rows: int
    slots: RoutingPlan | None
    call: int
    needs_gradient: bool


class ExpertExchange:
    """Rows to the ranks that own their experts, and the results back. All ranks of the group call it together.

    Args:
        group: a `torch.distributed.ProcessGroup`, a `DeviceMesh` of one dimension, or None: the default group, or
            this process alone where torch.distributed is not initialised.
        num_experts: E, of the whole layer.
        capacity: None: as many rows travel as there are, and each call first exchanges their numbers, which the CPU
            waits for (on a GPU a synchronisation). A number: each rank sends that many rows to each expert, those
            over it are dropped (their results are 0) and missing ones are zeros. Shapes are then static, nothing is
            waited for but the rows, and torch.compile traces the exchange.
        layer: the name that errors use.
        topk: K, compared between the ranks if it is given.
        align: likewise.

    The first call compares W, E, H, dtype, K, capacity, align and the version of torch between the ranks. Without a
    capacity each later call compares its number, H, dtype and gradient mode before a row moves. Where they differ
    every rank raises the same ValueError, and the group can still be used.

    >>> import torch
    >>> from moeroute.expert_parallel import ExpertExchange
    >>> exchange = ExpertExchange(None, num_experts=3)  # one process: a group of one
    >>> rows = torch.tensor([[1.0], [2.0], [3.0]])
    >>> received, rows_per_expert, handle = exchange.dispatch(rows, torch.tensor([2, 0, 1]))
    >>> rows_per_expert.tolist()
    [2, 0, 1]
    >>> exchange.combine(received * 10, handle).flatten()
    tensor([10., 20., 30.])
    """

    def __init__(
        self,
        group: Any,
        num_experts: int,
        *,
        capacity: int | None = None,
        layer: str = "experts",
        topk: int | None = None,
        align: int | None = None,
    ) -> None:
        check.integer(_OPERATOR, "num_experts", num_experts, 1, LARGEST)
        if capacity is not None:
            check.integer(_OPERATOR, "capacity", capacity, 0, LARGEST)
        if not isinstance(layer, str):
            raise check.wrong_type(_OPERATOR, "layer", "a str", layer)
        self.group = process_group(_OPERATOR, group)
        self.num_experts, self.capacity, self.layer = num_experts, capacity, layer
        self.topk, self.align = topk, align
        wire = wire_of(self.group)
        self.num_ranks, self.rank = wire.size, wire.rank
        self.experts_of_rank = [len(owned_experts(num_experts, wire.size, rank)) for rank in range(wire.size)]
        self._name = name_of(self.group)
        self._calls = 0
        self._bound: tuple[object, ...] | None = None

    @property
    def num_local_experts(self) -> int:
        """The number of experts that this rank owns."""
        return self.experts_of_rank[self.rank]

    def dispatch(
        self,
        rows: Tensor,
        rows_per_expert: Tensor | Sequence[int],
        *,
        anchor: Tensor | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> tuple[Tensor, Tensor, Dispatched]:
        """Bring rows to the ranks of their experts.

        Args:
            rows: [R, H], grouped by expert; rows beyond ``sum(rows_per_expert)`` are padding and do not travel.
            rows_per_expert: int64 [E], or ints: the rows of each expert, of all E.
            anchor: a weight of the experts. Where it requires no gradient, and no rank's rows and anchors do either,
                no derivative is recorded. None: recorded wherever gradients are.
            meanwhile: called while the rows travel, the shared expert for instance.

        Returns:
            The rows [R', H] of this rank's experts, expert by expert, inside an expert rank by rank: the order of
            one process that has the tokens of all ranks. int64 [local experts]: the rows of each. What `combine`
            needs.

        Raises:
            ValueError: an argument is wrong, or what must be the same on every rank is not.
            TypeError: a wrong type or dtype.
            ExpertParallelError: a peer is gone, or does something else.
        """
        if self.capacity is not None:
            return self._dispatch_with_capacity(rows, rows_per_expert, anchor, meanwhile)
        if torch.compiler.is_compiling():
            return self._uncompiled_dispatch(rows, rows_per_expert, anchor, meanwhile)
        return self._dispatch(rows, rows_per_expert, anchor, meanwhile)

    def combine(self, rows: Tensor, handle: Dispatched) -> Tensor:
        """Bring the results of `dispatch`'s rows back.

        Args:
            rows: [R', H'], one for each row that `dispatch` returned.
            handle: what `dispatch` returned.

        Returns:
            [R, H'], in the order of the rows that `dispatch` got; 0 for those that did not travel.

        Raises:
            ValueError: a wrong number of rows.
            TypeError: no handle of `dispatch`.
            ExpertParallelError: a peer is gone, or does something else.
        """
        operator = "expert_parallel.ExpertExchange.combine"
        if not isinstance(handle, Dispatched):
            raise check.wrong_type(operator, "handle", "what dispatch returned", handle)
        check.tensor(operator, "rows", rows)
        wanted = sum(handle.receives)
        if rows.ndim != 2 or rows.shape[0] != wanted:
            raise check.wrong_shape(operator, "rows", f"[R', H] with R' = {wanted}, as dispatch returned", rows)
        anchor = None
        if handle.needs_gradient and torch.is_grad_enabled() and not rows.requires_grad:
            anchor = torch.empty(0, device=rows.device, requires_grad=True)
        room = handle.num_rows if handle.slots is None else handle.slots.num_rows
        if self.num_ranks > 1 or room != rows.shape[0]:
            rows = self._move(
                rows, handle.receives, handle.sends, handle.lengths, room, "combine", handle.call, anchor, None
            )
        return rows if handle.slots is None else unpermute(rows, handle.slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertExchange:
        """Over the same group, with calls of its own."""
        options: dict[str, Any] = {
            "capacity": self.capacity,
            "layer": self.layer,
            "topk": self.topk,
            "align": self.align,
        }
        return ExpertExchange(self.group, self.num_experts, **options)

    def _move(
        self,
        rows: Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
        lengths: Sequence[int],
        room: int,
        phase: str,
        call: int,
        anchor: Tensor | None,
        meanwhile: Callable[[], object] | None,
    ) -> Tensor:
        def move() -> Tensor:
            where: dict[str, Any] = {"group": self._name, "layer": self.layer, "phase": phase, "call": call}
            return exchange(rows, sends, receives, room, lengths=lengths, anchor=anchor, **where)

        if meanwhile is None or torch.compiler.is_compiling():
            moved = move()
            if meanwhile is not None:
                meanwhile()
            return moved
        with started() as pending:
            moved = move()
        meanwhile()
        for wait in pending:
            wait()
        return moved

    # ------------------------------------------------------------------------ any number of rows

    @_disable_dynamo  # loads the compiler when it is called
    def _uncompiled_dispatch(self, *arguments: Any) -> tuple[Tensor, Tensor, Dispatched]:
        """A graph break: the numbers of rows are not known to the compiler."""
        return self._dispatch(*arguments)

    def _dispatch(
        self,
        rows: Tensor,
        rows_per_expert: Tensor | Sequence[int],
        anchor: Tensor | None,
        meanwhile: Callable[[], object] | None,
    ) -> tuple[Tensor, Tensor, Dispatched]:
        wire = wire_of(self.group)
        problem: Exception | None = None
        counts = [0] * self.num_experts
        try:
            counts = self._checked(rows, rows_per_expert)
        except (TypeError, ValueError) as error:
            if wire.group is None:
                raise
            problem = error
        table, needs_rows, needs_any = self._agree(wire, rows, counts, anchor, problem)
        sends = [sum(part) for part in self._by_rank(counts)]
        receives = [sum(part) for part in table]
        lengths = tuple(n for part in table for n in part)
        total = sum(receives)
        moved = rows
        if wire.size > 1 or rows.shape[0] != total:
            hook = _anchor(rows, anchor) if needs_rows and not rows.requires_grad else None
            moved = self._move(rows, sends, receives, lengths, total, "dispatch", self._calls, hook, meanwhile)
        elif meanwhile is not None:
            meanwhile()
        counts_here = torch.tensor([sum(column) for column in zip(*table, strict=True)], dtype=torch.int64)
        handle = Dispatched(tuple(sends), tuple(receives), lengths, rows.shape[0], None, self._calls, needs_any)
        return moved, counts_here, handle

    def _checked(self, rows: Any, rows_per_expert: Any) -> list[int]:
        check.tensor(_OPERATOR, "rows", rows)
        if rows.ndim != 2 or rows.shape[1] == 0:
            raise check.wrong_shape(_OPERATOR, "rows", "[R, H]", rows)
        if rows.dtype not in FLOATS:
            raise check.wrong_dtype(_OPERATOR, "rows", "float16, bfloat16, float32 or float64", rows)
        if isinstance(rows_per_expert, Tensor):
            if rows_per_expert.dtype is not torch.int64:
                raise check.wrong_dtype(_OPERATOR, "rows_per_expert", "torch.int64", rows_per_expert)
            rows_per_expert = rows_per_expert.tolist()
        elif not isinstance(rows_per_expert, Sequence) or isinstance(rows_per_expert, str | bytes):
            wanted = "an int64 tensor or a sequence of ints"
            raise check.wrong_type(_OPERATOR, "rows_per_expert", wanted, rows_per_expert)
        counts = rows_per_expert
        if not isinstance(counts, Sequence) or len(counts) != self.num_experts:
            raise check.wrong_value(_OPERATOR, "rows_per_expert", f"[E] with E = {self.num_experts}", counts)
        for count in counts:
            check.integer(_OPERATOR, "rows_per_expert", count, 0)
        if sum(counts) > rows.shape[0]:
            wanted = f"no more than the {rows.shape[0]} rows in all"
            raise check.wrong_value(_OPERATOR, "rows_per_expert", wanted, list(counts))
        return list(counts)

    def _by_rank(self, counts: list[int]) -> list[list[int]]:
        owned = (owned_experts(self.num_experts, self.num_ranks, rank) for rank in range(self.num_ranks))
        return [counts[part.start : part.stop] for part in owned]

    def _agree(
        self, wire: Wire, rows: Any, counts: list[int], anchor: Tensor | None, problem: Exception | None
    ) -> tuple[list[list[int]], bool, bool]:
        """The rows that come for each of this rank's experts, by source; whether any rank's rows need a gradient, and
        whether any rank's rows or experts do.

        A rank whose arguments are refused says so here, so that the others do not wait for it.
        """
        records = torch.is_grad_enabled()
        width, dtype = (0, 0) if problem else (rows.shape[1], _DTYPES.index(rows.dtype))
        needs = records and problem is None and rows.requires_grad
        wants = records and (anchor is None or anchor.requires_grad)
        if wire.group is None:
            self._calls += 1
            return [counts], needs, needs or wants
        if self._bound is None:
            self._bind(wire, width, dtype, problem)
        self._calls += 1
        place = Place(self.layer, "dispatch", 0, self._calls)
        layer = zlib.crc32(self.layer.encode())
        header = [layer, self._calls, width, dtype, int(records), int(needs), int(wants), int(problem is not None)]
        size = len(header) + self.num_local_experts
        found = swap(wire, place, [header + part for part in self._by_rank(counts)], size)
        headers = [dict(zip(_HEADER, numbers, strict=False)) for numbers in found]
        _refuse(self.layer, headers, problem)
        same = {"layer", "call", "H", "dtype", "gradients are recorded"}
        _compare(self.layer, headers, same)
        lengths = [numbers[len(header) :] for numbers in found]
        any_rows = any(h["rows need a gradient"] for h in headers)
        return lengths, any_rows, any_rows or any(h["experts do"] for h in headers)

    def _bind(self, wire: Wire, width: int, dtype: int, problem: Exception | None) -> None:
        """Compare what must be the same on every rank. The record's length depends on nothing in it."""
        texts = [zlib.crc32(text.encode()) for text in (self.layer, torch.__version__)]
        unknown = [-1 if value is None else value for value in (self.topk, self.capacity, self.align)]
        record = [FORMAT, texts[0], wire.size, self.num_experts, width, dtype, *unknown, texts[1]]
        found = gather(wire, Place(self.layer, "dispatch", 0, 1), [*record, int(problem is not None)])
        records = [dict(zip((*_RECORD, "refused"), numbers, strict=True)) for numbers in found]
        _refuse(self.layer, records, problem)
        _compare(self.layer, records, set(_RECORD))
        self._bound = tuple(record)

    # ------------------------------------------------------------------------ static shapes

    def _dispatch_with_capacity(
        self,
        rows: Tensor,
        rows_per_expert: Tensor | Sequence[int],
        anchor: Tensor | None,
        meanwhile: Callable[[], object] | None,
    ) -> tuple[Tensor, Tensor, Dispatched]:
        capacity, mine = self.capacity or 0, self.num_local_experts
        if not torch.compiler.is_compiling():
            self._first_call(rows, rows_per_expert)
        if not isinstance(rows_per_expert, Tensor):
            rows_per_expert = torch.tensor(rows_per_expert, dtype=torch.int64)
        slots = _slots(rows_per_expert.to(rows.device), rows.shape[0], self.num_experts, capacity)
        sends = tuple(capacity * owned for owned in self.experts_of_rank)
        receives, lengths = (capacity * mine,) * self.num_ranks, (capacity,) * (mine * self.num_ranks)
        records = torch.is_grad_enabled() and (anchor is None or anchor.requires_grad or rows.requires_grad)
        moved = permute(rows, slots)
        if self.num_ranks > 1:
            hook = _anchor(rows, anchor) if records and not rows.requires_grad else None
            moved = self._move(moved, sends, receives, lengths, sum(receives), "dispatch", 0, hook, meanwhile)
        elif meanwhile is not None:
            meanwhile()
        counts = torch.full((mine,), self.num_ranks * capacity, dtype=torch.int64)
        return moved, counts, Dispatched(sends, receives, lengths, rows.shape[0], slots, 0, records)

    def _first_call(self, rows: Any, rows_per_expert: Any) -> None:
        """Checks; and the comparison of the ranks, once. Warns where most rows are dropped."""
        problem: Exception | None = None
        counts: list[int] = []
        wire = wire_of(self.group)
        if self._bound is not None and rows.device.type != "cpu":
            return  # the counts are not read
        try:
            counts = self._checked(rows, rows_per_expert)
        except (TypeError, ValueError) as error:
            if wire.group is None or self._bound is not None:
                raise
            problem = error
        if self._bound is None:
            width, dtype = (0, 0) if problem else (rows.shape[1], _DTYPES.index(rows.dtype))
            self._bind(wire, width, dtype, problem)
            dropped = sum(max(count - (self.capacity or 0), 0) for count in counts)
            if dropped * 2 > sum(counts):
                warnings.warn(
                    f"{_OPERATOR}: capacity={self.capacity} drops {dropped / sum(counts):.0%} of the {sum(counts)}"
                    f" rows of layer {self.layer!r} on rank {self.rank}",
                    stacklevel=3,
                )


class ExpertParallel(ParallelStyle):
    """A style of `torch.distributed.tensor.parallel.parallelize_module` for `moeroute.nn.Experts`.

    Every parameter of the module, [E, ...], becomes a DTensor `Shard(0)` over the mesh, under its name. The module's
    forward still takes the rows of all experts, [R, H] and int64 [E], sends each row to the rank that owns its expert,
    and brings the results back. `nn.MoE` lets its shared expert run while rows travel.

    It works for any module whose ``forward(rows, rows_per_expert)`` maps [R, H] row by row and whose parameters have
    experts as their first axis.

    Args:
        model: the model that contains the modules, so that errors tell a layer's name in it.
        capacity: see `ExpertExchange`.
        overlap: whether the shared expert runs while rows travel; the bits are the same.

    >>> import torch, torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> from moeroute.expert_parallel import ExpertParallel
    >>> from moeroute.nn import MoE
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    >>> layer, x = MoE(16, 32, num_experts=8, k=2), torch.randn(5, 16)
    >>> expected = layer(x)
    >>> _ = parallelize_module(layer, mesh["ep"], {"experts": ExpertParallel(layer)})
    >>> torch.equal(layer(x), expected), layer.experts.down_proj.placements
    (True, (Shard(dim=0),))
    >>> dist.destroy_process_group()
    """

    def __init__(self, model: nn.Module | None = None, *, capacity: int | None = None, overlap: bool = True) -> None:
        super().__init__()
        operator = "expert_parallel.ExpertParallel"
        if model is not None and not isinstance(model, nn.Module):
            raise check.wrong_type(operator, "model", "a torch.nn.Module or None", model)
        if capacity is not None:
            check.integer(operator, "capacity", capacity, 0, LARGEST)
        check.flag(operator, "overlap", overlap)
        self.model, self.capacity, self.overlap = model, capacity, overlap
        self.applied = 0

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        operator = "expert_parallel.ExpertParallel"
        parameters = dict(module.named_parameters(recurse=False))
        sizes = {parameter.shape[0] if parameter.ndim else 0 for parameter in parameters.values()}
        stacked = any(parameter.ndim == 3 for parameter in parameters.values())
        if len(sizes) != 1 or not stacked or next(module.children(), None) is not None:
            wanted = "a module like moeroute.nn.Experts, whose parameters are all [E, ...], weights [E, O, I]"
            raise check.wrong_value(operator, "module", wanted, type(module).__name__)
        if getattr(module, "exchange", None) is not None:
            raise check.wrong_value(operator, "module", "one that is not parallel yet", type(module).__name__)
        self.applied += 1
        names = [name for name, found in self.model.named_modules() if found is module] if self.model else []
        layer = names[0] if names else f"experts {self.applied}"
        exchange = ExpertExchange(device_mesh, sizes.pop(), capacity=self.capacity, layer=layer)
        for name, parameter in parameters.items():
            sharded = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        module.__dict__["exchange"] = exchange
        module.__dict__["forward"] = functools.partial(_forward, module, self.overlap)
        return module


def _forward(
    module: Any,
    overlap: bool,
    rows: Tensor,
    rows_per_expert: Tensor | Sequence[int],
    facts: dict[str, int] | None = None,
    shared: Callable[[], Tensor | None] | None = None,
) -> Any:
    """The forward of a module of experts that is parallel; with `shared`, its result too."""
    exchange: ExpertExchange = module.exchange
    for name, value in (facts or {}).items():
        if getattr(exchange, name) is None:
            setattr(exchange, name, value)
    result: list[Tensor | None] = []
    weights = {
        name: _local(parameter) for name, parameter in module._parameters.items()
    }  # None: a bias that is not there
    there = [weight for weight in weights.values() if weight is not None]
    anchor = next((weight for weight in there if weight.requires_grad), there[0])
    meanwhile = None if shared is None or not overlap else lambda: result.append(shared())
    rows, counts, handle = exchange.dispatch(rows, rows_per_expert, anchor=anchor, meanwhile=meanwhile)
    local = object.__new__(type(module))
    local.__dict__.update(module.__dict__)
    local.__dict__["_parameters"] = weights
    rows = type(module).forward(local, rows, counts)
    rows = exchange.combine(rows, handle)
    if shared is None:
        return rows
    return rows, result[0] if overlap else shared()


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that `ExpertParallel` has sharded, by their names in the model.

    Wrappers that average gradients are told to leave them alone (docs/expert_parallel.md).

    Args:
        model: any module.

    Returns:
        Name to parameter, in the order of `named_parameters`.
    """
    found: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if isinstance(module.__dict__.get("exchange"), ExpertExchange):
            found |= {f"{prefix}.{name}".lstrip("."): p for name, p in module.named_parameters(recurse=False)}
    return found


# ---------------------------------------------------------------------------- helpers


def _anchor(rows: Tensor, anchor: Tensor | None) -> Tensor:
    if anchor is not None and anchor.requires_grad:
        return anchor
    return torch.empty(0, device=rows.device, requires_grad=True)


def _slots(rows_per_expert: Tensor, num_rows: int, num_experts: int, capacity: int) -> RoutingPlan:
    """From rows that are grouped by expert to a buffer [E * capacity]; what is over the capacity has no place."""
    ends = rows_per_expert.cumsum(0)
    row = torch.arange(num_rows, device=rows_per_expert.device)
    expert = torch.searchsorted(ends, row, right=True)
    place = row - (ends - rows_per_expert)[expert.clamp(max=num_experts - 1)]
    fits = (place < capacity) & (expert < num_experts)
    row_of_slot = torch.where(fits, expert * capacity + place, -1)
    return plan_from_row_of_slot(row_of_slot, num_rows, num_experts * capacity)


def _refuse(layer: str, records: list[dict[str, int]], problem: Exception | None) -> None:
    if problem is not None:
        raise problem
    if ranks := [rank for rank, record in enumerate(records) if record["refused"]]:
        wanted = "right on every rank"
        raise check.wrong_value(_OPERATOR, f"the arguments of layer {layer!r}", wanted, f"wrong ones on ranks {ranks}")


def _compare(layer: str, records: list[dict[str, int]], same: set[str]) -> None:
    for name in records[0]:
        values = [record[name] for record in records]
        if name in same and len(set(values)) > 1:
            shown: list[object] = [_DTYPES[value] for value in values] if name == "dtype" else list(values)
            raise check.wrong_value(_OPERATOR, f"{name} of layer {layer!r}", "the same on every rank", shown)
