"""Numbers for the inputs of cases: the same on every machine, in every version of NumPy and torch.

Counter-based: element i of a stream is SplitMix64's mixing function of (key + (i + 1) * 0x9E3779B97F4A7C15), where the
key is the first eight bytes (little-endian) of SHA-256 of the stream's name. Nothing depends on what was drawn before,
so a new case changes no other one. Floats are made of the hash's bits by exact operations:

    uniform   the top 24 bits times 2^-24: [0, 1)
    normal    the sum of the hash's four 16-bit parts, six bits more, as a 24-bit integer n: (n - 2^23) * 2^-21,
              bell-shaped over [-4, 4) with a standard deviation of about 1.15
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
STEP = np.uint64(0x9E3779B97F4A7C15)
# What `odd` puts among normal numbers: ties, zeros of both signs, subnormal numbers, infinities, NaN, a large one.
ODD = (0.0, -0.0, 1e-40, -1e-39, float("inf"), float("-inf"), float("nan"), 0.5, 0.5, 65504.0)


def mixed(words: Words) -> Words:
    """SplitMix64's output function, element by element.

    >>> [hex(int(word)) for word in mixed(np.array([0x9E3779B97F4A7C15], np.uint64))]
    ['0xe220a8397b1dcdaf']
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Stream:
    """Named streams of numbers: `Stream("case").normal("tokens", 4, 8)` is the same whenever it is asked for.

    >>> Stream("example").integers("ids", 0, 10, 5).tolist()
    [2, 2, 7, 8, 4]
    >>> Stream("example").uniform("weights", 2).tolist()
    [0.9512923955917358, 0.18110144138336182]
    """

    def __init__(self, name: str, seed: int = 0) -> None:
        """name: of all streams together; seed: other numbers under the same names."""
        self.name = name if seed == 0 else f"{name}#{seed}"

    def words(self, label: str, count: int) -> Words:
        """`count` hashes of 64 bits."""
        key = int.from_bytes(hashlib.sha256(f"{self.name}/{label}".encode()).digest()[:8], "little")
        with np.errstate(over="ignore"):
            return mixed(np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * STEP)

    def uniform(self, label: str, *shape: int) -> Tensor:
        """float32 in [0, 1), multiples of 2^-24."""
        words = self.words(label, int(np.prod(shape)))
        return torch.from_numpy((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).reshape(shape)

    def normal(self, label: str, *shape: int) -> Tensor:
        """float32 in [-4, 4), bell-shaped around 0, multiples of 2^-21."""
        words, part = self.words(label, int(np.prod(shape))), np.uint64(0xFFFF)
        total = (words & part) + (words >> np.uint64(16) & part) + (words >> np.uint64(32) & part)
        total = (total + (words >> np.uint64(48))) * np.uint64(64) + (mixed(words) >> np.uint64(58))
        centred = (total.astype(np.int64) - 2**23).astype(np.float32)
        return torch.from_numpy(centred * np.float32(2.0**-21)).reshape(shape)

    def integers(self, label: str, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        words = self.words(label, int(np.prod(shape)))
        return torch.from_numpy((words >> np.uint64(1)).astype(np.int64) % (high - low) + low).reshape(shape)

    def chance(self, label: str, share: float, *shape: int) -> Tensor:
        """bool, True with this probability."""
        return self.uniform(label, *shape) < share

    def permutation(self, label: str, count: int) -> Tensor:
        """int64, 0 ... count - 1 in some order."""
        return torch.from_numpy(np.argsort(self.words(label, count), kind="stable").astype(np.int64))

    def distinct(self, label: str, rows: int, count: int, chosen: int) -> Tensor:
        """int64 [rows, chosen]: in every row different numbers below `count`."""
        words = self.words(label, rows * count).reshape(rows, count)
        return torch.from_numpy(np.argsort(words, axis=1, kind="stable")[:, :chosen].astype(np.int64))

    def odd(self, label: str, values: Tensor, share: float = 0.06, kinds: Sequence[float] = ODD) -> Tensor:
        """A copy of float32 values with some of them replaced, see ODD. Every other line of a matrix stays as it is, so
        that not all sums are NaN.
        """
        words = self.words(f"{label}, odd", values.numel())
        chosen = (words >> np.uint64(40)) < np.uint64(share * 2**24)
        if values.ndim == 2:
            chosen = chosen & np.repeat(
                self.words(f"{label}, lines", len(values)) >> np.uint64(63) == 0, values.shape[1]
            )
        places = np.nonzero(chosen)[0]
        found = values.reshape(-1).numpy().copy()
        found[places] = np.array(kinds, np.float32)[(words[places] & np.uint64(0xFFFFFF)) % np.uint64(len(kinds))]
        return torch.from_numpy(found).reshape(values.shape)
