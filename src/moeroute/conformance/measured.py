"""The cases that `moeroute bench` measures, each with the torch composition beside it.

Their inputs come from the table's generator, and the table has each of them at a small size.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moeroute
from moeroute.conformance.case import Case
from moeroute.conformance.generator import Stream
from moeroute.dispatch import Backend
from moeroute.testing import assert_close_to_exact, assert_same_bits


@dataclasses.dataclass(frozen=True)
class Measured:
    """One operator at one size. `bounds` are the least times the torch composition (or, for the roof, the
    least share of it) that the project promises on two cores."""

    operator: str
    dtype: torch.dtype
    sizes: dict[str, int]
    bounds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        sizes = " ".join(f"{letter}={size}" for letter, size in self.sizes.items())
        return f"{self.operator} {str(self.dtype).removeprefix('torch.')} {sizes}"

    def tiny(self) -> "Measured":
        """The same at a size for tests: odd ones, so that every tail is met."""
        small = {"T": 37, "K": 3, "H": 131, "E": 12, "S": 111}
        return dataclasses.replace(
            self, sizes={letter: min(size, small[letter]) for letter, size in self.sizes.items()}
        )


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case with its inputs: what we do (on a backend), what torch does, and how the two compare.

    `bytes`: what must move at the least, each input read once and each output written once; 0 where
    the memory is not the limit. `compare(ours, composition)` raises.
    """

    ours: Callable[[Backend | None], Any]
    composition: Callable[[], Any]
    compare: Callable[[Any, Any], None]
    bytes: int


def _close(actual: Any, expected: Any) -> None:
    for a, e in zip(_tensors(actual), _tensors(expected), strict=True):
        if a.dtype != e.dtype:
            raise AssertionError(f"{a.dtype}, expected {e.dtype}")
        assert_close_to_exact(a, e.double().reshape(a.shape))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in value:
            yield from _tensors(part)


def make_inputs(case: Measured, seed: int = 0) -> dict[str, Any]:
    """The tensors of a case: distinct random experts for every token, bell-shaped rows, uniform float32 weights."""
    draw = Stream("measured", seed)
    sizes = case.sizes
    num_experts = sizes.get("E", 64)
    num_tokens, topk = sizes.get("T", 0), sizes.get("K", 1)
    if "S" in sizes:
        num_tokens, topk = sizes["S"] // 8, 8
    found: dict[str, Any] = {"expert_ids": draw.distinct("ids", num_tokens, num_experts, min(topk, num_experts))}
    found["logits"] = draw.normal("logits", num_tokens, num_experts).to(case.dtype)
    found["bias"] = draw.normal("bias", num_experts) * 0.125
    found["weights"] = draw.uniform("weights", num_tokens, topk)  # float32, as gating_topk gives them
    if "H" in sizes:
        plan = moeroute.plan_from_expert_ids(found["expert_ids"], num_experts)
        found["plan"] = plan
        found["tokens"] = _filled(draw, "tokens", num_tokens, sizes["H"]).to(case.dtype)
        found["rows"] = _filled(draw, "rows", plan.num_rows, sizes["H"]).to(case.dtype)
        found["row_of_slot"] = plan.row_of_slot.long()
        found["token_of_row"] = plan.token_of_row.long()
    return found


