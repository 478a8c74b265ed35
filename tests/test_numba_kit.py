"""How a CPU kernel is declared, launched and split over threads, on the kernels of small_kernels.py."""

import threading
import time
from pathlib import Path

import pytest
import torch

from moeroute import dispatch

if dispatch.unavailable("cpu"):
    pytest.skip("no CPU backend", allow_module_level=True)

from moeroute.ops.numba_kit import launch
from moeroute.ops.numba_kit.launch import FLOATS, SERIAL_WORK, kernel
from small_kernels import Line, first_negative, items_not_last, needs_memory, scale, unknown_type


class Compiler:
    """Numba's compiler of a function, which takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.overloads = {(): "compiled"}
        self._cache = None

    def compile(self, signature: object) -> None:
        time.sleep(self.seconds)


def slow_to_compile(x: int) -> int:
    return x + 1


pytestmark = pytest.mark.usefixtures("two_threads")


def scaled(dtype: torch.dtype, items: int, work: int, stride: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """`1.5 x - 2` into every stride-th element, and how often each item was visited."""
    x = torch.arange(items, dtype=torch.float32).to(dtype)
    out = torch.full((items * stride,), -1.0, dtype=dtype)
    seen = torch.zeros(items, dtype=torch.int32)
    scale(
        dtype,
        items=items,
        work=work,
        out=Line(out.data_ptr(), stride),
        x=Line(x.data_ptr(), 1),
        seen=seen.data_ptr(),
        factor=1.5,
        shift=-2,
    )
    return out, seen


@pytest.mark.parametrize("dtype", FLOATS)
def test_arguments_arrive(dtype: torch.dtype) -> None:
    """Numbers below 32 are exact in every dtype."""
    out, seen = scaled(dtype, 20, 0, stride=3)
    assert out[::3].tolist() == [1.5 * i - 2 for i in range(20)]
    assert set(out[1::3].tolist()) == {-1.0}
    assert seen.tolist() == [1] * 20


@pytest.mark.parametrize("items", (1, 2, 3, 1001))
def test_threads_visit_every_item_once(items: int) -> None:
    out, seen = scaled(torch.float32, items, SERIAL_WORK)
    assert seen.tolist() == [1] * items
    assert out.tolist() == scaled(torch.float32, items, 0)[0].tolist() == [1.5 * i - 2 for i in range(items)]


def test_no_items() -> None:
    out, _ = scaled(torch.float32, 0, SERIAL_WORK)
    assert out.numel() == 0


def test_a_serial_kernel_returns_an_integer() -> None:
    values = torch.tensor([3, 0, -1, -2], dtype=torch.int32)
    assert first_negative(None, items=4, work=SERIAL_WORK, values=values.data_ptr()) == 2
    assert first_negative(None, items=2, work=0, values=values.data_ptr()) == -1


def test_arguments_are_named() -> None:
    address = torch.zeros(4, dtype=torch.int32).data_ptr()
    launched = [
        lambda: first_negative(None, items=1, work=0),
        lambda: first_negative(None, items=1, work=0, values=address, value=address),
        lambda: first_negative(None, 1, 0, address),
        lambda: first_negative(None, items=1, values=address),
    ]
    for launch_it in launched:
        with pytest.raises(TypeError):
            launch_it()


def test_parameters_end_with_the_items() -> None:
    with pytest.raises(TypeError, match="the last parameters of items_not_last must be lo and hi"):
        kernel()(items_not_last)


def test_parameters_have_types_of_the_record() -> None:
    with pytest.raises(TypeError, match="cannot be of type float64"):
        kernel()(unknown_type)


@pytest.mark.parametrize("work", (0, SERIAL_WORK), ids=("serial", "parallel"))
def test_no_memory_inside_a_kernel(work: int) -> None:
    sizes = torch.tensor([0, 0, 0, 1], dtype=torch.int32)
    with pytest.raises(MemoryError):
        needs_memory(None, items=4, work=work, sizes=sizes.data_ptr(), unit=1 << 58)
    sizes = torch.full((4,), 7, dtype=torch.int32)
    needs_memory(None, items=4, work=work, sizes=sizes.data_ptr(), unit=1)  # and the next call works
    assert sizes.tolist() == [1] * 4


@pytest.mark.parametrize("quiet", (None, "0", "1"))
def test_a_long_compilation_is_announced(
    quiet: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "dispatcher", lambda function, parallel: Compiler(seconds=0.2))
    monkeypatch.setattr(launch, "PATIENCE_SECONDS", 0.01)
    if quiet is None:
        monkeypatch.delenv("MOEROUTE_QUIET", raising=False)
    else:
        monkeypatch.setenv("MOEROUTE_QUIET", quiet)
    assert launch._compiled(slow_to_compile, ()) == "compiled"
    said = capfd.readouterr().err
    if quiet == "1":
        assert said == ""
    else:
        (line,) = said.splitlines()
        assert line.startswith("moeroute: compiling slow_to_compile for the CPU")
        assert "moeroute info --warm" in line
        assert "MOEROUTE_QUIET=1" in line


def test_a_short_compilation_is_not(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launch, "dispatcher", lambda function, parallel: Compiler(seconds=0))
    monkeypatch.delenv("MOEROUTE_QUIET", raising=False)
    assert launch._compiled(slow_to_compile, ()) == "compiled"
    assert capfd.readouterr().err == ""


def test_only_a_compilation_starts_a_thread_that_announces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    started: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: started.append(timer))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MOEROUTE_QUIET", raising=False)
    for compilations in (1, 1):  # compiled, then loaded
        assert launch._compiled(slow_to_compile, (numba.int64,)).entry_point(1) == 2
        assert len(started) == compilations
