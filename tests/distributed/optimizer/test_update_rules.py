"""Muon, Lion and SGD in parallel: the model of one process, and the same bits when sharded."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta, shard_of
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.distributed.checkpointing.gpt_run import Layout, Model, Run, resume_and_train
from tests.distributed.distributed.replicas import accumulate, wrap
from tests.distributed.optimizer.test_sharded_optimizer import build
from tests.distributed.training.test_pretraining import SMALL
from tests.harness.distributed import distributed, run_distributed
from tests.harness.tolerances import (
    EXACT,
    FP32_AFTER_OPTIMIZER,
    FP32_REORDERED_SUM,
    assert_close,
)
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.training_case import assemble, train
from tests.parity.training_run import read_metrics, train_with_flags

MUON = {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "muon_use_nesterov": True}
RULES: dict[str, dict[str, Any]] = {
    "muon": MUON,
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.8},
}
LLAMA = ModelCase("llama", True, 0.0)

LAYOUTS = [
    (LayoutCase(tp=2, sp=True), {}),
    (LayoutCase(pp=2, vp=2), {}),
    (LayoutCase(tp=2, dp=2, stage=1), {}),
]


@pytest.fixture(scope="module")
def serial_muon():
    """Five steps of Muon on one rank."""
    return assemble(run_distributed(train, 1, LayoutCase(), LLAMA, MUON))


@pytest.mark.parametrize(("layout", "mode"), LAYOUTS, ids=str)
def test_muon_is_that_of_one_process(layout: LayoutCase, mode, serial_muon) -> None:
    axes = {"tp": layout.tp, "pp": layout.pp} | ({"vp": layout.vp} if layout.vp > 1 else {})
    run = assemble(run_distributed(train, layout.world_size, layout, LLAMA, MUON | mode, **axes))
    assert_close(run.losses, serial_muon.losses, FP32_REORDERED_SUM, "losses")
    assert_close(run.grad_norms, serial_muon.grad_norms, FP32_AFTER_OPTIMIZER, "norms")
    for name, expected in serial_muon.weights.items():
        assert_close(run.weights[name], expected, FP32_AFTER_OPTIMIZER, name)


FACTS = {
    "qkv": ((24, 10), ParamMeta(split_dim=0, split_axis="tp", fused_row_sizes=(6, 3, 3))),
    "gated": ((32, 6), ParamMeta(split_dim=0, split_axis="tp", stride=2)),
    "row": ((10, 24), ParamMeta(split_dim=1, split_axis="tp")),
    "whole": ((7, 9), ParamMeta()),
}


def split_weights(groups, **settings: Any) -> dict[str, torch.Tensor]:
    """Update this rank's parts of four matrices by Muon, and return them."""
    rank, size = groups.tp.rank(), groups.tp.size()
    model = nn.Module()
    for name, (shape, facts) in FACTS.items():
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        parameter = nn.Parameter(shard_of(whole, facts, rank, size).clone())
        set_param_meta(parameter, facts)
        model.register_parameter(name, parameter)
    config = OptimizerConfig(**MUON, lr=0.1, **settings)
    optimizer = get_megatron_optimizer(config, [model], pg_collection=groups)
    for step in range(3):
        for name, (shape, facts) in FACTS.items():
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            model.get_parameter(name).grad = shard_of(gradient, facts, rank, size).clone()
        assert optimizer.step()[0]
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@distributed(world_size=4, tp=4)
def test_matrices_that_are_cut_anywhere_are_updated_as_wholes(groups) -> None:
    # The cuts fall inside of query groups: q, k and v rows are unevenly on the ranks.
    expected = split_weights(ProcessGroupCollection.single())
    for mode in ("duplicated", "distributed"):
        found = split_weights(groups, muon_tp_mode=mode)
        for name, (_, facts) in FACTS.items():
            mine = shard_of(expected[name], facts, groups.tp.rank(), 4)
            assert_close(found[name], mine, FP32_REORDERED_SUM, f"{name} {mode}")


