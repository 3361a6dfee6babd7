"""Every key that DeepSpeed takes acts, has no effect and says why, or is refused with what to use
instead. The names, types and defaults are those of DeepSpeed 0.19.8."""

import functools
import json
import math
from typing import Any

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron_lattice.deepspeed.reading import collect, read_settings
from tests.harness.pool import REPOSITORY

FIXTURES = REPOSITORY / "tests/fixtures/compatibility"
ANOTHER: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "int": (1, 2),
    "float": (0.5, 0.25),
    "str": ("fp32", "bf16", "bfloat16", "cpu", "Adam", "WarmupLR", "sum", "liger", "Ignore"),
    "list": (["Linear"],),
    "object": ({"enabled": True},),
}
"""Values to try of each type; one of them is another one than the default, and legal."""


def rows(name: str) -> list[list[str]]:
    lines = (FIXTURES / name).read_text().splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


KEYS = [(path, kind, json.loads(default)) for path, kind, default in rows("deepspeed_keys.tsv")]


def document_with(path: str, value: object) -> dict[str, Any]:
    """Return a configuration that has one key, and the type that it needs beside it."""
    found: dict[str, Any] = {}
    *sections, name = path.split(".")
    place = functools.reduce(lambda at, section: at.setdefault(section, {}), sections, found)
    place[name] = value
    if sections in (["optimizer"], ["scheduler"]):
        place.setdefault("type", {"optimizer": "AdamW", "scheduler": "WarmupLR"}[sections[0]])
    if sections == ["zero_optimization", "offload_param"]:
        found["zero_optimization"]["stage"] = 3
    return found


@pytest.mark.parametrize(("path", "kind", "default"), KEYS)
def test_a_key_at_its_default_is_accepted(path, kind, default):
    if path.endswith(".type") or ".zenflow." in path:
        return  # a section has a type; the section zenflow is on where it is there
    assert not collect(document_with(path, default))[1]


@pytest.mark.parametrize(("path", "kind", "default"), KEYS)
def test_a_key_acts_or_says_why_not_or_is_refused_with_what_to_use(path, kind, default):
    answers = []
    of_params = {"optimizer.params": {"lr": 0.1}, "scheduler.params": {"warmup_num_steps": 1}}
    for value in [of_params[path]] if path in of_params else ANOTHER[kind]:
        if value == default:
            continue
        read, problems = collect(document_with(path, value))
        for problem in problems:
            assert "unknown key" not in str(problem), problem
            if " is not supported" in problem.found:
                answers.append(problem.fix)
        if not problems:
            answers += [*read.without_effect.values(), *read.sections]
            answers += [p for p in read.given if p.startswith(path.rpartition(".")[0])]
    assert any(answers), path


@pytest.mark.parametrize(
    ("document", "wanted"),
    [
        ({"steps_per_print": math.inf}, None),  # as Accelerate writes it
        ({"steps_per_print": 7}, 7),
    ],
)
def test_progress_is_printed_never_where_the_period_is_infinite(document, wanted):
    assert read_settings(document)["steps_per_print"] == wanted
    assert read_settings(json.loads(json.dumps(document)))["steps_per_print"] == wanted


def test_bf16_needs_no_loss_scale_and_says_so():
    section = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    with pytest.raises(ConfigError) as caught:
        read_settings({"bf16": section})
    fixes = {problem.fix for problem in caught.value.problems}
    assert fixes == {"drop it: bf16 has the range of fp32 and needs no loss scale"}
