"""What PyTorch expects of an operator: opcheck, compile, functorch, checkpoints, autocast, threads, processes."""

import copy
import io
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numba
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import moeroute
from moeroute import dispatch
from moeroute.dispatch import Backend
from moeroute.nn import MoE
from moeroute.testing import assert_same_bits
from small_cases import present

IDS = torch.tensor([[0, 2], [2, -1], [1, 0], [3, 3]])
CHOSEN = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]], dtype=torch.bool)


def plans() -> list[moeroute.RoutingPlan]:
    return [
        moeroute.plan_from_expert_ids(IDS, 4),
        moeroute.plan_from_routing_map(CHOSEN),
        moeroute.plan_from_expert_ids(torch.zeros(0, 2, dtype=torch.int64), 4),
    ]


@pytest.mark.parametrize("which", (0, 1, 2))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_opcheck(which: int, dtype: torch.dtype) -> None:
    """Schema, fake kernel, autograd registration and AOT dispatch of every operator, B85 included."""
    plan = plans()[which]
    x = torch.randn(plan.num_tokens, 8, dtype=dtype, requires_grad=True)
    rows = torch.randn(plan.num_rows, 8, dtype=dtype, requires_grad=True)
    slots = torch.rand(plan.num_slots, requires_grad=True)
    halves = torch.randn(plan.num_rows, 4, dtype=dtype, requires_grad=True)
    ops = torch.ops.moeroute
    for operator, arguments in (
        (ops.spread, (x, None, *plan.tensors, None)),
        (ops.spread, (x, slots, *plan.tensors, None)),
        (ops.combine, (rows, None, *plan.tensors, None)),
        (ops.combine, (rows, slots, *plan.tensors, None)),
        (ops.row_dots, (rows, x, *plan.tensors, torch.float32, None)),
        (ops.spread_dots, (x, rows, slots, *plan.tensors, None)),
        (ops.take, (slots, plan.slot_of_row, plan.row_of_slot, None)),
        (ops.dynamic_quantize, (rows, None, None, None)),
        (ops.dynamic_quantize, (rows, torch.rand(5, 8, requires_grad=True), plan.slot_of_row, None)),
        (ops.activate, (rows, "swiglu", False, None)),
        (ops.activate, (rows, "relu2", False, None)),
        (ops.activate_backward, (halves, rows, "geglu", False, False, None)),
        (ops.activate_backward, (halves, rows, "swiglu_clamped", True, True, None)),
        (ops.quantize, (rows, torch.tensor(2.0), torch.tensor([1.0]), None)),
        (ops.spread_static, (x, torch.tensor(2.0), torch.tensor([1.0]), *plan.tensors, None)),
        (ops.spread_quantized, (x, None, None, *plan.tensors, None)),
        (ops.spread_quantized, (x, torch.rand(5, 8), plan.slot_of_row, *plan.tensors, None)),
    ):
        torch.library.opcheck(operator, arguments)
    if plan.expert_of_slot is not None:
        weights = torch.rand(plan.num_tokens, 4, requires_grad=True)
        torch.library.opcheck(ops.slot_weights, (weights, *plan.tensors, None))
        torch.library.opcheck(ops.slot_weights_backward, (slots, *plan.tensors, 4, True, None))


def layer(tokens: Tensor, logits: Tensor, num_rows: int | None = None) -> Tensor:
    """Gating, plan, permute, something like experts, unpermute."""
    gating = moeroute.gating_topk(logits, 2, score="sigmoid")
    plan = moeroute.plan_from_expert_ids(gating.expert_ids, logits.shape[1], num_rows=num_rows)
    rows = moeroute.permute(tokens, plan)
    return moeroute.unpermute(rows * 2, plan, gating.weights)


def inputs(num_tokens: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_tokens, 16, generator=generator, requires_grad=True)
    logits = torch.randn(num_tokens, 4, generator=generator, requires_grad=True)
    return tokens, logits


