"""A job that is started again meets in a store that holds what the last attempt left there."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.core.foundation.errors import TopologyError
from megatron.core.foundation.rendezvous import join_rendezvous

SIZE = 4
SOON = timedelta(seconds=20)


def client_of(store):
    """Connect as another process would: a client waits for one answer at a time."""
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)


def meet(store, size=SIZE):
    """Let all ranks join at once, as threads; return what each wrote and read there."""
    arrived = threading.Barrier(size)

    def rank_of(rank):
        arrived.wait()
        part = join_rendezvous(client_of(store), rank, size, SOON)
        part.set(f"from/{rank}", "here")
        part.wait([f"from/{other}" for other in range(size)], SOON)
        return part.add("count", 1)

    with ThreadPoolExecutor(size) as ranks:
        return sorted(ranks.map(rank_of, range(size)))


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_each_attempt_starts_in_an_empty_part_of_the_store(store):
    assert [meet(store) for _ in range(3)] == [[1, 2, 3, 4]] * 3


def test_attempts_of_other_sizes_do_not_meet(store):
    """A node that comes or goes changes the size, and not the launcher's count of restarts."""
    assert [meet(store, size) for size in (4, 2, 3)] == [[1, 2, 3, 4], [1, 2], [1, 2, 3]]


def test_what_a_killed_attempt_asked_is_answered_to_nobody(store):
    """Ranks 1 and 2 were killed after they asked, so their tokens are still there."""
    for rank in (1, 2):
        store.set(f"asks/{rank}", "of a dead process")
    assert meet(store) == [1, 2, 3, 4]


def test_ranks_that_do_not_start_are_named(store):
    with ThreadPoolExecutor(1) as ranks:
        # Rank 1 comes and is answered; 2 and 3 never do.
        first = ranks.submit(join_rendezvous, client_of(store), 1, SIZE, SOON)
        with pytest.raises(TopologyError, match=r"rank 0 of 4 waited .* for ranks 2, 3 to start"):
            join_rendezvous(client_of(store), 0, SIZE, timedelta(seconds=1))
        first.result()
