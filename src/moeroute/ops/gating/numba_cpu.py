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
    EIGHT,
    LANES,
    advance,
    bits,
    choose,
    fill,
    float32_ptr,
    floats,
    gather8,
    inside8,
    int32_ptr,
    ints,
    is_null,
    lane_bits,
    lane_numbers,
    lanes_below,
    largest,
    load,
    load8,
    load_ints,
    load_tail,
    lowest_bit,
    ordered_sum8,
    pairwise,
    pointer_to,
    repeated8,
    retyped,
    scatter8,
    splat,
    square_root,
    store,
    store8,
    store_ints,
    store_tail,
    store_zeros,
    two_largest,
    zeros,
)

SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "topk_softmax": 3}
SOFTMAX, SIGMOID, SQRTSOFTPLUS, TOPK_SOFTMAX = range(4)
SMALL = memory.SMALLEST // 8  # elements that the pool does not care for, whatever their dtype
empty = torch.empty
ROWS_AT_ONCE = 4  # of the backward
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT32, BFLOAT16, FLOAT16 = range(3)

ZERO, HALF, ONE, TWO = map(np.float32, (0, 0.5, 1, 2))
INFINITY = np.float32(np.inf)
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
    x = choose(x > fill(x, EXP_HIGH), fill(x, EXP_HIGH), x)
    x = choose(fill(x, EXP_LOW) > x, fill(x, EXP_LOW), x)
    shifted = x * fill(x, LOG2_E) + fill(x, MAGIC)
    n = shifted - fill(x, MAGIC)
    r = x - n * fill(x, LN2_HIGH)
    r = r - n * fill(x, LN2_LOW)
    y = fill(x, E5) * r + fill(x, E4)
    y = y * r + fill(x, E3)
    y = y * r + fill(x, E2)
    y = y * r + fill(x, E1)
    y = y * r + fill(x, E0)
    y = (y * r) * r + r
    y = y + fill(x, ONE)
    exponent = bits(shifted) - fill(x, MAGIC_BITS)  # bits, not a conversion: defined for NaN too
    half = exponent >> fill(x, ONE_BIT)
    y = y * floats((half + fill(x, BIAS)) << fill(x, MANTISSA))
    return y * floats((exponent - half + fill(x, BIAS)) << fill(x, MANTISSA))


@kernel
def sigmoid(x):
    return fill(x, ONE) / (fill(x, ONE) + exp(fill(x, ZERO) - x))


@kernel
def sqrtsoftplus(x):
    positive = x > fill(x, ZERO)
    u = exp(choose(positive, fill(x, ZERO) - x, x))
    q = u / (fill(x, TWO) + u)
    z = q * q
    p = fill(x, L15) * z + fill(x, L13)
    p = p * z + fill(x, L11)
    p = p * z + fill(x, L9)
    p = p * z + fill(x, L7)
    p = p * z + fill(x, L5)
    p = p * z + fill(x, L3)
    p = p * z
    log1p = u - q * (u - (p + p))
    return square_root(choose(positive, x, fill(x, ZERO)) + log1p)


@kernel
def sqrtsoftplus_slope(s):
    z = s * s
    p = fill(s, S7) * z + fill(s, S6)
    p = p * z + fill(s, S5)
    p = p * z + fill(s, S4)
    p = p * z + fill(s, S3)
    p = p * z + fill(s, S2)
    p = p * z + fill(s, S1)
    p = p * z + fill(s, ONE)
    direct = (fill(s, ONE) - exp(fill(s, ZERO) - z)) / (s + s)
    return choose(fill(s, HALF) > z, (s * fill(s, HALF)) * p, direct)


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


@kernel
def backward_block(s, grad, score, gamma):
    """From the gradient of the scores to the gradient of the logits."""
    if score == SOFTMAX:
        return s * (grad - fill(s, gamma))
    if score == SIGMOID:
        return (s * (fill(s, ONE) - s)) * grad
    if score == SQRTSOFTPLUS:
        return sqrtsoftplus_slope(s) * grad
    return grad


