"""The complete settings of a run: given and derived values."""

from __future__ import annotations

import copy
import dataclasses
import functools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.models.model_settings import ModelSettings
from megatron.core.settings.flags import arg_name, derived_args, flag_specs
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.data import TokenizerSettings
from megatron.training.config.run import GROUP_CLASSES, RunConfig
from megatron.training.config.transformer_settings import transformer_config


@dataclass(frozen=True)
class Derivation:
    """One derived value and its formula."""

    name: str
    value: Any
    formula: str
    is_of_training: bool = False
    """Whether the value concerns training or evaluation; programs that use a model omit it."""

    def __str__(self) -> str:
        return f"{self.name} = {getattr(self.value, 'name', self.value)}  ({self.formula})"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Properties of rank and machine that affect derived settings."""

    rank: int = 0
    communication_backend: str = "gloo"
    """Backend of torch.distributed for the device of this process."""
    has_engine_layers: bool = False
    """Whether Transformer Engine and the backend that builds its layers are installed."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The ranks of a run."""

    world_size: int = 1
    rank: int = 0
    data_parallel_size: int = 1
    """Replicas of the model."""
    total_model_size: int = 1
    """Tensor-parallel size * pipeline-parallel size, equal to `model_parallel_size`."""
    model_parallel_size: int = 1
    rank_order: str = "tp-cp-ep-dp-pp"
    """Axes of the rank grid; the first axis varies fastest from rank to rank."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(RunConfig):
    """The complete settings of a run: the groups of `RunConfig` with derived values.

    Attributes:
        config: the given settings, unchanged.
        derivations: the derived values, in the order of derivation.
        extra: arguments that a script added to the parser.
        notes: log lines on settings in the user's files that have no effect.
    """

    config: RunConfig = field(default_factory=RunConfig)
    topology: Topology = field(default_factory=Topology)
    derivations: tuple[Derivation, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """Megatron's name -> value of every setting, for `args`, checkpoints and messages."""
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
        """The model's config, built once.

        Raises:
            ConfigError: the model or its layout is invalid; the error lists all problems.
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
        """Return a copy with another vocabulary size; no other field depends on it."""
        derivations = (*self.derivations, *derived)
        found = replace(self, model=model, tokenizer=tokenizer, derivations=derivations)
        if "transformer_config" in vars(self):
            config = copy.copy(self.transformer_config)
            config.unpadded_vocab_size = model.unpadded_vocab_size
            vars(found)["transformer_config"] = config
        return found

    def namespace(self) -> Args:
        """Return all settings as Megatron's `args`, a copy."""
        args = Args(**{**self.values, **self.extra})
        args.run = self
        args.remember(self)
        return args

    def overlaid(self, values: Mapping[str, Any]) -> ResolvedRun:
        """Return a copy with the settings in `values`, which maps Megatron's names to values."""
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
    """Megatron's `args` with a reference to the run that it was made from.

    When a script returns its `args`, the run distinguishes derived settings from given ones. Slots
    do not appear in `vars(args)`.
    """

    __slots__ = ("latest", "run")

    run: ResolvedRun
    latest: tuple[Mapping[str, Any], ResolvedRun]
    """The last resolved settings, and the run that was resolved from them."""

    def remember(self, run: ResolvedRun) -> None:
        """Store `run` with the present settings."""
        self.latest = (self._settings(), run)

    def unchanged_run(self) -> ResolvedRun | None:
        """Return the stored run, or None if a setting has changed since."""
        known = getattr(self, "latest", None)
        return known[1] if known is not None and known[0] == self._settings() else None

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _COUNTERS}


_COUNTERS = ("iteration", "consumed_train_samples", "consumed_valid_samples",
             "skipped_train_samples", "num_floating_point_operations_so_far",
             "curr_iteration")  # fmt: skip
"""Counters that a script keeps in its `args`; they are not settings."""


@functools.cache
def _fields() -> dict[str, tuple[str, str]]:
    """Return field -> (its group, its name on `get_args()`); no two groups share a field."""
    return {
        each.name: (group, arg_name(each))
        for group, group_class in GROUP_CLASSES.items()
        for each in dataclasses.fields(group_class)
    }


class Draft:
    """A run while its settings are derived."""

    def __init__(self, run: ResolvedRun) -> None:
        self.run = run
        self.derivations: list[Derivation] = []
        self.is_of_training = False
        """Property of the next derived values."""

    def note(self, name: str, value: Any, formula: str) -> None:
        """Record a derived value."""
        self.derivations.append(Derivation(name, value, formula, self.is_of_training))

    def set(self, formula: str = "", **values: Any) -> None:
        """Set fields of any groups, and record values that are new if there is a formula."""
        for name, value in values.items():
            group, arg = _fields()[name]
            settings = getattr(self.run, group)
            if getattr(settings, name) != value:
                changed = {group: replace(settings, **{name: value})}
                self.run = replace(self.run, **changed)
                if formula:
                    self.note(arg, value, formula)


@dataclass(frozen=True)
class Phase:
    """A range of the run's samples."""

    begin: int
    end: int


def transitions_of(run: ResolvedRun) -> list[int]:
    """Return the last iteration of each phase but the last.

    Raises:
        ValueError: --phase-transition-iterations contains words that are not numbers.
    """
    text = run.schedule.phase_transition_iterations
    return [int(word) for word in text.split(",")] if text else []


def phase_of(run: ResolvedRun, consumed_samples: int) -> Phase:
    """Return the phase that contains the sample after `consumed_samples`."""
    ends = [iteration * run.schedule.global_batch_size for iteration in transitions_of(run)]
    begin = max((end for end in ends if end <= consumed_samples), default=0)
    later = (end for end in ends if end > consumed_samples)
    return Phase(begin, min(later, default=run.schedule.train_samples or 0))


def pad_vocabulary(size: int, *, multiple: int, tp: int) -> int:
    """Return `size` rounded up to a multiple of `multiple * tp`."""
    step = multiple * tp
    return -(-size // step) * step


def resolve_vocabulary(run: ResolvedRun, tokenizer_size: int) -> ResolvedRun:
    """Derive the vocabulary size from the loaded model, or else from the tokenizer.

    Args:
        run: with --load-hf or --use-checkpoint-args, `vocab_size` is the stored model's size.
        tokenizer_size: number of ids of the tokenizer.
    """
    size, formula = tokenizer_size, "the tokenizer's number of ids"
    asked = run.tokenizer
    rows = asked.vocab_size
    is_stored = run.checkpoint.load_hf is not None or run.checkpoint.use_checkpoint_args
    if is_stored and rows is not None and rows < size:
        # Additional rows would be additional classes of the loss.
        formula = (
            f"size of the loaded model; the tokenizer has {size} ids, and an id >= {rows} stops the"
            " run"
        )
        size = rows
    elif rows is not None and rows > size:
        size, formula = rows, "--vocab-size"
    derived = [Derivation("unpadded_vocab_size", size, formula)]
    tokenizer = asked
    if asked.padded_vocab_size is None:
        # Units of `--layout-invariant-mode` have the same shape in every layout.
        tp = max(run.parallelism.tensor_model_parallel_size, run.parallelism.tensor_units)
        multiple = run.model.make_vocab_size_divisible_by
        padded = pad_vocabulary(size, multiple=multiple, tp=tp)
        formula = f"{size} rounded up to a multiple of {multiple} * tp {tp}"
        tokenizer = replace(asked, padded_vocab_size=padded)
        derived.append(Derivation("padded_vocab_size", padded, formula))
    return run.with_vocabulary(replace(run.model, unpadded_vocab_size=size), tokenizer, derived)
