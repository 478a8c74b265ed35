"""Routing as inference has it: init routing with counts and quantised rows, finalize routing, re-routing.

Nothing here has a gradient. Letters: N tokens, H hidden size, K experts of a token, E experts, L rows, C capacity.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import LARGEST
from moeroute.interop.torch_npu import mx
from moeroute.interop.torch_npu.arguments import INT4, dtype_of, npu_function, or_default, refused, unavailable
from moeroute.ops.half_quantization import quantize_half
from moeroute.ops.indices.op import plan_from_row_of_slot, plan_from_segments
from moeroute.ops.init_routing import column_routing, first_rows, slots_by_expert, spread_int8, used_pairs
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.quantization.op import quantize
from moeroute.ops.replicas import instances_of_slots, slots_above
from moeroute.ops.rows.op import combine, spread
from moeroute.plan import RoutingPlan

_NONE, _STATIC, _DYNAMIC, _INT4 = -1, 0, 1, 13
_MX, _BLOCKS = (2, 3, 16, 17), (4, 5, 11, 12, 14, 15)
_ELSEWHERE = {6: "HiFloat8", 7: "HiFloat8", 8: "HiFloat8", 9: "MXFP4"}
_QUANTISABLE = (torch.float16, torch.bfloat16, torch.float32)

# ---------------------------------------------------------------------------- init routing


class _Rows(NamedTuple):
    """What an init routing makes of tokens: where their rows lie."""

    plan: RoutingPlan
    first_expert: int
    num_factors: int  # experts in the range


@npu_function
@torch.no_grad()
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] = [],  # noqa: B006 - torch_npu's own default; it is only read
    row_idx_type: int = 0,
    x_dtype: int | torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token copies in the order of the experts of a range, as they are or quantised, with their numbers and counts.

    Args:
        x: [N, H], of any dtype without a quantisation, else float16, bfloat16 or float32.
        expert_idx: [N, K] int32 or int64.
        scale: quant_mode -1: [N] or [N, ...], copied with the rows. 0: [1] float32. 1: [1, H] or [range, H] float32
            factors. 13: [1, H] float32.
        offset: quant_mode 0: [1] float32; None is 0.
        active_num: the most rows; 0 and below: N * K. It changes neither row numbers nor counts.
        expert_capacity: C with drop_pad_mode 1.
        expert_num: E.
        drop_pad_mode: 0: rows without gaps. 1: C rows for each expert, the first of its slots.
        expert_tokens_num_type: 0 cumulative counts, 1 counts, 2 pairs (expert, count) of the experts that have any.
        expert_tokens_num_flag: not needed: the counts are always returned.
        quant_mode: -1 none, 0 static and 1 dynamic int8, 13 dynamic int4, 2, 3, 16 and 17 MXFP8, others fp8 in groups.
        active_expert_range: (lo, hi); empty: (0, E). Only experts inside have rows.
        row_idx_type: 0: the row of each slot, -1 where it has none. 1: the slots in sorted order, those out of the
            range behind the others.
        x_dtype: the dtype of x where x carries another one.

    Returns:
        (rows [L, H] or [E, C, H], row numbers int32 [N * K], counts int64 [hi - lo] or [E, 2], scales). Rows without a
        slot are 0, and so are their scales; scales that nothing gives are float32 zeros.
    """
    name = "npu_moe_init_routing_v2"
    _given_dtype(name, x, x_dtype, quant_mode)
    num_tokens, topk = _tokens(name, x, expert_idx)
    drop = bool(_one_of(name, "drop_pad_mode", drop_pad_mode, (0, 1)))
    _one_of(name, "expert_tokens_num_type", expert_tokens_num_type, (0, 1, 2))
    _one_of(name, "row_idx_type", row_idx_type, (0, 1))
    check.integer(name, "expert_num", expert_num, 1, LARGEST)
    first, last = _range(name, active_expert_range, expert_num)
    slots = num_tokens * topk
    part = None if (first, last) == (0, expert_num) else (first, last)
    uncut = plan_from_expert_ids(expert_idx, expert_num, expert_range=part, num_rows=slots)
    if drop:
        check.integer(name, "expert_capacity", expert_capacity, 1, LARGEST // expert_num)
        if part or row_idx_type:
            argument = "row_idx_type" if row_idx_type else "active_expert_range"
            raise refused(name, argument, "the default with drop_pad_mode 1", row_idx_type or [first, last])
        plan = plan_from_expert_ids(expert_idx, expert_num, capacity=expert_capacity, pad_to_capacity=True)
        numbers, num_rows = plan.row_of_slot, expert_num * expert_capacity
    else:
        num_rows = min(active_num, slots) if active_num > 0 else slots
        plan, numbers = first_rows(uncut, num_rows), uncut.row_of_slot
        if row_idx_type:
            numbers = slots_by_expert(expert_idx, first)
    counts = _counts(uncut)
    if expert_tokens_num_type == 0:
        counts = counts.cumsum(0)
    elif expert_tokens_num_type == 2:
        counts = used_pairs(counts, first, expert_num)
    where = _Rows(plan, first, last - first)
    rows, scales = _quantised(name, x, expert_idx, scale, offset, quant_mode, where)
    if drop:
        rows = rows.view(expert_num, expert_capacity, rows.shape[1])
    return rows, numbers, counts, scales


@npu_function
@torch.no_grad()
def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token copies in the stable order of their expert ids, for slots that are numbered by column.

    Args:
        x: [N, H] of any dtype.
        row_idx: int32 [N, K], the number of each slot: k * N + t.
        expert_idx: int32 [N, K].
        active_num: counts tokens: there are min(active_num, N) * K rows.

    Returns:
        (rows, the row of each slot number int32 [N * K], the sorted expert ids int32 [N * K]).
    """
    name = "npu_moe_init_routing"
    num_tokens, topk = _tokens(name, x, expert_idx)
    check.shaped(name, "row_idx", row_idx, (num_tokens, topk))
    for argument, tensor in (("row_idx", row_idx), ("expert_idx", expert_idx)):
        if tensor.dtype is not torch.int32:
            raise refused(name, argument, "torch.int32", tensor.dtype)
    check.integer(name, "active_num", active_num, 0)
    plan, numbers, experts = column_routing(row_idx, expert_idx, min(active_num, num_tokens) * topk)
    return spread(x, plan), numbers, experts


@npu_function
@torch.no_grad()
def npu_moe_init_routing_quant(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = 1024,
    expert_capacity: int = 0,
    expert_num: int = 256,
    drop_pad_mode: int = 0,
    expert_tokens_num_mode: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
    quant_mode: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Token copies in expert order as int8. The default of active_num cuts at 1024 rows; 0 and below is no cut.

    Args:
        x: [N, H] float16, bfloat16 or float32.
        expert_idx: [N, K] int32 or int64.
        scale: quant_mode 0: [1] float32; 1: [1, H] or [E, H] float32 factors, or None.
        offset: quant_mode 0: [1] float32; None is 0.
        active_num: the most rows.
        expert_capacity: C with drop_pad_mode 1.
        expert_num: E.
        drop_pad_mode: 0: rows without gaps. 1: C rows for each expert.
        expert_tokens_num_mode: 1 cumulative counts, 2 counts; 0 and drop_pad_mode 1: None.
        expert_tokens_before_capacity_flag: with drop_pad_mode 1, whether the counts before the capacity are returned.
        quant_mode: 0 static, in float16; 1 dynamic.

    Returns:
        (rows int8, row numbers int32 [N * K], counts int32 [E] or None, counts before the capacity int32 [E] or None,
        scales float32 or None without quant_mode 1).
    """
    name = "npu_moe_init_routing_quant"
    num_tokens, topk = _tokens(name, x, expert_idx)
    drop = bool(_one_of(name, "drop_pad_mode", drop_pad_mode, (0, 1)))
    mode = _one_of(name, "expert_tokens_num_mode", expert_tokens_num_mode, (0, 1, 2))
    _one_of(name, "quant_mode", quant_mode, (_STATIC, _DYNAMIC))
    check.integer(name, "expert_num", expert_num, 1, LARGEST)
    slots = num_tokens * topk
    uncut = plan_from_expert_ids(expert_idx, expert_num, num_rows=slots)
    if drop:
        check.integer(name, "expert_capacity", expert_capacity, 1, LARGEST // expert_num)
        plan = plan_from_expert_ids(expert_idx, expert_num, capacity=expert_capacity, pad_to_capacity=True)
        numbers = plan.row_of_slot
    else:
        plan, numbers = first_rows(uncut, min(active_num, slots) if active_num > 0 else slots), uncut.row_of_slot
    counts = _counts(uncut).to(torch.int32)
    if quant_mode == _STATIC:
        factor, shift = _static_factors(name, x, scale, offset)
        rows, scales = spread(quantize_half(x, factor, shift), plan), None
    else:
        rows, scales = _dynamic(name, x, expert_idx, scale, _Rows(plan, 0, expert_num))
    return (
        rows.view(expert_num, expert_capacity, rows.shape[1]) if drop else rows,
        numbers,
        None if drop or not mode else counts.cumsum(0, dtype=torch.int32) if mode == 1 else counts,
        counts if drop and expert_tokens_before_capacity_flag else None,
        scales,
    )


# ---------------------------------------------------------------------------- finalize routing


@npu_function
@torch.no_grad()
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """out[t] = skip1[t] + skip2[t] + sum over j of scales[t, j] * (rows[row of (t, j)] + bias[expert of (t, j)]).

    Args:
        expanded_permuted_rows: [M, H] or [E, C, H] float.
        skip1: [N, H] or None.
        skip2: [N, H] or None.
        bias: [E, H] or None; needs export_for_source_row.
        scales: [N, K] or None, which counts as 1.
        expanded_src_to_dst_row: [N * K] int32 or int64, a row or -1, which adds nothing: entry j * N + t in
            drop_pad_mode 0 and 1, entry t * K + j in 2 and 3. Row numbers of init_routing_v2 need 2 or 3.
        export_for_source_row: [N, K] expert ids.
        drop_pad_mode: 0 to 3.
        k: K where there are no scales.

    Returns:
        [N, H] in the dtype of the rows.
    """
    name = "npu_moe_finalize_routing"
    rows, index = expanded_permuted_rows, expanded_src_to_dst_row
    check.tensor(name, "expanded_permuted_rows", rows)
    if rows.ndim not in (2, 3):
        raise refused(name, "expanded_permuted_rows", "[M, H] or [E, C, H]", list(rows.shape))
    hidden = rows.shape[-1]
    rows = rows.reshape(-1, hidden) if rows.numel() else rows.new_empty(rows.shape[:-1].numel(), hidden)
    check.shaped(name, "expanded_src_to_dst_row", index, (None,))
    mode = _one_of(name, "drop_pad_mode", or_default(drop_pad_mode, 0), (0, 1, 2, 3))
    topk = or_default(k, 1)
    if scales is not None:
        check.shaped(name, "scales", scales, (None, None))
        topk = scales.shape[1]
    check.integer(name, "k", topk, 1)
    num_tokens = index.shape[0] // topk if scales is None else scales.shape[0]
    if index.shape[0] != num_tokens * topk:
        raise refused(name, "expanded_src_to_dst_row", f"[N * K] = {num_tokens} * {topk}", list(index.shape))
    by_row = mode in (2, 3)
    index = index.view(num_tokens, topk) if by_row else index.view(topk, num_tokens).t()
    if bias is not None:
        check.shaped(name, "bias", bias, (None, hidden))
        if export_for_source_row is None:
            raise refused(name, "export_for_source_row", "given with bias", None)
        check.shaped(name, "export_for_source_row", export_for_source_row, (num_tokens, topk))
    starts = tuple(start.to(rows.dtype) for start in (skip1, skip2) if start is not None)
    plan = plan_from_row_of_slot(
        index, num_tokens, len(rows), expert_of_slot=None if bias is None else export_for_source_row
    )
    return combine(
        rows,
        plan,
        None if scales is None else scales.reshape(-1),
        init=starts if len(starts) == 2 else starts[0] if starts else None,
        bias=None if bias is None else bias.to(rows.dtype),
    )


@npu_function
@torch.no_grad()
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """The cumulative counts of sorted expert ids: out[e] = the number of ids of at most e; [E] in their dtype."""
    name = "npu_moe_compute_expert_tokens"
    ids = sorted_expert_for_source_row
    check.shaped(name, "sorted_expert_for_source_row", ids, (None,))
    check.integer(name, "num_expert", num_expert, 0)
    experts = torch.arange(num_expert, dtype=ids.dtype, device=ids.device)
    return torch.searchsorted(ids.sort().values, experts, right=True).to(ids.dtype)


@npu_function
@torch.no_grad()
def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that lie rank by rank, and inside a rank expert by expert, regrouped by expert, inside it by rank.

    Args:
        tokens: [A, H] of any dtype.
        expert_token_num_per_rank: [ranks, E] int32 or int64, the rows of each chunk, A in all.
        per_token_scales: [A] or [A, S], moved with the rows.
        expert_token_num_type: 0 cumulative counts, 1 counts.
        idx_type: 0: the source of each row. 1: the place of each source.
        tokens_dtype: the dtype of the tokens where they carry another one.

    Returns:
        (tokens [A, H], scales, float32 ones [A] where none are given, numbers int32 [A], counts [E] in the dtype of
        the matrix).
    """
    name = "npu_moe_re_routing"
    _given_dtype(name, tokens, tokens_dtype, _NONE)
    check.shaped(name, "tokens", tokens, (None, None))
    sizes = expert_token_num_per_rank
    check.shaped(name, "expert_token_num_per_rank", sizes, (None, None))
    _one_of(name, "expert_token_num_type", expert_token_num_type, (0, 1))
    _one_of(name, "idx_type", idx_type, (0, 1))
    num_rows = tokens.shape[0]
    total = int(sizes.sum())
    if total != num_rows or bool((sizes < 0).any()):
        wanted = f"counts of A = {num_rows} rows, as tokens"
        raise refused(name, "expert_token_num_per_rank", wanted, f"{total} rows in all")
    plan = plan_from_segments(sizes, num_rows)
    if per_token_scales is None:
        scales = torch.ones(num_rows, dtype=torch.float32, device=tokens.device)
    else:
        scales = _moved(name, "per_token_scales", per_token_scales, plan)
    counts = sizes.sum(0).to(sizes.dtype)
    if expert_token_num_type == 0:
        counts = counts.cumsum(0).to(sizes.dtype)
    return spread(tokens, plan), scales, plan.row_of_slot if idx_type else plan.slot_of_row, counts


@npu_function
@torch.no_grad()
def npu_moe_update_expert(
    expert_ids: Tensor,
    eplb_table: Tensor,
    *,
    expert_scales: Tensor | None = None,
    pruning_threshold: Tensor | None = None,
    active_mask: Tensor | None = None,
    local_rank_id: int = -1,
    world_size: int = -1,
    balance_mode: int = 0,
) -> tuple[Tensor, Tensor]:
    """The instance of each slot's expert, and which slots are worth going.

    Args:
        expert_ids: [N, K] int32 or int64.
        eplb_table: [E, F]: column 0 counts an expert's instances, the next columns name them.
        expert_scales: [N, K], for the mask; needs pruning_threshold.
        pruning_threshold: [K] or [1, K]: a slot stays from this share of its token's scales on.
        active_mask: bool [N].
        local_rank_id: for balance_mode 0.
        world_size: for balance_mode 0.
        balance_mode: 0: the instances of an expert are shared out among the ranks. 1: among the tokens in turn.

    Returns:
        (instances [N, K] in the dtype of expert_ids, mask bool [N, K], all true without scales).
    """
    name = "npu_moe_update_expert"
    check.shaped(name, "expert_ids", expert_ids, (None, None))
    check.shaped(name, "eplb_table", eplb_table, (None, None))
    if eplb_table.shape[1] < 2:
        raise refused(name, "eplb_table", "[E, F] with F at least 2", list(eplb_table.shape))
    _one_of(name, "balance_mode", balance_mode, (0, 1))
    if (expert_scales is None) != (pruning_threshold is None):
        missing = "expert_scales" if expert_scales is None else "pruning_threshold"
        raise refused(name, missing, "given where the other one is", None)
    if balance_mode == 0:
        check.integer(name, "world_size", world_size, 1)
        check.integer(name, "local_rank_id", local_rank_id, 0, world_size - 1)
        ids = instances_of_slots(expert_ids, eplb_table, rank=local_rank_id, num_ranks=world_size)
    else:
        ids = instances_of_slots(expert_ids, eplb_table)
    num_tokens, topk = expert_ids.shape
    if active_mask is not None:
        check.shaped(name, "active_mask", active_mask, (num_tokens,))
    if expert_scales is None or pruning_threshold is None:
        mask = torch.ones(num_tokens, topk, dtype=torch.bool, device=expert_ids.device)
        return ids, mask if active_mask is None else mask & active_mask[:, None]
    check.shaped(name, "expert_scales", expert_scales, (num_tokens, topk))
    if pruning_threshold.numel() != topk:
        raise refused(name, "pruning_threshold", f"[K] with K = {topk}", list(pruning_threshold.shape))
    return ids, slots_above(expert_scales, pruning_threshold.reshape(-1), active_mask)


# ---------------------------------------------------------------------------- rows and scales


def _quantised(
    name: str,
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    quant_mode: int,
    where: _Rows,
) -> tuple[Tensor, Tensor]:
    """The rows of a plan as quant_mode wants them, and their scales."""
    plan = where.plan
    if quant_mode in _ELSEWHERE:
        raise unavailable(name, "quant_mode", quant_mode, _ELSEWHERE[quant_mode])
    _one_of(name, "quant_mode", quant_mode, (_NONE, _STATIC, _DYNAMIC, *_MX, *_BLOCKS, _INT4))
    if quant_mode == _NONE:
        return spread(x, plan), _no_scales(plan, x) if scale is None else _moved(name, "scale", scale, plan)
    if x.dtype not in _QUANTISABLE:
        raise refused(name, "x", "float16, bfloat16 or float32 with a quant_mode", x.dtype)
    if quant_mode == _DYNAMIC:
        return _dynamic(name, x, expert_idx, scale, where)
    if quant_mode == _STATIC:
        factor, shift = _static_factors(name, x, scale, offset)
        return quantize(x, factor, shift, plan=plan), _no_scales(plan, x)
    if quant_mode == _INT4:
        return _int4(name, x, scale, plan)
    rows = spread(x, plan)
    return mx.quantize_rows(rows, quant_mode) if quant_mode in _MX else mx.quantize_blocks(rows, quant_mode)


def _no_scales(plan: RoutingPlan, x: Tensor) -> Tensor:
    return torch.zeros(plan.num_rows, dtype=torch.float32, device=x.device)


def _static_factors(name: str, x: Tensor, scale: Tensor | None, offset: Tensor | None) -> tuple[Tensor, Tensor]:
    if scale is None:
        raise refused(name, "scale", "given with quant_mode 0", None)
    offset = scale.new_zeros(1) if offset is None else offset
    for argument, tensor in (("scale", scale), ("offset", offset)):
        check.shaped(name, argument, tensor, (1,), x)
    return scale, offset


def _dynamic(name: str, x: Tensor, expert_idx: Tensor, scale: Tensor | None, where: _Rows) -> tuple[Tensor, Tensor]:
    """int8 rows and their scales; `scale` has one row of factors for all, or one for each expert of the range."""
    if scale is not None:
        check.shaped(name, "scale", scale, (None, x.shape[1]), x)
        if len(scale) not in (1, where.num_factors):
            raise refused(name, "scale", f"[1, H] or [{where.num_factors}, H]", list(scale.shape))
    return spread_int8(x, where.plan, expert_idx, where.first_expert, scale)


def _int4(name: str, x: Tensor, scale: Tensor | None, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
    """Two numbers of -8..7 in a byte, the even column in the low half; the scale is a row's largest magnitude / 7."""
    hidden = x.shape[1]
    if hidden % 2:
        raise refused(name, "H of x", "even with quant_mode 13", hidden)
    tokens = x.float()
    if scale is not None:
        check.shaped(name, "scale", scale, (1, hidden), x)
        tokens = tokens * scale
    scales = tokens.abs().amax(1) / 7 if hidden else tokens.new_zeros(len(x))
    numbers = (tokens / scales[:, None]).round().clamp(-8, 7)
    numbers = torch.where(scales[:, None] > 0, numbers, 0).to(torch.int8).view(torch.uint8) & 15
    packed = numbers[:, 0::2] | numbers[:, 1::2] << 4
    return spread(packed, plan), spread(scales[:, None], plan)[:, 0]


def _moved(name: str, argument: str, values: Tensor, plan: RoutingPlan) -> Tensor:
    """One value, or one block of values, for each token, at the token's rows."""
    check.tensor(name, argument, values)
    if not values.ndim or values.shape[0] != plan.num_tokens:
        raise refused(name, argument, f"[N, ...] with N = {plan.num_tokens}", list(values.shape))
    shape = values.shape[1:]
    moved = spread(values.reshape(plan.num_tokens, shape.numel()), plan)
    return moved.view(plan.num_rows, *shape)


def _counts(plan: RoutingPlan) -> Tensor:
    """int64, of every slot that has a row."""
    counts = plan.tokens_per_expert
    assert counts is not None  # noqa: S101 - for the type checker: the plan knows its experts
    return counts.to(torch.int64)


# ---------------------------------------------------------------------------- checks


def _one_of(name: str, argument: str, value: int, members: tuple[int, ...]) -> int:
    if value not in members:
        raise refused(name, argument, f"one of {', '.join(map(str, members))}", value)
    return value


def _tokens(name: str, x: Tensor, expert_idx: Tensor) -> tuple[int, int]:
    """N and K."""
    check.shaped(name, "x", x, (None, None))
    check.shaped(name, "expert_idx", expert_idx, (x.shape[0], None), x)
    return x.shape[0], expert_idx.shape[1]


def _range(name: str, given: list[int], num_experts: int) -> tuple[int, int]:
    if len(given) not in (0, 2):
        raise refused(name, "active_expert_range", "empty or (lo, hi)", list(given))
    first, last = given or (0, num_experts)
    if not 0 <= first < last <= num_experts:
        raise refused(name, "active_expert_range", f"(lo, hi) with 0 <= lo < hi <= {num_experts}", [first, last])
    return first, last


def _given_dtype(name: str, x: Tensor, given: int | torch.dtype | None, quant_mode: int) -> None:
    """Refuse a type other than the tensor's own."""
    if given is None:
        return
    if given == INT4 and quant_mode == _DYNAMIC:
        raise refused(name, "x_dtype", "left out: quant_mode=13 makes int4 rows", given)
    if dtype_of(name, "x_dtype", given) is not x.dtype:
        raise refused(name, "x_dtype", f"{x.dtype}, as x", given)
