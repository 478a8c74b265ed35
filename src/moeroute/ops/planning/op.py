"""The plan of K chosen experts for every token."""

from decimal import Decimal
from fractions import Fraction
from typing import Any, get_args

import torch
from torch import Tensor

from moeroute import check as checks
from moeroute import dispatch
from moeroute.dispatch import Backend
from moeroute.dtypes import LARGEST
from moeroute.ops.planning.common import (
    DropOfIds,
    check_segments,
    checked_weights,
    deciding_weights,
    expert_bounds,
    fake_vector,
    index_tensor,
    no_data,
    optional_integer,
    or_empty,
    planned,
    segment_of,
)
from moeroute.ops.register import register
from moeroute.plan import RoutingPlan, make_plan


def plan_from_expert_ids(
    expert_ids: Tensor,
    num_experts: int | None,
    *,
    expert_range: tuple[int, int] | None = None,
    capacity: int | None = None,
    drop: DropOfIds = "position",
    weights: Tensor | None = None,
    pad_to_capacity: bool = False,
    align: int = 1,
    num_rows: int | None = None,
    check: bool = False,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> RoutingPlan:
    """The plan for K chosen experts per token.

    Slot `t * K + k` is token t's k-th choice. Rows are grouped by expert, ascending; inside an expert by slot: the
    stable sort of the slots by expert, found by counting. The result is the same on every backend with any number of
    threads.

    Args:
        expert_ids: [T, K], or [T] for K = 1, any integer dtype, any strides. An id below 0 or from `num_experts` on is
            an empty slot without a row (-1 and `num_experts` are the usual marks).
        num_experts: E. None: any id from 0 on, with rows in the stable order of the ids; the cost does not depend on
            the largest id. The plan then knows no experts: no `tokens_per_expert`, and none of `expert_range`,
            `capacity`, `pad_to_capacity` and `align`.
        expert_range: (lo, hi): only experts lo <= e < hi get rows, as on the rank that holds them; `tokens_per_expert`
            then has hi - lo entries.
        capacity: most rows of an expert. The other slots become -1.
        drop: the slots that stay under a capacity. "position": the first ones; "weight": those with the largest
            `weights` (NaN is the largest, -0 equals +0, of equal ones the smaller slot stays); "choice": the first ones
            by k, then by token, so that all first choices come before any second one, and with `weights` by k, then
            by the token's largest weight ("batch-prioritised"). Rows are in slot order all the same.
        weights: [T, K], for drop="weight" and, if wanted, "choice"; float64 needs the reference backend.
        pad_to_capacity: every expert has exactly `capacity` rows, rounded up to `align`.
        align: each expert's rows are padded to a multiple of it; an expert without rows stays without.
        num_rows: R. None: as many as the slots need, one integer read back (a synchronisation on a GPU, a
            data-dependent size under torch.compile), except with `pad_to_capacity`. A given number reads nothing (`T *
            K` is never too small): slots whose row would lie behind it become -1, rows behind the last are padding.
            `tokens_per_expert` and `rows_per_expert` count rows inside it.
        check: read the ids, and raise ValueError for one that is neither an expert nor -1 nor `num_experts`.
        out: int32 [S], of any strides, outside torch.compile: gets `row_of_slot`, and the plan goes on using it.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The plan.

    Raises:
        ValueError: a wrong shape or value, among them more than 2^31 - 1 slots or rows.
        TypeError: a wrong type or dtype.

    Who drops how: Switch Transformer (K = 1) and Megatron's `drop_policy="position"` by "position"; Megatron's
    `drop_policy="probs"` by "weight"; GShard, DeepSpeed's top-2 gate, Tutel and NLLB by "choice", and with their
    `batch_prioritized_routing`, as V-MoE, by "choice" with weights.

    In torch: `slot_of_row = argsort(expert_ids.flatten(), stable=True)`, `row_of_slot = argsort(slot_of_row)`,
    `tokens_per_expert = bincount(expert_ids.flatten(), minlength=num_experts)`.

    >>> ids = torch.tensor([[1, 2], [0, 1], [0, 2]])
    >>> plan = plan_from_expert_ids(ids, num_experts=3)
    >>> plan.row_of_slot.tolist(), plan.slot_of_row.tolist(), plan.tokens_per_expert.tolist()
    ([2, 4, 0, 3, 1, 5], [2, 4, 0, 3, 1, 5], [2, 2, 2])

    >>> plan_from_expert_ids(ids, 3, capacity=1).row_of_slot.tolist()
    [1, 2, 0, -1, -1, -1]
    >>> weights = torch.tensor([[0.5, 0.5], [0.4, 0.6], [0.9, 0.1]])
    >>> plan_from_expert_ids(ids, 3, capacity=1, drop="weight", weights=weights).row_of_slot.tolist()
    [-1, 2, -1, 1, 0, -1]
    >>> swapped = torch.tensor([[0, 1], [1, 0], [1, 2]])
    >>> plan_from_expert_ids(swapped, 3, capacity=1, drop="choice").row_of_slot.tolist()
    [0, -1, 1, -1, -1, 2]

    >>> plan_from_expert_ids(ids, 3, capacity=2, pad_to_capacity=True, align=3).slot_of_row.tolist()
    [2, 4, -1, 0, 3, -1, 1, 5, -1]

    >>> plan_from_expert_ids(ids, 3, num_rows=3).row_of_slot.tolist()
    [2, -1, 0, -1, 1, -1]
    """
    operator = "plan_from_expert_ids"
    expert_ids = index_tensor(operator, "expert_ids", expert_ids, "[T, K] or [T]", (1, 2))
    shape = expert_ids.shape
    num_tokens, topk = shape[0], shape[1] if len(shape) == 2 else 1
    first, last, segment, num_rows = _ids_options(
        num_experts, expert_range, capacity, drop, pad_to_capacity, align, num_rows, check
    )
    if num_rows is None and expert_ids.is_meta:
        raise no_data(operator, "num_rows")
    if num_experts is None:
        few = num_rows, check, dispatch.choose(operator, backend, expert_ids.device)
        row_of_slot, slot_of_row = planned(
            operator, _any_ids_operator, _plan_any_ids, (expert_ids,), few, out, num_tokens * topk
        )
        return make_plan(row_of_slot, slot_of_row, num_tokens, topk=topk)

    if weights is not None:
        weights = deciding_weights(operator, weights, "expert_ids", expert_ids, (num_tokens, topk))
    by_choice = drop == "choice" and capacity is not None
    if capacity is None or drop == "position":
        weights = None
    elif weights is None and not by_choice:
        raise checks.wrong_value(operator, "weights", "given with drop='weight'", None)
    dtype = None if weights is None else weights.dtype
    chosen = dispatch.choose(operator, backend, expert_ids.device, dtype)
    inputs = expert_ids, weights
    options = num_experts, first, last, capacity, segment, align, num_rows, by_choice, check, chosen
    row_of_slot, slot_of_row, tokens, rows = planned(
        operator, _ids_operator, _plan_expert_ids, inputs, options, out, num_tokens * topk
    )
    padded = segment is not None or align > 1
    return make_plan(
        row_of_slot,
        slot_of_row,
        num_tokens,
        num_experts,
        topk,
        tokens_per_expert=tokens,
        rows_per_expert=rows if padded else tokens,
    )


def capacity_from_factor(
    num_tokens: int,
    topk: int,
    num_experts: int,
    factor: float | Fraction | Decimal,
    *,
    minimum: int = 0,
    align: int = 1,
) -> int:
    """ceil(T * K * factor / E), at least `minimum`, rounded up to a multiple of `align`.

    The result is exact, with the factor as it is written: 1.1 means 11/10, so that no rounding of a float adds a row.

    Args:
        num_tokens: T, at least 0.
        topk: K, at least 0.
        num_experts: E, at least 1.
        factor: rows of an expert, as a multiple of its share in perfect balance; finite, at least 0.
        minimum: the smallest result before alignment.
        align: the result is a multiple of it.

    Returns:
        The capacity, rows of each expert.

    Raises:
        ValueError: a number out of its range.
        TypeError: a wrong type.

    >>> capacity_from_factor(100, 1, 10, 1.1)
    11
    >>> import math
    >>> math.ceil(100 * 1.1 / 10)
    12
    >>> capacity_from_factor(5, 2, 3, 1.25, align=4)
    8
    """
    operator = "capacity_from_factor"
    checks.integer(operator, "num_tokens", num_tokens, 0)
    checks.integer(operator, "topk", topk, 0)
    checks.integer(operator, "num_experts", num_experts, 1)
    checks.integer(operator, "minimum", minimum, 0)
    checks.integer(operator, "align", align, 1)
    if isinstance(factor, bool) or not isinstance(factor, (int, float, Fraction, Decimal)):
        raise checks.wrong_type(operator, "factor", "a number", factor)
    if factor != factor or not 0 <= factor < float("inf"):  # a Decimal's NaN cannot even be compared
        raise checks.wrong_value(operator, "factor", "finite and at least 0", factor)
    exact = Fraction(str(factor))
    capacity = capacity_from_ratio(num_tokens, topk, num_experts, *exact.as_integer_ratio())
    return (max(capacity, minimum) + align - 1) // align * align


def capacity_from_ratio(num_tokens: int, topk: int, num_experts: int, numerator: int, denominator: int) -> int:
    """ceil(T * K * factor / E) for a factor of two integers, which torch.compile can trace with a symbolic T."""
    return -(-num_tokens * topk * numerator // (num_experts * denominator))


# ---------------------------------------------------------------------------- checks


def _ids_options(
    num_experts: Any, expert_range: Any, capacity: Any, drop: Any, pad: Any, align: Any, num_rows: Any, check: Any
) -> tuple[int, int, int | None, int | None]:
    """Checks of all that is no tensor; the experts [first, last), their segment and R where they are known."""
    if (
        type(num_experts) is int
        and 0 <= num_experts <= LARGEST
        and expert_range is capacity is num_rows is None
        and type(drop) is str
        and drop == "position"
        and type(align) is int
        and align == 1
        and pad is check is False
    ):
        return 0, num_experts, None, None  # the defaults, in the time that one token has
    operator = "plan_from_expert_ids"
    num_rows = optional_integer(operator, "num_rows", num_rows)
    checks.integer(operator, "align", align, 1, LARGEST)
    checks.one_of(operator, "drop", drop, get_args(DropOfIds))
    capacity = optional_integer(operator, "capacity", capacity)
    pad = checks.flag(operator, "pad_to_capacity", pad)
    checks.flag(operator, "check", check)
    if num_experts is None:
        for name, value, default in (
            ("expert_range", expert_range, None),
            ("capacity", capacity, None),
            ("pad_to_capacity", pad, False),
            ("align", align, 1),
        ):
            if value != default:
                raise checks.wrong_value(operator, name, f"{default} where num_experts is None", value)
        return 0, 0, None, num_rows
    checks.integer(operator, "num_experts", num_experts, 0, LARGEST)
    first, last = expert_bounds(operator, num_experts, expert_range)
    return first, last, *segment_of(operator, last - first, capacity, pad, align, num_rows)


def _refuse_ids(ids: Tensor, num_experts: int | None) -> None:
    """Raise for the first id that is neither an expert nor a sentinel."""
    if ids.is_meta:
        return
    bad, wanted = ids < -1, "-1 (an empty slot) or more"
    if num_experts is not None:
        bad |= ids > num_experts
        wanted = f"in -1..{num_experts} (-1 and num_experts are empty slots)"
    bad = bad.reshape(-1)
    if bool(bad.any()):
        slot = int(bad.to(torch.uint8).argmax())
        got = f"{int(ids.reshape(-1)[slot])} in slot {slot}"
        raise checks.wrong_value("plan_from_expert_ids", "expert_ids", wanted, got)


# ---------------------------------------------------------------------------- drop by choice


def _first_choices(
    ids: Tensor, weights: Tensor | None, first: int, last: int, capacity: int | None, backend: Backend
) -> Tensor:
    """The ids of the slots that stay, -1 for the others: by position, where slots are numbered choice by choice."""
    if ids.numel() == 0:
        return ids
    table = ids.view(ids.shape[0], -1)
    by_choice = table.t()
    order = None
    if weights is not None:
        heaviest = weights.view(table.shape).amax(dim=1) + 0.0  # NaN if any is, and NaN comes first; -0 is +0
        order = torch.argsort(heaviest, descending=True, stable=True)
        by_choice = by_choice[:, order]
    rows = dispatch.module("planning", backend).plan_expert_ids(
        by_choice.contiguous(), None, first, last, capacity, None, 1, ids.numel()
    )[0]
    stays = (rows >= 0).view(by_choice.shape)
    if order is not None:
        stays = torch.empty_like(stays).index_copy_(1, order, stays)
    return torch.where(stays.t(), table, -1).contiguous().view(ids.shape)


# ---------------------------------------------------------------------------- registration


def _ids_operator(
    expert_ids: Tensor,
    weights: Tensor | None,
    num_experts: int,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    by_choice: bool,
    check: bool,
    backend: Backend,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if check:
        _refuse_ids(expert_ids, num_experts)
    if by_choice:
        expert_ids, weights = _first_choices(expert_ids, weights, first_expert, last_expert, capacity, backend), None
    row_of_slot, slot_of_row, tokens, rows = dispatch.module("planning", backend).plan_expert_ids(
        expert_ids, weights, first_expert, last_expert, capacity, segment, align, num_rows, out=out
    )
    return row_of_slot, slot_of_row, tokens, rows


def _any_ids_operator(
    expert_ids: Tensor, num_rows: int | None, check: bool, backend: Backend, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if check:
        _refuse_ids(expert_ids, None)
    row_of_slot, slot_of_row = dispatch.module("planning", backend).plan_any_ids(expert_ids, num_rows, out=out)
    return row_of_slot, slot_of_row


def _registered_expert_ids(
    expert_ids: Tensor,
    weights: Tensor | None,
    num_experts: int,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    by_choice: bool,
    check: bool,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operator = "plan_expert_ids"
    expert_ids = index_tensor(operator, "expert_ids", expert_ids, "[T, K] or [T]", (1, 2))
    weights = checked_weights(operator, weights, "expert_ids", expert_ids)
    check_segments(operator, first_expert, last_expert, num_experts, capacity, segment, align, num_rows)
    dispatch.choose(operator, backend, expert_ids.device, None if weights is None else weights.dtype)
    row_of_slot, slot_of_row, tokens, rows = _ids_operator(
        expert_ids,
        weights,
        num_experts,
        first_expert,
        last_expert,
        capacity,
        segment,
        align,
        num_rows,
        by_choice,
        check,
        backend,
    )
    return row_of_slot, slot_of_row, tokens, or_empty(rows, expert_ids, torch.int64)


def _registered_any_ids(
    expert_ids: Tensor, num_rows: int | None, check: bool, backend: Backend
) -> tuple[Tensor, Tensor]:
    operator = "plan_any_ids"
    expert_ids = index_tensor(operator, "expert_ids", expert_ids, "[T, K] or [T]", (1, 2))
    optional_integer(operator, "num_rows", num_rows)
    dispatch.choose(operator, backend, expert_ids.device)
    return _any_ids_operator(expert_ids, num_rows, check, backend)


def _ids_fake(
    expert_ids: Tensor,
    weights: Tensor | None,
    num_experts: int,
    first_expert: int,
    last_expert: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
    by_choice: bool,
    check: bool,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    experts = last_expert - first_expert
    return (
        fake_vector(expert_ids, expert_ids.numel()),
        fake_vector(expert_ids, num_rows),
        fake_vector(expert_ids, experts, torch.int64),
        fake_vector(expert_ids, 0 if segment is None and align == 1 else experts, torch.int64),
    )


def _any_ids_fake(expert_ids: Tensor, num_rows: int | None, check: bool, backend: Backend) -> tuple[Tensor, Tensor]:
    return fake_vector(expert_ids, expert_ids.numel()), fake_vector(expert_ids, num_rows)


_plan_expert_ids = register(
    "plan_expert_ids(Tensor expert_ids, Tensor? weights, SymInt num_experts, SymInt first_expert, SymInt last_expert,"
    " SymInt? capacity, SymInt? segment, SymInt align, SymInt? num_rows, bool by_choice, bool check,"
    " str backend) -> (Tensor row_of_slot, Tensor slot_of_row, Tensor tokens_per_expert, Tensor rows_per_expert)",
    _registered_expert_ids,
    _ids_fake,
)
_plan_any_ids = register(
    "plan_any_ids(Tensor expert_ids, SymInt? num_rows, bool check, str backend)"
    " -> (Tensor row_of_slot, Tensor slot_of_row)",
    _registered_any_ids,
    _any_ids_fake,
)
