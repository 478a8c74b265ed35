"""Cases of plans: every constructor with its options, maps, and Transformer Engine's row id map."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance import exact_plans
from moeroute.conformance.case import Case
from moeroute.conformance.gating_cases import words
from moeroute.conformance.generator import Stream

Options = dict[str, Any]
Sizes = tuple[int, int, int]  # tokens, experts, slots of a token
GIVEN = object()  # an option whose tensor is made with the case's other inputs


def plan_cases(num_tokens: int, experts: int, topk: int) -> Iterator[Case]:
    """Every constructor at one size."""
    sizes = (num_tokens, experts, topk)
    yield from _by_ids(sizes)
    yield from _by_map(sizes)
    yield from _by_index(sizes)
    yield from _edges(sizes)


def _case(sizes: Sizes, operator: str, what: str, make: Callable[[Stream], Options], *tags: str) -> Case:
    num_tokens, experts, topk = sizes
    return Case(f"{operator} T={num_tokens} E={experts} K={topk} {what}".strip(), operator, make, frozenset(tags))


def ids_of(draw: Stream, sizes: Sizes) -> Tensor:
    """int64 [T, K], with ids of no expert; the first token's are far outside."""
    ids = draw.integers("ids", -1, sizes[1] + 1, sizes[0], sizes[2])
    ids[:1] = 2**40
    return ids


def chosen_of(draw: Stream, sizes: Sizes) -> Tensor:
    """bool [T, E], about K true entries for each token; the second token has none."""
    chosen = draw.chance("map", sizes[2] / sizes[1], sizes[0], sizes[1])
    chosen[1:2] = False
    return chosen


def _weights(draw: Stream, *shape: int) -> Tensor:
    return draw.odd("weights", draw.uniform("weights", *shape))


