"""What is wrong with a plan's index tensors and counts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance import exact_plans
from moeroute.conformance.case import Results
from moeroute.conformance.scene import Scene

MOST = 4


def explain(scene: Scene, name: str, actual: Tensor, right: Tensor, results: Results) -> list[str]:
    """Sentences about one field."""
    if name.endswith("per_expert"):
        return _counts(scene, name, actual, right)
    if name in ("row_of_slot", "slot_of_row"):
        return _index(scene, name, actual, right, results)
    if actual.ndim == 0:
        return [f"{int(actual)} instead of {int(right)}"]
    wrong = (actual.long() != right.long()).nonzero().flatten().tolist()
    what = {"slot_offsets": "token", "expert_of_slot": "slot"}.get(name, "entry")
    return [f"{what} {i}: {int(actual[i])} instead of {int(right[i])}" for i in wrong[:MOST]] + _more(len(wrong))


def _more(count: int, most: int = MOST) -> list[str]:
    return [f"... and {count - most} more"] if count > most else []


def _counts(scene: Scene, name: str, actual: Tensor, right: Tensor) -> list[str]:
    options: Mapping[str, Any] = scene.arguments
    actual, right = actual.long(), right.long()
    if options.get("capacity") is not None:
        without = {
            n: v for n, v in options.items() if n not in ("capacity", "pad_to_capacity", "drop", "weights", "fill")
        }
        fields = exact_plans.CONSTRUCTORS[scene.case.operator](**without)
        if fields["tokens_per_expert"] == actual.tolist():
            expert = int((actual - right).argmax())
            return [
                f"counts before the capacity of {options['capacity']}: expert {expert} has {int(actual[expert])} "
                f"instead of {int(right[expert])}"
            ]
    if torch.equal(actual, right.cumsum(0)):
        return ["running totals instead of counts"]
    if torch.equal(actual, right.cumsum(0) - right):
        return ["the first row of each expert instead of its count"]
    if name == "rows_per_expert" and torch.equal(actual, _tokens(scene)):
        return ["counts without the padding rows"]
    wrong = (actual != right).nonzero().flatten().tolist()
    return [f"expert {e}: {int(actual[e])} instead of {int(right[e])}" for e in wrong[:MOST]] + _more(len(wrong))


def _tokens(scene: Scene) -> Tensor:
    plan = scene.plan
    empty = torch.empty(0, dtype=torch.int64)
    return empty if plan is None or plan.tokens_per_expert is None else plan.tokens_per_expert


def _index(scene: Scene, name: str, actual: Tensor, right: Tensor, results: Results) -> list[str]:
    actual, right = actual.long(), right.long()
    wrong = (actual != right).nonzero().flatten().tolist()
    live = right >= 0
    shift = (actual - right)[live]
    if len(shift) and bool((shift == shift[0]).all()) and int(shift[0]) != 0 and len(wrong) == len(shift):
        what = "row" if name == "row_of_slot" else "slot"
        return [f"every {what} is {abs(int(shift[0]))} too {'large' if int(shift[0]) > 0 else 'small'}"]
    found = _exchanged(scene, name, actual, right, wrong)
    if found:
        return found
    sentences = []
    for i in wrong[:MOST]:
        is_, should = int(actual[i]), int(right[i])
        if name == "slot_of_row":
            wanted = "be padding (-1)" if should < 0 else f"hold {scene.slot(should)}"
            sentences.append(f"row {i}{scene.expert_of_row(i)} must {wanted}; it has {_named_slot(scene, is_)}")
        elif should < 0:
            sentences.append(f"{scene.slot(i)} must have no row (-1){_why(scene, i)}; it has row {is_}")
        else:
            other = "no row (-1)" if is_ < 0 else f"row {is_}"
            sentences.append(f"{scene.slot(i)} has {other} instead of row {should}")
    return sentences + _more(len(wrong))


def _named_slot(scene: Scene, slot: int) -> str:
    plan = scene.plan
    if slot < 0:
        return "-1 (padding)"
    if plan is None or slot >= plan.num_slots:
        return f"{slot}, which is no slot"
    return scene.slot(slot)


def _why(scene: Scene, slot: int) -> str:
    ids, capacity = scene.arguments.get("expert_ids"), scene.arguments.get("capacity")
    if isinstance(ids, Tensor):
        chosen, experts = int(ids.reshape(-1)[slot]), scene.arguments.get("num_experts")
        if chosen < 0 or (experts is not None and chosen >= experts):
            return f", as its id {chosen} is no expert's"
        expert_range = scene.arguments.get("expert_range")
        if expert_range is not None and not expert_range[0] <= chosen < expert_range[1]:
            return f", as expert {chosen} is outside the range"
    return "" if capacity is None else f", as its expert is over the capacity of {capacity}"


def _exchanged(scene: Scene, name: str, actual: Tensor, right: Tensor, wrong: list[int]) -> list[str]:
    """The same numbers in another order inside each expert."""
    if name != "row_of_slot" or scene.plan is None or scene.plan.rows_per_expert is None:
        return []
    if sorted(actual[wrong].tolist()) != sorted(right[wrong].tolist()):
        return []
    of_row = exact_plans.experts_of_rows(scene.plan)
    rows = len(of_row)
    if any(not (0 <= int(actual[i]) < rows and of_row[int(actual[i])] == of_row[int(right[i])]) for i in wrong):
        return []
    first, row = wrong[0], int(right[wrong[0]])
    other = next(i for i in wrong if int(actual[i]) == row)
    return [
        f"rows of a tie exchanged: {scene.slot(other)} has row {row}, which belongs to {scene.slot(first)}; slots of "
        f"one expert stay in their order ({len(wrong)} slots)"
    ]
