"""Settings that cannot work are refused before anything starts, all together, with a fix."""

import pytest

from megatron.core.datasets.order.index_building import split_boundaries
from megatron.core.foundation.errors import ConfigError
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import RunConfig, flags_by_spelling
from megatron.training.rules import notes, resolve_and_check
from megatron.training.rules.registry import combinations, settings_agree


def words_of(text: str) -> list[str]:
    """Split a command line."""
    return text.split()


SMALL = words_of(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size "
    "2 --lr 1e-3 --train-iters 10 --mock-data"
)


def problems(*words: str, world_size: int = 1, base=SMALL) -> list[str]:
    try:
        resolve_and_check(lambda: parse_command_line([*base, *words]), lambda config: world_size)
    except ConfigError as error:
        return [problem.describe() for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("words", "world_size", "expected"),
    [
        ("--context-parallel-size 3", 3, "--seq-length 32 cannot be split over context"),
        ("--context-parallel-size 2 --fp4-format e2m1", 2, "--fp4-format with --seq-length"),
        (
            "--layout-invariant-mode --context-parallel-size 4",
            4,
            "use --layout-invariant-sequence-units 8",
        ),
        (
            "--layout-invariant-mode --context-parallel-size 4 "
            "--layout-invariant-sequence-units 20",
            4,
            "use --layout-invariant-sequence-units 32",
        ),
        (
            "--layout-invariant-mode --layout-invariant-sequence-units 6",
            1,
            "--seq-length 32 with --layout-invariant-sequence-units 6",
        ),
        ("--layout-invariant-mode --layout-invariant-sequence-units 3", 1, "are a pair"),
        (
            "--layout-invariant-mode --num-experts 4 --seq-length 30"
            " --tensor-model-parallel-size 4",
            4,
            "--seq-length 30 with --tensor-model-parallel-size 4",
        ),
        (
            "--layout-invariant-mode --experimental-attention-variant gated_delta_net"
            " --layout-invariant-sequence-units 4",
            1,
            "--layout-invariant-mode with layers of gated_delta_net",
        ),
        (
            "--layout-invariant-mode --experimental-attention-variant kda"
            " --linear-num-key-heads 4 --linear-num-value-heads 4",
            1,
            "--layout-invariant-mode with layers of kda",
        ),
        (
            "--layout-invariant-mode --experimental-attention-variant dsv4_hybrid"
            " --csa-compress-ratios [0]*4 --multi-latent-attention --qk-head-dim 28 --v-head-dim 32"
            " --q-lora-rank 32 --dsa-indexer-head-dim 8 --dsa-indexer-n-heads 4"
            " --qk-pos-emb-head-dim 4 --kv-lora-rank 32 --o-groups 4 --window-size 7,0"
            " --position-embedding-type rope --qk-layernorm",
            1,
            "--layout-invariant-mode with layers of dsv4_hybrid",
        ),
        ("--context-parallel-size 2 --cp-comm-type ring", 2, "type 'ring' is unknown"),
        (
            "--context-parallel-size 2 --cp-comm-type p2p a2a",
            2,
            "2 communication types for 4 layers",
        ),
        (
            "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 7",
            4,
            "--seq-length 32 with --hybrid-context-parallel on 4",
        ),
        (
            "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 8",
            4,
            "--hybrid-context-parallel with --hidden-dropout 0.1",
        ),
        ("--context-parallel-size 8 --cp-comm-type a2a", 8, "4 query heads of a tensor"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p", 4, "without the sizes"),
        (
            "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 4",
            4,
            "sizes [2, 4] for context-parallel size 4",
        ),
        (
            "--context-parallel-size 4 --tensor-model-parallel-size 4 --sequence-parallel"
            " --seq-length 40",
            16,
            "--seq-length 40 cannot be split over tensor-parallel size 4 and context-parallel",
        ),
        (
            "--pipeline-schedule zb-v --pipeline-model-parallel-size 2"
            " --num-virtual-stages-per-pipeline-rank 2",
            2,
            "--pipeline-schedule zb-v with virtual stages",
        ),
        (
            "--pipeline-schedule dualpipe-v --pipeline-model-parallel-size 2 --global-batch-size 6",
            2,
            "3 micro batches per step for dualpipe-v on 2 pipeline ranks",
        ),
        ("--pipeline-step-durations 1 0 1", 1, "--pipeline-step-durations 1 0 1"),
        ("--data-path 0.7 /no/a /no/b", 1, "give a weight for every corpus"),
        (
            "--tokenizer-type TikTokenizer --tokenizer-model /no/file",
            1,
            "--tokenizer-model /no/file: no such file",
        ),
        (
            "--multi-latent-attention --position-embedding-type rope --qk-pos-emb-head-dim 5",
            1,
            "qk_pos_emb_head_dim=5",
        ),
        ("--global-batch-size 7", 1, "--global-batch-size 7 cannot be split"),
        ("--eval-global-batch-size 3", 1, "--eval-global-batch-size 3 cannot be split"),
        ("--tensor-model-parallel-size 3", 3, "num_attention_heads=4 cannot be split"),
        ("--pipeline-model-parallel-size 3", 3, "4 layers cannot be split over 3"),
        ("--tensor-model-parallel-size 2", 3, "3 ranks cannot be arranged as tp=2"),
        ("--lr-warmup-samples 10", 1, "--lr-warmup-samples in a run with --train-iters"),
        ("--lr-warmup-iters 10", 1, "warm-up (20 samples) is not shorter"),
        ("--lr-warmup-fraction 1.5", 1, "--lr-warmup-fraction 1.5"),
        ("--min-lr 1", 1, "--lr 0.001 with --min-lr 1"),
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 3",
            4,
            "--num-distributed-optimizer-instances 3 for 4 replicas",
        ),
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 2 "
            "--num-experts 4 --expert-model-parallel-size 4",
            4,
            "--num-distributed-optimizer-instances 2 for 1 replica(s) of the experts",
        ),
        ("--param-offload-path /no/where", 2, "mkdir -p /no/where"),
        ("--bf16 --fp16", 1, "fp16 and bf16 are both on"),
        ("--fp16 --loss-scale -8", 1, "a number in (0, inf)"),
        (
            "--fp16 --initial-loss-scale 8 --min-loss-scale 16",
            1,
            "at least the minimum, which is positive",
        ),
        ("--fp16 --hysteresis 0", 1, "--hysteresis 0"),
        ("--optimizer lion --lion-beta2 1", 1, "--lion-beta2 1"),
        ("--optimizer muon --muon-num-ns-steps 0", 1, "--muon-num-ns-steps 0"),
        ("--optimizer muon --optimizer-cpu-offload", 1, "only the state of elementwise optimizers"),
        ("--optimizer-offload-path /no/where", 1, "mkdir -p /no/where"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 2", 1, "a number in [0, 1]"),
        ("--grad-compression powersgd --powersgd-rank 0", 1, "--powersgd-rank 0"),
        ("--param-rules *.bias:lr_mul=2", 1, "'lr_mul'"),
        ("--param-rules lr_mult=2", 1, "no pattern"),
        ("--param-rules *.bias:lr_mult=2,wd_mult=x", 1, "'wd_mult'"),
        ("--param-rules *.bias:optimizer=lamb", 1, "'lamb'"),
        ("--data-path x", 1, "--mock-data is given together with --data-path"),
        ("--swiglu --squared-relu", 1, "both on"),
        ("--split a,b", 1, "--split 'a,b'"),
        ("--num-virtual-stages-per-pipeline-rank 2", 1, "--pipeline-model-parallel-size 1"),
        ("--rampup-batch-size 3 2 9", 1, "--rampup-batch-size 3 2 9"),
        ("--hidden-dropout 1.0", 1, "hidden_dropout=1.0"),
        ("--log-interval 0", 1, "--log-interval 0"),
        ("--profile --profile-step-start 5 --profile-step-end 5", 1, "0 < start"),
        ("--position-embedding-type rope --kv-channels 3", 1, "rotates 3 channels"),
        ("--tokenizer-type TikTokenizer", 1, "without --tokenizer-model"),
        ("--start-weight-decay 0.5", 1, "with a constant weight decay"),
        ("--recompute-granularity full", 1, "it needs a method"),
        ("--adam-beta1 1", 1, "--adam-beta1 1"),
        ("--data-path s3://a/b", 1, "--object-storage-cache-path"),
        ("--phase-transition-iterations 5,3", 1, "ascending numbers of steps"),
        ("--phase-transition-iterations soon", 1, "ascending numbers of steps"),
    ],
)
def test_a_broken_rule_is_told(words, world_size, expected):
    assert any(expected in text for text in problems(*words.split(), world_size=world_size))


