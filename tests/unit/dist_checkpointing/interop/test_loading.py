"""Checkpoints of Megatron-LM and DeepSpeed load into a GPT here, in another layout, exactly."""

import io
import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.dist_checkpointing.interop.contents import InteropContents
from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.dist_checkpointing.loader import load_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.foundation.errors import CheckpointError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.param_meta import get_param_meta, shard_of
from megatron.core.transformer.config.layer_kinds import hybrid_pattern
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport.object_collectives import SingleProcess
from megatron.training.checkpointing import CheckpointContext, Checkpointer, CheckpointSettings
from tests.harness.groups import fake_groups
from tests.unit.dist_checkpointing.interop import interop_files as files
from tests.unit.dist_checkpointing.interop.payloads import Runs

WRITERS = {
    "torch_dist": files.write_torch_dist,
    "torch_dist, of a hybrid model": lambda d: files.write_torch_dist(d, keys=files.halved),
    "torch_dist, by buffer": files.write_by_buffer,
    "torch_dist, by buffer, te, tp 2 pp 2": lambda d: files.write_by_buffer(
        d, tp=2, pp=2, is_te=True
    ),
    "torch, one rank": files.write_legacy,
    "torch, tp 2": lambda d: files.write_legacy(d, tp=2),
    "torch, tp 2 pp 2": lambda d: files.write_legacy(d, tp=2, pp=2),
    "torch, pp 2 vp 2": lambda d: files.write_legacy(d, pp=2, vp=2),
    "ZeRO 1": lambda d: files.write_deepspeed(d, stage=1),
    "ZeRO 2, dp 3": lambda d: files.write_deepspeed(d, stage=2, dp=3),
    "ZeRO 2, tp 2": lambda d: files.write_deepspeed(d, stage=2, tp=2),
    "ZeRO 3": lambda d: files.write_deepspeed(d, stage=3),
    "ZeRO 3, dp 3 tp 2": lambda d: files.write_deepspeed(d, stage=3, dp=3, tp=2),
}


def parts_of(
    rank: int = 0, size: int = 1, *, dtype: str = "fp32", pattern: str | None = None
) -> CheckpointContext:
    """Return a llama and its optimizer, as one tensor-parallel rank holds them.

    Args:
        pattern: the same model as letters.
    """
    groups = fake_groups(tp=(rank, size))
    half: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16} if dtype == "bf16" else {}
    config = TransformerConfig(
        num_layers=len(hybrid_pattern(pattern).kinds) if pattern else files.LAYERS,
        hybrid_layer_pattern=pattern, hidden_size=files.HIDDEN, ffn_hidden_size=files.FFN,
        num_attention_heads=files.HEADS, num_query_groups=files.GROUPS, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        tensor_model_parallel_size=size, **half,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config, False, pp_rank=0), vocab_size=files.VOCABULARY,
        max_sequence_length=8, position_embedding_type="rope", pg_collection=groups,
    )  # fmt: skip
    settings = OptimizerConfig(lr=1e-3, bf16=dtype == "bf16")
    optimizer = get_megatron_optimizer(settings, [model], pg_collection=groups)
    return CheckpointContext(model=[model], optimizer=optimizer, groups=groups)


