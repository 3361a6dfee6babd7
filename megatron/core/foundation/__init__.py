"""What all else is built on: errors and exit codes, devices, processes, optional libraries."""
