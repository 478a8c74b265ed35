"""Who answers a call, and why not the others.

`reference` is plain torch and runs anywhere; `cpu` is Numba; `triton` serves NVIDIA, AMD and Ascend
devices, and CPU tensors in Triton's interpreter. Nothing is imported before it is needed. An explicit
`backend=` never falls back: it raises with the reason.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from moeroute import check

Backend = Literal["reference", "cpu", "triton"]
FILES: dict[Backend, str] = {"reference": "reference", "cpu": "on_numba", "triton": "on_triton"}
NAMES: tuple[Backend, ...] = get_args(Backend)
# Of ops, along the data path.
ROOMS = ("gating", "planning", "maps", "indices", "rows", "weights", "quantization", "activations")
OLDEST_TRITON = (3, 2)
OLDEST_INTERPRETER = (3, 6)  # older ones write int64 into int32 tensors, beyond their ends
OLDEST_CAPABILITY = (8, 0)  # the first with bfloat16

# Python leaves the lock of a module that another thread imports to a forked child, which would wait for it for ever. So
# a fork waits for our imports.
_importing = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release
    )

_modules: dict[tuple[str, str], ModuleType] = {}
_chosen: dict[tuple[str | None, torch.device, torch.dtype | None], Backend] = {}
_implementations: dict[tuple[str, str | None, torch.device, torch.dtype], ModuleType] = {}
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_depth = torch._C._len_torch_dispatch_stack
_function_depth = torch._C._len_torch_function_stack
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_tracing = torch._C._is_tracing
_profiling = torch._C._autograd._profiler_enabled


def unavailable(name: str) -> str | None:
    """Why the backend cannot run in this environment, or None where it can."""
    if name not in FILES:
        return "there is no backend of this name"
    if name == "triton" and name not in _reasons:
        _reasons[name] = _triton_reason()
    return _reasons.get(name)


def _cpu_reason() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    numba = sys.modules.get("numba")  # imported only when it is needed
    disabled = os.environ.get("NUMBA_DISABLE_JIT", "0") if numba is None else numba.config.DISABLE_JIT
    if disabled not in ("", "0", 0):
        return "numba compiles nothing where NUMBA_DISABLE_JIT is set"
    return None


def _triton_reason() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install '.[triton]' in a clone)"
    version = importlib.import_module("triton").__version__
    found = tuple(map(int, version.split(".")[:2]))
    if found < OLDEST_TRITON:
        return f"triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if interpreted() and found < OLDEST_INTERPRETER:
        oldest = ".".join(map(str, OLDEST_INTERPRETER))
        return (
            f"the interpreter of triton {version} writes beyond the ends of tensors; it needs {oldest} (a GPU does not)"
        )
    if interpreted() or torch.cuda.is_available() or (hasattr(torch, "npu") and torch.npu.is_available()):
        return None
    return (
        "there is no NVIDIA, AMD or Ascend device (for Triton's interpreter set TRITON_INTERPRET=1 in the environment)"
    )


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors."""
    return importlib.import_module("moeroute.ops.triton_kit").INTERPRETED


def _triton_refuses(device: torch.device) -> str | None:
    """Why the triton backend cannot serve this device."""
    if device.type == "cpu":
        if interpreted():
            return None
        return "a CPU tensor, which it takes only with TRITON_INTERPRET=1 set before triton is imported"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            oldest = ".".join(map(str, OLDEST_CAPABILITY))
            return f"{device} of capability {'.'.join(map(str, capability))}, older than {oldest}; use 'reference'"
        return None
    if device.type in ("cuda", "npu"):
        return None
    return f"{device}, which is no NVIDIA, AMD or Ascend device; use 'reference'"


# A table, not functools.cache: torch.compile warns of that and traces into importlib. What triton can do is
# found out on the first question: looking for devices wakes them.
_reasons = {"reference": None, "cpu": _cpu_reason()}


def choose(operator: str, backend: str | None, device: torch.device, dtype: torch.dtype | None = None) -> Backend:
    """The backend for tensors of this device and dtype; an explicit one that cannot serve them raises."""
    key = (backend, device, dtype)
    try:
        found = _chosen.get(key)
    except TypeError:  # unhashable
        raise check.wrong_type(operator, "backend", "a str or None", backend) from None
    if found is None:
        found = _chosen[key] = _choose(operator, backend, device, dtype)
    return found


