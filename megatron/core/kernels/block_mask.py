"""Which tiles of the attention matrix have to be computed, and which keys are hidden inside them.

Integers and masks only. A `SequenceShard` with ascending ranges describes the positions that a rank
holds. So the keys that a run of queries may see under a causal mask or a window are one run of
local keys, whichever chunks the rank holds.

Legend: s whole sequence, b micro batch, sq and sk local queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.step_context.random_scope import SequenceShard


@dataclass(frozen=True)
class MaskSpec:
    """Which keys a query sees, in absolute positions.

    Attributes:
        window: keys to the left and right of a query that it may see, -1 is unlimited; (-1, 0) is
            causal.
        document_ids: [b, s] of the whole sequence, never falling along s; a query sees keys of
            its own document only. With None the sequence is one document.
    """

    window: tuple[int, int]
    document_ids: Tensor | None = None


def key_range(begin: int, end: int, num_keys: int, window: tuple[int, int]) -> tuple[int, int]:
    """Return the [first, last) keys that queries begin..end-1 may see.

    Args:
        window: keys to the left and right of a query that it may see; -1 is unlimited.
    """
    left, right = window
    first = 0 if left < 0 else max(0, begin - left)
    last = num_keys if right < 0 else min(num_keys, end + right)
    return first, last


def masked_keys(
    begin: int, end: int, first: int, last: int, window: tuple[int, int], device: torch.device
) -> Tensor | None:
    """Return [end-begin, last-first], True where a key is outside the query's window.

    None if nothing is hidden.
    """
    left, right = window
    sees_all_left = left < 0 or end - 1 - left <= first
    sees_all_right = right < 0 or begin + right >= last - 1
    if sees_all_left and sees_all_right:
        return None
    query = torch.arange(begin, end, device=device).unsqueeze(1)
    key = torch.arange(first, last, device=device).unsqueeze(0)
    hidden = torch.zeros(end - begin, last - first, dtype=torch.bool, device=device)
    if not sees_all_left:
        hidden |= key < query - left
    if not sees_all_right:
        hidden |= key > query + right
    return hidden


@dataclass(frozen=True)
class Tile:
    """A block of queries and the run of keys that it attends to.

    Attributes:
        query: [begin, end) in local rows; key: the same of local keys.
        first_query: absolute position of the first query; the others follow it.
        left_masked_end, right_masked_begin: local keys before the first may be left of a query's
            window, those from the second on right of it.
        may_be_fully_masked: whether a query may see none of these keys.
    """

    query: slice
    key: slice
    first_query: int
    left_masked_end: int
    right_masked_begin: int
    may_be_fully_masked: bool


def tiles(
    queries: SequenceShard, keys: SequenceShard, mask: MaskSpec, max_rows: int, max_keys: int
) -> Iterator[Tile]:
    """Yield the tiles of a set of queries and a set of keys, without fully hidden tiles.

    Args:
        max_rows, max_keys: size of a tile.
    """
    left, right = mask.window
    reach = _DocumentExtent(mask.document_ids)
    local = 0
    for begin, end in queries.ranges:
        for first in range(begin, end, max_rows):
            last = min(first + max_rows, end)
            from_position, to_position = reach.of(first, last)
            if left >= 0:
                from_position = max(from_position, first - left)
            if right >= 0:
                to_position = min(to_position, last + right)
            key = slice(num_below(keys, from_position), num_below(keys, to_position))
            query = slice(local, local + last - first)
            local = query.stop
            left_masked_end = num_below(keys, last - 1 - left) if left >= 0 else key.start
            right_masked_begin = num_below(keys, first + right + 1) if right >= 0 else key.stop
            are_here = any(begin <= first and last <= end for begin, end in keys.ranges)
            own = slice(num_below(keys, first), num_below(keys, last))
            for start in range(key.start, key.stop, max_keys):
                stop = min(start + max_keys, key.stop)
                far = min(max(left_masked_end, start), stop)
                ahead = min(max(right_masked_begin, start), stop)
                all_see_some = mask.document_ids is None and far < ahead
                all_see_themselves = are_here and start <= own.start and own.stop <= stop
                may_be_fully_masked = not (all_see_some or all_see_themselves)
                yield Tile(query, slice(start, stop), first, far, ahead, may_be_fully_masked)


def num_below(rows: SequenceShard, position: int) -> int:
    """Return how many of the rows are before `position`."""
    return sum(min(max(position - begin, 0), end - begin) for begin, end in rows.ranges)


def masks_in_tile(tile: Tile, mask: MaskSpec, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (run of the tile's keys, mask) pairs, one for each run with hidden keys.

    Args:
        keys: int64 [sk], absolute positions of the local keys.
    Yields:
        runs counted from the tile's first key; masks bool [rows, run] (window) or
        [b, rows, run] (documents), True where hidden.
    """
    left, right = mask.window
    start = tile.key.start
    count = tile.query.stop - tile.query.start
    query = torch.arange(tile.first_query, tile.first_query + count, device=keys.device)
    if right >= 0 and tile.right_masked_begin < tile.key.stop:
        run = keys[tile.right_masked_begin : tile.key.stop]
        part = slice(tile.right_masked_begin - start, tile.key.stop - start)
        yield part, run.unsqueeze(0) > query.unsqueeze(1) + right
    if left >= 0 and tile.left_masked_end > start:
        run = keys[start : tile.left_masked_end]
        yield slice(0, tile.left_masked_end - start), run.unsqueeze(0) < query.unsqueeze(1) - left
    if mask.document_ids is not None:
        of_query = mask.document_ids[:, tile.first_query : tile.first_query + count]
        of_key = mask.document_ids[:, keys[tile.key]]
        if not keys.is_cpu or not _is_one_document(of_query, of_key):
            full = slice(0, tile.key.stop - start)
            yield full, of_query.unsqueeze(2) != of_key.unsqueeze(1)


def _is_one_document(of_query: Tensor, of_key: Tensor) -> bool:
    """Return whether no key is in another document; ids never fall, so ends suffice."""
    lowest, highest = torch.minimum(of_query[:, 0], of_key[:, 0]), of_query[:, -1]
    return bool((lowest == torch.maximum(highest, of_key[:, -1])).all())


class _DocumentExtent:
    """First and last position of the documents of a run of queries.

    On an accelerator the host would wait once per block for it: there, only the mask hides keys.
    """

    def __init__(self, document_ids: Tensor | None) -> None:
        self.document_ids = None
        if document_ids is not None and document_ids.is_cpu:
            self.document_ids = document_ids.contiguous()

    def of(self, first: int, last: int) -> tuple[int, int]:
        """Return [begin, end) of the positions that queries first ... last - 1 may see."""
        ids = self.document_ids
        if ids is None:
            return 0, 2**62
        begin = torch.searchsorted(ids, ids[:, first : first + 1].contiguous())
        end = torch.searchsorted(ids, ids[:, last - 1 : last].contiguous(), right=True)
        return int(begin.min()), int(end.max())
