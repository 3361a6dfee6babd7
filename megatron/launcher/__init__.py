"""`lattice launch`: one description of a job, written or submitted for each kind of cluster.

Nothing here imports torch: a login node needs this package and PyYAML only.
"""
