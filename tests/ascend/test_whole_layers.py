"""Layers from tokens to tokens as frameworks for Ascend build them, each against a loop over experts in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moeroute.interop import torch_npu

N, H, WIDTH, E, K = 24, 16, 12, 6, 2


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [N, H], router weight [H, E], gate and up [E, H, 2 * WIDTH], down [E, WIDTH, H]; float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (N, H), (H, E), (E, H, 2 * WIDTH), (E, WIDTH, H)
    x, router, gate_up, down = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x, router, gate_up / H**0.5, down / WIDTH**0.5


def expert(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up).chunk(2, -1)
    return (F.silu(gate) * up) @ down


def loop(x: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every token through every expert, times probs [N, E]."""
    return sum((probs[:, e, None] * expert(x, gate_up[e], down[e]) for e in range(E)), torch.zeros_like(x))


# ---------------------------------------------------------------------------- a mask, with gradients by function


class Permute(torch.autograd.Function):
    """The host's own function around torch_npu's permute by mask."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, routing_map: Tensor, rows: int, drop: bool) -> Any:
        permuted, row_probs, index = torch_npu.npu_moe_token_permute_with_routing_map(
            tokens, routing_map, probs=probs, num_out_tokens=rows, drop_and_pad=drop
        )
        ctx.save_for_backward(index, routing_map)
        ctx.drop = drop
        ctx.mark_non_differentiable(index)
        return permuted, row_probs, index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, probs_grad: Tensor, _: Any) -> Any:
        index, routing_map = ctx.saved_tensors
        tokens_grad, dense = torch_npu.npu_moe_token_permute_with_routing_map_grad(
            grad, probs_grad[:, None], index, routing_map, E, N, ctx.drop
        )
        return tokens_grad, dense, None, None, None


class Unpermute(torch.autograd.Function):
    """The host's own function around torch_npu's unpermute by mask, without and with the probs inside."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor | None, index: Tensor, routing_map: Tensor, drop: bool) -> Any:
        out, out_index, ids, _ = torch_npu._npu_moe_token_unpermute_with_routing_map(
            rows, index, [N, H], probs=probs, routing_map=routing_map, drop_and_pad=drop
        )
        ctx.save_for_backward(out_index, ids, routing_map, rows, probs)
        ctx.drop = drop
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out_index, ids, routing_map, rows, probs = ctx.saved_tensors
        rows_grad, dense = torch_npu.npu_moe_token_unpermute_with_routing_map_grad(
            grad, out_index, ids, routing_map, rows, probs, ctx.drop, [N, H]
        )
        return rows_grad, dense, None, None, None


@pytest.mark.parametrize("inside", [False, True], ids=["probs on the rows", "probs in unpermute"])
@pytest.mark.parametrize("capacity", [None, 5, 9])
@pytest.mark.parametrize("map_dtype", [torch.bool, torch.int8])
def test_a_mask_layer(map_dtype: torch.dtype, capacity: int | None, inside: bool) -> None:
    x, router, gate_up, down = drawn(1)
    ids = (x @ router).topk(K).indices
    routing_map = torch.zeros(N, E, dtype=torch.bool).scatter_(1, ids, True)
    if capacity is not None:  # the first `capacity` tokens of each expert; the others are dropped
        routing_map &= routing_map.cumsum(0) <= capacity
    whole = torch.zeros(N, E, dtype=torch.float64).masked_scatter(
        routing_map, torch.rand(int(routing_map.sum())).double()
    )

    def run(tokens: Tensor, probs: Tensor, single: bool) -> Tensor:
        masked = probs * routing_map
        if not single:
            return loop(tokens, masked, gate_up, down)
        rows = N * K if capacity is None else E * capacity
        permuted, row_probs, index = Permute.apply(
            tokens, masked, routing_map.to(map_dtype), rows, capacity is not None
        )
        length = rows // E if capacity is not None else 0
        sizes = routing_map.sum(0).tolist() if capacity is None else [length] * E
        parts = [
            expert(part, g, d) for part, g, d in zip(permuted.split(sizes), gate_up.float(), down.float(), strict=True)
        ]
        out = torch.cat(parts)
        if not inside:
            out = out * row_probs[:, None]
        return Unpermute.apply(out, masked if inside else None, index, routing_map.to(map_dtype), capacity is not None)

    found: list[Tensor] = []
    wanted: list[Tensor] = []
    for results, dtype in ((found, torch.float32), (wanted, torch.float64)):
        tokens, probs = x.to(dtype).requires_grad_(), whole.to(dtype).requires_grad_()
        out = run(tokens, probs, dtype is torch.float32)
        results += [out, *torch.autograd.grad(out.square().sum(), [tokens, probs])]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------- a serving layer on a range of experts


@pytest.mark.parametrize("by_pairs", [False, True], ids=["sizes", "cumulative"])
@pytest.mark.parametrize("quant_mode", [-1, 1])
@pytest.mark.parametrize("ranges", [[[0, E]], [[0, 2], [2, E]], [[0, 1], [1, 2], [2, E]]], ids=["one", "two", "three"])
def test_a_serving_layer(ranges: list[list[int]], quant_mode: int, by_pairs: bool) -> None:
    """Gating, init routing of the rank's experts, products, and |row numbers| with masked weights on the way back.

    The ranks' outputs are added up, as an all-reduce would.
    """
    x, router, gate_up, down = drawn(2)
    tokens = x.float()
    weights, ids, _ = torch_npu.npu_moe_gating_top_k(
        (x @ router).float(), k=K, k_group=1, group_count=1, group_select_mode=1, renorm=0, norm_type=1, out_flag=False
    )
    total = torch.zeros(N, H)
    for first, last in ranges:
        rows, numbers, counts, scale = torch_npu.npu_moe_init_routing_v2(
            tokens,
            ids,
            active_num=N * K,
            expert_num=E,
            expert_tokens_num_type=0 if by_pairs else 1,
            expert_tokens_num_flag=True,
            active_expert_range=[first, last],
            quant_mode=quant_mode,
        )
        options: dict[str, Any] = {
            "group_list": counts, "split_item": 2, "group_type": 0, "group_list_type": 0 if by_pairs else 1
        }  # fmt: skip
        weight = gate_up[first:last].float()
        if quant_mode == 1:
            eights, factors = quantised(weight)
            (hidden,) = torch_npu.npu_grouped_matmul(
                [rows], [eights], scale=[factors], per_token_scale=[scale], output_dtype=torch.float32, **options
            )
        else:
            (hidden,) = torch_npu.npu_grouped_matmul([rows], [weight], **options)
        (out,) = torch_npu.npu_grouped_matmul([torch_npu.npu_swiglu(hidden)], [down[first:last].float()], **options)
        here = (ids >= first) & (ids < last)
        total += torch_npu.npu_moe_token_unpermute(out, numbers.abs(), probs=weights * here, restore_shape=[N, H])
    probs = torch.zeros(N, E, dtype=torch.float64).scatter_(1, ids.long(), weights.double())
    wanted = loop(x, probs, gate_up, down)
    bound = 5e-2 if quant_mode == 1 else 1e-4  # int8 rows and weights have steps of 1 / 127
    torch.testing.assert_close(total.double(), wanted, rtol=bound, atol=bound)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [E, K, N], and the scale of each column."""
    factors = weight.abs().amax(1) / 127
    return (weight / factors[:, None]).round().to(torch.int8), factors
