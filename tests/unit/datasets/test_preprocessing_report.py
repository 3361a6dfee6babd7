"""Counts, quantiles, progress lines and the report say what was written."""

import json

import pytest

from megatron.core.datasets.corpus.inspection import statistics
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.stats import CorpusStats, CorpusTally, Progress
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


def test_a_log_hears_of_long_documents_before_there_are_many(capsys):
    progress = Progress(1000, 1000, CorpusStats())
    tally = CorpusStats(corpora={"text": CorpusTally(documents=5, tokens=50, text_bytes=100)})
    progress(tally, 100)
    assert capsys.readouterr().err == ""
    progress._reported -= 11  # seconds
    progress(tally, 100)
    progress(tally, 100)
    assert capsys.readouterr().err.count("Processed 5 documents") == 1
