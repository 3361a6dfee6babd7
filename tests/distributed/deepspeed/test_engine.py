"""The engine on two replicas against one process without it."""

import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist

from megatron_lattice import deepspeed
from megatron_lattice.deepspeed import zero
from tests.distributed.deepspeed.serial import (
    ACCUMULATION,
    LEARNING_RATE,
    MICRO,
    STEPS,
    Model,
    loss_of,
    micro_batch,
    settings,
    train,
    train_serially,
)
from tests.harness.distributed import distributed, run_distributed
from tests.harness.tolerances import FP32_AFTER_OPTIMIZER, FP32_REORDERED_SUM, assert_close


def start(stage, optimizer=None, **more):
    model = Model()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the first process decides
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings(stage, **more)
    )
    return engine


def assert_weights(engine, expected):
    state = engine.state_dict()
    for name, weight in expected.items():
        assert_close(state[name], weight, FP32_AFTER_OPTIMIZER, what=name)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_norms_and_weights_are_those_of_one_process(groups, stage):
    losses, norms, weights = train_serially()
    engine = start(stage)
    found_losses, found_norms = train(engine, dist.get_rank())
    if dist.get_rank() == 0:
        assert_close(torch.tensor(found_losses), torch.tensor(losses), FP32_REORDERED_SUM, "losses")
    assert_close(torch.tensor(found_norms), torch.tensor(norms), FP32_REORDERED_SUM, "norms")
    assert_weights(engine, weights)
    counts = (STEPS * ACCUMULATION, STEPS, STEPS * 2 * MICRO * ACCUMULATION)
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == counts


@distributed(world_size=4)
def test_shard_groups_of_two_among_four_replicas(groups):
    _, norms, weights = train_serially(replicas=4)
    engine = start(3, zero_optimization={"stage": 3, "mics_shard_size": 2})
    _, found = train(engine, dist.get_rank())
    assert_close(torch.tensor(found), torch.tensor(norms), FP32_REORDERED_SUM, "norms")
    assert_weights(engine, weights)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_optimizer_of_the_caller_and_plain_backward(groups, stage):
    def make(parameters):
        return torch.optim.RMSprop(parameters, lr=1e-3, eps=1e-3, momentum=0.9)

    _, _, weights = train_serially(make)
    engine = start(stage, optimizer=make)
    for step in range(STEPS):
        for number in range(ACCUMULATION):
            loss_of(engine, micro_batch(step, number, dist.get_rank())).backward()
            engine.step()
    assert_weights(engine, weights)


@distributed(world_size=2)
def test_groups_of_the_caller_keep_their_rates_and_their_schedule(groups):
    model = Model()
    table = [model.table.weight]
    rest = [p for p in model.parameters() if p is not model.table.weight]
    client = torch.optim.AdamW([{"params": table, "lr": 0.0}, {"params": rest}], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.StepLR(client, step_size=1, gamma=0.5)
    before = model.table.weight.detach().clone()
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=client, lr_scheduler=schedule, config=settings(1)
    )
    train(engine, dist.get_rank(), steps=range(1))
    assert engine.get_lr() == [0.0, LEARNING_RATE / 2]
    assert scheduler is schedule
    assert torch.equal(engine.state_dict()["table.weight"], before)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_whole_values_of_what_is_sharded(groups, stage):
    engine = start(stage, bf16={"enabled": True})
    parameter = engine.module.middle[0].weight
    train(engine, dist.get_rank(), steps=range(1))
    master = zero.safe_get_full_fp32_param(parameter)
    assert torch.equal(master.bfloat16(), engine.state_dict()["middle.0.weight"])
    moment = zero.safe_get_full_optimizer_state(parameter, "exp_avg")
    assert moment.shape == parameter.shape and moment.abs().max() > 0
    with zero.GatheredParameters(parameter, modifier_rank=1):
        if dist.get_rank() == 1:
            parameter.data.fill_(0.5)
    assert torch.equal(zero.safe_get_full_fp32_param(parameter), torch.full_like(master, 0.5))
    assert float(engine.state_dict()["middle.0.weight"].float().mean()) == 0.5


HOST = {"device": "cpu"}
OFFLOADED = {
    2: {"stage": 2, "offload_optimizer": HOST},
    3: {"stage": 3, "offload_optimizer": HOST, "offload_param": {**HOST, "pin_memory": True}},
}


