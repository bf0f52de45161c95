"""Admission, draining, the worker registry and keys, over real HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.fakes.cluster import Cluster, cluster
from tests.fakes.sglang_worker import MODEL, Fabric, FakeWorker, Faults, wait_until
from tpla.core.config.worker import Role


@contextmanager
def busy(system: Cluster, requests: int = 1, **fields: Any) -> Iterator[list[Future[Any]]]:
    """So many requests under way, which end once decode's faults are lifted."""
    with ThreadPoolExecutor(requests) as pool:
        before = system.service.in_flight.count
        sent = [pool.submit(system.complete, **fields) for _ in range(requests)]
        wait_until(lambda: system.service.in_flight.count == before + requests)
        yield sent


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_full_queue_is_429() -> None:
    limits = {"max_concurrent_requests": 1, "queue_size": 1}
    with cluster(admission=limits) as system:
        system.prefill[0].faults = Faults(delay=1.0)
        with busy(system, 2) as sent:
            wait_until(lambda: system.service.admission.queued == 1)
            answer = system.complete()
            assert code_of(answer) == (429, "queue_full")
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert [future.result().status_code for future in sent] == [200, 200]
        system.wait_quiet()


def test_a_long_wait_in_the_queue_is_429() -> None:
    limits = {"max_concurrent_requests": 1, "queue_timeout_secs": 0.2}
    with cluster(admission=limits) as system:
        system.prefill[0].faults = Faults(delay=1.0)
        with busy(system) as sent:
            assert code_of(system.complete()) == (429, "queue_timeout")
            assert sent[0].result().status_code == 200


def test_samples_count_against_the_limit() -> None:
    with cluster(admission={"max_concurrent_requests": 2}) as system:
        assert system.complete(n=2).status_code == 200
        answer = system.complete(n=3)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"


def test_workers_are_added_drained_and_removed() -> None:
    with cluster() as system, FakeWorker("decode", system.prefill[0].fabric) as extra:
        old = f"/workers/{system.client.get('/workers').json()['workers'][1]['id']}"
        system.decode[0].faults = Faults(token_delay=0.2)
        with busy(system) as sent:
            wait_until(lambda: system.decode[0].running == 1)
            body = {"url": extra.url, "role": "decode"}
            added = system.client.post("/workers", json=body)
            assert added.status_code == 201
            path = f"/workers/{added.json()['id']}"
            wait_until(lambda: system.client.get(path).json()["healthy"])
            assert code_of(system.client.post("/workers", json=body)) == (400, "worker_exists")

            assert system.client.delete(old).json()["draining"] is True
            assert system.client.get(old).status_code == 200
            assert system.complete().status_code == 200
            assert (len(system.decode[0].seen), len(extra.seen)) == (1, 1)
            assert sent[0].result().status_code == 200
        wait_until(lambda: system.client.get(old).status_code == 404)
        assert system.complete().status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"url": "ftp://x", "role": "decode"},
        {"url": "http://x:1/path", "role": "decode"},
        {"url": "http://x:1", "role": "king"},
        {"url": "http://x:1", "role": "decode", "foo": 1},
        {"url": "http://x:99999", "role": "decode"},
        {"url": "http://x:1", "role": "prefill", "bootstrap_port": 0},
        {"url": "http://" + "x" * 64 + ":1", "role": "decode"},
        {"url": "http://x..y:1", "role": "decode"},
        {"url": "http://x\ud800:1", "role": "decode"},
        {"url": "http://x y:1", "role": "decode"},
    ],
    ids=range(11),
)
def test_workers_that_cannot_be_added(body: dict[str, Any]) -> None:
    with cluster(prefill=0, decode=0) as system:
        content = json.dumps(body).encode()
        assert system.client.post("/workers", content=content).status_code == 400


