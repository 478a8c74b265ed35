"""What `make torture` does, kind by kind. Each returns how often it called what, and starts its clock when it is ready.

torture_calls.py has the calls with what is drawn, torture_library.py the C interface.
"""

import faulthandler
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import moeroute
import torture_calls as calls
from aclnn_calls import GOOD
from moeroute.conformance.case import digests_of
from moeroute.conformance.table import cases
from moeroute.plan import RoutingPlan
from test_bad_input import CALLS
from torture_calls import same
from torture_library import handles, sanitizers

Told = tuple[int, str]


def run(kind: str, seconds: float, seed: int) -> None:
    """One kind; prints what it did as the last line."""
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")  # torch announces tensors of unusual layouts as unfinished
    number, what = EVERY[kind](seconds, seed)
    print(json.dumps({"calls": number, "what": what}))


def path(tokens: Tensor, logits: Tensor, k: int) -> list[Tensor]:
    """Gate, plan, permute, unpermute and all gradients."""
    tokens, logits = tokens.detach().requires_grad_(), logits.detach().requires_grad_()
    gating = moeroute.gating_topk(logits, k)
    plan = moeroute.plan_from_expert_ids(gating.expert_ids, logits.shape[1])
    rows = moeroute.permute(tokens, plan)
    output = moeroute.unpermute(rows, plan, gating.weights)
    grads = torch.autograd.grad(output.float().sum(), [tokens, logits])
    return [gating.weights, gating.expert_ids, plan.row_of_slot, rows, output, *grads]


# Of CALLS, those that give other results each time, or change what others use.
_OTHERWISE = {"set_memory_pool", "nn.SwiGLU", "nn.Experts", "nn.Router", "nn.MoE"}


class Small:
    """A small call of every public function of the package and its layer, with arguments of its own."""

    def __init__(self) -> None:
        self.calls = [
            (name, function, {key: _copied(value) for key, value in arguments.items()})
            for name, (function, arguments) in CALLS.items()
            if name not in _OTHERWISE
        ]
        self.expected = [[_copied(part) for part in calls.parts(self.call(i))] for i in range(len(self.calls))]

    def __len__(self) -> int:
        return len(self.calls)

    def call(self, i: int) -> Any:
        """The i-th one's result."""
        name, function, arguments = self.calls[i]
        if name.startswith("update_expert_bias"):
            arguments = {**arguments, "bias": arguments["bias"].clone()}
        return function(**arguments)

    def check(self, i: int) -> None:
        """And it is the same as ever."""
        same(self.call(i), self.expected[i], self.calls[i][0])


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


# ---------------------------------------------------------------------------- kinds


def properties(seconds: float, seed: int) -> Told:
    """Both backends on what is drawn; the table of cases with other inputs in between."""
    done, of_cases = 0, 0
    end = time.monotonic() + seconds
    while not done or time.monotonic() < end:
        drawn = calls.Inputs()
        for name in calls.DRAWN:
            calls.compare(name, drawn)
            done += 2
        case = random.choice(cases())
        arguments = case.arguments(random.randrange(1, 2**31))
        found, wanted = (digests_of(case.run(arguments, backend)) for backend in ("cpu", "reference"))
        if found != wanted:
            raise AssertionError(f"{case.name}: {found} and {wanted}")
        of_cases += 1
    names = [name for name in calls.public() if "." not in name or name.startswith("nn.")]
    calls.need_all(names)
    return sum(calls.called.values()), (
        f"calls of all {len(names)} public functions and classes of moeroute and moeroute.nn, each at least "
        f"{min(calls.called[name] for name in names):,} times; {of_cases:,} cases of the table with other inputs"
    )


def lies(seconds: float, seed: int) -> Told:
    """Arguments that are something else."""
    hosts = calls.hosts_functions()
    taken = of_hosts = rounds = 0
    end = time.monotonic() + seconds
    while not rounds or time.monotonic() < end:
        for name in (*CALLS, *CALLS, *CALLS):
            calls.lie(name)
        for name in GOOD:
            calls.lie_to_aclnn(name)
        for name, function in hosts.items():
            taken += calls.lie_as_a_host(name, function)
            of_hosts += 1
        rounds += 1
    # Without those that take nothing, and those whose calls are results of others.
    known = {name.partition(",")[0] for name in CALLS}
    names = [name for name in calls.public() if name in known or ("." in name and not name.startswith("nn."))]
    calls.need_all(names)
    return sum(calls.called.values()), (
        f"calls of {len(names)} public functions, those of moeroute.aclnn and moeroute.interop too: results, or errors "
        f"of the documented kinds ({taken:,} of {of_hosts:,} calls under other libraries' names gave a result)"
    )


