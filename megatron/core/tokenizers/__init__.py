"""Tokenizers with one small interface; see `base.TextTokenizer`. No torch import."""

from megatron.core.tokenizers.base import TextTokenizer, pad_vocab_size
from megatron.core.tokenizers.megatron_tokenizer import (
    TOKENIZER_TYPES,
    MegatronTokenizer,
    make_tokenizer,
)

__all__ = [
    "TOKENIZER_TYPES",
    "MegatronTokenizer",
    "TextTokenizer",
    "make_tokenizer",
    "pad_vocab_size",
]
