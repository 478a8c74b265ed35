"""What a machine with a GPU can show and no other can: `make gpu-check`. It aims at five minutes.

It installs nothing and uses the torch and Triton that are there:

    bits        every operator, dtype and mode on the device against the CPU backend (or the reference)
    runs        fifty runs of each large case, the same bits every time
    large       tensors of more than 2^31 elements
    sync        the whole path under torch.cuda.set_sync_debug_mode("error")
    graph       the whole path captured in a CUDA graph and replayed on new inputs
    compile     the whole path under torch.compile(fullgraph=True), and what a call costs the host
    speed       GB/s beside a device copy of as many bytes, the torch composition, and Megatron-Core's and
                Transformer Engine's own functions where they are installed

A step that cannot run says why. Results go to gpu_check.json and gpu_check.png in the folder given.
With --rehearse everything that needs no GPU runs on the CPU in Triton's interpreter, on small inputs.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

try:
    import torch
except ModuleNotFoundError:
    sys.exit("cannot start: this Python has no torch; make gpu-check PYTHON=/path/to/python, one with torch and Triton")
from torch import Tensor

import moeroute
from moeroute import dispatch
from moeroute.conformance import verification
from moeroute.conformance.case import moved
from moeroute.dispatch import Backend
from moeroute.testing import assert_close_to_exact, assert_same_bits

DEADLINE = 280.0  # seconds; later steps are left out, and said to be
ROW_CASES = ((8192, 8, 7168), (16384, 2, 4096))
GATING_CASE = {"T": 8192, "E": 256, "K": 8}
# What the project promises on a device.
LEAST_SHARE_OF_COPY = 0.85
MOST_GATING_AND_PLAN_US = 60.0
AHEAD_CYCLES = 4_000_000


@dataclasses.dataclass(frozen=True)
class Setting:
    device: torch.device
    rehearse: bool

    @property
    def row_cases(self) -> tuple[tuple[int, int, int], ...]:
        return ((24, 8, 512), (40, 2, 264)) if self.rehearse else ROW_CASES

    @property
    def gating_case(self) -> dict[str, int]:
        return {"T": 16, "E": 64, "K": 4} if self.rehearse else GATING_CASE

    @property
    def measure(self) -> Backend:
        """The backend that the device is compared with, on the CPU."""
        return "cpu" if dispatch.unavailable("cpu") is None else "reference"

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same numbers on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(dtype).to(self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Skip(Exception):
    """A step that cannot run here; the message says why."""


def cuda_only(setting: Setting) -> None:
    """Raise Skip on the CPU."""
    if setting.device.type != "cuda":
        raise Skip("needs a CUDA or ROCm device")


# ---------------------------------------------------------------------------- the path


@dataclasses.dataclass(frozen=True)
class Route:
    """Gating, plan, permute, unpermute and their gradients at one size, without a size that only the data knows."""

    logits: Tensor
    tokens: Tensor
    topk: int

    def plan(self, backend: Backend | None = "triton") -> tuple[moeroute.Gating, moeroute.RoutingPlan]:
        num_tokens, num_experts = self.logits.shape
        gating = moeroute.gating_topk(self.logits, self.topk, score="sigmoid", scaling_factor=2.5, backend=backend)
        plan = moeroute.plan_from_expert_ids(
            gating.expert_ids, num_experts, num_rows=num_tokens * self.topk, backend=backend
        )
        return gating, plan

    def __call__(self, backend: Backend | None = "triton") -> tuple[Tensor, ...]:
        gating, plan = self.plan(backend)
        rows = moeroute.permute(self.tokens, plan, backend=backend)
        output = moeroute.unpermute(rows, plan, gating.weights, backend=backend)
        grad_rows, grad_weights = moeroute.unpermute_backward(output, rows, plan, gating.weights, backend=backend)
        assert grad_weights is not None
        grad_tokens = moeroute.permute_backward(grad_rows, plan, backend=backend)
        grad_logits = moeroute.gating_topk_backward(
            gating.scores, grad_weights, gating.expert_ids, score="sigmoid", renormalize=True, scaling_factor=2.5,
            backend=backend,
        )  # fmt: skip
        return (*gating, plan.row_of_slot, plan.slot_of_row, rows, output, grad_rows, grad_tokens, grad_logits)


def route(setting: Setting, hidden: int, seed: int = 0) -> Route:
    """Random logits and bfloat16 tokens of the size that the setting has for gating."""
    sizes = setting.gating_case
    logits = setting.random(sizes["T"], sizes["E"], seed=seed)
    return Route(logits, setting.random(sizes["T"], hidden, seed=seed + 1, dtype=torch.bfloat16), sizes["K"])


# ---------------------------------------------------------------------------- steps: right


def part_of_bits(device: torch.device, number: int, parts: int) -> tuple[int, list[str]]:
    """One part of `moeroute verify`, for a process of its own."""
    torch.set_num_threads(1)
    outcomes = verification.run([("triton", device)], part=(number, parts))
    return len(outcomes), [f"{o.place}: {o.case}: {'; '.join(o.words)}" for o in outcomes if not o.passed]


def bits(setting: Setting) -> dict[str, Any]:
    """Every check of `moeroute verify`, then the whole path, against the CPU's bits."""
    # Hundreds of kernels, each half a second of one processor to compile.
    processes = 1 if setting.rehearse else max(min((os.cpu_count() or 1) // 2, 8), 1)
    parts = 1 if processes == 1 else 4 * processes
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        done = list(pool.map(part_of_bits, [setting.device] * parts, range(parts), [parts] * parts))
    count, failures = sum(number for number, _ in done), [failure for _, found in done for failure in found]
    if failures:
        raise AssertionError(f"{len(failures)} of {count} checks differ; first: " + "; ".join(failures[:3]))
    small = route(setting, 520)
    expected = dataclasses.replace(small, logits=small.logits.cpu(), tokens=small.tokens.cpu())(setting.measure)
    assert_same_bits(moved(tuple(small()), "cpu"), expected, "the path")
    return {"checks": count + 1, "compared with": setting.measure}


def runs(setting: Setting) -> dict[str, Any]:
    """The whole path again and again: the same bits every time."""
    times = 3 if setting.rehearse else 50
    case = route(setting, 512 if setting.rehearse else 2048)
    first = case()
    for _ in range(times - 1):
        assert_same_bits(case(), first, "a further run")
    return {"runs": times, "outputs": len(first)}


def large(setting: Setting) -> dict[str, Any]:
    """Rows of more than 2^31 elements; every row and token is looked at, in pieces."""
    hidden, topk = 7168, 8
    num_tokens = 24 if setting.rehearse else 38_000
    elements = num_tokens * topk * hidden
    needed = 2 * elements * 2.2 * 2
    if not setting.rehearse:
        cuda_only(setting)
        free = torch.cuda.mem_get_info(setting.device)[0]
        if free < needed:
            raise Skip(f"needs {needed / 2**30:.0f} GiB of device memory; {free / 2**30:.0f} are free")
    ids = torch.randint(0, 64, (num_tokens, topk), generator=torch.Generator().manual_seed(0)).to(setting.device)
    plan = moeroute.plan_from_expert_ids(ids, 64, num_rows=num_tokens * topk, backend="triton")
    tokens = (torch.arange(num_tokens, device=setting.device) % 51 - 25)[:, None].to(torch.bfloat16)
    tokens = tokens.repeat(1, hidden)
    tokens[:, -1] = 1
    weights = setting.random(num_tokens, topk).abs() + 0.5
    rows = moeroute.permute(tokens, plan, backend="triton")
    token_of_row = plan.token_of_row.long()
    step = 8192
    for first in range(0, plan.num_rows, step):
        assert_same_bits(rows[first : first + step], tokens[token_of_row[first : first + step]], f"rows from {first}")
    assert_same_bits(moeroute.permute_backward(rows, plan, backend="triton"), (tokens.float() * topk).bfloat16())
    grad_rows, grad_weights = moeroute.unpermute_backward(tokens, rows, plan, weights, backend="triton")
    slot_of_row = plan.slot_of_row.long()
    for first in range(0, plan.num_rows, step):
        part = slice(first, first + step)
        scaled = weights.flatten()[slot_of_row[part], None] * tokens[token_of_row[part]].float()
        assert_same_bits(grad_rows[part], scaled.bfloat16(), f"gradient rows from {first}")
    # Whole numbers below 2^24: the sum is exact in any order.
    dots = (tokens[:, 0].float() ** 2 * (hidden - 1) + 1)[:, None].expand(-1, topk)
    assert grad_weights is not None
    assert_close_to_exact(grad_weights, dots.double())
    return {"elements": elements, "above 2^31": elements > 2**31}


def sync(setting: Setting) -> dict[str, Any]:
    """The whole path must not wait for the device."""
    cuda_only(setting)
    case = route(setting, 2048)
    case()
    setting.wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"synchronisations": 0}


def graph(setting: Setting) -> dict[str, Any]:
    """A captured path, replayed on new inputs, against an eager run."""
    cuda_only(setting)
    case, other = route(setting, 2048), route(setting, 2048, seed=7)
    expected = other()
    captured, outputs = capture(case)
    case.logits.copy_(other.logits)
    case.tokens.copy_(other.tokens)
    captured.replay()
    setting.wait()
    assert_same_bits(outputs, expected, "the replayed path")
    return {"outputs": len(outputs)}


def capture(function: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of the function, after a run that compiles its kernels, and what it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = function()
    return captured, outputs


def compiled(setting: Setting) -> dict[str, Any]:
    """The operators are opaque to the compiler; the same bits, and what a call costs the host."""
    cuda_only(setting)
    case = route(setting, 2048)
    expected = case(None)
    optimised = torch.compile(lambda logits, tokens: Route(logits, tokens, case.topk)(None), fullgraph=True)
    assert_same_bits(optimised(case.logits, case.tokens), expected, "the compiled path")

    def host_us(function: Callable[[], Any]) -> float:
        readings = []
        for _ in range(30):
            setting.wait()
            start = time.perf_counter()
            function()
            readings.append((time.perf_counter() - start) * 1e6)
        return statistics.median(readings)

    return {
        "eager_host_us": host_us(lambda: case(None)),
        "compiled_host_us": host_us(lambda: optimised(case.logits, case.tokens)),
    }


# ---------------------------------------------------------------------------- steps: speed


def seconds(setting: Setting, function: Callable[[], Any]) -> float:
    """Median device time of one call; the caches are cold to operands larger than they are."""
    function()
    readings = []
    for _ in range(3 if setting.rehearse else 25):
        if setting.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The device idles some 2 ms, in which the host launches the call: its own time does not count.
            torch.cuda._sleep(AHEAD_CYCLES)
            start.record()
            function()
            end.record()
            end.synchronize()
            readings.append(start.elapsed_time(end) / 1e3)
        else:
            before = time.perf_counter()
            function()
            readings.append(time.perf_counter() - before)
    return statistics.median(readings)


def peers(tokens: Tensor, rows: Tensor, plan: moeroute.RoutingPlan, ids: Tensor, weights: Tensor) -> dict[str, Any]:
    """name -> {operator: call} of the other libraries that are installed."""
    found: dict[str, Any] = {}
    routing_map = torch.zeros(len(tokens), 64, dtype=torch.bool, device=tokens.device).scatter_(1, ids, True)
    probs = torch.zeros(routing_map.shape, device=tokens.device).scatter_(1, ids, weights)
    if _installed("transformer_engine"):
        te = importlib.import_module("transformer_engine.pytorch.permutation")
        permuted, row_id_map = te.moe_permute(tokens, routing_map, plan.num_rows, map_type="mask")
        found["Transformer Engine"] = {
            "spread": lambda: te.moe_permute(tokens, routing_map, plan.num_rows, map_type="mask"),
            "combine": lambda: te.moe_unpermute(permuted, row_id_map, None, tokens.shape, map_type="mask"),
            "combine weighted": lambda: te.moe_unpermute(permuted, row_id_map, probs, tokens.shape, map_type="mask"),
        }
    if _installed("megatron.core"):
        utilities = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        token_of_row = plan.token_of_row.long()
        found["Megatron-Core"] = {
            "spread": lambda: utilities.permute(tokens, routing_map, num_out_tokens=plan.num_rows),
            "combine": lambda: utilities.unpermute(rows, token_of_row, tokens.shape),
            "combine weighted": lambda: utilities.unpermute(
                rows, token_of_row, tokens.shape, probs=probs, routing_map=routing_map
            ),
        }
    return found


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def row_speed(setting: Setting, num_tokens: int, topk: int, hidden: int) -> list[dict[str, Any]]:
    """GB/s of the row operators at one size, beside a copy, torch and the installed peers."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(num_tokens, 64, generator=generator).topk(topk).indices.to(setting.device)
    plan = moeroute.plan_from_expert_ids(ids, 64, num_rows=num_tokens * topk, backend="triton")
    tokens = setting.random(num_tokens, hidden, dtype=torch.bfloat16)
    rows = setting.random(num_tokens * topk, hidden, seed=1, dtype=torch.bfloat16)
    weights = torch.rand(num_tokens, topk, generator=generator).to(setting.device)
    at, token_of_row, slot_of_row = plan.row_of_slot.long(), plan.token_of_row.long(), plan.slot_of_row.long()
    shape = (num_tokens, topk, hidden)
    once, twice = rows.nbytes + tokens.nbytes, 2 * rows.nbytes + tokens.nbytes

    def backward_by_hand() -> tuple[Tensor, Tensor]:
        scaled = (tokens[:, None] * weights[..., None]).to(tokens.dtype).flatten(0, 1)[slot_of_row]
        return scaled, (rows[at].reshape(shape).float() * tokens[:, None].float()).sum(-1)

    cases: tuple[tuple[str, int, Callable[[], Any], Callable[[], Any]], ...] = (
        (
            "spread", once,
            lambda: moeroute.permute(tokens, plan, backend="triton"),
            lambda: tokens.index_select(0, token_of_row),
        ),
        (
            "combine", once,
            lambda: moeroute.permute_backward(rows, plan, backend="triton"),
            lambda: rows.index_select(0, at).reshape(shape).sum(1),
        ),
        (
            "combine weighted", once,
            lambda: moeroute.unpermute(rows, plan, weights, backend="triton"),
            lambda: (rows.index_select(0, at).reshape(shape) * weights[..., None]).sum(1).to(rows.dtype),
        ),
        (
            "unpermute_backward", twice,
            lambda: moeroute.unpermute_backward(tokens, rows, plan, weights, backend="triton"),
            backward_by_hand,
        ),
    )  # fmt: skip
    others: dict[str, Any] = {}
    if not setting.rehearse:
        try:
            others = peers(tokens, rows, plan, ids, weights)
        except Exception as error:  # a version of theirs with other functions
            print(f"without the other libraries: {type(error).__name__}: {str(error)[:200]}")
    lines = []
    for name, count, ours, composition in cases:
        for found, expected in zip(_tensors(ours()), _tensors(composition()), strict=True):
            assert_close_to_exact(found, expected.double().reshape(found.shape), name)
        source = torch.empty(count // 2, dtype=torch.uint8, device=setting.device)
        target = torch.empty_like(source)
        copy = seconds(setting, partial(target.copy_, source))
        mine = seconds(setting, ours)
        line = {
            "operator": name, "T": num_tokens, "K": topk, "H": hidden, "bytes": count, "us": mine * 1e6,
            "GB/s": count / mine / 1e9, "copy GB/s": count / copy / 1e9, "share of copy": copy / mine,
            "torch GB/s": count / seconds(setting, composition) / 1e9,
        }  # fmt: skip
        for library, calls in others.items():
            if name in calls:
                try:
                    line[f"{library} GB/s"] = count / seconds(setting, calls[name]) / 1e9
                except Exception as error:
                    line[f"{library} failed"] = str(error)[:200]
        lines.append(line)
    return lines


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def speed(setting: Setting) -> dict[str, Any]:
    """All sizes of `row_speed`, and what stays below the goal."""
    lines = [line for sizes in setting.row_cases for line in row_speed(setting, *sizes)]
    below = [
        f"{line['operator']} {line['T']}x{line['K']}x{line['H']}: {line['share of copy']:.2f}"
        for line in lines
        if line["share of copy"] < LEAST_SHARE_OF_COPY and not setting.rehearse
    ]
    return {"lines": lines, "goals missed": [f"{LEAST_SHARE_OF_COPY} of the copy: {line}" for line in below]}


def gating_speed(setting: Setting) -> dict[str, Any]:
    """Device time of gating and planning together, replayed from a CUDA graph."""
    cuda_only(setting)
    case = route(setting, 16)
    captured, _ = capture(case.plan)
    inner = 20

    def replay() -> None:
        for _ in range(inner):
            captured.replay()

    us = seconds(setting, replay) / inner * 1e6
    missed = [f"{MOST_GATING_AND_PLAN_US} µs: gating and plan {us:.1f}"] if us > MOST_GATING_AND_PLAN_US else []
    return {"us": us, "goals missed": missed, **setting.gating_case}


STEPS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "bits": bits,
    "speed": speed,
    "gating and plan": gating_speed,
    "runs": runs,
    "large": large,
    "sync": sync,
    "graph": graph,
    "compile": compiled,
}

# ---------------------------------------------------------------------------- the report


def about(device: torch.device) -> dict[str, Any]:
    """Device, versions and date."""
    import triton

    name = "Triton's interpreter"
    capability: Any = None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = list(torch.cuda.get_device_capability(device))
    return {
        "device": name,
        "capability": capability,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "moeroute": moeroute.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def chart(file: Path, lines: list[dict[str, Any]], title: str) -> str | None:
    """GB/s of every case as bars; a reason where no chart can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = sorted({key for line in lines for key in line if key.endswith("GB/s")}, key=lambda key: key != "GB/s")
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(lines) * len(series) / 2 + 1.5))
    width = 0.8 / len(series)
    for number, key in enumerate(series):
        places = [row + number * width for row in range(len(lines))]
        name = "moeroute" if key == "GB/s" else key.removesuffix(" GB/s")
        axes.barh(places, [line.get(key, 0.0) for line in lines], width, label=name)
    names = [f"{line['operator']}\n{line['T']} × {line['K']} × {line['H']}" for line in lines]
    axes.set_yticks([row + 0.4 - width / 2 for row in range(len(lines))], names)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s of the bytes that must move")
    axes.set_title(title)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    return None


