"""A SentencePiece model as a `tokenizers.Tokenizer`, without protobuf. No torch import.

The format is sentencepiece_model.proto of https://github.com/google/sentencepiece.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import Any

from megatron.core.foundation.optional_imports import require

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def fast_form_of_pieces(model: bytes) -> Any | None:
    """Return the `tokenizers.Tokenizer` of a serialized model.

    Returns:
        None for a model of words or characters, and for one with symbols that a user defined:
        the library puts a space after these.
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
    """Return the pairs that make pieces, the best first: SentencePiece joins by score."""
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