def indices(seconds: float, seed: int) -> Told:
    """Plans of random bytes, small enough to be often nearly right."""
    done = 0
    end = time.monotonic() + seconds
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
            done += 2
        same(moeroute.row_dots(y, x, plan, backend="cpu"), moeroute.row_dots(y, x, plan, backend="reference"))
        done += 2
    return done, "calls"


def threads(seconds: float, seed: int) -> Told:
    """Eight threads, each with every small call in an order of its own, and now and then a whole path."""
    x, logits = torch.randn(300, 512), torch.randn(300, 16)
    expected = path(x, logits, 4)
    every = [Small() for _ in range(8)]
    counts = [0] * 8
    errors: list[BaseException] = []
    end = time.monotonic() + seconds

    def work(i: int) -> None:
        order = random.Random(seed + i)
        try:
            while time.monotonic() < end and not errors:
                for _ in range(50):
                    every[i].check(order.randrange(len(every[i])))
                same(path(x, logits, 4), expected)
                counts[i] += 50 + 8
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts), f"calls of {len(every[0])} kinds, at least {min(counts):,} in each thread"


def forks(seconds: float, seed: int) -> Told:
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
    end = time.monotonic() + seconds
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


@contextmanager
def _interrupted(after: float) -> Iterator[None]:
    """A timer raises _Stop inside, unless the body ends first."""
    armed = True

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise _Stop

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupts(seconds: float, seed: int) -> Told:
    """A timer raises at a random line of Python; small calls, whole paths, and one with recycled memory."""
    small = Small()
    wide = torch.randn(1500, 300), torch.randn(1500, 16)  # its rows are larger than the smallest recycled block
    narrow = torch.randn(16, 64), torch.randn(16, 8)

    def round_of_calls() -> None:
        for i in random.sample(range(len(small)), 12):
            small.call(i)

    programs: list[tuple[float, Callable[[], Any]]] = []
    for program in (round_of_calls, lambda: path(*narrow, 2), lambda: path(*wide, 4)):
        program()
        start = time.monotonic()
        program()
        programs.append((time.monotonic() - start, program))
    expected = path(*narrow, 2), path(*wide, 4)
    hits = tried = 0
    lines = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        large = tried % 16 == 15  # takes a hundred times as long
        length, program = programs[2 if large else tried % 2]
        tried += 1
        try:
            with _interrupted(random.uniform(1e-6, length)):
                program()
        except _Stop as stop:
            hits += 1
            lines |= set(_lines(stop))
        small.check(random.randrange(len(small)))
        same(path(*narrow, 2), expected[0])
        if large:
            same(path(*wide, 4), expected[1])
    del expected
    gc.collect()
    if held := moeroute.memory_stats()["in_use_bytes"]:
        raise AssertionError(f"{held} bytes of recycled memory are held for good")
    if hits < min(100, seconds):
        raise AssertionError(f"{hits} interrupts of {tried} programs: too few say nothing")
    return hits, f"interrupts of {tried:,} programs, at {len(lines):,} different lines of the package"


def _lines(error: BaseException) -> Iterator[tuple[str, int]]:
    """The line of the package that was interrupted, if it was one of the package's."""
    trace, found = error.__traceback__, None
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if f"{os.sep}moeroute{os.sep}" in name:
            found = name, trace.tb_lineno
        trace = trace.tb_next
    if found:
        yield found


def memory(seconds: float, seed: int) -> Told:
    """A limit 300 MiB above what is in use; calls of up to 1 GiB."""
    small = torch.randn(50, 64), torch.randn(50, 8)
    expected = path(*small, 2)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (300 << 20), resource.RLIM_INFINITY))
    done = refused = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            tokens = torch.randn(random.choice([1000, 10_000, 60_000]), 1024)
            ids = torch.randint(8, (len(tokens), random.choice([1, 2, 4])))
            plan = moeroute.plan_from_expert_ids(ids, 8)
            moeroute.unpermute(moeroute.permute(tokens, plan), plan)
        except (MemoryError, RuntimeError):
            refused += 1
        done += 1
        moeroute.empty_cache()
        same(path(*small, 2), expected)
    return done, f"calls, {refused:,} refused for memory"


