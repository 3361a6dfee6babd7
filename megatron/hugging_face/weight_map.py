"""Map rows of Hugging Face's tensors to rows of Megatron's parameters.

Both models hold the same numbers in different arrangements. A rule names a parameter of Megatron
(with `{}` for the layer), its Hugging Face tensors, and the corresponding ranges of rows. Nothing
is computed, so the same rules export a model, and a round trip is bit-identical.

All shapes are unsharded. Rows are counted along dimension 0; if Hugging Face's tensor is
transposed, along dimension 0 of its transpose.

Legend: h hidden, d head dim, q query heads, g key/value heads (groups).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.hugging_face.model_description import ModelDescription


@dataclass(frozen=True)
class RowRange:
    """A range of rows, in a tensor of Hugging Face and in Megatron's parameter."""

    source: int
    """Index into the rule's tensors."""
    begin: int
    """First row in this tensor."""
    megatron_begin: int
    """First row in Megatron's parameter."""
    length: int


RowMap = Callable[[ModelDescription, Sequence[int]], list[RowRange]]
"""(model, number of rows of each Hugging Face tensor) -> ranges in the order of Megatron's rows."""


def concatenated(_model: object, heights: Sequence[int]) -> list[RowRange]:
    """Concatenate the tensors along dimension 0."""
    found, megatron_begin = [], 0
    for source, height in enumerate(heights):
        found.append(RowRange(source, 0, megatron_begin, height))
        megatron_begin += height
    return found


@dataclass(frozen=True)
class WeightRule:
    """The Hugging Face tensors of one parameter of Megatron."""

    megatron_name: str
    hf_names: tuple[str, ...]
    row_map: RowMap = concatenated
    is_transposed: bool = False
    """Hugging Face's tensors are [in, out], Megatron's parameter is [out, in]."""
    has_vocabulary_rows: bool = False
    """There is a row for each token id; Megatron's parameter may have padding after them."""
    num_vocabulary_rows: int | None = None
    """Number of these rows; None: the number of token ids of the model."""
    num_experts: int | None = None
    """Megatron's parameter has a leading axis of this many experts. Ranges count rows through all
    experts: row i of expert e is e * rows + i."""
    num_blocks: int | None = None
    """Hugging Face has tensors of all experts, [e, ...], whose rows alternate between this many
    blocks; in Megatron's parameter the blocks of an expert are contiguous, tensor after tensor."""
    layers: tuple[int, ...] | None = None
    """Layers with this parameter; None is all layers."""
    unit_dims: tuple[int, int] = (0, 0)
    """Number of dimensions of size 1 before and after the rows of Hugging Face's tensors."""
    is_number: bool = False
    """Hugging Face's tensor is a number without dimensions, Megatron's parameter is [1]."""

    def names(self, model: ModelDescription) -> list[tuple[str, tuple[str, ...]]]:
        """Return (Megatron's name, Hugging Face's names), for every layer."""
        if "{}" not in self.megatron_name:
            return [(self.megatron_name, self.hf_names)]
        layers = range(model.num_layers) if self.layers is None else self.layers
        return [
            (self.megatron_name.format(layer), tuple(name.format(layer) for name in self.hf_names))
            for layer in layers
        ]


def identity(megatron_name: str, hf_name: str) -> WeightRule:
    """Equal tensors."""
    return WeightRule(megatron_name, (hf_name,))


def weight_and_bias(megatron_prefix: str, hf_prefix: str) -> list[WeightRule]:
    """Equal weights and equal biases; in Hugging Face's names, a dot follows the prefix."""
    return [identity(megatron_prefix + k, f"{hf_prefix}.{k}") for k in ("weight", "bias")]


def with_others(rules: Iterable[WeightRule], *others: WeightRule) -> list[WeightRule]:
    """Return `rules` with these rules in place of the rules of the same parameters."""
    by_name = {rule.megatron_name: rule for rule in others}
    return [by_name.get(rule.megatron_name, rule) for rule in rules]


