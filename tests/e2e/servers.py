"""Real workers for tests: started, asked and stopped, with nothing left behind."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tpla.workers.ports import free_ports

START_SECONDS = 420
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Answer:
    """Both legs of one request."""

    decode: httpx.Response
    prefill: httpx.Response

    @property
    def ids(self) -> list[int]:
        assert self.decode.status_code == 200, self.decode.text
        body = self.decode.json()
        assert body["meta_info"]["finish_reason"]["type"] != "abort", body
        return body["output_ids"]


class Worker:
    """One ``tpla worker`` process with its ranks."""

    def __init__(self, role: str, model: Path, log: Path, *arguments: str) -> None:
        self.port, self.bootstrap_port, ranks_port = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [
            *(sys.executable, "-m", "tpla.core.cli", "worker", role, "--model", str(model)),
            *("--port", str(self.port), "--nccl-port", str(ranks_port)),
            *("--skip-server-warmup", *arguments),
        ]
        if role == "prefill":
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> Worker:
        """Return when the worker serves."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            time.sleep(0.3)
        raise AssertionError(f"not ready after {START_SECONDS} s:\n{self.log.read_text()[-4000:]}")

    def accounting(self) -> dict[str, Any]:
        """What the worker holds now (rank 0)."""
        state = httpx.get(f"{self.url}/server_info", timeout=30).json()["internal_states"][0]
        return state["tpla"]

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The main process and every rank, as on a host that swaps."""
        with suspended(psutil.Process(self.process.pid)):
            yield

    def kill(self) -> None:
        """SIGKILL to the main process and every rank, as when a host dies."""
        stop_tree(self.process.pid)
        self.process.wait(10)


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """A process and all that it started stand still; what was killed meanwhile is no error."""
    family = [process, *process.children(recursive=True)]
    for each in family:
        each.suspend()
    try:
        yield
    finally:
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.resume()


def stop_tree(pid: int) -> None:
    """SIGKILL a process and all that it started, and wait until they are gone."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)


def ask(
    prefill: Worker,
    decode: Worker,
    prompt: Sequence[int],
    tokens: int,
    *,
    timeout: float = 120,
    **sampling: Any,
) -> Answer:
    """One greedy request on both legs, as the router sends it, with further sampling parameters."""
    with ThreadPoolExecutor(2) as pool:
        legs = begin(pool, prefill, decode, prompt, tokens, timeout=timeout, **sampling)
        return Answer(legs[0].result(), legs[1].result())


def begin(
    pool: ThreadPoolExecutor,
    prefill: Worker,
    decode: Worker,
    prompt: Sequence[int],
    tokens: int,
    *,
    timeout: float = 120,
    **sampling: Any,
) -> tuple[Future[httpx.Response], Future[httpx.Response]]:
    """The same without waiting: decode's leg and prefill's."""
    body = body_of(prefill, prompt, tokens, **sampling)
    decoding, prefilling = (
        pool.submit(httpx.post, f"{worker.url}/generate", json=body, timeout=timeout)
        for worker in (decode, prefill)
    )
    return decoding, prefilling


def body_of(prefill: Worker, prompt: Sequence[int], tokens: int, **sampling: Any) -> dict[str, Any]:
    """What both legs are asked, in a room of its own."""
    return {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **sampling},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.SystemRandom().randrange(1, 2**62),
    }


def idle(worker: Worker, timeout: float = 45.0) -> dict[str, Any]:
    """The worker's accounting once it holds nothing; fails if it keeps something."""
    deadline = time.monotonic() + timeout
    while True:
        account = worker.accounting()
        held = [
            account["running"],
            *account["queues"].values(),
            account["pool_tokens"] - account["free_tokens"] - account["cached_tokens"],
            account["transfer"]["rooms"],
            account["transfer"]["statuses"],
            account["transfer"]["failure_records"],
            account["transfer"]["tracked_rooms"],
        ]
        if not any(held):
            return account
        assert time.monotonic() < deadline, f"still held: {account}"
        time.sleep(0.3)
