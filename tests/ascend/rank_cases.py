"""What every rank of tests/torch_npu/test_ranks.py runs, and a model that plays all ranks in one process.

Arguments: the number of ranks, and a file for them to meet at. Ranks are forked, so that torch is imported once.
"""

import datetime
import multiprocessing
import multiprocessing.connection
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # torch imports it late, which here would be once a rank
import torch.distributed as dist
from torch import Tensor

from moeroute.interop.torch_npu import ranks as dispatching
from moeroute.interop.torch_npu import ranks_combine as combining
from moeroute.interop.torch_npu import ranks_gmm as products

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# ---------------------------------------------------------------------------- the model


@dataclass
class Case:
    """One call of dispatch and one of combine on every rank."""

    world: int
    dtype: torch.dtype = BF16
    hidden: int = 16
    tokens: list[int] = field(default_factory=lambda: [6])
    topk: int = 3
    experts: int = 8
    shared: int = 1
    shared_ranks: int = 0
    quant: int = 0
    scales: bool = False
    static: str = "experts"  # what has a factor of its own with quant 1: "all", "columns", "experts"
    mask: int = 0  # axes
    cumulative: bool = False
    shared_x: bool = False
    zero: int = 0
    copy: int = 0
    const: int = 0
    global_bs: int = 0
    first_choices: int | None = None  # of expert ids that are chosen from

    def __post_init__(self) -> None:
        if len(self.tokens) == 1:
            self.tokens *= self.world
        self.common = self._common()
        self.inputs = [self._inputs(rank) for rank in range(self.world)]
        self.active = [self._active(rank) for rank in range(self.world)]

    @property
    def columns(self) -> int:
        return self.shared if self.shared_ranks else 0

    @property
    def special(self) -> int:
        return self.zero + self.copy + self.const

    def _common(self) -> dict[str, Tensor]:
        """What all ranks have."""
        generator = torch.Generator().manual_seed(99)
        return {
            "scales": torch.rand(self.columns + self.experts, self.hidden, generator=generator) + 0.5,
            "factors": torch.rand(self.columns + self.experts, self.hidden, generator=generator) - 0.5,
            "alpha_1": torch.rand(self.const, self.hidden, generator=generator).to(self.dtype),
            "alpha_2": torch.rand(self.const, generator=generator).to(self.dtype),
            "v": torch.randn(self.const, self.hidden, generator=generator).to(self.dtype),
        }

    def _inputs(self, rank: int) -> dict[str, Tensor]:
        """What one rank has."""
        generator = torch.Generator().manual_seed(rank)
        num = self.tokens[rank]
        x = torch.randn(num, self.hidden, generator=generator) * 4
        x[1::4] = 0
        choices = self.first_choices or self.experts + self.special
        ids = torch.stack(
            [torch.randperm(choices, generator=generator)[: self.topk] for _ in range(num)]
            + [torch.zeros(self.topk, dtype=torch.int64)]
        )[:num]
        weights = torch.rand(num, self.topk, generator=generator)
        mask = torch.rand(num, *[self.topk] * (self.mask - 1), generator=generator) < 0.6
        if self.mask == 1:
            mask = mask.sort(descending=True).values
            ids[~mask] = -7  # never looked at
        shared = torch.randn(num, self.hidden, generator=generator)
        return {"x": x.to(self.dtype), "ids": ids, "weights": weights, "mask": mask, "shared": shared.to(self.dtype)}

    def _active(self, rank: int) -> Tensor:
        """bool [N, K]."""
        mask = self.inputs[rank]["mask"]
        if self.mask == 0:
            return torch.ones(self.tokens[rank], self.topk, dtype=torch.bool)
        return mask if self.mask == 2 else mask[:, None].expand(-1, self.topk)

    def home(self, source: int) -> Callable[[int], tuple[int, int]]:
        """Rank and local number of what a slot of a source rank goes to: an expert, or below 0 a shared one."""
        replicas = self.shared_ranks // self.shared if self.shared_ranks else 1
        per_rank = self.experts // (self.world - self.shared_ranks)

        def where(expert: int) -> tuple[int, int]:
            if expert < 0:
                return (-expert - 1) * replicas + source % replicas, 0
            return self.shared_ranks + expert // per_rank, expert % per_rank

        return where

    def room(self, rank: int) -> int:
        most = self.global_bs // self.world or max(self.tokens)
        if rank < self.shared_ranks:
            replicas = self.shared_ranks // self.shared
            return most * -(-self.world // replicas)
        return most * self.world * min(self.experts // (self.world - self.shared_ranks), self.topk)

    def received(self, rank: int) -> list[tuple[int, int, int, int, int]]:
        """(local number, source, token, slot, expert or -1 - shared expert) of every row of a rank, in order."""
        rows = []
        for source in range(self.world):
            where, active, ids = self.home(source), self.active[source], self.inputs[source]["ids"]
            for token in range(self.tokens[source]):
                sent = [(k, int(ids[token, k])) for k in range(self.topk) if active[token, k]]
                sent = [(k, expert) for k, expert in sent if expert < self.experts]
                if active[token].any():
                    sent += [(self.topk + j, -1 - j) for j in range(self.columns)]
                for slot, expert in sent:
                    target, local = where(expert)
                    if target == rank:
                        rows.append((local, source, token, slot, expert))
        return sorted(rows)

    def table_row(self, expert: int) -> int:
        """Of scales and factors: the shared experts come first."""
        return -expert - 1 if expert < 0 else self.columns + expert

    def static_factors(self) -> Tensor:
        factors = 40 * self.common["scales"]
        return {"all": factors[0, :1], "columns": factors[0], "experts": factors}[self.static]

    def travelled(self, source: int, token: int, expert: int) -> tuple[Tensor, Tensor]:
        """A row as it arrives, and its scale."""
        row = self.inputs[source]["x"][token]
        if not self.quant:
            return row, torch.tensor(0.0)
        values = row.float()
        if self.quant == 1:
            factors = self.static_factors()
            values = values * (factors[self.table_row(expert)] if factors.ndim == 2 else factors)
            return torch.round(values).clamp(-128, 127).to(torch.int8), torch.tensor(0.0)
        if self.scales:
            values = values * self.common["scales"][self.table_row(expert)]
        scale = values.abs().max() / 127
        return (torch.round(values / scale) if scale else values * 0).to(torch.int8), scale

    def worked(self, row: Tensor, scale: Tensor, expert: int) -> Tensor:
        """What the "expert" makes of a row: a product with a vector of its own."""
        values = row.float() * (scale if self.quant == 2 else 1.0)
        return (values * self.common["factors"][self.table_row(expert)]).to(self.dtype)

    def expected(self, rank: int) -> Tensor:
        """The result of combine."""
        mine, common = self.inputs[rank], self.common
        out = torch.zeros(self.tokens[rank], self.hidden)
        active = self.active[rank]
        ends = [self.experts, self.experts + self.zero, self.experts + self.zero + self.copy]
        for token in range(self.tokens[rank]):
            x = mine["x"][token].float()
            for k in range(self.topk):
                expert = int(mine["ids"][token, k])
                if not active[token, k] or ends[0] <= expert < ends[1]:
                    continue
                if expert < ends[0]:
                    term = self.worked(*self.travelled(rank, token, expert), expert).float()
                elif expert < ends[2]:
                    term = x
                else:
                    number = expert - ends[2]
                    term = x * common["alpha_1"][number].float()
                    term = term + common["v"][number].float() * common["alpha_2"][number].float()
                out[token] += mine["weights"][token, k] * term
            if active[token].any():
                if self.shared_x:
                    out[token] += mine["shared"][token].float()
                for j in range(self.columns):
                    out[token] += self.worked(*self.travelled(rank, token, -1 - j), -1 - j).float()
        return out.to(self.dtype)


def check(case: Case, rank: int, version: int, group: str = "ep") -> None:
    """Both calls against the model; the experts' work between them is the model's."""
    mine, common = case.inputs[rank], case.common
    names = {"group_ep": group, "ep_world_size": case.world, "ep_rank_id": rank, "moe_expert_num": case.experts}
    shared = {
        "shared_expert_num": case.shared,
        "shared_expert_rank_num": case.shared_ranks,
        "global_bs": case.global_bs,
    }
    special = {"zero_expert_num": case.zero, "copy_expert_num": case.copy, "const_expert_num": case.const}
    options: dict[str, Any] = names | shared | (special if version == 2 else {})
    options["x_active_mask"] = mine["mask"] if case.mask else None
    dispatch = dispatching.npu_moe_distribute_dispatch_v2 if version == 2 else dispatching.npu_moe_distribute_dispatch
    rows, scales, index, numbers, totals, tp, weights = dispatch(
        mine["x"],
        mine["ids"].to(torch.int32 if version == 1 else torch.int64),
        scales=case.static_factors() if case.quant == 1 else common["scales"] if case.scales else None,
        expert_scales=mine["weights"] if case.shared_x else None,
        quant_mode=case.quant,
        expert_token_nums_type=0 if case.cumulative else 1,
        **options,
    )
    expected, room = case.received(rank), case.room(rank)
    local = 1 if rank < case.shared_ranks else case.experts // (case.world - case.shared_ranks)
    wanted_rows = torch.zeros(room, case.hidden, dtype=torch.int8 if case.quant else case.dtype)
    wanted_scales, wanted_weights = torch.zeros(room), torch.zeros(room)
    counts = torch.zeros(local, case.world, dtype=torch.int64)
    worked = torch.full((room, case.hidden), torch.nan, dtype=case.dtype)
    for row, (number, source, token, slot, expert) in enumerate(expected):
        wanted_rows[row], wanted_scales[row] = case.travelled(source, token, expert)
        wanted_weights[row] = case.inputs[source]["weights"][token, slot] if expert >= 0 else 1
        counts[number, source] += 1
        worked[row] = case.worked(rows[row], wanted_scales[row], expert)
    same(rows, wanted_rows)
    if case.quant == 2:
        assert scales is not None
        same(scales, wanted_scales)
    else:
        assert scales is None
    sums = counts.sum(1)
    same(numbers, sums.cumsum(0) if case.cumulative else sums)
    same(totals, counts.flatten().cumsum(0).int())
    assert (tp.shape, weights.dtype) == ((0,), F32)
    same(weights, wanted_weights if case.shared_x else torch.zeros(0))
    assert index.dtype is torch.int32
    if version == 2:
        assert index.shape == (room * 128,)
        origin = torch.tensor([row[1:4] for row in expected], dtype=torch.int32).view(-1, 3)
        same(index.view(room, 128)[: len(expected), :3], origin)
    else:
        assert index.shape == (case.tokens[rank] * case.topk,)
    combine = combining.npu_moe_distribute_combine_v2 if version == 2 else combining.npu_moe_distribute_combine
    if version == 2 and case.special:
        options |= {
            "ori_x": mine["x"],
            "const_expert_alpha_1": common["alpha_1"],
            "const_expert_alpha_2": common["alpha_2"],
            "const_expert_v": common["v"],
        }
    out = combine(
        worked,
        mine["ids"],
        index,
        totals,
        mine["weights"],
        shared_expert_x=mine["shared"] if case.shared_x else None,
        **options,
    )
    same(out, case.expected(rank))


def cases(world: int) -> list[Case]:
    every = [
        Case(world),
        Case(world, F16, cumulative=True, shared_x=True),
        Case(world, F32, quant=2, scales=True),
        Case(world, F16, hidden=33, quant=2),
        Case(world, quant=1),
        Case(world, F32, hidden=33, quant=1, static="columns", mask=2),
        Case(world, F16, quant=1, static="all", shared_x=True),
        Case(world, mask=1, shared_x=True),
        Case(world, F32, mask=2),
        Case(world, quant=2, mask=2, shared_x=True),
        Case(world, tokens=[(5 * rank + 3) % 7 for rank in range(world)], global_bs=8 * world),
        Case(world, tokens=[0]),
        Case(world, topk=1, experts=world, first_choices=1),
        Case(world, hidden=1, topk=4, experts=4),
        Case(world, F32, zero=2),
        Case(world, F16, experts=4, zero=1, copy=2, const=2, shared_x=True),
        Case(world, F32, experts=4, copy=1, const=1, mask=1, tokens=[9]),
        Case(world, quant=2, scales=True, experts=4, zero=1, copy=1, mask=2),
    ]
    for shared, shared_ranks in ((1, 1), (1, 2), (2, 2), (1, 3), (3, 3)):
        if shared_ranks < world:
            experts = 2 * (world - shared_ranks)
            some: dict[str, Any] = {"experts": experts, "shared": shared, "shared_ranks": shared_ranks, "topk": 2}
            every += [
                Case(world, F32, **some, shared_x=True),
                Case(world, F32, **some, quant=2, scales=True, mask=1),
                Case(world, F32, **some, quant=1),
                Case(world, F16, **some, tokens=[r + 1 for r in range(world)], mask=2, global_bs=world * world),
                Case(world, **some, zero=1, copy=1, const=1, cumulative=True),
            ]
    return every


# ---------------------------------------------------------------------------- layers


def serving_layer(world: int, rank: int) -> None:
    """Gate and down products of the experts of each rank, against a loop over all experts."""
    generator = torch.Generator().manual_seed(7)
    num, hidden, inner, experts, topk = 10, 24, 12, 8, 3
    x = torch.randn(world, num, hidden, generator=generator)
    up = torch.randn(experts, hidden, 2 * inner, generator=generator) / hidden**0.5
    down = torch.randn(experts, inner, hidden, generator=generator) / inner**0.5
    weights, ids = torch.rand(world, num, experts, generator=generator).softmax(-1).topk(topk)

    def expert(rows: Tensor, e: int) -> Tensor:
        gate, value = (rows @ up[e]).chunk(2, -1)
        return torch.nn.functional.silu(gate) * value @ down[e]

    common: dict[str, Any] = {"group_ep": "ep", "ep_world_size": world, "ep_rank_id": rank, "moe_expert_num": experts}
    with torch.inference_mode():
        rows, _, index, numbers, totals, _, _ = dispatching.npu_moe_distribute_dispatch_v2(x[rank], ids[rank], **common)
        made = torch.zeros_like(rows)
        start = 0
        for number, size in enumerate(numbers.tolist()):
            made[start : start + size] = expert(rows[start : start + size], rank * len(numbers) + number)
            start += size
        out = combining.npu_moe_distribute_combine_v2(made, ids[rank], index, totals, weights[rank], **common)
    expected = torch.zeros(num, hidden)
    for e in range(experts):
        share = (weights[rank] * (ids[rank] == e)).sum(1)
        expected += share[:, None] * expert(x[rank], e)
    torch.testing.assert_close(out, expected)


def grouped_products(world: int, rank: int, dtype: torch.dtype, transposed: bool, local: int) -> None:
    """There and back, with a dense product beside each, against loops over ranks and experts."""
    generator = torch.Generator().manual_seed(8)
    hidden, width = 8, 6
    sends = torch.randint(0, 4, (world, world, local), generator=generator)  # from, to, expert
    x = [torch.randint(-3, 4, (int(sends[r].sum()), hidden), generator=generator).to(dtype) for r in range(world)]
    weight = torch.randint(-2, 3, (world, local, hidden, width), generator=generator).to(dtype)
    back = torch.randint(-2, 3, (world, local, width, hidden), generator=generator).to(dtype)
    dense_x, dense_w = x[rank][:3], weight[0, 0]
    pieces = [rows.split(sends[r].flatten().tolist()) for r, rows in enumerate(x)]
    mine = [[pieces[r][rank * local + e] for r in range(world)] for e in range(local)]
    permuted = torch.cat([piece for row in mine for piece in row])
    expected = torch.cat([piece @ weight[rank, e] for e, row in enumerate(mine) for piece in row])
    send, receive = sends[rank].flatten().tolist(), sends[:, rank].flatten().tolist()
    y, dense, rows = products.npu_alltoallv_gmm(
        x[rank],
        weight[rank].transpose(1, 2).contiguous() if transposed else weight[rank],
        "ep",
        world,
        send,
        receive,
        mm_x=dense_x,
        mm_weight=dense_w.t() if transposed else dense_w,
        trans_gmm_weight=transposed,
        trans_mm_weight=transposed,
        permute_out_flag=True,
    )
    assert dense is not None
    assert rows is not None
    same(rows, permuted)
    same(y, expected)
    same(dense, dense_x @ dense_w)
    returned, nothing = products.npu_gmm_alltoallv(
        y,
        back[rank].transpose(1, 2).contiguous() if transposed else back[rank],
        "ep",
        world,
        receive,
        send,
        trans_gmm_weight=transposed,
    )
    assert nothing is None
    parts = [
        pieces[rank][target * local + e] @ weight[target, e] @ back[target, e]
        for target in range(world)
        for e in range(local)
    ]
    same(returned, torch.cat(parts))


# ---------------------------------------------------------------------------- bad input


def refusals(world: int, rank: int) -> list[tuple[type[Exception], str, Callable[[], object]]]:
    """What raises on every rank: the type, words of the message, the call."""
    last = rank == world - 1
    common: dict[str, Any] = {"group_ep": "ep", "ep_world_size": world, "ep_rank_id": rank, "moe_expert_num": 8}
    ids = torch.tensor([[0, 1], [2, 3], [4, 5]])
    x = torch.ones(3, 16)

    def dispatch(x: Tensor = x, ids: Tensor = ids, **options: Any) -> object:
        return dispatching.npu_moe_distribute_dispatch_v2(x, ids, **(common | options))

    def combine(hidden: int = 16, dtype: torch.dtype = F32, topk: int = 2, assist: int = 128) -> object:
        rows, totals = torch.ones(0, hidden, dtype=dtype), torch.zeros(8, dtype=torch.int32)
        chosen = ids[:, :topk]
        index = torch.zeros(assist, dtype=torch.int32)
        return combining.npu_moe_distribute_combine_v2(rows, chosen, index, totals, torch.ones(3, topk), **common)

    def gmm(rows: int = 2, width: int = 4, counts: list[int] | None = None) -> object:
        sends = [1] * (2 * world) if counts is None else counts
        x, weight = torch.ones(2 * world, width), torch.ones(2, width, 3)
        return products.npu_alltoallv_gmm(x, weight, "ep", world, [1] * (2 * world), sends)

    def other() -> object:
        return combine() if last else dispatch()

    wrong_ids = ids + 6 if last else ids
    r, n = RuntimeError, NotImplementedError
    where = "" if last else f"(on rank {world - 1})"
    return [
        (r, "the hidden size of x must be the same on every rank; got [16", lambda: dispatch(x[:, : 12 if last else 16])),
        (r, "dtype of x must be the same on every rank; got [torch.float32", lambda: dispatch(x.to(BF16 if last else F32))),
        (r, "K of expert_ids must be the same", lambda: dispatch(ids=ids[:, : 1 if last else 2])),
        (r, "moe_expert_num must be the same", lambda: dispatch(moe_expert_num=world * (7 if last else 6))),
        (r, "quant_mode must be the same on every rank", lambda: dispatch(quant_mode=2 if last else 0)),
        (r, "expert_ids must be in 0..7; got 8", lambda: dispatch(ids=wrong_ids)),
        (r, where, lambda: dispatch(ids=wrong_ids)),
        (n, "quant_mode=4 is not available on a CPU", lambda: dispatch(quant_mode=4 if last else 0)),
        (r, "x must be of shape [N, H]; got [16]", lambda: dispatch(x[0] if last else x)),
        (r, "ep_rank_id must be", lambda: dispatch(ep_rank_id=5 if last else rank)),
        (r, f"global_bs must be at least {3 * world} where ranks have different", lambda: dispatch(x[: 2 if last else 3], ids[: 2 if last else 3])),
        (r, "global_bs must be 0, or a multiple of", lambda: dispatch(global_bs=2 * world)),
        (r, "global_bs must be 0, or a multiple of", lambda: dispatch(global_bs=3 * world + 1)),
        (r, "every rank must call the same function", other),
        (r, "the hidden size of expand_x must be the same", lambda: combine(12 if last else 16)),
        (r, "dtype of expand_x must be the same", lambda: combine(dtype=F16 if last else F32)),
        (r, "K of expert_ids must be the same", lambda: combine(topk=1 if last else 2)),
        (r, "the width of the rows must be the same", lambda: gmm(width=4 if last else 5)),
        (r, "recv_counts of rank", lambda: gmm(counts=[1, 2] + [1] * (2 * world - 2) if last else None)),
        (r, "recv_counts must be ints of at least 0", lambda: gmm(counts=[-1] * (2 * world) if last else None)),
    ]  # fmt: skip


def refuse(world: int, rank: int) -> None:
    """Every rank gets each error, and the next call works."""
    for kind, words, call in refusals(world, rank):
        try:
            call()
        except (RuntimeError, NotImplementedError) as error:
            assert type(error) is kind, repr(error)
            assert words in str(error), f"{words!r} in {error}"
        else:
            raise AssertionError(f"nothing raised: {words}")
    check(Case(world), rank, 2)


# ---------------------------------------------------------------------------- ranks


def groups(rank: int) -> None:
    """Half of the ranks under a name, in an order of its own, and under the name that torch gave the group."""
    halves = [dist.new_group([1, 0]), dist.new_group([2, 3])]
    half = halves[rank // 2]
    dispatching.register_group("half", half)
    for name in ("half", half.group_name):
        check(Case(2), dist.get_rank(half), 2, name)
    dispatching.register_group("half", None)
    check(Case(4, experts=4), rank, 1, "half")  # a name of nothing is the world
    check(Case(1), 0, 2, "half")  # one alone needs no group
    alone = [dist.new_group([r]) for r in range(4)]
    dispatching.register_group("alone", alone[rank])
    check(Case(1, shared_x=True), 0, 1, "alone")


def run(world: int, rank: int, meet: str) -> None:
    """All of one rank."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    if world > 1:
        seconds = datetime.timedelta(seconds=100)
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world, timeout=seconds)
    for case in cases(world):
        for version in (1, 2) if not case.special else (2,):
            check(case, rank, version)
    serving_layer(world, rank)
    for dtype, transposed, local in ((F32, False, 2), (BF16, True, 3), (F16, False, 1), (F32, True, 2)):
        grouped_products(world, rank, dtype, transposed, local)
    if world > 1:
        refuse(world, rank)
    if world == 4:
        groups(rank)
    if world > 1:
        dist.destroy_process_group()
    sys.stdout.write("same\n")  # at once: print writes the end of the line apart where Python does not buffer
    sys.stdout.flush()


def main(world: int, meet: str) -> int:
    """The first exit status of a rank that is not 0; the others are not waited for."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(world, rank, meet), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    waiting = list(ranks)
    while waiting:
        multiprocessing.connection.wait([process.sentinel for process in waiting])
        if any(process.exitcode for process in waiting):
            return 1
        waiting = [process for process in waiting if process.exitcode is None]
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
