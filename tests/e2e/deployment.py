"""`deploy/launch.sh` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from tests.e2e.servers import REPOSITORY, stop_tree
from tpla.workers.ports import free_ports

MODEL = "tpla-reference"


class Deployment:
    """A running `deploy/launch.sh` and its endpoint."""

    def __init__(self, log: Path, state: Path, *arguments: str) -> None:
        (self.port,) = free_ports(1)
        self.base = f"http://127.0.0.1:{self.port}"
        self.state, self.log = state, log
        command = [str(REPOSITORY / "deploy" / "launch.sh"), "--port", str(self.port)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--state", str(state), *arguments],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "COLUMNS": "200"},
            )  # fmt: skip

    def wait(self, timeout: float = 480) -> Deployment:
        deadline = time.monotonic() + timeout
        while "ready after" not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.5)
        return self

    def client(self, timeout: float = 120) -> openai.OpenAI:
        """The official client, which reports errors instead of trying again."""
        return openai.OpenAI(
            base_url=f"{self.base}/v1", api_key="none", timeout=timeout, max_retries=0
        )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def workers(self) -> list[dict[str, Any]]:
        """The router's view."""
        return list(httpx.get(f"{self.base}/workers", timeout=30).json()["workers"])

    def healthy(self, role: str, count: int, timeout: float = 240) -> None:
        """Wait until the router sees ``count`` healthy workers of a role."""
        deadline = time.monotonic() + timeout
        while sum(w["healthy"] for w in self.workers() if w["role"] == role) != count:
            assert time.monotonic() < deadline, self.workers()
            time.sleep(0.5)

    def revived(self, killed: dict[str, Any], timeout: float = 240) -> None:
        """Wait until another process serves at a killed worker's address, and the router knows.

        Health alone would not do: the router may not have noticed the death yet.
        """
        deadline = time.monotonic() + timeout
        while not any(
            worker["url"] == killed["url"]
            and worker["healthy"]
            and worker["instance_id"] not in (None, killed["instance_id"])
            for worker in self.workers()
        ):
            assert time.monotonic() < deadline, self.workers()
            time.sleep(0.5)

    def accounting(self, worker: dict[str, Any]) -> dict[str, Any]:
        """What one worker holds now."""
        info = httpx.get(f"{worker['url']}/server_info", timeout=30).json()
        return dict(info["internal_states"][0]["tpla"])

    def idle(self, timeout: float = 60) -> None:
        """Fails unless every worker and the router come to hold nothing."""
        deadline = time.monotonic() + timeout
        while held := self.held():
            assert time.monotonic() < deadline, held
            time.sleep(0.5)

    def held(self) -> list[str]:
        """What is still held, worker by worker."""
        found = []
        for worker in self.workers():
            if not worker["healthy"]:
                continue
            account = self.accounting(worker)
            pages = account["pool_tokens"] - account["free_tokens"] - account["cached_tokens"]
            transfer = account["transfer"]
            amounts = {
                "pages": pages,
                "running": account["running"],
                "active": worker["active"],
                **account["queues"],
                **{k: transfer[k] for k in ("rooms", "statuses", "tracked_rooms")},
            }
            found += [f"{worker['id']}: {k}={v}" for k, v in amounts.items() if v]
        return found

    def process_of(self, worker: dict[str, Any]) -> psutil.Process:
        """A worker's main process, whose children are its ranks."""
        port = httpx.URL(worker["url"]).port
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, ValueError):
                line = process.cmdline()
                if "worker" in line and line[line.index("--port") + 1] == str(port):
                    return process
        raise AssertionError(f"no process of {worker}")

    def kill(self, worker: dict[str, Any]) -> None:
        """SIGKILL a worker and its ranks, as a crash of its host would."""
        stop_tree(self.process_of(worker).pid)

    def interrupt(self) -> list[psutil.Process]:
        """Ctrl-C; returns processes that are left over (there must be none)."""
        parent = psutil.Process(self.process.pid)
        family = parent.children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=5)
        return list(alive)

    def destroy(self) -> None:
        """Whatever happened in the test, nothing stays."""
        if self.process.poll() is None:
            stop_tree(self.process.pid)


@contextmanager
def deployed(directory: Path, *arguments: str) -> Iterator[Deployment]:
    """`deploy/launch.sh` from its first answer until Ctrl-C, which must leave nothing behind."""
    running = Deployment(directory / "launch.log", directory / "state", *arguments)
    try:
        yield running.wait()
        assert running.interrupt() == [], "Ctrl-C left processes behind"
        assert running.process.returncode == 0
    finally:
        running.destroy()


def chat(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    """A greedy completion."""
    return client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, **{"max_tokens": 60, **options}
    )
