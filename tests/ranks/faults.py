"""What goes wrong in a group: every rank ends with an error that says where, none waits longer than the timeout.

Arguments that differ are found before a row moves, and the group goes on; the faults each have processes of their own.
"""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moeroute.expert_parallel import ExpertExchange, ExpertParallelError
from ranks import forked
from ranks.exact import Batch, H, make, parallel, same
from ranks.forked import TIMEOUT

BATCH = Batch((4, 4, 4, 4))


def exchange(experts: int = 6, **options: int) -> ExpertExchange:
    return ExpertExchange(None, experts, **options)  # type: ignore[arg-type]


def rows(count: int = 6, width: int = H, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, width).to(dtype)


# ---------------------------------------------------------------------------- what differs is told on every rank


def refused(match: str, call: Callable[[], object]) -> None:
    begun = time.monotonic()
    with pytest.raises(ValueError, match=match):
        call()
    assert time.monotonic() - begun < 5  # at once, on a busy machine too


def differing_experts(world: int, rank: int) -> None:
    experts = 6 + (rank == world - 1)
    numbers = ", ".join(["6"] * (world - 1) + ["7"])
    with_experts = exchange(experts)
    refused(
        rf"num_experts of layer 'experts' must be the same on every rank; got \[{numbers}\]",
        lambda: with_experts.dispatch(rows(7), [1] * experts),
    )


def differing_in_the_first_call(world: int, rank: int) -> None:
    last = rank == world - 1
    width, dtype = H + last, torch.bfloat16 if last else torch.float32
    refused("H of layer", lambda: exchange().dispatch(rows(6, width), [1] * 6))
    refused("dtype of layer.*torch.bfloat16", lambda: exchange().dispatch(rows(dtype=dtype), [1] * 6))
    refused("capacity of layer", lambda: exchange(capacity=2 + last).dispatch(rows(), [1] * 6))
    refused("K of layer", lambda: exchange(topk=2 + last).dispatch(rows(), [1] * 6))
    refused("align of layer", lambda: exchange(align=1 + last).dispatch(rows(), [1] * 6))
    if last:
        refused("rows_per_expert must be", lambda: exchange().dispatch(rows(), [1] * 5))
    else:
        refused(rf"wrong ones on ranks \[{world - 1}\]", lambda: exchange().dispatch(rows(), [1] * 6))


def differing_in_a_later_call(world: int, rank: int) -> None:
    """Widths and dtypes, of other and of the same number of bytes; gradient modes; numbers of calls."""
    last = rank == world - 1
    mine = exchange()

    def good() -> None:
        x = rows()
        got, _, handle = mine.dispatch(x, [1] * 6)
        same(mine.combine(got, handle), x)

    good()
    refused("H of layer", lambda: mine.dispatch(rows(6, H + last), [1] * 6))
    good()
    refused("dtype of layer", lambda: mine.dispatch(rows(dtype=torch.float16 if last else torch.float32), [1] * 6))
    refused(
        "dtype of layer", lambda: mine.dispatch(rows(dtype=torch.float16 if last else torch.bfloat16), [1] * 6)
    )  # of one width
    good()
    with torch.set_grad_enabled(not last):
        refused("gradients are recorded of layer", lambda: mine.dispatch(rows(), [1] * 6))
    good()
    wrong = r"rows must be \[R, H\]" if last else rf"wrong ones on ranks \[{world - 1}\]"
    refused(wrong, lambda: mine.dispatch(torch.zeros(6) if last else rows(), [1] * 6))
    good()
    mine._calls += last
    refused("call of layer", lambda: mine.dispatch(rows(), [1] * 6))
    mine._calls -= last
    good()


