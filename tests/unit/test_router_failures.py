"""What SGLang's errors become, and how server-sent events are cut."""

from __future__ import annotations

import errno
import json
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp.client_exceptions import ClientConnectorDNSError, ClientConnectorError
from aiohttp.client_reqrep import ConnectionKey

from tpla.core.config.router import LegTimeouts
from tpla.core.config.worker import Role
from tpla.core.errors import BadRequest, NoWorker, TooLarge, UpstreamError
from tpla.core.phases import Phase, Timeline
from tpla.router import failures, sse
from tpla.router.breaker import Verdict
from tpla.router.failures import LegFailure, Reason
from tpla.router.legs import Call, Leg
from tpla.router.registry import Worker

FLAT = {"object": "error", "message": "bad seed", "type": "BadRequest", "param": None, "code": 400}
NESTED = {"error": {"message": "bad seed", "type": "x", "param": "seed", "code": "c"}}


@pytest.mark.parametrize("body", [FLAT, NESTED, {"error": FLAT}, {"message": "bad seed"}])
def test_all_shapes_of_errors_become_one(body: dict[str, object]) -> None:
    failure = failures.from_answer("prefill", 400, json.dumps(body).encode())
    assert isinstance(failure.error, BadRequest)
    assert failure.error.message == "bad seed"


@pytest.mark.parametrize("body", [FLAT, NESTED, {"error": FLAT}])
async def test_an_error_of_any_shape_is_seen_in_an_answer_of_status_200(
    body: dict[str, object],
) -> None:
    call = Call("/v1/completions", {}, True, "", deadline=0, time_limit=0)
    worker = cast(Worker, SimpleNamespace(role=Role.DECODE))
    leg = Leg(worker, call, b"", LegTimeouts())
    with pytest.raises(LegFailure, match="bad seed"):
        leg._inspect(body)
    assert not leg._inspect({"choices": []})


def test_param_and_code_survive_where_they_are_openai_like() -> None:
    error = failures.from_answer("prefill", 400, json.dumps(NESTED).encode()).error
    assert (error.param, error.code) == ("seed", "c")
    error = failures.from_answer("prefill", 400, json.dumps(FLAT).encode()).error
    assert (error.param, error.code) == (None, None)


@pytest.mark.parametrize(
    ("status", "kind", "reason", "verdict", "retryable"),
    [
        (400, BadRequest, Reason.REFUSED, Verdict.SUCCESS, False),
        (422, BadRequest, Reason.REFUSED, Verdict.SUCCESS, False),
        (413, TooLarge, Reason.REFUSED, Verdict.SUCCESS, False),
        (401, UpstreamError, Reason.STATUS, Verdict.NEUTRAL, True),
        (404, UpstreamError, Reason.STATUS, Verdict.NEUTRAL, True),
        (429, NoWorker, Reason.BUSY, Verdict.NEUTRAL, True),
        (503, NoWorker, Reason.BUSY, Verdict.NEUTRAL, True),
        (500, UpstreamError, Reason.STATUS, Verdict.FAILURE, True),
        (502, UpstreamError, Reason.STATUS, Verdict.FAILURE, True),
    ],
)
def test_statuses(
    status: int, kind: type, reason: Reason, verdict: Verdict, retryable: bool
) -> None:
    failure = failures.from_answer("decode", status, b"<html>not json</html>")
    assert type(failure.error) is kind
    assert (failure.reason, failure.verdict, failure.retryable) == (reason, verdict, retryable)


@pytest.mark.parametrize(
    "message",
    [
        "Prefill transfer failed for request rank=0 with exception KVTransferError(x)",
        "Decode handshake failed for request",
        "KV transfer timed out",
    ],
)
def test_transfer_failures_are_told_apart(message: str) -> None:
    error = {"object": "error", "message": message, "code": 500}
    assert failures.from_event("decode", error).reason is Reason.KV_TRANSFER
    assert failures.aborted("decode", message).error.code == "kv_transfer_failed"


