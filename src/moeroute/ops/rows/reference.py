"""The row operators in plain torch: gathers, one arithmetic operation at a time, in slot order.

Slow and clear; it shares nothing with the kernels that it judges. `sum`, `addmm` and the like are
not used, since they reorder or fuse.
"""

import torch
from torch import Tensor

from moeroute.plan import PlanTensors


def combine(
    rows: Tensor,
    weights: Tensor | None,
    plan: PlanTensors,
    *,
    init: Tensor | None = None,
    init_more: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Allocates the [T, H] result; copies it into `out`, of any strides, if that is given."""
    num_rows, num_slots, expert_of_slot = rows.shape[0], plan.row_of_slot.shape[0], plan.expert_of_slot
    source = with_zero_row(rows)
    row_of_slot = with_zero_row(valid(plan.row_of_slot, num_rows))
    row_of_slot[-1] = num_rows
    total = wide(rows.new_zeros(plan.num_tokens, rows.shape[1]) if init is None else init)
    if init_more is not None:
        total = total + wide(init_more)
    for slots in slot_table(num_slots, plan.slot_offsets, plan.num_tokens, rows.device).unbind(1):
        at = row_of_slot[slots]
        used = at < num_rows
        term = wide(source[at])
        if bias is not None and expert_of_slot is not None:
            experts = with_zero_row(valid(expert_of_slot, bias.shape[0]))
            experts[-1] = bias.shape[0]
            experts = experts[slots]
            has_bias = (experts < bias.shape[0])[:, None]
            term = torch.where(has_bias, term + wide(with_zero_row(bias)[experts]), term)
        if weights is not None:
            weight = wide(with_zero_row(weights.reshape(-1))[slots])
            used = used & (weight != 0)
            term = weight[:, None] * term
        total = torch.where(used[:, None], total + term, total)
    return deliver(total.to(rows.dtype), out)


def spread(
    x: Tensor,
    weights: Tensor | None,
    plan: PlanTensors,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Allocates the [R, H] result; copies it into `out`, of any strides, if that is given."""
    row_of_slot, slot_of_row, slot_offsets, _, num_tokens = plan
    num_slots, num_rows = row_of_slot.shape[0], slot_of_row.shape[0]
    owner = token_of_slot(num_slots, slot_offsets, num_tokens, x.device)
    slots = valid(slot_of_row, num_slots)
    # A row belongs to its slot only where the slot says so too.
    back = torch.cat([row_of_slot.long(), row_of_slot.new_full((1,), -1).long()])[slots]
    slots = torch.where(back == torch.arange(num_rows, device=x.device), slots, num_slots)
    tokens = torch.cat([owner, owner.new_full((1,), num_tokens)])[slots]
    result = with_zero_row(x)[tokens]
    if weights is not None:
        scaled = wide(with_zero_row(weights.reshape(-1))[slots])[:, None] * wide(result)
        result = torch.where((tokens < num_tokens)[:, None], scaled, 0).to(x.dtype)
    return deliver(result, out)


def row_dots(
    rows: Tensor,
    x: Tensor,
    plan: PlanTensors,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Allocates the [S] result; copies it into `out`, of any strides, if that is given."""
    row_of_slot, _, slot_offsets, expert_of_slot, num_tokens = plan
    num_rows, num_slots = rows.shape[0], row_of_slot.shape[0]
    at = valid(row_of_slot, num_rows)
    tokens = token_of_slot(num_slots, slot_offsets, num_tokens, x.device)
    left = wide(with_zero_row(rows)[at])
    if bias is not None and expert_of_slot is not None:
        experts = valid(expert_of_slot, bias.shape[0])
        has_bias = (experts < bias.shape[0])[:, None]
        left = torch.where(has_bias, left + wide(with_zero_row(bias)[experts]), left)
    dots = _sum_hidden(left * wide(with_zero_row(x)[tokens]))
    dots = torch.where((at < num_rows) & (tokens < num_tokens), dots, 0)
    return deliver(dots.to(dtype), out)


def spread_dots(
    x: Tensor,
    rows: Tensor,
    weights: Tensor,
    plan: PlanTensors,
    *,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Allocates the [R, H] and [S] results; copies them into what `out` has of them, of any strides."""
    out_rows, out_dots = out
    dots = row_dots(rows, x, plan, weights.dtype)
    return spread(x, weights, plan, out=out_rows), deliver(dots, out_dots)


def _sum_hidden(products: Tensor) -> Tensor:
    """[N, H] -> [N]: 256 partial sums, then neighbours."""
    count, hidden = products.shape
    padded = torch.nn.functional.pad(products, (0, -hidden % 256)).reshape(count, -(-hidden // 256), 256)
    partial = products.new_zeros(count, 256)
    for piece in padded.unbind(1):
        partial = partial + piece
    while partial.shape[1] > 1:
        partial = partial[:, 0::2] + partial[:, 1::2]
    return partial[:, 0]


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of the arithmetic."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def token_of_slot(num_slots: int, slot_offsets: Tensor | None, num_tokens: int, device: torch.device) -> Tensor:
    """int64 [S]; `num_tokens` for a slot that no token owns."""
    slots = torch.arange(num_slots, device=device)
    if slot_offsets is None:
        return slots // max(num_slots // max(num_tokens, 1), 1)
    token = torch.searchsorted(slot_offsets[1:].long().contiguous(), slots, right=True)
    return torch.where(slots < slot_offsets[0], num_tokens, token)


def slot_table(num_slots: int, slot_offsets: Tensor | None, num_tokens: int, device: torch.device) -> Tensor:
    """int64 [T, most slots of a token]: the slots of each token in order, `num_slots` where it has no further one."""
    if slot_offsets is None:
        return torch.arange(num_slots, device=device).reshape(num_tokens, -1 if num_tokens else 0)
    ends = slot_offsets.long().clamp(0, num_slots)
    first, last = ends[:-1], ends[1:]
    most = max(int((last - first).max()), 0) if num_tokens and not ends.is_meta else 0  # on meta shapes count only
    table = first[:, None] + torch.arange(most, device=device)
    return torch.where(table < last[:, None], table, num_slots)


def with_zero_row(rows: Tensor) -> Tensor:
    """The rows and one more of zeros, which stands for every missing one."""
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])


def valid(index: Tensor, size: int) -> Tensor:
    """The index as int64, `size` where it lies outside [0, size)."""
    index = index.long()
    return torch.where((index >= 0) & (index < size), index, size)


def deliver(result: Tensor, out: Tensor | None) -> Tensor:
    """The result, in `out` if that is given."""
    return result if out is None else out.copy_(result)
