"""Scores of a tensor-parallel model in the evaluation harness against those of Transformers.

    python -m tests.parity.harness_scores                # needs lm_eval: the extra [eval]

A small random model and a tokenizer are saved; a local task set asks three kinds of questions:
choices, whole texts, and continuations. Prints a table; exits with status 1 if a score differs.
"""

import json
import math
import os
import random
import sys
import tempfile
from pathlib import Path

from megatron.core.foundation.optional_imports import require
from megatron.core.settings.command_line import NoFlags, read_command_line
from tests.parity.started_tool import run_tool

NUM_RANKS = 2
QUESTIONS = 24
RELATIVE = 1e-4
"""Of perplexities: sums of fp32 log-probabilities from logits in another order."""
WORDS = [
    "the", "a", "cat", "dog", "bird", "sees", "hears", "finds", "small", "red", "old", "house",
    "tree", "river", "and", "then", "it", "was",
]  # fmt: skip

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
WRITING = """
task: local_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{written}}}}"
generation_kwargs: {{until: ["river"], do_sample: false, max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""


def make_model(folder: Path) -> None:
    """Save a small Llama and a tokenizer of whole words and letters."""
    transformers = require("transformers", purpose="this comparison")
    tokenizers = require("tokenizers", purpose="this comparison")
    torch = require("torch", purpose="this comparison")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator([sentence(random.Random(n)) for n in range(200)], trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>")
    wrapped.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(wrapped), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def sentence(draw: random.Random, length: int = 12) -> str:
    """Return random words."""
    return " ".join(draw.choices(WORDS, k=length))


def make_tasks(folder: Path, written: list[str]) -> None:
    """Write the questions and the task files.

    Args:
        written: what the model answers to each question, for half of them.
    """
    draw = random.Random(5)
    rows = []
    for number in range(QUESTIONS):
        question = sentence(draw)
        choices = [" " + sentence(draw, draw.randint(1, 5)) for _ in range(4)]
        right = written[number] if number < len(written) and number % 2 else "something else"
        rows.append(
            {
                "question": question,
                "choices": choices,
                "answer": draw.randrange(4),
                "text": sentence(draw, draw.choice([3, 40, 150])),
                "written": right,
            }
        )
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name, text in (("choice", CHOICE), ("text", ROLLING), ("writing", WRITING)):
        (folder / f"local_{name}.yaml").write_text(text.format(data=data))


TASKS = ["local_choice", "local_text", "local_writing"]


def their_scores(model: Path, tasks: Path) -> tuple[dict, list[str]]:
    """Return what the harness finds with its own model, and the texts that it wrote."""
    harness = require("lm_eval", purpose="this comparison")
    models = require("lm_eval.models.huggingface", purpose="this comparison")
    manager = require("lm_eval.tasks", purpose="this comparison").TaskManager(
        include_path=str(tasks)
    )
    found = harness.simple_evaluate(
        model=models.HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=4),
        tasks=TASKS, task_manager=manager, bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    samples = sorted(found["samples"]["local_writing"], key=lambda sample: sample["doc_id"])
    return found["results"], [sample["resps"][0][0] for sample in samples]


def our_scores(model: Path, tasks: Path) -> dict:
    """Return what the tool finds with tensor parallelism."""
    report = tasks / "report.json"
    run_tool(
        "evaluate_harness", NUM_RANKS, "--load-hf", str(model),
        "--tensor-model-parallel-size", str(NUM_RANKS), "--micro-batch-size", "4",
        "--tasks", ",".join(TASKS), "--include-path", str(tasks), "--output", str(report),
    )  # fmt: skip
    return json.loads(report.read_text())["results"]


def main() -> int:
    """Compare and print; return the exit status."""
    read_command_line(NoFlags, description=__doc__)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        model, tasks = Path(folder) / "model", Path(folder) / "tasks"
        model.mkdir()
        tasks.mkdir()
        make_model(model)
        make_tasks(tasks, [])
        _, written = their_scores(model, tasks)
        make_tasks(tasks, written)
        theirs, _ = their_scores(model, tasks)
        ours = our_scores(model, tasks)
    all_equal = True
    for task in TASKS:
        for metric, expected in theirs[task].items():
            if not isinstance(expected, float) or "stderr" in metric:
                continue
            found = ours[task][metric]
            exact = "perplexity" not in metric and "bits" not in metric
            same = found == expected if exact else math.isclose(found, expected, rel_tol=RELATIVE)
            all_equal &= same
            shown = f"Transformers {expected:.6f}, tensor parallel {NUM_RANKS} {found:.6f}"
            print(f"{task:14} {metric:24} {shown}  {'same' if same else 'DIFFERENT'}")
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
