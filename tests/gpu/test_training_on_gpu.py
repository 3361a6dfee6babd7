"""The same code on an accelerator: fp32 against the CPU, bf16, ranks on NCCL."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.foundation.device import current_device
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.machine import ONE_MACHINE
from tests.harness.tolerances import FP32_OTHER_DEVICE, assert_close

pytestmark = pytest.mark.gpu

SEQUENCE, VOCABULARY = 128, 512
REPOSITORY = Path(__file__).resolve().parents[2]


def build(dtype: torch.dtype, *, on_cpu: bool) -> GPTModel:
    rng_state().set_seed(5)
    is_bf16 = dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=is_bf16,
        params_dtype=dtype,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=True,
        pg_collection=ProcessGroupCollection.single(),
    )
    return model.to("cpu" if on_cpu else current_device())


def loss_and_gradients(model: GPTModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    where = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator).to(where)
    positions = torch.arange(SEQUENCE, device=where).unsqueeze(0)
    loss = model(tokens, positions, None, labels=tokens).float().mean()
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_gpu_computes_what_the_cpu_computes_in_fp32():
    torch.set_float32_matmul_precision("highest")
    here, there = build(torch.float32, on_cpu=False), build(torch.float32, on_cpu=True)
    for (name, p), (_, q) in zip(here.named_parameters(), there.named_parameters(), strict=True):
        assert torch.equal(p.cpu(), q), name
    loss, gradients = loss_and_gradients(here)
    expected_loss, expected = loss_and_gradients(there)
    assert_close(loss.cpu(), expected_loss, FP32_OTHER_DEVICE, "loss")
    for name, gradient in expected.items():
        assert_close(gradients[name].cpu(), gradient, FP32_OTHER_DEVICE, name)


def test_bf16_with_fp32_main_weights_learns_a_batch_by_heart():
    groups = ProcessGroupCollection.single()
    model = build(torch.bfloat16, on_cpu=False)
    config = model.config
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp_config, model, pg_collection=groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True), [wrapped], pg_collection=groups
    )
    finalize = partial(finalize_model_grads, [wrapped], pg_collection=groups)
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), device=current_device())
    positions = torch.arange(SEQUENCE, device=current_device()).unsqueeze(0)
    losses = []
    for _ in range(30):
        wrapped.zero_grad_buffer()
        loss = wrapped(tokens, positions, None, labels=tokens).float().mean()
        loss.backward()
        finalize()
        was_updated, _, _ = optimizer.step()
        assert was_updated
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("layout", [["--tensor-model-parallel-size", "2"],
                                    ["--pipeline-model-parallel-size", "2"], []])  # fmt: skip
def test_pretraining_runs_on_nccl(layout: list[str], tmp_path: Path):
    num_gpus = torch.accelerator.device_count()
    ranks = 2 if num_gpus >= 2 else 1
    if layout and ranks == 1:
        pytest.skip(f"needs 2 GPUs; this machine has {num_gpus}")
    command = [
        sys.executable, "-m", "torch.distributed.run", *ONE_MACHINE,
        "--nproc-per-node", str(ranks), "pretrain_gpt.py", *layout,
        "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4",
        "--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "1",
        "--global-batch-size", "8", "--train-iters", "3", "--lr", "1e-3", "--bf16",
        "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256",
        "--log-interval", "1", "--eval-iters", "1",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "LATTICE_DEVICE"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("lm loss: ") >= 3
