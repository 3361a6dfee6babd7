"""Names that callers of Megatron's `tokenizers.utils` expect."""
