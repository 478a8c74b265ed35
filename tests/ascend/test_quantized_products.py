"""The fused products of quantised numbers against one loop over rows in float64."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moeroute.interop.torch_npu.quantized_products import (
    npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant,
    npu_grouped_matmul_swiglu_quant_v2,
)

LARGEST = {torch.int8: 127.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fn: 448.0}


def integers(*shape: int, seed: int = 0, most: int = 127, dtype: torch.dtype = torch.int8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype) + 0.25


def ends_of(sizes: list[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


def product_by_hand(x: Tensor, w: Tensor, sizes: list[int], scale: Tensor, row_scale: Tensor | None) -> Tensor:
    out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float64)
    for group, (start, stop) in enumerate(itertools.pairwise([0, *ends_of(sizes)])):
        out[start:stop] = x[start:stop].double() @ w[group].double() * scale[group].double()
        if row_scale is not None:
            out[start:stop] *= row_scale[start:stop, None].double()
    return out


def swiglu_by_hand(values: Tensor) -> np.ndarray:
    left, right = np.split(values.numpy(), 2, 1)
    return left / (1 + np.exp(-left)) * right


def expect_quantised(found: Tensor, scale: Tensor, values: np.ndarray, dtype: torch.dtype) -> None:
    """Scales to float32's precision; an integer at a tie may be its neighbour, a float8 too."""
    assert found.dtype == dtype
    assert scale.dtype == torch.float32
    scales = np.abs(values).max(1, initial=0) / LARGEST[dtype]
    torch.testing.assert_close(scale.double(), torch.from_numpy(scales), rtol=1e-5, atol=0)
    quotients = torch.from_numpy(values / np.where(scales == 0, 1, scales)[:, None])
    if dtype is torch.int8:
        assert ((found.double() - quotients).abs() <= 0.5 + 1e-3).all()
    else:
        torch.testing.assert_close(found.double(), quotients, rtol=2.0 ** (-2 if dtype is torch.float8_e5m2 else -4), atol=1e-2)  # fmt: skip


SIZES = ([2, 3, 1], [0, 4, 0], [1, 1, 1], [0, 0, 0])


