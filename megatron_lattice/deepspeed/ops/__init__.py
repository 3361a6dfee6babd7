"""`deepspeed.ops`: optimizers under the names that scripts import."""

from megatron_lattice.deepspeed.ops import adam, lion

__all__ = ["adam", "lion"]
