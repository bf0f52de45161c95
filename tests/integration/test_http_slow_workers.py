"""Workers that are slow, or cannot be asked for a while: what is held against them, what is not."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.fakes.cluster import Cluster, cluster
from tests.fakes.sglang_worker import FakeWorker, Faults, wait_until
from tests.integration.test_http_failures import assert_charged, breakers_of, error_of, events_of
from tests.integration.test_http_lifecycle import RouterProcess, routed
from tpla.core.config.worker import Role
from tpla.router import registry
from tpla.router.registry import Worker


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_queue_longer_than_the_time_out_is_held_against_no_worker(
    stream: bool, role: str
) -> None:
    """An overload must not become an outage: the workers are well, and idle again afterwards."""
    with cluster(
        2, 2, leg={"first_byte": 0.6}, retry={"max_retries": 5}, breaker={"failure_threshold": 1}
    ) as system:
        crowded = system.prefill if role == "prefill" else system.decode
        for worker in crowded:
            worker.faults = Faults(delay=1.2)
        overdue = stream or role == "prefill"  # an unstreamed decode leg answers when all is done
        for number in range(1, 4):
            answer = system.complete(stream=stream)
            assert answer.status_code == (504 if overdue else 200)
            assert sum(len(worker.seen) for worker in crowded) == number
        if overdue:
            error = error_of(answer)
            assert error["code"] == "worker_timeout"
            assert "within 0.6 s" in error["message"]
            assert "--leg-first-byte-timeout-secs" in error["message"]
        assert breakers_of(system) == ["closed"] * 4
        assert system.metric("retries_total") == 0
        for worker in crowded:
            worker.faults = Faults()
        assert system.complete(stream=stream).status_code == 200


def test_a_long_queue_is_held_against_no_worker_though_its_load_is_not_asked_for() -> None:
    with cluster(
        leg={"first_byte": 0.8}, breaker={"failure_threshold": 1}, health={"load_path": ""}
    ) as system:
        system.prefill[0].faults = Faults(delay=1.6)
        assert system.complete(stream=True).status_code == 504
        assert breakers_of(system) == ["closed", "closed"]
        assert_charged(system, "prefill", "overdue")


def test_a_worker_whose_health_is_silent_too_is_charged_with_a_time_out() -> None:
    with cluster(leg={"first_byte": 0.5}, breaker={"failure_threshold": 1}) as system:
        system.prefill[0].faults = Faults(hang=True, health_delay=5, stopped=True)
        answer = system.complete(stream=True)
        assert (answer.status_code, error_of(answer)["code"]) == (504, "worker_timeout")
        assert breakers_of(system) == ["open", "closed"]
        assert_charged(system, "prefill", "timeout")


def test_a_worker_whose_scheduler_is_silent_is_charged_though_its_server_answers() -> None:
    with cluster(
        leg={"first_byte": 0.8}, breaker={"failure_threshold": 1}, health={"interval_secs": 0.1}
    ) as system:
        system.prefill[0].faults = Faults(hang=True, info_delay=30)
        answer = system.complete(stream=True)
        assert (answer.status_code, error_of(answer)["code"]) == (504, "worker_timeout")
        assert breakers_of(system) == ["open", "closed"]
        assert_charged(system, "prefill", "timeout")


def test_a_worker_that_sends_tokens_is_healthy_though_its_checks_are_late() -> None:
    """Its scheduler is too busy for them, and busy it is with what it was given."""
    checks = {"interval_secs": 0.1, "timeout_secs": 0.4, "failure_threshold": 2}
    with cluster(health=checks) as system:
        system.decode[0].faults = Faults(token_delay=0.05, health_delay=30)
        workers = system.service.registry.workers.values()
        worker = next(worker for worker in workers if worker.role is Role.DECODE)
        before = worker.last_check
        assert events_of(system, max_tokens=60)[-1] == "[DONE]"
        assert worker.last_check != before, "it was not checked meanwhile"
        assert worker.healthy
        wait_until(lambda: not worker.healthy)  # from when it says nothing at all


def test_a_stream_outlives_a_prefill_leg_that_never_ends() -> None:
    with cluster(leg={"first_byte": 0.5}) as system:
        system.prefill[0].faults = Faults(hang_after=0)  # after the KV has landed
        system.decode[0].faults = Faults(token_delay=0.2)
        assert events_of(system, max_tokens=6)[-1] == "[DONE]"
        assert system.metric("leg_failures_total", role="prefill", reason="overdue") == 1
        assert breakers_of(system) == ["closed", "closed"]


NAME = "decode-0.decode"


class Names:
    """A name server that knows :data:`NAME`, and does not answer as often as it is told."""

    def __init__(self) -> None:
        self.silent = 0
        self._resolve = socket.getaddrinfo

    def __call__(self, host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != NAME:
            return self._resolve(host, *args, **kwargs)
        if self.silent:
            self.silent -= 1
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._resolve("127.0.0.1", *args, **kwargs)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    server = Names()
    monkeypatch.setattr(socket, "getaddrinfo", server)
    monkeypatch.setattr(registry, "KEEP_ALIVE_SECONDS", 0.05)  # else checks share a connection
    return server


@contextmanager
def decode_by_name(interval: float) -> Iterator[tuple[Cluster, FakeWorker, Worker]]:
    """A decode worker behind a name, as in Kubernetes."""
    health = {"interval_secs": interval}
    with (
        cluster(1, 0, health=health, retry={"max_retries": 1}) as system,
        FakeWorker("decode", system.prefill[0].fabric) as decode,
    ):
        url = f"http://{NAME}:{decode.thread.port}"
        added = system.client.post("/workers", json={"url": url, "role": "decode"}).json()
        worker = system.service.registry.workers[added["id"]]
        wait_until(lambda: worker.healthy)
        yield system, decode, worker
        decode.thread.request_stop()


def forget_addresses(system: Cluster, worker: Worker) -> None:
    """As they are after some seconds."""
    connector: Any = worker.session.connector
    system.server.servers[0].get_loop().call_soon_threadsafe(connector.clear_dns_cache)


def test_a_name_that_is_not_found_for_a_moment_ends_no_stream(names: Names) -> None:
    with decode_by_name(interval=0.2) as (system, decode, worker):
        decode.faults = Faults(token_delay=0.1)
        body = {"prompt": "a b", "max_tokens": 12, "stream": True}
        with system.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            names.silent = 1
            forget_addresses(system, worker)
            wait_until(lambda: worker.failed_checks, what="a check without an address")
            assert worker.healthy
            assert "cannot connect" in worker.reason
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert worker.healthy and worker.failed_checks == 0


def test_a_name_that_is_not_found_for_a_moment_costs_a_request_one_more_try(names: Names) -> None:
    with decode_by_name(interval=30) as (system, decode, worker):
        time.sleep(0.3)  # until its connections are too old to be used again
        names.silent = 1
        forget_addresses(system, worker)
        assert system.complete().status_code == 200
        assert len(decode.seen) == 1
        assert_charged(system, "decode", "local")
        assert worker.healthy and breakers_of(system) == ["closed", "closed"]


def test_a_router_out_of_descriptors_ends_no_stream() -> None:
    with (
        # More seconds than idle connections stay open: each check needs a connection of its own.
        routed(Faults(token_delay=0.1), "--health-check-interval-secs", "2.5") as (router, _),
        httpx.Client(base_url=router.url, timeout=20, trust_env=False) as asking,
        httpx.Client(base_url=router.url, timeout=20, trust_env=False) as client,
    ):
        assert asking.get("/ready").status_code == 200  # by a connection that stays
        body = {"prompt": "a b", "max_tokens": 50, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            usual = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (3, usual[1]))
            wait_until(lambda: asking.get("/workers").text.count("Too many open files") == 2)
            resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, usual)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert asking.get("/ready").status_code == 200


def test_a_router_may_open_as_many_files_as_the_hard_limit_says() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        with RouterProcess() as router:
            limits = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == (hard, hard)
