"""Write low-rank adapters as a PEFT directory (`adapter_config.json`, safetensors).

One layer of Megatron holds several projections of Hugging Face (queries, keys and values; gate and
up). All of these projections get the same A and their own rows of B, by the rules of the family:
the product has the same bits.

Transformers holds the routed experts of a layer in two parameters, `gate_up_proj` and `down_proj`
of `mlp.experts`. PEFT's adapter of such a parameter has A [e*r, i], ordered by expert, and B
[o, r*e], in which the columns with the same number in all experts are adjacent. If both parameters
have an adapter, the adapter of `gate_up_proj` is nested in the adapter of `down_proj` and is named
`base_layer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing.durable import write_durably
from megatron.core.dist_checkpointing.loader import Contents
from megatron.core.dist_checkpointing.shard_file import dtype_name
from megatron.core.foundation.errors import CheckpointError, ConfigError
from megatron.hugging_face.families import family_of_settings
from megatron.hugging_face.families.family import full_name
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.model_directory import read_json
from megatron.hugging_face.stored import Factors, stored_adapters, stored_values
from megatron.hugging_face.weight_map import WeightRule
from megatron.hugging_face.writing import new_directory, write_tensors

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERT_PARAMETERS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""Megatron's layer of routed experts -> Transformers' parameter of all experts."""
_EXPERTS = re.compile(r"(.*layers\.\d+)\.(?:block_sparse_moe|mlp)\.experts\..*", re.ASCII)
_RENAMED = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Layers that PEFT treats as routed experts if the model has experts and `target_modules` names
them. In such models, layers of dense MLPs and shared experts are listed as parameters instead."""


def experts_module(hf_name: str) -> str:
    """Return the name of Transformers' module of all experts, given the name of one's weight.

    Raises:
        ConfigError: the files of the family store experts in another form.
    """
    found = _EXPERTS.fullmatch(hf_name)
    if found is None:
        raise ConfigError(
            f"adapters of routed experts, which files store as {hf_name}.",
            rule="PEFT's adapters of experts belong to the experts of mlp.experts",
            flags=["--lora-target-modules"],
            fix="leave the experts out, or merge the adapters by --save-hf",
        )
    return f"{found[1]}.mlp.experts"


def write_adapters(contents: Contents, target: Path, *, base: str | None) -> None:
    """Write the adapters of a checkpoint.

    Args:
        contents: the opened checkpoint of a run with adapters.
        target: directory to create; it must not exist.
        base: name or path of the base model, for PEFT.
    Raises:
        CheckpointError: the checkpoint has no adapters, or the directory cannot be written.
        ConfigError: no family can express this model, or PEFT cannot express these adapters.
    """
    settings = ModelDescription.from_values(stored_values(contents))
    family = family_of_settings(settings)
    adapters = stored_adapters(contents)
    tensors: dict[str, Tensor] = {}
    target_modules: set[str] = set()
    target_parameters: set[str] = set()
    is_transposed = False
    of_experts: dict[str, dict[str, tuple[WeightRule, Factors]]] = {}
    for rule in family.rules(settings):
        for megatron_name, hf_names in rule.names(settings):
            found = adapters.of(megatron_name)
            if found is None:
                continue
            names = [full_name(name, family.prefixes[0]) for name in hf_names]
            if rule.num_experts is not None:
                part = EXPERT_PARAMETERS[megatron_name.split(".")[-2]]
                of_experts.setdefault(experts_module(names[0]), {})[part] = rule, found
                continue
            is_transposed |= rule.is_transposed
            heights = [found.up.shape[0] // len(names)] * len(names)
            row_map = rule.row_map(settings, heights)
            for index, name in enumerate(names):
                rows = sorted((r for r in row_map if r.source == index), key=lambda r: r.begin)
                layer = name.removesuffix(".weight")
                tensors[f"{PREFIX}{layer}.lora_A.weight"] = found.down.contiguous()
                places = [(r.begin, r.megatron_begin, r.length) for r in rows]
                tensors[f"{PREFIX}{layer}.lora_B.weight"] = _rows(found.up, places)
                if found.magnitude is not None:
                    key = f"{PREFIX}{layer}.lora_magnitude_vector"
                    tensors[key] = _rows(found.magnitude, places)
                # Two parts of the name, because attention and MLP may have layers of one name.
                place = ".".join(layer.split(".")[-2:])
                if settings.num_moe_experts and place.split(".")[-1] in _RENAMED:
                    target_parameters.add(f"{place}.weight")
                else:
                    target_modules.add(place)
    for module, parts in of_experts.items():
        for part, (rule, found) in parts.items():
            is_inner = part == "gate_up_proj" and len(parts) == 2
            layer = PREFIX + module + ".base_layer" * is_inner
            tensors[f"{layer}.lora_A.weight"] = found.down.flatten(0, 1)
            up = found.up
            if rule.num_blocks is not None:  # the rows of the blocks of an expert alternate
                up = up.unflatten(1, (rule.num_blocks, -1)).transpose(1, 2).flatten(1, 2)
            tensors[f"{layer}.lora_B.weight"] = up.permute(1, 2, 0).flatten(1).contiguous()
            target_parameters.add(f"mlp.experts.{part}")
    if adapters.use_dora and target_parameters:
        raise peft_has_no_magnitudes_of_parameters(sorted(target_parameters)[0])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        # PEFT's adapters of parameters have no dropout.
        "lora_dropout": 0.0 if target_parameters else adapters.dropout,
        "target_modules": sorted(target_modules),
        "fan_in_fan_out": is_transposed,
        "bias": "none",
        "use_dora": adapters.use_dora,
        "inference_mode": True,
    }
    if target_parameters:
        config["target_parameters"] = sorted(target_parameters)
    described = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
    with new_directory(target) as draft:
        write_tensors(draft / WEIGHTS_NAME, described, iter(tensors.values()))
        write_durably(draft / CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())


def peft_has_no_magnitudes_of_parameters(where: str) -> ConfigError:
    """Return the error of DoRA adapters that cannot be written for PEFT."""
    return ConfigError(
        f"adapters with --use-dora on {where} cannot be written for PEFT.",
        rule="in a model with experts, PEFT adapts gate_proj, up_proj and down_proj as parameters,"
        " and learns no magnitudes for them",
        flags=["--save-adapter", "--use-dora", "--lora-target-modules"],
        fix="merge them with --save-hf, or list only attention layers in --lora-target-modules",
    )


def _rows(values: Tensor, places: list[tuple[int, int, int]]) -> Tensor:
    """Return rows of Megatron's [o, ...] in Hugging Face's order.

    Args:
        places: (first row in Hugging Face's tensor, first row in Megatron's tensor, length).
    """
    part = values.new_empty(sum(length for *_, length in places), *values.shape[1:])
    for begin, megatron_begin, length in places:
        part[begin : begin + length] = values[megatron_begin : megatron_begin + length]
    return part


_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode",
    "layers_pattern", "layers_to_transform", "peft_version", "revision",
    "target_modules", "exclude_modules", "task_type", "megatron_config", "megatron_core",
    "runtime_config", "ensure_weight_tying", "qalora_group_size", "eva_config",
})  # fmt: skip
"""Fields that follow from the tensors, or matter before training only."""
_OF_WEIGHTS = frozenset({"loftq_config", "corda_config", "lora_ga_config"})
"""Settings of the initializations that `init_lora_weights` names."""
_KEEP_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the frozen weights unchanged."""


