"""MoeTokenPermuteWithRoutingMap, MoeTokenUnpermuteWithRoutingMap and their gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moeroute
from aclnn_calls import (
    GOOD,
    INNER_NULL,
    INVALID,
    NULL,
    ROUNDING,
    TILING,
    X34,
    call_refused,
    cases,
    close,
    empty_ids,
    f32,
    i32,
    on_every_backend,
    ones,
    outputs_of,
    poison,
    prepare,
    routing_map,
    run,
    same,
    spoken,
    zeros_where_nothing_is_to_do,
)
from aclnn_drawn import (
    BF16,
    F16,
    F32,
    MIXTURES,
    SEEDS,
    SIZES,
    gathered,
    generator_of,
    integers,
    normal,
    placed,
    seed_bit,
    skip_large,
)
from moeroute import aclnn
from moeroute.aclnn import core
from moeroute.aclnn.signatures import SIGNATURES
from moeroute.testing import assert_same_bits

# ---------------------------------------------------------------------------- worked numbers


@on_every_backend
def test_unpermute_with_routing_map_grad_of_the_document() -> None:
    rows_out, probs_out = poison(2, 2), poison(1, 2)
    run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        torch.ones(1, 2), i32([0, 1]), i32([0, 0]), torch.ones(1, 2, dtype=torch.bool), torch.ones(2, 2),
        torch.ones(1, 2), False, None, rows_out, probs_out,
    )  # fmt: skip
    same(rows_out, torch.ones(2, 2))
    same(probs_out, [[2.0, 2.0]])


@pytest.mark.parametrize("generated", (False, True))
def test_permute_with_routing_map_grad_in_the_shape_of_the_document(generated: bool) -> None:
    """The shipped example at a tenth of its hidden size: 4096 tokens, 256 experts, capacity 16."""
    tokens_num, hidden, experts_num, capacity = 4096, 64, 256, 16
    rows = experts_num * capacity
    indices = torch.zeros(rows, dtype=torch.int32)
    if generated:
        indices = torch.arange(rows, dtype=torch.int32) * 7 % tokens_num
    token_out, probs_out = poison(tokens_num, hidden), poison(tokens_num, experts_num)
    run(
        "MoeTokenPermuteWithRoutingMapGrad",
        torch.zeros(rows, hidden), torch.full((rows,), 0.1), indices,
        torch.ones(tokens_num, experts_num, dtype=torch.int8), experts_num, tokens_num, True, token_out, probs_out,
        workspace=16 * 2**20,
    )  # fmt: skip
    same(token_out, torch.zeros(tokens_num, hidden))
    expected = torch.zeros(tokens_num, experts_num)
    expected[indices.long(), torch.arange(rows) // capacity] = 0.1
    same(probs_out, expected)
    if not generated:
        same(probs_out[0], torch.full((experts_num,), 0.1))


@on_every_backend
def test_permute_with_routing_map_of_the_document() -> None:
    rows, indices = poison(6, 4), poison(6, dtype=torch.int32)
    routing_map = torch.ones(3, 2, dtype=torch.int8)
    run("MoeTokenPermuteWithRoutingMap", f32(X34), routing_map, None, 6, False, rows, None, indices)
    same(indices, [0, 3, 1, 4, 2, 5])
    same(rows, [X34[t] for t in (0, 1, 2, 0, 1, 2)])


@on_every_backend
def test_unpermute_with_routing_map_of_the_document_padded() -> None:
    ones, indices = torch.ones(2, 2), [poison(2, dtype=torch.int32) for _ in range(2)]
    out, probs = poison(2, 2), poison(2)
    arguments = ones, i32([1, 1]), ones.to(torch.int8), ones, True, [2, 2], out, *indices, probs
    run("MoeTokenUnpermuteWithRoutingMap", *arguments)
    same(out, [[0.0, 0.0], [2.0, 2.0]])
    same(indices[0], [0, 1])
    same(indices[1], [1, 1])
    same(probs, [1.0, 1.0])


@on_every_backend
def test_unpermute_with_routing_map_of_the_document_without_probs() -> None:
    rows = f32([[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400], [1000, 2000, 3000, 4000]])
    out, indices = poison(2, 4), [poison(4, dtype=torch.int32) for _ in range(2)]
    arguments = rows, i32([0, 1, 2, 3]), None, None, False, [2, 4], out, *indices, torch.empty(0)
    run("MoeTokenUnpermuteWithRoutingMap", *arguments)
    same(out, [[11.0, 22.0, 33.0, 44.0], [1100.0, 2200.0, 3300.0, 4400.0]])
    same(indices[0], [0, 1, 2, 3])
    same(indices[1], [0, 0, 1, 1])


@on_every_backend
def test_unpermute_with_routing_map_of_the_document_with_an_unused_slot() -> None:
    rows = f32([[2, 4, 6, 8], [4, 8, 12, 16], [8, 16, 24, 32], [100, 200, 300, 400]])
    out, indices, probs = poison(2, 4), [poison(4, dtype=torch.int32) for _ in range(2)], poison(4)
    weights = f32([[0.5, 0.0], [0.25, 0.75]])
    arguments = rows, i32([0, -1, 1, 2]), torch.ones(2, 2, dtype=torch.int8), weights, False, [2, 4]
    run("MoeTokenUnpermuteWithRoutingMap", *arguments, out, *indices, probs)
    same(out, [[1.0, 2.0, 3.0, 4.0], [7.0, 14.0, 21.0, 28.0]])
    same(probs, [0.5, 0.0, 0.25, 0.75])
    same(indices[0], [0, -1, 1, 2])


# ---------------------------------------------------------------------------- refusals


REFUSED: list[tuple[str, dict[str, Any], int]] = [
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"unpermutedTokensGrad": ones(6)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"outIndex": i32([[0, 1, 2, 3, 4, 5]])}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permuteTokenId": i32([0, 1])}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"routingMapOptional": torch.ones(12, dtype=torch.bool)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"routingMapOptional": torch.ones(3, 5, dtype=torch.bool)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"routingMapOptional": torch.ones(3, 4, dtype=torch.uint8)}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permutedTokensOptional": ones(12)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permutedTokensOptional": ones(5, 2)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permutedTokensOptional": ones(6, 2).half()}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"probsOptional": ones(12)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"probsOptional": ones(2, 4)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"probsOptional": ones(3, 4).half(), "probsGradOutOptional": poison(3, 4).half()}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"probsGradOutOptional": poison(3, 4).half()}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permutedTokensGradOut": poison(5, 2)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permutedTokensGradOut": poison(7, 2), "permutedTokensOptional": ones(7, 2)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permutedTokensGradOut": poison(7, 2), "probsOptional": None}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permutedTokensGradOut": poison(3, 2), "probsOptional": None, "dropAndPad": True}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permutedTokensGradOut": poison(6), "probsOptional": None}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"outIndex": i32([0] * 7), "permuteTokenId": i32([0] * 7)}, TILING),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"permutedTokensGradOut": poison(6, 3)}, TILING),
    ("MoeTokenPermuteWithRoutingMapGrad", {"experts_num": 0}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"experts_num": -4}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"tokens_num": 0}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"permutedTokensOutputGrad": ones(12)}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"routingMapOptional": torch.ones(12, dtype=torch.bool)}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"routingMapOptional": torch.ones(4, 3, dtype=torch.bool)}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"permutedProbsOutputGradOptional": ones(6, 1)}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"permutedProbsOutputGradOptional": ones(5)}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"sortedIndices": i32([0, 1])}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"tokens_num": 4}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"dropAndPad": True}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"tokenGradOut": poison(3, 2).half()}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"probsGradOutOptional": poison(3, 4).half()}, INVALID),
    ("MoeTokenPermuteWithRoutingMapGrad", {"permutedProbsOutputGradOptional": ones(6).half(), "probsGradOutOptional": poison(3, 4).half()}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"routingMap": torch.ones(3, 4, 1, dtype=torch.bool)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"probsOptional": ones(3, 4, 1)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"probsOptional": ones(3, 5)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"probsOptional": ones(3, 4).half(), "permuteProbsOutOptional": poison(6).half()}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": ones(3, 2).half(), "permuteTokensOut": poison(6, 2).half()}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": ones(6)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": ones(4, 2)}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": -1}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": 13}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": 9}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"probsOptional": None}, INVALID),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": 2, "permuteTokensOut": torch.empty(0, 2), "permuteProbsOutOptional": torch.empty(0), "sortedIndicesOut": empty_ids(0)}, INNER_NULL),
    ("MoeTokenPermuteWithRoutingMap", {"routingMap": torch.ones(3, 600, dtype=torch.bool), "probsOptional": ones(3, 600), "numOutTokens": 3 * 513, "permuteTokensOut": poison(1539, 2), "permuteProbsOutOptional": poison(1539), "sortedIndicesOut": empty_ids(1539)}, INNER_NULL),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "restoreShapeOptional": None}, NULL),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "routingMapOptional": None, "restoreShapeOptional": [3]}, INNER_NULL),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "routingMapOptional": None, "restoreShapeOptional": [3, 4]}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "routingMapOptional": None, "restoreShapeOptional": [2, 2]}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": ones(12)}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": ones(5, 2)}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"sortedIndices": i32([[0, 1, 2, 3, 4, 5]])}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"routingMapOptional": torch.ones(3, 5, dtype=torch.bool)}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": ones(12)}, INNER_NULL),
    ("MoeTokenUnpermuteWithRoutingMap", {"permuteProbs": poison(6).half()}, INVALID),
    ("MoeTokenUnpermuteWithRoutingMap", {"unpermutedTokens": poison(3, 2).half()}, INVALID),
]  # fmt: skip


@cases("name, changes, code", REFUSED)
def test_refused(name: str, changes: dict[str, Any], code: int) -> None:
    call_refused(name, changes, code)


ORDER: list[tuple[str, dict[str, Any], int, str]] = [
    # 3: nulls and dtypes before what tiling finds
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"outIndex": None, "routingMapOptional": None}, NULL, "outIndex"),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"outIndex": torch.zeros(6), "routingMapOptional": None}, INVALID, "outIndex"),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"routingMapOptional": None, "unpermutedTokensGrad": ones(6)}, TILING, "routingMapOptional"),
    # 4: attributes, nulls, dtypes, ranks
    ("MoeTokenPermuteWithRoutingMapGrad", {"experts_num": 0, "permutedTokensOutputGrad": None}, INVALID, "experts_num"),
    ("MoeTokenPermuteWithRoutingMapGrad", {"experts_num": 0, "tokens_num": 0}, INVALID, "experts_num"),
    ("MoeTokenPermuteWithRoutingMapGrad", {"tokens_num": 0, "sortedIndices": None}, INVALID, "tokens_num"),
    ("MoeTokenPermuteWithRoutingMapGrad", {"sortedIndices": torch.zeros(6), "tokenGradOut": None}, NULL, "tokenGradOut"),
    ("MoeTokenPermuteWithRoutingMapGrad", {"sortedIndices": torch.zeros(6), "routingMapOptional": None}, NULL, "routingMapOptional"),
    ("MoeTokenPermuteWithRoutingMapGrad", {"sortedIndices": torch.zeros(6), "permutedTokensOutputGrad": ones(12)}, INVALID, "sortedIndices"),
    # 8: nulls, dtypes, ranks, numOutTokens, output rows
    ("MoeTokenPermuteWithRoutingMap", {"permuteProbsOutOptional": None, "tokens": torch.ones(3, 2).double()}, NULL, "permuteProbsOut"),
    ("MoeTokenPermuteWithRoutingMap", {"routingMap": torch.ones(12, dtype=torch.bool), "numOutTokens": -1}, INVALID, "routingMap"),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": ones(6), "numOutTokens": -1}, INVALID, "tokens"),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": -1, "permuteTokensOut": poison(5, 2)}, INVALID, "numOutTokens"),
    # 9: both null before dtypes; dtypes before ranks
    ("MoeTokenUnpermuteWithRoutingMap", {"probsOptional": None, "restoreShapeOptional": None, "sortedIndices": torch.zeros(6)}, NULL, "restoreShapeOptional"),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": ones(12), "outIndex": poison(6)}, INVALID, "outIndex"),
]  # fmt: skip


@cases("name, changes, code, what", ORDER)
def test_order_of_checks(name: str, changes: dict[str, Any], code: int, what: str) -> None:
    assert what in call_refused(name, changes, code)


@pytest.mark.parametrize("num_experts, dtype, code", (
    # (196608 - 5 * E32 - 12 * 256) / 36 >= 1  <=>  E32 <= 38700.8
    (38_688, torch.float32, 0), (38_689, torch.float32, TILING),
    # (196608 - 3 * E32 - 10 * 256) / 24 >= 1  <=>  E32 <= 64674.7
    (64_672, torch.bfloat16, 0), (64_673, torch.bfloat16, TILING),
), ids=spoken)  # fmt: skip
def test_experts_that_the_unified_buffer_holds(num_experts: int, dtype: torch.dtype, code: int) -> None:
    arguments = GOOD["MoeTokenUnpermuteWithRoutingMapGrad"]() | {
        "unpermutedTokensGrad": ones(3, 2, dtype=dtype), "permutedTokensOptional": ones(6, 2, dtype=dtype),
        "permutedTokensGradOut": poison(6, 2, dtype=dtype),
        "routingMapOptional": torch.zeros(3, num_experts, dtype=torch.bool),
        "probsOptional": ones(3, num_experts, dtype=dtype),
        "probsGradOutOptional": poison(3, num_experts, dtype=dtype),
    }  # fmt: skip
    assert prepare("MoeTokenUnpermuteWithRoutingMapGrad", *arguments.values())[0] == code


@pytest.mark.parametrize("more, code", ((0, 0), (1, TILING)))
@pytest.mark.parametrize("ub_bytes, dtype, bound", (
    (196_608, torch.float32, 256 * (196_608 - 2080) // 12), (196_608, torch.float16, 256 * (196_608 - 2080) // 10),
    (4096, torch.float32, 256 * 2016 // 12),
), ids=spoken)  # fmt: skip
def test_hidden_size_that_the_unified_buffer_holds(
    ub_bytes: int, dtype: torch.dtype, bound: int, more: int, code: int
) -> None:
    """At the documents' 196,608 bytes, the default, and at another size."""
    hidden = bound + more
    arguments = GOOD["MoeTokenUnpermuteWithRoutingMapGrad"]() | {
        "unpermutedTokensGrad": ones(1, 1, dtype=dtype).expand(1, hidden), "outIndex": i32([0]),
        "permuteTokenId": i32([0]), "permutedTokensOptional": ones(1, 1, dtype=dtype).expand(1, hidden),
        "permutedTokensGradOut": torch.empty(1, hidden, dtype=dtype), "routingMapOptional": torch.ones(1, 1, dtype=torch.bool),
        "probsOptional": ones(1, 1, dtype=dtype), "probsGradOutOptional": poison(1, 1, dtype=dtype), "dropAndPad": True,
    }  # fmt: skip
    former = core.ub_bytes()
    assert core.set_ub_bytes(ub_bytes) == former == 196_608
    try:
        assert prepare("MoeTokenUnpermuteWithRoutingMapGrad", *arguments.values())[0] == code
    finally:
        assert core.set_ub_bytes(former) == ub_bytes


