"""Reports about slots without an expert, nothing to do, padding and plans."""

from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute import memory
from moeroute.dispatch import Backend
from moeroute.nn import grouped_linear
from moeroute.testing import assert_same_bits
from small_cases import leaf, plan_of, whole_numbers

# ---------------------------------------------------------------------------- slots without an expert


def test_b02_minus_one_among_the_experts(backend: Backend) -> None:
    """-1 was sorted as the smallest number, and what came first was taken for real tokens."""
    plan = plan_of([[2, -1], [-1, 0], [3, 2]], 4, backend=backend)
    tokens, weights = leaf([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]), torch.ones(3, 2, requires_grad=True)
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert rows.tolist() == [[2, 2], [1, 1], [4, 4], [4, 4]]
    assert plan.tokens_per_expert is not None
    assert plan.tokens_per_expert.tolist() == [1, 0, 2, 1]
    assert moeroute.unpermute(rows, plan, backend=backend).tolist() == [[1, 1], [2, 2], [8, 8]]
    framed = torch.full((6, 2), torch.nan)  # what row -1 would be
    framed[1:5] = rows.detach()
    assert moeroute.unpermute(framed[1:5], plan, backend=backend).tolist() == [[1, 1], [2, 2], [8, 8]]
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    assert output.tolist() == [[1, 1], [2, 2], [8, 8]]
    output.sum().backward()
    assert_same_bits(weights.grad, torch.tensor([[2.0, 0.0], [0.0, 4.0], [8.0, 8.0]]))
    assert_same_bits(tokens.grad, torch.tensor([[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]))


def test_b04_tokens_with_two_one_and_no_experts(backend: Backend) -> None:
    """The number of experts per token was read off the first one."""
    routing_map = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.bool)
    plan = moeroute.plan_from_routing_map(routing_map, backend=backend)
    rows = moeroute.permute(torch.tensor([[10.0], [20.0], [30.0]]), plan, backend=backend)
    assert rows.flatten().tolist() == [10, 10, 20]
    assert_same_bits(moeroute.unpermute(rows, plan, backend=backend), torch.tensor([[20.0], [20.0], [0.0]]))


def test_b25_dead_rows_of_nan(backend: Backend) -> None:
    """The tail of the buffer was never written, and 0 * NaN got into outputs and gradients."""
    plan = plan_of([[0, 1], [1, -1], [0, 1]], 2, num_rows=8, backend=backend)  # e0: t0, t2; e1: t0, t1, t2
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], *[[torch.nan]] * 3], requires_grad=True)
    weights = leaf([[1.0, 0.5], [0.25, 0.0], [1.0, 2.0]])
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    assert output.flatten().tolist() == [1 + 2, 2, 2 + 32]
    output.backward(torch.tensor([[1.0], [10.0], [100.0]]))
    assert_same_bits(rows.grad, torch.tensor([[1.0], [100.0], [0.5], [2.5], [200.0], [0.0], [0.0], [0.0]]))
    assert_same_bits(weights.grad, torch.tensor([[1.0, 4.0], [80.0, 0.0], [200.0, 1600.0]]))


def test_b26_marked_slots_beside_rows_of_nan(backend: Backend) -> None:
    """The gradient of a slot's weight on another rank was <gradient, uninitialised row>."""
    plan = plan_of([[0, 2], [2, 1]], 2, num_rows=4, backend=backend)  # 2 marks an expert elsewhere
    rows = torch.tensor([[3.0, 1.0], [5.0, 1.0], [torch.nan] * 2, [torch.nan] * 2], requires_grad=True)
    weights = leaf([[0.5, 0.5], [0.5, 0.5]])
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    assert output.tolist() == [[1.5, 0.5], [2.5, 0.5]]
    output.sum().backward()
    assert_same_bits(weights.grad, torch.tensor([[4.0, 0.0], [0.0, 6.0]]))
    assert_same_bits(rows.grad, torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]))


