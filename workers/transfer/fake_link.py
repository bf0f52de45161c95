"""Links inside one process: the same order and the same events as over ZMQ, without sockets."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tpla.core.messages import Message, decode, encode
from tpla.workers.transfer.protocol import LinkHandler

_TICK_SECONDS = 0.02


class FakeLink:
    """One end. ``FakeLink()`` serves; ``FakeLink(name)`` connects to servers by their endpoint."""

    _servers: dict[str, FakeLink] = {}  # noqa: RUF012  (the network of this process)

    def __init__(self, name: str = "") -> None:
        self.endpoint = f"fake://{id(self):x}"
        self._name = name
        self._peers: dict[str, FakeLink] = {}
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._handler: LinkHandler | None = None
        if not name:
            FakeLink._servers[self.endpoint] = self

    def start(self, handler: LinkHandler) -> None:
        """Begin to deliver to ``handler``."""
        self._handler = handler
        self._thread.start()

    def connect(self, endpoint: str) -> str:
        """Join the server at ``endpoint``; a server that is not there is a lost peer."""
        server = FakeLink._servers.get(endpoint)
        if server is None:
            self._inbox.put(lambda: self._lost(endpoint))
        else:
            self._peers[endpoint] = server
            server._peers[self._name] = self
        return endpoint

    def disconnect(self, peer: str) -> None:
        """Drop a peer without an event."""
        self._peers.pop(peer, None)

    def send(
        self, peer: str, message: Message, payload: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Deliver a copy on the other end's thread."""
        other = self._peers.get(peer)
        if other is None:
            self._inbox.put(lambda: self._lost(peer))
            return
        frame = encode(message)
        copied = None if payload is None else memoryview(payload.tobytes())
        sender = self._name or self.endpoint
        other._inbox.put(lambda: other._receive(sender, frame, copied))

    def close(self) -> None:
        """Stop, and let every peer know as a closed connection would."""
        FakeLink._servers.pop(self.endpoint, None)
        for peer in self._peers.values():
            gone = self._name or self.endpoint
            peer._inbox.put(lambda peer=peer, gone=gone: peer._lost(gone))  # type: ignore[misc]
        self._peers.clear()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(5)

    def _receive(self, peer: str, frame: bytes, payload: memoryview | None) -> None:
        assert self._handler is not None
        self._handler.on_message(peer, decode(frame), payload)

    def _lost(self, peer: str) -> None:
        self._peers.pop(peer, None)
        assert self._handler is not None
        self._handler.on_disconnect(peer)

    def _run(self) -> None:
        assert self._handler is not None
        next_tick = time.monotonic()
        while True:
            try:
                task = self._inbox.get(timeout=max(0.0, next_tick - time.monotonic()))
                if task is None:
                    return
                task()
            except queue.Empty:
                pass
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + _TICK_SECONDS
                self._handler.on_tick()
