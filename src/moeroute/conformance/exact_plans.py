"""Plans as plain Python loops over lists: what every constructor must return, by definition.

These make the plans that the cases of row operators take, and confirm the digests of the constructors. They share no
code with the backends.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moeroute.plan import RoutingPlan

Fields = dict[str, Any]
_INTEGERS = ("num_tokens", "num_rows", "num_experts", "topk")


def as_plan(fields: Fields) -> RoutingPlan:
    """The plan of these lists and numbers."""

    def field(name: str, value: Any) -> Any:
        if value is None or name in _INTEGERS:
            return value
        return torch.tensor(value, dtype=torch.int64 if name.endswith("per_expert") else torch.int32)

    return RoutingPlan(**{name: field(name, value) for name, value in fields.items()})


def inverse(row_of_slot: Sequence[int], num_rows: int) -> list[int]:
    """The slot of each row; where several slots name one row it is the last of them."""
    found = [-1] * num_rows
    for slot, row in enumerate(row_of_slot):
        if 0 <= row < num_rows:
            found[row] = slot
    return found


def heaviest_first(weights: Sequence[float]) -> list[int]:
    """Slots by weight: NaN first, then the largest, of equal ones the smaller slot."""
    return sorted(range(len(weights)), key=lambda s: (not math.isnan(weights[s]), -weights[s], s))


def by_choice(num_tokens: int, topk: int, weights: Tensor | None) -> list[int]:
    """Slots choice by choice; inside a choice by token, or by the tokens' largest weight and then by token."""
    tokens = list(range(num_tokens))
    if weights is not None:
        largest = [math.nan if any(map(math.isnan, row)) else max(row) for row in weights.tolist()]
        tokens = heaviest_first(largest)
    return [t * topk + k for k in range(topk) for t in tokens]


def grouped(
    experts: Sequence[int],
    lo: int,
    hi: int,
    *,
    priority: Sequence[int] | None = None,
    capacity: int | None = None,
    pad: bool = False,
    align: int = 1,
    num_rows: int | None = None,
) -> Fields:
    """Rows by expert and inside by slot. `priority` orders the slots that come first into a capacity."""
    members: list[list[int]] = [[] for _ in range(lo, hi)]
    for slot in range(len(experts)) if priority is None else priority:
        if lo <= experts[slot] < hi:
            mine = members[experts[slot] - lo]
            if capacity is None or len(mine) < capacity:
                mine.append(slot)
    return laid_out([sorted(mine) for mine in members], len(experts), capacity if pad else None, align, num_rows)


