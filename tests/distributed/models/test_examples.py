"""The examples run as their first line says, on two processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pool import REPOSITORY
from tests.harness.started import environment, run_python, torchrun


def run_on_two_ranks(script: str, *arguments: str) -> str:
    """Run an example under torchrun on the CPU and return what it printed."""
    return run_python(*torchrun(2), script, *arguments)


@pytest.mark.distributed
def test_the_simple_loop_trains_over_a_pipeline_and_its_checkpoint_loads_to_the_same_loss():
    printed = run_on_two_ranks(
        "examples/run_simple_mcore_train_loop.py", "--pipeline", "2", "--steps", "3"
    )
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    trained, loaded = (re.search(rf"{n}: loss ([\d.]+)", printed)[1] for n in ("trained", "loaded"))
    assert trained == loaded


@pytest.mark.distributed
def test_the_custom_model_learns_and_so_do_its_own_parameters():
    printed = run_on_two_ranks("examples/custom_model/train.py")
    rows = re.findall(r"step (\d+): loss ([\d.]+), slopes ([\d.]+) \.\.\. ([\d.]+)", printed)
    assert [int(step) for step, *_ in rows] == [20, 40, 60]
    _, loss, lowest, highest = rows[-1]
    assert float(loss) < 3.5
    assert float(lowest) < 0.99
    assert float(highest) > 1.01


@pytest.mark.distributed
def test_the_model_that_reads_images_is_trained_and_asked(tmp_path):
    variables = {
        "PYTHON": sys.executable,
        "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
        "WORK": str(tmp_path),
        "COUNT": "40",
        "ITERS": "3",
    }
    done = subprocess.run(
        [str(REPOSITORY / "examples/vision_language/run.sh")],
        env=environment(**variables), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d of 8 answers are right", done.stdout), done.stdout


def test_the_custom_model_stays_under_sixty_lines():
    folder = REPOSITORY / "examples" / "custom_model"
    lines = [line for file in folder.glob("*.py") for line in file.read_text().splitlines()]
    assert sum(1 for line in lines if line.strip()) < 60


@pytest.mark.distributed
def test_a_policy_learns_from_a_rule_and_from_preferences():
    folder = "examples/reinforcement_learning"
    printed = run_on_two_ranks(f"{folder}/train_grpo.py", "--train-iters", "15")
    rewards = [float(x) for x in re.findall(r"step \d+: reward ([\d.]+)", printed)]
    assert rewards[0] < 0.1 < 0.25 < rewards[-1]
    assert "21 tensors for a generator elsewhere, from model.embed_tokens.weight" in printed

    printed = run_on_two_ranks(f"{folder}/train_dpo.py", "--pipeline-model-parallel-size", "2")
    losses = [float(x) for x in re.findall(r"step \d+: dpo loss ([\d.]+)", printed)]
    assert losses[-1] < 0.3 < losses[0] < 0.69
    assert "loaded again: the same log-probabilities: True" in printed
