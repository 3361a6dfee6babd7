"""The functions behind Megatron's names do what the names promise."""

import logging
import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.foundation.errors import (
    CheckpointError,
    ConfigError,
    NumericsError,
    TopologyError,
)
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.transformer.moe.load_balancing import finish_router_step
from tests.harness.groups import FakeGroup, fake_groups
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close
from tests.unit.transformer.moe.small_layer import layer, tokens


@pytest.fixture(autouse=True)
def _groups_as_before():
    before = ProcessGroupCollection._current
    yield
    ProcessGroupCollection.set_current(before)


# A step and its results ------------------------------------------------------------------------


def test_a_loop_of_reruns_runs_a_step_once_and_forgets_its_batches():
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunStateMachine

    machine, data = RerunStateMachine(), RerunDataIterator(range(6))
    given = []
    for _ in range(2):
        while machine.should_run_forward_backward(data):
            given += [next(data), next(data)]
        assert data.saved_microbatches == []
    assert given == [0, 1, 2, 3]
    assert machine.should_checkpoint_and_exit() == (False, False, 0)
    assert [next(data), next(data)] == [4, 5]
    data.rewind()
    assert list(data) == [4, 5]


def test_a_rejected_result_ends_the_run_if_it_is_fatal_and_warns_if_not():
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine, wrong = get_rerun_state_machine(), torch.tensor(float("nan"))
    machine.set_mode(machine.get_mode())  # as evaluation does
    machine.validate_result(torch.tensor(1.0), torch.isnan, "found NaN")
    with pytest.raises(NumericsError, match="found NaN: nan"):
        machine.validate_result(wrong, torch.isnan, "found NaN", tolerance=0.0, fatal=True)
    with pytest.warns(UserWarning, match="Spiky loss"):
        machine.validate_result(wrong, torch.isnan, "Spiky loss", fatal=False)


def test_a_result_is_large_beside_the_largest_of_the_first_ones():
    from megatron.core.rerun_state_machine import RerunStateMachine

    machine = RerunStateMachine()
    first = [machine.is_unexpectedly_large(x, 10.0, "loss", num_samples=3) for x in (99, 1, 2)]
    assert first == [False] * 3
    assert not machine.is_unexpectedly_large(torch.tensor(989.0), 10.0, "loss", num_samples=3)
    assert machine.is_unexpectedly_large(torch.tensor(990.0), 10.0, "loss", num_samples=3)
    assert not machine.is_unexpectedly_large(990.0, 10.0, "norm", num_samples=3)


@pytest.mark.parametrize("mode", ["validate_results", "report_stats"])
def test_modes_that_rerun_are_refused(mode):
    from megatron.core.rerun_state_machine import RerunErrorInjector, RerunMode, RerunStateMachine

    with pytest.raises(ConfigError, match=mode):
        RerunStateMachine(mode=RerunMode(mode))
    with pytest.raises(ConfigError, match="error_injection_rate"):
        RerunErrorInjector(error_injection_rate=100)


def test_a_straggler_detector_is_a_context_that_cannot_be_switched_on():
    from megatron.core.utils import StragglerDetector

    detector = StragglerDetector()
    with detector(bdata=True), detector:
        assert not detector.enabled
    with pytest.raises(ConfigError, match="--log-straggler"):
        detector.configure(2, 0, enabled=True)


def test_ranges_appear_in_a_trace_when_they_are_switched_on():
    from megatron.core.utils import configure_nvtx_profiling, nvtx_range_pop, nvtx_range_push

    with torch.profiler.profile() as trace:
        nvtx_range_push("unseen")
        nvtx_range_pop("unseen")
        configure_nvtx_profiling(True)
        nvtx_range_push("outer", suffix="step")
        torch.ones(1) + 1
        nvtx_range_pop("outer")
        configure_nvtx_profiling(False)
    names = {event.key for event in trace.key_averages()}
    assert "outer.step" in names
    assert "unseen" not in names


# Groups ----------------------------------------------------------------------------------------


def test_a_said_size_is_seen_until_it_is_taken_back():
    ProcessGroupCollection.set_current(fake_groups(tp=(1, 2)))
    mpu.set_tensor_model_parallel_world_size(8)
    mpu.set_tensor_model_parallel_rank(5)
    assert (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()) == (
        5,
        8,
    )
    mpu.set_tensor_model_parallel_rank(None)
    assert (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()) == (
        1,
        2,
    )