def test_b29_ids_and_a_map_of_three_experts_of_five(backend: Backend) -> None:
    """Only numbers of experts that are powers of two compiled; slots of -1 must get no gradient."""
    weights = leaf([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [1.0, 1.0, 1.0]])
    plan = plan_of([[0, 4, -1], [2, 1, 3], [-1, -1, -1]], 5, backend=backend)
    rows = moeroute.permute_weights(weights, plan, backend=backend)
    assert_same_bits(rows.detach(), torch.tensor([0.5, 0.4, 0.4, 0.2, 0.3]))
    rows.sum().backward()
    assert_same_bits(weights.grad, torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    dense = torch.tensor([[0.5, 0, 0, 0, 0.3], [0, 0.4, 0.4, 0.2, 0], [0, 0, 0, 0, 0]], requires_grad=True)
    by_map = moeroute.plan_from_routing_map(dense > 0, backend=backend)
    assert_same_bits(moeroute.permute_weights(dense, by_map, backend=backend), rows)
    moeroute.permute_weights(dense, by_map, backend=backend).sum().backward()
    assert_same_bits(dense.grad, (dense > 0).float())


def test_b76_the_same_expert_twice(backend: Backend) -> None:
    """Scattered into a table of tokens and experts, one of the two weights was lost."""
    tokens, weights = torch.tensor([[10.0]]), leaf([[0.6, 0.4]])
    plan = plan_of([[1, 1]], 3, backend=backend)
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert rows.tolist() == [[10], [10]]
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    torch.testing.assert_close(output, torch.tensor([[10.0]]))
    output.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[10, 10]]
    dense = leaf([[0.0, 1.0, 0.0]])
    once = moeroute.plan_from_routing_map(dense > 0, backend=backend)
    output = moeroute.unpermute(moeroute.permute(tokens, once, backend=backend), once, dense, backend=backend)
    assert output.tolist() == [[10]]
    output.sum().backward()
    assert_same_bits(dense.grad, torch.tensor([[0.0, 10.0, 0.0]]))
    # A table of weights under two slots of one expert: each takes it, and their gradients add up.
    twice = moeroute.plan_from_row_of_slot(
        torch.tensor([[0, 1]]), 1, 2, expert_of_slot=torch.tensor([[1, 1]]), backend=backend
    )
    dense = leaf([[0.0, 0.5, 0.0]])
    output = moeroute.unpermute(rows, twice, dense, backend=backend)
    assert output.tolist() == [[10]]
    output.sum().backward()
    assert_same_bits(dense.grad, torch.tensor([[0.0, 20.0, 0.0]]))


def test_b115_tokens_without_a_row_in_recycled_memory(backend: Backend) -> None:
    """The result was left uninitialised where a token has nothing on this rank."""
    hidden = 2**17  # large enough for the pool
    for _ in range(3):  # blocks that held something else before
        memory.empty((6, hidden), torch.float32).fill_(torch.nan)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    chosen = torch.zeros(6, 2, dtype=torch.bool)
    chosen[1, 0] = chosen[4, 1] = True
    plan = moeroute.plan_from_routing_map(chosen, backend=backend)
    output = moeroute.unpermute(torch.ones(2, hidden), plan, backend=backend)
    assert_same_bits(output, chosen.any(1)[:, None].float().expand(6, hidden).contiguous())


def test_b124_the_tail_of_an_index_is_not_slot_zero(backend: Backend) -> None:
    """An unwritten tail of the index, full of zeros, overwrote the gradient of the first weight."""
    plan = plan_of([[0, 1], [1, 0], [1, 1], [0, 1]], 1, num_rows=8, backend=backend)
    rows = torch.tensor([[1.0], [2.0], [3.0], *[[torch.nan]] * 5], requires_grad=True)
    weights = leaf([[0.3, 0.0], [0.0, 0.7], [0.0, 0.0], [0.2, 0.0]])
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    output.backward(torch.tensor([[10.0], [20.0], [30.0], [40.0]]))
    assert_same_bits(weights.grad, torch.tensor([[10.0, 0.0], [0.0, 40.0], [0.0, 0.0], [120.0, 0.0]]))


