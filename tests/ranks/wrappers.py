"""The wrappers of torch around a layer whose experts are parallel: what is right, and what raises."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moeroute import update_expert_bias
from moeroute.expert_parallel import clip_grad_norm_, expert_parameters, owned_experts
from moeroute.nn import MoE
from ranks import forked
from ranks.exact import Batch, close, make, one_process, parallel, same

BATCH = Batch((21, 13, 8, 5), experts=5)


class Case:
    """A layer of one process with its gradients, and the same layer with its experts on all ranks."""

    def __init__(self, world: int, rank: int, batch: Batch = BATCH, **options: Any) -> None:
        self.world, self.rank = world, rank
        self.layer, xs, upstreams, arguments = make(batch, world)
        self.mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
        self.ours = parallel(self.layer, self.mesh, **options)
        self.output, _ = one_process(self.layer, xs, upstreams, arguments)
        first = sum(batch.tokens[:rank])
        self.mine = slice(first, first + batch.tokens[rank])
        self.x, self.upstream = xs[rank], upstreams[rank]
        self.owned = owned_experts(batch.experts, world, rank)

    def step(self, model: Callable[..., Tensor]) -> None:
        output = model(self.x)
        same(output, self.output[self.mine])
        (output * self.upstream).sum().backward()

    def expert_gradients(self, module: nn.Module, prefix: str = "", factor: float = 1.0) -> None:
        """Bit for bit those of one process."""
        parameters = dict(module.named_parameters())
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            expected = self.layer.get_parameter(name).grad
            got = parameters[prefix + name].grad
            assert expected is not None
            assert isinstance(got, DTensor)
            same(got.to_local(), expected[self.owned.start : self.owned.stop] * factor, name)

    def router_gradient(self, got: Tensor | None, factor: float = 1.0) -> None:
        expected = self.layer.router.weight.grad
        assert expected is not None
        assert got is not None
        close((got.full_tensor() if isinstance(got, DTensor) else got) * factor, expected, "router")


# ---------------------------------------------------------------------------- DDP


def ddp_over_sharded_experts(world: int, rank: int) -> None:
    for batch in (BATCH, Batch((4,) * 4, experts=world)):  # uneven, even
        with pytest.raises(RuntimeError):
            DistributedDataParallel(Case(world, rank, batch).ours)


def ddp_over_plain_experts(world: int, rank: int) -> None:
    """torch makes all ranks' experts those of rank 0, in silence: experts are never to be plain parameters."""
    experts = nn.Linear(2, 2, bias=False)
    nn.init.constant_(experts.weight, rank)
    DistributedDataParallel(experts)
    same(experts.weight.detach(), torch.zeros(2, 2))


