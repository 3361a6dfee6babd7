#!/usr/bin/env bash
# Install mbridge as it is published, and run the test of models that go through it.
#
#   tools/test_mbridge.sh [options of pytest]
#
# The environment is .venv-mbridge: the one of `make venv`, with mbridge and einops, which it
# imports, and without megatron-core, whose place this package takes.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-mbridge
tools/make_venv.sh "$environment" dev
"$environment/bin/python" -m pip install --quiet --no-deps mbridge==0.15.1 einops==0.8.2
PATH=$PWD/$environment/bin:$PATH
export PATH
python -m pytest -q -p no:cacheprovider -W default tests/parity/bridged_models.py "$@"
