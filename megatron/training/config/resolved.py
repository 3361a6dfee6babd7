"""The settings of a run, complete: what was asked for, and what was derived from it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.core.settings.flags import arg_name, derived_args, flag_specs
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.data import TokenizerSettings
from megatron.training.config.model import ModelSettings
from megatron.training.config.run import GROUP_CLASSES, RunConfig
from megatron.training.config.transformer_settings import transformer_config


@dataclass(frozen=True)
class Derivation:
    """One derived value and where it comes from."""

    name: str
    value: Any
    formula: str
    is_of_training: bool = False
    """Whether it says how a model is trained or evaluated: nothing to whoever only uses one."""

    def __str__(self) -> str:
        return f"{self.name} = {getattr(self.value, 'name', self.value)}  ({self.formula})"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What derived settings depend on beside the settings themselves."""

    rank: int = 0
    communication_backend: str = "gloo"
    """Of torch.distributed, for the device of this process."""
    has_engine_layers: bool = False
    """Whether Transformer Engine is installed, and the backend that builds layers of it."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The ranks of a run."""

    world_size: int = 1
    rank: int = 0
    data_parallel_size: int = 1
    """Replicas of the model."""
    total_model_size: int = 1
    """Ranks of tensor and pipeline parallelism together; `model_parallel_size` is the same."""
    model_parallel_size: int = 1
    rank_order: str = "tp-cp-ep-dp-pp"
    """Axes in the order in which ranks are numbered, the fastest first."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(RunConfig):
    """The settings of a run, complete: the groups of `RunConfig`, with what was derived.

    Attributes:
        config: what was asked for, unchanged.
        topology: the ranks.
        derivations: what was derived, in order.
        extra: arguments that a script added to the parser.
        notes: lines on what the user's files ask for without an effect.
    """

    config: RunConfig = field(default_factory=RunConfig)
    topology: Topology = field(default_factory=Topology)
    derivations: tuple[Derivation, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """Every setting by its Megatron name: for `args`, for checkpoints and for messages."""
        found = {**self.flat(), **dataclasses.asdict(self.topology)}
        for group in GROUP_CLASSES:
            settings = getattr(self, group)
            found |= {name: getattr(settings, name) for name in derived_args(type(settings))}
        return found | {
            "encoder_seq_length": self.model.seq_length,
            "iteration": 0,
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
        }

    @functools.cached_property
    def transformer_config(self) -> TransformerConfig:
        """The model's config, built once: for the rules, the layout, the model and its data.

        Raises:
            ConfigError: with all problems of the model and its layout.
        """
        return transformer_config(
            self.model,
            self.latent_attention,
            self.experts,
            self.parallelism,
            self.precision,
            self.extra,
        )

    def with_vocabulary(
        self, model: ModelSettings, tokenizer: TokenizerSettings, derived: Sequence[Derivation]
    ) -> ResolvedRun:
        """Return a copy with the rows of the embedding, on which no other field depends."""
        derivations = (*self.derivations, *derived)
        found = replace(self, model=model, tokenizer=tokenizer, derivations=derivations)
        if "transformer_config" in vars(self):
            config = copy.copy(self.transformer_config)
            config.unpadded_vocab_size = model.unpadded_vocab_size
            vars(found)["transformer_config"] = config
        return found

    def namespace(self) -> Args:
        """Return all settings as Megatron's `args`. Changing it changes nothing in the run."""
        args = Args(**{**self.values, **self.extra})
        args.run = self
        args.remember(self)
        return args

    def overlaid(self, values: Mapping[str, Any]) -> ResolvedRun:
        """Return a copy in which settings have the values of their Megatron names in `values`."""
        changed: dict[str, Any] = {}
        for group in GROUP_CLASSES:
            settings = getattr(self, group)
            specs = [(s.name, s.field, s) for s in flag_specs(type(settings), group)]
            derived = [(name, name, None) for name in derived_args(type(settings))]
            fields = {
                into: values[name] if spec is None else spec.to_field(values[name])
                for name, into, spec in (*specs, *derived)
                if name in values
            }
            changed[group] = replace(settings, **fields)
        ranks = {f.name: values[f.name] for f in dataclasses.fields(Topology) if f.name in values}
        return replace(self, **changed, topology=replace(self.topology, **ranks))


