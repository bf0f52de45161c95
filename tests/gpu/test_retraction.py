"""Decode with a pool that is too small for its requests: rows leave the GPU and come back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.e2e.conftest import REFERENCE_MODEL, Conversions, worker_set
from tests.e2e.prompts import counting_prompts
from tests.e2e.servers import Answer, Worker, ask, idle
from tests.gpu.test_serving import FLAGS, PREFILL_FLAGS

pytestmark = pytest.mark.gpu

REQUESTS, TOKENS = 14, 200
SMALL_POOL = ("--max-total-tokens", "1280", "--num-reserved-decode-tokens", "16")
PENALTY = 0.01
"""Too small to change an answer, but each token that was generated is counted for it."""


@pytest.fixture
def workers(conversions: Conversions, tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    model = conversions.of(REFERENCE_MODEL, 2, "0")
    with worker_set(tmp_path) as start:
        prefill = start("prefill", model, *FLAGS, *PREFILL_FLAGS)
        small = ("--mode", "snapmla", "--kv-format", "fp8", *SMALL_POOL)
        decode = start("decode", model, *FLAGS, *small)
        yield prefill.wait(), decode.wait()


def test_answers_survive_retraction(workers: tuple[Worker, Worker]) -> None:
    def answer(prompt: list[int]) -> Answer:
        return ask(*workers, prompt, TOKENS, frequency_penalty=PENALTY)

    prompts = counting_prompts(REQUESTS)
    alone = [answer(prompt).ids for prompt in prompts]
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(answer, prompts))
    assert [each.ids for each in answers] == alone
    assert all(len(ids) > 100 for ids in alone), "too short to fill the pool"
    retractions = sum(a.decode.json()["meta_info"].get("num_retractions", 0) for a in answers)
    print(f"{retractions} retractions")
    assert retractions > 0, "the pool was large enough: nothing was retracted"
    for worker in workers:
        idle(worker)
