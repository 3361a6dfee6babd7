"""DeepSpeed's interface: its configuration and engine on the ZeRO stages of this library.

    import megatron_lattice.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Names, arguments and the order of results follow DeepSpeed 0.19. The engine has no mechanism of its
own: it calls `megatron.core.distributed`, `megatron.core.optimizer`, `megatron.core.offload` and
`megatron.core.dist_checkpointing`.
"""

from megatron.core.foundation.errors import ConfigError
from megatron_lattice.deepspeed import checkpointing, comm, lr_schedules, names, ops, utils, zero
from megatron_lattice.deepspeed.accelerator import get_accelerator
from megatron_lattice.deepspeed.comm import init_distributed
from megatron_lattice.deepspeed.engine import DeepSpeedEngine
from megatron_lattice.deepspeed.initialize import add_config_arguments, initialize

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

names.install()

__version__ = "0.19.8"
"""The release of DeepSpeed whose names, arguments and settings this package follows."""
