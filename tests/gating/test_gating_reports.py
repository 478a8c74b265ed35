"""Gating of inputs that broke other people's routers, by number."""

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gating_by_hand import FLOATS, INF, NAN, SCORES, by_hand, exact, random_logits
from moeroute import gating_topk, gating_topk_backward
from moeroute.dispatch import Backend
from moeroute.ops.gating.op import Score
from moeroute.testing import assert_close_to_exact, assert_same_bits
from pages import guarded


def test_b08_masked_groups_never_win(subtests: pytest.Subtests, backend: Backend) -> None:
    target = torch.tensor([[0.5, 0.4, 0.3, 0.2]])
    logits = torch.log(target / (1 - target))
    bias = torch.tensor([-0.6, -0.6, -1.0, -1.0])
    for group_score in ("max", "top2_sum"):
        with subtests.test(group_score=group_score):
            found = gating_topk(
                logits,
                2,
                score="sigmoid",
                bias=bias,
                num_groups=2,
                topk_groups=1,
                group_score=group_score,
                backend=backend,
            )
            assert found.expert_ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("score", SCORES)
def test_b10_rows_of_nan_and_infinities(backend: Backend, score: Score) -> None:
    rows = torch.tensor([[NAN] * 5, [-INF] * 5, [INF] * 5, [NAN, 1.0, 2.0, 3.0, 4.0], [-INF, -INF, -INF, 0.0, -INF]])
    ids = gating_topk(rows, 3, score=score, backend=backend).expert_ids
    for row in ids.tolist():
        assert len(set(row)) == 3
        assert all(0 <= e < 5 for e in row)
    if score != "softmax":  # whose row is all NaN
        assert ids[3].tolist() == [0, 4, 3]
        assert ids[4].tolist() == [3, 0, 1]


def test_b11_no_perturbation_breaks_ties(subtests: pytest.Subtests, backend: Backend) -> None:
    scores = torch.full((1, 8), 0.1)
    scores[0, 0], scores[0, 7] = 0.5, 0.5 + 6e-7
    assert gating_topk(scores, 1, score="topk_softmax", backend=backend).expert_ids.tolist() == [[7]]
    ties = torch.full((1, 4), 0.3)
    for score in SCORES:
        with subtests.test(score=score):
            assert gating_topk(ties, 2, score=score, backend=backend).expert_ids.tolist() == [[0, 1]]


def test_b13_softmax_before_and_after(backend: Backend) -> None:
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


