"""What surrounds the CPU kernels: processors without half precision, threads that cannot start, kernels on disk, modes."""

import ctypes
import importlib.util
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute import dispatch
from moeroute.conformance import verification
from moeroute.testing import assert_same_bits

pytestmark = pytest.mark.skipif(dispatch.unavailable("cpu") is not None, reason="no CPU kernels here")


def run(program: str, **environment: str) -> str:
    """What the program prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# ---------------------------------------------------------------------------- half precision in integers


@pytest.fixture
def converters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kernels from float16 to float32 and back (blocks, then a tail, then element by element), without the processor."""
    import numba

    from moeroute.ops.numba_kit import pointers
    from moeroute.ops.numba_kit.blocks import load, load_tail, store, store_tail
    from moeroute.ops.numba_kit.pointers import LANES

    monkeypatch.setattr(pointers, "converts_halves", lambda: False)

    def convert(target: Any, source: Any, size: int) -> None:
        whole = size // 2 // LANES * LANES
        for i in range(0, whole, LANES):
            store(target, i, load(source, i))
        store_tail(target, whole, load_tail(source, whole, 33), 33)
        for i in range(whole + 33, size):
            target[i] = source[i]

    def converted(source: Tensor, dtype: torch.dtype) -> Tensor:
        target = torch.empty(source.shape, dtype=dtype)
        kinds = pointers.POINTER[dtype], pointers.POINTER[source.dtype]
        numba.njit(error_model="numpy")(convert).compile((*kinds, numba.int64))(
            target.data_ptr(), source.data_ptr(), source.numel()
        )
        return target

    return converted


def every_half() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)


def test_every_half_is_widened_in_integers(converters: Any) -> None:
    for halves in (every_half(), every_half().roll(1 << 15)):  # either half of them in blocks
        assert_same_bits(converters(halves, torch.float32), halves.float())
    some = torch.tensor([0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x8001] * 64, dtype=torch.int32)
    exact = torch.tensor([2.0**-24, 1023 * 2.0**-24, 2.0**-14, 1.0, 65504.0, torch.inf, -(2.0**-24)] * 64)
    assert_same_bits(converters(some.to(torch.int16).view(torch.float16), torch.float32), exact)


