"""A comparison that cannot fail shows nothing. Here one result is damaged, a little, and each comparison must see it.

The damage sits where a real mistake would: in what one function of one backend returns, below the verbs,
torch.library and autograd.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.testing._internal.optests.generate_tests import OpCheckError

import moeroute
from moeroute import cli, dispatch, memory
from moeroute.conformance import measured
from moeroute.dispatch import Backend
from moeroute.ops.activations.op import activate, activate_backward
from moeroute.testing import TOLERANCES, assert_close_to_exact, assert_same_bits

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Damage = Callable[[Tensor], Tensor]

# ---------------------------------------------------------------------------- damages


def off_by_one_row(result: Tensor) -> Tensor:
    """Each row holds its neighbour's (of a single row: each element)."""
    return result.roll(1, 0 if result.shape[0] > 1 else -1)


def one_ulp(result: Tensor) -> Tensor:
    """The largest finite number, by one unit in its last place."""
    damaged = result.clone()
    flat = damaged.view(-1)
    place = torch.where(flat.isfinite(), flat, 0).abs().argmax()
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    bits[place] += 1
    return damaged


def minus_zero(result: Tensor) -> Tensor:
    return torch.where(result == 0, -0.0, result)


def wrong_id(result: Tensor) -> Tensor:
    """One number, by one."""
    damaged = result.clone()
    flat = damaged.view(-1)
    place = flat.numel() // 2
    flat[place] = int(flat[place]) + (-1 if flat[place] > 0 else 1)
    return damaged


def unwritten_row(result: Tensor) -> Tensor:
    """The last row as fresh memory is in these tests."""
    damaged = result.clone()
    damaged[-1] = torch.empty_like(damaged[-1])
    return damaged


def doubled(result: Tensor) -> Tensor:
    return result * 2


def lost(result: Tensor) -> Tensor:
    return torch.zeros_like(result)


def damages(part: Tensor) -> Iterator[Damage]:
    yield off_by_one_row
    yield unwritten_row
    if part.is_floating_point():
        yield one_ulp
        if bool((part == 0).any()):
            yield minus_zero
    else:
        yield wrong_id


@contextmanager
def broken(backend: Backend, function: str, damage: Damage, part: int = 0) -> Iterator[None]:
    """The function of this backend returns something damaged; of several results one."""

    def damage_part(parts: list[Any]) -> list[Any]:
        parts[part] = damage(parts[part])
        return parts

    with wrapped(backend, function, damage_part):
        yield


