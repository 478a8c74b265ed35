"""What a case is about, for its explanation: the plan, what is copied or summed, and the weight of each slot."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance import exact_plans
from moeroute.conformance.case import Case
from moeroute.plan import RoutingPlan


@dataclasses.dataclass(frozen=True)
class Scene:
    """source: [T, H], what rows are copies of; rows: [R, H], what sums are made of; weights: float32 [S] or None."""

    case: Case
    arguments: Mapping[str, Any]
    plan: RoutingPlan | None
    source: Tensor | None
    rows: Tensor | None
    weights: Tensor | None

    def slot(self, slot: int) -> str:
        """A slot with its token and expert: "slot 7 (token 3, expert 2)"."""
        if self.plan is None:
            return f"slot {slot}"
        token = self.tokens[slot]
        experts = self.experts
        more = f", expert {experts[slot]}" if experts and experts[slot] >= 0 else ""
        return f"slot {slot} (token {token}{more})" if token >= 0 else f"slot {slot} (of no token)"

    @property
    def tokens(self) -> list[int]:
        """The token of each slot."""
        return [] if self.plan is None else exact_plans.tokens_of_slots(self.plan)

    @property
    def experts(self) -> list[int]:
        """The expert of each slot that has one; empty where the plan knows none."""
        if self.plan is None or (self.plan.expert_of_slot is None and self.plan.rows_per_expert is None):
            return []
        return exact_plans.experts_of_slots(self.plan)

    def expert_of_row(self, row: int) -> str:
        """ " of expert 3", or nothing where the plan knows none."""
        if self.plan is None or self.plan.rows_per_expert is None:
            return ""
        expert = exact_plans.experts_of_rows(self.plan)[row]
        return f" of expert {expert}" if expert >= 0 else ""


def scene_of(case: Case, arguments: Mapping[str, Any]) -> Scene:
    """From the names of the arguments."""
    plan = plan_behind(case, arguments)

    def first(*names: str) -> Tensor | None:
        return next((arguments[name] for name in names if isinstance(arguments.get(name), Tensor)), None)

    backward = case.operator.endswith("_backward")
    source = first("grad_tokens") if backward else first("tokens", "x", "inp")
    if case.operator == "quantize" and plan is not None:
        source = first("rows")
    rows = first("grad_rows", "rows", "permuted_tokens")
    weights = first("weights", "probs")
    of_slots = None
    if plan is not None and weights is not None and case.operator != "permute_weights":
        of_slots = _of_slots(weights, plan)
    return Scene(case, arguments, plan, source, rows, of_slots)


def plan_behind(case: Case, arguments: Mapping[str, Any]) -> RoutingPlan | None:
    """The plan that the arguments have, or mean."""
    if isinstance(arguments.get("plan"), RoutingPlan):
        found: RoutingPlan = arguments["plan"]
        return found
    if case.is_plan:
        return exact_plans.as_plan(exact_plans.CONSTRUCTORS[case.operator](**arguments))
    if "." not in case.operator:
        return None
    ids = arguments.get("indices", arguments.get("routing_map") if arguments.get("map_type") == "index" else None)
    if isinstance(ids, Tensor):
        return exact_plans.as_plan(exact_plans.plan_from_expert_ids(ids, int(ids.max()) + 1))
    if isinstance(chosen := arguments.get("routing_map"), Tensor):
        fill = bool(arguments.get("drop_and_pad"))
        capacity = arguments["num_out_tokens"] // chosen.shape[1] if fill else None
        return exact_plans.as_plan(exact_plans.plan_from_routing_map(chosen, fill=fill, capacity=capacity))
    index = arguments.get("sorted_indices")
    if not isinstance(index, Tensor):
        return None
    if "restore_shape" in arguments:
        fields = exact_plans.plan_from_token_ids(index, arguments["restore_shape"][0])
    else:
        tokens = arguments["probs"].shape[0] if "probs" in arguments else index.numel()
        fields = exact_plans.plan_from_row_of_slot(index, tokens, arguments["permuted_tokens"].shape[0])
    return exact_plans.as_plan(fields)


def _of_slots(weights: Tensor, plan: RoutingPlan) -> Tensor:
    """float32 [S]."""
    if weights.dtype is torch.float64:
        weights = weights.float()
    if weights.ndim == 1 or plan.expert_of_slot is None:
        return weights.reshape(-1)[: plan.num_slots].float()
    tokens = torch.tensor(exact_plans.tokens_of_slots(plan))
    experts = plan.expert_of_slot.long()
    inside = (tokens >= 0) & (experts >= 0) & (experts < weights.shape[1])
    return torch.where(inside, weights[tokens.clamp(min=0), experts.clamp(min=0)].float(), 0.0)
