"""The main job: `deploy/launch.sh --prefill 2 --decode 4`, used through its HTTP endpoint."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.deployment import MODEL, Deployment, chat, deployed
from tests.e2e.prompts import questions

pytestmark = pytest.mark.e2e

RECALL = [{"role": "user", "content": "My locker code is 4821. What is my locker code?"}]
COUNT = [{"role": "user", "content": "Count from 1 to 40."}]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("deployment")
    arguments = ("--prefill", "2", "--decode", "4", "--transfer-timeout", "15")
    with deployed(directory, *arguments) as running:
        yield running


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with deployment.client() as made:
        yield made


def text_of(completion: Any) -> str:
    return completion.choices[0].message.content


def test_launch_prints_its_commands_and_a_curl_that_works(deployment: Deployment) -> None:
    output = deployment.output()
    assert output.count("tpla worker prefill") == 2
    assert output.count("tpla worker decode") == 2
    curl = output[output.index("curl http") :].strip().splitlines()[0]
    done = subprocess.run(
        ["bash", "-c", f"{curl} --silent --max-time 60"], capture_output=True, text=True, check=True
    )
    assert "4821" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_held_out_questions_are_answered_right(client: openai.OpenAI) -> None:
    right = 0
    asked = questions(20, seed=11, longest=1200)
    for question in asked:
        messages = [message.as_dict() for message in question.messages]
        right += text_of(chat(client, messages, max_tokens=120)) == question.answer
    assert right >= 19, f"{right} of {len(asked)}"


def test_streaming_gives_the_same_text_and_the_usage(client: openai.OpenAI) -> None:
    whole = chat(client, RECALL)
    pieces, usage = [], None
    for event in chat(client, RECALL, stream=True, stream_options={"include_usage": True}):
        if event.choices:
            pieces.append(event.choices[0].delta.content or "")
        usage = event.usage or usage
    assert "".join(pieces) == text_of(whole)
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


def test_samples_stop_words_logprobs_and_completions(client: openai.OpenAI) -> None:
    several = chat(client, RECALL, n=3, seed=7)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert {choice.message.content for choice in several.choices} == {"Your locker code is 4821."}
    stopped = chat(client, COUNT, stop=["9"], max_tokens=200)
    assert stopped.choices[0].finish_reason == "stop" and "9" not in text_of(stopped)
    scored = chat(client, RECALL, logprobs=True, top_logprobs=2)
    assert len(scored.choices[0].logprobs.content) == scored.usage.completion_tokens
    cut = chat(client, COUNT, max_tokens=5)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 5
    plain = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, temperature=0)
    assert plain.usage.completion_tokens <= 4


def test_an_answer_follows_the_grammar_that_was_asked_for(client: openai.OpenAI) -> None:
    code = chat(client, RECALL, extra_body={"regex": "code (4821|1111)"})
    assert text_of(code) == "code 4821"
    json_object = chat(client, RECALL, response_format={"type": "json_object"})
    assert text_of(json_object).startswith("{")


def test_concurrent_requests_equal_the_same_requests_one_by_one(client: openai.OpenAI) -> None:
    conversations = [
        [message.as_dict() for message in question.messages] for question in questions(32, seed=4)
    ]
    alone = [text_of(chat(client, messages)) for messages in conversations]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda messages: text_of(chat(client, messages)), conversations))
    assert together == alone


ENDLESS_SCHEMA = {
    "type": "json_schema", "json_schema": {"name": "endless", "schema": {"$ref": "#"}}
}  # fmt: skip
"""Fails only when its first tokens are asked for."""


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"no_such_field": 1}, 400, "no_such_field"),
        ({"messages": [{"role": "user", "content": "many words " * 4000}]}, 400, "context"),
        ({"input_ids": [5, 6, 2_000_000_000]}, 400, "2000000000"),
        ({"min_tokens": 1, "stop_token_ids": [128009]}, 400, "128009"),
        ({"response_format": ENDLESS_SCHEMA}, 400, "grammar"),
    ],
    ids=["empty", "negative", "model", "field", "long", "token", "stop token", "grammar"],
)
def test_bad_input_is_refused_as_openai_does(
    deployment: Deployment, change: dict[str, Any], status: int, word: str
) -> None:
    body = {"model": MODEL, "messages": RECALL, "max_tokens": 8, **change}
    answer = httpx.post(f"{deployment.base}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    assert word in answer.json()["error"]["message"]
    deployment.idle()


def test_a_client_that_leaves_before_the_first_token_holds_nothing(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    body = {"model": MODEL, "messages": COUNT, "max_tokens": 1500, "ignore_eos": True}
    for _ in range(4):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{deployment.base}/v1/chat/completions", json=body, timeout=0.15)
    deployment.idle()
    assert "4821" in text_of(chat(client, RECALL))


def test_a_client_that_leaves_mid_stream_holds_nothing(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    stream = chat(client, COUNT, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    for _, _event in zip(range(4), stream, strict=False):
        pass
    stream.close()
    deployment.idle()
    assert "4821" in text_of(chat(client, RECALL))


def test_a_decode_worker_killed_mid_stream_ends_the_stream_with_an_error(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    deployment.healthy("decode", 2)
    body = {
        "model": MODEL, "messages": COUNT, "max_tokens": 1500, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    url, events = f"{deployment.base}/v1/chat/completions", []
    busy: list[dict[str, Any]] = []
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line:
                continue
            events.append(line)
            if len(events) == 5:
                busy = [w for w in deployment.workers() if w["role"] == "decode" and w["active"]]
                deployment.kill(busy[0])
    assert busy, "the stream ended before a worker was killed"
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert "data: [DONE]" not in events
    assert "4821" in text_of(chat(client, RECALL))
    deployment.revived(busy[0])
    deployment.idle()


def test_a_prefill_worker_killed_under_load_costs_no_wrong_answer(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    deployment.healthy("prefill", 2)
    asked = questions(16, seed=21, longest=900)

    def answer(question: Any) -> str | None:
        try:
            messages = [message.as_dict() for message in question.messages]
            return text_of(chat(client, messages, max_tokens=120))
        except openai.APIStatusError as error:
            assert error.status_code in {502, 503, 504}, error
            return None

    victim = next(w for w in deployment.workers() if w["role"] == "prefill")
    killer = threading.Timer(0.7, lambda: deployment.kill(victim))
    killer.start()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, asked))
    killer.join()
    given = [(a, q.answer) for a, q in zip(answers, asked, strict=True) if a is not None]
    assert len(given) >= 12, answers
    assert sum(a == expected for a, expected in given) >= len(given) - 1, given
    assert "4821" in text_of(chat(client, RECALL))
    deployment.revived(victim)
    deployment.idle()


def test_operations_endpoints(deployment: Deployment) -> None:
    for path in ("/health", "/ready", "/liveness"):
        assert httpx.get(f"{deployment.base}{path}", timeout=10).status_code == 200
    assert MODEL in httpx.get(f"{deployment.base}/v1/models", timeout=10).text
    metrics = httpx.get(f"{deployment.base}/metrics", timeout=10).text
    assert "tpla_router_" in metrics
    started = time.monotonic()
    assert {w["role"] for w in deployment.workers()} == {"prefill", "decode"}
    assert time.monotonic() - started < 10
