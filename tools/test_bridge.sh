#!/usr/bin/env bash
# Install the published megatron-bridge with its dependencies, convert weights with it and train its
# recipes on the framework of this repository: on the CPU, with replacements for Transformer
# Engine, ModelOpt, NVIDIA's resiliency extension and CUDA's calls.
#
#   tools/test_bridge.sh [options of pytest]
#
# The environment is .venv-bridge. The library declares Python 3.12 as its minimum, and also runs on
# 3.11. It requires Transformers 5.12.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.venv-bridge
tools/make_venv.sh "$environment" config,logging
"$environment/bin/python" -m pip install --quiet \
    transformers==5.12.1 tokenizers==0.22.2 datasets==5.0.1 accelerate==1.15.0 peft==0.21.2 \
    omegaconf==2.3.1 hydra-core==1.3.4 wandb==0.29.0 qwen-vl-utils==0.0.14 six==1.17.0 \
    sentencepiece==0.2.3 tiktoken==0.14.0 einops==0.8.2 pytest==9.2.0 hypothesis==6.170.15
"$environment/bin/python" -m pip install --quiet --no-deps --ignore-requires-python \
    megatron-bridge==0.6.2
PATH=$PWD/$environment/bin:$PATH
export PATH
python -m pytest -q -p no:cacheprovider -W default \
    tests/clients/bridge/through_bridge.py "$@"
