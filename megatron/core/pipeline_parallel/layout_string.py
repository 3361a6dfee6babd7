"""Parser of pipeline layout strings such as `Et*3|(tt|)*29,m|L`.

Grammar (spaces and commas are skipped):

    layout  = { item }
    item    = ( letter | "|" | "(" layout ")" ) [ "*" number ]
    letter  = "E" | "t" | "m" | "L"
"""

from __future__ import annotations

from megatron.core.foundation.errors import ConfigError, MegatronError

ALPHABET = "EtmL"
_FLAGS = ["--pipeline-model-parallel-layout"]
_MAX_LENGTH = 1_000_000  # a typing error such as (t*9999)*9999 must not fill the memory


def parse_layout(text: str) -> list[str]:
    """Return the letters of each stage; a layout with n `|` has n + 1 stages.

    Raises:
        ConfigError: the text is invalid; the message marks the position of the error.
    """
    parser = _Parser(text)
    expanded = parser.sequence(depth=0)
    if not expanded:
        raise parser.error("the layout is empty", 0)
    return expanded.split("|")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def peek(self) -> str:
        """Return the next character that is not skipped, "" at the end."""
        while self.position < len(self.text) and self.text[self.position] in " ,\t\n":
            self.position += 1
        return self.text[self.position] if self.position < len(self.text) else ""

    def sequence(self, depth: int) -> str:
        parts: list[str] = []
        while (character := self.peek()) and not (character == ")" and depth):
            item = self.item(character, depth)
            parts.append(item * self.repetitions(len(item)))
        return "".join(parts)

    def item(self, character: str, depth: int) -> str:
        start = self.position
        if character in ALPHABET or character == "|":
            self.position += 1
            return character
        if character == "(":
            self.position += 1
            inner = self.sequence(depth + 1)
            if self.peek() != ")":
                raise self.error("this parenthesis is not closed", start)
            self.position += 1
            return inner
        if character == ")":
            raise self.error("this parenthesis was not opened", start)
        if character == "*":
            raise self.error("there is nothing to repeat before this '*'", start)
        raise self.error(f"'{character}' is not a layer", start)

    def repetitions(self, length: int) -> int:
        if self.peek() != "*":
            return 1
        star = self.position
        self.position += 1
        self.peek()
        start = self.position
        while self.position < len(self.text) and self.text[self.position].isascii():
            if not self.text[self.position].isdigit():
                break
            self.position += 1
        digits = self.text[start : self.position]
        if not digits:
            raise self.error("a number must follow this '*'", star)
        if len(digits) > 7 or int(digits) * length > _MAX_LENGTH:
            raise self.error("this repetition is too long for a model", star)
        if self.peek() == "*":
            raise self.error("a repetition cannot be repeated; use parentheses", self.position)
        return int(digits)

    def error(self, message: str, position: int) -> MegatronError:
        visible = self.text.replace("\n", " ").replace("\t", " ")
        return ConfigError(
            f"the pipeline layout cannot be read: {message}.\n  {visible}\n  {' ' * position}^",
            rule="E embedding, t transformer layer, m multi-token prediction, L loss, | between "
            "stages, x*3 or (...)*3 to repeat",
            flags=_FLAGS,
            fix="for example Et*3|(tt|)*2t|tL: five stages of 3, 2, 2, 1 and 1 layers",
        )
