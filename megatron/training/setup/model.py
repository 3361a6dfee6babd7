"""Build this rank's model chunks, wrap them for data parallelism, and set their callbacks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from megatron.core import distributed
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.distributed_data_parallel_config import (
    DataParallelFlags,
    ShardedOptimizerFlags,
)
from megatron.core.enums import ModelType
from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, refuse_given, shown
from megatron.core.models.common.kernel_choices import KernelLine, kernel_choices
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.parameters.initialization import parameters_without_memory
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.settings.flags import fields_of
from megatron.core.timers import Timers
from megatron.core.transformer.add_adapters import add_adapters
from megatron.core.transformer.captured_layer import why_not_captured
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.dispatchers import EXCHANGE
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from megatron.training import global_vars
from megatron.training.arguments import run_as_in
from megatron.training.config.resolved import ResolvedRun
from megatron.training.launch.printing import print_rank_0
from megatron.training.rules.support import why_no_fp8_param_gather

ModelProvider = Callable[..., nn.Module]


def data_parallel_config(run: ResolvedRun) -> DistributedDataParallelConfig:
    """Return the settings of the data-parallel wrapper.

    Gradients are not checked for NaN before their reduction, which would read them once more: the
    step checks the losses and the optimizer checks the norm, both before the update.
    """
    fields = fields_of(DataParallelFlags, run.ddp) | fields_of(ShardedOptimizerFlags, run.ddp)
    optimizer = run.optimizer
    all_on_host = optimizer.optimizer_cpu_offload and optimizer.optimizer_offload_fraction == 1.0
    fields["overlap_cpu_optimizer_d2h_h2d"] &= all_on_host
    fields["fp8_param_gather"] &= not why_no_fp8_param_gather(run.config)
    return DistributedDataParallelConfig(**fields)


def build_model(
    run: ResolvedRun,
    provider: ModelProvider,
    groups: ProcessGroupCollection,
    *,
    wrap_with_ddp: bool = True,
) -> list[nn.Module]:
    """Return this rank's chunks in order, on its device and in its dtype.

    Args:
        provider: called once per chunk. Its arguments may be any of `pre_process`, `post_process`,
            `vp_stage`, `config`, `pg_collection` and `run`.
    """
    config = copy.copy(run.transformer_config)  # each model sets its own callbacks in it
    chunks = build_chunks(run, config, provider, groups, wrap_with_ddp=wrap_with_ddp)
    if run.lora.lora_rank is not None:
        add_adapters(chunks, run.lora, groups)
    announce_size(chunks, groups)
    _announce_kernels(run, config)
    chunks = move_and_convert(run, chunks)
    return wrap_for_data_parallelism(run, chunks, groups) if wrap_with_ddp else chunks


def build_chunks(
    run: ResolvedRun,
    config: TransformerConfig,
    provider: ModelProvider,
    groups: ProcessGroupCollection,
    *,
    wrap_with_ddp: bool,
) -> list[nn.Module]:
    """Call the provider for each chunk of this rank.

    Raises:
        ConfigError: the provider does not return modules, or cannot build several chunks.
    """
    layout, pp_rank = pipeline_layout(config), groups.pp.rank()
    num_chunks = run.parallelism.virtual_pipeline_model_parallel_size or 1
    # A model with sharded parameters need not fit into memory: it is filled unit by unit.
    shards_parameters = run.ddp.use_torch_fsdp2
    shards_parameters |= run.ddp.data_parallel_sharding_strategy == "optim_grads_params"
    chunks = []
    for vp_stage in range(num_chunks) if num_chunks > 1 else (None,):
        with parameters_without_memory() if shards_parameters and wrap_with_ddp else nullcontext():
            chunk = _call_with_known(
                provider,
                pre_process=layout.has_embedding(pp_rank, vp_stage),
                post_process=layout.has_loss(pp_rank, vp_stage),
                vp_stage=vp_stage,
                config=config,
                pg_collection=groups,
                run=run,
            )
        if not isinstance(chunk, nn.Module):
            raise ConfigError(
                f"the model provider returned {shown(chunk)}.",
                rule="it returns one chunk of the model, a torch.nn.Module",
                fix="end the provider with `return model`",
            )
        chunks.append(chunk)
    return chunks


def move_and_convert(run: ResolvedRun, chunks: list[nn.Module]) -> list[nn.Module]:
    """Return the chunks on this rank's device, with --bf16 or --fp16 in half precision."""
    where = device.current_device()
    chunks = [chunk.to(where) for chunk in chunks]
    if run.precision.fp16 or run.precision.bf16:
        chunks = [Float16Module(get_model_config(chunk), chunk) for chunk in chunks]
    return chunks


def wrap_for_data_parallelism(
    run: ResolvedRun, chunks: list[nn.Module], groups: ProcessGroupCollection
) -> list[nn.Module]:
    """Return the chunks in the data-parallel wrapper of the run."""
    ddp_config = data_parallel_config(run)
    wrapper = DistributedDataParallel
    if run.ddp.use_torch_fsdp2:
        wrapper = distributed.TorchFullyShardedDataParallel
    return [
        wrapper(get_model_config(chunk), ddp_config, chunk, pg_collection=groups)
        for chunk in chunks
    ]


