"""A random order of n items in constant memory: the i-th item is computed, not looked up.

A Feistel network over the mixed-radix digits (i // b, i % b) of i, with a * b just above n, and
cycle walking: a result outside 0..n-1 is encrypted again, so the map stays one-to-one on 0..n-1
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5;
the additive rounds over unequal halves are their generalised network). Since a * b - n < a, a
walk is taken once in about sqrt(n) draws. The round function is the finaliser of SplitMix64
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014): good
mixing, not secrecy.

No torch import.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

_ROUNDS = 6
_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class KeyedPermutation:
    """The numbers 0..size-1 in an order that `key` determines.

    Args:
        size: at least 1, below 2**62.
        key: integers and texts; equal keys give equal orders on every machine.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        if not 0 < size < 1 << 62:
            raise ValueError(f"a permutation of {size} things")
        self.size = size
        digest = hashlib.blake2b(repr((size, *key)).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(_ROUNDS)]
        root = math.isqrt(size - 1) + 1 if size > 1 else 1
        self._high = root
        self._low = -(-size // root)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        """Return the number at place `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"place {index} of a permutation of {self.size}")
        low = self._low
        while True:
            left, right = divmod(index, low)
            here, there = self._high, low
            for key in self._keys:
                mixed = ((right ^ key) * _FIRST) & _MASK
                mixed = ((mixed ^ (mixed >> 32)) * _SECOND) & _MASK
                # Swap the radices with the halves, so that each half keeps its own range.
                left, right = right, (left + (mixed ^ (mixed >> 31))) % here
                here, there = there, here
            index = left * low + right
            if index < self.size:
                return index

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Return the numbers at many places at once: int64, shaped as `indices`."""
        walking = np.asarray(indices).astype(np.uint64)
        if walking.size and int(walking.max()) >= self.size:
            raise IndexError(f"a place beyond a permutation of {self.size}")
        out = np.empty(walking.shape, np.int64).reshape(-1)
        walking = walking.reshape(-1)
        places = np.arange(walking.size)
        low, size = np.uint64(self._low), np.uint64(self.size)
        while walking.size:
            left, right = walking // low, walking % low
            here, there = np.uint64(self._high), low
            for key in self._keys:
                mixed = (right ^ np.uint64(key)) * np.uint64(_FIRST)
                mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(_SECOND)
                mixed ^= mixed >> np.uint64(31)
                # The sum must not pass 2**64: the scalar form has no such limit.
                left, right = right, (left + mixed % here) % here
                here, there = there, here
            walking = left * low + right
            inside = walking < size
            out[places[inside]] = walking[inside].astype(np.int64)
            walking, places = walking[~inside], places[~inside]
        return out.reshape(np.shape(indices))
