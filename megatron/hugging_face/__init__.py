"""Load and export models of Hugging Face's Transformers, in any parallel layout.

The short file of each family (`families/`) maps its `config.json` to Megatron's settings and rows
of its tensors to Megatron's parameters. All families share the rest: `reading` presents a model's
files as a checkpoint, so that the loader reads only the slices of its rank; `writing` converts
any checkpoint to such files; `weight_stream` yields the same tensors from a running model. No code
of a model's repository is run, and no pickle is opened.
"""

from megatron.hugging_face.adapter_reading import PeftAdapter, load_adapters, read_adapters
from megatron.hugging_face.adapters import write_adapters
from megatron.hugging_face.families import FAMILIES, Family, family_of_config, family_of_settings
from megatron.hugging_face.model_directory import ModelDirectory, read_model_directory
from megatron.hugging_face.reading import ModelContents, open_model
from megatron.hugging_face.weight_stream import stream_weights
from megatron.hugging_face.writing import Written, write_model

__all__ = [
    "FAMILIES",
    "Family",
    "ModelContents",
    "ModelDirectory",
    "PeftAdapter",
    "Written",
    "family_of_config",
    "family_of_settings",
    "load_adapters",
    "open_model",
    "read_adapters",
    "read_model_directory",
    "stream_weights",
    "write_adapters",
    "write_model",
]
