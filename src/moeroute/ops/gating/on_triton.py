"""Gating in Triton: launchers. The kernels are in triton_kernels.py."""

import torch
from torch import Tensor

from moeroute.ops import layout
from moeroute.ops.gating.triton_kernels import (
    gating_backward,
    gating_groups,
    gating_scores,
    gating_search,
    gating_sort,
    gating_tile,
    gating_weights,
)
from moeroute.ops.triton_kit import (
    INTERPRETED,
    PARTIAL_SUMS,
    launch,
    power_of_two,
    programs,
    tile_rows,
)

SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "topk_softmax": 3, "topk_sigmoid": 4, "none": 5}

# Rows of a tile and its warps by the padded length of a row. Up to 256 elements a row stays inside a warp,
# where a maximum takes no barrier; a thread holds 8 elements (16 for 512), or 16 bytes of a bfloat16 load,
# and needs some 40 registers, so that an SM has some 48 warps and 24 KB of loads in flight. Beyond, the
# rows are as few as triton-ascend's sum by pairs takes, and a thread holds 8 or 16 elements.
TILES = {64: (16, 4), 128: (8, 4), 256: (4, 4), 512: (4, 4), 1024: (2, 8), 2048: (2, 8), 4096: (2, 16), 8192: (2, 8)}
SHORTEST, LONGEST, LONGEST_SORTED = 64, 4096, 8192  # 8,192 with anything but the sort spill registers
LONGEST_GROUPED = 1024  # 2,048 in 16 groups spill
FEW_SLOTS, MOST_SLOTS = 8, 32  # in a tile; a maximum for each of more slots costs more than sorting
MOST_GROUPS = 16  # in a tile: each group is compared with each
PIECE = 8192 if INTERPRETED else 1024  # of a row that is walked through
BACKWARD_PIECE = 8192 if INTERPRETED else 256  # the same in the backward: longer ones spill registers

# ---------------------------------------------------------------------------- launchers


