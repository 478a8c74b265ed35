"""Fixtures of the whole suite: the backends, and fresh memory that shows when it was not written."""

import os
from collections.abc import Iterator

os.environ.setdefault("MPLBACKEND", "Agg")
# Triton's kernels run on the CPU, in its interpreter. Read when a kernel is defined.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from moeroute import backend as backends

# No deadline: the first example compiles. Derandomised: the suite says the same thing every time.
settings.register_profile(
    "moeroute",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("moeroute")


@pytest.fixture(params=backends.NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that the package has; one that cannot run here skips with the reason."""
    reason = backends.unavailable(request.param)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, or the largest integer, and deterministic mode is on in every test."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    former = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(former)
