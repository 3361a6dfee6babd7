"""Open any tokenizer: by Megatron's type name, or by looking at the files."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.foundation.json_text import parse_json
from megatron.core.tokenizers.base import TextTokenizer, check_loaded
from megatron.core.tokenizers.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.tokenizers.null_and_byte import ByteTokenizer, NullTokenizer
from megatron.core.tokenizers.sentence_piece import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from megatron.core.tokenizers.tik_token import TikTokenizer
from megatron.core.tokenizers.word_piece import BertWordPieceTokenizer

TOKENIZER_TYPES = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "NullTokenizer",
    "ByteTokenizer",
)
"""Values of --tokenizer-type."""

UNSUPPORTED_TYPES = {
    "MultimodalTokenizer": "HuggingFaceTokenizer",
    "NullMultimodalTokenizer": "NullTokenizer",
    "SFTTokenizer": "HuggingFaceTokenizer",
}
"""Types that Megatron knows and this project does not, and what comes nearest."""

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


def make_tokenizer(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int | None = None,
    tiktoken_special_tokens: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    tokenizer_hf_no_include_special_tokens: bool = False,
) -> TextTokenizer:
    """Make a tokenizer by its type.

    Args:
        tokenizer_type: one of `TOKENIZER_TYPES`; the others are the flags of the same names.
    Raises:
        ConfigError: an unknown type, or a flag that the type needs is missing.
        DataError: its files are missing or wrong.
        MissingExtraError: its library is not installed.
    """

    def model() -> str:
        if not tokenizer_model:
            raise ConfigError(
                f"{tokenizer_type} needs a model.",
                rule="--tokenizer-model names its file, folder or hub name",
                flags=["--tokenizer-model"],
            )
        return tokenizer_model

    def gpt2() -> TextTokenizer:
        vocab, merges = _gpt2_files(tokenizer_model, vocab_file, merge_file)
        return GPT2BPETokenizer(vocab, merges)

    def null() -> TextTokenizer:
        if vocab_size is None:
            raise ConfigError(
                "NullTokenizer needs the number of ids.",
                rule="there are no files that say it",
                flags=["--vocab-size"],
                fix="--vocab-size 32000",
            )
        return NullTokenizer(vocab_size)

    def word_piece(*, lower_case: bool) -> TextTokenizer:
        return BertWordPieceTokenizer(
            vocab_file or tokenizer_model, lower_case=lower_case, extra_ids=vocab_extra_ids
        )

    makers: Mapping[str, Callable[[], TextTokenizer]] = {
        "BertWordPieceLowerCase": lambda: word_piece(lower_case=True),
        "BertWordPieceCase": lambda: word_piece(lower_case=False),
        "GPT2BPETokenizer": gpt2,
        "SentencePieceTokenizer": lambda: SentencePieceTokenizer(model(), vocab_extra_ids),
        "GPTSentencePieceTokenizer": lambda: GPTSentencePieceTokenizer(model()),
        "Llama2Tokenizer": lambda: Llama2Tokenizer(model()),
        "HuggingFaceTokenizer": lambda: HuggingFaceTokenizer(
            model(),
            trust_remote_code=trust_remote_code,
            include_special_tokens=not tokenizer_hf_no_include_special_tokens,
        ),
        "TikTokenizer": lambda: TikTokenizer(
            model(),
            tiktoken_pattern,
            vocab_size,
            tiktoken_num_special_tokens,
            tiktoken_special_tokens,
        ),
        "NullTokenizer": null,
        "ByteTokenizer": ByteTokenizer,
    }
    if tokenizer_type not in makers:
        raise _unknown_type(tokenizer_type)
    tokenizer = makers[tokenizer_type]()
    if not isinstance(tokenizer, NullTokenizer):
        check_loaded(tokenizer, tokenizer_model or vocab_file or tokenizer_type)
    return tokenizer


def _gpt2_files(model: str | None, vocab: str | None, merges: str | None) -> tuple[str, str]:
    """Return GPT-2's two files; a folder that holds both may stand for them."""
    if model and os.path.isdir(model):
        names = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")]
        for pair in names:
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


def _unknown_type(tokenizer_type: str) -> ConfigError:
    if tokenizer_type in UNSUPPORTED_TYPES:
        return ConfigError(
            f"--tokenizer-type {tokenizer_type} is not supported.",
            rule=f"supported are {', '.join(TOKENIZER_TYPES)}",
            flags=["--tokenizer-type"],
            fix=f"nearest is {UNSUPPORTED_TYPES[tokenizer_type]}",
        )
    return ConfigError(
        f"--tokenizer-type {tokenizer_type} is unknown.",
        rule=f"one of {', '.join(TOKENIZER_TYPES)}",
        flags=["--tokenizer-type"],
    )


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
            tokenizer_path: a file, a folder or a hub name; None for those without files.
            metadata_path: {"library": ...} or a JSON file with it; None looks for
                `tokenizer_metadata.json` beside the tokenizer, then at the files themselves.
            kwargs: of `make_tokenizer`, for example `vocab_size` of a null tokenizer, also by
                Megatron's names; None and nothing are as if they were left out.
        Raises:
            ConfigError: a setting that is not here, or what `make_tokenizer` says.
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
        """Write beside a tokenizer which library reads it."""
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
"""Megatron's name of a setting of a library -> that of `make_tokenizer`."""

_INSTEAD = {
    "chat_template": "write it beside the tokenizer as chat_template.jinja, for"
    " tools/preprocess_data.py and the server",
    "additional_special_tokens": "add them to the files of the tokenizer",
}
"""Settings that are not here -> what to do."""


def _settings_by_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say something, as arguments of `make_tokenizer`."""
    known = inspect.signature(make_tokenizer).parameters
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or value == []:
            continue
        if _OUR_NAMES.get(name, name) not in known:
            raise ConfigError(
                f"{name}={value!r} of a tokenizer is not supported.",
                rule=f"its settings are {', '.join(known)}",
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
        content = _json_object(metadata)
        return _type_by_library(str(content.get("library")))
    return _type_by_library(metadata["library"])


def _metadata_beside(path: str) -> str:
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    return os.path.join(folder, "tokenizer_metadata.json")


def _json_object(path: str, *, or_list: bool = False) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            content = parse_json(file.read())
        if not isinstance(content, (dict, list) if or_list else dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except ValueError as error:
        raise DataError(
            f"{path} is not what its name says: {error}.",
            rule="files of a tokenizer are JSON objects",
            flags=["--tokenizer-model"],
            fix="copy the file again",
        ) from None
    return content


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
        content = _json_object(path, or_list=True)
        settings = {} if isinstance(content, list) else content.get("config")
        is_ranks = isinstance(content, list) or (
            isinstance(settings, dict) and "default_num_special_tokens" in settings
        )
        return "TikTokenizer" if is_ranks else "HuggingFaceTokenizer"
    is_piece_model = path.endswith(".model") or ".model." in os.path.basename(path)
    return "GPTSentencePieceTokenizer" if is_piece_model else "HuggingFaceTokenizer"
