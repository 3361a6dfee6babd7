"""FSDP2 behind our wrapper trains as replicas do, and declares its state by parameter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.foundation.errors import CheckpointError, ConfigError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.initialization import parameters_without_memory
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.parameters.rng import rng_state
from megatron.training.metrics.params_norm import params_norm
from tests.harness.distributed import distributed
from tests.harness.tolerances import (
    FP32_AFTER_OPTIMIZER,
    FP32_REORDERED_SUM,
    assert_close,
)
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import assert_equals_one_process
from tests.parity.training_case import build_chunks, global_batch, transformer_config


def train(groups, layout, model, wrapper, num_microbatches=2, **changes):
    """Train three steps; return (losses, norms, weights, wrapped model, optimizer)."""
    rng_state().set_seed(7)
    config = replace(transformer_config(layout, model), **changes)
    with parameters_without_memory():
        (chunk,) = build_chunks(config, model, layout, groups)
    ddp = wrapper(config, DistributedDataParallelConfig(), chunk, pg_collection=groups)
    optimizer_config = OptimizerConfig(lr=1e-3, adam_eps=1e-5, clip_grad=0.5, weight_decay=0.1)
    optimizer = get_megatron_optimizer(optimizer_config, [ddp], pg_collection=groups)
    rank, size = groups.dp.rank(), groups.dp.size()
    losses, norms = [], []
    for step in range(3):
        batch = global_batch(step, 8)
        rng_state().begin_step(8 * step, micro_batch_size=2, dp_rank=rank, dp_size=size)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for index in range(num_microbatches):
            rows = slice(2 * (index * size + rank), 2 * (index * size + rank) + 2)
            rng_state().set_microbatch(index)
            loss = ddp(batch["tokens"][rows], None, None, labels=batch["labels"][rows]).mean()
            (loss / num_microbatches).backward()
            losses.append(float(loss.detach()))
        finalize_model_grads([ddp], pg_collection=groups)
        ok, norm, _ = optimizer.step()
        assert ok
        norms.append(norm)
    return losses, norms, ddp.state_dict(), ddp, optimizer


def check_equal_to_replicas(groups, layout, **changes):
    for model in (ModelCase("gpt2", True, 0.0), ModelCase("llama", False, 0.1)):
        plain = train(groups, layout, model, DistributedDataParallel, **changes)
        sharded = train(groups, layout, model, TorchFullyShardedDataParallel, **changes)
        for step, (ours, expected) in enumerate(zip(sharded[0], plain[0], strict=True)):
            assert_close(ours, expected, FP32_AFTER_OPTIMIZER, f"loss {step}")
        assert_close(sharded[1], plain[1], FP32_REORDERED_SUM, f"norms {model}")
        for name, expected in plain[2].items():
            if isinstance(expected, torch.Tensor):
                assert_close(sharded[2][name], expected, FP32_AFTER_OPTIMIZER, name)


@distributed(world_size=2)
def test_two_ranks_train_as_replicas(groups):
    check_equal_to_replicas(groups, LayoutCase(dp=2))


@distributed(world_size=2)
def test_layers_read_the_keys_of_the_last_layer_that_has_any(groups):
    check_equal_to_replicas(groups, LayoutCase(dp=2), num_kv_shared_layers=1)


@distributed(world_size=4, tp=2)
def test_it_composes_with_tensor_and_sequence_parallelism(groups):
    check_equal_to_replicas(groups, LayoutCase(tp=2, sp=True, dp=2))


@distributed(world_size=2)
def test_an_evaluation_leaves_parameters_sharded(groups):
    layout, model = LayoutCase(dp=2), ModelCase("gpt2", True, 0.0)
    *_, ddp, _ = train(groups, layout, model, TorchFullyShardedDataParallel)
    trained, batch = list(ddp.parameters()), global_batch(0, 2)
    ddp.eval()
    with torch.no_grad():
        ddp(batch["tokens"], None, None, labels=batch["labels"])
    assert all(now is before for now, before in zip(ddp.parameters(), trained, strict=True))
    assert ddp.sharded_state_dict(), "which knows parameters by themselves"


@distributed(world_size=2)
def test_frozen_parameters_are_sharded_and_count_in_the_norm_of_all(groups):
    layout, model = LayoutCase(dp=2), ModelCase("llama", False, 0.0)
    config = transformer_config(layout, model)
    (chunk,) = build_chunks(config, model, layout, groups)
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_("linear_fc1" in name)
    expected, total = params_norm([chunk], groups), sum(p.numel() for p in chunk.parameters())
    settings = DistributedDataParallelConfig()
    ddp = TorchFullyShardedDataParallel(config, settings, chunk, pg_collection=groups)
    assert_close(params_norm([ddp], groups), expected, FP32_REORDERED_SUM, "norm")
    held = sum(values.numel() for own in ddp.sharded_values().values() for values in own)
    assert abs(held - total / 2) < 0.01 * total


DROPLESS = ModelCase("llama", True, 0.0, experts="dropless")
PER_TOKEN = ModelCase("gpt2", False, 0.1, experts="capacity")
PREDICTING = ModelCase("latent", False, 0.0, experts="deepseek", later_tokens=1)
FSDP2 = [
    (LayoutCase(tp=2), ModelCase("llama", True, 0.1)),  # one replica
    (LayoutCase(dp=2, ep=2), DROPLESS),  # one holder of each expert
    (LayoutCase(dp=4, ep=2, grouped=False), DROPLESS),
    (LayoutCase(cp=2, dp=2, ep=2, recomputes=True), PER_TOKEN),
    (LayoutCase(tp=2, dp=2, ep=2, expt_tp=2), PER_TOKEN),
    (LayoutCase(dp=4, ep=2, expt_tp=2), PREDICTING),
    (LayoutCase(tp=2, sp=True), DROPLESS),  # each expert on two ranks of one replica
    (LayoutCase(tp=2, sp=True, dp=2), PREDICTING),
]


@pytest.mark.parametrize(
    ("layout", "model"),
    [(replace(layout, fsdp2=True), model) for layout, model in FSDP2],
    ids=[f"{model}: {layout}" for layout, model in FSDP2],
)
def test_experts_on_other_ranks_than_the_rest_equal_one_process(layout, model):
    assert_equals_one_process(layout, model)


class MixedLayer(torch.nn.Module):
    """Holds an expert's parameter beside one that is none."""

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Parameter(torch.ones(4))
        self.expert = torch.nn.Parameter(torch.ones(4))
        set_param_meta(self.expert, ParamMeta(is_expert=True))


