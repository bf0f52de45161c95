"""Legs that fail: who is charged, what the client sees, and that nothing is left running."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.cluster import Cluster, cluster
from tests.fakes.sglang_worker import MODEL, Faults, wait_until


def events_of(system: Cluster, **fields: Any) -> list[str]:
    """Data of each event of a streamed completion."""
    answer = system.complete(stream=True, **fields)
    assert answer.status_code == 200, answer.text
    return [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The nested error object."""
    body = answer.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return body["error"]


def listens(url: str) -> bool:
    """Whether a connection is accepted."""
    try:
        httpx.get(f"{url}/health", timeout=2, trust_env=False)
    except httpx.ConnectError:
        return False
    return True


def breakers_of(system: Cluster) -> list[str]:
    """State of each worker's breaker, prefill workers first."""
    return [w["breaker"] for w in system.client.get("/workers").json()["workers"]]


def assert_charged(system: Cluster, role: str, reason: str) -> None:
    """Exactly one leg was charged, and the other role's breaker saw nothing."""
    assert system.metric("leg_failures_total", role=role, reason=reason) == 1
    samples = [
        sample
        for metric in system.service.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "tpla_router_leg_failures_total"
    ]
    assert sum(sample.value for sample in samples) == 1, samples


@pytest.mark.parametrize("stream", [False, True])
def test_prefill_error_cancels_decode_and_is_charged_to_prefill(stream: bool) -> None:
    with cluster() as system:
        system.prefill[0].faults = Faults(status=500, delay=0.3)  # decode has the request by then
        answer = system.complete(stream=stream)
        assert answer.status_code == 502
        assert error_of(answer)["code"] == "worker_failed"
        system.wait_quiet()
        assert_charged(system, "prefill", "status")
        (decode,) = system.decode[0].seen
        wait_until(lambda: system.decode[0].aborted == [decode.body["rid"]])
        assert decode.outcome in ("disconnected", "running")
        assert system.prefill[0].aborted == []


def test_prefill_death_aborts_decode() -> None:
    with cluster() as system:
        system.prefill[0].faults = Faults(die=True)
        answer = system.complete(stream=True)
        assert answer.status_code == 502
        system.wait_quiet()
        assert_charged(system, "prefill", "disconnected")
        wait_until(lambda: len(system.decode[0].aborted) == 1)
        wait_until(lambda: system.client.get("/ready").status_code == 503)


def test_decode_error_cancels_prefill_and_is_charged_to_decode() -> None:
    with cluster() as system:
        system.prefill[0].faults = Faults(delay=20)
        system.decode[0].faults = Faults(status=500)
        answer = system.complete()
        assert answer.status_code == 502
        assert_charged(system, "decode", "status")
        wait_until(lambda: len(system.prefill[0].aborted) == 1)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(die_after=2, token_delay=0.1), "disconnected"),
        (Faults(truncate_after=2, token_delay=0.1), "truncated"),
        (Faults(error_after=2, token_delay=0.1), "status"),
        (Faults(abort_after=2, token_delay=0.1), "aborted"),
        (Faults(hang_after=2), "timeout"),
    ],
    ids=["dies", "truncates", "reports", "aborts", "hangs"],
)
def test_decode_failing_mid_stream_is_an_error_event(faults: Faults, reason: str) -> None:
    with cluster(leg={"idle": 0.5}) as system:
        system.decode[0].faults = faults
        events = events_of(system, max_tokens=4)
        assert "[DONE]" not in events
        assert json.loads(events[0])["choices"][0]["text"] == "one "
        error = json.loads(events[-1])["error"]
        assert error["type"] == "upstream_error"
        assert all("error" not in json.loads(event) for event in events[:-1])
        system.wait_quiet()
        assert_charged(system, "decode", reason)


@pytest.mark.parametrize("gap", [0.0, 1.0], ids=["leg", "health check"])
def test_a_dead_worker_is_charged_the_same_whoever_notices_first(gap: float) -> None:
    with cluster() as system:
        system.decode[0].faults = Faults(hang_after=1)
        body = {"prompt": "a b", "max_tokens": 4, "stream": True}
        with system.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            system.decode[0].kill(gap)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "worker_failed"
        assert_charged(system, "decode", "disconnected")


