"""Make numbers wrong in runs: `python -m tests.faults.wrong_numbers` sees whether it is noticed.

Campaigns (all of them without a name):

    bits     one bit of a weight, a gradient or optimizer state of one rank changes
    causes   a NaN comes from data, from hardware (once, or again), or from the model

Exits with 1 if a fault was missed, or something that is right was called wrong.
"""
