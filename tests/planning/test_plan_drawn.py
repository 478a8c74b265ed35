"""Every constructor of plans against plain Python loops, on drawn inputs."""

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from moeroute.ops.planning.op import plan_from_expert_ids
from plans_by_hand import (
    UNKNOWN,
    WEIGHT_DTYPES,
    check_plan,
    expected_from_fill,
    expected_from_ids,
    expected_from_map,
    fields_of,
    offsets_of,
    sized,
)
from strategies import BACKENDS

WEIGHTS = st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 3.0, math.inf, -math.inf, math.nan])


# The lists, K, E and options; the lists, E and options.
IdCase = tuple[list[list[int]], int, int, dict[str, Any]]
MapCase = tuple[list[list[int]], int, dict[str, Any]]


@st.composite
def options(draw: st.DrawFn, num_experts: int, shape: tuple[int, int]) -> dict[str, Any]:
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


def call_options(options: dict[str, Any], dtype: torch.dtype, shape: tuple[int, int]) -> dict[str, Any]:
    """The same options for a constructor."""
    call = dict(options)
    call["pad_to_capacity"] = call.pop("pad")
    call["weights"] = torch.tensor(call["weights"], dtype=dtype).reshape(shape)
    return call


@st.composite
def id_cases(draw: st.DrawFn) -> IdCase:
    num_experts = draw(st.sampled_from([0, 1, 2, 3, 5, 8]))
    num_tokens, topk = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    one = st.integers(-2, num_experts + 1) | st.integers(0, max(num_experts - 1, 0))
    ids = [[draw(one) for _ in range(topk)] for _ in range(num_tokens)]
    return ids, topk, num_experts, draw(options(num_experts, (num_tokens, topk)))


@given(id_cases(), st.sampled_from([torch.int8, torch.int32, torch.int64]), st.sampled_from(WEIGHT_DTYPES), BACKENDS)
@settings(max_examples=150)
def test_expert_ids_drawn(
    case: IdCase, dtype: torch.dtype, weight_dtype: torch.dtype, names: tuple[Backend, ...]
) -> None:
    ids, topk, num_experts, drawn = case
    expected = expected_from_ids(ids, num_experts, **drawn) | {"topk": topk}
    call = call_options(drawn, weight_dtype, (len(ids), topk))
    tensor = torch.tensor(ids, dtype=dtype).reshape(len(ids), topk)
    before = tensor.clone()
    for name in names:
        check_plan(plan_from_expert_ids(tensor, num_experts, backend=name, **call), expected)
    assert torch.equal(tensor, before)


@st.composite
def map_cases(draw: st.DrawFn) -> MapCase:
    num_experts = draw(st.sampled_from([0, 1, 2, 3, 8, 9, 16]))
    num_tokens = draw(st.integers(0, 7))
    routing_map = [[draw(st.sampled_from([0, 0, 1])) for _ in range(num_experts)] for _ in range(num_tokens)]
    return routing_map, num_experts, draw(options(num_experts, (num_tokens, num_experts)))


@given(
    map_cases(),
    st.none() | st.integers(0, 4),
    st.sampled_from([torch.bool, torch.int8, torch.uint8, torch.int32]),
    st.sampled_from(WEIGHT_DTYPES),
    BACKENDS,
)
@settings(max_examples=150)
def test_routing_map_drawn(
    case: MapCase, topk: int | None, dtype: torch.dtype, weight_dtype: torch.dtype, names: tuple[Backend, ...]
) -> None:
    routing_map, num_experts, drawn = case
    shape = (len(routing_map), num_experts)
    expected = expected_from_map(routing_map, num_experts, topk, **drawn)
    call = call_options(drawn, weight_dtype, shape)
    tensor = torch.tensor(routing_map).reshape(shape).to(dtype)
    for name in names:
        check_plan(plan_from_routing_map(tensor, topk=topk, backend=name, **call), expected)


@given(map_cases(), st.sampled_from(WEIGHT_DTYPES), BACKENDS)
@settings(max_examples=150)
def test_fill_drawn(case: MapCase, weight_dtype: torch.dtype, names: tuple[Backend, ...]) -> None:
    routing_map, num_experts, drawn = case
    shape = (len(routing_map), num_experts)
    drawn["capacity"] = drawn["capacity"] or 0
    call = call_options(drawn, weight_dtype, shape)
    del drawn["pad"]
    expected = expected_from_fill(routing_map, num_experts, **drawn)
    tensor = torch.tensor(routing_map).reshape(shape).to(torch.bool)
    for name in names:
        check_plan(plan_from_routing_map(tensor, fill=True, backend=name, **call), expected)


