"""The other side of `tests.parity.interop`: run by a Python that has the real megatron-core.

    python interop_peer.py save|load DIRECTORY --family F [--tp N] [--pp N] [--optimizer] --logits F

`save` builds a model, writes it with `megatron.core.dist_checkpointing.save` and its logits as a
torch file; `load` reads a checkpoint into a model of another seed, writes its logits, and with
`--again` saves what it has. Only public functions of megatron.core are called. It asks for a GPU in
a few places; on a machine without one those requests are answered with the CPU.
"""

import argparse
import contextlib
import os
import sys
import warnings
from pathlib import Path

import interop_case as case  # this file's directory heads the path of a script
import interop_kernels
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")


class CpuForGpu(TorchFunctionMode):
    """Answers requests for a GPU with the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


class NoTracker:
    """A random-state tracker for models without dropout."""

    def fork(self, *_):
        return contextlib.nullcontext()

    def is_initialized(self):
        return False


def work(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Run one rank."""
    gpu = torch.cuda  # noqa: TID251 - what the other program asks
    if not gpu.is_available():
        gpu.synchronize = lambda *_: None
        gpu.current_device = lambda: "cpu"
        CpuForGpu().__enter__()
        interop_kernels.stand_in_for_apex()
    torch.set_num_threads(1)
    size = arguments.tp * arguments.pp
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
    }  # fmt: skip
    dist.init_process_group("gloo", rank=rank, world_size=size)
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor_parallel.get_cuda_rng_tracker = lambda *_, **__: NoTracker()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tp, pipeline_model_parallel_size=arguments.pp
    )
    family = case.FAMILIES[arguments.family]
    values = case.config_values(arguments.family)
    if family["is_llama"]:
        values["activation_func"] = F.silu
    config = TransformerConfig(
        **values,
        use_cpu_initialization=True,
        tensor_model_parallel_size=arguments.tp,
        pipeline_model_parallel_size=arguments.pp,
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    torch.manual_seed(7 if arguments.command == "save" else 99)
    is_first, is_last = parallel_state.is_pipeline_first_stage(), (
        parallel_state.is_pipeline_last_stage()
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=case.VOCABULARY,
        max_sequence_length=case.SEQUENCE,
        pre_process=is_first,
        post_process=is_last,
        share_embeddings_and_output_weights=family["is_tied"],
        position_embedding_type="rope" if family["is_llama"] else "learned_absolute",
    )
    with torch.no_grad():
        generator = torch.Generator().manual_seed(17 + arguments.tp)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that differ from their initial 1 and 0
                drawn = torch.empty(len(parameter)).normal_(0, 0.2, generator=generator)
                if arguments.command == "save" and arguments.tp * arguments.pp == 1:
                    parameter.add_(drawn)
    optimizer = _optimizer(config, model, arguments) if arguments.optimizer else None
    directory = Path(arguments.directory)
    if arguments.command == "load":
        state = _declared(model, optimizer, arguments, is_loading=True)
        iteration = int((directory / "latest_checkpointed_iteration.txt").read_text())
        loaded = dist_checkpointing.load(state, str(directory / f"iter_{iteration:07d}"))
        model.load_state_dict(loaded["model"], strict=True)
        if optimizer is not None:
            optimizer.load_state_dict(loaded["optimizer"])
        directory = Path(arguments.again)
    if arguments.again or arguments.command == "save":
        state = _declared(model, optimizer, arguments, is_loading=False)
        state |= {
            "iteration": 3,
            "checkpoint_version": 3.0,
            "num_floating_point_operations_so_far": 12.5,
            "args": argparse.Namespace(
                num_layers=case.NUM_LAYERS, hidden_size=case.HIDDEN, consumed_train_samples=24,
                tensor_model_parallel_size=arguments.tp, pipeline_model_parallel_size=arguments.pp,
                params_dtype=torch.float32,
            ),
        }  # fmt: skip
        place = directory / "iter_0000003"
        if rank == 0:
            place.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state, str(place))
        if rank == 0:
            (directory / "latest_checkpointed_iteration.txt").write_text("3")
    logits = _logits(model, parallel_state)
    if is_last and parallel_state.get_tensor_model_parallel_rank() == 0:
        torch.save({"logits": logits, **_moments(optimizer, model)}, arguments.logits)
    dist.barrier()
    dist.destroy_process_group()


def _declared(model, optimizer, arguments, *, is_loading: bool) -> dict:
    """Return the sharded state of model and optimizer."""
    state = {"model": model.sharded_state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            state["model"],
            is_loading=is_loading,
            metadata={"distrib_optim_sharding_type": arguments.optimizer},
        )
    return state


def _optimizer(config, model, arguments):
    """Return Megatron's optimizer; one that is saved has made two updates."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True), [wrapped]
    )
    generator = torch.Generator().manual_seed(31)
    for _ in range(2 if arguments.command == "save" else 0):
        for parameter in model.parameters():
            drawn = torch.empty(parameter.shape).normal_(0, 0.1, generator=generator)
            parameter.main_grad.copy_(drawn)
        optimizer.step()
    return optimizer


def _moments(optimizer, model) -> dict:
    """Return Adam's moments by parameter and the number of updates, where one rank has it all."""
    if optimizer is None or dist.get_world_size() > 1:
        return {}
    group = optimizer.chained_optimizers[0].optimizer.param_groups[0]
    found = {"num_updates": torch.tensor(int(group["step"]))}
    for name, parameter in model.named_parameters():
        state = optimizer.chained_optimizers[0]._get_main_param_and_optimizer_states(parameter)
        found |= {f"{kind}.{name}": state[kind].view(parameter.shape).clone()
                  for kind in ("exp_avg", "exp_avg_sq")}  # fmt: skip
    return found


def _logits(model, parallel_state) -> torch.Tensor | None:
    """Return the logits [b, s, v] on the last stage; activations are passed on by hand."""
    tokens = torch.tensor(case.token_rows())
    positions = torch.arange(case.SEQUENCE).expand(case.BATCH, -1)
    mask = torch.ones(1, 1, case.SEQUENCE, case.SEQUENCE).tril() < 0.5
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    if place > 0:
        hidden = torch.empty(case.SEQUENCE, case.BATCH, case.HIDDEN)
        dist.recv(hidden, ranks[place - 1])
        model.set_input_tensor(hidden)
    with torch.no_grad():
        output = model(tokens, positions, mask)
    if place + 1 < len(ranks):
        dist.send(output.contiguous(), ranks[place + 1])
        return None
    tp = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size(tp))]
    dist.all_gather(parts, output.contiguous(), group=tp)
    return torch.cat(parts, -1)


def main() -> int:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("save", "load"))
    parser.add_argument("directory")
    parser.add_argument("--family", choices=sorted(case.FAMILIES), required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--optimizer", default="", help="how it is stored: fully_reshardable, ...")
    parser.add_argument("--logits", required=True)
    parser.add_argument("--again", default="", help="where to save what was loaded")
    parser.add_argument("--port", type=int, default=29655)
    arguments = parser.parse_args()
    size = arguments.tp * arguments.pp
    if size == 1:
        work(0, arguments, arguments.port)
    else:
        torch.multiprocessing.spawn(work, (arguments, arguments.port), nprocs=size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
