"""Libraries that others publish for Megatron, as they are, on the framework of this repository."""
