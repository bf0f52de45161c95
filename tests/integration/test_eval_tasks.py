"""``tpla eval tasks`` against real HTTP servers: an oracle that errs on demand, and the router."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.fakes.cluster import cluster
from tests.fakes.sglang_worker import ServerThread
from tpla.convert import eval_cli
from tpla.convert.endpoint_tasks import (
    Endpoint,
    EndpointResult,
    TaskRow,
    TaskSet,
    ask_endpoint,
    load_results,
)
from tpla.core.errors import ConfigError


class Oracle:
    """Knows every answer; its other attributes are words of questions that go wrong."""

    def __init__(self, tasks: TaskSet) -> None:
        self._answers = {
            _key(message.as_dict() for message in question.messages): question.answer
            for task in tasks.tasks
            for question in task.questions
        }
        self.errs = self.fails = self.hangs = self.cuts = "words of no question"
        self.bodies: list[dict[str, Any]] = []
        self.active = self.most_active = 0
        routes = [
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "oracle"}]})),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _chat(self, request: Request) -> Response:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._answer(await request.json())
        finally:
            self.active -= 1

    async def _answer(self, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        await asyncio.sleep(0.002)
        asked = body["messages"][-1]["content"]
        if self.hangs in asked:
            await asyncio.sleep(3)
        if self.fails in asked:
            return JSONResponse({"error": {"message": "no worker"}}, 503)
        text = self._answers[_key(body["messages"])]
        choice = {
            "message": {"role": "assistant", "content": text + "!" * (self.errs in asked)},
            "finish_reason": "length" if self.cuts in asked else "stop",
        }
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": len(asked)}})


@pytest.fixture(scope="module")
def tasks() -> TaskSet:
    return TaskSet(2)


@pytest.fixture
def oracle(tasks: TaskSet) -> Oracle:
    return Oracle(tasks)


@pytest.fixture
def url(oracle: Oracle) -> Iterator[str]:
    config = uvicorn.Config(oracle.app, log_level="warning", timeout_graceful_shutdown=1)
    with ServerThread(lambda: uvicorn.Server(config)) as thread:
        thread.wait_started()
        yield f"{thread.url}/v1"


def test_right_answers_count_and_every_question_is_asked_greedily(
    oracle: Oracle, url: str, tasks: TaskSet
) -> None:
    result = _ask(url, tasks, concurrency=3)
    assert result.model == "oracle"
    assert [row.name for row in result.rows[:3]] == ["recall 100", "recall 300", "recall 600"]
    assert all((row.questions, row.exact, row.failed) == (2, 2, 0) for row in result.rows)
    assert len(oracle.bodies) == 2 * len(result.rows)
    assert {body["temperature"] for body in oracle.bodies} == {0}
    assert {body["model"] for body in oracle.bodies} == {"oracle"}
    assert 1 < oracle.most_active <= 3


def test_wrong_and_unfinished_answers_do_not_count(
    oracle: Oracle, url: str, tasks: TaskSet
) -> None:
    oracle.errs, oracle.cuts = "Count from", "Tell me a story"
    result = _ask(url, tasks)
    counting, told = _row(result, "counting"), _row(result, "told_story")
    assert (counting.exact, counting.failed) == (0, 0)
    assert counting.wrong[0]["said"] == counting.wrong[0]["expected"] + "!"
    assert told.exact == 0 and told.wrong[0]["said"].endswith(" [no end]")
    assert _row(result, "recall", 100).exact == 2


def test_questions_without_an_answer_are_counted_as_failed(
    oracle: Oracle, url: str, tasks: TaskSet
) -> None:
    oracle.fails, oracle.hangs = "Count from", "Repeat"
    result = _ask(url, tasks, timeout=1.0)
    counting, copy = _row(result, "counting"), _row(result, "copy")
    assert (counting.exact, counting.failed) == (0, 2)
    assert "HTTP 503" in counting.wrong[0]["said"]
    assert (copy.exact, copy.failed) == (0, 2)
    assert copy.wrong[0]["said"] == "failed: no answer within 1 s"
    assert result.failed == 4


def test_endpoints_stand_side_by_side_and_beside_an_earlier_result(
    oracle: Oracle,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    common = ["--questions", "2", "--concurrency", "8"]
    assert _run(monkeypatch, "--url", f"mla={url}", "--json", first, *common) == 0
    oracle.fails = "Count from"
    status = _run(
        monkeypatch,
        *("--url", f"tpla={url}", "--url", url, "--beside", first, "--json", second, *common),
    )
    assert status == 1, "unanswered questions must show in the exit status"
    results = load_results(second)
    host = url.removeprefix("http://").removesuffix("/v1")
    assert [result.label for result in results] == ["mla", "tpla", host]
    line = next(
        line for line in capsys.readouterr().out.splitlines() if "counting" in line and "(" in line
    )
    assert line.split() == ["counting", "2", "100.0", *("0.0", "(2", "failed)") * 2]


def test_different_questions_are_not_compared(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first.json"
    assert _run(monkeypatch, "--url", url, "--json", first, "--questions", "2") == 0
    assert _run(monkeypatch, "--url", url, "--beside", first, "--questions", "1") == 2
    assert "answered different questions" in capsys.readouterr().err


def test_the_router_is_an_endpoint(tasks: TaskSet) -> None:
    with cluster(decode=2) as running:
        result = _ask(f"{running.url}/v1", tasks)
        running.wait_quiet()
    # Fake workers repeat the prompt's words, so no answer is right, and refuse long prompts.
    assert all(row.exact == 0 for row in result.rows)
    assert all(row.failed == 0 for row in result.rows if row.distance is None)
    far = _row(result, "recall", 3000)
    assert far.failed == 2 and "HTTP 400" in far.wrong[0]["said"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost:8000"], "http://HOST:PORT/v1"),
        (["--url", "http://127.0.0.1:9/v1"], "does not list a model"),
        (["--url", "http://127.0.0.1:9/v1", "--questions", "0"], "must be at least 1"),
        (["--url", "http://127.0.0.1:9/v1", "--concurrency", "0"], "starts at 1"),
        (["--url", "http://127.0.0.1:9/v1", "--beside", "absent.json"], "absent.json"),
    ],
)
def test_bad_values_end_with_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert _run(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ConfigError, match="no results of tpla eval tasks"):
        load_results(path)


def _ask(url: str, tasks: TaskSet, **limits: Any) -> EndpointResult:
    limits = {"concurrency": 4, "timeout": 20.0, **limits}
    return asyncio.run(ask_endpoint(Endpoint.parse(f"x={url}"), tasks, **limits))


def _row(result: EndpointResult, task: str, distance: int | None = None) -> TaskRow:
    (row,) = [row for row in result.rows if (row.task, row.distance) == (task, distance)]
    return row


def _key(messages: Any) -> str:
    return json.dumps(list(messages), sort_keys=True)


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["tpla eval", "tasks", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        eval_cli.evaluate()
    return int(stop.value.code or 0)
