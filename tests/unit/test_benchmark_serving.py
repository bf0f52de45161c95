"""What the serving benchmark asks of each system, and what it makes of a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpla.benchmarks.serving import Plan, Row, _row, add_ratios
from tpla.benchmarks.serving_systems import SYSTEMS
from tpla.core.config import Role

_NEW_TOKENS = 1024


def plan(max_requests: int = 1000) -> Plan:
    limits = (2, (3072,), (0,), 8, 1, max_requests, 1.0, Path("."), (), None)
    return Plan(Role.DECODE, "model", None, *limits)


def row(name: str, asked: int, max_requests: int = 1000) -> Row:
    system = next(system for system in SYSTEMS if system.name == name)
    return _row(system, plan(max_requests), 1, 3072, asked, 10 * (3072 + _NEW_TOKENS))


@pytest.mark.parametrize(
    ("name", "held"),
    [("sglang-bf16", 10), ("tpla-fp8", 10), ("sglang-dp", 20), ("sglang-dcp", 20)],
)
def test_the_largest_batch_fills_every_rank_that_holds_tokens_of_its_own(
    name: str, held: int
) -> None:
    assert row(name, 0).batch == held
    assert row(name, 0, max_requests=7).batch == 7
    assert row(name, 4).batch == 4


def test_ratios_compare_the_same_batch_and_context() -> None:
    base, other, alone = row("sglang-bf16", 4), row("tpla-fp8", 4), row("tpla-fp8", 5)
    base.tokens_per_s, other.tokens_per_s, alone.tokens_per_s = 100.0, 150.0, 90.0
    add_ratios([other, base, alone])
    assert (base.ratio_to_sglang_bf16, other.ratio_to_sglang_bf16) == (1.0, 1.5)
    assert alone.ratio_to_sglang_bf16 is None
    first, second = row("sglang-bf16", 1), row("tpla-fp8", 1)
    first.ttft_ms, second.ttft_ms = 30.0, 20.0
    add_ratios([first, second])
    assert second.ratio_to_sglang_bf16 == 1.5
