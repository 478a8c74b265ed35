"""Recycled CPU memory for large outputs.

Fresh pages from the system cost more than any of our operators: filling a new 64 MiB tensor takes
five to eight times as long as filling it again. So outputs of 1 MiB and more live in blocks that come back
when the last tensor over them dies and are handed out again. While a block is in use nothing sets
its tensor apart from others, but for one thing: its storage cannot be resized.

    a tensor's storage -> memoryview, one per hand-out -> mmap, the block
                              ^ weakly: _Lease, whose callback returns the block

Whatever can see the memory (views, saved tensors, NumPy arrays, DLPack, a storage held alone) keeps
the storage alive, the storage alone holds the memoryview, and a block returns only after that died.
"""

import contextlib
import math
import mmap
import operator
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from moeroute import check

SMALLEST = 1 << 20  # bytes; what is smaller comes from torch.empty

_CPU = torch.device("cpu")
_fills_uninitialized = torch._C._get_deterministic_fill_uninitialized_memory
_dispatch_depth = torch._C._len_torch_dispatch_stack


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """`torch.empty(shape, dtype=dtype, device=device)`, from recycled memory where that pays.

    That is: 1 MiB and more, on the CPU (`None` is the CPU too), with the pool switched on. The
    result is contiguous, starts at a page, is no view of anything and holds anything, or what
    `torch.empty` fills in under `torch.use_deterministic_algorithms(True)`. Any thread may ask. A
    recycled block costs 7 µs, a small tensor hardly more than from `torch.empty`.

    >>> former = set_memory_pool(True)
    >>> rows = empty((1024, 1024), torch.float32)
    >>> address = rows.data_ptr()
    >>> last_row = rows[-1]
    >>> del rows
    >>> empty((1024, 1024), torch.float32).data_ptr() == address  # last_row can still see it
    False
    >>> del last_row
    >>> empty((512, 2048), torch.float32).data_ptr() == address
    True
    >>> _ = set_memory_pool(**former)
    """
    if device is not None and device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= SMALLEST and _pool.enabled and min(shape) >= 0 and _dispatch_depth() == 0:
        view = _pool.hand_out(nbytes)
        if view is not None:
            storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
            # Not `.view`: autograd forbids changing a view in place where it forbids nothing here.
            result: Tensor = torch.empty(0, dtype=dtype, device=_CPU).set_(storage, 0, shape, ())
            if torch.are_deterministic_algorithms_enabled() and _fills_uninitialized():
                result.fill_(torch.empty((), dtype=dtype, device=_CPU))
            return result
    # A dispatch mode (fake tensors, memory trackers) sees the call it knows.
    if shape:
        return torch.empty(*shape, dtype=dtype, device=_CPU)  # a third faster than with a tuple
    return torch.empty((), dtype=dtype, device=_CPU)


def empty_cache() -> None:
    """Give all idle blocks back to the system, and forget how much was in use before.

    >>> empty_cache()
    >>> memory_stats()["idle_bytes"]
    0
    """
    _pool.empty_cache()


def set_memory_pool(
    enabled: bool | None = None, *, max_idle_bytes: int | Literal["largest"] | None = None
) -> dict[str, Any]:
    """Change the settings of the pool of recycled memory, for the whole process. None leaves a setting as it is.

    Args:
        enabled: False: large outputs come from `torch.empty`, idle blocks go back to the system at
            once, those in use when their tensors die. Switch it off for code that resizes
            storages, such as `tensor.untyped_storage().resize_(0)`: the storage of a block refuses
            ("Trying to resize storage that is not resizable"). The environment variable
            `MOEROUTE_MEMORY_POOL=0` switches it off from the start.
        max_idle_bytes: at most so many bytes stay idle; the sizes that came back longest ago go
            first. "largest", the default: as much as was in use at one time so far, counted from
            the last `empty_cache()`. The bound takes effect at the next large output,
            `memory_stats()` or `set_memory_pool()`.

    Returns:
        The former settings, as keyword arguments of this function.

    >>> former = set_memory_pool(max_idle_bytes=0)  # recycle nothing
    >>> block = empty((1 << 20,), torch.uint8)
    >>> del block
    >>> memory_stats()["idle_bytes"]
    0
    >>> _ = set_memory_pool(**former)
    """
    if enabled is not None and not isinstance(enabled, bool):
        raise check.wrong_type("set_memory_pool", "enabled", "True, False or None", enabled)
    if isinstance(max_idle_bytes, str):
        check.one_of("set_memory_pool", "max_idle_bytes", max_idle_bytes, ("largest",))
    elif max_idle_bytes is not None:
        check.integer("set_memory_pool", "max_idle_bytes", max_idle_bytes, 0)
    return _pool.change(enabled, max_idle_bytes)


def memory_stats() -> dict[str, Any]:
    """The state of the pool of recycled memory.

    Returns:
        A dictionary. `in_use_bytes`: blocks under living tensors, at their rounded size. `idle_bytes`: blocks that wait
        for the next output. `max_idle_bytes`: the most that may wait. `largest_in_use_bytes`: the most that was in use
        at one time. `enabled`: as set.

    >>> sorted(memory_stats())
    ['enabled', 'idle_bytes', 'in_use_bytes', 'largest_in_use_bytes', 'max_idle_bytes']
    """
    return _pool.stats()


class _Lease(weakref.ref[memoryview]):
    """A block in use. Calls back, with itself, when the memoryview under the tensors has died."""

    __slots__ = ("block",)
    block: mmap.mmap


def _lease(view: memoryview, block: mmap.mmap, callback: Callable[[_Lease], None]) -> _Lease:
    # A function of its own: interrupted, it drops a lease without a block before the view dies and calls back.
    lease = _Lease(view, callback)
    lease.block = block
    return lease