def by_layer_size(
    rules_of: Callable[[ModelDescription], list[WeightRule]], model: ModelDescription
) -> list[WeightRule]:
    """Return the rules of a model of layers of several sizes, or with shared keys and values.

    Args:
        rules_of: returns the rules of a model whose layers have the same size.
    """
    if not (model.blocks or model.num_kv_shared_layers):
        return rules_of(model)
    found = [rule for rule in rules_of(model) if "{}" not in rule.megatron_name]

    def of_layer(rule: WeightRule, own: ModelDescription, layer: int) -> WeightRule:
        return replace(
            rule, layers=(layer,), row_map=lambda _model, heights: rule.row_map(own, heights)
        )

    for layer in range(model.num_layers):
        own = model.of_layer(layer + 1)
        found += [
            of_layer(rule, own, layer)
            for rule in rules_of(own)
            if "{}" in rule.megatron_name and (rule.layers is None or layer in rule.layers)
        ]
    return found


def renamed(rules: Iterable[WeightRule], names: Mapping[str, str]) -> list[WeightRule]:
    """Return `rules` with other names of Hugging Face's tensors.

    Args:
        names: part of a name -> its replacement.
    """
    found = list(rules)
    for one, other in names.items():
        found = [
            replace(rule, hf_names=tuple(name.replace(one, other) for name in rule.hf_names))
            for rule in found
        ]
    return found


def transposed(megatron_name: str, hf_name: str) -> WeightRule:
    """Hugging Face's tensor is [in, out], Megatron's parameter is [out, in]."""
    return WeightRule(megatron_name, (hf_name,), is_transposed=True)


def vocabulary(megatron_name: str, hf_name: str, num_rows: int | None = None) -> WeightRule:
    """A tensor with a row for each token id, or for the first `num_rows` of them."""
    return WeightRule(
        megatron_name, (hf_name,), has_vocabulary_rows=True, num_vocabulary_rows=num_rows
    )


def concat(megatron_name: str, *hf_names: str) -> WeightRule:
    """Concatenate tensors, for example gate and up of a gated MLP."""
    return WeightRule(megatron_name, hf_names)


def experts(megatron_name: str, num_experts: int, *hf_names: str) -> WeightRule:
    """Concatenate the tensors of each expert; `{expert}` in their names is its number."""
    names = tuple(
        name.replace("{expert}", str(number)) for number in range(num_experts) for name in hf_names
    )
    return WeightRule(megatron_name, names, num_experts=num_experts)


def alternating_experts(
    megatron_name: str, *hf_names: str, num_experts: int, num_blocks: int, is_transposed: bool
) -> WeightRule:
    """One tensor of all experts, whose rows are gate, up, gate, up, ... for two blocks.

    With several names, each tensor has such rows of all experts, and Megatron's parameter has the
    rows of an expert from one tensor after the other.
    """
    return WeightRule(
        megatron_name,
        hf_names,
        is_transposed=is_transposed,
        num_experts=num_experts,
        num_blocks=num_blocks,
    )


def joined_experts(num_experts: int, *names: str) -> list[WeightRule]:
    """Return the rules of a layer's experts; a tensor of Hugging Face contains all experts.

    Args:
        names: of the first layer one tensor [e, 2i, h] or two [e, i, h], gates first; then of the
            second layer [e, h, i].
    """
    *fc1, fc2 = names
    return [
        alternating_experts(
            f"decoder.layers.{{}}.mlp.experts.experts.{mine}.weight",
            *theirs,
            num_experts=num_experts,
            num_blocks=1,
            is_transposed=False,
        )
        for mine, theirs in (("linear_fc1", fc1), ("linear_fc2", [fc2]))
    ]