def test_a_worker_of_the_wrong_mode_is_refused() -> None:
    with cluster(ready=False) as system:
        wait_until(lambda: system.service.ready)
        with FakeWorker("decode", Fabric(), mode="null") as plain:
            added = system.client.post("/workers", json={"url": plain.url, "role": "decode"})
            path = f"/workers/{added.json()['id']}"
            wait_until(lambda: "disaggregation-mode" in system.client.get(path).json()["reason"])
            assert not system.client.get(path).json()["healthy"]


def test_a_worker_of_another_model_is_refused_until_the_others_are_gone() -> None:
    with cluster() as system, ExitStack() as stack:
        old = system.client.get("/workers").json()["workers"]
        fabric = system.prefill[0].fabric
        new = [
            stack.enter_context(FakeWorker(role, fabric, model="other"))
            for role in ("prefill", "decode")
        ]
        paths = []
        for worker in new:
            body = {"url": worker.url, "role": worker.role}
            paths.append(f"/workers/{system.client.post('/workers', json=body).json()['id']}")
        for path in paths:
            wait_until(lambda path=path: system.client.get(path).json()["last_check"])
            found = system.client.get(path).json()
            assert not found["healthy"] and found["model"] == "other"
            assert f"serves the model 'other', the other workers {MODEL!r}" in found["reason"]
        assert [system.complete(model=MODEL).status_code for _ in range(8)] == [200] * 8
        assert code_of(system.complete(model="other")) == (404, "model_not_found")
        assert not new[0].seen and not new[1].seen

        for worker in old:
            system.client.delete(f"/workers/{worker['id']}")
        wait_until(lambda: all(system.client.get(path).json()["healthy"] for path in paths))
        assert system.complete(model="other").status_code == 200
        for worker in new:
            worker.thread.request_stop()


def test_a_router_names_the_model_that_is_served_though_another_is_listed_first() -> None:
    fabric = Fabric()
    with cluster(0, 0) as system, ExitStack() as stack:
        sent = [("prefill", "other"), ("prefill", MODEL), ("decode", MODEL)]
        workers = [stack.enter_context(FakeWorker(role, fabric, model=name)) for role, name in sent]
        workers[0].faults = Faults(health_status=503)
        for worker in workers:
            system.client.post("/workers", json={"url": worker.url, "role": worker.role})
        wait_until(lambda: system.client.get("/ready").status_code == 200)
        workers[0].faults = Faults()
        listed = system.service.registry.workers["prefill-1"]
        wait_until(lambda: listed.model == "other")
        assert system.complete(model=MODEL).status_code == 200
        assert not workers[0].seen
        for worker in workers:
            worker.thread.request_stop()


def test_an_unhealthy_worker_is_left_alone_until_it_recovers() -> None:
    with cluster(health={"interval_secs": 0.05, "failure_threshold": 2}) as system:
        system.decode[0].faults = Faults(health_status=503)
        wait_until(lambda: system.client.get("/ready").status_code == 503)
        assert code_of(system.complete()) == (503, "no_worker")
        system.decode[0].faults = Faults()
        wait_until(lambda: system.client.get("/ready").status_code == 200)
        assert system.complete().status_code == 200


def test_a_worker_that_comes_back_too_busy_to_say_its_port_keeps_the_one_it_said() -> None:
    health = {"interval_secs": 0.05, "timeout_secs": 0.2, "failure_threshold": 1}
    with cluster(health=health) as system:
        worker = system.prefill[0]
        known = next(w for w in system.service.registry.workers.values() if w.role is Role.PREFILL)
        wait_until(lambda: known.healthy)
        worker.faults = Faults(health_status=503)
        wait_until(lambda: not known.healthy)
        worker.faults = Faults(info_delay=1.0)
        worker.instance_id = "second"
        wait_until(lambda: known.healthy)
        assert known.reported_bootstrap_port == worker.bootstrap_port
        worker.faults = Faults()
        wait_until(lambda: known.instance_id == "second")  # asked again though it is healthy