def outcome(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """The output and the gradient of every input, of fresh leaves."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    output = function(*leaves)
    output.square().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("counted", (False, True), ids=("rows from the data", "rows given"))
def test_compile_without_graph_break(backend: Backend, dynamic: bool, counted: bool) -> None:
    """B134: the second size is not that of the first."""
    torch._dynamo.reset()

    def step(tokens: Tensor, logits: Tensor) -> Tensor:
        return layer(tokens, logits, tokens.shape[0] * 2 if counted else None)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    for num_tokens in (6, 9):
        tensors = inputs(num_tokens, seed=num_tokens)
        actual, expected = outcome(compiled, *tensors), outcome(step, *tensors)
        for a, e in zip(actual, expected, strict=True):
            assert a.stride() == e.stride()
            # The compiler may fuse or reorder its own arithmetic between our operators.
            torch.testing.assert_close(a, e)


def test_compiled_maps_and_tables() -> None:
    torch._dynamo.reset()

    def step(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ragged = moeroute.plan_from_routing_map(chosen)
        table = moeroute.plan_from_routing_map(chosen, topk=3)
        first = moeroute.unpermute(moeroute.permute(tokens, ragged), ragged, weights)
        return first + moeroute.unpermute(moeroute.permute(tokens, table, weights), table)

    tokens, weights = torch.randn(4, 8, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(
        outcome(lambda t, w: compiled(t, CHOSEN, w), tokens, weights),
        outcome(lambda t, w: step(t, CHOSEN, w), tokens, weights),
    )


def test_strides_of_fake_and_real_outputs_agree() -> None:
    """B86: outputs are contiguous whatever the inputs' strides."""
    plan = plans()[0]
    tokens = torch.randn(8, 4).t()
    rows = torch.randn(8, plan.num_rows).t()
    for real, fake in (
        (moeroute.permute(tokens, plan), lambda t, r: moeroute.permute(t, plan)),
        (moeroute.unpermute(rows, plan), lambda t, r: moeroute.unpermute(r, plan)),
    ):
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            result = fake(mode.from_tensor(tokens), mode.from_tensor(rows))
        assert real.is_contiguous()
        assert result.stride() == real.stride()
        assert result.shape == real.shape


# ---------------------------------------------------------------------------- functorch and forward mode


def test_functorch_grad() -> None:
    tokens, logits = inputs()
    tokens, logits = tokens.detach(), logits.detach()
    gradients = torch.func.grad(lambda x, y: layer(x, y).square().sum(), argnums=(0, 1))(tokens, logits)
    assert_same_bits(gradients, outcome(layer, tokens.requires_grad_(), logits.requires_grad_())[1:])


def verbs(plan: moeroute.RoutingPlan) -> list[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]]:
    tokens, rows = torch.randn(plan.num_tokens, 5), torch.randn(plan.num_rows, 5)
    weights = torch.rand(plan.num_tokens, 2)
    return [
        ("permute", lambda t: moeroute.permute(t, plan), (tokens,)),
        ("permute weighted", lambda t, w: moeroute.permute(t, plan, w), (tokens, weights)),
        ("unpermute", lambda r: moeroute.unpermute(r, plan), (rows,)),
        ("unpermute weighted", lambda r, w: moeroute.unpermute(r, plan, w), (rows, weights)),
        ("row_dots", lambda r, t: moeroute.row_dots(r, t, plan), (rows, tokens)),
        ("permute_weights", lambda w: moeroute.permute_weights(w, plan), (weights,)),
        ("gating_topk", lambda x: moeroute.gating_topk(x, 2).weights, (torch.randn(plan.num_tokens, 4),)),
    ]


@pytest.mark.parametrize("which", range(7))
def test_forward_mode_is_right_or_says_no(which: int) -> None:
    """Never a silent zero: tangents equal those of the backward mode, or an error."""
    name, function, arguments = verbs(plans()[0])[which]
    tangents = tuple(torch.randn_like(a) for a in arguments)
    try:
        tangent = torch.func.jvp(function, arguments, tangents)[1]
    except (RuntimeError, NotImplementedError) as error:
        assert "forward" in str(error) or "jvp" in str(error), f"{name}: {error}"
    else:
        expected = torch.autograd.functional.jvp(function, arguments, tangents)[1]
        torch.testing.assert_close(tangent, expected)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(a, t) for a, t in zip(arguments, tangents, strict=True)]
        try:
            output = function(*duals)
        except (RuntimeError, NotImplementedError) as error:
            assert "forward" in str(error) or "jvp" in str(error), f"{name}: {error}"
        else:
            tangent = torch.autograd.forward_ad.unpack_dual(output).tangent
            expected = torch.autograd.functional.jvp(function, arguments, tangents)[1]
            torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize("which", range(7))
