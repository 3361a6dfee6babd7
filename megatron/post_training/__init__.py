"""After pretraining: log-probabilities, losses and heads, weights as a stream of tensors."""
