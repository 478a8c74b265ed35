"""Microscaling (MX) fp8: blocks of 32 elements with a common scale, a power of two.

A scale is one byte b, an e8m0: it stands for 2^(b - 127), and 255 for NaN. Elements are v * 2^-e rounded to nearest,
ties to even, and saturated. Two rules find the exponent e of a block, from its largest magnitude and the exponent of
the largest element (8 for e4m3fn, 15 for e5m2):

    RoundScale   the least e with which nothing saturates, at least -126
    OCP floor    floor(log2(largest)) - the exponent of the largest element, at least -127

A block of zeros has byte 0. In one with an infinity or a NaN the byte is 255, finite elements are 0, infinities the
largest element and NaN stays NaN.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeroute import check
from moeroute.interop.torch_npu.arguments import dtype_of, npu_function, refused, unavailable

BLOCK = 32
_LARGEST_BLOCK = 1024  # of npu_dynamic_mx_quant alone
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_TOP = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}  # the exponent of the largest element, which is 1.75 * 2^top
_MANTISSA = 0x7FFFFF
_MODES = {2: torch.float8_e5m2, 3: torch.float8_e4m3fn, 16: torch.float8_e5m2, 17: torch.float8_e4m3fn}
_SMALLEST = 1e-4  # what modes 16 and 17 take the largest magnitude for, at least


def round_scale(largest: Tensor, dtype: torch.dtype, truncate: bool = False) -> Tensor:
    """The scale bytes, uint8, of blocks by the largest magnitude in each, float32: RoundScale.

    Args:
        largest: at least 0, of any shape.
        dtype: of the elements.
        truncate: cut the magnitudes down to bfloat16 first, as is done to those of float16.
    """
    bits = largest.view(torch.int32)
    if truncate:
        bits = bits & ~0xFFFF
    byte = (bits >> 23) - _TOP[dtype] + ((bits & _MANTISSA) > 0x600000)
    return _bytes(torch.where(largest == 0, 0, byte.clamp(min=1)), largest)


def floor_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale bytes, uint8, of blocks by the largest magnitude in each, float32: OCP floor."""
    return _bytes(((largest.view(torch.int32) >> 23) - _TOP[dtype]).clamp(min=0), largest)


def _bytes(byte: Tensor, largest: Tensor) -> Tensor:
    return torch.where(largest.isfinite(), byte, 255).to(torch.uint8)


