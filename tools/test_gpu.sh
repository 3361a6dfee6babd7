#!/usr/bin/env bash
# Measure the GPUs of this machine: their tests, their limits, training beside the plan, and peers.
#
#   tools/test_gpu.sh [options of python -m benchmarks.gpu]     for example --parts limits train
#
# The environment is .venv-gpu: the one of `make venv`, with Triton. TORCH chooses the torch, as in
# make_venv.sh. The report is gpu_report/report.md.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-gpu
tools/make_venv.sh "$environment" gpu,dev
PATH=$PWD/$environment/bin:$PATH
export PATH
python -m benchmarks.gpu "$@"
