"""Models of Hugging Face's Transformers, in and out, in any parallel layout.

A family (`families/`) says in one short file how its `config.json` reads as settings of ours and
which rows of its tensors make which of our parameters. Everything else is shared: `reading` shows
a model's files to the loader of checkpoints, which takes from them the slices that a rank needs;
`writing` turns any checkpoint into such files, and `weight_stream` a running model into their
tensors. No code of a model's repository is ever run, and no pickle is opened.
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
