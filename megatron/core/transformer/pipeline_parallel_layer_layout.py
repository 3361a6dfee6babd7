"""Megatron's import path of the layout class, which `pipeline_parallel.layout` defines."""

from megatron.core.pipeline_parallel.layout import PipelineParallelLayerLayout

__all__ = ["PipelineParallelLayerLayout"]
