"""What Megatron-Core and Transformer Engine agree on: maps of any dtype, the gate, chunks, the weighted sum."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import MAPS
from moeroute.ops.indices.op import plan_from_chunks
from moeroute.permutation import unpermute
from moeroute.plan import RoutingPlan

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORES: tuple[ScoreFunction, ...] = get_args(ScoreFunction)


def as_map(routing_map: Tensor) -> Tensor:
    """The map in a dtype that plans take: theirs may be of any."""
    return routing_map if routing_map.dtype in MAPS else routing_map.to(torch.bool)


def chunks_of(operator: str, argument: str, rows: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> RoutingPlan:
    """The plan that brings chunk `sorted_index[i]` of the rows to place i; both tensors may be on any device."""
    check.shaped(operator, argument, rows, (None, None))
    return plan_from_chunks(split_sizes.to(rows.device), sorted_index.to(rows.device), rows.shape[0])


def weighted_sum(rows: Tensor, plan: RoutingPlan, probs: Tensor) -> Tensor:
    """`unpermute` in the dtype of the rows; in float64 where either is, as torch promotes."""
    if (rows.dtype is torch.float64) == (probs.dtype is torch.float64):
        return unpermute(rows, plan, probs)
    return unpermute(rows.to(torch.float64), plan, probs.to(torch.float64)).to(rows.dtype)


def group_options(topk: int, num_groups: int | None, group_topk: int | None) -> dict[str, Any]:
    """gating_topk's options for groups; without `group_topk` none."""
    if not group_topk:
        return {}
    return {"num_groups": num_groups, "topk_groups": group_topk, "group_score": topk // group_topk}


def gating_options(
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: ScoreFunction,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """gating_topk's options, but for the bias; a scaling factor of None or 0 is none."""
    softmax = score_function == "softmax"
    return {
        "score": "topk_softmax" if softmax and not use_pre_softmax else score_function,
        "renormalize": not softmax and topk > 1,
        "scaling_factor": scaling_factor or 1.0,
        "weights_dtype": dtype,
        **group_options(topk, num_groups, group_topk),
    }
