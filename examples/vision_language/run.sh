#!/usr/bin/env bash
# Train a small model to name the handwritten digits of scikit-learn, and test it on the held-out
# digits. One process by default; RANKS=4 and the flags of a layout train on several:
#   RANKS=4 examples/vision_language/run.sh --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
set -euo pipefail
cd "$(dirname "$0")/../.."

WORK=${WORK:-$(mktemp -d)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

"${PYTHON:-python}" examples/vision_language/make_digits.py "$WORK/digits" --count "${COUNT:-1797}"
"${TORCHRUN:-torchrun}" --standalone --local-addr 127.0.0.1 --nproc-per-node "${RANKS:-1}" pretrain_vlm.py \
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu \
    --normalization RMSNorm --disable-bias-linear --add-qkv-bias --position-embedding-type mrope \
    --mrope-section 4 2 2 --seq-length 64 --hidden-dropout 0 --attention-dropout 0 \
    --vision-num-layers 2 --vision-hidden-size 64 --vision-num-attention-heads 4 \
    --vision-ffn-hidden-size 128 --patch-dim 4 --vision-window-size 16 --image-min-pixels 256 \
    --tokenizer-type ByteTokenizer --vocab-size 261 --image-token-id 258 \
    --vision-start-token-id 259 --vision-end-token-id 260 \
    --train-data-path "$WORK/digits/train.jsonl" --valid-data-path "$WORK/digits/valid.jsonl" \
    --micro-batch-size 8 --global-batch-size 16 --train-iters "${ITERS:-300}" --lr 2e-3 \
    --lr-decay-style cosine --min-lr 2e-4 --lr-warmup-fraction 0.07 --weight-decay 0.01 \
    --eval-interval 150 --eval-iters 4 --log-interval 50 --num-workers 0 --transformer-impl local \
    --save "$WORK/checkpoints" "$@"
"${PYTHON:-python}" examples/vision_language/accuracy.py \
    --load "$WORK/checkpoints" --conversations "$WORK/digits/valid.jsonl"