def test_groups_of_a_run_stay_as_they_are_and_copies_of_them_may_change():
    ProcessGroupCollection.set_current(fake_groups(tp=(1, 2)))
    current = ProcessGroupCollection.current()
    with pytest.raises(TopologyError, match=r"with_groups\(tp="):
        current.tp = FakeGroup(0, 4)
    copy = ProcessGroupCollection.use_mpu_process_groups()
    copy.tp = FakeGroup(0, 4)
    assert (current.tp, copy.tp) == (FakeGroup(1, 2), FakeGroup(0, 4))
    resolved = resolve_groups(copy)
    copy.tp = FakeGroup(3, 4)
    assert resolved.tp == FakeGroup(0, 4)
    assert resolve_groups(resolved) is resolved


def test_a_virtual_stage_is_declared_until_groups_are_destroyed():
    mpu.set_virtual_pipeline_model_parallel_world_size(2)
    for stage, places in ((0, (True, False)), (1, (False, True))):
        mpu.set_virtual_pipeline_model_parallel_rank(stage)
        assert (mpu.is_pipeline_first_stage(False), mpu.is_pipeline_last_stage(False)) == places
        assert mpu.is_pipeline_first_stage() and mpu.is_pipeline_last_stage()
    assert mpu.is_pipeline_first_stage(False, vp_stage=0)
    mpu.destroy_model_parallel()
    assert mpu.get_virtual_pipeline_model_parallel_rank() is None
    assert mpu.is_pipeline_first_stage(False) and mpu.is_pipeline_last_stage(False)


def test_private_group_names_follow_the_current_collection():
    for rank in (0, 1):
        ProcessGroupCollection.set_current(fake_groups(tp=(rank, 2)))
        assert FakeGroup(rank, 2) == mpu._TENSOR_MODEL_PARALLEL_GROUP
        assert mpu._CONTEXT_PARALLEL_GROUP is None


