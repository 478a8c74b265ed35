"""The row operators and the verbs on them, against float64 mathematics and between backends."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import moeroute
from moeroute.ops.permutation import op
from moeroute.testing import assert_close_to_exact, assert_same_bits
from small_cases import present
from strategies import BACKENDS

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
HIDDEN = (1, 2, 3, 5, 7, 8, 9, 15, 17, 33, 64, 65, 96, 100, 127, 128, 129, 255, 256, 257, 1000, 1001)


def random_plan(seed: int, num_tokens: int, topk: int, num_experts: int, empty: float = 0.2) -> moeroute.RoutingPlan:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(num_experts, (num_tokens, topk), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < empty] = -1
    return moeroute.plan_from_expert_ids(ids, num_experts)


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


@pytest.mark.parametrize(("dtype", "weights_dtype"), MIXTURES, ids=str)
def test_operators_are_right(backend: str, dtype: torch.dtype, weights_dtype: torch.dtype | None) -> None:
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weights_dtype", FLOATS, ids=str)
def test_gradients_are_right_and_in_their_inputs_dtype(
    backend: str, dtype: torch.dtype, weights_dtype: torch.dtype
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
    problem: tuple[moeroute.RoutingPlan, int, torch.dtype, torch.dtype, int], names: tuple[str, ...]
) -> None:
    plan, hidden, dtype, weights_dtype, seed = problem
    generator = torch.Generator().manual_seed(seed)
    x = special((plan.num_tokens, hidden), dtype, generator)
    rows = special((plan.num_rows, hidden), dtype, generator)
    weights = special((plan.num_slots,), weights_dtype, generator)
    row_weights = special((plan.num_rows,), weights_dtype, generator)

    def everything(backend: str) -> list[Tensor | None]:
        shape = op._weights_shape("test", plan, None)
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finalize_bias_and_init_agree_in_every_bit(backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows_of = torch.tensor([[0, -1], [2, 1], [-1, -1]])
    experts = torch.tensor([[0, 1], [2, -1], [5, 0]])
    plan = moeroute.plan_from_row_of_slot(rows_of, 3, 3, expert_of_slot=experts)
    rows, bias = special((3, 130), dtype, generator), special((3, 130), dtype, generator)
    init, weights = special((3, 130), dtype, generator), special((6,), torch.float32, generator)
    pair = init, special((3, 130), dtype, generator)
    for given_init, given_bias, given_weights in itertools.product((None, init, pair), (None, bias), (None, weights)):
        results = [
            moeroute.combine(rows, plan, given_weights, init=given_init, bias=given_bias, backend=name)
            for name in (backend, "reference")
        ]
        assert_same_bits(results[0], results[1])
        dots = [moeroute.row_dots(rows, init, plan, bias=given_bias, backend=name) for name in (backend, "reference")]
        assert_same_bits(dots[0], dots[1])


def test_finalize_numbers(backend: str) -> None:
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_do_not_depend_on_threads_or_batch(backend: str, threads: int, dtype: torch.dtype) -> None:
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


def test_sum_is_float32_and_rounded_once(backend: str) -> None:
    """B07: eight bfloat16 gradients 256, 1, 1, … add up to 263, which rounds to 264; B122: 1.01171875 to 1.015625."""
    plan = moeroute.plan_from_expert_ids(torch.arange(8)[None], 8)
    grads = torch.tensor([256.0] + [1.0] * 7, dtype=torch.bfloat16)[:, None]
    assert moeroute.permute_backward(grads, plan, backend=backend).item() == 264
    plan = moeroute.plan_from_expert_ids(torch.arange(4)[None], 4)
    rows = torch.tensor([1.0, 2**-8, 2**-8, 2**-8], dtype=torch.bfloat16)[:, None]
    assert moeroute.unpermute(rows, plan, torch.ones(1, 4), backend=backend).item() == 1.015625


def test_sum_is_in_slot_order(backend: str) -> None:
    """(2^24 + 1) - 2^24 is 0 in float32 where 2^24 comes first, 1 where it comes last."""
    big = float(2**24)
    plan = moeroute.plan_from_expert_ids(torch.tensor([[2, 1, 0]]), 3)
    rows = torch.tensor([[-big], [1.0], [big]])  # slot order: row 2, 1, 0
    assert moeroute.unpermute(rows, plan, backend=backend).item() == 0
    rows = torch.tensor([[1.0], [-big], [big]])
    assert moeroute.unpermute(rows, plan, backend=backend).item() == 1


def test_hidden_sum_has_256_partial_sums_then_neighbours(backend: str) -> None:
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
def test_zero_weight_adds_nothing_and_its_row_is_not_read(backend: str, zero: float) -> None:
    """B25, B26: a row of NaN under weight 0."""
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 2)
    rows = torch.tensor([[1.0], [torch.nan], [torch.inf], [4.0]])  # e0: t0, t1; e1: t0, t1
    weights = torch.tensor([[1.0, zero], [1.0, zero]])
    assert moeroute.unpermute(rows, plan, weights, backend=backend).flatten().tolist() == [1, 4]


def test_padding_rows_are_zero_and_never_read(backend: str) -> None:
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


# ---------------------------------------------------------------------------- shapes, strides, dtypes


@pytest.mark.parametrize("hidden", HIDDEN)
def test_any_hidden_size_and_alignment(backend: str, hidden: int) -> None:
    """B73, B74: rows are bitwise those of index_select; guards around an `out` stay."""
    generator = torch.Generator().manual_seed(hidden)
    plan = random_plan(hidden, 9, 3, 4)
    index = plan.token_of_row.long()
    for dtype in FLOATS:
        tokens = torch.randn(9, hidden, generator=generator).to(dtype)
        shifted = torch.zeros(9 * hidden + 1, dtype=dtype)[1:].view(9, hidden).copy_(tokens)
        assert_same_bits(moeroute.permute(shifted, plan, backend=backend), tokens.index_select(0, index))
        guarded = torch.full((plan.num_rows + 2, hidden + 2), 777.0, dtype=dtype)
        moeroute.spread(tokens, plan, out=guarded[1:-1, 1:-1], backend=backend)
        assert_same_bits(guarded[1:-1, 1:-1], tokens.index_select(0, index))
        frame = guarded.clone()
        frame[1:-1, 1:-1] = 777.0
        assert bool((frame == 777.0).all())


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.bool, torch.int16, torch.int32, torch.int64))
def test_integer_rows(backend: str, dtype: torch.dtype) -> None:
    plan = random_plan(8, 6, 2, 3)
    tokens = torch.randint(2, (6, 33)).to(dtype)
    assert_same_bits(moeroute.permute(tokens, plan, backend=backend), tokens[plan.token_of_row.long()])


def layouts(matrix: Tensor) -> list[Tensor]:
    """The same values behind other strides."""
    wide = torch.zeros(matrix.shape[0] * 2, matrix.shape[1] + 3, dtype=matrix.dtype)
    wide[::2, 2:-1] = matrix
    return [matrix.t().contiguous().t(), wide[::2, 2:-1], torch.stack([matrix, matrix], dim=2)[:, :, 0]]


def test_strides_of_inputs(backend: str) -> None:
    plan = random_plan(4, 6, 2, 3)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(6, 70, generator=generator)
    rows = torch.randn(plan.num_rows, 70, generator=generator)
    weights = torch.rand(6, 2, generator=generator)
    for x, y in zip(layouts(tokens), layouts(rows), strict=True):
        w = weights.t().contiguous().t()
        assert_same_bits(
            moeroute.permute(x, plan, w, backend=backend), moeroute.permute(tokens, plan, weights, backend=backend)
        )
        assert_same_bits(
            moeroute.unpermute(y, plan, w, backend=backend), moeroute.unpermute(rows, plan, weights, backend=backend)
        )
        assert_same_bits(
            moeroute.unpermute_backward(x, y, plan, w, backend=backend),
            moeroute.unpermute_backward(tokens, rows, plan, weights, backend=backend),
        )
    row = torch.randn(1, 70, generator=generator)
    expanded, full = row.expand(6, 70), row.repeat(6, 1)
    assert_same_bits(moeroute.permute(expanded, plan, backend=backend), moeroute.permute(full, plan, backend=backend))


def test_strided_and_expanded_gradients(backend: str) -> None:
    """B46, B47: gradients from sum(), cat and a transposition."""
    plan = random_plan(6, 4, 2, 3, empty=0.0)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(plan.num_rows, 8, generator=generator)
    share = torch.rand(4, 2, generator=generator)
    mix = torch.randn(4, 16, generator=generator)
    losses = (
        lambda out: out.sum(),
        lambda out: (torch.cat([out, torch.ones(4, 8)], dim=1) * mix).sum(),
        lambda out: (out.t() @ mix).sum(),
    )
    for loss in losses:
        grads = []
        for clone in (False, True):
            rows, weights = data.clone().requires_grad_(), share.clone().requires_grad_()
            out = moeroute.unpermute(rows, plan, weights, backend=backend)
            if clone:  # the gradient arrives contiguous
                out.register_hook(lambda grad: grad.contiguous().clone())
            loss(out).backward()
            grads.append((rows.grad, weights.grad))
        assert_same_bits(grads[0], grads[1])


@pytest.mark.parametrize("shape", ((0, 2, 5), (3, 2, 0), (0, 1, 0), (3, 1, 4)))
def test_empty_sizes(backend: str, shape: tuple[int, int, int]) -> None:
    """B14, B59, B106: T = 0, H = 0, R = 0 keep shapes, dtypes and gradients."""
    num_tokens, topk, hidden = shape
    ids = torch.full((num_tokens, topk), -1)
    plan = moeroute.plan_from_expert_ids(ids, 4)
    tokens = torch.ones(num_tokens, hidden, requires_grad=True)
    weights = torch.ones(num_tokens, topk, requires_grad=True)
    rows = moeroute.permute(tokens, plan, weights, backend=backend)
    assert rows.shape == (0, hidden)
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    assert_same_bits(output.detach(), torch.zeros(num_tokens, hidden))
    (output.sum() + rows.sum()).backward()
    assert_same_bits(tokens.grad, torch.zeros(num_tokens, hidden))
    assert_same_bits(weights.grad, torch.zeros(num_tokens, topk))


def test_large_offsets() -> None:
    """B01, B05: rows times hidden size above 2^31 elements; the last rows are right, both ways."""
    backend = "cpu"
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # 4 GiB: the poison would take longer than the test
    hidden, num_tokens = 4096, 2**19 + 3  # int8: 2 GiB each
    assert hidden * num_tokens > 2**31
    plan = moeroute.plan_from_row_of_slot(torch.arange(num_tokens - 1, -1, -1), num_tokens, num_tokens)
    tokens = torch.zeros(num_tokens, hidden, dtype=torch.int8)
    tokens[0], tokens[-1], tokens[-2] = 1, 2, 3
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert (rows[0] == 2).all()
    assert (rows[1] == 3).all()
    assert (rows[-1] == 1).all()
    del tokens
    # bfloat16 gradients 2^30 elements apart, of which the ends are looked at; B05 has them in one block
    grads = torch.zeros(2**31 + 2**12, dtype=torch.bfloat16).as_strided((3, 2048), (2**30, 1))
    plan = moeroute.plan_from_row_of_slot(torch.tensor([[2, 0]]), 1, 3)
    grads[0], grads[2] = 1.0, 2.0
    assert_same_bits(moeroute.permute_backward(grads, plan, backend=backend), torch.full((1, 2048), 3.0).bfloat16())


def test_outputs_can_be_changed_in_place(backend: str) -> None:
    """Large enough for recycled memory: no output is a view."""
    plan = random_plan(2, 600, 2, 4, empty=0.0)
    tokens = torch.ones(600, 1000, requires_grad=True)
    weights = torch.ones(600, 2, requires_grad=True)
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert not rows._is_view()
    rows *= 2
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    output += 1
    picked = moeroute.permute_weights(weights, plan, backend=backend)
    picked += 1
    (output.sum() + picked.sum()).backward()
    assert tokens.grad is not None
    assert weights.grad is not None
    assert bool((tokens.grad == 4).all())
    assert bool((weights.grad == 2001).all())


def test_inputs_are_unchanged(backend: str) -> None:
    plan = random_plan(2, 6, 2, 4)
    tokens, weights = torch.randn(6, 20), torch.rand(6, 2)
    rows = torch.randn(plan.num_rows, 20)
    before = [t.clone() for t in (tokens, weights, rows, plan.row_of_slot, plan.slot_of_row)]
    moeroute.permute(tokens, plan, weights, backend=backend)
    moeroute.unpermute(rows, plan, weights, backend=backend)
    moeroute.unpermute_backward(tokens, rows, plan, weights, backend=backend)
    assert_same_bits([tokens, weights, rows, plan.row_of_slot, plan.slot_of_row], before)


# ---------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("kind", ("ids", "map", "table", "tokens"))
def test_gradcheck(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    if kind == "ids":
        plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 2], [2, -1], [1, 0]]), 3, align=2)
        weights = torch.rand(3, 2, dtype=torch.float64, generator=generator)
    elif kind == "tokens":
        plan = moeroute.plan_from_token_ids(torch.tensor([2, 0, 0, -1, 1, 2]), 3)
        weights = torch.rand(plan.num_slots, dtype=torch.float64, generator=generator)
    else:
        chosen = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
        plan = moeroute.plan_from_routing_map(chosen, topk=2 if kind == "table" else None)
        weights = torch.rand(3, 3, dtype=torch.float64, generator=generator)
    weights = (weights + 0.1).requires_grad_()
    tokens = torch.randn(3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    rows = torch.randn(plan.num_rows, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    slots = torch.rand(plan.num_slots, dtype=torch.float64, generator=generator, requires_grad=True)
    along = torch.rand(plan.num_rows, dtype=torch.float64, generator=generator, requires_grad=True)
    functions: tuple[tuple[Callable[..., Any], tuple[Tensor, ...]], ...] = (
        (lambda t: moeroute.permute(t, plan), (tokens,)),
        (lambda t, w: moeroute.permute(t, plan, w), (tokens, weights)),
        (lambda r: moeroute.unpermute(r, plan), (rows,)),
        (lambda r, w: moeroute.unpermute(r, plan, w), (rows, weights)),
        (lambda r, w: moeroute.permute_backward(r, plan, w), (rows, weights)),
        (lambda t, r, w: moeroute.unpermute_backward(t, r, plan, w), (tokens, rows, weights)),
        (lambda t, w: moeroute.spread(t, plan, w), (tokens, slots)),
        (lambda r, w: moeroute.combine(r, plan, w), (rows, slots)),
        (lambda r, t: moeroute.row_dots(r, t, plan), (rows, tokens)),
        (lambda w: moeroute.permute_weights(w, plan), (weights,)),
        (lambda g: moeroute.permute_weights_backward(g, plan), (along,)),
    )
    for function, inputs in functions:
        torch.autograd.gradcheck(function, inputs)
        torch.autograd.gradgradcheck(function, inputs)


def test_third_order() -> None:
    """The set is closed, so orders do not end; checked on a cubic of the weights."""
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1]]), 2)
    rows = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    weights = torch.tensor([[1.0, 3.0]], dtype=torch.float64, requires_grad=True)
    value = (moeroute.unpermute(rows, plan, weights) ** 3).sum()
    for expected in ([[147.0, 294.0]], [[42.0 + 84.0, 84.0 + 168.0]], [[6.0 * 9, 12.0 * 9]]):
        (grad,) = torch.autograd.grad(value, weights, create_graph=True)
        assert grad.tolist() == expected
        value = grad.sum()


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=2)))
def test_gradients_only_where_needed_and_rows_kept_only_for_weights(backend: str, needs: tuple[bool, bool]) -> None:
    """B71, B91, B130: what is saved, and for whom."""
    plan = random_plan(1, 8, 2, 4, empty=0.0)
    rows = torch.randn(16, 32, requires_grad=needs[0])
    weights = torch.rand(8, 2, requires_grad=needs[1])
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = moeroute.unpermute(rows, plan, weights, backend=backend)
    assert output.requires_grad == any(needs)
    assert (16 * 32 in saved) == needs[1]
    if any(needs):
        output.sum().backward()
    assert (rows.grad is not None) == needs[0]
    assert (weights.grad is not None) == needs[1]
    saved.clear()
    tokens = torch.randn(8, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        moeroute.permute(tokens, plan, backend=backend)
    assert 8 * 32 not in saved


# ---------------------------------------------------------------------------- slots that nobody owns

# Slots 0 and 1 lie before the first offset, 6 and 7 behind the last: three tokens of a larger table.
SLICE_OFFSETS, SLICE_ROWS, SLICE_SLOTS = [2, 4, 4, 6], [0, 5, 3, 1, -1, 2, 4, 6], [0, 3, 5, 2, 6, 1, 7]
OWNED = slice(2, 6)


def slice_of_a_plan(with_experts: bool) -> tuple[moeroute.RoutingPlan, moeroute.RoutingPlan]:
    """A plan with slots that no token owns, and the one that has no such slots."""

    def plan(rows: list[int], slots: list[int], offsets: list[int], experts: list[int]) -> moeroute.RoutingPlan:
        return moeroute.RoutingPlan(
            row_of_slot=torch.tensor(rows, dtype=torch.int32),
            slot_of_row=torch.tensor(slots, dtype=torch.int32),
            num_tokens=3,
            num_rows=7,
            num_experts=4 if with_experts else None,
            slot_offsets=torch.tensor(offsets, dtype=torch.int32),
            expert_of_slot=torch.tensor(experts, dtype=torch.int32) if with_experts else None,
        )

    experts = [3, 1, 0, 2, 1, 3, 0, 2]
    cut_slots = [s - 2 if 2 <= s < 6 else -1 for s in SLICE_SLOTS]
    whole = plan(SLICE_ROWS, SLICE_SLOTS, SLICE_OFFSETS, experts)
    return whole, plan(SLICE_ROWS[OWNED], cut_slots, [0, 2, 2, 4], experts[OWNED])


def test_tokens_of_a_slice() -> None:
    plan, _ = slice_of_a_plan(False)
    assert plan.token_of_slot.tolist() == [-1, -1, 0, 0, 2, 2, -1, -1]
    assert plan.token_of_row.tolist() == [-1, 0, 2, 0, -1, -1, -1]
    without_tokens = moeroute.RoutingPlan(
        row_of_slot=plan.row_of_slot, slot_of_row=plan.slot_of_row, num_tokens=0, num_rows=7,
        slot_offsets=torch.tensor([3], dtype=torch.int32),
    )  # fmt: skip
    assert without_tokens.token_of_slot.tolist() == [-1] * 8


@pytest.mark.parametrize("with_experts", (False, True))
def test_slots_that_no_token_owns_belong_to_nobody(with_experts: bool, backend: str) -> None:
    """Every operator does what it does where these slots do not exist; what they have themselves is 0."""
    plan, cut = slice_of_a_plan(with_experts)
    x, rows, slots = torch.randn(3, 70), torch.randn(7, 70), torch.randn(8)
    weights, cut_weights = (torch.randn(3, 4),) * 2 if with_experts else (slots, slots[OWNED])

    def widened(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (2, 2))

    def same(function: Callable[..., Any], *pairs: tuple[Any, Any], by_slot: bool = False, **options: Any) -> Any:
        found = function(*(whole for whole, _ in pairs), backend=backend, **options)
        expected = function(*(cut for _, cut in pairs), backend=backend, **options)
        assert_same_bits(found, widened(expected) if by_slot else expected, function.__name__)
        return found

    plans = plan, cut
    given = slots, slots[OWNED]
    pair = weights, cut_weights
    same(moeroute.spread, (x, x), plans)
    same(moeroute.spread, (x, x), plans, given)
    same(moeroute.combine, (rows, rows), plans)
    same(moeroute.combine, (rows, rows), plans, given)
    same(moeroute.row_dots, (rows, rows), (x, x), plans, by_slot=True)
    same(moeroute.slot_weights, pair, plans, by_slot=True)
    same(moeroute.permute, (x, x), plans, pair)
    same(moeroute.unpermute, (rows, rows), plans, pair)
    same(moeroute.permute_backward, (rows, rows), plans, pair)
    same(moeroute.permute_weights, pair, plans)
    grad = torch.randn(7)
    same(moeroute.permute_weights_backward, (grad, grad), plans, by_slot=not with_experts)
    found = moeroute.unpermute_backward(x, rows, plan, weights, backend=backend)
    expected = moeroute.unpermute_backward(x, rows, cut, cut_weights, backend=backend)
    assert_same_bits(found[0], expected[0])
    assert_same_bits(found[1], expected[1] if with_experts else widened(present(expected[1])))
    # Rows of ones, weighted: the weight of each row. Through autograd too.
    leaf = weights.clone().requires_grad_()
    permuted = moeroute.permute_weights(leaf, plan, backend=backend)
    assert_same_bits(permuted, moeroute.permute(torch.ones(3, 1), plan, weights, backend=backend)[:, 0])
    permuted.backward(grad)
    assert_same_bits(leaf.grad, moeroute.permute_weights_backward(grad, plan, backend=backend))


# ---------------------------------------------------------------------------- out=


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float64), ids=str)
def test_out(backend: str, dtype: torch.dtype) -> None:
    if dtype is torch.float64:
        backend = "reference"
    plan = random_plan(3, 6, 2, 4)
    x, rows = torch.randn(6, 40).to(dtype), torch.randn(plan.num_rows, 40).to(dtype)
    weights = torch.rand(6, 2, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    slots = weights.flatten()

    def buffers(*shape: int) -> list[Tensor]:
        """Contiguous, rows apart, and columns apart."""
        return [
            torch.empty(shape, dtype=dtype),
            torch.empty(shape[0], shape[1] + 5, dtype=dtype)[:, 3:-2],
            torch.empty(shape[1], shape[0], dtype=dtype).t(),
        ]

    for out in buffers(plan.num_rows, 40):
        assert moeroute.spread(x, plan, slots, out=out, backend=backend) is out
        assert_same_bits(out, moeroute.spread(x, plan, slots, backend=backend))
    for out in buffers(6, 40):
        assert moeroute.combine(rows, plan, slots, out=out, backend=backend) is out
        assert_same_bits(out, moeroute.combine(rows, plan, slots, backend=backend))
        assert moeroute.permute_backward(rows, plan, out=out, backend=backend) is out
        assert_same_bits(out, moeroute.permute_backward(rows, plan, backend=backend))
    for out in (torch.empty_like(slots), torch.empty(plan.num_slots, 2, dtype=slots.dtype)[:, 1]):
        moeroute.row_dots(rows, x, plan, dtype=slots.dtype, out=out, backend=backend)
        assert_same_bits(out, moeroute.row_dots(rows, x, plan, dtype=slots.dtype, backend=backend))
        moeroute.slot_weights(weights, plan, out=out, backend=backend)
        assert_same_bits(out, slots)
    expected = moeroute.unpermute_backward(x, rows, plan, weights, backend=backend)
    for out_rows in buffers(plan.num_rows, 40):
        for out_weights in (torch.empty_like(weights), torch.empty(2, 6, dtype=weights.dtype).t()):
            result = moeroute.unpermute_backward(x, rows, plan, weights, out=(out_rows, out_weights), backend=backend)
            assert result[0] is out_rows
            assert result[1] is out_weights
            assert_same_bits(result, expected)


def test_out_refuses_what_it_cannot_do() -> None:
    plan = random_plan(3, 6, 2, 4)
    x = torch.randn(6, 40)
    good = torch.empty(plan.num_rows, 40)
    with pytest.raises(ValueError, match=r"moeroute.spread: out must be of shape \[\d+, 40\]; got shape \[3, 40\]"):
        moeroute.spread(x, plan, out=good[:3])
    with pytest.raises(TypeError, match=r"out must be torch.float32; got torch.float64"):
        moeroute.spread(x, plan, out=good.double())
    with pytest.raises(ValueError, match=r"out must be a tensor whose elements do not overlap"):
        moeroute.spread(x, plan, out=torch.empty(1, 40).expand(plan.num_rows, 40))
    shared = torch.zeros(plan.num_rows + 6, 40)
    with pytest.raises(ValueError, match=r"out must be memory of its own"):
        moeroute.spread(shared[:6], plan, out=shared[5 : 5 + plan.num_rows])
    with pytest.raises(ValueError, match=r"out must be None where gradients are recorded"):
        moeroute.spread(x.requires_grad_(), plan, out=good)
    with torch.no_grad():
        moeroute.spread(x, plan, out=good)


# ---------------------------------------------------------------------------- bad input


PLAN_ARGUMENTS = (
    (lambda plan, t, r, w: moeroute.permute(t[0], plan), ValueError, "permute: tokens must be [T, H] with T = 6, as the plan; got shape [8]"),
    (lambda plan, t, r, w: moeroute.permute(t[:5], plan), ValueError, "permute: tokens must be [T, H] with T = 6, as the plan; got shape [5, 8]"),
    (lambda plan, t, r, w: moeroute.permute([1], plan), TypeError, "permute: tokens must be a torch.Tensor; got list"),  # type: ignore[arg-type]
    (lambda plan, t, r, w: moeroute.permute(t, None), TypeError, "permute: plan must be a moeroute.RoutingPlan; got NoneType"),  # type: ignore[arg-type]
    (lambda plan, t, r, w: moeroute.permute(t, plan, w[:, :1]), ValueError, "permute: weights must be [T, K] with T = 6 and K = 2, as the plan; got shape [6, 1]"),
    (lambda plan, t, r, w: moeroute.permute(t, plan, w.long()), TypeError, "permute: weights must be float16, bfloat16, float32 or float64; got torch.int64"),
    (lambda plan, t, r, w: moeroute.permute(t, plan, w.double()), TypeError, "permute: weights must be float64 with float64 tokens and only then; got torch.float64"),
    (lambda plan, t, r, w: moeroute.permute(t.long(), plan, w), TypeError, "permute: tokens must be floating with weights; got torch.int64"),
    (lambda plan, t, r, w: moeroute.unpermute(r[1:], plan), ValueError, "unpermute: rows must be [R, H] with R = 12, as the plan; got shape [11, 8]"),
    (lambda plan, t, r, w: moeroute.unpermute(r.long(), plan), TypeError, "unpermute: rows must be float16, bfloat16, float32 or float64; got torch.int64"),
    (lambda plan, t, r, w: moeroute.unpermute(r, plan, w.flatten()), ValueError, "unpermute: weights must be [T, K] with T = 6 and K = 2, as the plan; got shape [12]"),
    (lambda plan, t, r, w: moeroute.combine(r, plan, w), ValueError, "combine: weights must be [S] with S = 12, as the plan; got shape [6, 2]"),
    (lambda plan, t, r, w: moeroute.combine(r, plan, init=t[:, :3]), ValueError, "combine: init must be as wide as rows, with H = 8; got shape [6, 3]"),
    (lambda plan, t, r, w: moeroute.combine(r, plan, init=t.half()), TypeError, "combine: init must be torch.float32, as rows; got torch.float16"),
    (lambda plan, t, r, w: moeroute.combine(r, plan, bias=t), ValueError, "combine: bias must be None, as the plan has no expert_of_slot; got [6, 8]"),
    (lambda plan, t, r, w: moeroute.row_dots(r, t[:, :4], plan), ValueError, "row_dots: x must be as wide as rows, with H = 8; got shape [6, 4]"),
    (lambda plan, t, r, w: moeroute.row_dots(r, t.half(), plan), TypeError, "row_dots: x must be torch.float32, as rows; got torch.float16"),
    (lambda plan, t, r, w: moeroute.row_dots(r, t, plan, dtype=torch.int32), TypeError, "row_dots: dtype must be one of torch.float16, torch.bfloat16, torch.float32, torch.float64; got torch.int32"),
    (lambda plan, t, r, w: moeroute.unpermute_backward(t, r[:3], plan, w), ValueError, "unpermute_backward: rows must be [R, H] with R = 12, as the plan; got shape [3, 8]"),
    (lambda plan, t, r, w: moeroute.unpermute_backward(t, None, plan, w), TypeError, "unpermute_backward: rows must be a torch.Tensor; got NoneType"),
    (lambda plan, t, r, w: moeroute.unpermute_backward(t, r.half(), plan, w), TypeError, "unpermute_backward: rows must be torch.float32, as grad_tokens; got torch.float16"),
    (lambda plan, t, r, w: moeroute.permute_backward(t, plan), ValueError, "permute_backward: grad_rows must be [R, H] with R = 12, as the plan; got shape [6, 8]"),
    (lambda plan, t, r, w: moeroute.permute_weights(w[:5], plan), ValueError, "permute_weights: weights must be [T, K] with T = 6 and K = 2, as the plan; got shape [5, 2]"),
    (lambda plan, t, r, w: moeroute.permute_weights_backward(w, plan), ValueError, "permute_weights_backward: grad must be [R] with R = 12, as the plan; got shape [6, 2]"),
    (lambda plan, t, r, w: moeroute.slot_weights(3.0, plan), TypeError, "slot_weights: weights must be a torch.Tensor; got float"),  # type: ignore[arg-type]
    (lambda plan, t, r, w: moeroute.permute(t.to("meta"), plan), ValueError, "permute: tokens must be on cpu, as the plan; got meta"),
    (lambda plan, t, r, w: moeroute.permute(t, plan, w.to("meta")), ValueError, "permute: weights must be on cpu, as the plan; got meta"),
    (lambda plan, t, r, w: moeroute.permute(t, plan, backend="cuda"), ValueError, "permute: backend must be one of 'reference', 'cpu', 'triton'; got 'cuda'"),
    (lambda plan, t, r, w: moeroute.permute(t.double(), plan, backend="cpu"), ValueError, "permute: backend must be 'reference' for torch.float64; got 'cpu'"),
)  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), PLAN_ARGUMENTS, ids=[case[2][:60] for case in PLAN_ARGUMENTS])
def test_bad_input(call: Callable[..., Any], error: type[Exception], message: str) -> None:
    plan = random_plan(3, 6, 2, 4, empty=0.0)
    tokens, rows, weights = torch.ones(6, 8), torch.ones(12, 8), torch.ones(6, 2)
    with pytest.raises(error) as raised:
        call(plan, tokens, rows, weights)
    assert str(raised.value) == f"moeroute.{message}"


@pytest.mark.parametrize("index", (-1, -(2**31), 12, 2**31 - 1, 10**6))
def test_no_index_of_a_hand_made_plan_reads_out_of_bounds(backend: str, index: int) -> None:
    """B121: the slot is treated as one without a row."""
    row_of_slot = torch.arange(12, dtype=torch.int32)
    row_of_slot[3] = index
    slot_of_row = torch.arange(12, dtype=torch.int32)
    slot_of_row[5] = index
    plan = moeroute.RoutingPlan(row_of_slot, slot_of_row, num_tokens=6, num_rows=12, topk=2)
    rows = torch.ones(12, 8)
    expected = [2.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert moeroute.unpermute(rows, plan, backend=backend)[:, 0].tolist() == expected
    permuted = moeroute.permute(torch.ones(6, 8), plan, backend=backend)
    assert permuted[:, 0].tolist() == [1, 1, 1, 0, 1, 0] + [1] * 6
    dots = moeroute.row_dots(rows, torch.ones(6, 8), plan, backend=backend)
    assert dots.tolist() == [8, 8, 8, 0] + [8] * 8


@pytest.mark.parametrize("given_out", (False, True))
def test_lazy_negation_and_conjugation_are_seen(backend: str, given_out: bool) -> None:
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 2)
    conjugated = torch.tensor([[1 + 2j], [3 + 4j]]).conj()
    negated = torch.complex(torch.randn(4, 3), torch.randn(4, 3)).conj().imag
    assert negated.is_neg()
    weights = torch._neg_view(torch.rand(2, 2))
    out_c = torch.empty(4, 1, dtype=conjugated.dtype) if given_out else None
    out = torch.empty(2, 3) if given_out else None
    spread = moeroute.spread(conjugated, plan, out=out_c, backend=backend)
    assert spread.tolist() == conjugated.resolve_conj()[plan.token_of_row.long()].tolist()
    combined = moeroute.combine(negated, plan, weights.flatten(), out=out, backend=backend)
    assert_same_bits(combined, moeroute.combine(negated.clone(), plan, weights.clone().flatten(), backend=backend))
    picked = moeroute.permute_weights(weights, plan, backend=backend)
    assert_same_bits(picked, moeroute.permute_weights(weights.clone(), plan, backend=backend))
    with pytest.raises(ValueError, match="out must be a tensor without lazy conjugation or negation"):
        moeroute.spread(conjugated, plan, out=torch.empty(4, 1, dtype=conjugated.dtype).conj(), backend=backend)


def test_out_is_not_the_plans_own_and_records_nothing() -> None:
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 2)
    x, rows, weights = torch.randn(2, 3), torch.randn(4, 3), torch.rand(2, 2)
    before = plan.slot_of_row.clone()
    with pytest.raises(ValueError, match="out must be memory of its own"):
        moeroute.spread(torch.ones(2, 1, dtype=torch.int32), plan, out=plan.slot_of_row.view(4, 1))
    assert_same_bits(plan.slot_of_row, before)
    leaf = torch.empty(2, 3, requires_grad=True)
    recorded = r"out must be None where gradients are recorded"
    with pytest.raises(ValueError, match=recorded):
        moeroute.combine(rows, plan, out=leaf)
    with pytest.raises(ValueError, match=recorded):
        moeroute.combine(rows, plan, init=x, out=leaf)
    with pytest.raises(ValueError, match=recorded):
        moeroute.unpermute_backward(x.requires_grad_(), rows, plan, weights, out=(None, torch.empty(2, 2)))  # type: ignore[arg-type]
    x = x.detach()
    leaf = x.clone().requires_grad_()
    assert moeroute.unpermute_backward(leaf, rows, plan, weights, out=(None, None))[0].requires_grad  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out must be \(tensor, None\) without weights"):
        moeroute.unpermute_backward(x, None, plan, out=(torch.empty(4, 3), torch.empty(2, 2)))
    with pytest.raises(TypeError, match="out must be a pair of tensors or None; got int"):
        moeroute.unpermute_backward(x, rows, plan, weights, out=3)  # type: ignore[arg-type]
    untouched = torch.full((4, 3), 7.0)
    with pytest.raises(TypeError, match="accumulate must be a bool; got NoneType"):
        moeroute.unpermute_backward(x, rows, plan, weights, accumulate=None, out=(untouched, torch.empty(2, 2)))  # type: ignore[arg-type]
    assert bool((untouched == 7).all())
    with pytest.raises(ValueError, match=r"init must be a tensor or a pair of them; got a tuple of 3"):
        moeroute.combine(rows, plan, init=(x, x, x))  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ("init", "out"))
def test_what_has_no_registered_operator_says_no_under_transforms(argument: str) -> None:
    """Never a silent zero tangent, never a kernel on a tensor without memory."""
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 2)
    rows, x = torch.randn(4, 3), torch.randn(2, 3)

    def call(rows: Tensor, x: Tensor) -> Tensor:
        given: dict[str, Any] = {argument: x}
        return moeroute.combine(rows, plan, **given)

    refused = rf"{argument} must be None under torch.compile, torch.jit.trace, torch.func, forward mode"
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match=refused):
        call(torch.autograd.forward_ad.make_dual(rows, rows), x)
    with pytest.raises(ValueError, match=refused):
        torch.func.jvp(lambda r: call(r, x), (rows,), (rows,))
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(ValueError):
        call(mode.from_tensor(rows), mode.from_tensor(x))


@pytest.mark.parametrize("offsets", ((0, 9, 4), (4, 2, 0), (0, 2, 2**31 - 1), (-5, 2, 4)))
def test_no_offset_of_a_hand_made_plan_reads_out_of_bounds(backend: str, offsets: tuple[int, ...]) -> None:
    def index(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    plan = moeroute.RoutingPlan(
        index(0, 7, -3, 2),
        index(0, 9, 3, -8),
        2,
        4,
        num_experts=2,
        slot_offsets=index(*offsets),
        expert_of_slot=index(0, 5, -7, 1),
    )
    assert moeroute.unpermute(torch.ones(4, 3), plan, torch.ones(2, 2), backend=backend).shape == (2, 3)
    assert moeroute.permute(torch.ones(2, 3), plan, backend=backend).shape == (4, 3)


@pytest.mark.parametrize("kind", ("table", "tokens"))
def test_derivatives_where_the_last_slot_is_stored(kind: str) -> None:
    """accumulate=False with repeated experts: only the stored slot's row gets a gradient, to any order."""
    if kind == "table":
        experts = torch.tensor([[1, 1, 0], [2, 2, 2], [0, -1, 0]])
        plan = moeroute.plan_from_row_of_slot(torch.tensor([4, 2, 0, 1, -1, 3, 5, 6, 7]), 3, 8, expert_of_slot=experts)
    else:
        plan = moeroute.plan_from_token_ids(torch.tensor([1, 0, 1, 2, 1, 0]), 3, num_experts=2)
    experts_of_slot, rows = plan.expert_of_slot, plan.row_of_slot.tolist()
    assert experts_of_slot is not None
    grad = torch.randn(plan.num_rows, dtype=torch.float64, requires_grad=True)

    def stored(grad: Tensor) -> Tensor:
        return moeroute.permute_weights_backward(grad, plan, num_experts=plan.num_experts or 3, accumulate=False)

    expected = torch.zeros_like(grad)
    upstream = torch.randn_like(stored(grad))
    last = {}
    for slot, (token, expert) in enumerate(zip(plan.token_of_slot.tolist(), experts_of_slot.tolist(), strict=True)):
        if expert >= 0:
            last[token, expert] = rows[slot]
    for (token, expert), row in last.items():
        if row >= 0:
            expected[row] = upstream[token, expert]
    (found,) = torch.autograd.grad(stored(grad), grad, upstream)
    torch.testing.assert_close(found, expected)
    assert torch.autograd.gradcheck(stored, grad, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(stored, grad)
    w = torch.rand(3, plan.num_experts or 3, dtype=torch.float64)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(plan.num_rows, 2, dtype=torch.float64, requires_grad=True)

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(present(grad) for grad in moeroute.unpermute_backward(x, y, plan, w, accumulate=False))

    assert torch.autograd.gradcheck(both, (x, y))


def test_odd_plans_and_backends_are_refused() -> None:
    ids = torch.tensor([[0, 1], [1, 0]])
    plan = moeroute.plan_from_expert_ids(ids, 2)
    weights = torch.ones(2, 2)
    for call in (
        lambda: moeroute.slot_weights(weights, plan, backend="nonsense"),
        lambda: moeroute.permute_weights(weights, plan, backend="nonsense"),
        lambda: moeroute.permute_weights_backward(torch.ones(4), plan, backend="nonsense"),
    ):
        with pytest.raises(ValueError, match=r"backend must be one of 'reference', 'cpu', .*; got 'nonsense'"):
            call()
    with pytest.raises(ValueError, match=r"slot_weights: backend must be 'reference' for torch\.float64"):
        moeroute.slot_weights(weights.double(), plan, backend="cpu")
    with pytest.raises(ValueError, match="num_experts must be 2, as the plan, or None; got 3"):
        moeroute.permute_weights_backward(torch.ones(4), plan, num_experts=3)
    routed = moeroute.plan_from_routing_map(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"bias must be \[E, H\] with E = 2, as the plan; got shape \[3, 5\]"):
        moeroute.combine(torch.ones(4, 5), routed, bias=torch.ones(3, 5))
    with pytest.raises(TypeError, match=r"row_dots: dtype must be one of .*; got str"):
        moeroute.row_dots(torch.ones(4, 5).double(), torch.ones(2, 5).double(), plan, dtype="float32")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will give up quantized tensors
        scaled = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8)
    quantized: tuple[Callable[[], Any], ...] = (
        lambda: moeroute.permute(scaled, plan),
        lambda: moeroute.spread(scaled, plan),
        lambda: moeroute.unpermute_backward(scaled, None, plan),
    )
    for refused in quantized:
        with pytest.raises(TypeError, match="must be of a dtype that is not quantized"):
            refused()
