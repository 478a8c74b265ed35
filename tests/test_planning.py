"""Plans against plain Python loops, worked numbers of the specification, field reports, bad input, compile."""

import copy
import dataclasses
import math
import os
import pickle
from decimal import Decimal
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeroute.ops import launch
from moeroute.ops.planning import numba_cpu
from moeroute.ops.planning.op import (
    RoutingPlan,
    capacity_from_factor,
    plan_from_expert_ids,
    plan_from_routing_map,
    plan_from_row_of_slot,
    plan_from_segments,
    plan_from_token_ids,
)
from strategies import BACKENDS

INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
UNKNOWN = ("num_experts", "slot_offsets", "expert_of_slot", "tokens_per_expert", "rows_per_expert", "expert_of_row")


# ---------------------------------------------------------------------------- the loops that judge


def assign_rows(experts, lo, hi, capacity=None, drop="position", weights=None, pad=False, align=1, num_rows=None):
    """experts: the expert of each slot. Returns the plan's fields as lists."""

    def heaviest_first(slot):
        weight = weights[slot]
        return (0, 0.0, slot) if math.isnan(weight) else (1, -weight, slot)

    rows, owners, tokens, lengths = [], [], [], []
    for e in range(lo, hi):
        mine = [s for s, expert in enumerate(experts) if expert == e]
        if capacity is not None:
            if drop == "weight":
                mine = sorted(mine, key=heaviest_first)
            mine = sorted(mine[:capacity])
        length = capacity if pad else len(mine)
        while length % align:
            length += 1
        rows += mine + [-1] * (length - len(mine))
        owners += [e] * length
    if num_rows is not None:
        rows, owners = (rows + [-1] * num_rows)[:num_rows], owners[:num_rows]
    for e in range(lo, hi):
        lengths.append(owners.count(e))
        tokens.append(sum(owner == e and row >= 0 for owner, row in zip(owners, rows, strict=False)))
    row_of_slot = [rows.index(s) if s in rows else -1 for s in range(len(experts))]
    return {
        "row_of_slot": row_of_slot,
        "slot_of_row": rows,
        "num_rows": len(rows),
        "tokens_per_expert": tokens,
        "rows_per_expert": lengths,
        "expert_of_row": [owner - lo for owner in owners] + [-1] * (len(rows) - len(owners)),
    }


def offsets_of(tokens, num_tokens):
    return [sum(token < t for token in tokens) for t in range(num_tokens + 1)]


def expected_from_ids(ids, num_experts, expert_range=None, weights=None, **options):
    lo, hi = expert_range or (0, num_experts)
    topk = len(ids[0]) if ids else 0
    flat_weights = None if weights is None else [w for row in weights for w in row]
    fields = assign_rows([e for row in ids for e in row], lo, hi, weights=flat_weights, **options)
    return fields | {
        "topk": topk,
        "slot_offsets": None,
        "expert_of_slot": None,
        "token_of_slot": [t for t in range(len(ids)) for _ in range(topk)],
        "num_tokens": len(ids),
        "num_experts": num_experts,
    }


def expected_from_map(routing_map, num_experts, topk=None, expert_range=None, weights=None, **options):
    lo, hi = expert_range or (0, num_experts)
    entries = [(t, e) for t, row in enumerate(routing_map) for e in range(num_experts) if row[e]]
    flat_weights = None if weights is None else [weights[t][e] for t, e in entries]
    fields = assign_rows([e for _, e in entries], lo, hi, weights=flat_weights, **options)
    tokens = [t for t, _ in entries]
    experts = [e for _, e in entries]
    if topk is not None:
        table = []
        for t in range(len(routing_map)):
            mine = [s for s, token in enumerate(tokens) if token == t][:topk]
            table += mine + [-1] * (topk - len(mine))
        all_rows = fields["row_of_slot"]
        fields["row_of_slot"] = [all_rows[s] if s >= 0 else -1 for s in table]
        fields["slot_of_row"] = [table.index(s) if s >= 0 and s in table else -1 for s in fields["slot_of_row"]]
        experts = [experts[s] if s >= 0 else -1 for s in table]
        tokens = [t for t in range(len(routing_map)) for _ in range(topk)]
    return fields | {
        "topk": topk,
        "slot_offsets": None if topk is not None else offsets_of(tokens, len(routing_map)),
        "expert_of_slot": experts,
        "token_of_slot": tokens,
        "num_tokens": len(routing_map),
        "num_experts": num_experts,
    }


def expected_from_fill(
    routing_map, num_experts, capacity, expert_range=None, drop="position", weights=None, align=1, num_rows=None
):
    lo, hi = expert_range or (0, num_experts)
    num_tokens = len(routing_map)
    taken = []  # for each expert of the range its tokens in row order
    for e in range(lo, hi):
        true = [t for t in range(num_tokens) if routing_map[t][e]]
        if drop == "weight":
            column = [weights[t][e] for t in true]
            rows = assign_rows([0] * len(true), 0, 1, capacity, "weight", column)["row_of_slot"]
            true = [t for t, row in zip(true, rows, strict=True) if row >= 0]
        false = [t for t in range(num_tokens) if not routing_map[t][e]]
        taken.append((true + false if len(true) < capacity else true)[: min(capacity, num_tokens)])
    slots = [(t, lo + i) for t in range(num_tokens) for i in range(hi - lo) if t in taken[i]]
    rows, owners = [], []
    for i, mine in enumerate(taken):
        segment = -(-capacity // align) * align
        rows += [slots.index((t, lo + i)) for t in mine] + [-1] * (segment - len(mine))
        owners += [i] * segment
    if num_rows is not None:
        rows, owners = (rows + [-1] * num_rows)[:num_rows], owners[:num_rows]
    return {
        "row_of_slot": [rows.index(s) if s in rows else -1 for s in range(len(slots))],
        "slot_of_row": rows,
        "num_rows": len(rows),
        "tokens_per_expert": [
            sum(owner == i and row >= 0 for owner, row in zip(owners, rows, strict=False)) for i in range(hi - lo)
        ],
        "rows_per_expert": [owners.count(i) for i in range(hi - lo)],
        "expert_of_row": owners + [-1] * (len(rows) - len(owners)),
        "topk": None,
        "slot_offsets": offsets_of([t for t, _ in slots], num_tokens),
        "expert_of_slot": [e for _, e in slots],
        "token_of_slot": [t for t, _ in slots],
        "num_tokens": num_tokens,
        "num_experts": num_experts,
    }


def fields_of(plan):
    def plain(value):
        return value.tolist() if isinstance(value, torch.Tensor) else value

    names = (
        "row_of_slot slot_of_row num_tokens num_rows num_experts topk slot_offsets expert_of_slot tokens_per_expert"
        " rows_per_expert token_of_slot expert_of_row"
    )
    return {name: plain(getattr(plan, name)) for name in names.split()}


def check_plan(plan, expected):
    """Every field, the dtypes, and what must hold for any plan."""
    actual = fields_of(plan)
    assert actual == {name: expected[name] for name in actual}
    for name in ("row_of_slot", "slot_of_row", "slot_offsets", "expert_of_slot", "token_of_slot", "token_of_row"):
        tensor = getattr(plan, name)
        if tensor is not None:
            assert tensor.dtype is torch.int32
            assert tensor.is_contiguous()
    for tensor in (plan.tokens_per_expert, plan.rows_per_expert):
        if tensor is not None:
            assert tensor.dtype is torch.int64
    slots, rows, tokens = actual["row_of_slot"], actual["slot_of_row"], actual["token_of_slot"]
    assert plan.token_of_row.tolist() == [tokens[s] if s >= 0 else -1 for s in rows]
    assert all(rows[slots[s]] == s for s in range(len(slots)) if slots[s] >= 0)
    RoutingPlan(  # what the constructors skip
        **{f: getattr(plan, f) for f in RoutingPlan.__dataclass_fields__}
    )


# ---------------------------------------------------------------------------- drawn cases

WEIGHTS = st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 3.0, math.inf, -math.inf, math.nan])


