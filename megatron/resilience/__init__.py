"""What a run does about failures: report, watch, restart, rerun, roll back, and check itself."""
