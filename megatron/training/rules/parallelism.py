"""Rules about how the run is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.foundation.device import device_type
from megatron.core.foundation.errors import MegatronError, TopologyError
from megatron.core.foundation.mpi import MPI, mpi_problems
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.topology.rank_grid import plan_layout
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule


@rule
def ranks_fill_the_grid(run: ResolvedRun) -> Iterator[MegatronError]:
    """World size and parallel sizes fit."""
    parallel = run.parallelism
    try:
        plan_layout(
            run.topology.world_size,
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            cp=parallel.context_parallel_size,
            ep=parallel.expert_model_parallel_size,
            expert_tp=parallel.expert_tensor_parallel_size,
            order=run.topology.rank_order,
        )
    except TopologyError as error:
        yield error


@rule
def torch_has_the_backend(run: ResolvedRun) -> Iterator[MegatronError]:
    """MPI is there only where torch was built with it."""
    if run.parallelism.distributed_backend == MPI:
        yield from mpi_problems("--distributed-backend")


@rule
def one_way_to_cut_virtual_stages(run: ResolvedRun) -> Iterator[MegatronError]:
    """Chunks per rank, layers per chunk and a layout string exclude each other."""
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
            "--pipeline-model-parallel-size",
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
    """Other schedules decide by themselves how many chunks a rank has."""
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
            f"{schedule.name} has {schedule.num_chunks} chunk(s) on every rank by itself",
            "--pipeline-schedule",
            *given,
            fix="use --pipeline-schedule 1f1b (interleaved), or drop the virtual stages",
        )


@rule
def gathers_belong_to_sharded_state(run: ResolvedRun) -> Iterator[MegatronError]:
    """Overlapped gathers exist only with the distributed optimizer."""
    ddp = run.ddp
    if ddp.overlap_param_gather and not ddp.use_distributed_optimizer:
        yield problem(
            "--overlap-param-gather without --use-distributed-optimizer.",
            "parameters are gathered only if the optimizer shards them",
            "--overlap-param-gather",
            "--use-distributed-optimizer",
            fix="add --use-distributed-optimizer",
        )
    if ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        yield problem(
            "--overlap-param-gather without --overlap-grad-reduce.",
            "the overlapped gather walks the buckets of the overlapped reduction",
            "--overlap-param-gather",
            "--overlap-grad-reduce",
            fix="add --overlap-grad-reduce",
        )


@rule
def one_zero_stage(run: ResolvedRun) -> Iterator[MegatronError]:
    """The two ways to ask for sharded state agree."""
    asked = run.config.ddp
    if asked.use_megatron_fsdp:  # whose strategy decides, as in Megatron-LM
        return
    if asked.use_distributed_optimizer and asked.data_parallel_sharding_strategy == "no_shard":
        yield problem(
            "--use-distributed-optimizer with --data-parallel-sharding-strategy no_shard.",
            "the distributed optimizer is the strategy optim or a higher one",
            "--use-distributed-optimizer",
            "--data-parallel-sharding-strategy",
            fix="drop --data-parallel-sharding-strategy no_shard",
        )


@rule
def torch_shards_alone(run: ResolvedRun) -> Iterator[MegatronError]:
    """torch's FSDP2 excludes our own sharding, copies of state, and pipelines."""
    ddp = run.ddp
    if not ddp.use_torch_fsdp2:
        return
    others = {
        "--pipeline-model-parallel-size": run.parallelism.pipeline_model_parallel_size > 1,
        "--num-distributed-optimizer-instances": ddp.num_distributed_optimizer_instances > 1,
        "--use-distributed-optimizer": run.config.ddp.use_distributed_optimizer,
        "--use-megatron-fsdp": ddp.use_megatron_fsdp,
        "--data-parallel-sharding-strategy": run.config.ddp.data_parallel_sharding_strategy
        not in (None, "no_shard"),
        "--overlap-param-gather": ddp.overlap_param_gather,
        "--overlap-moe-expert-parallel-comm": run.parallelism.overlap_moe_expert_parallel_comm,
    }
    for flag, is_on in others.items():
        if is_on:
            yield problem(
                f"--use-torch-fsdp2 with {flag}.",
                "torch shards everything itself, over all replicas, for one pass at a time",
                "--use-torch-fsdp2",
                flag,
                fix=f"drop {flag}, or use --use-megatron-fsdp instead of --use-torch-fsdp2",
            )


