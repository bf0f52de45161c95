"""Messages between the two ranks of a group: whole, in order, and no end waits for ever."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.unit.transfer_pair import eventually
from tpla.core.errors import TransferError
from tpla.core.messages import Ack, Chunk, Credit, Done, Message
from tpla.workers.transfer.pair_channel import PairChannel, accept, dial, listen

CHUNK, DONE = Chunk(1 << 62, 0, 0, 2, (1 << 64) - 1), Done(1 << 62, 1, 2, 5)
TIMEOUT = 0.3


@pytest.fixture
def ends() -> Iterator[tuple[PairChannel, PairChannel]]:
    """A prefill rank's and a decode rank's."""
    with listen() as listener:
        decode = dial("127.0.0.1", listener.getsockname()[1], 5, TIMEOUT)
        prefill = accept(listener, 5, TIMEOUT)
    yield prefill, decode
    prefill.close()
    decode.close()


def receive(end: PairChannel, count: int) -> list[tuple[Message, bytes]]:
    """So many messages, or those that came in ten seconds."""
    received: list[tuple[Message, bytes]] = []
    eventually(lambda: received.extend(end.receive()) or len(received) >= count)
    return received


def test_messages_arrive_whole_and_in_order_both_ways(
    ends: tuple[PairChannel, PairChannel],
) -> None:
    prefill, decode = ends
    metadata = bytes(range(256)) * 1000
    for _ in range(3):
        prefill.send(CHUNK)
    prefill.send(DONE, metadata)
    assert receive(decode, 4) == [(CHUNK, b"")] * 3 + [(DONE, metadata)]
    decode.send(Credit(7))
    decode.send(Ack(DONE.room))
    assert receive(prefill, 2) == [(Credit(7), b""), (Ack(DONE.room), b"")]
    assert prefill.receive() == []


def test_a_closed_end_is_noticed_behind_what_it_sent(
    ends: tuple[PairChannel, PairChannel],
) -> None:
    prefill, decode = ends
    prefill.send(CHUNK)
    prefill.close()
    assert receive(decode, 1) == [(CHUNK, b"")]
    with pytest.raises(TransferError, match="closed"):
        decode.receive(waits=True)


def test_shutting_an_end_wakes_both(ends: tuple[PairChannel, PairChannel]) -> None:
    def wait(end: PairChannel) -> None:
        with pytest.raises(TransferError, match="closed"):
            end.receive(waits=True)
        ended.append(end)

    ended: list[PairChannel] = []
    waiting = [threading.Thread(target=wait, args=(end,), daemon=True) for end in ends]
    for thread in waiting:
        thread.start()
    waiting[0].join(0.05)
    assert waiting[0].is_alive()
    ends[0].shut()
    ends[0].shut()
    for thread in waiting:
        thread.join(5)
    assert len(ended) == 2


def test_a_peer_that_reads_nothing_is_given_up(ends: tuple[PairChannel, PairChannel]) -> None:
    prefill, _ = ends
    with pytest.raises(TransferError, match="reads nothing"):
        for _ in range(1000):
            prefill.send(DONE, bytes(1 << 20))


def test_what_is_no_message_is_refused() -> None:
    with listen() as listener:
        stranger = socket.create_connection(listener.getsockname()[:2], 5)
        prefill = accept(listener, 5, TIMEOUT)
    stranger.sendall(b"\x02\0\0\0\0\0\0\0no")
    with pytest.raises(TransferError, match="no message"):
        prefill.receive(waits=True)
    prefill.close()
    stranger.close()


def test_nobody_who_dials_and_nobody_who_listens_end_in_time() -> None:
    with listen() as listener, pytest.raises(TransferError, match="did not dial"):
        port = listener.getsockname()[1]
        accept(listener, 0.1, TIMEOUT)
    with pytest.raises(TransferError, match="no prefill rank"):
        dial("127.0.0.1", port, 1, TIMEOUT)
