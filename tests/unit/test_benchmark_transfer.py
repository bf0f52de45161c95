"""What reports of KV transfer say: their share of prefill, and when what happens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tpla.benchmarks.transfer_gpu import SYSTEMS, Setup
from tpla.benchmarks.transfer_share import add_shares, times_to_first_token
from tpla.benchmarks.transfer_timeline import Mark, measure, rows_of
from tpla.core.errors import ConfigError
from tpla.workers.transfer.sender import PrefillSender


def prefill_report(ttft_ms: dict[int, float], model: str = "deepseek-v3-attention") -> Any:
    ours = [
        {"system": "tpla-fp8", "model": model, "context": context, "ttft_ms": each}
        for context, each in ttft_ms.items()
    ]
    theirs = [{**row, "system": "sglang-bf16", "ttft_ms": 1.0} for row in ours]
    return {"rows": theirs + ours}


def test_shares_are_of_our_own_prefill_and_a_later_report_replaces_an_earlier_one() -> None:
    times = times_to_first_token(
        [prefill_report({1024: 80, 4096: 200}), prefill_report({1024: 50})]
    )
    rows = [
        {"system": "nccl", "context": 1024, "ms": 1.0},
        {"system": "nccl", "context": 2048, "ms": 1.0},
        {"system": "nccl", "context": 4096, "ms": 3.0},
        {"stage": "gather", "device_us": 84.0},
    ]
    add_shares(rows, times)
    assert [row.get("ttft_pct") for row in rows] == [2.0, None, 1.5, None]


def test_a_report_of_another_model_or_of_decode_is_refused() -> None:
    with pytest.raises(ConfigError, match="kimi-k2-attention; give reports of serving"):
        times_to_first_token([prefill_report({1024: 80}, "kimi-k2-attention")])
    with pytest.raises(ConfigError, match="no row of tpla-fp8 with a TTFT"):
        times_to_first_token([prefill_report({})])


def test_a_timeline_is_the_median_after_the_push_of_what_most_requests_had() -> None:
    marks: list[Mark] = []
    for begun, store in ((1.0, 5), (2.0, 7), (3.0, 6)):
        marks.append((begun, "prefill", "push", "begins"))
        marks += [(begun + each * 1e-6, "decode", "store", "begins") for each in (store, store + 9)]
    marks += [(1.0 + 2e-6, "prefill", "tell", "begins"), (2.5, "decode", "store", "begins")]
    rows = rows_of(marks, [(each, each + 0.1) for each in (1.0, 2.0, 3.0)], 128)
    assert [(row["call"], row["number"], round(row["us"])) for row in rows] == [
        ("push", 1, 0), ("store", 1, 6), ("store", 2, 15)
    ]  # fmt: skip


def test_a_timeline_shows_both_ranks_in_the_order_of_a_transfer() -> None:
    push = PrefillSender.push
    setup = Setup(
        source="cpu", target="cpu", backend="gloo", layers=3, contexts=(128,), repetitions=3
    )
    rows = measure(setup, SYSTEMS[0])
    assert PrefillSender.push is push
    times = {(row["rank"], row["call"], row["edge"]): row["us"] for row in reversed(rows)}
    way = [
        ("prefill", "push", "begins"),
        ("prefill", "chunk", "begins"),
        ("decode", "hear", "returns"),
        ("decode", "receive", "begins"),
        ("decode", "store", "begins"),
        ("decode", "verify", "begins"),
        ("decode", "end of room", "begins"),
    ]
    assert times[way[0]] == 0
    assert all(times[first] < times[then] for first, then in pairwise(way))
    assert times["prefill", "answer", "returns"] > times[way[1]]