def test_a_new_process_at_an_old_address_starts_afresh() -> None:
    with cluster(health={"interval_secs": 0.05, "failure_threshold": 1}) as system:
        worker = system.decode[0]
        wait_until(lambda: system.service.ready)
        worker.instance_id = "first"
        worker.faults = Faults(health_status=503)
        wait_until(lambda: not system.service.ready)
        worker.faults = Faults()
        wait_until(lambda: system.service.ready)
        listed = system.client.get("/workers").json()["workers"]
        assert listed[1]["instance_id"] == "first"


def test_keys() -> None:
    with cluster(api_key="s3cret") as system:
        for path in ("/health", "/liveness", "/ready", "/metrics"):
            assert system.client.get(path).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"},
                        {"authorization": "Bearer ä".encode("latin-1")}):  # fmt: skip
            for method, path in (("POST", "/v1/completions"), ("GET", "/workers"),
                                 ("POST", "/workers"), ("DELETE", "/workers/x"),
                                 ("GET", "/v1/models")):  # fmt: skip
                answer = system.client.request(method, path, headers=headers)
                assert code_of(answer) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        system.client.headers["authorization"] = "Bearer s3cret"
        assert system.complete().status_code == 200
        assert "s3cret" not in system.decode[0].seen[0].headers.get("authorization", "")


def test_the_key_of_the_workers_is_presented_to_them() -> None:
    with cluster(worker_api_key="w0rker") as system:
        for worker in system.workers:
            worker.api_key = "w0rker"
        assert system.complete().status_code == 200


class RouterProcess:
    """``tpla router`` as a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tpla.core.cli import main; main()", "router",
             "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "TPLA_API_KEY": ""},
        )  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._listening.wait(60), self.lines
        host, port = next(x for x in self.lines if x["event"] == "listening")["addresses"][0]
        self.url = f"http://{host}:{port}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line) if line.startswith("{") else {"event": line})
            if self.lines[-1]["event"] == "listening":
                self._listening.set()

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        self._reader.join(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def routed(faults: Faults, *flags: str) -> Iterator[tuple[RouterProcess, FakeWorker]]:
    """A router that is ready, over a prefill worker and the decode worker with ``faults``."""
    fabric = Fabric()
    with (
        FakeWorker("prefill", fabric) as prefill,
        FakeWorker("decode", fabric, faults) as decode,
        RouterProcess("--prefill", prefill.url, "--decode", decode.url, *flags) as router,
    ):
        wait_until(lambda: httpx.get(f"{router.url}/ready").status_code == 200)
        yield router, decode


def test_sigterm_drains_and_exits_with_zero() -> None:
    fabric = Fabric()
    with (
        FakeWorker("prefill", fabric) as prefill,
        FakeWorker("decode", fabric) as decode,
        RouterProcess("--prefill", prefill.url, "8997", "--decode", decode.url,
                      "--health-check-interval-secs", "0.2") as router,
        httpx.Client(base_url=router.url, timeout=20, trust_env=False) as client,
        ThreadPoolExecutor(1) as pool,
    ):  # fmt: skip
        wait_until(lambda: client.get("/ready").status_code == 200)
        decode.faults = Faults(token_delay=0.3)
        body = {"prompt": "a b c", "max_tokens": 5, "stream": True}
        sent = pool.submit(httpx.post, f"{router.url}/v1/completions", json=body, timeout=20)
        wait_until(lambda: decode.running == 1)
        assert decode.seen[0].body["bootstrap_port"] == 8997
        router.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)
        assert client.get("/liveness").status_code == 200
        assert code_of(client.post("/v1/completions", json=body)) == (503, "shutting_down")
        assert sent.result().text.endswith("data: [DONE]\n\n")
        assert router.process.wait(10) == 0
    (line,) = [x for x in router.lines if x["event"] == "request" and x["status"] == 200]
    assert line["request_id"].startswith("req-")
    assert {"received", "dispatched", "first_token", "finished"} <= line["phases_ms"].keys()


@contextmanager
def draining(system: Cluster) -> Iterator[None]:
    """A router that was told to end while it serves a request."""
    system.decode[0].faults = Faults(token_delay=0.2)
    with busy(system, max_tokens=12) as sent:
        system.server.handle_exit(signal.SIGTERM, None)
        yield
    assert sent[0].result().status_code == 200


def test_each_answer_of_a_draining_router_ends_its_connection() -> None:
    """Else a client's retries stay with it, on the connection that the client has kept."""
    with cluster() as system:
        assert "connection" not in system.client.get("/ready").headers
        with draining(system):
            refused = system.complete()
            assert code_of(refused) == (503, "shutting_down")
            answers = [system.client.get(path) for path in ("/liveness", "/ready", "/nowhere")]
            assert [answer.status_code for answer in answers] == [200, 503, 404]
            assert {answer.headers["connection"] for answer in (refused, *answers)} == {"close"}


