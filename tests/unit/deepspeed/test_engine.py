"""The engine in one process: its contract, call by call."""

import pytest
import safetensors.torch
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from megatron.core.foundation.errors import CheckpointError, ConfigError, ScheduleError
from megatron_lattice import deepspeed
from megatron_lattice.deepspeed.initialize import check_client
from megatron_lattice.deepspeed.settings import engine_settings
from megatron_lattice.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from tests.unit.dist_checkpointing.interop import interop_files as foreign

ADAM = {"type": "AdamW", "params": {"lr": 0.01}}


def start(model=None, **config):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0), nn.Linear(5, 2))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, **config}
    return deepspeed.initialize(model=model, config=config)


def loss_of(engine, scale=1.0):
    x = torch.ones(2, 4, dtype=next(engine.module.parameters()).dtype)
    return engine(x * scale).float().square().mean()


def test_results_come_in_order_and_what_was_not_asked_for_is_none():
    engine, optimizer, loader, scheduler = start()
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert optimizer is engine.optimizer
    assert loader is None and scheduler is None


def test_step_acts_at_the_boundary_only():
    engine, *_ = start(gradient_accumulation_steps=2)
    before = engine.module[0].weight.clone()
    share = engine.backward(loss_of(engine))
    assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    assert torch.equal(engine.module[0].weight, before) and engine.global_steps == 0
    assert engine.is_gradient_accumulation_boundary()
    engine.backward(loss_of(engine))
    engine.step()
    assert not torch.equal(engine.module[0].weight, before)
    assert (engine.micro_steps, engine.global_steps, engine.was_step_applied()) == (2, 1, True)
    assert float(share.detach()) == pytest.approx(float(loss_of_fresh().detach()) / 2)


def loss_of_fresh():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    return model(torch.ones(2, 4)).square().mean()


def test_overflow_skips_the_step_and_the_schedule():
    engine, *_ = start(
        fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    )
    engine.backward(loss_of(engine) * float("inf"))
    engine.step()
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    assert engine.loss_scale() == 8.0
    assert engine.lr_scheduler.last_batch_iteration == -1
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.was_step_applied() and engine.lr_scheduler.last_batch_iteration == 0


def test_plain_backward_under_loss_scaling_asks_for_the_scale():
    engine, *_ = start(fp16={"enabled": True, "initial_scale_power": 4})
    with pytest.raises(RuntimeError, match="engine.scale"):
        loss_of(engine).backward()
    engine.zero_grad()
    engine.scale(loss_of(engine)).backward()
    engine.step()
    assert engine.was_step_applied()


def test_two_ways_of_backward_do_not_mix():
    engine, *_ = start(gradient_accumulation_steps=2)
    engine.backward(loss_of(engine))
    engine.step()
    loss_of(engine).backward()
    with pytest.raises(ScheduleError, match="in one step"):
        engine.step()


def test_step_needs_a_backward_pass():
    engine, *_ = start(gradient_accumulation_steps=2)
    engine.step()
    with pytest.raises(ScheduleError, match="without a backward pass"):
        engine.step()


def test_step_inside_of_no_sync_is_refused():
    engine, *_ = start()
    with engine.no_sync():
        engine.backward(loss_of(engine))
        with pytest.raises(ScheduleError, match="no_sync"):
            engine.step()
    engine.step()
    assert engine.global_steps == 1


def test_train_batch_size_changes_accumulation():
    engine, *_ = start()
    engine.set_train_batch_size(8)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (4, 8)
    with pytest.raises(ConfigError, match="use 4"):
        engine.set_train_batch_size(5)


def test_attributes_of_the_module_show_through():
    model = nn.Linear(4, 2)
    model.flavour = "plain"
    engine, *_ = start(model)
    assert engine.flavour == "plain"
    with pytest.raises(AttributeError):
        _ = engine.nothing


