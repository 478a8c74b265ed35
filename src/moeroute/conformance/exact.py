"""What an operator must return, computed anew: in float64, or by Python loops where a result is integers or copies.

Every result is a `Truth`: the exact value and how far a correct float32 computation may be from it. This confirms the
digests before they are written, and is what the ratios of errors are measured against. It shares no code with the
backends.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance import exact_activations, exact_gating, exact_peers, exact_plans
from moeroute.conformance.case import Case, Results, canonical, named
from moeroute.conformance.truth import Truth, copied, half_ulp, rounded
from moeroute.plan import RoutingPlan


def truths(case: Case, arguments: Mapping[str, Any], results: Results) -> dict[str, Truth]:
    """The truth of each result. `results` are a candidate's: its scores decide what it must choose."""
    operator = case.operator
    if case.is_plan:
        fields = exact_plans.CONSTRUCTORS[operator](**arguments)
        return {name: copied(value) for name, value in named(exact_plans.as_plan(fields)).items()}
    if "." in operator:
        return exact_peers.truths(operator, arguments, results)
    if operator.startswith("gating") or operator == "normalize_scores":
        return exact_gating.truths(operator, arguments, results)
    if operator.startswith("activate"):
        return exact_activations.truths(**arguments)
    return _OPERATORS[operator](**{n: v for n, v in arguments.items() if not _only_autograd(case, n)})


def _only_autograd(case: Case, name: str) -> bool:
    return case.through == "autograd" and case.operator == "permute_backward" and name == "tokens"


def refusals(case: Case, arguments: Mapping[str, Any], results: Results) -> list[str]:
    """Why the truth does not confirm these results; empty where it does."""
    found = []
    expected = truths(case, arguments, results)
    if expected.keys() != results.keys():
        return [f"{case.name}: {sorted(results)} where {sorted(expected)} were expected"]
    for name, truth in expected.items():
        wrong = truth.wrong(results[name])
        if isinstance(wrong, str):
            found.append(f"{case.name}: {name}: {wrong}")
        elif bool(wrong.any()):
            place = tuple(int(i) for i in wrong.nonzero()[0])
            is_, should = canonical(results[name])[place].item(), truth.value[place].item()
            found.append(f"{case.name}: {name}{list(place)} is {is_!r}, the exact value {should!r}")
    return found


# ---------------------------------------------------------------------------- rows