@pytest.mark.parametrize("split", ["'99,1,0'", '"99,1,0"', "[98, 1, 1]", "969/30/1", " 1 "])
def test_quotes_that_reach_the_program_are_no_part_of_a_split(split):
    assert problems("--split", split) == []
    assert split_boundaries(split)[0][0] == 0


def test_the_small_run_breaks_no_rule():
    assert problems() == []
    assert problems("--tensor-model-parallel-size", "2", "--sequence-parallel", world_size=4) == []


def value_for(condition, *, holds=True):
    """Return a value of the setting with which the condition holds, or does not."""
    spec, relation = condition.spec, condition.relation
    if relation in (">", "%"):
        operand = condition.operands[0]
        return 3 if operand.startswith("--") else int(operand) + 1
    if relation == "=" and holds:
        return [condition.operands[0]] if spec.metadata.nargs else condition.operands[0]
    if relation == "!=" and not holds:
        text = condition.operands[0]
        return None if text == "None" else spec.convert(text)
    if not relation and condition.is_negated == holds:
        return spec.default
    if spec.is_switch:
        return not spec.default
    other = [*spec.choices] or [{int: 2, float: 0.5, str: "x"}[spec.element]]
    wanted = (v for v in other if v != spec.default and str(v) not in condition.operands)
    value = next(wanted, spec.default)
    return [value] if spec.metadata.nargs else value


