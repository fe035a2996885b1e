"""The API's process. It reads the settings, starts the log, and serves until it gets a signal (SIGTERM or SIGINT).

After the signal, it ends long polls and streams, finishes the running requests, and exits.
"""

from __future__ import annotations

import argparse
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI

from leasehold.api.app import make_app
from leasehold.api.http.connections import allow_files, guarded
from leasehold.db.poolers import check_pooler
from leasehold.domain.errors import BadSetting, CodeBroken, DeclarationError
from leasehold.runtime import failpoints
from leasehold.runtime.garbage import collect_rarely, freeze_loaded
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.starting import settings_or_exit
from leasehold.telemetry.listener import ALL, listening_at
from leasehold.telemetry.logs import configure_logs
from leasehold.telemetry.meters import expose
from leasehold.telemetry.traces import begin_traces

log = structlog.get_logger(__name__)

#: Seconds for which the running requests may go on after the long polls and streams have ended.
_GRACE_SECONDS = 15


class Server(uvicorn.Server):
    """A uvicorn server that ends long polls and streams before it waits until the open connections are closed."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.services.drain()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Record the signal, so that the process stops and exits with success. uvicorn's own method would raise the
        signal again at the end. A SIGINT after a first signal (Ctrl-C twice) ends the process without waiting.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def make_server(settings: Settings, *, host: str, port: int) -> Server:
    app = make_app(settings)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=guarded(settings),
        ws="none",
        proxy_headers=False,  # the setting LEASEHOLD_TRUSTED_PROXIES replaces it
        access_log=False,  # the middleware `Edge` logs one line for each request, with fixed fields
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        timeout_keep_alive=30,
    )
    return Server(config, app)


def _open_sockets(host: str, port: int) -> list[socket.socket] | None:
    """If `host` is `ALL` (`::`), open one socket for all addresses of IPv4 and IPv6, because uvicorn's own socket for
    `::` would accept only IPv6. For any other `host`, return None, and uvicorn opens the socket itself.
    """
    if host != ALL:
        return None
    listening_socket = listening_at(host, port)
    port = listening_socket.getsockname()[1]
    log.info("listening", url=f"http://[::]:{port}")  # uvicorn logs this only for its own sockets
    return [listening_socket]


def main(arguments: Sequence[str] | None = None) -> None:
    collect_rarely()  # the garbage collector runs less often than by default
    settings = settings_or_exit()
    parser = argparse.ArgumentParser(prog="python -m leasehold.api", description="Serve Leasehold's HTTP API.")
    parser.add_argument("--host", default=settings.api_host)
    parser.add_argument("--port", type=int, default=settings.api_port)
    options = parser.parse_args(arguments)
    configure_logs(settings)
    failpoints.arm(settings.failpoints)  # places at which a test stops the process
    expose(settings, "console" if settings.console_only else "api")
    if settings.traces:
        begin_traces("api")
    allow_files(settings)  # let the process open as many files as its connections need
    try:
        with suppress(*TRY_AGAIN):  # the API also starts while PostgreSQL does not answer
            uvloop.run(check_pooler(settings))  # raises BadSetting if the settings do not suit a pooler (PgBouncer)
        server = make_server(settings, host=options.host, port=options.port)
    except CodeBroken as error:
        log.error("not started", reason=str(error), exception=error.trace)  # noqa: TRY400 - the traceback of the app's code alone
        raise SystemExit(error.exit_status) from error
    except (BadSetting, DeclarationError) as error:
        log.error("not started", reason=str(error))  # noqa: TRY400 - the reason suffices, without a traceback
        raise SystemExit(1) from error
    freeze_loaded()  # the garbage collector no longer examines the objects that exist by now
    server.run(_open_sockets(options.host, options.port))
