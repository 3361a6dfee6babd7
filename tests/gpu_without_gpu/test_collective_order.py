"""A rank that starts collectives in another order is found; `test_steps`: training does not."""

import pytest

from tests.gpu_without_gpu.collective_order.calls import Wait
from tests.gpu_without_gpu.collective_order.checks import problems_of
from tests.gpu_without_gpu.planted_orders import PLANTED, logs_of_all_ranks
from tests.harness.distributed import run_distributed

FOUND = {
    "a bucket is not reduced": "rank 3: nothing",
    "a gather of fewer rows": "rank 3: all_gather_single [3, 2]",
    "a bucket in bf16": "rank 3: reduce_scatter_single [4] bfloat16",
    "the norm before the sum of a layer": "rank 3 is at all_reduce [1] float32 max",
    "two sums in flight cross": "collectives are started in a circle:",
    "a message that nobody receives": "from rank 3 to rank 7 does not fit",
}


@pytest.mark.distributed
@pytest.mark.parametrize("planted", PLANTED)
def test_a_rank_that_does_otherwise_is_found(planted):
    [logs] = run_distributed(logs_of_all_ranks, 1, planted, 3)
    [problem] = problems_of(logs)
    assert FOUND[planted] in problem
    assert any(
        f"{name}.py:" in problem for name in ("planted_orders", "zero/stage", "p2p_communication")
    )


@pytest.mark.distributed
def test_ranks_that_do_the_same_are_in_order():
    [logs] = run_distributed(logs_of_all_ranks, 1, "", 3)
    assert problems_of(logs) == []
    assert {len(log.calls) for log in logs} == {12}
    assert all(any(isinstance(event, Wait) for event in log.events) for log in logs)
