"""Workers that are slow, or cannot be asked for a while: what is held against them, what is not."""

from __future__ import annotations

import pytest

from tests.fakes.cluster import cluster
from tests.fakes.sglang_worker import Faults
from tests.integration.test_http_failures import assert_charged, breakers_of, error_of, events_of


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


def test_a_worker_whose_health_is_silent_too_is_charged_with_a_time_out() -> None:
    with cluster(leg={"first_byte": 0.5}, breaker={"failure_threshold": 1}) as system:
        system.prefill[0].faults = Faults(hang=True, health_delay=5, stopped=True)
        answer = system.complete(stream=True)
        assert (answer.status_code, error_of(answer)["code"]) == (504, "worker_timeout")
        assert breakers_of(system) == ["open", "closed"]
        assert_charged(system, "prefill", "timeout")


def test_a_stream_outlives_a_prefill_leg_that_never_ends() -> None:
    with cluster(leg={"first_byte": 0.5}) as system:
        system.prefill[0].faults = Faults(hang_after=0)  # after the KV has landed
        system.decode[0].faults = Faults(token_delay=0.2)
        assert events_of(system, max_tokens=6)[-1] == "[DONE]"
        assert system.metric("leg_failures_total", role="prefill", reason="overdue") == 1
        assert breakers_of(system) == ["closed", "closed"]
