"""Byte-pair ranks for OpenAI's `tiktoken` library.

Three kinds of files: a list of ranks as Megatron and NVIDIA's models use it (JSON), Mistral's
Tekken (the same list inside an object with its settings), and `.tiktoken` (one base64 token and
its rank on each line). Also the names in tiktoken's own list, from its cache.
"""

from __future__ import annotations

import base64
import os
import re
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from megatron.core.foundation.errors import (
    ConfigError,
    DataError,
    MissingInputError,
    UntokenizableTextError,
    shown,
)
from megatron.core.foundation.json_text import parse_json
from megatron.core.foundation.optional_imports import require
from megatron.core.tokenizers.base import TextTokenizer, byte_characters, digest_of_file

DEFAULT_VOCAB_SIZE = 131072
DEFAULT_NUM_SPECIAL_TOKENS = 1000
DEFAULT_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")

PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Patterns that cut text before the merges, by Megatron's names v1 and v2 and OpenAI's names."""

_GIGATOKEN_SCHEMES = {"gpt2": "gpt2", "cl100k": "cl100k", "o200k": "o200k"}
"""Our name of a pattern -> gigatoken's."""

_KNOWN_RANK_FILES = {
    "gpt2": ("gpt2", 50256),
    "r50k_base": ("gpt2", 50256),
    "p50k_base": ("gpt2", 50256),
    "cl100k_base": ("cl100k", 100257),
    "o200k_base": ("o200k", 199999),
}
"""File stem -> pattern, id of <|endoftext|> (some sets leave a hole before it)."""


_MAX_RESERVED = 1 << 16


