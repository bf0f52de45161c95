"""Workers that are told to stop do so by themselves, ranks and all."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import REFERENCE_MODEL, Conversions, worker_set
from tests.e2e.prompts import chat_prompts
from tests.e2e.servers import Worker, ask, idle

pytestmark = pytest.mark.e2e

SECONDS = 15
"""SGLang looks for the signal every 5 s, and kills ranks that go on 15 s after it has seen it."""


def stop(worker: Worker) -> float:
    """SIGTERM, until the worker and all of its ranks are gone."""
    main = psutil.Process(worker.process.pid)
    family = [main, *main.children(recursive=True)]
    begun = time.monotonic()
    worker.process.terminate()
    worker.process.wait(60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    return time.monotonic() - begun


def test_workers_stop_on_sigterm_without_being_killed(
    conversions: Conversions, tmp_path: Path
) -> None:
    model = conversions.of(REFERENCE_MODEL, 2, "0")
    with worker_set(tmp_path) as start:
        decode = start("decode", model, "--tp-size", "2", "--page-size", "16")
        prefill = start("prefill", model, "--page-size", "16")
        for worker in (decode, prefill):
            worker.wait()
        assert ask(prefill, decode, chat_prompts(1)[0], 4).ids
        idle(decode)
        for worker in (decode, prefill):
            seconds = stop(worker)
            print(f"{worker.log.stem}: stopped after {seconds:.1f} s")
            assert seconds < SECONDS
            assert "Traceback" not in worker.log.read_text()
