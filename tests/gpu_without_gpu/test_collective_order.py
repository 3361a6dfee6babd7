"""Ranks start the same collectives in one order, and a rank that does not is found."""

import shlex

import pytest

from tests.gpu_without_gpu.collective_order.calls import Wait
from tests.gpu_without_gpu.collective_order.checks import problems_of
from tests.gpu_without_gpu.collective_order.jobs import run_recorded
from tests.gpu_without_gpu.planted_orders import PLANTED, logs_of_all_ranks
from tests.harness.distributed import run_distributed
from tests.parity.random_layouts.job import refusal_of

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
    assert "planted_orders.py:" in problem or "communication.py:" in problem


@pytest.mark.distributed
def test_ranks_that_do_the_same_are_in_order():
    [logs] = run_distributed(logs_of_all_ranks, 1, "", 3)
    assert problems_of(logs) == []
    assert {len(log.calls) for log in logs} == {12}
    assert all(any(isinstance(event, Wait) for event in log.events) for log in logs)


STEP = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 89"
    " --tokenizer-type NullTokenizer --mock-data --num-workers 0 --distributed-backend gloo"
    " --micro-batch-size 1 --global-batch-size 8 --train-iters 2 --eval-iters 0 --lr 1e-3"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
STAGE_3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
LAYOUTS = [
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    " --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    " --overlap-grad-reduce --ddp-bucket-size 1000",
    f"{EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    " --disable-bias-linear",
    f"{STAGE_3} --context-parallel-size 2 --overlap-grad-reduce --overlap-param-gather",
    "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --overlap-grad-reduce",
]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_starts_collectives_in_an_order_that_nccl_ends(layout, tmp_path):
    words = shlex.split(f"{STEP} {layout}")
    refusals, logs = run_recorded(refusal_of, 4, words, str(tmp_path / "metrics"))
    assert set(refusals) == {""}
    assert problems_of(logs) == []
    assert min(len(log.calls) for log in logs) > 10