def test_every_rounding_to_half_in_integers(converters: Any) -> None:
    """Every half, every middle between two, and the float32 numbers beside all of these."""
    finite = torch.arange(0x7C01, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
    finite[-1] = 65536.0
    exact = torch.cat((finite, (finite[1:] + finite[:-1]) / 2)).float()
    bits = exact.view(torch.int32)
    near = torch.cat([(bits + step).clamp(min=0).view(torch.float32) for step in (-1, 0, 1)])
    odd = torch.tensor([1e-45, 1e-40, 2.0**-25, 1e5, 3e38, torch.inf, torch.nan])
    values = torch.cat((near, odd, -near, -odd))
    for shifted in (values, values.roll(values.numel() // 2)):
        assert_same_bits(converters(shifted, torch.float16), shifted.half())
    worked = {65519.996: 65504.0, 65520.0: torch.inf, 2.0**-25: 0.0, 1.0000001 * 2.0**-25: 2.0**-24, 2049.0: 2048.0,
              2051.0: 2052.0, -3 * 2.0**-25: -(2.0**-23)}  # fmt: skip
    given, wanted = torch.tensor([*worked] * 64), torch.tensor([*worked.values()] * 64)
    assert_same_bits(converters(given, torch.float16).float(), wanted)


WITHOUT_HALF = """
    import torch, moeroute
    from moeroute.ops.numba_kit import pointers
    from moeroute.testing import assert_same_bits
    torch.manual_seed(0)
    logits = torch.randn(70, 12).half().requires_grad_()
    plan = moeroute.plan_from_expert_ids(torch.randint(0, 5, (70, 2)), 5)
    rows = (torch.randn(140, 67) * 10.0 ** torch.randint(-8, 4, (140, 67))).half()
    weights = torch.randn(140)
    found = {}
    for backend in ("cpu", "reference"):
        gating = moeroute.gating_topk(logits, 3, score="sigmoid", weights_dtype=torch.float16, backend=backend)
        gradient = torch.autograd.grad(gating.weights.float().square().sum(), logits)[0]
        found[backend] = (gating, gradient, moeroute.combine(rows, plan, weights, backend=backend))
    assert_same_bits(found["cpu"], found["reference"])
    print(pointers.converts_halves())
"""


def test_a_processor_without_half_precision() -> None:
    by_processor = run(WITHOUT_HALF, NUMBA_CPU_NAME="generic")
    if platform.machine() in ("x86_64", "AMD64"):
        assert by_processor == "False\n"


# ---------------------------------------------------------------------------- Numba's switches

LARGE_CALLS = """
    import torch, moeroute
    from moeroute.testing import assert_same_bits
    torch.set_num_threads(2)
    plan = moeroute.plan_from_expert_ids(torch.arange(1024).reshape(512, 2) % 8, 8)
    tokens = torch.randn(512, 1024)
    for _ in range(2):
        rows = moeroute.permute(tokens, plan, backend="cpu")
        output = moeroute.unpermute(rows, plan, backend="cpu")
    assert_same_bits(rows, moeroute.permute(tokens, plan, backend="reference"))
    assert_same_bits(output, moeroute.unpermute(rows, plan, backend="reference"))
"""


@pytest.mark.parametrize("layer", ("tbb", "safe", "none"))
def test_a_threading_layer_that_is_not_installed(layer: str) -> None:
    if layer != "none" and importlib.util.find_spec("tbb") is not None:
        pytest.skip("TBB is installed")
    said = run(LARGE_CALLS, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2")
    assert said.count("moeroute runs in one thread, with the same bits") == 1
    assert f"NUMBA_THREADING_LAYER={layer}" in said


def test_info_names_a_threading_layer_that_is_not_installed() -> None:
    said = run("from moeroute import cli; cli.main(['info'])", NUMBA_THREADING_LAYER="none", NUMBA_NUM_THREADS="2")
    (line,) = [line for line in said.splitlines() if line.startswith("threading layer")]
    assert line.split(maxsplit=2)[2].startswith("none: NUMBA_THREADING_LAYER=none")


@pytest.mark.parametrize("imported", ("", "import numba"))
def test_numba_that_compiles_nothing(imported: str) -> None:
    said = run(
        f"""
        {imported}
        import torch, moeroute
        from moeroute import cli
        print(moeroute.gating_topk(torch.tensor([[1.0, 3.0, 2.0]]), 2).expert_ids.tolist())
        try:
            moeroute.gating_topk(torch.ones(1, 3), 2, backend="cpu")
        except ValueError as error:
            print(error)
        cli.main(["info"])
        """,
        NUMBA_DISABLE_JIT="1",
    )
    reason = "numba compiles nothing where NUMBA_DISABLE_JIT is set"
    assert said.startswith("[[1, 2]]\n")
    assert f"backend must be one that is available; got 'cpu': {reason}" in said
    assert f"not available: {reason}" in said


# ---------------------------------------------------------------------------- kernels on disk


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def garbled(file: Path) -> None:
    file.write_bytes(bytes(range(255, -1, -1)) * 9)


def zeroed_in_the_middle(file: Path) -> None:
    """A page that never reached the disk: of object code it leaves a pickle that looks whole."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 16] = bytes(16)
    file.write_bytes(content)


def lengthened(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


DAMAGES = (emptied, halved, garbled, zeroed_in_the_middle, lengthened)


def add_two(x: int) -> int:
    return x + 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import numba

    from moeroute.ops.numba_kit import cache

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "damaged", set())
    monkeypatch.setattr(cache, "unwritten", None)
    return tmp_path


def compiled_anew() -> bool:
    """Make and call the kernel `add_two`, as a new process does."""
    import numba

    from moeroute.ops.numba_kit import launch

    compiler = launch.dispatcher(add_two)
    assert compiler.compile((numba.int64,))(40) == 42
    return sum(compiler.stats.cache_misses.values()) == 1


@pytest.mark.parametrize("suffix", (".nbi", ".nbc"))
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_anew(damage: Callable[[Path], None], suffix: str, folder: Path) -> None:
    from moeroute.ops.numba_kit import cache

    assert compiled_anew()
    assert not compiled_anew()
    (file,) = folder.rglob(f"*{suffix}")
    damage(file)
    assert compiled_anew()
    assert cache.damaged == {str(file)}
    assert cache.remarks() == "; 1 damaged files, compiled anew"
    assert not compiled_anew()


@pytest.mark.parametrize("suffix", (".nbi", ".nbc"))
def test_a_file_that_cannot_be_replaced(suffix: str, folder: Path) -> None:
    from moeroute.ops.numba_kit import cache

    assert compiled_anew()
    (file,) = folder.rglob(f"*{suffix}")
    file.unlink()
    file.mkdir()
    assert compiled_anew()
    assert compiled_anew()
    assert "not all could be written" in cache.remarks()
    assert file.name in cache.remarks()


def test_a_missing_file_is_no_damage(folder: Path) -> None:
    from moeroute.ops.numba_kit import cache

    assert compiled_anew()
    (file,) = folder.rglob("*.nbc")
    file.unlink()
    assert compiled_anew()
    assert not compiled_anew()
    assert cache.remarks() == ""


LOADED = """
    import sys, torch
    torch.set_num_threads(2)
    from moeroute.ops.numba_kit.launch import SERIAL_WORK
    from small_kernels import first_negative, needs_memory
    sizes = torch.full((4,), 7, dtype=torch.int32)
    for work in (0, SERIAL_WORK):  # memory, threads and exceptions of compiled code
        needs_memory(None, items=4, work=work, sizes=sizes.data_ptr(), unit=1)
        try:
            needs_memory(None, items=4, work=work, sizes=sizes.data_ptr(), unit=1 << 58)
        except MemoryError:
            print(sizes.tolist())
    print("numba.np.linalg" in sys.modules)  # what a compilation imports, needed or not
    if {another}:
        values = torch.tensor([3, -1, -2], dtype=torch.int32)
        print(first_negative(None, items=3, work=0, values=values.data_ptr()))
"""


def test_what_is_compiled_is_loaded_without_the_compiler(tmp_path: Path) -> None:
    settings = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    results = "[1, 1, 1, 1]\n[1, 1, 1, 1]\n"
    script = LOADED.format(another=False)
    assert run(script, **settings) == f"{results}True\n"
    assert run(script, **settings) == f"{results}False\n"
    # A kernel that is not there yet is compiled beside those that were loaded.
    script = LOADED.format(another=True)
    assert run(script, **settings) == f"{results}False\n1\n"
    assert run(script, **settings) == f"{results}False\n1\n"


INFO = """
    import sys, torch, moeroute
    from moeroute import cli
    {before}
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 2], [2, 1]]), 3)
    rows = moeroute.permute(torch.tensor([[1.0], [2.0]]), plan)
    print(moeroute.unpermute(rows, plan).tolist())
    torch.set_num_threads(1)
    cli.main(["info"])