def test_half_precision_is_the_modules_and_norms_are_known():
    engine, *_ = start(bf16={"enabled": True})
    assert engine.bfloat16_enabled() and engine.module[0].weight.dtype == torch.bfloat16
    assert engine.get_global_grad_norm() is None
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.get_global_grad_norm() > 0


def test_samples_are_dealt_to_replicas():
    data = [(torch.full((4,), float(i)), i) for i in range(6)]
    _, _, loader, _ = deepspeed.initialize(
        model=nn.Linear(4, 2),
        training_data=data,
        config={"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM},
    )
    assert len(loader) == 3
    epochs = [[int(i) for _, labels in loader for i in labels] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(6))
    assert epochs[0] != epochs[1]


def test_parameters_in_no_group_are_frozen_and_named():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.warns(UserWarning, match="0.bias is in no group"):
        deepspeed.initialize(
            model=model,
            model_parameters=[p for n, p in model.named_parameters() if n != "0.bias"],
            config={"optimizer": ADAM},
        )
    assert not model[0].bias.requires_grad


def test_weights_are_written_without_pickle(tmp_path):
    engine, *_ = start(bf16={"enabled": True})
    engine.save_16bit_model(str(tmp_path))
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    with pytest.raises(CheckpointError, match="pytorch_model.safetensors"):
        engine.save_16bit_model(str(tmp_path), "pytorch_model.bin")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_tied_weight_is_written_once_as_transformers_writes_it(stage, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    engine, *_ = start(model, bf16={"enabled": True}, zero_optimization={"stage": stage})
    ids = torch.arange(8).repeat(2, 1)
    engine.backward(engine(ids, labels=ids).loss)
    engine.step()
    engine.save_16bit_model(str(tmp_path / "ours"))
    whole = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    theirs = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    theirs.load_state_dict(whole)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    config.save_pretrained(tmp_path / "ours")
    loaded = [
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / who, dtype=torch.bfloat16)
        for who in ("ours", "theirs")
    ]
    assert torch.equal(*(model(ids).logits for model in loaded))
    safetensors.torch.load_model(
        transformers.LlamaForCausalLM(config), tmp_path / "ours" / "model.safetensors"
    )

    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "checkpoint"))
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "checkpoint"), str(tmp_path / "fp32"))
    assert load_file(tmp_path / "fp32" / "model.safetensors").keys() == expected.keys()


def test_missing_checkpoint_is_none_and_a_warning(tmp_path):
    engine, *_ = start()
    with pytest.warns(UserWarning, match="nothing is loaded"):
        assert engine.load_checkpoint(str(tmp_path)) == (None, None)


def test_directory_that_cannot_be_written_is_told(tmp_path):
    engine, *_ = start()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        engine.save_checkpoint(str(tmp_path / "file" / "inside"))


def test_client_state_that_would_need_pickle_is_refused(tmp_path):
    engine, *_ = start()
    with pytest.raises(CheckpointError, match="client_state"):
        engine.save_checkpoint(str(tmp_path), client_state={"what": object()})


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoint_of_deepspeed_is_read(tmp_path, monkeypatch, stage):
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model.exit = nn.Linear(4, 2)
    engine, *_ = start(model, bf16={"enabled": True}, zero_optimization={"stage": stage})
    shapes = {name: p.shape for name, p in engine.module.named_parameters()}
    theirs = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {kind: {n: torch.rand(s) for n, s in shapes.items()} for kind in foreign.MOMENTS}
    monkeypatch.setattr(foreign, "weights", lambda: theirs)
    monkeypatch.setattr(foreign, "moments", lambda: moments)
    foreign.write_deepspeed(tmp_path, stage=stage)
    path, _ = engine.load_checkpoint(str(tmp_path))
    assert path.endswith(f"global_step{foreign.ITERATION}")
    assert engine.global_steps == foreign.ITERATION
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.detach(), theirs[name].bfloat16())
        assert torch.equal(deepspeed.zero.safe_get_full_fp32_param(parameter), theirs[name])
        found = deepspeed.zero.safe_get_full_optimizer_state(parameter, "exp_avg_sq")
        assert torch.equal(found, moments["exp_avg_sq"][name])


