"""Export of scalars to MLflow, an OpenTelemetry collector and Prometheus."""

from __future__ import annotations

import re
import threading
from typing import Any

from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import ConfigError
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import plain
from megatron.training.hooks.scalars import ScalarSink
from megatron.training.launch.http_endpoint import HttpEndpoint
from megatron.training.launch.printing import is_last_rank

PREFIX = "lattice"
_NO_LETTERS = re.compile(r"[^a-zA-Z0-9]+")
_MOST_LETTERS = 500
"""MLflow's limit for the value of a parameter, in characters."""


def metric_name(name: str) -> str:
    """Return a scalar's name with other characters than letters and digits replaced by `_`."""
    return _NO_LETTERS.sub("_", name).strip("_")


class MlflowSink:
    """Logs scalars to an open MLflow run.

    Args:
        mlflow: the module.
    """

    def __init__(self, mlflow: Any) -> None:
        self.mlflow = mlflow

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Log all scalars of this step; a thread sends them."""
        self.mlflow.log_metrics(scalars, step=step, synchronous=False)

    def close(self) -> None:
        """Send buffered scalars, and end the run."""
        self.mlflow.end_run()


class OpenTelemetrySink:
    """Exports scalars as gauges of a meter.

    Args:
        provider: a `MeterProvider` of the SDK.
    """

    def __init__(self, provider: Any) -> None:
        self.provider = provider
        self._meter = provider.get_meter("megatron.training")
        self._gauges: dict[str, Any] = {}

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Set the gauges; the provider exports them periodically."""
        for name, value in {**scalars, "iteration": step}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"{PREFIX}.{metric_name(name)}")
            self._gauges[name].set(value)

    def close(self) -> None:
        """Export buffered values."""
        self.provider.shutdown()


class PrometheusSink:
    """Serves the newest scalars as gauges in Prometheus' text format.

    Raises:
        OSError: the address is in use or does not exist.
    """

    def __init__(self, *, host: str, port: int) -> None:
        self._newest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._endpoint = HttpEndpoint(self.text, port=port, host=host)
        self.port = self._endpoint.port

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Store the scalars until newer ones replace them."""
        with self._lock:
            self._newest |= {**scalars, "iteration": step}

    def text(self) -> str:
        """Return all gauges in Prometheus' text format."""
        with self._lock:
            newest = dict(self._newest)
        lines = []
        for name, value in newest.items():
            full = f"{PREFIX}_{metric_name(name)}"
            lines += [f"# TYPE {full} gauge", f"{full} {float(value)!r}"]
        return "".join(f"{line}\n" for line in lines)

    def close(self) -> None:
        """Close the endpoint."""
        self._endpoint.close()


def monitoring_sinks(run: ResolvedRun) -> list[ScalarSink]:
    """Open the sinks of the settings on the last rank, which computes the losses."""
    sinks: list[ScalarSink] = []
    if not is_last_rank():
        return sinks
    if run.logging.mlflow_experiment is not None:
        sinks.append(MlflowSink(_open_mlflow(run)))
    if run.logging.otel_enabled:
        sinks.append(OpenTelemetrySink(_open_telemetry(run.logging.otel_service_name)))
    if (port := run.logging.prometheus_port) is not None:
        host = run.logging.prometheus_host
        try:
            sinks.append(PrometheusSink(host=host, port=port))
        except OSError as error:
            raise ConfigError(
                f"--prometheus-port {port}: the last rank cannot listen at {host}: {error}",
                rule="the last rank of a run serves the scalars at this address",
                flags=["--prometheus-port", "--prometheus-host"],
                fix="choose a free port, and an address of the last rank's machine",
            ) from error
    return sinks


def _open_mlflow(run: ResolvedRun) -> Any:
    logging = run.logging
    mlflow = optional_imports.require("mlflow", purpose="--mlflow-experiment")
    settings = {
        name: str(plain(value))[:_MOST_LETTERS] for name, value in run.config.flat().items()
    }
    try:
        if logging.mlflow_tracking_uri is not None:
            mlflow.set_tracking_uri(logging.mlflow_tracking_uri)
        mlflow.set_experiment(logging.mlflow_experiment)
        mlflow.start_run(run_name=logging.mlflow_run_name)
        mlflow.log_params(settings, synchronous=False)
    except mlflow.MlflowException as error:
        raise ConfigError(
            f"MLflow cannot open a run: {error}",
            rule="--mlflow-tracking-uri, or MLFLOW_TRACKING_URI, is the address of a server",
            flags=["--mlflow-tracking-uri", "--mlflow-experiment"],
            fix="give the address of a running server, such as http://127.0.0.1:5000 of `mlflow"
            " server`",
        ) from error
    return mlflow


def _open_telemetry(service_name: str | None) -> Any:
    """Return a provider that exports by OTLP to the variable OTEL_EXPORTER_OTLP_ENDPOINT."""
    metrics, export, exporter, resources = (
        optional_imports.require(f"opentelemetry.{name}", purpose="--otel-enabled")
        for name in (
            "sdk.metrics",
            "sdk.metrics.export",
            "exporter.otlp.proto.http.metric_exporter",
            "sdk.resources",
        )
    )
    attributes = {} if service_name is None else {"service.name": service_name}
    return metrics.MeterProvider(
        [export.PeriodicExportingMetricReader(exporter.OTLPMetricExporter())],
        resource=resources.Resource.create({"service.name": "megatron-lattice", **attributes}),
    )