class TikTokenizer(TextTokenizer):
    """Byte-pair encoding by ranks.

    Text never becomes a special token. In rank lists (JSON) the special tokens have the first ids
    and every rank is shifted by their number; in `.tiktoken` files they have the last ids.

    Args:
        path: a rank file, or a name such as "cl100k_base".
        pattern: a key of `PATTERNS` or a regular expression; None uses the file's pattern.
        vocab_size: limit of a rank list, special tokens included.
        num_special_tokens: ids reserved in a rank list.
        special_tokens: names of the first of them.
    """

    def __init__(
        self,
        path: str,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int | None = None,
        special_tokens: Sequence[str] | None = None,
    ) -> None:
        library = require("tiktoken", purpose="TikTokenizer")
        is_file = os.path.isfile(path)
        super().__init__(
            ranks=digest_of_file(path) if is_file else path,
            pattern=pattern,
            vocab_size=vocab_size,
            num_special_tokens=num_special_tokens,
            special_tokens=list(special_tokens) if special_tokens is not None else None,
        )
        self._specials: dict[str, int] = {}
        if not is_file:
            self._model: Any = _named_encoding(library, path)
            self._specials = dict(self._model._special_tokens)
        elif path.endswith(".json"):
            self._model = self._from_list(
                library, path, pattern, vocab_size, num_special_tokens, special_tokens
            )
        else:
            self._model = self._from_rank_file(library, path, pattern)
        self.vocab_size = self.first_text_id + int(self._model.n_vocab)
        end = next(self._specials[t] for t in ("<|endoftext|>", "</s>") if t in self._specials)
        self.eod = self.eos = end
        self.bos = self._specials.get("<s>")
        for name in ("pad", "unk", "cls", "sep", "mask"):
            setattr(self, name, self._specials.get(f"<{name}>"))

    def _from_list(
        self,
        library: Any,
        path: str,
        pattern: str | None,
        vocab_size: int | None,
        num_special_tokens: int | None,
        special_tokens: Sequence[str] | None,
    ) -> Any:
        entries, settings = _read_list(path)
        # After the first three, Tekken's own tokens differ from the tokens of a bare list.
        default = DEFAULT_SPECIAL_TOKENS[:3] if settings else DEFAULT_SPECIAL_TOKENS
        names = list(default if special_tokens is None else special_tokens)
        reserved = num_special_tokens or settings.get(
            "default_num_special_tokens", DEFAULT_NUM_SPECIAL_TOKENS
        )
        if type(reserved) is not int or not 0 <= reserved <= _MAX_RESERVED:
            raise DataError(
                f"{path} reserves {shown(reserved)} ids for special tokens.",
                rule=f"at most {_MAX_RESERVED}",
                flags=["--tiktoken-num-special-tokens"],
            )
        size = vocab_size or settings.get("default_vocab_size", DEFAULT_VOCAB_SIZE)
        if not {"<unk>", "<s>", "</s>"} <= set(names) or len(names) > reserved:
            raise ConfigError(
                f"special tokens {names} with {reserved} reserved ids.",
                rule="<unk>, <s> and </s> are among them, and there are not more than reserved ids",
                flags=["--tiktoken-special-tokens", "--tiktoken-num-special-tokens"],
            )
        cut = PATTERNS.get(pattern or "", pattern) or settings.get("pattern")
        if cut is None:
            raise _no_pattern(path)
        ranks = {
            base64.b64decode(entry["token_bytes"]): rank
            for rank, entry in enumerate(entries[: size - reserved])
        }
        self.first_text_id = reserved
        filler = (f"<SPECIAL_{i}>" for i in range(len(names), reserved))
        self._specials = {token: i for i, token in enumerate([*names, *filler])}
        return _encoding(library, path, cut, ranks, {})

    def _from_rank_file(self, library: Any, path: str, pattern: str | None) -> Any:
        stem = os.path.basename(path).split(".")[0]
        known, end = _KNOWN_RANK_FILES.get(stem, (None, None))
        cut = PATTERNS.get(pattern or known or "", pattern)
        if cut is None:
            raise _no_pattern(path)
        ranks = _read_ranks(path)
        self._specials = {"<|endoftext|>": max(ranks.values()) + 1 if end is None else end}
        return _encoding(library, path, cut, ranks, self._specials)

    def tokenize(self, text: str) -> list[int]:
        try:  # the library's `encode_ordinary` panics where this raises
            ids = self._model.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:
            raise UntokenizableTextError(
                f"a text of {len(text):,} characters cannot be cut into words: {error}.",
                rule="the library matches the pattern in words up to a bound",
                flags=["--tiktoken-pattern"],
                fix="shorten the text, or its longest run of equal characters",
            ) from error
        return self._shifted(ids.tolist())

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        # One by one, because the library's batch call starts a thread pool each time. As arrays,
        # because lists of Python integers take a sixth of the time.
        encode = self._model.encode_to_numpy
        arrays = [encode(text, disallowed_special=()) for text in texts]
        counts = np.fromiter(map(len, arrays), np.int64, len(arrays))
        ids = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
        return ids + np.uint32(self.first_text_id), counts

    def load_into_gigatoken(self, library: Any) -> Any | None:
        """Return the same ranks as a `gigatoken.Tokenizer` if it supports the pattern."""
        schemes = {PATTERNS[name]: scheme for name, scheme in _GIGATOKEN_SCHEMES.items()}
        scheme = schemes.get(self._model._pat_str)
        if scheme is None:
            return None
        with tempfile.NamedTemporaryFile("wb", suffix=".tiktoken") as file:
            for token, rank in sorted(self._model._mergeable_ranks.items(), key=lambda e: e[1]):
                file.write(b"%s %d\n" % (base64.b64encode(token), rank))
            file.flush()
            # No special tokens: text never becomes one.
            return library.Tokenizer.from_tiktoken(
                file.name, pretokenizer=scheme, special_tokens={}
            )

    def fast_form(self) -> Any:
        """Return the ranks as a byte-level BPE; its merges are derived from the ranks."""
        library = require("tokenizers", purpose="a tokenizer.json of tiktoken's ranks")
        ranks: dict[bytes, int] = self._model._mergeable_ranks
        characters = byte_characters()

        def visible(token: bytes) -> str:
            return "".join(characters[byte] for byte in token)

        vocab = {visible(token): rank + self.first_text_id for token, rank in ranks.items()}
        merges = [
            (visible(parts[0]), visible(parts[1]))
            for token, rank in sorted(ranks.items(), key=lambda item: item[1])
            if len(parts := _parts_before(token, rank, ranks)) == 2
        ]
        fast = library.Tokenizer(
            library.models.BPE({**self._specials, **vocab}, merges, ignore_merges=True)
        )
        # The library repeats a possessive quantifier instead.
        pattern = library.Regex(re.sub(r"(?<=[+*?])\+|(?<=\d\})\+", "", self._model._pat_str))
        fast.pre_tokenizer = library.pre_tokenizers.Sequence(
            [
                library.pre_tokenizers.Split(pattern, "isolated"),
                library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        fast.decoder = library.decoders.ByteLevel()
        fast.add_special_tokens(list(self._specials))
        return fast

    def _shifted(self, ids: list[int]) -> list[int]:
        return [number + self.first_text_id for number in ids] if self.first_text_id else ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text; ids without a token and the specials of a list are left out."""
        ranks = [number - self.first_text_id for number in ids if number >= self.first_text_id]
        try:
            text: str = self._model.decode(ranks)
        except KeyError:
            text = self._model.decode([rank for rank in ranks if self._has(rank)])
        return text

    def _has(self, rank: int) -> bool:
        try:
            return bool(self._model.decode_single_token_bytes(rank))
        except KeyError:
            return False

    @property
    def vocab(self) -> dict[str, int]:
        """Token text to id; broken UTF-8 is replaced, so some texts may be equal."""
        ranks = {
            token.decode("utf-8", "backslashreplace"): rank + self.first_text_id
            for token, rank in self._model._mergeable_ranks.items()
        }
        return {**ranks, **self._specials}


def _parts_before(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Apply all merges of lower rank to a token: two parts remain if the token is reachable."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
        lowest = min(joined)
        if lowest >= rank:
            break
        at = joined.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _encoding(
    library: Any, path: str, pattern: str, ranks: dict[bytes, int], specials: dict[str, int]
) -> Any:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{path} lacks {len(missing)} of the 256 single bytes, byte {missing[0]} first.",
            rule="byte-level ranks begin with all single bytes",
            flags=["--tokenizer-model"],
            fix="check that this is a complete rank file",
        )
    return library.Encoding(
        name=os.path.basename(path), pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
    )


def _named_encoding(library: Any, name: str) -> Any:
    if name not in library.list_encoding_names():
        raise MissingInputError(
            f"{name!r} is neither a file nor a name of a tiktoken encoding.",
            rule="a rank file (.json or .tiktoken) or one of "
            + ", ".join(library.list_encoding_names()),
            flags=["--tokenizer-model"],
        )
    try:
        return library.get_encoding(name)
    except Exception as error:  # any error of the download
        raise MissingInputError(
            f"tiktoken could not fetch the ranks of {name!r}: {type(error).__name__}.",
            rule="a named set is read from tiktoken's cache or downloaded",
            flags=["--tokenizer-model"],
            fix="set TIKTOKEN_CACHE_DIR to a filled cache, or give a .tiktoken file",
        ) from error


def _read_list(path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Read a rank list and its settings."""
    try:
        with open(path, encoding="utf-8") as file:
            content = parse_json(file.read())
        entries = content["vocab"] if isinstance(content, dict) else content
        settings = content.get("config", {}) if isinstance(content, dict) else {}
        wrong = next((i for i, entry in enumerate(entries) if entry["rank"] != i), None)
        if not isinstance(settings, dict):
            raise TypeError("its config is no object")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a list of ranks: {type(error).__name__} {error}.",
            rule='a JSON list of {"rank", "token_bytes", "token_str"}, alone or under "vocab"',
            flags=["--tokenizer-model", "--tokenizer-type"],
            fix="for a tokenizer.json use --tokenizer-type HuggingFaceTokenizer",
        ) from error
    if wrong is not None:
        raise DataError(
            f"{path}: entry {wrong} has rank {entries[wrong]['rank']}.",
            rule="ranks count up from 0",
            flags=["--tokenizer-model"],
        )
    return entries, settings


def _read_ranks(path: str) -> dict[bytes, int]:
    ranks = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: not a base64 token and its rank.",
                    rule="each line of a .tiktoken file holds these two",
                    flags=["--tokenizer-model"],
                ) from error
    if not ranks:
        raise DataError(f"{path} holds no ranks.", flags=["--tokenizer-model"])
    return ranks


def _no_pattern(path: str) -> ConfigError:
    return ConfigError(
        f"{path} does not contain the pattern that cuts text before the merges.",
        rule=f"one of {', '.join(PATTERNS)}, or a regular expression",
        flags=["--tiktoken-pattern"],
        fix="--tiktoken-pattern v2",
    )
