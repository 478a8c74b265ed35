"""A case with the first half of its tokens only: what row t of a result is must not depend on the others."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance.case import Case
from moeroute.plan import RoutingPlan

BY_TOKEN = ("weights", "expert_ids", "scores", "grad_logits", "tokens", "grad_tokens")
SUMS = ("unpermute", "combine", "permute_backward")
GATES = ("gating_topk", "gating_topk_backward")


@dataclasses.dataclass(frozen=True)
class Half:
    """Arguments for the first `count` tokens, and the results that have a row for each."""

    arguments: dict[str, Any]
    count: int
    results: tuple[str, ...] = BY_TOKEN


def first_half(case: Case, arguments: Mapping[str, Any]) -> Half | None:
    """None for operators whose results are not token by token, and where there is but one token."""
    if case.operator in GATES:
        first = arguments["logits"] if "logits" in arguments else arguments["scores"]
        count = first.shape[0] // 2
        if count == 0:
            return None
        return Half(
            {name: _cut(value, first.shape[0], count) for name, value in arguments.items() if name != "bias"}
            | {name: value for name, value in arguments.items() if name == "bias"},
            count,
        )
    plan = arguments.get("plan")
    if case.operator not in SUMS or not isinstance(plan, RoutingPlan) or plan.num_tokens < 2:
        return None
    count = plan.num_tokens // 2
    kept = ("rows", "grad_rows", "bias")
    found = {n: v if n in kept else _cut(v, plan.num_tokens, count) for n, v in arguments.items() if n != "plan"}
    if isinstance(weights := arguments.get("weights"), Tensor) and weights.ndim == 1:  # one for each slot
        found["weights"] = weights[: _slots(plan, count)]
    return Half({**found, "plan": _part(plan, count)}, count)


def _cut(value: Any, size: int, count: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(part, size, count) for part in value)
    return value[:count] if isinstance(value, Tensor) and value.ndim and value.shape[0] == size else value


def _slots(plan: RoutingPlan, count: int) -> int:
    return count * (plan.topk or 0) if plan.slot_offsets is None else int(plan.slot_offsets[count])


def _part(plan: RoutingPlan, count: int) -> RoutingPlan:
    slots = _slots(plan, count)
    return dataclasses.replace(
        plan,
        row_of_slot=plan.row_of_slot[:slots],
        slot_of_row=torch.where(plan.slot_of_row < slots, plan.slot_of_row, -1),
        num_tokens=count,
        slot_offsets=None if plan.slot_offsets is None else plan.slot_offsets[: count + 1],
        expert_of_slot=None if plan.expert_of_slot is None else plan.expert_of_slot[:slots],
    )
