"""The order of a blend: which corpus gives the next sample."""
