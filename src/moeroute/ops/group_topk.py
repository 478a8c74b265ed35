"""A selection in which groups of experts compete first, and those that lost count as 0; plain torch.

Letters: T tokens, E experts, G groups of L = E / G neighbours.
"""

import torch
from torch import Tensor


def _descending(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the last axis and their indices: the larger first, equal ones by index, every NaN before all."""
    values = torch.where(values.isnan(), torch.nan, values + 0.0)  # one NaN, one zero: a sort may look at bits
    return values.sort(dim=-1, descending=True, stable=True)


def topk_in_groups(values: Tensor, k: int, *, num_groups: int, topk_groups: int, best: int) -> Tensor:
    """int64 [T, k]: the experts of the k largest values of each token, the largest first, equal ones by smaller id.

    values: [T, E] float32. A group is worth the sum of its `best` largest values, from the largest on; the values
    outside the `topk_groups` best groups count as +0, so they come before negative ones.

    >>> import torch
    >>> topk_in_groups(torch.tensor([[-0.5, 0.25, -1.0, -1.0]]), 3, num_groups=2, topk_groups=1, best=2).tolist()
    [[1, 2, 3]]
    """
    num_tokens, num_experts = values.shape
    members, _ = _descending(values.reshape(num_tokens, num_groups, num_experts // num_groups))
    worth = members[..., 0]
    for place in range(1, best):
        worth = worth + members[..., place]
    _, order = _descending(worth)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, order[:, :topk_groups], True)
    kept = kept.repeat_interleave(num_experts // num_groups, dim=1)
    return _descending(torch.where(kept, values, 0.0))[1][:, :k]
