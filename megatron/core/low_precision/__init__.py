"""Low-precision matrix products: scales, recipes, and the products of a linear layer."""