@contextmanager
def wrapped(backend: Backend, function: str, change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """What the function of this backend returns goes through `change`, as a list."""
    (module,) = (m for m in (dispatch.module(room, backend) for room in dispatch.ROOMS) if hasattr(m, function))
    honest = getattr(module, function)

    def call(*arguments: Any, **options: Any) -> Any:
        result = honest(*arguments, **options)
        if isinstance(result, tuple):
            return tuple(change(list(result)))
        return change([result])[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, call)
        yield


def every_break(backend: Backend, function: str, call: Callable[[], Any]) -> Iterator[tuple[Damage, Any]]:
    """What `call` returns with each part of the function's result damaged in each way that applies."""
    seen: list[Any] = []

    def look(parts: list[Any]) -> list[Any]:
        seen[:] = parts
        return parts

    with wrapped(backend, function, look):
        call()
    assert seen, f"{function} was not called"
    for part, result in enumerate(seen):
        if isinstance(result, Tensor) and result.numel():
            for damage in damages(result):
                with broken(backend, function, damage, part):
                    yield damage, call()


# ---------------------------------------------------------------------------- the case table

TINY = {case.tiny().name: case.tiny() for case in measured.CASES}
FUNCTION = {
    "combine": "combine",
    "spread": "spread",
    "spread_quantized": "spread_quantized",
    "combine weighted": "combine",
    "unpermute_backward": "spread_dots",
    "gating_topk": "gating_topk",
    "gating_topk_backward": "gating_topk_backward",
    "gating_topk and backward": "gating_topk_backward",
    "plan_from_expert_ids": "plan_expert_ids",
    "dense_weights": "slot_weights_backward",
    "routing_map_from_ids": "routing_map",
    "one token": "combine",
}
# Where the composition of torch must agree in every bit.
TO_THE_BIT = ("spread", "spread_quantized", "plan_from_expert_ids", "dense_weights", "routing_map_from_ids")


@pytest.mark.parametrize("name", TINY)
def test_cases_pass_where_nothing_is_broken(backend: Backend, name: str) -> None:
    problem = measured.problem(TINY[name])
    ours = problem.ours(backend)
    problem.compare(ours, problem.composition())
    assert_same_bits(ours, problem.ours("reference"))


@pytest.mark.parametrize("name", TINY)
def test_cases_catch_every_damage(subtests: pytest.Subtests, backend: Backend, name: str) -> None:
    case = TINY[name]
    problem = measured.problem(case)
    expected, composition = problem.ours("reference"), problem.composition()
    kinds = set()
    for damage, actual in every_break(backend, FUNCTION[case.operator], lambda: problem.ours(backend)):
        with subtests.test(damage.__name__):
            kinds.add(damage)
            with pytest.raises(AssertionError):
                assert_same_bits(actual, expected)
            if damage not in (one_ulp, minus_zero) or case.operator in TO_THE_BIT:
                with pytest.raises((AssertionError, RuntimeError)):  # or torch refuses a wrong id
                    problem.compare(actual, composition)
    assert {off_by_one_row, unwritten_row} < kinds


# ---------------------------------------------------------------------------- every function of every room

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.tensor([[2, 0], [-1, -1], [4, 2], [0, 2], [1, -1]])
CHOSEN = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
PLAN = moeroute.plan_from_expert_ids(IDS, 5, align=2, backend="reference")
DENSE = moeroute.plan_from_routing_map(CHOSEN, backend="reference")
X, ROWS = torch.randn(5, 7, generator=GENERATOR), torch.randn(PLAN.num_rows, 7, generator=GENERATOR)
WEIGHTS, TABLE = torch.rand(5, 2, generator=GENERATOR), torch.rand(4, 4, generator=GENERATOR)
ALONG = torch.rand(DENSE.num_rows, generator=GENERATOR)
LOGITS = torch.randn(5, 8, generator=GENERATOR)
LENGTHS = torch.tensor([[2, 0, 1], [1, 3, 0]])


def gating_backward(backend: Backend) -> Tensor:
    gating = moeroute.gating_topk(LOGITS, 2, score="sigmoid", backend=backend)
    return moeroute.gating_topk_backward(
        gating.scores, WEIGHTS, gating.expert_ids, score="sigmoid", renormalize=True, backend=backend
    )


LINES = moeroute.row_id_map(DENSE, backend="reference")
CALLS: dict[str, Callable[[Backend], Any]] = {
    "gating_topk": lambda b: moeroute.gating_topk(LOGITS, 2, backend=b),
    "gating_topk_backward": gating_backward,
    "plan_expert_ids": lambda b: moeroute.plan_from_expert_ids(IDS, 5, align=2, backend=b),
    "plan_any_ids": lambda b: moeroute.plan_from_expert_ids(IDS, None, backend=b),
    "plan_routing_map": lambda b: moeroute.plan_from_routing_map(CHOSEN, align=2, backend=b),
    "plan_row_of_slot": lambda b: moeroute.plan_from_row_of_slot(IDS, 5, 5, expert_of_slot=IDS, backend=b),
    "plan_token_ids": lambda b: moeroute.plan_from_token_ids(IDS.view(-1), 5, num_experts=2, backend=b),
    "plan_chunks": lambda b: moeroute.plan_from_segments(LENGTHS, 8, backend=b),
    "plan_row_id_map": lambda b: moeroute.plan_from_row_id_map(LINES, 9, backend=b),
    "row_id_map": lambda b: moeroute.row_id_map(DENSE, backend=b),
    "spread": lambda b: moeroute.spread(X, PLAN, backend=b),
    "combine": lambda b: moeroute.combine(ROWS, PLAN, backend=b),
    "row_dots": lambda b: moeroute.row_dots(ROWS, X, PLAN, backend=b),
    "spread_dots": lambda b: moeroute.unpermute_backward(X, ROWS, PLAN, WEIGHTS, backend=b),
    "dynamic_quantize": lambda b: moeroute.dynamic_quantize(ROWS, backend=b),
    "quantize": lambda b: moeroute.quantize(ROWS, torch.tensor(40.0), torch.tensor(1.0), backend=b),
    "spread_quantized": lambda b: moeroute.spread_quantized(X, PLAN, backend=b),
    "spread_static": lambda b: moeroute.quantize(X, torch.tensor(40.0), torch.tensor(1.0), plan=PLAN, backend=b),
    "activate": lambda b: activate(ROWS[:, :4], backend=b),
    "activate_backward": lambda b: activate_backward(ROWS[:, :2], ROWS[:, :4], "geglu", False, True, b),
    "take": lambda b: moeroute.permute_weights(WEIGHTS, PLAN, backend=b),
    "slot_weights": lambda b: moeroute.slot_weights(TABLE, DENSE, backend=b),
    "routing_map": lambda b: moeroute.routing_map_of(DENSE, backend=b),
    "slot_weights_backward": lambda b: moeroute.permute_weights_backward(ALONG, DENSE, backend=b),
}


def test_no_function_is_forgotten() -> None:
    if (reason := dispatch.unavailable("cpu")) is not None:
        pytest.skip(reason)
    functions = set()
    for room in dispatch.ROOMS:
        offered = []
        for module in (dispatch.module(room, "cpu"), dispatch.module(room, "reference")):
            members = inspect.getmembers(module, inspect.isfunction)
            offered.append(
                {name for name, f in members if f.__module__ == module.__name__ and not name.startswith("_")}
            )
        functions |= offered[0] & offered[1]
    assert functions - {"assign_rows"} == set(CALLS)  # which other rooms use


@pytest.mark.parametrize("function", CALLS)
def test_same_bits_catches_every_damage(subtests: pytest.Subtests, backend: Backend, function: str) -> None:
    expected = CALLS[function]("reference")
    assert_same_bits(CALLS[function](backend), expected)
    kinds = set()
    for damage, actual in every_break(backend, function, lambda: CALLS[function](backend)):
        with subtests.test(damage.__name__):
            kinds.add(damage)
            with pytest.raises(AssertionError):
                assert_same_bits(actual, expected)
    if function in ("spread", "combine", "row_dots", "spread_dots", "take", "gating_topk_backward"):
        assert minus_zero in kinds


@pytest.mark.parametrize(
    ("function", "damage", "part"),
    [
        ("combine", one_ulp, 0),
        ("spread", one_ulp, 0),
        ("spread_dots", one_ulp, 0),
        ("spread_dots", one_ulp, 1),
        ("gating_topk", one_ulp, 0),
        ("gating_topk", wrong_id, 1),
        ("gating_topk", one_ulp, 2),
        ("gating_topk_backward", minus_zero, 0),
        ("plan_expert_ids", wrong_id, 0),
        ("plan_expert_ids", off_by_one_row, 1),
        ("plan_expert_ids", wrong_id, 2),
    ],
)
def test_verify_catches_it(function: str, damage: Damage, part: int, capsys: pytest.CaptureFixture[str]) -> None:
    if (reason := dispatch.unavailable("cpu")) is not None:
        pytest.skip(reason)
    size = "T=23 E=12 K=3 H=331"
    only = {"combine": f"unpermute {size} ids", "spread": f"permute {size} map", "spread_dots": f"backward {size} ids"}
    name = only.get(function, function.removeprefix("plan_").removesuffix("_backward"))
    with broken("cpu", function, damage, part):
        assert cli.main(["verify", "--backend", "cpu", "--only", name]) == 1
    assert "differ from the reference" in capsys.readouterr().out


def test_verify_is_content_where_nothing_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    if (reason := dispatch.unavailable("cpu")) is not None:
        pytest.skip(reason)
    assert cli.main(["verify", "--backend", "cpu"]) == 0
    assert "same bits as the reference" in capsys.readouterr().out


# ---------------------------------------------------------------------------- gradients


def doubles(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).add(0.1).requires_grad_()


def weighted_unpermute() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    return lambda rows, weights: moeroute.unpermute(rows, PLAN, weights), (doubles(PLAN.num_rows, 3), doubles(5, 2))


def weighted_permute() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    return lambda tokens, weights: moeroute.permute(tokens, PLAN, weights), (doubles(5, 3), doubles(5, 2))


def permuted_table() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    return lambda weights: moeroute.permute_weights(weights, DENSE), (doubles(4, 4),)


def sigmoid_gating() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    return lambda logits: moeroute.gating_topk(logits, 2, score="sigmoid").weights, (doubles(3, 6),)


@pytest.mark.parametrize("damage", (off_by_one_row, doubled, lost))
@pytest.mark.parametrize(
    ("forward", "function", "part"),
    [
        (weighted_unpermute, "spread_dots", 0),
        (weighted_unpermute, "spread_dots", 1),
        (weighted_permute, "combine", 0),
        (weighted_permute, "row_dots", 0),
        (permuted_table, "slot_weights_backward", 0),
        (sigmoid_gating, "gating_topk_backward", 0),
    ],
)
def test_gradcheck_catches_a_broken_gradient(forward: Any, function: str, part: int, damage: Damage) -> None:
    call, inputs = forward()
    torch.autograd.gradcheck(call, inputs)
    with (
        broken("reference", function, damage, part),
        pytest.raises(GradcheckError, match="Jacobian mismatch"),
    ):
        torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("damage", (off_by_one_row, doubled, lost))
@pytest.mark.parametrize("function", ("combine", "row_dots", "spread"))
def test_gradgradcheck_catches_a_broken_second_derivative(function: str, damage: Damage) -> None:
    call, inputs = weighted_unpermute()
    torch.autograd.gradgradcheck(call, inputs)
    with (
        broken("reference", function, damage),
        pytest.raises(GradcheckError, match="Jacobian mismatch"),
    ):
        torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize(
    "damage",
    [
        lambda result: result[1:],
        lambda result: result.double(),
        lambda result: result.t().contiguous().t(),
        lambda result: (ROWS.add_(1.0), result)[1],
    ],
    ids=["a row too few", "another dtype", "other strides", "an input changed"],
)
def test_opcheck_catches_a_broken_contract(backend: Backend, damage: Damage) -> None:
    arguments = (ROWS, None, *PLAN.tensors, backend)
    torch.library.opcheck(torch.ops.moeroute.combine.default, arguments)
    before = ROWS.clone()
    try:
        with broken(backend, "combine", damage), pytest.raises(OpCheckError):
            torch.library.opcheck(torch.ops.moeroute.combine.default, arguments)
    finally:
        ROWS.copy_(before)


# ---------------------------------------------------------------------------- the comparisons themselves


def nan_of(bits: int, dtype: torch.dtype) -> Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limit = 1 << (8 * dtype.itemsize)
    return torch.tensor([bits - limit if bits >= limit // 2 else bits], dtype=integer).view(dtype)


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        (torch.float64, (0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1, (1 << 64) - 1)),
        (torch.float32, (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF)),
        (torch.float16, (0x7E00, 0xFE00, 0x7C01, 0xFFFF)),
        (torch.bfloat16, (0x7FC0, 0xFFC0, 0x7F81, 0xFFFF)),
    ],
    ids=str,
)
def test_same_bits_takes_nan_for_nan(dtype: torch.dtype, patterns: tuple[int, ...]) -> None:
    for first in patterns:
        assert bool(nan_of(first, dtype).isnan())
        for second in patterns:
            assert_same_bits(nan_of(first, dtype), nan_of(second, dtype))
        for other in (0.0, torch.inf, 1.0):
            with pytest.raises(AssertionError, match="1 of 1 elements differ"):
                assert_same_bits(nan_of(first, dtype), torch.tensor([other], dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_bits_tells_zeros_and_neighbours_apart(dtype: torch.dtype) -> None:
    zero, one = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
    for first, second in ((zero, -zero), (one, torch.nextafter(one.double(), one.double() * 2)), (one, -one)):
        other = second if second.dtype is dtype else one_ulp(one)
        assert_same_bits(first, first.clone())
        for pair in ((first, other), (other, first)):
            with pytest.raises(AssertionError, match="elements differ"):
                assert_same_bits(*pair)


NUMBERS = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (NUMBERS, NUMBERS.reshape(3, 2), r"float32 \[2, 3\], expected torch.float32 \[3, 2\]"),
        (NUMBERS[:1], NUMBERS[0], r"\[1, 3\], expected torch.float32 \[3\]"),
        (NUMBERS[:0], NUMBERS[:0, :2], r"\[0, 3\], expected torch.float32 \[0, 2\]"),
        (NUMBERS, NUMBERS.bfloat16(), r"float32 \[2, 3\], expected torch.bfloat16"),
        (NUMBERS.int(), NUMBERS.long(), r"int32 \[2, 3\], expected torch.int64"),
        (NUMBERS > 2, (NUMBERS > 2).to(torch.uint8), r"bool \[2, 3\], expected torch.uint8"),
        (NUMBERS > 2, NUMBERS > 3, r"1 of 6 elements differ; \(1, 0\): True not False"),
        (NUMBERS, NUMBERS.t().contiguous().t() + 1, "6 of 6 elements differ"),
        (None, NUMBERS, "NoneType where a tensor was expected"),
        (NUMBERS, None, "expected None"),
        (1, 2, "result: 1, expected 2"),
        ((NUMBERS,), (NUMBERS, NUMBERS), "1 parts, expected 2"),
        ((NUMBERS, [NUMBERS, -NUMBERS]), (NUMBERS, [NUMBERS, NUMBERS]), r"result\[1\]\[1\]: 6 of 6 elements differ"),
    ],
)
def test_same_bits_refuses(actual: Any, expected: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(actual, expected)


def test_same_bits_accepts() -> None:
    strided = NUMBERS.t().contiguous().t()
    leaf = NUMBERS.clone().requires_grad_()
    for same in (strided, leaf, leaf * 1):
        assert_same_bits(same, NUMBERS)
        assert_same_bits((same, [None, 3, "x", same]), (NUMBERS, [None, 3, "x", NUMBERS]))
    assert_same_bits(NUMBERS[:0], NUMBERS[:0].clone())
    assert_same_bits(torch.tensor(2.0), torch.tensor(2.0))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(moeroute.RoutingPlan)])
