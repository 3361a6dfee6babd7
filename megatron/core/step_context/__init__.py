"""What is true for the step, or the half of an overlapped pair, that is being computed."""
