"""npu_dynamic_quant, npu_quantize, npu_swiglu_quant and npu_dequant_swiglu_quant against loops over rows in NumPy.

The loops compute in float32, one operation at a time, as the functions promise: numbers and scales are compared
exactly, but behind an activation, where a number at a tie may be its neighbour.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moeroute.interop.torch_npu.quantization import (
    npu_dequant_swiglu_quant,
    npu_dynamic_quant,
    npu_quantize,
    npu_swiglu_quant,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
LARGEST = {torch.int8: 127, torch.float8_e5m2: 57344, torch.float8_e4m3fn: 448, torch.quint4x2: 7}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, layout: str = "plain") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if layout == "strided":
        return torch.randn(*shape[:-1], 2 * shape[-1] + 1, generator=generator).to(dtype)[..., 1::2]
    if layout == "turned":
        return torch.randn(*shape[::-1], generator=generator).to(dtype).permute(*reversed(range(len(shape))))
    return torch.randn(*shape, generator=generator).to(dtype)


def singles(tensor: Tensor) -> np.ndarray:
    return tensor.float().numpy()


def nearest(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Numbers of a type, saturated; as float64, nibbles unpacked."""
    limits = {
        torch.int8: (-128, 127),
        torch.quint4x2: (-8, 7),
        torch.uint8: (0, 255),
        torch.int32: (-(2**31), 2**31 - 1),
    }
    if dtype in limits:
        low, high = limits[dtype]
        return torch.from_numpy(np.clip(np.rint(np.nan_to_num(values)), low, high)).double()
    top = LARGEST[dtype]
    return torch.from_numpy(np.clip(values, -top, top)).float().to(dtype).double()


def plain(found: Tensor, dtype: torch.dtype) -> Tensor:
    """What was found as float64; of an int32 its eight nibbles, the lowest first."""
    if dtype is not torch.quint4x2:
        assert found.dtype == dtype
        return found.double()
    assert found.dtype == torch.int32
    words = found.numpy().astype(np.int64) & 0xFFFFFFFF
    nibbles = np.stack([(words >> (4 * place)) & 15 for place in range(8)], -1)
    signed = np.where(nibbles > 7, nibbles - 16, nibbles)
    return torch.from_numpy(signed.reshape(*found.shape[:-1], -1)).double()


def by_row(values: np.ndarray, top: float) -> tuple[np.ndarray, np.ndarray]:
    """Each row over its scale, and the scales."""
    scales = np.array([np.abs(row).max(initial=0) / np.float32(top) for row in values], dtype=np.float32)
    quotients = [row / scale if scale else np.zeros_like(row) for row, scale in zip(values, scales, strict=True)]
    return np.array(quotients, dtype=np.float32).reshape(values.shape), scales


# ---------------------------------------------------------------------------- npu_dynamic_quant


@given(
    dtype=st.sampled_from(FLOATS),
    target=st.sampled_from(list(LARGEST)),
    layout=st.sampled_from(["plain", "strided", "turned"]),
    smooth=st.sampled_from([None, *FLOATS]),
    ends=st.sampled_from([None, [2, 6], [0, 5, 5], [0]]),
    index=st.sampled_from([torch.int32, torch.int64]),
    top=st.sampled_from([0.0, 100.0]),
)
def test_dynamic_quant_by_row(
    dtype: torch.dtype,
    target: torch.dtype,
    layout: str,
    smooth: torch.dtype | None,
    ends: list[int] | None,
    index: torch.dtype,
    top: float,
) -> None:
    x = numbers(2, 3, 8, dtype=dtype, layout=layout)
    values, factors, groups = singles(x).reshape(6, 8).copy(), None, None
    if smooth is not None and ends is not None:
        factors, groups = numbers(len(ends), 8, dtype=smooth, seed=1), torch.tensor(ends, dtype=index)
        for group, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
            values[start:stop] *= singles(factors[group])
    elif smooth is not None:
        factors = numbers(8, dtype=smooth, seed=1)
        values *= singles(factors)
    found, scale = npu_dynamic_quant(x, smooth_scales=factors, group_index=groups, dst_type=target, dst_type_max=top)
    quotients, scales = by_row(values, top or LARGEST[target])
    assert torch.equal(scale, torch.from_numpy(scales).view(2, 3))
    assert torch.equal(plain(found, target), nearest(quotients, target).view(2, 3, 8))


