"""Greedy and sampled tokens of 50 prompts in six layouts and three batches, against one process.

    python -m tests.parity.generation

Prints a line a layout; exits with status 1 if a token differs anywhere.
"""

import sys

import torch
import torch.nn.functional as F

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.rng import rng_state
from megatron.core.settings.command_line import NoFlags, read_command_line
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.inference.generate import generate
from megatron.inference.sampling import Sampling
from tests.harness.distributed import run_distributed

NUM_PROMPTS, NEW_TOKENS, VOCABULARY, CONTEXT = 50, 16, 125, 64
LAYOUTS = (
    (2, {"tp": 2}, 1),
    (4, {"tp": 4}, 1),  # more ranks than groups of keys
    (2, {"pp": 2}, 1),
    (4, {"tp": 2, "pp": 2}, 1),
    (2, {"pp": 2, "vp": 2}, 2),
    (4, {"tp": 2}, 1),  # and two replicas
)
SAMPLINGS = (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=11))


def llama(groups, num_chunks):
    """Build this rank's chunks of a small Llama."""
    rng_state().set_seed(8)
    pp, rank = groups.pp.size(), groups.pp.rank()
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=96,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=groups.tp.size(),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        pipeline_dtype=torch.float32,
        # Wide enough that the most likely token is not a matter of rounding.
        init_method_std=0.3,
    )
    return [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=128,
            max_sequence_length=CONTEXT,
            pre_process=rank == 0 and chunk == 0,
            post_process=rank == pp - 1 and chunk == num_chunks - 1,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=chunk if num_chunks > 1 else None,
        )
        for chunk in range(num_chunks)
    ]


def written(groups, num_chunks, max_rows):
    """Return what the model writes behind the prompts, in each way of choosing."""
    draw = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, CONTEXT - NEW_TOKENS, (NUM_PROMPTS,), generator=draw).tolist()
    prompts = [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in lengths]
    model = llama(groups, num_chunks)
    return [
        generate(
            model,
            prompts,
            max_new_tokens=NEW_TOKENS,
            vocab_size=VOCABULARY,
            max_sequence_length=CONTEXT,
            sampling=sampling,
            eod=7,
            max_rows=max_rows,
            pg_collection=groups,
        )
        for sampling in SAMPLINGS
    ]


def main() -> int:
    """Compare and print; return the exit status."""
    read_command_line(NoFlags, description=__doc__)
    (expected,) = run_distributed(written, 1, 1, 32)
    cases = [(1, {}, 1, rows) for rows in (1, 7, 50)]
    cases += [(size, layout, chunks, 16) for size, layout, chunks in LAYOUTS]
    all_equal = True
    for size, layout, chunks, max_rows in cases:
        counts = []
        for found in run_distributed(written, size, chunks, max_rows, **layout):
            counts += [
                sum(a == b for a, b in zip(mine, theirs, strict=True))
                for mine, theirs in zip(found, expected, strict=True)
            ]
        equal = min(counts)
        all_equal &= equal == NUM_PROMPTS
        name = " ".join(f"{axis}{n}" for axis, n in layout.items()) or "one process"
        print(f"{name:12} on {size}, batch {max_rows:2}: {equal} of {NUM_PROMPTS} prompts equal")
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
