"""A step on an accelerator that computes shapes: where the host waits, and what is refused."""

import json
import subprocess
import sys

import pytest

from megatron.core.models.gpt.presets import preset, preset_names
from megatron.core.transformer.captured_layer import why_not_captured
from tests.gpu_without_gpu.imaginary_accelerator.runs import MOST, RUNS
from tests.gpu_without_gpu.imaginary_accelerator.waits import READ
from tests.harness.resolved_run import run_of

MODULE = "tests.gpu_without_gpu.imaginary_accelerator"
SIZES = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --vocab-size 1024"
    " --micro-batch-size 1 --global-batch-size 64 --bf16 --hidden-dropout 0 --attention-dropout 0"
    " --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
    " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 128"
    " --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"
)
SPLITS = "megatron/core/transformer/moe/token_dispatcher.py:of"
"""NCCL's all-to-all takes the rows of each rank from the host."""
COUNTS = "megatron/core/kernels/row_counts.py:counts_on_device"
COPIED = "megatron/core/offload/device_copies.py:wait"
NORM = "megatron/core/optimizer/gradient_norm.py:<listcomp>"
OUTSIDE_OF_CAPTURED_LAYERS = {
    "pretrain_gpt.py", "megatron/core/optimizer/update.py",
    SPLITS.partition(":")[0], COUNTS.partition(":")[0],
}  # fmt: skip
LATER = " --rerun-mode disabled"
DENSE = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    " --num-virtual-stages-per-pipeline-rank 2 --context-parallel-size 2"
)


@pytest.mark.parametrize(
    ("words", "waits", "axes"),
    [
        (DENSE + LATER, {}, {"tp", "pp", "dp_cp", "cp"}),
        (DENSE, {"megatron/core/optimizer/update.py:_read": 1}, {"dp_cp"}),
        (f"{EXPERTS} --expert-model-parallel-size 4" + LATER, {SPLITS: 4 * 2},
         {"ep", "dp_cp", "expt_dp"}),
        (f"{EXPERTS} --expert-model-parallel-size 4 --moe-expert-rank-capacity-factor 2" + LATER,
         {}, {"ep", "dp_cp", "expt_dp"}),
    ],
    ids=["dense", "dense, with reruns", "experts over ranks", "with a capacity"],
)  # fmt: skip
def test_the_host_waits_in_no_pass_but_for_the_sizes_of_an_all_to_all(words, waits, axes):
    seen = first_rank(words)
    assert seen["waits"] == waits
    read = [place for place, why, _ in seen["obstacles"] if why == READ]
    assert read == [*waits]
    # Micro batches come from the host; nothing else keeps a step from being captured.
    copied = {place for place, why, _ in seen["obstacles"] if why != READ}
    assert {place.partition(":")[0] for place in copied - {COUNTS}} == {"pretrain_gpt.py"}
    # What the host does is outside of layers, or in those with experts, which are not captured.
    run = run_of(f"{SIZES} {words} --cuda-graph-impl local", 32)
    assert run.transformer_config.captures_layers
    assert not why_not_captured(run.transformer_config)
    assert {place.split(":")[0] for place in {*read, *copied}} <= OUTSIDE_OF_CAPTURED_LAYERS
    assert axes <= {place.split()[0] for place in seen["traffic"]}
    assert seen["peak"] == sum(seen["kinds"].values())


def test_a_model_initialized_on_the_cpu_steps_on_the_device():
    assert first_rank(f"{DENSE} --use-cpu-initialization {LATER}")["waits"] == {}


def first_rank(words):
    """Return what was seen of the first rank of 32."""
    command = [sys.executable, "-m", MODULE, "--words", f"{SIZES} {words}", "--world-size", "32"]
    command += ["--rank", "0", "--num-microbatches", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


FINE_GRAINED = (
    "--moe-router-topk 8 --moe-grouped-gemm --moe-ffn-hidden-size 768"
    " --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --num-experts"
)
STAGE3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.parametrize("words", ["", STAGE3], ids=["ZeRO-1", "ZeRO-3"])
def test_expert_weights_are_not_copied_and_more_experts_need_no_more_operations(words):
    few, many = (
        first_rank(f"{FINE_GRAINED} {n} {words} --num-layers 2 {LATER}") for n in (32, 128)
    )
    assert many["copied"] == few["copied"] == 0
    products = "megatron/core/kernels/grouped_products.py"
    # Two matrices of an expert, two passes, two layers, two micro batches.
    assert many["operations"][f"{products}:torch_grouped_mm"] == 2 * 2 * 2 * 2
    assert many["operations"][f"{products}:grouped_outer_products"] == 2 * 2 * 2
    # More bytes are more buckets of a reduction, whose shards the optimizer reads.
    by_bucket = ("megatron/core/transport/", "megatron/core/optimizer/")
    in_passes, expected = (
        {place: n for place, n in seen["operations"].items() if not place.startswith(by_bucket)}
        for seen in (many, few)
    )
    assert in_passes == expected


def test_sums_in_host_memory_take_none_of_the_device_and_the_host_waits_for_them():
    words = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
    seen = first_rank(f"{words} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d {LATER}")
    assert seen["waits"] == {COPIED: 2, NORM: 2}  # one bucket in each of two micro batches
    assert seen["kinds"]["weights"] > 1000 * (
        seen["kinds"]["gradients"] + seen["kinds"]["optimizer"]
    )


MIXED = """
import torch
from tests.gpu_without_gpu.imaginary_accelerator.accelerator import NAME, register
register()
from megatron.training.setup.fake_device import fake_rank
from tests.gpu_without_gpu.imaginary_accelerator.waits import AcceleratorLedger
with fake_rank(0, 8, backend="nccl"), AcceleratorLedger() as ledger, ledger.watching():
    x = torch.ones(4, device=NAME)
    x.sum().item(), x.cpu(), x.tolist(), x.nonzero(), torch.ones(4).to(NAME)
    torch.ones(4).to(NAME, non_blocking=True)
    print(sum(ledger.waits.values()))
    print(len({why for _, why in ledger.obstacles}))
    ledger.clear()
    torch.rand(4, device=NAME), torch.ones(4, device=NAME).bernoulli_()
    print(*ledger.obstacles.values())
    try:
        x + torch.ones(4)
    except Exception as problem:
        print(type(problem).__name__)
"""


def test_what_a_graph_cannot_hold_is_counted_and_mixed_devices_are_refused():
    done = subprocess.run([sys.executable, "-c", MIXED], capture_output=True, text=True)
    assert done.stdout.split() == ["5", "3", "2", "FakeTensorDeviceMismatchError"], done.stderr[
        -3000:
    ]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name} {run.num_ranks}")
def test_the_command_lines_of_large_runs_are_accepted(run):
    assert run_of(run.words, run.num_ranks).topology.world_size == run.num_ranks


def test_every_published_model_from_seven_billion_parameters_on_has_large_runs():
    names = {run.name.replace("_", "-") for run in RUNS}
    large = {name for name in preset_names() if preset(name).published_parameters > 6.6e9}
    assert large == names
    most = {run.name.replace("_", "-") for run in RUNS if run.num_ranks == MOST}
    assert most == names