@pytest.mark.parametrize("number", (None, 1, torch.int8, torch.qint8))
def test_dynamic_quant_of_known_numbers(number: int | torch.dtype | None) -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -127.0], [0.0, 0.0, 0.0, 0.0]])
    found, scale = npu_dynamic_quant(x, dst_type=number)
    assert found.dtype == torch.int8
    assert found.tolist() == [[0, 2, 2, -127], [0, 0, 0, 0]]
    assert scale.tolist() == [1.0, 0.0]


def test_dynamic_quant_packs_eight_nibbles() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -7.0]])
    found, scale = npu_dynamic_quant(x, dst_type=16)
    assert [hex(word & 0xFFFFFFFF) for word in found[0].tolist()] == ["0x97654321"]
    assert scale.tolist() == [1.0]


@pytest.mark.parametrize("target", list(LARGEST))
@pytest.mark.parametrize("dtype", FLOATS)
def test_dynamic_quant_by_tensor(dtype: torch.dtype, target: torch.dtype) -> None:
    x, smooth = numbers(2, 3, 8, dtype=dtype), numbers(8, dtype=dtype, seed=1)
    found, scale = npu_dynamic_quant(x, smooth_scales=smooth, dst_type=target, quant_mode="pertensor")
    quotients, scales = by_row((singles(x) * singles(smooth)).reshape(1, -1), LARGEST[target])
    assert torch.equal(scale, torch.from_numpy(scales))
    assert torch.equal(plain(found, target), nearest(quotients, target).view(2, 3, 8))


@pytest.mark.parametrize("target", list(LARGEST))
@pytest.mark.parametrize("dtype", FLOATS)
def test_dynamic_quant_by_column(dtype: torch.dtype, target: torch.dtype) -> None:
    x, smooth = numbers(2, 3, 8, dtype=dtype, layout="turned"), numbers(3, dtype=dtype, seed=1)
    found, scale = npu_dynamic_quant(x, smooth_scales=smooth, dst_type=target, quant_mode="perchannel")
    values = singles(x) * singles(smooth)[:, None]
    quotients, scales = by_row(values.transpose(0, 2, 1).reshape(16, 3), LARGEST[target])
    assert torch.equal(scale, torch.from_numpy(scales).view(2, 8))
    wanted = nearest(quotients, target).view(2, 8, 3).transpose(1, 2)
    assert torch.equal(plain(found, target), wanted)


@pytest.mark.parametrize("mode", ("pertoken", "pertensor", "perchannel"))
@pytest.mark.parametrize("target", (torch.int8, torch.float8_e4m3fn, torch.quint4x2))
def test_dynamic_quant_of_nothing_and_of_zeros(mode: str, target: torch.dtype) -> None:
    found, scale = npu_dynamic_quant(torch.zeros(0, 8), dst_type=target, quant_mode=mode)
    assert found.shape == (0, 1 if target is torch.quint4x2 else 8)
    assert not scale.any()
    found, scale = npu_dynamic_quant(torch.zeros(2, 8), dst_type=target, quant_mode=mode)
    assert not plain(found, target).any()
    assert not scale.any()


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("input must be", {"input": torch.ones(4)}),
        ("input must be", {"input": torch.ones(2, 4, dtype=torch.int8)}),
        ("multiple of 8 columns", {"input": torch.ones(2, 4), "dst_type": 16}),
        ("dst_type must be", {"dst_type": torch.float32}),
        ("quant_mode must be", {"quant_mode": "perblock"}),
        ("smooth_scales must be", {"smooth_scales": torch.ones(3)}),
        ("group_index must be", {"group_index": torch.tensor([1])}),
        ("group_index must be", {"group_index": torch.tensor([2, 1]), "smooth_scales": torch.ones(2, 8)}),
        ("group_index must be", {"group_index": torch.tensor([3]), "smooth_scales": torch.ones(1, 8)}),
        ("group_index must be", {"group_index": torch.tensor([1, 2]), "smooth_scales": torch.ones(1, 8)}),
        ("group_index must be", {"group_index": torch.tensor([1.0]), "smooth_scales": torch.ones(1, 8)}),
    ],
)
def test_dynamic_quant_refuses(phrase: str, arguments: dict[str, Any]) -> None:
    x = arguments.pop("input", torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=f"npu_dynamic_quant: .*{phrase}"):
        npu_dynamic_quant(x, **arguments)


def test_hifloat8_is_not_built() -> None:
    with pytest.raises(NotImplementedError, match=r"npu_dynamic_quant: dst_type=290 \(HiFloat8\)"):
        npu_dynamic_quant(torch.ones(2, 8), dst_type=290)


