"""Optimizer state is stored by parameter: it continues in any layout, to the bit."""

import pytest
import torch
from torch import nn

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import sharded_tensor_for_parameter
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
)
from megatron.core.foundation.errors import CheckpointError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, set_param_meta, shard_of
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.distributed.distributed.replicas import CONFIG, wrap
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import EXACT, FP32_AFTER_OPTIMIZER, FP32_ROUNDED_ONCE, assert_close

METAS = {
    "column": ParamMeta(split_dim=0, split_axis="tp"),
    "row": ParamMeta(split_dim=1, split_axis="tp"),
    "gated": ParamMeta(split_dim=0, split_axis="tp", stride=2),
    "norm": ParamMeta(),
    "cube": ParamMeta(split_dim=1, split_axis="tp"),
}
SHAPES = {
    "column": (24, 50),
    "row": (30, 48),
    "gated": (32, 20),
    "norm": (333,),
    "cube": (3, 8, 40),
}


class Layers(nn.Module):
    """Parameters split in every way there is; their gradient is a function of the element."""

    def __init__(self, groups, dtype):
        super().__init__()
        self.groups = groups
        generator = torch.Generator().manual_seed(4)
        for name, shape in SHAPES.items():
            setattr(self, name, self._place(name, torch.randn(shape, generator=generator), dtype))
            target = torch.randn(shape, generator=generator)
            self.register_buffer(
                f"{name}_target", self._place(name, target, dtype).detach(), persistent=False
            )

    def _place(self, name, full, dtype):
        rank, size = self.groups.tp.rank(), self.groups.tp.size()
        parameter = nn.Parameter(shard_of(full, METAS[name], rank, size).to(dtype).clone())
        set_param_meta(parameter, METAS[name])
        return parameter

    def forward(self, step):
        return sum(
            ((p - getattr(self, f"{name}_target")) * (1 + step)).float().square().sum()
            for name, p in self.named_parameters()
        )

    def sharded_state_dict(self):
        groups = self.groups
        return {
            name: sharded_tensor_for_parameter(
                name,
                parameter,
                get_param_meta(parameter),
                tp_rank=groups.tp.rank(),
                tp_size=groups.tp.size(),
                dp_replica=groups.dp_cp.rank(),
            )
            for name, parameter in self.named_parameters()
        }


def build(groups, way, dtype, *, is_trained=True):
    """Wrap the layers; `way` is a sharding strategy, or "torch" for FSDP2."""
    model = Layers(groups, dtype).requires_grad_(is_trained)
    if way == "torch":
        ddp = TorchFullyShardedDataParallel(
            CONFIG, DistributedDataParallelConfig(), model, pg_collection=groups
        )
    else:
        ddp = wrap(
            groups,
            model=model,
            grad_reduce_in_fp32=True,
            data_parallel_sharding_strategy=way,
            bucket_size=1000,
        )
    config = OptimizerConfig(
        lr=0.05,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=ddp.ddp_config.use_distributed_optimizer,
    )
    return ddp, get_megatron_optimizer(config, [ddp], pg_collection=groups)


def step(ddp, optimizer, number):
    ddp.zero_grad_buffer()
    ddp(number).backward()
    ddp.finish_grad_sync()
    optimizer.step()


def declared(ddp, optimizer):
    model = ddp.sharded_state_dict()
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model)}


def train_and_save(groups, way, dtype, directory):
    ddp, optimizer = build(groups, way, dtype)
    for number in range(3):
        step(ddp, optimizer, number)
    dist_checkpointing.save(declared(ddp, optimizer), directory)


def load_and_train(groups, way, dtype, source, directory):
    ddp, optimizer = build(groups, way, dtype)
    loaded = dist_checkpointing.load(declared(ddp, optimizer), source, strict="raise_all")
    ddp.load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    for number in range(3, 5):
        step(ddp, optimizer, number)
    dist_checkpointing.save(declared(ddp, optimizer), directory)