@dataclass(frozen=True)
class PeftConfig:
    """The rank, strength and targets in an adapter config."""

    path: Path
    rank: int
    alpha: float
    is_by_root: bool
    """rsLoRA (arXiv 2312.03732): alpha / sqrt(r) instead of alpha / r."""
    dropout: float
    use_dora: bool
    target_parameters: tuple[str, ...]
    alpha_pattern: Mapping[str, float]

    @property
    def scale(self) -> float:
        """The factor on the product B A in layers without a pattern."""
        return self._scale(self.alpha, self.rank)

    def relative_scale(self, layer: str, rank: int) -> float:
        """Return the factor on a layer's product B A, divided by `scale`.

        Args:
            layer: Hugging Face's name of the layer.
            rank: of its A.
        """
        alpha = next(
            (
                value
                for pattern, value in self.alpha_pattern.items()
                if re.match(rf"(?:.*\.)?(?:{pattern})$", layer)
            ),
            self.alpha,
        )
        return self._scale(alpha, rank) / self.scale

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / (rank**0.5 if self.is_by_root else rank)


def read_config(path: Path, file: Path) -> PeftConfig:
    """Read an adapter config.

    Args:
        path: its directory, for messages.
    Raises:
        CheckpointError: the adapter is not LoRA or DoRA on frozen layers; the field is named.
    """
    fields = read_json(file)
    rest = {k: v for k, v in fields.items() if k not in _WITHOUT_EFFECT | _OF_WEIGHTS}
    kind, bias = rest.pop("peft_type", "LORA"), rest.pop("bias", "none")
    start = rest.pop("init_lora_weights", True)
    rank, alpha = rest.pop("r", None), rest.pop("lora_alpha", None)
    dropout, parameters = rest.pop("lora_dropout", 0.0) or 0.0, rest.pop("target_parameters", None)
    ranks, alphas = rest.pop("rank_pattern", None) or {}, rest.pop("alpha_pattern", None) or {}
    known = PeftConfig(
        path,
        rank if isinstance(rank, int) and rank > 0 else 1,
        alpha if isinstance(alpha, int | float) and alpha else 1.0,
        bool(rest.pop("use_rslora", False)),
        dropout if isinstance(dropout, int | float) and 0 <= dropout < 1 else 0.0,
        bool(rest.pop("use_dora", False)),
        tuple(str(name) for name in parameters) if isinstance(parameters, list) else (),
        alphas if isinstance(alphas, dict) else {},
    )
    if kind != "LORA":
        raise problem(path, f"peft_type = {kind!r} is not supported")
    if bias != "none":
        raise problem(path, f"bias = {bias!r} trains biases, which must be frozen")
    if start not in _KEEP_WEIGHTS:
        raise problem(path, f"init_lora_weights = {start!r} changes the frozen weights")
    odd = sorted(name for name, value in rest.items() if value)
    if odd:
        raise problem(path, f"{odd[0]} = {rest[odd[0]]!r} is not supported")
    if (rank, alpha) != (known.rank, known.alpha):
        raise problem(path, f"r = {rank!r}, lora_alpha = {alpha!r}")
    if dropout != known.dropout:
        raise problem(path, f"lora_dropout = {dropout!r}")
    if parameters is not None and not isinstance(parameters, list):
        raise problem(path, f"target_parameters = {parameters!r} is not a list of names")
    patterns = {"rank_pattern": ranks, "alpha_pattern": alphas}
    for name, pattern in patterns.items():
        if not _is_pattern(pattern):
            raise problem(path, f"{name} = {pattern!r} does not map names to positive numbers")
    return known


def _is_pattern(pattern: Any) -> bool:
    if not isinstance(pattern, dict):
        return False
    try:
        for key in pattern:
            re.compile(key)
    except re.error:
        return False
    return all(isinstance(value, int | float) and value > 0 for value in pattern.values())


def problem(path: Path, what: str) -> CheckpointError:
    """Return the error of an adapter that cannot be loaded."""
    return CheckpointError(
        f"{path} cannot be loaded as an adapter: {what}.",
        rule="a PEFT adapter is LoRA or DoRA on frozen layers of the model of --load-hf",
        flags=["--load-adapter", "--load-hf"],
        fix="merge it with PEFT's merge_and_unload(), save the model, and load that with --load-hf",
    )
