"""Small inputs of many tests."""

from typing import Any, TypeVar

import torch
from torch import Tensor

import moeroute

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """A value that may be absent elsewhere, and must be there."""
    assert value is not None
    return value


def plan_of(ids: list[list[int]], num_experts: int, **options: Any) -> moeroute.RoutingPlan:
    return moeroute.plan_from_expert_ids(torch.tensor(ids), num_experts, **options)


def leaf(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def whole_numbers(*shape: int, seed: int, most: int = 3) -> Tensor:
    """Small integers as float32: their sums and products are exact in any order."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def random_plan(seed: int, num_tokens: int, topk: int, num_experts: int, empty: float = 0.2) -> moeroute.RoutingPlan:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(num_experts, (num_tokens, topk), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < empty] = -1
    return moeroute.plan_from_expert_ids(ids, num_experts)
