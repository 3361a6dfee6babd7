"""SentencePiece models, in Megatron's three variants.

The format of a model is sentencepiece_model.proto of https://github.com/google/sentencepiece; this
module reads it without protobuf. No torch import.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.optional_imports import require
from megatron.core.tokenizers.base import TextTokenizer, digest_of_file, existing_file

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


class GPTSentencePieceTokenizer(TextTokenizer):
    """An unchanged SentencePiece model; its end-of-sequence piece ends a document."""

    def __init__(self, model_file: str, **identity: object) -> None:
        library = require("sentencepiece", purpose=type(self).__name__)
        existing_file(model_file, flag="--tokenizer-model", what="a SentencePiece model")
        super().__init__(model_file=digest_of_file(model_file), **identity)
        try:
            self._model: Any = library.SentencePieceProcessor(model_file=model_file)
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"{model_file} is not a SentencePiece model: {error}.",
                flags=["--tokenizer-model", "--tokenizer-type"],
                fix="for a tokenizer.json use --tokenizer-type HuggingFaceTokenizer",
            ) from error
        self.vocab_size = int(self._model.get_piece_size())
        # The library returns -1 for an id that the model lacks; -1 must never reach the data.
        self.bos = _or_none(self._model.bos_id())
        self.eos = _or_none(self._model.eos_id())
        self.pad = _or_none(self._model.pad_id())
        self.unk = _or_none(self._model.unk_id())
        self.eod = self.eos
        self.spelled_specials = tuple(
            self._model.id_to_piece(number)
            for number in range(self.vocab_size)
            if self._model.is_control(number) or self._model.is_unknown(number)
        )

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._model.encode(list(texts), num_threads=1)
        return ids

    def load_into_gigatoken(self, library: Any) -> Any | None:
        return library.Tokenizer.from_sentencepiece(self._model.serialized_model_proto())

    def fast_form(self) -> Any | None:
        """Return the same pieces, with the tokens that this class adds."""
        fast = _fast_form_of_pieces(self._model.serialized_model_proto())
        added = sorted(self.vocab.items(), key=lambda item: item[1])[len(self._model) :]
        if fast is not None:
            fast.add_special_tokens([text for text, _ in added])
        return fast

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text; ids outside the model are left out."""
        size = int(self._model.get_piece_size())
        text: str = self._model.decode([int(number) for number in ids if number < size])
        return text

    @property
    def vocab(self) -> dict[str, int]:
        return {self._model.id_to_piece(i): i for i in range(self._model.get_piece_size())}


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """A SentencePiece model with special tokens added after its pieces.

    In this order, each only if the model lacks it: <CLS>, <SEP>, <EOD>, <MASK>, padding, begin,
    end, then `vocab_extra_ids` tokens <extra_id_0>, ...
    """

    def __init__(self, model_file: str, vocab_extra_ids: int = 0) -> None:
        super().__init__(model_file, vocab_extra_ids=vocab_extra_ids)
        self._added: dict[str, int] = {}
        self.cls = self._special("<CLS>")
        self.sep = self._special("<SEP>")
        self.eod = self._special("<EOD>")
        self.mask = self._special("<MASK>")
        self.pad = self._special("<PAD>") if self.pad is None else self.pad
        self.bos = self._special("<BOS>") if self.bos is None else self.bos
        self.eos = self._special("<EOS>") if self.eos is None else self.eos
        for number in range(vocab_extra_ids):
            self._special(f"<extra_id_{number}>")

    def _special(self, token: str) -> int:
        number = int(self._model.piece_to_id(token))
        if self._model.id_to_piece(number) == token:
            return number
        if token not in self._added:
            self._added[token] = self.vocab_size
            self.vocab_size += 1
        return self._added[token]

    @property
    def vocab(self) -> dict[str, int]:
        return {**super().vocab, **self._added}


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """A SentencePiece model whose texts begin with the begin-of-sequence piece."""

    def __init__(self, model_file: str) -> None:
        super().__init__(model_file)
        self.around_a_text = (() if self.bos is None else (self.bos,)), ()

    def fast_form(self) -> Any | None:
        """Return the same pieces, with a post-processor that puts the begin piece before a text."""
        fast = super().fast_form()
        if fast is not None and self.bos is not None:
            library = require("tokenizers", purpose="a tokenizer.json of SentencePiece")
            begin = fast.id_to_token(self.bos)
            fast.post_processor = library.processors.TemplateProcessing(
                single=f"{begin} $A", special_tokens=[(begin, self.bos)]
            )
        return fast

    def tokenize(self, text: str, bos: bool = True, eos: bool = False) -> list[int]:
        """Return the ids; `bos` puts the begin piece before them, `eos` the end piece after."""
        begin = self.around_a_text[0] if bos else ()
        end = [self.eos] if eos and self.eos is not None else []
        return [*begin, *super().tokenize(text), *end]


