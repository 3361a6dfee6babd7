"""Flags of models and layers that are not here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.computation import OtherLayers
from megatron.core.settings.flag_rows import FlagTable
from megatron.core.settings.flags import SettingsGroup

_ROWS = """
refused: states are fp32
--mamba-training-ssm-states-dtype str: fp32/bf16

refused: use --experimental-attention-variant gated_delta_net, or --multi-latent-attention
--gdp-cutedsl-kernel on
--gdp-num-chunk-states-to-recompute int = 2
--gdp-num-householder int = 3
refused: leave it out: each layer chooses keys by an indexer of its own
--dsa-indexer-skip-topk-offset int = 0
--dsa-indexer-topk-freq int = 1
no effect: scores are products in fp32, which a rotation of both queries and keys does not change
--no-dsa-indexer-rotate-activation off-switch

refused: use the plain residual connection
--enable-mhc-connections on
of enable_mhc_connections
--mhc-init-gating-factor float = 0.01
--mhc-num-residual-streams int = 4
--mhc-recompute-layer-num int
--mhc-sinkhorn-iterations int = 20

refused: give all layers one size; --moe-layer-freq and --window-attn-skip-freq tell them apart
--heterogeneous-layers-config-path str
--heterogeneous-layers-config-encoded-json str

no effect: this program trains no retriever
--bert-embedder-type str: megatron/huggingface = megatron
--bert-load str
--biencoder-projection-dim int = 0
--biencoder-shared-query-context-model on
--block-data-path str
--embedding-path str
--evidence-data-path str
--ict-head-size int
--ict-load str
--indexer-batch-size int = 128
--indexer-log-interval int = 1000
--output-bert-embeddings on
--query-in-block-prob float = 0.1
--retriever-report-topk-accuracies int x+ = []
--retriever-score-scaling on
--sample-rate float = 1.0
--titles-data-path str
--use-one-sent-docs on

refused: train by pretrain_vlm.py
--vision-pretraining on
of vision_pretraining
--vision-pretraining-type str: classify/inpaint/dino = classify
--vision-backbone-type str: vit/mit/swin = vit
--swin-backbone-type str: tiny/base/h3 = tiny
--classes-fraction float = 1.0
--data-per-class-fraction float = 1.0
--dino-bottleneck-size int = 256
--dino-freeze-last-layer float = 1
--dino-head-hidden-size int = 2048
--dino-local-crops-number int = 10
--dino-local-img-size int = 96
--dino-norm-last-layer on
--dino-teacher-temp float = 0.07
--dino-warmup-teacher-temp float = 0.04
--dino-warmup-teacher-temp-epochs int = 30
--head-lr-mult float = 1.0
--img-h int = 224
--img-w int = 224
--iter-per-epoch int = 1250
--mask-factor float = 1.0
--mask-type str: random/row = random
--num-classes int = 1000

refused: drop it: layers are the usual ones without it
--freeze-all-layers on
--moe-router-force-biased float
--mtp-detach-heads on
--mtp-hsm on
refused: use the quintic coefficients
--muon-coefficient-type str = quintic
refused: upcycle with whole experts: each begins as the dense MLP
--moe-upcycling-granularity int = 1
no effect: the balance that it smooths is not here
--moe-router-quantile-balancing-ema float = 0.0
no effect: models are not exported to ONNX
--onnx-safe str
"""


@dataclass(kw_only=True)
class _OtherModels(FlagTable, rows=_ROWS):
    """What only the command line has."""


@dataclass(kw_only=True)
class OtherModelSettings(_OtherModels, OtherLayers, SettingsGroup):
    """Models and layers that are not here."""