@pytest.mark.parametrize("topk, code", ((512, 0), (513, INNER_NULL)))
def test_topk_of_512_is_the_last_of_permute_grad(topk: int, code: int) -> None:
    rows = 2 * topk
    arguments = GOOD["MoeTokenPermuteWithRoutingMapGrad"]() | {
        "permutedTokensOutputGrad": ones(rows, 1), "permutedProbsOutputGradOptional": None,
        "sortedIndices": torch.zeros(rows, dtype=torch.int32), "routingMapOptional": None, "tokens_num": 2,
        "tokenGradOut": poison(2, 1),
    }  # fmt: skip
    assert prepare("MoeTokenPermuteWithRoutingMapGrad", *arguments.values())[0] == code


@pytest.mark.parametrize("topk, with_probs, code", ((512, True, 0), (513, True, TILING), (513, False, 0)))
def test_topk_of_512_is_the_last_of_unpermute_grad(topk: int, with_probs: bool, code: int) -> None:
    """K is bounded with probs only."""
    rows = 2 * topk
    arguments = GOOD["MoeTokenUnpermuteWithRoutingMapGrad"]() | {
        "unpermutedTokensGrad": ones(2, 1), "outIndex": torch.zeros(rows, dtype=torch.int32),
        "permuteTokenId": torch.zeros(rows, dtype=torch.int32), "permutedTokensOptional": ones(rows, 1),
        "permutedTokensGradOut": poison(rows, 1), "routingMapOptional": torch.ones(2, 600, dtype=torch.bool),
        "probsOptional": ones(2, 600), "probsGradOutOptional": poison(2, 600),
    }  # fmt: skip
    if not with_probs:
        names = ("routingMapOptional", "permutedTokensOptional", "probsOptional", "probsGradOutOptional")
        arguments |= dict.fromkeys(names)
    assert prepare("MoeTokenUnpermuteWithRoutingMapGrad", *arguments.values())[0] == code


