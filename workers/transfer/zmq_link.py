"""Links over ZMQ: prefill binds a ROUTER, decode connects one DEALER to each prefill rank.

All sockets of a link belong to one thread; other threads hand it commands through a queue and wake
it with a socket pair. Peers that die are noticed by TCP at once, hosts that vanish by ZMTP
heartbeats.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils.monitor import recv_monitor_message

from tpla.core.messages import Message, decode, encode
from tpla.workers.transfer.allocator import keep_freed_messages
from tpla.workers.transfer.protocol import LinkHandler

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
_MESSAGES_PER_TURN = 64
_JOIN_SECONDS = 5.0
_COMPLAINT_SECONDS = 10.0


class _ZmqLink:
    """The thread, its command queue and what both kinds of link share."""

    def __init__(self, name: str) -> None:
        keep_freed_messages()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = threading.Event()
        self._handler: LinkHandler | None = None
        self._next_complaint = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, handler: LinkHandler) -> None:
        """Begin to deliver to ``handler``."""
        self._handler = handler
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close every socket."""
        self._closing.set()
        if self._thread.is_alive():
            self._wake()
            self._thread.join(_JOIN_SECONDS)
        self._context.destroy(linger=0)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"\0")
        except BlockingIOError:
            pass  # wakes are pending already
        except OSError:
            if not self._closing.is_set():
                raise

    def _run(self) -> None:
        assert self._handler is not None
        next_tick = time.monotonic()
        while not self._closing.is_set():
            wait_ms = int(max(0.0, next_tick - time.monotonic()) * 1000) + 1
            ready = self._poller.poll(wait_ms)
            # Whatever one of them meets, the others are done: a peer that sends what is unheard of
            # must not keep rows from being sent, or time-outs from being seen.
            self._guarded(self._serve_all, [source for source, _ in ready])
            while self._commands:
                self._guarded(self._commands.popleft())
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + _TICK_SECONDS
                self._guarded(self._handler.on_tick)

    def _guarded(self, step: Callable[..., None], *arguments: object) -> None:
        try:
            step(*arguments)
        except Exception:
            if not self._closing.is_set():
                logger.exception("KV link: unexpected error; the link goes on")

    def _serve_all(self, ready: list[object]) -> None:
        for source in ready:
            if source == self._wake_receiver.fileno():
                self._drain_wakes()
            else:
                self._serve(source)

    def _drain_wakes(self) -> None:
        try:
            while self._wake_receiver.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _serve(self, source: object) -> None:
        raise NotImplementedError

    def _complain(self, what: str) -> None:
        """Log what a stranger does, but not as often as it does it."""
        if time.monotonic() >= self._next_complaint:
            self._next_complaint = time.monotonic() + _COMPLAINT_SECONDS
            logger.error("KV link: %s", what)

    def _deliver(self, peer: str, frames: list[zmq.Frame]) -> None:
        assert self._handler is not None
        try:
            message = decode(frames[0].bytes)
        except msgspec.DecodeError as error:
            self._complain(f"{peer} sent something that is no message ({error})")
            return
        payload = memoryview(frames[1].buffer) if len(frames) > 1 else None
        self._handler.on_message(peer, message, payload)


