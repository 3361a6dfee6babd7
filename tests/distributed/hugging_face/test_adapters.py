"""Low-rank adapters: the same in every layout, and PEFT computes what we do with them."""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from megatron.core.dist_checkpointing.loader import open_contents
from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.add_adapters import add_adapters
from megatron.core.transformer.low_rank_adapter import LoraConfig, adapter_parameters
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport.object_collectives import SingleProcess
from megatron.hugging_face import read_adapters, read_model_directory
from megatron.training.checkpointing import load_checkpoint
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from megatron.training.rules import resolve_and_check
from tests.distributed.hugging_face.test_layouts import train
from tests.harness.distributed import distributed
from tests.harness.tolerances import (
    BF16_REORDERED_SUM,
    FP32_AFTER_OPTIMIZER,
    FP32_REORDERED_SUM,
    assert_close,
)
from tests.parity.adapters import compare, problems
from tests.unit.hugging_face.models import VOCAB, flags_for, our_model, saved
from tools.checkpoint.__main__ import main as convert

PLAIN = "--lora-rank 4 --lora-alpha 64"
LORA = f"{PLAIN} --lora-dropout 0.1"
EXPERTS = "experts.linear_fc1 experts.linear_fc2"
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
PIPELINE = {"tp": 2, "pp": 2}
ZERO_3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


def with_peft(base, adapter):
    """Return Transformers' model with the adapters that PEFT read."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, adapter).eval()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Transformers, as PEFT uses it
@pytest.mark.parametrize(
    ("case", "flags", "sizes", "adapters"),
    [
        ("llama 3.1, tied", f"{LAYOUT} --sequence-parallel", PIPELINE, f"{LORA} --use-dora"),
        ("gpt2", f"{LAYOUT} --sequence-parallel", PIPELINE,
         f"{LORA} --lora-target-modules linear_qkv linear_proj"),
        ("qwen2 with experts", f"--expert-model-parallel-size 2 {ZERO_3}", {"ep": 2},
         f"{PLAIN} --lora-target-modules linear_qkv linear_fc1 linear_fc2 {EXPERTS}"),
        ("mixtral", "--expert-model-parallel-size 2 --use-torch-fsdp2", {"ep": 2},
         f"{PLAIN} --lora-target-modules linear_proj {EXPERTS}"),
    ],
    ids=["llama, DoRA", "gpt2", "qwen2 with experts", "mixtral, FSDP2"],
)  # fmt: skip
def test_adapters_do_not_depend_on_the_layout_and_peft_computes_the_same(
    case, flags, sizes, adapters, tmp_path
):
    base = tmp_path / "base"
    saved(case, base)
    runs = {}
    for name, world, layout, axes in (("one", 1, "", {}), ("many", 4, flags, sizes)):
        words = f"{adapters} {layout} --save-adapter {tmp_path / name}"
        runs[name] = train(base, tmp_path, f"{name}-run", world, words, **axes)
    (expected, _), (losses, merged) = runs["one"], runs["many"]
    assert_close(losses, expected, FP32_REORDERED_SUM, "losses")
    one, many = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("one", "many"))
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        assert_close(many[name], tensor, FP32_AFTER_OPTIMIZER, name)
        if "lora_B" in name:
            assert tensor.abs().max() > 1e-3, name  # it begins at zero

    before = load_file(base / "model.safetensors")
    assert before.keys() == merged.keys()
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        beside = with_peft(base, tmp_path / "many")(ids).logits
        whole = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "many-run-out", attn_implementation="eager"
        )(ids).logits
        frozen = transformers.AutoModelForCausalLM.from_pretrained(
            base, attn_implementation="eager"
        )(ids).logits
    assert_close(whole, beside, FP32_REORDERED_SUM, "logits")
    assert (beside - frozen).abs().max() > 0.01
    # Written with one A for the parts of a layer, it comes back in the rank it was trained with.
    assert read_adapters(tmp_path / "many", read_model_directory(base)).rank == 4
    config = json.loads((tmp_path / "many" / "adapter_config.json").read_text())
    places = [*config["target_modules"], *config.get("target_parameters", ())]
    places = [re.sub("^(mlp.experts).*|.weight$", r"\1", place) for place in places]
    assert all(any(place in name for place in places) for name in one)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    saved("qwen2, tied", directory)
    return directory


def test_checkpoints_hold_the_adapters_alone_and_a_run_goes_on_from_them(base, tmp_path):
    expected, weights = train(base, tmp_path, "whole", 1, f"{LORA} --save-interval 2")
    checkpoint = tmp_path / "whole-save" / "iter_0000002"
    stored = open_contents(checkpoint, peers=SingleProcess()).manifest.tensors
    models = [key for key in stored if not key.startswith("optimizer.")]
    assert models
    assert {k for k in models if not k.endswith((".adapter.down", ".adapter.up"))} == set(), models
    assert all(key.endswith((".adapter.down", ".adapter.up")) for key in models)
    words = f"{LORA} --load {tmp_path / 'whole-save'} --ckpt-step 2"
    out = tmp_path / "converted"
    assert convert(["convert", str(checkpoint), str(out), "--base", str(base)]) == 0
    middle = load_file(out / "model.safetensors")
    assert middle.keys() == weights.keys()
    assert any(not torch.equal(middle[name], weights[name]) for name in weights)
    whole = ["convert", str(tmp_path / "whole-save"), str(tmp_path / "end"), "--base", str(base)]
    assert convert(whole) == 0
    merged = load_file(tmp_path / "end" / "model.safetensors")
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    only = ["convert", str(checkpoint), str(tmp_path / "peft"), "--adapter", "--base", str(base)]
    assert convert(only) == 0
    assert read_adapters(tmp_path / "peft", read_model_directory(base)).rank == 4
    losses, again = train(base, tmp_path, "rest", 1, words)
    assert losses == expected[-1:]
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def trained_by_peft(base, directory, **settings):
    """Save an adapter of PEFT with random factors; return the merged weights."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=12, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    return model.merge_and_unload().state_dict()


