"""`moeroute verify`: every operator, dtype and mode on a backend, bit by bit against the reference.

A check is a name and a function of (backend, device) whose result comes back to the CPU. Inputs are
made on the CPU from a seed, so all devices get the same ones: small, with odd sizes, ties, NaN,
infinities, denormal numbers, empty slots and ids of no expert.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import moeroute
from moeroute import dispatch
from moeroute.dispatch import Backend
from moeroute.ops.activations.op import ACTIVATIONS, Activation, activate, activate_backward
from moeroute.testing import assert_same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
Run = Callable[[Backend | None, torch.device], Any]


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    run: Run


def to(value: Any, device: torch.device | str) -> Any:
    """Tensors, and what holds them, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return tuple(to(part, device) for part in value)
    if isinstance(value, dict):
        return {name: to(part, device) for name, part in value.items()}
    if isinstance(value, moeroute.RoutingPlan):
        fields = {field.name: to(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _check(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Check:
    """The function on the device's copies of its arguments."""

    def run(backend: Backend | None, device: torch.device) -> Any:
        found = function(*to(arguments, device), **to(options, device), backend=backend)
        return to(found, "cpu")

    return Check(name, run)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spoil(values: Tensor, generator: torch.Generator) -> Tensor:
    """Some of the values become ties, zeros of both signs, denormal numbers, infinities and NaN."""
    odd = torch.tensor([0.0, -0.0, 1e-40, -1e-39, torch.inf, -torch.inf, torch.nan, 0.5, 0.5, 65504.0])
    picked = odd[torch.randint(len(odd), values.shape, generator=generator)]
    return torch.where(torch.rand(values.shape, generator=generator) < 0.06, picked.to(values.dtype), values)


# ---------------------------------------------------------------------------- gating


def gating_checks(num_tokens: int, seed: int) -> Iterator[Check]:
    """Every score, group rule and dtype of gating and its gradient."""
    generator = torch.Generator().manual_seed(seed)
    modes: tuple[dict[str, Any], ...] = (
        {"score": "softmax"},
        {"score": "softmax", "renormalize": True, "scaling_factor": 1.5},
        {"score": "sigmoid", "scaling_factor": 2.5},
        {"score": "sigmoid", "renormalize": False},
        {"score": "sqrtsoftplus", "eps": 1e-3},
        {"score": "topk_softmax"},
        {"score": "topk_sigmoid"},
        {"score": "none", "renormalize": True},
    )
    # All of three groups of three, negative logits too; many slots with the scores that differ most.
    sizes = ((12, 3, 1, None), (24, 9, 8, 3), (300, 8, 1, None))
    many = tuple(itertools.product(modes[1:4:2] + modes[5:7], ((40, 40, 1, None), (1025, 34, 5, 2))))
    cases = (*itertools.product(modes, sizes), *many)
    for number, (mode, (experts, k, groups, kept)) in enumerate(cases):
        for dtype in DTYPES if (experts, mode["score"]) == (12, "sigmoid") else (DTYPES[number % 3],):
            logits = torch.randn(num_tokens, experts, generator=generator)
            logits[0] = 0.25  # a row of ties
            logits = _spoil(logits, generator).to(dtype)
            options = {**mode, "num_groups": groups, "topk_groups": kept}
            if dtype is not torch.float16:
                options["bias"] = torch.randn(experts, generator=generator) * 0.1
            if dtype is torch.bfloat16:
                options["group_score"], options["weights_dtype"] = min(2 + number % 2, experts // groups), dtype
            name = f"{mode['score']} E={experts} k={k} {_short(dtype)} {mode}"
            yield _check(f"gating_topk {name}", moeroute.gating_topk, logits, k, **options)
            ids = torch.randint(-1, experts + 1, (num_tokens, k), generator=generator)
            yield _check(f"gating_topk, given ids {name}", moeroute.gating_topk, logits, k, **mode, expert_ids=ids)
            yield _gradient_check(name, logits, ids, mode, generator)


def _gradient_check(name: str, logits: Tensor, ids: Tensor, mode: dict[str, Any], generator: torch.Generator) -> Check:
    """The backward through autograd, of the weights and the scores, and the plain function."""
    grad_weights = torch.randn(ids.shape, generator=generator)
    grad_scores = torch.randn(logits.shape, generator=generator)
    flags = {
        "score": mode["score"],
        "renormalize": mode.get("renormalize", mode["score"] in ("sigmoid", "sqrtsoftplus")),
    }
    scaling = mode.get("scaling_factor", 1.0)

    def run(backend: Backend | None, device: torch.device) -> Any:
        leaf = logits.to(device).requires_grad_()
        given = ids.to(device)
        found = moeroute.gating_topk(leaf, ids.shape[1], **mode, expert_ids=given, backend=backend)
        both = (grad_weights.to(device), grad_scores.to(device))
        through = torch.autograd.grad((found.weights, found.scores), leaf, both)[0]
        plain = moeroute.gating_topk_backward(
            found.scores.detach(),
            both[0],
            given,
            **flags,
            scaling_factor=scaling,
            out_dtype=logits.dtype,
            backend=backend,
        )
        return to((through, plain), "cpu")

    return Check(f"gating_topk_backward {name}", run)


# ---------------------------------------------------------------------------- plans


def plan_checks(num_tokens: int, experts: int, topk: int, seed: int) -> Iterator[Check]:
    """Every constructor of plans, with its options."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (num_tokens, topk), generator=generator)
    ids[0, :] = 2**40  # no expert's
    weights = _spoil(torch.rand(num_tokens, topk, generator=generator), generator)
    capacity = max(num_tokens * topk // experts, 1)
    by_ids: tuple[dict[str, Any], ...] = (
        {},
        {"expert_range": (1, experts - 1)},
        {"capacity": capacity},
        {"capacity": capacity, "drop": "weight", "weights": weights},
        {"capacity": capacity, "drop": "choice"},
        {"capacity": capacity, "drop": "choice", "weights": weights, "expert_range": (1, experts)},
        {"capacity": capacity, "pad_to_capacity": True},
        {"align": 8},
        {"num_rows": num_tokens * topk},
        {"num_rows": num_tokens, "align": 4, "expert_range": (0, experts - 2)},
    )
    for options in by_ids:
        shown = {name: "..." if isinstance(value, Tensor) else value for name, value in options.items()}
        yield _check(f"plan_from_expert_ids {shown}", moeroute.plan_from_expert_ids, ids, experts, **options)
    yield _check("plan_from_expert_ids int8", moeroute.plan_from_expert_ids, ids.clamp(-1, 99).to(torch.int8), experts)
    for many in (2000, 9000):
        spread_out = torch.randint(-1, many + 1, (num_tokens, topk), generator=generator)
        for options in ({}, {"align": 4, "num_rows": 2 * num_tokens, "expert_range": (100, many - 100)}):
            name = f"plan_from_expert_ids E={many} {options}"
            yield _check(name, moeroute.plan_from_expert_ids, spread_out, many, **options)
    huge = torch.where(ids >= 0, ids * 2**33 + 5, ids)
    for size in (None, num_tokens):
        yield _check(
            f"plan_from_expert_ids any id, {size} rows", moeroute.plan_from_expert_ids, huge, None, num_rows=size
        )

    routing_map = torch.rand(num_tokens, experts, generator=generator) < topk / experts
    routing_map[1] = False
    map_weights = _spoil(torch.rand(num_tokens, experts, generator=generator), generator)
    by_map: tuple[dict[str, Any], ...] = (
        {},
        {"topk": topk},
        {"capacity": capacity, "fill": True},
        {"capacity": capacity, "drop": "weight", "weights": map_weights},
        {"capacity": capacity, "pad_to_capacity": True, "topk": topk},
        {"align": 4, "expert_range": (1, experts)},
        {"num_rows": num_tokens},
        {"align": 8, "fill": True},
        {"align": 4, "fill": True, "num_slots": num_tokens, "num_rows": 3 * num_tokens},
        {"num_slots": 2 * num_tokens, "num_rows": num_tokens},
        {"num_slots": num_tokens * experts},
    )
    for options in by_map:
        shown = {name: "..." if isinstance(value, Tensor) else value for name, value in options.items()}
        yield _check(f"plan_from_routing_map {shown}", moeroute.plan_from_routing_map, routing_map, **options)
    yield _check("plan_from_routing_map uint8", moeroute.plan_from_routing_map, routing_map.to(torch.uint8))
    yield _check("plan_from_routing_map int32", moeroute.plan_from_routing_map, routing_map.int() << 20)

    rows = torch.randint(-3, num_tokens * topk + 3, (num_tokens, topk), generator=generator)
    yield _check("plan_from_row_of_slot", moeroute.plan_from_row_of_slot, rows, num_tokens, num_tokens, first_row=2)
    token_ids = torch.randint(-2, num_tokens + 2, (num_tokens * 2,), generator=generator)
    yield _check("plan_from_token_ids", moeroute.plan_from_token_ids, token_ids, num_tokens)
    places = torch.randperm(num_tokens * 2, generator=generator)
    yield _check(
        "plan_from_token_ids rows",
        moeroute.plan_from_token_ids,
        token_ids,
        num_tokens,
        rows=places,
        num_rows=num_tokens * 2,
        num_experts=2,
    )
    choices = torch.rand(num_tokens, experts, generator=generator) < topk / experts
    of_plan: tuple[dict[str, Any], ...] = ({}, {"align": 4, "capacity": capacity}, {"topk": topk})
    for options in of_plan:
        plan = moeroute.plan_from_routing_map(choices, **options, backend="reference")
        yield _check(f"row_id_map {options}", moeroute.row_id_map, plan)
    yield _check("row_id_map of ids", moeroute.row_id_map, moeroute.plan_from_expert_ids(ids, experts, align=4))
    lines = moeroute.row_id_map(moeroute.plan_from_routing_map(choices, backend="reference"), backend="reference")
    count = int(choices.sum())
    yield _check("plan_from_row_id_map", moeroute.plan_from_row_id_map, lines, count)
    padding = torch.arange(experts) * 3
    yield _check("plan_from_row_id_map, padded", moeroute.plan_from_row_id_map, lines, 2 * count, pad_offsets=padding)
    lines = torch.randint(-1, num_tokens, lines.shape, generator=generator)
    yield _check("plan_from_row_id_map, nonsense", moeroute.plan_from_row_id_map, lines, count, pad_offsets=padding)
    lengths = torch.randint(0, 5, (3, experts), generator=generator)
    yield _check("plan_from_segments", moeroute.plan_from_segments, lengths, int(lengths.sum()))
    order = torch.randperm(3 * experts, generator=generator)
    chunks = lengths.reshape(-1)
    yield _check("plan_from_chunks", moeroute.plan_from_chunks, chunks, order, int(lengths.sum()))
    order[::5] = -1  # chunks that no place names, and one that two do
    order[1] = order[2]
    yield _check("plan_from_chunks, no permutation", moeroute.plan_from_chunks, chunks, order, int(lengths.sum()) - 3)


# ---------------------------------------------------------------------------- rows


def row_checks(num_tokens: int, experts: int, topk: int, hidden: int, seed: int) -> Iterator[Check]:
    """Every row operator and its gradient, in every dtype and kind of plan."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, experts, generator=generator).topk(topk).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    routing_map = torch.rand(num_tokens, experts, generator=generator) < topk / experts
    shared = torch.randint(-1, num_tokens, (num_tokens, topk), generator=generator)
    plans = {
        "ids": moeroute.plan_from_expert_ids(ids, experts, align=4, backend="reference"),
        "map": moeroute.plan_from_routing_map(routing_map, backend="reference"),
        "table": moeroute.plan_from_routing_map(routing_map, topk=topk, backend="reference"),
        "fill": moeroute.plan_from_routing_map(routing_map, capacity=topk, fill=True, backend="reference"),
        "shared rows": moeroute.plan_from_row_of_slot(shared, num_tokens, num_tokens, backend="reference"),
    }
    for (which, plan), dtype in itertools.product(plans.items(), DTYPES):
        tokens = _spoil(torch.randn(num_tokens, hidden, generator=generator), generator).to(dtype)
        # A view whose rows are far apart, and one whose elements are.
        rows = _spoil(torch.randn(plan.num_rows, 2 * hidden, generator=generator), generator).to(dtype)[:, :hidden]
        grad = _spoil(torch.randn(hidden, num_tokens, generator=generator), generator).to(dtype).t()
        by_expert = plan.expert_of_slot is not None and which != "shared rows"
        shape = (num_tokens, experts) if by_expert else (num_tokens, topk)
        name = f"{which} {_short(dtype)}"
        yield _check(f"permute {name}", moeroute.permute, tokens, plan)
        yield _check(f"permute_backward {name}", moeroute.permute_backward, rows, plan)
        yield _check(f"unpermute {name}", moeroute.unpermute, rows, plan)
        for kind in DTYPES:
            weights = torch.randn(shape, generator=generator)
            weights[torch.rand(shape, generator=generator) < 0.1] = 0.0
            weights = weights.to(kind)
            both = f"{name}, weights {_short(kind)}"
            yield _check(f"permute {both}", moeroute.permute, tokens, plan, weights)
            yield _check(f"unpermute {both}", moeroute.unpermute, rows, plan, weights)
            yield _check(f"permute_weights {both}", moeroute.permute_weights, weights, plan)
            yield _check(f"slot_weights {both}", moeroute.slot_weights, weights, plan)
            yield _check(f"unpermute_backward {both}", moeroute.unpermute_backward, grad, rows, plan, weights)
            row_grads = torch.randn(plan.num_rows, generator=generator).to(kind)
            yield _check(f"permute_weights_backward {both}", moeroute.permute_weights_backward, row_grads, plan)
        wide = torch.randn(shape, generator=generator, dtype=torch.float64)
        yield _check(f"permute {name}, weights float64", moeroute.permute, tokens, plan, wide)
        yield _check(f"unpermute {name}, weights float64", moeroute.unpermute, rows, plan, wide)
        yield _check(f"unpermute_backward {name}, weights float64", moeroute.unpermute_backward, grad, rows, plan, wide)
        slots = torch.randn(plan.num_slots, generator=generator)
        yield _check(f"spread {name}", moeroute.spread, tokens, plan, slots)
        yield _check(f"combine init {name}", moeroute.combine, rows, plan, slots, init=grad)
        yield _check(f"row_dots {name}", moeroute.row_dots, rows, grad, plan)
        if by_expert:
            bias = torch.randn(experts, hidden, generator=generator).to(dtype)
            pair = (grad, tokens)
            yield _check(f"combine pair, bias {name}", moeroute.combine, rows, plan, slots, init=pair, bias=bias)
            yield _check(f"row_dots bias {name}", moeroute.row_dots, rows, grad, plan, bias=bias)
        yield from _quantised_checks(name, tokens, rows, plan, experts, generator)
    for dtype in DTYPES:
        weights = _spoil(torch.randn(num_tokens, topk, generator=generator), generator).to(dtype)
        yield _check(f"dense_weights {_short(dtype)}", moeroute.dense_weights, weights, ids, experts)
    for which, plan in plans.items():
        if plan.num_experts is not None:
            yield _check(f"routing_map_of {which}", moeroute.routing_map_of, plan)
    for bits in (False, True):
        name = f"routing_map_from_ids bits={bits}"
        yield _check(name, moeroute.routing_map_from_ids, ids, experts, bits=bits)
    integers = torch.randint(-(2**31), 2**31 - 1, (num_tokens, hidden), generator=generator)
    for integer in (torch.int8, torch.int16, torch.int32, torch.int64):
        yield _check(f"permute {_short(integer)}", moeroute.permute, integers.to(integer), plans["map"])


def _quantised_checks(
    name: str, tokens: Tensor, rows: Tensor, plan: moeroute.RoutingPlan, experts: int, generator: torch.Generator
) -> Iterator[Check]:
    """Rows as int8: without factors, with one set of them, with one for each expert."""
    smooth = _spoil(torch.randn(experts, rows.shape[1], generator=generator), generator)
    expert_of_row = torch.randint(-1, experts + 1, (plan.num_rows,), generator=generator, dtype=torch.int32)
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        ", factors": {"smooth": smooth[0]},
        ", factors by expert": {"smooth": smooth, "expert_of_row": expert_of_row},
    }
    for words, options in kinds.items():
        yield _check(f"dynamic_quantize {name}{words}", moeroute.dynamic_quantize, rows, **options)
        yield _check(f"spread_quantized {name}{words}", moeroute.spread_quantized, tokens, plan, **options)
    scale, offset = torch.tensor(47.0), torch.tensor([0.5])
    yield _check(f"quantize {name}", moeroute.quantize, rows, scale, offset)
    yield _check(f"quantize {name}, spread", moeroute.quantize, tokens, scale, offset, plan=plan)


# ---------------------------------------------------------------------------- activations


def activation_checks(num_rows: int, width: int, seed: int) -> Iterator[Check]:
    """Every activation of experts and its gradient, gate and up in halves and in pairs."""
    generator = torch.Generator().manual_seed(seed)
    for dtype, activation, interleaved in itertools.product(DTYPES, ACTIVATIONS, (False, True)):
        if activation == "relu2" and interleaved:
            continue
        x = _spoil(torch.randn(num_rows, 2 * width, generator=generator) * 6, generator).to(dtype)
        shape = (num_rows, 2 * width if activation == "relu2" else width)
        grad = _spoil(torch.randn(shape, generator=generator), generator).to(dtype)
        options = (activation, interleaved)
        name = f"{activation} {width} {_short(dtype)}{', pairs' * interleaved}"
        yield _check(f"activate {name}", _activate, x, *options)
        yield _check(f"activate_backward {name}", _activate_backward, grad, x, *options)


def _activate(x: Tensor, activation: Activation, interleaved: bool, backend: Backend | None) -> Tensor:
    return activate(x, activation, interleaved=interleaved, backend=backend)


def _activate_backward(*arguments: Any, backend: Backend | None) -> Any:
    return activate_backward(*arguments, True, backend)


# ---------------------------------------------------------------------------- all


def checks(seed: int = 0) -> Iterator[Check]:
    """All checks, on inputs drawn from `seed`."""
    yield from gating_checks(19, seed)
    yield from plan_checks(37, 12, 3, seed)
    yield from plan_checks(300, 130, 6, seed)
    yield from row_checks(23, 12, 3, 331, seed)
    yield from row_checks(9, 5, 2, 2048, seed)
    yield from activation_checks(7, 75, seed)
    yield from activation_checks(5, 128, seed)


def can_run(backend: Backend, device: torch.device) -> bool:
    """Whether there is something to compare: the reference on the CPU is the measure."""
    if backend == "reference" and device.type == "cpu":
        return False
    try:
        dispatch.choose("moeroute.verify", backend, device)
    except ValueError:
        return False
    return True


def flushes_subnormals() -> bool:
    """Whether `torch.set_flush_denormal(True)` holds in this thread."""
    return torch.tensor(1e-30).mul(1e-10).item() == 0.0


@contextlib.contextmanager
def subnormals_kept() -> Iterator[None]:
    """torch computes as without `torch.set_flush_denormal`, in this thread alone: others keep their mode."""
    if not flushes_subnormals():
        yield
        return
    threads = torch.get_num_threads()
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)


def run(
    places: Sequence[tuple[Backend, torch.device]], only: str = "", seed: int = 0, part: tuple[int, int] = (0, 1)
) -> tuple[int, list[str]]:
    """How many checks (whose name contains `only`) were made on each backend and device, and what differed.

    part: (i, n), the i-th of n parts of them. The reference is plain torch: it computes with subnormal numbers kept,
    the backends in the thread's own mode.
    """
    count, failures = 0, []
    with subnormals_kept():
        wanted = [check for check in checks(seed) if only in check.name]
    number, parts = part
    for check in wanted[len(wanted) * number // parts : len(wanted) * (number + 1) // parts]:
        count += 1
        with subnormals_kept():
            expected = check.run("reference", CPU)
        for backend, device in places:
            try:
                assert_same_bits(check.run(backend, device), expected, check.name)
            except AssertionError as error:
                failures.append(f"{backend} on {device}: {error}")
            except Exception as error:  # a kernel that does not compile or run: the others are still worth knowing
                failures.append(f"{backend} on {device}: {check.name}: {type(error).__name__}: {error}")
    return count, failures
