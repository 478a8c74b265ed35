"""What a program for Ascend finds beside the operators: the module torch_npu, torch.npu, and devices named "npu".

Everything is the CPU: streams run in order, events are clocks, and "npu" is a name for the device that is there.
"""

import contextlib
import difflib
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moeroute.interop.torch_npu import arguments, testcases

# ---------------------------------------------------------------------------- streams and events


class Event:
    """A point in time. All work is done when a call returns, so that an event that was recorded has happened."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded: float | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        """Take the time."""
        self._recorded = time.perf_counter()

    def wait(self, stream: "Stream | None" = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: all recorded work is done."""
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds between two recorded events."""
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("torch.npu.Event.elapsed_time: both events must be recorded; got one that is not")
        return (end_event._recorded - self._recorded) * 1e3


class Stream:
    """A queue of work, which is done when a call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def wait_stream(self, stream: "Stream") -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that is recorded now."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the stream."""


# ---------------------------------------------------------------------------- torch.npu


def _memory(*_: Any, **__: Any) -> int:
    """Bytes of this process in memory."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _most_memory()


def _most_memory(*_: Any, **__: Any) -> int:
    """The most bytes that this process had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _all_memory(*_: Any) -> tuple[int, int]:
    """Free and all bytes of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _nothing(*_: Any, **__: Any) -> None:
    """A setting of the device, which the CPU has not."""


@contextlib.contextmanager
def _in_place(*_: Any, **__: Any) -> Iterator[None]:
    """A device or stream to work on: the one that is there."""
    yield


_STREAM = Stream()
_NOTHING = (
    *("init", "set_device", "set_stream", "synchronize", "empty_cache", "set_per_process_memory_fraction"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "set_compile_mode", "set_option"),
)


def npu_module() -> ModuleType:
    """The module torch.npu: one device, which is the CPU."""
    module = ModuleType("torch.npu", "One device, which is the CPU.")
    module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
    module.__path__ = []
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "CPU (moeroute)",
        "get_soc_version": lambda: -1,
        "current_stream": lambda *_: _STREAM,
        "default_stream": lambda *_: _STREAM,
        "stream": _in_place,
        "device": _in_place,
        "Stream": Stream,
        "Event": Event,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,  # torch.manual_seed calls it
        "_is_in_bad_fork": lambda: False,
        "initial_seed": torch.initial_seed,
        "seed": torch.seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "memory_allocated": _memory,
        "memory_reserved": _memory,
        "max_memory_allocated": _most_memory,
        "max_memory_reserved": _most_memory,
        "mem_get_info": _all_memory,
        "config": _Settings(),
    }
    values |= dict.fromkeys(_NOTHING, _nothing)
    vars(module).update(values)
    return module


def absent_module() -> ModuleType:
    """The module torch.npu of a process that still knows the name of the device: there is none.

    torch looks for it when it seeds, compiles or asks for an accelerator.
    """
    module = npu_module()
    values: dict[str, Any] = {"is_available": lambda: False, "device_count": lambda: 0, "manual_seed_all": _nothing}
    vars(module).update(values)
    return module


class _Settings:
    """Anything may be set, such as allow_internal_format; the CPU has no use for it."""


# ---------------------------------------------------------------------------- the module torch_npu

VERSION = f"{torch.__version__}{'.' if '+' in torch.__version__ else '+'}moeroute"
CONSTANTS = {
    "int4": arguments.INT4,
    "hifloat8": arguments.HIFLOAT8,
    "float8_e5m2": arguments.FLOAT8_E5M2,
    "float8_e4m3fn": arguments.FLOAT8_E4M3FN,
    "float8_e8m0fnu": arguments.FLOAT8_E8M0FNU,
    "float4_e2m1fn_x2": arguments.FLOAT4_E2M1FN_X2,
    "float4_e1m2fn_x2": arguments.FLOAT4_E1M2FN_X2,
}
_EMPTY = (
    "contrib",
    "contrib.transfer_to_npu",
    "testing",
    "testing.common_distributed",
    "testing.common_utils",
    "testing.decorator",
    "testing.testcase",
    "profiler",
    "utils",
    "_C",
)


def torch_npu_modules(functions: dict[str, Callable[..., Any]], npu: ModuleType) -> dict[str, ModuleType]:
    """torch_npu and its submodules by their names."""
    root = _module("torch_npu", "The functions of a Mixture-of-Experts layer for Ascend, on this machine.", functions)
    vars(root).update(functions | CONSTANTS | {"__version__": VERSION, "npu": npu})
    modules = {"torch_npu": root, "torch_npu.npu": npu}
    for name in _EMPTY:
        path = f"torch_npu.{name}"
        modules[path] = _module(path, "Nothing of it is built.", {})
        parent, _, child = path.rpartition(".")
        setattr(modules[parent], child, modules[path])
    for name, values in testcases.NAMES.items():
        vars(modules[f"torch_npu.testing.{name}"]).update({value.__name__: value for value in values})
    return modules


def _module(name: str, text: str, functions: dict[str, Callable[..., Any]]) -> ModuleType:
    module = ModuleType(name, text)
    module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=True)
    module.__spec__.has_location = True
    module.__path__ = []
    module.__file__ = __file__

    def missing(attribute: str) -> Any:
        nearest = difflib.get_close_matches(attribute, functions, n=3, cutoff=0.5)
        there = f"; the nearest that it has: {', '.join(nearest)}" if nearest else ""
        raise AttributeError(f"module {name!r} of moeroute has no {attribute!r}{there}", name=attribute, obj=module)

    vars(module)["__getattr__"] = missing
    return module


# ---------------------------------------------------------------------------- devices and types of torch

_NAMED = re.compile(r"npu(:\d+)?")
_SPEAKS_IN_LETTERS = (torch.einsum,)  # their strings are no devices


def here(value: Any) -> Any:
    """The CPU for a device named "npu", anything else as it is."""
    if isinstance(value, str):
        return "cpu" if _NAMED.fullmatch(value) else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def _numbered(value: Any) -> Any:
    """The CPU for the number of a device, as `torch.npu.current_device()` is, that torch takes for an NPU's."""
    return "cpu" if type(value) is int and torch.device(value).type == "npu" else value


