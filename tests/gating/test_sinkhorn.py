"""sinkhorn against its definition in the domain of exponentials."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gating_by_hand import FLOATS, INF, NAN, random_logits
from moeroute import sinkhorn
from moeroute.testing import assert_close_to_exact, assert_same_bits


def by_exponentials(scores: Tensor, rounds: int = 300) -> Tensor:
    """Rows scaled to 1/T and columns to 1/E in turns, in float64."""
    found = scores.double().exp()
    for _ in range(rounds):
        found = found / found.sum(1, keepdim=True) / found.shape[0]
        found = found / found.sum(0, keepdim=True) / found.shape[1]
    return found


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 1), (40, 8), (8, 40)])
def test_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    scores = random_logits(*shape, dtype=dtype, scale=1.0)
    found = sinkhorn(scores, tolerance=0.0 if dtype is torch.float64 else 1e-9)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert_close_to_exact(found, by_exponentials(scores))


def test_default_tolerance() -> None:
    scores = random_logits(64, 8)
    found = sinkhorn(scores).double()
    torch.testing.assert_close(found.sum(0), torch.full((8,), 1 / 8).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.sum(1), torch.full((64,), 1 / 64).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("size", [100.0, 1000.0, -1000.0])
def test_large_logits(size: float) -> None:
    """exp(100) is infinite in float32, and every sum with it."""
    scores = torch.zeros(4, 2)
    scores[0, 0] = size
    found = sinkhorn(scores)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.sum(0), torch.tensor([0.5, 0.5]))
    assert found[0].argmax() == (0 if size > 0 else 1)
    assert found[0].sum() == pytest.approx(0.25, rel=1e-3)


def test_a_constant_changes_nothing() -> None:
    scores = random_logits(6, 4).double()
    shift = torch.tensor([[0.0], [500.0], [-500.0], [3.0], [0.0], [1.0]]).double()
    torch.testing.assert_close(sinkhorn(scores + shift, tolerance=1e-12), sinkhorn(scores, tolerance=1e-12))


def test_excluded_experts() -> None:
    scores = torch.tensor([[0.0, -INF, 1.0], [0.5, -INF, -INF], [-INF, -INF, -INF]])
    found = sinkhorn(scores)
    assert bool((found[scores == -INF] == 0).all())
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.sum(0), torch.tensor([1 / 3, 0.0, 1 / 3]))


def test_nan_shows_and_ends() -> None:
    assert bool(sinkhorn(torch.tensor([[NAN, 0.0], [1.0, 2.0]])).isnan().all())


def test_no_gradient_and_the_input_stays() -> None:
    scores = random_logits(5, 3).requires_grad_()
    copy = scores.detach().clone()
    assert not sinkhorn(scores).requires_grad
    assert_same_bits(scores.detach(), copy)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    assert sinkhorn(torch.ones(shape)).shape == shape


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch(dynamic: bool) -> None:
    scores = random_logits(5, 3)
    assert_same_bits(torch.compile(sinkhorn, fullgraph=True, dynamic=dynamic)(scores), sinkhorn(scores))
    torch.library.opcheck(torch.ops.moeroute.sinkhorn, (scores, 1e-4))


@pytest.mark.parametrize(
    ("scores", "tolerance", "error", "message"),
    [
        ([1.0], 1e-4, TypeError, "sinkhorn: scores must be a torch.Tensor; got list"),
        (torch.ones(3), 1e-4, ValueError, r"sinkhorn: scores must be of shape"),
        (torch.ones(3, 2).int(), 1e-4, TypeError, "scores must be float16, bfloat16, float32 or float64; got torch.int32"),
        (torch.ones(3, 2), -1.0, ValueError, "tolerance must be at least 0; got -1.0"),
        (torch.ones(3, 2), NAN, ValueError, "tolerance must be finite; got nan"),
        (torch.ones(3, 2), "1", TypeError, "tolerance must be a float; got str"),
    ],
)  # fmt: skip
def test_messages(scores: Any, tolerance: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sinkhorn(scores, tolerance=tolerance)
