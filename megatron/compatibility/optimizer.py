"""Megatron's optimizer classes; this framework has one class, `MegatronOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.parameter_shard import MainParamShard
from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.update import StepResult, start_step


def _is_sharded(optimizer: MegatronOptimizer) -> bool:
    return any(
        isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer
        for chunk in optimizer.model_chunks
    )


def _has_half_precision(optimizer: MegatronOptimizer) -> bool:
    config = optimizer.config
    return config.fp16 or config.bf16 or any(item.is_copy for item in optimizer.shards)


class _Kind(type):
    """The metaclass whose `isinstance` looks at an optimizer's state instead of its class."""

    is_one: Callable[[MegatronOptimizer], bool]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, MegatronOptimizer) and cls.is_one(instance)


class DistributedOptimizer(MegatronOptimizer, metaclass=_Kind):
    """An optimizer whose state is sharded over data-parallel ranks."""

    is_one = staticmethod(_is_sharded)


class Float16OptimizerWithFloat16Params(MegatronOptimizer, metaclass=_Kind):
    """An optimizer of a model in half precision; its main weights are fp32 copies."""

    is_one = staticmethod(lambda o: _has_half_precision(o) and not _is_sharded(o))


class FP32Optimizer(MegatronOptimizer, metaclass=_Kind):
    """An optimizer that updates fp32 weights in place."""

    is_one = staticmethod(lambda o: not _has_half_precision(o) and not _is_sharded(o))


class ChainedOptimizer:
    """Several optimizers with one loss scale, one global norm and one decision to skip a step."""

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        if not chained_optimizers:
            raise ConfigError("ChainedOptimizer was given no optimizer.", fix="pass at least one")
        self.chained_optimizers = list(chained_optimizers)
        first = self.chained_optimizers[0]
        self.config, self.grad_scaler = first.config, first.grad_scaler
        self.model_chunks = first.model_chunks

    @property
    def nonfinite(self) -> str | None:
        """The non-finite value that the last step found in the gradient, or None."""
        return self.chained_optimizers[0].nonfinite

    @property
    def shards(self) -> list[MainParamShard]:
        """The shards of all optimizers."""
        return [shard for optimizer in self.chained_optimizers for shard in optimizer.shards]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for optimizer in self.chained_optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """The state of all tensors of all optimizers."""
        return {p: s for optimizer in self.chained_optimizers for p, s in optimizer.state.items()}

    def get_loss_scale(self) -> Tensor:
        """Return the factor on the loss, [1]."""
        return self.chained_optimizers[0].get_loss_scale()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients outside of gradient buffers, in all optimizers."""
        for optimizer in self.chained_optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> StepResult:
        """Update with all optimizers, or with none."""
        return start_step(self.chained_optimizers, self.config, self.grad_scaler).read()

    def reload_model_params(self) -> None:
        """Copy the model's weights to the main weights, in all optimizers."""
        for optimizer in self.chained_optimizers:
            optimizer.reload_model_params()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer under its number."""
        return {str(i): o.state_dict() for i, o in enumerate(self.chained_optimizers)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, or from a loaded `sharded_state_dict()`."""
        for i, optimizer in enumerate(self.chained_optimizers):
            optimizer.load_state_dict(state_dict[str(i)])

    def sharded_state_dict(
        self, model_sharded_state_dict: Mapping[str, object], is_loading: bool = False
    ) -> dict[str, Any]:
        """Return the declarations of each optimizer under its number; keys omit the number."""
        return {
            str(i): optimizer.sharded_state_dict(model_sharded_state_dict, is_loading)
            for i, optimizer in enumerate(self.chained_optimizers)
        }


def get_standard_config_overrides(config: object) -> dict[object, object]:
    """Return no rule: the optimizer itself applies `decoupled_lr` and decays no bias and norm."""
    return {}