def test_ranks_of_groups_come_without_processes():
    ranks = mpu.RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    assert ranks.get_ranks("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks.get_ranks("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert ranks.get_ranks("tp-pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_scratch_memory_is_used_again():
    buffer = mpu.get_global_memory_buffer()
    large = buffer.get_tensor([4, 8], torch.float32, "mpu")
    small = buffer.get_tensor([2, 3], torch.float32, "mpu")
    assert small.data_ptr() == large.data_ptr()
    assert buffer.get_tensor([4], torch.int64, "mpu").data_ptr() != large.data_ptr()
    mpu.destroy_global_memory_buffer()
    assert mpu.get_global_memory_buffer() is not buffer


# Masks, positions, layers ----------------------------------------------------------------------


def test_masks_and_positions_of_a_decoder_follow_its_documents():
    from megatron.training.utils import get_ltor_masks_and_position_ids

    data = torch.tensor([[5, 9, 6, 7, 9, 8]])  # 9 ends a document
    mask, loss_mask, positions = get_ltor_masks_and_position_ids(data, 9, True, True, True)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert loss_mask.tolist() == [[1, 0, 1, 1, 0, 1]]
    document = torch.tensor([0, 0, 1, 1, 1, 2])
    place = torch.arange(6)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    assert torch.equal(mask, ~seen[None, None])


def test_the_newer_signature_with_a_pad_token_masks_padding():
    from megatron.training.utils import get_ltor_masks_and_position_ids

    data = torch.tensor([[5, 9, 6, 0], [1, 2, 3, 0]])
    mask, loss_mask, positions = get_ltor_masks_and_position_ids(
        data, 9, 0, False, False, False, True
    )
    assert mask.shape == (1, 1, 4, 4)
    assert loss_mask.tolist() == [[1, 1, 1, 0]] * 2
    assert positions.tolist() == [[0, 1, 2, 3]] * 2


def test_rolled_tokens_are_the_later_ones():
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    rolled, total = roll_tensor(torch.tensor([[1, 2, 3], [4, 5, 6]]), shifts=-1, dims=-1)
    assert rolled.tolist() == [[2, 3, 0], [5, 6, 0]]
    assert int(total) == 16
    with pytest.raises(ConfigError, match="roll_tensor"):
        roll_tensor(torch.zeros(1, 3), shifts=1)


def test_l2_norm_gives_rows_of_mean_square_one():
    from megatron.core.transformer.torch_norm import L2Norm

    normed = L2Norm(8)(torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))
    assert_close(normed.square().mean(-1), torch.ones(3), FP32_REORDERED_SUM, "mean square")


def test_yarn_embedding_gives_the_angles_of_the_models_own():
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
    from megatron.core.transformer import MLATransformerConfig

    config = MLATransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    own = RotaryEmbedding(16, rotary_base=10000, yarn=config)
    angles, factor = YarnRotaryEmbedding(
        16, scaling_factor=40, original_max_position_embeddings=4096, mscale=1.0
    )(32)
    assert_close(angles, own(32), EXACT, "angles")
    assert factor == 0.1 * math.log(40) + 1


def test_positions_of_a_context_parallel_rank_are_its_zigzag_part():
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    positions = torch.arange(8).view(8, 1, 1, 1)
    assert get_pos_emb_on_this_cp_rank(positions, 0, FakeGroup(0, 2)).flatten().tolist() == [
        0, 1, 6, 7
    ]  # fmt: skip


def test_runs_of_rows_change_places_with_their_weights():
    from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

    rows, weights = sort_chunks_by_idxs(
        torch.tensor([[0], [1], [2], [3]]),
        torch.tensor([1, 2, 1]),
        torch.tensor([2, 0, 1]),
        torch.tensor([0.0, 1.0, 2.0, 3.0]),
    )
    assert rows.flatten().tolist() == [3, 0, 1, 2]
    assert weights.tolist() == [3, 0, 1, 2]


def test_balance_losses_are_logged_as_means_over_layers_with_experts():
    from megatron.core.transformer.moe.moe_utils import track_moe_metrics

    class Writer:
        def __init__(self):
            self.scalars = {}

        def add_scalar(self, tag, value, iteration):
            self.scalars[tag, iteration] = value

    first, second = (layer(moe_aux_loss_coeff=0.1, seed=seed) for seed in (3, 4))
    second.set_layer_number(3)
    for moe in (first, second):
        moe(tokens())[0].sum().backward()
    finish_router_step([first, second], ProcessGroupCollection.single())
    losses = [moe.router.load.step_losses["aux_loss"] for moe in (first, second)]
    mean, writer = sum(losses) / 2, Writer()
    total = {"load_balancing_loss": torch.tensor(1.0)}
    track_moe_metrics(
        0.5, 7, writer, total_loss_dict=total, per_layer_logging=True, num_layers=3,
        track_names=["load_balancing_loss", "z_loss"],
        pg_collection=ProcessGroupCollection.single(),
    )  # fmt: skip
    assert losses[0] != losses[1]
    assert total["load_balancing_loss"] == pytest.approx(1 + mean)
    assert writer.scalars["load_balancing_loss", 7] == pytest.approx(mean)
    of_layers = [writer.scalars[f"moe/load_balancing_loss_layer_{n}", 7] for n in range(3)]
    assert of_layers == pytest.approx([losses[0], 0, losses[1]])
    assert writer.scalars["z_loss", 7] == 0


def test_layers_with_a_window_are_counted_from_one():
    from megatron.core.transformer.utils import is_layer_window_attention

    assert [is_layer_window_attention((8, 0), 3, n) for n in (1, 2, 3)] == [True, True, False]
    assert [is_layer_window_attention([0, 1], n) for n in (1, 2)] == [False, True]
    assert not is_layer_window_attention(None, 3, 1)


# Checkpoints -----------------------------------------------------------------------------------


def test_a_modules_state_is_declared_as_its_axes_say():
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    ProcessGroupCollection.set_current(fake_groups(tp=(1, 2), dp_cp=(3, 4)))
    declared = make_sharded_tensors_for_checkpoint(
        {"weight": torch.zeros(3, 5), "bias": torch.zeros(3), "x_extra_state": None},
        "layer.",
        {"weight": 0},
        ((0, 2, 6),),
    )
    weight, bias = declared["layer.weight"], declared["layer.bias"]
    assert isinstance(weight, ShardedTensor)
    assert (weight.global_shape, weight.global_offset) == ((6, 6, 5), (2, 3, 0))
    assert (weight.replica_id, bias.replica_id) == ((0, 0, 3), (0, 1, 3))
    assert (bias.global_shape, bias.global_offset) == ((6, 3), (2, 0))
    assert declared["layer.x_extra_state"].replica_id == (0, 1, 3)


def test_prefixes_of_keys_are_replaced_all_or_by_a_map():
    from megatron.core.dist_checkpointing.utils import (
        apply_prefix_mapping,
        replace_prefix_for_sharding,
    )

    tree = {"a": [ShardedTensor.from_rank_offsets("old.x", torch.zeros(1))]}
    replace_prefix_for_sharding(tree, "old.", "new.")
    apply_prefix_mapping(tree, {"other.": "no.", "new.": "newest."})
    assert tree["a"][0].key == "newest.x"
    with pytest.raises(ConfigError, match="does not begin with"):
        replace_prefix_for_sharding(tree, "old.", "new.")


def test_strategies_of_megatron_save_and_load_here(tmp_path):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import (
        get_default_load_sharded_strategy,
        get_default_save_sharded_strategy,
    )
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )

    def state(value):
        return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}

    save = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), None, True)
    load = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(tmp_path)))
    request = dist_checkpointing.save(
        state(7.0), tmp_path / "ck", sharded_strategy=save, async_sharded_save=True
    )
    queue = AsyncCallsQueue()
    assert queue.schedule_async_request(request) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert queue.get_num_unfinalized_calls() == 0
    loaded = dist_checkpointing.load(state(0.0), tmp_path / "ck", load)
    assert loaded["w"].tolist() == [7.0] * 4


