"""Open any tokenizer, by Megatron's type name or by its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.json_text import read_json
from megatron.core.tokenizers.base import TextTokenizer, check_loaded
from megatron.core.tokenizers.hugging_face import (
    BertWordPieceTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
)
from megatron.core.tokenizers.null_and_byte import ByteTokenizer, NullTokenizer
from megatron.core.tokenizers.sentence_piece import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from megatron.core.tokenizers.tik_token import TikTokenizer

UNSUPPORTED_TYPES = {
    "MultimodalTokenizer": "HuggingFaceTokenizer",
    "NullMultimodalTokenizer": "NullTokenizer",
    "SFTTokenizer": "HuggingFaceTokenizer",
}
"""Types of Megatron that are not supported -> the nearest supported type."""

_TYPE_OF_LIBRARY = {
    "huggingface": "HuggingFaceTokenizer",
    "sentencepiece": "GPTSentencePieceTokenizer",
    "tiktoken": "TikTokenizer",
    "megatron": "GPT2BPETokenizer",
    "null": "NullTokenizer",
    "null-text": "NullTokenizer",
    "byte-level": "ByteTokenizer",
}
"""Names of libraries in tokenizer metadata."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Arguments of `make_tokenizer`, named like the flags."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    vocab_extra_ids: int = 0
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int | None = None
    tiktoken_special_tokens: Sequence[str] | None = None
    trust_remote_code: bool = False
    tokenizer_hf_no_include_special_tokens: bool = False

    @property
    def model(self) -> str:
        """The model, which the type of tokenizer needs."""
        if not self.tokenizer_model:
            raise ConfigError(
                f"{self.tokenizer_type} needs a model.",
                rule="--tokenizer-model names its file, folder or hub name",
                flags=["--tokenizer-model"],
            )
        return self.tokenizer_model


SETTINGS = tuple(field.name for field in fields(_Settings))[1:]
"""Keyword arguments of `make_tokenizer`."""


TOKENIZER_TYPES = (
    "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "TikTokenizer",
    "NullTokenizer", "ByteTokenizer",
)  # fmt: skip
"""Values of --tokenizer-type."""


def make_tokenizer(tokenizer_type: str, **settings: object) -> TextTokenizer:
    """Make a tokenizer by its type.

    Args:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        settings: the tokenizer flags by name: `tokenizer_model`, `vocab_file`, `merge_file`,
            `vocab_size`, `vocab_extra_ids`, `tiktoken_pattern`, `tiktoken_num_special_tokens`,
            `tiktoken_special_tokens`, `trust_remote_code`,
            `tokenizer_hf_no_include_special_tokens`.
    Raises:
        ConfigError: an unknown type, or a flag that the type needs is missing.
        DataError: its files are missing or wrong.
        MissingExtraError: its library is not installed.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        nearest = UNSUPPORTED_TYPES.get(tokenizer_type)
        raise ConfigError(
            f"--tokenizer-type {tokenizer_type} is {'not supported' if nearest else 'unknown'}.",
            rule=f"one of {', '.join(TOKENIZER_TYPES)}",
            flags=["--tokenizer-type"],
            fix=f"nearest is {nearest}" if nearest else "",
        )
    given = _Settings(tokenizer_type=tokenizer_type, **settings)  # type: ignore[arg-type]
    tokenizer = _made(given)
    if not isinstance(tokenizer, NullTokenizer):
        check_loaded(tokenizer, given.tokenizer_model or given.vocab_file or tokenizer_type)
    return tokenizer


def _made(given: _Settings) -> TextTokenizer:
    """Make a tokenizer of a known type."""
    match given.tokenizer_type:
        case "BertWordPieceLowerCase" | "BertWordPieceCase" as kind:
            return BertWordPieceTokenizer(
                given.vocab_file or given.tokenizer_model,
                lower_case=kind == "BertWordPieceLowerCase",
                extra_ids=given.vocab_extra_ids,
            )
        case "GPT2BPETokenizer":
            return GPT2BPETokenizer(*_gpt2_files(given))
        case "SentencePieceTokenizer":
            return SentencePieceTokenizer(given.model, given.vocab_extra_ids)
        case "GPTSentencePieceTokenizer":
            return GPTSentencePieceTokenizer(given.model)
        case "Llama2Tokenizer":
            return Llama2Tokenizer(given.model)
        case "HuggingFaceTokenizer":
            return HuggingFaceTokenizer(
                given.model,
                trust_remote_code=given.trust_remote_code,
                include_special_tokens=not given.tokenizer_hf_no_include_special_tokens,
            )
        case "TikTokenizer":
            return TikTokenizer(
                given.model,
                given.tiktoken_pattern,
                given.vocab_size,
                given.tiktoken_num_special_tokens,
                given.tiktoken_special_tokens,
            )
        case "NullTokenizer":
            return NullTokenizer(given.vocab_size)
    return ByteTokenizer()


def _gpt2_files(given: _Settings) -> tuple[str, str]:
    """Return GPT-2's two files, given by name or by a folder that holds both."""
    model, vocab, merges = given.tokenizer_model, given.vocab_file, given.merge_file
    if model and os.path.isdir(model):
        for pair in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
            paths = [os.path.join(model, name) for name in pair]
            if all(map(os.path.isfile, paths)):
                vocab, merges = vocab or paths[0], merges or paths[1]
                break
    if not vocab or not merges:
        raise ConfigError(
            "GPT2BPETokenizer needs its vocabulary and its merges.",
            rule="two files, or a folder with vocab.json and merges.txt",
            flags=["--vocab-file", "--merge-file", "--tokenizer-model"],
            fix="--vocab-file vocab.json --merge-file merges.txt",
        )
    return vocab, merges


