"""MX fp8 against a model in NumPy's float64, in which every step is exact."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from moeroute.interop.torch_npu import (
    mx,
    npu_grouped_matmul,
    npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant_v2,
)

Array = npt.NDArray[Any]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TYPES = {
    E4M3: (4, 3, 7, 448.0, 8),
    E5M2: (5, 2, 15, 57344.0, 15),
}  # bits of exponent and mantissa, bias, largest, its exponent
MODES = {2: E5M2, 3: E4M3, 16: E5M2, 17: E4M3}


# ---------------------------------------------------------------------------- the model


def value_of(code: int, dtype: torch.dtype) -> float:
    """What a byte stands for, by the definition of the format."""
    exponent_bits, mantissa_bits, bias, _, _ = TYPES[dtype]
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
    sign = -1.0 if code & 0x80 else 1.0
    if dtype is E4M3 and code & 0x7F == 0x7F:
        return math.nan
    if dtype is E5M2 and exponent == 2**exponent_bits - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


VALUES = {dtype: np.array([value_of(code, dtype) for code in range(256)]) for dtype in TYPES}


def decoded(elements: Tensor) -> Array:
    found: Array = VALUES[elements.dtype][elements.view(torch.uint8).numpy()]
    return found


def nearest_code(values: Array, dtype: torch.dtype) -> Array:
    """The byte of each value: nearest, ties to the even byte, saturated; NaN is 0x7f whatever its sign."""
    positive = VALUES[dtype][:128]
    positive = positive[np.isfinite(positive)]
    magnitude = np.minimum(np.abs(values), positive[-1])
    above = np.searchsorted(positive, magnitude).clip(0, len(positive) - 1)
    below = np.maximum(above - 1, 0)
    up, down = positive[above] - magnitude, magnitude - positive[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = np.where(magnitude == positive[above], above, code)
    return np.where(np.isnan(values), 0x7F, code + 128 * np.signbit(values)).astype(np.uint8)


def scale_byte(largest: Array, dtype: torch.dtype, rule: str) -> Array:
    """The first power of two with which nothing saturates, or the last one that is not above 2^-emax * largest."""
    _, _, _, most, top = TYPES[dtype]
    powers = np.arange(-126 if rule == "round" else -127, 128)
    if rule == "round":
        found = powers[np.searchsorted(most * 2.0**powers, largest).clip(0, len(powers) - 1)]
    else:
        found = powers[(np.searchsorted(2.0 ** (powers + top), largest, side="right") - 1).clip(0)]
    byte = np.where(largest == 0, 0, found + 127)
    return np.where(np.isfinite(largest), byte, 255).astype(np.uint8)


def truncated(values: Array) -> Array:
    """float32 values without what a bfloat16 has no room for."""
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def quantized(
    blocks: Array, dtype: torch.dtype, rule: str, truncate: bool = False, smallest: float = 0.0
) -> tuple[Array, Array]:
    """Codes and scale bytes of blocks [..., 32] (or shorter ones) along the last axis."""
    largest = np.abs(blocks).max(-1)
    largest = np.where(np.isnan(largest), largest, np.maximum(largest, np.float64(np.float32(smallest))))
    byte = scale_byte(truncated(largest) if truncate else largest, dtype, rule)
    exponent = byte[..., None].astype(np.float64) - 127
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.where((exponent == 128) & np.isfinite(blocks), 0.0, blocks * 2.0**-exponent)
    return nearest_code(scaled, dtype), byte


def same_codes(actual: Tensor, expected: Array) -> None:
    """The same bytes; any NaN is as good as any other."""
    assert actual.shape == expected.shape
    codes = actual.view(torch.uint8).numpy()
    nan = np.isnan(VALUES[actual.dtype])
    np.testing.assert_array_equal(np.where(nan[codes], 0x7F, codes), np.where(nan[expected], 0x7F, expected))


def same_scale(actual: Tensor, expected: Array, dtype: torch.dtype = torch.float8_e8m0fnu) -> None:
    assert actual.dtype is dtype
    assert actual.is_contiguous()
    np.testing.assert_array_equal(actual.view(torch.uint8).numpy(), expected)


# ---------------------------------------------------------------------------- rows


def every_value(dtype: torch.dtype) -> Tensor:
    """[65536, 32]: every 16-bit float as the first of a block, and 31 that are no larger, some in the middle of two."""
    first = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    parts = torch.rand(65536, 31, generator=torch.Generator().manual_seed(0)) * 2 - 1
    parts[:, :8] = (parts[:, :8] * 32).round() / 32
    parts[:, 8:16] *= 2.0 ** -torch.arange(0, 16, 2)
    return torch.cat([first[:, None], (first.float()[:, None] * parts).to(dtype)], 1)


@pytest.mark.parametrize("quant_mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_of_every_16_bit_float(dtype: torch.dtype, quant_mode: int) -> None:
    rows = every_value(dtype)
    elements, scale = mx.quantize_rows(rows, quant_mode)
    smallest = 1e-4 if quant_mode > 3 else 0.0
    values = rows.double().numpy()
    codes, byte = quantized(values, MODES[quant_mode], "round", dtype is torch.float16, smallest)
    assert elements.dtype is MODES[quant_mode]
    same_codes(elements, codes)
    same_scale(scale, np.stack([byte, np.zeros_like(byte)], 1))


@pytest.mark.parametrize("dst_type, dtype", [(24, E4M3), (23, E5M2)])
def test_floor_rule_of_every_bfloat16(dst_type: int, dtype: torch.dtype) -> None:
    rows = every_value(torch.bfloat16)
    elements, scale = mx.npu_dynamic_mx_quant(rows, dst_type=dst_type)
    codes, byte = quantized(rows.double().numpy(), dtype, "floor")
    same_codes(elements, codes)
    same_scale(scale, np.stack([byte, np.zeros_like(byte)], 1)[:, None], torch.uint8)


@pytest.mark.parametrize("width", [0, 1, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_any_width(dtype: torch.dtype, width: int) -> None:
    """The last block is shorter; a column of byte 0 makes the number of scales even."""
    generator = torch.Generator().manual_seed(width)
    rows = (torch.randn(7, width, generator=generator) * 10.0 ** torch.arange(-3, 4)[:, None]).to(dtype)
    rows = torch.stack([rows, rows], 2)[..., 0]  # not contiguous
    elements, scale = mx.quantize_rows(rows, 3)
    blocks = -(-width // 32)
    assert scale.shape == (7, blocks + blocks % 2)
    expected = np.zeros(scale.shape, np.uint8)
    for block in range(blocks):
        part = slice(32 * block, min(32 * block + 32, width))
        codes, expected[:, block] = quantized(rows[:, part].double().numpy(), E4M3, "round", dtype is torch.float16)
        same_codes(elements[:, part].contiguous(), codes)
    same_scale(scale, expected)


def byte_and_values(values: list[float], quant_mode: int) -> tuple[int, list[float]]:
    row = torch.tensor([values + [0.0] * (32 - len(values))])
    elements, scale = mx.quantize_rows(row, quant_mode)
    return int(scale.view(torch.uint8)[0, 0]), decoded(elements)[0, : len(values)].tolist()


def test_worked_numbers_of_round_scale() -> None:
    """Scales are 2^(byte - 127): the largest, 448 or 57344, needs none; anything above needs a 2."""
    assert byte_and_values([448.0, -448.0, 17.0, 19.0, 18.0], 3) == (127, [448, -448, 16, 20, 18])
    assert byte_and_values([448.5, 224.0], 3) == (128, [224, 112])  # 224.25 in steps of 16
    assert byte_and_values([1.0, 2.0**-18, 1.5 * 2.0**-18], 3) == (119, [256, 0, 2.0**-9])  # half a step: to the even 0
    assert byte_and_values([57344.0, 9.0, 11.0], 2) == (127, [57344, 8, 12])
    assert byte_and_values([57345.0], 2) == (128, [28672])
    assert byte_and_values([0.0, -0.0], 3) == (0, [0, 0])
    assert byte_and_values([0.0], 17) == (127 - 22, [0])  # 1e-4 is 1.6 * 2^-14, and 14 + 8 = 22
    assert byte_and_values([1e-5], 17) == (127 - 22, [40.0])  # 41.9, in steps of 4
    assert byte_and_values([0.0], 16) == (127 - 29, [0])


def test_worked_numbers_of_the_floor_rule() -> None:
    """The largest may saturate: 1.9 * 2^8 has exponent 8, and so the scale 1."""
    row = torch.tensor([[486.4, 100.0, -1.0]])
    elements, scale = mx.npu_dynamic_mx_quant(row, dst_type=torch.float8_e4m3fn)
    assert decoded(elements).tolist() == [[448, 96, -1]]
    assert scale.view(torch.uint8).tolist() == [[[127, 0]]]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("quant_mode", MODES)
def test_a_block_with_an_infinity_or_nan(quant_mode: int, bad: float) -> None:
    """Byte 255; only that block is lost."""
    row = torch.ones(1, 96)
    row[0, 40] = bad
    elements, scale = mx.quantize_rows(row, quant_mode)
    most = TYPES[MODES[quant_mode]][3]
    one = 2.0 ** TYPES[MODES[quant_mode]][4]
    expected = np.concatenate([np.full(32, one), np.zeros(32), np.full(32, one)])
    expected[40] = bad if math.isnan(bad) else math.copysign(most, bad)
    np.testing.assert_array_equal(decoded(elements)[0], expected)
    byte = 127 - TYPES[MODES[quant_mode]][4]
    same_scale(scale, np.array([[byte, 255, byte, 0]], np.uint8))


@pytest.mark.parametrize("rule", ["round", "floor"])
def test_the_smallest_and_largest_of_float32(rule: str) -> None:
    """Denormal blocks keep the smallest scale; the largest float32 is in range."""
    tiny, huge = 2.0**-149, torch.finfo(torch.float32).max
    row = torch.tensor([[tiny, 3 * tiny], [2.0**-126, tiny], [huge, 1.0], [2.0**-118, 2.0**-126]])
    if rule == "round":
        elements, scale = mx.quantize_rows(row, 3)
        scale = scale.view(torch.float8_e8m0fnu)[:, :1]
    else:
        elements, pairs = mx.npu_dynamic_mx_quant(row, dst_type=24)
        scale = pairs[:, 0, :1].contiguous()
    codes, byte = quantized(row.double().numpy(), E4M3, rule)
    same_codes(elements, codes)
    same_scale(scale.contiguous(), byte[:, None], torch.float8_e8m0fnu if rule == "round" else torch.uint8)
    assert byte.tolist() == ([1, 1, 247, 1] if rule == "round" else [0, 0, 246, 1])


# ---------------------------------------------------------------------------- along an axis, and down the rows


@pytest.mark.parametrize("dst_type, dtype", [(292, E4M3), (291, E5M2)])
@pytest.mark.parametrize("axis, block_size", [(-1, 32), (-2, 32), (0, 32), (1, 32), (-1, 64), (0, 96), (2, 1024)])
def test_any_axis_and_size(axis: int, block_size: int, dst_type: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(70, 33, 128, generator=generator).to(torch.bfloat16)
    elements, scale = mx.npu_dynamic_mx_quant(values, axis=axis, dst_type=dst_type, block_size=block_size)
    size = values.shape[axis]
    shape = list(values.shape)
    shape[axis] = -(-size // (2 * block_size))
    assert scale.shape == (*shape, 2)
    expected = np.zeros((*shape, 2), np.uint8)
    for block in range(-(-size // block_size)):
        here = torch.arange(block_size * block, min(block_size * (block + 1), size))
        part = values.index_select(axis, here).movedim(axis, -1).double().numpy()
        codes, byte = quantized(part, dtype, "floor")
        found = elements.view(torch.uint8).index_select(axis, here).movedim(axis, -1).contiguous().view(dtype)
        same_codes(found, codes)
        np.moveaxis(expected, axis if axis >= 0 else axis - 1, 0)[block // 2, ..., block % 2] = byte
    same_scale(scale, expected, torch.uint8)


def test_rows_in_groups() -> None:
    """A group's blocks begin at its first row; its scales lie at first // 64 + group."""
    ends = [5, 5, 70, 134, 134, 200]
    rows = torch.randn(210, 6, generator=torch.Generator().manual_seed(2)).to(torch.float16)
    for dst_type, dtype in ((23, E5M2), (torch.float8_e4m3fn, E4M3)):
        elements, scale = mx.npu_grouped_dynamic_mx_quant(rows, torch.tensor(ends), dst_type=dst_type)
        codes = np.zeros((210, 6), np.uint8)
        scales = np.zeros((210 // 64 + 6, 6, 2), np.uint8)
        start = 0
        for group, end in enumerate(ends):
            for number, first in enumerate(range(start, end, 32)):
                part = slice(first, min(first + 32, end))
                found, byte = quantized(rows[part].T.double().numpy(), dtype, "floor")
                codes[part] = found.T
                scales[start // 64 + group + number // 2, :, number % 2] = byte
            start = end
        same_codes(elements, codes)
        same_scale(scale, scales, torch.uint8)
    elements, scale = mx.npu_grouped_dynamic_mx_quant(rows[:0], torch.tensor([0, 0], dtype=torch.int32))
    assert (elements.shape, scale.shape) == ((0, 6), (2, 6, 2))


# ---------------------------------------------------------------------------- products


def drawn(rows: int, size: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Finite elements [rows, size] and scale bytes [rows, pairs, 2]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 120, (rows, size), generator=generator)
    codes += 128 * torch.randint(0, 2, codes.shape, generator=generator)
    scale = torch.randint(120, 134, (rows, -(-size // 64), 2), generator=generator)
    return codes.to(torch.uint8).view(dtype), scale.to(torch.uint8)


@pytest.mark.parametrize("size", [0, 1, 32, 64, 96, 130])
@pytest.mark.parametrize("left, right", [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)])
def test_scaled_product(left: torch.dtype, right: torch.dtype, size: int) -> None:
    """The sum over blocks of the products of elements, times both scales."""
    x, x_scale = drawn(5, size, left, 3)
    wt, wt_scale = drawn(7, size, right, 4)
    expected = np.zeros((5, 7))
    for block in range(-(-size // 32)):
        part = slice(32 * block, min(32 * block + 32, size))
        place = (slice(None), block // 2, block % 2)
        powers = x_scale[place].double().numpy()[:, None] + wt_scale[place].double().numpy()[None] - 254
        inner = decoded(x[:, part].contiguous()) @ decoded(wt[:, part].contiguous()).T
        expected += inner * 2.0**powers
    scale = x_scale.view(torch.float8_e8m0fnu)
    got = mx.scaled_product(x, wt.view(torch.uint8).t().view(right), scale, wt_scale.transpose(0, 1))
    torch.testing.assert_close(got, torch.from_numpy(expected).float(), rtol=2e-7, atol=0)


def test_scaled_product_where_one_side_alone_is_out_of_range() -> None:
    """448 * 2^127 is no float32, and 2^-127 on the other side brings it back; a scale of 255 makes NaN."""
    x, w = torch.full((2, 1), 448.0).to(E4M3), torch.full((1, 2), 1.0).to(E4M3)
    x_scale = torch.tensor([[[254, 0]], [[127, 0]]], dtype=torch.uint8)
    w_scale = torch.tensor([[[0, 0], [255, 0]]], dtype=torch.uint8)
    expected = torch.tensor([[448.0, math.nan], [448.0 * 2.0**-127, math.nan]])
    torch.testing.assert_close(mx.scaled_product(x, w, x_scale, w_scale), expected, equal_nan=True, rtol=0, atol=0)


def test_what_is_quantised_and_multiplied_is_near_the_product() -> None:
    generator = torch.Generator().manual_seed(5)
    x, w = torch.randn(9, 96, generator=generator), torch.randn(96, 4, generator=generator)
    x_fp8, x_scale = mx.quantize_rows(x, 3)
    w_fp8, w_scale = mx.npu_dynamic_mx_quant(w, axis=0, dst_type=24)
    got = mx.scaled_product(x_fp8, w_fp8, x_scale.unflatten(1, (-1, 2)), w_scale)
    torch.testing.assert_close(got, x @ w, rtol=0, atol=0.1 * 96**0.5)


# ---------------------------------------------------------------------------- grouped products


E8M0 = torch.float8_e8m0fnu


def times_scales(elements: Tensor, scale: Tensor) -> Array:
    """float64 [R, K] of elements [R, K] and scale bytes [R, ceil(K / 64), 2]."""
    powers = 2.0 ** (scale.numpy().reshape(len(scale), -1).astype(np.float64) - 127)
    found: Array = decoded(elements) * np.repeat(powers, 32, 1)[:, : elements.shape[1]]
    return found


def weights_of(experts: int, size: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Array]]:
    """fp8 [E, K, N] as a transposed view, scale bytes [E, ceil(K / 64), N, 2], and the matrices in float64."""
    drawn_ones = [drawn(width, size, dtype, 10 + expert) for expert in range(experts)]
    weight = torch.stack([elements.view(torch.uint8) for elements, _ in drawn_ones]).transpose(1, 2).view(dtype)
    scale = torch.stack([scale for _, scale in drawn_ones]).transpose(1, 2)
    return weight, scale, [times_scales(*pair).T for pair in drawn_ones]


def near(actual: Tensor, expected: Array, dtype: torch.dtype) -> None:
    assert actual.dtype is dtype
    rtol = {torch.float32: 3e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(actual.double(), torch.from_numpy(expected), rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 130])
@pytest.mark.parametrize("left, right", [(E4M3, E4M3), (E5M2, E4M3)])
def test_grouped_matmul_of_rows(left: torch.dtype, right: torch.dtype, size: int, out: torch.dtype) -> None:
    """Rows behind the last group are 0, an empty group costs nothing, float8_e8m0fnu may be named."""
    x, x_scale = drawn(9, size, left, 3)
    weight, scale, matrices = weights_of(3, size, 6, right)
    bias = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    exact = times_scales(x, x_scale)
    expected = np.zeros((9, 6))
    for expert, start, stop in ((0, 0, 3), (2, 3, 8)):
        expected[start:stop] = exact[start:stop] @ matrices[expert] + bias[expert].double().numpy()
    arguments: dict[str, Any] = {
        "bias": [bias],
        "group_list": torch.tensor([3, 0, 5]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
        "output_dtype": out,
    }
    (got,) = npu_grouped_matmul(
        [x], [weight], scale=[scale.view(E8M0)], per_token_scale=[x_scale.view(E8M0)], **arguments
    )
    near(got, expected, out)
    (again,) = npu_grouped_matmul(
        [x.view(torch.uint8)], list(weight), scale=list(scale), per_token_scale=[x_scale], scale_dtype=293,
        per_token_scale_dtype=293, x_dtype=left, weight_dtype=right, **arguments,
    )  # fmt: skip
    assert torch.equal(again, got)
    parts = npu_grouped_matmul(
        [x], list(weight), scale=list(scale.view(E8M0)), per_token_scale=[x_scale.view(E8M0)],
        **arguments | {"split_item": 0},
    )  # fmt: skip
    assert torch.equal(torch.cat(parts), got[:8])


def test_grouped_matmul_of_lists() -> None:
    """Each product has a K, an N and scales of its own; so have the rows of a list of tensors."""
    pairs = [(drawn(4, 96, E4M3, 1), drawn(5, 96, E4M3, 2)), (drawn(2, 40, E4M3, 3), drawn(7, 40, E4M3, 4))]
    got = npu_grouped_matmul(
        [x.view(torch.uint8).view(1, *x.shape).view(E4M3) for (x, _), _ in pairs],
        [w.view(torch.uint8).t().view(E4M3) for _, (w, _) in pairs],
        scale=[scale.transpose(0, 1).view(E8M0) for _, (_, scale) in pairs],
        per_token_scale=[scale.view(E8M0) for (_, scale), _ in pairs],
        group_type=-1,
        output_dtype=torch.float32,
    )
    for result, (left, right) in zip(got, pairs, strict=True):
        near(result[0], times_scales(*left) @ times_scales(*right).T, torch.float32)
    weight, scale, matrices = weights_of(2, 64, 3, E5M2)
    rows = [drawn(3, 64, E5M2, 5), drawn(1, 64, E5M2, 6)]
    (joined,) = npu_grouped_matmul(
        [x for x, _ in rows], list(weight), scale=[scale.view(E8M0)],
        per_token_scale=[row_scale.view(E8M0) for _, row_scale in rows], group_type=0, split_item=3, output_dtype=6,
    )  # fmt: skip
    near(joined, np.concatenate([times_scales(*rows[i]) @ matrices[i] for i in range(2)]), torch.float32)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[5, 0, 65, 64, 0, 66], [32], [0, 0], [1, 31, 33]])
@pytest.mark.parametrize("left, right", [(E4M3, E4M3), (E5M2, E4M3)])
def test_grouped_matmul_of_parts(left: torch.dtype, right: torch.dtype, sizes: list[int], out: torch.dtype) -> None:
    """The gradient of the weights: every group's rows begin a block, whose scales lie at first // 64 + group."""
    total = sum(sizes) + 3  # rows behind the last group
    generator = torch.Generator().manual_seed(4)

    def rows(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Array]:
        elements, _ = drawn(total, width, dtype, width)
        scale = torch.randint(120, 134, (total // 64 + len(sizes), width, 2), generator=generator).to(torch.uint8)
        exact = np.zeros((total, width))
        for group, size in enumerate(sizes):
            start = sum(sizes[:group])
            for row in range(start, start + size):
                number = (row - start) // 32
                byte = scale[start // 64 + group + number // 2, :, number % 2]
                exact[row] = decoded(elements)[row] * 2.0 ** (byte.double().numpy() - 127)
        return elements, scale, exact

    x, x_scale, x_exact = rows(7, left)
    grad, grad_scale, grad_exact = rows(5, right)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    expected = np.stack([x_exact[a:b].T @ grad_exact[a:b] for a, b in zip(starts, ends, strict=True)])
    for list_type, group_list in ((0, torch.from_numpy(ends)), (1, torch.tensor(sizes))):
        (got,) = npu_grouped_matmul(
            [x.view(torch.uint8).t().view(left)], [grad], scale=[grad_scale], per_token_scale=[x_scale.transpose(0, 1)],
            scale_dtype=293, per_token_scale_dtype=293, group_list=group_list, group_list_type=list_type, group_type=2,
            split_item=3, output_dtype=out,
        )  # fmt: skip
        near(got, expected, out)


def test_gradients_of_a_product_in_blocks() -> None:
    """What is quantised down the rows and multiplied is near the gradient of the weights, as plain torch finds it."""
    generator = torch.Generator().manual_seed(6)
    x, grad = torch.randn(150, 6, generator=generator), torch.randn(150, 4, generator=generator)
    ends = torch.tensor([40, 40, 150])
    (x_fp8, x_scale), (grad_fp8, grad_scale) = (
        mx.npu_grouped_dynamic_mx_quant(rows, ends, dst_type=24) for rows in (x, grad)
    )
    (got,) = npu_grouped_matmul(
        [x_fp8.t()], [grad_fp8], scale=[grad_scale], per_token_scale=[x_scale.transpose(0, 1)], scale_dtype=293,
        per_token_scale_dtype=293, group_list=ends, group_type=2, split_item=3, output_dtype=torch.float32,
    )  # fmt: skip
    weight = torch.zeros(3, 6, 4, requires_grad=True)
    product = torch.cat([x[:40] @ weight[0], x[40:] @ weight[2]])
    (expected,) = torch.autograd.grad(product, weight, grad)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.1 * 110**0.5)
    assert not got[1].any()


def test_finalize_routing_of_blocks() -> None:
    """The product of MX blocks with a bias, weighted, at its token; the shared expert's rows on top."""
    x, x_scale = drawn(6, 96, E4M3, 8)
    weight, scale, matrices = weights_of(2, 96, 5, E5M2)
    bias = torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    logit, tokens = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.0, 3.0]), torch.tensor([1, 0, 1, 3, 0, 3])
    shared = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]).bfloat16()
    exact = times_scales(x, x_scale)
    product = np.concatenate([exact[:4] @ matrices[0], exact[4:] @ matrices[1]])
    product += np.repeat(bias.double().numpy(), [4, 2], 0)
    expected = np.zeros((4, 5))
    np.add.at(expected, tokens.numpy(), logit.double().numpy()[:, None] * product)
    expected[2] += 0.5 * np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    options: dict[str, Any] = {
        "bias": bias, "shared_input": shared, "logit": logit, "row_index": tokens, "shared_input_weight": 0.5,
        "shared_input_offset": 2, "output_bs": 4,
    }  # fmt: skip
    got = npu_grouped_matmul_finalize_routing(
        x, weight, torch.tensor([4, 2]), scale=scale, pertoken_scale=x_scale, scale_dtype=293, pertoken_scale_dtype=293,
        **options,
    )  # fmt: skip
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    again = npu_grouped_matmul_finalize_routing(
        x, weight, torch.tensor([4, 2]), scale=scale.view(E8M0), pertoken_scale=x_scale.view(E8M0), **options
    )
    assert torch.equal(again, got)


@pytest.mark.parametrize("modes", [{}, {"dequant_mode": 2, "quant_mode": 2}])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("width", [32, 72])
def test_swiglu_quant_v2(dtype: torch.dtype, width: int, modes: dict[str, Any]) -> None:
    """The left half is the gate; blocks of 32 of the result by OCP floor; rows of no group are 0, and their bytes."""
    x, x_scale = drawn(20, 96, E4M3, 7)
    x_scale -= 8
    weight, scale, matrices = weights_of(2, 96, 2 * width, E4M3)
    exact = times_scales(x, x_scale)
    product = np.concatenate([exact[:12] @ matrices[0], exact[12:18] @ matrices[1]])
    product = np.concatenate([product, np.zeros((2, 2 * width))]).astype(np.float32).astype(np.float64)
    gate, linear = product[:, :width], product[:, width:]
    with np.errstate(over="ignore"):
        activation = gate / (1 + np.exp(-gate)) * linear
    padded = np.pad(activation, ((0, 0), (0, -width % 32))).reshape(20, -1, 32)
    codes, byte = quantized(padded.astype(np.float32).astype(np.float64), dtype, "floor")
    got, got_scale = npu_grouped_matmul_swiglu_quant_v2(
        x, [weight], [scale.view(E8M0)], x_scale.view(E8M0), torch.tensor([12, 18]), quant_dtype=dtype, **modes,
        weight_scale_dtype=293,
    )  # fmt: skip
    same_scale(got_scale, np.pad(byte, ((0, 0), (0, byte.shape[1] % 2))).reshape(20, -1, 2))
    assert not got_scale.view(torch.uint8)[18:].any()
    assert got.dtype is dtype
    steps = np.abs(got.view(torch.uint8).numpy().astype(int) - codes.reshape(20, -1)[:, :width])
    assert steps.max() <= 1  # where float32 and float64 lie on two sides of a halfway case
    assert (steps > 0).mean() < 0.002


MX_ONE: dict[str, Any] = {
    "x": [torch.zeros(4, 64).to(E4M3)],
    "weight": [torch.zeros(2, 64, 6).to(E4M3)],
    "scale": [torch.zeros(2, 1, 6, 2, dtype=torch.uint8).view(E8M0)],
    "per_token_scale": [torch.zeros(4, 1, 2, dtype=torch.uint8).view(E8M0)],
    "group_list": torch.tensor([2, 4]),
    "group_type": 0,
    "split_item": 2,
    "output_dtype": torch.float32,
}


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        (r"scale must be \[\(E, ceil\(K / 64\), N, 2\)\]", {"scale": [torch.zeros(2, 2, 6, 2).to(E8M0)]}),
        ("scale must be", {"scale": [torch.zeros(1, 6, 2).to(E8M0)]}),
        (r"per_token_scale must be \[\(M, ceil\(K / 64\), 2\)\]", {"per_token_scale": [torch.ones(4, 2, 2).to(E8M0)]}),
        ("per_token_scale must be", {"per_token_scale": [torch.ones(4, 1, 2).to(E8M0)] * 2}),
        ("per_token_scale must be float8_e8m0fnu, as the other", {"per_token_scale": [torch.ones(4, 1, 2)]}),
        ("per_token_scale must be given with the other", {"per_token_scale": None}),
        ("scale must be given with the other", {"scale": None}),
        ("scale_dtype must be the type of the scales", {"scale": [torch.ones(2, 1, 6, 2)], "scale_dtype": 293}),
        (
            r"scale must be \[\(T // 64 \+ G, N, 2\)\] = \[\(3, 6, 2\)\]; got",
            {"group_type": 2, "x": [torch.ones(4, 64).to(E4M3)], "weight": [torch.ones(64, 6).to(E4M3)]},
        ),
        ("offset must be None", {"offset": [torch.ones(2, 6)]}),
        ("output_dtype must be", {"output_dtype": None}),
    ],
)
def test_grouped_matmul_refuses(phrase: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f"npu_grouped_matmul: {phrase}") as caught:
        npu_grouped_matmul(**MX_ONE | arguments)
    assert not isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("with group_type 2 and several weights or pairs", {"group_type": 2, "x": [torch.ones(4, 64).to(E4M3)], "weight": [torch.ones(2, 6).to(E4M3)] * 2, "split_item": 0}),
        ("with torch.bfloat16", {"x": [torch.zeros(4, 64).bfloat16()], "weight": [torch.zeros(2, 64, 6).bfloat16()]}),
    ],
)  # fmt: skip
def test_grouped_matmul_lacks(phrase: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"npu_grouped_matmul: scale_dtype=293 .*{phrase}"):
        npu_grouped_matmul(**MX_ONE | arguments)


