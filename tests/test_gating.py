"""Gating: by hand, against float64 mathematics, between backends, and what broke other people's routers."""

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import moeroute
from moeroute import gating_topk, gating_topk_backward
from moeroute.ops.gating import op, reference
from moeroute.testing import assert_close_to_exact, assert_same_bits
from strategies import BACKENDS

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
NAN, INF = math.nan, math.inf
GROUPED: dict[str, Any] = {"num_groups": 8, "topk_groups": 4, "group_score": "top2_sum"}


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 2.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


# ---------------------------------------------------------------------------- expectations, by hand and in float64


def by_hand(
    scores: Tensor,
    k: int,
    bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    group_score: str = "max",
) -> Tensor:
    """The expert ids of every row from its float32 scores, with Python's own sort."""

    def best_first(values: list[float]) -> list[int]:
        return sorted(range(len(values)), key=lambda i: (0 if math.isnan(values[i]) else 1, -values[i], i))

    rows = []
    for row in scores:
        values = (row if bias is None else row + bias.float()).tolist()
        size = len(values) // num_groups
        groups = []
        for g in range(num_groups):
            members = values[g * size : (g + 1) * size]
            first, *rest = (members[i] for i in best_first(members))
            groups.append(float(np.float32(first) + np.float32(rest[0])) if group_score == "top2_sum" else first)
        kept = best_first(groups)[: topk_groups or num_groups]
        rows.append(best_first([v if e // size in kept else -INF for e, v in enumerate(values)])[:k])
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), k)


def exact(
    logits: Tensor, ids: Tensor, score: str, renormalize: bool, scaling_factor: float = 1.0, eps: float = 1e-20
) -> tuple[Tensor, Tensor]:
    """Weights and scores in float64 for given ids, -1 for none: plain torch, differentiable by torch."""
    x = logits.double()
    if score == "softmax":
        scores = torch.softmax(x, 1)
    elif score == "sigmoid":
        scores = torch.sigmoid(x)
    elif score == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(x, threshold=1000.0).sqrt()
    else:
        scores = x
    none = ids < 0
    weights = scores.gather(1, ids.long().clamp(min=0))
    if score == "topk_softmax":
        weights = torch.softmax(weights.masked_fill(none, -INF), 1)
    weights = weights.masked_fill(none, 0.0)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + eps)
    return weights * scaling_factor, scores


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("groups", [{}, GROUPED, {**GROUPED, "group_score": "max"}], ids=["flat", "top2_sum", "max"])
@pytest.mark.parametrize("biased", [False, True])
def test_selection(backend: str, score: str, groups: dict[str, Any], biased: bool) -> None:
    logits = random_logits(40, 64)
    logits[20:] = logits[20:].round()  # ties
    logits[30:, ::7] = NAN
    logits[31:, ::5] = -INF
    logits[35:, ::9] = INF
    logits[39] = -INF
    bias = random_logits(64, seed=1, scale=0.3).round(decimals=1) if biased else None
    found = gating_topk(logits, 6, score=score, bias=bias, backend=backend, **groups)
    assert_same_bits(found.expert_ids, by_hand(found.scores, 6, bias, **groups))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_float64_mathematics(backend: str, score: str, renormalize: bool, dtype: torch.dtype) -> None:
    if dtype is torch.float64:
        backend = "reference"  # its alone
    # Of moderate size: s (1 - s) from a rounded s loses digits where s is close to 1.
    logits = random_logits(33, 100, dtype=dtype, scale=0.8).requires_grad_()
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scaling_factor": 2.5}
    found = gating_topk(logits, 5, backend=backend, weights_dtype=dtype, **options)
    twin = logits.detach().double().requires_grad_()
    weights, scores = exact(twin, found.expert_ids, **options)
    assert_close_to_exact(found.weights, weights, "weights")
    assert_close_to_exact(found.scores, scores, "scores")
    grad_weights, grad_scores = random_logits(33, 5, seed=2, dtype=dtype), random_logits(33, 100, seed=3)
    for through in ((True, False), (False, True), (True, True)):
        kept = [i for i in (0, 1) if through[i]]
        ours, theirs = (found.weights, found.scores), (weights, scores)
        grads = grad_weights, grad_scores.to(found.scores.dtype)
        (actual,) = torch.autograd.grad([ours[i] for i in kept], logits, [grads[i] for i in kept], retain_graph=True)
        (expected,) = torch.autograd.grad(
            [theirs[i] for i in kept], twin, [grads[i].double() for i in kept], retain_graph=True
        )
        assert actual.dtype is dtype
        assert_close_to_exact(actual, expected, f"gradient through {through}")


# ---------------------------------------------------------------------------- bits

