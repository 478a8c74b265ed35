"""The row operators: `out`, and what is refused or must not reach out of bounds."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from case_ids import spelled
from moeroute.dispatch import Backend
from moeroute.testing import assert_same_bits
from small_cases import random_plan

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


# ---------------------------------------------------------------------------- out=


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float64))
def test_out(subtests: pytest.Subtests, backend: Backend, dtype: torch.dtype) -> None:
    if dtype is torch.float64:
        backend = "reference"
    plan = random_plan(3, 6, 2, 4)
    x, rows = torch.randn(6, 40).to(dtype), torch.randn(plan.num_rows, 40).to(dtype)
    weights = torch.rand(6, 2, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    slots = weights.flatten()

    def buffers(*shape: int) -> list[Tensor]:
        """Contiguous, rows apart, and columns apart."""
        return [
            torch.empty(shape, dtype=dtype),
            torch.empty(shape[0], shape[1] + 5, dtype=dtype)[:, 3:-2],
            torch.empty(shape[1], shape[0], dtype=dtype).t(),
        ]

    for out in buffers(plan.num_rows, 40):
        with subtests.test(strides=out.stride()):
            assert moeroute.spread(x, plan, slots, out=out, backend=backend) is out
            assert_same_bits(out, moeroute.spread(x, plan, slots, backend=backend))
    for out in buffers(6, 40):
        with subtests.test(strides=out.stride()):
            assert moeroute.combine(rows, plan, slots, out=out, backend=backend) is out
            assert_same_bits(out, moeroute.combine(rows, plan, slots, backend=backend))
            assert moeroute.permute_backward(rows, plan, out=out, backend=backend) is out
            assert_same_bits(out, moeroute.permute_backward(rows, plan, backend=backend))
    for out in (torch.empty_like(slots), torch.empty(plan.num_slots, 2, dtype=slots.dtype)[:, 1]):
        with subtests.test(strides=out.stride()):
            moeroute.row_dots(rows, x, plan, dtype=slots.dtype, out=out, backend=backend)
            assert_same_bits(out, moeroute.row_dots(rows, x, plan, dtype=slots.dtype, backend=backend))
            moeroute.slot_weights(weights, plan, out=out, backend=backend)
            assert_same_bits(out, slots)
    expected = moeroute.unpermute_backward(x, rows, plan, weights, backend=backend)
    for out_rows in buffers(plan.num_rows, 40):
        with subtests.test(strides=out_rows.stride()):
            for out_weights in (torch.empty_like(weights), torch.empty(2, 6, dtype=weights.dtype).t()):
                result = moeroute.unpermute_backward(
                    x, rows, plan, weights, out=(out_rows, out_weights), backend=backend
                )
                assert result[0] is out_rows
                assert result[1] is out_weights
                assert_same_bits(result, expected)


def test_out_refuses_what_it_cannot_do() -> None:
    plan = random_plan(3, 6, 2, 4)
    x = torch.randn(6, 40)
    good = torch.empty(plan.num_rows, 40)
    with pytest.raises(ValueError, match=r"moeroute.spread: out must be of shape \[\d+, 40\]; got shape \[3, 40\]"):
        moeroute.spread(x, plan, out=good[:3])
    with pytest.raises(TypeError, match=r"out must be torch.float32; got torch.float64"):
        moeroute.spread(x, plan, out=good.double())
    with pytest.raises(ValueError, match=r"out must be a tensor whose elements do not overlap"):
        moeroute.spread(x, plan, out=torch.empty(1, 40).expand(plan.num_rows, 40))
    shared = torch.zeros(plan.num_rows + 6, 40)
    with pytest.raises(ValueError, match=r"out must be memory of its own"):
        moeroute.spread(shared[:6], plan, out=shared[5 : 5 + plan.num_rows])
    with pytest.raises(ValueError, match=r"out must be None where gradients are recorded"):
        moeroute.spread(x.requires_grad_(), plan, out=good)
    with torch.no_grad():
        moeroute.spread(x, plan, out=good)


# ---------------------------------------------------------------------------- bad input


PLAN_ARGUMENTS = (
    (lambda plan, t, r, w: moeroute.permute(t[0], plan), ValueError, "permute: tokens must be [T, H] with T = 6, as the plan; got shape [8]"),
    (lambda plan, t, r, w: moeroute.permute(t[:5], plan), ValueError, "permute: tokens must be [T, H] with T = 6, as the plan; got shape [5, 8]"),
    (lambda plan, t, r, w: moeroute.permute([1], plan), TypeError, "permute: tokens must be a torch.Tensor; got list"),  # type: ignore[arg-type]
    (lambda plan, t, r, w: moeroute.permute(t, None), TypeError, "permute: plan must be a moeroute.RoutingPlan; got NoneType"),  # type: ignore[arg-type]
    (lambda plan, t, r, w: moeroute.permute(t, plan, w[:, :1]), ValueError, "permute: weights must be [T, K] with T = 6 and K = 2, as the plan; got shape [6, 1]"),
    (lambda plan, t, r, w: moeroute.permute(t, plan, w.long()), TypeError, "permute: weights must be float16, bfloat16, float32 or float64; got torch.int64"),
    (lambda plan, t, r, w: moeroute.permute(t.double(), plan, w), TypeError, "permute: weights must be float64 with float64 tokens; got torch.float32"),
    (lambda plan, t, r, w: moeroute.permute(t.long(), plan, w), TypeError, "permute: tokens must be floating with weights; got torch.int64"),
    (lambda plan, t, r, w: moeroute.unpermute(r[1:], plan), ValueError, "unpermute: rows must be [R, H] with R = 12, as the plan; got shape [11, 8]"),
    (lambda plan, t, r, w: moeroute.unpermute(r.long(), plan), TypeError, "unpermute: rows must be float16, bfloat16, float32 or float64; got torch.int64"),
    (lambda plan, t, r, w: moeroute.unpermute(r, plan, w.flatten()), ValueError, "unpermute: weights must be [T, K] with T = 6 and K = 2, as the plan; got shape [12]"),
    (lambda plan, t, r, w: moeroute.combine(r, plan, w), ValueError, "combine: weights must be [S] with S = 12, as the plan; got shape [6, 2]"),
    (lambda plan, t, r, w: moeroute.combine(r, plan, init=t[:, :3]), ValueError, "combine: init must be as wide as rows, with H = 8; got shape [6, 3]"),
    (lambda plan, t, r, w: moeroute.combine(r, plan, init=t.half()), TypeError, "combine: init must be torch.float32, as rows; got torch.float16"),
    (lambda plan, t, r, w: moeroute.combine(r, plan, bias=t), ValueError, "combine: bias must be None, as the plan has no expert_of_slot; got [6, 8]"),
    (lambda plan, t, r, w: moeroute.row_dots(r, t[:, :4], plan), ValueError, "row_dots: x must be as wide as rows, with H = 8; got shape [6, 4]"),
    (lambda plan, t, r, w: moeroute.row_dots(r, t.half(), plan), TypeError, "row_dots: x must be torch.float32, as rows; got torch.float16"),
    (lambda plan, t, r, w: moeroute.row_dots(r, t, plan, dtype=torch.int32), TypeError, "row_dots: dtype must be one of torch.float16, torch.bfloat16, torch.float32, torch.float64; got torch.int32"),
    (lambda plan, t, r, w: moeroute.unpermute_backward(t, r[:3], plan, w), ValueError, "unpermute_backward: rows must be [R, H] with R = 12, as the plan; got shape [3, 8]"),
    (lambda plan, t, r, w: moeroute.unpermute_backward(t, None, plan, w), TypeError, "unpermute_backward: rows must be a torch.Tensor; got NoneType"),
    (lambda plan, t, r, w: moeroute.unpermute_backward(t, r.half(), plan, w), TypeError, "unpermute_backward: rows must be torch.float32, as grad_tokens; got torch.float16"),
    (lambda plan, t, r, w: moeroute.permute_backward(t, plan), ValueError, "permute_backward: grad_rows must be [R, H] with R = 12, as the plan; got shape [6, 8]"),
    (lambda plan, t, r, w: moeroute.permute_weights(w[:5], plan), ValueError, "permute_weights: weights must be [T, K] with T = 6 and K = 2, as the plan; got shape [5, 2]"),
    (lambda plan, t, r, w: moeroute.permute_weights_backward(w, plan), ValueError, "permute_weights_backward: grad must be [R] with R = 12, as the plan; got shape [6, 2]"),
    (lambda plan, t, r, w: moeroute.slot_weights(3.0, plan), TypeError, "slot_weights: weights must be a torch.Tensor; got float"),  # type: ignore[arg-type]
    (lambda plan, t, r, w: moeroute.permute(t.to("meta"), plan), ValueError, "permute: tokens must be on cpu, as the plan; got meta"),
    (lambda plan, t, r, w: moeroute.permute(t, plan, w.to("meta")), ValueError, "permute: weights must be on cpu, as the plan; got meta"),
    (lambda plan, t, r, w: moeroute.permute(t, plan, backend="cuda"), ValueError, "permute: backend must be one of 'reference', 'cpu', 'triton'; got 'cuda'"),  # type: ignore[arg-type]
    (lambda plan, t, r, w: moeroute.permute(t.double(), plan, backend="cpu"), ValueError, "permute: backend must be 'reference' for torch.float64; got 'cpu'"),
)  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), PLAN_ARGUMENTS, ids=[case[2][:60] for case in PLAN_ARGUMENTS])
def test_bad_input(call: Callable[..., Any], error: type[Exception], message: str) -> None:
    plan = random_plan(3, 6, 2, 4, empty=0.0)
    tokens, rows, weights = torch.ones(6, 8), torch.ones(12, 8), torch.ones(6, 2)
    with pytest.raises(error) as raised:
        call(plan, tokens, rows, weights)
    assert str(raised.value) == f"moeroute.{message}"


@pytest.mark.parametrize("index", (-1, -(2**31), 12, 2**31 - 1, 10**6))
def test_no_index_of_a_hand_made_plan_reads_out_of_bounds(backend: Backend, index: int) -> None:
    """B121: the slot is treated as one without a row."""
    row_of_slot = torch.arange(12, dtype=torch.int32)
    row_of_slot[3] = index
    slot_of_row = torch.arange(12, dtype=torch.int32)
    slot_of_row[5] = index
    plan = moeroute.RoutingPlan(row_of_slot, slot_of_row, num_tokens=6, num_rows=12, topk=2)
    rows = torch.ones(12, 8)
    expected = [2.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert moeroute.unpermute(rows, plan, backend=backend)[:, 0].tolist() == expected
    permuted = moeroute.permute(torch.ones(6, 8), plan, backend=backend)
    assert permuted[:, 0].tolist() == [1, 1, 1, 0, 1, 0] + [1] * 6
    dots = moeroute.row_dots(rows, torch.ones(6, 8), plan, backend=backend)
    assert dots.tolist() == [8, 8, 8, 0] + [8] * 8


@pytest.mark.parametrize("given_out", (False, True))
def test_lazy_negation_and_conjugation_are_seen(backend: Backend, given_out: bool) -> None:
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 2)
    conjugated = torch.tensor([[1 + 2j], [3 + 4j]]).conj()
    negated = torch.complex(torch.randn(4, 3), torch.randn(4, 3)).conj().imag
    assert negated.is_neg()
    weights = torch._neg_view(torch.rand(2, 2))
    out_c = torch.empty(4, 1, dtype=conjugated.dtype) if given_out else None
    out = torch.empty(2, 3) if given_out else None
    spread = moeroute.spread(conjugated, plan, out=out_c, backend=backend)
    assert spread.tolist() == conjugated.resolve_conj()[plan.token_of_row.long()].tolist()
    combined = moeroute.combine(negated, plan, weights.flatten(), out=out, backend=backend)
    assert_same_bits(combined, moeroute.combine(negated.clone(), plan, weights.clone().flatten(), backend=backend))
    picked = moeroute.permute_weights(weights, plan, backend=backend)
    assert_same_bits(picked, moeroute.permute_weights(weights.clone(), plan, backend=backend))
    with pytest.raises(ValueError, match="out must be a tensor without lazy conjugation or negation"):
        moeroute.spread(conjugated, plan, out=torch.empty(4, 1, dtype=conjugated.dtype).conj(), backend=backend)


def test_out_is_not_the_plans_own_and_records_nothing() -> None:
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 2)
    x, rows, weights = torch.randn(2, 3), torch.randn(4, 3), torch.rand(2, 2)
    before = plan.slot_of_row.clone()
    with pytest.raises(ValueError, match="out must be memory of its own"):
        moeroute.spread(torch.ones(2, 1, dtype=torch.int32), plan, out=plan.slot_of_row.view(4, 1))
    assert_same_bits(plan.slot_of_row, before)
    leaf = torch.empty(2, 3, requires_grad=True)
    recorded = r"out must be None where gradients are recorded"
    with pytest.raises(ValueError, match=recorded):
        moeroute.combine(rows, plan, out=leaf)
    with pytest.raises(ValueError, match=recorded):
        moeroute.combine(rows, plan, init=x, out=leaf)
    with pytest.raises(ValueError, match=recorded):
        moeroute.unpermute_backward(x.requires_grad_(), rows, plan, weights, out=(None, torch.empty(2, 2)))  # type: ignore[arg-type]
    x = x.detach()
    leaf = x.clone().requires_grad_()
    assert moeroute.unpermute_backward(leaf, rows, plan, weights, out=(None, None))[0].requires_grad  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out must be \(tensor, None\) without weights"):
        moeroute.unpermute_backward(x, None, plan, out=(torch.empty(4, 3), torch.empty(2, 2)))
    with pytest.raises(TypeError, match="out must be a pair of tensors or None; got int"):
        moeroute.unpermute_backward(x, rows, plan, weights, out=3)  # type: ignore[arg-type]
    untouched = torch.full((4, 3), 7.0)
    with pytest.raises(TypeError, match="accumulate must be a bool; got NoneType"):
        moeroute.unpermute_backward(x, rows, plan, weights, accumulate=None, out=(untouched, torch.empty(2, 2)))  # type: ignore[arg-type]
    assert bool((untouched == 7).all())
    with pytest.raises(ValueError, match=r"init must be a tensor or a pair of them; got a tuple of 3"):
        moeroute.combine(rows, plan, init=(x, x, x))  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ("init", "out"))
def test_what_has_no_registered_operator_says_no_under_transforms(argument: str) -> None:
    """Never a silent zero tangent, never a kernel on a tensor without memory."""
    plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 2)
    rows, x = torch.randn(4, 3), torch.randn(2, 3)

    def call(rows: Tensor, x: Tensor) -> Tensor:
        given: dict[str, Any] = {argument: x}
        return moeroute.combine(rows, plan, **given)

    refused = rf"{argument} must be None under torch.compile, torch.jit.trace, torch.func, forward mode"
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match=refused):
        call(torch.autograd.forward_ad.make_dual(rows, rows), x)
    with pytest.raises(ValueError, match=refused):
        torch.func.jvp(lambda r: call(r, x), (rows,), (rows,))
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(ValueError):
        call(mode.from_tensor(rows), mode.from_tensor(x))


@pytest.mark.parametrize("offsets", ((0, 9, 4), (4, 2, 0), (0, 2, 2**31 - 1), (-5, 2, 4)))
def test_no_offset_of_a_hand_made_plan_reads_out_of_bounds(backend: Backend, offsets: tuple[int, ...]) -> None:
    def index(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    plan = moeroute.RoutingPlan(
        index(0, 7, -3, 2),
        index(0, 9, 3, -8),
        2,
        4,
        num_experts=2,
        slot_offsets=index(*offsets),
        expert_of_slot=index(0, 5, -7, 1),
    )
    assert moeroute.unpermute(torch.ones(4, 3), plan, torch.ones(2, 2), backend=backend).shape == (2, 3)
    assert moeroute.permute(torch.ones(2, 3), plan, backend=backend).shape == (4, 3)


def test_odd_plans_and_backends_are_refused(subtests: pytest.Subtests) -> None:
    ids = torch.tensor([[0, 1], [1, 0]])
    plan = moeroute.plan_from_expert_ids(ids, 2)
    weights = torch.ones(2, 2)
    for call in (
        lambda: moeroute.slot_weights(weights, plan, backend="nonsense"),  # type: ignore[arg-type]
        lambda: moeroute.permute_weights(weights, plan, backend="nonsense"),  # type: ignore[arg-type]
        lambda: moeroute.permute_weights_backward(torch.ones(4), plan, backend="nonsense"),  # type: ignore[arg-type]
    ):
        with (
            subtests.test(spelled(call)),
            pytest.raises(ValueError, match=r"backend must be one of 'reference', 'cpu', .*; got 'nonsense'"),
        ):
            call()
    with pytest.raises(ValueError, match=r"slot_weights: backend must be 'reference' for torch\.float64"):
        moeroute.slot_weights(weights.double(), plan, backend="cpu")
    with pytest.raises(ValueError, match="num_experts must be 2, as the plan, or None; got 3"):
        moeroute.permute_weights_backward(torch.ones(4), plan, num_experts=3)
    routed = moeroute.plan_from_routing_map(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"bias must be \[E, H\] with E = 2, as the plan; got shape \[3, 5\]"):
        moeroute.combine(torch.ones(4, 5), routed, bias=torch.ones(3, 5))
    with pytest.raises(TypeError, match=r"row_dots: dtype must be one of .*; got str"):
        moeroute.row_dots(torch.ones(4, 5).double(), torch.ones(2, 5).double(), plan, dtype="float32")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will give up quantized tensors
        scaled = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8)
    quantized: tuple[Callable[[], Any], ...] = (
        lambda: moeroute.permute(scaled, plan),
        lambda: moeroute.spread(scaled, plan),
        lambda: moeroute.unpermute_backward(scaled, None, plan),
    )
    for refused in quantized:
        with (
            subtests.test(spelled(refused)),
            pytest.raises(TypeError, match="must be of a dtype that is not quantized"),
        ):
            refused()