@pytest.mark.parametrize("scale_type", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
@pytest.mark.parametrize("sizes", SIZES)
def test_swiglu_quant(sizes: list[int], index: torch.dtype, scale_type: torch.dtype) -> None:
    x, w = integers(6, 16), integers(3, 16, 8, seed=1)
    weight_scale, x_scale = numbers(3, 8, dtype=scale_type) / 256, numbers(6, seed=1) / 64
    groups = torch.tensor(ends_of(sizes), dtype=index)
    turned = w.transpose(1, 2).contiguous().transpose(1, 2)
    found, scale, rest = npu_grouped_matmul_swiglu_quant(x, turned, groups, weight_scale, x_scale)
    assert rest.shape == ()
    assert rest.dtype == torch.float32
    values = swiglu_by_hand(product_by_hand(x, w, sizes, weight_scale, x_scale))
    expect_quantised(found, scale, values, torch.int8)
    assert not found[sum(sizes) :].any()


def test_swiglu_quant_of_known_numbers() -> None:
    x = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
    w = torch.tensor([[[10, 0, 1, 2], [10, 0, 1, 1]]], dtype=torch.int8)
    found, scale, _ = npu_grouped_matmul_swiglu_quant(x, w, torch.tensor([1]), torch.ones(1, 4), torch.ones(2))
    assert found.tolist() == [[127, 0], [0, 0]]
    torch.testing.assert_close(scale, torch.tensor([90 / 127, 0.0]))  # silu(30) · 3


@given(
    sizes=st.sampled_from(SIZES),
    list_type=st.sampled_from([0, 1, 2]),
    separate=st.booleans(),
    smooth=st.sampled_from([None, "columns", "groups"]),
    kind=st.sampled_from([torch.int8, torch.float8_e4m3fn]),
    target=st.sampled_from(list(LARGEST)),
    by_number=st.booleans(),
)
def test_swiglu_quant_v2(
    sizes: list[int],
    list_type: int,
    separate: bool,
    smooth: str | None,
    kind: torch.dtype,
    target: torch.dtype,
    by_number: bool,
) -> None:
    most = 127 if kind is torch.int8 else 8
    x, w = integers(6, 16, most=most, dtype=kind), integers(3, 16, 8, seed=1, most=most, dtype=kind)
    weight_scale, x_scale = numbers(3, 8) / 16 / most, numbers(6, seed=1) / 64
    factors = None if smooth is None else numbers(*((3, 4) if smooth == "columns" else (3,)), seed=2)
    forms = (ends_of(sizes), sizes, [[group, size] for group, size in enumerate(sizes)])
    number = {torch.int8: 1, torch.float8_e5m2: 291, torch.float8_e4m3fn: 24}
    found, scale = npu_grouped_matmul_swiglu_quant_v2(
        x,
        list(w) if separate else [w],
        list(weight_scale) if separate else [weight_scale],
        x_scale,
        torch.tensor(forms[list_type]),
        smooth_scale=factors,
        quant_dtype=number[target] if by_number else target,
        group_list_type=list_type,
    )
    values = swiglu_by_hand(product_by_hand(x, w, sizes, weight_scale, x_scale))
    for group, (start, stop) in enumerate(itertools.pairwise([0, *ends_of(sizes)])):
        if factors is not None:
            values[start:stop] *= factors[group].numpy()
    expect_quantised(found, scale, values, target)


@pytest.mark.parametrize("sizes", ([2, 3, 1], [0, 4, 0], [0, 0, 0]))
@pytest.mark.parametrize("list_type", (0, 1))
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
@pytest.mark.parametrize("logit", (None, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shared", (None, torch.bfloat16))
def test_finalize_routing(
    sizes: list[int], list_type: int, index: torch.dtype, logit: torch.dtype | None, shared: torch.dtype | None
) -> None:
    x, w = integers(6, 16), integers(3, 16, 8, seed=1)
    scale, row_scale = numbers(3, 8) / 64, numbers(6, seed=1)
    bias, offset = numbers(3, 8, seed=2), numbers(3, 8, seed=3)
    weights = None if logit is None else numbers(6, seed=4, dtype=logit)
    row_index = torch.tensor([3, 0, 3, 1, 0, 3], dtype=index)
    shared_input = None if shared is None else numbers(2, 8, seed=5, dtype=shared)
    found = npu_grouped_matmul_finalize_routing(
        x,
        w,
        torch.tensor(sizes if list_type else ends_of(sizes)),
        scale=scale,
        bias=bias,
        offset=offset,
        pertoken_scale=row_scale,
        shared_input=shared_input,
        logit=weights,
        row_index=row_index,
        shared_input_weight=0.5,
        shared_input_offset=2,
        output_bs=4,
        group_list_type=list_type,
    )
    values = product_by_hand(x, w, sizes, scale, row_scale)
    wanted = torch.zeros(4, 8, dtype=torch.float64)
    for group, (start, stop) in enumerate(itertools.pairwise([0, *ends_of(sizes)])):
        for row in range(start, stop):
            y = values[row] + bias[group] + offset[group]
            wanted[row_index[row]] += y if weights is None else y * weights[row].double()
    if shared_input is not None:
        wanted[2:4] += shared_input.double() * 0.5
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-3)


def test_rows_of_a_token_are_added_in_their_order() -> None:
    x = torch.tensor([[1], [1], [1], [1]], dtype=torch.int8)
    w = torch.ones(1, 1, 1, dtype=torch.int8)
    rows = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])  # in float32, each 1 is lost beside 2^24
    for order, wanted in (([0, 1, 2, 3], 0.0), ([1, 2, 0, 3], 2.0), ([0, 3, 1, 2], 2.0)):
        found = npu_grouped_matmul_finalize_routing(
            x, w, torch.tensor([4]), scale=torch.ones(1, 1), pertoken_scale=rows[order],
            row_index=torch.zeros(4, dtype=torch.int64), output_bs=1,
        )  # fmt: skip
        assert found.tolist() == [[wanted]]


def test_finalize_routing_has_a_row_for_each_row_by_default() -> None:
    found = npu_grouped_matmul_finalize_routing(
        torch.ones(3, 2, dtype=torch.int8), torch.ones(1, 2, 4, dtype=torch.int8), torch.tensor([2]),
        scale=torch.ones(1, 4), row_index=torch.tensor([2, 2, 99]),
    )  # fmt: skip
    assert found.tolist() == [[0.0] * 4, [0.0] * 4, [4.0] * 4]


def test_nothing_in_gives_nothing() -> None:
    x, w, groups = integers(0, 4), integers(2, 4, 6), torch.tensor([0, 0])
    found, scale, _ = npu_grouped_matmul_swiglu_quant(x, w, groups, torch.ones(2, 6), torch.ones(0))
    assert found.shape == (0, 3)
    assert scale.shape == (0,)
    row_index = torch.ones(0, dtype=torch.int32)
    out = npu_grouped_matmul_finalize_routing(x, w, groups, scale=torch.ones(2, 6), row_index=row_index, output_bs=2)
    assert torch.equal(out, torch.zeros(2, 6))


