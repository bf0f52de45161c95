"""Configuration of the router: workers, policies, and an upper bound for every wait."""

from __future__ import annotations

from enum import Enum
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tpla.core.config.environment import API_KEY_VARIABLE, read
from tpla.core.config.validation import Seconds, explain
from tpla.core.config.worker import Role
from tpla.core.errors import ConfigError

Port = Annotated[int, Field(ge=1, le=65_535)]

DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's default of ``--disaggregation-bootstrap-port``."""

WORKER_API_KEY_VARIABLE = "TPLA_WORKER_API_KEY"
"""Key that the router presents to workers started with ``--api-key``; empty means none."""


class Policy(str, Enum):
    """How a worker is picked among the eligible ones of its role."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"
    CACHE_AWARE = "cache_aware"
    LEAST_LOADED = "least_loaded"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerAddress(_Frozen):
    """Where a worker listens.

    ``bootstrap_port`` is where decode finds a prefill worker's KV; None takes what the worker
    reports about itself, or 8998.
    """

    url: str
    role: Role
    bootstrap_port: Port | None = None

    @field_validator("url")
    @classmethod
    def _absolute_http(cls, value: str) -> str:
        parts = urlsplit(value)
        usable = parts.scheme in {"http", "https"} and parts.hostname
        if not usable or parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise ValueError("not a worker's base address; write http://HOST:PORT")
        if parts.port == 0:
            raise ValueError("port 0 is not an address; write http://HOST:PORT")
        if not _is_host(parts.hostname or ""):
            raise ValueError("no host can have this name; write http://HOST:PORT")
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def host(self) -> str:
        """Host name alone, without port or brackets."""
        return urlsplit(self.url).hostname or ""


def _is_host(name: str) -> bool:
    try:
        return bool(name.encode("idna")) and name.isprintable() and " " not in name
    except UnicodeError:  # a label that is empty or too long, or no text at all
        return False


class LegTimeouts(_Frozen):
    """Upper bounds, in seconds, of the waits on one worker."""

    connect: Seconds = 5.0
    first_byte: Seconds = 120.0
    """Until a leg's first chunk; an unstreamed decode leg is bound by the request's time alone.

    A worker that lets it pass is charged only if its scheduler answers no health check either."""
    idle: Seconds = 120.0
    """Between two chunks of a leg."""
    abort: Seconds = 5.0
    """A worker's answer to an abort."""
    settle: Seconds = 0.25
    """When a leg reports a failed KV transfer: how long the other may take to turn out dead."""


class ClientTimeouts(_Frozen):
    """Upper bounds, in seconds, of the waits on a client."""

    head: Seconds = 30.0
    """From an open connection to the end of a request's head."""
    body: Seconds = 30.0
    """The whole request body."""
    write: Seconds = 60.0
    """Until the client has taken a chunk of the answer."""
    keep_alive: Seconds = 75.0
    """Idle connection between two requests. Longer than balancers in front keep theirs (60 s, many
    of them), or they would send a request just as it closes."""


class RetryPolicy(_Frozen):
    """Attempts on other workers before the client has received anything."""

    max_retries: Annotated[int, Field(ge=0, le=100)] = 5
    max_lost_workers: Annotated[int, Field(ge=1)] = 3
    """A request under which so many workers went away, fell silent or failed may be why they did:
    no other gets it."""
    base_delay: Seconds = 0.05
    max_delay: Seconds = 2.0


class BreakerPolicy(_Frozen):
    """When a worker that keeps failing is left alone, and for how long."""

    failure_threshold: Annotated[int, Field(ge=1)] = 10
    timeout_secs: Seconds = 60.0


class HealthPolicy(_Frozen):
    """Active health checks."""

    interval_secs: Seconds = 5.0
    timeout_secs: Seconds = 5.0
    failure_threshold: Annotated[int, Field(ge=1)] = 3
    path: Annotated[str, Field(pattern="^/")] = "/health"
    load_path: Annotated[str, Field(pattern="^(/.*)?$")] = "/server_info"
    """Polled beside the check and shown under ``load`` in /workers; empty for none."""


class AdmissionPolicy(_Frozen):
    """How much is served at once, and how much may wait."""

    max_concurrent_requests: Annotated[int, Field(ge=1)] = 256
    queue_size: Annotated[int, Field(ge=0)] = 100
    queue_timeout_secs: Seconds = 60.0


class CacheAwarePolicy(_Frozen):
    """When a known prefix outweighs load."""

    match_threshold: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Least share of the prompt that a worker must have seen to be preferred for it."""
    balance_abs_threshold: Annotated[int, Field(ge=0)] = 32
    balance_rel_threshold: Annotated[float, Field(ge=1)] = 1.5
    """Load is unbalanced when the busiest worker exceeds the idlest by both thresholds."""
    max_entries: Annotated[int, Field(ge=1)] = 131_072
    """Prompt chunks remembered, over all workers."""


class RouterConfig(_Frozen):
    """The router and its HTTP endpoint.

    Raises:
        ConfigError: through :func:`parse_router_config`, for values that do not fit together.
    """

    prefill: tuple[WorkerAddress, ...] = ()
    decode: tuple[WorkerAddress, ...] = ()
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    model: Annotated[str, Field(min_length=1)] | None = None
    api_key: str | None = Field(default=None, min_length=1, repr=False)
    worker_api_key: str | None = Field(default=None, min_length=1, repr=False)
    prefill_policy: Policy = Policy.CACHE_AWARE
    decode_policy: Policy = Policy.LEAST_LOADED
    retry: RetryPolicy = RetryPolicy()
    breaker: BreakerPolicy = BreakerPolicy()
    health: HealthPolicy = HealthPolicy()
    admission: AdmissionPolicy = AdmissionPolicy()
    cache_aware: CacheAwarePolicy = CacheAwarePolicy()
    leg: LegTimeouts = LegTimeouts()
    client: ClientTimeouts = ClientTimeouts()
    request_timeout_secs: Seconds = 1800.0
    shutdown_grace_period_secs: Seconds = 180.0
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024

    @field_validator("api_key", "worker_api_key")
    @classmethod
    def _fit_for_a_header(cls, value: str | None) -> str | None:
        # A secret made from a file often ends in a line break, which no client can send.
        if value is not None and not (value.isascii() and value.isprintable() and " " not in value):
            raise ValueError(
                "holds a character that no Authorization header carries (a space, a line break at "
                "its end, a letter beyond ASCII); use printable ASCII without spaces"
            )
        return value

    @model_validator(mode="after")
    def _each_worker_once(self) -> RouterConfig:
        urls = [address.url for address in (*self.prefill, *self.decode)]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"worker {twice[0]} is listed twice; list each worker once")
        return self


def parse_router_config(values: dict[str, object]) -> RouterConfig:
    """Build the router's configuration from plain values and the environment.

    Values that are None count as absent. API keys that are absent come from ``TPLA_API_KEY`` and
    ``TPLA_WORKER_API_KEY``.

    Raises:
        ConfigError: a value is unknown, malformed or inconsistent; the message names it.
    """
    merged: dict[str, object] = {
        "api_key": read(API_KEY_VARIABLE) or None,
        "worker_api_key": read(WORKER_API_KEY_VARIABLE) or None,
        **_without_none(values),
    }
    try:
        return RouterConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def _without_none(values: dict[str, object]) -> dict[str, object]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None
    }
