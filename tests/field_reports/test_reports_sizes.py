"""Reports about sizes, memory and dispatch."""

import inspect
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from case_ids import spelled
from moeroute import dispatch, memory
from moeroute.dispatch import Backend
from moeroute.testing import assert_same_bits
from pages import guarded, mapped
from small_cases import plan_of, whole_numbers

# ---------------------------------------------------------------------------- sizes


def test_b05_rows_far_behind_two_billion_elements() -> None:
    """An int32 row number times the hidden size wrapped in the backward pass only.

    At the report's size, 304,000 rows of 7,168: 4.4 GB of addresses, of which 24 rows are ever touched. (The
    reference would copy the rows; its offsets are torch's.)
    """
    num_rows, hidden = 38_000 * 8, 7168
    rows = mapped(num_rows * hidden, torch.bfloat16).view(num_rows, hidden)
    at = torch.linspace(299_594, num_rows - 1, 24).long().flip(0)
    assert int(at.min()) * hidden > 2**31
    values = whole_numbers(24, hidden, seed=0).bfloat16()
    rows[at] = values
    plan = moeroute.plan_from_row_of_slot(at.reshape(3, 8), 3, num_rows)
    assert_same_bits(moeroute.permute_backward(rows, plan, backend="cpu"), values.reshape(3, 8, hidden).sum(1))
    weights = torch.full((3, 8), 0.5)
    halved = moeroute.unpermute(rows, plan, weights, backend="cpu")
    assert_same_bits(halved, values.reshape(3, 8, hidden).sum(1) / 2)
    grad = whole_numbers(3, hidden, seed=1).bfloat16()
    dots = moeroute.row_dots(rows, grad, plan, backend="cpu")
    assert_same_bits(dots, (values.float() * grad.float().repeat_interleave(8, 0)).sum(1))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_b05_every_row_operator_reads_and_writes_there(
    subtests: pytest.Subtests, backend: Backend, dtype: torch.dtype
) -> None:
    """The same products of row number and stride with four rows, 2^30 elements apart."""
    hidden, step = 70, 2**30 + 64

    def apart() -> Tensor:
        return mapped(2 * step + hidden, dtype).as_strided((3, hidden), (step, 1))

    plan = plan_of([[2], [1], [0]], 3, backend=backend)
    x, rows = whole_numbers(3, hidden, seed=0).to(dtype), whole_numbers(3, hidden, seed=1).to(dtype)
    weights = torch.tensor([[0.5], [2.0], [4.0]])
    far_x, far_rows = apart().copy_(x), apart().copy_(rows)
    slots, dots = weights.flatten(), (x * rows.flip(0)).float().sum(1)
    for out in (None, apart()):
        with subtests.test(given_out=out is not None):
            assert_same_bits(moeroute.spread(far_x, plan, out=out, backend=backend), x.flip(0))
            scaled = moeroute.spread(far_x, plan, slots, out=out, backend=backend)
            assert_same_bits(scaled, (x * weights).flip(0).to(dtype))
            assert_same_bits(moeroute.combine(far_rows, plan, out=out, backend=backend) + 0.0, rows.flip(0) + 0.0)
            combined = moeroute.combine(far_rows, plan, slots, init=far_x, out=out, backend=backend)
            assert_same_bits(combined, (x + rows.flip(0) * weights).to(dtype))
            pair = None if out is None else (out, torch.empty(3, 1))
            both = moeroute.unpermute_backward(far_x, far_rows, plan, weights, out=pair, backend=backend)
            assert_same_bits(both, ((x * weights).flip(0).to(dtype), dots[:, None]))
    assert_same_bits(moeroute.row_dots(far_rows, far_x, plan, backend=backend), dots)


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="guard pages need mprotect")
@pytest.mark.parametrize("hidden", (1, 3, 63, 64, 65, 257))
def test_b52_nothing_behind_the_last_element_is_touched(
    subtests: pytest.Subtests, backend: Backend, hidden: int
) -> None:
    """Weights of the wrong length were read beyond their end. Every tensor here ends at a forbidden page."""
    generator = torch.Generator().manual_seed(hidden)
    made = plan_of([[2, 0, -1], [1, 0, 2], [0, 2, 1]], 3)
    plan = moeroute.RoutingPlan(
        guarded(made.row_of_slot), guarded(made.slot_of_row), num_tokens=3, num_rows=made.num_rows, topk=3
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with subtests.test(dtype=dtype):
            x, rows = (
                torch.randn(3, hidden, generator=generator).to(dtype),
                torch.randn(8, hidden, generator=generator).to(dtype),
            )
            weights = torch.rand(3, 3, generator=generator).to(dtype)
            far_x, far_rows, far_weights = guarded(x), guarded(rows), guarded(weights)
            out_x, out_rows, out_weights = guarded(x), guarded(rows), guarded(weights)
            for w, far in ((None, None), (weights.flatten(), far_weights.flatten())):
                assert_same_bits(
                    moeroute.spread(far_x, plan, far, out=out_rows, backend=backend),
                    moeroute.spread(x, made, w, backend="reference"),
                )
                assert_same_bits(
                    moeroute.combine(far_rows, plan, far, out=out_x, backend=backend),
                    moeroute.combine(rows, made, w, backend="reference"),
                )
            assert_same_bits(
                moeroute.unpermute_backward(
                    far_x, far_rows, plan, far_weights, out=(out_rows, out_weights), backend=backend
                ),
                moeroute.unpermute_backward(x, rows, made, weights, backend="reference"),
            )


@pytest.mark.parametrize("shape", ((2, 2), (3, 3), (3, 0), (0, 2), (6,)))
def test_b52_weights_of_another_shape(subtests: pytest.Subtests, shape: tuple[int, ...]) -> None:
    plan = plan_of([[0, 1], [1, 2], [2, 0]], 3)
    message = rf"weights must be \[T, K\] with T = 3 and K = 2, as the plan; got shape {re.escape(str(list(shape)))}"
    calls: list[Callable[[Tensor], Any]] = [
        lambda w: moeroute.permute(torch.ones(3, 4), plan, w),
        lambda w: moeroute.unpermute(torch.ones(6, 4), plan, w),
        lambda w: moeroute.permute_weights(w, plan),
        lambda w: moeroute.unpermute_backward(torch.ones(3, 4), torch.ones(6, 4), plan, w),
    ]
    for call in calls:
        with subtests.test(spelled(call)), pytest.raises(ValueError, match=message):
            call(torch.ones(shape))


def test_b52_a_map_of_more_than_two_billion_entries() -> None:
    """Token times number of experts wrapped. 2.1 GB of zeros, of which a few pages are written.

    (The reference makes a list of the true entries with torch's own nonzero.)
    """
    num_tokens, num_experts = 2**23 + 1, 256
    routing_map = mapped(num_tokens * num_experts, torch.bool).view(num_tokens, num_experts)
    for token, expert in ((0, 3), (5, 255), (num_tokens - 2, 3), (num_tokens - 1, 0), (num_tokens - 1, 255)):
        routing_map[token, expert] = True
    plan = moeroute.plan_from_routing_map(routing_map, backend="cpu")
    counts = torch.zeros(256, dtype=torch.int64)
    counts[0], counts[3], counts[255] = 1, 2, 2
    assert_same_bits(plan.tokens_per_expert, counts)
    assert plan.token_of_row.tolist() == [num_tokens - 1, 0, num_tokens - 2, 5, num_tokens - 1]
    assert plan.row_of_slot.tolist() == [1, 3, 2, 0, 4]


def test_b160_a_million_tokens(backend: Backend) -> None:
    """A sort was written for no more than 64 thousand."""
    num_tokens = 2**17 + 1 if backend == "triton" else 2**20 + 1  # each block of which the interpreter takes in turn
    ids = (torch.arange(num_tokens) * 7919 % 256).to(torch.int32)
    plan = moeroute.plan_from_expert_ids(ids, 256, backend=backend)
    assert_same_bits(plan.tokens_per_expert, torch.bincount(ids, minlength=256))
    tokens = torch.arange(num_tokens, dtype=torch.int32)[:, None]
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert_same_bits(rows.flatten(), torch.argsort(ids, stable=True).int())
    assert_same_bits(moeroute.unpermute(rows.float(), plan, backend=backend), tokens.float())


@contextmanager
def at_most(allowed: int) -> Iterator[None]:
    """Peak resident memory may grow by so many bytes; the system counts, so that nothing escapes."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def peak() -> int:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    memory.empty_cache()
    try:
        reset.write_text("5")
    except OSError:
        pytest.skip("the system does not tell the peak of resident memory")
    before = peak()
    yield
    grown = peak() - before
    assert grown <= allowed, f"{grown / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f}"


def test_b70_no_second_copy_of_the_rows() -> None:
    """Combining allocated two buffers of the size of all rows, or a float32 copy of them."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    mib = 2**20
    ids = torch.rand(4096, 16, generator=torch.Generator().manual_seed(0)).topk(8).indices
    plan = moeroute.plan_from_expert_ids(ids, 16)
    tokens = torch.ones(4096, 1024, dtype=torch.bfloat16)
    weights = torch.rand(4096, 8)
    rows = moeroute.permute(tokens, plan)  # kernels and threads are there from here on
    moeroute.unpermute_backward(tokens, rows, plan, weights)
    moeroute.unpermute(rows, plan, weights)
    assert rows.nbytes == 64 * mib
    with at_most(64 * mib + 4 * mib):
        kept = moeroute.permute(tokens, plan)
    with at_most(8 * mib + 4 * mib):
        kept = moeroute.unpermute(rows, plan, weights)
    with at_most(8 * mib + 4 * mib):
        kept = moeroute.unpermute(rows, plan)
    with at_most(64 * mib + 4 * mib):
        kept = moeroute.unpermute_backward(tokens, rows, plan, weights)[0]
    del kept


# ---------------------------------------------------------------------------- backends


def test_b97_no_call_leaks_to_another_backend(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback was chosen, and one path still called what the device cannot do."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("another backend was called")

    others = [
        dispatch.module(room, name)
        for name in dispatch.NAMES
        if name != backend and dispatch.unavailable(name) is None
        for room in dispatch.ROOMS
    ]
    tokens = torch.randn(5, 8, requires_grad=True)
    logits = torch.randn(5, 4, requires_grad=True)
    routing_map = torch.tensor([[1, 0, 1, 0]] * 5, dtype=torch.bool)
    with monkeypatch.context() as patched:
        for module in others:
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if function.__module__ == module.__name__:
                    patched.setattr(module, name, refuse)
        gating = moeroute.gating_topk(logits, 2, score="sigmoid", backend=backend)
        plan = moeroute.plan_from_expert_ids(gating.expert_ids, 4, backend=backend)
        rows = moeroute.permute(tokens, plan, backend=backend)
        output = moeroute.unpermute(rows, plan, gating.weights, backend=backend)
        dense = moeroute.plan_from_routing_map(routing_map, backend=backend)
        weighted = moeroute.permute(tokens, dense, gating.scores, backend=backend)
        output = output + moeroute.unpermute(weighted, dense, backend=backend)
        grads = torch.autograd.grad(output.square().sum(), (tokens, logits), create_graph=True)
        torch.autograd.grad(grads[0].sum(), tokens)  # the row operators' second derivatives too
    for grad in grads:
        assert bool(grad.isfinite().all())
