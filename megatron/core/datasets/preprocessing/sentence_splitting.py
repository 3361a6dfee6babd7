"""Cutting a text into sentences with NLTK's Punkt model (--split-sentences)."""

from __future__ import annotations

from typing import Any

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.optional_imports import require


class SentenceSplitter:
    """Split texts of one language; picklable, the model is loaded on first use in each process.

    Args:
        language: name of NLTK's model, for example "english".
        keep_newlines: leave the white space after a sentence with it instead of dropping it.
    """

    def __init__(self, language: str, *, keep_newlines: bool = False) -> None:
        self.language = language
        self.keep_newlines = keep_newlines
        self._model: Any = None

    def load(self) -> None:
        """Load the model now, so that a missing one is reported before any work is done.

        Raises:
            MissingExtraError: NLTK is not installed.
            DataError: NLTK has no data for the language.
        """
        punkt = require("nltk.tokenize.punkt", purpose="--split-sentences")
        try:
            self._model = punkt.PunktTokenizer(self.language)
        except LookupError as error:
            raise DataError(
                f"NLTK has no sentence model for {self.language!r} on this machine.",
                rule="the model 'punkt_tab' is data that NLTK downloads",
                flags=["--split-sentences", "--lang"],
                fix="python -m nltk.downloader punkt_tab",
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def __call__(self, text: str) -> list[str]:
        """Return the sentences of a text, in order."""
        if self._model is None:
            self.load()
        begins = [begin for begin, _ in self._model.span_tokenize(text)]
        ends = [end for _, end in self._model.span_tokenize(text)]
        if self.keep_newlines and begins:
            begins[0], ends = 0, [*begins[1:], len(text)]
        return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]
