"""The row operators and the verbs on them, against float64 mathematics and between backends."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import moeroute
from case_ids import spelled
from moeroute.dispatch import Backend
from moeroute.ops.weights import op
from moeroute.testing import assert_close_to_exact, assert_same_bits
from small_cases import random_plan
from strategies import BACKENDS

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
HIDDEN = (1, 2, 3, 5, 7, 8, 9, 15, 17, 33, 64, 65, 96, 100, 127, 128, 129, 255, 256, 257, 1000, 1001)


# ---------------------------------------------------------------------------- mathematics in float64, by hand


def exact_combine(rows: Tensor, weights: Tensor | None, plan: moeroute.RoutingPlan) -> Tensor:
    """Slot by slot in float64, differentiable by torch."""
    tokens, where = plan.token_of_slot.tolist(), plan.row_of_slot.tolist()
    result = [torch.zeros(rows.shape[1], dtype=torch.float64) for _ in range(plan.num_tokens)]
    for slot, (token, row) in enumerate(zip(tokens, where, strict=True)):
        if row >= 0:
            term = rows[row] if weights is None else rows[row] * weights[slot]
            result[token] = result[token] + term
    return torch.stack(result) if result else rows.new_zeros(0, rows.shape[1])


def exact_spread(x: Tensor, weights: Tensor | None, plan: moeroute.RoutingPlan) -> Tensor:
    tokens, slots = plan.token_of_slot.tolist(), plan.slot_of_row.tolist()
    zero = torch.zeros(x.shape[1], dtype=torch.float64)
    result = [
        zero if slot < 0 else x[tokens[slot]] if weights is None else x[tokens[slot]] * weights[slot] for slot in slots
    ]
    return torch.stack(result) if result else x.new_zeros(0, x.shape[1])


def exact_dots(rows: Tensor, x: Tensor, plan: moeroute.RoutingPlan) -> Tensor:
    tokens, where = plan.token_of_slot.tolist(), plan.row_of_slot.tolist()
    zero = torch.zeros((), dtype=torch.float64)
    result = [(rows[row] * x[token]).sum() if row >= 0 else zero for token, row in zip(tokens, where, strict=True)]
    return torch.stack(result) if result else rows.new_zeros(0)


MIXTURES = [
    *itertools.product(FLOATS, (None, *FLOATS)),
    (torch.float64, None),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize(("dtype", "weights_dtype"), MIXTURES)
def test_operators_are_right(backend: Backend, dtype: torch.dtype, weights_dtype: torch.dtype | None) -> None:
    if dtype is torch.float64:
        backend = "reference"
    generator = torch.Generator().manual_seed(3)
    plan = random_plan(1, 7, 3, 5)
    x = torch.randn(7, 130, generator=generator).to(dtype)
    rows = torch.randn(plan.num_rows, 130, generator=generator).to(dtype)
    weights = None if weights_dtype is None else torch.rand(plan.num_slots, generator=generator).to(weights_dtype)
    wide = None if weights is None else weights.double()

    combined = moeroute.combine(rows, plan, weights, backend=backend)
    assert combined.dtype is dtype
    assert_close_to_exact(combined, exact_combine(rows.double(), wide, plan))
    spread = moeroute.spread(x, plan, weights, backend=backend)
    assert spread.dtype is dtype
    assert_close_to_exact(spread, exact_spread(x.double(), wide, plan))
    dots = moeroute.row_dots(rows, x, plan, backend=backend)
    assert_close_to_exact(dots, exact_dots(rows.double(), x.double(), plan))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weights_dtype", FLOATS)
def test_gradients_are_right_and_in_their_inputs_dtype(
    backend: Backend, dtype: torch.dtype, weights_dtype: torch.dtype
) -> None:
    plan = random_plan(5, 6, 2, 4)
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(plan.num_rows, 70, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(6, 2, generator=generator).to(weights_dtype).requires_grad_()
    seed = torch.randn(6, 70, generator=generator).to(dtype)
    moeroute.unpermute(rows, plan, weights, backend=backend).backward(seed)
    exact_rows = rows.detach().double().requires_grad_()
    exact_weights = weights.detach().double().requires_grad_()
    exact_combine(exact_rows, exact_weights.flatten(), plan).backward(seed.double())
    assert rows.grad is not None
    assert exact_rows.grad is not None
    assert weights.grad is not None
    assert exact_weights.grad is not None
    assert rows.grad.dtype is dtype
    assert weights.grad.dtype is weights_dtype
    assert_close_to_exact(rows.grad, exact_rows.grad, "rows")
    assert_close_to_exact(weights.grad, exact_weights.grad, "weights")

    tokens = torch.randn(6, 70, generator=generator).to(dtype).requires_grad_()
    scales = torch.rand(6, 2, generator=generator).to(weights_dtype).requires_grad_()
    seed = torch.randn(plan.num_rows, 70, generator=generator).to(dtype)
    moeroute.permute(tokens, plan, scales, backend=backend).backward(seed)
    exact_tokens = tokens.detach().double().requires_grad_()
    exact_scales = scales.detach().double().requires_grad_()
    exact_spread(exact_tokens, exact_scales.flatten(), plan).backward(seed.double())
    assert tokens.grad is not None
    assert exact_tokens.grad is not None
    assert scales.grad is not None
    assert exact_scales.grad is not None
    assert_close_to_exact(tokens.grad, exact_tokens.grad, "tokens")
    assert_close_to_exact(scales.grad, exact_scales.grad, "scales")


# ---------------------------------------------------------------------------- bits between backends


@st.composite
def problems(draw: st.DrawFn) -> tuple[moeroute.RoutingPlan, int, torch.dtype, torch.dtype, int]:
    num_tokens, topk, num_experts = draw(st.integers(0, 9)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    kind = draw(st.sampled_from(["ids", "capacity", "map", "table", "indices", "tokens"]))
    if kind in ("ids", "capacity"):
        ids = torch.randint(-1, num_experts + 1, (num_tokens, topk), generator=generator)
        capacity = draw(st.integers(0, 4)) if kind == "capacity" else None
        plan = moeroute.plan_from_expert_ids(
            ids,
            num_experts,
            capacity=capacity,
            pad_to_capacity=kind == "capacity" and draw(st.booleans()),
            align=draw(st.sampled_from([1, 4])),
        )
    elif kind in ("map", "table"):
        chosen = torch.rand(num_tokens, num_experts, generator=generator) < 0.5
        plan = moeroute.plan_from_routing_map(chosen, topk=topk if kind == "table" else None)
    elif kind == "indices":
        num_rows = draw(st.integers(0, 12))
        rows = torch.randint(-2, num_rows + 2, (num_tokens, topk), generator=generator)
        plan = moeroute.plan_from_row_of_slot(rows, num_tokens, num_rows)
    else:
        tokens = torch.randint(-1, num_tokens + 1, (num_tokens * topk,), generator=generator)
        plan = moeroute.plan_from_token_ids(tokens, num_tokens)
    hidden = draw(st.sampled_from((0, *HIDDEN)))
    dtypes = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(FLOATS))
    return plan, hidden, *dtypes, seed


def special(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers with a sprinkle of zeros of both signs, infinities, NaN, huge and denormal ones."""
    values = torch.randn(shape, generator=generator)
    extra = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40, 65504.0, 1e-8])
    pick = torch.randint(len(extra), shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, extra[pick], values).to(dtype)


