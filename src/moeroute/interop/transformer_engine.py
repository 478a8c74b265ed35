"""Transformer Engine: the functions of `transformer_engine.pytorch` for Mixture-of-Experts by this package.

Names, arguments and results are the host's. The host itself is not needed: these run on any device, in float64 too,
the router included, and can be differentiated as often as wanted.

`row_id_map`, which the permuting functions return for the way back, has the host's layout, by `map_type`:

- "mask": int32 [T, 2 * E + 1]; row t has the rows of the n experts of the token, from column E on their ids, and n
  last. What the host leaves undefined is -1. The host lists a token's experts descending, this package ascending.
- "index": int32 [K * T], the row of choice k of token t at `k * T + t`; -1 where it has none.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moeroute import check
from moeroute.interop.conventions import SCORES, ScoreFunction, as_map, chunks_of, gating_options, weighted_sum
from moeroute.ops.balance import load_balancing_loss_from_counts
from moeroute.ops.gating.op import gating_topk
from moeroute.ops.indices.op import plan_from_row_id_map, plan_from_row_of_slot
from moeroute.ops.indices.op import row_id_map as row_id_map_of
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.normalize import normalize_scores
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.weights.op import dense_weights, routing_map_from_ids
from moeroute.permutation import permute, permute_weights, unpermute
from moeroute.plan import RoutingPlan

MapType = Literal["mask", "index"]
MAP_TYPES: tuple[MapType, ...] = get_args(MapType)
FORMATS = ("bytemap", "bitmap_u8")


# ---------------------------------------------------------------------------- rows


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: MapType = "mask"
) -> tuple[Tensor, Tensor]:
    """Token copies grouped by expert, inside an expert by token.

    Args:
        inp: [T, H], of any dtype that is not quantized.
        routing_map: "mask": [T, E], true where a token goes to an expert. "index": [T, K] expert ids of any integer
            dtype; -1 is a dropped choice.
        num_out_tokens: the number of rows, known without reading the map; 0 and below: all.
        max_token_num: not needed here.
        map_type: "mask" or "index".

    Returns:
        (rows [R, H], row_id_map).
    """
    if check.one_of("interop.transformer_engine.moe_permute", "map_type", map_type, MAP_TYPES) == "mask":
        plan = _plan(routing_map, num_out_tokens)
        return permute(inp, plan), row_id_map_of(plan)
    num_tokens, topk = routing_map.shape
    num_rows = num_out_tokens if num_out_tokens > 0 else routing_map.numel()
    plan = plan_from_expert_ids(routing_map, None, num_rows=num_rows)
    return permute(inp, plan), plan.row_of_slot.view(num_tokens, topk).T.reshape(-1)


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """As `moe_permute` by mask, with the probs [T, E] of the rows: (rows [R, H], their probs [R], row_id_map)."""
    plan = _plan(routing_map, num_out_tokens)
    return permute(inp, plan), permute_weights(probs, plan), row_id_map_of(plan)


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """As `moe_permute_with_probs`, each expert's rows padded to a multiple of `align_size`.

    Args:
        inp: [T, H].
        probs: [T, E], of any float dtype.
        routing_map: [T, E], true where a token goes to an expert.
        tokens_per_expert: not needed here; the counts come from the map.
        align_size: what every expert's number of rows is a multiple of.

    Returns:
        (rows [R, H], their probs [R], row_id_map of the rows without padding, pad_offsets int64 [E]: how many padding
        rows the experts before each have, None where there are none, and the padded counts int64 [E]). Padding rows
        and their probs are 0.
    """
    plan = _plan(routing_map, -1, align_size)
    counts = plan.rows_per_expert
    assert counts is not None  # noqa: S101 - for the type checker: the plan of a map knows its experts
    rows, row_probs = permute(inp, plan), permute_weights(probs, plan)
    if plan.num_rows == plan.num_slots:
        return rows, row_probs, row_id_map_of(plan), None, counts
    return rows, row_probs, row_id_map_of(_plan(routing_map, plan.num_slots)), plan.pad_offsets, counts


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | tuple[int, ...] | None = None,
    map_type: MapType = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Bring the rows back to their tokens and add up each token's, weighted where weights are given.

    Args:
        inp: [R, H] float, in the order of `moe_permute`.
        row_id_map: as `moe_permute` returned it.
        merging_probs: "mask": [T, E]; "index": [T, K], without which every choice comes back alone. Any float dtype.
        restore_shape: not needed here; the map says how many tokens there are.
        map_type: "mask" or "index".
        probs: the older name of merging_probs.
        pad_offsets: "mask": as `moe_permute_and_pad_with_probs` returned it.

    Returns:
        [T, H], or [K * T, H] for "index" without weights; in the dtype of `inp`. The sum is in float32 (float64 where
        either is), rounded once.
    """
    operator = "interop.transformer_engine.moe_unpermute"
    merging_probs = probs if merging_probs is None else merging_probs
    by_mask = check.one_of(operator, "map_type", map_type, MAP_TYPES) == "mask"
    check.shaped(operator, "inp", inp, (None, None))
    if merging_probs is not None:
        check.shaped(operator, "merging_probs", merging_probs, (None, None))
    if by_mask:
        plan = plan_from_row_id_map(row_id_map, inp.shape[0], pad_offsets=pad_offsets)
        return unpermute(inp, plan) if merging_probs is None else weighted_sum(inp, plan, merging_probs)
    if merging_probs is None:
        check.shaped(operator, "row_id_map", row_id_map, (None,))
        return unpermute(inp, plan_from_row_of_slot(row_id_map, row_id_map.shape[0], inp.shape[0]))
    num_tokens, topk = merging_probs.shape
    plan = plan_from_row_of_slot(row_id_map.view(topk, num_tokens).T, num_tokens, inp.shape[0])
    return weighted_sum(inp, plan, merging_probs)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Chunks of rows in another order: chunk `sorted_index[i]` comes i-th.

    Args:
        inp: [R, H], chunk by chunk.
        split_sizes: [N] lengths of the chunks, which add up to R; on any device.
        sorted_index: [N], a permutation; on any device.
    """
    operator = "interop.transformer_engine.moe_sort_chunks_by_index"
    return permute(inp, chunks_of(operator, "inp", inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """As `moe_sort_chunks_by_index`, with the probs [R] of the rows."""
    operator = "interop.transformer_engine.moe_sort_chunks_by_index_with_probs"
    plan = chunks_of(operator, "inp", inp, split_sizes, sorted_index)
    return permute(inp, plan), permute_weights(probs.reshape(-1, 1), plan)


def _plan(routing_map: Tensor, num_out_tokens: int, align: int = 1) -> RoutingPlan:
    size = num_out_tokens if num_out_tokens > 0 else None
    return plan_from_routing_map(as_map(routing_map), num_rows=size, num_slots=size, align=align)


# ---------------------------------------------------------------------------- gating


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: ScoreFunction,
    expert_bias: Tensor | None,
    routing_map_format: Any = "bytemap",
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token and weigh them.

    Args:
        logits: [..., E] float; computed in float32 (float64 in float64).
        topk: experts of a token.
        use_pre_softmax: softmax over all experts, then the choice; else softmax over the chosen ones.
        num_groups: with `group_topk`, equal groups of neighbours.
        group_topk: how many of the groups stay in, by the sum of their `topk // group_topk` best; None: no groups.
        scaling_factor: the weights are multiplied by it; None and 0 are none.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; the last two are divided by their sum where topk > 1.
        expert_bias: [E], added for the choice only; not with softmax.
        routing_map_format: "bytemap", "bitmap_u8" (expert e is bit e % 8, the lowest first, of byte e // 8), or the
            host's enumeration or number for them.
        topk_indices: [..., topk] of an integer dtype: the chosen ids are written there, and returned for the map.
        qb_histogram: quantile balancing is not supported; nor are the other two of it.
        qb_bin_bounds: as above.
        qb_histogram_mode: as above.

    Returns:
        (probs [..., E] in the dtype of the logits, 0 for the experts that are not chosen; the map bool [..., E] or
        uint8 [..., ceil(E / 8)], or `topk_indices`).
    """
    operator = "interop.transformer_engine.fused_topk_with_score_function"
    for name, value in (
        ("qb_histogram", qb_histogram), ("qb_bin_bounds", qb_bin_bounds), ("qb_histogram_mode", qb_histogram_mode)
    ):  # fmt: skip
        if value is not None:
            raise check.missing(operator, name, "quantile balancing")
    check.one_of(operator, "score_function", score_function, SCORES)
    if score_function == "softmax" and expert_bias is not None:
        raise check.wrong_value(operator, "expert_bias", "None with softmax", "a tensor")
    _need_experts(operator, logits)
    num_experts = logits.shape[-1]
    gating = gating_topk(
        logits.reshape(-1, num_experts),
        topk,
        bias=expert_bias,
        **gating_options(topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, logits.dtype),
    )
    probs = dense_weights(gating.weights, gating.expert_ids, num_experts).view(logits.shape)
    if topk_indices is not None:
        topk_indices.copy_(gating.expert_ids.view(topk_indices.shape))
        return probs, topk_indices
    return probs, _map(operator, gating.expert_ids, logits, routing_map_format)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: ScoreFunction, routing_map_format: Any = "bytemap"
) -> tuple[Tensor, Tensor]:
    """The choice by plain scores, and the scores, whose rows add up to 1: for `fused_moe_aux_loss`.

    Args:
        logits: [..., E] float.
        topk: experts of a token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        routing_map_format: as for `fused_topk_with_score_function`.

    Returns:
        (the map, scores [..., E] in float32, float64 in float64).
    """
    operator = "interop.transformer_engine.fused_compute_score_for_moe_aux_loss"
    check.one_of(operator, "score_function", score_function, SCORES)
    _need_experts(operator, logits)
    gating = gating_topk(logits.reshape(-1, logits.shape[-1]), topk, score=score_function)
    scores = gating.scores if score_function == "softmax" else normalize_scores(gating.scores)
    return _map(operator, gating.expert_ids, logits, routing_map_format), scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """sum_e (sum_t probs[t, e] * tokens_per_expert[e]) * E * coeff / (topk * total_num_tokens^2).

    Args:
        probs: [T, C] scores; C is E, or a multiple of it: one group of columns for each sequence.
        tokens_per_expert: [C] counts of any number dtype.
        total_num_tokens: an int or a tensor of one number.
        num_experts: E.
        topk: experts of a token.
        coeff: the coefficient.

    Returns:
        A scalar in the dtype of the probs.
    """
    loss = load_balancing_loss_from_counts(
        probs, tokens_per_expert, num_experts=num_experts, topk=topk, num_tokens=total_num_tokens, coefficient=coeff
    )
    return loss.to(probs.dtype)


def _need_experts(operator: str, logits: Tensor) -> None:
    if check.tensor(operator, "logits", logits).ndim == 0 or logits.shape[-1] == 0:
        raise check.wrong_shape(operator, "logits", "[..., E] with E of at least 1", logits)


def _map(operator: str, expert_ids: Tensor, logits: Tensor, routing_map_format: Any) -> Tensor:
    """In the format of a name, of a member of the host's enumeration or of its number."""
    name = getattr(routing_map_format, "name", routing_map_format)
    if type(name) is int and 0 <= name < len(FORMATS):
        name = FORMATS[name]
    if isinstance(name, str):
        name = name.lower()
    bits = check.one_of(operator, "routing_map_format", name, FORMATS) == "bitmap_u8"
    found = routing_map_from_ids(expert_ids, logits.shape[-1], bits=bits)
    return found.view(*logits.shape[:-1], found.shape[1])
