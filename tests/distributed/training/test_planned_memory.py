"""The planned memory of a rank against what torch's CPU allocator counts in a run.

`python -m tests.parity.planned_memory` draws more layouts.
"""

import pytest

from megatron.training.setup.traced_memory import trace_rank
from tests.harness.distributed import run_distributed
from tests.harness.resolved_run import run_of
from tests.parity.planned_memory_case import SCRIPT, measure

TOLERANCE = 0.03
"""Memory inside a kernel is not seen by the plan, and a router's loads are taken to be even."""
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --vocab-size 512"
    " --micro-batch-size 2 --hidden-dropout 0 --attention-dropout 0"
)


@pytest.mark.parametrize(
    "words",
    [
        "--global-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel --fp16"
        " --initial-loss-scale 1024 --swiglu",
        "--global-batch-size 8 --pipeline-model-parallel-size 2"
        " --num-virtual-stages-per-pipeline-rank 2",
        "--global-batch-size 4 --context-parallel-size 2 --recompute-granularity full"
        " --recompute-method uniform --recompute-num-layers 1",
        "--global-batch-size 8 --use-distributed-optimizer --bf16 --recompute-granularity"
        " selective --recompute-modules layernorm",
        "--global-batch-size 8 --data-parallel-sharding-strategy optim_grads --bf16",
        "--global-batch-size 8 --data-parallel-sharding-strategy optim_grads_params --bf16",
        "--global-batch-size 4 --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
        " --moe-token-dispatcher-type alltoall",
        "--global-batch-size 8 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
    ],
)  # fmt: skip
def test_the_plan_is_within_three_percent_of_the_allocator(words):
    words = f"{MODEL} {words}"
    counted = run_distributed(measure, 2, words)[1]
    found = trace_rank(run_of(words, 2), SCRIPT, 1)
    assert found.peak.num_bytes == pytest.approx(counted.peak, rel=TOLERANCE)
    assert found.idle == pytest.approx(counted.idle, rel=TOLERANCE)