@distributed(world_size=2, ep=2)
def test_experts_that_torch_cannot_tell_from_the_rest_are_refused(groups):
    settings = DistributedDataParallelConfig()
    with pytest.raises(ConfigError, match="MixedLayer has parameters of experts and other"):
        TorchFullyShardedDataParallel(
            SimpleNamespace(), settings, MixedLayer(), pg_collection=groups
        )


@distributed(world_size=2)
def test_every_rank_declares_and_updates_its_range_of_each_parameter(groups):
    model = ModelCase("llama", False, 0.0)
    *_, ddp, optimizer = train(groups, LayoutCase(dp=2), model, TorchFullyShardedDataParallel)
    state = {"model": ddp.sharded_state_dict()}
    declared = optimizer.sharded_state_dict(state)["state"]
    elements = torch.zeros(2, dtype=torch.int64)
    for declaration in state["model"].values():
        if isinstance(declaration, ShardedTensor):
            elements[0] += declaration.data.numel()
    for tensors in declared.values():
        if isinstance(tensors, dict):
            moment = tensors["exp_avg"]
            elements[1] += getattr(moment, "data", moment).numel()
    dist.all_reduce(elements)
    assert int(elements[1]) == sum(p.numel() for p in ddp.module.parameters())
    for name, tensor in ddp.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert not bool(tensor.isnan().any()), name


@distributed(world_size=2)
def test_a_rank_without_memory_for_whole_tensors_stops_all_before_torch_gathers(groups):
    ddp = TorchFullyShardedDataParallel(
        SimpleNamespace(),
        DistributedDataParallelConfig(),
        torch.nn.Linear(4, 4),
        pg_collection=groups,
    )

    def fail(_):
        raise MemoryError("no memory")

    reserve = ddp._reserve
    if groups.dp.rank() == 1:
        ddp._reserve = fail
    with pytest.raises(CheckpointError, match="rank 1: .*no memory"):
        ddp.state_dict()
    with pytest.raises(CheckpointError, match="rank 1: .*no memory"), ddp.summon_full_params():
        pass
    ddp._reserve = reserve
    assert ddp.state_dict()["weight"].shape == (4, 4)


@distributed(world_size=2, pp=2)
def test_pipelines_and_turns_are_refused(groups):
    config = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    with pytest.raises(ConfigError, match="(?s)pipeline of 2 stages.*overlap"):
        TorchFullyShardedDataParallel(
            config, DistributedDataParallelConfig(), torch.nn.Linear(2, 2), pg_collection=groups
        )