def _tile(tokens: int, length: int, share: int = 1) -> dict[str, int]:
    """What `launch` wants to know for tiles with rows of this length, or with pieces of longer ones; a `share` of
    the rows where a thread holds more than the elements of a row."""
    rows, warps = TILES[length]
    rows = max(rows // share, 1)
    rows = tile_rows(tokens, rows, max(length, PARTIAL_SUMS.value))
    return {"warps": warps, "ROWS": rows, "BLOCK": length}


def _slots(k: int) -> int:
    return FEW_SLOTS if k <= FEW_SLOTS else MOST_SLOTS


def _share(length: int, k: int) -> int:
    """Many slots beside the many short rows of a tile spill registers."""
    return 2 if k > FEW_SLOTS and length == SHORTEST else 1


def gating_topk(
    logits: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor | None,
    k: int,
    score: str,
    num_groups: int,
    topk_groups: int,
    group_best: int,
    renormalize: bool,
    scaling_factor: float,
    eps: float,
    weights_dtype: torch.dtype,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates weights, expert_ids and scores, or writes `out`, three tensors whose rows may be strided."""
    tokens, num_experts = logits.shape
    if out is None:
        weights = torch.empty((tokens, k), dtype=weights_dtype, device=logits.device)
        ids = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
        scores = torch.empty((tokens, num_experts), dtype=torch.float32, device=logits.device)
    else:
        weights, ids, scores = out
    logits = layout.rows(logits)
    if bias is not None and (bias.dtype is torch.float64 or not bias.is_contiguous()):
        bias = bias.to(torch.float32).contiguous()
    if expert_ids is not None:
        expert_ids = layout.rows(expert_ids)
    group_size = num_experts // num_groups
    groups, length = 1, power_of_two(num_experts)
    if topk_groups < num_groups and expert_ids is None:
        groups = power_of_two(num_groups)
        length = groups * power_of_two(group_size)
    length = max(length, SHORTEST)
    if length <= (LONGEST if groups == 1 else LONGEST_GROUPED) and groups <= MOST_GROUPS and k <= MOST_SLOTS:
        tile = _tile(tokens, length, _share(length, k))
        launch(
            gating_tile,
            programs(tokens, tile["ROWS"]),
            weights=weights,
            expert_ids=ids,
            scores=scores,
            logits=logits,
            bias=bias,
            given_ids=expert_ids,
            tokens=tokens,
            num_experts=num_experts,
            k=k,
            weights_stride=weights.stride(0),
            ids_stride=ids.stride(0),
            scores_stride=scores.stride(0),
            logits_stride=logits.stride(0),
            given_stride=0 if expert_ids is None else expert_ids.stride(0),
            group_size=group_size,
            topk_groups=topk_groups,
            renormalize=int(renormalize),
            scaling=scaling_factor,
            eps=eps,
            SCORE=SCORES[score],
            GROUPS=groups,
            GROUP_BEST=group_best,
            SLOTS=_slots(k),
            **tile,
        )
        return weights, ids, scores
    tile = _tile(tokens, PIECE)
    launch(
        gating_scores,
        programs(tokens, tile["ROWS"]),
        scores=scores,
        logits=logits,
        tokens=tokens,
        num_experts=num_experts,
        scores_stride=scores.stride(0),
        logits_stride=logits.stride(0),
        SCORE=SCORES[score],
        **tile,
    )
    if expert_ids is None:
        group_values = best_groups = None
        if groups > 1:
            group_values = torch.empty((tokens, num_groups), dtype=torch.float32, device=logits.device)
            best_groups = torch.empty((tokens, topk_groups), dtype=torch.int32, device=logits.device)
            tile = _tile(tokens * num_groups, min(max(power_of_two(group_size), SHORTEST), PIECE))
            launch(
                gating_groups,
                programs(tokens * num_groups, tile["ROWS"]),
                group_values=group_values,
                scores=scores,
                bias=bias,
                tokens=tokens,
                num_experts=num_experts,
                scores_stride=scores.stride(0),
                group_size=group_size,
                GROUP_BEST=group_best,
                **tile,
            )
            _select(best_groups, group_values, None, None, None, 1)
        _select(ids, scores, bias, group_values, best_groups, group_size)
    source = ids if expert_ids is None else expert_ids
    tile = _tile(tokens, SHORTEST)
    launch(
        gating_weights,
        programs(tokens, tile["ROWS"]),
        weights=weights,
        expert_ids=ids,
        scores=scores,
        ids=source,
        tokens=tokens,
        num_experts=num_experts,
        k=k,
        weights_stride=weights.stride(0),
        expert_ids_stride=ids.stride(0),
        scores_stride=scores.stride(0),
        ids_stride=source.stride(0),
        renormalize=int(renormalize),
        scaling=scaling_factor,
        eps=eps,
        spare=True,
        SCORE=SCORES[score],
        ROWS=tile["ROWS"],
        SLOTS=_slots(k),
        warps=tile["warps"],
    )
    return weights, ids, scores


def _select(
    chosen: Tensor,
    values: Tensor,
    bias: Tensor | None,
    group_values: Tensor | None,
    groups: Tensor | None,
    group_size: int,
) -> None:
    """The indices of the best values of each row, as many as `chosen` has room for."""
    (tokens, k), count = chosen.shape, values.shape[1]
    length = max(power_of_two(count), SHORTEST)
    shared = {
        "chosen": chosen,
        "values": values,
        "bias": bias,
        "group_values": group_values,
        "groups": groups,
        "tokens": tokens,
        "count": count,
        "k": k,
        "topk_groups": 0 if groups is None else groups.shape[1],
        "chosen_stride": chosen.stride(0),
        "values_stride": values.stride(0),
        "group_size": group_size,
    }
    if length <= (LONGEST_SORTED if groups is None and k > MOST_SLOTS else LONGEST):
        tile = _tile(tokens, length, share=2)  # keys of 8 bytes
        tile["warps"] = min(tile["warps"], 8)
        launch(gating_sort, programs(tokens, tile["ROWS"]), **shared, spare=True, LOG2=length.bit_length() - 1, **tile)
    else:
        tile = _tile(tokens, PIECE)
        launch(gating_search, programs(tokens, tile["ROWS"]), **shared, **tile)


def gating_topk_backward(
    scores: Tensor,
    grad_weights: Tensor,
    expert_ids: Tensor,
    grad_scores: Tensor | None,
    score: str,
    renormalize: bool,
    scaling_factor: float,
    eps: float,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Allocates the [T, E] result, or writes `out`, whose rows may be strided."""
    tokens, num_experts = scores.shape
    k = expert_ids.shape[1]
    if out is None:
        out = torch.empty((tokens, num_experts), dtype=out_dtype, device=scores.device)
    scores, grad_weights, expert_ids = layout.rows(scores), layout.rows(grad_weights), layout.rows(expert_ids)
    if grad_scores is not None:
        grad_scores = layout.rows(grad_scores)
    length = min(max(power_of_two(num_experts), SHORTEST), BACKWARD_PIECE)
    tile = _tile(tokens, length, _share(length, k))
    launch(
        gating_backward,
        programs(tokens, tile["ROWS"]),
        out=out,
        scores=scores,
        grad_weights=grad_weights,
        ids=expert_ids,
        grad_scores=grad_scores,
        tokens=tokens,
        num_experts=num_experts,
        k=k,
        out_stride=out.stride(0),
        scores_stride=scores.stride(0),
        grad_weights_stride=grad_weights.stride(0),
        ids_stride=expert_ids.stride(0),
        grad_scores_stride=0 if grad_scores is None else grad_scores.stride(0),
        renormalize=int(renormalize),
        scaling=scaling_factor,
        eps=eps,
        spare=True,
        SCORE=SCORES[score],
        SLOTS=_slots(k),
        **tile,
    )
    return out
