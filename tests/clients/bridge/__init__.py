"""Tests of megatron-bridge; importing this package stands in for CUDA and for what it imports."""

from tests.clients.bridge.stand_ins import install

install()