@given(problems(), BACKENDS)
def test_backends_agree_in_every_bit(
    problem: tuple[moeroute.RoutingPlan, int, torch.dtype, torch.dtype, int], names: tuple[Backend, ...]
) -> None:
    plan, hidden, dtype, weights_dtype, seed = problem
    generator = torch.Generator().manual_seed(seed)
    x = special((plan.num_tokens, hidden), dtype, generator)
    rows = special((plan.num_rows, hidden), dtype, generator)
    weights = special((plan.num_slots,), weights_dtype, generator)
    row_weights = special((plan.num_rows,), weights_dtype, generator)

    def everything(backend: Backend) -> list[Tensor | None]:
        shape = op.weights_shape("test", plan, None)
        verb = weights.new_ones(shape) * 0.5
        pair = moeroute.unpermute_backward(x, rows, plan, verb, backend=backend)
        assert pair[1] is not None
        return [
            moeroute.spread(x, plan, backend=backend),
            moeroute.spread(x, plan, weights, backend=backend),
            moeroute.combine(rows, plan, backend=backend),
            moeroute.combine(rows, plan, weights, backend=backend),
            moeroute.combine(rows, plan, weights, init=x, backend=backend),
            moeroute.row_dots(rows, x, plan, dtype=weights_dtype, backend=backend),
            moeroute.permute(x, plan, verb, backend=backend),
            moeroute.unpermute(rows, plan, verb, backend=backend),
            moeroute.permute_weights(verb, plan, backend=backend),
            moeroute.permute_weights_backward(row_weights, plan, backend=backend),
            moeroute.permute_weights_backward(row_weights, plan, accumulate=False, backend=backend),
            *pair,
        ]

    expected = everything("reference")
    for name in names[1:]:
        assert_same_bits(everything(name), expected, name)


