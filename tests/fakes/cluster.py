"""A router in front of fake workers, all over real HTTP in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from tests.fakes.sglang_worker import Fabric, FakeWorker, ServerThread, wait_until
from tpla.core.config.router import RouterConfig, parse_router_config
from tpla.server.lifecycle import DrainingServer
from tpla.server.service import Service

FAST: dict[str, Any] = {
    "health": {"interval_secs": 0.2, "timeout_secs": 2.0},
    "retry": {"max_retries": 0, "base_delay": 0.01, "max_delay": 0.02},
    "leg": {"connect": 2.0, "first_byte": 10.0, "idle": 10.0, "abort": 2.0},
    "shutdown_grace_period_secs": 5.0,
}


@dataclass
class Cluster:
    """What a test holds."""

    prefill: list[FakeWorker]
    decode: list[FakeWorker]
    server: DrainingServer
    url: str
    client: httpx.Client

    @property
    def service(self) -> Service:
        return self.server._service

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    def chat(self, text: str = "one two three", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "one two three", **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    def metric(self, name: str, **labels: str) -> float:
        registry = self.service.metrics.registry
        return registry.get_sample_value(f"tpla_router_{name}", labels) or 0.0

    def wait_quiet(self) -> None:
        """Until no request is open anywhere: nothing may be left running."""
        wait_until(lambda: self.service.in_flight.count == 0, what="requests in flight")
        wait_until(lambda: all(w.running == 0 for w in self.workers), what="running legs")
        wait_until(
            lambda: all(w.active == 0 for w in self.service.registry.workers.values()),
            what="leases",
        )
        wait_until(lambda: not self.service.dispatcher._attempts, what="attempts to be forgotten")
        assert self.service.admission.active == 0
        assert self.service.admission.queued == 0


@contextlib.contextmanager
def cluster(
    prefill: int = 1, decode: int = 1, *, ready: bool = True, **overrides: Any
) -> Iterator[Cluster]:
    """A router with so many fake workers; ``overrides`` are fields of its configuration."""
    with contextlib.ExitStack() as stack:
        fabric = Fabric()
        prefills = [stack.enter_context(FakeWorker("prefill", fabric)) for _ in range(prefill)]
        decodes = [stack.enter_context(FakeWorker("decode", fabric)) for _ in range(decode)]
        config = make_config(prefills, decodes, **overrides)
        thread = stack.enter_context(ServerThread(lambda: DrainingServer(config)))
        thread.wait_started()
        server = thread.server
        assert isinstance(server, DrainingServer)
        client = stack.enter_context(httpx.Client(base_url=thread.url, timeout=30, trust_env=False))
        if ready:
            wait_until(
                lambda: all(w.healthy for w in server._service.registry.workers.values()),
                what="healthy workers",
            )
        try:
            yield Cluster(prefills, decodes, server, thread.url, client)
        finally:
            for stopping in (thread, *(worker.thread for worker in (*prefills, *decodes))):
                stopping.request_stop()


def make_config(
    prefills: list[FakeWorker], decodes: list[FakeWorker], **overrides: Any
) -> RouterConfig:
    """Configuration for a router over these fakes, with short time-outs."""
    values: dict[str, Any] = {
        "prefill": [{"url": worker.url, "role": "prefill"} for worker in prefills],
        "decode": [{"url": worker.url, "role": "decode"} for worker in decodes],
    }
    for name in FAST.keys() | overrides.keys():
        fast, given = FAST.get(name), overrides.get(name)
        if isinstance(fast, dict) and isinstance(given, dict):
            values[name] = {**fast, **given}
        else:
            values[name] = given if name in overrides else fast
    return parse_router_config(values)
