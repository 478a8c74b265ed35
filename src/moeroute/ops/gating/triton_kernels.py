"""Gating in Triton: the kernels. Their launchers are in on_triton.py.

A tile holds whole rows: the scores are made, stored and turned into integer keys in the order of the
values; the best key is taken out k times; the weights of the chosen ones are made of their logits, whose
scores come out with the same bits a second time. That is one launch. Rows that are too long for it, many
slots and many groups go through memory instead, one launch for each step. Every id is range-checked
before it is used.
"""

import triton
import triton.language as tl

from moeroute.ops.triton_kit import (
    PARTIAL_SUMS,
    narrow,
    sum_of_partials,
    widen,
)

SOFTMAX, SIGMOID, SQRTSOFTPLUS, TOPK_SOFTMAX, TOPK_SIGMOID, NONE = map(tl.constexpr, range(6))

# Keys: int32 in the order of the values.
LOWEST = tl.constexpr(-(2**31))  # below every value's key: no expert
MINUS_INFINITY_KEY = tl.constexpr(-2139095041)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
NO_EXPERT = tl.constexpr(2**31 - 1)
LOWEST_PLACE, HIGHEST_PLACE = map(tl.constexpr, (-(2**63), 2**63 - 1))

VARYING = ["tokens", "k", "topk_groups", "renormalize"]  # not worth a kernel of their own


# ---------------------------------------------------------------------------- kernels: elementary functions


@triton.jit
def exp(x):
    """The project's own exp (docs/arithmetic.md): the same operations as on the CPU, so the same bits."""
    x = tl.where(x > 89.0, 89.0, x)
    x = tl.where(x < -104.0, -104.0, x)
    shifted = x * 1.44269504 + 12582912.0
    n = shifted - 12582912.0
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = (y * r) * r + r
    y = y + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) - 0x4B400000  # bits, not a conversion: defined for NaN too
    half = exponent >> 1
    y = y * ((half + 127) << 23).to(tl.float32, bitcast=True)
    return y * ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sqrtsoftplus(x):
    """The square root of log(1 + e^x), by a series for log1p; the same operations as on the CPU."""
    positive = x > 0.0
    u = exp(tl.where(positive, 0.0 - x, x))
    q = tl.math.div_rn(u, u + 2.0)
    z = q * q
    p = z * (1.0 / 15.0) + (1.0 / 13.0)
    p = p * z + (1.0 / 11.0)
    p = p * z + (1.0 / 9.0)
    p = p * z + (1.0 / 7.0)
    p = p * z + (1.0 / 5.0)
    p = p * z + (1.0 / 3.0)
    p = p * z
    log1p = u - q * (u - (p + p))
    return tl.math.sqrt_rn(tl.where(positive, x, 0.0) + log1p)


@triton.jit
def sqrtsoftplus_slope(s):
    """The derivative by the score s itself: (1 - e^(-s^2)) / 2s, by a series where s^2 < 1/2."""
    z = s * s
    p = z * (-1.0 / 40320.0) + (1.0 / 5040.0)
    p = p * z + (-1.0 / 720.0)
    p = p * z + (1.0 / 120.0)
    p = p * z + (-1.0 / 24.0)
    p = p * z + (1.0 / 6.0)
    p = p * z + -0.5
    p = p * z + 1.0
    return tl.where(z < 0.5, (s * 0.5) * p, tl.math.div_rn(1.0 - exp(0.0 - z), s + s))


@triton.jit
def score_of(x, top, total, SCORE: tl.constexpr):
    """`top` and `total`, the largest logit and the sum of the row, are softmax's."""
    if SCORE == SOFTMAX:
        return tl.math.div_rn(exp(x - top), total)
    elif SCORE == SIGMOID:
        e = exp(0.0 - x)
        return tl.math.div_rn(tl.full(e.shape, 1.0, tl.float32), e + 1.0)
    elif SCORE == SQRTSOFTPLUS:
        return sqrtsoftplus(x)
    else:
        return x


@triton.jit
def largest(x):
    """[rows, n] -> [rows]: NaN is passed over."""
    return tl.max(tl.where(x == x, x, float("-inf")), axis=1)


