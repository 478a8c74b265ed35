"""Elementary functions of blocks: exp, sigmoid, sqrtsoftplus and their slopes.

docs/arithmetic.md has the formulas, the numbers and why they give the same bits everywhere.
"""

import numpy as np

from moeroute.ops.numba_kit.blocks import splat, zeros
from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.lanes import bits, choose, floats, ints, square_root

HALF, ONE, TWO = map(np.float32, (0.5, 1, 2))
ONE_BIT, BIAS, MANTISSA = map(np.int32, (1, 127, 23))
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


@helper
def exp(x):
    """The project's own exp (docs/arithmetic.md): the same operations as in Triton, so the same bits."""
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


@helper
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return splat(ONE) / (splat(ONE) + exp(zeros() - x))


@helper
def sqrtsoftplus(x):
    """The square root of log(1 + e^x), by a series for log1p; the same operations as in Triton."""
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


@helper
def sigmoid_slope(s):
    """The derivative by the score s itself."""
    return s * (splat(ONE) - s)


@helper
def sqrtsoftplus_slope(s):
    """The derivative by the score s itself: (1 - e^(-s^2)) / 2s, by a series where s^2 < 1/2."""
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
