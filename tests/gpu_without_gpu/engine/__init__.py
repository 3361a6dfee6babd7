"""Tests of Transformer Engine's classes; importing this package stands in for its kernels."""

from tests.gpu_without_gpu.engine_extension import install

install()