LAYOUTS = {
    torch.float32: [
        (1, {}, "no_shard"),
        (4, {"tp": 2}, "optim"),
        (3, {}, "optim_grads_params"),
        (2, {"tp": 2}, "no_shard"),
        (3, {}, "torch"),
        (4, {"tp": 2}, "optim_grads_params"),
        (4, {"tp": 2}, "torch"),
    ],
    torch.bfloat16: [
        (1, {}, "no_shard"),
        (4, {}, "optim"),
        (4, {"tp": 2}, "optim_grads_params"),
        (2, {"tp": 2}, "no_shard"),
    ],
}
"""(ranks, axes, what is sharded): each is loaded by the next."""


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_goes_on_from_any_other(tmp_path, dtype):
    layouts = LAYOUTS[dtype]
    for number, (size, layout, way) in enumerate(layouts):
        source = tmp_path / f"from{number}"
        run_distributed(train_and_save, size, way, dtype, source, **layout)
        goal, goal_layout, goal_way = layouts[(number + 1) % len(layouts)]
        result = tmp_path / f"to{number}"
        run_distributed(load_and_train, goal, goal_way, dtype, source, result, **goal_layout)
        # A mean over three equal gradients is rounded; over one, two or four it is not. torch's
        # shards are rows, not blocks: its elements meet other lanes of the vector kernel.
        is_rounded = 3 in (size, goal) or "torch" in (way, goal_way)
        tolerance = FP32_AFTER_OPTIMIZER if is_rounded else EXACT
        for before, directory in (("from0", source), ("to0", result)):
            expected = dist_checkpointing.load_plain_tensors(tmp_path / before)
            found = dist_checkpointing.load_plain_tensors(directory)
            assert set(found) == set(expected)
            for key, tensor in expected.items():
                assert_close(found[key], tensor, tolerance, f"{key} in {directory.name}")
    keys = {key for key in expected if key.endswith("gated")}
    states = {"exp_avg", "exp_avg_sq"} | ({"fp32_param"} if dtype == torch.bfloat16 else set())
    assert keys == {"gated"} | {f"optimizer.state.{state}.gated" for state in states}


def test_a_parameter_that_the_model_did_not_declare_is_named():
    groups = ProcessGroupCollection.single()
    ddp, optimizer = build(groups, "no_shard", torch.float32)
    model = ddp.sharded_state_dict()
    del model["row"]
    with pytest.raises(CheckpointError, match="no declaration of parameter row"):
        optimizer.sharded_state_dict(model)


def test_a_run_that_has_not_begun_can_be_saved_and_loaded(tmp_path):
    groups = ProcessGroupCollection.single()
    ddp, optimizer = build(groups, "no_shard", torch.float32)
    dist_checkpointing.save(declared(ddp, optimizer), tmp_path / "start")
    other, other_optimizer = build(groups, "no_shard", torch.float32)
    step(other, other_optimizer, 0)
    loaded = dist_checkpointing.load(declared(other, other_optimizer), tmp_path / "start")
    other_optimizer.load_state_dict(loaded["optimizer"])
    for run in ((ddp, optimizer), (other, other_optimizer)):
        step(*run, 0)
    for name, weight in ddp.state_dict().items():
        assert_close(other.state_dict()[name], weight, FP32_ROUNDED_ONCE, name)


def train_the_second_stage_and_save(groups, directory):
    """Rank 0 holds frozen weights only: its optimizer has no shard to count updates with."""
    is_trained = groups.pp.rank() == 1
    ddp, optimizer = build(groups, "no_shard", torch.float32, is_trained=is_trained)
    assert bool(optimizer.shards) == is_trained
    for number in range(3):
        if is_trained:
            step(ddp, optimizer, number)
        else:
            ddp.finish_grad_sync()
            optimizer.step()
    model = ddp.sharded_state_dict() if is_trained else {}
    state = {"model": model, "optimizer": optimizer.sharded_state_dict(model)}
    dist_checkpointing.save(state, directory)


@pytest.mark.distributed
def test_the_number_of_updates_is_stored_although_rank_0_updates_nothing(tmp_path):
    run_distributed(train_the_second_stage_and_save, 2, tmp_path / "c", pp=2)
    ddp, optimizer = build(ProcessGroupCollection.single(), "no_shard", torch.float32)
    loaded = dist_checkpointing.load(declared(ddp, optimizer), tmp_path / "c")
    optimizer.load_state_dict(loaded["optimizer"])
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {3}
    step(ddp, optimizer, 3)
    assert optimizer.num_updates == 4


def test_other_groups_of_parameters_than_in_the_checkpoint_are_refused():
    ddp, optimizer = build(ProcessGroupCollection.single(), "no_shard", torch.float32)
    state = optimizer.sharded_state_dict(ddp.sharded_state_dict())
    state["param_groups"].append(state["param_groups"][0])
    with pytest.raises(CheckpointError, match="3 parameter groups, this run has 2") as caught:
        optimizer.load_state_dict(state)
    assert "--no-load-optim" in caught.value.flags
