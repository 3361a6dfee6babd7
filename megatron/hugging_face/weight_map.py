"""Which rows of their tensors make which parameter of ours.

Both programs hold the same numbers, in other arrangements: a rule names a parameter of ours (with
`{}` for the layer), the tensors it is made of, and the ranges of rows that correspond. Nothing is
computed, so the way back is the same list read the other way, and bit-identical.

Shapes are those of the one-device model. RowRange are those of dimension 0; where their tensor is
transposed, rows of its transpose.

Legend: h hidden, d head dim, q query heads, g key/value heads (groups).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """The numbers that rules need."""

    num_layers: int
    num_heads: int
    num_groups: int
    head_dim: int


@dataclass(frozen=True)
class RowRange:
    """A range of rows, in one of their tensors and in ours."""

    source: int
    """Index into the rule's tensors."""
    begin: int
    """First row there."""
    place: int
    """First row here."""
    length: int


RowMap = Callable[[Geometry, Sequence[int]], list[RowRange]]
"""(geometry, number of rows of each of their tensors) -> the ranges, in the order of our rows."""


def _whole(_geometry: Geometry, heights: Sequence[int]) -> list[RowRange]:
    """Their tensors above each other."""
    found, place = [], 0
    for source, height in enumerate(heights):
        found.append(RowRange(source, 0, place, height))
        place += height
    return found


@dataclass(frozen=True)
class WeightRule:
    """One parameter of ours."""

    ours: str
    theirs: tuple[str, ...]
    row_map: RowMap = _whole
    is_transposed: bool = False
    """Theirs are [in, out], ours [out, in]."""
    has_vocabulary_rows: bool = False
    """RowRange are those of the vocabulary; ours may have more, which are padding."""
    num_experts: int | None = None
    """Ours has an axis of so many experts before its rows, which are counted through all of them:
    row i of expert e is e * rows + i."""
    num_blocks: int | None = None
    """Theirs is one tensor of all experts, [e, ...], whose rows belong to so many blocks in turn;
    ours has the blocks of an expert above each other."""
    layers: tuple[int, ...] | None = None
    """Layers that have it; None is all."""

    def names(self, geometry: Geometry) -> list[tuple[str, tuple[str, ...]]]:
        """Return (our name, their names), for every layer."""
        if "{}" not in self.ours:
            return [(self.ours, self.theirs)]
        layers = range(geometry.num_layers) if self.layers is None else self.layers
        return [
            (self.ours.format(layer), tuple(name.format(layer) for name in self.theirs))
            for layer in layers
        ]


def identity(ours: str, theirs: str) -> WeightRule:
    """One tensor is the other."""
    return WeightRule(ours, (theirs,))


def transposed(ours: str, theirs: str) -> WeightRule:
    """[in, out] there, [out, in] here."""
    return WeightRule(ours, (theirs,), is_transposed=True)


def vocabulary(ours: str, theirs: str) -> WeightRule:
    """RowRange of the vocabulary."""
    return WeightRule(ours, (theirs,), has_vocabulary_rows=True)


def concat(ours: str, *theirs: str) -> WeightRule:
    """Tensors above each other: gate and up of a gated MLP."""
    return WeightRule(ours, theirs)


def experts(ours: str, num_experts: int, *theirs: str) -> WeightRule:
    """Tensors of every expert above each other; `{expert}` in their names is its number."""
    names = tuple(
        name.replace("{expert}", str(number)) for number in range(num_experts) for name in theirs
    )
    return WeightRule(ours, names, num_experts=num_experts)


def alternating_experts(
    ours: str, theirs: str, *, num_experts: int, num_blocks: int, is_transposed: bool
) -> WeightRule:
    """One tensor of all experts, whose rows are gate, up, gate, up, ... for two blocks."""
    return WeightRule(
        ours,
        (theirs,),
        is_transposed=is_transposed,
        num_experts=num_experts,
        num_blocks=num_blocks,
    )


def query_key_value(ours: str, query: str, key: str, value: str) -> WeightRule:
    """Separate projections there; here rows by group: q/g query heads, one key, one value head."""

    def row_map(geometry: Geometry, _heights: Sequence[int]) -> list[RowRange]:
        return _by_group(geometry, [(0, 0), (1, 0), (2, 0)])

    return WeightRule(ours, (query, key, value), row_map)


def fused_query_key_value(ours: str, theirs: str, *, is_transposed: bool = False) -> WeightRule:
    """All queries, then all keys, then all values in one tensor there."""

    def row_map(geometry: Geometry, _heights: Sequence[int]) -> list[RowRange]:
        keys = geometry.num_heads * geometry.head_dim
        values = keys + geometry.num_groups * geometry.head_dim
        return _by_group(geometry, [(0, 0), (0, keys), (0, values)])

    return WeightRule(ours, (theirs,), row_map, is_transposed)


def _by_group(geometry: Geometry, starts: Sequence[tuple[int, int]]) -> list[RowRange]:
    """Interleave queries, keys and values, which begin at `starts`: (source, row)."""
    width = geometry.head_dim
    heights = (geometry.num_heads // geometry.num_groups * width, width, width)
    found, place = [], 0
    for group in range(geometry.num_groups):
        for (source, start), height in zip(starts, heights, strict=True):
            found.append(RowRange(source, start + group * height, place, height))
            place += height
    return found
