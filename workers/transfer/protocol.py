"""What KV transfer is made of, independent of SGLang and of the data plane.

::

    KVSender (prefill rank)                      KVReceiver (decode rank)
        │ reads PageSource                           │ writes PageSink
        └── Link ═══════ one connection a pair ═══════ Link ──┘

A :class:`KVSender` or :class:`KVReceiver` keeps the state of each room (one request) and calls its
:class:`RoomEvents` from the link's thread. A :class:`Link` moves messages. Rows go from an
:class:`Outbox` to an :class:`Inbox`, which a data plane makes for each pair of ranks: with the
messages (:mod:`~tpla.workers.transfer.message_plane`) or between two GPUs
(:mod:`~tpla.workers.transfer.group_plane`). Faults are injected by a decorator around the outboxes
(:mod:`~tpla.workers.transfer.faults`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tpla.core.errors import TransferError
from tpla.core.latent_layout import CacheLayout
from tpla.core.messages import Chunk, Done, Message
from tpla.workers.transfer.digest import Place

Pages = npt.NDArray[np.int32]
Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Identity:
    """What both sides must agree on, and who says so.

    Attributes:
        instance_id: this process's id, new at each start.
        fingerprint: :func:`tpla.core.checkpoint.fingerprint` of the served checkpoint.
        metadata_bytes: size of the first token's metadata.
        kv_lora_rank: width of the whole latent.
        qk_rope_head_dim: width of the RoPE key.
    """

    instance_id: str
    fingerprint: str
    metadata_bytes: int
    kv_lora_rank: int
    qk_rope_head_dim: int


@dataclass(frozen=True, eq=False)
class Reservation:
    """Pages of one room on one decode rank, and the prefill ranks that serve it.

    Attributes:
        pages: the rank's pages, in order.
        source: endpoint that sends the rows.
        dummies: endpoints that only need to know (prefill TP larger than decode TP).
        destinations: decode ranks that ``source`` must hear from before it is ready.
        decode_prefix_len: leading tokens that decode already holds.
        vacated: until the device comes to this, it may still write to the pages for a request that
            had them before; None if it does not.
    """

    pages: Pages
    source: str
    dummies: tuple[str, ...]
    destinations: int
    decode_prefix_len: int
    vacated: torch.cuda.Event | None = None


class PageSource(Protocol):
    """Prefill's pool. What the engine wrote to a page must be complete before it is read."""

    num_layers: int
    page_size: int
    device: torch.device

    def read(self, pages: Pages, layout: CacheLayout) -> Rows:
        """Rows of all tokens of the pages, ``[bytes]`` as a decode rank's layout orders them."""

    def staging(self, layout: CacheLayout, nbytes: int) -> OutgoingStaging:
        """Memory of a chunk of at most ``nbytes`` bytes of rows in a decode rank's layout."""


class PageSink(Protocol):
    """A decode rank's pool."""

    page_size: int
    layout: CacheLayout
    device: torch.device

    def follow(self, event: torch.cuda.Event) -> None:
        """Store what comes from now on when the device has come to ``event``; nobody waits here."""

    def write(self, pages: Pages, rows: Rows, intact: Callable[[], bool]) -> bool:
        """Store rows ``[bytes]``, as :attr:`layout` orders them, complete on return.

        Returns:
            What ``intact`` says; it is asked before anything is stored, and if not, nothing is.
        """

    def staging(self, nbytes: int) -> IncomingStaging:
        """Memory of a chunk of at most ``nbytes`` bytes of rows in :attr:`layout`."""


class OutgoingStaging(Protocol):
    """Memory of one chunk at a prefill rank.

    Attributes:
        ready: what the device comes to when all that was begun is complete; None when it is.
    """

    ready: torch.cuda.Event | None

    def pack(self, pages: Pages, seed: int) -> torch.Tensor:
        """Begin to write the pages' rows; what the memory held must have been sent.

        Returns:
            uint8 bytes for the wire: the rows, zeros up to a whole word, and ``seed`` plus the
            :func:`~tpla.kernels.row_digest.row_digest` of all before it.
        """

    def damage(self) -> None:
        """Flip one bit of the rows after their digest was made (a drill)."""


class IncomingStaging(Protocol):
    """Memory of one chunk at a decode rank."""

    def wire(self, nbytes: int) -> torch.Tensor:
        """Where to receive ``nbytes`` bytes of rows as a prefill rank's staging has packed them."""

    def store(self, pages: Pages, nbytes: int, seed: int) -> None:
        """Begin to write the received rows to the pool's ``pages``, and to verify them."""

    def stored(self) -> bool:
        """Whether all that was begun is complete."""

    def intact(self) -> bool:
        """Wait until it is; whether the digest that came is that of the rows. From any thread."""


class LinkHandler(Protocol):
    """Receives what happens on a link, on the link's own thread."""

    def on_message(self, peer: str, message: Message, payload: memoryview | None) -> None:
        """A message arrived; ``payload`` is valid during the call."""

    def on_disconnect(self, peer: str) -> None:
        """The peer is gone; nothing more will come from it on this connection."""

    def on_tick(self) -> None:
        """Called several times a second, for time-outs and leases."""


