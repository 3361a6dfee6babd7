"""BERT: an encoder that predicts masked words, and how two sentences follow each other."""
