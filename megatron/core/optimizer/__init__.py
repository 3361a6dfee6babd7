"""Optimizers: main weights, sharded state, loss scaling, clipping by the global norm."""

from megatron.core.optimizer.factory import get_megatron_optimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroupOverride, ParamKey

__all__ = [
    "ConstantGradScaler",
    "DynamicGradScaler",
    "MegatronOptimizer",
    "OptimizerConfig",
    "ParamGroupOverride",
    "ParamKey",
    "get_megatron_optimizer",
]