class Link(Protocol):
    """Ordered messages to and from peers. Every method may be called from any thread."""

    def start(self, handler: LinkHandler) -> None:
        """Begin to deliver to ``handler``."""

    def connect(self, endpoint: str) -> str:
        """Open a connection if there is none; returns the peer's name. Clients only."""

    def disconnect(self, peer: str) -> None:
        """Drop a peer without an event."""

    def send(
        self, peer: str, message: Message, payload: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Queue a message; the payload must not change afterwards. Never blocks."""

    def close(self) -> None:
        """Stop the thread and close every socket."""


class ArrivedRows(Protocol):
    """Rows of one chunk that came from a prefill rank."""

    nbytes: int

    def begin(self, sink: PageSink, pages: Pages, place: Place, digest: int) -> None:
        """Begin to write them to ``pages``, if they can be those that were announced."""

    def intact(self) -> bool:
        """Wait until they are written; whether they were those. From any thread."""


class OutboxHandler(Protocol):
    """Receives what a decode rank says through an outbox, on a thread of that outbox."""

    def on_answer(self, message: Message) -> None:
        """Credit, or the acknowledgement of a room."""

    def on_gone(self) -> None:
        """The rank is gone; nothing more will come through this outbox."""


class Outbox(Protocol):
    """The way of chunks to one decode rank, in order. Its pusher's thread uses it.

    Attributes:
        chunk_bytes: payload of one chunk, at most, unless one page is larger.
        first_bytes: the same of a request's first chunk.
        window_bytes: payload that may be on its way.
        port: where decode joins, 0 for nowhere.
    """

    chunk_bytes: int
    first_bytes: int
    window_bytes: int
    port: int

    def connect(self, handler: OutboxHandler) -> None:
        """Wait until the decode rank has joined.

        Args:
            handler: gets the rank's answers where they do not come over the link.

        Raises:
            TransferError: it did not in time; like every error of the methods below, final.
        """

    def send(self, place: Place, pages: Pages, damaged: bool = False) -> int:
        """Announce, read and send a chunk in the decode rank's layout.

        Args:
            place: of the chunk.
            pages: to read, as many as the place says.
            damaged: flip one bit after the digest was made (a drill).

        Returns:
            The digest that was announced.
        """

    def finish(self, done: Done, metadata: bytes) -> None:
        """Tell a room's end, behind the chunks that were sent."""

    def cancel(self) -> None:
        """End a wait in any method with TransferAborted; from any thread."""

    def close(self) -> None:
        """Give up what is on its way, and the connection."""


class SendingPlane(Protocol):
    """Prefill's end of a data plane; both ends must be of one ``name``."""

    name: str
    source: PageSource

    def outbox(self, peer: str, layout: CacheLayout) -> Outbox:
        """The way to a decode rank; never blocks.

        Args:
            peer: the rank.
            layout: of its rows.
        """


class Inbox(Protocol):
    """What comes from one prefill rank: chunks and the ends of rooms, in order.

    It answers Credit when the handler has stored a chunk, and Ack when it says that a room is done.
    """

    def submit(self, message: Chunk | Done, payload: memoryview | None) -> None:
        """A message arrived over the link; ``payload`` is valid during the call. Never blocks.

        Raises:
            TransferError: rows of this plane are announced elsewhere.
        """

    def close(self) -> None:
        """Give up what is on its way; nothing is delivered afterwards but what is at hand."""

    def join(self, timeout: float) -> bool:
        """Wait until a closed inbox has ended, not from a handler; whether it has."""


class InboxHandler(Protocol):
    """Receives what came; on the thread of the link or of the inbox."""

    def on_rows(self, peer: str, chunk: Chunk, rows: ArrivedRows) -> None:
        """A chunk's rows are here, unverified: begin to store them."""

    def on_stored(self, peer: str, chunk: Chunk, rows: ArrivedRows) -> None:
        """What was begun with them is complete; afterwards their memory is used again."""

    def on_done(self, peer: str, done: Done, metadata: memoryview) -> bool:
        """The room's end, after all its rows; valid during the call. Whether it is complete."""

    def on_broken(self, peer: str, inbox: Inbox, error: TransferError) -> None:
        """Nothing more comes through this inbox."""


class ReceivingPlane(Protocol):
    """Decode's end of a data plane; both ends must be of one ``name``."""

    name: str
    sink: PageSink

    def inbox(self, peer: str, port: int, handler: InboxHandler) -> Inbox:
        """Join the prefill rank ``peer`` at ``port``; never blocks."""


class RoomEvents(Protocol):
    """What became of a room; called on the link's thread or a pusher's."""

    def on_ready(self, room: int, decode_prefix_len: int) -> None:
        """Sender only: every decode rank has reserved its pages."""

    def on_done(self, room: int, metadata: bytes) -> None:
        """The room is complete and acknowledged on every rank; ``metadata`` on the receiver."""

    def on_failed(self, room: int, error: TransferError) -> None:
        """The room is given up; no byte of it is written from now on.

        On a receiver also after ``on_done``, when another rank of the room gave it up.
        """


class KVSender(Protocol):
    """Prefill rank."""

    def open(self, room: int) -> None:
        """The engine has a request for this room."""

    def push(self, room: int, page_start: int, pages: Pages, metadata: bytes | None) -> None:
        """Send the room's pages from ``page_start``; ``metadata`` comes with the last ones."""

    def abort(self, room: int, reason: str) -> None:
        """Give the room up and tell the decode ranks."""

    def forget(self, room: int) -> None:
        """Drop every trace of a finished or failed room."""


class KVReceiver(Protocol):
    """Decode rank."""

    def greet(self, endpoint: str) -> None:
        """Connect and shake hands, if that has not begun."""

    def expect(self, room: int, endpoints: Sequence[str]) -> None:
        """The engine has a request for this room; keep prefill's lease on it alive."""

    def reserve(self, room: int, reservation: Reservation) -> None:
        """Pages are allocated: ask for the rows."""

    def abort(self, room: int, reason: str) -> None:
        """Give the room up; ``on_failed`` follows when prefill has acknowledged or is gone."""

    def fence(self, room: int) -> None:
        """Return once no byte of the room can be written any more."""

    def forget(self, room: int) -> None:
        """Drop every trace of a finished or failed room."""
