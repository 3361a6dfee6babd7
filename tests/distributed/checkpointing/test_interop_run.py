"""`pretrain_gpt.py --load` continues checkpoints of Megatron-LM and DeepSpeed, in any layout."""

from pathlib import Path

import pytest

from tests.harness.distributed import run_distributed
from tests.parity.training_run import read_metrics, train_with_flags
from tests.unit.dist_checkpointing.interop import interop_files as files

MODEL = (
    f"--num-layers {files.LAYERS} --hidden-size {files.HIDDEN} --ffn-hidden-size {files.FFN} "
    f"--num-attention-heads {files.HEADS} --group-query-attention "
    f"--num-query-groups {files.GROUPS} --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 16 "
    "--max-position-embeddings 16 --mock-data --tokenizer-type NullTokenizer "
    f"--vocab-size {files.VOCABULARY} --make-vocab-size-divisible-by 32 "
    f"--micro-batch-size 2 --global-batch-size 4 --train-iters {files.ITERATION + 2} "
    "--lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0 --num-workers 0"
)


def run(directory: Path, flags: str, **groups: int) -> list[float]:
    """Go on for two steps and return their losses."""
    metrics = directory.with_suffix(".jsonl")
    words = f"{MODEL} --load {directory} --metrics-jsonl {metrics} {flags}".split()
    size = groups.get("tp", 1) * groups.get("pp", 1)
    run_distributed(train_with_flags, size, words, **groups)
    lines = read_metrics(metrics)
    assert [line["iteration"] for line in lines] == [files.ITERATION + 1, files.ITERATION + 2]
    return [line["lm loss"] for line in lines]


def test_the_same_state_trains_on_alike_from_every_format_and_in_another_layout(
    tmp_path: Path,
) -> None:
    files.write_by_buffer(tmp_path / "megatron", tp=2, is_te=True)
    files.write_legacy(tmp_path / "legacy", pp=2)
    files.write_deepspeed(tmp_path / "zero", stage=3)
    expected = run(tmp_path / "megatron", "")
    assert run(tmp_path / "zero", "") == expected
    split = run(tmp_path / "legacy", "--tensor-model-parallel-size 2", tp=2)
    assert split == pytest.approx(expected, rel=1e-5)
