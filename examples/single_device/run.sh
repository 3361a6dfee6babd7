#!/usr/bin/env bash
# Pretrain a small GPT in one process, on a GPU if there is one, else on the CPU.
# Further flags are passed on and override these:  examples/single_device/run.sh --train-iters 100
set -euo pipefail
cd "$(dirname "$0")/../.."

# DATA='--data-path my-corpus --tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m'
DATA=${DATA:---mock-data --vocab-size 1000}

# shellcheck disable=SC2086
exec "${PYTHON:-python}" pretrain_gpt.py \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 \
    --seq-length 128 --max-position-embeddings 128 \
    --micro-batch-size 4 --global-batch-size 8 --train-iters 30 \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 3 \
    --weight-decay 0.1 --clip-grad 1.0 \
    --eval-interval 10 --eval-iters 2 --log-interval 5 --log-throughput \
    $DATA "$@"
