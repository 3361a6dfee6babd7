#!/usr/bin/env bash
# Install the lowest versions that pyproject.toml allows, and run the tests that use these packages.
#
#   tools/test_lowest.sh [options of pytest]
#
# The environment is .venv-lowest. All extras except dev, docs and gpu are installed together; a CUDA
# build of torch brings triton, the only package of gpu. PYTHON chooses the interpreter, TORCH the
# torch; by default the torch of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-lowest
python=$environment/bin/python
torch=${TORCH:-$(grep '^torch==' constraints.txt)}

tools/make_venv.sh --remove "$environment"
mkdir "$environment"
touch "$environment/.made-by-lattice"
"${PYTHON:-python3}" -m venv "$environment"
"$python" tools/lowest_versions.py >"$environment/lowest.txt"
# pip of Python 3.11 takes several times as long to find versions that fit.
"$python" -m pip install --quiet --upgrade pip
# shellcheck disable=SC2086  # TORCH may carry pip options
"$python" -m pip install --quiet $torch
"$python" -m pip install --quiet "${torch%% *}" -r "$environment/lowest.txt" \
    pytest hypothesis packaging openai peft
PATH=$PWD/$environment/bin:$PATH # commands that libraries install, for SLURM's tasks
export PATH PYTHONPATH=$PWD
python -m pytest -q -p no:cacheprovider \
    tests/unit/tokenizers tests/unit/datasets tests/unit/hugging_face tests/unit/inference \
    tests/unit/deepspeed/test_monitors.py tests/unit/dist_checkpointing/test_object_store.py \
    tests/unit/models/test_gpt_against_others.py tests/unit/packaging/test_cluster_examples.py \
    tests/unit/pipeline_parallel/test_pictures.py tests/unit/training/test_command_line.py \
    tests/unit/training/test_metrics.py tests/unit/transformer/test_latent_attention.py \
    tests/unit/transformer/test_rotary.py tests/distributed/hugging_face \
    tests/distributed/inference/test_server_process.py tests/parity/optional_libraries.py "$@"
python -m tests.parity.harness_scores
