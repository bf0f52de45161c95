"""A bad hour over NCCL: real workers on two GPUs die in a chunk, or stand still in one.

Chunks are held back for seconds, so that a peer can be stopped between its reservation and its
rows: NCCL then waits for a process that never answers. Whoever is left must fail that request in
time, must not be ended by NCCL or by torch's watchdog a minute later, and must serve the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

from tests.e2e.conftest import REFERENCE_MODEL, Conversions, worker_set
from tests.e2e.prompts import chat_prompts
from tests.e2e.servers import Worker, ask, begin, idle
from tests.gpu.test_serving import FLAGS, PREFILL_FLAGS

pytestmark = pytest.mark.gpu

PREFILL_GPU, DECODE_GPU = "0", "1"
TRANSFER_TIMEOUT, HELD_BACK = 10, 5
LIMIT = HELD_BACK + TRANSFER_TIMEOUT + 10
WATCHDOG_SECONDS = 75
TOKENS = 12


@dataclass
class Fleet:
    """Workers that stay, and two that die; ``slow`` holds back its second and third chunk."""

    slow: Worker
    exits: Worker
    stays: Worker
    dies: Worker
    right: dict[int, list[int]] = field(default_factory=dict)

    def answers(self, prefill: Worker, decode: Worker, number: int = 0) -> list[int]:
        """Tokens that both workers answer with, always the same for a prompt."""
        ids = ask(prefill, decode, chat_prompts(4)[number], TOKENS, timeout=LIMIT).ids
        assert ids == self.right.setdefault(number, ids)
        return ids


@pytest.fixture
def fleet(conversions: Conversions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = conversions.of(REFERENCE_MODEL, 2, "0")
    common = (*FLAGS, "--transfer", "nccl", "--transfer-timeout", str(TRANSFER_TIMEOUT))
    prefill = (*common, *PREFILL_FLAGS, "--base-gpu-id", PREFILL_GPU)
    decode = (*common, "--mode", "snapmla", "--base-gpu-id", DECODE_GPU)
    delay = f"delay:after=1:count=2:delay_seconds={HELD_BACK}"
    with worker_set(tmp_path_factory.mktemp("logs")) as start:
        workers = Fleet(
            slow=start("prefill", model, *prefill, "--fault", delay),
            exits=start("prefill", model, *prefill, "--fault", "exit:after=1"),
            stays=start("decode", model, *decode),
            dies=start("decode", model, *decode),
        )
        for worker in (workers.slow, workers.exits, workers.stays, workers.dies):
            worker.wait()
        yield workers


def failed(leg: Future[httpx.Response]) -> str:
    """Why a leg got no answer, in time."""
    try:
        response = leg.result(LIMIT)
    except httpx.TransportError as error:
        return repr(error)
    assert response.status_code >= 400 and "output_ids" not in response.text, response.text
    return response.text


def test_who_is_left_fails_the_request_in_time_and_serves_the_next(fleet: Fleet) -> None:
    prompt = chat_prompts(4)[1]
    fleet.answers(fleet.exits, fleet.stays)
    fleet.answers(fleet.slow, fleet.dies)
    with ThreadPoolExecutor(2) as pool:
        decoding, prefilling = begin(pool, fleet.exits, fleet.stays, prompt, TOKENS)
        assert failed(prefilling)
        assert "gone" in failed(decoding)
        prefill_died = time.monotonic()

        decoding, prefilling = begin(pool, fleet.slow, fleet.dies, prompt, TOKENS)
        time.sleep(HELD_BACK / 2)
        with fleet.dies.standing_still():
            time.sleep(HELD_BACK)  # prefill now sends
            fleet.dies.kill()
        assert failed(prefilling) and failed(decoding)

        decoding, prefilling = begin(pool, fleet.slow, fleet.stays, prompt, TOKENS)
        time.sleep(HELD_BACK / 2)
        with fleet.stays.standing_still():
            assert failed(prefilling)
            decode_stood_still = time.monotonic()
        assert failed(decoding)

    for number in range(4):
        fleet.answers(fleet.slow, fleet.stays, number)
    time.sleep(max(prefill_died, decode_stood_still) + WATCHDOG_SECONDS - time.monotonic())
    fleet.answers(fleet.slow, fleet.stays)
    idle(fleet.slow)
    idle(fleet.stays)
