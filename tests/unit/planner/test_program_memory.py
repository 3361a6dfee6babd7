"""The memory of a rank, read from the program that would run."""

import pytest
import torch

from megatron.core.foundation.exit_status import ExitStatus
from megatron.core.kernels.grouped_products import ROWS_OF_A_TILE, fill_tiles
from megatron.training.metrics.memory_timeline import Kind, MemoryTimeline
from megatron.training.setup.fake_device import fake_rank
from megatron.training.setup.stages import first_rank_of_stages
from megatron.training.setup.traced_memory import memory_of_stages, trace_rank
from megatron.training.setup.traced_rank import ModelScript
from pretrain_gpt import forward_step, model_provider
from tests.harness.resolved_run import run_of
from tools import plan

SCRIPT = ModelScript(model_provider, forward_step)
SMALL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --vocab-size 512"
    " --micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0"
    " --untie-embeddings-and-output-weights --position-embedding-type rope"
)
PADDING = 0.01
"""Shards begin at multiples of 128 elements."""


def trace(words, world_size, rank=0, **options):
    return trace_rank(run_of(f"{SMALL} {words}", world_size), SCRIPT, rank, **options)


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "optimizer"),
    [
        ("no_shard", 2, 4, 12),
        ("optim", 2, 4, 12 / 4),
        ("optim_grads", 2, 4 / 4, 12 / 4),
        ("optim_grads_params", 2 / 4, 4 / 4, 12 / 4),
    ],
)
def test_each_stage_of_zero_keeps_the_bytes_per_parameter_of_its_paper(
    strategy, weights, gradients, optimizer
):
    """arXiv 1910.02054, section 5, with fp32 gradients: 18 bytes, of which stages share more."""
    words = f"--bf16 --global-batch-size 4 --data-parallel-sharding-strategy {strategy}"
    found = trace(words, 4)
    whole = trace("--bf16 --global-batch-size 1", 1)
    count = whole.weights / 2
    assert found.weights == pytest.approx(weights * count, rel=PADDING)
    assert found.gradients == pytest.approx(gradients * count, rel=PADDING)
    assert found.optimizer == pytest.approx(optimizer * count, rel=PADDING)


def test_states_of_the_175b_model_are_those_of_the_paper():
    """arXiv 2205.05198, figure 1: 175B on tp 8 x pp 8, 16-bit weights with fp32 main gradients are
    18 bytes a parameter, 45.56 GiB on a stage without embedding."""
    run = run_of(
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048"
        " --micro-batch-size 1 --global-batch-size 8 --bf16 --tensor-model-parallel-size 8"
        " --pipeline-model-parallel-size 8 --sequence-parallel --vocab-size 51200",
        64,
    )
    rank = first_rank_of_stages(run)[3]
    found = trace_rank(run, SCRIPT, rank, backend="nccl", num_microbatches=1)
    states = found.weights + found.gradients + found.optimizer
    assert states / 2**30 == pytest.approx(45.56, rel=0.01)


@pytest.mark.parametrize("module", ["layernorm", "core_attn", "mlp"])
def test_what_is_recomputed_is_freed_by_the_end_of_the_step(module):
    recompute = f"--recompute-granularity selective --recompute-modules {module}"
    plain = trace("--bf16 --global-batch-size 1", 1)
    found = trace(f"--bf16 --global-batch-size 1 {recompute}", 1)
    assert found.idle == plain.idle


@pytest.mark.parametrize(("length", "vocab"), [(64, 512), (512, 131072), (8192, 32768)])
def test_the_fused_head_and_loss_is_traced_and_keeps_fewer_bytes(length, vocab):
    """One chunk; two chunks and a second pass in backward; many chunks and a sum of gradients."""
    words = f"--bf16 --global-batch-size 1 --seq-length {length} --vocab-size {vocab}"
    plain, fused = (trace(f"{words} {more}", 1) for more in ("", "--cross-entropy-loss-fusion"))
    assert fused.idle == plain.idle
    if length > 64:
        assert fused.peak.num_bytes < plain.peak.num_bytes - 0.5 * length * vocab


def test_the_first_and_last_stages_alone_have_the_memory_that_a_trace_of_all_stages_has():
    words = "--num-layers 6 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6"
    run = run_of(f"{SMALL} {words} --pipeline-model-parallel-size 3", 3)
    whole = memory_of_stages(run, SCRIPT)
    assert memory_of_stages(run, SCRIPT, all_stages=False) == [whole[0], whole[-1]]


