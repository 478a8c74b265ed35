"""The router's product, in float32 whatever autocast and the precision of torch's own products say.

`torch.set_float32_matmul_precision("high")` and its siblings cut the factors of a float32 product down to TF32 or
bfloat16, and tokens close to a tie then go to other experts. The setting belongs to the whole process, all threads
included, so it is left alone: where it would cut, the product is computed in float64 and rounded once.

torch's products give a row other bits in a batch of another size (float32: fewer than 16 rows, bfloat16: 4 to 33), and
at another place in it where a side is odd (float32: 5, 6, 7 or 9 columns, or an inner size that 4 does not divide). So
tokens are multiplied in blocks of 64, the last one padded with zeros, and odd sides are padded to a multiple of 8: a
token's logits and its gradient are the same bits in any batch, with the same number of threads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeroute.dtypes import wide
from moeroute.ops.register import register

BLOCK = 64
SIDE = 8


def cut(device: str) -> bool:
    """Whether torch cuts the factors of float32 products on a device."""
    # torch.get_float32_matmul_precision() raises where the newer setting was used.
    library = "cuda" if device == "cuda" else "mkldnn"
    return torch._C._get_fp32_precision_getter(library, "matmul") in ("tf32", "bf16")


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left [T, I] @ right [I, O], `BLOCK` rows at a time, the last ones padded with zeros.

    One batched call, not one product per block: each product of 64 rows would wake torch's threads by itself, which
    takes 80 us where they sleep (24 blocks of a [1536, 128] router: 1.9 ms, batched 0.09, unblocked 0.12).
    """
    inner, width = right.shape
    if inner % SIDE or width % SIDE:
        left, right = F.pad(left, (0, -inner % SIDE)), F.pad(right, (0, -width % SIDE, 0, -inner % SIDE))
        return _product(left, right)[:, :width].contiguous()
    num_rows, full = left.shape[0], left.shape[0] // BLOCK
    out = left.new_empty(num_rows, right.shape[1])
    if full:
        blocks, results = (rows[: full * BLOCK].unflatten(0, (full, BLOCK)) for rows in (left, out))
        torch.bmm(blocks, right.expand(full, *right.shape), out=results)
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
