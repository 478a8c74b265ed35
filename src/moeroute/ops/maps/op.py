"""The plan of a routing map [T, E]: ragged, as a [T, K] table, or drop-and-pad."""

from typing import get_args

import torch
from torch import Tensor

from moeroute import check as checks
from moeroute import dispatch
from moeroute.dispatch import Backend
from moeroute.dtypes import LARGEST, MAPS
from moeroute.ops.planning.common import (
    Drop,
    check_segments,
    checked_weights,
    deciding_weights,
    expert_bounds,
    fake_vector,
    no_data,
    optional_integer,
    or_empty,
    planned,
    segment_of,
    unknown_size,
)
from moeroute.ops.register import register
from moeroute.plan import RoutingPlan, make_plan

DTYPES = "bool, int8, uint8 or int32"


def plan_from_routing_map(
    routing_map: Tensor,
    *,
    topk: int | None = None,
    fill: bool = False,
    expert_range: tuple[int, int] | None = None,
    capacity: int | None = None,
    drop: Drop = "position",
    weights: Tensor | None = None,
    pad_to_capacity: bool = False,
    align: int = 1,
    num_rows: int | None = None,
    num_slots: int | None = None,
    check: bool = False,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> RoutingPlan:
    """The plan for a map [T, E] that is true where a token goes to an expert.

    Tokens may have different numbers of experts, none included. The true entries are the slots, token by token and
    inside a token by expert; rows are grouped by expert, ascending, inside an expert by token. True entries of experts
    outside `expert_range`, and dropped ones, stay slots, without a row. S is read back from the data, like R, except
    with `topk`, with `fill` and a capacity, and with `num_slots`.

    Args:
        routing_map: [T, E], bool, int8, uint8 or int32 (any value but 0 is true), any strides.
        topk: every token owns exactly so many slots, its first true entries and then unused ones (expert -1, row -1);
            S = T * topk is known. A token with more true entries loses the later ones. Rows are numbered over all true
            entries, the lost ones too: their rows are zero, and counted in `tokens_per_expert`.
        fill: drop and pad. With a capacity C every expert takes min(C, T) tokens: those that stay of its true ones, in
            token order, and then its first false ones, which are slots like any other. S = E * min(C, T) and R = E * C
            (C rounded up to `align`) are known; rows of an expert beyond T are padding. Without a capacity (Megatron's
            `pad_routing_map`) every expert takes its true tokens and then its first false ones up to a multiple of
            `align`. Where there are too few tokens it takes all, and the other rows of the multiple are padding. An
            expert without true tokens takes none.
        expert_range: as in `plan_from_expert_ids`.
        capacity: as in `plan_from_expert_ids`.
        drop: as in `plan_from_expert_ids`.
        weights: [T, E], for drop="weight"; float64 needs the reference backend.
        pad_to_capacity: as in `plan_from_expert_ids`.
        align: as in `plan_from_expert_ids`.
        num_rows: as in `plan_from_expert_ids`.
        num_slots: S, where the caller knows it (together with `num_rows` nothing is read back). Slots behind the last
            true entry belong to no token. True entries from the `num_slots`-th on have no slot; their rows are zero,
            as with `topk`.
        check: read the map, and raise ValueError for a value other than 0 and 1, and for a token with more than `topk`
            true entries.
        out: int32 [S], of any strides, outside torch.compile: gets `row_of_slot`, and the plan goes on using it.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The plan.

    Raises:
        ValueError: a wrong shape or value, among them more than 2^31 - 1 slots or rows.
        TypeError: a wrong type or dtype.

    In torch: `token_of_row = arange(T).expand(E, T).masked_select(routing_map.T != 0)`.

    >>> routing_map = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.int8)
    >>> plan = plan_from_routing_map(routing_map)
    >>> plan.slot_offsets.tolist(), plan.expert_of_slot.tolist()
    ([0, 2, 3, 3, 6], [0, 1, 2, 0, 1, 2])
    >>> plan.row_of_slot.tolist(), plan.token_of_row.tolist(), plan.tokens_per_expert.tolist()
    ([0, 2, 4, 1, 3, 5], [0, 3, 0, 3, 1, 3], [2, 2, 2])

    >>> plan = plan_from_routing_map(routing_map, topk=2)
    >>> plan.row_of_slot.tolist(), plan.expert_of_slot.tolist()
    ([0, 2, 4, -1, -1, -1, 1, 3], [0, 1, 2, -1, -1, -1, 0, 1])
    >>> plan.slot_of_row.tolist()
    [0, 6, 1, 7, 2, -1]

    >>> plan = plan_from_routing_map(routing_map, fill=True, capacity=3)
    >>> plan.token_of_row.reshape(3, 3).tolist()  # expert 0: tokens 0 and 3 are true, 1 is false
    [[0, 3, 1], [0, 3, 1], [1, 3, 0]]
    >>> plan.expert_of_slot.tolist(), plan.slot_offsets.tolist()
    ([0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 3, 6, 6, 9])

    >>> plan = plan_from_routing_map(routing_map, fill=True, align=3)
    >>> plan.token_of_row.reshape(3, 3).tolist(), plan.num_slots
    ([[0, 3, 1], [0, 3, 1], [1, 3, 0]], 9)
    >>> plan_from_routing_map(routing_map, fill=True, align=8).slot_of_row.reshape(3, 8)[0].tolist()
    [0, 9, 3, 6, -1, -1, -1, -1]

    >>> plan = plan_from_routing_map(routing_map, num_slots=7, num_rows=6)
    >>> plan.row_of_slot.tolist(), plan.slot_offsets.tolist()
    ([0, 2, 4, 1, 3, 5, -1], [0, 2, 3, 3, 6])
    """
    operator = "plan_from_routing_map"
    checks.tensor(operator, "routing_map", routing_map)
    if routing_map.dtype not in MAPS:
        raise checks.wrong_dtype(operator, "routing_map", DTYPES, routing_map)
    if routing_map.dim() != 2:
        raise checks.wrong_shape(operator, "routing_map", "[T, E]", routing_map)
    num_tokens, num_experts = routing_map.shape
    topk = optional_integer(operator, "topk", topk)
    if topk is not None and num_tokens * topk > LARGEST:
        raise checks.wrong_value(operator, "topk", f"such that there are at most {LARGEST} slots", topk)
    num_rows = optional_integer(operator, "num_rows", num_rows)
    checks.integer(operator, "align", align, 1, LARGEST)
    checks.one_of(operator, "drop", drop, get_args(Drop))
    capacity = optional_integer(operator, "capacity", capacity)
    checks.flag(operator, "fill", fill)
    aligned = fill and capacity is None and align > 1
    pad = checks.flag(operator, "pad_to_capacity", pad_to_capacity) or (fill and not aligned)
    checks.flag(operator, "check", check)
    if fill and topk is not None:
        raise checks.wrong_value(operator, "topk", "None with fill", topk)
    first, last = expert_bounds(operator, num_experts, expert_range)
    segment, num_rows = segment_of(operator, last - first, capacity, pad, align, num_rows)
    if weights is not None:
        weights = deciding_weights(operator, weights, "routing_map", routing_map, tuple(routing_map.shape))
    if capacity is None or drop == "position":
        weights = None
    elif weights is None:
        raise checks.wrong_value(operator, "weights", "given with drop='weight'", None)
    dtype = None if weights is None else weights.dtype
    chosen = dispatch.choose(operator, backend, routing_map.device, dtype)
    routing_map = routing_map.contiguous()
    num_slots = _size_option(operator, num_slots, topk, fill, capacity)
    options = (first, last, topk, fill, capacity, segment, align, num_rows, num_slots, check, chosen)
    num_slots = _known_slots(num_tokens, last - first, topk, fill, capacity, num_slots)
    if routing_map.is_meta and (num_slots is None or num_rows is None):
        raise no_data(operator, "topk (or num_slots)" if num_slots is None else "num_rows")
    found = planned(operator, _map_operator, _plan_routing_map, (routing_map, weights), options, out, num_slots)
    row_of_slot, slot_of_row, offsets, experts, tokens, rows = found
    padded = segment is not None or align > 1
    return make_plan(
        row_of_slot,
        slot_of_row,
        num_tokens,
        num_experts,
        topk,
        offsets if topk is None else None,
        experts,
        tokens,
        rows if padded else tokens,
    )


# ---------------------------------------------------------------------------- checks


def _size_option(
    operator: str, num_slots: int | None, topk: int | None, fill: bool, capacity: int | None
) -> int | None:
    if num_slots is not None and (topk is not None or (fill and capacity is not None)):
        raise checks.wrong_value(operator, "num_slots", "None with topk, and with fill and a capacity", num_slots)
    return optional_integer(operator, "num_slots", num_slots)


def _known_slots(
    num_tokens: int, experts: int, topk: int | None, fill: bool, capacity: int | None, num_slots: int | None
) -> int | None:
    """S, where it is known without looking."""
    if topk is not None:
        return num_tokens * topk
    if fill and capacity is not None:
        size: int = experts * torch.sym_min(capacity, num_tokens)
        return size
    return num_slots


def _refuse_map(routing_map: Tensor, topk: int | None) -> None:
    """Raise for a value other than 0 and 1, or a token with more true entries than slots."""
    if routing_map.is_meta:
        return
    operator, name = "plan_from_routing_map", "routing_map"
    if routing_map.dtype is not torch.bool:
        bad = ((routing_map != 0) & (routing_map != 1)).reshape(-1)
        if bool(bad.any()):
            entry = int(bad.to(torch.uint8).argmax())
            token, expert = divmod(entry, routing_map.shape[1])
            got = f"{int(routing_map[token, expert])} for token {token} and expert {expert}"
            raise checks.wrong_value(operator, name, "0 or 1", got)
    if topk is not None:
        chosen = (routing_map != 0).sum(dim=1)
        if bool((chosen > topk).any()):
            token = int((chosen > topk).to(torch.uint8).argmax())
            wanted = f"true for at most topk = {topk} experts of a token"
            raise checks.wrong_value(operator, name, wanted, f"{int(chosen[token])} for token {token}")


# ---------------------------------------------------------------------------- registration


def _map_operator(
    routing_map: Tensor,
    weights: Tensor | None,
    first_expert: int,
    last_expert: int,
    topk: int | None,
    fill: bool,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    num_slots: int | None,
    check: bool,
    backend: Backend,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    if check:
        _refuse_map(routing_map, topk)
    if routing_map.element_size() > 1:  # kernels read bytes
        routing_map = routing_map != 0
    found: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None] = dispatch.module(
        "maps", backend
    ).plan_routing_map(
        routing_map,
        weights,
        first_expert,
        last_expert,
        topk,
        fill,
        capacity,
        segment,
        align,
        num_rows,
        num_slots,
        out=out,
    )
    return found


def _registered_map(
    routing_map: Tensor,
    weights: Tensor | None,
    first_expert: int,
    last_expert: int,
    topk: int | None,
    fill: bool,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    num_slots: int | None,
    check: bool,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operator = "plan_routing_map"
    checks.shaped(operator, "routing_map", routing_map, (None, None))
    if routing_map.dtype not in MAPS:
        raise checks.wrong_dtype(operator, "routing_map", DTYPES, routing_map)
    weights = checked_weights(operator, weights, "routing_map", routing_map)
    num_tokens, num_experts = routing_map.shape
    check_segments(operator, first_expert, last_expert, num_experts, capacity, segment, align, num_rows)
    if topk is not None:
        checks.integer(operator, "topk", topk, 0, LARGEST // max(num_tokens, 1))
    num_slots = _size_option(operator, num_slots, topk, fill, capacity)
    if fill:
        if (capacity is None) != (segment is None):
            raise checks.wrong_value(operator, "segment", "given with fill where capacity is, and only there", segment)
        if capacity is not None and num_rows is None:
            raise checks.wrong_value(operator, "num_rows", "given with fill and a capacity", None)
        if topk is not None:
            raise checks.wrong_value(operator, "topk", "None with fill", topk)
    dispatch.choose(operator, backend, routing_map.device, None if weights is None else weights.dtype)
    row_of_slot, slot_of_row, offsets, experts, tokens, rows = _map_operator(
        routing_map.contiguous(),
        weights,
        first_expert,
        last_expert,
        topk,
        fill,
        capacity,
        segment,
        align,
        num_rows,
        num_slots,
        check,
        backend,
    )
    offsets, rows = or_empty(offsets, routing_map, torch.int32), or_empty(rows, routing_map, torch.int64)
    return row_of_slot, slot_of_row, offsets, experts, tokens, rows


def _map_fake(
    routing_map: Tensor,
    weights: Tensor | None,
    first_expert: int,
    last_expert: int,
    topk: int | None,
    fill: bool,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    num_slots: int | None,
    check: bool,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, experts = routing_map.shape[0], last_expert - first_expert
    num_slots = _known_slots(num_tokens, experts, topk, fill, capacity, num_slots)
    if num_slots is None:
        num_slots = unknown_size()  # one size for two tensors
    return (
        fake_vector(routing_map, num_slots),
        fake_vector(routing_map, num_rows),
        fake_vector(routing_map, 0 if topk is not None else num_tokens + 1),
        fake_vector(routing_map, num_slots),
        fake_vector(routing_map, experts, torch.int64),
        fake_vector(routing_map, 0 if segment is None and align == 1 else experts, torch.int64),
    )


_plan_routing_map = register(
    "plan_routing_map(Tensor routing_map, Tensor? weights, SymInt first_expert, SymInt last_expert, SymInt? topk,"
    " bool fill, SymInt? capacity, SymInt? segment, SymInt align, SymInt? num_rows, SymInt? num_slots, bool check,"
    " str backend) -> (Tensor row_of_slot, Tensor slot_of_row, Tensor slot_offsets, Tensor expert_of_slot,"
    " Tensor tokens_per_expert, Tensor rows_per_expert)",
    _registered_map,
    _map_fake,
)