@pytest.mark.parametrize(
    ("where", "message", "gone"),
    [
        ("decode", "KVTransferError(prefill rank 10.0.0.1:5 is gone)", True),
        ("prefill", "KVTransferError(decode rank 10.0.0.1:5 is gone)", True),
        ("decode", "KVTransferError(decode rank 10.0.0.1:5 is gone)", False),
        ("decode", "KVTransferError(prefill rank 10.0.0.1:5 refused the handshake)", False),
    ],
)
def test_a_leg_may_have_seen_the_other_worker_go(where: str, message: str, gone: bool) -> None:
    failure = failures.from_answer(where, 500, json.dumps({"message": message}).encode())
    assert failure.reason is Reason.KV_TRANSFER
    assert failure.peer_gone is failure.costs_a_worker is gone


@pytest.mark.parametrize(
    ("failure", "doubted"),
    [
        (failures.from_answer("decode", 500, b""), True),
        (failures.aborted("decode", None), True),
        (failures.from_answer("decode", 401, b""), False),
        (failures.from_answer("decode", 503, b""), False),
        (failures.from_answer("decode", 400, b""), False),
        (failures.overdue("decode", 5), False),
        (failures.aborted("decode", "KVTransferError(x)"), False),
        (failures.lost(Reason.DISCONNECTED, "decode", "x"), False),
    ],
)
def test_only_an_error_that_a_living_worker_answered_is_in_doubt(
    failure: failures.LegFailure, doubted: bool
) -> None:
    before = failure.verdict
    failure.doubt()
    assert failure.in_doubt is doubted
    assert failure.verdict is (Verdict.NEUTRAL if doubted else before)


@pytest.mark.parametrize(
    ("number", "refused"),
    [
        (errno.ECONNREFUSED, True),
        (errno.ECONNRESET, True),
        (errno.EHOSTUNREACH, True),
        (errno.ENETUNREACH, True),
        (errno.EMFILE, False),
        (errno.ENFILE, False),
        (errno.EADDRNOTAVAIL, False),
        (errno.ENOBUFS, False),
        (None, False),
    ],
)
def test_only_a_host_can_refuse_a_connection(number: int | None, refused: bool) -> None:
    key = ConnectionKey("h", 1, False, True, None, None, None, None)
    error = OSError(number, "why")
    assert failures.refused_by_host(ClientConnectorError(key, error)) is refused
    assert not failures.refused_by_host(ClientConnectorDNSError(key, error))


@pytest.mark.parametrize(
    "message",
    [
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        "Request x exceeds the maximum number of tokens: 5 > 4",
        "Input length (5000 tokens) exceeds the maximum allowed length (4091 tokens).",
    ],
)
def test_context_length(message: str) -> None:
    failure = failures.from_event("prefill", {"message": message, "code": 400})
    assert failure.error.code == "context_length_exceeded"
    assert failure.reason is Reason.REFUSED


@pytest.mark.parametrize("error", ["text", {"detail": [{"msg": "x"}]}, None, 5, []])
def test_odd_errors_do_not_crash(error: object) -> None:
    assert failures.from_event("decode", error).error.status == 502


WHOLE = b'data: {"a": 1}\n\ndata: {"b": 2}\r\n\r\n: comment\n\nevent: x\ndata: one\ndata: two\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_cut_anywhere(size: int) -> None:
    parser = sse.EventParser()
    found = []
    for start in range(0, len(WHOLE), size):
        found += parser.feed(WHOLE[start : start + size])
    assert found == [b'{"a": 1}', b'{"b": 2}', b"one\ntwo"]


def test_an_event_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = sse.EventParser()
    with pytest.raises(sse.EventTooLong):
        for _ in range(20):
            list(parser.feed(b"data: 12345"))


def test_timeline_orders_phases_and_keeps_the_latest() -> None:
    now = [0.0]
    timeline = Timeline(lambda: now[0])
    for at, phase in ((1, Phase.DISPATCHED), (2, Phase.DISPATCHED), (3, Phase.FINISHED)):
        now[0] = at
        timeline.mark(phase)
    now[0] = 9
    timeline.mark_once(Phase.FINISHED)
    assert timeline.since_received() == {"received": 0, "dispatched": 2000, "finished": 3000}
    assert timeline.seconds(Phase.DISPATCHED, Phase.FINISHED) == 1
    assert timeline.seconds(Phase.QUEUED, Phase.FINISHED) is None
