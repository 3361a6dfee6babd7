"""Image encoders, and language models that read images."""