@pytest.mark.parametrize("dtype", FLOATS)
def test_finalize_bias_and_init_agree_in_every_bit(
    subtests: pytest.Subtests, backend: Backend, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows_of = torch.tensor([[0, -1], [2, 1], [-1, -1]])
    experts = torch.tensor([[0, 1], [2, -1], [5, 0]])
    plan = moeroute.plan_from_row_of_slot(rows_of, 3, 3, expert_of_slot=experts)
    rows, bias = special((3, 130), dtype, generator), special((3, 130), dtype, generator)
    init, weights = special((3, 130), dtype, generator), special((6,), torch.float32, generator)
    pair = init, special((3, 130), dtype, generator)
    for given_init, given_bias, given_weights in itertools.product((None, init, pair), (None, bias), (None, weights)):
        with subtests.test(init=spelled(given_init), bias=given_bias is not None, weights=given_weights is not None):
            results = [
                moeroute.combine(rows, plan, given_weights, init=given_init, bias=given_bias, backend=name)
                for name in (backend, "reference")
            ]
            assert_same_bits(results[0], results[1])
            dots = [
                moeroute.row_dots(rows, init, plan, bias=given_bias, backend=name) for name in (backend, "reference")
            ]
            assert_same_bits(dots[0], dots[1])


def test_finalize_numbers(backend: Backend) -> None:
    """A slot adds w * (row + bias); a slot without a row adds nothing, its bias included; no expert, no bias."""
    plan = moeroute.plan_from_row_of_slot(
        torch.tensor([[0, -1], [1, 2]]), 2, 3, expert_of_slot=torch.tensor([[0, 1], [1, -1]])
    )
    rows = torch.tensor([[1.0], [2.0], [4.0]])
    bias = torch.tensor([[10.0], [20.0]])
    init = torch.tensor([[100.0], [200.0]])
    weights = torch.tensor([2.0, 3.0, 0.5, 4.0])
    result = moeroute.combine(rows, plan, weights, init=init, bias=bias, backend=backend)
    assert result.flatten().tolist() == [100 + 2 * 11, 200 + 0.5 * 22 + 4 * 4]
    result = moeroute.combine(rows, plan, weights, init=(init, 10 * init), bias=bias, backend=backend)
    assert result.flatten().tolist() == [1100 + 2 * 11, 2200 + 0.5 * 22 + 4 * 4]
    x = torch.tensor([[1.0], [10.0]])
    assert moeroute.row_dots(rows, x, plan, bias=bias, backend=backend).tolist() == [11, 0, 220, 40]


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_do_not_depend_on_threads_or_batch(
    subtests: pytest.Subtests, backend: Backend, threads: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(8, (600, 4), generator=generator)
    plan = moeroute.plan_from_expert_ids(ids, 8)
    tokens = torch.randn(600, 200, generator=generator).to(dtype)
    weights = torch.rand(600, 4, generator=generator)
    rows = moeroute.permute(tokens, plan, backend=backend)
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    grads = moeroute.unpermute_backward(tokens, rows, plan, weights, backend=backend)
    assert grads[1] is not None
    per_slot = grads[0][plan.row_of_slot.long()]
    for token in (0, 299, 300, 599):
        with subtests.test(token=token):
            one = slice(token, token + 1)
            alone = moeroute.plan_from_expert_ids(ids[one], 8)
            rows_alone = moeroute.permute(tokens[one], alone, backend=backend)
            assert_same_bits(moeroute.unpermute(rows_alone, alone, weights[one], backend=backend), output[one])
            grads_alone = moeroute.unpermute_backward(tokens[one], rows_alone, alone, weights[one], backend=backend)
            assert_same_bits(grads_alone[1], grads[1][one])
            assert_same_bits(grads_alone[0][alone.row_of_slot.long()], per_slot[token * 4 : token * 4 + 4])
    former = torch.get_num_threads()
    torch.set_num_threads(3 - threads)
    try:
        assert_same_bits(moeroute.unpermute(rows, plan, weights, backend=backend), output)
        assert_same_bits(moeroute.unpermute_backward(tokens, rows, plan, weights, backend=backend), grads)
    finally:
        torch.set_num_threads(former)


# ---------------------------------------------------------------------------- promises of the arithmetic


def test_sum_is_float32_and_rounded_once(backend: Backend) -> None:
    """B07: eight bfloat16 gradients 256, 1, 1, … add up to 263, which rounds to 264; B122: 1.01171875 to 1.015625."""
    plan = moeroute.plan_from_expert_ids(torch.arange(8)[None], 8)
    grads = torch.tensor([256.0] + [1.0] * 7, dtype=torch.bfloat16)[:, None]
    assert moeroute.permute_backward(grads, plan, backend=backend).item() == 264
    plan = moeroute.plan_from_expert_ids(torch.arange(4)[None], 4)
    rows = torch.tensor([1.0, 2**-8, 2**-8, 2**-8], dtype=torch.bfloat16)[:, None]
    assert moeroute.unpermute(rows, plan, torch.ones(1, 4), backend=backend).item() == 1.015625


def test_sum_is_in_slot_order(backend: Backend) -> None:
    """(2^24 + 1) - 2^24 is 0 in float32 where 2^24 comes first, 1 where it comes last."""
    big = float(2**24)
    plan = moeroute.plan_from_expert_ids(torch.tensor([[2, 1, 0]]), 3)
    rows = torch.tensor([[-big], [1.0], [big]])  # slot order: row 2, 1, 0
    assert moeroute.unpermute(rows, plan, backend=backend).item() == 0
    rows = torch.tensor([[1.0], [-big], [big]])
    assert moeroute.unpermute(rows, plan, backend=backend).item() == 1


def test_hidden_sum_has_256_partial_sums_then_neighbours(backend: Backend) -> None:
    """Element 0 and 256 meet first: 2^24 - 2^24 + 1 = 1; with the 1 at 256 it is lost."""
    plan = moeroute.plan_from_expert_ids(torch.zeros(1, 1, dtype=torch.int64), 1)
    ones = torch.ones(1, 300)
    rows = torch.zeros(1, 300)
    rows[0, 0], rows[0, 256], rows[0, 1] = 2.0**24, -(2.0**24), 1.0
    assert moeroute.row_dots(rows, ones, plan, backend=backend).item() == 1
    rows[0, 0], rows[0, 256], rows[0, 1] = 2.0**24, 1.0, -(2.0**24)
    assert moeroute.row_dots(rows, ones, plan, backend=backend).item() == 0
    rows[0, 256], rows[0, 2] = 0.0, 1.0  # neighbours 0 and 1 cancel before 2 comes
    assert moeroute.row_dots(rows, ones, plan, backend=backend).item() == 1


@pytest.mark.parametrize("zero", (0.0, -0.0))
def test_zero_weight_adds_nothing_and_its_row_is_not_read(backend: Backend, zero: float) -> None:
    """B25, B26: a row of NaN under weight 0."""
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 2)
    rows = torch.tensor([[1.0], [torch.nan], [torch.inf], [4.0]])  # e0: t0, t1; e1: t0, t1
    weights = torch.tensor([[1.0, zero], [1.0, zero]])
    assert moeroute.unpermute(rows, plan, weights, backend=backend).flatten().tolist() == [1, 4]


def test_padding_rows_are_zero_and_never_read(backend: Backend) -> None:
    """B25, B115: NaN in rows that no slot names; tokens without a row get +0."""
    ids = torch.tensor([[0, -1], [-1, -1], [1, 0]])
    plan = moeroute.plan_from_expert_ids(ids, 2, align=4)
    rows = torch.full((plan.num_rows, 3), torch.nan)
    live = plan.slot_of_row >= 0
    rows[live] = 2.0
    weights = torch.full((3, 2), 0.5, requires_grad=True)
    grown = rows.clone().requires_grad_()
    output = moeroute.unpermute(grown, plan, weights, backend=backend)
    assert_same_bits(output, torch.tensor([[1.0] * 3, [0.0] * 3, [2.0] * 3]))
    output.sum().backward()
    assert grown.grad is not None
    assert weights.grad is not None
    assert_same_bits(grown.grad, torch.where(live[:, None], 0.5, 0.0).expand(-1, 3))
    assert weights.grad.tolist() == [[6, 0], [0, 0], [6, 6]]
    permuted = moeroute.permute(torch.ones(3, 3), plan, backend=backend)
    assert_same_bits(permuted, torch.where(live[:, None], 1.0, 0.0).expand(-1, 3))


def test_negative_zero() -> None:
    """spread copies the sign of zero; combine adds to +0."""
    plan = moeroute.plan_from_expert_ids(torch.zeros(1, 1, dtype=torch.int64), 1)
    minus = torch.tensor([[-0.0]])
    assert_same_bits(moeroute.permute(minus, plan), minus)
    assert_same_bits(moeroute.unpermute(minus, plan), torch.tensor([[0.0]]))
