"""Encoders of images, and language models that see."""
