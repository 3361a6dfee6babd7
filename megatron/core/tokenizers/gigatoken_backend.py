"""Fast conversion of many texts to one flat array of ids, with gigatoken where possible.

gigatoken (MIT) cuts text with vector instructions and caches the ids of words; it computes the ids
of Hugging Face's tokenizers, tiktoken and SentencePiece many times faster. It is optional and never
trusted: an engine is used only if its ids equal the ids of the tokenizer's own library on texts
chosen to reveal differences, and preprocessing continues to compare them during the work.

No torch import.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from itertools import groupby
from typing import Any

import numpy as np

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.foundation.optional_imports import has, require
from megatron.core.tokenizers.base import TextTokenizer

_SHORT = 512
"""Characters up to which texts are encoded together, in rows as wide as the longest of them."""
_TOGETHER = 256
"""Most texts in a call: bounds the rows at 2 MiB, even at four tokens per character."""
_LONGEST_COMPARED = 2048
"""Characters of the longest text that is compared during the work."""


class TokenizerBackend(Enum):
    """Values of --tokenizer-backend."""

    auto = "auto"
    """gigatoken if it is installed and its ids are equal, else the tokenizer's own library."""
    library = "library"
    """The tokenizer's own library."""
    gigatoken = "gigatoken"
    """gigatoken, or an error with the reason."""


