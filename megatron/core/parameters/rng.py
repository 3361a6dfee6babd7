"""Random numbers that do not depend on the layout.

Every random draw is keyed by its purpose, (seed, sample, scope, call, block), never by the rank
that makes it. So the same seed gives the same dropout on one device and on a thousand, with any
micro batch size, and after any resume; there is no generator state to save.

`keyed_draws` makes masks and uniform numbers from these keys. `rng_state()` holds the seed of the
process and the sample counter; the step context holds the scope of the next draw.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from megatron.core.step_context.context import current_step, within_step
from megatron.core.step_context.random_scope import RandomScope, SequenceShard


def derive_seed(*key: int | str) -> int:
    """Hash a key of ints and strings to a 63-bit seed; equal keys give equal seeds anywhere."""
    return _seed(hashlib.blake2b(_key_bytes(key), digest_size=8))


def _key_bytes(key: tuple[int | str, ...]) -> bytes:
    return "\x1f".join(f"{type(part).__name__[0]}{part}" for part in key).encode()


def _seed(key_hash: hashlib.blake2b) -> int:
    return int.from_bytes(key_hash.digest(), "little") >> 1


class RandomState:
    """The seed, and the mapping from micro batches of a step to samples."""

    def __init__(self) -> None:
        self.seed = 1234
        self.counts_on_cpu = False
        """Use `counter_random` on the CPU too, as accelerators do."""
        self._consumed_samples = 0
        self._micro_batch_size = 1
        self._dp_rank = 0
        self._dp_size = 1

    @property
    def scope(self) -> RandomScope:
        """The scope of the next draw."""
        return current_step().random_scope

    @property
    def first_sample(self) -> int:
        """Absolute index (since the start of training) of this micro batch's first sample."""
        return self.scope.first_sample

    @property
    def first_sample_of_step(self) -> int:
        """Absolute index of the first sample of this step over all replicas."""
        return self._consumed_samples

    def set_seed(self, seed: int) -> None:
        """Set the seed of every draw."""
        self.seed = seed

    def begin_step(
        self, consumed_samples: int, *, micro_batch_size: int, dp_rank: int, dp_size: int
    ) -> None:
        """Set the mapping from micro batches of this step to absolute sample indices."""
        self._consumed_samples = consumed_samples
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self.set_microbatch(0)

    def set_microbatch(self, index: int) -> None:
        """Enter micro batch `index` of this step: called before each of its forwards."""
        position = index * self._dp_size + self._dp_rank
        first = self._consumed_samples + position * self._micro_batch_size
        current_step().random_scope = RandomScope(first_sample=first, microbatch=index)

    def in_scope(
        self, *path: int | str, rows: SequenceShard | None = None
    ) -> AbstractContextManager[None]:
        """Enter a part of the model, for example `in_scope("decoder", layer_number, rows=...)`.

        The key of the n-th draw inside contains (path, n), so the dropouts of a layer differ from
        each other, but not between layouts.
        """
        outer = self.scope
        inner = replace(outer, path=path, rows=rows or outer.rows, draw_index=0)
        return within_step(random_scope=inner)

    def in_token_range(
        self, first: int, last: int, num_tokens: int
    ) -> AbstractContextManager[None]:
        """Inside, only the tokens [first, last) of the `num_tokens` local ones are computed."""
        scope = replace(self.scope, token_range=(first, last, num_tokens))
        return within_step(random_scope=scope)

    def in_pass(self, index: int) -> AbstractContextManager[None]:
        """Inside, a layer runs for the `index`-th time, from 1: each pass has its own draws."""
        return within_step(random_scope=replace(self.scope, pass_index=index))

    def next_key(self) -> tuple[int | str, ...]:
        """Return the key of the next draw (without sample and block) and count the draw."""
        scope = self.scope
        current_step().random_scope = replace(scope, draw_index=scope.draw_index + 1)
        again = ("repetition", scope.pass_index) if scope.pass_index else ()
        return (self.seed, *scope.path, *again, scope.draw_index)

    def state_dict(self) -> dict[str, int]:
        """Return the seed; draws depend on the seed and the sample counter only."""
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
        """Return a generator with seed `derive_seed(*prefix, *rest)`, valid until the next call."""
        key_hash = self._prefix.copy()
        for part in rest:
            key_hash.update(b"\x1fi%d" % part)
        return self._generator.manual_seed(_seed(key_hash))