def a_rank_without_gradients(world: int, rank: int) -> None:
    """Rows that need none, on one rank or on all but one: every rank takes part in backward."""
    for needing in (range(1), range(1, world)):
        layer, xs, upstreams, _ = make(BATCH, world)
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        whole = torch.cat(xs).requires_grad_()
        (layer(whole) * torch.cat(upstreams)).sum().backward()
        ours = parallel(layer, init_device_mesh("cpu", (world,)))
        x = xs[rank].clone().requires_grad_(rank in needing)
        (ours(x) * upstreams[rank]).sum().backward()
        if rank in needing:
            assert whole.grad is not None
            same(x.grad, whole.grad[4 * rank : 4 * rank + 4])  # type: ignore[arg-type]
    # Nobody's: nothing is recorded.
    assert not ours(xs[rank]).requires_grad
    with torch.no_grad():
        assert not ours(xs[rank].clone().requires_grad_()).requires_grad


def second_derivatives(world: int, rank: int) -> None:
    """Of a penalty on gradients, as one process has them."""
    layer, xs, _, _ = make(BATCH, world)
    layer = layer.double()
    ours = parallel(layer, init_device_mesh("cpu", (world,)))
    whole = torch.cat(xs).double().requires_grad_()
    mine = xs[rank].double().requires_grad_()
    for module, x in ((layer, whole), (ours, mine)):
        (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert whole.grad is not None
    assert mine.grad is not None
    same(mine.grad, whole.grad[4 * rank : 4 * rank + 4])


def cases(world: int) -> list[Callable[[int, int], None]]:
    found: list[Callable[[int, int], None]] = [second_derivatives]
    if world > 1:
        found += [a_rank_without_gradients]
        found += [differing_experts, differing_in_the_first_call, differing_in_a_later_call]
    return found


# ---------------------------------------------------------------------------- faults


def step(world: int, rank: int, forward: Callable[[], None] = lambda: None, backward: bool = True) -> None:
    """Two layers, two steps; `forward` runs on the last rank between them."""
    layer, xs, _, _ = make(BATCH, world)
    mesh = init_device_mesh("cpu", (world,))
    first, second = parallel(layer, mesh), parallel(layer, mesh)
    x = xs[rank].clone().requires_grad_()
    second(first(x)).sum().backward()
    dist.barrier()
    forked.mark()
    if rank == world - 1:
        forward()
    for _ in range(2):
        loss = second(first(x)).sum()
        if backward or rank != world - 1:
            loss.backward()


def reported(rank: int, run: Callable[[], None], direction: str, *, at_once: bool = False) -> None:
    """The error says where; `forked` looks at the time until all ranks ended."""
    with pytest.raises(ExpertParallelError) as told:
        run()
    error = told.value
    assert error.direction == direction
    assert (error.layer, error.rank, error.timeout) == ("experts", rank, TIMEOUT)
    assert f"{error.phase} of layer 'experts' failed on rank {rank} in {direction}, call {error.call}" in str(error)
    assert error.call > 0
    assert error.seconds < (TIMEOUT - 0.5 if at_once else TIMEOUT + 2)


def killed(world: int, rank: int) -> None:
    """SIGKILL in the middle of training: noticed at once."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    reported(rank, lambda: step(world, rank, kill), "forward", at_once=True)


def raised(world: int, rank: int) -> None:
    """An error of one rank alone, which ends its process."""

    def stop() -> None:
        raise ArithmeticError

    if rank == world - 1:
        with pytest.raises(ArithmeticError):
            step(world, rank, stop)
    else:
        reported(rank, lambda: step(world, rank), "forward", at_once=True)


def stuck(world: int, rank: int) -> None:
    """A rank that sleeps past the timeout."""
    reported(rank, lambda: step(world, rank, lambda: time.sleep(TIMEOUT + 1)), "forward")


def skipped_backward(world: int, rank: int) -> None:
    """The last rank goes on to the next forward. No message of it is taken for one of backward."""
    direction = "forward" if rank == world - 1 else "backward"
    reported(rank, lambda: step(world, rank, backward=False), direction)


def another_collective(world: int, rank: int) -> None:
    def reduce() -> None:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        raise ArithmeticError

    if rank == world - 1:
        with pytest.raises(ArithmeticError):
            step(world, rank, reduce)
    else:
        reported(rank, lambda: step(world, rank), "forward")


def faults(world: int) -> list[Callable[[int, int], None]]:
    return [killed, raised, stuck, skipped_backward, another_collective] if world in (2, 3) else []
