"""Weights and choices as [T, E] tables: dense_weights, routing_map_from_ids, routing_map_of."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import moeroute
from moeroute import dense_weights, routing_map_from_ids, routing_map_of
from moeroute.dispatch import Backend
from moeroute.dtypes import INTEGERS
from moeroute.testing import assert_close_to_exact, assert_same_bits
from strategies import BACKENDS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = torch.tensor([[2, 0, -1], [9, 1, 1], [8, -7, 2**40]])


def map_by_hand(ids: Tensor, num_experts: int) -> Tensor:
    found = torch.zeros(ids.shape[0], num_experts, dtype=torch.bool)
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            if 0 <= expert < num_experts:
                found[token, expert] = True
    return found


def bits_by_hand(routing_map: Tensor) -> Tensor:
    tokens, experts = routing_map.shape
    rows = [[sum(1 << (e % 8) for e in range(b, min(b + 8, experts)) if row[e]) for b in range(0, experts, 8)]
            for row in routing_map.tolist()]  # fmt: skip
    return torch.tensor(rows, dtype=torch.uint8).reshape(tokens, -(-experts // 8))


def dense_by_torch(weights: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    known = (ids >= 0) & (ids < num_experts)
    found = torch.zeros(ids.shape[0], num_experts + 1, dtype=weights.dtype)
    return found.scatter_add(1, torch.where(known, ids, num_experts).long(), weights)[:, :num_experts]


def test_worked_example(backend: Backend) -> None:
    weights = torch.tensor([[0.75, 0.25, 7.0], [7.0, 0.5, 2.0], [7.0, 7.0, 7.0]])
    expected = torch.tensor([[0.25, 0, 0.75, 0], [0, 2.5, 0, 0], [0, 0, 0, 0]])
    assert_same_bits(dense_weights(weights, IDS, 4, backend=backend), expected)
    assert_same_bits(routing_map_from_ids(IDS, 4, backend=backend), expected != 0)
    many = routing_map_from_ids(IDS, 10, bits=True, backend=backend)
    assert many.dtype is torch.uint8
    assert many.tolist() == [[0b101, 0], [0b10, 0b10], [0, 0b1]]


@given(
    tokens=st.sampled_from([0, 1, 5, 40]), experts=st.sampled_from([0, 1, 7, 8, 9, 64, 300]), k=st.integers(0, 5),
    seed=st.integers(0, 99), dtype=st.sampled_from(FLOATS), ids_dtype=st.sampled_from([torch.int64, torch.int32]),
    names=BACKENDS,
)  # fmt: skip
def test_drawn(
    tokens: int, experts: int, k: int, seed: int, dtype: torch.dtype, ids_dtype: torch.dtype, names: tuple[Backend, ...]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (tokens, k), generator=generator).to(ids_dtype)
    weights = torch.randn(tokens, k, generator=generator).to(dtype)
    expected = dense_weights(weights, ids, experts, backend="reference")
    assert_close_to_exact(expected, dense_by_torch(weights.double(), ids, experts))
    chosen = map_by_hand(ids, experts)
    for name in names:
        assert_same_bits(dense_weights(weights, ids, experts, backend=name), expected, name)
        assert_same_bits(routing_map_from_ids(ids, experts, backend=name), chosen, name)
        assert_same_bits(routing_map_from_ids(ids, experts, bits=True, backend=name), bits_by_hand(chosen), name)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_dtypes(backend: Backend, dtype: torch.dtype) -> None:
    """An unsigned byte above 127 is no negative number."""
    experts = 100 if dtype is torch.int8 else 200
    ids = torch.tensor([[experts - 1, 3], [5, 0]]).to(dtype)
    expected = map_by_hand(ids, experts)
    assert_same_bits(routing_map_from_ids(ids, experts, backend=backend), expected)
    assert_same_bits(dense_weights(torch.ones(2, 2), ids, experts, backend=backend), expected.float())


def test_nan_and_infinity_stay_where_they_are(backend: Backend) -> None:
    weights = torch.tensor([[torch.nan, torch.inf, -0.0]])
    found = dense_weights(weights, torch.tensor([[0, 1, 2]]), 4, backend=backend)
    assert_same_bits(found, torch.tensor([[torch.nan, torch.inf, 0.0, 0.0]]))


def test_repeats_are_added_in_slot_order(backend: Backend) -> None:
    weights = torch.tensor([[1.0, 2.0**-24, 2.0**-24]])  # (1 + tiny) + tiny rounds to 1, 1 + (tiny + tiny) does not
    ids = torch.tensor([[1, 1, 1]])
    assert dense_weights(weights, ids, 2, backend=backend).tolist() == [[0.0, 1.0]]
    assert dense_weights(weights.flip(1), ids, 2, backend=backend).tolist() == [[0.0, 1.0 + 2.0**-23]]


def test_gradients(backend: Backend) -> None:
    ids = torch.tensor([[2, 0], [-1, 1], [1, 1]])
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    grad = torch.arange(9.0).reshape(3, 3)
    (found,) = torch.autograd.grad(dense_weights(weights, ids, 3, backend=backend), weights, grad)
    assert found.tolist() == [[2.0, 0.0], [0.0, 4.0], [7.0, 7.0]]
    exact = weights.detach().double().requires_grad_()
    assert gradcheck(lambda w: dense_weights(w, ids, 3), exact, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda w: dense_weights(w, ids, 3).square(), exact)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    def tables(weights: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        plan = moeroute.plan_from_expert_ids(ids, 4, num_rows=6)
        return (
            dense_weights(weights, ids, 4), routing_map_from_ids(ids, 4), routing_map_from_ids(ids, 4, bits=True),
            routing_map_of(plan),
        )  # fmt: skip

    weights, ids = torch.rand(3, 2), torch.tensor([[2, 0], [-1, 1], [3, 2]])
    assert_same_bits(torch.compile(tables, fullgraph=True, dynamic=dynamic)(weights, ids), tables(weights, ids))


def test_opcheck() -> None:
    ids = torch.tensor([2, 0, -1, 1], dtype=torch.int32)
    for offsets in (None, torch.tensor([0, 3, 4], dtype=torch.int32)):
        for bits in (False, True):
            torch.library.opcheck(torch.ops.moeroute.routing_map, (ids, ids, offsets, ids, 2, 3, bits, None))


def test_transforms() -> None:
    weights, ids = torch.rand(4, 3, 2), torch.tensor([[2, 0], [-1, 1], [1, 1]])
    found = torch.func.vmap(lambda w: dense_weights(w, ids, 3))(weights)
    assert_same_bits(found, torch.stack([dense_weights(w, ids, 3) for w in weights]))


# ---------------------------------------------------------------------------- maps of plans


def test_map_of_a_plan(backend: Backend) -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 2]])
    plans = moeroute.plan_from_expert_ids
    assert_same_bits(routing_map_of(plans(ids, 4), backend=backend), map_by_hand(ids, 4))
    assert_same_bits(routing_map_of(plans(ids, 4, align=4, num_rows=30), backend=backend), map_by_hand(ids, 4))
    dropped = torch.tensor([[2, 0], [-1, 2], [0, -1]])
    assert_same_bits(routing_map_of(plans(ids, 4, capacity=2), backend=backend), map_by_hand(dropped, 4))
    share = plans(ids, 4, expert_range=(2, 4))
    assert_same_bits(routing_map_of(share, backend=backend), map_by_hand(ids, 4)[:, 2:])


def test_map_of_a_plan_of_a_map(backend: Backend) -> None:
    chosen = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    plans = moeroute.plan_from_routing_map
    assert_same_bits(routing_map_of(plans(chosen), backend=backend), chosen)
    table = plans(chosen, topk=2)  # the last token loses its third expert
    assert routing_map_of(table, backend=backend).tolist()[3] == [True, True, False]
    filled = plans(chosen, fill=True, capacity=3)
    assert routing_map_of(filled, backend=backend).long().sum(0).tolist() == [3, 3, 3]
    share = plans(chosen, expert_range=(1, 2))
    assert_same_bits(routing_map_of(share, backend=backend), chosen & torch.tensor([False, True, False]))
    assert_same_bits(routing_map_of(plans(chosen[:0]), backend=backend), chosen[:0])


def test_a_plan_without_experts_is_refused() -> None:
    plan = moeroute.plan_from_expert_ids(torch.tensor([[7], [9]]), None)
    with pytest.raises(ValueError, match="routing_map_of: plan must be one that knows its experts; got num_experts"):
        routing_map_of(plan)


def call(function: Any, *arguments: Any, **options: Any) -> Any:
    """What a type checker would refuse."""
    return function(*arguments, **options)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: call(dense_weights, [[1.0]], IDS, 3), TypeError, "dense_weights: weights must be a torch.Tensor; got list"),
        (lambda: dense_weights(torch.ones(3), IDS, 3), ValueError, r"weights must be of shape \[3, 3\]; got shape \[3\]"),
        (lambda: dense_weights(torch.ones(3, 3).int(), IDS, 3), TypeError, "weights must be"),
        (lambda: dense_weights(torch.ones(3, 3), IDS.float(), 3), TypeError, "expert_ids must be of an integer dtype"),
        (lambda: dense_weights(torch.ones(3, 3), IDS[0], 3), ValueError, r"expert_ids must be \[T, K\]; got shape \[3\]"),
        (lambda: dense_weights(torch.ones(3, 3), IDS, -1), ValueError, r"num_experts must be in 0\.\.\d+; got -1"),
        (lambda: dense_weights(torch.ones(3, 3).double(), IDS, 3, backend="cpu"), ValueError, "'reference' for torch"),
        (lambda: call(routing_map_from_ids, IDS, 2.0), TypeError, "routing_map_from_ids: num_experts must be an int; got"),
        (lambda: call(routing_map_from_ids, IDS, 2, bits=1), TypeError, "routing_map_from_ids: bits must be a bool; got int"),
        (lambda: call(routing_map_of, IDS), TypeError, "routing_map_of: plan must be a moeroute.RoutingPlan; got Tensor"),
    ],
)  # fmt: skip
def test_messages(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()
