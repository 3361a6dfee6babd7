"""Steps as NCCL and streams would have them: in one order on all ranks, and without races."""

import shlex

import pytest

from tests.gpu_without_gpu.collective_order.checks import problems_of
from tests.gpu_without_gpu.collective_order.jobs import recorded_body
from tests.gpu_without_gpu.races.jobs import run_watched
from tests.harness.distributed import address_of
from tests.parity.random_layouts.job import refusal_of

STEP = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 89"
    " --tokenizer-type NullTokenizer --mock-data --num-workers 0 --distributed-backend gloo"
    " --micro-batch-size 1 --global-batch-size 8 --train-iters 2 --eval-iters 0 --lr 1e-3"
    " --overlap-grad-reduce --overlap-param-gather"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
OFFLOADED = (
    "--fine-grained-activation-offloading --min-offloaded-tensor-size 1"
    " --offload-modules attn_norm core_attn attn_proj mlp_norm"
)
STAGE = "--use-megatron-fsdp --data-parallel-sharding-strategy"
HOST = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
WAITS = {
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    f" --use-distributed-optimizer --ddp-bucket-size 1000 {OFFLOADED}": [
        "stage.py:_wait_for_reductions",
        "gathered_params.py:finish_gathers",
        "saved_activations.py:__init__:wait",
        "saved_activations.py:__init__:record_stream",
        "saved_activations.py:fetch:wait",
        "saved_activations.py:take:wait",
        "saved_activations.py:take:record_stream",
        "executor.py:forward",
        "executor.py:_backpropagate",
    ],
    f"{STAGE} optim_grads --tensor-model-parallel-size 2 --sequence-parallel {HOST} --bf16": [
        "linear_with_overlap.py:backward",
        "stage.py:_wait_for_reductions",
        "gathered_params.py:finish_gathers",
        "device_copies.py:start:wait",
        "device_copies.py:wait:wait",
    ],
    f"{STAGE} optim_grads_params --context-parallel-size 2 --param-cpu-offload {HOST}": [
        "sharded_params.py:_wait_for",
        "attention.py:_ring",
        "attention.py:blocks_backward",
        "device_copies.py:wait:wait",
        "device_copies.py:wait:record_stream",
    ],
    f"{EXPERTS} --expert-model-parallel-size 2 --disable-bias-linear --use-distributed-optimizer"
    " --overlap-moe-expert-parallel-comm": ["mappings.py:_exchanged"],
    f"{EXPERTS} --expert-model-parallel-size 2 --disable-bias-linear --use-distributed-optimizer"
    " --num-distributed-optimizer-instances 2 --moe-shared-expert-intermediate-size 32"
    " --moe-shared-expert-overlap": ["mappings.py:end"],
}
"""Command line -> waits that its steps need."""


@pytest.mark.distributed
@pytest.mark.parametrize("layout", WAITS)
def test_a_step_is_in_order_and_has_no_race_but_would_have_one_without_each_wait(layout, tmp_path):
    words, metrics = shlex.split(f"{STEP} {layout}"), str(tmp_path / "metrics")
    train = (recorded_body, 4, address_of(refusal_of), words, metrics)
    ranks = run_watched(*train, without=WAITS[layout])
    for seen in ranks:
        refusal, _ = seen.value
        assert refusal == ""
        assert seen.num_operations > 1000
        assert seen.reports[""] == []
    assert problems_of([log for _, log in (seen.value for seen in ranks)]) == []
    for wait in WAITS[layout]:
        assert any(seen.num_skipped[wait] for seen in ranks), f"no rank comes to {wait}"
        assert any(seen.reports[wait] for seen in ranks), f"nobody misses {wait}"
