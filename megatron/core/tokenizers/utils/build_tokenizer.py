"""A tokenizer from the arguments of a training script."""

from __future__ import annotations

from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.tokenizers.base import TextTokenizer, pad_vocab_size
from megatron.core.tokenizers.megatron_tokenizer import (
    SETTINGS,
    TOKENIZER_TYPES,
    make_tokenizer,
)


def build_tokenizer(args: object, **kwargs: object) -> TextTokenizer:
    """Make the tokenizer that `args` describe.

    Args:
        args: anything with the attributes of Megatron's tokenizer flags; missing ones count as
            not given. It is not changed.
        kwargs: settings that override `args`.
    """
    tokenizer_type = getattr(args, "tokenizer_type", None)
    if tokenizer_type is None:
        raise ConfigError(
            "no tokenizer is named.",
            rule=f"one of {', '.join(TOKENIZER_TYPES)}",
            flags=["--tokenizer-type"],
        )
    given = {name: getattr(args, name, None) for name in SETTINGS} | kwargs
    settings = {name: value for name, value in given.items() if value is not None}
    return make_tokenizer(tokenizer_type, **settings)


def vocab_size_with_padding(orig_vocab_size: int, args: Any, logging_enabled: bool = True) -> int:
    """Return the rows of the embedding for a vocabulary, see `pad_vocab_size`.

    Args:
        args: has `make_vocab_size_divisible_by` and `tensor_model_parallel_size`.
        logging_enabled: print the number of added tokens.
    """
    padded = pad_vocab_size(
        orig_vocab_size,
        divisible_by=args.make_vocab_size_divisible_by,
        tensor_parallel_size=args.tensor_model_parallel_size,
    )
    if logging_enabled and getattr(args, "rank", 0) == 0:
        dummies = padded - orig_vocab_size
        print(
            f" > padded vocab (size: {orig_vocab_size}) with {dummies} dummy tokens "
            f"(new size: {padded})",
            flush=True,
        )
    return padded