@st.composite
def options(draw, num_experts, shape):
    lo = draw(st.integers(0, num_experts))
    capacity = draw(st.none() | st.integers(0, 6))
    weights = [[draw(WEIGHTS) for _ in range(shape[1])] for _ in range(shape[0])]
    return {
        "expert_range": draw(st.sampled_from([None, (lo, draw(st.integers(lo, num_experts)))])),
        "capacity": capacity,
        "drop": draw(st.sampled_from(["position", "weight"])),
        "weights": weights,
        "pad": capacity is not None and draw(st.booleans()),
        "align": draw(st.sampled_from([1, 1, 2, 3, 8])),
        "num_rows": draw(st.none() | st.integers(0, 40)),
    }


def call_options(options, dtype, shape):
    """The same options for a constructor."""
    call = dict(options)
    call["pad_to_capacity"] = call.pop("pad")
    call["weights"] = torch.tensor(call["weights"], dtype=dtype).reshape(shape)
    return call


WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def id_cases(draw):
    num_experts = draw(st.sampled_from([0, 1, 2, 3, 5, 8]))
    num_tokens, topk = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    one = st.integers(-2, num_experts + 1) | st.integers(0, max(num_experts - 1, 0))
    ids = [[draw(one) for _ in range(topk)] for _ in range(num_tokens)]
    return ids, topk, num_experts, draw(options(num_experts, (num_tokens, topk)))


@given(id_cases(), st.sampled_from([torch.int8, torch.int32, torch.int64]), st.sampled_from(WEIGHT_DTYPES), BACKENDS)
@settings(max_examples=150)
def test_expert_ids_drawn(case, dtype, weight_dtype, names):
    ids, topk, num_experts, drawn = case
    expected = expected_from_ids(ids, num_experts, **drawn) | {"topk": topk}
    call = call_options(drawn, weight_dtype, (len(ids), topk))
    tensor = torch.tensor(ids, dtype=dtype).reshape(len(ids), topk)
    before = tensor.clone()
    for name in names:
        check_plan(plan_from_expert_ids(tensor, num_experts, backend=name, **call), expected)
    assert torch.equal(tensor, before)


@st.composite
def map_cases(draw):
    num_experts = draw(st.sampled_from([0, 1, 2, 3, 8, 9, 16]))
    num_tokens = draw(st.integers(0, 7))
    routing_map = [[draw(st.sampled_from([0, 0, 1])) for _ in range(num_experts)] for _ in range(num_tokens)]
    return routing_map, num_experts, draw(options(num_experts, (num_tokens, num_experts)))


@given(
    map_cases(),
    st.none() | st.integers(0, 4),
    st.sampled_from([torch.bool, torch.int8, torch.uint8]),
    st.sampled_from(WEIGHT_DTYPES),
    BACKENDS,
)
@settings(max_examples=150)
def test_routing_map_drawn(case, topk, dtype, weight_dtype, names):
    routing_map, num_experts, drawn = case
    shape = (len(routing_map), num_experts)
    expected = expected_from_map(routing_map, num_experts, topk, **drawn)
    call = call_options(drawn, weight_dtype, shape)
    tensor = torch.tensor(routing_map).reshape(shape).to(dtype)
    for name in names:
        check_plan(plan_from_routing_map(tensor, topk=topk, backend=name, **call), expected)


@given(map_cases(), st.sampled_from(WEIGHT_DTYPES), BACKENDS)
@settings(max_examples=150)
def test_fill_drawn(case, weight_dtype, names):
    routing_map, num_experts, drawn = case
    shape = (len(routing_map), num_experts)
    drawn["capacity"] = drawn["capacity"] or 0
    call = call_options(drawn, weight_dtype, shape)
    del drawn["pad"]
    expected = expected_from_fill(routing_map, num_experts, **drawn)
    tensor = torch.tensor(routing_map).reshape(shape).to(torch.bool)
    for name in names:
        check_plan(plan_from_routing_map(tensor, fill=True, backend=name, **call), expected)


@given(
    st.lists(st.sampled_from([0, 1, 2, 255, 256, 257, 2**31, 2**40 + 1, 2**62, 2**63 - 1, -1, -(2**63)]), max_size=20),
    st.none() | st.integers(0, 25),
    BACKENDS,
)
def test_unknown_number_of_experts_drawn(ids, num_rows, names):
    order = sorted((s for s in range(len(ids)) if ids[s] >= 0), key=lambda s: ids[s])
    if num_rows is not None:
        order = (order + [-1] * num_rows)[:num_rows]
    expected = {
        "row_of_slot": [order.index(s) if s in order else -1 for s in range(len(ids))],
        "slot_of_row": order,
        "num_tokens": len(ids),
        "num_rows": len(order),
        "topk": 1,
        "token_of_slot": list(range(len(ids))),
    } | dict.fromkeys(UNKNOWN)
    for name in names:
        plan = plan_from_expert_ids(torch.tensor(ids, dtype=torch.int64), None, num_rows=num_rows, backend=name)
        check_plan(plan, expected)


INDICES = st.integers(-3, 12) | st.sampled_from([2**31, 2**31 - 1, 2**32 + 1, -(2**63), 2**63 - 1])


def last_slot_of_row(row_of_slot, num_rows):
    return [max([s for s, row in enumerate(row_of_slot) if row == r], default=-1) for r in range(num_rows)]


