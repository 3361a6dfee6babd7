"""Adam on state as it is stored, by Triton's interpreter, against torch's on decoded state."""

import pytest
import torch
from torch import nn

from megatron.core.distributed.parameter_shard import MainParamShard, ParameterShard, main_param_of
from megatron.core.kernels.registry import OTHER_DEVICES, KernelTable
from megatron.core.kernels.triton_kernels import adam
from megatron.core.optimizer import chunked_state
from megatron.core.optimizer.chunked_state import CHUNK_UPDATES
from megatron.core.optimizer.chunked_state_optimizer import build_chunked_state_optimizer
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from tests.harness.tolerances import EXACT, FP32_AFTER_OPTIMIZER, assert_close

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
