"""What monitors are handed; `tests/parity/optional_libraries.py` has the libraries themselves."""

import re
import socket
import urllib.request
from types import SimpleNamespace

import pytest

from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import ConfigError
from megatron.training.config.resolved import ResolvedRun
from megatron.training.hooks.monitoring import (
    MlflowSink,
    OpenTelemetrySink,
    PrometheusSink,
    monitoring_sinks,
)
from tests.harness.machine import free_port

SCALARS = {"lm loss": 4.5, "compute-share": 0.75}
LINE = re.compile(r"# TYPE [a-z_]+ gauge|lattice_[a-z_]+ [-+.\de]+")


def ask(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def test_prometheus_reads_the_newest_scalars_until_the_run_ends():
    port = free_port()
    (sink,) = monitoring_sinks(ResolvedRun().overlaid({"prometheus_port": port}))
    assert isinstance(sink, PrometheusSink)
    assert ask(port) == ""
    sink.write(SCALARS, 1)
    sink.write({"lm loss": 4.25}, 2)
    text = ask(port)
    assert all(LINE.fullmatch(line) for line in text.splitlines())
    assert text.splitlines()[1::2] == [
        "lattice_lm_loss 4.25", "lattice_compute_share 0.75", "lattice_iteration 2.0",
    ]  # fmt: skip
    sink.close()
    with pytest.raises(OSError, match="refused"):
        ask(port)


def test_a_port_that_is_taken_is_told_with_its_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--prometheus-port {port}"):
            monitoring_sinks(ResolvedRun().overlaid({"prometheus_port": port}))


class Recorder:
    """Stands in for a library: keeps what is called."""

    class MlflowException(Exception):
        """Of mlflow."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*positional, **named):
            self.calls.append((name, positional, named))
            return self

        return call


def test_mlflow_gets_settings_scalars_and_an_end(monkeypatch):
    mlflow = Recorder()
    monkeypatch.setattr(optional_imports, "require", lambda name, purpose: mlflow)
    settings = {"mlflow_experiment": "e", "mlflow_run_name": "r", "mlflow_tracking_uri": "u"}
    (sink,) = monitoring_sinks(ResolvedRun().overlaid(settings))
    assert isinstance(sink, MlflowSink)
    sink.write(SCALARS, 3)
    sink.close()
    called = {name: (positional, named) for name, positional, named in mlflow.calls}
    assert list(called) == [
        "set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "end_run",
    ]  # fmt: skip
    assert called["start_run"] == ((), {"run_name": "r"})
    assert called["log_params"][0][0]["seq_length"] == "None"
    assert called["log_metrics"] == ((SCALARS,), {"step": 3, "synchronous": False})


def test_a_collector_gets_one_gauge_for_each_scalar():
    set_to = {}

    def create_gauge(name):
        assert name not in set_to
        set_to[name] = []
        return SimpleNamespace(set=set_to[name].append)

    ended = []
    meter = SimpleNamespace(create_gauge=create_gauge)
    provider = SimpleNamespace(get_meter=lambda name: meter, shutdown=lambda: ended.append(True))
    sink = OpenTelemetrySink(provider)
    sink.write(SCALARS, 1)
    sink.write({"lm loss": 4.25}, 2)
    sink.close()
    assert set_to == {
        "lattice.lm_loss": [4.5, 4.25],
        "lattice.compute_share": [0.75],
        "lattice.iteration": [1, 2],
    }
    assert ended


def test_nothing_is_opened_unasked():
    assert monitoring_sinks(ResolvedRun()) == []
