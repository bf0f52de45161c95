"""Decode's half of KV transfer: which rooms are awaited, from whom, and how they end.

Threads: the engine calls :class:`DecodeReceiver`'s public methods; messages and ticks come on the
link's thread; rows and the ends of rooms on the thread of the peer's inbox, which also verifies and
stores them. One lock guards all state, and is not held while rows are stored. A device stores
behind the host's back, too, so a room that is given up waits for what it has begun: no byte lands
after :meth:`DecodeReceiver.fence` or a failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tpla.core.config import TransferTimeouts
from tpla.core.errors import (
    LayoutMismatch,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from tpla.core.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    Chunk,
    Done,
    Dropped,
    Hello,
    Message,
    Ping,
    Pong,
    Refuse,
    Reserve,
    Welcome,
)
from tpla.workers.transfer.leaving import Leaving, join_all
from tpla.workers.transfer.protocol import (
    ArrivedRows,
    Identity,
    Inbox,
    Link,
    Pages,
    ReceivingPlane,
    Reservation,
    RoomEvents,
)
from tpla.workers.transfer.receiving_room import ReceivingRoom, damaged
from tpla.workers.transfer.statistics import TransferStatistics

logger = logging.getLogger(__name__)

_LONGEST_PING_SECONDS = 1.0


class _PeerState(Enum):
    GREETING = "greeting"
    WELCOME = "welcome"
    REFUSED = "refused"


@dataclass
class _Peer:
    state: _PeerState
    deadline: float
    error: TransferError | None = None
    inbox: Inbox | None = None
    waiting: list[tuple[int, Reserve]] = field(default_factory=list)


class DecodeReceiver:
    """Implements :class:`~tpla.workers.transfer.protocol.KVReceiver` for one decode rank."""

    def __init__(
        self,
        link: Link,
        plane: ReceivingPlane,
        identity: Identity,
        timeouts: TransferTimeouts,
        events: RoomEvents,
        on_peer_lost: Callable[[str], None],
    ) -> None:
        self._link = link
        self._plane = plane
        self._sink = plane.sink
        self._identity = identity
        self._timeouts = timeouts
        self._events = events
        self._on_peer_lost = on_peer_lost
        self._lock = threading.RLock()
        self._rooms: dict[int, ReceivingRoom] = {}
        self._peers: dict[str, _Peer] = {}
        self._leaving = Leaving()
        self._next_ping = 0.0
        self._ping_seconds = min(_LONGEST_PING_SECONDS, timeouts.push / 4)
        self.statistics = TransferStatistics()
        link.start(self)

    # ---- called by the engine

    def greet(self, endpoint: str) -> None:
        """Connect and shake hands, if that has not begun; a refusal is tried anew."""
        with self._lock:
            peer = self._peers.get(endpoint)
            if peer is not None and peer.state is not _PeerState.REFUSED:
                return
            self._peers[endpoint] = _Peer(
                _PeerState.GREETING, time.monotonic() + self._timeouts.handshake
            )
            self._link.connect(endpoint)
            self._link.send(
                endpoint,
                Hello(
                    version=PROTOCOL_VERSION,
                    instance_id=self._identity.instance_id,
                    fingerprint=self._identity.fingerprint,
                    layout=self._sink.layout.to_dict(),
                    num_layers=self._sink.layout.plan.num_layers,
                    page_size=self._sink.page_size,
                    metadata_bytes=self._identity.metadata_bytes,
                    transfer=self._plane.name,
                ),
            )

    def expect(self, room: int, endpoints: Sequence[str]) -> None:
        """The engine has a request for this room; keep prefill's lease on it alive."""
        with self._lock:
            self._rooms[room] = ReceivingRoom(
                tuple(endpoints), time.monotonic() + self._timeouts.handshake
            )

    def reserve(self, room: int, reservation: Reservation) -> None:
        """Pages are allocated: ask for the rows."""
        with self._lock:
            state = self._rooms.get(room)
            if state is None or state.closed:
                return
            state.reservation = reservation
            state.deadline = time.monotonic() + self._timeouts.push
            for endpoint in (reservation.source, *reservation.dummies):
                self._request(
                    endpoint,
                    Reserve(
                        room=room,
                        pages=len(reservation.pages),
                        destinations=reservation.destinations,
                        decode_prefix_len=reservation.decode_prefix_len,
                        dummy=endpoint != reservation.source,
                    ),
                )

    def abort(self, room: int, reason: str) -> None:
        """Give the room up; ``on_failed`` follows when prefill has acknowledged or is gone."""
        self._give_up(room, TransferAborted(reason))

    def fence(self, room: int) -> None:
        """Return once no byte of the room can be written any more."""
        with self._lock:
            state = self._rooms.get(room)
            if state is not None:
                self._give_up(room, TransferAborted("another decode rank gave the room up"))

    def forget(self, room: int) -> None:
        """Drop every trace of a finished or failed room."""
        with self._lock:
            state = self._rooms.get(room)
            if state is None:
                return
            state.forgotten = True
            if not state.unacknowledged_aborts:  # else it goes when they are in
                del self._rooms[room]

    def close(self) -> None:
        """Stop the inboxes and the link; those of ranks that are gone have ended, too."""
        with self._lock:
            for peer in self._peers.values():
                self._close_inbox(peer)
            self._peers.clear()
            leaving = self._leaving.take()
        join_all(leaving)
        self._link.close()

    def accounting(self) -> dict[str, Any]:
        """What is held right now, and totals since the start."""
        with self._lock:
            return {
                "rooms": len(self._rooms),
                "peers": len(self._peers),
                **self.statistics.snapshot(),
            }

    # ---- called by the link

    def on_message(self, peer: str, message: Message, payload: memoryview | None) -> None:
        """A prefill rank says something."""
        if isinstance(message, Chunk | Done):
            self._submit(peer, message, payload)
            return
        with self._lock:
            if isinstance(message, Welcome):
                self._on_welcome(peer, message.data_port)
            elif isinstance(message, Refuse):
                self._on_refuse(peer, message.reason)
            elif isinstance(message, Dropped):
                self._on_dropped(peer, message.reason)
            elif isinstance(message, Abort):
                self._on_abort(peer, message)
            elif isinstance(message, AbortAck):
                self._on_abort_ack(peer, message.room)
            elif isinstance(message, Pong):
                self._renew(message.rooms)

    def _submit(self, peer: str, message: Chunk | Done, payload: memoryview | None) -> None:
        """Without the lock: what is announced must not wait while other rows are stored."""
        known = self._peers.get(peer)
        inbox = None if known is None else known.inbox
        if inbox is not None:
            inbox.submit(message, payload)

    def on_disconnect(self, peer: str) -> None:
        """A prefill rank is gone: its rooms fail, and a later request greets it anew."""
        with self._lock:
            if peer not in self._peers:
                return
            affected = self._forget_peer(peer)
        self._tell_of_loss(peer, affected, TransferError(f"prefill rank {peer} is gone"))

    def on_tick(self) -> None:
        """Ping, and end what took too long."""
        now = time.monotonic()
        with self._lock:
            if now >= self._next_ping:
                self._next_ping = now + self._ping_seconds
                self._ping()
            expired = [room for room, state in self._rooms.items() if now > state.deadline]
            unanswered = [
                endpoint
                for endpoint, peer in self._peers.items()
                if peer.state is _PeerState.GREETING and now > peer.deadline
            ]
        for room in expired:
            self._expire(room)
        for endpoint in unanswered:
            self._link.disconnect(endpoint)
            self.on_disconnect(endpoint)

    # ---- handshake

    def _request(self, endpoint: str, reserve: Reserve) -> None:
        peer = self._peers.get(endpoint)
        if peer is None:
            self._give_up(reserve.room, TransferError(f"prefill rank {endpoint} is gone"))
        elif peer.state is _PeerState.WELCOME:
            self._link.send(endpoint, reserve)
        elif peer.state is _PeerState.GREETING:
            peer.waiting.append((reserve.room, reserve))
        else:
            assert peer.error is not None
            self._give_up(reserve.room, peer.error)

    def _on_welcome(self, endpoint: str, data_port: int) -> None:
        peer = self._peers.get(endpoint)
        if peer is None:
            return
        peer.state = _PeerState.WELCOME
        peer.inbox = self._plane.inbox(endpoint, data_port, self)
        waiting, peer.waiting = peer.waiting, []
        for room, reserve in waiting:
            state = self._rooms.get(room)
            if state is not None and not state.closed:
                self._link.send(endpoint, reserve)

    def _on_dropped(self, endpoint: str, reason: str) -> None:
        peer = self._peers.get(endpoint)
        if peer is not None and peer.state is _PeerState.WELCOME:
            self._turn_away(endpoint, TransferError(f"prefill dropped this rank: {reason}"))

    def _on_refuse(self, endpoint: str, reason: str) -> None:
        self._turn_away(endpoint, LayoutMismatch(f"prefill refused this rank: {reason}"))

    def _turn_away(self, endpoint: str, error: TransferError) -> None:
        """A prefill rank wants nothing of this one until it is greeted anew."""
        if endpoint not in self._peers:
            return
        logger.error("%s: %s", endpoint, error)
        rooms = self._forget_peer(endpoint)
        self._peers[endpoint] = _Peer(_PeerState.REFUSED, time.monotonic(), error)
        self._fail_rooms(rooms, error)

    # ---- called by inboxes

    def on_rows(self, peer: str, chunk: Chunk, rows: ArrivedRows) -> None:
        """A chunk's rows are here: begin to store them, if the room still wants them."""
        with self._lock:
            state = self._rooms.get(chunk.room)
            if state is None or not state.takes_rows_from(peer):
                return
            assert state.reservation is not None
            pages = state.pages_of(chunk, rows.nbytes, self._sink)
            if pages is None:
                self._give_up(chunk.room, damaged(chunk))
                return
            begun, reservation = threading.Event(), state.reservation
            state.storing[rows] = begun
        # Without the lock, which the engine must not wait for while a device is waited for here.
        failure = self._begin(chunk, rows, pages, reservation)
        begun.set()  # whoever gives the room up waits for it
        if failure is not None:
            self._give_up(chunk.room, failure)

    def _begin(
        self, chunk: Chunk, rows: ArrivedRows, pages: Pages, reservation: Reservation
    ) -> TransferError | None:
        """Begin to store rows; why they could not be, if so."""
        place = (chunk.room, chunk.sequence, chunk.page_start, chunk.pages)
        try:
            if reservation.vacated is not None:
                self._sink.follow(reservation.vacated)
            rows.begin(self._sink, pages, place, chunk.digest)
        except Exception as error:  # a device without memory, for one
            logger.exception("rows of room %d could not be stored", chunk.room)
            return TransferError(f"room {chunk.room}: rows could not be stored: {error!r}")
        return None

    def on_stored(self, peer: str, chunk: Chunk, rows: ArrivedRows) -> None:
        """What was begun with a chunk is complete: verify it."""
        with self._lock:
            state = self._rooms.get(chunk.room)
            if state is not None and not state.closed and rows in state.storing:
                del state.storing[rows]
                if rows.intact():
                    self._account(state, chunk, rows)
                else:
                    self._give_up(chunk.room, damaged(chunk))

    def _account(self, state: ReceivingRoom, chunk: Chunk, rows: ArrivedRows) -> None:
        state.digests.append(chunk.digest)
        state.pages_received += chunk.pages
        state.deadline = time.monotonic() + self._timeouts.push
        self.statistics.count_bytes(rows.nbytes, chunk.pages * self._sink.page_size)

    def on_done(self, peer: str, done: Done, metadata: memoryview) -> bool:
        """The room's end: verify the whole of it; the inbox acknowledges what is."""
        with self._lock:
            state = self._rooms.get(done.room)
            if state is None or not state.takes_rows_from(peer):
                return False
            if not state.is_complete(done, metadata, self._identity.metadata_bytes):
                self._give_up(done.room, state.incomplete(done))
                return False
            state.closed = state.done = True
            state.deadline = float("inf")
            self._events.on_done(done.room, bytes(metadata))
            return True

    def on_broken(self, peer: str, inbox: Inbox, error: TransferError) -> None:
        """No more rows come from a prefill rank: drop it, a later request greets it anew."""
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.inbox is not inbox:
                return
            self._link.disconnect(peer)
            affected = self._forget_peer(peer)
        logger.error("%s", error)
        self._tell_of_loss(peer, affected, error)

    # ---- ends

    def _forget_peer(self, peer: str) -> list[int]:
        """Forget a prefill rank, so that a later request greets it anew; returns its rooms."""
        self._close_inbox(self._peers.pop(peer))
        for state in self._rooms.values():
            state.unacknowledged_aborts.discard(peer)
        return [room for room, state in self._rooms.items() if peer in state.endpoints]

    def _close_inbox(self, peer: _Peer) -> None:
        if peer.inbox is not None:
            peer.inbox.close()
            self._leaving.add(peer.inbox)
            peer.inbox = None

    def _tell_of_loss(self, peer: str, rooms: list[int], error: TransferError) -> None:
        """Fail a lost rank's rooms.

        Not under the lock: the engine calls this class under one that ``on_peer_lost`` takes.
        """
        logger.warning("prefill rank %s is gone, %d rooms affected", peer, len(rooms))
        self._on_peer_lost(peer)
        self._fail_rooms(rooms, error)

    def _fail_rooms(self, rooms: list[int], error: TransferError) -> None:
        for room in rooms:
            self._give_up(room, error)
        with self._lock:
            self._conclude_aborts()

    def _on_abort(self, peer: str, abort: Abort) -> None:
        state = self._rooms.get(abort.room)
        if state is not None and peer in state.endpoints:
            state.endpoints = tuple(known for known in state.endpoints if known != peer)
            error = TransferAborted(f"prefill aborted: {abort.reason}")
            if state.done:  # here all is well, but another rank gave the room up: say why
                self._events.on_failed(abort.room, error)
            self._give_up(abort.room, error)
        self._link.send(peer, AbortAck(abort.room))

    def _on_abort_ack(self, peer: str, room: int) -> None:
        state = self._rooms.get(room)
        if state is not None:
            state.unacknowledged_aborts.discard(peer)
            self._conclude_aborts()

    def _give_up(self, room: int, error: TransferError) -> None:
        with self._lock:
            state = self._rooms.get(room)
            if state is None or state.closed:
                return
            state.closed = True
            state.wait_for_rows()
            state.abort_error = error
            state.deadline = time.monotonic() + self._timeouts.ack
            self.statistics.count_failure(error)
            for endpoint in state.endpoints:
                peer = self._peers.get(endpoint)
                if peer is not None and peer.state is _PeerState.WELCOME:
                    state.unacknowledged_aborts.add(endpoint)
                    self._link.send(endpoint, Abort(room, f"{type(error).__name__}: {error}"))
            self._conclude_aborts()

    def _conclude_aborts(self) -> None:
        for room, state in list(self._rooms.items()):
            if state.abort_error is None or state.unacknowledged_aborts:
                continue
            error, state.abort_error = state.abort_error, None
            state.deadline = float("inf")
            if state.forgotten:
                del self._rooms[room]
            else:
                self._events.on_failed(room, error)

    def _expire(self, room: int) -> None:
        with self._lock:
            state = self._rooms.get(room)
            if state is None:
                return
            if state.closed:  # an abort that nobody acknowledged
                state.unacknowledged_aborts.clear()
                self._conclude_aborts()
                return
            waited = "its pages" if state.reservation is not None else "the handshake"
            self._give_up(
                room,
                TransferTimeout(
                    f"room {room}: no sign of {waited} from prefill within "
                    f"{self._timeouts.push:g} s; did the prefill leg of the request arrive? "
                    "Raise --transfer-timeout to wait longer"
                ),
            )

    # ---- leases

    def _ping(self) -> None:
        wanted: dict[str, list[int]] = {
            endpoint: []
            for endpoint, peer in self._peers.items()
            if peer.state is _PeerState.WELCOME
        }
        for room, state in self._rooms.items():
            if not state.closed:
                for endpoint in wanted.keys() & set(state.endpoints):
                    wanted[endpoint].append(room)
        for endpoint, rooms in wanted.items():
            self._link.send(endpoint, Ping(rooms))

    def _renew(self, rooms: list[int]) -> None:
        deadline = time.monotonic() + self._timeouts.push
        for room in rooms:
            state = self._rooms.get(room)
            if state is not None and not state.closed:
                state.deadline = max(state.deadline, deadline)