@pytest.mark.parametrize(
    "row", combinations(), ids=lambda row: f"{row[0].spec.flag} {row[1].spec.flag}"
)
def test_a_combination_of_the_table_is_found_and_is_not_without_one_of_its_conditions(row):
    first, second, rule, fix, provided = row
    conditions = (first, second, *provided)
    operands = [o for c in conditions for o in c.operands if c.relation in (">", "%")]
    values = {flags_by_spelling()[o].name: 2 for o in operands if o.startswith("--")}
    values |= {c.spec.name: value_for(c) for c in reversed(conditions)}

    def is_found(**changed):
        settings = values | changed
        run = ResolvedRun(config=RunConfig.from_values(settings)).overlaid(settings)
        texts = tuple(text.format_map(run.values) for text in (rule, fix))
        return texts in [(p.rule, p.fix) for p in settings_agree(run)]

    assert is_found()
    for each in conditions:
        if each.relation not in (">", "%") and not any(o.startswith("--") for o in each.operands):
            changed = {each.spec.name: value_for(each, holds=False)}
            assert not is_found(**changed), changed


def test_heads_layers_and_batch_are_told_in_one_message():
    base = words_of("--seq-length 32 --micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data")
    found = problems(
        *words_of("--num-layers 5 --hidden-size 66 --num-attention-heads 3 --global-batch-size 7"),
        *["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
        world_size=4,
        base=base,
    )
    for expected in ("num_attention_heads=3", "5 layers", "--global-batch-size 7"):
        assert any(expected in text for text in found), (expected, found)


def test_what_is_loaded_is_looked_at_before_anything_is_built(tmp_path):
    file, absent, save = tmp_path / "weights.pt", str(tmp_path / "absent"), str(tmp_path)
    file.write_bytes(b"x")
    for words, expected in (
        (["--load", str(file)], "weights.pt is a file, not a directory"),
        (["--load", str(tmp_path)], "it contains weights.pt and no checkpoint"),
        (["--load", absent, "--exit-on-missing-checkpoint"], "absent contains no checkpoint"),
        (["--load", absent, "--pretrained-checkpoint", absent], "absent contains no checkpoint"),
        (["--load", absent, "--ckpt-step", "7"], "no checkpoint of iteration 7"),
        (["--load", save, "--save", save], "it contains weights.pt and no checkpoint"),
    ):
        (found,) = problems(*words)
        assert expected in found, words
    assert problems("--load", absent) == []
    url = "memory://what_is_loaded"
    assert problems("--load", url) == []
    (found,) = problems("--load", url, "--ckpt-step", "7")
    assert f"{url} has no checkpoint of iteration 7" in found
    file.rename(tmp_path / "events.out")
    assert problems("--load", save, "--save", save) == []


@pytest.mark.parametrize(("words", "is_told"), [([], True), (["--mock-data"], False)])
def test_a_command_line_with_problems_and_no_corpus_is_told_that_its_samples_are_synthetic(
    words, is_told
):
    with pytest.raises(ConfigError) as caught:
        resolve_and_check(lambda: parse_command_line(words), lambda config: 1)
    assert ("No corpus is named, so the run trains on synthetic" in str(caught.value)) is is_told


def test_every_problem_names_a_flag_and_a_fix():
    words = ["--perform-rl-step", "--mock-data", "--clip-grad", "-1"]
    with pytest.raises(ConfigError) as caught:
        resolve_and_check(lambda: parse_command_line(words), lambda config: 1)
    assert len(caught.value.problems) >= 9
    for problem in caught.value.problems:
        assert problem.flags
        assert problem.fix


def test_missing_data_names_the_files_and_what_is_near(tmp_path):
    (tmp_path / "corpus.idx").touch()
    (tmp_path / "corpus.bin").touch()
    base = SMALL[:-1]
    found = problems("--data-path", str(tmp_path / "corpsu"), "--vocab-size", "9", base=base)
    assert "corpsu.idx and" in found[0]
    assert f"there is {tmp_path}/corpus" in found[0]
    found = problems("--data-path", str(tmp_path / "corpus.bin"), "--vocab-size", "9", base=base)
    assert "leave out the suffix" in found[0]
    weighted = ["--data-path", "0.5", str(tmp_path / "corpus"), "0.5", "/nowhere/x"]
    assert "/nowhere/x.idx" in problems(*weighted, "--vocab-size", "9", base=base)[0]


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--optimizer", "soap"], "--optimizer muon"),
        (["--megatron-fsdp-grad-comm-dtype", "fp16"], "use bf16"),
        (["--perform-rl-step"], "megatron.core"),
        (["--tokenizer-type", "MultimodalTokenizer"], "HuggingFaceTokenizer"),
    ],
)
def test_a_mechanism_that_does_not_exist_is_refused_with_the_nearest(words, instead):
    found = problems(*words, world_size=2)
    assert any("is not supported yet" in text and instead in text for text in found)


