"""Gating on the CPU: kernels, then launchers.

A row is widened to float32 as it comes in and narrowed as it goes out, so that one compiled kernel
serves all dtypes. In between it is worked off in blocks of 64 experts: scores, then integer keys in
the order of the values, then a search for the best k keys. Every id is range-checked before it is used.
"""

import numpy as np
import torch
from numba import boolean, float32, int64, prange
from torch import Tensor

from moeroute import memory
from moeroute.ops.launch import Kernel, kernel, parallel_kernel
from moeroute.ops.rows import dot_row, put, some
from moeroute.ops.simd import (
    LANES,
    TILE,
    advance,
    bits,
    choose,
    exact_floats,
    float32_ptr,
    floats,
    int32_ptr,
    ints,
    is_null,
    lane_bits,
    lane_numbers,
    lanes_below,
    largest,
    load,
    load_ints,
    lowest_bit,
    pairwise,
    pointer_to,
    restore_floats,
    retyped,
    splat,
    square_root,
    store,
    store_ints,
    store_tail,
    store_zeros,
    transpose,
    two_largest,
    zeros,
)

SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "topk_softmax": 3}
SOFTMAX, SIGMOID, SQRTSOFTPLUS, TOPK_SOFTMAX = range(4)
SMALL = memory.SMALLEST // 8  # elements that the pool does not care for, whatever their dtype
empty = torch.empty
MANY_SLOTS = 32  # more are not compared with each other to see whether an expert repeats: adding up is cheaper
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT32, BFLOAT16, FLOAT16 = range(3)

ZERO, HALF, ONE, TWO = map(np.float32, (0, 0.5, 1, 2))
INFINITY = np.float32(np.inf)
NO_EXPERT, FIRST = np.int32(-1), np.int32(0)  # ids
CPU = torch.device("cpu")

