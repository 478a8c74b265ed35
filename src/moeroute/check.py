"""Validators. Every error of the package is made here, in one form:

    moeroute.permute: tokens must be [T, H] with T = 6, as the plan; got shape [5, 16]

`wrong_*` build the exception and the caller raises it, so the good path formats nothing.
"""

import math
import sys
from typing import Any, TypeVar

import torch
from torch import Tensor

from moeroute.dtypes import FLOATS, LARGEST

LARGEST_FLOAT = sys.float_info.max
_String = TypeVar("_String", bound=str)
LARGEST_FLOAT32 = torch.finfo(torch.float32).max
STRIDED = torch.strided  # a name of a module is found faster than an attribute of torch


def wrong_value(operator: str, argument: str, wanted: str, got: object) -> ValueError:
    """The error for a value: `moeroute.operator: argument must be wanted; got ...`."""
    return ValueError(f"moeroute.{operator}: {argument} must be {wanted}; got {got}")


def wrong_type(operator: str, argument: str, wanted: str, got: object) -> TypeError:
    """The error for an argument of another Python type."""
    return TypeError(f"moeroute.{operator}: {argument} must be {wanted}; got {type(got).__name__}")


def wrong_host(operator: str, package: str, wanted: str, got: str) -> ImportError:
    """The error for a host package that is absent or of another version."""
    return ImportError(f"moeroute.{operator}: {package} must be {wanted}; got {got}")


def missing(operator: str, name: str, what: str) -> NotImplementedError:
    """The error for a feature that this package lacks."""
    return NotImplementedError(f"moeroute.{operator}: {name} needs {what}, which this package lacks")


def wrong_shape(operator: str, argument: str, wanted: str, tensor: Tensor) -> ValueError:
    """Of a tensor that has no strides it says that instead: some of those do not even tell their shape."""
    if not is_dense(tensor):
        return not_dense(operator, argument, tensor)
    return wrong_value(operator, argument, wanted, f"shape {list(tensor.shape)}")


def not_dense(operator: str, argument: str, tensor: Tensor) -> ValueError:
    """The error for a sparse or nested tensor."""
    got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
    return wrong_value(operator, argument, "a dense tensor", got)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory at strides: no sparse, nested or mkldnn tensor."""
    return tensor.layout is STRIDED and not tensor.is_nested


def wrong_dtype(operator: str, argument: str, wanted: str, tensor: Tensor) -> TypeError:
    """The error for a tensor of another dtype."""
    return TypeError(f"moeroute.{operator}: {argument} must be {wanted}; got {tensor.dtype}")


def tensor(operator: str, argument: str, value: Any) -> Tensor:
    """A dense tensor that is all here."""
    if not isinstance(value, Tensor):
        raise wrong_type(operator, argument, "a torch.Tensor", value)
    if type(value) is not Tensor and hasattr(value, "to_local"):
        wanted = "a torch.Tensor of this process, such as DTensor.to_local() gives"
        raise wrong_type(operator, argument, wanted, value)
    if not is_dense(value):
        raise not_dense(operator, argument, value)
    return value


def shaped(operator: str, argument: str, value: Any, shape: tuple[int | None, ...], like: Tensor | None = None) -> None:
    """A dense tensor of this shape, in which None stands for any size, on the device of `like`."""
    tensor(operator, argument, value)
    fits = value.ndim == len(shape)
    if fits:
        for size, found in zip(shape, value.shape, strict=True):
            if size is not None and size != found:
                fits = False
    if not fits:
        sizes = ", ".join("*" if size is None else str(size) for size in shape)
        raise wrong_shape(operator, argument, f"of shape [{sizes}]", value)
    if like is not None and value.device != like.device:
        raise wrong_value(operator, argument, f"on {like.device}, as the others", value.device)


def integer(operator: str, argument: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """An int (or a symbolic one) inside [minimum, maximum]; a bool is not an int here.

    Inside torch.jit.trace the sizes of tensors, and what is computed of them, are tensors.
    """
    if type(value) is not int and (not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool)):
        size = isinstance(value, Tensor) and torch._C._is_tracing() and value.dtype is torch.int64
        if not size:
            raise wrong_type(operator, argument, "an int", value)
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        if maximum is None:
            wanted = f"at least {minimum}"
        elif minimum is None:
            wanted = f"at most {maximum}"
        else:
            wanted = f"in {minimum}..{maximum}"
        raise wrong_value(operator, argument, wanted, value)
    return value  # a SymInt stands for an int under torch.compile


def number(operator: str, argument: str, value: Any) -> float:
    """A finite float (an int is one too)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong_type(operator, argument, "a float", value)
    if not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:  # math.isfinite breaks the graph of torch.compile
        raise wrong_value(operator, argument, "finite", value)
    return value


def same_device(operator: str, first_argument: str, first: Tensor, argument: str, other: Tensor) -> None:
    """Refuse two tensors on different devices."""
    if first.device != other.device:
        raise wrong_value(operator, argument, f"on {first.device}, as {first_argument}", other.device)