def test_a_stage_of_1f1b_keeps_as_many_micro_batches_as_stages_follow_it():
    words = "--global-batch-size 8 --pipeline-model-parallel-size 2"
    run = run_of(f"{SMALL} {words}", 2)
    for stage, rank in enumerate(first_rank_of_stages(run)):
        found = trace_rank(run, SCRIPT, rank)
        assert found.most_in_flight == 2 - stage


@pytest.mark.parametrize(
    "recompute",
    ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"],
    ids=["kept", "recomputed"],
)
def test_one_micro_batch_tells_the_peak_of_all(recompute: str) -> None:
    words = "--bf16 --global-batch-size 8 --pipeline-model-parallel-size 2"
    run = run_of(f"{SMALL} {words} {recompute}", 2)
    stages = memory_of_stages(run, SCRIPT)
    for found, rank in zip(stages, first_rank_of_stages(run), strict=True):
        whole = trace_rank(run, SCRIPT, rank, backend="nccl")
        assert found.peak_bytes == pytest.approx(whole.peak.num_bytes, rel=0.005)
        assert found.in_flight == whole.most_in_flight
        assert sum(found.kinds.values()) == found.peak_bytes


def test_memory_of_the_stages_of_a_run_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{SMALL} --global-batch-size 16 --pipeline-model-parallel-size 2"
    assert plan.main(["memory", "--num-gpus", "8", *flags.split()]) == ExitStatus.DONE
    said = capsys.readouterr().out
    assert "micro batches in flight: 2 (Et)" in said
    assert "most: stage" in said


def test_what_a_layer_keeps_is_the_same_for_all_layers_and_named_by_them():
    found = trace("--global-batch-size 1", 1)
    kept = found.kept_at_peak[0, 0]
    assert kept["layer 1"] == kept["layer 2"] > 0


def test_full_recomputation_keeps_only_the_input_of_a_layer():
    words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    found = trace(f"--global-batch-size 1 {words}", 1)
    kept = found.kept_at_peak[0, 0]
    s, b, h, fp32 = 64, 1, 256, 4
    assert sum(kept.values()) <= 3 * s * b * h * fp32 + 2 * s * b * 512 * fp32


def test_a_rank_of_thousands_is_traced_in_this_process():
    words = (
        "--bf16 --global-batch-size 512 --tensor-model-parallel-size 4 --sequence-parallel"
        " --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8"
        " --moe-token-dispatcher-type alltoall --use-distributed-optimizer"
    )
    found = trace(words, 2048, rank=1027, num_microbatches=1, backend="nccl")
    assert found.peak.num_bytes > found.weights + found.gradients + found.optimizer
    assert found.peak.kinds[Kind.COMMUNICATION] > 0


def test_experts_get_even_shares_of_tokens():
    with fake_rank(0, 1, routed_share=0.25):
        routed = torch.zeros(6, 8, dtype=torch.bool)
        assert routed.nonzero().shape == (12, 2)
        assert routed.sum(0).view(1, -1).tolist() == [[1, 2, 1, 2, 1, 2, 1, 2]]


@pytest.mark.parametrize(("backend", "filled"), [("gloo", ROWS_OF_A_TILE // 2), ("nccl", 0)])
def test_rows_of_an_expert_are_filled_as_they_are_on_average_where_a_cpu_multiplies(
    backend: str, filled: int
) -> None:
    with fake_rank(0, 1, backend=backend):
        for count in (1, 3 * ROWS_OF_A_TILE, 100):
            rows = torch.empty(count, 8, dtype=torch.bfloat16)
            assert len(fill_tiles(rows)) == count + filled
            assert len(fill_tiles(rows.float())) == count


def test_a_ledger_counts_each_storage_until_it_is_freed():
    with fake_rank(0, 1), MemoryTimeline() as ledger:
        x = torch.empty(256, dtype=torch.float32)
        view, other = x[10:], x + 1
        assert ledger.num_bytes == 2048
        del x, other
        assert ledger.num_bytes == 1024
        assert ledger.peak.num_bytes == 2048
        del view
        assert ledger.num_bytes == 0


def test_a_ledger_follows_storages_that_are_emptied_and_filled_again():
    with fake_rank(0, 1), MemoryTimeline() as ledger:
        x = torch.empty(256)
        x.untyped_storage().resize_(0)
        assert ledger.num_bytes == 0
        x.untyped_storage().resize_(1024)
        assert ledger.num_bytes == 1024
