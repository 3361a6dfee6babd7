"""One rank of a run, its second training step, and what was seen of it."""

import contextlib
import io
import time
from collections import Counter
from dataclasses import dataclass, field

from megatron.core.parameters.param_meta import get_param_meta
from megatron.training.config.resolved import ResolvedRun
from megatron.training.setup.fake_device import fake_rank
from megatron.training.setup.traced_memory import routed_share
from megatron.training.setup.traced_rank import ModelScript, RankTrace, RankUnderTest
from pretrain_gpt import forward_step, model_provider
from tests.gpu_without_gpu.imaginary_accelerator.accelerator import as_a_gpu_computes
from tests.gpu_without_gpu.imaginary_accelerator.waits import AcceleratorLedger, bytes_by_axis


@dataclass
class SeenStep:
    """A step after the first one."""

    seconds: float = 0.0
    """Of a processor, for building the rank and the steps."""
    waits: Counter[str] = field(default_factory=Counter)
    """Place in the project -> how often the host read a value there."""
    obstacles: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(place, why) -> how often something happened there that a CUDA graph cannot hold."""
    traffic: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(axis, operation) -> bytes that this rank gave."""
    operations: Counter[str] = field(default_factory=Counter)
    """Place in the project -> operations on the accelerator."""
    copied: int = 0
    """Bytes of expert weights (no biases) that operations other than products read."""
    memory: RankTrace = field(default_factory=lambda: RankTrace(0))


def fewest_microbatches(run: ResolvedRun) -> int:
    """Return the fewest micro batches that the schedule takes: a round of the virtual stages."""
    sizes = run.parallelism
    is_interleaved = sizes.num_virtual_stages_per_pipeline_rank or 1
    return sizes.pipeline_model_parallel_size if is_interleaved > 1 else 1


def seen_step(run: ResolvedRun, rank: int, num_microbatches: int) -> SeenStep:
    """Build one rank, take a step of the fewest micro batches, then one that is watched.

    Args:
        run: resolved, with its vocabulary; the process has the imaginary accelerator.
        num_microbatches: of the watched step, in place of those of the settings.
    """
    begin, seen = time.process_time(), SeenStep(memory=RankTrace(rank))
    world = run.topology.world_size
    with (
        as_a_gpu_computes(),
        fake_rank(rank, world, backend="nccl", routed_share=routed_share(run)),
        AcceleratorLedger() as ledger,
        ledger.watching(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        under_test = RankUnderTest(run, ModelScript(model_provider, forward_step), ledger)
        under_test.step(None, fewest_microbatches(run))
        ledger.watched = frozenset(
            parameter.untyped_storage()._cdata
            for chunk in under_test.context.model
            for parameter in chunk.parameters()
            if get_param_meta(parameter).is_expert and parameter.dim() == 2
        )
        ledger.clear()
        under_test.step(seen.memory, num_microbatches)
        seen.waits, seen.obstacles = Counter(ledger.waits), Counter(ledger.obstacles)
        seen.operations, seen.copied = Counter(ledger.operations), ledger.copied.total()
        seen.traffic = bytes_by_axis(ledger.traffic, under_test.context.groups)
    seen.seconds = time.process_time() - begin
    return seen
