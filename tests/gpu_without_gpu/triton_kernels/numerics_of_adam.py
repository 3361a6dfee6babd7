"""Adam by Triton's interpreter: state as it is stored against torch's on decoded state, fp32 state
against the formula."""

import pytest
import torch
from torch import nn

from megatron.core.distributed.parameter_shard import MainParamShard, ParameterShard, main_param_of
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable
from megatron.core.kernels.triton_kernels import adam
from megatron.core.optimizer import chunked_state
from megatron.core.optimizer.chunked_state import CHUNK_UPDATES
from megatron.core.optimizer.chunked_state_optimizer import build_chunked_state_optimizer
from megatron.core.optimizer.definition import ModelTensors
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.definitions import adam as definition
from megatron.core.optimizer.definitions.adam import FP32_UPDATES
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.state_declarations import initialize_state
from tests.gpu_without_gpu.triton_kernels.comparing import TOLERANCE_OF
from tests.harness.tolerances import (
    EXACT,
    FP32_AFTER_OPTIMIZER,
    FP32_REORDERED_SUM,
    assert_close,
)

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
SIZES = (1, 128, 300, 1024)  # of shards: tails of blocks, and whole ones
KINDS = [
    (FP32, FP32, FP32, FP32),
    (FP32, BF16, BF16, FP32),
    (FP32, FP8, FP16, FP32),
    (BF16, FP32, FP8, FP32),  # remainders
    (BF16, FP16, FP8, FP32),
    (BF16, FP8, BF16, FP32),
    (BF16, FP16, FP16, FP16),
]


def optimizer_of(model, first, second, main, monkeypatch, *, stored, **settings):
    """Return an optimizer whose state is updated as it is stored, or decoded, and its weights."""
    config = OptimizerConfig(
        use_precision_aware_optimizer=True, exp_avg_dtype=first, exp_avg_sq_dtype=second,
        main_params_dtype=main, **settings,
    )  # fmt: skip
    torch.manual_seed(3)
    weights = [nn.Parameter(torch.randn(size).to(model)) for size in SIZES]
    shards = []
    for index, weight in enumerate(weights):
        shard = ParameterShard(f"weight{index}", weight, 0, weight.numel(), weight, None, None)
        shards.append(MainParamShard(shard, main_param_of(shard, is_chunked=True), (0, index)))
    group = {"params": [s.main_param for s in shards], "lr": config.lr,
             "weight_decay": config.weight_decay}  # fmt: skip
    update = OPTIMIZERS["adam"].elementwise(config)
    optimizer = build_chunked_state_optimizer(update, config, [group], shards)
    kernels = {kernel.name: kernel for kernel in CHUNK_UPDATES.of_device("cuda")}
    run = kernels["triton" if stored else "decoded"].run

    def step(gradients, factor):
        for shard, gradient in zip(shards, gradients, strict=True):
            optimizer.set_gradient(shard.main_param, gradient.clone())
        with monkeypatch.context() as patch:
            chosen = type(kernels["decoded"])("only", run, frozenset({update.kind}))
            patch.setattr(
                chunked_state, "CHUNK_UPDATES", KernelTable("u", {OTHER_DEVICES: (chosen,)})
            )
            patch.setattr(chunked_state, "update_blocks", adam.update_blocks)
            optimizer.step(factor)

    return optimizer, weights, step


def columns_of(optimizer):
    return [c for part in optimizer.state_dict()["columns"] for c in part]


@pytest.mark.parametrize("kinds", KINDS)
def test_state_is_the_same_to_the_bit_where_arithmetic_is_exact(kinds, monkeypatch):
    """Decays of 1/2 and 3/4 of small multiples of a power of two, and no change of weights.

    So every rounding at random is that of the same number, and every byte has to be equal.
    """
    settings = dict(lr=0.0, weight_decay=0.0, adam_beta1=0.5, adam_beta2=0.75)
    found = []
    for stored in (False, True):
        optimizer, weights, step = optimizer_of(*kinds, monkeypatch, stored=stored, **settings)
        for _ in range(2):
            step([torch.randint(-9, 10, (size,)) * 2.0**-6 for size in SIZES], 0.25)
        found.append((columns_of(optimizer), [w.detach() for w in weights]))
    for decoded, stored in zip(*found, strict=True):
        for a, b in zip(decoded, stored, strict=True):
            assert_close(b, a, EXACT, str(kinds))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("model", [FP32, BF16])
def test_weights_are_those_of_torch(model, decoupled, monkeypatch):
    settings = dict(lr=3e-3, weight_decay=0.1, decoupled_weight_decay=decoupled)
    found = []
    for stored in (False, True):
        optimizer, _, step = optimizer_of(model, FP32, FP32, FP32, monkeypatch, stored=stored,
                                          **settings)  # fmt: skip
        for _ in range(5):
            step([torch.randn(size) for size in SIZES], 0.7)
        states = [list(values.values()) for values in optimizer.state.values()]
        mains = [] if model == BF16 else [p for g in optimizer.param_groups for p in g["params"]]
        found.append([*mains, *(v for values in states for v in values)])
    for a, b in zip(*found, strict=True):
        assert_close(b, a, FP32_AFTER_OPTIMIZER, f"{model}")


