"""The functions under Transformer Engine's names, against plain torch that follows its specification."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeroute.interop import transformer_engine as te
from moeroute.interop.conventions import ScoreFunction

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def leaf(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype).requires_grad_()


def exact(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def assert_near(actual: Tensor, expected: Tensor, *dtypes: torch.dtype) -> None:
    """To one rounding of the dtype, or of the coarsest of others that it was computed from."""
    tolerance = max(TOLERANCE[dtype] for dtype in (actual.dtype, *dtypes))
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


def gradients(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weight = torch.randn(output.shape, generator=generator(9), dtype=torch.float64).to(output.dtype)
    return torch.autograd.grad(output, inputs, weight)


# ---------------------------------------------------------------------------- rows by index


def dropping_ids(num_tokens: int, topk: int, num_experts: int) -> Tensor:
    """Distinct experts, some of them dropped."""
    ids = torch.rand(num_tokens, num_experts, generator=generator(5)).argsort(dim=1)[:, :topk]
    return torch.where(torch.rand(num_tokens, topk, generator=generator(6)) < 0.2, -1, ids).int()


def rows_by_hand(ids: Tensor) -> list[tuple[int, int]]:
    """The (token, choice) of every row: expert by expert, then by token."""
    num_tokens, topk = ids.shape
    slots = [(int(ids[t, k]), t, k) for t in range(num_tokens) for k in range(topk) if ids[t, k] >= 0]
    return [(t, k) for _, t, k in sorted(slots)]


@pytest.mark.parametrize("num_tokens", [0, 1, 23])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_mode(dtype: torch.dtype, num_tokens: int) -> None:
    topk = 3
    ids, tokens = dropping_ids(num_tokens, topk, 8), leaf(num_tokens, 5, dtype=dtype)
    slots = rows_by_hand(ids)
    rows, row_id_map = te.moe_permute(tokens, ids, num_out_tokens=0, map_type="index")
    assert (rows.dtype, rows.shape) == (dtype, (num_tokens * topk, 5))
    expected = tokens[[t for t, _ in slots]]
    torch.testing.assert_close(rows[: len(slots)], expected, rtol=0, atol=0)
    assert not rows[len(slots) :].any()
    by_hand = torch.full((topk, num_tokens), -1, dtype=torch.int32)
    for row, (t, k) in enumerate(slots):
        by_hand[k, t] = row
    torch.testing.assert_close(row_id_map, by_hand.reshape(-1))

    mine, probs = leaf(num_tokens * topk, 5, dtype=dtype, seed=2), leaf(num_tokens, topk, dtype=dtype, seed=3)
    wide, wide_probs = exact(mine), exact(probs)
    taken = torch.where(by_hand.T[..., None] >= 0, wide[by_hand.T.long()] if num_tokens else wide.reshape(0, 3, 5), 0)
    weighted = (taken * wide_probs[..., None]).sum(dim=1)
    for options in ({"merging_probs": probs}, {"probs": probs}):
        output = te.moe_unpermute(mine, row_id_map, map_type="index", **options)  # type: ignore[arg-type]
        assert output.shape == tokens.shape
        assert_near(output, weighted)
    pairs = zip(gradients(output, mine, probs), gradients(weighted, wide, wide_probs), strict=True)
    for got, wanted in pairs:
        assert_near(got, wanted)
    alone = te.moe_unpermute(mine, row_id_map, map_type="index")  # one row a choice
    torch.testing.assert_close(alone, taken.transpose(0, 1).reshape(-1, 5).to(dtype), rtol=0, atol=0)


def test_index_mode_with_a_number_of_rows() -> None:
    ids, tokens = torch.tensor([[1, 0], [0, -1], [1, 2]], dtype=torch.int32), torch.arange(6.0).reshape(3, 2)
    rows, row_id_map = te.moe_permute(tokens, ids, num_out_tokens=4, map_type="index")
    torch.testing.assert_close(rows, tokens[[0, 1, 0, 2]])
    assert row_id_map.tolist() == [2, 1, 3, 0, -1, -1]  # [K, T]: the choice of expert 2 is behind the last row


@pytest.mark.parametrize("probs_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probs_of_another_dtype(dtype: torch.dtype, probs_dtype: torch.dtype) -> None:
    ids = dropping_ids(9, 2, 4)
    rows, row_id_map = te.moe_permute(leaf(9, 5, dtype=dtype), ids, map_type="index")
    probs = leaf(9, 2, dtype=probs_dtype, seed=3)
    output = te.moe_unpermute(rows, row_id_map, probs, map_type="index")
    present = (ids >= 0).double() * probs.double()
    assert output.dtype == dtype
    assert_near(output, leaf(9, 5, dtype=dtype).double() * present.sum(dim=1, keepdim=True))


def test_index_mode_twice_differentiable() -> None:
    ids = torch.tensor([[1, 0], [0, -1], [1, 2]], dtype=torch.int32)
    tokens, probs = leaf(3, 2, dtype=torch.float64), leaf(3, 2, dtype=torch.float64, seed=2)

    def forward(tokens: Tensor, probs: Tensor) -> Tensor:
        rows, row_id_map = te.moe_permute(tokens, ids, map_type="index")
        return te.moe_unpermute(rows**2, row_id_map, probs, map_type="index")

    assert torch.autograd.gradcheck(forward, (tokens, probs))
    assert torch.autograd.gradgradcheck(forward, (tokens, probs))


@pytest.mark.parametrize("lengths", [[3, 0, 4, 2], [0, 0], [5]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sort_chunks(dtype: torch.dtype, lengths: list[int]) -> None:
    sizes, order = torch.tensor(lengths), torch.randperm(len(lengths), generator=generator(7))
    rows, probs = leaf(sum(lengths), 5, dtype=dtype), leaf(sum(lengths), dtype=dtype, seed=2)
    expected = [torch.cat([x.split(lengths)[i] for i in order]) for x in (rows, probs)]
    actual = te.moe_sort_chunks_by_index_with_probs(rows, probs, sizes, order)
    torch.testing.assert_close(list(actual), expected, rtol=0, atol=0)
    for mine, theirs, of in zip(actual, expected, (rows, probs), strict=True):
        torch.testing.assert_close(gradients(mine, of), gradients(theirs, of), rtol=0, atol=0)
    alone = te.moe_sort_chunks_by_index(rows, sizes.int(), order.int())
    torch.testing.assert_close(alone, expected[0], rtol=0, atol=0)


# ---------------------------------------------------------------------------- rows by mask


def ragged_map(num_tokens: int, num_experts: int = 8) -> Tensor:
    """Tokens with different numbers of experts, none included."""
    return torch.rand(num_tokens, num_experts, generator=generator(0)) < 0.3


def token_of_row(routing_map: Tensor) -> Tensor:
    return torch.arange(routing_map.shape[0]).expand(*routing_map.T.shape).masked_select(routing_map.T)


@pytest.mark.parametrize("known", [False, True], ids=["counted", "known"])
@pytest.mark.parametrize("num_tokens", [0, 1, 23])
@pytest.mark.parametrize(("dtype", "probs_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_mask_mode(dtype: torch.dtype, probs_dtype: torch.dtype, num_tokens: int, known: bool) -> None:
    routing_map = ragged_map(num_tokens)
    tokens, probs = leaf(num_tokens, 5, dtype=dtype), leaf(num_tokens, 8, dtype=probs_dtype, seed=2)
    size = int(routing_map.sum()) if known else -1
    rows, row_probs, row_id_map = te.moe_permute_with_probs(tokens, probs, routing_map, size)
    ids = token_of_row(routing_map)
    torch.testing.assert_close(rows, tokens[ids], rtol=0, atol=0)
    expected_probs = probs.T.masked_select(routing_map.T)
    torch.testing.assert_close(row_probs, expected_probs, rtol=0, atol=0)
    torch.testing.assert_close(gradients(row_probs, probs), gradients(expected_probs, probs), rtol=0, atol=0)
    alone, same_map = te.moe_permute(tokens, routing_map.to(torch.int32), size)
    torch.testing.assert_close((alone, same_map), (rows, row_id_map), rtol=0, atol=0)
    assert (row_id_map.dtype, row_id_map.shape) == (torch.int32, (num_tokens, 17))
    for t, line in enumerate(row_id_map.tolist()):
        n = line[-1]
        assert line[8 : 8 + n] == routing_map[t].nonzero().flatten().tolist()
        assert [int(ids[row]) for row in line[:n]] == [t] * n
        assert line[n:8] + line[8 + n : 16] == [-1] * (16 - 2 * n)

    wide = exact(tokens)
    (expected,) = gradients(wide[ids], wide)
    assert_near(gradients(rows, tokens)[0], expected)
    mine, weights = leaf(*rows.shape, dtype=dtype, seed=3), leaf(num_tokens, 8, dtype=probs_dtype, seed=4)
    wide, wide_weights = exact(mine), exact(weights)
    for factor, options in (
        (1.0, {}),
        (wide_weights.T.masked_select(routing_map.T)[:, None], {"merging_probs": weights}),
    ):
        back = te.moe_unpermute(mine, row_id_map, restore_shape=tokens.shape, **options)  # type: ignore[arg-type]
        by_hand = torch.zeros(tokens.shape, dtype=torch.float64).index_add(0, ids, wide * factor)
        assert (back.shape, back.dtype) == (tokens.shape, dtype)
        assert_near(back, by_hand)
        assert back.requires_grad  # without rows too
        inputs, wide_inputs = ((mine, weights), (wide, wide_weights)) if options else ((mine,), (wide,))
        for got, wanted in zip(gradients(back, *inputs), gradients(by_hand, *wide_inputs), strict=True):
            assert_near(got, wanted, dtype, probs_dtype)


def test_no_rows() -> None:
    """Theirs returns [0, H]."""
    rows, row_id_map = te.moe_permute(torch.ones(3, 2, requires_grad=True), torch.zeros(3, 4).bool())
    back = te.moe_unpermute(rows, row_id_map, restore_shape=(3, 2))
    assert back.tolist() == [[0.0, 0.0]] * 3
    back.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding(dtype: torch.dtype) -> None:
    routing_map = ragged_map(23)
    tokens, probs = leaf(23, 5, dtype=dtype), leaf(23, 8, dtype=dtype, seed=2)
    counts = routing_map.sum(dim=0)
    rows, row_probs, row_id_map, pad_offsets, padded = te.moe_permute_and_pad_with_probs(
        tokens, probs, routing_map, counts, 4
    )
    plain, plain_probs, plain_map = te.moe_permute_with_probs(tokens, probs, routing_map)
    torch.testing.assert_close(row_id_map, plain_map)
    assert padded.tolist() == [-(-n // 4) * 4 for n in counts.tolist()]
    padding = (padded - counts).tolist()
    assert pad_offsets is not None
    assert pad_offsets.dtype == torch.int64
    assert pad_offsets.tolist() == [sum(padding[:e]) for e in range(8)]
    for mine, theirs in ((rows, plain), (row_probs, plain_probs)):
        for chunk, expected in zip(mine.split(padded.tolist()), theirs.split(counts.tolist()), strict=True):
            torch.testing.assert_close(chunk[: len(expected)], expected, rtol=0, atol=0)
            assert not chunk[len(expected) :].any()
    back = te.moe_unpermute(rows, row_id_map, probs, pad_offsets=pad_offsets)
    assert_near(back, tokens.double() * (probs.double() * routing_map).sum(dim=1, keepdim=True))
    even = te.moe_permute_and_pad_with_probs(tokens, probs, torch.ones(23, 8).bool(), counts, 23)
    assert even[3] is None
    assert even[4].tolist() == [23] * 8


def test_padding_is_twice_differentiable() -> None:
    routing_map = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1]]).bool()
    tokens, probs = leaf(3, 2, dtype=torch.float64), leaf(3, 3, dtype=torch.float64, seed=2)

    def forward(tokens: Tensor, probs: Tensor) -> Tensor:
        rows, row_probs, row_id_map, pad_offsets, _ = te.moe_permute_and_pad_with_probs(
            tokens, probs, routing_map, routing_map.sum(dim=0), 4
        )
        return te.moe_unpermute(rows**2 * row_probs[:, None], row_id_map, probs, pad_offsets=pad_offsets)

    assert torch.autograd.gradcheck(forward, (tokens, probs))
    assert torch.autograd.gradgradcheck(forward, (tokens, probs))


def test_compiled_without_a_break() -> None:
    routing_map = ragged_map(23)
    size = int(routing_map.sum())
    tokens, probs = leaf(23, 5, dtype=torch.float32), leaf(23, 8, dtype=torch.float32, seed=2)

    def forward(tokens: Tensor, probs: Tensor) -> Tensor:
        rows, row_probs, row_id_map = te.moe_permute_with_probs(tokens, probs, routing_map, size)
        return te.moe_unpermute(rows * row_probs[:, None], row_id_map, probs)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(tokens, probs), forward(tokens, probs)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, tokens, probs), gradients(expected, tokens, probs))


# ---------------------------------------------------------------------------- gating


def routing_by_hand(
    logits: Tensor, topk: int, use_pre_softmax: bool, groups: tuple[int, int] | None, factor: float | None, score: str,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Probs and map [T, E] in float64."""
    if score == "softmax":
        scores = logits.softmax(dim=-1) if use_pre_softmax else logits
    else:
        scores = logits.sigmoid() if score == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    keys = scores if bias is None else scores + bias
    num_tokens, num_experts = logits.shape
    if groups is not None:
        count, kept = groups
        worth = keys.view(num_tokens, count, -1).topk(topk // kept, dim=-1)[0].sum(dim=-1)
        best = torch.zeros_like(worth).scatter(1, worth.topk(kept, dim=1)[1], 1.0).bool()
        keys = keys.masked_fill(~best.repeat_interleave(num_experts // count, dim=1), float("-inf"))
    routing_map = torch.zeros_like(logits).scatter(1, keys.topk(topk, dim=1)[1], 1.0).bool()
    if score == "softmax" and not use_pre_softmax:
        probs = logits.masked_fill(~routing_map, float("-inf")).softmax(dim=-1)
    else:
        probs = scores * routing_map
        if score != "softmax" and topk > 1:
            probs = probs / probs.sum(dim=1, keepdim=True)
    return probs * (factor or 1.0), routing_map


MODES: dict[str, dict[str, Any]] = {
    "softmax": {"score": "softmax"},
    "pre_softmax": {"score": "softmax", "use_pre_softmax": True, "factor": 2.5},
    "sigmoid": {"score": "sigmoid", "factor": 0.0},
    "sigmoid_with_a_bias": {"score": "sigmoid", "bias": torch.linspace(-0.3, 0.3, 12), "factor": 2.5},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "bias": torch.linspace(-0.3, 0.3, 12)},
    "groups": {"score": "sigmoid", "groups": (4, 2)},
}


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_with_score_function(dtype: torch.dtype, mode: str, topk: int) -> None:
    options = {"use_pre_softmax": False, "groups": None, "factor": None, "bias": None, **MODES[mode]}
    if topk == 1 and options["groups"]:
        options["groups"] = (4, 1)
    num_groups, group_topk = options["groups"] or (None, None)
    logits = leaf(2, 3, 7, 12, dtype=dtype)
    wide = exact(logits)
    expected, expected_map = routing_by_hand(wide.view(-1, 12), topk, **options)
    arguments = (
        topk, options["use_pre_softmax"], num_groups, group_topk, options["factor"], options["score"], options["bias"]
    )  # fmt: skip
    probs, routing_map = te.fused_topk_with_score_function(logits, *arguments)
    assert (probs.dtype, probs.shape, routing_map.dtype) == (dtype, logits.shape, torch.bool)
    torch.testing.assert_close(routing_map.view(-1, 12), expected_map)
    assert_near(probs.view(-1, 12), expected)
    assert_near(gradients(probs, logits)[0], gradients(expected.view(logits.shape), wide)[0])

    for kind in ("bitmap_u8", 1, type("Member", (), {"name": "BITMAP_U8"})()):
        _, bits = te.fused_topk_with_score_function(logits, *arguments, routing_map_format=kind)
        assert (bits.dtype, bits.shape) == (torch.uint8, (2, 3, 7, 2))
    unpacked = (bits[..., None] >> torch.arange(8)) & 1
    torch.testing.assert_close(unpacked.flatten(-2)[..., :12].bool(), routing_map)
    for kind in (torch.int16, torch.int32, torch.int64):
        buffer = torch.empty(2, 3, 7, topk, dtype=kind)
        same, ids = te.fused_topk_with_score_function(logits, *arguments, topk_indices=buffer)
        assert ids is buffer
        torch.testing.assert_close(same, probs, rtol=0, atol=0)
        torch.testing.assert_close(torch.zeros_like(routing_map).scatter(-1, ids.long(), True), routing_map)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_aux_loss(dtype: torch.dtype, score: ScoreFunction) -> None:
    logits = leaf(2, 10, 12, dtype=dtype)
    wide = exact(logits)
    by_hand = {
        "softmax": lambda x: x.softmax(dim=-1),
        "sigmoid": lambda x: x.sigmoid() / x.sigmoid().sum(dim=-1, keepdim=True),
        "sqrtsoftplus": lambda x: torch.nn.functional.normalize(torch.nn.functional.softplus(x).sqrt(), p=1, dim=-1),
    }[score](wide)
    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(logits, 3, score)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_near(scores, by_hand)
    expected_map = torch.zeros(2, 10, 12).scatter(-1, wide.topk(3, dim=-1)[1], 1.0).bool()
    torch.testing.assert_close(routing_map, expected_map)
    bits, _ = te.fused_compute_score_for_moe_aux_loss(logits, 3, score, "bitmap_u8")
    assert (bits.dtype, bits.shape) == (torch.uint8, (2, 10, 2))

    counts = expected_map.sum(dim=(0, 1))
    loss = te.fused_moe_aux_loss(scores.view(-1, 12), counts, 20, 12, 3, 0.01)
    expected = (by_hand.view(-1, 12).sum(dim=0) * counts).sum() * 12 * 0.01 / (3 * 20**2)
    assert loss.dtype == scores.dtype
    assert_near(loss, expected)
    assert_near(gradients(loss, logits)[0], gradients(expected, wide)[0])


def test_router_of_no_tokens_and_twice_differentiable() -> None:
    probs, routing_map = te.fused_topk_with_score_function(
        torch.zeros(0, 8), 2, False, None, None, None, "sigmoid", None
    )
    assert probs.shape == routing_map.shape == (0, 8)
    logits = leaf(3, 5, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda x: te.fused_topk_with_score_function(x, 2, True, None, None, 2.0, "sigmoid", None)[0], (logits,)
    )


@pytest.mark.parametrize(("name", "value"), [("qb_histogram", torch.zeros(1)), ("qb_bin_bounds", torch.zeros(2)), ("qb_histogram_mode", "two_kernel")])  # fmt: skip
def test_quantile_balancing_is_refused(name: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=rf"fused_topk_with_score_function: {name} needs quantile balancing"):
        te.fused_topk_with_score_function(
            torch.zeros(1, 4), 2, False, None, None, None, "sigmoid", None, **{name: value}
        )


def test_wrong_words() -> None:
    logits = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="routing_map_format must be"):
        te.fused_topk_with_score_function(logits, 2, False, None, None, None, "sigmoid", None, "dense")
    with pytest.raises(ValueError, match="score_function must be"):
        te.fused_topk_with_score_function(logits, 2, False, None, None, None, "tanh", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert_bias must be None with softmax"):
        te.fused_topk_with_score_function(logits, 2, False, None, None, None, "softmax", torch.zeros(4))
    with pytest.raises(ValueError, match="map_type must be"):
        te.moe_permute(logits, torch.zeros(1, 1, dtype=torch.int32), map_type="list")  # type: ignore[arg-type]


def test_the_example_of_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "interop.md").read_text()
    found = re.search(r"## Transformer Engine.*?```python\n(.*?)```", page, re.DOTALL)
    assert found
    exec(found.group(1), {})
