"""Placeholder until the MX formats land."""

from torch import Tensor


def quantize_rows(rows: Tensor, quant_mode: int) -> tuple[Tensor, Tensor]:
    """MX."""
    raise NotImplementedError


def quantize_blocks(rows: Tensor, quant_mode: int) -> tuple[Tensor, Tensor]:
    """MX."""
    raise NotImplementedError
