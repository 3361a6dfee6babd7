"""The order in which ranks start collectives: what NCCL would hang on, found without it.

gloo matches messages by tags and moves on by itself; NCCL matches by order alone. Here every rank
of a gloo job takes the ways of NCCL and keeps a list of what it starts and waits for, and the lists
are compared: `python -m tests.gpu_without_gpu.collective_order --cases 50` does so for random
command lines.
"""