def test_openai_client_raises_on_a_mid_stream_failure() -> None:
    with cluster() as system:
        system.decode[0].faults = Faults(truncate_after=1, token_delay=0.1)
        with openai.OpenAI(base_url=f"{system.url}/v1", api_key="x", max_retries=0) as client:
            stream = client.completions.create(model=MODEL, prompt="a b", max_tokens=4, stream=True)
            with pytest.raises(openai.APIError, match="ended its answer early"):
                list(stream)


@pytest.mark.parametrize(
    ("faults", "status", "code"),
    [
        (Faults(abort_after=0), 502, "request_aborted"),
        (Faults(error_after=0), 502, "worker_failed"),
        (Faults(truncate_after=0), 502, "worker_failed"),
        (Faults(garbage=True), 502, "worker_failed"),
        (Faults(status=503), 503, "engine_full"),
        (Faults(status=429), 503, "engine_full"),
        (Faults(status=401), 502, "worker_failed"),
        (Faults(hang=True), 504, "worker_timeout"),
    ],
)
def test_decode_failing_before_its_first_token_has_a_status(
    faults: Faults, status: int, code: str
) -> None:
    with cluster(leg={"first_byte": 0.5}) as system:
        system.decode[0].faults = faults
        answer = system.complete(stream=True)
        assert (answer.status_code, error_of(answer)["code"]) == (status, code)
        assert ("retry-after" in answer.headers) == (status == 503)


def test_an_unstreamed_abort_is_not_a_200() -> None:
    with cluster() as system:
        system.decode[0].faults = Faults(abort_after=0)
        answer = system.chat()
        assert answer.status_code == 502
        assert error_of(answer)["code"] == "request_aborted"


def test_a_lost_kv_transfer_is_counted() -> None:
    with cluster() as system:
        system.prefill[0].faults = Faults(lose_kv=True)
        answer = system.chat(stream=True)
        assert (answer.status_code, error_of(answer)["code"]) == (502, "kv_transfer_failed")
        assert system.metric("kv_transfer_failures_total") == 1


def test_a_dead_prefill_is_charged_though_decode_complains_first() -> None:
    with cluster(leg={"settle": 3.0}) as system:
        system.prefill[0].faults = Faults(delay=0.5, die=False, hang=True)
        system.decode[0].faults = Faults(status=500, message="KVTransferError(peer lost)")
        system.prefill[0].thread.loop.call_soon_threadsafe(
            system.prefill[0].thread.loop.call_later, 1.0, system.prefill[0]._die
        )
        assert system.complete().status_code == 502
        assert_charged(system, "prefill", "disconnected")


def test_prefill_dying_after_the_kv_landed_does_not_end_the_stream() -> None:
    with cluster() as system:
        # The KV lands first, then prefill hangs instead of answering, then dies.
        system.prefill[0].faults = Faults(hang_after=0)
        system.decode[0].faults = Faults(token_delay=0.1)
        with system.client.stream(
            "POST", "/v1/completions", json={"prompt": "a b", "max_tokens": 5, "stream": True}
        ) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            system.prefill[0].kill()
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert_charged(system, "prefill", "disconnected")


def test_a_client_error_is_relayed_and_counts_as_success() -> None:
    with cluster(breaker={"failure_threshold": 1}) as system:
        for _ in range(3):
            answer = system.complete(seed=666)
            assert answer.status_code == 400
            assert error_of(answer)["message"] == "seed 666 is not allowed"
        assert breakers_of(system) == ["closed", "closed"]
        assert system.complete().status_code == 200


def test_too_long_a_prompt() -> None:
    with cluster() as system:
        error = error_of(system.complete("long " * 1000))
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "invalid_request_error"


def test_busy_workers_do_not_open_breakers() -> None:
    with cluster(breaker={"failure_threshold": 1}) as system:
        system.decode[0].faults = Faults(status=503)
        for _ in range(3):
            assert system.complete().status_code == 503
        system.decode[0].faults = Faults()
        assert system.complete().status_code == 200