# exp; the numbers are those of docs/arithmetic.md
EXP_HIGH, EXP_LOW = np.float32(89), np.float32(-104)
LOG2_E = np.float32(1.44269504)
MAGIC = np.float32(12582912)
MAGIC_BITS = np.int32(0x4B400000)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
E5, E4, E3, E2, E1, E0 = map(
    np.float32,
    (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
L15, L13, L11, L9, L7, L5, L3 = (np.float32(1 / n) for n in (15, 13, 11, 9, 7, 5, 3))
S7, S6, S5, S4, S3, S2, S1 = (np.float32(c) for c in (-1 / 40320, 1 / 5040, -1 / 720, 1 / 120, -1 / 24, 1 / 6, -1 / 2))

# Keys: int32 in the order of the values.
LOWEST = np.int32(-(2**31))  # below every value's key: a lane without an expert
NAN_KEY = np.int32(2**31 - 1)
MINUS_INFINITY_KEY = np.int32(-2139095041)
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY_BITS = np.int32(0x7F800000)
SIGN_SHIFT, ONE_BIT, BIAS, MANTISSA = map(np.int32, (31, 1, 127, 23))


# ---------------------------------------------------------------------------- kernels: rows, elementary functions


@kernel
def widen_row(row, source, size, filler):
    """`size` elements as float32; `filler` up to the end of the last block."""
    for j in range(0, size, LANES):
        count = min(LANES, size - j)
        store(row, j, choose(lanes_below(count), some(source, j, count), splat(filler)))


@kernel
def widen(row, source, dtype, offset, size, filler):
    if dtype == FLOAT32:
        widen_row(row, advance(source, offset), size, filler)
    elif dtype == BFLOAT16:
        widen_row(row, advance(retyped(source, "bfloat16"), offset), size, filler)
    else:
        widen_row(row, advance(retyped(source, "float16"), offset), size, filler)


@kernel
def narrow_row(target, row, size):
    for j in range(0, size, LANES):
        put(target, j, load(row, j), min(LANES, size - j))


@kernel
def narrow(target, dtype, offset, row, size):
    if dtype == FLOAT32:
        narrow_row(advance(target, offset), row, size)
    elif dtype == BFLOAT16:
        narrow_row(advance(retyped(target, "bfloat16"), offset), row, size)
    else:
        narrow_row(advance(retyped(target, "float16"), offset), row, size)


@kernel
def exp(x):
    x = choose(x > splat(EXP_HIGH), splat(EXP_HIGH), x)
    x = choose(splat(EXP_LOW) > x, splat(EXP_LOW), x)
    shifted = x * splat(LOG2_E) + splat(MAGIC)
    n = shifted - splat(MAGIC)
    r = x - n * splat(LN2_HIGH)
    r = r - n * splat(LN2_LOW)
    y = splat(E5) * r + splat(E4)
    y = y * r + splat(E3)
    y = y * r + splat(E2)
    y = y * r + splat(E1)
    y = y * r + splat(E0)
    y = (y * r) * r + r
    y = y + splat(ONE)
    exponent = bits(shifted) - ints(MAGIC_BITS)  # bits, not a conversion: defined for NaN too
    half = exponent >> ints(ONE_BIT)
    y = y * floats((half + ints(BIAS)) << ints(MANTISSA))
    return y * floats((exponent - half + ints(BIAS)) << ints(MANTISSA))


@kernel
def sigmoid(x):
    return splat(ONE) / (splat(ONE) + exp(zeros() - x))


@kernel
def sqrtsoftplus(x):
    positive = x > zeros()
    u = exp(choose(positive, zeros() - x, x))
    q = u / (splat(TWO) + u)
    z = q * q
    p = splat(L15) * z + splat(L13)
    p = p * z + splat(L11)
    p = p * z + splat(L9)
    p = p * z + splat(L7)
    p = p * z + splat(L5)
    p = p * z + splat(L3)
    p = p * z
    log1p = u - q * (u - (p + p))
    return square_root(choose(positive, x, zeros()) + log1p)


@kernel
def sqrtsoftplus_slope(s):
    z = s * s
    p = splat(S7) * z + splat(S6)
    p = p * z + splat(S5)
    p = p * z + splat(S4)
    p = p * z + splat(S3)
    p = p * z + splat(S2)
    p = p * z + splat(S1)
    p = p * z + splat(ONE)
    direct = (splat(ONE) - exp(zeros() - z)) / (s + s)
    return choose(splat(HALF) > z, (s * splat(HALF)) * p, direct)


# ---------------------------------------------------------------------------- kernels: scores


@kernel
def softmax_row(scores, row, num_experts):
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
        put(scores, j, load(row, j) / total, min(LANES, num_experts - j))


@kernel
def scores_row(scores, row, score, num_experts):
    """`row` holds the logits and is used up."""
    if score == SOFTMAX:
        softmax_row(scores, row, num_experts)
    elif score == SIGMOID:
        for j in range(0, num_experts, LANES):
            put(scores, j, sigmoid(load(row, j)), min(LANES, num_experts - j))
    elif score == SQRTSOFTPLUS:
        for j in range(0, num_experts, LANES):
            put(scores, j, sqrtsoftplus(load(row, j)), min(LANES, num_experts - j))
    else:
        narrow_row(scores, row, num_experts)


@kernel
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


@kernel
def gather_chosen(chosen, scores, ids, score, k, num_experts):
    """What is renormalised and scaled: the chosen scores, or the softmax over the chosen logits."""
    for p in range(k):
        e = ids[p]
        chosen[p] = scores[e] if 0 <= e < num_experts else -INFINITY
    if score == TOPK_SOFTMAX:
        softmax_over_slots(chosen, ids, k, num_experts)


# ---------------------------------------------------------------------------- kernels: selection


@kernel
def order_keys(value):
    b = bits(value + zeros())  # -0 becomes +0
    key = b ^ ((b >> ints(SIGN_SHIFT)) & ints(MAGNITUDE))
    return choose((b & ints(MAGNITUDE)) > ints(INFINITY_BITS), ints(NAN_KEY), key)


@kernel
def order_key(value):
    b = bits(value + ZERO)
    if (b & MAGNITUDE) > INFINITY_BITS:
        return NAN_KEY
    return np.int32(b ^ ((b >> SIGN_SHIFT) & MAGNITUDE))


@kernel
def value_of_key(key):
    return floats(np.int32(key ^ ((key >> SIGN_SHIFT) & MAGNITUDE)))


@kernel
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


@kernel
def mask_groups(keys, group_keys, kept, block_best, num_experts, num_groups, topk_groups, top2):
    """-inf for every expert outside the best groups."""
    size = num_experts // num_groups
    for g in range(num_groups):
        first, second = LOWEST, LOWEST
        for j in range(0, size, LANES):
            members = choose(lanes_below(size - j), load_ints(keys, g * size + j), ints(LOWEST))
            a, b = two_largest(members)
            second = max(min(first, a), max(second, b))
            first = max(first, a)
        if top2:
            first = order_key(value_of_key(first) + value_of_key(second))
        group_keys[g] = first
    for g in range(num_groups, num_groups + LANES):
        group_keys[g] = LOWEST
    select(kept, topk_groups, group_keys, block_best, num_groups)
    for g in range(num_groups):
        if group_keys[g] != LOWEST:  # not taken out: not among the best
            for e in range(g * size, (g + 1) * size):
                keys[e] = MINUS_INFINITY_KEY


@kernel
def select_row(ids, scores, bias, keys, num_experts, k, num_groups, topk_groups, top2):
    block_best = advance(keys, num_experts + LANES)
    for j in range(0, num_experts, LANES):
        count = min(LANES, num_experts - j)
        value = some(scores, j, count)
        if not is_null(bias):
            value = value + some(bias, j, count)
        store_ints(keys, j, choose(lanes_below(count), order_keys(value), ints(LOWEST)))
    if topk_groups < num_groups:
        group_keys = advance(block_best, num_experts // LANES + 1)
        kept = advance(group_keys, num_groups + LANES)
        mask_groups(keys, group_keys, kept, block_best, num_experts, num_groups, topk_groups, top2)
    select(ids, k, keys, block_best, num_experts)


# ---------------------------------------------------------------------------- kernels: forward


@kernel
def gating_body(
    weights, expert_ids, scores, logits, bias, given_ids, weights_dtype, logits_dtype, num_experts, k, weights_stride,
    ids_stride, scores_stride, logits_stride, given_stride, score, num_groups, topk_groups, top2, renormalize,
    scaling, eps, lo, hi,
):  # fmt: skip
    mode = exact_floats()
    row_size, group_size = num_experts + LANES, num_groups + LANES
    work = np.empty(2 * row_size + k + 2 * LANES + num_experts // LANES + 2 * group_size, np.float32)
    row = pointer_to(work)
    chosen = advance(row, row_size)
    keys = retyped(advance(chosen, k + LANES), "int32")
    for t in range(lo, hi):
        score_row = advance(scores, t * scores_stride)
        ids = advance(expert_ids, t * ids_stride)
        widen(row, logits, logits_dtype, t * logits_stride, num_experts, -INFINITY)
        scores_row(score_row, row, score, num_experts)
        if is_null(given_ids):
            select_row(ids, score_row, bias, keys, num_experts, k, num_groups, topk_groups, top2)
        else:
            for p in range(k):
                e = given_ids[t * given_stride + p]
                ids[p] = e if 0 <= e < num_experts else np.int32(-1)
        gather_chosen(chosen, score_row, ids, score, k, num_experts)
        if renormalize:
            denominator = ZERO
            for p in range(k):
                if ids[p] >= 0:
                    denominator = denominator + chosen[p]
            denominator = denominator + eps
            for p in range(k):
                chosen[p] = chosen[p] / denominator
        for p in range(k):
            chosen[p] = chosen[p] * scaling if ids[p] >= 0 else ZERO
        narrow(weights, weights_dtype, t * weights_stride, chosen, k)
    work[0] = ZERO  # an array is freed after its last use, whoever has its address
    restore_floats(mode)


@parallel_kernel
def gating_parallel(
    weights, expert_ids, scores, logits, bias, given_ids, weights_dtype, logits_dtype, num_experts, k, weights_stride,
    ids_stride, scores_stride, logits_stride, given_stride, score, num_groups, topk_groups, top2, renormalize,
    scaling, eps, n, chunks,
):  # fmt: skip
    for c in prange(chunks):
        gating_body(
            weights, expert_ids, scores, logits, bias, given_ids, weights_dtype, logits_dtype, num_experts, k,
            weights_stride, ids_stride, scores_stride, logits_stride, given_stride, score, num_groups, topk_groups,
            top2, renormalize, scaling, eps, c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


# ---------------------------------------------------------------------------- kernels: backward
#
# Rows are taken 64 at a time. Their slots are laid out slot by slot, one lane for each row, so that the
# ordered sums and the quotients of 64 rows are one block operation each: 1 ns a row with 8 slots, where
# row by row they took 9. Lanes without a row hold anything.


@kernel
def gather_slots(target, source, stride, k, rows):
    """From rows of slots to blocks of rows."""
    for p in range(0, k, TILE):
        for r in range(0, rows, TILE):
            transpose(target, p * LANES + r, advance(source, r * stride + p), stride, rows - r, k - p)


@kernel
def gather_gradients(grads, source, dtype, offset, stride, k, rows):
    if dtype == FLOAT32:
        gather_slots(grads, advance(source, offset), stride, k, rows)
    elif dtype == BFLOAT16:
        gather_slots(grads, advance(retyped(source, "bfloat16"), offset), stride, k, rows)
    else:
        gather_slots(grads, advance(retyped(source, "float16"), offset), stride, k, rows)


@kernel
def check_ids(ids, k, num_experts):
    """A slot without an expert gets a negative id, another one than the row's other slots."""
    for p in range(k):
        e = load_ints(ids, p * LANES)
        inside = (e > ints(NO_EXPERT)) & (ints(np.int32(num_experts)) > e)
        store_ints(ids, p * LANES, choose(inside, e, ints(np.int32(-1 - p))))


@kernel
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


@kernel
def if_live(ids, i, block):
    """+0 where there is no expert, which changes no sum that began at +0."""
    return choose(load_ints(ids, i) > ints(NO_EXPERT), block, zeros())


@kernel
def softmax_over_blocks(chosen, ids, end):
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


@kernel
def score_gradients(grads, chosen, ids, score, k, renormalize, scaling, eps):
    """From the gradients of the weights to those of the scores, slot by slot; returns gamma."""
    end = k * LANES
    if score == TOPK_SOFTMAX:
        softmax_over_blocks(chosen, ids, end)
    for i in range(0, end, LANES):
        store(grads, i, load(grads, i) * splat(scaling))
    if renormalize:
        total, beta = zeros(), zeros()
        for i in range(0, end, LANES):
            total = total + if_live(ids, i, load(chosen, i))
        total = total + splat(eps)
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
    return gamma


@kernel
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


@kernel
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


@kernel
def sigmoid_slope(s):
    return s * (splat(ONE) - s)


@kernel
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


@kernel
def put_product(out, j, slope, grad_scores, count):
    """Slope times the gradient of the scores, +0 where there is none."""
    if not is_null(grad_scores):
        put(out, j, slope * (zeros() + some(grad_scores, j, count)), count)
    elif count == LANES:
        store_zeros(out, j, slope * zeros())
    else:
        store_tail(out, j, slope * zeros(), count)


@kernel
def backward_row(out, scores, grad_scores, score, gamma, num_experts):
    """The row as if nothing had been chosen.

    A loop for each score: one for all would load the many constants of sqrtsoftplus for every row, 10 ns.
    """
    if score == SOFTMAX:
        for j in range(0, num_experts, LANES):
            count = min(LANES, num_experts - j)
            total = zeros()
            if not is_null(grad_scores):
                total = total + some(grad_scores, j, count)
            put(out, j, some(scores, j, count) * (total - gamma), count)
    elif score == SIGMOID:
        for j in range(0, num_experts, LANES):
            count = min(LANES, num_experts - j)
            put_product(out, j, sigmoid_slope(some(scores, j, count)), grad_scores, count)
    elif score == SQRTSOFTPLUS:
        for j in range(0, num_experts, LANES):
            count = min(LANES, num_experts - j)
            put_product(out, j, sqrtsoftplus_slope(some(scores, j, count)), grad_scores, count)
    else:
        for j in range(0, num_experts, LANES):
            put_product(out, j, splat(ONE), grad_scores, min(LANES, num_experts - j))


@kernel
def backward_rows(
    out, out_bits, values, value_bits, grads, scores, grad_scores, ids, gammas, score, k, num_experts,
    out_stride, scores_stride, grad_scores_stride, rows,
):  # fmt: skip
    """Each row as if nothing had been chosen, then the slots' gradients over it.

    `values` is the memory of `grads`, narrowed from its beginning on: no block is written before it was read.
    """
    for i in range(0, k * LANES, LANES):
        store(values, i, load(grads, i))
    for lane in range(rows):
        extra = grad_scores
        if not is_null(grad_scores):
            extra = advance(grad_scores, lane * grad_scores_stride)
        row = advance(out, lane * out_stride)
        backward_row(row, advance(scores, lane * scores_stride), extra, score, splat(gammas[lane]), num_experts)
        row_bits = advance(out_bits, lane * out_stride)
        for i in range(lane, lane + k * LANES, LANES):
            if ids[i] >= 0:
                row_bits[ids[i]] = value_bits[i]


@kernel
def backward_body(
    out, scores, grad_weights, expert_ids, grad_scores, out_dtype, grad_weights_dtype,
    num_experts, k, out_stride, scores_stride, grad_weights_stride, ids_stride, grad_scores_stride, score, renormalize,
    scaling, eps, lo, hi,
):  # fmt: skip
    mode = exact_floats()
    size = (k + TILE) * LANES
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
        score_rows = advance(scores, t * scores_stride)
        extra_rows = grad_scores
        gather_slots(ids, advance(expert_ids, t * ids_stride), ids_stride, k, rows)
        check_ids(ids, k, num_experts)
        gather_elements(chosen, score_rows, ids, scores_stride, k, rows)
        gather_gradients(grads, grad_weights, grad_weights_dtype, t * grad_weights_stride, grad_weights_stride, k, rows)
        gamma = score_gradients(grads, chosen, ids, score, k, renormalize, scaling, eps)
        if not is_null(grad_scores):
            extra_rows = advance(grad_scores, t * grad_scores_stride)
            gather_elements(extra, extra_rows, ids, grad_scores_stride, k, rows)
            if score == SOFTMAX:
                for r in range(rows):
                    s, d = r * scores_stride, r * grad_scores_stride
                    gammas[r] = dot_row(score_rows, s, extra_rows, d, score_rows, -1, num_experts)
                gamma = gamma + load(gammas, 0)
        store(gammas, 0, gamma)
        repeats = rows_with_repeats(ids, k)
        if repeats != 0:
            for r in range(rows):
                if (repeats >> np.uint64(r)) & np.uint64(1):
                    add_repeats(grads, ids, sums, k, r)
        logit_gradients(grads, chosen, extra, grad_scores, score, gamma, k)
        offset = t * out_stride
        if out_dtype == FLOAT32:
            row = advance(out, offset)
            backward_rows(
                row, retyped(row, "int32"), grads, retyped(grads, "int32"), grads, score_rows, extra_rows, ids,
                gammas, score, k, num_experts, out_stride, scores_stride, grad_scores_stride, rows,
            )  # fmt: skip
        elif out_dtype == BFLOAT16:
            brow = advance(retyped(out, "bfloat16"), offset)
            backward_rows(
                brow, retyped(brow, "int16"), retyped(grads, "bfloat16"), retyped(grads, "int16"), grads, score_rows,
                extra_rows, ids, gammas, score, k, num_experts, out_stride, scores_stride, grad_scores_stride, rows,
            )  # fmt: skip
        else:
            hrow = advance(retyped(out, "float16"), offset)
            backward_rows(
                hrow, retyped(hrow, "int16"), retyped(grads, "float16"), retyped(grads, "int16"), grads, score_rows,
                extra_rows, ids, gammas, score, k, num_experts, out_stride, scores_stride, grad_scores_stride, rows,
            )  # fmt: skip
    work[0] = ZERO  # an array is freed after its last use, whoever has its address
    restore_floats(mode)


@parallel_kernel
def backward_parallel(
    out, scores, grad_weights, expert_ids, grad_scores, out_dtype, grad_weights_dtype,
    num_experts, k, out_stride, scores_stride, grad_weights_stride, ids_stride, grad_scores_stride, score, renormalize,
    scaling, eps, n, chunks,
):  # fmt: skip
    for c in prange(chunks):
        backward_body(
            out, scores, grad_weights, expert_ids, grad_scores, out_dtype, grad_weights_dtype, num_experts, k,
            out_stride, scores_stride, grad_weights_stride, ids_stride, grad_scores_stride, score, renormalize,
            scaling, eps, c * n // chunks, (c + 1) * n // chunks,
        )  # fmt: skip


# ---------------------------------------------------------------------------- launchers


_forward_types = (
    float32_ptr, int32_ptr, float32_ptr, float32_ptr, float32_ptr, int32_ptr, *[int64] * 12, boolean, boolean,
    float32, float32,
)  # fmt: skip
_backward_types = (
    float32_ptr, float32_ptr, float32_ptr, int32_ptr, float32_ptr, *[int64] * 10, boolean, float32, float32
)  # fmt: skip
_forward = Kernel(gating_body, gating_parallel, lambda key: _forward_types, (None,))
_backward = Kernel(backward_body, backward_parallel, lambda key: _backward_types, (None,))

# What one expert of one row costs, in the bytes of `launch.SERIAL_WORK`: 1.6 ns and 0.1 ns measured.
FORWARD_BYTES, BACKWARD_BYTES = 16, 4


def _new(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if rows * columns <= SMALL:
        return empty(rows, columns, dtype=dtype, device=CPU)  # 0.4 µs less than the pool's way here
    return memory.empty((rows, columns), dtype)


def _rows(x: Tensor) -> Tensor:
    """The tensor itself where its rows are contiguous, whatever their distance; else a copy."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _int32_ids(expert_ids: Tensor, num_experts: int) -> Tensor:
    if expert_ids.dtype == torch.int32:
        return _rows(expert_ids)
    ids = expert_ids.to(torch.int64)  # looked at before it is narrowed
    return _rows(torch.where((ids >= 0) & (ids < num_experts), ids, -1).to(torch.int32))  # which keeps strides


def gating_topk(
    logits: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor | None,
    k: int,
    score: str,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    renormalize: bool,
    scaling_factor: float,
    eps: float,
    weights_dtype: torch.dtype,
    out: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, num_experts = logits.shape
    if out is None:
        weights, ids = _new(tokens, k, weights_dtype), _new(tokens, k, torch.int32)
        scores = _new(tokens, num_experts, torch.float32)
        weights_stride, ids_stride, scores_stride = k, k, num_experts
    else:
        weights, ids, scores = out
        weights_stride, ids_stride, scores_stride = weights.stride(0), ids.stride(0), scores.stride(0)
    logits_stride, inner = logits.stride()
    if inner != 1 and num_experts > 1:
        logits, logits_stride = logits.contiguous(), num_experts
    if bias is not None and not (bias.dtype is torch.float32 and bias.is_contiguous()):
        bias = bias.to(torch.float32).contiguous()
    if expert_ids is not None:
        expert_ids = _int32_ids(expert_ids, num_experts)
    _forward.run(None, tokens * num_experts * FORWARD_BYTES, (
        weights.data_ptr(), ids.data_ptr(), scores.data_ptr(), logits.data_ptr(),
        0 if bias is None else bias.data_ptr(), 0 if expert_ids is None else expert_ids.data_ptr(),
        FLOATS[weights_dtype], FLOATS[logits.dtype], num_experts, k, weights_stride, ids_stride, scores_stride,
        logits_stride, 0 if expert_ids is None else expert_ids.stride(0),
        SCORES[score], num_groups, topk_groups, group_score == "top2_sum", renormalize, scaling_factor, eps,
        0, tokens,
    ))  # fmt: skip
    return weights, ids, scores


def gating_topk_backward(
    scores: Tensor,
    grad_weights: Tensor,
    expert_ids: Tensor,
    grad_scores: Tensor | None,
    score: str,
    renormalize: bool,
    scaling_factor: float,
    eps: float,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    tokens, num_experts = scores.shape
    k = expert_ids.shape[1]
    if out is None:
        out = _new(tokens, num_experts, out_dtype)
    scores, grad_weights, expert_ids = _rows(scores), _rows(grad_weights), _int32_ids(expert_ids, num_experts)
    if grad_scores is not None:
        grad_scores = _rows(grad_scores)
    cost = tokens * num_experts * BACKWARD_BYTES
    _backward(
        None, tokens, cost,
        out.data_ptr(), scores.data_ptr(), grad_weights.data_ptr(), expert_ids.data_ptr(),
        0 if grad_scores is None else grad_scores.data_ptr(),
        FLOATS[out_dtype], FLOATS[grad_weights.dtype], num_experts, k,
        out.stride(0), scores.stride(0), grad_weights.stride(0), expert_ids.stride(0),
        0 if grad_scores is None else grad_scores.stride(0),
        SCORES[score], renormalize, scaling_factor, eps,
    )  # fmt: skip
    return out
