"""State of the running step, or of the running half of an overlapped pair."""
