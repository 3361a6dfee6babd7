"""The example of fine-tuning, command by command: the tuned model gives the answers it was told."""

import re
import shlex

import torch
import transformers

from examples.fine_tuning import make_inputs
from tests.harness.distributed import run_distributed
from tests.harness.pool import REPOSITORY
from tests.parity.training_run import read_metrics, train_with_flags
from tools import preprocess_data


def commands(folder):
    """Return the words of each command of the example's README, in `folder`."""
    text = (REPOSITORY / "examples/fine_tuning/README.md").read_text()
    block, *_ = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = block.replace("\\\n", " ").replace("tuning/", f"{folder}/").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def test_a_model_learns_the_answers_of_its_conversations(tmp_path):
    _, prepare, train = commands(tmp_path)
    make_inputs.main(tmp_path)
    assert preprocess_data.main(prepare[2:]) == 0
    words = train[train.index("pretrain_gpt.py") + 1 :]
    run_distributed(train_with_flags, 2, words, timeout_s=240.0, tp=2)
    losses = [line["lm loss"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[-1] < 0.1 * losses[0]

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    for talk in make_inputs.conversations():
        ids = tokenizer.apply_chat_template(
            talk[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == talk[1]["content"]
