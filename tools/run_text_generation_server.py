"""Serve a trained model over HTTP, with OpenAI's interface.

    torchrun --nproc-per-node 2 tools/run_text_generation_server.py --load-hf DIRECTORY \
        --tensor-model-parallel-size 2 --port 5000

    curl http://127.0.0.1:5000/v1/completions -H 'Content-Type: application/json' \
        -d '{"model": "model", "prompt": "To be, or not", "max_tokens": 20}'

It listens on this machine only unless --host says otherwise, and answers anybody who reaches it
unless --api-key-file names keys; what is beyond the machine needs a proxy. Flags of
layout, precision and tokenizer are those of pretrain_gpt.py. Control-C ends it on all ranks.
"""

from __future__ import annotations

import dataclasses
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.preprocessing.chat_template import find_chat_template
from megatron.core.datasets.preprocessing.template_process import TemplateLimits
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.foundation.optional_imports import require
from megatron.core.settings.flags import flag, flag_specs
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import control_group, raise_on_all_ranks
from megatron.inference.engine import Engine
from megatron.inference.server.access import Access, host_name, is_loopback, read_keys
from megatron.inference.server.app import App
from megatron.inference.server.connections import http_server
from megatron.inference.server.limits import Limits
from megatron.inference.server.serving import Service
from megatron.inference.session import ModelSession, open_session
from megatron.training.resilience.failure import failures_reported
from megatron.training.resilience.status import RunStatus
from megatron.training.setup.distributed import shut_down
from pretrain_gpt import model_provider


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Text generation server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 5000
    """0 takes a free one."""
    api_key_file: Path | None = None
    """Keys, one a line: clients need one of them."""
    allowed_hosts: tuple[str, ...] = flag((), metavar="NAME")
    """Names in the Host header that are answered besides localhost, if --host is this machine; *
    answers all."""
    no_request_log: bool = False
    """Print no line for a request: its path, status, tokens and time."""
    served_model_name: str = "model"
    """What clients call it."""
    max_batch_size: int = 8
    """Sequences processed at once."""
    max_context: int | None = None
    """Tokens of prompt and answer; the model's own by default."""
    max_connections_per_address: int | None = flag(None, metavar="N")
    """Of one client; without it half of --max-connections, and all of them where --host is this
    machine: a proxy is one client."""
    no_weight_packing: bool = False
    """On CPUs: keep no second copy of the weights; slower, half the memory."""
    template_limits: TemplateLimits
    limits: Limits


def limits_of(options: ServerFlags) -> Limits:
    """Return the limits of the command line.

    Raises:
        ConfigError: one is not positive.
    """
    per_address = options.max_connections_per_address
    if per_address is None:
        share = 1 if is_loopback(options.host) else 2
        per_address = -(-options.limits.connections // share)
    values: dict[str, float] = {
        spec.flag: getattr(options.limits, spec.field) for spec in flag_specs(Limits, "")
    }
    values["--max-connections-per-address"] = per_address
    values["--max-batch-size"] = options.max_batch_size
    for spelling, value in values.items():
        if not value > 0:
            raise ConfigError(
                f"{spelling} {value:g}.",
                rule="limits are positive",
                flags=[spelling],
                fix="leave it out, or give a number above 0",
            )
    return dataclasses.replace(options.limits, connections_per_address=per_address)


def access_of(options: ServerFlags) -> Access:
    """Return who is answered; print a warning if that is anybody on the network.

    Raises:
        ConfigError: the keys cannot be read.
    """
    keys = read_keys(options.api_key_file) if options.api_key_file is not None else ()
    is_local = is_loopback(options.host)
    if not is_local and not keys:
        print(
            f"warning: --host {options.host} answers whoever reaches this address; give "
            "--api-key-file, or --host 127.0.0.1 and a proxy that asks for keys",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    hosts = frozenset(host_name(name) for name in options.allowed_hosts)
    return Access(keys=keys, hosts=None if not is_local or "*" in hosts else hosts)


def chat_template_of(session: ModelSession[ServerFlags]) -> Any:
    """Return the chat template, or None if nobody gives one."""
    tokenizer = session.run.tokenizer
    try:
        return find_chat_template(
            tokenizer.chat_template, tokenizer.tokenizer_model, session.options.template_limits
        )
    except ConfigError:
        if tokenizer.chat_template is not None:
            raise
        return None


def serve(app: App, service: Service, listener: socket.socket) -> None:
    """Serve until a signal or the end of the engine; the serving rank's main thread."""
    server = http_server(app, limits=app.limits)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    engine = threading.Thread(target=_run_engine, args=(service, server), name="engine")
    engine.start()
    try:
        host, port = listener.getsockname()[:2]
        print(f"serving {app.model} at http://{host}:{port}", flush=True)
        server.run(sockets=[listener])
    finally:
        service.stop()
        engine.join()
    if service.crash is not None:
        raise service.crash


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the server cannot listen at {host}, port {port}: {error}.",
            rule="the address is this machine's and the port is free",
            flags=["--host", "--port"],
            fix="use --port 0 for a free one",
        ) from error


def _print_line(line: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S "), line, sep="", flush=True)


def _run_engine(service: Service, server: Any) -> None:
    try:
        service.run()
    except Exception as error:
        service.crash = error  # raised in the main thread
    finally:
        server.should_exit = True


def main() -> None:
    """Load and serve."""
    status = RunStatus.of_this_process()
    with failures_reported(status, []):
        require("uvicorn", purpose="tools/run_text_generation_server.py")
        session = open_session(model_provider, ServerFlags)
        options, limits = session.options, limits_of(session.options)
        model = session.with_cache(
            max_rows=options.max_batch_size,
            max_length=options.max_context,
            packs_weights=not options.no_weight_packing,
        )
        service = Service(Engine(model), control_group(torch_collectives.world()), limits.queued)
        app, listener, problem = None, None, None
        if service.peers.rank == 0:
            try:
                template = chat_template_of(session)
                name = options.served_model_name
                access = access_of(options)
                log = None if options.no_request_log else _print_line
                app = App(
                    service, session.tokenizer, name, limits, template, access, log, session.ends
                )
                listener = listen(options.host, options.port)
            except MegatronError as error:
                problem = error
        raise_on_all_ranks(problem, service.peers)
        if app is not None and listener is not None:
            serve(app, service, listener)
        else:
            # The serving rank hears the signal and says when to end.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            service.follow()
        shut_down()


if __name__ == "__main__":
    main()