# ---------------------------------------------------------------------------- npu_quantize


@given(
    dtype=st.sampled_from(FLOATS),
    target=st.sampled_from(
        [torch.qint8, torch.int8, torch.quint4x2, torch.uint8, torch.float8_e4m3fn, torch.qint32, torch.int32]
    ),
    axis=st.sampled_from([0, 1, 2, -1, -2]),
    form=st.sampled_from(["one", "axis", "full"]),
    offset=st.booleans(),
    divide=st.booleans(),
    layout=st.sampled_from(["plain", "strided", "turned"]),
)
def test_quantize(
    dtype: torch.dtype, target: torch.dtype, axis: int, form: str, offset: bool, divide: bool, layout: str
) -> None:
    x = numbers(2, 3, 8, dtype=dtype, layout=layout)
    shape = {"one": (1,), "axis": (x.shape[axis],), "full": (3, 8)}[form]
    scales = numbers(*shape, dtype=dtype, seed=1).abs() + 0.05
    zeros = numbers(*shape, dtype=dtype, seed=2) * 9 if offset else None

    def spread(factor: Tensor) -> np.ndarray:
        values = singles(factor)
        return values if form == "full" else np.moveaxis(np.moveaxis(np.ones_like(singles(x)), axis, -1) * values, -1, axis)  # fmt: skip

    values = singles(x) / spread(scales) if divide else singles(x) * spread(scales)
    if zeros is not None:
        values = values + spread(zeros)
    found = npu_quantize(x, scales, zeros, target, axis, divide)
    stored = {torch.qint8: torch.int8, torch.qint32: torch.int32}.get(target, target)
    assert torch.equal(plain(found, stored), nearest(values, stored))


def test_quantize_of_known_numbers() -> None:
    x = torch.tensor([[0.25, 0.75, 300.0, -300.0]])
    found = npu_quantize(x, torch.tensor([0.5]), None, torch.qint8)
    assert found.tolist() == [[0, 2, 127, -128]]
    assert npu_quantize(x, torch.tensor([2.0]), torch.tensor([1.0]), 1, -1, False).tolist() == [[2, 2, 127, -128]]


def test_quantize_refuses() -> None:
    with pytest.raises(RuntimeError, match="npu_quantize: scales must be"):
        npu_quantize(torch.ones(2, 4), torch.ones(3), None, torch.qint8)
    with pytest.raises(RuntimeError, match="npu_quantize: dtype must be"):
        npu_quantize(torch.ones(2, 4), torch.ones(4), None, torch.float32)


def test_quantize_to_int32_is_cut_at_its_limits() -> None:
    x = torch.tensor([[2.5, -1e9, 3e9, -3e9, math.inf, -math.inf, math.nan]])
    found = npu_quantize(x, torch.tensor([1.0]), None, torch.qint32)
    assert found.dtype is torch.int32
    assert found.tolist() == [[2, -(10**9), 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0]]


# ---------------------------------------------------------------------------- behind SwiGLU


def silu(values: np.ndarray) -> np.ndarray:
    return values / (1 + np.exp(-values))


def expect(found: tuple[Tensor, Tensor], values: np.ndarray, dynamic: bool, target: torch.dtype = torch.int8) -> None:
    """The values, float64, quantised: scales to float32's precision, integers to the neighbour at a tie."""
    numbers_found, scales_found = found
    top = LARGEST[target]
    assert scales_found.dtype == torch.float32
    if dynamic:
        scales = np.abs(values).max(-1, initial=0) / top
        torch.testing.assert_close(scales_found.double(), torch.from_numpy(scales), rtol=1e-5, atol=1e-9)
        safe = np.where(scales == 0, 1, scales)[..., None]
        values = values / safe
    else:
        assert not scales_found.any()
    wanted = nearest(values, target)
    got = plain(numbers_found, target)
    assert got.shape == wanted.shape
    if target is torch.int8:
        near_tie = torch.from_numpy(np.abs(values - np.floor(values) - 0.5) < 1e-3)
        assert torch.equal(torch.where(near_tie, 0.0, got), torch.where(near_tie, 0.0, wanted))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1)
    else:
        torch.testing.assert_close(got, wanted, rtol=0.26, atol=1e-2)


def slices(groups: list[int] | None, rows: int, cumulative: bool) -> list[tuple[int, int]]:
    if groups is None:
        return [(0, rows)]
    ends = groups if cumulative else list(itertools.accumulate(groups))
    return list(itertools.pairwise([0, *ends]))


