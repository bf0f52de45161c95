"""What the benchmark of cached prefixes makes of the answers that it gets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tpla.benchmarks.cached_prefix import Endpoint, Plan, rows_of, time_to_first_token, worker
from tpla.benchmarks.half_load import LoadError
from tpla.core.config import Role, Transfer

PLAN = Plan(
    "any", None, Transfer.ZMQ, (64,), 8, 3, 60.0, Path("."), ("--device", "cpu"), ("--p",), ("--d",)
)
CACHED = 64


class Legs(BaseHTTPRequestHandler):
    """A worker that says that it had ``CACHED`` tokens, and refuses other rooms than a number."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        good = isinstance(body["bootstrap_room"], int) and body["bootstrap_port"] == 7
        answer = json.dumps({"meta_info": {"cached_tokens": CACHED}}).encode()
        self.send_response(200 if good else 503)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Legs) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_prompt_counts_only_where_prefill_had_its_prefix(port: int) -> None:
    prefill, decode = Endpoint("early", port, 7), Endpoint("decode", port)
    assert asyncio.run(time_to_first_token(prefill, decode, [1, 2], CACHED)) > 0
    with pytest.raises(LoadError, match="had cached 64 of 65 tokens"):
        asyncio.run(time_to_first_token(prefill, decode, [1, 2], CACHED + 1))
    with pytest.raises(LoadError, match="503"):
        asyncio.run(time_to_first_token(Endpoint("late", port, 8), decode, [1, 2], CACHED))


def test_the_first_prompt_of_a_prefix_is_no_cached_one() -> None:
    early, late = rows_of({"early": [90.0, 2.0, 1.0, 3.0], "late": [80.0, 4.0, 5.0, 3.0]}, 64, PLAN)
    assert (early.ttft_ms, early.least_ms, early.most_ms, early.uncached_ms) == (2, 1, 3, 90)
    assert (early.ratio_to_late, late.ratio_to_late) == (2, 1)


def test_prefill_workers_differ_in_when_they_send_alone() -> None:
    early, late = (
        worker(Role.PREFILL, Endpoint(name, 1, 2), Path("model"), PLAN).command
        for name in ("early", "late")
    )
    assert [pair for pair in zip(early, late, strict=True) if pair[0] != pair[1]] == [
        tuple(f"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX={value}" for value in "10")
    ]
    decode = worker(Role.DECODE, Endpoint("decode", 1), Path("model"), PLAN).command
    assert "--d" in decode and "--p" in early and "--p" not in decode