"""


def test_a_process_with_a_damaged_cache_serves_and_says_so(tmp_path: Path) -> None:
    def info(before: str = "pass") -> str:
        said = run(INFO.format(before=before), NUMBA_CACHE_DIR=str(tmp_path))
        assert said.startswith("[[2.0], [4.0]]\n")
        (line,) = [line for line in said.splitlines() if line.startswith("kernel cache")]
        return line.split(maxsplit=2)[2]

    clean = info()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) >= 6  # an index and a data file for each of three kernels
    for number, file in enumerate(files):
        DAMAGES[number % len(DAMAGES)](file)
    assert re.fullmatch(re.escape(clean) + r"; \d+ damaged files, compiled anew", info())
    assert info() == clean
    pytest.importorskip("resource", reason="no limits on a process here")
    for file in files:
        file.unlink()
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))"
    assert info(limit).startswith(f"{clean}; not all could be written: ")
    assert not list(tmp_path.rglob("*.tmp.*"))


# ---------------------------------------------------------------------------- the processor's mode

FLUSHED = """
    import math, torch, moeroute
    torch.set_num_threads(2)
    plan = moeroute.plan_from_expert_ids(torch.arange(8192).reshape(4096, 2) % 8, 8)
    rows = torch.ones(8192, 64)
    if {threads_first}:
        moeroute.unpermute(rows, plan)  # its threads keep their mode
    weights = torch.full((4096, 2), 1e-39)
    tiny = rows * 2.0**-140
    (bits,) = weights.view(torch.int32).unique().tolist()
    assert torch.set_flush_denormal(True)
    output, grad_weights = moeroute.unpermute_backward(rows[:4096], tiny, plan, weights)
    print((output.view(torch.int32) == bits).all().item(), (grad_weights.view(torch.int32) == 1 << 15).all().item())
    output = moeroute.unpermute(rows, plan, weights)
    print((output.view(torch.int32) == 2 * bits).all().item())
    gating = moeroute.gating_topk(torch.tensor([[0.0, -100.0]]).expand(4096, 2), 2, score="softmax")
    print((gating.weights.view(torch.int32)[:, 1] == round(math.exp(-100) * 2**149)).all().item())
    print(torch.tensor(1e-30).mul(1e-10).item(), torch.ones(1 << 20).mul(1e-30).mul(1e-10).max().item())
