"""Resolved settings of a command line, for tests that plan it."""

import shlex

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolved import ResolvedRun, resolve_vocabulary
from megatron.training.rules import resolve_and_check

WITHOUT_A_RUN = {"train_iters": 10, "lr": 1e-3, "mock_data": True}


def run_of(words: str, world_size: int) -> ResolvedRun:
    """Return the settings of `pretrain_gpt.py WORDS` on so many ranks."""
    command = parse_command_line(shlex.split(words), args_defaults=WITHOUT_A_RUN)
    run = resolve_and_check(lambda: command, lambda _: world_size)
    return resolve_vocabulary(run, build_tokenizer(run.namespace()).vocab_size)
