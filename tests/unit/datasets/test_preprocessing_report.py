"""Counts, quantiles, the bar and the report say what was written."""

import io
import json

import numpy as np
import pytest

from megatron.core.datasets.corpus.inspection import statistics
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.stats import CorpusStats, CorpusTally, Progress, duration
from tools import preprocess_data


def run(tmp_path, *flags):
    documents = [{"text": "x" * n} for n in range(1, 200)]
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (tmp_path / "in.jsonl").write_text(lines)
    return preprocess_data.main(
        ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"),
         "--tokenizer-type", "ByteTokenizer", "--workers", "0", *flags]
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_the_report_is_a_page_or_a_picture(tmp_path):
    assert run(tmp_path, "--report", str(tmp_path / "r.html")) == 0
    page = (tmp_path / "r.html").read_text()
    assert "text: 199 documents, 19,900 tokens" in page
    assert "bytes per token            1.000" in page
    assert "<svg" in page
    assert run(tmp_path, "--report", str(tmp_path / "r.png"), "--restart") == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_another_kind_of_report_is_refused_before_any_work(tmp_path, capsys):
    assert run(tmp_path, "--report", "r.pdf") == 2
    assert "--report r.html" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_percentiles_of_the_summary_are_those_that_stats_gives(tmp_path, capsys):
    assert run(tmp_path) == 0
    said = capsys.readouterr().out
    found = statistics(IndexedDataset(str(tmp_path / "out_text_document"))).percentiles
    assert found[50] == 100
    assert f"(50 %: {found[50]}, 90 %: 179, 99 %: {found[99]}; longest 199)" in said


def test_buckets_count_every_document():
    lengths = np.random.RandomState(0).lognormal(6, 1.5, 5000).astype(np.int64) + 1
    tally = CorpusTally()
    for part in np.split(lengths, [10, 10, 3000]):
        tally.add_lengths(part)
    assert sum(tally.buckets) == 5000
    assert (tally.shortest, tally.longest) == (lengths.min(), lengths.max())


def test_a_log_hears_of_long_documents_before_there_are_many():
    stream = io.StringIO()
    progress = Progress(1000, 1000, CorpusStats(), stream=stream)
    tally = CorpusStats(corpora={"text": CorpusTally(documents=5, tokens=50, text_bytes=100)})
    progress(tally, 100)
    assert stream.getvalue() == ""
    progress._said -= 11  # seconds
    progress(tally, 100)
    progress(tally, 100)
    assert stream.getvalue().count("Processed 5 documents") == 1


def test_counts_survive_being_written_as_json():
    tally = CorpusStats(lines=7, corpora={"text": CorpusTally(documents=3, buckets=[0, 2, 1])})
    tally.skipped["not JSON"] += 2
    again = CorpusStats.from_json(json.loads(json.dumps(tally.as_json())))
    assert again == tally
    assert again.num_bad == 2


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_with_rate_and_time_left():
    stream = Terminal()
    progress = Progress(1, 1000, CorpusStats(), stream=stream)
    tally = CorpusStats(corpora={"text": CorpusTally(documents=5, tokens=50, text_bytes=100)})
    progress(tally, 100)
    progress._drawn = 0.0
    tally.skipped["not JSON"] += 1
    progress(tally, 500)
    progress.close()
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("[##########----------] Processed 5 documents (")
    assert stream.getvalue().endswith("\n")
    assert duration(3723.4) == "1:02:03"
