"""Prefill's half of KV transfer: who has reserved what, what was pushed, who has acknowledged.

Threads: the engine calls :class:`PrefillSender`'s public methods; messages and ticks come on the
link's thread, answers to rows also on one of their outbox; each decode rank has a pusher thread, so
that one that stalls delays no other.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tpla.core.config import TransferTimeouts
from tpla.core.errors import (
    ConfigError,
    LayoutMismatch,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from tpla.core.latent_layout import CacheLayout
from tpla.core.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    Ack,
    Credit,
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
from tpla.workers.transfer.digest import room_digest
from tpla.workers.transfer.leaving import Leaving, join_all
from tpla.workers.transfer.protocol import (
    Identity,
    Link,
    Pages,
    RoomEvents,
    SendingPlane,
)
from tpla.workers.transfer.pusher import Pusher, Task, Written
from tpla.workers.transfer.statistics import TransferStatistics

logger = logging.getLogger(__name__)


@dataclass
class _Room:
    """One request.

    ``peers`` maps each decode rank that reserved to its reservation, ``digests`` to those of the
    chunks it was sent; ``done_sent`` and ``unacknowledged`` name ranks.
    """

    deadline: float
    opened: bool = False
    ready: bool = False
    last_pushed: bool = False
    ended: bool = False
    peers: dict[str, Reserve] = field(default_factory=dict)
    digests: dict[str, list[int]] = field(default_factory=dict)
    done_sent: set[str] = field(default_factory=set)
    unacknowledged: set[str] = field(default_factory=set)
    payload_bytes: int = 0
    first_push: float = 0.0
    finished: float = 0.0


class PrefillSender:
    """Implements :class:`~tpla.workers.transfer.protocol.KVSender` for one prefill rank."""

    def __init__(
        self,
        link: Link,
        plane: SendingPlane,
        identity: Identity,
        timeouts: TransferTimeouts,
        events: RoomEvents,
    ) -> None:
        self._link = link
        self._plane = plane
        self._source = plane.source
        self._identity = identity
        self._timeouts = timeouts
        self._events = events
        self._lock = threading.RLock()
        self._rooms: dict[int, _Room] = {}
        self._pushers: dict[str, Pusher] = {}
        self._leaving = Leaving()
        self._closing = False
        self.statistics = TransferStatistics()
        link.start(self)

    # ---- called by the engine

    def open(self, room: int) -> None:
        """The engine has a request for this room."""
        with self._lock:
            state = self._room(room)
            state.opened = True
            state.deadline = time.monotonic() + self._timeouts.reserve
            self._announce_if_ready(room, state)

    def push(
        self,
        room: int,
        page_start: int,
        pages: Pages,
        metadata: bytes | None,
        written: Written | None = None,
    ) -> None:
        """Send the room's pages from ``page_start``; ``metadata`` comes with the last ones.

        The caller does not wait for ``written``, when the pages are complete; the pushers do.
        """
        with self._lock:
            state = self._rooms.get(room)
            if state is None or state.ended:
                return
            assert state.ready, f"room {room} was pushed before decode reserved its pages"
            state.last_pushed = metadata is not None
            state.first_push = state.first_push or time.monotonic()
            state.deadline = time.monotonic() + self._timeouts.push
            # A rank may be gone whose rooms have not been told yet.
            gone = [peer for peer in state.unacknowledged if peer not in self._pushers]
            if not gone:
                task = Task(room, page_start, pages, metadata, written)
                for peer in state.unacknowledged:
                    self._pushers[peer].submit(task)
                self._conclude_if_acknowledged(room, state)
        if gone:
            self._fail(room, TransferError(f"decode rank {gone[0]} is gone"))

    def abort(self, room: int, reason: str) -> None:
        """Give the room up and tell the decode ranks."""
        self._fail(room, TransferAborted(reason))

    def forget(self, room: int) -> None:
        """Drop every trace of a finished or failed room."""
        with self._lock:
            self._rooms.pop(room, None)

    def transferred(self, room: int) -> tuple[int, float]:
        """Payload bytes to all ranks, and seconds from the first push to the last acknowledgement.

        Both are zero for a room that is not finished.
        """
        with self._lock:
            state = self._rooms.get(room)
            if state is None or not state.finished:
                return 0, 0.0
            return state.payload_bytes, state.finished - state.first_push

    def close(self) -> None:
        """Stop the pushers and the link; those of ranks that are gone have ended, too."""
        with self._lock:
            self._closing = True
            for peer in list(self._pushers):
                self._dismiss(peer)
            leaving = self._leaving.take()
        join_all(leaving)
        self._link.close()

    def accounting(self) -> dict[str, Any]:
        """What is held right now, and totals since the start."""
        with self._lock:
            return {
                "rooms": len(self._rooms),
                "peers": len(self._pushers),
                **self.statistics.snapshot(),
            }

    # ---- called by the link

    def on_message(self, peer: str, message: Message, payload: memoryview | None) -> None:
        """A decode rank says something."""
        with self._lock:
            if self._closing:
                return  # the link ends in a moment, which tells all of them
            if isinstance(message, Hello):
                self._on_hello(peer, message)
            elif peer not in self._pushers:
                self._link.send(peer, Dropped("say Hello first"))
            elif isinstance(message, Reserve):
                self._on_reserve(peer, message)
            elif isinstance(message, Credit):
                self._pushers[peer].grant(message.payload_bytes)
            elif isinstance(message, Ack):
                self._on_ack(peer, message.room)
            elif isinstance(message, Abort):
                self._on_abort(peer, message)
            elif isinstance(message, Ping):
                self._on_ping(peer, message)

    def on_disconnect(self, peer: str) -> None:
        """A decode rank is gone: its rooms fail."""
        with self._lock:
            if not self._dismiss(peer):
                return
            affected = self._leave_rooms(peer)
        logger.warning("decode rank %s is gone, %d rooms fail", peer, len(affected))
        for room in affected:
            self._fail(room, TransferError(f"decode rank {peer} is gone"))

    def on_tick(self) -> None:
        """Fail rooms whose lease ran out; drop decode ranks that fell silent."""
        now = time.monotonic()
        with self._lock:
            expired = [
                (room, state)
                for room, state in self._rooms.items()
                if not state.ended and now > state.deadline
            ]
            silent = [
                peer
                for peer, pusher in self._pushers.items()
                if now - pusher.last_heard > self._timeouts.push
            ]
        for room, state in expired:
            self._fail(room, self._expiry(room, state))
        for peer in silent:
            self.on_disconnect(peer)

    def _leave_rooms(self, peer: str) -> list[int]:
        """A decode rank's rooms, of which it will not be told any more."""
        rooms = [room for room, state in self._rooms.items() if peer in state.peers]
        for room in rooms:
            del self._rooms[room].peers[peer]
        return rooms

    def _dismiss(self, peer: str) -> bool:
        """Have a decode rank's pusher end; whether there was one."""
        pusher = self._pushers.pop(peer, None)
        if pusher is None:
            return False
        pusher.stop()
        self._leaving.add(pusher)
        return True

    # ---- handshake

    def _on_hello(self, peer: str, hello: Hello) -> None:
        try:
            layout = self._check(hello)
        except (LayoutMismatch, ConfigError) as error:
            logger.error("refused decode rank %s: %s", peer, error)
            self._link.send(peer, Refuse(str(error)))
            return
        if self._dismiss(peer):  # with what it was to send
            for room in self._leave_rooms(peer):
                self._fail(room, TransferError(f"decode rank {peer} began anew"))
        outbox = self._plane.outbox(peer, layout)
        self._pushers[peer] = Pusher(peer, layout, outbox, self)
        self._link.send(peer, Welcome(self._identity.instance_id, outbox.port))
        logger.info("decode rank %s: %s, %d bytes a token", peer, layout, layout.token_bytes)

    def _check(self, hello: Hello) -> CacheLayout:
        if hello.version != PROTOCOL_VERSION:  # its layout may be of another form, too
            raise LayoutMismatch(
                f"protocol version: decode has {hello.version}, prefill has {PROTOCOL_VERSION}. "
                "Start both workers with the same release"
            )
        layout = CacheLayout.from_dict(hello.layout)
        comparisons = {
            "data plane": (hello.transfer, self._plane.name),
            "checkpoint fingerprint/settings": (hello.fingerprint, self._identity.fingerprint),
            "kv_lora_rank": (layout.plan.kv_lora_rank, self._identity.kv_lora_rank),
            "qk_rope_head_dim": (layout.qk_rope_head_dim, self._identity.qk_rope_head_dim),
            "layers": (hello.num_layers, self._source.num_layers),
            "layers of the layout": (layout.plan.num_layers, self._source.num_layers),
            "page size": (hello.page_size, self._source.page_size),
            "metadata bytes": (hello.metadata_bytes, self._identity.metadata_bytes),
        }
        different = [
            f"{name}: decode has {theirs}, prefill has {ours}"
            for name, (theirs, ours) in comparisons.items()
            if theirs != ours
        ]
        if different:
            raise LayoutMismatch(
                "; ".join(different)
                + ". Start both workers with the same converted checkpoint, --transfer, "
                "--page-size, --pp-size, --json-model-override-args and release"
            )
        return layout

    # ---- rooms

    def _room(self, room: int) -> _Room:
        if room not in self._rooms:
            self._rooms[room] = _Room(deadline=time.monotonic() + self._timeouts.reserve)
        return self._rooms[room]

    def _on_reserve(self, peer: str, reserve: Reserve) -> None:
        state = self._room(reserve.room)
        if state.ended:
            self._link.send(peer, Abort(reserve.room, "prefill has given this room up"))
            return
        state.peers[peer] = reserve
        state.deadline = time.monotonic() + self._timeouts.push
        if not reserve.dummy:
            state.unacknowledged.add(peer)
            state.digests[peer] = []
        self._announce_if_ready(reserve.room, state)

    def _announce_if_ready(self, room: int, state: _Room) -> None:
        if not state.opened or state.ready or not state.peers:
            return
        first = next(iter(state.peers.values()))
        if len(state.peers) == first.destinations:
            state.ready = True
            self._events.on_ready(room, first.decode_prefix_len)

    def _on_ack(self, peer: str, room: int) -> None:
        state = self._rooms.get(room)
        if state is not None and not state.ended:
            state.unacknowledged.discard(peer)
            self._conclude_if_acknowledged(room, state)

    def _conclude_if_acknowledged(self, room: int, state: _Room) -> None:
        if state.last_pushed and not state.unacknowledged:
            state.ended = True
            state.finished = time.monotonic()
            self._events.on_done(room, b"")

    def _on_abort(self, peer: str, abort: Abort) -> None:
        state = self._rooms.get(abort.room)
        # One that has not reserved yet may belong to the room as well; when all have, it does not.
        if state is not None and (peer in state.peers or not state.ready):
            state.peers.pop(peer, None)  # it knows already
            self._fail(abort.room, TransferAborted(f"decode aborted: {abort.reason}"))
        # No chunk follows; those on their way find the room given up.
        self._link.send(peer, AbortAck(abort.room))

    def _on_ping(self, peer: str, ping: Ping) -> None:
        now = time.monotonic()
        self._pushers[peer].last_heard = now
        known = []
        for room in ping.rooms:
            state = self._rooms.get(room)
            # A rank that was sent Done owes an acknowledgement, which has a time-out of its own.
            if (
                state is not None
                and state.opened
                and not state.ended
                and peer not in state.done_sent
            ):
                known.append(room)
                state.deadline = max(state.deadline, now + self._timeouts.reserve)
        self._link.send(peer, Pong(known))

    def _fail(self, room: int, error: TransferError) -> None:
        with self._lock:
            state = self._rooms.get(room)
            if state is None or state.ended:
                return
            state.ended = True
            for peer in state.peers:
                self._link.send(peer, Abort(room, f"{type(error).__name__}: {error}"))
            self.statistics.count_failure(error)
            if not state.opened:
                del self._rooms[room]
        self._events.on_failed(room, error)

    def _expiry(self, room: int, state: _Room) -> TransferTimeout:
        if not state.opened:
            return TransferTimeout(
                f"room {room}: decode reserved pages, but the prefill leg of the request did not "
                f"arrive within {self._timeouts.reserve:g} s; were both legs sent? "
                "Raise --transfer-timeout to wait longer"
            )
        if not state.ready:
            return TransferTimeout(
                f"room {room}: no decode worker reserved pages within "
                f"{self._timeouts.reserve:g} s; is decode alive and told the same bootstrap room? "
                "Raise --transfer-timeout to wait longer"
            )
        waiting = "acknowledgement" if state.last_pushed else "progress"
        return TransferTimeout(
            f"room {room}: no {waiting} from decode within {self._timeouts.push:g} s; "
            "raise --transfer-timeout to wait longer"
        )

    # ---- called by pushers

    def answered(self, pusher: Pusher, message: Message) -> None:
        """A decode rank answers through its outbox."""
        with self._lock:
            if self._pushers.get(pusher.peer) is pusher:
                self.on_message(pusher.peer, message, None)

    def left(self, pusher: Pusher) -> None:
        """A decode rank has closed its outbox: its rooms fail."""
        with self._lock:
            if self._pushers.get(pusher.peer) is pusher:
                self.on_disconnect(pusher.peer)

    def lose(self, pusher: Pusher, error: TransferError) -> None:
        """A decode rank cannot be sent to any more: its rooms fail, and it must greet anew."""
        with self._lock:
            if self._pushers.get(pusher.peer) is not pusher:
                return
            # Said before any of its rooms fails: what it asks for afterwards, it asks anew.
            self._link.send(pusher.peer, Dropped(f"the connection for rows broke: {error}"))
            self.on_disconnect(pusher.peer)

    def send_task(self, pusher: Pusher, task: Task) -> None:
        """Send a task's pages in chunks; runs on the pusher's thread."""
        patience = self._timeouts.push
        if task.written is not None and not pusher.wait_for(task.written.query, patience):
            if not pusher.stopped:
                late = f"room {task.room}: prefill was still writing its pages after {patience:g} s"
                self._fail(task.room, TransferTimeout(late))
            return
        page_bytes = self._source.page_size * pusher.layout.token_bytes
        step = max(1, pusher.outbox.chunk_bytes // page_bytes)
        stop = max(1, pusher.outbox.first_bytes // page_bytes)
        first = 0
        while first < len(task.pages):
            pages = task.pages[first:stop]
            if not self._send_chunk(pusher, task.room, task.page_start + first, pages):
                return
            first, stop = stop, stop + step
        if task.metadata is not None:
            self._send_done(pusher, task)

    def _send_chunk(self, pusher: Pusher, room: int, page_start: int, pages: Pages) -> bool:
        tokens = len(pages) * self._source.page_size
        nbytes = tokens * pusher.layout.token_bytes
        if not pusher.take_credit(nbytes, self._timeouts.push):
            if not pusher.stopped:
                late = f"decode rank {pusher.peer} took no data for {self._timeouts.push:g} s"
                self._fail(room, TransferTimeout(f"room {room}: {late}"))
            return False
        with self._lock:
            state = self._rooms.get(room)
            if state is None or state.ended or pusher.peer not in state.digests:
                pusher.grant(nbytes)
                return False
            digests = state.digests[pusher.peer]
        place = (room, len(digests), page_start, len(pages))
        try:
            digests.append(pusher.outbox.send(place, pages))
        except Exception:
            pusher.grant(nbytes)  # decode, which got nothing, gives no credit back for it
            raise
        self.statistics.count_bytes(nbytes, tokens)
        with self._lock:
            state.payload_bytes += nbytes
            state.deadline = max(state.deadline, time.monotonic() + self._timeouts.push)
        return True

    def _send_done(self, pusher: Pusher, task: Task) -> None:
        assert task.metadata is not None
        with self._lock:
            # The engine frees pages only after the room has failed or finished. If it fails while
            # a device still reads them, decode gets an Abort and gives up what it was sent.
            state = self._rooms.get(task.room)
            if state is None or state.ended:
                return
            digests = state.digests[pusher.peer]
            state.done_sent.add(pusher.peer)
            state.deadline = time.monotonic() + self._timeouts.ack
        done = Done(
            room=task.room,
            chunks=len(digests),
            pages=task.page_start + len(task.pages),
            digest=room_digest(task.room, digests, task.metadata),
        )
        pusher.outbox.finish(done, task.metadata)
