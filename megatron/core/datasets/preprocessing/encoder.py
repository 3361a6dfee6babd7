"""Turn the documents of a unit into token arrays; a worker process does this.

`Encoder` encodes plain texts. `ConversationEncoder` encodes conversations and writes two corpora of
the same shape: the tokens, and a mask (uint8) that is 1 where a token is to be learned. There a
document is a pack and its sequences are conversations: a reader takes a document as one sample and
finds the boundaries between the conversations in the index.

Packing is best-fit decreasing: "Fewer Truncations Improve Language Modeling" (Ding et al.), section
3, arXiv 2404.10830. It works on one unit of the input at a time, so it needs no state and gives the
same packs with any number of workers. No torch import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from megatron.core.datasets.corpus.files import MASK_SUFFIX
from megatron.core.datasets.packing import pack
from megatron.core.datasets.preprocessing.chat_template import ChatTemplate
from megatron.core.datasets.preprocessing.documents import (
    BadDocument,
    Documents,
    Texts,
    documents_of,
)
from megatron.core.datasets.preprocessing.transforms import FillInMiddle
from megatron.core.datasets.preprocessing.units import UNIT_BYTES, Unit
from megatron.core.foundation.errors import DataError, MegatronError, UntokenizableTextError


class FlatEncoder(Protocol):
    """The part of a tokenizer engine that is needed here."""

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, one after the other, and the number of each.

        The texts are parts: special tokens that begin and end a text are not among the ids.
        """


@dataclass(kw_only=True)
class EncodedPart:
    """Documents of one output corpus, each of one or more sequences; arrays as on disk."""

    tokens: np.ndarray
    lengths: np.ndarray
    """int32 [sequences], tokens."""
    per_document: np.ndarray
    """int64 [documents], sequences."""
    num_empty: int = 0
    """Documents that are left out because they have no token under one of the keys."""
    num_cut: int = 0
    """Conversations that were longer than a pack."""
    text_bytes: int = 0


@dataclass(kw_only=True)
class EncodedUnit:
    """The result of a worker for a `Unit`."""

    parts: dict[str, EncodedPart]
    """Name of the output corpus -> its part."""
    num_lines: int
    bad: list[BadDocument]
    """In the order of the input."""

    @classmethod
    def of(cls, documents: Documents, parts: dict[str, EncodedPart]) -> EncodedUnit:
        """Return the result for the documents of a unit."""
        bad = sorted(documents.bad, key=lambda bad: bad.number)
        return cls(parts=parts, num_lines=documents.num_lines, bad=bad)


