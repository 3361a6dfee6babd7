#!/usr/bin/env bash
# Install the Python part of the published Transformer Engine, without its compiled part, and run
# the tests of models with its layers: on the CPU, with a replacement for the compiled part.
#
#   tools/test_engine.sh [options of pytest]
#
# The environment is .venv-engine: as `make venv`, plus the library and its dependencies.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-engine
tools/make_venv.sh "$environment" dev
"$environment/bin/python" -m pip install --quiet --no-deps \
    transformer_engine==2.20.2 triton==3.7.1 einops==0.8.2
PATH=$PWD/$environment/bin:$PATH
export PATH
python -m pytest -q -p no:cacheprovider -W default \
    tests/gpu_without_gpu/engine/layers.py "$@"
