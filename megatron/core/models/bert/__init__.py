"""BERT: an encoder that predicts masked words, and whether one sentence follows another."""
