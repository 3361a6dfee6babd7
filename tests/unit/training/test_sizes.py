"""No whole number on the command line leads to anything but a run or a clean message."""

import itertools

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.training.cli.parser import ParsedCommand, parse_command_line
from megatron.training.config.run import RunConfig, all_flags
from megatron.training.rules import resolve_and_check
from megatron.training.rules.support import Support, support_of

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2"
    " --global-batch-size 32 --lr 1e-3 --train-iters 10 --mock-data --save run"
)
BASES = {
    "dense": "",
    "experts": "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --bf16"
    " --moe-router-num-groups 2 --moe-router-group-topk 1 --rampup-batch-size 16 16 64"
    " --use-distributed-optimizer",
    "stages": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    " --multi-latent-attention --position-embedding-type rope --context-parallel-size 2"
    " --mtp-num-layers 1 --recompute-granularity full --recompute-method block"
    " --recompute-num-layers 1 --tensor-model-parallel-size 2 --sequence-parallel",
}
VALUES = (0, -1, 1, 2**31 - 1, 2**53, 10**30)
NUMBERS = [
    spec
    for spec in all_flags().values()
    if spec.element is int
    and not (spec.choices or spec.metadata.parse)
    and support_of(spec)[0] in (Support.ACTS, Support.ONLY_ON_GPU)
]


def check(words: list[str]) -> list[str]:
    """Return the problems of a command line of 8 ranks."""
    try:
        resolve_and_check(lambda: parse_command_line(words), lambda config: 8)
    except ConfigError as error:
        return [problem.describe() for problem in error.problems]
    return []


@pytest.mark.parametrize("base", BASES)
def test_every_value_of_every_whole_number_is_taken_or_refused(base):
    words = [*SMALL.split(), *BASES[base].split()]
    assert check(words) == []
    flat = parse_command_line(words).config.flat()
    for spec, value in itertools.product(NUMBERS, VALUES):
        count = {None: None, "+": 1, "*": 1}.get(spec.metadata.nargs, spec.metadata.nargs)
        given = value if count is None else [value] * count
        command = ParsedCommand(config=RunConfig.from_values({**flat, spec.name: given}))
        try:
            resolve_and_check(lambda command=command: command, lambda config: 8)
            found = ""
        except ConfigError as error:
            found = str(error)
        except Exception as error:
            raise AssertionError(f"{base} {spec.flag} {given}") from error
        assert spec.flag in found or 0 <= value <= 2**53, (spec.flag, given)


def test_sizes_out_of_range_are_told_together_with_broken_rules():
    found = check([*SMALL.split(), *["--expert-model-parallel-size", "0", "--num-layers", "-4"],
                   "--max-position-embeddings", "16"])  # fmt: skip
    assert len(found) == 3
    assert "--num-layers -4.\n  rule:  it is a whole number from 1 to 100,000" in found[0]
    assert "fix:   use --expert-model-parallel-size 1" in found[1]
    assert "--seq-length 32 with --max-position-embeddings 16" in found[2]


def test_numbers_that_are_not_finite_are_refused():
    flags = [
        s.flag for s in all_flags().values() if s.element is float and s.metadata.parse is None
    ]
    for value in ("nan", "inf", "-inf"):
        found = check([*SMALL.split(), *(f"{flag}={value}" for flag in flags)])
        assert len(found) == len(flags)
        assert all(f"{flag} '{value}'" in text for flag, text in zip(flags, found, strict=True))


@pytest.mark.parametrize("flag", ["--no-rope-freq", "--moe-layer-freq", "--window-attn-skip-freq"])
def test_a_pattern_of_layers_begins_at_every_layer(flag):
    for value in ("0", str(10**30), "-1"):
        assert flag in check([*SMALL.split(), flag, value])[0]
    assert "--window-size" in check([*SMALL.split(), "--window-size", f"{10**30},0"])[0]
