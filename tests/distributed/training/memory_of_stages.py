"""Compare the estimated memory of a rank with what it holds: `python -m
tests.distributed.training.memory_of_stages`.

A GPT is trained for a step on two replicas at every stage of sharding. Counted are the bytes of the
weights, gradients, main weights and moments that a rank keeps, and of the tensors that autograd
saves for backward, each storage once. Exits with status 1 if an estimate is further off than its
tolerance.
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout

import torch

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.state_declarations import initialize_state
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.settings.command_line import NoFlags, read_command_line
from megatron.training.cli.dry_run import memory_of_stages
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from megatron.training.config.resolved import resolve_vocabulary
from megatron.training.metrics.model_size import ModelSize
from megatron.training.setup.model import build_model
from megatron.training.setup.optimizer import build_optimizer
from tests.harness.distributed import run_distributed

STATE_TOLERANCE = 0.02
"""Padding of slots to 128 elements, and of shards to those or (stage 3) to pages."""
ACTIVATION_TOLERANCE = 0.10
"""The formula counts matrices of [tokens, width]; statistics of norms and softmax are left out, and
a fused operation keeps fewer."""
SMALL = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 512"
LARGE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 16384"
)
COMMON = "--micro-batch-size 2 --hidden-dropout 0 --attention-dropout 0 --lr 1e-3"


def run_of(model, stage, dtype):
    """Return resolved settings of two replicas."""
    words = f"{model} {COMMON} --data-parallel-sharding-strategy {SHARDING_STRATEGIES[stage]}"
    words += {"fp32": "", "bf16": " --bf16"}[dtype]
    words += " --max-position-embeddings 256"
    config = parse_command_line(words.split()).config
    run = resolve(config, world_size=2)
    return resolve_vocabulary(run, run.tokenizer.vocab_size)


def storages(tensors):
    """Return the bytes of tensors, each storage once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def measure(groups, model, dtype):
    """Return, for every stage, the bytes that this rank holds, by part."""
    return [_measure_stage(groups, run_of(model, stage, dtype)) for stage in range(4)]


def _measure_stage(groups, run):
    size = ModelSize.from_settings(run)

    def provider(pre_process, post_process, config, pg_collection):
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=size.vocab_size,
            max_sequence_length=size.max_position_embeddings,
            share_embeddings_and_output_weights=size.is_tied,
            pg_collection=pg_collection,
        )

    with redirect_stdout(io.StringIO()):
        (chunk,) = build_model(run, provider, groups)
    optimizer = build_optimizer(run, [chunk], groups)
    tokens = torch.randint(size.vocab_size, (run.schedule.micro_batch_size, size.seq_length))
    positions = torch.arange(size.seq_length).expand_as(tokens)
    known = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and not isinstance(tensor, torch.nn.Parameter):
            saved[storage.data_ptr()] = (storage.nbytes(), storage)  # alive: no address twice
        return tensor

    chunk.zero_grad_buffer()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = chunk(tokens, positions, None, labels=tokens).float().mean()
    whole = {
        p.untyped_storage().data_ptr() for p in chunk.parameters()
    }  # stage 3 gathers into storages of its own
    activations = sum(n for address, (n, _) in saved.items() if address not in whole)
    saved.clear()
    loss.backward()
    chunk.finish_grad_sync()
    optimizer.step()
    chunk.finish_param_sync()
    initialize_state(optimizer.optimizer)
    shards = [shard for own in chunk.sharded_values().values() for shard in own]
    gradients = [owned for buffer in chunk.gradient_buffers for owned in buffer.owned_gradients()]
    gradients += [b.gradients for b in chunk.gradient_buffers if hasattr(b, "gradients")]
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    sharded = chunk.sharded_values()
    return {
        "weights": storages([*shards, *(p.data for p in chunk.parameters() if p not in sharded)]),
        "gradients": storages(gradients),
        "main weights": storages([i.main_param.data for i in optimizer.shards if i.is_copy]),
        "optimizer": storages(moments),
        "activations": activations,
    }


def compare(model, dtype):
    """Yield (stage, part, estimated bytes, measured bytes, tolerance)."""
    measured = run_distributed(measure, 2, model, dtype, timeout_s=120.0)
    for stage in range(4):
        run = run_of(model, stage, dtype)
        size = ModelSize.from_settings(run)
        (estimate,) = memory_of_stages(run, size, pipeline_layout(run.transformer_config))
        parts = estimate.parts
        # The report has the peak at the loss, logits and their fp32 copy; the former are saved.
        item = {"fp32": 4, "bf16": 2}[dtype]
        parts["activations"] += parts["logits"] * item / (item + 4)
        for part in ("weights", "gradients", "main weights", "optimizer", "activations"):
            count = max(found[stage][part] for found in measured)
            tolerance = ACTIVATION_TOLERANCE if part == "activations" else STATE_TOLERANCE
            yield stage, part, parts[part], count, tolerance


def main() -> int:
    """Print the table."""
    read_command_line(NoFlags, description=__doc__)
    failures = 0
    print(
        f"{'dtype':<6}{'stage':>5}  {'part':<14}{'estimate MiB':>14}{'measured MiB':>14}{'off':>8}"
    )
    for dtype in ("fp32", "bf16"):
        for stage, part, estimate, count, tolerance in compare(LARGE, dtype):
            off = abs(estimate - count) / max(count, 1)
            failures += off > tolerance
            print(
                f"{dtype:<6}{stage:>5}  {part:<14}{estimate / 2**20:>14.1f}{count / 2**20:>14.1f}"
                f"{off:>8.1%}{'  <-' * (off > tolerance)}",
                flush=True,
            )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
