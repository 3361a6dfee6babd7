"""The hook that saves: which failures a run survives."""

import errno
import os
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing import writer as writer_module
from megatron.core.foundation.errors import CheckpointError
from megatron.resilience.status import RunStatus
from megatron.training.hooks.save import SaveCheckpoints
from megatron.training.run.state import StepResult, StopReason, TrainState
from tests.unit.dist_checkpointing.runs import TinyModel, checkpointer

STEP = StepResult(
    losses={},
    grad_norm=None,
    num_zeros=None,
    learning_rate=0.0,
    decoupled_learning_rate=None,
    loss_scale=1.0,
    num_samples=1,
    num_microbatches=1,
    was_skipped=False,
)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("allowed", "failing", "kept", "survived", "ends_at"),
    [
        (0, {10, 20}, [], 0, 10),
        (2, {10, 20}, [30, 40], 2, None),
        (1, {10, 20}, [], 1, 20),
        (1, {10, 30}, [20, 40], 2, None),  # not in a row
        (9, {30, 40}, [10, 20], 2, 40),  # the last one must succeed
    ],
)
def test_a_run_survives_as_many_failed_saves_in_a_row_as_allowed(
    tmp_path: Path, monkeypatch, capsys, allowed, failing, kept, survived, ends_at, is_async
) -> None:
    saving = [0]
    honest = writer_module.write_shards

    def write(*arguments, **options):
        if saving[0] in failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(*arguments, **options)

    monkeypatch.setattr(writer_module, "write_shards", write)
    saver, status = checkpointer(tmp_path, TinyModel(1.0), async_save=is_async), RunStatus()
    hook = SaveCheckpoints(saver, 10, status, allowed_failures=allowed)
    state = hook.before_training(TrainState())
    ended_at, message = None, "ENOSPC"
    try:
        for iteration in range(1, 41):
            state = TrainState(iteration=iteration)
            if iteration % 10 == 0:
                saving[0] = iteration
            state = hook.after_step(state, STEP)
            while saver.has_save_in_flight:
                hook.after_step(TrainState(iteration=iteration + 1), STEP)
        hook.after_training(state, StopReason.FINISHED)
    except CheckpointError as error:
        ended_at, message = saving[0], str(error)
    assert ended_at == ends_at
    assert "ENOSPC" in message
    found = [f.iteration for f in commit.list_checkpoints(tmp_path).checkpoints]
    assert sorted(found) == kept
    assert status.last_good_checkpoint == (kept[-1] if kept else None)
    assert capsys.readouterr().out.count("training continues") == survived
    saver.close()
