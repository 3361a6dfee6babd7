#!/usr/bin/env bash
# Train a GPT with nothing but bash and Python: make an environment, then run quickstart.py.
#
#   examples/quickstart/run.sh [options of quickstart.py]
#
# All output is in ./quickstart. A second run continues where the first one stopped; `make clean`
# or `rm -r quickstart` starts over.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p quickstart
started=$(date +%s)
tools/make_venv.sh quickstart/venv tokenizers,logging
export PATH="$PWD/quickstart/venv/bin:$PATH"
export LATTICE_INSTALL_SECONDS=$(($(date +%s) - started))
exec quickstart/venv/bin/python examples/quickstart/quickstart.py "$@"
