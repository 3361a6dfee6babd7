"""What --use-checkpoint-args takes, and what it leaves to the command line."""

from argparse import Namespace

import pytest

from megatron.training.checkpointing import stored_settings
from megatron.training.cli.parser import parse_command_line

STORED = Namespace(
    num_layers=3, hidden_size=48, swiglu=True, tokenizer_type="HuggingFaceTokenizer",
    tokenizer_model="/elsewhere/model", vocab_size=77, lr=0.5,
)  # fmt: skip


@pytest.fixture
def shaped(monkeypatch):
    """Return a function from words to the settings with the checkpoint's shape in them."""
    monkeypatch.setattr(stored_settings, "stored_args", lambda *_, **__: STORED)

    def read(*words: str) -> dict:
        command = parse_command_line(["--load", "x", "--use-checkpoint-args", *words])
        return stored_settings.with_checkpoint_shape(command.config, command.given).flat()

    return read


def test_the_command_line_wins_over_the_checkpoint_also_with_a_default(shaped):
    found = shaped("--num-layers", "5", "--no-swiglu")
    assert (found["num_layers"], found["hidden_size"], found["swiglu"]) == (5, 48, False)


def test_a_tokenizer_is_the_command_lines_or_the_checkpoints_not_a_mixture(shaped):
    assert shaped("--tokenizer-type", "NullTokenizer")["tokenizer_model"] is None
    assert shaped("--tokenizer-type", "NullTokenizer")["vocab_size"] is None
    assert shaped("--tokenizer-model", "mine")["tokenizer_type"] is None


def test_the_classes_are_the_checkpoints_whatever_the_tokenizer_has(shaped, monkeypatch):
    monkeypatch.setattr(STORED, "unpadded_vocab_size", 60, raising=False)
    for words in ((), ("--tokenizer-type", "ByteTokenizer")):
        assert shaped(*words)["vocab_size"] == 60
    assert shaped("--vocab-size", "90")["vocab_size"] == 90


def test_special_tokens_are_written_as_in_the_run_that_the_tokenizer_is_from(shaped, monkeypatch):
    name = "tokenizer_hf_no_include_special_tokens"
    monkeypatch.setattr(STORED, name, True, raising=False)
    assert shaped()[name] is True
    assert shaped("--tokenizer-model", "mine")[name] is False


def test_files_that_a_checkpoint_names_are_taken_on_request_only(shaped):
    found = shaped()
    assert found["tokenizer_type"] == "HuggingFaceTokenizer"
    assert (found["tokenizer_model"], found["vocab_size"]) == (None, 77)
    asked = shaped("--use-tokenizer-model-from-checkpoint-args")
    assert asked["tokenizer_model"] == "/elsewhere/model"
    refused = shaped("--no-use-tokenizer-model-from-checkpoint-args")
    assert refused["tokenizer_model"] is None
