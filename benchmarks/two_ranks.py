"""Wall time of two ranks against the same work without communication.

    python -m benchmarks.two_ranks            # TP 2, TP 2 + SP, PP 2, VPP 2, DP 2 on a CPU

Two single-threaded processes run 8 micro batches of sequence 256 through a GPT of width 512
(forward, backward, gradient finalisation; no optimizer step). Each layout alternates with its own
floor in the same run. Both processes compute at the same time, in the layout and in its floor:

    tp   floor: every rank runs a model with half the heads and half the MLP, alone
    pp   floor: every rank runs half of the micro batches of the whole model, alone
    dp   floor: every rank runs its micro batches, without reducing gradients

The pipeline's figure includes its bubble: (p - 1) / m = 1.125 for PP 2, 1.0625 for VPP 2.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE, WIDTH, HEADS, LAYERS, VOCABULARY, MICROBATCHES = 256, 512, 8, 8, 1024, 8

LAYOUTS: dict[str, dict] = {
    "tp2": dict(tp=2),
    "tp2+sp": dict(tp=2, sp=True),
    "pp2": dict(pp=2),
    "pp2 vpp2": dict(pp=2, vp=2),
    "dp2": dict(),
}


def mean_loss(output):
    """Loss function of the schedules: (mean, report)."""
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}


def forward_step(iterator, model):
    """Run one micro batch of random tokens."""
    tokens = next(iterator)
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    return model(tokens, positions, None, labels=tokens), mean_loss


def endless(tokens):
    """Yield the same micro batch endlessly."""
    while True:
        yield tokens


def build_step(
    groups: ProcessGroupCollection,
    *,
    tp=1,
    sp=False,
    pp=1,
    vp=1,
    share=1,
    microbatches=MICROBATCHES,
    invariant=False,
    optimizes=False,
) -> Callable[[], None]:
    """Return a function that runs one step.

    Args:
        share: divides heads, MLP and vocabulary.
        invariant: in `layout_invariant_mode`.
        optimizes: the step ends with clipping and Adam.
    """
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS // share,
        kv_channels=WIDTH // HEADS,
        ffn_hidden_size=4 * WIDTH // share,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        layout_invariant_mode=invariant,
    )
    stage, last = groups.pp.rank(), groups.pp.size() - 1
    chunks = []
    for chunk in range(vp):
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY // share,
            max_sequence_length=SEQUENCE,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == last and chunk == vp - 1,
            share_embeddings_and_output_weights=False,
            pg_collection=groups,
            vp_stage=chunk if vp > 1 else None,
        )
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
        chunks.append(DistributedDataParallel(config, ddp_config, model, pg_collection=groups))
    one = len(chunks) == 1
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    config.no_sync_func = chunks[0].no_sync if one else [c.no_sync for c in chunks]
    config.grad_sync_func = (
        chunks[0].start_grad_sync if one else [c.start_grad_sync for c in chunks]
    )
    schedule = get_forward_backward_func(pp_size=pp, vp_size=vp)
    tokens = torch.randint(VOCABULARY // share, (1, SEQUENCE))
    iterators = [endless(tokens) for _ in chunks]
    optimizer = None
    if optimizes:
        settings = OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0)
        optimizer = get_megatron_optimizer(settings, chunks, pg_collection=groups)

    def step() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        schedule(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if one else iterators,
            model=chunks[0] if one else chunks,
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
            pg_collection=groups,
        )
        if optimizer is not None:
            optimizer.step()

    return step


def floor_of(name: str) -> Callable[[], None]:
    """Return a step with a rank's share of the work, without communication."""
    alone = ProcessGroupCollection.single()
    if name.startswith("tp"):
        return build_step(alone, share=2)
    return build_step(
        alone, microbatches=MICROBATCHES // 2 if name.startswith("pp") else MICROBATCHES
    )


def seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Return (wall, processor) seconds of one step, started on both ranks; wall until both end."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    step()
    processor = time.process_time() - processor
    dist.barrier()
    return time.perf_counter() - wall, processor


def measure(rank: int, store: str, names: list[str], rounds: int) -> None:
    """Time every layout; the main function of one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rng_state().set_seed(1)
    for name in names:
        sizes = LAYOUTS[name]
        groups = parallel_state.initialize_model_parallel(sizes.get("tp", 1), sizes.get("pp", 1))
        step, floor = build_step(groups, **sizes), floor_of(name)
        for warm_up in (step, floor):
            warm_up()
        ours, alone = [], []
        for _ in range(rounds):
            ours.append(seconds(step))
            alone.append(seconds(floor))
        ratio = statistics.median(a[0] / b[0] for a, b in zip(ours, alone, strict=True))
        wall = statistics.median(a[0] for a in ours)
        if rank == 0:
            spread = sorted(a[0] / b[0] for a, b in zip(ours, alone, strict=True))
            print(
                f"{name:<10} {wall * 1e3:8.0f} ms   floor"
                f" {statistics.median(b[0] for b in alone) * 1e3:8.0f} ms   ratio {ratio:5.3f}"
                f"   ({spread[0]:.3f} ... {spread[-1]:.3f})",
                flush=True,
            )
        del step, floor
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    layouts: tuple[str, ...] = positional((), help=f"any of {', '.join(LAYOUTS)}; default all")
    rounds: int = 5
    """Alternating rounds per layout."""


def main() -> None:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        mp.spawn(measure, args=(store, options.layouts or list(LAYOUTS), options.rounds), nprocs=2)


if __name__ == "__main__":
    main()
