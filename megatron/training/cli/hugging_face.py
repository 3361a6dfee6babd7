"""Read settings from a Hugging Face model, for --load-hf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import kebab
from megatron.hugging_face import read_adapters, read_model_directory

_FREE = {"max_position_embeddings", "hidden_dropout", "attention_dropout"}
"""Settings of a model that a run may change, because its weights do not depend on them."""


def model_values(
    directory: str,
    given: Mapping[str, object],
    problems: list[MegatronError],
    *,
    reads_images: bool = False,
) -> dict[str, Any]:
    """Return field name -> value for the model in `directory`.

    Args:
        given: settings of the command line, which may repeat the model's values but not change
            them.
        problems: receives an error for each flag that contradicts the model.
        reads_images: the script trains the encoder of images, too.
    Raises:
        CheckpointError, ConfigError: the model cannot be read, or is not supported.
    """
    path = Path(directory)
    model = read_model_directory(path, reads_images=reads_images).settings
    values = model.stated()
    values["vocab_size"] = values.pop("unpadded_vocab_size")
    has_table = model.position_embedding_type == "learned_absolute"
    free = _FREE - {"max_position_embeddings"} if has_table else _FREE
    problems += _contradictions(values, given, free, f"the model in {directory}", "--load-hf")
    if given.get("preset"):
        problems.append(
            ConfigError(
                f"--preset {given['preset']} together with --load-hf {directory}.",
                rule="one of the two flags sets the model",
                flags=["--preset", "--load-hf"],
                fix="drop --preset",
            )
        )
    if "tokenizer_type" not in given and _has_tokenizer(path):
        values |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": directory}
    return values


def adapter_values(
    directory: str, given: Mapping[str, Any], problems: list[MegatronError]
) -> dict[str, Any]:
    """Return field name -> value for the adapter of --load-adapter, empty without the flag.

    Args:
        directory: the model of --load-hf.
        problems: receives an error for each flag that contradicts the adapter.
    Raises:
        CheckpointError, ConfigError: the adapter cannot be read, or does not fit the model.
    """
    adapter_directory = given.get("load_adapter")
    if not adapter_directory:
        return {}
    adapter = read_adapters(Path(adapter_directory), read_model_directory(Path(directory)))
    values = {
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "lora_target_modules": adapter.targets,
        "use_dora": adapter.use_dora,
    }
    what = f"the adapter in {adapter_directory}"
    problems += _contradictions(values, given, {"lora_dropout"}, what, "--load-adapter")
    return values


def _contradictions(
    values: Mapping[str, Any], given: Mapping[str, Any], free: set[str], what: str, flag: str
) -> list[MegatronError]:
    """Return an error for each flag whose value differs from the value in a directory."""
    return [
        ConfigError(
            f"{kebab(name)} {given[name]} contradicts {what}, which has {value}.",
            rule="the weights of a model fit its own shape only",
            flags=[flag, kebab(name)],
            fix=f"drop {kebab(name)}",
        )
        for name, value in values.items()
        if name in given and given[name] != value and name not in free
    ]


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
