"""Positions of parameters in a flat buffer, and the elements that each rank owns. Pure integers.

A buffer holds the parameters of one dtype one after another, last layer first, because backward
finishes them in that order. It is cut into buckets, the units of communication, without regard to
the borders of parameters; each bucket is cut into equal shards, one per rank:

    buffer  | slot | slot  |   slot   | padding |      a slot holds one parameter
    buckets |      bucket 0     |     bucket 1  |
    shards  |  r0  |  r1  | r2  | r0 | r1 | r2  |

Every ZeRO stage uses this plan. ZeRO-1 lets rank i update only shard i of each bucket;
ZeRO-2 also drops the gradients outside of it, and ZeRO-3 the parameters (S. Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5, arXiv
1910.02054).

Slots and shards begin at multiples of `BLOCK` elements. So a vectorised kernel sees the same
lanes for the same elements whether a parameter is whole or in pieces, and a sum of squares per
block does not depend on who owns the block: results are equal to the bit in every sharding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

BLOCK = 128
"""Elements to which slots and shards are aligned: 512 bytes of fp32, a few vector registers."""


@dataclass(frozen=True)
class Slot:
    """Elements [begin, end) of the buffer hold parameter number `index`."""

    index: int
    begin: int
    end: int


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that one rank owns in one bucket."""

    index: int
    """Number of the parameter."""
    begin: int
    end: int
    """[begin, end) of the flattened parameter."""
    offset: int
    """Position of the piece in the buffer; a multiple of `BLOCK`."""


@dataclass(frozen=True)
class BufferPlan:
    """The layout of one buffer."""

    numel: int
    """Elements of the buffer, padding included."""
    slots: tuple[Slot, ...]
    """Slots in buffer order, which is the reverse order of the parameters."""
    buckets: tuple[tuple[int, int], ...]
    """[begin, end) of each bucket; together they are the full buffer."""
    sections: tuple[range, ...]
    """Numbers of the buckets that are a section; no parameter is in two sections."""

    def slots_in(self, begin: int, end: int) -> list[Slot]:
        """Return the slots that share elements with [begin, end)."""
        return [slot for slot in self.slots if slot.begin < end and begin < slot.end]

    def shard(self, bucket: int, rank: int, size: int) -> tuple[int, int]:
        """Return the [begin, end) of the buffer that `rank` of `size` owns in a bucket."""
        begin, end = self.buckets[bucket]
        length, rest = divmod(end - begin, size)
        assert rest == 0 and length % BLOCK == 0, (self.buckets[bucket], size)
        return begin + rank * length, begin + (rank + 1) * length

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """Return the pieces of parameters in [begin, end) of the buffer, in buffer order."""
        return [
            Piece(
                slot.index,
                max(begin, slot.begin) - slot.begin,
                min(end, slot.end) - slot.begin,
                max(begin, slot.begin),
            )
            for slot in self.slots_in(begin, end)
        ]


def plan_buffer(
    numels: Sequence[int],
    *,
    bucket_numel: int | None,
    num_shards: int,
    separate: Collection[int] = (),
    separate_numel: int | None = None,
    units: Sequence[int] | None = None,
    single_bucket_units: Collection[int] = (),
) -> BufferPlan:
    """Lay out parameters of the given sizes, the last one first.

    Args:
        numels: elements of each parameter, in forward order.
        bucket_numel: most elements of a bucket before padding; None is one bucket for all.
        num_shards: number of ranks that share a bucket. Every bucket is a multiple of
            `BLOCK * num_shards`.
        separate: parameters with separate buckets, so that their shards do not depend on the rest
            of the buffer: two pipeline stages that hold the same tied weight must cut it at the
            same places to add their gradients shard by shard.
        separate_numel: most elements of a separate bucket; it must not depend on other parameters.
        units: number of the unit of each parameter; neighbours with the same number are kept in
            one section, apart from the others. ZeRO-3 gathers and frees a section at a time.
        single_bucket_units: units that are one bucket, whatever their size.
    """
    assert num_shards >= 1 and (bucket_numel is None or bucket_numel >= 1)
    assert all(n >= 1 for n in numels), numels
    slots: list[Slot] = []
    buckets: list[tuple[int, int]] = []
    sections: list[range] = []
    section, position = 0, 0  # where the current run of buckets and the next slot begin

    def close_section() -> None:
        nonlocal section, position
        if position == section:
            return
        length, first = position - section, len(buckets)
        index = slots[-1].index
        most = separate_numel if index in separate else bucket_numel
        if units is not None and units[index] in single_bucket_units:
            most = None
        count = 1 if most is None else _ceil_div(length, most)
        step = _round_up(_ceil_div(length, count), BLOCK * num_shards)
        while section < position:
            buckets.append((section, section + step))
            section += step
        position = section
        sections.append(range(first, len(buckets)))

    for index in reversed(range(len(numels))):
        ends_unit = (
            units is not None and index + 1 < len(units) and units[index] != units[index + 1]
        )
        if index in separate or ends_unit:
            close_section()
        slots.append(Slot(index, position, position + numels[index]))
        position = _round_up(position + numels[index], BLOCK)
        if index in separate:
            close_section()
    close_section()
    return BufferPlan(position, tuple(slots), tuple(buckets), tuple(sections))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, unit: int) -> int:
    return _ceil_div(a, unit) * unit