@given(st.data())
def test_row_of_slot_drawn(data):
    num_tokens, topk, num_rows = (data.draw(st.integers(low, 6)) for low in (0, 1, 0))
    first_row = data.draw(st.integers(0, 3))
    size = num_tokens * topk
    given_rows = data.draw(st.lists(INDICES, min_size=size, max_size=size))
    experts = data.draw(st.none() | st.lists(INDICES, min_size=size, max_size=size))
    rows = [r - first_row if first_row <= r < first_row + num_rows else -1 for r in given_rows]
    expected = dict.fromkeys(UNKNOWN) | {
        "row_of_slot": rows,
        "slot_of_row": last_slot_of_row(rows, num_rows),
        "num_tokens": num_tokens,
        "num_rows": num_rows,
        "topk": topk,
        "token_of_slot": [s // topk for s in range(size)],
        "expert_of_slot": None if experts is None else [e if 0 <= e < 2**31 else -1 for e in experts],
    }
    row_tensor = torch.tensor(given_rows, dtype=torch.int64).reshape(num_tokens, topk)
    if experts is not None:
        experts = torch.tensor(experts, dtype=torch.int64)
    for backend in data.draw(BACKENDS):
        plan = plan_from_row_of_slot(
            row_tensor, num_tokens, num_rows, first_row=first_row, expert_of_slot=experts, backend=backend
        )
        assert fields_of(plan) == expected
        if num_tokens:
            column_wise = row_tensor.t().contiguous().t()
            again = plan_from_row_of_slot(column_wise, num_tokens, num_rows, first_row=first_row, backend=backend)
            assert again.row_of_slot.tolist() == rows


@given(st.data())
def test_token_ids_drawn(data):
    num_tokens, num_entries = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 12))
    token_ids = data.draw(st.lists(INDICES, min_size=num_entries, max_size=num_entries))
    rows = data.draw(st.none() | st.lists(INDICES, min_size=num_entries, max_size=num_entries))
    num_experts = data.draw(st.none() | st.integers(1, 3))
    num_rows = data.draw(st.none() | st.integers(0, 4))
    if num_experts is not None:
        num_rows = num_experts * data.draw(st.integers(0, 4))
    size = num_entries if num_rows is None else num_rows
    order = [i for t in range(num_tokens) for i in range(num_entries) if token_ids[i] == t]
    row_of_slot = [i if rows is None else rows[i] for i in order] + [-1] * (num_entries - len(order))
    row_of_slot = [r if 0 <= r < size else -1 for r in row_of_slot]
    slot_of_row = last_slot_of_row(row_of_slot, size)
    expected = dict.fromkeys(UNKNOWN) | {
        "row_of_slot": row_of_slot,
        "slot_of_row": slot_of_row,
        "num_tokens": num_tokens,
        "num_rows": size,
        "topk": None,
        "slot_offsets": offsets_of([token_ids[i] for i in order], num_tokens),
        "token_of_slot": [token_ids[i] for i in order] + [-1] * (num_entries - len(order)),
    }
    if num_experts is not None:
        each = size // num_experts
        expected["num_experts"] = num_experts
        expected["expert_of_slot"] = [r // each if r >= 0 else -1 for r in row_of_slot]
        expected["tokens_per_expert"] = [
            sum(s >= 0 for s in slot_of_row[e * each : (e + 1) * each]) for e in range(num_experts)
        ]
        expected["rows_per_expert"] = [each] * num_experts
        expected["expert_of_row"] = [r // each for r in range(size)]
    tokens = torch.tensor(token_ids, dtype=torch.int64)
    rows = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    for backend in data.draw(BACKENDS):
        plan = plan_from_token_ids(
            tokens, num_tokens, rows=rows, num_rows=num_rows, num_experts=num_experts, backend=backend
        )
        assert fields_of(plan) == expected


@given(st.data())
def test_segments_drawn(data):
    ranks, num_experts = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    length = st.integers(-1, 4) | st.sampled_from([2**62, 2**63 - 1])
    lengths = [[data.draw(length) for _ in range(num_experts)] for _ in range(ranks)]
    num_tokens = data.draw(st.integers(0, 20))
    # Ever longer chunks than this change nothing, and would not fit into a list.
    cut = [[min(max(n, 0), num_tokens) for n in row] for row in lengths]
    token_side = [(rank, e, i) for rank in range(ranks) for e in range(num_experts) for i in range(cut[rank][e])]
    row_side = [(rank, e, i) for e in range(num_experts) for rank in range(ranks) for i in range(cut[rank][e])]
    token_side, row_side = (side[:num_tokens] for side in (token_side, row_side))
    pad = [-1] * (num_tokens - len(token_side))
    counts = [sum(e == expert for _, e, _ in row_side) for expert in range(num_experts)]
    expected = dict.fromkeys(UNKNOWN) | {
        "row_of_slot": [row_side.index(x) if x in row_side else -1 for x in token_side] + pad,
        "slot_of_row": [token_side.index(x) if x in token_side else -1 for x in row_side] + pad,
        "num_tokens": num_tokens,
        "num_rows": num_tokens,
        "num_experts": num_experts,
        "topk": 1,
        "token_of_slot": list(range(num_tokens)),
        "tokens_per_expert": counts,
        "rows_per_expert": counts,
        "expert_of_row": [e for _, e, _ in row_side] + pad,
    }
    tensor = torch.tensor(lengths, dtype=torch.int64).reshape(ranks, num_experts)
    for backend in data.draw(BACKENDS):
        assert fields_of(plan_from_segments(tensor, num_tokens, backend=backend)) == expected


# ---------------------------------------------------------------------------- threads


@pytest.fixture(params=[(2, 2), (2, 3), (1, 3)], ids=lambda pair: f"{pair[0]} threads, {pair[1]} chunks")
def split(request, monkeypatch):
    """Small problems go the way of the large ones."""
    threads, chunks = request.param
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr(launch, "SERIAL_WORK", 0)
    monkeypatch.setattr(numba_cpu, "SERIAL_WORK", 0)
    monkeypatch.setattr(numba_cpu, "_chunks", lambda work, bins: chunks)
    yield
    torch.set_num_threads(former)


def all_plans(backend):
    """One plan of every kind, from fixed draws."""
    generator = torch.Generator().manual_seed(0)

    def draw(low, high, *shape, dtype=torch.int32):
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
    rows = draw(-2, 70, 30, 3)
    yield plan_from_row_of_slot(rows, 30, 60, first_row=2, expert_of_slot=rows, backend=backend)
    yield plan_from_token_ids(draw(-1, 12, 80), 11, rows=draw(-1, 90, 80), num_rows=84, num_experts=7, backend=backend)
    yield plan_from_segments(draw(0, 5, 4, 6), 45, backend=backend)


@pytest.fixture(scope="module")
def reference_plans():
    return [fields_of(plan) for plan in all_plans("reference")]


def test_number_of_threads_and_chunks_changes_nothing(split, reference_plans):
    for _ in range(3):
        assert [fields_of(plan) for plan in all_plans("cpu")] == reference_plans


def test_every_backend_equals_the_reference(backend, reference_plans):
    assert [fields_of(plan) for plan in all_plans(backend)] == reference_plans


# ---------------------------------------------------------------------------- every option with every other


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("drop", ["position", "weight"])
def test_all_options_crossed(backend, drop, pad):
    """B20, B22: capacity, padding, alignment, rows, range, k and T; capacity above T too."""
    generator = torch.Generator().manual_seed(1)
    for factor, topk, num_tokens, align, num_rows, expert_range in product(
        (None, 0.5, 1, 10), (1, 2, 3), (0, 1, 7), (1, 4), (None, 9), (None, (1, 3))
    ):
        capacity = None if factor is None else capacity_from_factor(num_tokens, topk, 4, factor)
        ids = torch.randint(-1, 5, (num_tokens, topk), generator=generator)
        weights = torch.rand(num_tokens, topk, generator=generator)
        options = {"align": align, "num_rows": num_rows, "expert_range": expert_range, "capacity": capacity}
        options |= {"drop": drop, "pad": pad and capacity is not None}
        expected = expected_from_ids(ids.tolist(), 4, weights=weights.tolist(), **options) | {"topk": topk}
        options["pad_to_capacity"] = options.pop("pad")
        plan = plan_from_expert_ids(ids, 4, weights=weights, backend=backend, **options)
        assert fields_of(plan) == expected
        if capacity is not None:
            assert int(plan.tokens_per_expert.max()) <= capacity


def test_defaults_with_a_capacity(backend):
    """B19."""
    plan = plan_from_expert_ids(torch.tensor([[0], [0], [1]]), 2, capacity=1, backend=backend)
    assert plan.row_of_slot.tolist() == [0, -1, 1]


# ---------------------------------------------------------------------------- worked numbers of the specification


def test_token_permute_example(backend):
    """Section 5: sortedIndices is row_of_slot."""
    ids = torch.tensor([[1, 2], [0, 1], [0, 2]], dtype=torch.int32)
    for num_experts in (3, None):
        plan = plan_from_expert_ids(ids, num_experts, backend=backend)
        assert plan.row_of_slot.tolist() == [2, 4, 0, 3, 1, 5]
        assert plan.token_of_row.tolist() == [1, 2, 0, 1, 0, 2]
    first_three = plan_from_expert_ids(ids, None, num_rows=3, backend=backend)  # numOutTokens
    assert first_three.row_of_slot.tolist() == [2, -1, 0, -1, 1, -1]


def test_permute_with_ep_example(backend):
    """Section 12: rows [1, 5) of the sorted ones, for ids and for given indices."""
    plan = plan_from_expert_ids(torch.tensor([[1, 2], [3, 1], [2, 3]]), None, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 2, 4, 1, 3, 5]
    plan = plan_from_row_of_slot(torch.tensor([2, 0, 4, 1, 5, 3]), 3, 4, first_row=1, backend=backend)
    assert plan.row_of_slot.tolist() == [1, -1, 3, 0, -1, 2]
    assert plan.slot_of_row.tolist() == [3, 0, 5, 2]


def test_init_routing_example(backend):
    """Section 13: MoeInitRoutingV2, C = 2, drop and pad."""
    ids = torch.tensor([[1, 2], [0, 1], [0, 2]])
    plan = plan_from_expert_ids(ids, 3, capacity=2, pad_to_capacity=True, backend=backend)
    assert plan.row_of_slot.tolist() == [2, 4, 0, 3, 1, 5]
    assert plan.num_rows == 6
    assert plan_from_expert_ids(ids, 3, backend=backend).tokens_per_expert.tolist() == [2, 2, 2]


def test_compute_expert_tokens_example(backend):
    plan = plan_from_expert_ids(torch.tensor([0, 0, 1, 1, 2, 2]), 3, backend=backend)
    assert plan.tokens_per_expert.cumsum(0).tolist() == [2, 4, 6]


def test_permute_with_routing_map_example(backend):
    """Section 8, not padded: the slot table, and -1 where a token has fewer experts."""
    plan = plan_from_routing_map(torch.ones(3, 2, dtype=torch.int8), topk=2, num_rows=6, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 3, 1, 4, 2, 5]
    assert plan.slot_offsets is None
    fewer = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.int8)
    plan = plan_from_routing_map(fewer, topk=2, num_rows=6, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 2, -1, -1, 1, 3]
    assert plan.slot_of_row.tolist() == [0, 4, 1, 5, -1, -1]


@pytest.mark.parametrize("capacity", [1, 3, 7])
def test_drop_and_pad_is_a_stable_descending_sort(backend, capacity):
    """Section 8, padded: true tokens of each expert in order, then false ones, in order."""
    routing_map = torch.rand(7, 5, generator=torch.Generator().manual_seed(2)) < 0.4
    plan = plan_from_routing_map(routing_map, fill=True, capacity=capacity, backend=backend)
    golden = routing_map.t().to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :capacity]
    assert plan.token_of_row.tolist() == golden.reshape(-1).tolist()


