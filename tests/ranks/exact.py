"""Expert parallelism against one process with the tokens of all ranks: every bit that is promised."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from moeroute import expert_parallel, permute, plan_from_segments
from moeroute.expert_parallel import ExpertParallel, expert_parameters, owned_experts
from moeroute.nn import MoE, SwiGLU
from moeroute.ops import exchange

H, WIDTH = 32, 24
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def same(actual: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


@dataclass(frozen=True)
class Batch:
    """Tokens of each rank, and how they are routed."""

    tokens: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    experts: int = 8
    k: int = 2
    forced: str = ""  # "one": every token to experts 0 and 1; "drawn": ids that are given
    shared: bool = False
    masked: bool = False
    options: tuple[tuple[str, Any], ...] = ()


BATCHES = [
    Batch((5, 3, 2, 7)),
    Batch((2, 3, 1, 1), experts=5),
    Batch((40, 17, 70, 9), experts=7, k=3),
    Batch((0, 6, 0, 2), experts=4),
    Batch((33, 0, 0, 0), experts=3),
    Batch((0, 0, 0, 0)),
    Batch((9, 12, 4, 8), forced="one"),
    Batch((9, 12, 4, 8), experts=9, forced="drawn"),
    Batch((64, 80, 64, 70), shared=True),
    Batch((3, 70, 1, 20), shared=True, masked=True),
    Batch((11, 13, 0, 5), masked=True, shared=True),
    Batch((21, 13, 8, 5), options=(("score", "sigmoid"), ("expert_bias", True), ("num_groups", 2), ("topk_groups", 1))),
]


def make(batch: Batch, world: int) -> tuple[MoE, list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
    """The layer, and of each rank its tokens, gradients that come from behind, and the other arguments."""
    torch.manual_seed(7)
    shared = SwiGLU(H, WIDTH) if batch.shared else None
    layer = MoE(H, WIDTH, batch.experts, batch.k, shared_expert=shared, **dict(batch.options))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    xs, upstreams, arguments = [], [], []
    for rank in range(world):
        count = batch.tokens[rank]
        xs.append(torch.randn(count, H).to(batch.dtype))
        upstreams.append(torch.randn(count, H).to(batch.dtype))
        given = {}
        if batch.forced:
            given["expert_ids"] = torch.stack([torch.randperm(batch.experts)[: batch.k] for _ in range(count + 1)])[1:]
            if batch.forced == "one":
                given["expert_ids"] = torch.arange(batch.k).expand(count, -1)
        if batch.masked:
            given["padding_mask"] = torch.rand(count) < 0.3
        arguments.append(given)
    return layer.to(batch.dtype), xs, upstreams, arguments


def one_process(layer: MoE, xs: list[Tensor], upstreams: list[Tensor], arguments: list[dict[str, Tensor]]) -> Any:
    whole = torch.cat(xs).requires_grad_()
    together = {name: torch.cat([given[name] for given in arguments]) for name in arguments[0]}
    output = layer(whole, **together)
    (output * torch.cat(upstreams)).sum().backward()
    return output, whole.grad


def parallel(layer: MoE, mesh: DeviceMesh, **options: Any) -> MoE:
    layer = copy.deepcopy(layer)
    layer.zero_grad()
    parallelize_module(layer, mesh, {"experts": ExpertParallel(layer, **options)})
    return layer


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Sums over the ranks: to rounding."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    error = float((actual.float() - expected.float()).abs().max()) if expected.numel() else 0.0
    assert error <= TOLERANCE[expected.dtype] * largest, f"{what}: {error} beside {largest}"


def compare(batch: Batch, world: int, rank: int, **options: Any) -> None:
    layer, xs, upstreams, arguments = make(batch, world)
    ours = parallel(layer, init_device_mesh("cpu", (world,)), **options)
    output, grad = one_process(layer, xs, upstreams, arguments)
    mine = slice(sum(batch.tokens[:rank]), sum(batch.tokens[: rank + 1]))
    x = xs[rank].clone().requires_grad_()
    got = ours(x, **arguments[rank])
    (got * upstreams[rank]).sum().backward()
    same(got, output[mine], f"{batch} output")
    assert x.grad is not None
    same(x.grad, grad[mine], f"{batch} input gradient")
    owned = owned_experts(batch.experts, world, rank)
    assert (len(owned), owned.start) == Shard.local_shard_size_and_offset(batch.experts, world, rank)
    assert list(expert_parameters(ours)) == ["experts.gate_up_proj", "experts.down_proj"]
    assert ours.state_dict().keys() == layer.state_dict().keys()
    for name, parameter in ours.named_parameters():
        expected = layer.get_parameter(name).grad
        assert expected is not None
        if isinstance(parameter, DTensor):
            assert isinstance(parameter.grad, DTensor)
            assert parameter.shape == expected.shape
            same(parameter.grad.to_local(), expected[owned.start : owned.stop], f"{batch} {name}")
        else:
            total = torch.zeros_like(expected).float() if parameter.grad is None else parameter.grad.float()
            dist.all_reduce(total)
            close(total, expected, f"{batch} {name}")


def every_bit(world: int, rank: int) -> None:
    for batch in BATCHES:
        for dtype in (torch.float32, torch.bfloat16):
            compare(replace(batch, dtype=dtype), world, rank)


def without_overlap(world: int, rank: int) -> None:
    compare(BATCHES[8], world, rank, overlap=False)


def without_tags(world: int, rank: int) -> None:
    """The collectives that NCCL gets, over gloo."""

    def untagged(group: Any) -> exchange.Wire:
        return replace(real(group), tagged=False)

    real = exchange.wire_of
    exchange.wire_of = expert_parallel.wire_of = untagged  # type: ignore[attr-defined]
    for batch in BATCHES[:6]:
        compare(batch, world, rank)
    exchange.wire_of = expert_parallel.wire_of = real  # type: ignore[attr-defined]


def small_and_large_pieces(world: int, rank: int) -> None:
    """Rows are copied one by one below some size, and in pieces above it: the same order, that of plan_from_segments."""
    for width in (1, 4096):
        torch.manual_seed(0)
        counts = torch.randint(0, 4, (world, 5))
        rows = torch.arange(float(counts.sum()))[:, None].repeat(1, width).split(counts.sum(1).tolist())
        mine = expert_parallel.ExpertExchange(None, 5)
        received, numbers, handle = mine.dispatch(rows[rank], counts[rank])
        owned = owned_experts(5, world, rank)
        lengths = counts[:, owned.start : owned.stop]
        arrived = torch.cat(
            [part.split(counts[source].tolist())[expert] for source, part in enumerate(rows) for expert in owned]
            + [rows[0][:0]]
        )
        if len(owned):
            plan = plan_from_segments(lengths, len(arrived))
            same(received, permute(arrived, plan))
            assert plan.tokens_per_expert is not None
            same(numbers, plan.tokens_per_expert)
        same(mine.combine(received, handle), rows[rank])


def built_on_meta(world: int, rank: int) -> None:
    """Sharded before there are weights; then filled, copied, and brought to another dtype."""
    layer, xs, *_ = make(BATCHES[0], world)
    ours = MoE(H, WIDTH, 8, 2, device="meta")
    parallelize_module(ours, init_device_mesh("cpu", (world,)), {"experts": ExpertParallel(ours)})
    ours.to_empty(device="cpu")
    owned = owned_experts(8, world, rank)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            whole = layer.get_parameter(name)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(whole[owned.start : owned.stop])
            else:
                parameter.copy_(whole)
    same(ours(xs[rank]), layer(torch.cat(xs)).split(BATCHES[0].tokens[:world])[rank])
    copied = copy.deepcopy(ours)
    same(copied(xs[rank]), ours(xs[rank]))
    assert copied.experts.forward.args[0] is copied.experts  # type: ignore[attr-defined]
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(xs[rank]).dtype is torch.bfloat16
    same(
        ours.bfloat16()(xs[rank].bfloat16()),
        layer.bfloat16()(torch.cat(xs).bfloat16()).split(BATCHES[0].tokens[:world])[rank],
    )


def bad_input(world: int, rank: int) -> None:
    """What is refused without a word to the other ranks."""
    create: Any = expert_parallel.ExpertExchange
    for arguments, message in (
        ((None, 0), "num_experts must be in 1"),
        ((None, 2.0), "num_experts must be an int; got float"),
        (("ep", 4), "group must be a ProcessGroup, a DeviceMesh or None; got str"),
        ((init_device_mesh("cpu", (world, 1), mesh_dim_names=("a", "b")), 4), "a DeviceMesh of one dimension, as mesh"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            create(*arguments)
    others = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match="group must be one that this process is in; got another"):
            create(others, 4)
    mine = create(None, 4)
    received, _, handle = mine.dispatch(torch.ones(4, 2), [1] * 4)
    with pytest.raises(ValueError, match=r"combine: rows must be \[R', H\] with R' = "):
        mine.combine(torch.cat([received, received, torch.ones(1, 2)]), handle)
    with pytest.raises(TypeError, match="combine: handle must be what dispatch returned; got int"):
        mine.combine(received, 3)
    style: Any = expert_parallel.ExpertParallel
    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(ValueError, match=r"module must be a module like moeroute\.nn\.Experts"):
        parallelize_module(torch.nn.Sequential(torch.nn.Linear(2, 3)), mesh, {"0": style()})
    layer = parallel(MoE(4, 4, 4, 1, score="softmax"), mesh)
    with pytest.raises(ValueError, match="module must be one that is not parallel yet; got Experts"):
        parallelize_module(layer, mesh, {"experts": style()})


def warm() -> None:
    """Compiles the kernels, or loads them."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        one_process(*make(Batch((3,), dtype, masked=True), 1))


def cases(world: int) -> list[Callable[[int, int], None]]:
    return [every_bit, without_overlap, without_tags, small_and_large_pieces, built_on_meta, bad_input]