def _or_none(number: int) -> int | None:
    return None if number < 0 else number


# --- the same pieces as a tokenizer.json ---------------------------------------------------------


def _fast_form_of_pieces(model: bytes) -> Any | None:
    """Return the `tokenizers.Tokenizer` of a serialized model.

    Returns:
        None for a model of words or characters, and for a model with user-defined symbols: the
        library puts a space after them.
    """
    library = require("tokenizers", purpose="a tokenizer.json of SentencePiece")
    fields = _fields(model)
    trainer, rules = _fields(fields[2][0]), _fields(fields[3][0])
    pieces = [_piece(one) for one in fields[1]]
    kind, unknown = trainer.get(3, [_UNIGRAM])[0], _texts(pieces, _UNKNOWN)
    found = None
    has_bytes = bool(trainer.get(35, [0])[0])
    if kind == _BPE:
        vocab = {text: number for number, (text, _, _) in enumerate(pieces)}
        found = library.models.BPE(
            vocab, _merges(pieces), unk_token=unknown[0], fuse_unk=True, byte_fallback=has_bytes
        )
    elif kind == _UNIGRAM:
        scored = [(text, score) for text, score, _ in pieces]
        unknown_id = [of for _, _, of in pieces].index(_UNKNOWN)
        found = library.models.Unigram(scored, unk_id=unknown_id, byte_fallback=has_bytes)
    if found is None or _texts(pieces, _USER_DEFINED):
        return None
    fast = library.Tokenizer(found)
    steps: list[Any] = []
    if charsmap := rules.get(2, [b""])[0]:
        steps.append(library.normalizers.Precompiled(charsmap))
    if rules.get(4, [1])[0]:
        steps += [
            library.normalizers.Strip(),
            library.normalizers.Replace(library.Regex(" {2,}"), " "),
        ]
    has_prefix = rules.get(3, [1])[0]
    if has_prefix:
        steps.append(library.normalizers.Prepend(_SPACE))
    fast.normalizer = library.normalizers.Sequence(
        [*steps, library.normalizers.Replace(" ", _SPACE)]
    )
    decoders = library.decoders
    backward = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backward += [decoders.Strip(" ", 1, 0)] if has_prefix else []
    fast.decoder = decoders.Sequence(backward)
    fast.add_special_tokens([*unknown, *_texts(pieces, _CONTROL)])
    return fast


def _texts(pieces: list[tuple[str, float, int]], kind: int) -> list[str]:
    return [text for text, _, of in pieces if of == kind]


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Return the pairs that make pieces, by score: SentencePiece joins the best pair first."""
    ids = {text: number for number, (text, _, of) in enumerate(pieces) if of == _NORMAL}
    found = []
    for text, score, of in pieces:
        if of != _NORMAL:
            continue
        cuts = [(text[:at], text[at:]) for at in range(1, len(text))]
        known = [(ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids]
        found += [(-score, a, b) for _, _, a, b in sorted(known)]
    return [(a, b) for _, a, b in sorted(found, key=lambda merge: merge[0])]


def _piece(message: bytes) -> tuple[str, float, int]:
    fields = _fields(message)
    (score,) = struct.unpack("<f", fields.get(2, [bytes(4)])[0])
    return fields[1][0].decode(), score, fields.get(3, [_NORMAL])[0]


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Return field number -> values of a protobuf message: integers and bytes."""
    found: dict[int, list[Any]] = defaultdict(list)
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            found[number].append(varint())
            continue
        length = {1: 8, 5: 4}.get(wire) or varint()
        found[number].append(message[at : at + length])
        at += length
    return found
