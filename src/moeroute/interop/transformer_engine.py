"""Transformer Engine: the functions of `transformer_engine.pytorch` for Mixture-of-Experts by this package.

Names, arguments and results are the host's. The host itself is not needed: these run on any device, in float64 too,
the router included, and can be differentiated as often as wanted.

`row_id_map`, which the permuting functions return for the way back, has the host's layout, by `map_type`:

- "mask": int32 [T, 2 * E + 1]; row t has the rows of the n experts of the token, from column E on their ids, and n
  last. What the host leaves undefined is -1. The host lists a token's experts descending, this package ascending.
- "index": int32 [K * T], the row of choice k of token t at `k * T + t`; -1 where it has none.
"""

from typing import Any

import torch
from torch import Tensor

from moeroute import check
from moeroute.ops.gating.op import gating_topk
from moeroute.ops.indices.op import plan_from_chunks, plan_from_row_of_slot
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.weights.op import dense_weights, routing_map_from_ids
from moeroute.permutation import permute, permute_weights, unpermute
from moeroute.plan import RoutingPlan

MAP_TYPES = ("mask", "index")
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
FORMATS = ("bytemap", "bitmap_u8")


# ---------------------------------------------------------------------------- rows


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Token copies grouped by expert, inside an expert by token.

    Args:
        inp: [T, H], of any dtype that is not quantized.
        routing_map: "index": [T, K] expert ids of any integer dtype; -1 is a dropped choice.
        num_out_tokens: the number of rows; 0 and below: all.
        max_token_num: not needed here.
        map_type: "index"; "mask" is not supported yet.

    Returns:
        (rows [R, H], row_id_map).
    """
    if check.one_of("interop.transformer_engine.moe_permute", "map_type", map_type, MAP_TYPES) == "mask":
        raise check.missing("interop.transformer_engine.moe_permute", "map_type='mask'", "the host's row_id_map")
    num_tokens, topk = routing_map.shape
    num_rows = num_out_tokens if num_out_tokens > 0 else routing_map.numel()
    plan = plan_from_expert_ids(routing_map, None, num_rows=num_rows)
    return permute(inp, plan), plan.row_of_slot.view(num_tokens, topk).T.reshape(-1)


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | tuple[int, ...] | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Bring the rows back to their tokens and add up each token's, weighted where weights are given.

    Args:
        inp: [R, H] float, in the order of `moe_permute`.
        row_id_map: as `moe_permute` returned it.
        merging_probs: "index": [T, K], any float dtype; without them every choice comes back alone.
        restore_shape: not needed here; the map says how many tokens there are.
        map_type: "index"; "mask" is not supported yet.
        probs: the older name of merging_probs.
        pad_offsets: not supported yet.

    Returns:
        [T, H], or [K * T, H] for "index" without weights; in the dtype of `inp`. The sum is in float32 (float64 where
        either is), rounded once.
    """
    if check.one_of("interop.transformer_engine.moe_unpermute", "map_type", map_type, MAP_TYPES) == "mask":
        raise check.missing("interop.transformer_engine.moe_unpermute", "map_type='mask'", "the host's row_id_map")
    merging_probs = probs if merging_probs is None else merging_probs
    if merging_probs is None:
        return unpermute(inp, plan_from_row_of_slot(row_id_map, row_id_map.shape[0], inp.shape[0]))
    num_tokens, topk = merging_probs.shape
    plan = plan_from_row_of_slot(row_id_map.view(topk, num_tokens).T, num_tokens, inp.shape[0])
    return _weighted_sum(inp, plan, merging_probs)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Chunks of rows in another order: chunk `sorted_index[i]` comes i-th.

    Args:
        inp: [R, H], chunk by chunk.
        split_sizes: [N] lengths of the chunks, which add up to R; on any device.
        sorted_index: [N], a permutation; on any device.
    """
    return permute(inp, _chunks(inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """As `moe_sort_chunks_by_index`, with the probs [R] of the rows."""
    plan = _chunks(inp, split_sizes, sorted_index)
    return permute(inp, plan), permute_weights(probs.reshape(-1, 1), plan)


def _chunks(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> RoutingPlan:
    return plan_from_chunks(split_sizes.to(inp.device), sorted_index.to(inp.device), inp.shape[0])


def _weighted_sum(rows: Tensor, plan: RoutingPlan, probs: Tensor) -> Tensor:
    """In float64 where either is."""
    if (rows.dtype is torch.float64) == (probs.dtype is torch.float64):
        return unpermute(rows, plan, probs)
    return unpermute(rows.to(torch.float64), plan, probs.to(torch.float64)).to(rows.dtype)


# ---------------------------------------------------------------------------- gating


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
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
    softmax = check.one_of(operator, "score_function", score_function, SCORES) == "softmax"
    if softmax and expert_bias is not None:
        raise check.wrong_value(operator, "expert_bias", "None with softmax", "a tensor")
    groups: dict[str, Any] = {}
    if group_topk:
        groups = {"num_groups": num_groups, "topk_groups": group_topk, "group_score": topk // group_topk}
    num_experts = logits.shape[-1]
    gating = gating_topk(
        logits.reshape(-1, num_experts),
        topk,
        score="topk_softmax" if softmax and not use_pre_softmax else score_function,
        bias=expert_bias,
        renormalize=not softmax and topk > 1,
        scaling_factor=scaling_factor or 1.0,
        weights_dtype=logits.dtype,
        **groups,
    )
    probs = dense_weights(gating.weights, gating.expert_ids, num_experts).view(logits.shape)
    if topk_indices is not None:
        topk_indices.copy_(gating.expert_ids.view(topk_indices.shape))
        return probs, topk_indices
    return probs, _map(operator, gating.expert_ids, logits, routing_map_format)


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
