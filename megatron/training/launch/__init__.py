"""Rank of a process in the job, printing by rank, and the addresses of ranks."""
