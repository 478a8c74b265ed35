"""One table of cases for tests, benchmarks and the command line, and the comparisons that they use.

`assert_same_bits` compares backends with each other, `assert_close_to_exact` a result with float64
mathematics. Both raise; neither returns a verdict that could be dropped.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import moeroute
from moeroute.dispatch import Backend

# Largest error of one element and root mean square of all, relative to the largest exact value's
# magnitude: a few units in the last place of the result's dtype.
TOLERANCES = {
    torch.float64: (1e-12, 1e-13),
    torch.float32: (2e-6, 4e-7),
    torch.float16: (1.5e-3, 4e-4),
    torch.bfloat16: (1.2e-2, 3e-3),
}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers; every NaN has the same ones."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view(_BITS[tensor.element_size()])


def assert_same_bits(actual: Any, expected: Any, where: str = "result") -> None:
    """Equal shapes, dtypes and bits (NaN equals NaN, +0 differs from -0), through tuples and plans."""
    if isinstance(expected, Tensor):
        if not isinstance(actual, Tensor):
            raise AssertionError(f"{where}: {type(actual).__name__} where a tensor was expected")
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            raise AssertionError(
                f"{where}: {actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"
            )
        different = (_bits(actual) != _bits(expected.to(actual.device))).nonzero()
        if different.numel():
            places = [tuple(place.tolist()) for place in different[:4]]
            values = ", ".join(f"{p}: {actual[p].item()!r} not {expected[p].item()!r}" for p in places)
            raise AssertionError(f"{where}: {len(different)} of {actual.numel()} elements differ; {values}")
    elif type(actual) is not type(expected) and not isinstance(actual, tuple | list):
        raise AssertionError(f"{where}: {actual!r}, expected {expected!r}")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            name = field.name
            assert_same_bits(getattr(actual, name), getattr(expected, name), f"{where}.{name}")
    elif isinstance(expected, tuple | list):
        if len(actual) != len(expected):
            raise AssertionError(f"{where}: {len(actual)} parts, expected {len(expected)}")
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(a, e, f"{where}[{i}]")
    elif actual != expected:
        raise AssertionError(f"{where}: {actual!r}, expected {expected!r}")


def assert_close_to_exact(actual: Tensor, exact: Tensor, where: str = "result") -> None:
    """Within TOLERANCES[actual.dtype] of a float64 expectation, worst element and root mean square."""
    if actual.shape != exact.shape:
        raise AssertionError(f"{where}: shape {list(actual.shape)}, expected {list(exact.shape)}")
    if exact.numel() == 0:
        return
    worst, rms = TOLERANCES[actual.dtype]
    error = (actual.detach().double() - exact.detach().double()).abs()
    scale = max(exact.detach().double().abs().max().item(), 1e-30)
    if not bool(error.isfinite().all()):
        raise AssertionError(f"{where}: {int((~error.isfinite()).sum())} elements are not finite")
    if error.max().item() > worst * scale or error.square().mean().sqrt().item() > rms * scale:
        place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{where}: worst error {error.max().item() / scale:.2e} (allowed {worst:.1e}) at {place}: "
            f"{actual[place].item()} not {exact[place].item()}; "
            f"rms {error.square().mean().sqrt().item() / scale:.2e} (allowed {rms:.1e})"
        )


# ---------------------------------------------------------------------------- the case table


@dataclasses.dataclass(frozen=True)
class Case:
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

    def tiny(self) -> "Case":
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


def make_inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """The tensors of a case: distinct random experts for every token, normal rows, uniform float32 weights."""
    generator = torch.Generator().manual_seed(seed)
    sizes = case.sizes
    num_experts = sizes.get("E", 64)
    num_tokens, topk = sizes.get("T", 0), sizes.get("K", 1)
    if "S" in sizes:
        num_tokens, topk = sizes["S"] // 8, 8
    found: dict[str, Any] = {
        "expert_ids": torch.rand(num_tokens, num_experts, generator=generator).topk(min(topk, num_experts)).indices
    }
    found["logits"] = torch.randn(num_tokens, num_experts, generator=generator).to(case.dtype)
    found["bias"] = torch.randn(num_experts, generator=generator) * 0.1
    if "H" in sizes:
        plan = moeroute.plan_from_expert_ids(found["expert_ids"], num_experts)
        found["plan"] = plan
        found["tokens"] = torch.randn(num_tokens, sizes["H"], generator=generator).to(case.dtype)
        found["rows"] = torch.randn(plan.num_rows, sizes["H"], generator=generator).to(case.dtype)
        found["weights"] = torch.rand(num_tokens, topk, generator=generator)  # float32, as gating_topk gives them
        found["row_of_slot"] = plan.row_of_slot.long()
        found["token_of_row"] = plan.token_of_row.long()
    return found


def _combine(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)
    shape = (*i["expert_ids"].shape, case.sizes["H"])
    return Problem(
        lambda backend: moeroute.permute_backward(i["rows"], i["plan"], backend=backend),
        lambda: i["rows"].index_select(0, i["row_of_slot"]).reshape(shape).sum(1),
        _close,
        i["rows"].nbytes + i["tokens"].nbytes,
    )


def _spread(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)
    return Problem(
        lambda backend: moeroute.permute(i["tokens"], i["plan"], backend=backend),
        lambda: i["tokens"].index_select(0, i["token_of_row"]),
        assert_same_bits,
        i["rows"].nbytes + i["tokens"].nbytes,
    )


def _spread_quantized(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)

    def composition() -> tuple[Tensor, Tensor]:
        rows = i["tokens"].index_select(0, i["token_of_row"]).float()
        scales = rows.abs().amax(1) / 127
        return (rows / scales[:, None]).round().to(torch.int8), scales

    return Problem(
        lambda backend: moeroute.spread_quantized(i["tokens"], i["plan"], backend=backend),
        composition,
        assert_same_bits,
        i["tokens"].nbytes + i["rows"].numel() + 4 * i["rows"].shape[0],
    )


def _weighted_combine(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)
    shape = (*i["expert_ids"].shape, case.sizes["H"])
    return Problem(
        lambda backend: moeroute.unpermute(i["rows"], i["plan"], i["weights"], backend=backend),
        lambda: (
            (i["rows"].index_select(0, i["row_of_slot"]).reshape(shape) * i["weights"][..., None]).sum(1).to(case.dtype)
        ),
        _close,
        i["rows"].nbytes + i["tokens"].nbytes,
    )


def _unpermute_backward(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)
    shape = (*i["expert_ids"].shape, case.sizes["H"])

    def composition() -> tuple[Tensor, Tensor]:
        # Gather, multiply, sum, backwards: the gather's transpose fills zeros, as rows may have no slot.
        slots = (i["tokens"][:, None] * i["weights"][..., None]).to(case.dtype).flatten(0, 1)
        grad_rows = torch.zeros_like(i["rows"]).index_copy_(0, i["row_of_slot"], slots)
        rows = i["rows"].index_select(0, i["row_of_slot"]).reshape(shape)
        return grad_rows, (rows.float() * i["tokens"].float()[:, None]).sum(-1)

    return Problem(
        lambda backend: moeroute.unpermute_backward(i["tokens"], i["rows"], i["plan"], i["weights"], backend=backend),
        composition,
        _close,
        2 * i["rows"].nbytes + i["tokens"].nbytes,
    )


_GATING: dict[str, Any] = {"score": "sigmoid", "group_score": "top2_sum", "scaling_factor": 2.5}


def _groups(case: Case) -> tuple[int, int]:
    return (8, 4) if case.sizes["E"] >= 64 else (4, 2)


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


def _gating(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)
    topk, (num_groups, topk_groups) = case.sizes["K"], _groups(case)

    def compare(ours: moeroute.Gating, theirs: tuple[Tensor, Tensor, Tensor]) -> None:
        # Near ties may fall either way under another exp; the values that were chosen may not differ.
        _close((ours.weights, ours.scores), (theirs[0], theirs[2]))
        _close(
            (ours.scores + i["bias"]).gather(1, ours.expert_ids.long()), (theirs[2] + i["bias"]).gather(1, theirs[1])
        )

    return Problem(
        lambda backend: moeroute.gating_topk(
            i["logits"],
            topk,
            bias=i["bias"],
            num_groups=num_groups,
            topk_groups=topk_groups,
            backend=backend,
            **_GATING,
        ),
        lambda: _gating_composition(i["logits"], i["bias"], topk, num_groups, topk_groups),
        compare,
        0,
    )


def _gating_training(case: Case, seed: int) -> Problem:
    """Forward and backward through autograd: the gradient of the logits."""
    i = make_inputs(case, seed)
    topk, (num_groups, topk_groups) = case.sizes["K"], _groups(case)
    grad = torch.randn(i["logits"].shape[0], topk, generator=torch.Generator().manual_seed(1))
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


def _gating_backward(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)
    gating = moeroute.gating_topk(i["logits"], case.sizes["K"], bias=i["bias"], **_GATING)
    grad = torch.randn(gating.weights.shape, generator=torch.Generator().manual_seed(1)).to(case.dtype)
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


def _plan(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)
    ids, num_experts = i["expert_ids"].int(), case.sizes["E"]

    def composition() -> tuple[Tensor, Tensor, Tensor]:
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        return torch.argsort(order, stable=True), order, torch.bincount(flat, minlength=num_experts)

    def compare(plan: moeroute.RoutingPlan, theirs: tuple[Tensor, Tensor, Tensor]) -> None:
        ours = (plan.row_of_slot.long(), plan.slot_of_row.long(), plan.tokens_per_expert)
        assert_same_bits(ours, theirs)

    return Problem(
        lambda backend: moeroute.plan_from_expert_ids(ids, num_experts, backend=backend), composition, compare, 0
    )


def _dense_weights(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)
    ids, num_experts, weights = i["expert_ids"].int(), case.sizes["E"], torch.rand(i["expert_ids"].shape)
    return Problem(
        lambda backend: moeroute.dense_weights(weights, ids, num_experts, backend=backend),
        lambda: torch.zeros(weights.shape[0], num_experts).scatter(1, ids.long(), weights),
        assert_same_bits,
        4 * weights.shape[0] * num_experts + weights.nbytes + ids.nbytes,
    )


def _routing_map(case: Case, seed: int) -> Problem:
    i = make_inputs(case, seed)
    ids, num_experts = i["expert_ids"].int(), case.sizes["E"]
    return Problem(
        lambda backend: moeroute.routing_map_from_ids(ids, num_experts, backend=backend),
        lambda: torch.zeros(ids.shape[0], num_experts).int().scatter(1, ids.long(), 1).bool(),
        assert_same_bits,
        ids.shape[0] * num_experts + ids.nbytes,
    )


def _one_token(case: Case, seed: int) -> Problem:
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


def problem(case: Case, seed: int = 0) -> Problem:
    """The case with its inputs made."""
    return _PROBLEMS[case.operator](case, seed)


def _cases() -> Iterator[Case]:
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
                yield Case(operator, dtype, {"T": t, "K": k, "H": h}, bounds)
    for operator in ("gating_topk", "gating_topk and backward", "gating_topk_backward"):
        for dtype in halves:
            yield Case(operator, dtype, {"T": 4096, "K": 8, "E": 256}, {"kernel": 5.0})
    for slots in (16_384, 1_048_576):
        for num_experts in (64, 256):
            sizes_of_plan = {"S": slots, "E": num_experts}
            yield Case("plan_from_expert_ids", torch.int32, sizes_of_plan, {"kernel": 8.0})
    yield Case("dense_weights", torch.float32, {"T": 4096, "K": 8, "E": 256}, {"called": 5.0})
    yield Case("routing_map_from_ids", torch.int32, {"T": 4096, "K": 8, "E": 256}, {"kernel": 5.0, "called": 5.0})
    # One twelfth of an index_select's speed for four operators.
    yield Case("one token", torch.bfloat16, {"T": 1, "K": 8, "H": 2048, "E": 64}, {"kernel": 1 / 12, "called": 1 / 12})


CASES = tuple(_cases())
