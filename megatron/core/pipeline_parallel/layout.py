"""Assign the layers of the model to pipeline stages.

Pure integers, no torch. A stage is one model chunk on one pipeline rank. With p ranks and v chunks
per rank, chunk c of rank r is stage c*p + r; in the V shape, odd chunks c are stage
(c+1)*p - 1 - r. There are three ways to split the model:

- evenly;
- evenly, with a chosen number of layers on the first and last rank, or with the embedding and the
  loss counted as one layer each;
- by a layout string such as `Et*3|(tt|)*29,m|L`: one letter per layer (`E` embedding, `t`
  transformer layer, `m` multi-token-prediction layer, `L` loss), `|` between stages, `x*3` or
  `(...)*3` for repetition; commas and spaces are skipped. Stages may be empty.

Layers are numbered from 0 over the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.instructions import Placement, PlacementShape
from megatron.core.pipeline_parallel.layout_string import parse_layout
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named

LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_LETTER_OF = {name: letter for letter, name in LETTERS.items()}

_FLAG_LAYOUT = "--pipeline-model-parallel-layout"
_FLAG_PP = "--pipeline-model-parallel-size"
_FLAG_VP = "--num-virtual-stages-per-pipeline-rank"
_FLAG_FIRST = "--decoder-first-pipeline-num-layers"
_FLAG_LAST = "--decoder-last-pipeline-num-layers"
_FLAG_EMBEDDING = "--account-for-embedding-in-pipeline-split"
_FLAG_LOSS = "--account-for-loss-in-pipeline-split"


class StageSettings(Protocol):
    """The fields of a config that decide the layout (see `TransformerConfig`)."""

    num_layers: int
    pipeline_schedule: str
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    pipeline_model_parallel_layout: Any


@dataclass(frozen=True)
class PipelineLayout:
    """The contents of every stage, as letters in model order.

    Attributes:
        num_ranks: p.
        num_chunks: v.
        stages: p*v strings over `EtmL`, in model order.
        shape: how stages are assigned to ranks.
    """

    num_ranks: int
    num_chunks: int
    stages: tuple[str, ...]
    shape: PlacementShape = PlacementShape.LOOP

    @property
    def placement(self) -> Placement:
        """Return the map between stages and (rank, chunk)."""
        return Placement(self.num_ranks, self.num_chunks, self.shape)

    def stage(self, pp_rank: int, vp_stage: int | None = None) -> int:
        """Return the stage of a chunk; `vp_stage` None is the first chunk."""
        chunk = 0 if vp_stage is None else vp_stage
        assert 0 <= pp_rank < self.num_ranks, f"pp_rank={pp_rank} of {self.num_ranks}"
        assert 0 <= chunk < self.num_chunks, f"vp_stage={chunk} of {self.num_chunks}"
        return self.placement.stage(pp_rank, chunk)

    def layers(self, pp_rank: int, vp_stage: int | None = None) -> range:
        """Return the global 0-based ids of the transformer layers of a chunk."""
        return self._ids("t", self.stage(pp_rank, vp_stage))

    def has_embedding(self, pp_rank: int, vp_stage: int | None = None) -> bool:
        """Return whether the chunk holds the input embedding."""
        return "E" in self.stages[self.stage(pp_rank, vp_stage)]

    def has_loss(self, pp_rank: int, vp_stage: int | None = None) -> bool:
        """Return whether the chunk holds the output layer and the loss."""
        return "L" in self.stages[self.stage(pp_rank, vp_stage)]

    @property
    def mtp_on_earlier_stage(self) -> bool:
        """Whether the multi-token-prediction layers are on a stage before the last one."""
        return any("m" in content for content in self.stages[:-1])

    @property
    def mtp_stage(self) -> int:
        """Stage of the multi-token-prediction layers; the last stage if the layout has none."""
        found = [number for number, content in enumerate(self.stages) if "m" in content]
        return found[0] if found else len(self.stages) - 1

    def reads_tokens(self, pp_rank: int, vp_stage: int | None = None) -> bool:
        """Return whether the chunk reads micro batches: it embeds tokens or computes the loss."""
        return bool(set("EmL") & set(self.stages[self.stage(pp_rank, vp_stage)]))

    def num_stacked_hidden_states(self, stage: int) -> int:
        """Return how many hidden states per token a stage receives in training.

        A stage after the MTP stage receives one more for each multi-token-prediction layer.
        """
        is_after = self.mtp_on_earlier_stage and stage > self.mtp_stage
        return 1 + is_after * self.stages[self.mtp_stage].count("m")

    def embedding_holders(self, *, is_tied: bool) -> list[int]:
        """Return the pipeline rank of each stage that holds the embedding or a copy of it."""
        stages = {0, self.mtp_stage} if self.mtp_on_earlier_stage else {0}
        if is_tied or not self.mtp_on_earlier_stage:
            stages.add(len(self.stages) - 1)
        return [self.placement.location(stage)[0] for stage in sorted(stages)]

    def _ids(self, letter: str, stage: int) -> range:
        first = sum(content.count(letter) for content in self.stages[:stage])
        return range(first, first + self.stages[stage].count(letter))

    def describe(self) -> str:
        """Return a table, one line per rank, one column per chunk."""
        width = max(len(content) for content in self.stages) + 2
        lines = []
        for rank in range(self.num_ranks):
            row = [self.stages[self.stage(rank, c)] or "-" for c in range(self.num_chunks)]
            lines.append(f"rank {rank:>3} | " + "".join(cell.ljust(width) for cell in row))
        return "\n".join(line.rstrip() for line in lines)


def pipeline_layout(config: StageSettings) -> PipelineLayout:
    """Return the layout of a config.

    Raises:
        ConfigError: the stages cannot hold the layers; the message suggests a layout that works.
    """
    p, v = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    schedule = schedule_named(config.pipeline_schedule)
    if not schedule.takes_chunks(v, p):
        raise schedule.chunks_error(v, ConfigError)
    shape = schedule.shape
    chosen = config.pipeline_model_parallel_layout
    if chosen is None:
        counts = _layers_per_stage(config, p, v)
        contents = ["t" * count for count in counts]
        contents[0] = "E" + contents[0]
        contents[-1] += "L"
        return PipelineLayout(p, v, tuple(contents), shape)
    layout = replace(_chosen_layout(chosen, p), shape=shape)
    if (layout.num_ranks, layout.num_chunks) != (p, v):
        raise ConfigError(
            f"the pipeline layout has {layout.num_ranks * layout.num_chunks} stages for {p} ranks"
            f" with {v} chunks each.",
            rule="a layout has one stage per model chunk",
            flags=[_FLAG_LAYOUT, _FLAG_PP, _FLAG_VP],
            fix=f"write {p * v} stages separated by '|', or leave the number of virtual stages "
            "out: the layout decides it",
        )
    check_contents(layout, config.num_layers, getattr(config, "mtp_num_layers", None) or 0)
    return layout


def explicit_layout(config: Any) -> PipelineLayout | None:
    """Return the layout of `pipeline_model_parallel_layout`; None if the config has none."""
    if getattr(config, "pipeline_model_parallel_layout", None) is None:
        return None
    return pipeline_layout(config)


def loss_rank(config: StageSettings) -> int:
    """Return the pipeline rank that computes the loss: the rank of the last stage."""
    p, v = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    return Placement(p, v, schedule_named(config.pipeline_schedule).shape).location(p * v - 1)[0]


def virtual_stages_of(chosen: object, pipeline_model_parallel_size: int) -> int | None:
    """Return the number of chunks per rank in an explicit layout; None for one chunk.

    An invalid layout also gives None: `pipeline_layout` raises the error.
    """
    try:
        num_chunks = _chosen_layout(chosen, pipeline_model_parallel_size).num_chunks
    except ConfigError:
        return None
    return num_chunks if num_chunks > 1 else None


def _chosen_layout(chosen: Any, p: int) -> PipelineLayout:
    if isinstance(chosen, PipelineLayout):
        return chosen
    if not isinstance(chosen, PipelineParallelLayerLayout):
        chosen = PipelineParallelLayerLayout(chosen, p)
    return chosen.pipeline_layout


def _layers_per_stage(config: StageSettings, p: int, v: int) -> list[int]:
    """Return the number of transformer layers of each of the p*v stages."""
    first = config.num_layers_in_first_pipeline_stage
    last = config.num_layers_in_last_pipeline_stage
    embedding = bool(config.account_for_embedding_in_pipeline_split)
    loss = bool(config.account_for_loss_in_pipeline_split)
    if first is None and last is None:
        return _even_split(config.num_layers, p, v, embedding, loss)
    if embedding or loss:
        raise ConfigError(
            "the embedding or loss is counted as a layer while the first or last stage has a "
            "chosen number of layers.",
            rule="a pipeline is split in one way",
            flags=[_FLAG_EMBEDDING, _FLAG_LOSS, _FLAG_FIRST, _FLAG_LAST],
            fix="keep one of the two",
        )
    return _uneven_split(config.num_layers, p, v, first, last)


def _even_split(num_layers: int, p: int, v: int, embedding: bool, loss: bool) -> list[int]:
    total = num_layers + embedding + loss
    if total % (p * v):
        extra = " + embedding" * embedding + " + loss" * loss
        down, up = total // (p * v) * (p * v), -(-total // (p * v)) * (p * v)
        near = [str(n - embedding - loss) for n in (down, up) if n - embedding - loss > 0]
        raise ConfigError(
            f"{num_layers} layers{extra} cannot be split over {p} pipeline ranks"
            + (f" with {v} chunks each." if v > 1 else "."),
            rule="every stage of an even split has the same number of layers",
            flags=["--num-layers", _FLAG_PP, _FLAG_VP, _FLAG_EMBEDDING, _FLAG_LOSS],
            fix=f"use {' or '.join(near)} layers, {_FLAG_FIRST}/{_FLAG_LAST}, or {_FLAG_LAYOUT}",
        )
    counts = [total // (p * v)] * (p * v)
    counts[0] -= embedding
    counts[-1] -= loss
    if counts[0] < 0 or counts[-1] < 0:
        raise ConfigError(
            f"{num_layers} layers over {p * v} stages are too many to count both the embedding "
            "and the loss as layers.",
            rule="a stage holds at least the extra layers that it counts",
            flags=["--num-layers", _FLAG_PP, _FLAG_VP, _FLAG_EMBEDDING, _FLAG_LOSS],
            fix="use fewer stages or drop one of the two flags",
        )
    return counts


def _uneven_split(
    num_layers: int, p: int, v: int, first: int | None, last: int | None
) -> list[int]:
    flags = ["--num-layers", _FLAG_PP, _FLAG_VP, _FLAG_FIRST, _FLAG_LAST]
    if p == 1:
        raise ConfigError(
            "a first or last stage with its own number of layers, with pipeline size 1.",
            rule="with one rank there is one stage, which holds all layers",
            flags=flags,
            fix=f"drop {_FLAG_FIRST}/{_FLAG_LAST} or raise {_FLAG_PP}",
        )
    num_even = p - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    chosen = f"{_FLAG_FIRST} {first}, {_FLAG_LAST} {last}".replace(" None", " not given")
    if rest < 0 or (num_even == 0 and rest) or (num_even and rest % num_even):
        raise ConfigError(
            f"{num_layers} layers with {chosen} leave {rest} layers for {num_even} other ranks.",
            rule="the ranks between get equal numbers of layers, and none is left over",
            flags=flags,
            fix=f"choose first and last so that the rest divides by {num_even}"
            if num_even
            else f"choose first and last so that they sum to {num_layers}",
        )
    per_rank = [rest // num_even if num_even else 0] * p
    per_rank[0] = per_rank[0] if first is None else first
    per_rank[-1] = per_rank[-1] if last is None else last
    odd = sorted({count for count in per_rank if count % v})
    if odd:
        raise ConfigError(
            f"pipeline ranks with {', '.join(map(str, odd))} layers cannot be cut into {v} chunks.",
            rule="the chunks of one rank have equal numbers of layers",
            flags=flags,
            fix=f"use multiples of {v}, or {_FLAG_LAYOUT}",
        )
    return [per_rank[rank] // v for _ in range(v) for rank in range(p)]


def check_contents(layout: PipelineLayout, num_layers: int, mtp_num_layers: int = 0) -> None:
    """Raise `ConfigError` unless a layout holds exactly this model, in a possible order."""
    content = "".join(layout.stages)
    wrong = []
    for letter, wanted in (("E", 1), ("t", num_layers), ("m", mtp_num_layers), ("L", 1)):
        if content.count(letter) != wanted:
            wrong.append(f"{content.count(letter)} '{letter}' instead of {wanted}")
    if wrong:
        raise ConfigError(
            f"the pipeline layout has {', '.join(wrong)}:\n{layout.describe()}",
            rule="a layout has one E, one t per layer, one m per multi-token-prediction layer, "
            "one L",
            flags=[_FLAG_LAYOUT, "--num-layers", "--mtp-num-layers"],
            fix="correct the numbers of repetitions",
        )
    if list(content) != sorted(content, key="EtmL".index):
        raise ConfigError(
            f"the layers of the pipeline layout are out of order:\n{layout.describe()}",
            rule="embedding, transformer layers, multi-token-prediction layers, loss",
            flags=[_FLAG_LAYOUT],
            fix="put the letters in the order E, t, m, L (stages between may be empty)",
        )
    if sum("m" in stage for stage in layout.stages) > 1:
        raise ConfigError(
            f"the pipeline layout predicts later tokens in several stages:\n{layout.describe()}",
            rule="all multi-token-prediction layers are on one stage: each layer reads the hidden"
            " states of the previous one",
            flags=[_FLAG_LAYOUT, "--mtp-num-layers"],
            fix="put all letters m into one stage, with or without L",
        )
    if "E" not in layout.stages[0] or "L" not in layout.stages[-1]:
        raise ConfigError(
            f"the pipeline layout has no E in its first or no L in its last stage:\n"
            f"{layout.describe()}",
            rule="the first stage reads the tokens and the last one computes the loss",
            flags=[_FLAG_LAYOUT],
            fix="move E to the first stage and L to the last",
        )


class PipelineParallelLayerLayout:
    """A custom layout with Megatron's interface.

    Args:
        layout: a layout string, or a list of stages; a stage is a list of layer types (enum
            members or their names: embedding, decoder, mtp, loss) or a string of letters.
        pipeline_model_parallel_size: p; the number of stages must be a multiple of it.
    """

    def __init__(
        self, layout: str | Sequence[Iterable[object]], pipeline_model_parallel_size: int
    ) -> None:
        self.input_data = layout
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        if isinstance(layout, str):
            stages = parse_layout(layout)
        else:
            stages = ["".join(_letter(entry) for entry in stage) for stage in layout]
        if len(stages) % pipeline_model_parallel_size:
            raise ConfigError(
                f"the pipeline layout {layout!r} has {len(stages)} stages for "
                f"{pipeline_model_parallel_size} ranks.",
                rule="every rank holds the same number of stages",
                flags=[_FLAG_LAYOUT, _FLAG_PP],
                fix="add empty stages (two '|' in a row) or change the pipeline size",
            )
        self.virtual_pipeline_model_parallel_size = len(stages) // pipeline_model_parallel_size
        self.pipeline_layout = PipelineLayout(
            pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size, tuple(stages)
        )
        self.flatten_layout = [LETTERS[letter] for content in stages for letter in content]
        self.layout = [
            [
                [LETTERS[letter] for letter in stages[chunk * pipeline_model_parallel_size + rank]]
                for chunk in range(self.virtual_pipeline_model_parallel_size)
            ]
            for rank in range(pipeline_model_parallel_size)
        ]

    def __repr__(self) -> str:
        return f"PipelineParallelLayerLayout({self.input_data!r})"

    @classmethod
    def from_str(
        cls, layout: str, pipeline_model_parallel_size: int
    ) -> PipelineParallelLayerLayout:
        """Build from a layout string."""
        return cls(layout, pipeline_model_parallel_size)

    @staticmethod
    def get_num_stages_from_str(layout: str) -> int:
        """Return how many stages a layout string has."""
        return len(parse_layout(layout))

    def pretty_repr(self) -> str:
        """Return a table of the stages, one line per rank."""
        return self.pipeline_layout.describe()

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None = None) -> None:
        """Raise `ConfigError` unless the layout holds exactly these layers."""
        check_contents(self.pipeline_layout, num_layers, mtp_num_layers or 0)

    def get_num_layers_to_build(
        self, layer_type: object = "decoder", vp_stage: int | None = None, pp_rank: int = 0
    ) -> int:
        """Return how many layers of a type a chunk has."""
        return len(self.get_layer_id_list(layer_type, vp_stage, pp_rank))

    def get_layer_offset(
        self, layer_type: object = "decoder", vp_stage: int | None = None, pp_rank: int = 0
    ) -> int:
        """Return the global 0-based id of the chunk's first layer of a type."""
        stage = self.pipeline_layout.stage(pp_rank, vp_stage)
        letter = _letter(layer_type)
        return sum(content.count(letter) for content in self.pipeline_layout.stages[:stage])

    def get_layer_id_list(
        self, layer_type: object = "decoder", vp_stage: int | None = None, pp_rank: int = 0
    ) -> list[int]:
        """Return the global 0-based ids of the chunk's layers of a type."""
        stage = self.pipeline_layout.stage(pp_rank, vp_stage)
        return list(self.pipeline_layout._ids(_letter(layer_type), stage))


def _letter(layer_type: Any) -> str:
    """Return the letter of a layer type given as an enum member, a name or a letter."""
    name = getattr(layer_type, "name", layer_type)
    if name in LETTERS:
        return str(name)
    if name in _LETTER_OF:
        return _LETTER_OF[name]
    raise ConfigError(
        f"{layer_type!r} is not a layer type of a pipeline layout.",
        rule=f"layer types are {', '.join(f'{n} ({c})' for c, n in LETTERS.items())}",
        flags=[_FLAG_LAYOUT],
        fix="use one of these names",
    )