def finite_in(operator: str, argument: str, value: Any, dtype: torch.dtype) -> float:
    """A finite float that stays finite in float32, unless it meets float64."""
    result = float(number(operator, argument, value))
    if abs(result) > LARGEST_FLOAT32 and dtype is not torch.float64:
        raise wrong_value(operator, argument, "finite in float32", value)
    return result


def at_most_rows(operator: str, total: int) -> None:
    """Rows are numbered in int32; only the data knows how many padding makes of them."""
    if total > LARGEST:
        raise wrong_value(operator, "align", f"such that there are at most {LARGEST} rows", f"{total} rows")


def at_most_slots(total: int) -> None:
    """Slots are numbered in int32."""
    if total > LARGEST:
        wanted = f"one with at most {LARGEST} true entries"
        raise wrong_value("plan_from_routing_map", "routing_map", wanted, total)


def one_slot_each(out: Tensor, total: int) -> None:
    """A buffer for row_of_slot of a map, whose number of true entries only the data knows."""
    if out.numel() != total:
        wanted = f"of S = {total} elements, one for each true entry"
        raise wrong_shape("plan_from_routing_map", "out", wanted, out)


def flag(operator: str, argument: str, value: Any) -> bool:
    """A bool, and no number that is equal to one."""
    if value is not True and value is not False:
        raise wrong_type(operator, argument, "a bool", value)
    return bool(value)


