"""`moeroute verify`: the digests of every case on a backend and device, against those that the package ships.

No reference runs unless something differs: then it says in words what stands where. Inputs of another seed have no
digests; there the reference is the measure.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from moeroute import dispatch
from moeroute.conformance.case import Case, Results, digests_of, expected_digests, inputs_digest, moved
from moeroute.conformance.table import chosen
from moeroute.dispatch import Backend

CPU = torch.device("cpu")
Place = tuple[Backend, torch.device]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One case at one place: `words` say what is wrong; none where nothing is."""

    case: str
    place: str
    words: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.words


def can_run(backend: Backend, device: torch.device) -> bool:
    """Whether this backend takes tensors of this device, and is not the reference on the CPU, the digests' origin."""
    if backend == "reference" and device.type == "cpu":
        return False
    try:
        dispatch.choose("moeroute.verify", backend, device)
    except ValueError:
        return False
    return True


def flushes_subnormals() -> bool:
    """Whether `torch.set_flush_denormal(True)` holds in this thread."""
    return torch.tensor(1e-30).mul(1e-10).item() == 0.0


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in this thread alone: for many small tensors that is faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def subnormals_kept() -> Iterator[None]:
    """torch computes as without `torch.set_flush_denormal`, in this thread alone: others keep their mode."""
    if not flushes_subnormals():
        yield
        return
    torch.set_flush_denormal(False)
    try:
        with one_thread():
            yield
    finally:
        torch.set_flush_denormal(True)


def run(
    places: Sequence[Place],
    only: str = "",
    seed: int = 0,
    part: tuple[int, int] = (0, 1),
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> list[Outcome]:
    """Every case whose name contains `only`, on each backend and device.

    Args:
        places: backends with their devices.
        only: a part of the case's name.
        seed: of the inputs; 0 has digests, others are compared with the reference.
        part: (i, n), the i-th of n parts of the cases.
        tell: called as cases are done, with how many of how many.
    """
    number, parts = part
    wanted = chosen(only)
    wanted = wanted[len(wanted) * number // parts : len(wanted) * (number + 1) // parts]
    found = []
    for done, case in enumerate(wanted, 1):
        found += verified(case, places, seed)
        tell(done, len(wanted))
    return found


def verified(case: Case, places: Sequence[Place], seed: int = 0) -> list[Outcome]:
    """One case at every place that can run it."""
    with subnormals_kept(), one_thread():
        arguments = case.arguments(seed)
        if seed == 0:
            expected = dict(expected_digests()[case.name])
            if inputs_digest(arguments) != expected.pop("inputs"):
                words = "the inputs are not those of the digests: does this torch or NumPy round otherwise?"
                return [Outcome(case.name, "inputs", (words,), 0.0)]
        else:
            expected = digests_of(case.run(arguments, "reference"))
    found = []
    for backend, device in places:
        if case.through.startswith("moeroute") and (backend, device.type) != ("cpu", "cpu"):
            continue  # functions without `backend=`: the default one answers
        start = time.perf_counter()
        where = backend if device.type == "cpu" else f"{backend} on {device}"
        try:
            results = case.run(moved(arguments, device), backend)
            wrong = _differences(case, seed, results, expected)
        except Exception as error:  # a kernel that does not compile or run: the others are still worth knowing
            wrong = [f"{type(error).__name__}: {error}"]
        found.append(Outcome(case.name, where, tuple(wrong), time.perf_counter() - start))
    return found


def _differences(case: Case, seed: int, results: Results, expected: dict[str, str]) -> list[str]:
    actual = digests_of(results)
    if actual == expected:
        return []
    with subnormals_kept(), one_thread():
        arguments = case.arguments(seed)
        right = case.run(arguments, "reference")
    if seed == 0 and digests_of(right) != expected:
        return ["differs from the digest, and so does the reference on this machine: its torch computes otherwise"]
    from moeroute.conformance.words import explain

    return explain(case, arguments, results, right) or [f"{sorted(results)} where {sorted(right)} were expected"]
