"""normalize_scores: rows divided by their sums."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gating_by_hand import FLOATS, INF, NAN, random_logits
from moeroute import normalize_scores
from moeroute.testing import assert_close_to_exact, assert_same_bits

MASK = torch.tensor([False, True, False])


def by_torch(scores: Tensor, eps: float = 1e-20) -> Tensor:
    return scores / (scores.sum(1, keepdim=True) + eps)


@pytest.mark.parametrize("experts", [2, 7, 256, 300, 1025])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_float64_mathematics(experts: int, dtype: torch.dtype) -> None:
    scores = random_logits(5, experts).sigmoid().to(dtype).requires_grad_()
    twin = scores.detach().double().requires_grad_()
    found, expected = normalize_scores(scores), by_torch(twin)
    assert found.dtype is dtype
    assert_close_to_exact(found, expected)
    grad = random_logits(5, experts, seed=1, dtype=dtype)
    (actual,) = torch.autograd.grad(found, scores, grad)
    assert actual.dtype is dtype
    assert_close_to_exact(actual, torch.autograd.grad(expected, twin, grad.double())[0])


def test_the_order_of_the_sum() -> None:
    """Partial sum j adds elements j and j + 256; then neighbours are added: 1 + 2^-24 each time rounds to 1."""
    scores = torch.zeros(2, 512)
    scores[0, 0], scores[0, 1], scores[0, 256] = 1.0, 2.0**-24, 2.0**-24
    scores[1, 0], scores[1, 2], scores[1, 3] = 1.0, 2.0**-24, 2.0**-24
    found = normalize_scores(scores)
    assert found[0, 0] == 1.0
    assert found[1, 0] == torch.tensor(1.0) / torch.tensor(1.0 + 2.0**-23)


def test_padding_is_zero_whatever_it_holds() -> None:
    scores = torch.tensor([[1.0, 3.0], [NAN, INF], [0.0, 0.0]], requires_grad=True)
    found = normalize_scores(scores, padding_mask=MASK)
    assert found.tolist() == [[0.25, 0.75], [0.0, 0.0], [0.0, 0.0]]
    (grad,) = torch.autograd.grad(found, scores, torch.tensor([[1.0, 0.0], [NAN, 1.0], [0.0, 0.0]]))
    assert grad.tolist() == [[0.1875, -0.0625], [0.0, 0.0], [0.0, 0.0]]
    without = normalize_scores(scores, eps=0.0)
    assert_same_bits(without[1:].detach(), torch.tensor([[NAN, NAN], [NAN, NAN]]))
    assert normalize_scores(scores, eps=0.0, padding_mask=MASK)[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    assert normalize_scores(torch.ones(shape)).shape == shape


@pytest.mark.parametrize("mask", [None, MASK])
def test_gradients_of_both_orders(mask: Tensor | None) -> None:
    scores = random_logits(3, 4).sigmoid().double().requires_grad_()

    def function(s: Tensor) -> Tensor:
        return normalize_scores(s, eps=1e-3, padding_mask=mask)

    assert gradcheck(function, scores, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, scores)
    torch.library.opcheck(torch.ops.moeroute.normalize_scores, (random_logits(3, 4).requires_grad_(), 1e-3, mask))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    scores = random_logits(3, 300).sigmoid()
    compiled = torch.compile(normalize_scores, fullgraph=True, dynamic=dynamic)
    assert_same_bits(compiled(scores, padding_mask=MASK), normalize_scores(scores, padding_mask=MASK))


def test_transforms() -> None:
    scores = random_logits(4, 3, 5).sigmoid()
    assert_same_bits(torch.func.vmap(normalize_scores)(scores), torch.stack([normalize_scores(s) for s in scores]))
    jacobian = torch.func.jacrev(normalize_scores)(scores[0].double())
    assert_close_to_exact(jacobian, torch.func.jacfwd(by_torch)(scores[0].double()))


@pytest.mark.parametrize(
    ("scores", "options", "error", "message"),
    [
        ([1.0], {}, TypeError, "normalize_scores: scores must be a torch.Tensor; got list"),
        (torch.ones(3), {}, ValueError, r"scores must be of shape \[\*, \*\]; got shape \[3\]"),
        (torch.ones(3, 2).int(), {}, TypeError, "scores must be float16, bfloat16, float32 or float64; got torch.int32"),
        (torch.ones(3, 2), {"eps": NAN}, ValueError, "eps must be finite; got nan"),
        (torch.ones(3, 2), {"eps": 1e300}, ValueError, "eps must be finite in float32"),
        (torch.ones(3, 2), {"padding_mask": MASK[:2]}, ValueError, r"padding_mask must be of shape \[3\]; got shape \[2\]"),
        (torch.ones(3, 2), {"padding_mask": MASK.int()}, TypeError, "padding_mask must be torch.bool, True = padding"),
    ],
)  # fmt: skip
def test_messages(scores: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        normalize_scores(scores, **options)