"""


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


def product(x: float, y: float) -> float:
    return torch.tensor(x).mul(y).item()


@pytest.mark.usefixtures("flushing")
@pytest.mark.filterwarnings("ignore:The value of the smallest subnormal")  # NumPy, when Numba first asks it for limits
@pytest.mark.parametrize(
    "only",
    ("sigmoid", "topk_softmax", "combine", "row_dots", "spread", "unpermute", "permute_weights_backward"),
)
def test_subnormal_numbers_are_kept_where_they_are_flushed(only: str) -> None:
    outcomes = verification.run([("cpu", torch.device("cpu"))], only)
    assert outcomes
    assert [outcome for outcome in outcomes if not outcome.passed] == []
    assert product(1e-30, 1e-10) == 0.0, "the kernels must leave the mode as it was"


@pytest.mark.usefixtures("flushing")
def test_what_the_reference_loses_where_numbers_are_flushed() -> None:
    """So the measure of `verify` is computed without."""
    plan = moeroute.plan_from_expert_ids(torch.zeros(1, 1, dtype=torch.int64), 1)
    assert (
        moeroute.combine(torch.ones(1, 1), plan, torch.full((1,), 1e-30), backend="reference").mul(1e-10).item() == 0.0
    )
    with verification.subnormals_kept():
        assert product(1e-30, 1e-10) > 0.0
    assert product(1e-30, 1e-10) == 0.0


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("threads_first", (False, True))
def test_subnormal_numbers_do_not_depend_on_the_thread(threads_first: bool) -> None:
    said = run(FLUSHED.format(threads_first=threads_first), NUMBA_NUM_THREADS="2")
    assert said.splitlines()[:3] == ["True True", "True", "True"]
    assert float(said.split()[4]) == 0.0


@pytest.mark.usefixtures("flushing", "two_threads")
@pytest.mark.parametrize("parallel", (False, True), ids=("serial", "parallel"))
def test_a_kernel_that_raises_restores_the_mode(parallel: bool) -> None:
    from moeroute.ops.numba_kit.launch import SERIAL_WORK
    from small_kernels import needs_memory

    sizes = torch.ones(4, dtype=torch.int32)
    with pytest.raises(MemoryError):
        needs_memory(None, items=4, work=SERIAL_WORK * parallel, sizes=sizes.data_ptr(), unit=1 << 58)
    assert product(1e-30, 1e-10) == 0.0


def test_every_operation_rounds_to_nearest_whatever_the_mode() -> None:
    """C's `fesetround` in this thread."""
    upwards = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())
    if upwards is None or sys.platform != "linux":
        pytest.skip("the number of the mode is not known here")
    library = ctypes.CDLL("libm.so.6")
    plan = moeroute.plan_from_expert_ids(torch.zeros(1, 3, dtype=torch.int64), 1)
    rows, weights = torch.rand(3, 200), torch.rand(3)
    logits = torch.randn(3, 100)

    def results() -> Any:
        return moeroute.combine(rows, plan, weights, backend="cpu"), moeroute.gating_topk(logits, 5, backend="cpu")

    expected = results()
    former = library.fegetround()
    assert library.fesetround(upwards) == 0
    try:
        found = results()
        kept = library.fegetround()
        torch_rounds_up = torch.tensor(1.0).add(1e-10).item() > 1.0
    finally:
        library.fesetround(former)
    assert kept == upwards
    assert torch_rounds_up
    assert_same_bits(found, expected)
