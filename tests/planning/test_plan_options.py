"""Plans: threads and chunks, every option with every other, weights, strides, modes, `out`."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from case_ids import spelled
from moeroute.dispatch import Backend
from moeroute.ops.indices.op import (
    plan_from_chunks,
    plan_from_row_id_map,
    plan_from_row_of_slot,
    plan_from_segments,
    plan_from_token_ids,
)
from moeroute.ops.maps import on_numba as on_numba_maps
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.numba_kit import launch
from moeroute.ops.planning import on_numba
from moeroute.ops.planning.common import DropOfIds
from moeroute.ops.planning.op import capacity_from_factor, plan_from_expert_ids
from moeroute.plan import RoutingPlan
from plans_by_hand import WEIGHT_DTYPES, Fields, expected_from_ids, fields_of
from small_cases import present

# ---------------------------------------------------------------------------- threads


@pytest.fixture(params=[(2, 2), (2, 3), (1, 3)], ids=lambda pair: f"{pair[0]} threads, {pair[1]} chunks")
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems go the way of the large ones."""
    threads, chunks = request.param
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr(launch, "SERIAL_WORK", 0)
    monkeypatch.setattr(on_numba, "SERIAL_WORK", 0)
    for module in (on_numba, on_numba_maps):
        monkeypatch.setattr(module, "chunks_for", lambda work, bins: chunks)
    yield
    torch.set_num_threads(former)


