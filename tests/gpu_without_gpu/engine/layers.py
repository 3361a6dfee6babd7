"""Models of Transformer Engine's layers against local ones: the library's own Python, on the CPU.

`make engine` installs the library as it is published, without its compiled part, which has a
stand-in here; its name keeps this file out of the suite.
"""

from dataclasses import replace

import pytest
import torch

from megatron.core.extensions import transformer_engine
from megatron.core.kernels import library_attention
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.blockwise_attention import blockwise_attention
from megatron.core.models.gpt.gpt_layer_specs import (
    FUSED_NORM_KEYS,
    LATENT_NORM_KEYS,
    gpt_layer_submodules,
)
from megatron.core.transformer.backend import LocalFusedBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.distributed.checkpointing.gpt_run import (
    Layout,
    Model,
    load_each_and_save_again,
    train_and_save,
)
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.compare import compare
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import exceeds, run_case, serial_run
from tests.parity.training_case import train
from tools.checkpoint.state_digest import checkpoint_digest

S, B, N, G, D = 24, 2, 4, 2, 8
LAYOUTS = [
    LayoutCase(),
    LayoutCase(tp=2),
    LayoutCase(tp=2, sp=True),
    LayoutCase(tp=4, sp=True),
    LayoutCase(tp=2, sp=True, pp=2),
    LayoutCase(dp=2, stage=1),
    LayoutCase(dp=2, stage=2),
    LayoutCase(dp=2, stage=3),
    LayoutCase(dp=2, fsdp2=True),
    LayoutCase(cp=2),
    LayoutCase(tp=2, sp=True, recomputes=True),
    LayoutCase(pp=2, schedule="zb-h1"),
    LayoutCase(pp=2, vp=2, schedule="zb-v", dp=2, stage=2),
]
WITH_EXPERTS = [LayoutCase(dp=2, ep=2), LayoutCase(tp=2, sp=True, dp=2, ep=2, stage=1)]
MODELS = [
    ModelCase("gpt2", False, 0.0),
    ModelCase("llama", True, 0.0),
    ModelCase("llama", False, 0.0, experts="dropless"),
    ModelCase("latent", False, 0.0, experts="deepseek"),
]


LOCAL_NAMES = {fused: local for local, fused in FUSED_NORM_KEYS.items()} | LATENT_NORM_KEYS


def local_name(name: str) -> str:
    """Return what local layers call a norm that the library fuses with a linear layer."""
    for fused, local in LOCAL_NAMES.items():
        name = name.replace(fused, local)
    return name


def train_with_the_library(groups, *case):
    """The job of one rank; the import of this package has put the stand-in in place."""
    report = train(groups, *case)
    report.weights = {local_name(name): value for name, value in report.weights.items()}
    report.metas = {local_name(name): value for name, value in report.metas.items()}
    report.gradients = {
        step: {local_name(name): value for name, value in gradients.items()}
        for step, gradients in report.gradients.items()
    }
    return report


CASES = [(layout, model) for layout in LAYOUTS for model in MODELS]
CASES += [(layout, model) for layout in WITH_EXPERTS for model in MODELS if model.experts]


@pytest.mark.parametrize(("layout", "model"), CASES, ids=str)
def test_training_equals_local_layers(layout, model):
    run = run_case(replace(layout, engine=True), model, 2, job=train_with_the_library)
    errors = compare(run, serial_run(layout.serial, model, 2))
    assert not exceeds(errors), errors


@pytest.mark.parametrize("value_width", [8, 6])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (5, 0), (5, 2), (5, -1)])
def test_the_attention_of_the_library_is_ours(window, value_width):
    shapes = ((S, B, N, D), (S, B, G, D), (S, B, G, value_width))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    options = AttentionOptions(0.3, MaskSpec(window))
    weight = torch.randn(S, B, N * value_width)
    found = []
    for run in (library_attention.transformer_engine, blockwise_attention):
        out = run(*inputs, options)
        found.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for name, ours, expected in zip(("output", "q", "k", "v"), *found, strict=True):
        assert_close(ours, expected, FP32_REORDERED_SUM, name)


def save_with_the_library(*arguments):
    """The job of one rank; the import of this package has put the stand-in in place."""
    return train_and_save(*arguments)


def resave_with_the_library(*arguments):
    """The job of one rank; the import of this package has put the stand-in in place."""
    return load_each_and_save_again(*arguments)


@pytest.mark.parametrize(
    "model",
    [Model(), Model(is_llama=False, is_tied=False, dtype="bf16"), Model(experts=4)],
    ids=str,
)
def test_checkpoints_go_both_ways_to_the_bit(model, tmp_path):
    experts = {"ep": 2} if model.experts else {}
    engine = [Layout(engine=True), Layout(tp=2, sp=True, dp=2, zero=1, engine=True, **experts)]
    local = [Layout(), Layout(pp=2, dp=2, zero=3, **experts)]
    for source in (*engine, *local):
        of_source = tmp_path / str(source)
        run_distributed(
            save_with_the_library, source.size, source, model, of_source, 2, **source.axes()
        )
        digest = checkpoint_digest(of_source / "iter_0000002")
        for target in local if source.engine else engine:
            again = tmp_path / f"{source}--{target}"
            work = [(of_source, again)]
            run_distributed(
                resave_with_the_library, target.size, target, model, work, **target.axes()
            )
            assert checkpoint_digest(again / "iter_0000002") == digest, f"{source} to {target}"


def test_the_state_of_local_layers_loads_strictly():
    """Parameters have the names of local layers that are fused as the library's are."""
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    options = dict(multi_latent_attention=False, qk_layernorm=True)
    backends = transformer_engine.TransformerEngineBackend(), LocalFusedBackend()
    theirs, ours = (
        TransformerLayer(config, gpt_layer_submodules(backend, **options), layer_number=1)
        for backend in backends
    )
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
