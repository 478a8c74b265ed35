"""Balance between experts: the auxiliary losses and the update of the selection bias, in plain torch.

A `padding_mask` is [T] bool and True means padding, as in Megatron-Core. A padded token counts
nowhere: not in the counts, not in the means, not in the number of tokens, and its gradient is 0
whatever its scores hold (a NaN included).

Counts are integers from end to end. They are taken from the expert ids that were chosen, before any
capacity drops slots and before any padding adds some: what a loss must see is what the router wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moeroute import check

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    *filter(None, [getattr(torch, "float8_e8m0fnu", None)]),  # since 2.7
)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


class BalanceStatistics(NamedTuple):
    """The sums behind `load_balancing_loss`. Sums, not means, so that shards can be added.

    - ``score_sum[e]`` = sum over tokens t of ``scores[t, e]``: float32 [E], differentiable
    - ``tokens_per_expert[e]`` = number of slots with ``expert_ids[t, k] == e``: int64 [E]
    - ``num_tokens`` = tokens that are not padding: int64 []

    The loss of a batch is that of the sum over its shards (micro-batches, ranks), whatever their
    sizes; the mean of the shards' losses is something else.

    >>> import torch
    >>> from moeroute.ops.balance import balance_statistics
    >>> scores = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0.5, 0.5]])
    >>> expert_ids = torch.tensor([[0], [0], [1], [0]])
    >>> whole = balance_statistics(scores, expert_ids)
    >>> first = balance_statistics(scores[:1], expert_ids[:1])
    >>> rest = balance_statistics(scores[1:], expert_ids[1:])
    >>> (first + rest).tokens_per_expert
    tensor([3, 1])
    >>> (first + rest).loss() == whole.loss()
    tensor(True)
    """

    score_sum: Tensor
    tokens_per_expert: Tensor
    num_tokens: Tensor

    def __add__(self, other: object) -> BalanceStatistics:  # not concatenation
        if not isinstance(other, BalanceStatistics):
            return NotImplemented
        if self.score_sum.shape != other.score_sum.shape:
            wanted = f"[E] with E = {self.score_sum.shape[0]}, as the other shard"
            raise check.wrong_shape("BalanceStatistics", "score_sum", wanted, other.score_sum)
        check.same_device("BalanceStatistics", "the other shard", self.score_sum, "score_sum", other.score_sum)
        return BalanceStatistics(
            self.score_sum + other.score_sum,
            self.tokens_per_expert + other.tokens_per_expert,
            self.num_tokens + other.num_tokens,
        )

    def __radd__(self, other: object) -> BalanceStatistics:
        # sum(shards) starts at 0.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def loss(self) -> Tensor:
        """E * sum_e f_e P_e, a float32 scalar; see `load_balancing_loss`. 0 where there are no tokens."""
        dtype = self.score_sum.dtype
        num_slots = self.tokens_per_expert.sum().clamp(min=1)
        fraction = self.tokens_per_expert.to(dtype) / num_slots.to(dtype)
        mean_score = self.score_sum / self.num_tokens.clamp(min=1).to(dtype)
        return (fraction * mean_score).sum() * self.score_sum.shape[0]


def balance_statistics(scores: Tensor, expert_ids: Tensor, *, padding_mask: Tensor | None = None) -> BalanceStatistics:
    """Sum of the scores, number of slots per expert and number of tokens, for one shard.

    Memory is linear in T * (E + K); nothing of size T * K * E is built. The sums of shards add up to those of the
    whole.

    Args:
        scores: [T, E], float: the score of each expert for each token. Rows sum to 1 as a rule.
        expert_ids: [T, K], any integer dtype; an id below 0 or >= E is an empty slot and counts nowhere.
        padding_mask: [T] bool, True = padding.

    Returns:
        The three sums; they can be added to those of other shards.

    Raises:
        ValueError: a wrong shape or device.
        TypeError: a wrong type or dtype.

    Equivalent torch: ``scores.sum(0), torch.bincount(expert_ids.flatten(), minlength=E), len(scores)``.

    >>> import torch, moeroute
    >>> scores, ids = torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([[0], [1]])
    >>> whole = moeroute.balance_statistics(scores, ids)
    >>> whole.score_sum, whole.tokens_per_expert, whole.num_tokens
    (tensor([1.2500, 0.7500]), tensor([1, 1]), tensor(2))
    >>> shards = [moeroute.balance_statistics(scores[i : i + 1], ids[i : i + 1]) for i in range(2)]
    >>> sum(shards[1:], shards[0]).loss() == whole.loss()
    tensor(True)
    """
    return _statistics("balance_statistics", scores, expert_ids, padding_mask)


def load_balancing_loss(scores: Tensor, expert_ids: Tensor, *, padding_mask: Tensor | None = None) -> Tensor:
    """The auxiliary loss of GShard and the Switch Transformer: E * sum_e f_e P_e.

    f_e is the share of the slots that went to expert e, count_e / (T * K) where no slot is empty; P_e is
    the mean score of expert e. Both are taken over the tokens that are not padding. The f_e sum to 1
    for any K, so perfect balance gives 1.0 and everything on one expert gives up to E. Gradients flow
    through P only. Multiply by your own coefficient.

    Source: Fedus et al., Switch Transformers (arXiv:2101.03961), equations 4 to 6; for K > 1 as
    Megatron-Core's ``switch_load_balancing_loss_func``, which divides by K too. (Hugging Face's
    ``load_balancing_loss_func`` does not: its value is K times this one.)

    Across shards add their `balance_statistics` and take the ``loss()`` of the sum.

    Args:
        scores: [T, E], float; softmax probabilities (for sigmoid scores: divided by their row sums,
            as DeepSeek-V3 does).
        expert_ids: [T, K], integers, as `gating_topk` chose them; below 0 or >= E: empty, not counted.
        padding_mask: [T] bool, True = padding.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: a wrong shape or device.
        TypeError: a wrong type or dtype.

    >>> import torch, moeroute
    >>> balanced = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    >>> moeroute.load_balancing_loss(torch.full((4, 4), 0.25), balanced)
    tensor(1.)
    >>> moeroute.load_balancing_loss(torch.eye(4)[[0, 0, 0, 0]], torch.zeros(4, 1, dtype=torch.int32))
    tensor(4.)
    """
    return _statistics("load_balancing_loss", scores, expert_ids, padding_mask).loss()


def router_z_loss(logits: Tensor, *, padding_mask: Tensor | None = None) -> Tensor:
    """Mean over the tokens of logsumexp(logits)^2; keeps router logits small.

    Source: Zoph et al., ST-MoE (arXiv:2202.08906), equation 5. Multiply by your own coefficient (theirs
    is 1e-3). Shards combine as sum_i n_i loss_i / sum_i n_i, n_i being their tokens that are not padding.

    Args:
        logits: [T, E], float.
        padding_mask: [T] bool, True = padding.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: a wrong shape or device.
        TypeError: a wrong type or dtype.

    >>> import torch, moeroute
    >>> moeroute.router_z_loss(torch.tensor([[0.0, 0.0], [100.0, 3.0]]), padding_mask=torch.tensor([False, True]))
    tensor(0.4805)
    """
    operator = "router_z_loss"
    _check_scores(operator, "logits", logits)
    _check_mask(operator, "logits", logits, padding_mask)
    logits = logits.to(_sum_dtype(logits))
    if padding_mask is None:
        num_tokens = logits.shape[0]
        return logits.logsumexp(dim=1).square().sum() / max(num_tokens, 1)
    logits = logits.masked_fill(padding_mask[:, None], 0.0)
    squares = logits.logsumexp(dim=1).square().masked_fill(padding_mask, 0.0)
    return squares.sum() / (~padding_mask).sum().clamp(min=1).to(squares.dtype)


def update_expert_bias(bias: Tensor, tokens_per_expert: Tensor, *, rate: float = 1e-3) -> Tensor:
    """The selection bias after one step: bias + rate * sign(mean count - count).

    An expert with fewer slots than the mean is lifted, one with more is lowered, one at the mean stays.
    The comparison is exact, in integers.

    Source: auxiliary-loss-free balancing of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2; Wang et al.,
    arXiv:2408.15664), as Megatron-Core's ``get_updated_expert_bias``. With several ranks, add up their
    counts first.

    Args:
        bias: [..., E], float32 or float64. A half type is refused: steps of 1e-3 vanish in it (in
            bfloat16, 1 + 0.001 is 1).
        tokens_per_expert: the same shape, an integer dtype (a bfloat16 count of 515 reads 512).
        rate: size of a step.

    Returns:
        A new tensor like the bias, which stays as it is.

    Raises:
        ValueError: a wrong shape or device.
        TypeError: a wrong type or dtype.

    >>> import torch, moeroute
    >>> moeroute.update_expert_bias(torch.zeros(4), torch.tensor([5, 2, 1, 0]), rate=0.5)
    tensor([-0.5000,  0.0000,  0.5000,  0.5000])
    """
    operator = "update_expert_bias"
    check.tensor(operator, "bias", bias)
    check.tensor(operator, "tokens_per_expert", tokens_per_expert)
    if bias.dtype not in (torch.float32, torch.float64):
        wanted = "float32 or float64"
        if bias.dtype in _HALF:
            wanted += f" (a step of {rate} is lost in a half type: keep the bias in float32)"
        raise check.wrong_dtype(operator, "bias", wanted, bias)
    if tokens_per_expert.dtype not in _INTEGERS:
        wanted = "of an integer dtype (counts must be exact)"
        raise check.wrong_dtype(operator, "tokens_per_expert", wanted, tokens_per_expert)
    if bias.ndim == 0:
        raise check.wrong_shape(operator, "bias", "[..., E]", bias)
    if tokens_per_expert.shape != bias.shape:
        wanted = f"{list(bias.shape)}, as bias"
        raise check.wrong_shape(operator, "tokens_per_expert", wanted, tokens_per_expert)
    check.same_device(operator, "bias", bias, "tokens_per_expert", tokens_per_expert)
    rate = check.finite_in(operator, "rate", rate, bias.dtype)
    counts = tokens_per_expert.to(torch.int64)
    direction = torch.sign(counts.sum(dim=-1, keepdim=True) - counts * counts.shape[-1])
    return bias.detach() + direction.to(bias.dtype) * rate


def _statistics(operator: str, scores: Tensor, expert_ids: Tensor, padding_mask: Tensor | None) -> BalanceStatistics:
    _check_scores(operator, "scores", scores)
    check.tensor(operator, "expert_ids", expert_ids)
    num_tokens, num_experts = scores.shape
    if expert_ids.dtype not in _INTEGERS:
        raise check.wrong_dtype(operator, "expert_ids", "of an integer dtype", expert_ids)
    if expert_ids.ndim != 2 or expert_ids.shape[0] != num_tokens:
        raise check.wrong_shape(operator, "expert_ids", f"[T, K] with T = {num_tokens}, as scores", expert_ids)
    check.same_device(operator, "scores", scores, "expert_ids", expert_ids)
    _check_mask(operator, "scores", scores, padding_mask)

    # Widened before E is compared with it (int8 ids, E = 300). Empty slots are counted in one more column,
    # which is then cut off.
    ids = expert_ids.to(torch.int64)
    column = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    if padding_mask is None:
        live_tokens = torch.full((), num_tokens, dtype=torch.int64, device=scores.device)
    else:
        scores = scores.to(_sum_dtype(scores)).masked_fill(padding_mask[:, None], 0.0)  # not in a float8
        column = column.masked_fill(padding_mask[:, None], num_experts)
        live_tokens = (~padding_mask).sum()
    column = column.reshape(-1)
    one = torch.ones((), dtype=torch.int64, device=scores.device)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=scores.device)
    counts = counts.scatter_add(0, column, one.expand(column.shape[0]))
    return BalanceStatistics(scores.sum(dim=0, dtype=_sum_dtype(scores)), counts[:num_experts].clone(), live_tokens)


def _check_scores(operator: str, argument: str, scores: Tensor) -> None:
    check.tensor(operator, argument, scores)
    if scores.dtype not in _FLOATS:
        raise check.wrong_dtype(operator, argument, "of a floating-point dtype", scores)
    if scores.ndim != 2:
        raise check.wrong_shape(operator, argument, "[T, E]", scores)


def _check_mask(operator: str, argument: str, scores: Tensor, padding_mask: Tensor | None) -> None:
    if padding_mask is None:
        return
    check.tensor(operator, "padding_mask", padding_mask)
    if padding_mask.dtype != torch.bool:
        raise check.wrong_dtype(operator, "padding_mask", "torch.bool, True = padding", padding_mask)
    if padding_mask.ndim != 1 or padding_mask.shape[0] != scores.shape[0]:
        wanted = f"[T] with T = {scores.shape[0]}, as {argument}"
        raise check.wrong_shape(operator, "padding_mask", wanted, padding_mask)
    check.same_device(operator, argument, scores, "padding_mask", padding_mask)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
