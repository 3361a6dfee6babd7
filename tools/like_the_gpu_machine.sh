#!/usr/bin/env bash
# Rehearse a GPU session on the CPU, with the package versions of the GPU machine.
#
#   tools/like_the_gpu_machine.sh [options of pytest]
#
# The environment is .venv-like-gpu: Python 3.12 with the GPU machine's torch (a CUDA build, 4.6 GB
# on disk), Triton and NumPy. As on that machine, this project is not installed: PYTHONPATH names
# the checkout. PYTHON chooses the interpreter. Triton's interpreter 3.6.0 fails with this NumPy, so
# kernels are not interpreted here: `make triton` does that.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-like-gpu
packages=(torch==2.11.0 triton==3.6.0 numpy==2.5.2 transformers==5.17.0
    pytest pytest-xdist hypothesis einops regex sentencepiece pyyaml psutil)

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.12 python3 python "$HOME"/.pyenv/versions/3.12*/bin/python}; do
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "No Python 3.12 found${PYTHON:+ (PYTHON=$PYTHON)}; set PYTHON to one." >&2
    return 1
}

python=$(find_python)
wanted="$("$python" -VV) ${packages[*]}"
if [ "$(cat "$environment/.made-from" 2>/dev/null)" != "$wanted" ]; then
    tools/make_venv.sh --remove "$environment"
    mkdir "$environment"
    touch "$environment/.made-by-lattice"
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet "${packages[@]}"
    echo "$wanted" >"$environment/.made-from"
fi

PATH=$PWD/$environment/bin:$PATH
export PATH PYTHONPATH=$PWD LATTICE_DEVICE=cpu
out=$(mktemp -d)
trap 'rm -rf -- "$out"' EXIT
status=0
step() {
    echo "== $*"
    "$@" || status=1
}
step python -c 'import pretrain_gpt, pretrain_hybrid, pretrain_vlm'
step python -m pytest -q -p no:cacheprovider tests/unit/kernels tests/unit/optimizer \
    tests/gpu_without_gpu/test_captured_layers.py "$@"
# These tests skip themselves without a GPU; only their collection can be checked.
step python -m pytest -q -p no:cacheprovider --collect-only tests/gpu
for stage in A D B C; do
    step python tools/gpu_session.py "$stage" --rehearse --out "$out/$stage"
done
exit $status
