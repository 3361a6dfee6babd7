"""DeepSpeed's front door: its configuration and engine on the sharding ladder of this library.

    import megatron.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Names, arguments and the order of results are DeepSpeed's (0.19). There is no second mechanism
behind them: `megatron.core.distributed`, `megatron.core.optimizer`, `megatron.core.offload` and
`megatron.core.dist_checkpointing` do the work.
"""

from typing import NoReturn

from megatron.core.errors import ConfigError
from megatron.deepspeed import checkpointing, comm, lr_schedules, ops, utils, zero
from megatron.deepspeed.accelerator import get_accelerator
from megatron.deepspeed.arguments import add_config_arguments
from megatron.deepspeed.comm import init_distributed
from megatron.deepspeed.engine import DeepSpeedEngine
from megatron.deepspeed.initialize import initialize

__all__ = [
    "ConfigError",
    "DeepSpeedEngine",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "lr_schedules",
    "ops",
    "utils",
    "zero",
]

_ELSEWHERE = {
    "PipelineModule": "pretrain_gpt.py --pipeline-model-parallel-size",
    "PipelineEngine": "pretrain_gpt.py --pipeline-model-parallel-size",
    "pipe": "pretrain_gpt.py --pipeline-model-parallel-size",
    "moe": "pretrain_gpt.py --num-experts",
    "tp_model_init": "pretrain_gpt.py --tensor-model-parallel-size",
    "init_inference": "tools/generate.py",
    "InferenceEngine": "tools/generate.py",
}
"""Names of DeepSpeed's that are not here, and what is instead."""


def __getattr__(name: str) -> NoReturn:
    """Say what to use instead of a part of DeepSpeed that does not exist here."""
    hint = f": use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
