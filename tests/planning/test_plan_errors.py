"""Plans made by hand, and what the constructors refuse."""

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moeroute
from moeroute.dispatch import Backend
from moeroute.ops.indices.op import (
    plan_from_chunks,
    plan_from_row_id_map,
    plan_from_row_of_slot,
    plan_from_segments,
    plan_from_token_ids,
    row_id_map,
)
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.planning.op import capacity_from_factor, plan_from_expert_ids
from moeroute.plan import RoutingPlan
from plans_by_hand import (
    fields_of,
)
from small_cases import present

# ---------------------------------------------------------------------------- RoutingPlan


def hand_made(**changes: Any) -> RoutingPlan:
    fields: dict[str, Any] = {
        "row_of_slot": torch.tensor([0, 1], dtype=torch.int32),
        "slot_of_row": torch.tensor([0, 1, -1], dtype=torch.int32),
        "num_tokens": 1,
        "num_rows": 3,
        "num_experts": 2,
        "topk": 2,
        "tokens_per_expert": torch.tensor([1, 1]),
        "rows_per_expert": torch.tensor([1, 1]),
    }
    return RoutingPlan(**(fields | changes))


def test_plan_by_hand() -> None:
    plan = hand_made()
    assert plan.token_of_row.tolist() == [0, 0, -1]
    assert present(plan.expert_of_row).tolist() == [0, 1, -1]
    assert hand_made(tokens_per_expert=None, rows_per_expert=None).expert_of_row is None
    strided = hand_made(row_of_slot=torch.tensor([[0, 9], [1, 9]], dtype=torch.int32)[:, 0])
    assert strided.row_of_slot.is_contiguous()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_rows = 4  # type: ignore[misc]
    assert hash(plan) != hash(hand_made())
    for twin in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), dataclasses.replace(plan)):
        assert fields_of(twin) == fields_of(plan)


