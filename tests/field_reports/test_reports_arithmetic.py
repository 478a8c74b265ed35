"""Reports about the order and precision of sums, and gradients."""

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute.dispatch import Backend
from moeroute.testing import assert_close_to_exact, assert_same_bits
from small_cases import leaf, plan_of, whole_numbers

# ---------------------------------------------------------------------------- order and arithmetic


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_b07_the_gradient_sums_the_rows_of_a_token(backend: Backend, dtype: torch.dtype) -> None:
    """Gradients were far off, in float32 as in bfloat16: another order of slots, not rounding."""
    if dtype is torch.float64:
        backend = "reference"
    plan = plan_of([[2, 0], [1, 0]], 3)  # rows: e0 of t0, e0 of t1, e1 of t1, e2 of t0
    tokens = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    moeroute.permute(tokens, plan, backend=backend).backward(torch.tensor([[1], [2], [4], [8]], dtype=dtype))
    assert_same_bits(tokens.grad, torch.tensor([[9], [6]], dtype=dtype))
    # Eight numbers of near exponents: their float32 sum is exact, and one rounding follows.
    eight = (torch.rand(8, 500, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    one_token = plan_of([list(range(8))], 8)
    total = moeroute.permute_backward(eight, one_token, backend=backend)
    if dtype in (torch.bfloat16, torch.float16):
        assert_same_bits(total, eight.double().sum(0, keepdim=True).to(dtype))
    else:
        assert_close_to_exact(total, eight.double().sum(0, keepdim=True))


def test_b38_eight_equal_experts_are_one(backend: Backend) -> None:
    """Summed in the low precision, equal experts did not equal the dense layer."""
    tokens = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    plan = plan_of([list(range(8))] * 16, 8, backend=backend)
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert_same_bits(moeroute.unpermute(rows, plan, torch.full((16, 8), 0.125), backend=backend), tokens)


def test_b58_weights_are_applied_once(backend: Backend) -> None:
    """Of two ways to combine, one weighs the rows itself: results were weighted twice or never."""
    plan = plan_of([[0, 1]], 2, backend=backend)
    results = []
    for before in (False, True):
        rows, weights = leaf([[1.0], [10.0]]), leaf([[0.25, 0.75]])
        if before:
            weighted = rows * moeroute.permute_weights(weights, plan, backend=backend)[:, None]
            output = moeroute.unpermute(weighted, plan, backend=backend)
        else:
            output = moeroute.unpermute(rows, plan, weights, backend=backend)
        assert output.item() == 7.75
        output.sum().backward()
        results.append((rows.grad, weights.grad))
    assert_same_bits(results[0], results[1])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_b94_three_ways_through_the_experts(backend: Backend, dtype: torch.dtype) -> None:
    """Two dispatchers gave different losses, and nobody compared them."""
    if dtype is torch.float64:
        backend = "reference"
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(64, 8, generator=generator).topk(4).indices
    start = torch.randn(64, 32, generator=generator, dtype=dtype)
    share = torch.rand(64, 4, generator=generator, dtype=dtype)

    def outcome(way: str) -> tuple[Tensor, ...]:
        tokens, weights = start.clone().requires_grad_(), share.clone().requires_grad_()
        if way == "map":
            dense = torch.zeros(64, 8, dtype=dtype).scatter(1, ids, weights)
            plan = moeroute.plan_from_routing_map(dense.detach() > 0, backend=backend)
            rows = moeroute.permute(tokens, plan, backend=backend).tanh()
            output = moeroute.unpermute(rows, plan, dense, backend=backend)
        else:
            plan = moeroute.plan_from_expert_ids(ids, 8, backend=backend)
            rows = moeroute.permute(tokens, plan, backend=backend).tanh()
            if way == "after":
                output = moeroute.unpermute(rows, plan, weights, backend=backend)
            else:
                rows = rows * moeroute.permute_weights(weights, plan, backend=backend)[:, None]
                output = moeroute.unpermute(rows, plan, backend=backend)
        output.square().sum().backward()
        assert tokens.grad is not None
        assert weights.grad is not None
        return output.detach(), tokens.grad, weights.grad

    exact = 1e-12 if dtype is torch.float64 else 1e-6
    after, before, by_map = (outcome(way) for way in ("after", "before", "map"))
    assert_same_bits(before[0], after[0])
    for other in (before, by_map):
        for got, wanted in zip(other, after, strict=True):
            torch.testing.assert_close(got, wanted, rtol=exact, atol=exact * float(wanted.abs().max()))


def test_b113_small_values_are_compared_as_strictly_as_large_ones(subtests: pytest.Subtests, backend: Backend) -> None:
    """With values of 1e-5 and a tolerance of 1e-2 a wrong kernel passed."""
    tokens = (torch.arange(40)[:, None] * 128 + torch.arange(128)) % 251
    plan = moeroute.plan_from_expert_ids(torch.arange(120).reshape(40, 3) * 7 % 11, 11, backend=backend)
    index = plan.token_of_row.long()
    for dtype in (torch.int32, torch.float32, torch.bfloat16):
        with subtests.test(dtype=dtype):
            moved = moeroute.permute(tokens.to(dtype), plan, backend=backend)
            assert_same_bits(moved, tokens.to(dtype)[index])
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e-5):
        with subtests.test(scale=scale):
            rows = torch.randn(120, 128, generator=generator) * scale
            weights = torch.rand(40, 3, generator=generator)
            terms = rows[plan.row_of_slot.long()].reshape(40, 3, 128).double() * weights.double()[..., None]
            error = (moeroute.unpermute(rows, plan, weights, backend=backend).double() - terms.sum(1)).abs()
            assert bool((error <= 3 * 2.0**-23 * terms.abs().sum(1)).all())


def test_b140_no_weights_does_not_mean_one_expert(backend: Backend) -> None:
    """Without weights the number of experts per token was taken to be 1, and four rows came back."""
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])  # e0: t0, t1; e1: t0, t1
    plan = moeroute.plan_from_row_of_slot(torch.tensor([0, 2, 1, 3]), 2, 4, backend=backend)
    assert moeroute.unpermute(rows, plan, backend=backend).tolist() == [[5], [10]]
    plan = moeroute.plan_from_routing_map(torch.ones(2, 2, dtype=torch.bool), backend=backend)
    assert moeroute.unpermute(rows, plan, backend=backend).tolist() == [[5], [10]]
    with pytest.raises(TypeError, match="num_tokens"):
        moeroute.plan_from_row_of_slot(torch.tensor([0, 2, 1, 3]))  # type: ignore[call-arg]


