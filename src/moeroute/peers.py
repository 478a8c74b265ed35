"""`moeroute bench --peers`: this package under other libraries' names against those libraries, in one process.

Each case is timed in a process of its own, with the defaults of a new process; the sides take turns, and a figure is
reported only after the outputs and the gradients of every side were compared with float64 in that process. Peak memory
is taken in one more process a side.
"""

import contextlib
import ctypes
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeroute import bench, memory

# Forward and backward; the outputs and the gradients.
Side = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """What is measured, and the bounds: how many times as long the fastest of theirs, and their loop, must take."""

    name: str
    package: str
    make: Callable[[], "Sides"]
    bounds: dict[str, float]


@dataclass(frozen=True)
class Sides:
    """Ours first; `expected` is the result in float64; `clear` drops what the last step left, gradients above all;
    `not_run` says of the host's others why they are not there.
    """

    sides: dict[str, Side]
    expected: tuple[Tensor, ...]
    clear: Callable[[], None]
    not_run: dict[str, str] = field(default_factory=dict)


def _qwen3_moe_block(
    dtype: torch.dtype, *, tokens: int = 2048, hidden: int = 512, intermediate: int = 256, experts: int = 64, k: int = 8
) -> Sides:
    """The block with its gate through `register`, against every implementation of the host that runs here."""
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from moeroute.interop import huggingface

    huggingface.register()
    config = transformers.Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=k,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    block.to(dtype)
    x = torch.randn(1, tokens, hidden).to(dtype).requires_grad_()
    seed = torch.randn(1, tokens, hidden).to(dtype)

    def side(implementation: str, block: Any = block, x: Tensor = x, seed: Tensor = seed) -> Side:
        def step() -> tuple[Tensor, ...]:
            config._experts_implementation = implementation
            block.zero_grad()
            x.grad = None
            output = block(x)
            output.backward(seed)
            return output.detach(), *(t.grad for t in (x, *block.parameters()))

        return step

    exact = Qwen3MoeSparseMoeBlock(config).double()
    exact.load_state_dict({name: value.double() for name, value in block.state_dict().items()})

    def exact_gate(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With the experts that the gate under test chose, since rounded logits have ties."""
        ids = block.gate(hidden_states.detach().to(dtype))[2]
        logits = hidden_states @ exact.gate.weight.t()
        weights = logits.softmax(dim=-1).gather(1, ids)
        return logits, weights / weights.sum(dim=-1, keepdim=True), ids

    exact.gate.forward = exact_gate
    expected = side("eager", exact, x.detach().double().requires_grad_(), seed.double())()
    copies = tokens * k * 3 * hidden * intermediate * dtype.itemsize
    not_run = {
        "batched_mm": f"copies the weights for each slot: {copies / 2**30:.0f} GiB",
        "deepgemm, sonicmoe": "need a GPU of their own kind",
    }
    names = ["moeroute", "grouped_mm", "eager"]
    if copies < 2**27:
        names.append("batched_mm")
        del not_run["batched_mm"]

    def clear() -> None:
        block.zero_grad()
        x.grad = None

    return Sides({name: side(name) for name in names}, expected, clear, not_run)


CASES = (
    Case(
        "Qwen3-MoE block float32 T=2048 H=512 I=256 E=64 K=8",
        "transformers",
        lambda: _qwen3_moe_block(torch.float32),
        {"fastest": 1.8, "eager": 8, "memory": 1},
    ),
    Case(
        "Qwen3-MoE block bfloat16 T=2048 H=512 I=256 E=64 K=8",
        "transformers",
        lambda: _qwen3_moe_block(torch.bfloat16),
        {"fastest": 1.5, "eager": 8, "memory": 1},
    ),
)

# ---------------------------------------------------------------------------- in the measuring process


def errors(sides: Sides) -> dict[str, list[float]]:
    """Of each side's output and gradients against float64, relative to their norm."""
    found = {}
    for name, step in sides.sides.items():
        results = step()
        found[name] = [
            float((got.double() - want).norm() / want.norm()) for got, want in zip(results, sides.expected, strict=True)
        ]
    return found


def compare(sides: Sides) -> None:
    """Every figure of ours is as near to float64 as the host's least near, or this raises."""
    found = errors(sides)
    ours, *others = found.values()
    for position, error in enumerate(ours):
        theirs = max(other[position] for other in others)
        if not error <= 1.25 * theirs + 1e-6:
            what = "the output" if position == 0 else f"gradient {position}"
            raise AssertionError(f"{what} is off by {error:.1e} from float64; the host's by {theirs:.1e}")


def take_turns(sides: dict[str, Side], seconds: float) -> dict[str, float]:
    """Median time of each, in seconds; one that takes four times as long as ours has every third turn only."""
    readings: dict[str, list[float]] = {name: [] for name in sides}
    ours = readings["moeroute"]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ours) < 7:
        for name, step in sides.items():
            if len(ours) % 3 == 1 or not readings[name] or readings[name][0] < 4 * ours[0]:
                start = time.perf_counter()
                step()
                readings[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in readings.items()}


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Check one case, then time it."""
    sides = case.make()
    compare(sides)
    return {"case": case.name, "seconds": take_turns(sides.sides, seconds), "not_run": sides.not_run}


def peak(case: Case, name: str) -> dict[str, Any]:
    """The most bytes that a side holds in a step besides what is there before, its results included."""
    sides = case.make()
    step = sides.sides[name]
    step()  # libraries and kernels
    sides.clear()
    gc.collect()
    memory.empty_cache()
    with contextlib.suppress(AttributeError, OSError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)
    if not bench.reset_high_water():
        return {"case": case.name, "side": name}
    before = bench.high_water()
    step()
    after = bench.high_water()
    return {"case": case.name, "side": name} | ({} if before is None or after is None else {"bytes": after - before})


def worker(what: str, name: str, argument: str) -> None:
    """Measure in this process and print a JSON line; started by `run`."""
    case = next(case for case in CASES if case.name == name)
    line = measure(case, float(argument)) if what == "time" else peak(case, argument)
    sys.stdout.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------------------- in the command's process


@dataclass(frozen=True)
class Result:
    """One case: seconds and bytes of each side."""

    case: Case
    seconds: dict[str, float]
    bytes: dict[str, int]
    not_run: dict[str, str]

    @property
    def fastest(self) -> str:
        """The fastest of theirs."""
        return min(list(self.seconds)[1:], key=self.seconds.__getitem__)

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as much of ours they take: the fastest one's time, their loop's, the fastest one's memory."""
        ours = self.seconds["moeroute"]
        found = {"fastest": self.seconds[self.fastest] / ours}
        if "eager" in self.seconds:
            found["eager"] = self.seconds["eager"] / ours
        if self.bytes.get("moeroute") and self.bytes.get(self.fastest):
            found["memory"] = self.bytes[self.fastest] / self.bytes["moeroute"]
        return found

    @property
    def missed(self) -> list[str]:
        """The bounds that do not hold."""
        ratios = self.ratios
        bounds = self.case.bounds.items()
        return [f"{name} {ratios[name]:.2f} < {least:g}" for name, least in bounds if ratios.get(name, least) < least]


def missing(cases: Sequence[Case]) -> list[str]:
    """The packages that are not installed."""
    return sorted({case.package for case in cases if importlib.util.find_spec(case.package.split(".")[0]) is None})


def run(cases: Sequence[Case], seconds: float) -> list[Result]:
    """One process a case for the times, and one a side for the memory."""
    results = []
    for case in cases:
        timed = _ask("time", case.name, str(seconds))
        peaks = {name: _ask("memory", case.name, name).get("bytes", 0) for name in timed["seconds"]}
        results.append(Result(case, timed["seconds"], peaks, timed["not_run"]))
    return results


def _ask(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "moeroute.peers", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"moeroute bench --peers: the process for {arguments[1]!r} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    worker(*sys.argv[1:4])
