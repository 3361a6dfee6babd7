"""Build a dataset config from the data flags."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.masked_dataset import MaskedWordPieceDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.sft_dataset import SFTDataset
from megatron.core.datasets.utils import Blend, Split, get_blend_from_list
from megatron.core.foundation.errors import DataError, shown
from megatron.core.foundation.json_text import read_json
from megatron.core.tokenizers.base import TextTokenizer
from megatron.training.config.data import DataSettings
from megatron.training.config.resolved import ResolvedRun


def gpt_dataset_class(data: DataSettings) -> type[MegatronDataset]:
    """Return the dataset class of the data flags: for documents, conversations, or mock data."""
    if data.mock_data:
        return MockGPTDataset
    if data.fim_data:
        return GPTFIMDataset
    return SFTDataset if data.sft else GPTDataset


def gpt_dataset_config(run: ResolvedRun, tokenizer: TextTokenizer) -> GPTDatasetConfig:
    """Return the dataset config of the data flags, for `pretrain_gpt.py` and tools."""
    data = run.data
    kind = GPTFIMDatasetConfig if data.fim_data else GPTDatasetConfig
    settings = _common_settings(run, tokenizer, kind)
    if data.fim_data:
        settings["fim_extra_tokens"] = {
            "prefix": data.fim_prefix_token,
            "middle": data.fim_middle_token,
            "suffix": data.fim_suffix_token,
            "pad": data.fim_pad_token,
            "eod": data.fim_eod_token,
        }
    return kind(
        **settings,
        create_attention_mask=False,
        document_starts=data.reset_attention_mask,
        vocab_size=run.model.unpadded_vocab_size,
    )


def masked_dataset_settings(run: ResolvedRun, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the settings of a `MaskedWordPieceDatasetConfig` from the data flags."""
    return {
        **_common_settings(run, tokenizer, MaskedWordPieceDatasetConfig),
        "masking_probability": run.encoders.mask_prob,
        "short_sequence_probability": run.encoders.short_seq_prob,
        "vocab_size": run.model.unpadded_vocab_size,
    }


def _common_settings(
    run: ResolvedRun, tokenizer: TextTokenizer, kind: type[BlendedMegatronDatasetConfig]
) -> dict[str, Any]:
    """Return the settings that data flags, under the same or other names, give to a config."""
    data, topology = run.data, run.topology
    names = {field.name for field in fields(kind)} & {field.name for field in fields(data)}
    return {
        **{name: getattr(data, name) for name in names - {"split"}},
        "random_seed": run.schedule.seed,
        "sequence_length": run.model.seq_length,
        **blends_of(data),
        "path_to_cache": data.data_cache_path,
        "tokenizer": tokenizer,
        "builder": (topology.rank, topology.world_size),
    }


def blends_of(data: DataSettings) -> dict[str, Any]:
    """Return `blend`, `blend_per_split` and `split` for a dataset config; `split` for mock data."""
    if data.mock_data:
        return {"split": data.split}
    if data.data_path:
        return {"blend": get_blend_from_list(data.data_path), "split": data.split}
    if data.data_args_path:
        return {"blend": _blend_in_file(data.data_args_path), "split": data.split}
    if data.per_split_data_args_path:
        return {"blend_per_split": _blends_in_file(data.per_split_data_args_path)}
    lists = [data.train_data_path, data.valid_data_path, data.test_data_path]
    return {"blend_per_split": [get_blend_from_list(words) for words in lists]}


def _blend_in_file(path: str) -> Blend:
    """Read a blend: the words of --data-path, or JSON as in `_blend_of`."""
    flag, text = "--data-args-path", Path(path).read_text()
    if text.lstrip()[:1] in ("[", "{"):
        return _blend_of(read_json(path, object, flag), path, flag)
    blend = get_blend_from_list(text.split())
    if not blend or not blend[0]:
        raise DataError(
            f"{path} names no corpus.",
            rule="it contains the words of --data-path",
            flags=[flag],
            fix="write prefixes, or weights and prefixes in turn",
        )
    return blend


def _blends_in_file(path: str) -> list[Blend | None]:
    """Read {"train": BLEND, "valid": BLEND, "test": BLEND}; a part may be missing or null."""
    flag = "--per-split-data-args-path"
    found = read_json(path, object, flag)
    names = [split.name for split in Split]
    if not isinstance(found, dict) or not set(found) <= set(names) or not any(found.values()):
        keys = f"the keys {', '.join(map(repr, found))}" if isinstance(found, dict) else "no object"
        raise DataError(
            f"{path} contains {keys}.",
            rule=f"an object with any of {', '.join(names)}, each a blend",
            flags=[flag],
            fix='for example {"train": ["0.3", "a", "0.7", "b"], "valid": ["c"]}',
        )
    return [_blend_of(found[name], path, flag) if found.get(name) else None for name in names]


def _blend_of(value: Any, path: str, flag: str) -> Blend:
    """Convert JSON to a blend.

    Args:
        value: a list of the words of --data-path (weights may be numbers), or {prefix: weight}.
    """
    is_words = isinstance(value, list) and all(
        isinstance(word, str | int | float) and not isinstance(word, bool) for word in value
    )
    if is_words and value:
        blend = get_blend_from_list([str(word) for word in value])
        assert blend is not None
        return blend
    if isinstance(value, dict) and value:
        weights = list(value.values())
        if all(isinstance(w, int | float) and not isinstance(w, bool) for w in weights):
            return list(value), [float(weight) for weight in weights]
    raise DataError(
        f"{path}: {shown(value)} is not a blend.",
        rule="a list of prefixes, of weights and prefixes in turn, or {prefix: weight}",
        flags=[flag],
        fix='for example {"data/a": 0.3, "data/b": 0.7}',
    )
