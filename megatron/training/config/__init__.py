"""Typed settings: one frozen dataclass per subject, one field per flag."""

from megatron.training.config.batch import ScheduleConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig, TokenizerConfig
from megatron.training.config.experts import ExpertConfig
from megatron.training.config.flag import FlagFacts, FlagSpec, flag
from megatron.training.config.logging import LaunchConfig, LoggingConfig
from megatron.training.config.model import LatentAttentionConfig, ModelConfig
from megatron.training.config.optimizer import OptimizationConfig
from megatron.training.config.parallelism import ParallelismConfig, ReplicationConfig
from megatron.training.config.precision import PrecisionConfig
from megatron.training.config.run import RunConfig, all_flags, flags_by_spelling

PretrainConfigContainer = RunConfig
"""Name under which Megatron knows the container that `pretrain` takes."""

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "ExpertConfig",
    "FlagFacts",
    "FlagSpec",
    "LatentAttentionConfig",
    "LaunchConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizationConfig",
    "ParallelismConfig",
    "PrecisionConfig",
    "PretrainConfigContainer",
    "ReplicationConfig",
    "RunConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "all_flags",
    "flag",
    "flags_by_spelling",
]