def laid_out(
    members: Sequence[Sequence[int]], num_slots: int, length: int | None, align: int, num_rows: int | None
) -> Fields:
    """The slots of each expert one after the other, each expert padded to `length` or to a multiple of `align`."""
    slot_of_row: list[int] = []
    lengths, tokens = [], []
    for mine in members:
        start, size = len(slot_of_row), len(mine) if length is None else length
        size = -(-size // align) * align
        slot_of_row += [*mine, *[-1] * (size - len(mine))]
        inside = size if num_rows is None else min(max(num_rows - start, 0), size)
        lengths.append(inside)
        tokens.append(min(len(mine), inside))
    if num_rows is not None:
        slot_of_row = (slot_of_row + [-1] * num_rows)[:num_rows]
    row_of_slot = [-1] * num_slots
    for row, slot in enumerate(slot_of_row):
        if slot >= 0:
            row_of_slot[slot] = row
    return {
        "row_of_slot": row_of_slot,
        "slot_of_row": slot_of_row,
        "num_rows": len(slot_of_row),
        "tokens_per_expert": tokens,
        "rows_per_expert": lengths,
    }


def plan_from_expert_ids(
    expert_ids: Tensor,
    num_experts: int | None,
    expert_range: tuple[int, int] | None = None,
    capacity: int | None = None,
    drop: str = "position",
    weights: Tensor | None = None,
    pad_to_capacity: bool = False,
    align: int = 1,
    num_rows: int | None = None,
) -> Fields:
    """See `moeroute.plan_from_expert_ids`."""
    num_tokens, topk = expert_ids.shape
    ids = expert_ids.flatten().tolist()
    common = {"num_tokens": num_tokens, "num_experts": num_experts, "topk": topk}
    if num_experts is None:
        order = sorted((s for s, e in enumerate(ids) if e >= 0), key=lambda s: ids[s])
        rows = (order + [-1] * (num_rows or 0))[: len(order) if num_rows is None else num_rows]
        row_of_slot = [-1] * len(ids)
        for row, slot in enumerate(rows):
            if slot >= 0:
                row_of_slot[slot] = row
        return common | {"row_of_slot": row_of_slot, "slot_of_row": rows, "num_rows": len(rows)}
    priority = None
    if capacity is not None and drop == "weight" and weights is not None:
        priority = heaviest_first(weights.flatten().tolist())
    elif capacity is not None and drop == "choice":
        priority = by_choice(num_tokens, topk, weights)
    lo, hi = expert_range or (0, num_experts)
    return common | grouped(
        ids, lo, hi, priority=priority, capacity=capacity, pad=pad_to_capacity, align=align, num_rows=num_rows
    )


def plan_from_routing_map(
    routing_map: Tensor,
    topk: int | None = None,
    fill: bool = False,
    expert_range: tuple[int, int] | None = None,
    capacity: int | None = None,
    drop: str = "position",
    weights: Tensor | None = None,
    pad_to_capacity: bool = False,
    align: int = 1,
    num_rows: int | None = None,
    num_slots: int | None = None,
) -> Fields:
    """See `moeroute.plan_from_routing_map`."""
    num_tokens, num_experts = routing_map.shape
    true = (routing_map != 0).tolist()
    lo, hi = expert_range or (0, num_experts)
    if fill:
        entries, fields = _filled(true, lo, hi, capacity, align, num_rows)
    else:
        entries = [(t, e) for t in range(num_tokens) for e in range(num_experts) if true[t][e]]
        priority = None
        if capacity is not None and drop == "weight" and weights is not None:
            priority = heaviest_first([weights[entry].item() for entry in entries])
        fields = grouped(
            [e for _, e in entries],
            lo,
            hi,
            priority=priority,
            capacity=capacity,
            pad=pad_to_capacity,
            align=align,
            num_rows=num_rows,
        )
    starts = [0] * (num_tokens + 1)
    for t, _ in entries:
        starts[t + 1] += 1
    for t in range(num_tokens):
        starts[t + 1] += starts[t]
    fields |= {"num_tokens": num_tokens, "num_experts": num_experts, "topk": topk}
    if topk is not None:
        table = [s if s < starts[t + 1] else -1 for t in range(num_tokens) for s in range(starts[t], starts[t] + topk)]
        place = {slot: i for i, slot in enumerate(table) if slot >= 0}
        rows = fields["row_of_slot"]
        return fields | {
            "row_of_slot": [rows[s] if s >= 0 else -1 for s in table],
            "slot_of_row": [place.get(s, -1) for s in fields["slot_of_row"]],
            "expert_of_slot": [entries[s][1] if s >= 0 else -1 for s in table],
        }
    fields |= {"slot_offsets": starts, "expert_of_slot": [e for _, e in entries]}
    if num_slots is not None:
        spare = [-1] * max(num_slots - len(entries), 0)
        fields |= {
            "slot_offsets": [min(start, num_slots) for start in starts],
            "row_of_slot": fields["row_of_slot"][:num_slots] + spare,
            "expert_of_slot": fields["expert_of_slot"][:num_slots] + spare,
            "slot_of_row": [slot if slot < num_slots else -1 for slot in fields["slot_of_row"]],
        }
    return fields


def _filled(
    true: list[list[bool]], lo: int, hi: int, capacity: int | None, align: int, num_rows: int | None
) -> tuple[list[tuple[int, int]], Fields]:
    """Each expert's true tokens, then its first false ones."""
    taken = []
    for e in range(lo, hi):
        chosen = [t for t, row in enumerate(true) if row[e]]
        others = [t for t, row in enumerate(true) if not row[e]]
        wanted = -(-len(chosen) // align) * align if capacity is None else capacity
        taken.append((chosen + others)[:wanted])
    entries = sorted((t, lo + i) for i, mine in enumerate(taken) for t in mine)
    slot_of = {entry: slot for slot, entry in enumerate(entries)}
    members = [[slot_of[t, lo + i] for t in mine] for i, mine in enumerate(taken)]
    return entries, laid_out(members, len(entries), capacity, align, num_rows)


def plan_from_row_of_slot(row_of_slot: Tensor, num_tokens: int, num_rows: int, first_row: int = 0) -> Fields:
    """See `moeroute.plan_from_row_of_slot`."""
    rows = [r - first_row if 0 <= r - first_row < num_rows else -1 for r in row_of_slot.flatten().tolist()]
    return {
        "row_of_slot": rows,
        "slot_of_row": inverse(rows, num_rows),
        "num_tokens": num_tokens,
        "num_rows": num_rows,
        "topk": len(rows) // num_tokens,
    }


def plan_from_token_ids(
    token_ids: Tensor,
    num_tokens: int,
    rows: Tensor | None = None,
    num_rows: int | None = None,
    num_experts: int | None = None,
) -> Fields:
    """See `moeroute.plan_from_token_ids`."""
    ids = token_ids.tolist()
    size = len(ids) if num_rows is None else num_rows
    place = list(range(len(ids))) if rows is None else rows.tolist()
    place = [row if 0 <= row < size else -1 for row in place]
    order = [i for t in range(num_tokens) for i, token in enumerate(ids) if token == t]
    row_of_slot = [place[i] for i in order] + [-1] * (len(ids) - len(order))
    fields: Fields = {
        "row_of_slot": row_of_slot,
        "slot_of_row": inverse(row_of_slot, size),
        "num_tokens": num_tokens,
        "num_rows": size,
        "slot_offsets": [sum(0 <= token < t for token in ids) for t in range(num_tokens + 1)],
    }
    if num_experts is not None:
        block = size // num_experts
        live = [slot >= 0 for slot in fields["slot_of_row"]]
        fields |= {
            "num_experts": num_experts,
            "expert_of_slot": [row // block if row >= 0 else -1 for row in row_of_slot],
            "tokens_per_expert": [sum(live[e * block : (e + 1) * block]) for e in range(num_experts)],
            "rows_per_expert": [block] * num_experts,
        }
    return fields


def plan_from_segments(lengths: Tensor, num_tokens: int) -> Fields:
    """See `moeroute.plan_from_segments`: lengths that are at least 0 and add up to num_tokens."""
    ranks, experts = lengths.shape
    order = [r * experts + e for e in range(experts) for r in range(ranks)]
    fields = plan_from_chunks(lengths.flatten(), torch.tensor(order), num_tokens)
    counts = lengths.sum(0).tolist()
    return fields | {"num_experts": experts, "tokens_per_expert": counts, "rows_per_expert": counts}


def plan_from_chunks(lengths: Tensor, order: Tensor, num_tokens: int) -> Fields:
    """See `moeroute.plan_from_chunks`."""
    sizes = [min(max(size, 0), num_tokens) for size in lengths.tolist()]
    last_place = {c: i for i, c in enumerate(order.tolist()) if 0 <= c < len(sizes)}
    start_of, start = {}, 0
    for chunk in sorted(last_place, key=lambda c: last_place[c]):
        start_of[chunk] = start
        start += sizes[chunk]
    row_of_slot: list[int] = []
    for chunk, size in enumerate(sizes):
        first = start_of.get(chunk)
        row_of_slot += [-1 if first is None or first + i >= num_tokens else first + i for i in range(size)]
    row_of_slot = (row_of_slot + [-1] * num_tokens)[:num_tokens]
    return {
        "row_of_slot": row_of_slot,
        "slot_of_row": inverse(row_of_slot, num_tokens),
        "num_tokens": num_tokens,
        "num_rows": num_tokens,
        "topk": 1,
    }


def plan_from_row_id_map(row_id_map: Tensor, num_rows: int, pad_offsets: Tensor | None = None) -> Fields:
    """See `moeroute.plan_from_row_id_map`."""
    num_experts = row_id_map.shape[1] // 2
    pads = [0] * num_experts if pad_offsets is None else pad_offsets.tolist()
    rows, experts, starts = [], [], [0]
    for line in row_id_map.tolist():
        for i in range(min(max(line[-1], 0), num_experts)):
            row, expert = line[i], line[num_experts + i]
            live = 0 <= row < num_rows and 0 <= expert < num_experts
            live = live and 0 <= pads[expert] < num_rows and row + pads[expert] < num_rows
            rows.append(row + pads[expert] if live else -1)
            experts.append(expert if live else -1)
        starts.append(len(rows))
    rows, experts = (rows + [-1] * num_rows)[:num_rows], (experts + [-1] * num_rows)[:num_rows]
    return {
        "row_of_slot": rows,
        "slot_of_row": inverse(rows, num_rows),
        "num_tokens": len(starts) - 1,
        "num_rows": num_rows,
        "num_experts": num_experts,
        "slot_offsets": [min(start, num_rows) for start in starts],
        "expert_of_slot": experts,
    }


def row_id_map(plan: RoutingPlan) -> list[list[int]]:
    """See `moeroute.row_id_map`."""
    of_slot = experts_of_slots(plan)
    num_experts = len(plan.rows_per_expert) if plan.expert_of_slot is None else plan.num_experts  # type: ignore[arg-type]
    assert num_experts is not None  # noqa: S101 - the plan of a case knows its experts
    lines = []
    for token in range(plan.num_tokens):
        mine = [s for s in slots_of(plan, token) if plan.row_of_slot[s] >= 0 and of_slot[s] >= 0][:num_experts]
        spare = [-1] * (num_experts - len(mine))
        lines.append(
            [*[int(plan.row_of_slot[s]) for s in mine], *spare, *[of_slot[s] for s in mine], *spare, len(mine)]
        )
    return lines


def slots_of(plan: RoutingPlan, token: int) -> range:
    """The slots of a token."""
    if plan.slot_offsets is None:
        topk = plan.topk or 0
        return range(token * topk, (token + 1) * topk)
    return range(int(plan.slot_offsets[token]), int(plan.slot_offsets[token + 1]))


def tokens_of_slots(plan: RoutingPlan) -> list[int]:
    """The token of each slot, -1 for one that no token owns."""
    found = [-1] * plan.num_slots
    for token in range(plan.num_tokens):
        for slot in slots_of(plan, token):
            found[slot] = token
    return found


def experts_of_rows(plan: RoutingPlan) -> list[int]:
    """The expert of each row, padding rows included; -1 behind the last."""
    found = [e for e, n in enumerate(plan.rows_per_expert.tolist()) for _ in range(n)] if has_counts(plan) else []  # type: ignore[union-attr]
    return found + [-1] * (plan.num_rows - len(found))


def experts_of_slots(plan: RoutingPlan) -> list[int]:
    """The expert of each slot that has a row (or of `expert_of_slot`), -1 for none."""
    if plan.expert_of_slot is not None:
        found: list[int] = plan.expert_of_slot.tolist()
        return found
    of_row = experts_of_rows(plan)
    return [of_row[row] if row >= 0 else -1 for row in plan.row_of_slot.tolist()]


def has_counts(plan: RoutingPlan) -> bool:
    """Whether the plan knows how many rows its experts have."""
    return plan.rows_per_expert is not None


CONSTRUCTORS: dict[str, Callable[..., Fields]] = {
    f.__name__: f
    for f in (
        plan_from_expert_ids,
        plan_from_routing_map,
        plan_from_row_of_slot,
        plan_from_token_ids,
        plan_from_segments,
        plan_from_chunks,
        plan_from_row_id_map,
    )
}
