"""State of a model between the tokens that it generates."""
