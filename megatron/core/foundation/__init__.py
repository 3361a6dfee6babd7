"""The lowest layer: errors and exit codes, devices, processes, optional libraries."""
