"""Hash routing: experts by a table instead of logits; plain torch."""

import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import INTEGERS


def look_up_expert_ids(keys: Tensor, table: Tensor) -> Tensor:
    """The expert ids of each token by a table: hash routing, in which the input id of a token chooses its experts.

    Args:
        keys: [T], any integer dtype; the input ids of the tokens as a rule.
        table: [N, K], any integer dtype; the experts of each key.

    Returns:
        [T, K] in the dtype of the table (int64 for an unsigned one): ``table[keys]``, and -1, which is an empty slot,
        for a key outside [0, N).

    Raises:
        ValueError: a wrong shape or device.
        TypeError: a wrong type or dtype.

    `gating_topk` then weighs the experts by the logits, whose gradients flow as usual:

    >>> import torch, moeroute
    >>> table = torch.tensor([[2, 0], [1, 3]])
    >>> ids = moeroute.look_up_expert_ids(torch.tensor([1, 0, 7]), table)
    >>> ids.tolist()
    [[1, 3], [2, 0], [-1, -1]]
    >>> moeroute.gating_topk(torch.zeros(3, 4), 2, score="sigmoid", expert_ids=ids).weights.tolist()
    [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
    """
    operator = "look_up_expert_ids"
    check.shaped(operator, "keys", keys, (None,))
    check.shaped(operator, "table", table, (None, None), keys)
    for name, tensor in (("keys", keys), ("table", table)):
        if tensor.dtype not in INTEGERS:
            raise check.wrong_dtype(operator, name, "of an integer dtype", tensor)
    keys, size = keys.to(torch.int64), table.shape[0]
    if not table.dtype.is_signed:
        table = table.to(torch.int64)
    if size == 0:
        return table.new_full((keys.shape[0], table.shape[1]), -1)
    known = (keys >= 0) & (keys < size)
    return torch.where(known[:, None], table[torch.where(known, keys, 0)], -1)
