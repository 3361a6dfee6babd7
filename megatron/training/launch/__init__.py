"""Where a process is in the job, what it prints, and the addresses that ranks listen on."""
