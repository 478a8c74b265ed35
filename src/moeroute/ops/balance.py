"""Balance between experts: the auxiliary losses and the update of the selection bias, in plain torch.

A `padding_mask` is [T] bool and True means padding, as in Megatron-Core. A padded token counts
nowhere: not in the counts, not in the means, not in the number of tokens, and its gradient is 0
whatever its scores hold (a NaN included).

Counts are integers from end to end. They are taken from the expert ids that were chosen, before any
capacity drops slots and before any padding adds some: what a loss must see is what the router wanted.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import FLOATS, INTEGERS, LARGEST, wide
from moeroute.ops.exchange import sum_over_ranks
from moeroute.ops.indices.op import plan_from_token_ids
from moeroute.ops.rows.op import combine

BalanceKind = Literal["micro_batch", "sequence", "global_batch"]
_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (
    *FLOATS,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


class BalanceStatistics(NamedTuple):
    """The sums behind `load_balancing_loss`. Sums, not means, so that shards can be added.

    - ``score_sum[e]`` = sum over tokens t of ``scores[t, e]``: float32 [E], differentiable
    - ``tokens_per_expert[e]`` = number of slots with ``expert_ids[t, k] == e``: int64 [E]
    - ``num_tokens`` = tokens that are not padding: int64 []

    With leading axes or sequences these are [..., E], [..., E] and [...].

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
            wanted = f"{list(self.score_sum.shape)}, as the other shard"
            if self.score_sum.ndim == 1:
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
        """E * sum_e f_e P_e, float32 of the leading axes' shape; see `load_balancing_loss`. 0 where there are no
        tokens."""
        dtype = self.score_sum.dtype
        num_slots = self.tokens_per_expert.sum(-1, keepdim=True).clamp(min=1)
        fraction = self.tokens_per_expert.to(dtype) / num_slots.to(dtype)
        mean_score = self.score_sum / self.num_tokens.clamp(min=1).to(dtype)[..., None]
        return (fraction * mean_score).sum(-1) * self.score_sum.shape[-1]