def test_a_draining_router_takes_the_whole_body_before_it_refuses() -> None:
    """Else the rest of the body meets a closed connection, and the client sees that alone."""
    with cluster() as system, draining(system):
        address = ("127.0.0.1", httpx.URL(system.url).port or 0)
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n"
            )
            for part in (b'{"prompt"', b":", b'"abc"}'):
                time.sleep(0.1)
                client.sendall(part)
            with client.makefile("rb") as answer:
                content = answer.read()
    assert content.startswith(b"HTTP/1.1 503") and b"shutting_down" in content


def test_the_grace_period_ends_with_an_error_event_not_a_silent_cut() -> None:
    with (
        routed(Faults(hang_after=1), "--shutdown-grace-period-secs", "0.5") as (router, decode),
        ThreadPoolExecutor(1) as pool,
    ):
        body = {"prompt": "a b c", "max_tokens": 5, "stream": True}
        sent = pool.submit(httpx.post, f"{router.url}/v1/completions", json=body, timeout=20)
        wait_until(lambda: decode.running == 1)
        router.process.send_signal(signal.SIGTERM)
        text = sent.result().text
        assert '"code": "shutting_down"' in text and "[DONE]" not in text
        assert router.process.wait(10) == 0
        assert len(decode.aborted) == 1


def test_help_lists_the_flags() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tpla.core.cli import main; main()", "router", "--help"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for flag in ("--prefill", "--decode", "--shutdown-grace-period-secs", "[/health]"):
        assert flag in done.stdout


def test_flags_that_cannot_be_used_exit_with_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tpla.core.cli import main; main()", "router",
         "--prefill", "nonsense"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "prefill.0.url='nonsense'" in done.stderr and "write http://HOST:PORT" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_that_comes_back_at_another_address_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a pod behind a stable name: first there is none, then it stands elsewhere."""
    addresses: list[str] = []
    resolve = socket.getaddrinfo

    def by_name(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "prefill-0.prefill":
            return resolve(host, *args, **kwargs)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(addresses[-1], *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", by_name)
    with cluster() as system:
        registry = system.service.registry
        (by_address,) = (w for w in registry.workers.values() if w.role is Role.PREFILL)
        system.client.delete(f"/workers/{by_address.id}")
        url = f"http://prefill-0.prefill:{system.prefill[0].thread.port}"
        system.client.post("/workers", json={"url": url, "role": "prefill"})
        (worker,) = (w for w in registry.workers.values() if w.role is Role.PREFILL)
        wait_until(lambda: worker.failed_checks, what="a check without an address")
        assert system.client.get("/ready").status_code == 503
        addresses.append("127.0.0.9")  # where nothing listens
        wait_until(lambda: "127.0.0.9" in worker.reason, what="a check at the first address")
        addresses.append("127.0.0.1")
        wait_until(lambda: worker.healthy, timeout=20.0, what="the second address")
        assert system.complete().status_code == 200
