"""Call the functions of a library with random arrays, half of them hostile.

    python fuzz_native.py LIBRARY CASES [SEED]

A library that was compiled with sanitizers ends the process at the first access outside an array
and the first overflow. Whether results are right is other tests' matter; no torch import.
"""

import importlib.util
import sys
import sysconfig

import numpy as np

CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
EXTREMES = [0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, 2**63 - 9, -(2**63), 1 << 40]


class Cases:
    """Random arguments."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def number(self, high: int) -> int:
        """Return a small number, or an extreme one."""
        if self.random.random() < 0.2:
            return EXTREMES[self.random.integers(len(EXTREMES))]
        return int(self.random.integers(-1, high + 2))

    def array(self, kind: type, length: int, high: int) -> np.ndarray:
        """Return an array with an extreme value in every other one, at an odd address in some."""
        bits = np.iinfo(kind)
        values = self.random.integers(0, high + 1, length).astype(kind)
        if length and self.random.random() < 0.5:
            extreme = self.number(high)
            if bits.min <= extreme <= bits.max:
                values[self.random.integers(length)] = extreme
        if self.random.random() < 0.2:
            raw = np.empty(values.nbytes + 1, np.uint8)
            raw[1:] = values.view(np.uint8)
            return raw[1:]
        return values

    def size(self) -> int:
        """Return a length."""
        return int(self.random.integers(0, 12))

    def gather(self, library) -> None:
        code = self.random.choice(list(CODES)) if self.random.random() < 0.9 else self.number(9)
        wide = int(self.random.integers(2))
        kind = CODES.get(int(code), np.uint8)
        count = self.size()
        library.gather(
            self.array(kind, self.size() * 4, 100), int(code),
            self.array(np.int64, count, 40), self.array(np.int32, count, 12),
            self.array(np.int32, self.size(), max(count - 1, 0)),
            self.array(np.int64 if wide else np.int32, 2 * self.size(), 3), wide,
            self.array(np.int64 if wide else np.uint32, self.size(), 3), wide,
            self.number(3), int(self.random.integers(2)) if wide else self.number(1),
            self.number(200), np.zeros(self.size() * 4, np.int64),
        )  # fmt: skip

    def sample_index(self, library) -> None:
        wide, rows = bool(self.random.integers(2)), 1 + self.size()
        out = np.zeros((rows, 2), np.int64 if wide else np.int32)
        count = self.size()
        library.sample_index(
            self.array(np.int32, count, 9),
            self.array(np.int32, 1 + self.size(), max(count - 1, 0)),
            self.number(9), self.number(1), wide, out,
            rows - 1 if self.random.random() < 0.7 else self.number(9),
        )  # fmt: skip

    def walk_blend(self, library) -> None:
        count = 1 + self.size()
        weights = self.random.random(count)
        steps = self.size()
        picks = np.zeros(steps, np.int16)
        if self.random.random() < 0.2:
            steps = self.number(12)
        capacities = self.random.random(count) * 9 if self.random.random() < 0.5 else None
        library.walk_blend(weights, capacities, self.number(99), steps, np.zeros(count), picks)

    def index_end(self, library) -> None:
        count = self.size()
        library.index_end(
            self.array(np.int32, count, 9), self.array(np.int64, count, 90),
            self.array(np.int64, 1 + self.size(), count), self.number(8),
        )  # fmt: skip

    def shuffle(self, library) -> None:
        key = self.random.integers(0, 1 << 32, 624, dtype=np.uint32)
        library.shuffle(np.arange(self.size(), dtype=np.int32), key, self.number(624) % 700)


def main() -> None:
    path, count = sys.argv[1], int(sys.argv[2])
    spec = importlib.util.spec_from_file_location("megatron.core.datasets._native", path)
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    cases = Cases(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    calls = [
        cases.gather, cases.gather, cases.gather, cases.sample_index, cases.walk_blend,
        cases.index_end, cases.shuffle,
    ]  # fmt: skip
    num_refused = 0
    for case in range(count):
        try:
            calls[case % len(calls)](library)
        except (IndexError, ValueError, OverflowError):
            num_refused += 1
    print(f"{count} cases, {num_refused} refused, {sysconfig.get_platform()}")


if __name__ == "__main__":
    main()