class OnThisDevice(TorchFunctionMode):
    """Devices named "npu", and those given by a number, are the CPU, in every call of torch in this thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SPEAKS_IN_LETTERS:
            return func(*args, **(kwargs or {}))
        args = tuple(map(here, args))
        kwargs = {name: here(value) for name, value in (kwargs or {}).items()}
        if "device" in kwargs:
            kwargs["device"] = _numbered(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _numbered(args[1]), *args[2:])
        return func(*args, **kwargs)


class _Generators(type):
    """Every generator of torch is an instance; a call makes one of torch's own."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)

    def __call__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator(here(device))


class Generator(metaclass=_Generators):
    """torch.Generator for a device named "npu" too."""


class Autocast(torch.amp.autocast_mode.autocast):
    """torch.autocast for a device named "npu" too."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        device_type = "cpu" if _NAMED.fullmatch(device_type) else device_type
        super().__init__(device_type, *args, **kwargs)


def moved(self: Any, *_: Any, **__: Any) -> Any:
    """`.npu()` of a tensor or a module: it is there already."""
    return self


def histc(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.histc that counts integers on the CPU too, in float32; the result has the dtype of the input."""

    def counted(input: Any, *args: Any, **kwargs: Any) -> Any:
        if input.is_cpu and not input.is_floating_point():
            return original(input.to(torch.float32), *args, **kwargs).to(input.dtype)
        return original(input, *args, **kwargs)

    return counted


def register_hccl() -> None:
    """The backend "hccl" of torch.distributed: gloo, on the CPU. A process keeps it."""
    distributed = torch.distributed
    if distributed.is_gloo_available() and "hccl" not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(
            "hccl",
            lambda store, rank, size, timeout: distributed.ProcessGroupGloo(store, rank, size, timeout),
            devices=["cpu"],
        )


def comm_name(backend: Any, rank: int, init_comm: bool = True) -> str:
    """The name by which the functions of several ranks find a backend's process group."""
    for group in torch.distributed.distributed_c10d._world.pg_map:
        if group._get_backend(torch.device("cpu")) is backend:
            return str(group.group_name)
    raise RuntimeError("get_hccl_comm_name: the backend must be of a process group of this process; got another one")
