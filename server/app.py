"""The ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpla.core.config.router import RouterConfig
from tpla.server import generate, operations
from tpla.server.errors import install_error_handlers
from tpla.server.record import request_id_of
from tpla.server.service import Service


def build_app(config: RouterConfig) -> FastAPI:
    """The router's HTTP endpoint; its service is ``app.state.service``."""
    service = Service(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    # No schema and no docs pages: bodies are checked by hand, so FastAPI's schema would be empty.
    # No redirects from a trailing slash: behind TLS they would lead to http://.
    app = FastAPI(title="TPLA", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    app.include_router(operations.probes)
    app.include_router(operations.workers)
    app.include_router(generate.routes)
    install_error_handlers(app)
    app.add_middleware(AnswerHeaders, service=service)
    return app


class AnswerHeaders:
    """Gives each request an id, and returns it with the answer.

    While the router drains, each answer ends its connection as well: a client that keeps it would
    send its next request, or the same one again, to this router, though another is ready.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with ``state.request_id``."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if self._service.draining:
                    headers["connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_with_headers)
