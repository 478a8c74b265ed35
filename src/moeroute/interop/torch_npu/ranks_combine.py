"""The way back of `ranks`: the experts' rows return to their tokens and are added up.

Letters: as there; M rows of expand_x.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeroute import check
from moeroute.dtypes import FLOATS
from moeroute.interop.torch_npu.arguments import npu_function, refused, unavailable
from moeroute.interop.torch_npu.process_groups import Ranks, dtype_number, ranks_of
from moeroute.interop.torch_npu.ranks import ASSIST
from moeroute.interop.torch_npu.ranks_layout import (
    Experts,
    Layout,
    active_slots,
    check_absent,
    check_ids,
    check_known,
    check_like_ids,
    check_plain,
    check_rows,
    slot_places,
)
from moeroute.ops.indices.op import plan_from_row_of_slot, plan_from_segments
from moeroute.ops.special_experts import combine_special
from moeroute.permutation import permute, unpermute


@npu_function
def npu_moe_distribute_combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    activation_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    group_list: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    out_dtype: int | torch.dtype = 0,
    comm_quant_mode: int = 0,
    group_list_type: int = 0,
) -> Tensor:
    """The first version of `npu_moe_distribute_combine_v2`: it takes the expand_idx of the first dispatch.

    With shared ranks, x_active_mask must be the one that dispatch got.
    """

    def options(function: str) -> None:
        check_plain(function, tp_world_size, tp_rank_id, expert_shard_type)
        check_absent(function, activation_scale=activation_scale, weight_scale=weight_scale, group_list=group_list)
        if out_dtype not in (0, expand_x.dtype):
            raise unavailable(function, "out_dtype", out_dtype)
        if comm_quant_mode != 0:
            raise unavailable(function, "comm_quant_mode", comm_quant_mode)

    return _combine(
        ranks_of("npu_moe_distribute_combine", "expand_x", expand_x, "group_ep", group_ep, ep_world_size),
        expand_x,
        expert_ids,
        expand_idx,
        ep_send_counts,
        expert_scales,
        Experts(ep_world_size, ep_rank_id, moe_expert_num, shared_expert_num, shared_expert_rank_num),
        options,
        (x_active_mask, shared_expert_x),
        assist=False,
    )


@npu_function
def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    elastic_info: Tensor | None = None,
    ori_x: Tensor | None = None,
    const_expert_alpha_1: Tensor | None = None,
    const_expert_alpha_2: Tensor | None = None,
    const_expert_v: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Tensor:
    """Bring the experts' rows back to their tokens and add them up, weighted by expert_scales [N, K].

    expand_x is [M, H] in the order of `npu_moe_distribute_dispatch_v2`, assist_info_for_combine and ep_send_counts are
    its third and fifth result. The rows of shared ranks and shared_expert_x [N, H] are added unweighted, behind the K
    experts. Special experts come from no rank: the first zero_expert_num ids from moe_expert_num on add nothing, the
    next copy_expert_num ori_x [N, H], the last const_expert_num const_expert_alpha_1 * ori_x + const_expert_alpha_2 *
    const_expert_v, each [const_expert_num, H], or [const_expert_num] for the alphas.

    Returns:
        [N, H] in the dtype of expand_x; summed in float32, slot by slot, and rounded once. A token that x_active_mask
        switches off is 0.
    """

    def options(function: str) -> None:
        check_plain(function, tp_world_size, tp_rank_id, expert_shard_type, comm_alg)
        check_absent(function, elastic_info=elastic_info, performance_info=performance_info)
        if comm_quant_mode != 0:
            raise unavailable(function, "comm_quant_mode", comm_quant_mode)

    return _combine(
        ranks_of("npu_moe_distribute_combine_v2", "expand_x", expand_x, "group_ep", group_ep, ep_world_size),
        expand_x,
        expert_ids,
        assist_info_for_combine,
        ep_send_counts,
        expert_scales,
        Experts(
            ep_world_size,
            ep_rank_id,
            moe_expert_num,
            shared_expert_num,
            shared_expert_rank_num,
            zero_expert_num,
            copy_expert_num,
            const_expert_num,
        ),
        options,
        (x_active_mask, shared_expert_x),
        (ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v),
    )


@torch.no_grad()
def _combine(
    ranks: Ranks,
    expand_x: Tensor,
    expert_ids: Tensor,
    index: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    experts: Experts,
    options: Callable[[str], None],
    tensors: tuple[Tensor | None, Tensor | None],
    constants: tuple[Tensor | None, ...] = (None,) * 4,
    *,
    assist: bool = True,
) -> Tensor:
    function, world = ranks.function, ranks.size
    mask, shared_expert_x = tensors
    counts = torch.empty(0)  # [El, ranks]
    notes = torch.empty(0)

    def numbers() -> dict[str, int]:
        nonlocal counts, notes
        layout = experts.layout(ranks)
        options(function)
        check_rows(function, "expand_x", expand_x)
        if expand_x.dtype not in FLOATS[:3]:
            raise refused(function, "expand_x", "float16, bfloat16 or float32", expand_x.dtype)
        check_ids(function, expert_ids)
        check_known(function, expert_ids, active_slots(function, mask, expert_ids), experts.experts, experts.special)
        check_like_ids(function, "expert_scales", expert_scales, expert_ids)
        if shared_expert_x is not None:
            flat = shared_expert_x if shared_expert_x.ndim < 3 else shared_expert_x.flatten(0, -2)
            check_rows(function, "shared_expert_x", flat, len(expert_ids), expand_x)
        counts = _counts(function, ep_send_counts, layout, len(expand_x))
        if assist:
            notes = _notes(function, index, counts)
        elif index.shape != (expert_ids.numel(),):
            raise refused(function, "expand_idx", f"of shape [{expert_ids.numel()}]", list(index.shape))
        _check_special(function, experts, constants, expert_ids, expand_x)
        return {
            "the hidden size of expand_x": expand_x.shape[1],
            "dtype of expand_x": dtype_number(expand_x.dtype),
            "K of expert_ids": expert_ids.shape[1],
            **experts.numbers(),
        }

    ranks.agree(numbers)
    layout = experts.layout(ranks)
    active = active_slots(function, mask, expert_ids)
    num_rows = int(counts.sum())
    by_rank = plan_from_segments(counts.to(expand_x.device), num_rows)
    widest = max(layout.per_rank, 1)
    everyone = ranks.gather(pad(counts, (0, 0, 0, widest - len(counts))).flatten())
    back = everyone.view(world, widest, world)[:, :, ranks.rank]
    back = torch.cat([back[rank, : layout.local(rank)] for rank in range(world)])  # by place
    sends, receives = counts.sum(0).tolist(), layout.by_rank(back)
    rows = ranks.exchange(permute(expand_x[:num_rows], by_rank), sends, receives)
    places = slot_places(layout, expert_ids, active)
    if assist:
        notes = ranks.exchange(permute(notes, by_rank), sends, receives)
        row_of_slot = _rows_by_note(function, notes.long(), places)
    else:
        row_of_slot = _rows_by_place(function, index, layout, places, back.to(places.device))
    row_of_slot = torch.where(places >= 0, row_of_slot, -1)

    topk = expert_ids.shape[1]
    weights = pad(expert_scales.float(), (0, layout.columns), value=1.0)
    if shared_expert_x is not None:
        own = torch.where(active.any(1), torch.arange(len(places), device=rows.device) + len(rows), -1)
        rows = torch.cat([rows, shared_expert_x.flatten(0, -2)])
        row_of_slot = torch.cat([row_of_slot[:, :topk], own[:, None], row_of_slot[:, topk:]], 1)
        weights = pad(weights, (0, 1), value=1.0)
    if experts.special:
        return _with_special(rows, row_of_slot, expert_ids, active, weights, experts, constants)
    return unpermute(rows, plan_from_row_of_slot(row_of_slot, len(places), len(rows)), weights)


def _counts(function: str, totals: Tensor, layout: Layout, num_rows: int) -> Tensor:
    """int64 [El, ranks] on the CPU: the rows of each expert from each rank, of their running totals."""
    check.tensor(function, "ep_send_counts", totals)
    local = layout.local(layout.rank)
    if totals.shape != (local * layout.world,):
        raise refused(function, "ep_send_counts", f"of shape [{local * layout.world}]", list(totals.shape))
    counts = totals.to("cpu", torch.int64).diff(prepend=torch.zeros(1, dtype=torch.int64))
    if (counts < 0).any() or counts.sum() > num_rows:
        wanted = f"running totals up to at most {num_rows}, the rows of expand_x"
        raise refused(function, "ep_send_counts", wanted, totals.tolist())
    return counts.view(local, layout.world)


def _notes(function: str, assist: Tensor, counts: Tensor) -> Tensor:
    """int32 [rows, 2]: token and slot of every row, of the assist info."""
    check.tensor(function, "assist_info_for_combine", assist)
    num_rows = int(counts.sum())
    if assist.ndim != 1 or assist.dtype is not torch.int32 or len(assist) < num_rows * ASSIST:
        got = f"{assist.dtype} {list(assist.shape)}"
        raise refused(function, "assist_info_for_combine", f"int32 [A * {ASSIST}] with A >= {num_rows}", got)
    found = assist[: num_rows * ASSIST].reshape(num_rows, ASSIST)
    source = torch.arange(counts.shape[1]).repeat(len(counts)).repeat_interleave(counts.flatten())
    if not torch.equal(found[:, 0].cpu().long(), source):
        raise refused(function, "assist_info_for_combine", "what dispatch returned beside ep_send_counts", "another")
    return found[:, 1:3]


def _rows_by_note(function: str, notes: Tensor, places: Tensor) -> Tensor:
    """[N, K + J]: the row that came back for each slot, -1 for none."""
    num_tokens, columns = places.shape
    token, slot = notes.unbind(1)
    if ((token < 0) | (token >= num_tokens) | (slot < 0) | (slot >= columns)).any():
        wanted = f"that of {num_tokens} tokens with {columns} rows each, as dispatch returned it to every rank"
        raise refused(function, "assist_info_for_combine", wanted, "another")
    found = torch.full_like(places, -1)
    found[token, slot] = torch.arange(len(notes), device=places.device)
    return found


def _rows_by_place(function: str, expand_idx: Tensor, layout: Layout, places: Tensor, back: Tensor) -> Tensor:
    """As `_rows_by_note`, of the first version's index: a row's number among those of its place, -1 for none."""
    own = expand_idx.long().reshape(len(places), places.shape[1] - layout.columns)
    shared = (places[:, own.shape[1] :] >= 0).long()
    number = torch.cat([own, shared.cumsum(0) - 1], 1)
    expert = places.clamp(min=0)
    if ((places >= 0) & ((number < -1) | (number >= back[expert]))).any():
        wanted = "what dispatch returned for these expert_ids and this x_active_mask"
        raise refused(function, "expand_idx", wanted, "another")
    return torch.where(number >= 0, (back.cumsum(0) - back)[expert] + number, -1)


# ---------------------------------------------------------------------------- special experts


def _check_special(
    function: str, experts: Experts, constants: tuple[Tensor | None, ...], expert_ids: Tensor, expand_x: Tensor
) -> None:
    ori_x, *values = constants
    if ori_x is not None:
        check_rows(function, "ori_x", ori_x, len(expert_ids), expand_x)
    elif experts.copy or experts.const:
        raise refused(function, "ori_x", "given with copy or constant experts", None)
    if not experts.const:
        return
    whole = (experts.const, expand_x.shape[1])
    for name, tensor in zip(("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"), values, strict=True):
        allowed = (whole,) if name == "const_expert_v" else (whole, whole[:1])
        if tensor is None or tuple(tensor.shape) not in allowed:
            got = None if tensor is None else list(tensor.shape)
            raise refused(function, name, f"of shape {list(whole)} with constant experts", got)


def _with_special(
    rows: Tensor,
    row_of_slot: Tensor,
    expert_ids: Tensor,
    active: Tensor,
    weights: Tensor,
    experts: Experts,
    constants: tuple[Tensor | None, ...],
) -> Tensor:
    num_tokens, hidden = len(expert_ids), rows.shape[1]
    ori_x, *values = constants
    extra = row_of_slot.shape[1] - expert_ids.shape[1]
    ids = pad(expert_ids.long(), (0, extra), value=-1)
    special = (ids >= experts.experts) & pad(active, (0, extra))
    row_of_slot = torch.where(special, 0, row_of_slot)  # any that there is: its contents are not used
    ends = [experts.experts]
    for number in (experts.zero, experts.copy, experts.const):
        ends.append(ends[-1] + number)
    triple = [(t if t.ndim == 2 else t[:, None]).expand(experts.const, hidden) for t in values if t is not None]
    return combine_special(
        rows if len(rows) else rows.new_zeros(1, hidden),
        row_of_slot,
        ids,
        rows.new_zeros(num_tokens, hidden) if ori_x is None else ori_x,
        weights,
        zero=range(ends[0], ends[1]),
        copy=range(ends[1], ends[2]),
        constant=range(ends[2], ends[3]),
        constants=(triple[0], triple[1], triple[2]) if experts.const else None,
    )
