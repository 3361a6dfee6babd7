"""Read PEFT's `adapter_config.json`: what every field means here, or why it is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import CheckpointError
from megatron.hugging_face.model_directory import read_json

_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode",
    "layers_pattern", "layers_to_transform", "peft_version", "revision",
    "target_modules", "exclude_modules", "task_type", "megatron_config", "megatron_core",
    "runtime_config", "ensure_weight_tying", "qalora_group_size", "eva_config",
})  # fmt: skip
"""Fields that the tensors say already, or that matter before training only."""
_OF_WEIGHTS = frozenset({"loftq_config", "corda_config", "lora_ga_config"})
"""Settings of ways to begin that `init_lora_weights` names."""
_KEEP_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin, `init_lora_weights`, that leave the frozen weights as they are."""


@dataclass(frozen=True)
class PeftConfig:
    """What a config says of strength and places."""

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
        """Factor on the products of layers that no pattern names."""
        return self._scale(self.alpha, self.rank)

    def relative_scale(self, layer: str, rank: int) -> float:
        """Return the factor on a layer's product, where `scale` is 1.

        Args:
            layer: Hugging Face's name of it; rank: of its A.
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
    """Read a config.

    Args:
        path: its directory, for messages.
    Raises:
        CheckpointError: it is not that of LoRA or DoRA beside frozen layers, naming the field.
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
        raise problem(path, f"peft_type = {kind!r} is another kind of adapter")
    if bias != "none":
        raise problem(path, f"bias = {bias!r} trains biases of the model, which are frozen here")
    if start not in _KEEP_WEIGHTS:
        raise problem(path, f"init_lora_weights = {start!r} changes the frozen weights")
    odd = sorted(name for name, value in rest.items() if value)
    if odd:
        raise problem(
            path, f"{odd[0]} = {rest[odd[0]]!r} is more than a product beside frozen layers"
        )
    if (rank, alpha) != (known.rank, known.alpha):
        raise problem(path, f"r = {rank!r}, lora_alpha = {alpha!r}")
    if dropout != known.dropout:
        raise problem(path, f"lora_dropout = {dropout!r}")
    if parameters is not None and not isinstance(parameters, list):
        raise problem(path, f"target_parameters = {parameters!r} is no list of names")
    patterns = {"rank_pattern": ranks, "alpha_pattern": alphas}
    for name, pattern in patterns.items():
        if not _is_pattern(pattern):
            raise problem(path, f"{name} = {pattern!r} is no list of names and numbers")
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
    """Return what to raise about an adapter that cannot be loaded."""
    return CheckpointError(
        f"{path} cannot be loaded as an adapter: {what}.",
        rule="an adapter of PEFT's is LoRA or DoRA beside frozen layers, of the model of --load-hf",
        flags=["--load-adapter", "--load-hf"],
        fix="merge it with merge_and_unload() of PEFT, save the model, and give that as --load-hf",
    )
