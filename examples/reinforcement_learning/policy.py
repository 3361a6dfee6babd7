"""A policy for trainers such as verl and slime: Megatron's names, any layout.

`Policy` builds the model and its optimizer from the command line of `pretrain_gpt.py`, computes
log-probabilities, runs steps with a given loss, saves, loads, and streams its weights under Hugging
Face's names.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.context_parallel import get_batch_on_this_cp_rank
from megatron.core.distributed import finalize_model_grads
from megatron.core.foundation import device
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.hugging_face import stream_weights
from megatron.post_training.log_probs import compute_log_probs, logits_of
from megatron.training import get_args, get_model
from megatron.training.arguments import core_transformer_config_from_args

TINY = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128,
    "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "seq_length": 16,
    "max_position_embeddings": 16, "tokenizer_type": "NullTokenizer", "vocab_size": 31,
    "micro_batch_size": 64, "train_iters": 50, "mock_data": True, "lr": 5e-3, "clip_grad": 1.0,
    "use_distributed_optimizer": True, "transformer_impl": "local",
}  # fmt: skip
"""Default settings: a model that learns in a minute on a CPU. Flags override them."""
Batch = dict[str, Tensor]


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build one chunk of the model."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


class Policy:
    """The trained model."""

    def __init__(self) -> None:
        args = get_args()
        self.model = get_model(model_provider)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            clip_grad=args.clip_grad,
            use_distributed_optimizer=args.use_distributed_optimizer,
            bf16=args.bf16,
        )
        self.optimizer = get_megatron_optimizer(settings, self.model)
        config = get_model_config(self.model[0])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        config.no_sync_func = [chunk.no_sync for chunk in self.model]
        if len(self.model) == 1:
            config.no_sync_func = config.no_sync_func[0]
        self.num_valid = config.unpadded_vocab_size

    def log_probs(self, batches: list[Batch]) -> list[Tensor]:
        """Return log-probabilities of the labels of micro batches, [b, s] each."""
        return [one.log_probs for one in compute_log_probs(self.model, batches)]

    def update(self, batches: list[Batch], loss_func: Callable[..., Any]) -> dict[str, float]:
        """Run one step on micro batches; return the loss function's report and the norm."""

        def forward_step(iterator: Iterator[Batch], chunk: Any) -> Any:
            where = device.current_device()
            batch = {name: tensor.to(where) for name, tensor in next(iterator).items()}
            batch = get_batch_on_this_cp_rank(batch)
            return logits_of(chunk, batch), partial(loss_func, batch, num_valid=self.num_valid)

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        b, s = batches[0]["tokens"].shape
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.model],
            model=self.model,
            num_microbatches=len(batches),
            seq_length=s,
            micro_batch_size=b,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        names = reports[0] if reports else {}
        means = {n: sum(float(one[n]) for one in reports) / len(reports) for n in names}
        return means | {"grad norm": float(grad_norm)}

    def state(self, is_loading: bool = False) -> dict[str, Any]:
        """Declare weights and optimizer state for a checkpoint that loads in any layout."""
        model = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(self.model)}
        return model | {
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading)
        }

    def save(self, directory: str) -> None:
        """Write a checkpoint."""
        dist_checkpointing.save(self.state(), directory)

    def load(self, directory: str) -> None:
        """Continue from a checkpoint of any layout."""
        loaded = dist_checkpointing.load(self.state(is_loading=True), directory)
        for index, chunk in enumerate(self.model):
            chunk.load_state_dict(loaded[f"model{index}"])
        self.optimizer.load_state_dict(loaded["optimizer"])

    def weights(self, bucket_bytes: int = 1 << 28) -> Iterator[dict[str, Tensor]]:
        """Yield the weights under Hugging Face's names, for a generator in other processes."""
        return stream_weights(self.model, vars(get_args()), bucket_bytes=bucket_bytes)


def reference_model() -> list[torch.nn.Module]:
    """Return the initial policy; it is not trained."""
    return get_model(model_provider, wrap_with_ddp=False)


def mean_of_replicas(value: float) -> float:
    """Return the mean over data-parallel replicas."""
    number = torch.tensor([value], device=device.current_device())
    group = parallel_state.get_data_parallel_group()
    torch.distributed.all_reduce(number, group=group)
    return float(number) / torch.distributed.get_world_size(group)
