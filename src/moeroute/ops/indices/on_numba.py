"""Plans from index tensors that exist already, in Numba: kernels, then launchers."""

import numpy as np
import torch
from numba import int64
from torch import Tensor

from moeroute import memory
from moeroute.dtypes import LARGEST
from moeroute.ops import layout
from moeroute.ops.numba_kit.launch import element_ptr, kernel
from moeroute.ops.numba_kit.pointers import int32_ptr, int64_ptr, is_null
from moeroute.ops.planning.on_numba import CPU, INDEX_DTYPES, NONE, SLOT_WORK, count_up, row_of_slot_target
from moeroute.plan import PlanTensors

# ---------------------------------------------------------------------------- kernels: rows of slots and of tokens


@kernel(keys=INDEX_DTYPES)
def narrow(
    out: int32_ptr,
    index: element_ptr,
    first: int64,
    count: int64,
    lo: int64,
    hi: int64,
):
    """index - first in int32; -1 where it is not in [0, count)."""
    for i in range(lo, hi):
        value = int64(index[i])
        out[i] = np.int32(value - first) if first <= value < first + count else NONE


@kernel()
def invert(
    slot_of_row: int32_ptr,
    row_of_slot: int32_ptr,
    num_slots: int64,
    lo: int64,
    hi: int64,
):
    """slot_of_row of the rows [lo, hi): every thread reads all slots, so that the last one wins."""
    for r in range(lo, hi):
        slot_of_row[r] = NONE
    for s in range(num_slots):
        r = int64(row_of_slot[s])
        if lo <= r < hi:
            slot_of_row[r] = np.int32(s)


