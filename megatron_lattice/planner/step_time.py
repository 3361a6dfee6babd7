"""Seconds of one optimizer step: stages, pipeline, data parallelism, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_lattice.planner.collectives import CollectiveCosts
from megatron_lattice.planner.hardware import Hardware, rows_hardware
from megatron_lattice.planner.layer_time import (
    PassTime,
    expert_communication,
    layer_time,
    output_layer_time,
)
from megatron_lattice.planner.operators import OperatorCosts
from megatron_lattice.planner.workload import (
    FloatArray,
    Workloads,
    parameters_of_rank,
)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of a step of each row; they add up to `total`."""

    stages: FloatArray
    """All micro batches on the slowest stage."""
    bubble: FloatArray
    pipeline_exposed: FloatArray
    data_exposed: FloatArray
    """Exposed communication of gradients and parameters."""
    optimizer: FloatArray
    model_exposed: FloatArray
    """Communication of tensor, context and expert parallelism that `stages` contains."""

    @property
    def total(self) -> FloatArray:
        """Return the seconds of a step."""
        return (
            self.stages + self.bubble + self.pipeline_exposed + self.data_exposed + self.optimizer
        )


@dataclass(frozen=True)
class Parts:
    """Seconds of each row by activity; they add up to the predicted time."""

    columns: Mapping[str, FloatArray]

    @staticmethod
    def of(step: StepTime, seconds: FloatArray) -> Parts:
        """Scale the parts of the model to corrected times."""
        scale = seconds / step.total
        parts = {
            "compute": step.stages - step.model_exposed,
            "exposed tensor, context and expert communication": step.model_exposed,
            "bubble": step.bubble,
            "exposed messages between stages": step.pipeline_exposed,
            "exposed data-parallel communication": step.data_exposed,
            "optimizer": step.optimizer,
        }
        return Parts({name: scale * column for name, column in parts.items()})

    def largest_excess(self, row: int, best: int) -> str:
        """Return the part whose excess of `row` over `best` is the largest."""
        excess = {name: column[row] - column[best] for name, column in self.columns.items()}
        name = max(excess, key=lambda each: excess[each])
        return f"{excess[name]:+.2f} s {name}"

    @property
    def exposed(self) -> FloatArray:
        """All exposed communication."""
        return sum(
            (column for name, column in self.columns.items() if name.startswith("exposed")),
            np.zeros(1),
        )


def predict_step(workloads: Workloads, hardware: Hardware) -> StepTime:
    """Predict the time of a step of each row.

    Args:
        workloads: complete; see `autofill.autofill`.
    """
    rows = rows_hardware(workloads, hardware)
    operators = OperatorCosts(workloads, rows, hardware)
    collectives = CollectiveCosts(workloads, rows, hardware)
    layer, head = layer_time(operators, collectives), output_layer_time(operators)
    stage_layers = layers_of_slowest_stage(workloads)
    pass_time = layer.forward + layer.backward
    head_time = head.forward + head.backward
    whole = workloads.num_layers * pass_time + head_time
    slowest = np.maximum(
        stage_layers * pass_time,
        layers_of_last_stage(workloads, stage_layers) * pass_time + head_time,
    )
    mean = whole / workloads.pipeline_size
    slowest = mean + hardware.constant("imbalance") * np.maximum(slowest - mean, 0.0)
    number = workloads.num_microbatches
    sharded = exposed_sharded_data(workloads, collectives, hardware, layer, stage_layers)
    host = number * hardware.per_software("microbatch_s", workloads) * operators.without_graph()
    return StepTime(
        stages=number * slowest + host,
        bubble=bubble_time(workloads, slowest, whole),
        pipeline_exposed=exposed_pipeline(workloads, collectives, hardware),
        data_exposed=np.where(
            workloads.sharding_stage >= 3,
            sharded,
            exposed_replicated_data(workloads, collectives, hardware, layer, stage_layers),
        ),
        optimizer=optimizer_time(workloads, hardware, operators),
        model_exposed=number * stage_layers * layer.exposed,
    )


def layers_of_slowest_stage(workloads: Workloads) -> FloatArray:
    """Return the number of layers on the stage with the most layers.

    Where only L+2 divides over the stages, the embedding and the output layer count as a layer
    each, as in the layouts of models with 126 layers; otherwise some stages have one layer more.
    """
    return np.ceil(workloads.num_layers / workloads.pipeline_size)


def layers_of_last_stage(workloads: Workloads, slowest: FloatArray) -> FloatArray:
    """Return the layers of the last stage in addition to the output layer.

    The last stage gets fewer layers if the layers do not divide evenly.
    """
    left = slowest * workloads.pipeline_size - workloads.num_layers
    is_pipelined = workloads.pipeline_size > 1
    return np.where(is_pipelined & (left > 0), slowest - 1, slowest)


def bubble_time(workloads: Workloads, slowest: FloatArray, whole: FloatArray) -> FloatArray:
    """Return how long the slowest stage idles in 1F1B, or interleaved with several chunks.

    Args:
        slowest: seconds of forward and backward of one micro batch on the slowest stage.
        whole: seconds of forward and backward of one micro batch on all stages together.

    The slowest stage idles while a micro batch passes the other stages once. With v chunks, the
    next micro batches follow after 1/v of that time: (p-1)(F+B)/v for equal stages. A closed form,
    because a search predicts thousands of layouts; the tests compare it with the simulation of the
    schedules.
    """
    others = np.maximum(whole - slowest, 0.0)
    is_pipelined = workloads.pipeline_size > 1
    return np.where(is_pipelined, others / workloads.num_chunks, 0.0)


