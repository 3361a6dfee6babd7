"""Random numbers that do not depend on the layout.

Every random draw is keyed by what it is *for*: (seed, sample, scope, call, block), never by the
rank that happens to make it. So the same seed gives the same dropout on one device and on a
thousand, with any micro batch size, and after any resume; there is no generator state to save.

`keyed_draws` makes masks and uniform numbers of these keys.

`rng_state()` is the seed of the process and the sample counter; where the next draw belongs is a
field of the step context.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.step_context.context import RandomScope, current_step, within_step


def derive_seed(*key: int | str) -> int:
    """Hash a key of ints and strings to a 63-bit seed; equal keys give equal seeds anywhere."""
    return _seed(hashlib.blake2b(_key_bytes(key), digest_size=8))


def _key_bytes(key: tuple[int | str, ...]) -> bytes:
    return "\x1f".join(f"{type(part).__name__[0]}{part}" for part in key).encode()


def _seed(key_hash: hashlib.blake2b) -> int:
    return int.from_bytes(key_hash.digest(), "little") >> 1


@dataclass(frozen=True)
class SequenceShard:
    """Which rows of the full sequence a rank's activation holds, in local order.

    ranges: [begin, end) pairs of absolute positions; total: length of the full sequence.
    """

    ranges: tuple[tuple[int, int], ...]
    total: int

    @staticmethod
    def full(total: int) -> SequenceShard:
        """All rows: no sequence or context parallelism."""
        return SequenceShard(((0, total),), total)

    @staticmethod
    def zigzag(total: int, rank: int, size: int) -> SequenceShard:
        """Rank `rank`'s part under context parallelism: chunks rank and 2 * size - 1 - rank.

        The sequence is cut into 2 * size chunks. Under a causal mask the early chunk sees little
        and the late one much, and every rank's pair sees equally much. `total` is a multiple of
        2 * size.
        """
        if size == 1:
            return SequenceShard.full(total)
        chunk, last = total // (2 * size), 2 * size - 1
        pair = ((i * chunk, (i + 1) * chunk) for i in (rank, last - rank))
        return SequenceShard(tuple(pair), total)

    def index_of(self, position: int) -> int | None:
        """Return the local row of an absolute position, None where another rank holds it."""
        before = 0
        for begin, end in self.ranges:
            if begin <= position < end:
                return before + position - begin
            before += end - begin
        return None

    @property
    def length(self) -> int:
        """Number of rows held."""
        return sum(end - begin for begin, end in self.ranges)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return the absolute position of every local row, int64 [length]."""
        parts = [torch.arange(begin, end, device=device) for begin, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shard(self, rank: int, size: int) -> SequenceShard:
        """The rank-th of `size` equal consecutive pieces (sequence parallelism)."""
        length = self.length // size
        return self if size == 1 else self.run(rank * length, (rank + 1) * length)

    def run(self, first: int, last: int) -> SequenceShard:
        """Rows [first, last) of the local ones."""
        skip, need, kept = first, last - first, []
        for begin, end in self.ranges:
            if skip >= end - begin:
                skip -= end - begin
                continue
            taken = min(end - begin - skip, need)
            kept.append((begin + skip, begin + skip + taken))
            need, skip = need - taken, 0
            if need == 0:
                break
        return SequenceShard(tuple(kept), self.total)

    def blocks(self, max_blocks: int) -> list[tuple[int, int, int, int]]:
        """Cut into fixed blocks: (block index, rows per block, first row in block, rows used)."""
        count = min(self.total & -self.total, max_blocks)
        rows = self.total // count
        cut = []
        for begin, end in self.ranges:
            while begin < end:
                index, first = divmod(begin, rows)
                used = min(rows - first, end - begin)
                cut.append((index, rows, first, used))
                begin += used
        return cut


class RandomState:
    """The seed, and how micro batches of a step map to samples."""

    def __init__(self) -> None:
        self.seed = 1234
        self.counts_on_cpu = False
        """Draw by `counter_random` on the CPU too, as accelerators do."""
        self._consumed_samples = 0
        self._micro_batch_size = 1
        self._dp_rank = 0
        self._dp_size = 1

    @property
    def scope(self) -> RandomScope:
        """Where the next draw belongs; see `StepContext`."""
        return current_step().random_scope

    @property
    def first_sample(self) -> int:
        """Absolute index (since the start of training) of this micro batch's first sample."""
        return self.scope.first_sample

    @property
    def first_sample_of_step(self) -> int:
        """Absolute index of the first sample of this step, of all replicas."""
        return self._consumed_samples

    def set_seed(self, seed: int) -> None:
        """Choose the seed from which every draw is derived."""
        self.seed = seed

    def begin_step(
        self, consumed_samples: int, *, micro_batch_size: int, dp_rank: int, dp_size: int
    ) -> None:
        """Tell how micro batch indices of this step map to absolute sample indices."""
        self._consumed_samples = consumed_samples
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self.set_microbatch(0)

    def set_microbatch(self, index: int) -> None:
        """Enter micro batch `index` of this step: called before each of its forwards."""
        row = index * self._dp_size + self._dp_rank
        first = self._consumed_samples + row * self._micro_batch_size
        current_step().random_scope = RandomScope(first_sample=first, microbatch=index)

    def in_scope(
        self, *path: int | str, rows: SequenceShard | None = None
    ) -> AbstractContextManager[None]:
        """Name a part of the model, for example `at("decoder", layer_number, rows=...)`.

        The n-th draw inside belongs to (path, n), so a layer's dropouts differ from each other
        and not between layouts.
        """
        outer = self.scope
        inner = replace(outer, path=path, rows=rows or outer.rows, num_calls=0)
        return within_step(random_scope=inner)

    def in_rows(self, first: int, last: int, num_rows: int) -> AbstractContextManager[None]:
        """Compute rows [first, last) of the local ones alone."""
        return within_step(random_scope=replace(self.scope, run=(first, last, num_rows)))

    def in_repetition(self, number: int) -> AbstractContextManager[None]:
        """Pass a layer for the `number`-th time of several: its draws differ from pass to pass."""
        return within_step(random_scope=replace(self.scope, repetition=number))

    def in_saved_scope(self, scope: RandomScope) -> AbstractContextManager[None]:
        """Draw again from a place remembered earlier: activation recomputation uses it."""
        return within_step(random_scope=scope)

    def next_key(self) -> tuple[int | str, ...]:
        """Return the key of the next draw (without sample and block) and count the draw."""
        scope = self.scope
        current_step().random_scope = replace(scope, num_calls=scope.num_calls + 1)
        again = ("repetition", scope.repetition) if scope.repetition else ()
        return (self.seed, *scope.path, *again, scope.num_calls)

    def state_dict(self) -> dict[str, int]:
        """All there is to save: draws depend on the seed and the sample counter only."""
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore `state_dict()`."""
        self.seed = int(state["seed"])


_STATE = RandomState()


def rng_state() -> RandomState:
    """Return the random state of this process."""
    return _STATE


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device)


class SeededGenerators:
    """Generators for keys with a common prefix, which is hashed once."""

    def __init__(self, device: torch.device, *prefix: int | str) -> None:
        self._generator = _generator(device)
        self._prefix = hashlib.blake2b(_key_bytes(prefix), digest_size=8)

    def get(self, *rest: int) -> torch.Generator:
        """Return the device's scratch generator for (*prefix, *rest), valid until the next call.

        Its seed is `derive_seed(*prefix, *rest)`.
        """
        key_hash = self._prefix.copy()
        for part in rest:
            key_hash.update(b"\x1fi%d" % part)
        return self._generator.manual_seed(_seed(key_hash))