V2: dict[str, Any] = {
    "x": integers(4, 6),
    "weight": [integers(2, 6, 8)],
    "weight_scale": [torch.ones(2, 8)],
    "x_scale": torch.ones(4),
    "group_list": torch.tensor([2, 4]),
}


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("group_list_type must be", {"group_list_type": 3}),
        ("group_list must be", {"group_list": torch.tensor([3, 2])}),
        ("group_list must be", {"group_list": torch.tensor([3])}),
        ("quant_dtype must be", {"quant_dtype": torch.float32}),
        ("weight must be a list", {"weight": torch.ones(2, 6, 8)}),
        ("weight must be", {"weight": [integers(2, 6, 7)], "weight_scale": [torch.ones(2, 7)]}),
        (r"weight\[0\] must be", {"weight": [integers(2, 5, 8)]}),
        ("weight_scale must be", {"weight_scale": [torch.ones(2, 6)]}),
        ("x_scale must be", {"x_scale": torch.ones(5)}),
        ("smooth_scale must be", {"smooth_scale": torch.ones(2, 8)}),
        ("x must be int8", {"x": torch.ones(4, 6), "weight": [torch.ones(2, 6, 8)]}),
        ("x must be", {"x": integers(4)}),
        ("quant_mode must be", {"quant_mode": 5}),
    ],
)
def test_swiglu_quant_v2_refuses(phrase: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f"npu_grouped_matmul_swiglu_quant_v2: .*{phrase}"):
        npu_grouped_matmul_swiglu_quant_v2(**V2 | arguments)


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("scale_dtype=293", {"weight_scale": [torch.ones(2, 8).to(torch.float8_e8m0fnu)], "dequant_mode": 2}),
        ("dequant_mode=1", {"dequant_mode": 1}),
        ("quant_mode=2", {"quant_mode": 2}),
        ("dequant_dtype=", {"dequant_dtype": torch.bfloat16}),
        ("bias=", {"bias": torch.ones(2, 8)}),
        ("weight_assist_matrix=", {"weight_assist_matrix": [torch.ones(2, 8)]}),
        ("weight=int32", {"weight": [torch.ones(2, 6, 1, dtype=torch.int32)]}),
        (r"quant_dtype=290 \(HiFloat8\)", {"quant_dtype": 290}),
    ],
)
def test_what_swiglu_quant_v2_lacks(phrase: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"npu_grouped_matmul_swiglu_quant_v2: {phrase}"):
        npu_grouped_matmul_swiglu_quant_v2(**V2 | arguments)


@pytest.mark.parametrize("name", ("bias", "offset"))
def test_what_swiglu_quant_lacks(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"npu_grouped_matmul_swiglu_quant: {name}="):
        npu_grouped_matmul_swiglu_quant(
            integers(4, 6), integers(2, 6, 8), torch.tensor([2, 4]), torch.ones(2, 8), torch.ones(4),
            **{name: torch.ones(2, 8)},
        )  # fmt: skip


FINAL: dict[str, Any] = {
    "x": integers(4, 6),
    "w": integers(2, 6, 8),
    "group_list": torch.tensor([2, 2]),
    "scale": torch.ones(2, 8),
    "row_index": torch.arange(4),
}


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("group_list_type must be 0 or 1", {"group_list_type": 2}),
        ("dtype must be torch.float32", {"dtype": torch.bfloat16}),
        ("scale must be", {"scale": None}),
        ("row_index must be", {"row_index": None}),
        ("row_index must be", {"row_index": torch.tensor([0, 1, 2, 4])}),
        ("row_index must be", {"row_index": torch.tensor([0, -1, 2, 3])}),
        ("row_index must be", {"row_index": torch.ones(4)}),
        ("row_index must be", {"row_index": torch.arange(3)}),
        ("pertoken_scale must be", {"pertoken_scale": torch.ones(3)}),
        (r"w\[0\] must be", {"w": integers(2, 5, 8)}),
        ("logit must be", {"logit": torch.ones(3)}),
        ("shared_input must be", {"shared_input": torch.ones(2, 7)}),
        ("shared_input must be", {"shared_input": torch.ones(5, 8)}),
        ("shared_input_offset must be", {"shared_input": torch.ones(2, 8), "shared_input_offset": 3}),
        ("group_list must be", {"group_list": torch.tensor([2, 3])}),
        ("w must be", {"w": integers(6, 8)}),
    ],
)
def test_finalize_routing_refuses(phrase: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f"npu_grouped_matmul_finalize_routing: {phrase}"):
        npu_grouped_matmul_finalize_routing(**FINAL | arguments)


def test_what_finalize_routing_lacks() -> None:
    with pytest.raises(NotImplementedError, match="npu_grouped_matmul_finalize_routing: scale_dtype=293"):
        npu_grouped_matmul_finalize_routing(**FINAL | {"scale": FINAL["scale"].to(torch.float8_e8m0fnu)})


def test_results_require_no_gradient() -> None:
    scale = torch.ones(2, 8, requires_grad=True)
    found = npu_grouped_matmul_finalize_routing(**FINAL | {"scale": scale})
    assert not found.requires_grad
    for result in npu_grouped_matmul_swiglu_quant_v2(**V2 | {"weight_scale": [scale]}):
        assert not result.requires_grad