def canonical(name: str) -> str:
    """Return the name under which a parameter is stored."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def check(parts: CheckpointContext, rank: int, size: int, layer_of: Sequence[int] = ()) -> None:
    """Compare weights, main weights and moments with the tensors that were stored.

    Args:
        layer_of: stored layer of each layer, if they differ.
    """
    kinds = files.moments()
    for item in parts.optimizer.shards:
        name, parameter = canonical(item.shard.name), item.shard.parameter
        if layer_of:
            name = re.sub(r"(?<=layers\.)\d+", lambda layer: str(layer_of[int(layer[0])]), name)
        meta = get_param_meta(parameter)

        def mine(full, meta=meta):
            return shard_of(full, meta, rank, size) if meta.split_dim is not None else full

        expected = mine(files.weights()[name])
        assert torch.equal(parameter.detach(), expected.to(parameter.dtype)), name
        assert torch.equal(item.main_param.detach().view_as(expected), expected), name
        state = parts.optimizer.state[item.main_param]
        assert int(state["step"]) == files.STEP
        for kind in files.MOMENTS:
            stored = mine(kinds[kind][name])
            assert torch.equal(state[kind].view_as(stored), stored), (kind, name)


@pytest.mark.parametrize("form", WRITERS)
def test_weights_and_moments_load_into_any_tensor_parallel_size(
    form: str, ram_path: Path, capsys
) -> None:
    WRITERS[form](ram_path)
    for rank, size in ((0, 1), (1, 2)):
        parts = parts_of(rank, size)
        restored = Checkpointer(CheckpointSettings(load=str(ram_path)), parts).load()
        assert restored is not None
        assert restored.train_state.iteration == files.ITERATION
        assert restored.train_state.consumed_train_samples == files.SAMPLES
        check(parts, rank, size)
    said = capsys.readouterr().out
    assert ("DeepSpeed, ZeRO stage" if form.startswith("ZeRO") else "Megatron-LM torch") in said


@pytest.mark.parametrize("form", WRITERS)
def test_a_hybrid_model_reads_the_layers_of_a_gpt(form: str, ram_path: Path) -> None:
    WRITERS[form](ram_path)
    for pattern, layer_of in (
        ("*-*-*-*-", (0, 0, 1, 1, 2, 2, 3, 3)),
        ("[*-]*-[*-][*-]", (0, 1, 1, 2, 3)),
    ):
        parts = parts_of(1, 2, pattern=pattern)
        assert Checkpointer(CheckpointSettings(load=str(ram_path)), parts).load() is not None
        check(parts, 1, 2, layer_of)


def test_a_half_precision_run_takes_its_main_weights_from_the_fp32_ones(ram_path: Path) -> None:
    files.write_deepspeed(ram_path, stage=1)
    parts = parts_of(dtype="bf16")
    Checkpointer(CheckpointSettings(load=str(ram_path)), parts).load()
    check(parts, 0, 1)


@pytest.mark.parametrize("form", ["torch_dist", "torch, tp 2", "ZeRO 3"])
def test_finetune_and_no_load_optim_take_the_weights_alone(form: str, ram_path: Path) -> None:
    WRITERS[form](ram_path)
    for setting, iteration in (("finetune", 0), ("no_load_optim", files.ITERATION)):
        parts = parts_of()
        settings = CheckpointSettings(load=str(ram_path), **{setting: True})
        restored = Checkpointer(settings, parts).load()
        assert restored is not None
        assert restored.train_state.iteration == iteration
        for item in parts.optimizer.shards:
            expected = files.weights()[canonical(item.shard.name)]
            assert torch.equal(item.main_param.detach().view_as(expected), expected)
            assert not parts.optimizer.state[item.main_param]


def test_a_checkpoint_without_moments_is_refused_with_the_flag_that_helps(ram_path: Path) -> None:
    files.write_torch_dist(ram_path, with_optimizer=False)
    with pytest.raises(CheckpointError, match=r"no optimizer state[\s\S]*--no-load-optim"):
        Checkpointer(CheckpointSettings(load=str(ram_path)), parts_of()).load()


def test_the_settings_of_the_run_are_kept_as_plain_values(ram_path: Path) -> None:
    contents = open_any(files.write_torch_dist(ram_path), peers=SingleProcess())
    assert isinstance(contents, InteropContents)
    stored = vars(contents.common_state()["args"])
    assert stored["num_layers"] == files.LAYERS
    assert stored["params_dtype"] == "torch.float32"


@pytest.mark.parametrize("form", ["torch, tp 2 pp 2", "ZeRO 2, tp 2", "ZeRO 3"])
def test_a_missing_file_is_named_and_the_checkpoint_refused(form: str, ram_path: Path) -> None:
    place = WRITERS[form](ram_path)
    lost = sorted(p for p in place.rglob("*.pt") if "optim" in p.name)[-1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=re.escape(str(place))):
        Checkpointer(CheckpointSettings(load=str(ram_path)), parts_of()).load()


@pytest.mark.parametrize("form", ["torch_dist", "torch, one rank", "ZeRO 1"])
def test_code_in_any_file_never_runs(form: str, ram_path: Path) -> None:
    place = WRITERS[form](ram_path)
    canary = ram_path / "canary"
    payload = Runs(os.system, f"touch {canary}")
    tracker = {"latest", "latest_checkpointed_iteration.txt"}
    for path in [p for p in place.rglob("*") if p.is_file() and p.name not in tracker]:
        original = path.read_bytes()
        saved = io.BytesIO()
        torch.save({"module": payload}, saved)
        for hostile in (pickle.dumps(payload), saved.getvalue()):
            path.write_bytes(hostile)
            with pytest.raises(CheckpointError):
                Checkpointer(CheckpointSettings(load=str(ram_path)), parts_of()).load()
        path.write_bytes(original)
    assert not canary.exists()
    assert Checkpointer(CheckpointSettings(load=str(ram_path)), parts_of()).load() is not None


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """Load every tensor of the model by key, without a model."""
    expected = files.stacked(files.weights())
    template = {
        key: ShardedTensor(
            key=key, data=None, dtype=torch.float32, local_shape=tuple(full.shape),
            global_shape=tuple(full.shape), global_offset=(0,) * full.dim(),
        )
        for key, full in expected.items()
    }  # fmt: skip
    contents = open_any(directory, peers=SingleProcess())
    return load_state(template, contents, peers=SingleProcess()).state


def test_every_flip_in_metadata_and_data_is_refused_or_changes_nothing(ram_path: Path) -> None:
    place = files.write_torch_dist(ram_path, with_optimizer=False)
    generator = torch.Generator().manual_seed(1)
    expected = files.stacked(files.weights())
    num_refused = 0
    for path in (place / ".metadata", place / "__0_0.distcp"):
        original = path.read_bytes()
        for at in torch.randint(len(original), (60,), generator=generator).tolist():
            changed = bytearray(original)
            changed[at] ^= 4
            path.write_bytes(changed)
            try:
                found = read_all(place)
            except CheckpointError:
                num_refused += 1
                continue
            assert all(torch.equal(found[k], t) for k, t in expected.items()), (path.name, at)
        path.write_bytes(original)
    assert num_refused > 60
    assert all(torch.equal(t, expected[k]) for k, t in read_all(place).items() if k in expected)


def test_a_data_file_elsewhere_is_not_opened(ram_path: Path) -> None:
    place = files.write_torch_dist(ram_path)
    data = (place / ".metadata").read_bytes()
    for name in (b"../x_0.distcp", b"/etc/x.distcp", b"__9_9.distcp\n"):
        name = name[:12].ljust(12, b"x")
        (place / ".metadata").write_bytes(data.replace(b"__0_0.distcp", name))
        with pytest.raises(CheckpointError, match="CKPT_UNSAFE"):
            open_any(place, peers=SingleProcess())


@pytest.mark.parametrize("backend", ["zarr", "fsdp_dtensor", "torch_dcp"])
def test_other_formats_are_recognised_and_refused(backend: str, ram_path: Path) -> None:
    place = files.write_torch_dist(ram_path)
    (place / "metadata.json").write_text(f'{{"sharded_backend": "{backend}"}}')
    with pytest.raises(CheckpointError, match=f"format '{backend}'"):
        Checkpointer(CheckpointSettings(load=str(ram_path)), parts_of()).load()


def test_moments_by_buffer_in_an_unknown_order_are_refused_with_the_flag_that_helps(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = files.stage_names
    monkeypatch.setattr(
        files, "stage_names", lambda *a, **k: dict(sorted(order(*a, **k).items(), reverse=True))
    )
    files.write_by_buffer(ram_path)
    with pytest.raises(CheckpointError, match="--dist-ckpt-optim-fully-reshardable"):
        Checkpointer(CheckpointSettings(load=str(ram_path)), parts_of()).load()
    settings = CheckpointSettings(load=str(ram_path), no_load_optim=True)
    assert Checkpointer(settings, parts_of()).load() is not None


def test_an_export_loads_again_with_equal_state(ram_path: Path, capsys) -> None:
    from tools.checkpoint import __main__ as tool

    files.write_deepspeed(ram_path / "zero", stage=1)
    assert tool.main(["export", str(ram_path / "zero"), str(ram_path / "out")]) == 0
    assert "iter_0000007" in capsys.readouterr().out
    contents = open_any(ram_path / "out" / "iter_0000007", peers=SingleProcess())
    assert isinstance(contents, InteropContents)
    assert contents.kind == "Megatron-LM torch_dist"
    parts = parts_of()
    Checkpointer(CheckpointSettings(load=str(ram_path / "out")), parts).load()
    for item in parts.optimizer.shards:
        expected = files.weights()[canonical(item.shard.name)]
        assert torch.equal(item.main_param.detach().view_as(expected), expected)
    assert tool.main(["export", str(ram_path / "zero"), str(ram_path / "out")]) == 1
    assert "exists already" in capsys.readouterr().err


def test_the_tools_open_foreign_checkpoints(ram_path: Path, capsys) -> None:
    from tools.checkpoint import __main__ as tool

    files.write_deepspeed(ram_path / "zero", stage=3)
    assert tool.main(["inspect", str(ram_path / "zero"), "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "format: DeepSpeed, ZeRO stage 3" in said
    assert "decoder.layers.mlp.linear_fc1.weight" in said
    assert "decoder.layers.0." not in said  # all layers are alike: stacks alone
    command = ["reshard", str(ram_path / "zero"), str(ram_path / "native")]
    assert tool.main(command) == 1
    assert "--weights" in capsys.readouterr().err
    assert tool.main([*command, "--weights"]) == 0
    assert tool.main(["verify", str(ram_path / "native")]) == 0
    parts = parts_of()
    settings = CheckpointSettings(load=str(ram_path / "native"), no_load_optim=True)
    assert Checkpointer(settings, parts).load() is not None
    for item in parts.optimizer.shards:
        expected = files.weights()[canonical(item.shard.name)]
        assert torch.equal(item.main_param.detach().view_as(expected), expected)
