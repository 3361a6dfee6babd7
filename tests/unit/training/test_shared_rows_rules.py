"""Ranks that share rows (--hybrid-context-parallel): a flag is equal to one process, or refused."""

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.config.experts import ExpertConfig
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.run import all_flags
from megatron.training.rules import resolve_and_check
from tests.parity.random_layouts.cases import draw_cases

SHARED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --lr 1e-3 --train-iters 10 --mock-data --hybrid-context-parallel --num-experts 4"
    " --max-seqlen-per-dp-cp-rank 32 --calculate-per-token-loss"
)
OFF = {"--hidden-dropout": ["0"], "--attention-dropout": ["0"], "--transformer-impl": ["local"]}
"""Given unless the flag itself is tried."""
NEEDED = {
    "--dsa-indexer-loss-coeff": "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10"
    " --position-embedding-type rope --experimental-attention-variant dsa --dsa-indexer-topk 3"
    " --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --qk-pos-emb-head-dim 8",
    "--lora-dropout": "--lora-rank 4",
    "--moe-pad-expert-input-to-capacity": "--moe-expert-capacity-factor 1",
}
OF_LIBRARIES = {"moe_flex_dispatcher_backend", "moe_enable_deepep", "moe_flex_dispatcher_num_sms",
                "moe_deepep_num_sms", "moe_hybridep_num_sms"}  # fmt: skip
"""Act where DeepEP is installed."""


def problems(given):
    words = [*SHARED.split(), *(word for flag, values in given.items() for word in (flag, *values))]
    try:
        resolve_and_check(lambda: parse_command_line(words), lambda config: 2)
    except ConfigError as error:
        return error.problems
    return ()


def declared():
    """Yield (flag, its words) for each value that is said to depend on the micro batch."""
    for spec in all_flags().values():
        why = spec.metadata.per_micro_batch
        if spec.flag == "--transformer-impl":
            continue  # local layers stand for a library that is not installed
        if why and not isinstance(why, str):
            yield from ((spec.flag, [str(value)]) for value in why)
        elif why:
            yield spec.flag, [] if spec.is_switch else [str((*spec.choices, "0.1")[0])]


def test_without_such_flags_rows_can_be_shared():
    assert not problems(OFF)


@pytest.mark.parametrize(("flag", "values"), [*declared()], ids=str)
def test_a_flag_that_depends_on_the_micro_batch_is_refused_and_the_advice_helps(flag, values):
    given = {**OFF, flag: values, "--seed": ["1", *NEEDED.get(flag, "").split()]}
    (found,) = (p for p in problems(given) if p.found.startswith("--hybrid") and flag in p.found)
    advice, *words = found.fix.split()
    del given[flag]
    assert (advice, words[0]) in {("use", flag), ("drop", flag)}
    if advice == "use":
        given[flag] = words[1:]
    assert not [p for p in problems(given) if flag in p.flags]


def test_each_flag_of_experts_is_drawn_with_shared_rows_or_refused_with_them():
    having = ("hybrid-context-parallel", "num-experts")
    cases = [case for cases in draw_cases(1, 400, having=having) for case in cases]
    drawn = {name.replace("-", "_") for case in cases for name in case.settings}
    refused = {s.name for s in all_flags().values() if isinstance(s.metadata.per_micro_batch, str)
               and s.metadata.per_micro_batch}  # fmt: skip
    known = {s.name for s in all_flags().values() if s.field in ExpertConfig.__dataclass_fields__}
    assert known - drawn - refused - OF_LIBRARIES == set()
