"""Plans against plain Python loops, worked numbers of the specification, field reports, bad input, compile."""

import math
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moeroute.ops.planning.op import (
    RoutingPlan,
    capacity_from_factor,
    plan_from_expert_ids,
    plan_from_routing_map,
    plan_from_row_of_slot,
    plan_from_segments,
    plan_from_token_ids,
)

BACKENDS = ("reference", "cpu")
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


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


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
        taken.append((true[:capacity] + false)[: min(capacity, num_tokens)] if len(true) < capacity else true[:capacity])
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


@given(id_cases(), st.sampled_from([torch.int8, torch.int32, torch.int64]), st.sampled_from(WEIGHT_DTYPES))
@settings(deadline=None, max_examples=150)
def test_expert_ids_drawn(case, dtype, weight_dtype):
    ids, topk, num_experts, drawn = case
    expected = expected_from_ids(ids, num_experts, **drawn) | {"topk": topk}
    call = call_options(drawn, weight_dtype, (len(ids), topk))
    tensor = torch.tensor(ids, dtype=dtype).reshape(len(ids), topk)
    before = tensor.clone()
    for name in BACKENDS:
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
)
@settings(deadline=None, max_examples=150)
def test_routing_map_drawn(case, topk, dtype, weight_dtype):
    routing_map, num_experts, drawn = case
    shape = (len(routing_map), num_experts)
    expected = expected_from_map(routing_map, num_experts, topk, **drawn)
    call = call_options(drawn, weight_dtype, shape)
    tensor = torch.tensor(routing_map).reshape(shape).to(dtype)
    for name in BACKENDS:
        check_plan(plan_from_routing_map(tensor, topk=topk, backend=name, **call), expected)


@given(map_cases(), st.sampled_from(WEIGHT_DTYPES))
@settings(deadline=None, max_examples=150)
def test_fill_drawn(case, weight_dtype):
    routing_map, num_experts, drawn = case
    shape = (len(routing_map), num_experts)
    drawn["capacity"] = drawn["capacity"] or 0
    call = call_options(drawn, weight_dtype, shape)
    del drawn["pad"]
    expected = expected_from_fill(routing_map, num_experts, **drawn)
    tensor = torch.tensor(routing_map).reshape(shape).to(torch.bool)
    for name in BACKENDS:
        check_plan(plan_from_routing_map(tensor, fill=True, backend=name, **call), expected)


@given(
    st.lists(st.sampled_from([0, 1, 2, 255, 256, 257, 2**31, 2**40 + 1, 2**62, 2**63 - 1, -1, -(2**63)]), max_size=20),
    st.none() | st.integers(0, 25),
)
@settings(deadline=None, max_examples=60)
def test_unknown_number_of_experts_drawn(ids, num_rows):
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
    } | dict.fromkeys(
        "num_experts slot_offsets expert_of_slot tokens_per_expert rows_per_expert expert_of_row".split()
    )
    for name in BACKENDS:
        plan = plan_from_expert_ids(torch.tensor(ids, dtype=torch.int64), None, num_rows=num_rows, backend=name)
        check_plan(plan, expected)