def test_b142_the_gradient_of_permute_fifty_times(backend: Backend) -> None:
    """Atomic additions came in another order each time."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(512, 16, generator=generator).topk(8).indices
    plan = moeroute.plan_from_expert_ids(ids, 16, backend=backend)
    grad = torch.randn(4096, 512, generator=generator).bfloat16()
    first = moeroute.permute_backward(grad, plan, backend=backend)
    for _ in range(49 if backend == "cpu" else 4):  # the others are slow, and run in one thread or have no atomics
        assert_same_bits(moeroute.permute_backward(grad, plan, backend=backend), first)


def test_b157_weights_keep_their_precision_beside_bfloat16_rows(backend: Backend) -> None:
    """The weights were narrowed to the rows' dtype before they were used."""
    plan = plan_of([[0, 1]], 2, backend=backend)
    rows = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16)
    output = moeroute.unpermute(rows, plan, torch.tensor([[0.5009765625, 0.5]]), backend=backend)
    assert output.item() == 0.0009765625


# ---------------------------------------------------------------------------- gradients


def test_b46_an_expanded_gradient(backend: Backend) -> None:
    """sum() hands back one element of stride 0, and the kernel read on behind it."""
    plan = plan_of([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]], 3, backend=backend)
    data, share = whole_numbers(12, 8, seed=0), torch.rand(6, 2, generator=torch.Generator().manual_seed(0))
    results = []
    for expanded in (True, False):
        rows, weights = data.clone().requires_grad_(), share.clone().requires_grad_()
        output = moeroute.unpermute(rows, plan, weights, backend=backend)
        (output.sum() if expanded else (output * torch.ones(6, 8)).sum()).backward()
        results.append((rows.grad, weights.grad))
    assert_same_bits(results[0], results[1])
    at = plan.row_of_slot.long()
    assert_same_bits(results[0][1], data.sum(1)[at].reshape(6, 2))
    of_row = share.flatten()[plan.slot_of_row.long()]
    assert_same_bits(results[0][0], of_row[:, None].expand(12, 8).contiguous())