def ddp_with_ignored_experts(world: int, rank: int) -> None:
    case = Case(world, rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(case.ours, list(expert_parameters(case.ours)))
    model = DistributedDataParallel(case.ours)
    case.step(model)
    case.expert_gradients(case.ours)
    case.router_gradient(case.ours.router.weight.grad, world)  # DDP averages
    case.ours.zero_grad()
    (model(case.x) * case.upstream).sum().mul(world).backward()  # or so; then experts are divided
    case.router_gradient(case.ours.router.weight.grad)
    for name, weight in expert_parameters(case.ours).items():
        expected = case.layer.get_parameter(name).grad
        assert expected is not None
        assert isinstance(weight.grad, DTensor)
        close(weight.grad.to_local() / world, expected[case.owned.start : case.owned.stop], name)


# ---------------------------------------------------------------------------- fully_shard


def added(module: Any) -> None:
    """Gradients are added, not averaged. gloo does not divide while it reduces."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def fully_shard_on_the_same_mesh(world: int, rank: int) -> None:
    case = Case(world, rank)
    with pytest.raises(RuntimeError, match="Cannot concatenate overlapping meshes"):
        fully_shard(case.ours, mesh=case.mesh)


def fully_shard_without_the_experts(world: int, rank: int) -> None:
    case = Case(world, rank)
    fully_shard(case.ours, mesh=case.mesh, ignored_params=set(expert_parameters(case.ours).values()))
    added(case.ours)
    case.step(case.ours)
    case.expert_gradients(case.ours)
    case.router_gradient(case.ours.router.weight.grad)
    norm = clip_grad_norm_(case.ours.parameters(), 1e-3)
    expected = nn.utils.clip_grad_norm_(case.layer.parameters(), 1e-3)
    torch.testing.assert_close(norm, expected)


def fully_shard_on_two_meshes(world: int, rank: int) -> None:
    """Two by two ranks: experts over ep, and their shards over efsdp; the rest over all four."""
    batch = Batch((21, 13, 8, 5), experts=8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    layer, xs, upstreams, _ = make(batch, world)
    replica = rank // 2  # its two ranks see their tokens only
    ours = parallel(layer, mesh["ep"])
    for weight in expert_parameters(ours).values():
        assert isinstance(weight, DTensor)
    fully_shard(ours.experts, mesh=mesh["efsdp"])
    added(ours.experts)
    fully_shard(ours, mesh=mesh._flatten("flat"))
    added(ours)
    placements = [type(p).__name__ for p in ours.experts.down_proj.placements]  # type: ignore[attr-defined]
    assert placements == ["_StridedShard", "Shard"]
    output = ours(xs[rank])
    (output * upstreams[rank]).sum().backward()
    both = slice(2 * replica, 2 * replica + 2)
    whole, _ = one_process(copy.deepcopy(layer), xs[both], upstreams[both], [{}] * 2)
    first = batch.tokens[rank - 1] if rank % 2 else 0
    same(output, whole[first : first + batch.tokens[rank]])
    one_process(layer, xs, upstreams, [{}] * 4)
    for name, parameter in ours.named_parameters():
        expected, got = layer.get_parameter(name).grad, parameter.grad
        assert isinstance(got, DTensor)
        assert expected is not None
        close(got.full_tensor(), expected, name)
    torch.testing.assert_close(
        clip_grad_norm_(ours.parameters(), 0.5), nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
    )


# ---------------------------------------------------------------------------- optimizer, clipping


def optimizers(world: int, rank: int) -> None:
    """AdamW steps as in one process; its forms that take a list of tensors refuse the mixture."""
    case = Case(world, rank)
    case.step(case.ours)
    for name, parameter in case.ours.named_parameters():
        if not isinstance(parameter, DTensor):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            case.router_gradient(parameter.grad)
            parameter.grad.copy_(case.layer.get_parameter(name).grad)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="DTensor"):
        nn.utils.clip_grad_norm_(case.ours.parameters(), 0.1)
    for power in (1.0, 2.0, float("inf")):
        norm = clip_grad_norm_(case.ours.parameters(), 1e9, power)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(case.layer.parameters(), 1e9, power))
        everyone = [torch.empty_like(norm) for _ in range(world)]
        dist.all_gather(everyone, norm)
        for other in everyone:
            same(other, norm)
    for parameter in case.ours.parameters():
        assert parameter.grad is not None
    for kind in ({"foreach": True}, {"fused": True}):
        with pytest.raises(RuntimeError):
            _step(case.ours, kind)
    torch.optim.AdamW(case.ours.parameters()).step()
    torch.optim.AdamW(case.layer.parameters()).step()
    compare_weights(case.ours, case.layer, case.owned)


def _step(model: nn.Module, kind: dict[str, bool]) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, **kind).step()  # type: ignore[arg-type]


def compare_weights(ours: MoE, layer: MoE, owned: range) -> None:
    for name, parameter in ours.named_parameters():
        expected = layer.get_parameter(name).detach()
        if isinstance(parameter, DTensor):
            same(parameter.to_local().detach(), expected[owned.start : owned.stop], name)
        else:
            same(parameter.detach(), expected, name)


def balance(world: int, rank: int) -> None:
    """Counts over all ranks, and shares of the loss of the global batch; padding counts nowhere."""
    batch = Batch((21, 13, 8, 5), masked=True, options=(("score", "sigmoid"), ("expert_bias", True)))
    layer, xs, _, arguments = make(batch, world)
    mask = torch.cat([given["padding_mask"] for given in arguments])
    _, whole = layer(torch.cat(xs), padding_mask=mask, return_routing=True)
    _, mine = layer(xs[rank], **arguments[rank], return_routing=True)
    for group in (dist.group.WORLD, init_device_mesh("cpu", (world,))):
        statistics = mine.statistics(group)
        same(statistics.tokens_per_expert, whole.statistics().tokens_per_expert)
        same(statistics.num_tokens, (~mask).sum())
        bias = layer.router.expert_bias
        assert bias is not None
        counts = mine.statistics().tokens_per_expert
        same(
            update_expert_bias(bias, counts, group=group),
            update_expert_bias(bias, whole.statistics().tokens_per_expert),
        )
    share = mine.balance_loss("global_batch", group=dist.group.WORLD)
    (grad,) = torch.autograd.grad(share, layer.router.weight)
    (expected,) = torch.autograd.grad(whole.balance_loss(), layer.router.weight)
    total = torch.cat([share.detach()[None], grad.flatten()])
    dist.all_reduce(total)
    torch.testing.assert_close(total, torch.cat([whole.balance_loss().detach()[None], expected.flatten()]))


# ---------------------------------------------------------------------------- recomputation, compilation


def recomputed(world: int, rank: int) -> None:
    for reentrant in (False, True):
        case = Case(world, rank)
        x = case.x.clone().requires_grad_()
        output = checkpoint(case.ours, x, use_reentrant=reentrant)
        (output * case.upstream).sum().backward()
        case.expert_gradients(case.ours)
        plain = Case(world, rank)
        y = plain.x.clone().requires_grad_()
        (plain.ours(y) * plain.upstream).sum().backward()
        same(output, plain.ours(y))
        assert x.grad is not None
        assert y.grad is not None
        same(x.grad, y.grad)


def compiled(world: int, rank: int) -> None:
    """Any number of rows: a graph break, the same bits. With a capacity: one graph."""
    case = Case(world, rank)
    with pytest.raises(Unsupported, match="_uncompiled_dispatch"):
        torch.compile(case.ours, backend="eager", fullgraph=True)(case.x)
    case.step(torch.compile(case.ours, backend="eager"))
    case.expert_gradients(case.ours)
    torch._dynamo.reset()
    with_capacity(world, rank, lambda ours: torch.compile(ours, backend="aot_eager", fullgraph=True))


def with_capacity(world: int, rank: int, change: Callable[[MoE], Any] = lambda ours: ours) -> None:
    """No row is dropped: as without a capacity, to rounding, since there are other numbers of rows in a product."""
    case = Case(world, rank, capacity=max(BATCH.tokens))
    model = change(case.ours)
    for _ in range(2):
        case.ours.zero_grad()
        x = case.x.clone().requires_grad_()
        output = model(x)
        torch.testing.assert_close(output, case.output[case.mine], atol=1e-5, rtol=1e-5)
        (output * case.upstream).sum().backward()
        for name, weight in expert_parameters(case.ours).items():
            expected = case.layer.get_parameter(name).grad
            assert isinstance(weight.grad, DTensor)
            assert expected is not None
            torch.testing.assert_close(
                weight.grad.to_local(), expected[case.owned.start : case.owned.stop], atol=1e-4, rtol=1e-4
            )
    # Dropped rows are 0.
    few = Case(world, rank, capacity=0)
    with pytest.warns(UserWarning, match="capacity=0 drops 100% of the 42" if rank == 0 else "drops 100%"):
        same(few.ours(few.x), torch.zeros_like(few.x))


# ---------------------------------------------------------------------------- checkpoints


def saved(world: int, rank: int) -> None:
    layer, *_ = make(BATCH, world)
    ours = parallel(layer, init_device_mesh("cpu", (world,)))
    state_dict_saver.save({"model": ours.state_dict()}, checkpoint_id=forked.FOLDER / "dcp")


def loaded(world: int, rank: int) -> None:
    """What two ranks saved as 3 and 2 experts comes as 2, 2 and 1, or as 5."""
    layer, *_ = make(BATCH, world)
    fresh = MoE(32, 24, BATCH.experts, BATCH.k)
    ours = parallel(fresh, init_device_mesh("cpu", (world,)))
    state = {"model": ours.state_dict()}
    state_dict_loader.load(state, checkpoint_id=forked.FOLDER / "dcp")
    ours.load_state_dict(state["model"])
    owned = owned_experts(BATCH.experts, world, rank)
    compare_weights(ours, layer, owned)
    assert (len(owned), owned.start) == Shard.local_shard_size_and_offset(BATCH.experts, world, rank)
    other = parallel(MoE(32, 24, 7, BATCH.k), init_device_mesh("cpu", (world,)))
    with pytest.raises(CheckpointException, match="Size mismatch") as told:  # a BaseException
        state_dict_loader.load({"model": other.state_dict()}, checkpoint_id=forked.FOLDER / "dcp")
    assert "model.experts.down_proj" in str(told.value) or "router" in str(told.value)


def cases(world: int) -> list[Callable[[int, int], None]]:
    if world == 1:
        return [loaded]
    everywhere: list[Callable[[int, int], None]] = [
        ddp_with_ignored_experts,
        fully_shard_without_the_experts,
        optimizers,
        balance,
    ]
    if world == 2:
        two: list[Callable[[int, int], None]] = [
            ddp_over_sharded_experts,
            ddp_over_plain_experts,
            fully_shard_on_the_same_mesh,
        ]
        return [*everywhere, *two, recomputed, with_capacity, compiled, saved]
    return [*everywhere, loaded] if world == 3 else [fully_shard_on_two_meshes]
