"""A worker that speaks HTTP as SGLang 0.5.16 does in prefill/decode mode, with faults on demand.

Each fake is a real uvicorn server on a loopback port, in a thread of its own. A decode fake waits
until the prefill fake of the same :class:`Fabric` has "sent" the room's KV. Answers are words made
from the prompt, so that tests can tell whose answer they see.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

MODEL = "tiny-mla"
CONTEXT_CHARS = 2000
ROOM_TIMEOUT_SECONDS = 20.0


class ServerThread:
    """A uvicorn server in a thread; stopped at the end of the ``with`` block.

    Its socket listens from the beginning, so that servers may start and stop side by side.
    """

    def __init__(self, make: Callable[[], uvicorn.Server]) -> None:
        self._make = make
        self.server: uvicorn.Server
        self.loop: asyncio.AbstractEventLoop
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.server = self._make()
            await self.server.serve(sockets=[self.socket])

        asyncio.run(main())

    def __enter__(self) -> ServerThread:
        self._thread.start()
        return self

    def wait_started(self) -> None:
        wait_until(lambda: getattr(getattr(self, "server", None), "started", False))

    def request_stop(self) -> None:
        self.wait_started()
        self.server.should_exit = True

    def __exit__(self, *exc: object) -> None:
        self.request_stop()
        self._thread.join(timeout=20)
        self.socket.close()
        assert not self._thread.is_alive(), "a server thread did not stop"


def wait_until(condition: Callable[[], object], timeout: float = 10.0, what: str = "") -> None:
    """Poll ``condition`` until it holds; fail after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"timed out waiting for {what or condition}"
        time.sleep(0.01)


class Fabric:
    """Where the KV of a room has landed, or failed to."""

    def __init__(self) -> None:
        self.landed: dict[int, bool] = {}

    def put(self, room: int, ok: bool) -> None:
        self.landed.setdefault(room, ok)


@dataclass
class Faults:
    """What a fake does wrong; the default is nothing. ``only`` limits it to so many requests."""

    status: int | None = None
    """Answer with this HTTP status and SGLang's flat error."""
    message: str = "Internal server error: boom"
    delay: float = 0.0
    """Before the request is worked on."""
    token_delay: float = 0.0
    die: bool = False
    """Kill the whole server on arrival."""
    die_after: int | None = None
    """Kill the whole server after so many tokens."""
    hang: bool = False
    """Take the request and say nothing."""
    hang_after: int | None = None
    truncate_after: int | None = None
    """End the stream early, without finish_reason or [DONE]."""
    abort_after: int | None = None
    """finish_reason abort after so many tokens, status 200."""
    error_after: int | None = None
    """An error event after so many tokens, followed by [DONE] as SGLang does."""
    garbage: bool = False
    lose_kv: bool = False
    """Prefill: report a failed transfer, so that decode fails as well."""
    health_status: int = 200
    health_delay: float = 0.0
    """A scheduler that is busy, or (with ``stopped``) a process that is stopped."""
    stopped: bool = False
    info_delay: float = 0.0
    """A scheduler that is too busy to say what the worker is."""
    only: int | None = None


