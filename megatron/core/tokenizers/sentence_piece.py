"""SentencePiece models, in the three ways Megatron uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.optional_imports import require
from megatron.core.tokenizers.base import TextTokenizer, digest_of_file, existing_file
from megatron.core.tokenizers.piece_model import fast_form_of_pieces


class GPTSentencePieceTokenizer(TextTokenizer):
    """A SentencePiece model as it is; its end-of-sequence piece ends a document."""

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
        # The library says -1 for an id that the model lacks; that must never reach the data.
        self.bos = _or_none(self._model.bos_id())
        self.eos = _or_none(self._model.eos_id())
        self.pad = _or_none(self._model.pad_id())
        self.unk = _or_none(self._model.unk_id())
        self.eod = self.eos
        self.spelled_specials = tuple(
            self._model.id_to_piece(number)
            for number in range(self._model.get_piece_size())
            if self._model.is_control(number) or self._model.is_unknown(number)
        )

    @property
    def vocab_size(self) -> int:
        """Pieces of the model."""
        return int(self._model.get_piece_size())

    def tokenize(self, text: str) -> list[int]:
        """Return the ids."""
        ids: list[int] = self._model.encode(text)
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""
        ids: list[list[int]] = self._model.encode(list(texts), num_threads=1)
        return ids

    def load_into_gigatoken(self, library: Any) -> Any | None:
        """Return the same model as a `gigatoken.Tokenizer`."""
        return library.Tokenizer.from_sentencepiece(self._model.serialized_model_proto())

    def fast_form(self) -> Any | None:
        """Return the same pieces, with the tokens that this class adds."""
        fast = fast_form_of_pieces(self._model.serialized_model_proto())
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
        """Piece to id."""
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
        return self._added.setdefault(token, self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """Pieces and added tokens."""
        return super().vocab_size + len(self._added)

    @property
    def vocab(self) -> dict[str, int]:
        """Piece or added token to id."""
        return {**super().vocab, **self._added}


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """A SentencePiece model whose texts begin with the begin-of-sequence piece."""

    def __init__(self, model_file: str) -> None:
        super().__init__(model_file)
        self.around_a_text = (() if self.bos is None else (self.bos,)), ()

    def fast_form(self) -> Any | None:
        """Return the same pieces, with a post-processor that begins a text."""
        fast = super().fast_form()
        if fast is not None and self.bos is not None:
            library = require("tokenizers", purpose="a tokenizer.json of SentencePiece")
            begin = fast.id_to_token(self.bos)
            fast.post_processor = library.processors.TemplateProcessing(
                single=f"{begin} $A", special_tokens=[(begin, self.bos)]
            )
        return fast

    def tokenize(self, text: str, bos: bool = True, eos: bool = False) -> list[int]:
        """Return the ids, after the begin piece and before the end piece if asked."""
        begin = self.around_a_text[0] if bos else ()
        end = [self.eos] if eos and self.eos is not None else []
        return [*begin, *super().tokenize(text), *end]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, each after the begin piece."""
        return [[*self.around_a_text[0], *ids] for ids in super().tokenize_batch(texts)]


def _or_none(number: int) -> int | None:
    return None if number < 0 else number
