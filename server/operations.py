"""What operators and probes ask: health, readiness, metrics and the worker registry."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tpla.core.config.router import WorkerAddress
from tpla.core.config.worker import Role
from tpla.core.errors import BadRequest
from tpla.server.auth import require_key, service_of
from tpla.server.bodies import read_object

probes = APIRouter()
"""Open to all: load balancers and Prometheus carry no keys."""

workers = APIRouter(prefix="/workers", dependencies=[Depends(require_key)])


class NewWorker(BaseModel):
    """Body of ``POST /workers``."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[str, Field(strict=True)]
    role: Role
    bootstrap_port: Annotated[int, Field(strict=True)] | None = None


@probes.get("/health")
async def health() -> Response:
    """The process answers."""
    return JSONResponse({"status": "ok"})


@probes.get("/liveness")
async def liveness() -> Response:
    """The process answers; also while draining, or it would be killed half way."""
    return JSONResponse({"status": "alive"})


@probes.get("/ready")
async def ready(request: Request) -> Response:
    """Whether requests sent now would be served."""
    service = service_of(request)
    if service.draining:
        return JSONResponse({"status": "draining"}, status_code=503)
    if not service.ready:
        return JSONResponse({"status": "no worker of each role is healthy"}, status_code=503)
    return JSONResponse({"status": "ready"})


@probes.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    content = generate_latest(service_of(request).metrics.registry)
    return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})


@workers.get("")
async def list_workers(request: Request) -> Response:
    """State of all workers."""
    service = service_of(request)
    return JSONResponse(
        {
            "workers": [report.as_json() for report in service.registry.report()],
            "active_requests": service.admission.active,
            "queued_requests": service.admission.queued,
        }
    )


@workers.post("")
async def add_worker(request: Request) -> Response:
    """Add a worker.

    Raises:
        BadRequest: the body is malformed, or the worker is known already.
    """
    service = service_of(request)
    body = await read_object(request, max_bytes=64 * 1024, timeout=service.config.client.body)
    worker = service.add_worker(_address(body))
    return JSONResponse(service.registry.describe(worker).as_json(), status_code=201)


@workers.get("/{worker_id}")
async def get_worker(request: Request, worker_id: str) -> Response:
    """State of one worker.

    Raises:
        NotFound: there is no such worker.
    """
    registry = service_of(request).registry
    return JSONResponse(registry.describe(registry.get(worker_id)).as_json())


@workers.delete("/{worker_id}")
async def remove_worker(request: Request, worker_id: str) -> Response:
    """Send a worker nothing new, and forget it once its legs have ended.

    Raises:
        NotFound: there is no such worker.
    """
    registry = service_of(request).registry
    worker = registry.drain(worker_id)
    return JSONResponse(registry.describe(worker).as_json(), status_code=202)


def _address(body: dict[str, Any]) -> WorkerAddress:
    try:
        new = NewWorker.model_validate(body)
        return WorkerAddress(url=new.url, role=new.role, bootstrap_port=new.bootstrap_port)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(
            f"Invalid value for '{where}': {first['msg']}.", param=where, code="invalid_value"
        ) from None
