"""Run `pretrain_gpt.py` inside the worker processes of the test harness, without a launcher."""

import contextlib
import io
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.resilience.status import RunStatus
from megatron.training.cli.parser import parse_command_line
from megatron.training.setup.initialize import start_session
from megatron.training.training import PretrainCall, run_session
from pretrain_gpt import datasets_provider, forward_step, model_provider


def train_with_flags(
    groups: ProcessGroupCollection, words: list[str], step: Callable[..., Any] = forward_step
) -> str:
    """Train as `pretrain_gpt.py WORDS` would; `groups` must have the layout of the flags.

    A failure comes as the exception that it is, not as a report and an exit code.

    Args:
        step: stands for the script's forward step.
    Returns:
        what this rank printed.
    """
    # The harness' processes come from a fork server, which their loader workers would too: each
    # would import everything again. A program that a user starts forks them.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
    )
    call = PretrainCall.of(
        (datasets_provider, model_provider, ModelType.encoder_or_decoder, step), {}
    )
    # The harness gives each job a store of its own, in which ranks compare their settings.
    store = dist.PrefixStore("run", dist.distributed_c10d._get_default_store())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        session = start_session(lambda: parse_command_line(words), RunStatus(), store=store)
        run_session(session, call)
    return printed.getvalue()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `--metrics-jsonl` that hold a training loss."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "lm loss" in line]
