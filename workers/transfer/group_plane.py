"""Rows that travel through a process group of each pair of ranks: NCCL between GPUs of one host.

::

    prefill: pack a chunk into one buffer     while others wait and one is sent
    decode:  receive a chunk into one buffer  while others are stored and verified

Messages go over the link as ever: a Chunk announces what is sent next, and decode begins to
receive when it comes, so that both sides see the chunks in the order of the messages. The prefill
rank's host never waits for its device, whose own order brings packing before sending; decode's
waits between receiving and storing, since what is enqueued on a device cannot be taken back when
the room is given up. NCCL tells nobody that the peer is gone; the link does, or a time-out, and
whoever owns the group aborts it. The next Hello makes a new group.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch

from tpla.core.config import TransferTimeouts
from tpla.core.errors import TransferAborted, TransferError, TransferTimeout
from tpla.core.latent_layout import CacheLayout
from tpla.core.messages import Chunk, Done
from tpla.workers.transfer.chunk_rows import StagedRows
from tpla.workers.transfer.digest import Place, place_digest
from tpla.workers.transfer.pair_group import (
    DECODE_RANK,
    PREFILL_RANK,
    PairGroup,
    Pending,
    host_store,
    join_group,
    join_store,
)
from tpla.workers.transfer.protocol import (
    InboxHandler,
    IncomingStaging,
    Link,
    OutgoingStaging,
    Pages,
    PageSink,
    PageSource,
)

CHUNK_BYTES = 128 << 20
"""Payload of one chunk: sent in 0.4 ms between two H200s, in which the host launches the next."""

FIRST_SHARE = 2
"""A request's first chunk is so many times smaller: while it is packed, nothing is sent, and while
it is sent, the next one is packed.
"""

SENDING_BUFFERS, RECEIVING_BUFFERS = 5, 4
"""Staging memory of a chunk each, per pair of ranks. From when it is free again until the other
rank has begun to receive from it take messages and launches as long as two chunks or three.
"""

_POLL_SECONDS = 20e-6
_GREETING_WORDS = 1


class GroupSendingPlane:
    """Implements :class:`~tpla.workers.transfer.protocol.SendingPlane` for ``nccl`` or ``gloo``."""

    def __init__(
        self, link: Link, source: PageSource, backend: str, timeouts: TransferTimeouts
    ) -> None:
        self.name = backend
        self.source = source
        self._link = link
        self._timeouts = timeouts

    def outbox(self, peer: str, layout: CacheLayout) -> GroupOutbox:
        """As the protocol's."""
        return GroupOutbox(self._link, self.source, peer, layout, self.name, self._timeouts)


class GroupOutbox:
    """One decode rank's group and its staging buffers."""

    def __init__(
        self,
        link: Link,
        source: PageSource,
        peer: str,
        layout: CacheLayout,
        backend: str,
        timeouts: TransferTimeouts,
    ) -> None:
        self.chunk_bytes, self.first_bytes = CHUNK_BYTES, CHUNK_BYTES // FIRST_SHARE
        self.window_bytes = (SENDING_BUFFERS + RECEIVING_BUFFERS) * CHUNK_BYTES
        self._link = link
        self._source = source
        self._peer = peer
        self._layout = layout
        self._backend = backend
        self._timeouts = timeouts
        self._store = host_store(timeouts.handshake)
        self.port: int = self._store.port
        self._cancelled = threading.Event()
        self._group: PairGroup | None = None
        self._page_bytes = source.page_size * layout.token_bytes
        self._buffers: list[_SendingBuffer] = []
        self._next = 0

    def connect(self) -> None:
        """As the protocol's; the first operation makes NCCL's connection, so it is made here."""
        device, patience = self._source.device, self._timeouts.handshake
        self._group = join_group(self._backend, self._store, PREFILL_RANK, device, patience)
        size = max(self.chunk_bytes, self._page_bytes)
        self._buffers = [
            _SendingBuffer(self._source.staging(self._layout, size)) for _ in range(SENDING_BUFFERS)
        ]
        greeting = torch.zeros(_GREETING_WORDS, dtype=torch.int64, device=device)
        _wait(self._group.send(greeting), patience, self._cancelled, f"{self._peer} to join")

    def send(self, place: Place, pages: Pages, damaged: bool = False) -> int:
        """As the protocol's; waits until the chunk before in the same buffer is sent."""
        assert self._group is not None
        buffer, seed = self._buffers[self._next], place_digest(place)
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.pending is not None:
            _wait(buffer.pending, self._timeouts.push, self._cancelled, f"{self._peer} to receive")
            buffer.pending = None
        self._link.send(self._peer, Chunk(*place, seed))
        try:
            wire_B = buffer.staging.pack(pages, seed)
            if damaged:
                buffer.staging.damage()
            buffer.pending = self._group.send(wire_B, buffer.staging.ready)
        except Exception as error:  # decode waits for these rows and would take the next for them
            raise TransferError(f"chunk {place} was announced and not sent: {error!r}") from error
        return seed

    def cancel(self) -> None:
        """As the protocol's."""
        self._cancelled.set()

    def close(self) -> None:
        """As the protocol's."""
        if self._group is not None:
            self._group.abort()
        for buffer in self._buffers:
            if buffer.staging.ready is not None:
                buffer.staging.ready.synchronize()  # a device may write to what is freed here
        self._buffers.clear()


class GroupReceivingPlane:
    """Implements :class:`~tpla.workers.transfer.protocol.ReceivingPlane`, as above."""

    def __init__(self, sink: PageSink, backend: str, timeouts: TransferTimeouts) -> None:
        self.name = backend
        self.sink = sink
        self._timeouts = timeouts

    def inbox(self, peer: str, port: int, handler: InboxHandler) -> GroupInbox:
        """As the protocol's."""
        return GroupInbox(self.sink, peer, port, handler, self.name, self._timeouts)


