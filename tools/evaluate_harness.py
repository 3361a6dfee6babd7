"""Run tasks of EleutherAI's evaluation harness (lm_eval) on a trained model, in any layout.

    pip install 'megatron-lattice[eval]'
    torchrun --nproc-per-node 2 tools/evaluate_harness.py --load-hf DIRECTORY \
        --tensor-model-parallel-size 2 --tasks hellaswag,arc_easy --limit 200

--include-path names a folder with your task files. The harness computes the scores; it executes
code of a model's or a task's repository only if its own settings allow that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.optional_imports import require
from megatron.inference.evaluation import PURPOSE, harness_model
from megatron.inference.session import open_session
from megatron.resilience.failure import failures_reported
from megatron.resilience.status import RunStatus
from megatron.training.launch.printing import is_rank_0
from megatron.training.setup.distributed import shut_down
from pretrain_gpt import model_provider


@dataclass(frozen=True, kw_only=True)
class HarnessFlags:
    """Evaluation harness."""

    tasks: str
    """Names, joined by commas."""
    include_path: Path | None = None
    """Folder with task files of your own."""
    num_fewshot: int | None = None
    """Examples before each question."""
    limit: int | None = None
    """Questions of each task, from the first."""
    output: Path | None = None
    """File for the results, in JSON."""

    def __post_init__(self) -> None:
        """Raise early if the library is missing; --help works without it."""
        require("lm_eval", purpose=PURPOSE)


def main() -> None:
    """Load the model, run the tasks, print the scores."""
    status = RunStatus.of_this_process()
    with failures_reported(status):
        session = open_session(model_provider, HarnessFlags)
        harness = require("lm_eval", purpose=PURPOSE)
        tasks = require("lm_eval.tasks", purpose=PURPOSE)
        options = session.options
        folder = None if options.include_path is None else str(options.include_path)
        found = harness.simple_evaluate(
            model=harness_model(session, batch_size=session.run.schedule.micro_batch_size),
            tasks=options.tasks.split(","),
            task_manager=tasks.TaskManager(include_path=folder),
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            log_samples=False,
            bootstrap_iters=0,
        )
        if is_rank_0():
            report = {"results": found["results"], "versions": found["versions"]}
            text = json.dumps(report, indent=2, default=str)
            print(text, flush=True)
            if options.output is not None:
                options.output.write_text(text + "\n")
        shut_down()


if __name__ == "__main__":
    main()