def test_unpermute_with_routing_map_examples(backend):
    """Section 9: (a) padded, where sortedIndices holds token ids; (c) not padded, with an empty slot."""
    plan = plan_from_token_ids(torch.tensor([1, 1], dtype=torch.int32), 2, num_experts=2, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 1]  # outIndex
    assert plan.token_of_slot.tolist() == [1, 1]  # permuteTokenId
    assert plan.expert_of_slot.tolist() == [0, 1]
    plan = plan_from_row_of_slot(torch.tensor([0, -1, 1, 2], dtype=torch.int32), 2, 4, backend=backend)
    assert plan.row_of_slot.tolist() == [0, -1, 1, 2]
    assert plan.slot_of_row.tolist() == [0, 2, 3, -1]


def test_finalize_routing_column_layout(backend):
    """Section 13: expandedRowIdx[i + k * T] is token i's k-th row."""
    index = torch.tensor([2, 1, 4, 3, 0, 5], dtype=torch.int32)
    experts = torch.tensor([[0, 1], [0, 1], [0, 1]], dtype=torch.int32)
    plan = plan_from_row_of_slot(index.view(2, 3).t(), 3, 6, expert_of_slot=experts, backend=backend)
    assert plan.row_of_slot.tolist() == [2, 3, 1, 0, 4, 5]
    assert plan.expert_of_slot.tolist() == [0, 1, 0, 1, 0, 1]


def test_re_routing(backend):
    """Two ranks send [2, 1] and [1, 2] tokens for two experts."""
    plan = plan_from_segments(torch.tensor([[2, 1], [1, 2]], dtype=torch.int32), 6, backend=backend)
    assert plan.slot_of_row.tolist() == [0, 1, 3, 2, 4, 5]
    assert plan.tokens_per_expert.tolist() == [3, 3]
    longer = plan_from_segments(torch.tensor([[2, 1], [1, 2]]), 8, backend=backend)
    assert longer.row_of_slot.tolist() == [0, 1, 3, 2, 4, 5, -1, -1]


# ---------------------------------------------------------------------------- field reports


def test_b02_minus_one_is_no_slot(backend):
    plan = plan_from_expert_ids(torch.tensor([[2, -1], [-1, 0], [3, 2]]), 4, backend=backend)
    assert plan.token_of_row.tolist() == [1, 0, 2, 2]
    assert plan.tokens_per_expert.tolist() == [1, 0, 2, 1]
    assert plan.row_of_slot.tolist() == [1, -1, -1, 0, 3, 2]


def test_b04_tokens_with_different_numbers_of_experts(backend):
    routing_map = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.bool)
    plan = plan_from_routing_map(routing_map, backend=backend)
    assert plan.token_of_row.tolist() == [0, 0, 1]
    assert plan.tokens_per_expert.tolist() == [1, 1, 1]
    assert plan.slot_offsets.tolist() == [0, 2, 3, 3]