def test_capacity_over_tokens_is_refused() -> None:
    arguments = GOOD["MoeTokenUnpermuteWithRoutingMapGrad"]() | {
        "outIndex": i32(range(16)), "permuteTokenId": i32([0] * 16), "permutedTokensOptional": ones(16, 2),
        "permutedTokensGradOut": poison(16, 2), "dropAndPad": True,
    }  # fmt: skip
    assert prepare("MoeTokenUnpermuteWithRoutingMapGrad", *arguments.values())[0] == TILING
    assert "C, the length of outIndex / E" in aclnn.aclGetRecentErrMsg()


# ---------------------------------------------------------------------------- drawn inputs


def draw_map(generator: torch.Generator, num_tokens: int, num_experts: int) -> Tensor:
    dense = torch.rand(1, generator=generator)
    chosen = torch.rand(num_tokens, num_experts, generator=generator) < dense
    return (
        chosen
        if seed_bit(generator)
        else chosen.to(torch.int8) * integers(generator, 1, 4, 1, num_experts).to(torch.int8)
    )


def table_of(routing_map: Tensor, topk: int) -> tuple[list[int], list[int]]:
    """Row and expert of every slot of the padded table."""
    chosen = (routing_map != 0).tolist()
    num_tokens, num_experts = routing_map.shape
    row, number = 0, {}
    for expert in range(num_experts):
        for token in range(num_tokens):
            if chosen[token][expert]:
                number[token, expert] = row
                row += 1
    rows, experts = [], []
    for token in range(num_tokens):
        own = [expert for expert in range(num_experts) if chosen[token][expert]][:topk]
        own += [-1] * (topk - len(own))
        experts += own
        rows += [number.get((token, expert), -1) for expert in own]
    return rows, experts


