"""Recycled memory: it is recycled, nothing can tell, and nobody ever sees a block that somebody else has."""

import copy
import gc
import io
import linecache
import os
import pickle
import queue
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset

from moeroute import memory

MIB = 1 << 20
SOURCES = str(Path(memory.__file__).parents[1])
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> memory._Pool:
    """A pool of its own for each test, whatever lives elsewhere in this process."""
    fresh = memory._Pool(True)
    monkeypatch.setattr(memory, "_pool", fresh)
    return fresh


@pytest.fixture
def poison(pool: memory._Pool) -> memory._Pool:
    """Each block is overwritten the moment it comes back, so that whoever can still see it will notice."""

    class Poisoning(deque[memory._Lease]):
        def append(self, lease: memory._Lease) -> None:
            lease.block[:] = b"\xee" * len(lease.block)
            super().append(lease)

    pool.returned = Poisoning()
    return pool


@pytest.fixture
def unfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def make(value: float = 7.0, rows: int = 256) -> Tensor:
    """float32 [rows, 1024]: 1 MiB for 256 rows."""
    return memory.empty((rows, 1024), torch.float32).fill_(value)


def all_equal(tensor: Tensor, value: float) -> None:
    assert_close(tensor, torch.full_like(tensor, value), rtol=0, atol=0)


def stats(name: str) -> Any:
    return memory.memory_stats()[name]


def leases(pool: memory._Pool) -> list[memory._Lease]:
    return [lease for of_size in pool.in_use.values() for lease in of_size.values()]


# --- recycling ---


def test_a_block_is_handed_out_again() -> None:
    first = make()
    address = first.data_ptr()
    second = make()
    assert second.data_ptr() != address
    del first
    assert make().data_ptr() == address
    assert memory.empty((4, 64, 1024), torch.bfloat16).data_ptr() != address  # half the size
    assert memory.empty((1000, 132), torch.float64).data_ptr() != address  # an eighth more
    assert memory.empty((2, 1, 131072), torch.int32).data_ptr() == address


def test_small_ones_come_from_torch() -> None:
    small = memory.empty((MIB - 1,), torch.uint8)
    large = memory.empty((MIB,), torch.uint8)
    assert stats("in_use_bytes") == MIB
    assert small.untyped_storage().resizable()
    assert not large.untyped_storage().resizable()


@pytest.mark.parametrize("shape", [(MIB,), (1024, 1024), (3, 5, 7, 9991), torch.Size([2, 0, MIB]), [1, MIB]])
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.float16,
     torch.float32, torch.float64, torch.complex64],
)  # fmt: skip
def test_the_tensor_is_like_one_of_torch(shape: Any, dtype: torch.dtype) -> None:
    ours, theirs = memory.empty(shape, dtype), torch.empty(shape, dtype=dtype)
    for attribute in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "_base"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    assert ours.stride() == theirs.stride()
    assert ours.storage_offset() == 0
    assert not ours._is_view()
    assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert ours.data_ptr() % 4096 == 0 or ours.numel() == 0


def test_devices() -> None:
    assert memory.empty((MIB,), torch.uint8, torch.device("meta")).is_meta
    assert memory.empty((MIB,), torch.uint8, torch.device("cpu")).device.type == "cpu"
    with torch.device("meta"):
        assert memory.empty((MIB,), torch.uint8).device.type == "cpu"
        assert memory.empty((8,), torch.uint8).device.type == "cpu"


