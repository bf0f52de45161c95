"""Peers that are mad, or of another deployment: what they send harms nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tests.unit.transfer_pair import (
    LAYERS,
    METADATA,
    PAGE_SIZE,
    TIMEOUTS,
    Events,
    Pair,
    Rank,
    SourcePool,
    eventually,
    expected_rows,
    identity,
)
from tpla.core.errors import TransferError, TransferTimeout
from tpla.core.latent_layout import ModelPlan
from tpla.core.messages import (
    PROTOCOL_VERSION,
    Abort,
    Chunk,
    Done,
    Hello,
    Message,
    Pong,
    Refuse,
    Welcome,
)
from tpla.workers.transfer.digest import chunk_digest, room_digest
from tpla.workers.transfer.message_plane import MessageSendingPlane
from tpla.workers.transfer.sender import PrefillSender
from tpla.workers.transfer.zmq_link import ZmqClientLink, ZmqServerLink

ROOM, OTHER_ROOM = 5, 6
PAGES, TARGET = [3, 9, 4], [1, 2, 3]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair("zmq", 1)
    yield pair
    pair.close()


def make_ready(pair: Pair, room: int = ROOM) -> None:
    pair.sender.open(room)
    pair.reserve(room, TARGET)
    assert eventually(lambda: room in pair.events.ready)


def test_rows_of_a_prefill_rank_that_was_not_asked_are_not_stored(pair: Pair) -> None:
    make_ready(pair)
    rank, link = pair.ranks[0], ZmqServerLink("127.0.0.1")
    plane = MessageSendingPlane(link, SourcePool())
    other = PrefillSender(link, plane, identity("other"), TIMEOUTS, Events())
    rank.receiver.greet(f"tcp://127.0.0.1:{link.port}")
    assert eventually(lambda: other.accounting()["peers"] == 1)
    peer = next(iter(other._pushers))
    nbytes = len(TARGET) * PAGE_SIZE * rank.pool.layout.token_bytes
    rows, place = np.full(nbytes, 0xEE, np.uint8), (ROOM, 0, 0, len(TARGET))
    digest = chunk_digest(place, rows.data)
    link.send(peer, Chunk(*place, digest), rows)
    wrong = METADATA.upper()
    end = Done(ROOM, 1, len(TARGET), room_digest(ROOM, [digest], wrong))
    link.send(peer, end, np.frombuffer(wrong, np.uint8))
    link.send(peer, Abort(ROOM, "it says"))
    assert not eventually(lambda: ROOM in rank.events.done | rank.events.failed, 0.5)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: rank.events.done == {ROOM: METADATA})
    for source, target in zip(PAGES, TARGET, strict=True):
        expected = expected_rows(source, rank.pool.layout)
        for stored, right in zip(rank.pool.written[target], expected, strict=True):
            np.testing.assert_array_equal(stored, right)
    other.close()


def test_a_decode_rank_cannot_abort_what_it_has_not_reserved(pair: Pair) -> None:
    make_ready(pair)
    link = ZmqClientLink("stranger")
    stranger = Rank("zmq", link, 0, 1, "f" * 64, TIMEOUTS, (0,) * LAYERS)
    stranger.receiver.greet(pair.endpoint)
    assert eventually(lambda: pair.sender.accounting()["peers"] == 2)
    link.send(pair.endpoint, Abort(ROOM, "it says"))
    assert not eventually(lambda: ROOM in pair.events.failed, 0.5)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.done)
    stranger.receiver.close()


class Never:
    """A mark that a device never comes to."""

    def query(self) -> bool:
        return False


def hello_of(pair: Pair) -> Hello:
    layout = pair.ranks[0].pool.layout.to_dict()
    return Hello(PROTOCOL_VERSION, "d", "f" * 64, layout, LAYERS, PAGE_SIZE, len(METADATA), "zmq")


def layout_of(pair: Pair, **changes: Any) -> dict[str, Any]:
    return {"layout": replace(pair.ranks[0].pool.layout, **changes).to_dict()}


OTHER_HELLOS: dict[str, Callable[[Pair], dict[str, Any]]] = {
    "data plane": lambda pair: {"transfer": "nccl"},
    "fingerprint": lambda pair: {"fingerprint": "0" * 64},
    "kv_lora_rank": lambda pair: layout_of(pair, plan=ModelPlan(128, 1, (0,) * LAYERS)),
    "qk_rope_head_dim": lambda pair: layout_of(pair, qk_rope_head_dim=32),
    "layers:": lambda pair: {"num_layers": LAYERS + 1},
    "layers of the layout": lambda pair: layout_of(pair, plan=ModelPlan(64, 1, (0,))),
    "page size": lambda pair: {"page_size": 2 * PAGE_SIZE},
    "metadata bytes": lambda pair: {"metadata_bytes": len(METADATA) + 1},
}


@pytest.mark.parametrize("name", OTHER_HELLOS)
def test_a_rank_that_differs_in_one_thing_alone_is_refused_by_its_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    said: list[Message] = []
    monkeypatch.setattr(pair.sender._link, "send", lambda peer, message: said.append(message))
    pair.sender.on_message("stranger", hello_of(pair), None)
    assert isinstance(said.pop(), Welcome)
    other = msgspec.structs.replace(hello_of(pair), **OTHER_HELLOS[name](pair))
    pair.sender.on_message("stranger", other, None)
    (refusal,) = said
    assert isinstance(refusal, Refuse)
    assert name in refusal.reason and refusal.reason.count("decode has") == 1


def greet_again(pair: Pair) -> None:
    pair.ranks[0].receiver._link.send(pair.endpoint, hello_of(pair))


def lose_its_connection(pair: Pair) -> None:
    peer, link = next(iter(pair.sender._pushers)), pair.ranks[0].receiver._link
    assert isinstance(link, ZmqClientLink)
    link._submit(lambda: link._close_now(pair.endpoint))
    assert not eventually(lambda: False, 0.3)
    pair.sender._link.send(peer, Pong([]))  # which finds nobody


@pytest.mark.parametrize("leave", [greet_again, lose_its_connection])
def test_rooms_of_a_decode_rank_that_leaves_its_pusher_fail_at_once_with_the_reason(
    pair: Pair, leave: Callable[[Pair], None]
) -> None:
    for room in (ROOM, OTHER_ROOM):
        make_ready(pair, room)
        pair.push(room, PAGES, written=Never())
    leave(pair)
    assert eventually(lambda: pair.events.failed.keys() == {ROOM, OTHER_ROOM}, TIMEOUTS.push / 2)
    for error in pair.events.failed.values():
        assert isinstance(error, TransferError) and not isinstance(error, TransferTimeout)


def test_a_peer_without_a_name_that_never_stops_keeps_nothing_waiting(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    context = zmq.Context()
    mad = context.socket(zmq.DEALER)
    mad.setsockopt(zmq.LINGER, 0)
    mad.connect(pair.endpoint)
    for _ in range(20_000):
        mad.send(b"garbage")
    make_ready(pair)
    pair.push(ROOM, PAGES)
    assert eventually(lambda: ROOM in pair.events.done)
    mad.close()
    context.term()
    # By chance ZMQ's own name for it may be text: then its message is what nobody understands.
    complaints = [each for each in caplog.records if "sent something" in each.message]
    assert len(complaints) == 1