def test_same_bits_compares_every_field_of_a_plan(field: str) -> None:
    plan = DENSE if field in ("slot_offsets", "expert_of_slot") else PLAN
    twin = moeroute.RoutingPlan(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})
    assert_same_bits(twin, plan)
    value = getattr(plan, field)
    object.__setattr__(twin, field, wrong_id(value) if isinstance(value, Tensor) else value + 1)
    for pair in ((twin, plan), (plan, twin)):
        with pytest.raises(AssertionError, match=rf"result\.{field}: "):
            assert_same_bits(*pair)
    object.__setattr__(twin, field, None)
    for pair in ((twin, plan), (plan, twin)):
        with pytest.raises(AssertionError, match=rf"result\.{field}: "):
            assert_same_bits(*pair)


@pytest.mark.parametrize("scale", (1.0, 1e-3))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_close_to_exact_has_two_limits(dtype: torch.dtype, scale: float) -> None:
    worst, rms = TOLERANCES[dtype]
    assert rms < worst
    actual = (torch.linspace(-1, 1, 4096, dtype=torch.float64).reshape(64, 64) * scale).to(dtype)
    largest = float(actual.double().abs().max())
    assert_close_to_exact(actual, actual.double())
    place = (17, 5)
    exact = actual.double().clone()
    exact[place] += 0.99 * worst * largest
    assert_close_to_exact(actual, exact)  # one element alone may be off by so much
    exact[place] += 0.02 * worst * largest
    with pytest.raises(AssertionError, match=r"result: worst error .* at \(17, 5\)"):
        assert_close_to_exact(actual, exact)
    between = (0.5 * rms + 0.5 * worst) * largest
    exact = actual.double().clone()
    exact[:, ::2] += between
    exact[:, 1::2] -= between  # every element a little, none too much
    exact[0, 0], exact[-1, -1] = actual[0, 0].double(), actual[-1, -1].double()
    with pytest.raises(AssertionError, match=r"rms .* \(allowed"):
        assert_close_to_exact(actual, exact)