@kernel(keys=INDEX_DTYPES)
def entry_rows(
    row_of_slot: int32_ptr,
    entry_of_slot: int32_ptr,
    rows: element_ptr,
    expert_of_slot: int32_ptr,
    num_rows: int64,
    rows_per_expert: int64,
    lo: int64,
    hi: int64,
):
    """The row of each slot's entry, and its expert; without `rows` entry i has row i."""
    for s in range(lo, hi):
        entry = int64(entry_of_slot[s])
        row = int64(-1)
        if entry >= 0:
            row = entry if is_null(rows) else int64(rows[entry])
            if not 0 <= row < num_rows:
                row = int64(-1)
        row_of_slot[s] = np.int32(row)
        if not is_null(expert_of_slot):
            expert_of_slot[s] = np.int32(row // rows_per_expert) if row >= 0 else NONE


@kernel()
def live_rows(
    tokens: int64_ptr,
    slot_of_row: int32_ptr,
    rows_per_expert: int64,
    lo: int64,
    hi: int64,
):
    """Count the used rows of each expert; every expert has `rows_per_expert` of them."""
    for e in range(lo, hi):
        count = int64(0)
        for r in range(e * rows_per_expert, (e + 1) * rows_per_expert):
            count += int64(slot_of_row[r] >= 0)
        tokens[e] = count


# ---------------------------------------------------------------------------- kernels: chunks


@kernel(keys=INDEX_DTYPES, parallel=False)
def chunk_starts(
    starts: int64_ptr,
    tokens: int64_ptr,
    lengths: element_ptr,
    order: int32_ptr,
    place: int32_ptr,
    ranks: int64,
    num_tokens: int64,
    lo: int64,
    hi: int64,
):
    """starts int64 [3, ranks, E]: first token, first row and length of each chunk, cut at the last token.

    order: the chunk at each place, -1 none; place: the place of each chunk. Null: expert by expert.
    """
    chunks = ranks * hi
    token = int64(0)
    for c in range(chunks):
        length = min(max(int64(lengths[c]), int64(0)), num_tokens)
        starts[c] = token
        starts[chunks + c] = num_tokens
        starts[2 * chunks + c] = length
        token = min(token + length, num_tokens)
    row = int64(0)
    for e in range(hi):
        first = row
        for rank in range(ranks):
            c = rank * hi + e
            if not is_null(order):
                at = e * ranks + rank
                c = int64(order[at])
                if c < 0 or place[c] != at:
                    continue
            starts[chunks + c] = row
            row = min(row + starts[2 * chunks + c], num_tokens)
        tokens[e] = row - first


@kernel()
def deal_chunks(
    row_of_slot: int32_ptr,
    slot_of_row: int32_ptr,
    starts: int64_ptr,
    chunks: int64,
    num_tokens: int64,
    lo: int64,
    hi: int64,
):
    """Rows of the tokens [lo, hi), and slots of the rows [lo, hi)."""
    for i in range(lo, hi):
        row_of_slot[i] = NONE
        slot_of_row[i] = NONE
    for c in range(chunks):
        token, row, length = starts[c], starts[chunks + c], starts[2 * chunks + c]
        length = min(length, num_tokens - token, num_tokens - row)
        for i in range(max(lo - token, int64(0)), min(hi - token, length)):
            row_of_slot[token + i] = np.int32(row + i)
        for i in range(max(lo - row, int64(0)), min(hi - row, length)):
            slot_of_row[row + i] = np.int32(token + i)


# ---------------------------------------------------------------------------- kernels: row id maps
#
# A row id map is [T, 2E + 1]: the rows of a token's n experts, from column E on their ids, n last.


@kernel(keys=INDEX_DTYPES, parallel=False)
def map_offsets(
    slot_offsets: int32_ptr, row_id_map: element_ptr, num_experts: int64, num_rows: int64, lo: int64, hi: int64
):
    """First slot of each token: the counts in the last column of the map, limited to what the map can hold."""
    slot = int64(0)
    for t in range(lo, hi):
        slot_offsets[t] = np.int32(slot)
        count = min(max(int64(row_id_map[(t + 1) * (2 * num_experts + 1) - 1]), int64(0)), num_experts)
        slot = min(slot + count, num_rows)
    slot_offsets[hi] = np.int32(slot)


@kernel(keys=INDEX_DTYPES)
def read_map(
    row_of_slot: int32_ptr,
    expert_of_slot: int32_ptr,
    slot_offsets: int32_ptr,
    row_id_map: element_ptr,
    pad_offsets: int64_ptr,
    num_experts: int64,
    num_rows: int64,
    lo: int64,
    hi: int64,
):
    """Rows and experts of each token's slots; a pair that is out of range becomes -1, -1."""
    for t in range(lo, hi):
        first = int64(slot_offsets[t])
        line = t * (2 * num_experts + 1)
        for s in range(first, int64(slot_offsets[t + 1])):
            row = int64(row_id_map[line + s - first])
            expert = int64(row_id_map[line + num_experts + s - first])
            live = 0 <= row < num_rows and 0 <= expert < num_experts
            if live and not is_null(pad_offsets):
                live = 0 <= pad_offsets[expert] < num_rows and row + pad_offsets[expert] < num_rows
                row += pad_offsets[expert]
            row_of_slot[s] = np.int32(row) if live else NONE
            expert_of_slot[s] = np.int32(expert) if live else NONE


@kernel()
def write_map(
    out: int32_ptr,
    row_of_slot: int32_ptr,
    expert_of_slot: int32_ptr,
    slot_offsets: int32_ptr,
    num_experts: int64,
    num_slots: int64,
    num_rows: int64,
    lo: int64,
    hi: int64,
):
    """Each token's line of the map: rows, experts, count; -1 behind the used entries."""
    for t in range(lo, hi):
        line = t * (2 * num_experts + 1)
        count = int64(0)
        for i in range(2 * num_experts):
            out[line + i] = NONE
        for s in range(max(int64(slot_offsets[t]), int64(0)), min(int64(slot_offsets[t + 1]), num_slots)):
            row, expert = row_of_slot[s], expert_of_slot[s]
            if 0 <= row < num_rows and 0 <= expert < num_experts and count < num_experts:
                out[line + count] = row
                out[line + num_experts + count] = expert
                count += 1
        out[line + 2 * num_experts] = np.int32(count)


# ---------------------------------------------------------------------------- launchers


def _narrowed(index: Tensor, first: int, count: int, out: Tensor | None = None) -> Tensor:
    out = row_of_slot_target(out, index.numel())
    narrow(
        index.dtype,
        items=index.numel(),
        work=SLOT_WORK * index.numel(),
        out=out.data_ptr(),
        index=index.data_ptr(),
        first=first,
        count=count,
    )
    return out


def _inverse(row_of_slot: Tensor, num_rows: int) -> Tensor:
    num_slots = row_of_slot.shape[0]
    slot_of_row = memory.empty((num_rows,), torch.int32)
    work = SLOT_WORK * num_slots
    invert(
        None,
        items=num_rows,
        work=work,
        slot_of_row=slot_of_row.data_ptr(),
        row_of_slot=row_of_slot.data_ptr(),
        num_slots=num_slots,
    )
    return slot_of_row


def plan_row_of_slot(
    row_of_slot: Tensor,
    expert_of_slot: Tensor | None,
    num_rows: int,
    first_row: int,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    row_of_slot = _narrowed(row_of_slot, first_row, num_rows, out)
    experts = None if expert_of_slot is None else _narrowed(expert_of_slot, 0, LARGEST + 1)
    return row_of_slot, _inverse(row_of_slot, num_rows), experts


def plan_token_ids(
    token_ids: Tensor,
    rows: Tensor | None,
    num_tokens: int,
    num_rows: int,
    num_experts: int | None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    num_slots = token_ids.shape[0]
    # The counting sort again, with tokens for experts and entries for slots.
    _, entry_of_slot, _, _, ends = count_up(token_ids, 0, num_tokens, None, None, 1, num_slots)
    slot_offsets = torch.empty(num_tokens + 1, dtype=torch.int32, device=CPU)
    slot_offsets[0] = 0
    slot_offsets[1:] = ends
    row_of_slot = row_of_slot_target(out, num_slots)
    experts = None if num_experts is None else memory.empty((num_slots,), torch.int32)
    rows_per_expert = 1 if num_experts is None else max(num_rows // num_experts, 1)
    entry_rows(
        torch.int32 if rows is None else rows.dtype,
        items=num_slots,
        work=SLOT_WORK * num_slots,
        row_of_slot=row_of_slot.data_ptr(),
        entry_of_slot=entry_of_slot.data_ptr(),
        rows=layout.address(rows),
        expert_of_slot=layout.address(experts),
        num_rows=num_rows,
        rows_per_expert=rows_per_expert,
    )
    slot_of_row = _inverse(row_of_slot, num_rows)
    tokens = None
    if num_experts is not None:
        tokens = torch.empty(num_experts, dtype=torch.int64, device=CPU)
        each = num_rows // num_experts
        live_rows(
            None,
            items=num_experts,
            work=num_rows,
            tokens=tokens.data_ptr(),
            slot_of_row=slot_of_row.data_ptr(),
            rows_per_expert=each,
        )
    return row_of_slot, slot_of_row, slot_offsets, experts, tokens


def plan_chunks(
    lengths: Tensor, order: Tensor | None, num_tokens: int, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    ranks, experts = lengths.shape
    starts = torch.empty((3, ranks, experts), dtype=torch.int64, device=CPU)
    tokens = torch.empty(experts, dtype=torch.int64, device=CPU)
    place = None
    if order is not None:
        order = _narrowed(order, 0, ranks * experts)
        place = _inverse(order, ranks * experts)
    chunk_starts(
        lengths.dtype,
        items=experts,
        work=0,
        starts=starts.data_ptr(),
        tokens=tokens.data_ptr(),
        lengths=lengths.data_ptr(),
        order=layout.address(order),
        place=layout.address(place),
        ranks=ranks,
        num_tokens=num_tokens,
    )
    row_of_slot = row_of_slot_target(out, num_tokens)
    slot_of_row = memory.empty((num_tokens,), torch.int32)
    deal_chunks(
        None,
        items=num_tokens,
        work=num_tokens,
        row_of_slot=row_of_slot.data_ptr(),
        slot_of_row=slot_of_row.data_ptr(),
        starts=starts.data_ptr(),
        chunks=ranks * experts,
        num_tokens=num_tokens,
    )
    return row_of_slot, slot_of_row, tokens


def plan_row_id_map(
    row_id_map: Tensor, pad_offsets: Tensor | None, num_rows: int, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates the results; `row_of_slot` is written into `out` if that is given: contiguous, int32 [S]."""
    num_tokens, num_experts = row_id_map.shape[0], row_id_map.shape[1] // 2
    slot_offsets = torch.empty(num_tokens + 1, dtype=torch.int32, device=CPU)
    map_offsets(
        row_id_map.dtype,
        items=num_tokens,
        work=0,
        slot_offsets=slot_offsets.data_ptr(),
        row_id_map=row_id_map.data_ptr(),
        num_experts=num_experts,
        num_rows=num_rows,
    )
    row_of_slot, expert_of_slot = row_of_slot_target(out, num_rows), memory.empty((num_rows,), torch.int32)
    read_map(
        row_id_map.dtype,
        items=num_tokens,
        work=SLOT_WORK * num_rows,
        row_of_slot=row_of_slot.data_ptr(),
        expert_of_slot=expert_of_slot.data_ptr(),
        slot_offsets=slot_offsets.data_ptr(),
        row_id_map=row_id_map.data_ptr(),
        pad_offsets=layout.address(pad_offsets),
        num_experts=num_experts,
        num_rows=num_rows,
    )
    used = int(slot_offsets[-1])
    row_of_slot[used:] = -1
    expert_of_slot[used:] = -1
    return row_of_slot, _inverse(row_of_slot, num_rows), slot_offsets, expert_of_slot


def row_id_map(plan: PlanTensors, num_experts: int, *, out: Tensor | None = None) -> Tensor:
    """Allocates the [T, 2E + 1] result, or writes `out`."""
    num_slots, num_tokens = plan.row_of_slot.shape[0], plan.num_tokens
    offsets = plan.slot_offsets
    if offsets is None:
        offsets = torch.arange(num_tokens + 1, dtype=torch.int32, device=CPU) * (num_slots // max(num_tokens, 1))
    shape = num_tokens, 2 * num_experts + 1
    into = out if out is not None and out.is_contiguous() else memory.empty(shape, torch.int32)
    write_map(
        None,
        items=num_tokens,
        work=num_tokens * shape[1],
        out=into.data_ptr(),
        row_of_slot=plan.row_of_slot.data_ptr(),
        expert_of_slot=plan.expert_of_slot.data_ptr(),
        slot_offsets=offsets.data_ptr(),
        num_experts=num_experts,
        num_slots=num_slots,
        num_rows=plan.slot_of_row.shape[0],
    )
    return layout.finish(into, out)