def kernels_of_run(
    run: ResolvedRun, config: TransformerConfig, device_type: str
) -> list[KernelLine]:
    """Return the kernels of a training step on a type of device, which may be absent."""
    return kernel_choices(
        config,
        device_type,
        has_documents=run.data.reset_attention_mask
        or run.encoders.traits.is_bidirectional
        or run.encoders.traits.has_images,
        has_bias=run.model.position_embedding_type == "relative",
        is_planned=device_type != device.device_type(),
        backend=run.model.transformer_impl,
    )


def _announce_kernels(run: ResolvedRun, config: TransformerConfig) -> None:
    here = device.device_type()
    lines = kernels_of_run(run, config, here)
    chosen = [f"{x.operation} {x.kernel}" for x in lines]
    print_rank_0(f" > kernels on {here}: {'; '.join(chosen)}")
    if config.captures_layers:
        why = why_not_captured(config) or ("no graphs on CPUs" if here == "cpu" else "")
        found = f"none, {why}" if why else "dense ones, each whole in two graphs per micro batch"
        print_rank_0(f" > layers that are captured: {found}")
    for line in lines:
        if line.operation == EXCHANGE.operation:  # the line contains why it is not the flag's
            print_rank_0(f" > {line}")


def _call_with_known(provider: ModelProvider, **options: Any) -> nn.Module:
    """Call `provider` with the options that it takes; older providers take only the first two.

    Raises:
        ConfigError: a rank has several chunks, and the provider does not take `vp_stage`.
    """
    parameters = inspect.signature(provider).parameters.values()
    known = {p.name for p in parameters}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        known |= set(options) - {"run"}  # Megatron's providers pass **kwargs on to their models
    if options["vp_stage"] is not None and "vp_stage" not in known:
        name = getattr(provider, "__name__", type(provider).__name__)
        raise ConfigError(
            f"{name}() takes no vp_stage, and ranks have several model chunks.",
            rule="it is called once for each chunk, and vp_stage is the number of the chunk",
            flags=["--num-virtual-stages-per-pipeline-rank",
                   "--num-layers-per-virtual-pipeline-stage"],
            fix=f"give {name}() an argument vp_stage=None and pass it to the model",
        )  # fmt: skip
    return provider(**{name: value for name, value in options.items() if name in known})


def announce_size(chunks: list[nn.Module], pg_collection: ProcessGroupCollection) -> None:
    """Print the number of parameters of this model-parallel rank, once per replica."""
    if pg_collection.dp_cp.rank() != 0:
        return
    count = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    place = f"({pg_collection.tp.rank()}, {pg_collection.pp.rank()})"
    print(
        f" > number of parameters on (tensor, pipeline) model parallel rank {place}: {count}",
        flush=True,
    )


def refuse_other_models(where: str, model_type: ModelType) -> None:
    """Raise `ConfigError` for a model type with encoder and decoder."""
    refuse_given(
        where,
        {f"model_type={model_type}": model_type == ModelType.encoder_and_decoder},
        rule="a model is a stack of decoder layers",
        fix="use ModelType.encoder_or_decoder",
    )


def get_model(
    model_provider_func: ModelProvider,
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
    config: object = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[nn.Module]:
    """Build this rank's chunks from the settings of `get_args()`.

    Args:
        model_provider_func: see `build_model`.
        config: accepted and ignored; the settings determine it.
    """
    refuse_other_models("get_model", model_type)
    run = run_as_in(global_vars.get_args())
    groups = resolve_groups(pg_collection)
    return build_model(run, model_provider_func, groups, wrap_with_ddp=wrap_with_ddp)


def install_callbacks(
    run: ResolvedRun,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    groups: ProcessGroupCollection,
    timers: Timers,
) -> Any:
    """Set the callbacks in the config of every chunk; return the first chunk's config."""
    wrapped = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    for config in {id(c): c for c in map(get_model_config, model)}.values():
        config.timers = timers if run.logging.timing_log_level > 0 else None
        config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
        if optimizer is not None:
            config.grad_scale_func = optimizer.scale_loss
        if run.ddp.overlap_grad_reduce and wrapped:
            config.no_sync_func = _one_or_list([chunk.no_sync for chunk in wrapped])
            # The hooks of a backward pass without weight gradients cannot start their reduction,
            # so the schedule starts it.
            splits_backward = schedule_named(run.parallelism.pipeline_schedule).splits_backward
            if run.ddp.align_grad_reduce or splits_backward:
                config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in wrapped])
    return get_model_config(model[0])


def _one_or_list(functions: list[Any]) -> Any:
    """Return the function of a single chunk, or the list for several, as schedules expect."""
    return functions[0] if len(functions) == 1 else functions
