"""Which ranks read data."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.arguments import run_as_in


def is_dataset_built_on_rank(args: Namespace, vp_stage: int | None = None) -> bool:
    """Return whether this rank's chunk needs micro batches.

    The first stage needs tokens; the last one, and one that predicts later tokens, labels. Masks
    that follow the documents (--reset-attention-mask, --sft), and where the text of an encoder
    ends, are needed by every stage.
    """
    run = run_as_in(args)
    is_padded = run.encoders.traits.is_padded
    is_packed = run.parallelism.hybrid_context_parallel  # then every stage knows who shares a row
    if run.data.reset_attention_mask or run.data.sft or is_padded or is_packed:
        return True
    layout = pipeline_layout(run.transformer_config)
    pp_rank = ProcessGroupCollection.current().pp.rank()
    return layout.reads_tokens(pp_rank, vp_stage)
