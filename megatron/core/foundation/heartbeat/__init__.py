"""Where each rank is in the program, in memory that a watchdog beside the ranks reads."""