def _index(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class _Slots:
    """The slots of a plan that have a row and a token, and which these are."""

    slot: Tensor
    token: Tensor
    row: Tensor

    @staticmethod
    def of(plan: RoutingPlan) -> "_Slots":
        tokens, rows = exact_plans.tokens_of_slots(plan), plan.row_of_slot.tolist()
        live = [s for s in range(len(rows)) if tokens[s] >= 0 and 0 <= rows[s] < plan.num_rows]
        return _Slots(_index(live), _index([tokens[s] for s in live]), _index([rows[s] for s in live]))


def _of_slots(weights: Tensor, plan: RoutingPlan) -> Tensor:
    """One weight a slot; 0 for a slot without a token or an expert."""
    tokens = exact_plans.tokens_of_slots(plan)
    if weights.ndim == 1 or plan.expert_of_slot is None:
        flat = weights.reshape(-1).clone()
        flat[_index([s for s, t in enumerate(tokens) if t < 0])] = 0
        return flat
    found = weights.new_zeros(plan.num_slots)
    for slot, (token, expert) in enumerate(zip(tokens, plan.expert_of_slot.tolist(), strict=True)):
        if token >= 0 and 0 <= expert < weights.shape[1]:
            found[slot] = weights[token, expert]
    return found


def _beside(weights: Tensor, rows: Tensor) -> Tensor:
    """float64 weights beside narrower rows count as float32."""
    narrow = weights.dtype is torch.float64 and rows.dtype is not torch.float64
    return weights.float() if narrow else weights


def _spread(x: Tensor, plan: RoutingPlan, weights: Tensor | None) -> Truth:
    """x by row, weighted; where several slots name one row it holds the last one's."""
    slots = plan.slot_of_row.tolist()
    tokens = exact_plans.tokens_of_slots(plan)
    rows = [r for r, s in enumerate(slots) if s >= 0 and tokens[s] >= 0]
    mine, owner = _index([slots[r] for r in rows]), _index([tokens[slots[r]] for r in rows])
    if weights is None:
        found = torch.zeros(plan.num_rows, x.shape[1], dtype=x.dtype)
        found[_index(rows)] = x[owner]
        return copied(found)
    exact = torch.zeros(plan.num_rows, x.shape[1], dtype=torch.float64)
    exact[_index(rows)] = weights.double()[mine, None] * x.double()[owner]
    return rounded(exact, x.dtype)


def _combine(
    rows: Tensor, plan: RoutingPlan, weights: Tensor | None, init: Any = None, bias: Tensor | None = None
) -> Truth:
    """The sums, with the magnitude of their terms as the measure of what rounding may do."""
    slots = _Slots.of(plan)
    total = torch.zeros(plan.num_tokens, rows.shape[1], dtype=torch.float64)
    magnitude = torch.zeros_like(total)
    for part in () if init is None else init if isinstance(init, tuple) else (init,):
        total, magnitude = total + part.double(), magnitude + part.double().abs()
    terms = rows.double()[slots.row]
    size = terms.abs()
    if bias is not None and plan.expert_of_slot is not None:
        expert = plan.expert_of_slot.long()[slots.slot]
        added = torch.where((expert >= 0)[:, None], bias.double()[expert.clamp(min=0)], 0.0)
        terms, size = terms + added, size + added.abs()
    if weights is not None:
        weight = weights.double()[slots.slot, None]
        terms, size = torch.where(weight == 0, 0.0, weight * terms), torch.where(weight == 0, 0.0, weight.abs() * size)
    total = total.index_add(0, slots.token, terms)
    magnitude = magnitude.index_add(0, slots.token, size)
    most = int(torch.bincount(slots.token, minlength=1).max()) if len(slots.slot) else 0
    return rounded(total, rows.dtype, (most + 4) * magnitude)


def _dots(rows: Tensor, x: Tensor, plan: RoutingPlan, dtype: torch.dtype, bias: Tensor | None = None) -> Truth:
    slots = _Slots.of(plan)
    left = rows.double()[slots.row]
    size = left.abs()
    if bias is not None and plan.expert_of_slot is not None:
        expert = plan.expert_of_slot.long()[slots.slot]
        added = torch.where((expert >= 0)[:, None], bias.double()[expert.clamp(min=0)], 0.0)
        left, size = left + added, size + added.abs()
    right = x.double()[slots.token]
    exact = torch.zeros(plan.num_slots, dtype=torch.float64)
    magnitude = torch.zeros_like(exact)
    exact[slots.slot] = (left * right).sum(1)
    magnitude[slots.slot] = (size * right.abs()).sum(1)
    return rounded(exact, dtype, (rows.shape[1] / 256 + 12) * magnitude)


def _permute(tokens: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> dict[str, Truth]:
    slots = None if weights is None else _of_slots(_beside(weights, tokens), plan)
    return {"rows": _spread(tokens, plan, slots)}


def _unpermute(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> dict[str, Truth]:
    slots = None if weights is None else _of_slots(_beside(weights, rows), plan)
    return {"tokens": _combine(rows, plan, slots)}


def _permute_backward(grad_rows: Tensor, plan: RoutingPlan) -> dict[str, Truth]:
    return {"grad_tokens": _combine(grad_rows, plan, None)}


def _unpermute_backward(
    grad_tokens: Tensor, rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None
) -> dict[str, Truth]:
    if weights is None:
        return {"grad_rows": _spread(grad_tokens, plan, None)}
    narrow = _beside(weights, rows)
    dots = _dots(rows, grad_tokens, plan, narrow.dtype)
    value, bound = (
        _scattered(dots.value, plan, tuple(weights.shape)),
        _scattered(dots.bound, plan, tuple(weights.shape)),
    )
    return {
        "grad_rows": _spread(grad_tokens, plan, _of_slots(narrow, plan)),
        "grad_weights": Truth(value, bound, weights.dtype, narrow.dtype),
    }


def _scattered(of_slots: Tensor, plan: RoutingPlan, shape: tuple[int, ...]) -> Tensor:
    """Values of the slots in the shape of the weights; no two slots share a place in any case."""
    tokens = exact_plans.tokens_of_slots(plan)
    if plan.expert_of_slot is None:
        return of_slots.reshape(shape)
    found = of_slots.new_zeros(shape)
    for slot, (token, expert) in enumerate(zip(tokens, plan.expert_of_slot.tolist(), strict=True)):
        if token >= 0 and expert >= 0:
            found[token, expert] = of_slots[slot]
    return found


# ---------------------------------------------------------------------------- weights and maps


def _permute_weights(weights: Tensor, plan: RoutingPlan) -> dict[str, Truth]:
    slots = _of_slots(weights, plan)
    of_row = plan.slot_of_row.long()
    found = torch.where(of_row >= 0, slots[of_row.clamp(min=0)], 0) if len(slots) else weights.new_zeros(len(of_row))
    return {"row_weights": copied(found)}


def _permute_weights_backward(grad: Tensor, plan: RoutingPlan) -> dict[str, Truth]:
    row = plan.row_of_slot.long()
    slots = torch.where(row >= 0, grad[row.clamp(min=0)], 0)
    if plan.expert_of_slot is not None:
        shape: tuple[int, ...] = (plan.num_tokens, plan.num_experts or 0)
    else:
        shape = (plan.num_slots,) if plan.topk is None else (plan.num_tokens, plan.topk)
    return {"grad_weights": copied(_scattered(slots, plan, shape))}


def _dense_weights(weights: Tensor, expert_ids: Tensor, num_experts: int) -> dict[str, Truth]:
    inside = (expert_ids >= 0) & (expert_ids < num_experts)
    at = torch.where(inside, expert_ids, 0)
    parts = torch.where(inside, weights.double(), 0.0)
    zeros = torch.zeros(weights.shape[0], num_experts, dtype=torch.float64)
    value = zeros.scatter_add(1, at, parts)
    return {"matrix": rounded(value, weights.dtype, 4 * zeros.scatter_add(1, at, parts.abs()))}


def _chosen(pairs: list[tuple[int, int]], num_tokens: int, num_experts: int) -> Tensor:
    found = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    for token, expert in pairs:
        if token >= 0 and 0 <= expert < num_experts:
            found[token, expert] = True
    return found


def _routing_map_of(plan: RoutingPlan) -> dict[str, Truth]:
    experts, tokens = exact_plans.experts_of_slots(plan), exact_plans.tokens_of_slots(plan)
    pairs = [(tokens[s], experts[s]) for s, row in enumerate(plan.row_of_slot.tolist()) if 0 <= row < plan.num_rows]
    return {"routing_map": copied(_chosen(pairs, plan.num_tokens, plan.num_experts or 0))}


def _routing_map_from_ids(expert_ids: Tensor, num_experts: int, bits: bool = False) -> dict[str, Truth]:
    pairs = [(t, e) for t, line in enumerate(expert_ids.tolist()) for e in line]
    found = _chosen(pairs, expert_ids.shape[0], num_experts)
    if not bits:
        return {"routing_map": copied(found)}
    packed = torch.zeros(expert_ids.shape[0], -(-num_experts // 8), dtype=torch.uint8)
    for expert in range(num_experts):
        packed[:, expert // 8] |= found[:, expert].to(torch.uint8) << (expert % 8)
    return {"routing_map": copied(packed)}


# ---------------------------------------------------------------------------- integers


def _nearest(exact: Tensor, magnitude: Tensor) -> Truth:
    """int8: within half a unit of the exact value, and what rounding may do to it; a NaN gives 0."""
    slack = torch.nan_to_num(magnitude * 8 * 2.0**-24, posinf=0.0, nan=0.0) + 1e-9
    value = torch.where(exact.isnan(), 0.0, exact.clamp(-128, 127))
    return Truth(value, torch.where(exact.isnan(), 0.0, 0.5 + slack), torch.int8)


def _dynamic(x: Tensor, smooth: Tensor | None, expert_of_row: list[int]) -> dict[str, Truth]:
    values = x.double()
    if smooth is not None and smooth.ndim == 1:
        values = values * smooth.double()
    elif smooth is not None:
        for row, expert in enumerate(expert_of_row):
            if 0 <= expert < smooth.shape[0]:
                values[row] *= smooth[expert].double()
    largest = torch.where(values.isnan().any(1), torch.nan, values.abs().amax(1) if values.numel() else values.sum(1))
    scales = largest / 127
    exact = values / scales[:, None]
    exact[~scales.isfinite() | (scales == 0)] = torch.nan
    return {"quantized": _nearest(exact, exact.abs()), "scales": rounded(scales, torch.float32, 4 * scales.abs())}


def _dynamic_quantize(
    rows: Tensor, smooth: Tensor | None = None, expert_of_row: Tensor | None = None
) -> dict[str, Truth]:
    return _dynamic(rows, smooth, [] if expert_of_row is None else expert_of_row.tolist())


def _spread_quantized(
    x: Tensor, plan: RoutingPlan, smooth: Tensor | None = None, expert_of_row: Tensor | None = None
) -> dict[str, Truth]:
    of_row = exact_plans.experts_of_rows(plan) if expert_of_row is None else expert_of_row.tolist()
    found = _dynamic(_spread(x, plan, None).value.to(x.dtype), smooth, of_row)
    padding = plan.slot_of_row < 0
    for truth in found.values():
        truth.value[padding], truth.bound[padding] = 0, 0
    return found


def _quantize(rows: Tensor, scale: Tensor, offset: Tensor, plan: RoutingPlan | None = None) -> dict[str, Truth]:
    values = rows if plan is None else _spread(rows, plan, None).value.to(rows.dtype)
    exact = values.double() * scale.double() + offset.double()
    truth = _nearest(exact, (values.double() * scale.double()).abs() + 1)
    if plan is not None:
        padding = plan.slot_of_row < 0
        truth.value[padding], truth.bound[padding] = 0, 0
    return {"quantized": truth}


_OPERATORS: dict[str, Callable[..., dict[str, Truth]]] = {
    "permute": _permute,
    "unpermute": _unpermute,
    "permute_backward": _permute_backward,
    "unpermute_backward": _unpermute_backward,
    "spread": lambda x, plan, weights=None: {"rows": _spread(x, plan, weights)},
    "combine": lambda rows, plan, weights=None, init=None, bias=None: {
        "tokens": _combine(rows, plan, weights, init, bias)
    },
    "row_dots": lambda rows, x, plan, bias=None: {"dots": _dots(rows, x, plan, torch.float32, bias)},
    "permute_weights": _permute_weights,
    "slot_weights": lambda weights, plan: {"slot_weights": copied(_of_slots(weights, plan))},
    "permute_weights_backward": _permute_weights_backward,
    "dense_weights": _dense_weights,
    "routing_map_of": _routing_map_of,
    "routing_map_from_ids": _routing_map_from_ids,
    "row_id_map": lambda plan: {"row_id_map": copied(torch.tensor(exact_plans.row_id_map(plan), dtype=torch.int32))},
    "dynamic_quantize": _dynamic_quantize,
    "spread_quantized": _spread_quantized,
    "quantize": _quantize,
}
__all__ = ["half_ulp", "refusals", "truths"]
