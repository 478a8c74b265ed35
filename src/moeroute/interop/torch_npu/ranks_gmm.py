"""Rows exchanged between ranks and multiplied by their experts, in one call each way.

Counts are lists by rank and, inside a rank, by local expert: `send_counts[r * El + e]` rows go to, or come from, expert
e of rank r, El = len(send_counts) / ep_world_size; arrays of NumPy are lists too. No result has a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import FLOATS
from moeroute.interop.torch_npu.arguments import npu_function, refused
from moeroute.interop.torch_npu.process_groups import Ranks, dtype_number, ranks_of
from moeroute.interop.torch_npu.ranks_layout import check_absent, check_rows
from moeroute.ops.experts import grouped_linear
from moeroute.ops.indices.op import plan_from_segments
from moeroute.permutation import permute

Counts = tuple[list[int], list[int]]


@dataclass(frozen=True)
class _Products:
    """The operands of both products; a flag says that the last two axes of a weight are swapped."""

    gmm_x: Tensor
    gmm_weight: Tensor
    swapped: bool
    mm_x: Tensor | None
    mm_weight: Tensor | None
    mm_swapped: bool

    def check(self, function: str, world_size: int, send_counts: list[int]) -> None:
        """Shapes and dtypes; the rows are as many as are sent, or come from this rank's experts."""
        x, weight, experts = self.gmm_x, self.gmm_weight, len(send_counts) // world_size
        check_rows(function, "gmm_x", x)
        if x.dtype not in FLOATS:
            raise refused(function, "gmm_x", "float16, bfloat16 or float32", x.dtype)
        if sum(send_counts) != len(x):
            raise refused(function, "send_counts", f"such that they add up to the {len(x)} rows of gmm_x", send_counts)
        check.tensor(function, "gmm_weight", weight)
        if weight.ndim != 3 or weight.shape[0] != experts or weight.shape[2 if self.swapped else 1] != x.shape[1]:
            wanted = f"[{experts}, O, {x.shape[1]}]" if self.swapped else f"[{experts}, {x.shape[1]}, O]"
            raise refused(function, "gmm_weight", f"of shape {wanted}", list(weight.shape))
        if weight.dtype is not x.dtype:
            raise refused(function, "gmm_weight", f"{x.dtype}, as gmm_x", weight.dtype)
        if self.mm_x is None or self.mm_weight is None:
            if self.mm_x is not self.mm_weight:
                raise refused(function, "mm_weight", "given with mm_x, and only then", "one of them")
            return
        check_rows(function, "mm_x", self.mm_x)
        check_rows(function, "mm_weight", self.mm_weight)
        axis, width, dtype = int(self.mm_swapped), self.mm_x.shape[1], self.mm_x.dtype
        if self.mm_weight.shape[axis] != width or self.mm_weight.dtype is not dtype:
            got = f"{self.mm_weight.dtype} {list(self.mm_weight.shape)}"
            raise refused(function, "mm_weight", f"{dtype} with {width} in axis {axis}, as mm_x", got)

    @property
    def width(self) -> int:
        """O."""
        return self.gmm_weight.shape[1 if self.swapped else 2]

    def grouped(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """The product of each expert's rows, in their dtype whatever autocast says."""
        matrices = self.gmm_weight if self.swapped else self.gmm_weight.transpose(1, 2)
        with torch.autocast(rows.device.type, enabled=False):
            return grouped_linear(rows, matrices, sizes)

    def dense(self) -> Tensor | None:
        """The product beside the exchange."""
        if self.mm_x is None or self.mm_weight is None:
            return None
        with torch.autocast(self.mm_x.device.type, enabled=False):
            return self.mm_x @ (self.mm_weight.t() if self.mm_swapped else self.mm_weight)


@npu_function
@torch.no_grad()
def npu_alltoallv_gmm(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    *,
    send_counts_tensor: Tensor | None = None,
    recv_counts_tensor: Tensor | None = None,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    permute_out_flag: bool = False,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Send gmm_x [M, H] to the ranks of its experts, put what comes in the order of this rank's, and multiply.

    gmm_weight is [El, H, O], mm_weight [H, O]; with their flag the last two axes are the other way round.

    Returns:
        (the products [R, O], expert by expert and inside one rank by rank; mm_x @ mm_weight or None; the rows [R, H]
        that were multiplied, or None without permute_out_flag).
    """
    function = "npu_alltoallv_gmm"
    send_counts, recv_counts = _listed(send_counts), _listed(recv_counts)
    ranks = ranks_of(function, "gmm_x", gmm_x, "hcom", hcom, ep_world_size)

    products = _Products(gmm_x, gmm_weight, trans_gmm_weight, mm_x, mm_weight, trans_mm_weight)

    def width() -> int:
        check_absent(function, send_counts_tensor=send_counts_tensor, recv_counts_tensor=recv_counts_tensor)
        products.check(function, ep_world_size, send_counts)
        return gmm_x.shape[1]

    by_rank, received = _agree(ranks, width, gmm_x, ep_world_size, (send_counts, recv_counts))
    rows = ranks.exchange(gmm_x, by_rank.sum(1).tolist(), received.sum(1).tolist())
    rows = permute(rows, plan_from_segments(received.to(rows.device), len(rows)))
    return (
        products.grouped(rows, received.sum(0)),
        products.dense(),
        rows if permute_out_flag else None,
    )


@npu_function
@torch.no_grad()
def npu_gmm_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    *,
    send_counts_tensor: Tensor | None = None,
    recv_counts_tensor: Tensor | None = None,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Multiply gmm_x [M, H], which lies expert by expert and inside one rank by rank, and send the products back.

    It undoes the exchange of `npu_alltoallv_gmm` whose counts are given the other way round; weights as there.

    Returns:
        (the products [R, O], by rank and inside one by its experts; mm_x @ mm_weight or None).
    """
    function = "npu_gmm_alltoallv"
    send_counts, recv_counts = _listed(send_counts), _listed(recv_counts)
    ranks = ranks_of(function, "gmm_x", gmm_x, "hcom", hcom, ep_world_size)

    products = _Products(gmm_x, gmm_weight, trans_gmm_weight, mm_x, mm_weight, trans_mm_weight)

    def width() -> int:
        check_absent(function, send_counts_tensor=send_counts_tensor, recv_counts_tensor=recv_counts_tensor)
        products.check(function, ep_world_size, send_counts)
        return products.width

    sent, received = _agree(ranks, width, gmm_x, ep_world_size, (send_counts, recv_counts))
    rows = products.grouped(gmm_x, sent.sum(0))
    rows = permute(rows, plan_from_segments(sent.T.to(rows.device), len(rows)))
    rows = ranks.exchange(rows, sent.sum(1).tolist(), received.sum(1).tolist())
    return rows, products.dense()


def _listed(counts: Any) -> Any:
    """Integers of NumPy as Python's."""
    if isinstance(counts, list | tuple | np.ndarray):
        return [int(count) if isinstance(count, np.integer) else count for count in counts]
    return counts


def _agree(
    ranks: Ranks, width: Callable[[], int], gmm_x: Tensor, world_size: int, counts: Counts
) -> tuple[Tensor, Tensor]:
    """The counts as int64 [ranks, El] each, on the CPU, after every rank has found them to fit.

    `width` checks the other arguments and returns the width of the rows that are exchanged.
    """
    function = ranks.function

    def numbers() -> dict[str, int]:
        ranks.expect(world_size)
        for name, values in zip(("send_counts", "recv_counts"), counts, strict=True):
            if not isinstance(values, list | tuple) or not values or len(values) % world_size:
                raise refused(function, name, f"a list of a multiple of {world_size} ints", values)
            if any(not isinstance(value, int) or value < 0 for value in values):
                raise refused(function, name, "ints of at least 0", values)
        if len(counts[0]) != len(counts[1]):
            raise refused(function, "recv_counts", f"as long as send_counts, {len(counts[0])}", len(counts[1]))
        return {
            "the width of the rows": width(),
            "dtype of gmm_x": dtype_number(gmm_x.dtype),
            "the number of counts": len(counts[0]),
        }

    ranks.agree(numbers)
    world = ranks.size
    sent, received = torch.tensor(counts, dtype=torch.int64).view(2, world, -1)
    everyone = ranks.gather(torch.stack([sent, received]).flatten()).view(world, 2, world, -1)
    wrong = (everyone[:, 0] != everyone[:, 1].transpose(0, 1)).nonzero()
    if len(wrong):
        source, target, expert = wrong[0].tolist()
        raise refused(
            function,
            f"recv_counts of rank {target}",
            f"{everyone[source, 0, target, expert]} from rank {source} for expert {expert}, as its send_counts",
            everyone[target, 1, source, expert].item(),
        )
    return sent, received
