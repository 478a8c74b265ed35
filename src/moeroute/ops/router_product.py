"""The router's product, in float32 whatever autocast and the precision of torch's own products say.

`torch.set_float32_matmul_precision("high")` and its siblings cut the factors of a float32 product down to TF32 or
bfloat16, and tokens close to a tie then go to other experts. The setting belongs to the whole process, all threads
included, so it is left alone: where it would cut, the product is computed in float64 and rounded once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeroute.dtypes import wide
from moeroute.ops.register import register


def cut(device: str) -> bool:
    """Whether torch cuts the factors of float32 products on a device."""
    if hasattr(torch._C, "_get_fp32_precision_getter"):  # from torch 2.9 on, where the other question may be an error
        library = "cuda" if device == "cuda" else "mkldnn"
        return torch._C._get_fp32_precision_getter(library, "matmul") in ("tf32", "bf16")
    return torch.get_float32_matmul_precision() != "highest"


def _router_product(tokens: Tensor, weight: Tensor) -> Tensor:
    dtype = wide(tokens)
    short = tokens.dtype is torch.bfloat16 and weight.dtype is torch.bfloat16  # there is nothing to cut
    with torch._C._DisableAutocast():
        if dtype is torch.float32 and not short and cut(tokens.device.type):
            return F.linear(tokens.double(), weight.double()).float()
        return F.linear(tokens.to(dtype), weight.to(dtype))


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients choose no experts: torch's products in torch's precision."""
    tokens, weight = ctx.saved_tensors
    grad_tokens = grad_weight = None
    with torch._C._DisableAutocast():
        if ctx.needs_input_grad[0]:
            grad_tokens = (grad @ weight.to(grad.dtype)).to(tokens.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.t() @ tokens.to(grad.dtype)).to(weight.dtype)
    return grad_tokens, grad_weight


router_product = register(
    "router_product(Tensor tokens, Tensor weight) -> Tensor",
    _router_product,
    lambda tokens, weight: tokens.new_empty(tokens.shape[0], weight.shape[0], dtype=wide(tokens)),
    derivative=_derivative,
    setup=_setup,
    linear_in=(0, 1),
)
