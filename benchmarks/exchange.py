"""Dispatch and combine beside bare all-to-alls of the same bytes, on two gloo ranks of one thread each.

    python benchmarks/exchange.py [--tokens 1024 --hidden 512 --experts 64 --topk 8 --seconds 4 --check]

Bare: two `all_to_all_single` of the rows into buffers that are ready. Ours: sizes and header, rows, regrouping, and the
way back, forward only and with backward (four all-to-alls then). The bound is 1.5.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import moeroute
from moeroute.expert_parallel import ExpertExchange

BOUND = 1.5


def main() -> int:
    """Fork the second rank, measure on both; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("tokens", 1024), ("hidden", 512), ("experts", 64), ("topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each direction (default: 4)")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 above {BOUND}")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = 0 if child else 1
        dist.init_process_group("gloo", f"file://{Path(folder) / 'meet'}", rank=rank, world_size=2)
        ratios = _measure(chosen, rank)
        dist.destroy_process_group()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    return int(chosen.check and max(ratios) > BOUND)


def _measure(chosen: argparse.Namespace, rank: int) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    logits = torch.randn(chosen.tokens, chosen.experts, generator=generator)
    ids = logits.topk(chosen.topk).indices
    plan = moeroute.plan_from_expert_ids(ids, chosen.experts)
    rows = moeroute.permute(torch.randn(chosen.tokens, chosen.hidden, generator=generator), plan).requires_grad_()
    assert plan.rows_per_expert is not None
    counts = plan.rows_per_expert
    exchange = ExpertExchange(None, chosen.experts)
    received, _, handle = exchange.dispatch(rows, counts)
    there, back = torch.empty_like(received), torch.empty_like(rows)
    sends, receives = list(handle.sends), list(handle.receives)

    def bare(times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                dist.all_to_all_single(there, rows.detach(), receives, sends)
                dist.all_to_all_single(back, there, sends, receives)

    def forward() -> None:
        with torch.no_grad():
            received, _, handle = exchange.dispatch(rows, counts)
            exchange.combine(received, handle)

    def both() -> None:
        received, _, handle = exchange.dispatch(rows, counts)
        torch.autograd.grad(exchange.combine(received, handle), rows, back)

    ratios = []
    for name, ours, times in (("forward", forward, 1), ("forward and backward", both, 2)):
        pairs = _alternate([lambda times=times: bare(times), ours], chosen.seconds)  # type: ignore[misc]
        mine = [statistics.median(seconds) for seconds, _ in pairs]
        computed = [statistics.median(cpu) for _, cpu in pairs]
        pairs_of_times = [seconds for seconds, _ in pairs]
        ratio = statistics.median(our / their for their, our in zip(*pairs_of_times, strict=True))
        ratios.append(ratio)
        if rank == 0:
            moved = times * (sends[1] + receives[1]) * chosen.hidden * 4 / 2**20
            print(
                f"{name}: {mine[1] * 1e3:.2f} ms, bare all-to-alls {mine[0] * 1e3:.2f} ms, ratio {ratio:.2f}"
                f" (bound {BOUND}); time of the CPU {computed[1] * 1e3:.2f} and {computed[0] * 1e3:.2f} ms, ratio"
                f" {computed[1] / computed[0]:.2f}; {moved:.1f} MiB sent by rank 0, {len(pairs_of_times[0])} rounds"
            )
            sys.stdout.flush()
    return ratios


def _alternate(sides: list[Callable[[], None]], seconds: float) -> list[tuple[list[float], list[float]]]:
    """The times of both sides, turn by turn, and those of this process on the CPU; the ranks stop together."""
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in sides]
    begun = time.perf_counter()
    go_on = torch.ones(1)
    for turn in range(10**6):
        for side, (times, cpu) in zip(sides, found, strict=True):
            dist.barrier()
            start, computed = time.perf_counter(), time.process_time()
            side()
            if turn > 2:
                times.append(time.perf_counter() - start)
                cpu.append(time.process_time() - computed)
        go_on.fill_(time.perf_counter() - begun < seconds or turn < 9)
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
        if not go_on.item():
            break
    return found


if __name__ == "__main__":
    sys.exit(main())
