"""Reports about several ranks, played in one process."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute.dispatch import Backend
from moeroute.nn import grouped_linear
from moeroute.testing import assert_same_bits
from small_cases import plan_of, whole_numbers


def exchange(
    sent: list[Tensor], counts: Tensor, experts_per_rank: int, backend: Backend
) -> Iterator[tuple[Tensor, moeroute.RoutingPlan]]:
    """For each rank what all the others send it, rank by rank, and the plan that groups it by expert.

    `counts` is [ranks, E]: how many rows of each expert each rank has, in this order, in `sent`.
    """
    ranks = len(sent)
    chunks = [rows.split(counts[rank].tolist()) for rank, rows in enumerate(sent)]
    for rank in range(ranks):
        mine = range(rank * experts_per_rank, (rank + 1) * experts_per_rank)
        received = torch.cat([chunks[source][e] for source in range(ranks) for e in mine])
        lengths = counts[:, mine.start : mine.stop]
        yield received, moeroute.plan_from_segments(lengths, received.shape[0], backend=backend)


def test_b23_what_is_sent_is_what_is_received(backend: Backend) -> None:
    """Each rank took a capacity from its own counts, and the exchange waited for rows that never came."""
    ids = [[[0], [0], [0]], [[0], [1], [2], [3]]]
    plans = [plan_of(i, 4, backend=backend) for i in ids]
    counts = torch.stack([p.tokens_per_expert for p in plans if p.tokens_per_expert is not None])
    assert counts.tolist() == [[3, 0, 0, 0], [1, 1, 1, 1]]
    tokens = [torch.arange(3.0)[:, None], torch.arange(10.0, 14.0)[:, None]]
    sent = [moeroute.permute(t, p, backend=backend) for t, p in zip(tokens, plans, strict=True)]
    (first, plan_0), (second, plan_1) = exchange(sent, counts, 2, backend)
    assert [len(first), len(second)] == counts.reshape(2, 2, 2).sum((0, 2)).tolist() == [5, 2]
    assert moeroute.permute(first, plan_0, backend=backend).flatten().tolist() == [0, 1, 2, 10, 11]
    assert moeroute.permute(second, plan_1, backend=backend).flatten().tolist() == [12, 13]
    # With padding all ranks need one capacity: it is the caller's.
    padded = [plan_of(i, 4, capacity=3, pad_to_capacity=True, backend=backend) for i in ids]
    assert [p.num_rows for p in padded] == [12, 12]


@pytest.mark.parametrize("ids", [[[0, 2], [3, 1], [0, 1]], [[0, 2], [3, 0], [1, 1]]], ids=["B35", "B133"])
def test_b35_b133_the_ranks_partial_outputs_add_up(backend: Backend, ids: list[list[int]]) -> None:
    """Experts of other ranks were taken for expert 0, or their rows for valid ones."""
    tokens = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))

    def output(expert_range: tuple[int, int] | None) -> Tensor:
        plan = plan_of(ids, 4, expert_range=expert_range, backend=backend)
        rows = moeroute.permute(tokens, plan, backend=backend)
        if expert_range == (2, 4):
            assert plan.tokens_per_expert is not None
            assert plan.tokens_per_expert.tolist() == [1, 1]
            assert_same_bits(rows, tokens[:2])
        return moeroute.unpermute(rows, plan, weights, backend=backend)

    parts = [output((0, 2)), output((2, 4))]
    assert_same_bits(parts[1][2], torch.zeros(5))  # token 2 has no expert on that rank
    assert_same_bits(parts[1][0], weights[0, 1] * tokens[0])
    assert_same_bits(parts[1][1], weights[1, 0] * tokens[1])
    assert_same_bits(parts[0] + parts[1], output(None))  # two terms a token: no other order


def test_b55_b92_b128_nothing_is_scaled_by_the_number_of_ranks(backend: Backend) -> None:
    """Gradients of experts were as many times too large as there were ranks."""
    ranks, num_experts, per_rank, hidden = 2, 4, 2, 3
    ids = [[[0, 3], [1, 2], [3, 3], [-1, 0]], [[2, 1], [0, 2], [1, -1]]]
    start = [whole_numbers(len(i), hidden, seed=rank) for rank, i in enumerate(ids)]
    shares = [whole_numbers(len(i), 2, seed=9 + rank) / 4 for rank, i in enumerate(ids)]
    matrices = whole_numbers(num_experts, hidden, hidden, seed=5)

    def leaves() -> tuple[list[Tensor], list[Tensor], Tensor]:
        tokens = [t.clone().requires_grad_() for t in start]
        return tokens, [w.clone().requires_grad_() for w in shares], matrices.clone().requires_grad_()

    # All on one rank.
    tokens, weights, experts = leaves()
    plan = plan_of(ids[0] + ids[1], num_experts, backend=backend)
    rows = moeroute.permute(torch.cat(tokens), plan, backend=backend)
    assert plan.tokens_per_expert is not None
    rows = grouped_linear(rows, experts, plan.tokens_per_expert)
    whole = moeroute.unpermute(rows, plan, torch.cat(weights), backend=backend)
    whole.square().sum().backward()
    expected = [whole.detach(), experts.grad, *(t.grad for t in tokens), *(w.grad for w in weights)]

    # Tokens and experts on two.
    tokens, weights, experts = leaves()
    plans = [plan_of(i, num_experts, backend=backend) for i in ids]
    counts = torch.stack([p.tokens_per_expert for p in plans if p.tokens_per_expert is not None])
    sent = [moeroute.permute(t, p, backend=backend) for t, p in zip(tokens, plans, strict=True)]
    back: list[list[Tensor]] = [[] for _ in range(ranks)]
    for rank, (received, grouping) in enumerate(exchange(sent, counts, per_rank, backend)):
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        assert grouping.tokens_per_expert is not None
        grouped = moeroute.permute(received, grouping, backend=backend)
        grouped = grouped_linear(grouped, experts[mine], grouping.tokens_per_expert)
        returned = moeroute.unpermute(grouped, grouping, backend=backend)
        for source, chunk in enumerate(returned.split(counts[:, mine].sum(1).tolist())):
            back[source].append(chunk)
    outputs = [
        moeroute.unpermute(torch.cat(b), p, w, backend=backend) for b, p, w in zip(back, plans, weights, strict=True)
    ]
    sum(o.square().sum() for o in outputs).backward()  # type: ignore[union-attr]
    actual = [torch.cat(outputs).detach(), experts.grad, *(t.grad for t in tokens), *(w.grad for w in weights)]
    # Whole numbers, so that no sum is rounded. -0 and +0 are one number.
    assert_same_bits([a + 0.0 for a in actual if a is not None], [e + 0.0 for e in expected if e is not None])


def test_b161_the_smaller_rank_is_padded_to_the_common_capacity(subtests: pytest.Subtests, backend: Backend) -> None:
    """Ranks with different numbers of tokens had different capacities, and hung."""
    assert [moeroute.capacity_from_factor(t, 1, 2, 1) for t in (5, 3)] == [3, 2]
    for ids in ([[0], [0], [0], [0], [1]], [[1], [0], [1]]):
        with subtests.test(ids=ids):
            plan = plan_of(ids, 2, capacity=3, pad_to_capacity=True, backend=backend)
            tokens = torch.arange(1.0, len(ids) + 1)[:, None]
            rows = moeroute.permute(tokens, plan, backend=backend)
            assert rows.shape == (6, 1)
            free = plan_of(ids, 2, capacity=3, backend=backend)
            assert_same_bits(
                moeroute.unpermute(rows, plan, backend=backend),
                moeroute.unpermute(moeroute.permute(tokens, free, backend=backend), free, backend=backend),
            )


def test_b163_the_ranks_gradients_add_up_in_dirty_memory(backend: Backend) -> None:
    """NaN from reused memory came in at the second step, and the sum over the ranks was missing."""
    ids = [[0, 1], [1, 0]]
    start, share, seed = (
        whole_numbers(2, 3, seed=1),
        torch.tensor([[0.5, 0.25], [1.0, 2.0]]),
        whole_numbers(2, 3, seed=2),
    )

    def grads(expert_range: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        tokens, weights = start.clone().requires_grad_(), share.clone().requires_grad_()
        plan = plan_of(ids, 2, expert_range=expert_range, num_rows=4, backend=backend)
        rows = moeroute.permute(tokens, plan, backend=backend) * 3
        rows = torch.where((plan.slot_of_row >= 0)[:, None], rows, torch.nan)  # what a dirty buffer holds
        moeroute.unpermute(rows, plan, weights, backend=backend).backward(seed)
        assert tokens.grad is not None
        assert weights.grad is not None
        return tokens.grad, weights.grad

    alone = grads(None)
    for _ in range(2):
        first, second = grads((0, 1)), grads((1, 2))
        assert_same_bits([a + b for a, b in zip(first, second, strict=True)], [g + 0.0 for g in alone])
