"""RoutingPlan: which row each slot's copy takes, and back."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import LARGEST

is_dynamo_compiling = torch.compiler.is_dynamo_compiling
Result = TypeVar("Result")


class PlanTensors(NamedTuple):
    """What kernels take of a plan; an operator of torch.library has these as five arguments."""

    row_of_slot: Tensor
    slot_of_row: Tensor
    slot_offsets: Tensor | None
    expert_of_slot: Tensor | None
    num_tokens: int


_as_tensors = PlanTensors._make


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

    Derived from them, without a synchronisation, on first use and then kept: `token_of_slot`, `token_of_row`,
    `expert_of_row`, `expert_ends`. Tensors of a plan are not to be changed in place.

    With an expert range (lo, hi) the last two have hi - lo entries. Slots before `slot_offsets[0]` and from
    `slot_offsets[T]` on, if any (a slice of a larger plan), belong to no token: nothing is copied, added up or
    weighed for them.

    Three tokens choose 2 of 4 experts; the first choice of token 1 is empty:

    >>> import torch, moeroute
    >>> ids = torch.tensor([[2, 0], [-1, 2], [0, 2]])
    >>> plan = moeroute.plan_from_expert_ids(ids, num_experts=4)

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

    >>> plan = moeroute.plan_from_expert_ids(ids, num_experts=4, align=4)
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

        >>> import torch, moeroute
        >>> moeroute.plan_from_expert_ids(torch.tensor([[1, 0]]), 2).to("meta").slot_of_row.device
        device(type='meta')
        """
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "RoutingPlan":
        """A copy in page-locked memory, from which `to(..., non_blocking=True)` copies in the background."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "RoutingPlan":
        """A plan of changed tensors; counts that are one tensor stay one."""
        fields = self.__getstate__()
        fields = {name: change(value) if isinstance(value, Tensor) else value for name, value in fields.items()}
        if self.rows_per_expert is self.tokens_per_expert:
            fields["rows_per_expert"] = fields["tokens_per_expert"]
        return _plan_of(fields)

    def __getstate__(self) -> dict[str, Any]:
        """The fields: what copies and pickles get, without what is kept beside them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def tensors(self) -> PlanTensors:
        """What kernels take."""
        if is_dynamo_compiling():
            return _tensors(self)
        found: PlanTensors | None = self.__dict__.get("_tensors")
        if found is None:
            found = self.__dict__["_tensors"] = _tensors(self)
        return found

    @property
    def num_slots(self) -> int:
        """S."""
        return self.row_of_slot.shape[0]

    @property
    def token_of_slot(self) -> Tensor:
        """int32 [S]: the token that owns each slot; -1 for a slot that no token owns.

        >>> import torch, moeroute
        >>> chosen = torch.tensor([[True, True], [False, False], [False, True]])
        >>> moeroute.plan_from_routing_map(chosen).token_of_slot.tolist()
        [0, 0, 2]
        """
        return self._once("_token_of_slot", _token_of_slot)

    @property
    def token_of_row(self) -> Tensor:
        """int32 [R]: the token whose copy each row holds; -1 for padding."""
        return self._once("_token_of_row", lambda plan: values_at(plan.token_of_slot, plan.slot_of_row))

    @property
    def tokens_up_to_expert(self) -> Tensor | None:
        """int64 [E]: running totals of `tokens_per_expert`. None where the plan knows no experts.

        >>> import torch, moeroute
        >>> moeroute.plan_from_expert_ids(torch.tensor([[2, 0], [-1, 2], [0, 2]]), 4).tokens_up_to_expert.tolist()
        [2, 2, 5, 5]
        """
        return None if self.tokens_per_expert is None else self.tokens_per_expert.cumsum(0)

    @property
    def expert_of_row(self) -> Tensor | None:
        """int32 [R]: which entry of `rows_per_expert` each row belongs to, padding rows of an expert
        included; -1 behind the last. None where the plan knows no experts.

        >>> import torch, moeroute
        >>> moeroute.plan_from_expert_ids(torch.tensor([[2, 0], [-1, 2], [0, 2]]), 4, align=4).expert_of_row.tolist()
        [0, 0, 0, 0, 2, 2, 2, 2]
        """
        return self._once("_expert_of_row", _expert_of_row)

    @property
    def expert_ends(self) -> Tensor | None:
        """int32 [E]: the row behind each expert's last one, padding rows included; running totals of
        `rows_per_expert`. None where the plan knows no experts.

        What `torch.nn.functional.grouped_mm(rows, weight, offs=plan.expert_ends)` takes.

        >>> import torch, moeroute
        >>> moeroute.plan_from_expert_ids(torch.tensor([[2, 0], [-1, 2], [0, 2]]), 4, align=4).expert_ends.tolist()
        [4, 4, 8, 8]
        """
        return self._once("_expert_ends", _expert_ends)

    @property
    def pad_offsets(self) -> Tensor | None:
        """int64 [E]: how many padding rows the experts before each have, so that a row without padding is here that
        row plus its expert's entry. None where the plan knows no experts.

        Transformer Engine's `pad_offsets`, which `plan_from_row_id_map` takes.

        >>> import torch, moeroute
        >>> moeroute.plan_from_expert_ids(torch.tensor([[2, 0], [-1, 2], [0, 2]]), 4, align=4).pad_offsets.tolist()
        [0, 2, 2, 3]
        """
        if self.rows_per_expert is None or self.tokens_per_expert is None:
            return None
        padding = self.rows_per_expert - self.tokens_per_expert
        return padding.cumsum(0) - padding

    def _once(self, name: str, compute: Callable[["RoutingPlan"], Result]) -> Result:
        """compute(self), kept for the next use: a real tensor that autograd may save, filled by now."""
        if torch.compiler.is_compiling():
            return compute(self)
        if name in self.__dict__:
            found: Result = self.__dict__[name]
            return found
        with torch.inference_mode(False):
            found = compute(self)
        capturing = self.row_of_slot.is_cuda and torch.cuda.is_current_stream_capturing()
        if type(found) is Tensor and not capturing:
            self.__dict__[name] = found
        return found


