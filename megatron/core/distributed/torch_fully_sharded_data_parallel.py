"""ZeRO-3 by torch's own `fully_shard` (FSDP2), with the interface of `DistributedDataParallel`.

Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv
2304.11277. torch shards each parameter along its first dimension, gathers and frees layers and
reduce-scatters gradients; the optimizer, norm, clipping and checkpoints are ours and see the shard
as a range of the flattened parameter. `DistributedDataParallel` at stage 3 does the same with flat
buckets, works in pipelines, and adds gradients in rank order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.core.distributed.communication import Mesh, gather_on_all_ranks
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.distributed.model_parameters import names_in_model, units_of
from megatron.core.distributed.parameter_shard import ParameterShard
from megatron.core.foundation.device import is_fake
from megatron.core.foundation.errors import ConfigError, raise_together
from megatron.core.parameters.initialization import fill_deferred_weights
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport.transport import averages


class TorchFullyShardedDataParallel(DistributedDataParallel):
    """A model chunk whose layers are sharded by torch over the data-parallel ranks.

    Units are the children of outermost `nn.ModuleList`s (the layers); embedding, head and the rest
    stay gathered from forward to backward. Gradients are reduced after every backward pass, also
    inside `no_sync()`, and are found in `.grad` of the sharded parameters.

    Communication: by torch, on `dp_cp`: an all-gather of each layer before forward and before
    backward, a reduce-scatter of its gradients. The experts of a layer are a unit of their own on
    `expt_dp` where those are other ranks.
    """

    def __init__(
        self,
        config: object,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        sub_modules_to_wrap: Sequence[type[nn.Module]] | None = None,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """
        Args:
            ddp_config: `grad_reduce_in_fp32` decides the dtype of gradients in messages.
            sub_modules_to_wrap: classes of the units, instead of the layers.
            disable_bucketing: accepted; a unit is one message.
        Raises:
            ConfigError: torch's FSDP2 does not support the layout or the settings.
        """
        nn.Module.__init__(self)
        self.config, self.ddp_config, self.module = config, ddp_config, module
        self.pg_collection = resolve_groups(pg_collection)
        problems = _problems(config, ddp_config, self.pg_collection)
        raise_together(problems, summary="torch's FSDP2")
        self.gradient_buffers, self._sharded_stages = [], []
        self._param_index, self._spans, self._units = {}, [], None
        self._gathers_in_forward = False
        self._syncs_in_backward, self._awaits_end = True, False
        self._meshes = [self.mesh(), self.mesh(is_expert=True)]
        self._fsdp_modules: list[Any] = []
        self._shard_modules(sub_modules_to_wrap)
        self._read_shards()
        is_half = any(p.dtype == torch.float16 for p in self._shards_of)
        # torch itself divides gradients that are sent in fp16, against overflow.
        self._averages = (is_half and not ddp_config.grad_reduce_in_fp32) or averages(
            max(self._meshes, key=lambda mesh: mesh.shard_size).shard
        )

    def _shard_modules(self, kinds: Sequence[type[nn.Module]] | None) -> None:
        # torch replaces the parameters and drops the metadata on them.
        metadata = {name: dict(vars(p)) for name, p in self.module.named_parameters()}
        dense, experts = (self._device_mesh(is_expert) for is_expert in (False, True))
        in_fp32 = self.ddp_config.grad_reduce_in_fp32
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if in_fp32 else None)
        are_apart = self.mesh(is_expert=True).shard is not self.mesh().shard
        apart = _modules_of_experts(self.module) if are_apart else []
        inside = {module for expert in apart for module in expert.modules()}
        of_experts = {parameter for module in apart for parameter in module.parameters()}
        empty = {p for p in self.module.parameters() if not p.numel()}  # nothing to shard
        if kinds is None:
            layers = {
                child
                for parent in self.module.modules()
                if isinstance(parent, nn.ModuleList)
                for child in parent
            }
            modules = [unit.entry for unit in units_of(self.module) if unit.entry in layers]
        else:
            modules = [m for m in self.module.modules() if isinstance(m, tuple(kinds))]
        modules = [module for module in modules if module not in inside]
        for module in [*modules, self.module]:
            fill_deferred_weights(self.module, list(module.parameters()))
            parts = [m for m in module.modules() if m in apart and m not in self._fsdp_modules]
            for part, mesh in [*((part, experts) for part in parts), (module, dense)]:
                if mesh is not None:
                    ignored = of_experts | empty if part is module else empty
                    fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=ignored)
                    self._fsdp_modules.append(part)
        # torch 2.7 moves a shard that it pads to new memory when it first gathers it, and an update
        # of the old memory would be lost silently: so gather before the shards are read.
        # Shards of a dry run have no memory.
        if not is_fake() and any(
            p.shape[0] % p.device_mesh.size()
            for p in self.module.parameters()
            if isinstance(p, DTensor)
        ):
            for module in self._fsdp_modules:
                module.unshard()
                module.reshard()
        for name, parameter in self.module.named_parameters():
            vars(parameter).update(metadata[name])

    def _device_mesh(self, is_expert: bool) -> DeviceMesh | None:
        """Return the ranks that shard a kind of parameters as torch's mesh; None for one rank."""
        group: Any = self.mesh(is_expert).shard
        if group.size() == 1:
            return None
        device = next(self.module.parameters()).device
        return DeviceMesh.from_group(group, device.type)

    def _read_shards(self) -> None:
        """Describe the local rows of each parameter as a range of the flattened parameter."""
        names = names_in_model(self.module)
        self._shards_of = {}
        self._frozen: dict[nn.Parameter, list[ParameterShard]] = {}
        """Shards that are loaded but never updated."""
        for name, parameter in self.module.named_parameters():
            mesh = self.mesh(get_param_meta(parameter).is_expert)
            values: Tensor = parameter
            begin, end = 0, parameter.numel()
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                rows = parameter.shape[0]
                row = parameter.numel() // rows
                begin = min(mesh.shard_rank * -(-rows // mesh.shard_size), rows) * row
                end = begin + local.numel()
                is_full = local.numel() == parameter.numel()
                values = local.detach().view(parameter.shape if is_full else -1)
            shard = ParameterShard(names[name], parameter, begin, end, values, None, mesh)
            of_kind = self._shards_of if parameter.requires_grad else self._frozen
            of_kind[parameter] = [shard] if begin < end else []

    def mesh(self, is_expert: bool = False) -> Mesh:
        """Return the ranks that shard the dense or the expert parameters."""
        groups = self.pg_collection
        return Mesh(shard=groups.expt_dp if is_expert else groups.dp_cp, replicate=SINGLE_RANK)

    def shards_of(self, parameter: nn.Parameter) -> list[ParameterShard]:
        """Return the pieces of a parameter, also of a frozen one, that this rank holds."""
        return self._shards_of.get(parameter) or self._frozen.get(parameter, [])

    def unbucketed_shards(self) -> list[ParameterShard]:
        """Return the shards that this rank updates, each with its gradient in `.grad`."""
        return [shard for shards in self._shards_of.values() for shard in shards]

    def _sharded(self) -> dict[nn.Parameter, list[ParameterShard]]:
        known = {**self._shards_of, **self._frozen}
        return {p: shards for p, shards in known.items() if isinstance(p, DTensor)}

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Call the wrapped module; without gradients, free units that torch keeps for backward."""
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            for module in self._fsdp_modules:
                module.reshard()
        return output

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into the wrapped module, in place.

        Raises:
            ConfigError: torch moved shards that it pads (2.7 does): the optimizer would update
                their old memory.
        """
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        for parameter, shards in self._sharded().items():
            local: Any = parameter
            if any(s.values.data_ptr() != local.to_local().data_ptr() for s in shards):
                raise ConfigError(
                    f"torch {torch.__version__} moved the shard of {shards[0].name!r} when weights "
                    f"were loaded: its {parameter.shape[0]} rows are not a multiple of "
                    f"{shards[0].mesh.shard_size} ranks.",
                    rule="FSDP2 shards of unequal rows keep their memory",
                    fix="install torch 2.13, or use --data-parallel-sharding-strategy "
                    "optim_grads_params instead of --use-torch-fsdp2",
                )
        return result

    def zero_grad_buffer(self) -> None:
        """Begin a step: discard the gradients of the last step."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Turn torch's average over the ranks of a parameter (a sum, where a backend cannot
        average) into the average over all replicas, or into a sum where tokens are counted.

        The gradient of an expert covers the tokens of all replicas: the few ranks that hold the
        expert already have the sum over all replicas.
        """
        for parameter in self._shards_of:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        counts_tokens = getattr(self.config, "calculate_per_token_loss", False)
        num_replicas = 1 if counts_tokens else self.mesh().size
        for shard in self.unbucketed_shards():
            averaged_over = shard.mesh.size if self._averages else 1
            if averaged_over != num_replicas:
                _scale(shard, averaged_over / num_replicas)

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all reduced gradients."""
        for shard in self.unbucketed_shards():
            _scale(shard, scaling_factor)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the wrapped module's state, without a prefix, every tensor whole.

        Raises:
            CheckpointError: on all ranks, if one of them fails before torch gathers.
        """

        def own_state() -> dict[str, Any]:
            state = self.module.state_dict(*args, **kwargs)
            self._reserve(state.values())
            return state

        state = gather_on_all_ranks(own_state, self._meshes)
        return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}

    @contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """Inside the returned context all parameters are whole."""
        gather_on_all_ranks(lambda: self._reserve(self.module.parameters()), self._meshes)
        for module in self._fsdp_modules:
            module.unshard()
        try:
            yield
        finally:
            for module in self._fsdp_modules:
                module.reshard()

    def _reserve(self, values: Iterable[object]) -> None:
        """Raise if there is no memory for whole tensors: torch would raise on this rank alone."""
        reserved = [
            torch.empty(v.shape, dtype=v.dtype, device=v.device)
            for v in values
            if isinstance(v, DTensor)
        ]
        reserved.clear()  # the allocator keeps it for torch


def _scale(shard: ParameterShard, factor: float | Tensor) -> None:
    gradient = shard.reduced_gradient()
    if gradient is not None:
        gradient.mul_(factor)


def _modules_of_experts(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that hold parameters of experts only, and all of them.

    Raises:
        ConfigError: a module has parameters of experts and other parameters.
    """
    kinds = {get_param_meta(p).is_expert for p in module.parameters()}
    if kinds == {True}:
        return [module]
    if any(get_param_meta(p).is_expert for p in module.parameters(recurse=False)):
        raise ConfigError(
            f"{type(module).__name__} has parameters of experts and other parameters.",
            rule="torch gathers the parameters of a module over one group of ranks, and experts use"
            " other groups than the rest of the model",
            flags=["--use-torch-fsdp2", "--expert-model-parallel-size"],
            fix="use --use-megatron-fsdp, which shards each kind over its own ranks",
        )
    return [found for child in module.children() for found in _modules_of_experts(child)]


def _problems(
    config: Any, ddp_config: DistributedDataParallelConfig, groups: ProcessGroupCollection
) -> Iterator[ConfigError]:
    """Yield the errors for a layout or settings that torch does not support."""
    if groups.pp.size() > 1:
        yield ConfigError(
            f"torch's FSDP2 in a pipeline of {groups.pp.size()} stages.",
            rule="its hooks expect forward and backward of a micro batch to follow each other",
            flags=["--use-torch-fsdp2", "--pipeline-model-parallel-size"],
            fix="use --use-megatron-fsdp, which shards the same in pipelines",
        )
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        yield ConfigError(
            "torch's FSDP2 with forwards and backwards that overlap.",
            rule="its hooks free a layer after forward, though the backward of another micro"
            " batch may still use it",
            flags=["--use-torch-fsdp2", "--overlap-moe-expert-parallel-comm"],
            fix="use --use-megatron-fsdp, which shards the same and keeps what either needs",
        )
    if ddp_config.use_distributed_optimizer:
        yield ConfigError(
            "torch's FSDP2 with the distributed optimizer.",
            rule="torch shards parameters, gradients and state already",
            flags=["--use-torch-fsdp2", "--use-distributed-optimizer"],
            fix="drop --use-distributed-optimizer",
        )
