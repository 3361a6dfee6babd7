"""Groups of `TransformerConfig` fields; each group checks itself."""
