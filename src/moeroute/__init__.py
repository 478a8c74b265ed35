"""Mixture-of-Experts routing for PyTorch, with the same bits on every device.

The data path:

    weights, expert_ids, scores = gating_topk(logits, k=8)       choose experts for every token
    plan   = plan_from_expert_ids(expert_ids, num_experts=256)   where every token copy goes
    rows   = permute(tokens, plan)                               [R, H], expert by expert
    rows   = your_experts(rows, plan.rows_per_expert)
    output = unpermute(rows, plan, weights)                      [T, H], the weighted sum

`spread`, `combine` and `row_dots` are what permute, unpermute and all their gradients are made of.
"""

from moeroute.memory import empty_cache as empty_cache
from moeroute.memory import memory_stats as memory_stats
from moeroute.memory import set_memory_pool as set_memory_pool
from moeroute.ops.balance import BalanceStatistics as BalanceStatistics
from moeroute.ops.balance import balance_statistics as balance_statistics
from moeroute.ops.balance import load_balancing_loss as load_balancing_loss
from moeroute.ops.balance import router_z_loss as router_z_loss
from moeroute.ops.balance import update_expert_bias as update_expert_bias
from moeroute.ops.gating.op import Gating as Gating
from moeroute.ops.gating.op import gating_topk as gating_topk
from moeroute.ops.gating.op import gating_topk_backward as gating_topk_backward
from moeroute.ops.permutation.op import combine as combine
from moeroute.ops.permutation.op import permute as permute
from moeroute.ops.permutation.op import permute_backward as permute_backward
from moeroute.ops.permutation.op import permute_weights as permute_weights
from moeroute.ops.permutation.op import permute_weights_backward as permute_weights_backward
from moeroute.ops.permutation.op import row_dots as row_dots
from moeroute.ops.permutation.op import slot_weights as slot_weights
from moeroute.ops.permutation.op import spread as spread
from moeroute.ops.permutation.op import unpermute as unpermute
from moeroute.ops.permutation.op import unpermute_backward as unpermute_backward
from moeroute.ops.planning.op import RoutingPlan as RoutingPlan
from moeroute.ops.planning.op import capacity_from_factor as capacity_from_factor
from moeroute.ops.planning.op import plan_from_expert_ids as plan_from_expert_ids
from moeroute.ops.planning.op import plan_from_routing_map as plan_from_routing_map
from moeroute.ops.planning.op import plan_from_row_of_slot as plan_from_row_of_slot
from moeroute.ops.planning.op import plan_from_segments as plan_from_segments
from moeroute.ops.planning.op import plan_from_token_ids as plan_from_token_ids

__version__ = "0.1.0"
