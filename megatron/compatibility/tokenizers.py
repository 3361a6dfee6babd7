"""The base class of tokenizers that code written for Megatron derives from."""

from __future__ import annotations

from typing import Any

from megatron.core.tokenizers.base import TextTokenizer


class MegatronLegacyTokenizer(TextTokenizer):
    """A tokenizer that is told from others by its paths and options.

    Subclasses give `tokenize`, `detokenize`, `vocab` and `vocab_size`, and the special ids that
    they have; the others are None.
    """

    def __init__(self, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        super().__init__(tokenizer_path=list(tokenizer_paths), **tokenizer_options)
