"""Communication between the ranks of a group."""