def _choose(operator: str, backend: str | None, device: torch.device, dtype: torch.dtype | None) -> Backend:
    if backend is None:
        if dtype is torch.float64:
            return "reference"
        if device.type == "cpu":
            return "cpu" if unavailable("cpu") is None else "reference"
        if device.type in ("cuda", "npu") and unavailable("triton") is None and _triton_refuses(device) is None:
            return "triton"
        return "reference"
    if backend not in FILES:
        raise check.wrong_value(operator, "backend", "one of " + ", ".join(map(repr, NAMES)), repr(backend))
    if (reason := unavailable(backend)) is not None:
        raise check.wrong_value(operator, "backend", "one that is available", f"{backend!r}: {reason}")
    if backend == "cpu" and device.type != "cpu":
        raise check.wrong_value(operator, "backend", f"one that serves {device}", "'cpu'")
    if backend == "triton" and (reason := _triton_refuses(device)) is not None:
        raise check.wrong_value(operator, "backend", "one that serves these tensors", f"'triton' for {reason}")
    if backend != "reference" and dtype is torch.float64:
        raise check.wrong_value(operator, "backend", "'reference' for torch.float64", repr(backend))
    return backend


def module(room: str, name: Backend) -> ModuleType:
    """The implementation `moeroute.ops.<room>.<file of the backend>`."""
    found = _modules.get((room, name))
    if found is None:
        with _importing:
            found = importlib.import_module(f"moeroute.ops.{room}.{FILES[name]}")
        if name != "cpu":  # whose launchers call nothing that autocast knows, and are too short for this
            _keep_from_autocast(found)
        _modules[room, name] = found
    return found


def _keep_from_autocast(implementation: ModuleType) -> None:
    """What backends compute with has its dtypes from the arithmetic's rules, whatever autocast says."""

    def apart(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with torch._C._DisableAutocast():
                return function(*arguments, **options)

        return call

    for name, function in vars(implementation).items():
        if inspect.isfunction(function) and function.__module__ == implementation.__name__ and name[0] != "_":
            setattr(implementation, name, apart(function))


def implementation(room: str, operator: str, backend: str | None, tensor: Tensor) -> ModuleType:
    """`module` of what `choose` gives for this tensor."""
    key = (room, backend, tensor.device, tensor.dtype)
    try:
        found = _implementations.get(key)
    except TypeError:  # unhashable
        raise check.wrong_type(operator, "backend", "a str or None", backend) from None
    if found is None:
        found = module(room, choose(operator, backend, tensor.device, tensor.dtype))
        _implementations[key] = found
    return found


def plain(*tensors: Tensor | None, profiler: bool = True) -> bool:
    """True where a verb may call its launcher directly: 9 µs a call instead of 14, 32 with gradients.

    That is: nothing records (autograd, forward AD, functorch, torch.jit.trace), nothing watches (dispatch and
    function modes, torch.compile, the profiler unless `profiler` is False) and all tensors are ordinary ones. A
    tensor that torch negates lazily is none: the dispatcher negates it.
    """
    if _compiling() or forward_ad._current_level >= 0 or _transforms_active() or _dispatch_depth() or _function_depth():
        return False
    if _tracing() or (profiler and _profiling()):
        return False
    recording = _grad_enabled()
    for tensor in tensors:
        if tensor is not None:
            kind = type(tensor)
            if (kind is not Tensor and kind is not Parameter) or (recording and tensor.requires_grad):
                return False
            if tensor.is_neg():
                return False
    return True


def direct(operator: str, argument: str, *tensors: Tensor | None) -> None:
    """Refuse what has no registered operator (`out`, `init`, `bias`) where torch records or watches."""
    recording = _grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if recording and not _compiling():
        raise check.wrong_value(
            operator, argument, "None where gradients are recorded (use torch.no_grad())", "a tensor"
        )
    # Compiling first: what resolves cannot be traced.
    if _compiling() or not plain(
        *(t if t is None else t.resolve_conj().resolve_neg() for t in tensors), profiler=False
    ):
        wanted = (
            "None under torch.compile, torch.jit.trace, torch.func, forward mode, dispatch modes"
            " and with tensor subclasses"
        )
        raise check.wrong_value(operator, argument, wanted, "a tensor")
