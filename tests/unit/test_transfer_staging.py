"""Rows on their way through staging memory: what is stored late, or is not what was announced."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.unit.transfer_pair import Pair, SourcePool, eventually
from tpla.core.errors import ChecksumMismatch
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan
from tpla.core.messages import Chunk
from tpla.workers.transfer.chunk_rows import StagedRows
from tpla.workers.transfer.digest import Place, place_digest
from tpla.workers.transfer.protocol import Pages, PageSink
from tpla.workers.transfer.staging import HostIncoming, wire_bytes

ROOM, PAGES, TARGET = 5, np.array([3, 9], np.int32), [11, 12]
PLACE: Place = (ROOM, 0, 0, 2)
LAYOUT = CacheLayout(ModelPlan(64, 2, (0, 0, 0)), 0, 16, KVFormat.FP8)
NBYTES = 2 * SourcePool.page_size * LAYOUT.token_bytes


@pytest.fixture
def pair() -> Iterator[Pair]:
    opened = Pair("fake", 2)
    yield opened
    opened.close()


class SlowRows:
    """Rows that a device stores for as long as the test wants."""

    nbytes = NBYTES

    def __init__(self) -> None:
        self.begun, self.stored = threading.Event(), threading.Event()

    def begin(self, sink: PageSink, pages: Pages, place: Place, digest: int) -> None:
        self.begun.set()

    def intact(self) -> bool:
        return self.stored.wait(10)


def received(seed: int, place: Place, announced: int, damaged: bool = False) -> bool:
    """Whether rows whose digest began with ``seed`` are taken for those of ``place``."""
    outgoing = SourcePool().staging(LAYOUT, NBYTES)
    wire_B = outgoing.pack(PAGES, seed)
    assert len(wire_B) == wire_bytes(NBYTES)
    if damaged:
        outgoing.damage()
    incoming = HostIncoming(NBYTES, lambda pages, rows, intact: intact())
    incoming.wire(NBYTES).copy_(wire_B)
    rows = StagedRows(incoming, NBYTES)
    rows.begin(None, PAGES, place, announced)  # type: ignore[arg-type]
    return rows.intact()


def test_rows_are_taken_for_those_of_their_own_place_alone() -> None:
    other: Place = (ROOM, 1, 2, 2)
    seed = place_digest(PLACE)
    assert received(seed, PLACE, seed)
    assert not received(seed, PLACE, seed, damaged=True)
    assert not received(seed, other, seed), "announced for another place"
    assert not received(seed, other, place_digest(other)), "sent in another order than announced"


def test_memory_that_was_used_before_leaves_nothing_behind_shorter_rows() -> None:
    outgoing = SourcePool().staging(LAYOUT, 8 * NBYTES)
    first_B = outgoing.pack(PAGES[:1], 7).clone()
    outgoing.pack(np.arange(8, dtype=np.int32), 8)
    assert torch.equal(outgoing.pack(PAGES[:1], 7), first_B)


def test_a_room_is_given_up_when_what_was_begun_with_it_is_stored(pair: Pair) -> None:
    receiver, rows = pair.ranks[0].receiver, SlowRows()
    pair.sender.open(ROOM)
    pair.reserve(ROOM, TARGET)
    assert eventually(lambda: ROOM in pair.events.ready)
    receiver.on_rows(pair.endpoint, Chunk(*PLACE, 0), rows)
    assert rows.begun.is_set()
    fenced = threading.Thread(target=receiver.fence, args=(ROOM,))
    fenced.start()
    fenced.join(0.1)
    assert fenced.is_alive(), "pages were given back while a device wrote to them"
    rows.stored.set()
    fenced.join(5)
    assert not fenced.is_alive()
    receiver.on_stored(pair.endpoint, Chunk(*PLACE, 0), rows)
    assert receiver.accounting()["payload_bytes"] == 0


def test_chunks_are_verified_in_order_while_the_next_ones_are_stored(pair: Pair) -> None:
    receiver, first, second = pair.ranks[0].receiver, SlowRows(), SlowRows()
    pair.sender.open(ROOM)
    pair.reserve(ROOM, [1, 2, 3, 4])
    assert eventually(lambda: ROOM in pair.events.ready)
    chunks = [Chunk(ROOM, index, 2 * index, 2, 0) for index in (0, 1)]
    receiver.on_rows(pair.endpoint, chunks[0], first)
    receiver.on_rows(pair.endpoint, chunks[1], second)
    assert first.begun.is_set() and second.begun.is_set()
    for rows, chunk in ((first, chunks[0]), (second, chunks[1])):
        rows.stored.set()
        receiver.on_stored(pair.endpoint, chunk, rows)
    assert receiver.accounting()["payload_bytes"] == 2 * NBYTES
    assert ROOM not in pair.ranks[0].events.failed


@pytest.mark.parametrize(
    ("chunk", "nbytes"),
    [
        (Chunk(ROOM, 1, 0, 2, 0), NBYTES),
        (Chunk(ROOM, 0, 1, 2, 0), NBYTES),
        (Chunk(ROOM, 0, 0, 2, 0), NBYTES - 1),
        (Chunk(ROOM, 0, 0, 1, 0), NBYTES),
    ],
    ids=["not the next one", "past the room's pages", "bytes are missing", "bytes are left over"],
)
def test_a_chunk_that_cannot_be_the_next_one_is_not_stored_and_fails_the_room(
    pair: Pair, chunk: Chunk, nbytes: int
) -> None:
    receiver, rows = pair.ranks[0].receiver, SlowRows()
    rows.nbytes = nbytes
    pair.sender.open(ROOM)
    pair.reserve(ROOM, TARGET)
    assert eventually(lambda: ROOM in pair.events.ready)
    receiver.on_rows(pair.endpoint, chunk, rows)
    assert not rows.begun.is_set()
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    assert isinstance(pair.ranks[0].events.failed[ROOM], ChecksumMismatch)


def test_rows_that_come_before_pages_are_reserved_are_not_stored(pair: Pair) -> None:
    receiver, rows = pair.ranks[0].receiver, SlowRows()
    receiver.expect(ROOM, [pair.endpoint])
    receiver.on_rows(pair.endpoint, Chunk(*PLACE, 0), rows)
    assert not rows.begun.is_set()
