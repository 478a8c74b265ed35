"""`moeroute bench`: speed against the memory's roof and against the torch composition.

Each case is measured three ways, each in a process of its own:

    as called         both sides return fresh tensors, with the defaults of a new process
    as called, tuned  the same with THP_MEM_ALLOC_ENABLE=1, torch's own switch for huge pages
    kernel            both sides into recycled memory: ours from the pool, torch's by telling malloc
                      to keep its pages

A figure is reported only after the case's outputs were checked against the torch composition's, in
the same process. The sides take turns; figures are medians.
"""

import ctypes
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moeroute import memory
from moeroute.conformance import measured

MODES = ("called", "tuned", "kernel")
SETTLE_SECONDS = 0.01
ROWS_ENVIRONMENT = "THP_MEM_ALLOC_ENABLE"


# ---------------------------------------------------------------------------- in the measuring process


def keep_pages() -> bool:
    """Tell glibc's malloc never to give memory back, so that fresh tensors are recycled; False without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    no_mmap, trim_threshold, top_pad = -4, -1, -2
    return bool(mallopt(no_mmap, 0) and mallopt(trim_threshold, 2**31 - 1) and mallopt(top_pad, 1 << 26))


def take_turns(sides: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Median time of each, in seconds; short ones are repeated inside one reading.

    Before each reading a side runs alone until it has its own steady state: what the other side left in the caches
    is not its affair, nor are the other's OpenMP threads, which spin on for milliseconds on the core that this side's
    second thread needs (measured: 88 µs instead of 70 for a kernel of 8 MiB right behind torch's copy_).
    """
    for side in sides:
        side()
    inner = []
    for side in sides:
        start = time.perf_counter()
        side()
        inner.append(max(1, min(2000, int(2e-3 / max(time.perf_counter() - start, 1e-7)))))
    readings: list[list[float]] = [[] for _ in sides]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(readings[0]) < 7:
        for reading, side, times in zip(readings, sides, inner, strict=True):
            start = time.perf_counter()
            while time.perf_counter() < start + SETTLE_SECONDS:
                side()
            start = time.perf_counter()
            for _ in range(times):
                side()
            reading.append((time.perf_counter() - start) / times)
        if len(readings[0]) >= 200:
            break
    return [statistics.median(reading) for reading in readings]


def measure(case: measured.Measured, mode: str, seconds: float) -> dict[str, Any]:
    """Check one case, then time it."""
    problem = measured.problem(case)
    problem.compare(problem.ours(None), problem.composition())
    sides: list[Callable[[], Any]] = [lambda: problem.ours(None), problem.composition]
    if problem.bytes:
        source = torch.ones(problem.bytes // 2, dtype=torch.uint8)
        target = memory.empty(source.shape, torch.uint8).fill_(0)
        sides.append(lambda: target.copy_(source))
    ours, composition, *roof = take_turns(sides, seconds)
    found = {"case": case.name, "mode": mode, "ours_s": ours, "torch_s": composition, "times": composition / ours}
    if problem.bytes:
        found |= {
            "bytes": problem.bytes,
            "GB/s": problem.bytes / ours / 1e9,
            "roof_GB/s": problem.bytes / roof[0] / 1e9,
            "roof": roof[0] / ours,
        }
    return found


def reset_high_water() -> bool:
    """Let the peak count from here; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def high_water() -> int | None:
    """Peak resident bytes since the last reset; None where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def extra_memory() -> dict[str, Any] | None:
    """What permute and unpermute, forward and backward, hold besides inputs, outputs and gradients."""
    import moeroute

    case = measured.Measured("combine", torch.bfloat16, {"T": 1024, "K": 8, "H": 7168})
    inputs = measured.make_inputs(case)
    plan = inputs["plan"]
    tokens, weights = inputs["tokens"].requires_grad_(), inputs["weights"].requires_grad_()
    seed = torch.ones_like(tokens)
    del inputs

    def step() -> int:
        rows = moeroute.permute(tokens, plan)
        kept = [rows]
        rows.register_hook(kept.append)  # retain_grad would copy it
        output = moeroute.unpermute(rows, plan, weights)
        output.backward(seed)
        kept += [output, *(t.grad for t in (tokens, weights) if t.grad is not None)]
        return sum(t.nbytes for t in kept)

    def clear() -> None:
        tokens.grad = weights.grad = None

    step()
    clear()
    memory.empty_cache()
    if not reset_high_water():
        return None
    before = high_water()
    if before is None:
        return None
    needed = step()
    after = high_water()
    assert after is not None  # noqa: S101 - it was there a moment ago
    inputs_bytes = sum(t.nbytes for t in (tokens, weights, seed))
    besides = after - before - needed
    return {
        "inputs_outputs_gradients_bytes": needed + inputs_bytes,
        "besides_bytes": besides,
        "besides_share": besides / (needed + inputs_bytes),
        "bound": 0.05,
    }


def worker(mode: str, names: Sequence[str], seconds: float) -> None:
    """Measure in this process and print JSON lines; started by `run`."""
    if mode == "kernel" and not keep_pages():
        return
    for case in measured.CASES:
        if case.name in names:
            _tell(measure(case, mode, seconds))
    if mode == "called" and "memory" in names:
        _tell({"case": "memory", "mode": mode, **(extra_memory() or {})})


def _tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------------------- in the command's process


def about() -> dict[str, Any]:
    """What the figures were measured on."""
    import moeroute

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return {
        "processor": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "moeroute": moeroute.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def run(names: Sequence[str], seconds: float, report: Callable[[str, int], None]) -> list[dict[str, Any]]:
    """One process for each way to measure; `report(mode, number of lines so far)` is called as they come."""
    lines: list[dict[str, Any]] = []
    for mode in MODES:
        environment = dict(os.environ)
        environment.pop(ROWS_ENVIRONMENT, None)
        if mode == "tuned":
            environment[ROWS_ENVIRONMENT] = "1"
        command = [sys.executable, "-m", "moeroute.bench", mode, str(seconds), *names]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None  # noqa: S101 - asked for one line above
            for line in process.stdout:
                lines.append(json.loads(line))
                report(mode, len(lines))
        if process.returncode:
            raise SystemExit(f"moeroute bench: the process for {mode!r} ended with {process.returncode}")
    return lines


@dataclasses.dataclass(frozen=True)
class Summary:
    """One case, all ways to measure; `missed` names the bounds that do not hold."""

    case: measured.Measured
    by_mode: dict[str, dict[str, Any]]

    @property
    def missed(self) -> list[str]:
        found = []
        for bound, least in self.case.bounds.items():
            line = self.by_mode.get("called" if bound == "called" else "kernel")
            value = None if line is None else line["roof" if bound == "roof" else "times"]
            if value is not None and value < least:
                found.append(f"{bound} {value:.2f} < {least:g}")
        return found


def summarise(lines: Sequence[dict[str, Any]]) -> list[Summary]:
    """The lines of each case, by mode, in the order of the case table."""
    return [
        Summary(case, {line["mode"]: line for line in lines if line["case"] == case.name})
        for case in measured.CASES
        if any(line["case"] == case.name for line in lines)
    ]


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[3:], float(sys.argv[2]))
