"""Experts with several instances: which one a slot goes to, and which slots are worth going; plain torch.

Letters: T tokens, K slots of a token, E experts, F columns of the table.
"""

import torch
from torch import Tensor


def instances_of_slots(expert_ids: Tensor, table: Tensor, *, rank: int | None = None, num_ranks: int = 1) -> Tensor:
    """The instance of each slot's expert, in the dtype of expert_ids; -1 where the table has none.

    expert_ids: [T, K], integers. table: [E, F], integers: column 0 counts an expert's instances, the next columns
    name them. Of n instances, a `rank` of `num_ranks` goes to number rank // ceil(num_ranks / n); without a rank,
    token t goes to number t % n. An id outside [0, E) and a count outside 1..F - 1 have no instance.

    >>> import torch
    >>> table = torch.tensor([[1, 0, -1], [2, 1, 4]])  # expert 0 has instance 0, expert 1 has 1 and 4
    >>> ids = torch.tensor([[0, 1], [1, 0]])
    >>> instances_of_slots(ids, table)
    tensor([[0, 1],
            [4, 0]])
    >>> instances_of_slots(ids, table, rank=3, num_ranks=4)
    tensor([[0, 4],
            [4, 0]])
    """
    num_experts, columns = table.shape
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    instances = table[torch.where(valid, expert_ids, 0).long()]
    count = instances[..., :1].long()
    valid = valid[..., None] & (count >= 1) & (count < columns)
    count = torch.where(valid, count, 1)
    if rank is None:
        turn = torch.arange(len(expert_ids), device=expert_ids.device)[:, None, None] % count
    else:
        turn = rank // ((num_ranks + count - 1) // count)
    chosen = torch.where(valid, instances.gather(2, turn + 1), -1)
    return chosen[..., 0].to(expert_ids.dtype)


def slots_above(scores: Tensor, threshold: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """bool [T, K]: the slots whose score is at least threshold[k] of the token's sum, of the tokens of the mask.

    scores: [T, K], floats. threshold: [K], float32. token_mask: [T] bool. In float32: the sum from +0 in slot
    order, one product, one comparison, which a NaN fails.

    >>> import torch
    >>> slots_above(torch.tensor([[0.75, 0.25], [0.9, 0.1]]), torch.tensor([0.0, 0.25]))
    tensor([[ True,  True],
            [ True, False]])
    """
    scores = scores.float()
    total = scores.new_zeros(len(scores))
    for score in scores.unbind(1):
        total = total + score
    kept = scores >= total[:, None] * threshold
    return kept if token_mask is None else kept & token_mask[:, None]
