"""Bearer keys."""

from __future__ import annotations

import secrets

from fastapi import Request

from tpla.core.errors import Unauthorized
from tpla.server.service import Service


def service_of(request: Request) -> Service:
    """The service behind the app that received ``request``."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def require_key(request: Request) -> None:
    """Let only clients with the API key pass, where one is configured.

    Raises:
        Unauthorized: the key is missing or wrong.
    """
    expected = service_of(request).config.api_key
    if expected is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise Unauthorized("No API key; send it as 'Authorization: Bearer KEY'.")
    if not secrets.compare_digest(given.strip().encode(), expected.encode()):
        raise Unauthorized("The API key is not the one this server was started with.")
