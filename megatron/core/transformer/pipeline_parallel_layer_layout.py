"""Megatron's place for the layout class; the arithmetic is in `pipeline_parallel.layout`."""

from megatron.core.pipeline_parallel.layout import PipelineParallelLayerLayout

__all__ = ["PipelineParallelLayerLayout"]
