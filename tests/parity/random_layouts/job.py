"""One rank of a case: train as the command line says, and report all that must not differ."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.foundation.errors import MegatronError
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from pretrain_gpt import forward_step
from tests.parity.training_case import RankReport, named_parameters
from tests.parity.training_run import train_with_flags


@dataclass
class RankOutcome:
    """What one rank of a case says."""

    refusal: str = ""
    """The message, if the command line was refused."""
    is_helpful: bool = True
    """Whether each problem of the refusal comes with a fix."""
    report: RankReport | None = None
    log: str = ""
    """What was printed."""
    scalars: list[dict[str, Any]] = field(default_factory=list)
    """The lines of --metrics-jsonl, on the last rank."""


def run_rank(groups: ProcessGroupCollection, words: list[str], metrics: str) -> RankOutcome:
    """Train, and return this rank's part of the weights and of the log.

    Args:
        groups: those of the harness, in place of which the flags' own ones are made.
        metrics: path of a file that does not exist yet.
    """
    parallel_state.destroy_model_parallel()
    chunks: dict[int, Any] = {}

    def stepping(iterator: Any, model: Any) -> Any:
        chunks[id(model)] = model
        return forward_step(iterator, model)

    try:
        log = train_with_flags(groups, [*words, "--metrics-jsonl", metrics], stepping)
    except MegatronError as error:
        if parallel_state.model_parallel_is_initialized():
            raise
        problems = error.problems or (error,)
        return RankOutcome(refusal=str(error), is_helpful=all(p.fix for p in problems))
    path = Path(metrics)
    scalars = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return RankOutcome(report=_weights(list(chunks.values())), log=log, scalars=scalars)


def refusal_of(groups: ProcessGroupCollection, words: list[str], metrics: str) -> str:
    """Train, and return the message if the command line was refused instead, or nothing."""
    return run_rank(groups, words, metrics).refusal


def _weights(chunks: list[Any]) -> RankReport:
    current = ProcessGroupCollection.current()
    ranks = (group.rank() for group in (current.tp, current.expt_tp, current.dp))
    report = RankReport(*ranks, [0.0], [], {}, {}, {}, {})
    for name, _, parameter in _parameters(chunks):
        meta = get_param_meta(parameter)
        report.metas[name] = (meta.split_dim, meta.stride, meta.is_expert)
    for chunk in chunks:
        with chunk.summon_full_params():
            for name, _, parameter in _parameters([chunk]):
                report.weights[name] = parameter.detach().clone()
    return report


def _parameters(chunks: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what `named_parameters` does; a half-precision model is a module around one."""
    for name, chunk, parameter in named_parameters(chunks):
        yield name.removeprefix("module."), chunk, parameter
