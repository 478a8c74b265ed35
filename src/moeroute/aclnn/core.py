"""What every aclnn operator shares: status codes, two phases, the executor, the words of the checks.

An operator is a function that takes the first phase's arguments, refuses what it must and returns the
size of its workspace and the work. `phases` makes the two calls out of it. Nothing here computes.
"""

import inspect
import operator as operators
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeroute.aclnn.signatures import SIGNATURES, Parameter
from moeroute.check import overlap, overlaps_itself, span
from moeroute.plan import RoutingPlan

# ---------------------------------------------------------------------------- status codes

SUCCESS = 0
PARAM_NULLPTR = 161001
PARAM_INVALID = 161002
INNER = 561000
TILING = 561002
INNER_NULLPTR = 561103

# ---------------------------------------------------------------------------- limits of the documents

MAX_TOPK = 512
MAX_EXPERTS = 2048
MAX_SLOTS = 16_777_215  # upstream sorts ids as float32 keys
MAX_INT8_SLOTS = 10_240  # of MoeTokenPermute with int8 tokens
WORKSPACE = 16 * 2**20

_ub_bytes = int(os.environ.get("MOEROUTE_ACLNN_UB_BYTES", "196608"))


def ub_bytes() -> int:
    """The unified buffer that the documents' size formulas speak of; 196,608 bytes on Atlas A2 and A3."""
    return _ub_bytes


def set_ub_bytes(size: int) -> int:
    """Pretend another chip: the checks of later calls use this size. Returns the former one.

    The environment variable MOEROUTE_ACLNN_UB_BYTES sets it for a process, C programs included.
    """
    global _ub_bytes
    former, _ub_bytes = _ub_bytes, int(size)
    return former


# ---------------------------------------------------------------------------- refusals

_thread = threading.local()


class Refusal(Exception):
    """A check that failed: the status, and what the message says."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def wrong(name: str, wanted: str, got: object, status: int = PARAM_INVALID) -> Refusal:
    """A refusal that names the argument, what was wanted and what came; the caller raises it."""
    return Refusal(status, f"{name} must be {wanted}; got {got}")


def wrong_shape(name: str, wanted: str, tensor: Tensor, status: int = PARAM_INVALID) -> Refusal:
    """A refusal of a tensor's shape; the caller raises it."""
    return wrong(name, wanted, f"shape {list(tensor.shape)}", status)


def remember(message: str) -> None:
    """Keep a message for this thread's next `aclGetRecentErrMsg`."""
    _thread.message = message


def aclGetRecentErrMsg() -> str:
    """What the last failed call of this thread says, and forget it; empty where there is nothing to say."""
    message = getattr(_thread, "message", "")
    _thread.message = ""
    return message


# ---------------------------------------------------------------------------- two phases

Work = Callable[[], None]
FirstPhase = Callable[..., "tuple[int, int, Executor | None]"]
SecondPhase = Callable[..., int]


class Executor:
    """Checked work, waiting for the second phase. It runs once, unless it was made repeatable before."""

    __slots__ = ("_tensors", "_work", "operator", "repeatable", "workspace_size")

    def __init__(self, operator: str, workspace_size: int, work: Work, tensors: dict[str, Any]) -> None:
        self.operator = operator
        self._tensors = [(name, tensor, _layout(tensor)) for name, tensor in tensors.items()]
        self.workspace_size = workspace_size
        self.repeatable = False
        self._work = [work]

    def take(self) -> Work | None:
        """The work, or None where it was taken before."""
        if self.repeatable:
            return self._work[0] if self._work else None
        try:
            return self._work.pop()  # one step: two threads cannot both get it
        except IndexError:
            return None

    def unchanged(self) -> None:
        """Refuse where the caller resized a tensor since the first phase, whose checks then say nothing."""
        for name, tensor, layout in self._tensors:
            if (now := _layout(tensor)) != layout:
                raise wrong(name, f"what the first phase saw, {_described(layout)}", _described(now), INNER)


def _layout(tensor: Any) -> tuple[Any, ...]:
    """Shape, strides and dtype of a tensor or an array."""
    return tensor.shape, tensor.stride() if isinstance(tensor, Tensor) else tensor.strides, tensor.dtype


def _described(layout: tuple[Any, ...]) -> str:
    shape, strides, dtype = layout
    return f"shape {list(shape)}, strides {list(strides)}, {dtype}"


