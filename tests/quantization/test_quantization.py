"""Rows as int8: worked numbers, a model in NumPy, what is special, and what is refused."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import moeroute
from moeroute.dispatch import Backend
from moeroute.testing import assert_same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# ---------------------------------------------------------------------------- a model in NumPy


def nearest(values: np.ndarray) -> np.ndarray:
    """int8: ties to even, saturated, NaN is 0."""
    found = np.zeros(values.shape, np.int8)
    for place, value in np.ndenumerate(values):
        if not np.isnan(value):
            # Python rounds halves to even; an infinity is cut before it is rounded.
            found[place] = round(min(max(float(value), -128.0), 127.0))
    return found


def quantised(rows: np.ndarray, factors: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """float32 rows, row by row."""
    found, scales = np.zeros(rows.shape, np.int8), np.zeros(len(rows), np.float32)
    with np.errstate(all="ignore"):
        for r, row in enumerate(rows):
            values = row if factors is None else row * factors[r]
            scales[r] = (np.abs(values).max() if values.size else np.float32(0)) / np.float32(127)
            found[r] = nearest(values / scales[r])
    return found, scales


def as_tensors(pair: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])


def odd_rows(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Drawn rows; some are zeros, tiny, with ties, with an infinity, with a NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator) * 3
    for r, value in enumerate((torch.inf, torch.nan, -torch.inf, 1e-41, -0.0)):
        if r < rows and hidden:
            x[r, hidden // 2] = value
    if rows > 6:
        x[5] = 0.0
        x[6] = torch.arange(hidden) % 255 / 2 - 63.5  # the quotients are halves
    if rows > 8:
        x[7] *= 1e-42
        x[8] *= 1e30
    return x.to(dtype)


SIZES = ((11, 1), (11, 63), (11, 64), (9, 331), (3, 5000), (1, 7), (0, 5), (4, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), SIZES)
def test_rows_with_scales_of_their_own(rows: int, hidden: int, dtype: torch.dtype, backend: Backend) -> None:
    x = odd_rows(rows, hidden, dtype, rows + hidden)
    generator = torch.Generator().manual_seed(1)
    smooth = torch.randn(4, hidden, generator=generator).exp()
    experts = torch.randint(-1, 6, (rows,), generator=generator, dtype=torch.int32)
    wide, all_factors = x.float().numpy(), torch.cat([smooth, torch.ones(1, hidden)]).numpy()
    by_expert = all_factors[np.where((experts.numpy() >= 0) & (experts.numpy() < 4), experts.numpy(), 4)]
    cases: tuple[tuple[dict[str, Any], np.ndarray | None], ...] = (
        ({}, None),
        ({"smooth": smooth[0]}, np.broadcast_to(all_factors[0], x.shape)),
        ({"smooth": smooth, "expert_of_row": experts}, by_expert),
    )
    for options, factors in cases:
        found = moeroute.dynamic_quantize(x, **options, backend=backend)
        assert_same_bits(found, as_tensors(quantised(wide, factors)), str(list(options)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), SIZES)
def test_one_scale_for_all(rows: int, hidden: int, dtype: torch.dtype, backend: Backend) -> None:
    x = odd_rows(rows, hidden, dtype, rows)
    for scale, offset in ((30.0, 0.5), (-1e-3, -300.0), (1e38, 0.25), (torch.nan, 0.0), (torch.inf, 3.0)):
        with np.errstate(all="ignore"):
            product = x.float().numpy() * np.float32(scale)
            expected = nearest((product + np.float32(offset)).astype(np.float32))
        found = moeroute.quantize(x, torch.tensor([scale]), torch.tensor(offset), backend=backend)
        assert_same_bits(found, torch.from_numpy(expected), f"{scale} {offset}")


def plans() -> dict[str, moeroute.RoutingPlan]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 5, (11, 3), generator=generator)
    chosen = torch.rand(11, 4, generator=generator) < 0.4
    return {
        "ids": moeroute.plan_from_expert_ids(ids, 4, backend="reference"),
        "padded": moeroute.plan_from_expert_ids(ids, 4, align=8, backend="reference"),
        "range": moeroute.plan_from_expert_ids(ids, 4, expert_range=(1, 3), num_rows=40, backend="reference"),
        "ragged": moeroute.plan_from_routing_map(chosen, backend="reference"),
        "shared": moeroute.plan_from_row_of_slot(
            torch.randint(-1, 6, (11, 2), generator=generator), 11, 6, backend="reference"
        ),
        "many": moeroute.plan_from_expert_ids(  # rows of a token are written 64 at a time
            torch.randint(-1, 5, (3, 150), generator=generator), 4, backend="reference"
        ),
    }


PLANS = plans()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", PLANS)
def test_rows_quantised_while_they_are_spread(which: str, dtype: torch.dtype, backend: Backend) -> None:
    plan, hidden = PLANS[which], 131
    x = odd_rows(plan.num_tokens, hidden, dtype, 5)
    generator = torch.Generator().manual_seed(2)
    count = 4 if plan.rows_per_expert is None else len(plan.rows_per_expert)
    smooth = torch.randn(count, hidden, generator=generator).exp()
    smooth[0, 0] = torch.inf  # which makes NaN of a zero, but not in a padding row
    drawn = torch.randint(-1, count + 1, (plan.num_rows,), generator=generator, dtype=torch.int32)
    tokens = plan.token_of_row.tolist()
    kinds: dict[str, dict[str, Any]] = {
        "none": {}, "one": {"smooth": smooth[0]}, "given": {"smooth": smooth, "expert_of_row": drawn}
    }  # fmt: skip
    if plan.expert_of_row is not None:
        kinds["plan"] = {"smooth": smooth}
    for kind, options in kinds.items():
        experts = {"given": drawn, "plan": plan.expert_of_row}.get(kind)
        rows, scales = np.zeros((plan.num_rows, hidden), np.int8), np.zeros(plan.num_rows, np.float32)
        for r, t in enumerate(tokens):
            if t >= 0:
                factors = None
                if kind != "none":
                    e = 0 if experts is None else int(experts[r])
                    factors = smooth[e].numpy()[None] if 0 <= e < count else None
                made, scale = quantised(x[t : t + 1].float().numpy(), factors)
                rows[r], scales[r] = made[0], scale[0]
        found = moeroute.spread_quantized(x, plan, **options, backend=backend)
        assert_same_bits(found, as_tensors((rows, scales)), f"{which} {kind}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", PLANS)
def test_one_scale_for_all_while_they_are_spread(which: str, dtype: torch.dtype, backend: Backend) -> None:
    """The bits of `quantize`, then `spread`."""
    plan, hidden = PLANS[which], 131
    for tokens, scale, offset in (
        (odd_rows(plan.num_tokens, hidden, dtype, 5), 30.0, 0.5),
        (odd_rows(plan.num_tokens, 5000, dtype, 6), -1.0, 3.0),
    ):
        scale_, offset_ = torch.tensor([scale]), torch.tensor(offset)
        before = moeroute.quantize(tokens, scale_, offset_, backend="reference")
        expected = torch.cat([before, before.new_zeros(1, tokens.shape[1])])[plan.token_of_row]
        found = moeroute.quantize(tokens, scale_, offset_, plan=plan, backend=backend)
        assert_same_bits(found, expected, which)
        wide = torch.full((plan.num_rows, tokens.shape[1] + 3), 7, dtype=torch.int8)
        out = moeroute.quantize(tokens, scale_, offset_, plan=plan, out=wide[:, 1:-2], backend=backend)
        assert_same_bits(out, expected, f"{which}, strided")
        assert (wide[:, 0] == 7).all()
        assert (wide[:, -2:] == 7).all()


# ---------------------------------------------------------------------------- worked numbers

XD = torch.tensor([[0.5, 1.5, 2.5, -127.0], [0.0, 0.0, 0.0, 0.0], [1.0, -2.0, 4.0, 3.0]])
IDS = torch.tensor([[1, 0], [0, 2], [1, 2]])
FIRST, NOTHING, THIRD = [0, 2, 2, -127], [0, 0, 0, 0], [32, -64, 127, 95]


@pytest.mark.parametrize("dtype", DTYPES)
def test_worked_numbers(dtype: torch.dtype, backend: Backend) -> None:
    """Three tokens, two experts each; a capacity of one; and one scale for all."""
    x, small = XD.to(dtype), (torch.tensor(4.0) / 127).item()
    plan = moeroute.plan_from_expert_ids(IDS, 3, backend=backend)
    rows, scales = moeroute.spread_quantized(x, plan, backend=backend)
    assert rows.tolist() == [FIRST, NOTHING, FIRST, THIRD, NOTHING, THIRD]
    assert scales.tolist() == [1.0, 0.0, 1.0, small, 0.0, small]
    smooth = torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 0.5], [1.0, 1.0, 0.5, 1.0]])
    rows, scales = moeroute.spread_quantized(x, plan, smooth=smooth, backend=backend)
    assert rows.tolist() == [FIRST, NOTHING, [2, 3, 5, -127], [64, -64, 127, 48], NOTHING, [42, -85, 85, 127]]
    torch.testing.assert_close(scales, torch.tensor([1, 0, 0.5, 0.031496063, 0, 0.023622047]), rtol=1e-7, atol=0)
    plan = moeroute.plan_from_expert_ids(IDS, 3, capacity=1, pad_to_capacity=True, backend=backend)
    rows, scales = moeroute.spread_quantized(x, plan, backend=backend)
    assert rows.tolist() == [FIRST, FIRST, NOTHING]
    assert scales.tolist() == [1.0, 1.0, 0.0]
    x = torch.tensor([[0.5, 1.5, 100.0, -100.0], [0.25, -0.75, 1.0, 2.0], [0.0, 0.1, 0.2, 0.3]]).to(dtype)
    rows = moeroute.quantize(x, torch.tensor(2.0), torch.tensor(0.5), backend=backend)
    assert rows.tolist() == [[2, 4, 127, -128], [1, -1, 2, 4], [0, 1, 1, 1]]
    rows = moeroute.quantize(x, torch.tensor(2.0), torch.tensor(0.5), plan=plan, backend=backend)
    assert rows.tolist() == [[2, 4, 127, -128], [2, 4, 127, -128], [1, -1, 2, 4]]


def test_halves_go_to_the_even_neighbour(backend: Backend) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, 126.5, -126.5]])
    assert moeroute.dynamic_quantize(x, backend=backend)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, 126, -126]]


def test_infinities_and_nan(backend: Backend) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1e30, -1e30]])
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    assert moeroute.quantize(x, one, zero, backend=backend).tolist() == [[127, -128, 0, 127, -128]]
    rows, scales = moeroute.dynamic_quantize(torch.stack([x[0], x[0].nan_to_num(nan=2.0, posinf=torch.inf)]))
    assert not rows.any()
    assert scales[0].isnan()
    assert scales[1] == torch.inf


def test_a_large_result_in_two_threads(threads: int) -> None:
    """Rows that go past the caches, and the chunks of the threads."""
    x = odd_rows(700, 2048, torch.bfloat16, 9)
    plan = moeroute.plan_from_expert_ids(torch.rand(700, 9).topk(5).indices, 9, align=32)
    found = moeroute.spread_quantized(x, plan)
    assert_same_bits(found, moeroute.spread_quantized(x, plan, backend="reference"))
    assert_same_bits(moeroute.dynamic_quantize(x.repeat(4, 1))[0][:700], moeroute.dynamic_quantize(x)[0])
    static = moeroute.quantize(x, torch.tensor(9.0), SCALE, plan=plan)
    assert_same_bits(static, moeroute.spread(moeroute.quantize(x, torch.tensor(9.0), SCALE), plan))


# ---------------------------------------------------------------------------- torch


def test_no_gradient_goes_through(backend: Backend) -> None:
    x, smooth = XD.clone().requires_grad_(), torch.ones(4, requires_grad=True)
    plan = moeroute.plan_from_expert_ids(IDS, 3)
    results = (
        *moeroute.dynamic_quantize(x, smooth=smooth, backend=backend),
        *moeroute.spread_quantized(x, plan, smooth=smooth, backend=backend),
        moeroute.quantize(x, smooth[:1], smooth[:1], backend=backend),
    )
    assert not any(result.requires_grad for result in results)
    expected = (*moeroute.dynamic_quantize(XD), *moeroute.spread_quantized(XD, plan))
    assert_same_bits(results[:4], expected)


def test_transforms_see_constants() -> None:
    plan = moeroute.plan_from_expert_ids(IDS, 3)

    def scales(x: Tensor) -> Tensor:
        return moeroute.dynamic_quantize(x)[1].sum() + moeroute.spread_quantized(x, plan)[1].sum()

    found = torch.func.vmap(lambda x: moeroute.dynamic_quantize(x))(torch.stack([XD, -XD]))
    assert_same_bits(found[0][1], moeroute.dynamic_quantize(-XD)[0])
    assert not torch.func.grad(scales)(XD).any()
    assert torch.func.jvp(scales, (XD,), (torch.ones_like(XD),))[1] == 0
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(XD, torch.ones_like(XD))
        assert_same_bits(moeroute.quantize(dual, SCALE, SCALE), moeroute.quantize(XD, SCALE, SCALE))
        assert not torch.autograd.forward_ad.unpack_dual(scales(dual)).tangent.any()


def test_compiled() -> None:
    plan = moeroute.plan_from_expert_ids(IDS, 3, align=2)
    smooth = torch.rand(3, 4)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        static = moeroute.quantize(x, x.new_tensor(2.0), smooth[0, :1])
        spread = moeroute.quantize(x, smooth[0, 1:2], smooth[0, :1], plan=plan)
        return *moeroute.spread_quantized(x, plan, smooth=smooth), *moeroute.dynamic_quantize(x), static, spread

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(XD), call(XD))


# ---------------------------------------------------------------------------- errors

ROWS, SCALE = torch.ones(3, 4), torch.tensor(1.0)
PLAN = moeroute.plan_from_expert_ids(IDS, 3)
INT8, SCALES = torch.zeros(3, 4, dtype=torch.int8), torch.zeros(3)
MESSAGES: tuple[tuple[Callable[[], Any], type[Exception], str], ...] = (
    (lambda: moeroute.dynamic_quantize(ROWS.double()), TypeError, "dynamic_quantize: rows must be float16, bfloat16 or float32; got torch.float64"),
    (lambda: moeroute.dynamic_quantize(ROWS.int()), TypeError, "dynamic_quantize: rows must be float16, bfloat16 or float32; got torch.int32"),
    (lambda: moeroute.dynamic_quantize(ROWS[0]), ValueError, "dynamic_quantize: rows must be of shape [*, *]; got shape [4]"),
    (lambda: moeroute.dynamic_quantize(ROWS, smooth=ROWS[0, :3]), ValueError, "dynamic_quantize: smooth must be [H] or [E, H] with H = 4; got shape [3]"),
    (lambda: moeroute.dynamic_quantize(ROWS, smooth=ROWS[0].half()), TypeError, "dynamic_quantize: smooth must be torch.float32; got torch.float16"),
    (lambda: moeroute.dynamic_quantize(ROWS, smooth=ROWS), ValueError, "dynamic_quantize: expert_of_row must be given with smooth [E, H]; got None"),
    (lambda: moeroute.dynamic_quantize(ROWS, smooth=ROWS[0], expert_of_row=SCALES.int()), ValueError, "dynamic_quantize: expert_of_row must be None without smooth [E, H]; got another value"),
    (lambda: moeroute.dynamic_quantize(ROWS, smooth=ROWS, expert_of_row=SCALES.long()), TypeError, "dynamic_quantize: expert_of_row must be torch.int32; got torch.int64"),
    (lambda: moeroute.dynamic_quantize(ROWS, smooth=ROWS, expert_of_row=SCALES[:2].int()), ValueError, "dynamic_quantize: expert_of_row must be of shape [3]; got shape [2]"),
    (lambda: moeroute.dynamic_quantize(ROWS, out=INT8), TypeError, "dynamic_quantize: out must be a pair of tensors or None; got Tensor"),  # type: ignore[arg-type]
    (lambda: moeroute.dynamic_quantize(ROWS, out=(INT8, SCALES[:2])), ValueError, "dynamic_quantize: out must be of shape [3]; got shape [2]"),
    (lambda: moeroute.quantize(ROWS, ROWS, SCALE), ValueError, "quantize: scale must be of one element; got shape [3, 4]"),
    (lambda: moeroute.quantize(ROWS, 2.0, SCALE), TypeError, "quantize: scale must be a torch.Tensor; got float"),  # type: ignore[arg-type]
    (lambda: moeroute.quantize(ROWS, SCALE, SCALE.double()), TypeError, "quantize: offset must be torch.float32; got torch.float64"),
    (lambda: moeroute.quantize(ROWS, SCALE, SCALE, out=ROWS), TypeError, "quantize: out must be torch.int8; got torch.float32"),
    (lambda: moeroute.quantize(ROWS[:2], SCALE, SCALE, plan=PLAN), ValueError, "quantize: rows must be [T, H] with T = 3, as the plan; got shape [2, 4]"),
    (lambda: moeroute.quantize(ROWS, SCALE, SCALE, plan=IDS), TypeError, "quantize: plan must be a moeroute.RoutingPlan; got Tensor"),  # type: ignore[arg-type]
    (lambda: moeroute.quantize(ROWS, SCALE, SCALE, plan=PLAN, out=INT8), ValueError, "quantize: out must be of shape [6, 4]; got shape [3, 4]"),
    (lambda: moeroute.spread_quantized(ROWS[:2], PLAN), ValueError, "spread_quantized: x must be [T, H] with T = 3, as the plan; got shape [2, 4]"),
    (lambda: moeroute.spread_quantized(ROWS.double(), PLAN), TypeError, "spread_quantized: x must be float16, bfloat16 or float32; got torch.float64"),
    (lambda: moeroute.spread_quantized(ROWS, PLAN, smooth=ROWS[:2]), ValueError, "spread_quantized: smooth must be [H] or [E, H] with E = 3, as the plan; got shape [2, 4]"),
    (lambda: moeroute.spread_quantized(ROWS, moeroute.plan_from_row_of_slot(IDS, 3, 3), smooth=ROWS), ValueError, "spread_quantized: expert_of_row must be given with smooth [E, H]; got None"),
    (lambda: moeroute.spread_quantized(ROWS, PLAN, out=(INT8, SCALES)), ValueError, "spread_quantized: out must be of shape [6, 4]; got shape [3, 4]"),
)  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), MESSAGES, ids=itertools.count())
def test_messages(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == f"moeroute.{message}"


def test_the_two_outputs_may_not_share_memory() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    rows, scales = memory[:12].view(torch.int8).view(3, 4), memory[8:20].view(torch.float32)
    with pytest.raises(ValueError, match="out must be memory of its own; got memory shared with an input"):
        moeroute.dynamic_quantize(ROWS, out=(rows, scales))
