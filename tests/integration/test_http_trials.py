"""Trials of workers whose breaker is half open."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.fakes.cluster import cluster
from tests.fakes.sglang_worker import Faults, wait_until
from tests.integration.test_http_failures import breakers_of, events_of


@pytest.mark.parametrize(
    ("route", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ],
)
def test_a_long_stream_as_a_trial_keeps_no_others_out(route: str, prompt: dict[str, Any]) -> None:
    with cluster(breaker={"failure_threshold": 1, "timeout_secs": 0.5}) as system:
        decode = system.decode[0]
        decode.faults = Faults(error_after=1, token_delay=0.1, only=1)
        assert "error" in events_of(system)[-1]
        assert breakers_of(system) == ["closed", "open"]
        time.sleep(0.6)
        decode.faults = Faults(token_delay=0.05, only=1)
        body = {**prompt, "max_tokens": 1000, "stream": True}
        with system.client.stream("POST", route, json=body) as trial:
            lines = trial.iter_lines()
            wait_until(lambda: next(lines) and breakers_of(system)[1] == "closed", what="a proof")
            assert system.complete().status_code == 200
            assert decode.running == 1
        system.wait_quiet()


def test_a_trial_that_fails_at_decodes_first_step_leaves_the_worker_alone_again() -> None:
    with cluster(breaker={"failure_threshold": 3, "timeout_secs": 0.5}) as system:
        system.decode[0].faults = Faults(error_after=1, token_delay=0.1)
        for _ in range(3):
            assert "error" in events_of(system)[-1]
        time.sleep(0.6)
        assert "error" in events_of(system)[-1]
        assert breakers_of(system) == ["closed", "open"]
