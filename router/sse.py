"""Server-sent events, as far as OpenAI's API uses them: ``data:`` lines and blank lines."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"
MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLong(ValueError):
    """An event that never ends."""


class EventParser:
    """Turns chunks of bytes, cut anywhere, into the data of whole events."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Data of each event that ``chunk`` completes.

        Raises:
            EventTooLong: 16 MiB have arrived without the end of an event.
        """
        self._buffer += chunk
        while (end := self._end_of_event()) is not None:
            block = bytes(self._buffer[: end[0]])
            del self._buffer[: end[1]]
            data = _data_of(block)
            if data is not None:
                yield data
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event exceeds {MAX_EVENT_BYTES} bytes")

    def _end_of_event(self) -> tuple[int, int] | None:
        ends = [
            (at, at + len(mark))
            for mark in (b"\n\n", b"\r\n\r\n")
            if (at := self._buffer.find(mark)) >= 0
        ]
        return min(ends, default=None)


def encode(data: bytes) -> bytes:
    """``data`` as one event."""
    return b"data: " + data + b"\n\n"


def _data_of(block: bytes) -> bytes | None:
    lines = [line for line in block.splitlines() if line.startswith(b"data:")]
    if not lines:
        return None
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