def all_plans(backend: Backend) -> Iterator[RoutingPlan]:
    """One plan of every kind, from fixed draws."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    for dtype in (torch.int32, torch.int64):
        ids, weights = draw(-1, 8, 50, 3, dtype=dtype), torch.rand(50, 3, generator=generator)
        yield plan_from_expert_ids(ids, 7, backend=backend)
        yield plan_from_expert_ids(ids, 7, num_rows=170, align=4, backend=backend)
        yield plan_from_expert_ids(ids, 7, capacity=13, expert_range=(1, 6), backend=backend)
        yield plan_from_expert_ids(
            ids, 7, capacity=13, drop="weight", weights=weights, pad_to_capacity=True, num_rows=60, backend=backend
        )
        yield plan_from_expert_ids(ids, None, backend=backend)
    routing_map, weights = draw(0, 3, 40, 16, dtype=torch.uint8) == 0, torch.rand(40, 16, generator=generator)
    yield plan_from_routing_map(routing_map, backend=backend)
    yield plan_from_routing_map(routing_map, topk=4, expert_range=(2, 13), backend=backend)
    yield plan_from_routing_map(routing_map, capacity=9, drop="weight", weights=weights, align=2, backend=backend)
    yield plan_from_routing_map(routing_map, fill=True, capacity=14, num_rows=200, backend=backend)
    yield plan_from_routing_map(routing_map, fill=True, capacity=11, drop="weight", weights=weights, backend=backend)
    yield plan_from_routing_map(routing_map, fill=True, capacity=50, align=8, num_rows=999, backend=backend)
    yield plan_from_routing_map(routing_map, fill=True, align=8, backend=backend)
    yield plan_from_routing_map(routing_map, num_slots=300, backend=backend)
    yield plan_from_routing_map(routing_map, num_slots=150, num_rows=180, backend=backend)
    rows = draw(-2, 70, 30, 3)
    yield plan_from_row_of_slot(rows, 30, 60, first_row=2, expert_of_slot=rows, backend=backend)
    yield plan_from_token_ids(draw(-1, 12, 80), 11, rows=draw(-1, 90, 80), num_rows=84, num_experts=7, backend=backend)
    yield plan_from_segments(draw(0, 5, 4, 6), 45, backend=backend)
    yield plan_from_row_id_map(draw(-1, 90, 30, 17), 100, pad_offsets=draw(0, 9, 8), backend=backend)
    yield plan_from_chunks(draw(0, 5, 24), torch.randperm(24, generator=generator), 45, backend=backend)
    yield plan_from_chunks(draw(-1, 5, 24), draw(-1, 26, 24), 45, backend=backend)


@pytest.fixture(scope="module")
def reference_plans() -> list[Fields]:
    return [fields_of(plan) for plan in all_plans("reference")]


def test_number_of_threads_and_chunks_changes_nothing(split: None, reference_plans: list[Fields]) -> None:
    for _ in range(3):
        assert [fields_of(plan) for plan in all_plans("cpu")] == reference_plans


def test_every_backend_equals_the_reference(backend: Backend, reference_plans: list[Fields]) -> None:
    assert [fields_of(plan) for plan in all_plans(backend)] == reference_plans


# ---------------------------------------------------------------------------- every option with every other


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("drop", ["position", "weight"])
def test_all_options_crossed(subtests: pytest.Subtests, backend: Backend, drop: DropOfIds, pad: bool) -> None:
    """B20, B22: capacity, padding, alignment, rows, range, k and T; capacity above T too."""
    generator = torch.Generator().manual_seed(1)
    for factor, topk, num_tokens, align, num_rows, expert_range in product(
        (None, 0.5, 1, 10), (1, 2, 3), (0, 1, 7), (1, 4), (None, 9), (None, (1, 3))
    ):
        with subtests.test(
            factor=factor, topk=topk, num_tokens=num_tokens, align=align, num_rows=num_rows, expert_range=expert_range
        ):
            capacity = None if factor is None else capacity_from_factor(num_tokens, topk, 4, factor)
            ids = torch.randint(-1, 5, (num_tokens, topk), generator=generator)
            weights = torch.rand(num_tokens, topk, generator=generator)
            options: dict[str, Any] = {
                "align": align,
                "num_rows": num_rows,
                "expert_range": expert_range,
                "capacity": capacity,
            }
            options |= {"drop": drop, "pad": pad and capacity is not None}
            expected = expected_from_ids(ids.tolist(), 4, weights=weights.tolist(), **options) | {"topk": topk}
            options["pad_to_capacity"] = options.pop("pad")
            plan = plan_from_expert_ids(ids, 4, weights=weights, backend=backend, **options)
            assert fields_of(plan) == expected
            if capacity is not None:
                assert int(present(plan.tokens_per_expert).max()) <= capacity


def test_defaults_with_a_capacity(backend: Backend) -> None:
    """B19."""
    plan = plan_from_expert_ids(torch.tensor([[0], [0], [1]]), 2, capacity=1, backend=backend)
    assert plan.row_of_slot.tolist() == [0, -1, 1]


# ---------------------------------------------------------------------------- weights, strides, sizes


def test_drop_by_weight_is_exact_for_close_weights(subtests: pytest.Subtests, backend: Backend) -> None:
    """Thousands of slots with few distinct weights: ties at every digit of the search."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 3, (900, 2), generator=generator)
    near_one = torch.randint(-3, 4, (900, 2), generator=generator).to(torch.int32) + 0x3F800000
    weights = torch.where(torch.rand(900, 2, generator=generator) < 0.3, -1.0, 1.0) * near_one.view(torch.float32)
    for capacity in (1, 100, 317, 599, 2000):
        with subtests.test(capacity=capacity):
            plan = plan_from_expert_ids(ids, 3, capacity=capacity, drop="weight", weights=weights, backend=backend)
            flat_ids, flat_weights = ids.reshape(-1).tolist(), weights.reshape(-1).tolist()
            for e in range(3):
                mine = [s for s, expert in enumerate(flat_ids) if expert == e]
                heaviest = sorted(sorted(mine, key=lambda s: (-flat_weights[s], s))[:capacity])
                assert [s for s in plan.slot_of_row.tolist() if flat_ids[s] == e] == heaviest


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_order_of_special_weights(subtests: pytest.Subtests, backend: Backend, dtype: torch.dtype) -> None:
    """NaN of either sign is the largest, -0 equals +0, and of equal weights the earlier slot stays."""
    values = [-math.inf, -0.0, 0.0, -0.0, 1e-30, math.inf, -math.nan, math.nan, -1.0]
    by_weight = [6, 7, 5, 4, 1, 2, 3, 8, 0]
    if dtype is torch.float16:  # 1e-30 is a zero there
        by_weight = [6, 7, 5, 1, 2, 3, 4, 8, 0]
    weights = torch.tensor(values, dtype=dtype)
    ids = torch.zeros(9, dtype=torch.int64)
    for capacity in range(10):
        with subtests.test(capacity=capacity):
            plan = plan_from_expert_ids(ids, 1, capacity=capacity, drop="weight", weights=weights, backend=backend)
            assert plan.slot_of_row.tolist() == sorted(by_weight[:capacity])
            plan = plan_from_routing_map(
                torch.ones(9, 1, dtype=torch.bool),
                capacity=capacity,
                drop="weight",
                weights=weights[:, None],
                backend=backend,
            )
            assert plan.slot_of_row.tolist() == sorted(by_weight[:capacity])


def test_weights_are_cut_off_from_autograd(backend: Backend) -> None:
    weights = torch.rand(3, 2, requires_grad=True)
    ids = torch.tensor([[0, 1], [0, 1], [0, 1]])
    plan = plan_from_expert_ids(ids, 2, capacity=1, drop="weight", weights=weights, backend=backend)
    assert not plan.row_of_slot.requires_grad
    assert present(plan.tokens_per_expert).tolist() == [1, 1]