def grouped(factor: Tensor | None, group: int) -> np.ndarray | float:
    return 1.0 if factor is None else factor[group].double().numpy()


@given(
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(["plain", "strided", "turned"]),
    groups=st.sampled_from([None, [2, 0, 3], [0, 6], [1, 1]]),
    cumulative=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
    smooth=st.sampled_from([None, "columns", "groups"]),
    left=st.booleans(),
    mode=st.sampled_from([0, 1]),
    target=st.sampled_from([torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]),
)
def test_swiglu_quant(
    dtype: torch.dtype,
    layout: str,
    groups: list[int] | None,
    cumulative: bool,
    index: torch.dtype,
    smooth: str | None,
    left: bool,
    mode: int,
    target: torch.dtype,
) -> None:
    x = numbers(2, 3, 8, dtype=dtype, layout=layout)
    if groups is not None and cumulative:
        groups = list(itertools.accumulate(groups))
    parts = slices(groups, 6, cumulative)
    shape = (len(parts), 4) if smooth == "columns" else (len(parts),)
    factors = None if smooth is None else numbers(*shape, seed=1) * 20
    offsets = numbers(*shape, seed=2) * 5 if smooth is not None else None
    first, second = np.split(x.double().numpy().reshape(6, 8), 2, -1)
    activation = silu(first) * second if left else silu(second) * first
    values = np.zeros((6, 4))
    for group, (start, stop) in enumerate(parts):
        values[start:stop] = activation[start:stop] * grouped(factors, group)
        if offsets is not None and mode == 0:
            values[start:stop] += grouped(offsets, group)
    rows, factor = npu_swiglu_quant(
        x,
        smooth_scales=factors,
        offsets=offsets,
        group_index=None if groups is None else torch.tensor(groups, dtype=index),
        activate_left=left,
        quant_mode=mode,
        group_list_type=0 if cumulative else 1,
        dst_type=target,
    )
    scale = torch.where(factor == 0, 0.0, 1 / factor)  # the row was multiplied by the factor
    expect((rows, scale), values.reshape(2, 3, 4), mode == 1, target)


@given(
    dtype=st.sampled_from([torch.int32, *FLOATS]),
    layout=st.sampled_from(["plain", "turned"]),
    groups=st.sampled_from([None, [2, 0, 3], [0, 6], [1, 1]]),
    index=st.sampled_from([torch.int32, torch.int64]),
    scale_type=st.sampled_from([torch.float32, torch.bfloat16]),
    by_row=st.booleans(),
    bias=st.booleans(),
    smooth=st.sampled_from([None, "columns", "groups"]),
    left=st.booleans(),
    mode=st.sampled_from([0, 1]),
    swiglu_mode=st.sampled_from([0, 1, 2]),
)
def test_dequant_swiglu_quant(
    dtype: torch.dtype,
    layout: str,
    groups: list[int] | None,
    index: torch.dtype,
    scale_type: torch.dtype,
    by_row: bool,
    bias: bool,
    smooth: str | None,
    left: bool,
    mode: int,
    swiglu_mode: int,
) -> None:
    integers = dtype is torch.int32
    x = (numbers(6, 8, layout=layout) * (1000 if integers else 1)).to(dtype)
    parts = slices(groups, 6, False)
    weight_scale = numbers(len(parts), 8, dtype=scale_type, seed=1) / 300 if integers else None
    row_scale = numbers(6, seed=2).abs() + 0.1 if by_row else None
    added = (numbers(len(parts), 8, seed=3) * 500).to(torch.int32) if bias and integers else None
    shape = (len(parts), 4) if smooth == "columns" else (len(parts),)
    factors = numbers(*shape, seed=4) if smooth is not None and mode == 1 else None
    offsets = numbers(*shape, seed=4) * 9 if smooth is not None and mode == 0 else None
    values = np.zeros((6, 4))
    for group, (start, stop) in enumerate(parts):
        part = x[start:stop].double().numpy()
        if added is not None:
            part = part + grouped(added, group)
        part = part * grouped(weight_scale, group)
        if row_scale is not None:
            part = part * row_scale[start:stop, None].double().numpy()
        gate, linear = (part[:, ::2], part[:, 1::2]) if swiglu_mode == 1 else np.split(part, 2, 1)
        if swiglu_mode != 1 and not left:
            gate, linear = linear, gate
        if swiglu_mode == 0:
            activation = silu(gate) * linear
        else:
            gate, linear = np.minimum(gate, 2.0), np.clip(linear, -2.0, 2.0)
            activation = gate / (1 + np.exp(-1.5 * gate)) * (linear + 0.5)
        values[start:stop] = activation * grouped(factors, group)
        if offsets is not None:
            values[start:stop] += grouped(offsets, group)
    found = npu_dequant_swiglu_quant(
        x,
        weight_scale=weight_scale,
        activation_scale=row_scale,
        bias=added,
        quant_scale=factors,
        quant_offset=offsets,
        group_index=None if groups is None else torch.tensor(groups, dtype=index),
        activate_left=left,
        quant_mode=mode,
        swiglu_mode=swiglu_mode,
        clamp_limit=2.0,
        glu_alpha=1.5,
        glu_bias=0.5,
    )
    expect(found, values, mode == 1)