def test_flags_that_change_no_result_are_accepted_with_a_note():
    words = [
        "--use-mcore-models", "--use-flash-attn", "--tp-comm-overlap", "--local-rank", "0",
        "--moe-router-topk", "4", "--ckpt-format", "torch", "--no-persist-layer-norm",
        "--cuda-graph-impl", "local",
        "--moe-token-dispatcher-type", "flex", "--empty-unused-memory-level", "1",
        "--inference-max-seq-length", "4096", "--mamba-num-heads", "4",
    ]  # fmt: skip
    assert problems(*words) == []
    lines = notes(parse_command_line(words).config)
    assert len(lines) == 12
    assert "--moe-router-topk 4: has no effect without --num-experts." in lines


@pytest.mark.parametrize(
    ("without", "owners", "words"),
    [
        ("--linear-key-head-dim 8", "--experimental-attention-variant or --hybrid-layer-pattern",
         ["--hybrid-layer-pattern G-", "--experimental-attention-variant kda"]),
        ("--dsa-indexer-topk 8", "--experimental-attention-variant or --hybrid-layer-pattern",
         ["--hybrid-layer-pattern D-", "--experimental-attention-variant dsa"]),
        ("--min-offloaded-tensor-size 8",
         "--fine-grained-activation-offloading or --cpu-offloading-num-layers",
         ["--fine-grained-activation-offloading", "--cpu-offloading-num-layers 2"]),
    ],
)  # fmt: skip
def test_a_flag_of_two_mechanisms_acts_with_either(without, owners, words):
    def told(line):
        return [note for note in notes(parse_command_line(words_of(line)).config) if owners in note]

    assert told(without) == [f"{without}: has no effect without {owners}."]
    assert [told(f"{without} {each}") for each in words] == [[], []]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hybrid-layer-pattern", "M-/*E/"], "has no layer after /"),
        (["--hybrid-layer-pattern", "M-/*|E"], "has |"),
        (["--hybrid-layer-pattern", "|/-"], "has no layer."),
        (["--hybrid-layer-pattern", "M-/-/*", "--mtp-num-layers", "1"], "mtp_num_layers=1"),
        (["--hybrid-layer-pattern", "M-/-/*", "--mtp-use-repeated-layer"], "layer=True"),
    ],
)
def test_letters_that_are_no_layers_are_named_and_not_the_number_of_layers(words, said):
    sizes = "--hidden-size 32 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1"
    argv = [*sizes.split(), "--mock-data", "--train-iters", "1", "--lr", "1e-3", *words]
    with pytest.raises(ConfigError) as caught:
        resolve_and_check(lambda: parse_command_line(argv), lambda config: 1)
    assert said in str(caught.value) and "--num-layers is not given" not in str(caught.value)