SPECIAL = torch.tensor(
    [0.0, -0.0, 0.5, 0.5, 1.0, -1.0, NAN, -NAN, INF, -INF, 1e-40, 89.0, -89.0, 104.5, -104.5, 16.6, -7.3, 3e38, 1e-8]
)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 8]))
    experts = groups * draw(st.sampled_from([2, 3, 5, 16, 31, 32, 33, 64, 65, 86]))
    if groups == 1 and draw(st.booleans()):
        experts = draw(st.sampled_from([1, 4, 17, 63, 127, 128, 129, 255, 256, 257, 300, 513, 1100]))
    topk_groups = draw(st.integers(1, groups))
    most = experts // groups * topk_groups
    k = draw(st.one_of(st.integers(1, min(most, 9)), st.sampled_from([most, max(1, most // 2)])))
    tokens = draw(st.sampled_from([0, 1, 2, 5]))
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    logits = draw(st.sampled_from([0.01, 1.0, 30.0])) * torch.randn(tokens, experts, generator=generator)
    if draw(st.booleans()):
        logits = logits.round(decimals=1)
    share = draw(st.sampled_from([0.0, 0.0, 0.1, 0.9]))
    special = SPECIAL[torch.randint(len(SPECIAL), logits.shape, generator=generator)]
    logits = torch.where(torch.rand(logits.shape, generator=generator) < share, special, logits)
    bias = expert_ids = None
    if draw(st.booleans()):
        bias = torch.randn(experts, generator=generator).to(draw(st.sampled_from(FLOATS)))
    if draw(st.sampled_from([False, False, True])):
        kind = draw(st.sampled_from([torch.int64, torch.int32, torch.int16]))
        expert_ids = torch.randint(-1, experts + 1, (tokens, k), generator=generator).to(kind)
    return {
        "logits": logits.to(draw(st.sampled_from(FLOATS))),
        "k": k,
        "score": draw(st.sampled_from(SCORES)),
        "bias": bias,
        "num_groups": groups,
        "topk_groups": topk_groups,
        "group_score": draw(st.sampled_from(["max", "top2_sum"])) if experts // groups > 1 else "max",
        "renormalize": draw(st.booleans()),
        "scaling_factor": draw(st.sampled_from([1.0, 2.5, -0.3])),
        "eps": draw(st.sampled_from([1e-20, 1e-3, 0.0])),
        "expert_ids": expert_ids,
        "weights_dtype": draw(st.sampled_from(FLOATS)),
    }


@settings(max_examples=200)
@given(case=cases(), with_scores=st.booleans(), out_dtype=st.sampled_from(FLOATS), names=BACKENDS)
def test_same_bits(case: dict[str, Any], with_scores: bool, out_dtype: torch.dtype, names: tuple[str, ...]) -> None:
    expected = gating_topk(**case, backend="reference")
    for name in names[1:]:
        actual = gating_topk(**case, backend=name)
        assert_same_bits(actual, expected, name)
    experts = case["logits"].shape[1]
    for ids, sorted_ids in zip(actual.expert_ids.tolist(), actual.expert_ids.sort(1).values.tolist(), strict=True):
        if case["expert_ids"] is None:
            assert len(set(ids)) == case["k"]
            assert 0 <= sorted_ids[0] <= sorted_ids[-1] < experts
    grads = torch.Generator().manual_seed(7)
    grad_weights = torch.randn(actual.weights.shape, generator=grads).to(case["weights_dtype"])
    options = {name: case[name] for name in ("score", "renormalize", "scaling_factor", "eps")}
    options["grad_scores"] = torch.randn(actual.scores.shape, generator=grads) if with_scores else None
    ids = actual.expert_ids if case["expert_ids"] is None else case["expert_ids"]
    expected, *others = (
        gating_topk_backward(actual.scores, grad_weights, ids, out_dtype=out_dtype, backend=name, **options)
        for name in names
    )
    for found in others:
        assert_same_bits(found, expected, where="gradient")


@pytest.mark.parametrize("score", SCORES)
def test_a_row_alone_and_in_a_batch_and_threads(score: str, threads: int) -> None:
    """B31: around every internal threshold of the size, and one row against many."""
    logits = random_logits(1100, 384, dtype=torch.bfloat16)
    grads = random_logits(1100, 8, seed=1)
    options: dict[str, Any] = {"score": score, "renormalize": True}
    whole = gating_topk(logits, 8, **GROUPED, **options)
    grad = gating_topk_backward(whole.scores, grads, whole.expert_ids, **options)
    reference = gating_topk(logits, 8, **GROUPED, **options, backend="reference")
    assert_same_bits(whole, reference)
    assert_same_bits(grad, gating_topk_backward(whole.scores, grads, whole.expert_ids, **options, backend="reference"))
    for rows in (slice(0, 1), slice(7, 28), slice(5, 27), slice(100, 1100)):
        part = gating_topk(logits[rows], 8, **GROUPED, **options)
        assert_same_bits(part, tuple(x[rows] for x in whole))
        assert_same_bits(gating_topk_backward(part.scores, grads[rows], part.expert_ids, **options), grad[rows])


def test_a_row_in_a_very_large_batch() -> None:
    logits = random_logits(1, 384).expand(65536, 384)
    whole = gating_topk(logits, 8)
    one = gating_topk(logits[:1], 8)
    for at in (0, 32767, 65535):
        assert_same_bits(tuple(x[at : at + 1] for x in whole), tuple(one))


# ---------------------------------------------------------------------------- elementary functions


def units(value: Tensor, true: Tensor) -> float:
    """The worst error in units in the last place of the true value."""
    exponent = torch.frexp(true.abs().clamp(min=2.0**-126))[1]
    return float(((value.double() - true).abs() / torch.exp2(exponent.double() - 24)).max())


def scores_of(x: Tensor, score: str, backend: str) -> Tensor:
    return gating_topk(x[None], 1, score=score, backend=backend).scores[0]


def test_exp() -> None:
    x = torch.linspace(-104.0, 88.72, 65536)
    assert units(reference.exp(x), x.double().exp()) < 0.97
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 89.0, 1000.0, -104.0, -1000.0])
    assert_same_bits(reference.exp(special), torch.tensor([NAN, INF, 0.0, 1.0, 1.0, INF, INF, 0.0, 0.0]))
    assert float(reference.exp(torch.tensor([-103.0]))) > 0  # subnormal, not flushed


def test_worst_errors(backend: str) -> None:
    x = torch.cat((torch.linspace(-87.0, 87.0, 200_001), torch.linspace(-3.0, 3.0, 100_000)))
    assert units(scores_of(x, "sigmoid", backend), torch.sigmoid(x.double())) < 2.3
    true = torch.nn.functional.softplus(x.double(), threshold=1000.0).sqrt()
    assert units(scores_of(x, "sqrtsoftplus", backend), true) < 1.6
    # From scores of any size back to the slope of sqrtsoftplus.
    s = torch.cat((torch.linspace(1e-6, 12.0, 100_001), torch.logspace(-18, 9, 50_000)))
    ids = torch.zeros(len(s), 1, dtype=torch.int32)
    slope = gating_topk_backward(
        s[:, None], torch.ones(len(s), 1), ids, score="sqrtsoftplus", renormalize=False, backend=backend
    )
    assert units(slope[:, 0], -torch.expm1(-(s.double() ** 2)) / (2 * s.double())) < 1.7
    edge = torch.tensor([[0.0], [INF], [NAN]])
    slope = gating_topk_backward(
        edge, torch.ones(3, 1), ids[:3], score="sqrtsoftplus", renormalize=False, backend=backend
    )
    assert_same_bits(slope, torch.tensor([[0.0], [0.0], [NAN]]))


def test_infinite_logits(backend: str) -> None:
    x = torch.tensor([INF, -INF, NAN])
    assert_same_bits(scores_of(x, "sigmoid", backend), torch.tensor([1.0, 0.0, NAN]))
    assert_same_bits(scores_of(x, "sqrtsoftplus", backend), torch.tensor([INF, 0.0, NAN]))
    rows = torch.tensor([[INF, 1.0], [-INF, -INF], [NAN, 0.0], [-INF, 0.0]])
    expected = torch.softmax(rows, 1)
    assert_same_bits(gating_topk(rows, 1, backend=backend).scores, expected)


# ---------------------------------------------------------------------------- the specification's numbers


def test_backward_example(backend: str) -> None:
    """aclnnMoeGatingTopKBackward: M = 4, N = 8, K = 2, scale 2.5, eps 1e-20."""
    scores = torch.tensor(
        [
            [0.5, 0.7, 0.3, 0.8, 0.2, 0.6, 0.9, 0.4],
            [0.6, 0.4, 0.8, 0.1, 0.7, 0.5, 0.3, 0.9],
            [0.2, 0.9, 0.5, 0.6, 0.8, 0.3, 0.7, 0.4],
            [0.8, 0.3, 0.6, 0.5, 0.4, 0.7, 0.2, 0.9],
        ]
    )
    grad = torch.tensor([[1.0, 0.5], [0.8, 0.3], [0.6, 0.9], [0.4, 0.7]])
    ids = torch.tensor([[3, 6], [2, 7], [1, 4], [0, 7]], dtype=torch.int32)
    found = gating_topk_backward(
        scores, grad, ids, score="sigmoid", renormalize=True, scaling_factor=2.5, eps=1e-20, backend=backend
    )
    expected = torch.zeros(4, 8)
    places = {(0, 3): 0.06228372, (0, 6): -0.03114188, (1, 2): 0.06228374, (1, 7): -0.03114187}
    places |= {(2, 1): -0.01868512, (2, 4): 0.03737024, (3, 0): -0.03737023, (3, 7): 0.01868513}
    for place, value in places.items():
        expected[place] = value
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=0.0)
    for dtype in HALVES:
        narrow = gating_topk_backward(
            scores, grad.to(dtype), ids, score="sigmoid", renormalize=None, scaling_factor=2.5, backend=backend
        )
        assert narrow.dtype is dtype
        torch.testing.assert_close(narrow.float(), expected, rtol=2e-2, atol=0.0)


def test_softmax_example(backend: str) -> None:
    """aclnnMoeGatingTopKSoftmax."""
    logits = torch.tensor([[0.1, 1.1, 2.1, 3.1], [4.1, 5.1, 6.1, 7.1], [8.1, 9.1, 10.1, 11.1]])
    found = gating_topk(logits, 2, backend=backend)
    assert found.expert_ids.tolist() == [[3, 2]] * 3
    torch.testing.assert_close(found.weights, torch.tensor([[0.643914, 0.236883]] * 3), rtol=0, atol=2e-6)


def test_given_ids_example(backend: str) -> None:
    """aclnnMoeGatingTopKV2: the experts of a token come from a table."""
    table = torch.tensor([[10, 42], [33, 127], [5, 88]], dtype=torch.int32)
    logits = random_logits(3, 256)
    found = gating_topk(logits, 2, expert_ids=table[[0, 2, 1]], renormalize=True, backend=backend)
    assert found.expert_ids.tolist() == [[10, 42], [5, 88], [33, 127]]
    assert_close_to_exact(found.weights, exact(logits, found.expert_ids, "softmax", True)[0])


def test_topk_softmax_is_not_softmax_renormalised(backend: str) -> None:
    logits = torch.tensor([[0.0, -200.0, -150.0]])
    assert gating_topk(logits, 2, score="topk_softmax", backend=backend).expert_ids.tolist() == [[0, 2]]
    # In float32 the softmax of both small ones is 0: a tie.
    assert gating_topk(logits, 2, renormalize=True, backend=backend).expert_ids.tolist() == [[0, 1]]


# ---------------------------------------------------------------------------- replay


def test_replay(backend: str) -> None:
    logits = random_logits(5, 16).requires_grad_()
    first = gating_topk(logits, 4, score="sigmoid", bias=random_logits(16, seed=1), backend=backend)
    again = gating_topk(logits, 4, score="sigmoid", expert_ids=first.expert_ids, backend=backend)
    assert_same_bits(again, tuple(first))
    grads = [torch.autograd.grad(g.weights.square().sum(), logits)[0] for g in (first, again)]
    assert_same_bits(*grads)


@pytest.mark.parametrize("dtype", (torch.int64, torch.int16, torch.uint8, torch.uint64), ids=str)
def test_replay_of_ids_that_lie_column_by_column(dtype: torch.dtype, backend: str) -> None:
    logits = torch.tensor([[0.0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 5, 1]])
    ids = torch.tensor([[3, 0, 2], [2, 1, 0]]).to(dtype).t()
    gating = gating_topk(logits, 2, score="sigmoid", renormalize=False, expert_ids=ids, backend=backend)
    assert gating.expert_ids.tolist() == [[3, 2], [0, 1], [2, 0]]
    scores = logits.double().sigmoid()
    assert_close_to_exact(gating.weights, scores.gather(1, ids.long()))
    grad = gating_topk_backward(
        gating.scores, torch.ones(3, 2), ids, score="sigmoid", renormalize=False, backend=backend
    )
    assert_close_to_exact(grad, torch.zeros(3, 4).double().scatter(1, ids.long(), 1.0) * scores * (1 - scores))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_replay_with_invalid_and_repeated_ids(backend: str, score: str, renormalize: bool) -> None:
    ids = torch.tensor([[3, -1, 3, 8], [2**32 + 1, 0, -(2**40), 5], [-1, 8, 9, 100], [7, 7, 7, 7]])
    clean = torch.where((ids >= 0) & (ids < 8), ids, -1)
    logits = random_logits(4, 8).requires_grad_()
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scaling_factor": -2.0}
    found = gating_topk(logits, 4, expert_ids=ids, backend=backend, **options)
    assert_same_bits(found.expert_ids, clean.int())
    assert bool((found.weights[clean < 0] == 0).all() and not found.weights[clean < 0].signbit().any())
    twin = logits.detach().double().requires_grad_()
    mathematics = exact(twin, clean, **options)[0]
    live = [0, 1, 3]  # torch's own softmax of nothing, row 2, is NaN
    assert_close_to_exact(found.weights[live], mathematics[live])
    grads = random_logits(4, 4, seed=3)
    (actual,) = torch.autograd.grad(found.weights, logits, grads)
    (expected,) = torch.autograd.grad(mathematics[live], twin, grads[live].double())
    assert_close_to_exact(actual[live], expected[live])
    assert_same_bits(actual[2], torch.zeros(8) * actual[2])
    plain = gating_topk_backward(found.scores.detach(), grads, ids, backend=backend, **options)
    assert_same_bits(plain, actual)


@pytest.mark.parametrize("dtype", op.INTEGERS)
def test_integer_dtypes_of_given_ids(backend: str, dtype: torch.dtype) -> None:
    """B131: an unsigned byte above 127 is no negative number."""
    experts = 100 if dtype is torch.int8 else 200
    logits = random_logits(2, experts)
    ids = torch.tensor([[experts - 70], [5]]).to(dtype)
    found = gating_topk(logits, 1, expert_ids=ids, backend=backend)
    assert found.expert_ids.tolist() == [[experts - 70], [5]]
    assert bool((found.weights > 0).all())
    grad = gating_topk_backward(found.scores, found.weights, ids, score="softmax", renormalize=False, backend=backend)
    assert grad[0].argmax() == experts - 70


def test_more_slots_than_experts(backend: str) -> None:
    ids = torch.tensor([[0, 1, 1, 0, 1]])
    found = gating_topk(torch.tensor([[0.0, 0.0]]), 5, expert_ids=ids, renormalize=True, backend=backend)
    torch.testing.assert_close(found.weights, torch.full((1, 5), 0.2))


# ---------------------------------------------------------------------------- reports


def test_b08_masked_groups_never_win(backend: str) -> None:
    target = torch.tensor([[0.5, 0.4, 0.3, 0.2]])
    logits = torch.log(target / (1 - target))
    bias = torch.tensor([-0.6, -0.6, -1.0, -1.0])
    for group_score in ("max", "top2_sum"):
        found = gating_topk(
            logits, 2, score="sigmoid", bias=bias, num_groups=2, topk_groups=1, group_score=group_score, backend=backend
        )
        assert found.expert_ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("score", SCORES)
def test_b10_rows_of_nan_and_infinities(backend: str, score: str) -> None:
    rows = torch.tensor([[NAN] * 5, [-INF] * 5, [INF] * 5, [NAN, 1.0, 2.0, 3.0, 4.0], [-INF, -INF, -INF, 0.0, -INF]])
    ids = gating_topk(rows, 3, score=score, backend=backend).expert_ids
    for row in ids.tolist():
        assert len(set(row)) == 3
        assert all(0 <= e < 5 for e in row)
    if score != "softmax":  # whose row is all NaN
        assert ids[3].tolist() == [0, 4, 3]
        assert ids[4].tolist() == [3, 0, 1]


def test_b11_no_perturbation_breaks_ties(backend: str) -> None:
    scores = torch.full((1, 8), 0.1)
    scores[0, 0], scores[0, 7] = 0.5, 0.5 + 6e-7
    assert gating_topk(scores, 1, score="topk_softmax", backend=backend).expert_ids.tolist() == [[7]]
    ties = torch.full((1, 4), 0.3)
    for score in SCORES:
        assert gating_topk(ties, 2, score=score, backend=backend).expert_ids.tolist() == [[0, 1]]


def test_b13_softmax_before_and_after(backend: str) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    before = gating_topk(logits, 2, backend=backend).weights
    after = gating_topk(logits, 2, score="topk_softmax", backend=backend).weights
    both = gating_topk(logits, 2, renormalize=True, backend=backend).weights
    torch.testing.assert_close(before, torch.tensor([[0.66524, 0.24473]]), rtol=0, atol=5e-6)
    torch.testing.assert_close(after, torch.tensor([[0.73106, 0.26894]]), rtol=0, atol=5e-6)
    torch.testing.assert_close(both, after, rtol=0, atol=1e-6)
    grads = [torch.autograd.grad(w, logits, torch.tensor([[1.0, -3.0]]))[0] for w in (both, after)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)
    one = gating_topk(logits, 1, score="topk_softmax", backend=backend).weights
    assert_same_bits(one, torch.ones(1, 1))
    (grad,) = torch.autograd.grad(one.sum(), logits)
    assert not grad.any()


def test_b16_one_expert_before_softmax_still_learns(backend: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
    weights = gating_topk(logits, 1, backend=backend).weights
    torch.testing.assert_close(weights, torch.tensor([[0.62853]]), rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(3 * weights.sum(), logits)
    p = torch.softmax(logits.detach(), 1)
    torch.testing.assert_close(grad, 3 * p[:, 1:2] * (torch.tensor([[0.0, 1.0, 0.0]]) - p))


def test_b17_normalised_or_not(backend: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    plain = gating_topk(logits, 2, backend=backend)
    normed = gating_topk(logits, 2, renormalize=True, backend=backend)
    after = gating_topk(logits, 2, score="topk_softmax", backend=backend)
    torch.testing.assert_close(plain.weights, torch.tensor([[0.6439, 0.2369]]), rtol=0, atol=5e-5)
    torch.testing.assert_close(normed.weights, torch.tensor([[0.7311, 0.2689]]), rtol=0, atol=5e-5)
    torch.testing.assert_close(after.weights, normed.weights, rtol=0, atol=1e-6)
    assert plain.expert_ids.tolist() == normed.expert_ids.tolist() == after.expert_ids.tolist() == [[3, 2]]


@pytest.mark.parametrize(("experts", "k"), [(1025, 4), (4096, 4), (8192, 8), (8192, 8192), (2000, 700)])
def test_b32_many_experts(experts: int, k: int) -> None:
    logits = random_logits(2, experts)
    found = gating_topk(logits, k, backend="cpu")
    assert_same_bits(found, gating_topk(logits, k, backend="reference"))
    assert_same_bits(found.expert_ids, by_hand(found.scores, k))


@pytest.mark.parametrize("reentrant", [False, True])
def test_b40_recomputation_chooses_the_same_experts(reentrant: bool) -> None:
    logits = random_logits(256, 16).round().bfloat16().requires_grad_()

    def step(x: Tensor) -> Tensor:
        found = gating_topk(x, 4, score="sigmoid")
        return found.weights * found.expert_ids

    plain = torch.autograd.grad(step(logits).square().sum(), logits)[0]
    again = torch.autograd.grad(checkpoint(step, logits, use_reentrant=False).square().sum(), logits)[0]
    assert_same_bits(again, plain)
    if reentrant:
        checkpoint(step, logits, use_reentrant=True).square().sum().backward()
        assert_same_bits(logits.grad, plain)


def test_b43_b103_all_weights_underflow(backend: str) -> None:
    logits = torch.full((1, 4), -200.0, requires_grad=True)
    bias = torch.tensor([1.0, 2.0, 0.0, 0.0])
    found = gating_topk(logits, 2, score="sigmoid", bias=bias, backend=backend)
    assert found.expert_ids.tolist() == [[1, 0]]
    assert_same_bits(found.weights, torch.zeros(1, 2))
    (grad,) = torch.autograd.grad(found.weights.sum(), logits)
    assert not grad.any()


def test_b44_eps_beside_a_tiny_sum(backend: str) -> None:
    found = gating_topk(torch.full((1, 8), -50.0), 8, score="sigmoid", backend=backend)
    assert len(set(found.weights[0].tolist())) == 1
    assert abs(float(found.weights.sum()) - 0.1337) < 1e-4
    without = gating_topk(torch.full((1, 8), -50.0), 8, score="sigmoid", eps=0.0, backend=backend)
    torch.testing.assert_close(without.weights, torch.full((1, 8), 0.125))


@pytest.mark.parametrize("k", [1, 3, 5, 6, 7, 9, 10, 14, 17, 22, 33, 64])
def test_b56_b148_any_k(backend: str, k: int) -> None:
    logits = random_logits(3, 64)
    found = gating_topk(logits, k, backend=backend)
    assert_same_bits(found.expert_ids, by_hand(found.scores, k))
    if k == 64:
        assert sorted(found.expert_ids[0].tolist()) == list(range(64))
    with pytest.raises(ValueError, match=r"gating_topk: k must be in 1\.\.64; got 65"):
        gating_topk(logits, 65, backend=backend)


@pytest.mark.parametrize("dtype", FLOATS)
def test_b61_b62_ties(backend: str, dtype: torch.dtype) -> None:
    def chosen(values: list[float], k: int) -> list[int]:
        logits = torch.tensor([values], dtype=dtype)
        return list(gating_topk(logits, k, score="topk_softmax", backend=backend).expert_ids[0].tolist())

    assert [chosen([3, 2, 3, 2, 1, 1], k) for k in (1, 2, 3, 4)] == [[0], [0, 2], [0, 2, 1], [0, 2, 1, 3]]
    assert chosen([1, 2, 5, 4, 5], 2) == [2, 4]
    assert chosen([-1] * 4, 2) == [0, 1]
    assert chosen([0.0, -0.0, 0.0, -0.0], 4) == [0, 1, 2, 3]
    assert chosen([0.1, 0.1000001, 0.1], 1) == ([1] if dtype is torch.float32 else [0])
    logits = torch.randint(0, 2, (20, 33), generator=torch.Generator().manual_seed(0)).to(dtype) / 2
    every = gating_topk(logits, 33, score="sigmoid", backend=backend).expert_ids
    for k in range(1, 33):
        assert_same_bits(gating_topk(logits, k, score="sigmoid", backend=backend).expert_ids, every[:, :k].clone())


def test_b77_bias_keeps_its_precision(backend: str) -> None:
    logits = torch.zeros(1, 2, dtype=torch.bfloat16)
    bias = torch.tensor([1.01, 1.011])
    assert gating_topk(logits, 1, score="sigmoid", bias=bias, backend=backend).expert_ids.tolist() == [[1]]
    narrow = gating_topk(logits, 1, score="sigmoid", bias=bias.bfloat16(), backend=backend)
    assert narrow.expert_ids.tolist() == [[0]]
    assert bias.dtype is torch.float32


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_b101_scaling_once_and_always(backend: str, score: str) -> None:
    target = torch.tensor([[0.5, 0.3, 0.2]])
    logits = (target.log() if score == "softmax" else torch.log(target / (1 - target))).requires_grad_()
    for renormalize, expected in ((False, [1.25, 0.75]), (True, [1.5625, 0.9375])):
        options: dict[str, Any] = {"score": score, "renormalize": renormalize, "backend": backend}
        scaled = gating_topk(logits, 2, scaling_factor=2.5, **options).weights
        torch.testing.assert_close(scaled, torch.tensor([expected]))
        plain = gating_topk(logits, 2, **options).weights
        up = torch.tensor([[1.0, 3.0]])
        (with_scale,), (without,) = (torch.autograd.grad(w, logits, up) for w in (scaled, plain))
        torch.testing.assert_close(with_scale, 2.5 * without)


@pytest.mark.parametrize("score", ["softmax", "topk_softmax"])
@pytest.mark.parametrize("bias", [None, torch.zeros(4)])
def test_b104_groups_under_softmax(backend: str, score: str, bias: Tensor | None) -> None:
    logits = torch.tensor([[3.0, 0.0, 2.9, 2.8]])
    options: dict[str, Any] = {"score": score, "bias": bias, "num_groups": 2, "topk_groups": 1, "backend": backend}
    assert gating_topk(logits, 2, group_score="top2_sum", **options).expert_ids.tolist() == [[2, 3]]
    assert gating_topk(logits, 2, group_score="max", **options).expert_ids.tolist() == [[0, 1]]


def test_b119_signs_of_nan(backend: str) -> None:
    logits = torch.tensor([[NAN, INF, 3.0, -INF], [-NAN, 1.0, 2.0, NAN]])
    negative = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
    assert bool(negative.isnan() and negative.signbit())
    logits[1, 0] = negative
    found = gating_topk(logits, 2, score="topk_softmax", backend=backend)
    assert found.expert_ids.tolist() == [[0, 1], [0, 3]]
    assert bool(found.weights.isnan().all())


@pytest.mark.parametrize("tokens", [15, 16, 17, 33, 257])
def test_b145_every_row_is_visited(backend: str, tokens: int) -> None:
    found = gating_topk(random_logits(tokens, 128), 8, backend=backend)
    assert bool((found.weights > 0).all())
    assert all(len(set(row)) == 8 for row in found.expert_ids.tolist())


@pytest.mark.parametrize("experts", [1, 2, 63, 64, 65, 255, 256, 257, 512, 1024])
def test_b146_sizes_around_the_blocks(backend: str, experts: int) -> None:
    logits = random_logits(1, experts)
    for score in SCORES:
        found = gating_topk(logits, min(experts, 9), score=score, backend=backend)
        assert_same_bits(found.expert_ids, by_hand(found.scores, min(experts, 9)))
        assert_close_to_exact(found.scores, exact(logits, found.expert_ids, score, False)[1])


@pytest.mark.parametrize("k", range(1, 8))
def test_b149_small_k_in_groups(backend: str, k: int) -> None:
    found = gating_topk(random_logits(9, 32), k, num_groups=4, topk_groups=2, backend=backend)
    assert_same_bits(found.expert_ids, by_hand(found.scores, k, None, 4, 2))
    for row in found.expert_ids.tolist():
        assert len(set(row)) == k
        assert len({e // 8 for e in row}) <= 2


def test_b151_offsets_beyond_int32(backend: str) -> None:
    """Rows 2^30 + 64 elements apart, in memory of which only three rows are ever touched."""
    step = 2**30 + 64
    try:
        memory = mmap.mmap(-1, 2 * (2 * step + 256))
    except OSError:
        pytest.skip("no 4.3 GB of address space")
    logits = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((3, 256), (step, 1))
    for row, best in enumerate((7, 250, 100)):
        logits[row, best] = 5.0
    found = gating_topk(logits, 1, backend=backend)
    assert found.expert_ids.tolist() == [[7], [250], [100]]
    grad = gating_topk_backward(found.scores, torch.ones(3, 1), found.expert_ids, score="softmax", renormalize=False,
                                out=logits, backend=backend)  # fmt: skip
    assert grad.data_ptr() == logits.data_ptr()
    assert logits.argmax(1).tolist() == [7, 250, 100]


def guarded(tensor: Tensor) -> Tensor:
    """A copy whose last element ends where a page begins that nobody may touch."""
    page = mmap.PAGESIZE
    size = -(-max(tensor.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(page), 0) == 0
    start = size - tensor.nbytes
    copy = torch.frombuffer(memory, dtype=tensor.dtype, offset=start, count=tensor.numel()).view(tensor.shape)
    return copy.copy_(tensor)


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="guard pages need mprotect")
@pytest.mark.parametrize("experts", [*range(1, 18), 63, 64, 65, 130])
def test_b152_nothing_is_read_or_written_beyond_the_end(backend: str, experts: int) -> None:
    k = min(experts, 3)
    for dtype in FLOATS[-1:] if backend == "triton" else FLOATS:
        logits = guarded(random_logits(2, experts, dtype=dtype))
        bias = guarded(torch.zeros(experts))
        out = guarded(torch.zeros(2, k, dtype=dtype)), guarded(torch.zeros(2, k).int()), guarded(logits.float())
        for score in SCORES:
            gating_topk(logits, k, score=score, bias=bias, out=out, weights_dtype=dtype, backend=backend)
            assert_same_bits(
                tuple(out),
                tuple(gating_topk(logits, k, score=score, bias=bias, weights_dtype=dtype, backend="reference")),
            )
            gating_topk(logits, k, score=score, expert_ids=out[1].clone(), out=out, backend=backend)
            gating_topk_backward(
                out[2], out[0], out[1], score=score, renormalize=True, grad_scores=guarded(out[2]),
                out=guarded(logits), backend=backend,
            )  # fmt: skip
    one = gating_topk(torch.zeros(1, 1), 1, score="sigmoid", renormalize=False, bias=torch.zeros(1))
    assert (one.expert_ids.item(), one.weights.item()) == (0, 0.5)


def test_b158_scores_in_float32_whatever_comes(backend: str) -> None:
    logits = torch.tensor([[2.0001, 2.0, 1.9], [2.0, 2.0001, 1.9]])
    assert gating_topk(logits, 1, backend=backend).expert_ids.tolist() == [[0], [1]]
    half = logits.bfloat16().requires_grad_()
    found = gating_topk(half, 1, backend=backend)
    assert found.expert_ids.tolist() == [[0], [0]]
    assert (found.weights.dtype, found.scores.dtype) == (torch.float32, torch.float32)
    (grad,) = torch.autograd.grad(found.weights.sum(), half)
    assert grad.dtype is torch.bfloat16


# ---------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradcheck(score: str, renormalize: bool) -> None:
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
    assert gradgradcheck(backward, (scores, *grads), fast_mode=True)


def test_second_derivatives_at_the_limits() -> None:
    """sqrtsoftplus of -inf is 0, and so is its slope: no 0/0 on the way."""
    logits = torch.tensor([[-INF, -800.0, -1.0, 700.0]], dtype=torch.float64, requires_grad=True)
    found = gating_topk(logits, 4, score="sqrtsoftplus", renormalize=False)
    (grad,) = torch.autograd.grad(found.scores.sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), logits)
    assert bool(grad.isfinite().all() and second.isfinite().all())
    assert grad[0, 0] == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_second_derivatives_in_low_precision(backend: str, dtype: torch.dtype) -> None:
    logits = random_logits(4, 9, dtype=dtype).requires_grad_()
    twin = logits.detach().double().requires_grad_()

    def second(x: Tensor, **where: str) -> Tensor:
        found = gating_topk(x, 3, score="sigmoid", **where)
        (first,) = torch.autograd.grad(found.weights[:, 0].sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    actual = second(logits, backend=backend)
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.double(), second(twin), rtol=0.03, atol=0.01 if dtype in HALVES else 1e-6)


def test_only_what_was_used_gets_a_gradient(backend: str) -> None:
    logits = random_logits(3, 8).requires_grad_()
    bias = random_logits(8, seed=1).requires_grad_()
    found = gating_topk(logits, 2, score="sigmoid", bias=bias, backend=backend)
    assert not found.expert_ids.requires_grad
    from_scores, none = torch.autograd.grad(found.scores.sum(), (logits, bias), retain_graph=True, allow_unused=True)
    assert none is None
    s = found.scores.detach()
    torch.testing.assert_close(from_scores, s * (1 - s))
    found.weights.sum().backward()
    assert bias.grad is None
    assert logits.grad is not None


def test_in_place_on_the_results(backend: str) -> None:
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


def test_strided_logits_and_gradients(backend: str) -> None:
    wide = random_logits(6, 20)
    expected = gating_topk(wide[:, 3:15].contiguous(), 4, backend=backend)
    for view in (wide[:, 3:15], wide.t().contiguous().t()[:, 3:15], wide[:, 3:15].flip(1).contiguous().flip(1)):
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
def test_opcheck(score: str) -> None:
    logits, bias = random_logits(3, 8).requires_grad_(), random_logits(8)
    ids = torch.tensor([[0, 1], [2, -1], [9, 3]])
    forward, backward = torch.ops.moeroute.gating_topk.default, torch.ops.moeroute.gating_topk_backward.default
    for given_ids in (None, ids):
        torch.library.opcheck(
            forward, (logits, bias, given_ids, 2, score, 2, 1, "max", True, 2.0, 1e-20, torch.bfloat16, None)
        )
    scores, grad = random_logits(3, 8).sigmoid().requires_grad_(), random_logits(3, 2).requires_grad_()
    for extra in (None, random_logits(3, 8).requires_grad_()):
        torch.library.opcheck(backward, (scores, grad, ids, extra, score, True, 2.0, 1e-20, torch.float32, None))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_break(backend: str, dynamic: bool) -> None:
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
        assert_same_bits(*grads)


@pytest.mark.parametrize("score", SCORES)
def test_transforms(backend: str, score: str) -> None:
    logits, tangent = random_logits(4, 8), random_logits(4, 8, seed=1)
    ids = gating_topk(logits, 3, score=score).expert_ids

    def ours(x: Tensor) -> Tensor:
        return gating_topk(x, 3, score=score, backend=backend).weights

    def mathematics(x: Tensor) -> Tensor:
        return exact(x, ids, score, op.RENORMALIZED[score])[0]

    twin, twin_tangent = logits.double(), tangent.double()
    primal, moved = torch.func.jvp(ours, (logits,), (tangent,))
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


def test_vmap_over_the_bias(backend: str) -> None:
    logits, bias = random_logits(3, 4, 8), random_logits(3, 8, seed=1)

    def ids(x: Tensor, b: Tensor) -> Tensor:
        return gating_topk(x, 2, bias=b, backend=backend).expert_ids

    together = torch.func.vmap(ids)(logits, bias)
    assert_same_bits(together, torch.stack([ids(x, b) for x, b in zip(logits, bias, strict=True)]))


def test_autocast_and_inference_mode(backend: str) -> None:
    logits = random_logits(3, 8)
    expected = tuple(gating_topk(logits, 2, backend=backend))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(gating_topk(logits, 2, backend=backend), expected)
        assert_same_bits(gating_topk(logits.clone().requires_grad_(), 2, backend=backend), expected)
    with torch.inference_mode():
        assert_same_bits(gating_topk(logits, 2, backend=backend), expected)


# ---------------------------------------------------------------------------- out, emptiness, errors


@pytest.mark.parametrize("dtype", FLOATS)
def test_out(backend: str, dtype: torch.dtype) -> None:
    logits, ids = random_logits(5, 70, dtype=dtype), None
    whole = torch.full((5, 9), 7.0, dtype=dtype), torch.full((5, 9), 77).int(), torch.full((5, 100), 7.0)
    out = whole[0][:, 2:6], whole[1][:, 2:6], whole[2][:, 11:81]
    for _ in range(2):
        found = gating_topk(logits, 4, score="sigmoid", out=out, expert_ids=ids, backend=backend)
        expected = gating_topk(logits, 4, score="sigmoid", weights_dtype=dtype, expert_ids=ids, backend=backend)
        assert_same_bits(tuple(found), tuple(expected))
        assert found.weights is out[0]
        assert all(bool((x[:, -1] == sentinel).all()) for x, sentinel in zip(whole, (7, 77, 7), strict=True))
        assert all(bool((x[:, 1] == sentinel).all()) for x, sentinel in zip(whole, (7, 77, 7), strict=True))
        ids = expected.expert_ids
    wide = torch.full((5, 100), 7.0, dtype=dtype)
    options: dict[str, Any] = {"score": "sigmoid", "renormalize": True, "backend": backend}
    grad = gating_topk_backward(out[2], out[0], ids, out=wide[:, 11:81], **options)
    assert_same_bits(grad, gating_topk_backward(out[2], out[0], ids, **options))
    assert bool((wide[:, :11] == 7).all() and (wide[:, 81:] == 7).all())


@pytest.mark.parametrize("score", SCORES)
def test_no_tokens(backend: str, score: str) -> None:
    logits = torch.empty(0, 8, requires_grad=True)
    found = gating_topk(logits, 3, score=score, **{**GROUPED, "num_groups": 4}, backend=backend)
    assert [list(x.shape) for x in found] == [[0, 3], [0, 3], [0, 8]]
    (grad,) = torch.autograd.grad(found.weights.sum() + found.scores.sum(), logits)
    assert grad.shape == (0, 8)


def test_inputs_stay_as_they_are(backend: str) -> None:
    logits, bias, ids = random_logits(3, 8), random_logits(8), torch.tensor([[1, 9]] * 3, dtype=torch.int32)
    copies = [x.clone() for x in (logits, bias, ids)]
    found = gating_topk(logits, 2, bias=bias, expert_ids=ids, backend=backend)
    gating_topk_backward(found.scores, found.weights, ids, score="softmax", renormalize=False, backend=backend)
    assert_same_bits([logits, bias, ids], copies)
    assert not any(x.data_ptr() == y.data_ptr() for x in found for y in (logits, bias, ids))


LOGITS = torch.zeros(3, 8)
FORWARD_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": [[0.0]]}, TypeError, "logits must be a torch.Tensor; got list"),
    ({"logits": torch.zeros(8)}, ValueError, r"logits must be \[T, E\] with E >= 1; got shape \[8\]"),
    ({"logits": torch.zeros(3, 0)}, ValueError, r"logits must be .*; got shape \[3, 0\]"),
    ({"logits": torch.zeros(3, 8, dtype=torch.int32)}, TypeError, "logits must be float16, .*; got torch.int32"),
    ({"k": 0}, ValueError, r"k must be in 1\.\.8; got 0"),
    ({"k": -1}, ValueError, r"k must be in 1\.\.8; got -1"),
    ({"k": 9}, ValueError, r"k must be in 1\.\.8; got 9"),
    ({"k": 2.0}, TypeError, "k must be an int; got float"),
    ({"k": True}, TypeError, "k must be an int; got bool"),
    ({"k": 3, "num_groups": 4, "topk_groups": 1}, ValueError, r"k must be in 1\.\.2; got 3"),
    ({"score": "tanh"}, ValueError, "score must be one of 'softmax', .*; got 'tanh'"),
    ({"num_groups": 3}, ValueError, "num_groups must be a divisor of E = 8; got 3"),
    ({"num_groups": 0}, ValueError, r"num_groups must be in 1\.\.8; got 0"),
    ({"num_groups": 16}, ValueError, r"num_groups must be in 1\.\.8; got 16"),
    ({"num_groups": "2"}, TypeError, "num_groups must be an int; got str"),
    ({"num_groups": 4, "topk_groups": 5}, ValueError, r"topk_groups must be in 1\.\.4; got 5"),
    ({"num_groups": 4, "topk_groups": 0}, ValueError, r"topk_groups must be in 1\.\.4; got 0"),
    ({"group_score": "mean"}, ValueError, "group_score must be one of 'max', 'top2_sum'; got 'mean'"),
    ({"num_groups": 8, "group_score": "top2_sum"}, ValueError, "group_score must be 'max' where groups have one"),
    ({"renormalize": 1}, TypeError, "renormalize must be a bool or None; got int"),
    ({"eps": NAN}, ValueError, "eps must be finite; got nan"),
    ({"eps": INF}, ValueError, "eps must be finite; got inf"),
    ({"eps": "0"}, TypeError, "eps must be a float; got str"),
    ({"scaling_factor": NAN}, ValueError, "scaling_factor must be finite; got nan"),
    ({"scaling_factor": -INF}, ValueError, "scaling_factor must be finite; got -inf"),
    ({"scaling_factor": 1e39}, ValueError, "scaling_factor must be finite in float32; got 1e"),
    ({"bias": [0.0]}, TypeError, "bias must be a torch.Tensor; got list"),
    ({"bias": torch.zeros(7)}, ValueError, r"bias must be \[E\] with E = 8, as logits; got shape \[7\]"),
    ({"bias": torch.zeros(1, 8)}, ValueError, r"bias must be \[E\] .*; got shape \[1, 8\]"),
    ({"bias": torch.zeros(8).int()}, TypeError, "bias must be float16, .*; got torch.int32"),
    ({"bias": torch.zeros(8, device="meta")}, ValueError, "bias must be on cpu, as logits; got meta"),
    ({"expert_ids": [[0, 1]] * 3}, TypeError, "expert_ids must be a torch.Tensor; got list"),
    ({"expert_ids": torch.zeros(3, 3).long()}, ValueError, r"expert_ids must be \[T, K\] with T = 3 and K = 2; got"),
    ({"expert_ids": torch.zeros(2, 2).long()}, ValueError, r"expert_ids must be .*; got shape \[2, 2\]"),
    ({"expert_ids": torch.zeros(3, 2)}, TypeError, "expert_ids must be of an integer dtype; got torch.float32"),
    ({"expert_ids": torch.zeros(3, 2).bool()}, TypeError, "expert_ids must be of an integer dtype; got torch.bool"),
    ({"expert_ids": torch.zeros(3, 2, device="meta").long()}, ValueError, "expert_ids must be on cpu, as logits; got"),
    ({"weights_dtype": torch.int32}, TypeError, "weights_dtype must be one of torch.float16, .*; got torch.int32"),
    ({"weights_dtype": torch.float64}, TypeError, "weights_dtype must be one of torch.float16, .*; got torch.float64"),
    ({"weights_dtype": "float32"}, TypeError, "weights_dtype must be one of .*; got str"),
    ({"backend": "npu"}, ValueError, "backend must be one of 'reference', .*; got 'npu'"),
    ({"logits": LOGITS.double(), "backend": "cpu"}, ValueError, "backend must be .*float64"),
    ({"out": LOGITS}, TypeError, "out must be a tuple of three tensors; got Tensor"),
]


@pytest.mark.parametrize(("change", "error", "message"), FORWARD_ERRORS)
def test_forward_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logits": LOGITS, "k": 2, **change}
    with pytest.raises(error, match=r"^moeroute\.gating_topk: " + message):
        gating_topk(**arguments)


BACKWARD_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scores": None}, TypeError, "scores must be a torch.Tensor; got NoneType"),
    ({"scores": torch.zeros(3)}, ValueError, r"scores must be \[T, E\] with E >= 1; got shape \[3\]"),
    ({"scores": LOGITS.half()}, TypeError, "scores must be float32 or float64; got torch.float16"),
    ({"grad_weights": torch.zeros(2, 2)}, ValueError, r"grad_weights must be \[T, K\] with T = 3, as scores; got"),
    ({"grad_weights": torch.zeros(3, 0)}, ValueError, r"grad_weights must be \[T, K\] with K >= 1; got"),
    ({"grad_weights": torch.zeros(3, 2).int()}, TypeError, "grad_weights must be float16, .*; got torch.int32"),
    ({"grad_weights": torch.zeros(3, 2).double()}, TypeError, "grad_weights must be float64 with float64 scores only"),
    ({"grad_weights": torch.zeros(3, 2, device="meta")}, ValueError, "grad_weights must be on cpu, as scores; got"),
    ({"expert_ids": torch.zeros(3, 3).int()}, ValueError, r"expert_ids must be \[T, K\] with T = 3 and K = 2; got"),
    ({"expert_ids": torch.zeros(3, 2)}, TypeError, "expert_ids must be of an integer dtype; got torch.float32"),
    ({"score": "tanh"}, ValueError, "score must be one of"),
    ({"renormalize": 0}, TypeError, "renormalize must be a bool or None; got int"),
    ({"eps": NAN}, ValueError, "eps must be finite; got nan"),
    ({"scaling_factor": None}, TypeError, "scaling_factor must be a float; got NoneType"),
    ({"grad_scores": torch.zeros(3, 7)}, ValueError, r"grad_scores must be \[3, 8\], as scores; got shape \[3, 7\]"),
    ({"grad_scores": LOGITS.half()}, TypeError, "grad_scores must be torch.float32, as scores; got torch.float16"),
    ({"out_dtype": torch.float64}, TypeError, "out_dtype must be one of .*; got torch.float64"),
    ({"backend": "npu"}, ValueError, "backend must be one of"),
    ({"out": LOGITS[:, :7]}, ValueError, r"out must be of shape \[3, 8\]; got shape \[3, 7\]"),
    ({"out": torch.zeros(8, 3).t()}, ValueError, "out must be a tensor with contiguous rows; got strides"),
    ({"out": torch.zeros(1, 8).expand(3, 8)}, ValueError, "out must be a tensor whose elements do not overlap; got"),
    ({"out": LOGITS}, ValueError, "out must be memory of its own; got memory shared with an input"),
    ({"out": torch.zeros(3, 8), "out_dtype": torch.float16}, TypeError, "out must be torch.float16; got torch.float32"),
]


@pytest.mark.parametrize(("change", "error", "message"), BACKWARD_ERRORS)
def test_backward_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"scores": LOGITS, "grad_weights": torch.zeros(3, 2), "expert_ids": torch.zeros(3, 2).int()}
    with pytest.raises(error, match=r"^moeroute\.gating_topk_backward: " + message):
        gating_topk_backward(**{**arguments, "score": "sigmoid", "renormalize": True, **change})


def test_errors_of_out_leave_it_as_it_is() -> None:
    def fresh() -> list[Tensor]:
        return [torch.full((3, 2), 7.0), torch.full((3, 2), 7).int(), torch.full((3, 8), 7.0)]

    changes: list[tuple[int, Callable[[Tensor], Tensor], type[Exception], str]] = [
        (0, lambda x: x.double(), TypeError, "weights_dtype must be one of"),
        (0, lambda x: x[:2], ValueError, r"out\[0\] must be of shape \[3, 2\]"),
        (1, lambda x: x.long(), TypeError, r"out\[1\] must be torch.int32; got torch.int64"),
        (2, lambda x: x.half(), TypeError, r"out\[2\] must be torch.float32; got torch.float16"),
        (2, lambda x: x.t().contiguous().t(), ValueError, r"out\[2\] must be a tensor with contiguous rows"),
    ]
    for which, change, error, message in changes:
        out = fresh()
        out[which] = change(out[which])
        with pytest.raises(error, match=message):
            gating_topk(LOGITS, 2, out=tuple(out))
        assert all(bool((x == 7).all()) for x in out)
    with pytest.raises(ValueError, match=r"out\[0\] must be None where gradients are recorded"):
        gating_topk(LOGITS.clone().requires_grad_(), 2, out=tuple(fresh()))
    with pytest.raises(ValueError, match=r"out\[2\] must be memory of its own"):
        gating_topk(LOGITS, 2, out=(*fresh()[:2], LOGITS))
    assert not LOGITS.any()


def test_large_scaling_in_float64() -> None:
    found = gating_topk(torch.zeros(1, 2, dtype=torch.float64), 1, scaling_factor=1e100)
    assert found.weights.item() == 0.5e100
    assert isinstance(found, moeroute.Gating)
