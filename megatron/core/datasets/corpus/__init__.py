"""A corpus on disk or behind a URL: its files, its index, how its tokens are read."""
