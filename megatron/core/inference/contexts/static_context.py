"""A cache of keys and values of fixed size, with one slot per sequence and one position per token.

Recurrent layers store the last state of each sequence instead of keys and values.

The sequences of a forward pass are in consecutive slots of the cache. Each sequence has its own
length: shorter sequences of a batch are padded at the end, and masks hide the keys of padding until
real tokens overwrite them.

Legend: s new tokens, b sequences of this pass, S positions, g key/value groups of this rank, d head
dim, k positions up to the last one of this pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.foundation.errors import ConfigError


class BaseInferenceContext:
    """Megatron's base class of caches."""

    def is_static_batching(self) -> bool:
        """Return whether the sequences of a batch stay the same from token to token."""
        return True

    def is_dynamic_batching(self) -> bool:
        """Return whether sequences join and leave the batch between tokens."""
        return not self.is_static_batching()


class StaticInferenceContext(BaseInferenceContext):
    """Keys and values of up to `max_batch_size` sequences, for the layers of this rank.

    Works in Megatron's loop: pass it as `inference_context`, then add the number of new tokens to
    `sequence_len_offset`. For sequences of different lengths call `set_rows` before each pass.

    The memory of a layer, tensors [max_batch_size, g, S, d], is allocated on its first `store`.

    Args:
        max_batch_size: number of sequences.
        max_sequence_length: S, tokens of prompt and continuation together.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.key_value_memory_dict: dict[int, tuple[Tensor, ...]] = {}
        self.state_memory_dict: dict[int, tuple[Tensor, ...]] = {}
        self.materialize_only_last_token_logits = False
        """Compute logits [b, 1, v/tp] of the last real token of each sequence only."""
        self.batch_size_offset = 0
        self.positions = torch.empty(0, 0, dtype=torch.long)
        """[s, b]: position of each token of this pass in its sequence."""
        self.is_fresh = True
        """Whether the sequences have no cached tokens: attention is among the new tokens only."""
        self._offset = 0
        self._offsets: tuple[int, ...] | None = None
        self._lengths: tuple[int, ...] | None = None
        self._entered: tuple[int, int] | None = None
        self._num_keys = 0
        self._slots: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    @property
    def sequence_len_offset(self) -> int:
        """Number of cached tokens of every sequence; setting it discards `set_rows`."""
        return self._offset

    @sequence_len_offset.setter
    def sequence_len_offset(self, offset: int) -> None:
        self._offset, self._offsets, self._lengths, self._entered = offset, None, None, None

    def reset(self) -> None:
        """Start with empty sequences; the memory stays allocated."""
        self.batch_size_offset = 0
        self.sequence_len_offset = 0

    def set_rows(self, first: int, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the sequences of the next pass.

        Args:
            first: slot of the first sequence of the batch.
            offsets: per sequence, the number of cached tokens.
            lengths: per sequence, the number of new tokens without padding.
        """
        self.batch_size_offset = first
        self._offsets, self._lengths, self._entered = tuple(offsets), tuple(lengths), None

    def enter(self, num_tokens: int, num_rows: int, device: torch.device) -> None:
        """Prepare a pass over [s, b]; only the first call of the chunks of a model has an effect.

        Raises:
            ConfigError: the cache has too few slots or positions.
        """
        if self._entered == (num_tokens, num_rows):
            return
        offsets = self._offsets or (self._offset,) * num_rows
        if len(offsets) != num_rows:
            raise ConfigError(
                f"a pass over {num_rows} rows, but set_rows() got {len(offsets)} offsets.",
                rule="set_rows() gets an offset and a length for each row of the pass",
                fix=f"give set_rows() {num_rows} offsets and lengths",
            )
        self._num_keys = max(offsets) + num_tokens
        rows = self.batch_size_offset + num_rows
        if self._num_keys > self.max_sequence_length or rows > self.max_batch_size:
            raise ConfigError(
                f"{rows} rows of {self._num_keys} tokens for a cache of {self.max_batch_size} rows"
                f" of {self.max_sequence_length}.",
                rule="the cache has a position for every token of prompt and continuation",
                flags=["--max-batch-size", "--max-new-tokens"],
                fix="make the cache larger, or generate fewer tokens",
            )
        steps = torch.arange(num_tokens, device=device).unsqueeze(1)
        self.positions = steps + torch.tensor(offsets, device=device)
        self.is_fresh = not any(offsets)
        self._uniform = len(set(offsets)) == 1
        self._new_rows = torch.tensor([offset == 0 for offset in offsets], device=device)
        self._slots, self._masks = {}, {}
        self._entered = (num_tokens, num_rows)

    def store(self, layer: int, *news: Tensor) -> tuple[Tensor, ...]:
        """Store the keys and values of a layer in this pass.

        Args:
            layer: 1-based number of the layer in the whole model.
            news: key [s, b, g, d], value [s, b, g, e], and any further tensors of the layer.
        Returns:
            for each of `news`, all positions up to the last one of this pass, [b, g, k, d]; these
            are views of the cache.
        """
        if layer not in self.key_value_memory_dict:
            self.key_value_memory_dict[layer] = tuple(
                # Zeros, because a masked position has weight 0, and 0 * NaN is NaN.
                new.new_zeros(
                    self.max_batch_size, new.shape[2], self.max_sequence_length, new.shape[3]
                )
                for new in news
            )
        first = self.batch_size_offset
        seen = []
        for memory, new in zip(self.key_value_memory_dict[layer], news, strict=True):
            s, b, g, _ = new.shape
            rows = memory.narrow(0, first, b)
            if self._uniform:
                rows.narrow(2, self._num_keys - s, s).copy_(new.permute(1, 2, 0, 3))
            else:
                flat = memory.view(-1, memory.shape[-1])
                source = new.permute(1, 2, 0, 3).reshape(-1, memory.shape[-1])
                flat.index_copy_(0, self._slots_of(g), source)
            seen.append(rows.narrow(2, 0, self._num_keys))
        return tuple(seen)

    def states(self, layer: int, *empty: Tensor) -> list[Tensor]:
        """Return the states of a recurrent layer for the sequences of this pass.

        Args:
            layer: 1-based number of the layer in the whole model.
            empty: [b, ...] each, initial states.
        Returns:
            states of the same shapes; `empty` for sequences without cached tokens.
        """
        if layer not in self.state_memory_dict:
            self.state_memory_dict[layer] = tuple(
                torch.zeros(self.max_batch_size, *e.shape[1:], dtype=e.dtype, device=e.device)
                for e in empty
            )
        memories = self.state_memory_dict[layer]
        return [
            torch.where(
                self._new_rows.view(-1, *[1] * (e.dim() - 1)),
                e,
                memory.narrow(0, self.batch_size_offset, len(e)),
            )
            for memory, e in zip(memories, empty, strict=True)
        ]

    def keep_states(self, layer: int, *states: Tensor) -> None:
        """Store the states [b, ...] after this pass, in the order of `states`."""
        for memory, state in zip(self.state_memory_dict[layer], states, strict=True):
            memory.narrow(0, self.batch_size_offset, len(state)).copy_(state)

    def only_real(self, x: Tensor) -> Tensor:
        """Return x [s, b, ...] with zeros in place of padding."""
        if self._lengths is None:
            return x
        steps = torch.arange(len(x), device=x.device).unsqueeze(1)
        is_real = steps < torch.tensor(self._lengths, device=x.device)
        return x * is_real.view(*is_real.shape, *[1] * (x.dim() - 2))

    def last_rows(self, before: Tensor, new: Tensor) -> Tensor:
        """Return the last tokens of each sequence without padding.

        Args:
            before: [n, b, c], the last n tokens before this pass.
            new: [s, b, c], the tokens of this pass.
        Returns:
            [b, n, c].
        """
        joined = torch.cat((before, new)).transpose(0, 1)
        if self._lengths is None:
            return joined[:, len(new) :]
        steps = torch.arange(len(before), device=new.device)
        first = torch.tensor(self._lengths, device=new.device).unsqueeze(1)
        rows = torch.arange(joined.shape[0], device=new.device).unsqueeze(1)
        return joined[rows, first + steps]

    def _slots_of(self, groups: int) -> Tensor:
        """Return [b*g*s]: indices of the new tokens in a memory flattened to [slots*g*S, d]."""
        if groups not in self._slots:
            device = self.positions.device
            s, b = self.positions.shape
            first = self.batch_size_offset
            rows = torch.arange(first, first + b, device=device).view(b, 1, 1) * groups
            heads = (rows + torch.arange(groups, device=device).view(1, groups, 1)) * (
                self.max_sequence_length
            )
            self._slots[groups] = (heads + self.positions.t().unsqueeze(1)).reshape(-1)
        return self._slots[groups]

    def masked_keys(self, left: int, chunk: int | None = None) -> Tensor | None:
        """Return the mask [b, 1, s, 1, k], True for keys after a query, outside its window or in
        another chunk.

        Args:
            left: number of keys before a query in its window; -1 is unlimited.
            chunk: number of keys of a chunk; None is one chunk.
        Returns:
            the mask, shared by all layers with this window and chunk; None if no key is masked.
        """
        if (left, chunk) not in self._masks:
            s, _ = self.positions.shape
            sees_all = s == 1 and self._uniform and (left < 0 or left >= self._num_keys - 1)
            sees_all = sees_all and (chunk is None or chunk >= self._num_keys)
            mask = None
            if not sees_all:
                keys = torch.arange(self._num_keys, device=self.positions.device)
                query = self.positions.t()[:, None, :, None, None]
                mask = keys > query
                if left >= 0:
                    mask |= keys < query - left
                if chunk is not None:
                    mask |= keys // chunk != query // chunk
            self._masks[left, chunk] = mask
        return self._masks[left, chunk]

    def last_tokens(self, hidden_states: Tensor) -> Tensor:
        """Return the last real tokens [1, b, h] of [s, b, h] if only their logits are needed."""
        if not self.materialize_only_last_token_logits or hidden_states.shape[0] == 1:
            return hidden_states
        if self._lengths is None:
            return hidden_states[-1:]
        rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        last = torch.tensor(self._lengths, device=hidden_states.device) - 1
        return hidden_states[last, rows].unsqueeze(0)

    @torch.inference_mode()  # the memory may have been allocated in inference mode
    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another slot, in all layers."""
        for memories in self.key_value_memory_dict.values():
            for memory in memories:
                memory[target, :, :length] = memory[source, :, :length]
        for states in self.state_memory_dict.values():
            for state in states:
                state[target] = state[source]
