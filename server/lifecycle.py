"""A uvicorn server that drains: startup, serve, drain, stop.

uvicorn closes its listeners on SIGTERM, so that probes would find a dead port while requests still
run. Here the listeners stay open until the last request has ended or the grace period is over.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
from contextlib import suppress
from types import FrameType

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tpla.core.config.router import ClientTimeouts, RouterConfig
from tpla.server.app import build_app
from tpla.server.service import GIVE_UP_SECONDS, Service

log = structlog.get_logger("tpla.server")


def serve(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain."""
    allow_all_descriptors()
    DrainingServer(config).run()


def allow_all_descriptors() -> None:
    """Raise the soft limit on open files to the hard one.

    Each request holds three connections, and 1024 files, the usual soft limit, are fewer than the
    clients that may wait idle. The limit is that low for programs that call select(), not for us.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a hard limit that the kernel no longer grants
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class DrainingServer(uvicorn.Server):
    """One router's HTTP server."""

    def __init__(self, config: RouterConfig) -> None:
        app = build_app(config)
        service = app.state.service
        assert isinstance(service, Service)
        self._service = service
        self._drain: asyncio.Task[None] | None = None
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=_protocol(config.client),
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=math.ceil(config.client.keep_alive),
                timeout_graceful_shutdown=round(GIVE_UP_SECONDS),
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; on a second signal, leave at once.

        The signal is not raised again after the drain, as uvicorn would: a drained router has done
        what it was asked to and exits with status 0.
        """
        if self._service.draining:
            self.should_exit = True
            self.force_exit = True
        else:
            self._service.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        addresses = [s.getsockname()[:2] for server in self.servers for s in server.sockets]
        log.info("listening", addresses=addresses)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop now."""
        if self._service.draining and self._drain is None:
            self._drain = asyncio.create_task(self._service.drain())
        if self._drain is not None and self._drain.done():
            self.should_exit = True
        return await super().on_tick(counter)


def _protocol(limits: ClientTimeouts) -> type[H11Protocol]:
    """uvicorn's protocol with bounds on a request's head and on a client that takes nothing.

    uvicorn has neither: a connection that sends nothing, or half a head, would stay for ever, and
    so would one that does not read, with all that was written to it: closing waits until that has
    been sent. The kernel can tell, also of what it buffers itself, and ends such a connection.
    """
    write_milliseconds = math.ceil(limits.write * 1000)

    class BoundedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            accepted = transport.get_extra_info("socket")
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, write_milliseconds)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._head_is_here()
            elif self._head_timer is None:
                self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_here()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            self._head_timer = self.loop.call_later(limits.head, self.transport.close)

        def _head_is_here(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return BoundedProtocol