@dataclass(kw_only=True)
class Encoder:
    """Turn units into tokens. Picklable; made once, used by every worker.

    Args:
        engine: tokenizes all texts of a unit in one call.
        keys: members or columns that hold text; each fills the corpus of its name. Document i of
            one corpus is document i of the others.
        dtype: of the tokens.
        vocab_size: ids must be below it.
        around_a_text: ids written before and after each sequence.
        end_of_document: id appended to every document, or None.
        split: cuts a text into sequences; None keeps it whole.
        transform: changes the text before it is encoded (see `fill_in_middle`).
    """

    engine: FlatEncoder
    keys: Sequence[str]
    dtype: type[np.number]
    vocab_size: int
    around_a_text: tuple[Sequence[int], Sequence[int]] = ((), ())
    end_of_document: int | None = None
    split: Callable[[str], list[str]] | None = None
    transform: FillInMiddle | None = None
    identity: Mapping[str, object] = field(default_factory=dict)
    """`unique_identifiers` of the tokenizer."""

    @property
    def corpora(self) -> dict[str, type[np.number]]:
        """Names of the output corpora and the types of their tokens."""
        return dict.fromkeys(self.keys, self.dtype)

    def __call__(self, unit: Unit) -> EncodedUnit:
        """Parse and tokenize; faulty documents are returned by name, not raised."""
        documents = documents_of(unit, self.keys)
        texts, positions = documents.texts, documents.positions
        if self.split is not None:
            split = self.split
            texts = [
                {key: [*chain.from_iterable(map(split, whole))] for key, whole in document.items()}
                for document in texts
            ]
        try:
            encoded = self._encode(texts)
        except BaseException as error:  # any error of the library; a panic is no Exception
            if not _is_about_a_text(error):
                raise
            kept, rejected = self._separate(texts)
            documents.bad += [BadDocument(*positions[at], *why) for at, why in rejected.items()]
            texts = [texts[at] for at in kept]
            encoded = self._encode(texts)
        parts = {}
        per_document = {
            key: np.fromiter((len(d[key]) for d in texts), np.int64, len(texts)) for key in encoded
        }
        is_kept = np.ones(len(texts), bool)
        for key, (_, counts) in encoded.items():
            filled = np.repeat(np.arange(len(texts)), per_document[key])[counts > 0]
            is_kept &= np.bincount(filled, minlength=len(texts)) > 0
        for key, (ids, counts) in encoded.items():
            parts[key] = self._pack(ids, counts, per_document[key], is_kept)
            parts[key].text_bytes = sum(map(_num_bytes, chain.from_iterable(d[key] for d in texts)))
        return EncodedUnit.of(documents, parts)

    def _encode(self, texts: list[Texts]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        found = {}
        for key in self.keys:
            flat = [*chain.from_iterable(document[key] for document in texts)]
            encode = self.engine.encode_flat
            if self.transform is not None:
                found[key] = self.transform(flat, encode)
            else:
                found[key] = encode(flat)
            check_ids(found[key][0], self.vocab_size)
        return found

    def _separate(self, texts: list[Texts]) -> tuple[list[int], dict[int, tuple[str, str]]]:
        """Return (documents that the tokenizer accepts, number -> reason for the others)."""
        kept, rejected = [], {}
        for at, document in enumerate(texts):
            try:
                self._encode([document])
                kept.append(at)
            except BaseException as error:
                if not _is_about_a_text(error):
                    raise
                text = error.found if isinstance(error, MegatronError) else error
                rejected[at] = ("not tokenizable", f"{type(error).__name__}: {text}")
        return kept, rejected

    def _pack(
        self, ids: np.ndarray, counts: np.ndarray, per_document: np.ndarray, is_kept: np.ndarray
    ) -> EncodedPart:
        """Drop empty sequences and documents, add special tokens, cast.

        Args:
            ids: [total] of all sequences.
            counts: [sequences] ids of each.
            per_document: [documents] sequences of each.
            is_kept: [documents] False where a document is dropped.
        """
        of_document = np.repeat(np.arange(len(per_document)), per_document)
        is_of_kept = is_kept[of_document]
        if not is_kept.all():
            ids = ids[np.repeat(is_of_kept, counts)]
        is_filled = is_of_kept & (counts > 0)
        lengths, of_document = counts[is_filled], of_document[is_filled]
        filled = np.bincount(of_document, minlength=len(per_document))[is_kept]
        before, after = self.around_a_text
        lengths = lengths + len(before) + len(after)
        lasts = np.cumsum(filled) - 1  # the last sequence of each document
        end = self.end_of_document
        if end is not None:
            lengths[lasts] += 1
        sequence_ends = np.cumsum(lengths)
        text_ends = sequence_ends.copy()
        added = [(sequence_ends - lengths + at, number) for at, number in enumerate(before)]
        if end is not None:
            text_ends[lasts] -= 1
            added.append((text_ends[lasts], end))
        added += [(text_ends - len(after) + at, number) for at, number in enumerate(after)]
        if not added:
            tokens = ids.astype(self.dtype)
        else:
            tokens = np.empty(len(ids) + sum(len(at) for at, _ in added), self.dtype)
            is_text = np.ones(len(tokens), bool)
            for at, number in added:
                is_text[at] = False
                tokens[at] = number
            tokens[is_text] = ids
        return EncodedPart(
            tokens=tokens,
            lengths=lengths.astype(np.int32),
            per_document=filled.astype(np.int64),
            num_empty=int((~is_kept).sum()),
        )


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary: they would read past the embedding in training.

    Raises:
        DataError: names the id.
    """
    lowest, highest = int(ids.min(initial=0)), int(ids.max(initial=0))
    if lowest < 0 or highest >= vocab_size:
        worst = lowest if lowest < 0 else highest
        raise DataError(
            f"the tokenizer gave id {worst}, outside its vocabulary of {vocab_size}.",
            rule="every id is between 0 and the vocabulary size - 1",
            flags=["--tokenizer-type", "--tokenizer-model", "--vocab-size"],
            fix="check that the tokenizer's files belong together",
        )


def _is_about_a_text(error: BaseException) -> bool:
    """Return whether an error of a tokenizer is about a text, not about the run as a whole."""
    ends = (MegatronError, KeyboardInterrupt, SystemExit, MemoryError)
    return isinstance(error, UntokenizableTextError) or not isinstance(error, ends)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


# --- conversations --------------------------------------------------------------------------------


def unit_bytes_for(pack_length: int | None) -> int:
    """Return how large units must be for well-filled packs: 64 of them, at 4 bytes a token."""
    return max(UNIT_BYTES, 256 * (pack_length or 0))


@dataclass(kw_only=True)
class ConversationEncoder:
    """Turn units into tokens and masks. Picklable; made once, used by every worker.

    Args:
        engine: tokenizes all segments of a unit in one call.
        template: writes a conversation.
        key: member that holds the messages; it names the corpora.
        dtype: of the tokens.
        vocab_size: ids must be below it.
        end_of_document: id appended to every conversation, learned like the token before it.
        pack_length: tokens of a pack; longer conversations are cut. None packs nothing.
    """

    engine: FlatEncoder
    template: ChatTemplate
    key: str
    dtype: type[np.number]
    vocab_size: int
    end_of_document: int | None = None
    pack_length: int | None = None
    identity: Mapping[str, object] = field(default_factory=dict)

    @property
    def corpora(self) -> dict[str, type[np.number]]:
        return {self.key: self.dtype, self.key + MASK_SUFFIX: np.uint8}

    def __call__(self, unit: Unit) -> EncodedUnit:
        """Parse, render with the template and tokenize; return faulty documents by name."""
        documents = documents_of(unit, [self.key], parse=self.template)
        segments = [document[self.key] for document in documents.texts]
        flat = [*chain.from_iterable(segments)]
        ids, counts = self.engine.encode_flat(flat)
        check_ids(ids, self.vocab_size)
        is_learned = np.fromiter(
            (position % 2 for one in segments for position in range(len(one))), np.uint8, len(flat)
        )
        mask = np.repeat(is_learned, counts)
        per_conversation = np.fromiter(map(len, segments), np.int64, len(segments))
        ends = np.concatenate([[0], np.cumsum(counts)])[np.cumsum(per_conversation)]
        tokens, masks = self._conversations(ids, mask, ends)
        limit = self.pack_length
        num_cut = 0 if limit is None else sum(len(one) > limit for one in tokens)
        # Drop conversations without a learned token.
        kept = [at for at, one in enumerate(masks) if one[:limit].any()]
        packs = [[at] for at in kept]
        if limit is not None:
            lengths = [min(len(tokens[at]), limit) for at in kept]
            packs = [[kept[at] for at in one] for one in pack(lengths, limit)]
        order = [*chain.from_iterable(packs)]
        size = sum(len(text.encode()) for text in flat)
        parts = {}
        for (name, dtype), arrays in zip(self.corpora.items(), (tokens, masks), strict=True):
            ordered = [arrays[at][:limit] for at in order]
            parts[name] = EncodedPart(
                tokens=np.concatenate([np.empty(0, dtype), *ordered]).astype(dtype),
                lengths=np.array([len(one) for one in ordered], np.int32),
                per_document=np.array([len(one) for one in packs], np.int64),
                num_empty=len(segments) - len(kept),
                num_cut=num_cut,
                text_bytes=size if name == self.key else 0,
            )
        return EncodedUnit.of(documents, parts)

    def _conversations(
        self, ids: np.ndarray, mask: np.ndarray, ends: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Cut at the ends of the conversations; append the end token."""
        tokens, masks, begin = [], [], 0
        for end in ends.tolist():
            one, learned = ids[begin:end], mask[begin:end]
            if self.end_of_document is not None and len(one):
                one, learned = np.append(one, self.end_of_document), np.append(learned, learned[-1])
            tokens.append(one)
            masks.append(learned)
            begin = end
        return tokens, masks
