"""Rows that travel through a process group of each pair of ranks: NCCL between GPUs of one host.

::

    prefill: pack a chunk into one buffer     while others wait and one is sent
    decode:  receive a chunk into one buffer  while another is stored and verified

Messages go over the link as ever: a Chunk announces what is sent next, and decode begins to
receive when it comes, so that both sides see the chunks in the order of the messages. NCCL tells
nobody that the peer is gone; the link does, or a time-out, and whoever owns the group aborts it.
The next Hello makes a new group.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch

from tpla.core.config import TransferTimeouts
from tpla.core.errors import TransferAborted, TransferError, TransferTimeout
from tpla.core.latent_layout import CacheLayout
from tpla.core.messages import Chunk, Done
from tpla.workers.transfer.chunk_rows import ReceivedRows, StagedRows, wire_bytes
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
    Link,
    OutgoingRows,
    Pages,
    PageSink,
    PageSource,
)

CHUNK_BYTES = 128 << 20
"""Payload of one chunk: sent in 0.4 ms between two H200s, for which the host needs 0.5 ms."""

FIRST_SHARE = 8
"""A request's first chunk is so many times smaller: nothing is sent while it is packed."""

SENDING_BUFFERS, RECEIVING_BUFFERS = 5, 4
"""Staging buffers of a chunk each, per pair of ranks. From a buffer that is free again until the
other rank has begun to receive from it take messages and launches as long as two chunks or three.
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
        self._buffers: list[_Buffer] = []
        self._next = 0

    def connect(self) -> None:
        """As the protocol's; the first operation makes NCCL's connection, so it is made here."""
        device, patience = self._source.device, self._timeouts.handshake
        self._group = join_group(self._backend, self._store, PREFILL_RANK, device, patience)
        size = max(self.chunk_bytes, self._page_bytes)
        self._buffers = [_Buffer(size, device) for _ in range(SENDING_BUFFERS)]
        greeting = torch.zeros(_GREETING_WORDS, dtype=torch.int64, device=device)
        _wait(self._group.send(greeting), patience, self._cancelled, f"{self._peer} to join")

    def read(self, pages: Pages) -> _BufferedRows:
        """As the protocol's; waits until the buffer's last chunk is sent."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.pending is not None:
            _wait(buffer.pending, self._timeouts.push, self._cancelled, f"{self._peer} to receive")
            buffer.pending = None
        nbytes = len(pages) * self._page_bytes
        wire_B = buffer.front(nbytes)
        settle = self._source.pack(pages, self._layout, wire_B)
        return _BufferedRows(buffer, wire_B, nbytes, settle)

    def send(self, chunk: Chunk, rows: OutgoingRows) -> None:
        """As the protocol's."""
        assert self._group is not None and isinstance(rows, _BufferedRows)
        self._link.send(self._peer, chunk)
        rows.buffer.pending = self._group.send(rows.wire_B)

    def cancel(self) -> None:
        """As the protocol's."""
        self._cancelled.set()

    def close(self) -> None:
        """As the protocol's."""
        if self._group is not None:
            self._group.abort()
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
        self._arrivals: deque[_Arrival] = deque()
        self._free: deque[_Buffer] = deque()
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
        self._free.extend(
            _Buffer(max(CHUNK_BYTES, self._page_bytes), device) for _ in range(RECEIVING_BUFFERS)
        )
        greeting = torch.zeros(_GREETING_WORDS, dtype=torch.int64, device=device)
        _wait(self._group.recv(greeting), patience, self._cancelled, f"{self._peer} to join")

    def _turn(self) -> None:
        """Begin to receive what was announced, or deliver what is first."""
        with self._condition:
            if not self._arrivals:
                self._condition.wait_for(lambda: self._messages or self._cancelled.is_set())
            message, payload = self._messages[0] if self._messages else (None, b"")
            begins = isinstance(message, Chunk) and bool(self._free)
            ends = isinstance(message, Done) and not self._arrivals
            if begins or ends:
                self._messages.popleft()
        if isinstance(message, Chunk) and begins:
            self._begin(message)
        elif isinstance(message, Done) and ends:
            self._handler.on_done(self._peer, message, memoryview(payload))
        elif self._arrivals:
            self._deliver_first()

    def _begin(self, chunk: Chunk) -> None:
        assert self._group is not None
        nbytes, buffer = chunk.pages * self._page_bytes, self._free.popleft()
        if wire_bytes(nbytes) > buffer.size:
            raise TransferError(f"a chunk of {nbytes} bytes exceeds its buffer of {buffer.size}")
        pending = self._group.recv(buffer.front(nbytes))
        deadline = time.monotonic() + self._timeouts.push
        self._arrivals.append(_Arrival(chunk, nbytes, buffer, pending, deadline))

    def _deliver_first(self) -> None:
        arrival = self._arrivals[0]
        if not arrival.pending.done():
            if time.monotonic() > arrival.deadline:
                raise TransferTimeout(_waited(self._timeouts.push, f"{self._peer} to send"))
            time.sleep(_POLL_SECONDS)
            return
        self._arrivals.popleft()
        wire_B = arrival.buffer.front(arrival.nbytes)
        self._handler.on_rows(self._peer, arrival.chunk, ReceivedRows(wire_B, arrival.nbytes))
        self._free.append(arrival.buffer)


class _Buffer:
    """Staging memory of one chunk; on prefill also the send that was begun with it last."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.size = wire_bytes(nbytes)
        self._bytes_B = torch.empty(self.size, dtype=torch.uint8, device=device)
        self.pending: Pending | None = None

    def front(self, nbytes: int) -> torch.Tensor:
        """The part that ``nbytes`` of rows take on the wire."""
        return self._bytes_B[: wire_bytes(nbytes)]


class _BufferedRows(StagedRows):
    """Rows that know their buffer, which is free again when they are sent."""

    def __init__(
        self, buffer: _Buffer, wire_B: torch.Tensor, nbytes: int, settle: Callable[[], int]
    ) -> None:
        super().__init__(wire_B, nbytes, settle)
        self.buffer = buffer


@dataclass(frozen=True)
class _Arrival:
    chunk: Chunk
    nbytes: int
    buffer: _Buffer
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
