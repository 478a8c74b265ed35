"""What is wrong with a result, in words: the slot, token, expert and row concerned, and what stands there instead.

explain -> words_rows (copies and weighted sums), words_gating, plans and everything else here
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance import words_gating, words_plans, words_rows
from moeroute.conformance.case import Case, Results
from moeroute.conformance.compare import different, ulps
from moeroute.conformance.scene import Scene, scene_of

MOST = 4  # sentences of one kind
CLOSE = {torch.float32: 64, torch.float16: 2, torch.bfloat16: 2, torch.float64: 64}


def explain(case: Case, arguments: Mapping[str, Any], actual: Results, right: Results) -> list[str]:
    """Sentences about everything that differs; none where nothing does.

    Args:
        case: the case.
        arguments: its arguments, on the CPU.
        actual: what came, by name; results that it lacks are left out.
        right: what should have come.
    """
    found = []
    scene = scene_of(case, arguments)
    for name, expected in right.items():
        if name in actual:
            found += [f"{name}: {sentence}" for sentence in of_result(case, scene, name, actual, expected, right)]
    return found


def of_result(case: Case, scene: Scene, name: str, actual: Results, expected: Tensor, right: Results) -> list[str]:
    """Sentences about one result."""
    found = actual[name].detach().cpu()
    if found.shape != expected.shape:
        return [shapes(case, scene, name, found, expected)]
    if found.dtype != expected.dtype and (found.dtype.is_floating_point or expected.dtype.is_floating_point):
        return [f"dtype {str(found.dtype)[6:]} instead of {str(expected.dtype)[6:]}"]
    if not bool(different(found, expected).any()):
        return []
    if case.is_plan:
        sentences = words_plans.explain(scene, name, found, expected, right)
    elif name in ("weights", "expert_ids", "scores", "grad_logits", "probs"):
        sentences = words_gating.explain(scene, name, actual, right)
    else:
        sentences = words_rows.explain(scene, name, found, expected)
    return sentences or generic(found, expected)


def shapes(case: Case, scene: Scene, name: str, found: Tensor, expected: Tensor) -> str:
    """Another shape, with what the number of rows may mean."""
    text = f"shape {list(found.shape)} instead of {list(expected.shape)}"
    plan = scene.plan
    if plan is not None and found.ndim and found.shape[0] == int((plan.row_of_slot >= 0).sum()) < expected.shape[0]:
        return f"{text}: there is no room for padding rows"
    return text


def generic(actual: Tensor, expected: Tensor) -> list[str]:
    """Where nothing more is known: how many elements, by how much, and the first of them."""
    wrong = different(actual, expected)
    count, place = int(wrong.sum()), tuple(int(i) for i in wrong.nonzero()[0])
    first = f"at {list(place)} {actual[place].item()!r} instead of {expected[place].item()!r}"
    if not actual.dtype.is_floating_point:
        return [f"{count} of {wrong.numel()} elements differ: {first}"]
    unwritten = wrong & actual.isnan() & ~expected.isnan()
    if bool(unwritten.any()) and int(unwritten.sum()) == count:
        return [f"{count} of {wrong.numel()} elements are NaN (never written?): {first}"]
    worst = int(ulps(actual, expected).max())
    if worst == 0:
        return [f"{count} zeros have the other sign: {first}"]
    if worst <= CLOSE.get(actual.dtype, 0):
        amount = "1 ulp" if worst == 1 else f"up to {worst} ulps"
        return [
            f"rounded otherwise (a sum in another order?): {amount} in {count} of {wrong.numel()} elements: {first}"
        ]
    constant = words_rows.constant_factor(actual, expected)
    return [f"{count} of {wrong.numel()} elements differ{constant}: {first}"]
