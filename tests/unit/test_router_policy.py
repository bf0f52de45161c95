"""Policies as functions of a snapshot, and the prefix tree that feeds one of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tpla.core.config.router import CacheAwarePolicy, Policy
from tpla.core.config.worker import Role
from tpla.core.errors import NoWorker
from tpla.router.policy import Snapshot, WorkerView, choose
from tpla.router.prefix_tree import CHUNK_CHARS, PrefixTree

P, D = Role.PREFILL, Role.DECODE


def fleet(*active: int) -> list[WorkerView]:
    return [WorkerView(id=f"d{i}", role=D, active=n) for i, n in enumerate(active)]


def rng() -> random.Random:
    return random.Random(0)


def chosen(policy: Policy, workers: list[WorkerView], times: int = 1) -> list[str]:
    chance = rng()
    return [choose(policy, D, Snapshot(workers, turn), chance) for turn in range(times)]


def test_round_robin_takes_turns() -> None:
    assert chosen(Policy.ROUND_ROBIN, fleet(9, 0, 5), 4) == ["d0", "d1", "d2", "d0"]


def test_random_reaches_all() -> None:
    counts = Counter(chosen(Policy.RANDOM, fleet(0, 0, 0), 300))
    assert set(counts) == {"d0", "d1", "d2"} and min(counts.values()) > 60


def test_power_of_two_never_takes_the_busiest_of_three() -> None:
    counts = Counter(chosen(Policy.POWER_OF_TWO, fleet(9, 0, 5), 300))
    assert counts["d0"] == 0 and counts["d1"] > counts["d2"] > 0


def test_power_of_two_with_one_worker() -> None:
    assert chosen(Policy.POWER_OF_TWO, fleet(9)) == ["d0"]


def test_least_loaded_and_equals_take_turns() -> None:
    assert chosen(Policy.LEAST_LOADED, fleet(3, 1, 2)) == ["d1"]
    assert chosen(Policy.LEAST_LOADED, fleet(1, 0, 0, 0), 4)[1:] == ["d1", "d2", "d3"]


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_respects_eligibility(policy: Policy) -> None:
    workers = [
        WorkerView("sick", D, healthy=False),
        WorkerView("leaving", D, draining=True),
        WorkerView("broken", D, admitted=False),
        WorkerView("prefill", P),
        WorkerView("good", D, active=1000),
    ]
    matches = {"sick": 1.0, "leaving": 1.0, "broken": 1.0, "prefill": 1.0}
    for turn in range(10):
        assert choose(policy, D, Snapshot(workers, turn, matches), rng()) == "good"


@pytest.mark.parametrize("policy", Policy)
def test_a_choice_depends_on_its_arguments_alone(policy: Policy) -> None:
    snapshot = Snapshot(fleet(1, 2, 3), turn=5, matches={"d2": 0.9})
    assert choose(policy, D, snapshot, rng()) == choose(policy, D, snapshot, rng())


def test_excluded_workers_are_the_last_resort() -> None:
    snapshot = Snapshot(fleet(0, 5))
    assert choose(Policy.LEAST_LOADED, D, snapshot, rng(), {"d0"}) == "d1"
    assert choose(Policy.LEAST_LOADED, D, snapshot, rng(), {"d0", "d1"}) == "d0"


def test_no_worker_says_why() -> None:
    with pytest.raises(NoWorker, match="add one with --decode"):
        choose(Policy.RANDOM, D, Snapshot([]), rng())
    workers = [WorkerView("a", D, healthy=False), WorkerView("b", D, admitted=False)]
    with pytest.raises(NoWorker, match="of 2, 1 unhealthy, 0 draining, 1 with an open"):
        choose(Policy.RANDOM, D, Snapshot(workers), rng())


@pytest.mark.parametrize(
    ("active", "matches", "expected"),
    [
        ((5, 0), {"d0": 0.8}, "d0"),
        ((5, 0), {"d0": 0.2}, "d1"),
        ((5, 0), {}, "d1"),
        ((5, 3), {"d0": 0.8, "d1": 0.8}, "d1"),
        ((5, 0), {"d0": 0.8, "d1": 0.7}, "d0"),
        ((40, 0), {"d0": 1.0}, "d1"),
        ((100, 80), {"d0": 1.0}, "d0"),
    ],
    ids=["known", "hardly", "unknown", "equal", "more", "unbalanced", "abs-only"],
)
def test_cache_aware(active: tuple[int, ...], matches: dict[str, float], expected: str) -> None:
    limits = CacheAwarePolicy(
        match_threshold=0.3, balance_abs_threshold=10, balance_rel_threshold=1.5
    )
    snapshot = Snapshot(fleet(*active), matches=matches, cache_aware=limits)
    assert choose(Policy.CACHE_AWARE, D, snapshot, rng()) == expected


def text(chunks: int, letter: str = "a") -> str:
    return letter * (chunks * CHUNK_CHARS)


def test_prefixes_match_as_far_as_they_are_equal() -> None:
    tree = PrefixTree(1000)
    tree.insert(text(4), "x")
    tree.insert(text(2) + text(2, "b"), "y")
    assert tree.matches(text(4)) == {"x": 1.0, "y": 0.5}
    assert tree.matches(text(8)) == {"x": 0.5, "y": 0.25}
    assert tree.matches(text(1, "c") + text(3)) == {}
    assert tree.matches("") == {}


def test_a_worker_that_never_saw_the_beginning_does_not_match() -> None:
    tree = PrefixTree(1000)
    tree.insert(text(1), "x")
    tree.insert(text(3), "y")
    assert tree.matches(text(3)) == {"x": pytest.approx(1 / 3), "y": 1.0}


def test_short_prompts_match_whole() -> None:
    tree = PrefixTree(1000)
    tree.insert("hello", "x")
    assert tree.matches("hello") == {"x": 1.0}
    assert tree.matches("hellish") == {}


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    tree = PrefixTree(10)
    for letter in "abcdefgh":
        tree.insert(text(5, letter), "x")
        assert len(tree) <= 10
    assert tree.matches(text(5, "h")) == {"x": 1.0}
    assert tree.matches(text(5, "a")) == {}


def test_forgetting_a_worker() -> None:
    tree = PrefixTree(10)
    tree.insert(text(2), "x")
    tree.insert(text(1), "y")
    tree.forget("x")
    assert tree.matches(text(2)) == {"y": 0.5}
    assert len(tree) == 1
