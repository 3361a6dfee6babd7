"""The doctor names what is broken and stays calm about what is merely absent."""

import json
import socket

from megatron.core.foundation import optional_imports
from megatron.resilience.node_health import CheckResult, State
from tools import doctor


def by_name(found):
    return {one.name: one for one in found}


def test_installed_libraries_have_versions_and_missing_ones_a_source(monkeypatch):
    monkeypatch.setitem(optional_imports.EXTRA_OF, "no_such_library", "hf")
    found = by_name(doctor.library_findings(imports=False))
    assert found["tokenizers"].state is State.FINE and found["tokenizers"].text[0].isdigit()
    missing = found["no_such_library"]
    assert missing.state is State.ABSENT and "megatron-lattice[hf]" in missing.text


def test_a_library_that_does_not_import_is_a_problem(monkeypatch, tmp_path):
    (tmp_path / "broken_library.py").write_text("raise OSError('libfoo.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(optional_imports, "EXTRA_OF", {"broken_library": "hf"})
    monkeypatch.setattr(optional_imports, "BUILT_FROM_SOURCE", {})
    (found,) = doctor.library_findings(imports=True)
    assert found.state is State.PROBLEM and "libfoo.so" in found.text


def test_a_host_without_a_reachable_name_is_a_problem(monkeypatch):
    def unknown(name):
        raise socket.gaierror("unknown host")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = by_name(doctor.network_findings())
    assert found["this host"].state is State.PROBLEM
    assert "GLOO_SOCKET_IFNAME=lo" in found["this host"].text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    found = by_name(doctor.network_findings())
    assert found["this host"].state is State.ABSENT
    assert found["GLOO_SOCKET_IFNAME"].state is State.PROBLEM


def test_the_report_and_its_exit_status_follow_the_problems(monkeypatch, capsys):
    good = CheckResult("a", "b", "c")
    monkeypatch.setattr(doctor, "examine", lambda options: [good])
    assert doctor.main([]) == 0
    assert "no problems" in capsys.readouterr().out
    bad = CheckResult("a", "d", "e", State.PROBLEM)
    monkeypatch.setattr(doctor, "examine", lambda options: [good, bad])
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1]["state"] == "problem"


def test_ranks_that_fail_are_reported_with_what_they_said(tmp_path):
    file = tmp_path / "rank.py"
    file.write_text("raise SystemExit('no route')")
    found = doctor.self_test(doctor.python_of(str(file)))
    assert found.state is State.PROBLEM
    assert "rank 0 failed: no route" in found.text


def test_two_ranks_agree_with_one():
    found = doctor.self_test(doctor.python_of(doctor.__file__, "--self-test-rank"))
    assert found.state is State.FINE, found.text
    assert "tensor parallel 2 over gloo" in found.text
