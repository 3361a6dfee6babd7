"""The search for a layout: what it leaves out, what it prefers, and the command line it prints."""

import itertools
import re
import shlex

import numpy as np
import pytest

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.foundation.exit_status import ExitStatus
from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.parser import ParsedCommand, parse_command_line
from megatron.training.config.run import RunConfig
from megatron.training.rules import resolve_and_check
from megatron.training.training import PretrainCall
from megatron_lattice.planner.autofill import fits
from megatron_lattice.planner.hardware import gpu_named
from megatron_lattice.planner.layout_search import EQUALLY_GOOD, search_layouts, what_would_fit
from megatron_lattice.planner.layout_space import (
    Choices,
    divisors,
    layout_space,
    stage_layers,
)
from megatron_lattice.planner.memory import model_states
from megatron_lattice.planner.predictor import load_predictor
from megatron_lattice.planner.run_workload import choices_of, settings_of_layout, workload_of_run
from megatron_lattice.planner.search_command import Cluster, search_command, surest_first
from megatron_lattice.planner.table_rows import read_rows
from megatron_lattice.planner.validation import ChoiceFigures, choice_figures
from megatron_lattice.planner.workload import Workloads
from tests.harness.pool import REPOSITORY
from tests.harness.resolved_run import WITHOUT_A_RUN, run_of
from tests.unit.planner.test_planner import FIXTURES
from tools import plan

PREDICTOR = load_predictor()
LLAMA_8B = "--preset llama3-8b --bf16 --seq-length 8192 --global-batch-size 64"
EXPERTS = (
    "--num-layers 6 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --bf16"
    " --vocab-size 32000 --num-experts 8 --moe-router-topk 2 --swiglu --disable-bias-linear"
    " --global-batch-size 32 --untie-embeddings-and-output-weights --position-embedding-type rope"
)


def model_of(words: str, world_size: int, gpu: str = "H100") -> Workloads:
    run = run_of(f"{words} --micro-batch-size 1", 1)
    return workload_of_run(run, gpu_named(gpu, PREDICTOR.hardware), world_size)


def row_of(table: Workloads, index: int) -> Workloads:
    return table.take(np.array([index]))


def checked(words: str, settings: dict[str, object], world_size: int) -> None:
    values = parse_command_line(shlex.split(words), args_defaults=WITHOUT_A_RUN).config.flat()
    command = ParsedCommand(config=RunConfig.from_values({**values, **settings}))
    resolve_and_check(lambda: command, lambda _: world_size)


@pytest.mark.parametrize("words", [LLAMA_8B, EXPERTS], ids=["dense", "experts"])
def test_the_line_that_is_printed_passes_a_dry_run_of_so_many_ranks(words: str) -> None:
    found = search_command(shlex.split(words), Cluster("H100", 16), script="pretrain_gpt.py")
    flags = shlex.split(found.text.splitlines()[-1].partition("pretrain_gpt.py ")[2])
    planned = describe_run(
        lambda: parse_command_line([*flags, "--dry-run", "--dry-run-world-size", "16"])
    )
    assert "16 = tensor" in planned


def test_the_search_is_a_command_with_the_flags_of_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["search", "--gpu", "A100", "--num-gpus", "8", *shlex.split(LLAMA_8B)]
    assert plan.main(words) == ExitStatus.DONE
    assert "torchrun --nproc-per-node 8 pretrain_gpt.py" in capsys.readouterr().out


@pytest.mark.parametrize("words", [LLAMA_8B, EXPERTS], ids=["dense", "experts"])
def test_layouts_of_the_space_are_allowed_by_the_rules_of_a_run(words: str) -> None:
    table = layout_space(model_of(words, 16), Choices()).table
    for index in np.random.default_rng(3).choice(len(table), 12, replace=False):
        checked(words, settings_of_layout(row_of(table, index), has_dispatcher=False), 16)


