"""A checkpoint of a GPT continues as a hybrid model, and the reverse: same weights and losses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron.core.dist_checkpointing import load_plain_tensors
from megatron.core.dist_checkpointing.interop.formats import torch_dist
from megatron.core.dist_checkpointing.interop.opening import open_any, write_format
from megatron.core.transport.object_collectives import SingleProcess
from tests.distributed.checkpointing.gpt_run import (
    Layout,
    Model,
    load_each_and_save_again,
    loss_of_each_step,
    resume_and_train,
    train_and_save,
)
from tests.distributed.checkpointing.gpt_run import run_in_layout as run
from tests.harness.distributed import DistributedFailure, run_distributed
from tests.harness.tolerances import (
    FP32_AFTER_OPTIMIZER,
    FP32_REORDERED_SUM,
    FP64_REORDERED_SUM,
    assert_close,
)
from tests.parity.training_run import read_metrics, train_with_flags
from tools.checkpoint.state_digest import checkpoint_digest

DENSE, EXPERTS = "*-*-*-*-", "*E*-*E*-"
"""The layers of a GPT of `gpt_run`, without and with experts."""


@pytest.mark.parametrize(
    ("model", "pattern", "layouts"),
    [
        (Model(), DENSE, (Layout(), Layout(tp=2, pp=2), Layout(dp=2, zero=1))),
        (Model(), "[*-]*-[*-]*-", (Layout(pp=2, vp=2), Layout(pp=3), Layout(dp=2, zero=3))),
        (
            Model(is_llama=False, is_tied=False, dtype="bf16"),
            DENSE,
            (Layout(dp=2, zero=2), Layout(pp=4), Layout(tp=2)),
        ),
        (
            Model(experts=4),
            EXPERTS,
            (Layout(dp=2, ep=2), Layout(tp=2, dp=2, ep=2, expt_tp=2, zero=1), Layout(pp=2)),
        ),
    ],
    ids=["dense", "groups", "bf16", "experts"],
)
def test_a_gpt_becomes_a_hybrid_and_a_gpt_again_without_losing_a_bit(
    model: Model, pattern: str, layouts: tuple[Layout, Layout, Layout], ram_path: Path
) -> None:
    first, as_hybrid, again = (ram_path / name for name in ("first", "hybrid", "again"))
    hybrid = replace(model, pattern=pattern)
    run(train_and_save, layouts[0], model, first, 2)
    run(load_each_and_save_again, layouts[1], hybrid, [(first, as_hybrid)])
    run(load_each_and_save_again, layouts[2], model, [(as_hybrid, again)])
    step = "iter_0000002"
    assert checkpoint_digest(again / step) == checkpoint_digest(first / step)
    assert any("layers.3.mlp" in key for key in load_plain_tensors(as_hybrid / step))


@pytest.mark.parametrize(
    ("model", "pattern"),
    [(Model(), DENSE), (Model(experts=4), EXPERTS), (Model(), "[*-]*-[*-]*-")],
    ids=["dense", "experts", "groups"],
)
def test_a_run_goes_on_as_a_hybrid_and_back_with_the_losses_of_an_unbroken_run(
    model: Model, pattern: str, ram_path: Path
) -> None:
    model = replace(model, dropout=0.0, dtype="fp64")
    unbroken = run(resume_and_train, Layout(), model, ram_path / "unbroken", [6])
    found = []
    for layout, continued in (
        (Layout(), model),
        (Layout(tp=2, pp=2), replace(model, pattern=pattern)),
        (Layout(dp=2, zero=1), model),
    ):
        losses = run(resume_and_train, layout, continued, ram_path / "changed", [2])
        found.append(loss_of_each_step(losses, 2))
    expected = loss_of_each_step(unbroken, 6)
    assert_close(torch.cat(found), expected, FP64_REORDERED_SUM, what="losses")


def test_layers_that_the_gpt_lacks_keep_their_values_and_are_not_dropped_silently(
    ram_path: Path,
) -> None:
    first, target = ram_path / "first", ram_path / "target"
    run(train_and_save, Layout(), Model(), first, 2)
    hybrid = Model(pattern="M*-*-M*-*-")
    run(load_each_and_save_again, Layout(pp=2, dp=2, zero=1), hybrid, [(first, target)])
    before = load_plain_tensors(first / "iter_0000002")
    after = load_plain_tensors(target / "iter_0000002")
    name = "self_attention.linear_qkv.weight"
    for prefix in ("", "optimizer.state.exp_avg."):
        of_gpt = before[f"{prefix}decoder.layers.{name}"]
        for layer, found in enumerate((1, 3, 6, 8)):
            assert torch.equal(after[f"{prefix}decoder.layers.{found}.{name}"], of_gpt[layer])
    mamba = "decoder.layers.5.self_attention.in_proj.weight"
    assert after[mamba].abs().sum() > 0 and not after[f"optimizer.state.exp_avg.{mamba}"].any()
    with pytest.raises(DistributedFailure, match="2 layers of mamba2"):
        run(load_each_and_save_again, Layout(), Model(), [(target, ram_path / "back")])
    short = Model(pattern="*-*-*-")
    with pytest.raises(DistributedFailure, match="3 layers of attention and 3 layers of dense"):
        run(load_each_and_save_again, Layout(), short, [(first, ram_path / "back")])


def test_a_hybrid_model_is_exported_under_the_names_of_megatron(ram_path: Path) -> None:
    first, theirs, again = (ram_path / name for name in ("first", "theirs", "again"))
    run(train_and_save, Layout(), Model(pattern=DENSE), first, 2)
    contents = open_any(first / "iter_0000002", peers=SingleProcess())
    written = write_format(contents, theirs, torch_dist.FORMAT)
    keys = FileSystemReader(written).read_metadata().state_dict_metadata
    norm = "decoder.final_norm.weight"
    assert {norm, f"optimizer.state.exp_avg.{norm}", "decoder.layers.7.mlp.linear_fc2.weight"} <= {
        *keys
    }
    assert not [key for key in keys if "final_layernorm" in key]
    run(load_each_and_save_again, Layout(tp=2), Model(pattern=DENSE), [(theirs, again)])
    before = load_plain_tensors(first / "iter_0000002")
    after = load_plain_tensors(again / "iter_0000002")
    assert before.keys() == after.keys()
    for key in before.keys() - {k for k in before if "word_embeddings" in k}:  # padded for tp 2
        assert torch.equal(before[key], after[key]), key


WORDS = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 90 --swiglu"
    " --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    " --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-decay-iters 10 --mock-data"
    " --log-interval 1 --num-workers 0 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
    " --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
)


def losses(metrics: Path, flags: str, **axes: int) -> list[float]:
    """Train with flags of the command; return the losses, of later tokens too."""
    size = axes.get("tp", 1) * axes.get("pp", 1)
    words = f"{WORDS} {flags} --metrics-jsonl {metrics}".split()
    run_distributed(train_with_flags, size, words, timeout_s=240.0, **axes)
    names = ("lm loss", "mtp_1 loss", "mtp_2 loss")
    return [line[name] for line in read_metrics(metrics) for name in names]


def test_layers_of_later_tokens_go_along(tmp_path: Path) -> None:
    gpt, where = "--num-layers 2 --mtp-num-layers 2", f"--save {tmp_path}/run --load {tmp_path}/run"
    unbroken = losses(tmp_path / "unbroken.jsonl", f"{gpt} --train-iters 6")
    found = losses(tmp_path / "1.jsonl", f"{gpt} --train-iters 2 {where}")
    hybrid = "--hybrid-layer-pattern *-|*-/*-/*- --pipeline-model-parallel-size 2 --train-iters 4"
    found += losses(tmp_path / "2.jsonl", f"{hybrid} {where}", pp=2)
    found += losses(tmp_path / "3.jsonl", f"{gpt} --train-iters 6 {where}")
    assert_close(found, unbroken, FP32_AFTER_OPTIMIZER, what="losses")


def test_a_stock_hybrid_with_experts_trains_as_in_one_process(tmp_path: Path) -> None:
    """Layers as in Nemotron 3: each depth of later tokens is attention and experts."""
    sizes = (
        "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --train-iters 4"
        " --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 8"
    )
    expected = losses(tmp_path / "1.jsonl", f"{sizes} --hybrid-layer-pattern ME*E[M-]/*E/*E")
    split = (
        "--hybrid-layer-pattern ME*|E[M-]/*E/*E --tensor-model-parallel-size 2"
        " --pipeline-model-parallel-size 2 --sequence-parallel"
    )
    found = losses(tmp_path / "2.jsonl", f"{sizes} {split}", tp=2, pp=2)
    assert_close(found, expected, FP32_REORDERED_SUM, what="losses")
