"""Mixture-of-Experts routing for PyTorch, with the same bits on every device.

The data path:

    weights, expert_ids, scores = gating_topk(logits, k=8)       choose experts for every token
    plan   = plan_from_expert_ids(expert_ids, num_experts=256)   where every token copy goes
    rows   = permute(tokens, plan)                               [R, H], expert by expert
    rows   = your_experts(rows, plan.rows_per_expert)
    output = unpermute(rows, plan, weights)                      [T, H], the weighted sum

`spread`, `combine` and `row_dots` are what permute, unpermute and all their gradients are made of.
`moeroute.nn` has the layer, `moeroute.expert_parallel` its experts on several ranks, `moeroute.aclnn` the calls of
CANN, `moeroute.interop` the names of other libraries; each is imported when it is first used.
"""

import importlib
import types

import moeroute.ops.activations.op
import moeroute.ops.exchange
import moeroute.ops.experts
import moeroute.ops.recomputed
import moeroute.ops.router_product  # noqa: F401
from moeroute.memory import (
    empty_cache,
    memory_stats,
    set_memory_pool,
)
from moeroute.ops.balance import (
    BalanceStatistics,
    balance_statistics,
    load_balancing_loss,
    load_balancing_loss_from_counts,
    router_z_loss,
    update_expert_bias,
)
from moeroute.ops.gating.op import (
    Gating,
    gating_topk,
    gating_topk_backward,
)
from moeroute.ops.hash_routing import look_up_expert_ids
from moeroute.ops.indices.op import (
    plan_from_chunks,
    plan_from_row_id_map,
    plan_from_row_of_slot,
    plan_from_segments,
    plan_from_token_ids,
    row_id_map,
)
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.normalize import normalize_scores
from moeroute.ops.planning.op import capacity_from_factor, plan_from_expert_ids
from moeroute.ops.quantization.op import dynamic_quantize, quantize, spread_quantized
from moeroute.ops.rows.op import combine, row_dots, spread
from moeroute.ops.sinkhorn import sinkhorn
from moeroute.ops.weights.op import dense_weights, routing_map_from_ids, routing_map_of, slot_weights
from moeroute.permutation import (
    permute,
    permute_backward,
    permute_weights,
    permute_weights_backward,
    unpermute,
    unpermute_backward,
)
from moeroute.plan import RoutingPlan

__version__ = "0.1.0"
__all__ = [
    "BalanceStatistics",
    "Gating",
    "RoutingPlan",
    "balance_statistics",
    "capacity_from_factor",
    "combine",
    "dense_weights",
    "dynamic_quantize",
    "empty_cache",
    "gating_topk",
    "gating_topk_backward",
    "load_balancing_loss",
    "load_balancing_loss_from_counts",
    "look_up_expert_ids",
    "memory_stats",
    "normalize_scores",
    "permute",
    "permute_backward",
    "permute_weights",
    "permute_weights_backward",
    "plan_from_chunks",
    "plan_from_expert_ids",
    "plan_from_routing_map",
    "plan_from_row_id_map",
    "plan_from_row_of_slot",
    "plan_from_segments",
    "plan_from_token_ids",
    "quantize",
    "router_z_loss",
    "routing_map_from_ids",
    "routing_map_of",
    "row_dots",
    "row_id_map",
    "set_memory_pool",
    "sinkhorn",
    "slot_weights",
    "spread",
    "spread_quantized",
    "unpermute",
    "unpermute_backward",
    "update_expert_bias",
]


def __getattr__(name: str) -> types.ModuleType:
    if name in ("aclnn", "conformance", "expert_parallel", "interop", "nn"):
        return importlib.import_module(f"moeroute.{name}")
    raise AttributeError(f"module 'moeroute' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "aclnn", "conformance", "expert_parallel", "interop", "nn"})
