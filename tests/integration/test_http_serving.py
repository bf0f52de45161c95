"""Requests that go well: shapes of answers, both legs, fan-out; real clients over real HTTP."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fakes.cluster import Cluster, cluster
from tests.fakes.sglang_worker import MODEL, wait_until

MESSAGES: Any = [{"role": "user", "content": "alpha beta gamma"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """One cluster for tests that leave it as they found it."""
    with cluster(prefill=2, decode=2) as running:
        yield running


@pytest.fixture
def system(shared: Cluster) -> Iterator[Cluster]:
    for worker in shared.workers:
        worker.seen.clear()
        worker.aborted.clear()
    yield shared
    shared.wait_quiet()


@pytest.fixture
def client(system: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
    assert answer.choices[0].message.content == "alpha beta gamma alpha "
    assert answer.model == MODEL
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_openai_chat_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "alpha beta gamma "
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


async def test_openai_async_stream(system: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none") as client:
        stream = await client.completions.create(
            model=MODEL, prompt="un deux", max_tokens=2, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "un deux "


def test_openai_completion_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="un deux", logprobs=1, max_tokens=2)
    assert answer.choices[0].text == "un deux "
    assert answer.choices[0].logprobs is not None


def test_openai_lists_the_discovered_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_both_legs_receive_the_same_body(system: Cluster) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    answer = system.chat(
        "same",
        model=MODEL,
        temperature=0,
        stop=["x"],
        tools=tools,
        response_format={"type": "json_object"},
        top_k=None,
        metadata={"dropped": "yes"},
    )
    assert answer.status_code == 200
    (prefill,) = [item for worker in system.prefill for item in worker.seen]
    (decode,) = [item for worker in system.decode for item in worker.seen]
    assert prefill.body == decode.body
    body = prefill.body
    (prefill_worker,) = [worker for worker in system.prefill if worker.seen]
    assert body["bootstrap_host"] == "127.0.0.1"
    assert body["bootstrap_port"] == prefill_worker.bootstrap_port
    assert 0 < body["bootstrap_room"] < 2**63
    assert body["rid"].startswith("chatcmpl-")
    assert body["tools"] == tools and body["stop"] == ["x"] and body["temperature"] == 0
    assert "top_k" not in body and "metadata" not in body


def test_ids_and_trace_headers_reach_workers_and_client(system: Cluster) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = system.client.post(
        "/v1/completions",
        json={"prompt": "hi"},
        headers={"x-request-id": "mine-1", "traceparent": trace},
    )
    assert answer.headers["x-request-id"] == "mine-1"
    for worker in system.workers:
        for item in worker.seen:
            assert item.headers["x-request-id"] == "mine-1"
            assert item.headers["traceparent"] == trace


def test_an_unfit_request_id_is_replaced(system: Cluster) -> None:
    answer = system.client.get("/health", headers={"x-request-id": "a b\tc"})
    assert answer.headers["x-request-id"].startswith("req-")


def test_rooms_and_ids_differ_between_requests(system: Cluster) -> None:
    for _ in range(3):
        assert system.complete().status_code == 200
    bodies = [item.body for worker in system.decode for item in worker.seen]
    assert len({body["bootstrap_room"] for body in bodies}) == 3
    assert len({body["rid"] for body in bodies}) == 3
    assert len({len(body["rid"]) for body in bodies}) == 1


def test_n_samples_are_single_requests_with_their_own_rooms(
    client: openai.OpenAI, system: Cluster
) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, seed=10, max_tokens=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [
        f"alpha#{seed} beta#{seed} " for seed in (10, 11, 12)
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    assert answer.usage.total_tokens == 9
    bodies = [item.body for worker in system.decode for item in worker.seen]
    assert len({body["bootstrap_room"] for body in bodies}) == 3
    assert all(body.get("n", 1) == 1 for body in bodies)


def test_n_samples_stream_interleaved(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            n=2,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "alpha beta gamma ", 1: "alpha beta gamma "}
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk for chunk in chunks if chunk.usage]
    assert len(usages) == 1 and usages[0] is chunks[-1]
    assert usages[0].usage is not None
    assert (usages[0].usage.prompt_tokens, usages[0].usage.completion_tokens) == (3, 6)


def test_a_list_of_prompts_becomes_numbered_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["a b", "c"], n=2, max_tokens=1, temperature=0
    )
    assert [choice.text for choice in answer.choices] == ["a ", "a ", "c ", "c "]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)


def test_token_prompts(system: Cluster) -> None:
    assert system.complete([5, 6], max_tokens=1).json()["choices"][0]["text"] == "5 "
    both = system.complete([[5], [6]], max_tokens=1).json()["choices"]
    assert [choice["text"] for choice in both] == ["5 ", "6 "]


def test_curl_streams(system: Cluster) -> None:
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 2}
    done = subprocess.run(
        ["curl", "-sSN", "--noproxy", "*", "-i", f"{system.url}/v1/chat/completions",
         "-H", "content-type: application/json", "-d", json.dumps(body)],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    head, _, stream = done.stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 200") and "text/event-stream" in head
    events = [event for event in stream.split("\n\n") if event]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0][6:])["choices"][0]["delta"]["role"] == "assistant"


def test_curl_without_a_content_type(system: Cluster) -> None:
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", f"{system.url}/v1/completions",
         "-d", '{"prompt": "x", "max_tokens": 1}'],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["choices"][0]["text"] == "x "


def test_same_prefix_goes_to_the_same_prefill_worker(system: Cluster) -> None:
    prompt = "the same long beginning " * 20
    for number in range(4):
        assert system.complete(prompt + str(number), max_tokens=1).status_code == 200
    assert sorted(len(worker.seen) for worker in system.prefill) == [0, 4]
    assert [len(worker.seen) for worker in system.decode] == [2, 2]


def test_workers_and_metrics_tell_what_happened(system: Cluster) -> None:
    before = system.metric("requests_total", route="/v1/completions", status="200")
    assert system.complete(stream=True).status_code == 200
    system.wait_quiet()
    assert system.metric("requests_total", route="/v1/completions", status="200") == before + 1
    assert system.metric("ttft_seconds_count", route="/v1/completions") > 0
    wait_until(lambda: system.metric("prefill_duration_seconds_count") > 0)
    text = system.client.get("/metrics").text
    for name in ("worker_healthy", "breaker_state", "worker_active", "queued_requests",
                 "active_requests", "request_duration_seconds_bucket"):  # fmt: skip
        assert f"tpla_router_{name}" in text
    listed = system.client.get("/workers").json()["workers"]
    assert [worker["role"] for worker in listed] == ["prefill", "prefill", "decode", "decode"]
    assert all(worker["healthy"] and worker["breaker"] == "closed" for worker in listed)
    assert listed[0]["load"] == {"instance_id": None, "running": 0}
    assert "secret" not in json.dumps(listed)


def test_a_workers_load_is_that_of_all_its_data_parallel_ranks(
    system: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system.decode[0], "dp_size", 2)
    rank = {"instance_id": None, "running": 0}
    wait_until(lambda: _loads(system)[2] == {"dp_ranks": [rank, rank]})
    assert _loads(system)[3] == rank


def _loads(system: Cluster) -> list[object]:
    listed = system.client.get("/workers").json()["workers"]
    return [worker["load"] for worker in listed]


def test_probes(system: Cluster) -> None:
    for path in ("/health", "/ready", "/liveness"):
        assert system.client.get(path).status_code == 200