def _filled(draw: Stream, label: str, rows: int, hidden: int) -> Tensor:
    """Numbers that repeat after a while: a million are as good as all, and soon made."""
    count = rows * hidden
    values = draw.normal(label, min(count, 2**20 + 7))
    return (
        values.repeat(-(-count // max(len(values), 1)))[:count].reshape(rows, hidden)
        if count
        else values.reshape(rows, hidden)
    )


# The public function of a case, and which of its inputs are which argument; not of cases of several calls.
_CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "combine": ("permute_backward", ("grad_rows=rows", "plan")),
    "spread": ("permute", ("tokens", "plan")),
    "spread_quantized": ("spread_quantized", ("x=tokens", "plan")),
    "combine weighted": ("unpermute", ("rows", "plan", "weights")),
    "unpermute_backward": ("unpermute_backward", ("grad_tokens=tokens", "rows", "plan", "weights")),
    "gating_topk": ("gating_topk", ()),
    "plan_from_expert_ids": ("plan_from_expert_ids", ("expert_ids",)),
    "dense_weights": ("dense_weights", ("weights", "expert_ids")),
    "routing_map_from_ids": ("routing_map_from_ids", ("expert_ids",)),
}
_GATING: dict[str, Any] = {"score": "sigmoid", "group_score": "top2_sum", "scaling_factor": 2.5}


def _groups(case: Measured) -> tuple[int, int]:
    return (8, 4) if case.sizes["E"] >= 64 else (4, 2)


def call_of(case: Measured, i: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The public function of a case and its arguments, from `make_inputs`; "" where the case is several calls."""
    if case.operator == "gating_topk":
        groups, kept = _groups(case)
        more = {"bias": i["bias"], "num_groups": groups, "topk_groups": kept, **_GATING}
        return "gating_topk", {"logits": i["logits"], "k": case.sizes["K"], **more}
    function, names = _CALLS.get(case.operator, ("", ()))
    pairs = [name.partition("=") for name in names]
    arguments = {name: i[source or name] for name, _, source in pairs}
    if "expert_ids" in arguments:
        arguments |= {"expert_ids": i["expert_ids"].int(), "num_experts": case.sizes["E"]}
    return function, arguments


def _ours(case: Measured, i: dict[str, Any]) -> Callable[[Backend | None], Any]:
    name, arguments = call_of(case, i)
    function = getattr(moeroute, name)
    return lambda backend: function(**arguments, backend=backend)


def _combine(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)
    shape = (*i["expert_ids"].shape, case.sizes["H"])
    return Problem(
        _ours(case, i),
        lambda: i["rows"].index_select(0, i["row_of_slot"]).reshape(shape).sum(1),
        _close,
        i["rows"].nbytes + i["tokens"].nbytes,
    )


def _spread(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)
    return Problem(
        _ours(case, i),
        lambda: i["tokens"].index_select(0, i["token_of_row"]),
        assert_same_bits,
        i["rows"].nbytes + i["tokens"].nbytes,
    )


def _spread_quantized(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)

    def composition() -> tuple[Tensor, Tensor]:
        rows = i["tokens"].index_select(0, i["token_of_row"]).float()
        scales = rows.abs().amax(1) / 127
        return (rows / scales[:, None]).round().to(torch.int8), scales

    return Problem(
        _ours(case, i),
        composition,
        assert_same_bits,
        i["tokens"].nbytes + i["rows"].numel() + 4 * i["rows"].shape[0],
    )


def _weighted_combine(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)
    shape = (*i["expert_ids"].shape, case.sizes["H"])
    return Problem(
        _ours(case, i),
        lambda: (
            (i["rows"].index_select(0, i["row_of_slot"]).reshape(shape) * i["weights"][..., None]).sum(1).to(case.dtype)
        ),
        _close,
        i["rows"].nbytes + i["tokens"].nbytes,
    )


def _unpermute_backward(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)
    shape = (*i["expert_ids"].shape, case.sizes["H"])

    def composition() -> tuple[Tensor, Tensor]:
        # Gather, multiply, sum, backwards: the gather's transpose fills zeros, as rows may have no slot.
        slots = (i["tokens"][:, None] * i["weights"][..., None]).to(case.dtype).flatten(0, 1)
        grad_rows = torch.zeros_like(i["rows"]).index_copy_(0, i["row_of_slot"], slots)
        rows = i["rows"].index_select(0, i["row_of_slot"]).reshape(shape)
        return grad_rows, (rows.float() * i["tokens"].float()[:, None]).sum(-1)

    return Problem(
        _ours(case, i),
        composition,
        _close,
        2 * i["rows"].nbytes + i["tokens"].nbytes,
    )


def _gating_composition(
    logits: Tensor, bias: Tensor, topk: int, num_groups: int, topk_groups: int
) -> tuple[Tensor, ...]:
    """weights, ids and scores by torch operators, as models write it."""
    scores = logits.float().sigmoid()
    biased = scores.detach() + bias
    grouped = biased.view(biased.shape[0], num_groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(topk_groups, dim=-1).indices
    kept = torch.zeros(best.shape[0], num_groups, dtype=torch.bool).scatter_(1, best, True)
    ids = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(topk, dim=-1).indices
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids, scores


def _gating(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)
    topk, (num_groups, topk_groups) = case.sizes["K"], _groups(case)

    def compare(ours: moeroute.Gating, theirs: tuple[Tensor, Tensor, Tensor]) -> None:
        # Near ties may fall either way under another exp; the values that were chosen may not differ.
        _close((ours.weights, ours.scores), (theirs[0], theirs[2]))
        _close(
            (ours.scores + i["bias"]).gather(1, ours.expert_ids.long()), (theirs[2] + i["bias"]).gather(1, theirs[1])
        )

    return Problem(
        _ours(case, i),
        lambda: _gating_composition(i["logits"], i["bias"], topk, num_groups, topk_groups),
        compare,
        0,
    )


def _gating_training(case: Measured, seed: int) -> Problem:
    """Forward and backward through autograd: the gradient of the logits."""
    i = make_inputs(case, seed)
    topk, (num_groups, topk_groups) = case.sizes["K"], _groups(case)
    grad = Stream("measured", seed).normal("grad", i["logits"].shape[0], topk)
    leaf = i["logits"].requires_grad_()

    def ours(backend: Backend | None) -> Tensor:
        gating = moeroute.gating_topk(
            leaf,
            topk,
            bias=i["bias"],
            num_groups=num_groups,
            topk_groups=topk_groups,
            backend=backend,
            **_GATING,
        )
        return torch.autograd.grad(gating.weights, leaf, grad)[0]

    def composition() -> Tensor:
        weights, _, _ = _gating_composition(leaf, i["bias"], topk, num_groups, topk_groups)
        return torch.autograd.grad(weights, leaf, grad)[0]

    def compare(ours: Tensor, theirs: Tensor) -> None:
        same = ((ours != 0) == (theirs != 0)).all(1)  # near ties may fall either way under another exp
        if same.float().mean().item() < 0.995:
            raise AssertionError(f"other experts in {int((~same).sum())} of {len(same)} tokens")
        _close(ours[same], theirs[same])

    return Problem(ours, composition, compare, 0)


def _gating_backward(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)
    gating = moeroute.gating_topk(i["logits"], case.sizes["K"], bias=i["bias"], **_GATING)
    grad = Stream("measured", seed).normal("grad", *gating.weights.shape).to(case.dtype)
    ids = gating.expert_ids.long()

    def composition() -> Tensor:
        # The steps of the aclnn document, one torch operator each.
        chosen = gating.scores.gather(1, ids)
        scaled = grad.float() * 2.5
        total = chosen.sum(-1, keepdim=True) + 1e-20
        inner = (chosen / total * scaled).sum(-1, keepdim=True)
        grad_scores = torch.zeros_like(gating.scores).scatter_add_(1, ids, (scaled - inner) / total)
        return (gating.scores * (1 - gating.scores) * grad_scores).to(grad.dtype)

    return Problem(
        lambda backend: moeroute.gating_topk_backward(
            gating.scores,
            grad,
            gating.expert_ids,
            score="sigmoid",
            renormalize=True,
            scaling_factor=2.5,
            backend=backend,
        ),
        composition,
        _close,
        0,
    )


def _plan(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)
    ids, num_experts = i["expert_ids"].int(), case.sizes["E"]

    def composition() -> tuple[Tensor, Tensor, Tensor]:
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        return torch.argsort(order, stable=True), order, torch.bincount(flat, minlength=num_experts)

    def compare(plan: moeroute.RoutingPlan, theirs: tuple[Tensor, Tensor, Tensor]) -> None:
        ours = (plan.row_of_slot.long(), plan.slot_of_row.long(), plan.tokens_per_expert)
        assert_same_bits(ours, theirs)

    return Problem(_ours(case, i), composition, compare, 0)


def _dense_weights(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)
    ids, num_experts, weights = i["expert_ids"].int(), case.sizes["E"], i["weights"]
    return Problem(
        _ours(case, i),
        lambda: torch.zeros(weights.shape[0], num_experts).scatter(1, ids.long(), weights),
        assert_same_bits,
        4 * weights.shape[0] * num_experts + weights.nbytes + ids.nbytes,
    )


def _routing_map(case: Measured, seed: int) -> Problem:
    i = make_inputs(case, seed)
    ids, num_experts = i["expert_ids"].int(), case.sizes["E"]
    return Problem(
        _ours(case, i),
        lambda: torch.zeros(ids.shape[0], num_experts).int().scatter(1, ids.long(), 1).bool(),
        assert_same_bits,
        ids.shape[0] * num_experts + ids.nbytes,
    )


def _one_token(case: Measured, seed: int) -> Problem:
    """Gating, plan, permute and unpermute; beside it one index_select of the K rows (a ratio, not a rival)."""
    i = make_inputs(case, seed)
    logits, topk, num_experts = i["logits"].float(), case.sizes["K"], case.sizes["E"]
    tokens = i["tokens"]
    index = torch.zeros(topk * tokens.shape[0], dtype=torch.int64)

    def ours(backend: Backend | None) -> Tensor:
        weights, ids, _ = moeroute.gating_topk(logits, topk, backend=backend)
        plan = moeroute.plan_from_expert_ids(ids, num_experts, backend=backend)
        rows = moeroute.permute(tokens, plan, backend=backend)
        return moeroute.unpermute(rows, plan, weights, backend=backend)

    def compare(output: Tensor, _: Tensor) -> None:
        chosen = logits.double().softmax(-1).topk(topk).values.sum(-1, keepdim=True)
        assert_close_to_exact(output, tokens.double() * chosen)

    return Problem(ours, lambda: tokens.index_select(0, index), compare, 0)


_PROBLEMS = {
    "combine": _combine,
    "spread": _spread,
    "spread_quantized": _spread_quantized,
    "combine weighted": _weighted_combine,
    "unpermute_backward": _unpermute_backward,
    "gating_topk": _gating,
    "gating_topk and backward": _gating_training,
    "gating_topk_backward": _gating_backward,
    "plan_from_expert_ids": _plan,
    "dense_weights": _dense_weights,
    "routing_map_from_ids": _routing_map,
    "one token": _one_token,
}


def problem(case: Measured, seed: int = 0) -> Problem:
    """The case with its inputs made."""
    return _PROBLEMS[case.operator](case, seed)


def _cases() -> Iterator[Measured]:
    halves = (torch.bfloat16, torch.float32)
    sizes = ((2048, 8, 2048), (1024, 8, 7168), (4096, 2, 4096))
    #          operator, least share of the roof, least times torch: float32, bfloat16, as called
    rows = (
        ("combine", 0.6, 3.0, 4.5, 8.0),
        ("spread", 0.7, 1.2, 1.2, 5.0),
        ("spread_quantized", 0.75, 5.0, 5.0, 5.0),
        ("combine weighted", 0.5, 3.5, 6.0, 10.0),
        ("unpermute_backward", 0.5, 4.0, 6.0, 12.0),
    )
    for operator, roof, float32, bfloat16, called in rows:
        for dtype in halves:
            kernel = float32 if dtype is torch.float32 else bfloat16
            for t, k, h in sizes:
                bounds = {"roof": roof, "kernel": kernel, "called": called}
                yield Measured(operator, dtype, {"T": t, "K": k, "H": h}, bounds)
    for operator in ("gating_topk", "gating_topk and backward", "gating_topk_backward"):
        for dtype in halves:
            yield Measured(operator, dtype, {"T": 4096, "K": 8, "E": 256}, {"kernel": 5.0})
    for slots in (16_384, 1_048_576):
        for num_experts in (64, 256):
            sizes_of_plan = {"S": slots, "E": num_experts}
            yield Measured("plan_from_expert_ids", torch.int32, sizes_of_plan, {"kernel": 8.0})
    yield Measured("dense_weights", torch.float32, {"T": 4096, "K": 8, "E": 256}, {"called": 5.0})
    yield Measured("routing_map_from_ids", torch.int32, {"T": 4096, "K": 8, "E": 256}, {"kernel": 5.0, "called": 5.0})
    # One twelfth of an index_select's speed for four operators.
    yield Measured(
        "one token", torch.bfloat16, {"T": 1, "K": 8, "H": 2048, "E": 64}, {"kernel": 1 / 12, "called": 1 / 12}
    )


CASES = tuple(_cases())


def small_cases() -> Iterator[Case]:
    """The measured cases at a small size, for the table; those of several calls are left out."""
    found = {case.tiny().name: case.tiny() for case in CASES}
    for name, case in found.items():
        operator = _CALLS.get(case.operator, ("", ()))[0]
        if operator:
            yield Case(f"measured: {name}", operator, partial(_small, case), frozenset({"measured"}), stream="measured")


def _small(case: Measured, draw: Stream) -> dict[str, Any]:
    seed = int(draw.name.partition("#")[2] or 0)
    return call_of(case, make_inputs(case, seed))[1]
