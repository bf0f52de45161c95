"""What a failed request says of each of its two workers, and what the router does with that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.fakes.cluster import cluster
from tests.fakes.sglang_worker import Faults, wait_until
from tests.integration.test_http_failures import assert_charged, breakers_of
from tpla.core.config.worker import Role
from tpla.router.legs import Leg


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_refused_request_is_a_success_of_both_workers(role: str) -> None:
    with cluster(breaker={"failure_threshold": 2}) as system:
        (worker,) = getattr(system, role)
        for _ in range(2):
            worker.faults = Faults(garbage=True, only=1)
            assert system.complete().status_code == 502
            worker.faults = Faults(delay=1.0)  # the other one refuses it first
            assert system.complete(seed=666).status_code == 400
        assert breakers_of(system) == ["closed", "closed"]


def test_a_failure_of_one_worker_says_nothing_good_of_the_other() -> None:
    with cluster(breaker={"failure_threshold": 2}) as system:
        (prefill,), (decode,) = system.prefill, system.decode
        prefill.faults, decode.faults = Faults(garbage=True), Faults(delay=1.0)
        assert system.complete().status_code == 502
        prefill.faults, decode.faults = Faults(delay=1.0), Faults(garbage=True)
        assert system.complete().status_code == 502
        prefill.faults, decode.faults = Faults(garbage=True), Faults(delay=1.0)
        assert system.complete().status_code == 502
        assert breakers_of(system) == ["open", "closed"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_leg_that_stumbles_over_an_answer_ends_the_request(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = Leg._inspect

    def stumble(leg: Leg, body: Mapping[str, Any]) -> bool:
        if leg.role == role:
            raise RuntimeError("a bug of ours")
        return inspect(leg, body)

    monkeypatch.setattr(Leg, "_inspect", stumble)
    with cluster() as system:
        system.decode[0].faults = Faults(delay=1.0)  # prefill has answered by then
        assert system.complete().status_code == 502
        assert_charged(system, role, "malformed")
        assert system.metric("requests_total", route="/v1/completions", status="502") == 1
        system.wait_quiet()


def test_a_lost_transfer_is_tried_again_without_either_of_its_workers() -> None:
    policies = {"prefill_policy": "cache_aware", "decode_policy": "cache_aware"}
    with cluster(2, 2, retry={"max_retries": 1}, **policies) as system:
        for worker in system.prefill:
            worker.faults = Faults(lose_kv=True)
        assert system.complete("the same beginning " * 50).status_code == 502
        assert [len(worker.seen) for worker in system.workers] == [1, 1, 1, 1]


def test_a_worker_that_went_away_is_checked_at_once_and_once() -> None:
    with cluster(health={"interval_secs": 60}) as system:
        worker = next(w for w in system.service.registry.workers.values() if w.role is Role.DECODE)
        system.decode[0].faults = Faults(die=True)
        assert system.complete().status_code == 502
        wait_until(lambda: not worker.healthy)
        time.sleep(0.3)
        checked = worker.last_check
        time.sleep(0.3)
        assert worker.last_check == checked