def test_sizes_that_the_space_leaves_out_are_refused_by_the_rules_of_a_run() -> None:
    words = f"{EXPERTS} --micro-batch-size 1"
    table = layout_space(model_of(EXPERTS, 12), Choices()).table
    sizes = ("tensor_size", "pipeline_size", "context_size", "expert_size")
    kept = set(zip(*(getattr(table, name).astype(int).tolist() for name in sizes), strict=True))
    tried = [
        sizes
        for sizes in itertools.product(divisors(12), divisors(12), (1, 2, 4), (1, 2, 4))
        if 12 % (sizes[0] * sizes[1] * sizes[2]) == 0
    ]
    left_out = [sizes for sizes in tried if sizes not in kept]
    assert kept and left_out
    for tp, pp, cp, ep in left_out:
        settings = {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1,
            "moe_token_dispatcher_type": "alltoall",
            "sequence_parallel": tp > 1,
        }
        with pytest.raises(MegatronError):
            checked(words, settings, 12)


def test_what_the_user_decides_stays() -> None:
    words = f"{LLAMA_8B} --tensor-model-parallel-size 2 --recompute-granularity full"
    command = parse_command_line(shlex.split(words))
    choices = choices_of(command.config, command.given)
    found = search_layouts(model_of(LLAMA_8B, 16), choices, PREDICTOR)
    assert set(found.table.tensor_size) == {2.0}
    assert set(found.table.recompute) == {"full"}
    assert len(set(found.table.pipeline_size)) > 1


def test_the_first_layout_is_the_fastest_that_fits() -> None:
    found = search_layouts(model_of(LLAMA_8B, 16), Choices(), PREDICTOR)
    assert fits(found.table.take(found.order), PREDICTOR.hardware).all()
    assert np.isinf(np.delete(found.seconds, found.order)).all()
    assert found.seconds[found.order[0]] == found.seconds.min()
    assert sum(found.refused.values()) > 0


def test_of_about_equal_layouts_the_surest_is_first() -> None:
    found = search_layouts(model_of(EXPERTS, 16), Choices(), PREDICTOR)
    order = surest_first(found, PREDICTOR)
    assert sorted(order) == sorted(found.order)
    seconds = found.compared[order]
    num_near = int((found.compared <= found.compared.min() * (1 + EQUALLY_GOOD)).sum())
    assert num_near > 1 and (seconds[num_near:] >= seconds[:num_near].max()).all()
    near = found.table.take(order[:num_near])
    like = PREDICTOR.correction.similarity(near, PREDICTOR.hardware)
    like = np.where(like < 0.5, 0, np.round(like, 1))
    keys = list(zip(-like, near.context_size, near.micro_batch_size, seconds, strict=False))
    assert keys == sorted(keys)


def test_the_first_layout_is_as_good_as_those_that_were_published() -> None:
    published = read_rows(FIXTURES / "published_steps.csv")
    # Of a group of the second kind the planner prefers a layout that was 9 % slower.
    kinds = ["k22-gpt3-175b", "titan-405b", "vtrain-3.6B-64"], ["vtrain-18.4B-256"]
    right, wrong = ([row for row in published if row["rank_group"] in kind] for kind in kinds)
    assert choice_figures(right, PREDICTOR) == ChoiceFigures(3, 3, 3)
    assert choice_figures(wrong, PREDICTOR) == ChoiceFigures(1, 1, 0)
    assert choice_figures(right[:1], PREDICTOR) == ChoiceFigures(0, 0, 0)


def test_where_nothing_fits_the_message_says_what_would() -> None:
    words = shlex.split("--preset llama3-70b --bf16 --seq-length 8192 --global-batch-size 64")
    with pytest.raises(ConfigError, match="none of .* layouts fits on 8 H100") as refused:
        search_command(words, Cluster("H100", 8), script="pretrain_gpt.py")
    assert "--optimizer-cpu-offload" in refused.value.fix
    enough = re.search(r"(\d+) GPUs", refused.value.fix)
    assert enough
    assert search_command(words, Cluster("H100", int(enough[1])), script="pretrain_gpt.py")


def test_a_recomputation_that_was_asked_for_is_named_where_another_would_fit() -> None:
    model = model_of("--preset llama3-8b --bf16 --seq-length 8192 --global-batch-size 8", 8)
    choices = Choices(tensor_size=(1,), pipeline_size=(1,), context_size=(1,), recompute=("none",))
    longer = model.replace(seq_length=np.array([24576.0]))
    assert "leave the recomputation to the search" in what_would_fit(longer, choices, PREDICTOR)


