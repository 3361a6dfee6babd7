"""Serve a trained model over HTTP, with OpenAI's interface.

    torchrun --nproc-per-node 2 tools/run_text_generation_server.py --load-hf DIRECTORY \
        --tensor-model-parallel-size 2 --port 5000

    curl http://127.0.0.1:5000/v1/completions -H 'Content-Type: application/json' \
        -d '{"model": "model", "prompt": "To be, or not", "max_tokens": 20}'

By default the server listens on this machine only and answers every client; --host and
--api-key-file change that. Put an encrypting proxy between the server and a network. The flags of
layout, precision and tokenizer have the same meaning as in pretrain_gpt.py. Control-C ends the
server on all ranks.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.preprocessing.chat_template import TemplateLimits, find_chat_template
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag, flag_specs
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import control_group, raise_on_all_ranks
from megatron.inference.engine import Engine
from megatron.inference.serving import Limits, Service
from megatron.inference.session import ModelSession, open_session
from megatron.resilience.failure import failures_reported
from megatron.resilience.status import RunStatus
from megatron.training.setup.distributed import shut_down
from pretrain_gpt import model_provider


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Text generation server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 5000
    """0 chooses a free port."""
    api_key_file: Path | None = None
    """File with one key per line: a request must contain one of them."""
    allowed_hosts: tuple[str, ...] = flag((), metavar="NAME")
    """If --host is this machine: names in the Host header that are answered in addition to
    localhost; * answers all names."""
    no_request_log: bool = False
    """Print no line for each request."""
    served_model_name: str = "model"
    """Name of the model for clients."""
    max_batch_size: int = 8
    """Sequences processed at once."""
    max_context: int | None = None
    """Tokens of prompt and answer; the model's own by default."""
    no_weight_packing: bool = False
    """On CPUs: keep no second copy of the weights; slower, half the memory."""
    template_limits: TemplateLimits
    limits: Limits


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file: one per line, without empty lines and lines that begin with #.

    Raises:
        ConfigError: the file cannot be read, or has no valid key.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        are_usable = all(key.isascii() and key.isprintable() and " " not in key for key in keys)
        problem = "" if keys and are_usable else "has no key, or a key with unusual characters"
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {error}"
    if problem:
        raise ConfigError(
            f"--api-key-file {path} {problem}.",
            rule="a file of keys has one key in each line, of visible ASCII characters",
            flags=["--api-key-file"],
            fix=f"for example: openssl rand -hex 24 > {path}",
        )
    return keys


def chat_template_of(session: ModelSession[ServerFlags]) -> Any:
    """Return the chat template of the flags or the tokenizer; None without one."""
    tokenizer = session.run.tokenizer
    try:
        return find_chat_template(
            tokenizer.chat_template, tokenizer.tokenizer_model, session.options.template_limits
        )
    except ConfigError:
        if tokenizer.chat_template is not None:
            raise
        return None


def access_of(options: ServerFlags) -> dict[str, Any]:
    """Return the limits, keys and accepted hosts of `App`; warn if it answers the whole network.

    Raises:
        ConfigError: a limit is not positive, or the keys cannot be read.
    """
    from megatron.inference.server import is_loopback

    for spec in flag_specs(Limits, ""):
        value = getattr(options.limits, spec.field)
        if not value > 0:
            raise ConfigError(
                f"{spec.flag} {value:g}.",
                rule="limits are positive",
                flags=[spec.flag],
                fix="leave it out, or give a number above 0",
            )
    keys = read_keys(options.api_key_file) if options.api_key_file is not None else ()
    is_local = is_loopback(options.host)
    if not is_local and not keys:
        print(
            f"warning: --host {options.host} answers everybody who reaches this address; give "
            "--api-key-file, or --host 127.0.0.1 and a proxy that checks keys",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    hosts = (
        None if not is_local or "*" in options.allowed_hosts else frozenset(options.allowed_hosts)
    )
    return {"limits": options.limits, "keys": keys, "hosts": hosts}


def serve(server: Any, service: Service, listener: socket.socket) -> None:
    """Serve until a signal or the end of the engine, in the serving rank's main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    crash: list[Exception] = []

    def run_engine() -> None:
        try:
            service.run()
        except Exception as error:
            crash.append(error)
        finally:
            server.should_exit = True

    engine = threading.Thread(target=run_engine, name="engine")
    engine.start()
    try:
        server.run(sockets=[listener])
    finally:
        service.stop()
        engine.join()
    if crash:
        raise crash[0]


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


def main() -> None:
    """Load and serve."""
    status = RunStatus.of_this_process()
    with failures_reported(status):
        # Imported here: without the extra, this import raises an error that names the extra.
        from megatron.inference.server import App, http_server

        session = open_session(model_provider, ServerFlags)
        options = session.options
        model = session.with_cache(
            max_rows=options.max_batch_size,
            max_length=options.max_context,
            packs_weights=not options.no_weight_packing,
        )
        service = Service(Engine(model), control_group(torch_collectives.world()))
        server, listener, problem = None, None, None
        if service.peers.rank == 0:
            try:
                app = App(
                    service=service,
                    tokenizer=session.tokenizer,
                    model=options.served_model_name,
                    chat_template=chat_template_of(session),
                    ends=session.ends,
                    **access_of(options),
                )
                server = http_server(app, logs_requests=not options.no_request_log)
                listener = listen(options.host, options.port)
            except MegatronError as error:
                problem = error
        raise_on_all_ranks(problem, service.peers)
        if server is not None and listener is not None:
            host, port = listener.getsockname()[:2]
            print(f"serving {options.served_model_name} at http://{host}:{port}", flush=True)
            serve(server, service, listener)
        else:
            # The serving rank handles the signal and ends the other ranks.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            service.follow()
        shut_down()


if __name__ == "__main__":
    main()
