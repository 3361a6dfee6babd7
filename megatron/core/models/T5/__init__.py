"""T5: an encoder, and a decoder that attends to what it gives."""
