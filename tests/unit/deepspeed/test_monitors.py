"""The engine writes what a configuration asks for: scalars, times, operations; and its names."""

import csv
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.core.foundation.errors import CheckpointError
from megatron_lattice import deepspeed
from megatron_lattice.deepspeed.flags import read_deepspeed_config
from tests.harness.tolerances import EXACT, assert_close
from tests.unit.dist_checkpointing.interop import interop_files as foreign

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9]}}


def start(**config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, **config}
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine, steps=2):
    losses = []
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.ones(2, 4)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def rows(path):
    with path.open() as file:
        return list(csv.reader(file))


def test_csv_files_hold_the_mean_loss_of_each_step_by_samples(tmp_path, capsys):
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    engine = start(csv_monitor=monitor, gradient_accumulation_steps=2)
    assert f"scalars are written to csv_monitor: {tmp_path}/run" in capsys.readouterr().out
    losses = train(engine)
    engine.monitor.write_events([("mine/x", torch.tensor(3.0), 8)])
    head, *found = rows(tmp_path / "run" / "Train_Samples_train_loss.csv")
    assert head == ["step", "Train/Samples/train_loss"]
    assert [int(step) for step, _ in found] == [4, 8]
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    assert [float(value) for _, value in found] == pytest.approx(means)
    assert rows(tmp_path / "run" / "Train_Samples_lr.csv")[1] == ["4", "0.01"]
    assert rows(tmp_path / "run" / "mine_x.csv")[1] == ["8", "3.0"]


def test_tensorboard_gets_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    engine = start(tensorboard=monitor, fp16={"enabled": False}, wall_clock_breakdown=True)
    losses = train(engine)
    engine.destroy()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    found = events.Scalars("Train/Samples/train_loss")
    assert [event.step for event in found] == [2, 4]
    assert [event.value for event in found] == pytest.approx(losses)
    assert "Train/Samples/elapsed_time_ms_backward" in events.Tags()["scalars"]


def test_wandb_gets_the_scalars_of_a_step_together(monkeypatch):
    calls = []
    fake = SimpleNamespace(
        init=lambda **options: calls.append(options),
        log=lambda values, step: calls.append((step, sorted(values))),
        finish=lambda: calls.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    engine = start(wandb={"enabled": True, "project": "p", "team": "t"})
    train(engine, 1)
    engine.destroy()
    assert calls == [
        {"project": "p", "group": None, "entity": "t"},
        (2, ["Train/Samples/lr", "Train/Samples/train_loss"]),
        "finished",
    ]


def test_a_breakdown_prints_the_share_of_each_part(capsys):
    engine = start(wall_clock_breakdown=True, steps_per_print=2)
    capsys.readouterr()
    train(engine, 4)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time (ms)")]
    assert len(lines) == 2
    for part in ("forward", "backward", "reduce", "step"):
        assert f"| {part}: " in lines[0]
    shares = [int(share) for share in re.findall(r"\((\d+) %\)", lines[0])]
    assert sum(shares) == pytest.approx(100, abs=2)


def test_nothing_is_timed_or_written_unless_asked_for(capsys):
    engine = start()
    train(engine)
    assert not engine.monitor.enabled
    assert engine._times.take() == dict.fromkeys(("forward", "backward", "reduce", "step"), 0.0)
    assert "time (ms)" not in capsys.readouterr().out


def test_the_flops_profiler_counts_products_module_by_module(tmp_path, capsys):
    file = tmp_path / "flops.txt"
    engine = start(flops_profiler={"enabled": True, "profile_step": 2, "output_file": str(file)})
    train(engine, 1)
    assert not file.exists()
    train(engine, 1)
    text = file.read_text()
    # 2 rows: 2 * 2 * 4 * 5 and 2 * 2 * 5 * 2.
    assert "forward operations:        120" in text
    assert "0: 80 (66.7 %)" in text
    assert str(file) in capsys.readouterr().out


def test_a_profile_of_any_model_gives_numbers():
    from megatron_lattice.deepspeed.profiling.flops_profiler import get_model_profile

    model = nn.Linear(4, 5)
    found = get_model_profile(model, input_shape=(2, 4), as_string=False, print_profile=False)
    assert found == (80, 40, 25)


def test_pretraining_with_a_file_writes_where_the_file_says(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"tensorboard": {"enabled": true, "output_path": "out", "job_name": "x"},'
        ' "wandb": {"enabled": true, "team": "t"}, "wall_clock_breakdown": true}'
    )
    values, _ = read_deepspeed_config(str(file), {})
    assert values["tensorboard_dir"] == "out/x"
    assert (values["wandb_project"], values["wandb_entity"]) == ("deepspeed", "t")
    assert values["timing_log_level"] == 2


def test_the_engine_answers_what_scripts_ask():
    engine = start(steps_per_print=7, fp16={"enabled": False})
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (0, 1, 1)
    assert engine.steps_per_print() == 7
    assert engine.get_batch_info() == (2, 2, 1)
    assert engine.dynamic_loss_scale() is False
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5]
    loader = engine.deepspeed_io(torch.arange(8.0))
    assert [len(batch) for batch in loader] == [2, 2, 2, 2]
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.allreduce_gradients()
    engine.empty_partition_cache()
    engine.step()
    assert engine.was_step_applied()


