"""Held-out questions of the reference model's generator, asked of running endpoints.

Greedy answers through OpenAI's chat API, so everything between client and model counts: template,
router, migration of the latent, sliced and quantised decode. An answer is right when it is the
whole expected text. A question without an answer counts as asked, and is also counted as failed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from tpla.convert.reference.conversations import Question
from tpla.convert.reference.questions import (
    NO_END,
    RECALL_DISTANCES,
    TASK_KINDS,
    Reply,
    recall_questions,
    task_questions,
)
from tpla.core.checkpoint import REFERENCE_MODEL
from tpla.core.errors import CheckpointError, ConfigError

RECALL = "recall"
_WRONG_KEPT = 3
_SPARE_TOKENS = 2
"""Tokens beyond the expected answer that a reply may have: enough to see that it did not end."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask.

    Attributes:
        label: name of its column.
        url: base of OpenAI's API, ending in ``/v1``.
        model: name to ask for; None: the first that the endpoint lists.
    """

    label: str
    url: str
    model: str | None = None

    @classmethod
    def parse(cls, text: str, model: str | None = None) -> Endpoint:
        """Read ``URL`` or ``LABEL=URL``; without a label it is the host and port.

        Raises:
            ConfigError: no http address.
        """
        label, _, url = text.rpartition("=")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--url {text!r} is not [LABEL=]http://HOST:PORT/v1; give the address that "
                "deploy/launch.sh prints"
            )
        return cls(label or httpx.URL(url).netloc.decode(), url.rstrip("/"), model)


@dataclass(frozen=True)
class Failure:
    """A question that the endpoint did not answer."""

    question: Question
    reason: str


@dataclass(frozen=True)
class TaskRow:
    """How one kind of question was answered.

    Attributes:
        task: kind of question, :data:`RECALL` or one of ``TASK_KINDS``.
        distance: least tokens between fact and question, for recall.
        questions: questions asked.
        exact: answers that are right to the last character.
        failed: questions without an answer.
        longest_prompt: most prompt tokens, as the endpoint counts them.
        wrong: the first questions that were not answered right: asked, expected, said.
    """

    task: str
    distance: int | None
    questions: int
    exact: int
    failed: int
    longest_prompt: int
    wrong: list[dict[str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the row in a table."""
        return self.task if self.distance is None else f"{self.task} {self.distance}"


@dataclass(frozen=True)
class EndpointResult:
    """All rows of one endpoint; ``seconds`` is the wall-clock time that they took.

    Not ``served`` are those of a checkpoint whose answers were forced (``tpla eval answers``).
    """

    label: str
    model: str
    seconds: float
    rows: list[TaskRow]
    served: bool = True

    @property
    def failed(self) -> int:
        """Questions without an answer, over all rows."""
        return sum(row.failed for row in self.rows)


@dataclass(frozen=True)
class _Task:
    name: str
    distance: int | None
    questions: list[Question]


