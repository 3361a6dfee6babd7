"""The planner's closed forms against simulations, published figures, and its own command."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.exit_status import ExitStatus
from megatron.core.pipeline_parallel.lower import lower
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.simulate import simulate
from megatron.core.pipeline_parallel.step_plan import compute_orders
from megatron_lattice.planner.autofill import autofill, fits, has_open_choices
from megatron_lattice.planner.collectives import CollectiveCosts
from megatron_lattice.planner.correction import fit_correction
from megatron_lattice.planner.figures import figures
from megatron_lattice.planner.hardware import load_hardware, rows_hardware
from megatron_lattice.planner.layer_time import expert_communication, layer_time
from megatron_lattice.planner.memory import (
    GIB,
    layer_activations,
    layers_in_flight,
    model_states,
    predict_memory,
)
from megatron_lattice.planner.operators import OperatorCosts, wave_efficiency
from megatron_lattice.planner.predictor import fit_predictor, load_predictor
from megatron_lattice.planner.step_time import bubble_time, predict_step
from megatron_lattice.planner.table_rows import from_rows, read_rows
from megatron_lattice.planner.validation import (
    family_of,
    group_names,
    layout_names,
    measured_rows,
    memory_figures,
    source_folds,
)
from megatron_lattice.planner.workload import Workloads
from tools import plan

HARDWARE = load_hardware()

LLAMA_70B = {
    "id": "a", "layers": "80", "hidden": "8192", "heads": "64", "kv_heads": "8", "head_dim": "128",
    "ffn": "28672", "glu": "1", "vocab": "128256", "seq": "8192", "gpu": "H100", "n_gpus": "64",
    "TP": "4", "PP": "4", "VPP": "5", "CP": "2", "DP": "2", "MBS": "1", "GBS": "128", "zero": "1",
    "recompute": "none", "precision": "bf16", "sp": "1", "schedule": "interleaved",
    "attention": "flash", "nvlink_domain": "8", "inter_node_GBps_per_gpu": "50",
}  # fmt: skip


def rows_of(**changes: str) -> Workloads:
    return from_rows([{**LLAMA_70B, **changes}])


FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "planner"


@pytest.fixture(scope="module")
def published() -> list[dict[str, str]]:
    return read_rows(FIXTURES / "published_steps.csv")


@pytest.fixture(scope="module")
def published_2026() -> list[dict[str, str]]:
    return read_rows(FIXTURES / "published_2026.csv")


QWEN_30B = {
    **LLAMA_70B, "layers": "48", "hidden": "2048", "heads": "32", "kv_heads": "4", "ffn": "6144",
    "vocab": "151936", "experts": "128", "topk": "8", "moe_ffn": "768", "active_B": "3.3",
    "seq": "4096", "n_gpus": "16", "TP": "1", "PP": "1", "VPP": "1", "CP": "1", "DP": "16",
    "EP": "8", "GBS": "512", "sp": "0", "schedule": "none", "graphs": "none",
}  # fmt: skip


def experts_of(**changes: str) -> Workloads:
    return from_rows([{**QWEN_30B, **changes}])


def step_of(loads: Workloads) -> float:
    return float(predict_step(loads, HARDWARE).total[0])


def test_experts_are_gathered_by_the_ranks_that_hold_the_same_experts() -> None:
    """Sharded parameters: 16 ranks with 16 shares of the experts gather none of the experts."""
    whole = experts_of(zero="3", EP="16")
    without = whole.replace(expert_params=np.zeros(1))
    assert predict_step(whole, HARDWARE).data_exposed == pytest.approx(
        predict_step(without, HARDWARE).data_exposed
    )
    pairs = experts_of(zero="3", EP="8")
    assert predict_step(pairs, HARDWARE).data_exposed > predict_step(whole, HARDWARE).data_exposed


def test_an_exchange_in_a_node_is_faster_than_over_nodes() -> None:
    exchanges = [
        expert_communication(CollectiveCosts(loads, rows_hardware(loads, HARDWARE), HARDWARE))[0]
        for loads in (experts_of(EP="8"), experts_of(EP="16"))
    ]
    assert exchanges[0] < exchanges[1]


def test_graphs_and_grouped_products_save_launches() -> None:
    """Most with few tokens: the launches of 16 experts wait for the host in any case."""
    for tokens, least in (("1", 1.5), ("16", 1.05)):
        plain = step_of(experts_of(MBS=tokens))
        grouped = step_of(experts_of(MBS=tokens, grouped="yes"))
        whole = step_of(experts_of(MBS=tokens, graphs="iteration"))
        assert plain > grouped > whole
        assert plain / whole > least


def test_tensor_ranks_that_split_tokens_sort_and_activate_their_own_tokens() -> None:
    def times(**changes: str) -> list[float]:
        loads = experts_of(**changes)
        operators = OperatorCosts(loads, rows_hardware(loads, HARDWARE), HARDWARE)
        return [float(operators.activation_forward()[0]), float(operators.routing_forward()[0])]

    alone = times()
    assert times(TP="2", sp="1", DP="8") == pytest.approx([time / 2 for time in alone])
    # Few experts are split: each tensor rank has half of an expert's width, and all tokens.
    few = times(experts="8")
    assert times(experts="8", TP="2", sp="1", DP="8") == pytest.approx([few[0] / 2, few[1]])


def test_recomputation_of_more_modules_takes_longer() -> None:
    kinds = ["none", "layernorm", "activations", "mlp", "full"]
    seconds = [
        step_of(experts_of(graphs="iteration").replace(recompute=np.array([kind])))
        for kind in kinds
    ]
    assert seconds == sorted(seconds)
    assert seconds[2] < 1.05 * seconds[0]  # no product, and no exchange of tokens, is repeated
    waits = [step_of(experts_of().replace(recompute=np.array([kind]))) for kind in ("none", "mlp")]
    # The launches of the 16 local experts of 48 layers are repeated in 32 micro batches.
    launches = 32 * 48 * 16 * HARDWARE.constant("expert_launch_s")
    assert waits[1] - waits[0] > launches


def test_a_table_without_graphs_gets_them_from_similar_rows(
    published_2026: list[dict[str, str]],
) -> None:
    predictor = load_predictor()
    stated = [row for row in published_2026 if row["graphs"]]
    columns = ("graphs", "grouped", "window", "window_layers", "sinks")
    filled = predictor.filled(from_rows([row | dict.fromkeys(columns, "") for row in stated]))
    known = from_rows(stated)
    assert filled.attended_share == pytest.approx(known.attended_share, abs=1e-3)
    assert (filled.has_sinks == known.has_sinks).all()
    # Releases of the same layout differ: the majority of the rows decides.
    assert np.mean((filled.graphs == "iteration") == (known.graphs == "iteration")) > 0.7


def test_windows_adapters_and_recurrent_layers_cost_less() -> None:
    windowed = rows_of(window="128", window_layers="40", seq="32768", CP="1", GBS="8")
    assert step_of(windowed) < step_of(rows_of(seq="32768", CP="1", GBS="8"))
    adapted = rows_of(lora_rank="16")
    assert 0.5 < step_of(adapted) / step_of(rows_of()) < 0.8  # no gradients of weights: 2 of 3
    assert model_states(adapted)[0] < 0.5 * model_states(rows_of())[0]
    mixers = {"mamba_heads": "128", "mamba_head_dim": "64", "mamba_state": "128"}
    hybrid = rows_of(
        attention_layers="8", dense_layers="36", mamba_layers="36", seq="131072", CP="1", GBS="8",
        **mixers,
    )  # fmt: skip
    assert step_of(hybrid) < 0.6 * step_of(rows_of(seq="131072", CP="1", GBS="8"))


def test_time_and_memory_of_runs_of_this_project_are_those_that_were_measured() -> None:
    rows = read_rows(FIXTURES / "lattice.csv")
    predictor, loads = load_predictor(), from_rows(rows)
    measured = np.array([float(row["ref_step_s"]) for row in rows])
    assert predictor.seconds(loads) == pytest.approx(measured, rel=0.03)
    memory = predict_memory(predictor.filled(loads), predictor.hardware)
    allocated = (memory.states + memory.activations + memory.logits) / GIB
    assert allocated == pytest.approx([float(row["mem_GB_per_gpu"]) for row in rows], rel=0.015)
    # In addition: the device's context, workspaces, and fragmentation.
    assert (memory.overhead > 2 * GIB).all() and (memory.overhead < 4 * GIB).all()


def test_the_software_of_a_row_can_be_named() -> None:
    lattice, megatron = (rows_of(CP="1", DP="4", software=name) for name in ("lattice", "megatron"))
    assert step_of(lattice) < step_of(megatron)
    assert HARDWARE.per_software("tensor_exposed", lattice) == HARDWARE.per_software(
        "tensor_exposed", megatron
    )
    assert rows_of(zero="3", TP="1").software[0] == "fsdp"
    assert rows_of(zero="3", TP="1", gpu="GB200").software[0] == "megatron"
    assert rows_of(zero="3", TP="1", software="megatron").software[0] == "megatron"
    with pytest.raises(ConfigError, match="'software' has 'jax'"):
        rows_of(software="jax")


def seconds_of(**changes: str) -> float:
    return float(predict_step(autofill(rows_of(**changes), HARDWARE), HARDWARE).total[0])


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 4), (4, 1, 16), (8, 1, 8), (4, 2, 8), (8, 3, 16)])
def test_the_closed_form_of_the_bubble_is_what_the_schedule_simulates(
    p: int, v: int, m: int
) -> None:
    plan_of_step = StepPlan("1f1b", p, v, m)
    program = lower(compute_orders(plan_of_step))
    forward, backward = 1.0 / v, 2.0 / v
    simulated = simulate(program, forward=forward, backward=backward).makespan
    loads = rows_of(PP=str(p), VPP=str(v), n_gpus=str(8 * p), GBS=str(2 * m))
    bubble = bubble_time(loads, np.array([3.0]), np.array([3.0 * p]))
    assert simulated == pytest.approx(3.0 * m + float(bubble[0]))


# Model, layers, hidden, heads, p, v, micro batch; GiB of states, of activations without anything,
# and with sequence parallelism and selective recomputation: Korthikanti et al., arXiv 2205.05198,
# Figure 1, which counts 18 bytes of a parameter and no embedding.
PUBLISHED_MEMORY = [
    ("22B", 48, 6144, 64, 1, 1, 4, 45.56, 59.25, 9.56),
    ("175B", 96, 12288, 96, 8, 3, 1, 45.56, 66.84, 12.35),
    ("530B", 105, 20480, 128, 35, 3, 1, 31.64, 114.02, 23.08),
    ("1T", 128, 25600, 160, 64, 1, 1, 32.96, 131.25, 26.56),
]


@pytest.mark.parametrize("case", PUBLISHED_MEMORY, ids=lambda case: case[0])
def test_memory_is_what_the_paper_works_out(case: tuple) -> None:  # type: ignore[type-arg]
    _, layers, hidden, heads, p, v, micro_batch, states, plain, selective = case
    loads = rows_of(
        layers=str(layers), hidden=str(hidden), heads=str(heads), kv_heads=str(heads),
        head_dim=str(hidden // heads), ffn=str(4 * hidden), glu="0", seq="2048", TP="8",
        PP=str(p), VPP=str(v), CP="1", DP="1", n_gpus=str(8 * p), MBS=str(micro_batch),
        GBS=str(8 * p * micro_batch), precision="fp16", attention="unfused", sp="0", zero="0",
        vocab="0",
    )  # fmt: skip
    in_fp32 = loads.replace(gradient_bytes=np.array([4.0]))
    assert model_states(in_fp32)[0] / GIB == pytest.approx(states, rel=0.002)
    one = layer_activations(loads, np.array(["none"])) * layers_in_flight(loads)
    assert one[0] / GIB == pytest.approx(plain, rel=0.002)
    with_sequence = loads.replace(sequence_parallel=np.array([1.0]))
    one = layer_activations(with_sequence, np.array(["selective"])) * layers_in_flight(loads)
    assert one[0] / GIB == pytest.approx(selective, rel=0.002)


def test_states_of_zero_stages_are_those_of_the_paper() -> None:
    """7.5B parameters on 64 ranks, "ZeRO" (arXiv 1910.02054), Figure 1: 120, 31.4, 16.6 GB."""
    layers, hidden = 37, 4096
    published = {"0": 120e9, "1": 31.4e9, "2": 16.6e9}
    for stage, whole in published.items():
        loads = rows_of(
            layers=str(layers), hidden=str(hidden), heads="32", kv_heads="32", glu="0",
            ffn=str(4 * hidden), vocab="0", TP="1", PP="1", VPP="1", CP="1", DP="64",
            precision="fp16", attention="unfused", zero=stage,
        )  # fmt: skip
        assert model_states(loads)[0] == pytest.approx(whole, rel=0.01)


# Recomputation, sequence parallelism; ms of forward and backward of a layer of the 22B model on 8
# A100, which no calibration has seen: Korthikanti et al., arXiv 2205.05198, Table 4.
MEASURED_LAYERS = [
    ("none", "0", 7.7, 11.9),
    ("none", "1", 7.2, 11.8),
    ("full", "0", 7.7, 19.5),
    ("selective", "0", 7.7, 13.2),
    ("selective", "1", 7.2, 13.1),
]


@pytest.mark.parametrize("case", MEASURED_LAYERS, ids=lambda case: f"{case[0]} {case[1]}")
def test_a_layer_takes_what_was_measured_of_it_alone(case: tuple[str, str, float, float]) -> None:
    recompute, sequence_parallel, forward, backward = case
    loads = rows_of(
        layers="48", hidden="6144", heads="64", kv_heads="64", head_dim="96", ffn="24576", glu="0",
        vocab="51200", seq="2048", gpu="A100", n_gpus="8", TP="8", PP="1", VPP="1", CP="1", DP="1",
        MBS="4", GBS="4", zero="0", precision="fp16", attention="unfused", schedule="1f1b",
        recompute=recompute, sp=sequence_parallel,
    )  # fmt: skip
    rows = rows_hardware(loads, HARDWARE)
    found = layer_time(OperatorCosts(loads, rows, HARDWARE), CollectiveCosts(loads, rows, HARDWARE))
    assert found.forward[0] * 1e3 == pytest.approx(forward, rel=0.1)
    assert found.backward[0] * 1e3 == pytest.approx(backward, rel=0.1)


def test_tensor_parallel_ranks_share_a_message_between_stages() -> None:
    """Scatter and gather, arXiv 2104.04473, section 4.1: the NICs carry 1/t of the bytes each."""
    common = {"n_gpus": "256", "CP": "1", "sp": "0"}
    shares = [
        predict_step(rows_of(TP=tp, DP=dp, GBS=str(16 * int(dp)), **common), HARDWARE)
        for tp, dp in (("1", "64"), ("8", "8"))
    ]
    assert shares[1].pipeline_exposed[0] < 0.5 * shares[0].pipeline_exposed[0]


def test_a_wave_that_is_not_full_costs_as_much_as_a_full_one() -> None:
    one = np.array([1024.0])
    full = wave_efficiency(one, np.array([2048.0]), np.array([64.0]))
    assert full[0] == 1.0
    assert wave_efficiency(one, np.array([2064.0]), np.array([64.0]))[0] < 0.7


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"inter_node_GBps_per_gpu": "5"}, {}),
        ({"gpu": "A100"}, {}),
        ({}, {"precision": "fp8"}),
        ({"recompute": "full"}, {}),
        ({"GBS": "256"}, {}),
        ({"layers": "160"}, {}),
        ({"VPP": "1"}, {}),
        ({"TP": "16", "PP": "1", "VPP": "1"}, {"TP": "8", "PP": "2", "VPP": "5"}),
    ],
    ids=["slow network", "older GPU", "8 bits", "recompute", "batch", "depth", "chunks", "cliff"],
)
def test_what_must_be_slower_is_predicted_slower(
    slower: dict[str, str], faster: dict[str, str]
) -> None:
    assert seconds_of(**slower) > seconds_of(**faster)


def test_the_parts_of_a_step_add_up_and_none_is_negative() -> None:
    step = predict_step(rows_of(), HARDWARE)
    parts = (
        step.stages, step.bubble, step.pipeline_exposed, step.data_exposed, step.optimizer,
    )  # fmt: skip
    assert all(part[0] >= 0 for part in parts)
    assert step.total[0] == pytest.approx(sum(part[0] for part in parts))


@pytest.mark.parametrize("zero", ["0", "1", "3"])
def test_more_data_parallel_ranks_need_no_more_memory(zero: str) -> None:
    totals = [
        predict_memory(rows_of(zero=zero, DP=str(size), n_gpus=str(32 * size)), HARDWARE).total[0]
        for size in (2, 4, 8)
    ]
    assert all(after <= before for before, after in itertools.pairwise(totals))


def test_blanks_are_filled_by_what_fits() -> None:
    blank = rows_of(MBS="", VPP="", recompute="")
    assert has_open_choices(blank).all()
    filled = autofill(blank, HARDWARE)
    assert not has_open_choices(filled).any()
    assert fits(filled, HARDWARE).all()
    chosen = predict_step(filled, HARDWARE).total[0]
    assert chosen <= predict_step(rows_of(), HARDWARE).total[0]


def test_a_model_that_no_choice_makes_fit_is_refused() -> None:
    alone = rows_of(TP="1", PP="1", CP="1", DP="64", MBS="", VPP="", recompute="")
    assert not fits(autofill(alone, HARDWARE), HARDWARE).any()


def test_score_reads_the_layout_and_no_measurement(tmp_path: Path) -> None:
    outputs = []
    measurements = ({}, {"ref_step_s": "1", "tokens_per_s_per_gpu": "9", "mem_GB_per_gpu": "2"})
    for number, measured in enumerate(measurements):
        row = {**LLAMA_70B, **measured}
        rows, output = tmp_path / f"rows{number}.csv", tmp_path / f"out{number}.csv"
        with rows.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerow(row)
        assert plan.main(["score", str(rows), "--output", str(output)]) == ExitStatus.DONE
        outputs.append(output.read_text())
    assert outputs[0] == outputs[1]
    [scored] = csv.DictReader(outputs[0].splitlines())
    assert scored["id"] == "a"
    assert float(scored["predicted_step_s"]) == pytest.approx(14.66, rel=0.2)
    assert 20 < float(scored["predicted_mem_GB"]) < 80
    assert float(scored["low_step_s"]) < 14.66 < float(scored["high_step_s"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"gpu": "V100"}, "V100"), ({"precision": "int3"}, "int3"), ({"hidden": "wide"}, "'hidden'")],
)
def test_a_row_that_cannot_be_planned_says_why(changes: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        predict_step(rows_of(**changes), HARDWARE)


def test_rows_without_a_measured_time_are_not_evaluated() -> None:
    with pytest.raises(ConfigError, match="column 'ref_step_s' has ''"):
        measured_rows([LLAMA_70B])


@pytest.mark.parametrize(
    ("changes", "known"),
    [({"gpu": "H100-SXM"}, {}), ({"precision": "FP8-CS"}, {"precision": "fp8"})],
    ids=["GPU", "precision"],
)
def test_a_longer_name_is_that_of_what_is_known(
    changes: dict[str, str], known: dict[str, str]
) -> None:
    assert seconds_of(**changes) == seconds_of(**known)


def test_figures_count_order_and_regret() -> None:
    measured = np.array([1.0, 2.0, 2.01, 4.0])
    predicted = np.array([2.0, 1.0, 1.5, 4.4])
    found = figures(predicted, measured, ["a", "a", "a", "b"], ["g", "g", "g", ""])
    assert found.pairs == 0.0  # the two of 2.0 and 2.01 are not told apart
    assert found.regret == pytest.approx(1.0)
    assert found.macro_median == pytest.approx((0.5 + 0.1) / 2)


def test_steps_that_the_fit_has_not_seen_are_predicted(
    published: list[dict[str, str]], published_2026: list[dict[str, str]]
) -> None:
    """The fold of sources with most experts: tools/plan.py evaluate prints all, in minutes."""
    rows = published + read_rows(FIXTURES / "vtrain_single_node.csv") + published_2026
    measured, folds = measured_rows(rows), source_folds(rows)
    is_held_out = folds == np.bincount(folds[measured.workloads.is_moe]).argmax()
    fitted = fit_predictor(measured.take(~is_held_out), HARDWARE)
    is_moe = measured.workloads.is_moe
    for chosen, median, mean in ((is_held_out & ~is_moe, 0.06, 0.09), (is_moe, 0.1, 0.12)):
        chosen = chosen & is_held_out
        held_out = measured.take(chosen)
        some = [row for row, is_in in zip(rows, chosen, strict=True) if is_in]
        found = figures(
            fitted.seconds(held_out.workloads), held_out.step_s, [family_of(row) for row in some],
            group_names(some), layout_names(some),
        )  # fmt: skip
        assert found.median < median
        assert found.mean < mean
        assert found.pairs > 0.8


def test_the_constants_in_the_package_are_those_of_a_calibration(
    published: list[dict[str, str]],
) -> None:
    measured, predictor = measured_rows(published), load_predictor()
    modelled = predictor.modelled_seconds(measured.workloads) / measured.step_s - 1
    assert np.median(abs(modelled)) < 0.07
    corrected = predictor.seconds(measured.workloads) / measured.step_s - 1
    assert np.median(abs(corrected)) < 0.03
    single = measured_rows(read_rows(FIXTURES / "vtrain_single_node.csv"))
    assert np.median(abs(predictor.modelled_seconds(single.workloads) / single.step_s - 1)) < 0.1


def test_rows_that_contradict_others_of_the_same_description_do_not_count() -> None:
    """Two systems with the same columns: what most rows say holds, and not the mean of all."""
    rows = from_rows([LLAMA_70B] * 8)
    predicted = np.full(8, 10.0)
    measured = np.array([10.0, 10.1, 9.9, 10.0, 10.05, 13.0, 13.1, 13.2])
    learned = fit_correction(rows, HARDWARE, measured, predicted)
    assert learned.factor(rows_of(), HARDWARE)[0] == pytest.approx(1.0, abs=0.02)


def test_nine_of_ten_published_steps_are_in_their_intervals(
    published: list[dict[str, str]], published_2026: list[dict[str, str]]
) -> None:
    measured, predictor = measured_rows(published + published_2026), load_predictor()
    off = predictor.interval(measured.workloads)
    ratio = predictor.seconds(measured.workloads) / measured.step_s
    is_in, is_moe = (ratio < off) & (1 / ratio < off), measured.workloads.is_moe
    assert np.mean(is_in[is_moe]) >= 0.9
    assert np.mean(is_in[~is_moe]) >= 0.9
    # Unlike all measured rows, less is known.
    far = rows_of(hidden="1000000", heads="64", head_dim="15625", layers="4000")
    assert np.log(predictor.interval(far)[0]) > 1.5 * np.log(off[~is_moe].min())


def test_far_from_all_measured_steps_the_model_is_not_corrected() -> None:
    predictor = load_predictor()
    far = rows_of(hidden="1000000", heads="64", head_dim="15625", layers="4000")
    assert predictor.seconds(far)[0] == pytest.approx(predictor.modelled_seconds(far)[0], rel=1e-3)


def test_published_memory_is_predicted_and_what_ran_is_accepted(
    published: list[dict[str, str]],
) -> None:
    accepted, errors = memory_figures(published, load_predictor())
    assert accepted >= 0.95
    assert np.median(errors) < 0.06


# BLOOM's layout benchmarks and SC21, Table 2: did not fit on 80 GB.
RAN_OUT = [
    {"layers": "72", "hidden": "14336", "heads": "64", "vocab": "250880", "n_gpus": "384",
     "TP": "8", "PP": "1", "DP": "48", "MBS": "1", "GBS": "2016", "zero": "1"},
    {"layers": "100", "hidden": "12288", "heads": "64", "vocab": "250880", "n_gpus": "384",
     "TP": "4", "PP": "6", "DP": "16", "MBS": "1", "GBS": "2048", "zero": "1", "precision": "bf16"},
    {"layers": "105", "hidden": "20480", "heads": "128", "vocab": "51200", "n_gpus": "560",
     "TP": "1", "PP": "1", "DP": "560", "MBS": "4", "GBS": "2240", "zero": "3"},
]  # fmt: skip


@pytest.mark.parametrize("row", RAN_OUT, ids=["BLOOM 181B", "BLOOM 184B", "MT 530B"])
def test_what_ran_out_of_memory_is_refused(row: dict[str, str]) -> None:
    common = {
        "seq": "2048", "gpu": "A100", "recompute": "full", "precision": "fp16", "VPP": "1",
    }  # fmt: skip
    assert not fits(from_rows([{**common, **row}]), HARDWARE).any()
