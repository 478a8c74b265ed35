"""What is wrong with a choice of experts, its weights, and its gradient."""

import torch
from torch import Tensor

from moeroute.conformance.case import Results
from moeroute.conformance.compare import different
from moeroute.conformance.scene import Scene

MOST = 4


def explain(scene: Scene, name: str, actual: Results, right: Results) -> list[str]:
    """Sentences about one result of gating; none where nothing particular is known."""
    if name == "expert_ids":
        return _ids(scene, actual, right)
    if (
        name == "weights"
        and "expert_ids" in actual
        and bool(different(actual["expert_ids"], right["expert_ids"]).any())
    ):
        return ["of other experts, see expert_ids"]
    found, expected = actual[name].detach().cpu(), right[name]
    if (
        name == "probs"
        and "routing_map" in actual
        and bool(different(actual["routing_map"], right["routing_map"]).any())
    ):
        return _maps(actual["routing_map"], right["routing_map"])
    return _scaled(scene, name, found, expected)


def _scaled(scene: Scene, name: str, actual: Tensor, right: Tensor) -> list[str]:
    """A constant factor, of all or of every row."""
    factor = scene.arguments.get("scaling_factor")
    a, r = actual.double(), right.double()
    sane = a.isfinite() & r.isfinite() & (r.abs() > 1e-6) & (a.abs() > 1e-6)
    if not bool(sane.any()):
        return []
    quotients = (a / r)[sane]
    tolerance = 2e-2 if right.dtype in (torch.float16, torch.bfloat16) else 1e-4
    middle = float(quotients.median())
    what = "gradient" if name.startswith("grad") else "weights"
    if abs(middle - 1) > tolerance and bool(((quotients - middle).abs() <= tolerance * abs(middle)).all()):
        if factor is not None and abs(middle * factor - 1) <= 2 * tolerance:
            return [f"{what} not scaled: scaling_factor = {factor} is missing"]
        if factor is not None and abs(middle / factor - 1) <= 2 * tolerance:
            return [f"{what} scaled twice by scaling_factor = {factor}"]
        return [f"every value is {middle:.6g} times what it should be"]
    if name != "weights":
        return []
    rows = [(a[t] / r[t])[sane[t]] for t in range(a.shape[0]) if bool(sane[t].any())]
    if all(bool(((row - row[0]).abs() <= tolerance * row[0].abs()).all()) for row in rows) and len(rows) > 1:
        sums = a.sum(1)[sane.any(1)]
        divided = bool(((sums - float(factor or 1)).abs() <= 1e-2).all())
        if any(abs(float(row[0]) - 1) > tolerance for row in rows):
            return ["divided by their sum, which they should not be" if divided else "not divided by their sum"]
    return []


def _compared(scene: Scene, right: Results) -> Tensor | None:
    """What selection compares: scores and bias."""
    if "scores" not in right:
        return None
    bias = scene.arguments.get("bias")
    return right["scores"] if not isinstance(bias, Tensor) else right["scores"] + bias.float()


def _ids(scene: Scene, actual: Results, right: Results) -> list[str]:
    found, expected = actual["expert_ids"].cpu().long(), right["expert_ids"].long()
    values = _compared(scene, right)
    tokens = (found != expected).any(1).nonzero().flatten().tolist()
    num_experts = int(scene.arguments["logits"].shape[1]) if "logits" in scene.arguments else 2**31
    sentences = []
    for token in tokens[:MOST]:
        place = int((found[token] != expected[token]).nonzero()[0])
        is_, should = int(found[token, place]), int(expected[token, place])
        start = f"token {token}, choice {place}: expert {is_} instead of {should}"
        given = scene.arguments.get("expert_ids")
        if isinstance(given, Tensor):
            sentences.append(
                f"token {token}, choice {place}: {is_} instead of {should}, as {int(given[token, place])} was given"
            )
        elif not 0 <= is_ < num_experts:
            sentences.append(f"{start}: there is no such expert")
        elif values is None:
            sentences.append(start)
        else:
            sentences.append(start + _order(values[token], is_, should, found[token].tolist()))
    return sentences + ([f"... and {len(tokens) - MOST} more tokens"] if len(tokens) > MOST else [])


def _order(values: Tensor, is_: int, should: int, chosen: list[int]) -> str:
    a, b = float(values[is_]), float(values[should])
    if chosen.count(is_) > 1:
        return f"; expert {is_} is chosen twice"
    if a == b or (a != a and b != b):
        return f": a tie (both {a:.6g}) goes to the smaller id"
    if b != b:
        return f": expert {should} has NaN, which is above every number"
    if a != a:
        return f": expert {is_} has NaN, and {should} has it too with a smaller id, or was chosen before"
    if should in chosen:
        return f": the choices are not in the order of their values ({a:.6g} before {b:.6g})"
    if a > b:
        return f": {a:.6g} is larger than {b:.6g}, but its group is not among the chosen ones"
    return f": its value {a:.6g} is below {b:.6g}"


def _maps(actual: Tensor, right: Tensor) -> list[str]:
    token, expert = (int(i) for i in (actual.cpu().bool() != right.bool()).nonzero()[0])
    missing = bool(right[token, expert])
    return [f"of other experts: token {token} {'must choose' if missing else 'must not choose'} expert {expert}"]
