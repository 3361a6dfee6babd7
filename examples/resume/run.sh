#!/usr/bin/env bash
# Train 10 steps as tp 2 x pp 2, stop, and train 10 more steps in another layout: pp 2 x dp 2 with
# sharded optimizer state. A checkpoint does not depend on the layout that wrote it.
set -euo pipefail
cd "$(dirname "$0")/../.."

SAVE=${SAVE:-$(mktemp -d)/checkpoints}
DATA=${DATA:---mock-data --vocab-size 1000}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

train() {
    # shellcheck disable=SC2086
    "${TORCHRUN:-torchrun}" --standalone --local-addr 127.0.0.1 --nproc-per-node 4 pretrain_gpt.py \
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \
        --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-3 --log-interval 1 \
        --num-workers 0 --save "$SAVE" $DATA "$@"
}

train --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --exit-interval 10
train --pipeline-model-parallel-size 2 --use-distributed-optimizer \
    --load "$SAVE" --exit-on-missing-checkpoint
echo "checkpoints are in $SAVE"