class ZmqServerLink(_ZmqLink):
    """Prefill's end."""

    def __init__(self, host: str) -> None:
        super().__init__("tpla-kv-prefill")
        self._socket = self._context.socket(zmq.ROUTER)
        _tune(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        bracketed = f"[{host}]" if ":" in host else host
        self.port: int = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        self._poller.register(self._socket, zmq.POLLIN)

    def connect(self, endpoint: str) -> str:
        """Servers do not connect."""
        raise NotImplementedError("a prefill rank is connected to, it does not connect")

    def disconnect(self, peer: str) -> None:
        """ROUTER forgets a peer when its connection closes; nothing to do."""

    def send(
        self, peer: str, message: Message, payload: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Queue a message; the payload must not change afterwards."""
        frames: list[bytes | memoryview] = [peer.encode(), encode(message)]
        if payload is not None:
            frames.append(payload.data)
        self._submit(lambda: self._send_now(peer, frames))

    def _send_now(self, peer: str, frames: list[bytes | memoryview]) -> None:
        try:
            self._socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            assert self._handler is not None
            self._handler.on_disconnect(peer)

    def _serve(self, source: object) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            try:
                peer = frames[0].bytes.decode()
            except UnicodeDecodeError:  # ZMQ's own name for a peer that gives itself none
                self._complain("a peer without a name, which is no decode rank, sent something")
                continue
            self._deliver(peer, frames[1:])


class ZmqClientLink(_ZmqLink):
    """Decode's end: one DEALER a prefill rank, named by its endpoint."""

    def __init__(self, identity: str) -> None:
        super().__init__("tpla-kv-decode")
        self._identity = identity
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}

    def connect(self, endpoint: str) -> str:
        """Open a connection to ``tcp://host:port`` if there is none."""
        self._submit(lambda: self._connect_now(endpoint))
        return endpoint

    def disconnect(self, peer: str) -> None:
        """Close the connection to ``peer``."""
        self._submit(lambda: self._close_now(peer))

    def send(
        self, peer: str, message: Message, payload: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Queue a message; dropped when the peer is not connected."""
        frames: list[bytes | memoryview] = [encode(message)]
        if payload is not None:
            frames.append(payload.data)
        self._submit(lambda: self._send_now(peer, frames))

    def _connect_now(self, endpoint: str) -> None:
        if endpoint in self._sockets:
            return
        dealer = self._context.socket(zmq.DEALER)
        _tune(dealer)
        # A new identity for each connection: prefill must not mistake it for a dead predecessor.
        dealer.setsockopt(zmq.IDENTITY, f"{self._identity}/{os.urandom(4).hex()}".encode())
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)  # a lost peer is reported, never retried silently
        dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        dealer.connect(endpoint)
        self._sockets[endpoint], self._monitors[endpoint] = dealer, monitor
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _close_now(self, endpoint: str) -> None:
        dealer, monitor = self._sockets.pop(endpoint, None), self._monitors.pop(endpoint, None)
        if dealer is None or monitor is None:
            return
        self._poller.unregister(dealer)
        self._poller.unregister(monitor)
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)

    def _send_now(self, peer: str, frames: list[bytes | memoryview]) -> None:
        dealer = self._sockets.get(peer)
        if dealer is None:
            return
        try:
            dealer.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            self._lost(peer)

    def _serve(self, source: object) -> None:
        for endpoint, monitor in list(self._monitors.items()):
            if source is monitor:
                recv_monitor_message(monitor)  # only loss events are subscribed to
                self._drain(endpoint)
                self._lost(endpoint)
                return
        for endpoint, dealer in list(self._sockets.items()):
            if source is dealer:
                self._drain(endpoint)
                return

    def _drain(self, endpoint: str) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            dealer = self._sockets.get(endpoint)
            if dealer is None:
                return
            try:
                frames = dealer.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._deliver(endpoint, frames)

    def _lost(self, endpoint: str) -> None:
        self._close_now(endpoint)
        assert self._handler is not None
        self._handler.on_disconnect(endpoint)


def _tune(peer_socket: zmq.Socket[bytes]) -> None:
    # Queues are bounded by the protocol's credit, not by dropping.
    peer_socket.setsockopt(zmq.SNDHWM, 0)
    peer_socket.setsockopt(zmq.RCVHWM, 0)
    peer_socket.setsockopt(zmq.LINGER, 0)
    peer_socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    peer_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    peer_socket.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)
    peer_socket.setsockopt(zmq.SNDBUF, 4 << 20)
    peer_socket.setsockopt(zmq.RCVBUF, 4 << 20)
