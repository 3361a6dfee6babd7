"""Build the optimizer of a run from its config and its model chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.communication import UNSHARDED, Mesh
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.model_parameters import names_in_model
from megatron.core.distributed.parameter_shard import MainParamShard, ParameterShard, main_param_of
from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.optimizer.chunked_state_optimizer import build_chunked_state_optimizer
from megatron.core.optimizer.definition import (
    ElementwiseOptimizer,
    ModelTensors,
    OptimizerDefinition,
)
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.gradient_norm import GradientReader
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import (
    Overrides,
    agree_on_keys,
    build_param_groups,
    group_key,
    optimizer_name_of,
)
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.topology.group import SINGLE_RANK, Group


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: Overrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """Build the optimizer of this rank.

    Args:
        model_chunks: usually `DistributedDataParallel`; a bare module counts as the only replica,
            with gradients in `.grad`.
        config_overrides: {ParamKey(name="*.router.*"): {"lr_mult": 0.1}, ...}; later rules win.
        use_gloo_process_groups: accepted; checkpoints need no groups of their own.
    Communication:
        one all-gather of the kinds of parameter groups over `mp`.
    """
    refuse_given(
        "get_megatron_optimizer",
        {"dump_param_to_param_group_map": dump_param_to_param_group_map},
        rule="no file of the parameter groups is written",
        fix="read optimizer.param_groups",
    )
    groups = resolve_groups(pg_collection)
    named = [pair for chunk in model_chunks for pair in _named_parameters(chunk)]
    width_multiplier = _width_multiplier(model_chunks)
    modules = (module for chunk in model_chunks for module in chunk.modules())
    # Rows of a lookup table, such as learned positions, are used one by one.
    tables = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    keys = {
        id(parameter): group_key(
            name,
            parameter,
            config,
            config_overrides,
            is_table=id(parameter) in tables,
            width_multiplier=width_multiplier,
        )
        for name, parameter in named
    }

    def make_torch_optimizer(shards: list[MainParamShard]) -> Any:
        param_groups = build_param_groups(
            [(item.main_param, keys[id(item.shard.parameter)]) for item in shards],
            agree_on_keys(set(keys.values()), groups),
            config,
        )
        matrices = [p for _, p in named if optimizer_name_of(keys[id(p)], config) == "muon"]
        return build_torch_optimizer(config, param_groups, shards, matrices, model_chunks, groups)

    return assemble_optimizer(config, model_chunks, groups, make_torch_optimizer)


def assemble_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    groups: ProcessGroupCollection,
    make_torch_optimizer: Callable[[list[MainParamShard]], object],
) -> MegatronOptimizer:
    """Build the optimizer of this rank around a torch optimizer of the caller.

    Args:
        make_torch_optimizer: given the shards that this rank updates, returns a torch optimizer
            (or the result of `build_torch_optimizer`) over their main tensors.
    Raises:
        ConfigError: only one of the config and the model chunks shards the optimizer.
    """
    _check_agreement(config, model_chunks)
    is_chunked = chunks_state(config)
    _check_gathers(model_chunks, is_chunked)
    shards, reader = _collect_shards(model_chunks, groups, is_chunked=is_chunked)
    return MegatronOptimizer(
        make_torch_optimizer(shards),
        config,
        shards,
        reader,
        model_chunks,
        build_grad_scaler(config),
    )


def build_grad_scaler(config: OptimizerConfig) -> ConstantGradScaler | None:
    """Return the loss scaler of the config, or None."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
        floor_policy=config.on_loss_scale_floor,
    )


def _collect_shards(
    model_chunks: Sequence[nn.Module], groups: ProcessGroupCollection, *, is_chunked: bool
) -> tuple[list[MainParamShard], GradientReader]:
    spans, unbucketed, parameters = [], [], []
    shard_groups: tuple[Group, Group] = (SINGLE_RANK, SINGLE_RANK)
    param_index: dict[int, tuple[int, int]] = {}
    for number, chunk in enumerate(model_chunks):
        named = list(_named_parameters(chunk))
        parameters += [parameter for _, parameter in named]
        param_index |= {id(p): (number, index) for index, (_, p) in enumerate(named)}
        if isinstance(chunk, DistributedDataParallel):
            spans += chunk.spans()
            unbucketed += chunk.unbucketed_shards()
            shard_groups = (chunk.mesh(False).shard, chunk.mesh(True).shard)
        else:
            unbucketed += [
                ParameterShard(name, p, 0, p.numel(), p, None, UNSHARDED) for name, p in named
            ]
    reader = GradientReader(spans, unbucketed, parameters, groups, shard_groups)
    shards = [
        MainParamShard(
            shard, main_param_of(shard, is_chunked=is_chunked), param_index[id(shard.parameter)]
        )
        for shard in reader.shards
    ]
    return shards, reader


