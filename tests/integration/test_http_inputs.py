"""Bad input over real HTTP: the right status, OpenAI's nested error, no worker troubled."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fakes.cluster import Cluster, cluster
from tests.fakes.sglang_worker import wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with cluster(client={"body": 1.0, "head": 1.0, "write": 1.0}) as running:
        yield running


@pytest.fixture
def system(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    shared.wait_quiet()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text and ".py" not in answer.text
    return body["error"]


RAW = [
    (b"{", "not valid JSON"),
    (b"", "not valid JSON"),
    (b"[]", "must be a JSON object, not an array"),
    (b'"x"', "not a string"),
    (b"null", "not null"),
    (b'{"messages": NaN}', "NaN is not a JSON number"),
    (b'{"temperature": Infinity}', "Infinity is not a JSON number"),
    (b'{"temperature": 1e999}', "exceeds the range"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    (b'{"a":' * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("content", "message"), RAW, ids=range(len(RAW)))
def test_bodies_that_are_not_json(system: Cluster, content: bytes, message: str) -> None:
    answer = system.client.post(CHAT, content=content)
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]


CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0]"),
    ({"model": "other"}, "model"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": [1]}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"top_k": 2**40}, "top_k"),
    ({"priority": 2**40}, "priority"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": "f"}, "tools"),
    ({"functions": []}, "functions"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"bootstrap_host": "10.0.0.1"}, "bootstrap_host"),
    ({"bootstrap_room": 5}, "bootstrap_room"),
    ({"routed_dp_rank": 0}, "routed_dp_rank"),
    ({"stop_regex": "a"}, "stop_regex"),
    ({"lora_path": "a"}, "lora_path"),
    ({"min_tokens": 1, "regex": "a"}, "min_tokens"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"foo": 1}, "foo"),
    ({"prompt": "x"}, "prompt"),
]

COMPLETION_CASES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"suffix": "the end"}, "suffix"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"messages": []}, "messages"),
]


def body_of(route: str, fields: dict[str, Any]) -> bytes:
    usual: dict[str, Any] = {"messages": HELLO} if route == CHAT else {"prompt": "hello"}
    return json.dumps({**usual, **fields}).encode()


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [(CHAT, *case) for case in CHAT_CASES] + [(COMPLETIONS, *case) for case in COMPLETION_CASES],
    ids=[f"{i}-{case[1]}" for i, case in enumerate(CHAT_CASES + COMPLETION_CASES)],
)
def test_fields_that_cannot_be_used(
    system: Cluster, route: str, fields: dict[str, Any], param: str
) -> None:
    seen = [len(worker.seen) for worker in system.workers]
    answer = system.client.post(route, content=body_of(route, fields))
    error = error_of(answer)
    assert answer.status_code == (404 if fields.get("model") == "other" else 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert error["code"] or param == "model"
    assert [len(worker.seen) for worker in system.workers] == seen


def test_the_words_of_an_unknown_field(system: Cluster) -> None:
    error = error_of(system.chat(foo=1))
    assert error["message"] == "Unrecognized request argument supplied: foo"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "hi", "' + b"k" * 1_000_000 + b'": 1}',
        b'{"prompt": "hi", "logit_bias": {"' + b"k" * 1_000_000 + b'": 1}}',
        b'{"prompt": "hi", "seed": ' + b"1" * 1_000_000 + b".0}",
    ],
    ids=["field", "key", "number"],
)
def test_a_name_or_number_of_a_megabyte_is_not_quoted_in_full(system: Cluster, body: bytes) -> None:
    answer = system.client.post(COMPLETIONS, content=body)
    assert answer.status_code == 400
    assert error_of(answer)["message"].endswith("...")
    assert len(answer.content) < 5000


def test_a_lone_surrogate(system: Cluster) -> None:
    answer = system.client.post(CHAT, content=body_of(CHAT, {"user": "\ud800"}))
    assert answer.status_code == 400
    assert "surrogate" in error_of(answer)["message"]


def test_the_words_of_an_unknown_model(system: Cluster) -> None:
    answer = system.chat(model="other")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": None, "stop": None, "n": None, "tools": None},
        {"temperature": 0, "top_p": 1, "stop": ["a", "b", "c", "d"]},
        {"seed": -5, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1},
        {"user": "me", "store": False, "service_tier": "auto", "metadata": {}, "verbosity": "low"},
        {"logprobs": True, "top_logprobs": 0},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        {"response_format": {"type": "json_schema", "schema": {}}},
        {"tool_choice": "none", "parallel_tool_calls": False, "reasoning_effort": "low"},
        {"chat_template_kwargs": {"thinking": False}, "separate_reasoning": False, "rid": "mine"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": [{"role": "user", "content": "", "name": "x"}]},
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
                {"role": "tool", "content": "42", "tool_call_id": "1"},
            ]
        },
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
    ids=range(13),
)
def test_fields_that_can_be_used(system: Cluster, fields: dict[str, Any]) -> None:
    answer = system.client.post(CHAT, content=body_of(CHAT, fields))
    assert answer.status_code == 200, answer.text
    assert "include_obfuscation" not in json.dumps(system.decode[0].seen[-1].body)
    assert system.decode[0].seen[-1].body["rid"] != "mine"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/workers/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/workers/nobody", 404),
        ("DELETE", "/workers/nobody", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/docs", 404),
    ],
)
def test_routes_that_are_not_there(system: Cluster, method: str, path: str, status: int) -> None:
    answer = system.client.request(method, path)
    assert answer.status_code == status
    error_of(answer)


def test_ten_megabytes_are_refused_to_a_client_that_sends_them_all(system: Cluster) -> None:
    answer = system.chat("x" * 10_000_000)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"


def test_ten_megabytes_are_refused_to_curl(system: Cluster) -> None:
    body = json.dumps({"prompt": "x" * 10_000_000})
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "-w", "\n%{http_code}", f"{system.url}{COMPLETIONS}",
         "-H", "content-type: application/json", "--data-binary", "@-"],
        input=body, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    text, _, status = done.stdout.rpartition("\n")
    assert status == "413"
    assert json.loads(text)["error"]["code"] == "request_too_large"


def test_a_client_that_asks_before_it_sends_a_small_body_is_served(system: Cluster) -> None:
    headers = {"expect": "100-continue"}
    answer = system.client.post(COMPLETIONS, json={"prompt": "a b"}, headers=headers)
    assert answer.status_code == 200


def test_ten_megabytes_in_chunks_are_refused(system: Cluster) -> None:
    answer = system.client.post(CHAT, content=(b"x" * 100_000 for _ in range(100)))
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("route", "body", "param", "words"),
    [
        (
            COMPLETIONS,
            b'{"n": 8, "prompt": [' + b",".join([b'"a"'] * 300_000) + b"]}",
            "n",
            "2400000 samples in one request exceed the 256 that this router serves at once",
        ),
        (
            CHAT,
            b'{"messages": [' + b",".join([b"0"] * 2_000_000) + b"]}",
            "messages[0]",
            "should be a valid dictionary",
        ),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": ['
            + b",".join([b"0"] * 2_000_000)
            + b"]}]}",
            "messages[0].content",
            "should be a valid string",
        ),
    ],
    ids=["samples", "messages", "parts"],
)
def test_a_body_of_a_million_items_holds_nobody_up(
    system: Cluster, route: str, body: bytes, param: str, words: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        begin = time.monotonic()
        answer = pool.submit(httpx.post, system.url + route, content=body, timeout=60)
        while not answer.done():
            assert system.client.get("/liveness").status_code == 200
        assert time.monotonic() - begin < 2  # their refusals took many
    assert answer.result().status_code == 400
    error = error_of(answer.result())
    assert error["param"] == param
    assert words in error["message"]


def test_a_body_that_does_not_come_is_given_up(system: Cluster) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    with connect(system) as sock:
        sock.sendall(head + b'{"prompt"')
        assert sock.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_head_that_does_not_come_is_given_up(system: Cluster) -> None:
    for sent in (b"", b"POST /v1/comp"):
        with connect(system) as sock:
            sock.sendall(sent)
            begin = time.monotonic()
            assert sock.recv(4096) == b""
            assert time.monotonic() - begin < 5


def test_a_second_head_that_does_not_come_whole_is_given_up(system: Cluster) -> None:
    with connect(system) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        sock.sendall(b"POST /v1/comp")
        sock.settimeout(10)
        while sock.recv(4096):  # what is left of the answer, and then the end
            pass


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_its_answer_is_given_up(system: Cluster, stream: bool) -> None:
    connections = system.server.server_state.connections
    body = body_of(COMPLETIONS, {"prompt": "w" * 1000, "max_tokens": 4000, "stream": stream})
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", httpx.URL(system.url).port or 0))
        mine = sock.getsockname()
        wait_until(lambda: mine in [c.client for c in list(connections)], what="a connection")
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        sock.sendall(head % len(body) + body)
        wait_until(lambda: mine not in [c.client for c in list(connections)], what="its end")
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


def test_garbage_instead_of_http(system: Cluster) -> None:
    with connect(system) as sock:
        sock.sendall(b"\x16\x03\x01\x00\x00 hello\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_connection_serves_many_requests(system: Cluster) -> None:
    url = httpx.URL(system.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=10)
    sockets = set()
    for _ in range(3):
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
        sockets.add(connection.sock)
        time.sleep(0.6)  # longer in all than a head may take
    assert len(sockets) == 1
    connection.close()


def test_an_idle_connection_is_kept_as_long_as_is_set() -> None:
    with cluster(client={"keep_alive": 1.2}) as system, connect(system) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        begin = time.monotonic()
        with sock.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 200")
        assert 1.2 <= time.monotonic() - begin < 5


def connect(system: Cluster) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", httpx.URL(system.url).port or 0))
    sock.settimeout(10)
    return sock
