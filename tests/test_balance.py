"""Losses and bias update against loops in float64 and against numbers worked out by hand."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from case_ids import spelled
from moeroute.ops.balance import (
    BalanceStatistics,
    balance_statistics,
    load_balancing_loss,
    load_balancing_loss_from_counts,
    router_z_loss,
    update_expert_bias,
)

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
MASKS = [False, True]


def draw(
    num_tokens: int, num_experts: int, k: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64).softmax(-1).to(dtype)
    expert_ids = torch.randint(-1, num_experts + 1, (num_tokens, k), generator=generator)
    mask = torch.rand(num_tokens, generator=generator) < 0.3
    return scores, expert_ids, mask


def naive_loss(scores: Tensor, expert_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    num_tokens, num_experts = scores.shape
    counts = [0] * num_experts
    live = [t for t in range(num_tokens) if mask is None or not mask[t]]
    for t, k in itertools.product(live, range(expert_ids.shape[1])):
        if 0 <= int(expert_ids[t, k]) < num_experts:
            counts[int(expert_ids[t, k])] += 1
    loss = scores.new_zeros(())
    for e in range(num_experts):
        for t in live:
            loss = loss + scores[t, e] / len(live) * (counts[e] / max(sum(counts), 1)) * num_experts
    return loss


def naive_z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    live = [t for t in range(logits.shape[0]) if mask is None or not mask[t]]
    return sum((logits[t].exp().sum().log() ** 2 for t in live), logits.new_zeros(())) / max(len(live), 1)


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_load_balancing_loss_and_its_gradient(dtype: torch.dtype, masked: bool) -> None:
    scores, expert_ids, mask = draw(13, 5, 3, dtype)
    scores.requires_grad_()
    loss = load_balancing_loss(scores, expert_ids, padding_mask=mask if masked else None)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (grad,) = torch.autograd.grad(loss, scores)

    wide = scores.detach().double().requires_grad_()
    expected = naive_loss(wide, expert_ids, mask if masked else None)
    (expected_grad,) = torch.autograd.grad(expected, wide)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, expected_grad.to(dtype))


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_router_z_loss_and_its_gradient(dtype: torch.dtype, masked: bool) -> None:
    logits, _, mask = draw(11, 6, 1)
    logits = (logits * 8 - 1).to(dtype).requires_grad_()
    loss = router_z_loss(logits, padding_mask=mask if masked else None)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (grad,) = torch.autograd.grad(loss, logits)

    wide = logits.detach().double().requires_grad_()
    expected = naive_z_loss(wide, mask if masked else None)
    (expected_grad,) = torch.autograd.grad(expected, wide)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad, expected_grad.to(dtype))


def test_balanced_routing_gives_one_for_any_k(subtests: pytest.Subtests) -> None:
    # B80: four experts, two slots a token, uniform scores; a loss that is not divided by k gives 2.
    uniform = torch.full((4, 4), 0.25)
    for k in (1, 2, 4):
        with subtests.test(k=k):
            expert_ids = torch.arange(4 * k).reshape(4, k) % 4
            torch.testing.assert_close(load_balancing_loss(uniform, expert_ids), torch.tensor(1.0), rtol=0, atol=0)


def test_loss_sees_what_the_router_wanted() -> None:
    # B82: all of four tokens chose expert 0. The capacity of 2 comes later and must not hide it.
    scores = torch.tensor([[0.9, 0.1]]).repeat(4, 1)
    statistics = balance_statistics(scores, torch.zeros(4, 1, dtype=torch.int32))
    torch.testing.assert_close(statistics.tokens_per_expert, torch.tensor([4, 0]))
    torch.testing.assert_close(statistics.loss(), torch.tensor(1.8))


def test_padding_mask_masks_tokens_not_experts() -> None:
    # B143: T = E = 3; a mask laid over the wrong axis gives [3, 0, 3].
    expert_ids = torch.tensor([[0, 1, 2]]).repeat(3, 1)
    statistics = balance_statistics(torch.ones(3, 3), expert_ids, padding_mask=torch.tensor([False, True, False]))
    torch.testing.assert_close(statistics.tokens_per_expert, torch.tensor([2, 2, 2]))
    torch.testing.assert_close(statistics.num_tokens, torch.tensor(2))
    torch.testing.assert_close(statistics.score_sum, torch.tensor([2.0, 2.0, 2.0]))


def test_padding_is_as_if_absent() -> None:
    # B100's mask: tokens 0 and 2 are padding. What they hold cannot matter, not even a NaN.
    mask = torch.tensor([True, False, True, False])
    scores = torch.tensor([[float("nan"), 1.0], [0.75, 0.25], [float("inf"), 0.0], [0.5, 0.5]], requires_grad=True)
    expert_ids = torch.tensor([[0], [1], [0], [0]])
    loss = load_balancing_loss(scores, expert_ids, padding_mask=mask)
    torch.testing.assert_close(loss, load_balancing_loss(scores[~mask], expert_ids[~mask]), rtol=0, atol=0)
    z_loss = router_z_loss(scores, padding_mask=mask)
    torch.testing.assert_close(z_loss, router_z_loss(scores[~mask]), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(loss + z_loss, scores)
    torch.testing.assert_close(grad[mask], torch.zeros(2, 2), rtol=0, atol=0)
    assert grad[~mask].isfinite().all()
    assert (grad[~mask] != 0).any()


@pytest.mark.parametrize("split", [(4, 4), (1, 7), (0, 8)])
def test_shards_add_up(split: tuple[int, int]) -> None:
    # B154: the loss of the summed statistics is the loss of the whole, however the tokens are split.
    scores, expert_ids, mask = draw(8, 4, 2, seed=3)
    whole = load_balancing_loss(scores, expert_ids, padding_mask=mask)
    shards = [
        balance_statistics(s, i, padding_mask=m)
        for s, i, m in zip(scores.split(split), expert_ids.split(split), mask.split(split), strict=True)
    ]
    total = sum(shards)
    assert isinstance(total, BalanceStatistics)
    torch.testing.assert_close(total.loss(), whole)
    assert total.num_tokens == (~mask).sum()


def test_adding_other_things_raises() -> None:
    scores, expert_ids, _ = draw(4, 4, 2)
    shard = balance_statistics(scores, expert_ids)
    with pytest.raises(ValueError, match=r"score_sum must be \[E\] with E = 4, as the other shard; got shape \[1\]"):
        shard + balance_statistics(scores[:, :1], expert_ids)
    with pytest.raises(TypeError):
        shard + 1
    with pytest.raises(TypeError):
        1 + shard


@pytest.mark.parametrize("dtype", INTEGERS)
def test_counts_are_exact_for_every_integer_dtype(dtype: torch.dtype) -> None:
    # E = 300 does not fit into int8: the ids are widened before they are compared with it.
    expert_ids = torch.tensor([[0, 5], [5, 127], [0, 5]]).to(dtype)
    counts = balance_statistics(torch.ones(3, 300), expert_ids).tokens_per_expert
    assert counts.dtype == torch.int64
    torch.testing.assert_close(counts[[0, 5, 127]], torch.tensor([2, 3, 1]))
    assert counts.sum() == 6


def test_counts_beyond_half_precision_are_exact() -> None:
    # B79: 515 reads 512 in bfloat16; 65,537 overflows float16.
    expert_ids = torch.ones(65537, 1, dtype=torch.int32)
    expert_ids[:515] = 0
    counts = balance_statistics(torch.ones(65537, 2, dtype=torch.bfloat16), expert_ids).tokens_per_expert
    torch.testing.assert_close(counts, torch.tensor([515, 65537 - 515]))


@pytest.mark.parametrize("num_experts", [0, 3])
def test_no_tokens(subtests: pytest.Subtests, num_experts: int) -> None:
    scores = torch.empty(0, num_experts, requires_grad=True)
    expert_ids = torch.empty(0, 2, dtype=torch.int32)
    for mask in (None, torch.empty(0, dtype=torch.bool)):
        with subtests.test(masked=mask is not None):
            loss = load_balancing_loss(scores, expert_ids, padding_mask=mask)
            loss = loss + router_z_loss(scores, padding_mask=mask)
            torch.testing.assert_close(loss, torch.tensor(0.0), rtol=0, atol=0)
            (grad,) = torch.autograd.grad(loss, scores)
            assert grad.shape == (0, num_experts)


def test_all_padding_or_all_empty() -> None:
    scores, expert_ids, _ = draw(5, 3, 2, torch.float32)
    scores.requires_grad_()
    everything = torch.ones(5, dtype=torch.bool)
    losses = [
        load_balancing_loss(scores, expert_ids, padding_mask=everything),
        router_z_loss(scores, padding_mask=everything),
        load_balancing_loss(scores, torch.full((5, 2), -1)),
    ]
    for loss in losses:
        torch.testing.assert_close(loss, torch.tensor(0.0), rtol=0, atol=0)
        (grad,) = torch.autograd.grad(loss, scores)
        torch.testing.assert_close(grad, torch.zeros(5, 3), rtol=0, atol=0)


def test_first_and_second_derivatives() -> None:
    scores, expert_ids, mask = draw(6, 4, 2)
    scores.requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        check(lambda s: load_balancing_loss(s.square(), expert_ids, padding_mask=mask), (scores,))
        check(lambda s: router_z_loss(s, padding_mask=mask), (scores,))


def test_forward_mode_and_vmap(subtests: pytest.Subtests) -> None:
    scores, expert_ids, mask = draw(6, 4, 2)
    for function in (lambda s: load_balancing_loss(s, expert_ids), lambda s: router_z_loss(s, padding_mask=mask)):
        with subtests.test(spelled(function)):
            tangent = torch.func.jvp(function, (scores,), (torch.ones_like(scores),))[1]
            torch.testing.assert_close(tangent, torch.func.grad(function)(scores).sum())
            stacked = torch.stack([scores, scores * 2])
            expected = torch.stack([function(scores), function(scores * 2)])
            torch.testing.assert_close(torch.func.vmap(function)(stacked), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compile stack
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    def step(scores: Tensor, expert_ids: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        statistics = balance_statistics(scores, expert_ids, padding_mask=mask)
        loss = statistics.loss() + router_z_loss(scores, padding_mask=mask)
        return loss, update_expert_bias(bias, statistics.tokens_per_expert)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for num_tokens in (9, 12):
        scores, expert_ids, mask = draw(num_tokens, 4, 2, torch.float32)
        scores.requires_grad_()
        for got, expected in zip(
            compiled(scores, expert_ids, mask, torch.zeros(4)),
            step(scores, expert_ids, mask, torch.zeros(4)),
            strict=True,
        ):
            torch.testing.assert_close(got, expected)
            if got.requires_grad:
                torch.testing.assert_close(torch.autograd.grad(got, scores), torch.autograd.grad(expected, scores))


def test_deterministic_algorithms() -> None:
    scores, expert_ids, mask = draw(9, 4, 2)
    scores.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        (load_balancing_loss(scores, expert_ids, padding_mask=mask) + router_z_loss(scores)).backward()
        update_expert_bias(torch.zeros(4), torch.tensor([1, 2, 3, 4]))
    finally:
        torch.use_deterministic_algorithms(False)


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes that one result of an operator owns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def test_memory_is_linear() -> None:
    # B136: with T = 2048, k = 8, E = 128 the one-hot of the report is 16.8 MB; scores are 1 MB.
    scores = torch.rand(2048, 128)
    expert_ids = torch.randint(0, 128, (2048, 8), dtype=torch.int32)
    mask = torch.rand(2048) < 0.5
    with _LargestTensor() as largest:
        load_balancing_loss(scores, expert_ids, padding_mask=mask)
        router_z_loss(scores, padding_mask=mask)
    assert largest.bytes <= 2048 * 128 * 4


def test_bias_moves_towards_balance() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5, 0.5])
    updated = update_expert_bias(bias, torch.tensor([4, 2, 1, 1]), rate=0.25)
    torch.testing.assert_close(updated, torch.tensor([0.25, 0.5, 0.75, 0.75]), rtol=0, atol=0)
    torch.testing.assert_close(bias, torch.full((4,), 0.5), rtol=0, atol=0)
    assert not update_expert_bias(bias.requires_grad_(), torch.tensor([4, 2, 1, 1])).requires_grad


def test_bias_of_several_layers_at_once() -> None:
    counts = torch.tensor([[3, 1], [2, 2]], dtype=torch.int32)
    updated = update_expert_bias(torch.zeros(2, 2, dtype=torch.float64), counts, rate=1.0)
    torch.testing.assert_close(updated, torch.tensor([[-1.0, 1.0], [0.0, 0.0]], dtype=torch.float64))


def test_bias_direction_is_exact() -> None:
    # The mean lies 1/3 above two counts of 2^60: no floating type sees the difference.
    counts = torch.tensor([2**60, 2**60, 2**60 + 1])
    torch.testing.assert_close(update_expert_bias(torch.zeros(3), counts, rate=1.0), torch.tensor([1.0, 1.0, -1.0]))


def test_bias_keeps_small_steps(subtests: pytest.Subtests) -> None:
    # B77: ten steps of 1e-3 from 1.0 arrive at 1.01; in bfloat16 none of them leaves 1.0.
    bias = torch.ones(2)
    for _ in range(10):
        bias = update_expert_bias(bias, torch.tensor([0, 2]))
    torch.testing.assert_close(bias, torch.tensor([1.01, 0.99]), rtol=0, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float16):
        with (
            subtests.test(dtype=dtype),
            pytest.raises(TypeError, match=r"bias must be float32 or float64 \(a step of 0.001 is lost"),
        ):
            update_expert_bias(torch.ones(2, dtype=dtype), torch.tensor([0, 2]))


SCORES, IDS, MASK = torch.rand(4, 3), torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: load_balancing_loss([1.0], IDS), TypeError, "load_balancing_loss: scores must be a torch.Tensor; got list"),  # type: ignore[arg-type]
        (lambda: load_balancing_loss(SCORES, [0]), TypeError, "expert_ids must be a torch.Tensor; got list"),  # type: ignore[arg-type]
        (lambda: load_balancing_loss(SCORES.int(), IDS), TypeError, "scores must be of a floating-point dtype; got torch.int32"),
        (lambda: load_balancing_loss(SCORES[0], IDS), ValueError, r"scores must be \[T, E\]; got shape \[3\]"),
        (lambda: load_balancing_loss(SCORES, IDS.float()), TypeError, "expert_ids must be of an integer dtype; got torch.float32"),
        (lambda: load_balancing_loss(SCORES, IDS.bool()), TypeError, "expert_ids must be of an integer dtype; got torch.bool"),
        (lambda: load_balancing_loss(SCORES, IDS[:3]), ValueError, r"expert_ids must be \[T, K\] with T = 4, as scores; got shape \[3, 2\]"),
        (lambda: load_balancing_loss(SCORES, IDS[:, 0]), ValueError, r"expert_ids must be \[T, K\] with T = 4"),
        (lambda: load_balancing_loss(SCORES, IDS.to("meta")), ValueError, "expert_ids must be on cpu, as scores; got meta"),
        (lambda: load_balancing_loss(SCORES, IDS, padding_mask=[True]), TypeError, "padding_mask must be a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: load_balancing_loss(SCORES, IDS, padding_mask=MASK.int()), TypeError, "padding_mask must be torch.bool, True = padding"),
        (lambda: load_balancing_loss(SCORES, IDS, padding_mask=MASK[:3]), ValueError, r"padding_mask must be \[T\] with T = 4, as scores; got shape \[3\]"),
        (lambda: load_balancing_loss(SCORES, IDS, padding_mask=MASK[:, None]), ValueError, "padding_mask must be"),
        (lambda: load_balancing_loss(SCORES, IDS, padding_mask=MASK.to("meta")), ValueError, "padding_mask must be on cpu"),
        (lambda: balance_statistics(SCORES[0], IDS), ValueError, "balance_statistics: scores must be"),
        (lambda: router_z_loss(SCORES.int()), TypeError, "router_z_loss: logits must be of a floating-point dtype"),
        (lambda: router_z_loss(SCORES[None]), ValueError, r"logits must be \[T, E\]; got shape \[1, 4, 3\]"),
        (lambda: router_z_loss(SCORES, padding_mask=MASK[:1]), ValueError, "padding_mask must be .* as logits"),
        (lambda: update_expert_bias([0.0], torch.tensor([1])), TypeError, "update_expert_bias: bias must be a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: update_expert_bias(torch.zeros(2), [1, 2]), TypeError, "tokens_per_expert must be a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: update_expert_bias(torch.zeros(2), torch.tensor([1.0, 2.0])), TypeError, "tokens_per_expert must be of an integer dtype"),
        (lambda: update_expert_bias(torch.zeros(2).int(), torch.tensor([1, 2])), TypeError, "bias must be float32 or float64; got torch.int32"),
        (lambda: update_expert_bias(torch.zeros(2), torch.tensor([1])), ValueError, r"tokens_per_expert must be \[2\], as bias; got shape \[1\]"),
        (lambda: update_expert_bias(torch.zeros(()), torch.tensor(1)), ValueError, r"bias must be \[..., E\]; got shape \[\]"),
        (lambda: update_expert_bias(torch.zeros(2), torch.tensor([1, 2], device="meta")), ValueError, "must be on cpu"),
        (lambda: update_expert_bias(torch.zeros(2), torch.tensor([1, 2]), rate=float("nan")), ValueError, "rate must be finite"),
        (lambda: update_expert_bias(torch.zeros(2), torch.tensor([1, 2]), rate="1"), TypeError, "rate must be a float"),  # type: ignore[arg-type]
        (lambda: update_expert_bias(torch.zeros(2), torch.tensor([1, 2]), rate=1e300), ValueError, r"rate must be finite in float32; got 1e\+300"),
        (lambda: update_expert_bias(torch.zeros(2), torch.tensor([1, 2]), rate=10**40), ValueError, "rate must be finite in float32"),
    ],
)  # fmt: skip
def test_bad_input(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call()


def test_update_with_a_rate_that_only_float64_holds() -> None:
    updated = update_expert_bias(torch.zeros(2, dtype=torch.float64), torch.tensor([1, 2]), rate=1e300)
    assert updated.tolist() == [1e300, -1e300]


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
@pytest.mark.parametrize("mask", (None, MASK))
def test_float8_scores_are_widened_first(dtype: torch.dtype, mask: Tensor | None) -> None:
    scores = SCORES.to(dtype)
    torch.testing.assert_close(
        load_balancing_loss(scores, IDS, padding_mask=mask),
        load_balancing_loss(scores.float(), IDS, padding_mask=mask),
        rtol=0,
        atol=0,
    )
    torch.testing.assert_close(
        router_z_loss(scores, padding_mask=mask), router_z_loss(scores.float(), padding_mask=mask), rtol=0, atol=0
    )


# ---------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("masked", MASKS)
def test_a_loss_for_each_sequence(dtype: torch.dtype, masked: bool) -> None:
    """Leading axes, sequences side by side and interleaved ones, against one loop for each sequence."""
    scores, expert_ids, mask = draw(21, 5, 3, dtype, seed=2)
    options: dict[str, Any] = {"padding_mask": mask} if masked else {}
    sequence_ids = torch.tensor([0, 2, 1] * 7)
    ours = scores.clone().requires_grad_()
    interleaved = load_balancing_loss(ours, expert_ids, sequence_ids=sequence_ids, num_sequences=4, **options)
    wide = scores.double().requires_grad_()
    expected = [naive_loss(wide[sequence_ids == n], expert_ids[sequence_ids == n],
                           mask[sequence_ids == n] if masked else None) for n in range(3)]  # fmt: skip
    torch.testing.assert_close(interleaved[:3].double(), torch.stack(expected), rtol=1e-5, atol=0)
    assert interleaved[3] == 0
    grad = torch.tensor([1.0, 2.0, 3.0, 4.0]).to(interleaved.dtype)
    (found,) = torch.autograd.grad(interleaved, ours, grad)
    (exact,) = torch.autograd.grad(torch.stack(expected), wide, grad[:3].double())
    torch.testing.assert_close(found, exact.to(dtype))

    batch = {name: value.reshape(3, 7) for name, value in options.items()}
    several = load_balancing_loss(scores.reshape(3, 7, 5), expert_ids.reshape(3, 7, 3), **batch)
    each = [naive_loss(scores[t : t + 7].double(), expert_ids[t : t + 7], mask[t : t + 7] if masked else None)
            for t in (0, 7, 14)]  # fmt: skip
    torch.testing.assert_close(several.double(), torch.stack(each), rtol=1e-5, atol=0)


def test_statistics_of_sequences_add_up() -> None:
    scores, expert_ids, _ = draw(12, 5, 2)
    whole = balance_statistics(scores, expert_ids)
    order = torch.tensor([1, 0, 2, 2, 0, 1, 1, 1, 0, 2, 2, 0])
    for dtype in INTEGERS:
        parts = balance_statistics(scores, expert_ids, sequence_ids=order.to(dtype), num_sequences=3)
        assert parts.tokens_per_expert.sum(0).tolist() == whole.tokens_per_expert.tolist()
        assert parts.num_tokens.tolist() == [4, 4, 4]
        torch.testing.assert_close(parts.score_sum.sum(0), whole.score_sum)
    batch = balance_statistics(scores.reshape(2, 2, 3, 5), expert_ids.reshape(2, 2, 3, 2))
    assert [list(part.shape) for part in batch] == [[2, 2, 5], [2, 2, 5], [2, 2]]
    assert (batch + batch).num_tokens.tolist() == [[6, 6], [6, 6]]
    torch.testing.assert_close(batch.score_sum[1, 0], scores[6:9].sum(0))


def test_a_token_of_no_sequence_counts_nowhere() -> None:
    scores, expert_ids, _ = draw(4, 3, 1)
    scores[1] = torch.nan
    scores[3] = torch.inf
    scores.requires_grad_()
    found = balance_statistics(scores, expert_ids, sequence_ids=torch.tensor([0, -1, 0, 2]), num_sequences=2)
    assert found.num_tokens.tolist() == [2, 0]
    torch.testing.assert_close(found.score_sum[0], scores[0] + scores[2])
    assert found.score_sum[1].tolist() == [0.0, 0.0, 0.0]
    (grad,) = torch.autograd.grad(found.loss().sum(), scores)
    assert grad[[1, 3]].tolist() == [[0.0] * 3] * 2
    none = balance_statistics(scores, expert_ids, sequence_ids=torch.tensor([0, -1, 0, 2]), num_sequences=0)
    assert [list(part.shape) for part in none] == [[0, 3], [0, 3], [0]]


def test_sequences_compiled() -> None:
    scores, expert_ids, _ = draw(6, 3, 2, torch.float32)
    ids = torch.tensor([0, 1, 0, 1, 0, 1])

    def loss(scores: Tensor, expert_ids: Tensor, ids: Tensor) -> Tensor:
        return load_balancing_loss(scores, expert_ids, sequence_ids=ids, num_sequences=2)

    compiled = torch.compile(loss, fullgraph=True)(scores, expert_ids, ids)
    torch.testing.assert_close(compiled, loss(scores, expert_ids, ids))


# ---------------------------------------------------------------------------- counts that exist already


def test_loss_from_counts_by_hand() -> None:
    scores, counts = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]), torch.tensor([3, 1])
    options: dict[str, Any] = {"num_experts": 2, "topk": 1}
    # (2 * 3 + 2 * 1) * 2 / (1 * 16)
    assert load_balancing_loss_from_counts(scores, counts, num_tokens=4, **options) == 1.0
    assert load_balancing_loss_from_counts(scores, counts, num_tokens=4, coefficient=0.5, **options) == 0.5
    mask = torch.tensor([False, False, False, True])  # (1.5 * 3 + 1.5 * 1) * 2 / 9
    masked = load_balancing_loss_from_counts(scores, counts, num_tokens=3, padding_mask=mask, **options)
    torch.testing.assert_close(masked, torch.tensor(12 / 9))
    # Two groups of columns: (1.25 * 1 + 0.75 * 0 + 1 * 2 + 1 * 1) * 2 / 16
    wide = load_balancing_loss_from_counts(
        torch.tensor([[0.75, 0.25, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]]),
        torch.tensor([1, 0, 2, 1]),
        num_tokens=4,
        **options,
    )
    torch.testing.assert_close(wide, torch.tensor(4.25 / 8))
    assert load_balancing_loss_from_counts(scores[:0], counts, num_tokens=0, **options) == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_loss_from_counts_is_the_loss(dtype: torch.dtype) -> None:
    scores, _, mask = draw(13, 5, 3, dtype)
    expert_ids = torch.randint(0, 5, (13, 3), generator=torch.Generator().manual_seed(0))
    scores.requires_grad_()
    expected = 0.25 * load_balancing_loss(scores, expert_ids, padding_mask=mask)
    counts = torch.bincount(expert_ids[~mask].flatten(), minlength=5)
    for kind in (*INTEGERS, torch.uint64, *FLOATS):
        for num_tokens in (int((~mask).sum()), (~mask).sum()):
            found = load_balancing_loss_from_counts(
                scores, counts.to(kind), num_experts=5, topk=3, num_tokens=num_tokens, coefficient=0.25,
                padding_mask=mask,
            )  # fmt: skip
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(loss, scores)[0] for loss in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"tokens_per_expert": torch.ones(2)},
            ValueError,
            r"tokens_per_expert must be \[C\] with C = 3, as scores; got",
        ),
        ({"tokens_per_expert": torch.ones(3).bool()}, TypeError, "tokens_per_expert must be of an integer or floating"),
        ({"num_experts": 2}, ValueError, "num_experts must be a divisor of C = 3; got 2"),
        ({"topk": 0}, ValueError, "topk must be at least 1; got 0"),
        ({"num_tokens": -1}, ValueError, "num_tokens must be at least 0; got -1"),
        ({"num_tokens": 1.5}, TypeError, "num_tokens must be an int; got float"),
        ({"num_tokens": torch.ones(1)}, ValueError, r"num_tokens must be an int or \[\], a tensor of one number; got"),
        ({"coefficient": float("nan")}, ValueError, "coefficient must be finite; got nan"),
    ],
)
def test_messages_of_the_loss_from_counts(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"scores": SCORES, "tokens_per_expert": torch.ones(3), "num_experts": 3, "topk": 1, "num_tokens": 4}
    with pytest.raises(error, match=f"load_balancing_loss_from_counts: {message}"):
        load_balancing_loss_from_counts(**{**good, **wrong})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_sequences": 2}, ValueError, "num_sequences must be None without sequence_ids; got 2"),
        ({"sequence_ids": IDS[:, 0]}, ValueError, "num_sequences must be given with sequence_ids; got None"),
        ({"sequence_ids": IDS, "num_sequences": 1}, ValueError, r"sequence_ids must be of shape \[4\]; got shape"),
        ({"sequence_ids": SCORES[:, 0], "num_sequences": 1}, TypeError, "sequence_ids must be of an integer dtype"),
        ({"sequence_ids": IDS[:, 0], "num_sequences": -1}, ValueError, r"num_sequences must be in 0\.\.\d+; got -1"),
    ],
)
def test_messages_of_sequences(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        balance_statistics(SCORES, IDS, **options)
