#!/usr/bin/env bash
# Derive the schemas of the files for clusters from the packages that publish them, have these
# packages read every file, and train two ranks by Ray Train.
#
#   tools/test_schemas.sh
#
# The environment is .venv-schemas; PYTHON chooses the interpreter. It fails if the derived schemas
# differ from those in the repository, which then are new: look at the difference, and commit it.
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
TMPDIR=$(mktemp -d) # Ray and torchrun leave logs where they are told to put them
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
former=$TMPDIR/schemas.json
cp tests/cluster_schemas/schemas.json "$former"
"$python" -m tests.cluster_schemas.derive
"$python" -m tests.cluster_schemas.against_packages
"$python" -m tests.cluster_schemas.ray_run
diff -q "$former" tests/cluster_schemas/schemas.json