class GroupInbox:
    """One prefill rank's group, and the thread that receives from it."""

    def __init__(
        self,
        sink: PageSink,
        peer: str,
        port: int,
        handler: InboxHandler,
        backend: str,
        timeouts: TransferTimeouts,
    ) -> None:
        self._sink = sink
        self._peer = peer
        self._port = port
        self._handler = handler
        self._backend = backend
        self._timeouts = timeouts
        self._group: PairGroup | None = None
        self._page_bytes = sink.page_size * sink.layout.token_bytes
        self._messages: deque[tuple[Chunk | Done, bytes]] = deque()
        self._arriving: deque[_Arrival] = deque()
        self._storing: deque[_Arrival] = deque()
        self._free: deque[IncomingStaging] = deque()
        self._condition = threading.Condition()
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tpla-pull-{peer}", daemon=True)
        self._thread.start()

    def submit(self, message: Chunk | Done, payload: memoryview | None) -> None:
        """As the protocol's."""
        with self._condition:
            self._messages.append((message, bytes(payload or b"")))
            self._condition.notify_all()

    def close(self) -> None:
        """As the protocol's."""
        with self._condition:
            self._cancelled.set()
            self._condition.notify_all()

    def join(self, timeout: float) -> None:
        """As the protocol's."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._connect()
            while not self._cancelled.is_set():
                self._turn()
        except Exception as error:
            if not self._cancelled.is_set():
                reason = f"the {self._backend} data plane of {self._peer} broke: {error!r}"
                self._handler.on_broken(self._peer, self, TransferError(reason))
        finally:
            if self._group is not None:
                self._group.abort()

    def _connect(self) -> None:
        device, patience = self._sink.device, self._timeouts.handshake
        host = urlsplit(self._peer).hostname or ""
        store = join_store(host, self._port, patience)
        self._group = join_group(self._backend, store, DECODE_RANK, device, patience)
        size = max(CHUNK_BYTES, self._page_bytes)
        self._free.extend(self._sink.staging(size) for _ in range(RECEIVING_BUFFERS))
        greeting = torch.zeros(_GREETING_WORDS, dtype=torch.int64, device=device)
        _wait(self._group.recv(greeting), patience, self._cancelled, f"{self._peer} to join")

    def _turn(self) -> None:
        """Go on with whatever can go on, else wait for a moment or a message."""
        message, payload = self._take()
        if isinstance(message, Chunk):
            self._begin(message)
        elif isinstance(message, Done):
            self._handler.on_done(self._peer, message, memoryview(payload))
        elif not self._store_first() and not self._free_first():
            with self._condition:
                if self._busy():
                    self._condition.wait(_POLL_SECONDS)
                elif not self._messages and not self._cancelled.is_set():
                    self._condition.wait()

    def _take(self) -> tuple[Chunk | Done | None, bytes]:
        """The next message, if its time has come."""
        with self._condition:
            message = self._messages[0][0] if self._messages else None
            begins = isinstance(message, Chunk) and bool(self._free)
            ends = isinstance(message, Done) and not self._busy()
            return self._messages.popleft() if begins or ends else (None, b"")

    def _ends(self) -> bool:
        """Whether a room's end is all that waits for what is being stored: so may this thread."""
        with self._condition:
            message = self._messages[0][0] if self._messages else None
            return isinstance(message, Done) and not self._arriving

    def _busy(self) -> bool:
        return bool(self._arriving or self._storing)

    def _begin(self, chunk: Chunk) -> None:
        assert self._group is not None
        nbytes, staging = chunk.pages * self._page_bytes, self._free.popleft()
        if nbytes > max(CHUNK_BYTES, self._page_bytes):
            raise TransferError(f"a chunk of {nbytes} bytes exceeds its memory of {CHUNK_BYTES}")
        pending = self._group.recv(staging.wire(nbytes))
        deadline = time.monotonic() + self._timeouts.push
        rows = StagedRows(staging, nbytes)
        self._arriving.append(_Arrival(chunk, rows, staging, pending, deadline))

    def _store_first(self) -> bool:
        """Begin to store the first chunk that is on its way, if it is here."""
        if not self._arriving:
            return False
        arrival = self._arriving[0]
        if not arrival.pending.done():
            if time.monotonic() > arrival.deadline:
                raise TransferTimeout(_waited(self._timeouts.push, f"{self._peer} to send"))
            return False
        self._handler.on_rows(self._peer, arrival.chunk, arrival.rows)
        self._storing.append(self._arriving.popleft())
        return True

    def _free_first(self) -> bool:
        """Have the first chunk that is being stored verified, if it is."""
        if not self._storing or not (self._storing[0].staging.stored() or self._ends()):
            return False
        arrival = self._storing.popleft()
        self._handler.on_stored(self._peer, arrival.chunk, arrival.rows)
        self._free.append(arrival.staging)
        return True


@dataclass
class _SendingBuffer:
    """Staging memory, and the send that was begun from it last."""

    staging: OutgoingStaging
    pending: Pending | None = None


@dataclass(frozen=True)
class _Arrival:
    chunk: Chunk
    rows: StagedRows
    staging: IncomingStaging
    pending: Pending
    deadline: float


def _wait(pending: Pending, timeout: float, cancelled: threading.Event, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not pending.done():
        if cancelled.is_set():
            raise TransferAborted(f"stopped waiting for {what}")
        if time.monotonic() > deadline:
            raise TransferTimeout(_waited(timeout, what))
        time.sleep(_POLL_SECONDS)


def _waited(timeout: float, what: str) -> str:
    return f"waited {timeout:g} s for {what}; raise --transfer-timeout to wait longer"