@pytest.mark.usefixtures("unfilled")
def test_sizes_are_rounded_up_to_an_eighth() -> None:
    for nbytes, block in [
        (MIB, MIB),
        (MIB + 1, MIB + MIB // 8),
        (2 * MIB - 1, 2 * MIB),
        (7 * 16 * MIB, 7 * 16 * MIB),
        (100 * MIB, 104 * MIB),
    ]:
        held = memory.empty((nbytes,), torch.uint8)
        assert stats("in_use_bytes") == block
        del held


@pytest.mark.usefixtures("unfilled")
def test_a_recycled_block_costs_little() -> None:
    def of_one(calls: int = 200) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            memory.empty((1024, 1024), torch.float32)
        return (time.perf_counter() - start) / calls

    assert min(of_one() for _ in range(20)) < 20e-6


# --- whoever can see the memory keeps it ---

ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda t: t.view(-1)[5:6],
    "chunk": lambda t: t.T.chunk(3)[2],
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "other dtype": lambda t: t.view(torch.int32),
    "parameter": lambda t: torch.nn.Parameter(t),
    "storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy()[3:4, ::2],
    "buffer": lambda t: memoryview(t.numpy()),  # type: ignore[arg-type]
    "numpy dlpack": lambda t: np.from_dlpack(t),
    "torch dlpack": lambda t: torch.from_dlpack(t.numpy()),  # type: ignore[attr-defined]
    "capsule": lambda t: torch.utils.dlpack.to_dlpack(t),  # type: ignore[attr-defined]
    "shared storage": lambda t: torch.empty(0).set_(t.untyped_storage(), 17, (3,)),  # type: ignore[call-overload]
    "graph": lambda t: torch.ones_like(t, requires_grad=True).mul(t).sum(),
    "closure": lambda t: lambda: t,
}  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES)
def test_what_sees_the_memory_keeps_it(alias: str, poison: memory._Pool) -> None:
    rows = make()
    address = rows.data_ptr()
    seer = ALIASES[alias](rows)
    del rows
    gc.collect()
    assert all(make(0.0).data_ptr() != address for _ in range(3))
    again = torch.empty(0).set_(block_at(poison, address), 0, (256, 1024))  # type: ignore[call-overload]
    all_equal(again, 7.0)
    del again, seer
    assert any(held.data_ptr() == address for held in [make(0.0) for _ in range(3)])


def block_at(pool: memory._Pool, address: int) -> torch.UntypedStorage:
    """The block in use at an address, read behind everybody's back."""
    for lease in leases(pool):
        storage = torch.frombuffer(lease.block, dtype=torch.uint8).untyped_storage()
        if storage.data_ptr() == address:
            return storage
    raise AssertionError("no such block in use")


def test_saved_for_backward(poison: memory._Pool) -> None:
    x = torch.full((256, 1024), 3.0, requires_grad=True)
    saved = make()
    address = saved.data_ptr()
    y = x * saved
    del saved
    others = [make(0.0) for _ in range(3)]
    y.sum().backward()
    assert x.grad is not None
    all_equal(x.grad, 7.0)
    del others, y
    assert address in {held.data_ptr() for held in [make(0.0) for _ in range(4)]}


@pytest.mark.usefixtures("unfilled")
def test_random_lives(poison: memory._Pool) -> None:
    draw = random.Random(0)
    living: list[tuple[float, Any]] = []
    keep: list[Callable[[Tensor], Any]] = [
        lambda t: t,
        lambda t: t[7:9],
        lambda t: t.detach().T,
        lambda t: t.numpy()[::3],
        lambda t: np.from_dlpack(t),
    ]
    addresses = set()
    for step in range(200):
        rows = make(float(step), rows=draw.choice([256, 280, 320, 1024]))
        addresses.add(rows.data_ptr())
        living.append((float(step), draw.choice(keep)(rows)))
        del rows
        while len(living) > draw.randrange(12):
            living.pop(draw.randrange(len(living)))
        for value, alias in living:
            all_equal(torch.as_tensor(alias)[:2], value)
    assert len(addresses) < 60


def test_a_cycle_gives_its_block_back() -> None:
    class Node:
        pass

    node = Node()
    node.itself, node.rows = node, make()  # type: ignore[attr-defined]
    assert stats("in_use_bytes") == MIB
    del node
    gc.collect()
    assert stats("in_use_bytes") == 0