def test_b16_one_expert_before_softmax_still_learns(backend: Backend) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
    weights = gating_topk(logits, 1, backend=backend).weights
    torch.testing.assert_close(weights, torch.tensor([[0.62853]]), rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(3 * weights.sum(), logits)
    p = torch.softmax(logits.detach(), 1)
    torch.testing.assert_close(grad, 3 * p[:, 1:2] * (torch.tensor([[0.0, 1.0, 0.0]]) - p))


def test_b17_normalised_or_not(backend: Backend) -> None:
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


def test_b43_b103_all_weights_underflow(backend: Backend) -> None:
    logits = torch.full((1, 4), -200.0, requires_grad=True)
    bias = torch.tensor([1.0, 2.0, 0.0, 0.0])
    found = gating_topk(logits, 2, score="sigmoid", bias=bias, backend=backend)
    assert found.expert_ids.tolist() == [[1, 0]]
    assert_same_bits(found.weights, torch.zeros(1, 2))
    (grad,) = torch.autograd.grad(found.weights.sum(), logits)
    assert not grad.any()


def test_b44_eps_beside_a_tiny_sum(backend: Backend) -> None:
    found = gating_topk(torch.full((1, 8), -50.0), 8, score="sigmoid", backend=backend)
    assert len(set(found.weights[0].tolist())) == 1
    assert abs(float(found.weights.sum()) - 0.1337) < 1e-4
    without = gating_topk(torch.full((1, 8), -50.0), 8, score="sigmoid", eps=0.0, backend=backend)
    torch.testing.assert_close(without.weights, torch.full((1, 8), 0.125))


@pytest.mark.parametrize("k", [1, 3, 5, 6, 7, 9, 10, 14, 17, 22, 33, 64])
def test_b56_b148_any_k(backend: Backend, k: int) -> None:
    logits = random_logits(3, 64)
    found = gating_topk(logits, k, backend=backend)
    assert_same_bits(found.expert_ids, by_hand(found.scores, k))
    if k == 64:
        assert sorted(found.expert_ids[0].tolist()) == list(range(64))
    with pytest.raises(ValueError, match=r"gating_topk: k must be in 1\.\.64; got 65"):
        gating_topk(logits, 65, backend=backend)


@pytest.mark.parametrize("dtype", FLOATS)
def test_b61_b62_ties(subtests: pytest.Subtests, backend: Backend, dtype: torch.dtype) -> None:
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
        with subtests.test(k=k):
            assert_same_bits(gating_topk(logits, k, score="sigmoid", backend=backend).expert_ids, every[:, :k].clone())


def test_b77_bias_keeps_its_precision(backend: Backend) -> None:
    logits = torch.zeros(1, 2, dtype=torch.bfloat16)
    bias = torch.tensor([1.01, 1.011])
    assert gating_topk(logits, 1, score="sigmoid", bias=bias, backend=backend).expert_ids.tolist() == [[1]]
    narrow = gating_topk(logits, 1, score="sigmoid", bias=bias.bfloat16(), backend=backend)
    assert narrow.expert_ids.tolist() == [[0]]
    assert bias.dtype is torch.float32


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_b101_scaling_once_and_always(subtests: pytest.Subtests, backend: Backend, score: Score) -> None:
    target = torch.tensor([[0.5, 0.3, 0.2]])
    logits = (target.log() if score == "softmax" else torch.log(target / (1 - target))).requires_grad_()
    for renormalize, expected in ((False, [1.25, 0.75]), (True, [1.5625, 0.9375])):
        with subtests.test(renormalize=renormalize):
            options: dict[str, Any] = {"score": score, "renormalize": renormalize, "backend": backend}
            scaled = gating_topk(logits, 2, scaling_factor=2.5, **options).weights
            torch.testing.assert_close(scaled, torch.tensor([expected]))
            plain = gating_topk(logits, 2, **options).weights
            up = torch.tensor([[1.0, 3.0]])
            (with_scale,), (without,) = (torch.autograd.grad(w, logits, up) for w in (scaled, plain))
            torch.testing.assert_close(with_scale, 2.5 * without)


@pytest.mark.parametrize("score", ["softmax", "topk_softmax"])
@pytest.mark.parametrize("bias", [None, torch.zeros(4)])
def test_b104_groups_under_softmax(backend: Backend, score: Score, bias: Tensor | None) -> None:
    logits = torch.tensor([[3.0, 0.0, 2.9, 2.8]])
    options: dict[str, Any] = {"score": score, "bias": bias, "num_groups": 2, "topk_groups": 1, "backend": backend}
    assert gating_topk(logits, 2, group_score="top2_sum", **options).expert_ids.tolist() == [[2, 3]]
    assert gating_topk(logits, 2, group_score="max", **options).expert_ids.tolist() == [[0, 1]]


def test_b119_signs_of_nan(backend: Backend) -> None:
    logits = torch.tensor([[NAN, INF, 3.0, -INF], [-NAN, 1.0, 2.0, NAN]])
    negative = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
    assert bool(negative.isnan() and negative.signbit())
    logits[1, 0] = negative
    found = gating_topk(logits, 2, score="topk_softmax", backend=backend)
    assert found.expert_ids.tolist() == [[0, 1], [0, 3]]
    assert bool(found.weights.isnan().all())


@pytest.mark.parametrize("tokens", [15, 16, 17, 33, 257])
def test_b145_every_row_is_visited(backend: Backend, tokens: int) -> None:
    found = gating_topk(random_logits(tokens, 128), 8, backend=backend)
    assert bool((found.weights > 0).all())
    assert all(len(set(row)) == 8 for row in found.expert_ids.tolist())


@pytest.mark.parametrize("experts", [1, 2, 63, 64, 65, 255, 256, 257, 512, 1024])
def test_b146_sizes_around_the_blocks(subtests: pytest.Subtests, backend: Backend, experts: int) -> None:
    logits = random_logits(1, experts)
    for score in SCORES:
        with subtests.test(score=score):
            found = gating_topk(logits, min(experts, 9), score=score, backend=backend)
            assert_same_bits(found.expert_ids, by_hand(found.scores, min(experts, 9)))
            assert_close_to_exact(found.scores, exact(logits, found.expert_ids, score, False)[1])


@pytest.mark.parametrize("k", range(1, 8))
def test_b149_small_k_in_groups(backend: Backend, k: int) -> None:
    found = gating_topk(random_logits(9, 32), k, num_groups=4, topk_groups=2, backend=backend)
    assert_same_bits(found.expert_ids, by_hand(found.scores, k, None, 4, 2))
    for row in found.expert_ids.tolist():
        assert len(set(row)) == k
        assert len({e // 8 for e in row}) <= 2


def test_b151_offsets_beyond_int32(backend: Backend) -> None:
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


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="guard pages need mprotect")
@pytest.mark.parametrize("experts", [*range(1, 18), 63, 64, 65, 130])
def test_b152_nothing_is_read_or_written_beyond_the_end(
    subtests: pytest.Subtests, backend: Backend, experts: int
) -> None:
    k = min(experts, 3)
    for dtype in FLOATS[-1:] if backend == "triton" else FLOATS:
        with subtests.test(dtype=dtype):
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


def test_b158_scores_in_float32_whatever_comes(backend: Backend) -> None:
    logits = torch.tensor([[2.0001, 2.0, 1.9], [2.0, 2.0001, 1.9]])
    assert gating_topk(logits, 1, backend=backend).expert_ids.tolist() == [[0], [1]]
    half = logits.bfloat16().requires_grad_()
    found = gating_topk(half, 1, backend=backend)
    assert found.expert_ids.tolist() == [[0], [0]]
    assert (found.weights.dtype, found.scores.dtype) == (torch.float32, torch.float32)
    (grad,) = torch.autograd.grad(found.weights.sum(), half)
    assert grad.dtype is torch.bfloat16
