"""BERT's WordPiece, from its `vocab.txt`, by Hugging Face's `tokenizers` library.

J. Devlin et al., "BERT", section 3, arXiv 1810.04805.
"""

from __future__ import annotations

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.optional_imports import require
from megatron.core.tokenizers.base import digest_of_file, existing_file
from megatron.core.tokenizers.hugging_face import FastTokenizer

_SPECIALS = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"}


class BertWordPieceTokenizer(FastTokenizer):
    """WordPiece with the tokens [BOS], [EOS] and `extra_ids` sentinels after those of the file.

    Args:
        vocab_file: one token a line; it holds [CLS], [SEP], [PAD], [MASK] and [UNK].
        lower_case: lower the text and take accents off, as the uncased models do.
        extra_ids: sentinels <extra_id_0>, <extra_id_1>, ... of span corruption.
    """

    def __init__(self, vocab_file: str | None, *, lower_case: bool, extra_ids: int = 0) -> None:
        library = require("tokenizers", purpose="BertWordPieceLowerCase")
        path = existing_file(vocab_file, flag="--vocab-file", what="BERT's vocab.txt")
        super().__init__(
            vocab_file=digest_of_file(path), lower_case=lower_case, extra_ids=extra_ids
        )
        # A file of something else holds no special tokens, in whatever characters.
        with open(path, encoding="utf-8", errors="replace") as file:
            tokens = [line.rstrip("\n") for line in file]
        vocab = {token: number for number, token in enumerate(tokens)}
        missing = [text for text in _SPECIALS.values() if text not in vocab]
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
        backend.add_special_tokens([*_SPECIALS.values(), "[BOS]", "[EOS]", *sentinels])
        self._use(backend)
        self.cls, self.sep, self.pad, self.mask, self.unk = (
            backend.token_to_id(text) for text in _SPECIALS.values()
        )
        self.bos, self.eos = backend.token_to_id("[BOS]"), backend.token_to_id("[EOS]")
        self.eod = self.sep
        self.additional_special_tokens_ids = [backend.token_to_id(text) for text in sentinels]
