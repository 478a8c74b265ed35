"""The row operators on any shape, stride and dtype; their derivatives; slots that nobody owns."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute.dispatch import Backend
from moeroute.testing import assert_same_bits
from small_cases import present, random_plan

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HIDDEN = (1, 2, 3, 5, 7, 8, 9, 15, 17, 33, 64, 65, 96, 100, 127, 128, 129, 255, 256, 257, 1000, 1001)


# ---------------------------------------------------------------------------- shapes, strides, dtypes


@pytest.mark.parametrize("hidden", HIDDEN)
def test_any_hidden_size_and_alignment(subtests: pytest.Subtests, backend: Backend, hidden: int) -> None:
    """B73, B74: rows are bitwise those of index_select; guards around an `out` stay."""
    generator = torch.Generator().manual_seed(hidden)
    plan = random_plan(hidden, 9, 3, 4)
    index = plan.token_of_row.long()
    for dtype in FLOATS:
        with subtests.test(dtype=dtype):
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
def test_integer_rows(backend: Backend, dtype: torch.dtype) -> None:
    plan = random_plan(8, 6, 2, 3)
    tokens = torch.randint(2, (6, 33)).to(dtype)
    assert_same_bits(moeroute.permute(tokens, plan, backend=backend), tokens[plan.token_of_row.long()])


def layouts(matrix: Tensor) -> list[Tensor]:
    """The same values behind other strides."""
    wide = torch.zeros(matrix.shape[0] * 2, matrix.shape[1] + 3, dtype=matrix.dtype)
    wide[::2, 2:-1] = matrix
    return [matrix.t().contiguous().t(), wide[::2, 2:-1], torch.stack([matrix, matrix], dim=2)[:, :, 0]]


def test_strides_of_inputs(subtests: pytest.Subtests, backend: Backend) -> None:
    plan = random_plan(4, 6, 2, 3)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(6, 70, generator=generator)
    rows = torch.randn(plan.num_rows, 70, generator=generator)
    weights = torch.rand(6, 2, generator=generator)
    for x, y in zip(layouts(tokens), layouts(rows), strict=True):
        with subtests.test(strides=(x.stride(), y.stride())):
            w = weights.t().contiguous().t()
            assert_same_bits(
                moeroute.permute(x, plan, w, backend=backend), moeroute.permute(tokens, plan, weights, backend=backend)
            )
            assert_same_bits(
                moeroute.unpermute(y, plan, w, backend=backend),
                moeroute.unpermute(rows, plan, weights, backend=backend),
            )
            assert_same_bits(
                moeroute.unpermute_backward(x, y, plan, w, backend=backend),
                moeroute.unpermute_backward(tokens, rows, plan, weights, backend=backend),
            )
    row = torch.randn(1, 70, generator=generator)
    expanded, full = row.expand(6, 70), row.repeat(6, 1)
    assert_same_bits(moeroute.permute(expanded, plan, backend=backend), moeroute.permute(full, plan, backend=backend))


def test_strided_and_expanded_gradients(backend: Backend) -> None:
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
def test_empty_sizes(backend: Backend, shape: tuple[int, int, int]) -> None:
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
    backend: Backend = "cpu"
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


def test_outputs_can_be_changed_in_place(backend: Backend) -> None:
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


def test_inputs_are_unchanged(backend: Backend) -> None:
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
def test_gradients_only_where_needed_and_rows_kept_only_for_weights(backend: Backend, needs: tuple[bool, bool]) -> None:
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


@pytest.mark.parametrize("size", (8, 70_000))
def test_many_slots_and_no_tokens(size: int, backend: Backend) -> None:
    """So many that a kernel runs in threads."""
    plan = moeroute.plan_from_token_ids(torch.zeros(size, dtype=torch.int64), num_tokens=0, backend=backend)
    rows, x, weights = torch.ones(size, 3), torch.ones(0, 3), torch.ones(size)
    for given in (None, weights):
        assert_same_bits(moeroute.combine(rows, plan, given, backend=backend), x)
        assert_same_bits(moeroute.spread(x, plan, given, backend=backend), torch.zeros(size, 3))
    assert_same_bits(moeroute.row_dots(rows, x, plan, backend=backend), torch.zeros(size))
    found = moeroute.unpermute_backward(x, rows, plan, weights, backend=backend)
    assert_same_bits(found[0], torch.zeros(size, 3))
    assert_same_bits(found[1], torch.zeros(size))


@pytest.mark.parametrize("with_experts", (False, True))
def test_slots_that_no_token_owns_belong_to_nobody(with_experts: bool, backend: Backend) -> None:
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
