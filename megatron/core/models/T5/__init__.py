"""T5: an encoder, and a decoder that attends to the encoder's output."""
