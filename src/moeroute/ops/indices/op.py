"""Plans of those who hold index tensors already: rows of slots, tokens of rows, lengths of chunks."""

import torch
from torch import Tensor

from moeroute import check, dispatch
from moeroute.dispatch import Backend
from moeroute.dtypes import LARGEST
from moeroute.ops import layout
from moeroute.ops.planning.common import fake_vector, index_tensor, or_empty, planned
from moeroute.ops.register import PLAN_SCHEMA, register
from moeroute.plan import PlanTensors, RoutingPlan, expect_plan, given_plan, make_plan, values_at


def plan_from_row_of_slot(
    row_of_slot: Tensor,
    num_tokens: int,
    num_rows: int,
    *,
    first_row: int = 0,
    expert_of_slot: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> RoutingPlan:
    """The plan for a given row of each slot, such as aclnn's `sortedIndices`.

    Several slots may name one row: each reads it, and its `slot_of_row` is the last of them. Nothing is read back. The
    plan knows no `num_experts` and no counts. K is the number of slots divided by T (1 where both are 0).

    Args:
        row_of_slot: [T, K] or [T * K], int32 or int64, any strides.
        num_tokens: T.
        num_rows: R.
        first_row: subtracted from `row_of_slot`; what then lies outside [0, num_rows) is -1: no row.
        expert_of_slot: for weights [T, E] and a bias [E, H]; as many elements, any integer dtype. A negative id, or one
            that does not fit into int32, becomes -1.
        out: int32 [S], of any strides, outside torch.compile: gets `row_of_slot`, and the plan goes on using it.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The plan.

    Raises:
        ValueError: a wrong shape, size, number or device.
        TypeError: a wrong type or dtype.

    In torch: `slot_of_row[row_of_slot] = arange(T * K)`.

    >>> plan = plan_from_row_of_slot(torch.tensor([2, 4, 0, 3, 1, 5]), num_tokens=3, num_rows=4)
    >>> plan.row_of_slot.tolist(), plan.slot_of_row.tolist(), plan.topk
    ([2, -1, 0, 3, 1, -1], [2, 4, 0, 3], 2)
    >>> plan_from_row_of_slot(torch.tensor([2, 4, 0, 3, 1, 5]), 3, 4, first_row=1).row_of_slot.tolist()
    [1, 3, -1, 2, 0, -1]
    """
    operator = "plan_from_row_of_slot"
    check.integer(operator, "num_tokens", num_tokens, 0, LARGEST - 1)
    check.integer(operator, "num_rows", num_rows, 0, LARGEST)
    check.integer(operator, "first_row", first_row, 0, 2**62)
    check.tensor(operator, "row_of_slot", row_of_slot)
    if row_of_slot.dtype is not torch.int32 and row_of_slot.dtype is not torch.int64:
        raise check.wrong_dtype(operator, "row_of_slot", "int32 or int64", row_of_slot)
    shape = f"[T, K] or [T * K] with T = num_tokens = {num_tokens}"
    row_of_slot = index_tensor(operator, "row_of_slot", row_of_slot, shape, (1, 2))
    num_slots = row_of_slot.numel()
    if row_of_slot.dim() == 2:
        if row_of_slot.shape[0] != num_tokens:
            raise check.wrong_shape(operator, "row_of_slot", shape, row_of_slot)
        topk = row_of_slot.shape[1]
    else:
        if num_slots % max(num_tokens, 1) or (num_tokens == 0 and num_slots):
            raise check.wrong_shape(operator, "row_of_slot", shape, row_of_slot)
        topk = num_slots // num_tokens if num_tokens else 1
    if expert_of_slot is not None:
        wanted = f"[T, K] or [T * K] with {num_slots} elements, as row_of_slot"
        expert_of_slot = index_tensor(operator, "expert_of_slot", expert_of_slot, wanted, (1, 2))
        if expert_of_slot.numel() != num_slots or (
            expert_of_slot.dim() == 2 and expert_of_slot.shape != (num_tokens, topk)
        ):
            raise check.wrong_shape(operator, "expert_of_slot", wanted, expert_of_slot)
        check.same_device(operator, "row_of_slot", row_of_slot, "expert_of_slot", expert_of_slot)
    chosen = dispatch.choose(operator, backend, row_of_slot.device)
    inputs, options = (row_of_slot, expert_of_slot), (num_rows, first_row, chosen)
    rows, slots, experts = planned(operator, _row_of_slot_operator, _plan_row_of_slot, inputs, options, out, num_slots)
    return make_plan(rows, slots, num_tokens, topk=topk, expert_of_slot=None if expert_of_slot is None else experts)


def plan_from_token_ids(
    token_ids: Tensor,
    num_tokens: int,
    *,
    rows: Tensor | None = None,
    num_rows: int | None = None,
    num_experts: int | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> RoutingPlan:
    """The plan for a given token of each row, such as Megatron's `sorted_indices`.

    Entry i puts row `rows[i]` (without `rows`: row i) under token `token_ids[i]`. Slots are the entries grouped by
    token, inside a token in their order; an entry whose token id lies outside [0, num_tokens) owns no slot, and the
    slots left over at the end belong to no token. Nothing is read back.

    Args:
        token_ids: [N], any integer dtype, any strides.
        num_tokens: T.
        rows: [N], any integer dtype, any strides. A row outside [0, num_rows) is -1; where two entries name one row,
            its `slot_of_row` is the later slot.
        num_rows: R; None: N.
        num_experts: must divide `num_rows`. Row r then belongs to expert `r // (num_rows / num_experts)`: the plan has
            `expert_of_slot` for weights [T, E], and counts.
        out: int32 [S], of any strides, outside torch.compile: gets `row_of_slot`, and the plan goes on using it.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The plan.

    Raises:
        ValueError: a wrong shape, size, number or device.
        TypeError: a wrong type or dtype.

    In torch: `row_of_slot = argsort(token_ids, stable=True)`.

    >>> plan = plan_from_token_ids(torch.tensor([1, 0, 1, 9, 0]), num_tokens=2)
    >>> plan.slot_offsets.tolist(), plan.row_of_slot.tolist(), plan.slot_of_row.tolist()
    ([0, 2, 4], [1, 4, 0, 2, -1], [2, 0, 3, -1, 1])

    >>> plan = plan_from_token_ids(torch.tensor([0, 2, 1, 2]), num_tokens=3, num_experts=2)
    >>> plan.expert_of_slot.tolist(), plan.tokens_per_expert.tolist()
    ([0, 1, 0, 1], [2, 2])
    """
    operator = "plan_from_token_ids"
    check.integer(operator, "num_tokens", num_tokens, 0, LARGEST - 1)
    token_ids = index_tensor(operator, "token_ids", token_ids, "[N]", (1,))
    num_slots = token_ids.shape[0]
    if rows is not None:
        rows = index_tensor(operator, "rows", rows, f"[N] with N = {num_slots}, as token_ids", (1,))
        if rows.shape[0] != num_slots:
            raise check.wrong_shape(operator, "rows", f"[N] with N = {num_slots}, as token_ids", rows)
        check.same_device(operator, "token_ids", token_ids, "rows", rows)
    num_rows = num_slots if num_rows is None else check.integer(operator, "num_rows", num_rows, 0, LARGEST)
    if num_experts is not None:
        check.integer(operator, "num_experts", num_experts, 1, LARGEST)
        if num_rows % num_experts:
            raise check.wrong_value(operator, "num_rows", f"a multiple of num_experts = {num_experts}", num_rows)
    chosen = dispatch.choose(operator, backend, token_ids.device)
    inputs, options = (token_ids, rows), (num_tokens, num_rows, num_experts, chosen)
    found = planned(operator, _token_ids_operator, _plan_token_ids, inputs, options, out, num_slots)
    row_of_slot, slot_of_row, offsets, experts, tokens = found
    if num_experts is None:
        return make_plan(row_of_slot, slot_of_row, num_tokens, slot_offsets=offsets)
    per_expert = torch.full_like(tokens, num_rows // num_experts)
    return make_plan(row_of_slot, slot_of_row, num_tokens, num_experts, None, offsets, experts, tokens, per_expert)


def plan_from_segments(
    lengths: Tensor, num_tokens: int, *, out: Tensor | None = None, backend: Backend | None = None
) -> RoutingPlan:
    """The plan that regroups chunks from several ranks by expert (MoeReRouting).

    The tokens lie rank by rank, and inside a rank expert by expert; the rows lie expert by expert, and inside an expert
    rank by rank. Each token is one slot (`topk` = 1), S = R = T. Nothing is read back: tokens behind the last chunk
    have no row, chunks end at the last token, and a negative length counts as 0.

    Args:
        lengths: [ranks, E], any integer dtype: the tokens of each chunk.
        num_tokens: T.
        out: int32 [S], of any strides, outside torch.compile: gets `row_of_slot`, and the plan goes on using it.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The plan.

    Raises:
        ValueError: a wrong shape, size, number or device.
        TypeError: a wrong type or dtype.

    In torch: `chunks = arange(T).split(lengths.flatten().tolist())`, then
    `slot_of_row = cat([chunks[r * E + e] for e in range(E) for r in range(ranks)])`.

    >>> plan = plan_from_segments(torch.tensor([[2, 1], [1, 2]]), num_tokens=6)
    >>> plan.row_of_slot.tolist(), plan.slot_of_row.tolist(), plan.tokens_per_expert.tolist()
    ([0, 1, 3, 2, 4, 5], [0, 1, 3, 2, 4, 5], [3, 3])
    """
    operator = "plan_from_segments"
    lengths = index_tensor(operator, "lengths", lengths, "[ranks, E]", (2,))
    row_of_slot, slot_of_row, tokens = _chunks(operator, lengths, None, num_tokens, out, backend)
    return make_plan(
        row_of_slot,
        slot_of_row,
        num_tokens,
        num_experts=lengths.shape[1],
        topk=1,
        tokens_per_expert=tokens,
        rows_per_expert=tokens,
    )


def plan_from_chunks(
    lengths: Tensor,
    order: Tensor,
    num_tokens: int,
    *,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> RoutingPlan:
    """The plan that reorders chunks of tokens.

    It is `sort_chunks_by_index` of Transformer Engine and `sort_chunks_by_idxs` of Megatron. Each token is one slot
    (`topk` = 1), S = R = T. `plan_from_segments` is the case in which chunks of [ranks, E] are ordered by expert; here
    the plan knows no experts.

    Nothing is read back, so that the data is not checked either: tokens behind the last chunk have no row, chunks
    end at the last token, and a negative length counts as 0. An `order` outside [0, N) names no chunk. Of several
    places that name one chunk the last has its rows; a chunk that no place names has none.

    Args:
        lengths: [N], any integer dtype, any strides: the tokens lie chunk by chunk, `lengths[c]` of them in chunk c.
        order: [N], a permutation, any integer dtype, any strides: chunk `order[i]` comes i-th among the rows.
        num_tokens: T.
        out: int32 [S], of any strides, outside torch.compile: gets `row_of_slot`, and the plan goes on using it.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The plan.

    Raises:
        ValueError: a wrong shape, size, number or device.
        TypeError: a wrong type or dtype.

    In torch: `chunks = arange(T).split(lengths.tolist())`, then
    `slot_of_row = cat([chunks[c] for c in order.tolist()])`.

    >>> lengths, order = torch.tensor([2, 1, 3]), torch.tensor([2, 0, 1])
    >>> plan = plan_from_chunks(lengths, order, num_tokens=6)
    >>> plan.token_of_row.tolist(), plan.row_of_slot.tolist()
    ([3, 4, 5, 0, 1, 2], [3, 4, 5, 0, 1, 2])
    """
    operator = "plan_from_chunks"
    lengths = index_tensor(operator, "lengths", lengths, "[N]", (1,))
    order = _order_of(operator, order, lengths)
    row_of_slot, slot_of_row, _ = _chunks(operator, lengths[:, None], order, num_tokens, out, backend)
    return make_plan(row_of_slot, slot_of_row, num_tokens, topk=1)


def _chunks(
    operator: str, lengths: Tensor, order: Tensor | None, num_tokens: int, out: Tensor | None, backend: Backend | None
) -> tuple[Tensor, Tensor, Tensor]:
    check.integer(operator, "num_tokens", num_tokens, 0, LARGEST)
    chosen = dispatch.choose(operator, backend, lengths.device)
    inputs, options = (lengths, order), (num_tokens, chosen)
    found: tuple[Tensor, Tensor, Tensor] = planned(
        operator, _chunks_operator, _plan_chunks, inputs, options, out, num_tokens
    )
    return found


def plan_from_row_id_map(
    row_id_map: Tensor,
    num_rows: int,
    *,
    pad_offsets: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> RoutingPlan:
    """The plan of Transformer Engine's `row_id_map`, which its `moe_permute` returns.

    Token t goes to n = `row_id_map[t, 2E]` experts, at most E; the first n entries of its line are its rows, the n from
    column E on the experts' ids; nothing else is read. Tokens own different numbers of slots, in the order of the map,
    so that weights are [T, E]. Nothing is read back: S = R = `num_rows`, and slots behind the last entry belong to no
    token; entries from the `num_rows`-th on have none. A row outside [0, num_rows), with the offset or without, or an
    id outside [0, E) is a slot without a row and an expert. The plan has no counts of its experts.

    Args:
        row_id_map: [T, 2E + 1], any integer dtype.
        num_rows: R.
        pad_offsets: [E], as `moe_permute_and_pad_with_probs` returns it; added to the rows of each expert.
        out: int32 [S], of any strides, outside torch.compile: gets `row_of_slot`, and the plan goes on using it.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The plan.

    Raises:
        ValueError: a wrong shape, size, number or device.
        TypeError: a wrong type or dtype.

    In torch: `token_of_row[row_id_map[t, :n]] = t`.

    >>> row_id_map = torch.tensor([[2, 0, 1, 0, 2], [1, -1, 0, -1, 1]])
    >>> plan = plan_from_row_id_map(row_id_map, num_rows=3)
    >>> plan.token_of_row.tolist(), plan.slot_offsets.tolist(), plan.expert_of_slot.tolist()
    ([0, 1, 0], [0, 2, 3], [1, 0, 0])
    """
    operator = "plan_from_row_id_map"
    row_id_map, pad_offsets = _map_of(operator, row_id_map, pad_offsets)
    check.integer(operator, "num_rows", num_rows, 0, LARGEST)
    chosen = dispatch.choose(operator, backend, row_id_map.device)
    inputs, options = (row_id_map, pad_offsets), (num_rows, chosen)
    found = planned(operator, _row_id_map_operator, _plan_row_id_map, inputs, options, out, num_rows)
    rows, slots, offsets, experts = found
    return make_plan(rows, slots, row_id_map.shape[0], row_id_map.shape[1] // 2, None, offsets, experts)


def row_id_map(plan: RoutingPlan, *, out: Tensor | None = None, backend: Backend | None = None) -> Tensor:
    """The plan as Transformer Engine's `row_id_map`, int32 [T, 2E + 1]; nothing is read back.

    The first n entries of a line are the rows of the token's slots that have one, in slot order; the n from column
    E on are their experts; the last is n. The others are -1 (Transformer Engine leaves them undefined, and has
    the rows in descending order; its functions take any). Rows count padding: `pad_offsets` is None.

    E is the plan's `num_experts`. A plan without `expert_of_slot` (of expert ids) tells experts by their rows: E is
    the number of its `rows_per_expert`, those of its expert range. A token with more than E slots that have rows
    (an expert chosen twice) has the first E.

    Args:
        plan: a plan that knows its experts.
        out: int32 [T, 2E + 1], any strides; the result is written into it.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The map; `out` if it was given.

    Raises:
        ValueError: the plan knows no experts, or `out` has a wrong shape.
        TypeError: a wrong type or dtype.

    In torch, for a token t: `slots = arange(slot_offsets[t], slot_offsets[t + 1])`, then `row_of_slot[slots]`,
    `expert_of_slot[slots]` and `len(slots)`.

    >>> import torch, moeroute
    >>> plan = moeroute.plan_from_routing_map(torch.tensor([[True, True], [True, False]]))
    >>> moeroute.row_id_map(plan).tolist()
    [[0, 2, 0, 1, 2], [1, -1, 0, -1, 1]]
    """
    operator = "row_id_map"
    expect_plan(operator, plan)
    tensors, num_experts = plan.tensors, plan.num_experts
    if plan.expert_of_slot is None and plan.expert_of_row is not None and plan.rows_per_expert is not None:
        num_experts = plan.rows_per_expert.shape[0]
        tensors = tensors._replace(expert_of_slot=values_at(plan.expert_of_row, plan.row_of_slot))
    if num_experts is None or tensors.expert_of_slot is None:
        raise check.wrong_value(operator, "plan", "one that knows the expert of each slot", "one without")
    chosen = dispatch.choose(operator, backend, plan.row_of_slot.device)
    if out is not None:
        layout.check_out(operator, out, (plan.num_tokens, 2 * num_experts + 1), torch.int32, *tensors[:4])
    if out is not None or dispatch.plain(plan.row_of_slot):
        found: Tensor = dispatch.module("indices", chosen).row_id_map(tensors, num_experts, out=out)
        return found
    found = _row_id_map(tensors, num_experts, chosen)
    return found


# ---------------------------------------------------------------------------- checks


def _map_of(operator: str, row_id_map: Tensor, pad_offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
    row_id_map = index_tensor(operator, "row_id_map", row_id_map, "[T, 2E + 1]", (2,))
    if row_id_map.shape[1] % 2 == 0:
        raise check.wrong_shape(operator, "row_id_map", "[T, 2E + 1]", row_id_map)
    if pad_offsets is not None:
        num_experts = row_id_map.shape[1] // 2
        wanted = f"[E] with E = {num_experts}, as row_id_map"
        pad_offsets = index_tensor(operator, "pad_offsets", pad_offsets, wanted, (1,))
        if pad_offsets.shape[0] != num_experts:
            raise check.wrong_shape(operator, "pad_offsets", wanted, pad_offsets)
        check.same_device(operator, "row_id_map", row_id_map, "pad_offsets", pad_offsets)
        pad_offsets = pad_offsets.to(torch.int64)
    return row_id_map, pad_offsets


def _order_of(operator: str, order: Tensor, lengths: Tensor) -> Tensor:
    num_chunks = lengths.numel()
    wanted = f"[N] with N = {num_chunks}, as lengths"
    order = index_tensor(operator, "order", order, wanted, (1,))
    if order.shape[0] != num_chunks:
        raise check.wrong_shape(operator, "order", wanted, order)
    check.same_device(operator, "lengths", lengths, "order", order)
    return order


# ---------------------------------------------------------------------------- registration


def _row_of_slot_operator(
    row_of_slot: Tensor,
    expert_of_slot: Tensor | None,
    num_rows: int,
    first_row: int,
    backend: Backend,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, slots, experts = dispatch.module("indices", backend).plan_row_of_slot(
        row_of_slot, expert_of_slot, num_rows, first_row, out=out
    )
    return rows, slots, experts


def _token_ids_operator(
    token_ids: Tensor,
    rows: Tensor | None,
    num_tokens: int,
    num_rows: int,
    num_experts: int | None,
    backend: Backend,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    row_of_slot, slot_of_row, offsets, experts, tokens = dispatch.module("indices", backend).plan_token_ids(
        token_ids, rows, num_tokens, num_rows, num_experts, out=out
    )
    return row_of_slot, slot_of_row, offsets, experts, tokens


def _chunks_operator(
    lengths: Tensor, order: Tensor | None, num_tokens: int, backend: Backend, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    row_of_slot, slot_of_row, tokens = dispatch.module("indices", backend).plan_chunks(
        lengths, order, num_tokens, out=out
    )
    return row_of_slot, slot_of_row, tokens


def _row_id_map_operator(
    row_id_map: Tensor, pad_offsets: Tensor | None, num_rows: int, backend: Backend, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, slots, offsets, experts = dispatch.module("indices", backend).plan_row_id_map(
        row_id_map, pad_offsets, num_rows, out=out
    )
    return rows, slots, offsets, experts


def _registered_row_of_slot(
    row_of_slot: Tensor, expert_of_slot: Tensor | None, num_rows: int, first_row: int, backend: Backend
) -> tuple[Tensor, Tensor, Tensor]:
    operator = "plan_row_of_slot"
    row_of_slot = index_tensor(operator, "row_of_slot", row_of_slot, "[T, K] or [T * K]", (1, 2))
    if expert_of_slot is not None:
        expert_of_slot = index_tensor(operator, "expert_of_slot", expert_of_slot, "[T, K] or [T * K]", (1, 2))
        if expert_of_slot.numel() != row_of_slot.numel():
            wanted = f"of {row_of_slot.numel()} elements, as row_of_slot"
            raise check.wrong_shape(operator, "expert_of_slot", wanted, expert_of_slot)
        check.same_device(operator, "row_of_slot", row_of_slot, "expert_of_slot", expert_of_slot)
    check.integer(operator, "num_rows", num_rows, 0, LARGEST)
    check.integer(operator, "first_row", first_row, 0, 2**62)
    dispatch.choose(operator, backend, row_of_slot.device)
    rows, slots, experts = _row_of_slot_operator(row_of_slot, expert_of_slot, num_rows, first_row, backend)
    return rows, slots, or_empty(experts, row_of_slot, torch.int32)


def _registered_token_ids(
    token_ids: Tensor, rows: Tensor | None, num_tokens: int, num_rows: int, num_experts: int | None, backend: Backend
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operator = "plan_token_ids"
    token_ids = index_tensor(operator, "token_ids", token_ids, "[N]", (1,))
    if rows is not None:
        rows = index_tensor(operator, "rows", rows, "[N]", (1,))
        check.shaped(operator, "rows", rows, tuple(token_ids.shape), token_ids)
    check.integer(operator, "num_tokens", num_tokens, 0, LARGEST - 1)
    check.integer(operator, "num_rows", num_rows, 0, LARGEST)
    if num_experts is not None:
        check.integer(operator, "num_experts", num_experts, 1, LARGEST)
        if num_rows % num_experts:
            raise check.wrong_value(operator, "num_rows", f"a multiple of num_experts = {num_experts}", num_rows)
    dispatch.choose(operator, backend, token_ids.device)
    row_of_slot, slot_of_row, offsets, experts, tokens = _token_ids_operator(
        token_ids, rows, num_tokens, num_rows, num_experts, backend
    )
    experts, tokens = or_empty(experts, token_ids, torch.int32), or_empty(tokens, token_ids, torch.int64)
    return row_of_slot, slot_of_row, offsets, experts, tokens


def _registered_chunks(
    lengths: Tensor, order: Tensor | None, num_tokens: int, backend: Backend
) -> tuple[Tensor, Tensor, Tensor]:
    operator = "plan_chunks"
    lengths = index_tensor(operator, "lengths", lengths, "[ranks, E]", (2,))
    if order is not None:
        order = _order_of(operator, order, lengths)
    check.integer(operator, "num_tokens", num_tokens, 0, LARGEST)
    dispatch.choose(operator, backend, lengths.device)
    return _chunks_operator(lengths, order, num_tokens, backend)


def _registered_row_id_map(
    row_id_map: Tensor, pad_offsets: Tensor | None, num_rows: int, backend: Backend
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operator = "plan_row_id_map"
    row_id_map, pad_offsets = _map_of(operator, row_id_map, pad_offsets)
    check.integer(operator, "num_rows", num_rows, 0, LARGEST)
    dispatch.choose(operator, backend, row_id_map.device)
    return _row_id_map_operator(row_id_map, pad_offsets, num_rows, backend)


def _registered_map_of_plan(plan: PlanTensors, num_experts: int, backend: Backend) -> Tensor:
    operator = "row_id_map"
    plan = given_plan(operator, plan, None, plan.row_of_slot)
    if plan.expert_of_slot is None:
        raise check.wrong_value(operator, "expert_of_slot", "given", None)
    check.integer(operator, "num_experts", num_experts, 0, LARGEST // 2)
    dispatch.choose(operator, backend, plan.row_of_slot.device)
    found: Tensor = dispatch.module("indices", backend).row_id_map(plan, num_experts)
    return found


def _row_id_map_fake(
    row_id_map: Tensor, pad_offsets: Tensor | None, num_rows: int, backend: Backend
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, slots, experts = (fake_vector(row_id_map, num_rows) for _ in range(3))
    return rows, slots, fake_vector(row_id_map, row_id_map.shape[0] + 1), experts


def _map_of_plan_fake(plan: PlanTensors, num_experts: int, backend: Backend) -> Tensor:
    return plan.row_of_slot.new_empty(plan.num_tokens, 2 * num_experts + 1)


def _row_of_slot_fake(
    row_of_slot: Tensor, expert_of_slot: Tensor | None, num_rows: int, first_row: int, backend: Backend
) -> tuple[Tensor, Tensor, Tensor]:
    num_slots = row_of_slot.numel()
    experts = 0 if expert_of_slot is None else num_slots
    return fake_vector(row_of_slot, num_slots), fake_vector(row_of_slot, num_rows), fake_vector(row_of_slot, experts)


def _token_ids_fake(
    token_ids: Tensor, rows: Tensor | None, num_tokens: int, num_rows: int, num_experts: int | None, backend: Backend
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_slots = token_ids.shape[0]
    return (
        fake_vector(token_ids, num_slots),
        fake_vector(token_ids, num_rows),
        fake_vector(token_ids, num_tokens + 1),
        fake_vector(token_ids, 0 if num_experts is None else num_slots),
        fake_vector(token_ids, 0 if num_experts is None else num_experts, torch.int64),
    )


def _chunks_fake(
    lengths: Tensor, order: Tensor | None, num_tokens: int, backend: Backend
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        fake_vector(lengths, num_tokens),
        fake_vector(lengths, num_tokens),
        fake_vector(lengths, lengths.shape[1], torch.int64),
    )


_plan_row_of_slot = register(
    "plan_row_of_slot(Tensor row_of_slot, Tensor? expert_of_slot, SymInt num_rows, SymInt first_row, str backend)"
    " -> (Tensor row_of_slot, Tensor slot_of_row, Tensor expert_of_slot)",
    _registered_row_of_slot,
    _row_of_slot_fake,
)
_plan_token_ids = register(
    "plan_token_ids(Tensor token_ids, Tensor? rows, SymInt num_tokens, SymInt num_rows, SymInt? num_experts,"
    " str backend) -> (Tensor row_of_slot, Tensor slot_of_row, Tensor slot_offsets, Tensor expert_of_slot,"
    " Tensor tokens_per_expert)",
    _registered_token_ids,
    _token_ids_fake,
)
_plan_chunks = register(
    "plan_chunks(Tensor lengths, Tensor? order, SymInt num_tokens, str backend)"
    " -> (Tensor row_of_slot, Tensor slot_of_row, Tensor tokens_per_expert)",
    _registered_chunks,
    _chunks_fake,
)
_plan_row_id_map = register(
    "plan_row_id_map(Tensor row_id_map, Tensor? pad_offsets, SymInt num_rows, str backend)"
    " -> (Tensor row_of_slot, Tensor slot_of_row, Tensor slot_offsets, Tensor expert_of_slot)",
    _registered_row_id_map,
    _row_id_map_fake,
)
_row_id_map = register(
    f"row_id_map({PLAN_SCHEMA}, SymInt num_experts, str backend) -> Tensor",
    _registered_map_of_plan,
    _map_of_plan_fake,
)
