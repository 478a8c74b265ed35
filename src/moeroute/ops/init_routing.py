"""What the init routing of aclnn and of torch_npu have in common, made of plans; plain torch.

Letters: T tokens, K slots of a token, S = T * K, R rows, E experts, H hidden size.
"""

import torch
from torch import Tensor

from moeroute.dtypes import LARGEST
from moeroute.ops.indices.op import plan_from_row_of_slot
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.quantization.op import spread_quantized
from moeroute.plan import RoutingPlan


def sorted_plan(expert_ids: Tensor) -> RoutingPlan:
    """All slots in the stable order of their ids, the negative ones first, as a sort has them.

    >>> import torch
    >>> sorted_plan(torch.tensor([[1, -1], [0, 1]])).slot_of_row.tolist()
    [1, 2, 0, 3]
    """
    slots = expert_ids.numel()
    plan = plan_from_expert_ids(expert_ids, None, num_rows=slots)
    if torch.compiler.is_compiling() or not slots or expert_ids.is_meta or int(plan.slot_of_row[-1]) >= 0:
        return plan
    # A slot of a negative id has no row, so the last row is free: nothing else needs to be looked at.
    return plan_from_expert_ids(expert_ids.to(torch.int64) - expert_ids.min().to(torch.int64), None, num_rows=slots)


def slots_by_expert(expert_ids: Tensor, first: int) -> Tensor:
    """int32 [S]: all slots in the stable order of their experts, those below `first` last.

    >>> import torch
    >>> slots_by_expert(torch.tensor([[0, 2], [1, 2]]), 1).tolist()
    [2, 1, 3, 0]
    """
    return sorted_plan(torch.where(expert_ids < first, LARGEST, expert_ids)).slot_of_row


def first_rows(plan: RoutingPlan, num_rows: int, first_row: int = 0) -> RoutingPlan:
    """The plan with `num_rows` rows from `first_row` on, or with padding rows behind its own.

    >>> import torch
    >>> plan = plan_from_expert_ids(torch.tensor([[1], [0], [1]]), 2)
    >>> first_rows(plan, 2).row_of_slot.tolist(), first_rows(plan, 2, first_row=1).row_of_slot.tolist()
    ([1, 0, -1], [0, -1, 1])
    """
    if first_row == 0 and num_rows == plan.num_rows:
        return plan
    experts = plan.tensors.expert_of_slot
    return plan_from_row_of_slot(
        plan.row_of_slot, plan.num_tokens, num_rows, first_row=first_row, expert_of_slot=experts
    )


def used_pairs(counts: Tensor, first: int, length: int) -> Tensor:
    """[length, 2]: (expert, count) of the experts from `first` on that have one, in order, then zeros.

    >>> import torch
    >>> used_pairs(torch.tensor([2, 0, 1]), 4, 4).tolist()
    [[4, 2], [6, 1], [0, 0], [0, 0]]
    """
    experts = torch.arange(len(counts), device=counts.device)
    used, order = (counts > 0).sort(descending=True, stable=True)
    pairs = torch.stack((experts[order] + first, counts[order]), 1) * used[:, None]
    return torch.cat((pairs, pairs.new_zeros(length - len(pairs), 2)))


def spread_int8(
    x: Tensor, plan: RoutingPlan, expert_ids: Tensor, first: int, smooth: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`spread_quantized` with factors [1, H] for all rows or [n, H] for the experts from `first` on.

    >>> import torch
    >>> ids = torch.tensor([[1], [0]])
    >>> plan = plan_from_expert_ids(ids, 2)
    >>> spread_int8(torch.ones(2, 1), plan, ids, 0, torch.tensor([[1.0], [127.0]]))[1]
    tensor([0.0079, 1.0000])
    """
    if smooth is None or len(smooth) == 1:
        return spread_quantized(x, plan, smooth=None if smooth is None else smooth[0])
    experts = torch.cat((expert_ids.reshape(-1) - first, expert_ids.new_full((1,), -1)))
    experts = experts[plan.slot_of_row].to(torch.int32)  # -1, a row without a slot, is the last
    return spread_quantized(x, plan, smooth=smooth, expert_of_row=experts)


def column_routing(row_idx: Tensor, expert_ids: Tensor, num_rows: int) -> tuple[RoutingPlan, Tensor, Tensor]:
    """Routing of slots that have numbers of their own, `row_idx` [T, K]: k * T + t as a rule.

    Returns:
        (the plan of the first rows, the row of each number int32 [S], the sorted expert ids [S]).

    >>> import torch
    >>> numbers = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    >>> plan, rows, ids = column_routing(numbers, torch.tensor([[1, 0], [1, 2]], dtype=torch.int32), 4)
    >>> plan.row_of_slot.tolist(), rows.tolist(), ids.tolist()
    ([1, 0, 2, 3], [1, 2, 0, 3], [0, 1, 1, 2])
    """
    num_tokens, topk = expert_ids.shape
    plan = sorted_plan(expert_ids)
    sorted_ids = expert_ids.reshape(-1).index_select(0, plan.slot_of_row)
    if _numbered_by_column(row_idx):
        numbers = plan.row_of_slot.view(num_tokens, topk).t().reshape(-1)
        return first_rows(plan, num_rows), numbers, sorted_ids
    in_order = row_idx.reshape(-1).index_select(0, plan.slot_of_row)  # entry i: the slot number in row i
    numbers = plan_from_row_of_slot(in_order, len(in_order), len(in_order)).slot_of_row
    return plan_from_row_of_slot(numbers.view(topk, num_tokens).t(), num_tokens, num_rows), numbers, sorted_ids


def _numbered_by_column(row_idx: Tensor) -> bool:
    """Whether slot (t, k) has number k * T + t, as nearly always: the plan of the ids is then all that is needed."""
    if torch.compiler.is_compiling() or row_idx.is_meta:
        return False
    numbers = torch.arange(row_idx.numel(), dtype=torch.int32, device=row_idx.device)
    return torch.equal(row_idx.t(), numbers.view(row_idx.shape[1], row_idx.shape[0]))
