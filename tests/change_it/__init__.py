"""The diffs of docs/change_it.md: applied to copies of the package, run, and compared."""
