"""Cases under other libraries' names: the same inputs through the interop modules of this package.

They show that those names keep their meaning, and judge functions that have a host's signature: a target's
`moe_permute` gets the arguments that Transformer Engine's gets.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from moeroute.conformance.case import Case
from moeroute.conformance.exact_plans import as_plan, plan_from_expert_ids, plan_from_routing_map
from moeroute.conformance.gating_cases import DTYPES, short
from moeroute.conformance.generator import Stream

Options = dict[str, Any]
SIZES = (21, 8, 3, 72)  # tokens, experts, slots of a token, hidden size
MODULES = {name: f"moeroute.interop.{name}" for name in ("megatron", "transformer_engine", "torch_npu")}
# Arguments that only this package's functions have: they are left out for a host.
OURS_ONLY = frozenset({"generation"})


def peer_cases() -> Iterator[Case]:
    """Every host's permute, unpermute, chunks and gate."""
    for dtype in DTYPES:
        yield from _megatron(dtype)
        yield from _transformer_engine(dtype)
        yield from _torch_npu(dtype)


def _case(operator: str, words: str, make: Any) -> Case:
    return Case(f"{operator} {words}", operator, make, frozenset({"host"}), MODULES[operator.split(".")[0]], "peers")


def _map(draw: Stream) -> torch.Tensor:
    """bool [T, E] with exactly K true entries a token."""
    num_tokens, experts, topk, _ = SIZES
    chosen = torch.zeros(num_tokens, experts, dtype=torch.bool)
    return chosen.scatter(1, draw.distinct("map", num_tokens, experts, topk), True)


def _tokens(dtype: torch.dtype, draw: Stream, rows: bool = False) -> torch.Tensor:
    return draw.normal("rows" if rows else "tokens", SIZES[0] * (SIZES[2] if rows else 1), SIZES[3]).to(dtype)


def _probs(draw: Stream, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return draw.uniform("probs", SIZES[0], SIZES[1]).to(dtype) * _map(draw)


def _megatron(dtype: torch.dtype) -> Iterator[Case]:
    count = SIZES[0] * SIZES[2]

    def permute(draw: Stream, probs: bool = False, pad: bool = False) -> Options:
        found: Options = {"tokens": _tokens(dtype, draw), "routing_map": _map(draw)}
        if probs:
            found["probs"] = _probs(draw)
        if pad:
            return {**found, "num_out_tokens": SIZES[1] * 5, "drop_and_pad": True, "generation": "0.16"}
        return {**found, "num_out_tokens": count, "generation": "0.16"}

    def unpermute(draw: Stream, probs: bool) -> Options:
        plan = as_plan(plan_from_routing_map(_map(draw)))
        found: Options = {
            "permuted_tokens": _tokens(dtype, draw, True),
            "sorted_indices": plan.token_of_row.long(),
            "restore_shape": (SIZES[0], SIZES[3]),
        }
        return {**found, "probs": _probs(draw), "routing_map": _map(draw)} if probs else found

    def chunks(draw: Stream) -> Options:
        sizes = torch.tensor([5, 0, 9, 7, 22, 20])
        order = draw.permutation("order", 6)
        return {"input": _tokens(dtype, draw, True), "split_sizes": sizes, "sorted_idxs": order}

    def gate(draw: Stream, **options: Any) -> Options:
        return {"logits": draw.normal("logits", SIZES[0], SIZES[1]).to(dtype), "topk": SIZES[2], **options}

    name = short(dtype)
    yield _case("megatron.permute", name, permute)
    yield _case("megatron.permute", f"{name} probs", partial(permute, probs=True))
    yield _case("megatron.permute", f"{name} probs drop_and_pad", partial(permute, probs=True, pad=True))
    yield _case("megatron.unpermute", name, partial(unpermute, probs=False))
    yield _case("megatron.unpermute", f"{name} probs", partial(unpermute, probs=True))
    yield _case("megatron.sort_chunks_by_idxs", name, chunks)
    yield _case("megatron.topk_routing_with_score_function", f"{name} softmax", gate)
    pre = partial(gate, use_pre_softmax=True)
    yield _case("megatron.topk_routing_with_score_function", f"{name} softmax, then the choice", pre)
    sigmoid = partial(gate, score_function="sigmoid", scaling_factor=2.5)
    yield _case("megatron.topk_routing_with_score_function", f"{name} sigmoid", sigmoid)


def _transformer_engine(dtype: torch.dtype) -> Iterator[Case]:
    count = SIZES[0] * SIZES[2]

    def permute(draw: Stream, **options: Any) -> Options:
        return {"inp": _tokens(dtype, draw), "routing_map": _map(draw).int(), "num_out_tokens": count, **options}

    def by_index(draw: Stream) -> Options:
        ids = draw.distinct("map", SIZES[0], SIZES[1], SIZES[2]).int()
        return {"inp": _tokens(dtype, draw), "routing_map": ids, "num_out_tokens": count, "map_type": "index"}

    def with_probs(draw: Stream) -> Options:
        return {**permute(draw), "probs": _probs(draw)}

    def chunks(draw: Stream) -> Options:
        sizes = torch.tensor([5, 0, 9, 7, 22, 20])
        order = draw.permutation("order", 6)
        return {"inp": _tokens(dtype, draw, True), "split_sizes": sizes, "sorted_index": order}

    name = short(dtype)
    yield _case("transformer_engine.moe_permute", f"{name} mask", permute)
    yield _case("transformer_engine.moe_permute", f"{name} index", by_index)
    yield _case("transformer_engine.moe_permute_with_probs", name, with_probs)
    yield _case("transformer_engine.moe_sort_chunks_by_index", name, chunks)


def _torch_npu(dtype: torch.dtype) -> Iterator[Case]:
    num_tokens, experts, topk, _ = SIZES

    def permute(draw: Stream) -> Options:
        ids = draw.distinct("map", num_tokens, experts, topk).int()
        return {"tokens": _tokens(dtype, draw), "indices": ids}

    def unpermute(draw: Stream, probs: bool) -> Options:
        ids = draw.distinct("map", num_tokens, experts, topk)
        plan = as_plan(plan_from_expert_ids(ids, experts))
        found: Options = {"permuted_tokens": _tokens(dtype, draw, True), "sorted_indices": plan.row_of_slot}
        return {**found, "probs": draw.uniform("probs", num_tokens, topk)} if probs else found

    def by_map(draw: Stream) -> Options:
        return {"tokens": _tokens(dtype, draw), "routing_map": _map(draw), "num_out_tokens": num_tokens * topk}

    def gate(draw: Stream, **options: int) -> Options:
        return {"x": draw.normal("logits", num_tokens, experts).to(dtype), "k": topk, "out_flag": True, **options}

    name = short(dtype)
    yield _case("torch_npu.npu_moe_token_permute", name, permute)
    yield _case("torch_npu.npu_moe_token_unpermute", name, partial(unpermute, probs=False))
    yield _case("torch_npu.npu_moe_token_unpermute", f"{name} probs", partial(unpermute, probs=True))
    yield _case("torch_npu.npu_moe_token_permute_with_routing_map", name, by_map)
    for norm_type, score in enumerate(("softmax", "sigmoid")):
        yield _case("torch_npu.npu_moe_gating_top_k", f"{name} {score}", partial(gate, norm_type=norm_type))
