"""Group lists: which rows belong to which expert, in the three forms that torch_npu has."""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeroute import check
from moeroute.interop.torch_npu.arguments import refused

ENDS, SIZES, PAIRS = 0, 1, 2


class Segment(NamedTuple):
    """The rows [start, stop) of a group."""

    group: int
    start: int
    stop: int


def segments(
    function: str,
    argument: str,
    group_list: Tensor | list[int],
    list_type: int,
    num_rows: int,
    num_groups: int | None = None,
) -> list[Segment]:
    """The groups' rows, in the order of the list.

    Args:
        function: for errors.
        argument: for errors.
        group_list: int32 or int64, or a list of ints: [G] ascending ends (`ENDS`), [G] sizes (`SIZES`), or [L, 2] of
            (group, size), in which no group has rows twice (`PAIRS`).
        list_type: `ENDS`, `SIZES` or `PAIRS`.
        num_rows: rows that there are; no segment ends later.
        num_groups: G, or None for the length of the list.
    """
    values = _values(function, argument, group_list, 2 if list_type == PAIRS else 1)
    if list_type == PAIRS:
        groups, sizes = [group for group, _ in values], [size for _, size in values]
        used = [group for group, size in values if size]
        limit = len(values) if num_groups is None else num_groups
        if len(set(used)) < len(used) or any(not 0 <= group < limit for group in groups):
            raise refused(function, argument, f"pairs (group, size) of different groups below {limit}", values)
    else:
        sizes = values if list_type == SIZES else [b - a for a, b in itertools.pairwise([0, *values])]
        groups = list(range(len(values)))
        if num_groups is not None and len(values) != num_groups:
            raise refused(function, argument, f"of {num_groups} groups, as the weight", f"{len(values)}")
    if any(size < 0 for size in sizes) or sum(sizes) > num_rows:
        form = "ascending ends" if list_type == ENDS else "sizes of at least 0"
        raise refused(function, argument, f"{form}, of no more than the {num_rows} rows in all", values)
    stops = itertools.accumulate(sizes)
    return [Segment(group, stop - size, stop) for group, size, stop in zip(groups, sizes, stops, strict=True)]


def consecutive(sizes: list[int]) -> list[Segment]:
    """The segments of tensors that lie one behind the other."""
    stops = itertools.accumulate(sizes)
    return [Segment(group, stop - size, stop) for group, (size, stop) in enumerate(zip(sizes, stops, strict=True))]


def by_group(segments: list[Segment], num_groups: int) -> list[Segment]:
    """One segment for each group, in the order of the groups; [0, 0) for those without rows."""
    found = [Segment(group, 0, 0) for group in range(num_groups)]
    for segment in segments:
        if segment.stop > segment.start:
            found[segment.group] = segment
    return found


def group_of_row(segments: list[Segment], num_rows: int, device: torch.device) -> Tensor:
    """int32 [R]: the group of each row, -1 for the rows of none."""
    found = torch.full((num_rows,), -1, dtype=torch.int32)
    for group, start, stop in segments:
        found[start:stop] = group
    return found.to(device)


def _values(function: str, argument: str, group_list: Tensor | list[int], ndim: int) -> list[Any]:
    if isinstance(group_list, list | tuple):
        for value in group_list:
            check.integer(function, argument, value)
        return list(group_list)
    check.tensor(function, argument, group_list)
    if group_list.dtype not in (torch.int32, torch.int64):
        raise check.wrong_dtype(function, argument, "torch.int32 or torch.int64", group_list)
    if group_list.ndim != ndim or (ndim == 2 and group_list.shape[1] != 2):
        raise check.wrong_shape(function, argument, "[G]" if ndim == 1 else "[G, 2], pairs (group, size)", group_list)
    return group_list.tolist()