def test_b22_capacity_above_the_number_of_tokens(backend):
    ids, weights = torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 2)
    capacity = capacity_from_factor(2, 2, 2, 4)
    assert capacity == 8
    free = plan_from_expert_ids(ids, 2, backend=backend)
    for drop in ("position", "weight"):
        options = {"capacity": capacity, "drop": drop, "weights": weights, "backend": backend}
        assert fields_of(plan_from_expert_ids(ids, 2, **options)) == fields_of(free)
        padded = plan_from_expert_ids(ids, 2, pad_to_capacity=True, **options)
        assert padded.slot_of_row.tolist() == [0, 3, *[-1] * 6, 1, 2, *[-1] * 6]


@pytest.mark.parametrize(
    ("counts", "align", "padded"),
    [
        pytest.param([0, 1, 8, 9], 8, [0, 8, 8, 16], id="B28"),
        pytest.param([3, 2, 4], 1, [3, 2, 4], id="B53-1"),
        pytest.param([3, 2, 4], 4, [4, 4, 4], id="B53-4"),
        pytest.param([3, 2, 4], 16, [16, 16, 16], id="B53-16"),
        pytest.param([65, 64], 128, [128, 128], id="B116"),
        pytest.param([5, 0, 3], 16, [16, 0, 16], id="B127"),
    ],
)
def test_alignment(backend, counts, align, padded):
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    plan = plan_from_expert_ids(ids, len(counts), align=align, backend=backend)
    assert plan.tokens_per_expert.tolist() == counts
    assert plan.rows_per_expert.tolist() == padded
    assert plan.num_rows == sum(padded)
    assert sorted(s for s in plan.slot_of_row.tolist() if s >= 0) == list(range(len(ids)))
    assert int((plan.slot_of_row < 0).sum()) == sum(padded) - len(ids)
    starts = [sum(padded[:e]) for e in range(len(padded))]
    assert all(ids[plan.slot_of_row[start]] == e for e, start in enumerate(starts) if counts[e])


@pytest.mark.parametrize("topk", range(1, 10))
def test_b29_any_number_of_experts_per_token(backend, topk):
    for num_experts in (1, 3, 5, 6, 7, 12, 33):
        ids = (torch.arange(4 * topk).reshape(4, topk) * 7 + 3) % (num_experts + 1) - 1
        expected = expected_from_ids(ids.tolist(), num_experts)
        assert fields_of(plan_from_expert_ids(ids, num_experts, backend=backend)) == expected


def test_b29_multihot_map_is_the_same_plan(backend):
    ids = torch.tensor([[0, 4, -1], [2, 1, 3], [-1, -1, -1]])
    routing_map = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.int8)
    by_ids = plan_from_expert_ids(ids, 5, backend=backend)
    by_map = plan_from_routing_map(routing_map, backend=backend)
    assert by_ids.token_of_row.tolist() == by_map.token_of_row.tolist() == [0, 1, 1, 1, 0]
    assert by_ids.tokens_per_expert.tolist() == by_map.tokens_per_expert.tolist() == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("num_experts", [255, 256, 257, 1025, 4096])
def test_b32_b146_many_experts(backend, num_experts):
    ids = torch.randint(0, num_experts, (64, 4), generator=torch.Generator().manual_seed(0))
    ids[7, 2] = num_experts - 1
    plan = plan_from_expert_ids(ids, num_experts, backend=backend)
    assert plan.slot_of_row.tolist() == sorted(range(256), key=ids.reshape(-1).tolist().__getitem__)
    assert plan.tokens_per_expert.tolist() == torch.bincount(ids.reshape(-1), minlength=num_experts).tolist()


def test_b34_experts_no_multiple_of_anything(backend):
    plan = plan_from_expert_ids(torch.tensor([[4], [0], [1], [0]]), 5, backend=backend)
    assert plan.tokens_per_expert.tolist() == [2, 1, 0, 0, 1]
    assert plan.token_of_row.tolist() == [1, 3, 2, 0]


def test_b35_b133_experts_of_this_rank_only(backend):
    plan = plan_from_expert_ids(torch.tensor([[0, 2], [3, 1], [0, 1]]), 4, expert_range=(2, 4), backend=backend)
    assert plan.tokens_per_expert.tolist() == [1, 1]
    assert plan.row_of_slot.tolist() == [-1, 0, 1, -1, -1, -1]
    assert plan.num_experts == 4
    # The same as local ids with a sentinel in either manner.
    local = torch.tensor([[-1, 0], [1, -1], [-1, -1]])
    for sentinel in (-1, 2):
        ids = torch.where(local < 0, sentinel, local)
        assert plan_from_expert_ids(ids, 2, backend=backend).row_of_slot.tolist() == plan.row_of_slot.tolist()
    routing_map = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
    by_map = plan_from_routing_map(routing_map, expert_range=(2, 4), backend=backend)
    assert by_map.row_of_slot.tolist() == [-1, 0, -1, 1, -1, -1]
    assert by_map.expert_of_slot.tolist() == [0, 2, 1, 3, 0, 1]


@pytest.mark.skipif(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 2**32, reason="needs 4 GiB of memory")
def test_b52_map_with_more_entries_than_int32_counts():
    num_tokens = 2**23 + 1
    routing_map = torch.zeros(num_tokens, 256, dtype=torch.bool)
    for token, expert in ((0, 3), (2**22, 7), (num_tokens - 1, 255)):
        routing_map[token, expert] = True
    plan = plan_from_routing_map(routing_map, backend="cpu")
    assert plan.tokens_per_expert.nonzero().reshape(-1).tolist() == [3, 7, 255]
    assert plan.token_of_row.tolist() == [0, 2**22, num_tokens - 1]


def test_b53_a_plan_keeps_its_own_alignment(backend):
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    for align in (1, 4, 16):
        plan = plan_from_expert_ids(ids, 3, align=align, backend=backend)
        assert plan.token_of_row[plan.row_of_slot.long()].tolist() == list(range(9))


def test_b68_counts_have_every_expert(backend):
    plan = plan_from_expert_ids(torch.tensor([[0, 1], [1, 0]]), 5, backend=backend)
    assert plan.tokens_per_expert.tolist() == [2, 2, 0, 0, 0]


def test_b76_repeated_expert(backend):
    plan = plan_from_expert_ids(torch.tensor([[1, 1]]), 3, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 1]
    assert plan.tokens_per_expert.tolist() == [0, 2, 0]


def test_b82_padding_does_not_count(backend):
    ids = torch.tensor([[0], [0], [0], [0]])
    plan = plan_from_expert_ids(ids, 2, capacity=2, pad_to_capacity=True, backend=backend)
    assert plan.row_of_slot.tolist() == [0, 1, -1, -1]
    assert plan.tokens_per_expert.tolist() == [2, 0]
    assert plan.rows_per_expert.tolist() == [2, 2]
    assert plan_from_expert_ids(ids, 2, backend=backend).tokens_per_expert.tolist() == [4, 0]  # for the loss