def test_close_to_exact_refuses(subtests: pytest.Subtests) -> None:
    exact = NUMBERS.double()
    for wrong in (torch.nan, torch.inf, -torch.inf):
        with subtests.test(wrong=wrong):
            actual = NUMBERS.clone()
            actual[1, 1] = wrong
            with pytest.raises(AssertionError, match="1 elements are not finite"):
                assert_close_to_exact(actual, exact)
    with pytest.raises(AssertionError, match=r"rows: shape \[2, 3\], expected \[3, 2\]"):
        assert_close_to_exact(NUMBERS, exact.t(), "rows")
    with pytest.raises(AssertionError, match="worst error"):
        assert_close_to_exact(torch.full((2, 2), 1e-12), torch.zeros(2, 2, dtype=torch.float64))
    assert_close_to_exact(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float64))
    assert_close_to_exact(NUMBERS[:0], exact[:0])


def test_what_is_not_written_shows() -> None:
    """conftest.py fills fresh memory, that of the pool too."""
    for make in (torch.empty, lambda shape, dtype: memory.empty(shape, dtype)):
        for rows in (2, 2**19):
            for _ in range(2):  # a fresh block, then a recycled one
                for dtype in FLOATS:
                    assert bool(make((rows, 3), dtype=dtype).isnan().all())
                for dtype in (torch.int32, torch.int64):
                    assert bool((make((rows, 3), dtype=dtype) == torch.iinfo(dtype).max).all())
