"""Threads that hash and read: what they return, and how many there are."""

import pytest

from megatron.core.dist_checkpointing.thread_pool import (
    ThreadPool,
    threads_per_rank,
)


def test_a_future_has_the_result_or_the_exception() -> None:
    with ThreadPool(2) as threads:
        results = [threads.start(divmod, 7, n) for n in (2, 3, 0)]
    assert [r.result() for r in results[:2]] == [(3, 1), (2, 1)]
    with pytest.raises(ZeroDivisionError):
        results[2].result()


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [("1", 2, 2), ("2", 2, 1), ("8", 2, 1), ("8", 192, 4), ("many", 3, 3), ("0", 3, 3)],
)
def test_ranks_of_a_machine_share_its_cores(ranks, cores, expected, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert threads_per_rank() == expected
