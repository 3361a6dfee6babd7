"""One process: the update is torch's, and is refused when the gradient is not finite."""

import pytest
import torch
from torch import nn

from megatron.compatibility.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from megatron.core.foundation.errors import ConfigError, NumericsError
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
)
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.metrics.memory_timeline import MemoryTimeline
from tests.distributed.distributed.replicas import Model, accumulate, loss_of, samples, wrap
from tests.harness.tolerances import (
    EXACT,
    FP32_AFTER_OPTIMIZER,
    FP32_REORDERED_SUM,
    FP32_ROUNDED_ONCE,
    assert_close,
)
from tests.unit.optimizer.test_precision_aware import compact

SINGLE = ProcessGroupCollection.single()


def build(model, **settings):
    settings = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0} | settings
    return get_megatron_optimizer(OptimizerConfig(**settings), [model], pg_collection=SINGLE)


def decay_groups(model, weight_decay):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def reference_step(model, rule, step, clip_grad):
    rule.zero_grad()
    loss_of(model, samples(step)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_grad) if clip_grad else None
    rule.step()
    return norm


@pytest.mark.parametrize("clip_grad", [0.0, 0.05, 1e9])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_adam_is_torch_adamw_with_decay_of_matrices_only(clip_grad, is_wrapped):
    theirs = Model()
    rule = torch.optim.AdamW(decay_groups(theirs, 0.1), lr=1e-2, fused=True)
    model = wrap(SINGLE) if is_wrapped else Model()
    ours = build(model, clip_grad=clip_grad)
    for step in range(5):
        norm = reference_step(theirs, rule, step, clip_grad)
        if is_wrapped:
            accumulate(model, SINGLE, step, 1)
        else:
            ours.zero_grad()
            loss_of(model, samples(step)).backward()
        ok, our_norm, zeros = ours.step()
        assert ok and zeros is None
        if norm is not None:
            assert_close(our_norm, norm, FP32_ROUNDED_ONCE, "gradient norm")
    exactness = FP32_AFTER_OPTIMIZER if clip_grad == 0.05 else EXACT
    parameters = dict(theirs.named_parameters())
    for name, parameter in (model.module if is_wrapped else model).named_parameters():
        assert_close(parameter.detach(), parameters[name].detach(), exactness, name)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"optimizer": "sgd", "sgd_momentum": 0.8}, (torch.optim.SGD, {"momentum": 0.8})),
        ({"decoupled_weight_decay": False}, (torch.optim.Adam, {})),
    ],
)
def test_other_update_rules_are_torchs(settings, rule):
    theirs = Model()
    rule = rule[0](decay_groups(theirs, 0.1), lr=1e-2, fused=True, **rule[1])
    ddp = wrap(SINGLE)
    ours = build(ddp, **settings)
    for step in range(3):
        reference_step(theirs, rule, step, None)
        accumulate(ddp, SINGLE, step, 1)
        ours.step()
    for name, parameter in theirs.named_parameters():
        assert_close(ddp.module.get_parameter(name).detach(), parameter.detach(), EXACT, name)