LEAK = 8  # MiB


def leaks(seconds: float, seed: int) -> Told:
    """The resident memory after a third of the time and at the end; every small call in turn, and refused ones."""
    small = Small()
    x, logits = torch.randn(16, 64), torch.randn(16, 8)
    cheap = [i for i in range(len(small)) if not small.calls[i][0].startswith("nn.")]

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    done, before = 0, 0.0
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        for _ in range(40):
            for i in cheap:
                small.call(i)
        for i in range(len(small)):
            small.call(i)
        path(x, logits, 2)
        for _ in range(10):
            try:
                moeroute.permute(x, None)  # type: ignore[arg-type]
            except (TypeError, ValueError):
                continue
            raise AssertionError("no plan was taken")
        done += 40 * len(cheap) + len(small) + 8 + 10
        if not before and time.monotonic() - begin > seconds / 3:
            before, at = resident(), done
    grown = resident() - before
    if grown > LEAK:
        raise AssertionError(f"{grown:.1f} MiB more after {done - at} calls")
    return done, f"calls of {len(small)} kinds, {max(grown, 0):.1f} MiB more after the last {done - at:,}"


def disk(seconds: float, seed: int) -> Told:
    """New processes that compile kernels: on a disk that gets full, on one for reading only, with a limit on files."""
    code = (
        "import resource, signal, torch, moeroute; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "limit = {limit}; resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit));"
        "plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1]]), 2);"
        "assert moeroute.unpermute(moeroute.permute(torch.ones(1, 3), plan), plan).tolist() == [[2.0] * 3]"
    )
    counts = dict.fromkeys(("limited", "full", "for reading only"), 0)
    left = list(counts)
    with tempfile.TemporaryDirectory() as folder:
        mounted = Path(folder, "mounted")
        mounted.mkdir()
        end = time.monotonic() + seconds
        while any(counts[kind] == 0 for kind in left) or time.monotonic() < end:
            kind = random.choice(left)
            limit = random.choice([0, 100, 5000, 20_000]) if kind == "limited" else resource.RLIM_INFINITY
            program = [sys.executable, "-c", code.format(limit=limit)]
            environment = {**os.environ, "NUMBA_CACHE_DIR": str(mounted)}
            if kind == "limited":
                subprocess.run(program, env={**environment, "NUMBA_CACHE_DIR": folder}, check=True)
            elif not _on_a_disk("ro" if kind != "full" else f"size={random.choice(SIZES)}k", program, environment):
                left.remove(kind)
                continue
            counts[kind] += 1
    told = ", ".join(f"{counts[kind]} {words}" for kind, words in _DISKS.items() if kind in left)
    lacking = "" if len(left) == 3 else "; no full disk, since nothing may be mounted here"
    return sum(counts.values()), f"processes: {told}{lacking}"


SIZES = (4, 16, 64, 128)  # KiB; the kernels of one such process take more
_DISKS = {
    "limited": "whose files may not grow",
    "full": "on a full disk (a tmpfs of 4 to 128 KiB)",
    "for reading only": "on one for reading only",
}


def _on_a_disk(options: str, program: list[str], environment: dict[str, str]) -> bool:
    """Run the program with its folder on a tmpfs, in a name space of its own; whether one can be mounted."""
    script = 'mount -t tmpfs -o "$1" none "$NUMBA_CACHE_DIR" || exit 77; shift; "$@"'
    own = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", options]
    try:
        done = subprocess.run([*own, *program], env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return False
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        return False
    if done.returncode != 0:
        raise AssertionError(f"status {done.returncode} on a disk with {options}: {done.stderr[-500:]}")
    return True


EVERY: dict[str, Callable[[float, int], Told]] = {
    function.__name__: function
    for function in (
        properties, lies, indices, handles, sanitizers, threads, forks, interrupts, memory, leaks, disk
    )
}  # fmt: skip
