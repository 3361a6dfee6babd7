"""The script in examples/deepspeed trains, and continues from its checkpoint on one process."""

import io
import re
import runpy
import sys
import warnings
from contextlib import redirect_stdout

from megatron_lattice import deepspeed
from tests.harness.distributed import run_distributed
from tests.harness.pool import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "deepspeed"


def run(groups, *words):
    """Run the script as torchrun would; the processes live on."""
    sys.argv = ["train.py", "--deepspeed", "--deepspeed_config", str(EXAMPLE / "ds_config.json")]
    sys.argv += words
    destroy, deepspeed.comm.destroy_process_group = (
        deepspeed.comm.destroy_process_group,
        lambda: None,
    )
    try:
        with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no checkpoint yet
            runpy.run_path(str(EXAMPLE / "train.py"), run_name="__main__")
    finally:
        deepspeed.comm.destroy_process_group = destroy
    return out.getvalue()


def test_example_learns_and_resumes(tmp_path):
    first, _ = run_distributed(run, 2, "--save", str(tmp_path))
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", first)]
    assert len(losses) == 2 and losses[1] < 0.5 * losses[0]
    (second,) = run_distributed(run, 1, "--save", str(tmp_path), "--epochs", "1")
    (resumed,) = re.findall(r"loss ([\d.]+) after (\d+) steps", second)
    assert float(resumed[0]) < losses[1] and int(resumed[1]) == 48
