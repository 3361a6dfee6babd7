"""Log-probabilities of given tokens, forward only, in every layout.

Whole sequences run through the forward-only schedule as in training, so sequence, context and
pipeline parallelism split the work. A loss that needs gradients calls
`megatron.core.tensor_parallel.log_probs.vocab_parallel_log_probs` on the logits that `logits_of`
returns in its own forward step.

Legend: b sequences, s positions, v padded vocabulary, m micro batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.context_parallel import get_batch_on_this_cp_rank, sequence_shard_of_rank
from megatron.core.foundation import device
from megatron.core.foundation.errors import DataError
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.layout import loss_rank
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.log_probs import LogProbs, vocab_parallel_log_probs
from megatron.core.tensor_parallel.vocab_parallel_softmax import IGNORED_LABEL
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.moe.router_replay import replay_routing
from megatron.core.transport import torch_collectives
from megatron.core.utils import as_list, evaluating, get_model_config

Found = TypeVar("Found")
MicroBatch = Mapping[str, Tensor]
"""`tokens` and `labels` [b, s]; optionally `position_ids` [b, s], `document_starts` [b, s] (of
packed documents), `padding_mask` [b, s], `attention_mask` [b, 1, s, s]."""


def logits_of(chunk: nn.Module, batch: MicroBatch) -> Tensor:
    """Run a model chunk on this rank's positions of a micro batch.

    Returns:
        logits [b, s/cp, v/tp] on the last stage, not gathered; hidden states on other stages.
    """
    documents = batch.get("document_starts")
    return chunk(
        batch["tokens"],
        batch.get("position_ids"),
        batch.get("attention_mask"),
        padding_mask=batch.get("padding_mask"),
        packed_seq_params=None if documents is None else PackedSeqParams(seq_idx=documents),
        runtime_gather_output=False,
    )


def compute_log_probs(
    model: nn.Module | Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    *,
    temperature: float = 1.0,
    num_valid: int | None = None,
    routing: Sequence[Tensor] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[LogProbs]:
    """Return the log-probabilities of the labels of each micro batch, without gradients.

    The model runs in evaluation mode. All replicas call it together, since they may share experts
    and parameters. Micro batches may differ in size and in number: all are padded to the largest
    one, and to a length that tp and cp can split.

    Args:
        model: this rank's model chunk, or its list of chunks; wrapped or not.
        micro_batches: this replica's micro batches of whole sequences, equal on all of its ranks;
            any number (also zero), of any sizes. Positions with the label `IGNORED_LABEL` (-100)
            are not scored.
        temperature: the logits are divided by it.
        num_valid: number of real tokens; None uses the model's.
        routing: [b, s, l, k] for each micro batch, see `replay_routing`; if None, routers choose.
        pg_collection: None is the current collection.
    Returns:
        an entry per micro batch, [b, s] each, on all ranks of tp, cp and pp.
    Communication:
        a maximum of three numbers on dp; the forward-only schedule; per micro batch and token four
        numbers on tp; then an all-reduce of 3 x m x b x s numbers on cp and a broadcast on pp.
    Raises:
        DataError: a micro batch lacks labels, or tensors differ in shape.
    """
    groups = resolve_groups(pg_collection)
    chunks = as_list(model)
    where = device.current_device()
    shapes = [_shape_of(batch, number) for number, batch in enumerate(micro_batches)]
    sizes = torch.tensor([(len(shapes), *shape) for shape in shapes] or [(0, 0, 0)], device=where)
    largest = torch_collectives.all_reduce(sizes.amax(0), groups.dp, dist.ReduceOp.MAX)
    count, num_rows, longest = largest.tolist()
    if not count:
        return []
    width = _width(longest, groups)
    config = get_model_config(chunks[0])
    padded = [_padded(batch, num_rows, width) for batch in micro_batches]
    # Interleaved schedules need a multiple of pp micro batches.
    count += -count % (groups.pp.size() if len(chunks) > 1 else 1)
    nothing = torch.zeros(0, 1, dtype=torch.long)
    empty = _padded({"tokens": nothing, "labels": nothing}, num_rows, width)
    padded += [empty] * (count - len(padded))
    table = torch.zeros(3, len(padded), num_rows, width, device=where)
    replay: AbstractContextManager[None] = nullcontext()
    if routing is not None:
        # The routers choose for the micro batches that were added.
        layers, k = config.num_layers, config.moe_router_topk
        free = [torch.zeros(0, 0, layers, k, dtype=torch.long)] * (count - len(routing))
        replay = replay_routing(chunks, [*routing, *free])

    def of_tokens(logits: Tensor, batch: MicroBatch) -> LogProbs:
        return vocab_parallel_log_probs(
            logits,
            batch["labels"],
            temperature=temperature,
            tp_group=groups.tp,
            num_valid=config.unpadded_vocab_size if num_valid is None else num_valid,
            units=config.tensor_units,
        )

    with replay:
        found = _run(chunks, padded, of_tokens, groups)
    held = sequence_shard_of_rank(width // groups.cp.size(), cp=groups.cp, sp=SINGLE_RANK)
    for number, one in enumerate(found):
        for part, values in zip(table, one, strict=True):
            part[number, :, held.positions(where)] = values.to(table.dtype)
    last_rank = loss_rank(config)
    if groups.pp.rank() == last_rank:
        torch_collectives.all_reduce(table, groups.cp)
    torch_collectives.broadcast(table, groups.pp, last_rank)
    return [
        LogProbs(
            table[0, number, :b, :s], table[1, number, :b, :s], table[2, number, :b, :s] == 1.0
        )
        for number, (b, s) in enumerate(shapes)
    ]


def compute_logits(
    model: nn.Module | Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    *,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[Tensor]:
    """Return the logits of each micro batch, without gradients: a teacher's, for distillation.

    Args:
        model: as in `compute_log_probs`; in the layout of the student, with the same vocabulary.
        micro_batches: `tokens` [b, s] and so on, all of one shape that tp and cp can split. Every
            replica has the same number, with virtual stages a multiple of the pipeline size.
    Returns:
        [b, s/cp, v/tp] for each micro batch on the last stage, not gathered; [] on other stages.
    Communication: the forward-only schedule.
    """
    return _run(as_list(model), micro_batches, lambda x, _: x, resolve_groups(pg_collection))


def _shape_of(batch: MicroBatch, number: int) -> tuple[int, int]:
    shapes = {name: tuple(batch[name].shape) for name in ("tokens", "labels") if name in batch}
    tokens = shapes.get("tokens", ())
    if len(shapes) < 2 or len(tokens) != 2 or shapes["labels"] != tokens:
        raise DataError(
            f"micro batch {number} has {shapes or 'neither tokens nor labels'}.",
            rule="a micro batch has tokens and labels, [b, s] both",
            fix="pass the next token as each position's label, and -100 at ignored positions",
        )
    return tokens[0], tokens[1]


def _width(length: int, groups: ProcessGroupCollection) -> int:
    """Round a length up, so that tp and cp can split it."""
    cp_size = groups.cp.size()
    pieces = groups.tp.size() * (2 * cp_size if cp_size > 1 else 1)
    return -(-max(length, 1) // pieces) * pieces


def _padded(batch: MicroBatch, num_rows: int, width: int) -> dict[str, Tensor]:
    """Return a micro batch with padding sequences and padding positions at the ends."""
    b, s = batch["tokens"].shape
    if (b, s) == (num_rows, width):
        return dict(batch)
    # Among packed documents, the padding of a sequence is a document of its own.
    fill = {"labels": IGNORED_LABEL, "padding_mask": 1, "attention_mask": 1, "document_starts": s}
    found = {}
    for name, tensor in {"padding_mask": torch.zeros(b, s, dtype=torch.bool), **batch}.items():
        new_rows = (0, 0) * (tensor.dim() - 1) + (0, num_rows - b)
        added = (0, width - s) * (2 if name == "attention_mask" else 1)
        longer = F.pad(tensor, added, value=fill.get(name, 0))
        found[name] = F.pad(longer, new_rows)
    found["labels"][b:] = IGNORED_LABEL
    found["padding_mask"][b:] = True
    if "attention_mask" in found:
        # Softmax needs at least one key for each query.
        found["attention_mask"].diagonal(dim1=-2, dim2=-1).fill_(False)
    return found


@torch.no_grad()
def _run(
    chunks: Sequence[Any],
    batches: Sequence[MicroBatch],
    function: Callable[[Tensor, MicroBatch], Found],
    groups: ProcessGroupCollection,
) -> list[Found]:
    """Call `function` on the logits and this rank's part of each micro batch; return its results.

    Only ranks of the last stage have results; other ranks return [].
    """
    num_rows, width = batches[0]["tokens"].shape
    where = device.current_device()

    def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Any]:
        batch = {name: tensor.to(where) for name, tensor in next(iterator).items()}
        batch.setdefault("position_ids", torch.arange(width, device=where).expand(num_rows, -1))
        batch = get_batch_on_this_cp_rank(batch, groups.cp)
        return logits_of(chunk, batch), lambda logits, non_loss_data: function(logits, batch)

    iterators = [iter(batches) for _ in chunks]
    with evaluating(chunks):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=width,
            micro_batch_size=num_rows,
            forward_only=True,
            collect_non_loss_data=True,
            pg_collection=groups,
        )