def exposed_pipeline(
    workloads: Workloads, collectives: CollectiveCosts, hardware: Hardware
) -> FloatArray:
    """Return the time that a rank waits for activations and gradients."""
    hops = workloads.num_microbatches * workloads.num_chunks + workloads.pipeline_size
    needed = 2 * message_time(workloads, collectives) * hops
    needed = needed * hardware.per_software("pipeline_exposed", workloads)
    return np.where(workloads.pipeline_size > 1, needed, 0.0)


def message_time(workloads: Workloads, collectives: CollectiveCosts) -> FloatArray:
    """Return the time of the activations or gradients of a micro batch to a neighbouring stage."""
    # Each tensor-parallel rank sends its part; NVLink gathers the parts if the next layer needs
    # the whole: "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    # section 4.1, arXiv 2104.04473.
    whole, tp = 2 * workloads.microbatch_tokens * workloads.hidden_size, workloads.tensor_size
    stride = workloads.world_size / workloads.pipeline_size
    gathered = np.where(workloads.sequence_parallel > 0, 0.0, whole)
    gather = collectives.all_gather(gathered, tp, np.ones_like(tp))
    gather = np.where(workloads.sequence_parallel > 0, 0.0, gather)
    return collectives.point_to_point(whole / tp, stride) + gather


def exposed_replicated_data(
    workloads: Workloads,
    collectives: CollectiveCosts,
    hardware: Hardware,
    layer: PassTime,
    stage_layers: FloatArray,
) -> FloatArray:
    """Return the exposed time of reducing gradients and gathering parameters.

    In software that overlaps, one backward hides the reductions and one forward hides the gathers.
    Gradients and parameters are sent in 16 bits, so both move the same number of bytes.
    """
    shares = parameters_of_rank(workloads)
    # The output layer's tied copy is reduced in its own group; it is small.
    dense = collectives.all_gather(2 * shares.dense, workloads.replicas, workloads.tensor_size)
    exchange = dense + collectives.all_gather(
        2 * shares.expert, workloads.expert_replicas, workloads.expert_ranks
    )
    exchange = exchange * workloads.trained_share
    share = hardware.per_software("data_exposed", workloads)
    # The chunks of an interleaved stage finish at different times of the last p micro batches.
    chunks = workloads.num_chunks
    spread = 1 + (workloads.pipeline_size - 1) * (1 - 1 / chunks)
    window = np.where(workloads.flash_attention > 0, stage_layers * spread, 0.0)
    always, hideable = exchange * share, exchange * (1 - share)
    reduced = always + np.maximum(hideable - window * layer.backward, 0.0)
    # A rank that keeps only its shard of the gradients reduces the gradients of every micro batch.
    is_each = (workloads.sharding_stage == 2) & (workloads.pipeline_size == 1)
    exposed = reduced * np.where(is_each, workloads.num_microbatches, 1.0)
    return exposed + always + np.maximum(hideable - window * layer.forward, 0.0)


def exposed_sharded_data(
    workloads: Workloads,
    collectives: CollectiveCosts,
    hardware: Hardware,
    layer: PassTime,
    stage_layers: FloatArray,
) -> FloatArray:
    """Return the exposed time with sharded parameters: gather and reduce in every micro batch."""
    reached = hardware.per_software("sharded_bytes_per_s", workloads)
    tp, expert_ranks = workloads.tensor_size, workloads.expert_ranks
    gather = np.zeros(len(workloads))
    for weights, ranks, stride in (
        (workloads.dense_params / tp, workloads.replicas, tp),
        (workloads.expert_params / expert_ranks, workloads.expert_replicas, expert_ranks),
    ):
        needed = collectives.all_gather(2 * weights, ranks, stride)
        gather = gather + np.maximum(needed, 2 * weights * (ranks - 1) / ranks / reached)
    reduce_bytes = np.where(workloads.flash_attention > 0, 4.0, 2.0)
    reduce = gather * reduce_bytes / 2 * workloads.trained_share
    share = hardware.per_software("sharded_exposed", workloads)
    # Over NICs, only PyTorch's sharding was measured.
    leaves = workloads.replicas * tp > workloads.nvlink_domain
    measured = hardware.constant("fsdp.sharded_exposed")
    share = np.where(leaves & np.isin(workloads.software, ("megatron", "lattice")), measured, share)
    # NICs that exchange tokens gather no parameters at the same time.
    reach = expert_ranks > workloads.nvlink_domain
    busy = np.where(reach, expert_communication(collectives), 0.0)
    forward = _beside(gather, np.maximum(layer.forward - busy, 0.0), share)
    backward = _beside(gather + reduce, np.maximum(layer.backward - busy, 0.0), share)
    # A pipeline gathers and reduces once a step, see `memory.model_states`.
    times = np.where(workloads.pipeline_size > 1, 1.0, workloads.num_microbatches)
    return times * stage_layers * (forward + backward)


def _beside(communication: FloatArray, compute: FloatArray, share: FloatArray) -> FloatArray:
    """Return the part that is longer than compute, and a share of the remaining part."""
    return np.maximum(communication - compute, 0) + share * np.minimum(communication, compute)


def optimizer_time(
    workloads: Workloads, hardware: Hardware, operators: OperatorCosts
) -> FloatArray:
    """Return the time of the gradient norm, the update, and the host's fixed work per step."""
    shares = parameters_of_rank(workloads)
    is_whole = workloads.sharding_stage < 1
    owned = shares.dense / np.where(is_whole, 1.0, workloads.replicas)
    owned = owned + shares.expert / np.where(is_whole, 1.0, workloads.expert_replicas)
    owned = owned * workloads.trained_share
    return operators.memory(36 * owned) + hardware.per_software("step_s", workloads)
