"""What uses libraries that developers do not install, with the libraries themselves.

    python -m pytest tests/parity/optional_libraries.py

Needs the extras wandb, mlflow, otel, nltk and ray; tools/test_lowest.sh installs them. The name
keeps this file out of the test suite, where stand-ins take the libraries' places.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import mlflow
import nltk
import pytest
from nltk.tokenize.punkt import PunktParameters, save_punkt_params
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.transforms import SentenceSplitter
from megatron.core.foundation.errors import DataError
from megatron.training.config.resolved import ResolvedRun
from megatron.training.hooks.monitoring import monitoring_sinks

ROOT = Path(__file__).parents[2]
BYTES = ["--tokenizer-type", "ByteTokenizer", "--workers", "0"]


def tool(name, *arguments):
    return subprocess.run(
        [sys.executable, f"tools/{name}.py", *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip


@pytest.fixture
def punkt_data(tmp_path, monkeypatch):
    """Install a sentence model that knows the abbreviation "dr."."""
    place = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "english"
    place.mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    parameters = PunktParameters()
    parameters.abbrev_types.add("dr")
    save_punkt_params(parameters, str(place))
    return place


def test_a_sentence_model_cuts_texts_and_is_loaded_in_each_process(tmp_path, punkt_data):
    assert SentenceSplitter("english")("Ask dr. Lee. She left.") == ["Ask dr. Lee.", "She left."]
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "Ask dr. Lee. She left."}) + "\n")
    done = tool(
        "preprocess_data", "--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out",
        "--split-sentences", *BYTES,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(str(tmp_path / "out_text_sentence"))
    assert [bytes(list(one)).decode() for one in dataset[:]] == ["Ask dr. Lee.", "She left."]


def test_a_language_without_a_model_is_named(punkt_data):
    with pytest.raises(DataError, match="no sentence model for 'klingon'"):
        SentenceSplitter("klingon").load()


RECORDING = """
import sys
from types import SimpleNamespace
from megatron.training.hooks.scalars import WandbSink
from megatron.training.setup import initialize

sink = WandbSink(initialize.open_wandb(SimpleNamespace(
    logging=SimpleNamespace(
        wandb_project="p", wandb_entity="", wandb_exp_name="name", wandb_save_dir=sys.argv[1]
    ),
    config=SimpleNamespace(flat=lambda: {"num_layers": 2}),
)))
for step in (1, 2):
    sink.write({"lm loss": 4.5 / step}, step)
sink.close()
"""


@pytest.mark.parametrize("mode", [None, "offline"])
def test_scalars_are_recorded_where_nobody_can_log_in(mode, tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    without_key = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    chosen = {} if mode is None else {"WANDB_MODE": mode}
    done = subprocess.run(
        [sys.executable, "-c", RECORDING, str(tmp_path)],
        env={**kept, **without_key, **chosen, "WANDB_ERROR_REPORTING": "false"},
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("recorded offline; upload it" in done.stdout) == (mode is None)
    (recorded,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert recorded.read_bytes().count(b"lm loss") >= 2


def overlaid(**settings):
    return ResolvedRun().overlaid(settings)


def test_mlflow_keeps_the_scalars_and_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # needs no server
    store = (tmp_path / "runs").as_uri()
    (sink,) = monitoring_sinks(overlaid(mlflow_experiment="e", mlflow_tracking_uri=store))
    for step in (1, 2):
        sink.write({"lm loss": 4.5 / step}, step)
    sink.close()
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    history = client.get_metric_history(run.info.run_id, "lm loss")
    assert {each.step: each.value for each in history} == {1: 4.5, 2: 2.25}
    assert run.data.params["num_layers"] == "None"
    assert run.info.status == "FINISHED"


def test_a_collector_gets_the_newest_scalars_by_otlp(monkeypatch):
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/metrics"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        (sink,) = monitoring_sinks(overlaid(otel_enabled=True, otel_service_name="gpt"))
        sink.write({"lm loss": 4.5}, 1)
        sink.write({"lm loss": 2.25}, 2)
        sink.close()
        server.shutdown()
    request = ExportMetricsServiceRequest.FromString(bodies[-1])
    (of_resource,) = request.resource_metrics
    attributes = {a.key: a.value.string_value for a in of_resource.resource.attributes}
    assert attributes["service.name"] == "gpt"
    (scope,) = of_resource.scope_metrics
    values = {m.name: [p.as_double or p.as_int for p in m.gauge.data_points] for m in scope.metrics}
    assert values == {"lattice.lm_loss": [2.25], "lattice.iteration": [2]}


def shards(folder, prefix):
    names = [f"{prefix}-0000{n}-of-00002_text_document" for n in (0, 1)]
    return [(folder / f"{name}{end}").read_bytes() for name in names for end in (".bin", ".idx")]


def on_ray(folder, prefix, *flags):
    common = ["--input", folder / "in.jsonl", "--output-prefix", folder / prefix]
    return tool(
        "preprocess_on_cluster", "--executor", "ray", "--tasks", "2", "--mem-per-cpu-gb", "1",
        "--logging-dir", folder / f"logs of {prefix}", "--", *common, *flags,
    )  # fmt: skip


def test_ray_writes_the_shards_of_one_process_and_a_failed_task_is_told(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * (i % 9)}) for i in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    done = on_ray(tmp_path, "many", *BYTES)
    assert done.returncode == 0, done.stderr
    one = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "one"]
    assert tool("preprocess_data", *one, *BYTES, "--num-shards", 2).returncode == 0
    assert shards(tmp_path, "many") == shards(tmp_path, "one")
    done = on_ray(tmp_path, "bad", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9")
    assert done.returncode == 1
    assert "2 of 2 tasks did not finish (0, 1)" in done.stderr
