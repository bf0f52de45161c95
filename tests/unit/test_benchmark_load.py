"""What the benchmarks make of the times that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpla.benchmarks.half_load import NeverTogether, decode_times
from tpla.benchmarks.load_sweep import Bounds, Load, judge

LOAD = Load("http://nowhere", Path("."), 4, 16, 3, 60.0, 1)


def report(**changes: Any) -> dict[str, Any]:
    percentiles = {
        f"{kind}_{name}_ms": 1.0 for kind in ("median", "p99") for name in ("ttft", "tpot", "itl")
    }
    return {
        "errors": ["", "", "", "connection lost"],
        "ttfts": [0.1, 0.9, 0.1, 0.0],
        "itls": [[0.01, 0.01], [0.01, 0.01], [0.2, 0.01], []],
        "completed": 3,
        "duration": 2.0,
        "request_throughput": 1.5,
        "output_throughput": 4.5,
        **percentiles,
        **changes,
    }


def test_goodput_counts_requests_within_both_bounds() -> None:
    row = judge(report(), LOAD, 2.0, Bounds(ttft_ms=500, tpot_ms=50))
    assert row.goodput_requests_per_s == 0.5  # late first token, slow tokens, and lost: not good
    assert (row.completed, row.failed, row.request_rate) == (3, 1, 2.0)
    assert judge(report(), LOAD, 2.0, Bounds(1000, 200)).goodput_requests_per_s == 1.5


def test_an_answer_of_one_token_has_no_gaps_to_judge() -> None:
    alone = report(errors=[""], ttfts=[0.1], itls=[[]])
    assert judge(alone, LOAD, 1.0, Bounds(500, 1)).goodput_requests_per_s == 0.5


def test_decode_is_timed_while_the_whole_batch_runs() -> None:
    alone = [second / 2 for second in range(28)]
    first = alone + [14.0 + second for second in range(26)]
    late = [10.0 + second for second in range(40)]
    times = decode_times([first, late])
    # Between the late request's fifth token (14 s) and the first one's last (39 s).
    assert times.itl_ms == pytest.approx(1000) and times.steps == 25
    assert times.tokens_per_s == pytest.approx(2)


@pytest.mark.parametrize("late", [19.0, 36.0, 50.0])
def test_requests_that_hardly_ran_together_are_not_timed(late: float) -> None:
    first = [float(second) for second in range(32)]
    with pytest.raises(NeverTogether):
        decode_times([first, [late + second for second in range(32)]])
