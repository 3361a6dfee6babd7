#!/usr/bin/env bash
# Run every stage of tools/gpu_session.py on the GPUs of this machine: A, D, B, C.
#
#   tools/test_gpu.sh [options of tools/gpu_session.py]     for example --seconds 600
#
# LATTICE_GPU_PYTHON names a Python that has torch; then nothing is installed. Otherwise the
# environment is .venv-gpu: as `make venv`, plus Triton. TORCH chooses the torch, as in
# make_venv.sh. Results are gpu_report/STAGE.json and gpu_report/STAGE.log.gz.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${LATTICE_GPU_PYTHON:-}
if [ -z "$python" ]; then
    environment=.venv-gpu
    tools/make_venv.sh "$environment" gpu,dev
    python=$PWD/$environment/bin/python
fi
status=0
for stage in A D B C; do
    PYTHONPATH=. "$python" tools/gpu_session.py "$stage" --out gpu_report "$@" || status=1
done
exit "$status"
