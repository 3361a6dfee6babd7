"""Build datasets, and the micro batches of a data-parallel rank."""
