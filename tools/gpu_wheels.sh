#!/usr/bin/env bash
# Download the packages for a GPU machine without a network, into .whl/.
#
#   tools/gpu_wheels.sh
#
# Wheels for Python 3.12 on x86_64: the peers and yardsticks of `benchmarks.gpu`, and an NCCL that
# allows ranks to share a GPU, as .whl/nccl.xz with the machine code of sm_90 alone. Existing files
# are not downloaded again. PYTHON is the interpreter that runs pip. The script fails if the
# repository and .whl/ together are larger than such a machine may accept (LIMIT_MIB).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
limit_mib=${LIMIT_MIB:-62}
wheels=(megatron-core==0.16.1 liger-kernel==0.8.5 torchao==0.18.0 cut-cross-entropy==25.1.1
    flash-linear-attention==0.6.0 fla-core==0.6.0)
nccl=nvidia-nccl-cu13==2.30.3

download() { # FOLDER REQUIREMENT...
    local folder=$1
    shift
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux_2_18_x86_64 --platform any \
        --dest "$folder" "$@"
}

mkdir -p .whl
for wheel in "${wheels[@]}"; do
    name=${wheel%%==*}
    compgen -G ".whl/${name//-/_}-${wheel##*==}-*.whl" >/dev/null || download .whl "$wheel"
done
if [ ! -f .whl/nccl.xz ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    download "$scratch" "$nccl"
    "$python" -m zipfile -e "$scratch"/*.whl "$scratch/nccl"
    "$python" tools/slim_cuda_library.py "$scratch/nccl/nvidia/nccl/lib/libnccl.so.2" \
        --into "$scratch/nccl.xz"
    mv "$scratch/nccl.xz" .whl/nccl.xz
fi
git rev-parse HEAD >.whl/commit

bytes=$(($(git ls-files -z | du -cb --files0-from=- | tail -1 | cut -f1) + $(du -sb .whl | cut -f1)))
echo "the repository and .whl/: $((bytes >> 20)) MiB of $limit_mib"
[ $((bytes >> 20)) -lt "$limit_mib" ]
