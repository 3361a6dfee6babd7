"""The order of a corpus's samples, and its index arrays on disk."""