def test_an_open_breaker_is_not_dispatched_to_and_recovers() -> None:
    with cluster(breaker={"failure_threshold": 2, "timeout_secs": 1.0}) as system:
        system.decode[0].faults = Faults(garbage=True)
        for _ in range(2):
            assert system.complete().status_code == 502
        seen = len(system.decode[0].seen)
        answer = system.complete()
        assert (answer.status_code, error_of(answer)["code"]) == (503, "no_worker")
        assert len(system.decode[0].seen) == seen
        assert breakers_of(system) == ["closed", "open"]
        system.decode[0].faults = Faults()
        time.sleep(1.1)
        assert system.complete().status_code == 200


@pytest.mark.parametrize(
    "faults", [Faults(status=500), Faults(abort_after=0)], ids=["status", "aborted"]
)
def test_a_worker_whose_failures_others_make_good_is_left_alone(faults: Faults) -> None:
    breaker = {"failure_threshold": 2, "timeout_secs": 1.0}
    retry = {"max_retries": 1}
    with cluster(1, 2, breaker=breaker, retry=retry, decode_policy="round_robin") as system:
        sick = system.decode[0]
        sick.faults = faults
        for _ in range(8):
            assert system.complete(stream=True).status_code == 200
        assert len(sick.seen) == 2
        assert breakers_of(system) == ["closed", "open", "closed"]
        time.sleep(1.1)
        for _ in range(4):  # its trial fails, and it is left alone again
            assert system.complete(stream=True).status_code == 200
        assert len(sick.seen) == 3
        assert breakers_of(system) == ["closed", "open", "closed"]
        time.sleep(1.1)
        sick.faults = Faults()
        for _ in range(4):
            assert system.complete(stream=True).status_code == 200
        assert breakers_of(system) == ["closed"] * 3


@pytest.mark.parametrize(
    "faults", [Faults(status=500), Faults(abort_after=0)], ids=["status", "aborted"]
)
def test_requests_that_fail_everywhere_open_no_breaker(faults: Faults) -> None:
    breaker = {"failure_threshold": 2}
    with cluster(3, 3, breaker=breaker, retry={"max_retries": 5}) as system:
        for worker in system.decode:
            worker.faults = faults
        for _ in range(20):
            assert system.complete(stream=True).status_code == 502
        assert breakers_of(system) == ["closed"] * 6
        for worker in system.decode:
            worker.faults = Faults()
        assert system.complete(stream=True).status_code == 200


def test_an_error_in_a_stream_that_has_begun_is_charged_at_once() -> None:
    with cluster(breaker={"failure_threshold": 1}) as system:
        system.decode[0].faults = Faults(error_after=1, token_delay=0.1)
        assert "error" in events_of(system)[-1]
        assert breakers_of(system) == ["closed", "open"]


def test_a_trial_that_fails_with_nobody_to_do_better_is_followed_by_another() -> None:
    with cluster(breaker={"failure_threshold": 1, "timeout_secs": 0.3}) as system:
        system.decode[0].faults = Faults(garbage=True)
        assert system.complete().status_code == 502
        time.sleep(0.4)
        system.decode[0].faults = Faults(status=500, only=2)
        for status in (502, 502, 200):
            assert system.complete().status_code == status
        assert breakers_of(system) == ["closed", "closed"]


LOST_PEER = "Decode transfer failed for request rank=0: KVTransferError(prefill rank x is gone)"


def test_a_prefill_worker_that_decode_saw_go_is_charged_and_no_more_than_three_are_tried() -> None:
    breaker = {"failure_threshold": 1}
    with cluster(5, 1, breaker=breaker, retry={"max_retries": 5}, leg={"settle": 0.05}) as system:
        for worker in system.prefill:
            worker.faults = Faults(hang=True)
        system.decode[0].faults = Faults(status=500, message=LOST_PEER, delay=0.1)
        answer = system.complete()
        assert (answer.status_code, error_of(answer)["code"]) == (502, "kv_transfer_failed")
        assert sorted(len(worker.seen) for worker in system.prefill) == [0, 0, 1, 1, 1]
        assert sorted(breakers_of(system)[:5]) == ["closed"] * 2 + ["open"] * 3
        assert breakers_of(system)[5:] == ["closed"]
        assert system.metric("leg_failures_total", role="prefill", reason="kv_transfer") == 3


