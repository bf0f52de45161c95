"""Rows from GPU to GPU over NCCL: two processes, real pools, and peers that die."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

from tests.unit.group_peers import (
    PATIENCE,
    Cache,
    Decode,
    Prefill,
    Process,
    decode_process,
    prefill_process,
    seconds_until,
)
from tests.unit.transfer_pair import eventually
from tpla.core.config import FaultPlan
from tpla.core.config.environment import NCCL_TRANSFER
from tpla.core.latent_layout import KVFormat
from tpla.workers.transfer import group_plane

pytestmark = pytest.mark.gpu

Closing = Callable[[Any], Any]

ROOM = 11
FP8 = Cache(
    page_size=64, core_dims=(0, 64) * 30 + (0,), pages=60, kv_lora_rank=512, qk_rope_head_dim=64,
    row_align=16, backend="nccl", chunk_bytes=16 << 20,
)  # fmt: skip
BF16 = Cache(
    page_size=64, core_dims=(0,) * 61, pages=60, kv_lora_rank=512, qk_rope_head_dim=64,
    row_align=16, backend="nccl", chunk_bytes=16 << 20, groups=1, kv_format=KVFormat.BF16,
)  # fmt: skip
# The first rows of a machine wait for kernels that are compiled and for NCCL's first connection.
PATIENT = PATIENCE.model_copy(update={"push": 20.0, "ack": 20.0})
SOURCE, TARGET = list(range(FP8.pages)), list(reversed(range(FP8.pages)))
LIMIT = PATIENCE.push + 2
WATCHDOG_SECONDS = 75
"""Torch's watchdog ends a process a minute after it saw an operation of NCCL fail, if it may."""


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_plane, "CHUNK_BYTES", FP8.chunk_bytes)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's, in this process and in those that it starts."""
    for name, value in NCCL_TRANSFER.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def closing() -> Iterator[Closing]:
    """Takes what is closed at the end of a test, and returns it."""
    opened: list[Any] = []

    def register(rank: Any) -> Any:
        opened.append(rank)
        return rank

    yield register
    for rank in opened:
        rank.close()


def arrives(prefill: Prefill, decode: Process, room: int) -> bool:
    """Whether a decode rank that is ready gets the room's rows bit for bit."""
    decode.pipe.send(prefill.endpoint)
    decode.pipe.send("go")
    prefill.open(room)
    prefill.push(room, SOURCE)
    assert eventually(lambda: room in prefill.events.done, 30), prefill.events.failed
    decode.pipe.send(prefill.rows(SOURCE, prefill.cache.layout))
    return bool(decode.pipe.recv())


def told_prefill_process(pipe: Connection, cache: Cache, pages: list[int]) -> None:
    """Serve each room when told its number and then to go on; say why it failed, if it did."""
    group_plane.CHUNK_BYTES = cache.chunk_bytes
    prefill = Prefill(cache)
    events = prefill.events

    def ended(room: int) -> bool:
        return room in events.done or room in events.failed

    pipe.send((prefill.endpoint, prefill.rows(pages, cache.layout)))
    for room in iter(pipe.recv, None):
        prefill.open(room)
        pipe.send("reserved")
        pipe.recv()
        prefill.push(room, pages)
        eventually(partial(ended, room), 30)
        pipe.send(str(events.failed.get(room, "")))


@pytest.mark.parametrize("cache", [FP8, BF16], ids=["fp8", "bf16"])
def test_pages_of_61_layers_arrive_bit_for_bit(closing: Closing, cache: Cache) -> None:
    cache = replace(cache, patience=PATIENT)
    prefill = closing(Prefill(cache))
    decode = closing(Process(decode_process, cache, ROOM, TARGET))
    assert decode.pipe.recv() == "ready"
    assert arrives(prefill, decode, ROOM)


def test_one_flipped_bit_is_noticed(closing: Closing) -> None:
    prefill = closing(Prefill(FP8, FaultPlan(kind="flip", after=1)))
    decode = closing(Process(decode_process, FP8, ROOM, TARGET))
    assert decode.pipe.recv() == "ready"
    decode.pipe.send(prefill.endpoint)
    decode.pipe.send("go")
    prefill.open(ROOM)
    prefill.push(ROOM, SOURCE)
    assert eventually(lambda: ROOM in prefill.events.failed)
    assert "ChecksumMismatch" in str(prefill.events.failed[ROOM])


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_decode_rank_that_stops_or_dies_is_given_up_in_time_and_a_new_one_is_served(
    closing: Closing, end: str
) -> None:
    prefill = closing(Prefill(FP8))
    ending = closing(Process(decode_process, FP8, ROOM, TARGET))
    successor = closing(Process(decode_process, FP8, ROOM + 1, TARGET))
    assert ending.pipe.recv() == "ready" == successor.pipe.recv()
    ending.pipe.send(prefill.endpoint)
    prefill.open(ROOM)
    if end == "stop":
        ending.pipe.send("stop")
        assert eventually(ending.stands_still)
    else:
        ending.process.kill()
    prefill.push(ROOM, SOURCE)
    assert seconds_until(lambda: ROOM in prefill.events.failed, LIMIT) < LIMIT
    assert eventually(lambda: prefill.sender.accounting()["peers"] == 0)
    assert arrives(prefill, successor, ROOM + 1)


def test_a_prefill_rank_outlives_torchs_watchdog_when_its_peer_died_in_a_chunk(
    closing: Closing,
) -> None:
    prefill = closing(Process(told_prefill_process, FP8, SOURCE))
    dying = closing(Process(decode_process, FP8, ROOM, TARGET))
    endpoint, rows = prefill.pipe.recv()
    assert dying.pipe.recv() == "ready"
    dying.pipe.send(endpoint)
    prefill.pipe.send(ROOM)
    assert prefill.pipe.recv() == "reserved"
    dying.pipe.send("stop")
    assert eventually(dying.stands_still)
    prefill.pipe.send("go")
    assert prefill.pipe.recv()  # why it failed
    dying.close()
    time.sleep(WATCHDOG_SECONDS)
    assert prefill.process.is_alive()
    successor = closing(Process(decode_process, FP8, ROOM + 1, TARGET))
    assert successor.pipe.recv() == "ready"
    successor.pipe.send(endpoint)
    successor.pipe.send("go")
    prefill.pipe.send(ROOM + 1)
    assert prefill.pipe.recv() == "reserved"
    prefill.pipe.send("go")
    assert prefill.pipe.recv() == ""
    successor.pipe.send(rows)
    assert successor.pipe.recv()


def test_a_prefill_rank_that_dies_in_a_chunk_is_given_up_and_a_new_one_serves(
    closing: Closing,
) -> None:
    decode = closing(Decode(FP8))
    dying = closing(Process(prefill_process, FP8, ROOM, SOURCE, FaultPlan(kind="exit", after=1)))
    successor = closing(Process(prefill_process, FP8, ROOM + 1, SOURCE, None))
    endpoint, _ = dying.pipe.recv()
    second_endpoint, rows = successor.pipe.recv()
    decode.reserve(ROOM, endpoint, TARGET)
    assert eventually(lambda: not dying.process.is_alive(), 30)
    assert seconds_until(lambda: ROOM in decode.events.failed, LIMIT) < LIMIT
    decode.receiver.forget(ROOM)
    decode.reserve(ROOM + 1, second_endpoint, TARGET)
    assert eventually(lambda: ROOM + 1 in decode.events.done, 30), decode.events.failed
    assert decode.holds(TARGET, rows)
