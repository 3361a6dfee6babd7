"""Tokenizers of Hugging Face's `tokenizers` library: GPT-2's, BERT's, and `tokenizer.json`.

The data files are read directly, so nothing that a model's author wrote is executed. Only a
folder without `tokenizer.json` is read with `transformers`.
"""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from megatron.core.foundation.errors import ConfigError, DataError, MissingInputError, shown
from megatron.core.foundation.json_text import read_json
from megatron.core.foundation.optional_imports import require
from megatron.core.tokenizers.base import (
    PROBE,
    TextTokenizer,
    digest_of_file,
    existing_file,
)

END_OF_TEXT = "<|endoftext|>"
GENERATION_NAME = "generation_config.json"

_USUAL_END_TOKENS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
)
"""Tokens to try, in this order, if no file names the end of a sequence."""


class FastTokenizer(TextTokenizer):
    """Common part: a `tokenizers.Tokenizer` does the work. Subclasses call `_use` with it."""

    _adds_special_tokens = False

    def _use(self, backend: Any) -> None:
        # A saved tokenizer may contain a maximum length, which would cut documents silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        # Ids may have holes: then the count of tokens is too small for the embedding.
        self.vocab_size = max(highest + 1, backend.get_vocab_size(with_added_tokens=True))

    def tokenize(self, text: str) -> list[int]:
        """Return the ids, with the special tokens of the post-processor if it is used."""
        ids: list[int] = self._backend.encode(
            text, add_special_tokens=self._adds_special_tokens
        ).ids
        return ids

    def tokenize_part(self, text: str) -> list[int]:
        """Return the ids without the special tokens of the post-processor."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    def load_into_gigatoken(self, library: Any) -> Any | None:
        return library.Tokenizer.from_json(self._backend.to_str())

    def fast_form(self) -> Any:
        """Return a copy of the `tokenizers.Tokenizer`, with its post-processor if it is used."""
        library = require("tokenizers", purpose=type(self).__name__)
        fields = json.loads(self._backend.to_str())
        if not self._adds_special_tokens:
            fields["post_processor"] = None
        return library.Tokenizer.from_str(json.dumps(fields))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text, special tokens included."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    @property
    def vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocab


class GPT2BPETokenizer(FastTokenizer):
    """Byte-level BPE from GPT-2's `vocab.json` and `merges.txt`.

    Text that spells `<|endoftext|>` stays text.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        tokenizers = require("tokenizers", purpose="GPT2BPETokenizer")
        existing_file(vocab_file, flag="--vocab-file", what="GPT-2's vocab.json")
        existing_file(merge_file, flag="--merge-file", what="GPT-2's merges.txt")
        super().__init__(
            vocab_file=digest_of_file(vocab_file), merge_file=digest_of_file(merge_file)
        )
        vocab = read_json(vocab_file, dict, "--vocab-file")
        if sorted(vocab.values()) != list(range(len(vocab))):
            raise DataError(
                f"{vocab_file} does not give every id from 0 once.",
                rule="vocab.json maps each token to its id",
                flags=["--vocab-file"],
                fix="check that this is GPT-2's vocab.json",
            )
        try:
            model = tokenizers.models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises plain Exceptions
            raise DataError(
                f"{merge_file} does not fit {vocab_file}: {error}.",
                rule="every merge joins two tokens of the vocabulary into a third",
                flags=["--vocab-file", "--merge-file"],
                fix="use the two files of one tokenizer",
            ) from error
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        self._use(backend)
        self.eod = self.eos = self.bos = vocab.get(END_OF_TEXT)


_BERT_SPECIALS = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"}