@pytest.fixture(scope="module")
def trained_elsewhere(base, tmp_path_factory):
    """An adapter of PEFT's, with an A for each projection and none for keys; and the merged."""
    directory = tmp_path_factory.mktemp("peft")
    places = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    return directory, trained_by_peft(base, directory, target_modules=places, use_rslora=True)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_loaded_adapters_are_those_of_the_main_weights(base, trained_elsewhere, tmp_path):
    directory, merged = trained_elsewhere
    words = f"--load-adapter {directory} --lr 0 --min-lr 0 --bf16 --save-hf-dtype fp32"
    _, found = train(base, tmp_path, "run", 1, words)
    for name, tensor in found.items():
        assert_close(tensor, merged[name], BF16_REORDERED_SUM, name)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_of_peft_is_read_in_any_layout(base, trained_elsewhere, tmp_path):
    directory, merged = trained_elsewhere
    read = read_adapters(directory, read_model_directory(base))
    assert (read.rank, read.targets) == (8, ["linear_qkv", "linear_proj", "linear_fc1"])
    words = f"{LAYOUT} --load-adapter {directory} --lr 0 --min-lr 0 --train-iters 1"
    _, found = train(base, tmp_path, "run", 4, words, tp=2, pp=2)
    before = load_file(base / "model.safetensors")
    moved = [name for name in found if not torch.equal(found[name], before[name])]
    assert any("q_proj" in name for name in moved)
    assert not any("k_proj" in name or "norm" in name for name in moved)
    for name, tensor in found.items():
        assert_close(tensor, merged[name], FP32_REORDERED_SUM, name)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_in_use_takes_its_adapters_from_a_directory(base, trained_elsewhere):
    groups, words = ProcessGroupCollection.single(), ["--load-adapter", str(trained_elsewhere[0])]
    run = resolve(parse_command_line([*flags_for(base), *words]).config, world_size=1)
    model, _ = our_model(base)
    settings = run.lora
    add_adapters([model], settings, groups)
    load_checkpoint([model], None, None, args=run.namespace(), pg_collection=groups)
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        expected = with_peft(base, trained_elsewhere[0])(ids).logits
        found = model.eval()(ids, None, None)[..., :VOCAB]
    assert_close(found, expected, FP32_REORDERED_SUM, "logits")


@distributed(world_size=2, pp=2)
def test_a_layer_may_be_on_some_stages_only(groups):
    name = ("in_proj", "linear_qkv")[groups.pp.rank()]
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    layer = nn.ModuleDict(
        {name: ColumnParallelLinear(8, 16, config=config, init_method=nn.init.zeros_)}
    )
    settings = LoraConfig(lora_rank=2, lora_alpha=2, lora_target_modules=("in_proj", "linear_qkv"))
    assert add_adapters([layer], settings, groups) == 2 * (8 + 16)
    assert [path for path, _ in adapter_parameters(layer)]
    elsewhere = LoraConfig(
        lora_rank=2, lora_alpha=2, lora_target_modules=("linear_qkv", "linear_fc1")
    )
    with pytest.raises(ConfigError, match="no layer called linear_fc1"):
        add_adapters([layer], elsewhere, groups)


