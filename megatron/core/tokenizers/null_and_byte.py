"""Tokenizers that need no files: numbers, and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.optional_imports import require
from megatron.core.tokenizers.base import TextTokenizer, byte_characters


class NullTokenizer(TextTokenizer):
    """Text that consists of ids, as decimal numbers between spaces.

    The last id of the given vocabulary ends a document.
    """

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None or vocab_size < 1:
            given = "no number of ids" if vocab_size is None else f"a vocabulary of {vocab_size}"
            raise ConfigError(
                f"NullTokenizer with {given}.",
                rule="it has no files that state its vocabulary, which has at least one id",
                flags=["--vocab-size"],
                fix="--vocab-size 32000",
            )
        super().__init__(vocab_size=vocab_size)
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        """Read the numbers.

        Raises:
            ValueError: a word that is not a number, or an id outside the vocabulary.
        """
        ids = [int(number) for number in text.split()]
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"id {wrong} is outside the vocabulary of {self.vocab_size}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    @property
    def vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self.vocab_size)}


class ByteTokenizer(TextTokenizer):
    """The bytes of UTF-8, then end-of-document (256) and padding (257)."""

    vocab_size = 258

    def __init__(self) -> None:
        super().__init__()
        self.eod = self.eos = 256
        self.pad = 257

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text; special ids are left out and broken sequences replaced."""
        return bytes(number for number in ids if number < 256).decode("utf-8", "replace")

    def fast_form(self) -> Any:
        """Return a byte-level vocabulary without merges."""
        library = require("tokenizers", purpose="a tokenizer.json of bytes")
        characters = {text: byte for byte, text in enumerate(byte_characters())}
        fast = library.Tokenizer(library.models.BPE(characters, []))
        fast.pre_tokenizer = library.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        fast.decoder = library.decoders.ByteLevel()
        fast.add_special_tokens(["<eod>", "<pad>"])
        return fast

    @property
    def vocab(self) -> dict[str, int]:
        """Bytes as "<0x41>", and the special tokens."""
        named = {f"<0x{number:02X}>": number for number in range(256)}
        return {**named, "<eod>": 256, "<pad>": 257}