@given(map_cases(), st.integers(0, 40), BACKENDS)
@settings(max_examples=100)
def test_given_number_of_slots_drawn(case: MapCase, num_slots: int, names: tuple[Backend, ...]) -> None:
    routing_map, num_experts, drawn = case
    shape = (len(routing_map), num_experts)
    expected = sized(expected_from_map(routing_map, num_experts, None, **drawn), num_slots)
    call = call_options(drawn, torch.float32, shape)
    tensor = torch.tensor(routing_map, dtype=torch.bool).reshape(shape)
    for name in names:
        check_plan(plan_from_routing_map(tensor, num_slots=num_slots, backend=name, **call), expected)


@given(map_cases(), st.sampled_from([2, 3, 4, 8]), st.none() | st.integers(0, 60), BACKENDS)
@settings(max_examples=150)
def test_fill_to_alignment_drawn(case: MapCase, align: int, num_slots: int | None, names: tuple[Backend, ...]) -> None:
    routing_map, num_experts, drawn = case
    shape = (len(routing_map), num_experts)
    call = {name: drawn[name] for name in ("expert_range", "num_rows")} | {"align": align}
    expected = expected_from_fill(routing_map, num_experts, None, **call)
    if num_slots is not None:
        expected = sized(expected, num_slots)
    tensor = torch.tensor(routing_map, dtype=torch.int32).reshape(shape)
    for name in names:
        check_plan(plan_from_routing_map(tensor, fill=True, num_slots=num_slots, backend=name, **call), expected)


@given(
    st.lists(st.sampled_from([0, 1, 2, 255, 256, 257, 2**31, 2**40 + 1, 2**62, 2**63 - 1, -1, -(2**63)]), max_size=20),
    st.none() | st.integers(0, 25),
    BACKENDS,
)
def test_unknown_number_of_experts_drawn(ids: list[int], num_rows: int | None, names: tuple[Backend, ...]) -> None:
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


def last_slot_of_row(row_of_slot: list[int], num_rows: int) -> list[int]:
    return [max([s for s, row in enumerate(row_of_slot) if row == r], default=-1) for r in range(num_rows)]


@given(st.data())
def test_row_of_slot_drawn(data: st.DataObject) -> None:
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
    expert_tensor = None if experts is None else torch.tensor(experts, dtype=torch.int64)
    for backend in data.draw(BACKENDS):
        plan = plan_from_row_of_slot(
            row_tensor, num_tokens, num_rows, first_row=first_row, expert_of_slot=expert_tensor, backend=backend
        )
        assert fields_of(plan) == expected
        if num_tokens:
            column_wise = row_tensor.t().contiguous().t()
            again = plan_from_row_of_slot(column_wise, num_tokens, num_rows, first_row=first_row, backend=backend)
            assert again.row_of_slot.tolist() == rows


@given(st.data())
def test_token_ids_drawn(data: st.DataObject) -> None:
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
    row_tensor = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    for backend in data.draw(BACKENDS):
        plan = plan_from_token_ids(
            tokens, num_tokens, rows=row_tensor, num_rows=num_rows, num_experts=num_experts, backend=backend
        )
        assert fields_of(plan) == expected


@given(st.data())
def test_segments_drawn(data: st.DataObject) -> None:
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


