"""The library without pretrain_gpt.py: a model, a schedule, an optimizer and a checkpoint.

    torchrun --nproc-per-node 2 examples/run_simple_mcore_train_loop.py
    torchrun --nproc-per-node 2 examples/run_simple_mcore_train_loop.py --pipeline 2

Trains a small GPT for a few steps on mock data with tensor (default) or pipeline parallelism,
saves it, loads it into a second model, and shows that both give the same loss.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.foundation import device
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers.null_and_byte import NullTokenizer
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE, MICRO_BATCH, MICRO_BATCHES, VOCABULARY = 64, 2, 4, 128


def build_model(tp: int, pp: int) -> DistributedDataParallel:
    """Build this rank's part of the model: half of every layer, or half of the layers."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def batches() -> Iterator[dict[str, Tensor]]:
    """Yield micro batches of mock documents that contain 1, 2, 3, ..."""
    config = GPTDatasetConfig(
        random_seed=0,
        split="1,0,0",
        sequence_length=SEQUENCE,
        tokenizer=NullTokenizer(VOCABULARY),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(
        MockGPTDataset, [1000, None, None], lambda: True, config
    ).build()
    yield from DataLoader(train, batch_size=MICRO_BATCH)


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses [b, s] of a micro batch and count its tokens."""
    loss, tokens = (losses * loss_mask).sum(), loss_mask.sum()
    return loss, tokens.int(), {"lm loss": torch.stack([loss.detach(), tokens])}


def forward_step(iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module):
    """Run this stage for the next micro batch."""
    where = device.current_device()
    batch = {name: value.to(where) for name, value in next(iterator).items()}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


def run_step(model: DistributedDataParallel, data: Iterator, forward_only: bool = False) -> str:
    """Run one step of the pipeline; without pipeline parallelism it has one stage."""
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=forward_only,
    )
    if not reports:  # not the last stage
        return ""
    loss, tokens = sum(report["lm loss"] for report in reports)
    return f"loss {loss / tokens:.6f}"


def show(line: str) -> None:
    """Print from the last rank, which is on the last stage."""
    if dist.get_rank() == dist.get_world_size() - 1:
        print(line, flush=True)


def main() -> None:
    """Train, save, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    dist.init_process_group(device.communication_backend())
    device.set_local_device(dist.get_node_local_rank())
    pp = options.pipeline
    tp = dist.get_world_size() // pp
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(123)  # the seed of weights and dropout

    model, data = build_model(tp, pp), batches()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [model])
    for step in range(options.steps):
        rng_state().begin_step(
            step * MICRO_BATCH * MICRO_BATCHES, micro_batch_size=MICRO_BATCH, dp_rank=0, dp_size=1
        )
        model.zero_grad_buffer()
        optimizer.zero_grad()
        line = run_step(model, data)
        _, grad_norm, _ = optimizer.step()
        show(f"step {step}: {line}, gradient norm {grad_norm:.3f}")

    # Rank 0 chooses the directory; all ranks write their shards into it.
    chosen = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen, src=0)
    checkpoint = Path(str(chosen[0])) / "checkpoint"
    dist_checkpointing.save(model.module.sharded_state_dict(), checkpoint)

    second = build_model(tp, pp)
    loaded = dist_checkpointing.load(second.module.sharded_state_dict(), checkpoint)
    second.module.load_state_dict(loaded)
    for name, trained in (("trained", model), ("loaded", second)):
        trained.eval()
        show(f"{name:>8}: {run_step(trained, batches(), forward_only=True)}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(checkpoint.parent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