def float_dtype(operator: str, argument: str, value: Any, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    """One of the allowed floating-point dtypes."""
    known = isinstance(value, torch.dtype)
    if known and value in allowed:
        return value
    wanted = "one of " + ", ".join(map(str, allowed))
    if known:
        raise TypeError(str(wrong_value(operator, argument, wanted, value)))
    raise wrong_type(operator, argument, wanted, value)


def one_of(operator: str, argument: str, value: Any, allowed: tuple[_String, ...]) -> _String:
    """One of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:  # an array compares element by element
        raise wrong_value(operator, argument, "one of " + ", ".join(map(repr, allowed)), repr(value))
    return value


def span(tensor: Tensor) -> tuple[int, int]:
    """The bytes [first, last) from the tensor's lowest to its highest element."""
    if tensor.numel() == 0:
        return 0, 0
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.numel() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two of the tensor's elements may share memory: never False where they do.

    Exact for up to two dimensions of more than one element. With more of them each dimension must step over all that
    the ones with smaller strides reach, as in every view that slicing and transposing make; what interleaves in
    another way counts as overlapping.
    """
    if tensor.numel() == 0 or tensor.is_contiguous():
        return False
    steps = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if len(steps) == 2:
        (small, rows), (large, columns) = steps
        # Elements meet where a steps of the one are b steps of the other; a / b cancelled is the first such place.
        common = math.gcd(small, large)
        return small == 0 or (large // common < rows and small // common < columns)
    reach = 0
    for stride, size in steps:
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _rows(tensor: Tensor) -> tuple[int, int]:
    """Bytes from one row to the next, and bytes of a row; stride 0 where the tensor is no such table."""
    size = tensor.element_size()
    if tensor.ndim == 1:
        return tensor.stride(0) * size, size
    if tensor.ndim == 2 and (tensor.stride(1) == 1 or tensor.shape[1] == 1):
        return tensor.stride(0) * size, tensor.shape[1] * size
    return 0, 0


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share a byte: never False where they do.

    Columns of one table lie apart though their spans cross; other interleaved layouts count as shared.
    """
    first, last = span(a)
    low, high = span(b)
    if last <= low or high <= first:
        return False
    stride, width = _rows(a)
    other_stride, other_width = _rows(b)
    if stride == 0 or stride != other_stride:
        return True
    column = (low - first) % stride
    return column < width or column + other_width > stride


def buffer(operator: str, argument: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A tensor of the caller's of this shape and dtype; `writable` looks at its memory."""
    tensor(operator, argument, out)
    if tuple(out.shape) != shape:
        raise wrong_shape(operator, argument, f"of shape {list(shape)}", out)
    if out.dtype is not dtype:
        raise wrong_dtype(operator, argument, str(dtype), out)


def writable(operator: str, argument: str, out: Tensor, *inputs: Tensor | None) -> None:
    """A buffer to write into: no memory shared inside it or with an input, on the inputs' device.

    Kernels write by address; `torch.autograd.graph.increment_version` afterwards tells autograd.
    """
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise wrong_value(operator, argument, "no inference tensor outside torch.inference_mode()", "one")
    if out.is_conj() or out.is_neg():
        raise wrong_value(operator, argument, "a tensor without lazy conjugation or negation", "one with it")
    if overlaps_itself(out):
        raise wrong_value(operator, argument, "a tensor whose elements do not overlap", f"strides {out.stride()}")
    low, high = span(out)
    if low == 0 and high:  # on meta, or its storage was given back
        raise wrong_value(operator, argument, "a tensor that has memory", f"one on {out.device} without")
    for other in inputs:
        if other is None:
            continue
        if other.device != out.device:
            raise wrong_value(operator, argument, f"on {other.device}, as the inputs", out.device)
        first, last = span(other)
        if first < high and low < last and overlap(out, other):
            raise wrong_value(operator, argument, "memory of its own", "memory shared with an input")


# ---------------------------------------------------------------------------- tensors beside a plan

_tensor = tensor  # where a parameter has its name


def matrix(operator: str, argument: str, tensor: Any, letter: str, size: int, plan: Any) -> None:
    """Dense [`size`, H] on the plan's device."""
    if type(tensor) is not Tensor:
        _tensor(operator, argument, tensor)
    try:
        shape = tensor.shape
    except RuntimeError:  # a nested tensor has none
        raise not_dense(operator, argument, tensor) from None
    if len(shape) != 2 or shape[0] != size or tensor.layout is not STRIDED:
        raise wrong_shape(operator, argument, f"[{letter}, H] with {letter} = {size}, as the plan", tensor)
    if not (tensor.is_cpu and plan.row_of_slot.is_cpu):  # half the time of comparing devices
        device_of_plan(operator, argument, tensor, plan.row_of_slot)


def quantized(operator: str, argument: str, tensor: Tensor) -> TypeError:
    """Its bits mean nothing without its scale."""
    return wrong_dtype(operator, argument, "of a dtype that is not quantized", tensor)


def device_of_plan(operator: str, argument: str, tensor: Tensor, slots: Tensor) -> None:
    """Raise where a tensor is not on the plan's device."""
    if tensor.device != slots.device:
        raise wrong_value(operator, argument, f"on {slots.device}, as the plan", tensor.device)


def floating(operator: str, argument: str, tensor: Tensor) -> None:
    """Raise where a tensor is of no floating dtype."""
    if tensor.dtype not in FLOATS:
        raise wrong_dtype(operator, argument, "float16, bfloat16, float32 or float64", tensor)


def partner(operator: str, argument: str, tensor: Any, name: str, other: Tensor) -> None:
    """A second matrix: hidden size and dtype as the first."""
    if tensor.shape[-1] != other.shape[-1]:
        wanted = f"as wide as {name}, with H = {other.shape[-1]}"
        raise wrong_shape(operator, argument, wanted, tensor)
    if tensor.dtype is not other.dtype:
        raise wrong_dtype(operator, argument, f"{other.dtype}, as {name}", tensor)


def weights_kind(operator: str, weights: Any, rows_name: str, rows: Tensor | None, slots: Tensor) -> None:
    """slots: row_of_slot."""
    if type(weights) is not Tensor:
        tensor(operator, "weights", weights)
    if weights.layout is not STRIDED or weights.is_nested:
        raise not_dense(operator, "weights", weights)
    dtype = weights.dtype
    if dtype not in FLOATS:
        raise wrong_dtype(operator, "weights", "float16, bfloat16, float32 or float64", weights)
    if rows is not None:
        other = rows.dtype
        if other not in FLOATS:
            raise wrong_dtype(operator, rows_name, "floating with weights", rows)
        if dtype is not other and other is torch.float64:
            raise wrong_dtype(operator, "weights", f"float64 with float64 {rows_name}", weights)
        if dtype is not other and dtype is torch.float64:
            raise wrong_dtype(operator, "weights", f"float32 or narrower with {other} {rows_name}", weights)
    if not (weights.is_cpu and slots.is_cpu):
        device_of_plan(operator, "weights", weights, slots)


def weight_per_slot(operator: str, weights: Any, rows_name: str, rows: Tensor, slots: Tensor) -> None:
    """Raise where weights are not [S], one a slot."""
    weights_kind(operator, weights, rows_name, rows, slots)
    if weights.ndim != 1 or weights.shape[0] != slots.shape[0]:
        raise wrong_shape(operator, "weights", f"[S] with S = {slots.shape[0]}, as the plan", weights)


def weights_of_plan(operator: str, argument: str, weights: Tensor, plan: Any) -> None:
    """[T, E] where the plan has expert_of_slot, else [T, K], else (tokens with different numbers) [S]."""
    shape = weights.shape
    if plan.expert_of_slot is None and shape == (plan.num_tokens, plan.topk):
        return
    if plan.expert_of_slot is not None:
        if weights.ndim != 2 or shape[0] != plan.num_tokens or plan.num_experts not in (None, shape[1]):
            experts = "" if plan.num_experts is None else f" and E = {plan.num_experts}"
            wanted = f"[T, E] with T = {plan.num_tokens}{experts}, as the plan"
            raise wrong_shape(operator, argument, wanted, weights)
    elif plan.topk is not None:
        if weights.ndim != 2 or shape[0] != plan.num_tokens or shape[1] != plan.topk:
            wanted = f"[T, K] with T = {plan.num_tokens} and K = {plan.topk}, as the plan"
            raise wrong_shape(operator, argument, wanted, weights)
    elif weights.ndim != 1 or shape[0] != plan.num_slots:
        raise wrong_shape(operator, argument, f"[S] with S = {plan.num_slots}, as the plan", weights)