CASES = [
    ("llama", False, "tp2"),
    ("gemma3", True, "dp2 fsdp2"),
    ("mixtral", False, "ep2 zero3"),
    ("deepseek v3", True, "one process"),
    ("deepseek v2 lite, tied", False, "ep2 expt_tp2"),
    ("gpt_oss", False, "one process"),
    ("bamba", False, "tp2"),
]


@pytest.mark.parametrize(("case", "is_dora", "layout"), CASES)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_adapters_have_the_logits_and_gradients_of_peft(case, is_dora, layout, tmp_path):
    ((_, found),) = compare(case, is_dora, [layout], tmp_path)
    assert problems(found) == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_may_have_ranks_and_strengths_of_their_own(base, tmp_path):
    merged = trained_by_peft(
        base, tmp_path / "adapter", target_modules=["q_proj", "up_proj", "o_proj"],
        rank_pattern={"up_proj": 6},
        alpha_pattern={r"layers\.1\.self_attn\.q_proj": 5, "o_proj": 7},
    )  # fmt: skip
    words = f"--load-adapter {tmp_path / 'adapter'} --lr 0 --min-lr 0 --train-iters 1 {ZERO_3}"
    _, found = train(base, tmp_path, "run", 2, words)
    for name, tensor in found.items():
        assert_close(tensor, merged[name], FP32_REORDERED_SUM, name)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::RuntimeWarning")
def test_adapters_of_older_experts_are_read(tmp_path):
    """Transformers 4 had a layer for each projection of each expert."""
    import peft

    base, old = tmp_path / "base", tmp_path / "old"
    saved("mixtral", base)
    old.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors, model = {}, load_file(base / "model.safetensors")
    experts = [name for name in model if ".experts." in name and name.endswith("w2.weight")]
    assert experts
    for name in experts:
        for projection in ("w1", "w2", "w3"):
            layer = name.replace("w2.weight", projection)
            height, width = model[f"{layer}.weight"].shape
            for part, shape in (("A", (3, width)), ("B", (height, 3))):
                key = f"base_model.model.{layer}.lora_{part}.weight"
                tensors[key] = torch.randn(shape, generator=generator) / 8
    save_file(tensors, old / "adapter_model.safetensors")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["w1", "w2", "w3"], task_type=None)
    config.save_pretrained(old)
    assert read_adapters(old, read_model_directory(base)).rank == 6
    words = f"--load-adapter {old} --lr 0 --min-lr 0 --train-iters 1"
    train(base, tmp_path, "run", 2, f"{words} --expert-model-parallel-size 2", ep=2)
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        found = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "run-out", attn_implementation="eager"
        )(ids).logits
        expected = with_peft(base, old)(ids).logits
    assert_close(found, expected, FP32_REORDERED_SUM, "logits")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("use_dora", True, "use_dora"),
        ("bias", "all", "bias = 'all'"),
        ("r", 0, "r = 0"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights = 'pissa_niter_4'"),
        ("lora_bias", True, "lora_bias"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("lora_dropout", 1.5, "lora_dropout = 1.5"),
        ("target_parameters", "x", "target_parameters"),
        ("peft_type", "LOHA", "peft_type = 'LOHA'"),
        ("alpha_pattern", {"(": 1}, "alpha_pattern"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_more_than_a_plain_adapter_is_refused(
    base, trained_elsewhere, field, value, named, tmp_path
):
    directory = tmp_path / "odd"
    shutil.copytree(trained_elsewhere[0], directory)
    config = directory / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=named):
        check([*flags_for(base), "--load-adapter", str(directory)])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--load-adapter nowhere", "holds no adapter_config.json"),
        ("--lora-rank 0", "--lora-rank 0"),
        ("--lora-rank 4 --lora-dropout 1.0", "--lora-dropout 1.0"),
        ("--lora-rank 4 --lora-target-modules q_proj", "linear_qkv"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_are_refused(base, words, named):
    with pytest.raises(ConfigError, match=named):
        check([*flags_for(base), *words.split()])


def check(words):
    resolve_and_check(lambda: parse_command_line(words), lambda config: 1)
