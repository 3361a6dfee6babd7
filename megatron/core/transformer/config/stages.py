"""How layers are dealt out to pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.layout import PipelineParallelLayerLayout, virtual_stages_of
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.settings.flags import flag


@dataclass
class StageConfig:
    """Uneven stages. `pipeline_parallel.layout` turns these into layers per stage, and checks."""

    num_layers_in_first_pipeline_stage: int | None = flag(
        None, name="decoder_first_pipeline_num_layers"
    )
    """Layers of the first stage; the others share the rest evenly."""
    num_layers_in_last_pipeline_stage: int | None = flag(
        None, name="decoder_last_pipeline_num_layers"
    )
    """Layers of the last stage."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as one layer of the last stage."""
    pipeline_model_parallel_layout: str | list | PipelineParallelLayerLayout | None = None
    """Explicit layout, for example "Et*3|(tt|)*29,m|L". It also says how many chunks each pipeline
    rank has, unless virtual_pipeline_model_parallel_size does."""

    def derived_virtual_stages(
        self, pipeline_size: int, given: int | None, schedule: str
    ) -> int | None:
        """Return virtual_pipeline_model_parallel_size: as given, else as the schedule or the
        layout means it."""
        num_chunks = schedule_named(schedule).num_chunks or 1
        if given is None and pipeline_size > 1 and num_chunks > 1:
            return num_chunks
        if given is not None or self.pipeline_model_parallel_layout is None:
            return given
        return virtual_stages_of(self.pipeline_model_parallel_layout, pipeline_size)