def test_bf16_weights_follow_fp32_main_weights():
    ddp = wrap(SINGLE, dtype=torch.bfloat16, grad_reduce_in_fp32=True)
    ours = build(ddp, bf16=True, lr=1e-4)
    theirs = [p.detach().float().requires_grad_() for p in ddp.module.parameters()]
    rule = torch.optim.AdamW(theirs, lr=1e-4, weight_decay=0.0, fused=True)
    for group in ours.param_groups:
        group["weight_decay"] = 0.0
    for step in range(4):
        accumulate(ddp, SINGLE, step, 2)
        for parameter, main in zip(ddp.module.parameters(), theirs, strict=True):
            main.grad = parameter.main_grad.clone()
        ours.step()
        rule.step()
    for parameter, main in zip(ddp.module.parameters(), theirs, strict=True):
        assert_close(parameter.detach(), main.detach().bfloat16(), EXACT, "rounded main weight")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_touches_nothing_and_is_named(value, policy):
    ddp = wrap(SINGLE)
    ours = build(ddp, on_nonfinite_grad=policy)
    accumulate(ddp, SINGLE, 0, 1)
    ours.step()
    before = {k: v.clone() for k, v in ddp.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in ours.state.values()]
    accumulate(ddp, SINGLE, 1, 1)
    ddp.module.first.bias.main_grad[3] = value
    if policy == "raise":
        with pytest.raises(NumericsError, match="first.bias is not finite"):
            ours.step()
    else:
        assert ours.step()[0] is False
    assert "first.bias" in ours.nonfinite
    for name, tensor in ddp.state_dict().items():
        assert_close(tensor, before[name], EXACT, name)
    for state, moment in zip(ours.state.values(), moments, strict=True):
        assert_close(state["exp_avg"], moment, EXACT, "first moment")
    accumulate(ddp, SINGLE, 2, 1)
    assert ours.step()[0] is True and ours.nonfinite is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_reading_the_norm_leaves_the_gradients(dtype, size, is_wrapped):
    model = wrap(SINGLE, dtype=dtype) if is_wrapped else Model().to(dtype)
    ours = build(model, lr=0.0, weight_decay=0.0, optimizer="sgd")
    for parameter in model.parameters():
        if not is_wrapped:
            parameter.grad = torch.empty_like(parameter)
        gradient = parameter.main_grad if is_wrapped else parameter.grad
        gradient.fill_(size)
    ours.step()
    for parameter in model.parameters():
        gradient = parameter.main_grad if is_wrapped else parameter.grad
        assert_close(gradient, torch.full_like(gradient, size), EXACT, "gradient")


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_the_norm_neither_overflows_nor_vanishes(size):
    ddp = wrap(SINGLE)
    ours = build(ddp, clip_grad=1.0)
    accumulate(ddp, SINGLE, 0, 1)
    total = 0.0
    for parameter in ddp.module.parameters():
        parameter.main_grad.mul_(size)
        total += float(parameter.main_grad.double().square().sum())
    ok, norm, _ = ours.step()
    assert ok
    assert_close(norm / size, total**0.5 / size, FP32_ROUNDED_ONCE, "norm")


def test_a_constant_loss_scale_changes_no_number():
    weights = []
    for scale in (None, 1024.0):
        ddp = wrap(SINGLE)
        ours = build(ddp, loss_scale=scale, clip_grad=0.05)
        norms = []
        for step in range(3):
            ddp.zero_grad_buffer()
            ours.scale_loss(loss_of(ddp, samples(step))).backward()
            ddp.finish_grad_sync()
            norms.append(ours.step()[1])
        weights.append([*norms, *(p.detach() for p in ddp.module.parameters())])
    for scaled, plain in zip(*weights, strict=True):
        assert_close(scaled, plain, FP32_AFTER_OPTIMIZER, "norm or weight")


def test_fp16_overflow_skips_the_step_and_lowers_the_scale():
    ddp = wrap(SINGLE, dtype=torch.float16, grad_reduce_in_fp32=True)
    ours = build(ddp, fp16=True, initial_loss_scale=2.0**24, hysteresis=1)
    before = [p.detach().clone() for p in ddp.module.parameters()]
    outcomes = []
    for step in range(30):
        ddp.zero_grad_buffer()
        ours.scale_loss(loss_of(ddp, samples(step))).backward()
        ddp.finish_grad_sync()
        outcomes.append(ours.step()[0])
        if not outcomes[-1]:
            for parameter, old in zip(ddp.module.parameters(), before, strict=True):
                assert_close(parameter.detach(), old, EXACT, "weight after overflow")
        else:
            break
    assert not outcomes[0] and outcomes[-1]
    assert float(ours.get_loss_scale()) == 2.0 ** (24 - outcomes.count(False))


def test_zeros_are_counted():
    ddp = wrap(SINGLE)
    ours = build(ddp, log_num_zeros_in_grad=True)
    accumulate(ddp, SINGLE, 0, 1)
    ddp.module.first.weight.main_grad.fill_(1.0)
    ddp.module.first.weight.main_grad[0, :5] = 0.0
    for name, parameter in ddp.module.named_parameters():
        if name != "first.weight":
            parameter.main_grad.fill_(2.0)
    assert ours.step()[2] == 5


def test_embedding_and_head_may_have_their_own_learning_rate():
    model = Model()
    set_param_meta(model.embedding.weight, ParamMeta(is_embedding_or_output=True))
    ours = build(model, decoupled_lr=0.5, decoupled_min_lr=0.25, min_lr=0.0)
    of = {id(p): group for group in ours.param_groups for p in group["params"]}
    assert of[id(model.embedding.weight)]["max_lr"] == 0.5
    assert of[id(model.embedding.weight)]["min_lr"] == 0.25
    assert of[id(model.second.weight)]["max_lr"] == 1e-2
    assert of[id(model.norm.weight)]["wd_mult"] == 0.0