def test_b88_the_same_stable_bijection_every_time(threads):
    ids = torch.randint(0, 8, (65536, 2), generator=torch.Generator().manual_seed(0))
    golden = torch.argsort(ids.reshape(-1), stable=True).to(torch.int32)
    for _ in range(50):
        plan = plan_from_expert_ids(ids, 8, backend="cpu")
        assert torch.equal(plan.slot_of_row, golden)
        assert torch.equal(plan.row_of_slot[golden.long()], torch.arange(131072, dtype=torch.int32))


def test_b98_capacity_is_exact():
    assert capacity_from_factor(5, 2, 3, 1.0) == 4
    assert capacity_from_factor(5, 2, 3, 1.25) == 5
    assert capacity_from_factor(5, 2, 3, 1.25, align=4) == 8
    assert capacity_from_factor(5, 2, 3, 1.0, minimum=8) == 8
    assert capacity_from_factor(6, 1, 3, 1.1) == 3
    assert capacity_from_factor(100, 1, 10, 1.1) == 11
    assert capacity_from_factor(10, 1, 10, 3.0) == 3
    assert capacity_from_factor(0, 2, 3, 1.5) == 0
    assert capacity_from_factor(3, 1, 1, Fraction(1, 3)) == 1
    assert capacity_from_factor(100, 1, 10, Decimal("1.1")) == 11
    assert capacity_from_factor(3, 1, 2, 1e-5) == 1


def test_b100_padding_tokens_take_no_capacity(backend):
    valid = torch.tensor([False, True, False, True])
    ids = torch.where(valid, 0, -1)
    plan = plan_from_expert_ids(ids, 2, capacity=1, backend=backend)
    assert plan.row_of_slot.tolist() == [-1, 0, -1, -1]
    assert plan.tokens_per_expert.tolist() == [1, 0]
    assert plan.num_rows == 1


def test_b107_ids_above_256_do_not_collide(backend):
    ids = torch.tensor([[259, 257], [258, 599], [257, 256]])
    for num_experts in (600, None):
        plan = plan_from_expert_ids(ids, num_experts, backend=backend)
        assert plan.token_of_row.tolist() == [2, 0, 2, 1, 0, 1]
        assert plan.slot_of_row.tolist() == [5, 1, 4, 2, 0, 3]


def test_b109_out_of_range_id(backend):
    ids = torch.tensor([[0, 7]])
    assert plan_from_expert_ids(ids, 4, backend=backend).row_of_slot.tolist() == [0, -1]
    with pytest.raises(ValueError, match="got 7 in slot 1"):
        plan_from_expert_ids(ids, 4, check=True, backend=backend)


def test_b125_padded_token(backend):
    plan = plan_from_expert_ids(torch.tensor([[-1, -1], [1, 0]]), 2, backend=backend)
    assert plan.tokens_per_expert.tolist() == [1, 1]
    assert plan.token_of_row.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_b131_every_integer_dtype(backend, dtype):
    ids = torch.tensor([[100, 5], [5, 127]]).to(dtype)
    for num_experts in (128, None):
        plan = plan_from_expert_ids(ids, num_experts, backend=backend)
        assert plan.row_of_slot.tolist() == [2, 0, 1, 3]
    if not dtype.is_signed:
        plan = plan_from_expert_ids(torch.tensor([[130], [5]]).to(dtype), 200, backend=backend)
        assert plan.tokens_per_expert[130] == 1
        assert plan.row_of_slot.tolist() == [1, 0]
    assert plan_from_token_ids(ids.reshape(-1), 128, backend=backend).token_of_slot.tolist() == [5, 5, 100, 127]
    rows = torch.tensor([0, 1], dtype=torch.int32)
    plan = plan_from_row_of_slot(rows, 1, 2, expert_of_slot=ids[:1], backend=backend)
    assert plan.expert_of_slot.tolist() == [100, 5]
    assert plan_from_segments(ids[:, :1], 105, backend=backend).tokens_per_expert.tolist() == [105]


def test_b131_bytes_of_a_map(backend):
    routing_map = torch.tensor([[1, 0, 255, 128]], dtype=torch.uint8)
    assert plan_from_routing_map(routing_map, backend=backend).expert_of_slot.tolist() == [0, 2, 3]
    assert plan_from_routing_map(routing_map.view(torch.int8), backend=backend).expert_of_slot.tolist() == [0, 2, 3]


def test_b137_rows_beyond_the_given_number_are_cut(backend):
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    plan = plan_from_expert_ids(ids, 2, align=4, num_rows=8, backend=backend)
    assert plan.slot_of_row.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert plan.row_of_slot.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert plan.tokens_per_expert.tolist() == [5, 0]
    assert plan.rows_per_expert.tolist() == [8, 0]


