"""What a report of KV transfer says beside one of prefill."""

from __future__ import annotations

from typing import Any

import pytest

from tpla.benchmarks.transfer_share import add_shares, times_to_first_token
from tpla.core.errors import ConfigError


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