@pytest.mark.parametrize(
    ("words", "gpu", "named"),
    [
        ("--preset llama3-8b --bf16 --seq-length 8192", "H100", "--global-batch-size"),
        (LLAMA_8B.replace("--bf16", ""), "H100", "fp32"),
        (LLAMA_8B, "V100", "V100"),
        (f"{LLAMA_8B} --pipeline-schedule gpipe", "H100", "--pipeline-schedule"),
        (f"{LLAMA_8B} --num-layers-per-virtual-pipeline-stage 3", "H100", "--num-layers-per"),
        (f"{LLAMA_8B} --tensor-model-parallel-size 3", "H100", "attention heads"),
    ],
)
def test_a_search_that_cannot_be_says_why(words: str, gpu: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        search_command(shlex.split(words), Cluster(gpu, 8), script="pretrain_gpt.py")


def test_the_states_of_a_run_are_those_of_its_settings() -> None:
    """18 bytes of a parameter; fp32 gradients, and 12 bytes shared by two ranks."""
    model = model_of("--preset llama3-8b --bf16 --seq-length 8192 --global-batch-size 8", 2)
    assert model_states(model.replace(data_size=np.array([2.0])))[0] == pytest.approx(
        (2 + 4 + 12 / 2) * 8.03e9, rel=0.01
    )


def test_a_script_without_a_search_refuses_auto_parallel() -> None:
    command = parse_command_line(["--auto-parallel", "H100"])
    call = PretrainCall.of(
        (command.config, lambda _: [], None, lambda *_: None, lambda *_: None), {}
    )
    assert call.asks_for_layout()
    with pytest.raises(ConfigError, match="without a layout search"):
        call.searched_layout()


TEN = {
    # What people plan in 2026, with a number of GPUs that its published runs have.
    "--preset llama3-8b --bf16 --seq-length 8192": 8,
    "--preset llama3-70b --bf16 --seq-length 8192": 64,
    "--preset llama3.1-405b --bf16 --seq-length 8192": 1024,
    "--preset mixtral-8x7b --bf16 --seq-length 8192": 64,
    "--preset qwen3-30b-a3b --bf16 --seq-length 4096": 16,
    "--preset qwen3-235b-a22b --bf16 --seq-length 4096": 256,
    "--preset gpt-oss-20b --bf16 --seq-length 8192": 8,
    "--preset gpt-oss-120b --bf16 --seq-length 4096": 64,
    "--preset deepseek-v3 --bf16 --seq-length 4096": 1024,
    "--preset kimi-k2 --bf16 --seq-length 4096": 1024,
}


UNMEASURED = ("--preset qwen3-30b-a3b", "--preset qwen3-235b-a22b", "--preset deepseek-v3")


def words_of(model: str) -> list[str]:
    return [*model.split(), "--global-batch-size", "1024"]


@pytest.mark.parametrize("model", TEN)
def test_models_that_people_plan_get_a_layout_and_its_line_runs(model: str) -> None:
    words, world = words_of(model), TEN[model]
    found = search_command(
        words, Cluster("H100", world), script="pretrain_gpt.py", has_free_layout=True
    )
    assert len(found.text.splitlines()) <= 12
    flags = shlex.split(found.text.splitlines()[-1].partition("pretrain_gpt.py ")[2])
    run = run_of(" ".join(flags), world)
    assert (
        run.parallelism.pipeline_model_parallel_size
        == found.found.table.take(np.array(found.chosen[:1])).pipeline_size
    )


@pytest.mark.parametrize("model", [each for each in TEN if each.startswith(UNMEASURED)])
def test_a_kind_of_layout_without_measured_runs_is_no_first_answer(model: str) -> None:
    """Experts under ZeRO-3, and micro batches larger than those measured with experts."""
    command = search_command(words_of(model), Cluster("H100", TEN[model]), script="pretrain_gpt.py")
    found, first = command.found, row_of(command.found.table, command.chosen[0])
    assert first.sharding_stage[0] < 3 and first.micro_batch_size[0] <= 4
    sharded = found.best_with("sharding_stage", 3.0)
    assert sharded is not None and found.caution[sharded] > 1
    kinds = (first, row_of(found.table, sharded))
    measured, unmeasured = (PREDICTOR.interval(kind)[0] for kind in kinds)
    assert unmeasured > 1.1 * measured


@pytest.mark.parametrize("model", TEN)
def test_models_that_people_plan_have_a_step(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world = TEN[model]
    words = ["step", "--gpu", "H100", "--num-gpus", str(world), *words_of(model)]
    assert plan.main([*words, "--micro-batch-size", "1"]) == ExitStatus.DONE
    printed = capsys.readouterr().out
    needed = re.search(r"ms per step .* ([\d.]+) GiB", printed)
    assert needed
    assert ("do not fit" in printed) == (float(needed[1]) > 72)


def test_sixty_one_layers_get_stages_of_unequal_size() -> None:
    layers = stage_layers(61, 4, 2)
    assert sum(layers) == 61 and len(layers) == 8
    of_rank = [layers[rank] + layers[rank + 4] for rank in range(4)]
    assert max(of_rank) - min(of_rank) == 1 and of_rank[-1] == min(of_rank)
    model = model_of(LLAMA_8B, 16).replace(num_layers=np.array([61.0]))
    found = search_layouts(model, Choices(), PREDICTOR)
    assert {4.0, 8.0, 16.0} <= set(found.table.pipeline_size)


def test_what_a_file_fixes_is_named() -> None:
    file = REPOSITORY / "examples/mixture_of_experts/deepseek_v3.yaml"
    words = ["--yaml-cfg", str(file), "--mock-data"]
    kept = search_command(words, Cluster("H100", 1024), script="pretrain_gpt.py")
    assert "fixed by the file: --expert-model-parallel-size 64" in kept.text
    assert set(kept.found.table.pipeline_size) == {16.0}
    with pytest.raises(ConfigError, match=r"fixed by the file: [\s\S]*--free-layout"):
        search_command(words, Cluster("H100", 64), script="pretrain_gpt.py")
    stages = shlex.split(f"{LLAMA_8B} --pipeline-model-parallel-size 4")
    stages += ["--pipeline-model-parallel-layout", "Et*6|t*9|t*9|t*8L"]
    found = search_command(stages, Cluster("H100", 16), script="pretrain_gpt.py")
    assert set(found.found.table.num_chunks) == {1.0}
    assert "Et*6|t*9|t*9|t*8L" in found.text.splitlines()[-1]


def test_kernels_of_a_run_do_not_depend_on_its_sharding() -> None:
    table = layout_space(model_of(EXPERTS, 16), Choices()).table
    assert {1.0, 2.0, 3.0} <= set(table.sharding_stage)
    assert set(table.software) == {"lattice"}


def test_ranks_that_share_a_sequence_exchange_heads_and_short_sequences_are_not_shared() -> None:
    words = shlex.split("--preset gpt-oss-120b --bf16 --seq-length 4096 --global-batch-size 1280")
    found = search_command(words, Cluster("GB200", 64), script="pretrain_gpt.py")
    assert found.found.table.context_size[found.chosen[0]] == 1
    shared = [*words, "--context-parallel-size", "4"]
    line = search_command(shared, Cluster("GB200", 64), script="pretrain_gpt.py").text
    assert "--cp-comm-type a2a" in line.splitlines()[-1]
    ring = [*shared, "--cp-comm-type", "p2p"]
    table = search_command(ring, Cluster("GB200", 64), script="pretrain_gpt.py").found.table
    assert not table.exchanges_heads.any()


def test_tiles_of_a_ring_are_slower_than_an_exchange_of_heads() -> None:
    row = model_of(LLAMA_8B, 8).replace(context_size=np.array([2.0]), data_size=np.array([4.0]))
    ring, heads = (row.replace(exchanges_heads=np.array([share])) for share in (0.0, 1.0))
    assert PREDICTOR.modelled_seconds(ring)[0] > 2 * PREDICTOR.modelled_seconds(heads)[0]
    published = [each.replace(software=np.array(["megatron"])) for each in (ring, heads)]
    of_ring, of_heads = (PREDICTOR.modelled_seconds(each)[0] for each in published)
    assert of_ring == pytest.approx(of_heads, rel=0.1)
