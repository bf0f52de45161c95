"""The circuit breaker, with a clock that the test moves."""

from __future__ import annotations

import pytest

from tpla.core.config.router import BreakerPolicy
from tpla.router.breaker import Breaker, BreakerState, Verdict

S, F, N = Verdict.SUCCESS, Verdict.FAILURE, Verdict.NEUTRAL


def make(threshold: int = 3, timeout: float = 10.0) -> Breaker:
    return Breaker(BreakerPolicy(failure_threshold=threshold, timeout_secs=timeout))


def feed(breaker: Breaker, *verdicts: Verdict, now: float = 0.0) -> None:
    for verdict in verdicts:
        breaker.report(verdict, now, trial=breaker.dispatched(now))


@pytest.mark.parametrize(
    ("verdicts", "state"),
    [
        ([], BreakerState.CLOSED),
        ([F, F], BreakerState.CLOSED),
        ([F, F, F], BreakerState.OPEN),
        ([F, F, S, F, F], BreakerState.CLOSED),
        ([F, F, N, F], BreakerState.OPEN),
        ([N] * 10, BreakerState.CLOSED),
    ],
)
def test_failures_in_a_row_open_it(verdicts: list[Verdict], state: BreakerState) -> None:
    breaker = make()
    feed(breaker, *verdicts)
    assert breaker.state(0.0) is state
    assert breaker.allows(0.0) is (state is BreakerState.CLOSED)


def test_after_the_timeout_one_trial_at_a_time() -> None:
    breaker = make()
    feed(breaker, F, F, F)
    assert not breaker.allows(9.9)
    assert breaker.allows(10.0)
    assert breaker.dispatched(10.0)
    assert not breaker.allows(10.0)
    breaker.report(S, 11.0, trial=True)
    assert breaker.state(11.0) is BreakerState.CLOSED


def test_a_failed_trial_opens_it_again_for_the_whole_timeout() -> None:
    breaker = make()
    feed(breaker, F, F, F)
    feed(breaker, F, now=10.0)
    assert not breaker.allows(19.9)
    assert breaker.allows(20.0)


def test_a_neutral_trial_makes_room_for_the_next() -> None:
    breaker = make()
    feed(breaker, F, F, F)
    feed(breaker, N, now=10.0)
    assert breaker.state(10.0) is BreakerState.HALF_OPEN
    assert breaker.allows(10.0)


def test_legs_sent_before_it_opened_change_nothing() -> None:
    breaker = make()
    feed(breaker, F, F, F)
    breaker.report(S, 5.0, trial=False)
    assert breaker.state(5.0) is BreakerState.OPEN
    breaker.report(F, 9.0, trial=False)
    assert breaker.allows(10.0)


def test_reset() -> None:
    breaker = make()
    feed(breaker, F, F, F)
    breaker.reset()
    feed(breaker, F, F)
    assert breaker.state(0.0) is BreakerState.CLOSED