def adam_by_formula(gradient, main, first, second, step, settings, decoupled):
    """Return moments and main weight after an update, fp64 (arXiv 1711.05101, algorithm 2)."""
    (beta1, beta2), decay = settings["betas"], settings["weight_decay"]
    gradient = gradient if decoupled else gradient + decay * main
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    root = (second / (1 - beta2**step)).sqrt() + settings["eps"]
    shrunk = main * (1 - settings["lr"] * decay) if decoupled else main
    return first, second, shrunk - settings["lr"] * first / (1 - beta1**step) / root


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("model", [None, BF16, FP16])
@pytest.mark.parametrize("step", [1, 30, 5000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_fp32_state_and_the_weight_of_the_model_are_those_of_the_formula(
    betas, step, model, decoupled
):
    settings = {"lr": 3e-3, "betas": betas, "eps": 1e-8, "weight_decay": 0.1}
    for size in (*SIZES, adam.ELEMENTS + 5):
        gradient, main, first = (torch.randn(size) for _ in range(3))
        second = torch.rand(size)
        given = [x.double() for x in (gradient * 0.5, main, first, second)]
        expected = adam_by_formula(*given, step, settings, decoupled)
        weight = None if model is None else torch.zeros(size).to(model)
        scaling = tuple(torch.tensor(x, device=main.device) for x in (2.0, 0.0))
        number = torch.tensor(float(step), device=main.device)
        adam.update_fp32(
            gradient, main, first, second, weight, number, scaling, settings, decoupled
        )
        for name, found, wanted in zip("mvw", (first, second, main), expected, strict=True):
            assert_close(found.double(), wanted, FP32_REORDERED_SUM, name)
        if model is not None:
            tolerance = EXACT if model == FP16 else TOLERANCE_OF[model]
            assert_close(weight, main.to(model), tolerance, "the model's weight")


def test_a_refused_update_changes_nothing():
    tensors = [torch.randn(300) for _ in range(4)] + [torch.zeros(300).to(BF16)]
    before = [x.clone() for x in tensors]
    one = torch.ones((), device=tensors[0].device)
    tensors[0].fill_(float("nan"))
    settings = {"lr": 1.0, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    adam.update_fp32(*tensors, one, (one, one), settings, True)
    for found, wanted in zip(tensors[1:], before[1:], strict=True):
        assert_close(found, wanted, EXACT, "refused")


@pytest.mark.parametrize("factor", [None, 0.25])
@pytest.mark.parametrize("decoupled", [False, True])
def test_an_optimizer_that_takes_one_pass_updates_as_torch(decoupled, factor, monkeypatch):
    """Tensors without a gradient stay, a refused step counts as none, and rates may change."""
    monkeypatch.setattr(definition, "update_fp32", adam.update_fp32)
    kernels = {kernel.name: kernel for kernel in FP32_UPDATES.of_device("cuda")}
    found = []
    for name in ("torch", "triton"):
        chosen = Kernel("only", kernels[name].run)
        monkeypatch.setattr(
            definition, "FP32_UPDATES", KernelTable("u", {OTHER_DEVICES: (chosen,)})
        )
        torch.manual_seed(3)
        weights = [nn.Parameter(torch.randn(size).to(BF16)) for size in (*SIZES, 7)]
        shards = []
        for index, weight in enumerate(weights):
            shard = ParameterShard(f"weight{index}", weight, 0, weight.numel(), weight, None, None)
            shards.append(MainParamShard(shard, main_param_of(shard), (0, index)))
        mains = [s.main_param for s in shards]
        groups = [{"params": mains[:2], "weight_decay": 0.0}, {"params": mains[2:]}]
        config = OptimizerConfig(lr=3e-3, weight_decay=0.1, decoupled_weight_decay=decoupled)
        optimizer = OPTIMIZERS["adam"].build(config, groups, ModelTensors(shards, [], None, None))
        for group in optimizer.param_groups:
            group["fused"] = True  # also where a CPU poses as the device
        initialize_state(optimizer)
        for step in range(5):
            for main in mains[:-1]:
                main.grad = torch.randn(main.shape)
            if factor is not None:
                optimizer.grad_scale = torch.tensor(1 / factor, device=mains[0].device)
                optimizer.found_inf = torch.tensor(float(step == 3), device=mains[0].device)
            optimizer.param_groups[0]["lr"] *= 0.7
            optimizer.step()
        states = [x for entry in optimizer.state.values() for x in entry.values()]
        found.append((states, [m.detach() for m in mains], [w.detach() for w in weights]))
    for one, other, tolerance in zip(
        *found, (FP32_AFTER_OPTIMIZER,) * 2 + (TOLERANCE_OF[BF16],), strict=True
    ):
        for a, b in zip(one, other, strict=True):
            assert_close(b, a, tolerance, "one pass")
