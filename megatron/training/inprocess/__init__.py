"""Restart inside the job: processes that live continue, with new ones for those that ended.

`run` is the launcher of a node, `coordinator` decides who trains together, `membership` is a
rank's side of it, `restart` the loop around a run.
"""
