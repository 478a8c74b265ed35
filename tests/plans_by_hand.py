"""Plans as plain Python loops: what a constructor must return, and the comparison of every field."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from moeroute.plan import RoutingPlan

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Fields = dict[str, Any]
Matrix = Sequence[Sequence[Any]]
# Fields that a plan without a number of experts does not have.
UNKNOWN = ("num_experts", "slot_offsets", "expert_of_slot", "tokens_per_expert", "rows_per_expert", "expert_of_row")


def assign_rows(
    experts: Sequence[int],
    lo: int,
    hi: int,
    capacity: int | None = None,
    drop: str = "position",
    weights: Sequence[float] | None = None,
    pad: bool = False,
    align: int = 1,
    num_rows: int | None = None,
) -> Fields:
    """experts: the expert of each slot. Returns the plan's fields as lists."""

    def heaviest_first(slot: int) -> tuple[int, float, int]:
        assert weights is not None
        weight = weights[slot]
        return (0, 0.0, slot) if math.isnan(weight) else (1, -weight, slot)

    rows: list[int] = []
    owners: list[int] = []
    tokens, lengths = [], []
    for e in range(lo, hi):
        mine = [s for s, expert in enumerate(experts) if expert == e]
        if capacity is not None:
            if drop == "weight":
                mine = sorted(mine, key=heaviest_first)
            mine = sorted(mine[:capacity])
        length = len(mine)
        if pad:
            assert capacity is not None
            length = capacity
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


def offsets_of(tokens: Sequence[int], num_tokens: int) -> list[int]:
    return [sum(token < t for token in tokens) for t in range(num_tokens + 1)]


def expected_from_ids(
    ids: Matrix,
    num_experts: int,
    expert_range: tuple[int, int] | None = None,
    weights: Matrix | None = None,
    **options: Any,
) -> Fields:
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


def expected_from_map(
    routing_map: Matrix,
    num_experts: int,
    topk: int | None = None,
    expert_range: tuple[int, int] | None = None,
    weights: Matrix | None = None,
    **options: Any,
) -> Fields:
    lo, hi = expert_range or (0, num_experts)
    entries = [(t, e) for t, row in enumerate(routing_map) for e in range(num_experts) if row[e]]
    flat_weights = None if weights is None else [weights[t][e] for t, e in entries]
    fields = assign_rows([e for _, e in entries], lo, hi, weights=flat_weights, **options)
    tokens = [t for t, _ in entries]
    experts = [e for _, e in entries]
    if topk is not None:
        table: list[int] = []
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
    routing_map: Matrix,
    num_experts: int,
    capacity: int | None,
    expert_range: tuple[int, int] | None = None,
    drop: str = "position",
    weights: Matrix | None = None,
    align: int = 1,
    num_rows: int | None = None,
) -> Fields:
    lo, hi = expert_range or (0, num_experts)
    num_tokens = len(routing_map)
    taken, segments = [], []  # for each expert of the range its tokens in row order
    for e in range(lo, hi):
        true = [t for t in range(num_tokens) if routing_map[t][e]]
        wanted = -(-len(true) // align) * align if capacity is None else capacity
        segments.append(-(-wanted // align) * align)
        if drop == "weight":
            assert weights is not None
            column = [weights[t][e] for t in true]
            kept = assign_rows([0] * len(true), 0, 1, capacity, "weight", column)["row_of_slot"]
            true = [t for t, row in zip(true, kept, strict=True) if row >= 0]
        false = [t for t in range(num_tokens) if not routing_map[t][e]]
        taken.append((true + false if len(true) < wanted else true)[:wanted])
    slots = [(t, lo + i) for t in range(num_tokens) for i in range(hi - lo) if t in taken[i]]
    rows: list[int] = []
    owners: list[int] = []
    for i, mine in enumerate(taken):
        rows += [slots.index((t, lo + i)) for t in mine] + [-1] * (segments[i] - len(mine))
        owners += [i] * segments[i]
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


def sized(fields: Fields, num_slots: int) -> Fields:
    """The same plan with so many slots: those behind belong to no token, rows of those that are cut off are padding."""
    ends = [min(end, num_slots) for end in fields["slot_offsets"]]
    spare = [-1] * (num_slots - len(fields["row_of_slot"]))
    return fields | {
        "row_of_slot": fields["row_of_slot"][:num_slots] + spare,
        "expert_of_slot": fields["expert_of_slot"][:num_slots] + spare,
        "token_of_slot": fields["token_of_slot"][:num_slots] + spare,
        "slot_of_row": [slot if slot < num_slots else -1 for slot in fields["slot_of_row"]],
        "slot_offsets": ends,
    }


def fields_of(plan: RoutingPlan) -> Fields:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    names = (
        "row_of_slot slot_of_row num_tokens num_rows num_experts topk slot_offsets expert_of_slot tokens_per_expert"
        " rows_per_expert token_of_slot expert_of_row"
    )
    return {name: plain(getattr(plan, name)) for name in names.split()}


def check_plan(plan: RoutingPlan, expected: Fields) -> None:
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
    ends = plan.expert_ends
    if plan.rows_per_expert is None:
        assert ends is None
    else:
        assert ends is not None
        assert ends.dtype is torch.int32
        assert ends.tolist() == list(itertools.accumulate(actual["rows_per_expert"]))
    slots, rows, tokens = actual["row_of_slot"], actual["slot_of_row"], actual["token_of_slot"]
    assert plan.token_of_row.tolist() == [tokens[s] if s >= 0 else -1 for s in rows]
    assert all(rows[slots[s]] == s for s in range(len(slots)) if slots[s] >= 0)
    RoutingPlan(  # what the constructors skip
        **{f: getattr(plan, f) for f in RoutingPlan.__dataclass_fields__}
    )