@triton.jit
def softmax_of_row(logits_row, live, num_experts, ROWS: tl.constexpr):
    """The largest logit and the sum of the exponentials, [rows, 1] both, walking through the row twice."""
    columns = tl.arange(0, PARTIAL_SUMS)[None, :]
    most = tl.full((ROWS, PARTIAL_SUMS), float("-inf"), tl.float32)
    for start in range(0, num_experts, PARTIAL_SUMS):
        at = start + columns
        x = widen(tl.load(logits_row + at, mask=live & (at < num_experts), other=float("-inf")))
        most = tl.where(x > most, x, most)
    top = tl.max(most, axis=1)[:, None]
    partial = tl.zeros((ROWS, PARTIAL_SUMS), tl.float32)
    for start in range(0, num_experts, PARTIAL_SUMS):
        at = start + columns
        x = widen(tl.load(logits_row + at, mask=live & (at < num_experts), other=float("-inf")))
        partial = partial + exp(x - top)
    return top, sum_of_partials(partial)[:, None]


@triton.jit
def add_in_order(total, x):
    """total + x[:, 0] + x[:, 1] + ...; one addend of each sum is no zero."""
    slot = tl.arange(0, x.shape[1])[None, :]
    for p in tl.static_range(x.shape[1]):
        total = total + tl.sum(tl.where(slot == p, x, 0.0), axis=1)
    return total


# ---------------------------------------------------------------------------- kernels: order


