"""What the threads at both ends of a pair's group tell each other: messages on a socket of theirs.

Over the link a message wakes four threads on its way, the link's own and ZMQ's at either end, which
takes two to three tenths of a millisecond; a chunk of rows takes 0.4. Here it wakes the one that it
is for. Prefill listens, decode dials, and either may close its end, which the other notices.
"""

from __future__ import annotations

import contextlib
import socket
import struct

import msgspec

from tpla.core.errors import TransferError
from tpla.core.messages import Message, decode, encode

_FRAME = struct.Struct("<II")  # bytes of the message, and of its payload
_TIMEVAL = struct.Struct("@ll")
_READ_BYTES = 1 << 16


class PairChannel:
    """One end. Messages are sent by one thread at a time, and received by one.

    Every call is one system call. Python's own time-outs take two, between which a thread that was
    just told of a room's end runs first.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        seconds = int(timeout)
        patience = _TIMEVAL.pack(seconds, int((timeout - seconds) * 1e6))
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._received = bytearray()

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Send a message; it waits only for a peer that has long stopped reading.

        Raises:
            TransferError: the peer is gone, or has not read for as long as the time-out.
        """
        frame = encode(message)
        try:
            self._connection.sendall(_FRAME.pack(len(frame), len(payload)) + frame + payload)
        except BlockingIOError as error:
            raise TransferError("the other rank reads nothing of what it is told") from error
        except OSError as error:
            raise TransferError(f"the other rank cannot be told about rows: {error}") from error

    def receive(self, waits: bool = False) -> list[tuple[Message, bytes]]:
        """Messages that are here, with their payloads.

        Args:
            waits: for as long as nothing is here at all.

        Raises:
            TransferError: either end is shut, or the peer sent what is no message.
        """
        try:
            read = self._connection.recv(_READ_BYTES, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise TransferError(f"the other rank's connection broke: {error}") from error
        if not read:
            raise TransferError("the connection to the other rank is closed")
        self._received += read
        return self._whole()

    def shut(self) -> None:
        """End what waits here or at the peer; from any thread."""
        with contextlib.suppress(OSError):  # it is shut, or the peer is gone
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back when no thread uses it any more."""
        self._connection.close()

    def _whole(self) -> list[tuple[Message, bytes]]:
        messages, start = [], 0
        while len(self._received) >= (body := start + _FRAME.size):
            frame_bytes, payload_bytes = _FRAME.unpack_from(self._received, start)
            middle, stop = body + frame_bytes, body + frame_bytes + payload_bytes
            if len(self._received) < stop:
                break
            messages.append((_decoded(self._received[body:middle]), self._received[middle:stop]))
            start = stop
        del self._received[:start]
        return [(message, bytes(payload)) for message, payload in messages]


def listen() -> socket.socket:
    """Prefill's: a port for one decode rank, on every address that its group's store has."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1)


def accept(listener: socket.socket, handshake: float, timeout: float) -> PairChannel:
    """The decode rank that dials within ``handshake`` seconds; ``timeout`` is the channel's.

    Raises:
        TransferError: none did, or :func:`refuse` was called.
    """
    listener.settimeout(handshake)
    try:
        connection, _ = listener.accept()
    except OSError as error:
        raise TransferError(f"the decode rank did not dial: {error}") from error
    return PairChannel(connection, timeout)


def refuse(listener: socket.socket) -> None:
    """End :func:`accept`, which raises; from any thread."""
    with contextlib.suppress(OSError):  # it is closed
        listener.shutdown(socket.SHUT_RDWR)


def dial(host: str, port: int, handshake: float, timeout: float) -> PairChannel:
    """Decode's; tries for ``handshake`` seconds, ``timeout`` is the channel's.

    Raises:
        TransferError: nobody listens there.
    """
    try:
        connection = socket.create_connection((host, port), handshake)
    except OSError as error:
        raise TransferError(f"no prefill rank at {host}:{port}: {error}") from error
    return PairChannel(connection, timeout)


def _decoded(frame: bytearray) -> Message:
    try:
        return decode(bytes(frame))
    except msgspec.DecodeError as error:
        raise TransferError(f"the other rank sent what is no message: {error}") from error