class BertWordPieceTokenizer(FastTokenizer):
    """BERT's WordPiece, with [BOS], [EOS] and `extra_ids` sentinels after the tokens of its file.

    J. Devlin et al., "BERT", section 3, arXiv 1810.04805.

    Args:
        vocab_file: one token a line; it holds [CLS], [SEP], [PAD], [MASK] and [UNK].
        lower_case: lower the text and remove accents, as for the uncased models.
        extra_ids: sentinels <extra_id_0>, <extra_id_1>, ... of span corruption.
    """

    def __init__(self, vocab_file: str | None, *, lower_case: bool, extra_ids: int = 0) -> None:
        library = require("tokenizers", purpose="BertWordPieceLowerCase")
        path = existing_file(vocab_file, flag="--vocab-file", what="BERT's vocab.txt")
        super().__init__(
            vocab_file=digest_of_file(path), lower_case=lower_case, extra_ids=extra_ids
        )
        # Another kind of file, in any encoding, holds no special tokens.
        with open(path, encoding="utf-8", errors="replace") as file:
            tokens = [line.rstrip("\n") for line in file]
        vocab = {token: number for number, token in enumerate(tokens)}
        missing = [text for text in _BERT_SPECIALS.values() if text not in vocab]
        if missing or len(vocab) < len(tokens):
            wrong = f"lacks {', '.join(missing)}" if missing else "holds a token twice"
            raise DataError(
                f"{path} {wrong}.",
                rule="BERT's vocabulary holds each token once, its special tokens among them",
                flags=["--vocab-file"],
                fix="check that this is BERT's vocab.txt",
            )
        backend = library.Tokenizer(library.models.WordPiece(vocab, unk_token="[UNK]"))
        backend.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
        backend.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        backend.decoder = library.decoders.WordPiece()
        sentinels = [f"<extra_id_{number}>" for number in range(extra_ids)]
        backend.add_special_tokens([*_BERT_SPECIALS.values(), "[BOS]", "[EOS]", *sentinels])
        self._use(backend)
        self.cls, self.sep, self.pad, self.mask, self.unk = (
            backend.token_to_id(text) for text in _BERT_SPECIALS.values()
        )
        self.bos, self.eos = backend.token_to_id("[BOS]"), backend.token_to_id("[EOS]")
        self.eod = self.sep
        self.additional_special_tokens_ids = [backend.token_to_id(text) for text in sentinels]


class HuggingFaceTokenizer(FastTokenizer):
    """A `tokenizer.json`, or a folder that has one.

    As in that library, text that spells a special token becomes that token, and a whole text has
    the special tokens of the post-processor around it (the ids of `AutoTokenizer(text)`).

    Args:
        path: file, folder, or name of a model on the hub.
        trust_remote_code: run Python code of the tokenizer.
        include_special_tokens: whether `tokenize` uses the post-processor.
    """

    def __init__(
        self, path: str, *, trust_remote_code: bool = False, include_special_tokens: bool = True
    ) -> None:
        tokenizers = require("tokenizers", purpose="HuggingFaceTokenizer")
        folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        if os.path.isfile(file):
            super().__init__(tokenizer=digest_of_file(file))
            try:
                backend = tokenizers.Tokenizer.from_file(file)
            except Exception as error:  # the library raises plain Exceptions
                raise DataError(
                    f"{file} cannot be read as a tokenizer: {error}.",
                    rule="a tokenizer.json as the tokenizers library writes it",
                    flags=["--tokenizer-model"],
                    fix="give the folder or the tokenizer.json of the model",
                ) from error
            named = _named_tokens(folder)
        else:
            backend, named = _through_transformers(path, trust_remote_code)
            super().__init__(tokenizer=path, vocabulary=backend.get_vocab_size())
        self.folder = path if os.path.isdir(path) else None
        self._use(backend)
        if include_special_tokens:
            self._find_special_tokens_around_a_text()
        self._stated_ends = ends_of_generation(folder) if os.path.exists(path) else None
        self.eos = self._id_of(named.get("eos_token"), *_USUAL_END_TOKENS)
        self.eod = self.eos
        for name in ("bos", "pad", "unk", "cls", "sep", "mask"):
            setattr(self, name, self._id_of(named.get(f"{name}_token")))

    @property
    def ends(self) -> frozenset[int]:
        """The ids that its folder names for `generate()`, by default the end of a sequence."""
        return super().ends if self._stated_ends is None else self._stated_ends

    def _find_special_tokens_around_a_text(self) -> None:
        whole, part = self._backend.encode(PROBE).ids, self.tokenize_part(PROBE)
        begins = range(len(whole) - len(part) + 1)
        at = next((i for i in begins if whole[i : i + len(part)] == part), None)
        if at is None:
            raise DataError(
                "the post-processor of tokenizer.json changes the ids of a text.",
                rule="a post-processor puts special tokens before and after a text",
                flags=["--tokenizer-model", "--tokenizer-hf-no-include-special-tokens"],
                fix="--tokenizer-hf-no-include-special-tokens disables the post-processor",
            )
        self.around_a_text = tuple(whole[:at]), tuple(whole[at + len(part) :])
        self._adds_special_tokens = len(whole) > len(part)
        if self._adds_special_tokens:
            self._identity["around_a_text"] = self.around_a_text

    def _id_of(self, token: str | None, *otherwise: str) -> int | None:
        candidates = otherwise if token is None else (token,)
        ids = (self._backend.token_to_id(candidate) for candidate in candidates)
        return next((number for number in ids if number is not None), None)