class GigatokenEngine:
    """gigatoken, one text after the other on this thread.

    In each batch it compares the ids of the first text of at most `_LONGEST_COMPARED` characters
    with the ids of the tokenizer's own library.
    """

    def __init__(self, tokenizer: TextTokenizer, model: Any) -> None:
        self._model = model
        # Each call for many texts initialises gigatoken's SentencePiece models again, for 1 ms.
        self._takes_many = type(model.backend).__name__ == "BPETokenizer"
        self._tokenizer = tokenizer
        spelled = map(re.escape, tokenizer.spelled_specials)
        self._left_to_library = (
            re.compile("|".join(spelled)) if tokenizer.spelled_specials else None
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker loads the model again.
        return _load_gigatoken, (self._tokenizer,)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids uint32 [total], counts int64 [texts]), see `TextTokenizer.encode_flat`.

        Raises:
            DataError: gigatoken gave other ids.
        """
        sample = next((text for text in texts if 0 < len(text) <= _LONGEST_COMPARED), None)
        problem = difference(self, self._tokenizer, [sample]) if sample else ""
        if problem:
            raise DataError(
                f"{problem}.",
                rule="a fast backend must give the ids of the tokenizer's own library; the output "
                "of this run may hold such ids",
                flags=["--tokenizer-backend"],
                fix="--tokenizer-backend library --restart",
            )
        return self.encode_unchecked(texts)

    def encode_unchecked(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode parts of texts without a comparison."""
        first_id = self._tokenizer.first_text_id
        has_specials = bool(
            self._left_to_library is not None and self._left_to_library.search("".join(texts))
        )
        if not (has_specials or first_id):
            return self._encode_plain(texts)
        encode = self._model.backend.encode
        arrays = [encode(text) for text in texts]
        if first_id:
            arrays = [ids + np.uint32(first_id) for ids in arrays]
        if has_specials and self._left_to_library is not None:
            for at, text in enumerate(texts):
                if self._left_to_library.search(text):
                    arrays[at] = np.array(self._tokenizer.tokenize_part(text), np.uint32)
        counts = np.fromiter(map(len, arrays), np.int64, len(arrays))
        return np.concatenate(arrays) if arrays else np.empty(0, np.uint32), counts

    def _encode_plain(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode adjacent short texts in one call: a call costs as much as 15 words."""
        encode = self._model.backend.encode
        arrays, counts = [np.empty(0, np.uint32)], [np.empty(0, np.int64)]
        longest = _SHORT if self._takes_many else -1
        for are_short, run in groupby(texts, key=lambda text: len(text) <= longest):
            together = [*run]
            if not are_short or len(together) < 4:
                found = [encode(text) for text in together]
                arrays += found
                counts.append(np.fromiter(map(len, found), np.int64, len(found)))
                continue
            for at in range(0, len(together), _TOGETHER):
                texts_of_call = together[at : at + _TOGETHER]
                padded, lengths = self._model.encode_batch_padded(texts_of_call, 0, parallel=False)
                arrays.append(padded[np.arange(padded.shape[1]) < lengths[:, None]])
                counts.append(lengths)
        return np.concatenate(arrays), np.concatenate(counts)


PROBES = (
    "",
    " ",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces   three\t\ttabs\n\n\nlines \r\n windows\r\n \n trailing   ",
    "it's we'll I'd they've you're I'm don't IT'S WE'LL can 't 'quoted' ''",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 10e-5 ½ ² ٣٤ 四五",
    "snake_case camelCase SCREAMING_CASE kebab-case a+=b; x->y::z != (1<<2) && ~c || [d]{e}",
    "https://example.org/a/b?c=d&e=%20#f me@example.org C:\\dir\\file",
    "Zażółć gęślą jaźń. Ñandú, façade, naïve, Straße, İstanbul, ΣΊΣΥΦΟΣ Привет, мир!",
    "e\u0301 vs \u00e9, o\u0308\u0323, \u1e9b\u0323, \ufb01 ligature, \uff21\uff22 wide, a\u00adb",
    "漢字とかな交じり文。中文没有空格。한국어 띄어쓰기. ภาษาไทยไม่มีวรรค हिन्दी العربية עברית",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪 ✈️ ☃ 🏳️‍🌈 \U0001f9ff \U00020000 \U0010ffff",
    "\u00a0nbsp\u2003em\u200bzero\u2028line\u2029paragraph\u3000wide\ufeffmark\x85next\x0bvt\x0cff",
    "\x00\x01\x02 \x1b[31m\x7f \x80\x9f \ufffd \ufffe \uffff",
    "<|endoftext|> <s> </s> <unk> <pad> [INST] <|im_start|> <0x0A> \u2581 ▁▁ <extra_id_0>",
    "a" * 300 + " " * 300 + "\n" * 50 + "=" * 200 + "ab" * 150 + "9" * 100,
    "def f(x):\n    if x:\n\treturn {'k': [1, 2]}  # done\n\n\nclass A(B):\n        pass\n",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis Llanfairpwll",
    "\n",
    "\n\nstart",
    "end\n",
    " leading",
    "\u0130\u0131 \u01c5 \u02b0 \u0300 \u2160 \u2460 \u4e00a1 a\u4e001 \U0001d54f",
)
"""Texts that reveal differences of similar tokenizers: white space, contractions, digits, scripts,
composed and joined characters, controls, spellings of special tokens, long runs."""


def make_engine(
    tokenizer: TextTokenizer, backend: TokenizerBackend
) -> tuple[TextTokenizer | GigatokenEngine, str]:
    """Choose the engine that encodes the texts of a tokenizer.

    Returns:
        (gigatoken or the tokenizer itself, one line with the choice and the reason).
    Raises:
        ConfigError: gigatoken is required and cannot be used.
    """
    if backend is TokenizerBackend.library:
        return tokenizer, "tokenizer library, chosen by --tokenizer-backend"
    reason, engine = "", None
    if not has("gigatoken"):
        reason = "gigatoken is not installed (pip install 'megatron-lattice[fast]')"
    else:
        try:
            engine = _load_gigatoken(tokenizer)
            if engine is None:
                reason = f"gigatoken has no counterpart of {type(tokenizer).__name__}"
            else:
                reason = difference(engine, tokenizer, PROBES)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of its Rust code is no Exception
            reason = f"gigatoken refuses this tokenizer: {str(error).splitlines()[0]}"
    if engine is not None and not reason:
        return engine, f"gigatoken, ids equal on {len(PROBES)} probe texts"
    if backend is TokenizerBackend.gigatoken:
        raise ConfigError(
            f"{reason}.",
            rule="a fast backend must give the ids of the tokenizer's own library",
            flags=["--tokenizer-backend"],
            fix="--tokenizer-backend library",
        )
    return tokenizer, f"tokenizer library: {reason}"


def _load_gigatoken(tokenizer: TextTokenizer) -> GigatokenEngine | None:
    library = require("gigatoken", purpose="--tokenizer-backend gigatoken")
    model = tokenizer.load_into_gigatoken(library)
    return None if model is None else GigatokenEngine(tokenizer, model)


def difference(engine: GigatokenEngine, tokenizer: TextTokenizer, texts: Sequence[str]) -> str:
    """Describe the first difference between ids of gigatoken and of the tokenizer; "" if equal."""
    ids, counts = engine.encode_unchecked(texts)
    ends = np.cumsum(counts)
    for text, begin, end in zip(texts, ends - counts, ends, strict=True):
        expected, found = tokenizer.tokenize_part(text), ids[begin:end].tolist()
        if found != expected:
            at = next(
                (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
                min(len(found), len(expected)),
            )
            return (
                f"gigatoken gives other ids than {type(tokenizer).__name__} from token {at} "
                f"of {text[:40]!r}: {found[at : at + 4]} instead of {expected[at : at + 4]}"
            )
    return ""
