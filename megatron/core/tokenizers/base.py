"""The interface of all tokenizers.

No torch import, because preprocessing imports this module. Each class imports the library that it
needs when an object is made.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, wraps
from itertools import chain
from typing import Any

import numpy as np

from megatron.core.foundation.errors import (
    ConfigError,
    DataError,
    MissingInputError,
    UntokenizableTextError,
)

SMALLEST_VOCABULARY = 32
"""A text tokenizer with fewer entries was loaded from the wrong files: some loaders return an
almost empty tokenizer instead of an error."""

_BATCH_CHARACTERS = 1 << 16
"""Characters passed to a library at a time: the result, about a hundred bytes per token, stays in
the caches of a core."""

PROBE = "The quick brown fox jumps over the lazy dog; 0123456789."


def _without_panic(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that raises `UntokenizableTextError` if the tokenizer's library panics.

    A panic of Rust code is no `Exception`, so error handlers would not catch it.
    """

    @wraps(method)
    def guarded(self: TextTokenizer, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as panic:
            raise UntokenizableTextError(
                f"the library of {type(self).__name__} gave up: {panic}.",
                rule="the library must be able to cut a text into words",
                flags=["--tokenizer-type"],
                fix="shorten the text, or its longest run of equal characters",
            ) from panic

    return guarded


class TextTokenizer(ABC):
    """Text to token ids and back.

    Special ids are None if the tokenizer lacks them; they are never negative. Text that spells a
    special token stays text unless the class documents otherwise.
    """

    vocab_size: int
    """One more than the largest id, special ones included, without padding of the model."""
    eod: int | None = None
    """End of document: what `--append-eod` appends."""
    bos: int | None = None
    """Begin of sequence."""
    eos: int | None = None
    """End of sequence."""
    pad: int | None = None
    """Padding."""
    unk: int | None = None
    """Unknown text."""
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None

    first_text_id = 0
    """Added to the ids of the library if special tokens have the first ids."""
    around_a_text: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    """The special ids that `tokenize` writes before and after the ids of a text."""
    spelled_specials: tuple[str, ...] = ()
    """Special tokens that gigatoken recognises in a text, unlike `tokenize`."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the methods of a subclass, so that a panic of the library becomes an error."""
        super().__init_subclass__(**options)
        for name in ("tokenize", "tokenize_parts", "encode_flat", "detokenize"):
            if name in cls.__dict__:
                setattr(cls, name, _without_panic(cls.__dict__[name]))

    def __init__(self, **identity: object) -> None:
        self._identity = identity

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a generated text."""
        return frozenset(number for number in (self.eod, self.eos) if number is not None)

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a whole text, `around_a_text` included; end-of-document is not."""

    def tokenize_part(self, text: str) -> list[int]:
        """Return the ids of a part of a text, or of the text of a chat template."""
        ids = self.tokenize(text)
        before, after = self.around_a_text
        return ids[len(before) : len(ids) - len(after)]

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    @property
    @abstractmethod
    def vocab(self) -> dict[str, int]:
        """Token text to id."""

    def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several parts of texts, on one thread."""
        return [self.tokenize_part(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode parts of texts.

        Returns:
            the ids of all parts, one after the other, and the number of ids of each (int64).
        """
        ids, counts = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for together in _in_batches(texts):
            lists = self.tokenize_parts(together)
            counts.append(np.fromiter(map(len, lists), np.int64, len(lists)))
            total = int(counts[-1].sum())
            ids.append(np.fromiter(chain.from_iterable(lists), np.int32, total))
        return np.concatenate(ids), np.concatenate(counts)

    def load_into_gigatoken(self, library: object) -> Any | None:
        """Return the same tokenizer as a `gigatoken.Tokenizer`, or None if it has none.

        Its ids equal the ids of `tokenize_part` minus `first_text_id`.
        """
        return None

    def fast_form(self) -> Any | None:
        """Return the same tokenizer as a new `tokenizers.Tokenizer`, or None if it has none.

        Its ids equal the ids of `tokenize` if its `encode_special_tokens` is set. They may differ
        on some texts, so the caller compares them.
        """
        return None

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Id to token text."""
        return {number: token for token, number in self.vocab.items()}

    @property
    def unique_identifiers(self) -> OrderedDict[str, object]:
        """Class, settings and digests of the files of this tokenizer."""
        return OrderedDict([("class", type(self).__name__), *self._identity.items()])

    @property
    def unique_description(self) -> str:
        """The same as JSON."""
        return json.dumps(self.unique_identifiers, indent=4)

    def special_id(self, name: str, *, purpose: str) -> int:
        """Return the special id `name` ("eod", "bos", ...).

        Raises:
            DataError: the tokenizer has none.
        """
        number: int | None = getattr(self, name)
        if number is None:
            raise DataError(
                f"{type(self).__name__} has no {name} token, which {purpose} needs.",
                rule="the tokenizer's files must name the token",
                flags=["--tokenizer-type", "--tokenizer-model"],
                fix=f"name it in tokenizer_config.json, or do without {purpose}",
            )
        return number


def _in_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield texts in order, in lists of about `_BATCH_CHARACTERS`."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@cache
def byte_characters() -> tuple[str, ...]:
    """Return the visible character of each byte in a byte-level vocabulary."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return tuple(chr(byte) if byte in visible else chr(next(others)) for byte in range(256))


def digest_of_file(path: str) -> str:
    """Return a short digest of a file's contents, which does not depend on its path."""
    with open(path, "rb") as file:
        return hashlib.blake2b(file.read(), digest_size=16).hexdigest()


def existing_file(path: str | None, *, flag: str, what: str) -> str:
    """Return `path` if it is a file.

    Raises:
        ConfigError: no path was given.
        MissingInputError: the file does not exist.
    """
    if not path:
        raise ConfigError(f"{what} is needed.", rule=f"{flag} names it", flags=[flag])
    if not os.path.isfile(path):
        raise MissingInputError(
            f"{path}: no such file, where {what} was expected.",
            flags=[flag],
            fix="check the path",
        )
    return path


def check_loaded(tokenizer: TextTokenizer, source: str) -> None:
    """Refuse a tokenizer that was loaded without an error but is obviously wrong.

    Args:
        source: the file or name it was loaded from, for the message.
    Raises:
        DataError: almost no vocabulary, a special id outside it, or text that gives no ids.
    """
    problem = ""
    size = tokenizer.vocab_size
    specials = {name: getattr(tokenizer, name) for name in ("eod", "bos", "eos", "pad", "unk")}
    outside = {name: i for name, i in specials.items() if i is not None and not 0 <= i < size}
    if size < SMALLEST_VOCABULARY:
        problem = f"a vocabulary of {size} entries"
    elif outside:
        problem = f"special ids outside a vocabulary of {size}: {outside}"
    else:
        ids = tokenizer.tokenize(PROBE)
        if not ids:
            problem = "no ids for a plain English sentence"
        elif max(ids) >= size or min(ids) < 0:
            problem = f"id {max(ids)} for a plain English sentence, over a vocabulary of {size}"
    if problem:
        raise DataError(
            f"{type(tokenizer).__name__} from {source} has {problem}.",
            rule=f"a text tokenizer has at least {SMALLEST_VOCABULARY} entries, and its ids are "
            "within them",
            flags=["--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"],
            fix="check that these files are the tokenizer's own and complete",
        )


def pad_vocab_size(vocab_size: int, *, divisible_by: int, tensor_parallel_size: int) -> int:
    """Round a vocabulary up so that all tensor-parallel ranks own equally many rows.

    Args:
        vocab_size: entries of the tokenizer.
        divisible_by: the rows of a rank are a multiple of it (--make-vocab-size-divisible-by),
            for fast products.
        tensor_parallel_size: ranks that share the rows.
    """
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
