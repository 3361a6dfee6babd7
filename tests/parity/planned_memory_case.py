"""What a planner says of the memory of a rank, and what torch's CPU allocator counts in a run."""

import contextlib
import gc
import io
import os
import sys
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megatron.core.transport.work import Work
from megatron.training.setup.traced_rank import ModelScript, RankUnderTest
from pretrain_gpt import forward_step, model_provider
from tests.harness.resolved_run import run_of

SCRIPT = ModelScript(model_provider, forward_step)


@dataclass(frozen=True)
class Counted:
    """Bytes of one rank in its second step."""

    peak: int
    idle: int
    """Between steps."""


def measure(groups: ProcessGroupCollection, words: str) -> Counted | str:
    """Train two steps as `pretrain_gpt.py WORDS`, and return what the allocator has counted."""
    parallel_state.destroy_model_parallel()
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    gc.collect()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        # What oneDNN holds inside a product of fp16 depends on the processor.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        for module in (device, sys.modules[linear_cross_entropy.__module__]):
            stack.enter_context(mock.patch.object(module, "value_on_host", return_value=None))
        stack.enter_context(mock.patch.object(Work, "_resume", _resume_late))
        try:
            run = run_of(words, dist.get_world_size())
        except ConfigError as error:
            return error.problems[0].found if error.problems else error.found
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
            rank = RankUnderTest(run, SCRIPT, None)
            rank.step(None)
            with torch.profiler.record_function(_SECOND):
                rank.step(None)
    return _counted(profile)


_resume = Work._resume


def _resume_late(work: Work[Any], step: Any) -> None:
    """Let gloo's thread drop the tensors of an operation first: what is freed there is not seen."""
    time.sleep(0.001)
    _resume(work, step)


_SECOND = "the second step"


def _counted(profile: Any) -> Counted:
    events = profile.profiler.kineto_results.events()
    (second,) = (event for event in events if event.name() == _SECOND)
    begin, end = second.start_ns(), second.start_ns() + second.duration_ns()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = peak = idle = 0
    for at, num_bytes in changes:
        if at > end:
            break
        if at < begin:
            peak = alive
        alive += num_bytes
        peak = max(peak, alive)
        idle = alive
    return Counted(peak, idle)
