"""A corpus on disk or at a URL: its files, its index, how its tokens are read."""
