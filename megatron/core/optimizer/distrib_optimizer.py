"""The optimizer whose state is sharded over data-parallel ranks.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 5.1 and 5.2, arXiv 1910.02054. Each rank keeps moments and main weights of one shard of
every bucket, updates it from the reduce-scattered gradient, and gathers the rest.
"""

from __future__ import annotations

from megatron.core.optimizer.optimizer import MegatronOptimizer


class DistributedOptimizer(MegatronOptimizer):
    """Updates the shards of the parameters that this rank owns.

    All of its mechanism is in the shards it is given (`DistributedDataParallel.spans`) and in
    `start_param_sync` of the model chunks; the class tells the two kinds of optimizer apart.
    """
