#!/usr/bin/env bash
# From nothing but bash and Python to a trained GPT: environment, then quickstart.py.
#
#   examples/quickstart/run.sh [options of quickstart.py]
#
# Everything lands in ./quickstart. A second run continues where the first one stopped; `make clean`
# or `rm -r quickstart` starts over.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p quickstart
started=$(date +%s)
tools/make_venv.sh quickstart/venv tokenizers,logging
export PATH="$PWD/quickstart/venv/bin:$PATH"
export LATTICE_INSTALL_SECONDS=$(($(date +%s) - started))
exec quickstart/venv/bin/python examples/quickstart/quickstart.py "$@"
