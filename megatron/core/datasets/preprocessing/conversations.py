"""Conversations into tokens and a loss mask, several packed into one sample.

Two corpora of the same shape are written: the tokens, and a mask (uint8) that is 1 where a token
is to be learned. A document is a pack, its sequences are conversations: a reader takes a document
as one sample and finds the boundaries between the conversations in the index.

Packing is best-fit decreasing: "Fewer Truncations Improve Language Modeling" (Ding et al.), section
3, arXiv 2404.10830. It works on one unit of the input at a time, so it needs no state and gives the
same packs with any number of workers. No torch import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from megatron.core.datasets.corpus.paths import MASK_SUFFIX
from megatron.core.datasets.packing import pack
from megatron.core.datasets.preprocessing.chat_template import ChatTemplate
from megatron.core.datasets.preprocessing.documents import documents_of
from megatron.core.datasets.preprocessing.encoder import (
    EncodedPart,
    EncodedUnit,
    FlatEncoder,
    Sequences,
    check_ids,
)
from megatron.core.datasets.preprocessing.units import LONGEST_LINE_BYTES, UNIT_BYTES, Unit


def unit_bytes_for(pack_length: int | None) -> int:
    """Return how large units must be for well-filled packs: 64 of them, at 4 bytes a token."""
    return max(UNIT_BYTES, 256 * (pack_length or 0))


@dataclass(kw_only=True)
class ConversationEncoder:
    """Turn units into tokens and masks. Picklable; made once, used by every worker.

    Args:
        engine: does the work, all segments of a unit in one call.
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
    longest_line_bytes: int = LONGEST_LINE_BYTES
    identity: Mapping[str, object] = field(default_factory=dict)

    @property
    def corpora(self) -> dict[str, type[np.number]]:
        """Names of the output corpora and the types of their tokens."""
        return {self.key: self.dtype, self.key + MASK_SUFFIX: np.uint8}

    def __call__(self, unit: Unit) -> EncodedUnit:
        """Parse, write through the template and tokenize; faulty ones are returned by name."""
        documents = documents_of(
            unit, [self.key], parse=self.template, longest_line_bytes=self.longest_line_bytes
        )
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
        tokens, masks = [one[:limit] for one in tokens], [one[:limit] for one in masks]
        # What teaches nothing takes no space.
        kept = [at for at, one in enumerate(masks) if one.any()]
        tokens, masks = [tokens[at] for at in kept], [masks[at] for at in kept]
        packs = [[at] for at in range(len(kept))]
        if limit is not None:
            packs = pack([len(one) for one in tokens], limit)
        size = sum(len(text.encode()) for text in flat)
        parts = {
            name: EncodedPart(
                sequences=_joined(arrays, packs, dtype),
                num_empty=len(segments) - len(kept),
                num_cut=num_cut,
                text_bytes=size if name == self.key else 0,
            )
            for (name, dtype), arrays in zip(self.corpora.items(), (tokens, masks), strict=True)
        }
        return EncodedUnit.of(unit, documents, parts)

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


def _joined(
    arrays: Sequence[np.ndarray], packs: Sequence[Sequence[int]], dtype: type[np.number]
) -> Sequences:
    order = [*chain.from_iterable(packs)]
    ordered = [arrays[at] for at in order]
    return Sequences(
        tokens=np.concatenate(ordered).astype(dtype) if ordered else np.empty(0, dtype),
        lengths=np.array([len(one) for one in ordered], np.int32),
        per_document=np.array([len(one) for one in packs], np.int64),
    )