def test_the_tracker_of_a_save_directory_is_read_by_its_name(tmp_path):
    from megatron.training.checkpointing import (
        get_checkpoint_name,
        get_checkpoint_tracker_filename,
        read_metadata,
    )

    tracker = get_checkpoint_tracker_filename(str(tmp_path))
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        read_metadata(tracker)
    for text, found in (("12", (12, False)), ("release", (0, True))):
        with open(tracker, "w") as file:
            file.write(text)
        assert read_metadata(tracker) == found
    assert get_checkpoint_name(str(tmp_path), 12) == f"{tmp_path}/iter_0000012"


# Tokenizers, metadata, norms and time limits ----------------------------------------------------


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_tokenizer_derived_from_megatrons_base_tells_of_its_paths_and_options():
    from megatron.core.datasets.megatron_tokenizer import MegatronLegacyTokenizer, MegatronTokenizer

    class Letters(MegatronTokenizer):
        vocab = {letter: number for number, letter in enumerate("abc")}
        vocab_size = 3

        def tokenize(self, text):
            return [self.vocab[letter] for letter in text]

        def detokenize(self, ids):
            return "".join(self.inv_vocab[number] for number in ids)

    letters = Letters("letters.txt", lower_case=True)
    assert isinstance(letters, MegatronLegacyTokenizer)
    assert letters.detokenize(letters.tokenize("cab")) == "cab"
    assert letters.unique_identifiers == {
        "class": "Letters",
        "tokenizer_path": ["letters.txt"],
        "lower_case": True,
    }
    assert letters.eod is None


def test_metadata_of_a_checkpoint_is_kept_without_its_groups():
    from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization

    metadata = {"version": 2, "dp_cp_group": ProcessGroupCollection.current().dp_cp}
    assert _clean_metadata_for_serialization(metadata) == {"version": 2}
    assert "dp_cp_group" in metadata
    assert _clean_metadata_for_serialization(None) is None


def test_the_norm_of_many_tensors_is_that_of_one_with_all_their_elements():
    from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm

    tensors = [torch.arange(4.0).bfloat16(), torch.ones(2, 3), torch.zeros(())]
    norm, each = local_multi_tensor_applier(
        local_multi_tensor_l2_norm, torch.zeros(1, dtype=torch.int), [tensors], True
    )
    whole = torch.cat([tensor.float().flatten() for tensor in tensors])
    assert_close(norm, whole.norm().reshape(1), FP32_REORDERED_SUM, "norm of all")
    assert_close(each[1], torch.tensor(6.0).sqrt(), FP32_REORDERED_SUM, "norm of one")
    assert local_multi_tensor_l2_norm(1, norm, [tensors], False)[1] is None


def test_the_group_of_a_norm_is_that_of_its_dtensors(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    from megatron.core.utils import get_data_parallel_group_if_dtensor

    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.ones(2), mesh)
    assert get_data_parallel_group_if_dtensor(torch.ones(2), None) is None
    group = get_data_parallel_group_if_dtensor(sharded)
    assert group == mesh.get_group()
    assert get_data_parallel_group_if_dtensor(torch.ones(2), group) is group
    with pytest.raises(ConfigError, match="different data-parallel groups"):
        get_data_parallel_group_if_dtensor(sharded, dist.new_group([0]))


