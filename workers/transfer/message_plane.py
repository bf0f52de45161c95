"""Rows that travel with the messages: any host, any device, through host memory."""

from __future__ import annotations

import numpy as np

from tpla.core.config import Transfer
from tpla.core.latent_layout import CacheLayout
from tpla.core.messages import Ack, Chunk, Credit, Done
from tpla.workers.transfer.chunk_rows import HostRows
from tpla.workers.transfer.digest import Place, chunk_digest
from tpla.workers.transfer.protocol import (
    InboxHandler,
    Link,
    OutboxHandler,
    Pages,
    PageSink,
    PageSource,
)
from tpla.workers.transfer.staging import DAMAGED_BIT

CHUNK_BYTES = 2 << 20
"""Payload of one message: large enough to amortise its cost, small enough to overlap stages."""

WINDOW_BYTES = 32 << 20
"""Payload that may be on its way to one decode rank."""

DEVICE_SHARE = 2
"""How many times as much both are for a pool on a GPU, which is asked for each chunk in turn."""


class MessageSendingPlane:
    """Implements :class:`~tpla.workers.transfer.protocol.SendingPlane` on a link."""

    name = Transfer.ZMQ.value

    def __init__(self, link: Link, source: PageSource) -> None:
        self.source = source
        self._link = link

    def outbox(self, peer: str, layout: CacheLayout) -> MessageOutbox:
        """As the protocol's; answers come over the link."""
        return MessageOutbox(self._link, self.source, peer, layout)


class MessageOutbox:
    """Sends a chunk's rows as the payload of its message. The link never blocks, nor does this."""

    port = 0

    def __init__(self, link: Link, source: PageSource, peer: str, layout: CacheLayout) -> None:
        share = 1 if source.device.type == "cpu" else DEVICE_SHARE
        self.chunk_bytes = self.first_bytes = share * CHUNK_BYTES
        self.window_bytes = share * WINDOW_BYTES
        self._link = link
        self._source = source
        self._peer = peer
        self._layout = layout

    def connect(self, handler: OutboxHandler) -> None:
        """The link is connected, and has a handler of its own."""

    def send(self, place: Place, pages: Pages, damaged: bool = False) -> int:
        """As the protocol's; the link keeps the rows until they are sent."""
        rows = self._source.read(pages, self._layout)
        digest = chunk_digest(place, rows.data)
        if damaged:
            rows[rows.nbytes // 2] ^= DAMAGED_BIT
        self._link.send(self._peer, Chunk(*place, digest), rows)
        return digest

    def finish(self, done: Done, metadata: bytes) -> None:
        """As the protocol's."""
        self._link.send(self._peer, done, np.frombuffer(metadata, dtype=np.uint8))

    def cancel(self) -> None:
        """No method waits."""

    def close(self) -> None:
        """The link closes by itself."""


class MessageReceivingPlane:
    """Implements :class:`~tpla.workers.transfer.protocol.ReceivingPlane`."""

    name = Transfer.ZMQ.value

    def __init__(self, link: Link, sink: PageSink) -> None:
        self.sink = sink
        self._link = link

    def inbox(self, peer: str, port: int, handler: InboxHandler) -> MessageInbox:
        """As the protocol's."""
        return MessageInbox(self._link, peer, handler)


class MessageInbox:
    """Hands each message on at once, on the link's thread."""

    def __init__(self, link: Link, peer: str, handler: InboxHandler) -> None:
        self._link = link
        self._peer = peer
        self._handler = handler

    def submit(self, message: Chunk | Done, payload: memoryview | None) -> None:
        """As the protocol's."""
        if isinstance(message, Chunk):
            rows = HostRows(payload)
            try:
                self._handler.on_rows(self._peer, message, rows)
            finally:
                self._handler.on_stored(self._peer, message, rows)
                self._link.send(self._peer, Credit(rows.nbytes))
        elif self._handler.on_done(self._peer, message, payload or memoryview(b"")):
            self._link.send(self._peer, Ack(message.room))

    def close(self) -> None:
        """Nothing is kept here."""

    def join(self, timeout: float) -> bool:
        """Nothing runs here."""
        return True
