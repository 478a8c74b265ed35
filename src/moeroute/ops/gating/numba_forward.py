"""Gating on the CPU: the kernel of the forward pass, and what both passes share.

A row is widened to float32 as it comes in and narrowed as it goes out, so that one compiled kernel
serves all dtypes. In between it is worked off in blocks of 64 experts: scores, then integer keys in
the order of the values, then a search for the best k keys. Every id is range-checked before it is used.
"""

from typing import NamedTuple

import numpy as np
import torch
from numba import float32, int64

from moeroute.ops.numba_kit.blocks import load, pairwise, splat, store, zeros
from moeroute.ops.numba_kit.elementary import exp, sigmoid, sqrtsoftplus
from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.lanes import (
    bits,
    choose,
    floats,
    ints,
    lane_bits,
    lane_numbers,
    lanes_below,
    largest,
    load_ints,
    lowest_bit,
    store_ints,
    two_largest,
)
from moeroute.ops.numba_kit.launch import kernel
from moeroute.ops.numba_kit.pointers import LANES, advance, float32_ptr, int32_ptr, is_null, pointer_to, retyped
from moeroute.ops.numba_kit.row_sums import load_part, store_part

SOFTMAX, SIGMOID, SQRTSOFTPLUS, TOPK_SOFTMAX, TOPK_SIGMOID, NONE = range(6)
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT32, BFLOAT16, FLOAT16 = range(3)

ZERO, ONE = map(np.float32, (0, 1))
INFINITY = np.float32(np.inf)
NO_EXPERT = np.int32(-1)

# Keys: int32 in the order of the values.
LOWEST = np.int32(-(2**31))  # below every value's key: a lane without an expert
NAN_KEY = np.int32(2**31 - 1)
MINUS_INFINITY_KEY = np.int32(-2139095041)
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY_BITS = np.int32(0x7F800000)
SIGN_SHIFT = np.int32(31)


class Options(NamedTuple):
    """How scores are made, chosen and weighed, as the kernels read it."""

    score: int64
    num_groups: int64
    topk_groups: int64
    group_best: int64
    renormalize: int64
    scaling: float32
    eps: float32


class FloatRows(NamedTuple):
    """Rows of float32, bfloat16 or float16, as `dtype` says: the number in `FLOATS`."""

    data: float32_ptr
    stride: int64
    dtype: int64


class IdRows(NamedTuple):
    """Rows of int32 expert ids."""

    data: int32_ptr
    stride: int64


# ---------------------------------------------------------------------------- rows


@helper
def widen_row(row, source, size, filler):
    """`size` elements as float32; `filler` up to the end of the last block."""
    for j in range(0, size, LANES):
        count = min(LANES, size - j)
        store(row, j, choose(lanes_below(count), load_part(source, j, count), splat(filler)))


@helper
def widen(row, source, token, size, filler):
    """The row of a token."""
    offset = token * source.stride
    if source.dtype == FLOAT32:
        widen_row(row, advance(source.data, offset), size, filler)
    elif source.dtype == BFLOAT16:
        widen_row(row, advance(retyped(source.data, "bfloat16"), offset), size, filler)
    else:
        widen_row(row, advance(retyped(source.data, "float16"), offset), size, filler)


@helper
def narrow_row(target, row, size):
    """Round `size` float32 elements to the dtype of `target`."""
    for j in range(0, size, LANES):
        store_part(target, j, load(row, j), min(LANES, size - j))


@helper
def narrow(target, token, row, size):
    """Into the row of a token, of any of the three dtypes."""
    offset = token * target.stride
    if target.dtype == FLOAT32:
        narrow_row(advance(target.data, offset), row, size)
    elif target.dtype == BFLOAT16:
        narrow_row(advance(retyped(target.data, "bfloat16"), offset), row, size)
    else:
        narrow_row(advance(retyped(target.data, "float16"), offset), row, size)


# ---------------------------------------------------------------------------- scores


