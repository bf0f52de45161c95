"""The thread of a prefill rank that sends to one decode rank."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tpla.core.errors import TransferError
from tpla.core.latent_layout import CacheLayout
from tpla.core.messages import Message
from tpla.workers.transfer.protocol import Outbox, Pages

logger = logging.getLogger(__name__)


_LOOK_SECONDS = 0.001


class Written(Protocol):
    """A mark in a device's work, as :class:`torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether all that was asked of the device before it is done."""


@dataclass(frozen=True, eq=False)
class Task:
    """Pages of a room from ``page_start`` on; ``metadata`` comes with the last ones.

    The device may still be writing the pages until ``written``; None if they are complete.
    """

    room: int
    page_start: int
    pages: Pages
    metadata: bytes | None
    written: Written | None = None


class TaskSender(Protocol):
    """Does the work on the pusher's thread."""

    def send_task(self, pusher: Pusher, task: Task) -> None:
        """Send a task; a TransferError means that the outbox is of no use any more."""

    def lose(self, pusher: Pusher, error: TransferError) -> None:
        """Nothing more can be sent."""

    def abort(self, room: int, reason: str) -> None:
        """Give the room up."""

    def answered(self, pusher: Pusher, message: Message) -> None:
        """What the decode rank says; on a thread of the outbox."""

    def left(self, pusher: Pusher) -> None:
        """The decode rank is gone; likewise."""


class Pusher:
    """Sends to one decode rank, within the credit that it grants.

    Implements :class:`~tpla.workers.transfer.protocol.OutboxHandler`: what comes through the outbox
    is told to the sender as its own, since the rank may have greeted anew and have another.
    """

    def __init__(self, peer: str, layout: CacheLayout, outbox: Outbox, sender: TaskSender) -> None:
        self.peer = peer
        self.layout = layout
        self.outbox = outbox
        self.last_heard = time.monotonic()
        self._sender = sender
        self._credit = outbox.window_bytes
        self._tasks: deque[Task] = deque()
        self._condition = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"tpla-push-{peer}", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether somebody has ended this, who has failed its rooms as well."""
        return self._stopped

    def submit(self, task: Task) -> None:
        """Queue a task."""
        with self._condition:
            self._tasks.append(task)
            self._condition.notify_all()

    def grant(self, payload_bytes: int) -> None:
        """Credit came back."""
        with self._condition:
            self._credit += payload_bytes
            self._condition.notify_all()

    def take_credit(self, payload_bytes: int, timeout: float) -> bool:
        """Wait for credit; a payload larger than the window goes alone."""
        needed = min(payload_bytes, self.outbox.window_bytes)
        with self._condition:
            granted = self._condition.wait_for(
                lambda: self._stopped or self._credit >= needed, timeout
            )
            if not granted or self._stopped:
                return False
            self._credit -= payload_bytes
            return True

    def wait_for(self, done: Callable[[], bool], timeout: float) -> bool:
        """Look until something is done; false if it is not in time, or this is to stop."""
        deadline = time.monotonic() + timeout
        while not done():
            with self._condition:
                if self._stopped or time.monotonic() > deadline:
                    return False
                self._condition.wait(_LOOK_SECONDS)
        return True

    def on_answer(self, message: Message) -> None:
        """As the protocol's."""
        self._sender.answered(self, message)

    def on_gone(self) -> None:
        """As the protocol's."""
        self._sender.left(self)

    def stop(self) -> None:
        """End the thread; a chunk on its way may be cut off."""
        with self._condition:
            self._stopped = True
            self._tasks.clear()
            self._condition.notify_all()
        self.outbox.cancel()

    def join(self, timeout: float) -> bool:
        """Wait until the thread has given the outbox back; whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.outbox.connect(self)
            while (task := self._next_task()) is not None:
                self._send(task)
        except TransferError as error:
            self._lose(error)
        except Exception as error:  # a device without memory for staging, for one
            self._lose(TransferError(f"its outbox broke: {error!r}"))
        finally:
            self.outbox.close()

    def _lose(self, error: TransferError) -> None:
        if not self._stopped:
            logger.error("no more KV rows for decode rank %s: %s", self.peer, error)
            self._sender.lose(self, error)

    def _next_task(self) -> Task | None:
        with self._condition:
            self._condition.wait_for(lambda: self._stopped or self._tasks)
            return None if self._stopped else self._tasks.popleft()

    def _send(self, task: Task) -> None:
        try:
            self._sender.send_task(self, task)
        except TransferError:
            raise
        except Exception as error:
            logger.exception("KV push of room %d failed", task.room)
            self._sender.abort(task.room, f"push failed: {error!r}")
