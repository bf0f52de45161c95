"""KV transfer: pages arrive whole on every decode rank, or the request fails and nothing leaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.transfer_pair import (
    METADATA,
    Pair,
    Pool,
    SourcePool,
    eventually,
    expected_rows,
)
from tpla.core.config import FaultPlan, TransferTimeouts
from tpla.core.errors import (
    ChecksumMismatch,
    LayoutMismatch,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from tpla.core.messages import Dropped
from tpla.workers.transfer import message_plane
from tpla.workers.transfer.protocol import Pages, Reservation, Rows

ROOM = 7_000_000_000_000_000_001
PAGES, TARGET = [3, 9, 4, 1, 8], [11, 12, 13, 2, 6]
IMPATIENT = TransferTimeouts(handshake=0.4, reserve=0.4, push=0.4, ack=0.4)


def assert_holds(pool: Pool, page: int, runs: list[np.ndarray]) -> None:
    """The page holds these rows of each run, bit for bit."""
    assert len(pool.written[page]) == len(runs)
    for stored, expected in zip(pool.written[page], runs, strict=True):
        np.testing.assert_array_equal(stored, expected)


def make_ready(pair: Pair, room: int = ROOM) -> None:
    """Open the room at both ends and wait until prefill may push."""
    pair.sender.open(room)
    pair.reserve(room, TARGET)
    assert eventually(lambda: room in pair.events.ready)


def full(*arguments: Any) -> Any:
    """As a device without memory."""
    raise MemoryError("this device is full")


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(*args: Any, **kwargs: Any) -> Pair:
        pairs.append(Pair(*args, **kwargs))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def finish(pair: Pair, room: int = ROOM) -> None:
    pair.sender.forget(room)
    for rank in pair.ranks:
        rank.receiver.forget(room)


@pytest.mark.parametrize("kind", ["fake", "zmq", "gloo"])
@pytest.mark.parametrize(
    ("groups", "core_dims"), [(1, (0, 0, 0)), (2, (0, 0, 0)), (2, (32, 0, 32)), (4, (0, 16, 32))]
)
def test_every_rank_gets_its_own_rows_at_its_own_pages(
    make_pair: Callable[..., Pair], kind: str, groups: int, core_dims: tuple[int, ...]
) -> None:
    pair = make_pair(kind, groups, core_dims=core_dims)
    make_ready(pair)
    pair.push(ROOM, PAGES[:2], last=False)
    pair.push(ROOM, PAGES[2:], start=2)
    assert eventually(lambda: ROOM in pair.events.done)
    for rank in pair.ranks:
        assert rank.events.done == {ROOM: METADATA}
        for source, target in zip(PAGES, TARGET, strict=True):
            assert_holds(rank.pool, target, expected_rows(source, rank.pool.layout))
    finish(pair)
    assert pair.idle()


def test_the_wire_carries_only_each_ranks_own_bytes(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("fake", 2)
    make_ready(pair)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.done)
    token_bytes = pair.ranks[0].pool.layout.token_bytes
    assert token_bytes == 3 * (32 + 4 + 2 * 16)
    account = pair.ranks[0].receiver.accounting()
    assert account["payload_bytes"] == len(PAGES) * 4 * token_bytes
    payload_bytes, seconds = pair.sender.transferred(ROOM)
    assert payload_bytes == 2 * account["payload_bytes"] and seconds > 0


@pytest.mark.parametrize("kind", ["fake", "zmq", "gloo"])
def test_rows_are_stored_after_what_the_engine_had_begun_when_it_gave_the_pages_away(
    make_pair: Callable[..., Pair], kind: str
) -> None:
    pair, begun = make_pair(kind, 1), object()
    pair.sender.open(ROOM)
    pair.reserve(ROOM, TARGET, vacated=begun)
    assert eventually(lambda: ROOM in pair.events.ready)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.done)
    pool = pair.ranks[0].pool
    assert pool.followed[0] == (begun, 0) and len(pool.written) == len(TARGET)


class Mark:
    """Where a device is with what it writes."""

    def __init__(self) -> None:
        self.passed = False
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.passed


@pytest.mark.parametrize("kind", ["fake", "zmq", "gloo"])
def test_pages_that_are_still_written_are_not_read(
    make_pair: Callable[..., Pair], kind: str
) -> None:
    pair, mark = make_pair(kind, 1), Mark()
    make_ready(pair)
    pair.push(ROOM, PAGES, written=mark)
    assert eventually(lambda: mark.looks > 20)
    assert pair.sender.accounting()["payload_bytes"] == 0
    mark.passed = True
    assert eventually(lambda: ROOM in pair.events.done)


def test_pages_that_are_never_written_fail_the_room_in_time(
    make_pair: Callable[..., Pair],
) -> None:
    pair, mark = make_pair("zmq", 1, timeouts=IMPATIENT), Mark()
    make_ready(pair)
    pair.push(ROOM, PAGES, written=mark)
    assert eventually(lambda: ROOM in pair.events.failed)
    assert isinstance(pair.events.failed[ROOM], TransferTimeout)
    assert mark.looks and pair.sender.accounting()["payload_bytes"] == 0
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    finish(pair)
    assert pair.idle()


def test_a_pusher_that_waits_for_a_device_can_be_closed(make_pair: Callable[..., Pair]) -> None:
    pair, mark = make_pair("zmq", 1), Mark()
    make_ready(pair)
    pair.push(ROOM, PAGES, written=mark)
    assert eventually(lambda: mark.looks > 0)
    pair.close()
    looks = mark.looks
    time.sleep(0.05)
    assert mark.looks == looks


@pytest.mark.parametrize("order", ["reserve first", "open first"])
def test_the_two_legs_may_arrive_in_any_order(make_pair: Callable[..., Pair], order: str) -> None:
    pair = make_pair("fake", 2)
    if order == "open first":
        pair.sender.open(ROOM)
        assert not eventually(lambda: ROOM in pair.events.ready, 0.1)
        pair.reserve(ROOM, TARGET)
    else:
        pair.reserve(ROOM, TARGET)
        assert not eventually(lambda: ROOM in pair.events.ready, 0.1)
        pair.sender.open(ROOM)
    assert eventually(lambda: ROOM in pair.events.ready)


def test_prefill_is_ready_only_when_every_decode_rank_has_reserved(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair("fake", 4)
    pair.sender.open(ROOM)
    pair.reserve(ROOM, TARGET, pair.ranks[:3])
    assert not eventually(lambda: ROOM in pair.events.ready, 0.2)
    pair.reserve(ROOM, TARGET, pair.ranks[3:])
    assert eventually(lambda: ROOM in pair.events.ready)


@pytest.mark.parametrize("kind", ["fake", "zmq", "gloo"])
@pytest.mark.parametrize("fault", ["flip", "drop"])
def test_a_damaged_or_lost_chunk_fails_the_request_on_both_sides(
    make_pair: Callable[..., Pair], kind: str, fault: str
) -> None:
    pair = make_pair(kind, 1, FaultPlan(kind=fault))
    make_ready(pair)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.failed)
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    assert isinstance(pair.ranks[0].events.failed[ROOM], ChecksumMismatch)
    assert pair.ranks[0].events.done == {}
    finish(pair)
    assert pair.idle()

    pair.sender.open(ROOM + 1)
    pair.reserve(ROOM + 1, TARGET)
    assert eventually(lambda: ROOM + 1 in pair.events.ready)
    pair.push(ROOM + 1, PAGES)
    assert eventually(lambda: ROOM + 1 in pair.ranks[0].events.done)


@pytest.mark.parametrize("kind", ["fake", "zmq", "gloo"])
def test_a_damaged_chunk_of_one_rank_is_told_to_the_rank_that_is_done(
    make_pair: Callable[..., Pair], kind: str
) -> None:
    pair = make_pair(kind, 2, FaultPlan(kind="flip"))
    make_ready(pair)
    pair.push(ROOM, PAGES)
    for rank in pair.ranks:
        assert eventually(lambda rank=rank: ROOM in rank.events.failed)
    errors = [rank.events.failed[ROOM] for rank in pair.ranks]
    assert sorted(type(error).__name__ for error in errors) == [
        "ChecksumMismatch",
        "TransferAborted",
    ]
    finish(pair)
    assert pair.idle()


def test_other_weights_or_rotation_are_refused_with_both_values(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair("fake", 1, decode_fingerprint="0" * 64)
    pair.sender.open(ROOM)
    pair.reserve(ROOM, TARGET)
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    error = pair.ranks[0].events.failed[ROOM]
    assert isinstance(error, LayoutMismatch)
    assert "0" * 64 in str(error) and "f" * 64 in str(error)


def test_a_cache_of_other_layers_is_refused_with_both_values(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair("fake", 1, core_dims=(0, 0))
    pair.sender.open(ROOM)
    pair.reserve(ROOM, TARGET)
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    error = pair.ranks[0].events.failed[ROOM]
    assert isinstance(error, LayoutMismatch) and "decode has 2, prefill has 3" in str(error)


def test_another_protocol_version_is_refused_by_name(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpla.workers.transfer.receiver.PROTOCOL_VERSION", 2)
    pair = make_pair("fake", 1)
    pair.sender.open(ROOM)
    pair.reserve(ROOM, TARGET)
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    assert "protocol version: decode has 2" in str(pair.ranks[0].events.failed[ROOM])


@pytest.mark.parametrize("kind", ["fake", "zmq", "gloo"])
def test_decode_frees_pages_only_after_prefill_has_acknowledged_the_abort(
    make_pair: Callable[..., Pair], kind: str
) -> None:
    pair = make_pair(kind, 2)
    make_ready(pair)
    pair.ranks[0].receiver.abort(ROOM, "client left")
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    assert isinstance(pair.events.failed[ROOM], TransferAborted)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.ranks[1].events.failed)
    assert pair.ranks[0].pool.written == {} and pair.ranks[1].pool.written == {}
    finish(pair)
    assert pair.idle()


def test_nothing_is_written_after_a_fence(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("fake", 1)
    make_ready(pair)
    pair.ranks[0].receiver.fence(ROOM)
    pair.ranks[0].receiver.forget(ROOM)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.failed)
    assert pair.ranks[0].pool.written == {}
    pair.sender.forget(ROOM)
    assert eventually(pair.idle)


@pytest.mark.parametrize("kind", ["fake", "zmq", "gloo"])
def test_a_prefill_that_dies_fails_its_rooms_and_is_forgotten(
    make_pair: Callable[..., Pair], kind: str
) -> None:
    pair = make_pair(kind, 2)
    make_ready(pair)
    pair.sender.close()
    for rank in pair.ranks:
        assert eventually(lambda rank=rank: ROOM in rank.events.failed)
        assert "gone" in str(rank.events.failed[ROOM])
        assert rank.lost == [pair.endpoint]
        assert rank.receiver.accounting()["peers"] == 0


@pytest.mark.parametrize("kind", ["fake", "zmq", "gloo"])
def test_a_room_that_is_done_outlives_its_prefill_rank(
    make_pair: Callable[..., Pair], kind: str
) -> None:
    pair = make_pair(kind, 1)
    rank = pair.ranks[0]
    make_ready(pair)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.done)
    pair.reserve(ROOM + 1, TARGET)
    pair.sender.close()
    assert eventually(lambda: ROOM + 1 in rank.events.failed)
    assert ROOM not in rank.events.failed and ROOM in rank.events.done


def test_a_room_that_was_forgotten_before_the_welcome_keeps_no_other_from_being_asked_for(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair("fake", 1)
    receiver = pair.ranks[0].receiver
    reservation = Reservation(np.array(TARGET, np.int32), pair.endpoint, (), 1, 0)
    with receiver._lock:  # the welcome waits
        receiver.greet(pair.endpoint)
        for room in (ROOM, ROOM + 1):
            receiver.expect(room, [pair.endpoint])
            receiver.reserve(room, reservation)
        receiver.abort(ROOM, "its client left")
        receiver.forget(ROOM)
    for room in (ROOM, ROOM + 1):
        pair.sender.open(room)
    assert eventually(lambda: ROOM + 1 in pair.events.ready)
    assert ROOM not in pair.events.ready


def test_pages_pushed_while_a_rank_is_being_dropped_fail_the_room(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("fake", 2)
    make_ready(pair)
    fail, pushed = pair.sender._fail, threading.Event()

    def fail_late(*arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert pushed.wait(10)
        fail(*arguments)

    monkeypatch.setattr(pair.sender, "_fail", fail_late)
    pair.ranks[1].receiver.close()
    assert eventually(lambda: pair.sender.accounting()["peers"] == 1)
    pair.push(ROOM, PAGES)
    pushed.set()
    assert eventually(lambda: ROOM in pair.events.failed)
    assert "decode1 is gone" in str(pair.events.failed[ROOM])


@pytest.mark.parametrize("kind", ["fake", "zmq", "gloo"])
def test_a_decode_rank_that_dies_fails_its_rooms(make_pair: Callable[..., Pair], kind: str) -> None:
    pair = make_pair(kind, 2, timeouts=TransferTimeouts(handshake=2, reserve=2, push=2.5, ack=2))
    make_ready(pair)
    pair.ranks[1].receiver.close()
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.failed)
    assert eventually(
        lambda: ROOM in pair.ranks[0].events.failed or ROOM in pair.ranks[0].events.done
    )


def test_an_unreachable_prefill_fails_the_request(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("zmq", 1)
    pair.sender.close()
    pair.reserve(ROOM, TARGET)
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    assert isinstance(pair.ranks[0].events.failed[ROOM], TransferError)


def test_a_decode_leg_without_prefill_leg_times_out(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("fake", 1, timeouts=IMPATIENT)
    pair.reserve(ROOM, TARGET)
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    error = str(pair.ranks[0].events.failed[ROOM])  # whichever side's patience ends first
    assert "prefill leg" in error and "--transfer-timeout" in error
    pair.ranks[0].receiver.forget(ROOM)
    assert eventually(pair.idle)


def test_a_prefill_leg_without_decode_leg_times_out(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("fake", 1, timeouts=IMPATIENT)
    pair.sender.open(ROOM)
    assert eventually(lambda: ROOM in pair.events.failed)
    assert isinstance(pair.events.failed[ROOM], TransferTimeout)


def test_a_slow_prefill_keeps_its_lease(make_pair: Callable[..., Pair]) -> None:
    timeouts = TransferTimeouts(handshake=1.5, reserve=1.5, push=1.5, ack=1.5)
    pair = make_pair("fake", 1, timeouts=timeouts)
    pair.sender.open(ROOM)
    pair.reserve(ROOM, TARGET)
    assert not eventually(lambda: bool(pair.events.failed or pair.ranks[0].events.failed), 3.5)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.done)


def test_a_request_larger_than_the_window_arrives_whole(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpla.workers.transfer.message_plane.CHUNK_BYTES", 2_000)
    monkeypatch.setattr("tpla.workers.transfer.message_plane.WINDOW_BYTES", 3_000)
    pair = make_pair("zmq", 2)
    pages = list(range(100))
    pair.sender.open(ROOM)
    pair.reserve(ROOM, pages)
    assert eventually(lambda: ROOM in pair.events.ready)
    pair.push(ROOM, pages)
    assert eventually(lambda: ROOM in pair.events.done)
    for rank in pair.ranks:
        assert len(rank.pool.written) == 100
        assert_holds(rank.pool, 57, expected_rows(57, rank.pool.layout))


def test_word_of_a_connection_that_was_dropped_does_not_end_the_greeting_after_it(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair("fake", 1)
    receiver = pair.ranks[0].receiver
    pair.sender.open(ROOM)
    receiver.expect(ROOM, [pair.endpoint])
    receiver.greet(pair.endpoint)
    receiver.on_message(pair.endpoint, Dropped("said to its predecessor"), None)
    reservation = Reservation(np.array(TARGET, np.int32), pair.endpoint, (), 1, 0)
    receiver.reserve(ROOM, reservation)
    assert eventually(lambda: ROOM in pair.events.ready), pair.ranks[0].events.failed
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.done)
    receiver.on_message(pair.endpoint, Dropped("now it is meant"), None)
    receiver.expect(ROOM + 1, [pair.endpoint])
    receiver.reserve(ROOM + 1, reservation)
    assert eventually(lambda: ROOM + 1 in pair.ranks[0].events.failed)
    assert "now it is meant" in str(pair.ranks[0].events.failed[ROOM + 1])


def test_an_inbox_that_breaks_late_costs_its_successor_nothing(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair("fake", 1)
    make_ready(pair)
    rank, predecessor = pair.ranks[0], object()
    rank.receiver.on_broken(pair.endpoint, predecessor, TransferError("late"))  # type: ignore[arg-type]
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in rank.events.done)
    assert rank.lost == []


def test_pages_that_cannot_be_read_cost_no_credit(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_plane, "WINDOW_BYTES", 6_000)
    pair = make_pair("zmq", 1)
    for room in range(1, 6):  # more than the window holds, where they cost it
        with monkeypatch.context() as patch:
            patch.setattr(SourcePool, "read", full)
            make_ready(pair, room)
            pair.push(room, PAGES)
            assert eventually(lambda room=room: room in pair.ranks[0].events.failed)
        assert "this device is full" in str(pair.events.failed[room])
        finish(pair, room)
    make_ready(pair, ROOM)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.done), pair.events.failed


def test_rows_that_cannot_be_stored_fail_the_room_with_the_reason(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("zmq", 1)
    with monkeypatch.context() as patch:
        patch.setattr(pair.ranks[0].pool, "write", full)
        make_ready(pair, ROOM)
        pair.push(ROOM, PAGES)
        assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    assert "this device is full" in str(pair.ranks[0].events.failed[ROOM])
    assert eventually(lambda: ROOM in pair.events.failed)
    finish(pair)
    make_ready(pair, ROOM + 1)
    pair.push(ROOM + 1, PAGES)
    assert eventually(lambda: ROOM + 1 in pair.events.done), pair.events.failed


def test_the_engine_waits_for_rows_that_are_being_stored_only_where_it_gives_them_up(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("zmq", 1)
    rank, begun, stored = pair.ranks[0], threading.Event(), threading.Event()
    write = rank.pool.write

    def slow(pages: Pages, rows: Rows, intact: Callable[[], bool]) -> bool:
        begun.set()
        assert stored.wait(10)
        return write(pages, rows, intact)

    def other_requests() -> None:
        rank.receiver.expect(ROOM + 1, [pair.endpoint])
        rank.receiver.greet(pair.endpoint)
        reservation = Reservation(np.array(TARGET, np.int32), pair.endpoint, (), 1, 0)
        rank.receiver.reserve(ROOM + 1, reservation)
        assert rank.receiver.accounting()["rooms"] == 2

    monkeypatch.setattr(rank.pool, "write", slow)
    make_ready(pair)
    pair.push(ROOM, PAGES)
    assert begun.wait(10)
    others = threading.Thread(target=other_requests)
    others.start()
    others.join(5)
    free = not others.is_alive()
    fenced = threading.Thread(target=rank.receiver.fence, args=(ROOM,))
    fenced.start()
    fenced.join(0.1)
    early = not fenced.is_alive()
    stored.set()
    fenced.join(5)
    others.join(5)
    assert free, "the engine waited for another request's rows"
    assert not early and not fenced.is_alive(), "pages were given back while they were written"
    assert rank.pool.written, "what the fence waited for had begun"