@rule
def parameters_in_host_memory(run: ResolvedRun) -> Iterator[MegatronError]:
    """Shards of parameters may be in host memory; what updates them is there, too."""
    ddp = run.ddp
    if not ddp.param_cpu_offload:
        return
    if ddp.data_parallel_sharding_strategy != "optim_grads_params" or ddp.param_offload_path:
        yield problem(
            f"--param-cpu-offload with {ddp.data_parallel_sharding_strategy}"
            f"{' and --param-offload-path' if ddp.param_offload_path else ''}.",
            "the own shards of parameters are in one place, and gathered from it",
            "--param-cpu-offload",
            "--data-parallel-sharding-strategy",
            fix="add --data-parallel-sharding-strategy optim_grads_params, and drop"
            " --param-offload-path",
        )
    if device_type() != "cpu" and not run.optimizer.optimizer_cpu_offload:
        yield problem(
            f"--param-cpu-offload without --optimizer-cpu-offload on {device_type()}.",
            "parameters are updated where they are",
            "--param-cpu-offload",
            "--optimizer-cpu-offload",
            fix="add --optimizer-cpu-offload",
        )


@rule
def parameters_in_a_file(run: ResolvedRun) -> Iterator[MegatronError]:
    """Shards of parameters may be in a file; full parameters may not."""
    ddp = run.ddp
    if ddp.param_offload_path is None:
        return
    if ddp.data_parallel_sharding_strategy != "optim_grads_params":
        yield problem(
            f"--param-offload-path with {ddp.data_parallel_sharding_strategy}.",
            "the file holds the own shards of parameters, which are gathered from it",
            "--param-offload-path",
            "--data-parallel-sharding-strategy",
            fix="add --data-parallel-sharding-strategy optim_grads_params",
        )
    if device_type() != "cpu":
        yield problem(
            f"--param-offload-path on {device_type()}.",
            "shards in a file are gathered by CPU ranks",
            "--param-offload-path",
            fix="use --optimizer-offload-path, which takes the larger part of the state away",
        )


@rule
def copies_of_sharded_state(run: ResolvedRun) -> Iterator[MegatronError]:
    """Instances of the distributed optimizer share the replicas evenly."""
    instances, dp = run.ddp.num_distributed_optimizer_instances, run.topology.data_parallel_size
    if instances == 1:
        return
    if dp % instances:
        yield problem(
            f"--num-distributed-optimizer-instances {instances} for {dp} replicas.",
            "each instance shards its state over an equal number of replicas",
            "--num-distributed-optimizer-instances",
            fix=f"use a number that divides {dp}",
        )
    elif run.experts.num_moe_experts and (copies := _replicas_of_experts(run)) % instances:
        yield problem(
            f"--num-distributed-optimizer-instances {instances} for {copies} replica(s) of the"
            " experts.",
            "each instance shards the state of experts over an equal number of their replicas, of"
            " which there are fewer with --expert-model-parallel-size",
            "--num-distributed-optimizer-instances",
            "--expert-model-parallel-size",
            fix=f"use a number that divides {copies}, or fewer expert-parallel ranks",
        )
    if not run.ddp.use_distributed_optimizer:
        yield problem(
            f"--num-distributed-optimizer-instances {instances} without"
            " --use-distributed-optimizer.",
            "instances are copies of sharded optimizer state",
            "--num-distributed-optimizer-instances",
            "--use-distributed-optimizer",
            fix="add --use-distributed-optimizer",
        )


def _replicas_of_experts(run: ResolvedRun) -> int:
    parallel = run.parallelism
    each = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1)
    return run.topology.world_size // (parallel.pipeline_model_parallel_size * each)


@rule
def one_bucket_rule(run: ResolvedRun) -> Iterator[MegatronError]:
    """Buckets have a size or a number."""
    if run.ddp.bucket_size is not None and run.ddp.num_buckets is not None:
        yield problem(
            "--ddp-bucket-size and --ddp-num-buckets are given together.",
            "one follows from the other",
            "--ddp-bucket-size",
            "--ddp-num-buckets",
            fix="keep --ddp-bucket-size",
        )