def _by_ids(sizes: Sizes) -> Iterator[Case]:
    num_tokens, experts, topk = sizes
    capacity = max(num_tokens * topk // experts, 1)
    options: tuple[tuple[Options, str], ...] = (
        ({}, "no expert"),
        ({"expert_range": (1, experts - 1)}, "range"),
        ({"capacity": capacity}, "capacity"),
        ({"capacity": capacity, "drop": "weight", "weights": GIVEN}, "ties"),
        ({"capacity": capacity, "drop": "choice"}, "capacity"),
        ({"capacity": capacity, "drop": "choice", "weights": GIVEN, "expert_range": (1, experts)}, "ties"),
        ({"capacity": capacity, "pad_to_capacity": True}, "padding"),
        ({"align": 8}, "padding"),
        ({"num_rows": num_tokens * topk}, "padding"),
        ({"num_rows": num_tokens, "align": 4, "expert_range": (0, experts - 2)}, "range"),
    )
    for option, tag in options:
        shown = {name: "given" if value is GIVEN else value for name, value in option.items()}
        yield _case(sizes, "plan_from_expert_ids", words(shown), partial(_ids, sizes, option), tag)
    yield _case(sizes, "plan_from_expert_ids", "int8", partial(_int8, sizes), "no expert")
    for many in (2000, 9000):
        for option in ({}, {"align": 4, "num_rows": 2 * num_tokens, "expert_range": (100, many - 100)}):
            make = partial(_many, sizes, many, option)
            yield _case(sizes, "plan_from_expert_ids", f"of {many} {words(option)}".strip(), make, "empty experts")
    for size in (None, num_tokens):
        yield _case(
            sizes, "plan_from_expert_ids", f"any id num_rows={size}", partial(_any_id, sizes, size), "no expert"
        )


def _ids(sizes: Sizes, options: Options, draw: Stream) -> Options:
    given = {n: _weights(draw, sizes[0], sizes[2]) if v is GIVEN else v for n, v in options.items()}
    return {"expert_ids": ids_of(draw, sizes), "num_experts": sizes[1], **given}


def _int8(sizes: Sizes, draw: Stream) -> Options:
    return {"expert_ids": ids_of(draw, sizes).clamp(-1, 99).to(torch.int8), "num_experts": sizes[1]}


def _many(sizes: Sizes, experts: int, options: Options, draw: Stream) -> Options:
    ids = draw.integers("ids", -1, experts + 1, sizes[0], sizes[2])
    return {"expert_ids": ids, "num_experts": experts, **options}


def _any_id(sizes: Sizes, num_rows: int | None, draw: Stream) -> Options:
    ids = ids_of(draw, sizes)
    return {"expert_ids": torch.where(ids >= 0, ids * 2**33 + 5, ids), "num_experts": None, "num_rows": num_rows}


def _by_map(sizes: Sizes) -> Iterator[Case]:
    num_tokens, experts, topk = sizes
    capacity = max(num_tokens * topk // experts, 1)
    options: tuple[tuple[Options, str], ...] = (
        ({}, "no expert"),
        ({"topk": topk}, "no row"),
        ({"capacity": capacity, "fill": True}, "padding"),
        ({"capacity": capacity, "drop": "weight", "weights": GIVEN}, "ties"),
        ({"capacity": capacity, "pad_to_capacity": True, "topk": topk}, "padding"),
        ({"align": 4, "expert_range": (1, experts)}, "range"),
        ({"num_rows": num_tokens}, "no row"),
        ({"align": 8, "fill": True}, "padding"),
        ({"align": 4, "fill": True, "num_slots": num_tokens, "num_rows": 3 * num_tokens}, "padding"),
        ({"num_slots": 2 * num_tokens, "num_rows": num_tokens}, "no row"),
        ({"num_slots": num_tokens * experts}, "no row"),
    )
    for option, tag in options:
        shown = {name: "given" if value is GIVEN else value for name, value in option.items()}
        yield _case(sizes, "plan_from_routing_map", words(shown), partial(_map, sizes, option, torch.bool), tag)
    for dtype in (torch.uint8, torch.int8, torch.int32):
        yield _case(sizes, "plan_from_routing_map", str(dtype)[6:], partial(_map, sizes, {}, dtype), "no expert")


def _map(sizes: Sizes, options: Options, dtype: torch.dtype, draw: Stream) -> Options:
    given = {n: _weights(draw, sizes[0], sizes[1]) if v is GIVEN else v for n, v in options.items()}
    chosen = chosen_of(draw, sizes).to(dtype)
    return {"routing_map": chosen << 20 if dtype is torch.int32 else chosen, **given}


def _by_index(sizes: Sizes) -> Iterator[Case]:
    num_tokens, experts, topk = sizes

    def row_of_slot(draw: Stream) -> Options:
        rows = draw.integers("rows", -3, num_tokens * topk + 3, num_tokens, topk)
        return {"row_of_slot": rows, "num_tokens": num_tokens, "num_rows": num_tokens, "first_row": 2}

    def token_ids(draw: Stream) -> Options:
        return {"token_ids": draw.integers("tokens", -2, num_tokens + 2, num_tokens * 2), "num_tokens": num_tokens}

    def token_ids_rows(draw: Stream) -> Options:
        rows = draw.permutation("rows", num_tokens * 2)
        return {**token_ids(draw), "rows": rows, "num_rows": num_tokens * 2, "num_experts": 2}

    def lengths(draw: Stream) -> Options:
        found = draw.integers("lengths", 0, 5, 3, experts)
        return {"lengths": found, "num_tokens": int(found.sum())}

    def chunks(spoilt: bool, draw: Stream) -> Options:
        found = lengths(draw)
        order = draw.permutation("order", 3 * experts)
        if spoilt:
            order[::5] = -1  # chunks that no place names, and one that two do
            order[1] = order[2]
            found["num_tokens"] -= 3
        return {"lengths": found["lengths"].reshape(-1), "order": order, "num_tokens": found["num_tokens"]}

    yield _case(sizes, "plan_from_row_of_slot", "", row_of_slot, "no row")
    yield _case(sizes, "plan_from_token_ids", "", token_ids, "no row")
    yield _case(sizes, "plan_from_token_ids", "rows", token_ids_rows, "no row")
    yield _case(sizes, "plan_from_segments", "", lengths, "empty experts")
    yield _case(sizes, "plan_from_chunks", "", partial(chunks, False), "empty experts")
    yield _case(sizes, "plan_from_chunks", "no permutation", partial(chunks, True), "no row")
    of_plan: tuple[Options, ...] = ({}, {"align": 4, "capacity": max(num_tokens * topk // experts, 1)}, {"topk": topk})
    for option in of_plan:
        yield _case(sizes, "row_id_map", words(option), partial(_of_map, sizes, option), "no row")
    yield _case(sizes, "row_id_map", "of ids", partial(_of_ids, sizes), "no expert")
    for kind in ("", "padded", "nonsense"):
        yield _case(sizes, "plan_from_row_id_map", kind, partial(_lines, sizes, kind), "no row")


def _of_map(sizes: Sizes, options: Options, draw: Stream) -> Options:
    return {"plan": exact_plans.as_plan(exact_plans.plan_from_routing_map(chosen_of(draw, sizes), **options))}


def _of_ids(sizes: Sizes, draw: Stream) -> Options:
    return {"plan": exact_plans.as_plan(exact_plans.plan_from_expert_ids(ids_of(draw, sizes), sizes[1], align=4))}


def _lines(sizes: Sizes, kind: str, draw: Stream) -> Options:
    num_tokens, experts, _ = sizes
    plan = _of_map(sizes, {}, draw)["plan"]
    lines, count = torch.tensor(exact_plans.row_id_map(plan), dtype=torch.int32), plan.num_slots
    if kind == "nonsense":
        lines = draw.integers("lines", -1, num_tokens, *lines.shape)
    if kind == "":
        return {"row_id_map": lines, "num_rows": count}
    return {
        "row_id_map": lines,
        "num_rows": 2 * count if kind == "padded" else count,
        "pad_offsets": torch.arange(experts) * 3,
    }


def _edges(sizes: Sizes) -> Iterator[Case]:
    """Everything to one expert, nothing at all, no token."""
    if sizes[0] > 100:
        return
    num_tokens, experts, topk = sizes

    def one_expert(draw: Stream) -> Options:
        return {"expert_ids": torch.full((num_tokens, topk), experts // 2), "num_experts": experts}

    def none(draw: Stream) -> Options:
        return {"expert_ids": torch.full((num_tokens, topk), -1), "num_experts": experts, "align": 4}

    def no_token(draw: Stream) -> Options:
        return {"expert_ids": torch.zeros(0, topk, dtype=torch.int64), "num_experts": experts}

    def full_map(draw: Stream) -> Options:
        return {"routing_map": torch.ones(num_tokens, experts, dtype=torch.bool)}

    def empty_map(draw: Stream) -> Options:
        return {"routing_map": torch.zeros(num_tokens, experts, dtype=torch.bool), "align": 4}

    yield _case(sizes, "plan_from_expert_ids", "edge: all to one expert", one_expert, "empty experts")
    yield _case(sizes, "plan_from_expert_ids", "edge: no slot has an expert", none, "no expert", "empty experts")
    yield _case(sizes, "plan_from_expert_ids", "edge: no token", no_token, "size")
    yield _case(sizes, "plan_from_routing_map", "edge: every token to every expert", full_map, "size")
    yield _case(sizes, "plan_from_routing_map", "edge: nobody chosen", empty_map, "empty experts")