def test_vmap_is_right_or_says_no(which: int) -> None:
    name, function, arguments = verbs(plans()[0])[which]
    batched = tuple(torch.stack([a, a * 2]) for a in arguments)
    expected = torch.stack([function(*(b[i] for b in batched)) for i in range(2)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch says that it loops
            result = torch.func.vmap(function)(*batched)
    except (RuntimeError, NotImplementedError) as error:
        assert "vmap" in str(error), f"{name}: {error}"
    else:
        assert_same_bits(result, expected)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile says that a frame runs uncompiled
@pytest.mark.parametrize("outside", (False, True), ids=("compile of grad", "grad of compile"))
def test_compile_and_functorch(outside: bool) -> None:
    torch._dynamo.reset()
    tokens, logits = inputs()
    expected = outcome(layer, tokens, logits)[1:]

    def loss(tokens: Tensor, logits: Tensor) -> Tensor:
        return layer(tokens, logits).square().sum()

    if outside:
        gradient = torch.func.grad(torch.compile(loss, backend="aot_eager"), argnums=(0, 1))
    else:
        gradient = torch.compile(torch.func.grad(loss, argnums=(0, 1)), backend="aot_eager")
    for mine, others in zip(gradient(tokens.detach(), logits.detach()), expected, strict=True):
        torch.testing.assert_close(mine, others)


LOAD = """
import sys, torch, moeroute
layer = torch.export.load(sys.argv[1]).module()
x, expected = torch.load(sys.argv[2])
assert torch.equal(layer(x), expected)
assert "moeroute.nn" not in sys.modules
"""


def test_exported_layer_needs_nothing_but_the_import(tmp_path: Path) -> None:
    moe = MoE(16, 32, 4, 2)
    x = torch.randn(6, 16)
    program, tensors = tmp_path / "layer.pt2", tmp_path / "tensors.pt"
    torch.export.save(torch.export.export(moe, (x,)), program)
    torch.save((x, moe(x).detach()), tensors)
    done = subprocess.run([sys.executable, "-c", LOAD, program, tensors], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------- plans as values


def every_plan() -> list[moeroute.RoutingPlan]:
    return [*plans(), moeroute.plan_from_routing_map(CHOSEN, topk=2, align=4), moeroute.plan_from_expert_ids(IDS, None)]


def assert_same_plan(plan: moeroute.RoutingPlan, expected: moeroute.RoutingPlan) -> None:
    assert type(plan) is moeroute.RoutingPlan
    assert plan.__getstate__().keys() == expected.__getstate__().keys()
    for name, value in expected.__getstate__().items():
        if isinstance(value, Tensor):
            assert_same_bits(getattr(plan, name), value)
        else:
            assert getattr(plan, name) == value
    assert (plan.rows_per_expert is plan.tokens_per_expert) == (expected.rows_per_expert is expected.tokens_per_expert)


@pytest.mark.parametrize("which", range(5))
def test_a_plan_through_pickle_copies_and_files(which: int) -> None:
    plan = every_plan()[which]
    file = io.BytesIO()
    torch.save({"plan": plan, "gating": moeroute.gating_topk(torch.zeros(2, 3), 2)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["gating"]) is moeroute.Gating
    for other in (pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan), loaded["plan"]):
        assert_same_plan(other, plan)
        assert_same_bits(
            moeroute.permute(torch.ones(plan.num_tokens, 2), other),
            moeroute.permute(torch.ones(plan.num_tokens, 2), plan),
        )
    assert copy.deepcopy(plan).row_of_slot.data_ptr() != plan.row_of_slot.data_ptr() or not plan.num_slots


@pytest.mark.parametrize("which", range(5))
def test_a_plan_moves_as_a_whole(which: int) -> None:
    plan = every_plan()[which]
    assert_same_plan(plan.to("cpu"), plan)
    assert plan.to("cpu").row_of_slot is plan.row_of_slot
    moved = plan.to(torch.device("meta"), non_blocking=True)
    assert (moved.num_tokens, moved.num_rows, moved.topk) == (plan.num_tokens, plan.num_rows, plan.topk)
    for name, value in vars(plan).items():
        if isinstance(value, Tensor):
            assert getattr(moved, name).is_meta
            assert getattr(moved, name).shape == value.shape
    if torch.cuda.is_available():
        assert_same_plan(plan.pin_memory().to("cuda", non_blocking=True).to("cpu"), plan)
        assert plan.pin_memory().row_of_slot.is_pinned()


def test_a_plan_is_pinned_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an accelerator there is nothing to pin for: who is asked is what can be seen."""
    asked: list[Tensor] = []

    def pinned(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    plan = plans()[0]
    assert_same_plan(plan.pin_memory(), plan)
    assert {id(t) for t in asked} == {id(t) for t in vars(plan).values() if isinstance(t, Tensor)}


@pytest.fixture
def distributed() -> Iterator[Callable[[Tensor], Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    yield lambda tensor: DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    torch.distributed.destroy_process_group()


def test_distributed_tensors_are_refused_in_our_words(distributed: Callable[[Tensor], Tensor]) -> None:
    plan, x = plans()[0], torch.ones(4, 16)
    weights = torch.ones(4, 2)
    moe = MoE(16, 32, 4, 2)
    for call, argument in (
        (lambda: moeroute.permute(distributed(x), plan), "permute: tokens"),
        (lambda: moeroute.unpermute(torch.ones(plan.num_rows, 3), plan, distributed(weights)), "unpermute: weights"),
        (lambda: moeroute.permute_weights(distributed(weights), plan), "permute_weights: weights"),
        (lambda: moeroute.gating_topk(distributed(x), 2), "gating_topk: logits"),
        (lambda: moeroute.plan_from_expert_ids(distributed(IDS), 4), "plan_from_expert_ids: expert_ids"),
        (lambda: moeroute.plan_from_routing_map(distributed(CHOSEN)), "plan_from_routing_map: routing_map"),
        (lambda: moeroute.plan_from_token_ids(distributed(IDS[0]), 4), "plan_from_token_ids: token_ids"),
        (lambda: moe(distributed(x)), "nn.MoE: x"),
        (lambda: moe.router(distributed(x)), "nn.Router: tokens"),
    ):
        wanted = (
            f"moeroute.{argument} must be a torch.Tensor of this process, such as DTensor.to_local() gives; got DTensor"
        )
        with pytest.raises(TypeError, match=f"^{re.escape(wanted)}$"):
            call()


# ---------------------------------------------------------------------------- what records and what watches


def routings() -> dict[str, tuple[Callable[..., Tensor], Callable[[int], tuple[Tensor, ...]]]]:
    """Every verb in a function of tensors, and its inputs for a number of tokens."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

    def ids(tokens: int) -> Tensor:
        return random(tokens, 4).argsort(1)[:, :2]

    def by_ids(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        plan = moeroute.plan_from_expert_ids(expert_ids, 4, capacity=3, num_rows=expert_ids.shape[0] * 2)
        rows = moeroute.permute(x, plan, weights)
        return moeroute.unpermute(rows, plan, weights) + moeroute.row_dots(rows, x, plan).sum()

    def by_map(x: Tensor, routing_map: Tensor, weights: Tensor) -> Tensor:
        plan = moeroute.plan_from_routing_map(routing_map)
        rows = moeroute.permute(x, plan) * moeroute.permute_weights(weights, plan)[:, None]
        gradients = moeroute.unpermute_backward(x, rows, plan, weights)
        return moeroute.unpermute(rows, plan) + present(gradients[1]).sum(1, keepdim=True)

    def by_row(x: Tensor, row_of_slot: Tensor) -> Tensor:
        plan = moeroute.plan_from_row_of_slot(row_of_slot, x.shape[0], row_of_slot.shape[0])
        return moeroute.permute(x, plan)

    def by_token(x: Tensor, token_ids: Tensor) -> Tensor:
        plan = moeroute.plan_from_token_ids(token_ids, x.shape[0])
        return moeroute.permute_backward(x[token_ids], plan)

    def by_segment(x: Tensor, lengths: Tensor) -> Tensor:
        return moeroute.permute(x, moeroute.plan_from_segments(lengths, x.shape[0]))

    return {
        "layer": (layer, lambda n: (random(n, 16), random(n, 4))),
        "ids": (by_ids, lambda n: (random(n, 16), ids(n), random(n, 2))),
        "map": (by_map, lambda n: (random(n, 16), random(n, 4) > 0, random(n, 4))),
        "rows": (by_row, lambda n: (random(n, 16), random(2 * n).argsort())),
        "tokens": (by_token, lambda n: (random(n, 16), ids(n).reshape(-1) % n)),
        "segments": (by_segment, lambda n: (random(n, 16), torch.tensor([[n - 3, 1], [0, 2]]))),
    }


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace`:DeprecationWarning")
@pytest.mark.parametrize("recording", (False, True))
@pytest.mark.parametrize("which", routings())
def test_a_trace_answers_other_inputs(which: str, recording: bool) -> None:
    """torch.jit.trace records operators, not the memory they were given, and no number of tokens."""
    function, arguments = routings()[which]

    def given(tokens: int) -> tuple[Tensor, ...]:
        return tuple(a.requires_grad_(recording and a.is_floating_point()) for a in arguments(tokens))

    traced = torch.jit.trace(function, given(6))
    for tokens in (6, 12, 7):
        assert_same_bits(traced(*given(tokens)), function(*given(tokens)))
        if recording:
            assert_same_bits(outcome(traced, *given(tokens)), outcome(function, *given(tokens)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace`:DeprecationWarning")
@pytest.mark.parametrize(
    "options", ({}, {"capacity_factor": 1.0}, {"align": 4, "score": "sigmoid", "expert_bias": True})
)
def test_a_traced_layer_answers_other_inputs(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    moe = MoE(16, 32, 4, 2, **options)
    traced = torch.jit.trace(moe, (torch.randn(2, 3, 16),))
    for shape in ((2, 3, 16), (3, 7, 16)):
        x = torch.randn(shape)
        assert_same_bits(outcome(traced, x.requires_grad_()), outcome(moe, x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace`:DeprecationWarning")
def test_a_trace_refuses_a_buffer() -> None:
    plan = plans()[0]
    with pytest.raises(ValueError, match=r"moeroute\.permute_backward: out must be None under .*torch\.jit\.trace"):
        torch.jit.trace(
            lambda r: moeroute.permute_backward(r, plan, out=torch.empty(4, 3)), torch.ones(plan.num_rows, 3)
        )


@pytest.mark.parametrize(
    ("which", "operators"),
    [
        ("layer", {"gating_topk", "plan_expert_ids", "spread", "combine"}),
        ("ids", {"plan_expert_ids", "spread", "combine", "row_dots"}),
        (
            "map",
            {"plan_routing_map", "spread", "slot_weights", "take", "spread_dots", "slot_weights_backward", "combine"},
        ),
        ("rows", {"plan_row_of_slot", "spread"}),
        ("tokens", {"plan_token_ids", "combine"}),
        ("segments", {"plan_chunks", "spread"}),
    ],
)
def test_the_profiler_sees_routing(which: str, operators: set[str]) -> None:
    function, arguments = routings()[which]
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(*arguments(6))
    assert {e.key for e in profile.key_averages() if "moeroute" in e.key} == {f"moeroute::{o}" for o in operators}


def test_the_profiler_leaves_buffers_alone() -> None:
    plan, out = plans()[0], torch.empty(4, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        moeroute.permute_backward(torch.ones(plan.num_rows, 3), plan, out=out)
    assert_same_bits(out, moeroute.permute_backward(torch.ones(plan.num_rows, 3), plan))


# ---------------------------------------------------------------------------- modes


def test_autocast_changes_nothing() -> None:
    """B64, B65, B67."""
    tokens, logits = inputs()
    expected = outcome(layer, tokens, logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(outcome(layer, tokens, logits), expected)
        rows = moeroute.permute(tokens.bfloat16(), plans()[0]) if tokens.shape[0] == 4 else None
    assert rows is None
    plan = plans()[0]
    for dtype, weights_dtype in ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = torch.randn(plan.num_rows, 4).to(dtype).requires_grad_()
            weights = torch.rand(4, 2).to(weights_dtype).requires_grad_()
            output = moeroute.unpermute(rows, plan, weights)
            assert output.dtype is dtype
            output.float().sum().backward()
        assert rows.grad is not None
        assert weights.grad is not None
        assert (rows.grad.dtype, weights.grad.dtype) == (dtype, weights_dtype)


def everything(backend: Backend, dtype: torch.dtype, weights_dtype: torch.dtype) -> Iterator[Tensor]:
    """Every verb on a backend, with gradients of gradients, in rows and weights of these dtypes."""

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
        return drawn.to(dtype).requires_grad_()

    def derived(output: Tensor, *sources: Tensor) -> Iterator[Tensor]:
        first = torch.autograd.grad(output, sources, torch.ones_like(output), create_graph=True)
        yield output
        yield from first
        for gradient in first:
            if gradient.requires_grad and backend != "triton":  # whose interpreter is slow
                second = torch.autograd.grad(
                    gradient, sources, torch.ones_like(gradient), allow_unused=True, retain_graph=True
                )
                yield from (g for g in second if g is not None)

    options: dict[str, Any] = {"backend": backend}
    for score in ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax", "topk_sigmoid", "none"):
        logits, bias = random(4, 8), random(8).detach()
        gating = moeroute.gating_topk(
            logits, 2, score=score, bias=bias, num_groups=2, weights_dtype=weights_dtype, **options
        )
        yield gating.expert_ids
        yield from derived(gating.weights, logits)
    by_weight: dict[str, Any] = {"capacity": 2, "drop": "weight", "weights": random(4, 2, dtype=weights_dtype)}
    for plan in (
        moeroute.plan_from_expert_ids(IDS, 4, **by_weight, **options),
        moeroute.plan_from_routing_map(CHOSEN, topk=2, align=2, **options),
        moeroute.plan_from_row_of_slot(torch.tensor([3, 1, 0, 2, 6, 7, 5, 4]), 4, 8, **options),
    ):
        yield from (t for t in vars(plan).values() if isinstance(t, Tensor))
        x, rows = random(4, 5), random(plan.num_rows, 5)
        weights = random(4, 2 if plan.expert_of_slot is None else 4, dtype=weights_dtype)
        slots = random(plan.num_slots, dtype=weights_dtype)
        yield from derived(moeroute.permute(x, plan, weights, **options), x, weights)
        yield from derived(moeroute.unpermute(rows, plan, weights, **options), rows, weights)
        yield from derived(moeroute.row_dots(rows, x, plan, **options), rows, x)
        yield from derived(moeroute.permute_weights(weights, plan, **options), weights)
        with torch.no_grad():
            yield moeroute.unpermute_backward(x, rows, plan, weights, **options)[0]
            yield moeroute.combine(rows, plan, slots, init=(x, x), **options)
            yield moeroute.combine(rows, plan, out=torch.empty_like(x), **options)


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("dtypes", "autocast"),
    [
        ((torch.float32, torch.float32), torch.bfloat16),
        ((torch.float16, torch.float32), torch.bfloat16),
        ((torch.bfloat16, torch.float16), torch.float16),
    ],
    ids=str,
)
def test_backends_do_not_meet_autocast(
    backend: Backend, dtypes: tuple[torch.dtype, torch.dtype], autocast: torch.dtype
) -> None:
    expected = list(everything(backend, *dtypes))
    with torch.autocast("cpu", dtype=autocast):
        assert_same_bits(list(everything(backend, *dtypes)), expected)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints_recompute_the_same_bits(reentrant: bool) -> None:
    """B40: ties everywhere, and the same experts the second time."""
    tokens, _ = inputs(256)
    logits = (torch.arange(256 * 4).reshape(256, 4) % 3 / 2).requires_grad_()
    expected = outcome(layer, tokens, logits)
    recomputed = outcome(lambda x, y: checkpoint(layer, x, y, use_reentrant=reentrant), tokens, logits)
    assert_same_bits(recomputed, expected)


def test_inference_mode() -> None:
    tokens, logits = inputs()
    expected = layer(tokens, logits).detach()
    with torch.inference_mode():
        assert_same_bits(layer(tokens, logits), expected)


def test_fifty_runs_give_the_same_bits() -> None:
    """B37, B142."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(512, 512, generator=generator).bfloat16().requires_grad_()
    logits = torch.randn(512, 16, generator=generator, requires_grad=True)

    def step(tokens: Tensor, logits: Tensor) -> Tensor:
        gating = moeroute.gating_topk(logits, 8)
        plan = moeroute.plan_from_expert_ids(gating.expert_ids, 16)
        return moeroute.unpermute(moeroute.permute(tokens, plan), plan, gating.weights)

    expected = outcome(step, tokens, logits)
    for _ in range(49):
        assert_same_bits(outcome(step, tokens, logits), expected)


def test_nothing_is_kept_without_backward() -> None:
    """B130: an output dies at `del`, without the garbage collector."""
    import gc
    import weakref

    gc.disable()
    try:
        for _ in range(20):
            tokens, logits = inputs()
            output = layer(tokens, logits)
            alive = weakref.ref(output.grad_fn)
            del output
            assert alive() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------- threads and processes


def test_python_threads() -> None:
    """B89: each thread's results are its own."""
    problems = [inputs(300 + 50 * i, seed=i) for i in range(4)]
    expected = [outcome(layer, *p) for p in problems]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(25):
                assert_same_bits(outcome(layer, *problems[i]), expected[i])
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    pool = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    if failures:
        raise failures[0]


FOUR_THREADS = """
import threading, torch, moeroute
from moeroute.ops.numba_kit import launch
plan = moeroute.plan_from_expert_ids(torch.randint(8, (600, 4)), 8)
tokens = torch.randn(600, 500)
expected = moeroute.permute(tokens, plan)
assert launch.threading_layer() == {layer!r}, launch.threading_layer()
good = []
def work():
    for _ in range(50):
        rows = moeroute.permute(tokens, plan)
        assert torch.equal(rows, expected)
        moeroute.unpermute(rows, plan)
    good.append(1)
pool = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in pool]; [t.join() for t in pool]
assert len(good) == 4
"""


@pytest.mark.parametrize("layer", ("workqueue", "omp"))
def test_threading_layers(layer: str) -> None:
    """Numba's workqueue aborts the process when two threads enter it; ours wait for each other."""
    if layer == "omp":
        pytest.importorskip("numba.np.ufunc.omppool", reason="no OpenMP on this machine")
    environment = {**os.environ, "NUMBA_THREADING_LAYER": layer}
    done = subprocess.run(
        [sys.executable, "-c", FOUR_THREADS.format(layer=layer)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _in_child(queue: "multiprocessing.Queue[list[float]]") -> None:
    tokens, logits = inputs(300)
    queue.put(outcome(layer, tokens, logits)[0].flatten().tolist())


def _forking() -> None:
    torch.use_deterministic_algorithms(True)
    tokens, logits = inputs(300)
    expected = outcome(layer, tokens, logits)[0]
    plan = moeroute.plan_from_expert_ids(torch.randint(8, (600, 4)), 8)
    moeroute.permute(torch.randn(600, 500), plan)  # the pool is up
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    values = queue.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0
    assert_same_bits(torch.tensor(values).reshape(expected.shape), expected)


def test_after_fork() -> None:
    """B112: the parent has threads; the child goes on alone.

    The parent is a process of its own: after a FakeTensorMode, a torch with CUDA that finds no GPU starts autograd's
    threads for one, and then refuses every backward in a fork. Other tests use that mode.
    """
    parent = multiprocessing.get_context("spawn").Process(target=_forking)
    parent.start()
    parent.join(timeout=180)
    assert parent.exitcode == 0


@pytest.mark.parametrize("lock", ["Numba's", "LLVM's"])
def test_a_fork_while_another_thread_compiles(lock: str) -> None:
    """The child compiles too; the thread that had the lock is not there to give it back."""
    from llvmlite.binding import ffi
    from numba.core.compiler_lock import global_compiler_lock

    dispatch.module("rows", "cpu")  # with which a fork waits for that lock
    held = threading.Event()

    def hold() -> None:
        with global_compiler_lock if lock == "Numba's" else ffi.lib._lock:
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if numba.njit(lambda x: x + 1)(1) == 2 else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert numba.njit(lambda x: x + 2)(1) == 3


FORK_WHILE_ANOTHER_THREAD_IMPORTS = """
import importlib.abc, importlib.machinery, os, signal, sys, threading, time
import torch, moeroute

kernels, begun = "moeroute.ops.rows.on_numba", threading.Event()

class Slow(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        begun.set()
        time.sleep(0.5)
        super().exec_module(module)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != kernels:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Slow(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder())
plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1]]), 2, backend="reference")

def copies():
    return moeroute.permute(torch.ones(1, 3), plan).sum().item()

thread = threading.Thread(target=copies)
thread.start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if copies() == 6 else 1)
thread.join()
assert kernels in sys.modules
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_while_another_thread_imports_kernels() -> None:
    """The child would wait for ever for the lock of a module that nobody there imports."""
    done = subprocess.run([sys.executable, "-c", FORK_WHILE_ANOTHER_THREAD_IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Routed(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        tokens, logits = inputs(300, seed=index)
        return layer(tokens.detach(), logits.detach())


def test_data_loader_workers() -> None:
    loaded = list(DataLoader(Routed(), batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert_same_bits(loaded, [Routed()[i] for i in range(8)])


def test_the_reason_of_a_backend_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(dict[str, str], dispatch.FILES), "mine", "mine")
    assert dispatch.unavailable("mine") is None
    assert dispatch.unavailable("nobody") == "there is no backend of this name"


IMPORT = """
import sys, moeroute
loaded = [m for m in ("numba", "triton", "megatron", "transformers", "torch_npu", "matplotlib", "rich") if m in sys.modules]
assert not loaded, loaded
import torch
assert not torch.cuda.is_initialized()
assert not {"moeroute.nn", "moeroute.aclnn"} & set(sys.modules)
assert {"nn", "aclnn"} <= set(dir(moeroute))
assert moeroute.nn.MoE.__name__ == "MoE"
assert callable(moeroute.aclnn.aclnnMoeTokenPermute)
assert not hasattr(moeroute, "mm")
"""


def test_import_is_light() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True)


SECONDS = """
import time
start = time.process_time()
import torch
middle = time.process_time()
import moeroute
print(middle - start, time.process_time() - middle)
"""


def test_import_is_quick(tmp_path: os.PathLike[str]) -> None:
    """44 ms of processor time beside torch's 1,220, once Python has compiled the files: at most a twelfth of it."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    ratios = []
    for _ in range(4):  # the first compiles
        command = [sys.executable, "-c", SECONDS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        torch_itself, ours = map(float, done.stdout.split())
        ratios.append(ours / torch_itself)
    assert min(ratios) < 1 / 12, ratios


COLD = """
import torch, moeroute
plan = moeroute.plan_from_expert_ids(torch.tensor([[0, 1]]), 2)
print(moeroute.unpermute(moeroute.permute(torch.ones(1, 3), plan), plan).tolist())
"""


def test_two_processes_compile_at_once(tmp_path: os.PathLike[str]) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", COLD], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert output.strip() == "[[2.0, 2.0, 2.0]]"


UNCACHED = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []  # as where no folder can be written
from moeroute import cli
{call}
from moeroute.ops.numba_kit import launch
assert launch.cache_folder() is None
cli.main(["info"])
"""


def test_without_a_cache_folder_kernels_run_and_info_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCACHED.format(call=COLD)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("[[2.0, 2.0, 2.0]]\n")
    assert re.search(r"^kernel cache +none: ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("fullgraph", (True, False))
@pytest.mark.parametrize("argument", ("out", "init", "bias", "gating", "gating_backward", "plan"))
def test_compile_refuses_buffers_in_our_words(argument: str, fullgraph: bool) -> None:
    """With fullgraph torch.compile wraps the error; the text is inside."""
    plan = moeroute.plan_from_routing_map(CHOSEN)
    rows, tokens, logits = torch.ones(plan.num_rows, 3), torch.zeros(4, 3), torch.zeros(4, 5)
    weights, ids = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    options: dict[str, Any] = {"score": "softmax", "renormalize": False}
    call = {
        "out": lambda: moeroute.combine(rows, plan, out=tokens),
        "init": lambda: moeroute.combine(rows, plan, init=tokens),
        "bias": lambda: moeroute.row_dots(rows, tokens, plan, bias=torch.ones(4, 3)),
        "gating": lambda: moeroute.gating_topk(logits, 2, out=(weights, ids, torch.zeros(4, 5))),
        "gating_backward": lambda: moeroute.gating_topk_backward(
            logits, weights, ids, out=torch.zeros(4, 5), **options
        ),
        "plan": lambda: moeroute.plan_from_expert_ids(IDS, 4, out=ids),
    }[argument]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=fullgraph, backend="eager")
    kind = torch._dynamo.exc.Unsupported if fullgraph else ValueError
    with (
        torch.no_grad(),
        pytest.raises(kind, match=r"moeroute\.\w+: (out|out\[0\]|init|bias) must be None under torch.compile"),
    ):
        compiled()
    assert not bool(tokens.any()), "it was written"