def test_b139_more_slots_than_a_float_counts():
    num_tokens = 2**21 + 1
    ids = (torch.arange(num_tokens * 8, dtype=torch.int32) % 13).reshape(num_tokens, 8)
    plan = plan_from_expert_ids(ids, 13, num_rows=num_tokens * 8, backend="cpu")
    count = num_tokens * 8
    assert plan.tokens_per_expert.tolist() == [(count - e + 12) // 13 for e in range(13)]
    # Slot s is the (s // 13)-th of expert s % 13.
    starts = plan.tokens_per_expert.cumsum(0) - plan.tokens_per_expert
    last = torch.arange(count - 40, count)
    assert plan.row_of_slot[-40:].tolist() == (starts[last % 13] + last // 13).tolist()
    assert int(plan.slot_of_row.min()) == 0
    assert int(plan.slot_of_row.max()) == count - 1


def test_b139_k_above_512(backend):
    ids = torch.arange(2 * 513).reshape(2, 513) % 600
    plan = plan_from_expert_ids(ids, 600, backend=backend)
    assert fields_of(plan) == expected_from_ids(ids.tolist(), 600)


def test_b143_mask_of_tokens(backend):
    padded = torch.tensor([False, True, False])
    routing_map = torch.ones(3, 3, dtype=torch.bool) & ~padded[:, None]
    plan = plan_from_routing_map(routing_map, backend=backend)
    assert plan.tokens_per_expert.tolist() == [2, 2, 2]
    assert plan.slot_offsets.tolist() == [0, 3, 3, 6]


def test_b59_no_token_and_nothing_but_empty_slots(backend):
    dummy = plan_from_expert_ids(torch.tensor([[-1, -1]]), 4, backend=backend)
    assert dummy.row_of_slot.tolist() == [-1, -1]
    none = plan_from_expert_ids(torch.empty(0, 2, dtype=torch.int64), 4, backend=backend)
    for plan in (dummy, none):
        assert plan.tokens_per_expert.tolist() == [0, 0, 0, 0]
        assert plan.num_rows == 0
        assert plan.slot_of_row.dtype is torch.int32


# ---------------------------------------------------------------------------- weights, strides, sizes


def test_drop_by_weight_is_exact_for_close_weights(backend):
    """Thousands of slots with few distinct weights: ties at every digit of the search."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 3, (900, 2), generator=generator)
    near_one = torch.randint(-3, 4, (900, 2), generator=generator).to(torch.int32) + 0x3F800000
    weights = torch.where(torch.rand(900, 2, generator=generator) < 0.3, -1.0, 1.0) * near_one.view(torch.float32)
    for capacity in (1, 100, 317, 599, 2000):
        plan = plan_from_expert_ids(ids, 3, capacity=capacity, drop="weight", weights=weights, backend=backend)
        flat_ids, flat_weights = ids.reshape(-1).tolist(), weights.reshape(-1).tolist()
        for e in range(3):
            mine = [s for s, expert in enumerate(flat_ids) if expert == e]
            heaviest = sorted(sorted(mine, key=lambda s: (-flat_weights[s], s))[:capacity])
            assert [s for s in plan.slot_of_row.tolist() if flat_ids[s] == e] == heaviest


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_order_of_special_weights(backend, dtype):
    """NaN of either sign is the largest, -0 equals +0, and of equal weights the earlier slot stays."""
    values = [-math.inf, -0.0, 0.0, -0.0, 1e-30, math.inf, -math.nan, math.nan, -1.0]
    by_weight = [6, 7, 5, 4, 1, 2, 3, 8, 0]
    if dtype is torch.float16:  # 1e-30 is a zero there
        by_weight = [6, 7, 5, 1, 2, 3, 4, 8, 0]
    weights = torch.tensor(values, dtype=dtype)
    ids = torch.zeros(9, dtype=torch.int64)
    for capacity in range(10):
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


def test_weights_are_cut_off_from_autograd(backend):
    weights = torch.rand(3, 2, requires_grad=True)
    ids = torch.tensor([[0, 1], [0, 1], [0, 1]])
    plan = plan_from_expert_ids(ids, 2, capacity=1, drop="weight", weights=weights, backend=backend)
    assert not plan.row_of_slot.requires_grad
    assert plan.tokens_per_expert.tolist() == [1, 1]


def test_float64_weights_decide_in_float64():
    weights = torch.tensor([[1.0], [1.0 + 2**-40]], dtype=torch.float64)
    ids = torch.tensor([[0], [0]])
    plan = plan_from_expert_ids(ids, 1, capacity=1, drop="weight", weights=weights)
    assert plan.row_of_slot.tolist() == [-1, 0]
    plan = plan_from_expert_ids(ids, 1, capacity=1, drop="weight", weights=weights.float())
    assert plan.row_of_slot.tolist() == [0, -1]


def test_strided_inputs(backend):
    ids = torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(0))
    expected = fields_of(plan_from_expert_ids(ids, 5, backend=backend))
    for strided in (ids.t().contiguous().t(), ids.repeat(1, 2)[:, :4], torch.stack([ids, ids], dim=2)[:, :, 0]):
        assert not strided.is_contiguous()
        assert fields_of(plan_from_expert_ids(strided, 5, backend=backend)) == expected
    routing_map = torch.rand(6, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    expected = fields_of(plan_from_routing_map(routing_map, backend=backend))
    shifted = torch.zeros(6 * 16 + 3, dtype=torch.bool)[3:].view(6, 16).copy_(routing_map)
    for strided in (routing_map.t().contiguous().t(), shifted):
        assert fields_of(plan_from_routing_map(strided, backend=backend)) == expected


def test_one_dimension_means_one_choice(backend):
    plan = plan_from_expert_ids(torch.tensor([1, 0, 1]), 2, backend=backend)
    assert plan.topk == 1
    assert plan.row_of_slot.tolist() == [1, 0, 2]
    none = plan_from_expert_ids(torch.empty(3, 0, dtype=torch.int64), 2, backend=backend)
    assert (none.num_tokens, none.topk, none.num_slots) == (3, 0, 0)


def test_results_can_be_changed_in_place(backend):
    plan = plan_from_expert_ids(torch.tensor([[1, 0]]), 2, backend=backend)
    for tensor in (plan.row_of_slot, plan.slot_of_row, plan.tokens_per_expert):
        assert tensor._base is None
        tensor.add_(1)


def test_modes(backend):
    ids = torch.tensor([[1, 0], [0, 2]])
    expected = fields_of(plan_from_expert_ids(ids, 3, backend=backend))
    with torch.inference_mode():
        assert fields_of(plan_from_expert_ids(ids, 3, backend=backend)) == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fields_of(plan_from_expert_ids(ids, 3, backend=backend)) == expected
    with torch.device("meta"):  # a default device is for the user's own tensors
        assert fields_of(plan_from_expert_ids(ids, 3, backend=backend)) == expected


# ---------------------------------------------------------------------------- RoutingPlan


def hand_made(**changes):
    fields = {
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


def test_plan_by_hand():
    plan = hand_made()
    assert plan.token_of_row.tolist() == [0, 0, -1]
    assert plan.expert_of_row.tolist() == [0, 1, -1]
    assert hand_made(tokens_per_expert=None, rows_per_expert=None).expert_of_row is None
    strided = hand_made(row_of_slot=torch.tensor([[0, 9], [1, 9]], dtype=torch.int32)[:, 0])
    assert strided.row_of_slot.is_contiguous()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_rows = 4
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
def test_plan_by_hand_is_checked(changes, error, message):
    with pytest.raises(error) as caught:
        hand_made(**changes)
    assert str(caught.value) == f"moeroute.RoutingPlan: {message}"


# ---------------------------------------------------------------------------- bad input

IDS = torch.tensor([[0, 1], [2, 1]])
MAP = torch.tensor([[True, False, True], [True, True, True]])
TWO_BILLION = torch.zeros(1, dtype=torch.uint8).expand(2**31)
LIMIT = 2147483647


def bad_ids(*args, **options):
    return lambda: plan_from_expert_ids(*(args or (IDS, 3)), **options)


def bad_map(*args, **options):
    return lambda: plan_from_routing_map(*(args or (MAP,)), **options)


def bad_rows(*args, **options):
    return lambda: plan_from_row_of_slot(*args, **options)


def bad_tokens(*args, **options):
    return lambda: plan_from_token_ids(*args, **options)


def bad_factor(*args, **options):
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
        (bad_ids(drop="bogus"), V, "drop must be one of 'position', 'weight'; got 'bogus'"),
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
        (bad_map(IDS), T, "routing_map must be bool, int8 or uint8; got torch.int64"),
        (bad_map(MAP[0]), V, "routing_map must be [T, E]; got shape [3]"),
        (bad_map(topk=-1), V, f"topk must be in 0..{LIMIT}; got -1"),
        (bad_map(topk=2**30), V, f"topk must be such that there are at most {LIMIT} slots; got 1073741824"),
        (bad_map(fill=True), V, "capacity must be given with pad_to_capacity or fill; got None"),
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
def test_bad_input(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).split(": ", 1)[1] == message
    assert str(caught.value).startswith("moeroute.")


def test_more_rows_than_int32(backend):
    """Three experts with a slot each, padded to 2^30 rows each: known only after looking."""
    with pytest.raises(ValueError, match="align must be such that there are at most 2147483647 rows"):
        plan_from_expert_ids(torch.tensor([0, 1, 2]), 3, align=2**30, backend=backend)


# ---------------------------------------------------------------------------- torch.library and torch.compile


@pytest.mark.parametrize("empty", [False, True], ids=["some tokens", "no token"])
def test_opcheck(backend, empty):
    ops = torch.ops.moeroute
    ids, routing_map = IDS, MAP
    if empty:
        ids, routing_map = ids[:0], routing_map[:0]
    weights, map_weights = torch.rand(ids.shape), torch.rand(routing_map.shape)
    flat, num_tokens = ids.reshape(-1), ids.shape[0]
    cases = [
        (ops.plan_expert_ids, (ids, None, 3, 0, 3, None, None, 1, None, False, backend)),
        (ops.plan_expert_ids, (ids.int(), weights, 3, 1, 3, 1, 2, 2, 5, True, backend)),
        (ops.plan_any_ids, (ids, None, False, backend)),
        (ops.plan_routing_map, (routing_map, None, 0, 3, None, False, None, None, 1, None, False, backend)),
        (ops.plan_routing_map, (routing_map, map_weights, 0, 3, 2, False, 1, None, 4, None, False, backend)),
        (ops.plan_routing_map, (routing_map, map_weights, 0, 3, None, True, 2, 2, 1, 6, True, backend)),
        (ops.plan_row_of_slot, (flat, flat, 4, 1, backend)),
        (ops.plan_token_ids, (flat, flat, num_tokens, 6, 2, backend)),
        (ops.plan_segments, (ids, 4, backend)),
    ]
    for operator, arguments in cases:
        torch.library.opcheck(operator.default, arguments)


def every_constructor(ids, routing_map, backend):
    num_tokens = ids.shape[0]
    plan = plan_from_expert_ids(ids, 4, align=2, check=True, backend=backend)
    yield plan
    yield plan_from_expert_ids(ids, 4, capacity=num_tokens, pad_to_capacity=True, backend=backend)
    yield plan_from_expert_ids(ids, 4, num_rows=ids.numel(), backend=backend)
    capacity = capacity_from_factor(num_tokens, 2, 4, 1.1)
    weights = ids * 0.5
    yield plan_from_expert_ids(
        ids, 4, expert_range=(1, 3), capacity=capacity, drop="weight", weights=weights, backend=backend
    )
    yield plan_from_expert_ids(ids, None, backend=backend)
    yield plan_from_row_of_slot(plan.row_of_slot, num_tokens, plan.num_rows, backend=backend)
    yield plan_from_token_ids(plan.token_of_row, num_tokens, num_rows=plan.num_rows, backend=backend)
    yield plan_from_routing_map(routing_map, backend=backend)
    yield plan_from_routing_map(routing_map, topk=2, backend=backend)
    yield plan_from_routing_map(routing_map, fill=True, capacity=3, backend=backend)
    yield plan_from_segments(ids, 3 * num_tokens, backend=backend)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_without_a_break(dynamic):
    """B134: the second call has other sizes; row counts come from the data."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *arguments: list(every_constructor(*arguments)), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for num_tokens in (5, 8, 3):
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(-1, 5, (num_tokens, 2), generator=generator)
        routing_map = torch.rand(num_tokens, 4, generator=generator) < 0.5
        plans = compiled(ids, routing_map, None)
        expected = list(every_constructor(ids, routing_map, None))
        assert [fields_of(plan) for plan in plans] == [fields_of(plan) for plan in expected]


def test_compile_with_inductor_and_checks_inside():
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: plan_from_expert_ids(ids, 4, check=True), fullgraph=True)
    assert compiled(IDS).row_of_slot.tolist() == [0, 1, 3, 2]
    with pytest.raises(ValueError, match="got 9 in slot 1"):
        compiled(torch.tensor([[0, 9], [0, 0]]))


def test_a_plan_goes_into_a_compiled_function():
    torch._dynamo.reset()
    compiled = torch.compile(lambda plan: plan.token_of_row * plan.num_tokens, fullgraph=True, backend="aot_eager")
    for ids in (IDS, torch.cat([IDS, IDS])):
        plan = plan_from_expert_ids(ids, 3)
        assert torch.equal(compiled(plan), plan.token_of_row * len(ids))


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
    "rows": lambda out, backend: plan_from_row_of_slot(
        torch.tensor([[3, -1], [9, 4], [5, 2]]), 3, 4, first_row=2, out=out, backend=backend
    ),
    "tokens": lambda out, backend: plan_from_token_ids(torch.tensor([1, 0, 7, 1, 0, 2]), 3, out=out, backend=backend),
    "segments": lambda out, backend: plan_from_segments(torch.tensor([[2, 1], [1, 2]]), 6, out=out, backend=backend),
}


