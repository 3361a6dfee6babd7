"""Schemas of the files that clusters read, taken from the published packages."""