def test_float64_weights_decide_in_float64() -> None:
    weights = torch.tensor([[1.0], [1.0 + 2**-40]], dtype=torch.float64)
    ids = torch.tensor([[0], [0]])
    plan = plan_from_expert_ids(ids, 1, capacity=1, drop="weight", weights=weights)
    assert plan.row_of_slot.tolist() == [-1, 0]
    plan = plan_from_expert_ids(ids, 1, capacity=1, drop="weight", weights=weights.float())
    assert plan.row_of_slot.tolist() == [0, -1]


def test_strided_inputs(subtests: pytest.Subtests, backend: Backend) -> None:
    ids = torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(0))
    expected = fields_of(plan_from_expert_ids(ids, 5, backend=backend))
    for strided in (ids.t().contiguous().t(), ids.repeat(1, 2)[:, :4], torch.stack([ids, ids], dim=2)[:, :, 0]):
        with subtests.test(strides=strided.stride()):
            assert not strided.is_contiguous()
            assert fields_of(plan_from_expert_ids(strided, 5, backend=backend)) == expected
    routing_map = torch.rand(6, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    expected = fields_of(plan_from_routing_map(routing_map, backend=backend))
    shifted = torch.zeros(6 * 16 + 3, dtype=torch.bool)[3:].view(6, 16).copy_(routing_map)
    for strided in (routing_map.t().contiguous().t(), shifted):
        with subtests.test(strides=strided.stride()):
            assert fields_of(plan_from_routing_map(strided, backend=backend)) == expected


def test_one_dimension_means_one_choice(backend: Backend) -> None:
    plan = plan_from_expert_ids(torch.tensor([1, 0, 1]), 2, backend=backend)
    assert plan.topk == 1
    assert plan.row_of_slot.tolist() == [1, 0, 2]
    none = plan_from_expert_ids(torch.empty(3, 0, dtype=torch.int64), 2, backend=backend)
    assert (none.num_tokens, none.topk, none.num_slots) == (3, 0, 0)


def test_results_can_be_changed_in_place(backend: Backend) -> None:
    plan = plan_from_expert_ids(torch.tensor([[1, 0]]), 2, backend=backend)
    for tensor in (plan.row_of_slot, plan.slot_of_row, plan.tokens_per_expert):
        assert present(tensor)._base is None
        present(tensor).add_(1)


def test_modes(backend: Backend) -> None:
    ids = torch.tensor([[1, 0], [0, 2]])
    expected = fields_of(plan_from_expert_ids(ids, 3, backend=backend))
    with torch.inference_mode():
        assert fields_of(plan_from_expert_ids(ids, 3, backend=backend)) == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fields_of(plan_from_expert_ids(ids, 3, backend=backend)) == expected
    with torch.device("meta"):  # a default device is for the user's own tensors
        assert fields_of(plan_from_expert_ids(ids, 3, backend=backend)) == expected


# ---------------------------------------------------------------------------- out=


OUT_CASES = {
    "ids": lambda out, backend: plan_from_expert_ids(
        torch.tensor([[2, 0], [-1, 2], [0, 2]]), 4, capacity=2, align=2, out=out, backend=backend
    ),
    "any ids": lambda out, backend: plan_from_expert_ids(
        torch.tensor([[2, 10**12], [-1, 2], [0, 2]]), None, out=out, backend=backend
    ),
    "table": lambda out, backend: plan_from_routing_map(
        torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool), topk=2, out=out, backend=backend
    ),
    "map": lambda out, backend: plan_from_routing_map(
        torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 1]], dtype=torch.bool), out=out, backend=backend
    ),
    "fill": lambda out, backend: plan_from_routing_map(
        torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool),
        capacity=2,
        fill=True,
        out=out,
        backend=backend,
    ),
    "sized": lambda out, backend: plan_from_routing_map(
        torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool), num_slots=6, out=out, backend=backend
    ),
    "filled to a multiple": lambda out, backend: plan_from_routing_map(
        torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.int32), fill=True, align=2, out=out, backend=backend
    ),
    "rows": lambda out, backend: plan_from_row_of_slot(
        torch.tensor([[3, -1], [9, 4], [5, 2]]), 3, 4, first_row=2, out=out, backend=backend
    ),
    "tokens": lambda out, backend: plan_from_token_ids(torch.tensor([1, 0, 7, 1, 0, 2]), 3, out=out, backend=backend),
    "row id map": lambda out, backend: plan_from_row_id_map(
        torch.tensor([[0, 2, 0, 1, 2], [1, -1, 0, -1, 1]]), 6, out=out, backend=backend
    ),
    "chunks": lambda out, backend: plan_from_chunks(
        torch.tensor([2, 1, 2]), torch.tensor([1, 2, 0]), 6, out=out, backend=backend
    ),
    "segments": lambda out, backend: plan_from_segments(torch.tensor([[2, 1], [1, 2]]), 6, out=out, backend=backend),
}


