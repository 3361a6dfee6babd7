"""Read low-rank adapters from a PEFT directory.

One layer of Megatron holds several projections of Hugging Face (queries, keys and values; gate and
up), and each of them may have its own A. In this case, Megatron's A is the concatenation of all
different A, and its B is nonzero only in the columns of each projection's own A: the product is
the same, and the rank is the sum of the ranks. An adapter that `adapters.write_adapters` wrote has
one A for all projections, so reading it restores the original. If layers differ in rank or strength
(`rank_pattern`, `alpha_pattern`), A and B are padded with zeros to the common rank, and B is
scaled.

Transformers has one parameter for all routed experts of a layer, with one adapter (its form is
described in `adapters`); older versions have a layer and an adapter for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.interop.stored_view import StoredView, ViewReader
from megatron.core.distributed.adapter_parameters import frozen_row_norms, write_parameter
from megatron.core.parameters.initialization import canonical_names
from megatron.core.parameters.param_meta import get_param_meta, shard_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.low_rank_adapter import (
    EXPERT_TARGETS,
    TARGETS,
    LowRankAdapter,
    adapter_parameters,
)
from megatron.core.utils import unwrap_model
from megatron.hugging_face.adapters import (
    CONFIG_NAME,
    EXPERT_PARAMETERS,
    PREFIX,
    WEIGHTS_NAME,
    PeftConfig,
    experts_module,
    problem,
    read_config,
)
from megatron.hugging_face.families.family import full_name
from megatron.hugging_face.model_directory import ModelDirectory, tensors_of_file
from megatron.hugging_face.weight_map import RowRange, WeightRule, concatenated

_MAGNITUDES = ("lora_magnitude_vector", "lora_magnitude_vector.weight")


@dataclass(frozen=True)
class _Source:
    """The adapter of one Hugging Face layer, not read yet."""

    down: StoredView
    up: StoredView
    magnitude: StoredView | None
    rows: tuple[RowRange, ...]
    factor: float
    """The strength of this adapter divided by the strength of the directory."""
    expert: int | None = None
    """The expert whose part of A and B is used, if A and B belong to all experts."""
    num_experts: int = 1
    num_blocks: int = 1
    """Number of blocks whose rows alternate."""

    @property
    def rank(self) -> int:
        return self.down.shape[0] // self.num_experts


@dataclass(frozen=True)
class PeftAdapter:
    """The adapters of a directory, by Megatron's layers."""

    path: Path
    rank: int
    """The largest rank of a Megatron layer: the sum of the ranks of its different A."""
    alpha: float
    dropout: float
    use_dora: bool
    adapted: Mapping[str, tuple[_Source, ...]]
    """Megatron's name of a weight, with one weight for each expert -> its adapters."""

    @property
    def targets(self) -> list[str]:
        """The --lora-target-modules names of the layers with an adapter."""
        found = {_target_of(name) for name in self.adapted}
        return [name for name in (*TARGETS, *EXPERT_TARGETS) if name in found]

    @contextmanager
    def opened(self) -> Iterator[AdapterReader]:
        """Open the file of tensors."""
        with ViewReader() as reader:
            yield AdapterReader(self, reader)


class AdapterReader:
    """Reads the adapters of single layers."""

    def __init__(self, adapter: PeftAdapter, reader: ViewReader) -> None:
        self.adapter, self._reader = adapter, reader
        self._held: dict[str, tuple[StoredView, Tensor]] = {}
        """The tensors that were read last, so that a tensor of all experts is read once."""

    def layer(self, megatron_name: str, height: int, width: int) -> dict[str, Tensor]:
        """Return `down` A [r, width], `up` B [height, r] and `magnitude` [height] of a weight.

        Without an adapter A and B are zero; the magnitude of rows that keep their norm is NaN.
        """
        rank = self.adapter.rank
        down, up = torch.zeros(rank, width), torch.zeros(height, rank)
        magnitude = torch.full((height,), torch.nan)
        columns: list[tuple[Tensor, slice]] = []
        for source in self.adapter.adapted.get(megatron_name, ()):
            hf_down, wide = self._factors(source)
            if hf_down.shape[1] != width or sum(r.length for r in source.rows) != len(wide):
                raise problem(
                    self.adapter.path,
                    f"{megatron_name} is [{height}, {width}], and its adapter has"
                    f" {hf_down.shape[1]} inputs and {len(wide)} outputs",
                )
            place = next((where for known, where in columns if known.equal(hf_down)), None)
            if place is None:
                begin = sum(len(known) for known, _ in columns)
                place = slice(begin, begin + len(hf_down))
                columns.append((hf_down, place))
                down[place] = hf_down
            if source.factor != 1.0:
                wide = wide * source.factor
            norms = None
            if source.magnitude is not None:
                norms = self._full("magnitude", source.magnitude)
            for rows in source.rows:
                here = slice(rows.megatron_begin, rows.megatron_begin + rows.length)
                there = slice(rows.begin, rows.begin + rows.length)
                up[here, place] = wide[there]
                if norms is not None:
                    magnitude[here] = norms[there]
        return {"down": down, "up": up, "magnitude": magnitude}

    def _factors(self, source: _Source) -> tuple[Tensor, Tensor]:
        down, up = self._full("down", source.down), self._full("up", source.up)
        if source.expert is not None:
            down = down.unflatten(0, (source.num_experts, -1))[source.expert]
            up = up.unflatten(1, (-1, source.num_experts))[..., source.expert]
            up = up.unflatten(0, (-1, source.num_blocks)).transpose(0, 1).flatten(0, 1)
        return down, up

    def _full(self, part: str, view: StoredView) -> Tensor:
        held = self._held.get(part)
        if held is None or held[0] is not view:
            held = (view, self._reader.read_full(view).to(torch.get_default_dtype()))
            self._held[part] = held
        return held[1]


