"""Fixtures of the whole suite: the backends, and fresh memory that shows when it was not written."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
# OpenMP's threads sleep while they wait. Else those of two workers on two cores spin in each other's way: a fifth of
# the processor time of small calls. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MOEROUTE_QUIET", "1")  # a slow machine announces compilations, which no test expects
# Triton's kernels run on the CPU, in its interpreter. Read when a kernel is defined.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from case_ids import spelled
from moeroute import dispatch
from moeroute.aclnn.library import build

# No deadline: the first example compiles. Derandomised: the suite says the same thing every time.
settings.register_profile(
    "moeroute",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("moeroute")


# Seconds of processor time of files with few, long tests. `--dist loadscope` gives a worker one file after the other:
# these come first, so that none of them is left at the end while the other worker has nothing to do.
LONGEST = {
    "test_triton_compile.py": 180,
    "test_library_programs.py": 110,
    "test_torch.py": 90,
    "test_demo.py": 70,
    "test_reports_arithmetic.py": 30,
    "test_packaging.py": 25,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: -LONGEST.get(item.path.name, 0))  # stable: otherwise the order of the files


def pytest_make_parametrize_id(val: object) -> str | None:
    """Words for what pytest would only number: `dtype0`, `options3`."""
    plain = val is None or isinstance(val, str | int | float | complex | type)
    return None if plain else spelled(val)[:80]


@pytest.fixture(params=dispatch.NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that the package has; one that cannot run here skips with the reason."""
    reason = dispatch.unavailable(request.param)
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


@contextlib.contextmanager
def in_threads(number: int) -> Iterator[None]:
    former = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(former)


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with in_threads(request.param):
        yield request.param


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors, on a machine that may be busy."""
    with in_threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For what only threads can break."""
    with in_threads(2):
        yield


# ---------------------------------------------------------------------------- C++ programs

COMPILER = shutil.which("g++") or shutil.which("c++")
EXAMPLES = Path(__file__).parents[1] / "examples" / "aclnn"


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C library, built once."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    try:
        build._libpython()
    except SystemExit as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("aclnn")
    build.build(folder)
    return folder


@pytest.fixture(scope="session")
def compiled(prefix: Path) -> Callable[[str, str], Path]:
    """`compiled(name, text)`: the program of this source, linked as a user would."""

    def program(name: str, text: str) -> Path:
        source, result = prefix / f"{name}.cpp", prefix / name
        source.write_text(text)
        command = [str(COMPILER), "-std=c++11", "-Wall", "-Wextra", "-Werror", str(source), "-o", str(result)]
        command += [f"-I{prefix}/include", f"-I{EXAMPLES}", f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib"]
        subprocess.run([*command, "-lascendcl", "-lnnopbase", "-lopapi", "-pthread", "-ldl"], check=True)
        return result

    return program


@pytest.fixture(scope="session")
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    def ran(program: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, **environment},
        )

    return ran
