"""`deepspeed.ops`: optimizers under the names that scripts import."""

from megatron.deepspeed.ops import adam, lion

__all__ = ["adam", "lion"]
