"""DeepSpeed's names below `megatron.deepspeed`: where they are defined, and which are not here."""

from __future__ import annotations

_DS = "megatron.deepspeed"
_PIPE = "models that are split into stages: pretrain_gpt.py --pipeline-model-parallel-size"
_MOE = "models with experts: pretrain_gpt.py --num-experts"
_TEXT = "text from a model: tools/generate.py"


def _all(home: str, *names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_ENGINE = _all(f"{_DS}.engine", "DeepSpeedEngine")
_ZERO = _all(f"{_DS}.zero", "GatheredParameters", "Init")
_SCHEDULES = _all(
    f"{_DS}.lr_schedules", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"
)
_LOGS = _all(f"{_DS}.utils", "log_dist", "logger")

DEEPSPEED_ELSEWHERE: dict[str, dict[str, str]] = {
    _DS: {
        **_all(f"{_DS}.config", "DeepSpeedConfig"),
        **_LOGS,
        "monitor": f"{_DS}.monitor",
        "profiling": f"{_DS}.profiling",
        "runtime": f"{_DS}.runtime",
        "pipe": f"{_DS}.pipe",
        "moe": f"{_DS}.moe",
        "checkpoint": f"{_DS}.checkpoint",
    },
    f"{_DS}.monitor": {"monitor": f"{_DS}.monitor.monitor"},
    f"{_DS}.monitor.monitor": _all(f"{_DS}.monitors", "MonitorMaster"),
    f"{_DS}.profiling": {"flops_profiler": f"{_DS}.profiling.flops_profiler"},
    f"{_DS}.profiling.flops_profiler": _all(f"{_DS}.flops", "FlopsProfiler", "get_model_profile"),
    f"{_DS}.runtime": {
        "activation_checkpointing": f"{_DS}.runtime.activation_checkpointing",
        "config": f"{_DS}.config",
        "engine": f"{_DS}.engine",
        "lr_schedules": f"{_DS}.lr_schedules",
        "zero": f"{_DS}.runtime.zero",
    },
    f"{_DS}.runtime.activation_checkpointing": {"checkpointing": f"{_DS}.checkpointing"},
    f"{_DS}.runtime.activation_checkpointing.checkpointing": _all(
        f"{_DS}.checkpointing", "checkpoint", "configure", "is_configured"
    ),
    f"{_DS}.runtime.config": _all(f"{_DS}.config", "DeepSpeedConfig"),
    f"{_DS}.runtime.engine": _ENGINE,
    f"{_DS}.runtime.lr_schedules": _SCHEDULES,
    f"{_DS}.runtime.zero": {**_ZERO, "partition_parameters": f"{_DS}.zero"},
    f"{_DS}.runtime.zero.partition_parameters": _ZERO,
    f"{_DS}.utils.logging": _LOGS,
}

DEEPSPEED_LACKING: dict[str, dict[str, str]] = {
    _DS: {
        "InferenceEngine": _TEXT,
        "OnDevice": "a model is built on the CPU, and moved and sharded by initialize()",
        "PipelineEngine": _PIPE,
        "PipelineModule": _PIPE,
        "init_inference": _TEXT,
        "tp_model_init": "pretrain_gpt.py --tensor-model-parallel-size",
    },
    f"{_DS}.checkpoint": {
        "DeepSpeedCheckpoint": "python tools/checkpoint inspect reads any checkpoint"
    },
    f"{_DS}.moe": {"MoE": _MOE},
    f"{_DS}.moe.layer": {"MoE": _MOE},
    f"{_DS}.pipe": {
        "LayerSpec": _PIPE,
        "PipelineModule": _PIPE,
        "TiedLayerSpec": _PIPE,
    },
}