class TaskSet:
    """The questions, the same for the same ``count``.

    Args:
        count: questions of each kind and distance.

    Raises:
        CheckpointError: the embedded model, whose tokens distances are counted in, is absent.
        ConfigError: ``count`` is below 1.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"--questions {count} must be at least 1")
        path = REFERENCE_MODEL / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is absent; run from a checkout, a wheel has no model")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.tasks = [
            _Task(RECALL, distance, recall_questions(self.count_tokens, distance, count))
            for distance in RECALL_DISTANCES
        ]
        self.tasks += [_Task(kind, None, task_questions(kind, count)) for kind in TASK_KINDS]

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a plain text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


async def ask_endpoint(
    endpoint: Endpoint,
    tasks: TaskSet,
    concurrency: int,
    timeout: float,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> EndpointResult:
    """Ask every question, at most ``concurrency`` at once, ``timeout`` seconds each.

    Raises:
        ConfigError: the endpoint cannot be reached at all, or a limit is out of range.
    """
    if concurrency < 1 or timeout <= 0:
        raise ConfigError(
            f"--concurrency {concurrency} starts at 1, --timeout {timeout:g} must be above 0"
        )
    begun = time.monotonic()
    turns = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
        model = endpoint.model or await _first_model(client, endpoint)
        total = sum(len(task.questions) for task in tasks.tasks)
        done = 0

        async def ask(question: Question) -> Reply | Failure:
            nonlocal done
            async with turns:
                longest = tasks.count_tokens(question.answer) + _SPARE_TOKENS
                outcome = await _ask(client, endpoint, model, question, longest, timeout)
            done += 1
            progress(endpoint.label, done, total)
            return outcome

        outcomes = [
            asyncio.gather(*(ask(question) for question in task.questions)) for task in tasks.tasks
        ]
        rows = [_row(t, await o) for t, o in zip(tasks.tasks, outcomes, strict=True)]
    return EndpointResult(endpoint.label, model, round(time.monotonic() - begun, 1), rows)


def load_results(path: Path) -> list[EndpointResult]:
    """Read what ``tpla eval tasks --json`` wrote.

    Raises:
        ConfigError: it cannot be read as such.
    """
    try:
        endpoints = json.loads(path.read_text())["endpoints"]
        return [
            EndpointResult(**{**each, "rows": [TaskRow(**row) for row in each["rows"]]})
            for each in endpoints
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no results of tpla eval tasks ({error}); write one with --json"
        ) from error


def check_comparable(results: Sequence[EndpointResult]) -> None:
    """All results answer the same questions.

    Raises:
        ConfigError: they do not.
    """
    first = results[0]
    asked = [(row.name, row.questions) for row in first.rows]
    for other in results[1:]:
        if [(row.name, row.questions) for row in other.rows] != asked:
            raise ConfigError(
                f"{other.label} and {first.label} answered different questions; ask both with the "
                "same --questions"
            )


async def _first_model(client: httpx.AsyncClient, endpoint: Endpoint) -> str:
    try:
        answer = await client.get(f"{endpoint.url}/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"{endpoint.url}/models does not list a model ({_reason(error)}); check --url, or name "
            "the model by --model"
        ) from error


async def _ask(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    model: str,
    question: Question,
    longest: int,
    timeout: float,
) -> Reply | Failure:
    body = {
        "model": model,
        "messages": [message.as_dict() for message in question.messages],
        "temperature": 0,
        "max_tokens": longest,
    }
    try:
        # httpx's own limit is on each read; this one is on the whole answer.
        async with asyncio.timeout(timeout):
            answer = await client.post(f"{endpoint.url}/chat/completions", json=body)
        answer.raise_for_status()
        return _reply(question, answer.json())
    except TimeoutError:
        return Failure(question, f"no answer within {timeout:g} s")
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        return Failure(question, _reason(error))


def _reply(question: Question, body: dict[str, Any]) -> Reply:
    choice = body["choices"][0]
    text = choice["message"]["content"] or ""
    ended = choice["finish_reason"] == "stop"
    return Reply(question, text if ended else text + NO_END, int(body["usage"]["prompt_tokens"]))


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}: {error.response.text[:200]}"
    return f"{type(error).__name__} {error}".strip()


def _row(task: _Task, outcomes: Sequence[Reply | Failure]) -> TaskRow:
    replies = [outcome for outcome in outcomes if isinstance(outcome, Reply)]
    wrong = [outcome for outcome in outcomes if not (isinstance(outcome, Reply) and outcome.exact)]
    return TaskRow(
        task=task.name,
        distance=task.distance,
        questions=len(outcomes),
        exact=len(outcomes) - len(wrong),
        failed=len(outcomes) - len(replies),
        longest_prompt=max((reply.prompt_tokens for reply in replies), default=0),
        wrong=[_described(outcome) for outcome in wrong[:_WRONG_KEPT]],
    )


def _described(outcome: Reply | Failure) -> dict[str, str]:
    said = outcome.text if isinstance(outcome, Reply) else f"failed: {outcome.reason}"
    question = outcome.question
    return {
        "asked": question.messages[-1].content[-120:],
        "expected": question.answer,
        "said": said,
    }