# What one chip takes less than the others, where one was chosen: the operator, its arguments, its work (chips.py).
limits_of_chip: Callable[[str, dict[str, Any], Work], Work] | None = None


def phases(name: str, body: Callable[..., tuple[int, Work]]) -> tuple[FirstPhase, SecondPhase]:
    """The two calls of an operator: aclnn<name>GetWorkspaceSize and aclnn<name>."""
    parameters = SIGNATURES[name].parameters
    signature = inspect.signature(body)
    if tuple(signature.parameters) != SIGNATURES[name].names:
        raise TypeError(f"{body.__name__}{signature} does not follow the prototype of aclnn{name}")
    readers = tuple((parameter, _READERS[parameter.kind]) for parameter in parameters)
    places = tuple((place, p) for place, (p, read) in enumerate(readers) if read is _tensor)

    def first(*arguments: Any, **named: Any) -> tuple[int, int, Executor | None]:
        if named or len(arguments) != len(readers):
            arguments = signature.bind(*arguments, **named).args
        try:
            values = [read(p, value) for (p, read), value in zip(readers, arguments, strict=True)]
            _one_device(parameters, values)
            workspace_size, work = body(*values)
            if limits_of_chip is not None:
                work = limits_of_chip(name, dict(zip(SIGNATURES[name].names, values, strict=True)), work)
        except Refusal as refusal:
            remember(f"aclnn{name}: {refusal}")
            return refusal.status, 0, None
        tensors = {p.name: arguments[place] for place, p in places if arguments[place] is not None}
        return SUCCESS, workspace_size, Executor(name, workspace_size, work, tensors)

    def second(workspace: object, workspace_size: int, executor: Executor | None, stream: object = None) -> int:
        try:
            work = _work_of(name, workspace, workspace_size, executor)
            executor.unchanged()  # type: ignore[union-attr]  # None has no work
        except Refusal as refusal:
            remember(f"aclnn{name}: {refusal}")
            return refusal.status
        try:
            with torch.no_grad():
                work()
        except Exception as error:  # whatever it is, the caller gets a status
            remember(f"aclnn{name}: {str(error) or type(error).__name__}")
            return INNER
        return SUCCESS

    first.__name__ = first.__qualname__ = f"aclnn{name}GetWorkspaceSize"
    second.__name__ = second.__qualname__ = f"aclnn{name}"
    first.__module__ = second.__module__ = body.__module__
    first.__doc__ = body.__doc__
    second.__doc__ = f"Run what {first.__name__} prepared; returns the status."
    first.__signature__ = signature  # type: ignore[attr-defined]
    return first, second


def _work_of(name: str, workspace: object, workspace_size: int, executor: Executor | None) -> Work:
    if executor is None:
        raise Refusal(PARAM_NULLPTR, "executor must not be null")
    if not isinstance(executor, Executor) or executor.operator != name:
        raise wrong("executor", f"one of aclnn{name}GetWorkspaceSize", getattr(executor, "operator", executor))
    try:
        workspace_size = operators.index(workspace_size)
    except TypeError:
        raise wrong("workspaceSize", "an int", type(workspace_size).__name__) from None
    if workspace_size < 0:
        raise wrong("workspaceSize", "at least 0", workspace_size)
    if workspace is None and workspace_size > 0:
        raise Refusal(PARAM_NULLPTR, f"workspace must not be null; got null with {workspace_size} bytes")
    if workspace is not None and workspace_size < executor.workspace_size:
        raise wrong("workspaceSize", f"at least {executor.workspace_size}", workspace_size)
    work = executor.take()
    if work is None:
        raise wrong("executor", "one that did not run yet, or a repeatable one", "an executor that ran")
    return work


# ---------------------------------------------------------------------------- arguments


