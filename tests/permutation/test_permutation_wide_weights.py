"""float64 weights beside narrower rows: rounded to float32 once, gradient in float64."""

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute.dispatch import Backend
from moeroute.plan import RoutingPlan
from moeroute.testing import assert_same_bits

NARROW = (torch.float32, torch.float16, torch.bfloat16)
PLANS = {
    "ids": moeroute.plan_from_expert_ids(torch.tensor([[1, 0], [1, -1], [2, 1]]), 3, align=2),
    "map": moeroute.plan_from_routing_map(torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.uint8)),
}


def drawn(plan: RoutingPlan, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    columns = 2 if plan.expert_of_slot is None else 3
    weights = torch.rand(plan.num_tokens, columns, generator=generator, dtype=torch.float64)
    assert (weights.float().double() != weights).any()
    tokens = torch.randn(plan.num_tokens, 5, generator=generator).to(dtype)
    return tokens, torch.randn(plan.num_rows, 5, generator=generator).to(dtype), weights


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("which", PLANS)
def test_the_same_as_rounded_weights(which: str, dtype: torch.dtype, backend: Backend) -> None:
    plan = PLANS[which]
    tokens, rows, weights = drawn(plan, dtype)
    rounded = weights.float()
    assert_same_bits(
        moeroute.permute(tokens, plan, weights, backend=backend),
        moeroute.permute(tokens, plan, rounded, backend=backend),
    )
    assert_same_bits(
        moeroute.unpermute(rows, plan, weights, backend=backend),
        moeroute.unpermute(rows, plan, rounded, backend=backend),
    )
    slots, wide_slots = (moeroute.slot_weights(w, plan) for w in (rounded, weights))
    assert_same_bits(
        moeroute.spread(tokens, plan, wide_slots, backend=backend),
        moeroute.spread(tokens, plan, slots, backend=backend),
    )
    for init in (None, tokens):
        assert_same_bits(
            moeroute.combine(rows, plan, wide_slots, init=init, backend=backend),
            moeroute.combine(rows, plan, slots, init=init, backend=backend),
        )
    assert_same_bits(
        moeroute.permute_backward(rows, plan, weights, backend=backend),
        moeroute.permute_backward(rows, plan, rounded, backend=backend),
    )
    grad_rows, grad_weights = moeroute.unpermute_backward(tokens, rows, plan, weights, backend=backend)
    expected_rows, expected_weights = moeroute.unpermute_backward(tokens, rows, plan, rounded, backend=backend)
    assert_same_bits(grad_rows, expected_rows)
    assert grad_weights is not None
    assert expected_weights is not None
    assert_same_bits(grad_weights, expected_weights.double())
    out = torch.empty_like(rows), torch.empty_like(weights)
    moeroute.unpermute_backward(tokens, rows, plan, weights, out=out, backend=backend)
    assert_same_bits(out, (grad_rows, grad_weights))


@pytest.mark.parametrize("which", PLANS)
def test_gradient_in_float64(which: str, backend: Backend) -> None:
    """Of integers, whose sums are exact in every order: d/dw of sum(g * (w rows)) is <rows, g> of the slot."""
    plan = PLANS[which]
    weights = torch.full_like(drawn(plan, torch.float32)[2], 0.1).requires_grad_()
    rows = torch.arange(plan.num_rows * 4.0).reshape(-1, 4)
    grad = torch.arange(plan.num_tokens * 4.0).reshape(-1, 4) - 3
    moeroute.unpermute(rows, plan, weights, backend=backend).backward(grad)
    expected = torch.zeros_like(weights)
    owners = plan.token_of_slot.tolist()
    for slot, row in enumerate(plan.row_of_slot.tolist()):
        if row >= 0:
            column = slot % 2 if plan.expert_of_slot is None else int(plan.expert_of_slot[slot])
            with torch.no_grad():
                expected[owners[slot], column] = rows[row].double() @ grad[owners[slot]].double()
    assert weights.grad is not None
    assert weights.grad.dtype is torch.float64
    assert weights.grad.tolist() == expected.tolist()
    weights = weights.detach().requires_grad_()
    tokens = torch.arange(plan.num_tokens * 4.0).reshape(-1, 4).requires_grad_()
    moeroute.permute(tokens, plan, weights, backend=backend).sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype is torch.float64


def test_compiled() -> None:
    torch._dynamo.reset()
    plan = PLANS["ids"]
    tokens, _, weights = drawn(plan, torch.bfloat16)
    compiled = torch.compile(lambda x, w: moeroute.permute(x, plan, w), fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(tokens, weights), moeroute.permute(tokens, plan, weights.float()))