def test_offloaded_state_shows_its_betas_and_follows_a_schedule_of_them():
    cycle = {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2},
    }
    weights = []
    for offload in ({}, {"offload_optimizer": {"device": "cpu"}}):
        engine = start(zero_optimization={"stage": 2, **offload}, scheduler=cycle)
        assert engine.get_mom()[0][1] == 0.9
        seen = [engine.get_mom()[0][0]]
        for _ in range(3):
            train(engine, 1)
            seen.append(engine.get_mom()[0][0])
        assert len(set(seen)) > 1
        weights.append((seen, engine.state_dict()["0.weight"].clone()))
    (plain_mom, plain), (offloaded_mom, offloaded) = weights
    assert plain_mom == offloaded_mom
    assert_close(offloaded, plain, EXACT, "weights")


def test_auto_is_printed_as_the_value_it_becomes(capsys):
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"},
    }
    start(optimizer=optimizer, scheduler=scheduler)
    said = capsys.readouterr().out
    assert 'optimizer.params.betas: "auto" -> [0.9, 0.999]' in said
    assert 'scheduler.params.warmup_num_steps: "auto" -> 1000' in said
    assert 'scheduler.params.warmup_max_lr: "auto" -> the optimizer\'s' in said
    assert "None" not in said


def test_whole_fp32_weights_come_from_a_checkpoint(tmp_path):
    from megatron_lattice.deepspeed.utils import zero_to_fp32

    engine = start(bf16={"enabled": True}, zero_optimization={"stage": 1})
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().mean())
    engine.step()
    engine.save_checkpoint(str(tmp_path))
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    main = deepspeed.zero.safe_get_full_fp32_param(engine.module[0].weight)
    assert sorted(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert_close(found["0.weight"], main, EXACT, "main weights")
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    zero_to_fp32.load_state_dict_from_zero_checkpoint(model, str(tmp_path))
    assert_close(model[0].weight.detach(), main, EXACT, "loaded")
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="has no file latest"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "out"))


def test_a_checkpoint_of_deepspeed_is_not_read_under_wrong_names(tmp_path):
    from megatron_lattice.deepspeed.utils import zero_to_fp32

    foreign.write_deepspeed(tmp_path, stage=1)
    with pytest.raises(CheckpointError, match=r"engine\.load_checkpoint"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))


def test_names_of_deepspeed_are_found_where_scripts_import_them():
    import megatron_lattice.deepspeed.runtime.lr_schedules as schedules
    from megatron_lattice.deepspeed.monitor.monitor import MonitorMaster
    from megatron_lattice.deepspeed.pipe import PipelineModule
    from megatron_lattice.deepspeed.runtime.activation_checkpointing import checkpointing
    from megatron_lattice.deepspeed.runtime.zero.partition_parameters import GatheredParameters

    assert schedules.WarmupLR is deepspeed.lr_schedules.WarmupLR
    # A module of its own where it was imported as one before.
    assert checkpointing.configure is deepspeed.checkpointing.configure
    assert GatheredParameters is deepspeed.zero.GatheredParameters
    assert isinstance(start().monitor, MonitorMaster)
    assert PipelineModule.__name__ == "PipelineModule"
    assert tuple(map(int, deepspeed.__version__.split(".")[:2])) >= (0, 19)
    config = deepspeed.DeepSpeedConfig(
        {"train_batch_size": 4, "zero_optimization": {"stage": 2}, "optimizer": ADAM}
    )
    assert (config.train_batch_size, config.zero_enabled) == (4, True)
    assert (config.zero_optimization_stage, config.optimizer_name) == (2, "AdamW")