def test_a_decode_worker_that_prefill_saw_go_is_charged() -> None:
    with cluster(breaker={"failure_threshold": 1}, leg={"settle": 0.05}) as system:
        message = "Prefill transfer failed: KVTransferError(decode rank y is gone)"
        system.prefill[0].faults = Faults(status=500, message=message, delay=0.1)
        system.decode[0].faults = Faults(hang=True)
        assert system.complete().status_code == 502
        assert breakers_of(system) == ["closed", "open"]


def test_retry_uses_another_pair() -> None:
    with cluster(decode=2, retry={"max_retries": 2}) as system:
        system.decode[0].faults = Faults(status=500)
        for _ in range(4):
            assert system.complete(stream=True, max_tokens=2).status_code == 200
        assert system.metric("retries_total") == len(system.decode[0].seen) > 0


def test_retry_uses_fresh_ids_and_rooms() -> None:
    with cluster(retry={"max_retries": 3}) as system:
        system.decode[0].faults = Faults(status=500, only=2)
        assert system.complete().status_code == 200
        bodies = [item.body for item in system.decode[0].seen]
        assert len({body["rid"] for body in bodies}) == 3
        assert len({body["bootstrap_room"] for body in bodies}) == 3


def test_retries_are_bounded() -> None:
    with cluster(retry={"max_retries": 2}) as system:
        system.prefill[0].faults = Faults(status=500)
        assert system.complete().status_code == 502
        assert len(system.prefill[0].seen) == 3


@pytest.mark.parametrize(
    ("faults", "status"),
    [
        (Faults(die=True), 502),
        (Faults(hang=True, health_delay=5, stopped=True), 504),
        (Faults(status=500), 502),
    ],
    ids=["went away", "fell silent", "failed"],
)
def test_a_request_that_ends_workers_is_not_given_to_all_of_them(
    faults: Faults, status: int
) -> None:
    retry = {"max_retries": 5, "max_lost_workers": 2}
    with cluster(prefill=5, retry=retry, leg={"first_byte": 0.3}) as system:
        for worker in system.prefill:
            worker.faults = replace(faults, only=1)
        assert system.complete().status_code == status
        assert [len(worker.seen) for worker in system.prefill].count(1) == 2
        assert system.client.get("/ready").status_code == 200


def test_a_stream_that_has_begun_is_not_retried() -> None:
    with cluster(retry={"max_retries": 5}) as system:
        system.decode[0].faults = Faults(truncate_after=1, token_delay=0.1)
        assert "error" in events_of(system)[-1]
        assert len(system.decode[0].seen) == 1


def test_a_dead_worker_is_left_alone_at_once_and_comes_back() -> None:
    with cluster(decode=2, retry={"max_retries": 2}, health={"interval_secs": 30}) as system:
        system.decode[0].kill()
        for _ in range(4):
            assert system.complete().status_code == 200
        listed = system.client.get("/workers").json()["workers"]
        assert [w["healthy"] for w in listed] == [True, False, True]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stopped_worker_does_not_hold_requests_until_their_deadline(role: str) -> None:
    health = {"interval_secs": 0.1, "timeout_secs": 0.3, "failure_threshold": 2}
    with cluster(2, 2, health=health, retry={"max_retries": 1}) as system:
        stopped = (system.prefill if role == "prefill" else system.decode)[0]
        stopped.faults = Faults(hang=True, health_delay=5, stopped=True)
        begin = time.monotonic()
        for _ in range(2):
            assert system.complete(stream=False).status_code == 200
        assert time.monotonic() - begin < 5
        assert len(stopped.aborted) == len(stopped.seen) == 1