def test_swiglu_quant_v2_refuses() -> None:
    one: dict[str, Any] = {
        "x": MX_ONE["x"][0],
        "weight": MX_ONE["weight"],
        "weight_scale": MX_ONE["scale"],
        "x_scale": MX_ONE["per_token_scale"][0],
        "group_list": MX_ONE["group_list"],
    }
    with pytest.raises(RuntimeError, match="npu_grouped_matmul_swiglu_quant_v2: quant_dtype must be float8_e5m2 or"):
        npu_grouped_matmul_swiglu_quant_v2(**one)
    with pytest.raises(NotImplementedError, match="npu_grouped_matmul_swiglu_quant_v2: smooth_scale=a tensor"):
        npu_grouped_matmul_swiglu_quant_v2(**one, quant_dtype=E4M3, smooth_scale=torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="npu_grouped_matmul_swiglu_quant_v2: weight_scale must be"):
        npu_grouped_matmul_swiglu_quant_v2(**one | {"weight_scale": [torch.ones(2, 6).to(E8M0)]}, quant_dtype=E4M3)


# ---------------------------------------------------------------------------- bad input

X = torch.ones(4, 8)
NOT_BUILT = [
    (lambda: mx.npu_dynamic_mx_quant(X), "npu_dynamic_mx_quant: dst_type=296 (float4_e2m1fn_x2) is not available on a CPU"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=297), "npu_dynamic_mx_quant: dst_type=297 (float4_e1m2fn_x2) is not"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=24, scale_alg=1), "npu_dynamic_mx_quant: scale_alg=1 is not"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=24, dst_type_max=6.0), "npu_dynamic_mx_quant: dst_type_max=6.0 is not"),
    (lambda: mx.npu_grouped_dynamic_mx_quant(X, torch.tensor([2]), scale_alg=1), "npu_grouped_dynamic_mx_quant: scale_alg=1 is not"),
    (lambda: mx.npu_grouped_dynamic_mx_quant(X, torch.tensor([2]), dst_type_max=6.0), "npu_grouped_dynamic_mx_quant: dst_type_max=6.0 is not"),
    (lambda: mx.npu_grouped_dynamic_mx_quant(X, torch.tensor([4]), dst_type=290), "npu_grouped_dynamic_mx_quant: dst_type=290 (HiFloat8) is not"),
    (lambda: mx.quantize_blocks(X, 4), "npu_moe_init_routing_v2: quant_mode=4 (fp8 with groups of 128) is not"),
]  # fmt: skip
WRONG = [
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=24, axis=2), "axis must be an axis of 2 dimensions; got 2"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=24, block_size=33), "block_size must be a multiple of 32, at most 1024; got 33"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=24, block_size=1056), "block_size must be a multiple of 32, at most 1024; got 1056"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=24, block_size=0), "block_size must be a multiple of 32, at most 1024; got 0"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=24, max_low_bound=1.0), "max_low_bound must be 0 with scale_alg 0; got 1.0"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=24, round_mode="floor"), "round_mode must be 'rint' for fp8; got 'floor'"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=1), "dst_type must be float8_e5m2 or float8_e4m3fn; got 1"),
    (lambda: mx.npu_dynamic_mx_quant(X, dst_type=999), "dst_type must be a torch.dtype or the number of one; got 999"),
    (lambda: mx.npu_dynamic_mx_quant(X.int(), dst_type=24), "float16, bfloat16 or float32; got torch.int32"),
    (lambda: mx.npu_grouped_dynamic_mx_quant(X[0], torch.tensor([4])), "x must be of shape [*, *]; got shape [8]"),
    (lambda: mx.npu_grouped_dynamic_mx_quant(X, torch.tensor([5])), "group_index must be ascending and at most 4, the rows of x; got [5]"),
    (lambda: mx.npu_grouped_dynamic_mx_quant(X, torch.tensor([2, 1])), "ascending and at most 4, the rows of x; got [2, 1]"),
    (lambda: mx.npu_grouped_dynamic_mx_quant(X, torch.tensor([-1])), "ascending and at most 4, the rows of x; got [-1]"),
    (lambda: mx.npu_grouped_dynamic_mx_quant(X, torch.tensor([4]), blocksize=64), "blocksize must be 32; got 64"),
]  # fmt: skip


@pytest.mark.parametrize("call, words", NOT_BUILT)
def test_not_built(call: Any, words: str) -> None:
    with pytest.raises(NotImplementedError) as raised:
        call()
    assert words in str(raised.value)


@pytest.mark.parametrize("call, words", WRONG)
def test_wrong_arguments(call: Any, words: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        call()
    assert type(raised.value) is RuntimeError
    assert words in str(raised.value)
    assert str(raised.value).startswith("npu_")


def test_no_gradient_and_inference_mode() -> None:
    x = torch.ones(2, 40, requires_grad=True)
    for elements, scale in (mx.npu_dynamic_mx_quant(x, dst_type=24), mx.quantize_rows(x, 2)):
        assert not elements.requires_grad
        assert not scale.requires_grad
    with torch.inference_mode():
        elements, _ = mx.npu_grouped_dynamic_mx_quant(x, torch.tensor([2]))
    assert decoded(elements)[0, 0] == 2.0**15
