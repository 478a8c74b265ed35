"""Gating against float64 mathematics and between backends, worked numbers, given experts."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gating_by_hand import FLOATS, GROUPED, HALVES, INF, NAN, SCORES, by_hand, exact, random_logits
from moeroute import dtypes, gating_topk, gating_topk_backward, look_up_expert_ids
from moeroute.dispatch import Backend
from moeroute.ops.gating import reference
from moeroute.ops.gating.op import GroupScore, Score
from moeroute.testing import assert_close_to_exact, assert_same_bits
from strategies import BACKENDS

GROUPS: list[dict[str, Any]] = [{}, *({**GROUPED, "group_score": how} for how in ("top2_sum", "max", 3, 8))]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("groups", GROUPS, ids=["flat", "top2_sum", "max", "3", "8"])
@pytest.mark.parametrize("biased", [False, True])
def test_selection(backend: Backend, score: Score, groups: dict[str, Any], biased: bool) -> None:
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
def test_float64_mathematics(
    subtests: pytest.Subtests, backend: Backend, score: Score, renormalize: bool, dtype: torch.dtype
) -> None:
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
        with subtests.test(through=through):
            kept = [i for i in (0, 1) if through[i]]
            ours, theirs = (found.weights, found.scores), (weights, scores)
            grads = grad_weights, grad_scores.to(found.scores.dtype)
            (actual,) = torch.autograd.grad(
                [ours[i] for i in kept], logits, [grads[i] for i in kept], retain_graph=True
            )
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
    topk_groups, size = draw(st.integers(1, groups)), experts // groups
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
        "group_score": draw(st.sampled_from(["max", *(["top2_sum"] if size > 1 else []), (size + 1) // 2, size])),
        "renormalize": draw(st.booleans()),
        "scaling_factor": draw(st.sampled_from([1.0, 2.5, -0.3])),
        "eps": draw(st.sampled_from([1e-20, 1e-3, 0.0])),
        "expert_ids": expert_ids,
        "weights_dtype": draw(st.sampled_from(FLOATS)),
    }


@settings(max_examples=200)
@given(case=cases(), with_scores=st.booleans(), out_dtype=st.sampled_from(FLOATS), names=BACKENDS)
def test_same_bits(case: dict[str, Any], with_scores: bool, out_dtype: torch.dtype, names: tuple[Backend, ...]) -> None:
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
    gradient, *others = (
        gating_topk_backward(actual.scores, grad_weights, ids, out_dtype=out_dtype, backend=name, **options)
        for name in names
    )
    for found in others:
        assert_same_bits(found, gradient, where="gradient")


@pytest.mark.parametrize("score", SCORES)
def test_a_row_alone_and_in_a_batch_and_threads(subtests: pytest.Subtests, score: Score, threads: int) -> None:
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
        with subtests.test(rows=rows):
            part = gating_topk(logits[rows], 8, **GROUPED, **options)
            assert_same_bits(part, tuple(x[rows] for x in whole))
            assert_same_bits(gating_topk_backward(part.scores, grads[rows], part.expert_ids, **options), grad[rows])


def test_a_row_in_a_very_large_batch(subtests: pytest.Subtests) -> None:
    logits = random_logits(1, 384).expand(65536, 384)
    whole = gating_topk(logits, 8)
    one = gating_topk(logits[:1], 8)
    for at in (0, 32767, 65535):
        with subtests.test(at=at):
            assert_same_bits(tuple(x[at : at + 1] for x in whole), tuple(one))


# ---------------------------------------------------------------------------- elementary functions


def units(value: Tensor, true: Tensor) -> float:
    """The worst error in units in the last place of the true value."""
    exponent = torch.frexp(true.abs().clamp(min=2.0**-126))[1]
    return float(((value.double() - true).abs() / torch.exp2(exponent.double() - 24)).max())


def scores_of(x: Tensor, score: Score, backend: Backend) -> Tensor:
    return gating_topk(x[None], 1, score=score, backend=backend).scores[0]


def test_exp() -> None:
    x = torch.linspace(-104.0, 88.72, 65536)
    assert units(reference.exp(x), x.double().exp()) < 0.97
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 89.0, 1000.0, -104.0, -1000.0])
    assert_same_bits(reference.exp(special), torch.tensor([NAN, INF, 0.0, 1.0, 1.0, INF, INF, 0.0, 0.0]))
    assert float(reference.exp(torch.tensor([-103.0]))) > 0  # subnormal, not flushed


def test_worst_errors(backend: Backend) -> None:
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


def test_infinite_logits(backend: Backend) -> None:
    x = torch.tensor([INF, -INF, NAN])
    assert_same_bits(scores_of(x, "sigmoid", backend), torch.tensor([1.0, 0.0, NAN]))
    assert_same_bits(scores_of(x, "sqrtsoftplus", backend), torch.tensor([INF, 0.0, NAN]))
    rows = torch.tensor([[INF, 1.0], [-INF, -INF], [NAN, 0.0], [-INF, 0.0]])
    expected = torch.softmax(rows, 1)
    assert_same_bits(gating_topk(rows, 1, backend=backend).scores, expected)


# ---------------------------------------------------------------------------- the specification's numbers


def test_backward_example(subtests: pytest.Subtests, backend: Backend) -> None:
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
        with subtests.test(dtype=dtype):
            narrow = gating_topk_backward(
                scores, grad.to(dtype), ids, score="sigmoid", renormalize=None, scaling_factor=2.5, backend=backend
            )
            assert narrow.dtype is dtype
            torch.testing.assert_close(narrow.float(), expected, rtol=2e-2, atol=0.0)


def test_softmax_example(backend: Backend) -> None:
    """aclnnMoeGatingTopKSoftmax."""
    logits = torch.tensor([[0.1, 1.1, 2.1, 3.1], [4.1, 5.1, 6.1, 7.1], [8.1, 9.1, 10.1, 11.1]])
    found = gating_topk(logits, 2, backend=backend)
    assert found.expert_ids.tolist() == [[3, 2]] * 3
    torch.testing.assert_close(found.weights, torch.tensor([[0.643914, 0.236883]] * 3), rtol=0, atol=2e-6)


def test_given_ids_example(backend: Backend) -> None:
    """aclnnMoeGatingTopKV2: the experts of a token come from a table."""
    table = torch.tensor([[10, 42], [33, 127], [5, 88]], dtype=torch.int32)
    logits = random_logits(3, 256)
    found = gating_topk(logits, 2, expert_ids=table[[0, 2, 1]], renormalize=True, backend=backend)
    assert found.expert_ids.tolist() == [[10, 42], [5, 88], [33, 127]]
    assert_close_to_exact(found.weights, exact(logits, found.expert_ids, "softmax", True)[0])


def test_topk_softmax_is_not_softmax_renormalised(backend: Backend) -> None:
    logits = torch.tensor([[0.0, -200.0, -150.0]])
    assert gating_topk(logits, 2, score="topk_softmax", backend=backend).expert_ids.tolist() == [[0, 2]]
    # In float32 the softmax of both small ones is 0: a tie.
    assert gating_topk(logits, 2, renormalize=True, backend=backend).expert_ids.tolist() == [[0, 1]]


def test_topk_sigmoid_selects_on_the_logits(backend: Backend) -> None:
    logits = torch.tensor([[20.0, 25.0, 30.0, 1.0]])  # in float32 the sigmoid of the first three is 1
    found = gating_topk(logits, 2, score="topk_sigmoid", backend=backend)
    assert found.expert_ids.tolist() == [[2, 1]]
    assert_same_bits(found.scores, logits)
    assert found.weights.tolist() == [[1.0, 1.0]]
    assert gating_topk(logits, 2, score="sigmoid", backend=backend).expert_ids.tolist() == [[0, 1]]
    biased = gating_topk(logits, 2, score="topk_sigmoid", bias=torch.tensor([0.0, 0, -20, 20]), backend=backend)
    assert biased.expert_ids.tolist() == [[1, 3]]
    assert_close_to_exact(biased.weights, torch.tensor([[25.0, 1.0]]).double().sigmoid())


def test_no_score_at_all(backend: Backend) -> None:
    logits = torch.tensor([[-3.0, 2.5, -INF, 4.0], [-0.0, 0.0, -1.0, NAN]], requires_grad=True)
    found = gating_topk(logits, 3, score="none", scaling_factor=2.0, backend=backend)
    assert found.expert_ids.tolist() == [[3, 1, 0], [3, 0, 1]]
    assert_same_bits(found.weights.detach(), torch.tensor([[8.0, 5.0, -6.0], [NAN, -0.0, 0.0]]))
    (grad,) = torch.autograd.grad(found.weights, logits, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert grad.tolist() == [[6.0, 4.0, 0.0, 2.0], [10.0, 12.0, 0.0, 8.0]]


def test_groups_by_the_sum_of_their_best(backend: Backend) -> None:
    """By 1, 2 and 3 of four values another group is the best."""
    logits = torch.tensor([[9.0, 0, 0, 0, 6.0, 6.0, 0, 0, 5.0, 5.0, 5.0, -9.0]])
    options: dict[str, Any] = {"score": "none", "num_groups": 3, "topk_groups": 1, "backend": backend}
    cases: list[tuple[GroupScore | int, int]] = [(1, 0), ("max", 0), (2, 4), ("top2_sum", 4), (3, 8), (4, 4)]
    for group_score, best in cases:
        assert gating_topk(logits, 1, group_score=group_score, **options).expert_ids.tolist() == [[best]]


def test_many_experts_in_groups_by_the_sum_of_their_best(backend: Backend) -> None:
    """Beyond what a tile of the Triton kernel holds: too many experts, too many groups."""
    for experts, groups in ((2112, 4), (72, 18)):
        logits = random_logits(3, experts).round(decimals=1)
        options: dict[str, Any] = {"num_groups": groups, "topk_groups": 2, "group_score": 3}
        found = gating_topk(logits, 4, score="none", backend=backend, **options)
        assert_same_bits(found.expert_ids, by_hand(logits, 4, **options))


def test_one_expert_renormalised_has_the_constant_weight_1(backend: Backend) -> None:
    logits = torch.tensor([[1.0, -2.0]], requires_grad=True)
    found = gating_topk(logits, 1, score="sigmoid", backend=backend)
    assert found.weights.tolist() == [[1.0]]
    assert torch.autograd.grad(found.weights.sum(), logits)[0].tolist() == [[0.0, 0.0]]
    other = gating_topk(logits, 1, score="sigmoid", renormalize=False, backend=backend)
    assert_close_to_exact(other.weights, torch.tensor([[1.0]]).double().sigmoid())


def test_a_sum_of_nothing_without_eps_is_nan(backend: Backend) -> None:
    logits = torch.full((1, 3), -200.0)  # whose sigmoid is 0
    assert gating_topk(logits, 2, score="sigmoid", backend=backend).weights.tolist() == [[0.0, 0.0]]
    weights = gating_topk(logits, 2, score="sigmoid", eps=0.0, backend=backend).weights
    assert_same_bits(weights, torch.full((1, 2), NAN))


def test_a_bias_asks_for_no_gradient(backend: Backend) -> None:
    bias = torch.zeros(4, requires_grad=True)
    found = gating_topk(torch.ones(2, 4), 2, score="sigmoid", bias=bias, backend=backend)
    assert not found.weights.requires_grad
    assert not found.scores.requires_grad


# ---------------------------------------------------------------------------- hash routing


@pytest.mark.parametrize("dtype", dtypes.INTEGERS)
def test_hash_routing(dtype: torch.dtype, backend: Backend) -> None:
    table = torch.tensor([[3, 0], [1, 2], [0, 1]]).to(dtype)
    keys = torch.tensor([2, 0, 99, 1]).to(dtype)
    ids = look_up_expert_ids(keys, table)
    assert ids.dtype is (dtype if dtype.is_signed else torch.int64)
    assert ids.tolist() == [[0, 1], [3, 0], [-1, -1], [1, 2]]
    logits = random_logits(4, 4).requires_grad_()
    found = gating_topk(logits, 2, score="sigmoid", expert_ids=ids, backend=backend)
    assert found.expert_ids.tolist() == ids.tolist()
    live = [0, 1, 3]
    assert_close_to_exact(found.weights[live], exact(logits, ids.long(), "sigmoid", True)[0][live])
    (grad,) = torch.autograd.grad(found.weights[:, 0].sum(), logits)
    assert ((grad != 0).sum(1) == torch.tensor([2, 2, 0, 2])).all()


def test_hash_routing_of_keys_out_of_range() -> None:
    table = torch.tensor([[3, 0], [1, 2]])
    keys = torch.tensor([-1, 2, 2**40, -(2**63), 1])
    assert look_up_expert_ids(keys, table).tolist() == [[-1, -1]] * 4 + [[1, 2]]
    assert look_up_expert_ids(keys, table[:0]).tolist() == [[-1, -1]] * 5
    assert look_up_expert_ids(keys[:0], table).shape == (0, 2)
    compiled = torch.compile(look_up_expert_ids, fullgraph=True)
    assert_same_bits(compiled(keys, table), look_up_expert_ids(keys, table))
    with pytest.raises(ValueError, match=r"look_up_expert_ids: keys must be of shape \[\*\]; got shape \[1, 2\]"):
        look_up_expert_ids(keys[None, :2], table)
    with pytest.raises(TypeError, match=r"look_up_expert_ids: table must be of an integer dtype; got torch\.float32"):
        look_up_expert_ids(keys, table.float())


# ---------------------------------------------------------------------------- replay


def test_replay(backend: Backend) -> None:
    logits = random_logits(5, 16).requires_grad_()
    first = gating_topk(logits, 4, score="sigmoid", bias=random_logits(16, seed=1), backend=backend)
    again = gating_topk(logits, 4, score="sigmoid", expert_ids=first.expert_ids, backend=backend)
    assert_same_bits(again, tuple(first))
    grads = [torch.autograd.grad(g.weights.square().sum(), logits)[0] for g in (first, again)]
    assert_same_bits(grads[0], grads[1])


@pytest.mark.parametrize("dtype", (torch.int64, torch.int16, torch.uint8, torch.uint64))
def test_replay_of_ids_that_lie_column_by_column(dtype: torch.dtype, backend: Backend) -> None:
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
def test_replay_with_invalid_and_repeated_ids(backend: Backend, score: Score, renormalize: bool) -> None:
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


@pytest.mark.parametrize("dtype", dtypes.INTEGERS)
def test_integer_dtypes_of_given_ids(backend: Backend, dtype: torch.dtype) -> None:
    """B131: an unsigned byte above 127 is no negative number."""
    experts = 100 if dtype is torch.int8 else 200
    logits = random_logits(2, experts)
    ids = torch.tensor([[experts - 70], [5]]).to(dtype)
    found = gating_topk(logits, 1, expert_ids=ids, backend=backend)
    assert found.expert_ids.tolist() == [[experts - 70], [5]]
    assert bool((found.weights > 0).all())
    grad = gating_topk_backward(found.scores, found.weights, ids, score="softmax", renormalize=False, backend=backend)
    assert grad[0].argmax() == experts - 70


def test_more_slots_than_experts(backend: Backend) -> None:
    ids = torch.tensor([[0, 1, 1, 0, 1]])
    found = gating_topk(torch.tensor([[0.0, 0.0]]), 5, expert_ids=ids, renormalize=True, backend=backend)
    torch.testing.assert_close(found.weights, torch.full((1, 5), 0.2))
