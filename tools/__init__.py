"""Commands around training; each runs as a script."""
