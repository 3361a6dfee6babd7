"""From a dataset to the batches of one data-parallel rank."""
