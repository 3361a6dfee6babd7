#!/usr/bin/env bash
# Derive the schemas of the cluster files from the packages that publish them, read every file with
# these packages, and train two ranks with Ray Train.
#
#   tools/test_schemas.sh
#
# The environment is .venv-schemas; PYTHON chooses the interpreter. If the derived schemas differ
# from the repository's schemas, the script replaces them and fails: check the difference, and
# commit it.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-schemas
python=$environment/bin/python
torch=${TORCH:-$(grep '^torch==' constraints.txt)}

tools/make_venv.sh --remove "$environment"
mkdir "$environment"
touch "$environment/.made-by-lattice"
"${PYTHON:-python3}" -m venv "$environment"
# shellcheck disable=SC2086  # TORCH may carry pip options
"$python" -m pip install --quiet $torch numpy pyyaml jsonschema
"$python" -m pip install --quiet kubeflow-trainer-api==2.3.0 'ray[train]==2.60.0' skypilot==0.14.1
export PYTHONPATH=$PWD RAY_USAGE_STATS_ENABLED=0
TMPDIR=$(mktemp -d) # for the logs of Ray and torchrun
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
former=$TMPDIR/schemas.json
cp tests/cluster_schemas/schemas.json "$former"
"$python" -m tests.cluster_schemas.derive
"$python" -m tests.cluster_schemas.against_packages
"$python" -m tests.cluster_schemas.ray_run
diff -q "$former" tests/cluster_schemas/schemas.json
