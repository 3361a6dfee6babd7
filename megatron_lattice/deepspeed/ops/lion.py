"""`deepspeed.ops.lion`: the library's own Lion."""

from megatron.core.optimizer.definitions.lion import Lion as FusedLion

__all__ = ["FusedLion"]