@dataclass
class Seen:
    """One request that reached a fake."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    outcome: str = "running"


@dataclass
class FakeWorker:
    """A fake prefill or decode worker."""

    role: str
    fabric: Fabric
    faults: Faults = field(default_factory=Faults)
    model: str = MODEL
    mode: str | None = None
    instance_id: str | None = None
    dp_size: int = 1
    bootstrap_port: int = 8998
    api_key: str | None = None
    seen: list[Seen] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    thread: ServerThread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = ServerThread(self._make_server)

    def __enter__(self) -> FakeWorker:
        self.thread.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.thread.__exit__(*exc)

    @property
    def url(self) -> str:
        return self.thread.url

    @property
    def running(self) -> int:
        return sum(item.outcome == "running" for item in self.seen)

    def kill(self, gap: float = 0.0) -> None:
        """Die as a process does: listen no more, and ``gap`` seconds later reset connections."""
        self.thread.loop.call_soon_threadsafe(self._die, gap)

    def _die(self, gap: float = 0.0) -> None:
        for server in self.thread.server.servers:
            server.close()
        self.thread.loop.call_later(gap, self._reset_connections)

    def _reset_connections(self) -> None:
        for connection in list(self.thread.server.server_state.connections):
            connection.transport.abort()

    def _make_server(self) -> uvicorn.Server:
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/health", self._health),
                Route("/model_info", self._model_info),
                Route("/server_info", self._server_info),
                Route("/v1/models", self._models),
            ]
        )
        return uvicorn.Server(
            uvicorn.Config(
                app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1
            )
        )

    async def _health(self, request: Request) -> Response:
        await asyncio.sleep(self.faults.health_delay)
        return Response(status_code=self.faults.health_status)

    async def _model_info(self, request: Request) -> Response:
        await asyncio.sleep(self.faults.health_delay if self.faults.stopped else 0)
        return JSONResponse({"model_path": self.model})

    async def _server_info(self, request: Request) -> Response:
        await asyncio.sleep(self.faults.info_delay)
        info = {
            "disaggregation_mode": self.mode or self.role,
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "served_model_name": self.model,
            "api_key": "secret that must not leak",
        }
        held = {"instance_id": self.instance_id, "running": self.running}
        info["internal_states"] = [{"tpla": held}] * self.dp_size
        return JSONResponse(info)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _abort(self, request: Request) -> Response:
        self.aborted.append((await request.json())["rid"])
        return Response(status_code=200)

    async def _generate(self, request: Request) -> Response:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return flat_error(401, "Unauthorized")
        try:
            body = await request.json()
        except ClientDisconnect:
            return Response(status_code=499)
        item = Seen(request.url.path, body, dict(request.headers))
        self.seen.append(item)
        faults = self._take_faults()
        refusal = await self._before(item, faults)
        if refusal is not None:
            item.outcome = "refused"
            return refusal
        answer = _Answer(self, item, faults)
        if body.get("stream"):
            return _Stream(answer)
        return await self._unstreamed(request, answer)

    def _take_faults(self) -> Faults:
        if self.faults.only is None:
            return self.faults
        if self.faults.only == 0:
            return Faults()
        self.faults.only -= 1
        return self.faults

    async def _before(self, item: Seen, faults: Faults) -> Response | None:
        if faults.die:
            item.outcome = "died"
            self._die()
            await asyncio.sleep(3600)
        await asyncio.sleep(faults.delay)
        if faults.status is not None:
            return flat_error(faults.status, faults.message)
        if faults.garbage:
            return Response(b"\xff not json", status_code=200)
        prompt = prompt_of(item.body)
        if len(prompt) > CONTEXT_CHARS:
            return flat_error(
                400,
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({CONTEXT_CHARS} tokens).",
            )
        if item.body.get("seed") == 666:
            return flat_error(400, "seed 666 is not allowed")
        return None

    async def _unstreamed(self, request: Request, answer: _Answer) -> Response:
        work = asyncio.create_task(answer.whole())
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=0.02)
                if await request.is_disconnected():
                    answer.item.outcome = "disconnected"
                    return Response(status_code=499)
            return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


class _Answer:
    """The tokens of one request, in SGLang's shapes."""

    def __init__(self, worker: FakeWorker, item: Seen, faults: Faults) -> None:
        self.worker = worker
        self.item = item
        self.faults = faults
        self.chat = "messages" in item.body
        words = prompt_of(item.body).split() or ["empty"]
        limit = item.body.get("max_completion_tokens") or item.body.get("max_tokens") or 4
        if worker.role == "prefill":
            limit = 1
        seed = item.body.get("seed")
        suffix = "" if seed is None else f"#{seed}"
        self.words = [f"{words[i % len(words)]}{suffix} " for i in range(limit)]
        self.prompt_tokens = len(words)

    async def whole(self) -> Response:
        text = ""
        try:
            async for word in self._tokens():
                text += word
        except _Reported as report:
            self.item.outcome = "failed"
            return flat_error(report.status, report.message)
        finish = "length"
        if self.faults.abort_after is not None:
            finish = "abort"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": self._logprobs()}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        self.item.outcome = "done"
        return JSONResponse(
            {
                "id": self.item.body["rid"],
                "object": "chat.completion" if self.chat else "text_completion",
                "created": 1,
                "model": self.item.body.get("model", "default"),
                "choices": [choice],
                "usage": self._usage(),
            }
        )

    async def events(self) -> AsyncIterator[bytes]:
        count = 0
        try:
            async for word in self._tokens():
                if count == 0 and self.chat:
                    yield self._chunk(delta={"role": "assistant", "content": ""})
                if count == self.faults.truncate_after:
                    self.item.outcome = "truncated"
                    return
                if count == self.faults.abort_after:
                    self.item.outcome = "aborted"
                    yield self._chunk("", finish="abort")
                    yield b"data: [DONE]\n\n"
                    return
                yield self._chunk(word, delta={"content": word})
                count += 1
        except _Reported as report:
            error = {"object": "error", "message": report.message, "code": report.status}
            yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
            self.item.outcome = "failed"
            return
        self.item.outcome = "done"
        yield self._chunk("", delta={}, finish="length")
        options = self.item.body.get("stream_options") or {}
        if options.get("include_usage"):
            yield self._chunk(usage=True)
        yield b"data: [DONE]\n\n"

    async def _tokens(self) -> AsyncIterator[str]:
        if self.faults.hang:
            await asyncio.sleep(3600)
        room = self.item.body["bootstrap_room"]
        if self.worker.role == "prefill":
            self.worker.fabric.put(room, not self.faults.lose_kv)
            if self.faults.lose_kv:
                raise _Reported(500, "Prefill transfer failed: KVTransferError(boom)")
        else:
            await self._kv(room)
        for count, word in enumerate(self.words):
            if count == self.faults.die_after:
                self.item.outcome = "died"
                self.worker._die()
            if count == self.faults.hang_after:
                await asyncio.sleep(3600)
            if count == self.faults.error_after:
                raise _Reported(500, "Generation exploded")
            yield word
            await asyncio.sleep(self.faults.token_delay)

    async def _kv(self, room: int) -> None:
        end = time.monotonic() + ROOM_TIMEOUT_SECONDS
        while room not in self.worker.fabric.landed:
            if time.monotonic() > end:
                raise _Reported(500, "Decode transfer failed: KVTransferError(timeout)")
            await asyncio.sleep(0.005)
        if not self.worker.fabric.landed[room]:
            raise _Reported(500, "Decode transfer failed: KVTransferError(lost)")

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.words),
            "total_tokens": self.prompt_tokens + len(self.words),
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
        }

    def _logprobs(self) -> dict[str, Any] | None:
        if not self.item.body.get("logprobs"):
            return None
        if self.chat:
            entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
            return {"content": [entry]}
        return {"tokens": ["a"], "token_logprobs": [-0.5], "text_offset": [0], "top_logprobs": None}

    def _chunk(
        self,
        text: str = "",
        *,
        delta: dict[str, Any] | None = None,
        finish: str | None = None,
        usage: bool = False,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self.chat:
            choice["delta"] = delta or {}
        else:
            choice["text"] = text
        chunk: dict[str, Any] = {
            "id": self.item.body["rid"],
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": 1,
            "model": self.item.body.get("model", "default"),
            "choices": [] if usage else [choice],
        }
        if usage:
            chunk["usage"] = self._usage()
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class _Stream(StreamingResponse):
    """Notes a client that leaves, even before the first event."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(answer.events(), media_type="text/event-stream")
        self._item = answer.item

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._item.outcome == "running":
                self._item.outcome = "disconnected"


class _Reported(Exception):
    """An error that SGLang reports, in whichever shape the moment calls for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def flat_error(status: int, message: str) -> Response:
    """SGLang's error body."""
    error = {
        "object": "error", "message": message, "type": "BadRequest", "param": None, "code": status,
    }  # fmt: skip
    return JSONResponse(error, status_code=status)


def prompt_of(body: dict[str, Any]) -> str:
    """The request's prompt as text."""
    if "messages" in body:
        return " ".join(str(message.get("content")) for message in body["messages"])
    prompt = body["prompt"]
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
