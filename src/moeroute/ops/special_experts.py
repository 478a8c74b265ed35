"""`combine` where some experts compute nothing: ids that mean zero, the token itself, or a constant; plain torch.

Letters: T tokens, K slots of a token, H hidden size, R rows, E experts.
"""

import torch
from torch import Tensor

NONE = range(0)


def _inside(ids: Tensor, experts: range) -> Tensor:
    return (ids >= experts.start) & (ids < experts.stop)


def combine_special(
    rows: Tensor,
    row_of_slot: Tensor,
    expert_ids: Tensor,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    init: tuple[Tensor, ...] = (),
    bias: Tensor | None = None,
    zero: range = NONE,
    copy: range = NONE,
    constant: range = NONE,
    constants: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """``sum(init) + sum over k of weights[t, k] * (r + bias[expert_ids[t, k]])`` for each token t, as `combine`.

    rows: [R, H]. row_of_slot, expert_ids: [T, K], integers. x: [T, H]. weights: [T, K]. init: [T, H] each. bias:
    [E, H]. All but the integers are floats. r is rows[row_of_slot[t, k]], but x[t] for an expert in `copy` and
    ``x[t] * a + v * b``, with ``(a, b, v) = constants`` [len(constant), H] each, in row id - constant.start, for one
    in `constant`. An expert in `zero`, a slot without a row (of whatever expert) and one of weight 0 add nothing; an
    id outside [0, E) has no bias. float32, one rounding an operation, slots in order; [T, H] in the dtype of rows.

    >>> import torch
    >>> rows, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])
    >>> ids = torch.tensor([[0, 4], [1, 5]])
    >>> combine_special(rows, torch.tensor([[0, 1], [1, 0]]), ids, x, copy=range(4, 5), zero=range(5, 6)).flatten()
    tensor([11.,  2.])
    """
    num_tokens, hidden = x.shape
    total = torch.zeros(num_tokens, hidden, dtype=torch.float32, device=x.device)
    for number, start in enumerate(init):
        total = total + start.float() if number else start.float()
    x = x.float()
    source = rows if len(rows) else rows.new_zeros(1, hidden)
    for k in range(row_of_slot.shape[1]):
        row, ids = row_of_slot[:, k].long(), expert_ids[:, k].long()
        used = (row >= 0) & (row < len(rows))
        term = source[torch.where(used, row, 0)].float()
        used = used & ~_inside(ids, zero)
        term = torch.where(_inside(ids, copy)[:, None], x, term)
        if constants is not None and constant:
            here = _inside(ids, constant)
            a, b, v = (values[torch.where(here, ids - constant.start, 0)].float() for values in constants)
            term = torch.where(here[:, None], x * a + v * b, term)
        if bias is not None and len(bias):
            biased = (ids >= 0) & (ids < len(bias))
            term = torch.where(biased[:, None], term + bias[torch.where(biased, ids, 0)].float(), term)
        if weights is not None:
            weight = weights[:, k].float()
            used = used & (weight != 0)
            term = weight[:, None] * term
        total = torch.where(used[:, None], total + term, total)
    return total.to(rows.dtype)
