"""Published models and layouts they are trained in, 8 to 16,384 ranks."""

from __future__ import annotations

from dataclasses import dataclass

LATER = "--rerun-mode disabled"
"""Losses and norms are read when they are logged."""
BF16 = f"--bf16 --hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer {LATER}"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
EXPERTS = "examples/mixture_of_experts"
ROOM = "--moe-expert-rank-capacity-factor 2"
"""Rows that a rank sends to another are counted on the device."""


@dataclass(frozen=True)
class LargeRun:
    """A command line and its ranks."""

    name: str
    num_ranks: int
    words: str
    num_microbatches: int = 4


def _dense(preset: str, num_ranks: int, layout: str, **more: int) -> LargeRun:
    batch = f"--micro-batch-size 1 --global-batch-size {num_ranks}"
    words = f"--preset {preset} {BF16} {batch} {layout}"
    return LargeRun(preset, num_ranks, words, **more)


def _sparse(name: str, num_ranks: int, layout: str) -> LargeRun:
    words = f"--yaml-cfg {EXPERTS}/{name}.yaml --micro-batch-size 1 {LATER} {ROOM} {layout}"
    return LargeRun(name, num_ranks, words)


def _tp(size: int) -> str:
    return f"--tensor-model-parallel-size {size} --sequence-parallel"


def _pp(stages: int, virtual: int = 1) -> str:
    words = f"--pipeline-model-parallel-size {stages}"
    return words if virtual == 1 else f"{words} --num-virtual-stages-per-pipeline-rank {virtual}"


RUNS = [
    _dense("gpt3-6.7b", 8, f"{_tp(2)} {OVERLAP} --seq-length 2048"),
    _dense("llama2-7b", 8, f"{_tp(2)} {OVERLAP} --seq-length 4096"),
    _dense("mistral-7b-v0.1", 16, f"{_tp(2)} {_pp(2)} {OVERLAP} --seq-length 4096"),
    _dense("llama3-8b", 8, "--data-parallel-sharding-strategy optim_grads_params"
           " --use-megatron-fsdp --seq-length 8192"),
    _dense("llama3.1-8b", 64, f"{_tp(2)} --context-parallel-size 4 --seq-length 32768 {OVERLAP}"),
    _dense("llama3.1-8b", 1024, f"{_tp(4)} --context-parallel-size 16 --seq-length 131072"
           f" --recompute-activations {OVERLAP}"),
    _dense("qwen3-8b", 32, f"{_tp(4)} {_pp(2)} {OVERLAP} --seq-length 4096"),
    _dense("qwen2.5-14b", 64, f"{_tp(4)} {OVERLAP} --seq-length 4096"),
    _dense("qwen3-32b", 128, f"{_tp(8)} {_pp(2, 2)} {OVERLAP} --seq-length 4096"),
    _dense("llama2-70b", 512, f"{_tp(8)} {_pp(4, 5)} {OVERLAP} --seq-length 4096",
           num_microbatches=8),
    _dense("llama3.1-70b", 1024, f"{_tp(8)} {_pp(4)} --context-parallel-size 2 {OVERLAP}"
           " --seq-length 8192 --recompute-granularity full --recompute-method uniform"
           " --recompute-num-layers 1", num_microbatches=8),
    _dense("qwen2.5-72b", 2048, f"{_tp(8)} {_pp(8)} {OVERLAP} --seq-length 4096",
           num_microbatches=16),
    _dense("gpt3-175b", 1536, f"{_tp(8)} {_pp(8, 3)} {OVERLAP} --seq-length 2048",
           num_microbatches=8),
    _dense("llama3.1-405b", 8192, f"{_tp(8)} {_pp(16)} {OVERLAP} --seq-length 8192"
           " --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7",
           num_microbatches=16),
    _dense("llama3.1-405b", 16384, f"{_tp(8)} {_pp(16)} --context-parallel-size 16 {OVERLAP}"
           " --seq-length 131072 --recompute-activations"
           " --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7",
           num_microbatches=16),
    _sparse("mixtral_8x7b", 64, f"--global-batch-size 64 {OVERLAP}"),
    _sparse("gpt_oss_20b", 32, f"--global-batch-size 64 {OVERLAP}"),
    _sparse("qwen3_30b_a3b", 64, f"--global-batch-size 64 {OVERLAP}"),
    _sparse("deepseek_v2_lite", 64, f"--global-batch-size 64 {OVERLAP}"),
    _sparse("deepseek_v3", 2048, f"--global-batch-size 2048 {OVERLAP}"),
    _sparse("deepseek_v3", 16384, f"--global-batch-size 16384 {OVERLAP}"),
]  # fmt: skip
