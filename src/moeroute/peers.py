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
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeroute import bench, memory

# Forward and backward; the outputs and the gradients.
Side = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """What is measured, and the bounds: how many times as long the fastest of the others, or a side, must take."""

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


def _megatron() -> Any:
    """The host's functions; it warns about every optional package that is absent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("megatron.core.transformer.moe.moe_utils")


def _leaves_of_rows(
    tokens: int, topk: int, hidden: int, experts: int, probs: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """bfloat16 tokens and probs [T, E] that require gradients, the map, and the gradient of the output."""
    torch.manual_seed(0)
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
    routing_map.scatter_(1, torch.rand(tokens, experts).topk(topk).indices, True)
    weights = (torch.rand(tokens, experts) * routing_map).to(probs).requires_grad_()
    x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    return x, weights, routing_map, torch.randn(tokens, hidden).bfloat16()


def _through(leaves: tuple[Tensor, ...], seed: Tensor, forward: Callable[[], Tensor]) -> Side:
    """Forward, backward, and the gradients of the leaves."""

    def step() -> tuple[Tensor, ...]:
        for leaf in leaves:
            leaf.grad = None
        output = forward()
        output.backward(seed)
        return output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)

    return step


def _exact_rows(x: Tensor, weights: Tensor, routing_map: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """In float64, without copies: a token's rows are itself, so its output is itself times the sum of its probs."""
    wide = x.detach().double()
    total = (weights.detach().double() * routing_map).sum(dim=1, keepdim=True)
    grad_weights = (seed.double() * wide).sum(dim=1, keepdim=True) * routing_map
    return wide * total, seed.double() * total, grad_weights


def _rows_of_megatron(tokens: int, topk: int, hidden: int, experts: int, probs: torch.dtype) -> Sides:
    """permute and unpermute with probs, through the host's names against the host."""
    from moeroute.interop import megatron

    x, weights, routing_map, seed = _leaves_of_rows(tokens, topk, hidden, experts, probs)

    def side(host: Any) -> Side:
        def forward() -> Tensor:
            rows, _, indices = host.permute(x, routing_map)
            output: Tensor = host.unpermute(rows, indices, x.shape, weights, routing_map)
            return output

        return _through((x, weights), seed, forward)

    def clear() -> None:
        x.grad = weights.grad = None

    return Sides(
        {"moeroute": side(megatron), "megatron": side(_megatron())}, _exact_rows(x, weights, routing_map, seed), clear
    )


def _rows_of_transformer_engine(tokens: int, topk: int, hidden: int, experts: int, probs: torch.dtype) -> Sides:
    """The same through Transformer Engine's names, against the verbs with one plan; the host itself needs a GPU."""
    from moeroute.interop import transformer_engine
    from moeroute.ops.maps.op import plan_from_routing_map
    from moeroute.permutation import permute, unpermute

    x, weights, routing_map, seed = _leaves_of_rows(tokens, topk, hidden, experts, probs)
    num_rows = tokens * topk

    def by_name() -> Tensor:
        rows, row_id_map = transformer_engine.moe_permute(x, routing_map, num_rows)
        return transformer_engine.moe_unpermute(rows, row_id_map, weights, x.shape)

    def core() -> Tensor:
        plan = plan_from_routing_map(routing_map, num_slots=num_rows, num_rows=num_rows)
        return unpermute(permute(x, plan), plan, weights)

    def clear() -> None:
        x.grad = weights.grad = None

    sides = {"moeroute": _through((x, weights), seed, by_name), "core": _through((x, weights), seed, core)}
    not_run = {"transformer_engine": "needs a GPU"}
    return Sides(sides, _exact_rows(x, weights, routing_map, seed), clear, not_run)


ROUTER: dict[str, Any] = {"num_groups": 8, "group_topk": 4, "scaling_factor": 2.5, "score_function": "sigmoid"}


def _router_of_megatron(backward: bool, *, tokens: int = 4096, experts: int = 256, k: int = 8) -> Sides:
    """The router's choice and weights: sigmoid, a bias, groups."""
    from moeroute.interop import megatron

    torch.manual_seed(0)
    logits, seed, bias = torch.randn(tokens, experts), torch.randn(tokens, experts), torch.randn(experts) * 0.1
    leaf = logits.requires_grad_(backward)

    def side(host: Any) -> Side:
        def forward() -> Tensor:
            output: Tensor = host.topk_routing_with_score_function(leaf, k, expert_bias=bias, **ROUTER)[0]
            return output

        return _through((leaf,), seed, forward) if backward else lambda: (forward(),)

    exact = logits.detach().double().requires_grad_()
    chosen = _megatron().topk_routing_with_score_function(logits.detach(), k, expert_bias=bias, **ROUTER)[1]
    scores = exact.sigmoid() * chosen
    output = scores / (scores.sum(dim=1, keepdim=True) + 1e-20) * ROUTER["scaling_factor"]
    output.backward(seed.double())
    expected = (output.detach(), exact.grad) if backward and exact.grad is not None else (output.detach(),)

    def clear() -> None:
        leaf.grad = None

    return Sides({"moeroute": side(megatron), "megatron": side(_megatron())}, expected, clear)


def _row_cases() -> Iterator[Case]:
    for sizes, least in (((2048, 8, 2048, 64), 16), ((1024, 8, 7168, 256), 20)):
        words = "T={} K={} H={} E={}".format(*sizes)
        for probs, bound in ((torch.float32, least), (torch.bfloat16, 8)):
            name = f"{words}, probs {str(probs).removeprefix('torch.')}"
            yield Case(
                f"Megatron permute, unpermute {name}",
                "megatron.core",
                partial(_rows_of_megatron, *sizes, probs),
                {"fastest": bound},
            )
            yield Case(
                f"Transformer Engine permute, unpermute {name}",
                "torch",
                partial(_rows_of_transformer_engine, *sizes, probs),
                {"core": 0.8},
            )


CASES = (
    *_row_cases(),
    Case(
        "Megatron router T=4096 E=256 K=8, forward",
        "megatron.core",
        lambda: _router_of_megatron(False),
        {"fastest": 4},
    ),
    Case(
        "Megatron router T=4096 E=256 K=8, forward and backward",
        "megatron.core",
        lambda: _router_of_megatron(True),
        {"fastest": 8},
    ),
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
        """The fastest of the others."""
        return min(list(self.seconds)[1:], key=self.seconds.__getitem__)

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as much of ours they take: the fastest one's time, each one's, the fastest one's memory."""
        ours = self.seconds["moeroute"]
        found = {name: seconds / ours for name, seconds in self.seconds.items() if name != "moeroute"}
        found["fastest"] = self.seconds[self.fastest] / ours
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
    """One process a case for the times, and where memory has a bound one a side for that."""
    results = []
    for case in cases:
        timed = _ask("time", case.name, str(seconds))
        sides = timed["seconds"] if "memory" in case.bounds else ()
        peaks = {name: _ask("memory", case.name, name).get("bytes", 0) for name in sides}
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