@kernel
def backward_row(out, scores, grad_scores, ids, grad, spare, score, gamma, num_experts, k):
    """The row as if nothing had been chosen, then the chosen experts' gradients over it."""
    whole = num_experts - num_experts % LANES
    if is_null(grad_scores) and score != SOFTMAX:
        for j in range(0, whole, LANES):
            store_zeros(out, j, backward_block(load(scores, j), zeros(), score, gamma))
    else:
        for j in range(0, whole, LANES):
            total = zeros()
            if not is_null(grad_scores):
                total = total + load(grad_scores, j)
            store(out, j, backward_block(load(scores, j), total, score, gamma))
    if whole < num_experts:
        count = num_experts - whole
        total = zeros()
        if not is_null(grad_scores):
            total = total + load_tail(grad_scores, whole, count)
        store_tail(out, whole, backward_block(load_tail(scores, whole, count), total, score, gamma), count)
    for p in range(0, k, EIGHT):
        e = load8(ids, p, k - p)
        scatter8(out, e, inside8(e, num_experts), load8(grad, p, EIGHT), spare)


@kernel
def load_gradients8(source, dtype, offset, count):
    if dtype == FLOAT32:
        return load8(source, offset, count)
    if dtype == BFLOAT16:
        return load8(retyped(source, "bfloat16"), offset, count)
    return load8(retyped(source, "float16"), offset, count)


@kernel
def eight_slots(grad, weights_grad, scores, ids, grad_scores, dot, score, k, num_experts, renormalize, eps):
    """The gradients of up to eight chosen logits, and the softmax's sum of score times gradient.

    All slots at once, in registers: 31 ns a row with 8 of 256 experts, 45 with a loop for each step. A
    slot without an expert counts as +0 in the sums, which changes none that began at +0. The last is
    False where an expert was met twice: then the row is `any_slots`' to do.
    """
    e = load8(ids, 0, k)
    live = inside8(e, num_experts)
    w = gather8(scores, e, live)
    none = fill(w, ZERO)
    g = weights_grad
    if renormalize:
        denominator = fill(w, ordered_sum8(ZERO, w) + eps)
        beta = ordered_sum8(ZERO, choose(live, (w / denominator) * g, none))
        g = (g - fill(w, beta)) / denominator
    gamma = ZERO
    if score == SOFTMAX:
        gamma = ordered_sum8(ZERO, choose(live, w * g, none))
        if not is_null(grad_scores):
            gamma = gamma + dot
    g = none + g
    if not is_null(grad_scores):
        g = g + gather8(grad_scores, e, live)
    store8(grad, 0, backward_block(w, g, score, gamma))
    return gamma, not repeated8(e, live)


@kernel
def any_slots(grad, chosen, scores, ids, grad_scores, dot, total, score, k, num_experts, renormalize, eps):
    """The same for any number of slots and any score, one by one. `total` is zero before and after."""
    gather_chosen(chosen, scores, ids, score, k, num_experts)
    if renormalize:
        denominator = ZERO
        for p in range(k):
            if 0 <= ids[p] < num_experts:
                denominator = denominator + chosen[p]
        denominator = denominator + eps
        beta = ZERO
        for p in range(k):
            if 0 <= ids[p] < num_experts:
                beta = beta + (chosen[p] / denominator) * grad[p]
        for p in range(k):
            grad[p] = (grad[p] - beta) / denominator
    gamma = ZERO
    for p in range(k):
        if 0 <= ids[p] < num_experts:
            gamma = gamma + chosen[p] * grad[p]
    if score == TOPK_SOFTMAX:
        for p in range(k):
            grad[p] = chosen[p] * (grad[p] - gamma)
    if score == SOFTMAX and not is_null(grad_scores):
        gamma = gamma + dot
    for p in range(k):
        e = ids[p]
        if 0 <= e < num_experts:
            total[e] = total[e] + grad[p]
    for p in range(k):
        e = ids[p]
        if 0 <= e < num_experts:
            grad[p] = total[e] if is_null(grad_scores) else total[e] + grad_scores[e]
    for p in range(k):
        e = ids[p]
        if 0 <= e < num_experts:
            total[e] = ZERO
    for j in range(0, k, LANES):
        store(grad, j, backward_block(load(chosen, j), load(grad, j), score, gamma))
    return gamma


