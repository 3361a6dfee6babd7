"""Parts that models share: embeddings, output layer and loss."""
