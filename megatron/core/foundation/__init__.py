"""What all else stands on: errors and exit codes, devices, processes, optional libraries."""
