"""What README and docs say of GPUs is what the files of results show."""

import json

import pytest

from benchmarks.gpu import evidence
from megatron.core.foundation.errors import DataError

CARD = "NVIDIA H100 80GB HBM3"


def stage(name="B", card=CARD, commit="0123456789abcdef", **changed):
    checks = {
        "A": [
            {"check": "machine", "status": 0, "seconds": 3.0, "rows": [], "errors": []},
            {"check": "tests", "status": "time out", "seconds": 9.0, "rows": [], "errors": ["x"]},
            {"check": "paths", "status": 1, "seconds": 9.0, "errors": [], "rows": [
                {"case": "experts", "dtype": "bf16", "ok": True},
                {"case": "graphs", "dtype": "fp32", "ok": False},
            ]},
            {"check": "numerics", "status": "no time", "seconds": 0.0, "rows": [], "errors": []},
        ],
        "B": [
            {"check": "ours", "status": 0, "seconds": 30.0, "errors": [], "rows": [
                {"step": "ours", "ms": 1757.5, "tokens/s": 37289, "MFU %": 54.4,
                 "predicted MFU %": [51.8, 60.7]},
            ]},
            {"check": "megatron-core", "status": 1, "seconds": 30.0, "errors": [], "rows": [
                {"step": "megatron-core", "ms": 1.25, "MFU %": 99.0},
            ]},
        ],
    }  # fmt: skip
    gpus = [{"name": card}] if card else []
    return {"stage": name, "rehearsal": False, "began": "2026-12-01T10:00:00+00:00",
            "commit": commit, "gpus": gpus, "torch": "2.11.0+cu130",
            "checks": checks[name]} | changed  # fmt: skip


def joined(tmp_path, *stages):
    for place, each in enumerate(stages):
        folder = tmp_path / f"session{place}"
        folder.mkdir()
        (folder / f"{each['stage']}.json").write_text(json.dumps(each))
    return evidence.join(tmp_path, tmp_path / "results")


def texts(tmp_path):
    found = evidence.results(tmp_path / "results")
    return {page: evidence.block(found, lines) for page, lines in evidence.PAGES.items()}


@pytest.mark.parametrize("page", evidence.PAGES)
def test_a_page_has_what_the_files_show(page):
    text = (evidence.ROOT / page).read_text()
    assert text == evidence.renewed(text, evidence.results(), evidence.PAGES[page])


def test_without_a_file_nothing_has_run(tmp_path):
    for text in texts(tmp_path).values():
        assert text == evidence.NOTHING


def test_checks_and_paths_that_passed_have_run_on_that_card_at_that_commit(tmp_path):
    (path,) = joined(tmp_path, stage("A"), stage("B"))
    assert path.name == "2026-12-01-nvidia-h100-80gb-hbm3-0123456789.json"
    found = texts(tmp_path)
    counts = "2 of 5 checks, 1 of 2 paths, 0 of 0 layouts passed"
    assert f"**{CARD}**, 2026-12-01: {counts}" in found["README.md"]
    for text in found.values():
        assert evidence.NOTHING not in text
        assert "| ours | 1,758 | 37289 |  | 54.4 | 51.8 to 60.7 |  |  |" in text
        assert "99.0" not in text
    text = found["docs/gpu.md"]
    begin = f"**{CARD}**, 2026-12-01 (torch 2.11.0+cu130); newest results of `0123456789`:"
    assert begin in text
    assert "- passed: A machine; B ours\n" in text
    assert "- paths that ran: experts (bf16)\n" in text


def test_what_failed_is_not_called_run(tmp_path):
    joined(tmp_path, stage("A"), stage("B"))
    text = texts(tmp_path)["docs/gpu.md"]
    assert "- failed: A tests (time out); A paths (1); B megatron-core (1)\n" in text
    assert "- did not run: A numerics\n" in text
    assert "- paths that failed: graphs (fp32)\n" in text
    assert "99" not in text


def test_a_page_has_the_newest_row_of_each_case(tmp_path):
    later = {"began": "2026-12-01T11:00:00+00:00", "commit": "f" * 16}
    mended = [{"case": "graphs", "dtype": "fp32", "ok": True}]
    checks = [
        {"check": "paths", "status": 0, "seconds": 9.0, "errors": [], "rows": mended},
        {"check": "machine", "status": "no time", "seconds": 0.0, "errors": [], "rows": []},
    ]
    joined(tmp_path, stage("A"), stage("A", checks=checks, **later))
    text = texts(tmp_path)["docs/gpu.md"]
    assert "newest results of `0123456789`, `ffffffffff`:" in text
    assert "- passed: A machine; A paths\n" in text
    assert "- paths that ran: experts (bf16); graphs (fp32)" in text
    assert "paths that failed" not in text


def test_estimates_of_memory_are_in_the_rows_of_their_variants_and_of_our_step():
    rows = [{"variant": "base", "ms": 1.0}, {"variant": "fp8", "ms": 2.0},
            {"estimate of": "base", "dry run GiB": 57.5}]  # fmt: skip
    found = evidence.with_estimates(rows)
    assert found == [{**rows[0], "dry run GiB": 57.5}, rows[1]]
    result = {"stages": {"C": [{"check": "variants", "status": 0, "rows": found}]}}
    assert evidence.estimate_of_step(result, {"step": "ours"}) == {"dry run GiB": 57.5}
    assert evidence.estimate_of_step(result, {"step": "plain"}) == {}


@pytest.mark.parametrize("changed", [{"rehearsal": True}, {"gpus": []}])
def test_a_rehearsal_is_no_evidence(changed, tmp_path):
    with pytest.raises(DataError, match="without a GPU"):
        joined(tmp_path, stage("B", **changed))
    assert not (tmp_path / "results").exists()
