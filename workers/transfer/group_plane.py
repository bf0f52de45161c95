"""Rows that travel through a process group of each pair of ranks: NCCL between GPUs of one host.

::

    prefill: pack a chunk into one buffer     while others wait and one is sent
    decode:  receive a chunk into one buffer  while others are stored and verified

A Chunk announces what is sent next, and decode begins to receive when it comes, so that both sides
see the chunks in the order of the messages. These, the ends of rooms and what decode answers go
over a channel of the pair's own; the link, which has more hops, carries the rest. From a push to
its acknowledgement four threads are woken: prefill's pusher, decode's inbox, prefill's reader of
answers and the one that waits for the room. The prefill rank's host never waits for its device,
whose own order brings packing before sending; decode's waits between receiving and storing, since
what is enqueued on a device cannot be taken back when the room is given up. NCCL tells nobody that
the peer is gone; the channel does, the link, or a time-out, and whoever owns the group aborts it.
The next Hello makes a new group.
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
from tpla.core.messages import Ack, Chunk, Credit, Done, Message
from tpla.workers.transfer.chunk_rows import StagedRows
from tpla.workers.transfer.digest import Place, place_digest
from tpla.workers.transfer.pair_channel import PairChannel, accept, dial, listen, refuse
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
    OutboxHandler,
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
"""Between two looks at a device; the kernel makes it 70 microseconds or more."""

_HURRY_SECONDS = 500e-6
"""So long decode looks without a pause for the rows that a room waits for; it lets others run."""

_GREETING_WORDS = 1
_CHANNEL_KEY = "channel"
_JOIN_SECONDS = 5.0
_LEAST_SECONDS = 0.1


class GroupSendingPlane:
    """Implements :class:`~tpla.workers.transfer.protocol.SendingPlane` for ``nccl`` or ``gloo``."""

    def __init__(self, source: PageSource, backend: str, timeouts: TransferTimeouts) -> None:
        self.name = backend
        self.source = source
        self._timeouts = timeouts

    def outbox(self, peer: str, layout: CacheLayout) -> GroupOutbox:
        """As the protocol's."""
        return GroupOutbox(self.source, peer, layout, self.name, self._timeouts)


