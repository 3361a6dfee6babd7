"""Rules about rows that any number of ranks splits (--hybrid-context-parallel)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.foundation.errors import MegatronError
from megatron.core.topology.rank_grid import nested_sizes
from megatron.core.utils import as_list
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import all_flags
from megatron.training.rules.registry import problem, rule
from megatron.training.rules.support import is_without_owner

FLAG = "--hybrid-context-parallel"


@rule
def lengths_belong_to_shared_rows(run: ResolvedRun) -> Iterator[MegatronError]:
    """A length for one rank says something about rows that are split as needed."""
    parallel = run.parallelism
    if parallel.max_seqlen_per_dp_cp_rank is not None and not parallel.hybrid_context_parallel:
        yield problem(
            f"--max-seqlen-per-dp-cp-rank without {FLAG}.",
            "it is the part of one rank of a row that ranks split as its samples need",
            "--max-seqlen-per-dp-cp-rank",
            FLAG,
            fix=f"add {FLAG}",
        )


@rule
def shared_rows_fit(run: ResolvedRun) -> Iterator[MegatronError]:
    """All ranks together hold the longest sample, and heads can be dealt to them."""
    parallel, length = run.parallelism, run.model.seq_length
    if not parallel.hybrid_context_parallel or not length:
        return
    per_rank = parallel.max_seqlen_per_dp_cp_rank
    num_ranks = run.topology.data_parallel_size * parallel.context_parallel_size
    if per_rank is None or per_rank * num_ranks < length:
        yield problem(
            f"--seq-length {length} with {FLAG} on {num_ranks} data- and context-parallel ranks"
            f" and --max-seqlen-per-dp-cp-rank {per_rank}.",
            "all of these ranks together hold the longest sample",
            "--max-seqlen-per-dp-cp-rank",
            FLAG,
            fix=f"use --max-seqlen-per-dp-cp-rank {-(-length // num_ranks)} or more",
        )
    kinds = set(as_list(parallel.cp_comm_type or "p2p"))
    uneven = [g for g in nested_sizes(num_ranks) if (run.model.num_attention_heads or g) % g]
    if "a2a+p2p" in kinds or ("a2a" in kinds and uneven):
        yield problem(
            f"--cp-comm-type {' '.join(sorted(kinds))} with {FLAG} on {num_ranks} ranks.",
            "rows are split over groups of several sizes, and a2a deals the heads to each of them",
            "--cp-comm-type",
            FLAG,
            fix="use --cp-comm-type p2p, or all_gather",
        )


@rule
def shared_rows_change_nothing(run: ResolvedRun) -> Iterator[MegatronError]:
    """A result that depends on the other tokens of a micro batch depends on how rows are cut."""
    if not run.parallelism.hybrid_context_parallel:
        return
    for spec in all_flags().values():
        why, value = spec.metadata.per_micro_batch, run.config.value_of(spec.name)
        if spec.name in run.values:
            value = run.values[spec.name]
        for one in as_list(value):
            reason = why if isinstance(why, str) else why.get(one, "")
            if not (one and reason) or is_without_owner(spec, run.config):
                continue
            off = next((str(c) for c in spec.choices if c not in why), "0")
            is_on_by_default = bool(spec.default)
            yield problem(
                f"{FLAG} with {spec.flag} {one}.",
                reason,
                FLAG,
                spec.flag,
                fix=f"use {spec.flag} {off}" if is_on_by_default else f"drop {spec.flag}",
            )


@rule
def shared_rows_have_one_form(run: ResolvedRun) -> Iterator[MegatronError]:
    """Losses are summed over the tokens of a step, and a micro batch is one row of a decoder."""
    parallel, architecture = run.parallelism, run.encoders.architecture
    if not parallel.hybrid_context_parallel:
        return
    gathers = run.experts.num_moe_experts and run.experts.moe_token_dispatcher_type == "allgather"
    unlike = {
        "without --calculate-per-token-loss": (
            not parallel.calculate_per_token_loss,
            "losses are summed over the tokens of a step",
            "--calculate-per-token-loss",
            "add --calculate-per-token-loss",
        ),
        "with --micro-batch-size above 1": (
            run.schedule.micro_batch_size != 1,
            "a micro batch is one row, of as many samples as fit",
            "--micro-batch-size",
            "use --micro-batch-size 1",
        ),
        f"with a {architecture} model": (
            architecture != "gpt",
            "samples of decoders are split as they need",
            FLAG,
            f"drop {FLAG}",
        ),
        "with --expert-model-parallel-size and the allgather dispatcher": (
            bool(gathers and parallel.expert_model_parallel_size > 1),
            "rows of several lengths are gathered, and all-gathers take equal parts",
            "--moe-token-dispatcher-type",
            "use --moe-token-dispatcher-type alltoall",
        ),
    }
    for found, (is_given, reason, flag, fix) in unlike.items():
        if is_given:
            yield problem(f"{FLAG} {found}.", reason, FLAG, flag, fix=fix)
