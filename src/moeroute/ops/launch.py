"""From a Python call to a compiled kernel: compilation, the number of threads, the threading layer.

A kernel is a serial body over the items [lo, hi) and a thin `prange` wrapper around it. Small
problems run the body; large ones split the items over threads. Splitting never changes a bit:
no item depends on another.
"""

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numba
import torch
from numba.core.compiler_lock import global_compiler_lock

from moeroute.ops import cache, simd

# Below this many bytes moved (or comparable work) two threads cost more than they bring: waking
# them takes some 5 µs, in which one thread moves about 64 KiB.
SERIAL_WORK = 1 << 17

_lock = threading.Lock()
_layer: str | None = None
_forked = False
cache_refusal: str | None = None


def _after_fork() -> None:
    # An OpenMP pool does not survive a fork; the child stays serial for good.
    global _forked, _lock
    _forked = True
    _lock = threading.Lock()
    global_compiler_lock.release()


if hasattr(os, "register_at_fork"):
    # A fork waits for a kernel that another thread compiles or loads: the child could never compile one.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_after_fork,
    )


def _jit(function: Callable[..., Any], parallel: bool) -> Any:
    global cache_refusal
    dispatcher = numba.njit(nogil=True, error_model="numpy", parallel=parallel)(function)
    try:
        dispatcher._cache = cache.Cache(function)
    except RuntimeError as error:  # no writable cache folder: every process compiles anew
        cache_refusal = str(error)
    return dispatcher


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator of a serial kernel body (or of a helper that bodies call)."""
    return _jit(function, parallel=False)


def parallel_kernel(function: Callable[..., Any]) -> Any:
    """Decorator of the thin `prange` wrapper."""
    return _jit(function, parallel=True)


def thread_count() -> int:
    """Threads that a large call may use: torch's setting, at most Numba's; 1 in a forked child."""
    if _forked:
        return 1
    wanted = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    return wanted if wanted == 1 or threads_refusal() is None else 1


@functools.cache
def threads_refusal() -> str | None:
    """Why Numba has no threads, None where it has: the threading layer that the user wants may not be installed."""
    try:
        numba.get_num_threads()  # starts them
    except ValueError as error:
        reason = f"NUMBA_THREADING_LAYER={numba.config.THREADING_LAYER}: {str(error).splitlines()[0].rstrip('.')}"
        warnings.warn(f"moeroute runs in one thread, with the same bits ({reason})", stacklevel=2)
        return reason
    return None


def threading_layer() -> str | None:
    """Numba's threading layer, None before the first parallel call."""
    return _layer


def cache_folder() -> str | None:
    """Where compiled kernels are kept between processes; None where nothing is writable."""
    return None if cache_refusal is not None else Kernel.every[0].cache_path


def _run_parallel(entry: Callable[..., Any], threads: int, arguments: tuple[Any, ...]) -> None:
    global _layer
    users = numba.get_num_threads()
    if users != threads:
        numba.set_num_threads(threads)
    try:
        if _layer is None or _layer == "workqueue":
            # The workqueue layer aborts the process when two Python threads enter it.
            with _lock:
                entry(*arguments)
            _layer = numba.threading_layer()
        else:
            entry(*arguments)
    finally:
        if users != threads:
            numba.set_num_threads(users)


class Kernel:
    """A body and its parallel wrapper, compiled on first use for each key (mostly a dtype).

    The body's last two parameters are lo and hi; the wrapper's are the number of items and of
    chunks. `signature(key)` gives the types of the parameters before those. With None for the
    wrapper the body always runs alone, and the call returns what it returns.
    """

    every: ClassVar[list["Kernel"]] = []

    def __init__(
        self, body: Any, wrapper: Any, signature: Callable[[Any], tuple[Any, ...]], keys: Iterable[Any]
    ) -> None:
        self.name = body.__name__
        self.keys = tuple(keys)
        self._functions = (body, wrapper)
        self._signature = signature
        self._serial: dict[Any, Any] = {}
        self._entries = (self._serial, dict[Any, Any]())
        Kernel.every.append(self)

    def _entry(self, which: int, key: Any) -> Any:
        found = self._entries[which].get(key)
        if found is None:
            types = (*self._signature(key), numba.int64, numba.int64)
            found = self._functions[which].compile(types)
            self._entries[which][key] = found
        return found

    @property
    def cache_path(self) -> str:
        return str(self._functions[0].stats.cache_path)

    def warm(self) -> None:
        """Compile (or load from the cache) for every key, serial and parallel."""
        for key in self.keys:
            for which in (0, 1) if threads_refusal() is None else (0,):
                if self._functions[which] is not None:
                    self._entry(which, key)

    def __call__(self, key: Any, items: int, work: int, *arguments: Any) -> Any:
        return self.run(key, work, (*arguments, 0, items))

    def run(self, key: Any, work: int, arguments: tuple[Any, ...]) -> Any:
        """The call for launchers of single tokens: the arguments in one tuple, 0 and the items last (0.2 µs less)."""
        if work < SERIAL_WORK:
            entry = self._serial.get(key)
            if entry is not None:
                return entry(*arguments)
        items = arguments[-1]
        threads = 1 if work < SERIAL_WORK or self._functions[1] is None else min(thread_count(), items)
        if threads <= 1:
            return self._entry(0, key)(*arguments)
        _run_parallel(self._entry(1, key), threads, (*arguments[:-2], items, threads))
        return None


FLOATS = tuple(dtype for dtype in simd.POINTER if dtype.is_floating_point)
