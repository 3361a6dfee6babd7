"""The order in which a corpus becomes samples, and its index arrays on disk."""
