"""What a model keeps between tokens while it writes."""
