"""What a training costs: the time of routing inside a step, and where the memory of the process went."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeroute import memory


class _Stamp(torch.autograd.Function):
    """Identity; tells the time when the forward and when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, going: Callable[[], None], coming: Callable[[], None]) -> Tensor:
        ctx.coming = coming
        going()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.coming()
        return grads[0], None, None


class RoutingTimer:
    """Seconds in a layer outside its experts: router, selection, plan, permute and unpermute, and back.

    Forward, the clock runs from the router's input to the experts' input and from their output to the
    layer's output. Autograd runs nodes in reverse order of creation, so in the backward pass the same
    four places bound the same work.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started: float | None = None

    def watch(self, layer: nn.Module) -> None:
        def stamp_input(going: Callable[[], None], coming: Callable[[], None]) -> Callable[..., Any]:
            return lambda module, inputs: (_Stamp.apply(inputs[0], going, coming), *inputs[1:])

        def stamp_output(module: nn.Module, inputs: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return _Stamp.apply(output, self._start, self._stop)
            return (_Stamp.apply(output[0], self._stop, self._start), *output[1:])

        router, experts = layer.get_submodule("router"), layer.get_submodule("experts")
        router.register_forward_pre_hook(stamp_input(self._start, self._stop))
        experts.register_forward_pre_hook(stamp_input(self._stop, self._start))
        experts.register_forward_hook(stamp_output)
        layer.register_forward_hook(stamp_output)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _start(self) -> None:
        self._started = time.perf_counter()

    def _stop(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None


class Memory:
    """Where the memory of a training process went, in resident bytes; empty where the system does not tell.

    On Linux the peak of the training alone is known, and its parts: what was there before (Python, torch, the text),
    what the compiler brought, weights with their gradients and the optimizer's state, moeroute's recycled blocks, and
    the rest (activations, torch's own caches).
    """

    def __init__(self) -> None:
        self.before = resident()
        self.compiler: int | None = None
        self.pool = 0
        self._pool_before = _pool_bytes()

    def kernels_are_loaded(self) -> None:
        now = resident()
        if now is not None and self.before is not None:
            self.compiler = max(0, now - self.before)

    def training_starts(self) -> None:
        # What the warm-up has left in free lists goes back first: it would be used again unseen.
        gc.collect()
        memory.empty_cache()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc only
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here

    def step_ends(self) -> None:
        self.pool = max(self.pool, _pool_bytes() - self._pool_before)

    def parts(self, model_bytes: int) -> dict[str, int]:
        peak = resident("VmHWM")
        if peak is None or self.before is None or self.compiler is None:
            return {} if peak is None else {"peak": peak}
        parts = {"before": self.before, "compiler": self.compiler, "model": model_bytes, "pool": self.pool}
        return {"peak": peak, **parts, "rest": max(0, peak - sum(parts.values()))}


def _pool_bytes() -> int:
    stats = memory.memory_stats()
    used: int = stats["in_use_bytes"] + stats["idle_bytes"]
    return used


def resident(key: str = "VmRSS") -> int | None:
    """Resident bytes of this process now; with VmHWM, at the most."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    if key == "VmHWM":
        with contextlib.suppress(ImportError):  # Windows has none
            import resource

            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None
