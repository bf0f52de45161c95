"""Damage, death and mismatch between real workers: a clear error, no wrong token, nothing held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import REFERENCE_MODEL, Conversions, StartWorker, worker_set
from tests.e2e.independent_reference import Reference
from tests.e2e.prompts import STOP, chat_prompts
from tests.e2e.servers import Answer, Worker, ask, body_of, idle

pytestmark = pytest.mark.e2e

TOKENS = 12
DECODE_POOL, SMALL_PREFILL_POOL = 3072, 1024
"""Tokens; the model's context is longer than either."""


@dataclass
class Fleet:
    """A healthy decode worker and prefill workers, each with another defect."""

    decode: Worker
    sound: Worker
    flips: Worker
    exits: Worker
    other_model: Worker


@pytest.fixture(scope="module")
def fleet(conversions: Conversions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = conversions.of(REFERENCE_MODEL, 2, "0")
    with worker_set(tmp_path_factory.mktemp("logs")) as start_worker:
        yield _start(model, start_worker)


def _start(model: Path, start_worker: StartWorker) -> Fleet:
    patience = ("--transfer-timeout", "10", "--page-size", "64")
    workers = Fleet(
        decode=start_worker(
            "decode", model, "--tp-size", "2", *patience, "--max-total-tokens", str(DECODE_POOL)
        ),
        sound=start_worker("prefill", model, *patience),
        flips=start_worker(
            *("prefill", model, *patience, "--fault", "flip:after=2"),
            *("--max-total-tokens", str(SMALL_PREFILL_POOL)),
        ),
        exits=start_worker("prefill", model, *patience, "--fault", "exit:after=2"),
        other_model=start_worker("prefill", REFERENCE_MODEL, "--mode", "mla", *patience),
    )
    for worker in vars(workers).values():
        worker.wait()
    return workers


def test_pages_of_64_serve_the_reference_tokens(fleet: Fleet, conversions: Conversions) -> None:
    reference = Reference(conversions.of(REFERENCE_MODEL, 2, "0"), "fp8")
    for prompt in chat_prompts(4, seed=8):
        expected = reference.generate(prompt, TOKENS, STOP)
        assert ask(fleet.sound, fleet.decode, prompt, TOKENS).ids == expected


def assert_failed_clearly(response: httpx.Response, *words: str) -> None:
    assert response.status_code >= 400, response.text
    assert all(word in response.text for word in words), response.text
    assert "Traceback" not in response.text and "output_ids" not in response.text


def failures(worker: Worker) -> int:
    """Transfers that failed, in this test and those before it."""
    return sum(worker.accounting()["transfer"]["failures"].values())


def assert_served(fleet: Fleet, prefill: Worker) -> Answer:
    prompt = chat_prompts(1, seed=3)[0]
    answer = ask(prefill, fleet.decode, prompt, TOKENS)
    assert answer.ids == ask(fleet.sound, fleet.decode, prompt, TOKENS).ids
    return answer


def test_a_flipped_byte_on_the_wire_fails_the_request_and_the_next_one_succeeds(
    fleet: Fleet,
) -> None:
    before = failures(fleet.flips)
    assert_served(fleet, fleet.flips)  # both decode ranks: chunks 1 and 2 pass
    damaged = ask(fleet.flips, fleet.decode, chat_prompts(1)[0], TOKENS)
    assert_failed_clearly(damaged.decode, "ChecksumMismatch")
    assert damaged.prefill.status_code >= 400
    assert_served(fleet, fleet.flips)
    idle(fleet.flips)
    assert failures(fleet.flips) == before + 1
    idle(fleet.decode)


def test_a_prefill_that_dies_mid_transfer_fails_the_request_and_leaves_decode_whole(
    fleet: Fleet,
) -> None:
    assert_served(fleet, fleet.exits)
    body_of_the_dead = {}
    try:
        answer = ask(fleet.exits, fleet.decode, chat_prompts(1)[0], TOKENS, timeout=60)
        body_of_the_dead = answer.decode.json()
        assert_failed_clearly(answer.decode, "prefill rank", "gone")
    except (httpx.RemoteProtocolError, httpx.NetworkError):
        pass  # the prefill leg's connection breaks with its worker; decode is checked below
    assert "output_ids" not in body_of_the_dead
    idle(fleet.decode)
    assert_served(fleet, fleet.sound)


def test_another_checkpoint_is_refused_on_both_sides(fleet: Fleet) -> None:
    answer = ask(fleet.other_model, fleet.decode, chat_prompts(1)[0], TOKENS)
    assert_failed_clearly(answer.decode, "checkpoint fingerprint", "same converted checkpoint")
    assert answer.prefill.status_code >= 400
    assert "checkpoint fingerprint" in fleet.other_model.log.read_text()
    idle(fleet.decode)
    idle(fleet.other_model)


@pytest.mark.parametrize(("leg", "words"), [("decode", "prefill leg"), ("sound", "reserved pages")])
def test_a_leg_that_comes_alone_ends_in_time(fleet: Fleet, leg: str, words: str) -> None:
    body = body_of(fleet.sound, chat_prompts(1)[0], 4)
    lonely = httpx.post(f"{getattr(fleet, leg).url}/generate", json=body, timeout=60)
    assert_failed_clearly(lonely, words, "--transfer-timeout")
    idle(fleet.decode)
    idle(fleet.sound)


@pytest.mark.parametrize(
    ("prefill", "tokens", "refuses"),
    [
        ("flips", SMALL_PREFILL_POOL + 200, "prefill"),
        ("sound", DECODE_POOL + 200, "decode"),
        # It would fit, but SGLang begins nothing without tokens to spare.
        ("flips", SMALL_PREFILL_POOL - 30, "prefill"),
        ("sound", DECODE_POOL - 300, "decode"),
    ],
)
def test_a_prompt_that_one_roles_pool_cannot_hold_is_refused_by_that_role(
    fleet: Fleet, prefill: str, tokens: int, refuses: str
) -> None:
    answer = ask(getattr(fleet, prefill), fleet.decode, [5] * tokens, TOKENS, timeout=60)
    refusal = getattr(answer, refuses)
    assert refusal.status_code == 400, refusal.text
    assert f"{tokens} tokens" in refusal.text and "maximum allowed length" in refusal.text
    other = answer.decode if refuses == "prefill" else answer.prefill
    assert_failed_clearly(other, "--transfer-timeout")  # the router tells it to abort
    idle(fleet.decode)
    idle(getattr(fleet, prefill))


def test_a_session_that_does_not_exist_is_refused(fleet: Fleet) -> None:
    body = {"input_ids": [5, 6], "session_params": {"id": "nope"}}
    for worker in (fleet.decode, fleet.sound):
        answer = httpx.post(f"{worker.url}/generate", json=body, timeout=60)
        assert answer.status_code == 400 and "nope" in answer.text
        idle(worker)
    assert_served(fleet, fleet.sound)


def test_an_aborted_request_holds_nothing_on_either_side(fleet: Fleet) -> None:
    prompt = chat_prompts(1)[0]
    with pytest.raises(httpx.TimeoutException):
        ask(fleet.sound, fleet.decode, prompt, 1500, ignore_eos=True, timeout=1.0)
    idle(fleet.decode)
    idle(fleet.sound)
    assert_served(fleet, fleet.sound)