class GroupOutbox:
    """One decode rank's group and its staging buffers, and the thread that reads its answers."""

    def __init__(
        self,
        source: PageSource,
        peer: str,
        layout: CacheLayout,
        backend: str,
        timeouts: TransferTimeouts,
    ) -> None:
        self.chunk_bytes, self.first_bytes = CHUNK_BYTES, CHUNK_BYTES // FIRST_SHARE
        self.window_bytes = (SENDING_BUFFERS + RECEIVING_BUFFERS) * CHUNK_BYTES
        self._source = source
        self._peer = peer
        self._layout = layout
        self._backend = backend
        self._timeouts = timeouts
        self._store = host_store(timeouts.handshake)
        self.port: int = self._store.port
        self._listener = listen()
        self._store.set(_CHANNEL_KEY, str(self._listener.getsockname()[1]))
        self._channel: PairChannel | None = None
        self._reader: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._group: PairGroup | None = None
        self._page_bytes = source.page_size * layout.token_bytes
        self._buffers: list[_SendingBuffer] = []
        self._next = 0

    def connect(self, handler: OutboxHandler) -> None:
        """As the protocol's; NCCL connects at a lane's first operation, so that is done here.

        A rank that is not there is waited for by the channel, which can be told to stop. Only for
        one that is there are buffers made and their kernels compiled, which takes seconds at most.
        """
        device, patience = self._source.device, self._timeouts.handshake
        self._channel = accept(self._listener, patience, self._timeouts.push)
        if self._cancelled.is_set():
            raise TransferAborted(f"stopped waiting for {self._peer} to join")
        size = max(self.chunk_bytes, self._page_bytes)
        self._buffers = [
            _SendingBuffer(self._source.staging(self._layout, size)) for _ in range(SENDING_BUFFERS)
        ]
        begun = time.monotonic()
        name = f"tpla-acks-{self._peer}"
        self._reader = threading.Thread(target=self._read, args=[handler], name=name, daemon=True)
        self._reader.start()
        left = _left(begun, patience)
        self._group = join_group(self._backend, self._store, PREFILL_RANK, device, left, patience)
        greeting = torch.zeros(_GREETING_WORDS, dtype=torch.int64, device=device)
        for _ in range(self._group.lanes):
            pending = self._group.send(greeting)
            _wait(pending, begun, patience, self._cancelled, f"{self._peer} to join")

    def send(self, place: Place, pages: Pages, damaged: bool = False) -> int:
        """As the protocol's; waits until the chunk before in the same buffer is sent."""
        assert self._group is not None and self._channel is not None
        buffer, seed = self._buffers[self._next], place_digest(place)
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.pending is not None:
            begun, patience = time.monotonic(), self._timeouts.push
            _wait(buffer.pending, begun, patience, self._cancelled, f"{self._peer} to receive")
            buffer.pending = None
        self._channel.send(Chunk(*place, seed))
        try:
            wire_B = buffer.staging.pack(pages, seed)
            if damaged:
                buffer.staging.damage()
            buffer.pending = self._group.send(wire_B, buffer.staging.ready)
        except Exception as error:  # decode waits for these rows and would take the next for them
            raise TransferError(f"chunk {place} was announced and not sent: {error!r}") from error
        return seed

    def finish(self, done: Done, metadata: bytes) -> None:
        """As the protocol's."""
        assert self._channel is not None
        self._channel.send(done, metadata)

    def cancel(self) -> None:
        """As the protocol's."""
        self._cancelled.set()
        refuse(self._listener)
        if self._channel is not None:
            self._channel.shut()

    def close(self) -> None:
        """As the protocol's."""
        self._cancelled.set()
        self._listener.close()
        if self._channel is not None:
            self._channel.shut()
            if self._reader is not None:
                self._reader.join(_JOIN_SECONDS)
            self._channel.close()
        if self._group is not None:
            self._group.abort()
        for buffer in self._buffers:
            if buffer.staging.ready is not None:
                buffer.staging.ready.synchronize()  # a device may write to what is freed here
        self._buffers.clear()

    def _read(self, handler: OutboxHandler) -> None:
        """Deliver decode's answers until either end closes the channel."""
        assert self._channel is not None
        try:
            while True:
                for message, _ in self._channel.receive(waits=True):
                    handler.on_answer(message)
        except TransferError:
            if not self._cancelled.is_set():
                handler.on_gone()


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
        self._channel: PairChannel | None = None
        self._messages: deque[tuple[Message, bytes]] = deque()
        self._arriving: deque[_Arrival] = deque()
        self._storing: deque[_Arrival] = deque()
        self._free: deque[IncomingStaging] = deque()
        self._owed = 0
        self._progressed = 0.0
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tpla-pull-{peer}", daemon=True)
        self._thread.start()

    def submit(self, message: Chunk | Done, payload: memoryview | None) -> None:
        """Nothing of this plane comes over the link."""
        raise TransferError(f"{self._peer} announced {message} over the link")

    def close(self) -> None:
        """As the protocol's."""
        self._cancelled.set()
        if self._channel is not None:
            self._channel.shut()

    def join(self, timeout: float) -> bool:
        """As the protocol's."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._connect()
            while not self._cancelled.is_set():
                self._turn()
        except Exception as error:
            if not self._cancelled.is_set():
                reason = f"the {self._backend} data plane of {self._peer} is gone: {error!r}"
                self._handler.on_broken(self._peer, self, TransferError(reason))
        finally:
            if self._channel is not None:
                self._channel.close()
            if self._group is not None:
                self._group.abort()
            self._free_memory()

    def _free_memory(self) -> None:
        """Staging memory is of no use any more, though whoever waits for the thread keeps this."""
        for arrival in self._storing:
            arrival.rows.intact()  # a device may read what is freed here
        for held in (self._arriving, self._storing, self._free, self._messages):
            held.clear()

    def _connect(self) -> None:
        device, patience = self._sink.device, self._timeouts.handshake
        size = max(CHUNK_BYTES, self._page_bytes)
        self._free.extend(self._sink.staging(size) for _ in range(RECEIVING_BUFFERS))
        host, begun = urlsplit(self._peer).hostname or "", time.monotonic()
        store = join_store(host, self._port, patience)
        port = int(store.get(_CHANNEL_KEY))
        self._channel = dial(host, port, _left(begun, patience), self._timeouts.push)
        left = _left(begun, patience)
        self._group = join_group(self._backend, store, DECODE_RANK, device, left, patience)
        greeting = torch.zeros(_GREETING_WORDS, dtype=torch.int64, device=device)
        for _ in range(self._group.lanes):
            pending = self._group.recv(greeting)
            _wait(pending, begun, patience, self._cancelled, f"{self._peer} to join")

    def _turn(self) -> None:
        """Go on with whatever can go on, else wait for a message or a moment.

        Messages are looked for first: the rows that one announces cannot be sent before they are
        begun here, and what a moment's pause would cost them the wire stands idle.
        """
        assert self._channel is not None
        self._messages.extend(self._channel.receive())
        if self._take() or self._store_first() or self._free_first():
            self._progressed = time.monotonic()
        elif self._owed and not self._ends():  # nobody waits for credit, a room's end is waited for
            self._channel.send(Credit(self._owed))
            self._owed = 0
        elif self._busy():
            time.sleep(0 if self._hurries() else _POLL_SECONDS)
        else:
            self._messages.extend(self._channel.receive(waits=True))

    def _take(self) -> bool:
        """Do what the next message says, if its time has come."""
        if not self._messages:
            return False
        message, payload = self._messages[0]
        if isinstance(message, Chunk):
            if not self._free:
                return False
            self._begin(message)
        elif isinstance(message, Done):
            if self._busy():
                return False
            self._end(message, payload)
        else:
            raise TransferError(f"{message} announces no rows")
        self._messages.popleft()
        return True

    def _end(self, done: Done, metadata: bytes) -> None:
        assert self._channel is not None
        if self._handler.on_done(self._peer, done, memoryview(metadata)):
            self._channel.send(Ack(done.room))

    def _ends(self) -> bool:
        """Whether a room's end waits for what is here or on its way."""
        return bool(self._messages) and isinstance(self._messages[0][0], Done)

    def _hurries(self) -> bool:
        """Whether a pause would delay a room: no more is on its way than what comes next."""
        last = self._ends() or len(self._arriving) + len(self._storing) == 1
        return last and time.monotonic() < self._progressed + _HURRY_SECONDS

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
        if not self._storing:
            return False
        alone = self._ends() and not self._arriving  # a device may be waited for
        if not (alone or self._storing[0].staging.stored()):
            return False
        arrival = self._storing.popleft()
        self._handler.on_stored(self._peer, arrival.chunk, arrival.rows)
        self._free.append(arrival.staging)
        self._owed += arrival.rows.nbytes
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


def _left(begun: float, timeout: float) -> float:
    """Seconds of a time-out, and never none: what takes no time may still be done."""
    return max(begun + timeout - time.monotonic(), _LEAST_SECONDS)


def _wait(
    pending: Pending, begun: float, timeout: float, cancelled: threading.Event, what: str
) -> None:
    deadline = begun + timeout
    while not pending.done():
        if cancelled.is_set():
            raise TransferAborted(f"stopped waiting for {what}")
        if time.monotonic() > deadline:
            raise TransferTimeout(_waited(timeout, what))
        time.sleep(_POLL_SECONDS)


def _waited(timeout: float, what: str) -> str:
    return f"waited {timeout:g} s for {what}; raise --transfer-timeout to wait longer"