@given(st.data())
def test_chunks_drawn(data: st.DataObject) -> None:
    num_chunks = data.draw(st.integers(0, 6))
    lengths = data.draw(st.lists(st.integers(-1, 4) | st.just(2**63 - 1), min_size=num_chunks, max_size=num_chunks))
    anything = st.lists(st.integers(-2, 8) | st.just(2**40), min_size=num_chunks, max_size=num_chunks)
    order = data.draw(st.permutations(range(num_chunks)) | anything)
    num_tokens = data.draw(st.integers(0, 20))
    token_side = [(c, i) for c in range(num_chunks) for i in range(min(max(lengths[c], 0), num_tokens))]
    row_side = [
        (c, i)
        for at, c in enumerate(order)
        if 0 <= c < num_chunks and c not in order[at + 1 :]
        for i in range(min(max(lengths[c], 0), num_tokens))
    ]
    token_side, row_side = (side[:num_tokens] for side in (token_side, row_side))
    unused_rows, unused_tokens = ([-1] * (num_tokens - len(side)) for side in (row_side, token_side))
    expected = dict.fromkeys(UNKNOWN) | {
        "row_of_slot": [row_side.index(x) if x in row_side else -1 for x in token_side] + unused_tokens,
        "slot_of_row": [token_side.index(x) if x in token_side else -1 for x in row_side] + unused_rows,
        "num_tokens": num_tokens,
        "num_rows": num_tokens,
        "topk": 1,
        "token_of_slot": list(range(num_tokens)),
    }
    for backend in data.draw(BACKENDS):
        plan = plan_from_chunks(
            torch.tensor(lengths, dtype=torch.int64),
            torch.tensor(order, dtype=torch.int64),
            num_tokens,
            backend=backend,
        )
        assert fields_of(plan) == expected


@given(st.data())
def test_row_id_map_drawn(data: st.DataObject) -> None:
    num_tokens, num_experts = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 4))
    num_rows = data.draw(st.integers(0, 14))
    width = 2 * num_experts + 1
    entry = st.integers(-1, 6) | st.sampled_from([2**31 - 1, -(2**31)])
    lines = [[data.draw(entry) for _ in range(width)] for _ in range(num_tokens)]
    pads = data.draw(st.none() | st.lists(entry, min_size=num_experts, max_size=num_experts))
    tokens, rows, experts = [], [], []
    for t, line in enumerate(lines):
        for k in range(min(max(line[-1], 0), num_experts)):
            row, expert = line[k], line[num_experts + k]
            live = 0 <= row < num_rows and 0 <= expert < num_experts
            if live and pads is not None:
                live = pads[expert] >= 0 and row + pads[expert] < num_rows
                row += pads[expert]
            tokens.append(t)
            rows.append(row if live else -1)
            experts.append(expert if live else -1)
    spare = [-1] * (num_rows - len(tokens))
    rows, experts, owners = ((found + spare)[:num_rows] for found in (rows, experts, tokens))
    expected = dict.fromkeys(UNKNOWN) | {
        "row_of_slot": rows,
        "slot_of_row": last_slot_of_row(rows, num_rows),
        "num_tokens": num_tokens,
        "num_rows": num_rows,
        "topk": None,
        "num_experts": num_experts,
        "slot_offsets": [min(end, num_rows) for end in offsets_of(tokens, num_tokens)],
        "expert_of_slot": experts,
        "token_of_slot": owners,
    }
    for backend in data.draw(BACKENDS):
        for dtype in (torch.int32, torch.int64):
            plan = plan_from_row_id_map(
                torch.tensor(lines, dtype=dtype).reshape(num_tokens, width),
                num_rows,
                pad_offsets=None if pads is None else torch.tensor(pads, dtype=dtype),
                backend=backend,
            )
            assert fields_of(plan) == expected


@given(map_cases(), st.none() | st.integers(0, 4), BACKENDS)
def test_row_id_map_of_a_plan_drawn(case: MapCase, topk: int | None, names: tuple[Backend, ...]) -> None:
    routing_map, num_experts, drawn = case
    shape = (len(routing_map), num_experts)
    fields = expected_from_map(routing_map, num_experts, topk, **drawn)
    expected = []
    for t in range(len(routing_map)):
        mine = [
            s
            for s in range(len(fields["row_of_slot"]))
            if fields["token_of_slot"][s] == t and fields["row_of_slot"][s] >= 0
        ]
        unused = [-1] * (num_experts - len(mine))
        rows, experts = ([fields[name][s] for s in mine] for name in ("row_of_slot", "expert_of_slot"))
        expected.append([*rows, *unused, *experts, *unused, len(mine)])
    call = call_options(drawn, torch.float32, shape)
    tensor = torch.tensor(routing_map, dtype=torch.bool).reshape(shape)
    for name in names:
        plan = plan_from_routing_map(tensor, topk=topk, backend=name, **call)
        assert row_id_map(plan, backend=name).tolist() == expected
