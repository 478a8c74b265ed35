"""The functions of Megatron-Core 0.16.1 by ours, against the host's own on a CPU."""

import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from hosts.megatron_host import RouterReplay, RouterReplayAction, parallel_state
from hosts.megatron_host import moe_utils as host
from moeroute.interop import megatron as ours
from moeroute.interop.conventions import ScoreFunction
from moeroute.interop.megatron import DropPolicy

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ragged_map(num_tokens: int, num_experts: int = 8, seed: int = 0) -> Tensor:
    """Tokens with different numbers of experts, none included."""
    return torch.rand(num_tokens, num_experts, generator=generator(seed)) < 0.3


def leaf(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype).requires_grad_()


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def exact(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def gradients(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weight = torch.randn(output.shape, generator=generator(9), dtype=torch.float64).to(output.dtype)
    return torch.autograd.grad(output, inputs, weight)


# ---------------------------------------------------------------------------- permute and unpermute


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("capacity", [None, 3], ids=["dropless", "drop_and_pad"])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize(("dtype", "probs_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_permute_and_unpermute(
    dtype: torch.dtype, probs_dtype: torch.dtype, num_tokens: int, capacity: int | None, fused: bool
) -> None:
    """Copies are equal; sums and gradients near the host's in float64, to one rounding of our dtype."""
    routing_map = ragged_map(num_tokens)
    if capacity is not None:
        capacity = min(capacity, num_tokens)  # above T the host raises
    size = None if capacity is None else capacity * 8
    options: dict[str, Any] = {"num_out_tokens": size, "drop_and_pad": capacity is not None}
    tokens, probs = leaf(num_tokens, 5, dtype=dtype), leaf(num_tokens, 8, dtype=probs_dtype, seed=2)
    expected = host.permute(tokens, routing_map, probs, **options)
    actual = ours.permute(tokens, routing_map, probs, fused=fused, **options)
    assert len(actual) == 3
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    rows, row_probs, sorted_indices = actual
    assert rows is not None
    assert row_probs is not None
    assert sorted_indices is not None
    wide = exact(tokens)
    (theirs,) = gradients(host.permute(wide, routing_map, **options)[0], wide)
    assert_near(gradients(rows, tokens)[0], theirs.to(dtype), dtype)
    (theirs,) = gradients(expected[1], probs)
    assert_near(gradients(row_probs, probs)[0], theirs, probs_dtype)

    for weights, its_map in ((None, None), (probs, routing_map)):
        mine, wide = leaf(*rows.shape, dtype=dtype, seed=3), exact(leaf(*rows.shape, dtype=dtype, seed=3))
        kind: dict[str, Any] = {"drop_and_pad": capacity is not None}
        wide_weights = None if weights is None else exact(weights)
        theirs = host.unpermute(wide, sorted_indices, tokens.shape, wide_weights, its_map, **kind)
        output = ours.unpermute(mine, sorted_indices, tokens.shape, weights, its_map, fused=fused, **kind)
        assert output.shape == tokens.shape
        assert_near(output, theirs.to(dtype), dtype)
        inputs = (mine,) if weights is None else (mine, weights)
        wide_inputs = (wide,) if wide_weights is None else (wide, wide_weights)
        for got, wanted, of in zip(gradients(output, *inputs), gradients(theirs, *wide_inputs), inputs, strict=True):
            assert_near(got, wanted.to(of.dtype), dtype if dtype == probs_dtype else torch.bfloat16)


def test_permute_without_probs() -> None:
    tokens, routing_map = leaf(12, 4, dtype=torch.float32), ragged_map(12)
    rows, probs, sorted_indices = ours.permute(tokens, routing_map)
    assert probs is None
    assert sorted_indices is not None
    assert sorted_indices.dtype == torch.int64
    torch.testing.assert_close((rows, sorted_indices), host.permute(tokens, routing_map)[::2], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32], ids=str)
def test_maps_of_other_dtypes(dtype: torch.dtype) -> None:
    tokens, routing_map = leaf(12, 4, dtype=torch.float32), ragged_map(12).to(dtype)
    expected = host.permute(tokens, routing_map)[0]
    actual = ours.permute(tokens, routing_map)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_dropless_ignores_num_out_tokens() -> None:
    tokens, routing_map = leaf(12, 4, dtype=torch.float32), ragged_map(12)
    expected = host.permute(tokens, routing_map, num_out_tokens=3)
    torch.testing.assert_close(ours.permute(tokens, routing_map, num_out_tokens=3), expected, rtol=0, atol=0)


def test_a_capacity_above_the_number_of_tokens() -> None:
    """Theirs raises with probs; ours pads."""
    tokens, routing_map, probs = leaf(3, 4, dtype=torch.float32), ragged_map(3), leaf(3, 8, dtype=torch.float32)
    options: dict[str, Any] = {"num_out_tokens": 40, "drop_and_pad": True}
    with pytest.raises(RuntimeError):
        host.permute(tokens, routing_map, probs, **options)
    rows, row_probs, sorted_indices = ours.permute(tokens, routing_map, probs, **options)
    assert rows is not None
    assert row_probs is not None
    assert sorted_indices is not None
    padding = sorted_indices.reshape(8, 5) < 0
    assert padding.tolist() == [[False] * 3 + [True] * 2] * 8
    for value in (rows.reshape(8, 5, 4)[padding], row_probs.reshape(8, 5)[padding]):
        assert not value.any()
    assert set(sorted_indices[sorted_indices < 0].tolist()) == {-1}
    back = ours.unpermute(rows, sorted_indices, tokens.shape, probs, routing_map, drop_and_pad=True)
    torch.testing.assert_close(back, tokens * probs.sum(dim=1, keepdim=True))


def test_five_values_in_2026() -> None:
    tokens, routing_map, probs = leaf(12, 4, dtype=torch.float32), ragged_map(12), leaf(12, 8, dtype=torch.float32)
    size, counts = int(routing_map.sum()), routing_map.sum(dim=0)
    expected = host.permute(tokens, routing_map, probs)
    actual: Any = ours.permute(tokens, routing_map, probs, size, tokens_per_expert=counts, generation="2026")
    assert actual[3] is None
    assert actual[4] is counts
    torch.testing.assert_close(actual[:3], expected, rtol=0, atol=0)
    more: Any = ours.permute(tokens, routing_map, probs, torch.tensor(size + 2), generation="2026")
    torch.testing.assert_close(tuple(value[:-2] for value in more[:3]), expected, rtol=0, atol=0)
    assert more[2][-2:].tolist() == [-1, -1]
    assert not more[0][-2:].any()
    for rows, _, indices, *_ in (actual, more):
        back = ours.unpermute(rows, indices, tokens.shape, probs, routing_map)
        torch.testing.assert_close(back, tokens * (probs * routing_map).sum(dim=1, keepdim=True))
    with pytest.raises(ValueError, match=r"^moeroute.interop.megatron.permute: num_out_tokens must be given; got None"):
        ours.permute(tokens, routing_map, probs, generation="2026")
    with pytest.raises(ValueError, match=r"^moeroute.interop.megatron.permute: generation must be"):
        ours.permute(tokens, routing_map, probs, generation="0.9")  # type: ignore[arg-type]


def test_nothing_is_read_back_in_2026() -> None:
    """Tensors on meta have nothing to read; gradients have the shapes of their leaves."""
    tokens, routing_map, probs = leaf(12, 4, dtype=torch.float32), ragged_map(12), leaf(12, 8, dtype=torch.float32)
    tokens, probs = (t.detach().to("meta").requires_grad_() for t in (tokens, probs))
    routing_map = routing_map.to("meta")
    rows, row_probs, indices, *_ = ours.permute(tokens, routing_map, probs, 30, generation="2026")
    assert rows is not None
    assert row_probs is not None
    assert indices is not None
    assert [tuple(t.shape) for t in (rows, row_probs, indices)] == [(30, 4), (30,), (30,)]
    back = ours.unpermute(rows, indices, tokens.shape, probs, routing_map)
    padded = ours.unpermute(
        rows, indices, tokens.shape, probs, routing_map, pad_offsets=torch.empty(8, dtype=torch.int64, device="meta")
    )
    (back.sum() + padded.sum() + row_probs.sum()).backward()
    assert tokens.grad is not None
    assert probs.grad is not None
    assert (back.shape, probs.grad.shape) == (tokens.shape, (12, 8))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_aligned_rows_of_2026(fused: bool) -> None:
    """Every expert's rows are those of the map, then padding; the way back is the one without padding."""
    tokens, routing_map, probs = leaf(25, 4, dtype=torch.float64), ragged_map(25), leaf(25, 8, dtype=torch.float64)
    counts = routing_map.sum(dim=0)
    options: dict[str, Any] = {"tokens_per_expert": counts, "generation": "2026", "fused": fused}
    rows, row_probs, ids, pad_offsets, padded = ours.permute(tokens, routing_map, probs, align_size=4, **options)
    plain = host.permute(tokens, routing_map, probs)
    assert rows is not None
    assert row_probs is not None
    assert ids is not None
    assert pad_offsets is not None
    assert padded is not None
    assert padded.tolist() == [-(-n // 4) * 4 for n in counts.tolist()]
    padding = (padded - counts).tolist()
    assert pad_offsets.tolist() == [sum(padding[:e]) for e in range(8)]
    for mine, theirs, filler in zip((rows, row_probs, ids), plain, (0, 0, -1), strict=True):
        chunks = zip(mine.split(padded.tolist()), theirs.split(counts.tolist()), counts.tolist(), strict=True)
        for chunk, expected, count in chunks:
            torch.testing.assert_close(chunk[:count], expected)
            assert (chunk[count:] == filler).all()
    for weights, its_map in ((None, None), (probs, routing_map)):
        rows = ours.permute(tokens, routing_map, align_size=4, **options)[0]
        assert rows is not None
        back = ours.unpermute(rows, ids, tokens.shape, weights, its_map, fused, pad_offsets=pad_offsets)
        again = host.permute(tokens, routing_map)
        expected = host.unpermute(again[0], again[2], tokens.shape, weights, its_map)
        torch.testing.assert_close(back, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients(back, tokens), gradients(expected, tokens), rtol=1e-12, atol=1e-12)
    even = ours.permute(tokens, torch.ones(25, 8).bool(), probs, align_size=5, **options)
    assert even[3] is None
    assert even[4] is counts


def test_unpermute_asks_for_the_map_with_probs() -> None:
    with pytest.raises(ValueError, match=r"^moeroute.interop.megatron.unpermute: routing_map must be given with probs"):
        ours.unpermute(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), (1, 2), torch.zeros(1, 1))


def test_unpermute_refuses_rows_that_are_not_those_of_the_map() -> None:
    rows = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="rows must be"):
        ours.unpermute(rows, torch.zeros(3, dtype=torch.int64), (2, 2), torch.ones(2, 2), torch.ones(2, 2).bool())


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("lengths", [[3, 0, 4, 2], [0, 0], [5]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sort_chunks(dtype: torch.dtype, lengths: list[int], fused: bool) -> None:
    sizes = torch.tensor(lengths)
    order = torch.randperm(len(lengths), generator=generator(7))
    rows, probs = leaf(sum(lengths), 5, dtype=dtype), leaf(sum(lengths), dtype=dtype, seed=2)
    expected, actual = (f(rows, sizes, order, probs) for f in (host.sort_chunks_by_idxs, ours.sort_chunks_by_idxs))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for mine, theirs, of in zip(actual, expected, (rows, probs), strict=True):
        torch.testing.assert_close(gradients(mine, of), gradients(theirs, of), rtol=0, atol=0)
    alone = ours.sort_chunks_by_idxs(rows, sizes, order.int(), fused=fused)
    torch.testing.assert_close(alone[0], expected[0], rtol=0, atol=0)
    assert alone[1] is None


# ---------------------------------------------------------------------------- gating


@pytest.mark.parametrize(("topk", "num_groups", "group_topk"), [(4, 4, 2), (6, 4, 2), (3, 2, 1), (4, 8, 4)])
@pytest.mark.parametrize("num_tokens", [1, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_limited_topk(dtype: torch.dtype, num_tokens: int, topk: int, num_groups: int, group_topk: int) -> None:
    """Powers of two: no two scores of a token are equal, and no two sums."""
    order = torch.rand(num_tokens, 16, generator=generator(3)).argsort(dim=1)
    scores = order.double().exp2().to(dtype).requires_grad_()
    arguments = (topk, num_tokens, 16, num_groups, group_topk)
    expected, actual = host.group_limited_topk(scores, *arguments), ours.group_limited_topk(scores, *arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(actual[0], scores), gradients(expected[0], scores), rtol=0, atol=0)


def test_group_limited_topk_of_no_tokens() -> None:
    """Theirs raises."""
    probs, ids = ours.group_limited_topk(torch.zeros(0, 8), 2, 0, 8, 4, 2)
    assert probs.shape == ids.shape == (0, 2)
    assert ids.dtype == torch.int64


MODES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre_softmax": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "softmax_with_a_bias": {"expert_bias": torch.linspace(-1, 1, 16)},  # which the host ignores too
    "sigmoid": {"score_function": "sigmoid", "scaling_factor": 0.0},
    "sigmoid_with_a_bias": {
        "score_function": "sigmoid", "expert_bias": torch.linspace(-0.3, 0.3, 16), "scaling_factor": 2.5,
    },
    "groups": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
    "softmax_groups": {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
}  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_routing(dtype: torch.dtype, mode: str, topk: int, num_tokens: int) -> None:
    """The host is float32 inside, and rounds scores to the logits' dtype before it chooses: rows of equal choice."""
    options = dict(MODES[mode])
    if topk == 1 and "group_topk" in options:
        options["group_topk"] = 1
    logits = leaf(num_tokens, 16, dtype=dtype)
    expected = host.topk_routing_with_score_function(logits, topk, **options)
    actual = ours.topk_routing_with_score_function(logits, topk, fused=True, **options)
    assert actual[1].dtype == torch.bool
    assert (actual[1].sum(dim=1) == topk).all()
    same = (actual[1] == expected[1]).all(dim=1)
    assert int(same.sum()) >= (0.85 * num_tokens if dtype == torch.bfloat16 else num_tokens)
    tolerance = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    assert_near(actual[0][same], expected[0][same], tolerance)
    mine, theirs = (gradients(x[0], logits)[0][same] for x in (actual, expected))
    assert_near(mine, theirs, tolerance)
    weights, ids = ours.topk_routing_with_score_function(logits, topk, dense_output=True, **options)
    assert (weights.dtype, ids.dtype, ids.shape) == (dtype, torch.int64, (num_tokens, topk))
    torch.testing.assert_close(actual[0].gather(1, ids), weights, rtol=0, atol=0)
    again = ours.topk_routing_with_score_function(logits, topk, precomputed_indices=ids.flip(1), **options)
    torch.testing.assert_close(again[1], actual[1])
    assert_near(again[0], actual[0], tolerance)


def test_topk_routing_of_no_tokens() -> None:
    probs, routing_map = ours.topk_routing_with_score_function(torch.zeros(0, 8), 2)
    assert probs.shape == routing_map.shape == (0, 8)


def test_sqrtsoftplus_of_2026() -> None:
    logits = leaf(20, 8, dtype=torch.float64)
    probs, routing_map = ours.topk_routing_with_score_function(logits, 3, score_function="sqrtsoftplus")
    scores = torch.nn.functional.softplus(logits).sqrt() * routing_map
    torch.testing.assert_close(probs, scores / scores.sum(dim=1, keepdim=True))
    with pytest.raises(ValueError, match=r"^moeroute.interop.megatron: score_function must be"):
        ours.topk_routing_with_score_function(logits, 3, score_function="tanh")  # type: ignore[arg-type]


def test_router_replay() -> None:
    """It records our choice, and a choice that it gives has gradients."""
    logits = leaf(20, 8, dtype=torch.float32)
    results = []
    for route in (host.topk_routing_with_score_function, ours.topk_routing_with_score_function):
        replay = RouterReplay()
        plain = route(logits, 2, router_replay=replay)
        replay.set_router_replay_action(RouterReplayAction.RECORD)
        recorded = route(logits, 2, router_replay=replay)
        torch.testing.assert_close(recorded, plain)
        ids = replay.get_recorded_indices()
        other = (ids + 1) % 8
        replay.set_target_indices(other)
        outputs = []
        for action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
            replay.set_router_replay_action(action)
            probs, routing_map = route(logits, 2, router_replay=replay)
            assert routing_map.gather(1, other).all()
            outputs += [probs, *gradients(probs, logits)]
        results.append((ids, recorded, *outputs))
    RouterReplay.clear_global_router_replay_instances()
    torch.testing.assert_close(results[1], results[0])


def routed(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Probs, no two of an expert equal, and the map where they are not 0."""
    routing_map = ragged_map(num_tokens)
    order = torch.rand(num_tokens, 8, generator=generator(8)).argsort(dim=0) + 1
    return (order.double() / 64 * routing_map).to(dtype).requires_grad_(), routing_map


@pytest.mark.parametrize("pad", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("factor", [0.4, 1.0, 9.0])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropping_by_probs(dtype: torch.dtype, num_tokens: int, factor: float, pad: bool) -> None:
    """The host fills up with any tokens: there only the counts of the map, and the probs, are its."""
    probs, routing_map = routed(num_tokens, dtype)
    arguments: tuple[int, float, DropPolicy, bool] = (2, factor, "probs", pad)
    expected = host.apply_router_token_dropping(probs, routing_map, *arguments)
    actual = ours.apply_router_token_dropping(probs, routing_map, *arguments)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0)
    assert actual[1].dtype == torch.bool
    torch.testing.assert_close(actual[1].sum(dim=0), expected[1].sum(dim=0))
    true = expected[0] != 0
    torch.testing.assert_close(actual[1][true], expected[1][true])
    mine, theirs = (gradients(x[0], probs)[0] for x in (actual, expected))
    torch.testing.assert_close(mine[true], theirs[true], rtol=0, atol=0)
    if not pad:
        torch.testing.assert_close(actual[1], expected[1])
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("pad", [False, True], ids=["ragged", "padded"])
def test_dropping_by_position(pad: bool) -> None:
    """The first tokens stay; of the host, which keeps others, the counts."""
    probs, routing_map = routed(40, torch.float32)
    expected = host.apply_router_token_dropping(probs, routing_map, 2, 0.8, "position", pad)[1]
    kept, actual = ours.apply_router_token_dropping(probs, routing_map, 2, 0.8, "position", pad)
    torch.testing.assert_close(actual.sum(dim=0), expected.sum(dim=0))
    first = routing_map & (routing_map.cumsum(dim=0) <= 8)  # 40 * 2 * 0.8 / 8
    torch.testing.assert_close(actual & routing_map if pad else actual, first)
    torch.testing.assert_close(kept, probs * first)
    with pytest.raises(ValueError, match=r"apply_router_token_dropping: drop_policy must be"):
        ours.apply_router_token_dropping(probs, routing_map, 2, 0.8, "random")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("multiple", [1, 4, 16])
def test_pad_routing_map(multiple: int, dtype: torch.dtype) -> None:
    """The host changes what it is given."""
    routing_map = ragged_map(64).to(dtype)
    routing_map[:, 3] = 0
    before = routing_map.clone()
    padded = ours.pad_routing_map(routing_map, multiple)
    torch.testing.assert_close(routing_map, before)
    torch.testing.assert_close(padded, host.pad_routing_map(routing_map, multiple))
    assert not (padded.sum(dim=0) % multiple).any()


def test_a_map_without_room_for_the_padding() -> None:
    """98 of 100 tokens: the host stops at 100, which is no multiple of 16."""
    routing_map = torch.zeros(100, 2, dtype=torch.bool)
    routing_map[:98, 0] = True
    assert int(host.pad_routing_map(routing_map.clone(), 16)[:, 0].sum()) == 100
    before = routing_map.clone()
    with pytest.raises(
        ValueError, match=r"^moeroute.interop.megatron.pad_routing_map: pad_multiple must be .*T = 100; got 16"
    ):
        ours.pad_routing_map(routing_map, 16)
    torch.testing.assert_close(routing_map, before)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_for_the_aux_loss(
    dtype: torch.dtype, num_tokens: int, score_function: ScoreFunction, masked: bool
) -> None:
    """True in the mask is padding. The host chooses by rounded scores: rows of equal choice."""
    logits = leaf(num_tokens, 8, dtype=dtype)
    mask = torch.rand(num_tokens, generator=generator(4)) < 0.4 if masked else None
    expected = host.compute_routing_scores_for_aux_loss(logits, 3, score_function, padding_mask=mask)
    actual = ours.compute_routing_scores_for_aux_loss(logits, 3, score_function, fused=True, padding_mask=mask)
    assert actual[0].dtype == torch.bool
    same = (actual[0] == expected[0]).all(dim=1)
    assert int(same.sum()) >= (0.85 * num_tokens if dtype == torch.bfloat16 else num_tokens)
    if mask is not None:
        assert not actual[0][mask].any()
        assert not actual[1][mask].any()
    tolerance = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    assert_near(actual[1], expected[1], tolerance)
    assert_near(gradients(actual[1], logits)[0], gradients(expected[1], logits)[0], tolerance)
    later = ours.compute_routing_scores_for_aux_loss(logits, 3, score_function, padding_mask=mask, generation="2026")
    assert later[1].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sinkhorn(dtype: torch.dtype) -> None:
    """200 rounds by hand: the host's own loop may never come to a small tolerance, and a logit of 100 is NaN there."""
    cost = leaf(30, 8, dtype=dtype).detach()
    expected = cost.double().exp()
    for _ in range(200):
        expected = expected / expected.sum(dim=1, keepdim=True) / 30
        expected = expected / expected.sum(dim=0) / 8
    actual = ours.sinkhorn(cost, 1e-9)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-6)
    cost[0, 0] = 100.0
    assert ours.sinkhorn(cost).isfinite().all()


# ---------------------------------------------------------------------------- balance


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 2.0])
def test_capacity(factor: float) -> None:
    for num_tokens, num_experts, least in ((64, 8, None), (7, 3, 4), (100, 16, 9), (0, 4, None)):
        expected = host.get_capacity(num_tokens, num_experts, factor, least)
        assert ours.get_capacity(num_tokens, num_experts, factor, least) == expected


def test_capacity_is_exact() -> None:
    assert host.get_capacity(13440, 16, 1.1) == 925
    assert ours.get_capacity(13440, 16, 1.1) == 924


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_z_loss(dtype: torch.dtype, masked: bool) -> None:
    logits = leaf(33, 8, dtype=dtype)
    mask = torch.rand(33, generator=generator(4)) < 0.4 if masked else None
    expected, actual = host.z_loss_func(logits, 1e-3, mask), ours.z_loss_func(logits, 1e-3, mask)
    assert_near(actual, expected, dtype)
    assert_near(gradients(actual, logits)[0], gradients(expected, logits)[0], dtype)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_load_balancing_loss(dtype: torch.dtype, sequences: int, masked: bool) -> None:
    """True in the mask is a token that counts: the only one of this kind."""
    probs = leaf(33, 8 * sequences, dtype=dtype)
    counts = torch.randint(0, 20, (8 * sequences,), generator=generator(5))
    mask = torch.rand(33, generator=generator(4)) < 0.6 if masked else None
    for given, total in ((counts, 33), (counts.float() / 3, torch.tensor(33)), (counts, torch.tensor(33.0))):
        arguments = (given, total, 2, 8, 0.01)
        expected = host.switch_load_balancing_loss_func(probs, *arguments, padding_mask=mask)
        actual = ours.switch_load_balancing_loss_func(probs, *arguments, fused=True, padding_mask=mask)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients(actual, probs), gradients(expected, probs), rtol=1e-5, atol=1e-6)


def test_z_loss_of_no_tokens() -> None:
    assert float(ours.z_loss_func(torch.zeros(0, 4), 1.0)) == 0.0
    assert float(ours.z_loss_func(torch.zeros(2, 4), 1.0, torch.ones(2).bool())) == 0.0


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Megatron's groups, all of one process."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # torch exports it all the same
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("shape", [(8,), (3, 8)], ids=["layer", "layers"])
def test_updated_expert_bias(shape: tuple[int, ...]) -> None:
    counts = torch.randint(0, 5, shape, generator=generator(5)).float()
    counts[..., :2] = counts.double().mean(dim=-1, keepdim=True).round()
    bias = torch.randn(shape, generator=generator(6))
    expected = host.get_updated_expert_bias(counts.clone(), bias, 1e-3)
    torch.testing.assert_close(ours.get_updated_expert_bias(counts, bias, 1e-3), expected, rtol=0, atol=0)
    group = torch.distributed.group.WORLD
    torch.testing.assert_close(ours.get_updated_expert_bias(counts, bias, 1e-3, group), expected, rtol=0, atol=0)


def test_the_counts_are_added_up_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another rank had sent its own."""
    other, group = torch.tensor([0.0, 9.0, 0.0]), object()
    asked = []

    def all_reduce(counts: Tensor, group: object) -> None:
        asked.append(group)
        counts += other

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    counts = torch.tensor([4.0, 0.0, 2.0])
    bias = ours.get_updated_expert_bias(counts, torch.zeros(3), 0.5, group)
    assert asked == [group]
    assert counts.tolist() == [4.0, 9.0, 2.0]
    assert bias.tolist() == [0.5, -0.5, 0.5]


# ---------------------------------------------------------------------------- patch


def holders(function: Any) -> set[str]:
    return {
        module.__name__
        for name, module in list(sys.modules.items())
        if name.startswith("megatron") and any(value is function for value in list(vars(module).values()))
    }


def test_patch_reaches_every_module_that_holds_the_function() -> None:
    theirs = {name: getattr(host, name) for name in ours.NAMES}
    before = {name: holders(function) for name, function in theirs.items()}
    assert "megatron.core.transformer.moe.token_dispatcher" in before["permute"]
    assert "megatron.core.transformer.moe.router" in before["z_loss_func"]
    assert "megatron.core.distributed.finalize_model_grads" in before["get_updated_expert_bias"]
    former = moeroute.set_memory_pool(True)
    with ours.patch():
        for name, function in theirs.items():
            assert not holders(function)
            assert holders(getattr(ours, name)) == before[name]
        assert moeroute.set_memory_pool()["enabled"] is False
        tokens, routing_map = torch.randn(4, 3), ragged_map(4)
        assert len(host.permute(tokens, routing_map)) == 3  # the generation of the host, not of our signature
        with ours.patch():  # one inside the other
            assert holders(ours.permute) == before["permute"]
        assert holders(ours.permute) == before["permute"]
    assert {name: holders(function) for name, function in theirs.items()} == before
    assert moeroute.set_memory_pool()["enabled"] is True
    moeroute.set_memory_pool(**former)


def test_patch_is_a_switch_too() -> None:
    theirs = host.permute
    switch = ours.patch()
    assert host.permute is ours.permute
    switch.undo()
    assert host.permute is theirs
    switch.undo()
    assert host.permute is theirs


def test_patched_storages_can_be_resized() -> None:
    """What the host does to free the experts' input early."""
    with ours.patch():
        rows = host.permute(torch.randn(2048, 512), torch.ones(2048, 2).bool())[0]
        rows.untyped_storage().resize_(0)


def test_the_example_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "interop.md").read_text()
    found = re.search(r"## Megatron-Core.*?```python\n(.*?)```", page, re.DOTALL)
    assert found
    exec(found.group(1), {})
    assert host.permute is not ours.permute


def test_every_function_has_the_parameters_of_the_host() -> None:
    for name in ours.NAMES:
        theirs = list(inspect.signature(getattr(host, name)).parameters.values())
        mine = list(inspect.signature(getattr(ours, name)).parameters.values())[: len(theirs)]
        assert [(p.name, p.default, p.kind) for p in mine] == [(p.name, p.default, p.kind) for p in theirs], name
