"""Products over expert segments: one linear map per expert, plain torch.

The first sizes[0] rows belong to expert 0, the next sizes[1] to expert 1, and so on; rows beyond the last segment
are padding and are never read. Two operators, closed under differentiation:

    y = grouped_linear(x, w, c)   y_e = x_e w_e^T + c_e   dx = grouped_linear(dy, w^T)   dw = grouped_outer(dy, x)
                                                          dc = grouped_outer(dy, 1)
    g = grouped_outer(a, b)       g_e = a_e^T b_e         da = grouped_linear(b, dg)     db = grouped_linear(a, dg^T)

Autograd's own way, weight[e] in a loop, would build a gradient of the size of all experts for each.

The sizes are read, and the products are a loop over the experts; but bfloat16 on a CUDA device goes to torch's
`grouped_mm`, which takes the ends of the segments from the device, so that nothing waits for it.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeroute import check, memory
from moeroute.dtypes import FLOATS
from moeroute.ops.register import register

_WITHOUT_AUTOCAST = ("meta", "lazy", "vulkan")  # not asked of torch: torch.compile of 2.10 cannot


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for a type of device."""
    return device not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(device)


def in_autocast(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product in autocast's dtype where it is on, but for float64 ones."""
    device = rows.device.type
    if autocast_is_on(device):
        autocast = torch.get_autocast_dtype(device)
        rows, weight = (t if t.dtype == torch.float64 else t.to(autocast) for t in (rows, weight))
        if bias is not None and bias.dtype != torch.float64:
            bias = bias.to(autocast)
    return rows, weight, bias


def grouped_linear(rows: Tensor, weight: Tensor, sizes: Tensor | Sequence[int], bias: Tensor | None = None) -> Tensor:
    """One linear map per expert over contiguous segments: ``out[segment e] = rows[segment e] @ weight[e].T + bias[e]``.

    Rows beyond the last segment are padding: they are not read, their output and their gradient are 0, with a bias too.
    Every product is written where it belongs, forward and backward; nothing is copied or concatenated.
    Like `torch.nn.Linear` it works in autocast's dtype where autocast is on. Differentiable to any order,
    forward mode included.

    Args:
        rows: [R, I], float.
        weight: [E, O, I], the dtype of rows; of any strides, so a weight that is stored as [E, I, O] is
            given as ``weight.transpose(1, 2)``, and its gradient lies as the weight does.
        sizes: [E] rows of each expert, in order: ints, or an int64 tensor. One on a GPU is fetched, a
            synchronisation, but not for bfloat16 with I and O that are multiples of 8 (there it is not looked at
            either: a negative size counts as 0, and segments end at R).
        bias: [E, O], the dtype of rows, or None.

    Returns:
        [R, O] in the dtype of rows.

    Raises:
        ValueError: a wrong shape, device or number of rows.
        TypeError: a wrong type or dtype.

    >>> import torch
    >>> from moeroute.nn import grouped_linear
    >>> rows = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> grouped_linear(rows, torch.tensor([[[10.0]], [[100.0]]]), [2, 1]).T
    tensor([[ 10.,  20., 300.,   0.]])
    >>> grouped_linear(rows, torch.tensor([[[10.0]], [[100.0]]]), [2, 1], torch.tensor([[1.0], [2.0]])).T
    tensor([[ 11.,  21., 302.,   0.]])
    """
    operator = "nn.grouped_linear"
    check.tensor(operator, "rows", rows)
    check.tensor(operator, "weight", weight)
    if rows.dtype not in FLOATS:
        raise check.wrong_dtype(operator, "rows", "float16, bfloat16, float32 or float64", rows)
    if rows.ndim != 2:
        raise check.wrong_shape(operator, "rows", "[R, I]", rows)
    if weight.ndim != 3 or weight.shape[2] != rows.shape[1]:
        raise check.wrong_shape(operator, "weight", f"[E, O, I] with I = {rows.shape[1]}, as rows", weight)
    check.same_device(operator, "rows", rows, "weight", weight)
    if bias is not None:
        check.tensor(operator, "bias", bias)
        if bias.shape != weight.shape[:2]:
            raise check.wrong_shape(operator, "bias", f"[E, O] = {list(weight.shape[:2])}, as weight", bias)
        check.same_device(operator, "rows", rows, "bias", bias)
    sizes = check_sizes(operator, "sizes", sizes, rows.shape[0])
    if sizes.dtype != torch.int64:
        raise check.wrong_dtype(operator, "sizes", "torch.int64", sizes)
    if sizes.ndim != 1 or sizes.shape[0] != weight.shape[0]:
        raise check.wrong_shape(operator, "sizes", f"[E] with E = {weight.shape[0]}, as weight", sizes)
    rows, weight, bias = in_autocast(rows, weight, bias)
    if weight.dtype != rows.dtype:
        raise check.wrong_dtype(operator, "weight", f"{rows.dtype}, as rows", weight)
    if bias is not None and bias.dtype != rows.dtype:
        raise check.wrong_dtype(operator, "bias", f"{rows.dtype}, as rows", bias)
    if sizes.is_meta and not rows.is_meta:
        raise check.wrong_value(operator, "sizes", f"on {rows.device} or the CPU", sizes.device)
    if not sizes.is_meta and not by_ends(sizes, rows, rows.shape[1], weight.shape[1]):
        sizes = sizes.cpu()
    return linear_of_segments(rows, weight, sizes, bias)


def grouped_outer(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    """The other product of the pair, in the dtype of its operands: ``out[e] = left[segment e].T @ right[segment e]``.

    Args:
        left: [R, I], float.
        right: [R, O], the dtype of left.
        sizes: int64 [E], as for `grouped_linear`.
    """
    if not sizes.is_meta and not by_ends(sizes, left, left.shape[1], right.shape[1]):
        sizes = sizes.cpu()
    return outer_of_segments(left, right, sizes)


def by_ends(sizes: Tensor, rows: Tensor, *widths: int) -> bool:
    """Whether the sizes stay on the device: `grouped_mm` takes bfloat16 there, in rows of 16 bytes.

    The derivatives have the same widths, and so the same answer.
    """
    on_device = sizes.is_cuda and rows.is_cuda and rows.dtype is torch.bfloat16 and hasattr(F, "grouped_mm")
    return on_device and all(width % 8 == 0 for width in widths)


def check_sizes(operator: str, argument: str, sizes: Any, num_rows: int) -> Tensor:
    """The rows of each expert as a tensor. One that is given is read, and looked at, by the kernel."""
    if isinstance(sizes, Tensor):
        return check.tensor(operator, argument, sizes)
    if not isinstance(sizes, Sequence) or isinstance(sizes, str | bytes):
        raise check.wrong_type(operator, argument, "an int64 tensor or a sequence of ints", sizes)
    for size in sizes:
        check.integer(operator, argument, size)
    _check_counts(operator, argument, sizes, num_rows)
    return torch.tensor(sizes, dtype=torch.int64, device="cpu")


# ---------------------------------------------------------------------------- checks


def _check_counts(operator: str, argument: str, counts: Sequence[int], num_rows: int) -> None:
    if any(count < 0 for count in counts) or sum(counts) > num_rows:
        wanted = f"at least 0 each and no more than the {num_rows} rows in all"
        raise check.wrong_value(operator, argument, wanted, counts)


def _segments(operator: str, sizes: Tensor, num_rows: int) -> list[tuple[int, int]]:
    counts = sizes.tolist()
    _check_counts(operator, "sizes", counts, num_rows)
    stops = list(itertools.accumulate(counts))
    return [(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def _check_operands(operator: str, sizes: Tensor, **operands: Tensor) -> None:
    """int64 sizes, and one dtype and device of the others: a registered operator may be called by anybody."""
    if sizes.dtype is not torch.int64:
        raise check.wrong_dtype(operator, "sizes", "torch.int64", sizes)
    (name, first), *others = operands.items()
    check.float_dtype(operator, f"the dtype of {name}", first.dtype, FLOATS)
    for argument, other in others:
        check.same_device(operator, name, first, argument, other)
        if other.dtype is not first.dtype:
            raise check.wrong_dtype(operator, argument, f"{first.dtype}, as {name}", other)


# ---------------------------------------------------------------------------- registration


def _grouped_linear_kernel(rows: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None) -> Tensor:
    operator = "nn.grouped_linear"
    check.shaped(operator, "rows", rows, (None, None))
    check.shaped(operator, "weight", weight, (None, None, rows.shape[1]))
    check.shaped(operator, "sizes", sizes, (weight.shape[0],))
    if bias is None:
        _check_operands(operator, sizes, rows=rows, weight=weight)
    else:
        check.shaped(operator, "bias", bias, (weight.shape[0], weight.shape[1]))
        _check_operands(operator, sizes, rows=rows, weight=weight, bias=bias)
    if by_ends(sizes, rows, rows.shape[1], weight.shape[1]) and _has_grouped_mm(rows.device):
        return _linear_by_ends(rows, weight, sizes, bias)
    segments = _segments(operator, sizes, rows.shape[0])
    out = memory.empty((rows.shape[0], weight.shape[1]), rows.dtype, rows.device)
    for expert, (start, stop) in enumerate(segments):
        if stop > start:
            matrix = weight[expert].t()
            if bias is None:
                torch.mm(rows[start:stop], matrix, out=out[start:stop])
            else:
                torch.addmm(bias[expert], rows[start:stop], matrix, out=out[start:stop])
    out[segments[-1][1] if segments else 0 :].zero_()
    return out


def _grouped_outer_kernel(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    operator = "nn.grouped_outer"
    check.shaped(operator, "left", left, (None, None))
    check.shaped(operator, "right", right, (left.shape[0], None))
    check.shaped(operator, "sizes", sizes, (None,))
    _check_operands(operator, sizes, left=left, right=right)
    if by_ends(sizes, left, left.shape[1], right.shape[1]) and _has_grouped_mm(left.device):
        return _outer_by_ends(left, right, sizes)
    segments = _segments(operator, sizes, left.shape[0])
    out = memory.empty((len(segments), left.shape[1], right.shape[1]), left.dtype, left.device)
    for expert, (start, stop) in enumerate(segments):
        if stop > start:
            torch.mm(left[start:stop].t(), right[start:stop], out=out[expert])
        else:
            out[expert].zero_()
    return out


def _has_grouped_mm(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _linear_by_ends(rows: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None) -> Tensor:
    ends = _ends(sizes, rows.shape[0])
    out = F.grouped_mm(_aligned(rows), _aligned(weight).transpose(1, 2), offs=ends)
    # The expert of each row; one more, for the rows behind the last segment, which are left as they were.
    expert = torch.searchsorted(ends, torch.arange(rows.shape[0], dtype=torch.int32, device=ends.device), right=True)
    if bias is not None:
        out = out + F.pad(bias, (0, 0, 0, 1)).index_select(0, expert)
    return out.masked_fill_((expert == sizes.shape[0]).unsqueeze(1), 0)


def _outer_by_ends(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    return F.grouped_mm(_aligned(left).t(), _aligned(right), offs=_ends(sizes, left.shape[0]))


def _ends(sizes: Tensor, num_rows: int) -> Tensor:
    """int32, ascending and inside the rows, whatever the sizes."""
    return sizes.clamp(0, num_rows).cumsum(0).clamp(max=num_rows).to(torch.int32)


def _aligned(tensor: Tensor) -> Tensor:
    """Rows or columns next to each other, and 16 bytes from one to the next and at the start."""
    *batch, height, width = tensor.stride()
    line = width if height == 1 else height
    fits = 1 in (height, width) and line > 1
    if fits and all(stride % 8 == 0 for stride in (*batch, line, tensor.storage_offset())):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])  # nothing depends on the bias


def _grouped_linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
    rows, weight, sizes = ctx.saved_tensors
    needs_rows, needs_weight, _, needs_bias = ctx.needs_input_grad
    grad_rows = linear_of_segments(grad, weight.transpose(1, 2), sizes) if needs_rows else None
    grad_weight = grad_of_weight(weight, grad, rows, sizes) if needs_weight else None
    grad_bias = grad_of_bias(grad, sizes) if needs_bias else None
    return grad_rows, grad_weight, None, grad_bias


def grad_of_weight(weight: Tensor, grad: Tensor, rows: Tensor, sizes: Tensor) -> Tensor:
    """Of a `grouped_linear`. A gradient of other strides than the weight would be copied when it is kept."""
    if weight.stride(1) == 1:  # a transposed weight [E, I, O]
        return outer_of_segments(rows, grad, sizes).transpose(1, 2)
    return outer_of_segments(grad, rows, sizes)


def grad_of_bias(grad: Tensor, sizes: Tensor) -> Tensor:
    """Of a `grouped_linear`. Eight columns of ones, since a row of one is too short for `grouped_mm`."""
    return outer_of_segments(grad, grad.new_ones(grad.shape[0], 8), sizes)[..., 0]


def _grouped_outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    left, right, sizes = ctx.saved_tensors
    needs_left, needs_right, _ = ctx.needs_input_grad
    grad_left = linear_of_segments(right, grad, sizes) if needs_left else None
    grad_right = linear_of_segments(left, grad.transpose(1, 2), sizes) if needs_right else None
    return grad_left, grad_right, None


def _grouped_linear_tangent(
    ctx: Any, inputs: tuple[Any, ...], output: Tensor, tangents: tuple[Tensor | None, ...]
) -> Tensor | None:
    rows, weight, sizes, _ = inputs
    move_rows, move_weight, _, move_bias = tangents
    terms = []
    if move_rows is not None:
        terms.append(linear_of_segments(move_rows, weight, sizes))
    if move_weight is not None:
        terms.append(linear_of_segments(rows, move_weight, sizes))
    if move_bias is not None:
        terms.append(linear_of_segments(rows.new_ones(rows.shape[0], 1), move_bias[..., None], sizes))
    return sum(terms[1:], terms[0]) if terms else None


def linear_of_segments(rows: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None = None) -> Tensor:
    """`grouped_linear` of operands that were looked at, outside autocast."""
    result: Tensor = _grouped_linear(rows, weight, sizes, bias)
    return result


def outer_of_segments(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    """`grouped_outer` of operands that were looked at."""
    result: Tensor = _grouped_outer(left, right, sizes)
    return result


_grouped_linear = register(
    "grouped_linear(Tensor rows, Tensor weight, Tensor sizes, Tensor? bias) -> Tensor",
    _grouped_linear_kernel,
    lambda rows, weight, sizes, bias: rows.new_empty(rows.shape[0], weight.shape[1]),
    derivative=_grouped_linear_backward,
    setup=_save_inputs,
    tangent=_grouped_linear_tangent,
)
_grouped_outer = register(
    "grouped_outer(Tensor left, Tensor right, Tensor sizes) -> Tensor",
    _grouped_outer_kernel,
    lambda left, right, sizes: left.new_empty(sizes.shape[0], left.shape[1], right.shape[1]),
    derivative=_grouped_outer_backward,
    setup=_save_inputs,
    linear_in=(0, 1),
)