def test_the_right_half_is_the_gate_by_default() -> None:
    x = torch.tensor([[2.0, 30.0]])
    wanted = 60.0  # silu(30) is 30
    found, factor = npu_swiglu_quant(x, quant_mode=1)
    assert found.tolist() == [[127]]
    torch.testing.assert_close(factor, torch.tensor([127 / wanted]))
    found, scale = npu_dequant_swiglu_quant(x, quant_mode=1)
    torch.testing.assert_close(scale, torch.tensor([wanted / 127]))
    assert npu_swiglu_quant(x)[0].tolist() == [[60]]
    assert npu_dequant_swiglu_quant(x, quant_offset=torch.tensor([2.5]))[0].tolist() == [[62]]


def test_nothing_in_gives_nothing() -> None:
    for found, scale in (
        npu_swiglu_quant(torch.ones(0, 8), quant_mode=1, group_index=torch.tensor([0, 0])),
        npu_dequant_swiglu_quant(torch.ones(0, 8, dtype=torch.int32), weight_scale=torch.ones(1, 8), quant_mode=1),
    ):
        assert found.shape == (0, 4)
        assert scale.shape == (0,)


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("x must be", {"x": torch.ones(2, 3)}),
        ("quant_mode must be 0 or 1", {"quant_mode": 2}),
        ("group_list_type must be 0 or 1", {"group_list_type": 2}),
        ("group_index must be", {"group_index": torch.tensor([3])}),
        ("smooth_scales must be", {"smooth_scales": torch.ones(3), "group_index": torch.tensor([1, 2])}),
    ],
)
def test_swiglu_quant_refuses(phrase: str, arguments: dict[str, Any]) -> None:
    x = arguments.pop("x", torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=f"npu_swiglu_quant: {phrase}"):
        npu_swiglu_quant(x, **arguments)


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("weight_scale must be given", {"x": torch.ones(2, 8, dtype=torch.int32)}),
        ("quant_mode must be 0 or 1", {"quant_mode": 2}),
        ("swiglu_mode must be", {"swiglu_mode": 4}),
        ("activation_scale must be", {"activation_scale": torch.ones(3)}),
        ("group_index must be", {"group_index": torch.tensor([-1, 2])}),
        ("quant_offset must be None", {"quant_offset": torch.ones(1), "quant_mode": 1}),
        ("round_mode must be", {"round_mode": 5}),
    ],
)
def test_dequant_swiglu_quant_refuses(phrase: str, arguments: dict[str, Any]) -> None:
    x = arguments.pop("x", torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=f"npu_dequant_swiglu_quant: {phrase}"):
        npu_dequant_swiglu_quant(x, **arguments)


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("quant_mode=0", {"quant_scale": torch.ones(1)}),
        ("round_mode=3", {"round_mode": 3}),
        ("activate_dim=0", {"activate_dim": 0}),
        ("swiglu_mode=3", {"swiglu_mode": 3}),
        ("bias=", {"bias": torch.ones(1, 8)}),
        ("dst_type=290", {"dst_type": 290}),
    ],
)
def test_what_dequant_swiglu_quant_lacks(phrase: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"npu_dequant_swiglu_quant: {phrase}"):
        npu_dequant_swiglu_quant(torch.ones(2, 8), **arguments)


def test_results_require_no_gradient() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    results = (
        *npu_dynamic_quant(x, dst_type=torch.float8_e5m2),
        *npu_dynamic_quant(x),
        npu_quantize(x, torch.ones(1), None, torch.float8_e5m2),
        *npu_swiglu_quant(x, quant_mode=1),
        *npu_dequant_swiglu_quant(x, quant_mode=1),
    )
    assert not any(result.requires_grad for result in results)
