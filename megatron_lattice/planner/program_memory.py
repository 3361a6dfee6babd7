"""Memory of the ranks of a run, read from the program that would run.

`trace_rank` runs the training step of one rank on tensors without memory (`tracing`), so weights,
gradients, optimizer state, activations, temporaries and communication buffers are those of the
code, in the order of the pipeline's own program.
"""

from __future__ import annotations

import contextlib
import io

from megatron.training.config.resolved import ResolvedRun
from megatron.training.setup.imaginary import imaginary_rank
from megatron_lattice.planner.tracing.ledger import StorageLedger
from megatron_lattice.planner.tracing.rank_step import ModelScript, RankTrace, RankUnderTest
from megatron_lattice.planner.tracing.work import WorkLedger, WorkOfRank


def routed_share(run: ResolvedRun) -> float:
    """Return the share of (token, expert) pairs that a router chooses."""
    experts = run.experts
    return experts.moe_router_topk / experts.num_moe_experts if experts.num_moe_experts else 0.0


def trace_rank(
    run: ResolvedRun,
    script: ModelScript,
    rank: int,
    *,
    backend: str = "gloo",
    num_microbatches: int | None = None,
) -> RankTrace:
    """Return what the memory of one rank does in a step.

    Args:
        run: resolved, with its vocabulary.
        rank: among all ranks of the run; one at its place in the grid speaks for its replicas.
        backend: whose ways of moving tensors are taken, "gloo" or "nccl".
        num_microbatches: in place of those of the settings.
    Raises:
        TopologyError: this process is a rank of a run.
    """
    found = RankTrace(rank)
    with (
        imaginary_rank(
            rank, run.topology.world_size, backend=backend, routed_share=routed_share(run)
        ),
        StorageLedger() as ledger,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        RankUnderTest(run, script, ledger).step(found, num_microbatches)
    return found


def work_of_rank(run: ResolvedRun, script: ModelScript, rank: int) -> WorkOfRank:
    """Return what one rank does in a step after the first, on gloo.

    Args:
        run, script, rank: as of `trace_rank`.
    Raises:
        TopologyError: this process is a rank of a run.
    """
    with (
        imaginary_rank(rank, run.topology.world_size, routed_share=routed_share(run), repeats=True),
        WorkLedger() as ledger,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        under_test = RankUnderTest(run, script, ledger)
        under_test.step(None)  # makes what later ones find
        with ledger.counting() as work:
            under_test.step(None)
        return work


def work_of_ranks(run: ResolvedRun, script: ModelScript) -> list[WorkOfRank]:
    """Return `work_of_rank` of all ranks."""
    return [work_of_rank(run, script, rank) for rank in range(run.topology.world_size)]
