"""Launches and bytes of a training step are those of the document, and may only fall."""

import subprocess
import sys

from benchmarks.step_ledger import BEGIN, DOCUMENT, END


def test_a_step_launches_and_moves_what_the_document_says_and_no_more_than_before():
    command = [sys.executable, "-m", "benchmarks.step_ledger"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    written = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    assert done.stdout.strip() == written.strip()