def balance_statistics(
    scores: Tensor,
    expert_ids: Tensor,
    *,
    padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    num_sequences: int | None = None,
    group: Any = None,
) -> BalanceStatistics:
    """Sum of the scores, number of slots per expert and number of tokens, for one shard.

    Memory is linear in T * (E + K); nothing of size T * K * E is built. The sums of shards add up to those of the
    whole. Without sequence_ids the arguments may have leading axes, [..., T, E], [..., T, K] and [..., T]; each index
    of these has statistics of its own.

    Args:
        scores: [T, E], float: the score of each expert for each token. Rows sum to 1 as a rule.
        expert_ids: [T, K], any integer dtype; an id below 0 or >= E is an empty slot and counts nowhere.
        padding_mask: [T] bool, True = padding.
        sequence_ids: [T], any integer dtype: statistics of each of N sequences, [N, E], in one pass. A token whose id
            is outside [0, N) counts nowhere. The scores of a sequence are added in token order.
        num_sequences: N, with sequence_ids.
        group: a torch.distributed process group, or a mesh of one dimension, whose ranks each have a shard and call
            this together. The two counts are then those of all of them (added in int64, the same on every rank); the
            sum of the scores stays this rank's, so that each rank's ``loss()`` is its share: the shares add up to the
            loss of the global batch, and their gradients to its gradient.

    Returns:
        The three sums; they can be added to those of other shards (without a group).

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
    operator = "balance_statistics"
    found = _statistics(operator, scores, expert_ids, padding_mask, sequence_ids, num_sequences)
    if group is None:
        return found
    counts = torch.cat([found.tokens_per_expert, found.num_tokens[..., None]], dim=-1)
    counts = sum_over_ranks(operator, counts, group)
    return found._replace(tokens_per_expert=counts[..., :-1], num_tokens=counts[..., -1])


def load_balancing_loss(
    scores: Tensor,
    expert_ids: Tensor,
    *,
    padding_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    num_sequences: int | None = None,
) -> Tensor:
    """The auxiliary loss of GShard and the Switch Transformer: E * sum_e f_e P_e.

    f_e is the share of the slots that went to expert e, count_e / (T * K) where no slot is empty; P_e is
    the mean score of expert e. Both are taken over the tokens that are not padding. The f_e sum to 1
    for any K, so perfect balance gives 1.0 and everything on one expert gives up to E. Gradients flow
    through P only. Multiply by your own coefficient.

    Source: Fedus et al., Switch Transformers (arXiv:2101.03961), equations 4 to 6; for K > 1 as
    Megatron-Core's ``switch_load_balancing_loss_func``, which divides by K too. (Hugging Face's
    ``load_balancing_loss_func`` does not: its value is K times this one.)

    Across shards add their `balance_statistics` and take the ``loss()`` of the sum.

    The loss of each sequence (DeepSeek-V3's sequence-wise loss, Megatron-Core's ``seq_aux_loss``; both take the mean
    over sequences): leading axes [..., T, E], or sequence_ids and num_sequences as in `balance_statistics`. The
    result then has the shape of the leading axes, or [N].

    Args:
        scores: [T, E], float; softmax probabilities (for sigmoid scores: divided by their row sums,
            as DeepSeek-V3 does).
        expert_ids: [T, K], integers, as `gating_topk` chose them; below 0 or >= E: empty, not counted.
        padding_mask: [T] bool, True = padding.
        sequence_ids: as in `balance_statistics`.
        num_sequences: as in `balance_statistics`.

    Returns:
        float32; a scalar, or one loss for each sequence.

    Raises:
        ValueError: a wrong shape, size or device.
        TypeError: a wrong type or dtype.

    >>> import torch, moeroute
    >>> balanced = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    >>> moeroute.load_balancing_loss(torch.full((4, 4), 0.25), balanced)
    tensor(1.)
    >>> moeroute.load_balancing_loss(torch.eye(4)[[0, 0, 0, 0]], torch.zeros(4, 1, dtype=torch.int32))
    tensor(4.)
    >>> sequences = {"sequence_ids": torch.tensor([0, 1, 1, 0]), "num_sequences": 2}
    >>> moeroute.load_balancing_loss(torch.eye(4)[[0, 1, 2, 0]], torch.tensor([[0], [1], [2], [0]]), **sequences)
    tensor([4., 2.])
    """
    statistics = _statistics("load_balancing_loss", scores, expert_ids, padding_mask, sequence_ids, num_sequences)
    return statistics.loss()


def load_balancing_loss_from_counts(
    scores: Tensor,
    tokens_per_expert: Tensor,
    *,
    num_experts: int,
    topk: int,
    num_tokens: int | Tensor,
    coefficient: float = 1.0,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """The same loss from counts that exist already, of other ranks too, a scalar:

    sum_c (sum_t scores[t, c] * tokens_per_expert[c]) * E * coefficient / (topk * num_tokens^2)

    It is `load_balancing_loss` times the coefficient where the counts are those of the same T = num_tokens tokens
    and no slot is empty. The name in Megatron-Core is ``switch_load_balancing_loss_func``.

    Args:
        scores: [T, C], float. C is E, or a multiple of it: one group of columns for each sequence.
        tokens_per_expert: [C], integers or floats; gets no gradient.
        num_experts: E.
        topk: K.
        num_tokens: an int, or a tensor of one number and no axes, so that nothing is read back. 0 counts as 1.
        coefficient: multiplies the loss.
        padding_mask: [T] bool, True = padding, which adds nothing to the sum of the scores.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: a wrong shape, number or device.
        TypeError: a wrong type or dtype.

    >>> import torch, moeroute
    >>> scores, counts = torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([2, 0])
    >>> moeroute.load_balancing_loss_from_counts(scores, counts, num_experts=2, topk=1, num_tokens=2)
    tensor(1.2500)
    """
    operator = "load_balancing_loss_from_counts"
    _check_scores(operator, "scores", scores)
    _check_mask(operator, "scores", scores, padding_mask)
    check.tensor(operator, "tokens_per_expert", tokens_per_expert)
    counts = tokens_per_expert.detach()
    if counts.dtype not in (*_FLOATS, *INTEGERS):
        raise check.wrong_dtype(operator, "tokens_per_expert", "of an integer or floating-point dtype", counts)
    if counts.ndim != 1 or counts.shape[0] != scores.shape[1]:
        raise check.wrong_shape(operator, "tokens_per_expert", f"[C] with C = {scores.shape[1]}, as scores", counts)
    check.same_device(operator, "scores", scores, "tokens_per_expert", counts)
    check.integer(operator, "num_experts", num_experts, 1)
    check.integer(operator, "topk", topk, 1)
    if scores.shape[1] % num_experts != 0:
        raise check.wrong_value(operator, "num_experts", f"a divisor of C = {scores.shape[1]}", num_experts)
    dtype = wide(scores)
    factor = num_experts * check.finite_in(operator, "coefficient", coefficient, dtype) / topk
    if padding_mask is not None:
        scores = scores.to(dtype).masked_fill(padding_mask[:, None], 0.0)
    total = (scores.sum(dim=0, dtype=dtype) * counts.to(dtype)).sum()
    if not isinstance(num_tokens, Tensor):
        return total * (factor / max(check.integer(operator, "num_tokens", num_tokens, 0), 1) ** 2)
    if num_tokens.ndim != 0:
        raise check.wrong_shape(operator, "num_tokens", "an int or [], a tensor of one number", num_tokens)
    check.same_device(operator, "scores", scores, "num_tokens", num_tokens)
    return total * factor / num_tokens.detach().to(dtype).clamp(min=1).square()


def loss_of_kind(
    kind: BalanceKind,
    scores: Tensor,
    expert_ids: Tensor,
    padding_mask: Tensor | None,
    num_sequences: int | None,
    group: Any,
) -> Tensor:
    """`nn.Routing.balance_loss`, which has the docstring."""
    operator = "nn.Routing.balance_loss"
    check.one_of(operator, "kind", kind, get_args(BalanceKind))
    if kind != "sequence":
        group = group if kind == "global_batch" else None
        return balance_statistics(scores, expert_ids, padding_mask=padding_mask, group=group).loss()
    parts = check.integer(operator, "num_sequences", num_sequences, 1)
    if scores.shape[0] % parts:
        raise check.wrong_value(operator, "num_sequences", f"a divisor of T = {scores.shape[0]}", num_sequences)
    split = (parts, scores.shape[0] // parts)
    mask = None if padding_mask is None else padding_mask.unflatten(0, split)
    return load_balancing_loss(scores.unflatten(0, split), expert_ids.unflatten(0, split), padding_mask=mask).mean()


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
    logits = logits.to(wide(logits))
    if padding_mask is None:
        num_tokens = logits.shape[0]
        return logits.logsumexp(dim=1).square().sum() / max(num_tokens, 1)
    logits = logits.masked_fill(padding_mask[:, None], 0.0)
    squares = logits.logsumexp(dim=1).square().masked_fill(padding_mask, 0.0)
    return squares.sum() / (~padding_mask).sum().clamp(min=1).to(squares.dtype)


def update_expert_bias(bias: Tensor, tokens_per_expert: Tensor, *, rate: float = 1e-3, group: Any = None) -> Tensor:
    """The selection bias after one step: bias + rate * sign(mean count - count).

    An expert with fewer slots than the mean is lifted, one with more is lowered, one at the mean stays.
    The comparison is exact, in integers.

    Source: auxiliary-loss-free balancing of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2; Wang et al.,
    arXiv:2408.15664), as Megatron-Core's ``get_updated_expert_bias``.

    Args:
        bias: [..., E], float32 or float64. A half type is refused: steps of 1e-3 vanish in it (in
            bfloat16, 1 + 0.001 is 1).
        tokens_per_expert: the same shape, an integer dtype (a bfloat16 count of 515 reads 512).
        rate: size of a step.
        group: a torch.distributed process group, or a mesh of one dimension, whose ranks call this together: their
            counts are added first, in int64, so that every rank gets the same bias. None: the counts as they are.

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
    if tokens_per_expert.dtype not in INTEGERS:
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
    if group is not None:
        counts = sum_over_ranks(operator, counts, group)
    direction = torch.sign(counts.sum(dim=-1, keepdim=True) - counts * counts.shape[-1])
    return bias.detach() + direction.to(bias.dtype) * rate


