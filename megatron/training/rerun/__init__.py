"""Run a step again whose loss or gradient is not finite, and say what is at fault.

The same samples on the same ranks, then on all replicas, then other samples: that tells hardware
that was wrong once, hardware that is wrong again, samples, and weights apart (`verdict`).
"""
