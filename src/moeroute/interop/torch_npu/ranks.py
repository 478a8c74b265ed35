"""Experts on several ranks: token copies go to the ranks of their experts and come back, over torch.distributed.

A group is given by its name: see `register_group`. One process alone needs no process group. What the ranks must agree
on is compared before a row moves, and what one of them refuses all refuse. No result has a gradient. Which expert lies
on which rank: see `ranks_layout`.

Letters: N tokens, H hidden size, K experts of a token, J shared experts, El experts of this rank (1 on one that holds
a shared expert), A the most rows that this rank can get.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeroute import check
from moeroute.dtypes import FLOATS
from moeroute.interop.torch_npu.arguments import dtype_of, npu_function, refused, unavailable
from moeroute.interop.torch_npu.process_groups import Ranks, dtype_number, ranks_of
from moeroute.interop.torch_npu.process_groups import register_group as register_group
from moeroute.interop.torch_npu.quantization import rounded
from moeroute.interop.torch_npu.ranks_layout import (
    Experts,
    active_slots,
    check_absent,
    check_ids,
    check_known,
    check_like_ids,
    check_plain,
    check_rows,
    slot_places,
)
from moeroute.ops.indices.op import plan_from_segments
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.quantization.op import spread_quantized
from moeroute.permutation import permute

ASSIST = 128  # int32 numbers of a row in the assist info; three are used: source rank, token, slot

_PLAIN, _STATIC, _DYNAMIC = range(3)
Seven = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]


# ---------------------------------------------------------------------------- dispatch


@npu_function
def npu_moe_distribute_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> Seven:
    """The first version of `npu_moe_distribute_dispatch_v2`: its third result is expand_idx, int32 [N * K].

    expand_idx has the place of each slot among those that this rank sends to its expert, -1 for one that is not sent.
    """
    got = _dispatch(
        ranks_of("npu_moe_distribute_dispatch", "x", x, "group_ep", group_ep, ep_world_size),
        x,
        expert_ids,
        Experts(ep_world_size, ep_rank_id, moe_expert_num, shared_expert_num, shared_expert_rank_num),
        lambda function: check_plain(function, tp_world_size, tp_rank_id, expert_shard_type),
        (scales, x_active_mask, expert_scales),
        (quant_mode, global_bs, expert_token_nums_type),
    )
    return got.results(got.place_of_slot, expert_token_nums_type)


@npu_function
def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    elastic_info: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | torch.dtype | None = None,
    x_dtype: int | torch.dtype | None = None,
    scales_dtype: int | torch.dtype | None = None,
) -> Seven:
    """Send a copy of each token to the ranks of its experts; get the rows of this rank's.

    x is [N, H], expert_ids [N, K]; ids from moe_expert_num on are the special experts, which get nothing. Tokens, or
    slots, that x_active_mask [N] or [N, K] switches off are not sent; a token without any goes to no shared expert.
    With quant_mode 2 rows travel as int8; scales [moe_expert_num, H], with shared experts [J + moe_expert_num, H], the
    shared ones first, then multiply x. With quant_mode 1 rows are int8 too, x times scales, which may be [1] or [H].
    Ranks with different N need global_bs: the world size times the largest.

    Returns:
        (rows [A, H], by expert, source rank, token and slot; their scales, float32 [A], or None but for quant_mode 2;
        assist info, int32 [A * 128], for `npu_moe_distribute_combine_v2`; the rows of each expert of this rank, int64
        [El], summed up with expert_token_nums_type 0; running totals of the rows from every rank, expert by expert,
        int32 [El * ranks]; an empty tensor; expert_scales of the rows, float32 [A], 1 for a shared expert's, or an
        empty tensor without). Everything behind the last row is 0.
    """

    def options(function: str) -> None:
        check_plain(function, tp_world_size, tp_rank_id, expert_shard_type, comm_alg)
        check_absent(function, elastic_info=elastic_info, performance_info=performance_info)
        out = torch.int8 if quant_mode else x.dtype
        for name, dtype, wanted in (
            ("y_dtype", y_dtype, out),
            ("x_dtype", x_dtype, x.dtype),
            ("scales_dtype", scales_dtype, torch.float32),
        ):
            if dtype is not None and dtype_of(function, name, dtype) is not wanted:
                raise unavailable(function, name, dtype, f"this has {wanted}")

    got = _dispatch(
        ranks_of("npu_moe_distribute_dispatch_v2", "x", x, "group_ep", group_ep, ep_world_size),
        x,
        expert_ids,
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
        (scales, x_active_mask, expert_scales),
        (quant_mode, global_bs, expert_token_nums_type),
    )
    return got.results(pad(got.origin, (0, ASSIST - got.origin.shape[1])).flatten(), expert_token_nums_type)


@dataclass(frozen=True)
class _Received:
    rows: Tensor
    scales: Tensor | None
    origin: Tensor  # int32 [A, 3]
    place_of_slot: Tensor  # int32 [N * K]
    counts: Tensor  # int64 [ranks, El]
    weights: Tensor

    def results(self, assist: Tensor, expert_token_nums_type: int) -> Seven:
        numbers = self.counts.sum(0)
        return (
            self.rows,
            self.scales,
            assist,
            numbers if expert_token_nums_type else numbers.cumsum(0),
            self.counts.T.flatten().cumsum(0).to(torch.int32),
            torch.zeros(0, dtype=torch.int32, device=self.rows.device),
            self.weights,
        )


@torch.no_grad()
def _dispatch(
    ranks: Ranks,
    x: Tensor,
    expert_ids: Tensor,
    experts: Experts,
    options: Callable[[str], None],
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None],
    modes: tuple[int, int, int],
) -> _Received:
    function, world = ranks.function, ranks.size
    scales, mask, expert_scales = tensors
    quant_mode, global_bs, expert_token_nums_type = modes

    def numbers() -> dict[str, int]:
        layout = experts.layout(ranks)
        options(function)
        check_rows(function, "x", x)
        check_ids(function, expert_ids, len(x))
        check_known(function, expert_ids, active_slots(function, mask, expert_ids), experts.experts, experts.special)
        if expert_scales is not None:
            check_like_ids(function, "expert_scales", expert_scales, expert_ids)
        if quant_mode in (3, 4):
            raise unavailable(function, "quant_mode", quant_mode)
        if quant_mode not in (_PLAIN, _STATIC, _DYNAMIC):
            raise refused(function, "quant_mode", "0, 1 or 2", quant_mode)
        if quant_mode and x.dtype not in FLOATS[:3]:
            raise refused(function, "x", f"float16, bfloat16 or float32 with quant_mode {quant_mode}", x.dtype)
        if scales is not None and not quant_mode:
            raise refused(function, "scales", "None with quant_mode 0", "a tensor")
        if scales is None and quant_mode == _STATIC:
            raise refused(function, "scales", "given with quant_mode 1", None)
        if scales is not None:
            _check_scales(function, scales, x, layout.columns + layout.experts, quant_mode)
        if expert_token_nums_type not in (0, 1):
            raise refused(function, "expert_token_nums_type", "0 or 1", expert_token_nums_type)
        return {
            "the hidden size of x": x.shape[1],
            "dtype of x": dtype_number(x.dtype),
            "K of expert_ids": expert_ids.shape[1],
            "quant_mode": quant_mode,
            "global_bs": global_bs,
            "tokens": x.shape[0],
            **experts.numbers(),
        }

    tokens = ranks.agree(numbers, own=("tokens",))["tokens"]
    most = max(tokens) * world
    if global_bs == 0 and min(tokens) * world != most:
        wanted = f"at least {most} where ranks have different numbers of tokens"
        raise refused(function, "global_bs", wanted, f"0 with {tokens}")
    if global_bs and (global_bs < most or global_bs % world):
        wanted = f"0, or a multiple of {world} and at least {most}, the ranks times the most tokens of one"
        raise refused(function, "global_bs", wanted, global_bs)
    layout = experts.layout(ranks)
    room = layout.room((global_bs or most) // world, expert_ids.shape[1])

    places = slot_places(layout, expert_ids, active_slots(function, mask, expert_ids))
    plan = plan_from_expert_ids(places, layout.places)
    sent = plan.tokens_per_expert
    assert sent is not None  # noqa: S101 - for the type checker: the plan knows its experts
    slots, columns = plan.slot_of_row, max(places.shape[1], 1)
    note = torch.zeros(plan.num_rows, 4, dtype=torch.int32, device=x.device)
    note[:, 0], note[:, 1] = slots // columns, slots % columns
    if quant_mode == _STATIC and scales is not None:
        factors = scales.float()
        if factors.ndim == 2:
            factors = layout.of_places(factors)[plan.expert_of_row]
        rows = rounded(permute(x, plan).float() * factors, torch.int8)
    elif quant_mode:
        rows, row_scales = spread_quantized(
            x, plan, smooth=None if scales is None else layout.of_places(scales.float())
        )
        note[:, 2] = row_scales.view(torch.int32)
    else:
        rows = permute(x, plan)
    if expert_scales is not None:
        weights = pad(expert_scales.float(), (0, layout.columns), value=1.0)
        note[:, 3] = weights.flatten()[slots].view(torch.int32)

    counts = ranks.gather(sent)[:, layout.mine()].to(x.device)
    sends, receives = layout.by_rank(sent), counts.sum(1).tolist()
    by_expert = plan_from_segments(counts, room)  # the rows that do not exist stay behind, and are 0
    note = permute(ranks.exchange(note, sends, receives, room), by_expert)
    source = torch.arange(world, device=x.device).repeat(counts.shape[1]).repeat_interleave(counts.T.flatten())
    row = plan.row_of_slot.view(places.shape)
    place = torch.where(row >= 0, row - (sent.cumsum(0) - sent)[places.clamp(min=0)], -1)
    return _Received(
        permute(ranks.exchange(rows, sends, receives, room), by_expert),
        _floats(note[:, 2]) if quant_mode == _DYNAMIC else None,
        torch.cat([pad(source, (0, room - len(source)))[:, None], note[:, :2]], 1).to(torch.int32),
        place[:, : expert_ids.shape[1]].flatten().to(torch.int32),
        counts,
        torch.zeros(0, device=x.device) if expert_scales is None else _floats(note[:, 3]),
    )


def _check_scales(function: str, scales: Tensor, x: Tensor, rows: int, quant_mode: int) -> None:
    check.tensor(function, "scales", scales)
    width = x.shape[1]
    for_all = quant_mode == _STATIC and tuple(scales.shape) in ((1,), (width,))
    if not for_all:
        check_rows(function, "scales", scales, rows)
    if not scales.is_floating_point() or (scales.shape[-1] != width and not for_all):
        raise refused(function, "scales", f"float32 [.., {width}]", f"{scales.dtype} {list(scales.shape)}")


def _floats(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)
