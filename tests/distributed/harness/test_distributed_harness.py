"""The worker pool: results, layouts, and every way in which a rank can fail."""

import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.distributed import DistributedFailure, distributed, run_distributed
from tests.harness.pool import POOL


def rank_sum(groups, factor):
    total = torch.tensor([float(dist.get_rank() * factor)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def coordinates(groups):
    return tuple(group.rank() for group in (groups.tp, groups.pp, groups.dp))


def fail_on_rank_one(groups):
    if dist.get_rank() == 1:
        raise ConfigError("the width 7 is odd.", rule="widths are even", flags=["--width"])
    dist.barrier()


def assert_something_wrong(groups):
    size = groups.dp.size()
    assert size == 3


def hang_on_rank_one(groups):
    if dist.get_rank() == 1:
        time.sleep(600)


def die_on_rank_one(groups):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn(groups):
    warnings.warn("this is old", DeprecationWarning, stacklevel=1)


def leave_traces(groups):
    os.environ["A_TRACE"] = "1"
    os.chdir("/")
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)


def look_for_traces(groups):
    return (
        "A_TRACE" in os.environ,
        os.getcwd() == "/",
        torch.get_default_dtype(),
        torch.initial_seed(),
    )


def process_facts(groups):
    return os.getpid(), torch.get_num_threads(), torch.backends.cuda.is_built()


def delay_rank_zero_in_the_next_job(groups):
    """Let rank 0 be the last to have its groups, as on a crowded machine."""
    if dist.get_rank() > 0:
        return
    form = parallel_state.initialize_model_parallel

    def form_late(**sizes):
        parallel_state.initialize_model_parallel = form
        groups = form(**sizes)
        time.sleep(0.3)
        return groups

    parallel_state.initialize_model_parallel = form_late


def moment_of_start(groups):
    return time.monotonic()


def no_such_result(groups):
    return lambda: None


def test_results_come_back_in_rank_order():
    assert run_distributed(rank_sum, 4, 10) == [(rank, 60.0) for rank in range(4)]


def test_layout_keywords_place_the_ranks():
    assert run_distributed(coordinates, 4, tp=2, pp=2) == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
    ]
    assert run_distributed(coordinates, 4, tp=2, order="tp-cp-ep-dp-pp") == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 0, 1),
        (1, 0, 1),
    ]


@distributed(world_size=2, tp=2)
def test_decorated_body_runs_on_every_rank_with_current_groups(groups):
    assert groups is ProcessGroupCollection.current()
    assert (groups.tp.size(), groups.tp.rank()) == (2, dist.get_rank())


def test_workers_live_on_between_jobs_with_one_thread_each():
    first = run_distributed(process_facts, 3)
    assert run_distributed(process_facts, 2) == first[:2]
    assert len({pid for pid, _, _ in first} | {os.getpid()}) == 4
    assert [threads for _, threads, _ in first] == [1, 1, 1]


def test_no_rank_starts_before_all_have_their_groups():
    """It could end, and close connections that a slower rank still waits for."""
    run_distributed(delay_rank_zero_in_the_next_job, 2)
    slow, fast = run_distributed(moment_of_start, 2)
    assert abs(slow - fast) < 0.2


def test_a_job_does_not_see_the_traces_of_the_one_before():
    clean = run_distributed(look_for_traces, 2)
    run_distributed(leave_traces, 2)
    assert run_distributed(look_for_traces, 2) == clean


def test_failing_rank_is_reported_first_and_frees_the_others():
    started = time.monotonic()
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(fail_on_rank_one, 4)
    assert time.monotonic() - started < 15
    message = str(caught.value)
    assert "fail_on_rank_one" in message
    assert message.index("rank 1 -----") < message.index("ConfigError: the width 7 is odd.")
    others = [f"rank {rank} -----" for rank in (0, 2, 3)]
    assert all(message.index("rank 1 -----") < message.index(other) for other in others)
    assert caught.value.outcomes[1].error_type == "ConfigError"
    assert run_distributed(rank_sum, 2, 1) == [(0, 1.0), (1, 1.0)], "the pool must recover"


def test_failed_assertion_shows_the_values_as_in_pytest():
    with pytest.raises(DistributedFailure, match="assert 2 == 3"):
        run_distributed(assert_something_wrong, 2)


def test_hanging_rank_is_killed_and_its_place_in_the_code_shown(monkeypatch):
    monkeypatch.delenv("TEST_TIMEOUT_SCALE", raising=False)
    started = time.monotonic()
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(hang_on_rank_one, 2, timeout_s=2)
    assert time.monotonic() - started < 10
    assert "1 of 2 ranks failed (ranks 1)" in str(caught.value)
    assert "not finished after 2 s" in str(caught.value)
    assert "in hang_on_rank_one" in str(caught.value)


def test_killed_rank_is_reported_with_its_signal():
    with pytest.raises(DistributedFailure, match="SIGKILL"):
        run_distributed(die_on_rank_one, 2)


def test_failure_leaves_neither_processes_nor_files():
    run_distributed(rank_sum, 2, 1)
    pids, directory = POOL.worker_pids(), POOL._directory
    assert len(pids) >= 2 and directory.exists()
    with pytest.raises(DistributedFailure):
        run_distributed(fail_on_rank_one, 2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not directory.exists()


def test_warnings_follow_the_filters_of_the_caller():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_distributed(warn, 1)
        warnings.simplefilter("error")
        with pytest.raises(DistributedFailure, match="DeprecationWarning: this is old"):
            run_distributed(warn, 1)


def test_a_result_that_cannot_travel_is_a_failure_not_a_hang():
    with pytest.raises(DistributedFailure, match="no_such_result"):
        run_distributed(no_such_result, 1)
