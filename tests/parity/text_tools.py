"""The tools of generation and perplexity as they are started: one rank, four, and Transformers.

    python -m tests.parity.text_tools

A small random model of Transformers is used from its directory. Prints a line a comparison; exits
with status 1 if texts or scores differ.
"""

import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron.core.foundation.optional_imports import require
from megatron.core.settings.command_line import NoFlags, read_command_line
from tests.parity.harness_scores import make_model, sentence
from tests.parity.started_tool import run_tool

RELATIVE = 1e-5
"""Of a mean of fp32 losses: sums in another order."""
LAYOUTS = {
    "one rank": (1, ()),
    "tensor 2 x pipeline 2": (
        4, ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    ),
}  # fmt: skip
PROMPTS = ["the cat sees", "a small red house and then", "river"]


def run(tool: str, num_ranks: int, *flags: str) -> list[Any]:
    """Run a tool; return the JSON objects that it printed."""
    printed = run_tool(tool, num_ranks, *flags)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def their_texts_and_loss(folder: Path, text: str) -> tuple[list[str], float]:
    """Return what Transformers writes behind the prompts, and its mean loss in windows of 33."""
    transformers = require("transformers", purpose="this comparison")
    torch = require("torch", purpose="this comparison")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            written = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
            new = written[0, ids.shape[1] :]
            texts.append(tokenizer.decode(new[new != 0]))
        ids = tokenizer(text, return_tensors="pt").input_ids[0]
        total = 0.0
        for begin in range(0, len(ids) - 1, 32):
            window = ids[begin : begin + 33].unsqueeze(0)
            logs = model(window[:, :-1]).logits[0].log_softmax(-1)
            total -= float(logs.gather(1, window[0, 1:, None]).double().sum())
    return texts, total / (len(ids) - 1)


def main() -> int:
    """Compare and print; return the exit status."""
    read_command_line(NoFlags, description=__doc__)
    all_equal = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        text = " ".join(sentence(random.Random(n)) for n in range(30))
        (folder / "text.txt").write_text(text)
        texts, loss = their_texts_and_loss(folder, text)
        prompts = [flag for prompt in PROMPTS for flag in ("--prompt", prompt)]
        for layout, (num_ranks, flags) in LAYOUTS.items():
            shared = ("--load-hf", name, *flags)
            written = run(
                "generate", num_ranks, *shared, *prompts, "--max-new-tokens", "12", "--json",
                "--log-probs", "2",
            )  # fmt: skip
            same = [one["text"] for one in written] == texts
            best = [one["top_log_probs"][0] for one in written]
            same &= all(len(one) == 2 for one in best)
            print(f"generate, {layout}: {'the texts of Transformers' if same else 'DIFFERENT'}")
            report = run(
                "evaluate_perplexity", num_ranks, *shared, "--text", str(folder / "text.txt"),
                "--window", "33", "--micro-batch-size", "2",
            )[-1]  # fmt: skip
            close = math.isclose(report["loss"], loss, rel_tol=RELATIVE)
            print(
                f"perplexity, {layout}: loss {report['loss']:.7f}, Transformers {loss:.7f}"
                f"{'' if close else '  DIFFERENT'}"
            )
            all_equal &= same and close
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
