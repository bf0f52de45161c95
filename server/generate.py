"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from tpla.core.errors import NotFound, NoWorker, RoutingError
from tpla.server.auth import require_key, service_of
from tpla.server.bodies import read_object
from tpla.server.errors import ClientGone
from tpla.server.generation import Generation
from tpla.server.record import RequestRecord, forwarded_headers
from tpla.server.samples import (
    CHAT,
    COMPLETIONS,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from tpla.server.service import Service
from tpla.server.streaming import EventStream, unless_client_leaves

routes = APIRouter(dependencies=[Depends(require_key)])

Parser = Callable[[dict[str, Any], int], GenerationRequest]


@routes.post(CHAT)
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    return await _generate(request, CHAT, parse_chat)


@routes.post(COMPLETIONS)
async def completions(request: Request) -> Response:
    """Continue prompts."""
    return await _generate(request, COMPLETIONS, parse_completion)


@routes.get("/v1/models")
async def models(request: Request) -> Response:
    """The model served, once a worker has said what it is."""
    name = service_of(request).registry.served_model
    return JSONResponse({"object": "list", "data": [] if name is None else [_card(name)]})


@routes.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One model.

    Raises:
        NotFound: it is not the one served.
    """
    _check_model(service_of(request), name)
    return JSONResponse(_card(name))


async def _generate(request: Request, path: str, parse: Parser) -> Response:
    service = service_of(request)
    record = RequestRecord(path, request.state.request_id, service.metrics, service.in_flight)
    response: Response | None = None
    try:
        response = await _answer(request, path, parse, service, record)
        return response
    except ClientGone:
        record.client_gone()
        raise
    except RoutingError as error:
        record.failed(error)
        raise
    except BaseException as error:
        record.crashed(error)
        raise
    finally:
        if not isinstance(response, EventStream):
            record.release()


async def _answer(
    request: Request, path: str, parse: Parser, service: Service, record: RequestRecord
) -> Response:
    config = service.config
    too_late = service.draining
    # Read also where it is refused: the answer to a body still on its way would be lost, because a
    # router that drains closes the connection behind it, which resets it.
    body = await read_object(request, max_bytes=config.max_body_bytes, timeout=config.client.body)
    if too_late:
        raise NoWorker("The router is shutting down.", code="shutting_down")
    parsed = parse(body, config.admission.max_concurrent_requests)
    _check_model(service, parsed.model)
    record.stream, record.samples = parsed.stream, len(parsed.samples)
    headers = forwarded_headers(request.headers, record.request_id)
    generation = Generation(service, parsed, path, headers, record)
    async with AsyncExitStack() as owner:
        owner.push_async_callback(generation.close)
        await unless_client_leaves(request.receive, generation.open())
        if parsed.stream:
            owner.pop_all()  # from here on the stream closes it
            return EventStream(generation, record, write_timeout=config.client.write)
        content = await unless_client_leaves(request.receive, generation.answer())
    record.finished()
    return Response(content, media_type="application/json")


def _check_model(service: Service, name: str | None) -> None:
    served = service.registry.served_model
    if name is not None and served is not None and name != served:
        raise NotFound(
            f"The model {name!r} does not exist; this server serves {served!r}.",
            param="model",
            code="model_not_found",
        )


def _card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tpla"}
