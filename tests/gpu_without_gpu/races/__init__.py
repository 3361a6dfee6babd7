"""Missing waits between streams, found on CPU tensors with streams that are imagined.

Everything is computed in the order of the program, so the values are right whatever is missing.
What is kept beside it are the vector clocks of torch's CUDA sanitizer: which operations of which
stream a stream has waited for. An access to bytes that another stream has written, or a write to
bytes that another one has read, without such a wait, is a race.
"""
