"""Gating: `out`, no tokens, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from gating_by_hand import FLOATS, GROUPED, INF, NAN, SCORES, random_logits
from moeroute import gating_topk, gating_topk_backward
from moeroute.dispatch import Backend
from moeroute.ops.gating.op import Score
from moeroute.testing import assert_same_bits

# ---------------------------------------------------------------------------- out, emptiness, errors


@pytest.mark.parametrize("dtype", FLOATS)
def test_out(backend: Backend, dtype: torch.dtype) -> None:
    logits = random_logits(5, 70, dtype=dtype)
    ids: Tensor | None = None
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
    assert ids is not None
    wide = torch.full((5, 100), 7.0, dtype=dtype)
    options: dict[str, Any] = {"score": "sigmoid", "renormalize": True, "backend": backend}
    grad = gating_topk_backward(out[2], out[0], ids, out=wide[:, 11:81], **options)
    assert_same_bits(grad, gating_topk_backward(out[2], out[0], ids, **options))
    assert bool((wide[:, :11] == 7).all() and (wide[:, 81:] == 7).all())


@pytest.mark.parametrize("score", SCORES)
def test_no_tokens(backend: Backend, score: Score) -> None:
    logits = torch.empty(0, 8, requires_grad=True)
    found = gating_topk(logits, 3, score=score, **{**GROUPED, "num_groups": 4}, backend=backend)
    assert [list(x.shape) for x in found] == [[0, 3], [0, 3], [0, 8]]
    (grad,) = torch.autograd.grad(found.weights.sum() + found.scores.sum(), logits)
    assert grad.shape == (0, 8)


def test_inputs_stay_as_they_are(backend: Backend) -> None:
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
    ({"group_score": 9}, ValueError, r"group_score must be in 1\.\.8; got 9"),
    ({"group_score": 3, "num_groups": 4}, ValueError, r"group_score must be in 1\.\.2; got 3"),
    ({"group_score": 0}, ValueError, "group_score must be at least 1; got 0"),
    ({"group_score": True}, ValueError, "group_score must be one of 'max', 'top2_sum'; got True"),
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


def test_errors_of_out_leave_it_as_it_is(subtests: pytest.Subtests) -> None:
    def fresh() -> tuple[Tensor, Tensor, Tensor]:
        return torch.full((3, 2), 7.0), torch.full((3, 2), 7).int(), torch.full((3, 8), 7.0)

    changes: list[tuple[int, Callable[[Tensor], Tensor], type[Exception], str]] = [
        (0, lambda x: x.double(), TypeError, "weights_dtype must be one of"),
        (0, lambda x: x[:2], ValueError, r"out\[0\] must be of shape \[3, 2\]"),
        (1, lambda x: x.long(), TypeError, r"out\[1\] must be torch.int32; got torch.int64"),
        (2, lambda x: x.half(), TypeError, r"out\[2\] must be torch.float32; got torch.float16"),
        (2, lambda x: x.t().contiguous().t(), ValueError, r"out\[2\] must be a tensor with contiguous rows"),
    ]
    for which, change, error, message in changes:
        with subtests.test(message):
            weights, expert_ids, scores = (change(x) if i == which else x for i, x in enumerate(fresh()))
            out = weights, expert_ids, scores
            with pytest.raises(error, match=message):
                gating_topk(LOGITS, 2, out=out)
            assert all(bool((x == 7).all()) for x in out)
    with pytest.raises(ValueError, match=r"out\[0\] must be None where gradients are recorded"):
        gating_topk(LOGITS.clone().requires_grad_(), 2, out=fresh())
    with pytest.raises(ValueError, match=r"out\[2\] must be memory of its own"):
        gating_topk(LOGITS, 2, out=(*fresh()[:2], LOGITS))
    assert not LOGITS.any()


def test_large_scaling_in_float64() -> None:
    found = gating_topk(torch.zeros(1, 2, dtype=torch.float64), 1, scaling_factor=1e100)
    assert found.weights.item() == 0.5e100
    assert isinstance(found, moeroute.Gating)
