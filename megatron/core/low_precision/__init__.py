"""Matrix products of numbers with few bits: formats, scales, recipes, products of layers."""