def main() -> int:
    """Run the steps; returns 0, 1 for a failed step or 2 where nothing can run."""
    parser = argparse.ArgumentParser(description="Check the Triton backend on this machine's GPU.")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for JSON and chart (default: out)")
    parser.add_argument("--only", choices=STEPS, nargs="+", help="these steps alone")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in Triton's interpreter, small")
    chosen = parser.parse_args()
    if not chosen.rehearse and not torch.cuda.is_available():
        print("cannot start: torch sees no CUDA or ROCm device; --rehearse runs on the CPU, in Triton's interpreter")
        return 2
    if (reason := dispatch.unavailable("triton")) is not None:
        print(f"cannot start: {reason}")
        return 2
    device = torch.device("cpu") if chosen.rehearse else torch.device("cuda", torch.cuda.current_device())
    setting = Setting(device, chosen.rehearse)
    found: dict[str, Any] = {"about": about(device)}
    print(", ".join(f"{key} {value}" for key, value in found["about"].items() if value is not None))
    chosen.out.mkdir(parents=True, exist_ok=True)
    began, failed = time.perf_counter(), []
    for name in chosen.only or STEPS:
        start = time.perf_counter()
        try:
            if start - began > DEADLINE:
                raise Skip(f"{start - began:.0f} s are over")
            found[name] = STEPS[name](setting)
            verdict = ", ".join(f"{k} {v}" for k, v in found[name].items() if not isinstance(v, list))
        except Skip as reason_why:
            verdict = f"skipped: {reason_why}"
            found[name] = {"skipped": str(reason_why)}
        except Exception as error:
            failed.append(name)
            verdict = f"FAILED: {type(error).__name__}: {str(error)[:500]}"
            found[name] = {"failed": verdict, "traceback": traceback.format_exc()[-3000:]}
        found[name]["seconds"] = round(time.perf_counter() - start, 1)
        print(f"{name:<16} {found[name]['seconds']:>6} s  {verdict}", flush=True)
        # What is known so far is kept, whatever the next step does.
        (chosen.out / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n")
    for line in [] if chosen.rehearse else found.get("speed", {}).get("lines", []):
        rates = ", ".join(f"{key} {value:.0f}" for key, value in line.items() if key.endswith("GB/s"))
        name = f"{line['operator']} {line['T']} × {line['K']} × {line['H']}"
        print(f"  {name}: {rates}, {line['share of copy']:.2f} of copy")
    written = [str(chosen.out / "gpu_check.json")]
    if lines := found.get("speed", {}).get("lines"):
        title = f"moeroute on {found['about']['device']}, {found['about']['date']}"
        if (why := chart(chosen.out / "gpu_check.png", lines, title)) is None:
            written.append(str(chosen.out / "gpu_check.png"))
        else:
            print(f"no chart: {why}")
    print(f"written: {', '.join(written)}; {time.perf_counter() - began:.0f} s")
    missed = [goal for step in found.values() for goal in step.get("goals missed", [])]
    for goal in missed:
        print(f"goal missed: {goal}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
