"""Rows as int8 and a scale, in plain torch: the same bits on every device.

Letters: R rows, H hidden size.
"""

import torch
from torch import Tensor

_HALF_MAX = 65504.0


def _saturated(values: Tensor) -> Tensor:
    """The nearest integer, ties to even, from -128 to 127; NaN is 0."""
    return torch.where(values.isnan(), 0.0, values).round().clamp(-128, 127).to(torch.int8)


def dynamic_quantize(rows: Tensor, *, smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 [R, H] and one float32 scale [R] a row: the largest magnitude of a row becomes 127.

    rows: [R, H] floats. smooth: [H] or [R, H] float32, a factor for each element first. In float32: y = row * smooth,
    scale = max |y| / 127, then y / scale to the nearest integer, ties to even. A row of zeros has scale 0 and stays 0.

    >>> import torch
    >>> dynamic_quantize(torch.tensor([[0.5, 1.5, 2.5, -127.0], [0.0, 0.0, 0.0, 0.0]]))
    (tensor([[   0,    2,    2, -127],
            [   0,    0,    0,    0]], dtype=torch.int8), tensor([1., 0.]))
    """
    values = rows.float()
    if smooth is not None:
        values = values * smooth
    if values.shape[1] == 0:
        return values.to(torch.int8), values.new_zeros(len(values))
    scales = values.abs().amax(1) / 127.0
    return _saturated(values / scales[:, None]), scales


def quantize(rows: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """int8: row * scale + offset in float32, two roundings, then the nearest integer, ties to even, saturated.

    >>> import torch
    >>> quantize(torch.tensor([[0.5, 1.5, 100.0, -100.0]]), torch.tensor(2.0), torch.tensor(0.5))
    tensor([[   2,    4,  127, -128]], dtype=torch.int8)
    """
    return _saturated(rows.float() * scale + offset)


def quantize_half(rows: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """`quantize` in float16, as MoeInitRoutingQuant has it: rows (cut at 65,504), scale, offset, product and sum.

    >>> import torch
    >>> quantize_half(torch.tensor([[4.952, 10.0, -300.0]]), torch.tensor(10.3), torch.tensor(1.5))
    tensor([[  52,  104, -128]], dtype=torch.int8)
    """
    half = rows.float().clamp(-_HALF_MAX, _HALF_MAX).half()
    return _saturated((half * scale.half() + offset.half()).float())
