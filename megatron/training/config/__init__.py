"""Typed settings: one frozen dataclass per subject, one field per flag."""

from megatron.core.models.model_settings import (
    ExpertSettings,
    LatentAttentionSettings,
    ModelSettings,
)
from megatron.core.settings.flags import FlagMetadata, FlagSpec, flag
from megatron.training.config.batch import ScheduleSettings
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.config.data import DataSettings, TokenizerSettings
from megatron.training.config.logging import LaunchSettings, LoggingSettings
from megatron.training.config.optimizer import OptimizerSettings, PrecisionSettings
from megatron.training.config.parallelism import DataParallelSettings, ParallelismSettings
from megatron.training.config.run import RunConfig, all_flags, flags_by_spelling

PretrainConfigContainer = RunConfig
"""Megatron's name of the settings that `pretrain` takes."""

__all__ = [
    "CheckpointSettings",
    "DataParallelSettings",
    "DataSettings",
    "ExpertSettings",
    "FlagMetadata",
    "FlagSpec",
    "LatentAttentionSettings",
    "LaunchSettings",
    "LoggingSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ParallelismSettings",
    "PrecisionSettings",
    "PretrainConfigContainer",
    "RunConfig",
    "ScheduleSettings",
    "TokenizerSettings",
    "all_flags",
    "flag",
    "flags_by_spelling",
]