@triton.jit
def order_key(value):
    """An int32 that orders as the float does: -0 equals +0, NaN above everything."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0 becomes +0
    return tl.where(value == value, bits ^ ((bits >> 31) & MAGNITUDE), MAGNITUDE)


@triton.jit
def place_of(key, index):
    """An integer in the order of the keys, equal ones by smaller index first."""
    return (key.to(tl.int64) << 32) | (index ^ NO_EXPERT).to(tl.int64)


@triton.jit
def value_of_key(key):
    """The float that `order_key` was made of; NaN has one key and comes back as one NaN."""
    return (key ^ ((key >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def mask_groups(key, num_groups, topk_groups, GROUP_BEST: tl.constexpr):
    """-inf for every expert outside the best groups; key is [rows, groups, members]."""
    best = tl.max(key, axis=2)
    if GROUP_BEST > 1:
        index = tl.arange(0, key.shape[2])[None, None, :]
        left, total = key, value_of_key(best)
        for _ in range(1, GROUP_BEST):
            where = tl.min(tl.where(left == best[:, :, None], index, NO_EXPERT), axis=2)
            left = tl.where(index == where[:, :, None], LOWEST, left)
            best = tl.max(left, axis=2)
            total = total + value_of_key(best)
        best = order_key(total)
    group = tl.arange(0, key.shape[1])
    best = tl.where(group[None, :] < num_groups, best, LOWEST)
    one, other = best[:, :, None], best[:, None, :]
    before = (other > one) | ((other == one) & (group[None, None, :] < group[None, :, None]))
    rank = tl.sum(before.to(tl.int32), axis=2)
    kept = (rank < topk_groups)[:, :, None] | (key == LOWEST)
    return tl.where(kept, key, MINUS_INFINITY_KEY)


# ---------------------------------------------------------------------------- kernels: forward, a tile of rows


@triton.jit(do_not_specialize=VARYING)
def gating_tile(
    weights, expert_ids, scores, logits, bias, given_ids, tokens, num_experts, k, weights_stride, ids_stride,
    scores_stride, logits_stride, given_stride, group_size, topk_groups, renormalize, scaling, eps,
    SCORE: tl.constexpr, GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Everything for ROWS rows; k <= SLOTS. Each of GROUPS groups has its own BLOCK / GROUPS columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < tokens)[:, None]
    column = tl.arange(0, BLOCK)
    expert, inside = column, column < num_experts
    if GROUPS > 1:
        MEMBERS: tl.constexpr = BLOCK // GROUPS
        member = column % MEMBERS
        expert = (column // MEMBERS) * group_size + member
        inside = (member < group_size) & (expert < num_experts)
    mask = live & inside[None, :]
    logits_row = logits + row[:, None] * logits_stride

    top, total = 0.0, 1.0
    # Before x is loaded: behind it, the layout of the sum by pairs, a whole row in each thread, spreads to x.
    if SCORE == SOFTMAX and (BLOCK > PARTIAL_SUMS or GROUPS > 1):
        top, total = softmax_of_row(logits_row, live, num_experts, ROWS)
    x = widen(tl.load(logits_row + expert[None, :], mask=mask, other=float("-inf")))
    if SCORE == SOFTMAX and not (BLOCK > PARTIAL_SUMS or GROUPS > 1):
        top = largest(x)[:, None]
        total = sum_of_partials(exp(x - top))[:, None]
    s = score_of(x, top, total, SCORE)
    tl.store(scores + row[:, None] * scores_stride + expert[None, :], s, mask=mask)

    slot = tl.arange(0, SLOTS)[None, :]
    used = live & (slot < k)
    if given_ids is None:
        value = s
        if bias is not None:
            value = value + widen(tl.load(bias + expert, mask=inside, other=0.0))[None, :]
        key = tl.where(mask, order_key(value), LOWEST)
        if GROUPS > 1:
            members = tl.reshape(key, (ROWS, GROUPS, BLOCK // GROUPS))
            members = mask_groups(members, num_experts // group_size, topk_groups, GROUP_BEST)
            key = tl.reshape(members, (ROWS, BLOCK))
        index = tl.where(inside, expert, NO_EXPERT)[None, :]  # `expert` of a group's spare columns is another's
        bits = s.to(tl.int32, bitcast=True)
        ids = tl.full((ROWS, SLOTS), -1, tl.int32)
        found = tl.zeros((ROWS, SLOTS), tl.int32)
        for p in range(k):
            best = tl.max(key, axis=1)[:, None]
            chosen = tl.min(tl.where(key == best, index, NO_EXPERT), axis=1)[:, None]
            here = index == chosen
            key = tl.where(here, LOWEST, key)
            ids = tl.where(slot == p, chosen, ids)
            found = tl.where(slot == p, tl.max(tl.where(here, bits, LOWEST), axis=1)[:, None], found)
        valid = used
        w = found.to(tl.float32, bitcast=True)
    else:
        given = tl.load(given_ids + row[:, None] * given_stride + slot, mask=used, other=0).to(tl.int64)
        valid = used & (given >= 0) & (given < num_experts)
        ids = tl.where(valid, given, -1).to(tl.int32)
        w = score_of(widen(tl.load(logits_row + ids, mask=valid, other=0.0)), top, total, SCORE)
    tl.store(expert_ids + row[:, None] * ids_stride + slot, ids, mask=used)

    none = tl.zeros((ROWS,), tl.float32)
    if SCORE == TOPK_SOFTMAX:
        w = exp(w - largest(tl.where(valid, w, float("-inf")))[:, None])
        w = tl.math.div_rn(w, add_in_order(none, tl.where(valid, w, 0.0))[:, None])
    elif SCORE == TOPK_SIGMOID:
        w = score_of(w, top, total, SIGMOID)
    denominator = none + 1.0
    if renormalize:
        denominator = add_in_order(none, tl.where(valid, w, 0.0)) + eps
    w = tl.where(valid, tl.math.div_rn(w, denominator[:, None]) * scaling, 0.0)
    tl.store(weights + row[:, None] * weights_stride + slot, narrow(w, weights.dtype.element_ty), mask=used)


# ---------------------------------------------------------------------------- kernels: forward, step by step


@triton.jit(do_not_specialize=VARYING)
def gating_scores(
    scores,
    logits,
    tokens,
    num_experts,
    scores_stride,
    logits_stride,
    SCORE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores of rows that are too long for one tile; `gating_sort` then selects from them."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    live = row < tokens
    logits_row = logits + row * logits_stride
    column = tl.arange(0, BLOCK)[None, :]
    top, total = 0.0, 1.0
    if SCORE == SOFTMAX:
        top, total = softmax_of_row(logits_row, live, num_experts, ROWS)
    for start in range(0, num_experts, BLOCK):
        at = start + column
        mask = live & (at < num_experts)
        x = widen(tl.load(logits_row + at, mask=mask, other=0.0))
        tl.store(scores + row * scores_stride + at, score_of(x, top, total, SCORE), mask=mask)


@triton.jit
def keys_of_row(values_row, bias, groups_row, last_group, live, at, inside, group_size):
    """The keys of the values `at` of each row; with values of groups, of which those that are not after the
    last chosen one stay."""
    mask = live & inside
    value = tl.load(values_row + at, mask=mask, other=0.0)
    if bias is not None:
        value = value + widen(tl.load(bias + at, mask=inside, other=0.0))
    key = order_key(value)
    if groups_row is not None:
        last = tl.load(last_group, mask=live, other=0)
        limit = order_key(tl.load(groups_row + last, mask=live, other=0.0))
        group = at // group_size
        mine = order_key(tl.load(groups_row + group, mask=mask, other=0.0))
        key = tl.where((mine > limit) | ((mine == limit) & (group <= last)), key, MINUS_INFINITY_KEY)
    return tl.where(mask, key, LOWEST)


@triton.jit(do_not_specialize=VARYING)
def gating_groups(
    group_values,
    scores,
    bias,
    tokens,
    num_experts,
    scores_stride,
    group_size,
    GROUP_BEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The value of each group of each row. A row of the tile is a group; each round looks for its best value after
    the last one."""
    num_groups = num_experts // group_size
    item = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, group = (item // num_groups)[:, None], (item % num_groups)[:, None]
    value = tl.zeros((ROWS,), tl.float32)
    last = tl.full((ROWS,), HIGHEST_PLACE, tl.int64)
    for _ in range(GROUP_BEST):
        best = tl.full((ROWS, BLOCK), LOWEST_PLACE, tl.int64)
        for start in range(0, group_size, BLOCK):
            member = start + tl.arange(0, BLOCK)[None, :]
            at = group * group_size + member
            inside = (row < tokens) & (member < group_size)
            key = keys_of_row(scores + row * scores_stride, bias, None, None, row < tokens, at, inside, group_size)
            place = place_of(key, member)
            best = tl.where((place > best) & (place < last[:, None]), place, best)
        last = tl.max(best, axis=1)
        value = value + value_of_key((last >> 32).to(tl.int32))
    tl.store(group_values + item, value, mask=item // num_groups < tokens)


@triton.jit
def merge_step(x, INNER: tl.constexpr, STEP: tl.constexpr):
    """Orders elements INNER apart: downwards in even runs of 2^STEP pairs of blocks, upwards in odd ones."""
    rows: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    blocks: tl.constexpr = n // (2 * INNER)
    pairs = tl.reshape(x, (rows * blocks, 2, INNER))
    run = (tl.arange(0, rows * blocks) % blocks) >> STEP
    down = ((run & 1) == 0)[:, None, None]
    other = tl.sum(pairs, axis=1)[:, None, :] - pairs  # exact: integers wrap around
    first = (tl.arange(0, 2)[None, :, None] == 0) == down
    return tl.reshape(tl.where((pairs > other) == first, pairs, other), (rows, n))


@triton.jit
def sort_descending(x, LOG2: tl.constexpr):
    """Each row of [rows, 2^LOG2], by bitonic merges; the last run is the row, downwards.

    Not tl.sort, which takes Triton's interpreter 25 s for a row of 8,192.
    """
    for size in tl.static_range(LOG2):
        for step in tl.static_range(size + 1):
            x = merge_step(x, 2 ** (size - step), step)
    return x


@triton.jit(do_not_specialize=VARYING)
def gating_sort(
    chosen, values, bias, group_values, groups, tokens, count, k, topk_groups, chosen_stride, values_stride,
    group_size, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    """The k best of up to BLOCK values of each row."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    live = row < tokens
    column = tl.arange(0, BLOCK)[None, :]
    groups_row, last_group = None, None
    if group_values is not None:
        groups_row = group_values + row * (count // group_size)
        last_group = groups + row * topk_groups + (topk_groups - 1)
    key = keys_of_row(
        values + row * values_stride, bias, groups_row, last_group, live, column, column < count, group_size
    )
    place = sort_descending(place_of(key, column), LOG2)
    index = place.to(tl.int32) ^ NO_EXPERT
    tl.store(chosen + row * chosen_stride + column, index, mask=live & (column < k))


@triton.jit(do_not_specialize=VARYING)
def gating_search(
    chosen, values, bias, group_values, groups, tokens, count, k, topk_groups, chosen_stride, values_stride,
    group_size, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for rows of any length: each round looks for the best place after the last one."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    live = row < tokens
    column = tl.arange(0, BLOCK)[None, :]
    groups_row, last_group = None, None
    if group_values is not None:
        groups_row = group_values + row * (count // group_size)
        last_group = groups + row * topk_groups + (topk_groups - 1)
    values_row = values + row * values_stride
    last = tl.full((ROWS,), HIGHEST_PLACE, tl.int64)
    for p in range(k):
        best = tl.full((ROWS, BLOCK), LOWEST_PLACE, tl.int64)
        for start in range(0, count, BLOCK):
            at = start + column
            key = keys_of_row(values_row, bias, groups_row, last_group, live, at, at < count, group_size)
            place = place_of(key, at)
            best = tl.where((place > best) & (place < last[:, None]), place, best)
        last = tl.max(best, axis=1)
        index = last[:, None].to(tl.int32) ^ NO_EXPERT
        tl.store(chosen + row * chosen_stride + p, index, mask=live)


# ---------------------------------------------------------------------------- kernels: slots, a few at a time


@triton.jit
def load_slots(scores_row, ids_row, slot, used, num_experts):
    """The expert of each slot, -1 for none; where there is one; its score."""
    e = tl.load(ids_row + slot, mask=used, other=0).to(tl.int64)
    valid = used & (e >= 0) & (e < num_experts)
    s = tl.load(scores_row + e, mask=valid, other=0.0)
    return tl.where(valid, e, -1).to(tl.int32), valid, s


@triton.jit
def softmax_over_slots(scores_row, ids_row, live, num_experts, k, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """The largest chosen logit, and the sum of the exponentials."""
    slots = tl.arange(0, SLOTS)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for start in range(0, k, SLOTS):
        slot = start + slots
        _, valid, x = load_slots(scores_row, ids_row, slot, live & (slot < k), num_experts)
        most = largest(tl.where(valid, x, float("-inf")))
        top = tl.where(most > top, most, top)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, k, SLOTS):
        slot = start + slots
        _, valid, x = load_slots(scores_row, ids_row, slot, live & (slot < k), num_experts)
        total = add_in_order(total, tl.where(valid, exp(x - top[:, None]), 0.0))
    return top[:, None], total[:, None]


@triton.jit
def weight_of(s, top, total, SCORE: tl.constexpr):
    """What is renormalised and scaled: the score, or the softmax or the sigmoid of the chosen logits."""
    if SCORE == TOPK_SOFTMAX:
        return tl.math.div_rn(exp(s - top), total)
    elif SCORE == TOPK_SIGMOID:
        return score_of(s, top, total, SIGMOID)
    else:
        return s


@triton.jit
def sum_of_weights(
    scores_row,
    ids_row,
    live,
    num_experts,
    k,
    top,
    total,
    SCORE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The sum of the chosen weights in the order of the slots, as a column."""
    found = tl.zeros((ROWS,), tl.float32)
    for start in range(0, k, SLOTS):
        slot = start + tl.arange(0, SLOTS)[None, :]
        _, valid, s = load_slots(scores_row, ids_row, slot, live & (slot < k), num_experts)
        found = add_in_order(found, tl.where(valid, weight_of(s, top, total, SCORE), 0.0))
    return found[:, None]


@triton.jit(do_not_specialize=VARYING)
def gating_weights(
    weights, expert_ids, scores, ids, tokens, num_experts, k, weights_stride, expert_ids_stride, scores_stride,
    ids_stride, renormalize, scaling, eps, SCORE: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The weights of chosen or given `ids`, which may be the `expert_ids` themselves."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    live = row < tokens
    scores_row, ids_row = scores + row * scores_stride, ids + row * ids_stride
    top, total = 0.0, 1.0
    if SCORE == TOPK_SOFTMAX:
        top, total = softmax_over_slots(scores_row, ids_row, live, num_experts, k, ROWS, SLOTS)
    denominator = tl.full((ROWS, 1), 1.0, tl.float32)
    if renormalize:
        denominator = eps + sum_of_weights(scores_row, ids_row, live, num_experts, k, top, total, SCORE, ROWS, SLOTS)
    for start in range(0, k, SLOTS):
        slot = start + tl.arange(0, SLOTS)[None, :]
        used = live & (slot < k)
        e, valid, s = load_slots(scores_row, ids_row, slot, used, num_experts)
        w = tl.math.div_rn(weight_of(s, top, total, SCORE), denominator)
        w = tl.where(valid, w * scaling, 0.0)
        tl.store(expert_ids + row * expert_ids_stride + slot, e, mask=used)
        tl.store(weights + row * weights_stride + slot, narrow(w, weights.dtype.element_ty), mask=used)


# ---------------------------------------------------------------------------- kernels: backward


@triton.jit(do_not_specialize=VARYING)
def gating_backward(
    out, scores, grad_weights, ids, grad_scores, tokens, num_experts, k, out_stride, scores_stride,
    grad_weights_stride, ids_stride, grad_scores_stride, renormalize, scaling, eps,
    SCORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The slots of ROWS rows, SLOTS at a time; then the rows themselves, BLOCK elements at a time."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    live = row < tokens
    scores_row, ids_row = scores + row * scores_stride, ids + row * ids_stride
    grad_row = grad_weights + row * grad_weights_stride
    slots, columns = tl.arange(0, SLOTS)[None, :], tl.arange(0, BLOCK)[None, :]

    top, total = 0.0, 1.0
    if SCORE == TOPK_SOFTMAX:
        top, total = softmax_over_slots(scores_row, ids_row, live, num_experts, k, ROWS, SLOTS)
    denominator = tl.full((ROWS, 1), 1.0, tl.float32)
    beta = tl.zeros((ROWS, 1), tl.float32)
    if renormalize:
        denominator = eps + sum_of_weights(scores_row, ids_row, live, num_experts, k, top, total, SCORE, ROWS, SLOTS)
        found = tl.zeros((ROWS,), tl.float32)
        for start in range(0, k, SLOTS):
            slot = start + slots
            used = live & (slot < k)
            e, valid, s = load_slots(scores_row, ids_row, slot, used, num_experts)
            g = widen(tl.load(grad_row + slot, mask=used, other=0.0)) * scaling
            share = tl.math.div_rn(weight_of(s, top, total, SCORE), denominator)
            found = add_in_order(found, tl.where(valid, share * g, 0.0))
        beta = found[:, None]
    gamma = tl.zeros((ROWS, 1), tl.float32)
    if SCORE == SOFTMAX or SCORE == TOPK_SOFTMAX:  # noqa: SIM109  Triton knows no `in`
        found = tl.zeros((ROWS,), tl.float32)
        for start in range(0, k, SLOTS):
            slot = start + slots
            used = live & (slot < k)
            e, valid, s = load_slots(scores_row, ids_row, slot, used, num_experts)
            g = widen(tl.load(grad_row + slot, mask=used, other=0.0)) * scaling
            g = tl.math.div_rn(g - beta, denominator)
            found = add_in_order(found, tl.where(valid, weight_of(s, top, total, SCORE) * g, 0.0))
        gamma = found[:, None]
    slots_gamma = gamma
    if SCORE == SOFTMAX and grad_scores is not None:
        WIDTH: tl.constexpr = BLOCK if BLOCK < PARTIAL_SUMS else PARTIAL_SUMS
        partial = tl.zeros((ROWS, WIDTH), tl.float32)
        for start in range(0, num_experts, WIDTH):
            at = start + tl.arange(0, WIDTH)[None, :]
            mask = live & (at < num_experts)
            d = tl.load(grad_scores + row * grad_scores_stride + at, mask=mask, other=0.0)
            partial = partial + tl.load(scores_row + at, mask=mask, other=0.0) * d
        gamma = gamma + sum_of_partials(partial)[:, None]

    for first in range(0, num_experts, BLOCK):
        at = first + columns
        mask = live & (at < num_experts)
        grad = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, k, SLOTS):
            slot = start + slots
            used = live & (slot < k)
            e, valid, s = load_slots(scores_row, ids_row, slot, used, num_experts)
            g = widen(tl.load(grad_row + slot, mask=used, other=0.0)) * scaling
            g = tl.math.div_rn(g - beta, denominator)
            if SCORE == TOPK_SOFTMAX:
                g = weight_of(s, top, total, SCORE) * (g - slots_gamma)
            elif SCORE == TOPK_SIGMOID:
                w = weight_of(s, top, total, SCORE)
                g = (w * (1.0 - w)) * g
            g = tl.where(valid, g, 0.0)
            for p in range(tl.minimum(k - start, SLOTS)):
                here = at == tl.sum(tl.where(slots == p, e, 0), axis=1)[:, None]
                grad = tl.where(here, grad + tl.sum(tl.where(slots == p, g, 0.0), axis=1)[:, None], grad)
        if grad_scores is not None:
            grad = grad + tl.load(grad_scores + row * grad_scores_stride + at, mask=mask, other=0.0)
        s = tl.load(scores_row + at, mask=mask, other=0.0)
        if SCORE == SOFTMAX:
            grad = s * (grad - gamma)
        elif SCORE == SIGMOID:
            grad = (s * (1.0 - s)) * grad
        elif SCORE == SQRTSOFTPLUS:
            grad = sqrtsoftplus_slope(s) * grad
        tl.store(out + row * out_stride + at, narrow(grad, out.dtype.element_ty), mask=mask)
