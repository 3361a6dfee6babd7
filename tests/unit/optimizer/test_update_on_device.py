"""An update that the device decides on is the one that the host would have decided on."""

import pytest
import torch

from megatron.core.foundation.errors import NumericsError
from megatron.core.kernels.registry import Kernel, KernelTable
from megatron.core.optimizer.definitions import adam
from megatron.core.optimizer.gradient_norm import GradientReader
from tests.distributed.distributed.replicas import accumulate, wrap
from tests.harness.tolerances import EXACT, assert_close
from tests.unit.optimizer.test_update import SINGLE, build


@pytest.fixture
def decided(monkeypatch):
    """Return a model and its optimizer, decided on by the host or by the device."""

    def make(on_device, **settings):
        monkeypatch.setattr(GradientReader, "is_on_host", not on_device)
        ddp = wrap(SINGLE, **({"dtype": torch.bfloat16} if settings.get("bf16") else {}))
        return ddp, build(ddp, **settings)

    return make


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_grad": 0.05},
        {"clip_grad": 0.0},
        {"clip_grad": 1e9, "bf16": True},
        {"optimizer": "sgd", "sgd_momentum": 0.8, "clip_grad": 0.05},
    ],
    ids=str,
)
def test_device_and_host_decide_the_same_to_the_bit(decided, settings):
    found = []
    for on_device in (False, True):
        ddp, optimizer = decided(on_device, **settings)
        assert optimizer.decides_on_device is on_device
        results = []
        for step in range(4):
            accumulate(ddp, SINGLE, step, 2)
            results.append(optimizer.step())
        found.append((results, ddp.state_dict()))
    (host, weights), (device, others) = found
    assert host == device
    for name, tensor in weights.items():
        assert_close(others[name], tensor, EXACT, name)


def test_the_norm_is_measured_without_a_read_by_the_host(decided):
    """Not within torch's own kernels either, where no dispatch mode looks."""
    ddp, optimizer = decided(True, clip_grad=0.05)
    accumulate(ddp, SINGLE, 0, 2)
    optimizer.step()  # makes the state, and agrees on lengths
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        report = optimizer.reader.read_on_device()
        with torch.profiler.record_function("the host reads"):
            report.total.item()
    names = [event.name for event in sorted(profile.events(), key=lambda e: e.time_range.start)]
    assert "aten::segment_reduce" in names
    assert "aten::item" not in names[: names.index("the host reads")]
    assert "aten::item" in names[names.index("the host reads") :]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_bad_gradient_touches_nothing_before_the_host_hears_of_it(decided, policy):
    ddp, optimizer = decided(True, on_nonfinite_grad=policy)
    accumulate(ddp, SINGLE, 0, 1)
    optimizer.step()
    before = {name: value.clone() for name, value in ddp.state_dict().items()}
    states = [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]
    accumulate(ddp, SINGLE, 1, 1)
    ddp.module.first.bias.main_grad[3] = torch.nan
    outcome = optimizer.start_step()
    for name, tensor in ddp.state_dict().items():
        assert_close(tensor, before[name], EXACT, name)
    for state, earlier in zip(optimizer.state.values(), states, strict=True):
        for name, tensor in state.items():
            assert_close(tensor, earlier[name], EXACT, name)
    if policy == "raise":
        with pytest.raises(NumericsError, match="first.bias is not finite"):
            outcome.read()
    else:
        assert outcome.read()[0] is False
    assert "first.bias" in optimizer.nonfinite
    assert optimizer.num_updates == 1


def test_the_caller_can_refuse_an_update(decided):
    ddp, optimizer = decided(True)
    before = {name: value.clone() for name, value in ddp.state_dict().items()}
    accumulate(ddp, SINGLE, 0, 1)
    was_updated, norm, _ = optimizer.start_step(torch.ones(())).read()
    assert (was_updated, optimizer.nonfinite, optimizer.num_updates) == (False, None, 0)
    assert norm > 0
    for name, tensor in ddp.state_dict().items():
        assert_close(tensor, before[name], EXACT, name)


def test_a_loss_scale_learns_of_an_overflow_in_its_own_step(decided):
    settings = {"fp16": True, "initial_loss_scale": 8.0, "hysteresis": 1, "min_loss_scale": 1.0}
    ddp, optimizer = decided(True, **settings)
    accumulate(ddp, SINGLE, 0, 1)
    ddp.module.first.bias.main_grad[0] = torch.inf
    assert optimizer.step()[0] is False
    assert float(optimizer.get_loss_scale()) == 4.0


@pytest.mark.parametrize("needs", ["zeros", "checks", "lion"])
def test_what_needs_the_gradient_before_the_update_makes_the_host_decide(decided, needs):
    settings = {"log_num_zeros_in_grad": True} if needs == "zeros" else {}
    _, optimizer = decided(True, **settings, **({"optimizer": "lion"} if needs == "lion" else {}))
    if needs == "checks":
        assert optimizer.decides_on_device
        optimizer.norm_checks.append(lambda norm: None)
    assert not optimizer.decides_on_device


def fused_by_torch(gradient, main, first, second, weight, step, scaling, settings, decouples_decay):
    """A stand-in for the kernel of one pass, with its arguments."""
    scale, refused = scaling or (None, None)
    update = torch._fused_adamw_ if decouples_decay else torch._fused_adam_
    beta1, beta2 = settings["betas"]
    update(
        [main], [gradient], [first], [second], [], [step], amsgrad=False, maximize=False,
        lr=settings["lr"], beta1=beta1, beta2=beta2, weight_decay=settings["weight_decay"],
        eps=settings["eps"], grad_scale=scale, found_inf=refused,
    )  # fmt: skip
    if weight is not None and not refused:
        weight.copy_(main)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"clip_grad": 0.05},
        {"clip_grad": 0.05, "bf16": True},
        {"clip_grad": 0.0, "bf16": True, "decoupled_weight_decay": False},
    ],
    ids=str,
)
def test_a_kernel_of_one_pass_updates_the_models_weights_too(
    decided, monkeypatch, settings, on_device
):
    """Without a copy after it; a refused update in between changes nothing and is not counted."""
    found = []
    for kernel in ("torch", "one pass"):
        ddp, optimizer = decided(on_device, on_nonfinite_grad="skip", **settings)
        with monkeypatch.context() as patch:
            if kernel == "one pass":
                only = Kernel("only", adam.PublishingAdam.step_in_one_pass)
                patch.setattr(adam, "FP32_UPDATES", KernelTable("update", {"cpu": (only,)}))
                patch.setattr(adam, "update_fp32", fused_by_torch)
                patch.delattr(torch, "_foreach_copy_")
            results = []
            for step in range(4):
                accumulate(ddp, SINGLE, step, 2)
                if step == 2:
                    ddp.module.first.bias.main_grad[3] = torch.nan
                versions = [weight._version for weight in ddp.module.parameters()]
                results.append(optimizer.step())
                if settings.get("bf16") and step != 2:  # autograd and caches compare versions
                    written = zip(ddp.module.parameters(), versions, strict=True)
                    assert all(weight._version > before for weight, before in written)
        states = [x for state in optimizer.state.values() for x in state.values()]
        found.append((results, [*ddp.module.parameters()], states))
    (expected, weights, states), (results, others, other_states) = found
    assert [taken for taken, *_ in results] == [True, True, False, True]
    assert str(results) == str(expected)  # a norm is NaN
    for one, other in zip((*weights, *states), (*others, *other_states), strict=True):
        assert_close(other.detach(), one.detach(), EXACT, "weights and state")
