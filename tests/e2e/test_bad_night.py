"""A bad night: for minutes, workers stand still or die while clients ask, leave and send nonsense.

    tests/run.sh -m soak
    tests/run.sh -m soak --soak-seconds 3600 --soak-seed 2

Every answer that is given must be right, every error one that a client can act on, and in the
morning nothing may be held.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from tests.e2e.deployment import Deployment, chat, deployed
from tests.e2e.prompts import questions
from tests.e2e.servers import suspended

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

CLIENTS, QUESTIONS = 6, 200
TRANSFER_TIMEOUT = 10
PAUSES = (1, 3, TRANSFER_TIMEOUT + 2, TRANSFER_TIMEOUT + 6)
"""Seconds, some of them longer than a transfer is waited for."""
TRY_AGAIN = {429, 502, 503, 504}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    arguments = ("--prefill", "2", "--decode", "4", "--transfer-timeout", str(TRANSFER_TIMEOUT))
    with deployed(tmp_path, *arguments) as running:
        yield running


Asked = tuple[list[dict[str, str]], str]
"""Messages, and the right answer."""


def known_questions(deployment: Deployment, seed: int) -> list[Asked]:
    """Those that the model answers rightly while nothing happens: nearly all of them."""
    asked = [
        ([message.as_dict() for message in question.messages], question.answer)
        for question in questions(QUESTIONS, seed, longest=900)
    ]
    with deployment.client(timeout=150) as client, ThreadPoolExecutor(CLIENTS) as pool:
        answers = pool.map(lambda each: answer_of(client, each[0]), asked)
        known = [each for each, text in zip(asked, answers, strict=True) if text == each[1]]
    assert len(known) > 0.95 * QUESTIONS
    return known


def answer_of(client: openai.OpenAI, messages: list[dict[str, str]]) -> str | None:
    """Greedy, as a whole."""
    return chat(client, messages, max_tokens=120).choices[0].message.content


class Clients:
    """Threads that use the endpoint until they are told to stop, and count what came of it."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._deployment = deployment
        self._asked = known_questions(deployment, seed)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._use, args=[random.Random(seed * CLIENTS + number)])
            for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each finish what it has begun."""
        self._stop.set()
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive(), "a request was never answered"

    def _use(self, rng: random.Random) -> None:
        with self._deployment.client(timeout=150) as client:
            while not self._stop.is_set():
                does = rng.choices((self._ask, self._leave, self._talk_nonsense), (6, 3, 1))[0]
                try:
                    does(client, rng)
                except openai.APIStatusError as error:
                    self.tally[f"error {error.status_code}"] += 1
                    if error.status_code not in TRY_AGAIN:
                        self.wrong.append(str(error))
                except Exception as error:
                    self.wrong.append(f"{does.__name__}: {error!r}")
                time.sleep(rng.random() * 0.3)

    def _ask(self, client: openai.OpenAI, rng: random.Random) -> None:
        messages, answer = rng.choice(self._asked)
        text = answer_of(client, messages)
        self.tally["answers"] += 1
        if text != answer:
            self.wrong.append(f"{text!r} instead of {answer!r}")

    def _leave(self, client: openai.OpenAI, rng: random.Random) -> None:
        messages, _answer = rng.choice(self._asked)
        stream = chat(client, messages, max_tokens=500, stream=True)
        with suppress(openai.APIError):  # of a worker that died after the first token
            for _, _event in zip(range(rng.randrange(6)), stream, strict=False):
                pass
        stream.close()
        self.tally["left"] += 1

    def _talk_nonsense(self, client: openai.OpenAI, rng: random.Random) -> None:
        messages, _answer = rng.choice(self._asked)
        with pytest.raises(openai.BadRequestError):
            chat(client, messages, max_tokens=-3)
        self.tally["refused"] += 1


def test_a_bad_night_costs_no_wrong_answer_and_nothing_is_held_in_the_morning(
    deployment: Deployment, request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--soak-seed")
    rng, clients = random.Random(seed), Clients(deployment, seed)
    ends = time.monotonic() + request.config.getoption("--soak-seconds")
    happened: Counter[str] = Counter()
    try:
        while time.monotonic() < ends:
            time.sleep(rng.uniform(4, 12))
            worker = rng.choice(deployment.workers())
            if rng.random() < 0.2:
                deployment.kill(worker)
                deployment.revived(worker)
                happened[f"{worker['role']} killed"] += 1
            else:
                with suspended(deployment.process_of(worker)):
                    time.sleep(rng.choice(PAUSES))
                happened[f"{worker['role']} paused"] += 1
            print(f"{dict(happened)} {dict(clients.tally)}", flush=True)
    finally:
        clients.stop()
    assert not clients.wrong, clients.wrong[:10]
    errors = sum(count for what, count in clients.tally.items() if what.startswith("error"))
    assert clients.tally["answers"] > 10 * errors, clients.tally
    deployment.healthy("prefill", 2)
    deployment.healthy("decode", 2)
    deployment.idle()