def ends_of_generation(folder: str) -> frozenset[int] | None:
    """Return the ids that end a text in `generate()` of Transformers.

    They are the `eos_token_id` of generation_config.json, one id or a list. Without that file
    they are the ids of config.json, or of its `text_config`.

    Returns:
        None if neither file names an end.
    Raises:
        DataError: a file holds no JSON object, or its value is not an id or a list of ids.
    """
    for name in (GENERATION_NAME, "config.json"):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        fields = read_json(path, dict, "--tokenizer-model", "--load-hf")
        found = fields.get("eos_token_id")
        if found is None and isinstance(fields.get("text_config"), Mapping):
            found = fields["text_config"].get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if any(type(number) is not int for number in ids):
            raise DataError(
                f"{path}: eos_token_id = {shown(found)}.",
                rule="an id or a list of ids ends a text",
                flags=["--tokenizer-model", "--load-hf"],
                fix="correct the file, or copy it again",
            )
        return frozenset(ids) or None
    return None


def _named_tokens(folder: str) -> dict[str, str]:
    """Read the tokens of a folder by their roles: eos_token, pad_token and so on."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        for key, value in read_json(path, dict, "--tokenizer-model").items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                named[key] = value
    return named


def _through_transformers(path: str, trust_remote_code: bool) -> tuple[Any, dict[str, str]]:
    """Load a folder or a hub name without tokenizer.json; return fast backend and named tokens."""
    config = os.path.join(path, "tokenizer_config.json")
    if (
        os.path.isfile(config)
        and "auto_map" in read_json(config, dict, "--tokenizer-model")
        and not trust_remote_code
    ):
        raise ConfigError(
            f"the tokenizer in {path} wants to run its own Python code (auto_map).",
            rule="the code in a tokenizer's folder is not run unless it is trusted",
            flags=["--trust-remote-code"],
            fix="read the code, then pass --trust-remote-code, or use a folder with tokenizer.json",
        )
    transformers = require("transformers", purpose=f"the tokenizer {path!r} (no tokenizer.json)")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            path,
            use_fast=True,
            trust_remote_code=trust_remote_code,
            local_files_only=not _may_reach_hub(),
        )
    except (OSError, ValueError, KeyError) as error:
        raise MissingInputError(
            f"no tokenizer could be loaded from {path!r}: {str(error).splitlines()[0]}",
            rule="a folder with tokenizer.json, a tokenizer.json, or a name that transformers "
            "can resolve",
            flags=["--tokenizer-model"],
            fix="check the path; with a hub name, check the network or fill the cache first",
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            f"the tokenizer of {path!r} exists only as Python code.",
            rule="a tokenizer must have a fast (Rust) form",
            flags=["--tokenizer-model"],
            fix="convert it to tokenizer.json",
        )
    return backend, {k: v for k, v in loaded.special_tokens_map.items() if isinstance(v, str)}


def _may_reach_hub() -> bool:
    """Return whether the hub's name resolves; without a network its client retries for 30 s.

    With a proxy this machine need not resolve names.
    """
    if urllib.request.getproxies():
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