def _statistics(
    operator: str,
    scores: Tensor,
    expert_ids: Tensor,
    padding_mask: Tensor | None,
    sequence_ids: Tensor | None,
    num_sequences: int | None,
) -> BalanceStatistics:
    leading = isinstance(scores, Tensor) and scores.ndim > 2 and sequence_ids is None
    _check_scores(operator, "scores", scores, leading)
    check.tensor(operator, "expert_ids", expert_ids)
    *lead, num_tokens, num_experts = scores.shape
    if expert_ids.dtype not in INTEGERS:
        raise check.wrong_dtype(operator, "expert_ids", "of an integer dtype", expert_ids)
    if expert_ids.ndim != scores.ndim or expert_ids.shape[:-1] != scores.shape[:-1]:
        wanted = f"{[*lead, num_tokens]} and K" if leading else f"[T, K] with T = {num_tokens}"
        raise check.wrong_shape(operator, "expert_ids", f"{wanted}, as scores", expert_ids)
    check.same_device(operator, "scores", scores, "expert_ids", expert_ids)
    _check_mask(operator, "scores", scores, padding_mask)
    ids, device = expert_ids.to(torch.int64), scores.device  # widened before E is compared with it: int8 ids, E = 300
    sequence = None
    if sequence_ids is not None:
        sequence = _sequences(operator, scores, sequence_ids, padding_mask, num_sequences)
        lead, padding_mask = [num_sequences or 0], sequence < 0
    elif num_sequences is not None:
        raise check.wrong_value(operator, "num_sequences", "None without sequence_ids", num_sequences)

    # Empty slots are counted in one more column, which is then cut off.
    column = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    if padding_mask is None:
        live_tokens = torch.full(lead, num_tokens, dtype=torch.int64, device=device)
    else:
        scores = scores.to(wide(scores)).masked_fill(padding_mask[..., None], 0.0)  # not in a float8
        column = column.masked_fill(padding_mask[..., None], num_experts)
        live_tokens = (~padding_mask).sum(-1)
    one = torch.ones((), dtype=torch.int64, device=device)
    if sequence is None:
        score_sum = scores.sum(dim=-2, dtype=wide(scores))
        counts = torch.zeros(*lead, num_experts + 1, dtype=torch.int64, device=device)
        column = column.flatten(-2)
        counts = counts.scatter_add(-1, column, one.expand(column.shape))
    else:
        plan = plan_from_token_ids(sequence, lead[0])  # a token is a row, and its sequence what the rows add up to
        score_sum = combine(scores, plan)
        sequence, live = sequence.clamp(min=0), (sequence >= 0).to(torch.int64)
        live_tokens = torch.zeros(lead, dtype=torch.int64, device=device)
        counts = torch.zeros(lead[0] * (num_experts + 1), dtype=torch.int64, device=device)
        if lead[0]:
            live_tokens = live_tokens.scatter_add(0, sequence, live)
            column = (sequence[:, None] * (num_experts + 1) + column).flatten()
            counts = counts.scatter_add(0, column, one.expand(column.shape))
        counts = counts.reshape(*lead, num_experts + 1)
    return BalanceStatistics(score_sum, counts[..., :num_experts].clone(), live_tokens)


