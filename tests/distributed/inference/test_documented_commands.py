"""The commands that use a model of Hugging Face, as docs and examples have them."""

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.request

import pytest

from examples.fine_tuning import make_inputs
from megatron.core.settings.command_line import flags_provider
from megatron.inference.session import defaults_beside
from megatron.resilience.status import RunStatus
from megatron.training.cli.parser import parse_command_line
from megatron.training.setup.initialize import read_settings
from tests.harness.machine import ONE_MACHINE
from tests.harness.pool import REPOSITORY
from tests.harness.started import environment
from tools.evaluate_harness import HarnessFlags
from tools.evaluate_perplexity import PerplexityFlags
from tools.generate import GenerateFlags
from tools.run_text_generation_server import ServerFlags

TOOLS = {
    "evaluate_harness": HarnessFlags,
    "evaluate_perplexity": PerplexityFlags,
    "generate": GenerateFlags,
    "run_text_generation_server": ServerFlags,
}
QUESTION = {"role": "user", "content": "What is the capital of Peru?"}


def documented_commands() -> dict[str, list[str]]:
    """Return the words of every command of these tools in docs and examples, by its place."""
    found = {}
    for document in ("docs/generation.md", "examples/fine_tuning/README.md"):
        for block in re.findall(
            r"```bash\n(.*?)```", (REPOSITORY / document).read_text(), re.DOTALL
        ):
            for line in block.replace("\\\n", " ").splitlines():
                if (tool := re.search(r"tools/(\w+)\.py (?!--help)", line)) and tool[1] in TOOLS:
                    found[f"{document}: {tool[1]}"] = shlex.split(line)
    return found


COMMANDS = documented_commands()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model with a tokenizer, and a text: what stands for DIRECTORY and the other names."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs.main(folder)
    config = json.loads((folder / "base/config.json").read_text())
    (folder / "base/config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 2048})
    )
    (folder / "held-out.txt").write_text("It is Lima. " * 20)
    return folder


def with_inputs(words, folder):
    given = {
        "DIRECTORY": str(folder / "base"),
        "tuning/tuned": str(folder / "base"),
        "held-out.txt": str(folder / "held-out.txt"),
        "5000": "0",
    }
    return [given.get(word, word) for word in words]


def start(words, folder):
    words = with_inputs(words, folder)
    launcher = ["-m", "torch.distributed.run", *ONE_MACHINE] if words[0] == "torchrun" else []
    return subprocess.Popen(
        [sys.executable, *launcher, *words[1:]], cwd=REPOSITORY, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def printed_by(words, folder):
    with start(words, folder) as process:
        try:
            printed, _ = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, printed[-4000:]
    return printed


def test_each_tool_is_documented():
    assert {place.split(": ")[1] for place in COMMANDS} == set(TOOLS)


@pytest.mark.parametrize("place", COMMANDS)
def test_nothing_is_missing_in_a_documented_command(place, inputs):
    words = with_inputs(COMMANDS[place], inputs)
    count = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    flags = words[next(at for at, word in enumerate(words) if word.startswith("tools/")) + 1 :]

    def read():
        provider = flags_provider(TOOLS[place.split(": ")[1]])
        return parse_command_line(
            flags, extra_args_provider=provider, args_defaults=defaults_beside(flags)
        )

    run = read_settings(read, count, RunStatus())
    assert run.model.seq_length == run.model.max_position_embeddings == 2048


def test_the_documented_generation_continues_a_prompt(inputs):
    printed = printed_by(COMMANDS["docs/generation.md: generate"], inputs)
    assert "To be, or not to be" in printed
    # What is said of the start is about the model, not about a training run.
    assert "padded_vocab_size = " in printed
    for of_training in ("lr_decay", "split = ", "train_", "global_batch_size", "sharding"):
        assert of_training not in printed


def test_the_documented_perplexity_is_that_of_a_text(inputs):
    words = COMMANDS["docs/generation.md: evaluate_perplexity"]
    report = json.loads(printed_by(words, inputs).splitlines()[-1])
    assert 0 < report["bits_per_byte"] < 16


def test_a_tuned_model_answers_from_the_documented_server(inputs):
    words = COMMANDS["examples/fine_tuning/README.md: run_text_generation_server"]
    with start([*words, "--port", "0"], inputs) as server:
        try:
            printed = ""
            while (address := re.search(r"at (http://\S+)", printed)) is None:
                line = server.stdout.readline()
                assert line, printed[-4000:]
                printed += line
            body = {"model": "model", "messages": [QUESTION], "max_tokens": 4}
            request = urllib.request.Request(
                f"{address[1]}/v1/chat/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=60) as answer:
                choices = json.load(answer)["choices"]
            assert choices[0]["message"]["role"] == "assistant"
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()