@pytest.mark.parametrize("name", OUT_CASES)
def test_out_gets_row_of_slot(subtests: pytest.Subtests, name: str, backend: Backend) -> None:
    plan = OUT_CASES[name](None, backend)
    assert plan.num_slots == 6
    for out in (
        torch.empty(6, dtype=torch.int32),
        torch.empty(3, 2, dtype=torch.int32),
        torch.empty(6, 3, dtype=torch.int32)[:, 1],
        torch.empty(2, 3, dtype=torch.int32).t(),
    ):
        with subtests.test(strides=out.stride()):
            again = OUT_CASES[name](out, backend)
            assert out.reshape(-1).tolist() == plan.row_of_slot.tolist()
            for field in ("row_of_slot", "slot_of_row", "expert_of_slot", "slot_offsets", "tokens_per_expert"):
                a, b = getattr(again, field), getattr(plan, field)
                assert (a is None) == (b is None)
                if a is not None:
                    assert a.tolist() == b.tolist()
            if out.is_contiguous():
                assert again.row_of_slot.data_ptr() == out.data_ptr()
    for wrong in (torch.empty(5, dtype=torch.int32), torch.empty(6), 3):
        with (
            subtests.test(wrong=spelled(wrong)),
            pytest.raises((ValueError, TypeError), match=r"^moeroute.plan_from_\w+: out must be "),
        ):
            OUT_CASES[name](wrong, backend)


def test_out_in_many_chunks() -> None:
    ids = torch.randint(-1, 64, (100_000, 2))
    out = torch.empty(200_000, dtype=torch.int32)
    plan = plan_from_expert_ids(ids, 64, out=out)
    assert plan.row_of_slot.data_ptr() == out.data_ptr()
    assert torch.equal(out, plan_from_expert_ids(ids, 64).row_of_slot)


@pytest.mark.parametrize("given_out", (False, True))
def test_lazily_negated_tensors_are_seen(backend: Backend, given_out: bool) -> None:
    """Memory holds the opposite of what the tensor says."""
    ids = torch.tensor([[0, 1], [1, 0], [1, 2]])
    weights = torch.tensor([[0.1, 0.2], [0.9, 0.4], [0.5, 0.3]])
    out = torch.empty(6, dtype=torch.int32) if given_out else None
    options: dict[str, Any] = {"capacity": 1, "drop": "weight", "out": out, "backend": backend}
    plan = plan_from_expert_ids(torch._neg_view(-ids), 3, weights=torch._neg_view(-weights), **options)
    expected = plan_from_expert_ids(ids, 3, capacity=1, drop="weight", weights=weights, backend="reference")
    assert plan.row_of_slot.tolist() == expected.row_of_slot.tolist() == [-1, -1, 1, 0, -1, 2]
    wide = torch._neg_view(-ids).to(torch.uint64)
    assert plan_from_expert_ids(wide, 3, backend=backend).row_of_slot.tolist() == [0, 2, 3, 1, 4, 5]
    hand_made = RoutingPlan(
        torch._neg_view(-expected.row_of_slot), torch._neg_view(-expected.slot_of_row), 3, 3, topk=2
    )
    assert not hand_made.row_of_slot.is_neg()
    assert not hand_made.slot_of_row.is_neg()
    assert hand_made.row_of_slot.tolist() == expected.row_of_slot.tolist()


def test_usual_options_in_other_clothes(subtests: pytest.Subtests) -> None:
    """The quick way asks for identity; what is merely equal goes the long way to the same plan."""
    ids = torch.tensor([[0, 1], [1, 0]])
    drop: Any = "".join(["posi", "tion"])
    expected = plan_from_expert_ids(ids, 2).row_of_slot.tolist()
    assert plan_from_expert_ids(ids, 2, drop=drop).row_of_slot.tolist() == expected
    for options, name in ((dict(align=True), "align"), (dict(align=1.0), "align"), (dict(check=0), "check")):
        with (
            subtests.test(options=options),
            pytest.raises(TypeError, match=f"plan_from_expert_ids: {name} must be"),
        ):
            plan_from_expert_ids(ids, 2, **options)