def _bytes(by_size: Mapping[int, Collection[Any]]) -> int:
    # All in C, so that no signal handler comes between; a loop takes 1 µs more.
    return sum(map(operator.mul, by_size, map(len, by_size.values())))


class _Pool:
    """The blocks, in use and idle.

    A signal handler or a `__del__` method may come here from the middle of our own section, and Ctrl-C may end it
    anywhere. So the lock is reentrant, bytes are counted when they are asked for, a list in `idle` stays there for
    good, and nothing counts on one line for what the line before has seen. Each line leaves every block in one
    place; one that is between two of them is a local variable's, and goes back to the system with it.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.max_idle_bytes: int | Literal["largest"] = "largest"
        self.forget()

    def forget(self) -> None:
        """Start anew. Blocks in use live on under their tensors and never come back here.

        A forked child does so first: a thread of its parent may hold the lock, and of every page
        that the child reuses the system would first make a copy.
        """
        self.lock = threading.RLock()
        # By size, then by id: without its lease a block cannot come back.
        self.in_use: dict[int, dict[int, _Lease]] = {}
        self.returned: deque[_Lease] = deque()
        self.idle: OrderedDict[int, list[mmap.mmap]] = OrderedDict()  # by size, latest returned last
        self.largest = 0

    @property
    def in_use_bytes(self) -> int:
        return _bytes(self.in_use)

    @property
    def idle_bytes(self) -> int:
        return _bytes(self.idle)

    def hand_out(self, nbytes: int) -> memoryview | None:
        """`nbytes` that nothing else can see; None where there is no memory for them."""
        step = 1 << (nbytes.bit_length() - 4)  # an eighth of the power of two below
        size = (nbytes + step - 1) & -step
        with self.lock:
            if not self.enabled:
                return None
            if self.returned:
                self._collect()
            block = self._take(size)
            if block is None:
                try:
                    block = _map(size)
                except (OSError, OverflowError):
                    self.empty_cache()  # all we can do for the torch.empty that comes next
                    return None
            view = memoryview(block)[:nbytes]
            lease = _lease(view, block, self.returned.append)  # runs anywhere, here too: it takes no lock
            self.in_use.setdefault(size, {})[id(lease)] = lease
            surplus = self._trim(self._bound())
        del surplus  # unmapping takes milliseconds, so it waits for the lock to be free
        return view

    def empty_cache(self) -> None:
        with self.lock:
            self._collect()
            surplus = self._trim(0)
            self.largest = self.in_use_bytes
        del surplus

    def change(self, enabled: bool | None, max_idle_bytes: int | Literal["largest"] | None) -> dict[str, Any]:
        with self.lock:
            former = {"enabled": self.enabled, "max_idle_bytes": self.max_idle_bytes}
            if max_idle_bytes is not None:
                self.max_idle_bytes = max_idle_bytes
            if enabled is not None:
                self.enabled = enabled
            surplus = self._settle()
        del surplus
        return former

    def stats(self) -> dict[str, Any]:
        with self.lock:
            surplus = self._settle()
            result = {
                "enabled": self.enabled,
                "in_use_bytes": self.in_use_bytes,
                "idle_bytes": self.idle_bytes,
                "largest_in_use_bytes": self.largest,
                "max_idle_bytes": self._bound(),
            }
        del surplus
        return result

    def _take(self, size: int, position: int = -1) -> mmap.mmap | None:
        """An idle block of this size: the last that came back, or with 0 the first."""
        try:
            return self.idle[size].pop(position)
        except (KeyError, IndexError):
            return None

    def _collect(self) -> None:
        """Blocks that came back become idle."""
        self.largest = max(self.largest, self.in_use_bytes)  # less is in use from here on
        for lease in tuple(self.returned):
            size = len(lease.block)
            # Missing: handed out before the pool was switched off, or collected already.
            if self.in_use.get(size, {}).pop(id(lease), None) is not None:
                self.idle.setdefault(size, []).append(lease.block)
                self.idle.move_to_end(size)
            with contextlib.suppress(ValueError):
                self.returned.remove(lease)  # last: what is interrupted above is done again

    def _bound(self) -> int:
        return self.largest if self.max_idle_bytes == "largest" else self.max_idle_bytes

    def _trim(self, bound: int) -> list[Any]:
        """The idle blocks above the bound; the caller drops them once the lock is free."""
        surplus: list[Any] = []
        if self.idle_bytes > bound:
            for size in list(self.idle):
                while self.idle_bytes > bound and (block := self._take(size, 0)) is not None:
                    surplus.append(block)
        return surplus

    def _settle(self) -> list[Any]:
        """Collect and trim; a pool that was switched off forgets what is in use."""
        self._collect()
        if self.enabled:
            return self._trim(self._bound())
        surplus = [*self._trim(0), self.in_use]
        self.in_use = {}
        self.largest = 0
        return surplus


def _map(size: int) -> mmap.mmap:
    """A fresh block: zero pages that cost nothing until they are touched.

    Cutting a larger mapping down to a 2 MiB boundary gained nothing at 12 MiB and more, where Linux
    aligns by itself (6.7 and later). At 1 to 3 MiB it would spare a fresh block 0.1 to 1 ms, for up to
    2 MiB of waste each; a block is fresh only once.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    # Private: Python's default is shared, and a forked child would write into its parent's tensors.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _after_fork() -> None:
    _pool.forget()


_pool = _Pool(os.environ.get("MOEROUTE_MEMORY_POOL", "1").strip().lower() not in ("0", "false", "off", "no"))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
