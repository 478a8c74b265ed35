"""npu_grouped_matmul and npu_grouped_matmul_add against one product per group in float64.

The numbers are small integers, or quarters of them: float32 holds every sum exactly, so the model rounded once is the
only right answer, and results are compared bit by bit.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeroute.interop.torch_npu.grouped_matmul import (
    npu_grouped_matmul,
    npu_grouped_matmul_add,
    npu_grouped_matmul_add_,
)
from moeroute.interop.torch_npu.products import integer_product

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("plain", "turned", "strided", "offset")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers at other strides."""
    if layout == "turned":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "offset":
        long = torch.cat([tensor.new_zeros(3), tensor.reshape(-1)])
        return long[3:].view(tensor.shape)
    return tensor


def integers(*shape: int, seed: int = 0, most: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def quarters(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (integers(*shape, seed=seed, most=9) / 4).to(dtype)


def once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 that float32 holds exactly, rounded once; 8-bit types saturate."""
    assert torch.equal(values.float().double(), values)
    if dtype is torch.int8:
        return values.round().clamp(-128, 127).to(dtype)
    if dtype in FLOAT8:
        top = torch.finfo(dtype).max
        return values.clamp(-top, top).float().to(dtype)
    return values.float().to(dtype)


def group_list_of(sizes: list[int], list_type: int, dtype: torch.dtype = torch.int64) -> Tensor:
    if list_type == 0:
        return torch.tensor(list(itertools.accumulate(sizes)), dtype=dtype)
    if list_type == 1:
        return torch.tensor(sizes, dtype=dtype)
    return torch.tensor([[group, size] for group, size in enumerate(sizes)], dtype=dtype)


def bounds(sizes: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *itertools.accumulate(sizes)]))


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found.double(), wanted.double())


# ---------------------------------------------------------------------------- rows


SIZES = ([2, 3, 1], [0, 4, 0], [6, 0, 0], [1, 1, 1], [0, 0, 0])


@settings(max_examples=150)
@given(
    dtype=st.sampled_from(FLOATS),
    sizes=st.sampled_from(SIZES),
    list_type=st.sampled_from([0, 1, 2]),
    index=st.sampled_from([torch.int32, torch.int64]),
    separate=st.booleans(),
    split_item=st.sampled_from([0, 1, 2, 3]),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    bias=st.sampled_from([None, "own", "float32"]),
    output=st.sampled_from([None, *FLOATS]),
    as_number=st.booleans(),
)
def test_rows(
    dtype: torch.dtype,
    sizes: list[int],
    list_type: int,
    index: torch.dtype,
    separate: bool,
    split_item: int,
    layouts: tuple[str, str],
    bias: str | None,
    output: torch.dtype | None,
    as_number: bool,
) -> None:
    separate = separate or split_item < 2
    x = laid_out(integers(6, 5, dtype=dtype), layouts[0])
    w = laid_out(integers(3, 5, 7, seed=1, dtype=dtype), layouts[1])
    b = None if bias is None else quarters(3, 7, seed=2, dtype=dtype if bias == "own" else torch.float32)
    weight = [matrix for matrix in w] if separate else [w]
    found = npu_grouped_matmul(
        [x],
        weight,
        bias=None if b is None else [row for row in b] if separate else [b],
        group_list=group_list_of(sizes, list_type, index),
        split_item=split_item,
        group_type=0,
        group_list_type=list_type,
        output_dtype={torch.float16: 5, torch.bfloat16: 15, torch.float32: 6}[output] if output and as_number else output,
    )  # fmt: skip
    products = [x[start:stop].double() @ w[group].double() for group, (start, stop) in enumerate(bounds(sizes))]
    if b is not None:
        products = [product + row.double() for product, row in zip(products, b, strict=True)]
    wanted = [once(product, output or dtype) for product in products]
    if split_item < 2:
        assert len(found) == 3
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        rest = torch.zeros(6 - sum(sizes), 7, dtype=output or dtype)
        (one,) = found
        same(one, torch.cat([*wanted, rest]))


def test_rows_of_known_numbers() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    w = torch.tensor([[[10.0]], [[100.0]]])
    (found,) = npu_grouped_matmul([x], [w], group_list=torch.tensor([2, 3]), split_item=3, group_type=0)
    assert found.tolist() == [[10.0], [20.0], [300.0], [0.0]]


def test_pairs_are_taken_in_their_order() -> None:
    x, w = integers(6, 4), integers(4, 4, 3, seed=1)
    pairs = torch.tensor([[2, 1], [0, 3], [0, 0], [0, 0]])
    wanted = torch.cat([x[:1] @ w[2], x[1:4] @ w[0], torch.zeros(2, 3)])
    for weight in ([w], [matrix for matrix in w]):
        arguments: dict[str, Any] = {"group_list": pairs, "group_type": 0, "group_list_type": 2}
        (found,) = npu_grouped_matmul([x], weight, split_item=2, **arguments)
        same(found, wanted)
    lists = npu_grouped_matmul([x], [matrix for matrix in w], split_item=0, **arguments)
    for group, rows in enumerate((x[1:4], x[:0], x[:1], x[:0])):
        same(lists[group], rows @ w[group])


@pytest.mark.parametrize("given_list", (False, True))
@pytest.mark.parametrize("split_item", (2, 3))
def test_a_list_of_rows_for_one_result(split_item: int, given_list: bool) -> None:
    x = [integers(size, 5, seed=size) for size in (2, 0, 3)]
    w = [integers(5, 4, seed=7 + group) for group in range(3)]
    groups = torch.tensor([2, 2, 5]) if given_list else None
    (found,) = npu_grouped_matmul(x, w, group_list=groups, split_item=split_item, group_type=0)
    same(found, torch.cat([rows @ matrix for rows, matrix in zip(x, w, strict=True)]))


def test_a_list_of_ints_means_rows() -> None:
    x, w = integers(5, 4), integers(2, 4, 3, seed=1)
    wanted = torch.cat([x[:2] @ w[0], x[2:5] @ w[1]])
    for group_type in (None, 0, -1):
        (found,) = npu_grouped_matmul([x], [w], group_list=[2, 5], split_item=2, group_type=group_type)
        same(found, wanted)
    one, other = npu_grouped_matmul([x], [w[0], w[1]], group_list=[2, 5])
    same(torch.cat([one, other]), wanted)


@pytest.mark.parametrize("rows, width, columns, experts", [(0, 4, 3, 2), (5, 0, 3, 2), (5, 4, 0, 2), (5, 4, 3, 0)])
def test_rows_of_nothing(rows: int, width: int, columns: int, experts: int) -> None:
    x, w = torch.ones(rows, width), torch.ones(experts, width, columns)
    groups = torch.tensor([rows // 2] * experts, dtype=torch.int64)
    bias = torch.ones(experts, columns)
    for dtype in (torch.float32, torch.bfloat16):
        (found,) = npu_grouped_matmul(
            [x], [w], bias=[bias], group_list=groups, split_item=2, group_type=0, group_list_type=1, output_dtype=dtype
        )
        used = rows // 2 * experts
        wanted = torch.zeros(rows, columns, dtype=dtype)
        wanted[:used] = width + 1
        same(found, wanted)


ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda y: y,
    1: lambda y: y.clamp(min=0),
    2: lambda y: 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))),
    4: lambda y: y / (1 + torch.exp(-1.702 * y)),
    5: lambda y: y / (1 + torch.exp(-y)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("act_type", list(ACTIVATIONS))
def test_activations(act_type: int, dtype: torch.dtype) -> None:
    x, w, b = integers(4, 3, dtype=dtype), integers(1, 3, 5, seed=1, dtype=dtype), quarters(1, 5, seed=2, dtype=dtype)
    (found,) = npu_grouped_matmul(
        [x], [w], bias=[b], group_list=torch.tensor([4]), split_item=2, group_type=0, act_type=act_type
    )
    wanted = ACTIVATIONS[act_type](x.double() @ w[0].double() + b.double())
    assert found.dtype == dtype
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=1e-5)


# ---------------------------------------------------------------------------- lists


@given(
    dtype=st.sampled_from(FLOATS),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    bias=st.sampled_from([None, "own", "float32"]),
    split_item=st.sampled_from([0, 1]),
)
def test_lists(dtype: torch.dtype, layouts: tuple[str, str], bias: str | None, split_item: int) -> None:
    shapes = ((2, 5), (1, 2, 3), (0, 4), (2, 1, 1, 1, 2, 6))
    x = [laid_out(integers(*shape, seed=seed, dtype=dtype), layouts[0]) for seed, shape in enumerate(shapes)]
    w = [
        laid_out(integers(shape[-1], 3 + seed, seed=9 + seed, dtype=dtype), layouts[1])
        for seed, shape in enumerate(shapes)
    ]
    b = [quarters(matrix.shape[1], dtype=dtype if bias == "own" else torch.float32) for matrix in w]
    found = npu_grouped_matmul(x, w, bias=None if bias is None else b, split_item=split_item, group_type=-1)
    assert len(found) == 4
    for group, one in enumerate(found):
        wanted = x[group].double() @ w[group].double() + (b[group].double() if bias is not None else 0)
        same(one, once(wanted, dtype))


# ---------------------------------------------------------------------------- reduction


@settings(max_examples=150)
@given(
    dtype=st.sampled_from(FLOATS),
    sizes=st.sampled_from(SIZES),
    list_type=st.sampled_from([0, 1, 2]),
    index=st.sampled_from([torch.int32, torch.int64]),
    split_item=st.sampled_from([0, 1, 2, 3]),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    output=st.sampled_from([None, torch.float32]),
)
def test_reduction(
    dtype: torch.dtype,
    sizes: list[int],
    list_type: int,
    index: torch.dtype,
    split_item: int,
    layouts: tuple[str, str],
    output: torch.dtype | None,
) -> None:
    x = laid_out(integers(6, 4, dtype=dtype), layouts[0]).t()
    w = laid_out(integers(6, 5, seed=1, dtype=dtype), layouts[1])
    weight = [w[start:stop] for start, stop in bounds(sizes)] if split_item < 2 else [w]
    found = npu_grouped_matmul(
        [x],
        weight,
        group_list=group_list_of(sizes, list_type, index),
        split_item=split_item,
        group_type=2,
        group_list_type=list_type,
        output_dtype=output,
    )
    wanted = [
        once(x[:, start:stop].double() @ w[start:stop].double(), output or dtype) for start, stop in bounds(sizes)
    ]
    if split_item < 2:
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        (one,) = found
        same(one, torch.stack(wanted))


def test_reduction_of_pairs_in_another_order() -> None:
    x, w = integers(6, 4).t(), integers(6, 5, seed=1)
    pairs = torch.tensor([[2, 1], [0, 3], [0, 0]])
    (found,) = npu_grouped_matmul([x], [w], group_list=pairs, split_item=3, group_type=2, group_list_type=2)
    same(found, torch.stack([x[:, 1:4] @ w[1:4], torch.zeros(4, 5), x[:, :1] @ w[:1]]))


# ---------------------------------------------------------------------------- 8-bit numbers


def bits_of(scale: Tensor, flags: int) -> Tensor:
    """float32 in the low halves of int64, with flags above."""
    return (scale.view(torch.int32).long() & 0xFFFFFFFF) | (flags << 32)


@settings(max_examples=200)
@given(
    kind=st.sampled_from([torch.int8, *FLOAT8]),
    weight_kind=st.sampled_from(FLOAT8),
    sizes=st.sampled_from(SIZES),
    form=st.sampled_from(["columns", "list", "one", "one of a row"]),
    scale_type=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    tokens=st.sampled_from([None, "rows", "column", "groups"]),
    offset=st.booleans(),
    bias=st.sampled_from([None, torch.int32, torch.float32, torch.bfloat16]),
    output=st.sampled_from([None, *FLOATS]),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
)
def test_8_bit_numbers(
    kind: torch.dtype,
    weight_kind: torch.dtype,
    sizes: list[int],
    form: str,
    scale_type: torch.dtype,
    tokens: str | None,
    offset: bool,
    bias: torch.dtype | None,
    output: torch.dtype | None,
    layouts: tuple[str, str],
) -> None:
    whole = kind is torch.int8
    bias = None if bias is torch.int32 and not whole else bias
    x = laid_out(integers(6, 5, dtype=kind), layouts[0])
    w = laid_out(integers(3, 5, 7, seed=1, dtype=kind if whole else weight_kind), layouts[1])
    shape = {"one": (3,), "one of a row": (3, 1)}.get(form, (3, 7))
    scale = 2.0 ** integers(*shape, seed=2, most=2)
    shift = quarters(*shape, seed=3) if offset else None
    given_scale = bits_of(scale, 7) if scale_type is torch.int64 else scale.to(scale_type)
    row_scale = {"rows": (6,), "column": (6, 1), "groups": (3,)}.get(tokens or "")
    per_token = None if row_scale is None else 2.0 ** integers(*row_scale, seed=4, most=1)
    b = None if bias is None else (integers(3, 7, seed=5) * 3).to(bias)
    as_list = form == "list"
    (found,) = npu_grouped_matmul(
        [x],
        [w],
        scale=list(given_scale) if as_list else [given_scale],
        offset=None if shift is None else list(shift) if as_list else [shift],
        per_token_scale=None if per_token is None else [per_token],
        bias=None if b is None else [b],
        group_list=group_list_of(sizes, 1),
        split_item=3,
        group_type=0,
        group_list_type=1,
        output_dtype=output,
    )
    wanted = torch.zeros(6, 7, dtype=torch.float64)
    for group, (start, stop) in enumerate(bounds(sizes)):
        part = x[start:stop].double() @ w[group].double()
        if b is not None and bias is torch.int32:
            part += b[group]
        part *= scale[group].double()
        if per_token is not None:
            part *= per_token[group] if tokens == "groups" else per_token.reshape(6, 1)[start:stop]
        if shift is not None:
            part += shift[group]
        if b is not None and bias is not torch.int32:
            part += b[group]
        wanted[start:stop] = part
    same(found, once(wanted, output or kind))


def test_int8_products_are_the_integers_themselves() -> None:
    x = torch.full((40, 1000), -128, dtype=torch.int8)
    x[::2] = 127
    w = torch.full((2, 1000, 24), 127, dtype=torch.int8)
    w[1] = -128
    bias = integers(2, 24, most=10**9, dtype=torch.int32) // 10
    for layout in LAYOUTS:
        (found,) = npu_grouped_matmul(
            [laid_out(x, layout)], [laid_out(w, layout)], group_list=[7, 38], split_item=3, output_dtype=3, bias=[bias]
        )
        wanted = torch.zeros(40, 24, dtype=torch.int64)
        for group, rows in enumerate((slice(0, 7), slice(7, 38))):
            wanted[rows] = x[rows].long() @ w[group].long() + bias[group]
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), wanted)


@pytest.mark.parametrize(
    "rows, width, columns", [(1, 1, 1), (3, 17, 5), (0, 4, 4), (4, 0, 4), (4, 4, 0), (33, 130, 65)]
)
def test_integer_product(monkeypatch: pytest.MonkeyPatch, rows: int, width: int, columns: int) -> None:
    x = integers(rows, width, most=127, dtype=torch.int8)
    w = integers(width, columns, most=127, seed=1, dtype=torch.int8)
    wanted = x.int() @ w.int()
    assert torch.equal(integer_product("", x, w), wanted)
    monkeypatch.setattr("moeroute.interop.torch_npu.products._int_mm_is_exact", lambda: False)
    assert torch.equal(integer_product("", x, w), wanted)


def test_8_bit_reduction_with_a_scale_for_each_group() -> None:
    x = integers(6, 4, dtype=torch.float8_e4m3fn).t()
    w = integers(6, 5, seed=1, dtype=torch.float8_e5m2)
    scale, row_scale = torch.tensor([2.0, 4.0]), torch.tensor([0.5, 1.0])
    (found,) = npu_grouped_matmul(
        [x], [w], scale=[scale], per_token_scale=[row_scale], group_list=torch.tensor([2, 4]), split_item=3,
        group_type=2, group_list_type=1, output_dtype=torch.bfloat16,
    )  # fmt: skip
    wide_x, wide_w = x.double(), w.double()
    same(found, once(torch.stack([wide_x[:, :2] @ wide_w[:2], wide_x[:, 2:] @ wide_w[2:] * 4]), torch.bfloat16))


def test_8_bit_lists() -> None:
    x = [integers(2, 4, dtype=torch.int8), integers(3, 5, dtype=torch.int8)]
    w = [integers(4, 3, dtype=torch.int8, seed=1), integers(5, 6, dtype=torch.int8, seed=2)]
    scale = [torch.full((3,), 2.0), torch.full((6,), 0.5)]
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 1.0, 2.0])]
    found = npu_grouped_matmul(x, w, scale=scale, per_token_scale=rows, group_type=-1, output_dtype=torch.bfloat16)
    for group, one in enumerate(found):
        wanted = x[group].double() @ w[group].double() * scale[group] * rows[group][:, None]
        same(one, once(wanted, torch.bfloat16))


def test_float8_may_come_as_bytes() -> None:
    x, w = integers(2, 4, dtype=torch.float8_e4m3fn), integers(1, 4, 3, dtype=torch.float8_e4m3fn, seed=1)
    arguments: dict[str, Any] = {"group_list": [2], "split_item": 2, "output_dtype": torch.float32}
    (found,) = npu_grouped_matmul(
        [x.view(torch.uint8)], [w.view(torch.uint8)], x_dtype=292, weight_dtype=torch.float8_e4m3fn, **arguments
    )
    same(found, once(x.double() @ w[0].double(), torch.float32))


# ---------------------------------------------------------------------------- quantised weights


def nibbles_packed(numbers: Tensor) -> Tensor:
    """Eight numbers of [-8, 7] in an int32, the first lowest."""
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= (numbers[..., place::8].long() & 15) << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@given(
    dtype=st.sampled_from(FLOATS),
    four_bits=st.booleans(),
    form=st.sampled_from(["columns", "list", "one", "parts", "parts in a list"]),
    offset=st.booleans(),
    bias=st.sampled_from([None, "own", "float32"]),
    sizes=st.sampled_from(SIZES),
)
def test_quantised_weights(
    dtype: torch.dtype, four_bits: bool, form: str, offset: bool, bias: str | None, sizes: list[int]
) -> None:
    x = integers(6, 4, dtype=dtype)
    numbers = integers(3, 4, 8, seed=1, most=7 if four_bits else 100, dtype=torch.int8)
    shape = {"one": (3, 1), "parts": (3, 2, 8), "parts in a list": (3, 2, 8)}.get(form, (3, 8))
    scale = (quarters(*shape, seed=2) * 1.3).to(dtype)
    shift = quarters(*shape, seed=3, dtype=dtype) if offset else None
    b = None if bias is None else quarters(3, 8, seed=4, dtype=dtype if bias == "own" else torch.float32)
    as_list = "list" in form
    (found,) = npu_grouped_matmul(
        [x],
        [nibbles_packed(numbers) if four_bits else numbers],
        bias=None if b is None else [b],
        antiquant_scale=list(scale) if as_list else [scale],
        antiquant_offset=None if shift is None else list(shift) if as_list else [shift],
        group_list=group_list_of(sizes, 0),
        split_item=2,
        group_type=0,
        weight_dtype=285 if four_bits else None,
    )
    wanted = torch.zeros(6, 8, dtype=torch.float64)
    for group, (start, stop) in enumerate(bounds(sizes)):
        factor, added = (torch.zeros(8) if tensor is None else tensor[group].float() for tensor in (scale, shift))
        if "parts" in form:
            factor = factor.repeat_interleave(2, 0)
            added = added.repeat_interleave(2, 0) if offset else added
        weight = ((numbers[group].float() + added) * factor).to(dtype)
        wanted[start:stop] = x[start:stop].double() @ weight.double() + (0 if b is None else b[group].double())
    assert found.dtype == dtype
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(
        found.double(), wanted, rtol=tolerance, atol=1e-3 if dtype is not torch.float32 else 1e-4
    )


# ---------------------------------------------------------------------------- adding to a gradient


@pytest.mark.parametrize("flat", (False, True))
@pytest.mark.parametrize("list_type", (0, 1))
@pytest.mark.parametrize("dtype", FLOATS)
def test_add(dtype: torch.dtype, list_type: int, flat: bool) -> None:
    sizes = [2, 0, 3]
    x, w = integers(6, 4, dtype=dtype), laid_out(integers(6, 5, seed=1, dtype=dtype), "turned")
    start = quarters(3, 4, 5, seed=2) / 1024
    wanted = start.double()
    for group, (first, last) in enumerate(bounds(sizes)):
        wanted[group] += x[first:last].double().t() @ w[first:last].double()
    own = start.clone().view(12, 5) if flat else start.clone()
    groups = group_list_of(sizes, list_type, torch.int32)
    added = npu_grouped_matmul_add(own, x, w, groups, group_list_type=list_type)
    assert torch.equal(own.view(3, 4, 5), start)
    found = npu_grouped_matmul_add_(own, x, w, groups, group_list_type=list_type)
    assert found is own
    same(own, once(wanted, torch.float32).view(own.shape))
    same(added, own)


def test_add_into_a_strided_view() -> None:
    x, w = integers(4, 3), integers(4, 5, seed=1)
    long = torch.zeros(6, 10)
    npu_grouped_matmul_add_(long[:, ::2], x, w, torch.tensor([1, 4]))
    same(long[:, ::2], torch.cat([x[:1].t() @ w[:1], x[1:].t() @ w[1:]]))
    assert not long[:, 1::2].any()


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("transpose_x must be True", {"transpose_x": False}),
        ("transpose_weight must be False", {"transpose_weight": True}),
        ("group_type must be 2", {"group_type": 0}),
        ("group_list_type must be 0 or 1", {"group_list_type": 2}),
        ("self must be", {"self": torch.zeros(2, 3, 4)}),
        ("self must be torch.float32", {"self": torch.zeros(2, 3, 5, dtype=torch.bfloat16)}),
        ("group_list must be", {"group_list": torch.tensor([3, 2])}),
        ("group_list must be", {"group_list": torch.tensor([3, 5])}),
        ("weight must be", {"weight": torch.ones(3, 5)}),
        ("weight must be", {"weight": torch.ones(4, 5, dtype=torch.float16)}),
    ],
)
def test_add_refuses(phrase: str, arguments: dict[str, Any]) -> None:
    given_arguments: dict[str, Any] = {
        "self": torch.zeros(2, 3, 5),
        "x": torch.ones(4, 3),
        "weight": torch.ones(4, 5),
        "group_list": torch.tensor([2, 4]),
    }
    with pytest.raises(RuntimeError, match=f"npu_grouped_matmul_add_: {phrase}"):
        npu_grouped_matmul_add_(**given_arguments | arguments)
    with pytest.raises(RuntimeError, match=phrase):
        npu_grouped_matmul_add(**given_arguments | arguments)


# ---------------------------------------------------------------------------- gradients, modes, errors


def test_results_require_no_gradient() -> None:
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3, 5, requires_grad=True)
    bias = torch.ones(2, 5, requires_grad=True)
    groups = torch.tensor([1, 3])
    for dtype in (None, torch.bfloat16):
        (found,) = npu_grouped_matmul(
            [x], [w], bias=[bias], group_list=groups, split_item=2, group_type=0, output_dtype=dtype
        )
        assert not found.requires_grad
    (found,) = npu_grouped_matmul([x.t()], [x], group_list=groups, split_item=2, group_type=2)
    assert not found.requires_grad


def test_autocast_changes_nothing() -> None:
    x, w = quarters(4, 3) / 3, quarters(2, 3, 5, seed=1) / 3
    for weight in ([w], list(w)):
        arguments: dict[str, Any] = {"group_list": torch.tensor([1, 3]), "split_item": 2, "group_type": 0}
        (wanted,) = npu_grouped_matmul([x], weight, **arguments)
        with torch.autocast("cpu", torch.bfloat16):
            (found,) = npu_grouped_matmul([x], weight, **arguments)
        same(found, wanted)


def test_inference_mode() -> None:
    with torch.inference_mode():
        (found,) = npu_grouped_matmul([integers(4, 3)], [integers(2, 3, 5)], group_list=[1, 3], split_item=2)
    same(found[:1], integers(4, 3)[:1] @ integers(2, 3, 5)[0])


ONE: dict[str, Any] = {
    "x": [torch.ones(4, 3)],
    "weight": [torch.ones(2, 3, 5)],
    "group_list": torch.tensor([2, 4]),
    "split_item": 2,
    "group_type": 0,
}
EIGHT = {"x": [torch.ones(4, 3, dtype=torch.int8)], "weight": [torch.ones(2, 3, 5, dtype=torch.int8)]}
PAIRS = {"group_list": torch.tensor([[0, 1], [0, 1]]), "group_list_type": 2}


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("Requires manual passing group_type", {"group_type": None}),
        ("Requires manual passing group_type", {"group_type": None, "group_list": None}),
        ("The group type must be -1, 0 or 2", {"group_type": 1}),
        ("neither x nor weight could be empty", {"x": []}),
        ("neither x nor weight could be empty", {"weight": []}),
        ("split_item must be 0, 1, 2 or 3", {"split_item": 4}),
        ("split_item must be 2 or 3", {"split_item": 0}),
        ("split_item must be 0 or 1", {"group_type": -1, "group_list": None}),
        ("group_list must be None for group_type -1", {"group_type": -1, "split_item": 0}),
        ("x must be a list of tensors", {"x": torch.ones(4, 3)}),
        (r"x\[0\] must be a torch.Tensor", {"x": [[1.0]]}),
        (r"x\[0\] must be", {"x": [torch.ones(4)]}),
        (r"weight\[0\] must be", {"weight": [torch.ones(2, 4, 5)]}),
        ("x must be one tensor", {"x": [torch.ones(4, 3)] * 3}),
        ("x must be one tensor", {"group_list": None}),
        ("weight must be of a type", {"weight": [torch.ones(2, 3, 5, dtype=torch.float16)]}),
        ("weight must be tensors of one type", {"weight": [torch.ones(3, 5), torch.ones(3, 5, dtype=torch.float16)]}),
        ("weight must be of one width", {"weight": [torch.ones(3, 5), torch.ones(3, 4)]}),
        ("group_list must be ascending ends", {"group_list": torch.tensor([3, 2])}),
        ("group_list must be ascending ends", {"group_list": torch.tensor([3, 5])}),
        ("group_list must be ascending ends", {"group_list": [3, 5]}),
        ("group_list must be sizes", {"group_list": torch.tensor([-1, 2]), "group_list_type": 1}),
        ("group_list must be sizes", {"group_list": torch.tensor([2, 3]), "group_list_type": 1}),
        ("group_list must be of 2 groups", {"group_list": torch.tensor([2, 3, 4])}),
        ("group_list must be torch.int32", {"group_list": torch.tensor([2.0, 4.0])}),
        ("group_list must be pairs", PAIRS),
        ("group_list must be pairs", {**PAIRS, "group_list": torch.tensor([[0, 1], [2, 1]])}),
        (r"group_list must be \[G, 2\]", {"group_list_type": 2}),
        (r"group_list must be \[G\]", {"group_list": torch.tensor(4)}),
        ("group_list must be None", {"group_list": torch.tensor(4), "group_type": -1, "split_item": 0}),
        (
            r"group_list must be \[G, 2\]",
            {"group_list": torch.tensor(4), "group_type": 2, "group_list_type": 2, "weight": [torch.ones(3, 5)]},
        ),
        (
            "group_list must be pairs",
            {**PAIRS, "group_list": torch.tensor([[2, 1], [0, 1]]), "group_type": 2, "weight": [torch.ones(3, 5)]},
        ),
        ("group_list must be an int", {"group_list": [1, 2.0]}),
        ("group_list must be of the rows", {"x": [torch.ones(2, 3)] * 2, "group_list": torch.tensor([1, 4])}),
        ("group_list_type must be", {"group_list_type": 3}),
        ("group_list_type must be 0", {"group_list": [1, 2], "group_list_type": 1}),
        ("act_type must be", {"act_type": 3}),
        ("output_dtype must be", {"output_dtype": torch.int32}),
        ("output_dtype must be", {"output_dtype": 99}),
        ("bias must be", {"bias": [torch.ones(2, 4)]}),
        ("bias must be", {"bias": [torch.ones(5)]}),
        ("bias must be", {"bias": [torch.ones(2, 5, dtype=torch.float16)]}),
        ("scale must be None", {"scale": [torch.ones(2, 5)]}),
        ("per_token_scale must be None", {"per_token_scale": [torch.ones(4)]}),
        ("antiquant_scale must be None", {"antiquant_scale": [torch.ones(2, 5)]}),
        ("scale must be given", EIGHT),
        ("scale must be", {**EIGHT, "scale": [torch.ones(2, 4)]}),
        ("scale must be", {**EIGHT, "scale": [torch.ones(2, 5, dtype=torch.int16)]}),
        ("per_token_scale must be", {**EIGHT, "scale": [torch.ones(2, 5)], "per_token_scale": [torch.ones(3)]}),
        ("scale_dtype must be", {**EIGHT, "scale": [torch.ones(2, 5)], "scale_dtype": torch.bfloat16}),
        ("scale_dtype must be", {**EIGHT, "scale": [torch.ones(2, 5)], "scale_dtype": 293}),
        ("antiquant_scale must be given", {"weight": EIGHT["weight"]}),
        ("antiquant_scale must be of parts", {"weight": EIGHT["weight"], "antiquant_scale": [torch.ones(2, 2, 5)]}),
        ("x_dtype must be", {"x_dtype": torch.int8}),
        ("x must be one tensor", {"group_type": 2, "x": [torch.ones(3, 4)] * 2}),
        (r"weight\[0\] must be", {"group_type": 2}),
        ("weight must be one tensor", {"group_type": 2, "weight": [torch.ones(3, 5)] * 2}),
        ("bias must be None", {"group_type": 2, "weight": [torch.ones(3, 5)], "bias": [torch.ones(2, 5)]}),
        (
            "group_list must be of the rows",
            {"group_type": 2, "split_item": 0, "weight": [torch.ones(1, 5)] * 2, "group_list": torch.tensor([2, 3])},
        ),
    ],
)
def test_refuses(phrase: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f"npu_grouped_matmul: .*{phrase}") as caught:
        npu_grouped_matmul(**ONE | arguments)
    assert not isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    "phrase, arguments",
    [
        ("scale_dtype=293", {**EIGHT, "scale": [torch.ones(2, 5).to(torch.float8_e8m0fnu)]}),
        ("scale_dtype=293", {**EIGHT, "scale": [torch.ones(2, 5)], "per_token_scale_dtype": torch.float8_e8m0fnu}),
        (r"x_dtype=290 \(HiFloat8\)", {"x_dtype": 290}),
        (r"weight_dtype=296 \(float4_e2m1fn_x2\)", {"weight_dtype": 296}),
        ("activation_input=", {"activation_input": [torch.ones(1)]}),
        ("activation_quant_scale=", {"activation_quant_scale": [torch.ones(1)]}),
        ("activation_quant_offset=", {"activation_quant_offset": [torch.ones(1)]}),
        ("weight=int32", {**EIGHT, "weight": [torch.ones(2, 3, 5, dtype=torch.int32)]}),
        ("scale=", {**EIGHT, "scale": [torch.ones(2, 3, 5)]}),
    ],
)
def test_what_is_not_built(phrase: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"npu_grouped_matmul: {phrase}"):
        npu_grouped_matmul(**ONE | arguments)


@pytest.mark.parametrize("fast", [True, False])
def test_a_float32_bias_is_added_before_the_one_rounding(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """497 and -496.4375 make 0.5625; bfloat16 has neither of the first two. Also for an int8 weight."""
    if not fast:
        monkeypatch.setattr("moeroute.interop.torch_npu.products._linear_adds_float32", lambda: False)
    x = torch.full((5, 32), 8.0).bfloat16()
    x[:, 0] = 0.5
    bias = torch.full((2, 3), -496.4375)
    own: dict[str, Any] = {"weight": [torch.full((2, 3, 32), 2.0).bfloat16().transpose(1, 2)]}
    bytes_only = {"weight": [torch.ones(2, 32, 3, dtype=torch.int8)], "antiquant_scale": [torch.full((2, 3), 2.0)]}
    for weight in (own, bytes_only):
        (found,) = npu_grouped_matmul([x], bias=[bias], group_list=[2, 4], split_item=2, **weight)
        assert found.tolist() == [[0.5625] * 3] * 4 + [[0.0] * 3]


def test_sums_that_an_int32_may_not_hold_are_refused() -> None:
    x, w = torch.ones(1, 2**17, dtype=torch.int8), torch.ones(1, 2**17, 1, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="npu_grouped_matmul: K must be at most 131071"):
        npu_grouped_matmul([x], [w], group_list=[1], split_item=2, output_dtype=3)


def test_the_model_of_the_rounding_is_torchs() -> None:
    """Halfway cases go to even, once: what `once` says of bfloat16 is what a wider product rounds to."""
    product = F.linear(torch.tensor([[256.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 3.0]]))
    assert once(product.double(), torch.bfloat16).tolist() == [[256.0, 260.0]]
