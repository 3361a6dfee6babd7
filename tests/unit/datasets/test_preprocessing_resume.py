"""A run that was killed continues, and ends with the bytes of a run that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing import job
from megatron.core.datasets.preprocessing.job import only_writer
from megatron.core.foundation.errors import DataError
from tests.parity.preprocessing_kills import run_until_through, write_input
from tools import preprocess_data

ROOT = Path(__file__).parents[3]
BYTES = ["--tokenizer-type", "ByteTokenizer", "--workers", "0"]


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    real = job.read_units
    monkeypatch.setattr(job, "read_units", lambda *a, **k: real(*a, **{**k, "unit_bytes": 256}))


def write_documents(path, count, *, faulty=None):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(count)]
    if faulty is not None:
        lines[faulty] = "not JSON"
    path.write_text("\n".join(lines) + "\n")


def run(tmp_path, *flags, prefix="out"):
    command = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / prefix)]
    return preprocess_data.main([*command, *BYTES, "--journal-interval", "0", *flags])


def files(tmp_path):
    return sorted(path.name for path in tmp_path.glob("out*"))


def test_three_kills_of_a_run_with_two_workers_change_nothing(tmp_path):
    write_input(tmp_path / "in.jsonl", 4.0)
    flags = ["--tokenizer-type", "ByteTokenizer"]
    done, problems = run_until_through(tmp_path, str(tmp_path / "in.jsonl"), flags, 3, seed=1)
    assert (done, problems) == (3, [])


def test_a_death_at_any_file_operation_changes_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.unit.datasets.preprocess_and_die", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 30


def test_after_a_faulty_line_the_run_goes_on_without_it(tmp_path, capsys):
    write_documents(tmp_path / "in.jsonl", 100, faulty=60)
    assert run(tmp_path) == 1
    told = capsys.readouterr().err
    assert "in.jsonl, line 61: not JSON" in told
    assert "the work so far is kept" in told
    assert not [name for name in files(tmp_path) if name.endswith((".bin", ".idx"))]
    assert run(tmp_path, "--skip-bad-lines") == 0
    assert "continuing after" in capsys.readouterr().err
    assert len(IndexedDataset(str(tmp_path / "out_text_document"))) == 99
    assert run(tmp_path, "--skip-bad-lines", prefix="whole") == 0
    for end in (".bin", ".idx"):
        resumed = (tmp_path / f"out_text_document{end}").read_bytes()
        assert resumed == (tmp_path / f"whole_text_document{end}").read_bytes()


def test_line_numbers_are_right_after_going_on(tmp_path, capsys):
    write_documents(tmp_path / "in.jsonl", 100, faulty=60)
    for _ in range(2):
        assert run(tmp_path) == 1
        assert "in.jsonl, line 61: not JSON" in capsys.readouterr().err


def test_other_settings_do_not_go_on_with_an_unfinished_run(tmp_path, capsys):
    write_documents(tmp_path / "in.jsonl", 100, faulty=60)
    assert run(tmp_path) == 1
    capsys.readouterr()
    assert run(tmp_path, "--skip-bad-lines", "--append-eod") == 1
    told = capsys.readouterr().err
    assert "an unfinished run with other append_eod: True, it began with False" in told
    assert "--restart" in told
    assert run(tmp_path, "--skip-bad-lines", "--append-eod", "--restart") == 0
    assert IndexedDataset(str(tmp_path / "out_text_document"))[0][-1] == 256


def test_a_file_that_changed_behind_the_run_is_noticed(tmp_path, capsys):
    write_documents(tmp_path / "in.jsonl", 100, faulty=60)
    assert run(tmp_path) == 1
    write_documents(tmp_path / "in.jsonl", 90)
    assert run(tmp_path) == 1
    assert "an unfinished run with other files" in capsys.readouterr().err


def test_a_finished_output_is_left_alone(tmp_path, capsys):
    write_documents(tmp_path / "in.jsonl", 20)
    assert run(tmp_path) == 0
    before = os.stat(tmp_path / "out_text_document.bin").st_mtime_ns
    assert run(tmp_path) == 0
    assert "already complete" in capsys.readouterr().out
    assert os.stat(tmp_path / "out_text_document.bin").st_mtime_ns == before
    assert run(tmp_path, "--append-eod") == 0  # other settings are other work
    assert IndexedDataset(str(tmp_path / "out_text_document"))[0][-1] == 256
    write_documents(tmp_path / "in.jsonl", 21)
    assert run(tmp_path, "--append-eod") == 0
    assert len(IndexedDataset(str(tmp_path / "out_text_document"))) == 21


def test_two_processes_do_not_write_one_output(tmp_path):
    code = (
        "import sys; "
        "from megatron.core.datasets.preprocessing.job import only_writer\n"
        "with only_writer(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    output = str(tmp_path / "out")
    command, pipe = [sys.executable, "-c", code, output], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DataError, match="another process is writing"), only_writer(output):
            pass
        holder.communicate(b"")
    with only_writer(output):
        pass
    assert not files(tmp_path)


def test_a_damaged_note_is_not_believed(tmp_path):
    write_documents(tmp_path / "in.jsonl", 100, faulty=60)
    assert run(tmp_path) == 1
    note = tmp_path / "out.preprocessed.json"
    note.write_bytes(note.read_bytes()[:-20])
    assert run(tmp_path, "--skip-bad-lines") == 0
    assert run(tmp_path, "--skip-bad-lines", prefix="whole") == 0
    whole = (tmp_path / "whole_text_document.bin").read_bytes()
    assert (tmp_path / "out_text_document.bin").read_bytes() == whole


def test_a_lost_unfinished_file_is_named(tmp_path, capsys):
    write_documents(tmp_path / "in.jsonl", 100, faulty=60)
    assert run(tmp_path) == 1
    os.truncate(tmp_path / "out_text_document.bin.unfinished", 10)
    assert run(tmp_path) == 1
    assert "10 bytes, fewer than the" in capsys.readouterr().err
