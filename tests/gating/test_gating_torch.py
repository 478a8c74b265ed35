"""Gating: derivatives of both orders, strides, torch.library, torch.compile, torch.func, modes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from gating_by_hand import FLOATS, GROUPED, HALVES, INF, SCORES, exact, random_logits
from moeroute import gating_topk, gating_topk_backward
from moeroute.dispatch import Backend
from moeroute.ops.gating import op
from moeroute.ops.gating.op import Score
from moeroute.testing import assert_close_to_exact, assert_same_bits

# ---------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradcheck(score: Score, renormalize: bool) -> None:
    logits = random_logits(2, 6).double().requires_grad_()
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scaling_factor": 2.5}

    def choosing(x: Tensor) -> tuple[Tensor, Tensor]:
        found = gating_topk(x, 2, num_groups=3, topk_groups=2, group_score="top2_sum", **options)
        return found.weights, found.scores

    ids = torch.tensor([[5, -1, 5], [9, 9, 9]])

    def replaying(x: Tensor) -> Tensor:
        return gating_topk(x, 3, expert_ids=ids, eps=1e-3, **options).weights

    assert gradcheck(choosing, (logits,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(choosing, (logits,), check_fwd_over_rev=True)
    assert gradcheck(replaying, (logits,), check_forward_ad=True)
    assert gradgradcheck(replaying, (logits,))

    scores = gating_topk(logits.detach(), 3, score=score).scores.requires_grad_()
    grads = [random_logits(*shape, seed=4).double().requires_grad_() for shape in ((2, 3), (2, 6))]

    def backward(s: Tensor, g: Tensor, d: Tensor) -> Tensor:
        return gating_topk_backward(s, g, ids, grad_scores=d, eps=1e-3, **options)

    assert gradcheck(backward, (scores, *grads), check_forward_ad=True)
    assert gradgradcheck(backward, (scores, *grads), fast_mode=score != "none")  # which lacks a gradient of s to check


def test_second_derivatives_at_the_limits() -> None:
    """sqrtsoftplus of -inf is 0, and so is its slope: no 0/0 on the way."""
    logits = torch.tensor([[-INF, -800.0, -1.0, 700.0]], dtype=torch.float64, requires_grad=True)
    found = gating_topk(logits, 4, score="sqrtsoftplus", renormalize=False)
    (grad,) = torch.autograd.grad(found.scores.sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), logits)
    assert bool(grad.isfinite().all() and second.isfinite().all())
    assert grad[0, 0] == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_second_derivatives_in_low_precision(backend: Backend, dtype: torch.dtype) -> None:
    logits = random_logits(4, 9, dtype=dtype).requires_grad_()
    twin = logits.detach().double().requires_grad_()

    def second(x: Tensor, backend: Backend | None = None) -> Tensor:
        found = gating_topk(x, 3, score="sigmoid", backend=backend)
        (first,) = torch.autograd.grad(found.weights[:, 0].sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    actual = second(logits, backend)
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.double(), second(twin), rtol=0.03, atol=0.01 if dtype in HALVES else 1e-6)


def test_only_what_was_used_gets_a_gradient(backend: Backend) -> None:
    logits = random_logits(3, 8).requires_grad_()
    bias = random_logits(8, seed=1).requires_grad_()
    found = gating_topk(logits, 2, score="sigmoid", bias=bias, backend=backend)
    assert not found.expert_ids.requires_grad
    from_scores, *others = torch.autograd.grad(found.scores.sum(), (logits, bias), retain_graph=True, allow_unused=True)
    assert others == [None]
    s = found.scores.detach()
    torch.testing.assert_close(from_scores, s * (1 - s))
    found.weights.sum().backward()
    assert bias.grad is None
    assert logits.grad is not None


def test_in_place_on_the_results(backend: Backend) -> None:
    logits = random_logits(3, 8).requires_grad_()
    plain = gating_topk(logits, 2, backend=backend)
    (expected,) = torch.autograd.grad((plain.weights * 2).sum(), logits)
    found = gating_topk(logits, 2, backend=backend)
    found.weights.mul_(2)
    assert_same_bits(torch.autograd.grad(found.weights.sum(), logits)[0], expected)
    found = gating_topk(logits, 2, backend=backend)
    found.scores.zero_()  # kept for backward, as torch.softmax keeps its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.weights.sum().backward()


def test_strided_logits_and_gradients(subtests: pytest.Subtests, backend: Backend) -> None:
    wide = random_logits(6, 20)
    expected = gating_topk(wide[:, 3:15].contiguous(), 4, backend=backend)
    for view in (wide[:, 3:15], wide.t().contiguous().t()[:, 3:15], wide[:, 3:15].flip(1).contiguous().flip(1)):
        with subtests.test(strides=view.stride()):
            assert_same_bits(gating_topk(view, 4, backend=backend), tuple(expected))
    expanded = gating_topk(wide[:1, 3:15].expand(6, 12), 4, bias=torch.zeros(1).expand(12), backend=backend)
    assert_same_bits(expanded.expert_ids, expected.expert_ids[:1].repeat(6, 1))
    options: dict[str, Any] = {"score": "softmax", "renormalize": True, "backend": backend}
    grad, extra = random_logits(6, 9), random_logits(12, 6)
    result = gating_topk_backward(expected.scores, grad[:, 1:5], expected.expert_ids, grad_scores=extra.t(), **options)
    assert_same_bits(
        result,
        gating_topk_backward(
            expected.scores, grad[:, 1:5].contiguous(), expected.expert_ids.long(),
            grad_scores=extra.t().contiguous(), **options,
        ),
    )  # fmt: skip
    logits = wide.clone().requires_grad_()
    gating_topk(logits, 4, backend=backend).weights.sum().backward()  # an expanded gradient
    torch.testing.assert_close(
        logits.grad, torch.autograd.grad(torch.softmax(logits, 1).topk(4).values.sum(), logits)[0]
    )


# ---------------------------------------------------------------------------- torch's machinery


@pytest.mark.parametrize("score", ["sigmoid", "topk_softmax"])
def test_opcheck(score: Score) -> None:
    logits, bias = random_logits(3, 8).requires_grad_(), random_logits(8)
    ids = torch.tensor([[0, 1], [2, -1], [9, 3]])
    forward, backward = torch.ops.moeroute.gating_topk.default, torch.ops.moeroute.gating_topk_backward.default
    for given_ids in (None, ids):
        torch.library.opcheck(
            forward, (logits, bias, given_ids, 2, score, 2, 1, 1, True, 2.0, 1e-20, torch.bfloat16, None)
        )
    scores, grad = random_logits(3, 8).sigmoid().requires_grad_(), random_logits(3, 2).requires_grad_()
    for extra in (None, random_logits(3, 8).requires_grad_()):
        torch.library.opcheck(backward, (scores, grad, ids, extra, score, True, 2.0, 1e-20, torch.float32, None))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_break(backend: Backend, dynamic: bool) -> None:
    def step(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = gating_topk(logits, 4, score="sigmoid", bias=bias, **GROUPED, backend=backend)
        return found.weights * 2, found.expert_ids + 1, found.scores

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (3, 5):
        logits, bias = random_logits(tokens, 64).requires_grad_(), random_logits(64, seed=1)
        actual, expected = compiled(logits, bias), step(logits, bias)
        assert_same_bits(actual, expected)
        grads = [torch.autograd.grad(r[0].sum() + r[2].sum(), logits)[0] for r in (actual, expected)]
        assert_same_bits(grads[0], grads[1])


@pytest.mark.parametrize("score", SCORES)
def test_transforms(backend: Backend, score: Score) -> None:
    logits, tangent = random_logits(4, 8), random_logits(4, 8, seed=1)
    ids = gating_topk(logits, 3, score=score).expert_ids

    def ours(x: Tensor) -> Tensor:
        return gating_topk(x, 3, score=score, backend=backend).weights

    def mathematics(x: Tensor) -> Tensor:
        return exact(x, ids, score, op.RENORMALIZED[score])[0]

    twin, twin_tangent = logits.double(), tangent.double()
    primal, moved = torch.func.jvp(ours, (logits,), (tangent,))[:2]
    assert_same_bits(primal, ours(logits))
    assert_close_to_exact(moved, torch.func.jvp(mathematics, (twin,), (twin_tangent,))[1])
    with forward_ad.dual_level():
        dual = gating_topk(forward_ad.make_dual(logits, tangent), 3, score=score, backend=backend)
        assert_same_bits(forward_ad.unpack_dual(dual.weights).tangent, moved)
        assert forward_ad.unpack_dual(dual.scores).tangent is not None
    loss = ours(logits).square().sum()
    assert loss.isfinite()
    hessian = torch.func.hessian(lambda x: ours(x).square().sum())(logits)
    expected = torch.func.hessian(lambda x: mathematics(x).square().sum())(twin)
    torch.testing.assert_close(hessian.double(), expected, rtol=1e-4, atol=1e-5)
    assert_same_bits(torch.func.vmap(ours)(logits.reshape(2, 2, 8)).reshape(4, 3), ours(logits))
    grad = torch.func.grad(lambda x: ours(x).square().sum())(logits)
    alone = torch.func.vmap(torch.func.grad(lambda x: ours(x[None]).square().sum()))(logits)
    assert_same_bits(alone, grad)


def test_vmap_over_the_bias(backend: Backend) -> None:
    logits, bias = random_logits(3, 4, 8), random_logits(3, 8, seed=1)

    def ids(x: Tensor, b: Tensor) -> Tensor:
        return gating_topk(x, 2, bias=b, backend=backend).expert_ids

    together = torch.func.vmap(ids)(logits, bias)
    assert_same_bits(together, torch.stack([ids(x, b) for x, b in zip(logits, bias, strict=True)]))


def test_autocast_and_inference_mode(backend: Backend) -> None:
    logits = random_logits(3, 8)
    expected = tuple(gating_topk(logits, 2, backend=backend))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(gating_topk(logits, 2, backend=backend), expected)
        assert_same_bits(gating_topk(logits.clone().requires_grad_(), 2, backend=backend), expected)
    with torch.inference_mode():
        assert_same_bits(gating_topk(logits, 2, backend=backend), expected)
