"""Rows through a process group of each pair: whole, in order, and no peer can take others down.

The group is gloo's, which differs from NCCL's only in what moves the bytes.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

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
from tests.unit.transfer_pair import METADATA, Pair, eventually
from tpla.core.config import FaultPlan
from tpla.core.errors import (
    ChecksumMismatch,
    LayoutMismatch,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from tpla.core.messages import Abort, Ack, Chunk, Credit, Done, Dropped, Hello, Reserve
from tpla.workers.transfer import group_plane
from tpla.workers.transfer.pair_channel import PairChannel
from tpla.workers.transfer.pair_group import GlooGroup, host_store, join_group, join_store
from tpla.workers.transfer.pusher import Pusher
from tpla.workers.transfer.sender import PrefillSender
from tpla.workers.transfer.staging import HostIncoming, HostOutgoing
from tpla.workers.transfer.zmq_link import ZmqClientLink, ZmqServerLink

Closing = Callable[[Any], Any]

CPU, ROOM, CACHE = torch.device("cpu"), 11, Cache()
SOURCE, TARGET = list(range(CACHE.pages)), list(reversed(range(CACHE.pages)))
LIMIT = PATIENCE.push + 1.5
"""Seconds in which a peer that does nothing must be given up."""


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_plane, "CHUNK_BYTES", CACHE.chunk_bytes)


@pytest.fixture
def closing() -> Iterator[Closing]:
    """Takes what is closed at the end of a test, and returns it; no thread outlives the test.

    One that still waits in gloo for a peer when the interpreter ends makes it abort.
    """
    before = set(threading.enumerate())
    opened: list[Any] = []

    def register(rank: Any) -> Any:
        opened.append(rank)
        return rank

    yield register
    for rank in opened:
        rank.close()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(PATIENCE.handshake)
    assert not [thread.name for thread in left if thread.is_alive()]


def migrate(prefill: Prefill, decode: Decode, room: int) -> bool:
    """Whether all pages of a new room arrive."""
    decode.reserve(room, prefill.endpoint, TARGET)
    prefill.open(room)
    prefill.push(room, SOURCE)
    assert eventually(lambda: room in prefill.events.done and room in decode.events.done)
    return decode.holds(TARGET, prefill.rows(SOURCE, decode.pool.layout))


class Unheard:
    """Of an outbox to which nobody answers."""

    def on_answer(self, message: Any) -> None:
        raise AssertionError(f"nobody said {message}")

    def on_gone(self) -> None:
        raise AssertionError("nobody was there")


def slow_down_aborts(monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    """To a second, of groups that end on threads whose names begin so."""
    abort = GlooGroup.abort

    def slowly(group: GlooGroup) -> None:
        if threading.current_thread().name.startswith(thread):
            time.sleep(1)
        abort(group)

    monkeypatch.setattr(GlooGroup, "abort", slowly)


def full(*arguments: Any) -> Any:
    """As a device without memory."""
    raise torch.OutOfMemoryError("this device is full")


def breaks(*arguments: Any) -> Any:
    """As a device would."""
    raise RuntimeError("a device that broke")


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("core_dims", [(0, 0, 0), (16, 16, 16), (32, 0, 32)])
def test_rows_arrive_bit_for_bit_on_every_rank(
    closing: Closing, page_size: int, core_dims: tuple[int, ...]
) -> None:
    cache = replace(CACHE, page_size=page_size, core_dims=core_dims)
    prefill = closing(Prefill(cache))
    ranks = [closing(Decode(replace(cache, group=group))) for group in (0, 1)]
    for rank in ranks:
        rank.reserve(ROOM, prefill.endpoint, TARGET, ranks=2)
    prefill.open(ROOM)
    prefill.push(ROOM, SOURCE)
    assert eventually(lambda: ROOM in prefill.events.done)
    for rank in ranks:
        assert rank.events.done == {ROOM: METADATA}
        assert rank.holds(TARGET, prefill.rows(SOURCE, rank.pool.layout))


def test_what_is_said_of_rows_takes_the_way_of_the_pair_and_not_the_link(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = set()
    for link in (ZmqServerLink, ZmqClientLink):

        def sends(self: Any, peer: str, message: Any, *more: Any, send: Any = link.send) -> None:
            said.add(type(message))
            send(self, peer, message, *more)

        monkeypatch.setattr(link, "send", sends)
    assert migrate(closing(Prefill(CACHE)), closing(Decode(CACHE)), ROOM)
    assert Reserve in said
    assert not said & {Chunk, Credit, Done, Ack}


@pytest.mark.parametrize("gone", ["decode", "prefill"])
def test_a_rank_that_closes_waits_for_what_it_holds_of_a_lost_peer(
    monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    thread = {"decode": "tpla-push", "prefill": "tpla-pull"}[gone]
    slow_down_aborts(monkeypatch, thread)
    prefill, decode = Prefill(CACHE), Decode(CACHE)
    assert migrate(prefill, decode, ROOM)
    ranks: list[tuple[Any, Any]] = [(prefill, prefill.sender), (decode, decode.receiver)]
    (rank, half), (lost, _) = ranks if gone == "decode" else reversed(ranks)
    lost.close()
    assert eventually(lambda: half.accounting()["peers"] == 0)
    rank.close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith(thread)]


def test_a_rank_that_is_closing_takes_no_new_peer(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down_aborts(monkeypatch, "tpla-push")
    prefill, late = Prefill(CACHE), closing(Decode(CACHE))
    assert migrate(prefill, closing(Decode(CACHE)), ROOM)
    ends = threading.Thread(target=prefill.close)
    ends.start()
    assert eventually(lambda: prefill.sender.accounting()["peers"] == 0)
    late.reserve(ROOM + 1, prefill.endpoint, TARGET)
    ends.join(10)
    assert eventually(lambda: ROOM + 1 in late.events.failed)
    assert not [each.name for each in threading.enumerate() if each.name.startswith("tpla-push")]


def test_a_room_that_is_aborted_during_a_chunk_leaves_nothing_and_the_next_one_works(
    closing: Closing,
) -> None:
    fault = FaultPlan(kind="delay", delay_seconds=0.5)
    prefill, decode = closing(Prefill(CACHE, fault)), closing(Decode(CACHE))
    decode.reserve(ROOM, prefill.endpoint, TARGET)
    prefill.open(ROOM)
    prefill.push(ROOM, SOURCE)
    decode.receiver.abort(ROOM, "client left")
    assert eventually(lambda: ROOM in decode.events.failed)
    assert isinstance(prefill.events.failed[ROOM], TransferAborted)
    prefill.sender.forget(ROOM)
    decode.receiver.forget(ROOM)
    decode.reserve(ROOM + 1, prefill.endpoint, TARGET[:3])
    prefill.open(ROOM + 1)
    prefill.push(ROOM + 1, SOURCE[:3])
    assert eventually(lambda: ROOM + 1 in prefill.events.done)
    assert decode.holds(TARGET[:3], prefill.rows(SOURCE[:3], CACHE.layout))
    assert sorted(decode.written()) == sorted(TARGET[:3])
    assert decode.lost == []


def test_one_flipped_bit_in_a_later_chunk_fails_the_room(closing: Closing) -> None:
    fault = FaultPlan(kind="flip", after=2)
    prefill, decode = closing(Prefill(CACHE, fault)), closing(Decode(CACHE))
    decode.reserve(ROOM, prefill.endpoint, TARGET)
    prefill.open(ROOM)
    prefill.push(ROOM, SOURCE)
    assert eventually(lambda: ROOM in decode.events.failed and ROOM in prefill.events.failed)
    assert isinstance(decode.events.failed[ROOM], ChecksumMismatch)
    assert "chunk 2" in str(decode.events.failed[ROOM])


def test_ends_of_different_data_planes_refuse_each_other(closing: Closing) -> None:
    pair = closing(Pair("zmq", 1, decode_kind="gloo"))
    pair.sender.open(ROOM)
    pair.reserve(ROOM, [1])
    assert eventually(lambda: ROOM in pair.ranks[0].events.failed)
    error = pair.ranks[0].events.failed[ROOM]
    assert isinstance(error, LayoutMismatch)
    assert "data plane: decode has gloo, prefill has zmq" in str(error)
    assert "--transfer" in str(error)


def test_a_prefill_rank_that_dies_in_a_chunk_is_given_up_and_a_new_one_serves(
    closing: Closing,
) -> None:
    decode = closing(Decode(CACHE))
    fault = FaultPlan(kind="exit", after=2)
    dying = closing(Process(prefill_process, CACHE, ROOM, SOURCE, fault))
    endpoint, _ = dying.pipe.recv()
    decode.reserve(ROOM, endpoint, TARGET)
    assert eventually(lambda: not dying.process.is_alive(), 30)
    assert seconds_until(lambda: ROOM in decode.events.failed, LIMIT) < LIMIT
    assert decode.lost == [endpoint]
    decode.receiver.forget(ROOM)
    assert migrate(closing(Prefill(CACHE)), decode, ROOM + 1)
    assert decode.receiver.accounting()["peers"] == 1


def test_a_decode_rank_that_never_dials_costs_prefill_no_memory(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remembered(*arguments: Any) -> Any:
        made.append(arguments)
        return staging(*arguments)

    prefill, decode = closing(Prefill(CACHE)), closing(Decode(CACHE))
    made: list[Any] = []
    staging = prefill.source.staging
    monkeypatch.setattr(prefill.source, "staging", remembered)
    with monkeypatch.context() as patch:
        patch.setattr(decode.receiver._plane.sink, "staging", full)
        decode.reserve(ROOM, prefill.endpoint, TARGET)
        assert eventually(lambda: ROOM in decode.events.failed)
    assert not made
    decode.receiver.forget(ROOM)
    assert migrate(prefill, decode, ROOM + 1)
    assert len(made) == group_plane.SENDING_BUFFERS


def test_decode_gives_the_memory_back_that_served_a_lost_peer(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    decode, prefill = closing(Decode(CACHE)), Prefill(CACHE)
    staging = decode.receiver._plane.sink.staging

    def remembered(nbytes: int) -> Any:
        memory = staging(nbytes)
        made.add(memory)
        return memory

    monkeypatch.setattr(decode.receiver._plane.sink, "staging", remembered)
    assert migrate(prefill, decode, ROOM)
    assert len(made) == group_plane.RECEIVING_BUFFERS
    prefill.close()
    assert eventually(lambda: gc.collect() >= 0 and not made)


@pytest.mark.parametrize("without", ["prefill", "decode"])
def test_a_rank_without_memory_for_staging_says_so_at_once_and_serves_when_it_has_some(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    prefill, decode = closing(Prefill(CACHE)), closing(Decode(CACHE))
    sink = decode.receiver._plane.sink
    with monkeypatch.context() as patch:
        patch.setattr(prefill.source if without == "prefill" else sink, "staging", full)
        decode.reserve(ROOM, prefill.endpoint, TARGET)
        assert eventually(lambda: ROOM in decode.events.failed, PATIENCE.push / 2)
    assert "this device is full" in str(decode.events.failed[ROOM])
    decode.receiver.forget(ROOM)
    assert migrate(prefill, decode, ROOM + 1)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_decode_rank_that_stops_or_dies_is_given_up_in_time_and_a_new_one_is_served(
    closing: Closing, end: str
) -> None:
    prefill = closing(Prefill(CACHE))
    ending = closing(Process(decode_process, CACHE, ROOM, TARGET))
    assert ending.pipe.recv() == "ready"
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
    assert migrate(prefill, closing(Decode(CACHE)), ROOM + 1)


def test_a_rank_that_answers_but_takes_no_rows_is_given_up_in_time_and_served_anew(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = closing(Prefill(CACHE)), closing(Decode(CACHE))
    with monkeypatch.context() as patch:
        patch.setattr(group_plane.GroupInbox, "_turn", lambda inbox: time.sleep(0.01))
        decode.reserve(ROOM, prefill.endpoint, TARGET)
        prefill.open(ROOM)
        prefill.push(ROOM, SOURCE)
        assert seconds_until(lambda: ROOM in prefill.events.failed, LIMIT) < LIMIT
        assert eventually(lambda: ROOM in decode.events.failed)
    decode.receiver.forget(ROOM)
    assert migrate(prefill, decode, ROOM + 1)


def test_rows_that_were_announced_and_cannot_be_read_cost_the_connection_and_no_other_room(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = closing(Prefill(CACHE)), closing(Decode(CACHE))
    with monkeypatch.context() as patch:
        patch.setattr(HostOutgoing, "pack", breaks)
        decode.reserve(ROOM, prefill.endpoint, TARGET)
        prefill.open(ROOM)
        prefill.push(ROOM, SOURCE)
        assert eventually(lambda: ROOM in prefill.events.failed and ROOM in decode.events.failed)
    decode.receiver.forget(ROOM)
    assert migrate(prefill, decode, ROOM + 1)


def test_a_room_that_is_reserved_when_a_lost_ones_end_is_known_is_served(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = closing(Prefill(CACHE)), closing(Decode(CACHE))
    end, send = PairChannel.shut, ZmqServerLink.send

    def ends_late(channel: PairChannel) -> None:
        threading.Timer(0.6, end, [channel]).start()

    def takes_a_while(link: ZmqServerLink, peer: str, message: Any, *more: Any) -> None:
        send(link, peer, message, *more)
        if isinstance(message, Abort | Dropped):
            time.sleep(0.3)

    with monkeypatch.context() as patch:
        patch.setattr(HostOutgoing, "pack", breaks)
        patch.setattr(PairChannel, "shut", ends_late)
        patch.setattr(ZmqServerLink, "send", takes_a_while)
        decode.reserve(ROOM, prefill.endpoint, TARGET)
        prefill.open(ROOM)
        prefill.push(ROOM, SOURCE)
        assert eventually(lambda: ROOM in decode.events.failed)
        decode.reserve(ROOM + 1, prefill.endpoint, TARGET)
        assert eventually(lambda: ROOM in prefill.events.failed)
    prefill.open(ROOM + 1)
    prefill.push(ROOM + 1, SOURCE)
    assert eventually(lambda: ROOM + 1 in decode.events.done), decode.events.failed
    assert decode.holds(TARGET, prefill.rows(SOURCE, CACHE.layout))


def test_word_from_an_old_connection_of_a_rank_that_greeted_anew_is_not_heard(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    hears = PrefillSender.on_message

    def remembers(sender: PrefillSender, peer: str, message: Any, payload: Any) -> None:
        said.append(message)
        hears(sender, peer, message, payload)

    with monkeypatch.context() as patch:
        patch.setattr(PrefillSender, "on_message", remembers)
        assert migrate(closing(Prefill(CACHE)), closing(Decode(CACHE)), ROOM)
    hello = next(message for message in said if isinstance(message, Hello))
    monkeypatch.setattr(ZmqServerLink, "send", lambda *arguments: None)  # nobody is there
    sender = closing(Prefill(CACHE)).sender
    made: list[Pusher] = []
    for _ in range(2):
        sender.on_message("d", hello, None)
        made.append(sender._pushers["d"])
    old, new = made
    old.on_gone()
    assert sender.accounting()["peers"] == 1
    new.on_gone()
    assert sender.accounting()["peers"] == 0


def test_the_end_of_a_room_is_told_as_soon_as_its_last_rows_are_stored(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostIncoming, "stored", lambda staging: False)  # seen by waiting alone
    prefill, decode = closing(Prefill(CACHE)), closing(Decode(CACHE))
    decode.reserve(ROOM, prefill.endpoint, TARGET[:1])
    prefill.open(ROOM)
    prefill.push(ROOM, SOURCE[:1])
    assert eventually(lambda: ROOM in prefill.events.done and ROOM in decode.events.done)
    assert decode.holds(TARGET[:1], prefill.rows(SOURCE[:1], CACHE.layout))


def test_a_pair_whose_group_never_met_greets_anew(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any) -> Any:
        raise TransferTimeout("nobody came")

    prefill, decode = closing(Prefill(CACHE)), closing(Decode(CACHE))
    with monkeypatch.context() as patch:
        patch.setattr(group_plane, "join_group", never)
        decode.reserve(ROOM, prefill.endpoint, TARGET)
        prefill.sender.open(ROOM)
        assert eventually(lambda: ROOM in decode.events.failed)
        assert eventually(lambda: prefill.sender.accounting()["peers"] == 0)
    decode.receiver.forget(ROOM)
    assert migrate(prefill, decode, ROOM + 1)


def test_waiting_for_a_decode_rank_that_never_comes_ends_when_it_is_told_to(
    closing: Closing,
) -> None:
    prefill = closing(Prefill(CACHE))
    plane = group_plane.GroupSendingPlane(prefill.source, "gloo", PATIENCE)
    outbox = closing(plane.outbox("d", CACHE.layout))
    ended: list[TransferError] = []

    def connect() -> None:
        with pytest.raises(TransferError) as info:
            outbox.connect(Unheard())
        ended.append(info.value)

    thread = threading.Thread(target=connect)
    thread.start()
    assert not eventually(lambda: ended, 0.5)
    outbox.cancel()
    assert seconds_until(lambda: ended, PATIENCE.handshake / 2) < PATIENCE.handshake / 2
    thread.join()


def test_tensors_of_a_group_arrive_in_the_order_of_the_calls() -> None:
    store = host_store(5)
    joined: list[Any] = []

    def join() -> None:
        joined.append(join_group("gloo", join_store("127.0.0.1", store.port, 5), 1, CPU, 5, 5))

    thread = threading.Thread(target=join)
    thread.start()
    prefill = join_group("gloo", store, 0, CPU, 5, 5)
    thread.join()
    sent = [torch.full((1000 + size,), size, dtype=torch.uint8) for size in range(1, 9)]
    got = [torch.zeros_like(tensor) for tensor in sent]
    pending = [joined[0].recv(tensor) for tensor in got] + [prefill.send(each) for each in sent]
    assert eventually(lambda: all(each.done() for each in pending))
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))
