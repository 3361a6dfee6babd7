"""Where a wanted tensor is stored when it is not stored under its own key.

Precision: a half-precision run stores weights twice, as the model computes with them and as the
fp32 main weights of the optimizer; an fp32 run stores them once. So an fp32 run reads main weights
where there are any, and main weights are read from the weights of an fp32 run.

Tying: a model whose head is the word embedding stores one tensor. A run with a head of its own
begins with a copy of it, and of its optimizer state: the first steps then move the head about as
far as they would have moved the shared tensor, where moments of zero would let it leap.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from megatron.core.dist_checkpointing.loader import Contents
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.dist_checkpointing.tree import leaves
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transport.object_collectives import ControlGroup

MAIN_WEIGHT_PREFIX = "optimizer.state.fp32_param."
HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def is_head(key: str) -> bool:
    """Whether a key is that of a head's weight, or of its optimizer state."""
    return key == HEAD or key.endswith(f".{HEAD}")


def stored_key(wanted: ShardedTensor, manifest: Manifest) -> str:
    """Return the key of the stored tensor that fills `wanted`."""
    key, stored = wanted.key, manifest.tensors
    if is_head(key) and not any(map(is_head, stored)):
        key = key.removesuffix(HEAD) + EMBEDDING
    if key.startswith(MAIN_WEIGHT_PREFIX):
        weight = key.removeprefix(MAIN_WEIGHT_PREFIX)
        return weight if key not in stored and weight in stored else key
    main = MAIN_WEIGHT_PREFIX + key
    if not (key in stored and main in stored and wanted.dtype == torch.float32):
        return key
    return main if DTYPES[stored[key].dtype].itemsize < wanted.dtype.itemsize else key


def compare_heads(
    template: ShardedStateDict, contents: Contents, strict: StrictHandling, *, peers: ControlGroup
) -> str | None:
    """Compare the model's head with the stored one: collective.

    Returns:
        what to tell the user if the head is made from the embedding.
    Raises:
        CheckpointError: on every rank, if a stored head does not exist in a model whose head is
            the embedding, and `strict` does not let stored state go.
    """
    has_own = any(is_head(leaf.key) for _, leaf in leaves(template) if hasattr(leaf, "key"))
    wanted = peers.gather(has_own)
    is_wanted = peers.broadcast(wanted is not None and any(wanted))
    stored = contents.manifest.tensors
    is_stored = any(map(is_head, stored))
    if is_stored and not is_wanted and not strict.tolerates_unexpected:
        raise CheckpointError(
            f"{contents.directory} holds a head of its own ({HEAD}); in this model the word "
            "embedding is the head.",
            rule="no trained weight is dropped silently",
            flags=["--untie-embeddings-and-output-weights", "--dist-ckpt-strictness"],
            fix="add --untie-embeddings-and-output-weights; to drop the stored head all the same, "
            "--dist-ckpt-strictness ignore_all",
        )
    if is_wanted and not is_stored and any(key.endswith(EMBEDDING) for key in stored):
        return "the head begins as a copy of the word embedding, to which it was tied"
    return None


def compare_vocabularies(classes: object, contents: Contents, strict: StrictHandling) -> str | None:
    """Compare the vocabulary of this run with the stored one; the rows after both are padding.

    Args:
        classes: the size of the vocabulary of this run without padding; None if it has none.
    Returns:
        what to tell the user if rows are missing or dropped, and `strict` accepts it.
    Raises:
        CheckpointError: on every rank, since all hold the same description, if they differ.
    """
    if not isinstance(classes, int):
        return None
    layout, args = contents.manifest.info.get("layout"), contents.common_state().get("args")
    known = dict(vars(args) if isinstance(args, Namespace) else {})
    known |= layout if isinstance(layout, dict) else {}
    stored = known.get("unpadded_vocab_size")
    if not isinstance(stored, int):
        # The other program stores padded rows alone: too few are too few all the same.
        rows = [t.shape[0] for key, t in contents.manifest.tensors.items() if key == EMBEDDING]
        stored = min([classes, *rows])
    if stored == classes:
        return None
    what = "are missing" if stored < classes else "are left out"
    found = f"rows {min(stored, classes)} to {max(stored, classes) - 1} of the vocabulary {what}"
    if strict.tolerates_unexpected:
        return f"{found}: it has {classes} rows here, and {stored} in {contents.directory}"
    fix = (
        "use the tokenizer of the checkpoint" if stored < classes else f"give --vocab-size {stored}"
    )
    raise CheckpointError(
        f"{contents.directory} holds a vocabulary of {stored}; this run has {classes}: {found}.",
        rule="every row of a vocabulary but its padding comes from the checkpoint",
        flags=["--vocab-size", "--tokenizer-type", "--tokenizer-model", "--dist-ckpt-strictness"],
        fix=f"{fix}; with --dist-ckpt-strictness ignore_all missing rows begin random, and rows"
        " too many are dropped",
    )