def test_b49_the_gradient_of_the_weights_is_there(backend: Backend) -> None:
    """It was None, and a loose tolerance let it pass."""
    plan = plan_of([[0, 1], [0, 1]], 2, backend=backend)  # rows: y00, y10, y01, y11
    rows = torch.tensor([[1.0, 0, 0], [0, 0, 3.0], [0, 2.0, 0], [1.0, 1.0, 1.0]], requires_grad=True)
    weights = torch.ones(2, 2, requires_grad=True)
    moeroute.unpermute(rows, plan, weights, backend=backend).backward(torch.tensor([[1.0, 1, 1], [2, 0, 1]]))
    assert_same_bits(weights.grad, torch.tensor([[1.0, 2.0], [3.0, 3.0]]))


def test_b50_second_derivatives_with_a_weight_of_zero() -> None:
    """A gradient rebuilt by a division by the weight was right once, and wrong the second time or for 0."""
    plan = plan_of([[0, 1], [1, 0]], 2)
    tokens = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = leaf([[0.7, 0.0], [0.2, 0.5]], torch.float64)

    def loss(tokens: Tensor, weights: Tensor) -> Tensor:
        rows = moeroute.permute(tokens, plan).tanh()
        return moeroute.unpermute(rows, plan, weights).square().sum()

    torch.autograd.gradcheck(loss, (tokens, weights))
    torch.autograd.gradgradcheck(loss, (tokens, weights))


def test_b50_the_gradient_of_a_zero_weight(backend: Backend) -> None:
    plan = plan_of([[0, 1]], 2, backend=backend)
    rows, weights = leaf([[3.0, 4.0], [5.0, 6.0]]), leaf([[1.0, 0.0]])
    moeroute.unpermute(rows, plan, weights, backend=backend).backward(torch.tensor([[1.0, 10.0]]))
    assert_same_bits(weights.grad, torch.tensor([[43.0, 65.0]]))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_b155_the_derivative_of_a_gradient(backend: Backend, dtype: torch.dtype) -> None:
    """Kept intermediates made the second derivative silently wrong."""
    if dtype is torch.float64:
        backend = "reference"
    plan = plan_of([[0, 1], [1, 0], [0, 0]], 2, backend=backend)  # e0: s0, s3, s4, s5; e1: s1, s2
    rows = whole_numbers(6, 2, seed=1).to(dtype).requires_grad_()
    weights = whole_numbers(3, 2, seed=2).to(dtype).requires_grad_()
    seed, along = whole_numbers(3, 2, seed=3).to(dtype), whole_numbers(6, 2, seed=4).to(dtype)
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    (grad_rows,) = torch.autograd.grad(output, rows, seed, create_graph=True)
    # The row of slot s has the gradient w[s] * seed[token]: in w[s], along `along`, that is <along, seed>.
    (second,) = torch.autograd.grad(grad_rows, weights, along)
    of_slot = along[[0, 4, 5, 1, 2, 3]].reshape(3, 2, 2)
    assert_same_bits(second, (of_slot * seed[:, None]).sum(-1))


def test_b64_b67_autocast_is_left_to_the_caller(backend: Backend) -> None:
    """Under autocast float32 met bfloat16, or the scores were narrowed."""
    ids = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]]
    tokens = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.full((6, 2), 0.5, dtype=torch.bfloat16, requires_grad=True)
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    plain = moeroute.gating_topk(logits, 2, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = plan_of(ids, 4, backend=backend)
        assert_same_bits(moeroute.gating_topk(logits, 2, backend=backend), plain)
        rows = moeroute.permute(tokens, plan, backend=backend)
        assert rows.dtype is torch.float32
        output = moeroute.unpermute(rows, plan, weights, backend=backend)
        assert output.dtype is torch.float32
        half = moeroute.unpermute(rows.bfloat16(), plan, weights.float(), backend=backend)
        assert half.dtype is torch.bfloat16
        (output.sum() + half.float().sum()).backward()
    assert tokens.grad is not None
    assert weights.grad is not None
    assert (tokens.grad.dtype, weights.grad.dtype) == (torch.float32, torch.bfloat16)