# torch.load(weights_only=True), its default, then reads plans.
torch.serialization.add_safe_globals([RoutingPlan])


def _token_of_slot(plan: RoutingPlan) -> Tensor:
    slots = torch.arange(plan.num_slots, dtype=torch.int32, device=plan.row_of_slot.device)
    if plan.slot_offsets is None:
        return slots // max(plan.topk or 1, 1)
    token = torch.searchsorted(plan.slot_offsets[1:].contiguous(), slots, right=True, out_int32=True)
    return torch.where((token < plan.num_tokens) & (slots >= plan.slot_offsets[0]), token, -1)


def _expert_of_row(plan: RoutingPlan) -> Tensor | None:
    if plan.rows_per_expert is None:
        return None
    rows = torch.arange(plan.num_rows, device=plan.slot_of_row.device)
    expert = torch.searchsorted(plan.rows_per_expert.cumsum(0), rows, right=True, out_int32=True)
    return torch.where(expert < plan.rows_per_expert.shape[0], expert, -1)


def _expert_ends(plan: RoutingPlan) -> Tensor | None:
    return None if plan.rows_per_expert is None else plan.rows_per_expert.cumsum(0, dtype=torch.int32)


def values_at(values: Tensor, index: Tensor) -> Tensor:
    """values[index], -1 where the index is outside."""
    padded = torch.cat([values, values.new_full((1,), -1)])
    size = values.shape[0]
    return padded[torch.where((index >= 0) & (index < size), index, size)]


