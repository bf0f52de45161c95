"""What a deployment's supervisor takes for a start; real processes."""

from __future__ import annotations

import http.server
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes.sglang_worker import wait_until
from tpla.workers.deployment import ProcessPlan, url_from_here
from tpla.workers.supervisor import StartFailed, Supervisor


@pytest.fixture
def answering() -> Iterator[str]:
    """URL of a server that nobody here has started, such as that of an older deployment."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    owner = Supervisor(tmp_path / "logs", Console(quiet=True))
    yield owner
    owner.stop()


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.mark.parametrize("others", [0, 1])
def test_a_process_that_ended_does_not_serve_though_its_url_answers(
    answering: str, supervisor: Supervisor, others: int
) -> None:
    code = "import sys; print('the port is taken'); sys.exit(3)"
    supervisor.start(ProcessPlan("router", python(code), answering))
    for _ in range(others):
        slow = ProcessPlan("worker", python("import time; time.sleep(60)"), answering + "missing")
        supervisor.start(slow)
    supervisor._running[0].process.wait(20)
    with pytest.raises(StartFailed, match=r"router ended with status 3[\s\S]*the port is taken"):
        supervisor.wait_ready(20, lambda names: None)


def test_what_answers_is_ready(answering: str, supervisor: Supervisor) -> None:
    supervisor.start(ProcessPlan("worker", python("import time; time.sleep(60)"), answering))
    assert supervisor.wait_ready(20, lambda names: None)


def test_what_is_stopped_while_it_starts_is_not_called_ready(
    answering: str, supervisor: Supervisor
) -> None:
    slow = ProcessPlan("worker", python("import time; time.sleep(60)"), answering + "missing")
    supervisor.start(slow)
    assert not supervisor.wait_ready(20, lambda names: supervisor.request_stop())


def test_a_log_can_be_rotated_by_truncating_it(supervisor: Supervisor, tmp_path: Path) -> None:
    go_on, log = tmp_path / "go on", tmp_path / "logs" / "worker.log"
    code = f"""
import pathlib, time
print("first", flush=True)
while not pathlib.Path({str(go_on)!r}).exists():
    time.sleep(0.05)
print("second", flush=True)
"""
    log.write_text("of an older launch")
    supervisor.start(ProcessPlan("worker", python(code), "http://127.0.0.1:1/"))
    wait_until(lambda: log.read_text() == "first\n", 20)
    os.truncate(log, 0)
    go_on.touch()
    wait_until(lambda: log.read_text() == "second\n", 20)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000"),
        ("router.example", "http://router.example:8000"),
    ],
)
def test_a_listening_address_is_reached_from_here(host: str, url: str) -> None:
    assert url_from_here(host, 8000) == url
