"""Static quantisation in float16, as two aclnn operators have it, in plain torch: the same bits on every device."""

import torch
from torch import Tensor

_HALF_MAX = 65504.0


def quantize_half(rows: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """`quantize` in float16, as MoeInitRoutingQuant has it: rows (cut at 65,504), scale, offset, product and sum.

    >>> import torch
    >>> quantize_half(torch.tensor([[4.952, 10.0, -300.0]]), torch.tensor(10.3), torch.tensor(1.5))
    tensor([[  52,  104, -128]], dtype=torch.int8)
    """
    half = rows.float().clamp(-_HALF_MAX, _HALF_MAX).half()
    values = (half * scale.half() + offset.half()).float()
    return torch.where(values.isnan(), 0.0, values).round().clamp(-128, 127).to(torch.int8)
