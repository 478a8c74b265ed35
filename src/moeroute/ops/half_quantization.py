"""Static quantisation in float16, as two aclnn operators have it, in plain torch: the same bits on every device."""

import math

import torch
from torch import Tensor

_HALF_MAX = 65504.0
_CHUNK = 1 << 17  # elements


def quantize_half(rows: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """`quantize` in float16, as MoeInitRoutingQuant has it: rows (cut at 65,504), scale, offset, product and sum.

    >>> import torch
    >>> quantize_half(torch.tensor([[4.952, 10.0, -300.0]]), torch.tensor(10.3), torch.tensor(1.5))
    tensor([[  52,  104, -128]], dtype=torch.int8)
    """
    found = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scale, offset = scale.half(), offset.half()
    # On a CPU so many rows at a time as caches hold: a pass over new memory costs more than its arithmetic.
    step = max(_CHUNK // max(rows.shape[-1], 1), 1) if rows.device.type == "cpu" else max(len(rows), 1)
    for start in range(0, len(rows), step):
        part = rows[start : start + step].to(torch.float32, copy=True)
        values = part.clamp_(-_HALF_MAX, _HALF_MAX).half().mul_(scale).add_(offset).float()
        found[start : start + step] = values.nan_to_num_(0.0, math.inf, -math.inf).round_().clamp_(-128, 127)
    return found
