"""Names that third parties import from `megatron.core.transformer.utils`."""

from megatron.core.transformer.sharded_state import sharded_state_dict_default

__all__ = ["sharded_state_dict_default"]
