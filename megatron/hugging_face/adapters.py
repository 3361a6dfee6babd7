"""Write low-rank adapters as a directory of PEFT's (`adapter_config.json`, safetensors).

One projection of Megatron is several of Hugging Face (queries, keys and values; gate and up). These
get the same A, and their own rows of B, by the rules of the family: the product has the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from megatron.core.dist_checkpointing.durable import write_durably
from megatron.core.dist_checkpointing.loader import Contents
from megatron.core.dist_checkpointing.shard_file import dtype_name
from megatron.hugging_face.families import family_of_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.reading import full_name
from megatron.hugging_face.stored import stored_adapters, stored_values
from megatron.hugging_face.writing import new_directory, write_tensors

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."


def write_adapters(contents: Contents, target: Path, *, base: str | None) -> None:
    """Write the adapters of a checkpoint.

    Args:
        contents: the opened checkpoint of a run with adapters.
        target: directory to make; it must not exist.
        base: the model that they belong to, as PEFT will look for it.
    Raises:
        CheckpointError: the checkpoint has none, or the directory cannot be written.
        ConfigError: no family can express this model.
    """
    settings = ModelDescription.from_values(stored_values(contents))
    family, geometry = family_of_settings(settings), settings.geometry
    adapters = stored_adapters(contents)
    tensors: dict[str, Tensor] = {}
    target_modules: set[str] = set()
    is_transposed = False
    for rule in family.rules(settings):
        for megatron_name, hf_names in rule.names(geometry):
            pair = adapters.of(megatron_name)
            if pair is None:
                continue
            down, up = pair
            is_transposed |= rule.is_transposed
            heights = [up.shape[0] // len(hf_names)] * len(hf_names)
            row_map = rule.row_map(geometry, heights)
            for index, name in enumerate(hf_names):
                rows = sorted((r for r in row_map if r.source == index), key=lambda r: r.begin)
                height = sum(r.length for r in rows)
                part = up.new_empty(height, up.shape[1])
                for r in rows:
                    part[r.begin : r.begin + r.length] = up[
                        r.megatron_begin : r.megatron_begin + r.length
                    ]
                layer = full_name(name, family.prefixes[0]).removesuffix(".weight")
                tensors[f"{PREFIX}{layer}.lora_A.weight"] = down.contiguous()
                tensors[f"{PREFIX}{layer}.lora_B.weight"] = part
                # Two words: some families have layers of one name in attention and MLP.
                target_modules.add(".".join(layer.split(".")[-2:]))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": sorted(target_modules),
        "fan_in_fan_out": is_transposed,
        "bias": "none",
        "inference_mode": True,
    }
    described = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
    with new_directory(target) as draft:
        write_tensors(draft / WEIGHTS_NAME, described, iter(tensors.values()))
        write_durably(draft / CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())
