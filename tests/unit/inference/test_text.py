"""Text that comes in pieces is the text that would have come at once."""

import json

import pytest

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.settings.command_line import read_command_line
from megatron.core.tokenizers.null_and_byte import ByteTokenizer
from megatron.inference.engine import Token
from megatron.inference.text import Continuation, TextStream, take
from tools.generate import GenerateFlags, described, prompts_of


def pieces(text, prompt="ab", stop=()):
    stream = TextStream(ByteTokenizer(), prompt.encode(), stop)
    found = [stream.push(token) for token in text.encode() if not stream.stopped]
    return [*found, stream.finish()]


def test_pieces_end_at_whole_characters():
    text = "naïve 中文 🙂 end"
    found = pieces(text)
    assert "".join(found) == text
    assert all(piece in text and "\ufffd" not in piece for piece in found)


def test_an_unfinished_character_is_shown_at_the_end():
    stream = TextStream(ByteTokenizer(), b"a")
    assert stream.push("é".encode()[0]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("stop", "shown"),
    [(["END"], "one two "), (["two", "END"], "one "), (["EXD"], "one two END x"),
     (["x"], "one two END ")],
)  # fmt: skip
def test_a_stop_word_ends_the_text_and_no_part_of_it_is_shown(stop, shown):
    assert "".join(pieces("one two END x", stop=stop)) == shown


def test_what_may_begin_a_stop_word_is_held_back():
    stream = TextStream(ByteTokenizer(), b"a", ["\n\nHuman"])
    assert [stream.push(token) for token in b"x\n\nHut"] == ["x", "", "", "", "", "\n\nHut"]


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [("length", (), ("hi!", "length", 3)), ("stop", (), ("hi", "stop", 2)),
     ("length", ("!",), ("hi", "stop", 3)), ("length", ("i",), ("h", "stop", 2))],
)  # fmt: skip
def test_a_continuation_knows_why_it_ended(reason, stop, expected):
    stream, result = TextStream(ByteTokenizer(), b"a", stop), Continuation()
    for place, token in enumerate(b"hi!"):
        if not stream.stopped:
            take(Token(1, token, reason if place == 2 else None), stream, result)
    assert (result.text, result.finish_reason, len(result.tokens)) == expected


def options(*flags):
    return read_command_line(GenerateFlags, flags)


def test_prompts_come_from_flags_and_from_lines(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('plain line\n\n{"prompt": "in JSON", "id": 3}\n')
    given = options("--prompt", "first", "--prompts-file", str(file))
    assert prompts_of(given) == ["first", "plain line", "in JSON"]


def test_missing_and_broken_prompts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no prompt"):
        prompts_of(options())
    file = tmp_path / "prompts"
    file.write_text('{"text": "no prompt"}\n')
    with pytest.raises(DataError, match="line 1 begins like a JSON object"):
        prompts_of(options("--prompts-file", str(file)))
    with pytest.raises(DataError, match="cannot be read"):
        prompts_of(options("--prompts-file", str(tmp_path / "missing")))


def test_a_line_of_json_tells_all():
    found = Continuation(" be", [5], "stop", [[(5, -0.5), (5, -0.5), (7, -1.5)]])
    shown = json.loads(described("to", found))
    assert shown["text"] == " be" and shown["finish_reason"] == "stop"
    assert shown["log_probs"] == [-0.5]
    assert shown["top_log_probs"] == [{"5": -0.5, "7": -1.5}]
