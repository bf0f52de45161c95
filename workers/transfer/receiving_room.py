"""What of one request has arrived at a decode rank, and whether it is what was sent."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tpla.core.errors import ChecksumMismatch, TransferError
from tpla.core.messages import Chunk, Done
from tpla.workers.transfer.digest import room_digest
from tpla.workers.transfer.protocol import ArrivedRows, Pages, PageSink, Reservation


@dataclass
class ReceivingRoom:
    """One request. It begins as expected, is reserved, and ends done, failed or aborting.

    ``storing`` are rows on their way into the pool, in order, each with whether that was begun:
    beginning waits for devices, and nobody holds the receiver's lock meanwhile.
    """

    endpoints: tuple[str, ...]
    deadline: float
    reservation: Reservation | None = None
    digests: list[int] = field(default_factory=list)
    storing: dict[ArrivedRows, threading.Event] = field(default_factory=dict)
    pages_received: int = 0
    closed: bool = False
    done: bool = False
    forgotten: bool = False
    abort_error: TransferError | None = None
    unacknowledged_aborts: set[str] = field(default_factory=set)

    def takes_rows_from(self, peer: str) -> bool:
        """Whether the prefill rank ``peer`` was asked for the rows, and they are still wanted."""
        return not self.closed and self.reservation is not None and self.reservation.source == peer

    def wait_for_rows(self) -> None:
        """Return when nothing that is on its way is written any more; the room is closed."""
        for rows, begun in self.storing.items():
            begun.wait()  # not longer than the device that the rows themselves wait for
            rows.intact()

    def pages_of(self, chunk: Chunk, nbytes: int, sink: PageSink) -> Pages | None:
        """Where ``nbytes`` bytes of rows belong; None if they cannot be the chunk that is next."""
        assert self.reservation is not None
        pages = self.reservation.pages[chunk.page_start : chunk.page_start + chunk.pages]
        fits = (
            nbytes == chunk.pages * sink.page_size * sink.layout.token_bytes
            and chunk.sequence == len(self.digests) + len(self.storing)
            and len(pages) == chunk.pages
        )
        return pages if fits else None

    def is_complete(self, done: Done, metadata: memoryview, metadata_bytes: int) -> bool:
        """Whether every chunk, and the metadata, are those that prefill has sent."""
        assert self.reservation is not None
        return (
            done.chunks == len(self.digests)
            and done.pages == self.pages_received == len(self.reservation.pages)
            and len(metadata) == metadata_bytes
            and done.digest == room_digest(done.room, self.digests, metadata)
        )

    def incomplete(self, done: Done) -> ChecksumMismatch:
        """The error of a room that ended otherwise."""
        return ChecksumMismatch(
            f"room {done.room}: {len(self.digests)} chunks with {self.pages_received} pages "
            f"arrived, prefill sent {done.chunks} with {done.pages}, or the digest differs; "
            "the request must be repeated"
        )


def damaged(chunk: Chunk) -> ChecksumMismatch:
    """The error of a chunk whose rows are not those that were sent."""
    pages = f"{chunk.page_start}-{chunk.page_start + chunk.pages - 1}"
    return ChecksumMismatch(
        f"room {chunk.room}, chunk {chunk.sequence}, pages {pages}: "
        "the rows that arrived are not those that were sent; the request must be repeated"
    )
