"""A real run saved in one layout is the same run in every other: weights, moments, schedule."""

from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import load_plain_tensors
from tests.distributed.checkpointing.all_pairs import assert_all_pairs_agree
from tests.distributed.checkpointing.gpt_run import (
    Layout,
    Model,
    first_loss_after_loading,
    load_each_and_save_again,
    resume_and_train,
    train_and_save,
    upcycle_and_save,
    weights_after_loading,
)
from tests.distributed.checkpointing.gpt_run import run_in_layout as run
from tests.harness.tolerances import (
    FP32_AFTER_OPTIMIZER,
    FP32_REORDERED_SUM,
    FP64_REORDERED_SUM,
    Tolerance,
    assert_close,
)
from tools.checkpoint.state_digest import checkpoint_digest

LAYOUTS = [
    Layout(),
    Layout(tp=2, sp=True),
    Layout(pp=2, vp=2),
    Layout(dp=2, zero=1),
    Layout(tp=2, cp=2, zero=2),
    Layout(pp=2, dp=2, zero=3),
]


def test_the_digest_is_equal_for_every_ordered_pair_of_layouts(ram_path: Path) -> None:
    assert assert_all_pairs_agree(LAYOUTS, Model(), ram_path) >= 30


def test_the_digest_is_equal_for_untied_half_precision_models(ram_path: Path) -> None:
    model = Model(is_llama=False, is_tied=False, dtype="bf16")
    layouts = [Layout(), Layout(tp=2), Layout(pp=2, dp=2, zero=1), Layout(tp=2, dp=2, zero=3)]
    assert_all_pairs_agree(layouts, model, ram_path)


def test_the_digest_is_equal_for_experts_one_by_one_and_together(ram_path: Path) -> None:
    layouts = [
        Layout(),
        Layout(tp=2, dp=2, ep=2, expt_tp=2, zero=1),
        Layout(pp=2, dp=2, ep=2, zero=3),
    ]
    assert_all_pairs_agree(layouts, Model(experts=4), ram_path)


def test_the_digest_is_equal_for_experts_that_torch_shards(ram_path: Path) -> None:
    layouts = [
        Layout(dp=2, ep=2),
        Layout(dp=4, ep=2, fsdp2=True),
        Layout(tp=2, fsdp2=True),  # each expert on two ranks of the only replica
    ]
    assert assert_all_pairs_agree(layouts, Model(experts=4), ram_path) == 9


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        (Model(), FP32_AFTER_OPTIMIZER),
        # Amaxes of earlier steps go along. Exact enough that no number falls elsewhere.
        (Model(dtype="fp64", experts=4, fp8="hybrid"), FP64_REORDERED_SUM),
    ],
    ids=["fp32", "fp8"],
)
def test_training_goes_on_in_another_layout_as_the_unbroken_run_would(
    model: Model, tolerance: Tolerance, ram_path: Path
) -> None:
    unbroken = run(resume_and_train, Layout(), model, ram_path / "unbroken", [5])[0]
    run(resume_and_train, Layout(), model, ram_path / "changed", [2])
    results = run(resume_and_train, Layout(tp=2, pp=2), model, ram_path / "changed", [3])
    changed = torch.tensor(next(losses for losses in results if losses))
    assert_close(changed, torch.tensor(unbroken[2 * 4 :]), tolerance, what="losses")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_change_precision_through_their_most_precise_form(
    dtype: str, ram_path: Path
) -> None:
    half, whole = Model(dtype=dtype), Model()
    run(train_and_save, Layout(), half, ram_path / "half", 2)
    run(load_each_and_save_again, Layout(tp=2), whole, [(ram_path / "half", ram_path / "whole")])
    run(load_each_and_save_again, Layout(), half, [(ram_path / "whole", ram_path / "back")])
    before = load_plain_tensors(ram_path / "half" / "iter_0000002")
    between = load_plain_tensors(ram_path / "whole" / "iter_0000002")
    after = load_plain_tensors(ram_path / "back" / "iter_0000002")
    main = {k: v for k, v in before.items() if k.startswith("optimizer.state.fp32_param.")}
    assert main
    for key, tensor in main.items():
        name = key.removeprefix("optimizer.state.fp32_param.")
        rows = 70 if "word_embeddings" in name else None  # the rest is padding
        assert torch.equal(between[name][:rows], tensor[:rows]), name
    for key, tensor in before.items():
        rows = 70 if "word_embeddings" in key else None
        assert torch.equal(after[key][:rows], tensor[:rows]), key


def test_weights_loaded_without_optimizer_state_reach_the_main_weights(ram_path: Path) -> None:
    run(train_and_save, Layout(), Model(), ram_path, 2)
    (found,) = run(weights_after_loading, Layout(), Model(dtype="bf16"), ram_path)
    for name, weight in found["model"].items():
        main = found["main"][name].view_as(weight)
        assert torch.equal(main.to(torch.bfloat16), weight), name


def test_experts_begin_as_copies_of_the_dense_mlp_in_every_layout(ram_path: Path) -> None:
    dense = ram_path / "dense"
    run(train_and_save, Layout(), Model(), dense, 2)
    digests = set()
    layouts = [Layout(), Layout(tp=2, dp=2, ep=2, expt_tp=2), Layout(pp=2, dp=2, ep=2, zero=3)]
    for layout in layouts:
        run(upcycle_and_save, layout, Model(experts=4), dense, ram_path / str(layout))
        saved = ram_path / str(layout) / "iter_0000000"
        digests.add(checkpoint_digest(saved))
    assert len(digests) == 1
    before = load_plain_tensors(dense / "iter_0000002")
    after = load_plain_tensors(saved)
    for kind in ("linear_fc1.weight", "linear_fc2.weight"):
        copies = after[f"decoder.layers.2.mlp.experts.experts.{kind}"]
        assert copies.shape[0] == 4
        for copy in copies:
            assert torch.equal(copy, before[f"decoder.layers.mlp.{kind}"][2])
    norm = before["decoder.layers.mlp.linear_fc1.layer_norm_weight"][2]
    assert torch.equal(after["decoder.layers.2.pre_mlp_layernorm.weight"], norm)


def test_an_upcycled_model_begins_with_the_loss_of_the_dense_one(ram_path: Path) -> None:
    run(train_and_save, Layout(), Model(dropout=0.0), ram_path, 2)
    dense = run(first_loss_after_loading, Layout(), Model(dropout=0.0), ram_path)[0]
    experts = run(first_loss_after_loading, Layout(), Model(dropout=0.0, experts=4), ram_path)[0]
    assert_close(experts, dense, FP32_REORDERED_SUM, what="loss")
