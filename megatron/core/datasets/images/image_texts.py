"""Conversations about images: a file of JSON lines, or computed ones.

A line is `{"images": ["a.png"], "messages": [{"role": "user", "content": "<image>\\nWhat is it?"},
{"role": "assistant", "content": "A cat."}]}`. `<image>` in a text, or `{"type": "image"}` in a list
of contents, is the place of the next image; images without a place are put before the first text.
The spelling of LLaVA is read as well: `"image": "a.png"`, `"conversations": [{"from": "human",
"value": ...}, {"from": "gpt", ...}]`. Paths are relative to the folder of the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron.core.datasets.corpus.contents import sampled_digest_of_file
from megatron.core.datasets.images.patches import PatchShape
from megatron.core.datasets.preprocessing.chat_template import ChatTemplate, messages_of
from megatron.core.datasets.preprocessing.documents import BadDocumentError
from megatron.core.foundation.errors import DataError, MegatronError
from megatron.core.foundation.json_text import parse_json
from megatron.core.foundation.optional_imports import require

IMAGE_MARK = "<image>"
"""Marks the place of an image in a text."""


@dataclass(frozen=True)
class Part:
    """A run of tokens, or an image.

    Attributes:
        tokens: empty for an image.
        is_learned: whether these tokens have a loss.
        image: its number in the sample; None for text.
    """

    tokens: tuple[int, ...] = ()
    is_learned: bool = False
    image: int | None = None


class Tokenizer(Protocol):
    """The part of `megatron.core.tokenizers.base.TextTokenizer` that is used here."""

    eod: int | None
    around_a_text: tuple[tuple[int, ...], tuple[int, ...]]

    def tokenize_part(self, text: str) -> list[int]:
        """Return the ids of a part of a text."""

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """The settings that decide the ids."""


class ImageTexts(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def parts(self, number: int) -> list[Part]:
        """Return the text and the images of a sample, in their order."""

    def size(self, number: int, image: int) -> tuple[int, int]:
        """Return height and width of an image, without decoding it."""

    def patches(self, number: int, image: int, shape: PatchShape) -> np.ndarray:
        """Return the patches of an image; see `PatchShape.patches`."""

    def place(self, number: int) -> str:
        """Return where the sample is from, for messages."""

    def identity(self) -> str:
        """Return a digest of the sources of the samples."""


class JsonLines:
    """Files of conversations, one after the other.

    Args:
        template: writes messages; None joins the texts of messages, and ends answers with the
            end-of-document token.
    Raises:
        DataError: a file cannot be read, or is empty.
    """

    def __init__(
        self, paths: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        self.paths, self.tokenizer, self.template = list(paths), tokenizer, template
        self._file_of: list[int] = []
        self._number_of: list[int] = []
        starts, ends = [], []
        for number, path in enumerate(self.paths):
            for line, (begin, end) in enumerate(_lines_of(path), 1):
                self._file_of.append(number)
                self._number_of.append(line)
                starts.append(begin)
                ends.append(end)
        self._starts, self._ends = np.array(starts, np.int64), np.array(ends, np.int64)
        if not starts:
            raise DataError(
                f"{', '.join(self.paths)}: no conversations.",
                rule="each line is a conversation",
                flags=["--data-path", "--train-data-path"],
                fix="write one JSON object in each line",
            )

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, number: int) -> str:
        return f"{self.paths[self._file_of[number]]}, line {self._number_of[number]}"

    def identity(self) -> str:
        digests = [sampled_digest_of_file(path) for path in self.paths]
        return repr((digests, self.tokenizer.unique_identifiers))

    def _document(self, number: int) -> dict[str, Any]:
        with open(self.paths[self._file_of[number]], "rb") as file:
            file.seek(int(self._starts[number]))
            line = file.read(int(self._ends[number] - self._starts[number]))
        try:
            document = parse_json(line.decode("utf-8"))
        except ValueError as error:
            raise self._problem(number, f"not JSON: {error}") from None
        if not isinstance(document, dict):
            raise self._problem(number, f"a {type(document).__name__}, not an object")
        return document

    def _images(self, number: int, document: Mapping[str, Any]) -> list[str]:
        given = document.get("images", document.get("image"))
        names = [] if given is None else [given] if isinstance(given, str) else given
        if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
            raise self._problem(number, "images are no list of paths")
        folder = os.path.dirname(os.path.abspath(self.paths[self._file_of[number]]))
        return [os.path.join(folder, name) for name in names]

    def parts(self, number: int) -> list[Part]:
        document = self._document(number)
        images = self._images(number, document)
        key = "messages" if "messages" in document else "conversations"
        try:
            messages = [_with_marks(message) for message in messages_of(document, key)]
            segments = self._segments(
                _naming_all(messages, len(images)), document.get("tools") or None
            )
        except BadDocumentError as error:
            raise self._problem(number, str(error)) from None
        found: list[Part] = []
        before, _ = self.tokenizer.around_a_text
        if self.template is None and before:
            found.append(Part(before))
        count = 0
        for place, segment in enumerate(segments):
            is_learned = place % 2 == 1
            for piece, text in enumerate(segment.split(IMAGE_MARK)):
                if piece:
                    found.append(Part(image=count))
                    count += 1
                if text:
                    try:
                        tokens = tuple(self.tokenizer.tokenize_part(text))
                    except (ValueError, MegatronError) as error:
                        raise self._problem(number, f"a text of no tokens: {error}") from None
                    found.append(Part(tokens, is_learned))
            eod = self.tokenizer.eod
            if is_learned and self.template is None and eod is not None:
                found.append(Part((eod,), True))
        if count != len(images):
            raise self._problem(number, f"{count} times {IMAGE_MARK}, and {len(images)} images")
        return found

    def _segments(self, messages: list[dict[str, Any]], tools: Any) -> list[str]:
        """Return alternating given and learned texts."""
        if self.template is not None:
            return self.template.segments(messages, tools)
        if tools is not None or any(
            message.get(n) for message in messages for n in ("tool_calls", "function_call")
        ):
            raise BadDocumentError("calls of tools without a chat template")
        segments = [""]
        for message in messages:
            is_answer = message["role"] == "assistant"
            if is_answer != (len(segments) % 2 == 0):
                segments.append("")
            segments[-1] += message["content"]
        return segments

    def size(self, number: int, image: int) -> tuple[int, int]:
        with self._opened(number, image) as opened:
            return opened.height, opened.width

    def patches(self, number: int, image: int, shape: PatchShape) -> np.ndarray:
        with self._opened(number, image) as opened:
            try:
                return shape.patches(opened)
            except (OSError, ValueError) as error:
                raise self._problem(number, f"image {image + 1}: {error}") from None

    def _opened(self, number: int, image: int) -> Any:
        library = require("PIL.Image", purpose="images in samples")
        path = self._images(number, self._document(number))[image]
        try:
            return library.open(path)
        except (OSError, ValueError) as error:
            raise self._problem(number, f"{path} cannot be read as an image: {error}") from None

    def _problem(self, number: int, found: str) -> DataError:
        return DataError(
            f"{self.place(number)}: {found}.",
            rule='a line is {"images": [paths], "messages": [{"role": ..., "content": ...}, ...]},'
            f" and {IMAGE_MARK} in a content marks the place of an image",
            flags=["--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"],
            fix="correct the line, or leave it out",
        )


def _lines_of(path: str) -> list[tuple[int, int]]:
    """Return begin and end of each line that is not blank."""
    found, begin = [], 0
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    found.append((begin, begin + len(line)))
                begin += len(line)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error}.",
            flags=["--data-path", "--train-data-path"],
            fix="name a file of JSON lines",
        ) from None
    return found


def _with_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text, with a mark for each image.

    Raises:
        BadDocumentError: a part of the content is neither text nor image.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": content or ""}
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = IMAGE_MARK if kind == "image" else part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise BadDocumentError("a content that is no text and no image", repr(part)[:80])
        texts.append(text)
    return {**message, "content": "".join(texts)}


def _naming_all(messages: list[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Return the messages with marks for all images; missing marks precede the first question."""
    named = sum(message["content"].count(IMAGE_MARK) for message in messages)
    missing = max(0, num_images - named)
    first = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
    messages[first] = {
        **messages[first],
        "content": IMAGE_MARK * missing + messages[first]["content"],
    }
    return messages


