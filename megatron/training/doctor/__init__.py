"""What this machine has, what is used of it and why the rest is not, and whether ranks can meet."""
