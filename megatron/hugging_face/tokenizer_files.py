"""Write a tokenizer's files for Transformers, and the special ids of a model's config."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.durable import write_durably
from megatron.core.tokenizers.base import TextTokenizer
from megatron.core.tokenizers.gigatoken_backend import PROBES
from megatron.core.tokenizers.hugging_face import GENERATION_NAME, HuggingFaceTokenizer

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_NAMED = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer files that exist in `source`."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_tokenizer(tokenizer: TextTokenizer, target: Path) -> str | None:
    """Write a tokenizer for `AutoTokenizer`.

    Files of Hugging Face are copied. Any other tokenizer is converted to a tokenizer.json, and the
    two are compared on difficult texts. The tokenizer.json is written if at most one text has
    different ids: the library and SentencePiece normalize some stacked accents differently.

    Returns:
        a note on a text with different ids, or the reason why nothing was written; or None.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.folder is not None:
        copy_tokenizer(Path(tokenizer.folder), target)
        if tokenizer.around_a_text == ((), ()):  # the run may have switched these tokens off
            tokenizer.fast_form().save(os.fspath(target / "tokenizer.json"))
        return None
    fast = tokenizer.fast_form()
    if fast is None:
        return f"no tokenizer is written: Transformers has no {type(tokenizer).__name__}"
    named: dict[str, Any] = {
        f"{name}_token": fast.id_to_token(number)
        for name in _NAMED
        if (number := getattr(tokenizer, name)) is not None
    }
    if tokenizer.eos is None and tokenizer.eod is not None:
        named["eos_token"] = fast.id_to_token(tokenizer.eod)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        # As in training, text that spells a special token is tokenized as text.
        named["split_special_tokens"] = fast.encode_special_tokens = True
    texts = [one for one in PROBES if not any(s in one for s in tokenizer.spelled_specials)]
    other = [text for text in texts if fast.encode(text).ids != tokenizer.tokenize(text)]
    note = f"its tokenizer returns other ids for texts such as {other[0]!r:.60}" if other else None
    if len(other) > 1:
        return f"no tokenizer is written, since {note}"
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    fields["clean_up_tokenization_spaces"] = False
    fast.save(os.fspath(target / "tokenizer.json"))
    write_durably(target / "tokenizer_config.json", _json(fields))
    return note


def special_ids(
    tokenizer: TextTokenizer, vocabulary: int, architecture: str = "gpt"
) -> dict[str, int | list[int] | None]:
    """Return the config.json fields of the special ids that are smaller than `vocabulary`.

    A missing begin or end token is written as None, because families have defaults for both.
    """

    def inside(number: int | None) -> int | None:
        return None if number is None or number >= vocabulary else number

    ends = sorted(number for number in tokenizer.ends if number < vocabulary)
    found: dict[str, int | list[int] | None] = {
        "bos_token_id": inside(tokenizer.bos),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    if inside(tokenizer.pad) is not None:
        found["pad_token_id"] = tokenizer.pad
    if architecture == "t5":
        found["decoder_start_token_id"] = inside(tokenizer.bos)
    return found


def write_generation_config(target: Path, ids: dict[str, int | list[int] | None]) -> None:
    """Write generation_config.json with special ids."""
    fields = {name: value for name, value in ids.items() if value is not None}
    write_durably(target / GENERATION_NAME, _json(fields))


def _json(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