class _Interface:
    """A NumPy array's memory without its read-only mark: torch warns at the mark, and inputs are only read."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array


def _tensor(parameter: Parameter, value: Any) -> Tensor | None:
    if value is None or type(value) is Tensor:
        if value is not None and value.layout is not torch.strided:
            raise wrong(parameter.name, "a dense tensor", str(value.layout))
        return value
    if isinstance(value, Tensor):
        plain = value.detach().as_subclass(Tensor)
        if (form := getattr(value, "acl_format", None)) is not None:  # detaching drops it
            plain.acl_format = form  # type: ignore[attr-defined]
        return _tensor(parameter, plain)
    if not isinstance(value, np.ndarray):
        raise wrong(parameter.name, "a torch.Tensor, a numpy.ndarray or None", type(value).__name__)
    if not value.flags.writeable:
        if "out" in parameter.kind:
            raise wrong(parameter.name, "writable", "a read-only array")
        value = np.asarray(_Interface(value))
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:  # a dtype torch lacks; negative strides; a foreign byte order
        raise wrong(parameter.name, "an array that torch can share", f"{value.dtype}: {error}") from error


def _integer(parameter: Parameter, value: Any) -> int:
    if type(value) is not int:
        try:
            value = operators.index(value)
        except TypeError:
            raise wrong(parameter.name, "an int", type(value).__name__) from None
    if not -(2**63) <= value < 2**63:
        raise wrong(parameter.name, "an int of 64 bits", f"one of {int(value).bit_length() + 1}")
    return int(value)


def _unsigned(parameter: Parameter, value: Any) -> int:
    value = _integer(parameter, value)
    if not 0 <= value < 2**32:
        raise wrong(parameter.name, "an unsigned int of 32 bits", value)
    return value


def _boolean(parameter: Parameter, value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    if isinstance(value, int | np.bool_ | np.integer) and value in (0, 1):
        return bool(value)
    raise wrong(parameter.name, "a bool", value)


def _double(parameter: Parameter, value: Any) -> float:
    if isinstance(value, int | float | np.integer | np.floating):
        try:
            return float(value)
        except OverflowError:
            raise wrong(parameter.name, "a float of 64 bits", f"an int of {int(value).bit_length() + 1}") from None
    raise wrong(parameter.name, "a float", type(value).__name__)


def _float(parameter: Parameter, value: Any) -> float:
    """The float32 that the number is for a C program."""
    return torch.tensor(_double(parameter, value), dtype=torch.float32).item()


def _integers(parameter: Parameter, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise wrong(parameter.name, "a sequence of ints or None", type(value).__name__)
    return tuple(_integer(parameter, item) for item in value)


_READERS: dict[str, Callable[[Parameter, Any], Any]] = {
    "tensor": _tensor,
    "optional_tensor": _tensor,
    "out": _tensor,
    "optional_out": _tensor,
    "int": _integer,
    "uint32": _unsigned,
    "float": _float,
    "bool": _boolean,
    "double": _double,
    "optional_int_array": _integers,
}


def _one_device(parameters: tuple[Parameter, ...], values: list[Any]) -> None:
    first = None
    for parameter, value in zip(parameters, values, strict=True):
        if isinstance(value, Tensor):
            if first is None:
                first = value.device
            elif value.device != first:
                raise wrong(parameter.name, f"on {first}, as the others", value.device)


# ---------------------------------------------------------------------------- the words of the checks

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MAPS = (torch.int8, torch.bool)

# A tensor may carry `acl_format`, the number of its aclFormat; without it the format is ND. These are
# plain orders of the same elements; all others are private and refused where a document says "format".
_ND = 2
_PLAIN_FORMATS = frozenset((-1, 0, 1, _ND, 27, 30, 47))  # undefined, NCHW, NHWC, ND, NDHWC, NCDHW, NCL


def required(**tensors: Tensor | None) -> None:
    """Refuse null tensors."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise Refusal(PARAM_NULLPTR, f"{name} must not be null")


def typed(name: str, tensor: Tensor | None, *dtypes: torch.dtype, any_format: bool = False) -> None:
    """The dtype, and no private format; nothing for a tensor that is absent."""
    if tensor is None:
        return
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise wrong(name, wanted, str(tensor.dtype).removeprefix("torch."))
    if not any_format and (found := getattr(tensor, "acl_format", _ND)) not in _PLAIN_FORMATS:
        raise wrong(name, "in format ND", f"aclFormat {found}")


def probs_typed(
    name: str,
    probs: Tensor | None,
    tokens_name: str,
    tokens: Tensor,
    status: int = PARAM_INVALID,
    any_format: bool = False,
) -> None:
    """The documents' mixture: the dtype of the tokens, or float32 beside bfloat16."""
    typed(name, probs, *FLOATS, any_format=any_format)
    if probs is None or probs.dtype is tokens.dtype:
        return
    if tokens.dtype is not torch.bfloat16:
        raise wrong(name, f"{tokens.dtype}, as {tokens_name}", probs.dtype, status)
    if probs.dtype is not torch.float32:
        raise wrong(name, f"bfloat16 or float32 beside bfloat16 {tokens_name}", probs.dtype)