def query_key_value(megatron_name: str, *names: str) -> WeightRule:
    """Join separate projections: to queries, gates if any, keys and values.

    A group has rows of q/g query heads, the gates of these heads if any, one key head and one value
    head.

    Args:
        names: Hugging Face's tensors; without the tensors that a layer does not have.
    """

    def row_map(model: ModelDescription, _heights: Sequence[int]) -> list[RowRange]:
        return _by_group(model, [(source, 0) for source in range(len(names))])

    return WeightRule(megatron_name, names, row_map)


def key_value(megatron_name: str, key: str, value: str) -> WeightRule:
    """Join separate projections; each group has the rows of one key head and one value head."""

    def row_map(model: ModelDescription, _heights: Sequence[int]) -> list[RowRange]:
        width = model.head_dim
        return [
            RowRange(source, group * width, (2 * group + source) * width, width)
            for group in range(model.num_key_value_heads)
            for source in (0, 1)
        ]

    return WeightRule(megatron_name, (key, value), row_map)


def fused_query_key_value(
    megatron_name: str, hf_name: str, *, is_transposed: bool = False
) -> WeightRule:
    """Split a tensor of all queries, then all keys, then all values, into groups."""

    def row_map(model: ModelDescription, _heights: Sequence[int]) -> list[RowRange]:
        keys = model.num_attention_heads * model.head_dim
        values = keys + model.num_key_value_heads * model.head_dim
        return _by_group(model, [(0, 0), (0, keys), (0, values)])

    return WeightRule(megatron_name, (hf_name,), row_map, is_transposed)


def _by_group(model: ModelDescription, starts: Sequence[tuple[int, int]]) -> list[RowRange]:
    """Interleave queries, gates if any, keys and values, which begin at `starts`: (source, row)."""
    width = model.head_dim
    heads = model.num_attention_heads // model.num_key_value_heads
    gates = [heads * (1 if model.attention_gate_by_head else width)] * (len(starts) - 3)
    heights = (heads * width, *gates, width, model.value_dim)[: len(starts)]
    found, megatron_begin = [], 0
    for group in range(model.num_key_value_heads):
        for (source, start), height in zip(starts, heights, strict=True):
            found.append(RowRange(source, start + group * height, megatron_begin, height))
            megatron_begin += height
    return found


def gated_query_key_value(megatron_name: str, query: str, key: str, value: str) -> WeightRule:
    """Join separate projections of attention with gates, as `query_key_value` does without gates.

    In Hugging Face's query tensor, the gate of a head follows the head. In Megatron's parameter,
    each group has rows of q/g query heads, q/g gate heads, one key head, one value head.
    """

    def row_map(model: ModelDescription, _heights: Sequence[int]) -> list[RowRange]:
        width, per_group = model.head_dim, model.num_attention_heads // model.num_key_value_heads
        begins: list[tuple[int, int]] = []
        for group in range(model.num_key_value_heads):
            heads = [2 * width * (group * per_group + head) for head in range(per_group)]
            begins += [(0, begin) for begin in heads]
            begins += [(0, begin + width) for begin in heads]
            begins += [(1, group * width), (2, group * width)]
        return [RowRange(*begin, i * width, width) for i, begin in enumerate(begins)]

    return WeightRule(megatron_name, (query, key, value), row_map)


def by_block(
    megatron_name: str, num_blocks: int, runs: Mapping[str, tuple[int, ...]]
) -> WeightRule:
    """Split runs of rows into blocks; each block of Megatron's parameter has a piece of every run.

    Args:
        runs: Hugging Face's tensor -> number of rows in each of its runs.
    """

    def row_map(_model: ModelDescription, _heights: Sequence[int]) -> list[RowRange]:
        begins = [
            (source, sum(rows[:i]), height // num_blocks)
            for source, rows in enumerate(runs.values())
            for i, height in enumerate(rows)
        ]
        found, megatron_begin = [], 0
        for block in range(num_blocks):
            for source, begin, piece in begins:
                found.append(RowRange(source, begin + block * piece, megatron_begin, piece))
                megatron_begin += piece
        return found

    return WeightRule(megatron_name, tuple(runs), row_map)
