"""Errors that a caller of an engine sees name what that caller writes, not flags of a script."""

import inspect
import re
import shutil

import pytest
from torch import nn

from megatron.core.foundation.errors import MegatronError, NumericsError
from megatron_lattice import deepspeed
from megatron_lattice.deepspeed.advice import _WORDS, in_words_of_the_engine
from megatron_lattice.deepspeed.reading import key_at

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def engine_of(model, **more):
    return deepspeed.initialize(model=model, config=CONFIG | more)[0]


@pytest.fixture
def saved(tmp_path):
    """Return the directory of a checkpoint of a layer 4 to 4."""
    engine_of(nn.Linear(4, 4)).save_checkpoint(str(tmp_path), tag="first")
    return tmp_path


def damage(directory):
    (directory / "first" / "__0_0.safetensors").write_bytes(b"short")


@pytest.mark.parametrize(
    ("model", "spoil"),
    [
        (nn.Sequential(nn.Linear(4, 4)), lambda directory: None),  # other names
        (nn.Linear(4, 5), lambda directory: None),
        (nn.Linear(4, 4), damage),
        (nn.Linear(4, 4), lambda directory: shutil.rmtree(directory / "first")),
    ],
)
def test_no_error_of_a_load_names_a_flag_of_a_script(saved, model, spoil):
    spoil(saved)
    with pytest.raises(MegatronError) as caught:
        engine_of(model).load_checkpoint(str(saved))
    assert not re.search(r"--[a-z]", str(caught.value)), caught.value
    arguments = inspect.signature(deepspeed.DeepSpeedEngine.load_checkpoint).parameters
    assert all(flag.partition("=")[0] in arguments for flag in caught.value.flags)


def test_an_argument_that_the_error_names_ends_it(saved):
    """The weights of another module are loaded where the message says how."""
    with pytest.raises(MegatronError, match="load_module_strict") as caught:
        engine_of(nn.Sequential(nn.Linear(4, 4))).load_checkpoint(str(saved))
    said = dict(flag.split("=") for flag in caught.value.flags if "=" in flag)
    for options in ({"load_module_strict": False}, {name: v == "True" for name, v in said.items()}):
        engine = engine_of(nn.Sequential(nn.Linear(4, 4)))
        try:
            engine.load_checkpoint(str(saved), **{"load_module_strict": False} | options)
        except MegatronError as error:
            raise AssertionError(f"{options}: {error}") from error


def test_every_word_is_a_key_of_the_file_or_an_argument():
    methods = (deepspeed.DeepSpeedEngine.load_checkpoint, deepspeed.DeepSpeedEngine.save_checkpoint)
    arguments = {name for method in methods for name in inspect.signature(method).parameters}
    for word in _WORDS.values():
        name = word.partition("=")[0]
        if name not in arguments and ".params." not in name:
            assert key_at(name), word


def test_a_fix_with_a_flag_that_an_engine_lacks_is_left_out():
    error = NumericsError(
        "a gradient is not finite.",
        flags=["--no-check-for-nan-in-loss-and-grad", "--bf16"],
        fix="lower --lr",
    )
    found = in_words_of_the_engine(error)
    assert type(found) is NumericsError and found.found == error.found
    assert (found.flags, found.fix) == (("bf16.enabled",), "lower optimizer.params.lr")
    other = NumericsError("as above.", fix="use --use-megatron-fsdp, which can")
    assert in_words_of_the_engine(other).fix == ""