class MockImageTexts:
    """Computed samples: noise of a few sizes, and an answer of random tokens.

    Args:
        vocab_size: number of tokens to draw from, the first of the vocabulary.
        side: side of the smallest image, in pixels.
    """

    num_samples = 2000

    def __init__(self, vocab_size: int, side: int, num_channels: int = 3) -> None:
        self._vocab_size, self._side, self._channels = vocab_size, side, num_channels

    def __len__(self) -> int:
        return self.num_samples

    def place(self, number: int) -> str:
        return f"computed sample {number}"

    def identity(self) -> str:
        return repr((self._vocab_size, self._side, self._channels))

    def parts(self, number: int) -> list[Part]:
        """Return a question, one or two images, and an answer; every fifth sample has no image."""
        random = np.random.default_rng((1, number))
        words = [
            tuple(random.integers(0, self._vocab_size, random.integers(2, 7)).tolist())
            for _ in range(3)
        ]
        images = [Part(image=n) for n in range((0, 1, 1, 2, 1)[number % 5])]
        return [Part(words[0]), *images, Part(words[1]), Part(words[2], True)]

    def size(self, number: int, image: int) -> tuple[int, int]:
        rows, columns = np.random.default_rng((2, number, image)).integers(1, 4, 2).tolist()
        return rows * self._side, columns * self._side

    def patches(self, number: int, image: int, shape: PatchShape) -> np.ndarray:
        _, rows, columns = shape.grid(*self.size(number, image))
        width = self._channels * shape.temporal_size * shape.patch_size**2
        random = np.random.default_rng((3, number, image))
        return random.standard_normal((rows * columns, width)).astype(np.float32)
