"""`deepspeed.DeepSpeedConfig`: a checked configuration under DeepSpeed's attribute names."""

from __future__ import annotations

from typing import Any

from megatron.core.foundation.errors import refuse_given
from megatron.deepspeed.comm import get_world_size
from megatron.deepspeed.reading import ConfigSource, load_document
from megatron.deepspeed.settings import engine_settings

_KEYS = {
    "gradient_clipping": "gradient_clipping",
    "steps_per_print": "steps_per_print",
    "zero_optimization_stage": "zero_optimization.stage",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "dump_state": "dump_state",
    "loss_scale": "fp16.loss_scale",
}


class DeepSpeedConfig:
    """What a file or a mapping says, for this number of processes.

    Args:
        config: file, mapping or base64 text.
        mpu, mesh_device: must be None: every process holds a replica.
    Raises:
        ConfigError: with all problems.
    """

    def __init__(
        self, config: ConfigSource, mpu: object = None, mesh_device: object = None
    ) -> None:
        given = {"mpu": mpu, "mesh_device": mesh_device}
        rule = "every process holds a replica of the module"
        refuse_given("DeepSpeedConfig", given, rule=rule, fix="train the model with pretrain()")
        self._param_dict = load_document(config)
        self.settings = engine_settings(config, replicas=get_world_size())
        batch, sections = self.settings.batch, self.settings.read.sections
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_enabled = self.settings.stage > 0
        for part in ("optimizer", "scheduler"):
            section = sections.get(part, {"type": None, "params": None})
            setattr(self, f"{part}_name", section["type"])
            setattr(self, f"{part}_params", section["params"])

    def __getattr__(self, name: str) -> Any:
        if name in _KEYS:
            return self.settings[_KEYS[name]]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