def _sequences(
    operator: str, scores: Tensor, sequence_ids: Tensor, padding_mask: Tensor | None, num_sequences: int | None
) -> Tensor:
    """int64 [T]: the sequence of each token, -1 for what counts nowhere."""
    check.shaped(operator, "sequence_ids", sequence_ids, (scores.shape[0],), scores)
    if sequence_ids.dtype not in INTEGERS:
        raise check.wrong_dtype(operator, "sequence_ids", "of an integer dtype", sequence_ids)
    if num_sequences is None:
        raise check.wrong_value(operator, "num_sequences", "given with sequence_ids", None)
    check.integer(operator, "num_sequences", num_sequences, 0, LARGEST)
    ids = sequence_ids.to(torch.int64)
    known = (ids >= 0) & (ids < num_sequences)
    return torch.where(known if padding_mask is None else known & ~padding_mask, ids, -1)


def _check_scores(operator: str, argument: str, scores: Tensor, leading: bool = False) -> None:
    check.tensor(operator, argument, scores)
    if scores.dtype not in _FLOATS:
        raise check.wrong_dtype(operator, argument, "of a floating-point dtype", scores)
    if scores.ndim != 2 and not leading:
        raise check.wrong_shape(operator, argument, "[T, E]", scores)


def _check_mask(operator: str, argument: str, scores: Tensor, padding_mask: Tensor | None) -> None:
    if padding_mask is None:
        return
    check.tensor(operator, "padding_mask", padding_mask)
    if padding_mask.dtype != torch.bool:
        raise check.wrong_dtype(operator, "padding_mask", "torch.bool, True = padding", padding_mask)
    if padding_mask.shape != scores.shape[:-1]:
        wanted = f"[T] with T = {scores.shape[0]}, as {argument}"
        if scores.ndim > 2:
            wanted = f"{list(scores.shape[:-1])}, as {argument}"
        raise check.wrong_shape(operator, "padding_mask", wanted, padding_mask)
    check.same_device(operator, argument, scores, "padding_mask", padding_mask)