# --- an ordinary tensor ---


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.mul(x, 2, out=memory.empty(x.shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.mul(grad, 2, out=memory.empty(grad.shape, grad.dtype))


def test_changed_in_place_and_differentiated() -> None:
    x = torch.ones(256, 1024, requires_grad=True)
    y = Doubled.apply(x)
    y.add_(1).mul_(3)
    y[0] = 0
    y.sum().backward()
    assert x.grad is not None
    all_equal(x.grad[1:], 6.0)
    all_equal(x.grad[0], 0.0)


def test_distributed_wrappers() -> None:
    """DDP and FSDP, alone in their group, train as the bare module does."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(256, 1024))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Doubled.apply(self.weight * x)
            return y.mul_(y.detach().mean())

    def train(model: torch.nn.Module) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(3):
            model(torch.full((256, 1024), 2.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (weight,) = model.parameters()
        return weight.full_tensor() if isinstance(weight, torch.distributed.tensor.DTensor) else weight

    expected = train(Model())
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert_close(train(DistributedDataParallel(Model())), expected, rtol=0, atol=0)
        assert_close(train(cast(Model, fully_shard(Model()))), expected, rtol=0, atol=0)
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_code_takes_and_changes_it() -> None:
    def change(rows: Tensor) -> Tensor:
        rows.mul_(2)
        return rows[1:].sum() + rows.view(-1)[0]

    rows = make(1.0)
    result = torch.compile(change, backend="aot_eager", fullgraph=True)(rows)
    all_equal(rows, 2.0)
    assert result.item() == 2 * (255 * 1024 + 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode: Any) -> None:
    with mode():
        rows = make()
        assert rows.is_inference() == torch.empty(1).is_inference()
        assert not rows.requires_grad
        address = rows.data_ptr()
        del rows
        assert make().data_ptr() == address


def test_dispatch_modes_see_an_ordinary_call() -> None:
    with FakeTensorMode():
        assert isinstance(memory.empty((MIB,), torch.uint8), FakeTensor)
    assert stats("in_use_bytes") == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float32])
def test_deterministic_algorithms(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.empty((MIB,), dtype).fill_(1)
    former = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        recycled = memory.empty((MIB,), dtype)
        assert_close(recycled, torch.empty((MIB,), dtype=dtype), equal_nan=True)
        recycled.fill_(1)
        del recycled
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        assert_close(memory.empty((MIB,), dtype), torch.ones((MIB,), dtype=dtype))
    finally:
        torch.use_deterministic_algorithms(former)


def test_pickles_and_copies() -> None:
    rows = make(rows=300)
    loaded = pickle.loads(pickle.dumps(rows))
    file = io.BytesIO()
    torch.save(rows, file)
    assert file.tell() < rows.nbytes + 10_000  # the tensor, not the block
    file.seek(0)
    saved, copied, cloned = torch.load(file), copy.deepcopy(rows), rows.clone()
    rows.zero_()
    for other in (loaded, saved, copied, cloned):
        all_equal(other, 7.0)


def test_shared_memory() -> None:
    rows = make()
    rows.share_memory_()
    assert rows.is_shared()
    all_equal(rows, 7.0)
    assert stats("in_use_bytes") == 0  # torch moved it elsewhere


def test_storage_that_does_not_resize() -> None:
    rows = make()
    with pytest.raises(RuntimeError, match="not resizable"):
        rows.untyped_storage().resize_(0)
    all_equal(rows, 7.0)
    former = memory.set_memory_pool(False)
    make().untyped_storage().resize_(0)
    memory.set_memory_pool(**former)
    with pytest.raises(RuntimeError, match="not resizable"):
        make().untyped_storage().resize_(0)


# --- how much is kept ---


def test_idle_memory_is_bounded_by_what_was_in_use() -> None:
    held = [make() for _ in range(5)]
    assert stats("max_idle_bytes") == stats("largest_in_use_bytes") == 5 * MIB
    del held[:]
    assert stats("idle_bytes") == 5 * MIB
    held = [make(rows=512) for _ in range(2)]
    assert (stats("in_use_bytes"), stats("idle_bytes")) == (4 * MIB, 5 * MIB)
    del held[:]
    assert (stats("in_use_bytes"), stats("idle_bytes")) == (0, 5 * MIB)


def test_what_came_back_longest_ago_goes_first() -> None:
    large, old, new = make(rows=1024), make(rows=512), make()
    addresses = large.data_ptr(), new.data_ptr()
    del old
    assert stats("idle_bytes") == 2 * MIB
    del new
    assert stats("idle_bytes") == 3 * MIB
    del large
    memory.set_memory_pool(max_idle_bytes=5 * MIB)
    assert stats("idle_bytes") == 5 * MIB
    large, new = make(rows=1024), make()
    assert (large.data_ptr(), new.data_ptr()) == addresses
    del large, new
    again = make()
    assert stats("idle_bytes") == 4 * MIB
    del again
    memory.set_memory_pool(max_idle_bytes=MIB)  # now the larger one is the older
    assert stats("idle_bytes") == MIB


def test_two_sizes_in_turn_are_both_recycled() -> None:
    addresses = set()
    for _ in range(20):
        addresses.add(make(rows=512).data_ptr())
        addresses.add(make(rows=1024).data_ptr())
    assert len(addresses) == 2


def test_a_bound_of_the_user() -> None:
    former = memory.set_memory_pool(max_idle_bytes=2 * MIB)
    assert former == {"enabled": True, "max_idle_bytes": "largest"}
    held = [make() for _ in range(5)]
    del held
    assert stats("idle_bytes") == 2 * MIB
    memory.set_memory_pool(max_idle_bytes=0)
    assert stats("idle_bytes") == 0
    memory.set_memory_pool(**former)
    assert stats("max_idle_bytes") == stats("largest_in_use_bytes") == 5 * MIB


def test_idle_memory_really_goes_back(pool: memory._Pool) -> None:
    make()
    assert stats("idle_bytes") == MIB
    (block,) = pool.idle[MIB]
    gone = weakref.ref(block)
    del block
    memory.empty_cache()
    assert gone() is None
    assert stats("idle_bytes") == stats("largest_in_use_bytes") == 0


def test_empty_cache_leaves_living_tensors_alone() -> None:
    rows = make()
    make(rows=1024)
    memory.empty_cache()
    assert (stats("in_use_bytes"), stats("largest_in_use_bytes"), stats("idle_bytes")) == (MIB, MIB, 0)
    all_equal(rows, 7.0)
    del rows
    assert stats("idle_bytes") == MIB


def test_switching_off_and_on(poison: memory._Pool) -> None:
    rows, block = make(), weakref.ref(leases(poison)[0].block)
    memory.set_memory_pool(False)
    assert memory.memory_stats() == {
        "enabled": False,
        "in_use_bytes": 0,
        "idle_bytes": 0,
        "largest_in_use_bytes": 0,
        "max_idle_bytes": 0,
    }
    other = make(0.0)
    assert other.untyped_storage().resizable()
    all_equal(rows, 7.0)
    assert memory.set_memory_pool(True)["enabled"] is False
    assert block() is not None
    del rows
    assert block() is None  # it went to the system, not to the pool
    assert stats("idle_bytes") == 0


def test_a_block_on_its_way_back_while_the_pool_is_switched_off(pool: memory._Pool) -> None:
    rows = make()
    (lease,) = leases(pool)
    memory.set_memory_pool(False)
    del rows  # the lease still lives, and calls back
    assert len(pool.returned) == 1
    memory.set_memory_pool(True)
    del lease
    assert (stats("in_use_bytes"), stats("idle_bytes")) == (0, 0)


def test_no_memory_left(pool: memory._Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    make(rows=1024)
    with pytest.raises(RuntimeError, match=r"allocate|overflow|memory"):
        memory.empty((1 << 36, 1 << 20), torch.uint8)
    assert pool.idle_bytes == 0

    def fail(size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory, "_map", fail)
    all_equal(make(), 7.0)  # torch had some
    assert stats("in_use_bytes") == 0


def test_negative_sizes_are_an_error_of_torch() -> None:
    with pytest.raises(RuntimeError, match="negative dimension"):
        memory.empty((-1024, -1024), torch.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"enabled": 1}, TypeError, "enabled must be True, False or None; got int"),
        ({"max_idle_bytes": -1}, ValueError, "max_idle_bytes must be at least 0; got -1"),
        ({"max_idle_bytes": 1.5}, TypeError, "max_idle_bytes must be an int"),
        ({"max_idle_bytes": "all"}, ValueError, "max_idle_bytes must be one of 'largest'; got 'all'"),
    ],
)
def test_wrong_settings(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"moeroute.set_memory_pool: {message}"):
        memory.set_memory_pool(**{"enabled": False, **arguments})
    assert stats("enabled")


# --- threads, signals, processes ---


def test_threads(poison: memory._Pool) -> None:
    """Each makes, checks and passes on, so that most blocks die in another thread than they came from."""
    passed: queue.SimpleQueue[tuple[float, Tensor]] = queue.SimpleQueue()
    errors = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for step in range(100):
                value = float(seed * 1000 + step)
                rows = make(value, rows=draw.choice([256, 320]))
                passed.put((value, rows[draw.randrange(256)]))
                received, row = passed.get()
                all_equal(row, received)
                all_equal(rows[:4], value)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    del threads
    gc.collect()
    assert stats("in_use_bytes") == 0


def test_a_dying_tensor_waits_for_no_lock(pool: memory._Pool) -> None:
    rows = [make()]
    thread = threading.Thread(target=rows.clear, daemon=True)
    with pool.lock:
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    assert stats("in_use_bytes") == 0


def at_each_line(action: Callable[[FrameType], None], program: Callable[[], None]) -> None:
    """Run `program`, and `action` before each line of memory.py that it comes through."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != memory.__file__:
            return None
        if event == "line":
            action(frame)  # itself not traced
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        program()
    finally:
        sys.settrace(former)


@pytest.mark.usefixtures("unfilled")
def test_a_signal_handler_may_come_in_at_any_point(poison: memory._Pool) -> None:
    draw = random.Random(0)
    own: list[tuple[float, Tensor]] = []
    handlers: list[tuple[float, Tensor]] = []

    def live(mine: list[tuple[float, Tensor]]) -> None:
        for value, rows in mine:
            all_equal(rows[::50, ::100], value)
        match draw.randrange(8):
            case 0 | 1 | 2:
                value = float(draw.randrange(1 << 20))
                mine.append((value, make(value, rows=draw.choice([256, 288]))))
            case 3 | 4:
                del mine[:1]
            case 5:
                memory.memory_stats()
            case 6:
                memory.empty_cache()
            case 7:
                memory.set_memory_pool(max_idle_bytes=draw.choice([0, 2 * MIB, "largest"]))
        del mine[:-4]

    def program() -> None:
        for _ in range(15):
            live(own)

    at_each_line(lambda _: live(handlers), program)
    assert poison.in_use_bytes > 0
    del own[:], handlers[:]
    assert stats("in_use_bytes") == 0
    assert stats("idle_bytes") == sum(size * len(blocks) for size, blocks in poison.idle.items())


def interrupted(program: Callable[[], None], place: int) -> bool:
    """Run `program` until it comes to its line number `place` of memory.py, and raise KeyboardInterrupt there."""
    left, seen = place, set()

    def interrupt(frame: FrameType) -> None:
        nonlocal left
        line = (id(frame), frame.f_lineno)
        # A `with` statement shows a second time before it releases. Only a trace function can raise there: for
        # signals Python looks after calls and jumps.
        again = line in seen and linecache.getline(memory.__file__, frame.f_lineno).lstrip().startswith("with ")
        seen.add(line)
        if not again:
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt

    try:
        at_each_line(interrupt, program)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.usefixtures("unfilled")
def test_ctrl_c_at_any_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is held for good, none is handed out twice, all counts are right, whatever line is interrupted."""
    blocks: list[weakref.ref[Any]] = []
    map_block = memory._map

    def recorded(size: int) -> Any:
        if size > MIB:
            raise OSError(12, "Cannot allocate memory")
        block = map_block(size)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(memory, "_map", recorded)
    monkeypatch.setattr(memory, "SMALLEST", 4096)
    living: list[tuple[float, Tensor]] = []

    def live(value: float, pages: int = 1) -> None:
        living.append((value, memory.empty((pages, 1024), torch.float32).fill_(value)))

    def program() -> None:
        live(1.0)
        live(2.0)
        live(3.0, 2)
        del living[0]
        live(4.0)  # recycled
        del living[:2]
        memory.empty((2 * MIB,), torch.uint8)  # refused by the system: idle blocks go, torch is asked
        live(5.0)
        del living[-1:]
        memory.memory_stats()
        memory.set_memory_pool(max_idle_bytes=0)
        live(6.0, 2)
        live(7.0)
        del living[-1]
        memory.empty_cache()
        memory.set_memory_pool(False)
        live(8.0)
        memory.set_memory_pool(True, max_idle_bytes="largest")
        live(9.0)

    place = 0
    while True:
        pool = memory._Pool(True)
        monkeypatch.setattr(memory, "_pool", pool)
        blocks.clear()
        living.clear()
        ended = not interrupted(program, place)
        memory.set_memory_pool(True, max_idle_bytes="largest")
        for value, pages in ((10.0, 1), (11.0, 1), (12.0, 2)):
            live(value, pages)
        for value, rows in living:
            all_equal(rows, value)
        assert pool.lock.acquire(blocking=False)
        pool.lock.release()
        del rows
        living.clear()
        found = memory.memory_stats()
        idle = [block for of_size in pool.idle.values() for block in of_size]
        assert {id(block()) for block in blocks if block() is not None} == {id(block) for block in idle}
        assert len({id(block) for block in idle}) == len(idle)
        assert (found["in_use_bytes"], found["idle_bytes"]) == (0, sum(map(len, idle)))
        assert not pool.returned
        del idle
        if ended:
            break
        place += 1
    assert place > 200


def in_child(body: Callable[[], None]) -> None:
    """Run `body` in a forked child; fails if it fails or hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, Python 3.12 and later
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(10)
            torch.set_num_threads(1)  # the OpenMP threads are not there any more
            body()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@needs_fork
def test_a_forked_child_has_its_own_memory() -> None:
    living, idle = make(1.0), make(2.0)
    idle_address = idle.data_ptr()
    del idle

    def child() -> None:
        nonlocal living
        assert (stats("in_use_bytes"), stats("idle_bytes")) == (0, 0)
        all_equal(living, 1.0)
        address = living.data_ptr()
        living.fill_(5.0)
        fresh = [make(6.0) for _ in range(3)]
        assert address not in [tensor.data_ptr() for tensor in fresh]
        del living
        assert stats("in_use_bytes") == 3 * MIB
        assert stats("idle_bytes") == 0
        del fresh
        assert stats("idle_bytes") == 3 * MIB

    in_child(child)
    all_equal(living, 1.0)
    assert stats("idle_bytes") == MIB
    assert memory.empty((256, 1024), torch.float32).data_ptr() == idle_address


@needs_fork
def test_a_child_forked_while_a_thread_holds_the_lock(pool: memory._Pool) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pool.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        in_child(lambda: all_equal(make(), 7.0))
    finally:
        done.set()
        thread.join()


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return make(float(index))


@needs_fork
def test_data_loader_workers() -> None:
    make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork")
        received = list(loader)
    assert len(received) == 12
    for index, rows in enumerate(received):
        all_equal(rows, float(index))


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "MOEROUTE_MEMORY_POOL": "", "PYTHONPATH": SOURCES, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_interpreter_exits_with_living_tensors() -> None:
    """Nothing is handed out twice and nothing crashes (as daemon threads that run torch do, with or without us)."""
    output = run(
        """
        import atexit, builtins, torch
        from moeroute import memory

        def make(value):
            return memory.empty((512, 1024), torch.float32).fill_(value)

        living = [make(1.0) for _ in range(3)]
        print("recycled", memory.memory_stats()["in_use_bytes"])
        builtins.held_for_good = make(1.0)

        class Late:
            def __init__(self):
                self.rows, self.make = make(1.0), make
            def __del__(self):
                print("late", bool((self.rows == 1).all()))
        late = Late()
        late.itself = late

        def last():
            others = [make(2.0) for _ in range(3)]
            print("atexit", all(bool((rows == 1).all()) for rows in living))
        atexit.register(last)
        """
    )
    assert output == "recycled 6291456\natexit True\nlate True\n"


def test_the_environment_variable_switches_it_off() -> None:
    output = run(
        """
        import torch
        from moeroute import memory
        rows = memory.empty((1024, 1024), torch.float32)
        print(memory.memory_stats()["enabled"], rows.untyped_storage().resizable())
        """,
        MOEROUTE_MEMORY_POOL="0",
    )
    assert output == "False True\n"