def quantize_elements(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values by the scale byte of their block, as elements of `dtype`; the shapes broadcast."""
    # 2^-e by its bits; that of byte 254 is denormal.
    exponent = 254 - scale.to(torch.int32)
    factor = torch.where(exponent > 0, exponent << 23, 0x400000).view(torch.float32)
    scaled = torch.where((scale == 255) & values.isfinite(), 0.0, values * factor)
    most = torch.finfo(dtype).max
    return scaled.clamp(-most, most).to(dtype)


def quantize_rows(rows: Tensor, quant_mode: int) -> tuple[Tensor, Tensor]:
    """Rows as `npu_moe_init_routing_v2` quantises them in its modes 2, 3, 16 and 17: by RoundScale.

    Args:
        rows: [L, H], float16, bfloat16 or float32.
        quant_mode: 2, 16: e5m2; 3, 17: e4m3fn. In 16 and 17 the largest magnitude counts as at least 1e-4.

    Returns:
        ([L, H] of that dtype; the scales, float8_e8m0fnu [L, even(H / 32)]: a last one that has no block is byte 0).
    """
    function = "npu_moe_init_routing_v2"
    if quant_mode not in _MODES:
        raise refused(function, "quant_mode", f"one of {sorted(_MODES)} for MX", quant_mode)
    check.shaped(function, "x", rows, (None, None))
    if rows.dtype not in _FLOATS:
        raise refused(function, "x", "float16, bfloat16 or float32", rows.dtype)
    dtype = _MODES[quant_mode]
    with torch.no_grad():
        blocks = _blocks(rows.float())
        largest = _largest(blocks)
        if quant_mode > 3:
            largest = largest.clamp(min=_SMALLEST)
        scale = round_scale(largest, dtype, rows.dtype is torch.float16)
        elements = quantize_elements(blocks, scale[..., None], dtype)
        scale = pad(scale, (0, scale.shape[1] % 2))
        return _joined(elements, rows.shape[1]), scale.view(torch.float8_e8m0fnu)


def quantize_blocks(rows: Tensor, quant_mode: int) -> tuple[Tensor, Tensor]:
    """The modes of `npu_moe_init_routing_v2` with groups of 128: not built, their scale rules are not settled."""
    raise unavailable("npu_moe_init_routing_v2", "quant_mode", quant_mode, "fp8 with groups of 128")


def _blocks(values: Tensor, block: int = BLOCK) -> Tensor:
    """[..., n] as [..., blocks, block], zeros behind the end."""
    size = values.shape[-1]
    return pad(values, (0, -size % block)).unflatten(-1, (-(-size // block), block))


def _largest(blocks: Tensor) -> Tensor:
    """The largest magnitudes, NaN where there is one."""
    return blocks.abs().amax(-1)


def _joined(elements: Tensor, size: int) -> Tensor:
    """[..., blocks, block] as [..., size]."""
    return elements.view(torch.uint8).flatten(-2)[..., :size].contiguous().view(elements.dtype)


# ---------------------------------------------------------------------------- along an axis, and down the rows


@npu_function
def npu_dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int | torch.dtype = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Elements of e4m3fn or e5m2 (dst_type 24, 292 or 23, 291) in blocks of block_size along an axis, by OCP floor.

    Returns:
        (the shape of input, of that dtype; the bytes of the scales, uint8: n elements on the axis have
        ceil(n / (2 block_size)) pairs there, and the pair is the last axis; an odd one that has no block is 0).
    """
    function = "npu_dynamic_mx_quant"
    dtype = _element_type(function, dst_type, round_mode, input)
    if not -input.ndim <= axis < input.ndim:
        raise refused(function, "axis", f"an axis of {input.ndim} dimensions", axis)
    if block_size not in range(BLOCK, _LARGEST_BLOCK + 1, BLOCK):
        raise refused(function, "block_size", f"a multiple of 32, at most {_LARGEST_BLOCK}", block_size)
    _check_rule(function, scale_alg, dst_type_max)
    if max_low_bound != 0:
        raise refused(function, "max_low_bound", "0 with scale_alg 0", max_low_bound)
    with torch.no_grad():
        elements, scale = floor_blocks(input.movedim(axis, -1), dtype, block_size)
        return elements.movedim(-1, axis).contiguous(), scale.movedim(-2, axis % input.ndim).contiguous()


@npu_function
def npu_grouped_dynamic_mx_quant(
    x: Tensor,
    group_index: Tensor,
    *,
    round_mode: str = "rint",
    dst_type: int | torch.dtype = 23,
    blocksize: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float | None = 0.0,
) -> tuple[Tensor, Tensor]:
    """Elements of e4m3fn or e5m2 in blocks of 32 rows, by OCP floor; every group of rows begins a block.

    group_index is [G], the row behind the last of each group. Rows behind the last group are 0.

    Returns:
        (x's shape [M, H], of that dtype; the bytes of the scales, uint8 [M // 64 + G, H, 2]: those of group g, which
        begins at row s, begin at s // 64 + g, and what lies between the groups is 0).
    """
    function = "npu_grouped_dynamic_mx_quant"
    dtype = _element_type(function, dst_type, round_mode, x)
    if blocksize != BLOCK:
        raise refused(function, "blocksize", "32", blocksize)
    _check_rule(function, scale_alg, dst_type_max)
    check.shaped(function, "x", x, (None, None))
    check.shaped(function, "group_index", group_index, (None,))
    ends = group_index.tolist()
    num_rows, width = x.shape
    if any(first > last for first, last in pairwise([0, *ends, num_rows])):
        raise refused(function, "group_index", f"ascending and at most {num_rows}, the rows of x", ends)
    found = torch.zeros(num_rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.zeros(num_rows // 64 + len(ends), width, 2, dtype=torch.uint8, device=x.device)
    with torch.no_grad():
        for group, (first, last) in enumerate(pairwise([0, *ends])):
            elements, scale = floor_blocks(x[first:last].T, dtype)
            found[first:last] = elements.view(torch.uint8).T
            place = first // 64 + group
            scales[place : place + scale.shape[1]] = scale.movedim(1, 0)
    return found.view(dtype), scales


def _check_rule(function: str, scale_alg: int | None, dst_type_max: float | None) -> None:
    """OCP floor with the largest element of the type."""
    if scale_alg:
        raise unavailable(function, "scale_alg", scale_alg)
    if dst_type_max:
        raise unavailable(function, "dst_type_max", dst_type_max)


def _element_type(function: str, dst_type: int | torch.dtype, round_mode: str, values: Tensor) -> torch.dtype:
    check.tensor(function, "input" if function == "npu_dynamic_mx_quant" else "x", values)
    dtype = dtype_of(function, "dst_type", dst_type)
    if dtype not in _TOP:
        raise refused(function, "dst_type", "float8_e5m2 or float8_e4m3fn", dst_type)
    if round_mode != "rint":
        raise refused(function, "round_mode", "'rint' for fp8", repr(round_mode))
    if values.dtype not in _FLOATS:
        raise refused(function, "the input", "float16, bfloat16 or float32", values.dtype)
    return dtype


def floor_blocks(values: Tensor, dtype: torch.dtype, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Elements [..., n] and scale bytes [..., ceil(n / (2 block)), 2], blocks along the last axis, by OCP floor."""
    blocks = _blocks(values.float(), block)
    scale = floor_scale(_largest(blocks), dtype)
    elements = _joined(quantize_elements(blocks, scale[..., None], dtype), values.shape[-1])
    scale = pad(scale, (0, scale.shape[-1] % 2))
    return elements, scale.unflatten(-1, (scale.shape[-1] // 2, 2))


def as_e8m0(scale: Tensor) -> Tensor:
    """Scale bytes as what they stand for."""
    return scale.contiguous().view(torch.float8_e8m0fnu)


# ---------------------------------------------------------------------------- products


def scaled_product(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """The product of two MX matrices, blocks along K: the exact values multiplied and added up in float64.

    Args:
        x: [M, K], fp8.
        w: [K, N], fp8; any strides.
        x_scale: [M, ceil(K / 64), 2], float8_e8m0fnu or its bytes.
        w_scale: [ceil(K / 64), N, 2].

    Returns:
        float32 [M, N], rounded once.
    """
    operator = "interop.torch_npu.mx.scaled_product"
    check.shaped(operator, "x", x, (None, None))
    check.shaped(operator, "w", w, (x.shape[1], None))
    pairs = -(-x.shape[1] // 64)
    check.shaped(operator, "x_scale", x_scale, (x.shape[0], pairs, 2))
    check.shaped(operator, "w_scale", w_scale, (pairs, w.shape[1], 2))
    for name, tensor in (("x", x), ("w", w)):
        if tensor.dtype not in _TOP:
            raise check.wrong_dtype(operator, name, "float8_e4m3fn or float8_e5m2", tensor)
    for name, tensor in (("x_scale", x_scale), ("w_scale", w_scale)):
        if tensor.dtype not in (torch.float8_e8m0fnu, torch.uint8):
            raise check.wrong_dtype(operator, name, "float8_e8m0fnu", tensor)
    left = _decoded(x, x_scale.flatten(1))
    right = _decoded(w.t(), w_scale.transpose(0, 1).flatten(1))
    return (left @ right.t()).float()


def _decoded(elements: Tensor, scale: Tensor) -> Tensor:
    """float64 [R, K] of elements [R, K] and scales [R, at least K / 32]."""
    byte = scale.contiguous().view(torch.uint8)
    factor = ((byte.to(torch.int64) + 896) << 52).view(torch.float64)  # 896: the biases of e8m0 and float64 differ so
    factor = torch.where(byte == 255, torch.nan, factor)
    return elements.to(torch.float64) * factor.repeat_interleave(BLOCK, 1)[:, : elements.shape[1]]