@distributed(world_size=2, tp=2)
def test_blockwise_muon_takes_parts_as_matrices(groups) -> None:
    found = split_weights(groups, muon_tp_mode="blockwise")
    whole = split_weights(ProcessGroupCollection.single())
    assert_close(found["whole"], whole["whole"], FP32_AFTER_OPTIMIZER, "an unsplit matrix")
    mine = shard_of(whole["row"], FACTS["row"][1], groups.tp.rank(), 2)
    assert (found["row"] - mine).abs().max() > 1e-3


@pytest.mark.parametrize("rule", ["lion", "sgd"])
def test_other_rules_are_those_of_one_process(rule: str) -> None:
    settings = RULES[rule] | {"lr": 2e-4}
    expected = assemble(run_distributed(train, 1, LayoutCase(), LLAMA, settings))
    layout = LayoutCase(pp=2, dp=2, stage=1)
    run = assemble(run_distributed(train, 4, layout, LLAMA, settings, pp=2))
    assert_close(run.losses, expected.losses, FP32_REORDERED_SUM, "losses")
    assert_close(run.grad_norms, expected.grad_norms, FP32_AFTER_OPTIMIZER, "norms")


WAYS: list[dict[str, Any]] = [
    {"use_distributed_optimizer": True, "bucket_size": 700, "overlap_param_gather": True},
    {"data_parallel_sharding_strategy": "optim_grads", "bucket_size": 3000},
    {"data_parallel_sharding_strategy": "optim_grads_params"},
]


def weights_after(groups, rule: str, **way: Any) -> dict[str, torch.Tensor]:
    ddp = wrap(groups, **way)
    optimizer = build(groups, [ddp], **RULES[rule])
    for step in range(4):
        accumulate(ddp, groups, step, 1)
        assert optimizer.step()[0]
    return ddp.state_dict()


@distributed(world_size=(2, 4))
def test_every_rung_gives_the_same_bits(groups) -> None:
    # On four ranks some own nothing of some matrices, and matrices are on up to four of them.
    for rule in RULES:
        plain = weights_after(groups, rule)
        for way in WAYS:
            for name, tensor in weights_after(groups, rule, **way).items():
                assert_close(tensor, plain[name], EXACT, f"{name} {rule} {way}")


def state_numel(groups, rule: str) -> int:
    """Return the elements of optimizer state of this rank after a step."""
    run = Run(groups, Layout(dp=groups.dp.size(), zero=1), Model(), optimizer=RULES[rule])
    run.train(1)
    return sum(
        tensor.numel()
        for entry in run.optimizer.state.values()
        for tensor in entry.values()
        if tensor.dim()
    )


def test_muon_state_is_sharded_as_any_other() -> None:
    whole = run_distributed(state_numel, 1, "muon")[0]
    parts = run_distributed(state_numel, 4, "muon")
    assert sum(parts) == whole
    # A bucket ends with padding: ranks differ by less than a bucket's share.
    assert max(parts) < 0.4 * whole


@pytest.mark.parametrize("rule", ["muon", "lion"])
def test_a_stopped_run_goes_on_to_the_bit(rule: str, tmp_path) -> None:
    layout, steps = Layout(dp=2, zero=1), [2, 2]
    jobs = {"stopped": steps, "unbroken": [sum(steps)]}
    losses = [
        run_distributed(
            resume_and_train, 2, layout, Model(), tmp_path / name, stops, False, RULES[rule]
        )
        for name, stops in jobs.items()
    ]
    assert losses[0] == losses[1]


def test_flags_choose_rule_and_settings_by_name(tmp_path) -> None:
    words = [*SMALL.split(), "--hidden-dropout", "0", "--attention-dropout", "0"]
    muon = ["--optimizer", "muon", "--muon-extra-scale-factor", "0.2", "--muon-use-nesterov"]
    rules = ["--param-rules", "*.mlp.*.weight:lr_mult=0.5,wd_mult=0", "*.bias:optimizer=lion"]
    found = {}
    for flags in ([], ["--use-distributed-optimizer"]):
        path = tmp_path / f"{len(flags)}.jsonl"
        line = [*words, *muon, *rules, *flags, "--metrics-jsonl", str(path)]
        run_distributed(train_with_flags, 2, line, timeout_s=120.0)
        found[len(flags)] = [metrics["lm loss"] for metrics in read_metrics(path)]
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]
