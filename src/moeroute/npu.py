"""`moeroute bench --npu`: torch_npu's routing functions against the core verbs that each of them is made of.

Both sides run in one process and take turns; a figure is reported only after their results were compared there, bit by
bit. The core side knows what the function knows and no more: no number of experts where the name has none, no plan from
an earlier step.

T tokens, K experts of a token, E experts, H hidden size; S = T * K slots.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeroute import bench, memory
from moeroute.interop import torch_npu
from moeroute.ops.gating.op import gating_topk, gating_topk_backward
from moeroute.ops.half_quantization import quantize_half
from moeroute.ops.indices.op import plan_from_row_of_slot, plan_from_segments, plan_from_token_ids
from moeroute.ops.maps.op import plan_from_routing_map
from moeroute.ops.planning.op import plan_from_expert_ids
from moeroute.ops.quantization.op import quantize, spread_quantized
from moeroute.ops.rows.op import combine, spread
from moeroute.ops.weights.op import slot_weights
from moeroute.permutation import permute, permute_weights, permute_weights_backward, unpermute, unpermute_backward
from moeroute.testing import assert_same_bits

SLOWEST = 1.1
"""How many times as long as its core verb a function may take."""


class Sizes(NamedTuple):
    """Of the tensors of every case."""

    tokens: int = 2048
    topk: int = 8
    experts: int = 64
    hidden: int = 2048
    dtype: torch.dtype = torch.bfloat16


SIZES = Sizes()


@dataclass(frozen=True)
class Pair:
    """A function of torch_npu, and core verbs with the same results; `bytes`: what must move at the least, where the
    memory is the limit.
    """

    named: Callable[[], Any]
    core: Callable[[], Any]
    bytes: int = 0


@dataclass(frozen=True)
class Case:
    """What is measured, and the bounds: the core's time as a share of the function's, the share of the roof."""

    name: str
    make: Callable[[Sizes], Pair]
    bounds: dict[str, float]


# ---------------------------------------------------------------------------- inputs


def _random(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(sizes.dtype)


def _tokens(sizes: Sizes) -> Tensor:
    return _random(sizes, sizes.tokens, sizes.hidden)


def _rows(sizes: Sizes) -> Tensor:
    return _random(sizes, sizes.tokens * sizes.topk, sizes.hidden)


def _ids(sizes: Sizes) -> Tensor:
    """int32 [T, K], different experts for each token."""
    scores = torch.rand(sizes.tokens, sizes.experts, generator=torch.Generator().manual_seed(0))
    return scores.topk(sizes.topk).indices.int()


def _map(sizes: Sizes) -> Tensor:
    return torch.zeros(sizes.tokens, sizes.experts, dtype=torch.bool).scatter_(1, _ids(sizes).long(), True)


def _probs(sizes: Sizes, columns: int) -> Tensor:
    return torch.rand(sizes.tokens, columns, generator=torch.Generator().manual_seed(1))


def _sorted(ids: Tensor) -> Any:
    return plan_from_expert_ids(ids, None, num_rows=ids.numel())


# ---------------------------------------------------------------------------- by expert index


def _permute(sizes: Sizes) -> Pair:
    tokens, ids = _tokens(sizes), _ids(sizes)

    def core() -> Any:
        plan = _sorted(ids)
        return permute(tokens, plan), plan.row_of_slot

    return Pair(lambda: torch_npu.npu_moe_token_permute(tokens, ids), core)


def _permute_cut(sizes: Sizes) -> Pair:
    tokens, ids = _tokens(sizes), _ids(sizes)
    num_rows = ids.numel() * 3 // 4

    def core() -> Any:
        plan = _sorted(ids)
        cut = plan_from_row_of_slot(plan.row_of_slot, sizes.tokens, num_rows)
        return permute(tokens, cut), plan.row_of_slot

    return Pair(lambda: torch_npu.npu_moe_token_permute(tokens, ids, num_rows), core)


def _permute_grad(sizes: Sizes) -> Pair:
    grad, index = _rows(sizes), _sorted(_ids(sizes)).row_of_slot
    return Pair(
        lambda: torch_npu.npu_moe_token_permute_grad_v2(grad, index, sizes.tokens, sizes.dtype, sizes.topk),
        lambda: unpermute(grad, plan_from_row_of_slot(index, sizes.tokens, len(grad))),
    )


def _unpermute(sizes: Sizes) -> Pair:
    rows, index = _rows(sizes), _sorted(_ids(sizes)).row_of_slot
    return Pair(
        lambda: torch_npu.npu_moe_token_unpermute(rows, index),
        lambda: unpermute(rows, plan_from_row_of_slot(index, len(index), len(rows))),
    )


def _unpermute_probs(sizes: Sizes) -> Pair:
    rows, index, probs = _rows(sizes), _sorted(_ids(sizes)).row_of_slot, _probs(sizes, sizes.topk)
    return Pair(
        lambda: torch_npu.npu_moe_token_unpermute(rows, index, probs),
        lambda: unpermute(rows, plan_from_row_of_slot(index, sizes.tokens, len(rows)), probs),
    )


def _unpermute_grad(sizes: Sizes) -> Pair:
    grad, index = _rows(sizes), _sorted(_ids(sizes)).row_of_slot
    return Pair(
        lambda: torch_npu.npu_moe_token_unpermute_grad_v2(grad, index, len(grad), sizes.dtype),
        lambda: unpermute_backward(grad, None, plan_from_row_of_slot(index, len(index), len(grad))),
    )


def _unpermute_grad_probs(sizes: Sizes) -> Pair:
    grad, rows, probs = _tokens(sizes), _rows(sizes), _probs(sizes, sizes.topk)
    index = _sorted(_ids(sizes)).row_of_slot
    return Pair(
        lambda: torch_npu.npu_moe_token_unpermute_grad_v2(
            grad, index, len(rows), sizes.dtype, probs, permuted_tokens=rows
        ),
        lambda: unpermute_backward(grad, rows, plan_from_row_of_slot(index, sizes.tokens, len(rows)), probs),
    )


def _training(sizes: Sizes) -> Pair:
    """Forward and backward through autograd, gradients in the tokens and the probs."""
    tokens, ids, probs, seed = _tokens(sizes), _ids(sizes), _probs(sizes, sizes.topk), _random(sizes, 1)
    leaves = tokens.requires_grad_(), probs.requires_grad_()
    seed = seed.expand_as(tokens).contiguous()

    def named() -> Any:
        rows, index = torch_npu.npu_moe_token_permute(tokens, ids)
        output = torch_npu.npu_moe_token_unpermute(rows, index, probs)
        return output.detach(), *torch.autograd.grad(output, leaves, seed)

    def core() -> Any:
        plan = _sorted(ids)
        plan = plan_from_row_of_slot(plan.row_of_slot, plan.num_tokens, plan.num_rows)
        output = unpermute(permute(tokens, plan), plan, probs)
        return output.detach(), *torch.autograd.grad(output, leaves, seed)

    return Pair(named, core)


# ---------------------------------------------------------------------------- by routing map


def _map_permute(sizes: Sizes) -> Pair:
    tokens, routing_map, probs = _tokens(sizes), _map(sizes), _probs(sizes, sizes.experts)
    slots = sizes.tokens * sizes.topk

    def core() -> Any:
        plan = plan_from_routing_map(routing_map)
        return permute(tokens, plan), permute_weights(probs, plan), plan.row_of_slot

    return Pair(
        lambda: torch_npu.npu_moe_token_permute_with_routing_map(
            tokens, routing_map, probs=probs, num_out_tokens=slots
        ),
        core,
    )


def _map_permute_padded(sizes: Sizes) -> Pair:
    tokens, routing_map, probs = _tokens(sizes), _map(sizes), _probs(sizes, sizes.experts)
    slots = sizes.tokens * sizes.topk

    def core() -> Any:
        plan = plan_from_routing_map(routing_map, fill=True, capacity=slots // sizes.experts)
        return permute(tokens, plan), permute_weights(probs, plan), plan.token_of_row

    return Pair(
        lambda: torch_npu.npu_moe_token_permute_with_routing_map(
            tokens, routing_map, probs=probs, num_out_tokens=slots, drop_and_pad=True
        ),
        core,
    )


def _map_permute_grad(sizes: Sizes) -> Pair:
    routing_map, grad = _map(sizes), _rows(sizes)
    index = plan_from_routing_map(routing_map).row_of_slot
    grad_probs = torch.rand(len(index), generator=torch.Generator().manual_seed(2))

    def core() -> Any:
        plan = plan_from_routing_map(routing_map, num_rows=len(grad))
        return combine(grad, plan), permute_weights_backward(grad_probs, plan)

    return Pair(
        lambda: torch_npu.npu_moe_token_permute_with_routing_map_grad(
            grad, grad_probs, index, routing_map, sizes.experts, sizes.tokens, False
        ),
        core,
    )


def _token_of_row(sizes: Sizes) -> Tensor:
    """With drop_and_pad: C = S / E rows of each expert."""
    capacity = sizes.tokens * sizes.topk // sizes.experts
    return plan_from_routing_map(_map(sizes), fill=True, capacity=capacity).token_of_row


def _map_permute_grad_padded(sizes: Sizes) -> Pair:
    routing_map, index = _map(sizes), _token_of_row(sizes)
    grad = _random(sizes, len(index), sizes.hidden)
    grad_probs = torch.rand(len(index), generator=torch.Generator().manual_seed(2))

    def core() -> Any:
        plan = plan_from_token_ids(index, sizes.tokens, num_rows=len(index), num_experts=sizes.experts)
        return combine(grad, plan), permute_weights_backward(grad_probs, plan)

    return Pair(
        lambda: torch_npu.npu_moe_token_permute_with_routing_map_grad(
            grad, grad_probs, index, routing_map, sizes.experts, sizes.tokens, True
        ),
        core,
    )


def _map_unpermute(sizes: Sizes) -> Pair:
    rows, routing_map, probs = _rows(sizes), _map(sizes), _probs(sizes, sizes.experts)
    index = plan_from_routing_map(routing_map).row_of_slot
    shape = [sizes.tokens, sizes.hidden]

    def core() -> Any:
        experts = plan_from_routing_map(routing_map, topk=sizes.topk, num_rows=0).expert_of_slot
        plan = plan_from_row_of_slot(index, sizes.tokens, len(rows), expert_of_slot=experts)
        return combine(rows, plan, slot_weights(probs, plan))

    return Pair(
        lambda: torch_npu.npu_moe_token_unpermute_with_routing_map(
            rows, index, shape, probs=probs, routing_map=routing_map
        ),
        core,
    )


def _map_unpermute_padded(sizes: Sizes) -> Pair:
    index, probs, shape = _token_of_row(sizes), _probs(sizes, sizes.experts), [sizes.tokens, sizes.hidden]
    rows = _random(sizes, len(index), sizes.hidden)

    def core() -> Any:
        plan = plan_from_token_ids(index, sizes.tokens, num_rows=len(index), num_experts=sizes.experts)
        return combine(rows, plan, slot_weights(probs, plan))

    return Pair(
        lambda: torch_npu.npu_moe_token_unpermute_with_routing_map(rows, index, shape, probs=probs, drop_and_pad=True),
        core,
    )


def _map_unpermute_grad(sizes: Sizes) -> Pair:
    grad, rows, routing_map, probs = _tokens(sizes), _rows(sizes), _map(sizes), _probs(sizes, sizes.experts)
    index = plan_from_routing_map(routing_map).row_of_slot

    def core() -> Any:
        experts = plan_from_routing_map(routing_map, topk=sizes.topk, num_rows=0).expert_of_slot
        plan = plan_from_row_of_slot(index, sizes.tokens, len(rows), expert_of_slot=experts)
        grad_rows, grad_probs = unpermute_backward(grad, rows, plan, probs)
        return grad_rows, None if grad_probs is None else grad_probs.to(grad.dtype)

    return Pair(
        lambda: torch_npu.npu_moe_token_unpermute_with_routing_map_grad(grad, index, index, routing_map, rows, probs),
        core,
    )


def _map_unpermute_grad_padded(sizes: Sizes) -> Pair:
    index, grad, probs = _token_of_row(sizes), _tokens(sizes), _probs(sizes, sizes.experts)
    rows = _random(sizes, len(index), sizes.hidden)
    order = torch.argsort(index, stable=True).int()
    token_ids = index[order]

    def core() -> Any:
        plan = plan_from_token_ids(token_ids, sizes.tokens, rows=order, num_rows=len(index), num_experts=sizes.experts)
        grad_rows, grad_probs = unpermute_backward(grad, rows, plan, probs)
        return grad_rows, None if grad_probs is None else grad_probs.to(grad.dtype)

    return Pair(
        lambda: torch_npu.npu_moe_token_unpermute_with_routing_map_grad(
            grad, order, token_ids, None, rows, probs, True
        ),
        core,
    )


# ---------------------------------------------------------------------------- gating

_SIGMOID: dict[str, Any] = {"norm_type": 1, "routed_scaling_factor": 2.5}
_CORE_SIGMOID: dict[str, Any] = {"score": "sigmoid", "renormalize": True, "scaling_factor": 2.5}


def _gating(sizes: Sizes) -> Pair:
    x = _random(sizes, sizes.tokens, sizes.experts)

    def core() -> Any:
        found = gating_topk(x, sizes.topk, weights_dtype=x.dtype, renormalize=False)
        return found.weights, found.expert_ids, torch.zeros_like(found.scores)

    return Pair(lambda: torch_npu.npu_moe_gating_top_k(x, sizes.topk), core)


def _gating_groups(sizes: Sizes) -> Pair:
    x, bias = _random(sizes, sizes.tokens, sizes.experts), _random(sizes, sizes.experts)
    groups = sizes.experts // 8

    def core() -> Any:
        found = gating_topk(
            x,
            sizes.topk,
            bias=bias,
            num_groups=groups,
            topk_groups=groups // 2,
            group_score="top2_sum",
            weights_dtype=x.dtype,
            eps=1e-20,
            **_CORE_SIGMOID,
        )
        return found.weights, found.expert_ids, found.scores

    return Pair(
        lambda: torch_npu.npu_moe_gating_top_k(
            x,
            sizes.topk,
            bias=bias,
            group_count=groups,
            k_group=groups // 2,
            group_select_mode=1,
            out_flag=True,
            **_SIGMOID,
        ),
        core,
    )


def _gating_backward(sizes: Sizes) -> Pair:
    found = gating_topk(_random(sizes, sizes.tokens, sizes.experts), sizes.topk, **_CORE_SIGMOID)
    grad = _random(sizes, sizes.tokens, sizes.topk)
    return Pair(
        lambda: torch_npu.npu_moe_gating_top_k_backward(found.scores, grad, found.expert_ids, **_SIGMOID),
        lambda: gating_topk_backward(found.scores, grad, found.expert_ids, eps=1e-20, **_CORE_SIGMOID),
    )


def _gating_softmax(sizes: Sizes) -> Pair:
    x, topk = _random(sizes, sizes.tokens, sizes.experts), sizes.topk

    def core() -> Any:
        rounded = gating_topk(x, 1).scores.to(x.dtype)
        found = gating_topk(rounded, topk, score="none", weights_dtype=x.dtype)
        numbers = torch.arange(x.shape[0] * topk, dtype=torch.int32).view(topk, -1).t()
        return found.weights, found.expert_ids, numbers

    return Pair(lambda: torch_npu.npu_moe_gating_top_k_softmax(x, None, topk), core)


def _gating_softmax_v2(renorm: int, sizes: Sizes) -> Pair:
    x, topk = _random(sizes, sizes.tokens, sizes.experts), sizes.topk

    def core() -> Any:
        score: Any = "topk_softmax" if renorm else "softmax"
        found = gating_topk(x, topk, score=score, renormalize=False, weights_dtype=x.dtype)
        return found.weights, found.expert_ids, torch.empty(0)

    return Pair(lambda: torch_npu.npu_moe_gating_top_k_softmax_v2(x, k=topk, renorm=renorm), core)


# ---------------------------------------------------------------------------- init, finalize, re-routing


def _init_routing_v2(quant_mode: int, sizes: Sizes) -> Pair:
    x, ids, slots = _tokens(sizes), _ids(sizes), sizes.tokens * sizes.topk
    scale = torch.full((1,), 20.0) if quant_mode == 0 else None

    def core() -> Any:
        plan = plan_from_expert_ids(ids, sizes.experts, num_rows=slots)
        if quant_mode == 1:
            rows, scales = spread_quantized(x, plan)
        else:
            rows = spread(x, plan) if scale is None else quantize(x, scale, torch.zeros(1), plan=plan)
            scales = torch.zeros(slots)
        return rows, plan.row_of_slot, plan.tokens_per_expert, scales

    return Pair(
        lambda: torch_npu.npu_moe_init_routing_v2(
            x,
            ids,
            scale=scale,
            expert_num=sizes.experts,
            active_num=slots,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            quant_mode=quant_mode,
        ),
        core,
        x.nbytes + slots * (sizes.hidden + 4) if quant_mode == 1 else 0,
    )


def _init_routing(sizes: Sizes) -> Pair:
    x, ids, topk = _tokens(sizes), _ids(sizes), sizes.topk
    row_idx = torch.arange(ids.numel(), dtype=torch.int32).view(topk, -1).t().contiguous()

    def core() -> Any:
        order = _sorted(ids)
        slots = row_idx.view(-1).index_select(0, order.slot_of_row)
        numbers = plan_from_row_of_slot(slots, ids.numel(), ids.numel()).slot_of_row
        return spread(x, order), numbers, ids.view(-1).index_select(0, order.slot_of_row)

    return Pair(lambda: torch_npu.npu_moe_init_routing(x, row_idx, ids, sizes.tokens), core)


def _init_routing_quant(quant_mode: int, sizes: Sizes) -> Pair:
    x, ids, slots = _tokens(sizes), _ids(sizes), sizes.tokens * sizes.topk
    scale = torch.full((1,), 20.0) if quant_mode == 0 else None

    def core() -> Any:
        plan = plan_from_expert_ids(ids, sizes.experts, num_rows=slots)
        if scale is None:
            rows, scales = spread_quantized(x, plan)
        else:
            rows, scales = spread(quantize_half(x, scale, torch.zeros(1)), plan), None
        return rows, plan.row_of_slot, plan.tokens_per_expert.int(), None, scales  # type: ignore[union-attr]

    return Pair(
        lambda: torch_npu.npu_moe_init_routing_quant(
            x,
            ids,
            scale=scale,
            active_num=slots,
            expert_num=sizes.experts,
            expert_tokens_num_mode=2,
            quant_mode=quant_mode,
        ),
        core,
    )


def _finalize_routing(sizes: Sizes) -> Pair:
    rows, scales, skip = _rows(sizes), _probs(sizes, sizes.topk), _tokens(sizes)
    ids, bias = _ids(sizes), _random(sizes, sizes.experts, sizes.hidden)
    index = _sorted(ids).row_of_slot

    def core() -> Any:
        plan = plan_from_row_of_slot(index, sizes.tokens, len(rows), expert_of_slot=ids)
        return combine(rows, plan, scales.view(-1), init=skip, bias=bias)

    return Pair(
        lambda: torch_npu.npu_moe_finalize_routing(rows, skip, None, bias, scales, index, ids, 2),
        core,
    )


def _re_routing(sizes: Sizes) -> Pair:
    tokens, ranks = _rows(sizes), 8
    owner = torch.randint(ranks * sizes.experts, (len(tokens),), generator=torch.Generator().manual_seed(3))
    counts = torch.bincount(owner, minlength=ranks * sizes.experts).int().view(ranks, -1)

    def core() -> Any:
        plan = plan_from_segments(counts, len(tokens))
        return spread(tokens, plan), torch.ones(len(tokens)), plan.slot_of_row, plan.tokens_per_expert.int()  # type: ignore[union-attr]

    return Pair(lambda: torch_npu.npu_moe_re_routing(tokens, counts), core)


# ---------------------------------------------------------------------------- the table


def _cases() -> Iterator[Case]:
    bounds = {"core": 1 / SLOWEST}
    for name, make in (
        ("npu_moe_token_permute", _permute),
        ("npu_moe_token_permute num_out_tokens=S * 3 / 4", _permute_cut),
        ("npu_moe_token_permute_grad_v2", _permute_grad),
        ("npu_moe_token_unpermute", _unpermute),
        ("npu_moe_token_unpermute probs", _unpermute_probs),
        ("npu_moe_token_unpermute_grad_v2", _unpermute_grad),
        ("npu_moe_token_unpermute_grad_v2 probs", _unpermute_grad_probs),
        ("npu_moe_token_permute, _unpermute probs, backward", _training),
        ("npu_moe_token_permute_with_routing_map probs", _map_permute),
        ("npu_moe_token_permute_with_routing_map probs drop_and_pad", _map_permute_padded),
        ("npu_moe_token_permute_with_routing_map_grad probs", _map_permute_grad),
        ("npu_moe_token_permute_with_routing_map_grad probs drop_and_pad", _map_permute_grad_padded),
        ("npu_moe_token_unpermute_with_routing_map probs", _map_unpermute),
        ("npu_moe_token_unpermute_with_routing_map probs drop_and_pad", _map_unpermute_padded),
        ("npu_moe_token_unpermute_with_routing_map_grad probs", _map_unpermute_grad),
        ("npu_moe_token_unpermute_with_routing_map_grad probs drop_and_pad", _map_unpermute_grad_padded),
        ("npu_moe_gating_top_k", _gating),
        ("npu_moe_gating_top_k sigmoid groups bias", _gating_groups),
        ("npu_moe_gating_top_k_backward", _gating_backward),
        ("npu_moe_gating_top_k_softmax", _gating_softmax),
        ("npu_moe_gating_top_k_softmax_v2", partial(_gating_softmax_v2, 0)),
        ("npu_moe_gating_top_k_softmax_v2 renorm=1", partial(_gating_softmax_v2, 1)),
        ("npu_moe_init_routing_v2 quant_mode=-1", partial(_init_routing_v2, -1)),
        ("npu_moe_init_routing_v2 quant_mode=0", partial(_init_routing_v2, 0)),
        ("npu_moe_init_routing_v2 quant_mode=1", partial(_init_routing_v2, 1)),
        ("npu_moe_init_routing", _init_routing),
        ("npu_moe_init_routing_quant quant_mode=0", partial(_init_routing_quant, 0)),
        ("npu_moe_init_routing_quant quant_mode=1", partial(_init_routing_quant, 1)),
        ("npu_moe_finalize_routing skip bias", _finalize_routing),
        ("npu_moe_re_routing", _re_routing),
    ):
        yield Case(name, make, bounds | ({"roof": 0.6} if name.endswith("v2 quant_mode=1") else {}))


CASES = tuple(_cases())

# ---------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Result:
    """One case: seconds of both sides, and of a copy of as many bytes where they are the limit."""

    case: Case
    named: float
    core: float
    copy: float | None

    @property
    def ratios(self) -> dict[str, float]:
        """By the names of the bounds."""
        found = {"core": self.core / self.named}
        return found if self.copy is None else found | {"roof": self.copy / self.named}

    @property
    def missed(self) -> list[str]:
        """The bounds that do not hold."""
        ratios = self.ratios
        return [
            f"{name} {ratios[name]:.3f} < {least:.3f}"
            for name, least in self.case.bounds.items()
            if ratios[name] < least
        ]


def measure(case: Case, seconds: float, sizes: Sizes | None = None) -> Result:
    """Compare the sides, then time them."""
    pair = case.make(sizes or SIZES)
    assert_same_bits(pair.named(), pair.core(), case.name)
    sides: list[Callable[[], Any]] = [pair.named, pair.core]
    if pair.bytes:
        source = torch.ones(pair.bytes // 2, dtype=torch.uint8)
        target = memory.empty(source.shape, torch.uint8).fill_(0)
        sides.append(lambda: target.copy_(source))
    named, core, *copy = bench.take_turns(sides, seconds)
    return Result(case, named, core, copy[0] if copy else None)


def run(cases: Sequence[Case], seconds: float) -> list[Result]:
    """All in this process."""
    return [measure(case, seconds) for case in cases]
