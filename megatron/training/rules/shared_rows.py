"""Rules about rows that any number of ranks splits (--hybrid-context-parallel)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.foundation.errors import MegatronError
from megatron.core.topology.rank_grid import nested_sizes
from megatron.core.utils import as_list
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule

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
def shared_rows_are_summed(run: ResolvedRun) -> Iterator[MegatronError]:
    """What is a mean over a micro batch, or drawn for it, would depend on how rows are cut."""
    parallel, model, experts = run.parallelism, run.model, run.experts
    if not parallel.hybrid_context_parallel:
        return
    methods = set(as_list(experts.moe_router_load_balancing_type)) - {"none"}
    balances = any(c > 0 for c in as_list(experts.moe_aux_loss_coeff)) or "sinkhorn" in methods
    unlike = {
        "without --calculate-per-token-loss": (
            not parallel.calculate_per_token_loss,
            "losses are summed over the tokens of a step",
            "--calculate-per-token-loss",
            "add --calculate-per-token-loss",
        ),
        "with dropout": (
            model.hidden_dropout > 0 or model.attention_dropout > 0,
            "what is dropped is keyed by the place in a row, which depends on the number of ranks",
            "--hidden-dropout",
            "use --hidden-dropout 0 --attention-dropout 0",
        ),
        "with --micro-batch-size above 1": (
            run.schedule.micro_batch_size != 1,
            "a micro batch is one row, of as many samples as fit",
            "--micro-batch-size",
            "use --micro-batch-size 1",
        ),
        "with a loss that balances experts": (
            bool(experts.num_moe_experts and methods and balances),
            "such a loss is a mean over the tokens of a micro batch",
            "--moe-router-load-balancing-type",
            "use --moe-router-load-balancing-type none, with --moe-router-enable-expert-bias",
        ),
        "with a loss of indexers": (
            model.trains_indexer,
            "such a loss is a mean over the tokens of a micro batch",
            "--dsa-indexer-loss-coeff",
            "use --dsa-indexer-loss-coeff 0",
        ),
        "with a capacity of experts": (
            experts.moe_expert_capacity_factor is not None,
            "a capacity counts the tokens of a micro batch",
            "--moe-expert-capacity-factor",
            "drop --moe-expert-capacity-factor",
        ),
    }
    yield from _refused(unlike)


@rule
def shared_rows_are_understood(run: ResolvedRun) -> Iterator[MegatronError]:
    """Parts that know one number of ranks for all micro batches."""
    parallel, precision = run.parallelism, run.precision
    architecture = run.encoders.architecture
    if not parallel.hybrid_context_parallel:
        return
    unlike = {
        f"with a {architecture} model": (
            architecture != "gpt",
            "samples of decoders are split as they need",
            FLAG,
            f"drop {FLAG}",
        ),
        "with --dataloader-type other than single": (
            run.data.dataloader_type != "single",
            "global batches are taken in order",
            "--dataloader-type",
            "use --dataloader-type single",
        ),
        "with --data-audit-path": (
            run.data.data_audit_path is not None,
            "the record has one line for each micro batch of each replica",
            "--data-audit-path",
            "drop --data-audit-path",
        ),
        "with --transformer-impl transformer_engine": (
            run.model.transformer_impl == "transformer_engine",
            "that library's attention has one group of ranks",
            "--transformer-impl",
            "use --transformer-impl local",
        ),
        "with FP8 or FP4": (
            bool(precision.fp8 or precision.fp4),
            "the ranks that share a scale are the same for all micro batches",
            "--fp8-format",
            "train in bf16",
        ),
        "with --overlap-moe-expert-parallel-comm": (
            parallel.overlap_moe_expert_parallel_comm,
            "micro batches that are computed at once are split over the same ranks",
            "--overlap-moe-expert-parallel-comm",
            "drop --overlap-moe-expert-parallel-comm",
        ),
    }
    yield from _refused(unlike)


def _refused(unlike: dict[str, tuple[bool, str, str, str]]) -> Iterator[MegatronError]:
    """Yield a problem for each case that is given: (is given, rule, flag, fix)."""
    for found, (is_given, reason, flag, fix) in unlike.items():
        if is_given:
            yield problem(f"{FLAG} {found}.", reason, FLAG, flag, fix=fix)