I32 = torch.int32


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_tokens": 1.0}, TypeError, "num_tokens must be an int; got float"),
        ({"num_rows": -1}, ValueError, "num_rows must be in 0..2147483647; got -1"),
        ({"topk": True}, TypeError, "topk must be an int; got bool"),
        ({"num_experts": -2}, ValueError, "num_experts must be in 0..2147483647; got -2"),
        ({"row_of_slot": [0, 1]}, TypeError, "row_of_slot must be a torch.Tensor; got list"),
        ({"row_of_slot": torch.tensor([0, 1])}, TypeError, "row_of_slot must be torch.int32; got torch.int64"),
        (
            {"tokens_per_expert": torch.zeros(2, dtype=I32)},
            TypeError,
            "tokens_per_expert must be torch.int64; got torch.int32",
        ),
        (
            {"slot_of_row": torch.zeros(3, 1, dtype=I32)},
            ValueError,
            "slot_of_row must be one-dimensional; got shape [3, 1]",
        ),
        (
            {"slot_of_row": torch.zeros(3, dtype=I32, device="meta")},
            ValueError,
            "slot_of_row must be on cpu, as row_of_slot; got meta",
        ),
        ({"num_rows": 4}, ValueError, "slot_of_row must be [R] with R = num_rows = 4; got shape [3]"),
        ({"topk": 3}, ValueError, "row_of_slot must be [S] with S = num_tokens * topk = 1 * 3; got shape [2]"),
        (
            {"slot_offsets": torch.zeros(2, dtype=I32)},
            ValueError,
            "slot_offsets must be None where topk is given; got shape [2]",
        ),
        ({"topk": None}, ValueError, "slot_offsets must be given where topk is None; got None"),
        (
            {"topk": None, "slot_offsets": torch.zeros(3, dtype=I32)},
            ValueError,
            "slot_offsets must be [T + 1] with T = num_tokens = 1; got shape [3]",
        ),
        (
            {"expert_of_slot": torch.zeros(3, dtype=I32)},
            ValueError,
            "expert_of_slot must be [S] with S = 2, as row_of_slot; got shape [3]",
        ),
        (
            {"rows_per_expert": None},
            ValueError,
            "rows_per_expert must be given where tokens_per_expert is, and only there; got None",
        ),
        (
            {"num_experts": 1},
            ValueError,
            "tokens_per_expert must be at most [E] with E = num_experts = 1; got shape [2]",
        ),
        (
            {"rows_per_expert": torch.zeros(1, dtype=torch.int64)},
            ValueError,
            "rows_per_expert must be [2], as tokens_per_expert; got shape [1]",
        ),
    ],
)
def test_plan_by_hand_is_checked(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        hand_made(**changes)
    assert str(caught.value) == f"moeroute.RoutingPlan: {message}"


# ---------------------------------------------------------------------------- bad input

IDS = torch.tensor([[0, 1], [2, 1]])
MAP = torch.tensor([[True, False, True], [True, True, True]])
TWO_BILLION = torch.zeros(1, dtype=torch.uint8).expand(2**31)
LIMIT = 2147483647


def bad_ids(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: plan_from_expert_ids(*(args or (IDS, 3)), **options)


def bad_map(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: plan_from_routing_map(*(args or (MAP,)), **options)


def bad_rows(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: plan_from_row_of_slot(*args, **options)


def bad_tokens(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: plan_from_token_ids(*args, **options)


def bad_factor(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: capacity_from_factor(*args, **options)


V, T = ValueError, TypeError
RANGE = "expert_range must be (lo, hi) with 0 <= lo <= hi <= num_experts = 3"
SHAPE_OF_ROWS = "row_of_slot must be [T, K] or [T * K] with T = num_tokens = 2"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        # expert ids
        (bad_ids([[0]], 3), T, "expert_ids must be a torch.Tensor; got list"),
        (bad_ids(IDS.float(), 3), T, "expert_ids must be of an integer dtype; got torch.float32"),
        (bad_ids(MAP, 3), T, "expert_ids must be of an integer dtype; got torch.bool"),
        (bad_ids(IDS[None], 3), V, "expert_ids must be [T, K] or [T]; got shape [1, 2, 2]"),
        (bad_ids(IDS[0, 0], 3), V, "expert_ids must be [T, K] or [T]; got shape []"),
        (
            bad_ids(TWO_BILLION, 3),
            V,
            f"expert_ids must be [T, K] or [T] with at most {LIMIT} elements; got shape [2147483648]",
        ),
        (bad_ids(IDS, 3.0), T, "num_experts must be an int; got float"),
        (bad_ids(IDS, -1), V, f"num_experts must be in 0..{LIMIT}; got -1"),
        (bad_ids(expert_range=3), T, f"{RANGE}; got int"),
        (bad_ids(expert_range="01"), T, f"{RANGE}; got str"),
        (bad_ids(expert_range=(0, 1, 2)), V, f"{RANGE}; got (0, 1, 2)"),
        (bad_ids(expert_range=(2, 1)), V, f"{RANGE}; got (2, 1)"),
        (bad_ids(expert_range=(-1, 1)), V, f"{RANGE}; got (-1, 1)"),
        (bad_ids(expert_range=(0, 4)), V, f"{RANGE}; got (0, 4)"),
        (bad_ids(expert_range=(0, 1.5)), T, "expert_range must be an int; got float"),
        (bad_ids(capacity=-1), V, f"capacity must be in 0..{LIMIT}; got -1"),
        (bad_ids(capacity=1.5), T, "capacity must be an int; got float"),
        (bad_ids(capacity=True), T, "capacity must be an int; got bool"),
        (bad_ids(drop="bogus"), V, "drop must be one of 'position', 'weight', 'choice'; got 'bogus'"),
        (bad_ids(capacity=1, drop="weight"), V, "weights must be given with drop='weight'; got None"),
        (bad_ids(weights=[1.0]), T, "weights must be a torch.Tensor; got list"),
        (bad_ids(weights=IDS), T, "weights must be float32, float16, bfloat16 or float64; got torch.int64"),
        (bad_ids(weights=torch.rand(2, 3)), V, "weights must be [2, 2], as expert_ids; got shape [2, 3]"),
        (bad_ids(weights=torch.rand(4)), V, "weights must be [2, 2], as expert_ids; got shape [4]"),
        (
            bad_ids(weights=torch.rand(2, 2, device="meta")),
            V,
            "weights must be on cpu, as expert_ids; got meta",
        ),
        (bad_ids(pad_to_capacity=True), V, "capacity must be given with pad_to_capacity or fill; got None"),
        (bad_ids(pad_to_capacity=1), T, "pad_to_capacity must be a bool; got int"),
        (bad_ids(align=0), V, f"align must be in 1..{LIMIT}; got 0"),
        (bad_ids(align=2.0), T, "align must be an int; got float"),
        (bad_ids(num_rows=-1), V, f"num_rows must be in 0..{LIMIT}; got -1"),
        (bad_ids(num_rows=2**31), V, f"num_rows must be in 0..{LIMIT}; got 2147483648"),
        (bad_ids(check="yes"), T, "check must be a bool; got str"),
        (
            bad_ids(capacity=2**30, pad_to_capacity=True),
            V,
            f"capacity must be such that there are at most {LIMIT} rows; got 3 experts with 1073741824 rows each",
        ),
        (bad_ids(IDS, None, capacity=4), V, "capacity must be None where num_experts is None; got 4"),
        (bad_ids(IDS, None, align=4), V, "align must be 1 where num_experts is None; got 4"),
        (bad_ids(IDS, None, expert_range=(0, 1)), V, "expert_range must be None where num_experts is None; got (0, 1)"),
        (
            bad_ids(IDS, None, pad_to_capacity=True),
            V,
            "pad_to_capacity must be False where num_experts is None; got True",
        ),
        (
            bad_ids(IDS - 2, 3, check=True),
            V,
            "expert_ids must be in -1..3 (-1 and num_experts are empty slots); got -2 in slot 0",
        ),
        (
            bad_ids(IDS * 2, 3, check=True),
            V,
            "expert_ids must be in -1..3 (-1 and num_experts are empty slots); got 4 in slot 2",
        ),
        (
            bad_ids(IDS - 3, None, check=True),
            V,
            "expert_ids must be -1 (an empty slot) or more; got -3 in slot 0",
        ),
        (bad_ids(backend="cuda"), V, "backend must be one of 'reference', 'cpu', 'triton'; got 'cuda'"),
        (
            bad_ids(capacity=1, drop="weight", weights=torch.rand(2, 2).double(), backend="cpu"),
            V,
            "backend must be 'reference' for torch.float64; got 'cpu'",
        ),
        # routing maps
        (bad_map([[1]]), T, "routing_map must be a torch.Tensor; got list"),
        (bad_map(IDS), T, "routing_map must be bool, int8, uint8 or int32; got torch.int64"),
        (bad_map(MAP[0]), V, "routing_map must be [T, E]; got shape [3]"),
        (bad_map(topk=-1), V, f"topk must be in 0..{LIMIT}; got -1"),
        (bad_map(topk=2**30), V, f"topk must be such that there are at most {LIMIT} slots; got 1073741824"),
        (bad_map(fill=True), V, "capacity must be given with pad_to_capacity or fill; got None"),
        (
            bad_map(fill=True, align=2, pad_to_capacity=True),
            V,
            "capacity must be given with pad_to_capacity or fill; got None",
        ),
        (bad_map(num_slots=-1), V, f"num_slots must be in 0..{LIMIT}; got -1"),
        (bad_map(num_slots=1.0), T, "num_slots must be an int; got float"),
        (bad_map(num_slots=3, topk=2), V, "num_slots must be None with topk, and with fill and a capacity; got 3"),
        (
            bad_map(num_slots=3, fill=True, capacity=2),
            V,
            "num_slots must be None with topk, and with fill and a capacity; got 3",
        ),
        (
            bad_map(num_slots=3, out=torch.empty(2, dtype=torch.int32)),
            V,
            "out must be of S = 3 elements; got shape [2]",
        ),
        (bad_map(fill=None), T, "fill must be a bool; got NoneType"),
        (bad_map(fill=True, capacity=1, topk=2), V, "topk must be None with fill; got 2"),
        (bad_map(expert_range=(2, 1)), V, f"{RANGE}; got (2, 1)"),
        (bad_map(drop="prob"), V, "drop must be one of 'position', 'weight'; got 'prob'"),
        (bad_map(capacity=1, drop="weight"), V, "weights must be given with drop='weight'; got None"),
        (bad_map(weights=torch.rand(2, 2)), V, "weights must be [2, 3], as routing_map; got shape [2, 2]"),
        (
            bad_map(topk=2, check=True),
            V,
            "routing_map must be true for at most topk = 2 experts of a token; got 3 for token 1",
        ),
        (
            bad_map(torch.tensor([[0, 1], [1, 2]], dtype=torch.int8), check=True),
            V,
            "routing_map must be 0 or 1; got 2 for token 1 and expert 1",
        ),
        # given indices
        (bad_rows([0], 1, 1), T, "row_of_slot must be a torch.Tensor; got list"),
        (bad_rows(IDS.to(torch.int16), 2, 4), T, "row_of_slot must be int32 or int64; got torch.int16"),
        (bad_rows(IDS, 3, 4), V, "row_of_slot must be [T, K] or [T * K] with T = num_tokens = 3; got shape [2, 2]"),
        (bad_rows(IDS.reshape(-1)[:3], 2, 4), V, f"{SHAPE_OF_ROWS}; got shape [3]"),
        (bad_rows(IDS[None], 2, 4), V, f"{SHAPE_OF_ROWS}; got shape [1, 2, 2]"),
        (
            bad_rows(IDS.reshape(-1), 0, 4),
            V,
            "row_of_slot must be [T, K] or [T * K] with T = num_tokens = 0; got shape [4]",
        ),
        (bad_rows(IDS, -1, 4), V, "num_tokens must be in 0..2147483646; got -1"),
        (bad_rows(IDS, 2, None), T, "num_rows must be an int; got NoneType"),
        (bad_rows(IDS, 2, -4), V, f"num_rows must be in 0..{LIMIT}; got -4"),
        (bad_rows(IDS, 2, 4, first_row=-1), V, "first_row must be in 0..4611686018427387904; got -1"),
        (
            bad_rows(IDS, 2, 4, expert_of_slot=IDS[:1]),
            V,
            "expert_of_slot must be [T, K] or [T * K] with 4 elements, as row_of_slot; got shape [1, 2]",
        ),
        (
            bad_rows(IDS, 2, 4, expert_of_slot=IDS.float()),
            T,
            "expert_of_slot must be of an integer dtype; got torch.float32",
        ),
        (bad_tokens(IDS, 2), V, "token_ids must be [N]; got shape [2, 2]"),
        (bad_tokens(IDS[0].double(), 2), T, "token_ids must be of an integer dtype; got torch.float64"),
        (bad_tokens(IDS[0], -2), V, "num_tokens must be in 0..2147483646; got -2"),
        (bad_tokens(IDS[0], 2, rows=IDS.reshape(-1)), V, "rows must be [N] with N = 2, as token_ids; got shape [4]"),
        (bad_tokens(IDS[0], 2, rows=IDS), V, "rows must be [N] with N = 2, as token_ids; got shape [2, 2]"),
        (bad_tokens(IDS[0], 2, num_rows=-1), V, f"num_rows must be in 0..{LIMIT}; got -1"),
        (bad_tokens(IDS[0], 2, num_experts=0), V, f"num_experts must be in 1..{LIMIT}; got 0"),
        (bad_tokens(IDS[0], 2, num_rows=5, num_experts=2), V, "num_rows must be a multiple of num_experts = 2; got 5"),
        (lambda: plan_from_segments(IDS[0], 2), V, "lengths must be [ranks, E]; got shape [2]"),
        (lambda: plan_from_segments(IDS.float(), 2), T, "lengths must be of an integer dtype; got torch.float32"),
        (lambda: plan_from_segments(IDS, -2), V, f"num_tokens must be in 0..{LIMIT}; got -2"),
        (lambda: plan_from_chunks(IDS, IDS[0], 2), V, "lengths must be [N]; got shape [2, 2]"),
        (
            lambda: plan_from_chunks(IDS[0].float(), IDS[0], 2),
            T,
            "lengths must be of an integer dtype; got torch.float32",
        ),
        (lambda: plan_from_chunks(IDS[0], IDS[0].bool(), 2), T, "order must be of an integer dtype; got torch.bool"),
        (lambda: plan_from_chunks(IDS[0], IDS, 2), V, "order must be [N] with N = 2, as lengths; got shape [2, 2]"),
        (lambda: plan_from_chunks(IDS[0], IDS[0, :1], 2), V, "order must be [N] with N = 2, as lengths; got shape [1]"),
        (lambda: plan_from_chunks(IDS[0], IDS[0], -2), V, f"num_tokens must be in 0..{LIMIT}; got -2"),
        (lambda: plan_from_row_id_map(IDS, 2), V, "row_id_map must be [T, 2E + 1]; got shape [2, 2]"),
        (lambda: plan_from_row_id_map(IDS[0], 2), V, "row_id_map must be [T, 2E + 1]; got shape [2]"),
        (lambda: plan_from_row_id_map(IDS.float(), 2), T, "row_id_map must be of an integer dtype; got torch.float32"),
        (lambda: plan_from_row_id_map(IDS[:, :1], -1), V, f"num_rows must be in 0..{LIMIT}; got -1"),
        (
            lambda: plan_from_row_id_map(IDS[:, :1], 1, pad_offsets=IDS[0]),
            V,
            "pad_offsets must be [E] with E = 0, as row_id_map; got shape [2]",
        ),
        (
            lambda: row_id_map(plan_from_expert_ids(IDS, None)),
            V,
            "plan must be one that knows the expert of each slot; got one without",
        ),
        # capacity
        (bad_factor(-1, 1, 1, 1.0), V, "num_tokens must be at least 0; got -1"),
        (bad_factor(1, 1, 0, 1.0), V, "num_experts must be at least 1; got 0"),
        (bad_factor(1, 1, 1, -0.5), V, "factor must be finite and at least 0; got -0.5"),
        (bad_factor(1, 1, 1, math.nan), V, "factor must be finite and at least 0; got nan"),
        (bad_factor(1, 1, 1, math.inf), V, "factor must be finite and at least 0; got inf"),
        (bad_factor(1, 1, 1, "2"), T, "factor must be a number; got str"),
        (bad_factor(1, 1, 1, 1.0, align=0), V, "align must be at least 1; got 0"),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).split(": ", 1)[1] == message
    assert str(caught.value).startswith("moeroute.")


def test_more_rows_than_int32(backend: Backend) -> None:
    """Three experts with a slot each, padded to 2^30 rows each: known only after looking."""
    with pytest.raises(ValueError, match="align must be such that there are at most 2147483647 rows"):
        plan_from_expert_ids(torch.tensor([0, 1, 2]), 3, align=2**30, backend=backend)


@pytest.mark.parametrize(
    "verb, choice, options",
    (
        ("plan_from_expert_ids", (torch.arange(3), 3), {}),
        ("plan_from_routing_map", (torch.eye(3) > 0,), {}),
        ("plan_from_routing_map", (torch.eye(3) > 0,), {"topk": 1}),
        ("plan_from_routing_map", (torch.eye(3) > 0,), {"fill": True}),
    ),
)
def test_more_rows_than_int32_names_the_verb(
    verb: str, choice: tuple[Any, ...], options: dict[str, Any], backend: Backend
) -> None:
    with pytest.raises(ValueError, match=rf"^moeroute\.{verb}: align must be such that"):
        getattr(moeroute, verb)(*choice, **options, align=2**30, backend=backend)