def probs_of_slots(probs: Tensor, experts: list[int], topk: int) -> Tensor:
    values = [float(probs[s // topk, e]) if e >= 0 else 0.0 for s, e in enumerate(experts)]
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=60)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.booleans())
def test_routing_map_family_ragged(
    sizes: tuple[int, int, int, int], seed: int, mixture: tuple[torch.dtype, torch.dtype], with_probs: bool
) -> None:
    """Operators 8, 9, 3 and 4 fed by each other, tokens with fewer and with more than K experts."""
    num_tokens, topk, num_experts, hidden = sizes
    topk = min(topk, num_experts)
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    routing_map = draw_map(generator, num_tokens, num_experts)
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    given_probs, given_map = (probs, routing_map) if with_probs else (None, None)
    table, experts = table_of(routing_map, topk)
    slots = num_tokens * topk
    count = slots
    weights = probs_of_slots(probs, experts, topk) if with_probs else torch.ones(slots, dtype=torch.float64)

    # 8
    rows, indices = poison(count, hidden, dtype=dtype), empty_ids(slots)
    row_probs = poison(count, dtype=probs_dtype) if with_probs else None
    num_out = slots + int(integers(generator, 0, num_tokens))  # what does not divide is cut
    num_out = min(num_out, num_tokens * num_experts)
    run("MoeTokenPermuteWithRoutingMap", x, routing_map, given_probs, num_out, False, rows, row_probs, indices)
    same(indices, table)
    same(rows, placed(x.repeat_interleave(topk, 0), table, count))
    if row_probs is not None:
        same(row_probs, placed(weights, table, count))

    # 9
    y = normal(generator, count, hidden, dtype=dtype)
    out, out_index, token_ids = poison(num_tokens, hidden, dtype=dtype), empty_ids(slots), empty_ids(slots)
    slot_probs = poison(slots, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenUnpermuteWithRoutingMap",
        y, indices, given_map, given_probs, False, [num_tokens, hidden], out, out_index, token_ids, slot_probs,
    )  # fmt: skip
    slot_rows = gathered(y, table)
    close(out, (slot_rows * weights[:, None]).reshape(num_tokens, topk, hidden).sum(1))
    same(out_index, table)
    same(token_ids, [s // topk for s in range(slots)])
    if slot_probs is not None:
        same(slot_probs, weights)

    # 3
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    spread_grad = grad.double().repeat_interleave(topk, 0)
    rows_out = poison(count, hidden, dtype=dtype)
    probs_out = poison(num_tokens, num_experts, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        grad, out_index, token_ids, given_map, y if with_probs else None, given_probs, False, None, rows_out, probs_out,
    )  # fmt: skip
    close(rows_out, placed(spread_grad * weights[:, None], table, count))
    if probs_out is not None:
        dots = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
        for slot, expert in enumerate(experts):
            if expert >= 0:
                dots[slot // topk, expert] = (slot_rows[slot] * spread_grad[slot]).sum()
        close(probs_out, dots)

    # 4
    tokens_out = poison(num_tokens, hidden, dtype=dtype)
    probs_out = poison(num_tokens, num_experts, dtype=probs_dtype)
    row_grad = normal(generator, count, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenPermuteWithRoutingMapGrad",
        y, row_grad, indices, routing_map, num_experts, num_tokens, False, tokens_out, probs_out, workspace=16 * 2**20,
    )  # fmt: skip
    close(tokens_out, slot_rows.reshape(num_tokens, topk, hidden).sum(1))
    if row_grad is None:
        assert probs_out.isnan().all()
        return
    expected = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    used = 0
    for expert in range(num_experts):
        for token in range(num_tokens):
            if routing_map[token, expert]:
                if used < count:
                    expected[token, expert] = float(row_grad[used])
                used += 1
    same(probs_out, expected)


@settings(max_examples=60)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.booleans(), st.booleans())
def test_routing_map_family_padded(
    sizes: tuple[int, int, int, int], seed: int, mixture: tuple[torch.dtype, torch.dtype], with_probs: bool, wild: bool
) -> None:
    """The same four with a capacity; `wild` feeds token ids that are out of range and repeated."""
    num_tokens, capacity, num_experts, hidden = sizes
    capacity = min(capacity, num_tokens)
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    routing_map = draw_map(generator, num_tokens, num_experts)
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    given_probs = probs if with_probs else None
    count = num_experts * capacity

    # 8
    tokens = []
    for expert in range(num_experts):
        column = [bool(one) for one in routing_map[:, expert]]
        tokens += sorted(range(num_tokens), key=lambda t: not column[t])[:capacity]
    rows, indices = poison(count, hidden, dtype=dtype), empty_ids(count)
    row_probs = poison(count, dtype=probs_dtype) if with_probs else None
    num_out = min(count + int(integers(generator, 0, num_experts)), num_tokens * num_experts)
    run("MoeTokenPermuteWithRoutingMap", x, routing_map, given_probs, num_out, True, rows, row_probs, indices)
    same(indices, tokens)
    same(rows, x[tokens])
    if row_probs is not None:
        same(row_probs, [probs[t, i // capacity] for i, t in enumerate(tokens)])

    if wild:
        indices = integers(generator, -1, num_tokens + 1, count)
        tokens = indices.tolist()
    known = [(i, t) for i, t in enumerate(tokens) if 0 <= t < num_tokens]
    weight = [
        float(probs[t, i // capacity]) if with_probs and 0 <= t < num_tokens else 1.0 for i, t in enumerate(tokens)
    ]

    # 9
    y = normal(generator, count, hidden, dtype=dtype)
    out, out_index, token_ids = poison(num_tokens, hidden, dtype=dtype), empty_ids(count), empty_ids(count)
    row_probs = poison(count, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenUnpermuteWithRoutingMap",
        y, indices, routing_map if with_probs else None, given_probs, True, [num_tokens, hidden], out, out_index,
        token_ids, row_probs,
    )  # fmt: skip
    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    for i, t in known:
        expected[t] += weight[i] * y[i].double()
    close(out, expected)
    ordered = sorted(known, key=lambda pair: pair[1])
    empty = [-1] * (count - len(ordered))
    same(out_index, [i for i, _ in ordered] + empty)
    same(token_ids, [t for _, t in ordered] + empty)
    if row_probs is not None:
        same(row_probs, [weight[i] if 0 <= t < num_tokens else 0.0 for i, t in enumerate(tokens)])

    # 3
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    rows_out = poison(count, hidden, dtype=dtype)
    probs_out = poison(num_tokens, num_experts, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        grad, out_index, token_ids, routing_map if with_probs else None, y if with_probs else None, given_probs, True,
        [num_tokens, hidden], rows_out, probs_out,
    )  # fmt: skip
    expected = torch.zeros(count, hidden, dtype=torch.float64)
    dots = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    for i, t in known:
        expected[i] = weight[i] * grad[t].double()
        dots[t, i // capacity] = (y[i].double() * grad[t].double()).sum()  # the last row of a pair stays
    close(rows_out, expected)
    if probs_out is not None:
        close(probs_out, dots)

    # 4
    tokens_out = poison(num_tokens, hidden, dtype=dtype)
    probs_out = poison(num_tokens, num_experts, dtype=probs_dtype)
    row_grad = normal(generator, count, dtype=probs_dtype) if with_probs else None
    run(
        "MoeTokenPermuteWithRoutingMapGrad",
        y, row_grad, indices, routing_map, num_experts, num_tokens, True, tokens_out, probs_out, workspace=16 * 2**20,
    )  # fmt: skip
    expected, stored = torch.zeros(num_tokens, hidden, dtype=torch.float64), torch.zeros(num_tokens, num_experts)
    for i, t in known:
        expected[t] += y[i].double()
        if row_grad is not None:
            stored[t, i // capacity] = row_grad[i].float()
    close(tokens_out, expected)
    if row_grad is not None:
        same(probs_out, stored)


@settings(max_examples=40)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.booleans())
def test_unpermute_with_routing_map_grad_of_any_indices(
    sizes: tuple[int, int, int, int], seed: int, mixture: tuple[torch.dtype, torch.dtype], padded: bool
) -> None:
    """Indices that name rows twice, not at all, or out of range."""
    num_tokens, topk, num_experts, hidden = sizes
    topk = min(topk, num_tokens if padded else num_experts)
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    slots = topk * (num_experts if padded else num_tokens)
    routing_map = draw_map(generator, num_tokens, num_experts)
    out_index = integers(generator, -3, slots + 3, slots)
    token_ids = integers(generator, -1, num_tokens + 1, slots)
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    rows = normal(generator, slots, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    rows_out, probs_out = poison(slots, hidden, dtype=dtype), poison(num_tokens, num_experts, dtype=probs_dtype)
    run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        grad, out_index, token_ids, routing_map, rows, probs, padded, None, rows_out, probs_out,
    )  # fmt: skip
    expected = torch.zeros(slots, hidden, dtype=torch.float64)
    dots = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    _, experts = table_of(routing_map, topk)
    entries = list(enumerate(out_index.tolist()))
    if padded:  # slots are the entries grouped by token
        entries = [(i, r) for i, r in entries if 0 <= token_ids[i] < num_tokens]
        entries.sort(key=lambda entry: int(token_ids[entry[0]]))
    for i, row in entries:
        token = int(token_ids[i]) if padded else i // topk
        valid = 0 <= row < slots
        expert = (row // topk if valid else -1) if padded else experts[i]
        if valid:
            expected[row] = (float(probs[token, expert]) if expert >= 0 else 0.0) * grad[token].double()
        if expert >= 0:
            dots[token, expert] = (rows[row].double() * grad[token].double()).sum() if valid else 0.0
    close(rows_out, expected)
    close(probs_out, dots)


@settings(max_examples=40)
@given(SIZES, SEEDS, st.sampled_from(MIXTURES), st.booleans(), st.booleans())
def test_unpermute_with_routing_map_grad_of_fewer_rows_than_slots(
    sizes: tuple[int, int, int, int],
    seed: int,
    mixture: tuple[torch.dtype, torch.dtype],
    with_probs: bool,
    cut: bool,
) -> None:
    """As many rows as the table names; with `cut` one less, and the slot whose row is gone adds nothing."""
    num_tokens, topk, num_experts, hidden = sizes
    topk = min(topk, num_experts)
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    routing_map = torch.rand(num_tokens, num_experts, generator=generator).argsort(1) < topk
    routing_map &= torch.rand(num_tokens, num_experts, generator=generator) < 0.7
    table, experts = table_of(routing_map, topk)
    count = max(sum(row >= 0 for row in table) - cut, 0)
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    rows = normal(generator, count, hidden, dtype=dtype)
    probs = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    rows_out, probs_out = poison(count, hidden, dtype=dtype), poison(num_tokens, num_experts, dtype=probs_dtype)
    given_probs = probs if with_probs else None
    run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        grad,
        i32(table),
        i32(table),
        routing_map,
        rows,
        given_probs,
        False,
        [1],
        rows_out,
        probs_out,
    )
    expected = torch.zeros(count, hidden, dtype=torch.float64)
    dots = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    for slot, row in enumerate(table):
        token = slot // topk
        if 0 <= row < count:
            weight = float(probs[token, experts[slot]]) if with_probs else 1.0
            expected[row] = weight * grad[token].double()
            dots[token, experts[slot]] = (rows[row].double() * grad[token].double()).sum()
    close(rows_out, expected)
    if with_probs:
        close(probs_out, dots)
    else:
        assert probs_out.isnan().all()


# What is not read without probs, as callers pass it, and what nobody could read.
UNREAD: dict[str, dict[str, tuple[Tensor, ...]]] = {
    "MoeTokenUnpermuteWithRoutingMap": {
        "routingMapOptional": (routing_map(), ones(1, dtype=torch.float64)),
        "permuteProbs": (poison(6), poison(2, dtype=torch.int64)),
    },
    "MoeTokenUnpermuteWithRoutingMapGrad": {
        "routingMapOptional": (routing_map(), ones(1, dtype=torch.float64)),
        "permutedTokensOptional": (ones(6, 2), ones(3, 3, 3).half()),
        "probsGradOutOptional": (poison(3, 4), poison(2, dtype=torch.int64)),
    },
}


@pytest.mark.parametrize("choice", (0, 1), ids=("fitting", "of no use"))
@pytest.mark.parametrize("padded", (False, True), ids=("ragged", "padded"))
@pytest.mark.parametrize("name", UNREAD)
@on_every_backend
def test_without_probs_their_partners_are_not_read(
    subtests: pytest.Subtests, name: str, padded: bool, choice: int
) -> None:
    """The result is that of nulls, and what comes with them stays as it is."""
    mode: dict[str, Any] = {
        "paddedMode" if "paddedMode" in SIGNATURES[name].names else "dropAndPad": padded,
        "probsOptional": None,
    }
    if padded:
        mode |= {key: i32([0, 2, 2, 1, 1, 0]) for key in ("sortedIndices", "permuteTokenId") if key in GOOD[name]()}
    tokens = {
        key: torch.arange(value.numel(), dtype=torch.float32).reshape(value.shape) + 1
        for key, value in GOOD[name]().items()
        if key in ("permutedTokens", "unpermutedTokensGrad")
    }
    nulls = GOOD[name]() | mode | tokens | dict.fromkeys(UNREAD[name])
    run(name, *nulls.values())
    unread = {key: values[choice].clone() for key, values in UNREAD[name].items()}
    before = {key: value.clone() for key, value in unread.items()}
    arguments = GOOD[name]() | mode | tokens | unread
    run(name, *arguments.values())
    for key, value in before.items():
        with subtests.test(unread=key):
            assert_same_bits(unread[key], value)
    for output in outputs_of(name, nulls):
        with subtests.test(output):
            assert not nulls[output].isnan().any()
            assert_same_bits(arguments[output], nulls[output])


def test_the_deterministic_answer_is_the_only_one() -> None:
    """A thousand rows for one token, several times: the same bits."""
    rows, indices = torch.randn(4096, 33, generator=generator_of(0)), torch.zeros(4096, dtype=torch.int32)
    rows = (rows * 64).round() / 64  # exact in any order, but for a sum that loses a row
    found = []
    for _ in range(3):
        out = poison(4, 33)
        run("MoeTokenPermuteWithRoutingMapGrad", rows, None, indices, None, 1, 4, True, out, None, workspace=16 * 2**20)
        found.append(out)
    same(found[1], found[0])
    same(found[2], found[0])
    close(found[0][:1], rows.double().sum(0, keepdim=True))


# ---------------------------------------------------------------------------- empty tensors


EMPTY: list[tuple[str, dict[str, Any]]] = [
    ("MoeTokenPermuteWithRoutingMapGrad", {"permutedTokensOutputGrad": torch.empty(6, 0), "tokenGradOut": torch.empty(3, 0)}),
    ("MoeTokenPermuteWithRoutingMapGrad", {"permutedTokensOutputGrad": torch.empty(0, 2), "sortedIndices": i32([]), "permutedProbsOutputGradOptional": torch.empty(0)}),
    ("MoeTokenPermuteWithRoutingMapGrad", {"permutedTokensOutputGrad": torch.empty(0, 2), "sortedIndices": i32([]), "permutedProbsOutputGradOptional": torch.empty(0), "dropAndPad": True}),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"unpermutedTokensGrad": torch.empty(3, 0), "permutedTokensOptional": torch.empty(6, 0), "permutedTokensGradOut": torch.empty(6, 0)}),
    ("MoeTokenUnpermuteWithRoutingMapGrad", {"outIndex": i32([]), "permuteTokenId": i32([]), "permutedTokensOptional": torch.empty(0, 2), "permutedTokensGradOut": torch.empty(0, 2)}),
    ("MoeTokenPermuteWithRoutingMap", {"tokens": torch.empty(0, 2), "routingMap": torch.empty(0, 4, dtype=torch.bool), "probsOptional": torch.empty(0, 4), "numOutTokens": 0, "permuteTokensOut": torch.empty(0, 2), "permuteProbsOutOptional": torch.empty(0), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenPermuteWithRoutingMap", {"routingMap": torch.empty(3, 0, dtype=torch.bool), "probsOptional": torch.empty(3, 0), "numOutTokens": 0, "dropAndPad": True, "permuteTokensOut": torch.empty(0, 2), "permuteProbsOutOptional": torch.empty(0), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenPermuteWithRoutingMap", {"numOutTokens": 3, "dropAndPad": True, "permuteTokensOut": torch.empty(0, 2), "permuteProbsOutOptional": torch.empty(0), "sortedIndicesOut": empty_ids(0)}),
    ("MoeTokenUnpermuteWithRoutingMap", {"sortedIndices": i32([]), "permutedTokens": torch.empty(0, 2), "outIndex": empty_ids(0), "permuteTokenId": empty_ids(0), "permuteProbs": torch.empty(0)}),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": torch.empty(6, 0), "unpermutedTokens": torch.empty(3, 0)}),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": torch.empty(0, 2)}),
    ("MoeTokenUnpermuteWithRoutingMap", {"permutedTokens": torch.empty(0, 2), "probsOptional": None, "routingMapOptional": None}),
]  # fmt: skip


@cases("name, changes", EMPTY)
@on_every_backend
def test_empty_tensors(subtests: pytest.Subtests, name: str, changes: dict[str, Any]) -> None:
    zeros_where_nothing_is_to_do(subtests, name, changes)


@on_every_backend
def test_padded_unpermute_without_a_hidden_size_still_gives_the_indices() -> None:
    out_index, token_ids, probs = empty_ids(4), empty_ids(4), poison(4)
    run(
        "MoeTokenUnpermuteWithRoutingMap",
        torch.empty(4, 0), i32([2, 0, 1, 0]), routing_map(), ones(3, 4) * 0.5, True, None, torch.empty(3, 0), out_index,
        token_ids, probs,
    )  # fmt: skip
    same(out_index, [1, 3, 2, 0])
    same(token_ids, [0, 0, 1, 2])
    same(probs, [0.5] * 4)


# ---------------------------------------------------------------------------- the core's bits


@settings(max_examples=25)
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(4, 9),
    st.sampled_from((1, 64, 131, 300)),
    SEEDS,
    st.sampled_from(MIXTURES),
)
def test_the_bits_are_those_of_the_core(
    num_tokens: int, topk: int, num_experts: int, hidden: int, seed: int, mixture: tuple[torch.dtype, torch.dtype]
) -> None:
    """The same call through the core's reference backend, with no `out=`."""
    (dtype, probs_dtype), generator = mixture, generator_of(seed)
    with_reference: dict[str, Any] = {"backend": "reference"}
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :topk]
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, ids, True)
    x = normal(generator, num_tokens, hidden, dtype=dtype)
    dense = normal(generator, num_tokens, num_experts, dtype=probs_dtype)
    slots = num_tokens * topk
    plan = moeroute.plan_from_routing_map(routing_map, topk=topk, num_rows=slots, **with_reference)
    y = normal(generator, slots, hidden, dtype=dtype)
    rows, indices, row_probs = poison(slots, hidden, dtype=dtype), empty_ids(slots), poison(slots, dtype=probs_dtype)
    run("MoeTokenPermuteWithRoutingMap", x, routing_map, dense, slots, False, rows, row_probs, indices)
    expected = moeroute.permute(x, plan, **with_reference), moeroute.permute_weights(dense, plan, **with_reference)
    assert_same_bits((rows, row_probs, indices), (*expected, plan.row_of_slot))
    out, token_ids = poison(num_tokens, hidden, dtype=dtype), empty_ids(slots)
    slot_probs = poison(slots, dtype=probs_dtype)
    arguments: tuple[Any, ...] = (
        y,
        indices,
        routing_map,
        dense,
        False,
        None,
        out,
        empty_ids(slots),
        token_ids,
        slot_probs,
    )
    run("MoeTokenUnpermuteWithRoutingMap", *arguments)
    assert_same_bits(out, moeroute.unpermute(y, plan, dense, **with_reference))
    rows_out, probs_out = poison(slots, hidden, dtype=dtype), poison(num_tokens, num_experts, dtype=probs_dtype)
    arguments = x, indices, token_ids, routing_map, y, dense, False, None, rows_out, probs_out
    run("MoeTokenUnpermuteWithRoutingMapGrad", *arguments)
    both = moeroute.unpermute_backward(x, y, plan, dense, accumulate=False, **with_reference)
    assert_same_bits((rows_out, probs_out), both)
    arguments = y, row_probs, indices, routing_map, num_experts, num_tokens, False, out, probs_out
    run("MoeTokenPermuteWithRoutingMapGrad", *arguments, workspace=16 * 2**20)
    assert_same_bits(out, moeroute.permute_backward(y, plan, **with_reference))
    assert_same_bits(probs_out, moeroute.permute_weights_backward(row_probs, plan, **with_reference))


# ---------------------------------------------------------------------------- shapes of upstream's system tests


def draw_ragged(
    generator: torch.Generator, num_tokens: int, num_experts: int, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A map with 1..K ones in each row, and the padded tables [T, K] of rows and experts, -1 where unused."""
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
    counts = integers(generator, 1, topk + 1, num_tokens).long()[:, None]
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(num_experts).expand_as(order))
    routing_map = ranks < counts
    experts = torch.argsort(~routing_map, dim=1, stable=True)[:, :topk]
    number = (routing_map.t().reshape(-1).cumsum(0) - 1).reshape(num_experts, num_tokens).t()
    used = torch.arange(topk) < counts
    return routing_map, torch.where(used, number.gather(1, experts), -1), torch.where(used, experts, -1)


@pytest.mark.parametrize("num_tokens, hidden, slots, num_experts, padded, dtype, probs_dtype", (
    (44, 3020, 264, 141, False, F32, F32), (34, 4248, 204, 40, False, F32, F32), (94, 3618, 282, 55, False, BF16, BF16),
    (99, 1373, 1089, 100, False, F32, F32), (756, 1534, 360, 60, True, F16, F16), (120, 4482, 372, 31, True, F32, F32),
    (1904, 5716, 1904, 204, False, BF16, F32), (2625, 6869, 612, 102, True, BF16, F32), (2617, 7153, 539, 49, True, F16, F16),
    (1262, 5912, 2524, 214, False, F32, F32), (2712, 6528, 40_680, 37, False, BF16, F32), (3566, 6880, 42_792, 93, False, F32, F32),
    (3313, 6456, 49_695, 182, False, F32, F32), (3959, 6128, 55_426, 123, False, BF16, BF16),
), ids=spoken)  # fmt: skip
@pytest.mark.parametrize("with_probs", (True, False), ids=("probs", "no_probs"))
def test_system_shapes_of_unpermute_with_routing_map_grad(
    num_tokens: int, hidden: int, slots: int, num_experts: int, padded: bool, dtype: torch.dtype, probs_dtype: torch.dtype,
    with_probs: bool,
) -> None:  # fmt: skip
    skip_large((num_tokens + 2 * slots) * hidden * (4 if dtype is F32 else 2))
    generator = generator_of(slots)
    if padded:
        capacity = slots // num_experts
        tokens = torch.rand(num_experts, num_tokens, generator=generator).argsort(1)[:, :capacity].sort(1).values
        routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.int8).t().scatter(1, tokens, 1).t()
        token_ids, row_of_slot = tokens.reshape(-1).sort(stable=True)
        experts = row_of_slot // capacity
    else:
        topk = slots // num_tokens
        routing_map, table, experts = draw_ragged(generator, num_tokens, num_experts, topk)
        row_of_slot, experts = table.reshape(-1), experts.reshape(-1)
        token_ids = torch.arange(slots) // topk
    grad = normal(generator, num_tokens, hidden, dtype=dtype)
    rows, probs = (
        normal(generator, slots, hidden, dtype=dtype),
        normal(generator, num_tokens, num_experts, dtype=probs_dtype),
    )
    rows_out, probs_out = poison(slots, hidden, dtype=dtype), poison(num_tokens, num_experts, dtype=probs_dtype)
    optional = (routing_map, rows, probs) if with_probs else (None, None, None)
    arguments = (
        grad,
        row_of_slot.int(),
        token_ids.int(),
        *optional,
        padded,
        [1],
        rows_out,
        probs_out if with_probs else None,
    )
    run("MoeTokenUnpermuteWithRoutingMapGrad", *arguments)

    live = (row_of_slot >= 0).nonzero().flatten()
    unnamed = torch.ones(slots, dtype=torch.bool).index_fill_(0, row_of_slot[live], False)
    same(rows_out[unnamed], torch.zeros(int(unnamed.sum()), hidden))
    for some in live[:: max(len(live) // 500, 1)].split(100):
        left, token = row_of_slot[some], token_ids[some]
        weight = probs[token, experts[some]].double()[:, None] if with_probs else 1.0
        close(rows_out[left], weight * grad[token].double())
        if with_probs:
            dots = (rows[left].double() * grad[token].double()).sum(1)
            torch.testing.assert_close(
                probs_out[token, experts[some]].double(), dots, rtol=1.01 * ROUNDING[probs_dtype], atol=1e-3
            )
    if with_probs:
        same(probs_out[routing_map == 0], torch.zeros(int((routing_map == 0).sum())))


@pytest.mark.parametrize("rows, hidden, num_tokens, num_experts, padded, dtype, probs_dtype", (
    (23, 24, 81, 23, True, BF16, F32), (198, 14, 18, 20, False, F32, F32), (234, 16, 78, 39, True, F16, F16),
    (36, 204, 36, 19, False, F32, F32), (28, 237, 28, 97, False, F32, F32), (325, 33, 65, 52, False, F32, F32),
    (672, 357, 42, 65, False, F16, F16), (620, 397, 124, 24, False, BF16, BF16), (484, 497, 121, 88, False, F32, F32),
    (296, 820, 74, 125, False, F16, F16), (1328, 984, 43, 83, True, F32, F32), (1440, 967, 106, 90, True, F16, F16),
    (2048, 746, 128, 25, False, BF16, F32), (1695, 959, 113, 99, False, F16, F16),
), ids=spoken)  # fmt: skip
def test_system_shapes_of_permute_with_routing_map_grad(
    rows: int,
    hidden: int,
    num_tokens: int,
    num_experts: int,
    padded: bool,
    dtype: torch.dtype,
    probs_dtype: torch.dtype,
) -> None:
    generator = generator_of(rows)
    grad, probs_grad = normal(generator, rows, hidden, dtype=dtype), normal(generator, rows, dtype=probs_dtype)
    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    probs_expected = torch.zeros(num_tokens, num_experts, dtype=probs_dtype)
    if padded:
        capacity = rows // num_experts
        indices = torch.rand(num_experts, num_tokens, generator=generator).argsort(1)[:, :capacity].reshape(-1)
        routing_map = torch.ones(num_tokens, num_experts, dtype=torch.int8)
        expected.index_add_(0, indices, grad.double())
        probs_expected[indices, torch.arange(rows) // capacity] = probs_grad
    else:
        topk = rows // num_tokens
        routing_map, table, experts = draw_ragged(generator, num_tokens, num_experts, topk)
        indices = table.reshape(-1)
        live = indices >= 0
        expected.index_add_(0, (torch.arange(rows) // topk)[live], grad[indices[live]].double())
        probs_expected[(torch.arange(rows) // topk)[live], experts.reshape(-1)[live]] = probs_grad[indices[live]]
    out, probs_out = poison(num_tokens, hidden, dtype=dtype), poison(num_tokens, num_experts, dtype=probs_dtype)
    arguments = grad, probs_grad, indices.int(), routing_map, num_experts, num_tokens, padded, out, probs_out
    run("MoeTokenPermuteWithRoutingMapGrad", *arguments, workspace=16 * 2**20)
    close(out, expected)
    same(probs_out, probs_expected)