def test_b125_a_padded_token_gets_no_gradient(backend: Backend) -> None:
    """-1 was used as the index of a histogram."""
    plan = plan_of([[-1, -1], [1, 0]], 2, backend=backend)
    tokens, weights = torch.ones(2, 3, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    rows = moeroute.permute(tokens, plan, backend=backend)
    moeroute.unpermute(rows, plan, weights, backend=backend).sum().backward()
    assert_same_bits(tokens.grad, torch.tensor([[0.0] * 3, [2.0] * 3]))
    assert_same_bits(weights.grad, torch.tensor([[0.0, 0.0], [3.0, 3.0]]))


# ---------------------------------------------------------------------------- nothing to do


def test_b14_no_tokens_and_a_backward(backend: Backend) -> None:
    """The branch for an empty input returned another number of gradients."""

    def step(num_tokens: int) -> list[Tensor]:
        tokens = torch.zeros(num_tokens, 16, requires_grad=True)
        weights = torch.zeros(num_tokens, 4, requires_grad=True)
        routing_map = torch.zeros(num_tokens, 4, dtype=torch.bool)
        results = []
        choices: tuple[dict[str, Any], ...] = {}, {"topk": 2}, {"fill": True, "capacity": num_tokens}
        for options in choices:
            plan = moeroute.plan_from_routing_map(routing_map, backend=backend, **options)
            rows = moeroute.permute(tokens, plan, backend=backend)
            weighted = moeroute.permute(tokens, plan, weights, backend=backend)
            results += [rows, weighted, moeroute.permute_weights(weights, plan, backend=backend)]
            results += [moeroute.unpermute(rows, plan, w, backend=backend) for w in (None, weights)]
        torch.stack([r.sum() for r in results]).sum().backward()
        assert tokens.grad is not None
        assert tokens.grad.shape == (num_tokens, 16)
        return [*results, tokens.grad, *([] if weights.grad is None else [weights.grad])]

    empty, some = step(0), step(3)
    assert [(t.dtype, t.ndim, t.shape[1:]) for t in empty] == [(t.dtype, t.ndim, t.shape[1:]) for t in some]


def test_b106_nothing_and_then_something(backend: Backend) -> None:
    """A launch over an empty grid failed, and so did everything after it."""
    for num_tokens in (0, 4, 0, 4):
        logits = torch.arange(num_tokens * 3.0).reshape(num_tokens, 3)
        gating = moeroute.gating_topk(logits, 2, backend=backend)
        grad = moeroute.gating_topk_backward(
            gating.scores, gating.weights, gating.expert_ids, score="softmax", renormalize=False, backend=backend
        )
        plan = moeroute.plan_from_expert_ids(gating.expert_ids, 3, backend=backend)
        rows = moeroute.permute(torch.ones(num_tokens, 5), plan, backend=backend)
        output = moeroute.unpermute(rows, plan, backend=backend)
        assert grad.shape == logits.shape
        assert_same_bits(
            gating.expert_ids, torch.tensor([[2, 1]], dtype=torch.int32).expand(num_tokens, 2).contiguous()
        )
        assert_same_bits(output, torch.full((num_tokens, 5), 2.0))


def test_b110_only_the_expert_with_rows_gets_a_gradient(subtests: pytest.Subtests) -> None:
    """Experts without rows, first, last or all but one, hung the backward pass."""
    rows = whole_numbers(5, 3, seed=0)
    for used, sizes in enumerate(([5, 0, 0, 0], [0, 5, 0, 0], [0, 0, 5, 0], [0, 0, 0, 5])):
        with subtests.test(used=used):
            weight = torch.ones(4, 2, 3, requires_grad=True)
            grouped_linear(rows, weight, sizes).sum().backward()
            expected = torch.zeros(4, 2, 3)
            expected[used] = rows.sum(0)
            assert_same_bits(weight.grad, expected)


# ---------------------------------------------------------------------------- padding and plans


def test_b53_a_plan_fits_its_own_rows_only(subtests: pytest.Subtests, backend: Backend) -> None:
    """permute padded the experts' rows, unpermute took them for unpadded ones."""
    ids = [[0], [0], [0], [1], [1], [2], [2], [2], [2]]
    plans = {align: plan_of(ids, 3, align=align, backend=backend) for align in (1, 4, 16)}
    tokens = torch.arange(18.0).reshape(9, 2)
    for align, plan in plans.items():
        with subtests.test(align=align):
            rows = moeroute.permute(tokens, plan, backend=backend)
            assert_same_bits(moeroute.unpermute(rows, plan, backend=backend), tokens)
            for other, wrong in plans.items():
                if other != align:
                    with pytest.raises(
                        ValueError, match=rf"rows must be \[R, H\] with R = {wrong.num_rows}, as the plan"
                    ):
                        moeroute.unpermute(rows, wrong, backend=backend)


def test_b127_padded_segments_in_bfloat16(backend: Backend) -> None:
    """The padding was left out, and a matrix product refused the stride."""
    plan = plan_of([[0]] * 5 + [[2]] * 3, 3, align=16, backend=backend)
    assert plan.num_rows == 32
    assert plan.rows_per_expert is not None
    assert all(end % 16 == 0 for end in plan.rows_per_expert.cumsum(0).tolist())
    tokens = torch.randn(8, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert_same_bits(rows[5:16], torch.zeros(11, 24, dtype=torch.bfloat16))
    assert_same_bits(rows[19:], torch.zeros(13, 24, dtype=torch.bfloat16))
    assert_same_bits(moeroute.unpermute(rows, plan, backend=backend), tokens)


def test_b83_counts_are_integers(backend: Backend) -> None:
    """Counts came as the bits of floats: 1098907648 is 16.0."""
    plan = moeroute.plan_from_expert_ids(torch.arange(16).reshape(8, 2) % 4, 4, backend=backend)
    counts = plan.tokens_per_expert
    assert counts is not None
    assert counts.dtype is torch.int64
    assert counts.tolist() == [4, 4, 4, 4]


def test_b95_a_row_for_each_expert_of_a_received_token(backend: Backend) -> None:
    """What came from other ranks was not grouped by expert, and was taken as if it were."""
    routing_map = torch.tensor([[1, 1], [0, 1], [1, 0]], dtype=torch.bool)
    plan = moeroute.plan_from_routing_map(routing_map, backend=backend)
    received = torch.tensor([[1.0], [2.0], [4.0]])
    rows = moeroute.permute(received, plan, backend=backend)
    assert rows.flatten().tolist() == [1, 4, 1, 2]
    assert plan.tokens_per_expert is not None
    assert plan.tokens_per_expert.tolist() == [2, 2]
    assert moeroute.unpermute(rows, plan, backend=backend).flatten().tolist() == [2, 2, 4]
