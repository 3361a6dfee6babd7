"""Parts that models share: embeddings and the head."""