def _validate(plan: RoutingPlan) -> None:
    operator = "RoutingPlan"
    num_tokens = check.integer(operator, "num_tokens", plan.num_tokens, 0, LARGEST)
    num_rows = check.integer(operator, "num_rows", plan.num_rows, 0, LARGEST)
    if plan.num_experts is not None:
        check.integer(operator, "num_experts", plan.num_experts, 0, LARGEST)
    if plan.topk is not None:
        check.integer(operator, "topk", plan.topk, 0, LARGEST)
    optional = ("slot_offsets", "expert_of_slot", "tokens_per_expert", "rows_per_expert")
    for name in ("row_of_slot", "slot_of_row", *optional):
        tensor = getattr(plan, name)
        if tensor is None and name in optional:
            continue
        check.tensor(operator, name, tensor)
        dtype = torch.int64 if name.endswith("per_expert") else torch.int32
        if tensor.dtype is not dtype:
            raise check.wrong_dtype(operator, name, str(dtype), tensor)
        if tensor.dim() != 1:
            raise check.wrong_shape(operator, name, "one-dimensional", tensor)
        check.same_device(operator, "row_of_slot", plan.row_of_slot, name, tensor)
        if tensor.is_neg() or not tensor.is_contiguous():  # kernels walk these by address
            object.__setattr__(plan, name, tensor.resolve_neg().contiguous())
    num_slots = plan.num_slots
    if plan.slot_of_row.shape[0] != num_rows:
        raise check.wrong_shape(operator, "slot_of_row", f"[R] with R = num_rows = {num_rows}", plan.slot_of_row)
    if plan.topk is not None:
        if plan.slot_offsets is not None:
            raise check.wrong_shape(operator, "slot_offsets", "None where topk is given", plan.slot_offsets)
        if num_tokens * plan.topk != num_slots:
            wanted = f"[S] with S = num_tokens * topk = {num_tokens} * {plan.topk}"
            raise check.wrong_shape(operator, "row_of_slot", wanted, plan.row_of_slot)
    elif plan.slot_offsets is None:
        raise check.wrong_value(operator, "slot_offsets", "given where topk is None", None)
    elif plan.slot_offsets.shape[0] != num_tokens + 1:
        wanted = f"[T + 1] with T = num_tokens = {num_tokens}"
        raise check.wrong_shape(operator, "slot_offsets", wanted, plan.slot_offsets)
    if plan.expert_of_slot is not None and plan.expert_of_slot.shape[0] != num_slots:
        wanted = f"[S] with S = {num_slots}, as row_of_slot"
        raise check.wrong_shape(operator, "expert_of_slot", wanted, plan.expert_of_slot)
    tokens, rows = plan.tokens_per_expert, plan.rows_per_expert
    if (tokens is None) != (rows is None):
        raise check.wrong_value(operator, "rows_per_expert", "given where tokens_per_expert is, and only there", rows)
    if tokens is not None and rows is not None:
        if plan.num_experts is None or tokens.shape[0] > plan.num_experts:
            wanted = f"at most [E] with E = num_experts = {plan.num_experts}"
            raise check.wrong_shape(operator, "tokens_per_expert", wanted, tokens)
        if rows.shape != tokens.shape:
            wanted = f"{list(tokens.shape)}, as tokens_per_expert"
            raise check.wrong_shape(operator, "rows_per_expert", wanted, rows)


def make_plan(
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


def _tensors(plan: RoutingPlan) -> PlanTensors:
    return _as_tensors((plan.row_of_slot, plan.slot_of_row, plan.slot_offsets, plan.expert_of_slot, plan.num_tokens))


def expect_plan(operator: str, plan: Any) -> None:
    """A plan whose index tensors still have their sizes: one may have been resized since it was checked."""
    if not isinstance(plan, RoutingPlan):
        raise check.wrong_type(operator, "plan", "a moeroute.RoutingPlan", plan)
    slots, offsets, experts = plan.row_of_slot.numel(), plan.slot_offsets, plan.expert_of_slot
    if (
        plan.slot_of_row.numel() != plan.num_rows
        or (slots != plan.num_tokens * (plan.topk or 0) if offsets is None else offsets.numel() != plan.num_tokens + 1)
        or (experts is not None and experts.numel() != slots)
    ):
        for name in [name for name in plan.__dict__ if name.startswith("_")]:
            del plan.__dict__[name]
        plan.__post_init__()


def given_plan(operator: str, plan: PlanTensors, num_rows: int | None, like: Tensor) -> PlanTensors:
    """The tensors given to a registered operator: of the right sizes, contiguous, on the device of `like`.

    num_rows: how many rows the operator reads; None where the plan says it.
    """
    row_of_slot, slot_of_row, slot_offsets, expert_of_slot, num_tokens = plan
    check.integer(operator, "num_tokens", num_tokens, 0, LARGEST)
    row_of_slot = index_vector(operator, "row_of_slot", row_of_slot, None, like)
    num_slots = row_of_slot.shape[0]
    if slot_offsets is not None:
        slot_offsets = index_vector(operator, "slot_offsets", slot_offsets, num_tokens + 1, like)
    elif num_slots % num_tokens if num_tokens else num_slots:
        raise check.wrong_shape(operator, "row_of_slot", f"[T * K] with T = {num_tokens}", row_of_slot)
    slot_of_row = index_vector(operator, "slot_of_row", slot_of_row, num_rows, like)
    if expert_of_slot is not None:
        expert_of_slot = index_vector(operator, "expert_of_slot", expert_of_slot, num_slots, like)
    return PlanTensors(row_of_slot, slot_of_row, slot_offsets, expert_of_slot, num_tokens)


def index_vector(operator: str, argument: str, index: Tensor, size: int | None, like: Tensor) -> Tensor:
    """int32 and contiguous: kernels walk it by address."""
    check.shaped(operator, argument, index, (size,), like)
    if index.dtype is not torch.int32:
        raise check.wrong_dtype(operator, argument, "torch.int32", index)
    return index.contiguous()