@helper
def softmax_row(scores, row, num_experts):
    """Softmax of a row that is filled up with -inf; `row` is overwritten with the exponentials."""
    top = splat(-INFINITY)
    for j in range(0, num_experts, LANES):
        x = load(row, j)
        top = choose(x > top, x, top)
    shift = splat(largest(top))
    p0, p1, p2, p3 = zeros(), zeros(), zeros(), zeros()
    for j in range(0, num_experts, LANES):
        e = exp(load(row, j) - shift)  # +0 beyond the last expert: the row is filled up with -inf
        store(row, j, e)
        part = (j // LANES) % 4
        if part == 0:
            p0 = p0 + e
        elif part == 1:
            p1 = p1 + e
        elif part == 2:
            p2 = p2 + e
        else:
            p3 = p3 + e
    total = splat((pairwise(p0) + pairwise(p1)) + (pairwise(p2) + pairwise(p3)))
    for j in range(0, num_experts, LANES):
        store_part(scores, j, load(row, j) / total, min(LANES, num_experts - j))


@helper
def scores_row(scores, row, score, num_experts):
    """`row` holds the logits and is used up."""
    if score == SOFTMAX:
        softmax_row(scores, row, num_experts)
    elif score == SIGMOID:
        for j in range(0, num_experts, LANES):
            store_part(scores, j, sigmoid(load(row, j)), min(LANES, num_experts - j))
    elif score == SQRTSOFTPLUS:
        for j in range(0, num_experts, LANES):
            store_part(scores, j, sqrtsoftplus(load(row, j)), min(LANES, num_experts - j))
    else:
        narrow_row(scores, row, num_experts)


@helper
def softmax_over_slots(chosen, ids, k, num_experts):
    """In place over the k chosen logits; slots without an expert hold -inf and are skipped in the sum."""
    top = -INFINITY
    for p in range(k):
        if chosen[p] > top:
            top = chosen[p]
    shift = splat(top)
    for j in range(0, k, LANES):
        store(chosen, j, exp(load(chosen, j) - shift))
    total = ZERO
    for p in range(k):
        if 0 <= ids[p] < num_experts:
            total = total + chosen[p]
    for p in range(k):
        chosen[p] = chosen[p] / total


@helper
def gather_chosen(chosen, scores, ids, score, k, num_experts):
    """What is renormalised and scaled: the chosen scores, or the softmax or the sigmoid of the chosen logits."""
    for p in range(k):
        e = ids[p]
        chosen[p] = scores[e] if 0 <= e < num_experts else -INFINITY
    if score == TOPK_SOFTMAX:
        softmax_over_slots(chosen, ids, k, num_experts)
    elif score == TOPK_SIGMOID:
        for j in range(0, k, LANES):
            store(chosen, j, sigmoid(load(chosen, j)))


# ---------------------------------------------------------------------------- selection


@helper
def order_keys(value):
    """`order_key` of a block."""
    b = bits(value + zeros())  # -0 becomes +0
    key = b ^ ((b >> ints(SIGN_SHIFT)) & ints(MAGNITUDE))
    return choose((b & ints(MAGNITUDE)) > ints(INFINITY_BITS), ints(NAN_KEY), key)


@helper
def order_key(value):
    """An int32 that orders as the float does: -0 equals +0, NaN above everything."""
    b = bits(value + ZERO)
    if (b & MAGNITUDE) > INFINITY_BITS:
        return NAN_KEY
    return np.int32(b ^ ((b >> SIGN_SHIFT) & MAGNITUDE))


@helper
def value_of_key(key):
    """The float that `order_key` was made of; NaN has one key and comes back as one NaN."""
    return floats(np.int32(key ^ ((key >> SIGN_SHIFT) & MAGNITUDE)))


@helper
def select(chosen, k, keys, block_best, count):
    """The indices of the k largest of `count` keys, largest first, equal ones by smaller index.

    `keys` is filled up with LOWEST to whole blocks; the chosen ones become LOWEST. Taking out the
    largest key k times has no branch to mispredict: 190 ns for 8 of 256 random keys, where insertion
    into a sorted list took 490.
    """
    blocks = (count + LANES - 1) // LANES
    for b in range(blocks):
        block_best[b] = largest(load_ints(keys, b * LANES))
    for p in range(k):
        best, where = block_best[0], 0
        for b in range(1, blocks):
            if block_best[b] > best:
                best, where = block_best[b], b
        block = load_ints(keys, where * LANES)
        lane = lowest_bit(lane_bits(block == ints(best)))
        chosen[p] = np.int32(where * LANES + lane)
        block = choose(lane_numbers() == ints(np.int32(lane)), ints(LOWEST), block)
        store_ints(keys, where * LANES, block)
        block_best[where] = largest(block)


@helper
def pair_key(keys, start, size, both):
    """The key of the largest of the values from `start` on, or of the sum of both largest."""
    first, second = LOWEST, LOWEST
    for j in range(0, size, LANES):
        members = choose(lanes_below(size - j), load_ints(keys, start + j), ints(LOWEST))
        a, b = two_largest(members)
        second = max(min(first, a), max(second, b))
        first = max(first, a)
    if both:
        return order_key(value_of_key(first) + value_of_key(second))
    return first


@helper
def sum_key(keys, start, size, best, spare, block_best):
    """The key of the sum of the `best` largest of the values from `start` on, the largest first."""
    members = advance(spare, size + LANES)
    for j in range(0, size, LANES):
        store_ints(members, j, choose(lanes_below(size - j), load_ints(keys, start + j), ints(LOWEST)))
    select(spare, best, members, block_best, size)
    total = value_of_key(keys[start + spare[0]])
    for p in range(1, best):
        total = total + value_of_key(keys[start + spare[p]])
    return order_key(total)


@helper
def mask_groups(keys, group_keys, kept, block_best, num_experts, options):
    """-inf for every expert outside the best groups."""
    num_groups = options.num_groups
    size, best = num_experts // num_groups, options.group_best
    spare = advance(kept, num_groups + LANES)
    for g in range(num_groups):
        if best > 2:
            group_keys[g] = sum_key(keys, g * size, size, best, spare, block_best)
        else:
            group_keys[g] = pair_key(keys, g * size, size, best == 2)
    for g in range(num_groups, num_groups + LANES):
        group_keys[g] = LOWEST
    select(kept, options.topk_groups, group_keys, block_best, num_groups)
    for g in range(num_groups):
        if group_keys[g] != LOWEST:  # not taken out: not among the best
            for e in range(g * size, (g + 1) * size):
                keys[e] = MINUS_INFINITY_KEY


@helper
def select_row(ids, scores, bias, keys, num_experts, k, options):
    """The k best experts of a row, best first, equal ones by smaller id."""
    block_best = advance(keys, num_experts + LANES)
    for j in range(0, num_experts, LANES):
        count = min(LANES, num_experts - j)
        value = load_part(scores, j, count)
        if not is_null(bias):
            value = value + load_part(bias, j, count)
        store_ints(keys, j, choose(lanes_below(count), order_keys(value), ints(LOWEST)))
    if options.topk_groups < options.num_groups:
        group_keys = advance(block_best, num_experts // LANES + 1)
        kept = advance(group_keys, options.num_groups + LANES)
        mask_groups(keys, group_keys, kept, block_best, num_experts, options)
    select(ids, k, keys, block_best, num_experts)


# ---------------------------------------------------------------------------- forward


@kernel()
def gating_forward(
    weights: FloatRows,
    expert_ids: IdRows,
    scores: FloatRows,
    logits: FloatRows,
    bias: float32_ptr,
    given_ids: IdRows,
    num_experts: int64,
    k: int64,
    options: Options,
    lo: int64,
    hi: int64,
):
    """One token after the other; the work space of a chunk is allocated here."""
    row_size, group_size = num_experts + LANES, options.num_groups + LANES
    members_size = num_experts // options.num_groups + LANES
    size = 2 * row_size + k + 2 * LANES + num_experts // LANES + 2 * group_size + 2 * members_size
    work = np.empty(size, np.float32)
    row = pointer_to(work)
    chosen = advance(row, row_size)
    keys = retyped(advance(chosen, k + LANES), "int32")
    for t in range(lo, hi):
        score_row = advance(scores.data, t * scores.stride)
        ids = advance(expert_ids.data, t * expert_ids.stride)
        widen(row, logits, t, num_experts, -INFINITY)
        scores_row(score_row, row, options.score, num_experts)
        if is_null(given_ids.data):
            select_row(ids, score_row, bias, keys, num_experts, k, options)
        else:
            for p in range(k):
                e = given_ids.data[t * given_ids.stride + p]
                ids[p] = e if 0 <= e < num_experts else NO_EXPERT
        gather_chosen(chosen, score_row, ids, options.score, k, num_experts)
        if options.renormalize:
            denominator = ZERO
            for p in range(k):
                if ids[p] >= 0:
                    denominator = denominator + chosen[p]
            denominator = denominator + options.eps
            for p in range(k):
                chosen[p] = chosen[p] / denominator
        for p in range(k):
            chosen[p] = chosen[p] * options.scaling if ids[p] >= 0 else ZERO
        narrow(weights, t, chosen, k)
    work[0] = ZERO  # an array is freed after its last use, whoever has its address
