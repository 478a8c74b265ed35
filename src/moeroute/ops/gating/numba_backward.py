"""Gating on the CPU: the kernel of the backward pass.

Rows are taken 64 at a time. Their slots are laid out slot by slot, one lane for each row, so that the
ordered sums and the quotients of 64 rows are one block operation each: 1 ns a row with 8 slots, where
row by row they took 9. Lanes without a row hold anything.
"""

from typing import NamedTuple

import numpy as np
from numba import int64

from moeroute.ops.gating.numba_forward import (
    BFLOAT16,
    FLOAT32,
    INFINITY,
    NO_EXPERT,
    ONE,
    SIGMOID,
    SOFTMAX,
    SQRTSOFTPLUS,
    TOPK_SIGMOID,
    TOPK_SOFTMAX,
    ZERO,
    FloatRows,
    IdRows,
    Options,
)
from moeroute.ops.numba_kit.blocks import load, splat, store, store_tail, zeros
from moeroute.ops.numba_kit.elementary import exp, sigmoid, sigmoid_slope, sqrtsoftplus_slope
from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.lanes import TILE, choose, ints, lane_bits, load_ints, store_ints, store_zeros, transpose
from moeroute.ops.numba_kit.launch import element_ptr, kernel
from moeroute.ops.numba_kit.pointers import LANES, advance, float32_ptr, int32_ptr, is_null, pointer_to, retyped
from moeroute.ops.numba_kit.row_sums import dot_row, load_part, store_part

MANY_SLOTS = 32  # more are not compared with each other to see whether an expert repeats: adding up is cheaper
FIRST = np.int32(0)


class Rows(NamedTuple):
    """Rows of any one dtype."""

    data: element_ptr
    stride: int64


class SlotGradients(NamedTuple):
    """64 rows' slots, laid out slot by slot, one lane for each row, and gamma of each row."""

    grads: float32_ptr
    ids: int32_ptr
    gammas: float32_ptr


@helper
def gather_slots(target, source, stride, k, rows):
    """From rows of slots to blocks of rows."""
    for p in range(0, k, TILE):
        for r in range(0, rows, TILE):
            transpose(target, p * LANES + r, advance(source, r * stride + p), stride, rows - r, k - p)


@helper
def gather_gradients(grads, source, token, k, rows):
    """The tile's gradients, slot by slot, from rows of any of the three dtypes."""
    offset = token * source.stride
    if source.dtype == FLOAT32:
        gather_slots(grads, advance(source.data, offset), source.stride, k, rows)
    elif source.dtype == BFLOAT16:
        gather_slots(grads, advance(retyped(source.data, "bfloat16"), offset), source.stride, k, rows)
    else:
        gather_slots(grads, advance(retyped(source.data, "float16"), offset), source.stride, k, rows)


@helper
def check_ids(ids, k, num_experts):
    """A slot without an expert gets a negative id, another one than the row's other slots."""
    for p in range(k):
        e = load_ints(ids, p * LANES)
        inside = (e > ints(NO_EXPERT)) & (ints(np.int32(num_experts)) > e)
        store_ints(ids, p * LANES, choose(inside, e, ints(np.int32(-1 - p))))


@helper
def gather_elements(target, source, ids, stride, k, rows):
    """One element of the row for each slot; any one where there is no expert."""
    where = retyped(target, "int32")
    for i in range(0, k * LANES, LANES):
        e = load_ints(ids, i)
        store_ints(where, i, choose(e > ints(NO_EXPERT), e, ints(FIRST)))
    for lane in range(rows):
        row = advance(source, lane * stride)
        for i in range(lane, lane + k * LANES, LANES):
            target[i] = row[where[i]]


@helper
def if_live(ids, i, block):
    """+0 where there is no expert, which changes no sum that began at +0."""
    return choose(load_ints(ids, i) > ints(NO_EXPERT), block, zeros())


@helper
def softmax_over_blocks(chosen, ids, end):
    """Softmax over the k slots of 64 tokens at once; slots without an expert count as +0."""
    top = splat(-INFINITY)
    for i in range(0, end, LANES):
        x = load(chosen, i)
        top = choose((x > top) & (load_ints(ids, i) > ints(NO_EXPERT)), x, top)
    total = zeros()
    for i in range(0, end, LANES):
        e = exp(load(chosen, i) - top)
        store(chosen, i, e)
        total = total + if_live(ids, i, e)
    for i in range(0, end, LANES):
        store(chosen, i, load(chosen, i) / total)