def test_a_request_on_a_vanished_host_starts_over_though_another_noticed_first() -> None:
    health = {"interval_secs": 20.0, "timeout_secs": 0.3, "failure_threshold": 1}
    retry = {"max_retries": 3}
    with (
        cluster(1, 2, retry=retry, health=health, decode_policy="round_robin") as system,
        ThreadPoolExecutor(2) as pool,
    ):
        vanished = system.decode[0]
        vanished.faults = Faults(hang=True)
        held = [pool.submit(system.complete) for _ in range(2)]  # one on either decode worker
        wait_until(lambda: vanished.seen)
        begin = time.monotonic()
        vanished.faults = Faults(hang=True, health_delay=15, stopped=True)
        vanished.kill(gap=15)  # nothing listens, and open connections stay silent
        wait_until(lambda: not listens(vanished.url))
        registry = system.service.registry
        worker = next(w for w in registry.workers.values() if w.address.url == vanished.url)
        # As a leg does that could not connect.
        loop = system.server.servers[0].get_loop()
        loop.call_soon_threadsafe(registry.unreachable, worker, "cannot connect")
        assert [answer.result().status_code for answer in held] == [200, 200]
        assert time.monotonic() - begin < 10


def test_a_busy_scheduler_keeps_what_it_is_working_on() -> None:
    health = {"interval_secs": 0.1, "timeout_secs": 0.2, "failure_threshold": 2}
    with cluster(health=health) as system, ThreadPoolExecutor(1) as pool:
        system.decode[0].faults = Faults(delay=2.0, health_delay=5)
        answer = pool.submit(system.complete)
        wait_until(lambda: system.client.get("/ready").status_code == 503)
        assert answer.result().status_code == 200


def test_no_worker_is_503() -> None:
    with cluster(prefill=0, decode=0) as system:
        answer = system.chat()
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "no_worker"
        assert system.client.get("/ready").status_code == 503
        assert system.client.get("/health").status_code == 200


def test_the_whole_request_is_bounded() -> None:
    with cluster(request_timeout_secs=0.5) as system:
        system.decode[0].faults = Faults(hang=True)
        answer = system.chat()
        assert (answer.status_code, error_of(answer)["code"]) == (504, "request_timeout")
        wait_until(lambda: len(system.decode[0].aborted) == 1)
        assert breakers_of(system) == ["closed", "closed"]
        system.wait_quiet()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_leaving_before_the_first_token_aborts_both_legs(stream: bool) -> None:
    with cluster() as system:
        system.prefill[0].faults = Faults(delay=15)
        leave_after(system, stream=stream, first=0)
        wait_until(lambda: len(system.prefill[0].aborted) == 1)
        wait_until(lambda: len(system.decode[0].aborted) == 1)
        wait_until(lambda: system.service.in_flight.count == 0)
        assert system.metric("client_disconnects_total", when="before_first_token") == 1
        system.prefill[0].faults = Faults()
        begin = time.monotonic()
        assert system.complete().status_code == 200
        assert time.monotonic() - begin < 2


def test_a_client_leaving_mid_stream_aborts_decode() -> None:
    with cluster() as system:
        system.decode[0].faults = Faults(token_delay=0.05)
        leave_after(system, stream=True, first=1)
        wait_until(lambda: len(system.decode[0].aborted) == 1)
        system.wait_quiet()
        assert system.decode[0].seen[0].outcome == "disconnected"
        assert system.metric("client_disconnects_total", when="mid_stream") == 1
        assert system.metric("leg_failures_total", role="decode", reason="disconnected") == 0


def test_one_failed_sample_of_many_ends_all() -> None:
    with cluster() as system:
        system.decode[0].faults = Faults(status=500, only=1)
        answer = system.complete(n=4)
        assert answer.status_code == 502
        system.wait_quiet()


def leave_after(system: Cluster, *, stream: bool, first: int) -> None:
    """Send a request, take ``first`` pieces of the answer, and close the connection."""
    body = json.dumps({"prompt": "a b c", "max_tokens": 200, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(system.url).port or 0)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        wait_until(lambda: system.decode[0].seen)
        for _ in range(first):
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
