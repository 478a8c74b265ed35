"""Where every token copy goes: expert ids, a routing map or given indices become a RoutingPlan."""

import dataclasses
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from moeroute import backend as backends
from moeroute import check as checks
from moeroute.ops.registration import LIBRARY, implement, operator

LARGEST = 2**31 - 1  # slots and rows are numbered in int32

# What the kernels read, for each dtype of ids that is taken.
_INDEX_DTYPE = {
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint8: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
_MAP_DTYPES = frozenset((torch.bool, torch.int8, torch.uint8))
_WEIGHT_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
FIRST_COME = "position"
DROPS = (FIRST_COME, "weight")
ONE = 1
STRIDED = checks.STRIDED

# ---------------------------------------------------------------------------- the plan


@dataclasses.dataclass(frozen=True, eq=False)
class RoutingPlan:
    """Which row each slot's copy takes, and back. Made by the `plan_from_*` functions.

    A slot is one (token, chosen expert) pair; slots are numbered token by token. A row is a line of
    the permuted tensor.

    | field | dtype, shape | meaning |
    | --- | --- | --- |
    | `row_of_slot` | int32 [S] | the row of each slot's copy; -1: it has none (empty, dropped, on another rank) |
    | `slot_of_row` | int32 [R] | the slot whose copy a row holds; -1: a padding row, which is zero |
    | `num_tokens`, `num_rows` | int | T and R |
    | `num_experts` | int or None | E, all experts; None where the plan knows none |
    | `topk` | int or None | K where every token owns exactly K slots, slot `t * K + k` being its k-th |
    | `slot_offsets` | int32 [T + 1] or None | without `topk`: token t has slots `slot_offsets[t]:slot_offsets[t + 1]` |
    | `expert_of_slot` | int32 [S] or None | expert of each slot, -1 none; present where the weights are [T, E] |
    | `tokens_per_expert` | int64 [E] or None | rows of each expert, without padding |
    | `rows_per_expert` | int64 [E] or None | rows of each expert, with padding; the same tensor where there is none |

    With an expert range (lo, hi) the last two have hi - lo entries. Slots before `slot_offsets[0]` and from
    `slot_offsets[T]` on, if any (a slice of a larger plan), belong to no token: nothing is copied, added up or
    weighed for them.

    Three tokens choose 2 of 4 experts; the first choice of token 1 is empty:

    >>> ids = torch.tensor([[2, 0], [-1, 2], [0, 2]])
    >>> plan = plan_from_expert_ids(ids, num_experts=4)

    Rows go expert by expert, inside an expert by slot: expert 0 has slots 1 and 4, expert 2 has
    slots 0, 3 and 5.

    >>> plan.slot_of_row.tolist()
    [1, 4, 0, 3, 5]
    >>> plan.row_of_slot.tolist()  # the inverse; slot 2 is the empty one
    [2, 0, -1, 3, 1, 4]
    >>> plan.token_of_row.tolist()
    [0, 2, 0, 1, 2]
    >>> plan.tokens_per_expert.tolist()
    [2, 0, 3, 0]
    >>> plan.num_tokens, plan.topk, plan.num_slots, plan.num_rows
    (3, 2, 6, 5)

    With `align=4` each expert that has rows has a multiple of four; the spare ones are padding:

    >>> plan = plan_from_expert_ids(ids, num_experts=4, align=4)
    >>> plan.slot_of_row.tolist()
    [1, 4, -1, -1, 0, 3, 5, -1]
    >>> plan.tokens_per_expert.tolist(), plan.rows_per_expert.tolist()
    ([2, 0, 3, 0], [4, 0, 4, 0])

    A plan built by hand is checked: dtypes, shapes, devices and that the sizes agree (TypeError,
    ValueError). Index values are not looked at; every kernel checks the ones it reads.
    """

    row_of_slot: Tensor
    slot_of_row: Tensor
    num_tokens: int
    num_rows: int
    num_experts: int | None = None
    topk: int | None = None
    slot_offsets: Tensor | None = None
    expert_of_slot: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    rows_per_expert: Tensor | None = None

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():
            _validate(self)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> "RoutingPlan":
        """The plan on another device; its tensors are the same ones where they are there already.

        >>> plan_from_expert_ids(torch.tensor([[1, 0]]), 2).to("meta").slot_of_row.device
        device(type='meta')
        """
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "RoutingPlan":
        """A copy in page-locked memory, from which `to(..., non_blocking=True)` copies in the background."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "RoutingPlan":
        """A plan of changed tensors; counts that are one tensor stay one."""
        fields = {name: change(value) if isinstance(value, Tensor) else value for name, value in vars(self).items()}
        if self.rows_per_expert is self.tokens_per_expert:
            fields["rows_per_expert"] = fields["tokens_per_expert"]
        return _plan_of(fields)

    @property
    def num_slots(self) -> int:
        """S."""
        return self.row_of_slot.shape[0]

    @property
    def token_of_slot(self) -> Tensor:
        """int32 [S]: the token that owns each slot; -1 for a slot that no token owns.

        >>> plan_from_routing_map(torch.tensor([[True, True], [False, False], [False, True]])).token_of_slot.tolist()
        [0, 0, 2]
        """
        slots = torch.arange(self.num_slots, dtype=torch.int32, device=self.row_of_slot.device)
        if self.slot_offsets is None:
            return slots // max(self.topk or 1, 1)
        token = torch.searchsorted(self.slot_offsets[1:].contiguous(), slots, right=True, out_int32=True)
        return torch.where((token < self.num_tokens) & (slots >= self.slot_offsets[0]), token, -1)

    @property
    def token_of_row(self) -> Tensor:
        """int32 [R]: the token whose copy each row holds; -1 for padding."""
        return _gather(self.token_of_slot, self.slot_of_row)

    @property
    def tokens_up_to_expert(self) -> Tensor | None:
        """int64 [E]: running totals of `tokens_per_expert`. None where the plan knows no experts.

        >>> plan_from_expert_ids(torch.tensor([[2, 0], [-1, 2], [0, 2]]), 4).tokens_up_to_expert.tolist()
        [2, 2, 5, 5]
        """
        return None if self.tokens_per_expert is None else self.tokens_per_expert.cumsum(0)

    @property
    def expert_of_row(self) -> Tensor | None:
        """int32 [R]: which entry of `rows_per_expert` each row belongs to, padding rows of an expert
        included; -1 behind the last. None where the plan knows no experts.

        >>> plan_from_expert_ids(torch.tensor([[2, 0], [-1, 2], [0, 2]]), 4, align=4).expert_of_row.tolist()
        [0, 0, 0, 0, 2, 2, 2, 2]
        """
        if self.rows_per_expert is None:
            return None
        rows = torch.arange(self.num_rows, device=self.slot_of_row.device)
        expert = torch.searchsorted(self.rows_per_expert.cumsum(0), rows, right=True, out_int32=True)
        return torch.where(expert < self.rows_per_expert.shape[0], expert, -1)


# torch.load(weights_only=True), its default, then reads plans.
torch.serialization.add_safe_globals([RoutingPlan])


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """values[index], -1 where the index is outside."""
    padded = torch.cat([values, values.new_full((1,), -1)])
    size = values.shape[0]
    return padded[torch.where((index >= 0) & (index < size), index, size)]


def _validate(plan: RoutingPlan) -> None:
    operator = "RoutingPlan"
    num_tokens = checks.integer(operator, "num_tokens", plan.num_tokens, 0, LARGEST)
    num_rows = checks.integer(operator, "num_rows", plan.num_rows, 0, LARGEST)
    if plan.num_experts is not None:
        checks.integer(operator, "num_experts", plan.num_experts, 0, LARGEST)
    if plan.topk is not None:
        checks.integer(operator, "topk", plan.topk, 0, LARGEST)
    optional = ("slot_offsets", "expert_of_slot", "tokens_per_expert", "rows_per_expert")
    for name in ("row_of_slot", "slot_of_row", *optional):
        tensor = getattr(plan, name)
        if tensor is None and name in optional:
            continue
        checks.tensor(operator, name, tensor)
        dtype = torch.int64 if name.endswith("per_expert") else torch.int32
        if tensor.dtype is not dtype:
            raise checks.wrong_dtype(operator, name, str(dtype), tensor)
        if tensor.dim() != 1:
            raise checks.wrong_shape(operator, name, "one-dimensional", tensor)
        checks.same_device(operator, "row_of_slot", plan.row_of_slot, name, tensor)
        if tensor.is_neg() or not tensor.is_contiguous():  # kernels walk these by address
            object.__setattr__(plan, name, tensor.resolve_neg().contiguous())
    num_slots = plan.num_slots
    if plan.slot_of_row.shape[0] != num_rows:
        raise checks.wrong_shape(operator, "slot_of_row", f"[R] with R = num_rows = {num_rows}", plan.slot_of_row)
    if plan.topk is not None:
        if plan.slot_offsets is not None:
            raise checks.wrong_shape(operator, "slot_offsets", "None where topk is given", plan.slot_offsets)
        if num_tokens * plan.topk != num_slots:
            wanted = f"[S] with S = num_tokens * topk = {num_tokens} * {plan.topk}"
            raise checks.wrong_shape(operator, "row_of_slot", wanted, plan.row_of_slot)
    elif plan.slot_offsets is None:
        raise checks.wrong_value(operator, "slot_offsets", "given where topk is None", None)
    elif plan.slot_offsets.shape[0] != num_tokens + 1:
        wanted = f"[T + 1] with T = num_tokens = {num_tokens}"
        raise checks.wrong_shape(operator, "slot_offsets", wanted, plan.slot_offsets)
    if plan.expert_of_slot is not None and plan.expert_of_slot.shape[0] != num_slots:
        wanted = f"[S] with S = {num_slots}, as row_of_slot"
        raise checks.wrong_shape(operator, "expert_of_slot", wanted, plan.expert_of_slot)
    tokens, rows = plan.tokens_per_expert, plan.rows_per_expert
    if (tokens is None) != (rows is None):
        raise checks.wrong_value(operator, "rows_per_expert", "given where tokens_per_expert is, and only there", rows)
    if tokens is not None and rows is not None:
        if plan.num_experts is None or tokens.shape[0] > plan.num_experts:
            wanted = f"at most [E] with E = num_experts = {plan.num_experts}"
            raise checks.wrong_shape(operator, "tokens_per_expert", wanted, tokens)
        if rows.shape != tokens.shape:
            wanted = f"{list(tokens.shape)}, as tokens_per_expert"
            raise checks.wrong_shape(operator, "rows_per_expert", wanted, rows)


def _plan(
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    num_tokens: int,
    num_experts: int | None = None,
    topk: int | None = None,
    slot_offsets: Tensor | None = None,
    expert_of_slot: Tensor | None = None,
    tokens_per_expert: Tensor | None = None,
    rows_per_expert: Tensor | None = None,
) -> RoutingPlan:
    """A plan of tensors that are right by construction."""
    fields: dict[str, Any] = {
        "row_of_slot": row_of_slot,
        "slot_of_row": slot_of_row,
        "num_tokens": num_tokens,
        "num_rows": slot_of_row.shape[0],
        "num_experts": num_experts,
        "topk": topk,
        "slot_offsets": slot_offsets,
        "expert_of_slot": expert_of_slot,
        "tokens_per_expert": tokens_per_expert,
        "rows_per_expert": rows_per_expert,
    }
    return _plan_of(fields)


def _plan_of(fields: dict[str, Any]) -> RoutingPlan:
    if torch.compiler.is_compiling():
        return RoutingPlan(**fields)
    plan = object.__new__(RoutingPlan)
    plan.__dict__.update(fields)  # a frozen dataclass sets its fields one by one: 2 µs
    return plan


# ---------------------------------------------------------------------------- checks


def _index_tensor(operator: str, argument: str, value: Any, shape: str, dims: tuple[int, ...]) -> Tensor:
    """A contiguous int32 or int64 tensor of one of these ranks, with at most 2^31 - 1 elements."""
    if type(value) is not Tensor:
        checks.tensor(operator, argument, value)
    index: Tensor = value
    kind = index.dtype
    dtype = _INDEX_DTYPE.get(kind)
    if dtype is None:
        raise checks.wrong_dtype(operator, argument, "of an integer dtype", index)
    if index.dim() not in dims or index.layout is not STRIDED or index.is_nested:
        raise checks.wrong_shape(operator, argument, shape, index)
    if index.numel() > LARGEST:
        raise checks.wrong_shape(operator, argument, f"{shape} with at most {LARGEST} elements", index)
    if dtype is not kind:
        if kind is torch.uint64:  # what int64 cannot hold is the largest id, not a negative one
            if not torch.compiler.is_compiling():
                index = index.resolve_neg()
            signed = index.contiguous().view(torch.int64)
            return torch.where(signed < 0, 2**63 - 1, signed)
        index = index.to(dtype)
    return index.contiguous()


def _optional_integer(operator: str, argument: str, value: Any) -> int | None:
    return None if value is None else checks.integer(operator, argument, value, 0, LARGEST)


def _weights(operator: str, value: Any, like: str, first: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weights that decide who stays, contiguous and cut off from autograd."""
    weights = checks.tensor(operator, "weights", value)
    if weights.dtype not in _WEIGHT_DTYPES:
        raise checks.wrong_dtype(operator, "weights", "float32, float16, bfloat16 or float64", weights)
    if weights.shape != shape and weights.shape != first.shape:
        raise checks.wrong_shape(operator, "weights", f"{list(shape)}, as {like}", weights)
    checks.same_device(operator, like, first, "weights", weights)
    return weights.detach().contiguous()


def _no_data(operator: str, argument: str) -> ValueError:
    return checks.wrong_value(operator, argument, "given for tensors on meta, which have no data to count", None)


def _experts(operator: str, num_experts: int, expert_range: Any) -> tuple[int, int]:
    """The experts [first, last) that get rows."""
    if expert_range is None:
        return 0, num_experts
    wanted = f"(lo, hi) with 0 <= lo <= hi <= num_experts = {num_experts}"
    if not isinstance(expert_range, Sequence) or isinstance(expert_range, str):
        raise checks.wrong_type(operator, "expert_range", wanted, expert_range)
    if len(expert_range) != 2:
        raise checks.wrong_value(operator, "expert_range", wanted, expert_range)
    first, last = (checks.integer(operator, "expert_range", bound) for bound in expert_range)
    if not 0 <= first <= last <= num_experts:
        raise checks.wrong_value(operator, "expert_range", wanted, expert_range)
    return first, last


def _destination(
    operator: str, out: Any, num_slots: int | None, *inputs: Tensor | None
) -> tuple[Tensor | None, Tensor | None, list[Any]]:
    """The caller's buffer for row_of_slot, checked, the vector that a kernel writes (None: other strides), and the
    inputs as a launcher may read them."""
    if out is None:
        return None, None, list(inputs)
    checks.tensor(operator, "out", out)
    if out.dtype is not torch.int32:
        raise checks.wrong_dtype(operator, "out", "torch.int32", out)
    if num_slots is not None and out.numel() != num_slots:
        raise checks.wrong_shape(operator, "out", f"of S = {num_slots} elements", out)
    backends.direct(operator, "out", out, *inputs)
    checks.writable(operator, "out", out, *inputs)
    into = out.view(-1) if out.is_contiguous() else None
    return out, into, [None if tensor is None else tensor.resolve_neg() for tensor in inputs]


def _hand_over(row_of_slot: Tensor, out: Tensor | None) -> None:
    if out is None:
        return
    if out.is_contiguous():
        increment_version(out)  # it was written by address, of which autograd knows nothing
    else:
        out.copy_(row_of_slot.view(out.shape))


def _segment(
    operator: str, num_experts: int, capacity: int | None, pad: bool, align: int, num_rows: int | None
) -> tuple[int | None, int | None]:
    """Rows of every expert where they are fixed, and R where it is known without looking."""
    if not pad:
        return None, num_rows
    if capacity is None:
        raise checks.wrong_value(operator, "capacity", "given with pad_to_capacity or fill", None)
    segment = (capacity + align - 1) // align * align
    if num_rows is None:
        num_rows = num_experts * segment
        if num_rows > LARGEST:
            wanted = f"such that there are at most {LARGEST} rows"
            raise checks.wrong_value(operator, "capacity", wanted, f"{num_experts} experts with {segment} rows each")
    return segment, num_rows


def _ids_options(
    num_experts: Any, expert_range: Any, capacity: Any, drop: Any, pad: Any, align: Any, num_rows: Any, check: Any
) -> tuple[int, int, int | None, int | None]:
    """Checks of all that is no tensor; the experts [first, last), their segment and R where they are known."""
    if (
        type(num_experts) is int
        and 0 <= num_experts <= LARGEST
        and expert_range is capacity is num_rows is None
        and drop is FIRST_COME
        and align is ONE
        and pad is check is False
    ):
        return 0, num_experts, None, None  # the way of one token; asks no foreign object whether it is equal
    operator = "plan_from_expert_ids"
    num_rows = _optional_integer(operator, "num_rows", num_rows)
    checks.integer(operator, "align", align, 1, LARGEST)
    checks.one_of(operator, "drop", drop, DROPS)
    capacity = _optional_integer(operator, "capacity", capacity)
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
    first, last = _experts(operator, num_experts, expert_range)
    return first, last, *_segment(operator, last - first, capacity, pad, align, num_rows)


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

LIBRARY.define(
    "plan_expert_ids(Tensor expert_ids, Tensor? weights, SymInt num_experts, SymInt first_expert, SymInt last_expert,"
    " SymInt? capacity, SymInt? segment, SymInt align, SymInt? num_rows, bool check, str backend)"
    " -> (Tensor row_of_slot, Tensor slot_of_row, Tensor tokens_per_expert, Tensor rows_per_expert)"
)
LIBRARY.define(
    "plan_any_ids(Tensor expert_ids, SymInt? num_rows, bool check, str backend)"
    " -> (Tensor row_of_slot, Tensor slot_of_row)"
)
LIBRARY.define(
    "plan_routing_map(Tensor routing_map, Tensor? weights, SymInt first_expert, SymInt last_expert, SymInt? topk,"
    " bool fill, SymInt? capacity, SymInt? segment, SymInt align, SymInt? num_rows, bool check, str backend)"
    " -> (Tensor row_of_slot, Tensor slot_of_row, Tensor slot_offsets, Tensor expert_of_slot,"
    " Tensor tokens_per_expert, Tensor rows_per_expert)"
)
LIBRARY.define(
    "plan_row_of_slot(Tensor row_of_slot, Tensor? expert_of_slot, SymInt num_rows, SymInt first_row, str backend)"
    " -> (Tensor row_of_slot, Tensor slot_of_row, Tensor expert_of_slot)"
)
LIBRARY.define(
    "plan_token_ids(Tensor token_ids, Tensor? rows, SymInt num_tokens, SymInt num_rows, SymInt? num_experts,"
    " str backend) -> (Tensor row_of_slot, Tensor slot_of_row, Tensor slot_offsets, Tensor expert_of_slot,"
    " Tensor tokens_per_expert)"
)
LIBRARY.define(
    "plan_segments(Tensor lengths, SymInt num_tokens, str backend)"
    " -> (Tensor row_of_slot, Tensor slot_of_row, Tensor tokens_per_expert)"
)


def _some(tensor: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An operator of torch.library has no optional results: an empty tensor stands for None."""
    return torch.empty(0, dtype=dtype, device=like.device) if tensor is None else tensor


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
    check: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if check:
        _refuse_ids(expert_ids, num_experts)
    row_of_slot, slot_of_row, tokens, rows = backends.module("planning", backend).plan_expert_ids(
        expert_ids, weights, first_expert, last_expert, capacity, segment, align, num_rows
    )
    return row_of_slot, slot_of_row, tokens, _some(rows, expert_ids, torch.int64)


def _any_ids_operator(
    expert_ids: Tensor, num_rows: int | None, check: bool, backend: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if check:
        _refuse_ids(expert_ids, None)
    row_of_slot, slot_of_row = backends.module("planning", backend).plan_any_ids(expert_ids, num_rows, out)
    return row_of_slot, slot_of_row


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
    check: bool,
    backend: str,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if check:
        _refuse_map(routing_map, topk)
    row_of_slot, slot_of_row, offsets, experts, tokens, rows = backends.module("planning", backend).plan_routing_map(
        routing_map, weights, first_expert, last_expert, topk, fill, capacity, segment, align, num_rows, out
    )
    return (
        row_of_slot,
        slot_of_row,
        _some(offsets, routing_map, torch.int32),
        experts,
        tokens,
        _some(rows, routing_map, torch.int64),
    )


def _row_of_slot_operator(
    row_of_slot: Tensor,
    expert_of_slot: Tensor | None,
    num_rows: int,
    first_row: int,
    backend: str,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, slots, experts = backends.module("planning", backend).plan_row_of_slot(
        row_of_slot, expert_of_slot, num_rows, first_row, out
    )
    return rows, slots, _some(experts, row_of_slot, torch.int32)


def _token_ids_operator(
    token_ids: Tensor,
    rows: Tensor | None,
    num_tokens: int,
    num_rows: int,
    num_experts: int | None,
    backend: str,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row_of_slot, slot_of_row, offsets, experts, tokens = backends.module("planning", backend).plan_token_ids(
        token_ids, rows, num_tokens, num_rows, num_experts, out
    )
    return (
        row_of_slot,
        slot_of_row,
        offsets,
        _some(experts, token_ids, torch.int32),
        _some(tokens, token_ids, torch.int64),
    )


def _segments_operator(
    lengths: Tensor, num_tokens: int, backend: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    row_of_slot, slot_of_row, tokens = backends.module("planning", backend).plan_segments(lengths, num_tokens, out)
    return row_of_slot, slot_of_row, tokens


# A registered operator may be called by anybody, and stands in exported graphs: it looks at all that a kernel indexes
# with, and then does what a verb, which has looked already, does at once.


def _check_segments(
    operator: str,
    first_expert: int,
    last_expert: int,
    num_experts: int,
    capacity: int | None,
    segment: int | None,
    align: int,
    num_rows: int | None,
) -> None:
    checks.integer(operator, "num_experts", num_experts, 0, LARGEST)
    checks.integer(operator, "first_expert", first_expert, 0, num_experts)
    checks.integer(operator, "last_expert", last_expert, first_expert, num_experts)
    _optional_integer(operator, "capacity", capacity)
    checks.integer(operator, "align", align, 1, LARGEST)
    _optional_integer(operator, "num_rows", num_rows)
    if segment is not None:  # one that is smaller than the capacity would give two experts the same rows
        checks.integer(operator, "segment", segment, LARGEST if capacity is None else capacity, LARGEST)
        if num_rows is None and (last_expert - first_expert) * segment > LARGEST:
            raise checks.wrong_value(operator, "segment", f"such that there are at most {LARGEST} rows", segment)


def _check_weights(operator: str, weights: Tensor | None, like: str, first: Tensor) -> Tensor | None:
    return None if weights is None else _weights(operator, weights, like, first, tuple(first.shape))


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
    check: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operator = "plan_expert_ids"
    expert_ids = _index_tensor(operator, "expert_ids", expert_ids, "[T, K] or [T]", (1, 2))
    weights = _check_weights(operator, weights, "expert_ids", expert_ids)
    _check_segments(operator, first_expert, last_expert, num_experts, capacity, segment, align, num_rows)
    backends.choose(operator, backend, expert_ids.device, None if weights is None else weights.dtype)
    return _ids_operator(
        expert_ids, weights, num_experts, first_expert, last_expert, capacity, segment, align, num_rows, check, backend
    )


def _registered_any_ids(expert_ids: Tensor, num_rows: int | None, check: bool, backend: str) -> tuple[Tensor, Tensor]:
    operator = "plan_any_ids"
    expert_ids = _index_tensor(operator, "expert_ids", expert_ids, "[T, K] or [T]", (1, 2))
    _optional_integer(operator, "num_rows", num_rows)
    backends.choose(operator, backend, expert_ids.device)
    return _any_ids_operator(expert_ids, num_rows, check, backend)


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
    check: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operator = "plan_routing_map"
    checks.shaped(operator, "routing_map", routing_map, (None, None))
    if routing_map.dtype not in _MAP_DTYPES:
        raise checks.wrong_dtype(operator, "routing_map", "bool, int8 or uint8", routing_map)
    weights = _check_weights(operator, weights, "routing_map", routing_map)
    num_tokens, num_experts = routing_map.shape
    _check_segments(operator, first_expert, last_expert, num_experts, capacity, segment, align, num_rows)
    if topk is not None:
        checks.integer(operator, "topk", topk, 0, LARGEST // max(num_tokens, 1))
    if fill:
        for name, option in (("capacity", capacity), ("segment", segment), ("num_rows", num_rows)):
            if option is None:
                raise checks.wrong_value(operator, name, "given with fill", None)
        if topk is not None:
            raise checks.wrong_value(operator, "topk", "None with fill", topk)
    backends.choose(operator, backend, routing_map.device, None if weights is None else weights.dtype)
    return _map_operator(
        routing_map.contiguous(), weights, first_expert, last_expert, topk, fill, capacity, segment, align, num_rows,
        check, backend,
    )  # fmt: skip


def _registered_row_of_slot(
    row_of_slot: Tensor, expert_of_slot: Tensor | None, num_rows: int, first_row: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    operator = "plan_row_of_slot"
    row_of_slot = _index_tensor(operator, "row_of_slot", row_of_slot, "[T, K] or [T * K]", (1, 2))
    if expert_of_slot is not None:
        expert_of_slot = _index_tensor(operator, "expert_of_slot", expert_of_slot, "[T, K] or [T * K]", (1, 2))
        if expert_of_slot.numel() != row_of_slot.numel():
            wanted = f"of {row_of_slot.numel()} elements, as row_of_slot"
            raise checks.wrong_shape(operator, "expert_of_slot", wanted, expert_of_slot)
        checks.same_device(operator, "row_of_slot", row_of_slot, "expert_of_slot", expert_of_slot)
    checks.integer(operator, "num_rows", num_rows, 0, LARGEST)
    checks.integer(operator, "first_row", first_row, 0, 2**62)
    backends.choose(operator, backend, row_of_slot.device)
    return _row_of_slot_operator(row_of_slot, expert_of_slot, num_rows, first_row, backend)


def _registered_token_ids(
    token_ids: Tensor, rows: Tensor | None, num_tokens: int, num_rows: int, num_experts: int | None, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operator = "plan_token_ids"
    token_ids = _index_tensor(operator, "token_ids", token_ids, "[N]", (1,))
    if rows is not None:
        rows = _index_tensor(operator, "rows", rows, "[N]", (1,))
        checks.shaped(operator, "rows", rows, tuple(token_ids.shape), token_ids)
    checks.integer(operator, "num_tokens", num_tokens, 0, LARGEST - 1)
    checks.integer(operator, "num_rows", num_rows, 0, LARGEST)
    if num_experts is not None:
        checks.integer(operator, "num_experts", num_experts, 1, LARGEST)
        if num_rows % num_experts:
            raise checks.wrong_value(operator, "num_rows", f"a multiple of num_experts = {num_experts}", num_rows)
    backends.choose(operator, backend, token_ids.device)
    return _token_ids_operator(token_ids, rows, num_tokens, num_rows, num_experts, backend)


def _registered_segments(lengths: Tensor, num_tokens: int, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    operator = "plan_segments"
    lengths = _index_tensor(operator, "lengths", lengths, "[ranks, E]", (2,))
    checks.integer(operator, "num_tokens", num_tokens, 0, LARGEST)
    backends.choose(operator, backend, lengths.device)
    return _segments_operator(lengths, num_tokens, backend)


def _unknown_size() -> Any:
    """A length that only the data knows. Its bound lets the checks of a plan's sizes pass."""
    return torch.library.get_ctx().new_dynamic_size(max=LARGEST)


def _fake(like: Tensor, size: int | None, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(_unknown_size() if size is None else size, dtype=dtype, device=like.device)


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
    check: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    experts = last_expert - first_expert
    return (
        _fake(expert_ids, expert_ids.numel()),
        _fake(expert_ids, num_rows),
        _fake(expert_ids, experts, torch.int64),
        _fake(expert_ids, 0 if segment is None and align == 1 else experts, torch.int64),
    )


def _any_ids_fake(expert_ids: Tensor, num_rows: int | None, check: bool, backend: str) -> tuple[Tensor, Tensor]:
    return _fake(expert_ids, expert_ids.numel()), _fake(expert_ids, num_rows)


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
    check: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, experts = routing_map.shape[0], last_expert - first_expert
    if topk is not None:
        num_slots = num_tokens * topk
    elif fill and capacity is not None:
        num_slots = experts * torch.sym_min(capacity, num_tokens)
    else:
        num_slots = _unknown_size()
    return (
        _fake(routing_map, num_slots),
        _fake(routing_map, num_rows),
        _fake(routing_map, 0 if topk is not None else num_tokens + 1),
        _fake(routing_map, num_slots),
        _fake(routing_map, experts, torch.int64),
        _fake(routing_map, 0 if segment is None and align == 1 else experts, torch.int64),
    )


def _row_of_slot_fake(
    row_of_slot: Tensor, expert_of_slot: Tensor | None, num_rows: int, first_row: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    num_slots = row_of_slot.numel()
    experts = 0 if expert_of_slot is None else num_slots
    return _fake(row_of_slot, num_slots), _fake(row_of_slot, num_rows), _fake(row_of_slot, experts)


def _token_ids_fake(
    token_ids: Tensor, rows: Tensor | None, num_tokens: int, num_rows: int, num_experts: int | None, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_slots = token_ids.shape[0]
    return (
        _fake(token_ids, num_slots),
        _fake(token_ids, num_rows),
        _fake(token_ids, num_tokens + 1),
        _fake(token_ids, 0 if num_experts is None else num_slots),
        _fake(token_ids, 0 if num_experts is None else num_experts, torch.int64),
    )


def _segments_fake(lengths: Tensor, num_tokens: int, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    return _fake(lengths, num_tokens), _fake(lengths, num_tokens), _fake(lengths, lengths.shape[1], torch.int64)


implement("plan_expert_ids", _registered_expert_ids, _ids_fake)
implement("plan_any_ids", _registered_any_ids, _any_ids_fake)
implement("plan_routing_map", _registered_map, _map_fake)
implement("plan_row_of_slot", _registered_row_of_slot, _row_of_slot_fake)
implement("plan_token_ids", _registered_token_ids, _token_ids_fake)
implement("plan_segments", _registered_segments, _segments_fake)

_plan_expert_ids = operator("plan_expert_ids")
_plan_any_ids = operator("plan_any_ids")
_plan_routing_map = operator("plan_routing_map")
_plan_row_of_slot = operator("plan_row_of_slot")
_plan_token_ids = operator("plan_token_ids")
_plan_segments = operator("plan_segments")


# ---------------------------------------------------------------------------- verbs


def plan_from_expert_ids(
    expert_ids: Tensor,
    num_experts: int | None,
    *,
    expert_range: tuple[int, int] | None = None,
    capacity: int | None = None,
    drop: str = "position",
    weights: Tensor | None = None,
    pad_to_capacity: bool = False,
    align: int = 1,
    num_rows: int | None = None,
    check: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> RoutingPlan:
    """The plan for K chosen experts per token.

    `expert_ids` is [T, K], or [T] for K = 1, of any integer dtype and any strides. Slot `t * K + k`
    is token t's k-th choice; an id below 0 or from `num_experts` on is an empty slot without a row
    (-1 and `num_experts` are the usual marks). Rows are grouped by expert, ascending; inside an
    expert by slot: the stable sort of the slots by expert, found by counting.

    >>> ids = torch.tensor([[1, 2], [0, 1], [0, 2]])
    >>> plan = plan_from_expert_ids(ids, num_experts=3)
    >>> plan.row_of_slot.tolist(), plan.slot_of_row.tolist(), plan.tokens_per_expert.tolist()
    ([2, 4, 0, 3, 1, 5], [2, 4, 0, 3, 1, 5], [2, 2, 2])

    In torch: `slot_of_row = argsort(expert_ids.flatten(), stable=True)`, `row_of_slot = argsort(slot_of_row)`,
    `tokens_per_expert = bincount(expert_ids.flatten(), minlength=num_experts)`.

    - `num_experts=None`: any id from 0 on (and rows in the stable order of the ids); the cost does
      not depend on the largest. The plan then knows no experts: no `tokens_per_expert`, and none of
      `expert_range`, `capacity`, `pad_to_capacity` and `align`.
    - `expert_range=(lo, hi)`: only experts lo <= e < hi get rows, as on the rank that holds them;
      `tokens_per_expert` then has hi - lo entries.
    - `capacity`: most rows of an expert. With `drop="position"` its first slots stay, with
      `drop="weight"` the slots with the largest `weights` [T, K] (NaN is the largest, -0 equals +0,
      of equal ones the smaller slot stays), in slot order all the same. The others become -1.

      >>> plan_from_expert_ids(ids, 3, capacity=1).row_of_slot.tolist()
      [1, 2, 0, -1, -1, -1]
      >>> weights = torch.tensor([[0.5, 0.5], [0.4, 0.6], [0.9, 0.1]])
      >>> plan_from_expert_ids(ids, 3, capacity=1, drop="weight", weights=weights).row_of_slot.tolist()
      [-1, 2, -1, 1, 0, -1]

    - `align`: each expert's rows are padded to a multiple; an expert without rows stays without.
    - `pad_to_capacity`: every expert has exactly `capacity` rows, rounded up to `align`.

      >>> plan_from_expert_ids(ids, 3, capacity=2, pad_to_capacity=True, align=3).slot_of_row.tolist()
      [2, 4, -1, 0, 3, -1, 1, 5, -1]

    - `num_rows=None`: R is what the slots need, one integer read back (a synchronisation on a GPU, a
      data-dependent size under torch.compile), except with `pad_to_capacity`. A given number reads
      nothing (`T * K` is never too small): slots whose row would lie behind it become -1, rows
      behind the last are padding. `tokens_per_expert` and `rows_per_expert` count rows inside it.

      >>> plan_from_expert_ids(ids, 3, num_rows=3).row_of_slot.tolist()
      [2, -1, 0, -1, 1, -1]

    - `check=True` reads the ids: ValueError for one that is neither an expert nor -1 nor
      `num_experts`.
    - `out`: an int32 tensor of S elements, of any strides, that gets `row_of_slot` (not under torch.compile);
      the plan goes on using it.
    - `backend`: "reference", "cpu", "triton", or None to choose; weights in float64 need the reference.

    The result is the same whatever the backend and the number of threads. Raises TypeError for a
    wrong type or dtype, ValueError for a wrong shape or value, among them more than 2^31 - 1 slots
    or rows.
    """
    operator = "plan_from_expert_ids"
    expert_ids = _index_tensor(operator, "expert_ids", expert_ids, "[T, K] or [T]", (1, 2))
    shape = expert_ids.shape
    num_tokens, topk = shape[0], shape[1] if len(shape) == 2 else 1
    first, last, segment, num_rows = _ids_options(
        num_experts, expert_range, capacity, drop, pad_to_capacity, align, num_rows, check
    )
    if num_rows is None and expert_ids.is_meta:
        raise _no_data(operator, "num_rows")
    if num_experts is None:
        out, into, (expert_ids,) = _destination(operator, out, num_tokens * topk, expert_ids)
        chosen = backends.choose(operator, backend, expert_ids.device)
        if out is not None or backends.plain(expert_ids):
            row_of_slot, slot_of_row = _any_ids_operator(expert_ids, num_rows, check, chosen, into)
            _hand_over(row_of_slot, out)
        else:
            row_of_slot, slot_of_row = _plan_any_ids(expert_ids, num_rows, check, chosen)
        return _plan(row_of_slot, slot_of_row, num_tokens, topk=topk)

    if weights is not None:
        weights = _weights(operator, weights, "expert_ids", expert_ids, (num_tokens, topk))
    if capacity is None or drop == "position":
        weights = None
    elif weights is None:
        raise checks.wrong_value(operator, "weights", "given with drop='weight'", None)
    dtype = None if weights is None else weights.dtype
    chosen = backends.choose(operator, backend, expert_ids.device, dtype)
    into = None
    if out is not None:
        out, into, (expert_ids, weights) = _destination(operator, out, num_tokens * topk, expert_ids, weights)
    if out is not None or backends.plain(expert_ids, weights):
        if check:
            _refuse_ids(expert_ids, num_experts)
        row_of_slot, slot_of_row, tokens, rows = backends.module("planning", chosen).plan_expert_ids(
            expert_ids, weights, first, last, capacity, segment, align, num_rows, into
        )
        if out is not None:
            _hand_over(row_of_slot, out)
    else:
        row_of_slot, slot_of_row, tokens, rows = _plan_expert_ids(
            expert_ids, weights, num_experts, first, last, capacity, segment, align, num_rows, check, chosen
        )
    padded = segment is not None or align > 1
    return _plan(
        row_of_slot,
        slot_of_row,
        num_tokens,
        num_experts,
        topk,
        tokens_per_expert=tokens,
        rows_per_expert=rows if padded else tokens,
    )


def plan_from_routing_map(
    routing_map: Tensor,
    *,
    topk: int | None = None,
    fill: bool = False,
    expert_range: tuple[int, int] | None = None,
    capacity: int | None = None,
    drop: str = "position",
    weights: Tensor | None = None,
    pad_to_capacity: bool = False,
    align: int = 1,
    num_rows: int | None = None,
    check: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
) -> RoutingPlan:
    """The plan for a map [T, E] that is true where a token goes to an expert.

    `routing_map` is bool, int8 or uint8 (any byte but 0 is true), of any strides; tokens may have
    different numbers of experts, none included. The true entries are the slots, token by token and
    inside a token by expert; rows are grouped by expert, ascending, inside an expert by token.

    >>> routing_map = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.int8)
    >>> plan = plan_from_routing_map(routing_map)
    >>> plan.slot_offsets.tolist(), plan.expert_of_slot.tolist()
    ([0, 2, 3, 3, 6], [0, 1, 2, 0, 1, 2])
    >>> plan.row_of_slot.tolist(), plan.token_of_row.tolist(), plan.tokens_per_expert.tolist()
    ([0, 2, 4, 1, 3, 5], [0, 3, 0, 3, 1, 3], [2, 2, 2])

    In torch: `token_of_row = arange(T).expand(E, T).masked_select(routing_map.T != 0)`.

    `expert_range`, `capacity`, `drop`, `pad_to_capacity`, `align`, `num_rows` and `backend` are those
    of `plan_from_expert_ids`; `weights` is [T, E] here. True entries of experts outside the range,
    and dropped ones, stay slots, without a row. S is read back from the data, like R, except with
    `topk` or `fill`.

    - `topk`: every token owns exactly `topk` slots, its first true entries and then unused ones
      (expert -1, row -1); S = T * topk is known. A token with more true entries loses the later
      ones. Rows are numbered over all true entries, the lost ones too: their rows are zero, and
      counted in `tokens_per_expert`.

      >>> plan = plan_from_routing_map(routing_map, topk=2)
      >>> plan.row_of_slot.tolist(), plan.expert_of_slot.tolist()
      ([0, 2, 4, -1, -1, -1, 1, 3], [0, 1, 2, -1, -1, -1, 0, 1])
      >>> plan.slot_of_row.tolist()
      [0, 6, 1, 7, 2, -1]

    - `fill=True` (drop and pad): every expert takes min(C, T) tokens, C being the `capacity`: those
      that stay of its true ones, in token order, and then its first false ones, which are slots like
      any other. S = E * min(C, T) and R = E * C (C rounded up to `align`) are known; rows of an
      expert beyond T are padding.

      >>> plan = plan_from_routing_map(routing_map, fill=True, capacity=3)
      >>> plan.token_of_row.reshape(3, 3).tolist()  # expert 0: tokens 0 and 3 are true, 1 is false
      [[0, 3, 1], [0, 3, 1], [1, 3, 0]]
      >>> plan.expert_of_slot.tolist(), plan.slot_offsets.tolist()
      ([0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 3, 6, 6, 9])

    - `check=True` reads the map: ValueError for a value other than 0 and 1, and for a token with more
      than `topk` true entries.

    Raises as `plan_from_expert_ids`.
    """
    operator = "plan_from_routing_map"
    checks.tensor(operator, "routing_map", routing_map)
    if routing_map.dtype not in _MAP_DTYPES:
        raise checks.wrong_dtype(operator, "routing_map", "bool, int8 or uint8", routing_map)
    if routing_map.dim() != 2:
        raise checks.wrong_shape(operator, "routing_map", "[T, E]", routing_map)
    num_tokens, num_experts = routing_map.shape
    topk = _optional_integer(operator, "topk", topk)
    if topk is not None and num_tokens * topk > LARGEST:
        raise checks.wrong_value(operator, "topk", f"such that there are at most {LARGEST} slots", topk)
    num_rows = _optional_integer(operator, "num_rows", num_rows)
    checks.integer(operator, "align", align, 1, LARGEST)
    checks.one_of(operator, "drop", drop, DROPS)
    capacity = _optional_integer(operator, "capacity", capacity)
    pad = checks.flag(operator, "pad_to_capacity", pad_to_capacity) | checks.flag(operator, "fill", fill)
    checks.flag(operator, "check", check)
    if fill and topk is not None:
        raise checks.wrong_value(operator, "topk", "None with fill", topk)
    first, last = _experts(operator, num_experts, expert_range)
    segment, num_rows = _segment(operator, last - first, capacity, pad, align, num_rows)
    if weights is not None:
        weights = _weights(operator, weights, "routing_map", routing_map, tuple(routing_map.shape))
    if capacity is None or drop == "position":
        weights = None
    elif weights is None:
        raise checks.wrong_value(operator, "weights", "given with drop='weight'", None)
    dtype = None if weights is None else weights.dtype
    chosen = backends.choose(operator, backend, routing_map.device, dtype)
    routing_map = routing_map.contiguous()
    options = (first, last, topk, fill, capacity, segment, align, num_rows, check, chosen)
    num_slots = None if topk is None else num_tokens * topk
    if fill and capacity is not None:
        num_slots = (last - first) * min(capacity, num_tokens)
    if routing_map.is_meta and (num_slots is None or num_rows is None):
        raise _no_data(operator, "topk (or fill)" if num_slots is None else "num_rows")
    out, into, (routing_map, weights) = _destination(operator, out, num_slots, routing_map, weights)
    if out is not None or backends.plain(routing_map, weights):
        found = _map_operator(routing_map, weights, *options, into)
        if out is not None and out.numel() != found[0].numel():
            raise checks.wrong_shape(operator, "out", f"of S = {found[0].numel()} elements", out)
        _hand_over(found[0], out)
    else:
        found = _plan_routing_map(routing_map, weights, *options)
    row_of_slot, slot_of_row, offsets, experts, tokens, rows = found
    padded = segment is not None or align > 1
    return _plan(
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


def plan_from_row_of_slot(
    row_of_slot: Tensor,
    num_tokens: int,
    num_rows: int,
    *,
    first_row: int = 0,
    expert_of_slot: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> RoutingPlan:
    """The plan of somebody who knows the row of each slot, such as aclnn's `sortedIndices`.

    `row_of_slot` is [T, K] or [T * K], int32 or int64, of any strides. `first_row` is subtracted, and
    what then lies outside [0, num_rows) is -1: no row. Several slots may name one row: each reads
    it, and its `slot_of_row` is the last of them. Nothing is read back.

    >>> plan = plan_from_row_of_slot(torch.tensor([2, 4, 0, 3, 1, 5]), num_tokens=3, num_rows=4)
    >>> plan.row_of_slot.tolist(), plan.slot_of_row.tolist(), plan.topk
    ([2, -1, 0, 3, 1, -1], [2, 4, 0, 3], 2)
    >>> plan_from_row_of_slot(torch.tensor([2, 4, 0, 3, 1, 5]), 3, 4, first_row=1).row_of_slot.tolist()
    [1, 3, -1, 2, 0, -1]

    In torch: `slot_of_row[row_of_slot] = arange(T * K)`.

    `expert_of_slot`, of the same number of elements and any integer dtype, is for weights [T, E] and
    a bias [E, H]; what is negative or does not fit into int32 becomes -1. The plan knows no
    `num_experts` and no counts. K is the number of slots divided by T (1 where both are 0). `out`: as for
    `plan_from_expert_ids`, here and in the other constructors.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    operator = "plan_from_row_of_slot"
    checks.integer(operator, "num_tokens", num_tokens, 0, LARGEST - 1)
    checks.integer(operator, "num_rows", num_rows, 0, LARGEST)
    checks.integer(operator, "first_row", first_row, 0, 2**62)
    checks.tensor(operator, "row_of_slot", row_of_slot)
    if row_of_slot.dtype is not torch.int32 and row_of_slot.dtype is not torch.int64:
        raise checks.wrong_dtype(operator, "row_of_slot", "int32 or int64", row_of_slot)
    shape = f"[T, K] or [T * K] with T = num_tokens = {num_tokens}"
    row_of_slot = _index_tensor(operator, "row_of_slot", row_of_slot, shape, (1, 2))
    num_slots = row_of_slot.numel()
    if row_of_slot.dim() == 2:
        if row_of_slot.shape[0] != num_tokens:
            raise checks.wrong_shape(operator, "row_of_slot", shape, row_of_slot)
        topk = row_of_slot.shape[1]
    else:
        if num_slots % max(num_tokens, 1) or (num_tokens == 0 and num_slots):
            raise checks.wrong_shape(operator, "row_of_slot", shape, row_of_slot)
        topk = num_slots // num_tokens if num_tokens else 1
    if expert_of_slot is not None:
        wanted = f"[T, K] or [T * K] with {num_slots} elements, as row_of_slot"
        expert_of_slot = _index_tensor(operator, "expert_of_slot", expert_of_slot, wanted, (1, 2))
        if expert_of_slot.numel() != num_slots or (
            expert_of_slot.dim() == 2 and expert_of_slot.shape != (num_tokens, topk)
        ):
            raise checks.wrong_shape(operator, "expert_of_slot", wanted, expert_of_slot)
        checks.same_device(operator, "row_of_slot", row_of_slot, "expert_of_slot", expert_of_slot)
    chosen = backends.choose(operator, backend, row_of_slot.device)
    out, into, (row_of_slot, expert_of_slot) = _destination(operator, out, num_slots, row_of_slot, expert_of_slot)
    if out is not None or backends.plain(row_of_slot, expert_of_slot):
        found = _row_of_slot_operator(row_of_slot, expert_of_slot, num_rows, first_row, chosen, into)
        _hand_over(found[0], out)
    else:
        found = _plan_row_of_slot(row_of_slot, expert_of_slot, num_rows, first_row, chosen)
    rows, slots, experts = found
    return _plan(rows, slots, num_tokens, topk=topk, expert_of_slot=None if expert_of_slot is None else experts)


def plan_from_token_ids(
    token_ids: Tensor,
    num_tokens: int,
    *,
    rows: Tensor | None = None,
    num_rows: int | None = None,
    num_experts: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> RoutingPlan:
    """The plan of somebody who knows the token of each row, such as Megatron's `sorted_indices`.

    Entry i puts row `rows[i]` (without `rows`: row i) under token `token_ids[i]`. Both are [N], of any
    integer dtype and strides. Slots are the entries grouped by token, inside a token in their order; an
    entry whose token id lies outside [0, num_tokens) owns no slot, and the slots left over at the end
    belong to no token. A row outside [0, num_rows) is -1; where two entries name one row, its
    `slot_of_row` is the later slot. `num_rows` is N unless given. Nothing is read back.

    >>> plan = plan_from_token_ids(torch.tensor([1, 0, 1, 9, 0]), num_tokens=2)
    >>> plan.slot_offsets.tolist(), plan.row_of_slot.tolist(), plan.slot_of_row.tolist()
    ([0, 2, 4], [1, 4, 0, 2, -1], [2, 0, 3, -1, 1])

    In torch: `row_of_slot = argsort(token_ids, stable=True)`.

    With `num_experts`, which must divide `num_rows`, row r belongs to expert `r // (num_rows / num_experts)`:
    the plan has `expert_of_slot` for weights [T, E], and counts.

    >>> plan = plan_from_token_ids(torch.tensor([0, 2, 1, 2]), num_tokens=3, num_experts=2)
    >>> plan.expert_of_slot.tolist(), plan.tokens_per_expert.tolist()
    ([0, 1, 0, 1], [2, 2])

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    operator = "plan_from_token_ids"
    checks.integer(operator, "num_tokens", num_tokens, 0, LARGEST - 1)
    token_ids = _index_tensor(operator, "token_ids", token_ids, "[N]", (1,))
    num_slots = token_ids.shape[0]
    if rows is not None:
        rows = _index_tensor(operator, "rows", rows, f"[N] with N = {num_slots}, as token_ids", (1,))
        if rows.shape[0] != num_slots:
            raise checks.wrong_shape(operator, "rows", f"[N] with N = {num_slots}, as token_ids", rows)
        checks.same_device(operator, "token_ids", token_ids, "rows", rows)
    num_rows = num_slots if num_rows is None else checks.integer(operator, "num_rows", num_rows, 0, LARGEST)
    if num_experts is not None:
        checks.integer(operator, "num_experts", num_experts, 1, LARGEST)
        if num_rows % num_experts:
            raise checks.wrong_value(operator, "num_rows", f"a multiple of num_experts = {num_experts}", num_rows)
    chosen = backends.choose(operator, backend, token_ids.device)
    out, into, (token_ids, rows) = _destination(operator, out, num_slots, token_ids, rows)
    if out is not None or backends.plain(token_ids, rows):
        found = _token_ids_operator(token_ids, rows, num_tokens, num_rows, num_experts, chosen, into)
        _hand_over(found[0], out)
    else:
        found = _plan_token_ids(token_ids, rows, num_tokens, num_rows, num_experts, chosen)
    row_of_slot, slot_of_row, offsets, experts, tokens = found
    if num_experts is None:
        return _plan(row_of_slot, slot_of_row, num_tokens, slot_offsets=offsets)
    per_expert = torch.full_like(tokens, num_rows // num_experts)
    return _plan(row_of_slot, slot_of_row, num_tokens, num_experts, None, offsets, experts, tokens, per_expert)


def plan_from_segments(
    lengths: Tensor, num_tokens: int, *, out: Tensor | None = None, backend: str | None = None
) -> RoutingPlan:
    """The plan that regroups chunks from several ranks by expert (MoeReRouting).

    `lengths` [ranks, E], of any integer dtype: the tokens lie rank by rank, and inside a rank expert
    by expert, `lengths[rank, expert]` of them in a chunk; the rows lie expert by expert, and inside an
    expert rank by rank. Each token is one slot (`topk` = 1), S = R = T. Nothing is read back: tokens
    behind the last chunk have no row, chunks end at the last token, and a negative length counts as 0.

    >>> plan = plan_from_segments(torch.tensor([[2, 1], [1, 2]]), num_tokens=6)
    >>> plan.row_of_slot.tolist(), plan.slot_of_row.tolist(), plan.tokens_per_expert.tolist()
    ([0, 1, 3, 2, 4, 5], [0, 1, 3, 2, 4, 5], [3, 3])

    In torch: `chunks = arange(T).split(lengths.flatten().tolist())`, then
    `slot_of_row = cat([chunks[r * E + e] for e in range(E) for r in range(ranks)])`.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    operator = "plan_from_segments"
    lengths = _index_tensor(operator, "lengths", lengths, "[ranks, E]", (2,))
    checks.integer(operator, "num_tokens", num_tokens, 0, LARGEST)
    chosen = backends.choose(operator, backend, lengths.device)
    out, into, (lengths,) = _destination(operator, out, num_tokens, lengths)
    if out is not None or backends.plain(lengths):
        found = _segments_operator(lengths, num_tokens, chosen, into)
        _hand_over(found[0], out)
    else:
        found = _plan_segments(lengths, num_tokens, chosen)
    row_of_slot, slot_of_row, tokens = found
    return _plan(
        row_of_slot,
        slot_of_row,
        num_tokens,
        num_experts=lengths.shape[1],
        topk=1,
        tokens_per_expert=tokens,
        rows_per_expert=tokens,
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

    Exact, with the factor as it is written: 1.1 means 11/10, so that no rounding of a float adds a row.

    >>> capacity_from_factor(100, 1, 10, 1.1)
    11
    >>> import math
    >>> math.ceil(100 * 1.1 / 10)
    12
    >>> capacity_from_factor(5, 2, 3, 1.25, align=4)
    8

    Raises TypeError for a wrong type, ValueError for a negative number, `num_experts` or `align` below 1.
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