def read_adapters(path: Path, model: ModelDirectory) -> PeftAdapter:
    """Read the config of an adapter and find its tensors.

    Args:
        model: the base model of the adapter.
    Raises:
        CheckpointError: the adapter is missing, is not LoRA or DoRA, or is for another model.
    """
    if not (path / CONFIG_NAME).is_file() or not (path / WEIGHTS_NAME).is_file():
        raise problem(path, f"it holds no {CONFIG_NAME} with {WEIGHTS_NAME}")
    config = read_config(path, path / CONFIG_NAME)
    finder = _Finder(path, config, tensors_of_file(path / WEIGHTS_NAME))
    settings, prefix = model.settings, model.family.prefixes[0]
    adapted: dict[str, tuple[_Source, ...]] = {}
    for rule in model.family.rules(model.settings):
        for megatron_name, hf_names in rule.names(settings):
            if not megatron_name.endswith(".weight"):
                continue
            if _target_of(megatron_name) not in (*TARGETS, *EXPERT_TARGETS):
                continue
            names = [full_name(name, prefix).removesuffix(".weight") for name in hf_names]
            if rule.num_experts is None:
                found = finder.of_layers(names)
                heights = finder.heights(found, len(names))
                if found:
                    rows = rule.row_map(settings, heights)
                    adapted[megatron_name] = finder.sources(found, rows)
                continue
            before, after = megatron_name.split("experts.experts.")
            for expert in range(rule.num_experts):
                sources = finder.of_expert(names, rule, after.split(".")[0], expert)
                if sources:
                    adapted[f"{before}experts.local_experts.{expert}.{after}"] = sources
    finder.all_were_used()
    needed = max((finder.num_columns(sources) for sources in adapted.values()), default=config.rank)
    needed = max(needed, config.rank)
    return PeftAdapter(
        path, needed, config.scale * needed, config.dropout, config.use_dora, adapted
    )


_Found = Mapping[int, tuple[str, StoredView, StoredView, StoredView | None]]
"""Index of a Hugging Face layer -> its name, A, B and magnitude."""


