"""Messages between a prefill rank (which serves) and the decode ranks (which connect to it).

One connection a pair of ranks carries both directions, with transfer ``nccl`` a second one what is
said of rows: Chunk, Done and their answers Credit and Ack::

    decode                                     prefill
      Hello(layout, fingerprint, ...)  ──────>            handshake, once a connection
                        <──────  Welcome | Refuse
                        <──────  Dropped                  no handshake, or not any more
      Reserve(room, pages)             ──────>            pages are allocated on decode
                        <──────  Chunk + payload          as prefill proceeds
      Credit(bytes)                    ──────>            payload is in the pool
                        <──────  Done + payload           counts, checksum; first token
      Ack                              ──────>            verified, prefill frees its pages
      Abort            <──────────────────────>           either side gives up
      AbortAck         <──────────────────────>           no byte of the room lands after this
      Ping(rooms)                      ──────>            keeps both leases alive
                        <──────  Pong(rooms)

A Chunk's rows lie as decode's own :class:`~tpla.core.latent_layout.CacheLayout` says; with transfer
``zmq`` they are its payload, with ``nccl`` they go from GPU to GPU. The payload of Done is SGLang's
metadata of the first token. Digests are xxh3-64 of header and payload; rows that go from GPU to GPU
end with one that the device made of them, beginning with that of the header.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 5


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of every message; ``tag`` is the class name."""


class Hello(_Message, frozen=True):
    """Decode's offer, checked by prefill before any request.

    Its fields stay the same from version to version, so that another version is refused by name.
    """

    version: int
    instance_id: str
    fingerprint: str
    layout: dict[str, Any]
    num_layers: int
    page_size: int
    metadata_bytes: int
    transfer: str


class Welcome(_Message, frozen=True):
    """Prefill accepts the offer; rows that do not come as payload come from ``data_port``."""

    instance_id: str
    data_port: int


class Refuse(_Message, frozen=True):
    """Prefill refuses the offer; ``reason`` names both values."""

    reason: str


class Dropped(_Message, frozen=True):
    """Prefill does not know this rank, or no longer: it must greet anew.

    It answers anything but a Hello, so one that comes while a Hello waits for its answer is stale.
    """

    reason: str


class Reserve(_Message, frozen=True):
    """Decode has allocated ``pages`` for ``room``; a dummy takes no bytes from this rank."""

    room: int
    pages: int
    destinations: int
    decode_prefix_len: int
    dummy: bool = False


class Chunk(_Message, frozen=True):
    """Rows of pages ``[page_start, page_start + pages)`` of the room follow.

    With transfer ``zmq`` they are the payload, with ``nccl`` what is received next. ``digest``
    covers the chunk's place and every byte of a payload; rows of ``nccl`` end with their own.
    """

    room: int
    sequence: int
    page_start: int
    pages: int
    digest: int


class Credit(_Message, frozen=True):
    """``payload_bytes`` more may be sent on this connection."""

    payload_bytes: int


class Done(_Message, frozen=True):
    """All chunks of the room are sent; ``digest`` covers every chunk digest and the metadata."""

    room: int
    chunks: int
    pages: int
    digest: int


class Ack(_Message, frozen=True):
    """The room's rows are verified and in the decode pool."""

    room: int


class Abort(_Message, frozen=True):
    """The sender of this message gives the room up."""

    room: int
    reason: str


class AbortAck(_Message, frozen=True):
    """The room is forgotten: nothing more is sent for it, nothing more is written."""

    room: int


class Ping(_Message, frozen=True):
    """Decode still wants these rooms."""

    rooms: list[int]


class Pong(_Message, frozen=True):
    """Prefill still works on these of the rooms it was asked about."""

    rooms: list[int]


Message = (
    Hello
    | Welcome
    | Refuse
    | Dropped
    | Reserve
    | Chunk
    | Credit
    | Done
    | Ack
    | Abort
    | AbortAck
    | Ping
    | Pong
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of a message."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """Message of :func:`encode`'s bytes.

    Raises:
        msgspec.DecodeError: not a message of this protocol.
    """
    return _decoder.decode(frame)
