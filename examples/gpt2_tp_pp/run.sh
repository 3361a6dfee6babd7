#!/usr/bin/env bash
# Pretrain a GPT on four ranks: tensor parallel 2 x pipeline parallel 2, with sequence parallelism
# and an interleaved schedule. On a machine without GPUs the ranks are CPU processes.
# Further flags are passed on and override these.
set -euo pipefail
cd "$(dirname "$0")/../.."

DATA=${DATA:---mock-data --vocab-size 1000}
if command -v nvidia-smi >/dev/null && [ "${LATTICE_DEVICE:-}" != cpu ]; then
    MODEL="--preset gpt2-355m --seq-length 1024 --micro-batch-size 4 --global-batch-size 64 --bf16"
else
    MODEL="--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
           --micro-batch-size 2 --global-batch-size 8"
    export OMP_NUM_THREADS=1
fi

# shellcheck disable=SC2086
exec "${TORCHRUN:-torchrun}" --standalone --local-addr 127.0.0.1 --nproc-per-node 4 pretrain_gpt.py \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 \
    $MODEL --train-iters 20 --lr 1e-3 --lr-decay-style cosine --min-lr 1e-4 \
    --log-interval 5 --log-throughput --num-workers 0 \
    $DATA "$@"