class MegatronTokenizer:
    """Factory of tokenizers, for code that names files instead of flags."""

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None,
        metadata_path: str | Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> TextTokenizer:
        """Make a tokenizer from its files.

        Args:
            tokenizer_path: a file, a folder or a hub name; None for tokenizers without files.
            metadata_path: {"library": ...} or a JSON file with it; None reads
                `tokenizer_metadata.json` in the tokenizer's folder, or else the files themselves.
            kwargs: settings of `make_tokenizer`, for example `vocab_size` of a null tokenizer, also
                by Megatron's names; None and empty lists count as not given.
        Raises:
            ConfigError: an unsupported setting; see also `make_tokenizer`.
        """
        library = _library(tokenizer_path, metadata_path)
        tokenizer_type = _type_of_files(tokenizer_path) if library is None else library
        settings = _settings_by_our_names(kwargs)
        return make_tokenizer(tokenizer_type, tokenizer_model=tokenizer_path, **settings)

    @staticmethod
    def write_metadata(
        tokenizer_path: str,
        tokenizer_library: str,
        *,
        overwrite: bool = False,
        metadata_path: str | None = None,
    ) -> None:
        """Write the name of a tokenizer's library into its folder."""
        _type_by_library(tokenizer_library)
        path = metadata_path or _metadata_beside(tokenizer_path)
        if os.path.exists(path) and not overwrite:
            raise ConfigError(f"{path} exists.", fix="pass overwrite=True")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"library": tokenizer_library}, file, indent=4)


_OUR_NAMES = {
    "merges_file": "merge_file",
    "pattern": "tiktoken_pattern",
    "num_special_tokens": "tiktoken_num_special_tokens",
    "special_tokens": "tiktoken_special_tokens",
}
"""Megatron's name of a setting of a library -> the name in `make_tokenizer`."""

_INSTEAD = {
    "chat_template": "write it next to the tokenizer as chat_template.jinja, for"
    " tools/preprocess_data.py and the server",
    "additional_special_tokens": "add them to the files of the tokenizer",
}
"""Unsupported settings -> advice."""


def _settings_by_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not empty, as arguments of `make_tokenizer`."""
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or value == []:
            continue
        if _OUR_NAMES.get(name, name) not in SETTINGS:
            raise ConfigError(
                f"{name}={value!r} of a tokenizer is not supported.",
                rule=f"its settings are {', '.join(SETTINGS)}",
                fix=_INSTEAD.get(name, f"leave {name} out"),
            )
        settings[_OUR_NAMES.get(name, name)] = value
    return settings


def _library(path: str | None, metadata: str | Mapping[str, Any] | None) -> str | None:
    """Return the type that metadata names, or None without metadata."""
    if metadata is None and path is not None and os.path.isfile(_metadata_beside(path)):
        metadata = _metadata_beside(path)
    if metadata is None:
        return None
    if isinstance(metadata, str):
        content = read_json(metadata, dict, "--tokenizer-model")
        return _type_by_library(str(content.get("library")))
    return _type_by_library(metadata["library"])


def _metadata_beside(path: str) -> str:
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    return os.path.join(folder, "tokenizer_metadata.json")


def _type_by_library(library: str) -> str:
    if library not in _TYPE_OF_LIBRARY:
        raise ConfigError(
            f"tokenizer library {library!r} is unknown.",
            rule=f"one of {', '.join(_TYPE_OF_LIBRARY)}",
        )
    return _TYPE_OF_LIBRARY[library]


def _type_of_files(path: str | None) -> str:
    if path is None:
        raise ConfigError("neither a tokenizer path nor its library is given.")
    if path.endswith((".tiktoken", ".bpe")):
        return "TikTokenizer"
    if os.path.isdir(path):
        names = set(os.listdir(path))
        if {"vocab.json", "merges.txt"} <= names and "tokenizer.json" not in names:
            return "GPT2BPETokenizer"
        return "HuggingFaceTokenizer"
    if path.endswith(".json"):
        content = read_json(path, (dict, list), "--tokenizer-model")
        settings = {} if isinstance(content, list) else content.get("config")
        is_ranks = isinstance(content, list) or (
            isinstance(settings, dict) and "default_num_special_tokens" in settings
        )
        return "TikTokenizer" if is_ranks else "HuggingFaceTokenizer"
    is_piece_model = path.endswith(".model") or ".model." in os.path.basename(path)
    return "GPTSentencePieceTokenizer" if is_piece_model else "HuggingFaceTokenizer"
