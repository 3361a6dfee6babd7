#!/usr/bin/env bash
# Install the lowest versions that pyproject.toml allows, and run the tests of what uses them.
#
#   tools/test_lowest.sh [options of pytest]
#
# The environment is .venv-lowest. EXTRAS chooses the extras: wandb, cluster, ray and eval bring much
# that has nothing to do with these tests, and are not among them by default. PYTHON chooses the
# interpreter, TORCH what is installed as torch; by default the one of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-lowest
python=$environment/bin/python
extras=${EXTRAS:-tokenizers hf logging config data fast server nltk}
torch=${TORCH:-$(grep '^torch==' constraints.txt)}

tools/make_venv.sh --remove "$environment"
mkdir "$environment"
touch "$environment/.made-by-lattice"
"${PYTHON:-python3}" -m venv "$environment"
# shellcheck disable=SC2086  # a word each
"$python" tools/lowest_versions.py $extras >"$environment/lowest.txt"
# shellcheck disable=SC2086  # TORCH may carry pip options
"$python" -m pip install --quiet $torch
"$python" -m pip install --quiet "${torch%% *}" -r "$environment/lowest.txt" \
    pytest hypothesis packaging openai peft
PYTHONPATH=$PWD "$python" -m pytest -q -p no:cacheprovider \
    tests/unit/tokenizers tests/unit/datasets tests/unit/hugging_face tests/unit/inference \
    tests/unit/training/test_metrics.py tests/unit/training/test_command_line.py \
    tests/distributed/hugging_face/test_fine_tuning.py "$@"