@kernel
def backward_body(
    out, scores, grad_weights, expert_ids, grad_scores, out_dtype, grad_weights_dtype,
    num_experts, k, out_stride, scores_stride, grad_weights_stride, ids_stride, grad_scores_stride, score, renormalize,
    scaling, eps, lo, hi,
):  # fmt: skip
    grad_size = k + LANES
    work = np.empty(num_experts + (ROWS_AT_ONCE + 1) * grad_size + ROWS_AT_ONCE, np.float32)
    total = pointer_to(work)
    chosen = advance(total, num_experts)
    grads = advance(chosen, grad_size)
    gammas = advance(grads, ROWS_AT_ONCE * grad_size)
    for e in range(num_experts):
        total[e] = ZERO
    for start in range(lo, hi, ROWS_AT_ONCE):
        # First the slots of several rows, then their elements: one row's slots are a chain of sums and
        # quotients, during which the processor has the other rows' to do.
        stop = min(start + ROWS_AT_ONCE, hi)
        for t in range(start, stop):
            score_row = advance(scores, t * scores_stride)
            ids = advance(expert_ids, t * ids_stride)
            extra = grad_scores
            if not is_null(grad_scores):
                extra = advance(grad_scores, t * grad_scores_stride)
            grad = advance(grads, (t - start) * grad_size)
            offset = t * grad_weights_stride
            gamma, done, dot = ZERO, False, ZERO
            if score == SOFTMAX and not is_null(grad_scores):
                dot = dot_row(score_row, 0, extra, 0, score_row, -1, num_experts)
            if k <= EIGHT and score != TOPK_SOFTMAX:
                g = load_gradients8(grad_weights, grad_weights_dtype, offset, k)
                gamma, done = eight_slots(
                    grad, g * fill(g, scaling), score_row, ids, extra, dot, score, k, num_experts, renormalize, eps
                )
            if not done:
                widen(grad, grad_weights, grad_weights_dtype, offset, k, ZERO)
                for p in range(k):
                    grad[p] = grad[p] * scaling
                gamma = any_slots(
                    grad, chosen, score_row, ids, extra, dot, total, score, k, num_experts, renormalize, eps
                )
            gammas[t - start] = gamma
        for t in range(start, stop):
            score_row = advance(scores, t * scores_stride)
            ids = advance(expert_ids, t * ids_stride)
            extra = grad_scores
            if not is_null(grad_scores):
                extra = advance(grad_scores, t * grad_scores_stride)
            grad = advance(grads, (t - start) * grad_size)
            gamma = gammas[t - start]
            offset = t * out_stride
            if out_dtype == FLOAT32:
                row = advance(out, offset)
                backward_row(row, score_row, extra, ids, grad, chosen, score, gamma, num_experts, k)
            elif out_dtype == BFLOAT16:
                brow = advance(retyped(out, "bfloat16"), offset)
                backward_row(brow, score_row, extra, ids, grad, chosen, score, gamma, num_experts, k)
            else:
                hrow = advance(retyped(out, "float16"), offset)
                backward_row(hrow, score_row, extra, ids, grad, chosen, score, gamma, num_experts, k)
    work[0] = ZERO  # an array is freed after its last use, whoever has its address


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

# What one expert of one row costs, in the bytes of `launch.SERIAL_WORK`: 1.6 ns and 0.3 ns measured.
FORWARD_BYTES, BACKWARD_BYTES = 16, 8


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
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1).to(torch.int32)


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
