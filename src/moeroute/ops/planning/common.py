"""What the constructors of plans share: checks of index tensors and options, `out`, shapes that only the data knows."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from moeroute import check, dispatch
from moeroute.dtypes import LARGEST
from moeroute.ops import layout

# What the kernels read, for each dtype of ids that is taken.
_INDEX_DTYPE = {
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint8: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
_WEIGHT_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
# Which slots a capacity leaves: see `plan_from_expert_ids`. A routing map does not tell the order of choice.
Drop = Literal["position", "weight"]
DropOfIds = Literal["position", "weight", "choice"]
STRIDED = check.STRIDED


def index_tensor(operator: str, argument: str, value: Any, shape: str, dims: tuple[int, ...]) -> Tensor:
    """A contiguous int32 or int64 tensor of one of these ranks, with at most 2^31 - 1 elements."""
    if type(value) is not Tensor:
        check.tensor(operator, argument, value)
    index: Tensor = value
    kind = index.dtype
    dtype = _INDEX_DTYPE.get(kind)
    if dtype is None:
        raise check.wrong_dtype(operator, argument, "of an integer dtype", index)
    if index.dim() not in dims or index.layout is not STRIDED or index.is_nested:
        raise check.wrong_shape(operator, argument, shape, index)
    if index.numel() > LARGEST:
        raise check.wrong_shape(operator, argument, f"{shape} with at most {LARGEST} elements", index)
    if dtype is not kind:
        if kind is torch.uint64:  # what int64 cannot hold is the largest id, not a negative one
            if not torch.compiler.is_compiling():
                index = index.resolve_neg()
            signed = index.contiguous().view(torch.int64)
            return torch.where(signed < 0, 2**63 - 1, signed)
        index = index.to(dtype)
    return index.contiguous()


def optional_integer(operator: str, argument: str, value: Any) -> int | None:
    """An int in [0, 2^31), or None."""
    return None if value is None else check.integer(operator, argument, value, 0, LARGEST)


def deciding_weights(operator: str, value: Any, like: str, first: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weights that decide who stays, contiguous and cut off from autograd."""
    weights = check.tensor(operator, "weights", value)
    if weights.dtype not in _WEIGHT_DTYPES:
        raise check.wrong_dtype(operator, "weights", "float32, float16, bfloat16 or float64", weights)
    if weights.shape != shape and weights.shape != first.shape:
        raise check.wrong_shape(operator, "weights", f"{list(shape)}, as {like}", weights)
    check.same_device(operator, like, first, "weights", weights)
    return weights.detach().contiguous()


def no_data(operator: str, argument: str) -> ValueError:
    """The error of a size that only data could tell, for tensors on meta."""
    return check.wrong_value(operator, argument, "given for tensors on meta, which have no data to count", None)


def expert_bounds(operator: str, num_experts: int, expert_range: Any) -> tuple[int, int]:
    """The experts [first, last) that get rows."""
    if expert_range is None:
        return 0, num_experts
    wanted = f"(lo, hi) with 0 <= lo <= hi <= num_experts = {num_experts}"
    if not isinstance(expert_range, Sequence) or isinstance(expert_range, str):
        raise check.wrong_type(operator, "expert_range", wanted, expert_range)
    if len(expert_range) != 2:
        raise check.wrong_value(operator, "expert_range", wanted, expert_range)
    first, last = (check.integer(operator, "expert_range", bound) for bound in expert_range)
    if not 0 <= first <= last <= num_experts:
        raise check.wrong_value(operator, "expert_range", wanted, expert_range)
    return first, last


def planned(
    operator: str,
    direct: Callable[..., Any],
    registered: Callable[..., Any],
    inputs: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    out: Any,
    num_slots: int | None,
) -> Any:
    """The tensors of a plan, row_of_slot first: from `direct`, where it may be called, else from torch.library.

    `out`: the caller's buffer for row_of_slot, which is checked and gets it; num_slots: S where it is known.
    """
    if out is None:
        return (direct if dispatch.plain(*inputs) else registered)(*inputs, *options)
    check.tensor(operator, "out", out)
    if out.dtype is not torch.int32:
        raise check.wrong_dtype(operator, "out", "torch.int32", out)
    if num_slots is not None and out.numel() != num_slots:
        raise check.wrong_shape(operator, "out", f"of S = {num_slots} elements", out)
    dispatch.direct(operator, "out", out, *inputs)
    check.writable(operator, "out", out, *inputs)
    in_place = out.is_contiguous()
    inputs = tuple(layout.resolved(tensor) for tensor in inputs)
    found = direct(*inputs, *options, out=out.view(-1) if in_place else None)
    if out.numel() != found[0].numel():
        raise check.wrong_shape(operator, "out", f"of S = {found[0].numel()} elements", out)
    if in_place:
        increment_version(out)  # it was written by address, of which autograd knows nothing
    else:
        out.copy_(found[0].view(out.shape))
    return found


def segment_of(
    operator: str, num_experts: int, capacity: int | None, pad: bool, align: int, num_rows: int | None
) -> tuple[int | None, int | None]:
    """Rows of every expert where they are fixed, and R where it is known without looking."""
    if not pad:
        return None, num_rows
    if capacity is None:
        raise check.wrong_value(operator, "capacity", "given with pad_to_capacity or fill", None)
    segment = (capacity + align - 1) // align * align
    if num_rows is None:
        num_rows = num_experts * segment
        if num_rows > LARGEST:
            wanted = f"such that there are at most {LARGEST} rows"
            raise check.wrong_value(operator, "capacity", wanted, f"{num_experts} experts with {segment} rows each")
    return segment, num_rows


def check_segments(
    operator: str,
    first_expert: int,
    last_expert: int,
    num_experts: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
) -> None:
    """Raise where an option of a registered operator would let a kernel write out of bounds."""
    check.integer(operator, "num_experts", num_experts, 0, LARGEST)
    check.integer(operator, "first_expert", first_expert, 0, num_experts)
    check.integer(operator, "last_expert", last_expert, first_expert, num_experts)
    optional_integer(operator, "capacity", capacity)
    check.integer(operator, "align", align, 1, LARGEST)
    optional_integer(operator, "num_rows", num_rows)
    if segment is not None:  # one that is smaller than the capacity would give two experts the same rows
        check.integer(operator, "segment", segment, LARGEST if capacity is None else capacity, LARGEST)
        if num_rows is None and (last_expert - first_expert) * segment > LARGEST:
            raise check.wrong_value(operator, "segment", f"such that there are at most {LARGEST} rows", segment)


def checked_weights(operator: str, weights: Tensor | None, like: str, first: Tensor) -> Tensor | None:
    """The weights that decide who stays, of the shape of `first`; None stays None."""
    return None if weights is None else deciding_weights(operator, weights, like, first, tuple(first.shape))


def or_empty(tensor: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An operator of torch.library has no optional results: an empty tensor stands for None."""
    return torch.empty(0, dtype=dtype, device=like.device) if tensor is None else tensor


def unknown_size() -> Any:
    """A length that only the data knows. Its bound lets the checks of a plan's sizes pass."""
    return torch.library.get_ctx().new_dynamic_size(max=LARGEST)


def fake_vector(like: Tensor, size: int | None, dtype: torch.dtype = torch.int32) -> Tensor:
    """A vector for torch.compile; None: its size depends on the data."""
    return torch.empty(unknown_size() if size is None else size, dtype=dtype, device=like.device)