def start_in_half(precision, zero_optimization):
    more = {precision: {"enabled": True}, "zero_optimization": zero_optimization}
    return start(0, **more)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", OFFLOADED)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_offload_to_the_host_changes_no_bit(groups, precision, stage):
    runs = []
    for zero_optimization in ({"stage": stage}, OFFLOADED[stage]):
        engine = start_in_half(precision, zero_optimization)
        runs.append((*train(engine, dist.get_rank()), engine.state_dict()))
    (losses, norms, weights), (same_losses, same_norms, same_weights) = runs
    assert (losses, norms) == (same_losses, same_norms)
    assert_weights_are_bits(same_weights, weights)


def assert_weights_are_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def save_offloaded(groups, precision, directory):
    engine = start_in_half(precision, OFFLOADED[3])
    train(engine, dist.get_rank(), steps=range(2))
    engine.save_checkpoint(directory)
    return engine.state_dict()


def load_offloaded(groups, precision, stage, directory):
    engine = start_in_half(precision, OFFLOADED[stage])
    engine.load_checkpoint(directory)
    weights = {name: weight.clone() for name, weight in engine.state_dict().items()}
    train(engine, dist.get_rank(), steps=range(2, 3))
    return weights


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_offloaded_resumes_on_any_number_of_ranks(precision, tmp_path):
    saved = run_distributed(save_offloaded, 2, precision, str(tmp_path))[0]
    for stage, replicas in ((3, 1), (2, 3)):
        found = run_distributed(load_offloaded, replicas, precision, stage, str(tmp_path))
        for weights in found:
            assert_weights_are_bits(weights, saved)


@distributed(world_size=2)
def test_problem_of_a_configuration_is_raised_on_all_ranks(groups):
    mine = {"train_batch_sizes": 3} if dist.get_rank() == 1 else {}
    with pytest.raises(deepspeed.ConfigError, match="did you mean train_batch_size"):
        deepspeed.initialize(model=Model(), config=mine)


def save(groups, stage, directory):
    engine = start(stage, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    train(engine, dist.get_rank(), steps=range(2))
    engine.save_checkpoint(directory, client_state={"epoch": 3, "best": (1.5, "x")})
    engine.save_16bit_model(directory)
    losses, norms = train(engine, dist.get_rank(), steps=range(2, 3))
    return losses, norms, engine.get_lr()


def resume(groups, stage, directory, replicas):
    more = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}
    engine = start(stage, **more)
    path, client_state = engine.load_checkpoint(directory)
    assert path.endswith("global_step2")
    assert client_state == {"epoch": 3, "best": (1.5, "x")}
    assert engine.global_steps == 2
    if replicas == 1:
        return None
    losses, norms = train(engine, dist.get_rank(), steps=range(2, 3))
    return losses, norms, engine.get_lr()


def test_checkpoint_resumes_at_any_stage_on_any_number_of_ranks():
    directory = tempfile.mkdtemp()
    try:
        saved = run_distributed(save, 2, 3, directory)
        for stage, replicas in ((3, 2), (1, 2), (2, 1)):
            found = run_distributed(resume, replicas, stage, directory, replicas)
            if replicas == 2:
                for one, other in zip(found, saved, strict=True):
                    for ours, theirs in zip(one, other, strict=True):
                        assert ours == pytest.approx(theirs, rel=FP32_REORDERED_SUM.rtol)
    finally:
        shutil.rmtree(directory)


@distributed(world_size=4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_checkpoint_without_its_frozen_part_leaves_that_part_as_it_is(groups, stage):
    """As `load_state_dict(strict=False)` of torch does; three of four ranks hold no shard of it."""

    def start_frozen():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2, bias=False))
        model[0].requires_grad_(False)
        config = settings(stage, gradient_accumulation_steps=1)
        return deepspeed.initialize(model=model, config=config)[0]

    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    first = start_frozen()
    first.backward(first(torch.ones(2, 4)).sum())
    first.step()
    first.save_checkpoint(box[0], exclude_frozen_parameters=True)
    saved, second = first.state_dict(), start_frozen()
    expected = second.state_dict() | {"1.weight": saved["1.weight"]}
    assert not torch.equal(expected["0.weight"], saved["0.weight"])
    second.load_checkpoint(box[0], load_module_strict=False)
    for name, weight in second.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert second.global_steps == 1