def _named_parameters(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters of a chunk with their names in the whole model."""
    module = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
    names = names_in_model(module)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield names[name], parameter


def _width_multiplier(model_chunks: Sequence[nn.Module]) -> float | None:
    """Return width / base width of a model under muP, None for others."""
    for chunk in model_chunks:
        config: Any = getattr(chunk, "config", None)
        if getattr(config, "use_mup", False):
            return float(config.width_multiplier)
    return None


def _mesh(model_chunks: Sequence[nn.Module], is_expert: bool) -> Mesh:
    """Return the replicas of the dense or of the expert parameters, equal for all chunks."""
    for chunk in model_chunks:
        if isinstance(chunk, DistributedDataParallel):
            return chunk.mesh(is_expert)
    return UNSHARDED


def _check_gathers(model_chunks: Sequence[nn.Module], is_chunked: bool) -> None:
    """Refuse weights that are rounded for their gather and completed by optimizer state."""
    if is_chunked and any(
        isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.gathers_params_in_fp8
        for chunk in model_chunks
    ):
        raise ConfigError(
            "fp8_param_gather with optimizer state that completes the weights of the model.",
            rule="main weights are kept apart, because the model holds rounded ones",
            flags=["--fp8-param-gather", "--use-precision-aware-optimizer",
                   "--optimizer-cpu-offload"],
            fix="drop --fp8-param-gather, or keep the state in fp32 on the device",
        )  # fmt: skip


def _check_agreement(config: OptimizerConfig, model_chunks: Sequence[nn.Module]) -> None:
    """Refuse a sharded optimizer over unsharded model chunks, and the reverse."""
    sharded = {
        isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer
        for chunk in model_chunks
    }
    if sharded and sharded != {config.use_distributed_optimizer}:
        raise ConfigError(
            f"OptimizerConfig.use_distributed_optimizer={config.use_distributed_optimizer}, but the"
            f" model chunks were wrapped with {sorted(sharded)}.",
            rule="the optimizer shards its state exactly where the wrapper shards gradients",
            flags=["--use-distributed-optimizer"],
            fix="give DistributedDataParallelConfig and OptimizerConfig the same value",
        )


class MultiOptimizer:
    """Several optimizers with the interface of one `torch.optim.Optimizer`."""

    def __init__(self, optimizers: Sequence[Any], param_groups: list[dict[str, Any]]) -> None:
        """
        Args:
            param_groups: the groups of all optimizers, in the order that all ranks agree on.
        """
        self.optimizers, self.param_groups = list(optimizers), param_groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of all tensors."""
        return {
            tensor: entry
            for optimizer in self.optimizers
            for tensor, entry in optimizer.state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer under its number."""
        return {
            str(number): optimizer.state_dict() for number, optimizer in enumerate(self.optimizers)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(number)])


def chunks_state(config: OptimizerConfig) -> bool:
    """Return whether state is stored in low precision or off the device, and updated in chunks."""
    return config.use_precision_aware_optimizer or config.offloads_optimizer


def build_torch_optimizer(
    config: OptimizerConfig,
    param_groups: list[dict[str, Any]],
    shards: Sequence[MainParamShard],
    matrices: Sequence[nn.Parameter],
    model_chunks: Sequence[nn.Module],
    groups: ProcessGroupCollection,
) -> Any:
    """Return one optimizer, or `MultiOptimizer` where groups name different ones.

    Args:
        param_groups: over the main tensors of `shards`. A group's "optimizer" names its optimizer,
            `config.optimizer` without one. The groups of the result are the same dictionaries, in
            this order.
        matrices: the parameters of Muon on this model-parallel rank, whether this rank owns a
            piece of them or not.
    Communication: as of `MuonRedistribute`, if Muon updates any group.
    """
    meshes = (_mesh(model_chunks, False), _mesh(model_chunks, True))
    parts = ModelTensors(shards, matrices, groups, meshes)
    names = [group.get("optimizer", config.optimizer) for group in param_groups]
    groups_of: dict[str, list[dict[str, Any]]] = {}
    for name, group in zip(names, param_groups, strict=True):
        groups_of.setdefault(name, []).append(group)
    optimizers = {
        name: _build_one(OPTIMIZERS[name], config, its_groups, parts)
        for name, its_groups in groups_of.items()
    }
    if len(optimizers) == 1:
        return optimizers[names[0]]
    remaining = {name: iter(optimizer.param_groups) for name, optimizer in optimizers.items()}
    return MultiOptimizer(list(optimizers.values()), [next(remaining[name]) for name in names])


def _build_one(
    optimizer: OptimizerDefinition,
    config: OptimizerConfig,
    param_groups: list[dict[str, Any]],
    parts: ModelTensors,
) -> Any:
    """Build a `ChunkedStateOptimizer`, the definition's own class, or `ElementwiseOptimizer`."""
    if chunks_state(config):
        mine = {id(tensor) for group in param_groups for tensor in group["params"]}
        shards = [item for item in parts.shards if id(item.main_param) in mine]
        return build_chunked_state_optimizer(
            optimizer.elementwise(config), config, param_groups, shards
        )
    if optimizer.build is not None:
        return optimizer.build(config, param_groups, parts)
    return ElementwiseOptimizer(
        param_groups,
        optimizer.elementwise(config),
        lr=config.lr or 0.0,
        weight_decay=config.weight_decay,
    )