@helper
def score_gradients(grads, chosen, ids, k, options):
    """From the gradients of the weights to those of the scores, slot by slot; returns gamma."""
    end, score = k * LANES, options.score
    if score == TOPK_SOFTMAX:
        softmax_over_blocks(chosen, ids, end)
    elif score == TOPK_SIGMOID:
        for i in range(0, end, LANES):
            store(chosen, i, sigmoid(load(chosen, i)))
    for i in range(0, end, LANES):
        store(grads, i, load(grads, i) * splat(options.scaling))
    if options.renormalize:
        total, beta = zeros(), zeros()
        for i in range(0, end, LANES):
            total = total + if_live(ids, i, load(chosen, i))
        total = total + splat(options.eps)
        for i in range(0, end, LANES):
            beta = beta + if_live(ids, i, (load(chosen, i) / total) * load(grads, i))
        for i in range(0, end, LANES):
            store(grads, i, (load(grads, i) - beta) / total)
    gamma = zeros()
    if score in (SOFTMAX, TOPK_SOFTMAX):
        for i in range(0, end, LANES):
            gamma = gamma + if_live(ids, i, load(chosen, i) * load(grads, i))
    if score == TOPK_SOFTMAX:
        for i in range(0, end, LANES):
            store(grads, i, load(chosen, i) * (load(grads, i) - gamma))
    elif score == TOPK_SIGMOID:
        for i in range(0, end, LANES):
            store(grads, i, sigmoid_slope(load(chosen, i)) * load(grads, i))
    return gamma


@helper
def rows_with_repeats(ids, k):
    """One bit for each row: whether an expert has several of its slots, or may have."""
    found = np.uint64(0)
    if k > MANY_SLOTS:
        return ~found
    for i in range(LANES, k * LANES, LANES):
        e = load_ints(ids, i)
        for j in range(0, i, LANES):
            found |= lane_bits(e == load_ints(ids, j))
    return found


@helper
def add_repeats(grads, ids, sums, k, lane):
    """Each of the row's slots gets the sum over those with its expert. `sums` is zero before and after."""
    for i in range(lane, lane + k * LANES, LANES):
        if ids[i] >= 0:
            sums[ids[i]] = sums[ids[i]] + grads[i]
    for i in range(lane, lane + k * LANES, LANES):
        if ids[i] >= 0:
            grads[i] = sums[ids[i]]
    for i in range(lane, lane + k * LANES, LANES):
        if ids[i] >= 0:
            sums[ids[i]] = ZERO


@helper
def logit_gradients(grads, chosen, extra, grad_scores, score, gamma, k):
    """From the gradients of the scores to those of the logits, slot by slot."""
    for i in range(0, k * LANES, LANES):
        s = load(chosen, i)
        g = zeros() + load(grads, i)
        if not is_null(grad_scores):
            g = g + load(extra, i)
        if score == SOFTMAX:
            g = s * (g - gamma)
        elif score == SIGMOID:
            g = sigmoid_slope(s) * g
        elif score == SQRTSOFTPLUS:
            g = sqrtsoftplus_slope(s) * g
        store(grads, i, g)


@helper
def store_product(out, j, slope, grad_scores, count):
    """Slope times the gradient of the scores, +0 where there is none."""
    if not is_null(grad_scores):
        store_part(out, j, slope * (zeros() + load_part(grad_scores, j, count)), count)
    elif count == LANES:
        store_zeros(out, j, slope * zeros())
    else:
        store_tail(out, j, slope * zeros(), count)


@helper
def backward_row(out, scores, grad_scores, score, gamma, num_experts):
    """The row as if nothing had been chosen.

    A loop for each score: one for all would load the many constants of sqrtsoftplus for every row, 10 ns.
    """
    if score == SOFTMAX:
        for j in range(0, num_experts, LANES):
            count = min(LANES, num_experts - j)
            total = zeros()
            if not is_null(grad_scores):
                total = total + load_part(grad_scores, j, count)
            store_part(out, j, load_part(scores, j, count) * (total - gamma), count)
    elif score == SIGMOID:
        for j in range(0, num_experts, LANES):
            count = min(LANES, num_experts - j)
            store_product(out, j, sigmoid_slope(load_part(scores, j, count)), grad_scores, count)
    elif score == SQRTSOFTPLUS:
        for j in range(0, num_experts, LANES):
            count = min(LANES, num_experts - j)
            store_product(out, j, sqrtsoftplus_slope(load_part(scores, j, count)), grad_scores, count)
    else:
        for j in range(0, num_experts, LANES):
            store_product(out, j, splat(ONE), grad_scores, min(LANES, num_experts - j))


