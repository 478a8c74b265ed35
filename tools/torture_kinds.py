"""What `make torture` does, kind by kind. Each runs until its time is over and returns how often it called what."""

import ctypes
import faulthandler
import json
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import moeroute
from moeroute.plan import RoutingPlan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Told = tuple[int, str]


def run(kind: str, seconds: float, seed: int) -> None:
    """One kind; prints what it did as the last line."""
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    calls, what = globals()[kind](time.monotonic() + seconds)
    print(json.dumps({"calls": calls, "what": what}))


def same(a: Tensor, b: Tensor) -> None:
    """Equal bits, any NaN equal to any other."""
    if a.is_floating_point():
        a, b = a.nan_to_num(nan=7.0, posinf=3e4, neginf=-3e4), b.nan_to_num(nan=7.0, posinf=3e4, neginf=-3e4)
    if not torch.equal(a.contiguous().view(BITS[a.element_size()]), b.contiguous().view(BITS[b.element_size()])):
        raise AssertionError(f"{a.dtype} {list(a.shape)} differ")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many sizes, now and then a NaN or an infinity."""
    values = torch.randn(shape) * 10.0 ** random.randint(-3, 3)
    if values.numel() and random.random() < 0.2:
        values.view(-1)[random.randrange(values.numel())] = random.choice([float("nan"), float("inf"), float("-inf")])
    return values.to(dtype)


def path(tokens: Tensor, logits: Tensor, k: int, backend: Any = None, **options: Any) -> list[Tensor]:
    """Gate, plan, permute, unpermute and all gradients."""
    tokens, logits = tokens.detach().requires_grad_(), logits.detach().requires_grad_()
    gating = moeroute.gating_topk(logits, k, backend=backend, **options)
    plan = moeroute.plan_from_expert_ids(gating.expert_ids, logits.shape[1], backend=backend)
    rows = moeroute.permute(tokens, plan, backend=backend)
    output = moeroute.unpermute(rows, plan, gating.weights, backend=backend)
    grads = torch.autograd.grad(output.float().sum(), [tokens, logits])
    return [gating.weights, gating.expert_ids, plan.row_of_slot, rows, output, *grads]


# ---------------------------------------------------------------------------- kinds


def properties(end: float) -> Told:
    """Both backends on what is drawn."""
    calls = 0
    while time.monotonic() < end:
        experts = random.choice([1, 2, 3, 8, 64, 257])
        k, tokens = random.randint(1, min(experts, 9)), random.choice([0, 1, 2, 7, 33, 200])
        score = random.choice(["softmax", "sigmoid", "sqrtsoftplus", "topk_softmax", "topk_sigmoid", "none"])
        x = drawn(tokens, random.choice([0, 1, 5, 64, 129, 1024]), dtype=random.choice(DTYPES))
        logits = drawn(tokens, experts, dtype=random.choice(DTYPES))
        found = [path(x, logits, k, backend, score=score) for backend in ("cpu", "reference")]
        for a, b in zip(*found, strict=True):
            same(a, b)
        row_of_slot = found[0][2]
        same(row_of_slot.sort().values, torch.arange(len(row_of_slot), dtype=torch.int32))
        calls += 2
    return calls, "whole paths with gradients"


def indices(end: float) -> Told:
    """Plans of random bytes, small enough to be often nearly right."""
    calls = 0
    while time.monotonic() < end:
        tokens, k, rows = random.randint(0, 9), random.randint(1, 4), random.randint(0, 30)

        def index(size: int, most: int) -> Tensor:
            wild = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32)
            near = torch.randint(-2, most + 2, (size,), dtype=torch.int32)
            return torch.where(torch.rand(size) < 0.3, wild, near)

        plan = RoutingPlan(index(tokens * k, rows), index(rows, tokens * k), tokens, rows, topk=k)
        x, y, w = torch.randn(tokens, 40), torch.randn(rows, 40), torch.randn(tokens, k)
        for function, arguments in ((moeroute.permute, (x, plan, w)), (moeroute.unpermute, (y, plan, w))):
            same(function(*arguments, backend="cpu"), function(*arguments, backend="reference"))
            calls += 2
        same(moeroute.row_dots(y, x, plan, backend="cpu"), moeroute.row_dots(y, x, plan, backend="reference"))
        calls += 2
    return calls, "calls"


def handles(end: float) -> Told:
    """The C interface: handles that are valid, destroyed, drawn or null; numbers of any size."""
    from moeroute.aclnn.library import build
    from moeroute.aclnn.signatures import SIGNATURES

    folder = tempfile.mkdtemp()
    build.build(Path(folder))
    acl, meta, ops = (ctypes.CDLL(f"{folder}/lib/lib{name}.so") for name in ("ascendcl", "nnopbase", "opapi"))
    meta.aclCreateTensor.restype = ctypes.c_void_p
    acl.aclInit(None)
    acl.aclrtSetDevice(0)
    blocks = []
    for _ in range(4):
        block = ctypes.c_void_p()
        acl.aclrtMalloc(ctypes.byref(block), ctypes.c_size_t(4096), 0)
        blocks.append(block.value)
    known: list[int | None] = []
    calls = refused = right = 0

    def tensor(block: int | None, kind: int, *shape: int) -> ctypes.c_void_p:
        dims, rank = (ctypes.c_int64 * 2)(*shape), ctypes.c_uint64(len(shape))
        steps = (ctypes.c_int64 * 2)(*((shape[1], 1) if len(shape) == 2 else (1, 1)))
        return ctypes.c_void_p(
            meta.aclCreateTensor(dims, rank, kind, steps, ctypes.c_int64(0), 2, dims, rank, ctypes.c_void_p(block))
        )

    valid = [tensor(blocks[0], 0, 6, 4), tensor(blocks[1], 3, 6), ctypes.c_int64(2), ctypes.c_bool(False)]
    valid.append(tensor(blocks[2], 0, 3, 4))  # float32 gradient of six rows, int32 indices, K, no padding, result

    def number() -> int:
        return random.choice([0, 1, -1, 2, 3, 8, random.randrange(-(2**63), 2**63)])

    def handle() -> int:
        return random.choice([0, *(h or 0 for h in known[-20:]), random.randrange(2**64), 8, 4096])

    while time.monotonic() < end:
        dims = [random.choice([0, 1, 2, 4, 8, number()]) for _ in range(random.randint(0, 4))]
        array, rank = (ctypes.c_int64 * 8)(*dims), len(dims)
        strides = (ctypes.c_int64 * 8)(*[random.choice([1, 2, 8, number()]) for _ in range(8)])
        data = ctypes.c_void_p(random.choice([*blocks, None, 8, random.randrange(2**48)]))
        kind, offset = random.randint(-1, 30), ctypes.c_int64(random.choice([0, number()]))
        lengths = ctypes.c_uint64(rank), ctypes.c_uint64(random.choice([rank, 0, 5]))
        known.append(meta.aclCreateTensor(array, lengths[0], kind, strides, offset, 2, array, lengths[1], data))
        if random.random() < 0.3:
            meta.aclDestroyTensor(ctypes.c_void_p(handle()))
        name = random.choice(list(SIGNATURES))
        given: list[Any] = []
        for parameter in SIGNATURES[name].parameters:
            match parameter.kind:
                case "int" | "uint32":
                    wide = ctypes.c_int64 if parameter.kind == "int" else ctypes.c_uint32
                    given.append(wide(number() & 0xFFFFFFFF if parameter.kind == "uint32" else number()))
                case "bool":
                    given.append(ctypes.c_bool(random.random() < 0.5))
                case "float":
                    given.append(ctypes.c_float(random.choice([0.0, 1.0, float("nan"), 1e38])))
                case "double":
                    given.append(ctypes.c_double(random.choice([0.0, 1.0, float("nan"), 1e308])))
                case _:
                    given.append(ctypes.c_void_p(handle()))
        if random.random() < 0.5:  # a call that works, with one argument changed or none
            name, given = "MoeTokenPermuteGrad", list(valid)
            if random.random() < 0.7:
                place = random.randrange(len(given))
                given[place] = ctypes.c_int64(number()) if place == 2 else ctypes.c_void_p(handle())
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        out = [ctypes.byref(size), ctypes.byref(executor)]
        status = getattr(ops, f"aclnn{name}GetWorkspaceSize")(*given, *(random.choice([o, o, o, None]) for o in out))
        refused += status != 0
        number_of_run = ctypes.c_void_p(executor.value or handle())
        ran = getattr(ops, f"aclnn{name}")(None, ctypes.c_uint64(0), number_of_run, None)
        right += status == 0 and ran == 0
        calls += 3
    if not right:
        raise AssertionError("no operator ran: nothing was tried")
    return calls, f"calls, {refused:,} of the first phases refused, {right:,} operators ran"


def threads(end: float) -> Told:
    """Eight threads with the same inputs."""
    x, logits = torch.randn(300, 512), torch.randn(300, 16)
    expected = path(x, logits, 4)
    counts = [0] * 8
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            while time.monotonic() < end:
                for a, b in zip(path(x, logits, 4), expected, strict=True):
                    same(a, b)
                counts[i] += 1
        except BaseException as error:
            errors.append(error)
            raise

    every = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts), "whole paths with gradients"


def forks(end: float) -> Told:
    """Four children at a time, while a thread of the parent computes."""
    x, logits = torch.randn(300, 512), torch.randn(300, 16)
    expected = path(x, logits, 4)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            path(x, logits, 4)

    background = threading.Thread(target=busy)
    background.start()
    children = 0
    try:
        while time.monotonic() < end:
            started = [child for _ in range(4) if (child := _fork(x, logits, expected))]
            for child in started:
                _, status = os.waitpid(child, 0)
                if status != 0:
                    raise AssertionError(f"a child ended with {status}")
            children += len(started)
    finally:
        stop.set()
        background.join()
    return children, "children"


def _fork(x: Tensor, logits: Tensor, expected: list[Tensor]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with torch.no_grad():  # autograd's own threads do not survive a fork
                faulthandler.dump_traceback_later(30, exit=True)  # a child that hangs tells where, and fails
                gating = moeroute.gating_topk(logits, 4)
                plan = moeroute.plan_from_expert_ids(gating.expert_ids, 16)
                output = moeroute.unpermute(moeroute.permute(x, plan), plan, gating.weights)
                torch.set_num_threads(1)  # torch's own loops hang in a child on the threads that it has not
                same(output, expected[4])
            status = 0
        finally:
            os._exit(status)
    return child


class _Stop(BaseException):
    """What the timer raises; no `except Exception` catches it."""


def interrupts(end: float) -> Told:
    """A timer raises at a random line of Python."""
    armed = False

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise _Stop

    signal.signal(signal.SIGALRM, ring)
    x, logits = torch.randn(2000, 600), torch.randn(2000, 16)  # large enough for recycled memory
    expected = path(x, logits, 4)
    start = time.monotonic()
    path(x, logits, 4)
    length = time.monotonic() - start
    hits = 0
    while time.monotonic() < end:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1.2 * length))
            path(x, logits, 4)
            armed = False
        except _Stop:
            hits += 1
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        for a, b in zip(path(x, logits, 4), expected, strict=True):
            same(a, b)
    return hits, "interrupts"


def memory(end: float) -> Told:
    """A limit 300 MiB above what is in use; calls of up to 1 GiB."""
    small = torch.randn(50, 64), torch.randn(50, 8)
    expected = path(*small, 2)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (300 << 20), resource.RLIM_INFINITY))
    calls = refused = 0
    while time.monotonic() < end:
        try:
            tokens = torch.randn(random.choice([1000, 10_000, 60_000]), 1024)
            ids = torch.randint(8, (len(tokens), random.choice([1, 2, 4])))
            plan = moeroute.plan_from_expert_ids(ids, 8)
            moeroute.unpermute(moeroute.permute(tokens, plan), plan)
        except (MemoryError, RuntimeError):
            refused += 1
        calls += 1
        moeroute.empty_cache()
        for a, b in zip(path(*small, 2), expected, strict=True):
            same(a, b)
    return calls, f"calls, {refused:,} refused for memory"


def leaks(end: float) -> Told:
    """The resident memory after a third of the time and at the end."""
    x, logits = torch.randn(16, 64), torch.randn(16, 8)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    begin, calls, before = time.monotonic(), 0, 0
    while time.monotonic() < end:
        for _ in range(200):
            path(x, logits, 2)
        calls += 200
        if not before and time.monotonic() - begin > (end - begin) / 3:
            before = resident()
    grown = (resident() - before) / 2**20
    if grown > 8:
        raise AssertionError(f"{grown:.1f} MiB more after {calls} calls")
    return calls, f"whole paths with gradients, {max(grown, 0):.1f} MiB more in the last two thirds"


def disk(end: float) -> Told:
    """New processes, an empty folder for kernels, and files that may not grow."""
    code = (
        "import resource, signal, torch, moeroute; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1]]), 2);"
        "assert moeroute.unpermute(moeroute.permute(torch.ones(1, 3), plan), plan).tolist() == [[2.0] * 3]"
    )
    import subprocess
    import sys

    calls = 0
    with tempfile.TemporaryDirectory() as folder:
        while calls < 2 or time.monotonic() < end:
            limit = random.choice([0, 100, 5000, 20_000])
            environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
            subprocess.run([sys.executable, "-c", code.format(limit=limit)], env=environment, check=True)
            calls += 1
    return calls, "processes"


EVERY: dict[str, Callable[[float], Told]] = {
    function.__name__: function
    for function in (properties, indices, handles, threads, forks, interrupts, memory, leaks, disk)
}