class Args(Namespace):
    """Megatron's `args`, which also knows what the settings in it were derived from.

    So settings that were derived once can be told from those that the user gave, when a script
    hands them back. Slots do not show up in `vars(args)`.
    """

    __slots__ = ("latest", "run")

    run: ResolvedRun
    latest: tuple[Mapping[str, Any], ResolvedRun]
    """Values that a script's settings had when they were last resolved, and the result."""

    def remember(self, run: ResolvedRun) -> None:
        """Keep `run` as what the present values stand for."""
        self.latest = (self._settings(), run)

    def unchanged_run(self) -> ResolvedRun | None:
        """Return the run that was remembered, unless a setting was changed since."""
        known = getattr(self, "latest", None)
        return known[1] if known is not None and known[0] == self._settings() else None

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _COUNTERS}


_COUNTERS = ("iteration", "consumed_train_samples", "consumed_valid_samples",
             "skipped_train_samples", "num_floating_point_operations_so_far",
             "curr_iteration")  # fmt: skip
"""What a script counts in its `args`: no settings."""


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GroupT = TypeVar("GroupT", bound="DataclassInstance")


class DerivationLog:
    """What was derived so far, and whether it is of training."""

    def __init__(self) -> None:
        self.derivations: list[Derivation] = []
        self.is_of_training = False

    def note(self, name: str, value: Any, formula: str) -> None:
        """Record a value of which nothing was known before."""
        self.derivations.append(Derivation(name, value, formula, self.is_of_training))

    def derived(self, before: GroupT, after: GroupT, formula: str) -> GroupT:
        """Record the fields in which two states of a group differ; return the later one."""
        for each in dataclasses.fields(before):
            value = getattr(after, each.name)
            if getattr(before, each.name) != value:
                self.note(arg_name(each), value, formula)
        return after


@dataclass(frozen=True)
class Phase:
    """A range of the samples that a whole run consumes."""

    begin: int
    end: int


def transitions_of(run: ResolvedRun) -> list[int]:
    """Return the iterations after which a phase ends.

    Raises:
        ValueError: the flag holds something else than numbers.
    """
    text = run.schedule.phase_transition_iterations
    return [int(word) for word in text.split(",")] if text else []


def phase_of(run: ResolvedRun, consumed_samples: int) -> Phase:
    """Return the phase in which the sample after `consumed_samples` is."""
    ends = [iteration * run.schedule.global_batch_size for iteration in transitions_of(run)]
    begin = max((end for end in ends if end <= consumed_samples), default=0)
    later = (end for end in ends if end > consumed_samples)
    return Phase(begin, min(later, default=run.schedule.train_samples or 0))


def pad_vocabulary(size: int, *, multiple: int, tp: int) -> int:
    """Return `size` rounded up so that each tensor-parallel rank owns equal, aligned rows."""
    step = multiple * tp
    return -(-size // step) * step


def resolve_vocabulary(run: ResolvedRun, tokenizer_size: int) -> ResolvedRun:
    """Derive the embedding's rows: those of the model that is loaded, else from the tokenizer.

    Args:
        run: with --load-hf or --use-checkpoint-args, its `vocab_size` is the stored model's.
        tokenizer_size: number of ids.
    """
    size, formula = tokenizer_size, "the tokenizer's number of ids"
    asked = run.tokenizer
    rows = asked.vocab_size
    is_stored = run.checkpoint.load_hf is not None or run.checkpoint.use_checkpoint_args
    if is_stored and rows is not None and rows < size:
        # Rows that the model has not would be further classes of its loss.
        formula = (
            f"the model that is loaded; the tokenizer has {size} ids, of which those from {rows} on"
            " stop the run"
        )
        size = rows
    elif rows is not None and rows > size:
        size, formula = rows, "--vocab-size"
    derived = [Derivation("unpadded_vocab_size", size, formula)]
    tokenizer = asked
    if asked.padded_vocab_size is None:
        tp = run.parallelism.tensor_model_parallel_size
        multiple = run.model.make_vocab_size_divisible_by
        padded = pad_vocabulary(size, multiple=multiple, tp=tp)
        formula = f"{size} rounded up to a multiple of {multiple} * tp {tp}"
        tokenizer = replace(asked, padded_vocab_size=padded)
        derived.append(Derivation("padded_vocab_size", padded, formula))
    return run.with_vocabulary(replace(run.model, unpadded_vocab_size=size), tokenizer, derived)
