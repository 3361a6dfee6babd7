"""Handle failures of a run: report, watch, restart, rerun, roll back, and check replicas."""
