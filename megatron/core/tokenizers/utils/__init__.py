"""Names that callers import from Megatron's `tokenizers.utils`."""
