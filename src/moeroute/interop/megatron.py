"""Megatron-Core: the functions of `megatron.core.transformer.moe.moe_utils` by the routing of this package.

    with moeroute.interop.megatron.patch():    # or patch() alone, for the rest of the process
        ...                                    # Megatron's router and dispatchers call the functions below

Names, arguments and results are the host's; on any device, and `fused=True` computes the same. Two generations of
the host are known: "0.16" (`permute` returns three values) and "2026" (its main branch of that year: five values).
Functions that differ take `generation`; the default is that of the installed host.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moeroute import check
from moeroute.interop import hosts
from moeroute.interop.conventions import (
    SCORES,
    ScoreFunction,
    as_map,
    chunks_of,
    gating_options,
    group_options,
    weighted_sum,
)
from moeroute.memory import set_memory_pool
from moeroute.ops.balance import load_balancing_loss_from_counts, router_z_loss, update_expert_bias
from moeroute.ops.gating.op import Gating, gating_topk
from moeroute.ops.indices.op import plan_from_row_id_map, plan_from_token_ids, row_id_map
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.normalize import normalize_scores
from moeroute.ops.planning.op import capacity_from_factor
from moeroute.ops.sinkhorn import sinkhorn as balanced_scores
from moeroute.ops.weights.op import dense_weights, routing_map_from_ids, routing_map_of
from moeroute.permutation import permute as permute_rows
from moeroute.permutation import permute_weights, permute_weights_backward
from moeroute.permutation import unpermute as unpermute_rows
from moeroute.plan import RoutingPlan

Generation = Literal["0.16", "2026"]
GENERATIONS: tuple[Generation, ...] = get_args(Generation)
SUPPORTED = "0.16.x, or its main branch of 2026 (permute with align_size)"
DropPolicy = Literal["probs", "position"]
POLICIES: tuple[DropPolicy, ...] = get_args(DropPolicy)
HOST = "megatron.core.transformer.moe.moe_utils"


# ---------------------------------------------------------------------------- rows


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: Tensor | None = None,
    align_size: int = 0,
    *,
    generation: Generation | None = None,
) -> tuple[Tensor | None, ...]:
    """Token copies grouped by expert, inside an expert by token.

    Args:
        tokens: [T, H], of any dtype.
        routing_map: [T, E], true where a token goes to an expert.
        probs: [T, E], of any float dtype.
        num_out_tokens: with `drop_and_pad` E times the capacity. Else "0.16" ignores it, and in "2026" it is the
            number of true entries, or more: with it nothing is read back. Of fewer the last entries of the map, token
            by token, have no rows.
        fused: the same result.
        drop_and_pad: every expert gets exactly its capacity: its first true tokens, then its first false ones, then,
            where the capacity is above T, padding rows (zero, token id -1).
        tokens_per_expert: "2026" only; handed back where there is no padding. The counts come from the map.
        align_size: "2026" only; above 1 every expert's rows are padded to a multiple: zero rows, token id -1.
        generation: "0.16" or "2026"; None is that of the installed host.

    Returns:
        (rows [R, H], their probs [R] or None, sorted_indices int64 [R], the token of each row) and in "2026" two more:
        pad_offsets int64 [E], how many padding rows the experts before each have, and the padded counts int64 [E];
        without padding None and `tokens_per_expert`.
    """
    generation = _generation("permute", generation)
    plan = _plan(routing_map, num_out_tokens, drop_and_pad, align_size, generation)
    rows = permute_rows(tokens, plan)
    row_probs = None if probs is None else permute_weights(probs, plan)
    found = (rows, row_probs, plan.token_of_row.to(torch.int64))
    if generation == "0.16":
        return found
    if align_size > 1 and not drop_and_pad and plan.num_rows != plan.num_slots:
        return *found, plan.pad_offsets, plan.rows_per_expert
    return *found, None, tokens_per_expert


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size | tuple[int, ...],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Bring the rows back to their tokens and add up each token's, weighted by `probs` where they are given.

    Args:
        permuted_tokens: [R, H] float, in the order of `permute`.
        sorted_indices: [R], as `permute` returned it.
        restore_shape: (T, H).
        probs: [T, E], any float dtype.
        routing_map: [T, E], needed with `probs`.
        fused: the same result.
        drop_and_pad: as in `permute`.
        pad_offsets: "2026" only; as `permute` returned it.

    Returns:
        [T, H] in the dtype of `permuted_tokens`: the sum is in float32 (float64 where either is), rounded once.
    """
    operator = "interop.megatron.unpermute"
    if not len(restore_shape):
        raise check.wrong_value(operator, "restore_shape", "(T, H)", tuple(restore_shape))
    check.shaped(operator, "permuted_tokens", permuted_tokens, (None, None))
    num_tokens = restore_shape[0]
    if probs is None:
        return unpermute_rows(permuted_tokens, plan_from_token_ids(sorted_indices, num_tokens))
    if routing_map is None:
        raise check.wrong_value(operator, "routing_map", "given with probs", None)
    check.shaped(operator, "routing_map", routing_map, (None, None))
    if drop_and_pad:
        plan = plan_from_token_ids(sorted_indices, num_tokens, num_experts=routing_map.shape[1])
    else:
        num_rows = permuted_tokens.shape[0]  # as many slots, or more than there are: padding rows
        plan = _plan_of_rows(as_map(routing_map), num_rows)
        if pad_offsets is not None:
            plan = plan_from_row_id_map(row_id_map(plan), num_rows, pad_offsets=pad_offsets)
    return weighted_sum(permuted_tokens, plan, probs)