def test_rules_change_groups_by_name_attribute_and_predicate():
    model = Model()
    model.second.weight.is_special = True
    ours = get_megatron_optimizer(
        OptimizerConfig(lr=1.0, weight_decay=0.1),
        [model],
        config_overrides={
            ParamKey(name="first.*"): {"lr_mult": 0.5},
            ParamKey(attr="is_special"): {"wd_mult": 2.0},
            ParamKey(predicate=lambda name, p: p.numel() == 37 * 24): {"max_lr": 3.0},
        },
        pg_collection=SINGLE,
    )
    of = {id(p): group for group in ours.param_groups for p in group["params"]}
    assert of[id(model.first.weight)]["lr"] == 0.5
    assert of[id(model.second.weight)]["weight_decay"] == pytest.approx(0.2)
    assert of[id(model.embedding.weight)]["lr"] == 3.0


def test_megatrons_classes_tell_optimizers_apart():
    sharded = wrap(SINGLE, use_distributed_optimizer=True)
    for kind, ours in (
        (FP32Optimizer, build(Model())),
        (DistributedOptimizer, build(sharded, use_distributed_optimizer=True)),
    ):
        kinds = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
        assert [isinstance(ours, each) for each in kinds] == [each is kind for each in kinds]
        assert not isinstance(ours, ChainedOptimizer)


def test_chained_optimizers_share_one_norm_and_one_decision():
    model, whole = Model(), Model()
    halves = [
        nn.ModuleList([model.embedding]),
        nn.ModuleList([model.first, model.norm, model.second]),
    ]
    chain = ChainedOptimizer([build(half, clip_grad=0.05) for half in halves])
    single = build(whole, clip_grad=0.05)
    for step in range(3):
        for optimizer, its in ((chain, model), (single, whole)):
            optimizer.zero_grad()
            loss_of(its, samples(step)).backward()
        results = [chain.step(), single.step()]
        assert_close(results[0][1], results[1][1], FP32_ROUNDED_ONCE, "norm")
    for name, parameter in whole.named_parameters():
        assert_close(
            model.get_parameter(name).detach(), parameter.detach(), FP32_REORDERED_SUM, name
        )
    chain.zero_grad()
    loss_of(model, samples(4)).backward()
    model.embedding.weight.grad[0, 0] = torch.nan
    before = model.second.weight.detach().clone()
    with pytest.raises(NumericsError):
        chain.step()
    assert_close(model.second.weight.detach(), before, EXACT, "weight of the other optimizer")


@pytest.mark.parametrize("is_compact", [False, True])
def test_state_goes_on_where_it_stopped(is_compact):
    """Also in low precision, where bf16 weights and their remainders are the main weights."""
    ddp_settings, settings = {}, {}
    if is_compact:
        ddp_settings = {"dtype": torch.bfloat16, "grad_reduce_in_fp32": True}
        settings = compact(torch.uint8, torch.float16) | {"bf16": True}
    runs = []
    for stops in (False, True):
        ddp = wrap(SINGLE, **ddp_settings)
        ours = build(ddp, **settings)
        for step in range(4):
            accumulate(ddp, SINGLE, step, 1)
            ours.step()
            if stops and step == 1:
                weights, state = ddp.state_dict(), ours.state_dict()
                ddp = wrap(SINGLE, **ddp_settings)
                ddp.load_state_dict(weights)
                ours = build(ddp, **settings)
                ours.load_state_dict(state)
        runs.append(ddp.state_dict())
    for name, tensor in runs[0].items():
        assert_close(runs[1][name], tensor, EXACT, name)


def test_all_bad_settings_are_reported_together():
    with pytest.raises(ConfigError) as raised:
        OptimizerConfig(optimizer="lamb", adam_beta1=1.5, fp16=True, bf16=True, clip_grad=-1.0)
    for part in ("4 problems", "lamb", "adam_beta1", "--fp16", "clip_grad"):
        assert part in str(raised.value)


def test_optimizer_and_wrapper_must_shard_the_same(monkeypatch):
    with pytest.raises(ConfigError, match="use_distributed_optimizer=True"):
        build(wrap(SINGLE), use_distributed_optimizer=True)


def test_a_gradient_that_is_not_finite_is_found_without_a_copy_of_it():
    """In fp16 steps overflow all the time, and must not need more memory than others."""
    layers = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    model = wrap(SINGLE, model=layers)
    optimizer = build(model)
    for parameter in model.parameters():
        parameter.main_grad.fill_(float("inf"))
    with MemoryTimeline() as ledger, pytest.raises(NumericsError):
        optimizer.step()
    gradient = 2 * 1024**2 * 4  # which the ledger counts when it is read
    assert ledger.peak.num_bytes < 1.5 * gradient
