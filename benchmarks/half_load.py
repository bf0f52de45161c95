"""Requests to one worker whose other half is not there, and when their tokens came."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""SGLang's name for a prefill that is not there: the request's KV is what the pool holds."""

_SETTLE_TOKENS = 4
_LEAST_STEPS = 16
"""Of fewer, the tokens that the client reads late and together are a fifth of a batch's figure."""

_TIMEOUT = aiohttp.ClientTimeout(total=300)


@dataclass(frozen=True)
class DecodeTimes:
    """What a batch took, while all of its requests were running.

    Attributes:
        itl_ms: median time between two tokens of a request.
        tokens_per_s: of all requests together.
        steps: decode steps that were measured.
    """

    itl_ms: float
    tokens_per_s: float
    steps: int


class LoadError(RuntimeError):
    """The worker refused or lost a request."""


class NeverTogether(LoadError):
    """The first request was done before the last one ran, or soon after."""


def warm_up(url: str, batch: int) -> None:
    """Send ``batch`` short prompts to a decode worker, whose times do not count.

    Raises:
        LoadError: a request failed.
    """
    asyncio.run(_send_all(url, batch, 64, 8))


def measure_decode(url: str, batch: int, context: int, new_tokens: int) -> DecodeTimes:
    """Send ``batch`` prompts of ``context`` tokens at once; each asks for ``new_tokens``.

    Raises:
        NeverTogether: too few steps ran with the whole batch; ask for more tokens.
        LoadError: a request failed.
    """
    arrivals = asyncio.run(_send_all(url, batch, context, new_tokens))
    return decode_times(arrivals)


def profile_decode(
    url: str, batch: int, context: int, new_tokens: int, directory: Path, name: str
) -> None:
    """Have the worker write a trace of its kernels, one file a rank, while such a batch decodes.

    Args:
        url: of a decode worker.
        batch: requests.
        context: tokens of each prompt.
        new_tokens: tokens that each request asks for; the trace holds three quarters of the steps.
        directory: where the worker writes.
        name: what the file names begin with.

    Raises:
        LoadError: a request failed, or the worker refused to profile.
    """
    request = {
        "output_dir": str(directory.resolve()),
        "profile_prefix": name,
        "activities": ["GPU"],
        "num_steps": 3 * new_tokens // 4,
    }
    answer = httpx.post(f"{url}/start_profile", json=request, timeout=60)
    if answer.status_code != 200:
        raise LoadError(f"start_profile: status {answer.status_code}: {answer.text[:500]}")
    asyncio.run(_send_all(url, batch, context, new_tokens))


def decode_times(arrivals: list[list[float]]) -> DecodeTimes:
    """Times of the steps between the last request's first tokens and the first one's last.

    Args:
        arrivals: seconds at which each request's tokens came.

    Raises:
        NeverTogether: there are too few such steps.
    """
    start = max(times[min(_SETTLE_TOKENS, len(times) - 1)] for times in arrivals)
    stop = min(times[-1] for times in arrivals)
    within = [[t for t in times if start <= t <= stop] for times in arrivals]
    steps = max(len(times) - 1 for times in within)
    if steps < _LEAST_STEPS:
        raise NeverTogether(
            f"the requests ran together for {max(steps, 0)} steps, of {_LEAST_STEPS} at least; "
            "ask for more new tokens"
        )
    gaps = [later - earlier for times in within for earlier, later in pairwise(times)]
    return DecodeTimes(
        itl_ms=1e3 * statistics.median(gaps),
        tokens_per_s=len(arrivals) / statistics.mean(gaps),
        steps=steps,
    )


def measure_prefill(url: str, context: int, repetitions: int) -> float:
    """Median milliseconds from a request to its first token, one prompt after another.

    Args:
        url: of a prefill worker.
        context: tokens of a prompt; no two prompts begin alike.
        repetitions: prompts; one more comes before them.

    Raises:
        LoadError: a request failed.
    """
    return asyncio.run(_send_in_turn(url, context, repetitions))


async def _send_in_turn(url: str, context: int, repetitions: int) -> float:
    seconds = []
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        for room in range(repetitions + 1):
            begun = time.perf_counter()
            arrivals = await _send(session, url, room, context, 1)
            seconds.append(arrivals[0] - begun)
    return 1e3 * statistics.median(seconds[1:])


async def _send_all(url: str, batch: int, context: int, new_tokens: int) -> list[list[float]]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
        sends = (_send(session, url, room, context, new_tokens) for room in range(batch))
        return list(await asyncio.gather(*sends))


async def _send(
    session: aiohttp.ClientSession, url: str, room: int, context: int, new_tokens: int
) -> list[float]:
    prompt = np.random.default_rng(room).integers(10, 1000, context).tolist()
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        },
        "stream": True,
        "bootstrap_host": FAKE_BOOTSTRAP_HOST,
        "bootstrap_room": room + 1,
    }
    arrivals: list[float] = []
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status != 200:
            raise LoadError(f"status {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise LoadError(line.decode(errors="replace")[:500])
                arrivals.append(time.perf_counter())
    if len(arrivals) < min(new_tokens, 2):
        raise LoadError(f"a request of {context} tokens brought {len(arrivals)} chunks")
    return arrivals