def sort_chunks_by_idxs(
    input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None, fused: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Chunks of rows in another order: chunk `sorted_idxs[i]` comes i-th.

    Args:
        input: [R, H], chunk by chunk; of any dtype.
        split_sizes: [N] lengths of the chunks, which add up to R; on any device.
        sorted_idxs: [N], a permutation; on any device.
        probs: [R], of any float dtype.
        fused: the same result.

    Returns:
        (the rows [R, H], their probs [R] or None).
    """
    plan = chunks_of("interop.megatron.sort_chunks_by_idxs", "input", input, split_sizes, sorted_idxs)
    return permute_rows(input, plan), None if probs is None else permute_weights(probs.reshape(-1, 1), plan)


def _plan_of_rows(routing_map: Tensor, num_rows: int) -> RoutingPlan:
    """Nothing is read back; but on the CPU, where reading costs nothing, more true entries than rows are an error."""
    if routing_map.device.type == "cpu":
        plan = plan_from_routing_map(routing_map)
        if plan.num_rows >= num_rows:
            return plan  # with more than the rows `unpermute` says so
    return plan_from_routing_map(routing_map, num_rows=num_rows, num_slots=num_rows)


def _plan(
    routing_map: Tensor, num_out_tokens: int | Tensor | None, drop_and_pad: bool, align_size: int, generation: str
) -> RoutingPlan:
    routing_map = as_map(routing_map)
    if drop_and_pad and num_out_tokens is not None:
        return plan_from_routing_map(routing_map, fill=True, capacity=int(num_out_tokens) // routing_map.shape[1])
    if generation == "0.16":
        return plan_from_routing_map(routing_map)
    if align_size > 1:
        return plan_from_routing_map(routing_map, align=align_size)
    if num_out_tokens is None:
        raise check.wrong_value("interop.megatron.permute", "num_out_tokens", "given", None)
    size = int(num_out_tokens)
    return plan_from_routing_map(routing_map, num_rows=size, num_slots=size)


# ---------------------------------------------------------------------------- gating


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """The best experts of the best groups; a group is worth the sum of its `topk // group_topk` best scores.

    Args:
        scores: [T, E] float.
        topk: experts of a token.
        num_tokens: T.
        num_experts: E.
        num_groups: equal groups of neighbours.
        group_topk: how many of the groups stay in.

    Returns:
        (scores [T, topk] in their dtype, expert ids int64 [T, topk]), best first, of equal scores the smaller id.
    """
    scores = scores.reshape(num_tokens, num_experts)
    groups = group_options(topk, num_groups, group_topk)
    gating = gating_topk(scores, topk, score="none", weights_dtype=scores.dtype, **groups)
    return gating.weights, gating.expert_ids.to(torch.int64)


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: ScoreFunction = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: Any = None,
    dense_output: bool = False,
    precomputed_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token and weigh them.

    Args:
        logits: [T, E] float; computed in float32 (float64 in float64).
        topk: experts of a token.
        use_pre_softmax: softmax over all experts, then the choice; else softmax over the chosen ones.
        num_groups: with `group_topk`, equal groups of neighbours.
        group_topk: how many of the groups stay in, by the sum of their `topk // group_topk` best; None: no groups.
        scaling_factor: the weights are multiplied by it; None and 0 are none.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus"; the last two are divided by their sum where topk > 1.
        expert_bias: [E], added for the choice only; ignored with softmax, as by the host.
        fused: the same result.
        router_replay: the host's RouterReplay, which records our choice or gives another.
        dense_output: "2026"; weights and ids of the chosen ones instead of matrices over all experts.
        precomputed_indices: "2026"; [T, topk] experts that were chosen already.

    Returns:
        (probs [T, E] in the dtype of the logits, 0 for the experts that are not chosen; routing map bool [T, E]), or
        with `dense_output` (weights [T, topk], expert ids int64 [T, topk]).
    """
    gating, expert_ids = _gate(
        logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias,
        router_replay, precomputed_indices,
    )  # fmt: skip
    if dense_output:
        return gating.weights, expert_ids.to(torch.int64)
    num_experts = logits.shape[1]
    return dense_weights(gating.weights, expert_ids, num_experts), routing_map_from_ids(expert_ids, num_experts)


def _gate(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: ScoreFunction,
    expert_bias: Tensor | None,
    router_replay: Any,
    expert_ids: Tensor | None,
) -> tuple[Gating, Tensor]:
    """The gate, and the ids that it went by."""
    check.one_of("interop.megatron", "score_function", score_function, SCORES)
    choose = functools.partial(
        gating_topk,
        logits,
        topk,
        bias=None if score_function == "softmax" else expert_bias,
        **gating_options(topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, logits.dtype),
    )
    if expert_ids is not None:
        return choose(expert_ids=expert_ids), expert_ids
    if router_replay is None:
        gating = choose()
        return gating, gating.expert_ids
    chosen: list[tuple[Gating, Tensor]] = []  # ours, where the host asks for it

    def compute_topk(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        gating = choose()
        chosen.append((gating, gating.expert_ids.to(torch.int64)))
        return gating.weights, chosen[0][1]

    wanted: Tensor = router_replay.get_replay_topk(logits, topk, num_groups, group_topk, compute_topk)[1]
    if chosen and wanted is chosen[0][1]:
        return chosen[0]
    return choose(expert_ids=wanted), wanted


def sinkhorn(cost: Tensor, tol: float = 0.0001) -> Tensor:
    """exp(cost) [T, E] with its rows and columns scaled to the same sums, in the dtype of the cost.

    In the log domain, where the host overflows to NaN from a cost of 89 on; so `tol` is a tolerance of logarithms.
    """
    return balanced_scores(cost, tolerance=tol).to(cost.dtype)


def compute_routing_scores_for_aux_loss(
    logits: Tensor,
    topk: int,
    score_function: ScoreFunction,
    fused: bool = False,
    padding_mask: Tensor | None = None,
    *,
    generation: Generation | None = None,
) -> tuple[Tensor, Tensor]:
    """The choice by plain scores, and the scores, whose rows add up to 1: for `switch_load_balancing_loss_func`.

    Args:
        logits: [T, E] float.
        topk: experts of a token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        fused: the same result.
        padding_mask: [T] bool, True is padding: neither map nor scores.
        generation: "0.16" or "2026"; None is that of the installed host.

    Returns:
        (routing map bool [T, E], scores [T, E]: float32, but in "0.16" sigmoid in the dtype of the logits).
    """
    operator = "compute_routing_scores_for_aux_loss"
    generation = _generation(operator, generation)
    check.one_of(f"interop.megatron.{operator}", "score_function", score_function, SCORES)
    gating = gating_topk(logits, topk, score=score_function)
    scores = gating.scores
    if score_function != "softmax" or padding_mask is not None:
        scores = normalize_scores(scores, padding_mask=padding_mask)
    routing_map = routing_map_from_ids(gating.expert_ids, logits.shape[1])
    if padding_mask is not None:
        routing_map[padding_mask] = False
    rounded = score_function == "sigmoid" and generation == "0.16"
    return routing_map, scores.to(logits.dtype if rounded else torch.float32)


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: DropPolicy = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Drop the tokens of every expert above its capacity, `get_capacity(T * router_topk, E, capacity_factor)`.

    Args:
        routing_probs: [T, E] float.
        routing_map: [T, E], true where a token goes to an expert.
        router_topk: experts of a token.
        capacity_factor: 1.0 is room for a balanced choice.
        drop_policy: "probs": the largest probs stay, of equal ones the first tokens; "position": the first tokens.
        pad_to_capacity: fill up every expert with its first tokens that are not true.

    Returns:
        (probs [T, E], 0 where the map is not true; the map of those that stay, bool [T, E]).
    """
    policy = check.one_of("interop.megatron.apply_router_token_dropping", "drop_policy", drop_policy, POLICIES)
    num_tokens, num_experts = routing_probs.shape
    capacity = capacity_from_factor(num_tokens, router_topk, num_experts, capacity_factor)
    plan = plan_from_routing_map(
        as_map(routing_map),
        capacity=min(capacity, num_tokens),
        drop="weight" if policy == "probs" else "position",
        weights=routing_probs,
        fill=pad_to_capacity,
    )
    return permute_weights_backward(permute_weights(routing_probs, plan), plan), routing_map_of(plan)


def pad_routing_map(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """The map with as many more true entries that each expert has a multiple of `pad_multiple`: its first false ones.

    Args:
        routing_map: [T, E], true where a token goes to an expert. It is not changed, where the host changes it.
        pad_multiple: what the counts shall be a multiple of.

    Returns:
        A new map [T, E] in the dtype of the given one.

    Raises:
        ValueError: where an expert has no room, its count being above T rounded down to the multiple.
    """
    plan = plan_from_routing_map(as_map(routing_map), fill=pad_multiple > 1, align=pad_multiple)
    if plan.num_rows != plan.num_slots:
        wanted = f"such that every expert's count rounded up is at most T = {plan.num_tokens}"
        raise check.wrong_value("interop.megatron.pad_routing_map", "pad_multiple", wanted, pad_multiple)
    return routing_map_of(plan).to(routing_map.dtype)


# ---------------------------------------------------------------------------- balance


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """ceil(num_tokens / num_experts * capacity_factor), at least `min_capacity`.

    Exact, where the host rounds floats on the way: 13440 tokens, 16 experts and 1.1 are 924 here and 925 there.
    """
    return capacity_from_factor(num_tokens, 1, num_experts, capacity_factor, minimum=min_capacity or 0)


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """sum_e (sum_t probs[t, e] * tokens_per_expert[e]) * E * coefficient / (topk * total_num_tokens^2).

    Args:
        probs: [T, C] scores; C is E, or a multiple of it: one group of columns for each sequence.
        tokens_per_expert: [C] counts of any number dtype.
        total_num_tokens: an int or a tensor of one number.
        topk: experts of a token.
        num_experts: E.
        moe_aux_loss_coeff: the coefficient.
        fused: the same result.
        padding_mask: [T] bool, True is a token that counts, unlike everywhere else.

    Returns:
        A scalar in the dtype of the probs.
    """
    loss = load_balancing_loss_from_counts(
        probs,
        tokens_per_expert,
        num_experts=num_experts,
        topk=topk,
        num_tokens=total_num_tokens,
        coefficient=moe_aux_loss_coeff,
        padding_mask=None if padding_mask is None else ~padding_mask,
    )
    return loss.to(probs.dtype)


def z_loss_func(logits: Tensor, z_loss_coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """The mean of logsumexp(logits)^2 over the tokens that are not padding, times the coefficient.

    Args:
        logits: [T, E].
        z_loss_coeff: the coefficient.
        padding_mask: [T] bool, True is padding.

    Returns:
        A scalar in the dtype of the logits, as the host; with a mask at least float32. 0 where there are no tokens.
    """
    loss = router_z_loss(logits, padding_mask=padding_mask) * z_loss_coeff
    return loss if padding_mask is not None else loss.to(logits.dtype)


def get_updated_expert_bias(
    tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float, tp_dp_cp_group: Any = None
) -> Tensor:
    """The bias after one step: plus the rate for experts below the mean count, minus it for those above.

    Args:
        tokens_per_expert: [..., E] counts of this rank, also as floats. The counts of the group are added up in
            place, as the host does it.
        expert_bias: the same shape, float32 or float64.
        expert_bias_update_rate: the step.
        tp_dp_cp_group: the ranks; None is the host's tensor, data and context parallel group.

    Returns:
        The new bias. The comparison with the mean is exact.
    """
    if tp_dp_cp_group is None:
        operator = "interop.megatron.get_updated_expert_bias"
        state = hosts.load(operator, "megatron.core.parallel_state", SUPPORTED)
        try:
            tp_dp_cp_group = state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        except AssertionError as error:
            raise check.wrong_value(
                operator, "tp_dp_cp_group", "a process group where the host has none", None
            ) from error
    torch.distributed.all_reduce(tokens_per_expert, group=tp_dp_cp_group)
    return update_expert_bias(expert_bias, tokens_per_expert.to(torch.int64), rate=expert_bias_update_rate)


# ---------------------------------------------------------------------------- the host

NAMES = (
    "permute",
    "unpermute",
    "sort_chunks_by_idxs",
    "group_limited_topk",
    "topk_routing_with_score_function",
    "sinkhorn",
    "compute_routing_scores_for_aux_loss",
    "apply_router_token_dropping",
    "pad_routing_map",
    "get_capacity",
    "switch_load_balancing_loss_func",
    "z_loss_func",
    "get_updated_expert_bias",
)


class Patch:
    """Megatron-Core with our functions until `undo()` or the end of a `with` block; what `patch` returns."""

    def __init__(self) -> None:
        host = hosts.load("interop.megatron.patch", HOST, SUPPORTED)
        _installed_generation()  # from the host's own signature, while it is there
        self._replaced = {name: original for name in NAMES if (original := getattr(host, name)) is not ours(name)}
        self._former = set_memory_pool(False)
        for name, original in self._replaced.items():
            _exchange(original, ours(name))

    def undo(self) -> None:
        """Put the host's functions and the memory pool back. A second call changes nothing."""
        for name, original in self._replaced.items():
            _exchange(ours(name), original)
        self._replaced = {}
        if self._former:
            set_memory_pool(**self._former)
            self._former = {}

    def __enter__(self) -> "Patch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch() -> Patch:
    """Put our functions in the place of the host's, in every loaded module of Megatron that holds them.

    Also switches the memory pool off (`moeroute.set_memory_pool`): the host resizes storages.

    Returns:
        A context manager that puts everything back; without `with`, a switch with `undo()`.

    Raises:
        ImportError: where megatron-core is not installed or of an unknown generation.
    """
    return Patch()


def ours(name: str) -> Callable[..., Any]:
    """The function of this module that stands in for the host's."""
    function: Callable[..., Any] = globals()[name]
    return function


def _exchange(old: Any, new: Any) -> None:
    """In every module of the host: it binds the names by `from ... import`."""
    for module in _modules():
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def _modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "megatron" and module is not None:
            yield module


def _generation(operator: str, wanted: Generation | None) -> Generation:
    if wanted is None:
        return _installed_generation()
    return check.one_of(f"interop.megatron.{operator}", "generation", wanted, GENERATIONS)


@functools.cache
def _installed_generation() -> Generation:
    host = hosts.load("interop.megatron", HOST, SUPPORTED)
    parameters = set(inspect.signature(host.permute).parameters)
    if not {"tokens", "routing_map", "probs", "num_out_tokens", "drop_and_pad"} <= parameters:
        raise check.wrong_host("interop.megatron", HOST, SUPPORTED, f"permute({', '.join(sorted(parameters))})")
    return "2026" if "align_size" in parameters else "0.16"
