"""Rules about parallelism and dynamic context parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.foundation.device import device_type
from megatron.core.foundation.errors import MegatronError, TopologyError
from megatron.core.foundation.mpi import MPI, mpi_problems
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.ssm.mixers import RECURRENT_MIXERS
from megatron.core.topology.rank_grid import nested_sizes
from megatron.core.transformer.config.layer_kinds import (
    ATTENTION,
    ATTENTION_AND_MAMBA,
    COMPRESSED_ATTENTION,
    LINEAR,
    NOTHING,
    SPARSE_ATTENTION,
)
from megatron.core.utils import as_list
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import all_flags
from megatron.training.rules.model import has_sizes
from megatron.training.rules.registry import problem, rule
from megatron.training.rules.support import is_without_owner
from megatron.training.setup.stages import planned_layout

_VECTOR = 32
"""Elements of 16 bits in 64 bytes, the widest vector of a processor."""


@rule
def ranks_fill_the_grid(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the parallel sizes fit the world size."""
    try:
        planned_layout(run)
    except TopologyError as error:
        yield error


@rule
def torch_has_the_backend(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that torch was built with MPI if it is the backend."""
    if run.parallelism.distributed_backend == MPI:
        yield from mpi_problems("--distributed-backend")


@rule
def one_way_to_cut_virtual_stages(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that one flag sets the virtual stages, and that they divide the layers."""
    parallel = run.parallelism
    flags = {
        "--num-layers-per-virtual-pipeline-stage": parallel.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": parallel.num_virtual_stages_per_pipeline_rank,
        "--pipeline-model-parallel-layout": parallel.pipeline_model_parallel_layout,
    }
    given = [name for name, value in flags.items() if value is not None]
    if len(given) > 1:
        yield problem(
            f"{' and '.join(given)} are given together.",
            "virtual stages are described in one way",
            *given,
            fix=f"keep {given[-1]}",
        )
    is_virtual = flags["--num-layers-per-virtual-pipeline-stage"] is not None
    is_virtual |= (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1
    if is_virtual and parallel.pipeline_model_parallel_size == 1:
        yield problem(
            f"{given[0]} with --pipeline-model-parallel-size 1.",
            "virtual stages divide the work of pipeline ranks",
            given[0],
            fix=f"drop {given[0]}, or use a pipeline size above 1",
        )
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    counted = (
        (run.model.num_layers or 0)
        + parallel.account_for_embedding_in_pipeline_split
        + parallel.account_for_loss_in_pipeline_split
    )
    per_rank = counted // parallel.pipeline_model_parallel_size
    if (
        per_chunk
        and per_chunk > 0
        and per_rank % per_chunk
        and parallel.pipeline_model_parallel_size > 1
    ):
        yield problem(
            f"{per_rank} layers of a pipeline rank cannot be cut into chunks of {per_chunk}.",
            "each rank holds a whole number of chunks",
            "--num-layers-per-virtual-pipeline-stage",
            "--num-layers",
            "--pipeline-model-parallel-size",
            fix=f"use a number that divides {per_rank}",
        )


@rule
def virtual_stages_belong_to_interleaved_schedules(run: ResolvedRun) -> Iterator[MegatronError]:
    """Refuse flags of virtual stages with a schedule that fixes the number of chunks."""
    parallel = run.parallelism
    asked = {
        "--num-layers-per-virtual-pipeline-stage": parallel.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": parallel.num_virtual_stages_per_pipeline_rank,
    }
    given = [name for name, value in asked.items() if value is not None]
    schedule = schedule_named(run.parallelism.pipeline_schedule)
    if given and schedule.num_chunks is not None:
        yield problem(
            f"--pipeline-schedule {schedule.name} with virtual stages.",
            f"{schedule.name} always has {schedule.num_chunks} chunk(s) on every rank",
            *given,
            fix="use --pipeline-schedule 1f1b (interleaved), or drop the virtual stages",
        )


@rule
def parameters_off_the_device(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the settings of parameter shards in host memory or in a file on a GPU."""
    if device_type() == "cpu":
        return
    if run.ddp.param_cpu_offload and not run.optimizer.optimizer_cpu_offload:
        yield problem(
            f"--param-cpu-offload without --optimizer-cpu-offload on {device_type()}.",
            "parameters in host memory are updated by the CPU",
            fix="add --optimizer-cpu-offload",
        )
    if run.ddp.param_offload_path is not None:
        yield problem(
            f"--param-offload-path on {device_type()}.",
            "shards in a file are gathered by CPU ranks",
            fix="use --optimizer-offload-path, which offloads the larger part of the state",
        )


@rule
def copies_of_sharded_state(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that instances of the distributed optimizer divide the replicas."""
    instances, dp = run.ddp.num_distributed_optimizer_instances, run.topology.data_parallel_size
    if instances == 1:
        return
    if dp % instances:
        yield problem(
            f"--num-distributed-optimizer-instances {instances} for {dp} replicas.",
            "each instance shards its state over an equal number of replicas",
            fix=f"use a number that divides {dp}",
        )
    elif run.experts.num_moe_experts and (copies := _replicas_of_experts(run)) % instances:
        yield problem(
            f"--num-distributed-optimizer-instances {instances} for {copies} replica(s) of the"
            " experts.",
            "each instance shards the state of experts over an equal number of replicas;"
            " --expert-model-parallel-size reduces the replicas of experts",
            "--expert-model-parallel-size",
            fix=f"use a number that divides {copies}, or fewer expert-parallel ranks",
        )


def _replicas_of_experts(run: ResolvedRun) -> int:
    parallel = run.parallelism
    each = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1)
    return run.topology.world_size // (parallel.pipeline_model_parallel_size * each)


FLAG = "--hybrid-context-parallel"


@rule
def shared_rows_fit(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that all ranks together have room for the longest sample, and the heads for a2a."""
    parallel, length = run.parallelism, run.model.seq_length
    if not parallel.hybrid_context_parallel or not length:
        return
    per_rank = parallel.max_seqlen_per_dp_cp_rank
    num_ranks = run.topology.data_parallel_size * parallel.context_parallel_size
    if per_rank is None or per_rank * num_ranks < length:
        yield problem(
            f"--seq-length {length} with {FLAG} on {num_ranks} data- and context-parallel ranks"
            f" and --max-seqlen-per-dp-cp-rank {per_rank}.",
            "these ranks together have room for the longest sample",
            fix=f"use --max-seqlen-per-dp-cp-rank {-(-length // num_ranks)} or more",
        )
    kinds = set(as_list(parallel.cp_comm_type or "p2p"))
    heads = {block.settings.get("num_attention_heads", 0) for block in run.model.blocks}
    heads.add(run.model.num_attention_heads or 0)
    uneven = [g for g in nested_sizes(num_ranks) if any(count % g for count in heads)]
    if "a2a+p2p" in kinds or ("a2a" in kinds and uneven):
        yield problem(
            f"--cp-comm-type {' '.join(sorted(kinds))} with {FLAG} on {num_ranks} ranks.",
            "groups of several sizes split sequences, and a2a splits the heads over each group",
            fix="use --cp-comm-type p2p, or all_gather",
        )


@rule
def shared_rows_change_nothing(run: ResolvedRun) -> Iterator[MegatronError]:
    """Refuse settings whose result depends on which tokens share a micro batch or a rank."""
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
                spec.flag,
                fix=f"use {spec.flag} {off}" if is_on_by_default else f"drop {spec.flag}",
            )


@rule
def units_have_full_vectors(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that --layout-invariant-mode can cut the matrices into equal units.

    Kernels compute the last elements of a row by other instructions if they do not fill a vector.
    """
    parallel, model = run.parallelism, run.model
    if not parallel.layout_invariant_mode or not has_sizes(run):
        return
    units, tp = parallel.layout_invariant_tensor_units, parallel.tensor_model_parallel_size
    if not _is_power_of_two(units) or units % tp:
        yield problem(
            f"--layout-invariant-tensor-units {units} with --tensor-model-parallel-size {tp}.",
            "a rank holds a subtree of the units, whose number is a power of two",
            fix=f"use --layout-invariant-tensor-units {max(8, 1 << (tp - 1).bit_length())}",
        )
        return
    config = run.transformer_config
    shared = config.moe_shared_expert_intermediate_size
    widths = {
        "--hidden-size": (model.hidden_size, 1),
        "--ffn-hidden-size": (config.ffn_hidden_size, units),
        "--kv-channels": (config.kv_channels, 1),
        "--v-channels": (config.v_channels, 1),
        "--per-layer-embed-dim": (config.per_layer_embed_dim, 1),
        "--moe-shared-expert-intermediate-size": (shared, units),
        "--moe-ffn-hidden-size": (config.num_moe_experts and config.moe_ffn_hidden_size, units),
    }
    for flag, (width, pieces) in widths.items():
        if (width or 0) % (_VECTOR * pieces):
            yield problem(
                f"{flag} {width} is not a multiple of {_VECTOR * pieces}.",
                f"with --layout-invariant-mode each unit has a multiple of {_VECTOR} channels",
                "--layout-invariant-mode",
                "--layout-invariant-tensor-units",
                fix=f"use a multiple of {_VECTOR * pieces}, or fewer units"
                if pieces > 1
                else f"use a multiple of {_VECTOR}",
            )
    if model.attention_output_gate and model.attention_gate_by_head:
        yield problem(
            "--layout-invariant-mode with --attention-gate-by-head.",
            f"a unit has a multiple of {_VECTOR} channels, and a head has one gate",
            "--layout-invariant-mode",
            fix="drop one of them",
        )
    groups = model.num_query_groups if model.group_query_attention else None
    if groups and groups % tp:
        yield problem(
            f"--num-query-groups {groups} with --tensor-model-parallel-size {tp}.",
            "with --layout-invariant-mode one rank holds the keys and values of a group",
            "--layout-invariant-mode",
            fix=f"use a tensor-parallel size that divides {groups}",
        )


@rule
def units_of_the_sequence_fit(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that --layout-invariant-mode can cut the sequence into the units of each rank."""
    parallel, length = run.parallelism, run.model.seq_length
    if not parallel.layout_invariant_mode or not has_sizes(run):
        return
    units, cp = parallel.layout_invariant_sequence_units, parallel.context_parallel_size
    tp = parallel.tensor_model_parallel_size
    flag = "--layout-invariant-sequence-units"
    if units < 1 or (units > 1 and units % 2):
        yield problem(
            f"{flag} {units}.",
            "the first and the last unit are a pair, as are the second and the last but one",
            fix=f"use {flag} {max(units + 1, 2)}",
        )
    elif cp > 1 and (units % (2 * cp) or not _is_power_of_two(units // (2 * cp))):
        fitting = 2 * cp
        while fitting < units:
            fitting *= 2
        yield problem(
            f"{flag} {units} with --context-parallel-size {cp}.",
            "a rank holds 2, 4, 8 ... units of the sequence; the run in one process needs the same"
            " number of units",
            "--context-parallel-size",
            fix=f"use {flag} {fitting}",
        )
    elif length and length % units:
        yield problem(
            f"--seq-length {length} with {flag} {units}.",
            "all units of a sequence have the same length",
            flag,
            fix=f"use --seq-length {-(-length // units) * units}",
        )
    elif length and run.transformer_config.num_moe_experts and length % (cp * tp):
        yield problem(
            f"--seq-length {length} with --tensor-model-parallel-size {tp} and --num-experts.",
            "with --layout-invariant-mode the ranks of a sequence send equally many tokens",
            "--layout-invariant-mode",
            "--context-parallel-size",
            fix=f"use --seq-length {-(-length // (cp * tp)) * cp * tp}",
        )


@rule
def mixers_have_units(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that --layout-invariant-mode can cut the mixers other than attention into units."""
    parallel = run.parallelism
    if not parallel.layout_invariant_mode or not has_sizes(run):
        return
    config, units = run.transformer_config, parallel.layout_invariant_tensor_units
    kinds = config.layer_kinds()
    for name in sorted({kind.mixer for kind in kinds} - {ATTENTION, LINEAR, NOTHING}):
        reason = ""
        if name in (SPARSE_ATTENTION, COMPRESSED_ATTENTION):
            reason = "chosen keys and compressed entries have no products in units"
        elif name == ATTENTION_AND_MAMBA:
            reason = "the sum of attention and Mamba-2 is not computed in units"
        elif parallel.sequence_units > 1:
            reason = "the recurrence over a sequence is not cut into units"
        else:
            sizes = RECURRENT_MIXERS[name].sizes_of(config)
            if any(n % units for n in (sizes.num_heads, sizes.channels)):
                reason = (
                    f"the {sizes.num_heads} heads and {sizes.channels} channels of the convolution"
                    f" are not multiples of the {units} units"
                )
        if reason:
            yield problem(
                f"--layout-invariant-mode with layers of {name}.",
                reason,
                "--layout-invariant-mode",
                "--hybrid-layer-pattern",
                "--experimental-attention-variant",
                fix="drop --layout-invariant-mode",
            )


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@rule
def units_have_equal_parts_of_latent_heads(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that --layout-invariant-mode can cut the projections of latent attention."""
    if not run.parallelism.layout_invariant_mode or not has_sizes(run):
        return
    config = run.transformer_config
    if not config.multi_latent_attention:
        return
    heads, units = config.num_attention_heads, config.tensor_units
    d, p, e = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
    gate = 1 if config.attention_output_gate else units
    if any(heads * width % units for width in (d + p, d + e, e, gate)):
        yield problem(
            f"--num-attention-heads {heads} with --layout-invariant-tensor-units {units}.",
            "with --layout-invariant-mode each unit has equally many channels of latent attention"
            " and of its gate",
            "--multi-latent-attention",
            fix=f"use a multiple of {units} heads, or fewer units",
        )
