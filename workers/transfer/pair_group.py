"""A torch process group of two: one prefill rank (0) and one decode rank (1) of one host.

Each connection has a group and a store of its own, so that nothing of a dead peer reaches its
successor. Every call of a group belongs to one thread; joining and the first operation may block
there until both ranks are present.
"""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from tpla.core.errors import TransferError

PREFILL_RANK, DECODE_RANK = 0, 1
_LOOPBACK = "127.0.0.1"
_NCCL_PATIENCE = timedelta(days=1)
"""Of torch's watchdog, which ends the whole process; our own time-outs come long before."""

_GLOO_WAITS = 6
"""Gloo waits one time-out for the other rank's address and five for its connection."""


class Pending(Protocol):
    """A send or receive under way."""

    def done(self) -> bool:
        """Whether it is complete.

        Raises:
            TransferError: it failed, and so will all that follow in this group.
        """


class PairGroup(Protocol):
    """Contiguous tensors to and from the other rank, each way in the order of the calls.

    Attributes:
        lanes: calls take turns between so many; those of one wait for each other on the device.
    """

    lanes: int

    def send(self, tensor: torch.Tensor, ready: torch.cuda.Event | None = None) -> Pending:
        """Begin to send all of ``tensor``, which must not change until it is done.

        Args:
            tensor: to send.
            ready: what the device comes to before; None when ``tensor`` is complete.
        """

    def recv(self, tensor: torch.Tensor) -> Pending:
        """Begin to fill all of ``tensor``."""

    def abort(self) -> None:
        """End what is pending; the group is of no use afterwards, the device is."""


def host_store(timeout: float) -> TCPStore:
    """Prefill's: where one decode rank meets it; ``port`` says where it listens."""
    return TCPStore(
        _LOOPBACK, 0, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False
    )


def join_store(host: str, port: int, timeout: float) -> TCPStore:
    """Decode's; waits up to ``timeout`` seconds for the port to answer.

    Raises:
        TransferError: it does not.
    """
    try:
        return TCPStore(host, port, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    except RuntimeError as error:
        raise TransferError(f"no rendezvous at {host}:{port}: {error}") from error


def join_group(
    backend: str, store: TCPStore, rank: int, device: torch.device, left: float, timeout: float
) -> PairGroup:
    """Make the group of ``backend``, ``nccl`` for CUDA devices or ``gloo`` for the CPU.

    Nothing can end this but the other rank and the time: call it when that rank is known to join.

    Args:
        backend: as above.
        store: where both ranks meet.
        rank: one's own.
        device: that tensors will lie on.
        left: seconds for the other rank to join; gloo's only, NCCL joins at the first operation.
        timeout: seconds for one operation; gloo's only, NCCL's can be asked and aborted.

    Raises:
        TransferError: the other rank did not join.
    """
    try:
        if backend == "nccl":
            return NcclGroup(store, rank, device)
        return GlooGroup(store, rank, left, timeout)
    except RuntimeError as error:
        raise TransferError(f"no {backend} group with the other rank: {error}") from error


class NcclGroup:
    """Between two GPUs. Operations of a lane run on NCCL's own stream, behind its own alone.

    A lane pauses after each send until both GPUs have begun the next, a twentieth of the time in
    chunks of 128 MiB; another lane sends meanwhile. Each one's kernels take processors of both
    GPUs while they run, so there are no more than it takes.
    """

    lanes = 2

    def __init__(self, store: TCPStore, rank: int, device: torch.device) -> None:
        from torch.distributed import ProcessGroupNCCL

        self._other = 1 - rank
        self._lanes: list[tuple[Any, torch.cuda.Stream]] = []
        for lane in range(self.lanes):
            options = ProcessGroupNCCL.Options()
            options._timeout = _NCCL_PATIENCE
            # Else NCCL's kernels queue for the processors behind a chunk's gather or scatter.
            options.is_high_priority_stream = True
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                group = ProcessGroupNCCL(PrefixStore(f"lane{lane}", store), rank, 2, options)
            self._lanes.append((group, stream))
        self._turns = itertools.cycle(self._lanes)

    def send(self, tensor: torch.Tensor, ready: torch.cuda.Event | None = None) -> Pending:
        """As the protocol's."""
        group, stream = next(self._turns)
        if ready is not None:
            stream.wait_event(ready)
        return self._begin(group.send, tensor, stream)

    def recv(self, tensor: torch.Tensor) -> Pending:
        """As the protocol's; nothing may use ``tensor`` any more when this is called."""
        group, stream = next(self._turns)
        return self._begin(group.recv, tensor, stream)

    def abort(self) -> None:
        """As the protocol's."""
        for group, _ in self._lanes:
            group.abort()

    def _begin(self, operation: Any, tensor: torch.Tensor, stream: torch.cuda.Stream) -> _NcclWork:
        try:
            with torch.cuda.stream(stream):
                return _NcclWork(operation([tensor], self._other, 0))
        except RuntimeError as error:
            raise TransferError(f"NCCL: {error}") from error


class _NcclWork:
    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        try:
            if not self._work.is_completed():
                return False
            self._work.wait()  # complete: raises what went wrong, if anything did
        except RuntimeError as error:
            raise TransferError(f"NCCL: {error}") from error
        return True


class GlooGroup:
    """Between two processes without GPUs, for tests.

    Gloo can neither be asked whether an operation is complete nor be told to end it, so a thread
    waits for each one, ``timeout`` seconds at most.
    """

    lanes = 1

    def __init__(self, store: TCPStore, rank: int, left: float, timeout: float) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=left / _GLOO_WAITS)
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        self._other = 1 - rank
        self._timeout = timedelta(seconds=timeout)
        self._group: Any = ProcessGroupGloo(store, rank, 2, options)

    def send(self, tensor: torch.Tensor, ready: torch.cuda.Event | None = None) -> Pending:
        """As the protocol's; nothing is ever under way on the CPU."""
        return self._begin(self._group.send, tensor)

    def recv(self, tensor: torch.Tensor) -> Pending:
        """As the protocol's."""
        return self._begin(self._group.recv, tensor)

    def abort(self) -> None:
        """Close the connection as soon as nothing waits any more."""
        self._group = None

    def _begin(self, operation: Any, tensor: torch.Tensor) -> _GlooWork:
        try:
            return _GlooWork(operation([tensor], self._other, 0), self._timeout)
        except RuntimeError as error:
            raise TransferError(f"gloo: {error}") from error


class _GlooWork:
    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._error: RuntimeError | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._wait, args=(work, timeout), daemon=True).start()

    def done(self) -> bool:
        if not self._ended.is_set():
            return False
        if self._error is not None:
            raise TransferError(f"gloo: {self._error}") from self._error
        return True

    def _wait(self, work: Any, timeout: timedelta) -> None:
        try:
            work.wait(timeout)
        except RuntimeError as error:
            self._error = error
        self._ended.set()
