"""Groups of `TransformerConfig` fields, and functions that derive and check them."""
