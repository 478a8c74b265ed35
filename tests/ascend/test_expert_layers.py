"""Expert layers in the shapes that frameworks call them in, each equal to a plain loop over experts, gradients too."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moeroute.interop.torch_npu.activation import npu_clipped_swiglu, npu_swiglu
from moeroute.interop.torch_npu.grouped_matmul import npu_grouped_matmul, npu_grouped_matmul_add_
from moeroute.interop.torch_npu.quantization import npu_dequant_swiglu_quant, npu_dynamic_quant
from moeroute.interop.torch_npu.quantized_products import npu_grouped_matmul_swiglu_quant_v2

HIDDEN, INNER, COUNTS = 8, 6, [3, 0, 5, 1]
EXPERTS, ROWS = len(COUNTS), sum(COUNTS)
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expert_rows() -> list[slice]:
    return [slice(start, stop) for start, stop in itertools.pairwise([0, *itertools.accumulate(COUNTS)])]


def expect(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted.double(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def compare(layer: Callable[..., Tensor], loop: Callable[..., Tensor], dtype: torch.dtype, *inputs: Tensor) -> None:
    """Results and gradients of the layer in `dtype` against those of the loop in float64."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out, wanted = layer(*leaves), loop(*exact)
    expect(out, wanted, dtype)
    grad = numbers(*out.shape, seed=99, dtype=dtype)
    found = torch.autograd.grad(out, leaves, grad)
    for one, other in zip(found, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
        expect(one, other, dtype)


# ---------------------------------------------------------------------------- an autograd.Function around the product


class GroupedLinear(torch.autograd.Function):
    """rows[expert] @ weight[expert], as training frameworks write it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        (out,) = npu_grouped_matmul(
            [rows], [weight], bias=None, group_list=counts, split_item=2, group_type=0, group_list_type=1
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, counts = ctx.saved_tensors
        (d_rows,) = npu_grouped_matmul(
            [grad], [weight.transpose(1, 2)], bias=None, group_list=counts, split_item=2, group_type=0,
            group_list_type=1,
        )  # fmt: skip
        (d_weight,) = npu_grouped_matmul(
            [rows.t()], [grad], bias=None, group_list=counts, split_item=3, group_type=2, group_list_type=1
        )
        return d_rows, d_weight, None


def swiglu_loop(rows: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    parts = []
    for expert, where in enumerate(expert_rows()):
        left, right = (rows[where] @ w1[expert]).chunk(2, -1)
        parts.append((F.silu(left) * right) @ w2[expert])
    return torch.cat(parts)


@pytest.mark.parametrize("index", (torch.int32, torch.int64))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_a_training_layer(dtype: torch.dtype, index: torch.dtype) -> None:
    counts = torch.tensor(COUNTS, dtype=index)

    def layer(rows: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        inner = npu_swiglu(GroupedLinear.apply(rows, w1, counts), dim=-1)
        return GroupedLinear.apply(inner, w2, counts)

    rows = numbers(ROWS, HIDDEN) / 2
    w1, w2 = numbers(EXPERTS, HIDDEN, 2 * INNER, seed=1) / 3, numbers(EXPERTS, INNER, HIDDEN, seed=2) / 3
    compare(layer, swiglu_loop, dtype, rows, w1, w2)


def test_the_training_layer_passes_gradcheck() -> None:
    counts = torch.tensor(COUNTS)
    rows = numbers(ROWS, 3, dtype=torch.float64).requires_grad_()
    weight = numbers(EXPERTS, 3, 2, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows, weight: GroupedLinear.apply(rows, weight, counts), (rows, weight))


def test_the_gradient_of_the_weight_added_to_a_float32_buffer() -> None:
    rows, grad = numbers(ROWS, HIDDEN, dtype=torch.bfloat16), numbers(ROWS, INNER, seed=1, dtype=torch.bfloat16)
    main_grad = numbers(EXPERTS * HIDDEN, INNER, seed=2)
    wanted = main_grad.double().view(EXPERTS, HIDDEN, INNER).clone()
    for expert, where in enumerate(expert_rows()):
        wanted[expert] += rows[where].double().t() @ grad[where].double()
    ends = torch.tensor(COUNTS).cumsum(0)
    npu_grouped_matmul_add_(main_grad, rows, grad, ends)
    expect(main_grad.view(wanted.shape), wanted, torch.float32)


# ---------------------------------------------------------------------------- a list of experts


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_block_of_single_experts(dtype: torch.dtype) -> None:
    rows = numbers(ROWS, HIDDEN, dtype=dtype)
    gates = [numbers(2 * INNER, HIDDEN, seed=expert, dtype=dtype) / 3 for expert in range(EXPERTS)]
    downs = [numbers(HIDDEN, INNER, seed=9 + expert, dtype=dtype) / 3 for expert in range(EXPERTS)]
    split = list(rows.split(COUNTS))
    inner = npu_grouped_matmul(split, [gate.t() for gate in gates], split_item=0, group_type=-1)
    inner = [npu_swiglu(part) for part in inner]
    found = npu_grouped_matmul(inner, [down.t() for down in downs], split_item=0, group_type=-1)
    wanted = swiglu_loop(
        rows.double(), torch.stack(gates).transpose(1, 2).double(), torch.stack(downs).transpose(1, 2).double()
    )
    assert [len(part) for part in found] == COUNTS
    expect(torch.cat(found), wanted, dtype)


# ---------------------------------------------------------------------------- clipped SwiGLU of interleaved columns


@pytest.mark.parametrize("list_type", (0, 1))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_experts_with_biases_and_a_clipped_interleaved_swiglu(dtype: torch.dtype, list_type: int) -> None:
    rows = numbers(ROWS, HIDDEN, dtype=dtype) * 4
    w1, w2 = (
        numbers(EXPERTS, HIDDEN, 2 * INNER, seed=1, dtype=dtype),
        numbers(EXPERTS, INNER, HIDDEN, seed=2, dtype=dtype),
    )
    b1, b2 = numbers(EXPERTS, 2 * INNER, seed=3, dtype=dtype), numbers(EXPERTS, HIDDEN, seed=4, dtype=dtype)
    counts = torch.tensor(COUNTS)
    groups = counts if list_type else counts.cumsum(0)
    arguments: dict[str, Any] = {
        "group_list": groups, "group_list_type": list_type, "group_type": 0, "split_item": 2
    }  # fmt: skip
    (inner,) = npu_grouped_matmul([rows], [w1], bias=[b1], **arguments)
    inner = npu_clipped_swiglu(inner, group_index=counts, dim=-1, alpha=1.702, limit=7.0, bias=1.0, interleaved=True)
    (found,) = npu_grouped_matmul([inner], [w2], bias=[b2], **arguments)
    parts = []
    for expert, where in enumerate(expert_rows()):
        both = rows[where].double() @ w1[expert].double() + b1[expert].double()
        gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
        middle = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        parts.append(middle @ w2[expert].double() + b2[expert].double())
    wanted = torch.cat(parts)
    largest = float(wanted.abs().max())
    expect(found / largest, wanted / largest, dtype)


# ---------------------------------------------------------------------------- serving with 8-bit weights


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [E, K, N] and the scale of each column."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale.squeeze(1)


def serving_loop(
    x: Tensor, x_scale: Tensor, w1: Tensor, s1: Tensor, w2: Tensor, s2: Tensor, b2: Tensor | None = None
) -> Tensor:
    """The same layer with the activations not quantised on the way, in float64."""
    parts = []
    for expert, where in enumerate(expert_rows()):
        both = x[where].double() @ w1[expert].double() * s1[expert].double() * x_scale[where, None].double()
        left, right = both.chunk(2, -1)
        out = (F.silu(left) * right) @ w2[expert].double() * s2[expert].double()
        parts.append(out if b2 is None else out + b2[expert].double())
    return torch.cat(parts)


@pytest.mark.parametrize("path", ("int32", "scaled", "fused"))
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
def test_a_serving_layer_with_8_bit_weights(index: torch.dtype, path: str) -> None:
    x, x_scale = npu_dynamic_quant(numbers(ROWS, HIDDEN, dtype=torch.bfloat16))
    w1, s1 = quantised(numbers(EXPERTS, HIDDEN, 2 * INNER, seed=1))
    w2, s2 = quantised(numbers(EXPERTS, INNER, HIDDEN, seed=2))
    s2, b2 = s2.bfloat16(), numbers(EXPERTS, HIDDEN, seed=3)
    counts = torch.tensor(COUNTS, dtype=index)
    arguments: dict[str, Any] = {"group_list": counts, "group_list_type": 1, "group_type": 0, "split_item": 2}
    if path == "int32":
        (sums,) = npu_grouped_matmul([x], [w1], output_dtype=torch.int32, **arguments)
        for expert, where in enumerate(expert_rows()):
            assert torch.equal(sums[where].long(), x[where].long() @ w1[expert].long())
        inner, inner_scale = npu_dequant_swiglu_quant(
            sums, weight_scale=s1, activation_scale=x_scale, bias=None, quant_scale=None, quant_offset=None,
            group_index=counts, activate_left=True, quant_mode=1,
        )  # fmt: skip
    elif path == "scaled":
        (both,) = npu_grouped_matmul(
            [x], [w1], scale=[s1.bfloat16()], per_token_scale=[x_scale], output_dtype=torch.bfloat16, **arguments
        )
        inner, inner_scale = npu_dynamic_quant(npu_swiglu(both))
    else:
        inner, inner_scale = npu_grouped_matmul_swiglu_quant_v2(x, [w1], [s1], x_scale, counts.cumsum(0))
    (found,) = npu_grouped_matmul(
        [inner], [w2], scale=[s2], per_token_scale=[inner_scale], bias=[b2], output_dtype=torch.bfloat16, **arguments
    )
    assert found.dtype == torch.bfloat16
    wanted = serving_loop(x, x_scale, w1, s1, w2, s2, b2)
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < 0.02  # of 8-bit activations
    exact = torch.cat(
        [
            inner[where].double() @ w2[expert].double() * s2[expert].double() * inner_scale[where, None].double()
            + b2[expert]
            for expert, where in enumerate(expert_rows())
        ]
    )
    expect(found, exact, torch.bfloat16)


@pytest.mark.parametrize("four_bits", (False, True))
def test_a_serving_layer_with_quantised_weights_alone(four_bits: bool) -> None:
    x = numbers(ROWS, 8, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    most = 7 if four_bits else 127
    weight = torch.randint(-most, most + 1, (EXPERTS, 8, 16), generator=generator, dtype=torch.int32)
    scale = numbers(EXPERTS, 16, seed=2, dtype=torch.bfloat16) / most
    offset = torch.full((EXPERTS, 16), 2.0, dtype=torch.bfloat16)
    stored = weight.to(torch.int8)
    if four_bits:
        places = torch.arange(0, 32, 4)
        words = ((weight.long() & 15).view(EXPERTS, 8, 2, 8) << places).sum(-1)
        stored = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    (found,) = npu_grouped_matmul(
        [x], [stored], antiquant_scale=[scale], antiquant_offset=[offset], group_list=torch.tensor(COUNTS),
        group_list_type=1, group_type=0, split_item=2,
    )  # fmt: skip
    dense = ((weight.float() + 2) * scale.float()[:, None]).bfloat16()
    wanted = torch.cat([x[where].double() @ dense[expert].double() for expert, where in enumerate(expert_rows())])
    expect(found, wanted, torch.bfloat16)