def ranked(name: str, tensor: Tensor | None, *ranks: int, status: int = PARAM_INVALID) -> None:
    """Refuse other numbers of dimensions; null passes."""
    if tensor is not None and tensor.ndim not in ranks:
        raise wrong_shape(name, f"{' or '.join(map(str, ranks))}-dimensional", tensor, status)


def shaped(name: str, tensor: Tensor | None, shape: tuple[int, ...], letters: str, status: int = PARAM_INVALID) -> None:
    """Refuse another shape; null passes. `letters` is the shape as the documents write it."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise wrong_shape(name, f"{letters} = {list(shape)}", tensor, status)


def between(name: str, value: int, low: int, high: int, status: int = PARAM_INVALID) -> None:
    """Refuse a number outside [low, high]."""
    if not low <= value <= high:
        raise wrong(name, f"in {low}..{high}", value, status)


def at_least(name: str, value: int, least: int, status: int = PARAM_INVALID) -> None:
    """Refuse a number below `least`."""
    if value < least:
        raise wrong(name, f"at least {least}", value, status)


def divides(name: str, length: int, by_name: str, by: int, status: int = PARAM_INVALID) -> int:
    """length / by, which must be whole."""
    if by <= 0 or length % by:
        raise wrong(name, f"a multiple of {by_name} = {by}", length, status)
    return length // by


def unpadded(name: str, padded: bool, status: int = PARAM_INVALID) -> None:
    """Refuse the padded mode."""
    if padded:
        raise wrong(name, "false, the only mode supported", "true", status)


def absent(name: str, value: object, where: str) -> None:
    """Refuse a tensor where the documents want null."""
    if value is not None:
        raise wrong(name, f"null {where}", "a tensor")


def row_range(name: str, bounds: tuple[int, ...]) -> tuple[int, int]:
    """[s, e) of the With-Ep operators."""
    if len(bounds) != 2:
        raise wrong(name, "of size 2", f"size {len(bounds)}", TILING)
    first, last = bounds
    if first < 0 or last <= first:
        raise wrong(name, "[s, e) with 0 <= s < e", list(bounds), TILING)
    return first, last


def apart(outputs: Mapping[str, Tensor | None], *inputs: Tensor | None) -> None:
    """Outputs lie beside each other and beside the inputs, and their own elements do not overlap.

    Looked at before anything runs, so that no output is written when another one is refused.
    """
    taken = [(tensor, *span(tensor)) for tensor in inputs if tensor is not None]
    for name, out in outputs.items():
        if out is None:
            continue
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise wrong(name, "no inference tensor outside torch.inference_mode()", "one")
        if overlaps_itself(out):
            raise wrong(name, "a tensor whose elements do not overlap", f"strides {list(out.stride())}")
        low, high = span(out)
        if any(first < high and low < last and overlap(out, other) for other, first, last in taken):
            raise wrong(name, "memory of its own", "memory shared with another argument")
        taken.append((out, low, high))


# ---------------------------------------------------------------------------- delivering


def target_of(out: Tensor, *shape: int) -> Tensor:
    """`out` in this shape with whole rows, for a kernel to write; where its strides refuse, memory beside it.

    `deliver` afterwards.
    """
    if tuple(out.shape) != shape:
        try:
            view = out.view(shape)
        except RuntimeError:
            return torch.empty(shape, dtype=out.dtype, device=out.device)
    else:
        view = out
    if shape[-1] > 1 and view.stride(-1) != 1:
        return torch.empty(shape, dtype=out.dtype, device=out.device)
    return view


def deliver(target: Tensor, out: Tensor) -> None:
    """Copy into `out` what `target_of` made beside it; nothing where the kernel wrote into `out` itself."""
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def counts_of(plan: RoutingPlan, cumulative: bool = False) -> Tensor:
    """Tokens of each expert, or their running sums."""
    counts = plan.tokens_up_to_expert if cumulative else plan.tokens_per_expert
    assert counts is not None  # noqa: S101 - for the type checker: a plan with experts has them
    return counts


def zero_filled(*outputs: Tensor | None) -> tuple[int, Work]:
    """What an operator does with nothing in: no workspace, zeros in whatever still has elements."""

    def work() -> None:
        for out in outputs:
            if out is not None:
                out.zero_()

    return 0, work
