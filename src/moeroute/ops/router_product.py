"""The router's product, in float32 whatever autocast and the precision of torch's own products say.

`torch.set_float32_matmul_precision("high")` and its siblings cut the factors of a float32 product down to TF32 or
bfloat16, and tokens close to a tie then go to other experts. The setting belongs to the whole process, all threads
included, so it is left alone: where it would cut, the product is computed in float64 and rounded once.

torch's products give a row other bits in a batch of another size (float32: fewer than 16 rows, bfloat16: 4 to 33). So
tokens are multiplied in blocks of 64, the last one padded with zeros: a token's logits and its gradient are the same
bits in any batch, with the same number of threads.
"""

from typing import Any

import torch
from torch import Tensor

from moeroute.dtypes import wide
from moeroute.ops.register import register

BLOCK = 64


def cut(device: str) -> bool:
    """Whether torch cuts the factors of float32 products on a device."""
    if hasattr(torch._C, "_get_fp32_precision_getter"):  # from torch 2.9 on, where the other question may be an error
        library = "cuda" if device == "cuda" else "mkldnn"
        return torch._C._get_fp32_precision_getter(library, "matmul") in ("tf32", "bf16")
    return torch.get_float32_matmul_precision() != "highest"


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left [T, I] @ right [I, O], `BLOCK` rows at a time, the last ones padded with zeros."""
    num_rows, full = left.shape[0], left.shape[0] // BLOCK
    out = left.new_empty(num_rows, right.shape[1])
    blocks = left[: full * BLOCK].unflatten(0, (full, BLOCK))
    if left.device.type == "cpu":
        for block, result in zip(blocks, out[: full * BLOCK].unflatten(0, (full, BLOCK)), strict=True):
            torch.mm(block, right, out=result)
    elif full:  # one launch
        out[: full * BLOCK] = torch.bmm(blocks, right.expand(full, *right.shape)).flatten(0, 1)
    if rest := num_rows - full * BLOCK:
        padded = left.new_zeros(BLOCK, left.shape[1])
        padded[:rest] = left[-rest:]
        out[-rest:] = torch.mm(padded, right)[:rest]
    return out


def _router_product(tokens: Tensor, weight: Tensor) -> Tensor:
    dtype = wide(tokens)
    short = tokens.dtype is torch.bfloat16 and weight.dtype is torch.bfloat16  # there is nothing to cut
    with torch._C._DisableAutocast():
        if dtype is torch.float32 and not short and cut(tokens.device.type):
            return _product(tokens.double(), weight.double().t()).float()
        return _product(tokens.to(dtype), weight.to(dtype).t())


def _block_product(left: Tensor, right: Tensor) -> Tensor:
    with torch._C._DisableAutocast():
        return _product(left, right)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _block_derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    left, right = ctx.saved_tensors
    with torch._C._DisableAutocast():
        grad_left = block_product(grad, right.t()) if ctx.needs_input_grad[0] else None
        grad_right = left.t() @ grad if ctx.needs_input_grad[1] else None
    return grad_left, grad_right


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients choose no experts: torch's products in torch's precision."""
    tokens, weight = ctx.saved_tensors
    grad_tokens = grad_weight = None
    with torch._C._DisableAutocast():
        if ctx.needs_input_grad[0]:
            grad_tokens = block_product(grad, weight.to(grad.dtype)).to(tokens.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.t() @ tokens.to(grad.dtype)).to(weight.dtype)
    return grad_tokens, grad_weight


block_product = register(
    "block_product(Tensor left, Tensor right) -> Tensor",
    _block_product,
    lambda left, right: left.new_empty(left.shape[0], right.shape[1]),
    derivative=_block_derivative,
    setup=_save,
    linear_in=(0, 1),
)
router_product = register(
    "router_product(Tensor tokens, Tensor weight) -> Tensor",
    _router_product,
    lambda tokens, weight: tokens.new_empty(tokens.shape[0], weight.shape[0], dtype=wide(tokens)),
    derivative=_derivative,
    setup=_save,
    linear_in=(0, 1),
)
