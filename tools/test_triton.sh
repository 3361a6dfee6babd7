#!/usr/bin/env bash
# Run our Triton kernels in Triton's interpreter on the CPU, compare them with the plain formulas,
# and compile them for four generations of NVIDIA GPUs. A second run rehearses the comparisons of a
# device, with the CPU in the device's role. No GPU is needed.
#
#   tools/test_triton.sh [options of pytest]
#
# The environment is .venv-triton: as `make venv`, plus Triton, whose package contains NVIDIA's
# assembler.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-triton
tools/make_venv.sh "$environment" dev
"$environment/bin/python" -m pip install --quiet --no-deps triton==3.7.1
PATH=$PWD/$environment/bin:$PATH
export PATH
folder=tests/gpu_without_gpu/triton_kernels
# Separate processes: the interpreter replaces the compiler when a kernel is declared.
status=0
for where in 0 rehearsed; do
    TRITON_INTERPRET=1 LATTICE_TEST_KERNELS_ON_DEVICE=$where \
        python -m pytest -q -p no:cacheprovider -W default "$folder"/numerics*.py "$@" || status=1
done
python -m pytest -q -p no:cacheprovider -W default "$folder/compiling.py" "$@" || status=1
exit $status