@pytest.mark.parametrize("name", OUT_CASES)
def test_out_gets_row_of_slot(name: str, backend: str) -> None:
    plan = OUT_CASES[name](None, backend)
    assert plan.num_slots == 6
    for out in (
        torch.empty(6, dtype=torch.int32),
        torch.empty(3, 2, dtype=torch.int32),
        torch.empty(6, 3, dtype=torch.int32)[:, 1],
        torch.empty(2, 3, dtype=torch.int32).t(),
    ):
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
        with pytest.raises((ValueError, TypeError), match=r"^moeroute.plan_from_\w+: out must be "):
            OUT_CASES[name](wrong, backend)


def test_out_in_many_chunks() -> None:
    ids = torch.randint(-1, 64, (100_000, 2))
    out = torch.empty(200_000, dtype=torch.int32)
    plan = plan_from_expert_ids(ids, 64, out=out)
    assert plan.row_of_slot.data_ptr() == out.data_ptr()
    assert torch.equal(out, plan_from_expert_ids(ids, 64).row_of_slot)


@pytest.mark.parametrize("given_out", (False, True))
def test_lazily_negated_tensors_are_seen(backend: str, given_out: bool) -> None:
    """Memory holds the opposite of what the tensor says."""
    ids = torch.tensor([[0, 1], [1, 0], [1, 2]])
    weights = torch.tensor([[0.1, 0.2], [0.9, 0.4], [0.5, 0.3]])
    out = torch.empty(6, dtype=torch.int32) if given_out else None
    options = {"capacity": 1, "drop": "weight", "out": out, "backend": backend}
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


def test_usual_options_in_other_clothes() -> None:
    """The quick way asks for identity; what is merely equal goes the long way to the same plan."""
    ids = torch.tensor([[0, 1], [1, 0]])
    drop = "".join(["posi", "tion"])
    expected = plan_from_expert_ids(ids, 2).row_of_slot.tolist()
    assert plan_from_expert_ids(ids, 2, drop=drop).row_of_slot.tolist() == expected
    for options, name in ((dict(align=True), "align"), (dict(align=1.0), "align"), (dict(check=0), "check")):
        with pytest.raises(TypeError, match=f"plan_from_expert_ids: {name} must be"):
            plan_from_expert_ids(ids, 2, **options)
