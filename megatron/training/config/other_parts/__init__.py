"""Flags of Megatron that tune or ask for parts that are not here, as tables.

Launch lines that carry them run: what changes no result is accepted, and the run says why it
changes nothing; what would change the model or the data is refused.
"""