class _Finder:
    """Find the tensors of adapters, and record the tensors that were used."""

    def __init__(self, path: Path, config: PeftConfig, stored: Mapping[str, StoredView]) -> None:
        self.path, self.config, self.stored = path, config, stored
        self.used: set[str] = set()
        self._numbers: dict[str, int] = {}

    def of_layers(self, layers: list[str]) -> _Found:
        """Return the layers that have A and B."""
        found = {}
        for index, layer in enumerate(layers):
            names = [f"{PREFIX}{layer}.lora_{part}.weight" for part in "AB"]
            if not all(name in self.stored for name in names):
                continue
            down, up = (self.stored[name] for name in names)
            if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
                raise problem(
                    self.path, f"A and B of {layer!r} have the shapes {down.shape} and {up.shape}"
                )
            self.used.update(names)
            magnitudes = [f"{PREFIX}{layer}.{name}" for name in _MAGNITUDES]
            known = next((name for name in magnitudes if name in self.stored), None)
            if known is None and self.config.use_dora:
                raise problem(self.path, f"use_dora = True, without {magnitudes[0]!r}")
            if known is not None and self.config.use_dora:
                self.used.add(known)
            found[index] = (layer, down, up, self.stored[known] if known is not None else None)
        return found

    def heights(self, found: _Found, count: int) -> list[int]:
        """Return the number of outputs of each layer.

        For a layer without an adapter, this is the number of another layer.
        """
        some = next((up.shape[0] for *_, up, _ in found.values()), 0)
        return [found[i][2].shape[0] if i in found else some for i in range(count)]

    def sources(self, found: _Found, rows: list[RowRange]) -> tuple[_Source, ...]:
        return tuple(
            _Source(
                down,
                up,
                magnitude,
                tuple(r for r in rows if r.source == index),
                self.config.relative_scale(name, down.shape[0]),
            )
            for index, (name, down, up, magnitude) in found.items()
        )

    def of_expert(
        self, names: list[str], rule: WeightRule, layer: str, expert: int
    ) -> tuple[_Source, ...]:
        """Return the adapters of one expert's layer."""
        count = rule.num_experts
        assert count
        module, parameter = experts_module(names[0]), EXPERT_PARAMETERS[layer]
        where = self._module_of(module, parameter)
        found = self.of_layers([where]) if where is not None else {}
        if found:
            _, down, up, _ = found[0]
            if down.shape[0] % count:
                raise problem(self.path, f"{where!r} has A {down.shape} for {count} experts")
            rows = (RowRange(0, 0, 0, up.shape[0]),)
            rank = down.shape[0] // count
            factor = self.config.relative_scale(f"{module}.{parameter}", rank)
            blocks = rule.num_blocks or 1
            return (_Source(down, up, None, rows, factor, expert, count, blocks),)
        if rule.num_blocks is not None:
            return ()
        each = len(names) // count
        own = self.of_layers(names[expert * each : (expert + 1) * each])
        return self.sources(own, concatenated(None, self.heights(own, each)))

    def _module_of(self, module: str, parameter: str) -> str | None:
        """Return PEFT's name of the module with the adapter of a parameter of all experts."""
        inner = f"{module}.base_layer"
        if f"{PREFIX}{inner}.lora_A.weight" in self.stored:
            return inner if parameter == "gate_up_proj" else module
        named = {name.split(".")[-1] for name in self.config.target_parameters}
        return module if parameter in named else None

    def num_columns(self, sources: tuple[_Source, ...]) -> int:
        """Return the sum of the ranks of the different A of a layer."""
        if len(sources) == 1:
            return sources[0].rank
        with ViewReader() as reader:
            tensors = [reader.read_full(source.down) for source in sources]
        kept = [t for i, t in enumerate(tensors) if not any(t.equal(x) for x in tensors[:i])]
        return sum(len(t) for t in kept)

    def all_were_used(self) -> None:
        """Raise CheckpointError if a tensor was not used."""
        unknown = sorted(set(self.stored) - self.used)
        if unknown:
            what = f"{len(unknown)} tensors belong to no layer of the model, such as {unknown[0]!r}"
            raise problem(self.path, what)


def _target_of(megatron_name: str) -> str:
    """Return the --lora-target-modules name of the layer of a weight."""
    is_expert = ".experts.experts." in megatron_name or ".local_experts." in megatron_name
    return "experts." * is_expert + megatron_name.split(".")[-2]


def load_adapters(
    adapter: PeftAdapter, chunks: list[nn.Module], groups: ProcessGroupCollection
) -> None:
    """Fill the adapters of this rank's part of a model; those without a file become zero.

    All ranks call it, after the frozen weights were loaded.
    """
    for chunk in chunks:
        model = unwrap_model(chunk)
        names = canonical_names(model)
        layers: dict[str, dict[str, tuple[str, nn.Parameter]]] = {}
        for name, parameter in adapter_parameters(model):
            layer, _, part = names[name].rpartition(".adapter.")
            layers.setdefault(layer, {})[part] = name, parameter
        with adapter.opened() as reader, torch.no_grad():
            for layer, parts in layers.items():
                is_expert = get_param_meta(parts["up"][1]).is_expert
                tp = groups.expt_tp if is_expert else groups.tp
                height = _full_shape(parts["up"][1], tp.size())[0]
                width = _full_shape(parts["down"][1], tp.size())[1]
                full = reader.layer(f"{layer}.weight", height, width)
                for part, (name, parameter) in parts.items():
                    meta = get_param_meta(parameter)
                    value = shard_of(full[part], meta, tp.rank(), tp.size())
                    if part == "magnitude":
                        value = _with_norms(value, model, name)
                    write_parameter(chunk, parameter, value)


def _with_norms(magnitude: Tensor, model: nn.Module, name: str) -> Tensor:
    """Replace NaN in magnitudes [o/tp], or [o], by the norms of the frozen rows."""
    layer = model.get_submodule(name.rpartition(".adapter.")[0])
    adapter = layer.get_submodule("adapter")
    assert isinstance(adapter, LowRankAdapter)
    norms = frozen_row_norms(layer, adapter)
    return torch.where(magnitude.isnan().to(norms.device), norms, magnitude.to(norms))


def _full_shape(parameter: Tensor, size: int) -> tuple[int, ...]:
    split = get_param_meta(parameter).split_dim
    return tuple(n * size if dim == split else n for dim, n in enumerate(parameter.shape))


__all__ = ["AdapterReader", "PeftAdapter", "load_adapters", "read_adapters"]
