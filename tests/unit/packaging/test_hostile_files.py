"""Every reader of a file that may come from a stranger refuses it, in bounded time and memory."""

import json
import os
import subprocess
import sys

from tests.harness.pool import REPOSITORY

MIB = 1 << 20


def test_no_small_file_costs_its_reader_much_time_or_memory(tmp_path):
    script = REPOSITORY / "tests" / "unit" / "packaging" / "hostile_files.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 100
    assert max(size for _, size, _ in rows) < MIB
    wrong = [
        row for row in rows if not row[2].startswith("refused") or int(row[2].split()[1]) > 4000
    ]
    assert wrong == []
