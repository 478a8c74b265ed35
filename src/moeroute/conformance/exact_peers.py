"""The functions of hosts by definition, for inputs such as the table has: index arithmetic, and sums in float64."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance.exact_gating import choose, scores_of
from moeroute.conformance.truth import Truth, copied, rounded

HALF_UNITS = 200.0


def truths(operator: str, arguments: Mapping[str, Any], results: Mapping[str, Tensor]) -> dict[str, Truth]:
    """The truth of each result of a host's function."""
    name = operator.rpartition(".")[2]
    if "routing" in name and "topk" in name:
        return _router(**arguments)
    if name == "npu_moe_gating_top_k":
        return _npu_gate(results, **arguments)
    if "sort_chunks" in name:
        rows, sizes, order = arguments.values()
        parts = rows.split(sizes.tolist())
        return {"rows": copied(torch.cat([parts[i] for i in order.tolist()]))}
    if "unpermute" in name:
        return _unpermute(name, **arguments)
    return _permute(operator, arguments)


def _pairs(chosen: Tensor, capacity: int | None = None) -> list[tuple[int, int]]:
    """(token, expert) of each row, by expert; with a capacity filled up with tokens that did not choose it."""
    found = []
    for expert in range(chosen.shape[1]):
        tokens = [t for t in range(chosen.shape[0]) if chosen[t, expert]]
        if capacity is not None:
            tokens = (tokens + [t for t in range(chosen.shape[0]) if not chosen[t, expert]])[:capacity]
        found += [(t, expert) for t in tokens]
    return found


def _permute(operator: str, arguments: Mapping[str, Any]) -> dict[str, Truth]:
    tokens = arguments["inp"] if "inp" in arguments else arguments["tokens"]
    ids = arguments.get("indices") if "indices" in arguments else None
    if arguments.get("map_type") == "index":
        ids = arguments["routing_map"]
    if ids is not None:
        flat, topk = ids.reshape(-1).tolist(), ids.shape[1]
        order = sorted(range(len(flat)), key=lambda slot: flat[slot])
        row = [order.index(slot) for slot in range(len(flat))]
        if "indices" not in arguments:
            row = [row[t * topk + k] for k in range(topk) for t in range(ids.shape[0])]
        index = copied(torch.tensor(row, dtype=torch.int32))
        rows = copied(tokens[[slot // topk for slot in order]])
        return {"rows": rows, "sorted_indices" if "indices" in arguments else "row_id_map": index}
    chosen = arguments["routing_map"] != 0
    capacity = arguments["num_out_tokens"] // chosen.shape[1] if arguments.get("drop_and_pad") else None
    pairs = _pairs(chosen, capacity)
    rows = copied(tokens[[t for t, _ in pairs]])
    found = {"rows": rows}
    if (probs := arguments.get("probs")) is not None:
        found["row_probs"] = copied(torch.stack([probs[pair] for pair in pairs]))
    if operator.startswith("megatron"):
        return {**found, "sorted_indices": copied(torch.tensor([t for t, _ in pairs]))}
    row_of = {pair: row for row, pair in enumerate(pairs)}
    by_token = sorted(pairs)
    if operator.startswith("torch_npu"):
        return {**found, "sorted_indices": copied(torch.tensor([row_of[p] for p in by_token], dtype=torch.int32))}
    lines = []
    for token in range(chosen.shape[0]):
        mine = [pair for pair in by_token if pair[0] == token]
        spare = [-1] * (chosen.shape[1] - len(mine))
        lines.append([*[row_of[p] for p in mine], *spare, *[e for _, e in mine], *spare, len(mine)])
    return {**found, "row_id_map": copied(torch.tensor(lines, dtype=torch.int32))}


def _unpermute(
    name: str,
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: tuple[int, ...] | None = None,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
) -> dict[str, Truth]:
    rows = permuted_tokens.double()
    if restore_shape is None:  # torch_npu: the row of each slot
        topk = 1 if probs is None else probs.shape[1]
        terms = rows[sorted_indices.long()].reshape(-1, topk, rows.shape[1])
        weight = torch.ones(len(terms), topk) if probs is None else probs
        terms = terms * weight.double()[..., None]
        return {"tokens": rounded(terms.sum(1), permuted_tokens.dtype, 8 * terms.abs().sum(1))}
    weight = torch.ones(len(rows), dtype=torch.float64)
    if probs is not None and routing_map is not None:
        weight = torch.stack([probs[pair] for pair in _pairs(routing_map)]).double()
    terms, zeros = rows * weight[:, None], torch.zeros(restore_shape, dtype=torch.float64)
    magnitude = zeros.index_add(0, sorted_indices, terms.abs())
    return {"tokens": rounded(zeros.index_add(0, sorted_indices, terms), permuted_tokens.dtype, 8 * magnitude)}


def _router(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    score_function: str = "softmax",
    scaling_factor: float | None = None,
) -> dict[str, Truth]:
    exact, _ = scores_of(logits, "sigmoid" if score_function == "sigmoid" else "softmax")
    ids = choose(logits.float(), topk, None, 1, 1, "max").long()
    if score_function == "softmax" and not use_pre_softmax:
        weights = torch.softmax(logits.double().gather(1, ids), 1)
    else:
        weights = exact.gather(1, ids)
        weights = weights / weights.sum(1, keepdim=True) if score_function == "sigmoid" else weights
    weights = weights * (scaling_factor or 1.0)
    probs = torch.zeros_like(exact).scatter(1, ids, weights)
    chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, ids, True)
    return {"probs": rounded(probs, logits.dtype, HALF_UNITS * probs.abs()), "routing_map": copied(chosen)}


def _npu_gate(results: Mapping[str, Tensor], x: Tensor, k: int, out_flag: bool, norm_type: int) -> dict[str, Truth]:
    exact, _ = scores_of(x, ("softmax", "sigmoid")[norm_type])
    ids = choose(results["scores"].cpu(), k, None, 1, 1, "max")
    weights = exact.gather(1, ids.long())
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) if norm_type else weights
    return {
        "weights": rounded(weights, x.dtype, HALF_UNITS * weights.abs()),
        "expert_ids": copied(ids),
        "scores": rounded(exact, torch.float32, HALF_UNITS * exact.abs()),
    }