def test_all_groups_of_this_process_get_a_new_time_limit(process_group):
    from megatron.core.parallel_state import update_pg_timeout

    groups = [dist.new_group([0]) for _ in range(3)]
    ProcessGroupCollection.set_current(ProcessGroupCollection(tp=groups[0], pp=groups[1]))

    def limits():
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return [int(b.options._timeout.total_seconds()) for b in backends]

    assert len(set(limits())) == 1
    update_pg_timeout(timedelta(seconds=77))
    assert limits()[:2] == [77, 77] != limits()[1:]
    update_pg_timeout(timedelta(seconds=78), groups[2])
    assert limits() == [77, 77, 78]


# Configs and graphs -----------------------------------------------------------------------------


def test_a_config_without_a_kernel_or_a_graph_is_one_that_leaves_the_choice_and_captures_none():
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.transformer.enums import AttnBackend, CudaGraphScope
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, attention_backend=None
    )
    assert config.attention_backend is AttnBackend.auto
    assert config.cuda_graph_impl == "none"
    assert CudaGraphScope.full_iteration not in config.cuda_graph_modules
    assert "training" not in FullCudaGraphWrapper.cuda_graph
    with pytest.raises(ConfigError, match="no CUDA graph is captured"):
        FullCudaGraphWrapper(min)


def test_ranks_and_rows_are_those_that_the_launcher_and_the_flags_say(monkeypatch):
    from megatron.core._rank_utils import safe_get_rank, safe_get_world_size
    from megatron.core.typed_torch import apply_module
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (safe_get_rank(), safe_get_world_size()) == (3, 8)
    assert calculate_padded_vocab_size(50257, 128, 2) == 50432
    assert apply_module(len) is len


def test_ranks_before_the_connection_are_those_of_torchrun_or_of_the_slurm_job(monkeypatch):
    from megatron.core import _slurm_utils
    from megatron.core._rank_utils import safe_get_rank
    from megatron.training.utils.common_utils import get_local_rank_preinit

    for name in ("RANK", "LOCAL_RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert not _slurm_utils.is_slurm_job()
    assert _slurm_utils.resolve_slurm_rank() is None
    assert (safe_get_rank(), get_local_rank_preinit()) == (0, 0)
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert _slurm_utils.resolve_slurm_world_size() == 16
    assert (safe_get_rank(), get_local_rank_preinit()) == (5, 2)
    monkeypatch.setenv("RANK", "7")
    assert safe_get_rank() == 7


def test_logging_has_the_level_and_the_filters_that_are_requested(monkeypatch, tmp_path):
    from megatron.training.utils import log_utils

    root, ours = logging.getLogger(), logging.getLogger("megatron.of_this_test")
    monkeypatch.setattr(root, "filters", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(root.manager, "loggerDict", {ours.name: ours})
    monkeypatch.setenv("MEGATRON_LOGGING_LEVEL", "10")
    log_utils.setup_logging(modules_to_filter=["noisy"])
    assert root.level == ours.level == 10
    warned = logging.LogRecord("megatron", logging.WARNING, "", 0, "", (), None)
    noisy = logging.LogRecord("noisy.part", logging.ERROR, "", 0, "", (), None)
    plain = logging.LogRecord("megatron", logging.INFO, "", 0, "", (), None)
    assert [bool(ours.filter(record)) for record in (warned, noisy, plain)] == [False, False, True]
    log_utils.append_to_progress_log(str(tmp_path / "new"), "Starting job")
    assert "Starting job" in (tmp_path / "new/progress.txt").read_text()
    log_utils.append_to_progress_log(None, "nowhere")


def test_the_stage_of_further_predictions_follows_the_layout():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    two_stages = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    assert get_mtp_ranks([0, 4], TransformerConfig(**shape, **two_stages)) == []
    predicts = TransformerConfig(**shape, **two_stages, mtp_num_layers=1)
    assert get_mtp_ranks([0, 4], predicts) == [4]


def test_a_backends_classes_are_the_results_of_its_methods():
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    backend = LocalSpecProvider()
    assert backend.column_parallel_linear() is ColumnParallelLinear
    assert backend.row_parallel_linear() is RowParallelLinear
    assert backend.core_attention() is DotProductAttention
    assert MambaLayerSubmodules(mixer=int, norm=str).self_attention is int