def test_recomputed_activations_give_the_same_gradient():
    engine, *_ = start()
    weight = engine.module[0].weight
    engine.backward(loss_of(engine))
    plain = deepspeed.zero.safe_get_full_grad(weight)
    engine.zero_grad()
    x = torch.ones(2, 4)
    hidden = deepspeed.checkpointing.checkpoint(engine, x)
    engine.backward(hidden.square().mean())
    assert torch.equal(deepspeed.zero.safe_get_full_grad(weight), plain)


@pytest.mark.parametrize("kind", ["LBFGS", "NAdam"])
def test_optimizers_that_cannot_be_sharded_are_refused(kind):
    client = getattr(torch.optim, kind)(nn.Linear(2, 2).parameters())
    settings = engine_settings({"zero_optimization": {"stage": 1}}, replicas=2)
    with pytest.raises(ConfigError, match="must update every element independently"):
        check_client(client, settings)


def test_one_configuration_only():
    with pytest.raises(ConfigError, match="without a configuration"):
        deepspeed.initialize(model=nn.Linear(2, 2))
    args = deepspeed.add_config_arguments(__import__("argparse").ArgumentParser()).parse_args(
        ["--deepspeed", "--deepspeed_config", "ds.json"]
    )
    with pytest.raises(ConfigError, match="drop one of the two"):
        deepspeed.initialize(args=args, model=nn.Linear(2, 2), config={})


def test_names_that_scripts_import():
    model = nn.Linear(2, 2)
    for kind, is_decoupled in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        made = deepspeed.ops.adam.FusedAdam(model.parameters(), adam_w_mode=kind)
        assert type(made) is is_decoupled
    with pytest.raises(ConfigError, match="always corrected"):
        deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), bias_correction=False)
    accelerator = deepspeed.get_accelerator()
    assert accelerator.current_device_name().startswith(accelerator.device_name())
    assert deepspeed.utils.logger.name == "megatron_lattice.deepspeed"
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size"):
        deepspeed.PipelineModule(layers=[model])


def trained(steps=3, make=None, **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    client = make(model.parameters()) if make else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=client, config={"optimizer": ADAM, **config}
    )
    for step in range(steps):
        engine.backward(loss_of(engine, scale=1.0 + step))
        engine.step()
    return engine


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("make", [None, deepspeed.ops.adam.DeepSpeedCPUAdam])
def test_offloaded_state_gives_the_same_bits(tmp_path, device, make):
    place = {"device": device, "nvme_path": str(tmp_path)}
    zero = {"stage": 2, "offload_optimizer": place}
    plain = trained(make=make).module.state_dict()
    offloaded = trained(make=make, zero_optimization=zero).module.state_dict()
    assert all(torch.equal(offloaded[name], plain[name]) for name in plain)


def test_offload_of_an_unknown_rule_is_refused():
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ConfigError, match="RMSprop with offloaded state"):
        trained(make=torch.optim.RMSprop, zero_optimization=zero)


@pytest.mark.parametrize("kind", ["Adam", "Lion", "Muon", "SGD", "Adagrad", "RMSprop", "RAdam"])
def test_optimizer_by_name_resumes_with_its_state(tmp_path, kind):
    section = {"type": kind, "params": {"lr": 0.01, "weight_decay": 0.1}}
    config = {"optimizer": section, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    first = trained(**config)
    first.save_checkpoint(str(tmp_path))
    second = trained(steps=0, **config)
    second.load_checkpoint(str(tmp_path))
    for engine in (first, second):
        engine.backward(loss_of(engine))
        engine.step()
    one, other = first.module.state_dict(), second.module.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