@helper
def backward_rows(out, out_bits, values, value_bits, slots, scores, grad_scores, k, num_experts, score, rows):
    """Each row as if nothing had been chosen, then the slots' gradients over it.

    `values` is the memory of the gradients, narrowed from its beginning on: no block is written before it was read.
    """
    for i in range(0, k * LANES, LANES):
        store(values, i, load(slots.grads, i))
    for lane in range(rows):
        extra = grad_scores.data
        if not is_null(extra):
            extra = advance(extra, lane * grad_scores.stride)
        row, score_row = advance(out.data, lane * out.stride), advance(scores.data, lane * scores.stride)
        backward_row(row, score_row, extra, score, splat(slots.gammas[lane]), num_experts)
        row_bits = advance(out_bits, lane * out.stride)
        for i in range(lane, lane + k * LANES, LANES):
            if slots.ids[i] >= 0:
                row_bits[slots.ids[i]] = value_bits[i]


@kernel()
def gating_backward(
    out: FloatRows,
    scores: FloatRows,
    grad_weights: FloatRows,
    expert_ids: IdRows,
    grad_scores: FloatRows,
    num_experts: int64,
    k: int64,
    options: Options,
    lo: int64,
    hi: int64,
):
    """64 tokens at a time, one in each lane; the work space of a chunk is allocated here."""
    size, score = (k + TILE) * LANES, options.score
    work = np.empty(4 * size + LANES + num_experts, np.float32)
    chosen = pointer_to(work)
    grads = advance(chosen, size)
    extra = advance(grads, size)
    ids = retyped(advance(extra, size), "int32")
    gammas = advance(extra, 2 * size)
    sums = advance(gammas, LANES)
    for e in range(num_experts):
        sums[e] = ZERO
    for t in range(lo, hi, LANES):
        rows = min(LANES, hi - t)
        score_rows = advance(scores.data, t * scores.stride)
        extra_rows = grad_scores.data
        gather_slots(ids, advance(expert_ids.data, t * expert_ids.stride), expert_ids.stride, k, rows)
        check_ids(ids, k, num_experts)
        gather_elements(chosen, score_rows, ids, scores.stride, k, rows)
        gather_gradients(grads, grad_weights, t, k, rows)
        gamma = score_gradients(grads, chosen, ids, k, options)
        if not is_null(grad_scores.data):
            extra_rows = advance(grad_scores.data, t * grad_scores.stride)
            gather_elements(extra, extra_rows, ids, grad_scores.stride, k, rows)
            if score == SOFTMAX:
                for r in range(rows):
                    s, d = r * scores.stride, r * grad_scores.stride
                    gammas[r] = dot_row(score_rows, s, extra_rows, d, score_rows, -1, num_experts)
                gamma = gamma + load(gammas, 0)
        store(gammas, 0, gamma)
        repeats = rows_with_repeats(ids, k)
        if repeats != 0:
            for r in range(rows):
                if (repeats >> np.uint64(r)) & np.uint64(1):
                    add_repeats(grads, ids, sums, k, r)
        logit_gradients(grads, chosen, extra, grad_scores.data, score, gamma, k)
        slots = SlotGradients(grads, ids, gammas)
        near_scores, near_extra = Rows(score_rows, scores.stride), Rows(extra_rows, grad_scores.stride)
        if out.dtype == FLOAT32:
            row = advance(out.data, t * out.stride)
            backward_rows(
                Rows(row, out.stride),
                retyped(row, "int32"),
                grads,
                retyped(grads, "int32"),
                slots,
                near_scores,
                near_extra,
                k,
                num_experts,
                score,
                rows,
            )
        elif out.dtype == BFLOAT16:
            brow = advance(retyped(out.data, "bfloat16"), t * out.stride)
            backward_rows(
                Rows(brow, out.stride),
                retyped(brow, "int16"),
                retyped(grads, "bfloat16"),
                retyped(grads, "int16"),
                slots,
                near_scores,
                near_extra,
                k,
                num_experts,
                score,
                rows,
            )
        else:
            hrow = advance(retyped(out.data, "float16"), t * out.stride)
            backward_rows(
                Rows(hrow, out.stride),
                retyped(hrow, "int16"),
                retyped(grads, "float16"),
                retyped(grads, "int16"),
                slots,
                near_scores,
                near_extra,
                k,
                num_experts,
                score,
                rows,
            )
    work[0] = ZERO  # an array is freed after its last use, whoever has its address
